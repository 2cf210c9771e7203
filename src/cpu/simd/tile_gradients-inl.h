// Products of the backward pass on AMX tiles: what tile_engine-inl.h says, with operands
// transposed. Per chunk of 64 tokens at K = V = 128: 1500 tile products, 24 k cycles at 16 each.
#if defined(DELTIC_CPU_SIMD_TILE_GRADIENTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTIC_CPU_SIMD_TILE_GRADIENTS_INL_H_
#undef DELTIC_CPU_SIMD_TILE_GRADIENTS_INL_H_
#else
#define DELTIC_CPU_SIMD_TILE_GRADIENTS_INL_H_
#endif

#include "cpu/simd/gradient_products-inl.h"
#include "cpu/simd/tile_engine-inl.h"

#if HWY_TARGET == HWY_AVX3
HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

// Lanes rounded to bf16.
HWY_INLINE Vec round_lanes(Vec x) {
  const __m512i bits = round_bf16(x, x);  // the low half is enough
  return Vec{_mm512_castsi512_ps(
      _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm512_castsi512_si256(bits)), 16))};
}

// x f of two rows after the other as pairs: dst[r/2][width] words; zeros up to `depth` rows.
inline void round_scaled_pairs(const float* x, const float* f, int64_t rows, int64_t depth,
                               int64_t width, uint16_t* dst) {
  const F32 d;
  const auto at = [&](int64_t i) { return hn::Mul(hn::LoadU(d, x + i), hn::LoadU(d, f + i)); };
  for (int64_t r = 0; r < rows; r += 2) {
    for (int64_t c = 0; c < width; c += 16) {
      const int64_t i = r * width + c;
      _mm512_storeu_si512(dst + r * width + 2 * c, round_pairs(at(i), at(i + width)));
    }
  }
  std::memset(dst + rows * width, 0, static_cast<size_t>((depth - rows) * width) * 2);
}

struct TileGradients {
  using Chain = TileEngine;

  // What the chain of states reads is named as in TileEngine.
  struct Operands {
    uint16_t *kd, *kg, *inverse;     // [C][Kp], [Kp][depth(C)], [C][depth(C)]
    uint16_t *minus_kd_T, *qd_T;     // [Kp][depth(C)]
    uint16_t* kg_rows;               // [C][Kp]
    uint16_t *inverse_T, *scores_T;  // [C][depth(C)]
    float *decay, *beta;             // [Kp], [C]
    Operands(Scratch& m, const Shape& s) {
      const int64_t tokens = TileEngine::depth(s.C);
      for (uint16_t** x : {&kd, &kg_rows}) *x = m.take<uint16_t>(s.C, s.Kp);
      for (uint16_t** x : {&kg, &minus_kd_T, &qd_T}) *x = m.take<uint16_t>(s.Kp, tokens);
      for (uint16_t** x : {&inverse, &inverse_T, &scores_T}) *x = m.take<uint16_t>(s.C, tokens);
      decay = m.take<float>(s.Kp), beta = m.take<float>(s.C);
    }
  };

  struct Room {
    uint16_t *d_o, *dX, *Y;           // [C][padded V]
    uint16_t *Y_T, *S_T;              // pairs of value columns: [padded V / 2][C], [..][Kp] words
    uint16_t* panel;                  // [Kp][32]
    uint16_t *N, *W, *N_T, *W_T;      // [C][depth(C)]
    uint16_t *k[2], *q[2], *columns;  // pairs of tokens: [depth(C) / 2][Kp] words
    float *rows, *pairs;              // [32][Kp]; room to transpose
    int64_t Vp;

    Room(Scratch& m, const Shape& s, bool per_channel) : Vp(s.panels * kPanel) {
      const int64_t tokens = TileEngine::depth(s.C);
      for (uint16_t** x : {&d_o, &dX, &Y, &Y_T}) *x = m.take<uint16_t>(s.C, Vp);
      S_T = m.take<uint16_t>(s.Kp, Vp), panel = m.take<uint16_t>(s.Kp, kPanel);
      for (uint16_t** x : {&N, &W, &N_T, &W_T}) *x = m.take<uint16_t>(s.C, tokens);
      const auto token_pairs = [&] { return m.take<uint16_t>(tokens, s.Kp); };
      k[0] = token_pairs(), q[0] = token_pairs();
      k[1] = per_channel ? token_pairs() : nullptr, q[1] = per_channel ? token_pairs() : nullptr;
      columns = per_channel ? token_pairs() : nullptr;
      rows = per_channel ? m.take<float>(32, s.Kp) : nullptr;
      pairs = m.take<float>(s.C * tokens / 2);
    }
  };

