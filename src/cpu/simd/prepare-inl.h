// The part of a chunk that does not see the state: norms, gates, scores, the triangular inverse.
//
// Gates are handled as products, never as exponentials of sums: with e_t = exp(g_t), the factor
// exp(G_i - G_j) is e_{j+1} ... e_i. Every factor that is formed is such a product of consecutive
// e, so with g <= 0 it is at most 1, keeps its relative precision (64 roundings, 4e-6 at worst),
// and underflows only where the true value does. Nothing has to be bounded, referenced or clamped
// beyond -104 per token, and one exponential per gate value is all there is.
//
// Per channel, rows i > j meet at the coarsest boundary that separates them: rows of the upper half
// of a block of 64 (32) against columns of its lower half take the block's middle as reference and
// become one matrix product of k times prefix products with k times suffix products. Inside a block
// of 16 a row walks back through its columns and multiplies one e after the other.
#if defined(DELTIC_CPU_SIMD_PREPARE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTIC_CPU_SIMD_PREPARE_INL_H_
#undef DELTIC_CPU_SIMD_PREPARE_INL_H_
#else
#define DELTIC_CPU_SIMD_PREPARE_INL_H_
#endif

#include "core/scratch.h"
#include "cpu/recurrence.h"
#include "cpu/simd/products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

// Where a chunk of one value head lies.
struct ChunkPlace {
  int64_t batch, begin;  // first token, in the T dimension
  int64_t length;        // tokens, at most the chunk length
  int64_t head;          // value head
};

// Scratch of one thread for preparing a chunk: rows of stride Kp, C of them.
struct PrepareScratch {
  float *k, *q;                            // loaded, normalised; q times scale
  float *k_inverse_norm, *q_inverse_norm;  // [C]
  float* e;                                // exp(g): [C][Kp] per channel, [C] per head
  float *kd, *qd, *kg;                     // k exp(G), q exp(G), k exp(G_last - G)
  float *row_k[2], *row_q[2];              // k, q times prefix products inside blocks of 16, 32
  float* col_k[2];                         // k times suffix products inside blocks of 16, 32
  float* transposed;                       // [Kp][C]: panels of 32 columns
  float *lower, *scores, *inverse;         // [C][C]
  float* pairs;              // 2 x 16 x 16 vectors: partial sums of one diagonal block
  float *beta, *pair_decay;  // [C]; pair_decay: exp(G_i - G_j) over j, for a row i
  float *prefix, *suffix;    // [C] exp(G), exp(G_last - G) of a gate per head
  float* decay;              // [Kp] exp(G_last)
  float* gate_bias;          // [Kp]
  uint16_t* tile_rows;       // [C][Kp] bf16, of the tile engine

  PrepareScratch(Scratch& arena, int64_t C, int64_t Kp, bool per_channel, bool tiles) {
    const auto rows = [&] { return arena.take<float>(C, Kp); };
    const auto channel_rows = [&] { return per_channel ? rows() : nullptr; };
    k = rows(), q = rows(), e = rows(), kd = rows(), qd = rows(), kg = rows();
    for (int i = 0; i < 2; ++i) {
      row_k[i] = channel_rows(), row_q[i] = channel_rows(), col_k[i] = channel_rows();
    }
    transposed = rows();
    lower = arena.take<float>(C, C), scores = arena.take<float>(C, C);
    inverse = arena.take<float>(C, C);
    pairs = arena.take<float>(2, 16, 16, 16);
    k_inverse_norm = arena.take<float>(C), q_inverse_norm = arena.take<float>(C);
    beta = arena.take<float>(C), pair_decay = arena.take<float>(C);
    prefix = arena.take<float>(C), suffix = arena.take<float>(C);
    decay = arena.take<float>(Kp), gate_bias = arena.take<float>(Kp);
    tile_rows = tiles ? arena.take<uint16_t>(64, Kp) : nullptr;
  }
};

// use(Work<gate kind of p>(p)): the gate kind becomes a template parameter here.
template <template <Gate> class Work, class Use>
auto with_gate(const Problem& p, const Use& use) {
  switch (p.gate) {
    case Gate::none:
      return use(Work<Gate::none>(p));
    case Gate::head:
      return use(Work<Gate::head>(p));
    default:
      return use(Work<Gate::channel>(p));
  }
}

