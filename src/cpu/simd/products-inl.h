// Small fp32 matrix products on column panels. A panel holds 32 (or 16) columns, row after row, so
// that 128 rows of it are 16 KB: the right operand stays in L1 while the left one streams from L2.
// The order of additions of an element is fixed (contraction index upwards), whatever the blocking:
// dividing rows or columns changes no bit.
#if defined(DELTIC_CPU_SIMD_PRODUCTS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef DELTIC_CPU_SIMD_PRODUCTS_INL_H_
#undef DELTIC_CPU_SIMD_PRODUCTS_INL_H_
#else
#define DELTIC_CPU_SIMD_PRODUCTS_INL_H_
#endif

#include "cpu/simd/vec-inl.h"

HWY_BEFORE_NAMESPACE();
namespace deltic::cpu {
namespace HWY_NAMESPACE {

constexpr int64_t kPanel = 32;  // columns of a full panel

// A register block: kRows x kVecs vectors of accumulators. 32 registers hold 8 x 2 of 16 lanes, 10
// loads for 16 multiply-adds; 12 rows would not divide 64. 16 registers hold 6 x 2 of 8 or 4 lanes,
// 8 loads for 12 multiply-adds, which is enough of them to cover a latency of 5 cycles; what 6 rows
// do not divide takes 5: 16 = 6 + 5 + 5. (4 x 2 and 2 x 4 have 8 sums for that latency, and
// compilers load the right operand of the latter once for each row: 10 loads for 8, of which a core
// does 2 or 3 a cycle.)
constexpr bool kHas32Registers = kLanes >= 16;
constexpr int kMostRows = kHas32Registers ? 8 : 6;
constexpr int kFewerRows = kHas32Registers ? 8 : 5;
template <int R, int V>
struct BlockSize {
  static constexpr int kRows = R, kVecs = V;
};
template <class Size>
using Block = Vec[Size::kRows][Size::kVecs];

// Rows that are left, of a multiple of 16, take kMostRows or kFewerRows: 6 until 20, 10 or none are
// left.
constexpr bool takes_most(int64_t left) {
  return kHas32Registers || left > 4 * kFewerRows || left % kFewerRows != 0;
}
// Blocks of rows that `rows` (a multiple of 16) are cut into.
constexpr int64_t num_row_blocks(int64_t rows) {
  int64_t count = 0;
  for (; rows > 0; rows -= takes_most(rows) ? kMostRows : kFewerRows) ++count;
  return count;
}

// acc[i][j] +-= sum over c < n of a(i, c) * b(c, j)
template <bool kNegate, int kRows, int kVecs>
HWY_INLINE void accumulate(Vec (&acc)[kRows][kVecs], const float* a, int64_t a_row, int64_t a_col,
                           const float* b, int64_t b_row, int64_t n) {
  const F32 d;
  for (int64_t c = 0; c < n; ++c) {
    Vec right[kVecs];
    DELTIC_UNROLL
    for (int j = 0; j < kVecs; ++j) right[j] = hn::LoadU(d, b + c * b_row + j * kLanes);
    DELTIC_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const Vec left = hn::Set(d, a[i * a_row + c * a_col]);
      DELTIC_UNROLL
      for (int j = 0; j < kVecs; ++j) {
        acc[i][j] = kNegate ? hn::NegMulAdd(left, right[j], acc[i][j])
                            : hn::MulAdd(left, right[j], acc[i][j]);
      }
    }
  }
}

template <int kRows, int kVecs>
HWY_INLINE void clear(Vec (&acc)[kRows][kVecs]) {
  DELTIC_UNROLL
  for (int i = 0; i < kRows; ++i) {
    DELTIC_UNROLL
    for (int j = 0; j < kVecs; ++j) acc[i][j] = hn::Zero(F32());
  }
}
template <int kRows, int kVecs>
HWY_INLINE void load_block(Vec (&acc)[kRows][kVecs], const float* src, int64_t row) {
  DELTIC_UNROLL
  for (int i = 0; i < kRows; ++i) {
    DELTIC_UNROLL
    for (int j = 0; j < kVecs; ++j) acc[i][j] = hn::LoadU(F32(), src + i * row + j * kLanes);
  }
}
// acc = x - acc
template <class How, int kRows, int kVecs>
HWY_INLINE void subtract_block(Vec (&acc)[kRows][kVecs], const typename How::Element* x,
                               int64_t row) {
  DELTIC_UNROLL
  for (int i = 0; i < kRows; ++i) {
    DELTIC_UNROLL
    for (int j = 0; j < kVecs; ++j) {
      acc[i][j] = hn::Sub(How::load(x + i * row + j * kLanes), acc[i][j]);
    }
  }
}
template <class How = LoadF32, int kRows, int kVecs>
HWY_INLINE void store_block(const Vec (&acc)[kRows][kVecs], typename How::Element* dst,
                            int64_t row) {
  DELTIC_UNROLL
  for (int i = 0; i < kRows; ++i) {
    DELTIC_UNROLL
    for (int j = 0; j < kVecs; ++j) How::store(acc[i][j], dst + i * row + j * kLanes);
  }
}

// Row i times factor[i].
template <int kRows, int kVecs>
HWY_INLINE void scale_block(Vec (&acc)[kRows][kVecs], const float* factor) {
  DELTIC_UNROLL
  for (int i = 0; i < kRows; ++i) {
    const Vec f = hn::Set(F32(), factor[i]);
    DELTIC_UNROLL
    for (int j = 0; j < kVecs; ++j) acc[i][j] = hn::Mul(acc[i][j], f);
  }
}

// Memory that will be needed soon, fetched a few lines at a time between blocks of a product: a
// core has 16 fill buffers, and what it loads itself would wait behind a longer burst of
// prefetches. Rows of a chunk lie a whole token apart, which the hardware does not see coming.
class Ahead {
 public:
  // `count` rows of `bytes`, `stride` bytes apart.
  void add(const void* first, int64_t count, int64_t stride, int64_t bytes) {
    if (count <= 0 || bytes <= 0) return;
    const auto into_line = static_cast<int64_t>(reinterpret_cast<uintptr_t>(first) % 64);
    bytes = (bytes + into_line + 63) / 64 * 64;
    pieces_[size_++] = {static_cast<const std::byte*>(first) - into_line, count, stride, bytes};
    lines_ += count * (bytes / 64);
  }
  // All that was added goes into this many calls of some().
  void spread(int64_t calls) { at_once_ = (lines_ + calls - 1) / std::max<int64_t>(calls, 1); }

