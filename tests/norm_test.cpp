// The gated RMS norm: the oracle against the formula and central differences, bits, large numbers,
// and what a wrong call is told. Every implementation against the oracle: the cases.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "any_device.h"
#include "support.h"

namespace deltic::test {
namespace {

double gate_of(Activation form, double z) {
  const double s = 1 / (1 + std::exp(-z));
  return form == Activation::none ? z : form == Activation::sigmoid ? s : z * s;
}

// A call in fp64 with memory of its own: two batch rows of three tokens and two heads.
struct Call {
  static constexpr int64_t kWidth = 5, kRows = 2 * 3 * 2;
  std::vector<double> x, z, weight, out, d_out, dx, dz, dweight;
  Options options{.impl = "reference", .activation = Activation::silu, .eps = 0.01f};

  Call() {
    const auto draw = [](uint64_t stream, int64_t count) {
      std::vector<double> list;
      for (int64_t i = 0; i < count; ++i)
        list.push_back(normal(1, stream, static_cast<uint64_t>(i), 0));
      return list;
    };
    x = draw(301, kRows * kWidth), z = draw(302, kRows * kWidth), weight = draw(303, kWidth);
    d_out = draw(304, kRows * kWidth);
    out = dx = dz = std::vector<double>(x.size(), NAN), dweight.assign(kWidth, NAN);
  }
  static TensorView rows(std::vector<double>& list) {
    return list.empty() ? TensorView() : TensorView(list.data(), {2, 3, 2, kWidth});
  }
  static TensorView flat(std::vector<double>& list) {
    return list.empty() ? TensorView() : TensorView(list.data(), {kWidth});
  }
  BlockTensors inputs() { return {.x = rows(x), .z = rows(z), .weight = flat(weight)}; }
  double loss() {
    BlockTensors t = inputs();
    t.out = rows(out);
    block(Op::rmsnorm, options, t);
    double sum = 0;
    for (size_t i = 0; i < out.size(); ++i) sum += out[i] * d_out[i];
    return sum;
  }
  void backward() {
    block_backward(Op::rmsnorm, options,
                   {.forward = inputs(),
                    .d_out = rows(d_out),
                    .dx = rows(dx),
                    .dz = z.empty() ? TensorView() : rows(dz),
                    .dweight = weight.empty() ? TensorView() : flat(dweight)});
  }
};

std::vector<Call> calls() {
  std::vector<Call> all(5);
  all[1].options.activation = Activation::sigmoid;
  all[2].options.activation = Activation::none;
  all[3].weight.clear();
  all[4].z.clear(), all[4].options.activation = Activation::none;
  return all;
}

TEST(NormOracle, IsTheFormula) {
  for (Call& c : calls()) {
    c.loss();
    for (int64_t i = 0; i < Call::kRows * Call::kWidth; ++i) {
      const int64_t row = i / Call::kWidth, d = i % Call::kWidth;
      const auto at = static_cast<size_t>(i);
      double squares = 0;
      for (int64_t j = 0; j < Call::kWidth; ++j) {
        const double y = c.x[static_cast<size_t>(row * Call::kWidth + j)];
        squares += y * y;
      }
      const double eps = static_cast<double>(0.01f);
      double y = c.x[at] / std::sqrt(squares / Call::kWidth + eps);
      if (!c.weight.empty()) y *= c.weight[static_cast<size_t>(d)];
      if (!c.z.empty()) y *= gate_of(c.options.activation, c.z[at]);
      EXPECT_NEAR(c.out[at], y, 1e-12);
    }
  }
}

TEST(NormOracle, GradientsAreCentralDifferences) {
  constexpr double kStep = 1e-5;
  for (Call& c : calls()) {
    c.backward();
    const auto compare = [&](std::vector<double>& input, const std::vector<double>& gradient) {
      for (size_t i = 0; i < input.size(); ++i) {
        const double value = input[i];
        input[i] = value + kStep;
        const double above = c.loss();
        input[i] = value - kStep;
        const double below = c.loss();
        input[i] = value;
        EXPECT_NEAR(gradient[i], (above - below) / (2 * kStep), 1e-8) << i;
      }
    };
    compare(c.x, c.dx);
    if (!c.z.empty()) compare(c.z, c.dz);
    if (!c.weight.empty()) compare(c.weight, c.dweight);
  }
}

std::vector<std::string> runnable() {
  std::vector<std::string> names;
  for (const ImplementationInfo& i : implementations(Op::rmsnorm))
    if (i.runs_here && i.name != "reference") names.push_back(i.name);
  return names;
}

TEST(Norm, ThreadsChangeNoBit) {
  constexpr int64_t kTokens = 900, kHeads = 3, kWidth = 40;
  const size_t count = kTokens * kHeads * kWidth;
  std::vector<float> x(count), z(count), d_out(count);
  for (size_t i = 0; i < count; ++i) {
    x[i] = static_cast<float>(normal(2, 311, i, 0)),
    z[i] = static_cast<float>(normal(2, 312, i, 0));
    d_out[i] = static_cast<float>(normal(2, 313, i, 0));
  }
  const std::vector<float> weight(kWidth, 0.75f);
  const auto rows = [&](const std::vector<float>& list) {
    return TensorView(list.data(), {1, kTokens, kHeads, kWidth});
  };
  for (const std::string& impl : runnable()) {
    std::vector<std::vector<float>> first;
    for (const int32_t threads : {1, 2, 5}) {
      std::vector<float> dx(count), dz(count), dweight(kWidth);
      block_backward(
          Op::rmsnorm, {.num_threads = threads, .impl = impl, .activation = Activation::silu},
          {.forward = {.x = rows(x), .z = rows(z), .weight = TensorView(weight.data(), {kWidth})},
           .d_out = rows(d_out),
           .dx = rows(dx),
           .dz = rows(dz),
           .dweight = TensorView(dweight.data(), {kWidth})});
      const std::vector<std::vector<float>> found = {dx, dz, dweight};
      if (first.empty()) first = found;
      for (size_t i = 0; i < found.size(); ++i) {
        EXPECT_EQ(std::memcmp(found[i].data(), first[i].data(), 4 * found[i].size()), 0)
            << impl << " with " << threads << " threads";
      }
    }
  }
}

// Squares of 1e30 overflow fp32.
TEST(Norm, LargeNumbersAreNormed) {
  const std::vector<float> x(64, 1e30f);
  for (const std::string& impl : runnable()) {
    std::vector<float> out(x.size());
    block(Op::rmsnorm, {.impl = impl},
          {.x = TensorView(x.data(), {1, 1, 2, 32}), .out = TensorView(out.data(), {1, 1, 2, 32})});
    for (const float y : out) EXPECT_NEAR(y, 1.0f, 1e-6f) << impl;
  }
}

TEST(Norm, ScaleIsNothingWithoutEps) {
  for (const std::string& impl : runnable()) {
    for (const char* line : kUnscaledLines) expect_no_scale_matters(line, impl, {});
  }
}

TEST(Norm, RowsDoNotSeeEachOther) {
  for (const std::string& impl : runnable()) {
    for (const char* line : kRowLines) expect_rows_apart(line, impl, {});
  }
}

// Of the convolution too, whose gradient has sums of the same kind.
TEST(Norm, QueriesLookAtNoAddress) {
  for (const char* line : kQueriedLines) {
    for (const Choice& choice : cases::Instance::shapes_of(cases::parse(line)).explain()) {
      if (choice.accepts) expect_no_address_matters(line, choice.name, {});
    }
  }
}

TEST(Norm, WrongCallsAreNamed) {
  std::vector<float> x(24), z(24), weight(4), out(24);
  const auto rows = [](std::vector<float>& list) { return TensorView(list.data(), {1, 3, 2, 4}); };
  const BlockTensors sound{
      .x = rows(x), .out = rows(out), .z = rows(z), .weight = TensorView(weight.data(), {4})};
  const auto text = [&](const Options& options, const BlockTensors& t) {
    try {
      block(Op::rmsnorm, options, t);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string("no error");
  };
  BlockTensors t = sound;
  EXPECT_EQ(text({.activation = Activation::silu}, t), "no error");
  EXPECT_EQ(text({.eps = -1.0f}, t),
            "rmsnorm: eps: expected a finite number of at least 0, got -1");
  EXPECT_EQ(text({.eps = INFINITY}, t),
            "rmsnorm: eps: expected a finite number of at least 0, got inf");
  t.z = TensorView(z.data(), {1, 3, 8});
  EXPECT_EQ(text({}, t), "rmsnorm: z: expected shape [1, 3, 2, 4], got [1, 3, 8]");
  t = sound, t.z = {};
  EXPECT_EQ(text({.activation = Activation::sigmoid}, t),
            "rmsnorm: activation: expected none without z, got 2");
  t = sound, t.weight = TensorView(weight.data(), {3});
  EXPECT_EQ(text({}, t), "rmsnorm: weight: expected shape [4], got [3]");
  t = sound, t.out = t.x;
  EXPECT_NE(text({}, t).find("rmsnorm: "), std::string::npos);
  EXPECT_NE(text({}, t), "no error");
  t = sound, t.k = t.x;
  EXPECT_EQ(text({}, t), "rmsnorm: k: expected none, got a tensor");
  EXPECT_EQ(text({.scale = 2.0f}, sound), "rmsnorm: scale: expected none, got 2");
  try {
    l2norm({.eps = 1.0f}, {.x = rows(x), .out = rows(out)});
    ADD_FAILURE() << "no error";
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "l2norm: eps: expected none (rmsnorm and step alone have one), got 1");
  }
}

}  // namespace
}  // namespace deltic::test
