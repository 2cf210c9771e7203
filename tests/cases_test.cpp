// Every case of tests/cases on every implementation that takes it, against the oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>

#include "cases/check.h"
#include "support.h"

namespace deltic::test {
namespace {

using cases::Case;

struct Shard {
  std::string file;
  size_t index = 0, count = 1;
};
void PrintTo(const Shard& s, std::ostream* out) {
  *out << s.file << " " << s.index + 1 << " of " << s.count;
}

std::map<std::string, std::vector<Case>> files() {
  std::map<std::string, std::vector<Case>> all;
  for (const cases::SourcedCase& c : cases::read_folder(DELTIC_CASES_FOLDER))
    all[c.file].push_back(c.spec);
  return all;
}

// About 30 cases each, so that ctest shows progress and uses all cores.
std::vector<Shard> shards() {
  std::vector<Shard> all;
  for (const auto& [file, list] : files()) {
    const size_t count = (list.size() + 29) / 30;
    for (size_t i = 0; i < count; ++i) all.push_back({file, i, count});
  }
  return all;
}

void check_case(const Case& c) {
  const std::string line = cases::canonical(c);
  if (c.split == Split::by_length || c.split == Split::segments) {  // no CPU implementation yet
    EXPECT_EQ(cases::check(c).status, cases::Status::skipped) << line;
    return;
  }
  cases::Instance instance(c);
  const cases::Expected expected = cases::expect(instance);
  bool taken = false;
  for (const std::string& impl : cases::implementation_names(c.op)) {
    const cases::Result result = cases::check(instance, expected, {.impl = impl, .threads = 2});
    EXPECT_NE(result.status, cases::Status::failed)
        << line << "\n  " << impl << ": " << result.reason;
    taken = taken || result.status == cases::Status::passed;
  }
  EXPECT_TRUE(taken) << line << "\n  no implementation takes it";
}

class LongCases : public testing::TestWithParam<Shard> {};

TEST_P(LongCases, AgreeWithTheOracle) {
  const Shard& shard = GetParam();
  const auto all = files();
  const std::vector<Case>& list = all.at(shard.file);
  for (size_t i = shard.index; i < list.size(); i += shard.count) check_case(list[i]);
}
INSTANTIATE_TEST_SUITE_P(All, LongCases, testing::ValuesIn(shards()), [](const auto& row) {
  return identifier(row.param.file) + "_" + std::to_string(row.param.index);
});

// Where backward starts from and how many threads it has changes no bit of a gradient.
void expect_same_gradients(const Case& c) {
  struct Run {
    Save save;
    int threads;
  };
  std::map<std::string, std::map<std::string, std::vector<std::byte>>> first;  // by implementation
  for (const auto [save, threads] :
       {Run{Save::none, 1}, {Save::none, 2}, {Save::states, 2}, {Save::all, 1}}) {
    Case one = c;
    one.save = save;
    cases::Instance instance(one);
    for (const std::string& impl : cases::implementation_names(c.op)) {
      try {
        instance.run({.impl = impl, .threads = threads});
      } catch (const Error& e) {
        ASSERT_EQ(e.kind(), ErrorKind::unsupported) << e.what();
        continue;
      }
      for (const std::string& name : instance.outputs()) {
        const auto [at, is_first] = first[impl].emplace(name, instance.bytes(name));
        EXPECT_TRUE(is_first || at->second == instance.bytes(name))
            << cases::canonical(one) << "\n  " << impl << ", threads " << threads << ": " << name;
      }
    }
  }
}

// The gradient cases, each once whatever its `save`.
std::vector<Case> gradient_cases() {
  std::vector<Case> list;
  for (const auto& [file, all] : files()) {
    for (Case c : all) {
      if (c.op != Op::backward) continue;
      c.save = Save::none;
      if (std::find(list.begin(), list.end(), c) == list.end()) list.push_back(c);
    }
  }
  return list;
}

class LongGradientBits : public testing::TestWithParam<size_t> {};
constexpr size_t kGradientParts = 4;

TEST_P(LongGradientBits, AreTheSameForEveryMemoryModeAndThreadCount) {
  const std::vector<Case> list = gradient_cases();
  ASSERT_GT(list.size(), 300u);
  for (size_t i = GetParam(); i < list.size(); i += kGradientParts) expect_same_gradients(list[i]);
}
INSTANTIATE_TEST_SUITE_P(All, LongGradientBits, testing::Range(size_t{0}, kGradientParts));

TEST(GradientBits, SampleIsTheSameForEveryMemoryModeAndThreadCount) {
  const std::vector<Case> list = gradient_cases();
  for (size_t i = 0; i < list.size(); i += 32) {
    if (list[i].num_tokens() * list[i].K * list[i].V <= 1 << 18) expect_same_gradients(list[i]);
  }
}

// One in sixteen of the small ones: the set that sanitizers can afford.
TEST(Cases, SampleAgreesWithTheOracle) {
  size_t i = 0;
  for (const auto& [file, list] : files()) {
    for (const Case& c : list) {
      const int64_t work = c.num_batches() * c.num_tokens() * c.HV * c.K * c.V;
      if (work <= 1 << 20 && i++ % 16 == 0) check_case(c);
    }
  }
}

TEST(Cases, EveryImplementationHasOne) {
  const auto all = files();
  for (int op = 0; op < DELTIC_CONV; ++op) {  // conv has a test of its own instead of lines
    for (const ImplementationInfo& impl : implementations(static_cast<Op>(op))) {
      if (!impl.runs_here || impl.name == "reference") continue;
      bool taken = false;
      for (const auto& [file, list] : all) {
        taken = taken || std::any_of(list.begin(), list.end(), [&](const Case& c) {
                  if (static_cast<int>(c.op) != op || c.num_tokens() > 200 ||
                      c.split == Split::by_length || c.split == Split::segments)
                    return false;
                  for (const Choice& choice : cases::Instance(c).explain())
                    if (choice.name == impl.name) return choice.accepts;
                  return false;
                });
      }
      EXPECT_TRUE(taken) << deltic_op_name(static_cast<deltic_op>(op)) << " " << impl.name;
    }
  }
}

// The check itself: it must see a wrong number, a number that is not finite and a write outside.
TEST(CheckItself, SeesWrongResults) {
  const Case c = cases::parse("forward gate=head dense=1x40 H=1 K=16 V=16");
  cases::Instance instance(c);
  const cases::Expected expected = cases::expect(instance);
  instance.run();
  EXPECT_EQ(cases::compare(instance, expected).status, cases::Status::passed);
  auto* o = static_cast<float*>(instance.tensors().o.data);
  const float kept = o[100];
  o[100] = kept + 1;
  EXPECT_EQ(cases::compare(instance, expected).status, cases::Status::failed);
  o[100] = std::numeric_limits<float>::quiet_NaN();
  EXPECT_EQ(cases::compare(instance, expected).status, cases::Status::failed);
  o[100] = kept;
  EXPECT_EQ(cases::compare(instance, expected).status, cases::Status::passed);
  o[-1] = 0;
  EXPECT_EQ(cases::compare(instance, expected).status, cases::Status::failed);
  EXPECT_NE(instance.damage(), "");
}

TEST(CheckItself, SeesWrongGradients) {
  const Case c = cases::parse(
      "backward gate=channel form=softplus seqs=70,0,3 pad=2 H=1 HV=2 K=16 V=16 init=1 strided=1 "
      "save=all");
  cases::Instance instance(c);
  const cases::Expected expected = cases::expect(instance);
  instance.run();
  EXPECT_EQ(cases::compare(instance, expected).status, cases::Status::passed);
  ASSERT_EQ(instance.outputs().size(), 8u);
  for (const std::string& name : instance.outputs()) {
    auto* x = static_cast<float*>(instance.tensor(name).view.data);
    const float kept = x[0];
    for (const float wrong : {kept + 1, std::numeric_limits<float>::quiet_NaN()}) {
      x[0] = wrong;
      EXPECT_EQ(cases::compare(instance, expected).status, cases::Status::failed) << name;
    }
    x[0] = kept;
  }
  for (const char* name : {"dq", "dk", "dv", "dbeta", "dg"}) {  // padding
    const TensorView& t = instance.tensor(name).view;
    auto* x = static_cast<float*>(t.data) + 74 * t.strides[1];
    EXPECT_EQ(x[0], 0.0f) << name;
    x[0] = 1e-30f;
    EXPECT_EQ(cases::compare(instance, expected).status, cases::Status::failed) << name;
    x[0] = 0;
  }
  EXPECT_EQ(cases::compare(instance, expected).status, cases::Status::passed);
  static_cast<std::byte*>(instance.gradients().forward.saved.data)[300] ^= std::byte{1};
  EXPECT_EQ(instance.damage(), "backward wrote to saved");
}

TEST(CheckItself, SeesWrittenInputs) {
  const Case c = cases::parse("decode gate=head dense=2x1 H=1 K=16 V=16 strided=1 pool=move");
  cases::Instance instance(c);
  const cases::Expected expected = cases::expect(instance);
  instance.run();
  EXPECT_EQ(cases::compare(instance, expected).status, cases::Status::passed);
  static_cast<float*>(instance.tensors().k.data)[3] += 1;
  EXPECT_EQ(cases::compare(instance, expected).status, cases::Status::failed);
}

}  // namespace
}  // namespace deltic::test
