// Hopper's kernels in a build whose DELTIC_CUDA_ARCHS has no 90a: named, and never taken.
#include "cuda/device.h"
#include "cuda/sm90/backward/launch.h"
#include "cuda/sm90/forward/launch.h"

namespace deltic::gpu {
namespace {

constexpr const char* kAbsent = "this build has no code for sm_90a (DELTIC_CUDA_ARCHS)";

// Nothing reaches the other functions: dispatch asks `missing` first.
Implementation absent(const char* name) {
  return {name, [] { return kAbsent; }, [](const Problem&) { return kAbsent; },
          [](const Problem&) -> size_t { return 0; },
          [](const Problem&, std::span<std::byte>, void*) {}};
}

}  // namespace

const Implementation& forward::implementation() {
  static const Implementation entry = absent("cuda.sm90.forward");
  return entry;
}
const Implementation& gradient::implementation() {
  static const Implementation entry = absent("cuda.sm90.backward");
  return entry;
}

}  // namespace deltic::gpu
