// The gradients of the building blocks (the formulas are in cpu/block_gradients.h): the backward
// pass's stages with loads and stores around.
#if defined(DELTIC_CPU_SIMD_BLOCK_GRADIENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTIC_CPU_SIMD_BLOCK_GRADIENTS_INL_H_
#undef DELTIC_CPU_SIMD_BLOCK_GRADIENTS_INL_H_
#else
#define DELTIC_CPU_SIMD_BLOCK_GRADIENTS_INL_H_
#endif

#include "cpu/gradients.h"
#include "cpu/simd/blocks-inl.h"
#include "cpu/simd/gradients-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

inline void zero(float* x, int64_t count) {
  std::memset(x, 0, static_cast<size_t>(count) * sizeof(float));
}

// y = a^T x with a lower triangular, [rows][C]; x and y [rows][row], `cols` columns of them.
inline void multiply_lower_transposed(const float* a, int64_t C, int64_t rows, const float* x,
                                      int64_t row, int64_t cols, float* y) {
  zero(y, rows * row);
  for (int64_t b = 0; b < rows; b += 16) {
    add_product(a + b * C + b, 1, C, 16, rows - b, x + b * row, row, cols, y + b * row, row);
  }
}

// c += x y^T for blocks that reach below the diagonal; x [rows][row], y_T [n][C].
inline void add_lower_product(const float* x, int64_t row, int64_t rows, int64_t n,
                              const float* y_T, int64_t C, float* c) {
  for (int64_t b = 0; b < rows; b += 16) {
    add_product(x + b * row, row, 1, 16, n, y_T, C, b + 16, c + b * C, C);
  }
}

template <Gate kGate>
class BlockGradients {
 public:
  explicit BlockGradients(const Problem& p)
      : p_(p),
        C_(p.chunk),
        Kp_(padded(p.K)),
        group_(p.HV / p.H),
        threads_(block_threads(p, p.HV)) {}

  size_t workspace_bytes() const {
    Scratch arena(nullptr);
    ChunkTable(p_, arena);
    arena.take<double>(num_parameter_sums(p_));
    Scratch counter(nullptr);
    GradientBlockScratch(counter, *this);
    arena.take<std::byte>(counter.used(), threads_);
    return arena.used();
  }

  void run(std::span<std::byte> workspace) const {
    Scratch arena(workspace.data());
    ChunkTable chunks(p_, arena);
    chunks.fill();
    double* sums = arena.take<double>(num_parameter_sums(p_));
    Scratch counter(nullptr);
    GradientBlockScratch(counter, *this);
    std::byte* scratch_base = workspace.data() + arena.used();
    run_team(threads_, [&](const Member& member) {
      const FlushDenormals flush;
      Scratch own(scratch_base + static_cast<size_t>(member.index) * counter.used());
      const GradientBlockScratch scratch(own, *this);
      if (wants_parameter_sums(p_)) {  // in the order of a sequence's chunks
        member.for_each(p_.N * p_.HV, [&](int64_t i) {
          double* sum = sums + i * parameter_sums_per_head(p_);
          std::fill_n(sum, parameter_sums_per_head(p_), 0.0);
          for (int64_t c = chunks.first(i / p_.HV); c < chunks.first(i / p_.HV + 1); ++c) {
            gate(chunks.at(c, i % p_.HV), scratch, sum);
          }
        });
      } else {
        member.for_each(chunks.size() * p_.H,
                        [&](int64_t i) { run_chunk(chunks.at(i / p_.H, i % p_.H), scratch); });
      }
    });
    store_parameter_gradients(p_, sums);
    zero_gradient_padding(p_);
  }

 private:
  bool pairs_tokens() const {
    return p_.op == DELTIC_KKT || p_.op == DELTIC_SCORES || p_.op == DELTIC_WY;
  }
  // No value columns: those of `wy` come in slices.
  Shape shape() const {
    Shape s(p_, kRowAlign, p_.chunk);
    s.panels = 0;
    if (!pairs_tokens()) s.Kp = kRowAlign;
    return s;
  }