  // One line of each row, then the next line of each: rows lie in pages of their own, and addresses
  // of several pages are looked up at the same time.
  HWY_INLINE void some() {
    for (int64_t left = at_once_; left > 0 && piece_ < size_;) {
      const Piece& p = pieces_[piece_];
      const int64_t end = std::min(row_ + left, p.count);
      left -= end - row_;
      const std::byte* line = p.first + row_ * p.stride + offset_;
      for (; row_ < end; ++row_, line += p.stride) __builtin_prefetch(line, 0, 2);
      if (row_ < p.count) return;
      row_ = 0, offset_ += 64;
      if (offset_ < p.bytes) continue;
      offset_ = 0, ++piece_;
    }
  }

 private:
  struct Piece {
    const std::byte* first;
    int64_t count, stride, bytes;
  };
  Piece pieces_[6] = {};
  int size_ = 0, piece_ = 0;
  int64_t lines_ = 0, at_once_ = 0, row_ = 0, offset_ = 0;
};

// body(size, i, j) for every register block of `rows` (a multiple of 16) x kWidth: its rows start
// at i, its columns at j. The columns of a row block come one after the other: its left operand is
// then in L1.
template <int64_t kWidth, class Body>
HWY_INLINE void each_block(int64_t rows, Ahead* ahead, const Body& body) {
  constexpr int kVecs = kWidth / kLanes < 2 ? 1 : 2;
  for (int64_t i = 0; i < rows;) {
    if (ahead != nullptr) ahead->some();
    const bool most = takes_most(rows - i);
    for (int64_t j = 0; j < kWidth; j += kVecs * kLanes) {
      if (most) {
        body(BlockSize<kMostRows, kVecs>(), i, j);
      } else if constexpr (kFewerRows != kMostRows) {
        body(BlockSize<kFewerRows, kVecs>(), i, j);
      }
    }
    i += most ? kMostRows : kFewerRows;
  }
}

// The products of one chunk on one panel. kWidth: 32 or 16 columns. All panels have row stride
// kWidth. Factors by row may be absent (null).
template <int64_t kWidth>
struct PanelProducts {
  // x = beta (v - prefix (a S)) for `rows` rows (a multiple of 16), contraction over n.
  template <class How>
  static HWY_NOINLINE void subtract(const float* a, int64_t a_row, int64_t rows, int64_t n,
                                    const float* S, const float* prefix, const float* beta,
                                    const typename How::Element* v, int64_t v_row, float* x,
                                    Ahead* ahead = nullptr) {
    each_block<kWidth>(rows, ahead, [&](auto size, int64_t i, int64_t j) DELTIC_INLINE {
      Block<decltype(size)> acc;
      clear(acc);
      accumulate<false>(acc, a + i * a_row, a_row, 1, S + j, kWidth, n);
      if (prefix != nullptr) scale_block(acc, prefix + i);
      subtract_block<How>(acc, v + i * v_row + j, v_row);
      scale_block(acc, beta + i);
      store_block(acc, x + i * kWidth + j, kWidth);
    });
  }
  // y = t x with t lower triangular, and carried = suffix y.
  static HWY_NOINLINE void lower(const float* t, int64_t t_row, int64_t rows, const float* x,
                                 float* y, const float* suffix, float* carried,
                                 Ahead* ahead = nullptr) {
    each_block<kWidth>(rows, ahead, [&](auto size, int64_t i, int64_t j) DELTIC_INLINE {
      Block<decltype(size)> acc;
      clear(acc);
      accumulate<false>(acc, t + i * t_row, t_row, 1, x + j, kWidth, i + size.kRows);
      store_block(acc, y + i * kWidth + j, kWidth);
      if (suffix == nullptr) return;
      scale_block(acc, suffix + i);
      store_block(acc, carried + i * kWidth + j, kWidth);
    });
  }
  // o = prefix (q S) + s y with s lower triangular.
  template <class How>
  static HWY_NOINLINE void output(const float* q, int64_t q_row, int64_t rows, int64_t n,
                                  const float* S, const float* prefix, const float* s,
                                  int64_t s_row, const float* y, typename How::Element* o,
                                  int64_t o_row, Ahead* ahead = nullptr) {
    each_block<kWidth>(rows, ahead, [&](auto size, int64_t i, int64_t j) DELTIC_INLINE {
      Block<decltype(size)> acc;
      clear(acc);
      accumulate<false>(acc, q + i * q_row, q_row, 1, S + j, kWidth, n);
      if (prefix != nullptr) scale_block(acc, prefix + i);
      accumulate<false>(acc, s + i * s_row, s_row, 1, y + j, kWidth, i + size.kRows);
      store_block<How>(acc, o + i * o_row + j, o_row);
    });
  }
  // out = decay * S + k^T y: row d of S is scaled by decay[d]; contraction over `rows` tokens.
  static HWY_NOINLINE void update(const float* decay, const float* k, int64_t k_row, int64_t rows,
                                  int64_t width, const float* y, const float* S, float* out,
                                  Ahead* ahead = nullptr) {
    each_block<kWidth>(width, ahead, [&](auto size, int64_t r, int64_t j) DELTIC_INLINE {
      Block<decltype(size)> acc;
      load_block(acc, S + r * kWidth + j, kWidth);
      scale_block(acc, decay + r);
      accumulate<false>(acc, k + r, 1, k_row, y + j, kWidth, rows);
      store_block(acc, out + r * kWidth + j, kWidth);
    });
  }
  // c[i][j] = sum_d a[i][d] bt[d][j] for rows x kWidth; bt is a panel with row stride bt_row.
  static HWY_NOINLINE void scores(const float* a, int64_t a_row, int64_t rows, int64_t n,
                                  const float* bt, int64_t bt_row, float* c, int64_t c_row) {
    each_block<kWidth>(rows, nullptr, [&](auto size, int64_t i, int64_t j) DELTIC_INLINE {
      Block<decltype(size)> acc;
      clear(acc);
      accumulate<false>(acc, a + i * a_row, a_row, 1, bt + j, bt_row, n);
      store_block(acc, c + i * c_row + j, c_row);
    });
  }
};

// PanelProducts<16>::scores of 16 rows of which entries above the diagonal are not used: vectors
// that lie above it altogether are left out.
inline void diagonal_scores(const float* a, int64_t a_row, int64_t n, const float* bt,
                            int64_t bt_row, float* c, int64_t c_row) {
  if constexpr (kLanes != 8) {
    PanelProducts<16>::scores(a, a_row, 16, n, bt, bt_row, c, c_row);
  } else {
    const auto block = [&](auto size, int64_t i) DELTIC_INLINE {
      Block<decltype(size)> acc;
      clear(acc);
      accumulate<false>(acc, a + i * a_row, a_row, 1, bt, bt_row, n);
      store_block(acc, c + i * c_row, c_row);
    };
    block(BlockSize<8, 1>(), 0);
    block(BlockSize<4, 2>(), 8);
    block(BlockSize<4, 2>(), 12);
  }
}

// c = +-a b for row-major matrices: `rows` and `cols` multiples of 16, contraction over n, or with
// kLower over the columns of a up to the diagonal.
template <bool kNegate, bool kLower>
inline void multiply(const float* a, int64_t a_row, int64_t rows, int64_t n, const float* b,
                     int64_t b_row, int64_t cols, float* c, int64_t c_row) {
  for (int64_t j0 = 0; j0 < cols; j0 += kRowAlign) {
    each_block<kRowAlign>(rows, nullptr, [&](auto size, int64_t i, int64_t j) DELTIC_INLINE {
      Block<decltype(size)> acc;
      clear(acc);
      accumulate<kNegate>(acc, a + i * a_row, a_row, 1, b + j0 + j, b_row,
                          kLower ? i + size.kRows : n);
      store_block(acc, c + i * c_row + j0 + j, c_row);
    });
  }
}

// x = (I + l)^-1 for a strictly lower l of `rows` (a multiple of 16) rows, both with row stride
// `row`. Forward substitution, 16 rows at a time: what earlier blocks give is a product, the rest a
// solve. Only entries below the diagonal of l are read. All of x's first `row` columns are written.
inline void invert_unit_lower(const float* l, int64_t row, int64_t rows, float* x) {
  const F32 d;
  const hn::RebindToSigned<F32> di;
  for (int64_t b = 0; b < rows; b += 16) {
    float* block = x + b * row;
    multiply<true, false>(l + b * row, row, 16, b, x, row, b, block, row);
    for (int64_t i = 0; i < 16; ++i) {
      float* xi = block + i * row;
      const float* li = l + (b + i) * row + b;
      for (int64_t c = b + 16; c < row; c += kLanes) hn::StoreU(hn::Zero(d), d, xi + c);
      for (int64_t c = 0; c < b + 16; c += kLanes) {
        // Of the block itself rows of the identity; its columns from c on are 0 in rows before c.
        const auto is_own = hn::RebindMask(
            d, hn::Eq(hn::Iota(di, 0), hn::Set(di, static_cast<int32_t>(b + i - c))));
        Vec acc = c < b ? hn::LoadU(d, xi + c) : hn::IfThenElseZero(is_own, hn::Set(d, 1.0f));
        for (int64_t j = std::max<int64_t>(0, c - b); j < i; ++j) {
          acc = hn::NegMulAdd(hn::Set(d, li[j]), hn::LoadU(d, block + j * row + c), acc);
        }
        hn::StoreU(acc, d, xi + c);
      }
    }
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();
#endif
