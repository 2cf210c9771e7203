// Steps: the bits of their parts called one by one, who runs them, and a sentence for everything
// that can be wrong with one.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "cases/check.h"
#include "step_parts.h"
#include "support.h"

namespace deltic::test {
namespace {

using cases::Case;
using cases::Instance;

TEST(Step, HasTheBitsOfItsParts) {
  int count = 0;
  for (const cases::SourcedCase& s :
       cases::read_file(std::string(DELTIC_CASES_FOLDER) + "/step.txt")) {
    if (kSanitized && ++count % 8 != 0) continue;
    expect_bits_of_parts(s.spec, "cpu.parts", {});
    if (HasFailure()) return;
  }
}

// Whoever runs the parts: DELTIC_IMPL names them one by one.
TEST(Step, RunsTheImplementationsThatAreNamed) {
  const Case c = cases::parse(
      "step gate=channel form=softplus dense=5x3 H=2 HV=4 K=64 V=64 l2norm=1 act=silu norm=silu "
      "pool=inplace dtype=bf16");
  for (const std::string& decode : runnable(Op::decode)) {
    const std::string names = "conv:cpu.plain,decode:" + decode;
    setenv("DELTIC_IMPL", names.c_str(), 1);
    const Instance step = Instance::shapes_of(c);
    const std::vector<Choice> choices = step.explain();
    ASSERT_FALSE(choices.empty());
    EXPECT_EQ(choices[0].name, "cpu.parts");
    EXPECT_NE(choices[0].sentence.find("; cpu.plain runs conv, " + decode + " runs decode, "),
              std::string::npos)
        << choices[0].sentence;
    expect_bits_of_parts(c, "cpu.parts", {});
    unsetenv("DELTIC_IMPL");
  }
}

TEST(Step, EnvironmentAndLog) {
  Instance step(cases::parse("step gate=head dense=2x1 norm=silu pool=inplace"));
  setenv("DELTIC_IMPL", "step:reference", 1);
  EXPECT_EQ(step.explain()[0].name, "reference");
  setenv("DELTIC_IMPL", "step:cpu.plain", 1);
  EXPECT_THROW(step.explain(), Error);
  setenv("DELTIC_IMPL", "decode:cpu.plain", 1);
  std::vector<std::string> lines;
  deltic_set_log(
      [](void* to, const char* line) {
        static_cast<std::vector<std::string>*>(to)->emplace_back(line);
      },
      &lines);
  step.run();
  deltic_set_log(nullptr, nullptr);
  unsetenv("DELTIC_IMPL");
  const auto said = [&](const std::string& line) {
    return std::find(lines.begin(), lines.end(), line) != lines.end();
  };
  EXPECT_TRUE(said("deltic: step: cpu.parts: chosen"));
  EXPECT_TRUE(said("deltic: step: reference: runs only when named"));
  EXPECT_TRUE(said("deltic: decode: cpu.plain: chosen"));
  EXPECT_TRUE(said("deltic: rmsnorm: reference: runs only when named"));
}

TEST(Step, IsWhatTheOracleSaysOfItsParts) {
  const Case c = cases::parse(
      "step gate=head seqs=3,0,5 pad=2 H=2 HV=4 K=16 V=16 l2norm=1 norm=sigmoid init=1 "
      "final=inplace");
  expect_bits_of_parts(c, "reference", "reference");
}

TEST(Step, NeitherThreadsNorNeighboursChangeABit) {
  const auto values = [](const std::string& line, int threads, const std::string& tensor) {
    Instance step(cases::parse(line));
    step.run({.threads = threads});
    return step.bytes(tensor);
  };
  const std::string line =
      "step gate=channel H=2 HV=4 K=64 V=64 l2norm=1 act=silu norm=silu pool=inplace dtype=bf16 ";
  for (const char* tensor : {"norm.out", "state_pool", "conv.state_pool"}) {
    EXPECT_EQ(values(line + "dense=7x3", 1, tensor), values(line + "dense=7x3", 4, tensor));
  }
  const std::string one = "step gate=head H=2 HV=4 K=64 V=64 l2norm=1 norm=silu init=1 ";
  const auto alone = values(one + "seqs=4", 2, "norm.out");
  auto first = values(one + "seqs=4,3", 2, "norm.out");
  first.resize(alone.size());
  EXPECT_EQ(alone, first);
}

// T tokens in one call, and one after the other through the same slots.
TEST(Step, TokensHaveTheBitsOfCallsOneByOne) {
  for (const char* type : {"f32", "bf16"}) {
    const std::string line =
        std::string(
            "step gate=channel H=2 HV=4 K=64 V=64 l2norm=1 act=silu norm=silu pool=inplace "
            "sdtype=") +
        type + " dtype=bf16 dense=2x";
    Instance all(cases::parse(line + "5"));
    all.run();
    Instance one(cases::parse(line + "1"));
    const int64_t B = 2, T = 5;
    one.set_values("state_pool", first_values(all, "state_pool"));
    one.set_values("conv.state_pool", first_values(all, "conv.state_pool"));
    for (const char* name : {"conv.weight", "conv.bias", "norm.weight"}) {
      one.set_values(name, all.values(name));
    }
    for (int64_t t = 0; t < T; ++t) {
      for (const char* name : {"conv.x", "beta", "g", "norm.z"}) {
        one.set_values(name, token_of(all.values(name), B, T, t));
      }
      one.run();
      EXPECT_EQ(one.values("norm.out"), token_of(all.values("norm.out"), B, T, t)) << type << t;
      for (const char* name : {"state_pool", "conv.state_pool"}) {
        one.set_values(name, one.values(name));
      }
    }
    EXPECT_EQ(one.bytes("state_pool"), all.bytes("state_pool")) << type;
    EXPECT_EQ(one.bytes("conv.state_pool"), all.bytes("conv.state_pool")) << type;
  }
}

TEST(Step, WithoutTokensOrSequences) {
  for (const char* line :
       {"step gate=head dense=2x0 K=16 V=16 norm=silu init=1", "step gate=head dense=0x3 norm=silu",
        "step gate=head seqs=none norm=silu", "step gate=head seqs=0,0 norm=silu init=1 K=16 V=16",
        "step gate=head dense=2x0 norm=silu pool=inplace K=16 V=16"}) {
    const cases::Result result = cases::check(cases::parse(line));
    EXPECT_EQ(result.status, cases::Status::passed) << line << ": " << result.reason;
  }
}

// ---- What can be wrong ----------------------------------------------------------------------

class StepErrors : public testing::Test {
 protected:
  StepErrors()
      : instance_(cases::parse("step gate=head dense=3x2 H=2 HV=4 K=16 V=8 l2norm=1 act=silu "
                               "norm=silu pool=inplace")),
        t_(instance_.call_of().as<StepTensors>()),
        o_(instance_.options()) {}

