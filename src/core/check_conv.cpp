// Checks of the convolution's calls and of its gradient's.
#include "core/check.h"
#include "core/checker.h"

namespace deltic {
namespace {

// Weights and states come with any strides.
bool given_any_strides(Checker& c, const deltic_tensor& t, const char* name, bool is_output) {
  if (t.rank == 0) return false;
  c.sound(t, name, is_output, false, true);
  c.float_dtype(t, name);
  return true;
}

// x, weight, bias and the sequences: what the call and its gradient have in common.
void check_inputs(Checker& c, const deltic_conv_tensors& t) {
  Problem& p = c.p_;
  c.required(t.x, "x");
  c.float_dtype(t.x, "x");
  if (t.x.rank != 3) c.bad("x", "expected shape [B,T,D], got ", shape_text(t.x));
  p.B = t.x.shape[0], p.T = t.x.shape[1], p.H = p.HV = 1, p.K = t.x.shape[2];
  if (p.K < 1) c.bad("x", "expected at least one channel, got shape ", shape_text(t.x));
  if (!given_any_strides(c, t.weight, "weight", false))
    c.bad("weight", "expected a tensor, got none");
  if (t.weight.rank != 2) c.bad("weight", "expected shape [D,W], got ", shape_text(t.weight));
  p.taps = t.weight.shape[1];
  if (p.taps < 1 || p.taps > 8) c.bad("weight", "expected 1 to 8 taps W, got ", p.taps);
  c.shape(t.weight, "weight", {p.K, p.taps});
  if (given_any_strides(c, t.bias, "bias", false)) c.shape(t.bias, "bias", {p.K});
  c.sequences(t.cu_seqlens, t.cu_seqlens_host);
  p.x = Checker::rows(t.x);
  p.weight = Checker::param_view(t.weight), p.bias = Checker::param_view(t.bias);
}

// A state [slots,D,S]; `slots` below 0: as many as it has. The first one says what S is.
States check_state(Checker& c, const deltic_tensor& t, const char* name, int64_t slots,
                   bool is_output) {
  Problem& p = c.p_;
  if (!given_any_strides(c, t, name, is_output)) return {};
  if (t.rank != 3) {
    c.bad(name, "expected shape [", slots < 0 ? "slots" : "N", ",D,S], got ", shape_text(t));
  }
  if (p.V == 0) p.V = t.shape[2];
  if (t.shape[2] < std::max<int64_t>(p.taps - 1, 1)) {
    c.bad(name, "expected at least W - 1 = ", p.taps - 1, " inputs S per channel (and 1), got ",
          t.shape[2]);
  }
  if (slots < 0) slots = t.shape[0];
  c.shape(t, name, {slots, p.K, p.V});
  return {
      t.data,        static_cast<DType>(t.dtype), true, slots, c.stride(t, 0), 0, c.stride(t, 1),
      c.stride(t, 2)};
}

// A state of the call itself has x's dtype or fp32.
void check_state_dtype(const Checker& c, const deltic_tensor& t, const char* name,
                       const deltic_tensor& x) {
  if (t.rank == 0 || t.dtype == x.dtype || t.dtype == DELTIC_F32) return;
  const char* own = name_of(static_cast<DType>(x.dtype));
  c.bad(name, "expected ", own, " as x, or fp32, got ", name_of(static_cast<DType>(t.dtype)));
}

void check_pool(Checker& c, const deltic_conv_tensors& t) {
  Problem& p = c.p_;
  c.slots(t);
  if (!p.is_pool) return;
  p.state_in = p.state_out = check_state(c, t.state_pool, "state_pool", -1, !p.has_write_pool);
  check_state_dtype(c, t.state_pool, "state_pool", t.x);
  if (p.has_write_pool) {
    p.state_out = check_state(c, t.write_pool, "write_pool", -1, true);
    check_state_dtype(c, t.write_pool, "write_pool", t.x);
  }
  c.slots_without_lists(p.state_in, "state_pool");
  c.slots_without_lists(p.state_out, "write_pool");
}

void check_inputs_alone(const Checker& c, const deltic_conv_tensors& t) {
  c.input(t.x, "x"), c.input(t.weight, "weight"), c.input(t.bias, "bias");
  c.input(t.cu_seqlens, "cu_seqlens"), c.input(t.cu_seqlens_host, "cu_seqlens_host");
  c.input(t.read_index, "read_index"), c.input(t.write_index, "write_index");
  c.input(t.has_initial_state, "has_initial_state"), c.input(t.accepted, "accepted");
  c.input(t.ckpt_cu, "ckpt_cu"), c.input(t.ckpt_tokens, "ckpt_tokens");
  c.input(t.ckpt_slots, "ckpt_slots");
}

}  // namespace

Problem check_call(deltic_op op, const deltic_options& options, const deltic_conv_tensors& t,
                   const CheckContext& context) {
  Problem p;
  Checker c(op, context, p);
  c.options(options);
  check_inputs(c, t);
  check_pool(c, t);
  if (!p.is_pool) {
    p.state_in = check_state(c, t.initial_state, "initial_state", p.N, false);
    p.state_out = check_state(c, t.final_state, "final_state", p.N, true);
    check_state_dtype(c, t.initial_state, "initial_state", t.x);
    check_state_dtype(c, t.final_state, "final_state", t.x);
  }
  p.ckpt_cu = c.indices(t.ckpt_cu, "ckpt_cu");
  p.ckpt_tokens = c.indices(t.ckpt_tokens, "ckpt_tokens");
  p.ckpt_slots = c.indices(t.ckpt_slots, "ckpt_slots");
  p.ckpt = check_state(c, t.ckpt_states, "ckpt_states", -1, true);
  check_state_dtype(c, t.ckpt_states, "ckpt_states", t.x);
  c.checkpoint_lists(t);
  c.null_slot(p.read_index || p.write_index || p.ckpt_slots);
  if (p.ckpt && p.accepted) {
    c.bad("ckpt_states", "expected none with accepted counts, got a tensor");
  }
  c.sizes_together();
  c.required(t.out, "out", true);
  c.same_dtype(t.out, "out", t.x, "x");
  c.shape(t.out, "out", {p.B, p.T, p.K});
  p.out = Checker::rows(t.out);

  const bool in_place =
      !p.is_pool && p.state_in && p.state_out && p.state_in.data == p.state_out.data &&
      t.initial_state.dtype == t.final_state.dtype &&
      std::equal(t.initial_state.strides, t.initial_state.strides + 3, t.final_state.strides);
  c.output(t.out, "out");
  c.output(t.final_state, "final_state");
  if (!p.has_write_pool) c.output(t.state_pool, "state_pool");
  c.output(t.write_pool, "write_pool");
  if (!p.is_ckpt_in_pool) c.output(t.ckpt_states, "ckpt_states");
  if (p.has_write_pool) c.input(t.state_pool, "state_pool");
  check_inputs_alone(c, t);
  c.input(t.initial_state, "initial_state", in_place ? "final_state" : nullptr);
  return p;
}

Problem check_call(deltic_op op, const deltic_options& options,
                   const deltic_conv_backward_tensors& b, const CheckContext& context) {
  Problem p;
  Checker c(op, context, p);
  p.is_gradient = true;
  const deltic_conv_tensors& t = *b.forward;
  c.options(options);
  check_inputs(c, t);
  c.absent(t.out, "out", "in a gradient's call");
  c.absent(t.final_state, "final_state", "in a gradient's call");
  c.absent(t.state_pool, "state_pool", "in a gradient's call: pools are not differentiable");
  c.absent(t.has_initial_state, "has_initial_state", "in a gradient's call");
  c.absent(t.ckpt_states, "ckpt_states",
           "in a gradient's call: checkpoints are not differentiable");
  check_pool(c, t);
  c.null_slot(false);
  p.state_in = check_state(c, t.initial_state, "initial_state", p.N, false);
  check_state_dtype(c, t.initial_state, "initial_state", t.x);
  if (c.given(b.d_out, "d_out")) {
    c.same_dtype(b.d_out, "d_out", t.x, "x");
    c.shape(b.d_out, "d_out", {p.B, p.T, p.K});
  }
  p.d_final = check_state(c, b.d_final_state, "d_final_state", p.N, false);
  c.sizes_together();

  if (c.gradient(b.dx, "dx", t.x, "x")) c.same_dtype(b.dx, "dx", t.x, "x");
  const auto parameter = [&](const deltic_tensor& d, const char* name, const deltic_tensor& of,
                             const char* of_name) {
    if (!given_any_strides(c, d, name, true)) return;
    c.same_shape(d, name, of, of_name);
  };
  parameter(b.dweight, "dweight", t.weight, "weight");
  parameter(b.dbias, "dbias", t.bias, "bias");
  parameter(b.d_initial_state, "d_initial_state", t.initial_state, "initial_state");
  p.d_initial = check_state(c, b.d_initial_state, "d_initial_state", p.N, true);
  c.output(b.dx, "dx"), c.output(b.dweight, "dweight"), c.output(b.dbias, "dbias");
  c.output(b.d_initial_state, "d_initial_state");
  check_inputs_alone(c, t);
  c.input(t.initial_state, "initial_state"), c.input(b.d_out, "d_out");
  c.input(b.d_final_state, "d_final_state");
  p.d_out = Checker::rows(b.d_out), p.dx = Checker::rows(b.dx);
  p.dweight = Checker::param_view(b.dweight), p.dbias = Checker::param_view(b.dbias);
  return p;
}

}  // namespace deltic
