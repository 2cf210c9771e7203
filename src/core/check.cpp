// Checks of forward and decode calls: shapes, dtypes, strides, devices, aliasing, options.
#include "core/check.h"

#include "core/checker.h"

namespace deltic {

const char* name_of(deltic_op op) {
  constexpr const char* names[] = {
      "forward", "decode",   "cumsum", "gate",           "l2norm",  "kkt",  "scores", "inverse",
      "wy",      "backward", "conv",   "scores_inverse", "rmsnorm", "move", "commit", "step"};
  return names[op];
}
const char* part_prefix(deltic_op op) {
  return op == DELTIC_CONV ? "conv." : op == DELTIC_DECODE ? "decode." : "norm.";
}

namespace {

void check_widths(const Checker& c, const Problem& p) {
  if (p.H < 1) c.bad("q", "expected at least one head, got shape with H = ", p.H);
  if (p.K < 1 || p.K > 256) c.bad("q", "expected a key width K of 1 to 256, got ", p.K);
}

// q, k, v, beta, g, gv and the sequences: what forward, decode and backward have in common.
void check_inputs(Checker& c, const deltic_tensors& t) {
  Problem& p = c.p_;
  const bool recurrent = p.op != DELTIC_FORWARD;  // one number per value column for beta and decay
  c.required(t.q, "q");
  c.float_dtype(t.q, "q");
  c.rank4(t.q, "q", "[B,T,H,K]");
  p.B = t.q.shape[0], p.T = t.q.shape[1], p.H = t.q.shape[2], p.K = t.q.shape[3];
  check_widths(c, p);
  c.required(t.k, "k");
  c.same_dtype(t.k, "k", t.q, "q");
  c.shape(t.k, "k", {p.B, p.T, p.H, p.K});
  c.required(t.v, "v");
  c.same_dtype(t.v, "v", t.q, "q");
  c.rank4(t.v, "v", "[B,T,HV,V]");
  p.HV = t.v.shape[2], p.V = t.v.shape[3];
  c.shape(t.v, "v", {p.B, p.T, p.HV, p.V});
  if (p.HV < 1 || p.HV % p.H != 0) {
    c.bad("v", "expected a number of value heads HV that is a multiple of H = ", p.H, ", got ",
          p.HV);
  }
  if (p.V < 1) c.bad("v", "expected a value width V of at least 1, got ", p.V);
  if (!c.has_scale_) p.scale = static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.K)));

  if (c.given(t.beta, "beta")) {
    c.float_dtype(t.beta, "beta");
    if (recurrent && t.beta.rank == 4) {
      c.shape(t.beta, "beta", {p.B, p.T, p.HV, p.V});
      p.beta_kind = BetaKind::value;
    } else {
      if (t.beta.rank == 4) {
        c.bad("beta",
              "expected shape [B,T,HV] (forward is chunked: decode takes a value-wise beta), "
              "got ",
              shape_text(t.beta));
      }
      c.shape(t.beta, "beta", {p.B, p.T, p.HV});
      p.beta_kind = BetaKind::head;
    }
  } else if (p.beta_form != DELTIC_BETA_VALUE) {
    c.bad("beta", "expected a tensor with the beta form sigmoid or 2sigmoid, got none");
  }
  c.gates(t.g, t.A_log, t.dt_bias, p.K);
  if (c.given(t.gv, "gv")) {
    if (!recurrent) {
      c.bad("gv",
            "expected none (forward is chunked: decode takes a value-wise decay), got a tensor");
    }
    c.float_dtype(t.gv, "gv");
    c.shape(t.gv, "gv", {p.B, p.T, p.HV, p.V});
  }
  c.sequences(t.cu_seqlens, t.cu_seqlens_host);
  c.sizes_together();
  p.q = Checker::rows(t.q), p.k = Checker::rows(t.k), p.v = Checker::rows(t.v);
  p.beta = Checker::rows(t.beta), p.gv = Checker::rows(t.gv);
}

