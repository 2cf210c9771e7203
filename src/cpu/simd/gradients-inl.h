// The gradients of one chunk and value head, once its states and the gradients of its new values
// are known. With Y = v_new, dX the gradient of X = beta (v - kd S) (Y = A X), dS' the gradient of
// the state after the chunk, q~ = scale q, and E_ij = exp(G_i - G_j):
//
//   M = dX Y^T, W = dO Y^T           dv = beta dX
//   dbeta_i = M_ii / beta_i; on tiles, where Y has bf16's rounding, dX_i v_i + k_i dk / beta_i with
//             the terms of dk that have i's own beta (error 1.3 to 2.4 of the plain form's,
//             now 1.0)
//   N_ij = -beta_i M_ij (i > j)      the gradient of k_i k_j E_ij;  W_ij that of q~_i k_j E_ij
//   dq~  = sum_j W k_j E + exp(G) (dO S^T)
//   dk   = sum_j N k_j E + sum_i (N k_i + W q~_i) E
//          - beta exp(G) (dX S^T) + exp(G_last - G) (Y dS'^T)
//   dG   = q~ dq~ + k dk (terms with G_i) - k dk (terms with -G_i); terms with i = j cancel and are
//          left out; the last row also takes what belongs to G_last
//   dg_t = sum of dG_i over i >= t
#if defined(DELTIC_CPU_SIMD_GRADIENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTIC_CPU_SIMD_GRADIENTS_INL_H_
#undef DELTIC_CPU_SIMD_GRADIENTS_INL_H_
#else
#define DELTIC_CPU_SIMD_GRADIENTS_INL_H_
#endif

#include "cpu/simd/gradient_products-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

// One of prefix and suffix beside element i, which is in row t.
template <Gate kGate>
HWY_INLINE Vec factor_at(const float* f, int64_t t, int64_t i) {
  const F32 d;
  return kGate == Gate::channel ? hn::LoadU(d, f + i) : hn::Set(d, f[t]);
}

// All the factors of a chunk from its e: prefix and suffix products of the whole chunk and, per
// channel, of blocks.
template <Gate kGate>
inline void factor_rows(const float* e, int64_t rows, int64_t Kp, const GradientScratch& g) {
  if constexpr (kGate != Gate::channel) {
    float f = 1.0f;
    for (int64_t t = 0; t < rows; ++t) {
      if constexpr (kGate == Gate::head) f *= e[t];
      g.prefix[t] = f;
    }
    f = 1.0f;
    for (int64_t t = rows - 1; t >= 0; --t) {
      g.suffix[t] = f;
      if constexpr (kGate == Gate::head) f *= e[t];
    }
  } else {
    const F32 d;
    const Vec one = hn::Set(d, 1.0f);
    for (int64_t c = 0; c < Kp; c += kLanes) {
      Vec f16 = one, f32 = one, f64 = one;
      for (int64_t t = 0; t < rows; ++t) {
        const Vec x = hn::LoadU(d, e + t * Kp + c);
        f16 = t % 16 == 0 ? x : hn::Mul(f16, x);
        f32 = t % 32 == 0 ? x : hn::Mul(f32, x);
        f64 = hn::Mul(f64, x);
        hn::StoreU(f64, d, g.prefix + t * Kp + c);
        hn::StoreU(f16, d, g.row_f[0] + t * Kp + c);
        hn::StoreU(f32, d, g.row_f[1] + t * Kp + c);
      }
      f16 = f32 = f64 = one;
      for (int64_t t = rows - 1; t >= 0; --t) {
        if (t % 16 == 15) f16 = one;
        if (t % 32 == 31) f32 = one;
        hn::StoreU(f64, d, g.suffix + t * Kp + c);
        hn::StoreU(f16, d, g.col_f[0] + t * Kp + c);
        hn::StoreU(f32, d, g.col_f[1] + t * Kp + c);
        const Vec x = hn::LoadU(d, e + t * Kp + c);
        f16 = hn::Mul(f16, x), f32 = hn::Mul(f32, x), f64 = hn::Mul(f64, x);
      }
    }
  }
}

