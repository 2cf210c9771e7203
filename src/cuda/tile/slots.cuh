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

// What the lists have for a sequence, before it is looked at: whoever has other loads to ask for
// does so in between.
template <class Int>
struct SlotEntries {
  Int read, write;
  uint8_t has_initial;
};
template <class Int>
__device__ SlotEntries<Int> load_slots(const SlotLists& x, int64_t n) {
  SlotEntries<Int> entries{-1, -1, 1};
  Int column = 0;
  if (x.accepted.present) column = load_entry<Int>(x.accepted, n) - 1;
  if (x.read.present && column >= 0 && (column == 0 || column < x.read.n1)) {
    entries.read = load_entry<Int>(x.read, n, column);
  }
  if (x.write.present && !x.per_token) entries.write = load_entry<Int>(x.write, n);
  if (x.has_initial.present) entries.has_initial = x.has_initial.data[n * x.has_initial.s0];
  return entries;
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
__device__ Slots<Int> find_slots(const SlotLists& x, int64_t n, const SlotEntries<Int>& entries) {
  const Int own = static_cast<Int>(n);
  Slots<Int> s;
  s.from = x.read.present     ? named_slot(entries.read, x.null_slot, x.read_slots)
           : n < x.read_slots ? own
                              : -1;
  s.to = x.write.present     ? named_slot(entries.write, x.null_slot, x.write_slots)
         : n < x.write_slots ? own
                             : -1;
  if (x.per_token) s.to = -1;
  s.is_named = s.from >= 0 || s.to >= 0;
  if (entries.has_initial == 0) s.from = -1;
  return s;
}
template <class Int>
__device__ Slots<Int> find_slots(const SlotLists& x, int64_t n) {
  return find_slots<Int>(x, n, load_slots<Int>(x, n));
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
