// Checks of the building blocks' calls and of their gradients'.
#include "core/check.h"
#include "core/checker.h"

namespace deltic {

namespace {

// Row by row, of x alone or with its gate and weight.
constexpr bool is_norm(deltic_op op) { return op == DELTIC_L2NORM || op == DELTIC_RMSNORM; }

// Which tensors an operation takes: required, optional.
enum Use { kNo, kMay, kMust };
struct BlockUse {
  Use q = kNo, k = kNo, v = kNo, x = kNo, g = kNo, beta = kNo, gate_params = kNo, a = kNo,
      out = kNo, w = kNo, u = kNo, kg = kNo, qg = kNo, rstd = kNo, z = kNo, weight = kNo;
};
constexpr BlockUse block_use(deltic_op op) {
  switch (op) {
    case DELTIC_CUMSUM:
    case DELTIC_GATE:
      return {.g = kMust, .gate_params = kMay, .out = kMust};
    case DELTIC_L2NORM:
      return {.x = kMust, .out = kMust, .rstd = kMay};
    case DELTIC_RMSNORM:
      return {.x = kMust, .out = kMust, .z = kMay, .weight = kMay};
    case DELTIC_KKT:
      return {.k = kMust, .g = kMay, .beta = kMay, .out = kMust};
    case DELTIC_SCORES:
      return {.q = kMust, .k = kMust, .g = kMay, .out = kMust};
    case DELTIC_INVERSE:
      return {.a = kMust, .out = kMust};
    case DELTIC_SCORES_INVERSE:
      return {.q = kMust, .k = kMust, .g = kMay, .beta = kMay, .a = kMust, .out = kMust};
    default:
      return {.q = kMay,
              .k = kMust,
              .v = kMay,
              .g = kMay,
              .beta = kMay,
              .a = kMust,
              .w = kMust,
              .u = kMay,
              .kg = kMay,
              .qg = kMay};
  }
}

void take(Checker& c, const deltic_tensor& tensor, const char* name, Use how, bool is_output) {
  if (how == kNo && tensor.rank != 0) c.bad(name, "expected none, got a tensor");
  if (how == kMust) c.required(tensor, name, is_output);
  if (how == kMay) c.given(tensor, name, is_output);
  if (tensor.rank != 0) c.float_dtype(tensor, name);
}

// The operation that gives the inverse instead of taking it.
constexpr bool writes_a(deltic_op op) { return op == DELTIC_SCORES_INVERSE; }

void take_inputs(Checker& c, const deltic_block_tensors& t, const BlockUse& use) {
  take(c, t.q, "q", use.q, false);
  take(c, t.k, "k", use.k, false);
  take(c, t.v, "v", use.v, false);
  take(c, t.x, "x", use.x, false);
  take(c, t.g, "g", use.g, false);
  take(c, t.beta, "beta", use.beta, false);
  take(c, t.A_log, "A_log", use.gate_params, false);
  take(c, t.dt_bias, "dt_bias", use.gate_params, false);
  take(c, t.a, "a", use.a, writes_a(c.p_.op));
  take(c, t.z, "z", use.z, false);
  take(c, t.weight, "weight", use.weight, false);
}

// Sizes from the leading input. `square`, [B,T,HV,W], leads where there is one.
void check_sizes(Checker& c, const deltic_block_tensors& t, const Checker::Named& square) {
  Problem& p = c.p_;
  const deltic_op op = p.op;
  const auto heads = [&](const deltic_tensor& tensor, const char* name, const char* letters) {
    c.rank4(tensor, name, letters);
    p.B = tensor.shape[0], p.T = tensor.shape[1];
    return tensor.shape[2];
  };
  if (op == DELTIC_CUMSUM || op == DELTIC_GATE) {
    if (t.g.rank != 3 && t.g.rank != 4)
      c.bad("g", "expected shape [B,T,HV] or [B,T,HV,K], got ", shape_text(t.g));
    p.B = t.g.shape[0], p.T = t.g.shape[1], p.H = p.HV = t.g.shape[2];
    p.K = t.g.rank == 4 ? t.g.shape[3] : 1;
  } else if (is_norm(op)) {
    p.H = p.HV = heads(t.x, "x", "[B,T,H,D]");
    p.K = t.x.shape[3];
  } else if (op == DELTIC_INVERSE) {
    p.H = p.HV = heads(*square.tensor, square.name, "[B,T,HV,W]");
    const int64_t width = square.tensor->shape[3];
    if (width != 16 && width != 32 && width != 64)
      c.bad(square.name, "expected a width of 16, 32 or 64, got ", width);
    if (p.chunk != 64 && p.chunk != width)
      c.bad("chunk", "expected the width of ", square.name, ", ", width, ", got ", p.chunk);
    p.chunk = static_cast<int32_t>(width);
    p.K = 1;
  } else {
    p.H = heads(t.k, "k", "[B,T,H,K]");
    p.K = t.k.shape[3];
    c.rank4(*square.tensor, square.name, "[B,T,HV,W]");
    p.HV = square.tensor->shape[2];
    if (p.H < 1) c.bad("k", "expected at least one head, got ", p.H);
    if (p.HV < 1 || p.HV % p.H != 0) {
      c.bad(square.name, "expected a number of value heads HV that is a multiple of H = ", p.H,
            ", got ", p.HV);
    }
    if (p.K < 1 || p.K > 256) c.bad("k", "expected a key width K of 1 to 256, got ", p.K);
    c.shape(*square.tensor, square.name, {p.B, p.T, p.HV, p.chunk});
  }
  if (p.HV < 1)
    c.bad(is_norm(op)            ? "x"
          : op == DELTIC_INVERSE ? square.name
                                 : "g",
          "expected at least one head, got none");
  if (p.K < 1) c.bad(is_norm(op) ? "x" : "g", "expected a width of at least 1, got 0");
}

// Everything else against the sizes: gates, sequences, and `out` or what came back for it.
void check_rest(Checker& c, const deltic_block_tensors& t, const Checker::Named& out) {
  Problem& p = c.p_;
  c.gates(t.g, t.A_log, t.dt_bias, p.K);
  c.sequences(t.cu_seqlens, t.cu_seqlens_host);
  if (p.op == DELTIC_CUMSUM || p.op == DELTIC_GATE) {
    if (t.g.rank == 3) c.shape(*out.tensor, out.name, {p.B, p.T, p.HV});
    if (t.g.rank == 4) c.shape(*out.tensor, out.name, {p.B, p.T, p.HV, p.K});
  } else if (is_norm(p.op)) {
    c.shape(*out.tensor, out.name, {p.B, p.T, p.H, p.K});
  } else if (p.op == DELTIC_INVERSE) {
    c.shape(*out.tensor, out.name, {p.B, p.T, p.HV, p.chunk});
  }
  if (t.z.rank != 0) c.shape(t.z, "z", {p.B, p.T, p.H, p.K});
  if (t.z.rank == 0 && p.activation != DELTIC_ACTIVATION_NONE) {
    c.bad("activation", "expected none without z, got ", p.activation);
  }
  if (t.weight.rank != 0) {
    c.shape(t.weight, "weight", {p.K});
    p.taps = 1;
  }
  if (t.q.rank != 0) c.shape(t.q, "q", {p.B, p.T, p.H, p.K});
  if (t.beta.rank != 0) {
    c.shape(t.beta, "beta", {p.B, p.T, p.HV});
    p.beta_kind = BetaKind::head;
  }
  if (t.v.rank != 0) {
    c.rank4(t.v, "v", "[B,T,HV,V]");
    p.V = t.v.shape[3];
    c.shape(t.v, "v", {p.B, p.T, p.HV, p.V});
  }
  c.sizes_together();
  if (!c.has_scale_) {
    const bool has_q = p.op == DELTIC_SCORES || p.op == DELTIC_SCORES_INVERSE;
    p.scale = has_q ? static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.K))) : 1.0f;
  }
  p.q = Checker::rows(t.q), p.k = Checker::rows(t.k), p.v = Checker::rows(t.v),
  p.x = Checker::rows(t.x), p.z = Checker::rows(t.z);
  p.weight = Checker::param_view(t.weight);
  p.beta = Checker::rows(t.beta);
  (writes_a(p.op) ? p.inverse : p.a) = Checker::rows(t.a);
}