// N and W from M and W: signs, beta, masks; per head the pair decays too. W's diagonal goes aside.
template <Gate kGate>
inline void finish_pairs(const float* e, const float* beta, int64_t rows, int64_t C,
                         const GradientScratch& g) {
  const F32 d;
  const hn::RebindToSigned<F32> di;
  std::fill(g.pair_decay, g.pair_decay + C, kGate == Gate::head ? 0.0f : 1.0f);
  for (int64_t i = 0; i < rows; ++i) {
    g.diagonal[i] = g.W[i * C + i];
    if constexpr (kGate == Gate::head) advance_pair_decay(e[i], i, C, g.pair_decay);
    const Vec factor = hn::Set(d, -beta[i]);
    const auto row = hn::Set(di, static_cast<int32_t>(i));
    for (int64_t j = 0; j < C; j += kLanes) {
      const auto below = hn::RebindMask(d, hn::Lt(hn::Iota(di, static_cast<int32_t>(j)), row));
      const Vec decay = hn::LoadU(d, g.pair_decay + j);
      const Vec n = hn::Mul(hn::Mul(hn::LoadU(d, g.N + i * C + j), factor), decay);
      const Vec w = hn::Mul(hn::LoadU(d, g.W + i * C + j), decay);
      hn::StoreU(hn::IfThenElseZero(below, n), d, g.N + i * C + j);
      hn::StoreU(hn::IfThenElseZero(below, w), d, g.W + i * C + j);
    }
  }
}

// Pairs of one diagonal block of 16 rows, per channel: the walk back of the forward, with
// gradients.
inline void diagonal_pairs(const PrepareScratch& s, const GradientScratch& g, int64_t b, int64_t Kp,
                           int64_t C) {
  const F32 d;
  for (int64_t c = 0; c < Kp; c += kLanes) {
    for (int64_t i = b + 1; i < b + 16; ++i) {
      const Vec k = hn::LoadU(d, s.k + i * Kp + c), q = hn::LoadU(d, s.q + i * Kp + c);
      Vec f = hn::Set(d, 1.0f);
      Vec dk = hn::LoadU(d, g.dk_row + i * Kp + c), dq = hn::LoadU(d, g.dq_row + i * Kp + c);
      for (int64_t j = i - 1; j >= b; --j) {
        f = hn::Mul(f, hn::LoadU(d, s.e + (j + 1) * Kp + c));
        const Vec n = hn::Set(d, g.N[i * C + j]), w = hn::Set(d, g.W[i * C + j]);
        const Vec kj = hn::Mul(f, hn::LoadU(d, s.k + j * Kp + c));
        dk = hn::MulAdd(n, kj, dk);
        dq = hn::MulAdd(w, kj, dq);
        const Vec pulled = hn::MulAdd(w, q, hn::Mul(n, k));
        float* to = g.dk_col + j * Kp + c;
        hn::StoreU(hn::MulAdd(f, pulled, hn::LoadU(d, to)), d, to);
      }
      hn::StoreU(dk, d, g.dk_row + i * Kp + c);
      hn::StoreU(dq, d, g.dq_row + i * Kp + c);
    }
  }
}

// dk_row, dq_row, dk_col and their part of dG: what pairs of tokens inside the chunk give.
template <Gate kGate, class Engine>
inline void pair_gradients(const PrepareScratch& s, const GradientScratch& g,
                           const typename Engine::Room& room, int64_t rows, int64_t Kp, int64_t C) {
  for (float* x : {g.dk_row, g.dq_row, g.dk_col}) {
    std::memset(x, 0, static_cast<size_t>(rows * Kp) * sizeof(float));
  }
  if constexpr (kGate == Gate::channel) {
    for (int64_t b = 0; b < rows; b += 16) diagonal_pairs(s, g, b, Kp, C);
  }
  Engine::template add_pairs<kGate>(s, g, rows, Kp, C, room);
}

