// The GPU backend: every case against the oracle, and what the contract promises beyond values:
// same bits, packing, causality, graphs, errors that leave the GPU usable. Skipped without a GPU.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <numeric>
#include <set>

#include "any_device.h"
#include "cases/check.h"
#include "cuda_rules.h"
#include "draft_bits.h"
#include "gpu_support.h"
#include "not_finite.h"
#include "support.h"
#include "two_forms.h"

namespace deltic::test {
namespace {

using cases::Case;
using cases::Instance;
namespace device = cases::device;

struct Shard {
  std::string file;
  size_t index, count;
};
void PrintTo(const Shard& s, std::ostream* out) {
  *out << s.file << " " << s.index + 1 << " of " << s.count;
}
std::map<std::string, std::vector<Case>> files() {
  std::map<std::string, std::vector<Case>> all;
  for (const cases::SourcedCase& c : cases::built_in_cases()) all[c.file].push_back(c.spec);
  return all;
}
std::vector<Shard> shards() {
  std::vector<Shard> all;
  for (const auto& [file, list] : files()) {
    const size_t count = (list.size() + 99) / 100;
    for (size_t i = 0; i < count; ++i) all.push_back({file, i, count});
  }
  return all;
}

class LongGpuCases : public Gpu, public testing::WithParamInterface<Shard> {};
TEST_P(LongGpuCases, AgreeWithTheOracle) {
  const Shard& shard = GetParam();
  const std::vector<Case> list = files().at(shard.file);
  for (size_t i = shard.index; i < list.size(); i += shard.count) {
    const std::vector<std::string> names = takers(list[i]);
    if (names.empty()) continue;
    Instance instance(list[i], true, kGpu);
    const cases::Expected expected = cases::expect(instance);
    for (const std::string& impl : names) {
      const cases::Result result = cases::check(instance, expected, {.impl = impl});
      EXPECT_EQ(result.status, cases::Status::passed)
          << cases::canonical(list[i]) << "\n  " << impl << ": " << result.reason;
    }
  }
}
INSTANTIATE_TEST_SUITE_P(All, LongGpuCases, testing::ValuesIn(shards()));

// Every operation has somebody who takes its plainest call.
TEST_F(Gpu, EveryOperationHasAnImplementation) {
  for (const char* line :
       {"forward gate=head seqs=64 dtype=f32", "decode gate=channel seqs=1",
        "cumsum gate=head seqs=64", "gate gate=head form=softplus seqs=64", "l2norm seqs=64",
        "kkt gate=head seqs=64", "scores gate=channel seqs=64", "inverse seqs=64",
        "wy gate=head seqs=64", "scores_inverse gate=channel seqs=64", "backward gate=head seqs=64",
        "conv seqs=64", "conv_backward seqs=64", "rmsnorm seqs=64", "rmsnorm_backward seqs=64",
        "move dense=2x1", "commit dense=2x4", "decode record=1 dense=2x4",
        "step dense=2x1 norm=silu"}) {
    EXPECT_FALSE(takers(cases::parse(line)).empty()) << line;
  }
}

// The rules by which machines without a GPU count cases say what the implementations say.
TEST_F(Gpu, TakesWhatTheRulesSay) {
  // Where Hopper's kernels run a CTA has what the rules were written for.
  const bool has_less_memory = !runs_on_gpu(Op::forward, "cuda.sm90.forward");
  for (const cases::SourcedCase& s : cases::built_in_cases()) {
    if (!cases::may_run(s.spec.listed_op(), {}, DeviceType::cuda)) continue;
    for (const Choice& choice : Instance::shapes_of(s.spec, DeviceType::cuda).explain()) {
      // Not the full set or not Hopper's code.
      if (choice.sentence.find("build") != std::string::npos) continue;
      if (has_less_memory && choice.sentence.find("shared memory") != std::string::npos) continue;
      for (const CudaRule& rule : kCudaRules) {
        if (choice.name != rule.impl) continue;
        EXPECT_EQ(choice.accepts, rule.takes(s.spec))
            << choice.name << ": " << choice.sentence << "\n  " << cases::canonical(s.spec);
      }
    }
  }
}

TEST_F(Gpu, NotFiniteStaysInItsSequenceHeadAndChunk) {
  for (const char* line : kLines) {
    const Case c = cases::parse(line);
    if (c.op != Op::forward) continue;
    for (const std::string& impl : takers(c)) {
      // The last sequence, after its first two chunks; or its last token.
      const int64_t n = c.num_sequences() - 1;
      expect_contained(line, impl, kGpu, n, std::min<int64_t>(140, c.sequence_length(n) - 1));
    }
  }
  for (const char* line : {"decode gate=head seqs=3,9,2 H=2 HV=4 K=128 V=128 dtype=bf16 init=1",
                           "decode gate=channel seqs=3,9,2 H=2 HV=4 K=64 V=64 dtype=f16"}) {
    for (const std::string& impl : takers(cases::parse(line)))
      expect_contained(line, impl, kGpu, 1, 4);
  }
}

constexpr const char* kDraftLines[] = {
    "decode record=1 gate=head seqs=3,9,2 H=2 HV=4 K=128 V=72 dtype=bf16 pool=drafts tree=1",
    "decode record=1 gate=channel seqs=3,8,2 H=2 HV=4 K=64 V=72 dtype=f16 pool=drafts tree=1 "
    "l2norm=1",
    "decode record=1 gate=channel seqs=3,7,2 H=2 HV=4 K=128 V=64 dtype=bf16 pool=inplace state=vk",
};
TEST_F(Gpu, NotFiniteStaysInPathsOfDrafts) {
  for (const char* line : kDraftLines) {
    for (const std::string& impl : takers(cases::parse(line)))
      expect_contained_in_paths(line, impl, kGpu, 1, 2);
  }
}

TEST_F(Gpu, RowsOfTheNormDoNotSeeEachOther) {
  for (const char* line : kRowLines) {
    for (const std::string& impl : takers(cases::parse(line))) expect_rows_apart(line, impl, kGpu);
  }
}

TEST_F(Gpu, ScaleIsNothingToANormWithoutEps) {
  for (const char* line : kUnscaledLines) {
    for (const std::string& impl : takers(cases::parse(line)))
      expect_no_scale_matters(line, impl, kGpu);
  }
}

TEST_F(Gpu, QueriesLookAtNoAddress) {
  for (const char* line : kQueriedLines) {
    for (const std::string& impl : takers(cases::parse(line)))
      expect_no_address_matters(line, impl, kGpu);
  }
}

TEST_F(Gpu, SameBitsTwice) {
  std::vector<std::string> lines(std::begin(kLines), std::end(kLines));
  lines.emplace_back(
      "rmsnorm_backward seqs=130,0,64,257 H=5 K=128 act=silu dtype=bf16 odtype=bf16");
  lines.emplace_back("conv_backward seqs=130,0,64,1257 D=1032 W=4 dtype=bf16 init=1 act=silu");
  for (const std::string& line : lines) {
    const Case c = cases::parse(line);
    for (const std::string& impl : takers(c)) {
      Instance instance(c, true, kGpu);
      instance.run({.impl = impl});
      std::vector<std::vector<std::byte>> first;
      for (const std::string& name : instance.outputs()) first.push_back(instance.bytes(name));
      instance.run({.impl = impl});
      for (size_t i = 0; i < first.size(); ++i) {
        EXPECT_TRUE(first[i] == instance.bytes(instance.outputs()[i]))
            << impl << ": " << instance.outputs()[i] << "\n  " << line;
      }
    }
  }
}

// What drafted tokens leave, and its commit, have the bits of the tokens one by one.
TEST_F(Gpu, CommitHasTheBitsOfDecode) {
  for (const char* gate : {"none", "head", "channel"}) {
    for (const char* state : {"kv", "vk"}) {
      for (const char* type : {"f32", "bf16", "f16"}) {
        for (const bool is_tree : {false, true}) {
          const std::string sizes =
              std::string("H=1 HV=2 K=128 V=72 state=") + state + " sdtype=" + type + " dtype=bf16";
          expect_bits_of_decode(gate, sizes, 3, 9, is_tree, "cuda.general", kGpu);
        }
      }
    }
  }
}

// Of drafts all at once the same, but for the order of sums and bf16 pairs for fp32 states.
TEST_F(Gpu, CommitOfDraftsAtOnceIsNearDecode) {
  for (const char* gate : {"none", "head", "channel"}) {
    for (const char* state : {"kv", "vk"}) {
      const std::string sizes =
          std::string("H=1 HV=2 K=128 V=72 sdtype=f32 dtype=bf16 state=") + state;
      const std::vector<std::string> names = takers(
          cases::parse(std::string("decode record=1 dense=3x9 init=1 gate=") + gate + " " + sizes));
      if (std::find(names.begin(), names.end(), "cuda.drafts") == names.end()) continue;
      for (const bool is_tree : {false, true}) {
        expect_bits_of_decode(gate, sizes, 3, 9, is_tree, "cuda.general", kGpu, "cuda.drafts");
      }
    }
  }
}

// A forward that goes over to the recurrent form has the bits of a prefill and a decode.
TEST_F(Gpu, ACallInTwoFormsIsTwoCalls) {
  std::set<std::string> names;
  for (const char* line : kTwoFormLines) {
    for (const std::string& impl : takers(cases::parse(line))) {
      expect_two_calls(line, impl, kGpu);
      names.insert(impl);
    }
  }
  EXPECT_TRUE(names.contains("cuda.general"));
}

// A gate that is NaN makes its head NaN from there on, and nothing else: a decay of 0 would hide
// it.
TEST_F(Gpu, ANanGateStaysNan) {
  for (const char* line :
       {"forward gate=head seqs=70,200 H=2 HV=4 K=128 V=128 dtype=bf16 init=1 split=off",
        "forward gate=head form=softplus gates=softplus seqs=70,200 H=2 HV=4 K=128 V=128 "
        "dtype=bf16 split=off",
        "forward gate=head form=bounded seqs=70,200 H=2 HV=4 K=64 V=64 dtype=f16 split=off",
        "forward gate=channel form=bounded seqs=70,200 H=2 HV=4 K=128 V=128 dtype=bf16 "
        "gdtype=bf16 split=off",
        "forward gate=channel seqs=70,200 H=2 HV=4 K=64 V=64 dtype=bf16 split=off"}) {
    const Case c = cases::parse(line);
    constexpr int64_t kToken = 70 + 80, kHead = 2;  // in the second chunk of the second sequence
    for (const std::string& impl : takers(c)) {
      Instance right(c, true, kGpu), spoiled(c, true, kGpu);
      const int64_t per_head = per_token(right, "g") / c.HV;
      spoiled.set("g", (kToken * c.HV + kHead) * per_head + per_head / 2, std::nan(""));
      right.run({.impl = impl});
      spoiled.run({.impl = impl});
      const auto before = right.values("o"), after = spoiled.values("o");
      for (int64_t token = 0; token < c.num_real_tokens(); ++token) {
        for (int64_t head = 0; head < c.HV; ++head) {
          // Of the chunk itself, tokens before may be NaN too.
          if (head == kHead && token >= 70 + 64 && token < kToken) continue;
          const bool is_nan = head == kHead && token >= kToken;
          for (int64_t v = 0; v < c.V; ++v) {
            const auto i = static_cast<size_t>((token * c.HV + head) * c.V + v);
            ASSERT_TRUE(is_nan ? std::isnan(after[i]) : after[i] == before[i])
                << impl << ": token " << token << ", head " << head << ": " << after[i] << "\n  "
                << line;
          }
        }
      }
      const auto state = spoiled.values("final_state");
      const auto size = static_cast<size_t>(c.K * c.V);
      for (size_t i = 0; i < state.size(); ++i) {
        ASSERT_EQ(std::isnan(state[i]), i / size == static_cast<size_t>(c.HV + kHead))
            << impl << ": element " << i << " of final_state\n  " << line;
      }
    }
  }
}

// At the first, a middle and the last token of a chunk.
void expect_gates_contained_on_gpu(const std::string& line) {
  for (const std::string& impl : takers(cases::parse(line))) {
    for (const int64_t at : {64, 91, 127}) expect_gates_contained(line, impl, kGpu, 1, at);
  }
}
TEST_F(Gpu, NotFiniteGatesStayInTheirHeadOfBlocks) {
  for (const char* line : {"kkt gate=head seqs=3,150 H=2 HV=4 K=64 dtype=bf16",
                           "kkt gate=channel seqs=3,150 H=2 K=64 dtype=f32 chunk=32",
                           "scores gate=head seqs=3,150 H=2 HV=4 K=64 dtype=f32",
                           "scores gate=channel seqs=3,150 H=2 K=64 dtype=f16",
                           "scores_inverse gate=head seqs=3,150 H=2 HV=4 K=64 dtype=bf16",
                           "scores_inverse gate=channel seqs=3,150 H=2 K=64 dtype=bf16 chunk=32",
                           "wy gate=head seqs=3,150 H=2 HV=4 K=64 V=64 dtype=bf16",
                           "wy gate=channel seqs=3,150 H=2 K=64 V=64 dtype=f32",
                           "cumsum gate=head form=softplus seqs=3,150 HV=2",
                           "cumsum gate=channel seqs=3,150 HV=2 K=64 reverse=1",
                           "gate gate=channel form=bounded seqs=3,150 HV=2 K=64 gdtype=bf16",
                           "kkt_backward gate=head seqs=3,150 H=2 HV=4 K=64 dtype=bf16",
                           "kkt_backward gate=channel seqs=3,150 H=2 K=64 dtype=f32",
                           "scores_backward gate=head seqs=3,150 H=2 K=64 dtype=f32",
                           "scores_backward gate=channel seqs=3,150 H=2 HV=4 K=64 dtype=bf16",
                           "wy_backward gate=head seqs=3,150 H=2 HV=4 K=64 V=64 dtype=f32",
                           "wy_backward gate=channel seqs=3,150 H=2 K=64 V=64 dtype=bf16",
                           "cumsum_backward gate=channel form=softplus seqs=3,150 HV=2 K=64",
                           "gate_backward gate=head form=bounded seqs=3,150 HV=2"}) {
    expect_gates_contained_on_gpu(line);
  }
}
TEST_F(Gpu, NotFiniteGatesStayInTheirHeadOfGradients) {
  for (const char* line :
       {"backward gate=head seqs=3,150 H=1 HV=2 K=128 V=64 dtype=bf16 init=1 split=off",
        "backward gate=head form=softplus gates=softplus seqs=3,150 H=2 K=64 V=64 dtype=f16 "
        "save=none split=off",
        "backward gate=head form=bounded seqs=3,150 H=2 K=32 V=32 dtype=f32 split=off",
        "backward gate=channel seqs=3,150 H=1 HV=2 K=64 V=64 dtype=f16 init=1 split=off",
        "backward gate=channel form=softplus gates=softplus seqs=3,150 H=2 K=64 V=64 dtype=bf16 "
        "save=none split=off",
        "backward gate=channel form=bounded seqs=3,150 H=2 K=128 V=64 dtype=bf16 gdtype=bf16 "
        "split=off",
        "backward gate=channel seqs=3,150 H=2 K=32 V=32 dtype=f32 init=1 split=off"}) {
    expect_gates_contained_on_gpu(line);
  }
  // In segments of two chunks: beside a border, and in the middle of a piece.
  for (const char* line :
       {"backward gate=head gates=slow seqs=3,330 H=2 K=64 V=64 dtype=bf16 save=none split=128",
        "backward gate=channel gates=slow seqs=3,330 H=2 K=64 V=64 dtype=bf16 save=none split=128",
        "backward gate=head seqs=3,330 H=2 K=64 V=64 dtype=f16 init=1 save=none split=128",
        "backward gate=channel seqs=3,330 H=2 K=64 V=64 dtype=bf16 init=1 save=none split=128"}) {
    const std::vector<std::string> names = takers(cases::parse(line));
    if (names.front() != "cuda.sm90.backward") continue;
    for (const int64_t at : {127, 128, 200})
      expect_gates_contained(line, names.front(), kGpu, 1, at, at / 128 * 128 + 128);
  }
}

// Under auto a segment starts from its last chunks alone where the gates have forgotten the rest: a
// NaN far before the border is then not seen behind it, and is where a single head remembers.
TEST_F(Gpu, ForgottenStatesAreNotCarriedOn) {
  if (!runs_on_gpu(Op::forward, "cuda.sm90.forward")) GTEST_SKIP() << "no code for Hopper";
  const std::string shape = " dense=1x16384 H=2 HV=4 K=128 V=128 dtype=bf16 gdtype=bf16 l2norm=1 ";
  for (const std::string kind : {"gate=channel form=bounded", "gate=channel"}) {
    for (const char* setting : {"random", "slow head", "growing", "nan gate"}) {
      const bool is_random = setting == std::string("random");
      const bool is_growing = setting == std::string("growing");
      SCOPED_TRACE(kind + ", " + setting);
      const Case c = cases::parse("forward " + kind + shape +
                                  "gates=random beta=" + (is_growing ? "value" : "sigmoid"));
      Instance x(c, true, kGpu);
      const auto slow = [&](double value) {  // of the second head, all over
        auto g = x.values("g");
        const size_t row = g.size() / static_cast<size_t>(c.length * c.HV);
        for (size_t i = row; i < g.size(); i += static_cast<size_t>(c.HV) * row)
          for (size_t d = 0; d < row; ++d) g[i + d] = value;
        x.set_values("g", g);
      };
      if (setting == std::string("slow head")) slow(kind.ends_with("bounded") ? -20.0 : -1e-4);
      if (is_growing) {  // |1 - beta| is 10^3: what decays is as large again
        auto beta = x.values("beta");
        for (double& b : beta) b = 1000;
        x.set_values("beta", beta);
      }
      if (setting == std::string("nan gate")) slow(std::nan(""));
      x.set("v", 5 * c.HV * c.V, std::nan(""));
      x.run({.impl = "cuda.sm90.forward"});
      const auto o = x.values("o");
      const auto last = o.size() - static_cast<size_t>(c.HV * c.V);  // head 0 of the last token
      if (is_random)
        EXPECT_TRUE(std::isfinite(o[last])) << "the whole state was carried over";
      else
        EXPECT_FALSE(std::isfinite(o[last])) << "a state that is remembered was not carried over";
    }
  }
}

// dq, dk and dv of one sequence of one head in segments, whose inputs `change` sets, are those of
// the whole sequence but for rounding.
void expect_pieces_of_gradients(const std::string& line, int segment, double allowed,
                                const std::function<void(Instance&)>& change) {
  const auto gradients = [&](const std::string& split) {
    Instance x(cases::parse(line + " dtype=bf16 save=none split=" + split), true, kGpu);
    change(x);
    x.run({.impl = "cuda.sm90.backward"});
    return std::vector<std::vector<double>>{x.values("dq"), x.values("dk"), x.values("dv")};
  };
  const auto whole = gradients("off"), pieces = gradients(std::to_string(segment));
  for (size_t i = 0; i < whole.size(); ++i) {
    EXPECT_LT(cases::relative_error(pieces[i], whole[i], DType::bf16, false), allowed)
        << i << " of\n  " << line;
  }
}
// One key whose beta |k|^2 is 4.275 turns what a gate of e^-1.2 leaves into 0.99 times as much: no
// chunk forgets anything, though its gates alone would.
TEST_F(Gpu, GradientsRememberWhatKeysEnlarge) {
  if (!runs_on_gpu(Op::backward, "cuda.sm90.backward")) GTEST_SKIP() << "no code for Hopper";
  for (const std::string gate : {"head", "channel"}) {
    const std::string line = "backward gate=" + gate + " keys=repeated dense=1x256 H=1 K=64 V=64";
    expect_pieces_of_gradients(line, 64, 0.05, [](Instance& x) {
      auto k = x.values("k");
      for (double& value : k) value *= 1.5;
      x.set_values("k", k);
      x.set_values("g", std::vector<double>(x.values("g").size(), -1.2));
      x.set_values("beta", std::vector<double>(x.values("beta").size(), 1.9));
    });
  }
}
// The last, or the first, of the second piece's two chunks forgets: of that piece's borders the
// state is then remembered at one, and its gradient at the other.
TEST_F(Gpu, GradientsRememberOnOneSide) {
  if (!runs_on_gpu(Op::backward, "cuda.sm90.backward")) GTEST_SKIP() << "no code for Hopper";
  for (const std::string gate : {"head", "channel"}) {
    for (const size_t deep : {3, 2}) {
      const std::string line = "backward gate=" + gate + " dense=1x512 H=1 K=64 V=64 init=1";
      expect_pieces_of_gradients(line, 128, 0.02, [&](Instance& x) {
        std::vector<double> g(x.values("g").size(), -1e-3);
        const size_t chunk = g.size() / 8;
        std::fill_n(g.begin() + static_cast<int64_t>(deep * chunk), chunk, -5.0);
        x.set_values("g", g);
      });
    }
  }
}

// The same call with and without checkpoints, several of them in one chunk.
TEST_F(Gpu, CheckpointsChangeNoOtherBit) {
  for (const char* line : kLines) {
    Case c = cases::parse(line);
    if (c.op != Op::forward) continue;
    Case kept = c;
    kept.ckpt = {64, 3, 100, 65, 0, 257, 100};
    for (const std::string& impl : takers(kept)) {
      Instance a(c, true, kGpu), b(kept, true, kGpu);
      a.run({.impl = impl});
      b.run({.impl = impl});
      EXPECT_TRUE(a.bytes("o") == b.bytes("o")) << impl << "\n  " << line;
      EXPECT_TRUE(a.bytes("final_state") == b.bytes("final_state")) << impl << "\n  " << line;
    }
  }
}

// A forward call that keeps what `save` says.
struct Kept {
  std::vector<std::byte> saved, o;
};
Kept run_and_keep(const Case& c, const std::string& impl, Save save) {
  Instance instance(c, true, kGpu);
  instance.reserve({.impl = impl});
  instance.reset();
  Options options = instance.options({.impl = impl});
  options.save = save;
  Tensors tensors = instance.tensors();
  Kept kept;
  kept.saved.resize(forward_saved_bytes(options, tensors));
  const auto saved = device::allocate(kept.saved.size());
  if (save != Save::none) tensors.saved = {saved.get(), kept.saved.size()};
  const size_t bytes = forward_workspace_bytes(options, tensors);
  const auto workspace = device::allocate(bytes);
  forward(options, tensors, {workspace.get(), bytes});
  device::synchronize();
  device::download(kept.saved.data(), saved.get(), kept.saved.size());
  instance.fetch();
  kept.o = instance.bytes("o");
  return kept;
}
// The oracle's states before every chunk that is a multiple of `segment`, beside those in `saved`.
// The layout is written down in src/cuda/saved.h.
void compare_saved(const Case& c, int64_t segment, const std::vector<std::byte>& saved,
                   const std::string& what) {
  const int64_t step = segment * c.chunk, per_batch = (c.num_tokens() - 1) / step;
  const int64_t rows = (c.V + 15) / 16 * 16, width = (c.K + 15) / 16 * 16;
  const int64_t slots = (c.packed ? 1 : c.batch) * per_batch;
  ASSERT_EQ(saved.size(), static_cast<size_t>(256 + slots * c.HV * rows * width * 4)) << what;
  EXPECT_EQ(std::memcmp(saved.data(), "delticSG", 8), 0) << what;
  Case prefixes = c;
  for (int64_t n = step; n < c.longest(); n += step) prefixes.ckpt.push_back(n);
  const Instance oracle(prefixes);
  const std::vector<double> states = cases::reference(oracle).at("ckpt_states");
  const std::vector<double> tokens = oracle.values("ckpt_tokens");
  const std::vector<double> places = oracle.values("ckpt_slots");
  const std::vector<double> cu = oracle.values("ckpt_cu");
  std::vector<double> got, want;
  int64_t begin = 0;
  for (int64_t n = 0; n < c.num_sequences(); ++n) {
    for (auto m = static_cast<size_t>(cu[static_cast<size_t>(n)]);
         m < static_cast<size_t>(cu[static_cast<size_t>(n) + 1]); ++m) {
      const auto t = static_cast<int64_t>(tokens[m]);
      if (t == c.sequence_length(n)) continue;  // no chunk begins there
      const int64_t slot = c.packed ? (begin + t) / step - 1 : n * per_batch + t / step - 1;
      for (int64_t h = 0; h < c.HV; ++h) {
        for (int64_t i = 0; i < c.K * c.V; ++i) {
          const int64_t v = i / c.K, k = i % c.K;
          float x;
          std::memcpy(&x, saved.data() + 256 + 4 * (((slot * c.HV + h) * rows + v) * width + k), 4);
          got.push_back(x);
          const int64_t inside = c.state == StateLayout::vk ? i : k * c.V + v;
          const auto place = static_cast<int64_t>(places[m]);
          want.push_back(states[static_cast<size_t>((place * c.HV + h) * c.K * c.V + inside)]);
        }
      }
    }
    begin += c.sequence_length(n);
  }
  ASSERT_FALSE(want.empty()) << what;
  EXPECT_LT(cases::relative_error(got, want, DType::f32, false), 6e-3) << what;
}

TEST_F(Gpu, SavedStatesAreThoseOfPrefixes) {
  const std::string impl = "cuda.sm90.forward";
  if (!runs_on_gpu(Op::forward, impl)) GTEST_SKIP() << "no code for Hopper";
  for (const char* line :
       {"forward gate=channel form=bounded seqs=1500,0,64,700,129 H=2 K=128 V=128 dtype=bf16 "
        "gdtype=bf16 beta=sigmoid l2norm=1 init=1 state=vk split=off",
        "forward gate=head dense=2x1100 H=1 HV=2 K=64 V=40 dtype=bf16 l2norm=1 init=1 split=off",
        "forward gate=head seqs=2600,300,2200 H=1 K=64 V=64 dtype=bf16 l2norm=1 split=by_length"}) {
    const Case c = cases::parse(line);
    const Kept without = run_and_keep(c, impl, Save::none);
    EXPECT_TRUE(without.saved.empty());
    for (Save save : {Save::states, Save::all}) {
      const std::string what = std::string(line) + (save == Save::all ? " all" : " states");
      const Kept kept = run_and_keep(c, impl, save);
      EXPECT_TRUE(kept.o == without.o) << what;
      const int64_t chunks = (c.num_tokens() + c.chunk - 1) / c.chunk;
      compare_saved(c,
                    save == Save::all
                        ? 1
                        : static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(chunks)))),
                    kept.saved, what);
    }
  }
}

