// A CUDA runtime without a GPU: counts what the library asks for and runs nothing. Programs link it
// instead of the real one.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace deltic::test::fake {

// What lies behind a handle. Handles may be used again for another context; its id is then another.
struct Context {
  uint64_t id = 0;
  int sms = 0;
};
struct Stream {
  int context = 0;  // index of a context
  int green = -1;   // index of a green context, whose SMs count
};

// Handles of streams are indices of `streams`, those of contexts and green contexts indices + 1.
struct Machine {
  std::vector<Context> contexts, greens;
  std::vector<Stream> streams;
  int current = 0;             // the context of every thread
  bool takes_launches = true;  // the driver's function, else the runtime's alone
  bool is_counted = true;      // else nothing is noted: for times
};
Machine& machine();
void* stream(size_t index);

// Of this thread, since the last time that they were cleared.
struct Seen {
  std::map<std::string, int> calls;   // by the name of the function
  std::vector<unsigned> grids;        // CTAs in x of every launch
  std::vector<const void*> kernels;   // of launches by their handle
  std::vector<const void*> launched;  // the kernel of every launch
};
Seen& seen();

}  // namespace deltic::test::fake