  std::string error() const {
    try {
      const Workspace w(size_t{1} << 20);
      step(o_, t_, w.c());
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  }
  std::string error_in_c(const std::function<void(deltic_step_tensors&)>& change) const {
    StepTensors::Parts parts;
    deltic_step_tensors t = t_.c(parts);
    change(t);
    const deltic_options o = o_.c();
    const Workspace w(size_t{1} << 20);
    const deltic_workspace workspace = w.c();
    return deltic_step(&o, &t, &workspace, nullptr) == DELTIC_OK ? "" : deltic_last_error();
  }

  Instance instance_;
  StepTensors t_;
  Options o_;
};

TEST_F(StepErrors, RightAsItIs) { EXPECT_EQ(error(), ""); }

TEST_F(StepErrors, PartsThatAreNotThere) {
  EXPECT_EQ(error_in_c([](auto& t) { t.conv = nullptr; }),
            "step: conv: expected a struct, got a null pointer");
  EXPECT_EQ(error_in_c([](auto& t) { t.decode = nullptr; }),
            "step: decode: expected a struct, got a null pointer");
  EXPECT_EQ(error_in_c([](auto& t) { t.norm = nullptr; }),
            "step: norm_activation: expected none without norm.z, got 1");
  o_.norm_activation = Activation::none;
  EXPECT_EQ(error_in_c([](auto& t) { t.norm = nullptr; }),
            "step: decode.o: expected a tensor, got none");
  EXPECT_EQ(error_in_c([](auto& t) { t.size = 31; }),
            "step: tensors.size: expected at least 32, got 31 (sizeof the struct: see "
            "deltic_step_tensors_init)");
}

TEST_F(StepErrors, SizesOfParts) {
  deltic_conv_tensors conv = t_.conv.c();
  conv.size = 8;
  EXPECT_EQ(error_in_c([&](auto& t) { t.conv = &conv; }),
            "step: conv.size: expected at least 1328, got 8 (sizeof the struct: see "
            "deltic_conv_tensors_init)");
  deltic_block_tensors norm = t_.norm.c();
  norm.size = 8;
  EXPECT_EQ(error_in_c([&](auto& t) { t.norm = &norm; }).find("step: norm.size: expected at"), 0u);
}

struct WrongStep {
  const char* name;
  void (*change)(StepTensors&, Options&, Instance&);
  const char* text;
};
const WrongStep kWrong[] = {
    {"ConvOut", [](StepTensors& t, Options&, Instance&) { t.conv.out = t.conv.x; },
     "step: conv.out: expected none in a step, which has these rows in its workspace, got a "
     "tensor"},
    {"Q", [](StepTensors& t, Options&, Instance&) { t.decode.q = t.norm.out; },
     "step: decode.q: expected none in a step, which has these rows in its workspace, got a "
     "tensor"},
    {"NormX", [](StepTensors& t, Options&, Instance&) { t.norm.x = t.norm.out; },
     "step: norm.x: expected none in a step, which has these rows in its workspace, got a tensor"},
    {"O", [](StepTensors& t, Options&, Instance&) { t.decode.o = t.norm.out; },
     "step: decode.o: expected none with a norm, whose out is the result, got a tensor"},
    {"NoOut", [](StepTensors& t, Options&, Instance&) { t.norm.out = {}; },
     "step: norm.out: expected a tensor, got none"},
    {"NoX", [](StepTensors& t, Options&, Instance&) { t.conv.x = {}; },
     "step: conv.x: expected a tensor, got none"},
    {"NoWeight", [](StepTensors& t, Options&, Instance&) { t.conv.weight = {}; },
     "step: conv.weight: expected a tensor, got none"},
    {"NoStates",
     [](StepTensors& t, Options&, Instance&) { t.decode.state_pool = t.decode.read_index = {}; },
     "step: decode.state_pool: expected a tensor, or an initial or a final state, whose widths say "
     "where q, k and v are in conv.x, got none"},
    {"RankOfStates", [](StepTensors& t, Options&, Instance&) { t.decode.state_pool.rank = 3; },
     "step: decode.state_pool: expected shape [slots,HV,K,V], got [9, 4, 16]"},
    {"Widths",
     [](StepTensors& t, Options&, Instance&) { t.conv.x.shape[2] = t.conv.weight.shape[0] = 95; },
     "step: conv.bias: expected shape [95], got [96]"},
    {"HeadsThatDoNotFit",
     [](StepTensors& t, Options&, Instance&) {
       t.conv.x.shape[2] = t.conv.weight.shape[0] = t.conv.state_pool.shape[1] = 95;
       t.conv.bias = {};
     },
     "step: conv.x: expected D = 2*H*K + HV*V channels, H a divisor of HV, with HV = 4, K = 16 and "
     "V = 8 of decode.state_pool, got D = 95"},
    {"HeadsThatDoNotDivide",
     [](StepTensors& t, Options&, Instance&) { t.decode.state_pool.shape[1] = 3; },
     "step: conv.x: expected D = 2*H*K + HV*V channels, H a divisor of HV, with HV = 3, K = 16 and "
     "V = 8 of decode.state_pool, got D = 96"},
    {"HugeHeads",
     [](StepTensors& t, Options&, Instance&) { t.decode.state_pool.shape[1] = INT64_MAX; },
     "step: conv.x: expected D = 2*H*K + HV*V channels, H a divisor of HV, with HV = "
     "9223372036854775807, K = 16 and V = 8 of decode.state_pool, got D = 96"},
    {"NegativeWidth",
     [](StepTensors& t, Options&, Instance&) { t.decode.state_pool.shape[2] = -16; },
     "step: conv.x: expected D = 2*H*K + HV*V channels, H a divisor of HV, with HV = 4, K = -16 "
     "and V = 8 of decode.state_pool, got D = 96"},
    {"Beta", [](StepTensors& t, Options&, Instance&) { t.decode.beta.shape[1] = 3; },
     "step: decode.beta: expected shape [3, 2, 4], got [3, 3, 4]"},
    {"OutShape", [](StepTensors& t, Options&, Instance&) { t.norm.out.shape[2] = 2; },
     "step: norm.out: expected shape [3, 2, 4, 8], got [3, 2, 2, 8]"},
    {"NormWeight", [](StepTensors& t, Options&, Instance&) { t.norm.weight.shape[0] = 7; },
     "step: norm.weight: expected shape [8], got [7]"},
    {"Checkpoints",
     [](StepTensors& t, Options&, Instance&) { t.conv.ckpt_states = t.conv.state_pool; },
     "step: conv.ckpt_states: expected none in a step, got a tensor"},
    {"Parents", [](StepTensors& t, Options&, Instance&) { t.decode.parents = t.decode.read_index; },
     "step: decode.parents: expected none with W = 4 taps, whose windows are chains, got a tensor"},
    {"Lengths",
     [](StepTensors& t, Options&, Instance&) { t.decode.cu_seqlens = t.decode.read_index; },
     "step: decode.cu_seqlens: expected none, or the tensor that conv has, got another"},
    {"Device", [](StepTensors& t, Options&, Instance&) { t.decode.g.device_type = DELTIC_CUDA; },
     "step: decode.g: expected device cpu:0 as conv.x, got cuda:0"},
    {"WindowDtype",
     [](StepTensors& t, Options&, Instance&) { t.conv.state_pool.dtype = DELTIC_F16; },
     "step: conv.state_pool: expected fp32 as x, or fp32, got fp16"},
    {"StatesOverWindows",
     [](StepTensors& t, Options&, Instance&) { t.conv.state_pool.data = t.decode.state_pool.data; },
     "step: conv.state_pool: expected memory of its own, got an overlap with decode.state_pool"},
    {"OutOverInput", [](StepTensors& t, Options&, Instance&) { t.norm.out.data = t.conv.x.data; },
     "step: norm.out: expected memory of its own, got an overlap with conv.x"},
    {"OutOverOwnInput",
     [](StepTensors& t, Options&, Instance&) { t.norm.out.data = t.norm.z.data; },
     "step: norm.out: expected memory of its own, got an overlap with norm.z"},
    {"StatesOverGate",
     [](StepTensors& t, Options&, Instance&) { t.norm.z.data = t.decode.state_pool.data; },
     "step: decode.state_pool: expected memory of its own, got an overlap with norm.z"},
    {"Activation", [](StepTensors&, Options& o, Instance&) { o.activation = Activation::sigmoid; },
     "step: activation: expected none (0) or silu (1), got 2"},
    {"NormActivation", [](StepTensors& t, Options&, Instance&) { t.norm.z = {}; },
     "step: norm_activation: expected none without norm.z, got 1"},
    {"NullSlot",
     [](StepTensors& t, Options& o, Instance&) {
       t.decode.read_index = t.conv.read_index = {}, o.null_slot = 0;
     },
     "step: null_slot: expected none without a list of slots, got 0"},
    {"Seed", [](StepTensors&, Options& o, Instance&) { o.seed = 3; },
     "step: decode.seed: expected none but with states of 16 bits, got states of fp32"},
    {"Save", [](StepTensors&, Options& o, Instance&) { o.save = Save::states; },
     "step: save: expected none (forward alone saves), got 1"},
    {"Recurrent", [](StepTensors&, Options& o, Instance&) { o.form = Form::recurrent; },
     "step: form: expected chunked (forward alone has two forms), got recurrent"},
    {"Impl", [](StepTensors&, Options& o, Instance&) { o.impl = "cpu.plain"; },
     "step: impl: expected one of cpu.parts, reference, got cpu.plain"},
    {"Slots", [](StepTensors&, Options&, Instance& i) { i.set("conv.read_index", 1, 99); },
     "step: conv.read_index: expected slots of -1 to 8, got 99 at 1"},
    {"SlotsTwice", [](StepTensors&, Options&, Instance& i) { i.set("read_index", 1, 1); },
     "step: decode.read_index: expected every slot to be written once, got slot 1 for sequences 1 "
     "and 2"},
    {"NotFiniteWindow",
     [](StepTensors&, Options& o, Instance& i) {
       i.set("conv.state_pool", i.read_slots()[1] * 96 * 3, NAN), o.checked = true;
     },
     "step: conv.state_pool: expected finite values, got nan at sequence 1, head 0"},
    {"NotFiniteBeta",
     [](StepTensors&, Options& o, Instance& i) { i.set("beta", 5, INFINITY), o.checked = true; },
     "step: decode.beta: expected finite values, got inf at sequence 0, token 1, head 1"},
    {"NotFiniteGate",
     [](StepTensors&, Options& o, Instance& i) { i.set("norm.z", 9, NAN), o.checked = true; },
     "step: norm.z: expected finite values, got nan at sequence 0, token 0, head 1"},
};

TEST_F(StepErrors, SaysWhatIsWrong) {
  for (const WrongStep& wrong : kWrong) {
    Instance fresh(instance_.spec());
    t_ = fresh.call_of().as<StepTensors>();
    o_ = fresh.options();
    wrong.change(t_, o_, fresh);
    const auto before = fresh.bytes("state_pool");
    EXPECT_EQ(error(), wrong.text) << wrong.name;
    EXPECT_EQ(fresh.bytes("state_pool"), before) << wrong.name;
  }
}

TEST_F(StepErrors, OptionsOfOthers) {
  const auto decode_error = [](const auto& change) {
    Options o;
    change(o);
    try {
      deltic::explain(Op::decode, o, Tensors());
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  EXPECT_EQ(decode_error([](Options& o) { o.norm_activation = Activation::silu; }),
            "decode: norm_activation: expected none (step alone has one), got 1");
  deltic_options o = o_.c();
  StepTensors::Parts parts;
  const deltic_step_tensors t = t_.c(parts);
  o.reserved_norm = 1;
  EXPECT_EQ(deltic_step(&o, &t, nullptr, nullptr), DELTIC_INVALID_ARGUMENT);
  EXPECT_STREQ(deltic_last_error(), "step: reserved_norm: expected 0, got 1");
  o.reserved_norm = 0, o.norm_activation = 3;
  EXPECT_EQ(deltic_step(&o, &t, nullptr, nullptr), DELTIC_INVALID_ARGUMENT);
  EXPECT_STREQ(deltic_last_error(),
               "step: norm_activation: expected none (0), silu (1) or sigmoid (2), got 3");
}

TEST_F(StepErrors, Workspace) {
  const size_t bytes = step_workspace_bytes(o_, t_);
  ASSERT_GT(bytes, size_t{3 * 2 * 96 * 4});
  const Scratch exact(bytes);
  step(o_, t_, exact.c());
  EXPECT_TRUE(exact.sentinels_intact());
  const auto text = [&](const deltic_workspace& w) {
    try {
      step(o_, t_, w);
    } catch (const Error& e) {
      return std::string(e.what());
    }
    return std::string();
  };
  deltic_workspace w = exact.c();
  w.bytes -= 1;
  EXPECT_EQ(text(w), "step: workspace: expected at least " + std::to_string(bytes) +
                         " bytes, got " + std::to_string(bytes - 1));
  std::vector<float> large(bytes / 4 + 64 + 96);
  auto* const aligned =
      reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(large.data()) + 63) / 64 * 64);
  t_.norm.weight.data = aligned;
  EXPECT_EQ(text({aligned, bytes}),
            "step: workspace: expected memory of its own, got an overlap with a tensor");
}

TEST_F(StepErrors, LengthsMayBeSaidTwice) {
  Instance packed(
      cases::parse("step gate=head seqs=3,1,2 H=2 HV=4 K=16 V=8 l2norm=1 norm=silu init=1"));
  packed.run();
  const auto once = packed.bytes("norm.out");
  t_ = packed.call_of().as<StepTensors>();
  t_.decode.cu_seqlens = t_.norm.cu_seqlens = t_.conv.cu_seqlens;
  o_ = packed.options();
  EXPECT_EQ(error(), "");
  EXPECT_EQ(packed.bytes("norm.out"), once);
}

// Windows and states of one page, as servers lay them out.
TEST_F(StepErrors, PoolsMayShareTheirPages) {
  const int64_t slots = 9, state = 4 * 16 * 8, window = 96 * 3, page = state + window;
  std::vector<float> pages(static_cast<size_t>(slots * page), 0.0f);
  t_.decode.state_pool.data = pages.data();
  t_.decode.state_pool.strides[0] = page;
  t_.conv.state_pool.data = pages.data() + state;
  t_.conv.state_pool.strides[0] = page;
  EXPECT_EQ(error(), "");
  t_.conv.state_pool.data = pages.data() + state - 1;
  EXPECT_EQ(error(),
            "step: conv.state_pool: expected memory of its own, got an overlap with "
            "decode.state_pool");
}

}  // namespace
}  // namespace deltic::test
