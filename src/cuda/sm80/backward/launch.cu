// The door of the general backward: how a call is divided, scratch, and the order of launches.
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "core/scratch.h"
#include "cuda/device.h"
#include "cuda/set.h"
#include "cuda/sm80/backward/collect.cuh"
#include "cuda/sm80/backward/instantiate.h"
#include "cuda/sm80/backward/launch.h"
#include "cuda/sm80/backward/smem.h"
#include "cuda/tile/call.h"
#include "cuda/tile/launch.h"

namespace deltic::gpu::backward {
namespace {

// Sizes of a call: what follows from shapes alone.
struct Division {
  int width, columns;  // of Traits
  int64_t slices, items, segment, num_segments, slots_per_batch, rows;
  unsigned ctas;
  bool compact;
};

// Value columns of a CTA: as many as its shared memory has room for. Those of sm_80 have 163 KB,
// of sm_86, sm_89 and sm_120 99 KB: K of 129 to 256 has no room in the latter.
constexpr int kNarrow = 16;
template <bool kHasGv>
size_t shared_bytes(int width, int columns) {
  const bool narrow = columns == kNarrow;
  if (width == 64) {
    return narrow ? sizeof(Shared<Traits<64, kNarrow, kHasGv>>)
                  : sizeof(Shared<Traits<64, 64, kHasGv>>);
  }
  if (width == 128) {
    return narrow ? sizeof(Shared<Traits<128, kNarrow, kHasGv>>)
                  : sizeof(Shared<Traits<128, 64, kHasGv>>);
  }
  return narrow ? sizeof(Shared<Traits<256, kNarrow, kHasGv>>)
                : sizeof(Shared<Traits<256, 32, kHasGv>>);
}
size_t shared_bytes(const Problem& p, int width, int columns) {
  return p.gv ? shared_bytes<true>(width, columns) : shared_bytes<false>(width, columns);
}
int columns_of(const Problem& p, int width) {
  const int most = width == 256 ? 32 : 64;
  return refuse_shared_memory(p, shared_bytes(p, width, most)) == nullptr ? most : kNarrow;
}
int width_of(const Problem& p) { return p.K <= 64 ? 64 : p.K <= 128 ? 128 : 256; }

Division divide(const Problem& p) {
  Division x;
  x.width = width_of(p);
  x.columns = columns_of(p, x.width);
  x.slices = (p.V + x.columns - 1) / x.columns;
  x.items = checked_product(p.N, p.HV, x.slices);
  x.ctas = static_cast<unsigned>(std::min<int64_t>(x.items, kMaxCtas));
  // About as many segments as a segment has chunks: the states kept at once are fewest. At least
  // eight chunks, so that a launch has something to do.
  const int64_t chunks = (p.T + kChunk - 1) / kChunk;
  const auto root = static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(chunks))));
  const int64_t most = std::max<int64_t>(chunks, 1);
  x.segment = std::clamp<int64_t>(root, std::min<int64_t>(8, most), most) * kChunk;
  if (x.segment > INT32_MAX) throw SizeOverflow();
  x.num_segments = std::max<int64_t>(1, (p.T + x.segment - 1) / x.segment);
  x.slots_per_batch = x.num_segments - 1;
  const int64_t by_token = p.packed ? p.T : checked_product(p.B, p.T);
  const int64_t by_sequence = checked_product(p.N, x.segment);
  x.compact = by_sequence <= by_token;
  x.rows = std::min(by_sequence, by_token);
  return x;
}

Scratch lay_out(const Problem& p, const Division& x, std::byte* base, size_t& bytes) {
  deltic::Scratch scratch(base);
  const int64_t state = int64_t{x.width} * x.columns, chunks = x.segment / kChunk;
  const int64_t batches = p.packed ? 1 : p.B;
  Scratch s{};
  s.starts = scratch.take<float>(batches, x.slots_per_batch, p.HV, x.slices, state);
  s.states = scratch.take<float>(x.ctas, chunks, state);
  s.errors = scratch.take<float>(x.ctas, chunks, kChunk * x.columns);
  s.scores = scratch.take<float>(x.ctas, chunks, 2 * kChunk * kChunk);
  s.dq = scratch.take<float>(x.rows, p.HV, x.slices, p.K);
  s.dk = scratch.take<float>(x.rows, p.HV, x.slices, p.K);
  s.dg = scratch.take<float>(x.rows, p.HV, x.slices, gate_width_of(p));
  s.dbeta = scratch.take<float>(x.rows, p.HV, x.slices);
  s.sums = scratch.take<double>(wants_sums(p) ? kCollectors : 0, p.HV, 1 + gate_width_of(p));
  bytes = scratch.used();
  return s;
}

