// States from slot to slot: bits, threads, and what a wrong call is told. Every implementation
// against the oracle: the cases.
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <string>
#include <vector>

#include "cases/check.h"
#include "support.h"

namespace deltic::test {
namespace {

std::vector<std::string> movers() {
  std::vector<std::string> names;
  for (const ImplementationInfo& i : implementations(Op::move))
    if (i.runs_here && i.name != "reference") names.push_back(i.name);
  return names;
}

constexpr int64_t kSlots = 5, kHeads = 3, kK = 24, kV = 40;
constexpr int64_t kState = kK * kV, kNumbers = kSlots * kHeads * kState;

TEST(Move, TheSameDtypeKeepsBits) {
  // Every pattern of 16 bits, NaN with payloads among them.
  std::vector<uint16_t> from(kNumbers), to(kNumbers);
  for (size_t i = 0; i < from.size(); ++i) from[i] = static_cast<uint16_t>(i * 40503u);
  std::vector<uint32_t> wide(kNumbers), wide_to(kNumbers);
  for (size_t i = 0; i < wide.size(); ++i) wide[i] = static_cast<uint32_t>(i * 2654435761u);
  std::vector<int32_t> read = {4, 0, 2}, write = {1, 3, 0};
  for (const std::string& impl : movers()) {
    for (const bool is_turned : {false, true}) {
      for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
        const bool is_wide = type == DType::f32;
        std::vector<int64_t> out = {kSlots, kHeads, kK, kV};
        if (is_turned) std::swap(out[2], out[3]);
        const std::vector<int64_t> in = {kSlots, kHeads, kK, kV};
        void* source = is_wide ? static_cast<void*>(wide.data()) : from.data();
        void* target = is_wide ? static_cast<void*>(wide_to.data()) : to.data();
        move({.impl = impl}, {.state_pool = TensorView(source, type, in),
                              .write_pool = TensorView(target, type, out),
                              .read_index = {read.data(), {3}},
                              .write_index = {write.data(), {3}},
                              .transpose = is_turned});
        for (size_t m = 0; m < read.size(); ++m) {
          for (int64_t i = 0; i < kHeads * kState; ++i) {
            const int64_t head = i / kState, d = i % kState / kV, v = i % kV;
            const auto a = static_cast<size_t>(read[m] * kHeads * kState + i);
            const auto b = static_cast<size_t>((write[m] * kHeads + head) * kState +
                                               (is_turned ? v * kK + d : d * kV + v));
            ASSERT_EQ(is_wide ? wide_to[b] : to[b], is_wide ? wide[a] : from[a])
                << impl << " " << dtype_name(type) << " " << is_turned << " " << i;
          }
        }
      }
    }
  }
}

TEST(Move, RoundsToNearestEven) {
  std::vector<float> from(kNumbers);
  std::vector<uint16_t> to(kNumbers);
  for (size_t i = 0; i < from.size(); ++i) {
    // Numbers of every size, halfway between two narrow ones among them.
    const double x = normal(3, 1, i, 0) * std::ldexp(1.0, static_cast<int>(i % 60) - 30);
    from[i] = i % 3 == 0 ? std::bit_cast<float>(static_cast<uint32_t>(i * 7919u) << 12)
                         : static_cast<float>(x);
  }
  std::vector<int64_t> slots = {0, 1, 2, 3, 4};
  for (const std::string& impl : movers()) {
    for (const DType type : {DType::bf16, DType::f16}) {
      move({.impl = impl},
           {.state_pool = {from.data(), {kSlots, kHeads, kK, kV}},
            .write_pool = TensorView(to.data(), type, std::vector<int64_t>{kSlots, kHeads, kK, kV}),
            .read_index = {slots.data(), {5}},
            .write_index = {slots.data(), {5}}});
      for (size_t i = 0; i < from.size(); ++i) {
        uint16_t want = 0;
        store(reinterpret_cast<uint8_t*>(&want), type, static_cast<double>(from[i]));
        if (std::isnan(from[i])) continue;  // one of many
        ASSERT_EQ(to[i], want) << impl << " " << dtype_name(type) << " " << from[i];
      }
    }
  }
}

TEST(Move, ThreadsChangeNothing) {
  for (const char* line :
       {"move dense=9x1 HV=4 K=64 V=64 pool=mixed writepool=1 transpose=1 odtype=bf16",
        "move dense=9x1 HV=4 K=64 V=64 pool=mixed layers=3 sdtype=bf16"}) {
    for (const std::string& impl : movers()) {
      cases::Instance one(cases::parse(line)), many(cases::parse(line));
      one.run({.impl = impl, .threads = 1});
      many.run({.impl = impl, .threads = 3});
      for (const std::string& name : one.outputs()) EXPECT_EQ(one.bytes(name), many.bytes(name));
    }
  }
}

// A slot of a pool that has its heads on two ranks, there and back.
TEST(Move, HeadsSplitAndMerge) {
  for (const std::string& impl : movers()) {
    std::vector<float> whole(kSlots * 4 * kState), half[2], back(whole.size(), NAN);
    for (size_t i = 0; i < whole.size(); ++i) whole[i] = static_cast<float>(normal(5, 2, i, 0));
    std::vector<int32_t> slots = {0, 1, 2, 3, 4};
    for (int64_t rank = 0; rank < 2; ++rank) {
      half[rank].assign(kSlots * 2 * kState, NAN);
      move({.impl = impl}, {.state_pool = {whole.data(), {kSlots, 4, kK, kV}},
                            .write_pool = {half[rank].data(), {kSlots, 2, kV, kK}},
                            .read_index = {slots.data(), {5}},
                            .write_index = {slots.data(), {5}},
                            .read_head = 2 * rank,
                            .num_heads = 2,
                            .transpose = true});
      move({.state_layout = StateLayout::vk, .impl = impl},
           {.state_pool = {half[rank].data(), {kSlots, 2, kV, kK}},
            .write_pool = {back.data(), {kSlots, 4, kK, kV}},
            .read_index = {slots.data(), {5}},
            .write_index = {slots.data(), {5}},
            .write_head = 2 * rank,
            .transpose = true});
    }
    EXPECT_EQ(std::memcmp(back.data(), whole.data(), whole.size() * sizeof(float)), 0) << impl;
  }
}

// ---- Wrong calls ----------------------------------------------------------------------------

struct World {
  std::vector<float> from = std::vector<float>(2 * kNumbers, 1.0f), to = from;
  std::vector<int32_t> read = {4, 0, 2}, write = {1, 3, 0};
  Options options{};
  MoveTensors t{.state_pool = {from.data(), {kSlots, kHeads, kK, kV}},
                .write_pool = {to.data(), {kSlots, kHeads, kK, kV}},
                .read_index = {read.data(), {3}},
                .write_index = {write.data(), {3}}};