  struct GradientBlockScratch {
    PrepareScratch prepare;
    GradientScratch gradient;
    Fp32Gradients::Room room;
    float* dG;                         // [C][Kp]
    float *up, *raw;                   // [C][Kp] what came back; x, or the log decays
    float *dq, *dk;                    // [C][Kp] sums over a group
    float *values, *d_values, *slice;  // [C][kSlice]
    float* transposed;                 // [kSlice][C]
    float* bias;                       // [Kp]
    double* sums;                      // one chunk's parameter sums

    GradientBlockScratch(Scratch& arena, const BlockGradients& b)
        : prepare(arena, b.C_, b.shape().Kp, kGate == Gate::channel, false),
          gradient(arena, b.shape(), kGate == Gate::channel),
          room(arena, b.shape(), kGate == Gate::channel) {
      dG = arena.take<float>(b.C_, b.shape().Kp);
      up = arena.take<float>(b.C_, b.Kp_), raw = arena.take<float>(b.C_, b.Kp_);
      dq = arena.take<float>(b.C_, b.shape().Kp), dk = arena.take<float>(b.C_, b.shape().Kp);
      values = arena.take<float>(b.C_, kSlice), d_values = arena.take<float>(b.C_, kSlice);
      slice = arena.take<float>(b.C_, kSlice), transposed = arena.take<float>(b.C_, kSlice);
      bias = arena.take<float>(b.Kp_);
      sums = arena.take<double>(1 + b.Kp_);
    }
  };

  void run_chunk(const ChunkPlace& at, const GradientBlockScratch& s) const {
    switch (p_.op) {
      case DELTIC_CUMSUM:
      case DELTIC_GATE:
        return gate(at, s, nullptr);
      case DELTIC_L2NORM:
        load_heads(p_.d_out, at, at.head, p_.K, Kp_, false, 1.0f, s.up);
        load_heads(p_.x, at, at.head, p_.K, Kp_, true, 1.0f, s.raw, s.prepare.k_inverse_norm);
        return store_head_gradient(p_.dx, at, at.head, p_.K, Kp_, 1.0f, s.raw,
                                   s.prepare.k_inverse_norm, s.up);
      case DELTIC_INVERSE:
        return inverse(at, s);
      default:
        return group(at, s);
    }
  }

  // cumsum and gate, per channel. sum: A_log, dt_bias of this head.
  void gate(const ChunkPlace& at, const GradientBlockScratch& s, double* sum) const {
    if constexpr (kGate == Gate::channel) {
      load_heads(p_.d_out, at, at.head, p_.K, Kp_, false, 1.0f, s.up);
      if (p_.op == DELTIC_CUMSUM) sum_back(at, s);
      std::fill_n(s.sums, 1 + Kp_, 0.0);
      gate_gradient<kGate>(p_, at, Kp_, s.bias, s.raw, s.up, s.sums);
      for (int64_t i = 0; sum != nullptr && i < 1 + p_.K; ++i) sum[i] += s.sums[i];
      if (p_.dg) store_rows(s.up, Kp_, p_.K, p_.dg, at);
    }
  }

  // s.up becomes the gradient of the log decays: its sums from the other end, 0 below the bound.
  void sum_back(const ChunkPlace& at, const GradientBlockScratch& s) const {
    const F32 d;
    load_log_decays<kGate>(p_, at, C_, Kp_, s.bias, s.raw);
    const int64_t first = p_.reverse ? 0 : at.length - 1;
    for (int64_t c = 0; c < Kp_; c += kLanes) {
      Vec sum = hn::Zero(d);
      for (int64_t i = 0; i < at.length; ++i) {
        const int64_t place = std::abs(first - i) * Kp_ + c;
        sum = hn::Add(sum, hn::LoadU(d, s.up + place));
        const auto is_below = hn::Lt(hn::LoadU(d, s.raw + place), hn::Set(d, kMinLogDecay));
        hn::StoreU(hn::IfThenZeroElse(is_below, hn::Mul(sum, hn::Set(d, p_.scale))), d,
                   s.up + place);
      }
    }
  }