  static void pack(const PrepareScratch& s, const Operands& to, const Shape& shape, int64_t rows) {
    const int64_t C = shape.C, Kp = shape.Kp, tokens = TileEngine::depth(C);
    round_rows(s.kd, Kp, rows, Kp, to.kd, Kp);
    round_rows(s.kg, Kp, rows, Kp, to.kg_rows, Kp);
    TileEngine::round_transposed<false>(s.kg, Kp, rows, Kp, s.transposed, to.kg, tokens);
    TileEngine::round_transposed<true>(s.kd, Kp, rows, Kp, s.transposed, to.minus_kd_T, tokens);
    TileEngine::round_transposed<false>(s.qd, Kp, rows, Kp, s.transposed, to.qd_T, tokens);
    TileEngine::round_square(s.inverse, C, rows, to.inverse);
    TileEngine::round_transposed<false>(s.inverse, C, rows, C, s.transposed, to.inverse_T, tokens);
    TileEngine::round_transposed<false>(s.scores, C, rows, C, s.transposed, to.scores_T, tokens);
  }

  template <int64_t kWidth>
  static void pull(const Problem& p, const ChunkPlace& at, const Shape& s, const Operands& ops,
                   int64_t panel, const ChainScratch& scratch, float* dX, const float* dS,
                   float* before, Ahead* ahead) {
    const int64_t rows = rows_of(at.length), tokens = TileEngine::depth(s.C), Kp = s.Kp;
    const int64_t depth = TileEngine::depth(rows);
    uint16_t *d_o = scratch.x_pairs, *dYX = scratch.y_pairs;
    load_panel_rows(p.d_o, at, s, panel, nullptr, scratch.x);
    TileEngine::to_pairs<kWidth>(scratch.x, rows, d_o);
    round_to_pairs(dS, kWidth, Kp, kWidth, scratch.S_pairs);
    for_row_blocks(rows, [&](auto r, int64_t i) {
      constexpr int kRows = decltype(r)::value;
      if (ahead != nullptr) ahead->some();
      tile_clear<kRows, kWidth>();
      tile_block<kRows, kWidth>(ops.scores_T + i * tokens + i, tokens, d_o + i * kWidth, kWidth,
                                depth - i);
      tile_block<kRows, kWidth>(ops.kg_rows + i * Kp, Kp, scratch.S_pairs, kWidth, Kp);
      tile_write<kRows, kWidth>(scratch.y + i * kWidth, kWidth);
    });
    TileEngine::to_pairs<kWidth>(scratch.y, rows, dYX);
    for_row_blocks(rows, [&](auto r, int64_t i) {
      constexpr int kRows = decltype(r)::value;
      if (ahead != nullptr) ahead->some();
      tile_clear<kRows, kWidth>();
      tile_block<kRows, kWidth>(ops.inverse_T + i * tokens + i, tokens, dYX + i * kWidth, kWidth,
                                depth - i);
      tile_write<kRows, kWidth>(dX + i * kWidth, kWidth);
    });
    TileEngine::to_pairs<kWidth>(dX, rows, dYX);
    TileEngine::scale_state<kWidth>(ops.decay, Kp, dS, before);
    for (int64_t c = 0; c < Kp; c += 32) {
      if (ahead != nullptr) ahead->some();
      tile_read<32, kWidth>(before + c * kWidth, kWidth);
      tile_block<32, kWidth>(ops.qd_T + c * tokens, tokens, d_o, kWidth, depth);
      tile_block<32, kWidth>(ops.minus_kd_T + c * tokens, tokens, dYX, kWidth, depth);
      tile_write<32, kWidth>(before + c * kWidth, kWidth);
    }
  }

  static void contract_values(const Problem& p, const ChunkPlace& at, const Shape& s,
                              const ChunkStates& c, const GradientScratch& g, const Room& room) {
    const int64_t C = s.C, Kp = s.Kp, Vp = room.Vp, rows = rows_of(at.length);
    load_bf16_rows(p.d_o, at, rows, s.V, Vp, room.d_o);
    round_panels(c.dX, kPanel * C, s, rows, room.dX, Vp);
    round_panels(c.Y, kPanel * C, s, rows, room.Y, Vp);
    transpose_words(room.Y, Vp / 2, rows, Vp / 2, room.Y_T, C);
    multiply_tiles<true>(room.dX, Vp, rows, room.Y_T, C, rows, Vp, g.N, C);
    multiply_tiles<true>(room.d_o, Vp, rows, room.Y_T, C, rows, Vp, g.W, C);
    transpose_state(c.S, s, room);
    multiply_tiles<false>(room.d_o, Vp, rows, room.S_T, Kp, Kp, Vp, g.dq_in, Kp);
    multiply_tiles<false>(room.dX, Vp, rows, room.S_T, Kp, Kp, Vp, g.dk_in, Kp);
    transpose_state(c.dS, s, room);
    multiply_tiles<false>(room.Y, Vp, rows, room.S_T, Kp, Kp, Vp, g.dk_out, Kp);
  }