  std::string text() {
    try {
      move(options, t);
    } catch (const Error& e) {
      return e.what();
    }
    return "";
  }
};

TEST(MoveError, EveryWrongCallIsASentence) {
  struct Row {
    const char* text;
    void (*spoil)(World&);
  };
  const Row rows[] = {
      {"move: state_pool: expected a tensor, got none", [](World& w) { w.t.state_pool = {}; }},
      {"move: read_index: expected a tensor, got none", [](World& w) { w.t.read_index = {}; }},
      {"move: write_index: expected a tensor, got none", [](World& w) { w.t.write_index = {}; }},
      {"move: write_index: expected shape [3], got [2]",
       [](World& w) {
         w.t.write_index = {w.write.data(), {2}};
       }},
      {"move: state_pool: expected shape [slots,HV,K,V], or with layers before them, got [5, 3, "
       "960]",
       [](World& w) {
         w.t.state_pool = {w.from.data(), {kSlots, kHeads, kState}};
       }},
      {"move: state_pool: expected at least one head, key channel and value column, got shape [5, "
       "0, 24, 40]",
       [](World& w) {
         w.t.state_pool = {w.from.data(), {kSlots, 0, kK, kV}};
       }},
      {"move: state_pool: expected fp32, bf16 or fp16, got int32",
       [](World& w) { w.t.state_pool.dtype = DELTIC_I32; }},
      {"move: write_pool: expected layers as state_pool has them, got shape [2, 5, 3, 24, 40] and "
       "[5, 3, 24, 40]",
       [](World& w) {
         w.t.write_pool = {w.to.data(), {2, kSlots, kHeads, kK, kV}};
       }},
      {"move: write_pool: expected states of K = 24 and V = 40 as state_pool has, got 40 and 24",
       [](World& w) {
         w.t.write_pool = {w.to.data(), {kSlots, kHeads, kV, kK}};
       }},
      {"move: write_pool: expected states of K = 24 and V = 40 as state_pool has, got 40 and 24",
       [](World& w) { w.t.transpose = true; }},
      {"move: transpose: expected 0 within one pool, which has one layout, got 1",
       [](World& w) { w.t.write_pool = {}, w.t.transpose = true; }},
      {"move: write_pool: expected memory of its own, got an overlap with state_pool",
       [](World& w) { w.t.write_pool = w.t.state_pool; }},
      {"move: read_head: expected a head of state_pool, 0 to 2, got 3",
       [](World& w) { w.t.read_head = 3; }},
      {"move: read_head: expected a head of state_pool, 0 to 2, got -1",
       [](World& w) { w.t.read_head = -1; }},
      {"move: num_heads: expected 0 (all) to 2, the heads of state_pool from read_head on, got 3",
       [](World& w) { w.t.read_head = 1, w.t.num_heads = 3; }},
      {"move: write_head: expected 0 to 3 - 3 heads of the pool that is written, got 1",
       [](World& w) { w.t.write_head = 1; }},
      {"move: write_head: expected 0 to 3 - 1 heads of the pool that is written, got "
       "9223372036854775807",
       [](World& w) { w.t.write_head = INT64_MAX, w.t.num_heads = 1; }},
      {"move: write_head: expected the heads that are read, or none of them, within one pool, got "
       "2 heads from 0 to 1",
       [](World& w) { w.t.write_pool = {}, w.t.num_heads = 2, w.t.write_head = 1; }},
      {"move: read_index: expected slots of -1 to 4, got 5 at 1", [](World& w) { w.read[1] = 5; }},
      {"move: write_index: expected slots of -1 to 4, got -2 at 0",
       [](World& w) { w.write[0] = -2; }},
      {"move: write_index: expected every slot to be written once, got slot 3 for entries 1 and 2",
       [](World& w) { w.write[2] = 3; }},
      {"move: read_index: expected no slot that another entry writes, got slot 0 for entry 1, "
       "written by entry 2",
       [](World& w) { w.t.write_pool = {}; }},
      {"move: null_slot: expected one of the pool's 5 slots, or -1, got 5",
       [](World& w) { w.options.null_slot = 5; }},
      {"move: qk_l2norm: expected the default (the delta rule's options are not move's), got "
       "another",
       [](World& w) { w.options.qk_l2norm = true; }},
      {"move: state_pool: expected finite values, got inf at entry 0, head 2",
       [](World& w) {
         w.options.checked = true;
         w.from[static_cast<size_t>((4 * kHeads + 2) * kState + 7)] = HUGE_VALF;
       }},
      {"move: state_pool: expected finite values, got inf at layer 1, entry 0, head 0",
       [](World& w) {
         w.options.checked = true;
         w.t.state_pool = {w.from.data(), {2, kSlots, kHeads, kK, kV}};
         w.t.write_pool = {w.to.data(), {2, kSlots, kHeads, kK, kV}};
         w.from[static_cast<size_t>((kSlots + 4) * kHeads * kState + 7)] = HUGE_VALF;
       }},
  };
  for (const Row& row : rows) {
    World w;
    row.spoil(w);
    const std::vector<float> before = w.to, pool = w.from;
    EXPECT_EQ(w.text(), row.text);
    EXPECT_EQ(std::memcmp(w.to.data(), before.data(), before.size() * sizeof(float)), 0);
    EXPECT_EQ(std::memcmp(w.from.data(), pool.data(), pool.size() * sizeof(float)), 0);
  }
}

TEST(MoveError, SizesBeyondAnyMemory) {
  World w;
  constexpr int64_t kHuge = int64_t{1} << 40;
  w.t.state_pool.shape[0] = 1 << 10, w.t.state_pool.shape[1] = kHuge;
  EXPECT_NE(w.text().find("move: state_pool: expected at most 2^56 elements"), std::string::npos);
  // Entries times states, of a list without memory of its own.
  w = World();
  w.t.state_pool.shape[1] = w.t.write_pool.shape[1] = kHuge;
  w.t.state_pool.shape[0] = w.t.write_pool.shape[0] = 1;
  w.t.state_pool.shape[2] = w.t.write_pool.shape[2] = 1;
  w.t.state_pool.shape[3] = w.t.write_pool.shape[3] = 1;
  w.t.state_pool.strides[1] = 0;
  w.t.write_pool.strides[1] = 1;
  w.t.read_index.shape[0] = w.t.write_index.shape[0] = 1 << 20;
  w.t.read_index.strides[0] = w.t.write_index.strides[0] = 0;
  EXPECT_NE(w.text().find("move: tensors: expected at most 2^56 numbers N*HV*K*V"),
            std::string::npos)
      << w.text();
}

TEST(Move, NothingToDo) {
  World w;
  w.t.read_index = {w.read.data(), {0}}, w.t.write_index = {w.write.data(), {0}};
  EXPECT_EQ(w.text(), "");
  w.t = World().t;
  w.read = {-1, -1, -1}, w.write = {-1, -1, -1};
  w.t.read_index = {w.read.data(), {3}}, w.t.write_index = {w.write.data(), {3}};
  w.t.state_pool = {w.from.data(), {kSlots, kHeads, kK, kV}};
  w.t.write_pool = {w.to.data(), {kSlots, kHeads, kK, kV}};
  const std::vector<float> before = w.to;
  EXPECT_EQ(w.text(), "");
  EXPECT_EQ(w.to, before);
}

}  // namespace
}  // namespace deltic::test
