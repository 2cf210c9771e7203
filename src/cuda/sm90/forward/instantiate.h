// One launch of the kernel, and of the planning kernel ahead of it; instantiations/*.cu and plan.cu
// have the code.
#pragma once

#include <cuda_runtime.h>

#include "cuda/sm90/forward/params.h"
#include "cuda/tile/launch.h"

namespace deltic::gpu::forward {

// kWideGate: gates per channel come by ordinary loads (fp32, fp16, or rows that a tensor map does
// not take) instead of bf16 tiles.
struct Maps {
  CUtensorMap q, k, v, g, o;  // g: per channel, else any
};
template <class E, GateKind kGate, deltic_gate_form kForm, bool kWideGate, bool kTransfer>
void launch(const Params& params, const Maps& maps, int num_sms, cudaStream_t stream);
// Of jobs that fill the GPU, gates per head or none: nobody waits for another CTA.
template <class E>
void launch_fused(const Params& params, const Maps& maps, int num_sms, cudaStream_t stream);
// The planning kernel ahead of either: roles, or tickets of fused CTAs.
void launch_plan(const Params& params, GateKind gate, bool is_fused, int num_sms,
                 cudaStream_t stream);
// Ahead of a transfer's: params.forgotten.
void launch_forget(const Params& params, cudaStream_t stream);
// The driver does not run so many CTAs at once on the stream.
[[noreturn]] void refuse_grid(int ctas);

}  // namespace deltic::gpu::forward
