// One token per sequence, V-first: every warp has some columns of a state and works alone, without
// shared memory and barriers. Norms and gates are made by every warp again, of what lies in its
// lanes anyway: where CTAs are less than a wave, nothing else would have run meanwhile.
#pragma once

#include <type_traits>

#include "cuda/ptx/flags.cuh"
#include "cuda/ptx/launch_order.cuh"
#include "cuda/ptx/prefetch.cuh"
#include "cuda/ptx/shared.cuh"
#include "cuda/ptx/vectors.cuh"
#include "cuda/sm80/decode/stage_state.cuh"

namespace deltic::gpu::decode {

// [n, head], strides in elements.
struct ShortRows {
  void* data;
  uint32_t sb, sh;
};
// What the kernel gets instead of Params: a quarter of the bytes, because lines of parameters come
// to the constant cache one by one. What comes first is used first. takes_alone() of launch.cu says
// which calls these numbers can say.
struct AloneParams {
  const int *read, *write;         // by 32-bit words; null: slot n
  uint32_t read_step, write_step;  // of those
  int null_slot, read_slots, write_slots;
  uint32_t V;
  ShortRows q, k, v, o, beta, g;
  void *A_log, *dt_bias;  // null: absent
  void *state_in, *state_out;
  int64_t in_slot, out_slot;
  uint32_t in_head, in_column, out_head, out_column;
  Divisor by_group;
  float scale, lower_bound;
  const uint64_t* record;
  DType g_type, beta_type, A_log_type, dt_bias_type;
  Gate gate;
  deltic_gate_form gate_form;
  BetaKind beta_kind;
  deltic_beta_form beta_form;
  DType x_type;  // of q, k, v and o: bf16 or fp16
  bool l2norm, is_pool;
};

inline AloneParams alone_params(const Params& p) {
  const auto rows = [](const Rows& x) {
    return ShortRows{x.data, static_cast<uint32_t>(x.sb), static_cast<uint32_t>(x.sh)};
  };
  const auto list = [](const Indices& x) {
    return x.present ? static_cast<const int*>(x.data) : nullptr;
  };
  const auto step = [](const Indices& x) { return static_cast<uint32_t>(x.s0 * (x.is64 ? 2 : 1)); };
  const auto count = [](int64_t x) { return static_cast<int>(x); };
  return {.read = list(p.slots.read),
          .write = list(p.slots.write),
          .read_step = step(p.slots.read),
          .write_step = step(p.slots.write),
          .null_slot = p.slots.read.present ? count(p.slots.null_slot) : -1,
          .read_slots = count(p.slots.read_slots),
          .write_slots = count(p.slots.write_slots),
          .V = static_cast<uint32_t>(p.V),
          .q = rows(p.q),
          .k = rows(p.k),
          .v = rows(p.v),
          .o = rows(p.o),
          .beta = rows(p.beta),
          .g = rows(p.g),
          .A_log = p.A_log.present ? p.A_log.data : nullptr,
          .dt_bias = p.dt_bias.present ? p.dt_bias.data : nullptr,
          .state_in = p.state_in.data,
          .state_out = p.state_out.data,
          .in_slot = p.state_in.s_slot,
          .out_slot = p.state_out.s_slot,
          .in_head = static_cast<uint32_t>(p.state_in.s_head),
          .in_column = static_cast<uint32_t>(p.state_in.s_v),
          .out_head = static_cast<uint32_t>(p.state_out.s_head),
          .out_column = static_cast<uint32_t>(p.state_out.s_v),
          .by_group = p.by_group,
          .scale = p.scale,
          .lower_bound = p.lower_bound,
          .record = p.tokens.record,
          .g_type = p.g.dtype,
          .beta_type = p.beta.dtype,
          .A_log_type = p.A_log.dtype,
          .dt_bias_type = p.dt_bias.dtype,
          .gate = p.gate,
          .gate_form = p.gate_form,
          .beta_kind = p.beta_kind,
          .beta_form = p.beta_form,
          .x_type = p.q.dtype,
          .l2norm = p.l2norm,
          .is_pool = p.slots.is_pool};
}

// And of kLists, what servers' calls have besides: packed sequences, of which there are as many as
// tokens; tables of slots, read by accepted counts; flags. Lists by 32-bit words.
struct ListedParams : AloneParams {
  const int *cu, *accepted;    // null: dense; the first column is read
  const uint8_t* has_initial;  // null: all have
  uint32_t cu_step, accepted_step, has_initial_step, read_column, write_column;  // column: a step
  int read_columns, write_columns;                                               // of tables
  bool per_token;  // write is a table, of a slot for every token
};
template <class Tr>
using AloneParamsOf = std::conditional_t<Tr::kLists, ListedParams, AloneParams>;

inline ListedParams listed_params(const Params& p) {
  const auto list = [](const Indices& x) {
    return x.present ? static_cast<const int*>(x.data) : nullptr;
  };
  const auto words = [](const Indices& x, int64_t n) {
    return static_cast<uint32_t>(n * (x.is64 ? 2 : 1));
  };
  const SlotLists& slots = p.slots;
  ListedParams x;
  static_cast<AloneParams&>(x) = alone_params(p);
  x.cu = p.tokens.packed ? list(p.tokens.cu) : nullptr;
  x.accepted = list(slots.accepted);
  x.has_initial = slots.has_initial.present ? slots.has_initial.data : nullptr;
  x.cu_step = words(p.tokens.cu, p.tokens.cu.s0);
  x.accepted_step = words(slots.accepted, slots.accepted.s0);
  x.has_initial_step = static_cast<uint32_t>(slots.has_initial.s0);
  x.read_column = words(slots.read, slots.read.s1);
  x.write_column = words(slots.write, slots.write.s1);
  x.read_columns = static_cast<int>(slots.read.n1);
  x.write_columns = static_cast<int>(slots.write.n1);
  x.per_token = slots.per_token;
  return x;
}

// Numbers of 16 bits, bf16 or fp16: which is looked at where they are used.
__device__ inline void value_of(const uint4& raw, bool is_f16, float (&x)[kChannels]) {
  if (is_f16) return unpack<__half>(raw, x);
  unpack<__nv_bfloat16>(raw, x);
}
__device__ inline float half_value(uint16_t raw, bool is_f16) {
  return is_f16 ? __half2float(__ushort_as_half(raw)) : __uint_as_float(uint32_t{raw} << 16);
}
__device__ inline uint16_t half_of(float x, bool is_f16) {
  return is_f16 ? __half_as_ushort(__float2half_rn(x))
                : __bfloat16_as_ushort(__float2bfloat16_rn(x));
}

// Eight channels of a row of 16-bit numbers, those of a piece.
template <class Tr>
__device__ uint4 load_channels(const uint16_t* row, int piece) {
  if constexpr (!Tr::kHalves)
    return *reinterpret_cast<const uint4*>(row + channel_of<Tr>(piece, 0));
  const uint2 a = *reinterpret_cast<const uint2*>(row + channel_of<Tr>(piece, 0));
  const uint2 b = *reinterpret_cast<const uint2*>(row + channel_of<Tr>(piece, 1));
  return {a.x, a.y, b.x, b.y};
}

// Decays of the thread's channels: lanes of a warp that have the same piece make four each, and
// exchange them.
template <class Tr>
__device__ void alone_decays(const AloneParams& p, const uint4& raw, const uint4& raw_bias,
                             const RawOne& raw_rate, float (&decay)[kChannels]) {
  const float rate = p.A_log != nullptr ? gate_rate(value_of(raw_rate, p.A_log_type)) : 1.0f;
  float g[4], bias[4], own[4];
  value_of(raw, p.g_type, g), value_of(raw_bias, p.dt_bias_type, bias);
  const bool has_gate = p.gate != Gate::none;
#pragma unroll
  for (int i = 0; i < 4; ++i) own[i] = 1;
  if (has_gate) decays_of(p.gate_form, p.lower_bound, rate, g, bias, own);
  const bool is_upper = (threadIdx.x & Tr::kPieces) != 0;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float other = __shfl_xor_sync(0xFFFFFFFFu, own[i], Tr::kPieces);
    decay[i] = is_upper ? other : own[i], decay[4 + i] = is_upper ? own[i] : other;
  }
}

