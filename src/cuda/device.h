// Calls of the CUDA runtime with their errors turned into ours, and facts about the devices.
#pragma once

#include <cuda_runtime.h>

#include "core/problem.h"

namespace deltic::gpu {

// Fails with DELTIC_RUNTIME_ERROR. The error is taken off the runtime, so the next call starts
// clean.
void check_cuda(cudaError_t error, const char* what);
// After a launch: an error of its configuration.
void check_launch(const char* kernel);

struct Device {
  int major = 0, minor = 0;
  int num_sms = 0;
  size_t l2_bytes = 0, smem_bytes = 0;  // shared memory: the most a CTA may ask for
};
// Read once per process. Null if there is no such device.
const Device* device(int32_t index);

// Null: some GPU here runs code for sm_90; else the sentence why not.
const char* missing_sm90();
// Null: the call's device runs it.
const char* refuse_before_sm90(const Problem& p);

}  // namespace deltic::gpu
