// Products on AMX tiles: bf16 operands, fp32 accumulators. Gates, norms, the diagonal score blocks
// of per-channel gates, the triangular inverse and the state stay fp32; what a product reads is
// rounded to bf16 once. A tile product takes pairs of contraction rows: "pairs" below are 32-bit
// words (x[2r][c], x[2r+1][c]).
//
// Per chunk of 64 tokens at K = V = 128: 560 tile products, 9 k cycles at 16 each.
#if defined(DELTIC_CPU_SIMD_TILE_ENGINE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTIC_CPU_SIMD_TILE_ENGINE_INL_H_
#undef DELTIC_CPU_SIMD_TILE_ENGINE_INL_H_
#else
#define DELTIC_CPU_SIMD_TILE_ENGINE_INL_H_
#endif

#include "cpu/simd/chain-inl.h"
#include "cpu/tiles.h"

#if HWY_TARGET == HWY_AVX3
HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

// 32 floats to bf16, round to nearest even: lo first.
HWY_INLINE __m512i round_bf16(Vec lo, Vec hi) {
  __m512i r;
  asm("vcvtne2ps2bf16 %2, %1, %0" : "=v"(r) : "v"(hi.raw), "v"(lo.raw));
  return r;
}
// (a, b) word by word: the pair format.
HWY_INLINE __m512i round_pairs(Vec a, Vec b) {
  alignas(64) static constexpr uint16_t kOrder[32] = {0,  16, 1,  17, 2,  18, 3,  19, 4,  20, 5,
                                                      21, 6,  22, 7,  23, 8,  24, 9,  25, 10, 26,
                                                      11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
  return _mm512_permutexvar_epi16(_mm512_load_si512(kOrder), round_bf16(a, b));
}

// rows x width (a multiple of 32) floats to bf16 rows.
inline void round_rows(const float* src, int64_t src_row, int64_t rows, int64_t width,
                       uint16_t* dst, int64_t dst_row) {
  const F32 d;
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t c = 0; c < width; c += 32) {
      const float* x = src + i * src_row + c;
      _mm512_storeu_si512(dst + i * dst_row + c, round_bf16(hn::LoadU(d, x), hn::LoadU(d, x + 16)));
    }
  }
}
// rows (even) x width (a multiple of 16) floats to pairs: dst[r/2][width] words.
template <bool kNegate = false>
inline void round_to_pairs(const float* src, int64_t src_row, int64_t rows, int64_t width,
                           uint16_t* dst) {
  const F32 d;
  const __m512i sign = _mm512_set1_epi32(kNegate ? static_cast<int>(0x80008000u) : 0);
  for (int64_t i = 0; i < rows; i += 2) {
    for (int64_t c = 0; c < width; c += 16) {
      const float* x = src + i * src_row + c;
      const __m512i words = round_pairs(hn::LoadU(d, x), hn::LoadU(d, x + src_row));
      _mm512_storeu_si512(dst + i * width + 2 * c, _mm512_xor_si512(words, sign));
    }
  }
}
// 32-bit words, 16 x 16 blocks: dst[c][r] = src[r][c].
inline void transpose_words(const uint16_t* src, int64_t src_row, int64_t rows, int64_t cols,
                            uint16_t* dst, int64_t dst_row) {
  transpose(reinterpret_cast<const float*>(src), src_row, rows, cols, reinterpret_cast<float*>(dst),
            dst_row);
}

