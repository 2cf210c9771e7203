// Products of the backward pass in fp32: transposed operands, contractions over value columns,
// pairs of tokens. What an engine of gradients offers is said at Fp32Gradients.
#if defined(DELTIC_CPU_SIMD_GRADIENT_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTIC_CPU_SIMD_GRADIENT_PRODUCTS_INL_H_
#undef DELTIC_CPU_SIMD_GRADIENT_PRODUCTS_INL_H_
#else
#define DELTIC_CPU_SIMD_GRADIENT_PRODUCTS_INL_H_
#endif

#include "cpu/simd/chain-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

// Scratch of one thread for the gradients of a chunk.
struct GradientScratch {
  float *prefix, *suffix;                // exp(G), exp(G_last - G): [C][Kp] per channel, else [C]
  float *row_f[2], *col_f[2];            // [C][Kp] products inside blocks of 16, 32 (per channel)
  float *dk_row, *dk_col, *dq_row;       // [C][Kp] pairs inside the chunk: i's part, j's part
  float *dk_in, *dk_out, *dq_in;         // [C][Kp] through the incoming and the outgoing state
  float* dG;                             // [C][Kp] per channel, else [C]
  float *N, *W;                          // [C][C]
  float *dbeta, *diagonal, *pair_decay;  // [C]
  float* pair_dg;                        // [C] per head: what pairs give to dg
  float *state_dot, *to_last;            // [Kp]

  GradientScratch(Scratch& m, const Shape& s, bool per_channel) {
    const auto rows = [&] { return m.take<float>(s.C, s.Kp); };
    const auto factors = [&] { return m.take<float>(per_channel ? s.C * s.Kp : s.C); };
    prefix = factors(), suffix = factors(), dG = factors();
    for (int i = 0; i < 2; ++i) {
      row_f[i] = per_channel ? rows() : nullptr, col_f[i] = per_channel ? rows() : nullptr;
    }
    dk_row = rows(), dk_col = rows(), dq_row = rows();
    dk_in = rows(), dk_out = rows(), dq_in = rows();
    N = m.take<float>(s.C, s.C), W = m.take<float>(s.C, s.C);
    dbeta = m.take<float>(s.C), diagonal = m.take<float>(s.C), pair_decay = m.take<float>(s.C);
    pair_dg = m.take<float>(s.C);
    state_dot = m.take<float>(s.Kp), to_last = m.take<float>(s.Kp);
  }
};

// A chunk's matrices that live from the chains to the gradients, all in panels.
struct ChunkStates {
  const float* S;   // [Kp][V] incoming state
  const float* Y;   // [C][V] v_new
  float* dX;        // [C][V]
  const float* dS;  // [Kp][V] gradient of the outgoing state
};

template <int64_t kWidth>
struct GradientProducts {
  // y = a^T x + b S with a lower triangular [rows][a_row], b [rows][b_row].
  static HWY_NOINLINE void pull(const float* a, int64_t a_row, int64_t rows, const float* x,
                                const float* b, int64_t b_row, int64_t n, const float* S, float* y,
                                Ahead* ahead) {
    each_block<kWidth>(rows, ahead, [&](auto size, int64_t i, int64_t j) DELTIC_INLINE {
      Block<decltype(size)> acc;
      clear(acc);
      accumulate<false>(acc, a + i * a_row + i, 1, a_row, x + i * kWidth + j, kWidth, rows - i);
      accumulate<false>(acc, b + i * b_row, b_row, 1, S + j, kWidth, n);
      store_block(acc, y + i * kWidth + j, kWidth);
    });
  }
  // y = a^T x with a lower triangular.
  static HWY_NOINLINE void lower_transposed(const float* a, int64_t a_row, int64_t rows,
                                            const float* x, float* y, Ahead* ahead) {
    each_block<kWidth>(rows, ahead, [&](auto size, int64_t i, int64_t j) DELTIC_INLINE {
      Block<decltype(size)> acc;
      clear(acc);
      accumulate<false>(acc, a + i * a_row + i, 1, a_row, x + i * kWidth + j, kWidth, rows - i);
      store_block(acc, y + i * kWidth + j, kWidth);
    });
  }
  // next = decay S + a^T x - b^T y, contraction over tokens.
  static HWY_NOINLINE void push(const float* decay, const float* a, const float* b, int64_t ab_row,
                                int64_t tokens, int64_t width, const float* x, const float* y,
                                const float* S, float* next, Ahead* ahead) {
    each_block<kWidth>(width, ahead, [&](auto size, int64_t r, int64_t j) DELTIC_INLINE {
      Block<decltype(size)> acc;
      load_block(acc, S + r * kWidth + j, kWidth);
      scale_block(acc, decay + r);
      accumulate<false>(acc, a + r, 1, ab_row, x + j, kWidth, tokens);
      accumulate<true>(acc, b + r, 1, ab_row, y + j, kWidth, tokens);
      store_block(acc, next + r * kWidth + j, kWidth);
    });
  }
};