// Recorded once, replayed in the same buffers with other lengths, fewer tokens and empty sequences
// at the tail.
TEST_F(Gpu, AGraphIsReplayedWithOtherLengths) {
  for (const char* text : kLines) {
    Case c = cases::parse(text);
    if (c.op != Op::forward) continue;
    c.seqs = {130, 64, 0, 257};
    for (const std::string& impl : takers(c)) {
      Instance instance(c, true, kGpu);
      instance.reserve({.impl = impl});
      instance.reset();
      instance.call({.impl = impl});
      device::synchronize();
      device::Graph graph([&](void* stream) { instance.call({.impl = impl, .stream = stream}); });
      for (const std::vector<int64_t>& lengths :
           {std::vector<int64_t>{130, 64, 0, 257}, {1, 300, 0, 0}, {0, 0, 451, 0}, {64, 0, 0, 0}}) {
        std::vector<double> cu = {0};
        for (int64_t n : lengths) cu.push_back(cu.back() + static_cast<double>(n));
        instance.set_values("cu_seqlens", cu);
        instance.reset();
        graph.replay();
        instance.fetch();
        const auto replayed = instance.bytes("o");
        const auto states = instance.bytes("final_state");
        instance.reset();
        instance.call({.impl = impl});
        instance.fetch();
        EXPECT_TRUE(replayed == instance.bytes("o")) << impl << "\n  " << text;
        EXPECT_TRUE(states == instance.bytes("final_state")) << impl << "\n  " << text;
        // Rows past the last sequence are zero.
        const auto o = instance.values("o");
        const auto used =
            static_cast<size_t>(cu.back()) * static_cast<size_t>(per_token(instance, "o"));
        EXPECT_TRUE(std::all_of(o.begin() + static_cast<std::ptrdiff_t>(used), o.end(),
                                [](double x) { return x == 0.0; }))
            << impl << "\n  " << text;
      }
    }
  }
}

