// Memory of a workspace, handed out piece by piece.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deltic {

// Cuts arrays out of one thread's part of a workspace, each aligned to 64 bytes. With a null base
// it only counts, so that one piece of code says both the layout and the size.
class Scratch {
 public:
  explicit Scratch(std::byte* base) : base_(base) {}
  template <class E>
  E* take(int64_t count) {
    E* array = base_ ? reinterpret_cast<E*>(base_ + used_) : nullptr;
    used_ += (static_cast<size_t>(count) * sizeof(E) + 63) / 64 * 64;
    return array;
  }
  size_t used() const { return used_; }

 private:
  std::byte* base_;
  size_t used_ = 0;
};

}  // namespace deltic
