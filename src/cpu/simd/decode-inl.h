// The recurrent form, token by token. It reads and writes the state once per token: for one token
// that is all it does, so states go straight from their slot to their slot.
//
//   a = S'^T k and b = S'^T q in one pass over S (S' = decay S), u = beta (v - a), o = b + (k.q) u,
//   then S = S' + k u^T in a second pass, which finds the columns in L1 or L2.
#if defined(DELTIC_CPU_SIMD_DECODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTIC_CPU_SIMD_DECODE_INL_H_
#undef DELTIC_CPU_SIMD_DECODE_INL_H_
#else
#define DELTIC_CPU_SIMD_DECODE_INL_H_
#endif

#include "cpu/schedule.h"
#include "cpu/simd/prepare-inl.h"
#include "cpu/team.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

// A state in memory: where element (d, v) of a head is, and its type.
struct StateAt {
  void* data;
  int64_t base, s_k, s_v;
};

// One token's rows for one value head, fp32. Rows are padded with zeros.
struct TokenRows {
  float *k, *q, *decay;                    // [Kp]; q times scale; decay 1 without a gate
  float *kd, *qd;                          // k decay, q decay
  float *v, *u, *o;                        // [Vp]
  float *beta, *column_decay, *gate_bias;  // [Vp], [Vp], [Kp]
  bool has_column_decay = false;           // gv is there
  float kq = 0;                            // k . q

  TokenRows(Scratch& arena, int64_t Kp, int64_t Vp) {
    k = arena.take<float>(Kp), q = arena.take<float>(Kp), decay = arena.take<float>(Kp);
    kd = arena.take<float>(Kp), qd = arena.take<float>(Kp), gate_bias = arena.take<float>(Kp);
    v = arena.take<float>(Vp), u = arena.take<float>(Vp), o = arena.take<float>(Vp);
    beta = arena.take<float>(Vp), column_decay = arena.take<float>(Vp);
  }
};

template <Gate kGate>
class Decode {
 public:
  explicit Decode(const Problem& p) : p_(p), Kp_(padded(p.K)), Vp_(padded(p.V)) {
    const int64_t items = std::max<int64_t>(1, p.N * p.HV);
    // Measured: 3 us for a token and head of 128 x 128. Heads without tokens copy their state.
    const double ns = std::max(token_heads(p), static_cast<double>(items)) *
                      (200 + 0.18 * static_cast<double>(Kp_) * static_cast<double>(Vp_));
    const double most =
        static_cast<double>(items) * static_cast<double>(std::max<int64_t>(1, Vp_ / 16));
    threads_ = useful_threads(p, most, ns / most);
    // Slices of columns only where there are too few heads for the threads.
    slices_ = std::min<int64_t>((2 * threads_ + items - 1) / items, std::max<int64_t>(1, Vp_ / 16));
    if (items >= 2 * threads_) slices_ = 1;
    slice_ = (Vp_ / 16 + slices_ - 1) / slices_ * 16;
  }

  size_t workspace_bytes() const {
    Scratch arena(nullptr);
    TokenRows(arena, Kp_, Vp_);
    arena.take<float>(Kp_, slice_);
    return static_cast<size_t>(checked_product(arena.used(), threads_));
  }

  void run(std::span<std::byte> workspace) const {
    const size_t thread_bytes = workspace_bytes() / static_cast<size_t>(threads_);
    const int64_t items = p_.N * p_.HV * slices_;
    run_team(threads_, [&](const Member& member) {
      const FlushDenormals flush;
      Scratch arena(workspace.data() + static_cast<size_t>(member.index) * thread_bytes);
      TokenRows rows(arena, Kp_, Vp_);
      float* state = arena.take<float>(Kp_, slice_);
      const int64_t padding = padding_begin(p_);
      member.for_own(p_.T - padding, [&](int64_t t) {
        for (int64_t h = 0; h < p_.HV; ++h)
          zero_row(p_.o.data, p_.o.dtype, p_.o.at(0, padding + t, h), p_.V);
      });
      // Slices are columns of a state: two cores that write every other one of them take three
      // times as long (256 sequences: 70 ms, in eight runs a core 22).
      const int64_t run = std::max<int64_t>(1, items / (8 * member.size));
      member.for_runs(items, run, [&](int64_t i) {
        const Sequence s = sequence(p_, i / (p_.HV * slices_));
        const int64_t head = i / slices_ % p_.HV, v0 = i % slices_ * slice_;
        if (v0 < p_.V) run_slice(s, head, v0, std::min(slice_, p_.V - v0), rows, state);
      });
    });
  }

