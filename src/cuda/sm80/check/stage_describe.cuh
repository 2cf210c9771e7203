// What a key's position means: the finding in full, class by class.
#pragma once

#include "cuda/sm80/check/stage_lists.cuh"
#include "cuda/sm80/check/stage_values.cuh"

namespace deltic::gpu::check {

// The first i below count that has a property; count: none. By the whole CTA.
template <class F>
__device__ int64_t first_of(int64_t count, F&& has) {
  __shared__ unsigned long long s_first;
  __syncthreads();  // the one before has been read
  if (threadIdx.x == 0) s_first = static_cast<unsigned long long>(count);
  __syncthreads();
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    if (!has(i)) continue;
    atomicMin(&s_first, static_cast<unsigned long long>(i));
    break;
  }
  __syncthreads();  // all have looked
  return static_cast<int64_t>(s_first);
}

__device__ inline Finding describe_lengths(const Params& p, int64_t position) {
  const Indices& cu = p.tokens.cu;
  Finding f{.argument = Argument::cu_seqlens};
  if (position == 0) {
    f.wrong = Wrong::first_offset, f.got = load_index(cu, 0);
  } else if (position <= p.tokens.N) {
    f.wrong = Wrong::falling_offset, f.at = position, f.limit = -1;
    f.got = load_index(cu, position), f.other = load_index(cu, position - 1);
  } else {
    f.wrong = Wrong::last_offset, f.got = load_index(cu, p.tokens.N), f.limit = p.tokens.T;
  }
  return f;
}
__device__ inline Finding describe_from(const Params& p, int64_t n) {
  Finding f{.wrong = Wrong::token_of_sequence, .argument = Argument::recurrent_from, .sequence = n};
  f.got = load_index(p.recurrent_from, n), f.limit = span_of(p.tokens, n).length, f.at = n;
  return f;
}
// Positions: two of the sequence.
__device__ inline Finding describe_accepted(const Params& p, int64_t position) {
  const bool is_window = p.window.present;
  Finding f{.wrong = Wrong::accepted, .argument = Argument::accepted, .sequence = position / 2};
  f.limit = is_window ? p.most : p.accepted.present ? p.update_tokens : p.slots.read.n1;
  if (position % 2 == 1 && p.has_record) {
    f.wrong = Wrong::few_columns, f.argument = Argument::record;
    f.got = p.update_tokens, f.limit = span_of(p.tokens, f.sequence).length;
  } else if (position % 2 == 1) {
    f.wrong = Wrong::long_window, f.argument = Argument::x;
    f.got = span_of(p.tokens, f.sequence).length;
  } else {
    f.got = load_index(is_window            ? p.window
                       : p.accepted.present ? p.accepted
                                            : p.slots.accepted,
                       f.sequence);
  }
  return f;
}
__device__ inline Finding describe_slots(const Params& p, int64_t position) {
  const int64_t per = num_columns(p) + 2, n = position / per, item = position % per;
  Finding f{.wrong = Wrong::slot, .argument = written_name(p)};
  f.at = n, f.limit = p.slots.write_slots;
  if (item == 0) {
    f.wrong = Wrong::few_columns, f.sequence = n, f.at = 0;
    f.got = p.slots.write.n1, f.limit = span_of(p.tokens, n).length;
  } else if (item == 1) {
    f.argument = Argument::read_index, f.limit = p.slots.read_slots;
    f.got = load_index(p.slots.read, n, read_column(p, n));
  } else {
    f.got = load_index(p.slots.write, n, item - 2);
  }
  return f;
}
__device__ inline Finding describe_parents(const Params& p, int64_t position) {
  const int64_t n = position / kPerTree, item = position % kPerTree, t = (item - 2) / 2;
  const int64_t length = span_of(p.tokens, n).length;
  Finding f{.argument = Argument::parents, .sequence = n};
  if (item == 0) {
    f.wrong = Wrong::many_drafts, f.got = length;
    return f;
  }
  if (item == 1) {
    f.wrong = Wrong::few_columns, f.got = p.slots.parents.n1, f.limit = length;
    return f;
  }
  f.token = t;
  if (item % 2 == 0) {
    f.wrong = Wrong::start_overwritten;
    f.got = start_slot(p, n), f.other = token_over_start(p, n, t);
  } else {
    f.got = load_index(p.slots.parents, n, t);
    f.wrong = f.got >= -1 && f.got < t ? Wrong::parent_not_kept : Wrong::parent;
  }
  return f;
}
__device__ inline Finding describe_lists(const Params& p, int64_t position) {
  Finding f{.wrong = Wrong::falling_offset, .argument = Argument::ckpt_cu};
  if (position == 0) {
    f.wrong = Wrong::first_offset, f.got = load_index(p.ckpt_cu, 0);
    return f;
  }
  const int64_t per = 2 * p.ckpt_tokens.n0 + 1, n = (position - 1) / per;
  const int64_t item = (position - 1) % per, m = (item - 1) / 2;
  if (item == 0) {
    f.got = load_index(p.ckpt_cu, n + 1), f.other = load_index(p.ckpt_cu, n);
    f.limit = p.ckpt_tokens.n0, f.at = n + 1;
  } else if (item % 2 == 1) {
    f.wrong = Wrong::slot, f.argument = Argument::ckpt_slots, f.at = m;
    f.got = load_index(p.ckpt_slots, m), f.limit = p.ckpt_num_slots;
  } else {
    f.wrong = Wrong::token_of_sequence, f.argument = Argument::ckpt_tokens, f.at = m;
    f.sequence = n, f.got = load_index(p.ckpt_tokens, m);
    f.limit = span_of(p.tokens, n).length;
  }
  return f;
}
// The two lowest writers of a slot. By the whole CTA, as the ones below.
__device__ inline Finding describe_twice(const Params& p, int64_t slot) {
  const int64_t columns = num_columns(p), first = static_cast<int64_t>(p.pool_owner[slot]);
  const int64_t second = first_of(p.tokens.N * columns, [&](int64_t i) {
    return i != first && i % columns < num_writes(p, i / columns) &&
           written_slot(p, i / columns, i % columns) == slot;
  });
  return {.wrong = Wrong::written_twice,
          .argument = written_name(p),
          .sequence = first / columns,
          .got = slot,
          .other = second / columns};
}
__device__ inline Finding describe_list_twice(const Params& p, int64_t slot) {
  const int64_t per = list_writers(p), first = static_cast<int64_t>(p.list_owner[slot]);
  // The next lowest: the sequence that has it says which of its writers.
  const int64_t other = first_of(p.tokens.N, [&](int64_t n) {
    bool has = false;
    for_list_writers(p, n, [&](int64_t writer, int64_t at, bool) {
      has = has || (at == slot && writer != first);
    });
    return has;
  });
  Finding f{.wrong = Wrong::written_twice, .argument = Argument::ckpt_slots};
  f.got = slot, f.sequence = first / per, f.other = other;
  return f;
}
// owner: of slots, per writers of a sequence.
__device__ inline Finding describe_read(const Params& p, int64_t n, Argument argument,
                                        const unsigned long long* owner, int64_t per) {
  const int64_t slot = start_slot(p, n);
  return {.wrong = Wrong::read_while_written,
          .argument = argument,
          .sequence = n,
          .got = slot,
          .other = static_cast<int64_t>(owner[slot]) / per};
}
__device__ inline Finding describe_param(const Params& p, int64_t position) {
  Finding f{.wrong = Wrong::not_finite};
  for (int i = 0; i < p.inputs.num_params; ++i) {
    const CheckedParam& x = p.inputs.params[i];
    if (position < x.count) {
      f.argument = x.argument, f.value = load_param(x.param, position);
      (x.is_channel ? f.channel : f.head) = position / x.per_unit;
      break;
    }
    position -= x.count;
  }
  return f;
}
__device__ inline Finding describe_value(const Params& p, int64_t position) {
  const int64_t per = p.HV * kPerHead, line = position / per, item = position % per;
  const int64_t n = sequence_of_line(p, line), t = line - first_line(p, n) - 1;
  Finding f{.wrong = Wrong::not_finite, .sequence = n};
  if (t < 0) {
    const int which = item < p.HV ? 0 : 1;
    const States& x = which == 0 ? p.state_in : p.d_final;
    const int64_t slot = state_slot(p, which, n), head = item - which * p.HV;
    const int64_t i = first_of(p.K * p.V, [&](int64_t j) {
      return (which == 1 || is_read(p, n, j)) && !isfinite(state_number(p, x, slot, head, j));
    });
    f.argument = which == 1        ? Argument::d_final_state
                 : p.slots.is_pool ? Argument::state_pool
                                   : Argument::initial_state;
    f.head = head % p.heads, f.layer = p.HV > p.heads ? head / p.heads : -1;
    f.value = state_number(p, x, slot, head, min(i, p.K * p.V - 1));
    return f;
  }
  const int64_t head = item / kPerHead;
  const CheckedRows& x = p.inputs.rows[item % kPerHead];
  const Span span = span_of(p.tokens, n);
  const int64_t at = row_offset(p, x, span, t, head), width = row_width(p, x, t);
  const int64_t c = first_of(
      width, [&](int64_t j) { return !isfinite(load(x.rows.data, x.rows.dtype, at + j)); });
  f.argument = x.argument, f.token = t, f.head = head % p.heads;
  f.layer = p.HV > p.heads ? head / p.heads : -1;
  f.value = load(x.rows.data, x.rows.dtype, at + min(c, width - 1));
  return f;
}
__device__ inline Finding describe_sum(const Params& p, int64_t position) {
  const int64_t t = position % p.tokens.T, column = position / p.tokens.T;
  const int64_t channel = column % p.gate_width, job = column / p.gate_width;
  const int64_t n = job / p.HV, head = job % p.HV;
  return {.wrong = Wrong::growing_gate,
          .argument = Argument::g,
          .sequence = n,
          .token = t,
          .head = head,
          .value = gate_sum(p, span_of(p.tokens, n), t, head, channel)};
}

}  // namespace deltic::gpu::check
