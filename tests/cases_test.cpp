// Every case of tests/cases on every implementation that takes it, against the oracle.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <set>

#include "cases/check.h"
#include "cases/features.h"
#include "cases/scalar.h"
#include "cuda_rules.h"
#include "not_finite.h"
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

// The dimension that counts heads (conv: channels).
int32_t head_dimension(const std::string& name, const TensorView& view) {
  const bool is_state = name == "final_state" || name == "state_pool" || name == "ckpt_states" ||
                        name == "d_initial_state";
  return is_state ? 1 : view.rank >= 3 ? 2 : 0;
}

// Changes the sign of the largest slice of the reference along a dimension: a head, or of all
// dimensions but the last, a row.
template <class SliceOf>
void negate_largest(std::vector<double>& x, const std::vector<double>& ref,
                    const SliceOf& slice_of) {
  std::map<int64_t, double> squares;
  for (size_t i = 0; i < ref.size(); ++i) {
    if (!std::isnan(ref[i])) squares[slice_of(static_cast<int64_t>(i))] += ref[i] * ref[i];
  }
  const auto largest = std::max_element(squares.begin(), squares.end(),
                                        [](auto& a, auto& b) { return a.second < b.second; });
  for (size_t i = 0; i < x.size(); ++i) {
    if (slice_of(static_cast<int64_t>(i)) == largest->first) x[i] = -x[i];
  }
}

