// Checks of values that the host can see: lengths, pool indices, checkpoint lists, finite inputs.
#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/error.h"

namespace deltic {
namespace {

struct SlotWrite {
  int64_t slot, owner;
  bool operator<(const SlotWrite& b) const {
    return slot != b.slot ? slot < b.slot : owner < b.owner;
  }
};

template <class... Parts>
[[noreturn]] void bad(const Problem& p, const Parts&... parts) {
  fail(DELTIC_INVALID_ARGUMENT, name_of(p.op), ": ", parts...);
}

void check_lengths(const Problem& p, const Indices& cu, const char* name) {
  if (cu(0) != 0) bad(p, name, ": expected the first offset to be 0, got ", cu(0));
  for (int64_t n = 0; n < p.N; ++n) {
    if (cu(n + 1) < cu(n)) {
      bad(p, name, ": expected offsets that never decrease, got ", cu(n + 1), " after ", cu(n),
          " at ", n + 1);
    }
  }
  if (cu(p.N) > p.T) {
    bad(p, name, ": expected a last offset of at most T = ", p.T, ", got ", cu(p.N));
  }
}

// Every written slot in range and written once; throws with the argument's name.
void check_written_once(const Problem& p, const char* name, SlotWrite* writes, int64_t count) {
  std::sort(writes, writes + count);
  for (int64_t i = 1; i < count; ++i) {
    if (writes[i].slot == writes[i - 1].slot) {
      const int64_t first = writes[i - 1].owner, second = writes[i].owner;
      if (first == second) {
        bad(p, name, ": expected every slot to be written once, got slot ", writes[i].slot,
            " twice for sequence ", first);
      }
      bad(p, name, ": expected every slot to be written once, got slot ", writes[i].slot,
          " for sequences ", first, " and ", second);
    }
  }
}

void check_slot(const Problem& p, const char* name, int64_t slot, int64_t slots, int64_t at) {
  if (slot < -1 || slot >= slots) {
    bad(p, name, ": expected slots of -1 to ", slots - 1, ", got ", slot, " at ", at);
  }
}

void check_pool(const Problem& p, SlotWrite* writes) {
  if (!p.read_index && !p.write_index) return;
  const bool per_token = p.write_index.n1 > 0;
  const char* write_name = p.write_index ? "write_index" : "read_index";
  int64_t count = 0;
  for (int64_t n = 0; n < p.N; ++n) {
    const int64_t length = p.packed ? p.cu(n + 1) - p.cu(n) : p.T;
    if (per_token && length > p.write_index.n1) {
      bad(p, "write_index: expected a column for each of the ", length, " tokens of sequence ", n,
          ", got ", p.write_index.n1);
    }
    if (p.read_index) check_slot(p, "read_index", p.read_index(n), p.state_in.slots, n);
    const Indices& write = p.write_index ? p.write_index : p.read_index;
    for (int64_t t = 0; t < (per_token ? length : 1); ++t) {
      const int64_t slot = per_token ? write(n, t) : write(n);
      check_slot(p, write_name, slot, p.state_out.slots, n);
      if (slot >= 0) writes[count++] = {slot, n};
    }
  }
  check_written_once(p, write_name, writes, count);
  if (!p.read_index || !p.write_index) return;
  for (int64_t n = 0; n < p.N; ++n) {
    const int64_t slot = p.read_index(n);
    const SlotWrite* w = std::lower_bound(writes, writes + count, SlotWrite{slot, -1});
    if (w != writes + count && w->slot == slot && w->owner != n) {
      bad(p, "read_index: expected no slot that another sequence writes, got slot ", slot,
          " for sequence ", n, ", written by sequence ", w->owner);
    }
  }
}

void check_checkpoints(const Problem& p, SlotWrite* writes) {
  const int64_t M = p.ckpt_tokens.n0;
  if (p.ckpt_cu(0) != 0) bad(p, "ckpt_cu: expected the first offset to be 0, got ", p.ckpt_cu(0));
  int64_t count = 0;
  for (int64_t n = 0; n < p.N; ++n) {
    const int64_t begin = p.ckpt_cu(n), end = p.ckpt_cu(n + 1);
    if (end < begin || end > M) {
      bad(p, "ckpt_cu: expected offsets that never decrease, up to M = ", M, ", got ", end,
          " after ", begin, " at ", n + 1);
    }
    const int64_t length = p.packed ? p.cu(n + 1) - p.cu(n) : p.T;
    for (int64_t m = begin; m < end; ++m) {
      const int64_t slot = p.ckpt_slots(m);
      check_slot(p, "ckpt_slots", slot, p.ckpt.slots, m);
      if (slot < 0) continue;
      if (p.ckpt_tokens(m) < 0 || p.ckpt_tokens(m) > length) {
        bad(p, "ckpt_tokens: expected 0 to ", length, ", the length of sequence ", n, ", got ",
            p.ckpt_tokens(m), " at ", m);
      }
      writes[count++] = {slot, n};
    }
  }
  check_written_once(p, "ckpt_slots", writes, count);
}

void check_finite_state(const Problem& p, const States& states, const char* name, int64_t slot,
                        int64_t n) {
  if (!states || slot < 0) return;
  for (int64_t h = 0; h < p.HV; ++h) {
    for (int64_t d = 0; d < p.K; ++d) {
      for (int64_t v = 0; v < p.V; ++v) {
        const int64_t at = states.at(slot, h) + d * states.s_k + v * states.s_v;
        const double x = load_f64(states.data, states.dtype, at);
        if (!std::isfinite(x)) {
          bad(p, name, ": expected finite values, got ", x, " at sequence ", n, ", head ", h);
        }
      }
    }
  }
}

// `count` numbers, `per_unit` for each head or channel.
void check_finite_parameter(const Problem& p, const Param& x, const char* name, int64_t count,
                            int64_t per_unit, const char* unit) {
  for (int64_t i = 0; x && i < count; ++i) {
    if (!std::isfinite(x[i])) {
      bad(p, name, ": expected finite values, got ", x[i], " at ", unit, " ", i / per_unit);
    }
  }
}

}  // namespace

size_t value_scratch_bytes(const Problem& p) {
  int64_t writes = 0;
  if (p.is_pool && (p.read_index || p.write_index))
    writes = p.N * std::max<int64_t>(p.write_index.n1, 1);
  if (p.ckpt) writes = std::max(writes, p.ckpt_tokens.n0);
  return static_cast<size_t>(writes) * sizeof(SlotWrite);
}

void check_host_lengths(const Problem& p) {
  if (p.cu_host) check_lengths(p, p.cu_host, "cu_seqlens_host");
}

void check_values(const Problem& p, std::span<std::byte> scratch) {
  auto* writes = reinterpret_cast<SlotWrite*>(scratch.data());
  if (p.packed) check_lengths(p, p.cu, "cu_seqlens");
  if (p.is_pool) check_pool(p, writes);
  if (p.ckpt) check_checkpoints(p, writes);
}

void check_finite(const Problem& p) {
  struct Input {
    const Rows* rows;
    const char* name;
    int64_t heads, width;
  };
  const int64_t beta_width = p.beta_kind == BetaKind::value ? p.V : 1;
  // A row of `a`, or of an inverse, is read below the diagonal, by `wy` up to it; likewise a row of
  // what came back for scores.
  const bool is_square = p.op == DELTIC_KKT || p.op == DELTIC_SCORES || p.op == DELTIC_INVERSE;
  const int64_t diagonal = p.op == DELTIC_WY || p.op == DELTIC_SCORES ? 1 : 0;
  const bool is_row = p.op == DELTIC_L2NORM || p.op == DELTIC_CONV;
  const int64_t gate_or_norm_width = is_row || p.gate == Gate::channel ? p.K : 1;
  const Rows absent;
  const Input inputs[] = {{&p.q, "q", p.H, p.K},
                          {&p.k, "k", p.H, p.K},
                          {&p.v, "v", p.HV, p.V},
                          {&p.x, "x", p.H, p.K},
                          {&p.a, "a", p.HV, p.chunk},
                          {&p.beta, "beta", p.HV, beta_width},
                          {&p.g, "g", p.HV, p.gate == Gate::channel ? p.K : 1},
                          {&p.gv, "gv", p.HV, p.V},
                          {&p.d_o, "d_o", p.HV, p.V},
                          {p.is_gradient ? &p.out : &absent, "out", p.HV, p.chunk},
                          {&p.d_out, "d_out", p.HV, is_square ? p.chunk : gate_or_norm_width},
                          {&p.d_w, "d_w", p.HV, p.K},
                          {&p.d_u, "d_u", p.HV, p.V},
                          {&p.d_kg, "d_kg", p.HV, p.K},
                          {&p.d_qg, "d_qg", p.HV, p.K}};
  const int64_t bias_width = p.gate == Gate::channel ? p.K : 1;
  check_finite_parameter(p, p.A_log, "A_log", p.HV, 1, "head");
  check_finite_parameter(p, p.dt_bias, "dt_bias", p.HV * bias_width, bias_width, "head");
  check_finite_parameter(p, p.weight, "weight", p.K * p.taps, p.taps, "channel");
  check_finite_parameter(p, p.bias, "bias", p.K, 1, "channel");
  for (int64_t n = 0; n < p.N; ++n) {
    const Sequence s = sequence(p, n);
    check_finite_state(p, p.state_in, p.is_pool ? "state_pool" : "initial_state", s.read_slot, n);
    check_finite_state(p, p.d_final, "d_final_state", n, n);
    for (int64_t t = 0; t < s.length; ++t) {
      for (int64_t h = 0; h < p.HV; ++h) {
        for (const Input& in : inputs) {
          if (!*in.rows || h >= in.heads) continue;
          const int64_t row = in.rows->at(s.batch, s.begin + t, h);
          for (int64_t c = 0; c < in.width; ++c) {
            const bool is_lower =
                in.rows == &p.a || in.rows == &p.out || (in.rows == &p.d_out && is_square);
            if (is_lower && c >= t % p.chunk + diagonal) break;
            const double x = load_f64(in.rows->data, in.rows->dtype, row + c);
            if (!std::isfinite(x)) {
              bad(p, in.name, ": expected finite values, got ", x, " at sequence ", n, ", token ",
                  t, ", head ", h);
            }
          }
        }
      }
    }
  }
  // Gates above 0 are right while the sum of their positive parts in a chunk stays below 8.
  if (!p.g || is_block(p.op) || p.gate_form != DELTIC_GATE_LOG_DECAY) return;
  const int64_t width = p.gate == Gate::channel ? p.K : 1;
  for (int64_t n = 0; n < p.N; ++n) {
    const Sequence s = sequence(p, n);
    for (int64_t h = 0; h < p.HV; ++h) {
      for (int64_t c = 0; c < width; ++c) {
        double sum = 0;
        for (int64_t t = 0; t < s.length; ++t) {
          if (t % p.chunk == 0) sum = 0;
          sum += std::max(0.0, load_f64(p.g.data, p.g.dtype, p.g.at(s.batch, s.begin + t, h) + c));
          if (sum >= 8) {
            bad(p, "g: expected positive log decays that sum to less than 8 in a chunk, got ", sum,
                " at sequence ", n, ", token ", t, ", head ", h);
          }
        }
      }
    }
  }
}

}  // namespace deltic
