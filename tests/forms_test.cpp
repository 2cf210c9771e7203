// The forms of forward: the recurrent one has decode's bits, both together those of two calls, and
// the gradients know nothing of it.
#include <gtest/gtest.h>

#include "support.h"
#include "two_forms.h"

namespace deltic::test {
namespace {

using cases::Case;
using cases::Instance;

TEST(Forms, ACallInTwoFormsIsTwoCalls) {
  for (const std::string& impl : runnable(Op::forward)) {
    if (impl == "reference") continue;  // in one pass
    for (const char* line : kTwoFormLines) {
      const Case c = cases::parse(line);
      if (impl == "cpu.amx" && c.dtype != DType::bf16) continue;
      expect_two_calls(line, impl, {});
    }
  }
}

// All tokens: the call is decode's.
TEST(Forms, RecurrentIsDecode) {
  for (const char* rest :
       {"gate=head seqs=1,70,0,3 pad=2 K=32 V=40 init=1 dtype=bf16",
        "gate=channel form=softplus dense=3x5 H=2 HV=4 K=64 V=64 l2norm=1 beta=sigmoid",
        "gate=none seqs=20,1 K=48 V=32 pool=inplace sdtype=bf16 state=vk dtype=f16",
        "gate=head seqs=20,1 K=32 V=32 pool=move sdtype=f16 ckpt=0,5,end null=1"}) {
    const Case decode = cases::parse(std::string("decode ") + rest);
    const Case forward = cases::parse(std::string("forward ") + rest + " recurrent=all");
    for (const std::string& impl : runnable(Op::decode)) {
      if (impl == "reference") continue;
      Instance a(decode), b(forward);
      a.run({.impl = impl}), b.run({.impl = impl});
      for (const std::string& name : a.outputs())
        EXPECT_TRUE(a.bytes(name) == b.bytes(name)) << impl << ": " << name << "\n  " << rest;
    }
  }
}

TEST(Forms, ThreadsAndNeighboursChangeNoBit) {
  const Case c = cases::parse(
      "forward gate=channel seqs=130,0,64,20,70 H=2 HV=4 K=64 V=64 init=1 recurrent=100,0,10,end "
      "dtype=bf16 split=off");
  for (const std::string& impl : runnable(Op::forward)) {
    Instance one(c), three(c);
    one.run({.impl = impl, .threads = 1}), three.run({.impl = impl, .threads = 3});
    for (const std::string& name : one.outputs())
      EXPECT_TRUE(one.bytes(name) == three.bytes(name)) << impl << ": " << name;
  }
}

TEST(Forms, GradientsIgnoreThem) {
  const Case c = cases::parse("backward gate=head seqs=70,3,100 K=32 V=32 init=1 save=none");
  Instance plain(c), other(c);
  plain.run();
  other.reserve(), other.reset();
  const int64_t from[] = {64, 0, 100};
  Options options = other.options();
  options.form = Form::recurrent;
  BackwardTensors tensors = other.gradients();
  tensors.forward.recurrent_from = {from, {3}};
  Workspace workspace(backward_workspace_bytes(options, tensors));
  backward(options, tensors, workspace.c());
  for (const std::string& name : plain.outputs())
    EXPECT_TRUE(plain.bytes(name) == other.bytes(name)) << name;
}

// The chosen implementations are both named.
TEST(Forms, ExplainNamesBoth) {
  const auto first = [](const char* line) {
    return Instance::shapes_of(cases::parse(line)).explain().front();
  };
  const Choice both = first("forward gate=head seqs=70 recurrent=3");
  EXPECT_TRUE(both.chosen);
  EXPECT_NE(both.sentence.find("runs the tokens from recurrent_from on"), std::string::npos)
      << both.sentence;
  const Choice decode = Instance::shapes_of(cases::parse("decode gate=head seqs=70")).explain()[0];
  EXPECT_EQ(first("forward gate=head seqs=70 recurrent=all").name, decode.name);
}

}  // namespace
}  // namespace deltic::test
