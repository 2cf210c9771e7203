// The building blocks and their gradients as operators.
#include <algorithm>
#include <string>
#include <tuple>

#include "bridge.h"

namespace deltic::bridge {
namespace {

// The chunk length that a square per chunk, [B,T,HV,W], was made with; 64 for another shape, which
// the library then refuses.
int32_t width_of(const deltic_tensor& a) {
  const bool is_short = a.rank == 4 && (a.shape[3] == 16 || a.shape[3] == 32);
  return is_short ? static_cast<int32_t>(a.shape[3]) : 64;
}

// A building block's call: which operation, its tensors and options.
struct Block : Call {
  deltic_op op;
  deltic_block_tensors t{};

  // With `suffix` the name of the operator for errors: `_out_` where the outputs are the caller's.
  Block(deltic_op which, const std::string& words, MaybeFloat scale = {},
        MaybeFloat lower_bound = {}, const char* suffix = "")
      : Call((std::string(deltic_op_name(which)) + suffix).c_str(), words, scale, lower_bound),
        op(which) {
    deltic_block_tensors_init(&t, sizeof t);
  }

  void sequences(const MaybeTensor& cu_seqlens, const MaybeTensor& cu_seqlens_cpu) {
    t.cu_seqlens = input("cu_seqlens", cu_seqlens);
    t.cu_seqlens_host = input("cu_seqlens_host", cu_seqlens_cpu);
  }
  void gate(const Tensor& g, const MaybeTensor& A_log, const MaybeTensor& dt_bias) {
    t.g = input("g", g), t.A_log = input("A_log", A_log);
    t.dt_bias = input("dt_bias", dt_bias);
  }
  // [B,T,HV,W] with the heads of the gate or of beta, else those of k.
  deltic_tensor plan_square(MaybeType dtype) const {
    const int64_t heads = t.g.rank >= 3      ? t.g.shape[2]
                          : t.beta.rank >= 3 ? t.beta.shape[2]
                                             : t.k.shape[2];
    // Said here by the argument that is wrong: the library would say it of the output.
    if (t.k.rank == 4 && t.k.shape[2] > 0 && heads % t.k.shape[2] != 0) {
      fail(DELTIC_INVALID_ARGUMENT,
           options.function + (t.g.rank >= 3 ? ": g" : ": beta") +
               ": expected a number of value heads HV that is a multiple of H = " +
               std::to_string(t.k.shape[2]) + ", got " + std::to_string(heads));
    }
    const int64_t width = options.c.chunk == 0 ? 64 : options.c.chunk;
    return plan({t.k.shape[0], t.k.shape[1], heads, width}, dtype_of(function(), dtype, wide(t.k)),
                t.k);
  }
  // Outputs of the shapes that follow from the inputs; kg is asked for.
  void plan_outputs(MaybeType dtype = {}, bool output_kg = false) {
    switch (op) {
      case DELTIC_CUMSUM:
      case DELTIC_GATE:
        t.out = plan_like(t.g);
        t.out.dtype = dtype_of(function(), dtype, wide(t.g));
        break;
      case DELTIC_L2NORM:
        t.out = plan_like(t.x);
        t.out.dtype = dtype_of(function(), dtype, t.x.dtype);
        t.rstd = plan({t.x.shape[0], t.x.shape[1], t.x.shape[2]}, wide(t.x), t.x);
        break;
      case DELTIC_INVERSE:
        t.out = plan_like(t.a);
        t.out.dtype = dtype_of(function(), dtype, t.a.dtype);
        break;
      case DELTIC_WY: {
        options.c.chunk = width_of(t.a);
        const int32_t type = dtype_of(function(), dtype, t.k.dtype);
        const int64_t B = t.k.shape[0], T = t.k.shape[1], K = t.k.shape[3], HV = t.a.shape[2];
        t.w = plan({B, T, HV, K}, type, t.k);
        if (t.v.rank != 0) t.u = plan({B, T, HV, t.v.shape[3]}, type, t.k);
        if (output_kg) t.kg = t.w;
        if (t.q.rank != 0) t.qg = t.w;
        break;
      }
      default:
        t.out = plan_square(dtype);
        if (op == DELTIC_SCORES_INVERSE) t.a = t.out;
    }
  }
  // An output of the caller's in the place of a planned one. Of another shape it is refused here,
  // where the inputs are right: the library takes the number of heads from it.
  void take(const char* name, const MaybeTensor& given, deltic_tensor& planned,
            const deltic_tensor& where) const {
    const bool is_planned = planned.rank != 0;
    if (!is_planned && !given.has_value()) return;
    const deltic_tensor found = as_given(name, given);
    if (is_planned && found.rank == planned.rank &&
        std::equal(found.shape, found.shape + found.rank, planned.shape)) {
      planned = found;
      return;
    }
    workspace_bytes(where);
    const std::string expected = !is_planned          ? "none"
                                 : !given.has_value() ? "a tensor"
                                                      : "shape " + shape_text(planned);
    const std::string got = !is_planned          ? "a tensor"
                            : !given.has_value() ? "none"
                                                 : shape_text(found);
    fail(DELTIC_INVALID_ARGUMENT,
         options.function + ": " + name + ": expected " + expected + ", got " + got);
  }

