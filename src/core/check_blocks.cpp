// Checks of the building blocks' calls.
#include "core/check.h"
#include "core/checker.h"

namespace deltic {

namespace {

// Which tensors an operation takes: required, optional.
enum Use { kNo, kMay, kMust };
struct BlockUse {
  Use q = kNo, k = kNo, v = kNo, x = kNo, g = kNo, beta = kNo, gate_params = kNo, a = kNo,
      out = kNo, w = kNo, u = kNo, kg = kNo, qg = kNo, rstd = kNo;
};
constexpr BlockUse block_use(deltic_op op) {
  switch (op) {
    case DELTIC_CUMSUM:
    case DELTIC_GATE:
      return {.g = kMust, .gate_params = kMay, .out = kMust};
    case DELTIC_L2NORM:
      return {.x = kMust, .out = kMust, .rstd = kMay};
    case DELTIC_KKT:
      return {.k = kMust, .g = kMay, .beta = kMay, .out = kMust};
    case DELTIC_SCORES:
      return {.q = kMust, .k = kMust, .g = kMay, .out = kMust};
    case DELTIC_INVERSE:
      return {.a = kMust, .out = kMust};
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

}  // namespace

Problem check_call(deltic_op op, const deltic_options* options, const deltic_block_tensors* given,
                   const CheckContext& context) {
  Checker c(op, context);
  Problem& p = c.p_;
  if (given == nullptr) c.bad("tensors", "expected a struct, got a null pointer");
  const deltic_block_tensors t = read_struct(c.op_, "block_tensors", given);
  c.options(read_struct(c.op_, "options", options));
  const BlockUse use = block_use(op);
  const auto take = [&](const deltic_tensor& tensor, const char* name, Use how, bool is_output) {
    if (how == kNo && tensor.rank != 0) c.bad(name, "expected none, got a tensor");
    if (how == kMust) c.required(tensor, name, is_output);
    if (how == kMay) c.given(tensor, name, is_output);
    if (tensor.rank != 0) c.float_dtype(tensor, name);
  };
  take(t.q, "q", use.q, false);
  take(t.k, "k", use.k, false);
  take(t.v, "v", use.v, false);
  take(t.x, "x", use.x, false);
  take(t.g, "g", use.g, false);
  take(t.beta, "beta", use.beta, false);
  take(t.A_log, "A_log", use.gate_params, false);
  take(t.dt_bias, "dt_bias", use.gate_params, false);
  take(t.a, "a", use.a, false);
  take(t.out, "out", use.out, true);
  take(t.w, "w", use.w, true);
  take(t.u, "u", use.u, true);
  take(t.kg, "kg", use.kg, true);
  take(t.qg, "qg", use.qg, true);
  take(t.rstd, "rstd", use.rstd, true);

  // Sizes from the leading input, then everything else against them.
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
  } else if (op == DELTIC_L2NORM) {
    p.H = p.HV = heads(t.x, "x", "[B,T,H,D]");
    p.K = t.x.shape[3];
  } else if (op == DELTIC_INVERSE) {
    p.H = p.HV = heads(t.a, "a", "[B,T,HV,W]");
    const int64_t width = t.a.shape[3];
    if (width != 16 && width != 32 && width != 64)
      c.bad("a", "expected a width of 16, 32 or 64, got ", width);
    if (p.chunk != 64 && p.chunk != width)
      c.bad("chunk", "expected the width of a, ", width, ", got ", p.chunk);
    p.chunk = static_cast<int32_t>(width);
    p.K = 1;
  } else {
    p.H = heads(t.k, "k", "[B,T,H,K]");
    p.K = t.k.shape[3];
    const deltic_tensor& by_value_head = op == DELTIC_WY ? t.a : t.out;
    const char* name = op == DELTIC_WY ? "a" : "out";
    c.rank4(by_value_head, name, "[B,T,HV,W]");
    p.HV = by_value_head.shape[2];
    if (p.H < 1) c.bad("k", "expected at least one head, got ", p.H);
    if (p.HV < 1 || p.HV % p.H != 0) {
      c.bad(name, "expected a number of value heads HV that is a multiple of H = ", p.H, ", got ",
            p.HV);
    }
    if (p.K < 1 || p.K > 256) c.bad("k", "expected a key width K of 1 to 256, got ", p.K);
    c.shape(by_value_head, name, {p.B, p.T, p.HV, p.chunk});
  }
  if (p.HV < 1)
    c.bad(op == DELTIC_L2NORM    ? "x"
          : op == DELTIC_INVERSE ? "a"
                                 : "g",
          "expected at least one head, got none");
  if (p.K < 1) c.bad(op == DELTIC_L2NORM ? "x" : "g", "expected a width of at least 1, got 0");
  c.gates(t.g, t.A_log, t.dt_bias, p.K);
  c.sequences(t.cu_seqlens, t.cu_seqlens_host);

  if (op == DELTIC_CUMSUM || op == DELTIC_GATE) {
    if (t.g.rank == 3) c.shape(t.out, "out", {p.B, p.T, p.HV});
    if (t.g.rank == 4) c.shape(t.out, "out", {p.B, p.T, p.HV, p.K});
  } else if (op == DELTIC_L2NORM) {
    c.shape(t.out, "out", {p.B, p.T, p.H, p.K});
    if (t.rstd.rank != 0) {
      c.shape(t.rstd, "rstd", {p.B, p.T, p.H});
      const DType d = static_cast<DType>(t.rstd.dtype);
      if (d != DType::f32 && d != DType::f64) c.bad("rstd", "expected fp32, got ", name_of(d));
    }
  } else if (op == DELTIC_INVERSE) {
    c.shape(t.out, "out", {p.B, p.T, p.HV, p.chunk});
  }
  if (t.q.rank != 0) c.shape(t.q, "q", {p.B, p.T, p.H, p.K});
  if (t.beta.rank != 0) {
    c.shape(t.beta, "beta", {p.B, p.T, p.HV});
    p.beta_kind = BetaKind::head;
  }
  if (op == DELTIC_WY) {
    c.shape(t.w, "w", {p.B, p.T, p.HV, p.K});
    if ((t.v.rank != 0) != (t.u.rank != 0))
      c.bad(t.v.rank != 0 ? "u" : "v", "expected a tensor, as u goes with v, got none");
    if ((t.q.rank != 0) != (t.qg.rank != 0))
      c.bad(t.q.rank != 0 ? "qg" : "q", "expected a tensor, as qg goes with q, got none");
    if (t.v.rank != 0) {
      c.rank4(t.v, "v", "[B,T,HV,V]");
      p.V = t.v.shape[3];
      c.shape(t.v, "v", {p.B, p.T, p.HV, p.V});
      c.shape(t.u, "u", {p.B, p.T, p.HV, p.V});
    }
    if (t.kg.rank != 0) c.shape(t.kg, "kg", {p.B, p.T, p.HV, p.K});
    if (t.qg.rank != 0) c.shape(t.qg, "qg", {p.B, p.T, p.HV, p.K});
  }
  if (!c.has_scale_) {
    p.scale =
        op == DELTIC_SCORES ? static_cast<float>(1.0 / std::sqrt(static_cast<double>(p.K))) : 1.0f;
  }
  p.q = Checker::rows(t.q), p.k = Checker::rows(t.k), p.v = Checker::rows(t.v),
  p.x = Checker::rows(t.x);
  p.beta = Checker::rows(t.beta), p.a = Checker::rows(t.a), p.out = Checker::rows(t.out);
  p.w = Checker::rows(t.w), p.u = Checker::rows(t.u), p.kg = Checker::rows(t.kg);
  p.qg = Checker::rows(t.qg), p.rstd = Checker::rows(t.rstd);
  c.output(t.out, "out"), c.output(t.w, "w"), c.output(t.u, "u");
  c.output(t.kg, "kg"), c.output(t.qg, "qg"), c.output(t.rstd, "rstd");
  c.input(t.q, "q"), c.input(t.k, "k"), c.input(t.v, "v"), c.input(t.x, "x"), c.input(t.g, "g");
  c.input(t.beta, "beta"), c.input(t.A_log, "A_log"), c.input(t.dt_bias, "dt_bias");
  c.input(t.a, "a"), c.input(t.cu_seqlens, "cu_seqlens");
  c.input(t.cu_seqlens_host, "cu_seqlens_host");
  return p;
}

}  // namespace deltic
