// The CUDA backend of a build without CUDA: nothing to choose from.
#include "core/error.h"
#include "cuda/cuda.h"

namespace deltic::gpu {

ImplementationList implementations(deltic_op) { return {}; }
SavedSizes saved_sizes(const Problem&, deltic_save) { return {}; }

std::string build_facts() { return "no"; }
std::string driver_version() { return "none"; }
std::vector<std::string> devices_found() { return {}; }

int num_sms(int32_t, void*) { return 0; }

void check_device(const char* op, int32_t) {
  fail(DELTIC_UNSUPPORTED, op, ": no implementation takes this call: ", kNotBuilt);
}

size_t check_bytes(const Problem&) { return 0; }
void check_on_device(const Problem&, std::span<std::byte>, void*, std::byte*) {}
void fail_as_found(const deltic_buffer&, void*) {
  fail(DELTIC_UNSUPPORTED,
       "device_error: workspace: expected that of a checked call on a GPU, got one in a build "
       "without CUDA");
}

void fill_form_lists(const Problem&, const FormLists&, void*) {}

DeviceScope::DeviceScope(int32_t) {}
DeviceScope::~DeviceScope() = default;

}  // namespace deltic::gpu