// Rows of K or V numbers per token and value head, where present.
void check_value_rows(const Checker& c, const deltic_tensor& t, const char* name, int64_t width) {
  if (t.rank != 0) c.shape(t, name, {c.p_.B, c.p_.T, c.p_.HV, width});
}

// After the outputs: no input overlaps one.
void check_inputs_alone(const Checker& c, const deltic_block_tensors& t) {
  c.input(t.q, "q"), c.input(t.k, "k"), c.input(t.v, "v"), c.input(t.x, "x"), c.input(t.g, "g");
  c.input(t.beta, "beta"), c.input(t.A_log, "A_log"), c.input(t.dt_bias, "dt_bias");
  if (!writes_a(c.p_.op)) c.input(t.a, "a");
  c.input(t.z, "z"), c.input(t.weight, "weight");
  c.input(t.cu_seqlens, "cu_seqlens");
  c.input(t.cu_seqlens_host, "cu_seqlens_host");
}

}  // namespace

Problem check_call(deltic_op op, const deltic_options& options, const deltic_block_tensors& t,
                   const CheckContext& context) {
  Problem p;
  Checker c(op, context, p);
  c.options(options);
  const BlockUse use = block_use(op);
  take_inputs(c, t, use);
  take(c, t.out, "out", use.out, true);
  take(c, t.w, "w", use.w, true);
  take(c, t.u, "u", use.u, true);
  take(c, t.kg, "kg", use.kg, true);
  take(c, t.qg, "qg", use.qg, true);
  take(c, t.rstd, "rstd", use.rstd, true);

  const bool a_leads = op == DELTIC_INVERSE || op == DELTIC_WY;
  check_sizes(c, t, a_leads ? Checker::Named{&t.a, "a"} : Checker::Named{&t.out, "out"});
  check_rest(c, t, {&t.out, "out"});
  if (t.rstd.rank != 0) {
    c.shape(t.rstd, "rstd", {p.B, p.T, p.H});
    const DType d = static_cast<DType>(t.rstd.dtype);
    if (d != DType::f32 && d != DType::f64) c.bad("rstd", "expected fp32, got ", name_of(d));
  }
  if (writes_a(op)) check_value_rows(c, t.a, "a", p.chunk);
  check_value_rows(c, t.w, "w", p.K);
  if ((t.v.rank != 0) != (t.u.rank != 0))
    c.bad(t.v.rank != 0 ? "u" : "v", "expected a tensor, as u goes with v, got none");
  if (op == DELTIC_WY && (t.q.rank != 0) != (t.qg.rank != 0))
    c.bad(t.q.rank != 0 ? "qg" : "q", "expected a tensor, as qg goes with q, got none");
  check_value_rows(c, t.u, "u", p.V);
  check_value_rows(c, t.kg, "kg", p.K);
  check_value_rows(c, t.qg, "qg", p.K);
  p.out = Checker::rows(t.out), p.w = Checker::rows(t.w), p.u = Checker::rows(t.u);
  p.kg = Checker::rows(t.kg), p.qg = Checker::rows(t.qg), p.rstd = Checker::rows(t.rstd);
  if (writes_a(op)) c.output(t.a, "a");
  c.output(t.out, "out"), c.output(t.w, "w"), c.output(t.u, "u");
  c.output(t.kg, "kg"), c.output(t.qg, "qg"), c.output(t.rstd, "rstd");
  check_inputs_alone(c, t);
  return p;
}

