// The header of what forward keeps for backward, written on the stream.
#include "cuda/device.h"
#include "cuda/ptx/launch_order.cuh"
#include "cuda/saved.h"
#include "cuda/tile/launch.h"

namespace deltic::gpu {
namespace {

__global__ void write_header(const __grid_constant__ SavedHeader header, const uint64_t* record,
                             SavedHeader* to) {
  grid_wait();  // whoever read the buffer before
  if (record == nullptr || *record == ~0ull) *to = header;
}

}  // namespace

void write_saved_header(const Problem& p, cudaStream_t stream) {
  check_cuda(launch_after(write_header, dim3(1), 1, 0, stream, saved_header(p, p.save), p.record,
                          static_cast<SavedHeader*>(p.saved.data)),
             "forward: header of saved");
}

}  // namespace deltic::gpu
