// Memory of a workspace, handed out piece by piece.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/sizes.h"

namespace deltic {

// Cuts arrays out of one thread's part of a workspace, each aligned to 64 bytes. With a null base
// it only counts, so that one piece of code says both the layout and the size.
class Scratch {
 public:
  explicit Scratch(std::byte* base) : base_(base) {}
  // An array of so many by so many elements. The extents come one by one: their product is checked
  // here.
  template <class E, class... Extents>
  E* take(Extents... extents) {
    E* array = base_ ? reinterpret_cast<E*>(base_ + used_) : nullptr;
    used_ = checked_sum(used_, round_up(checked_product(extents..., sizeof(E)), 64));
    return array;
  }
  size_t used() const { return static_cast<size_t>(used_); }

 private:
  std::byte* base_;
  int64_t used_ = 0;
};

}  // namespace deltic