  // dA = -X^T D X^T, strictly lower.
  void inverse(const ChunkPlace& at, const GradientBlockScratch& scratch) const {
    const PrepareScratch& s = scratch.prepare;
    float *D = scratch.gradient.N, *X_T = scratch.gradient.W, *XtD = s.scores;
    const int64_t rows = rows_of(at.length);
    if (p_.out) {
      load_lower(p_.out, at, C_, false, s.inverse);
      for (int64_t i = 0; i < rows; ++i) s.inverse[i * C_ + i] = 1.0f;
    } else {
      load_lower(p_.a, at, C_, false, s.lower);
      invert_unit_lower(s.lower, C_, rows, s.inverse);
    }
    load_lower(p_.d_out, at, C_, false, D);
    multiply_lower_transposed(s.inverse, C_, rows, D, C_, rows, XtD);
    transpose(s.inverse, C_, rows, rows, X_T, C_);
    for (int64_t j = 0; j < rows; j += 16) {  // columns j.. of X^T end at row j + 15
      multiply<true, false>(XtD + j * C_, C_, rows - j, j + 16, X_T + j, C_, 16,
                            s.lower + j * C_ + j, C_);
    }
    store_lower(at, false, s.lower);
  }

  // Rows of da; entries above the diagonal (or on it) become 0.
  void store_lower(const ChunkPlace& at, bool with_diagonal, float* x) const {
    if (!p_.da) return;
    for (int64_t t = 0; t < at.length; ++t) {
      std::fill(x + t * C_ + t + (with_diagonal ? 1 : 0), x + (t + 1) * C_, 0.0f);
    }
    store_rows(x, C_, C_, p_.da, at);
  }

  // The value heads of one q/k head, in order; at.head is the q/k head.
  void group(ChunkPlace at, const GradientBlockScratch& s) const {
    const int64_t rows = rows_of(at.length), k_head = at.head;
    zero(s.dq, rows * Kp_), zero(s.dk, rows * Kp_);
    load_heads(p_.k, at, k_head, p_.K, Kp_, false, 1.0f, s.prepare.k);
    for (at.head = k_head * group_; at.head < (k_head + 1) * group_; ++at.head) {
      load_beta(p_, at, C_, s.prepare.beta);
      load_sum_decays<kGate>(p_, at, C_, Kp_, s.prepare.e);
      p_.op == DELTIC_WY ? wy(at, s) : products(at, s);
      if constexpr (kGate == Gate::head) {
        for (int64_t t = 0; t < at.length; ++t) {  // row t of dG has been read: t <= t * Kp
          s.dG[t] = sum_row(s.dG + t * Kp_);
        }
      }
      if (p_.dg) store_rows(s.dG, gate_row(), gate_width(p_), p_.dg, at);
      if (p_.dbeta) store_rows(s.gradient.dbeta, 1, 1, p_.dbeta, at);
    }
    at.head = k_head;
    if (p_.dq) store_rows(s.dq, Kp_, p_.K, p_.dq, at);
    if (p_.dk) store_rows(s.dk, Kp_, p_.K, p_.dk, at);
  }
  int64_t gate_row() const { return kGate == Gate::channel ? Kp_ : 1; }
  float sum_row(const float* x) const {
    const F32 d;
    Vec sum = hn::Zero(d);
    for (int64_t c = 0; c < Kp_; c += kLanes) sum = hn::Add(sum, hn::LoadU(d, x + c));
    return sum_lanes(sum);
  }

