// Threads of a CTA on one thread of the host: a stack each, switched by hand.
#pragma once

#include <cstddef>
#include <functional>

namespace deltic::emulator {

// Where a thread goes on. Those of one CTA take turns on one thread of the host.
class Fiber {
 public:
  // Its first turn calls body(argument) on the given stack; that ends by a switch, never by return.
  void begin(std::byte* stack, size_t bytes, void (*body)(void*), void* argument);
  // Leaves `from` here and goes on where `to` was left.
  static void change(Fiber& from, Fiber& to);

 private:
  void* stack_pointer_ = nullptr;
};

}  // namespace deltic::emulator
