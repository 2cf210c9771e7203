// Drafted tokens from fp32 states, V-first, K = 64.
#include "cuda/sm80/decode/launch_drafts.cuh"

namespace deltic::gpu::decode {
DELTIC_INSTANTIATE_DRAFTS(64, true);
}  // namespace deltic::gpu::decode
