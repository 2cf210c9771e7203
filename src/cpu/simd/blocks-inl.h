// The building blocks as operations of their own: the forward's stages with loads and stores
// around.
#if defined(DELTIC_CPU_SIMD_BLOCKS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTIC_CPU_SIMD_BLOCKS_INL_H_
#undef DELTIC_CPU_SIMD_BLOCKS_INL_H_
#else
#define DELTIC_CPU_SIMD_BLOCKS_INL_H_
#endif

#include "cpu/schedule.h"
#include "cpu/simd/chain-inl.h"
#include "cpu/team.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

constexpr int64_t kSlice = 64;  // value columns that `wy` handles at once

// The chunks of all sequences, numbered.
class ChunkTable {
 public:
  ChunkTable(const Problem& p, Scratch& arena) : p_(p), first_(arena.take<int64_t>(p.N + 1)) {}

  void fill() {
    first_[0] = 0;
    for (int64_t n = 0; n < p_.N; ++n) {
      first_[n + 1] = first_[n] + (sequence(p_, n).length + p_.chunk - 1) / p_.chunk;
    }
  }
  int64_t size() const { return first_[p_.N]; }
  int64_t first(int64_t sequence) const { return first_[sequence]; }
  ChunkPlace at(int64_t chunk, int64_t head) const {
    const int64_t n = std::upper_bound(first_, first_ + p_.N + 1, chunk) - first_ - 1;
    const Sequence s = sequence(p_, n);
    const int64_t begin = (chunk - first_[n]) * p_.chunk;
    return {s.batch, s.begin + begin, std::min<int64_t>(p_.chunk, s.length - begin), head};
  }

 private:
  const Problem& p_;
  int64_t* first_;  // chunk of each sequence
};

// Columns [from, from + width) of a chunk's rows.
inline void store_rows(const float* src, int64_t src_row, int64_t width, const Rows& dst,
                       const ChunkPlace& at, int64_t from = 0) {
  for (int64_t t = 0; t < at.length; ++t) {
    store_row(src + t * src_row, width, dst.data, dst.dtype,
              dst.at(at.batch, at.begin + t, at.head) + from);
  }
}

// Rows of a square up to the diagonal (`with_diagonal`) or below it, zeros elsewhere.
inline void load_lower(const Rows& x, const ChunkPlace& at, int64_t C, bool with_diagonal,
                       float* dst) {
  for (int64_t t = 0; t < rows_of(at.length); ++t) {
    const int64_t n = t < at.length ? t + (with_diagonal ? 1 : 0) : 0;
    const int64_t row = t < at.length ? x.at(at.batch, at.begin + t, at.head) : 0;
    load_row(x.data, x.dtype, row, n, C, dst + t * C);
  }
}

// Columns [from, from + count) of a chunk's rows as rows of kSlice; zeros around them.
inline void load_slice(const Rows& x, const ChunkPlace& at, int64_t from, int64_t count,
                       float* dst) {
  for (int64_t t = 0; t < rows_of(at.length); ++t) {
    const int64_t n = t < at.length ? count : 0;
    const int64_t row = t < at.length ? x.at(at.batch, at.begin + t, at.head) + from : 0;
    load_row(x.data, x.dtype, row, n, kSlice, dst + t * kSlice);
  }
}

// e_t = exp(G_t - G_{t-1}): the cumulative sums taken apart again, differences of neighbours.
template <Gate kGate>
inline void load_sum_decays(const Problem& p, const ChunkPlace& at, int64_t C, int64_t Kp,
                            float* e) {
  if constexpr (kGate == Gate::head) {
    float before = 0.0f;
    for (int64_t t = 0; t < C; ++t) {
      const float G = t < at.length
                          ? load_f32(p.g.data, p.g.dtype, p.g.at(at.batch, at.begin + t, at.head))
                          : before;
      e[t] = G - before;
      before = G;
    }
    exp_decays(e, C);
  } else if constexpr (kGate == Gate::channel) {
    const F32 d;
    for (int64_t t = 0; t < at.length; ++t) {
      load_row(p.g.data, p.g.dtype, p.g.at(at.batch, at.begin + t, at.head), p.K, Kp, e + t * Kp);
    }
    for (int64_t c = 0; c < Kp; c += kLanes) {
      Vec before = hn::Zero(d);
      for (int64_t t = 0; t < at.length; ++t) {
        float* x = e + t * Kp + c;
        const Vec G = hn::LoadU(d, x);
        hn::StoreU(exp_of(clamp_log_decay(hn::Sub(G, before))), d, x);
        before = G;
      }
    }
    std::fill(e + at.length * Kp, e + rows_of(at.length) * Kp, 1.0f);
  }
}