// A matrix of `rows` rows whose columns lie in panels, as a chunk's y, dX, dO do: panel p starts at
// p * pitch, its rows are panel_width(p) apart.
struct PanelMatrix {
  const float* data;
  int64_t pitch;
};

// c[rows][cols] = a b with a in panels (contraction over value columns), b [V][b_row]. cols: a
// multiple of 16. kLower: c is square and only blocks that reach below the diagonal are formed.
template <bool kLower>
inline void contract(const PanelMatrix& a, const Shape& s, int64_t rows, const float* b,
                     int64_t b_row, int64_t cols, float* c, int64_t c_row) {
  const auto columns = [&](auto width_tag, int64_t j0) {
    const int64_t i0 = kLower ? j0 : 0;
    each_block<decltype(width_tag)::value>(
        rows - i0, nullptr, [&](auto size, int64_t block, int64_t column) DELTIC_INLINE {
          const int64_t i = i0 + block, j = j0 + column;
          Block<decltype(size)> acc;
          clear(acc);
          for (int64_t p = 0; p < s.panels; ++p) {
            const int64_t width = s.panel_width(p);
            accumulate<false>(acc, a.data + p * a.pitch + i * width, width, 1,
                              b + p * kPanel * b_row + j, b_row, width);
          }
          store_block(acc, c + i * c_row + j, c_row);
        });
  };
  int64_t j = 0;
  for (; j + 32 <= cols; j += 32) columns(std::integral_constant<int64_t, 32>(), j);
  if (j < cols) columns(std::integral_constant<int64_t, 16>(), j);
}

// dst[v][r] = panels(r, v): `rows` a multiple of 4.
inline void transpose_panels(const PanelMatrix& a, const Shape& s, int64_t rows, float* dst,
                             int64_t dst_row) {
  for (int64_t p = 0; p < s.panels; ++p) {
    const int64_t width = s.panel_width(p);
    transpose(a.data + p * a.pitch, width, rows, width, dst + p * kPanel * dst_row, dst_row);
  }
}

// c[i][0..cols) += sum over j < n of a(i, j) b[j][0..cols) for `rows` rows, multiples of 16.
inline void add_product(const float* a, int64_t a_row, int64_t a_col, int64_t rows, int64_t n,
                        const float* b, int64_t b_row, int64_t cols, float* c, int64_t c_row) {
  const auto columns = [&](auto width_tag, int64_t j0) {
    each_block<decltype(width_tag)::value>(
        rows, nullptr, [&](auto size, int64_t i, int64_t column) DELTIC_INLINE {
          const int64_t j = j0 + column;
          Block<decltype(size)> acc;
          load_block(acc, c + i * c_row + j, c_row);
          accumulate<false>(acc, a + i * a_row, a_row, a_col, b + j, b_row, n);
          store_block(acc, c + i * c_row + j, c_row);
        });
  };
  int64_t j = 0;
  for (; j + 32 <= cols; j += 32) columns(std::integral_constant<int64_t, 32>(), j);
  if (j < cols) columns(std::integral_constant<int64_t, 16>(), j);
}

// to = x f and to += x f, element by element.
inline void scale_into(const float* x, const float* f, int64_t count, float* to) {
  const F32 d;
  for (int64_t i = 0; i < count; i += kLanes) {
    hn::StoreU(hn::Mul(hn::LoadU(d, x + i), hn::LoadU(d, f + i)), d, to + i);
  }
}
inline void scaled_add(const float* x, const float* f, int64_t count, float* to) {
  const F32 d;
  for (int64_t i = 0; i < count; i += kLanes) {
    hn::StoreU(hn::MulAdd(hn::LoadU(d, x + i), hn::LoadU(d, f + i), hn::LoadU(d, to + i)), d,
               to + i);
  }
}