  // kkt and scores: y_ij = x_i E_ij k_j with x = beta k or scale q. The backward pass's pairs give
  // the gradients of both of its score matrices; here one of them is 0.
  void products(const ChunkPlace& at, const GradientBlockScratch& scratch) const {
    const F32 d;
    const PrepareScratch& s = scratch.prepare;
    const GradientScratch& g = scratch.gradient;
    const int64_t rows = rows_of(at.length), k_head = p_.k_head(at.head);
    const bool is_kkt = p_.op == DELTIC_KKT;
    if (is_kkt) {
      std::memcpy(s.q, s.k, static_cast<size_t>(rows * Kp_) * sizeof(float));
      for (int64_t t = 0; t < rows; ++t) scale_row(s.q + t * Kp_, Kp_, s.beta[t]);
    } else {
      load_heads(p_.q, at, k_head, p_.K, Kp_, false, p_.scale, s.q);
    }
    load_lower(p_.d_out, at, C_, !is_kkt, g.W);
    zero(g.N, rows * C_);
    finish_pairs<kGate>(s.e, s.beta, rows, C_, g);
    if constexpr (kGate == Gate::channel) factor_rows<kGate>(s.e, rows, Kp_, g);
    pair_gradients<kGate, Fp32Gradients>(s, g, scratch.room, rows, Kp_, C_);

    float* dx_sum = is_kkt ? scratch.dk : scratch.dq;
    for (int64_t t = 0; t < at.length; ++t) {
      const Vec own = hn::Set(d, g.diagonal[t]), f = hn::Set(d, is_kkt ? s.beta[t] : p_.scale);
      Vec dbeta = hn::Zero(d);
      for (int64_t i = t * Kp_; i < (t + 1) * Kp_; i += kLanes) {
        const Vec k = hn::LoadU(d, s.k + i), x = hn::LoadU(d, s.q + i);
        const Vec dx = hn::LoadU(d, g.dq_row + i), dk = hn::LoadU(d, g.dk_col + i);
        dbeta = hn::MulAdd(k, dx, dbeta);
        hn::StoreU(hn::NegMulAdd(k, dk, hn::Mul(x, dx)), d, scratch.dG + i);
        add(hn::MulAdd(own, x, dk), scratch.dk + i);
        add(hn::Mul(f, hn::MulAdd(own, k, dx)), dx_sum + i);
      }
      g.dbeta[t] = sum_lanes(dbeta);
    }
  }
  static HWY_INLINE void add(Vec x, float* to) {
    hn::StoreU(hn::Add(x, hn::LoadU(F32(), to)), F32(), to);
  }

  void wy(const ChunkPlace& at, const GradientBlockScratch& scratch) const {
    const PrepareScratch& s = scratch.prepare;
    const GradientScratch& g = scratch.gradient;
    const int64_t rows = rows_of(at.length);
    factor_rows<kGate>(s.e, rows, Kp_, g);
    load_lower(p_.a, at, C_, true, s.lower);
    zero(s.scores, rows * C_);  // becomes da
    zero(scratch.dG, rows * Kp_), zero(g.dbeta, C_);
    if (p_.d_w) keys(at, scratch);
    if (p_.d_kg) carried_keys(at, scratch);
    if (p_.d_qg) queries(at, scratch);
    for (int64_t v = 0; p_.d_u && v < p_.V; v += kSlice) values(at, scratch, v);
    for (int64_t t = 0; !p_.d_u && p_.dv && t < at.length; ++t) {
      zero_row(p_.dv.data, p_.dv.dtype, p_.dv.at(at.batch, at.begin + t, at.head), p_.V);
    }
    store_lower(at, true, s.scores);
  }

  // w = A K': da, and dk, dbeta, dG through K' = beta k exp(G).
  void keys(const ChunkPlace& at, const GradientBlockScratch& scratch) const {
    const F32 d;
    const PrepareScratch& s = scratch.prepare;
    const GradientScratch& g = scratch.gradient;
    const int64_t rows = rows_of(at.length);
    float *d_w = s.q, *decayed = s.kd, *pulled = g.dk_in;
    load_heads(p_.d_w, at, at.head, p_.K, Kp_, false, 1.0f, d_w);
    for (int64_t i = 0; i < rows * Kp_; i += kLanes) {
      hn::StoreU(hn::Mul(hn::LoadU(d, s.k + i), factor_at<kGate>(g.prefix, i / Kp_, i)), d,
                 decayed + i);
    }
    multiply_lower_transposed(s.lower, C_, rows, d_w, Kp_, Kp_, pulled);
    for (int64_t t = 0; t < at.length; ++t) {
      const Vec beta = hn::Set(d, s.beta[t]);
      Vec dbeta = hn::Zero(d);
      for (int64_t i = t * Kp_; i < (t + 1) * Kp_; i += kLanes) {
        const Vec x = hn::LoadU(d, pulled + i), k = hn::LoadU(d, decayed + i);
        const Vec term = hn::Mul(k, x);
        dbeta = hn::Add(dbeta, term);
        add(hn::Mul(beta, term), scratch.dG + i);
        add(hn::Mul(beta, hn::Mul(factor_at<kGate>(g.prefix, t, i), x)), scratch.dk + i);
      }
      g.dbeta[t] += sum_lanes(dbeta);
    }
    if (!p_.da) return;
    for (int64_t t = 0; t < rows; ++t) scale_row(decayed + t * Kp_, Kp_, s.beta[t]);
    transpose(decayed, Kp_, rows, Kp_, s.transposed, C_);
    add_lower_product(d_w, Kp_, rows, p_.K, s.transposed, C_, s.scores);
  }

