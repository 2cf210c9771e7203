// What servers' calls have: null slots, has_initial_state, slots read by accepted tokens, pools
// that are written instead, slices of packed rows; the bits of the same tokens one by one; and
// sentences for what is wrong with such calls.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "cases/scalar.h"
#include "support.h"

namespace deltic::test {
namespace {

using cases::Random;

Buffer zeros(DType type, const std::vector<int64_t>& shape) {
  Buffer b(type, shape);
  int64_t numbers = 1;
  for (int64_t n : shape) numbers *= n;
  for (int64_t i = 0; i < numbers; ++i) b.set(i, 0);
  return b;
}
Buffer list(const std::vector<int64_t>& values, std::vector<int64_t> shape = {},
            DType type = DType::i32) {
  if (shape.empty()) shape = {static_cast<int64_t>(values.size())};
  Buffer b(type, std::move(shape));
  for (size_t i = 0; i < values.size(); ++i) {
    const auto at = static_cast<int64_t>(i);
    if (type == DType::u8) {
      b.set(at, static_cast<double>(values[i]));
    } else {
      b.set_index(at, values[i]);
    }
  }
  return b;
}

// ---- Sentences ------------------------------------------------------------------------------

// A sound call: two sequences of two tokens, H = HV = 2, K = V = 16, a pool of eight slots; conv of
// 6 channels and 4 taps with windows of 5 inputs.
struct World {
  Op op;
  Buffer q = zeros(DType::f32, {2, 2, 2, 16}), o{DType::f32, {2, 2, 2, 16}};
  Buffer pool = zeros(DType::f32, {8, 2, 16, 16}), scratch = zeros(DType::f32, {4, 2, 16, 16});
  Buffer x = zeros(DType::f32, {2, 2, 6}), y{DType::f32, {2, 2, 6}};
  Buffer weight = zeros(DType::f32, {6, 4});
  Buffer windows = zeros(DType::f32, {8, 6, 5}), scratch_windows = zeros(DType::f32, {4, 6, 5});
  std::vector<Buffer> more{};
  Options options{};
  cases::Call call;