// Initial and final state, or the pool with its indices.
void check_states(Checker& c, const deltic_tensors& t) {
  Problem& p = c.p_;
  c.slots(t);
  if (!p.is_pool) {
    p.state_in = c.states(t.initial_state, "initial_state", p.N, false);
    p.state_out = c.states(t.final_state, "final_state", p.N, true);
    return;
  }
  p.state_in = p.state_out = c.states(t.state_pool, "state_pool", -1, !p.has_write_pool);
  if (p.has_write_pool) p.state_out = c.states(t.write_pool, "write_pool", -1, true);
  c.slots_without_lists(p.state_in, "state_pool");
  c.slots_without_lists(p.state_out, "write_pool");
}

void check_checkpoint_tensors(Checker& c, const deltic_tensors& t) {
  Problem& p = c.p_;
  p.ckpt_cu = c.indices(t.ckpt_cu, "ckpt_cu");
  p.ckpt_tokens = c.indices(t.ckpt_tokens, "ckpt_tokens");
  p.ckpt_slots = c.indices(t.ckpt_slots, "ckpt_slots");
  p.ckpt = c.states(t.ckpt_states, "ckpt_states", -1, true);
  c.null_slot(p.read_index || p.write_index || p.ckpt_slots);
  c.checkpoint_lists(t);
}

// Trees of drafted tokens.
void check_parents(Checker& c, const deltic_tensors& t) {
  Problem& p = c.p_;
  if (t.parents.rank == 0) return;
  if (p.op != DELTIC_DECODE) c.bad("parents", "expected none (decode has trees), got a tensor");
  if (p.write_index.n1 == 0 && !p.updates) {
    c.bad("parents", "expected none without a write index per token, got a tensor");
  }
  p.parents = c.indices(t.parents, "parents", true);
  if (p.parents.n1 == 0 || p.parents.n0 != p.N) {
    c.bad("parents", "expected shape [N,T'] with N = ", p.N, ", got ", shape_text(t.parents));
  }
  if (!p.packed && p.T > kMaxDrafts) {
    c.bad("parents", "expected at most ", kMaxDrafts, " drafted tokens, got T = ", p.T);
  }
  if (!p.packed && p.parents.n1 < p.T) {
    c.bad("parents", "expected at least T = ", p.T, " columns, got shape ", shape_text(t.parents));
  }
  c.input(t.parents, "parents");
}

// Rounding by chance.
void check_seed(Checker& c, const deltic_tensors& t) {
  Problem& p = c.p_;
  if (!p.has_seed) return c.absent(t.positions, "positions", "without a seed");
  if (p.updates) c.bad("seed", "expected none with a record, got ", p.seed);
  if (!rounds_tokens(p)) {
    const States& kept = kept_states(p);
    c.bad("seed", "expected none but with states of 16 bits, got states of ",
          kept ? name_of(kept.dtype) : "no dtype (there are none)");
  }
  p.positions = c.indices(t.positions, "positions");
  if (p.positions) c.shape(t.positions, "positions", {p.N});
  c.input(t.positions, "positions");
}

// Drafted tokens that leave a record and no state.
void check_record(Checker& c, const deltic_tensors& t) {
  Problem& p = c.p_;
  if (!c.given(t.record, "record", true)) return;
  if (p.op != DELTIC_DECODE) c.bad("record", "expected none (decode has one), got a tensor");
  constexpr const char* kWhere = "with a record, beside which no state is written";
  c.absent(t.final_state, "final_state", kWhere), c.absent(t.write_index, "write_index", kWhere);
  c.absent(t.write_pool, "write_pool", kWhere), c.absent(t.ckpt_states, "ckpt_states", kWhere);
  c.absent(t.gv, "gv", "with a record, which has no decay per value column");
  if (t.record.rank != 4) {
    c.bad("record", "expected shape [N,T',HV,W], got ", shape_text(t.record));
  }
  c.record(t.record, 0);
  c.shape(t.record, "record", {p.N, p.update_tokens, p.HV, p.K + p.V + decay_width(p)});
  if (!p.packed && p.update_tokens < p.T) {
    c.bad("record", "expected at least T = ", p.T, " tokens T', got shape ", shape_text(t.record));
  }
  p.state_out = {}, p.write_index = {};
}

