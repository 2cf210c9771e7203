// The door of the convolution: what it takes, how tokens and channels are divided, and which
// kernels run.
#include <algorithm>

#include "core/sizes.h"
#include "cuda/device.h"
#include "cuda/set.h"
#include "cuda/sm80/conv/kernels.h"
#include "cuda/sm80/conv/launch.h"
#include "cuda/sm80/conv/sums.cuh"
#include "cuda/sm80/conv/traits.h"
#include "cuda/tile/grid.h"
#include "cuda/tile/launch.h"
#include "cuda/tile/runs.cuh"

namespace deltic::gpu::conv {
namespace {

constexpr const char* kName = "cuda.conv";

const char* refuse(const Problem& p) {
  if (p.op != DELTIC_CONV) return "it has the convolution alone";
  if (const char* sentence = refuse_fp64(p)) return sentence;
  if (p.T > INT32_MAX || p.K > INT32_MAX / 2 || p.V > INT32_MAX / 2) {
    return "more than 2^31 - 1 tokens or channels, counted in 32 bits";
  }
  for (const States* x : {&p.state_in, &p.state_out, &p.ckpt}) {
    if (*x && x->slots > INT32_MAX) return "more than 2^31 - 1 slots, counted in 32 bits";
  }
  if (!kFullSet && p.x.dtype != DType::bf16) return kNotInThisBuild;
  return refuse_without_code(p);
}

// How a call is divided: from shapes, strides, options and whether rows move by runs, so that sums
// have the same bits on any share of a GPU.
struct Division {
  int taps;  // 4 or 8: of the kernel
  bool is_wide;
  int channels;  // of a thread
  int threads;
  int64_t columns;
  int run_log2;  // below 0: whole sequences
  int64_t runs_dense, num_runs, runs_per_cta, num_parts;
  bool is_step, is_single, is_drafts;
};

bool has_runs(const Rows& x, int64_t n) {
  return !x || gpu::has_runs(x.data, x.dtype, static_cast<int>(n), x.sb, x.st);
}

// A state's order of numbers for threads of n channels.
Order order_of(const Problem& p, const States& x, int64_t n) {
  if (!x || n == 1) return Order::elements;
  const int count = static_cast<int>(n);
  if (x.s_k == 1 && gpu::has_runs(x.data, x.dtype, count, x.s_slot, x.s_v)) return Order::channels;
  const bool is_tight = p.taps == 4 && p.V == p.taps - 1 && x.s_v == 1 && x.s_k == p.V;
  const int run = count * static_cast<int>(p.V);
  if (is_tight && gpu::has_runs(x.data, x.dtype, run, x.s_slot)) return Order::inputs;
  return Order::elements;
}

// A few tokens per sequence, on average: then a thread has whole sequences.
constexpr int64_t kStepTokens = 16;
// CTAs that a division aims at, four for each of 132 SMs, and those of a gradient at most: each
// leaves sums.
constexpr int64_t kManyCtas = 4 * 132, kManyParts = 2048;
constexpr int kShortestLog2 = 4, kLongestLog2 = 8;  // runs of 16 to 256 tokens

int64_t runs_of(const Problem& p, int run_log2, int64_t& per_sequence) {
  const int64_t tokens = int64_t{1} << run_log2;
  per_sequence = std::max<int64_t>((p.T + tokens - 1) / tokens, 1);
  return p.packed ? p.T / tokens + p.N : checked_product(p.N, per_sequence);
}

// Channels of a thread whose rows move by runs.
int64_t wide_channels(const Problem& p) {
  return p.is_gradient || p.taps != 4 ? 4 : 16 / size_of(p.x.dtype);
}
bool has_wide_rows(const Problem& p) {
  const int64_t wide = wide_channels(p);
  bool is_wide = p.K % wide == 0;
  for (const Rows* rows : {&p.x, &p.out, &p.d_out, &p.dx}) is_wide &= has_runs(*rows, wide);
  return is_wide;
}

// Weights and biases of n channels are runs, of x's dtype.
bool has_parameter_runs(const Problem& p, int64_t n) {
  const auto has_run = [&](const Param& numbers, int64_t count) {
    return numbers.contiguous && numbers.dtype == p.x.dtype &&
           gpu::has_runs(numbers.data, numbers.dtype, static_cast<int>(count));
  };
  return has_run(p.weight, n * p.taps) && (!p.bias || has_run(p.bias, n));
}

// One token per sequence from states that are all there is to it: single_kernel.
bool is_single(const Problem& p, const Division& x) {
  if (!x.is_step || !x.is_wide || p.taps != 4 || p.packed || p.T != 1) return false;
  if (p.accepted || p.V != p.taps - 1) return false;
  const Order order = order_of(p, p.state_in, x.channels);
  for (const States* states : {&p.state_in, &p.state_out}) {
    if (!*states || states->dtype != p.x.dtype || order_of(p, *states, x.channels) != order) {
      return false;
    }
  }
  return order != Order::elements && has_parameter_runs(p, x.channels);
}

// A few tokens per sequence, and a state that is left behind of inputs that a thread has seen:
// drafts_kernel. Channels of a thread; 0: it does not take the call.
int64_t drafts_channels(const Problem& p, bool is_wide) {
  const int64_t wide = wide_channels(p);
  if (p.is_gradient || p.taps != 4 || p.packed || p.T < 1 || p.T > kDrafts) return 0;
  if (p.accepted ? p.V < p.taps - 1 : p.V != p.taps - 1) return 0;
  if (p.read_index.n1 > 0 || p.write_index.n1 > 0) return 0;  // tables of slots
  if (!p.state_in || !p.state_out || p.ckpt) return 0;
  // Bytes of shared memory that 16 CTAs of an SM have room for, of short ones.
  constexpr int64_t kMostBytes = 14 << 10;
  const int64_t bytes = size_of(p.x.dtype);
  bool has_channels = is_wide, is_tight = p.V * kStagedChannels * kThreads * bytes <= kMostBytes;
  for (const States* x : {&p.state_in, &p.state_out}) {
    if (x->dtype != p.x.dtype) return 0;
    has_channels &= order_of(p, *x, wide) == Order::channels;
    is_tight &= x->s_v == 1 && x->s_k == p.V && p.K * p.V * bytes % 16 == 0 &&
                gpu::has_runs(x->data, x->dtype, static_cast<int>(16 / bytes), x->s_slot);
  }
  if (has_channels && has_parameter_runs(p, wide)) return wide;
  for (const Rows* x : {&p.x, &p.out}) is_tight &= has_runs(*x, kStagedChannels);
  return is_tight && p.K % kStagedChannels == 0 && has_parameter_runs(p, kStagedChannels)
             ? kStagedChannels
             : 0;
}

Division divide(const Problem& p, bool is_wide) {
  Division x{};
  x.taps = p.taps == 4 ? 4 : 8;
  x.is_wide = is_wide;
  const int64_t wide = wide_channels(p);
  const int64_t tokens = p.packed ? p.T : checked_product(p.N, p.T);
  const bool has_many = p.T > 0 && tokens > checked_product(p.N, kStepTokens);
  x.is_step = !p.is_gradient && !has_many;
  // States that a thread can only move number by number are most of a step's work: neighbouring
  // threads then have neighbouring channels.
  for (const States* states : {&p.state_in, &p.state_out}) {
    if (x.is_step && *states && order_of(p, *states, wide) == Order::elements) x.is_wide = false;
  }
  x.channels = static_cast<int>(x.is_wide ? wide : 1);
  x.is_single = is_single(p, x);
  const int64_t drafts = x.is_step && !x.is_single ? drafts_channels(p, is_wide) : 0;
  x.is_drafts = drafts > 0;
  if (x.is_drafts) x.is_wide = true, x.channels = static_cast<int>(drafts);
  const int64_t threads = (p.K + x.channels - 1) / x.channels;
  const int64_t most_threads = x.is_single ? kSingleThreads : kThreads;
  x.threads = static_cast<int>(std::min((threads + 31) / 32 * 32, most_threads));
  x.columns = (threads + x.threads - 1) / x.threads;

  x.run_log2 = -1, x.num_runs = p.N;
  if (!x.is_step) {
    // As long as they fill a GPU: a run reads W - 1 inputs of its neighbour's again, a gradient's
    // also computes W - 1 tokens again and leaves sums.
    constexpr int64_t kEnough = kManyCtas * 9 / 10;
    for (x.run_log2 = kLongestLog2; x.run_log2 > kShortestLog2; --x.run_log2) {
      if (checked_product(runs_of(p, x.run_log2, x.runs_dense), x.columns) >= kEnough) break;
    }
    x.num_runs = runs_of(p, x.run_log2, x.runs_dense);
  }
  if (!has_tokens_or_states(p) || p.N == 0) x.num_runs = 0;
  const int64_t most = x.is_single     ? (x.num_runs + kSingles - 1) / kSingles
                       : x.is_drafts   ? x.num_runs
                       : x.is_step     ? std::max<int64_t>(kManyCtas / x.columns, 1)
                       : p.is_gradient ? std::max<int64_t>(kManyParts / x.columns, 1)
                                       : x.num_runs;
  x.runs_per_cta = most > 0 ? std::max<int64_t>((x.num_runs + most - 1) / most, 1) : 1;
  x.num_parts = (x.num_runs + x.runs_per_cta - 1) / x.runs_per_cta;
  return x;
}

bool wants_parameters(const Problem& p) { return p.dweight || p.dbias; }

size_t workspace_bytes(const Problem& p) {
  if (!p.is_gradient || !wants_parameters(p)) return 0;
  // A query comes without addresses: enough for rows that lie anywhere.
  const bool can_be_wide = p.K % wide_channels(p) == 0;
  const int64_t num_parts = std::max(divide(p, can_be_wide).num_parts, divide(p, false).num_parts);
  return static_cast<size_t>(checked_product(num_parts, p.taps + 1, p.K, int64_t{sizeof(float)}));
}

Numbers numbers_of(const Param& x) {
  return {x.data, x.dtype, x.present, x.strides[0], x.rank > 1 ? x.strides[1] : 0};
}

Params params_of(const Problem& p, const Division& x, float* sums) {
  const auto inputs = [&](const States& s) { return Inputs{s, order_of(p, s, x.channels)}; };
  Params params{};
  params.tokens = tokens_of(p);
  params.slots = slot_lists_of(p);
  params.accepted = p.accepted;
  params.channels = static_cast<int32_t>(p.K), params.kept = static_cast<int32_t>(p.V);
  params.taps = static_cast<int32_t>(p.taps);
  params.is_silu = p.activation == DELTIC_ACTIVATION_SILU;
  params.has_weight_runs =
      p.weight.contiguous &&
      gpu::has_runs(p.weight.data, p.weight.dtype, x.channels * static_cast<int>(p.taps));
  params.has_bias_runs =
      p.bias && p.bias.contiguous && gpu::has_runs(p.bias.data, p.bias.dtype, x.channels);
  params.run_log2 = x.run_log2, params.runs_dense = static_cast<unsigned>(x.runs_dense);
  params.num_runs = static_cast<int32_t>(x.num_runs);
  params.runs_per_cta = static_cast<int32_t>(x.runs_per_cta);
  params.num_columns = static_cast<unsigned>(x.columns);
  params.num_parts = static_cast<unsigned>(x.num_parts);
  params.x = p.x, params.out = p.out;
  params.weight = numbers_of(p.weight), params.bias = numbers_of(p.bias);
  params.state_in = inputs(p.state_in), params.state_out = inputs(p.state_out);
  params.ckpt = inputs(p.ckpt);
  params.ckpt_cu = p.ckpt_cu, params.ckpt_tokens = p.ckpt_tokens;
  params.ckpt_slots = p.ckpt_slots;
  params.d_out = p.d_out, params.dx = p.dx;
  params.d_final = inputs(p.d_final), params.d_initial = inputs(p.d_initial);
  params.dweight = numbers_of(p.dweight), params.dbias = numbers_of(p.dbias);
  params.wants_sums = wants_parameters(p), params.sums = sums;
  return params;
}

template <class E>
void launch_of(const Division& x, Kernel kernel, const Params& params, unsigned ctas,
               cudaStream_t stream) {
  const auto run = x.taps == 4 ? (x.is_wide ? launch<E, 4, true> : launch<E, 4, false>)
                               : (x.is_wide ? launch<E, 8, true> : launch<E, 8, false>);
  run(kernel, params, ctas, x.threads, stream);
}
void launch_any(const Problem& p, const Division& x, Kernel kernel, const Params& params,
                unsigned ctas, cudaStream_t stream) {
  if constexpr (kFullSet) {
    if (p.x.dtype == DType::f32) return launch_of<float>(x, kernel, params, ctas, stream);
    if (p.x.dtype == DType::f16) return launch_of<__half>(x, kernel, params, ctas, stream);
  }
  launch_of<__nv_bfloat16>(x, kernel, params, ctas, stream);
}

void run(const Problem& p, std::span<std::byte> workspace, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const Division x = divide(p, has_wide_rows(p));
  // Numbers of runs and columns are of 32 bits in the kernels.
  static_cast<void>(checked_ctas(std::max(x.columns, x.num_runs), kName));
  const Params params = params_of(p, x, reinterpret_cast<float*>(workspace.data()));
  if (p.ckpt && p.ckpt_tokens.n0 > 0 && p.N > 0) {
    Params lists = params;
    lists.run_log2 = -1;  // whole sequences
    launch_any(p, x, Kernel::checkpoints, lists,
               checked_ctas(checked_product(p.ckpt_tokens.n0, x.columns), kName), stream);
  }
  const unsigned ctas = num_ctas(p, checked_product(x.num_parts, x.columns), kName);
  const Kernel kernel = p.is_gradient ? Kernel::backward
                        : x.is_single ? Kernel::single
                        : x.is_drafts ? Kernel::drafts
                        : x.is_step   ? Kernel::step
                                      : Kernel::forward;
  if (ctas > 0) launch_any(p, x, kernel, params, ctas, stream);
  if (!params.wants_sums) return;
  const int64_t numbers = checked_product(p.K, p.taps + 1);
  const unsigned sum_ctas = checked_ctas((numbers + kSumThreads - 1) / kSumThreads, kName);
  check_cuda(launch_after(sums_kernel, dim3(sum_ctas), kSumThreads, 0, stream, params),
             "launch of the kernel that sums a convolution's gradients");
}

}  // namespace

const Implementation& implementation() {
  static const Implementation entry{kName, missing_code, refuse, workspace_bytes, run};
  return entry;
}

}  // namespace deltic::gpu::conv
