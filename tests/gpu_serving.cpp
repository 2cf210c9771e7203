// Servers' calls on a GPU, what cases cannot express: drafted tokens and trees have the bits of
// tokens decoded one by one, commits, padding that leaves memory alone, graphs replayed with other
// slots in their lists, prompts that leave checkpoints in the pool, lists that make no sense.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cases/call.h"
#include "cases/device.h"
#include "cases/scalar.h"
#include "step_parts.h"
#include "support.h"

namespace deltic::test {
namespace {

using cases::Random;
namespace device = cases::device;
using Bytes = std::vector<uint8_t>;
using Whole = std::vector<int64_t>;

// A contiguous tensor on the GPU.
class Array {
 public:
  Array(DType type, Whole shape, uint8_t fill = 0) : type_(type), shape_(std::move(shape)) {
    int64_t n = 1;
    for (int64_t x : shape_) n *= x;
    bytes_ = static_cast<size_t>(n) * element_bytes(type_);
    memory_ = device::allocate(std::max<size_t>(bytes_, 16));
    device::set(memory_.get(), fill, std::max<size_t>(bytes_, 16));
  }
  void set(const std::vector<double>& values) {
    Bytes host(bytes_);
    for (size_t i = 0; i < values.size(); ++i) {
      uint8_t* at = host.data() + i * element_bytes(type_);
      if (type_ == DType::i32) {
        const auto x = static_cast<int32_t>(values[i]);
        std::memcpy(at, &x, sizeof(x));
      } else if (type_ == DType::i64) {
        const auto x = static_cast<int64_t>(values[i]);
        std::memcpy(at, &x, sizeof(x));
      } else if (type_ == DType::u8) {
        *at = static_cast<uint8_t>(values[i]);
      } else {
        store(at, type_, values[i]);
      }
    }
    device::upload(memory_.get(), reinterpret_cast<const std::byte*>(host.data()), bytes_);
  }
  void set(const Whole& values) { set(std::vector<double>(values.begin(), values.end())); }
  Bytes bytes() const {
    Bytes host(bytes_);
    device::download(reinterpret_cast<std::byte*>(host.data()), memory_.get(), bytes_);
    return host;
  }
  // Entry i of the first dimension.
  Bytes part(int64_t i) const {
    const Bytes all = bytes();
    const auto size = static_cast<std::ptrdiff_t>(bytes_ / static_cast<size_t>(shape_[0]));
    return {all.begin() + i * size, all.begin() + (i + 1) * size};
  }
  TensorView view() const {
    return TensorView(memory_.get(), type_, std::span<const int64_t>(shape_)).on(DeviceType::cuda);
  }

 private:
  DType type_;
  Whole shape_;
  size_t bytes_ = 0;
  std::shared_ptr<std::byte> memory_;
};
Array list(const Whole& values, Whole shape = {}, DType type = DType::i32) {
  if (shape.empty()) shape = {static_cast<int64_t>(values.size())};
  Array a(type, std::move(shape));
  a.set(values);
  return a;
}

constexpr int64_t H = 2, HV = 4, K = 128, V = 64;

struct Kind {
  std::string impl;
  DType state;
  StateLayout layout;
  bool per_channel;
};
std::string name(const Kind& kind) {
  return kind.impl + ", states " + dtype_name(kind.state) +
         (kind.layout == StateLayout::vk ? " V-first" : " K-first") +
         (kind.per_channel ? ", gates per channel" : ", gates per head");
}
std::vector<Kind> kinds(const std::vector<std::string>& impls) {
  std::vector<Kind> all;
  for (const std::string& impl : impls) {
    // Hopper's kernels are not in every build.
    if (impl.starts_with("cuda.sm90.") && !runs_on_gpu(Op::forward, impl)) continue;
    for (DType state : {DType::f32, DType::bf16, DType::f16}) {
      for (StateLayout layout : {StateLayout::kv, StateLayout::vk}) {
        all.push_back({impl, state, layout, false}), all.push_back({impl, state, layout, true});
      }
    }
  }
  return all;
}
std::vector<Kind> decoders() { return kinds({"cuda.decode", "cuda.general"}); }
Whole pool_shape(const Kind& kind, int64_t slots) {
  const bool v_first = kind.layout == StateLayout::vk;
  return {slots, HV, v_first ? V : K, v_first ? K : V};
}
Options options_of(const Kind& kind) {
  return {.gate_form = kind.per_channel ? GateForm::bounded : GateForm::softplus,
          .beta_form = BetaForm::sigmoid,
          .state_layout = kind.layout,
          .split = Split::off,
          .qk_l2norm = true,
          .lower_bound = kind.per_channel ? std::optional<float>(-5.0f) : std::nullopt,
          .impl = kind.impl};
}

// Rows of tokens: what a row holds depends on the sequence and the token alone.
struct Tokens {
  int64_t B, T;
  bool per_channel;
  Array q{DType::bf16, {B, T, H, K}}, k{DType::bf16, {B, T, H, K}}, v{DType::bf16, {B, T, HV, V}};
  Array beta{DType::bf16, {B, T, HV}};
  Array g{DType::bf16, per_channel ? Whole{B, T, HV, K} : Whole{B, T, HV}};
  Array o{DType::bf16, {B, T, HV, V}, 0xFF};
  Array A_log{DType::f32, {HV}};

