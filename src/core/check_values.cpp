// Checks of values that the host can see: lengths, pool indices, checkpoint lists, finite inputs.
#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/error.h"
#include "core/sizes.h"

namespace deltic {
namespace {

struct SlotWrite {
  int64_t slot, owner;
  bool operator<(const SlotWrite& b) const {
    return slot != b.slot ? slot < b.slot : owner < b.owner;
  }
};

[[noreturn]] void bad(const Problem& p, Finding f) {
  f.in_step = p.in_step;
  fail(DELTIC_INVALID_ARGUMENT, text_of(p.op, f));
}

void check_lengths(const Problem& p, const Indices& cu, Argument name) {
  if (cu(0) != 0) bad(p, {.wrong = Wrong::first_offset, .argument = name, .got = cu(0)});
  for (int64_t n = 0; n < p.N; ++n) {
    if (cu(n + 1) < cu(n)) {
      bad(p, {.wrong = Wrong::falling_offset,
              .argument = name,
              .got = cu(n + 1),
              .other = cu(n),
              .limit = -1,
              .at = n + 1});
    }
  }
  if (cu(p.N) > p.T) {
    bad(p, {.wrong = Wrong::last_offset, .argument = name, .got = cu(p.N), .limit = p.T});
  }
}

// Every written slot in range and written once; throws with the argument's name.
void check_written_once(const Problem& p, Argument name, SlotWrite* writes, int64_t count) {
  std::sort(writes, writes + count);
  for (int64_t i = 1; i < count; ++i) {
    if (writes[i].slot == writes[i - 1].slot) {
      bad(p, {.wrong = Wrong::written_twice,
              .argument = name,
              .sequence = writes[i - 1].owner,
              .got = writes[i].slot,
              .other = writes[i].owner});
    }
  }
}

// Slots that null_slot says are none need not be there.
void check_slot(const Problem& p, Argument name, int64_t slot, int64_t slots, int64_t at) {
  if (slot < -1 || (slot >= slots && slot > p.null_slot)) {
    bad(p, {.wrong = Wrong::slot, .argument = name, .got = slot, .limit = slots, .at = at});
  }
}

// Whether the lists name no slot of a sequence: it is skipped, and its count is nobody's.
bool is_padding(const Problem& p, int64_t n) {
  const auto is_none = [&](const Indices& list) {
    for (int64_t column = 0; column < std::max<int64_t>(list.n1, 1) && list; ++column) {
      if (named_slot(p, list(n, column)) >= 0) return false;
    }
    return true;
  };
  return (p.read_index || p.write_index) && is_none(p.read_index) && is_none(p.write_index);
}

// Counts of accepted tokens: each names a column of the table, of conv a place in the window, and
// of commit the tokens of the record that count.
void check_accepted(const Problem& p) {
  const bool is_conv = p.op == DELTIC_CONV, is_commit = p.op == DELTIC_COMMIT;
  const int64_t most = is_conv ? p.V - p.taps + 2 : is_commit ? p.update_tokens : p.read_index.n1;
  const int64_t least = is_commit ? 0 : 1;
  for (int64_t n = 0; n < p.N; ++n) {
    const int64_t accepted = p.accepted(n);
    const int64_t length = length_of(p, n);
    const bool is_long = is_conv && length > most;
    if (accepted >= least && accepted <= most && !is_long) continue;
    if (is_padding(p, n)) continue;
    if (accepted < least || accepted > most) {
      bad(p, {.wrong = Wrong::accepted,
              .argument = Argument::accepted,
              .sequence = n,
              .got = accepted,
              .limit = most});
    }
    bad(p, {.wrong = Wrong::long_window,
            .argument = Argument::x,
            .sequence = n,
            .got = length,
            .limit = most});
  }
}

// Where sequences go over to the recurrent form.
void check_recurrent_from(const Problem& p) {
  for (int64_t n = 0; n < p.N; ++n) {
    const int64_t from = p.recurrent_from(n), length = length_of(p, n);
    if (from >= 0 && from <= length) continue;
    bad(p, {.wrong = Wrong::token_of_sequence,
            .argument = Argument::recurrent_from,
            .sequence = n,
            .got = from,
            .limit = length,
            .at = n});
  }
}

// commit: the tokens that the last accepted one comes from.
void check_path(const Problem& p) {
  for (int64_t n = 0; n < p.N; ++n) {
    if (is_padding(p, n)) continue;
    for (int64_t t = p.accepted(n) - 1; t >= 0;) {
      const int64_t parent = p.parents(n, t);
      if (parent < -1 || parent >= t) {
        bad(p, {.wrong = Wrong::parent,
                .argument = Argument::parents,
                .sequence = n,
                .token = t,
                .got = parent});
      }
      t = parent;
    }
  }
}

// Trees of drafted tokens: every parent comes before its token and has a slot to start from, if
// there is no record to start from.
void check_parents(const Problem& p) {
  if (p.op == DELTIC_COMMIT) return check_path(p);
  for (int64_t n = 0; n < p.N; ++n) {
    const Sequence s = sequence(p, n);
    if (s.length > kMaxDrafts) {
      bad(p, {.wrong = Wrong::many_drafts,
              .argument = Argument::parents,
              .sequence = n,
              .got = s.length});
    }
    if (s.length > p.parents.n1) {
      bad(p, {.wrong = Wrong::few_columns,
              .argument = Argument::parents,
              .sequence = n,
              .got = p.parents.n1,
              .limit = s.length});
    }
    for (int64_t t = 0; t < s.length && !s.skipped; ++t) {  // padding may have any
      const int64_t parent = p.parents(n, t);
      const bool is_before = parent >= -1 && parent < t;
      const bool is_kept = is_before && (p.updates || parent == t - 1 || parent < 0 ||
                                         token_slot(p, s, parent) >= 0);
      // A later branch from the start finds it in its slot: in place a token may have been there.
      for (int64_t i = 0;
           i < t && parent < 0 && s.read_slot >= 0 && !p.has_write_pool && !p.updates; ++i) {
        if (token_slot(p, s, i) != s.read_slot) continue;
        bad(p, {.wrong = Wrong::start_overwritten,
                .argument = Argument::parents,
                .sequence = n,
                .token = t,
                .got = s.read_slot,
                .other = i});
      }
      if (is_kept) continue;
      bad(p, {.wrong = is_before ? Wrong::parent_not_kept : Wrong::parent,
              .argument = Argument::parents,
              .sequence = n,
              .token = t,
              .got = parent});
    }
  }
}

// Every token has a row in the record.
void check_record_columns(const Problem& p) {
  for (int64_t n = 0; n < p.N; ++n) {
    const int64_t length = p.cu(n + 1) - p.cu(n);
    if (length <= p.update_tokens) continue;
    bad(p, {.wrong = Wrong::few_columns,
            .argument = Argument::record,
            .sequence = n,
            .got = p.update_tokens,
            .limit = length});
  }
}

// Who writes a slot, of writes in order; null: nobody.
const SlotWrite* write_to(const SlotWrite* writes, int64_t count, int64_t slot) {
  const SlotWrite* w = std::lower_bound(writes, writes + count, SlotWrite{slot, -1});
  return w != writes + count && w->slot == slot ? w : nullptr;
}

void check_pool(const Problem& p, SlotWrite* writes) {
  if (!p.read_index && !p.write_index) return;
  const bool per_token = p.write_index.n1 > 0;
  // One list may serve for both.
  const bool is_own = p.write_index && p.write_index.data != p.read_index.data;
  const Argument write_name = is_own ? Argument::write_index : Argument::read_index;
  int64_t count = 0;
  for (int64_t n = 0; n < p.N; ++n) {
    const int64_t length = length_of(p, n);
    if (per_token && length > p.write_index.n1) {
      bad(p, {.wrong = Wrong::few_columns,
              .argument = write_name,
              .sequence = n,
              .got = p.write_index.n1,
              .limit = length});
    }
    if (p.read_index) {
      const int64_t slot = p.read_index(n, read_column(p, n));
      check_slot(p, Argument::read_index, slot, p.state_in.slots, n);
    }
    const Indices& write = p.write_index ? p.write_index : p.read_index;
    for (int64_t t = 0; t < (per_token ? length : 1) && p.state_out; ++t) {
      const int64_t slot = per_token ? write(n, t) : write(n);
      check_slot(p, write_name, slot, p.state_out.slots, n);
      if (named_slot(p, slot) >= 0) writes[count++] = {slot, n};
    }
  }
  check_written_once(p, write_name, writes, count);
  if (!p.read_index || !p.write_index || p.has_write_pool) return;
  for (int64_t n = 0; n < p.N; ++n) {
    if (p.has_initial && !p.has_initial(n)) continue;
    const int64_t slot = listed_read_slot(p, n);
    const SlotWrite* w = write_to(writes, count, slot);
    if (w != nullptr && w->owner != n) {
      bad(p, {.wrong = Wrong::read_while_written,
              .argument = Argument::read_index,
              .sequence = n,
              .got = slot,
              .other = w->owner});
    }
  }
}

// The slots that sequences leave their states in, whether lists name them or not.
void add_pool_writes(const Problem& p, SlotWrite* writes, int64_t& count) {
  for (int64_t n = 0; n < p.N; ++n) {
    const Sequence s = sequence(p, n);
    if (s.write_slot >= 0) writes[count++] = {s.write_slot, n};
    for (int64_t t = 0; t < s.length && p.write_index.n1 > 0; ++t) {
      if (token_slot(p, s, t) >= 0) writes[count++] = {token_slot(p, s, t), n};
    }
  }
}

// The first sequence that starts from a slot of the pool which a checkpoint takes. Puts the writes,
// those of checkpoints alone, in order.
Finding checkpoint_over_start(const Problem& p, SlotWrite* writes, int64_t count) {
  std::sort(writes, writes + count);
  for (int64_t n = 0; n < p.N; ++n) {
    const int64_t slot = sequence(p, n).read_slot;
    const SlotWrite* w = slot >= 0 ? write_to(writes, count, slot) : nullptr;
    if (w == nullptr) continue;
    return {.wrong = Wrong::read_while_written,
            .argument = Argument::ckpt_slots,
            .sequence = n,
            .got = slot,
            .other = w->owner};
  }
  return {};
}

void check_checkpoints(const Problem& p, SlotWrite* writes) {
  const int64_t M = p.ckpt_tokens.n0;
  if (p.ckpt_cu(0) != 0) {
    bad(p, {.wrong = Wrong::first_offset, .argument = Argument::ckpt_cu, .got = p.ckpt_cu(0)});
  }
  int64_t count = 0;
  for (int64_t n = 0; n < p.N; ++n) {
    const int64_t begin = p.ckpt_cu(n), end = p.ckpt_cu(n + 1);
    if (end < begin || end > M) {
      bad(p, {.wrong = Wrong::falling_offset,
              .argument = Argument::ckpt_cu,
              .got = end,
              .other = begin,
              .limit = M,
              .at = n + 1});
    }
    const int64_t length = length_of(p, n);
    for (int64_t m = begin; m < end; ++m) {
      const int64_t slot = p.ckpt_slots(m);
      check_slot(p, Argument::ckpt_slots, slot, p.ckpt.slots, m);
      if (checkpoint_slot(p, m) < 0) continue;
      if (p.ckpt_tokens(m) < 0 || p.ckpt_tokens(m) > length) {
        bad(p, {.wrong = Wrong::token_of_sequence,
                .argument = Argument::ckpt_tokens,
                .sequence = n,
                .got = p.ckpt_tokens(m),
                .limit = length,
                .at = m});
      }
      writes[count++] = {slot, n};
    }
  }
  const Finding read =
      p.is_ckpt_in_pool && !p.has_write_pool ? checkpoint_over_start(p, writes, count) : Finding{};
  if (p.is_ckpt_in_pool) add_pool_writes(p, writes, count);
  check_written_once(p, Argument::ckpt_slots, writes, count);
  if (read.wrong != Wrong::nothing) bad(p, read);
}

// Columns [begin, end) of it: of a window with accepted tokens not all are read.
void check_finite_state(const Problem& p, int64_t layer, const States& states, Argument name,
                        int64_t slot, int64_t n, int64_t begin, int64_t end) {
  if (!states || slot < 0) return;
  for (int64_t h = 0; h < p.HV; ++h) {
    for (int64_t d = 0; d < p.K; ++d) {
      for (int64_t v = begin; v < end; ++v) {
        const int64_t at = states.at(slot, h) + d * states.s_k + v * states.s_v;
        const double x = load_f64(states.data, states.dtype, at);
        if (!std::isfinite(x)) {
          bad(p, {.wrong = Wrong::not_finite,
                  .argument = name,
                  .sequence = n,
                  .head = h,
                  .layer = layer,
                  .value = x});
        }
      }
    }
  }
}

void check_finite_parameter(const Problem& p, const CheckedParam& in) {
  for (int64_t i = 0; i < in.count; ++i) {
    if (!std::isfinite(in.param[i])) {
      const int64_t unit = i / in.per_unit;
      bad(p, {.wrong = Wrong::not_finite,
              .argument = in.argument,
              .head = in.is_channel ? -1 : unit,
              .channel = in.is_channel ? unit : -1,
              .value = in.param[i]});
    }
  }
}

}  // namespace

size_t value_scratch_bytes(const Problem& p) {
  int64_t writes = 0;
  if (p.is_pool && (p.read_index || p.write_index))
    writes = checked_product(p.N, std::max<int64_t>(p.write_index.n1, 1));
  if (p.is_ckpt_in_pool) {
    writes = checked_product(p.N, std::max<int64_t>(p.write_index.n1, 1));
    writes = checked_sum(writes, p.ckpt_tokens.n0);
  } else if (p.ckpt) {
    writes = std::max(writes, p.ckpt_tokens.n0);
  }
  return static_cast<size_t>(checked_product(writes, sizeof(SlotWrite)));
}

void check_host_lengths(const Problem& p) {
  if (p.cu_host) check_lengths(p, p.cu_host, Argument::cu_seqlens_host);
}

void check_values(const Problem& p, std::span<std::byte> scratch) {
  auto* writes = reinterpret_cast<SlotWrite*>(scratch.data());
  if (p.packed) check_lengths(p, p.cu, Argument::cu_seqlens);
  if (p.updates && p.packed) check_record_columns(p);
  if (p.recurrent_from) check_recurrent_from(p);
  if (p.accepted) check_accepted(p);
  if (p.is_pool) check_pool(p, writes);
  if (p.parents) check_parents(p);
  if (p.ckpt) check_checkpoints(p, writes);
}

CheckedInputs checked_inputs(const Problem& p) {
  CheckedInputs all;
  // A row of `a`, or of an inverse, is read below the diagonal, by `wy` up to it; likewise a row of
  // what came back for scores.
  const int32_t diagonal = p.op == DELTIC_WY || p.op == DELTIC_SCORES ? 1 : 0;
  const bool is_square = p.op == DELTIC_KKT || p.op == DELTIC_SCORES || p.op == DELTIC_INVERSE;
  const bool is_row = p.op == DELTIC_L2NORM || p.op == DELTIC_RMSNORM || p.op == DELTIC_CONV;
  const int64_t gate_width = p.gate == Gate::channel ? p.K : 1;
  const int64_t gate_or_norm_width = is_row ? p.K : gate_width;
  const auto rows = [&](const Rows& x, Argument name, int64_t heads, int64_t width,
                        int32_t read_to = -1) {
    // Rows between the parts of a step are nowhere yet.
    if (x && x.data != nullptr) all.rows[all.num_rows++] = {x, name, heads, width, read_to};
  };
  rows(p.q, Argument::q, p.H, p.K);
  rows(p.k, Argument::k, p.H, p.K);
  rows(p.v, Argument::v, p.HV, p.V);
  rows(p.x, Argument::x, p.H, p.K);
  rows(p.z, Argument::z, p.H, p.K);
  rows(p.a, Argument::a, p.HV, p.chunk, diagonal);
  rows(p.beta, Argument::beta, p.HV, p.beta_kind == BetaKind::value ? p.V : 1);
  rows(p.g, Argument::g, p.HV, gate_width);
  rows(p.gv, Argument::gv, p.HV, p.V);
  if (p.op == DELTIC_COMMIT) {
    rows(p.updates, Argument::record, p.HV, p.K + p.V + decay_width(p));
  }
  rows(p.d_o, Argument::d_o, p.HV, p.V);
  if (p.is_gradient) rows(p.out, Argument::out, p.HV, p.chunk, diagonal);
  if (is_square) {
    rows(p.d_out, Argument::d_out, p.HV, p.chunk, diagonal);
  } else {
    rows(p.d_out, Argument::d_out, p.HV, gate_or_norm_width);
  }
  rows(p.d_w, Argument::d_w, p.HV, p.K);
  rows(p.d_u, Argument::d_u, p.HV, p.V);
  rows(p.d_kg, Argument::d_kg, p.HV, p.K);
  rows(p.d_qg, Argument::d_qg, p.HV, p.K);

  const auto param = [&](const Param& x, Argument name, int64_t units, int64_t per_unit,
                         bool is_channel) {
    if (x) all.params[all.num_params++] = {x, name, units * per_unit, per_unit, is_channel};
  };
  param(p.A_log, Argument::A_log, p.HV, 1, false);
  param(p.dt_bias, Argument::dt_bias, p.HV, gate_width, false);
  param(p.weight, Argument::weight, p.K, p.taps, true);
  param(p.bias, Argument::bias, p.K, 1, true);
  all.sums = p.g && !is_block(p.op) && p.gate_form == DELTIC_GATE_LOG_DECAY;
  return all;
}

namespace {

// One layer, of several or (-1) the only one.
void check_finite_layer(const Problem& p, int64_t layer) {
  const CheckedInputs inputs = checked_inputs(p);
  const std::span all_rows(inputs.rows, static_cast<size_t>(inputs.num_rows));
  for (int i = 0; i < inputs.num_params; ++i) check_finite_parameter(p, inputs.params[i]);
  for (int64_t n = 0; n < p.N; ++n) {
    const Sequence s = sequence(p, n);
    const Argument state = p.is_pool ? Argument::state_pool : Argument::initial_state;
    const bool is_window = p.op == DELTIC_CONV && p.accepted && s.length > 0;
    check_finite_state(p, layer, p.state_in, state, s.read_slot, n,
                       is_window ? s.inputs - p.taps + 1 : 0, is_window ? s.inputs : p.V);
    check_finite_state(p, layer, p.d_final, Argument::d_final_state, n, n, 0, p.V);
    for (int64_t t = 0; t < s.length && !s.skipped; ++t) {
      for (int64_t h = 0; h < p.HV; ++h) {
        for (const CheckedRows& in : all_rows) {
          if (h >= in.heads) continue;
          const int64_t row = in.rows.at(s.batch, s.begin + t, h);
          const int64_t width = in.diagonal < 0 ? in.width : t % p.chunk + in.diagonal;
          for (int64_t c = 0; c < width; ++c) {
            const double x = load_f64(in.rows.data, in.rows.dtype, row + c);
            if (!std::isfinite(x)) {
              bad(p, {.wrong = Wrong::not_finite,
                      .argument = in.argument,
                      .sequence = n,
                      .token = t,
                      .head = h,
                      .layer = layer,
                      .value = x});
            }
          }
        }
      }
    }
  }
  if (!inputs.sums) return;
  const int64_t width = p.gate == Gate::channel ? p.K : 1;
  for (int64_t n = 0; n < p.N; ++n) {
    const Sequence s = sequence(p, n);
    if (s.length == 0 || s.skipped) continue;  // there may be 2^50 heads
    for (int64_t h = 0; h < p.HV; ++h) {
      for (int64_t c = 0; c < width; ++c) {
        double sum = 0;
        for (int64_t t = 0; t < s.length; ++t) {
          if (t % p.chunk == 0) sum = 0;
          sum += std::max(0.0, load_f64(p.g.data, p.g.dtype, p.g.at(s.batch, s.begin + t, h) + c));
          if (sum >= kMaxGateSum) {
            bad(p, {.wrong = Wrong::growing_gate,
                    .argument = Argument::g,
                    .sequence = n,
                    .token = t,
                    .head = h,
                    .value = sum});
          }
        }
      }
    }
  }
}

}  // namespace

void check_finite(const Problem& p) {
  for (int64_t layer = 0; layer < p.layers; ++layer) {
    check_finite_layer(layer_of(p, layer), p.layers > 1 ? layer : -1);
  }
}

}  // namespace deltic
