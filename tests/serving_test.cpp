// What servers' calls have: null slots, has_initial_state, slots read by accepted tokens, pools
// that are written instead, slices of packed rows; the bits of the same tokens one by one; and
// sentences for what is wrong with such calls.
#include <gtest/gtest.h>

#include <cmath>
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
    for (DType state : {DType::f32, DType::bf16}) {
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
      const Options options{.impl = impl.name, .activation = Activation::silu};
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

}  // namespace
}  // namespace deltic::test
