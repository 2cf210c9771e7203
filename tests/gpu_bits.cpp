// What bits on a GPU may not depend on: the other sequences of a call, how they are packed, later
// tokens, how many tokens and sequences a call has, which gradients are asked for.
#include <algorithm>
#include <set>
#include <span>

#include "decode_sizes.h"
#include "gpu_support.h"
#include "not_finite.h"
#include "support.h"

namespace deltic::test {
namespace {

using cases::Case;
using cases::Instance;
namespace device = cases::device;

// What a tensor of a packed or dense call has for every sequence.
enum class Part { row, state, nothing };
Part part_of(const std::string& name) {
  if (name.ends_with("A_log") || name.ends_with("dt_bias") || name == "cu_seqlens") {
    return Part::nothing;
  }
  if (name == "weight" || name == "bias") return Part::nothing;
  return name.ends_with("_state") || name == "positions" ? Part::state : Part::row;
}
// Rows or states: so many of them, `begin` and `count` those of sequence n.
struct Range {
  int64_t all = 0, begin = 0, count = 0;
};
Range range_of(const Case& c, Part part, int64_t n) {
  if (part == Part::state) return {c.num_sequences(), n, 1};
  const int64_t begin = c.packed ? c.sequence_begin(n) : n * c.length;
  return {c.num_batches() * c.num_tokens(), begin, c.sequence_length(n)};
}
template <class List>
List of_sequence(const Case& c, const std::string& name, const List& all, int64_t n) {
  const Range r = range_of(c, part_of(name), n);
  return slice(all, static_cast<int64_t>(all.size()) / r.all, r.begin, r.count);
}

// Every output that is a sequence's own has the bits of a call of that sequence alone.
void expect_sequences_alone(const Case& c, const Instance& all, const std::string& impl,
                            const std::vector<int64_t>& sequences) {
  for (const int64_t n : sequences) {
    SCOPED_TRACE(impl + ": sequence " + std::to_string(n) + "\n  " + cases::canonical(c));
    Case alone = c;
    if (c.packed) {
      alone.seqs = {c.sequence_length(n)}, alone.pad = 0;
    } else {
      alone.batch = 1;
    }
    Instance one(alone, true, kGpu);
    for (const std::string& name : one.inputs()) {
      if (name == "cu_seqlens") continue;
      const auto values = all.values(name);
      one.set_values(name,
                     part_of(name) == Part::nothing ? values : of_sequence(c, name, values, n));
    }
    one.run({.impl = impl});
    for (const std::string& name : all.outputs()) {
      if (part_of(name) == Part::nothing) continue;
      EXPECT_TRUE(one.bytes(name) == of_sequence(c, name, all.bytes(name), n)) << name;
    }
  }
}
void expect_sequences_alone(const Case& c, const std::string& impl,
                            const std::vector<int64_t>& sequences) {
  Instance all(c, true, kGpu);
  all.run({.impl = impl});
  expect_sequences_alone(c, all, impl, sequences);
}
std::vector<int64_t> every_sequence(const Case& c) {
  std::vector<int64_t> all;
  for (int64_t n = 0; n < c.num_sequences(); ++n) all.push_back(n);
  return all;
}

// Cut into segments by their own length: two of three sequences.
const char* const kByLengthLines[] = {
    "forward gate=head gates=slow seqs=2600,300,2200 H=1 K=64 V=64 dtype=bf16 l2norm=1 init=1 "
    "split=by_length",
    "forward gate=channel form=bounded gates=slow seqs=2600,300,2200 H=1 K=128 V=128 dtype=bf16 "
    "gdtype=bf16 beta=sigmoid l2norm=1 init=1 state=vk split=by_length",
};
const char* const kBackwardByLength =
    "backward gate=channel gates=slow seqs=2300,64,2100 H=1 K=64 V=64 dtype=bf16 l2norm=1 init=1 "
    "split=by_length";
std::vector<Case> parse_all(std::initializer_list<std::span<const char* const>> lists) {
  std::vector<Case> all;
  for (const auto& list : lists) {
    for (const char* line : list) all.push_back(cases::parse(line));
  }
  return all;
}
// All gradients' lines: split off, in segments, by length; nothing kept.
std::vector<Case> backward_cases() {
  std::vector<Case> all = parse_all({kBackwardLines, {&kBackwardByLength, 1}});
  for (Case& c : all) {
    c.save = Save::none;
    if (c.split == Split::automatic) c.split = Split::off;  // auto may look at the whole batch
  }
  return all;
}

TEST_F(Gpu, ASequenceDoesNotSeeItsNeighbours) {
  for (const Case& c : parse_all({kLines, kByLengthLines})) {
    for (const std::string& impl : takers(c)) expect_sequences_alone(c, impl, every_sequence(c));
  }
}

TEST_F(Gpu, LaterTokensChangeNoBit) {
  for (const Case& c : parse_all({kLines, kByLengthLines})) {
    const int64_t tokens = c.num_real_tokens();
    for (const std::string& impl : takers(c)) {
      SCOPED_TRACE(impl + "\n  " + cases::canonical(c));
      Instance a(c, true, kGpu), b(c, true, kGpu);
      // In the last sequence, from a token inside of a chunk on.
      const int64_t last = c.sequence_length(c.num_sequences() - 1),
                    from = tokens - last + last / 3;
      halve_rows(b, from);
      a.run({.impl = impl});
      b.run({.impl = impl});
      const std::string out = out_of(c);
      const int64_t unit = per_token(a, out) * cases::size_of(c.dtype);
      EXPECT_TRUE(slice(a.bytes(out), unit, 0, from) == slice(b.bytes(out), unit, 0, from));
      EXPECT_FALSE(a.bytes(out) == b.bytes(out));
    }
  }
}

// What an H200 is filled with runs in fused CTAs, a sequence alone in roles: 320 heads, and 16.
constexpr const char* kFusedLines[] = {
    "forward gate=head seqs=5,70,0,64,1,130,3,65,2,17,63,4,9,66,1,2,90,3,8,10 H=8 HV=16 K=32 V=24 "
    "dtype=bf16 init=1 split=off",
    "forward gate=none seqs=5,70,0,64,1,130,3,65,2,17,63,4,9,66,1,2,90,3,8,10 H=8 HV=16 K=16 V=72 "
    "dtype=f16 l2norm=1 init=1 state=vk sdtype=bf16 split=off",
    "forward gate=head seqs=5,1,0,64,1,130,3,65,2,17,1,0,9,1,1,2,1,3,700,10 H=8 HV=16 K=16 V=8 "
    "dtype=bf16 init=1 split=off",
};
constexpr const char* kOtherSize = "these lines are for the 132 SMs of an H200";
bool is_fused(const Case& c) {
  const Instance shapes = Instance::shapes_of(c, DeviceType::cuda);
  const auto all = explain_division(shapes.options({}), shapes.tensors());
  return !all.empty() && all.front().what.starts_with("fused");
}
TEST_F(GpuBits, FusedCtasAndRolesAgree) {
  if (!runs_on_gpu(Op::forward, "cuda.sm90.forward")) GTEST_SKIP() << "no code for Hopper";
  for (const char* line : kFusedLines) {
    const Case c = cases::parse(line);
    Case alone = c;
    alone.seqs = {130};
    const std::vector<std::string> names = takers(c);
    if (std::find(names.begin(), names.end(), "cuda.sm90.forward") == names.end()) continue;
    if (!is_fused(c) || is_fused(alone)) GTEST_SKIP() << kOtherSize;
    expect_sequences_alone(c, "cuda.sm90.forward", {1, 2, 3, 4, 5, 18, 19});
  }
}

// CTAs draw their jobs from a counter: from its beginning in every replay of a graph, in an order
// that goes by the lengths of the replay.
TEST_F(GpuBits, FusedCtasDrawFromTheBeginningInEveryReplay) {
  if (!runs_on_gpu(Op::forward, "cuda.sm90.forward")) GTEST_SKIP() << "no code for Hopper";
  Case c = cases::parse(kFusedLines[0]);
  c.seqs.assign(16, 64);
  const int64_t tokens = c.num_real_tokens();
  if (takers(c).front() != "cuda.sm90.forward") GTEST_SKIP() << "not in this build";
  if (!is_fused(c)) GTEST_SKIP() << kOtherSize;
  Instance instance(c, true, kGpu);
  const std::string impl = "cuda.sm90.forward";
  instance.reserve({.impl = impl});
  instance.reset();
  device::Graph graph([&](void* stream) { instance.call({.impl = impl, .stream = stream}); });
  const std::vector<int64_t> all_lengths[] = {
      c.seqs,
      {1, 0, 64, 3, 700, 1, 0, 65, 2, 2, 1, 130, 5, 0, 1, 40},
      std::vector<int64_t>(16, 0),
      {40, 1, 0, 5, 130, 1, 2, 2, 65, 0, 1, 700, 3, 64, 0, 1},
      std::vector<int64_t>(16, 64)};
  for (const std::vector<int64_t>& lengths : all_lengths) {
    std::vector<double> cu = {0};
    for (const int64_t n : lengths) cu.push_back(cu.back() + static_cast<double>(n));
    instance.set_values("cu_seqlens", cu);
    instance.reset();
    graph.replay();
    instance.fetch();
    Case now = c;
    now.seqs = lengths, now.pad = tokens - static_cast<int64_t>(cu.back());
    expect_sequences_alone(now, instance, impl, {0, 3, 11});
  }
}
// Each call has a counter of its own: two under way at once.
TEST_F(GpuBits, FusedCtasOfTwoStreams) {
  if (!runs_on_gpu(Op::forward, "cuda.sm90.forward")) GTEST_SKIP() << "no code for Hopper";
  const Case a = cases::parse(kFusedLines[2]), b = cases::parse(kFusedLines[0]);
  if (takers(a).front() != "cuda.sm90.forward") GTEST_SKIP() << "not in this build";
  if (!is_fused(a) || !is_fused(b)) GTEST_SKIP() << kOtherSize;
  Instance one(a, true, kGpu), other(b, true, kGpu);
  const std::string impl = "cuda.sm90.forward";
  const auto call = [&](Instance& instance, void* stream) {
    instance.call({.impl = impl, .stream = stream});
  };
  for (Instance* instance : {&one, &other}) instance->reserve({.impl = impl}), instance->reset();
  const auto nothing = [](void*) {};
  device::Graph first(nothing), second(nothing);
  first.calls_ms([&](void* stream) {
    call(one, stream);
    second.calls_ms([&](void* beside) { call(other, beside); });
  });
  one.fetch(), other.fetch();
  expect_sequences_alone(a, one, impl, {0, 2, 18, 19});
  expect_sequences_alone(b, other, impl, {1, 2, 3, 18});
}

// A CTA takes head after head: none finds anything of the one before.
TEST_F(GpuBits, NotFiniteStaysInItsHeadOfFusedCtas) {
  if (!runs_on_gpu(Op::forward, "cuda.sm90.forward")) GTEST_SKIP() << "no code for Hopper";
  const char* const line =
      "forward gate=head seqs=5,70,1,130,65,64 H=8 HV=24 K=8 V=8 dtype=bf16 init=1 "
      "split=off";
  const Case c = cases::parse(line);
  if (takers(c).front() != "cuda.sm90.forward") GTEST_SKIP() << "not in this build";
  if (!is_fused(c)) GTEST_SKIP() << kOtherSize;
  expect_contained(line, "cuda.sm90.forward", kGpu, 0, 3);
}

// A dense case in one call, and token by token from state to state.
void expect_tokens_one_by_one(const Case& c, const std::string& impl) {
  SCOPED_TRACE(impl + "\n  " + cases::canonical(c));
  Case step = c;
  step.length = 1;
  step.final_state = cases::Final::separate;
  Instance whole(c, true, kGpu), one(step, true, kGpu);
  auto state = whole.values("initial_state");
  whole.run({.impl = impl});
  const std::string out = out_of(c);
  const auto o = whole.bytes(out);
  // Row t of every sequence; size: elements or bytes of a row.
  const auto rows_of = [&](const auto& all, int64_t size, int64_t t) {
    auto rows = slice(all, size, t, 1);
    for (int64_t n = 1; n < c.batch; ++n) {
      const auto row = slice(all, size, n * c.length + t, 1);
      rows.insert(rows.end(), row.begin(), row.end());
    }
    return rows;
  };
  for (int64_t t = 0; t < c.length; ++t) {
    for (const std::string& name : kRows) {
      if (!whole.has(name)) continue;
      one.set_values(name, rows_of(whole.values(name), per_token(whole, name) / c.batch, t));
    }
    one.set_values("initial_state", state);
    one.run({.impl = impl});
    state = one.values("final_state");
    const int64_t bytes = per_token(whole, out) / c.batch * cases::size_of(c.dtype);
    EXPECT_TRUE(one.bytes(out) == rows_of(o, bytes, t)) << out << " of token " << t;
  }
  if (whole.has("final_state")) {
    EXPECT_TRUE(state == whole.values("final_state"));
  }
}

// T tokens in one call have the bits of T calls: fp32 states by themselves, those of 16 bits
// because they are rounded after every token.
TEST_F(Gpu, TokensAtOnceAreTokensOneByOne) {
  std::set<std::string> names;
  for (const char* gate : {"gate=none", "gate=head form=softplus gates=softplus",
                           "gate=channel form=bounded gdtype=bf16"}) {
    for (const char* widths : {"K=128 V=128", "K=64 V=72", "K=96 V=40"}) {
      for (const char* states :
           {"state=kv", "state=vk", "state=kv sdtype=bf16", "state=vk sdtype=bf16",
            "state=kv sdtype=f16", "state=vk sdtype=f16"}) {
        const Case c = cases::parse(
            std::string("decode dense=2x11 H=2 HV=4 dtype=bf16 beta=sigmoid l2norm=1 init=1 ") +
            gate + " " + widths + " " + states);
        for (const std::string& impl : takers(c)) {
          expect_tokens_one_by_one(c, impl);
          names.insert(impl);
        }
      }
    }
  }
  EXPECT_TRUE(names.contains("cuda.decode") && names.contains("cuda.general"));
  // Forty tokens go by runs, one by whole sequences; the state has the inputs' own dtype.
  for (const char* line : {"conv dense=2x40 D=1032 W=4 dtype=bf16 init=1 act=silu",
                           "conv dense=3x40 D=33 W=6 S=7 dtype=f32 init=1 state=vk"}) {
    expect_tokens_one_by_one(cases::parse(line), "cuda.conv");
  }
}

// The same at the sizes of a server's batches, which other kernels run than a few heads; and every
// sequence of them alone, which is few heads.
struct StateKind {
  const char* keys;
  bool is_half, is_v_first;
};
constexpr StateKind kStateKinds[] = {
    {"state=vk sdtype=bf16", true, true}, {"state=vk sdtype=f16", true, true},
    {"state=vk sdtype=f32", false, true}, {"state=kv sdtype=bf16", true, false},
    {"state=kv sdtype=f16", true, false}, {"state=kv sdtype=f32", false, false},
};
bool has_kernel_of_its_own(const ServedDecode& x, const StateKind& states) {
  switch (x.where) {
    case Where::everywhere:
      return true;
    case Where::v_first:
      return states.is_v_first;
    case Where::v_first_half:
      return states.is_v_first && states.is_half;
    case Where::v_first_f32:
      return states.is_v_first && !states.is_half;
  }
  return false;
}
// Whether cuda.decode took it: not every build has all states.
bool expect_served_decode(const ServedDecode& x, const std::string& keys) {
  std::string line = "decode H=1 HV=" + std::to_string(x.heads) +
                     " V=8 dtype=bf16 beta=sigmoid l2norm=1 init=1 " + keys +
                     (x.is_kept ? "" : " final=0");
  if (x.is_packed) {
    line += " seqs=";
    for (int64_t n = 0; n < x.sequences; ++n) {
      line += (n > 0 ? "," : "") + std::to_string(x.length_of(n));
    }
  } else {
    line += " dense=" + std::to_string(x.sequences) + "x" + std::to_string(x.tokens);
  }
  const Case c = cases::parse(line);
  const std::vector<std::string> names = takers(c);
  if (std::find(names.begin(), names.end(), "cuda.decode") == names.end()) return false;
  SCOPED_TRACE(x.name);
  expect_sequences_alone(c, "cuda.decode", {0, 1, x.sequences / 2, x.sequences - 1});
  if (!x.is_packed) expect_tokens_one_by_one(c, "cuda.decode");
  return true;
}
constexpr const char* kGates[] = {"gate=none", "gate=head form=softplus gates=softplus",
                                  "gate=channel form=bounded gdtype=bf16"};

TEST_F(GpuBits, ServersBatchesAreTheirTokensAndSequences) {
  int taken = 0;
  for (const ServedDecode& x : kServedDecodes) {
    for (const StateKind& states : kStateKinds) {
      if (!has_kernel_of_its_own(x, states)) continue;
      for (const std::string gate : kGates) {
        taken += expect_served_decode(x, gate + " K=128 " + states.keys);
      }
    }
    // Of the other width, with which no CTA has two parts.
    for (const char* states : {"state=vk sdtype=bf16", "state=kv sdtype=bf16"}) {
      taken += expect_served_decode(x, std::string(kGates[2]) + " K=64 " + states);
    }
  }
  EXPECT_GE(taken, 9);  // what a build with one instance of each template has
}

// As many tokens as sequences, for kernels of one token per sequence; alone the third sequence is
// for one of several tokens. Rows of fp32 are not for warps that work alone.
TEST_F(GpuBits, AsManyTokensAsSequencesAreTheirSequences) {
  constexpr const char* kLine =
      "decode gate={none,head,channel} seqs=1,0,3,1,0 H=1 HV=2 K={64,128} V=40 dtype={f32,bf16} "
      "l2norm=1 init=1 state=vk sdtype={f32,bf16,f16}";
  for (const std::string& line : cases::expand(kLine)) {
    const Case c = cases::parse(line);
    const std::vector<std::string> names = takers(c);
    if (std::find(names.begin(), names.end(), "cuda.decode") == names.end()) continue;
    expect_sequences_alone(c, "cuda.decode", every_sequence(c));
  }
}

// Products of two numbers of 16 bits are exact in fp32, and no bit of a sum's order is seen where
// every token has channels of its own: what is left of a state is its rounding by chance, which is
// the CPU's, drawn by position, head and element.
constexpr const char* kStochasticLines[] = {
    "decode gate={head,channel} gates=zero seqs=1,4,0,7 H=1 HV=2 K={64,128} V=40 beta=none "
    "dtype={bf16,f16} sdtype={bf16,f16} state={kv,vk} stochastic=1",
    "decode gate=none seqs=1,4,0,7 H=1 HV=2 K={64,128} V=40 beta=none dtype=bf16 "
    "sdtype={bf16,f16} state={kv,vk} stochastic=1",
    "decode gate=head gates=zero dense=44x2 H=1 HV=16 K=128 V=8 beta=none dtype=bf16 "
    "sdtype={bf16,f16} state={kv,vk} stochastic=1",
    "decode gate=channel gates=zero seqs=3,1,0,5 pad=1 H=1 HV=2 K=33 V=5 beta=none dtype=bf16 "
    "pool={start,tokens} idx=i64 sdtype=bf16 stochastic=1",
};
constexpr int64_t kTurns = 8;  // tokens at most
void separate_channels(Instance& x) {
  const Case& c = x.spec();
  auto k = x.values("k");
  for (size_t i = 0; i < k.size(); ++i) {
    const auto channel = static_cast<int64_t>(i) % c.K, row = static_cast<int64_t>(i) / c.K / c.H;
    if (channel % kTurns != row % kTurns) k[i] = 0;
  }
  x.set_values("k", k);
  if (!x.has("state_pool")) return;
  auto states = x.values("state_pool");
  for (double& s : states) s = std::isnan(s) ? s : 0;
  x.set_values("state_pool", states);
}
TEST_F(GpuBits, RoundingByChanceIsTheCpus) {
  std::set<std::string> names;
  for (const char* lines : kStochasticLines) {
    for (const std::string& line : cases::expand(lines)) {
      const Case c = cases::parse(line);
      const std::string states = c.pool == cases::Pool::none ? "final_state" : "state_pool";
      Instance cpu(c);
      separate_channels(cpu);
      cpu.run();
      for (const std::string& impl : takers(c)) {
        Instance gpu(c, true, kGpu);
        separate_channels(gpu);
        gpu.run({.impl = impl});
        EXPECT_TRUE(gpu.bytes(states) == cpu.bytes(states)) << impl << "\n  " << line;
        names.insert(impl);
      }
      Case other = c;
      other.stochastic = false;
      Instance to_nearest(other);
      separate_channels(to_nearest);
      to_nearest.run();
      EXPECT_FALSE(to_nearest.bytes(states) == cpu.bytes(states)) << line;
    }
  }
  EXPECT_TRUE(names.contains("cuda.decode") && names.contains("cuda.general"));
}
TEST_F(GpuBits, RoundingByChanceDoesNotSeeTheBatch) {
  for (const char* line :
       {"decode gate=head seqs=3,1,0,5,2 H=1 HV=2 K=128 V=40 dtype=bf16 init=1 sdtype=bf16 "
        "state=vk stochastic=1",
        "decode gate=channel dense=5x4 H=2 HV=4 K=64 V=24 dtype=f16 init=1 sdtype=f16 stochastic=1",
        "decode gate=head dense=44x2 H=1 HV=16 K=128 V=8 dtype=bf16 init=1 sdtype=bf16 state=vk "
        "stochastic=1"}) {
    const Case c = cases::parse(line);
    for (const std::string& impl : takers(c))
      expect_sequences_alone(c, impl, {0, 1, 3, c.num_sequences() - 1});
  }
}

TEST_F(GpuBits, GradientsOfASequenceAreThoseAlone) {
  for (const Case& c : backward_cases()) {
    for (const std::string& impl : takers(c)) expect_sequences_alone(c, impl, every_sequence(c));
  }
}

// Sequences of one length, in the rows of a batch and packed.
TEST_F(GpuBits, GradientsOfABatchAreThoseOfAPack) {
  for (const Case& c : backward_cases()) {
    Case dense = c, packed = c;
    dense.packed = false, dense.seqs.clear(), dense.pad = 0;
    dense.batch = 2, dense.length = std::min<int64_t>(c.longest(), 400);
    dense = cases::normalise(dense);
    packed.seqs = {dense.length, dense.length}, packed.pad = 0;
    for (const std::string& impl : takers(dense)) {
      SCOPED_TRACE(impl + "\n  " + cases::canonical(dense));
      Instance a(dense, true, kGpu), b(packed, true, kGpu);
      for (const std::string& name : a.inputs()) b.set_values(name, a.values(name));
      a.run({.impl = impl});
      b.run({.impl = impl});
      for (const std::string& name : a.outputs()) {
        if (part_of(name) == Part::nothing) continue;  // sums in another order
        EXPECT_TRUE(a.bytes(name) == b.bytes(name)) << name;
      }
    }
  }
}

// Each gradient alone has the bits that it has among the others.
TEST_F(GpuBits, AskingForLessChangesNoGradient) {
  for (const Case& c : backward_cases()) {
    for (const std::string& impl : takers(c)) {
      Instance all(c, true, kGpu);
      all.run({.impl = impl});
      const Options options = all.options({.impl = impl});
      const std::vector<std::string> names = all.outputs();
      std::vector<std::vector<std::byte>> expected;
      for (const std::string& name : names) expected.push_back(all.bytes(name));
      for (size_t i = 0; i < names.size(); ++i) {
        cases::Call call = all.call_of();
        for (const std::string& name : names) {
          if (name != names[i]) call.set(name, TensorView{});
        }
        const size_t bytes = call.workspace_bytes(options);
        const auto memory = cases::device::allocate(std::max<size_t>(bytes, 16));
        cases::device::set(memory.get(), 0xFF, std::max<size_t>(bytes, 16));
        all.reset();
        call.run(options, {memory.get(), bytes});
        all.fetch();
        EXPECT_TRUE(all.bytes(names[i]) == expected[i])
            << impl << ": " << names[i] << "\n  " << cases::canonical(c);
      }
    }
  }
}

// With d_o zero after a token and no gradient of the final state nothing after it has one.
TEST_F(GpuBits, GradientsDoNotReachLaterInputs) {
  for (Case c : backward_cases()) {
    c.seqs = {c.split == Split::by_length ? 2300 : 300}, c.pad = 0, c.dfinal = false;
    for (const std::string& impl : takers(c)) {
      Instance instance(c, true, kGpu);
      const std::vector<double> d_o = instance.values("d_o");
      for (const int64_t last : {int64_t{0}, int64_t{63}, c.seqs[0] - 130}) {
        SCOPED_TRACE(impl + ", after token " + std::to_string(last) + "\n  " + cases::canonical(c));
        auto cut = d_o;
        std::fill(cut.begin() + (last + 1) * per_token(instance, "d_o"), cut.end(), 0.0);
        instance.set_values("d_o", cut);
        instance.run({.impl = impl});
        for (const std::string& name : instance.outputs()) {
          if (part_of(name) != Part::row) continue;
          const auto values = instance.values(name);
          const auto end = values.begin() + (last + 1) * per_token(instance, name);
          EXPECT_TRUE(std::all_of(end, values.end(), [](double x) { return x == 0; })) << name;
          // Not dg alone: a single token may have none.
          EXPECT_TRUE(name == "dg" ||
                      std::any_of(values.begin(), end, [](double x) { return x != 0; }))
              << name;
        }
      }
    }
  }
}

// dq of a token is a matter of what came before it.
TEST_F(Gpu, LaterTokensChangeNoBitOfDq) {
  for (const Case& c : parse_all({kBackwardLines, {&kBackwardByLength, 1}})) {
    const int64_t from =
        c.sequence_begin(c.num_sequences() - 1) + c.sequence_length(c.num_sequences() - 1) / 3;
    for (const std::string& impl : takers(c)) {
      Instance a(c, true, kGpu), b(c, true, kGpu);
      halve_rows(b, from);
      a.run({.impl = impl});
      b.run({.impl = impl});
      const int64_t unit = per_token(a, "dq") * cases::size_of(c.dtype);
      EXPECT_TRUE(slice(a.bytes("dq"), unit, 0, from) == slice(b.bytes("dq"), unit, 0, from))
          << impl << "\n  " << cases::canonical(c);
      EXPECT_FALSE(a.bytes("dq") == b.bytes("dq")) << impl << "\n  " << cases::canonical(c);
    }
  }
}

}  // namespace
}  // namespace deltic::test