Problem check_call(deltic_op op, const deltic_options& options,
                   const deltic_block_backward_tensors& b, const CheckContext& context) {
  Problem p;
  Checker c(op, context, p);
  p.is_gradient = true;
  const deltic_block_tensors& t = *b.forward;
  c.options(options);
  const bool is_inverse = op == DELTIC_INVERSE;
  BlockUse use = block_use(op);
  if (is_inverse) use.a = kMay;
  take_inputs(c, t, use);
  if (is_inverse) {
    take(c, t.out, "out", kMay, false);
    if (t.a.rank == 0 && t.out.rank == 0) c.bad("out", "expected a tensor (or a), got none");
    if (t.a.rank != 0) c.absent(t.out, "out", "with a (one of them is enough)");
  } else {
    c.absent(t.out, "out", "in a gradient's call");
  }
  c.absent(t.w, "w", "in a gradient's call"), c.absent(t.u, "u", "in a gradient's call");
  c.absent(t.kg, "kg", "in a gradient's call"), c.absent(t.qg, "qg", "in a gradient's call");
  c.absent(t.rstd, "rstd", "in a gradient's call");
  const auto may = [](Use forward) { return forward == kNo ? kNo : kMay; };
  take(c, b.d_out, "d_out", use.out, false);
  take(c, b.d_w, "d_w", may(use.w), false);
  take(c, b.d_u, "d_u", may(use.u), false);
  take(c, b.d_kg, "d_kg", may(use.kg), false);
  take(c, b.d_qg, "d_qg", may(use.qg), false);

  const bool is_result = is_inverse && t.a.rank == 0;
  const Checker::Named a = is_result ? Checker::Named{&t.out, "out"} : Checker::Named{&t.a, "a"};
  const bool a_leads = is_inverse || op == DELTIC_WY;
  check_sizes(c, t, a_leads ? a : Checker::Named{&b.d_out, "d_out"});
  check_rest(c, t, {&b.d_out, "d_out"});
  if (t.v.rank == 0) c.absent(b.d_u, "d_u", "without v");
  if (t.q.rank == 0) c.absent(b.d_qg, "d_qg", "without q");
  check_value_rows(c, b.d_w, "d_w", p.K);
  check_value_rows(c, b.d_u, "d_u", p.V);
  check_value_rows(c, b.d_kg, "d_kg", p.K);
  check_value_rows(c, b.d_qg, "d_qg", p.K);

  const auto gradient = [&](const deltic_tensor& d, const char* name, const Checker::Named& of) {
    if (!c.gradient(d, name, *of.tensor, of.name)) return;
    c.float_dtype(d, name);
    c.output(d, name);
  };
  gradient(b.dq, "dq", {&t.q, "q"}), gradient(b.dk, "dk", {&t.k, "k"});
  gradient(b.dv, "dv", {&t.v, "v"}), gradient(b.dx, "dx", {&t.x, "x"});
  gradient(b.dg, "dg", {&t.g, "g"}), gradient(b.dbeta, "dbeta", {&t.beta, "beta"});
  gradient(b.da, "da", a), gradient(b.dA_log, "dA_log", {&t.A_log, "A_log"});
  gradient(b.ddt_bias, "ddt_bias", {&t.dt_bias, "dt_bias"});
  gradient(b.dz, "dz", {&t.z, "z"}), gradient(b.dweight, "dweight", {&t.weight, "weight"});
  check_inputs_alone(c, t);
  c.input(t.out, "out"), c.input(b.d_out, "d_out"), c.input(b.d_w, "d_w");
  c.input(b.d_u, "d_u"), c.input(b.d_kg, "d_kg"), c.input(b.d_qg, "d_qg");

  p.out = Checker::rows(t.out), p.d_out = Checker::rows(b.d_out), p.d_w = Checker::rows(b.d_w);
  p.d_u = Checker::rows(b.d_u), p.d_kg = Checker::rows(b.d_kg), p.d_qg = Checker::rows(b.d_qg);
  p.dq = Checker::rows(b.dq), p.dk = Checker::rows(b.dk), p.dv = Checker::rows(b.dv);
  p.dx = Checker::rows(b.dx), p.dg = Checker::rows(b.dg), p.dbeta = Checker::rows(b.dbeta);
  p.da = Checker::rows(b.da), p.dA_log = Checker::param_view(b.dA_log);
  p.ddt_bias = Checker::param_view(b.ddt_bias);
  p.dz = Checker::rows(b.dz), p.dweight = Checker::param_view(b.dweight);
  return p;
}

}  // namespace deltic
