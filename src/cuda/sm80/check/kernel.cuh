// Checked mode: lists, then values, each finding a key of 64 bits that orders it; the least stays,
// whoever comes first. Then the finding in full.
#pragma once

#include "cuda/sm80/check/stage_describe.cuh"
#include "cuda/sm80/check/stage_lists.cuh"
#include "cuda/sm80/check/stage_values.cuh"

namespace deltic::gpu::check {

// Lengths, slots and lists in range; who writes which slot.
__global__ void __launch_bounds__(kThreads, 1) check_lists(const __grid_constant__ Params p) {
  const Walk all = threads();
  if (all.first == 0) check_ends(p);
#pragma unroll 1
  for (int64_t n = all.first; n < p.tokens.N; n += all.step) {
    if (p.tokens.packed) check_length(p, n);
    if (p.recurrent_from.present) check_from(p, n);
    if (p.window.present) check_window(p, n);
    if (p.accepted.present) check_committed(p, n);
    if (p.has_record && span_of(p.tokens, n).length > p.update_tokens) {
      report(p, kAccepted, 2 * n + 1);
    }
    if (has_indices(p)) check_slots(p, n);
    if (p.slots.parents.present) p.accepted.present ? check_path(p, n) : check_parents(p, n);
    if (p.ckpt_cu.present) check_checkpoints(p, n);
  }
}

__global__ void __launch_bounds__(kThreads, 4) check_values(const __grid_constant__ Params p) {
  const Walk all = threads(), by_warp = warps();
  const int lane = threadIdx.x % 32;
  for (int64_t n = all.first; n < p.tokens.N; n += all.step) check_owners(p, n);
  int64_t before = 0;
  for (int i = 0; i < p.inputs.num_params; ++i) {
    const CheckedParam& x = p.inputs.params[i];
    for (int64_t j = all.first; j < x.count; j += all.step) {
      if (!isfinite(load_param(x.param, j))) report(p, kParam, before + j);
    }
    before += x.count;
  }
  if (p.state_in.present || p.d_final.present) {
    for (int64_t i = by_warp.first; i < p.tokens.N * p.HV; i += by_warp.step) {
      check_state(p, i / p.HV, i % p.HV, lane);
    }
  }
  // Lines of tokens, padding left out.
  const int64_t lines = p.tokens.packed ? padding_begin(p.tokens) : p.B * p.tokens.T;
  for (int64_t i = by_warp.first; i < lines * p.HV; i += by_warp.step) {
    const int64_t row = i / p.HV;
    int64_t n = 0, t = row;
    if (!p.tokens.packed) {
      n = row / p.tokens.T, t = row % p.tokens.T;
    } else {
      n = last_begun(p.tokens.N, [&](int64_t i) { return span_of(p.tokens, i).begin <= row; });
      t = row - span_of(p.tokens, n).begin;
      if (t < 0 || t >= span_of(p.tokens, n).length) continue;  // offsets that decrease
    }
    if (is_padding(p, n)) continue;
    check_rows(p, n, t, i % p.HV, lane);
    // A lane per channel, once per chunk.
    if (!p.inputs.sums || t % p.chunk != 0) continue;
    for (int64_t c = lane; c < p.gate_width; c += 32) check_sums(p, n, t, i % p.HV, c);
  }
}

// One CTA, behind the checks: what the least key means.
__global__ void __launch_bounds__(kThreads, 1) describe(const __grid_constant__ Params p) {
  const unsigned long long key = p.record->key;
  const auto position = static_cast<int64_t>(key & ((1ull << 60) - 1));
  Finding f;
  if (key != ~0ull) {
    switch (static_cast<Class>(key >> 60)) {
      case kLengths:
        f = describe_lengths(p, position);
        break;
      case kFrom:
        f = describe_from(p, position);
        break;
      case kAccepted:
        f = describe_accepted(p, position);
        break;
      case kPool:
        f = describe_slots(p, position);
        break;
      case kTwice:
        f = describe_twice(p, position);
        break;
      case kRead:
        f = describe_read(p, position, Argument::read_index, p.pool_owner, num_columns(p));
        break;
      case kParents:
        f = describe_parents(p, position);
        break;
      case kLists:
        f = describe_lists(p, position);
        break;
      case kListTwice:
        f = describe_list_twice(p, position);
        break;
      case kListRead:
        f = describe_read(p, position, Argument::ckpt_slots, p.ckpt_owner, list_writers(p));
        break;
      case kParam:
        f = describe_param(p, position);
        break;
      case kValue:
        f = describe_value(p, position);
        break;
      default:
        f = describe_sum(p, position);
    }
  }
  if (threadIdx.x == 0) {
    f.in_step = p.in_step;
    p.record->mark = kMark, p.record->op = p.op;
    p.record->finding = f;
    // The record of the checks before is complete, and says the call's first finding.
    if (p.first != nullptr && key != ~0ull && p.first->key == ~0ull) *p.first = *p.record;
  }
}

}  // namespace deltic::gpu::check
