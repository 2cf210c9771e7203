// The door of the decode kernel: what it takes, parameters from a checked call, and which
// instantiation runs.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "cuda/device.h"
#include "cuda/set.h"
#include "cuda/sm80/decode/launch.h"
#include "cuda/sm80/decode/params.h"
#include "cuda/sm80/decode/traits.h"
#include "cuda/tile/call.h"
#include "cuda/tile/vectors.cuh"

namespace deltic::gpu::decode {

template <class E, int kWidth, bool kVFirst, bool kPerChannel, Kind kKind>
void launch(const Params& p, unsigned num_ctas, cudaStream_t stream);
template <class Tr>
void launch_drafts(const DraftParams& p, unsigned num_ctas, cudaStream_t stream);
template <class Tr>
size_t drafts_bytes();

namespace {

bool is_aligned(const void* data, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(data) % static_cast<uintptr_t>(bytes) == 0;
}

// Whether runs of four channels lie at multiples of their size.
bool has_runs(const Rows& x) {
  return is_aligned(x.data, 4 * size_of(x.dtype)) && x.sb % 4 == 0 && x.st % 4 == 0 &&
         x.sh % 4 == 0;
}

// Whether states can be moved by 16 bytes.
bool has_vectors(const Problem& p, const States& x) {
  const int64_t n = 16 / size_of(x.dtype);
  return is_aligned(x.data, 16) && x.s_slot % n == 0 && x.s_head % n == 0 &&
         (p.v_first ? x.s_v : x.s_k) % n == 0 && (p.v_first ? p.K : p.V) % n == 0;
}

// Of both states, if there are two: others are refused.
DType state_dtype(const Problem& p) { return p.state_in ? p.state_in.dtype : p.state_out.dtype; }

// What all kernels here need.
const char* refuse_any(const Problem& p) {
  if (p.op != DELTIC_DECODE) return "it has decode alone";
  if (const char* sentence = refuse_fp64(p)) return sentence;
  if (p.K != 64 && p.K != 128) return "K is neither 64 nor 128";
  if (p.beta_kind == BetaKind::value || p.gv) return "beta or a gate per value column";
  if (p.ckpt) return "checkpoints";
  if (p.T > INT32_MAX || p.V > INT32_MAX) {
    return "more than 2^31 - 1 tokens or value columns, counted in 32 bits";
  }
  for (const States* x : {&p.state_in, &p.state_out}) {
    if (!*x) continue;
    if (x->dtype != state_dtype(p)) return "states of two dtypes";
    if (x->slots > INT32_MAX) return "more than 2^31 - 1 slots, counted in 32 bits";
    if (!has_vectors(p, *x)) return "a state's address, stride or row is no multiple of 16 bytes";
  }
  for (const Rows* x : {&p.q, &p.k}) {
    if (!has_runs(*x)) return "an address or stride of q or k is no multiple of 4 elements";
  }
  if (p.gate == Gate::channel && !has_runs(p.g)) {
    return "an address or stride of g is no multiple of 4 elements";
  }
  for (const Param* x : {&p.A_log, &p.dt_bias}) {
    if (*x && !x->contiguous) return "A_log or dt_bias is not contiguous";
  }
  if (p.gate == Gate::channel && p.dt_bias &&
      !is_aligned(p.dt_bias.data, 4 * size_of(p.dt_bias.dtype))) {
    return "dt_bias lies at no multiple of 4 elements";
  }
  return refuse_without_code(p);
}

const char* refuse(const Problem& p) {
  if (p.updates) return "a record of drafted tokens, which cuda.general leaves";
  if (const char* sentence = refuse_any(p)) return sentence;
  return kFullSet || (state_dtype(p) == DType::bf16 && p.v_first && p.K == 128) ? nullptr
                                                                                : kNotInThisBuild;
}

size_t workspace_bytes(const Problem&) { return 0; }

Params params_of(const Problem& p, int64_t slices) {
  Params x{};
  set_call(p, x), set_results(p, x);
  x.num_slices = static_cast<uint32_t>(slices);
  x.chance = chance_of(p);
  x.by_heads = Divisor(x.HV), x.by_slices = Divisor(x.num_slices), x.by_group = Divisor(x.group);
  return x;
}

template <class Tr>
int64_t num_slices(const Problem& p) {
  return (p.V + Tr::kSpan - 1) / Tr::kSpan;
}
// How often the SMs are full, if nothing else runs.
template <class Tr>
double num_waves(const Problem& p) {
  return static_cast<double>(p.N * p.HV * num_slices<Tr>(p)) /
         (Tr::kCtasPerSm * device(p.device_index)->num_sms);
}

template <class E, int kWidth, bool kVFirst, Kind kKind>
void launch_kind(const Problem& p, cudaStream_t stream) {
  using Tr = TraitsOf<E, kWidth, kVFirst, false, kKind>;
  const int64_t slices = num_slices<Tr>(p);
  // Heads and slices are numbers of 32 bits in the kernel, also where padding is all there is.
  static_cast<void>(checked_ctas(std::max(p.HV, slices), "cuda.decode"));
  unsigned ctas = num_ctas(p, p.N * p.HV * slices, "cuda.decode");
  if (ctas == 0) return;
  if constexpr (kKind == Kind::stream) {  // they stay, and have all parts among them
    ctas = std::min(ctas, unsigned(Tr::kCtasPerSm * device(p.device_index)->num_sms));
  }
  Params params = params_of(p, slices);
  if constexpr (Tr::kHintsAhead) {
    params.ahead =
        static_cast<uint32_t>(kAheadThreads / Tr::kThreads * device(p.device_index)->num_sms);
  }
  if constexpr (kKind != Kind::listed) {
    if (p.gate == Gate::channel) {
      return launch<E, kWidth, kVFirst, true, kKind>(params, ctas, stream);
    }
  }
  launch<E, kWidth, kVFirst, false, kKind>(params, ctas, stream);
}

// Whether q, k, v and o have one dtype of 16 bits, and q and k pieces of 16 bytes.
bool has_short_rows(const Problem& p) {
  for (const Rows* x : {&p.q, &p.k, &p.v, &p.o}) {
    if (size_of(x->dtype) != 2 || x->dtype != p.q.dtype) return false;
  }
  return is_vectorizable(p.q, p.K) && is_vectorizable(p.k, p.K);
}
// Whether a call has more lists than one of slots.
bool has_lists(const Problem& p) {
  return p.packed || p.accepted || p.has_initial || p.read_index.n1 > 0 || p.write_index.n1 > 0;
}
// Whether AloneParams, or ListedParams, can say the call.
bool takes_alone(const Problem& p) {
  const auto fits = [](int64_t stride) { return stride >= 0 && stride <= UINT32_MAX / 2; };
  for (const Indices* x : {&p.read_index, &p.write_index, &p.accepted, &p.cu}) {
    if (!fits(x->s0) || !fits(x->s1) || x->n1 > INT32_MAX) return false;
  }
  if (!fits(p.has_initial.s0)) return false;
  if (std::max(p.N, p.HV) > 65535) return false;  // of a grid
  if (!has_short_rows(p)) return false;
  for (const Rows* x : {&p.q, &p.k, &p.v, &p.o, &p.beta, &p.g}) {
    if (!fits(p.packed ? x->st : x->sb) || !fits(x->sh)) return false;
  }
  for (const States* x : {&p.state_in, &p.state_out}) {
    if (!fits(x->s_head) || !fits(x->s_v)) return false;
  }
  return true;
}
// Whether sequence n is all T tokens of batch n. With spans, which are forward's tokens from a
// given one of each sequence on, it may be fewer, or none.
bool is_dense(const Problem& p) { return !p.packed && p.spans == nullptr; }
// Whether a call of several tokens can be moved by copies of 16 bytes, and its tokens are a stage.
template <class Tr>
bool takes_stream(const Problem& p) {
  if (!is_dense(p) || p.T > Tr::kStageTokens || !has_short_rows(p)) return false;
  if (!is_vectorizable(p.v, p.V)) return false;
  if (p.gate != Gate::channel) return true;
  return is_vectorizable(p.g, p.K) && is_aligned(p.dt_bias.data, 16);
}

// A token per sequence, dense, K-first.
template <class E, int kWidth>
void launch_rows(const Problem& p, cudaStream_t stream) {
  if constexpr (sizeof(E) == 2) {
    if (p.N * p.HV >= kManyHeads) return launch_kind<E, kWidth, false, Kind::many>(p, stream);
  }
  launch_kind<E, kWidth, false, Kind::single>(p, stream);
}
// V-first: dense, or packed with as many tokens as sequences. False: a call of the latter that
// the kernels of several tokens take.
template <class E, int kWidth>
bool launch_single(const Problem& p, cudaStream_t stream) {
  const bool is_always = sizeof(E) == 4 && p.gate == Gate::channel;
  const bool is_many = p.N * p.HV >= kSingleHeads<E>;
  if ((is_always || !is_many) && takes_alone(p)) {
    has_lists(p) ? launch_kind<E, kWidth, true, Kind::listed_alone>(p, stream)
                 : launch_kind<E, kWidth, true, Kind::alone>(p, stream);
    return true;
  }
  if ((p.packed || p.accepted) && p.gate != Gate::channel) {
    launch_kind<E, kWidth, true, Kind::listed>(p, stream);
    return true;
  }
  if (p.packed) return false;
  launch_kind<E, kWidth, true, Kind::single>(p, stream);
  return true;
}

// Several tokens, V-first. What a token costs beside the state's bytes counts from the second one
// on; of fp32 states, where it is half, only if they are not written.
template <class E, int kWidth>
void launch_several(const Problem& p, cudaStream_t stream) {
  constexpr bool kHalf = sizeof(E) == 2;
  const int64_t tokens = p.packed ? p.T / std::max<int64_t>(p.N, 1) : p.T;
  if (num_waves<TraitsOf<E, kWidth, true, false, Kind::few>>(p) <= 1) {
    return launch_kind<E, kWidth, true, Kind::few>(p, stream);
  }
  if (kHalf ? tokens <= 1 : tokens <= 4 || p.state_out) {
    return launch_kind<E, kWidth, true, Kind::several>(p, stream);
  }
  if constexpr (!kHalf && kWidth == 128) {
    if (takes_stream<TraitsOf<E, kWidth, true, false, Kind::stream>>(p)) {
      return launch_kind<E, kWidth, true, Kind::stream>(p, stream);
    }
  }
  if constexpr (kHalf && kWidth == 128) {
    if (num_waves<TraitsOf<E, kWidth, true, false, Kind::pairs>>(p) >= 2) {
      return launch_kind<E, kWidth, true, Kind::pairs>(p, stream);
    }
  }
  launch_kind<E, kWidth, true, Kind::held>(p, stream);
}

template <class E, int kWidth, bool kVFirst>
void launch_tokens(const Problem& p, cudaStream_t stream) {
  if constexpr (sizeof(E) == 2) {
    if (p.has_seed) return launch_kind<E, kWidth, kVFirst, Kind::seeded>(p, stream);
  }
  if (p.parents) return launch_kind<E, kWidth, kVFirst, Kind::trees>(p, stream);
  if constexpr (kVFirst) {
    const bool is_each = p.spans == nullptr && (p.packed ? p.T == p.N : p.T == 1);
    if (is_each && launch_single<E, kWidth>(p, stream)) return;
    launch_several<E, kWidth>(p, stream);
  } else {
    if (is_dense(p) && p.T == 1) return launch_rows<E, kWidth>(p, stream);
    launch_kind<E, kWidth, kVFirst, Kind::several>(p, stream);
  }
}

template <class E, int kWidth>
void launch_layout(const Problem& p, cudaStream_t stream) {
  p.v_first ? launch_tokens<E, kWidth, true>(p, stream)
            : launch_tokens<E, kWidth, false>(p, stream);
}

template <class E>
void launch_width(const Problem& p, cudaStream_t stream) {
  p.K == 64 ? launch_layout<E, 64>(p, stream) : launch_layout<E, 128>(p, stream);
}

void run(const Problem& p, std::span<std::byte>, void* stream_handle) {
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  if constexpr (!kFullSet) {
    launch_tokens<__nv_bfloat16, 128, true>(p, stream);
  } else {
    const DType type = state_dtype(p);
    const auto launch_type = type == DType::bf16  ? launch_width<__nv_bfloat16>
                             : type == DType::f16 ? launch_width<__half>
                                                  : launch_width<float>;
    launch_type(p, stream);
  }
}

// ---- Drafted tokens --------------------------------------------------------------------------

// The most tokens of a sequence: lengths are on the device.
int64_t num_drafts(const Problem& p) { return p.updates ? p.update_tokens : p.T; }

// f(traits of a call's kernel).
template <int kWidth, bool kVFirst, bool kPerChannel, class F>
auto with_draft_gate(const Problem& p, F&& f) {
  constexpr int kFew = 8, kMost = static_cast<int>(kMaxDrafts);
  return num_drafts(p) <= kFew ? f(DraftTraits<kWidth, kVFirst, kPerChannel, kFew>{})
                               : f(DraftTraits<kWidth, kVFirst, kPerChannel, kMost>{});
}
template <int kWidth, bool kVFirst, class F>
auto with_draft_width(const Problem& p, F&& f) {
  return p.gate == Gate::channel ? with_draft_gate<kWidth, kVFirst, true>(p, f)
                                 : with_draft_gate<kWidth, kVFirst, false>(p, f);
}
template <class F>
auto with_drafts(const Problem& p, F&& f) {
  if constexpr (!kFullSet) {
    return with_draft_width<128, true>(p, f);
  } else {
    if (p.v_first) {
      return p.K == 64 ? with_draft_width<64, true>(p, f) : with_draft_width<128, true>(p, f);
    }
    return p.K == 64 ? with_draft_width<64, false>(p, f) : with_draft_width<128, false>(p, f);
  }
}

const char* refuse_drafts(const Problem& p) {
  if (const char* sentence = refuse_any(p)) return sentence;
  if (p.state_out) return "states are written";
  if (state_dtype(p) != DType::f32) return "states of 16 bits, which every token rounds";
  if (size_of(p.q.dtype) != 2) return "fp32 rows, for which pairs of bf16 numbers are too short";
  if (p.packed && !p.updates) return "packed sequences without a record, whose lengths are unknown";
  if (num_drafts(p) > kMaxDrafts) return "more than 16 tokens of a sequence";
  if (!kFullSet && !(p.v_first && p.K == 128)) return kNotInThisBuild;
  return refuse_shared_memory(
      p, with_drafts(p, [](auto traits) { return drafts_bytes<decltype(traits)>(); }));
}

void run_drafts(const Problem& p, std::span<std::byte>, void* stream) {
  with_drafts(p, [&](auto traits) {
    using Tr = decltype(traits);
    const int64_t slices = num_slices<Tr>(p);
    static_cast<void>(checked_ctas(std::max(p.HV, slices), "cuda.drafts"));
    const unsigned ctas = num_ctas(p, p.N * p.HV * slices, "cuda.drafts");
    if (ctas == 0) return;
    DraftParams x{};
    static_cast<Params&>(x) = params_of(p, slices);
    x.updates = p.updates, x.update_tokens = p.update_tokens, x.K = Tr::kWidth;
    x.o_whole = has_runs(p.o);
    x.u_whole = p.updates && has_runs(p.updates);
    launch_drafts<Tr>(x, ctas, static_cast<cudaStream_t>(stream));
  });
}

}  // namespace

const Implementation& implementation() {
  static const Implementation entry{"cuda.decode", missing_code, refuse, workspace_bytes, run};
  return entry;
}
const Implementation& drafts() {
  static const Implementation entry{"cuda.drafts",   missing_code, refuse_drafts,
                                    workspace_bytes, run_drafts,   true};
  return entry;
}

}  // namespace deltic::gpu::decode
