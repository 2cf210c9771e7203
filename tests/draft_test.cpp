// Drafted tokens that leave a record instead of states, and the commit of the accepted ones: the
// bits of decode, and what a wrong call is told. Every implementation against the oracle: the
// cases.
#include <cmath>
#include <cstring>

#include "draft_bits.h"
#include "support.h"

namespace deltic::test {
namespace {

std::vector<std::string> drafters() {
  std::vector<std::string> names;
  for (const ImplementationInfo& i : implementations(Op::commit))
    if (i.runs_here && i.name != "reference") names.push_back(i.name);
  return names;
}

TEST(Draft, CommitHasTheBitsOfDecode) {
  for (const std::string& impl : drafters()) {
    for (const char* gate : {"none", "head", "channel"}) {
      for (const char* state : {"kv", "vk"}) {
        for (const char* type : {"f32", "bf16", "f16"}) {
          for (const bool is_tree : {false, true}) {
            const std::string sizes = std::string("H=1 HV=2 K=32 V=48 state=") + state +
                                      " sdtype=" + type + " dtype=bf16";
            expect_bits_of_decode(gate, sizes, 3, 5, is_tree, impl, {});
          }
        }
      }
    }
    // Widths that no vector divides.
    expect_bits_of_decode("channel", "H=1 HV=2 K=37 V=45 sdtype=bf16", 2, 3, true, impl, {});
  }
}

TEST(Draft, ThreadsChangeNoBit) {
  for (const char* line :
       {"decode record=1 gate=channel dense=3x7 H=1 HV=2 K=64 V=96 pool=inplace tree=1",
        "commit gate=channel dense=3x7 HV=2 K=64 V=96 layers=3 tree=1 sdtype=bf16"}) {
    const cases::Case c = cases::parse(line);
    for (const std::string& impl : drafters()) {
      cases::Instance one(c), many(c);
      one.run({.impl = impl, .threads = 1});
      many.run({.impl = impl, .threads = 5});
      for (const std::string& name : one.outputs()) {
        EXPECT_EQ(one.bytes(name), many.bytes(name)) << impl << " " << name << "\n  " << line;
      }
    }
  }
}

// The states of all layers in one call are those of a call for each.
TEST(Draft, LayersAreCallsOfTheirOwn) {
  for (const std::string& impl : drafters()) {
    cases::Instance all(cases::parse("commit gate=head dense=4x6 HV=2 K=32 V=32 layers=3"));
    all.run({.impl = impl});
    const std::vector<std::byte> found = all.bytes("state_pool");
    for (int64_t layer = 0; layer < 3; ++layer) {
      all.reset();
      cases::Call call = all.call_of();
      for (const char* name : {"state_pool", "record"}) {
        TensorView view = call.get(name);
        const int64_t element = cases::size_of(static_cast<DType>(view.dtype));
        view.data = static_cast<std::byte*>(view.data) + layer * view.strides[0] * element;
        std::copy(view.shape + 1, view.shape + 5, view.shape);
        std::copy(view.strides + 1, view.strides + 5, view.strides);
        view.rank = 4;
        call.set(name, view);
      }
      call.run(all.options({.impl = impl}));
      const std::vector<std::byte> one = all.bytes("state_pool");
      const auto size = static_cast<std::ptrdiff_t>(found.size() / 3), at = layer * size;
      EXPECT_TRUE(std::equal(found.begin() + at, found.begin() + at + size, one.begin() + at))
          << impl << " layer " << layer;
    }
  }
}

// ---- Wrong calls ----------------------------------------------------------------------------

std::string text_of(const cases::Call& call, const Options& options) {
  try {
    call.run(options);
  } catch (const Error& e) {
    return e.what();
  }
  return "";
}

struct World {
  std::vector<float> pool = std::vector<float>(5 * 2 * 16 * 8, 0.5f);
  std::vector<float> record = std::vector<float>(2 * 17 * 2 * 41, 0.25f);
  std::vector<float> q = std::vector<float>(2 * 17 * 2 * 16, 0.1f), v = q, o = q, g = q;
  std::vector<int32_t> read = {3, 1}, accepted = {4, 0};
  std::vector<int64_t> parents = std::vector<int64_t>(2 * 4, -1);
  Options options{};
  cases::Call commit{Op::commit}, decode{Op::decode};