// Where sequences go over to the recurrent form, of forward and, where nothing depends on it, of
// backward.
Indices check_recurrent_from(Checker& c, const deltic_tensors& t) {
  if (t.recurrent_from.rank == 0) return {};
  const Problem& p = c.p_;
  if (p.op == DELTIC_DECODE) {
    c.bad("recurrent_from", "expected none (decode is recurrent from its first token on), got a ",
          "tensor");
  }
  if (p.form != DELTIC_FORM_RECURRENT) {
    c.bad("recurrent_from", "expected none without the form recurrent, got a tensor");
  }
  const Indices from = c.indices(t.recurrent_from, "recurrent_from");
  c.shape(t.recurrent_from, "recurrent_from", {p.N});
  c.input(t.recurrent_from, "recurrent_from");
  return from;
}

void check_split(const Checker& c) {
  const Problem& p = c.p_;
  if (p.device == DELTIC_CPU && p.split > DELTIC_SPLIT_OFF) {
    fail(DELTIC_UNSUPPORTED, c.op_, ": split: expected auto or off on the CPU, got ",
         p.split == DELTIC_SPLIT_BY_LENGTH ? "by_length" : "a segment length");
  }
}

}  // namespace

Problem check_call(deltic_op op, const deltic_options& options, const deltic_tensors& t,
                   const CheckContext& context) {
  Problem p;
  Checker c(op, context, p);
  c.options(options);
  check_inputs(c, t);
  c.required(t.o, "o", true);
  c.same_dtype(t.o, "o", t.q, "q");
  c.shape(t.o, "o", {p.B, p.T, p.HV, p.V});
  p.o = Checker::rows(t.o);
  check_states(c, t);
  check_checkpoint_tensors(c, t);
  check_record(c, t);
  p.saved = t.saved;
  if (p.is_pool && p.save != DELTIC_SAVE_NONE) {
    c.bad("save", "expected none with a state pool, which has no gradient, got ",
          p.save == DELTIC_SAVE_STATES ? "states" : "all");
  }
  if (p.has_initial && p.save != DELTIC_SAVE_NONE) {
    c.bad("has_initial_state", "expected none where backward is to run (save), got a tensor");
  }

  const bool in_place =
      !p.is_pool && p.state_in && p.state_out && p.state_in.data == p.state_out.data &&
      t.initial_state.dtype == t.final_state.dtype &&
      std::equal(t.initial_state.strides, t.initial_state.strides + 4, t.final_state.strides);
  c.output(t.o, "o");
  c.output(t.record, "record");
  c.output(t.final_state, "final_state");
  const bool is_read_only = p.has_write_pool || p.updates;
  if (!is_read_only) c.output(t.state_pool, "state_pool");
  c.output(t.write_pool, "write_pool");
  if (!p.is_ckpt_in_pool) c.output(t.ckpt_states, "ckpt_states");
  if (is_read_only) c.input(t.state_pool, "state_pool");
  c.input(t.has_initial_state, "has_initial_state"), c.input(t.accepted, "accepted");
  c.input(t.q, "q"), c.input(t.k, "k"), c.input(t.v, "v");
  c.input(t.beta, "beta"), c.input(t.g, "g"), c.input(t.gv, "gv");
  c.input(t.A_log, "A_log"), c.input(t.dt_bias, "dt_bias");
  c.input(t.cu_seqlens, "cu_seqlens"), c.input(t.cu_seqlens_host, "cu_seqlens_host");
  c.input(t.read_index, "read_index"), c.input(t.write_index, "write_index");
  c.input(t.ckpt_cu, "ckpt_cu"), c.input(t.ckpt_tokens, "ckpt_tokens");
  c.input(t.ckpt_slots, "ckpt_slots");
  check_parents(c, t);
  p.recurrent_from = check_recurrent_from(c, t);
  check_seed(c, t);
  c.input(t.initial_state, "initial_state", in_place ? "final_state" : nullptr);
  check_split(c);
  return p;
}

