// Sizes and the header of what forward keeps for backward on the GPU.
#include "cuda/saved.h"

#include <cstring>

#include "core/sizes.h"
#include "cuda/cuda.h"

namespace deltic::gpu {

SavedLayout saved_layout(const Problem& p, deltic_save save) {
  SavedLayout layout;
  if (save == DELTIC_SAVE_NONE) return layout;
  const int64_t rows = round_up(p.V, 16), width = round_up(p.K, 16);
  if (rows > INT32_MAX) throw SizeOverflow();
  layout.segment = save == DELTIC_SAVE_STATES ? segment_chunks(p) : 1;
  layout.tokens = layout.segment * p.chunk;
  layout.per_batch = p.T > 0 ? (p.T - 1) / layout.tokens : 0;
  layout.slots = (p.packed ? 1 : p.B) * layout.per_batch;
  layout.rows = static_cast<int32_t>(rows), layout.width = static_cast<int32_t>(width);
  layout.bytes = static_cast<size_t>(
      checked_sum(kSavedHeaderBytes, checked_product(layout.slots, p.HV, rows, width, 4)));
  return layout;
}

SavedHeader saved_header(const Problem& p, deltic_save save) {
  SavedHeader header{.magic = {},
                     .version = 1,
                     .save = save,
                     .B = p.B,
                     .T = p.T,
                     .N = p.sequences_given(),
                     .H = p.H,
                     .HV = p.HV,
                     .K = p.K,
                     .V = p.V,
                     .chunk = p.chunk,
                     .segment = saved_layout(p, save).segment,
                     .gate = static_cast<int64_t>(p.gate),
                     .dtype = static_cast<int64_t>(p.q.dtype),
                     .is_packed = p.packed ? 1 : 0};
  std::memcpy(header.magic, "delticSG", sizeof(header.magic));
  return header;
}

SavedSizes saved_sizes(const Problem& p, deltic_save save) {
  const SavedLayout layout = saved_layout(p, save);
  return {save == DELTIC_SAVE_NONE ? segment_chunks(p) : layout.segment, layout.slots,
          layout.bytes};
}

}  // namespace deltic::gpu
