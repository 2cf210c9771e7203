// Jobs of one length dealt over fewer CTAs, all of which end at the same time. Pure functions, for
// host and device.
//
// Jobs stand in a row; CTA i has positions [i jobs / ctas, (i + 1) jobs / ctas) of it. A job across
// a border is done by two CTAs one after the other (wrap-around rule): its first chunks at the
// start of CTA i + 1, its last ones at the end of CTA i, which is later, as a share is at least one
// job long.
#pragma once

#include <cuda_runtime.h>

namespace deltic::gpu::schedule {

struct Share {
  unsigned first, end;  // jobs of the CTA, whole or in part
  // In parts of one job, of which there are as many as CTAs: how much of the first job is the last
  // work of the CTA before, and how much of the job at `end - 1` is this CTA's; 0: none.
  unsigned before, after;
};
__host__ __device__ inline Share share_of(unsigned jobs, unsigned ctas, unsigned index) {
  const unsigned begin = index * jobs, end = begin + jobs;
  const unsigned after = end % ctas;
  return {begin / ctas, end / ctas + (after > 0 ? 1u : 0u), begin % ctas, after};
}
// Chunks of a job of `chunks` that are done first, with `later` parts of it done last; at least
// one. All of them: the job is not cut.
__host__ __device__ inline int first_chunks(int chunks, unsigned later, unsigned ctas) {
  const auto n = static_cast<int>(static_cast<long long>(chunks) * (ctas - later) / ctas);
  return n > 0 || chunks == 0 ? n : 1;
}

}  // namespace deltic::gpu::schedule