TEST_F(Gpu, ErrorsLeaveTheGpuUsable) {
  const Case c = cases::parse("forward gate=head seqs=64,10 H=2 K=128 V=128 dtype=bf16");
  Instance instance(c, true, kGpu);
  instance.reserve({});
  instance.reset();
  const Tensors good = instance.tensors();
  const size_t bytes = forward_workspace_bytes({}, good);
  const auto memory = device::allocate(bytes + 64);
  const deltic_workspace workspace{memory.get(), bytes};

  Tensors wrong = good;
  wrong.g.device_type = DELTIC_CPU;
  EXPECT_NE(error_of([&] { forward({}, wrong, workspace); }).find("g: expected device cuda:0 as q"),
            std::string::npos);
  wrong = good;
  for (TensorView* t : {&wrong.q, &wrong.k, &wrong.v, &wrong.o, &wrong.g, &wrong.beta,
                        &wrong.cu_seqlens, &wrong.final_state})
    t->device_index = 97;
  EXPECT_NE(error_of([&] { forward({}, wrong, workspace); }).find("got cuda:97"),
            std::string::npos);
  if (bytes > 0) {
    EXPECT_NE(error_of([&] {
                forward({}, good, {memory.get(), bytes - 1});
              }).find("workspace: expected"),
              std::string::npos);
    EXPECT_NE(error_of([&] {
                forward({}, good, {memory.get() + 4, bytes});
              }).find("workspace: expected"),
              std::string::npos);
  }
  EXPECT_NE(error_of([&] {
              forward({.impl = "cpu.plain"}, good, workspace);
            }).find("runs on CPU tensors, got CUDA tensors"),
            std::string::npos);
  EXPECT_EQ(error_of([&] { forward({}, good, workspace); }), "");
  device::synchronize();
}

