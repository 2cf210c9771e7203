// What a number that is not finite may do to a call, on any device: tests of the CPU and of a GPU.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "cases/check.h"

namespace deltic::test {

// One head of one token of a packed instance gets a number, in its first channel.
inline void put(cases::Instance& instance, const std::string& tensor, int64_t token, int64_t head,
                double value) {
  const TensorView& t = instance.tensor(tensor).view;
  const int64_t width = t.rank == 4 ? t.shape[3] : 1;
  instance.set(tensor, (token * t.shape[2] + head) * width, value);
}

// The call of `line` with NaN or an infinity in token `at` of sequence `n`, head 1: other
// sequences, other heads and earlier chunks keep their bits. A NaN is not lost; in g it is in every
// output of its head from that token on, and in its final state.
inline void expect_contained(const std::string& line, const std::string& impl,
                             const cases::Place& place, int64_t n, int64_t at) {
  const cases::Case c = cases::parse(line);
  const int64_t begin = c.sequence_begin(n), end = begin + c.sequence_length(n);
  const int64_t chunk = begin + (c.op == Op::decode ? at : at / c.chunk * c.chunk);
  cases::Instance instance(c, true, place);
  instance.run({.impl = impl});
  const std::vector<std::byte> before = instance.bytes("o");
  const std::vector<std::byte> states_before = instance.bytes("final_state");
  const auto row = static_cast<size_t>(c.V * cases::size_of(c.dtype));
  const auto state = static_cast<size_t>(c.K * c.V * cases::size_of(c.sdtype));
  for (const std::string tensor : {"q", "k", "v", "beta", "g"}) {
    if (!instance.has(tensor)) continue;
    for (const double value : {std::nan(""), std::numeric_limits<double>::infinity(),
                               -std::numeric_limits<double>::infinity()}) {
      const std::string what = impl + ": " + tensor + " = " + std::to_string(value) + "\n  " + line;
      cases::Instance spoiled(c, true, place);
      put(spoiled, tensor, begin + at, 1, value);
      spoiled.run({.impl = impl});
      const std::vector<std::byte> after = spoiled.bytes("o");
      const auto states = spoiled.bytes("final_state");
      const std::vector<double> o = spoiled.values("o"), S = spoiled.values("final_state");
      if (std::isnan(value)) {
        EXPECT_FALSE(after == before) << what << ": left no trace";
      }
      // Head 1 of q and k feeds a group of value heads.
      const auto is_spoilt = [&](int64_t h) {
        return tensor == "q" || tensor == "k" ? h / (c.HV / c.H) == 1 : h == 1;
      };
      const auto is_same = [&](const auto& a, const auto& b, int64_t i, size_t size) {
        return std::equal(a.begin() + i * static_cast<int64_t>(size),
                          a.begin() + (i + 1) * static_cast<int64_t>(size),
                          b.begin() + i * static_cast<int64_t>(size));
      };
      const auto all_nan = [](const std::vector<double>& list, int64_t first, int64_t count) {
        return std::all_of(list.begin() + first, list.begin() + first + count,
                           [](double x) { return std::isnan(x); });
      };
      const bool is_nan_gate = tensor == "g" && std::isnan(value);
      for (int64_t t = 0; t < c.num_tokens(); ++t) {
        for (int64_t h = 0; h < c.HV; ++h) {
          const bool may_change = t >= chunk && t < end && is_spoilt(h);
          ASSERT_TRUE(may_change || is_same(after, before, t * c.HV + h, row))
              << what << ": token " << t << ", head " << h;
          const bool must_be_nan = is_nan_gate && t >= begin + at && t < end && h == 1;
          ASSERT_TRUE(!must_be_nan || all_nan(o, (t * c.HV + h) * c.V, c.V))
              << what << ": token " << t;
        }
      }
      for (int64_t i = 0; i < c.num_sequences() * c.HV; ++i) {
        const bool may_change = i / c.HV == n && is_spoilt(i % c.HV);
        ASSERT_TRUE(may_change || is_same(states, states_before, i, state))
            << what << ": state " << i;
        const bool must_be_nan = may_change && is_nan_gate && c.gate == cases::Gate::head;
        ASSERT_TRUE(!must_be_nan || all_nan(S, i * c.K * c.V, c.K * c.V))
            << what << ": final state";
      }
    }
  }
}

// The same of gates alone, in a gradient or a building block: g of token `at` of sequence `n`, head
// 1, in its last channel, is NaN or an infinity. What belongs to other sequences and heads keeps
// its bits, as do dq of earlier chunks and other chunks of a building block. Where the equations
// say NaN it is there: of tokens up to `to`, as segments may have forgotten what is before a
// border, and but for a token with itself, whose decay is 1. Gradients of a gate that is -infinity,
// which passes nothing, are numbers wherever those of the equations are.
inline void expect_gates_contained(const std::string& line, const std::string& impl,
                                   const cases::Place& place, int64_t n, int64_t at,
                                   int64_t to = INT64_MAX) {
  const cases::Case c = cases::parse(line);
  const bool is_block = c.op != Op::backward;
  const int64_t begin = c.sequence_begin(n), end = begin + c.sequence_length(n);
  const int64_t chunk = begin + at / c.chunk * c.chunk;
  cases::Instance instance(c, true, place);
  instance.run({.impl = impl});
  for (const double value : {std::nan(""), std::numeric_limits<double>::infinity(),
                             -std::numeric_limits<double>::infinity()}) {
    const bool is_nan = std::isnan(value), is_deep = value < 0 && !is_block;
    cases::Instance spoiled(c, true, place);
    const TensorView& g = spoiled.tensor("g").view;
    const int64_t width = g.rank == 4 ? g.shape[3] : 1;
    spoiled.set("g", ((begin + at) * c.HV + 1) * width + width - 1, value);
    spoiled.run({.impl = impl});
    EXPECT_EQ(spoiled.damage(), "") << impl << "\n  " << line;
    const cases::Values expected = cases::reference(spoiled);
    for (const std::string& name : instance.outputs()) {
      const bool is_state = name == "d_initial_state", is_key = name == "dq" || name == "dk";
      const bool is_parameter = name == "dA_log" || name == "ddt_bias";
      const std::vector<std::byte> before = instance.bytes(name), after = spoiled.bytes(name);
      const std::vector<double> values = spoiled.values(name), &exact = expected.at(name);
      const int64_t heads = is_key ? c.H : c.HV;
      const int64_t rows = is_parameter ? 1 : is_state ? c.num_sequences() : c.num_tokens();
      const int64_t numbers = static_cast<int64_t>(values.size()) / (rows * heads);
      const auto bytes = static_cast<int64_t>(before.size() / values.size());
      // Pairs of different tokens, of an inverse across this one; of a gradient in segments rows
      // that none has forgotten.
      const auto is_asked = [&](int64_t row, int64_t column) {
        if (is_block && (name == "out" || name == "a") && c.op != Op::gate && c.op != Op::cumsum) {
          const bool is_across = column <= begin + at - chunk && row >= begin + at;
          return column < row - chunk && (name == "out" || is_across);
        }
        if (is_block) return (!is_key && name != "kg") || row != begin + at;
        return to == INT64_MAX ||
               (!is_parameter && !is_state && row >= begin + at && row < begin + to);
      };
      const int64_t first = is_block || name == "dq" ? chunk : begin;
      const int64_t last = is_block ? chunk + c.chunk : end;
      for (int64_t i = 0; i < static_cast<int64_t>(values.size()); ++i) {
        const int64_t row = i / numbers / heads, head = i / numbers % heads;
        const bool is_row = is_parameter || (is_state ? row == n : row >= first && row < last);
        const bool may_change = is_row && head == (is_key ? 1 / (c.HV / c.H) : 1);
        const auto from = before.begin() + i * bytes;
        const double x = values[static_cast<size_t>(i)], y = exact[static_cast<size_t>(i)];
        const bool is_right =
            may_change
                ? !(is_nan && is_asked(row, i % numbers) && std::isnan(y) && !std::isnan(x)) &&
                      !(is_deep && std::isfinite(y) && !std::isfinite(x))
                : std::equal(from, from + bytes, after.begin() + i * bytes);
        ASSERT_TRUE(is_right) << impl << ": g = " << value << ": " << name << " of row " << row
                              << ", head " << head << ", " << i % numbers << ": expected "
                              << (may_change ? std::to_string(y) : "what it was") << ", got " << x
                              << "\n  " << line;
      }
    }
  }
}

// The same of drafted tokens, `at` of sequence `n`: rows of o and of the record keep their bits but
// for those of tokens that have it on their path.
inline void expect_contained_in_paths(const std::string& line, const std::string& impl,
                                      const cases::Place& place, int64_t n, int64_t at) {
  const cases::Case c = cases::parse(line);
  cases::Instance instance(c, true, place);
  instance.run({.impl = impl});
  const std::vector<double> parents =
      instance.has("parents") ? instance.values("parents") : std::vector<double>();
  const int64_t columns = instance.has("parents") ? instance.tensor("parents").view.shape[1] : 0;
  const auto is_on_path = [&](int64_t t) {
    while (t > at) {
      t = parents.empty() ? t - 1
                          : static_cast<int64_t>(parents[static_cast<size_t>(n * columns + t)]);
    }
    return t == at;
  };
  for (const std::string tensor : {"q", "k", "v", "beta", "g"}) {
    if (!instance.has(tensor)) continue;
    for (const double value : {std::nan(""), std::numeric_limits<double>::infinity(),
                               -std::numeric_limits<double>::infinity()}) {
      cases::Instance spoiled(c, true, place);
      put(spoiled, tensor, c.sequence_begin(n) + at, 1, value);
      spoiled.run({.impl = impl});
      for (const std::string name : {"o", "record"}) {
        if (!instance.has(name)) continue;
        const std::vector<std::byte> before = instance.bytes(name), after = spoiled.bytes(name);
        const bool is_record = name == "record";
        const int64_t tokens = is_record ? c.num_sequences() * c.record_tokens() : c.num_tokens();
        const auto row = static_cast<int64_t>(before.size()) / (tokens * c.HV);
        for (int64_t i = 0; i < tokens * c.HV; ++i) {
          const int64_t token = i / c.HV, h = i % c.HV;
          const int64_t first = is_record ? n * c.record_tokens() : c.sequence_begin(n);
          const int64_t t = token - first;
          const bool is_spoilt = tensor == "q" || tensor == "k" ? h / (c.HV / c.H) == 1 : h == 1;
          if (t >= 0 && t < c.sequence_length(n) && is_spoilt && is_on_path(t)) continue;
          ASSERT_TRUE(std::equal(before.begin() + i * row, before.begin() + (i + 1) * row,
                                 after.begin() + i * row))
              << impl << ": " << tensor << " = " << value << ": " << name << " of token " << t
              << ", head " << h << "\n  " << line;
        }
        if (std::isnan(value) && name == "o") {
          EXPECT_FALSE(before == after) << impl << ": " << tensor << ": left no trace\n  " << line;
        }
      }
    }
  }
}

}  // namespace deltic::test