// The gate's form backwards: dg of the log decay becomes that of the raw value; the parameters'
// sums, added to d_param (zeros). Rows of `dg` (Kp per channel, 1 per head) are overwritten.
template <Gate kGate>
inline void gate_gradient(const Problem& p, const ChunkPlace& at, int64_t Kp, float* bias_row,
                          float* raw, float* dg, double* d_param) {
  const F32 d;
  if (p.gate_form == DELTIC_GATE_LOG_DECAY) return;
  constexpr bool kChannel = kGate == Gate::channel;
  const GateParams params = gate_params(p, at.head, Kp, bias_row);
  const int64_t width = kChannel ? Kp : kRowAlign, valid = kChannel ? p.K : 1;
  const Vec factor = hn::Set(d, params.rate.value);
  alignas(64) float row[kRowAlign] = {}, drow[kRowAlign] = {};
  double dA = 0;
  for (int64_t t = 0; t < at.length; ++t) {
    const int64_t from = p.g.at(at.batch, at.begin + t, at.head);
    float* x = kChannel ? raw : row;
    float* dx = kChannel ? dg + t * Kp : drow;
    load_row(p.g.data, p.g.dtype, from, valid, width, x);
    if (!kChannel) drow[0] = dg[t];
    for (int64_t c = 0; c < width && params.rate.is_huge(); ++c) {
      const float bias = kChannel ? bias_row[c] : params.bias;
      const GateGradient gradient = log_decay_gradient(p, x[c], params.rate, bias, dx[c]);
      dx[c] = gradient.g, x[c] = gradient.A_log;
    }
    for (int64_t c = 0; c < width && !params.rate.is_huge(); c += kLanes) {
      const Vec bias = kChannel ? hn::LoadU(d, bias_row + c) : hn::Set(d, params.bias);
      const Vec shifted = hn::Add(hn::LoadU(d, x + c), bias), up = hn::LoadU(d, dx + c);
      Vec down, da;
      if (p.gate_form == DELTIC_GATE_SOFTPLUS) {
        down = hn::Neg(hn::Mul(hn::Mul(factor, up), sigmoid(shifted)));
        da = hn::Neg(hn::Mul(hn::Mul(factor, up), softplus(shifted)));
      } else {
        const Vec slope = sigmoid_slope(hn::Mul(factor, shifted));
        down = hn::Mul(hn::Mul(hn::Set(d, p.lower_bound), hn::Mul(factor, slope)), up);
        da = hn::Mul(down, shifted);
      }
      hn::StoreU(down, d, dx + c);
      hn::StoreU(da, d, x + c);
    }
    for (int64_t c = 0; c < valid; ++c) {
      dA += static_cast<double>(x[c]);
      d_param[1 + c] += static_cast<double>(dx[c]);
    }
    if (!kChannel) dg[t] = drow[0];
  }
  d_param[0] = dA;
}

// beta = 0 leaves nothing to divide by: the residual v - S'^T k of one token, from its parts.
template <Gate kGate>
inline float residual_dot(const PrepareScratch& s, const GradientScratch& g, const ChunkStates& c,
                          const Problem& p, const ChunkPlace& at, const Shape& shape, int64_t i) {
  const int64_t Kp = shape.Kp;
  const auto prefix = [&](int64_t row, int64_t col) {
    return kGate == Gate::channel ? g.prefix[row * Kp + col] : g.prefix[row];
  };
  float* pair = g.pair_decay;  // k_i k_j E_ij
  for (int64_t j = 0; j < i; ++j) pair[j] = 0.0f;
  for (int64_t d = 0; d < shape.K; ++d) {
    float f = s.k[i * Kp + d];
    for (int64_t j = i - 1; j >= 0; --j) {
      if constexpr (kGate == Gate::channel) f *= s.e[(j + 1) * Kp + d];
      if constexpr (kGate == Gate::head) f *= s.e[j + 1];
      pair[j] += f * s.k[j * Kp + d];
    }
  }
  double dot = 0;
  for (int64_t panel = 0; panel < shape.panels; ++panel) {
    const int64_t width = shape.panel_width(panel);
    const float *S = c.S + panel * shape.panel_floats(), *Y = c.Y + panel * kPanel * shape.C;
    const float* dX = c.dX + panel * kPanel * shape.C;
    for (int64_t v = 0; v < shape.panel_columns(panel); ++v) {
      float z = load_f32(p.v.data, p.v.dtype,
                         p.v.at(at.batch, at.begin + i, at.head) + panel * kPanel + v);
      for (int64_t d = 0; d < shape.K; ++d) z -= s.k[i * Kp + d] * prefix(i, d) * S[d * width + v];
      for (int64_t j = 0; j < i; ++j) z -= pair[j] * Y[j * width + v];
      dot += static_cast<double>(z) * static_cast<double>(dX[i * width + v]);
    }
  }
  return static_cast<float>(dot);
}