  explicit World(Op which) : op(which), call(which) {
    more.reserve(8);
    if (op == Op::conv) {
      call.set("x", x.view()), call.set("weight", weight.view()), call.set("out", y.view());
      call.set("state_pool", windows.view());
    } else {
      for (const char* name : {"q", "k", "v"}) call.set(name, q.view());
      call.set("o", o.view()), call.set("state_pool", pool.view());
    }
    give("read_index", {1, 2});
  }
  void give(const char* name, const std::vector<int64_t>& values, std::vector<int64_t> shape = {},
            DType type = DType::i32) {
    more.push_back(list(values, std::move(shape), type));
    ASSERT_TRUE(call.set(name, more.back().view()));
  }
  void drop(const char* name) { call.set(name, {}); }
  void write_pool() {
    call.set("write_pool", op == Op::conv ? scratch_windows.view() : scratch.view());
  }
  // States of 16 bits.
  void halve() {
    more.push_back(zeros(DType::bf16, {8, 2, 16, 16}));
    call.set("state_pool", more.back().view());
  }
  // Slots 1 to 3 and 4 to 6.
  void table(const std::vector<int64_t>& accepted) {
    give("read_index", {1, 2, 3, 4, 5, 6}, {2, 3});
    give("accepted", accepted);
  }
};

struct Wrong {
  Op op;
  std::function<void(World&)> spoil;
  std::string text;  // behind `op: `
};

TEST(ServingErrors, NameArgumentExpectedAndGot) {
  constexpr Op D = Op::decode, F = Op::forward, C = Op::conv;
  const Wrong all[] = {
      {D, [](World& w) { w.options.null_slot = -2; },
       "null_slot: expected -1 (none) or a slot, got -2"},
      {D, [](World& w) { w.options.seed = 3; },
       "seed: expected none but with states of 16 bits, got states of fp32"},
      {D,
       [](World& w) {
         w.options.seed = 3;
         w.drop("read_index"), w.drop("state_pool");
       },
       "seed: expected none but with states of 16 bits, got states of no dtype (there are none)"},
      {F, [](World& w) { w.options.seed = 3; },
       "seed: expected none (decode alone rounds states after every token), got 3"},
      {C, [](World& w) { w.options.seed = 0; },
       "seed: expected none (decode alone rounds states after every token), got 0"},
      {D,
       [](World& w) {
         w.give("positions", {0, 1});
       },
       "positions: expected none without a seed, got a tensor"},
      {F,
       [](World& w) {
         w.give("positions", {0, 1});
       },
       "positions: expected none without a seed, got a tensor"},
      {D,
       [](World& w) {
         w.halve(), w.options.seed = 3;
         w.give("positions", {0, 1, 2});
       },
       "positions: expected shape [2], got [3]"},
      {D,
       [](World& w) {
         w.halve(), w.options.seed = 3;
         w.give("positions", {0, 1}, {}, DType::u8);
       },
       "positions: expected int32 or int64, got uint8"},
      {C,
       [](World& w) {
         w.options.null_slot = 0;
         w.drop("read_index");
       },
       "null_slot: expected none without a list of slots, got 0"},
      {F,
       [](World& w) {
         w.options.null_slot = 0;
         w.drop("read_index");
       },
       "null_slot: expected none without a list of slots, got 0"},
      {D,
       [](World& w) {
         w.give("has_initial_state", {1, 1});
       },
       "has_initial_state: expected uint8 (bool), got int32"},
      {F, [](World& w) { w.give("has_initial_state", {1}, {}, DType::u8); },
       "has_initial_state: expected shape [2], got [1]"},
      {D,
       [](World& w) {
         w.drop("state_pool"), w.drop("read_index");
         w.give("has_initial_state", {1, 1}, {}, DType::u8);
       },
       "has_initial_state: expected none without an initial state or a pool, got a tensor"},
      {D,
       [](World& w) {
         w.give("accepted", {1, 1});
       },
       "read_index: expected a table [N,T'] with accepted counts, got a list"},
      {D,
       [](World& w) {
         w.give("read_index", {1, 2, 3, 4}, {2, 2});
       },
       "read_index: expected one dimension, got shape [2, 2]"},
      {F,
       [](World& w) {
         w.table({1, 1});
       },
       "write_index: expected a tensor with a table of read slots, got none"},
      {D,
       [](World& w) {
         w.give("read_index", {1, 4}, {2, 1});
         w.give("accepted", {1, 1});
       },
       "read_index: expected at least T = 2 columns, got shape [2, 1]"},
      {D,
       [](World& w) {
         w.table({1, 0});
       },
       "accepted: expected 1 to 3 accepted tokens, got 0 for sequence 1"},
      {D,
       [](World& w) {
         w.table({4, 1});
       },
       "accepted: expected 1 to 3 accepted tokens, got 4 for sequence 0"},
      {D, [](World& w) { w.table({1}); }, "accepted: expected shape [2], got [1]"},
      {D,
       [](World& w) {
         w.drop("state_pool"), w.drop("read_index");
         w.give("accepted", {1, 1});
       },
       "accepted: expected none without a state pool, got a tensor"},
      {D,
       [](World& w) {
         w.give("read_index", {1, 2, 3, 4, 2, 6}, {2, 3});
         w.give("accepted", {1, 1});
       },
       "read_index: expected every slot to be written once, got slot 2 for sequences 0 and 1"},
      {D,
       [](World& w) {
         w.give("read_index", {1, 2, 8, 4, 5, 6}, {2, 3});
         w.give("accepted", {3, 1});
       },
       "read_index: expected slots of -1 to 7, got 8 at 0"},
      {D,
       [](World& w) {
         w.drop("state_pool"), w.drop("read_index");
         w.write_pool();
       },
       "write_pool: expected none without a state pool, got a tensor"},
      {D, [](World& w) { w.write_pool(); },
       "write_index: expected a tensor with a write pool and the other list, got none"},
      {D,
       [](World& w) {
         w.write_pool();
         w.give("write_index", {0, 4});
       },
       "write_index: expected slots of -1 to 3, got 4 at 1"},
      {D,
       [](World& w) {
         w.call.set("write_pool", w.pool.view());
         w.give("write_index", {3, 4});
       },
       "write_pool: expected memory of its own, got an overlap with state_pool"},
      {D,
       [](World& w) {
         w.write_pool();
         w.give("write_index", {2, 2});
       },
       "write_index: expected every slot to be written once, got slot 2 for sequences 0 and 1"},
      {D,
       [](World& w) {
         w.table({3, 3});
         w.give("parents", {-1, 0, -1, 1}, {2, 2});
       },
       "parents: expected a parent before its token, or -1, got 1 at sequence 1, token 1"},
      {D,
       [](World& w) {
         w.table({3, 3});
         w.give("parents", {-1, -2, -1, 0}, {2, 2});
       },
       "parents: expected a parent before its token, or -1, got -2 at sequence 0, token 1"},
      {D,
       [](World& w) {
         w.table({3, 3});
         w.give("parents", {-1, 0, -1, 1 << 30}, {2, 2});
       },
       "parents: expected a parent before its token, or -1, got 1073741824 at sequence 1, token 1"},
      {D,
       [](World& w) {
         w.table({3, 3});
         w.give("parents", {-1, -1}, {2, 1});
       },
       "parents: expected at least T = 2 columns, got shape [2, 1]"},
      {D,
       [](World& w) {
         w.table({3, 1});
         w.give("parents", {-1, -1, -1, -1}, {2, 2});
       },
       "parents: expected the slot that the sequence starts from to last for a token with parent "
       "-1, got slot 4, which token 0 writes, at sequence 1, token 1"},
      {D,
       [](World& w) {
         w.give("parents", {-1, 0, -1, 0}, {2, 2});
       },
       "parents: expected none without a write index per token, got a tensor"},
      {F,
       [](World& w) {
         w.give("parents", {-1, 0, -1, 0}, {2, 2});
       },
       "parents: expected none (decode has trees), got a tensor"},
      {F,
       [](World& w) {
         w.give("ckpt_cu", {0, 1, 1}), w.give("ckpt_tokens", {1}), w.give("ckpt_slots", {2});
         w.call.set("ckpt_states", w.pool.view());
       },
       "ckpt_slots: expected every slot to be written once, got slot 2 for sequences 0 and 1"},
      {F,
       [](World& w) {
         w.give("write_index", {4, 5});
         w.give("ckpt_cu", {0, 1, 1}), w.give("ckpt_tokens", {1}), w.give("ckpt_slots", {2});
         w.call.set("ckpt_states", w.pool.view());
       },
       "ckpt_slots: expected no slot that another sequence writes, got slot 2 for sequence 1, "
       "written by sequence 0"},
      {C,
       [](World& w) {
         w.give("ckpt_cu", {0, 1, 1}), w.give("ckpt_tokens", {3}), w.give("ckpt_slots", {3});
         w.call.set("ckpt_states", w.windows.view());
       },
       "ckpt_tokens: expected 0 to 2, the length of sequence 0, got 3 at 0"},
      {C,
       [](World& w) {
         w.give("ckpt_cu", {0, 1, 1}), w.give("ckpt_tokens", {1});
         w.call.set("ckpt_states", w.windows.view());
       },
       "ckpt_slots: expected a tensor with the other checkpoint lists, got none"},
      {C,
       [](World& w) {
         w.give("accepted", {3, 4});
       },
       "accepted: expected 1 to 3 accepted tokens, got 4 for sequence 1"},
      {C,
       [](World& w) {
         w.give("accepted", {0, 1});
       },
       "accepted: expected 1 to 3 accepted tokens, got 0 for sequence 0"},
      {C,
       [](World& w) {
         w.more.push_back(zeros(DType::f32, {8, 6, 3}));
         w.call.set("state_pool", w.more.back().view());
         w.give("accepted", {1, 1});
       },
       "x: expected at most 1 tokens (S - W + 2, with accepted counts), got 2 for sequence 0"},
      {C,
       [](World& w) {
         w.drop("state_pool"), w.drop("read_index");
         w.give("accepted", {1, 1});
       },
       "accepted: expected none without a state pool, got a tensor"},
      {C,
       [](World& w) {
         w.more.push_back(zeros(DType::f32, {4, 6, 4}));
         w.call.set("write_pool", w.more.back().view());
         w.give("write_index", {0, 1});
       },
       "write_pool: expected shape [4, 6, 5], got [4, 6, 4]"},
      {C,
       [](World& w) {
         w.give("read_index", {1, 2, 3, 4}, {2, 2});
       },
       "read_index: expected one dimension, got shape [2, 2]"},
  };
  for (const Wrong& wrong : all) {
    World w(wrong.op);
    ASSERT_NO_THROW(w.call.run(w.options)) << wrong.text;
    wrong.spoil(w);
    const auto before = w.op == Op::conv ? w.windows.all_bytes() : w.pool.all_bytes();
    try {
      w.call.run(w.options);
      ADD_FAILURE() << "no error: " << wrong.text;
    } catch (const Error& e) {
      EXPECT_EQ(std::string(e.what()), std::string(name(wrong.op)) + ": " + wrong.text);
    }
    EXPECT_EQ(w.op == Op::conv ? w.windows.all_bytes() : w.pool.all_bytes(), before) << wrong.text;
  }
}

TEST(ServingErrors, WhatHasNoGradientIsRefused) {
  World w(Op::forward);
  w.drop("read_index"), w.drop("state_pool");
  const Buffer initial = zeros(DType::f32, {2, 2, 16, 16});
  w.call.set("initial_state", initial.view());
  w.give("has_initial_state", {1, 0}, {}, DType::u8);
  w.options.save = Save::states;
  try {
    w.call.run(w.options);
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(),
                 "forward: has_initial_state: expected none where backward is to run (save), got a "
                 "tensor");
  }
  try {
    l2norm({.null_slot = 0}, {.x = w.q.view(), .out = w.o.view()});
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "l2norm: null_slot: expected none (no slots here), got 0");
  }
}

