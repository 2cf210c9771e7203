// The plain implementation: the recurrence and its backward pass in fp32, token by token, and the
// building blocks in fp32.
#include "cpu/plain.h"

#include <algorithm>
#include <cmath>
#include <span>

#include "cpu/block_gradients.h"
#include "cpu/block_math.h"
#include "cpu/conv_math.h"
#include "cpu/norm_math.h"
#include "cpu/recurrence.h"
#include "cpu/recurrence_backward.h"
#include "cpu/saved.h"

namespace deltic::cpu {
namespace {

// Value columns of a task. Columns of the state never meet, so slices change no bit. A slice of
// 128 x 32 fp32 is 16 KB and stays in L1; the last slice of a head is filled up with zeros, so that
// every inner loop has this constant length.
constexpr int64_t kColumns = 32;

// What one thread needs: a slice of the state and the vectors of one token.
struct Slice {
  Slice(const Problem& p, std::byte* base) {
    Scratch scratch(base);
    S = scratch.take<float>(p.K, kColumns);
    q = scratch.take<float>(p.K);
    k = scratch.take<float>(p.K);
    decay = scratch.take<float>(p.K);
    v = scratch.take<float>(kColumns);
    value_decay = scratch.take<float>(kColumns);
    beta = scratch.take<float>(kColumns);
    bytes = scratch.used();
  }
  float *S, *q, *k, *decay, *v, *value_decay, *beta;
  size_t bytes;
};

float decay_of(float log_decay) { return std::exp(std::max(log_decay, kMinLogDecay)); }

void load_token(const Problem& p, int64_t b, int64_t t, int64_t h, int64_t first, int64_t count,
                Slice& x) {
  load_row(p.q, b, t, p.k_head(h), 0, p.K, x.q);
  load_row(p.k, b, t, p.k_head(h), 0, p.K, x.k);
  if (p.l2norm) {
    normalize(x.q, p.K);
    normalize(x.k, p.K);
  }
  for (int64_t d = 0; d < p.K; ++d) x.q[d] *= p.scale;
  if (p.gate != Gate::none) {
    load_log_decay(p, b, t, h, x.decay);
    for (int64_t d = 0; d < gate_width(p); ++d) x.decay[d] = decay_of(x.decay[d]);
    if (p.gate == Gate::head) std::fill_n(x.decay, p.K, x.decay[0]);
  }
  load_row(p.v, b, t, h, first, count, x.v);
  load_beta(p, b, t, h, first, count, x.beta);
  if (p.gv) {
    load_row(p.gv, b, t, h, first, count, x.value_decay);
    for (int64_t c = 0; c < count; ++c) x.value_decay[c] = decay_of(x.value_decay[c]);
  }
}

// S_{t-1} -> S_t; o_t in x.v. Two sweeps over the slice: decay and S'^T k, then update and S^T q.
void step(const Problem& p, Slice& x) {
  if (p.gv) {
    for (int64_t d = 0; d < p.K; ++d) {
      for (int64_t c = 0; c < kColumns; ++c) x.S[d * kColumns + c] *= x.value_decay[c];
    }
  }
  float u[kColumns] = {}, o[kColumns] = {};
  for (int64_t d = 0; d < p.K; ++d) {
    float* S = x.S + d * kColumns;
    const float k = x.k[d], decay = x.decay[d];
    for (int64_t c = 0; c < kColumns; ++c) {
      S[c] *= decay;
      u[c] += S[c] * k;
    }
  }
  for (int64_t c = 0; c < kColumns; ++c) u[c] = x.beta[c] * (x.v[c] - u[c]);
  for (int64_t d = 0; d < p.K; ++d) {
    float* S = x.S + d * kColumns;
    const float k = x.k[d], q = x.q[d];
    for (int64_t c = 0; c < kColumns; ++c) {
      S[c] += k * u[c];
      o[c] += S[c] * q;
    }
  }
  std::copy_n(o, kColumns, x.v);
}

void run_slice(const Problem& p, const Sequence& s, int64_t h, int64_t first, Slice& x) {
  const int64_t count = std::min(kColumns, p.V - first);
  if (s.skipped) {
    for (int64_t t = 0; t < s.length; ++t) zero_row(p.o, s.batch, s.begin + t, h, first, count);
    return;
  }
  std::fill_n(x.S, p.K * kColumns, 0.0f);
  std::fill_n(x.decay, p.K, 1.0f);
  for (float* row : {x.v, x.value_decay, x.beta}) std::fill_n(row, kColumns, 0.0f);

  StateColumns states(p, s, h, first, count, kColumns);
  states.load_initial(x.S);
  states.keep(x.S, 0);
  for (int64_t t = 0; t < s.length; ++t) {
    states.load_branch(t, x.S);
    load_token(p, s.batch, s.begin + t, h, first, count, x);
    step(p, x);
    store_row(p.o, s.batch, s.begin + t, h, first, count, x.v);
    if (rounds_tokens(p)) {
      const bool is_bf16 = kept_states(p).dtype == DType::bf16;
      if (p.has_seed) {
        const RandomState random(p, s, h, t);
        for (int64_t i = 0; i < p.K * kColumns; ++i) {
          x.S[i] = random.rounded(i / kColumns, first + i % kColumns, x.S[i]);
        }
      } else {
        for (int64_t i = 0; i < p.K * kColumns; ++i) {
          x.S[i] = is_bf16 ? bf16_to_f32(f32_to_bf16(x.S[i])) : f16_to_f32(f32_to_f16(x.S[i]));
        }
      }
    }
    states.keep(x.S, t + 1);
  }
}

void run_recurrence(const Problem& p, std::span<std::byte> workspace) {
  const size_t bytes = Slice(p, nullptr).bytes;
  const int64_t num_slices = (p.V + kColumns - 1) / kColumns;
  const int64_t num_tasks = has_tokens_or_states(p) ? p.N * p.HV * num_slices : 0;
  run_team(recurrence_threads(p, num_tasks), [&](const Member& member) {
    Slice x(p, workspace.data() + static_cast<size_t>(member.index) * bytes);
    member.for_each(num_tasks, [&](int64_t i) {
      const int64_t head = i / num_slices;
      run_slice(p, sequence(p, head / p.HV), head % p.HV, i % num_slices * kColumns, x);
    });
  });
  zero_padding(p, p.o, p.HV, p.V);
}

bool is_recurrence(const Problem& p) { return p.op == DELTIC_FORWARD || p.op == DELTIC_DECODE; }

const char* nothing_missing() { return nullptr; }

size_t workspace_bytes(const Problem& p) {
  if (p.op == DELTIC_CONV) return 0;
  if (p.op == DELTIC_RMSNORM) return norm::Norm<norm::PlainMath>(p).workspace_bytes();
  if (p.op == DELTIC_BACKWARD) return recurrence_backward::workspace_bytes(p);
  if (p.is_gradient) return block_gradients::workspace_bytes(p);
  if (!is_recurrence(p)) return blocks::workspace_bytes(p);
  return static_cast<size_t>(checked_product(Slice(p, nullptr).bytes, p.threads));
}

// Backward here starts from the first token, whatever was kept: the header is all it looks at.
void run(const Problem& p, std::span<std::byte> workspace, void*) {
  if (p.op == DELTIC_CONV) return conv::run(p);
  if (p.op == DELTIC_RMSNORM) return norm::Norm<norm::PlainMath>(p).run(workspace);
  if (p.op == DELTIC_BACKWARD) {
    check_saved_header(p, Arithmetic::recurrence);
    return recurrence_backward::run(p, workspace);
  }
  if (p.save != DELTIC_SAVE_NONE) write_saved_header(p, p.save, Arithmetic::recurrence);
  if (p.is_gradient) return block_gradients::run(p, workspace);
  is_recurrence(p) ? run_recurrence(p, workspace) : blocks::run(p, workspace);
}

}  // namespace

// One entry serves every operation: the problem says which it is.
const Implementation& plain(deltic_op) {
  static const Implementation entry{"cpu.plain", nothing_missing, refuse_fp64, workspace_bytes,
                                    run};
  return entry;
}

}  // namespace deltic::cpu
