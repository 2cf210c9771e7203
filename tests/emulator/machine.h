// The GPU: SMs with room for CTAs, streams, and launches in their order.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "cta.h"

namespace deltic::emulator {

struct Shape {
  dim3 grid;
  unsigned threads, smem;
  // May start before the launch ahead ends, once all of that one's CTAs have said so; all CTAs of
  // the launch start together.
  bool is_early, is_together;
};

// A launch.
struct Grid {
  Shape shape;
  const void* kernel;
  std::function<void()> body;    // one thread of it
  std::shared_ptr<Grid> before;  // on its stream, while it may still be under way
  unsigned num_ctas = 0, num_begun = 0, num_released = 0, num_ended = 0;
  bool is_over() const { return num_ended == num_ctas; }
  bool lets_next_start() const { return num_released == num_ctas; }
  std::string name() const;
};

struct Item {  // on a stream: a launch or something that the host does
  std::shared_ptr<Grid> grid;
  std::function<bool()> work;  // false: not yet
};
Item launch_item(const Shape& shape, const void* kernel, std::function<void()> body);
// What kernels are started by.
cudaError_t launch(const Shape& shape, cudaStream_t stream, const void* kernel,
                   std::function<void()> body);

struct Stream {
  std::deque<Item> items;
  std::vector<Item>* captured = nullptr;  // not null: into a graph instead
  std::deque<std::shared_ptr<Grid>> under_way;
};

// What the GPU is like, from the environment: DELTIC_EMULATED_SMS, _HELD, _SEED.
struct Settings {
  int sms = 16;
  int held = 0;  // SMs that nothing starts on before everything else is stuck or over
  uint64_t seed = 1;
};

class Machine {
 public:
  static Machine& get();

  Settings settings;

  // A null stream waits for all others, and they for it.
  void add(cudaStream_t stream, Item item);
  // Runs all that was asked for.
  void drain();
  Stream& stream(cudaStream_t handle);
  cudaError_t refuse(const Shape& shape) const;

  std::byte* allocate(size_t bytes);
  void free(std::byte* place);
  bool owns(const void* place);
  bool holds(const void* place);  // the same for device code, which runs while the lock is held

  uint64_t clock() { return clock_ += 20; }
  std::recursive_mutex mutex;

 private:
  struct Sm {
    unsigned threads = 0, smem = 0, ctas = 0;
  };
  struct Seat;  // where a CTA runs: storage of a thread of the host, with its shared memory
  Machine();
  ~Machine();

  bool start_items();
  bool dispatch();
  int place_for(const Shape& shape, const std::vector<Sm>& sms) const;
  void begin(const std::shared_ptr<Grid>& grid, int sm);
  void end(size_t running);
  [[noreturn]] void say_stuck();

  Stream null_;
  std::map<cudaStream_t, std::unique_ptr<Stream>> streams_;
  std::vector<std::shared_ptr<Grid>> active_;
  std::vector<Sm> sms_;
  struct Running {
    Seat* seat;
    std::shared_ptr<Grid> grid;
    int sm;
    bool waits;  // for the launch ahead
  };
  std::vector<Running> running_;
  std::vector<std::unique_ptr<Seat>> seats_;
  std::vector<Seat*> free_seats_;
  std::map<std::byte*, size_t> memory_;
  std::mt19937_64 random_;
  uint64_t clock_ = 0;
  int held_ = 0;
};

}  // namespace deltic::emulator