// Accumulators tmm0..3 (2 x 2 tiles) += a b: a has 16 or 32 rows, b 16 or 32 columns of pairs.
template <int kRows, int kCols>
HWY_INLINE void tile_block(const uint16_t* a, int64_t a_row, const uint16_t* b, int64_t b_words,
                           int64_t depth) {
  for (int64_t k = 0; k < depth; k += 32) {
    tile_load<4>(a + k, a_row * 2);
    tile_load<6>(b + k * b_words, b_words * 4);
    tile_dot<0, 4, 6>();
    if constexpr (kCols == 32) {
      tile_load<7>(b + k * b_words + 32, b_words * 4);
      tile_dot<1, 4, 7>();
    }
    if constexpr (kRows == 32) {
      tile_load<5>(a + 16 * a_row + k, a_row * 2);
      tile_dot<2, 5, 6>();
      if constexpr (kCols == 32) tile_dot<3, 5, 7>();
    }
  }
}
template <int kRows, int kCols>
HWY_INLINE void tile_clear() {
  tile_zero<0>();
  if constexpr (kCols == 32) tile_zero<1>();
  if constexpr (kRows == 32) tile_zero<2>();
  if constexpr (kRows == 32 && kCols == 32) tile_zero<3>();
}
template <int kRows, int kCols>
HWY_INLINE void tile_read(const float* c, int64_t c_row) {
  tile_load<0>(c, c_row * 4);
  if constexpr (kCols == 32) tile_load<1>(c + 16, c_row * 4);
  if constexpr (kRows == 32) tile_load<2>(c + 16 * c_row, c_row * 4);
  if constexpr (kRows == 32 && kCols == 32) tile_load<3>(c + 16 * c_row + 16, c_row * 4);
}
template <int kRows, int kCols>
HWY_INLINE void tile_write(float* c, int64_t c_row) {
  tile_store<0>(c, c_row * 4);
  if constexpr (kCols == 32) tile_store<1>(c + 16, c_row * 4);
  if constexpr (kRows == 32) tile_store<2>(c + 16 * c_row, c_row * 4);
  if constexpr (kRows == 32 && kCols == 32) tile_store<3>(c + 16 * c_row + 16, c_row * 4);
}
// body<kRows>(i) for blocks of 32 rows and a last one of 16.
template <class Body>
HWY_INLINE void for_row_blocks(int64_t rows, const Body& body) {
  int64_t i = 0;
  for (; i + 32 <= rows; i += 32) body(std::integral_constant<int, 32>(), i);
  if (i < rows) body(std::integral_constant<int, 16>(), i);
}

struct TileEngine {
  static constexpr int64_t kKeyAlign = 32;
  static constexpr bool kTiles = true;
  static constexpr Arithmetic kArithmetic = Arithmetic::bf16_tiles;
  static int64_t step(const Problem& p) { return p.chunk; }
  static int64_t pauses(int64_t) { return 10; }  // calls of Ahead::some per panel
  static int64_t depth(int64_t tokens) { return (tokens + 31) / 32 * 32; }

  struct Operands {
    uint16_t *kd, *qd;           // [C][Kp]
    uint16_t* kg;                // [Kp][depth(C)]: transposed
    uint16_t *inverse, *scores;  // [C][depth(C)]
    float *decay, *beta;         // [Kp], [C]
    Operands(Scratch& arena, const Shape& s) {
      const int64_t tokens = depth(s.C);
      kd = arena.take<uint16_t>(s.C, s.Kp), qd = arena.take<uint16_t>(s.C, s.Kp);
      kg = arena.take<uint16_t>(s.Kp, tokens);
      inverse = arena.take<uint16_t>(s.C, tokens), scores = arena.take<uint16_t>(s.C, tokens);
      decay = arena.take<float>(s.Kp), beta = arena.take<float>(s.C);
    }
  };

  template <Gate kGate>
  static const Operands& of_step(const Operands& own) {
    return own;
  }
  template <Gate kGate>
  void prepare_step(const Problem& p, const ChunkPlace& at, const Shape& shape,
                    const PrepareScratch& scratch, const Operands& to) const {
    const PrepareScratch s = redirect(scratch, to);
    prepare_chunk<kGate>(p, at, shape.C, shape.Kp, s, *this);
    pack(s, to, shape, rows_of(at.length));
  }

  struct Steps {
    Steps(Scratch&, const Problem&, const Shape&, float*) {}
  };
  template <Gate kGate, class Ops>
  static void cut(const Problem&, const PrepareScratch&, const ChunkPlace&, const Ops&,
                  const Shape&, const Steps&) {}
  template <Gate kGate, class Ops>
  static const Ops& step_at(const Ops& chunk, const Steps&, const Problem&, const Shape&, int64_t) {
    return chunk;
  }

  void enter() const { tile_configure(); }
  void leave() const { tile_release(); }

  template <class Ops>
  static PrepareScratch redirect(PrepareScratch scratch, const Ops& to) {
    scratch.decay = to.decay, scratch.beta = to.beta;
    return scratch;
  }

