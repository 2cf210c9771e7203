// The CUDA backend of a build without CUDA: nothing to choose from.
#include "core/error.h"
#include "cuda/cuda.h"

namespace deltic::gpu {

ImplementationList implementations(deltic_op) { return {}; }
SavedSizes saved_sizes(const Problem&, deltic_save) { return {}; }

std::string build_facts() { return "no"; }
std::string driver_version() { return "none"; }
std::vector<std::string> devices_found() { return {}; }

void check_device(const char* op, int32_t) {
  fail(DELTIC_UNSUPPORTED, op,
       ": no implementation takes this call: this build has no CUDA support");
}

DeviceScope::DeviceScope(int32_t) {}
DeviceScope::~DeviceScope() = default;

}  // namespace deltic::gpu