inline int64_t rows_of(int64_t length) { return (length + 15) / 16 * 16; }

// One token's q or k as an fp32 row; returns the sum of its squares, if asked for.
inline float load_head_row(const Rows& x, int64_t batch, int64_t token, int64_t head, int64_t K,
                           int64_t Kp, bool wants_squares, float* row) {
  float squares = 0.0f;
  if (wants_squares && K == Kp) {  // one pass loads and sums
    with_elements(x.dtype, [&](auto how) DELTIC_INLINE {
      const auto* from =
          static_cast<const typename decltype(how)::Element*>(x.data) + x.at(batch, token, head);
      const auto pass = [&](int64_t i) DELTIC_INLINE {
        const Vec v = how.load(from + i);
        hn::StoreU(v, F32(), row + i);
        return v;
      };
      squares = sum_squares(pass, Kp);
    });
  } else {
    load_row(x.data, x.dtype, x.at(batch, token, head), K, Kp, row);
    const auto vector = [&](int64_t i) DELTIC_INLINE { return hn::LoadU(F32(), row + i); };
    if (wants_squares) squares = sum_squares(vector, Kp);
  }
  return squares;
}
// The same, normalised and scaled.
inline void load_head(const Rows& x, int64_t batch, int64_t token, int64_t head, int64_t K,
                      int64_t Kp, bool l2norm, float scale, float* row) {
  const float squares = load_head_row(x, batch, token, head, K, Kp, l2norm, row);
  const float factor = l2norm ? scale * inverse_norm_from(squares, row, Kp) : scale;
  if (factor != 1.0f) scale_row(row, Kp, factor);
}

// q or k of a chunk and, if asked for, 1 / norms (without the norm 1); zeros up to a multiple of 16
// rows. 16 rows at a time: root and division of one row alone would hold up the next.
inline void load_heads(const Rows& x, const ChunkPlace& at, int64_t head, int64_t K, int64_t Kp,
                       bool l2norm, float scale, float* dst, float* inverse_norms = nullptr) {
  const F32 d;
  for (int64_t first = 0; first < at.length; first += kRowAlign) {
    const int64_t rows = std::min(kRowAlign, at.length - first);
    alignas(64) float inverse[kRowAlign] = {};
    float* to = dst + first * Kp;
    bool is_finite = true;
    for (int64_t t = 0; t < rows; ++t) {
      inverse[t] =
          load_head_row(x, at.batch, at.begin + first + t, head, K, Kp, l2norm, to + t * Kp);
      is_finite &= is_finite_sum(inverse[t]);
    }
    if (!l2norm) {
      std::fill(inverse, inverse + kRowAlign, 1.0f);
    } else if (is_finite) {
      for (int64_t t = 0; t < kRowAlign; t += kLanes) {
        const Vec sum = hn::Add(hn::Load(d, inverse + t), hn::Set(d, static_cast<float>(kNormEps)));
        hn::Store(hn::Div(hn::Set(d, 1.0f), hn::Sqrt(sum)), d, inverse + t);
      }
    } else {
      for (int64_t t = 0; t < rows; ++t) {
        inverse[t] = inverse_norm_from(inverse[t], to + t * Kp, Kp);
      }
    }
    for (int64_t t = 0; t < rows; ++t) {
      if (scale * inverse[t] != 1.0f) scale_row(to + t * Kp, Kp, scale * inverse[t]);
    }
    if (inverse_norms != nullptr) std::copy(inverse, inverse + rows, inverse_norms + first);
  }
  std::memset(dst + at.length * Kp, 0,
              static_cast<size_t>((rows_of(at.length) - at.length) * Kp) * sizeof(float));
}

// Columns [v0, v0 + columns) of a state, K-first in scratch whatever the layout outside: rows of S
// are `row` apart.
inline void load_columns(const States& from, int64_t slot, int64_t head, int64_t K, int64_t v0,
                         int64_t columns, float* S, int64_t row) {
  const int64_t base = from.at(slot, head) + v0 * from.s_v;
  for (int64_t d = 0; d < K; ++d) {
    const int64_t at = base + d * from.s_k;
    if (from.s_v == 1) {
      load_row(from.data, from.dtype, at, columns, columns, S + d * row);
    } else {
      for (int64_t v = 0; v < columns; ++v) {
        S[d * row + v] = load_f32(from.data, from.dtype, at + v * from.s_v);
      }
    }
  }
}
inline void store_columns(const float* S, int64_t row, int64_t K, int64_t v0, int64_t columns,
                          const States& to, int64_t slot, int64_t head) {
  const int64_t base = to.at(slot, head) + v0 * to.s_v;
  for (int64_t d = 0; d < K; ++d) {
    const int64_t at = base + d * to.s_k;
    if (to.s_v == 1) {
      store_row(S + d * row, columns, to.data, to.dtype, at);
    } else {
      for (int64_t v = 0; v < columns; ++v) {
        store(to.data, to.dtype, at + v * to.s_v, static_cast<double>(S[d * row + v]));
      }
    }
  }
}