// Per channel, what dk_row, dq_row and dk_col give to dG. In the running sum of dG a pair's two
// terms cancel (all but those of the tokens between them), which they do only if both see the same
// numbers.
template <Gate kGate>
inline void pair_dG(const PrepareScratch& s, const GradientScratch& g, int64_t rows, int64_t Kp) {
  if constexpr (kGate != Gate::channel) return;
  const F32 d;
  for (int64_t i = 0; i < rows * Kp; i += kLanes) {
    const Vec k = hn::LoadU(d, s.k + i), q = hn::LoadU(d, s.q + i);
    const Vec dk = hn::Sub(hn::LoadU(d, g.dk_row + i), hn::LoadU(d, g.dk_col + i));
    hn::StoreU(hn::MulAdd(k, dk, hn::Mul(q, hn::LoadU(d, g.dq_row + i))), d, g.dG + i);
  }
}

// Per head, what pairs give to dg, from their products (k_i k_j in s.lower, q_i k_j in s.scores)
// and the gradients N and W: a pair (i, j) belongs to tokens j + 1 .. i and is added to those
// alone, so nothing cancels.
inline void pair_dg(const PrepareScratch& s, const GradientScratch& g, int64_t rows, int64_t C) {
  const F32 d;
  float* later = g.pair_decay;  // [C]: over the rows from t on, by column
  std::fill(later, later + C, 0.0f);
  for (int64_t t = rows - 1; t >= 0; --t) {
    Vec sum = hn::Zero(d);
    for (int64_t j = 0; j <= t; j += kLanes) {  // N and W are 0 from the diagonal on
      const int64_t i = t * C + j;
      const Vec n = hn::Mul(hn::LoadU(d, g.N + i), hn::LoadU(d, s.lower + i));
      const Vec w = hn::MulAdd(hn::LoadU(d, g.W + i), hn::LoadU(d, s.scores + i), n);
      const Vec all = hn::Add(hn::LoadU(d, later + j), w);
      hn::StoreU(all, d, later + j);
      sum = hn::Add(sum, hn::IfThenElseZero(
                             hn::FirstN(d, static_cast<size_t>(std::max<int64_t>(0, t - j))), all));
    }
    g.pair_dg[t] = sum_lanes(sum);
  }
}

// fp32 products. An engine of gradients has: the chain's engine, whose states it computes again;
// the operands of a chunk and how they are packed; the products of the chain of gradients (pull),
// of the contractions over value columns (contract_values), and of pairs of tokens (add_pairs).
struct Fp32Gradients {
  using Chain = Fp32Engine;
  using Operands = Fp32Engine::Operands;

  struct Room {
    float *S_T, *Y_T;  // [padded V][Kp], [padded V][C]
    float* d_o;        // panels
    float *rows_k, *rows_q;
    Room(Scratch& m, const Shape& s, bool per_channel) {
      S_T = m.take<float>(s.state_floats());
      Y_T = m.take<float>(s.panels, kPanel, s.C), d_o = m.take<float>(s.panels, kPanel, s.C);
      rows_k = per_channel ? m.take<float>(s.C, s.Kp) : nullptr;
      rows_q = per_channel ? m.take<float>(s.C, s.Kp) : nullptr;
    }
  };

  static void pack(const PrepareScratch&, const Operands&, const Shape&, int64_t) {}

  // One chunk of the chain of gradients on one panel: dX, and from dS, the gradient of the state
  // after the chunk, that before it.
  template <int64_t kWidth>
  static void pull(const Problem& p, const ChunkPlace& at, const Shape& s, const Operands& ops,
                   int64_t panel, const ChainScratch& scratch, float* dX, const float* dS,
                   float* before, Ahead* ahead) {
    using Products = GradientProducts<kWidth>;
    const int64_t rows = rows_of(at.length), Kp = s.Kp;
    float *d_o = scratch.x, *dY = scratch.y;
    load_panel_rows(p.d_o, at, s, panel, nullptr, d_o);
    Products::pull(ops.scores, s.C, rows, d_o, ops.kg, Kp, s.K, dS, dY, ahead);
    Products::lower_transposed(ops.inverse, s.C, rows, dY, dX, ahead);
    Products::push(ops.decay, ops.qd, ops.kd, Kp, at.length, Kp, d_o, dX, dS, before, ahead);
  }