// Addresses are computed before what follows, while the launch ahead still runs. A statement
// without an instruction that wants them would be moved behind the wait together with them. sink:
// the thread's own word of shared memory.
template <class... Ts>
__device__ void compute_now(uint32_t* sink, Ts*... x) {
  store_shared_volatile(smem_u32(sink),
                        (... ^ static_cast<uint32_t>(reinterpret_cast<uintptr_t>(x))));
}

// The CTA's part of the state into L2, while the launch ahead still runs. That launch may yet write
// the list of slots, and the states, so that nothing of what is read here is believed: an entry is
// compared with the pool's ends like any other, whatever it is, a line that is asked for belongs to
// the pool, and L2 is where the writer's lines go, too. After the wait the kernel reads the list
// again. A slot that was not the one costs its lines' way to L2, no more.
template <class Tr>
__device__ void hint_state(const AloneParamsOf<Tr>& p, int lane) {
  using E = typename Tr::E;
  constexpr int kLine = 128, kLines = Tr::kWidth * static_cast<int>(sizeof(E)) / kLine;
  int slot = static_cast<int>(blockIdx.z);
  if (p.read != nullptr) {
    const int* read = p.read + static_cast<uint64_t>(blockIdx.z) * p.read_step;
    if constexpr (Tr::kLists) {
      if (p.accepted != nullptr) {
        const auto* count = p.accepted + static_cast<uint64_t>(blockIdx.z) * p.accepted_step;
        const int column = load_unordered(count) - 1;
        if (column < 0 || column >= p.read_columns) return;
        read += static_cast<uint64_t>(column) * p.read_column;
      }
    }
    slot = load_unordered(read);
  }
  if (slot <= p.null_slot || slot >= p.read_slots) return;
  const E* in = static_cast<const E*>(p.state_in) + static_cast<int64_t>(slot) * p.in_slot +
                static_cast<uint64_t>(blockIdx.y) * p.in_head;
#pragma unroll
  for (int i = lane; i < Tr::kSlice * kLines; i += 32) {
    const unsigned column = blockIdx.x * Tr::kSlice + i / kLines;
    const auto* line =
        reinterpret_cast<const char*>(in + static_cast<uint64_t>(column) * p.in_column);
    if (column < p.V) line_prefetch_as_is(line + i % kLines * kLine);
  }
}

