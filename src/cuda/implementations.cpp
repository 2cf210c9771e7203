// The CUDA backend's lists, best first; the general one last.
#include "cuda/cuda.h"
#include "cuda/general.h"
#include "cuda/sm80/conv/launch.h"
#include "cuda/sm80/decode/launch.h"
#include "cuda/sm80/move/launch.h"
#include "cuda/sm80/norm/launch.h"
#include "cuda/sm90/backward/launch.h"
#include "cuda/sm90/forward/launch.h"

namespace deltic::gpu {
namespace {

struct Lists {
  std::vector<Implementation> of[DELTIC_NUM_OPS];

  Lists() {
    of[DELTIC_FORWARD].push_back(forward::implementation());
    of[DELTIC_BACKWARD].push_back(gradient::implementation());
    of[DELTIC_DECODE].push_back(decode::implementation());
    of[DELTIC_DECODE].push_back(decode::drafts());
    of[DELTIC_CONV].push_back(conv::implementation());
    of[DELTIC_RMSNORM].push_back(norm::implementation());
    of[DELTIC_MOVE].push_back(move::implementation());
    for (int op = 0; op < DELTIC_NUM_OPS; ++op) {
      if (has_general(static_cast<deltic_op>(op))) of[op].push_back(general());
    }
  }
};

}  // namespace

ImplementationList implementations(deltic_op op) {
  static const Lists lists;
  return lists.of[op];
}

}  // namespace deltic::gpu