  // The accepted tokens' updates, of one layer after the other.
  void commit(std::span<std::byte> workspace) const {
    const size_t thread_bytes = workspace_bytes() / static_cast<size_t>(threads_);
    const int64_t items = p_.N * p_.HV * slices_;
    run_team(threads_, [&](const Member& member) {
      const FlushDenormals flush;
      Scratch arena(workspace.data() + static_cast<size_t>(member.index) * thread_bytes);
      TokenRows rows(arena, Kp_, Vp_);
      float* state = arena.take<float>(Kp_, slice_);
      const int64_t run = std::max<int64_t>(1, p_.layers * items / (8 * member.size));
      member.for_runs(p_.layers * items, run, [&](int64_t i) {
        const Problem layer = layer_of(p_, i / items);
        const Sequence s = sequence(layer, i % items / (p_.HV * slices_));
        const int64_t head = i / slices_ % p_.HV, v0 = i % slices_ * slice_;
        if (v0 >= p_.V || s.write_slot < 0) return;
        const int64_t columns = std::min(slice_, p_.V - v0);
        std::memset(state, 0, static_cast<size_t>(Kp_ * slice_) * sizeof(float));
        if (s.read_slot >= 0) load_slice(layer.state_in, s.read_slot, head, v0, columns, state);
        const Path path = path_to(layer, s.n, layer.accepted(s.n) - 1);
        for (int64_t j = 0; j < path.length; ++j) {
          load_update(layer.updates, s.n, path.tokens[j], head, rows);
          load_values(layer.updates, s.n, path.tokens[j], head, v0, columns, rows);
          apply(state, columns, rows);
        }
        store_slice(state, v0, columns, layer.state_out, s.write_slot, head);
      });
    });
  }

 private:
  void run_slice(const Sequence& s, int64_t head, int64_t v0, int64_t columns, TokenRows& r,
                 float* state) const {
    if (s.skipped) {
      for (int64_t t = 0; t < s.length; ++t) {
        zero_row(p_.o.data, p_.o.dtype, p_.o.at(s.batch, s.begin + t, head) + v0, columns);
      }
      store_no_updates(s, head, v0, columns, r);
      return;
    }
    if (s.length == 1 && !p_.has_seed && s.read_slot >= 0 && token_slot(p_, s, 0) >= 0 &&
        s.ckpt_begin == s.ckpt_end && p_.state_in.dtype == p_.state_out.dtype &&
        p_.state_in.dtype != DType::f64 && columns % kLanes == 0 && p_.K % kLanes == 0) {
      load_token(s, head, 0, v0, columns, r);
      const StateAt from{p_.state_in.data, p_.state_in.at(s.read_slot, head) + v0 * p_.state_in.s_v,
                         p_.state_in.s_k, p_.state_in.s_v};
      const StateAt to{p_.state_out.data,
                       p_.state_out.at(token_slot(p_, s, 0), head) + v0 * p_.state_out.s_v,
                       p_.state_out.s_k, p_.state_out.s_v};
      // The next head's state is on its way while this one is written.
      const int64_t ahead = head + 1 < p_.HV ? p_.state_in.s_head : 0;
      with_elements(p_.state_in.dtype, [&](auto how) DELTIC_INLINE {
        token_step<decltype(how)>(from, to, p_.K, columns, r, ahead);
      });
      store_token(s, head, 0, v0, columns, r);
      return;
    }
    // Several tokens, or odd widths: the slice lives in scratch, in the states' layout (rows of
    // slice_ columns or of Kp_ channels), so that sums have the order of the call above.
    std::memset(state, 0, static_cast<size_t>(Kp_ * slice_) * sizeof(float));
    if (s.read_slot >= 0) load_slice(p_.state_in, s.read_slot, head, v0, columns, state);
    const StateAt here = p_.v_first ? StateAt{state, 0, 1, Kp_} : StateAt{state, 0, slice_, 1};
    keep(s, head, 0, v0, columns, state);
    for (int64_t t = 0; t < s.length; ++t) {
      if (parent_of(p_, s, t) != t - 1) {  // a tree's other branch
        const StateSource from =
            p_.updates ? StateSource{&p_.state_in, s.read_slot} : jump_source(p_, s, t);
        if (from.slot < 0) {
          std::memset(state, 0, static_cast<size_t>(Kp_ * slice_) * sizeof(float));
        } else {
          load_slice(*from.states, from.slot, head, v0, columns, state);
        }
        if (p_.updates) apply_path(s, parent_of(p_, s, t), head, v0, columns, r, state);
      }
      load_token(s, head, t, v0, columns, r);
      token_step<LoadF32>(here, here, Kp_, padded(columns), r, 0);
      store_token(s, head, t, v0, columns, r);
      if (p_.updates) store_update(s.n, t, head, v0, columns, r);
      if (p_.has_seed) {
        round_by_chance(RandomState(p_, s, head, t), v0, columns, state);
      } else {
        round_tokens(state);
      }
      if (const int64_t slot = token_slot(p_, s, t); slot >= 0)
        store_slice(state, v0, columns, p_.state_out, slot, head);
      keep(s, head, t + 1, v0, columns, state);
    }
    if (s.length == 0 && s.write_slot >= 0)
      store_slice(state, v0, columns, p_.state_out, s.write_slot, head);
    store_no_updates(s, head, v0, columns, r);
  }