// beta of a chunk in its form; 0 past the end.
inline void load_beta(const Problem& p, const ChunkPlace& at, int64_t C, float* beta) {
  const F32 d;
  for (int64_t t = 0; t < at.length; ++t) {
    beta[t] = p.beta
                  ? load_f32(p.beta.data, p.beta.dtype, p.beta.at(at.batch, at.begin + t, at.head))
                  : 1.0f;
  }
  std::fill(beta + at.length, beta + C, 0.0f);
  if (p.beta && p.beta_form != DELTIC_BETA_VALUE) {
    for (int64_t t = 0; t < C; t += kLanes) {
      hn::StoreU(beta_value(p.beta_form, hn::LoadU(d, beta + t)), d, beta + t);
    }
    std::fill(beta + at.length, beta + C, 0.0f);
  }
}

struct GateParams {
  GateRate rate{};
  float bias = 0.0f;  // per head
};
inline GateParams gate_params(const Problem& p, int64_t head, int64_t Kp, float* bias_row) {
  GateParams g{gate_rate(p, head)};
  if (p.gate == Gate::head) {
    if (p.dt_bias) g.bias = static_cast<float>(p.dt_bias[head]);
  } else if (p.dt_bias && p.dt_bias.contiguous) {
    load_row(p.dt_bias.data, p.dt_bias.dtype, head * p.K, p.K, Kp, bias_row);
  } else {
    for (int64_t c = 0; c < Kp; ++c)
      bias_row[c] = p.dt_bias && c < p.K ? static_cast<float>(p.dt_bias[head * p.K + c]) : 0.0f;
  }
  return g;
}

// The gate's form on n raw values, in place. bias: one for all, or one each.
template <bool kBiasEach>
inline void apply_gate(const Problem& p, const GateRate& rate, const float* bias, int64_t n,
                       float* x) {
  const F32 d;
  if (rate.is_huge()) {
    for (int64_t i = 0; i < n; ++i) x[i] = log_decay(p, x[i], rate, bias[kBiasEach ? i : 0]);
    return;
  }
  for (int64_t i = 0; i < n; i += kLanes) {
    const Vec b = kBiasEach ? hn::LoadU(d, bias + i) : hn::Set(d, *bias);
    const Vec y = gate_value(p.gate_form, hn::LoadU(d, x + i), b, rate.value, p.lower_bound);
    hn::StoreU(y, d, x + i);
  }
}

// The log decays of a chunk, g in its form: per head [C], 0 past the end; per channel a row of Kp
// for each token.
template <Gate kGate>
inline void load_log_decays(const Problem& p, const ChunkPlace& at, int64_t C, int64_t Kp,
                            float* bias_row, float* x) {
  const GateParams g = gate_params(p, at.head, Kp, bias_row);
  if constexpr (kGate == Gate::channel) {
    for (int64_t t = 0; t < at.length; ++t) {
      float* row = x + t * Kp;
      load_row(p.g.data, p.g.dtype, p.g.at(at.batch, at.begin + t, at.head), p.K, Kp, row);
      apply_gate<true>(p, g.rate, bias_row, Kp, row);
    }
  } else {
    for (int64_t t = 0; t < C; ++t) {
      x[t] = t < at.length ? load_f32(p.g.data, p.g.dtype, p.g.at(at.batch, at.begin + t, at.head))
                           : 0.0f;
    }
    apply_gate<false>(p, g.rate, &g.bias, C, x);
  }
}
// exp of n clamped log decays, in place.
inline void exp_decays(float* x, int64_t n) {
  const F32 d;
  for (int64_t i = 0; i < n; i += kLanes) {
    hn::StoreU(exp_of(clamp_log_decay(hn::LoadU(d, x + i))), d, x + i);
  }
}