// Where a lane's numbers of a token lie, and those that are looked at later.
struct AloneRows {
  const uint16_t *q, *k, *v;
  uint16_t* o;
};
struct AloneGates {
  const char *g, *bias, *A_log, *beta;
};

// Of kLists: what the lists have for a sequence, before it is looked at.
struct ListedEntries {
  int begin, end, column;  // rows; of the table of slots
  uint8_t has_initial;
};
__device__ inline ListedEntries load_lists(const ListedParams& p, unsigned n) {
  ListedEntries x{static_cast<int>(n), static_cast<int>(n) + 1, 0, 1};
  if (p.accepted != nullptr) x.column = p.accepted[uint64_t{n} * p.accepted_step] - 1;
  if (p.cu != nullptr) {
    x.begin = p.cu[uint64_t{n} * p.cu_step], x.end = p.cu[(uint64_t{n} + 1) * p.cu_step];
  }
  if (p.has_initial != nullptr) x.has_initial = p.has_initial[uint64_t{n} * p.has_initial_step];
  return x;
}
// The slot of the state after token t, of a table.
__device__ inline int listed_slot(const ListedParams& p, int t) {
  if (t >= p.write_columns) return -1;
  const int* row = p.write + static_cast<uint64_t>(blockIdx.z) * p.write_step;
  const int slot = row[static_cast<uint64_t>(t) * p.write_column];
  return named_slot(slot, p.null_slot, p.write_slots);
}

// Per SM, at least, of kLists: as many as run of Kind::alone, which has no bound. 0: none.
template <class Tr>
inline constexpr int kListedCtas = !Tr::kLists                   ? 0
                                   : sizeof(typename Tr::E) == 4 ? 4
                                   : Tr::kPerChannel             ? 5
                                                                 : 6;

