// What holds of every implementation of an operation on rows, on any device: tests of the CPU and
// of a GPU.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <string>
#include <vector>

#include "cases/check.h"

namespace deltic::test {

// A query looks at no address: as much workspace for null pointers as for tensors that begin at
// another element.
inline void expect_no_address_matters(const std::string& line, const std::string& impl,
                                      const cases::Place& place) {
  const cases::Case c = cases::parse(line);
  const cases::Instance shapes = cases::Instance::shapes_of(c, place.device);
  const Options options = shapes.options({.impl = impl});
  const size_t bytes = shapes.call_of().workspace_bytes(options);
  const cases::Instance instance(c, true, place);
  EXPECT_EQ(instance.call_of().workspace_bytes(options), bytes) << impl << "\n  " << line;
  for (const auto& names : {instance.inputs(), instance.outputs()}) {
    for (const std::string& name : names) {
      cases::Call call = instance.call_of();
      TensorView view = call.get(name);
      view.data =
          static_cast<std::byte*>(view.data) + cases::size_of(static_cast<DType>(view.dtype));
      ASSERT_TRUE(call.set(name, view)) << name;
      EXPECT_EQ(call.workspace_bytes(options), bytes) << impl << ": " << name << "\n  " << line;
    }
  }
}

// A number in every fourth row of x, whatever it is, changes no bit of another row.
inline void expect_rows_apart(const std::string& line, const std::string& impl,
                              const cases::Place& place) {
  const cases::Case c = cases::parse(line);
  cases::Instance instance(c, true, place);
  instance.run({.impl = impl});
  const int64_t rows = instance.tensor("x").view.numel() / c.K;
  for (const double value : {std::nan(""), 1e30, HUGE_VAL}) {
    cases::Instance other(c, true, place);
    for (int64_t row = 1; row < rows; row += 4) other.set("x", row * c.K + 1, value);
    other.run({.impl = impl});
    for (const std::string name : {"out", "dx", "dz"}) {
      if (!instance.has(name)) continue;
      const std::vector<std::byte> before = instance.bytes(name), after = other.bytes(name);
      const auto size = static_cast<int64_t>(before.size()) / rows;
      for (int64_t row = 0; row < rows; ++row) {
        const auto begin = before.begin() + row * size;
        const bool is_same = std::equal(begin, begin + size, after.begin() + row * size);
        EXPECT_EQ(is_same, row % 4 != 1)
            << impl << ": " << name << " of row " << row << ", x = " << value << "\n  " << line;
      }
    }
  }
}

// Without eps a norm has no scale: squares that leave the range of fp32 on either side are found.
inline void expect_no_scale_matters(const std::string& line, const std::string& impl,
                                    const cases::Place& place) {
  const cases::Case c = cases::parse(line);
  ASSERT_TRUE(c.eps && *c.eps == 0 && c.dtype == DType::f32) << line;
  cases::Instance instance(c, true, place);
  const std::vector<double> x = instance.values("x");
  instance.run({.impl = impl});
  const std::vector<double> expected = instance.values("out");
  for (const double factor : {0x1p-80, 0x1p-66, 0x1p66, 0x1p100}) {
    std::vector<double> scaled = x;
    for (double& value : scaled) value *= factor;
    instance.set_values("x", scaled);
    instance.run({.impl = impl});
    const std::vector<double> out = instance.values("out");
    for (size_t i = 0; i < out.size(); ++i) {
      ASSERT_NEAR(out[i], expected[i], 1e-6 * std::abs(expected[i]))
          << impl << ": factor " << factor << ", " << i << "\n  " << line;
    }
  }
}

// Lines for them.
inline const char* const kRowLines[] = {
    "rmsnorm dense=2x9 H=3 K=32 act=silu",
    "rmsnorm dense=2x9 H=3 K=128 act=sigmoid dtype=bf16 odtype=bf16",
    "rmsnorm dense=2x9 H=3 K=33 z=0",
    "rmsnorm_backward dense=2x9 H=3 K=64 act=silu dtype=bf16 odtype=bf16",
    "rmsnorm_backward dense=2x9 H=3 K=1024 act=silu",
};
inline const char* const kUnscaledLines[] = {
    "rmsnorm dense=2x9 H=3 K=32 act=silu eps=0",
    "rmsnorm dense=1x3 H=2 K=512 z=0 eps=0",
    "rmsnorm dense=1x3 H=2 K=37 act=sigmoid eps=0",
};
inline const char* const kQueriedLines[] = {
    "rmsnorm dense=2x900 H=3 K=64 act=silu dtype=bf16 odtype=bf16",
    "rmsnorm_backward dense=2x900 H=3 K=64 act=silu dtype=bf16 odtype=bf16",
    "rmsnorm_backward dense=1x5 H=1 K=1024 act=silu",
    "conv seqs=130,0,64,257 D=72 W=4 init=1 dtype=bf16 act=silu",
    "conv dense=40x1 D=64 W=4 pool=inplace dtype=bf16 act=silu",
    "conv_backward seqs=130,0,64,2757 D=1032 W=4 dtype=bf16 init=1 act=silu",
    "conv_backward dense=2500x3 D=8 W=6 init=1 act=silu",
};

}  // namespace deltic::test
