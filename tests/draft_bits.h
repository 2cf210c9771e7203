// A record and its commit have the bits of decode, token by token, or nearly: on any device.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cases/check.h"

namespace deltic::test {

// Token t of a decode call as a call of its own, on the same pool.
inline cases::Call token_call(const cases::Call& whole, int64_t t) {
  cases::Call call = whole;
  for (const char* name : {"q", "k", "v", "o", "beta", "g"}) {
    TensorView view = call.get(name);
    if (view.rank == 0) continue;
    const auto bytes = t * view.strides[1] * cases::size_of(static_cast<DType>(view.dtype));
    view.data = static_cast<std::byte*>(view.data) + bytes;
    view.shape[1] = 1;
    call.set(name, view);
  }
  return call;
}

// rms(x - want) / rms(want) of numbers of one dtype.
template <class Number>
double difference(const std::byte* x, const std::byte* want, size_t bytes) {
  double error = 0, size = 0;
  for (size_t i = 0; i < bytes; i += sizeof(Number)) {
    Number a, b;
    std::memcpy(&a, x + i, sizeof(a)), std::memcpy(&b, want + i, sizeof(b));
    error += (a - b) * (a - b), size += b * b;
  }
  return std::sqrt(error / std::max(size, 1e-30));
}

// drafter: who leaves the record, where its numbers are those of decode to 1e-5 alone (fp32
// states). sizes: gate, dense, heads, widths, dtypes and layout of decode; dense=NxT with T
// below 16.
inline void expect_bits_of_decode(const std::string& gate, const std::string& sizes, int64_t N,
                                  int64_t T, bool is_tree, const std::string& impl,
                                  const cases::Place& place, const std::string& drafter = {}) {
  using cases::Instance;
  const std::string rows = " dense=" + std::to_string(N) + "x";
  const std::string decode = "decode gate=" + gate + rows + std::to_string(T) +
                             " l2norm=1 form=softplus beta=sigmoid pool=inplace " + sizes;
  const std::string context = drafter + " " + impl + "\n  " + decode + (is_tree ? " tree" : "");
  std::string line = decode + " record=1 tree=" + (is_tree ? "1" : "0");
  std::string step_line = decode;
  if (gate == "none") {
    for (std::string* text : {&line, &step_line}) text->erase(text->find(" form=softplus"), 14);
  }
  Instance drafts(cases::parse(line), true, place);
  drafts.run({.impl = drafter.empty() ? impl : drafter});
  EXPECT_EQ(drafts.damage(), "") << context;
  // What commit has of sizes: heads, widths, states.
  std::string states =
      "commit gate=" + gate + rows + std::to_string(T + 1) + " tree=" + (is_tree ? "1 " : "0 ");
  for (const char* key : {"HV", "K", "V", "sdtype", "state"}) {
    states += std::string(key) + "=" + *cases::value_of(drafts.spec(), key) + " ";
  }
  Instance commit(cases::parse(states), true, place);
  commit.set_values("record", drafts.values("record"));
  std::vector<double> parents;
  if (is_tree) {
    // The lists differ in columns alone.
    const std::vector<double> given = drafts.values("parents");
    const int64_t columns = drafts.tensor("parents").view.shape[1];
    for (int64_t n = 0; n < N; ++n) {
      for (int64_t t = 0; t < T + 1; ++t) {
        parents.push_back(t < T ? given[static_cast<size_t>(n * columns + t)] : -1.0);
      }
    }
    commit.set_values("parents", parents);
  }
  // Every sequence takes another count, all of them in turn.
  for (int64_t first = 0; first <= T; ++first) {
    std::vector<std::vector<int64_t>> paths;
    for (int64_t n = 0; n < N; ++n) {
      const int64_t accepted = (first + n) % (T + 1);
      commit.set("accepted", n, static_cast<double>(accepted));
      std::vector<int64_t> path;
      for (int64_t t = accepted - 1; t >= 0;) {
        path.insert(path.begin(), t);
        t = is_tree ? static_cast<int64_t>(parents[static_cast<size_t>(n * (T + 1) + t)]) : t - 1;
      }
      paths.push_back(std::move(path));
    }
    commit.run({.impl = impl});
    EXPECT_EQ(commit.damage(), "") << context;
    const std::vector<std::byte> found = commit.bytes("state_pool"), o = drafts.bytes("o");
    const auto per_slot =
        found.size() / static_cast<size_t>(commit.tensor("state_pool").view.shape[0]);
    for (int64_t n = 0; n < N; ++n) {
      Instance steps(cases::parse(step_line), true, place);
      steps.reserve({.impl = impl});
      steps.reset();
      const auto& path = paths[static_cast<size_t>(n)];
      for (const int64_t t : path) {
        const cases::Call call = token_call(steps.call_of(), t);
        if (place.device == DeviceType::cuda) {
          call.run(steps.options({.impl = impl}), {nullptr, 0});
        } else {
          call.run(steps.options({.impl = impl}));
        }
      }
      steps.fetch();
      const std::vector<std::byte> want = steps.bytes("state_pool"), o_step = steps.bytes("o");
      const auto slot = static_cast<size_t>(steps.read_slots()[static_cast<size_t>(n)]) * per_slot;
      if (!drafter.empty()) {
        EXPECT_LT(difference<float>(&found[slot], &want[slot], per_slot), 1e-5)
            << "state of sequence " << n << " after " << path.size() << " tokens, " << context;
        continue;
      }
      EXPECT_TRUE(std::equal(found.begin() + static_cast<std::ptrdiff_t>(slot),
                             found.begin() + static_cast<std::ptrdiff_t>(slot + per_slot),
                             want.begin() + static_cast<std::ptrdiff_t>(slot)))
          << "state of sequence " << n << " after " << path.size() << " tokens, " << context;
      const auto per_token = o.size() / static_cast<size_t>(N * T);
      for (const int64_t t : path) {
        const auto at = static_cast<std::ptrdiff_t>(static_cast<size_t>(n * T + t) * per_token);
        EXPECT_TRUE(std::equal(o.begin() + at,
                               o.begin() + at + static_cast<std::ptrdiff_t>(per_token),
                               o_step.begin() + at))
            << "o of sequence " << n << ", token " << t << ", " << context;
      }
    }
  }
}

}  // namespace deltic::test
