// A CTA that runs on the host: its threads take turns, its barriers and copies are played.
//
// Turns are drawn from a seed. A thread runs until it meets the others of its warp, waits or looks
// at something again; which warp comes next is random. What goes by itself on a GPU (bulk copies,
// cp.async, products of a warpgroup) is done at once, as late as the program allows, or at a random
// time, so that a wait that is missing becomes a wrong result.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <random>
#include <unordered_map>
#include <vector>

#include "fiber.h"

namespace deltic::emulator {

// Says what and where, and ends the process: a fault of a kernel is a bug.
[[noreturn]] [[gnu::format(printf, 1, 2)]] void fault(const char* format, ...);

inline constexpr int kWarpLanes = 32;
inline constexpr uint32_t kAllLanes = ~0u;

struct Grid;

// A copy that is under way. Stores read when read() is called and write later.
struct Copy {
  enum class Kind { load, store, small } kind;
  int thread;
  uint64_t group;  // of the thread's commits
  std::function<void(std::vector<std::byte>&)> read;
  std::function<void(const std::vector<std::byte>&)> write;
  std::vector<std::byte> bytes = {};
  bool is_read = false;
};

// A product of one warp of a warpgroup: 16 rows, 2 * registers columns, 16 contraction indices.
struct Product {
  std::array<float*, kWarpLanes> d;
  int registers;
  bool has_a;  // in registers
  std::array<std::array<uint32_t, 4>, kWarpLanes> a;
  uint64_t a_tile, b_tile;
  bool keeps, is_half, is_a_turned, is_b_turned;
  int warp;        // of the warpgroup
  uint64_t group;  // of the warp's commits
};

class Cta {
 public:
  // done: every thread has ended. waits: for the launch ahead, or nothing can happen any more.
  enum class End { done, waits, polls, preempted };

  Cta();
  ~Cta();
  Cta(const Cta&) = delete;

  void begin(Grid& grid, unsigned index, uint64_t seed);
  End run(int turns);
  // The launch ahead is over.
  void go_on();
  bool waits_for_grid() const { return num_waiting_for_grid_ > 0; }
  // Everything still under way.
  void finish_copies();
  std::string where() const;
  const Grid& grid() const { return *grid_; }

  // --- called by the CTA's threads
  // ----------------------------------------------------------------
  static Cta& current();
  static int thread();
  static int lane() { return thread() % kWarpLanes; }

  // Lanes of `mask` at the same instruction, `what`: the last one to come calls all(), with what
  // each gave, then they go on.
  void meet(uint32_t mask, const void* what, void* own,
            void (*all)(void** of_lanes, uint32_t mask));
  // All threads that have not ended; the sum of `value` over them.
  int sync(int value);
  void named_sync(int id, int threads, bool waits);
  void poll();
  // A look that may be one of a loop's: now and then another thread has its turn.
  void look();
  uint64_t clock();

  void barrier_init(uint64_t* at, int arrivals);
  void barrier_arrive(uint64_t* at, int expected_bytes, int arrivals = 1);
  void barrier_complete(uint64_t* at, int bytes);
  bool is_over(uint64_t* at, uint32_t parity);
  void barrier_wait(uint64_t* at, uint32_t parity);

  void add_copy(Copy::Kind kind, std::function<void(std::vector<std::byte>&)> read,
                std::function<void(const std::vector<std::byte>&)> write);
  void commit_small_copies();
  void wait_small_copies(int left);
  void wait_stores(bool only_read);

  void add_product(Product product);  // by one lane for its warp
  void commit_products();
  void wait_products(int left);

  void wait_for_grid();
  void release_next_grid();

 private:
  enum class State : uint8_t { ready, blocked, done };
  struct Thread {
    Fiber fiber;
    State state = State::done;
    bool has_polled = false, waits_for_grid = false;
    const uint64_t* barrier = nullptr;  // mbarrier that it waits at
    uint32_t parity = 0;
    uint64_t commits = 0;  // of cp.async
    const char* at = "";   // what it waits for
  };
  struct Meeting {
    uint32_t mask = 0, arrived = 0;
    const void* what = nullptr;
    std::array<void*, kWarpLanes> own;
  };
  struct Warp {
    std::vector<Meeting> meetings;
    std::vector<Product> products;
    uint64_t commits = 0;
    int num_ready = 0;
  };
  struct NamedBarrier {
    int expected = 0, arrived = 0;
    std::vector<int> waiting;
  };
  struct Mbarrier {
    int expected = 0, pending = 0;
    int64_t bytes = 0;
    uint32_t phase = 0;
    std::vector<int> waiting;
  };

  static void run_thread(void* cta);
  void resume(int t);
  void leave(State state, const char* at);  // the running thread, to run()
  void make_ready(int t);
  void end_thread();
  void complete_sync();
  Mbarrier& mbarrier(uint64_t* at);
  void flip(Mbarrier& b);
  bool finish_some_copy();
  void finish(size_t copy);
  void finish_small(int thread, uint64_t below);
  void multiply_up_to(Warp& warp, uint64_t below);
  bool is_now();  // whether what goes by itself is done at once
  uint32_t random(uint32_t below) { return uint32_t(random_() % below); }

  Grid* grid_ = nullptr;
  unsigned index_ = 0;
  std::minstd_rand random_;
  enum class Mood { at_once, late, random } mood_ = Mood::random;
  Fiber host_;
  std::vector<Thread> threads_;
  std::vector<Warp> warps_;
  std::byte* stacks_ = nullptr;
  size_t stacks_bytes_ = 0;
  bool has_released_ = false;
  int running_ = 0, num_looks_ = 0, num_late_ = 0, num_live_ = 0, num_waiting_for_grid_ = 0;
  int sync_arrived_ = 0, sync_value_ = 0, sync_result_ = 0;
  std::vector<int> sync_waiting_;
  std::array<NamedBarrier, 16> named_;
  std::unordered_map<uint64_t*, Mbarrier> mbarriers_;
  std::vector<Copy> copies_;
};

// d += a b for a whole warp.
void multiply(const Product& product);
// Shared memory of the CTA: addresses of 32 bits, as instructions have them.
uint32_t shared_address(const void* place);
std::byte* shared_place(uint32_t address);

// The threads of `mask` that are at this instruction: all(), with what each gave.
template <class Own, class All>
void together(uint32_t mask, Own& own, All) {
  static const char kWhat = 0;  // another address for every instruction
  Cta::current().meet(mask, &kWhat, &own, [](void** lanes, uint32_t present) {
    All{}(reinterpret_cast<Own**>(lanes), present);
  });
}

}  // namespace deltic::emulator