  template <Gate kGate>
  static void add_pairs(const PrepareScratch& s, const GradientScratch& g, int64_t rows, int64_t Kp,
                        int64_t C, const Room& room) {
    const int64_t tokens = TileEngine::depth(C), depth = TileEngine::depth(rows);
    TileEngine::round_square(g.N, C, rows, room.N);
    TileEngine::round_square(g.W, C, rows, room.W);
    TileEngine::round_transposed<false>(g.N, C, rows, C, room.pairs, room.N_T, tokens);
    TileEngine::round_transposed<false>(g.W, C, rows, C, room.pairs, room.W_T, tokens);
    if constexpr (kGate != Gate::channel) {
      const auto pairs = [&](const float* x, uint16_t* dst) {
        round_to_pairs(x, Kp, rows, Kp, dst);
        std::memset(dst + rows * Kp, 0, static_cast<size_t>((depth - rows) * Kp) * 2);
      };
      pairs(s.k, room.k[0]), pairs(s.q, room.q[0]);
      for_row_blocks(rows, [&](auto r, int64_t i) {
        constexpr int kRows = decltype(r)::value;
        const int64_t row = i * tokens;
        for (int64_t j = 0; j < Kp; j += 32) {
          tile_clear<kRows, 32>();
          tile_block<kRows, 32>(room.N + row, tokens, room.k[0] + 2 * j, Kp, i + 32);
          tile_write<kRows, 32>(g.dk_row + i * Kp + j, Kp);
          tile_clear<kRows, 32>();
          tile_block<kRows, 32>(room.W + row, tokens, room.k[0] + 2 * j, Kp, i + 32);
          tile_write<kRows, 32>(g.dq_row + i * Kp + j, Kp);
          tile_clear<kRows, 32>();
          tile_block<kRows, 32>(room.N_T + row + i, tokens, room.k[0] + i * Kp + 2 * j, Kp,
                                depth - i);
          tile_block<kRows, 32>(room.W_T + row + i, tokens, room.q[0] + i * Kp + 2 * j, Kp,
                                depth - i);
          tile_write<kRows, 32>(g.dk_col + i * Kp + j, Kp);
        }
      });
    } else {
      pair_dG<kGate>(s, g, rows, Kp);
      // The diagonal blocks of 16 had their own way; with zeros there, a row of the upper half of a
      // block of 32 meets just the columns of its lower half.
      for (uint16_t* x : {room.N, room.W, room.N_T, room.W_T}) {
        for (int64_t i = 0; i < rows; ++i) {
          std::memset(x + i * tokens + i / 16 * 16, 0, 16 * sizeof(uint16_t));
        }
      }
      for (int level = 0; level < 2; ++level) {
        const int64_t half = level == 0 ? 16 : 32;
        if (rows <= half) break;
        round_scaled_pairs(s.k, g.row_f[level], rows, depth, Kp, room.k[level]);
        round_scaled_pairs(s.q, g.row_f[level], rows, depth, Kp, room.q[level]);
        round_scaled_pairs(s.k, g.col_f[level], rows, depth, Kp, room.columns);
        for (int64_t i = 0; i < rows; i += half) {
          const int64_t n = std::min(half, rows - i);
          // x f is the other side's operand: dG takes it as the products have it.
          const auto product = [&](const uint16_t* a, const uint16_t* b, const uint16_t* a2,
                                   const uint16_t* b2, int64_t from, const float* f, float* to,
                                   const float* x, bool minus) {
            for_row_blocks(n, [&](auto r, int64_t sub) {
              constexpr int kRows = decltype(r)::value;
              for (int64_t j = 0; j < Kp; j += 32) {
                const int64_t row = (i + sub) * tokens + from;
                tile_clear<kRows, 32>();
                tile_block<kRows, 32>(a + row, tokens, b + from * Kp + 2 * j, Kp, 32);
                if (a2 != nullptr) {
                  tile_block<kRows, 32>(a2 + row, tokens, b2 + from * Kp + 2 * j, Kp, 32);
                }
                tile_write<kRows, 32>(room.rows + sub * Kp + j, Kp);
              }
            });
            const F32 d;
            for (int64_t c = 0; c < n * Kp; c += kLanes) {
              const Vec sum = hn::LoadU(d, room.rows + c), factor = hn::LoadU(d, f + i * Kp + c);
              float *d_x = to + i * Kp + c, *dG = g.dG + i * Kp + c;
              hn::StoreU(hn::MulAdd(sum, factor, hn::LoadU(d, d_x)), d, d_x);
              const Vec own = round_lanes(hn::Mul(hn::LoadU(d, x + i * Kp + c), factor));
              hn::StoreU(hn::MulAdd(minus ? hn::Neg(own) : own, sum, hn::LoadU(d, dG)), d, dG);
            }
          };
          if ((i & half) != 0) {  // against the columns of the half before
            const int64_t from = level == 0 ? i - 16 : 0;
            product(room.N, room.columns, nullptr, nullptr, from, g.row_f[level], g.dk_row, s.k,
                    false);
            product(room.W, room.columns, nullptr, nullptr, from, g.row_f[level], g.dq_row, s.q,
                    false);
          } else if (i + half < rows) {  // from the rows of the half after
            product(room.N_T, room.k[level], room.W_T, room.q[level], level == 0 ? i : 32,
                    g.col_f[level], g.dk_col, s.k, true);
          }
        }
      }
    }
  }