// dX . Y of each token over the value columns, or dX . v.
template <bool kOfInputs>
inline void row_dots(const Problem& p, const ChunkPlace& at, const ChunkStates& c,
                     const Shape& shape, float* dot) {
  const F32 d;
  float v_row[kPanel];
  for (int64_t t = 0; t < at.length; ++t) {
    Vec sum = hn::Zero(d);
    for (int64_t panel = 0; panel < shape.panels; ++panel) {
      const int64_t width = shape.panel_width(panel), from = panel * kPanel * shape.C + t * width;
      const float* row = c.Y + from;
      if constexpr (kOfInputs) {
        load_row(p.v.data, p.v.dtype, p.v.at(at.batch, at.begin + t, at.head) + panel * kPanel,
                 shape.panel_columns(panel), width, v_row);
        row = v_row;
      }
      for (int64_t v = 0; v < width; v += kLanes) {
        sum = hn::MulAdd(hn::LoadU(d, c.dX + from + v), hn::LoadU(d, row + v), sum);
      }
    }
    dot[t] = sum_lanes(sum);
  }
}

// decay dS' . S per channel: the part of G_last that belongs to the state itself.
inline void state_dots(const ChunkStates& c, const Shape& shape, const float* decay, float* dot) {
  const F32 d;
  for (int64_t r = 0; r < shape.Kp; ++r) {
    Vec sum = hn::Zero(d);
    for (int64_t panel = 0; panel < shape.panels; ++panel) {
      const int64_t width = shape.panel_width(panel),
                    from = panel * shape.panel_floats() + r * width;
      for (int64_t v = 0; v < width; v += kLanes) {
        sum = hn::MulAdd(hn::LoadU(d, c.S + from + v), hn::LoadU(d, c.dS + from + v), sum);
      }
    }
    dot[r] = decay[r] * sum_lanes(sum);
  }
}

// dg as the running sum of dG from the last token on. Every term of dg_t has e_t as a factor; their
// sum here is a difference of larger ones, which leaves rounding where e_t is (almost) 0. It would
// be multiplied by g itself in dA_log. A decay that is NaN is not gone.
template <Gate kGate>
inline void sum_dG(const float* e, int64_t length, int64_t Kp, const GradientScratch& g) {
  constexpr float kGone = 1e-8f;
  if constexpr (kGate == Gate::head) {
    float sum = 0.0f;
    for (int64_t c = 0; c < Kp; ++c) sum += g.to_last[c] + g.state_dot[c];
    for (int64_t t = length - 1; t >= 0; --t) {
      sum += g.dG[t];
      g.dG[t] = e[t] <= kGone ? 0.0f : sum + g.pair_dg[t];
    }
  } else if constexpr (kGate == Gate::channel) {
    const F32 d;
    float* sum = g.to_last;
    for (int64_t c = 0; c < Kp; c += kLanes) {
      hn::StoreU(hn::Add(hn::LoadU(d, sum + c), hn::LoadU(d, g.state_dot + c)), d, sum + c);
    }
    for (int64_t t = length - 1; t >= 0; --t) {
      for (int64_t c = 0; c < Kp; c += kLanes) {
        float* dG = g.dG + t * Kp + c;
        const Vec x = hn::Add(hn::LoadU(d, sum + c), hn::LoadU(d, dG));
        hn::StoreU(x, d, sum + c);
        const auto is_gone = hn::Le(hn::LoadU(d, e + t * Kp + c), hn::Set(d, kGone));
        hn::StoreU(hn::IfThenZeroElse(is_gone, x), d, dG);
      }
    }
  }
}