  uint64_t workspace_bytes(const deltic_tensor& where) const {
    uint64_t bytes = 0;
    check(deltic_block_workspace(op, &options.c, &t, stream_of(where), &bytes));
    return bytes;
  }
  void run(uint64_t bytes, const deltic_tensor& where) const {
    const Workspace workspace(bytes, where);
    check_call(deltic_block(op, &options.c, &t, workspace.c(), stream_of(where)), workspace, where);
  }
  // Of the blocks with one output, `out`, already planned.
  Tensor run_for_out(const deltic_tensor& where) {
    const uint64_t bytes = workspace_bytes(where);
    Tensor out = allocate(t.out, where);
    run(bytes, where);
    return out;
  }
};

Tensor cumsum(const Tensor& g, const MaybeTensor& A_log, const MaybeTensor& dt_bias,
              const MaybeTensor& cu_seqlens, const MaybeTensor& cu_seqlens_cpu, MaybeFloat scale,
              MaybeFloat lower_bound, const std::string& options, MaybeType dtype) {
  Block b(DELTIC_CUMSUM, options, scale, lower_bound);
  b.gate(g, A_log, dt_bias);
  b.sequences(cu_seqlens, cu_seqlens_cpu);
  b.plan_outputs(dtype);
  return b.run_for_out(b.t.g);
}

Tensor gate(const Tensor& g, const MaybeTensor& A_log, const MaybeTensor& dt_bias,
            const MaybeTensor& cu_seqlens, const MaybeTensor& cu_seqlens_cpu,
            MaybeFloat lower_bound, const std::string& options, MaybeType dtype) {
  Block b(DELTIC_GATE, options, {}, lower_bound);
  b.gate(g, A_log, dt_bias);
  b.sequences(cu_seqlens, cu_seqlens_cpu);
  b.plan_outputs(dtype);
  return b.run_for_out(b.t.g);
}

std::tuple<Tensor, Tensor> l2norm(const Tensor& x, const MaybeTensor& cu_seqlens,
                                  const MaybeTensor& cu_seqlens_cpu, const std::string& options,
                                  MaybeType dtype) {
  Block b(DELTIC_L2NORM, options);
  b.t.x = b.input("x", x);
  b.sequences(cu_seqlens, cu_seqlens_cpu);
  b.plan_outputs(dtype);
  const uint64_t bytes = b.workspace_bytes(b.t.x);
  Tensor out = allocate(b.t.out, b.t.x), rstd = allocate(b.t.rstd, b.t.x);
  b.run(bytes, b.t.x);
  return {out, rstd};
}

Tensor kkt(const Tensor& k, const MaybeTensor& g, const MaybeTensor& beta,
           const MaybeTensor& cu_seqlens, const MaybeTensor& cu_seqlens_cpu,
           const std::string& options, MaybeType dtype) {
  Block b(DELTIC_KKT, options);
  b.t.k = b.input("k", k), b.t.g = b.input("g", g);
  b.t.beta = b.input("beta", beta);
  b.sequences(cu_seqlens, cu_seqlens_cpu);
  b.plan_outputs(dtype);
  return b.run_for_out(b.t.k);
}

Tensor scores(const Tensor& q, const Tensor& k, const MaybeTensor& g, const MaybeTensor& cu_seqlens,
              const MaybeTensor& cu_seqlens_cpu, MaybeFloat scale, const std::string& options,
              MaybeType dtype) {
  Block b(DELTIC_SCORES, options, scale);
  b.t.q = b.input("q", q), b.t.k = b.input("k", k), b.t.g = b.input("g", g);
  b.sequences(cu_seqlens, cu_seqlens_cpu);
  b.plan_outputs(dtype);
  return b.run_for_out(b.t.k);
}

Tensor inverse(const Tensor& a, const MaybeTensor& cu_seqlens, const MaybeTensor& cu_seqlens_cpu,
               const std::string& options, MaybeType dtype) {
  Block b(DELTIC_INVERSE, options);
  b.t.a = b.input("a", a);
  b.sequences(cu_seqlens, cu_seqlens_cpu);
  b.plan_outputs(dtype);
  return b.run_for_out(b.t.a);
}

std::tuple<Tensor, Tensor> scores_inverse(const Tensor& q, const Tensor& k, const MaybeTensor& g,
                                          const MaybeTensor& beta, const MaybeTensor& cu_seqlens,
                                          const MaybeTensor& cu_seqlens_cpu, MaybeFloat scale,
                                          const std::string& options, MaybeType dtype) {
  Block b(DELTIC_SCORES_INVERSE, options, scale);
  b.t.q = b.input("q", q), b.t.k = b.input("k", k), b.t.g = b.input("g", g);
  b.t.beta = b.input("beta", beta);
  b.sequences(cu_seqlens, cu_seqlens_cpu);
  b.plan_outputs(dtype);
  const uint64_t bytes = b.workspace_bytes(b.t.k);
  Tensor out = allocate(b.t.out, b.t.k), inverse = allocate(b.t.a, b.t.k);
  b.run(bytes, b.t.k);
  return {out, inverse};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> wy(const Tensor& k, const Tensor& a,
                                              const MaybeTensor& v, const MaybeTensor& g,
                                              const MaybeTensor& beta, const MaybeTensor& q,
                                              const MaybeTensor& cu_seqlens,
                                              const MaybeTensor& cu_seqlens_cpu, bool output_kg,
                                              const std::string& options, MaybeType dtype) {
  Block b(DELTIC_WY, options);
  b.t.k = b.input("k", k), b.t.a = b.input("a", a), b.t.v = b.input("v", v);
  b.t.g = b.input("g", g), b.t.beta = b.input("beta", beta);
  b.t.q = b.input("q", q);
  b.sequences(cu_seqlens, cu_seqlens_cpu);
  b.plan_outputs(dtype, output_kg);
  const deltic_tensor& where = b.t.k;
  const uint64_t bytes = b.workspace_bytes(where);
  Tensor w = allocate(b.t.w, where), u = allocate(b.t.u, where), kg = allocate(b.t.kg, where),
         qg = allocate(b.t.qg, where);
  b.run(bytes, where);
  return {w, u, kg, qg};
}

// A block into memory of the caller's: every output that there is. `inverse` is that of
// scores_inverse.
void block_out_(int64_t op, const MaybeTensor& q, const MaybeTensor& k, const MaybeTensor& v,
                const MaybeTensor& x, const MaybeTensor& g, const MaybeTensor& beta,
                const MaybeTensor& A_log, const MaybeTensor& dt_bias, const MaybeTensor& a,
                const MaybeTensor& cu_seqlens, const MaybeTensor& cu_seqlens_cpu,
                const MaybeTensor& out, const MaybeTensor& rstd, const MaybeTensor& inverse,
                const MaybeTensor& w, const MaybeTensor& u, const MaybeTensor& kg,
                const MaybeTensor& qg, MaybeFloat scale, MaybeFloat lower_bound,
                const std::string& options) {
  if ((op < DELTIC_CUMSUM || op > DELTIC_WY) && op != DELTIC_SCORES_INVERSE) {
    fail(DELTIC_INVALID_ARGUMENT, "block_out_: op: expected a building block, 2 to 8 or " +
                                      std::to_string(DELTIC_SCORES_INVERSE) + ", got " +
                                      std::to_string(op));
  }
  Block b(static_cast<deltic_op>(op), options, scale, lower_bound, "_out_");
  deltic_block_tensors& t = b.t;
  t.q = b.input("q", q), t.k = b.input("k", k), t.v = b.input("v", v);
  t.x = b.input("x", x), t.g = b.input("g", g), t.beta = b.input("beta", beta);
  t.A_log = b.input("A_log", A_log), t.dt_bias = b.input("dt_bias", dt_bias);
  t.a = b.input("a", a);
  b.sequences(cu_seqlens, cu_seqlens_cpu);
  const deltic_tensor where = t.k.rank != 0 ? t.k : t.x.rank != 0 ? t.x : t.g.rank != 0 ? t.g : t.a;
  b.plan_outputs({}, kg.has_value());
  // What is called `a` there is an output of scores_inverse and an input of the others.
  const bool is_result = b.op == DELTIC_SCORES_INVERSE;
  deltic_tensor nothing{};
  if (is_result) b.take("a", a, nothing, where);
  b.take("out", out, t.out, where), b.take("rstd", rstd, t.rstd, where);
  b.take("inverse", inverse, is_result ? t.a : nothing, where);
  b.take("w", w, t.w, where), b.take("u", u, t.u, where);
  b.take("kg", kg, t.kg, where), b.take("qg", qg, t.qg, where);
  b.run(b.workspace_bytes(where), where);
}

// The gated norm: x and z [B,T,H,D], weight [D].
struct Norm : Block {
  Norm(const Tensor& x, const MaybeTensor& z, const MaybeTensor& weight, double eps,
       const std::string& words)
      : Block(DELTIC_RMSNORM, words) {
    t.x = input("x", x), t.z = input("z", z), t.weight = input("weight", weight);
    options.c.has_eps = 1, options.c.eps = static_cast<float>(eps);
  }
};

Tensor rmsnorm(const Tensor& x, const MaybeTensor& z, const MaybeTensor& weight, double eps,
               const std::string& options) {
  Norm b(x, z, weight, eps, options);
  b.t.out = plan_like(b.t.x);
  return b.run_for_out(b.t.x);
}

// The same into memory of the caller's.
void rmsnorm_out_(const Tensor& x, const MaybeTensor& z, const MaybeTensor& weight,
                  const Tensor& out, double eps, const std::string& options) {
  Norm b(x, z, weight, eps, options);
  b.t.out = b.as_given("out", out);
  b.run(b.workspace_bytes(b.t.x), b.t.x);
}

// Bit i of `want` asks for the i-th gradient; the others come back empty.
std::tuple<Tensor, Tensor, Tensor> rmsnorm_backward(const Tensor& d_out, const Tensor& x,
                                                    const MaybeTensor& z, const MaybeTensor& weight,
                                                    double eps, const std::string& options,
                                                    int64_t want) {
  Norm in(x, z, weight, eps, options);
  check_wanted(in.function(), want, 3);
  deltic_block_backward_tensors b;
  deltic_block_backward_tensors_init(&b, sizeof b);
  b.forward = &in.t;
  b.d_out = in.input("d_out", d_out);
  if ((want & 1) != 0) b.dx = plan_like(in.t.x);
  if ((want & 2) != 0 && in.t.z.rank != 0) b.dz = plan_like(in.t.z);
  if ((want & 4) != 0 && in.t.weight.rank != 0) b.dweight = plan_like(in.t.weight);
  uint64_t bytes = 0;
  const deltic_tensor& where = in.t.x;
  void* const stream = stream_of(where);
  check(deltic_block_backward_workspace(in.op, &in.options.c, &b, stream, &bytes));
  std::tuple<Tensor, Tensor, Tensor> gradients{allocate(b.dx, where), allocate(b.dz, where),
                                               allocate(b.dweight, where)};
  const Workspace workspace(bytes, where);
  check_call(deltic_block_backward(in.op, &in.options.c, &b, workspace.c(), stream), workspace,
             where);
  return gradients;
}

using Gradients =
    std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor>;

// Bit i of `want` asks for the i-th gradient; the others come back empty. A gradient has its
// input's dtype.
Gradients block_backward(int64_t op, const MaybeTensor& q, const MaybeTensor& k,
                         const MaybeTensor& v, const MaybeTensor& x, const MaybeTensor& g,
                         const MaybeTensor& beta, const MaybeTensor& A_log,
                         const MaybeTensor& dt_bias, const MaybeTensor& a, const MaybeTensor& out,
                         const MaybeTensor& cu_seqlens, const MaybeTensor& cu_seqlens_cpu,
                         const MaybeTensor& d_out, const MaybeTensor& d_w, const MaybeTensor& d_u,
                         const MaybeTensor& d_kg, const MaybeTensor& d_qg, MaybeFloat scale,
                         MaybeFloat lower_bound, const std::string& options, int64_t want) {
  if (op < DELTIC_CUMSUM || op > DELTIC_WY) {
    fail(DELTIC_INVALID_ARGUMENT,
         "block_backward: op: expected a building block, 2 to 8, got " + std::to_string(op));
  }
  Block in(static_cast<deltic_op>(op), options, scale, lower_bound);
  check_wanted(in.function(), want, 9);
  deltic_block_tensors& t = in.t;
  t.q = in.input("q", q), t.k = in.input("k", k), t.v = in.input("v", v);
  t.x = in.input("x", x), t.g = in.input("g", g), t.beta = in.input("beta", beta);
  t.A_log = in.input("A_log", A_log), t.dt_bias = in.input("dt_bias", dt_bias);
  t.a = in.input("a", a), t.out = in.input("out", out);
  in.sequences(cu_seqlens, cu_seqlens_cpu);
  if (in.op == DELTIC_WY) in.options.c.chunk = width_of(t.a);

  deltic_block_backward_tensors b;
  deltic_block_backward_tensors_init(&b, sizeof b);
  b.forward = &t;
  b.d_out = in.gradient("d_out", d_out), b.d_w = in.gradient("d_w", d_w);
  b.d_u = in.gradient("d_u", d_u), b.d_kg = in.gradient("d_kg", d_kg);
  b.d_qg = in.gradient("d_qg", d_qg);
  const deltic_tensor& square = t.a.rank != 0 ? t.a : t.out;
  const std::pair<deltic_tensor*, const deltic_tensor*> pairs[] = {
      {&b.dq, &t.q},    {&b.dk, &t.k},         {&b.dv, &t.v},
      {&b.dx, &t.x},    {&b.dg, &t.g},         {&b.dbeta, &t.beta},
      {&b.da, &square}, {&b.dA_log, &t.A_log}, {&b.ddt_bias, &t.dt_bias}};
  const deltic_tensor* where = nullptr;
  for (int i = 0; i < 9; ++i) {
    if (pairs[i].second->rank == 0) continue;
    if (where == nullptr) where = pairs[i].second;
    if ((want >> i & 1) != 0) *pairs[i].first = plan_like(*pairs[i].second);
  }
  uint64_t bytes = 0;
  void* const stream = where == nullptr ? nullptr : stream_of(*where);
  check(deltic_block_backward_workspace(in.op, &in.options.c, &b, stream, &bytes));
  const auto make = [&](deltic_tensor& planned) { return allocate(planned, *where); };
  Gradients gradients{make(b.dq),    make(b.dk), make(b.dv),     make(b.dx),      make(b.dg),
                      make(b.dbeta), make(b.da), make(b.dA_log), make(b.ddt_bias)};
  const Workspace workspace(bytes, *where);
  check_call(deltic_block_backward(in.op, &in.options.c, &b, workspace.c(), stream), workspace,
             *where);
  return gradients;
}

void register_kernels(torch::stable::detail::StableLibrary& m) {
  m.impl("cumsum", TORCH_BOX(&cumsum));
  m.impl("gate", TORCH_BOX(&gate));
  m.impl("l2norm", TORCH_BOX(&l2norm));
  m.impl("kkt", TORCH_BOX(&kkt));
  m.impl("scores", TORCH_BOX(&scores));
  m.impl("inverse", TORCH_BOX(&inverse));
  m.impl("wy", TORCH_BOX(&wy));
  m.impl("scores_inverse", TORCH_BOX(&scores_inverse));
  m.impl("block_out_", TORCH_BOX(&block_out_));
  m.impl("block_backward", TORCH_BOX(&block_backward));
  m.impl("rmsnorm", TORCH_BOX(&rmsnorm));
  m.impl("rmsnorm_out_", TORCH_BOX(&rmsnorm_out_));
  m.impl("rmsnorm_backward", TORCH_BOX(&rmsnorm_backward));
}

#define DELTIC_SEQUENCES "Tensor? cu_seqlens=None, Tensor? cu_seqlens_cpu=None, "
#define DELTIC_OPTIONS "str options='', ScalarType? dtype=None"

DELTIC_TORCH_OPERATORS(DELTIC_TORCH_NAMESPACE, m) {
  m.def("cumsum(Tensor g, Tensor? A_log=None, Tensor? dt_bias=None, " DELTIC_SEQUENCES
        "float? scale=None, float? lower_bound=None, " DELTIC_OPTIONS ") -> Tensor");
  m.def("gate(Tensor g, Tensor? A_log=None, Tensor? dt_bias=None, " DELTIC_SEQUENCES
        "float? lower_bound=None, " DELTIC_OPTIONS ") -> Tensor");
  m.def("l2norm(Tensor x, " DELTIC_SEQUENCES DELTIC_OPTIONS ") -> (Tensor out, Tensor rstd)");
  m.def("kkt(Tensor k, Tensor? g=None, Tensor? beta=None, " DELTIC_SEQUENCES DELTIC_OPTIONS
        ") -> Tensor");
  m.def("scores(Tensor q, Tensor k, Tensor? g=None, " DELTIC_SEQUENCES
        "float? scale=None, " DELTIC_OPTIONS ") -> Tensor");
  m.def("scores_inverse(Tensor q, Tensor k, Tensor? g=None, Tensor? beta=None, " DELTIC_SEQUENCES
        "float? scale=None, " DELTIC_OPTIONS ") -> (Tensor scores, Tensor inverse)");
  m.def("inverse(Tensor a, " DELTIC_SEQUENCES DELTIC_OPTIONS ") -> Tensor");
  m.def(
      "wy(Tensor k, Tensor a, Tensor? v=None, Tensor? g=None, Tensor? beta=None, Tensor? "
      "q=None, " DELTIC_SEQUENCES "bool output_kg=False, " DELTIC_OPTIONS
      ") -> (Tensor w, Tensor u, Tensor kg, Tensor qg)");
  m.def("rmsnorm(Tensor x, Tensor? z, Tensor? weight, float eps, str options='') -> Tensor");
  m.def(
      "rmsnorm_out_(Tensor x, Tensor? z, Tensor? weight, Tensor(a!) out, float eps, "
      "str options='') -> ()");
  m.def(
      "rmsnorm_backward(Tensor d_out, Tensor x, Tensor? z, Tensor? weight, float eps, "
      "str options='', int want=7) -> (Tensor dx, Tensor dz, Tensor dweight)");
  m.def(
      "block_out_(int op, Tensor? q, Tensor? k, Tensor? v, Tensor? x, Tensor? g, Tensor? beta, "
      "Tensor? A_log, Tensor? dt_bias, Tensor? a, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, "
      "Tensor(a!)? out, Tensor(b!)? rstd, Tensor(c!)? inverse, Tensor(d!)? w, Tensor(e!)? u, "
      "Tensor(f!)? kg, Tensor(g!)? qg, float? scale=None, float? lower_bound=None, "
      "str options='') -> ()");
  m.def(
      "block_backward(int op, Tensor? q, Tensor? k, Tensor? v, Tensor? x, Tensor? g, Tensor? beta, "
      "Tensor? A_log, Tensor? dt_bias, Tensor? a, Tensor? out, Tensor? cu_seqlens, "
      "Tensor? cu_seqlens_cpu, Tensor? d_out, Tensor? d_w, Tensor? d_u, Tensor? d_kg, "
      "Tensor? d_qg, float? scale=None, float? lower_bound=None, str options='', int want=511) -> "
      "(Tensor dq, Tensor dk, Tensor dv, "
      "Tensor dx, Tensor dg, Tensor dbeta, Tensor da, Tensor dA_log, Tensor ddt_bias)");
}

DELTIC_TORCH_KERNELS(DELTIC_TORCH_NAMESPACE, CPU, m) { register_kernels(m); }
DELTIC_TORCH_KERNELS(DELTIC_TORCH_NAMESPACE, CUDA, m) { register_kernels(m); }

}  // namespace
}  // namespace deltic::bridge