// ---- Bits -----------------------------------------------------------------------------------

// One thread: that their number changes no bit is other tests' business.

constexpr int64_t H = 2, HV = 4, K = 32, V = 48, W = 4;
constexpr int64_t kChannels = 2 * H * K + HV * V, kGates = 2 * HV;

struct Kind {
  std::string impl;
  DType state;
  StateLayout layout;
};
std::vector<Kind> kinds(Op op) {
  std::vector<Kind> all;
  for (const ImplementationInfo& impl : implementations(op)) {
    if (!impl.runs_here || impl.name == "reference") continue;
    for (DType state : {DType::f32, DType::bf16, DType::f16}) {
      for (StateLayout layout : {StateLayout::kv, StateLayout::vk}) {
        all.push_back({impl.name, state, layout});
      }
    }
  }
  return all;
}

// Tokens of sequences as a layer has them after its projections: one packed row for q, k and v, one
// for b and a. What a row holds depends on the sequence and the token alone.
struct Tokens {
  int64_t B, T;
  Buffer qkv{DType::bf16, {B, T, kChannels}}, ba{DType::bf16, {B, T, kGates}};
  Buffer o{DType::bf16, {B, T, HV* V}};
  Buffer A_log = zeros(DType::f32, {HV}), dt_bias = zeros(DType::f32, {HV});

  Tokens(int64_t batch, int64_t tokens) : B(batch), T(tokens) {}
  void draw(int64_t row, int64_t sequence, int64_t token) {
    const auto fill = [&](Buffer& to, const char* stream, int64_t width, double scale) {
      const Random random(static_cast<uint64_t>(sequence), stream);
      for (int64_t c = 0; c < width; ++c) {
        to.set(row * width + c, scale * random.normal(token * width + c));
      }
    };
    fill(qkv, "qkv", kChannels, 1.0);
    fill(ba, "ba", kGates, 1.0);
  }
  // A slice of a packed row, [B,T,heads,width] or [B,T,heads].
  TensorView slice(const Buffer& rows, int64_t all, int64_t first, int64_t heads,
                   int64_t width) const {
    const auto* data = rows.data() + first * 2;
    if (width == 0)
      return TensorView(data, DType::bf16, {B, T, heads}).with_strides({T * all, all, 1});
    return TensorView(data, DType::bf16, {B, T, heads, width})
        .with_strides({T * all, all, width, 1});
  }
  cases::Call call(Op op) const {
    cases::Call c(op);
    c.set("q", slice(qkv, kChannels, 0, H, K)), c.set("k", slice(qkv, kChannels, H * K, H, K));
    c.set("v", slice(qkv, kChannels, 2 * H * K, HV, V)), c.set("o", slice(o, HV * V, 0, HV, V));
    c.set("beta", slice(ba, kGates, 0, HV, 0)), c.set("g", slice(ba, kGates, HV, HV, 0));
    c.set("A_log", A_log.view()), c.set("dt_bias", dt_bias.view());
    return c;
  }
  std::vector<uint8_t> output(int64_t row) const {
    const uint8_t* at = o.data() + row * HV * V * 2;
    return {at, at + HV * V * 2};
  }
};

Options options_of(const Kind& kind) {
  return {.gate_form = GateForm::softplus,
          .beta_form = BetaForm::sigmoid,
          .state_layout = kind.layout,
          .qk_l2norm = true,
          .num_threads = 1,
          .impl = kind.impl,
          .null_slot = 0};
}
std::vector<int64_t> pool_shape(const Kind& kind, int64_t slots) {
  const bool v_first = kind.layout == StateLayout::vk;
  return {slots, HV, v_first ? V : K, v_first ? K : V};
}

// The outputs of a sequence's first tokens, decoded one by one.
std::vector<std::vector<uint8_t>> one_by_one(const Kind& kind, int64_t sequence, int64_t tokens) {
  std::vector<std::vector<uint8_t>> all;
  const Buffer pool = zeros(kind.state, pool_shape(kind, 2)), slots = list({1});
  for (int64_t t = 0; t < tokens; ++t) {
    Tokens one(1, 1);
    one.draw(0, sequence, t);
    cases::Call call = one.call(Op::decode);
    call.set("state_pool", pool.view()), call.set("read_index", slots.view());
    call.run(options_of(kind));
    all.push_back(one.output(0));
  }
  return all;
}

