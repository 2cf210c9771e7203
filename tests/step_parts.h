// A step beside the calls that it is made of: the same bits, wherever both run.
#pragma once

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cases/instance.h"

namespace deltic::test {

// Row-major values before any run.
inline std::vector<double> first_values(const cases::Instance& i, const std::string& name) {
  cases::Instance copy(i.spec());
  return copy.values(name);
}

// Token t of [B,T,...] values.
inline std::vector<double> token_of(const std::vector<double>& x, int64_t B, int64_t T, int64_t t) {
  const auto each = static_cast<int64_t>(x.size()) / (B * T);
  std::vector<double> token;
  for (int64_t b = 0; b < B; ++b) {
    const auto row = x.begin() + (b * T + t) * each;
    token.insert(token.end(), row, row + each);
  }
  return token;
}

// The bytes of rows that a call writes: slots that nobody writes have whatever they had.
inline void expect_same(const cases::Instance& step, const std::string& name,
                        const cases::Instance& part, const std::string& part_name) {
  const std::vector<std::byte> a = step.bytes(name), b = part.bytes(part_name);
  ASSERT_EQ(a.size(), b.size()) << name;
  const cases::Tensor& t = step.tensor(name);
  const auto element = static_cast<size_t>(cases::size_of(static_cast<DType>(t.view.dtype)));
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] == b[i]) continue;
    if (cases::is_by_slot(name) && !step.is_written(t, static_cast<int64_t>(i / element))) continue;
    FAIL() << cases::canonical(step.spec()) << "\n"
           << name << " differs from its part's at element " << i / element;
  }
}

// impl: the step's; part_impl: of all three parts, empty for the best of each.
inline void expect_bits_of_parts(const cases::Case& c, const std::string& impl,
                                 const std::string& part_impl,
                                 DeviceType device = DeviceType::cpu) {
  using cases::Instance;
  const cases::Place place{.device = device};
  Instance step(c, true, place);
  step.run({.impl = impl});
  const auto run = [&](Instance& part) {
    part.move_to(place);
    part.run({.impl = part_impl});
  };
  Instance conv = step.part_of_step(Op::conv);
  run(conv);
  Instance rule = step.part_of_step(Op::decode);
  rule.set_step_rows(conv.values("out"));
  run(rule);
  for (const std::string& name : conv.outputs()) {
    if (name != "out") expect_same(step, "conv." + name, conv, name);
  }
  for (const std::string& name : rule.outputs()) {
    if (name != "o" || !c.has_norm()) expect_same(step, name, rule, name);
  }
  if (!c.has_norm()) return;
  Instance norm = step.part_of_step(Op::rmsnorm);
  norm.set_values("x", rule.values("o"));
  run(norm);
  expect_same(step, "norm.out", norm, "out");
}

}  // namespace deltic::test
