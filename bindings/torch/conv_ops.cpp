// The causal depthwise convolution and its gradient as operators.
#include <algorithm>
#include <string>
#include <tuple>

#include "bridge.h"

namespace deltic::bridge {
namespace {

// One token per sequence may come without a dimension of its own: [B,D] is [B,1,D].
deltic_tensor with_tokens(deltic_tensor x) {
  if (x.rank != 2) return x;
  x.rank = 3;
  x.shape[2] = x.shape[1], x.strides[2] = x.strides[1];
  x.shape[1] = 1, x.strides[1] = 0;
  return x;
}

struct Inputs : Call {
  deltic_conv_tensors t{};

  Inputs(const char* op, const std::string& words, const Tensor& x, const Tensor& weight,
         const MaybeTensor& bias, const MaybeTensor& cu_seqlens, const MaybeTensor& cu_seqlens_cpu)
      : Call(op, words) {
    deltic_conv_tensors_init(&t, sizeof t);
    t.x = input("x", x), t.weight = without_groups(as_given("weight", weight));
    t.bias = as_given("bias", bias);
    t.cu_seqlens = input("cu_seqlens", cu_seqlens);
    t.cu_seqlens_host = input("cu_seqlens_host", cu_seqlens_cpu);
  }
  // As the initial state, else W - 1 inputs of x's dtype.
  void plan_final_state() {
    if (!options.final_state || t.x.rank != 3 || t.weight.rank != 2) return;
    const bool has_state = t.initial_state.rank == 3;
    const int64_t N = t.cu_seqlens.rank != 0 ? t.cu_seqlens.shape[0] - 1 : t.x.shape[0];
    const int64_t S =
        has_state ? t.initial_state.shape[2] : std::max<int64_t>(t.weight.shape[1] - 1, 1);
    const int32_t dtype = has_state ? t.initial_state.dtype : t.x.dtype;
    t.final_state = plan({N, t.x.shape[2], S}, dtype, t.x);
  }
  uint64_t workspace_bytes() const {
    uint64_t bytes = 0;
    check(deltic_conv_workspace(&options.c, &t, stream_of(t.x), &bytes));
    return bytes;
  }
  void run(uint64_t bytes) const {
    const Workspace workspace(bytes, t.x);
    check_call(deltic_conv(&options.c, &t, workspace.c(), stream_of(t.x)), workspace, t.x);
  }
};

std::tuple<Tensor, Tensor> conv(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                                const MaybeTensor& initial_state, const MaybeTensor& cu_seqlens,
                                const MaybeTensor& cu_seqlens_cpu, const std::string& options) {
  Inputs in("conv", options, x, weight, bias, cu_seqlens, cu_seqlens_cpu);
  in.t.initial_state = in.as_given("initial_state", initial_state);
  in.t.out = plan_like(in.t.x);
  in.plan_final_state();
  const uint64_t bytes = in.workspace_bytes();
  Tensor out = allocate(in.t.out, in.t.x), final_state = allocate(in.t.final_state, in.t.x);
  in.run(bytes);
  return {out, final_state};
}

Tensor conv_(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
             const Tensor& state_pool, const MaybeTensor& read_index,
             const MaybeTensor& write_index, const MaybeTensor& cu_seqlens,
             const MaybeTensor& cu_seqlens_cpu, const std::string& options) {
  Inputs in("conv_", options, x, weight, bias, cu_seqlens, cu_seqlens_cpu);
  deltic_tensor planned = plan_like(in.t.x);
  in.t.x = with_tokens(in.t.x);
  in.t.state_pool = in.as_given("state_pool", state_pool);
  in.t.read_index = in.as_given("read_index", read_index);
  in.t.write_index = in.as_given("write_index", write_index);
  in.t.out = with_tokens(planned);
  const uint64_t bytes = in.workspace_bytes();
  Tensor out = allocate(planned, in.t.x);
  in.t.out.data = planned.data;
  in.run(bytes);
  return out;
}

// With everything that servers have: y goes into `out` where that is given, and comes back empty
// then.
std::tuple<Tensor, Tensor> conv_out_(const Tensor& x, const Tensor& weight, const MaybeTensor& bias,
                                     const MaybeTensor& initial_state,
                                     const MaybeTensor& state_pool, const MaybeTensor& read_index,
                                     const MaybeTensor& write_index, const MaybeTensor& write_pool,
                                     const MaybeTensor& has_initial_state,
                                     const MaybeTensor& accepted, const MaybeTensor& cu_seqlens,
                                     const MaybeTensor& cu_seqlens_cpu, const MaybeTensor& ckpt_cu,
                                     const MaybeTensor& ckpt_tokens, const MaybeTensor& ckpt_slots,
                                     const MaybeTensor& ckpt_states, const MaybeTensor& out,
                                     const std::string& options) {
  Inputs in("conv_out_", options, x, weight, bias, cu_seqlens, cu_seqlens_cpu);
  deltic_tensor planned = plan_like(in.t.x);
  const bool has_pool = state_pool.has_value();
  if (has_pool) in.t.x = with_tokens(in.t.x);
  in.t.initial_state = in.as_given("initial_state", initial_state);
  in.t.state_pool = in.as_given("state_pool", state_pool);
  in.t.read_index = in.as_given("read_index", read_index);
  in.t.write_index = in.as_given("write_index", write_index);
  in.t.write_pool = in.as_given("write_pool", write_pool);
  in.t.has_initial_state = in.flags("has_initial_state", has_initial_state);
  in.t.accepted = in.as_given("accepted", accepted);
  in.t.ckpt_cu = in.as_given("ckpt_cu", ckpt_cu);
  in.t.ckpt_tokens = in.as_given("ckpt_tokens", ckpt_tokens);
  in.t.ckpt_slots = in.as_given("ckpt_slots", ckpt_slots);
  in.t.ckpt_states = in.as_given("ckpt_states", ckpt_states);
  if (out.has_value()) {
    const deltic_tensor given = in.as_given("out", *out);
    // A token's dimension of one is x's to leave out, not this one's; without it shapes are
    // compared here: the library sees both with one.
    const bool is_short = planned.rank == 2;
    const bool is_other =
        given.rank != planned.rank
            ? is_short || planned.rank == 3
            : is_short && !std::equal(given.shape, given.shape + 2, planned.shape);
    if (has_pool && is_other) {
      fail(DELTIC_INVALID_ARGUMENT, std::string(in.function()) + ": out: expected shape " +
                                        shape_text(planned) + ", got " + shape_text(given));
    }
    planned = given;
  }
  in.t.out = has_pool ? with_tokens(planned) : planned;
  in.plan_final_state();
  const uint64_t bytes = in.workspace_bytes();
  deltic_tensor none{};
  Tensor y = allocate(out.has_value() ? none : planned, in.t.x);
  Tensor final_state = allocate(in.t.final_state, in.t.x);
  in.t.out.data = planned.data;
  in.run(bytes);
  return {y, final_state};
}

// Bit i of `want` asks for the i-th gradient; the others come back empty.
std::tuple<Tensor, Tensor, Tensor, Tensor> conv_backward(
    const MaybeTensor& d_out, const MaybeTensor& d_final_state, const Tensor& x,
    const Tensor& weight, const MaybeTensor& bias, const MaybeTensor& initial_state,
    const MaybeTensor& cu_seqlens, const MaybeTensor& cu_seqlens_cpu, const std::string& options,
    int64_t want) {
  Inputs in("conv_backward", options, x, weight, bias, cu_seqlens, cu_seqlens_cpu);
  check_wanted(in.function(), want, 4);
  in.t.initial_state = in.as_given("initial_state", initial_state);
  deltic_conv_backward_tensors b;
  deltic_conv_backward_tensors_init(&b, sizeof b);
  b.forward = &in.t;
  b.d_out = in.gradient("d_out", d_out);
  b.d_final_state = in.as_given("d_final_state", d_final_state);
  // The weight's own shape, which the library sees without groups.
  deltic_tensor dweight = plan_like(in.as_given("weight", weight));
  const std::pair<deltic_tensor*, const deltic_tensor*> pairs[] = {
      {&b.dx, &in.t.x},
      {&b.dweight, &in.t.weight},
      {&b.dbias, &in.t.bias},
      {&b.d_initial_state, &in.t.initial_state}};
  for (int i = 0; i < 4; ++i) {
    if ((want >> i & 1) != 0 && pairs[i].second->rank != 0)
      *pairs[i].first = plan_like(*pairs[i].second);
  }
  uint64_t bytes = 0;
  check(deltic_conv_backward_workspace(&in.options.c, &b, stream_of(in.t.x), &bytes));
  if (b.dweight.rank == 0) dweight.rank = 0;
  Tensor dw = allocate(dweight, in.t.x);
  b.dweight.data = dweight.data;
  std::tuple<Tensor, Tensor, Tensor, Tensor> gradients{
      allocate(b.dx, in.t.x), dw, allocate(b.dbias, in.t.x), allocate(b.d_initial_state, in.t.x)};
  const Workspace workspace(bytes, in.t.x);
  check_call(deltic_conv_backward(&in.options.c, &b, workspace.c(), stream_of(in.t.x)), workspace,
             in.t.x);
  return gradients;
}

void register_kernels(torch::stable::detail::StableLibrary& m) {
  m.impl("conv", TORCH_BOX(&conv));
  m.impl("conv_", TORCH_BOX(&conv_));
  m.impl("conv_out_", TORCH_BOX(&conv_out_));
  m.impl("conv_backward", TORCH_BOX(&conv_backward));
}

#define DELTIC_INPUTS "Tensor x, Tensor weight, Tensor? bias, "
#define DELTIC_SEQUENCES "Tensor? cu_seqlens, Tensor? cu_seqlens_cpu, str options=''"

DELTIC_TORCH_OPERATORS(DELTIC_TORCH_NAMESPACE, m) {
  m.def("conv(" DELTIC_INPUTS "Tensor? initial_state, " DELTIC_SEQUENCES
        ") -> (Tensor out, Tensor final_state)");
  m.def("conv_(" DELTIC_INPUTS
        "Tensor(a!) state_pool, Tensor? read_index, Tensor? write_index, " DELTIC_SEQUENCES
        ") -> Tensor");
  m.def("conv_out_(" DELTIC_INPUTS
        "Tensor? initial_state, Tensor(a!)? state_pool, Tensor? read_index, Tensor? write_index, "
        "Tensor(b!)? write_pool, Tensor? has_initial_state, Tensor? accepted, Tensor? cu_seqlens, "
        "Tensor? cu_seqlens_cpu, Tensor? ckpt_cu, Tensor? ckpt_tokens, Tensor? ckpt_slots, "
        "Tensor(c!)? ckpt_states, Tensor(d!)? out, str options='') -> (Tensor out, Tensor "
        "final_state)");
  m.def("conv_backward(Tensor? d_out, Tensor? d_final_state, " DELTIC_INPUTS
        "Tensor? initial_state, " DELTIC_SEQUENCES
        ", int want=15) -> (Tensor dx, Tensor dweight, Tensor dbias, Tensor d_initial_state)");
}

DELTIC_TORCH_KERNELS(DELTIC_TORCH_NAMESPACE, CPU, m) { register_kernels(m); }
DELTIC_TORCH_KERNELS(DELTIC_TORCH_NAMESPACE, CUDA, m) { register_kernels(m); }

}  // namespace
}  // namespace deltic::bridge
