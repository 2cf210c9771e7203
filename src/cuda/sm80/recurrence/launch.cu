// The door of the recurrence: parameters from a checked call, and which instantiation runs.
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/set.h"
#include "cuda/sm80/recurrence/launch.h"
#include "cuda/sm80/recurrence/params.h"
#include "cuda/sm80/recurrence/traits.h"
#include "cuda/tile/call.h"

namespace deltic::gpu::recurrence {

template <int kBlocks, bool kPerChannel, bool kOneStage>
void launch(const Params& p, unsigned num_ctas, cudaStream_t stream);
template <int kBlocks, bool kPerChannel>
void launch_record(const Params& p, unsigned num_ctas, cudaStream_t stream);
template <int kBlocks, bool kPerChannel>
void launch_commit(const Params& p, unsigned num_ctas, cudaStream_t stream);

namespace {

// Whether a thread's runs of neighbours are aligned: base, strides and the extent they run along.
bool is_whole(const Problem& p, const States& x) {
  const int64_t run = p.v_first ? 4 : kThreadColumns;
  const int64_t bytes = run * size_of(x.dtype);
  return x.present && reinterpret_cast<uintptr_t>(x.data) % static_cast<uintptr_t>(bytes) == 0 &&
         x.s_layer % run == 0 && x.s_slot % run == 0 && x.s_head % run == 0 &&
         (p.v_first ? x.s_v : x.s_k) % run == 0 && (p.v_first ? p.K : p.V) % run == 0;
}

Params params_of(const Problem& p) {
  Params x{};
  set_call(p, x), set_results(p, x);
  x.num_slices = static_cast<uint32_t>((p.V + kColumns - 1) / kColumns);
  x.K = static_cast<int32_t>(p.K);
  x.rounded_to = rounds_tokens(p) ? kept_states(p).dtype : DType::f32;
  x.has_seed = p.has_seed, x.chance = chance_of(p);
  x.v_first = p.v_first;
  x.gv = p.gv, x.ckpt = p.ckpt;
  x.in_whole = is_whole(p, p.state_in), x.out_whole = is_whole(p, p.state_out);
  x.ckpt_whole = is_whole(p, p.ckpt);
  x.ckpt_cu = p.ckpt_cu, x.ckpt_tokens = p.ckpt_tokens, x.ckpt_slots = p.ckpt_slots;
  x.updates = p.updates, x.update_layer = p.update_layer, x.update_tokens = p.update_tokens;
  x.accepted = p.op == DELTIC_COMMIT ? p.accepted : Indices{};
  return x;
}

template <int kBlocks, bool kPerChannel>
void launch_stages(const Params& p, unsigned ctas, cudaStream_t stream) {
  if (p.accepted.present) return launch_commit<kBlocks, kPerChannel>(p, ctas, stream);
  if (p.updates.present) return launch_record<kBlocks, kPerChannel>(p, ctas, stream);
  const auto is_moved_whole = [](const States& x, bool whole) { return !x.present || whole; };
  // Trees have their second place that loads states in the other kernel alone, as rounding by
  // chance its registers.
  const bool one_stage = p.tokens.T <= kStageTokens && !p.slots.parents.present && !p.has_seed &&
                         is_moved_whole(p.state_in, p.in_whole) &&
                         is_moved_whole(p.state_out, p.out_whole) &&
                         is_moved_whole(p.ckpt, p.ckpt_whole);
  one_stage ? launch<kBlocks, kPerChannel, true>(p, ctas, stream)
            : launch<kBlocks, kPerChannel, false>(p, ctas, stream);
}

template <int kBlocks>
void launch_gate(const Params& p, unsigned ctas, cudaStream_t stream) {
  p.gate == Gate::channel ? launch_stages<kBlocks, true>(p, ctas, stream)
                          : launch_stages<kBlocks, false>(p, ctas, stream);
}

void launch_width(const Params& p, unsigned ctas, cudaStream_t stream) {
  if constexpr (!kFullSet) {
    launch_gate<4>(p, ctas, stream);
  } else {
    const auto launch_of = p.K <= 32    ? launch_gate<1>
                           : p.K <= 64  ? launch_gate<2>
                           : p.K <= 128 ? launch_gate<4>
                                        : launch_gate<8>;
    launch_of(p, ctas, stream);
  }
}

}  // namespace

const char* refuse(const Problem& p) {
  return kFullSet || (p.K > 64 && p.K <= 128) ? nullptr : kNotInThisBuild;
}

void run(const Problem& p, void* stream) {
  // Heads and slices are numbers of 32 bits in the kernel, also where padding is all there is.
  const int64_t slices = (p.V + kColumns - 1) / kColumns;
  static_cast<void>(checked_ctas(std::max(p.HV, slices)));
  const Params params = params_of(p);
  const unsigned ctas = num_ctas(p, p.layers * p.N * p.HV * slices);
  if (ctas == 0) return;
  launch_width(params, ctas, static_cast<cudaStream_t>(stream));
}

}  // namespace deltic::gpu::recurrence
