// One element of a tensor, read as fp64 or written, by its indices; and matrices of a workspace.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/problem.h"
#include "core/scratch.h"

namespace deltic::reference {

inline double get(const Rows& x, int64_t b, int64_t t, int64_t h, int64_t c = 0) {
  return load_f64(x.data, x.dtype, x.at(b, t, h) + c);
}
inline void put(const Rows& x, int64_t b, int64_t t, int64_t h, int64_t c, double value) {
  store(x.data, x.dtype, x.at(b, t, h) + c, value);
}

inline double get(const States& x, int64_t slot, int64_t h, int64_t d, int64_t c) {
  return load_f64(x.data, x.dtype, x.at(slot, h) + d * x.s_k + c * x.s_v);
}
inline void put(const States& x, int64_t slot, int64_t h, int64_t d, int64_t c, double value) {
  store(x.data, x.dtype, x.at(slot, h) + d * x.s_k + c * x.s_v, value);
}

inline void put(const Param& x, int64_t i, double value) { store(x.data, x.dtype, x.at(i), value); }

// Rows of an output that belong to no sequence are 0.
inline void put_zero_padding(const Problem& p, const Rows& x, int64_t heads, int64_t width) {
  for (int64_t t = padding_begin(p); x && t < p.T; ++t) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t c = 0; c < width; ++c) put(x, 0, t, h, c, 0);
    }
  }
}

// Numbers per token and value head of the gate and of beta.
inline int64_t gate_width(const Problem& p) { return p.gate == Gate::channel ? p.K : 1; }
inline int64_t beta_width(const Problem& p) { return p.beta_kind == BetaKind::value ? p.V : 1; }

// Threads of a loop over tasks, each with a part of the workspace of its own.
inline int num_threads(const Problem& p, int64_t num_tasks) {
  return static_cast<int>(std::clamp<int64_t>(num_tasks, 1, std::max(p.threads, 1)));
}
inline size_t bytes_of_threads(const Problem& p, int64_t num_tasks, size_t bytes) {
  return static_cast<size_t>(checked_product(num_threads(p, num_tasks), bytes));
}

// ---- Matrices: row by row, of a given width ----

struct Matrix {
  Matrix() = default;
  Matrix(Scratch& scratch, int64_t num_rows, int64_t num_columns)
      : data(scratch.take<double>(num_rows, num_columns)), rows(num_rows), columns(num_columns) {}
  double& operator()(int64_t i, int64_t j) const { return data[i * columns + j]; }
  double* row(int64_t i) const { return data + i * columns; }

  double* data = nullptr;
  int64_t rows = 0, columns = 0;
};

inline void fill(const Matrix& m, double value) { std::fill_n(m.data, m.rows * m.columns, value); }
inline void copy(const Matrix& from, const Matrix& to) {
  std::copy_n(from.data, from.rows * from.columns, to.data);
}

inline double dot(const double* x, const double* y, int64_t count) {
  double sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < count; ++i) sum += x[i] * y[i];
  return sum;
}
// y += a x
inline void add(double a, const double* x, double* y, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) y[i] += a * x[i];
}
// M += a x y^T
inline void add_outer(const Matrix& M, double a, const double* x, const double* y) {
  for (int64_t i = 0; i < M.rows; ++i) add(a * x[i], y, M.row(i), M.columns);
}
// y += a M x
inline void add_product(const Matrix& M, double a, const double* x, double* y) {
  for (int64_t i = 0; i < M.rows; ++i) y[i] += a * dot(M.row(i), x, M.columns);
}
// y += a M^T x
inline void add_transposed_product(const Matrix& M, double a, const double* x, double* y) {
  for (int64_t i = 0; i < M.rows; ++i) add(a * x[i], M.row(i), y, M.columns);
}

}  // namespace deltic::reference