  // Row i is token rows[i].second of sequence rows[i].first.
  Tokens(int64_t batch, int64_t tokens, const Kind& kind,
         const std::vector<std::pair<int64_t, int64_t>>& rows)
      : B(batch), T(tokens), per_channel(kind.per_channel) {
    const auto fill = [&](Array& to, const char* stream, int64_t width) {
      std::vector<double> x(static_cast<size_t>(B * T * width));
      for (size_t r = 0; r < rows.size(); ++r) {
        const Random random(static_cast<uint64_t>(rows[r].first), stream);
        for (int64_t c = 0; c < width; ++c) {
          x[r * static_cast<size_t>(width) + static_cast<size_t>(c)] =
              random.normal(rows[r].second * width + c);
        }
      }
      to.set(x);
    };
    fill(q, "q", H * K), fill(k, "k", H * K), fill(v, "v", HV * V);
    fill(beta, "beta", HV), fill(g, "g", per_channel ? HV * K : HV);
  }
  cases::Call call(Op op) const {
    cases::Call c(op);
    c.set("q", q.view()), c.set("k", k.view()), c.set("v", v.view()), c.set("o", o.view());
    c.set("beta", beta.view()), c.set("g", g.view()), c.set("A_log", A_log.view());
    return c;
  }
  Bytes output(int64_t row) const {
    const Bytes all = o.bytes();
    constexpr std::ptrdiff_t kBytes = HV * V * 2;
    return {all.begin() + row * kBytes, all.begin() + (row + 1) * kBytes};
  }
};

void run(const cases::Call& call, const Options& options) {
  const size_t bytes = call.workspace_bytes(options);
  const auto memory = device::allocate(std::max<size_t>(bytes, 16));
  call.run(options, {memory.get(), bytes});
  device::synchronize();
}
void run(const cases::Call& call, const Kind& kind, std::optional<int32_t> null_slot = {}) {
  Options options = options_of(kind);
  options.null_slot = null_slot;
  run(call, options);
}

// Tokens of a sequence decoded one by one from zero: their outputs, and the last state.
struct Path {
  std::vector<Bytes> outputs;
  Bytes state;
};
Path one_by_one(const Kind& kind, int64_t sequence, const Whole& tokens) {
  Path path;
  const Array pool(kind.state, pool_shape(kind, 1));
  for (int64_t t : tokens) {
    const Tokens one(1, 1, kind, {{sequence, t}});
    cases::Call call = one.call(Op::decode);
    call.set("state_pool", pool.view());
    run(call, kind);
    path.outputs.push_back(one.output(0));
  }
  path.state = pool.bytes();
  return path;
}
Whole up_to(int64_t count) {
  Whole all;
  for (int64_t i = 0; i < count; ++i) all.push_back(i);
  return all;
}

class GpuServing : public testing::Test {
 protected:
  void SetUp() override {
    const std::string missing = device::missing();
    if (!missing.empty()) GTEST_SKIP() << missing;
  }
};

// Steps of up to three drafted tokens over a table of slots, some accepted; one row is padding and
// some sequences begin. Slots that no list names stay as they were.
TEST_F(GpuServing, DraftsHaveTheBitsOfTokensOneByOne) {
  constexpr int64_t N = 3, kDrafts = 3, kSteps = 4, kRows = N + 1, kSlots = 2 + kRows * kDrafts;
  for (const Kind& kind : decoders()) {
    SCOPED_TRACE(name(kind));
    std::vector<Path> alone;
    for (int64_t n = 0; n < N; ++n) alone.push_back(one_by_one(kind, n, up_to(kSteps * kDrafts)));
    const Array pool(kind.state, pool_shape(kind, kSlots), 0x7F);  // 0x7F7F: 3e38, no NaN
    const Bytes nobodys = pool.part(0), last = pool.part(kSlots - 1);
    Whole slots, accepted(kRows, 1), done(N, 0), begun = {0, 0, 1, 0};
    for (int64_t i = 0; i < kRows * kDrafts; ++i) {
      slots.push_back(i / kDrafts == 2 ? i % 2 - 1 : 1 + i);  // row 2 is padding: 0 and -1
    }
    const Array table = list(slots, {kRows, kDrafts});
    for (int64_t step = 0; step < kSteps; ++step) {
      std::vector<std::pair<int64_t, int64_t>> rows;
      for (int64_t row = 0; row < kRows * kDrafts; ++row) {
        const int64_t b = row / kDrafts, n = b < 2 ? b : N - 1;
        rows.emplace_back(n, done[static_cast<size_t>(n)] + row % kDrafts);
      }
      const Tokens batch(kRows, kDrafts, kind, rows);
      const Array counts = list(accepted, {}, DType::i64), has = list(begun, {}, DType::u8);
      cases::Call call = batch.call(Op::decode);
      call.set("state_pool", pool.view()), call.set("read_index", table.view());
      call.set("accepted", counts.view()), call.set("has_initial_state", has.view());
      run(call, kind, 0);
      for (int64_t b = 0; b < kRows; ++b) {
        const auto i = static_cast<size_t>(b), n = static_cast<size_t>(b < 2 ? b : N - 1);
        if (b == 2) {
          EXPECT_EQ(batch.output(b * kDrafts), Bytes(HV * V * 2, 0));
          continue;
        }
        accepted[i] = 1 + (step * 7 + b * 3) % kDrafts, begun[i] = 1;
        for (int64_t t = 0; t < accepted[i]; ++t) {
          EXPECT_EQ(batch.output(b * kDrafts + t),
                    alone[n].outputs[static_cast<size_t>(done[n] + t)])
              << "sequence " << n << ", token " << done[n] + t;
        }
        done[n] += accepted[i];
      }
    }
    EXPECT_EQ(pool.part(0), nobodys);
    EXPECT_EQ(pool.part(kSlots - 1), last);
    for (int64_t i = 1 + 2 * kDrafts; i < 1 + 3 * kDrafts; ++i) EXPECT_EQ(pool.part(i), nobodys);
  }
}

// Packed, as many tokens as sequences, which is what servers send to decode: a token each, and
// lengths that are anything else. From one slot each, or a row of them that accepted tokens name.
TEST_F(GpuServing, AsManyTokensAsSequencesHaveTheBitsOfTokensOneByOne) {
  constexpr int64_t N = 4, kColumns = 4;
  const std::vector<Whole> steps = {{1, 1, 1, 1}, {0, 1, 2, 1}, {4, 0, 0, 0},
                                    {0, 0, 0, 3}, {1, 0, 0, 2}, {0, 0, 0, 0},
                                    {1, 1, 1, 0}, {0, 0, 4, 0}, {1, 1, 1, 1}};
  for (const Kind& kind : decoders()) {
    std::vector<Path> alone;
    for (int64_t n = 0; n < N; ++n) {
      int64_t tokens = 0;
      for (const Whole& lengths : steps) tokens += lengths[static_cast<size_t>(n)];
      alone.push_back(one_by_one(kind, n, up_to(tokens)));
    }
    for (const bool has_table : {false, true}) {
      SCOPED_TRACE(name(kind) + (has_table ? ", accepted tokens" : ""));
      const int64_t columns = has_table ? kColumns : 1;
      const Array pool(kind.state, pool_shape(kind, 1 + N * columns), 0x7F);
      const Bytes nobodys = pool.part(0);
      Whole slots, accepted(N, 1), done(N, 0), begun(N, 0);
      for (int64_t i = N * columns; i > 0; --i) slots.push_back(i);
      const Array table = has_table ? list(slots, {N, columns}) : list(slots, {}, DType::i64);
      for (const Whole& lengths : steps) {
        std::vector<std::pair<int64_t, int64_t>> rows;
        Whole cu = {0};
        for (int64_t n = 0; n < N; ++n) {
          const auto i = static_cast<size_t>(n);
          for (int64_t t = 0; t < lengths[i]; ++t) rows.emplace_back(n, done[i] + t);
          cu.push_back(static_cast<int64_t>(rows.size()));
        }
        const Tokens batch(1, N, kind, rows);
        const Array offsets = list(cu, {}, has_table ? DType::i64 : DType::i32);
        const Array counts = list(accepted), has = list(begun, {}, DType::u8);
        cases::Call call = batch.call(Op::decode);
        call.set("cu_seqlens", offsets.view()), call.set("state_pool", pool.view());
        call.set("read_index", table.view()), call.set("has_initial_state", has.view());
        if (has_table) call.set("accepted", counts.view());
        run(call, kind, 0);
        for (int64_t row = cu.back(); row < N; ++row) {
          EXPECT_EQ(batch.output(row), Bytes(HV * V * 2, 0)) << "padding, row " << row;
        }
        for (int64_t n = 0; n < N; ++n) {
          const auto i = static_cast<size_t>(n);
          for (int64_t t = 0; t < lengths[i]; ++t) {
            EXPECT_EQ(batch.output(cu[i] + t), alone[i].outputs[static_cast<size_t>(done[i] + t)])
                << "sequence " << n << ", token " << done[i] + t;
          }
          done[i] += lengths[i];
          // Without a token a state is only in a list's slot, and of what had none there is zero.
          if (lengths[i] > 0) accepted[i] = lengths[i];
          if (lengths[i] > 0 || !has_table) begun[i] = 1;
        }
      }
      for (int64_t n = 0; n < N; ++n) {
        const int64_t column = has_table ? accepted[static_cast<size_t>(n)] - 1 : 0;
        EXPECT_EQ(pool.part(slots[static_cast<size_t>(n * columns + column)]),
                  alone[static_cast<size_t>(n)].state)
            << "sequence " << n;
      }
      EXPECT_EQ(pool.part(0), nobodys);
    }
  }
}

// A tree into a scratch pool; the pool stays as it was; sequences without tokens commit a path.
TEST_F(GpuServing, TreesHaveTheBitsOfTheirPaths) {
  const Whole parents = {-1, 0, 1, 1, 0, 4, -1, 6, 7, 2, 3, 9, 11, 5, 8, 14};
  const auto T = static_cast<int64_t>(parents.size());
  Whole two = parents, chain = up_to(T), slots = up_to(2 * T);
  for (int64_t& x : chain) --x;  // the second sequence's is one
  two.insert(two.end(), chain.begin(), chain.end());
  std::reverse(slots.begin(), slots.end());
  std::vector<std::pair<int64_t, int64_t>> rows;
  for (int64_t i = 0; i < 2 * T; ++i) rows.emplace_back(i / T, i % T);
  for (const Kind& kind : decoders()) {
    SCOPED_TRACE(name(kind));
    const Tokens drafts(2, T, kind, rows);
    const Array pool(kind.state, pool_shape(kind, 3)), scratch(kind.state, pool_shape(kind, 2 * T));
    const Bytes before = pool.bytes();
    const Array read = list({1, 2}), write = list(slots, {2, T}), tree = list(two, {2, T});
    cases::Call call = drafts.call(Op::decode);
    call.set("state_pool", pool.view()), call.set("read_index", read.view());
    call.set("write_pool", scratch.view()), call.set("write_index", write.view());
    call.set("parents", tree.view());
    run(call, kind);
    EXPECT_EQ(pool.bytes(), before);
    for (int64_t last : {3, 8, 12, 13, 15}) {
      Whole path;
      for (int64_t t = last; t >= 0; t = parents[static_cast<size_t>(t)]) {
        path.insert(path.begin(), t);
      }
      const Path alone = one_by_one(kind, 0, path);
      EXPECT_EQ(drafts.output(last), alone.outputs.back()) << "token " << last;
      EXPECT_EQ(scratch.part(slots[static_cast<size_t>(last)]), alone.state) << "token " << last;
      // Commit: `accepted` is the column of the path's last token, plus one.
      const Tokens nothing(1, 1, kind, {{0, 0}});
      const Array accepted = list({last + 1, T}), cu = list({0, 0, 0}), to = list({1, 2});
      cases::Call commit = nothing.call(Op::decode);
      commit.set("cu_seqlens", cu.view());
      commit.set("state_pool", scratch.view()), commit.set("read_index", write.view());
      commit.set("accepted", accepted.view());
      commit.set("write_pool", pool.view()), commit.set("write_index", to.view());
      run(commit, kind);
      EXPECT_EQ(pool.part(1), alone.state) << "token " << last;
      EXPECT_EQ(nothing.output(0), Bytes(HV * V * 2, 0));  // a row of no sequence
    }
    EXPECT_EQ(pool.part(2), one_by_one(kind, 1, up_to(T)).state);
    EXPECT_EQ(pool.part(0), Bytes(before.begin(),
                                  before.begin() + static_cast<std::ptrdiff_t>(before.size() / 3)));
  }
}

// In place: a tree over slots of the pool itself.
TEST_F(GpuServing, TreesInThePoolItself) {
  const Whole parents = {-1, 0, 0, 2, -1, 4};
  const auto T = static_cast<int64_t>(parents.size());
  for (const Kind& kind : decoders()) {
    SCOPED_TRACE(name(kind));
    std::vector<std::pair<int64_t, int64_t>> rows;
    for (int64_t t = 0; t < T; ++t) rows.emplace_back(5, t);
    const Tokens drafts(1, T, kind, rows);
    const Array pool(kind.state, pool_shape(kind, 1 + T));
    const Array read = list({0}), write = list({1, 2, 3, 4, 5, 6}, {1, T});
    const Array tree = list(parents, {1, T}, DType::i64);
    cases::Call call = drafts.call(Op::decode);
    call.set("state_pool", pool.view()), call.set("read_index", read.view());
    call.set("write_index", write.view()), call.set("parents", tree.view());
    run(call, kind);
    const std::vector<Whole> paths = {{0}, {0, 1}, {0, 2}, {0, 2, 3}, {4}, {4, 5}};
    for (const Whole& path : paths) {
      const Path alone = one_by_one(kind, 5, path);
      EXPECT_EQ(drafts.output(path.back()), alone.outputs.back()) << "token " << path.back();
      EXPECT_EQ(pool.part(1 + path.back()), alone.state) << "token " << path.back();
    }
  }
}

// Recorded once, replayed with other slots, flags and padding in the lists.
TEST_F(GpuServing, AGraphIsReplayedWithOtherSlots) {
  constexpr int64_t N = 4, kSlots = 9;
  for (const Kind& kind : decoders()) {
    SCOPED_TRACE(name(kind));
    std::vector<std::pair<int64_t, int64_t>> rows;
    for (int64_t n = 0; n < N; ++n) rows.emplace_back(n, 0);
    const Tokens batch(N, 1, kind, rows);
    std::vector<double> numbers(static_cast<size_t>(kSlots * HV * K * V));
    const Random random(3, "pool");
    for (size_t i = 0; i < numbers.size(); ++i) numbers[i] = random.normal(static_cast<int64_t>(i));
    Array pool(kind.state, pool_shape(kind, kSlots));
    Array slots(DType::i32, {N}), has(DType::u8, {N});
    cases::Call call = batch.call(Op::decode);
    call.set("state_pool", pool.view()), call.set("read_index", slots.view());
    call.set("has_initial_state", has.view());
    Options options = options_of(kind);
    options.null_slot = 0;
    const size_t bytes = call.workspace_bytes(options);
    const auto memory = device::allocate(std::max<size_t>(bytes, 16));
    device::Graph graph([&](void* stream) { call.run(options, {memory.get(), bytes}, stream); });
    const std::vector<std::pair<Whole, Whole>> steps = {{{3, 1, 8, 5}, {1, 1, 1, 1}},
                                                        {{0, 2, -1, 7}, {1, 0, 1, 1}},
                                                        {{6, 0, 0, 0}, {0, 0, 0, 0}},
                                                        {{4, 3, 2, 1}, {1, 0, 0, 1}}};
    for (const auto& [step_slots, step_has] : steps) {
      slots.set(step_slots), has.set(step_has);
      pool.set(numbers);
      graph.replay();
      const Bytes replayed = pool.bytes(), o = batch.o.bytes();
      pool.set(numbers);
      const Bytes before = pool.bytes();
      run(call, options);
      EXPECT_EQ(replayed, pool.bytes());
      EXPECT_EQ(o, batch.o.bytes());
      // Slots that the list does not name, and rows without one.
      const size_t size = before.size() / kSlots;
      for (int64_t slot = 0; slot < kSlots; ++slot) {
        const bool is_named =
            slot > 0 && std::count(step_slots.begin(), step_slots.end(), slot) > 0;
        EXPECT_EQ(std::memcmp(before.data() + static_cast<size_t>(slot) * size,
                              replayed.data() + static_cast<size_t>(slot) * size, size) == 0,
                  !is_named)
            << "slot " << slot;
      }
      for (int64_t n = 0; n < N; ++n) {
        const bool is_padding = step_slots[static_cast<size_t>(n)] <= 0;
        EXPECT_EQ(batch.output(n) == Bytes(HV * V * 2, 0), is_padding) << "row " << n;
      }
    }
  }
}

// Prompts over a pool: null slots, sequences that begin, and checkpoints in the pool itself,
// against every prompt alone with tensors of its own.
TEST_F(GpuServing, PromptsLeaveStatesAndCheckpointsInThePool) {
  constexpr int64_t kSlots = 10;
  const Whole lengths = {70, 5, 130, 64}, reads = {3, 4, 0, 5}, writes = {3, 6, 0, 7};
  const Whole has = {1, 0, 1, 0}, cu = {0, 70, 75, 205, 269};
  const Whole ckpt_cu = {0, 2, 3, 4, 5}, ckpt_tokens = {64, 13, 5, 64, 0};
  const Whole ckpt_slots = {8, 1, 2, 9, 0};  // of the third sequence, which is padding; none
  std::vector<std::pair<int64_t, int64_t>> rows;
  for (int64_t n = 0; n < 4; ++n) {
    for (int64_t t = 0; t < lengths[static_cast<size_t>(n)]; ++t) rows.emplace_back(n, t);
  }
  for (const Kind& kind : kinds({"cuda.sm90.forward", "cuda.general"})) {
    SCOPED_TRACE(name(kind));
    std::vector<double> numbers(static_cast<size_t>(kSlots * HV * K * V));
    const Random random(7, "pool");
    for (size_t i = 0; i < numbers.size(); ++i) {
      numbers[i] = 0.1 * random.normal(static_cast<int64_t>(i));
    }
    Array pool(kind.state, pool_shape(kind, kSlots));
    pool.set(numbers);
    const Bytes start = pool.part(3), slot_0 = pool.part(0), slot_9 = pool.part(9);
    const Tokens prompts(1, 269, kind, rows);
    const Array offsets = list(cu), read = list(reads), write = list(writes);
    const Array flags = list(has, {}, DType::u8), c_cu = list(ckpt_cu),
                c_tokens = list(ckpt_tokens);
    const Array c_slots = list(ckpt_slots);
    cases::Call call = prompts.call(Op::forward);
    call.set("cu_seqlens", offsets.view()), call.set("state_pool", pool.view());
    call.set("read_index", read.view()), call.set("write_index", write.view());
    call.set("has_initial_state", flags.view());
    call.set("ckpt_cu", c_cu.view()), call.set("ckpt_tokens", c_tokens.view());
    call.set("ckpt_slots", c_slots.view()), call.set("ckpt_states", pool.view());
    run(call, kind, 0);
    // The prompt alone, its first tokens: o and the last state.
    const auto alone = [&](int64_t n, int64_t tokens, bool has_start) {
      std::vector<std::pair<int64_t, int64_t>> own;
      for (int64_t t = 0; t < tokens; ++t) own.emplace_back(n, t);
      const Tokens one(1, tokens, kind, own);
      Array initial(kind.state, pool_shape(kind, 1)), final_state(kind.state, pool_shape(kind, 1));
      cases::Call single = one.call(Op::forward);
      if (has_start) {
        Array copy(kind.state, pool_shape(kind, kSlots));
        copy.set(numbers);
        TensorView view = copy.view();
        view.data = static_cast<std::byte*>(view.data) + 3 * start.size();
        view.shape[0] = 1;
        single.set("initial_state", view), single.set("final_state", final_state.view());
        run(single, kind);
      } else {
        single.set("initial_state", initial.view()), single.set("final_state", final_state.view());
        run(single, kind);
      }
      return std::pair(one.o.bytes(), final_state.bytes());
    };
    const Bytes o = prompts.o.bytes();
    const auto same_o = [&](int64_t begin, const Bytes& part) {
      return std::equal(part.begin(), part.end(),
                        o.begin() + static_cast<std::ptrdiff_t>(begin * HV * V * 2));
    };
    const auto first = alone(0, 70, true), second = alone(1, 5, false), last = alone(3, 64, false);
    EXPECT_TRUE(same_o(0, first.first) && same_o(70, second.first) && same_o(205, last.first));
    EXPECT_EQ(pool.part(3), first.second);
    EXPECT_EQ(pool.part(6), second.second);
    EXPECT_EQ(pool.part(7), last.second);
    EXPECT_EQ(pool.part(8), alone(0, 64, true).second);
    EXPECT_EQ(pool.part(2), second.second);
    const auto zeros = o.begin() + 75 * HV * V * 2;  // the skipped prompt
    EXPECT_TRUE(std::all_of(zeros, zeros + 130 * HV * V * 2, [](uint8_t x) { return x == 0; }));
    EXPECT_EQ(pool.part(0), slot_0);
    EXPECT_EQ(pool.part(9), slot_9);
  }
}

// A step, in one kernel or in parts, has the bits of the three calls.
TEST_F(GpuServing, StepHasTheBitsOfItsParts) {
  for (const char* lines :
       {"step gate={head,channel} form=softplus dense=5x{1,4,8} H=2 HV=4 K=128 V=128 l2norm=1 "
        "beta=sigmoid act=silu norm={silu,sigmoid} dtype=bf16 wdtype=bf16 odtype=bf16 "
        "sdtype={f32,bf16} state={kv,vk} pool=inplace",
        "step gate={head,channel} form=softplus dense=5x{1,4,8} H=2 HV=4 K=128 V=128 l2norm=1 "
        "beta=sigmoid act=silu norm=off dtype=bf16 wdtype=bf16 sdtype={f32,bf16} state={kv,vk} "
        "pool=inplace",
        "step gate={none,head,channel} dense=6x{1,2} H={1,2,4} HV=4 K={64,128} V=64 l2norm=1 "
        "act=silu norm=silu dtype={bf16,f16} pool={mixed,move} null=1 hasinit={0,1}",
        "step gate={head,channel} seqs=2,4,1,3,1 pad=2 H=2 HV=4 K=64 V=64 l2norm=1 act=silu "
        "norm=silu pool={tokens,drafts} state={kv,vk} dtype={f32,bf16}",
        "step gate=channel dense=4x5 H=2 HV=4 K=128 V=128 l2norm=1 act=silu norm=sigmoid "
        "dtype=bf16 pool={drafts,inplace} record={0,1} state=vk",
        "step gate=head dense=3x2 H=2 HV=4 K=128 V=64 W={2,4} S=7 bias={0,1} act=silu norm=silu "
        "l2norm=1 dtype=bf16 windows={f32,bf16} pool=inplace strided={0,pages} state={kv,vk}"}) {
    for (const std::string& line : cases::expand(lines)) {
      const cases::Case c = cases::parse(line);
      for (const Choice& choice : cases::Instance::shapes_of(c, DeviceType::cuda).explain()) {
        if (choice.accepts) expect_bits_of_parts(c, choice.name, "", DeviceType::cuda);
        if (HasFailure()) return;
      }
    }
  }
}

// Unchecked, lists that make no sense give undefined results, but no slot outside of the pool: what
// lies around it, in the same allocation, stays as it was.
TEST_F(GpuServing, ListsThatMakeNoSenseStayInThePool) {
  constexpr int64_t N = 6, T = 3, kSlots = 4, kAround = 3;
  constexpr int64_t kHuge = int64_t{1} << 30, kHuger = (int64_t{1} << 40) + 1;
  std::vector<std::pair<int64_t, int64_t>> rows;
  for (int64_t i = 0; i < N * T; ++i) rows.emplace_back(i / T, i % T);
  for (const Kind& kind : decoders()) {
    for (const DType type : {DType::i32, DType::i64}) {
      SCOPED_TRACE(name(kind));
      const Tokens batch(N, T, kind, rows);
      const Array all(kind.state, pool_shape(kind, kSlots + 2 * kAround));
      const Bytes outside = all.part(0);
      TensorView pool = all.view();
      pool.data = static_cast<std::byte*>(pool.data) + kAround * outside.size();
      pool.shape[0] = kSlots;
      Whole slots, parents;
      for (int64_t i = 0; i < N * T; ++i) {
        slots.push_back(std::vector<int64_t>{4, -2, kHuge, -kHuge, 6, 2, -3, 5}[size_t(i) % 8]);
        parents.push_back(std::vector<int64_t>{-1, 7, -kHuge, kHuge, 2}[size_t(i) % 5]);
      }
      if (type == DType::i64) slots[0] = kHuger, slots[4] = -kHuger, parents[1] = kHuger;
      const Array read = list({5, -7, kHuge, 4, -1, 6}, {}, type),
                  table = list(slots, {N, T}, type);
      const Array accepted = list({0, -5, kHuge, 4, 1, 3}, {}, type);
      const Array tree = list(parents, {N, T}, type);
      for (const bool by_table : {false, true}) {
        cases::Call call = batch.call(Op::decode);
        call.set("state_pool", pool), call.set("write_index", table.view());
        call.set("read_index", by_table ? table.view() : read.view());
        if (by_table) call.set("accepted", accepted.view());
        call.set("parents", tree.view());
        run(call, kind, 0);
      }
      for (int64_t i = 0; i < kAround; ++i) {
        EXPECT_EQ(all.part(i), outside);
        EXPECT_EQ(all.part(kAround + kSlots + i), outside);
      }
    }
  }
}

}  // namespace
}  // namespace deltic::test
