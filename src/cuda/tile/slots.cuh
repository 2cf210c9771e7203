// Where a sequence's states come from and go to: the lists of a call, read on the device. An index
// that names no slot of its pool is none, whatever it is.
#pragma once

#include "cuda/tile/sequence.cuh"

namespace deltic::gpu {

// One list serves both directions where there is one; absent: slot n.
struct SlotLists {
  Indices read;      // [N], or with `accepted` a table [N,T']
  Indices write;     // [N], or [N,T']: a slot for every token
  Indices accepted;  // [N]: sequence n reads column accepted[n] - 1
  Indices parents;   // [N,T'], of decode: the token that a token starts from
  Flags has_initial;
  int64_t null_slot = -1;                   // slots up to this one are none
  int64_t read_slots = 0, write_slots = 0;  // of the states that are read and written; 0: of none
  bool is_pool = false, per_token = false;  // per_token: write is a table
};

inline SlotLists slot_lists_of(const Problem& p) {
  return {.read = p.read_index ? p.read_index : p.write_index,
          .write = p.write_index ? p.write_index : p.read_index,
          .accepted = p.read_index.n1 > 0 ? p.accepted : Indices{},  // conv: moves the window
          .parents = p.parents,
          .has_initial = p.has_initial,
          .null_slot = p.null_slot,
          .read_slots = p.state_in ? p.state_in.slots : 0,
          .write_slots = p.state_out ? p.state_out.slots : 0,
          .is_pool = p.is_pool,
          .per_token = p.write_index.n1 > 0};
}

// An entry of a list as a number of 64 or of 32 bits. Of 32 where slots are that few: then it is
// one load without a look at the list's width, so that nothing waits for it before it is used.
template <class Int>
__device__ Int load_entry(const Indices& x, int64_t i, int64_t j = 0) {
  if constexpr (sizeof(Int) == 8) {
    return load_index(x, i, j);
  } else {
    const int64_t at = i * x.s0 + j * x.s1;
    return static_cast<const int*>(x.data)[x.is64 ? 2 * at : at];
  }
}

// -1: none.
template <class Int>
__device__ Int named_slot(Int slot, int64_t null_slot, int64_t slots) {
  return slot > static_cast<Int>(null_slot) && slot < slots ? slot : -1;
}

template <class Int>
__device__ Int listed_read_slot(const SlotLists& x, int64_t n) {
  if (!x.read.present) return n < x.read_slots ? static_cast<Int>(n) : -1;
  Int column = 0;
  if (x.accepted.present) {
    column = load_entry<Int>(x.accepted, n) - 1;
    if (column < 0 || column >= x.read.n1) return -1;
  }
  return named_slot(load_entry<Int>(x.read, n, column), x.null_slot, x.read_slots);
}
template <class Int>
__device__ Int listed_write_slot(const SlotLists& x, int64_t n) {
  if (x.per_token) return -1;
  if (!x.write.present) return n < x.write_slots ? static_cast<Int>(n) : -1;
  return named_slot(load_entry<Int>(x.write, n), x.null_slot, x.write_slots);
}
// The slot of the state after token t, of a table.
template <class Int>
__device__ Int token_slot(const SlotLists& x, int64_t n, Int t) {
  if (t < 0 || t >= x.write.n1) return -1;
  return named_slot(load_entry<Int>(x.write, n, t), x.null_slot, x.write_slots);
}

// is_named: by a list, also where has_initial_state says that the state does not count.
template <class Int>
struct Slots {
  Int from, to;  // -1: zeros; nowhere, or token_slot says where
  bool is_named;
};
template <class Int>
__device__ Slots<Int> find_slots(const SlotLists& x, int64_t n) {
  Slots<Int> s;
  s.from = listed_read_slot<Int>(x, n), s.to = listed_write_slot<Int>(x, n);
  s.is_named = s.from >= 0 || s.to >= 0;
  if (x.has_initial.present && x.has_initial.data[n * x.has_initial.s0] == 0) s.from = -1;
  return s;
}
// A pool has neither a state to start from nor a place for one: o is 0, nothing else is touched.
template <class Int>
__device__ bool is_skipped(const SlotLists& x, int64_t n, Int length, const Slots<Int>& slots) {
  if (!x.is_pool || slots.is_named) return false;
  for (Int t = 0; x.per_token && t < length; ++t) {
    if (token_slot(x, n, t) >= 0) return false;
  }
  return true;
}

// The token whose state token t starts from; -1: where the sequence starts.
template <class Int>
__device__ Int parent_of(const SlotLists& x, int64_t n, Int t) {
  return t < x.parents.n1 ? load_entry<Int>(x.parents, n, t) : t - 1;
}
// Where that state lies, if it is not the one that token t - 1 left.
template <class Int>
struct StateSource {
  bool is_start;  // in the states that are read, else in those that are written
  Int slot;       // -1: zeros
};
template <class Int>
__device__ StateSource<Int> jump_source(const SlotLists& x, int64_t n, Int parent) {
  if (parent < 0) return {true, find_slots<Int>(x, n).from};
  return {false, token_slot(x, n, parent)};
}

}  // namespace deltic::gpu
