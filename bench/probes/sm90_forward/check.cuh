// Checks a call: against the recurrence in fp64, and its bits in every way to ask for the same.
#pragma once

#include <cstring>

#include "tensors.cuh"

__global__ void widen(const bf16* from, float* to, int64_t n) {
  for (int64_t i = blockIdx.x * int64_t(blockDim.x) + threadIdx.x; i < n;
       i += int64_t(gridDim.x) * blockDim.x)
    to[i] = float(from[i]);
}
template <class X>
X* to_device(const std::vector<X>& x) {
  X* p;
  probe::check(cudaMalloc(&p, x.size() * sizeof(X)));
  probe::check(cudaMemcpy(p, x.data(), x.size() * sizeof(X), cudaMemcpyHostToDevice));
  return p;
}

struct Results {
  std::vector<bf16> o;
  std::vector<float> states;
};
template <class X>
bool same_bits(const std::vector<X>& a, const std::vector<X>& b, int64_t from, int64_t to) {
  return std::memcmp(a.data() + from, b.data() + from, size_t(to - from) * sizeof(X)) == 0;
}

class Call {
 public:
  Call(Config cfg, std::vector<int> lens, int heads, int value_heads, Fills f, deltic_split split,
       int width)
      : cfg_(cfg),
        w_(width),
        split_(split),
        t_(make_tensors(lens, heads, value_heads, cfg, f, 42, width)),
        row_(int64_t(value_heads) * width),
        n_(t_.tokens * row_),
        m_(t_.seqs * row_ * width) {
    g_split = split;
    plain_ = problem_of(t_, cfg, scale(), kLowerBound);
    first_ = run(plain_);
  }
  ~Call() { free_tensors(t_); }
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  struct Errors {
    double o, states;
  };
  Errors errors() {
    double *states, *o;
    probe::check(cudaMalloc(&states, m_ * 8));
    probe::check(cudaMalloc(&o, n_ * 8));
    reference<<<t_.seqs * t_.value_heads, w_>>>(t_, cfg_, scale(), kLowerBound, states, o);
    const Errors e = {rms_error(first_.o, fetch(o, n_)),
                      rms_error(first_.states, fetch(states, m_))};
    probe::check(cudaFree(states));
    probe::check(cudaFree(o));
    return e;
  }
  // Of the results, FNV-1a.
  unsigned long long sum_of_bits() const {
    unsigned long long sum = 0xcbf29ce484222325ull;
    const auto add = [&](const auto& x) {
      const auto* const bytes = reinterpret_cast<const unsigned char*>(x.data());
      for (size_t i = 0; i < x.size() * sizeof x[0]; i++) sum = (sum ^ bytes[i]) * 0x100000001b3ull;
    };
    add(first_.o), add(first_.states);
    return sum;
  }
  bool is_same_again() { return is_same(run(plain_)); }
  // Packing: the last sequence alone, from its place in the same tensors.
  bool is_same_alone();
  bool is_same_in_other_forms() {
    return is_same_in_pool() && is_same_with_fp32_gates() && is_same_as_batch();
  }
  // Every token from the middle of each sequence on replaced: the same bits before. The last check:
  // inputs are others afterwards.
  bool is_causal();

 private:
  static constexpr float kLowerBound = -5.f;
  float scale() const { return 1.f / std::sqrt(float(w_)); }
  Results run(const Problem& p) {
    probe::check(cudaMemset(t_.o, 0xff, n_ * 2));
    probe::check(cudaMemset(t_.state_out, 0xff, m_ * 4));
    run_problem(p, t_, nullptr);
    probe::check(cudaDeviceSynchronize());
    return {fetch(t_.o, n_), fetch(t_.state_out, m_)};
  }
  bool is_same(const Results& x) const {
    return same_bits(first_.o, x.o, 0, n_) && same_bits(first_.states, x.states, 0, m_);
  }
  // 64-bit lengths; a pool with slots backwards; K-first final states; padding behind.
  bool is_same_in_pool();
  bool has_states_turned(const Results& x, const std::vector<int>& slots) const;
  bool is_zero_from(const Results& x, int64_t at) const {
    bool ok = same_bits(first_.o, x.o, 0, at);
    for (int64_t i = at; i < n_; i++) ok &= float(x.o[i]) == 0.f;
    return ok;
  }
  bool is_same_with_fp32_gates();
  bool is_same_as_batch();

  Config cfg_;
  int w_;
  deltic_split split_;
  Tensors t_;
  int64_t row_, n_, m_;  // elements of a token's o, of o, of all states
  Problem plain_;
  Results first_;
};

inline bool Call::is_same_alone() {
  if (t_.seqs < 2 || split_ == DELTIC_SPLIT_AUTO) return true;
  const int last = t_.seqs - 1, from = t_.tokens - t_.lens[last];
  int* const cu = to_device<int>({from, t_.tokens});
  const int64_t skip = last * row_ * w_;
  Problem p = plain_;
  p.N = 1, p.cu.data = cu, p.cu.n0 = 2;
  if (p.state_in) p.state_in.data = static_cast<float*>(p.state_in.data) + skip;
  p.state_out.data = static_cast<float*>(p.state_out.data) + skip;
  const Results x = run(p);
  probe::check(cudaFree(cu));
  return same_bits(first_.o, x.o, from * row_, n_) && same_bits(first_.states, x.states, skip, m_);
}

