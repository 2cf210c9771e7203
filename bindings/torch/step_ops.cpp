// What a layer does in decode between its projections as one operator: convolution, recurrence and
// gated norm, over pools that are written in place.
#include <string>

#include "bridge.h"

namespace deltic::bridge {
namespace {

struct Step : Call {
  deltic_conv_tensors conv{};
  deltic_tensors decode{};
  deltic_block_tensors norm{};
  deltic_step_tensors t{};

  Step(const std::string& words, MaybeFloat scale, MaybeFloat lower_bound, MaybeFloat eps)
      : Call("step_", words, scale, lower_bound) {
    deltic_conv_tensors_init(&conv, sizeof conv);
    deltic_tensors_init(&decode, sizeof decode);
    deltic_block_tensors_init(&norm, sizeof norm);
    deltic_step_tensors_init(&t, sizeof t);
    t.conv = &conv, t.decode = &decode;
    if (options.norm) t.norm = &norm;
    options.c.has_eps = eps.has_value() ? 1 : 0;
    options.c.eps = static_cast<float>(eps.value_or(0.0));
  }
  Step(const Step&) = delete;
  Step& operator=(const Step&) = delete;

  // [B,T,HV,V] in x's dtype, by the widths of the states: the library refuses states of another
  // rank, and x, before it looks at the result.
  deltic_tensor plan_result() const {
    const deltic_tensor& s = decode.state_pool;
    const bool v_first = options.c.state_layout == DELTIC_STATE_VK;
    return plan({conv.x.shape[0], conv.x.shape[1], s.shape[1], s.shape[v_first ? 2 : 3]},
                conv.x.dtype, conv.x);
  }
};

Tensor step_(const Tensor& x, const Tensor& conv_weight, const MaybeTensor& conv_bias,
             const Tensor& conv_state, const MaybeTensor& conv_index,
             const MaybeTensor& conv_write_index, const MaybeTensor& conv_write_state,
             const MaybeTensor& beta, const MaybeTensor& g, const MaybeTensor& gv,
             const MaybeTensor& A_log, const MaybeTensor& dt_bias, const Tensor& state_pool,
             const MaybeTensor& read_index, const MaybeTensor& write_index,
             const MaybeTensor& write_pool, const MaybeTensor& has_initial_state,
             const MaybeTensor& accepted, const MaybeTensor& parents, const MaybeTensor& positions,
             const MaybeTensor& record, const MaybeTensor& cu_seqlens,
             const MaybeTensor& cu_seqlens_cpu, const MaybeTensor& z,
             const MaybeTensor& norm_weight, const MaybeTensor& out, MaybeFloat scale,
             MaybeFloat lower_bound, MaybeFloat eps, const std::string& options) {
  Step in(options, scale, lower_bound, eps);
  deltic_conv_tensors& c = in.conv;
  c.x = in.input("x", x);
  c.weight = without_groups(in.as_given("conv_weight", conv_weight));
  c.bias = in.as_given("conv_bias", conv_bias);
  c.state_pool = in.as_given("conv_state", conv_state);
  c.read_index = in.as_given("conv_index", conv_index);
  c.write_index = in.as_given("conv_write_index", conv_write_index);
  c.write_pool = in.as_given("conv_write_state", conv_write_state);
  c.cu_seqlens = in.input("cu_seqlens", cu_seqlens);
  c.cu_seqlens_host = in.input("cu_seqlens_host", cu_seqlens_cpu);
  deltic_tensors& d = in.decode;
  d.beta = in.input("beta", beta), d.g = in.input("g", g), d.gv = in.input("gv", gv);
  d.A_log = in.input("A_log", A_log), d.dt_bias = in.input("dt_bias", dt_bias);
  d.state_pool = in.as_given("state_pool", state_pool);
  d.read_index = in.as_given("read_index", read_index);
  d.write_index = in.as_given("write_index", write_index);
  d.write_pool = in.as_given("write_pool", write_pool);
  d.has_initial_state = c.has_initial_state = in.flags("has_initial_state", has_initial_state);
  d.accepted = c.accepted = in.as_given("accepted", accepted);
  d.parents = in.as_given("parents", parents);
  d.positions = in.as_given("positions", positions);
  d.record = in.as_given("record", record);
  deltic_tensor result = out.has_value() ? in.as_given("out", *out) : in.plan_result();
  in.norm.z = in.input("z", z);
  in.norm.weight = in.input("norm_weight", norm_weight);
  (in.options.norm ? in.norm.out : d.o) = result;

  uint64_t bytes = 0;
  void* const stream = stream_of(c.x);
  check(deltic_step_workspace(&in.options.c, &in.t, stream, &bytes));
  deltic_tensor none{};
  Tensor y = allocate(out.has_value() ? none : result, c.x);
  (in.options.norm ? in.norm.out : d.o).data = result.data;
  const Workspace workspace(bytes, c.x);
  check_call(deltic_step(&in.options.c, &in.t, workspace.c(), stream), workspace, c.x);
  return y;
}

void register_kernels(torch::stable::detail::StableLibrary& m) {
  m.impl("step_", TORCH_BOX(&step_));
}

DELTIC_TORCH_OPERATORS(DELTIC_TORCH_NAMESPACE, m) {
  m.def(
      "step_(Tensor x, Tensor conv_weight, Tensor? conv_bias, Tensor(a!) conv_state, "
      "Tensor? conv_index, Tensor? conv_write_index, Tensor(b!)? conv_write_state, Tensor? beta, "
      "Tensor? g, Tensor? gv, Tensor? A_log, Tensor? dt_bias, Tensor(c!) state_pool, "
      "Tensor? read_index, Tensor? write_index, Tensor(d!)? write_pool, "
      "Tensor? has_initial_state, Tensor? accepted, Tensor? parents, Tensor? positions, "
      "Tensor(e!)? record, Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, Tensor? z, "
      "Tensor? norm_weight, Tensor(f!)? out, float? scale=None, float? lower_bound=None, "
      "float? eps=None, str options='') -> Tensor");
}

DELTIC_TORCH_KERNELS(DELTIC_TORCH_NAMESPACE, CPU, m) { register_kernels(m); }
DELTIC_TORCH_KERNELS(DELTIC_TORCH_NAMESPACE, CUDA, m) { register_kernels(m); }

}  // namespace
}  // namespace deltic::bridge
