// What the checks on the GPU get, and what they leave at the start of the workspace.
#pragma once

#include "core/check.h"
#include "cuda/tile/chunks.cuh"
#include "cuda/tile/slots.cuh"

namespace deltic::gpu::check {

// The first word is what the work kernels look at. While the checks run it is the least of all
// findings' keys (see Key); then `finding` says it in full.
struct Record {
  unsigned long long key;
  uint64_t mark;  // kMark: a checked call left this
  int64_t op;
  Finding finding;
};
inline constexpr uint64_t kMark = 0x64656c74696343'01;  // "delticC", version 1
// A multiple of what any implementation aligns its own part of the workspace to.
inline constexpr size_t kRecordBytes = 1024;
static_assert(sizeof(Record) <= kRecordBytes);

struct Params {
  Tokens tokens;
  int64_t op, B, HV, K, V;  // HV: of all layers
  int64_t heads;            // of one
  int32_t chunk;
  CheckedInputs inputs;
  Rows g;  // of the sums
  int64_t gate_width;
  States state_in, d_final;
  SlotLists slots;
  // conv with accepted tokens: a window of V inputs has room for so many, of which the `taps` - 1
  // before the last accepted one's successor are read.
  Indices window;
  int64_t most, taps;
  // commit: tokens that count, of so many in the record.
  Indices accepted;
  int64_t update_tokens, update_layer;
  bool has_record;                                                    // decode leaves one
  bool has_read_list, has_write_list, has_two_lists, has_write_pool;  // has_write_list: its own
  Indices ckpt_cu, ckpt_tokens, ckpt_slots;
  Indices recurrent_from;
  int64_t ckpt_num_slots;
  bool is_ckpt_in_pool;
  Record* record;
  bool in_step;
  Record* first;  // null, or that of the step's parts before: the one that the work looks at
  // Per slot the lowest number of those who write it; all ones: nobody. Of the pool; of checkpoints
  // and, if they are in the pool, of states; then also of checkpoints alone.
  unsigned long long *pool_owner, *list_owner, *ckpt_owner;
};

}  // namespace deltic::gpu::check