  // What a token did to the state, k, u and decay, in its row of the record. k and decay are those
  // of the whole head: its first slice has them.
  void store_update(int64_t n, int64_t t, int64_t head, int64_t v0, int64_t columns,
                    const TokenRows& r) const {
    const Rows& x = p_.updates;
    const int64_t row = x.at(n, t, head);
    if (v0 == 0) {
      store_row(r.k, p_.K, x.data, x.dtype, row);
      store_row(r.decay, decay_width(p_), x.data, x.dtype, row + p_.K + p_.V);
    }
    store_row(r.u, columns, x.data, x.dtype, row + p_.K + v0);
  }
  // Rows that no token has: they change nothing.
  void store_no_updates(const Sequence& s, int64_t head, int64_t v0, int64_t columns,
                        TokenRows& r) const {
    if (!p_.updates) return;
    std::fill(r.k, r.k + Kp_, 0.0f), std::fill(r.u, r.u + padded(columns), 0.0f);
    std::fill(r.decay, r.decay + Kp_, 1.0f);
    for (int64_t t = s.skipped ? 0 : s.length; t < p_.update_tokens; ++t) {
      store_update(s.n, t, head, v0, columns, r);
    }
  }
  void load_update(const Rows& x, int64_t n, int64_t t, int64_t head, TokenRows& r) const {
    const int64_t row = x.at(n, t, head);
    load_row(x.data, x.dtype, row, p_.K, Kp_, r.k);
    std::fill(r.decay, r.decay + Kp_, 1.0f);
    load_row(x.data, x.dtype, row + p_.K + p_.V, decay_width(p_), decay_width(p_), r.decay);
    if constexpr (kGate == Gate::head) std::fill(r.decay + 1, r.decay + Kp_, r.decay[0]);
  }
  void load_values(const Rows& x, int64_t n, int64_t t, int64_t head, int64_t v0, int64_t columns,
                   TokenRows& r) const {
    load_row(x.data, x.dtype, x.at(n, t, head) + p_.K + v0, columns, padded(columns), r.u);
  }
  // From the start to a branch. k and decay are the tokens' own: another thread may have theirs to
  // write.
  void apply_path(const Sequence& s, int64_t last, int64_t head, int64_t v0, int64_t columns,
                  TokenRows& r, float* state) const {
    const Path path = path_to(p_, s.n, last);
    for (int64_t i = 0; i < path.length; ++i) {
      load_token(s, head, path.tokens[i], v0, columns, r);
      load_values(p_.updates, s.n, path.tokens[i], head, v0, columns, r);
      apply(state, columns, r);
    }
  }
  // S <- decay S + k u^T, as the second pass of a token has it: the same bits.
  void apply(float* state, int64_t columns, const TokenRows& r) const {
    const F32 d;
    if (!p_.v_first) {
      for (int64_t c = 0; c < p_.K; ++c) {
        const Vec decay = hn::Set(d, r.decay[c]), k = hn::Set(d, r.k[c]);
        float* row = state + c * slice_;
        for (int64_t v = 0; v < padded(columns); v += kLanes) {
          const Vec s = hn::Mul(hn::LoadU(d, row + v), decay);
          hn::StoreU(hn::MulAdd(k, hn::LoadU(d, r.u + v), s), d, row + v);
        }
      }
    } else {
      for (int64_t v = 0; v < columns; ++v) {
        const Vec u = hn::Set(d, r.u[v]);
        float* column = state + v * Kp_;
        for (int64_t c = 0; c < Kp_; c += kLanes) {
          const Vec s = hn::Mul(hn::LoadU(d, column + c), hn::LoadU(d, r.decay + c));
          hn::StoreU(hn::MulAdd(hn::LoadU(d, r.k + c), u, s), d, column + c);
        }
      }
    }
    round_tokens(state);
  }
  void round_tokens(float* state) const {
    if (!rounds_tokens(p_)) return;
    kept_states(p_).dtype == DType::bf16 ? round_slice<LoadBf16>(state)
                                         : round_slice<LoadF16>(state);
  }

