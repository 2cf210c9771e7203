// The doors of checked mode: kernels before the work, and what they found.
#include <cuda_runtime.h>

#include <algorithm>

#include "core/error.h"
#include "cuda/cuda.h"
#include "cuda/device.h"
#include "cuda/sm80/check/kernel.cuh"
#include "cuda/tile/grid.h"
#include "cuda/tile/launch.h"

namespace deltic::gpu {
namespace {

// Owners of slots behind the record.
int64_t pool_owners(const Problem& p) {
  return p.is_pool && p.state_out && (p.read_index || p.write_index) ? p.state_out.slots : 0;
}
int64_t list_owners(const Problem& p) { return p.ckpt ? p.ckpt.slots : 0; }
int64_t ckpt_owners(const Problem& p) { return p.is_ckpt_in_pool ? p.ckpt.slots : 0; }
constexpr size_t kOwnerBytes = sizeof(unsigned long long);

check::Params params_of(const Problem& p, std::span<std::byte> memory, std::byte* first) {
  auto* const owners = reinterpret_cast<unsigned long long*>(memory.data() + check::kRecordBytes);
  auto* const list_owner = owners + pool_owners(p);
  return {.tokens = tokens_of(p),
          .op = p.op,
          .B = p.B,
          .HV = p.HV * p.layers,
          .K = p.K,
          .V = p.V,
          .heads = p.HV,
          .chunk = p.chunk,
          .inputs = checked_inputs(p),
          .g = p.g,
          .gate_width = p.gate == Gate::channel ? p.K : 1,
          .state_in = p.state_in,
          .d_final = p.d_final,
          .slots = slot_lists_of(p),
          .window = p.op == DELTIC_CONV ? p.accepted : Indices{},
          .most = p.V - p.taps + 2,
          .taps = p.taps,
          .accepted = p.op == DELTIC_COMMIT ? p.accepted : Indices{},
          .update_tokens = p.update_tokens,
          .update_layer = p.update_layer,
          .has_record = p.updates && p.op == DELTIC_DECODE,
          .has_read_list = p.read_index.present,
          .has_write_list = p.write_index && p.write_index.data != p.read_index.data,
          .has_two_lists = p.read_index && p.write_index,
          .has_write_pool = p.has_write_pool,
          .ckpt_cu = p.ckpt_cu,
          .ckpt_tokens = p.ckpt_tokens,
          .ckpt_slots = p.ckpt_slots,
          .recurrent_from = p.recurrent_from,
          .ckpt_num_slots = p.ckpt.slots,
          .is_ckpt_in_pool = p.is_ckpt_in_pool,
          .record = reinterpret_cast<check::Record*>(memory.data()),
          .in_step = p.in_step,
          .first = reinterpret_cast<check::Record*>(first),
          .pool_owner = owners,
          .list_owner = list_owner,
          .ckpt_owner = p.is_ckpt_in_pool ? list_owner + list_owners(p) : list_owner};
}

}  // namespace

size_t check_bytes(const Problem& p) {
  const int64_t num_owners = pool_owners(p) + list_owners(p) + ckpt_owners(p);
  const size_t owners = static_cast<size_t>(num_owners) * kOwnerBytes;
  return check::kRecordBytes +
         (owners + check::kRecordBytes - 1) / check::kRecordBytes * check::kRecordBytes;
}

void check_on_device(const Problem& p, std::span<std::byte> memory, void* stream_handle,
                     std::byte* first) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const check::Params params = params_of(p, memory, first);
  // All ones: nothing found, no slot written. The mark is not all ones.
  check_cuda(cudaMemsetAsync(memory.data(), 0xFF, memory.size(), stream), "checks");
  constexpr int64_t kMaxCtas = 2048;
  const auto ctas = [&](int64_t num_threads) {
    const int64_t num = (num_threads + check::kThreads - 1) / check::kThreads;
    return static_cast<unsigned>(std::clamp<int64_t>(num, 1, kMaxCtas));
  };
  check_cuda(launch(check::check_lists, ctas(p.N), check::kThreads, 0, stream, params),
             "checks of lists");
  const int64_t warps = std::max(p.B * p.T, p.N) * params.HV;
  check_cuda(launch(check::check_values, ctas(32 * warps), check::kThreads, 0, stream, params),
             "checks of values");
  check_cuda(launch(check::describe, 1, check::kThreads, 0, stream, params), "checks");
}

void fail_as_found(const deltic_buffer& workspace, void* stream_handle) {
  constexpr const char* kWho = "device_error: workspace: expected that of a checked call on a GPU";
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  if (workspace.data == nullptr || workspace.bytes < sizeof(check::Record)) {
    fail(DELTIC_INVALID_ARGUMENT, kWho, ", got ", workspace.data == nullptr ? 0 : workspace.bytes,
         " bytes");
  }
  cudaPointerAttributes where{};
  const cudaError_t error = cudaPointerGetAttributes(&where, workspace.data);
  static_cast<void>(cudaGetLastError());
  if (error != cudaSuccess ||
      (where.type != cudaMemoryTypeDevice && where.type != cudaMemoryTypeManaged)) {
    fail(DELTIC_INVALID_ARGUMENT, kWho, ", got memory of the host");
  }
  const DeviceScope scope(where.device);
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check_cuda(cudaStreamIsCapturing(stream, &capture), "device_error");
  if (capture != cudaStreamCaptureStatusNone) {
    fail(DELTIC_UNSUPPORTED,
         "device_error: stream: expected one that can be waited for, got one under capture");
  }
  check::Record record;
  check_cuda(
      cudaMemcpyAsync(&record, workspace.data, sizeof(record), cudaMemcpyDeviceToHost, stream),
      "device_error");
  check_cuda(cudaStreamSynchronize(stream), "device_error");
  if (record.mark != check::kMark || record.op < 0 || record.op >= DELTIC_NUM_OPS) {
    fail(DELTIC_INVALID_ARGUMENT, kWho, ", got other bytes");
  }
  if (record.finding.wrong == Wrong::nothing) return;
  fail(DELTIC_INVALID_ARGUMENT, text_of(static_cast<deltic_op>(record.op), record.finding));
}

}  // namespace deltic::gpu
