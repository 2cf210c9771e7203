// Which tokens are a sequence's, where its state comes from and where states go: tables worked out
// by hand, with the numbers of calls of one sequence each. All implementations find their way by
// the same few lines, so that comparing one with another would show nothing.
#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <set>

#include "support.h"

namespace deltic::test {
namespace {

constexpr int64_t H = 1, HV = 2, K = 8, V = 4, kState = HV * K * V, kSlots = 12;
constexpr float kUntouched = -77;

std::vector<float> drawn(int64_t count, uint64_t seed, double scale, double shift = 0) {
  std::vector<float> x;
  for (int64_t i = 0; i < count; ++i) {
    x.push_back(static_cast<float>(scale * normal(seed, static_cast<uint64_t>(i)) + shift));
  }
  return x;
}
std::vector<float> part(const std::vector<float>& x, int64_t first, int64_t count) {
  return {x.begin() + first, x.begin() + first + count};
}
void expect_near(const std::vector<float>& got, const std::vector<float>& want,
                 const std::string& what) {
  ASSERT_EQ(got.size(), want.size()) << what;
  for (size_t i = 0; i < got.size(); ++i) ASSERT_NEAR(got[i], want[i], 1e-5) << what << ": " << i;
}

// Indices in either dtype.
struct List {
  List(const std::vector<int64_t>& values, std::vector<int64_t> shape, DType type)
      : buffer(values.empty() ? Buffer() : Buffer(type, std::move(shape))) {
    for (size_t i = 0; i < values.size(); ++i) {
      buffer.set_index(static_cast<int64_t>(i), values[i]);
    }
  }
  TensorView view() const { return buffer.view(); }
  Buffer buffer;
};

struct State {
  int64_t sequence, tokens;  // the state of that sequence after so many tokens
};

struct Routing {
  const char* name;
  std::vector<int64_t> offsets;  // cu_seqlens; empty: 3 sequences of 4 tokens in a batch
  bool pool;
  std::vector<int64_t> read, write;
  int64_t table_width;  // of write [N, T']; 0: it is a list
  // What has to come of it. start: a slot, or -1 for zero.
  std::vector<int64_t> start;
  std::map<int64_t, State> slots;
  std::set<int64_t> skipped;
};

const std::vector<int64_t> kOffsets{0, 3, 3, 8, 9, 11};  // lengths 3, 0, 5, 1, 2
constexpr int64_t kPackedTokens = 13;                    // two rows of padding

const Routing kRoutings[] = {
    {"states",
     kOffsets,
     false,
     {},
     {},
     0,
     {0, 1, 2, 3, 4},
     {{0, {0, 3}}, {1, {1, 0}}, {2, {2, 5}}, {3, {3, 1}}, {4, {4, 2}}},
     {}},
    {"states of a batch",
     {},
     false,
     {},
     {},
     0,
     {0, 1, 2},
     {{0, {0, 4}}, {1, {1, 4}}, {2, {2, 4}}},
     {}},
    {"pool without lists",
     kOffsets,
     true,
     {},
     {},
     0,
     {0, 1, 2, 3, 4},
     {{0, {0, 3}}, {1, {1, 0}}, {2, {2, 5}}, {3, {3, 1}}, {4, {4, 2}}},
     {}},
    {"read list alone",
     kOffsets,
     true,
     {7, 2, 9, 0, -1},
     {},
     0,
     {7, 2, 9, 0, -1},
     {{7, {0, 3}}, {2, {1, 0}}, {9, {2, 5}}, {0, {3, 1}}},
     {4}},
    {"write list alone",
     kOffsets,
     true,
     {},
     {11, -1, 3, 4, 5},
     0,
     {11, -1, 3, 4, 5},
     {{11, {0, 3}}, {3, {2, 5}}, {4, {3, 1}}, {5, {4, 2}}},
     {1}},
    {"moved",
     kOffsets,
     true,
     {7, 5, 9, 0, 4},
     {1, 2, 3, 6, 8},
     0,
     {7, 5, 9, 0, 4},
     {{1, {0, 3}}, {2, {1, 0}}, {3, {2, 5}}, {6, {3, 1}}, {8, {4, 2}}},
     {}},
    {"from zero, to nowhere, skipped",
     kOffsets,
     true,
     {7, -1, 9, -1, -1},
     {1, 2, -1, 3, -1},
     0,
     {7, -1, 9, -1, -1},
     {{1, {0, 3}}, {2, {1, 0}}, {3, {3, 1}}},
     {4}},
    {"two read one",
     kOffsets,
     true,
     {7, 7, 7, 0, 0},
     {1, 2, 3, 6, 8},
     0,
     {7, 7, 7, 0, 0},
     {{1, {0, 3}}, {2, {1, 0}}, {3, {2, 5}}, {6, {3, 1}}, {8, {4, 2}}},
     {}},
    {"batch, moved",
     {},
     true,
     {3, -1, 5},
     {4, 0, -1},
     0,
     {3, -1, 5},
     {{4, {0, 4}}, {0, {1, 4}}},
     {}},
    // decode: the slot of the state after every token. Sequence 0 keeps its first and third, 2 its
    // second and last; what a row has behind its sequence's end counts for nothing.
    {"table",
     kOffsets,
     true,
     {7, 5, -1, -1, 4},
     {1,  -1, 2,  -1, -1, -1,  //
      -1, -1, -1, -1, -1, -1,  //
      -1, 3,  -1, -1, 6,  -1,  //
      -1, -1, -1, -1, -1, -1,  //
      -1, -1, -1, -1, -1, -1},
     6,
     {7, 5, -1, -1, 4},
     {{1, {0, 1}}, {2, {0, 3}}, {3, {2, 2}}, {6, {2, 5}}},
     {3}},
};

// Entries of (sequence, tokens) and their slots; -1: unused. Those of the longest sequence are out
// of order.
struct Checkpoint {
  int64_t sequence, tokens, slot;
};
const std::vector<Checkpoint> kCheckpoints{{0, 3, 2},  {0, 0, 5}, {1, 0, 0}, {2, 4, 1},
                                           {2, 1, -1}, {2, 2, 3}, {4, 2, 4}, {4, 0, 6}};

// One call on numbers drawn once, and the same sequences in calls of their own.
struct Call {
  Call(const Routing& routing, Op o, const std::string& name, DType index_type)
      : r(routing), op(o), impl(name), type(index_type) {
    if (r.offsets.empty()) {
      N = 3, B = 3, T = 4;
    } else {
      N = static_cast<int64_t>(r.offsets.size()) - 1, T = kPackedTokens;
    }
    const int64_t rows = B * T;
    q = drawn(rows * H * K, 1, 0.5), k = drawn(rows * H * K, 2, 0.3);
    v = drawn(rows * HV * V, 3, 1), beta = drawn(rows * HV, 4, 0.1, 0.6);
    g = drawn(rows * HV, 5, 0.1, -0.4);
    o_rows.assign(v.size(), NAN);
    pool = drawn((r.pool ? kSlots : N) * kState, 6, 1);
    checkpoints.assign(kSlots * kState, kUntouched);
  }
  int64_t row(int64_t n) const { return r.offsets.empty() ? n * T : r.offsets[size_t(n)]; }
  int64_t length(int64_t n) const {
    return r.offsets.empty() ? T : r.offsets[size_t(n) + 1] - r.offsets[size_t(n)];
  }
  Tensors tensors(int64_t batches, int64_t tokens, int64_t first) {
    return {.q = {q.data() + first * H * K, {batches, tokens, H, K}},
            .k = {k.data() + first * H * K, {batches, tokens, H, K}},
            .v = {v.data() + first * HV * V, {batches, tokens, HV, V}},
            .beta = {beta.data() + first * HV, {batches, tokens, HV}},
            .g = {g.data() + first * HV, {batches, tokens, HV}}};
  }
  void run_op(const Tensors& t, int32_t threads) const {
    const Options options{.num_threads = threads, .impl = impl};
    op == Op::forward ? forward(options, t) : decode(options, t);
  }

