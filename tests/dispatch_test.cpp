// Choosing an implementation: order, names from the call and the environment, sentences, the log.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "support.h"

namespace deltic::test {
namespace {

// Sets an environment variable for the life of the object; null removes it.
class Environment {
 public:
  Environment(const char* name, const char* value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    set(value);
  }
  ~Environment() { set(before_ ? before_->c_str() : nullptr); }
  Environment(const Environment&) = delete;

 private:
  void set(const char* value) {
    if (value != nullptr) {
      setenv(name_, value, 1);
    } else {
      unsetenv(name_);
    }
  }
  const char* name_;
  std::optional<std::string> before_{};
};

// A small sound call.
struct Small {
  std::vector<float> q = std::vector<float>(4 * 16, 0.1f), k = q, v = q, o = q, g{};
  Tensors tensors{.q = {q.data(), {1, 4, 1, 16}},
                  .k = {k.data(), {1, 4, 1, 16}},
                  .v = {v.data(), {1, 4, 1, 16}},
                  .o = {o.data(), {1, 4, 1, 16}}};
};

class Dispatch : public testing::Test {
 protected:
  std::vector<std::string> lines_{};
  Small small_{};
  Environment impl_{"DELTIC_IMPL", nullptr}, log_{"DELTIC_LOG", nullptr};