  // kg = k exp(G_last - G): dk and dG; the last row's own term cancels.
  void carried_keys(const ChunkPlace& at, const GradientBlockScratch& scratch) const {
    const F32 d;
    const PrepareScratch& s = scratch.prepare;
    const GradientScratch& g = scratch.gradient;
    const int64_t last = at.length - 1;
    load_heads(p_.d_kg, at, at.head, p_.K, Kp_, false, 1.0f, scratch.up);
    for (int64_t c = 0; c < Kp_; c += kLanes) {
      Vec to_last = hn::Zero(d);
      for (int64_t t = 0; t < at.length; ++t) {
        const int64_t i = t * Kp_ + c;
        const Vec x = hn::Mul(factor_at<kGate>(g.suffix, t, i), hn::LoadU(d, scratch.up + i));
        add(x, scratch.dk + i);
        if (t == last) break;
        const Vec term = hn::Mul(hn::LoadU(d, s.k + i), x);
        to_last = hn::Add(to_last, term);
        add(hn::Neg(term), scratch.dG + i);
      }
      add(to_last, scratch.dG + last * Kp_ + c);
    }
  }

  // qg = q exp(G): dq and dG.
  void queries(const ChunkPlace& at, const GradientBlockScratch& scratch) const {
    const F32 d;
    const PrepareScratch& s = scratch.prepare;
    const GradientScratch& g = scratch.gradient;
    load_heads(p_.q, at, p_.k_head(at.head), p_.K, Kp_, false, 1.0f, s.q);
    load_heads(p_.d_qg, at, at.head, p_.K, Kp_, false, 1.0f, scratch.up);
    for (int64_t i = 0; i < at.length * Kp_; i += kLanes) {
      const Vec x = hn::Mul(factor_at<kGate>(g.prefix, i / Kp_, i), hn::LoadU(d, scratch.up + i));
      add(x, scratch.dq + i);
      add(hn::Mul(hn::LoadU(d, s.q + i), x), scratch.dG + i);
    }
  }

  // u = A V', columns [v, v + kSlice): da, and dv, dbeta through V' = beta v.
  void values(const ChunkPlace& at, const GradientBlockScratch& scratch, int64_t v) const {
    const F32 d;
    const PrepareScratch& s = scratch.prepare;
    const GradientScratch& g = scratch.gradient;
    const int64_t rows = rows_of(at.length), columns = std::min(kSlice, p_.V - v);
    float* pulled = scratch.slice;
    load_slice(p_.v, at, v, columns, scratch.values);
    load_slice(p_.d_u, at, v, columns, scratch.d_values);
    multiply_lower_transposed(s.lower, C_, rows, scratch.d_values, kSlice, padded(columns), pulled);
    for (int64_t t = 0; t < at.length; ++t) {
      Vec dbeta = hn::Zero(d);
      for (int64_t i = t * kSlice; i < (t + 1) * kSlice; i += kLanes) {
        dbeta = hn::MulAdd(hn::LoadU(d, scratch.values + i), hn::LoadU(d, pulled + i), dbeta);
      }
      g.dbeta[t] += sum_lanes(dbeta);
      scale_row(pulled + t * kSlice, kSlice, s.beta[t]);
    }
    if (p_.dv) store_rows(pulled, kSlice, columns, p_.dv, at, v);
    if (!p_.da) return;
    for (int64_t t = 0; t < rows; ++t) scale_row(scratch.values + t * kSlice, kSlice, s.beta[t]);
    transpose(scratch.values, kSlice, rows, kSlice, scratch.transposed, C_);
    add_lower_product(scratch.d_values, kSlice, rows, columns, scratch.transposed, C_, s.scores);
  }

  const Problem& p_;
  int64_t C_, Kp_, group_;
  int threads_;
};

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();
#endif