// Of building blocks: every operation, gates of every kind.
const char* const kBlockGradientLines[] = {
    "cumsum_backward gate=channel form=softplus seqs=130,0,64,200 pad=9 HV=3 K=40",
    "gate_backward gate=head form=bounded seqs=130,0,64,200 pad=9 HV=3",
    "l2norm_backward seqs=130,0,64,200 pad=9 H=3 K=40 dtype=bf16",
    "kkt_backward gate=head seqs=130,0,64,200 pad=9 H=2 HV=4 K=40 dtype=bf16",
    "kkt_backward gate=channel chunk=32 seqs=130,0,64,200 pad=9 H=2 HV=4 K=70",
    "scores_backward gate=none chunk=16 seqs=130,0,64,200 pad=9 H=2 HV=4 K=40",
    "scores_backward gate=channel seqs=130,0,64,200 pad=9 H=2 HV=4 K=70 dtype=f16",
    "inverse_backward seqs=130,0,64,200 pad=9 HV=3 chunk=32 result=0",
    "inverse_backward seqs=130,0,64,200 pad=9 HV=3 chunk=16 dtype=bf16 result=1",
    "wy_backward gate=head seqs=130,0,64,200 pad=9 H=2 HV=4 K=40 V=70 parts=u,kg,qg",
    "wy_backward gate=channel chunk=16 seqs=130,0,64,200 pad=9 H=2 HV=4 K=70 V=40 parts=u,kg,qg",
};