inline bool Call::has_states_turned(const Results& x, const std::vector<int>& slots) const {
  bool ok = true;
  for (int i = 0; i < t_.seqs; i++)
    for (int h = 0; h < t_.value_heads; h++)
      for (int k = 0; k < w_; k++)
        for (int v = 0; v < w_; v++) {
          const int64_t a = (int64_t(i) * t_.value_heads + h) * w_ * w_ + v * w_ + k;
          const int64_t b = (int64_t(slots[i]) * t_.value_heads + h) * w_ * w_ + k * w_ + v;
          ok &= std::memcmp(&first_.states[a], &x.states[b], 4) == 0;
        }
  return ok;
}

inline bool Call::is_same_in_pool() {
  const int seqs = t_.seqs;
  std::vector<int64_t> cu{0};
  for (int len : t_.lens) cu.push_back(cu.back() + len);
  std::vector<int> reads(seqs), writes(seqs);
  for (int i = 0; i < seqs; i++) reads[i] = i, writes[i] = seqs - 1 - i;
  int64_t* const d_cu = to_device(cu);
  int *d_reads = to_device(reads), *d_writes = to_device(writes);
  Problem p = plain_;
  p.cu.data = d_cu, p.cu.is64 = true;
  p.state_out.s_k = w_, p.state_out.s_v = 1;
  p.is_pool = true;
  p.read_index = {d_reads, true, false, seqs, 0, 1, 0};
  p.write_index = {d_writes, true, false, seqs, 0, 1, 0};
  const Results turned = run(p);
  bool ok = same_bits(first_.o, turned.o, 0, n_) && has_states_turned(turned, writes);
  // The last sequence skipped, and the tokens of the one before it padding.
  if (seqs > 2 && split_ != DELTIC_SPLIT_AUTO) {
    reads[seqs - 1] = writes[seqs - 1] = -1;
    probe::check(cudaMemcpy(d_reads, reads.data(), seqs * 4, cudaMemcpyHostToDevice));
    probe::check(cudaMemcpy(d_writes, writes.data(), seqs * 4, cudaMemcpyHostToDevice));
    const int64_t at = cu[seqs - 1] * row_;
    ok &= is_zero_from(run(p), at);
    p = plain_, p.N = seqs - 1, p.cu.n0 = seqs;
    ok &= is_zero_from(run(p), at);
  }
  probe::check(cudaFree(d_cu));
  probe::check(cudaFree(d_reads));
  probe::check(cudaFree(d_writes));
  return ok;
}

inline bool Call::is_same_with_fp32_gates() {  // and beta
  if (cfg_.gate == Gate::none) return true;
  const int64_t gates = cfg_.gate == Gate::head ? n_ / w_ : n_;
  float *g, *beta;
  probe::check(cudaMalloc(&g, gates * 4));
  probe::check(cudaMalloc(&beta, n_ / w_ * 4));
  widen<<<64, 256>>>(t_.g, g, gates);
  widen<<<64, 256>>>(t_.beta, beta, n_ / w_);
  Problem p = plain_;
  p.g.data = g, p.beta.data = beta, p.g.dtype = p.beta.dtype = deltic::DType::f32;
  const bool ok = is_same(run(p));
  probe::check(cudaFree(g));
  probe::check(cudaFree(beta));
  return ok;
}

inline bool Call::is_same_as_batch() {
  if (t_.seqs != 2 || t_.lens[0] != t_.lens[1] || split_ != DELTIC_SPLIT_OFF) return true;
  Problem p = plain_;
  p.packed = false, p.B = 2, p.T = t_.lens[0], p.cu = {};
  for (deltic::Rows* rows : {&p.q, &p.k, &p.v, &p.o, &p.g, &p.beta}) rows->sb = p.T * rows->st;
  return is_same(run(p));
}

inline bool Call::is_causal() {
  const int64_t key_row = int64_t(t_.heads) * w_;
  const int gate_width = cfg_.gate == Gate::head ? 1 : w_;
  int start = 0;
  for (int len : t_.lens) {
    const int from = start + len / 2;
    const int64_t count = start + len - from, gates = t_.value_heads * gate_width;
    if (count) {
      for (bf16* p : {t_.q, t_.k})
        fill<<<64, 256>>>(p + from * key_row, count * key_row, 977, cfg_.is_raw ? kUnit : kNormal,
                          t_.heads, w_);
      fill<<<64, 256>>>(t_.v + from * row_, count * row_, 979, kNormal, t_.value_heads, w_);
      fill<<<64, 256>>>(t_.g + from * gates, count * gates, 978,
                        cfg_.form == GateForm::kLogDecay ? kGateSoftplus : kNormal, t_.value_heads,
                        gate_width);
    }
    start += len;
  }
  const Results x = run(plain_);
  bool ok = true;
  start = 0;
  for (int len : t_.lens) {
    ok &= same_bits(first_.o, x.o, start * row_, (start + len / 2) * row_);
    start += len;
  }
  return ok;
}

inline bool check(const char* name, Config cfg, std::vector<int> lens, int heads, int value_heads,
                  Fills f, double limit, deltic_split split = DELTIC_SPLIT_OFF, int width = 128) {
  Call call(cfg, std::move(lens), heads, value_heads, f, split, width);
  const Call::Errors e = call.errors();
  const bool same = call.is_same_again(), alone = call.is_same_alone();
  const bool forms = call.is_same_in_other_forms(), causal = call.is_causal();
  const bool ok = e.o < limit && e.states < limit && same && causal && alone && forms;
  const auto word = [](bool x) { return x ? "=" : "NO"; };
  std::printf("check %-40s o %.3f %%  state %.3f %%  again %s  alone %s  forms %s  causal %s  %s\n",
              name, e.o * 100, e.states * 100, word(same), word(alone), word(forms), word(causal),
              ok ? "ok" : "FAIL");
  std::fflush(stdout);
  return ok;
}