Problem check_call(deltic_op op, const deltic_options& options, const deltic_backward_tensors& b,
                   const CheckContext& context) {
  Problem p;
  Checker c(op, context, p);
  const deltic_tensors& t = *b.forward;
  c.options(options);
  check_inputs(c, t);
  c.absent(t.o, "o", "in a backward call");
  c.absent(t.final_state, "final_state", "in a backward call");
  c.absent(t.state_pool, "state_pool", "in a backward call: pools are not differentiable");
  c.absent(t.ckpt_states, "ckpt_states", "in a backward call: checkpoints are not differentiable");
  c.absent(t.has_initial_state, "has_initial_state", "in a backward call");
  c.absent(t.parents, "parents", "in a backward call");
  c.absent(t.record, "record", "in a backward call");
  c.absent(t.positions, "positions", "in a backward call");
  check_states(c, t);
  check_checkpoint_tensors(c, t);

  // A gradient has its input's dtype.
  const auto gradient = [&](const deltic_tensor& d, const char* name, const deltic_tensor& of,
                            const char* of_name) {
    if (!c.gradient(d, name, of, of_name)) return;
    c.same_dtype(d, name, of, of_name);
    c.output(d, name);
  };
  gradient(b.dq, "dq", t.q, "q");
  gradient(b.dk, "dk", t.k, "k");
  gradient(b.dv, "dv", t.v, "v");
  gradient(b.dbeta, "dbeta", t.beta, "beta");
  gradient(b.dg, "dg", t.g, "g");
  gradient(b.dgv, "dgv", t.gv, "gv");
  gradient(b.dA_log, "dA_log", t.A_log, "A_log");
  gradient(b.ddt_bias, "ddt_bias", t.dt_bias, "dt_bias");
  if (c.given(b.d_o, "d_o")) {
    c.same_dtype(b.d_o, "d_o", t.q, "q");
    c.shape(b.d_o, "d_o", {p.B, p.T, p.HV, p.V});
  }
  const auto fp32_state = [&](const deltic_tensor& d, const char* name) {
    const DType type = static_cast<DType>(d.dtype);
    const bool ok = type == DType::f32 || (type == DType::f64 && context.allow_f64);
    if (d.rank != 0 && !ok) c.bad(name, "expected fp32, got ", name_of(type));
  };
  fp32_state(b.d_final_state, "d_final_state");
  fp32_state(b.d_initial_state, "d_initial_state");
  p.d_final = c.states(b.d_final_state, "d_final_state", p.N, false);
  p.d_initial = c.states(b.d_initial_state, "d_initial_state", p.N, true);
  if (p.d_initial && t.initial_state.rank == 0) {
    c.bad("d_initial_state", "expected none without initial_state, got a tensor");
  }
  c.output(b.d_initial_state, "d_initial_state");
  c.input(t.q, "q"), c.input(t.k, "k"), c.input(t.v, "v");
  c.input(t.beta, "beta"), c.input(t.g, "g"), c.input(t.gv, "gv");
  c.input(t.A_log, "A_log"), c.input(t.dt_bias, "dt_bias");
  c.input(t.cu_seqlens, "cu_seqlens"), c.input(t.cu_seqlens_host, "cu_seqlens_host");
  c.input(t.initial_state, "initial_state"), c.input(b.d_o, "d_o");
  c.input(b.d_final_state, "d_final_state");
  static_cast<void>(check_recurrent_from(c, t));

  p.d_o = Checker::rows(b.d_o), p.dq = Checker::rows(b.dq), p.dk = Checker::rows(b.dk);
  p.dv = Checker::rows(b.dv), p.dbeta = Checker::rows(b.dbeta), p.dg = Checker::rows(b.dg);
  p.dgv = Checker::rows(b.dgv);
  p.dA_log = Checker::param_view(b.dA_log), p.ddt_bias = Checker::param_view(b.ddt_bias);
  p.saved = t.saved;
  if (p.saved.bytes > 0 && (p.beta_kind == BetaKind::value || p.gv)) {
    c.bad("saved", "expected none with a value-wise beta or gv (decode keeps nothing), got ",
          p.saved.bytes, " bytes");
  }
  check_split(c);
  return p;
}

bool overlaps(const deltic_tensor& t, const void* data, uint64_t bytes) {
  if (t.rank == 0 || t.data == nullptr || is_empty(t)) return false;
  const auto span =
      static_cast<uint64_t>(Checker::span_inside(t, std::numeric_limits<int64_t>::max()));
  return ranges_overlap(reinterpret_cast<uintptr_t>(t.data), span,
                        reinterpret_cast<uintptr_t>(data), bytes);
}

}  // namespace deltic
