// How a CPU call is divided among threads: decisions change no bit, so only a look at them sees
// that one went wrong.
#include <gtest/gtest.h>

#include <cstdlib>
#include <vector>

#include "cpu/schedule.h"
#include "denormals.h"

namespace deltic::cpu {
namespace {

// Whoever runs all tests with threads woken for everything does not mean this one.
[[maybe_unused]] const int g_wake = ::unsetenv("DELTIC_WAKE");

Problem problem(int64_t N, int64_t HV, int64_t T, int32_t threads, int32_t chunk = 64,
                int64_t width = 128) {
  Problem p;
  p.B = p.N = N, p.HV = HV, p.T = T, p.threads = threads, p.chunk = chunk;
  p.K = p.V = width;
  return p;
}

TEST(ForwardPlan, ThreadsTasksAndChunksOfARound) {
  struct Row {
    const char* what;
    Problem p;
    int64_t panels;
    ForwardPlan plan;
  };
  const Row rows[] = {
      {"one long task: twice as many chunks as threads", problem(1, 1, 4096, 8), 4, {8, 1, 16}},
      {"no thread without a panel or a chunk", problem(1, 2, 64, 16), 2, {4, 2, 1}},
      {"no thread without a chunk", problem(1, 1, 192, 16), 2, {3, 1, 3}},
      {"a panel for every thread", problem(4, 32, 2048, 8), 4, {8, 2, 8}},
      {"at least 8 chunks", problem(1, 8, 640, 3), 1, {3, 3, 8}},
      {"no more chunks than there are", problem(1, 3, 100, 2, 16), 3, {2, 1, 7}},
      {"all tasks, where panels are few", problem(5, 1, 6400, 32), 3, {32, 5, 13}},
      // 1461 ns for a token and head of 128 x 128, 170 ns of 16 x 16; 25 us are worth a thread.
      {"94 us are worth three threads", problem(1, 1, 64, 8), 4, {3, 1, 1}},
      {"11 us are worth one", problem(1, 1, 64, 8, 64, 16), 4, {1, 1, 1}},
      {"states alone are work", problem(1000, 8, 0, 8), 4, {8, 2, 1}},
      {"no tokens, no states", problem(0, 2, 0, 4), 2, {1, 1, 1}},
  };
  for (const Row& row : rows) {
    const ForwardPlan plan = forward_plan(row.p, row.panels, row.p.chunk);
    EXPECT_EQ(plan.threads, row.plan.threads) << row.what;
    EXPECT_EQ(plan.group, row.plan.group) << row.what;
    EXPECT_EQ(plan.block, row.plan.block) << row.what;
  }
  // Steps shorter than the call's chunks: as many tokens.
  EXPECT_EQ(forward_plan(problem(1, 8, 2048, 3), 1, 16).block, 32);
}

// 8.6 us for a chunk of 64 tokens and 64 channels.
TEST(BlockThreads, AsManyAsAreWorthWaking) {
  const Problem dense = problem(1, 2, 640, 8, 64, 64);
  EXPECT_EQ(block_threads(dense, 2), 6);
  EXPECT_EQ(block_threads(dense, 1), 3);
  EXPECT_EQ(block_threads(dense, 2, 2.0), 8);
  EXPECT_EQ(block_threads(problem(1, 1, 64, 8, 64, 64), 1), 1);
  Problem packed = dense;
  packed.packed = true;
  packed.N = 3;  // each may end in the middle of a chunk
  EXPECT_EQ(block_threads(packed, 1), 4);
}

TEST(HeadsAtOnce, AsManyStatesAsStayInTheCache) {
  constexpr int64_t kKiB = 1 << 10;
  EXPECT_EQ(most_heads_at_once(8, 64 * kKiB, 64), 4);  // K = V = 128: never more than 4
  EXPECT_EQ(most_heads_at_once(8, 128 * kKiB, 64), 4);
  EXPECT_EQ(most_heads_at_once(8, 129 * kKiB, 64), 3);
  EXPECT_EQ(most_heads_at_once(8, 512 * kKiB, 64), 1);
  EXPECT_EQ(most_heads_at_once(8, 1024 * kKiB, 64), 1);
  EXPECT_EQ(most_heads_at_once(3, 64 * kKiB, 64), 3);
  EXPECT_EQ(most_heads_at_once(16, 64 * kKiB, 16), 8);  // short steps: never more than 8
  EXPECT_EQ(most_heads_at_once(16, 128 * kKiB, 16), 4);
}

struct Packed {
  std::vector<int64_t> cu{0};
  Problem p;