  void load_slice(const States& from, int64_t slot, int64_t head, int64_t v0, int64_t columns,
                  float* state) const {
    if (!p_.v_first) return load_columns(from, slot, head, p_.K, v0, columns, state, slice_);
    for (int64_t v = 0; v < columns; ++v) {
      load_row(from.data, from.dtype, from.at(slot, head) + (v0 + v) * from.s_v, p_.K, Kp_,
               state + v * Kp_);
    }
  }
  void store_slice(const float* state, int64_t v0, int64_t columns, const States& to, int64_t slot,
                   int64_t head) const {
    if (!p_.v_first) return store_columns(state, slice_, p_.K, v0, columns, to, slot, head);
    for (int64_t v = 0; v < columns; ++v) {
      store_row(state + v * Kp_, p_.K, to.data, to.dtype, to.at(slot, head) + (v0 + v) * to.s_v);
    }
  }
  // To 16 bits and back, the zeros around it too.
  template <class Half>
  void round_slice(float* state) const {
    uint16_t rounded[kLanes];
    for (int64_t i = 0; i < Kp_ * slice_; i += kLanes) {
      Half::store(LoadF32::load(state + i), rounded);
      LoadF32::store(Half::load(rounded), state + i);
    }
  }

  // In the order in which states lie in memory: neighbours share a draw.
  void round_by_chance(const RandomState& random, int64_t v0, int64_t columns, float* state) const {
    const int64_t rows = p_.v_first ? columns : p_.K, width = p_.v_first ? p_.K : columns;
    for (int64_t i = 0; i < rows; ++i) {
      float* row = state + i * (p_.v_first ? Kp_ : slice_);
      for (int64_t j = 0; j < width; ++j) {
        row[j] = p_.v_first ? random.rounded(j, v0 + i, row[j]) : random.rounded(i, v0 + j, row[j]);
      }
    }
  }

  void keep(const Sequence& s, int64_t head, int64_t tokens, int64_t v0, int64_t columns,
            const float* state) const {
    for (int64_t m = s.ckpt_begin; m < s.ckpt_end; ++m) {
      if (checkpoint_slot(p_, m) >= 0 && p_.ckpt_tokens(m) == tokens) {
        store_slice(state, v0, columns, p_.ckpt, checkpoint_slot(p_, m), head);
      }
    }
  }

