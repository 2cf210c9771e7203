// The gated RMS norm and its gradient: how rows are divided among threads, for every
// implementation, and the rows themselves as cpu.plain has them.
//
//     r = (mean_d x_d^2 + eps)^-1/2,   n = r x,   y = n w act(z)
//     dn = dy w act(z),   dx = r (dn - n mean_d(dn n)),   dz = dy n w act'(z),   dw += dy n act(z)
//
// Rows in scratch are padded with zeros.
#pragma once

#include <algorithm>
#include <span>

#include "core/scratch.h"
#include "cpu/recurrence.h"

namespace deltic::norm {

inline int64_t padded_width(const Problem& p) { return (p.K + 15) / 16 * 16; }

// One row: x, z and dy as they came; z becomes dz, dy dx or y.
struct Row {
  Row(Scratch& scratch, int64_t width) {
    x = scratch.take<float>(width), z = scratch.take<float>(width);
    dy = scratch.take<float>(width);
  }
  float *x, *z, *dy;
};

// What cpu.plain computes of a row of `width`.
struct PlainMath {
  const Problem& p;
  int64_t width;

  void load(const Rows& rows, int64_t b, int64_t t, int64_t h, float* to) const {
    load_row(rows, b, t, h, 0, p.K, to);
    std::fill(to + p.K, to + width, 0.0f);
  }
  void store(const Rows& rows, int64_t b, int64_t t, int64_t h, const float* from) const {
    store_row(rows, b, t, h, 0, p.K, from);
  }
  // In double: squares of large fp32 numbers overflow fp32.
  float reciprocal(const float* x) const {
    double sum = 0;
    for (int64_t d = 0; d < p.K; ++d) sum += static_cast<double>(x[d]) * static_cast<double>(x[d]);
    const double mean = sum / static_cast<double>(p.K);
    return static_cast<float>(1 / std::sqrt(mean + static_cast<double>(p.eps)));
  }
  float gate(float z) const {
    switch (p.activation) {
      case DELTIC_ACTIVATION_SILU:
        return z * sigmoid(z);
      case DELTIC_ACTIVATION_SIGMOID:
        return sigmoid(z);
      default:
        return z;
    }
  }
  float gate_slope(float z) const {
    switch (p.activation) {
      case DELTIC_ACTIVATION_SILU:
        return sigmoid(z) * (1 + z * sigmoid(-z));
      case DELTIC_ACTIVATION_SIGMOID:
        return sigmoid(z) * sigmoid(-z);
      default:
        return 1;
    }
  }
  void forward(const Row& row, const float* w) const {
    const float r = reciprocal(row.x);
    for (int64_t d = 0; d < p.K; ++d) {
      row.dy[d] = row.x[d] * r * w[d] * (p.z ? gate(row.z[d]) : 1.0f);
    }
  }
  // With q the part of dn along n, dx = r ((dn - q) + eps r^2 q): a row that is nearly parallel to
  // its gradient keeps its digits, where dn - n mean(dn n) would lose them.
  void backward(const Row& row, const float* w, float* dw) const {
    const float r = reciprocal(row.x);
    double along = 0, squares = 0;
    for (int64_t d = 0; d < p.K; ++d) {
      const float n = row.x[d] * r, a = p.z ? gate(row.z[d]) : 1.0f;
      const float slope = p.z ? gate_slope(row.z[d]) : 0.0f;
      const float dy = row.dy[d], dn = dy * w[d] * a;
      if (dw != nullptr) dw[d] += dy * n * a;
      row.z[d] = dy * n * w[d] * slope;
      row.x[d] = n, row.dy[d] = dn;
      along += static_cast<double>(dn) * static_cast<double>(n);
      squares += static_cast<double>(n) * static_cast<double>(n);
    }
    const auto wide = static_cast<double>(r);
    const double rest = 1 - static_cast<double>(p.eps) * wide * wide;
    const double factor = squares == 0 ? 0 : along / squares * rest;
    for (int64_t d = 0; d < p.K; ++d) {
      const double left = static_cast<double>(row.dy[d]) - factor * static_cast<double>(row.x[d]);
      row.dy[d] = r * static_cast<float>(left);
    }
  }
};

// The rows of a call: blocks of them are tasks, and each leaves its part of dw.
template <class Math>
class Norm {
 public:
  explicit Norm(const Problem& p) : p_(p), width_(padded_width(p)) {
    rows_ = p.T > 0 ? checked_product(p.packed ? 1 : p.B, p.T, p.H) : 0;
    // 256 KB of fp32 at most, and 256 rows.
    per_block_ = std::clamp<int64_t>(65536 / width_, 1, 256);
    blocks_ = (rows_ + per_block_ - 1) / per_block_;
  }