template <Gate kGate>
class Blocks {
 public:
  explicit Blocks(const Problem& p)
      : p_(p), C_(p.chunk), Kp_(padded(p.K)), threads_(block_threads(p, p.HV)) {}

  size_t workspace_bytes() const {
    Scratch arena(nullptr);
    ChunkTable(p_, arena);
    Scratch counter(nullptr);
    BlockScratch(counter, *this);
    arena.take<std::byte>(counter.used(), threads_);
    return arena.used();
  }

  void run(std::span<std::byte> workspace) const {
    Scratch arena(workspace.data());
    ChunkTable chunks(p_, arena);
    chunks.fill();
    Scratch counter(nullptr);
    BlockScratch(counter, *this);
    std::byte* scratch_base = workspace.data() + arena.used();
    run_team(threads_, [&](const Member& member) {
      const FlushDenormals flush;
      Scratch own(scratch_base + static_cast<size_t>(member.index) * counter.used());
      const BlockScratch scratch(own, *this);
      const int64_t padding = padding_begin(p_);
      member.for_own(p_.T - padding, [&](int64_t t) { zero_token(padding + t); });
      member.for_each(chunks.size() * p_.HV,
                      [&](int64_t i) { run_chunk(chunks.at(i / p_.HV, i % p_.HV), scratch); });
    });
  }

 private:
  struct BlockScratch {
    PrepareScratch prepare;
    float *slice, *product;  // [C][kSlice]
    BlockScratch(Scratch& arena, const Blocks& b)
        : prepare(arena, b.C_, b.Kp_, kGate == Gate::channel, false) {
      slice = arena.take<float>(b.C_, kSlice);
      product = arena.take<float>(b.C_, kSlice);
    }
  };

  void zero_token(int64_t t) const {
    const auto zero = [&](const Rows& x, int64_t heads, int64_t width) {
      for (int64_t h = 0; x && h < heads; ++h) zero_row(x.data, x.dtype, x.at(0, t, h), width);
    };
    const bool square = p_.op == DELTIC_KKT || p_.op == DELTIC_SCORES || p_.op == DELTIC_INVERSE ||
                        p_.op == DELTIC_SCORES_INVERSE;
    zero(p_.inverse, p_.HV, C_);
    zero(p_.out, p_.HV, square ? C_ : gate_width());
    zero(p_.rstd, p_.HV, 1);
    zero(p_.w, p_.HV, p_.K);
    zero(p_.u, p_.HV, p_.V);
    zero(p_.kg, p_.HV, p_.K);
    zero(p_.qg, p_.HV, p_.K);
  }
  // Width of a row of g, or of x for the norm.
  int64_t gate_width() const { return p_.op == DELTIC_L2NORM || kGate == Gate::channel ? p_.K : 1; }

  void run_chunk(const ChunkPlace& at, const BlockScratch& s) const {
    switch (p_.op) {
      case DELTIC_CUMSUM:
        return cumsum(at, s.prepare);
      case DELTIC_GATE:
        return gate(at, s.prepare);
      case DELTIC_L2NORM:
        return l2norm(at, s.prepare);
      case DELTIC_INVERSE:
        return inverse(at, s.prepare);
      case DELTIC_WY:
        return wy(at, s);
      default:
        return scores(at, s.prepare);
    }
  }

  void gate(const ChunkPlace& at, const PrepareScratch& s) const {
    load_log_decays<kGate>(p_, at, C_, Kp_, s.gate_bias, s.e);
    store_rows(s.e, kGate == Gate::channel ? Kp_ : 1, gate_width(), p_.out, at);
  }

  void cumsum(const ChunkPlace& at, const PrepareScratch& s) const {
    const F32 d;
    load_log_decays<kGate>(p_, at, C_, Kp_, s.gate_bias, s.e);
    const int64_t row = kGate == Gate::channel ? Kp_ : 1, first = p_.reverse ? at.length - 1 : 0;
    if constexpr (kGate == Gate::channel) {
      for (int64_t c = 0; c < Kp_; c += kLanes) {
        Vec sum = hn::Zero(d);
        for (int64_t i = 0; i < at.length; ++i) {
          float* x = s.e + std::abs(first - i) * Kp_ + c;
          sum = hn::Add(sum, clamp_log_decay(hn::LoadU(d, x)));
          hn::StoreU(hn::Mul(sum, hn::Set(d, p_.scale)), d, x);
        }
      }
    } else {
      float sum = 0;
      for (int64_t i = 0; i < at.length; ++i) {
        float& x = s.e[std::abs(first - i)];
        sum += x < kMinLogDecay ? kMinLogDecay : x;  // NaN goes through
        x = sum * p_.scale;
      }
    }
    store_rows(s.e, row, gate_width(), p_.out, at);
  }

