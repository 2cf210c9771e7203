// Choosing an implementation: order, names from the call and the environment, sentences, the log.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <map>
#include <string>
#include <thread>

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

#if defined(__x86_64__)
// What the kernel says the CPU has is used: a wrong look at it would leave tests of the rest.
TEST(Features, WhatTheCpuHasIsUsed) {
  std::ifstream in("/proc/cpuinfo");
  std::string line;
  while (std::getline(in, line) && line.rfind("flags", 0) != 0) continue;
  if (line.rfind("flags", 0) != 0) GTEST_SKIP() << "no flags in /proc/cpuinfo";
  const auto has = [&](const std::vector<std::string>& flags) {
    return std::all_of(flags.begin(), flags.end(), [&](const std::string& flag) {
      return (line + " ").find(" " + flag + " ") != std::string::npos;
    });
  };
  const bool avx2 = has({"avx2", "fma", "bmi2", "f16c"});
  const bool avx512 = avx2 && has({"avx512f", "avx512vl", "avx512dq", "avx512bw", "avx512cd"});
  const std::map<std::string, bool> expected = {
      {"cpu.sse4", has({"sse4_2", "pclmulqdq", "aes"})},
      {"cpu.avx2", avx2},
      {"cpu.avx512", avx512},
      {"cpu.amx", avx512 && has({"amx_tile", "amx_bf16", "avx512_bf16"})}};
  for (const Op op : {Op::forward, Op::backward, Op::decode, Op::conv, Op::scores}) {
    for (const ImplementationInfo& i : implementations(op)) {
      const auto found = expected.find(i.name);
      if (found == expected.end()) continue;
      // Tiles are tried out: a system may announce them and not run them, and then that is said.
      const bool is_tried = i.name == "cpu.amx" && i.sentence.rfind("the CPU has no", 0) != 0;
      EXPECT_EQ(i.runs_here || is_tried, found->second) << i.name << ": " << i.sentence;
    }
  }
}
#endif