  World() {
    commit.set("state_pool", TensorView(pool.data(), {5, 2, 16, 8}));
    commit.set("record", TensorView(record.data(), {2, 4, 2, 25}));
    commit.set("accepted", TensorView(accepted.data(), {2}));
    commit.set("read_index", TensorView(read.data(), {2}));
    for (int64_t i = 0; i < 8; ++i) parents[static_cast<size_t>(i)] = i % 4 - 1;
    decode.set("q", TensorView(q.data(), {2, 4, 2, 16}));
    decode.set("k", TensorView(q.data(), {2, 4, 2, 16}));
    decode.set("v", TensorView(v.data(), {2, 4, 2, 8}));
    decode.set("o", TensorView(o.data(), {2, 4, 2, 8}));
    decode.set("g", TensorView(g.data(), {2, 4, 2}));
    for (float& x : g) x = -0.5f;
    decode.set("state_pool", TensorView(pool.data(), {5, 2, 16, 8}));
    decode.set("read_index", TensorView(read.data(), {2}));
    decode.set("record", TensorView(record.data(), {2, 4, 2, 25}));
  }
};

struct Wrong {
  const char* text;
  void (*spoil)(World&);
};

TEST(DraftError, OfCommit) {
  {
    World w;
    EXPECT_EQ(text_of(w.commit, w.options), "");
  }
  const Wrong rows[] = {
      {"commit: record: expected a tensor, got none", [](World& w) { w.commit.set("record", {}); }},
      {"commit: accepted: expected a tensor, got none",
       [](World& w) { w.commit.set("accepted", {}); }},
      {"commit: accepted: expected 0 to 4 accepted tokens, got 5 for sequence 0",
       [](World& w) { w.accepted[0] = 5; }},
      {"commit: accepted: expected 0 to 4 accepted tokens, got -1 for sequence 1",
       [](World& w) { w.accepted[1] = -1; }},
      {"commit: record: expected shape [N,T',HV,W], got [8, 2, 25]",
       [](World& w) {
         w.commit.set("record", TensorView(w.record.data(), {8, 2, 25}));
       }},
      {"commit: record: expected HV = 2 as state_pool has, and rows of K + V numbers, one or K "
       "more "
       "of a gate, K = 16, V = 8, got shape [2, 4, 2, 26]",
       [](World& w) {
         w.commit.set("record", TensorView(w.record.data(), {2, 4, 2, 26}));
       }},
      {"commit: record: expected HV = 2 as state_pool has, and rows of K + V numbers, one or K "
       "more "
       "of a gate, K = 16, V = 8, got shape [2, 4, 1, 25]",
       [](World& w) {
         w.commit.set("record", TensorView(w.record.data(), {2, 4, 1, 25}));
       }},
      {"commit: record: expected at most 16 drafted tokens T', got 17",
       [](World& w) {
         w.commit.set("record", TensorView(w.record.data(), {2, 17, 2, 25}));
       }},
      {"commit: record: expected fp32, got bf16",
       [](World& w) {
         const std::vector<int64_t> shape = {2, 4, 2, 25};
         w.commit.set("record", TensorView(w.record.data(), DType::bf16, shape));
       }},
      {"commit: record: expected shape [layers,N,T',HV,W], got [2, 4, 2, 25]",
       [](World& w) {
         w.commit.set("state_pool", TensorView(w.pool.data(), {1, 5, 2, 16, 8}));
       }},
      {"commit: accepted: expected shape [2], got [1]",
       [](World& w) { w.commit.set("accepted", TensorView(w.accepted.data(), {1})); }},
      {"commit: read_index: expected slots of -1 to 4, got 5 at 1",
       [](World& w) { w.read[1] = 5; }},
      {"commit: read_index: expected every slot to be written once, got slot 3 for sequences 0 and "
       "1",
       [](World& w) { w.read[1] = 3; }},
      {"commit: parents: expected shape [N,T'] with N = 2 and T' = 4 as the record has, got [2, 3]",
       [](World& w) {
         w.commit.set("parents", TensorView(w.parents.data(), {2, 3}));
       }},
      {"commit: parents: expected a parent before its token, or -1, got 3 at sequence 0, token 3",
       [](World& w) {
         w.parents[3] = 3;
         w.commit.set("parents", TensorView(w.parents.data(), {2, 4}));
       }},
      {"commit: state_pool: expected memory of its own, got an overlap with record",
       [](World& w) {
         w.commit.set("record", TensorView(w.pool.data(), {2, 4, 2, 25}));
       }},
      {"commit: qk_l2norm: expected the default (the delta rule's options are not commit's), got "
       "another",
       [](World& w) { w.options.qk_l2norm = true; }},
      {"commit: record: expected finite values, got inf at sequence 1, token 2, head 0",
       [](World& w) {
         w.options.checked = true;
         w.record[(4 + 2) * 2 * 25 + 3] = HUGE_VALF;
       }},
  };
  for (const Wrong& row : rows) {
    World w;
    row.spoil(w);
    const std::vector<float> before = w.pool;
    EXPECT_EQ(text_of(w.commit, w.options), row.text);
    EXPECT_EQ(std::memcmp(before.data(), w.pool.data(), before.size() * sizeof(float)), 0);
  }
}

TEST(DraftError, OfDecode) {
  {
    World w;
    EXPECT_EQ(text_of(w.decode, w.options), "");
  }
  const Wrong rows[] = {
      {"decode: write_index: expected none with a record, beside which no state is written, got a "
       "tensor",
       [](World& w) { w.decode.set("write_index", TensorView(w.read.data(), {2})); }},
      {"decode: record: expected shape [2, 4, 2, 25], got [2, 4, 2, 24]",
       [](World& w) {
         w.decode.set("record", TensorView(w.record.data(), {2, 4, 2, 24}));
       }},
      {"decode: record: expected at least T = 4 tokens T', got shape [2, 3, 2, 25]",
       [](World& w) {
         w.decode.set("record", TensorView(w.record.data(), {2, 3, 2, 25}));
       }},
      {"decode: record: expected at most 16 drafted tokens T', got 17",
       [](World& w) {
         w.decode.set("record", TensorView(w.record.data(), {2, 17, 2, 25}));
       }},
      {"decode: record: expected shape [N,T',HV,W], got [16, 25]",
       [](World& w) {
         w.decode.set("record", TensorView(w.record.data(), {16, 25}));
       }},
      {"decode: gv: expected none with a record, which has no decay per value column, got a tensor",
       [](World& w) {
         w.decode.set("gv", TensorView(w.g.data(), {2, 4, 2, 8}));
       }},
      {"decode: record: expected memory of its own, got an overlap with o",
       [](World& w) {
         w.decode.set("record", TensorView(w.o.data(), {2, 4, 2, 25}));
       }},
      {"decode: parents: expected a parent before its token, or -1, got 2 at sequence 1, token 2",
       [](World& w) {
         w.parents[6] = 2;
         w.decode.set("parents", TensorView(w.parents.data(), {2, 4}));
       }},
  };
  for (const Wrong& row : rows) {
    World w;
    row.spoil(w);
    const std::vector<float> before = w.record;
    EXPECT_EQ(text_of(w.decode, w.options), row.text);
    EXPECT_EQ(w.record, before);
  }
  World w;
  w.decode = cases::Call(Op::forward, w.decode.as<Tensors>());
  EXPECT_EQ(text_of(w.decode, w.options),
            "forward: record: expected none (decode has one), got a tensor");
}

}  // namespace
}  // namespace deltic::test