  // Lengths in tokens.
  Packed(const std::vector<int64_t>& lengths, int32_t threads) : p(problem(1, 1, 0, threads)) {
    for (const int64_t length : lengths) cu.push_back(cu.back() + length);
    p.N = static_cast<int64_t>(lengths.size()), p.T = cu.back(), p.packed = true;
    p.cu = {cu.data(), true, true, p.N + 1, 0, 1, 0};
  }
};

TaskOrder decide(const Problem& p, int64_t heads, int64_t most, std::vector<int64_t>* order) {
  std::vector<int64_t> loads(static_cast<size_t>(p.threads), -1);
  order->assign(static_cast<size_t>(p.N), -1);
  return order_tasks(p, p.threads, heads, most, order->data(), loads.data());
}

TEST(TaskOrder, LongestFirstThenByNumber) {
  std::vector<int64_t> order;
  decide(Packed({3, 0, 200, 65, 200, 0}, 2).p, 1, 1, &order);
  EXPECT_EQ(order, (std::vector<int64_t>{2, 4, 3, 0, 1, 5}));
  decide(problem(4, 1, 100, 2), 1, 1, &order);
  EXPECT_EQ(order, (std::vector<int64_t>{0, 1, 2, 3}));
}

// Whole tasks where they keep the threads busy to a tenth, with as many heads side by side as that
// allows; else rounds.
TEST(TaskOrder, WholeTasksOrRounds) {
  struct Row {
    const char* what;
    std::vector<int64_t> chunks;  // of each sequence
    int threads;
    int64_t heads, most;
    TaskOrder expected;
  };
  const Row rows[] = {
      {"equal ones", {4, 4, 4, 4}, 4, 1, 1, {true, 1}},
      {"one too many", {4, 4, 4, 4, 4}, 4, 1, 1, {false, 1}},
      {"one thread", {7, 1, 3}, 1, 3, 4, {true, 4}},
      {"a tenth above the mean", {11, 9}, 2, 1, 1, {true, 1}},
      {"a fifth above the mean", {12, 8}, 2, 1, 1, {false, 1}},
      {"the longest first", {1, 1, 2}, 2, 1, 1, {true, 1}},
      {"fewer heads at once for the balance", {1}, 4, 8, 4, {true, 2}},
      {"single heads for the balance", {1}, 2, 6, 4, {true, 1}},
      {"the last heads are fewer", {1}, 2, 5, 2, {true, 2}},
      {"too few heads", {5}, 4, 3, 4, {false, 1}},
      {"empty ones are no work", {6, 0, 0, 6, 0}, 2, 1, 1, {true, 1}},
      {"nothing to do", {0, 0, 0}, 2, 2, 4, {true, 4}},
  };
  for (const Row& row : rows) {
    std::vector<int64_t> lengths, order;
    for (const int64_t n : row.chunks) lengths.push_back(n == 0 ? 0 : 64 * n - 63);  // just begun
    const TaskOrder found = decide(Packed(lengths, row.threads).p, row.heads, row.most, &order);
    EXPECT_EQ(found.is_balanced, row.expected.is_balanced) << row.what;
    EXPECT_EQ(found.heads_at_once, row.expected.heads_at_once) << row.what;
  }
}

#if defined(__x86_64__)
TEST(FlushDenormals, InsideAloneAndForWhoHadItAfterwardsToo) {
  ASSERT_TRUE(test::keeps_denormals());
  {
    const FlushDenormals outer;
    EXPECT_FALSE(test::keeps_denormals());
    { const FlushDenormals inner; }
    EXPECT_FALSE(test::keeps_denormals());
  }
  EXPECT_TRUE(test::keeps_denormals());
}
#endif

}  // namespace
}  // namespace deltic::cpu