  size_t workspace_bytes() const { return Memory(*this, nullptr).scratch.used(); }

  void run(std::span<std::byte> workspace) const {
    const Memory m(*this, workspace.data());
    for (int64_t d = 0; d < width_; ++d) {
      m.weight[d] = d >= p_.K ? 0.0f : p_.weight ? static_cast<float>(p_.weight[d]) : 1.0f;
    }
    // About 2 ns for a number in vectors, twenty without.
    const double ns = 2 * static_cast<double>(per_block_) * static_cast<double>(p_.K);
    const int threads = cpu::useful_threads(p_, static_cast<double>(blocks_), ns);
    cpu::run_team(threads, [&](const cpu::Member& member) {
      Scratch scratch(m.rows + static_cast<size_t>(member.index) * m.row_bytes);
      const Row row(scratch, width_);
      member.for_each(blocks_, [&](int64_t i) { run_block(i, row, m); });
    });
    for (int64_t d = 0; d < p_.K && p_.dweight; ++d) {
      double sum = 0;
      for (int64_t i = 0; i < blocks_; ++i) sum += static_cast<double>(m.sums[i * width_ + d]);
      store(p_.dweight.data, p_.dweight.dtype, p_.dweight.at(d), sum);
    }
    for (const Rows* rows : {&p_.out, &p_.dx, &p_.dz}) {
      if (*rows) zero_padding(p_, *rows, p_.H, p_.K);
    }
  }

 private:
  struct Memory {
    Memory(const Norm& n, std::byte* base) : scratch(base) {
      weight = scratch.take<float>(n.width_);
      sums = scratch.take<float>(n.p_.dweight ? n.blocks_ : 0, n.width_);
      Scratch of_row(nullptr);
      Row(of_row, n.width_);
      row_bytes = of_row.used();
      rows = scratch.take<std::byte>(row_bytes, n.p_.threads);
    }
    Scratch scratch;
    float *weight, *sums;
    std::byte* rows;
    size_t row_bytes;
  };

  void run_block(int64_t block, const Row& row, const Memory& m) const {
    const Math math{p_, width_};
    float* dw = p_.dweight ? m.sums + block * width_ : nullptr;
    if (dw != nullptr) std::fill_n(dw, width_, 0.0f);
    const int64_t end = std::min(rows_, (block + 1) * per_block_), real = padding_begin(p_);
    for (int64_t i = block * per_block_; i < end; ++i) {
      const int64_t h = i % p_.H, token = i / p_.H, t = token % p_.T, b = token / p_.T;
      if (t >= real) continue;
      math.load(p_.x, b, t, h, row.x);
      if (p_.z) math.load(p_.z, b, t, h, row.z);
      if (!p_.is_gradient) {
        math.forward(row, m.weight);
        math.store(p_.out, b, t, h, row.dy);
        continue;
      }
      math.load(p_.d_out, b, t, h, row.dy);
      math.backward(row, m.weight, dw);
      if (p_.dx) math.store(p_.dx, b, t, h, row.dy);
      if (p_.dz) math.store(p_.dz, b, t, h, row.z);
    }
  }

  const Problem& p_;
  int64_t width_, rows_, per_block_, blocks_;
};

}  // namespace deltic::norm
