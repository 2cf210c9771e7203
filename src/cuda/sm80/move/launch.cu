// The door of the move: what it takes, and which kernel runs.
#include <algorithm>

#include "core/sizes.h"
#include "cuda/device.h"
#include "cuda/sm80/move/kernel.cuh"
#include "cuda/sm80/move/launch.h"
#include "cuda/tile/launch.h"

namespace deltic::gpu::move {
namespace {

const char* refuse(const Problem& p) {
  if (p.op != DELTIC_MOVE) return "it has the move alone";
  if (const char* sentence = refuse_fp64(p)) return sentence;
  return refuse_without_code(p);
}

size_t workspace_bytes(const Problem&) { return 0; }

// Whether runs of `vec` numbers lie at multiples of their size.
bool has_runs(const States& x, int64_t row, int64_t width, int64_t vec) {
  const auto bytes = static_cast<uintptr_t>(vec * size_of(x.dtype));
  return reinterpret_cast<uintptr_t>(x.data) % bytes == 0 && x.s_slot % vec == 0 &&
         x.s_head % vec == 0 && x.s_layer % vec == 0 && row % vec == 0 && width % vec == 0;
}

Params params_of(const Problem& p) {
  Params x{};
  x.record = p.record;
  x.slots = slot_lists_of(p);
  x.from = p.state_in, x.to = p.state_out;
  x.from_row = p.v_first ? p.state_in.s_v : p.state_in.s_k;
  x.to_row = p.v_first != p.transposes ? p.state_out.s_v : p.state_out.s_k;
  x.rows = p.v_first ? p.V : p.K, x.columns = p.v_first ? p.K : p.V;
  x.layers = p.layers, x.HV = p.HV;
  return x;
}

template <class Tr>
void launch(Params p, int64_t num_states, cudaStream_t stream) {
  const auto tiles = [](int64_t numbers, int64_t each) { return (numbers + each - 1) / each; };
  using T = Tile<Tr>;
  p.row_tiles = tiles(p.rows, T::kRows), p.column_tiles = tiles(p.columns, T::kColumns);
  p.num_tiles = checked_product(num_states, p.row_tiles, p.column_tiles);
  if (p.num_tiles == 0) return;
  const auto ctas = static_cast<unsigned>(std::min<int64_t>(p.num_tiles, INT32_MAX));
  check_cuda(launch_after(move_kernel<Tr>, dim3(ctas), T::kThreads, 0, stream, p),
             "launch of the move's kernel");
}

template <class In, class Out>
void launch_layout(const Problem& call, const Params& p, int64_t num_states, cudaStream_t stream) {
  constexpr int64_t kVec = Traits<In, Out, false>::kVec;
  const int64_t out_columns = call.transposes ? p.rows : p.columns;
  const bool has_all_runs =
      has_runs(p.from, p.from_row, p.columns, kVec) && has_runs(p.to, p.to_row, out_columns, kVec);
  // Where a state is no more than a quarter of the large tile, a CTA has fewer threads.
  constexpr int64_t kSmall = 8 * kVec;
  const bool is_small = p.rows <= kSmall && p.columns <= kSmall;
  const auto run =
      !has_all_runs
          ? (call.transposes ? launch<Traits<void, void, true>> : launch<Traits<void, void, false>>)
      : !call.transposes ? launch<Traits<In, Out, false>>
      : is_small         ? launch<Traits<In, Out, true, 8>>
                         : launch<Traits<In, Out, true>>;
  run(p, num_states, stream);
}

void run(const Problem& p, std::span<std::byte>, void* stream) {
  using Bf16 = __nv_bfloat16;
  using Launch = void (*)(const Problem&, const Params&, int64_t, cudaStream_t);
  // By from and to; the same type of 16 bits moves bits.
  constexpr Launch kLaunches[3][3] = {
      {launch_layout<float, float>, launch_layout<float, Bf16>, launch_layout<float, __half>},
      {launch_layout<Bf16, float>, launch_layout<uint16_t, uint16_t>, launch_layout<Bf16, __half>},
      {launch_layout<__half, float>, launch_layout<__half, Bf16>,
       launch_layout<uint16_t, uint16_t>}};
  const auto of = [](DType type) { return type == DType::f32 ? 0 : type == DType::bf16 ? 1 : 2; };
  kLaunches[of(p.state_in.dtype)][of(p.state_out.dtype)](
      p, params_of(p), checked_product(p.N, p.layers, p.HV), static_cast<cudaStream_t>(stream));
}

}  // namespace

const Implementation& implementation() {
  static const Implementation entry{"cuda.move", missing_code, refuse, workspace_bytes, run};
  return entry;
}

}  // namespace deltic::gpu::move