// e = exp(g); 1 past the end (which changes no product).
template <Gate kGate>
inline void load_gates(const Problem& p, const ChunkPlace& at, int64_t C, int64_t Kp,
                       float* bias_row, float* e) {
  if constexpr (kGate == Gate::none) return;
  constexpr bool kChannel = kGate == Gate::channel;
  const int64_t valid = kChannel ? at.length * Kp : at.length;
  const int64_t all = kChannel ? rows_of(at.length) * Kp : C;
  load_log_decays<kGate>(p, at, C, Kp, bias_row, e);
  exp_decays(e, kChannel ? valid : all);
  std::fill(e + valid, e + all, 1.0f);
}

// exp(G_n - G_i) k_i for the first n rows, and exp(G_n): what carries the state to token n.
template <Gate kGate>
inline void carry_rows(const float* k, const float* e, int64_t n, int64_t Kp, float* kg,
                       float* decay) {
  const F32 d;
  if constexpr (kGate == Gate::none) {
    std::memcpy(kg, k, static_cast<size_t>(n * Kp) * sizeof(float));
    std::fill(decay, decay + Kp, 1.0f);
  } else if constexpr (kGate == Gate::head) {
    float f = 1.0f;
    for (int64_t t = n - 1; t >= 0; --t) {
      for (int64_t c = 0; c < Kp; c += kLanes) {
        hn::StoreU(hn::Mul(hn::LoadU(d, k + t * Kp + c), hn::Set(d, f)), d, kg + t * Kp + c);
      }
      f *= e[t];
    }
    std::fill(decay, decay + Kp, f);
  } else {
    for (int64_t c = 0; c < Kp; c += kLanes) {
      Vec f = hn::Set(d, 1.0f);
      for (int64_t t = n - 1; t >= 0; --t) {
        hn::StoreU(hn::Mul(hn::LoadU(d, k + t * Kp + c), f), d, kg + t * Kp + c);
        f = hn::Mul(f, hn::LoadU(d, e + t * Kp + c));
      }
      hn::StoreU(f, d, decay + c);
    }
  }
}

// Gates per head as factors of whole rows: exp(G_t) and exp(G_n - G_t) of the first n rows, and
// exp(G_n) for each channel.
inline void row_factors(const float* e, int64_t n, int64_t Kp, float* prefix, float* suffix,
                        float* decay) {
  float f = 1.0f;
  for (int64_t t = 0; t < n; ++t) {
    f *= e[t];
    prefix[t] = f;
  }
  f = 1.0f;
  for (int64_t t = n - 1; t >= 0; --t) {
    suffix[t] = f;
    f *= e[t];
  }
  std::fill(decay, decay + Kp, f);
}

// to = x exp(G), and times beta if there is one.
template <Gate kGate>
inline void decay_rows(const float* x, const float* e, const float* beta, int64_t rows, int64_t Kp,
                       float* to) {
  const F32 d;
  if constexpr (kGate == Gate::channel) {
    for (int64_t c = 0; c < Kp; c += kLanes) {
      Vec f = hn::Set(d, 1.0f);
      for (int64_t t = 0; t < rows; ++t) {
        f = hn::Mul(f, hn::LoadU(d, e + t * Kp + c));
        const Vec y = hn::Mul(hn::LoadU(d, x + t * Kp + c), f);
        const Vec b = hn::Set(d, beta != nullptr ? beta[t] : 1.0f);
        hn::StoreU(hn::Mul(y, b), d, to + t * Kp + c);
      }
    }
  } else {
    float f = 1.0f;
    for (int64_t t = 0; t < rows; ++t) {
      if constexpr (kGate == Gate::head) f *= e[t];
      const Vec factor = hn::Set(d, f), b = hn::Set(d, beta != nullptr ? beta[t] : 1.0f);
      for (int64_t c = t * Kp; c < (t + 1) * Kp; c += kLanes) {
        hn::StoreU(hn::Mul(hn::Mul(hn::LoadU(d, x + c), factor), b), d, to + c);
      }
    }
  }
}