  void load_token(const Sequence& s, int64_t head, int64_t t, int64_t v0, int64_t columns,
                  TokenRows& r) const {
    const F32 d;
    const int64_t k_head = p_.k_head(head), token = s.begin + t, width = padded(columns);
    load_head(p_.k, s.batch, token, k_head, p_.K, Kp_, p_.l2norm, 1.0f, r.k);
    load_head(p_.q, s.batch, token, k_head, p_.K, Kp_, p_.l2norm, p_.scale, r.q);
    if constexpr (kGate == Gate::none) {
      std::fill(r.decay, r.decay + Kp_, 1.0f);
    } else {
      // Per head the one number stands first in a vector's worth of room; r.decay has 16 at least.
      load_log_decays<kGate>(p_, {s.batch, token, 1, head}, kRowAlign, Kp_, r.gate_bias, r.decay);
      exp_decays(r.decay, kGate == Gate::channel ? Kp_ : kRowAlign);
      if constexpr (kGate == Gate::head) std::fill(r.decay + 1, r.decay + Kp_, r.decay[0]);
    }
    Vec kq = hn::Zero(d);
    for (int64_t c = 0; c < Kp_; c += kLanes) {
      const Vec k = hn::LoadU(d, r.k + c), q = hn::LoadU(d, r.q + c), e = hn::LoadU(d, r.decay + c);
      hn::StoreU(hn::Mul(k, e), d, r.kd + c);
      hn::StoreU(hn::Mul(q, e), d, r.qd + c);
      kq = hn::MulAdd(k, q, kq);
    }
    r.kq = sum_lanes(kq);
    load_row(p_.v.data, p_.v.dtype, p_.v.at(s.batch, token, head) + v0, columns, width, r.v);
    if (p_.beta_kind == BetaKind::value) {
      load_row(p_.beta.data, p_.beta.dtype, p_.beta.at(s.batch, token, head) + v0, columns, width,
               r.beta);
    } else {
      const float beta =
          p_.beta_kind == BetaKind::none
              ? 1.0f
              : load_f32(p_.beta.data, p_.beta.dtype, p_.beta.at(s.batch, token, head));
      std::fill(r.beta, r.beta + width, beta);
    }
    if (p_.beta) {
      for (int64_t v = 0; v < width; v += kLanes) {
        hn::StoreU(beta_value(p_.beta_form, hn::LoadU(d, r.beta + v)), d, r.beta + v);
      }
    }
    r.has_column_decay = p_.gv.present;
    if (p_.gv) {
      load_row(p_.gv.data, p_.gv.dtype, p_.gv.at(s.batch, token, head) + v0, columns, width,
               r.column_decay);
      exp_decays(r.column_decay, width);
    } else {
      std::fill(r.column_decay, r.column_decay + width, 1.0f);
    }
  }
  void store_token(const Sequence& s, int64_t head, int64_t t, int64_t v0, int64_t columns,
                   const TokenRows& r) const {
    store_row(r.o, columns, p_.o.data, p_.o.dtype, p_.o.at(s.batch, s.begin + t, head) + v0);
  }

  template <class Access>
  void token_step(const StateAt& from, const StateAt& to, int64_t K, int64_t columns, TokenRows& r,
                  int64_t ahead) const {
    auto* src = static_cast<typename Access::Element*>(from.data) + from.base;
    auto* dst = static_cast<typename Access::Element*>(to.data) + to.base;
    if (from.s_v == 1) {
      int64_t v = 0;
      constexpr int kWide = kLanes >= 16 ? 8 : 4;
      for (; v + kWide * kLanes <= columns; v += kWide * kLanes) {
        key_first<Access, kWide>(src + v, from.s_k, dst + v, to.s_k, K, v, r, ahead);
      }
      for (; v < columns; v += kLanes)
        key_first<Access, 1>(src + v, from.s_k, dst + v, to.s_k, K, v, r, ahead);
    } else {
      for (int64_t v = 0; v < columns; ++v) {
        value_first<Access>(src + v * from.s_v, dst + v * to.s_v, K, v, r, ahead);
      }
    }
  }