// Steps of up to four drafted tokens over a table of slots, of which some are accepted: every
// accepted token has the output of a sequence that was decoded alone, token by token.
TEST(Serving, DraftsHaveTheBitsOfTokensOneByOne) {
  constexpr int64_t N = 3, kDrafts = 4, kSteps = 6;
  for (const Kind& kind : kinds(Op::decode)) {
    std::vector<std::vector<std::vector<uint8_t>>> expected;
    for (int64_t n = 0; n < N; ++n) expected.push_back(one_by_one(kind, n, kSteps * kDrafts));
    const Buffer pool = zeros(kind.state, pool_shape(kind, 1 + (N + 1) * kDrafts));
    std::vector<int64_t> slots, accepted(N + 1, 1), done(N, 0), begun = {0, 1, 0, 1};
    for (int64_t i = 0; i < (N + 1) * kDrafts; ++i) {
      slots.push_back(i / kDrafts == 2 ? i % 2 - 1 : 1 + i);  // row 2 of the batch is padding
    }
    const Buffer table = list(slots, {N + 1, kDrafts});
    for (int64_t step = 0; step < kSteps; ++step) {
      Tokens batch(N + 1, kDrafts);
      for (int64_t row = 0; row < (N + 1) * kDrafts; ++row) {
        const int64_t b = row / kDrafts, n = b < 2 ? b : b - 1;
        batch.draw(row, n, done[static_cast<size_t>(std::min(n, N - 1))] + row % kDrafts);
      }
      const Buffer counts = list(accepted, {}, DType::i64), has = list(begun, {}, DType::u8);
      cases::Call call = batch.call(Op::decode);
      call.set("state_pool", pool.view()), call.set("read_index", table.view());
      call.set("accepted", counts.view()), call.set("has_initial_state", has.view());
      run_guarded(call, options_of(kind));
      for (int64_t b = 0; b <= N; ++b) {
        if (b == 2) {
          EXPECT_EQ(batch.output(b * kDrafts), std::vector<uint8_t>(HV * V * 2, 0)) << kind.impl;
          continue;
        }
        const auto n = static_cast<size_t>(b < 2 ? b : b - 1);
        const auto i = static_cast<size_t>(b);
        accepted[i] = 1 + (step * 7 + b * 3) % kDrafts;
        for (int64_t t = 0; t < accepted[i]; ++t) {
          EXPECT_EQ(batch.output(b * kDrafts + t), expected[n][static_cast<size_t>(done[n] + t)])
              << kind.impl << " state " << dtype_name(kind.state) << ", sequence " << n
              << ", token " << done[n] + t;
        }
        done[n] += accepted[i];
        begun[i] = 1;
      }
    }
  }
}

// The same into a second pool: the first one stays as it was.
TEST(Serving, AWritePoolLeavesTheOther) {
  constexpr int64_t kDrafts = 3;
  for (const Kind& kind : kinds(Op::decode)) {
    const auto expected = one_by_one(kind, 1, kDrafts);
    const Buffer pool = zeros(kind.state, pool_shape(kind, 3));
    const Buffer scratch(kind.state, pool_shape(kind, kDrafts));
    const Buffer read = list({2}), write = list({2, 1, -1}, {1, kDrafts});
    const auto before = pool.all_bytes();
    Tokens batch(1, kDrafts);
    for (int64_t t = 0; t < kDrafts; ++t) batch.draw(t, 1, t);
    cases::Call call = batch.call(Op::decode);
    call.set("state_pool", pool.view()), call.set("write_pool", scratch.view());
    call.set("read_index", read.view()), call.set("write_index", write.view());
    Options options = options_of(kind);
    options.null_slot.reset();
    run_guarded(call, options);
    EXPECT_EQ(pool.all_bytes(), before) << kind.impl;
    for (int64_t t = 0; t < kDrafts; ++t) {
      EXPECT_EQ(batch.output(t), expected[static_cast<size_t>(t)]) << kind.impl;
    }
    // The state after the second token, copied by a sequence without tokens, goes on from there.
    const Buffer taken = list({1}), one = list({1}), none = list({0, 0});
    Tokens empty(1, 1);
    empty.draw(0, 1, 0);
    cases::Call commit = empty.call(Op::decode);
    commit.set("cu_seqlens", none.view());
    commit.set("state_pool", scratch.view()), commit.set("write_pool", pool.view());
    commit.set("read_index", taken.view()), commit.set("write_index", one.view());
    run_guarded(commit, options);
    Tokens third(1, 1);
    third.draw(0, 1, 2);
    cases::Call next = third.call(Op::decode);
    next.set("state_pool", pool.view()), next.set("read_index", one.view());
    run_guarded(next, options);
    EXPECT_EQ(third.output(0), expected[2]) << kind.impl << " " << dtype_name(kind.state);
  }
}

// Slices of one packed row, o a slice too, against tensors of their own.
TEST(Serving, SlicesOfAPackedRowChangeNoBit) {
  for (const Op op : {Op::decode, Op::forward}) {
    for (const Kind& kind : kinds(op)) {
      Tokens packed(2, 5);
      for (int64_t row = 0; row < 10; ++row) packed.draw(row, row / 5, row % 5);
      const Buffer pool = zeros(kind.state, pool_shape(kind, 3)), slots = list({1, 2});
      cases::Call call = packed.call(op);
      call.set("state_pool", pool.view()), call.set("read_index", slots.view());
      cases::Call apart = call;
      std::vector<Buffer> copies;
      for (const char* name : {"q", "k", "v", "beta", "g"}) {
        const TensorView from = call.get(name);
        Buffer to(DType::bf16, std::vector<int64_t>(from.shape, from.shape + from.rank));
        for (int64_t i = 0; i < from.numel(); ++i) {
          int64_t rest = i, at = 0;
          for (int32_t d = from.rank - 1; d >= 0; --d) {
            at += rest % from.shape[d] * from.strides[d];
            rest /= from.shape[d];
          }
          to.set(i, load(static_cast<const uint8_t*>(from.data) + at * 2, DType::bf16));
        }
        copies.push_back(to);
        apart.set(name, copies.back().view());
      }
      const Buffer o(DType::bf16, {2, 5, HV, V});
      const Buffer other = zeros(kind.state, pool_shape(kind, 3));
      apart.set("o", o.view()), apart.set("state_pool", other.view());
      run_guarded(call, options_of(kind));
      run_guarded(apart, options_of(kind));
      EXPECT_EQ(std::memcmp(o.data(), packed.o.data(), 10 * HV * V * 2), 0) << kind.impl;
      EXPECT_EQ(pool.all_bytes(), other.all_bytes()) << kind.impl;
    }
  }
}