// k, q times exp(G), and per channel times the prefix and suffix products of blocks of 16 and 32.
// With `beta` s.kd is times that too.
template <Gate kGate>
inline void spread_rows(const PrepareScratch& s, int64_t rows, int64_t Kp,
                        const float* beta = nullptr) {
  if (kGate != Gate::channel || rows <= 16) {
    decay_rows<kGate>(s.k, s.e, beta, rows, Kp, s.kd);
    decay_rows<kGate>(s.q, s.e, nullptr, rows, Kp, s.qd);
  } else {
    const F32 d;
    const auto beta_of = [&](int64_t t) { return hn::Set(d, beta != nullptr ? beta[t] : 1.0f); };
    const Vec one = hn::Set(d, 1.0f);
    for (int64_t c = 0; c < Kp; c += kLanes) {
      Vec f16 = one, f32 = one, f64 = one;
      for (int64_t t = 0; t < rows; ++t) {
        const int64_t i = t * Kp + c;
        const Vec e = hn::LoadU(d, s.e + i), k = hn::LoadU(d, s.k + i), q = hn::LoadU(d, s.q + i);
        f16 = t % 16 == 0 ? e : hn::Mul(f16, e);
        f32 = t % 32 == 0 ? e : hn::Mul(f32, e);
        f64 = hn::Mul(f64, e);
        hn::StoreU(hn::Mul(hn::Mul(k, f64), beta_of(t)), d, s.kd + i);
        hn::StoreU(hn::Mul(q, f64), d, s.qd + i);
        if (t & 16) {
          hn::StoreU(hn::Mul(k, f16), d, s.row_k[0] + i);
          hn::StoreU(hn::Mul(q, f16), d, s.row_q[0] + i);
        }
        if (t & 32) {
          hn::StoreU(hn::Mul(k, f32), d, s.row_k[1] + i);
          hn::StoreU(hn::Mul(q, f32), d, s.row_q[1] + i);
        }
      }
      f16 = f32 = one;
      for (int64_t t = rows - 1; t >= 0; --t) {
        const int64_t i = t * Kp + c;
        const Vec k = hn::LoadU(d, s.k + i);
        if (t % 16 == 15) f16 = one;
        if (t % 32 == 31) f32 = one;
        if (!(t & 16)) hn::StoreU(hn::Mul(k, f16), d, s.col_k[0] + i);
        if (!(t & 32)) hn::StoreU(hn::Mul(k, f32), d, s.col_k[1] + i);
        const Vec e = hn::LoadU(d, s.e + i);
        f16 = hn::Mul(f16, e);
        f32 = hn::Mul(f32, e);
      }
    }
  }
}

// Adds the 128-bit blocks of a vector and stores the four sums.
template <class D, class V>
HWY_INLINE void store_block_sum(D d, V x, float* dst) {
  if constexpr (hn::MaxLanes(D()) == 4) {
    hn::StoreU(x, d, dst);
  } else {
    const hn::Half<D> half;
    store_block_sum(half, hn::Add(hn::UpperHalf(half, x), hn::LowerHalf(half, x)), dst);
  }
}

// Four sums of lanes at once.
HWY_INLINE void sum4(Vec a, Vec b, Vec c, Vec e, float* dst) {
  const F32 d;
  const hn::RepartitionToWide<F32> dw;
  const Vec ab = hn::Add(hn::InterleaveLower(d, a, b), hn::InterleaveUpper(d, a, b));
  const Vec ce = hn::Add(hn::InterleaveLower(d, c, e), hn::InterleaveUpper(d, c, e));
  const auto lo = hn::InterleaveLower(dw, hn::BitCast(dw, ab), hn::BitCast(dw, ce));
  const auto hi = hn::InterleaveUpper(dw, hn::BitCast(dw, ab), hn::BitCast(dw, ce));
  // [a b c e] in every 128-bit block
  store_block_sum(d, hn::Add(hn::BitCast(d, lo), hn::BitCast(d, hi)), dst);
}

