// States from slot to slot: whole rows where the layouts agree, blocks of 16 x 16 where they do
// not. The same dtype moves bits, never numbers.
#pragma once

#include <algorithm>
#include <cstring>

#include "cpu/recurrence.h"

namespace deltic::move {

inline constexpr int64_t kBlock = 16;

struct PlainMath {
  static void load(const void* data, DType type, int64_t at, int64_t count, float* to) {
    load_elements(data, type, at, 1, count, to);
  }
  static void store(const float* from, int64_t count, void* data, DType type, int64_t at) {
    store_elements(data, type, at, 1, count, from);
  }
  static void transpose(const float* from, float* to) {
    for (int64_t r = 0; r < kBlock; ++r) {
      for (int64_t c = 0; c < kBlock; ++c) to[c * kBlock + r] = from[r * kBlock + c];
    }
  }
};

// `Math` loads, stores and transposes fp32 numbers: as above, or in vectors.
template <class Math>
class Move {
 public:
  explicit Move(const Problem& p) : p_(p), from_(p.state_in), to_(p.state_out) {
    // Rows and columns as they lie in state_pool.
    rows_ = p.v_first ? p.V : p.K, columns_ = p.v_first ? p.K : p.V;
    from_row_ = p.v_first ? from_.s_v : from_.s_k;
    to_row_ = p.v_first != p.transposes ? to_.s_v : to_.s_k;
    element_ = size_of(to_.dtype);
    is_same_ = from_.dtype == to_.dtype;
  }

  void run() const {
    const int64_t per_entry = p_.layers * p_.HV, tasks = p_.N * per_entry;
    // About a nanosecond for four bytes of one core.
    const double ns = static_cast<double>(rows_) * static_cast<double>(columns_);
    const int threads = cpu::useful_threads(p_, static_cast<double>(tasks), ns);
    cpu::run_team(threads, [&](const cpu::Member& member) {
      member.for_each(tasks, [&](int64_t i) {
        const Sequence s = sequence(p_, i / per_entry);
        if (s.write_slot < 0) return;
        const int64_t layer = i % per_entry / p_.HV, head = i % p_.HV;
        const int64_t to = to_.at(layer, s.write_slot, head);
        if (s.read_slot < 0) return clear(to);
        const int64_t from = from_.at(layer, s.read_slot, head);
        p_.transposes ? copy_transposed(from, to) : copy_rows(from, to);
      });
    });
  }

 private:
  std::byte* byte(int64_t at) const { return static_cast<std::byte*>(to_.data) + at * element_; }
  const std::byte* source(int64_t at) const {
    return static_cast<const std::byte*>(from_.data) + at * size_of(from_.dtype);
  }

  void clear(int64_t to) const {
    const int64_t rows = p_.transposes ? columns_ : rows_,
                  columns = p_.transposes ? rows_ : columns_;
    for (int64_t r = 0; r < rows; ++r) {
      std::memset(byte(to + r * to_row_), 0, static_cast<size_t>(columns * element_));
    }
  }

  void copy_rows(int64_t from, int64_t to) const {
    if (is_same_ && source(from) == byte(to)) return;  // a slot onto itself
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t row = from + r * from_row_, out = to + r * to_row_;
      if (is_same_) {
        std::memcpy(byte(out), source(row), static_cast<size_t>(columns_ * element_));
        continue;
      }
      float numbers[kBlock * kBlock];
      for (int64_t c = 0; c < columns_; c += kBlock * kBlock) {
        const int64_t count = std::min(kBlock * kBlock, columns_ - c);
        Math::load(from_.data, from_.dtype, row + c, count, numbers);
        Math::store(numbers, count, to_.data, to_.dtype, out + c);
      }
    }
  }

  void copy_transposed(int64_t from, int64_t to) const {
    for (int64_t r = 0; r < rows_; r += kBlock) {
      for (int64_t c = 0; c < columns_; c += kBlock) {
        const int64_t rows = std::min(kBlock, rows_ - r), columns = std::min(kBlock, columns_ - c);
        const int64_t block = from + r * from_row_ + c, out = to + c * to_row_ + r;
        if (is_same_ && element_ == 2) {
          turn_bits(block, out, rows, columns);
        } else {
          turn_numbers(block, out, rows, columns);
        }
      }
    }
  }
  void turn_bits(int64_t from, int64_t to, int64_t rows, int64_t columns) const {
    const auto* in = static_cast<const uint16_t*>(from_.data) + from;
    auto* out = static_cast<uint16_t*>(to_.data) + to;
    for (int64_t c = 0; c < columns; ++c) {
      for (int64_t r = 0; r < rows; ++r) out[c * to_row_ + r] = in[r * from_row_ + c];
    }
  }
  void turn_numbers(int64_t from, int64_t to, int64_t rows, int64_t columns) const {
    alignas(64) float in[kBlock * kBlock] = {}, out[kBlock * kBlock];
    // The same dtype is fp32 here, moved as bytes: a conversion on the way would quiet its NaNs.
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t row = from + r * from_row_;
      if (is_same_) {
        std::memcpy(in + r * kBlock, source(row), static_cast<size_t>(columns) * sizeof(float));
      } else {
        Math::load(from_.data, from_.dtype, row, columns, in + r * kBlock);
      }
    }
    Math::transpose(in, out);
    for (int64_t c = 0; c < columns; ++c) {
      const int64_t row = to + c * to_row_;
      if (is_same_) {
        std::memcpy(byte(row), out + c * kBlock, static_cast<size_t>(rows) * sizeof(float));
      } else {
        Math::store(out + c * kBlock, rows, to_.data, to_.dtype, row);
      }
    }
  }

  const Problem& p_;
  const States &from_, &to_;
  int64_t rows_, columns_, from_row_, to_row_, element_;
  bool is_same_;
};

}  // namespace deltic::move
