// Binary search in offsets that do not decrease; where they do, some place of the list is found.
#pragma once

#include "cuda/tile/element.cuh"

namespace deltic::gpu {

template <class Int>
struct Found {
  Int last, end;  // end: the one behind it, or 0 of no places
};
// The last of `count` places that has begun, the first where none has. has_begun(i) is asked of
// places after the first alone.
template <class Int, class F>
__device__ inline Found<Int> find_begun(Int count, F&& has_begun) {
  Int last = 0, end = count;  // it is in [last, end)
  while (end - last > 1) {
    const Int middle = (last + end) / 2;
    (has_begun(middle) ? last : end) = middle;
  }
  return {last, end};
}
template <class Int, class F>
__device__ inline Int last_begun(Int count, F&& has_begun) {
  return find_begun(count, has_begun).last;
}
// Lists one behind the other, by their offsets: the last one that begins at entry m or before. It
// has the entry if the next one begins behind m.
template <class Int, class List>
__device__ inline Found<Int> list_of_entry(const List& offsets, Int count, int64_t m) {
  return find_begun(count, [&](Int n) { return load_index(offsets, n) <= m; });
}

}  // namespace deltic::gpu