  static void pack(const PrepareScratch& s, const Operands& to, const Shape& shape, int64_t rows) {
    const int64_t C = shape.C, Kp = shape.Kp;
    round_rows(s.kd, Kp, rows, Kp, to.kd, Kp);
    round_rows(s.qd, Kp, rows, Kp, to.qd, Kp);
    round_transposed<false>(s.kg, Kp, rows, Kp, s.transposed, to.kg, depth(C));
    round_square(s.inverse, C, rows, to.inverse);
    round_square(s.scores, C, rows, to.scores);
  }
  // [rows][width] floats to bf16, transposed: row c holds its `rows` numbers side by side, zeros up
  // to a tile's depth. room: width x depth(rows) / 2 floats.
  template <bool kNegate>
  static void round_transposed(const float* src, int64_t src_row, int64_t rows, int64_t width,
                               float* room, uint16_t* dst, int64_t dst_row) {
    auto* pairs = reinterpret_cast<uint16_t*>(room);
    round_to_pairs<kNegate>(src, src_row, rows, width, pairs);
    if (rows < depth(rows)) {
      std::memset(pairs + rows * width, 0, static_cast<size_t>(16 * width) * 2);
    }
    transpose_words(pairs, width, depth(rows) / 2, width, dst, dst_row / 2);
  }
  // [rows][C] floats to bf16 rows of depth(C).
  static void round_square(const float* src, int64_t C, int64_t rows, uint16_t* dst) {
    if (C >= 32) return round_rows(src, C, rows, C, dst, C);
    const F32 d;
    for (int64_t i = 0; i < rows; ++i) {  // the other half of a tile's depth is zero
      _mm512_storeu_si512(dst + i * 32, round_bf16(hn::LoadU(d, src + i * C), hn::Zero(d)));
    }
  }

  // One 16 x 16 block of both scores.
  static void score_tile(const uint16_t* k, const uint16_t* q, const uint16_t* b, int64_t Kp,
                         float* lower, float* scores, int64_t C) {
    tile_zero<0>();
    tile_zero<1>();
    for (int64_t c = 0; c < Kp; c += 32) {
      tile_load<4>(k + c, Kp * 2);
      tile_load<5>(q + c, Kp * 2);
      tile_load<6>(b + c * 16, 64);
      tile_dot<0, 4, 6>();
      tile_dot<1, 5, 6>();
    }
    tile_store<0>(lower, C * 4);
    tile_store<1>(scores, C * 4);
  }

  template <Gate kGate>
  void scores(const PrepareScratch& s, int64_t rows, int64_t, int64_t Kp, int64_t C) const {
    // bf16 rows of k and q, and columns as pairs, 16 columns after the other.
    auto* k = reinterpret_cast<uint16_t*>(s.transposed);
    uint16_t *columns = k + C * Kp, *q = s.tile_rows;
    if constexpr (kGate != Gate::channel) {
      round_rows(s.k, Kp, rows, Kp, k, Kp);
      round_rows(s.q, Kp, rows, Kp, q, Kp);
      for (int64_t j = 0; j < rows; j += 16) {
        transpose_words(k + j * Kp, Kp / 2, 16, Kp / 2, columns + j * Kp, 16);
        for (int64_t i = j; i < rows; i += 16) {
          score_tile(k + i * Kp, q + i * Kp, columns + j * Kp, Kp, s.lower + i * C + j,
                     s.scores + i * C + j, C);
        }
      }
    } else {
      for (int level = 0; level < 2; ++level) {
        const int64_t half = level == 0 ? 16 : 32;
        for (int64_t b = half; b < rows; b += 2 * half) {
          const int64_t end = std::min(b + half, rows);
          round_rows(s.row_k[level] + b * Kp, Kp, end - b, Kp, k, Kp);
          round_rows(s.row_q[level] + b * Kp, Kp, end - b, Kp, q, Kp);
          for (int64_t j = b - half; j < b; j += 16) {
            uint16_t* own = q + 32 * Kp;  // past the 32 rows of q that a block has at most
            round_rows(s.col_k[level] + j * Kp, Kp, 16, Kp, own, Kp);
            transpose_words(own, Kp / 2, 16, Kp / 2, columns, 16);
            for (int64_t i = b; i < end; i += 16) {
              score_tile(k + (i - b) * Kp, q + (i - b) * Kp, columns, Kp, s.lower + i * C + j,
                         s.scores + i * C + j, C);
            }
          }
        }
      }
    }
  }

  // Panel rows as pairs, zeros up to a whole tile's depth.
  template <int64_t kWidth>
  static void to_pairs(const float* src, int64_t rows, uint16_t* dst) {
    round_to_pairs(src, kWidth, rows, kWidth, dst);
    if (rows < depth(rows)) {
      std::memset(dst + rows * kWidth, 0, static_cast<size_t>(16 * kWidth) * 2);
    }
  }

