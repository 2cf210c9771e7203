// The tensors of a step's parts while they are checked: each part beside the others.
#pragma once

#include <cstddef>
#include <cstdint>

#include "deltic/deltic.h"

namespace deltic {

// From a view's first byte to behind its last; none: it has no bytes.
struct MemoryRange {
  intptr_t begin = 0, end = 0;

  explicit operator bool() const { return begin != end; }
  bool meets(const MemoryRange& other) const { return begin < other.end && other.begin < end; }
};

// What stands for the data of rows that lie in the workspace, where no tensor of the caller's is.
alignas(64) inline std::byte in_workspace[64];
inline bool is_between(const deltic_tensor& t) { return t.data == in_workspace; }

class StepMemory {
 public:
  struct Entry {
    const deltic_tensor* tensor;
    const char *prefix, *name;  // `conv.`, `x`
    MemoryRange range;
    bool is_output;
  };
  void add(const Entry& entry) { entries_[count_++] = entry; }
  const Entry* begin() const { return entries_; }
  const Entry* end() const { return entries_ + count_; }

 private:
  static constexpr int kMost = 64;  // tensors of the three structs
  Entry entries_[kMost];
  int count_ = 0;
};

}  // namespace deltic