TEST_F(Gpu, GradientsOfBlocksHaveTheSameBits) {
  for (const char* line : kBlockGradientLines) {
    Instance a(cases::parse(line), true, kGpu), b(cases::parse(line), true, kGpu);
    a.run({.impl = "cuda.general"});
    b.run({.impl = "cuda.general"});
    for (const std::string& name : a.outputs()) {
      EXPECT_TRUE(a.bytes(name) == b.bytes(name)) << name << "\n  " << line;
    }
  }
}

// What was kept decides nothing: all memory modes, and every run, give the same bits.
TEST_F(Gpu, GradientsHaveTheSameBits) {
  for (const char* line : kBackwardLines) {
    for (const std::string& impl : takers(cases::parse(line))) {
      std::vector<std::vector<std::byte>> first;
      for (const char* save : {" save=none", " save=states", " save=all", " save=none"}) {
        Instance instance(cases::parse(std::string(line) + save), true, kGpu);
        instance.run({.impl = impl});
        std::vector<std::vector<std::byte>> found;
        for (const std::string& name : instance.outputs()) found.push_back(instance.bytes(name));
        if (first.empty()) first = found;
        EXPECT_TRUE(first == found) << impl << save << "\n  " << line;
      }
    }
  }
}

// The last sequence's inputs and what came back for it spoiled: the first one's gradients stay.
template <size_t N>
void expect_sequences_apart(const char* const (&lines)[N]) {
  for (const char* line : lines) {
    const Case c = cases::parse(line);
    const int64_t length = c.sequence_length(0), from = c.sequence_begin(c.num_sequences() - 1);
    for (const std::string& impl : takers(c)) {
      Instance a(c, true, kGpu), b(c, true, kGpu);
      for (const char* name :
           {"q", "k", "v", "x", "a", "beta", "g", "d_o", "d_out", "d_w", "d_u", "d_kg", "d_qg"}) {
        if (!b.has(name)) continue;
        auto values = b.values(name);
        for (auto i = static_cast<size_t>(from * per_token(b, name)); i < values.size(); ++i) {
          values[i] = std::numeric_limits<double>::quiet_NaN();
        }
        b.set_values(name, values);
      }
      a.run({.impl = impl});
      b.run({.impl = impl});
      for (const char* name : {"dq", "dk", "dv", "dx", "da", "dbeta", "dg"}) {
        if (!a.has(name)) continue;
        const int64_t unit =
            per_token(a, name) * cases::size_of(static_cast<DType>(a.tensor(name).view.dtype));
        EXPECT_TRUE(slice(a.bytes(name), unit, 0, length) == slice(b.bytes(name), unit, 0, length))
            << impl << ": " << name << "\n  " << line;
        EXPECT_FALSE(a.bytes(name) == b.bytes(name)) << impl << ": " << name << "\n  " << line;
      }
    }
  }
}
TEST_F(Gpu, GradientsOfASequenceDoNotSeeItsNeighbours) {
  expect_sequences_apart(kBackwardLines);
  expect_sequences_apart(kBlockGradientLines);
}

TEST_F(Gpu, AHostCopyOfTheLengthsIsChecked) {
  Case c = cases::parse("forward gate=head seqs=64,10 cuhost=1 H=2 K=128 V=128 dtype=bf16");
  Instance instance(c, true, kGpu);
  instance.set_values("cu_seqlens_host", {0, 64, 63});
  instance.reserve({});
  instance.reset();
  EXPECT_NE(
      error_of([&] { instance.call({}); }).find("cu_seqlens_host: expected offsets that never"),
      std::string::npos);
}