  // The chain's three parts, as Fp32Engine says. Operands: this engine's, or the backward's.
  // values leaves S and y as pairs in the scratch, which the other two read.
  template <int64_t kWidth, class Ops>
  static void values(const Problem& p, const ChunkPlace& at, const Shape& s, const Ops& ops,
                     int64_t panel, const ChainScratch& scratch, const float* S, float* y,
                     Ahead* ahead) {
    const F32 d;
    const int64_t rows = rows_of(at.length), tokens = depth(s.C), Kp = s.Kp;
    float* x = scratch.x;
    round_to_pairs(S, kWidth, Kp, kWidth, scratch.S_pairs);
    load_panel_rows(p.v, at, s, panel, ops.beta, x);
    for_row_blocks(rows, [&](auto r, int64_t i) {
      constexpr int kRows = decltype(r)::value;
      if (ahead != nullptr) ahead->some();
      tile_clear<kRows, kWidth>();
      tile_block<kRows, kWidth>(ops.kd + i * Kp, Kp, scratch.S_pairs, kWidth, Kp);
      tile_write<kRows, kWidth>(y + i * kWidth, kWidth);
    });
    for (int64_t i = 0; i < rows * kWidth; i += kLanes) {
      hn::StoreU(hn::Sub(hn::LoadU(d, x + i), hn::LoadU(d, y + i)), d, x + i);
    }
    to_pairs<kWidth>(x, rows, scratch.x_pairs);
    for_row_blocks(rows, [&](auto r, int64_t i) {
      constexpr int kRows = decltype(r)::value;
      if (ahead != nullptr) ahead->some();
      tile_clear<kRows, kWidth>();
      tile_block<kRows, kWidth>(ops.inverse + i * tokens, tokens, scratch.x_pairs, kWidth, i + 32);
      tile_write<kRows, kWidth>(y + i * kWidth, kWidth);
    });
    to_pairs<kWidth>(y, rows, scratch.y_pairs);
  }
  template <int64_t kWidth>
  static void outputs(const Problem& p, const ChunkPlace& at, const Shape& s, const Operands& ops,
                      int64_t panel, const ChainScratch& scratch, const float*, const float*,
                      Ahead* ahead) {
    const int64_t tokens = depth(s.C), Kp = s.Kp;
    float* o = scratch.x;
    for_row_blocks(rows_of(at.length), [&](auto r, int64_t i) {
      constexpr int kRows = decltype(r)::value;
      if (ahead != nullptr) ahead->some();
      tile_clear<kRows, kWidth>();
      tile_block<kRows, kWidth>(ops.qd + i * Kp, Kp, scratch.S_pairs, kWidth, Kp);
      tile_block<kRows, kWidth>(ops.scores + i * tokens, tokens, scratch.y_pairs, kWidth, i + 32);
      tile_write<kRows, kWidth>(o + i * kWidth, kWidth);
    });
    store_outputs(p, at, s, panel, kWidth, o);
  }
  template <int64_t kWidth, class Ops>
  static void advance(const ChunkPlace& at, const Shape& s, const Ops& ops,
                      const ChainScratch& scratch, const float*, const float* S, float* next,
                      Ahead* ahead) {
    const int64_t rows = rows_of(at.length), tokens = depth(s.C);
    scale_state<kWidth>(ops.decay, s.Kp, S, next);
    for (int64_t c = 0; c < s.Kp; c += 32) {
      if (ahead != nullptr) ahead->some();
      tile_read<32, kWidth>(next + c * kWidth, kWidth);
      tile_block<32, kWidth>(ops.kg + c * tokens, tokens, scratch.y_pairs, kWidth, depth(rows));
      tile_write<32, kWidth>(next + c * kWidth, kWidth);
    }
  }
  // Row c of S times decay[c].
  template <int64_t kWidth>
  static void scale_state(const float* decay, int64_t Kp, const float* S, float* next) {
    const F32 d;
    for (int64_t c = 0; c < Kp; ++c) {
      const Vec f = hn::Set(d, decay[c]);
      for (int64_t j = c * kWidth; j < (c + 1) * kWidth; j += kLanes) {
        hn::StoreU(hn::Mul(hn::LoadU(d, S + j), f), d, next + j);
      }
    }
  }
};

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();
#endif  // HWY_TARGET == HWY_AVX3
#endif
