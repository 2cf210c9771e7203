// The general implementation's entry: what it takes, and which kernel an operation runs.
#include "cuda/general.h"

#include "core/check.h"
#include "cuda/device.h"
#include "cuda/sm80/inverse/launch.h"
#include "cuda/sm80/recurrence/launch.h"
#include "cuda/sm80/rows/launch.h"
#include "cuda/sm80/scores/launch.h"
#include "cuda/sm80/wy/launch.h"

namespace deltic::gpu {
namespace {

const char* refuse(const Problem& p) {
  if (p.op == DELTIC_BACKWARD || p.is_gradient) return "it has no gradients";
  if (p.save != DELTIC_SAVE_NONE) return "it keeps nothing for a backward pass";
  if (const char* sentence = refuse_fp64(p)) return sentence;
  if (const char* sentence = refuse_before_sm90(p)) return sentence;
  switch (p.op) {
    case DELTIC_FORWARD:
    case DELTIC_DECODE:
      return recurrence::refuse(p);
    case DELTIC_KKT:
    case DELTIC_SCORES:
    case DELTIC_SCORES_INVERSE:
      return scores::refuse(p);
    default:
      return nullptr;
  }
}

size_t workspace_bytes(const Problem&) { return 0; }

void run(const Problem& p, std::span<std::byte>, void* stream) {
  switch (p.op) {
    case DELTIC_FORWARD:
    case DELTIC_DECODE:
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
  return op == DELTIC_FORWARD || op == DELTIC_DECODE || is_block(op);
}

const Implementation& general() {
  static const Implementation entry{"cuda.general", missing_sm90, refuse, workspace_bytes, run};
  return entry;
}

}  // namespace deltic::gpu
