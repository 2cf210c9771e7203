// What the checks on the GPU get, and what they leave at the start of the workspace.
#pragma once

#include "core/check.h"
#include "cuda/tile/chunks.cuh"

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
  int64_t op, B, HV, K, V;
  int32_t chunk;
  CheckedInputs inputs;
  Rows g;  // of the sums
  int64_t gate_width;
  States state_in, d_final;
  bool is_pool;
  Indices read_index, write_index, ckpt_cu, ckpt_tokens, ckpt_slots;
  int64_t ckpt_num_slots;
  Record* record;
  // Per slot the lowest number of those who write it; all ones: nobody.
  unsigned long long *pool_owner, *ckpt_owner;
};

}  // namespace deltic::gpu::check