  // N = dX Y^T and W = dO Y^T (blocks that reach below the diagonal), dq_in = dO S^T, dk_in = dX
  // S^T, dk_out = Y dS^T.
  static void contract_values(const Problem& p, const ChunkPlace& at, const Shape& s,
                              const ChunkStates& c, const GradientScratch& g, const Room& room) {
    const int64_t C = s.C, Kp = s.Kp, rows = rows_of(at.length);
    const PanelMatrix Y{c.Y, kPanel * C}, dX{c.dX, kPanel * C}, dO{room.d_o, kPanel * C};
    for (int64_t panel = 0; panel < s.panels; ++panel) {
      load_panel_rows(p.d_o, at, s, panel, nullptr, room.d_o + panel * kPanel * C);
    }
    transpose_panels(Y, s, rows, room.Y_T, C);
    contract<true>(dX, s, rows, room.Y_T, C, rows, g.N, C);
    contract<true>(dO, s, rows, room.Y_T, C, rows, g.W, C);
    transpose_panels({c.S, s.panel_floats()}, s, Kp, room.S_T, Kp);
    contract<false>(dO, s, rows, room.S_T, Kp, Kp, g.dq_in, Kp);
    contract<false>(dX, s, rows, room.S_T, Kp, Kp, g.dk_in, Kp);
    transpose_panels({c.dS, s.panel_floats()}, s, Kp, room.S_T, Kp);
    contract<false>(Y, s, rows, room.S_T, Kp, Kp, g.dk_out, Kp);
  }

  // To dk_row, dq_row and dk_col what N and W give; per channel, to dG what the three give. There
  // the diagonal blocks of 16 are there already; before, all is zero.
  template <Gate kGate>
  static void add_pairs(const PrepareScratch& s, const GradientScratch& g, int64_t rows, int64_t Kp,
                        int64_t C, const Room& room) {
    if constexpr (kGate != Gate::channel) {
      for (int64_t b = 0; b < rows; b += 16) {  // rows b.. meet columns up to b + 15
        add_product(g.N + b * C, C, 1, 16, b + 16, s.k, Kp, Kp, g.dk_row + b * Kp, Kp);
        add_product(g.W + b * C, C, 1, 16, b + 16, s.k, Kp, Kp, g.dq_row + b * Kp, Kp);
        add_product(g.N + b * C + b, 1, C, 16, rows - b, s.k + b * Kp, Kp, Kp, g.dk_col + b * Kp,
                    Kp);
        add_product(g.W + b * C + b, 1, C, 16, rows - b, s.q + b * Kp, Kp, Kp, g.dk_col + b * Kp,
                    Kp);
      }
    } else {
      // Rows of the upper half against columns of the lower half of a block, with the forward's
      // factors.
      for (int level = 0; level < 2; ++level) {
        const int64_t half = level == 0 ? 16 : 32;
        scale_into(s.k, g.row_f[level], rows * Kp, s.row_k[level]);
        scale_into(s.q, g.row_f[level], rows * Kp, s.row_q[level]);
        scale_into(s.k, g.col_f[level], rows * Kp, s.col_k[level]);
        for (int64_t r = half; r < rows; r += 2 * half) {
          const int64_t n = std::min(half, rows - r), j = r - half;
          const auto clear_rows = [&](float* x, int64_t first, int64_t count) {
            std::memset(x + first * Kp, 0, static_cast<size_t>(count * Kp) * sizeof(float));
          };
          clear_rows(room.rows_k, r, n), clear_rows(room.rows_q, r, n);
          clear_rows(room.rows_k, j, half);
          const float *N = g.N + r * C + j, *W = g.W + r * C + j;
          add_product(N, C, 1, n, half, s.col_k[level] + j * Kp, Kp, Kp, room.rows_k + r * Kp, Kp);
          add_product(W, C, 1, n, half, s.col_k[level] + j * Kp, Kp, Kp, room.rows_q + r * Kp, Kp);
          add_product(N, 1, C, half, n, s.row_k[level] + r * Kp, Kp, Kp, room.rows_k + j * Kp, Kp);
          add_product(W, 1, C, half, n, s.row_q[level] + r * Kp, Kp, Kp, room.rows_k + j * Kp, Kp);
          const auto add = [&](const float* x, const float* f, int64_t first, int64_t count,
                               float* to) {
            scaled_add(x + first * Kp, f + first * Kp, count * Kp, to + first * Kp);
          };
          add(room.rows_k, g.row_f[level], r, n, g.dk_row);
          add(room.rows_q, g.row_f[level], r, n, g.dq_row);
          add(room.rows_k, g.col_f[level], j, half, g.dk_col);
        }
      }
    }
    pair_dG<kGate>(s, g, rows, Kp);
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();
#endif