// Checked mode: a case, and what is put into one of its inputs.
struct Spoiled {
  const char* line;
  const char* tensor;
  std::vector<std::pair<int64_t, double>> numbers;  // row-major index, value
  const char* named = nullptr;                      // the argument in the text, if it is another
};
const double kNan = std::nan(""), kInfinity = std::numeric_limits<double>::infinity();
constexpr const char* kForward =
    "forward gate=head seqs=5,70,64 pad=3 H=2 HV=4 K=128 V=128 dtype=bf16 init=1 split=off";
constexpr const char* kChannel =
    "forward gate=channel form=softplus seqs=100,0,64 H=2 K=64 V=64 dtype=bf16 split=off";
constexpr const char* kMove = "decode gate=head dense=4x1 H=2 HV=4 K=64 V=64 pool=move";
constexpr const char* kTokens = "decode gate=channel seqs=3,2,4 H=2 K=32 V=32 pool=tokens idx=i64";
constexpr const char* kCheckpoints =
    "forward gate=head seqs=70,64 H=2 K=64 V=64 ckpt=0,10,64,end init=1 dtype=f32";
// Rows of six slots, of which 2, 5 and 2 are accepted; of seven, all of them, the fourth sequence
// skipped.
constexpr const char* kTable = "decode gate=head dense=3x4 H=2 K=64 V=64 pool=drafts null=0";
constexpr const char* kTree =
    "decode gate=channel seqs=3,2,0,4,5 pad=1 H=2 K=64 V=64 pool=drafts tree=1 idx=i64";
constexpr const char* kWritePool =
    "decode gate=head dense=4x1 H=2 HV=4 K=64 V=64 pool=move writepool=1 null=1 hasinit=1";
constexpr const char* kRecord =
    "decode record=1 gate=head seqs=3,2,0,4,5 pad=1 H=2 K=128 V=64 pool=drafts tree=1 idx=i64";
constexpr const char* kCommit =
    "commit gate=channel dense=4x5 HV=2 K=128 V=64 layers=2 tree=1 pool=move";
constexpr const char* kStates = "move dense=4x1 HV=2 K=32 V=64 layers=3 pool=move";
constexpr const char* kForms =
    "forward gate=head seqs=5,70,64 H=2 HV=4 K=128 V=128 dtype=bf16 recurrent=3,64,end split=off";
// Sequence n reads 7 - 2 n and writes 8 - 2 n of 11, its windows in an order of their own.
constexpr const char* kStep =
    "step gate=head dense=4x1 H=2 HV=4 K=64 V=64 l2norm=1 act=silu norm=silu pool=move dtype=bf16 "
    "sdtype=bf16";
constexpr const char* kStepOfDrafts =
    "step gate=channel seqs=3,2,0,4 pad=1 H=1 HV=2 K=64 V=40 l2norm=1 act=silu norm=sigmoid "
    "dtype=bf16 pool=drafts idx=i64";