  // kVecs vectors of columns, rows of the state apart by a stride.
  template <class Access, int kVecs>
  static HWY_NOINLINE void key_first(const typename Access::Element* src, int64_t src_row,
                                     typename Access::Element* dst, int64_t dst_row, int64_t K,
                                     int64_t v, TokenRows& r, int64_t ahead) {
    const F32 d;
    Vec a[kVecs], b[kVecs];
    DELTIC_UNROLL
    for (int j = 0; j < kVecs; ++j) a[j] = b[j] = hn::Zero(d);
    for (int64_t c = 0; c < K; ++c) {
      const Vec kd = hn::Set(d, r.kd[c]), qd = hn::Set(d, r.qd[c]);
      DELTIC_UNROLL
      for (int j = 0; j < kVecs; ++j) {
        // The next head is fetched half in this pass, half in the second: memory never rests.
        if (ahead != 0 && j < kVecs / 2)
          __builtin_prefetch(src + ahead + c * src_row + j * kLanes, 0, 2);
        const Vec s = Access::load(src + c * src_row + j * kLanes);
        a[j] = hn::MulAdd(s, kd, a[j]);
        b[j] = hn::MulAdd(s, qd, b[j]);
      }
    }
    const Vec kq = hn::Set(d, r.kq);
    Vec u[kVecs], f[kVecs];
    DELTIC_UNROLL
    for (int j = 0; j < kVecs; ++j) {
      const int64_t at = v + j * kLanes;
      f[j] = hn::LoadU(d, r.column_decay + at);
      const Vec error = hn::NegMulAdd(f[j], a[j], hn::LoadU(d, r.v + at));
      u[j] = hn::Mul(hn::LoadU(d, r.beta + at), error);
      hn::StoreU(u[j], d, r.u + at);
      hn::StoreU(hn::MulAdd(kq, u[j], hn::Mul(f[j], b[j])), d, r.o + at);
    }
    for (int64_t c = 0; c < K; ++c) {
      const Vec decay = hn::Set(d, r.decay[c]), k = hn::Set(d, r.k[c]);
      DELTIC_UNROLL
      for (int j = 0; j < kVecs; ++j) {
        if (ahead != 0 && j >= kVecs / 2) {
          __builtin_prefetch(src + ahead + c * src_row + j * kLanes, 0, 2);
        }
        Vec s = hn::Mul(Access::load(src + c * src_row + j * kLanes), decay);
        if (r.has_column_decay) s = hn::Mul(s, f[j]);
        Access::store(hn::MulAdd(k, u[j], s), dst + c * dst_row + j * kLanes);
      }
    }
  }

  // One column, its K numbers side by side.
  template <class Access>
  static HWY_INLINE void value_first(const typename Access::Element* src,
                                     typename Access::Element* dst, int64_t K, int64_t v,
                                     TokenRows& r, int64_t ahead) {
    const F32 d;
    Vec a = hn::Zero(d), b = hn::Zero(d);
    for (int64_t c = 0; c < K; c += kLanes) {
      const Vec s = Access::load(src + c);
      a = hn::MulAdd(s, hn::LoadU(d, r.kd + c), a);
      b = hn::MulAdd(s, hn::LoadU(d, r.qd + c), b);
    }
    const float f = r.column_decay[v];
    const float u = r.beta[v] * (r.v[v] - f * sum_lanes(a));
    r.o[v] = f * sum_lanes(b) + r.kq * u, r.u[v] = u;
    const Vec uv = hn::Set(d, u), fv = hn::Set(d, f);
    for (int64_t c = 0; c < K; c += kLanes) {
      if (ahead != 0) __builtin_prefetch(src + ahead + c, 0, 2);
      Vec s = hn::Mul(Access::load(src + c), hn::LoadU(d, r.decay + c));
      if (r.has_column_decay) s = hn::Mul(s, fv);
      Access::store(hn::MulAdd(hn::LoadU(d, r.k + c), uv, s), dst + c);
    }
  }

  const Problem& p_;
  int64_t Kp_, Vp_, slices_, slice_;
  int threads_;
};

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();
#endif