  void listen() {
    deltic_set_log(
        [](void* user, const char* line) {
          static_cast<std::vector<std::string>*>(user)->push_back(line);
        },
        &lines_);
  }
  void TearDown() override { deltic_set_log(nullptr, nullptr); }
  // The implementation that really ran, as the log has it.
  std::string chosen(Op op, const Options& options = {}) {
    lines_.clear();
    listen();
    op == Op::forward ? forward(options, small_.tensors) : decode(options, small_.tensors);
    deltic_set_log(nullptr, nullptr);
    const std::string begin = "deltic: " + std::string(deltic::name(op)) + ": ", end = ": chosen";
    for (const std::string& line : lines_)
      if (line.starts_with(begin) && line.ends_with(end))
        return line.substr(begin.size(), line.size() - begin.size() - end.size());
    return "";
  }
  std::string first(Op op) {
    for (const Choice& c : explain(op, {}, small_.tensors))
      if (c.chosen) return c.name;
    return "";
  }
  std::string error(Op op, const Options& options = {}) {
    try {
      op == Op::forward ? forward(options, small_.tensors) : decode(options, small_.tensors);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  }
};

TEST_F(Dispatch, ListsEndWithThePlainOneAndTheOracle) {
  for (int op = 0; op < DELTIC_NUM_OPS; ++op) {
    const auto list = implementations(static_cast<Op>(op));
    ASSERT_GE(list.size(), 2u);
    EXPECT_EQ(list[list.size() - 2].name, "cpu.plain") << op;
    EXPECT_EQ(list.back().name, "reference") << op;
    EXPECT_TRUE(list[list.size() - 2].runs_here);
    EXPECT_TRUE(list.back().runs_here);
    for (const ImplementationInfo& i : list)
      EXPECT_EQ(i.runs_here, i.sentence.empty()) << i.name << ": " << i.sentence;
    EXPECT_TRUE(implementations(static_cast<Op>(op), DeviceType::cuda).empty());
  }
  EXPECT_EQ(deltic_implementation(DELTIC_FORWARD, DELTIC_CPU, -1), nullptr);
  EXPECT_EQ(deltic_implementation(DELTIC_FORWARD, DELTIC_CPU, 1000), nullptr);
  EXPECT_EQ(deltic_implementation(static_cast<deltic_op>(12), DELTIC_CPU, 0), nullptr);
  EXPECT_EQ(deltic_implementation(DELTIC_NUM_OPS, DELTIC_CPU, 0), nullptr);
  const char* sentence = nullptr;
  EXPECT_EQ(deltic_implementation_runs_here(DELTIC_FORWARD, DELTIC_CPU, 1000, &sentence), 0);
  EXPECT_STRNE(sentence, "");
}

TEST_F(Dispatch, ExplainHasTheChosenFirstThenListOrder) {
  for (Op op : {Op::forward, Op::decode}) {
    const auto choices = explain(op, {}, small_.tensors);
    const auto list = implementations(op);
    ASSERT_EQ(choices.size(), list.size());
    EXPECT_TRUE(choices[0].chosen);
    EXPECT_TRUE(choices[0].accepts);
    std::vector<std::string> rest;
    for (const ImplementationInfo& i : list)
      if (i.name != choices[0].name) rest.push_back(i.name);
    bool before_chosen = true;
    for (size_t i = 1; i < choices.size(); ++i) {
      EXPECT_FALSE(choices[i].chosen);
      EXPECT_EQ(choices[i].name, rest[i - 1]);
      EXPECT_NE(choices[i].sentence, "");
      before_chosen = before_chosen && list[i - 1].name != choices[0].name;
      if (before_chosen) {
        EXPECT_FALSE(choices[i].accepts) << "an earlier one takes the call";
      }
    }
    EXPECT_EQ(chosen(op), choices[0].name) << "what is explained is what runs";
  }
}

TEST_F(Dispatch, BlocksExplainThemselves) {
  std::vector<float> x(4 * 16, 1.0f), out(4 * 16);
  const auto choices =
      explain(Op::l2norm, {},
              BlockTensors{.x = {x.data(), {1, 4, 1, 16}}, .out = {out.data(), {1, 4, 1, 16}}});
  ASSERT_EQ(choices.size(), implementations(Op::l2norm).size());
  EXPECT_TRUE(choices[0].chosen);
}

TEST_F(Dispatch, OracleRunsOnlyWhenNamed) {
  for (Op op : {Op::forward, Op::decode}) {
    EXPECT_NE(chosen(op), "reference");
    EXPECT_EQ(chosen(op, {.impl = "reference"}), "reference");
    for (const Choice& c : explain(op, {}, small_.tensors))
      if (c.name == "reference") {
        EXPECT_EQ(c.sentence, "takes the call, but runs only when named");
      }
  }
}

TEST_F(Dispatch, EveryImplementationCanBeNamed) {
  for (Op op : {Op::forward, Op::decode}) {
    for (const Choice& c : explain(op, {}, small_.tensors)) {
      if (c.accepts) {
        EXPECT_EQ(chosen(op, {.impl = c.name}), c.name);
      } else {
        EXPECT_EQ(error(op, {.impl = c.name}),
                  std::string(deltic::name(op)) + ": impl: " + c.name +
                      " was named and does not take this call: " + c.sentence);
      }
    }
  }
}

TEST_F(Dispatch, EnvironmentNamesPerOperation) {
  const Environment e("DELTIC_IMPL", "forward:cpu.plain,decode:reference");
  EXPECT_EQ(chosen(Op::forward), "cpu.plain");
  EXPECT_EQ(chosen(Op::decode), "reference");
}
TEST_F(Dispatch, EnvironmentNamesOneOperationOnly) {
  const std::string best = first(Op::decode);
  const Environment e("DELTIC_IMPL", "forward:reference");
  EXPECT_EQ(chosen(Op::forward), "reference");
  EXPECT_EQ(chosen(Op::decode), best);
}
TEST_F(Dispatch, BareNameBindsEveryOperationThatHasIt) {
  const Environment e("DELTIC_IMPL", "cpu.plain");
  EXPECT_EQ(chosen(Op::forward), "cpu.plain");
  EXPECT_EQ(chosen(Op::decode), "cpu.plain");
}
TEST_F(Dispatch, OptionWinsOverEnvironment) {
  const Environment e("DELTIC_IMPL", "cpu.plain");
  EXPECT_EQ(chosen(Op::forward, {.impl = "reference"}), "reference");
}
TEST_F(Dispatch, EmptyEnvironmentIsNone) {
  const std::string best = first(Op::forward);
  const Environment e("DELTIC_IMPL", "");
  EXPECT_EQ(chosen(Op::forward), best);
}
TEST_F(Dispatch, UnknownNamesInTheEnvironmentAreErrors) {
  const auto names = [](Op op) {
    std::string all;
    for (const auto& i : implementations(op)) all += (all.empty() ? "" : ", ") + i.name;
    return all;
  };
  const std::vector<float> before = small_.o;
  {
    const Environment e("DELTIC_IMPL", "cpu.abacus");
    EXPECT_EQ(error(Op::forward), "forward: DELTIC_IMPL: expected an implementation (" +
                                      names(Op::forward) + "), got cpu.abacus");
  }
  {
    const Environment e("DELTIC_IMPL", "forward:cpu.plain,decode:cpu.abacus");
    // Wrong for every operation: a typing error must not wait for the first decode.
    EXPECT_EQ(error(Op::forward), "forward: DELTIC_IMPL: expected an implementation of decode (" +
                                      names(Op::decode) + "), got cpu.abacus");
  }
  {
    const Environment e("DELTIC_IMPL", "sideways:cpu.plain");
    EXPECT_EQ(error(Op::decode),
              "decode: DELTIC_IMPL: expected an operation before ':', got sideways");
  }
  {
    const Environment e("DELTIC_IMPL", "forward:");
    EXPECT_NE(error(Op::forward), "");
  }
  EXPECT_EQ(small_.o, before) << "written in spite of the error";
}

TEST_F(Dispatch, LogHasOneLinePerImplementation) {
  const auto list = implementations(Op::forward);
  lines_.clear();
  listen();
  const size_t bytes = forward_workspace_bytes({}, small_.tensors);
  lines_.clear();
  forward({}, small_.tensors, Workspace(bytes).c());
  ASSERT_EQ(lines_.size(), list.size());
  for (size_t i = 0; i < list.size(); ++i)
    EXPECT_TRUE(lines_[i].starts_with("deltic: forward: " + list[i].name + ": ")) << lines_[i];
}

TEST_F(Dispatch, LogGoesToStderrIfTheEnvironmentAsks) {
  {
    const Environment e("DELTIC_LOG", "dispatch");
    testing::internal::CaptureStderr();
    forward({}, small_.tensors);
    const std::string text = testing::internal::GetCapturedStderr();
    EXPECT_NE(text.find(": chosen\n"), std::string::npos) << text;
    EXPECT_NE(text.find("deltic: forward: cpu.plain: "), std::string::npos) << text;
    listen();  // a callback receives the lines instead
    testing::internal::CaptureStderr();
    forward({}, small_.tensors);
    EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
    EXPECT_FALSE(lines_.empty());
    deltic_set_log(nullptr, nullptr);
  }
  testing::internal::CaptureStderr();
  testing::internal::CaptureStdout();
  forward({}, small_.tensors);
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "") << "the library never prints";
  EXPECT_EQ(testing::internal::GetCapturedStdout(), "") << "the library never prints";
}

TEST_F(Dispatch, CheckedModeComesFromCallApiOrEnvironment) {
  small_.q[7] = std::numeric_limits<float>::quiet_NaN();
  const std::string text =
      "forward: q: expected finite values, got nan at sequence 0, token 0, head 0";
  const Environment off("DELTIC_CHECKED", nullptr);
  EXPECT_EQ(error(Op::forward), "");
  EXPECT_EQ(error(Op::forward, {.checked = true}), text);
  {
    const Environment on("DELTIC_CHECKED", "1");
    EXPECT_EQ(deltic_get_checked(), 1);
    EXPECT_EQ(error(Op::forward), text);
    EXPECT_EQ(error(Op::forward, {.checked = false}), "");
    set_checked(false);
    EXPECT_EQ(error(Op::forward), "") << "the API call wins over the environment";
    deltic_set_checked(-1);
    EXPECT_EQ(error(Op::forward), text);
  }
  {
    const Environment zero("DELTIC_CHECKED", "0");
    EXPECT_EQ(error(Op::forward), "");
  }
  set_checked(true);
  EXPECT_EQ(error(Op::forward), text);
  deltic_set_checked(-1);
}

TEST_F(Dispatch, ThreadsComeFromCallOrApi) {
  const int32_t before = deltic_get_num_threads();
  EXPECT_GE(before, 1);
  set_num_threads(3);
  EXPECT_EQ(num_threads(), 3);
  forward({}, small_.tensors);
  set_num_threads(0);
  EXPECT_EQ(num_threads(), before);
}

// The choice may look at widths, dtypes and options, never at a length: else a sequence's bits
// would depend on its neighbours.
TEST_F(Dispatch, ChoiceDoesNotDependOnLengths) {
  for (Op op : {Op::forward, Op::decode}) {
    for (DType dtype : {DType::f32, DType::bf16, DType::f16}) {
      std::string first_name;
      for (int64_t T : {0, 1, 17, 64, 4096, 1000000}) {
        for (int64_t B : {1, 7}) {
          const TensorView t(nullptr, dtype, {B, T, 2, 128});
          for (const Choice& c : explain(op, {}, {.q = t, .k = t, .v = t, .o = t})) {
            if (!c.chosen) continue;
            if (first_name.empty()) first_name = c.name;
            EXPECT_EQ(c.name, first_name) << B << "x" << T;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace deltic::test