// Windows with drafted tokens: every accepted token has the output of the whole sequence's
// convolution. The prompt's inputs come from a call on the first W - 1 places.
TEST(Serving, WindowsGoOnFromTheAcceptedToken) {
  constexpr int64_t kDrafts = 3, S = W - 1 + kDrafts, D = 70, kPrompt = 5, kSteps = 9;
  for (const ImplementationInfo& impl : implementations(Op::conv)) {
    if (!impl.runs_here || impl.name == "reference") continue;
    for (const bool channels_last : {false, true}) {
      const Options options{.num_threads = 1, .impl = impl.name, .activation = Activation::silu};
      constexpr int64_t T = kPrompt + kSteps * (kDrafts + 1);
      Buffer x(DType::bf16, {1, T, D}), weight(DType::f32, {D, W}), whole(DType::bf16, {1, T, D});
      const Random random(1, "conv");
      for (int64_t i = 0; i < T * D; ++i) x.set(i, random.normal(i));
      for (int64_t i = 0; i < D * W; ++i) weight.set(i, random.normal(-1 - i));
      conv(options, {.x = x.view(), .weight = weight.view(), .out = whole.view()});
      Buffer pool = channels_last ? Buffer(DType::bf16, {3, D, S}, {D * S, 1, D})
                                  : Buffer(DType::bf16, {3, D, S});
      TensorView first_places = pool.view();
      first_places.shape[2] = W - 1;
      const Buffer slot = list({1});
      const auto rows = [&](const Buffer& of, int64_t first, int64_t count) {
        return TensorView(of.data() + first * D * 2, DType::bf16, {1, count, D});
      };
      Buffer out(DType::bf16, {1, T, D});
      const Buffer never = list({0}, {}, DType::u8);
      conv(options, {.x = rows(x, 0, kPrompt),
                     .weight = weight.view(),
                     .state_pool = first_places,
                     .read_index = slot.view(),
                     .out = rows(out, 0, kPrompt),
                     .has_initial_state = never.view()});
      int64_t done = kPrompt, accepted = 1;
      for (int64_t step = 0; step < kSteps; ++step) {
        const int64_t count = 1 + step % (kDrafts + 1);
        Buffer drafts(DType::bf16, {1, count, D});
        const int64_t right = 1 + (step * 2) % count;  // the others are wrong guesses
        for (int64_t i = 0; i < count * D; ++i) {
          drafts.set(i, i / D < right ? x.get(done * D + i) : 9.0);
        }
        const Buffer counts = list({accepted}), y(DType::bf16, {1, count, D});
        conv(options, {.x = drafts.view(),
                       .weight = weight.view(),
                       .state_pool = pool.view(),
                       .read_index = slot.view(),
                       .out = y.view(),
                       .accepted = counts.view()});
        EXPECT_EQ(
            std::memcmp(y.data(), whole.data() + done * D * 2, static_cast<size_t>(right * D * 2)),
            0)
            << impl.name << " step " << step;
        done += right, accepted = right;
      }
      EXPECT_EQ(std::memcmp(out.data(), whole.data(), kPrompt * D * 2), 0) << impl.name;
    }
  }
}

// Up to 16 drafted tokens, one beyond is refused; every path of a tree has the bits of its tokens
// decoded one by one.
TEST(Serving, TreesHaveTheBitsOfTheirPaths) {
  const std::vector<int64_t> parents = {-1, 0, 1, 1, 0, 4, -1, 6, 7, 2, 3, 9, 11, 5, 8, 14};
  const auto T = static_cast<int64_t>(parents.size());
  std::vector<int64_t> slots;
  for (int64_t t = 0; t < T; ++t) slots.push_back(1 + t);
  const Buffer tree = list(parents, {1, T}), read = list({0}), write = list(slots, {1, T});
  for (const Kind& kind : kinds(Op::decode)) {
    Options options = options_of(kind);
    options.null_slot.reset();
    const Buffer pool = zeros(kind.state, pool_shape(kind, 1 + T));
    Tokens drafts(1, T);
    for (int64_t t = 0; t < T; ++t) drafts.draw(t, 1, t);
    cases::Call call = drafts.call(Op::decode);
    call.set("state_pool", pool.view()), call.set("read_index", read.view());
    call.set("write_index", write.view()), call.set("parents", tree.view());
    run_guarded(call, options);
    for (int64_t last = 0; last < T; ++last) {
      std::vector<int64_t> path;
      for (int64_t t = last; t >= 0; t = parents[static_cast<size_t>(t)]) {
        path.insert(path.begin(), t);
      }
      const Buffer alone = zeros(kind.state, pool_shape(kind, 1));
      Tokens one(1, 1);
      for (int64_t t : path) {
        one.draw(0, 1, t);
        cases::Call step = one.call(Op::decode);
        step.set("state_pool", alone.view());
        step.run(options);
      }
      EXPECT_EQ(drafts.output(last), one.output(0)) << kind.impl << " token " << last;
    }
  }
  Tokens many(1, T + 1);
  const Buffer pool = zeros(DType::f32, {T + 2, HV, K, V});
  const Buffer tall = list(std::vector<int64_t>(static_cast<size_t>(T + 1), -1), {1, T + 1});
  cases::Call call = many.call(Op::decode);
  call.set("state_pool", pool.view()), call.set("read_index", read.view());
  call.set("write_index", tall.view()), call.set("parents", tall.view());
  try {
    call.run(options_of({"", DType::f32, StateLayout::kv}));
    FAIL();
  } catch (const Error& e) {
    EXPECT_STREQ(e.what(), "decode: parents: expected at most 16 drafted tokens, got T = 17");
  }
}

// ---- Rounding by chance ---------------------------------------------------------------------

std::vector<Kind> half_kinds() {
  std::vector<Kind> all = kinds(Op::decode);
  std::erase_if(all, [](const Kind& kind) { return kind.state == DType::f32; });
  return all;
}
// States and outputs after so many tokens of a sequence in calls of up to `most` tokens, beside
// `others` more sequences, from `position` on.
std::vector<uint8_t> rounded_bits(const Kind& kind, Options options, int64_t tokens, int64_t most,
                                  int64_t others, int64_t position, DType positions_type) {
  options.null_slot.reset();
  const int64_t N = 1 + others;
  const Buffer pool = zeros(kind.state, pool_shape(kind, N));
  std::vector<uint8_t> bits;
  for (int64_t done = 0; done < tokens; done += most) {
    const int64_t T = std::min(most, tokens - done);
    Tokens batch(N, T);
    std::vector<int64_t> positions, slots;
    for (int64_t n = 0; n < N; ++n) {  // the sequence is the last of the batch
      for (int64_t t = 0; t < T; ++t) batch.draw(n * T + t, n == others ? 1 : 50 + n, done + t);
      positions.push_back(n == others ? position + done : 7 * n);
      slots.push_back((n + 1) % N);
    }
    const Buffer where = list(positions, {}, positions_type), read = list(slots);
    cases::Call call = batch.call(Op::decode);
    call.set("state_pool", pool.view()), call.set("read_index", read.view());
    call.set("positions", where.view());
    run_guarded(call, options);
    for (int64_t t = 0; t < T; ++t) {
      const std::vector<uint8_t> o = batch.output(others * T + t);
      bits.insert(bits.end(), o.begin(), o.end());
    }
  }
  bits.insert(bits.end(), pool.data(), pool.data() + HV * K * V * 2);  // slot 0
  return bits;
}