// Everything of a chunk after its chains; s holds its rows (k, q, e, beta). dq_sum and dk_sum
// [C][Kp] collect the heads of a group: the first one sets them.
template <Gate kGate, class Engine>
inline void chunk_gradients(const Problem& p, const ChunkPlace& at, const Shape& shape,
                            const PrepareScratch& s, const GradientScratch& g,
                            const typename Engine::Room& room, const ChunkStates& c, bool is_first,
                            float* dq_sum, float* dk_sum) {
  const F32 d;
  const int64_t C = shape.C, Kp = shape.Kp, rows = rows_of(at.length);
  factor_rows<kGate>(s.e, rows, Kp, g);
  Engine::contract_values(p, at, shape, c, g, room);
  row_dots<Engine::Chain::kTiles>(p, at, c, shape, g.dbeta);
  finish_pairs<kGate>(s.e, s.beta, rows, C, g);
  pair_gradients<kGate, Engine>(s, g, room, rows, Kp, C);
  if constexpr (kGate == Gate::head) {
    typename Engine::Chain().template scores<kGate>(s, rows, p.K, Kp, C);
    pair_dg(s, g, rows, C);
  }
  if constexpr (kGate != Gate::none) state_dots(c, shape, s.decay, g.state_dot);

  // The sums of the parts.
  std::fill(g.to_last, g.to_last + Kp, 0.0f);
  for (int64_t t = 0; t < at.length; ++t) {
    const Vec own = hn::Set(d, g.diagonal[t]), minus_beta = hn::Set(d, -s.beta[t]);
    Vec row_dG = hn::Zero(d), key_dot = hn::Zero(d);
    for (int64_t col = 0; col < Kp; col += kLanes) {
      const int64_t i = t * Kp + col;
      const Vec k = hn::LoadU(d, s.k + i), q = hn::LoadU(d, s.q + i);
      const Vec prefix = factor_at<kGate>(g.prefix, t, i);
      const Vec dq_in = hn::Mul(prefix, hn::LoadU(d, g.dq_in + i));
      const Vec dk_in = hn::Mul(hn::Mul(minus_beta, prefix), hn::LoadU(d, g.dk_in + i));
      const Vec dk_out = hn::Mul(factor_at<kGate>(g.suffix, t, i), hn::LoadU(d, g.dk_out + i));
      const Vec dq = hn::Add(hn::LoadU(d, g.dq_row + i), dq_in);
      const Vec dk_plus = hn::Add(hn::LoadU(d, g.dk_row + i), dk_in);
      const Vec dk_minus = hn::LoadU(d, g.dk_col + i);
      if constexpr (Engine::Chain::kTiles) key_dot = hn::MulAdd(k, dk_plus, key_dot);
      if constexpr (kGate != Gate::none) {
        Vec dG = hn::MulAdd(k, dk_in, hn::Mul(q, dq_in));
        if constexpr (kGate == Gate::channel) dG = hn::Add(dG, hn::LoadU(d, g.dG + i));
        if (t + 1 < at.length) {
          const Vec out = hn::Mul(k, dk_out);
          dG = hn::Sub(dG, out);
          hn::StoreU(hn::Add(hn::LoadU(d, g.to_last + col), out), d, g.to_last + col);
        }
        if constexpr (kGate == Gate::channel) hn::StoreU(dG, d, g.dG + i);
        row_dG = hn::Add(row_dG, dG);
      }
      const Vec dk = hn::Add(hn::Add(dk_plus, dk_minus), hn::MulAdd(own, q, dk_out));
      const Vec dq_all = hn::MulAdd(own, k, dq);
      hn::StoreU(is_first ? dk : hn::Add(hn::LoadU(d, dk_sum + i), dk), d, dk_sum + i);
      hn::StoreU(is_first ? dq_all : hn::Add(hn::LoadU(d, dq_sum + i), dq_all), d, dq_sum + i);
    }
    if constexpr (kGate == Gate::head) g.dG[t] = sum_lanes(row_dG);
    if (std::abs(s.beta[t]) <= 1e-18f) {
      g.dbeta[t] = residual_dot<kGate>(s, g, c, p, at, shape, t);
    } else if constexpr (Engine::Chain::kTiles) {
      g.dbeta[t] += sum_lanes(key_dot) / s.beta[t];
    } else {
      g.dbeta[t] /= s.beta[t];
    }
  }
  sum_dG<kGate>(s.e, at.length, Kp, g);
}

