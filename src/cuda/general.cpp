// The general implementation's entry: what it takes, and which kernel an operation runs.
#include "cuda/general.h"

#include "core/check.h"
#include "cuda/device.h"
#include "cuda/saved.h"
#include "cuda/sm80/backward/launch.h"
#include "cuda/sm80/block_gradients/launch.h"
#include "cuda/sm80/inverse/launch.h"
#include "cuda/sm80/recurrence/launch.h"
#include "cuda/sm80/rows/launch.h"
#include "cuda/sm80/scores/launch.h"
#include "cuda/sm80/wy/launch.h"

namespace deltic::gpu {
namespace {

const char* refuse(const Problem& p) {
  if (const char* sentence = refuse_fp64(p)) return sentence;
  if (const char* sentence = refuse_without_code(p)) return sentence;
  if (p.is_gradient) return nullptr;
  switch (p.op) {
    case DELTIC_BACKWARD:
      return backward::refuse(p);
    case DELTIC_FORWARD:
    case DELTIC_DECODE:
    case DELTIC_COMMIT:
      return recurrence::refuse(p);
    case DELTIC_KKT:
    case DELTIC_SCORES:
    case DELTIC_SCORES_INVERSE:
      return scores::refuse(p);
    default:
      return nullptr;
  }
}

size_t workspace_bytes(const Problem& p) {
  if (p.is_gradient) return block_gradients::workspace_bytes(p);
  return p.op == DELTIC_BACKWARD ? backward::workspace_bytes(p) : 0;
}

void run(const Problem& p, std::span<std::byte> workspace, void* stream) {
  if (p.is_gradient) return block_gradients::run(p, workspace, stream);
  switch (p.op) {
    case DELTIC_BACKWARD:
      return backward::run(p, workspace, stream);
    case DELTIC_FORWARD:
      recurrence::run(p, stream);
      // Backward starts from the first token, whatever was kept: the header is all there is.
      if (p.save != DELTIC_SAVE_NONE) write_saved_header(p, static_cast<cudaStream_t>(stream));
      return;
    case DELTIC_DECODE:
    case DELTIC_COMMIT:
      return recurrence::run(p, stream);
    case DELTIC_KKT:
    case DELTIC_SCORES:
    case DELTIC_SCORES_INVERSE:
      return scores::run(p, stream);
    case DELTIC_INVERSE:
      return inverse::run(p, stream);
    case DELTIC_WY:
      return wy::run(p, stream);
    default:
      return rows::run(p, stream);
  }
}

}  // namespace

bool has_general(deltic_op op) {
  return op == DELTIC_FORWARD || op == DELTIC_DECODE || op == DELTIC_BACKWARD ||
         op == DELTIC_COMMIT || (is_block(op) && op != DELTIC_RMSNORM);
}

const Implementation& general() {
  static const Implementation entry{"cuda.general", missing_code, refuse, workspace_bytes, run};
  return entry;
}

}  // namespace deltic::gpu
