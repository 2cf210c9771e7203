// Walks over the elements of strided tensors.
#pragma once

#include <cstdint>
#include <functional>

#include "cases/instance.h"
#include "cases/scalar.h"

namespace deltic::cases {

// Where the element with a row-major index lies, in elements.
inline int64_t memory_offset(const TensorView& t, int64_t index) {
  int64_t offset = 0;
  for (int32_t i = t.rank - 1; i >= 0; --i) {
    offset += (index % t.shape[i]) * t.strides[i];
    index /= t.shape[i];
  }
  return offset;
}

// Elements that follow one another in memory: a row, or one where channels are innermost.
inline int64_t row_width(const TensorView& t) {
  if (t.rank == 0) return 0;
  return t.strides[t.rank - 1] == 1 ? t.shape[t.rank - 1] : 1;
}

// Calls f(row-major index of a row's first element, its offset in memory) for every row.
template <class F>
void for_each_row(const TensorView& t, const F& f) {
  const int64_t width = row_width(t), count = t.rank > 0 ? t.numel() : 0;
  for (int64_t i = 0; i < count; i += width) f(i, memory_offset(t, i));
}

inline constexpr int64_t kWorthThreads = 1
                                         << 16;  // elements: about a millisecond of drawing numbers

inline DType dtype_of(const TensorView& t) { return static_cast<DType>(t.dtype); }

// Fills a tensor from a function of the row-major index; threads share the rows.
inline void fill(Tensor& t, const std::function<double(int64_t)>& f) {
  if (t.view.data == nullptr) return;
  const int64_t width = row_width(t.view);
  const int64_t rows = width > 0 ? t.view.numel() / width : 0;
  const DType type = dtype_of(t.view);
  bool expanded = false;  // several indices share an element: the last one wins
  for (int32_t i = 0; i < t.view.rank; ++i)
    expanded |= t.view.strides[i] == 0 && t.view.shape[i] > 1;
#pragma omp parallel for if (rows * width > kWorthThreads && !expanded)
  for (int64_t r = 0; r < rows; ++r) {
    const int64_t offset = memory_offset(t.view, r * width);
    for (int64_t c = 0; c < width; ++c) store(t.view.data, type, offset + c, f(r * width + c));
  }
}

}  // namespace deltic::cases
