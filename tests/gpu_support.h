// What the tests on a GPU share: a fixture that skips without one, lines of every kind of kernel,
// rows of instances.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "cases/check.h"

namespace deltic::test {

inline constexpr cases::Place kGpu{.device = DeviceType::cuda};

class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    const std::string missing = cases::device::missing();
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
};

using GpuBits = Gpu;

// The implementations on the GPU that take a case.
inline std::vector<std::string> takers(const cases::Case& c) {
  std::vector<std::string> names;
  for (const Choice& choice : cases::Instance::shapes_of(c, DeviceType::cuda).explain()) {
    if (choice.accepts) names.push_back(choice.name);
  }
  return names;
}

// Widths and options of every kind of kernel, in few lines.
inline const char* const kLines[] = {
    "forward gate=channel form=bounded seqs=130,0,64,257 H=2 K=128 V=128 dtype=bf16 gdtype=bf16 "
    "beta=sigmoid l2norm=1 init=1 state=vk split=off",
    "forward gate=head seqs=130,0,64,257 H=2 HV=4 K=128 V=128 dtype=bf16 init=1 split=off",
    "forward gate=none seqs=130,0,64,257 H=2 K=64 V=64 dtype=f16 split=off",
    "forward gate=channel form=softplus gates=softplus seqs=100,1,70 H=2 HV=4 K=96 V=72 "
    "dtype=f32 init=1 split=off",
    "decode gate=head seqs=1,3,2 H=2 HV=4 K=128 V=128 dtype=bf16 init=1",
    "decode gate=channel seqs=1,0,9 H=2 HV=4 K=64 V=72 dtype=f32 init=1 state=vk sdtype=bf16",
    "conv seqs=130,0,64,257 D=1032 W=4 dtype=bf16 init=1 act=silu",
    "conv seqs=1,0,9,3 D=33 W=5 dtype=f32 init=1",
};
// The tensor that every token has a row of.
inline std::string out_of(const cases::Case& c) { return c.op == Op::conv ? "out" : "o"; }

// Gradients: widths, gates and forms of every kind.
inline const char* const kBackwardLines[] = {
    "backward gate=channel form=softplus gates=softplus seqs=130,0,64,457 pad=9 H=2 K=128 V=128 "
    "dtype=bf16 beta=sigmoid l2norm=1 init=1",
    "backward gate=head seqs=130,0,64,457 H=2 HV=4 K=64 V=96 dtype=f32 init=1",
    "backward gate=none seqs=300,1 H=2 K=160 V=40 dtype=f16",
    "backward gate=head form=softplus gates=softplus seqs=130,0,64,457 H=2 HV=4 K=64 V=128 "
    "dtype=f16 init=1",
    "backward gate=none seqs=65,300 H=2 HV=4 K=128 V=64 dtype=bf16 l2norm=1",
    // In segments.
    "backward gate=head gates=slow seqs=400,0,65,700 H=2 HV=4 K=64 V=64 dtype=bf16 init=1 "
    "split=128",
    "backward gate=channel gates=slow seqs=300,700 H=2 K=128 V=128 dtype=bf16 l2norm=1 init=1 "
    "split=192",
    "backward gate=none seqs=65,500 H=1 HV=2 K=64 V=128 dtype=f16 split=128",
};

inline const std::vector<std::string> kRows = {"q", "k", "v", "beta", "g", "x"};
inline int64_t per_token(const cases::Instance& i, const std::string& name) {
  return i.tensor(name).view.numel() / i.tensor(name).view.shape[1];
}
// Tokens [begin, begin + count) of a packed instance.
template <class List>
List slice(const List& all, int64_t unit, int64_t begin, int64_t count) {
  return List(all.begin() + begin * unit, all.begin() + (begin + count) * unit);
}

// Other inputs from token `from` of the T dimension on.
inline void halve_rows(cases::Instance& b, int64_t from) {
  for (const std::string& name : kRows) {
    if (!b.has(name)) continue;
    auto values = b.values(name);
    for (auto i = static_cast<size_t>(from * per_token(b, name)); i < values.size(); ++i)
      values[i] *= 0.5;
    b.set_values(name, values);
  }
}

// Whether an error's text names that argument, of a step's parts that of either.
inline bool is_about(const std::string& text, const std::string& name) {
  for (const char* part : {": ", ": conv.", ": decode."})
    if (text.find(part + name + ": expected ") != std::string::npos) return true;
  return false;
}
inline std::string error_of(const std::function<void()>& f) {
  try {
    f();
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

}  // namespace deltic::test