// No budget lets a wrong result through: zeros, a head or a row with the wrong sign. The rounded
// reference itself passes.
void expect_rejections(const cases::Instance& instance, const cases::Expected& expected) {
  const std::string line = cases::canonical(instance.spec());
  cases::Values exact;
  for (const std::string& name : instance.outputs()) {
    const auto stored = static_cast<DType>(instance.tensor(name).view.dtype);
    std::vector<double>& list = exact[name];
    for (double x : expected.reference.at(name))
      list.push_back(cases::is_half(stored) ? cases::round_to(static_cast<float>(x), stored) : x);
  }
  const cases::Result right = cases::compare_values(instance, exact, expected);
  EXPECT_EQ(right.status, cases::Status::passed) << line << "\n  " << right.reason;
  for (const cases::TensorError& e : right.errors) {
    const std::vector<double>& ref = expected.reference.at(e.name);
    const bool is_zero =
        std::all_of(ref.begin(), ref.end(), [](double x) { return x == 0 || std::isnan(x); });
    if (e.absolute || is_zero) continue;
    const TensorView& view = instance.tensor(e.name).view;
    const int32_t heads = head_dimension(e.name, view);
    int64_t inner = 1;
    for (int32_t d = heads + 1; d < view.rank; ++d) inner *= view.shape[d];
    const int64_t width = view.shape[view.rank - 1];
    const auto head_of = [&](int64_t i) { return i / inner % view.shape[heads]; };
    const auto row_of = [&](int64_t i) { return view.rank > 1 ? i / width : i; };
    for (const std::string what : {"zeros", "a head's sign", "a row's sign"}) {
      cases::Values wrong = exact;
      std::vector<double>& x = wrong[e.name];
      if (what == "zeros") std::fill(x.begin(), x.end(), 0.0);
      if (what == "a head's sign") negate_largest(x, ref, head_of);
      if (what == "a row's sign") negate_largest(x, ref, row_of);
      const cases::Result result = cases::compare_values(instance, wrong, expected);
      EXPECT_EQ(result.status, cases::Status::failed)
          << line << "\n  " << e.name << " with " << what << " passes: budget " << e.budget;
    }
  }
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
  for (const std::string& impl : cases::implementation_names(c.listed_op())) {
    const cases::Result result = cases::check(instance, expected, {.impl = impl, .threads = 2});
    EXPECT_NE(result.status, cases::Status::failed)
        << line << "\n  " << impl << ": " << result.reason;
    taken = taken || result.status == cases::Status::passed;
  }
  EXPECT_TRUE(taken) << line << "\n  no implementation takes it";
  expect_rejections(instance, expected);
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

// Where backward starts from and how many threads it has changes no bit of a gradient. Of the
// implementations every third one, another third for the next `turn`.
void expect_same_gradients(const Case& c, size_t turn) {
  struct Run {
    Save save;
    int threads;
  };
  std::map<std::string, std::map<std::string, std::vector<std::byte>>> first;  // by implementation
  for (const auto [save, threads] :
       {Run{Save::none, 1}, {Save::none, 2}, {Save::states, 2}, {Save::all, 1}}) {
    if ((c.betavec || c.gv) && save != Save::none) continue;  // decode keeps nothing
    Case one = c;
    one.save = save;
    cases::Instance instance(one);
    const std::vector<std::string> names = cases::implementation_names(c.listed_op());
    for (size_t i = turn % 3; i < names.size(); i += 3) {
      const std::string& impl = names[i];
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
  for (size_t i = GetParam(); i < list.size(); i += kGradientParts)
    expect_same_gradients(list[i], i);
}
INSTANTIATE_TEST_SUITE_P(All, LongGradientBits, testing::Range(size_t{0}, kGradientParts));

TEST(GradientBits, SampleIsTheSameForEveryMemoryModeAndThreadCount) {
  const std::vector<Case> list = gradient_cases();
  for (size_t i = 0; i < list.size(); i += 32) {
    if (list[i].num_tokens() * list[i].K * list[i].V <= 1 << 18) expect_same_gradients(list[i], i);
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

// The operations of the delta rule and its blocks, and `more`.
std::set<std::string_view> without_rule_operations(std::set<std::string_view> more) {
  more.insert({"forward", "decode", "recurrent form", "  from a token on", "backward",
               "  from the inputs alone", "  from kept states", "  from everything kept",
               "building blocks", "  their gradients"});
  return more;
}

// What is of the delta rule and its blocks, and `more`.
std::set<std::string_view> without_delta_rule(std::set<std::string_view> more) {
  more.insert({"no gate", "gate per head", "gate per channel", "gate forms", "grouped values",
               "L2 norm inside", "chunks of 16 and 32", "in segments", "vector beta, gv",
               "  trees of tokens", "stochastic rounding", "adversarial inputs"});
  return without_rule_operations(std::move(more));
}

// `more`, and what only operations on pools have: moves of states, records of drafts, commits.
std::set<std::string_view> without_pool_operations(std::set<std::string_view> more) {
  more.insert({"state move", "  to the other layout", "  to another dtype", "  of several layers",
               "  of some heads", "record of drafts", "  of trees", "commit of drafts",
               "  of all layers", "  of paths in trees"});
  return more;
}

// What a step is not.
std::set<std::string_view> steps_alone() {
  return without_rule_operations({"gated norm", "  its gradients", "convolution", "  its gradient",
                                  "state move", "  to the other layout", "  to another dtype",
                                  "  of several layers", "  of some heads", "commit of drafts",
                                  "  of all layers", "  of paths in trees", "chunks of 16 and 32",
                                  "in segments"});
}
bool is_row_of_steps(std::string_view name) {
  return name == "step" || name == "  without a norm" || name == "  of several tokens";
}

// Of the rows that verify prints, those that an implementation does not take. Every other one needs
// ten cases on it: that nobody asked is no reason.
const std::map<std::string_view, std::set<std::string_view>>& not_taken() {
  static const std::map<std::string_view, std::set<std::string_view>> all = {
      {"cpu.amx",
       without_pool_operations({"decode", "building blocks", "  their gradients", "convolution",
                                "  its gradient", "gated norm", "  its gradients", "fp32", "fp16",
                                "vector beta, gv", "  trees of tokens", "recurrent form",
                                "stochastic rounding"})},
      {"cuda.sm90.forward",
       without_pool_operations({"decode", "recurrent form", "backward", "  from the inputs alone",
                                "  from kept states", "  from everything kept", "building blocks",
                                "  their gradients", "convolution", "  its gradient", "gated norm",
                                "  its gradients", "fp32", "chunks of 16 and 32", "vector beta, gv",
                                "  trees of tokens", "stochastic rounding"})},
      {"cuda.sm90.backward", without_pool_operations({"forward",
                                                      "decode",
                                                      "recurrent form",
                                                      "  from a token on",
                                                      "building blocks",
                                                      "  their gradients",
                                                      "convolution",
                                                      "  its gradient",
                                                      "gated norm",
                                                      "  its gradients",
                                                      "fp32",
                                                      "pools",
                                                      "checkpoints",
                                                      "chunks of 16 and 32",
                                                      "vector beta, gv",
                                                      "  null slots",
                                                      "  a second one to write",
                                                      "  read by accepted tokens",
                                                      "  trees of tokens",
                                                      "has_initial_state",
                                                      "stochastic rounding"})},
      {"cuda.decode",
       without_pool_operations({"forward", "  from a token on", "backward",
                                "  from the inputs alone", "  from kept states",
                                "  from everything kept", "building blocks", "  their gradients",
                                "convolution", "  its gradient", "gated norm", "  its gradients",
                                "checkpoints", "chunks of 16 and 32", "vector beta, gv"})},
      {"cuda.drafts",
       {"forward",
        "recurrent form",
        "  from a token on",
        "backward",
        "  from the inputs alone",
        "  from kept states",
        "  from everything kept",
        "building blocks",
        "  their gradients",
        "convolution",
        "  its gradient",
        "gated norm",
        "  its gradients",
        "state move",
        "  to the other layout",
        "  to another dtype",
        "  of several layers",
        "  of some heads",
        "commit of drafts",
        "  of all layers",
        "  of paths in trees",
        "checkpoints",
        "fp32",
        "16-bit states",
        "  a second one to write",
        "stochastic rounding",
        "chunks of 16 and 32",
        "in segments",
        "vector beta, gv"}},
      {"cuda.conv", without_pool_operations(without_delta_rule({"gated norm", "  its gradients"}))},
      {"cuda.norm", without_pool_operations(without_delta_rule(
                        {"convolution", "  its gradient", "V-first states", "16-bit states",
                         "pools", "  null slots", "  a second one to write",
                         "  read by accepted tokens", "has_initial_state", "checkpoints"}))},
      {"cuda.move",
       without_delta_rule({"gated norm", "  its gradients", "convolution", "  its gradient",
                           "record of drafts", "  of trees", "commit of drafts", "  of all layers",
                           "  of paths in trees", "fp32", "bf16", "fp16", "packed sequences",
                           "padding", "  read by accepted tokens", "has_initial_state",
                           "checkpoints"})},
      {"cpu.parts", steps_alone()},
      {"cuda.parts", steps_alone()},
      {"cuda.general",
       {"convolution", "  its gradient", "gated norm", "  its gradients", "state move",
        "  to the other layout", "  to another dtype", "  of several layers", "  of some heads"}}};
  return all;
}

// Cases by implementation and feature: of this machine's CPU as they say themselves, of CUDA's by
// rule.
using Counts = std::map<std::string, std::map<std::string_view, int>>;
Counts count_takers() {
  Counts counts;
  for (const cases::SourcedCase& s : cases::read_folder(DELTIC_CASES_FOLDER)) {
    std::vector<std::string> takers;
    if (s.spec.split != Split::by_length && s.spec.split != Split::segments) {
      for (const Choice& choice : cases::Instance::shapes_of(s.spec).explain())
        if (choice.accepts && choice.name != "reference") takers.push_back(choice.name);
    }
    for (const CudaRule& rule : kCudaRules)
      if (rule.takes(s.spec)) takers.emplace_back(rule.impl);
    for (const cases::Feature& f : cases::features()) {
      if (!f.fits(s.spec)) continue;
      for (const std::string& impl : takers) ++counts[impl][f.name];
    }
  }
  return counts;
}

TEST(Cases, EveryFeatureHasTenOnEveryImplementationThatTakesIt) {
  const Counts counts = count_takers();
  std::set<std::string> here;
  for (const CudaRule& rule : kCudaRules) here.emplace(rule.impl);
  for (int op = 0; op < DELTIC_NUM_OPS; ++op) {
    for (const ImplementationInfo& i : implementations(static_cast<Op>(op)))
      if (i.runs_here && i.name != "reference") here.insert(i.name);
  }
  for (const std::string& impl : here) {
    const auto untaken = not_taken().find(impl);
    for (const cases::Feature& f : cases::features()) {
      const bool is_gpu_alone = f.name == std::string_view("in segments");
      const bool runs_steps = impl.ends_with(".parts");
      const bool is_taken = (runs_steps || !is_row_of_steps(f.name)) &&
                            (untaken == not_taken().end() || untaken->second.count(f.name) == 0) &&
                            !(is_gpu_alone && impl.rfind("cpu.", 0) == 0);
      const auto of_impl = counts.find(impl);
      const int count = of_impl != counts.end() && of_impl->second.count(f.name) > 0
                            ? of_impl->second.at(f.name)
                            : 0;
      if (is_taken) {
        EXPECT_GE(count, 10) << impl << ": " << f.name;
      } else {
        EXPECT_EQ(count, 0) << impl << ": " << f.name;
      }
    }
  }
}

TEST(Cases, EveryImplementationHasOne) {
  std::map<int, std::set<std::string>> taken;
  for (const auto& [file, list] : files()) {
    for (const Case& c : list) {
      if (c.split == Split::by_length || c.split == Split::segments) continue;
      for (const Choice& choice : cases::Instance::shapes_of(c).explain())
        if (choice.accepts) taken[static_cast<int>(c.op)].insert(choice.name);
    }
  }
  for (int op = 0; op < DELTIC_NUM_OPS; ++op) {
    for (const ImplementationInfo& impl : implementations(static_cast<Op>(op))) {
      if (!impl.runs_here || impl.name == "reference") continue;
      EXPECT_TRUE(taken[op].count(impl.name) > 0)
          << deltic_op_name(static_cast<deltic_op>(op)) << " " << impl.name;
    }
  }
}

TEST(NotFinite, StaysInItsSequenceHeadAndChunk) {
  for (const char* line :
       {"forward gate=head seqs=10,130,5 H=2 HV=4 K=16 V=8 dtype={f32,bf16} init=1",
        "forward gate=channel form=bounded seqs=10,130,5 H=2 HV=4 K=16 V=8 dtype={f32,bf16}",
        "decode gate={head,channel} seqs=3,130,2 H=2 HV=4 K=16 V=8 init=1"}) {
    for (const std::string& one : cases::expand(line)) {
      for (const Choice& choice : cases::Instance::shapes_of(cases::parse(one)).explain()) {
        if (choice.accepts) expect_contained(one, choice.name, {}, 1, 100);
      }
    }
  }
}

TEST(NotFinite, GatesStayInTheirHead) {
  for (const char* line :
       {"backward gate={head,channel} seqs=3,150 H=1 HV=2 K=16 V=8 dtype={f32,f16} init=1",
        "backward gate={head,channel} form=bounded seqs=3,150 H=2 K=32 V=32 dtype=f16 init=1 "
        "save=none",
        "kkt gate={head,channel} seqs=3,150 H=1 HV=2 K=32 dtype=bf16",
        "scores gate={head,channel} seqs=3,150 H=1 HV=2 K=32",
        "scores_inverse gate={head,channel} seqs=3,150 H=1 HV=2 K=32 chunk={16,64}",
        "wy gate={head,channel} seqs=3,150 H=1 HV=2 K=32 V=32 dtype=bf16",
        "cumsum gate=head form=softplus seqs=3,150 HV=2",
        "cumsum gate=channel seqs=3,150 HV=2 K=32",
        "gate gate=channel form=bounded seqs=3,150 HV=2 K=32",
        "kkt_backward gate={head,channel} seqs=3,150 H=1 HV=2 K=32",
        "scores_backward gate={head,channel} seqs=3,150 H=1 HV=2 K=32",
        "wy_backward gate={head,channel} seqs=3,150 H=1 HV=2 K=32 V=32"}) {
    for (const std::string& one : cases::expand(line)) {
      for (const Choice& choice : cases::Instance::shapes_of(cases::parse(one)).explain()) {
        if (!choice.accepts) continue;
        for (const int64_t at : {64, 127}) expect_gates_contained(one, choice.name, {}, 1, at);
      }
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

// Just below the budget passes, just above does not: the contract's number on standard inputs,
// twice the plain algorithm's error where that is less, and on other inputs whatever it is.
TEST(CheckItself, BudgetsAreTheContract) {
  struct Row {
    const char *name, *op;
    double half, f32;
    bool has_floor = false;  // of the whole contract: one number per head
  };
  const Row rows[] = {{"o", "forward", 6e-3, 1e-4},
                      {"final_state", "forward", 6e-3, 1e-4},
                      {"dq", "backward", 8e-3, 1e-4},
                      {"dk", "backward", 8e-3, 1e-4},
                      {"dv", "backward", 8e-3, 1e-4},
                      {"d_initial_state", "backward", 8e-3, 1e-4},
                      {"dbeta", "backward", 1.5e-2, 1e-4},
                      {"dg", "backward", 2e-2, 2e-4},
                      {"dA_log", "backward", 1e-2, 2e-4, true},
                      {"ddt_bias", "backward", 1e-2, 2e-4, true}};
  for (const char* dtype : {"bf16", "f32"}) {
    for (const std::string keys : {"random", "repeated"}) {
      for (const Row& row : rows) {
        const std::string line = std::string(row.op) +
                                 " gate=channel form=softplus dense=1x20 H=1 HV=2 K=16 V=16 "
                                 "init=1 dtype=" +
                                 dtype + " keys=" + keys;
        SCOPED_TRACE(line + ": " + row.name);
        const cases::Instance instance(cases::parse(line));
        cases::Expected expected = cases::expect(instance);
        const auto magnitude = expected.magnitude.find(row.name);
        const auto passes = [&](double error) {
          cases::Values values = expected.reference;
          std::vector<double>& x = values.at(row.name);
          for (size_t i = 0; i < x.size(); ++i) {
            const bool has_own = magnitude != expected.magnitude.end();
            x[i] += error * std::max(std::fabs(x[i]), has_own ? magnitude->second[i] : 0.0);
          }
          return cases::compare_values(instance, values, expected).status == cases::Status::passed;
        };
        const auto expect_budget = [&](double budget) {
          EXPECT_TRUE(passes(0.99 * budget)) << budget;
          EXPECT_FALSE(passes(1.01 * budget)) << budget;
        };
        const double limit = dtype == std::string("bf16") ? row.half : row.f32;
        expected.plain[row.name] = 0.3 * limit;
        expect_budget(row.has_floor ? limit : 0.6 * limit);
        expected.plain[row.name] = 0.9 * limit;
        expect_budget(keys == "random" ? limit : 1.8 * limit);
      }
    }
  }
}

// An error that one draw has and three have not counts half; damage and errors of ten budgets are
// no luck.
TEST(CheckItself, JudgesByFourDrawsWhatOneMissed) {
  const Case c = cases::parse("forward gate=head dense=1x40 H=1 K=16 V=16");
  cases::Instance instance(c);
  const cases::Expected expected = cases::expect(instance);
  const cases::RunOptions run{.impl = "cpu.plain"};
  const auto compare_scaled = [&](double budgets) {
    instance.run(run);
    const double budget = cases::compare(instance, expected).errors.at(0).budget;
    auto* o = static_cast<float*>(instance.tensors().o.data);
    for (int i = 0; i < 40 * 16; ++i) o[i] *= static_cast<float>(1 + budgets * budget);
    return cases::compare(instance, expected);
  };
  for (const auto& [budgets, passes] : {std::pair{1.6, true}, {2.6, false}, {9.0, false}}) {
    const cases::Result own = compare_scaled(budgets);
    EXPECT_EQ(own.status, cases::Status::failed);
    EXPECT_TRUE(own.may_be_luck) << budgets;
    const cases::Result four = cases::check_draws(instance, expected, own, run);
    EXPECT_EQ(four.status == cases::Status::passed, passes) << budgets << ": " << four.reason;
    EXPECT_NEAR(four.errors.at(0).error / own.errors.at(0).error, 0.5, 0.15) << budgets;
  }
  EXPECT_FALSE(compare_scaled(11).may_be_luck);
  EXPECT_FALSE(compare_scaled(0).may_be_luck);
  compare_scaled(1.6);
  static_cast<float*>(instance.tensors().o.data)[-1] = 0;
  EXPECT_FALSE(cases::compare(instance, expected).may_be_luck);
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