  // o and the state after the first `tokens` tokens of a sequence, alone.
  struct Alone {
    std::vector<float> o, state;
  };
  Alone alone(int64_t n, int64_t tokens) {
    const int64_t slot = r.start[size_t(n)];
    const std::vector<float> initial =
        slot < 0 ? std::vector<float>(kState, 0) : part(pool, slot * kState, kState);
    if (tokens == 0) return {{}, initial};
    Alone x{std::vector<float>(static_cast<size_t>(tokens * HV * V)), std::vector<float>(kState)};
    Tensors t = tensors(1, tokens, row(n));
    t.o = {x.o.data(), {1, tokens, HV, V}};
    if (slot >= 0) t.initial_state = {initial.data(), {1, HV, K, V}};
    t.final_state = {x.state.data(), {1, HV, K, V}};
    run_op(t, 1);
    return x;
  }

  // The call; states in `written`, which is the pool's new content or the final states.
  void run_all() {
    Tensors t = tensors(B, T, 0);
    t.o = {o_rows.data(), {B, T, HV, V}};
    const List cu(r.offsets, {N + 1}, type), read(r.read, {N}, type);
    const List write =
        r.table_width > 0 ? List(r.write, {N, r.table_width}, type) : List(r.write, {N}, type);
    std::vector<int64_t> entries(static_cast<size_t>(N) + 1, 0), counts, slots;
    for (const Checkpoint& c : kCheckpoints) {
      if (c.sequence >= N) continue;
      counts.push_back(std::min(c.tokens, length(c.sequence))), slots.push_back(c.slot);
      for (int64_t n = c.sequence; n < N; ++n) ++entries[size_t(n) + 1];
    }
    const auto M = static_cast<int64_t>(counts.size());
    const List ckpt_cu(entries, {N + 1}, type), ckpt_tokens(counts, {M}, type),
        ckpt_slots(slots, {M}, type);
    t.cu_seqlens = cu.view(), t.read_index = read.view(), t.write_index = write.view();
    t.ckpt_cu = ckpt_cu.view(), t.ckpt_tokens = ckpt_tokens.view();
    t.ckpt_slots = ckpt_slots.view();
    t.ckpt_states = {checkpoints.data(), {kSlots, HV, K, V}};
    written = r.pool ? pool : std::vector<float>(pool.size(), NAN);
    if (r.pool) {
      t.state_pool = {written.data(), {kSlots, HV, K, V}};
    } else {
      t.initial_state = {pool.data(), {N, HV, K, V}};
      t.final_state = {written.data(), {N, HV, K, V}};
    }
    run_op(t, 2);
  }