 private:
  // Rows of a bf16 tensor as they are, zeros past the end and for an absent tensor.
  static void load_bf16_rows(const Rows& x, const ChunkPlace& at, int64_t rows, int64_t columns,
                             int64_t width, uint16_t* dst) {
    const int64_t length = x ? at.length : 0;
    for (int64_t t = 0; t < length; ++t) {
      const auto* from = x.row<const uint16_t>(at.batch, at.begin + t, at.head);
      std::memcpy(dst + t * width, from, static_cast<size_t>(columns) * sizeof(uint16_t));
      std::fill(dst + t * width + columns, dst + (t + 1) * width, uint16_t{0});
    }
    std::memset(dst + length * width, 0, static_cast<size_t>((rows - length) * width) * 2);
  }

  // Panels to bf16 rows; a narrow last panel leaves zeros beside it.
  static void round_panels(const float* src, int64_t pitch, const Shape& s, int64_t rows,
                           uint16_t* dst, int64_t dst_row) {
    const F32 d;
    for (int64_t panel = 0; panel < s.panels; ++panel) {
      if (s.panel_width(panel) == 32) {
        round_rows(src + panel * pitch, 32, rows, 32, dst + panel * kPanel, dst_row);
        continue;
      }
      for (int64_t i = 0; i < rows; ++i) {
        _mm512_storeu_si512(dst + i * dst_row + panel * kPanel,
                            round_bf16(hn::LoadU(d, src + panel * pitch + i * 16), hn::Zero(d)));
      }
    }
  }

  // S [Kp][V] in panels to pairs of value columns, [padded V / 2][Kp] words.
  static void transpose_state(const float* S, const Shape& s, const Room& room) {
    for (int64_t panel = 0; panel < s.panels; ++panel) {
      Shape one = s;
      one.panels = 1, one.V = s.V - panel * kPanel;
      round_panels(S + panel * s.panel_floats(), 0, one, s.Kp, room.panel, kPanel);
      transpose_words(room.panel, 16, s.Kp, 16, room.S_T + panel * kPanel * s.Kp, s.Kp);
    }
  }

  // c = a b for `rows` x `cols`, multiples of 16. kLower: blocks of 32 that reach below the
  // diagonal.
  template <bool kLower>
  static void multiply_tiles(const uint16_t* a, int64_t a_row, int64_t rows, const uint16_t* b,
                             int64_t b_words, int64_t cols, int64_t depth, float* c,
                             int64_t c_row) {
    for_row_blocks(rows, [&](auto r, int64_t i) {
      for_row_blocks(kLower ? std::min(cols, i + 32) : cols, [&](auto w, int64_t j) {
        constexpr int kRows = decltype(r)::value, kCols = decltype(w)::value;
        tile_clear<kRows, kCols>();
        tile_block<kRows, kCols>(a + i * a_row, a_row, b + 2 * j, b_words, depth);
        tile_write<kRows, kCols>(c + i * c_row + j, c_row);
      });
    });
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET == HWY_AVX3
#endif