  void l2norm(const ChunkPlace& at, const PrepareScratch& s) const {
    for (int64_t t = 0; t < at.length; ++t) {
      load_row(p_.x.data, p_.x.dtype, p_.x.at(at.batch, at.begin + t, at.head), p_.K, Kp_, s.k);
      const float rstd = inverse_norm(s.k, Kp_);
      scale_row(s.k, Kp_, rstd);
      store_row(s.k, p_.K, p_.out.data, p_.out.dtype, p_.out.at(at.batch, at.begin + t, at.head));
      if (p_.rstd)
        store_row(&rstd, 1, p_.rstd.data, p_.rstd.dtype,
                  p_.rstd.at(at.batch, at.begin + t, at.head));
    }
  }

  // kkt, scores, or the scores and kkt's inverse: the forward's score stage gives both.
  void scores(const ChunkPlace& at, const PrepareScratch& s) const {
    const int64_t rows = rows_of(at.length), k_head = p_.k_head(at.head);
    const bool is_kkt = p_.op == DELTIC_KKT;
    load_heads(p_.k, at, k_head, p_.K, Kp_, false, 1.0f, s.k);
    load_heads(is_kkt ? p_.k : p_.q, at, k_head, p_.K, Kp_, false, is_kkt ? 1.0f : p_.scale, s.q);
    load_beta(p_, at, C_, s.beta);
    load_sum_decays<kGate>(p_, at, C_, Kp_, s.e);
    spread_rows<kGate>(s, rows, Kp_);
    Fp32Engine().scores<kGate>(s, rows, p_.K, Kp_, C_);
    if constexpr (kGate == Gate::channel) {
      for (int64_t b = 0; b < rows; b += 16) diagonal_block(s, b, Kp_, C_);
    }
    finish_scores<kGate>(s, rows, C_);
    store_rows(is_kkt ? s.lower : s.scores, C_, C_, p_.out, at);
    if (!p_.inverse) return;
    invert_unit_lower(s.lower, C_, rows, s.inverse);
    store_rows(s.inverse, C_, C_, p_.inverse, at);
  }

  void inverse(const ChunkPlace& at, const PrepareScratch& s) const {
    load_lower(p_.a, at, C_, false, s.lower);
    invert_unit_lower(s.lower, C_, rows_of(at.length), s.inverse);
    store_rows(s.inverse, C_, C_, p_.out, at);
  }

  void wy(const ChunkPlace& at, const BlockScratch& scratch) const {
    const F32 d;
    const PrepareScratch& s = scratch.prepare;
    const int64_t rows = rows_of(at.length), k_head = p_.k_head(at.head);
    load_heads(p_.k, at, k_head, p_.K, Kp_, false, 1.0f, s.k);
    if (p_.q) {
      load_heads(p_.q, at, k_head, p_.K, Kp_, false, 1.0f, s.q);
    } else {
      std::fill(s.q, s.q + rows * Kp_, 0.0f);
    }
    load_beta(p_, at, C_, s.beta);
    load_sum_decays<kGate>(p_, at, C_, Kp_, s.e);
    spread_rows<kGate>(s, rows, Kp_);
    load_lower(p_.a, at, C_, true, s.lower);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < C_; j += kLanes) {
        float* x = s.lower + i * C_ + j;
        hn::StoreU(hn::Mul(hn::LoadU(d, x), hn::LoadU(d, s.beta + j)), d, x);
      }
    }
    multiply<false, true>(s.lower, C_, rows, 0, s.kd, Kp_, Kp_, s.transposed, Kp_);
    store_rows(s.transposed, Kp_, p_.K, p_.w, at);
    if (p_.qg) store_rows(s.qd, Kp_, p_.K, p_.qg, at);
    if (p_.kg) {
      carry_rows<kGate>(s.k, s.e, at.length, Kp_, s.kg, s.decay);
      store_rows(s.kg, Kp_, p_.K, p_.kg, at);
    }
    for (int64_t v = 0; p_.u && v < p_.V; v += kSlice) {
      const int64_t columns = std::min(kSlice, p_.V - v);
      load_slice(p_.v, at, v, columns, scratch.slice);
      multiply<false, true>(s.lower, C_, rows, 0, scratch.slice, kSlice, padded(columns),
                            scratch.product, kSlice);
      store_rows(scratch.product, kSlice, columns, p_.u, at, v);
    }
  }

  const Problem& p_;
  int64_t C_, Kp_;
  int threads_;
};

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();
#endif
