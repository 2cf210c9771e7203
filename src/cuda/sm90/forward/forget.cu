// Whether the state before a segment's last chunks still matters behind it: looked at ahead of the
// transfers, which are short where it does not.
#include "cuda/device.h"
#include "cuda/ptx/launch_order.cuh"
#include "cuda/sm90/forward/gates.cuh"
#include "cuda/sm90/forward/instantiate.h"
#include "cuda/tile/search.cuh"

namespace deltic::gpu::forward {
namespace {

// A warp has kLookTokens tokens of a head; all that it reads is under way at once.
constexpr int kLookWarps = 32, kLookTokens = schedule::kShortChunks * kChunk / kLookWarps;
constexpr int kLookChannels = kWidth / 32;  // of a lane

struct Border {
  int batch, token;  // the first one behind it; -1: there is none
};
__device__ Border find_border(const Params& p, int window) {
  const int cut = p.split_chunks, next = schedule::after_window(window, cut);
  if (!p.is_packed) {
    const int batch = next / p.num_tokens, begin = batch * p.num_tokens;
    const int border = schedule::border_in(window, begin, begin + p.num_tokens, cut);
    return {batch, border < 0 || batch >= p.num_batches ? -1 : border - begin};
  }
  const int n =
      last_begun(p.num_sequences, [&](int i) { return load_index(p.cu_seqlens, i) <= next; });
  const auto clamped = [&](int64_t x) {
    return int(min(max(x, int64_t(0)), int64_t(p.num_tokens)));
  };
  return {0, schedule::border_in(window, clamped(load_index(p.cu_seqlens, n)),
                                 clamped(load_index(p.cu_seqlens, n + 1)), cut)};
}

// The warp's rows of width numbers, as bits: token t, channels lane, lane + 32 ...
struct RawRows {
  uint32_t bits[kLookTokens][kLookChannels];
};
__device__ void load_rows(const Rows& x, int64_t row, int width, RawRows& raw) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int t = 0; t < kLookTokens; t++) {
#pragma unroll
    for (int i = 0; i < kLookChannels; i++) {
      const int channel = 32 * i + lane;
      raw.bits[t][i] = channel < width ? load_bits(x.data, x.dtype, row + t * x.st + channel) : 0;
    }
  }
}
__device__ float most_of_warp(float x) {
#pragma unroll
  for (int m = 16; m > 0; m /= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, m));
  return x;
}
// Summed over the warp's tokens: log2 of what a token's decay leaves of the channel that it leaves
// most of; infinity if one is NaN.
__device__ float slowest_decays(const Params& p, const RawRows& raw, int head) {
  const deltic_gate_form form = form_of(p);
  const float rate = p.a_log.data ? gate_rate(load_number(p.a_log.data, p.a_log.dtype, head)) : 1.f;
  float bias[kLookChannels], sum = 0;
#pragma unroll
  for (int i = 0; i < kLookChannels; i++) {
    const int channel = 32 * i + int(threadIdx.x) % 32;
    const bool has_bias = p.dt_bias.data && channel < p.key_width;
    bias[i] = has_bias ? load_number(p.dt_bias.data, p.dt_bias.dtype,
                                     int64_t(head) * p.key_width + channel)
                       : 0.f;
  }
#pragma unroll
  for (int t = 0; t < kLookTokens; t++) {
    float most = -INFINITY;
#pragma unroll
    for (int i = 0; i < kLookChannels; i++) {
      if (32 * i + int(threadIdx.x) % 32 >= p.key_width) continue;
      const float x =
          log_decay(form, p.lower_bound, number_of(raw.bits[t][i], p.look_g.dtype), rate, bias[i]);
      most = isnan(x) ? INFINITY : fmaxf(most, x);
    }
    sum += most_of_warp(most) * kLog2e;
  }
  return sum;
}
// |k|^2 of token t, at most 1 where it is normalised.
__device__ float key_square(const Params& p, const RawRows& raw, int t) {
  if (p.has_norm) return 1.f;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kLookChannels; i++) {
    const float x = number_of(raw.bits[t][i], p.look_k.dtype);
    sum += x * x;
  }
  return warp_sum(sum);
}
// log2 of the most by which I - beta k k^T lengthens a vector.
__device__ float growth(float beta, float square) {
  const float x = fabsf(1.f - beta * square);
  return x <= 1.f ? 0.f : log2f(x);  // a NaN stays
}

// CTA (window, value head): |M| of the last chunks before the window's border is at most the
// product of the tokens' slowest decays and of their growths.
__global__ __launch_bounds__(32 *
                             kLookWarps) void find_forgotten(const __grid_constant__ Params p) {
  __shared__ float sums[kLookWarps];
  const int window = blockIdx.x, head = blockIdx.y, warp = threadIdx.x / 32,
            lane = threadIdx.x % 32;
  grid_wait();
  grid_release();
  const Border border = find_border(p, window);
  const bool has_border = border.token >= kLookWarps * kLookTokens && head < p.num_value_heads;
  float sum = 0;
  if (has_border) {
    const int first = border.token - (kLookWarps - warp) * kLookTokens;
    const int key_head = head / (p.num_value_heads / p.num_heads);
    const auto row_of = [&](const Rows& x, int h) {
      return border.batch * x.sb + int64_t(first) * x.st + h * x.sh;
    };
    RawRows gates, keys;
    uint32_t betas[kLookTokens];
    load_rows(p.look_g, row_of(p.look_g, head), p.key_width, gates);
    if (!p.has_norm) load_rows(p.look_k, row_of(p.look_k, key_head), p.key_width, keys);
#pragma unroll
    for (int t = 0; t < kLookTokens; t++) {
      const Rows& x = p.beta;
      betas[t] = x.data ? load_bits(x.data, x.dtype, row_of(x, head) + t * x.st) : 0;
    }
    sum = slowest_decays(p, gates, head);
#pragma unroll
    for (int t = 0; t < kLookTokens; t++) {
      const float beta = p.beta.data ? beta_value(p, number_of(betas[t], p.beta.dtype)) : 1.f;
      sum += growth(beta, key_square(p, keys, t));
    }
  }
  if (lane == 0) sums[warp] = sum;
  __syncthreads();  // of all warps
  if (warp > 0) return;
  sum = warp_sum(sums[lane]);
  // Heads that are not there agree with the others.
  if (lane == 0)
    p.forgotten[int64_t(window) * forgotten_stride(p.num_value_heads) + head] =
        head >= p.num_value_heads || (has_border && sum <= -schedule::kForgottenBits);
}

}  // namespace

void launch_forget(const Params& params, cudaStream_t stream) {
  const int windows =
      schedule::num_windows(params.num_batches * params.num_tokens, params.split_chunks);
  check_cuda(
      launch_after(find_forgotten,
                   dim3(unsigned(windows), unsigned(forgotten_stride(params.num_value_heads))),
                   32 * kLookWarps, 0, stream, params),
      "forward: what is forgotten");
}

}  // namespace deltic::gpu::forward