TEST_F(Dispatch, ListsEndWithThePlainOneAndTheOracle) {
  for (int op = 0; op < DELTIC_NUM_OPS; ++op) {
    const auto list = implementations(static_cast<Op>(op));
    ASSERT_GE(list.size(), 2u);
    EXPECT_EQ(list[list.size() - 2].name, op == DELTIC_STEP ? "cpu.parts" : "cpu.plain") << op;
    EXPECT_EQ(list.back().name, "reference") << op;
    EXPECT_TRUE(list[list.size() - 2].runs_here);
    EXPECT_TRUE(list.back().runs_here);
    for (const ImplementationInfo& i : list) {
      EXPECT_EQ(i.runs_here, i.sentence.empty()) << i.name << ": " << i.sentence;
      EXPECT_EQ(i.only_when_named, i.name == "reference") << i.name;
    }
    // A list of its own, without the oracle and without anything of the CPU's.
    for (const ImplementationInfo& i : implementations(static_cast<Op>(op), DeviceType::cuda)) {
      EXPECT_EQ(i.name.rfind("cuda.", 0), 0u) << i.name;
      EXPECT_EQ(i.runs_here, i.sentence.empty()) << i.name << ": " << i.sentence;
      EXPECT_EQ(i.only_when_named, i.name == "cuda.drafts") << i.name;
    }
  }
  for (const int32_t index : {-1, 1000}) {
    EXPECT_EQ(deltic_implementation_only_when_named(DELTIC_FORWARD, DELTIC_CPU, index), 0);
  }
  EXPECT_EQ(deltic_implementation(DELTIC_FORWARD, DELTIC_CPU, -1), nullptr);
  EXPECT_EQ(deltic_implementation(DELTIC_FORWARD, DELTIC_CPU, 1000), nullptr);
  EXPECT_EQ(deltic_implementation(DELTIC_NUM_OPS, DELTIC_CPU, 0), nullptr);
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

TEST_F(Dispatch, BackwardExplainsItself) {
  BackwardTensors t{.forward = small_.tensors};
  t.forward.o = {};
  const auto choices = explain({}, t);
  const auto list = implementations(Op::backward);
  ASSERT_EQ(choices.size(), list.size());
  EXPECT_TRUE(choices[0].chosen);
  EXPECT_TRUE(choices[0].accepts);
  for (size_t i = 1; i < choices.size(); ++i) EXPECT_FALSE(choices[i].chosen) << choices[i].name;
  for (const Choice& c : choices) EXPECT_NE(c.sentence, "") << c.name;
  EXPECT_EQ(choices.back().name, "reference");
  EXPECT_EQ(choices.back().sentence, "takes the call, but runs only when named");
  EXPECT_EQ(explain({.impl = "reference"}, t).front().name, "reference");
  EXPECT_EQ(explain({.impl = "reference"}, t).front().sentence, "named by the caller");

  listen();  // what is explained is what runs
  backward({}, t);
  deltic_set_log(nullptr, nullptr);
  bool seen = false;
  for (const std::string& line : lines_)
    seen = seen || line == "deltic: backward: " + choices[0].name + ": chosen";
  EXPECT_TRUE(seen);

  // Sentences that refuse: q is fp64, which only the oracle takes.
  std::vector<double> wide(4 * 16);
  const TensorView w(wide.data(), {1, 4, 1, 16});
  for (const Choice& c : explain({.impl = "reference"}, {.forward = {.q = w, .k = w, .v = w}})) {
    EXPECT_EQ(c.accepts, c.name == "reference") << c.name;
    if (c.name == "cpu.plain") {
      EXPECT_NE(c.sentence.find("fp64"), std::string::npos) << c.sentence;
    }
  }
  try {
    explain(Op::backward, {}, small_.tensors);
    FAIL() << "the tensors of forward are not those of backward";
  } catch (const Error& e) {
    EXPECT_NE(std::string(e.what()).find("deltic_backward_explain"), std::string::npos);
  }
}

// A call that names the oracle may have fp64 tensors, which nobody else takes, wherever they are.
TEST_F(Dispatch, Fp64IsTheOracles) {
  std::vector<double> wide(4 * 16), heads(4), state(16 * 16);
  const TensorView w(wide.data(), {1, 4, 1, 16});
  const auto expect_oracle = [](const std::vector<Choice>& choices) {
    ASSERT_GT(choices.size(), 1u);
    for (const Choice& c : choices) EXPECT_EQ(c.accepts, c.name == "reference") << c.name;
  };
  const Options oracle{.impl = "reference"};
  for (const Op op : {Op::forward, Op::decode}) {
    expect_oracle(explain(op, oracle, {.q = w, .k = w, .v = w, .o = w}));
    Tensors t = small_.tensors;
    t.g = {heads.data(), {1, 4, 1}};
    expect_oracle(explain(op, oracle, t));
    t = small_.tensors;
    t.initial_state = {state.data(), {1, 1, 16, 16}};
    expect_oracle(explain(op, oracle, t));
  }
  expect_oracle(explain(Op::l2norm, oracle, {.x = w, .out = w}));
  expect_oracle(explain(oracle, ConvTensors{.x = {wide.data(), {1, 4, 16}},
                                            .weight = {state.data(), {16, 4}},
                                            .out = {wide.data(), {1, 4, 16}}}));
}

// 64 chunks of 64 tokens: segments of 8, the state at the start of all but the first.
TEST_F(Dispatch, MemoryPlans) {
  const TensorView x(nullptr, DType::f32, {1, 4096, 2, 128});
  const Tensors inputs{.q = x, .k = x, .v = x};
  const BackwardTensors t{.forward = inputs, .dv = x};
  const auto none = backward_memory({}, t, Save::none);
  const auto states = backward_memory({}, t, Save::states);
  const auto all = backward_memory({}, t, Save::all);
  for (const auto& plan : {none, states, all}) {
    EXPECT_EQ(plan.chunks, 64);
    EXPECT_EQ(plan.segment_chunks, 8);
  }
  EXPECT_EQ(none.saved_states, 0);
  EXPECT_EQ(none.saved_bytes, 0u);
  EXPECT_EQ(states.saved_states, 7);
  EXPECT_EQ(all.saved_states, 64);
  EXPECT_GE(states.saved_bytes, 7u * 2 * 128 * 128 * 4);
  EXPECT_GT(all.saved_bytes, 8 * states.saved_bytes);
  EXPECT_GE(none.workspace_bytes, states.workspace_bytes) << "it keeps the states itself";
  for (const Save save : {Save::none, Save::states, Save::all}) {
    Tensors forward = inputs;
    forward.o = x;
    const auto plan = backward_memory({}, t, save);
    EXPECT_EQ(forward_saved_bytes({.save = save}, forward), plan.saved_bytes);
    BackwardTensors with_saved = t;
    with_saved.forward.saved.bytes = plan.saved_bytes;
    EXPECT_EQ(backward_workspace_bytes({}, with_saved), plan.workspace_bytes);
  }
  const TensorView nothing(nullptr, DType::f32, {1, 0, 2, 128});
  EXPECT_EQ(
      backward_memory({}, {.forward = {.q = nothing, .k = nothing, .v = nothing}}, Save::states)
          .saved_states,
      0);
  EXPECT_THROW(backward_memory({}, t, static_cast<Save>(3)), Error);
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
                      " was named (options.impl or DELTIC_IMPL) and does not take this call: " +
                      c.sentence);
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

TEST_F(Dispatch, OtherLogsAreRefused) {
  for (const char* text : {"1", "dispatches", "dispatch,all"}) {
    const Environment e("DELTIC_LOG", text);
    try {
      forward({}, small_.tensors);
      ADD_FAILURE() << text << " was taken";
    } catch (const Error& error) {
      EXPECT_EQ(std::string(error.what()),
                std::string("forward: DELTIC_LOG: expected dispatch, got ") + text);
    }
  }
}

// Who takes the callback away may free what it uses: no thread is inside any more.
TEST_F(Dispatch, TakingTheLogAwayWaitsForCallbacks) {
  struct Gate {
    std::atomic<bool> inside{false}, open{false};
  } gate;
  deltic_set_log(
      [](void* user, const char*) {
        auto& g = *static_cast<Gate*>(user);
        g.inside = true;
        while (!g.open) std::this_thread::yield();
      },
      &gate);
  std::thread caller([&] { forward({}, small_.tensors); });
  while (!gate.inside) std::this_thread::yield();
  std::atomic<bool> is_away{false};
  std::thread remover([&] {
    deltic_set_log(nullptr, nullptr);
    is_away = true;
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_FALSE(is_away) << "while a callback runs";
  gate.open = true;
  remover.join();
  caller.join();
  EXPECT_TRUE(is_away);
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
  for (const char* wrong : {"2", "yes", "on", "01", " 1"}) {
    const Environment e("DELTIC_CHECKED", wrong);
    EXPECT_EQ(deltic_get_checked(), -1);
    EXPECT_EQ(error(Op::forward),
              std::string("forward: DELTIC_CHECKED: expected 0 or 1, got ") + wrong);
    bool told = false;
    for (const auto& [key, value] : info())
      told = told || (key == "checked" && value == "DELTIC_CHECKED is neither 0 nor 1");
    EXPECT_TRUE(told);
    set_checked(false);  // what the program says goes first
    EXPECT_EQ(error(Op::forward), "");
    deltic_set_checked(-1);
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
  for (const int32_t n : {1, 3}) {
    set_num_threads(n);
    EXPECT_EQ(num_threads(), n);
  }
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

// OpenMP's threads do not survive a fork: a child that asked for two would wait forever.
TEST(Fork, ChildRunsWithOneThread) {
  std::vector<float> q(1 * 128 * 4 * 16, 0.1f), o(q.size());
  const Options options{.num_threads = 2};
  const Tensors tensors{.q = {q.data(), {1, 128, 4, 16}},
                        .k = {q.data(), {1, 128, 4, 16}},
                        .v = {q.data(), {1, 128, 4, 16}},
                        .o = {o.data(), {1, 128, 4, 16}}};
  forward(options, tensors);
  const std::vector<float> want = o;
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    alarm(20);  // a child that hangs dies of it
    std::fill(o.begin(), o.end(), 0.0f);
    forward(options, tensors);
    _exit(o == want && num_threads() == 1 ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace deltic::test
