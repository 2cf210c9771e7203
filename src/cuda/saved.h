// What forward keeps for backward on the GPU: a header, then the states before every `segment`-th
// chunk of each sequence (DELTIC_SAVE_STATES) or before every chunk (DELTIC_SAVE_ALL).
//
//   header                       kSavedHeaderBytes
//   states  [slot][HV][V'][K']   fp32; V', K': V and K rounded up to 16, what is beyond them is 0
//
// The state before a sequence's first chunk is its initial state and is not kept. A state's slot
// follows from the chunk's first token alone (saved_slot), so neither side needs a list, and
// lengths may stay on the device.
#pragma once

#include <cuda_runtime.h>

#include "core/saved.h"

namespace deltic::gpu {

constexpr int64_t kSavedHeaderBytes = 256;

// What the call was that wrote the buffer. Nothing on a GPU reads it: backward there starts from
// the inputs, whatever is given, and the host asks only that it is aligned memory of its own.
struct SavedHeader {
  char magic[8];  // "delticSG": a buffer of the CPU has other letters
  int64_t version, save, B, T, N, H, HV, K, V, chunk, segment, gate, dtype, is_packed;
};
static_assert(sizeof(SavedHeader) <= kSavedHeaderBytes);
SavedHeader saved_header(const Problem& p, deltic_save save);
// Into p.saved, behind what is on the stream; not if the checks found something.
void write_saved_header(const Problem& p, cudaStream_t stream);

struct SavedLayout {
  int64_t segment = 1;  // chunks from one kept state to the next
  int64_t tokens = 0;   // the same in tokens
  int64_t per_batch = 0, slots = 0;
  int32_t rows = 0, width = 0;  // V', K'
  size_t bytes = 0;
};
SavedLayout saved_layout(const Problem& p, deltic_save save);

// Of the chunk that begins at `token` of the T dimension, chunk j * segment of its sequence, j > 0.
// Packed: a later sequence begins where the one before ends or after, so its first kept chunk is
// `tokens` further on at least, and no slot is used twice.
__host__ __device__ inline int64_t saved_slot(const SavedLayout& layout, int64_t batch,
                                              int64_t token) {
  return batch * layout.per_batch + token / layout.tokens - 1;
}
__host__ __device__ inline float* saved_state(const SavedLayout& layout, void* saved,
                                              int64_t value_heads, int64_t slot, int64_t head) {
  return reinterpret_cast<float*>(static_cast<char*>(saved) + kSavedHeaderBytes) +
         (slot * value_heads + head) * layout.rows * layout.width;
}

}  // namespace deltic::gpu