// One segment of channels of the walk back through a diagonal block; see the top of the file.
template <bool kFirst>
inline void walk_segment(const float* k, const float* q, const float* e, int64_t Kp, float* pairs) {
  const F32 d;
  constexpr int kSeg = 4;
  for (int64_t i = 0; i < 16; ++i) {
    Vec kf[kSeg], qf[kSeg];
    float* to_k = pairs + i * 16 * kLanes;
    float* to_q = to_k + 16 * 16 * kLanes;
    for (int64_t j = i; j >= 0; --j) {
      Vec sum_k = hn::Zero(d), sum_q = hn::Zero(d);
      DELTIC_UNROLL
      for (int s = 0; s < kSeg; ++s) {
        const Vec kj = hn::LoadU(d, k + j * Kp + s * kLanes);
        if (j == i) {
          kf[s] = kj;
          qf[s] = hn::LoadU(d, q + i * Kp + s * kLanes);
        } else {
          const Vec decay = hn::LoadU(d, e + (j + 1) * Kp + s * kLanes);
          kf[s] = hn::Mul(kf[s], decay);
          qf[s] = hn::Mul(qf[s], decay);
        }
        sum_k = hn::MulAdd(kf[s], kj, sum_k);
        sum_q = hn::MulAdd(qf[s], kj, sum_q);
      }
      if constexpr (!kFirst) {
        sum_k = hn::Add(sum_k, hn::LoadU(d, to_k + j * kLanes));
        sum_q = hn::Add(sum_q, hn::LoadU(d, to_q + j * kLanes));
      }
      hn::StoreU(sum_k, d, to_k + j * kLanes);
      hn::StoreU(sum_q, d, to_q + j * kLanes);
    }
  }
}

// Both scores of the 16 x 16 diagonal block at row b, unmasked above the diagonal.
inline void diagonal_block(const PrepareScratch& s, int64_t b, int64_t Kp, int64_t C) {
  const F32 d;
  constexpr int64_t kStep = 4 * kLanes;
  const float *k = s.k + b * Kp, *q = s.q + b * Kp, *e = s.e + b * Kp;
  // Kp is a multiple of 16, a segment of up to 64: the rest goes vector by vector.
  int64_t c = 0;
  bool first = true;
  for (; c + kStep <= Kp; c += kStep, first = false) {
    if (first) {
      walk_segment<true>(k + c, q + c, e + c, Kp, s.pairs);
    } else {
      walk_segment<false>(k + c, q + c, e + c, Kp, s.pairs);
    }
  }
  for (; c < Kp; c += kLanes, first = false) {
    for (int64_t i = 0; i < 16; ++i) {
      Vec kf = hn::LoadU(d, k + i * Kp + c), qf = hn::LoadU(d, q + i * Kp + c);
      float* to_k = s.pairs + i * 16 * kLanes;
      float* to_q = to_k + 16 * 16 * kLanes;
      for (int64_t j = i; j >= 0; --j) {
        if (j < i) {
          const Vec decay = hn::LoadU(d, e + (j + 1) * Kp + c);
          kf = hn::Mul(kf, decay);
          qf = hn::Mul(qf, decay);
        }
        const Vec kj = hn::LoadU(d, k + j * Kp + c);
        const Vec old_k = first ? hn::Zero(d) : hn::LoadU(d, to_k + j * kLanes);
        const Vec old_q = first ? hn::Zero(d) : hn::LoadU(d, to_q + j * kLanes);
        hn::StoreU(hn::MulAdd(kf, kj, old_k), d, to_k + j * kLanes);
        hn::StoreU(hn::MulAdd(qf, kj, old_q), d, to_q + j * kLanes);
      }
    }
  }
  for (int64_t i = 0; i < 16; ++i) {
    for (int64_t j = 0; j <= i; j += 4) {
      for (int which = 0; which < 2; ++which) {
        const float* from = s.pairs + (which * 256 + i * 16 + j) * kLanes;
        float* to = (which == 0 ? s.lower : s.scores) + (b + i) * C + b + j;
        sum4(hn::LoadU(d, from), hn::LoadU(d, from + kLanes), hn::LoadU(d, from + 2 * kLanes),
             hn::LoadU(d, from + 3 * kLanes), to);
      }
    }
  }
}

// exp(G_i - G_j) over j from the row before: one more factor e_i, and 1 for j = i.
inline void advance_pair_decay(float e, int64_t i, int64_t C, float* pair_decay) {
  const F32 d;
  const hn::RebindToSigned<F32> di;
  // The 1 in vectors too: a vector that was stored in part is not forwarded to the next row's load.
  for (int64_t j = 0; j < C; j += kLanes) {
    const auto is_own =
        hn::RebindMask(d, hn::Eq(hn::Iota(di, 0), hn::Set(di, static_cast<int32_t>(i - j))));
    const Vec decay = hn::Mul(hn::LoadU(d, pair_decay + j), hn::Set(d, e));
    hn::StoreU(hn::IfThenElse(is_own, hn::Set(d, 1.0f), decay), d, pair_decay + j);
  }
}

