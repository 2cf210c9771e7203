// Products of the backward pass on panels: transposed operands, contractions over value columns.
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

template <int64_t kWidth>
struct GradientProducts {
  static constexpr int kVecs = static_cast<int>(kWidth / kLanes);
  using Block = Vec[kBlockRows][kVecs];

  // y = a^T x + b S with a lower triangular [rows][a_row], b [rows][b_row].
  static HWY_NOINLINE void pull(const float* a, int64_t a_row, int64_t rows, const float* x,
                                const float* b, int64_t b_row, int64_t n, const float* S,
                                float* y) {
    for (int64_t i = 0; i < rows; i += kBlockRows) {
      Block acc;
      clear(acc);
      accumulate<kVecs, false>(acc, a + i * a_row + i, 1, a_row, x + i * kWidth, kWidth, rows - i);
      accumulate<kVecs, false>(acc, b + i * b_row, b_row, 1, S, kWidth, n);
      store_block(acc, y + i * kWidth, kWidth);
    }
  }
  // y = a^T x with a lower triangular.
  static HWY_NOINLINE void lower_transposed(const float* a, int64_t a_row, int64_t rows,
                                            const float* x, float* y) {
    for (int64_t i = 0; i < rows; i += kBlockRows) {
      Block acc;
      clear(acc);
      accumulate<kVecs, false>(acc, a + i * a_row + i, 1, a_row, x + i * kWidth, kWidth, rows - i);
      store_block(acc, y + i * kWidth, kWidth);
    }
  }
  // S = decay S + a^T x - b^T y, contraction over tokens.
  static HWY_NOINLINE void push(const float* decay, const float* a, const float* b, int64_t ab_row,
                                int64_t tokens, int64_t width, const float* x, const float* y,
                                float* S) {
    for (int64_t r = 0; r < width; r += kBlockRows) {
      Block acc;
      load_block(acc, S + r * kWidth, kWidth);
      scale_block(acc, decay + r);
      accumulate<kVecs, false>(acc, a + r, 1, ab_row, x, kWidth, tokens);
      accumulate<kVecs, true>(acc, b + r, 1, ab_row, y, kWidth, tokens);
      store_block(acc, S + r * kWidth, kWidth);
    }
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
  const auto columns = [&](auto width_tag, int64_t j) {
    constexpr int64_t kWidth = decltype(width_tag)::value;
    constexpr int kVecs = static_cast<int>(kWidth / kLanes);
    for (int64_t i = kLower ? j : 0; i < rows; i += kBlockRows) {
      Vec acc[kBlockRows][kVecs];
      clear(acc);
      for (int64_t p = 0; p < s.panels; ++p) {
        const int64_t width = s.panel_width(p);
        accumulate<kVecs, false>(acc, a.data + p * a.pitch + i * width, width, 1,
                                 b + p * kPanel * b_row + j, b_row, width);
      }
      store_block(acc, c + i * c_row + j, c_row);
    }
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
  const auto columns = [&](auto width_tag, int64_t j) {
    constexpr int64_t kWidth = decltype(width_tag)::value;
    constexpr int kVecs = static_cast<int>(kWidth / kLanes);
    for (int64_t i = 0; i < rows; i += kBlockRows) {
      Vec acc[kBlockRows][kVecs];
      load_block(acc, c + i * c_row + j, c_row);
      accumulate<kVecs, false>(acc, a + i * a_row, a_row, a_col, b + j, b_row, n);
      store_block(acc, c + i * c_row + j, c_row);
    }
  };
  int64_t j = 0;
  for (; j + 32 <= cols; j += 32) columns(std::integral_constant<int64_t, 32>(), j);
  if (j < cols) columns(std::integral_constant<int64_t, 16>(), j);
}

}  // namespace HWY_NAMESPACE
}  // namespace deltic::cpu
HWY_AFTER_NAMESPACE();
#endif