// A sequence's bits are those of itself alone, token by token, whatever is beside it and however
// many tokens a call has; another seed or position has others.
TEST(RoundingByChance, DependsOnSeedPositionHeadAndElementAlone) {
  constexpr int64_t kTokens = 6, kFar = int64_t{1} << 40;
  for (const Kind& kind : half_kinds()) {
    Options options = options_of(kind);
    options.seed = 0x123456789ABCDEFu;
    const auto alone = rounded_bits(kind, options, kTokens, 1, 0, 3, DType::i32);
    EXPECT_EQ(rounded_bits(kind, options, kTokens, 4, 0, 3, DType::i64), alone) << kind.impl;
    EXPECT_EQ(rounded_bits(kind, options, kTokens, kTokens, 2, 3, DType::i32), alone) << kind.impl;
    options.num_threads = 3;
    EXPECT_EQ(rounded_bits(kind, options, kTokens, 1, 4, 3, DType::i64), alone) << kind.impl;
    options.num_threads = 1;
    EXPECT_NE(rounded_bits(kind, options, kTokens, 1, 0, 4, DType::i32), alone) << kind.impl;
    EXPECT_NE(rounded_bits(kind, options, kTokens, 1, 0, 3 + kFar, DType::i64), alone) << kind.impl;
    options.seed = *options.seed ^ (uint64_t{1} << 63);
    EXPECT_NE(rounded_bits(kind, options, kTokens, 1, 0, 3, DType::i32), alone) << kind.impl;
  }
}

// Without positions the first token's is 0; a tree's tokens follow their parents.
TEST(RoundingByChance, CountsPositionsFromZeroAndAlongATree) {
  const std::vector<int64_t> parents = {-1, 0, 0, 2, 1, -1, 5};
  const auto T = static_cast<int64_t>(parents.size());
  std::vector<int64_t> slots;
  for (int64_t t = 0; t < T; ++t) slots.push_back(1 + t);
  const Buffer tree = list(parents, {1, T}), read = list({0}), write = list(slots, {1, T});
  for (const Kind& kind : half_kinds()) {
    Options options = options_of(kind);
    options.null_slot.reset();
    options.seed = 99;
    const Buffer pool = zeros(kind.state, pool_shape(kind, 1 + T));
    Tokens drafts(1, T);
    for (int64_t t = 0; t < T; ++t) drafts.draw(t, 1, t);
    cases::Call call = drafts.call(Op::decode);
    call.set("state_pool", pool.view()), call.set("read_index", read.view());
    call.set("write_index", write.view()), call.set("parents", tree.view());
    run_guarded(call, options);
    for (int64_t last = 0; last < T; ++last) {
      std::vector<int64_t> path;
      for (int64_t t = last; t >= 0; t = parents[static_cast<size_t>(t)]) {
        path.insert(path.begin(), t);
      }
      const Buffer alone = zeros(kind.state, pool_shape(kind, 1));
      Tokens one(1, static_cast<int64_t>(path.size()));
      for (size_t i = 0; i < path.size(); ++i) one.draw(static_cast<int64_t>(i), 1, path[i]);
      cases::Call chain = one.call(Op::decode);
      chain.set("state_pool", alone.view());
      chain.run(options);
      const size_t bytes = static_cast<size_t>(HV * K * V) * 2;
      EXPECT_EQ(
          std::memcmp(alone.data(), pool.data() + static_cast<size_t>(1 + last) * bytes, bytes), 0)
          << kind.impl << " token " << last;
    }
  }
}

// Ten tokens that change a state by less than half a step each: to nearest it never moves, by
// chance it moves as far as in fp32, on average over its numbers.
TEST(RoundingByChance, KeepsWhatRoundingToNearestLoses) {
  constexpr int64_t kTokens = 10;
  for (const bool by_chance : {false, true}) {
    Buffer pool = zeros(DType::bf16, {1, 1, 64, 64});
    for (int64_t i = 0; i < 64 * 64; ++i) pool.set(i, 1.0);
    Buffer q = zeros(DType::f32, {1, kTokens, 1, 64}), k = zeros(DType::f32, {1, kTokens, 1, 64});
    Buffer v = zeros(DType::f32, {1, kTokens, 1, 64}), o(DType::f32, {1, kTokens, 1, 64});
    Buffer g = zeros(DType::f32, {1, kTokens, 1});
    for (int64_t t = 0; t < kTokens; ++t) g.set(t, -0.001);  // a quarter of a step below 1
    cases::Call call(Op::decode);
    call.set("q", q.view()), call.set("k", k.view()), call.set("v", v.view());
    call.set("o", o.view()), call.set("g", g.view()), call.set("state_pool", pool.view());
    Options options;
    if (by_chance) options.seed = 1;
    call.run(options);
    double mean = 0;
    for (int64_t i = 0; i < 64 * 64; ++i) mean += pool.get(i) / (64 * 64);
    EXPECT_NEAR(mean, by_chance ? std::exp(-0.001 * kTokens) : 1.0, by_chance ? 3e-4 : 0);
  }
}

// ---- A server -------------------------------------------------------------------------------

// A layer's calls over a pool that sequences come to and leave: prompts with and without a prefix
// that another one left at a multiple of the chunk, drafted tokens accepted and rejected, rows of
// padding. Slots that nobody owns are NaN.
class Server {
 public:
  static constexpr int64_t kDrafts = 3, kBatch = 5, kSlots = 80, kFamily = 128, kChunk = 64;
  static constexpr int64_t S = W - 1 + kDrafts;

  struct Sequence {
    int64_t id = 0, family = 0, prompt = 0, length = 0;
    int64_t done = 0, accepted = 1, window = 0;
    std::vector<int64_t> slots{};
    std::vector<std::vector<uint8_t>> expected{};
  };

  explicit Server(uint64_t seed) : random_(seed, "server") {
    const Random weights(seed, "weight");
    for (int64_t i = 0; i < kChannels * W; ++i) weight_.set(i, weights.uniform(i, -1, 1));
    for (int64_t slot = kSlots - 1; slot > 0; --slot) {
      free_.push_back(slot), free_windows_.push_back(slot);
      spoil(pool_, slot), spoil(windows_, slot);
    }
  }

