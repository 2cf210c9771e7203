// The CUDA backend's implementations, best first, per operation; and what the machine has of GPUs.
// A build without CUDA has the same functions (absent.cpp): empty lists.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/dispatch.h"
#include "core/form.h"
#include "core/saved.h"

namespace deltic::gpu {

// What a build without CUDA says of a call on a GPU.
inline constexpr const char* kNotBuilt =
    "this build has no CUDA support (build where nvcc is found, or with DELTIC_CUDA=ON)";

ImplementationList implementations(deltic_op op);

// Of what forward keeps with `save`, whatever implementation runs.
SavedSizes saved_sizes(const Problem& p, deltic_save save);

// The toolkit and the code in this library (`13.0, sm_90a`); `no` in a build without CUDA.
std::string build_facts();
std::string driver_version();  // of the kernel module; `none`
// One line per GPU; without one a single line that says why.
std::vector<std::string> devices_found();

// SMs of the stream's context, which a green context or MPS makes fewer than the device has; 0: no
// such device. Half a microsecond, no work on the stream: it may be capturing.
int num_sms(int32_t device_index, void* stream);
// The same of a call's stream: the driver is asked once. With the call's device current.
inline int num_sms(const Problem& p) {
  if (p.stream_sms == 0) p.stream_sms = num_sms(p.device_index, p.stream);
  return p.stream_sms;
}

// Fails unless the device exists; in the name of `op`.
void check_device(const char* op, int32_t device_index);

// Checked mode. The checks run on the stream, before the work and in the first check_bytes(p) of
// the workspace, which begins with Problem::record.
size_t check_bytes(const Problem& p);
// first: null, or the memory of a check before it on the stream, which gets the finding if that one
// has found nothing: of a step's parts the first one's record is that of all.
void check_on_device(const Problem& p, std::span<std::byte> memory, void* stream,
                     std::byte* first = nullptr);
// Waits for the stream; fails as the last checked call on this workspace should have.
void fail_as_found(const deltic_buffer& workspace, void* stream);

// The lists of a forward in two forms, from lengths and slots on the device.
void fill_form_lists(const Problem& p, const FormLists& lists, void* stream);

// Makes a device the current one of this thread, and the former one again at the end.
class DeviceScope {
 public:
  explicit DeviceScope(int32_t device_index);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  [[maybe_unused]] int previous_ = -1;
};

}  // namespace deltic::gpu