  const Routing& r;
  Op op;
  std::string impl;
  DType type;
  int64_t N = 0, B = 1, T = 0;
  std::vector<float> q{}, k{}, v{}, beta{}, g{}, o_rows{}, pool{}, written{}, checkpoints{};
};

void check(Call& call) {
  const Routing& r = call.r;
  call.run_all();
  std::vector<float> want_o(call.o_rows.size(), 0);  // padding and skipped sequences
  for (int64_t n = 0; n < call.N; ++n) {
    if (r.skipped.contains(n)) continue;
    const std::vector<float> o = call.alone(n, call.length(n)).o;
    std::copy(o.begin(), o.end(), want_o.begin() + call.row(n) * HV * V);
  }
  expect_near(call.o_rows, want_o, "o");
  for (int64_t slot = 0; slot < (r.pool ? kSlots : call.N); ++slot) {
    const auto state = r.slots.find(slot);
    expect_near(part(call.written, slot * kState, kState),
                state == r.slots.end()
                    ? part(call.pool, slot * kState, kState)
                    : call.alone(state->second.sequence, state->second.tokens).state,
                "slot " + std::to_string(slot));
  }
  std::map<int64_t, std::vector<float>> kept;
  for (const Checkpoint& c : kCheckpoints) {
    if (c.sequence >= call.N || c.slot < 0 || r.skipped.contains(c.sequence)) continue;
    kept[c.slot] = call.alone(c.sequence, std::min(c.tokens, call.length(c.sequence))).state;
  }
  for (int64_t slot = 0; slot < kSlots; ++slot) {
    expect_near(part(call.checkpoints, slot * kState, kState),
                kept.contains(slot) ? kept[slot] : std::vector<float>(kState, kUntouched),
                "checkpoint " + std::to_string(slot));
  }
}

TEST(Slots, StatesComeFromAndGoWhereTheListsSay) {
  for (const Routing& routing : kRoutings) {
    for (Op op : {Op::forward, Op::decode}) {
      if (op == Op::forward && routing.table_width > 0) continue;
      for (const std::string& impl : runnable(op)) {
        if (!accepts(op, impl, {.H = H, .HV = HV, .K = K, .V = V})) continue;
        for (DType type : {DType::i32, DType::i64}) {
          SCOPED_TRACE(std::string(routing.name) +
                       (op == Op::forward ? ", forward " : ", decode ") + impl + " " +
                       dtype_name(type));
          Call call(routing, op, impl, type);
          ASSERT_NO_THROW(check(call));
        }
      }
    }
  }
}

// The building blocks and the gradients of packed sequences are those of each sequence alone.
TEST(Slots, BlocksAndGradientsStayInTheirSequence) {
  const std::vector<int64_t> offsets{0, 20, 20, 21, 58};
  constexpr int64_t kTokens = 60;
  const List cu(offsets, {5}, DType::i32);
  const std::vector<float> g = drawn(kTokens * HV, 1, 0.1, -0.4), d_out = drawn(kTokens * HV, 2, 1);
  for (const std::string& impl : runnable(Op::cumsum)) {
    const Options options{.chunk = 16, .impl = impl};
    std::vector<float> out(g.size(), NAN), dg(g.size(), NAN);
    std::vector<float> want_out(g.size(), 0), want_dg(g.size(), 0);
    cumsum(options, {.g = {g.data(), {1, kTokens, HV}},
                     .cu_seqlens = cu.view(),
                     .out = {out.data(), {1, kTokens, HV}}});
    block_backward(Op::cumsum, options,
                   {.forward = {.g = {g.data(), {1, kTokens, HV}}, .cu_seqlens = cu.view()},
                    .d_out = {d_out.data(), {1, kTokens, HV}},
                    .dg = {dg.data(), {1, kTokens, HV}}});
    for (int64_t h = 0; h < HV; ++h) {
      for (size_t n = 0; n + 1 < offsets.size(); ++n) {
        for (int64_t i = offsets[n]; i < offsets[n + 1]; ++i) {
          const int64_t chunk = (i - offsets[n]) / 16;
          for (int64_t j = offsets[n] + 16 * chunk;
               j < std::min(offsets[n] + 16 * (chunk + 1), offsets[n + 1]); ++j) {
            if (j <= i) want_out[size_t(i * HV + h)] += g[size_t(j * HV + h)];
            if (j >= i) want_dg[size_t(i * HV + h)] += d_out[size_t(j * HV + h)];
          }
        }
      }
    }
    expect_near(out, want_out, impl + ": out");
    expect_near(dg, want_dg, impl + ": dg");
  }
}

}  // namespace
}  // namespace deltic::test