  void step() {
    if (running_.size() < 8 && below(3) > 0) admit();
    decode();
    std::erase_if(running_, [&](Sequence& s) {
      if (s.done < s.length) return false;
      for (int64_t slot : s.slots) release(pool_, free_, slot);
      release(windows_, free_windows_, s.window);
      ++finished;
      return true;
    });
    if (below(40) == 0 && !prefixes_.empty()) {  // one prefix is forgotten
      const Prefix gone = prefixes_[static_cast<size_t>(below(int64_t(prefixes_.size())))];
      release(pool_, free_, gone.slot), release(windows_, free_windows_, gone.window);
      std::erase_if(prefixes_, [&](const Prefix& p) { return p.slot == gone.slot; });
    }
  }
  int64_t finished = 0, tokens = 0, reused = 0, rejected = 0, steps_at_once = 0;

 private:
  struct Prefix {
    int64_t family, tokens, slot, window;
  };

  int64_t below(int64_t n) { return static_cast<int64_t>(random_.bits(++draws_) % uint64_t(n)); }
  static void spoil(Buffer& of, int64_t slot) {
    const int64_t each = of.view().numel() / kSlots;
    for (int64_t i = 0; i < each; ++i) of.set(slot * each + i, NAN);
  }
  static void release(Buffer& of, std::vector<int64_t>& free, int64_t slot) {
    spoil(of, slot);
    free.insert(free.begin(), slot);
  }
  static int64_t take(std::vector<int64_t>& free) {
    const int64_t slot = free.back();
    free.pop_back();
    return slot;
  }

  // Rows of tokens: what a sequence's projections give, or a wrong guess.
  struct Rows {
    int64_t T;
    Buffer x{DType::bf16, {1, T, kChannels}};
    Tokens tokens{1, T};
    explicit Rows(int64_t count) : T(count) {}
    void draw(int64_t row, const Sequence& s, int64_t token, bool is_right) {
      const int64_t source = !is_right ? -1 - s.id : token < kFamily ? s.family : 100 + s.id;
      const Random random(static_cast<uint64_t>(source), "row");
      for (int64_t c = 0; c < kChannels + kGates; ++c) {
        const double y = random.uniform(token * (kChannels + kGates) + c, -1, 1);
        if (c < kChannels) {
          x.set(row * kChannels + c, y);
        } else {
          tokens.ba.set(row * kGates + c - kChannels, y);
        }
      }
    }
  };
  // The layer: convolution, then the delta rule on slices of its rows; of a decode maybe at once.
  struct Lists {
    std::vector<int64_t> cu{0}, read{}, write{}, windows{}, windows_to{}, accepted{}, has{};
    std::vector<int64_t> ckpt_cu{0}, ckpt_tokens{}, ckpt_slots{}, ckpt_windows{};
  };
  void layer(Rows& rows, const Lists& l, bool is_prefill, Buffer& pool, Buffer& windows,
             bool is_at_once = false) const {
    const auto N = static_cast<int64_t>(l.cu.size()) - 1;
    const Buffer cu = list(l.cu), accepted = list(l.accepted), has = list(l.has, {}, DType::u8);
    const Buffer from = list(l.windows), to = list(l.windows_to), write = list(l.write);
    const Buffer read =
        is_prefill ? list(l.read) : list(l.read, {N, static_cast<int64_t>(l.read.size()) / N});
    const Buffer ckpt_cu = list(l.ckpt_cu), ckpt_tokens = list(l.ckpt_tokens);
    const Buffer ckpt_slots = list(l.ckpt_slots), ckpt_windows = list(l.ckpt_windows);
    const bool has_checkpoints = !l.ckpt_tokens.empty();
    TensorView places = windows.view();
    if (is_prefill) places.shape[2] = W - 1;
    cases::Call conv(Op::conv);
    conv.set("x", rows.x.view()), conv.set("weight", weight_.view());
    conv.set("cu_seqlens", cu.view()), conv.set("out", rows.tokens.qkv.view());
    conv.set("state_pool", places), conv.set("read_index", from.view());
    conv.set("has_initial_state", has.view());
    cases::Call rule = rows.tokens.call(is_prefill ? Op::forward : Op::decode);
    rule.set("cu_seqlens", cu.view()), rule.set("has_initial_state", has.view());
    rule.set("state_pool", pool.view()), rule.set("read_index", read.view());
    if (is_prefill) {
      conv.set("write_index", to.view()), rule.set("write_index", write.view());
    } else {
      conv.set("accepted", accepted.view()), rule.set("accepted", accepted.view());
    }
    if (has_checkpoints) {
      for (cases::Call* call : {&conv, &rule}) {
        call->set("ckpt_cu", ckpt_cu.view()), call->set("ckpt_tokens", ckpt_tokens.view());
      }
      conv.set("ckpt_slots", ckpt_windows.view()), conv.set("ckpt_states", places);
      rule.set("ckpt_slots", ckpt_slots.view()), rule.set("ckpt_states", pool.view());
    }
    Options options{.gate_form = GateForm::softplus,
                    .beta_form = BetaForm::sigmoid,
                    .state_layout = StateLayout::vk,
                    .split = Split::off,
                    .qk_l2norm = true,
                    .num_threads = 1,
                    .null_slot = 0};
    if (is_at_once) {
      StepTensors parts{.conv = conv.as<ConvTensors>(), .decode = rule.as<Tensors>()};
      parts.conv.out = parts.decode.q = parts.decode.k = parts.decode.v = {};
      options.activation = Activation::silu;
      return cases::Call(Op::step, parts).run(options);
    }
    conv.run({.num_threads = 1, .activation = Activation::silu, .null_slot = 0});
    rule.run(options);
  }

  // The whole sequence without company: its prompt, then one token after the other.
  void serve_alone(Sequence& s) const {
    Buffer pool = zeros(DType::f32, {2, HV, V, K}), windows = zeros(DType::bf16, {2, kChannels, S});
    for (int64_t t = 0; t < s.length;) {
      const int64_t count = t == 0 ? s.prompt : 1;
      Rows rows(count);
      for (int64_t i = 0; i < count; ++i) rows.draw(i, s, t + i, true);
      Lists l;
      l.cu = {0, count}, l.read = l.write = l.windows = l.windows_to = l.accepted = {1};
      l.has = {t > 0}, l.ckpt_cu = {0, 0};
      layer(rows, l, t == 0, pool, windows);
      for (int64_t i = 0; i < count; ++i) s.expected.push_back(rows.tokens.output(i));
      t += count;
    }
  }

  void compare(const Sequence& s, int64_t token, const std::vector<uint8_t>& found) {
    ASSERT_EQ(found, s.expected[static_cast<size_t>(token)])
        << "sequence " << s.id << ", prompt " << s.prompt << ", token " << token;
    ++tokens;
  }