// Grid: (slices, value heads, sequences). One warp more hints.
template <class Tr>
__global__ void __launch_bounds__(Tr::kThreads + 32, kListedCtas<Tr>)
    alone_kernel(const __grid_constant__ AloneParamsOf<Tr> p) {
  // Said to be the same for a warp.
  if (__shfl_sync(0xFFFFFFFFu, threadIdx.x / 32, 0) >= Tr::kWarps) {
    return hint_state<Tr>(p, static_cast<int>(threadIdx.x) - Tr::kThreads);
  }
  using E = typename Tr::E;
  constexpr int kC = Tr::kColumns, kP = Tr::kPieces, kN = kVectorSize<Tr>;
  constexpr int kStride = kP / (2 * kC);  // lanes that end with the same sum
  static_assert(Tr::kSingle && Tr::kVFirst && !Tr::kHeld && kStride >= 1);
  const unsigned n = blockIdx.z, head = blockIdx.y, key_head = p.by_group.quotient(head);
  const int piece = threadIdx.x % kP;
  const unsigned column = (blockIdx.x * Tr::kThreads + threadIdx.x) / kP * kC;
  // The column whose sums this lane ends with: of k in the lower half of a column's lanes, of q.
  const unsigned own_column = column + piece % (kP / 2) / kStride;
  const bool is_there = own_column < p.V, has_q = piece >= kP / 2;
  const auto row = [&](const ShortRows& x, unsigned i, unsigned h) {
    return static_cast<uint64_t>(i) * x.sb + static_cast<uint64_t>(h) * x.sh;
  };
  const auto rows_of = [&](unsigned i) {
    using X = uint16_t;
    AloneRows x;
    x.q = static_cast<const X*>(p.q.data) + row(p.q, i, key_head);
    x.k = static_cast<const X*>(p.k.data) + row(p.k, i, key_head);
    x.v = static_cast<const X*>(p.v.data) + row(p.v, i, head) + own_column;
    x.o = static_cast<X*>(p.o.data) + row(p.o, i, head) + own_column;
    return x;
  };
  AloneRows rows = rows_of(n);
  const E* in = static_cast<const E*>(p.state_in) + static_cast<uint64_t>(head) * p.in_head +
                static_cast<uint64_t>(column) * p.in_column + channel_of<Tr>(piece, 0);
  E* out = static_cast<E*>(p.state_out) + static_cast<uint64_t>(head) * p.out_head +
           static_cast<uint64_t>(column) * p.out_column + channel_of<Tr>(piece, 0);
  // Four channels of a gate per lane.
  const int d = Tr::kPerChannel ? channel_of<Tr>(piece, threadIdx.x / kP & 1) : 0;
  const auto gates_of = [&](unsigned i) {
    AloneGates x;
    x.g = place_of(p.g.data, p.g_type, row(p.g, i, head) + d);
    x.bias = place_of(p.dt_bias, p.dt_bias_type,
                      static_cast<uint64_t>(head) * (Tr::kPerChannel ? Tr::kWidth : 1) + d);
    x.A_log = place_of(p.A_log, p.A_log_type, head);
    x.beta = place_of(p.beta.data, p.beta_type, row(p.beta, i, head));
    return x;
  };
  AloneGates gates = gates_of(n);
  const int* read = p.read + static_cast<uint64_t>(n) * p.read_step;
  const int* write = p.write + static_cast<uint64_t>(n) * p.write_step;
  __shared__ uint32_t s_sink[Tr::kThreads];
  compute_now(s_sink + threadIdx.x, read, write, rows.q, rows.k, rows.v, gates.g, gates.bias,
              gates.A_log, gates.beta, in, out, rows.o);
  grid_wait();
  grid_release();  // hints of the next launch may come, while this one's bytes are under way
  if (p.record != nullptr && *p.record != ~0ull) return;
  int from = static_cast<int>(n), to = from;
  [[maybe_unused]] ListedEntries lists;
  bool has_table = false;
  if constexpr (Tr::kLists) lists = load_lists(p, n), has_table = p.accepted != nullptr;
  if (p.read != nullptr && !has_table) from = *read;
  if (p.write != nullptr) to = *write;
  // kLists: token t of `count`, the first of which is row `begin`. What is mostly so is believed
  // until all is under way: that there is one, row n.
  [[maybe_unused]] int begin = static_cast<int>(n), count = 1, t = 0;
  [[maybe_unused]] bool is_skipped = false;
  [[maybe_unused]] const auto go_to_row = [&](int i) {
    const auto row = static_cast<unsigned>(i);
    rows = rows_of(row), gates = gates_of(row);
  };
  const auto store_part = [&](E* part, int i, const uint4& vector) {
    const int c = tile_column<Tr>(i, 0);
    store_vector(part + static_cast<uint64_t>(c) * p.out_column +
                     channel_of<Tr>(0, tile_channel<Tr>(i, 0) / 4),
                 vector, column + c < p.V);
  };
  RawTile<Tr> raw;
#pragma unroll 1
  for (bool is_first = true;; is_first = false) {
    const uint4 raw_q = load_channels<Tr>(rows.q, piece), raw_k = load_channels<Tr>(rows.k, piece);
    uint4 raw_g{}, raw_bias{};
    RawOne raw_rate{}, raw_beta{};
    if (p.gate != Gate::none) {
      const auto load_gate = [&](const char* at, DType type) {
        if constexpr (Tr::kPerChannel) return load_four<Tr>(at, type, 0);
        const RawOne one = load_raw<Tr>(at, type, 0);
        return uint4{one.low, one.high, 0, 0};
      };
      raw_g = load_gate(gates.g, p.g_type);
      if (p.dt_bias != nullptr) raw_bias = load_gate(gates.bias, p.dt_bias_type);
      if (p.A_log != nullptr) raw_rate = load_raw<Tr>(gates.A_log, p.A_log_type, 0);
    }
    if (p.beta_kind == BetaKind::head) raw_beta = load_raw<Tr>(gates.beta, p.beta_type, 0);
    uint16_t raw_v = 0;
    if (is_there) raw_v = *rows.v;
    if (is_first) {
      // Slots, and the state.
      if constexpr (Tr::kLists) {  // behind loads that do not wait for the count
        if (has_table) {
          const bool is_column = lists.column >= 0 && lists.column < p.read_columns;
          from = is_column ? read[static_cast<uint64_t>(lists.column) * p.read_column] : -1;
        }
      }
      from = named_slot(from, p.null_slot, p.read_slots);
      to = named_slot(to, p.null_slot, p.write_slots);
      if constexpr (Tr::kLists) {
        is_skipped = p.is_pool && from < 0 && to < 0;
        if (lists.has_initial == 0) from = -1;
        in += static_cast<int64_t>(from) * p.in_slot;
      } else {
        in += static_cast<int64_t>(from) * p.in_slot, out += static_cast<int64_t>(to) * p.out_slot;
      }
#pragma unroll
      for (int i = 0; i < kVectors<Tr>; ++i) {
        const int c = tile_column<Tr>(i, 0);
        raw[i] = uint4{0, 0, 0, 0};
        if (from >= 0 && column + c < p.V) {
          raw[i] = *reinterpret_cast<const uint4*>(in + static_cast<uint64_t>(c) * p.in_column +
                                                   channel_of<Tr>(0, tile_channel<Tr>(i, 0) / 4));
        }
      }
    }
    if constexpr (Tr::kLists) {
      if (is_first && (lists.begin != begin || lists.end != begin + 1)) {
        const int all = static_cast<int>(gridDim.z);  // rows: as many as sequences
        const int padding = p.cu[uint64_t{gridDim.z} * p.cu_step];
        if (begin >= padding && is_there && has_q && piece % kStride == 0) *rows.o = 0;
        begin = min(max(lists.begin, 0), all), count = min(max(lists.end, begin), all) - begin;
        if (count == 0) {  // the state as it came
          E* part = out + static_cast<int64_t>(to) * p.out_slot;
          if (to < 0 || p.per_token) return;
#pragma unroll
          for (int i = 0; i < kVectors<Tr>; ++i) store_part(part, i, raw[i]);
          return;
        }
        for (int i = 1; p.per_token && is_skipped && i < count; ++i) {
          is_skipped = listed_slot(p, i) < 0;
        }
        go_to_row(begin);
        continue;
      }
      if (is_skipped) {
        if (is_there && has_q && piece % kStride == 0) *rows.o = 0;
        if (++t == count) return;
        go_to_row(begin + t);
        continue;
      }
    } else if (p.is_pool && from < 0 && to < 0) {
      if (is_there && has_q && piece % kStride == 0) *rows.o = 0;
      return;
    }
    // Keys, gates and beta.
    float q_all[kChannels], k_all[kChannels], decay[kChannels];
    const bool is_f16 = p.x_type == DType::f16;
    value_of(raw_q, is_f16, q_all), value_of(raw_k, is_f16, k_all);
    if (p.l2norm) normalize<kP>(q_all, k_all);
    float kq = 0;
#pragma unroll
    for (int i = 0; i < kChannels; ++i) q_all[i] *= p.scale, kq += q_all[i] * k_all[i];
    kq = sum_lanes<kP>(kq);
    float head_decay = 1.0f;
    if constexpr (Tr::kPerChannel) {
      alone_decays<Tr>(p, raw_g, raw_bias, raw_rate, decay);
    } else if (p.gate != Gate::none) {
      const float rate = p.A_log != nullptr ? gate_rate(value_of(raw_rate, p.A_log_type)) : 1.0f;
      head_decay = decay_of(log_decay(p.gate_form, p.lower_bound,
                                      value_of(RawOne{raw_g.x, raw_g.y}, p.g_type), rate,
                                      value_of(RawOne{raw_bias.x, raw_bias.y}, p.dt_bias_type)));
    }
    const float beta = p.beta_kind == BetaKind::none
                           ? 1.0f
                           : beta_value(p.beta_form, value_of(raw_beta, p.beta_type));
    // As in step() and solve_in_warp().
    float S[kC][kChannels], x[2 * kC] = {};
#pragma unroll
    for (int i = 0; i < kVectors<Tr>; ++i) {
      float some[kN];
      unpack<E>(raw[i], some);
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        const int c = tile_column<Tr>(i, e), d = tile_channel<Tr>(i, e);
        if constexpr (Tr::kPerChannel) some[e] = __fmul_rn(some[e], decay[d]);
        x[c] = __fmaf_rn(some[e], k_all[d], x[c]);
        x[kC + c] = __fmaf_rn(some[e], q_all[d], x[kC + c]);
        S[c][d] = some[e];
      }
    }
    sum_halving<kP / 2, 1>(x, piece);
    const float sum = __fmul_rn(head_decay, x[0]);
    const float own_v = half_value(raw_v, is_f16);
    const float own_u = __fmul_rn(beta, __fsub_rn(own_v, sum));  // of lanes with k
    const float other_u = __shfl_xor_sync(0xFFFFFFFFu, own_u, kP / 2);
    if (is_there && has_q && piece % kStride == 0) {
      *rows.o = half_of(__fmaf_rn(kq, other_u, sum), is_f16);
    }
    // Where the state goes. kLists: as a list says after the last token, or as a table after each.
    E* part = out;
    [[maybe_unused]] bool is_kept = true;
    if constexpr (Tr::kLists) {
      is_kept = to >= 0 && (p.per_token || t + 1 == count);
      if (!is_kept && t + 1 == count) return;
      part += static_cast<int64_t>(to) * p.out_slot;
    } else if (to < 0) {
      return;
    }
#pragma unroll
    for (int i = 0; i < kVectors<Tr>; ++i) {
      const int c = tile_column<Tr>(i, 0);
      const float u = __shfl_sync(0xFFFFFFFFu, own_u, c * kStride, kP);
      float some[kN];
#pragma unroll
      for (int e = 0; e < kN; ++e) {
        const int d = tile_channel<Tr>(i, e);
        some[e] = Tr::kPerChannel ? S[c][d] : __fmul_rn(S[c][d], head_decay);
        some[e] = __fmaf_rn(k_all[d], u, some[e]);
      }
      if constexpr (Tr::kLists) {
        raw[i] = pack<E>(some);
        if (is_kept) store_part(part, i, raw[i]);
      } else {
        store_vector(out + static_cast<uint64_t>(c) * p.out_column +
                         channel_of<Tr>(0, tile_channel<Tr>(i, 0) / 4),
                     pack<E>(some), column + c < p.V);
      }
    }
    if constexpr (!Tr::kLists) {
      return;
    } else {
      if (++t == count) return;
      if (p.per_token) to = listed_slot(p, t);
      go_to_row(begin + t);
    }
  }
}

}  // namespace deltic::gpu::decode