Params params_of(const Problem& p, const Division& x, const Scratch& scratch) {
  Params params{};
  set_call(p, params), set_gradients(p, params);
  params.gv = p.gv, params.dgv = p.dgv;
  params.V = p.V, params.K = static_cast<int32_t>(p.K);
  params.num_slices = static_cast<uint32_t>(x.slices);
  params.segment = static_cast<int32_t>(x.segment), params.slots_per_batch = x.slots_per_batch;
  params.rows = x.rows, params.compact = x.compact;
  params.num_items = static_cast<uint32_t>(x.items);
  params.scratch = scratch;
  return params;
}

// f of the instance's width and columns, as types.
template <int kNumber>
using Size = std::integral_constant<int, kNumber>;
template <class F>
void with_sizes(const Division& x, F&& f) {
  const bool narrow = x.columns == kNarrow;
  if constexpr (kFullSet) {
    if (x.width == 64) return narrow ? f(Size<64>(), Size<kNarrow>()) : f(Size<64>(), Size<64>());
    if (x.width == 256)
      return narrow ? f(Size<256>(), Size<kNarrow>()) : f(Size<256>(), Size<32>());
  }
  narrow ? f(Size<128>(), Size<kNarrow>()) : f(Size<128>(), Size<64>());
}
void launch_starts(const Division& x, const Params& p, cudaStream_t stream) {
  with_sizes(x, [&](auto width, auto columns) {
    if constexpr (kFullSet) {
      if (p.gv.present) {
        return launch_starts<decltype(width)::value, decltype(columns)::value, true>(p, x.ctas,
                                                                                     stream);
      }
    }
    launch_starts<decltype(width)::value, decltype(columns)::value, false>(p, x.ctas, stream);
  });
}
void launch_segment(const Division& x, const Params& p, int64_t m, cudaStream_t stream) {
  with_sizes(x, [&](auto width, auto columns) {
    if constexpr (kFullSet) {
      if (p.gv.present) {
        return launch_segment<decltype(width)::value, decltype(columns)::value, true>(p, m, x.ctas,
                                                                                      stream);
      }
    }
    launch_segment<decltype(width)::value, decltype(columns)::value, false>(p, m, x.ctas, stream);
  });
}

void collect(const Params& p, int64_t m, cudaStream_t stream) {
  const auto blocks = (p.rows + kWarps - 1) / kWarps;
  // With sums every collector has its own; else as many as there are rows for.
  const dim3 grid(
      p.wants_sums ? kCollectors : static_cast<unsigned>(std::min<int64_t>(blocks, 4096)), p.H);
  const auto kernel = p.K <= 64    ? collect_kernel<2>
                      : p.K <= 128 ? collect_kernel<4>
                                   : collect_kernel<8>;
  check_cuda(launch(kernel, grid, kThreads, 0, stream, p, m), "kernel that collects gradients");
}

}  // namespace

const char* refuse(const Problem& p) {
  if (!kFullSet && (p.gv || !(p.K > 64 && p.K <= 128))) return kNotInThisBuild;
  const int width = width_of(p);
  return refuse_shared_memory(p, shared_bytes(p, width, columns_of(p, width)));
}

size_t workspace_bytes(const Problem& p) {
  size_t bytes = 0;
  lay_out(p, divide(p), nullptr, bytes);
  return bytes;
}

void run(const Problem& p, std::span<std::byte> workspace, void* stream_) {
  const auto stream = static_cast<cudaStream_t>(stream_);
  const Division x = divide(p);
  checked_ctas(x.items);
  if (p.H > 65535) {
    fail(DELTIC_UNSUPPORTED, "cuda.general: expected at most 65535 heads, got ", p.H);
  }
  size_t bytes = 0;
  const Params params = params_of(p, x, lay_out(p, x, workspace.data(), bytes));
  if (p.packed && p.T > 0) {
    check_cuda(launch(padding_kernel, kPaddingCtas, kThreads, 0, stream, params),
               "kernel that clears padding");
  }
  if (wants_sums(p)) {
    const size_t sums = kCollectors * static_cast<size_t>(p.HV * (1 + gate_width_of(p)));
    check_cuda(cudaMemsetAsync(params.scratch.sums, 0, sums * sizeof(double), stream),
               "clearing the sums of parameters");
  }
  if (x.items > 0) {
    if (x.num_segments > 1) launch_starts(x, params, stream);
    for (int64_t m = x.num_segments - 1; m >= 0; --m) {
      launch_segment(x, params, m, stream);
      if (x.rows > 0) collect(params, m, stream);
    }
  }
  if (wants_sums(p)) {
    const int64_t parameters = p.HV * (1 + gate_width_of(p));
    const auto ctas = static_cast<unsigned>((parameters + kThreads - 1) / kThreads);
    check_cuda(launch(sums_kernel, ctas, kThreads, 0, stream, params),
               "kernel that adds up gradients of parameters");
  }
}

}  // namespace deltic::gpu::backward
