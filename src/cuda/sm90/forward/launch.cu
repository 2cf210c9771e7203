// Host side of the forward: what it takes, its workspace, tensor maps, the order of launches.
#include <algorithm>
#include <span>
#include <string_view>

#include "core/error.h"
#include "core/sizes.h"
#include "cuda/cuda.h"
#include "cuda/device.h"
#include "cuda/schedule/explain.h"
#include "cuda/schedule/fused.h"
#include "cuda/schedule/segments.h"
#include "cuda/set.h"
#include "cuda/sm80/recurrence/launch.h"
#include "cuda/sm90/forward/instantiate.h"
#include "cuda/sm90/forward/launch.h"
#include "cuda/sm90/forward/stage_merge.cuh"
#include "cuda/tensor_map.h"
#include "cuda/tile/sequence.cuh"

namespace deltic::gpu::forward {
namespace {

using schedule::chunks_in, schedule::kFewestSms, schedule::kFewestSmsSplit, schedule::kind_of;

constexpr const char* kName = "cuda.sm90.forward";
constexpr int kRing = 8;  // packets per carrier: 4 starve it, 32 leave L2

// g per channel as tiles of bf16.
bool has_gate_tiles(const Problem& p) {
  return p.gate == Gate::channel && p.g.dtype == DType::bf16 && is_16_bytes(p.g, p.HV, 2, p.B);
}

int64_t num_checkpoints(const Problem& p) { return p.ckpt ? p.ckpt_tokens.n0 : 0; }

// Whether transfers may be short. Only under auto: all others promise bits that one head's gates
// do not change for another. Only of long pieces: a look takes about 10 us.
constexpr int kLongPiece = 24;  // chunks
bool looks_for_forgotten(const Problem& p, int split_chunks) {
  return p.split == DELTIC_SPLIT_AUTO && p.gate == Gate::channel && split_chunks >= kLongPiece &&
         schedule::num_windows(int(p.B * p.T), split_chunks) <= kMaxWindows;
}

// Places in the workspace, in bytes.
struct Workspace {
  int64_t plan[2], pieces, prefix, first, flags, handoff, ring, rows, transfer, segment_state;
  int64_t forgotten;                                           // -1: transfers are whole
  int64_t chunk_stash, ckpt_spans, ckpt_places, stash, bytes;  // checkpoints
  int max_pieces, split_chunks;
};
Workspace workspace_of(const Problem& p, int64_t sms) {
  Workspace w{};
  const int64_t state = kWidth * kWidth * 4;
  w.split_chunks = schedule::split_chunks(p, int(sms));
  const int64_t chunks = p.packed ? chunks_in(p.T) : p.B * chunks_in(p.T);
  w.max_pieces = int(p.N + (w.split_chunks > 0 ? chunks / w.split_chunks + 1 : 0));
  int64_t at = 0;
  const auto take = [&](auto... extents) {
    const int64_t place = at;
    at = checked_sum(at, round_up(checked_product(extents...), 1024));
    return place;
  };
  w.plan[0] = take(sizeof(Plan)), w.plan[1] = take(sizeof(Plan));
  w.pieces = take(w.max_pieces, sizeof(Piece));
  w.prefix = take((w.max_pieces + 1) * 4), w.first = take((p.N + 1) * 4);
  w.flags = take(flag_words(int(sms)) * 4);
  w.handoff = take(sms * state);
  w.ring = take(sms * kRing *
                int64_t(kind_of(p) == GateKind::kChannel ? sizeof(Packet<GateKind::kChannel>)
                                                         : sizeof(Packet<GateKind::kHead>)));
  if (kind_of(p) == GateKind::kHead) w.rows = take(p.B, p.T, p.HV, sizeof(float2));
  if (w.split_chunks > 0) {
    w.transfer = take(2, w.max_pieces, p.HV, state);
    w.segment_state = take(w.max_pieces, p.HV, state);
  }
  w.forgotten = -1;
  if (looks_for_forgotten(p, w.split_chunks))
    w.forgotten =
        take(schedule::num_windows(int(p.B * p.T), w.split_chunks), forgotten_stride(int(p.HV)));
  if (const int64_t m = num_checkpoints(p); m > 0) {
    w.chunk_stash = take((p.packed ? chunks_in(p.T) + p.N : p.B * chunks_in(p.T)) * 4);
    w.ckpt_spans = take(m, sizeof(Span)), w.ckpt_places = take(2, m, 4);
    w.stash = take(m, p.HV, state);
  }
  w.bytes = at;
  return w;
}

IndexList list_of(const Indices& i) { return {i.present ? i.data : nullptr, i.is64, i.s0}; }
Rows values_of(const Rows& r) {
  return {r.present ? r.data : nullptr, r.dtype, r.present, r.sb, r.st, r.sh};
}
StateView view_of(const States& s) {
  return {s.present ? s.data : nullptr, s.dtype, s.s_slot, s.s_head, s.s_k, s.s_v};
}

Params params_of(const Problem& p, const Workspace& w, uint8_t* base) {
  Params d{};
  if (p.beta_kind != BetaKind::none) d.beta = values_of(p.beta);
  if (p.gate == Gate::head) d.g_head = values_of(p.g);
  if (p.gate == Gate::channel && !has_gate_tiles(p)) d.g_channel = values_of(p.g);
  if (p.A_log) d.a_log = {p.A_log.data, p.A_log.dtype};
  if (p.dt_bias) d.dt_bias = {p.dt_bias.data, p.dt_bias.dtype};
  d.o = {static_cast<uint16_t*>(p.o.data), p.o.sb, p.o.st, p.o.sh};
  d.state_in = view_of(p.state_in), d.state_out = view_of(p.state_out);
  d.scale = p.scale, d.lower_bound = p.lower_bound;
  d.beta_scale = p.beta_form == DELTIC_BETA_2SIGMOID ? 2.f : 1.f;
  d.num_batches = int(p.B), d.num_tokens = int(p.T), d.num_sequences = int(p.N);
  d.num_heads = int(p.H), d.num_value_heads = int(p.HV);
  d.key_width = int(p.K), d.value_width = int(p.V);
  d.has_norm = p.l2norm;
  d.has_sigmoid = p.beta_kind != BetaKind::none && p.beta_form != DELTIC_BETA_VALUE;
  d.form = p.gate_form == DELTIC_GATE_BOUNDED    ? GateForm::kBounded
           : p.gate_form == DELTIC_GATE_SOFTPLUS ? GateForm::kSoftplus
                                                 : GateForm::kLogDecay;
  d.is_packed = p.packed;
  d.cu_seqlens = list_of(p.cu), d.spans = p.spans;
  d.slots = slot_lists_of(p);
  d.record = p.record;
  d.split_chunks = w.split_chunks;
  if (p.save != DELTIC_SAVE_NONE) d.saved = p.saved.data, d.saved_layout = saved_layout(p, p.save);
  d.max_pieces = w.max_pieces, d.ring_slots = kRing;
  d.plan = reinterpret_cast<Plan*>(base + w.plan[0]);
  d.pieces = reinterpret_cast<Piece*>(base + w.pieces);
  d.chunk_prefix = reinterpret_cast<int*>(base + w.prefix);
  d.first_piece = reinterpret_cast<int*>(base + w.first);
  d.flags = reinterpret_cast<uint32_t*>(base + w.flags);
  d.handoff = reinterpret_cast<float*>(base + w.handoff);
  d.ring = base + w.ring, d.head_rows = reinterpret_cast<float2*>(base + w.rows);
  d.transfer = reinterpret_cast<float*>(base + w.transfer);
  d.segment_state = reinterpret_cast<float*>(base + w.segment_state);
  if (w.forgotten >= 0) {
    d.look_g = values_of(p.g), d.look_k = values_of(p.k);
    d.forgotten = base + w.forgotten;
  }
  return d;
}

void add_checkpoints(const Problem& p, const Workspace& w, uint8_t* base, Params& d) {
  const int m = int(num_checkpoints(p));
  if (m == 0) return;
  auto* const places = reinterpret_cast<int*>(base + w.ckpt_places);
  d.ckpt = {.cu = list_of(p.ckpt_cu),
            .tokens = list_of(p.ckpt_tokens),
            .slots = list_of(p.ckpt_slots),
            .count = m,
            .num_slots = int(p.ckpt.slots),
            .chunk_stash = reinterpret_cast<int*>(base + w.chunk_stash),
            .spans = reinterpret_cast<Span*>(base + w.ckpt_spans),
            .from = places,
            .to = places + m,
            .stash = reinterpret_cast<float*>(base + w.stash)};
}
// From the stash to the tokens: every checkpoint is a sequence of at most 63 tokens without o.
void finish_checkpoints(const Problem& p, const Params& d, void* stream) {
  const auto list = [&](const int* data) {
    return Indices{.data = data, .present = true, .is64 = false, .n0 = d.ckpt.count, .s0 = 1};
  };
  Problem tail = p;
  tail.packed = false, tail.N = d.ckpt.count, tail.T = kChunk - 1;
  tail.o = {}, tail.is_pool = true;
  tail.state_in = {.data = d.ckpt.stash,
                   .dtype = DType::f32,
                   .present = true,
                   .slots = d.ckpt.count,
                   .s_slot = p.HV * kStateSize,
                   .s_head = kStateSize,
                   .s_k = 1,
                   .s_v = kWidth};
  tail.state_out = p.ckpt;
  tail.read_index = list(d.ckpt.from), tail.write_index = list(d.ckpt.to);
  // The planning kernel has looked at null slots and at what sequences start from.
  tail.null_slot = -1, tail.accepted = {}, tail.has_initial = {};
  tail.ckpt = {}, tail.ckpt_cu = {}, tail.ckpt_tokens = {}, tail.ckpt_slots = {};
  tail.spans = d.ckpt.spans;
  recurrence::run(tail, stream);
}

template <class E, deltic_gate_form kForm, bool kTransfer>
void launch_channel(const Problem& p, const Params& d, const Maps& maps, int sms,
                    cudaStream_t stream) {
  if (has_gate_tiles(p))
    launch<E, GateKind::kChannel, kForm, false, kTransfer>(d, maps, sms, stream);
  else
    launch<E, GateKind::kChannel, kForm, true, kTransfer>(d, maps, sms, stream);
}
template <class E, bool kTransfer>
void launch_gate(const Problem& p, const Params& d, const Maps& maps, int sms,
                 cudaStream_t stream) {
  if (kind_of(p) == GateKind::kHead)
    launch<E, GateKind::kHead, DELTIC_GATE_LOG_DECAY, false, kTransfer>(d, maps, sms, stream);
  else if (p.gate_form == DELTIC_GATE_LOG_DECAY)
    launch_channel<E, DELTIC_GATE_LOG_DECAY, kTransfer>(p, d, maps, sms, stream);
  else if (p.gate_form == DELTIC_GATE_BOUNDED)
    launch_channel<E, DELTIC_GATE_BOUNDED, kTransfer>(p, d, maps, sms, stream);
  else
    launch_channel<E, DELTIC_GATE_SOFTPLUS, kTransfer>(p, d, maps, sms, stream);
}
template <bool kTransfer>
void launch_kind(const Problem& p, const Params& d, const Maps& maps, int sms,
                 cudaStream_t stream) {
  if constexpr (!kFullSet) {
    using E = __nv_bfloat16;
    if (kind_of(p) == GateKind::kHead)
      launch<E, GateKind::kHead, DELTIC_GATE_LOG_DECAY, false, kTransfer>(d, maps, sms, stream);
    else
      launch<E, GateKind::kChannel, DELTIC_GATE_BOUNDED, false, kTransfer>(d, maps, sms, stream);
  } else if (p.q.dtype == DType::f16) {
    launch_gate<__half, kTransfer>(p, d, maps, sms, stream);
  } else {
    launch_gate<__nv_bfloat16, kTransfer>(p, d, maps, sms, stream);
  }
}

void launch_fused_kind(const Problem& p, const Params& d, const Maps& maps, int sms,
                       cudaStream_t stream) {
  if constexpr (kFullSet)
    if (p.q.dtype == DType::f16) return launch_fused<__half>(d, maps, sms, stream);
  launch_fused<__nv_bfloat16>(d, maps, sms, stream);
}

}  // namespace

const char* refuse(const Problem& p) {
  if (p.op != DELTIC_FORWARD) return "it has the forward alone";
  // Counted in 32 bits; divide() of schedule/order.cuh is exact up to 2^22 chunks.
  const double chunks = std::max(1.0, double(p.B) * double(p.T) / kChunk + double(p.N));
  if (chunks > double(1 << 22) || chunks * double(p.HV) > double(1 << 29))
    return "more than 2^22 chunks, or 2^29 of all heads";
  if (p.HV > 65535) return "more than 65535 value heads, as many as a grid has in y";
  for (const int64_t n : {p.state_in.slots, p.state_out.slots, p.ckpt.slots, p.ckpt_tokens.n0})
    if (n > INT32_MAX) return "more than 2^31 - 1 slots or checkpoints, counted in 32 bits";
  if (p.q.dtype != DType::bf16 && p.q.dtype != DType::f16) return "q, k and v are not of 16 bits";
  if (p.K > kWidth || p.V > kWidth || p.K % 8 != 0 || p.V % 8 != 0)
    return "K or V is above 128 or no multiple of 8";
  if (p.chunk != kChunk) return "its chunks have 64 tokens";
  if (p.beta_kind == BetaKind::value || p.gv) return "beta or a gate per value channel";
  if (p.split == DELTIC_SPLIT_SEGMENTS && p.segment_length % kChunk != 0)
    return "a segment length that is no multiple of 64";
  for (const Rows* rows : {&p.beta, &p.g})
    if (*rows && rows->dtype == DType::f64) return "beta or g is fp64";
  for (const Param* flat : {&p.A_log, &p.dt_bias})
    if (*flat && (!flat->contiguous || flat->dtype == DType::f64))
      return "A_log or dt_bias is not contiguous, or fp64";
  for (const States* states : {&p.state_in, &p.state_out, &p.ckpt})
    if (*states && states->dtype == DType::f64) return "a state is fp64";
  if (p.write_index.n1 > 0) return "states after every token";
  for (const Rows* rows : {&p.q, &p.k})
    if (!is_16_bytes(*rows, p.H, 2, p.B))
      return "a stride or address of q or k is no multiple of 16 bytes";
  for (const Rows* rows : {&p.v, &p.o})
    if (!is_16_bytes(*rows, p.HV, 2, p.B))
      return "a stride or address of v or o is no multiple of 16 bytes";
  // Gates per channel that are not bf16 tiles are read by pairs.
  if (p.gate == Gate::channel &&
      (p.g.sh % 2 || p.g.st % 2 || p.g.sb % 2 ||
       reinterpret_cast<uintptr_t>(p.g.data) % (2 * size_of(p.g.dtype)) != 0))
    return "a stride of g is odd";
  if (!kFullSet &&
      (p.q.dtype == DType::f16 ||
       (p.gate == Gate::channel && !(p.gate_form == DELTIC_GATE_BOUNDED && has_gate_tiles(p)))))
    return kNotInThisBuild;
  return refuse_before_sm90(p);
}

namespace {

std::vector<WorkDivision> divisions(const Problem& p, int sms) {
  // Neither this machine's GPU nor this build's set of kernels matters here.
  const char* sentence = refuse(p);
  const bool is_taken = sentence == nullptr || sentence == refuse_before_sm90(p) ||
                        std::string_view(sentence) == kNotInThisBuild;
  return is_taken ? schedule::explain(p, sms) : std::vector<WorkDivision>{};
}

}  // namespace

void refuse_grid(int ctas) {
  static_cast<void>(cudaGetLastError());
  fail(DELTIC_RUNTIME_ERROR, "forward: ", kName, " needs ", ctas,
       " CTAs that run at once, one for each SM of the stream's context, and the driver finds room "
       "for fewer; cuda.general needs none (options.impl or DELTIC_IMPL)");
}

size_t workspace_bytes(const Problem& p) { return size_t(workspace_of(p, num_sms(p)).bytes); }

void run(const Problem& p, void* workspace, void* stream_handle) {
  if (p.N == 0 && p.T == 0) return;
  const auto stream = static_cast<cudaStream_t>(stream_handle);
  const int sms = num_sms(p);
  const Workspace w = workspace_of(p, sms);
  if (const int fewest = w.split_chunks > 0 ? kFewestSmsSplit : kFewestSms; sms < fewest) {
    fail(DELTIC_UNSUPPORTED, "forward: ", kName, " needs ", fewest, " SMs",
         w.split_chunks > 0 ? " for sequences in segments" : "", ", the stream's context has ", sms,
         "; cuda.general takes any number (options.impl or DELTIC_IMPL)");
  }
  auto* const base = static_cast<uint8_t*>(workspace);
  Params d = params_of(p, w, base);
  add_checkpoints(p, w, base, d);
  Maps maps;
  const auto map = [&](const Rows& rows, int64_t width, int64_t heads) {
    return make_map("forward", rows, p.B, p.T, heads, width, base);
  };
  maps.q = map(p.q, p.K, p.H), maps.k = map(p.k, p.K, p.H);
  maps.v = map(p.v, p.V, p.HV), maps.o = map(p.o, p.V, p.HV);
  maps.g = has_gate_tiles(p) ? map(p.g, p.K, p.HV) : maps.v;
  if (w.split_chunks > 0) {
    Params t = d;
    t.is_transfer = true, t.plan = reinterpret_cast<Plan*>(base + w.plan[1]);
    if (t.forgotten) launch_forget(t, stream);
    launch_kind<true>(p, t, maps, sms, stream);
    static SharedMemory memory;
    memory.allow(reinterpret_cast<const void*>(merge_segments), sizeof(MergeSmem),
                 "forward: shared memory");
    check_cuda(launch_after(merge_segments,
                            dim3(kWidth / kMergeRows, unsigned(p.HV),
                                 unsigned(std::min<int64_t>(p.N, 1024))),
                            kMergeThreads, int(sizeof(MergeSmem)), stream, d),
               "forward: states between segments");
  }
  if (schedule::fuses(p, sms))
    launch_fused_kind(p, d, maps, sms, stream);
  else
    launch_kind<false>(p, d, maps, sms, stream);
  if (d.ckpt.count > 0) finish_checkpoints(p, d, stream);
  if (d.saved) write_saved_header(p, stream);
}

const Implementation& implementation() {
  static const Implementation entry{kName,
                                    missing_sm90,
                                    refuse,
                                    workspace_bytes,
                                    [](const Problem& p, std::span<std::byte> workspace,
                                       void* stream) { run(p, workspace.data(), stream); },
                                    false,
                                    divisions};
  return entry;
}

}  // namespace deltic::gpu::forward
