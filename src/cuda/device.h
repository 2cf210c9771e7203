// Calls of the CUDA runtime with their errors turned into ours, and facts about the devices.
#pragma once

#include <cuda_runtime.h>

#include <atomic>

#include "core/problem.h"

namespace deltic::gpu {

// Fails with DELTIC_RUNTIME_ERROR. The error is taken off the runtime, so the next call starts
// clean.
void check_cuda(cudaError_t error, const char* what);
// After a launch: an error of its configuration.
void check_launch(const char* kernel);

// A kernel may have more than 48 KB of shared memory once its context was told so, which takes 0.5
// us on a Xeon: an object per kernel remembers the context that was told last.
class SharedMemory {
 public:
  // The same number of bytes in every call.
  void allow(const void* kernel, size_t bytes, const char* what);

 private:
  std::atomic<uint64_t> context_{0};
};

struct Device {
  int major = 0, minor = 0;
  int num_sms = 0;
  size_t l2_bytes = 0, smem_bytes = 0;  // shared memory: the most a CTA may ask for
  int code = 0;  // version that its code in this build was compiled for, such as 90; 0: none
  bool has_hopper_code = false;
};
// Read once per process. Null if there is no such device.
const Device* device(int32_t index);

// The general kernels. Null: some GPU here runs code of this build; else the sentence why not.
const char* missing_code();
// Null: the call's device does.
const char* refuse_without_code(const Problem& p);
// The same of Hopper's kernels.
const char* missing_sm90();
const char* refuse_before_sm90(const Problem& p);
// Null: a CTA may have so much shared memory on the call's device.
const char* refuse_shared_memory(const Problem& p, size_t bytes);

}  // namespace deltic::gpu