// Stores dv, dbeta and dg of a chunk and head.
template <Gate kGate>
inline void store_gradients(const Problem& p, const ChunkPlace& at, const Shape& shape,
                            const PrepareScratch& s, const GradientScratch& g, const ChunkStates& c,
                            double* d_param) {
  if (p.dv) {
    for (int64_t panel = 0; panel < shape.panels; ++panel) {
      const int64_t width = shape.panel_width(panel);
      float* dX = c.dX + panel * kPanel * shape.C;
      for (int64_t t = 0; t < at.length; ++t) {
        scale_row(dX + t * width, width, s.beta[t]);
        store_row(dX + t * width, shape.panel_columns(panel), p.dv.data, p.dv.dtype,
                  p.dv.at(at.batch, at.begin + t, at.head) + panel * kPanel);
      }
    }
  }
  if (p.dbeta) {
    if (p.beta_form != DELTIC_BETA_VALUE) {
      const float full = p.beta_form == DELTIC_BETA_SIGMOID ? 1.0f : 2.0f;
      for (int64_t t = 0; t < at.length; ++t) {
        const float x =
            load_f32(p.beta.data, p.beta.dtype, p.beta.at(at.batch, at.begin + t, at.head));
        g.dbeta[t] *= full * hn::GetLane(sigmoid_slope(hn::Set(F32(), x)));
      }
    }
    for (int64_t t = 0; t < at.length; ++t) {
      store_row(g.dbeta + t, 1, p.dbeta.data, p.dbeta.dtype,
                p.dbeta.at(at.batch, at.begin + t, at.head));
    }
  }
  std::fill(d_param, d_param + 1 + shape.Kp, 0.0);
  if constexpr (kGate != Gate::none) {
    gate_gradient<kGate>(p, at, shape.Kp, s.gate_bias, s.transposed, g.dG, d_param);
    const int64_t row = kGate == Gate::channel ? shape.Kp : 1,
                  width = kGate == Gate::channel ? p.K : 1;
    for (int64_t t = 0; p.dg && t < at.length; ++t) {
      store_row(g.dG + t * row, width, p.dg.data, p.dg.dtype,
                p.dg.at(at.batch, at.begin + t, at.head));
    }
  }
}

// cpu/gradients.h's normalize_gradient of a padded row, but for the factor r: dy becomes dx / (s
// r).
inline void take_off_along(const float* y, float r, int64_t width, float* dy) {
  const hn::ScalableTag<double> d;
  const hn::Rebind<float, decltype(d)> half;
  constexpr int64_t kStep = HWY_LANES(double);
  auto dot = hn::Zero(d), squares = hn::Zero(d);
  for (int64_t c = 0; c < width; c += kStep) {
    const auto v = hn::PromoteTo(d, hn::LoadU(half, y + c));
    dot = hn::MulAdd(v, hn::PromoteTo(d, hn::LoadU(half, dy + c)), dot);
    squares = hn::MulAdd(v, v, squares);
  }
  const auto along = hn::Set(d, norm_gradient_along(hn::GetLane(hn::SumOfLanes(d, dot)),
                                                    hn::GetLane(hn::SumOfLanes(d, squares)), r));
  for (int64_t c = 0; c < width; c += kStep) {
    const auto v = hn::PromoteTo(d, hn::LoadU(half, y + c));
    const auto rest = hn::NegMulAdd(along, v, hn::PromoteTo(d, hn::LoadU(half, dy + c)));
    hn::StoreU(hn::DemoteTo(half, rest), half, dy + c);
  }
}

// dq or dk of a chunk's q/k head to memory. d_y: of y = scale x / |x| or, without inverse norms, of
// scale x.
inline void store_head_gradient(const Rows& dx, const ChunkPlace& at, int64_t head, int64_t K,
                                int64_t Kp, float scale, const float* y, const float* inverse_norms,
                                float* d_y) {
  if (!dx) return;
  for (int64_t t = 0; t < at.length; ++t) {
    float* d_row = d_y + t * Kp;
    float factor = scale;
    if (inverse_norms != nullptr) {
      take_off_along(y + t * Kp, inverse_norms[t], Kp, d_row);
      factor *= inverse_norms[t];
    }
    if (factor != 1.0f) scale_row(d_row, Kp, factor);
    store_row(d_row, K, dx.data, dx.dtype, dx.at(at.batch, at.begin + t, head));
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();
#endif
