// The CUDA backend's lists, best first; the general one last.
#include "cuda/cuda.h"
#include "cuda/device.h"

namespace deltic::gpu {
namespace {

struct Lists {
  std::vector<Implementation> of[DELTIC_NUM_OPS];

  Lists() {}
};

}  // namespace

ImplementationList implementations(deltic_op op) {
  static const Lists lists;
  return lists.of[op];
}

}  // namespace deltic::gpu