  void admit() {
    std::vector<Sequence> arrivals;
    Lists l;
    int64_t T = 0;
    for (int64_t count = 1 + below(2); count > 0; --count) {
      if (free_.size() < 8 || free_windows_.size() < 8) break;
      Sequence s;
      s.id = ++last_id_, s.family = 1 + below(3), s.prompt = 1 + below(200);
      s.length = s.prompt + 1 + below(20);
      serve_alone(s);
      for (int64_t i = 0; i <= kDrafts; ++i) s.slots.push_back(take(free_));
      s.window = take(free_windows_);
      const Prefix* best = nullptr;
      for (const Prefix& p : prefixes_) {
        const bool fits = p.family == s.family && p.tokens < s.prompt;
        if (fits && (best == nullptr || p.tokens > best->tokens)) best = &p;
      }
      s.done = best != nullptr ? best->tokens : 0;
      reused += best != nullptr ? 1 : 0;
      l.read.push_back(best != nullptr ? best->slot : s.slots[1]);
      l.windows.push_back(best != nullptr ? best->window : s.window);
      l.has.push_back(best != nullptr ? 1 : 0);
      l.write.push_back(s.slots[0]), l.windows_to.push_back(s.window);
      T += s.prompt - s.done;
      l.cu.push_back(T);
      for (int64_t at = kChunk; at <= std::min(kFamily, s.prompt); at += kChunk) {
        const bool is_known = std::any_of(prefixes_.begin(), prefixes_.end(), [&](const Prefix& p) {
          return p.family == s.family && p.tokens == at;
        });
        if (is_known || at <= s.done || free_.size() < 20) continue;
        made_.push_back({s.family, at, take(free_), take(free_windows_)});
        l.ckpt_tokens.push_back(at - s.done);
        l.ckpt_slots.push_back(made_.back().slot), l.ckpt_windows.push_back(made_.back().window);
      }
      l.ckpt_cu.push_back(static_cast<int64_t>(l.ckpt_tokens.size()));
      arrivals.push_back(std::move(s));
      // Later arrivals of this call cannot read what it writes.
      for (const Prefix& p : made_) prefixes_to_come_.push_back(p);
      made_.clear();
      if (!prefixes_to_come_.empty()) break;
    }
    if (arrivals.empty()) return;
    Rows rows(T + below(3));  // and rows of padding
    int64_t row = 0;
    for (Sequence& s : arrivals) {
      for (int64_t t = s.done; t < s.prompt; ++t) rows.draw(row++, s, t, true);
    }
    layer(rows, l, true, pool_, windows_);
    row = 0;
    for (Sequence& s : arrivals) {
      for (; s.done < s.prompt; ++s.done) compare(s, s.done, rows.tokens.output(row++));
      running_.push_back(std::move(s));
    }
    prefixes_.insert(prefixes_.end(), prefixes_to_come_.begin(), prefixes_to_come_.end());
    prefixes_to_come_.clear();
  }

  void decode() {
    Lists l;
    std::vector<Sequence*> batch;
    std::vector<int64_t> right;
    int64_t T = 0;
    const int64_t first = running_.empty() ? 0 : below(int64_t(running_.size()));
    for (int64_t row = 0; row < kBatch; ++row) {
      const bool is_padding = below(5) == 0 || row >= int64_t(running_.size());
      Sequence* s = is_padding
                        ? nullptr
                        : &running_[static_cast<size_t>((first + row) % int64_t(running_.size()))];
      if (s != nullptr && s->done >= s->length) s = nullptr;
      const int64_t count = s == nullptr ? below(2) : 1 + below(kDrafts + 1);
      batch.push_back(s);
      right.push_back(s == nullptr ? 0 : std::min(1 + below(count), s->length - s->done));
      for (int64_t i = 0; i <= kDrafts; ++i) {
        l.read.push_back(s == nullptr ? below(2) - 1 : s->slots[static_cast<size_t>(i)]);
      }
      l.windows.push_back(s == nullptr ? 0 : s->window);
      l.accepted.push_back(s == nullptr ? 1 : s->accepted), l.has.push_back(1);
      l.ckpt_cu.push_back(0);
      T += count;
      l.cu.push_back(T);
    }
    Rows rows(T + 1);
    for (size_t b = 0; b < batch.size(); ++b) {
      for (int64_t i = l.cu[b]; i < l.cu[b + 1] && batch[b] != nullptr; ++i) {
        rows.draw(i, *batch[b], batch[b]->done + i - l.cu[b], i - l.cu[b] < right[b]);
      }
    }
    const bool is_at_once = below(2) == 1;
    steps_at_once += is_at_once ? 1 : 0;
    layer(rows, l, false, pool_, windows_, is_at_once);
    const std::vector<uint8_t> zero(HV * V * 2, 0);
    for (size_t b = 0; b < batch.size(); ++b) {
      if (batch[b] == nullptr) {
        for (int64_t i = l.cu[b]; i < l.cu[b + 1]; ++i) EXPECT_EQ(rows.tokens.output(i), zero);
        continue;
      }
      Sequence& s = *batch[b];
      for (int64_t i = 0; i < right[b]; ++i) {
        compare(s, s.done + i, rows.tokens.output(l.cu[b] + i));
      }
      rejected += l.cu[b + 1] - l.cu[b] - right[b];
      s.done += right[b], s.accepted = right[b];
    }
  }

  Random random_;
  int64_t draws_ = 0, last_id_ = 0;
  Buffer weight_{DType::f32, {kChannels, W}};
  Buffer pool_{DType::f32, {kSlots, HV, V, K}}, windows_{DType::bf16, {kSlots, kChannels, S}};
  std::vector<int64_t> free_{}, free_windows_{};
  std::vector<Sequence> running_{};
  std::vector<Prefix> prefixes_{}, made_{}, prefixes_to_come_{};
};

// Every token of every sequence has the bits of the sequence served alone. DELTIC_SOAK_STEPS=10000
// runs long.
TEST(Serving, SoakOfRandomSteps) {
  const char* asked = std::getenv("DELTIC_SOAK_STEPS");
  const int64_t steps = asked != nullptr ? std::atoll(asked) : kSanitized ? 60 : 300;
  Server server(7);
  for (int64_t i = 0; i < steps && !HasFatalFailure(); ++i) server.step();
  EXPECT_GT(server.finished, steps / 20);
  EXPECT_GT(server.reused, 0);
  EXPECT_GT(server.rejected, steps / 2);
  EXPECT_GT(server.steps_at_once, steps / 4);
  RecordProperty("tokens", std::to_string(server.tokens));
}

}  // namespace
}  // namespace deltic::test