const std::vector<Spoiled>& spoiled() {
  static const std::vector<Spoiled> all = {
      // States from slot to slot: entry n reads 7 - 2 n and writes 8 - 2 n of 11.
      {kStates, "read_index", {{2, 11}}},
      {kStates, "write_index", {{1, -2}}},
      {kStates, "write_index", {{1, 8}}},
      {kStates, "read_index", {{1, 8}}},
      {kStates, "state_pool", {{((2 * 11 + 5) * 2 + 1) * 32 * 64 + 17, kNan}}},
      // Records, rows of seven slots, and commits; counts from 5 on by 5, modulo 6.
      {kRecord, "accepted", {{4, 8}}},
      {kRecord, "read_index", {{6, 99}}},
      {kRecord, "parents", {{1, 1}}},
      {kRecord, "cu_seqlens", {{1, 0}, {2, 0}, {3, 0}, {4, 0}}, "record"},  // 14 tokens, 6 rows
      {kCommit, "accepted", {{1, 6}}},
      {kCommit, "accepted", {{2, -1}}},
      {kCommit, "write_index", {{3, 11}}},
      {kCommit, "write_index", {{1, 8}}},
      {kCommit, "parents", {{4, 4}}},
      {kCommit, "record", {{((4 + 2) * 5 + 1) * 2 * 320 + 5, kNan}}},
      // Lengths: 0, 5, 75, 139 of 142 rows.
      {kForward, "cu_seqlens", {{0, 1}}},
      {kForward, "cu_seqlens", {{0, -1}}},
      {kForward, "cu_seqlens", {{2, 4}}},
      {kForward, "cu_seqlens", {{3, 143}}},
      {kForward, "cu_seqlens", {{1, 1 << 20}, {2, 1 << 20}, {3, 1 << 20}}},
      // First tokens in the recurrent form.
      {kForms, "recurrent_from", {{1, 71}}},
      {kForms, "recurrent_from", {{2, -1}, {0, 6}}},
      // Slots: sequence n reads 7 - 2 n and writes 8 - 2 n of 11.
      {kMove, "read_index", {{2, 11}}},
      {kMove, "read_index", {{1, -2}}},
      {kMove, "write_index", {{3, 11}}},
      {kMove, "write_index", {{1, 8}}},
      {kMove, "read_index", {{1, 8}}},
      {kTokens, "write_index", {{0, 100}}},
      {kTokens, "write_index", {{6, 3}}},
      {kTokens, "write_index", {{12, 5}, {15, 5}}},
      {kTokens, "cu_seqlens", {{1, 0}, {2, 2}}, "write_index"},  // 7 tokens, 6 columns
      // Accepted counts, tables, a second pool, trees.
      {kTable, "accepted", {{1, 0}}},
      {kTable, "accepted", {{2, 7}, {0, -3}}},
      {kTable, "read_index", {{3, 77}}},
      {kTable, "read_index", {{0, 3}}},
      {kTree, "accepted", {{4, 8}}},
      {kTree, "accepted", {{0, 1}}, "parents"},  // a later branch finds another state there
      {kTree, "parents", {{1, 1}}},
      {kTree, "parents", {{2, -2}}},
      {kTree, "parents", {{30, 4}, {8, 3}}},
      {kTree, "cu_seqlens", {{1, 0}, {2, 0}, {3, 0}, {4, 0}}, "read_index"},  // 14 tokens, 7 slots
      {kWritePool, "write_index", {{2, 40}}},
      {kWritePool, "write_index", {{2, -2}}},
      {kWritePool, "write_index", {{1, 3}, {2, 3}}},
      {kWritePool, "read_index", {{3, 41}}},
      {kWritePool, "state_pool", {{(5 * 4 + 3) * 64 * 64 + 17, kNan}}},
      // Checkpoints: 0 10 64 end of the first, 0 10 64 end of the second sequence; 8 entries.
      {kCheckpoints, "ckpt_cu", {{0, 1}}},
      {kCheckpoints, "ckpt_cu", {{1, 9}}},
      {kCheckpoints, "ckpt_cu", {{2, 3}}},
      {kCheckpoints, "ckpt_tokens", {{6, 65}}},
      {kCheckpoints, "ckpt_tokens", {{1, -1}}},
      {kCheckpoints, "ckpt_slots", {{3, 10}}},
      {kCheckpoints, "ckpt_slots", {{1, 2}}},
      {kCheckpoints, "ckpt_slots", {{7, 3}}},
      // Numbers. The first by sequence, token, head; padding is nobody's.
      {kForward, "q", {{20 * 256 + 128 + 5, kNan}}},
      {kForward, "q", {{20 * 256 + 128 + 5, kNan}, {20 * 256 + 7, kInfinity}}},
      {kForward, "k", {{138 * 256 + 255, -kInfinity}}},
      {kForward, "v", {{80 * 512 + 3 * 128 + 99, kNan}}},
      {kForward, "beta", {{75 * 4 + 2, kInfinity}}},
      {kForward, "g", {{6 * 4 + 1, -kInfinity}, {6 * 4, kNan}}},
      {kForward, "initial_state", {{(2 * 4 + 1) * 128 * 128 + 130, kNan}}},
      {kChannel, "g", {{110 * 128 + 64 + 3, kNan}}},
      {kChannel, "A_log", {{1, kInfinity}}},
      {kChannel, "dt_bias", {{64 + 3, kNan}}},
      {kMove, "state_pool", {{(5 * 4 + 3) * 64 * 64 + 17, kNan}}},
      {"decode gate=head dense=2x3 H=1 K=32 V=32 betavec=1 gv=1", "gv", {{70, kNan}}},
      {"decode gate=head dense=2x3 H=1 K=32 V=32 betavec=1 gv=1", "beta", {{101, kNan}}},
      // Sums of positive gates: 1.5 a token from token 70 on, in a chunk that begins at 64.
      {"forward gate=head dense=1x128 H=2 K=64 V=64 dtype=bf16 split=off",
       "g",
       {{141, 1.5}, {143, 1.5}, {145, 1.5}, {147, 1.5}, {149, 1.5}, {151, 1.5}}},
      // Building blocks.
      {"cumsum gate=channel seqs=70,3 HV=2 K=8", "g", {{71 * 16 + 9, kNan}}},
      {"gate gate=head form=softplus dense=2x9 HV=3", "A_log", {{2, kNan}}},
      {"l2norm dense=2x9 H=3 K=20", "x", {{14 * 60 + 59, kInfinity}}},
      {"kkt gate=channel seqs=64,9 H=2 K=64 dtype=bf16", "k", {{70 * 128 + 1, kNan}}},
      {"scores gate=head seqs=64,9 H=2 K=64", "q", {{3, kNan}}},
      {"scores_inverse gate=channel seqs=64,9 H=2 K=64 dtype=f16", "beta", {{67 * 2 + 1, kNan}}},
      {"inverse seqs=64,9 HV=2 chunk=32", "a", {{40 * 64 + 32 + 7, kNan}}},
      {"inverse seqs=64,9 HV=2 chunk=32", "cu_seqlens", {{1, 80}}},
      {"wy gate=head seqs=64,9 H=2 K=64 V=64", "v", {{66 * 128 + 64, kNan}}},
      {"rmsnorm dense=2x9 H=3 K=20 act=silu", "z", {{14 * 60 + 59, kInfinity}}},
      {"rmsnorm dense=2x9 H=3 K=20 act=silu", "weight", {{7, kNan}}},
      // The convolution: its inputs, weights and windows of drafted tokens.
      {"conv seqs=9,0,4 D=40 W=4 init=1", "x", {{10 * 40 + 3, kNan}}},
      {"conv seqs=9,0,4 D=40 W=4 init=1", "weight", {{7, kInfinity}}},
      {"conv seqs=9,0,4 D=40 W=4 init=1", "initial_state", {{2 * 120 + 5, kNan}}},
      {"conv seqs=1,3,2 D=40 W=4 S=6 pool=drafts", "accepted", {{1, 0}}},
      {"conv seqs=1,3,2 D=40 W=4 S=6 pool=drafts", "accepted", {{2, 9}}},
      // Steps: what their parts have.
      {kStep, "read_index", {{2, 11}}},
      {kStep, "write_index", {{1, 8}}},
      {kStep, "conv.read_index", {{2, 99}}},
      {kStep, "conv.write_index", {{1, -2}}},
      {kStep, "state_pool", {{(5 * 4 + 3) * 64 * 64 + 17, kNan}}},
      {kStep, "conv.x", {{2 * 512 + 130, kNan}}},
      {kStep, "conv.weight", {{7, kInfinity}}},
      {kStep, "beta", {{3 * 4 + 1, kNan}}},
      {kStep, "g", {{3 * 4 + 2, kNan}}},
      {kStep, "norm.z", {{(4 + 3) * 64 + 5, kInfinity}}},
      {kStep, "norm.weight", {{9, kNan}}},
      {kStepOfDrafts, "cu_seqlens", {{2, 2}}},
      {kStepOfDrafts, "accepted", {{1, 0}}},
      {kStepOfDrafts, "conv.accepted", {{1, 9}}},
      {kStepOfDrafts, "read_index", {{0, 99}}},
  };
  return all;
}

// Every entry is an error, which the CPU says too.
TEST(Checked, TheCpuNamesWhatIsSpoiled) {
  for (const Spoiled& s : spoiled()) {
    Instance cpu(cases::parse(s.line));
    EXPECT_EQ(error_of([&] { cpu.run({.checked = true}); }), "") << s.line;
    for (const auto& [index, value] : s.numbers) cpu.set(s.tensor, index, value);
    const std::string text = error_of([&] { cpu.run({.checked = true}); });
    EXPECT_TRUE(is_about(text, s.named ? s.named : s.tensor)) << text << "\n  " << s.line;
  }
}

TEST_F(Gpu, CheckedModeSaysWhatTheCpuSays) {
  for (const Spoiled& s : spoiled()) {
    const Case c = cases::parse(s.line);
    Instance right(c), cpu(c);
    for (const auto& [index, value] : s.numbers) cpu.set(s.tensor, index, value);
    const std::string expected = error_of([&] { cpu.run({.checked = true}); });
    ASSERT_NE(expected, "") << s.tensor << "\n  " << s.line;
    for (const std::string& impl : takers(c)) {
      Instance gpu(c, true, kGpu);
      for (const auto& [index, value] : s.numbers) gpu.set(s.tensor, index, value);
      EXPECT_EQ(error_of([&] { gpu.run({.impl = impl, .checked = true}); }), expected)
          << impl << "\n  " << s.line;
      // Nothing was written: what reset left there is still there.
      gpu.fetch();
      EXPECT_EQ(gpu.damage(), "") << impl << "\n  " << s.line;
      for (const std::string& name : gpu.outputs()) {
        const std::vector<std::byte> after = gpu.bytes(name);
        gpu.reset();
        EXPECT_TRUE(after == gpu.bytes(name)) << impl << ": " << name << "\n  " << s.line;
      }
      // The next call is as good as the first.
      for (const auto& [index, value] : s.numbers) {
        gpu.set(s.tensor, index, right.values(s.tensor)[static_cast<size_t>(index)]);
      }
      EXPECT_EQ(error_of([&] { gpu.run({.impl = impl, .checked = true}); }), "")
          << impl << "\n  " << s.line;
    }
  }
}

