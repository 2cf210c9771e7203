// A forward in two forms: where its halves lie and their states go, from lengths and slots on the
// device. One small kernel in front of the halves.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/cuda.h"
#include "cuda/device.h"
#include "cuda/tile/grid.h"
#include "cuda/tile/launch.h"
#include "cuda/tile/search.cuh"
#include "cuda/tile/slots.cuh"

namespace deltic::gpu {
namespace {

constexpr int kThreads = 256;

struct Params {
  Tokens tokens;
  SlotLists slots;
  Indices recurrent_from;
  Indices ckpt_cu, ckpt_tokens, ckpt_slots;
  int64_t num_checkpoints, ckpt_num_slots;
  FormLists lists;
};

__device__ int64_t recurrent_from(const Params& p, int64_t n, int64_t length) {
  return clamp_index(load_index(p.recurrent_from, n), 0, length);
}

__device__ void fill_sequence(const Params& p, int64_t n) {
  const Span whole = span_of(p.tokens, n);
  const int64_t from = recurrent_from(p, n, whole.length);
  const Slots<int64_t> slots = find_slots<int64_t>(p.slots, n);
  p.lists.before[n] = {whole.batch, whole.begin, from};
  p.lists.after[n] = {whole.batch, whole.begin + from, whole.length - from};
  p.lists.read[n] = slots.from, p.lists.write[n] = slots.to;
  p.lists.between[n] = is_skipped(p.slots, n, whole.length, slots) ? -1 : n;
}

// An entry that no sequence has is unused in both halves.
__device__ void fill_checkpoint(const Params& p, int64_t m) {
  const auto [n, end] = list_of_entry(p.ckpt_cu, p.tokens.N, m);
  p.lists.ckpt_before[m] = p.lists.ckpt_after[m] = -1, p.lists.tokens_after[m] = 0;
  if (n == end || load_index(p.ckpt_cu, n) > m || load_index(p.ckpt_cu, n + 1) <= m) return;
  const int64_t from = recurrent_from(p, n, span_of(p.tokens, n).length);
  const int64_t count = load_index(p.ckpt_tokens, m);
  const int64_t slot = named_slot(load_index(p.ckpt_slots, m), p.slots.null_slot, p.ckpt_num_slots);
  (count <= from ? p.lists.ckpt_before : p.lists.ckpt_after)[m] = slot;
  p.lists.tokens_after[m] = count - from;
}

__global__ void __launch_bounds__(kThreads, 1) fill_kernel(const __grid_constant__ Params p) {
  if (is_wrong(p.tokens)) return;
  const int64_t first = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads;
  for (int64_t n = first; n < p.tokens.N; n += step) fill_sequence(p, n);
  for (int64_t m = first; m < p.num_checkpoints; m += step) fill_checkpoint(p, m);
}

}  // namespace

void fill_form_lists(const Problem& p, const FormLists& lists, void* stream) {
  const Params params{.tokens = tokens_of(p),
                      .slots = slot_lists_of(p),
                      .recurrent_from = p.recurrent_from,
                      .ckpt_cu = p.ckpt_cu,
                      .ckpt_tokens = p.ckpt_tokens,
                      .ckpt_slots = p.ckpt_slots,
                      .num_checkpoints = p.ckpt ? p.ckpt_tokens.n0 : 0,
                      .ckpt_num_slots = p.ckpt.slots,
                      .lists = lists};
  constexpr int64_t kMaxCtas = 1024;
  const int64_t most = std::max(p.N, params.num_checkpoints);
  const int64_t ctas = std::clamp<int64_t>((most + kThreads - 1) / kThreads, 1, kMaxCtas);
  check_cuda(launch(fill_kernel, static_cast<unsigned>(ctas), kThreads, 0,
                    static_cast<cudaStream_t>(stream), params),
             "forward: two forms");
}

}  // namespace deltic::gpu