// Masks and scales the raw scores: lower becomes L (strictly lower, times beta), scores becomes
// Aqk.
template <Gate kGate>
inline void finish_scores(const PrepareScratch& s, int64_t rows, int64_t C) {
  const F32 d;
  const hn::RebindToSigned<F32> di;
  const auto lane = hn::Iota(di, 0);
  if constexpr (kGate == Gate::head) std::fill(s.pair_decay, s.pair_decay + C, 0.0f);
  for (int64_t i = 0; i < rows; ++i) {
    if constexpr (kGate == Gate::head) advance_pair_decay(s.e[i], i, C, s.pair_decay);
    const Vec beta = hn::Set(d, s.beta[i]);
    for (int64_t j = 0; j < C; j += kLanes) {
      const auto row = hn::Set(di, static_cast<int32_t>(i - j));
      Vec l = hn::Mul(hn::LoadU(d, s.lower + i * C + j), beta);
      Vec a = hn::LoadU(d, s.scores + i * C + j);
      if constexpr (kGate == Gate::head) {
        const Vec decay = hn::LoadU(d, s.pair_decay + j);
        l = hn::Mul(l, decay);
        a = hn::Mul(a, decay);
      }
      hn::StoreU(hn::IfThenElseZero(hn::RebindMask(d, hn::Lt(lane, row)), l), d,
                 s.lower + i * C + j);
      const auto up_to = hn::Not(hn::Lt(row, lane));
      hn::StoreU(hn::IfThenElseZero(hn::RebindMask(d, up_to), a), d, s.scores + i * C + j);
    }
  }
}

// What a chunk reads: k, q, beta and e.
template <Gate kGate>
inline void load_chunk(const Problem& p, const ChunkPlace& at, int64_t C, int64_t Kp,
                       const PrepareScratch& s) {
  const int64_t k_head = p.k_head(at.head);
  load_heads(p.k, at, k_head, p.K, Kp, p.l2norm, 1.0f, s.k, s.k_inverse_norm);
  load_heads(p.q, at, k_head, p.K, Kp, p.l2norm, p.scale, s.q, s.q_inverse_norm);
  load_beta(p, at, C, s.beta);
  load_gates<kGate>(p, at, C, Kp, s.gate_bias, s.e);
}

// The rows of a chunk: s.kd (times beta), qd, kg, decay and beta, and what its scores are made of.
template <Gate kGate>
inline void prepare_rows(const Problem& p, const ChunkPlace& at, int64_t C, int64_t Kp,
                         const PrepareScratch& s) {
  const int64_t rows = rows_of(at.length);
  load_chunk<kGate>(p, at, C, Kp, s);
  // beta goes to the rows of v - k S, where it is a factor of many roundings, not to the inverse's
  // columns, where one rounding of it would shift a whole token.
  spread_rows<kGate>(s, rows, Kp, s.beta);
  carry_rows<kGate>(s.k, s.e, rows, Kp, s.kg, s.decay);
}

// The scores (Aqk) and the inverse of a chunk of up to C tokens, from its rows. The engine forms
// the score products.
template <Gate kGate, class Engine>
inline void prepare_squares(const Problem& p, const ChunkPlace& at, int64_t C, int64_t Kp,
                            const PrepareScratch& s, const Engine& engine) {
  const int64_t rows = rows_of(at.length);
  engine.template scores<kGate>(s, rows, p.K, Kp, C);
  if constexpr (kGate == Gate::channel) {
    for (int64_t b = 0; b < rows; b += 16) diagonal_block(s, b, Kp, C);
  }
  finish_scores<kGate>(s, rows, C);
  invert_unit_lower(s.lower, C, rows, s.inverse);
}

// Everything of a chunk of up to C tokens up to its operands.
template <Gate kGate, class Engine>
inline void prepare_chunk(const Problem& p, const ChunkPlace& at, int64_t C, int64_t Kp,
                          const PrepareScratch& s, const Engine& engine) {
  prepare_rows<kGate>(p, at, C, Kp, s);
  prepare_squares<kGate>(p, at, C, Kp, s, engine);
}

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();
#endif