TEST_F(Gpu, CheckedModeChangesNoBit) {
  for (const char* line : kLines) {
    const Case c = cases::parse(line);
    for (const std::string& impl : takers(c)) {
      Instance plain(c, true, kGpu), checked(c, true, kGpu);
      plain.run({.impl = impl});
      checked.run({.impl = impl, .checked = true});
      EXPECT_EQ(checked.damage(), "") << impl << "\n  " << line;
      for (const std::string& name : plain.outputs()) {
        EXPECT_TRUE(plain.bytes(name) == checked.bytes(name)) << impl << ": " << name;
      }
    }
  }
}

// Recorded once; a replay with a wrong length is found, the next one with a right one is clean.
TEST_F(Gpu, CheckedModeInAGraph) {
  const Case c = cases::parse(kForward);
  for (const std::string& impl : takers(c)) {
    Instance instance(c, true, kGpu);
    instance.reserve({.impl = impl, .checked = true});
    const auto memory = device::allocate(instance.workspace_bytes());
    const deltic_workspace workspace{memory.get(), instance.workspace_bytes()};
    instance.reset();
    Options options = instance.options({.impl = impl, .checked = true});
    device::Graph graph(
        [&](void* stream) { forward(options, instance.tensors(), workspace, stream); });
    graph.replay();
    EXPECT_EQ(error_of([&] { device_error(workspace); }), "");
    instance.set("cu_seqlens", 3, 200);
    instance.reset();
    graph.replay();
    EXPECT_EQ(error_of([&] { device_error(workspace); }),
              "forward: cu_seqlens: expected a last offset of at most T = 142, got 200");
    instance.set("cu_seqlens", 3, 139);
    instance.reset();
    graph.replay();
    EXPECT_EQ(error_of([&] { device_error(workspace); }), "");
  }
}

TEST_F(Gpu, DeviceErrorNamesAForeignWorkspace) {
  constexpr const char* kWho =
      "device_error: workspace: expected that of a checked call on a GPU, got ";
  const auto memory = device::allocate(1024);
  const std::vector<std::byte> zeros(1024);
  device::upload(memory.get(), zeros.data(), zeros.size());
  EXPECT_EQ(error_of([&] {
              device_error({memory.get(), 1024});
            }),
            kWho + std::string("other bytes"));
  EXPECT_EQ(error_of([&] { device_error({memory.get(), 8}); }), kWho + std::string("8 bytes"));
  std::vector<std::byte> host(1024);
  EXPECT_EQ(error_of([&] {
              device_error({host.data(), 1024});
            }),
            kWho + std::string("memory of the host"));
}

// What `deltic bench` times: rows repeated on the GPU, checked by parts of them.
const char* const kTiledLines[] = {
    "forward gate=channel form=bounded gates=slow seqs=1300,64,700 H=4 K=128 V=128 dtype=bf16 "
    "gdtype=bf16 beta=sigmoid l2norm=1 init=1 state=vk",
    "forward gate=head gates=slow dense=2x900 H=2 HV=4 K=64 V=64 dtype=bf16 pool=move",
    "decode gate=head form=softplus gates=softplus dense=40x1 H=2 HV=4 K=64 V=64 dtype=bf16 "
    "pool=inplace beta=sigmoid l2norm=1",
    "inverse dense=2x640 HV=4 dtype=bf16 odtype=bf16",
    "kkt gate=channel dense=2x640 H=4 K=64 dtype=f16 odtype=f16",
    "scores_inverse gate=channel dense=2x640 H=4 K=64 dtype=f16 odtype=f16",
};

TEST_F(Gpu, PartsOfARepeatedRowAgreeWithTheOracle) {
  for (const char* line : kTiledLines) {
    const Case c = cases::parse(line);
    ASSERT_TRUE(Instance::can_be_tiled(c)) << line;
    Instance all = Instance::tiled(c, 2, Instance(Instance::tile_of(c), false));
    const cases::RunOptions run{.impl = takers(c).at(0)};
    all.reserve(run);
    all.reset();
    EXPECT_NE(all.not_finite(), "") << line;  // nothing has been written
    const cases::Slice few = cases::few_tokens(c, 600), whole = cases::whole_sequence(c, 2000);
    Instance part = all.inputs_of(few), sequence = all.inputs_of(whole);
    all.call(run);
    device::synchronize();
    all.outputs_of(few, part);
    all.outputs_of(whole, sequence);
    const cases::Result result = cases::compare(part, cases::expect(part));
    EXPECT_EQ(result.status, cases::Status::passed) << line << "\n  " << result.reason;
    const cases::Result wide = cases::compare_in_f32(sequence);
    EXPECT_EQ(wide.status, cases::Status::passed) << line << "\n  " << wide.reason;
    EXPECT_EQ(all.not_finite(), "") << line;
  }
}

TEST_F(Gpu, AWrongRepeatedRowIsSeen) {
  const Case c = cases::parse(kTiledLines[0]);
  Instance all = Instance::tiled(c, 1, Instance(Instance::tile_of(c), false));
  all.reserve();
  all.reset();
  const cases::Slice few = cases::few_tokens(c, 600), whole = cases::whole_sequence(c, 2000);
  Instance part = all.inputs_of(few), sequence = all.inputs_of(whole);
  all.call();
  device::synchronize();
  auto* o = static_cast<std::byte*>(all.tensors().o.data);
  const int64_t row = c.H * c.V * cases::size_of(c.dtype);  // a token
  // The second token twice, the last one of the longest sequence twice, and one that is NaN.
  device::copy(o + row, o, static_cast<size_t>(row), nullptr);
  device::copy(o + 1299 * row, o + 1200 * row, static_cast<size_t>(row), nullptr);
  device::set(o + 2000 * row + 2, 0xFF, 2);
  all.outputs_of(few, part);
  EXPECT_EQ(cases::compare(part, cases::expect(part)).status, cases::Status::failed);
  all.outputs_of(whole, sequence);
  EXPECT_EQ(cases::compare_in_f32(sequence).status, cases::Status::failed);
  EXPECT_EQ(all.not_finite(),
            "o: not finite, or never written, at element " + std::to_string(2000 * c.H * c.V + 1));
}

// In a process of its own: from a context that exists to the first result.
TEST_F(Gpu, TheFirstCallIsQuick) {
  const std::string command = std::string("/proc/self/exe");
  const pid_t child = fork();
  if (child == 0) {
    execl(command.c_str(), "gpu_test", "--gtest_also_run_disabled_tests",
          "--gtest_filter=GpuFirstCall.DISABLED_Measure", static_cast<char*>(nullptr));
    _exit(127);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}
TEST(GpuFirstCall, DISABLED_Measure) {
  const Case c = cases::parse(kLines[0]);
  Instance instance(c, true, kGpu);  // allocates: the context exists
  instance.reserve({});
  instance.reset();
  device::synchronize();
  const auto begin = std::chrono::steady_clock::now();
  instance.call({});
  device::synchronize();
  const double ms =
      std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
  std::printf("first call: %.1f ms\n", ms);
  EXPECT_LT(ms, 200.0);
}

}  // namespace
}  // namespace deltic::test
