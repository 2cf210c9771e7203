// Checks of steps: each part as a call of its own, with the rows in between for the caller's, and
// the parts beside one another.
#include "core/check.h"
#include "core/checker.h"
#include "core/step.h"

namespace deltic {
namespace {

// Rows that will lie in the workspace. The sizes are those of a tensor that is checked before.
deltic_tensor between(const deltic_tensor& x, std::initializer_list<int64_t> shape,
                      int64_t token_stride) {
  deltic_tensor t{};
  t.data = in_workspace;
  t.dtype = x.dtype, t.device_type = x.device_type, t.device_index = x.device_index;
  t.rank = static_cast<int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), t.shape);
  uint64_t stride = 1;
  for (int32_t i = t.rank - 1; i >= 2; --i) {
    t.strides[i] = static_cast<int64_t>(stride);
    stride *= static_cast<uint64_t>(t.shape[i]);
  }
  t.strides[1] = token_stride;
  t.strides[0] =
      static_cast<int64_t>(static_cast<uint64_t>(token_stride) * static_cast<uint64_t>(t.shape[1]));
  return t;
}

bool is_same(const deltic_tensor& a, const deltic_tensor& b) {
  return a.data == b.data && a.dtype == b.dtype && a.device_type == b.device_type &&
         a.device_index == b.device_index && a.rank == b.rank &&
         std::equal(a.shape, a.shape + std::clamp(a.rank, 0, DELTIC_MAX_RANK), b.shape) &&
         std::equal(a.strides, a.strides + std::clamp(a.rank, 0, DELTIC_MAX_RANK), b.strides);
}

class StepChecker {
 public:
  StepChecker(const deltic_options& options, const deltic_step_tensors& t,
              const CheckContext& context, StepProblem& parts, Problem& whole)
      : options_(options),
        t_(t),
        context_(context),
        parts_(parts),
        c_(DELTIC_STEP, context, whole) {
    context_.step = &memory_;
  }

  void check() {
    c_.options(options_);
    check_options();
    check_conv();
    check_decode();
    parts_.has_norm = t_.norm != nullptr;
    if (parts_.has_norm) check_norm();
    check_memory();
    for (Rows* rows : {&parts_.conv.out, &parts_.decode.q, &parts_.decode.k, &parts_.decode.v,
                       &parts_.decode.o, &parts_.norm.x}) {
      if (rows->data == in_workspace) rows->data = nullptr;
    }
  }

 private:
  static constexpr const char* kBetween = "in a step, which has these rows in its workspace";

  // What every part has of them.
  deltic_options shared() const {
    deltic_options o{};
    o.size = sizeof o;
    o.num_threads = options_.num_threads, o.checked = options_.checked;
    return o;
  }
  void set_null_slot(deltic_options& o, bool has_lists) const {
    if (!has_lists) return;
    o.has_null_slot = options_.has_null_slot, o.null_slot = options_.null_slot;
  }
  bool has_lists(const deltic_conv_tensors& t) const {
    return t.read_index.rank != 0 || t.write_index.rank != 0;
  }
  bool has_lists(const deltic_tensors& t) const {
    return t.read_index.rank != 0 || t.write_index.rank != 0 || t.ckpt_slots.rank != 0;
  }

  void check_options() {
    const bool has_z = t_.norm != nullptr && t_.norm->z.rank != 0;
    if (t_.norm == nullptr && options_.has_eps) {
      c_.bad("eps", "expected none without a norm, got ", options_.eps);
    }
    if (!has_z && options_.norm_activation != DELTIC_ACTIVATION_NONE) {
      c_.bad("norm_activation", "expected none without norm.z, got ", options_.norm_activation);
    }
    if (options_.has_null_slot && options_.null_slot >= 0 && !has_lists(*t_.conv) &&
        !has_lists(*t_.decode)) {
      c_.bad("null_slot", "expected none without a list of slots, got ", options_.null_slot);
    }
  }

  void check_conv() {
    conv_ = *t_.conv;
    c_.absent(conv_.out, "conv.out", kBetween);
    for (const auto& [list, name] : {Checker::Named{&conv_.ckpt_cu, "conv.ckpt_cu"},
                                     Checker::Named{&conv_.ckpt_tokens, "conv.ckpt_tokens"},
                                     Checker::Named{&conv_.ckpt_slots, "conv.ckpt_slots"},
                                     Checker::Named{&conv_.ckpt_states, "conv.ckpt_states"}}) {
      c_.absent(*list, name, "in a step");
    }
    const deltic_tensor& x = conv_.x;
    conv_.out = between(x, {x.shape[0], x.shape[1], x.shape[2]}, x.shape[2]);
    deltic_options o = shared();
    o.activation = options_.activation;
    set_null_slot(o, has_lists(conv_));
    parts_.conv = check_call(DELTIC_CONV, o, conv_, context_);
  }

  struct Widths {
    int64_t H, HV, K, V;
  };
  // K, V and HV of the states, and H of the channels that they leave.
  Widths widths() const {
    const deltic_tensors& t = *t_.decode;
    const Checker::Named all[] = {{&t.state_pool, "decode.state_pool"},
                                  {&t.initial_state, "decode.initial_state"},
                                  {&t.final_state, "decode.final_state"}};
    const auto* states = std::find_if(std::begin(all), std::end(all),
                                      [](const Checker::Named& s) { return s.tensor->rank != 0; });
    if (states == std::end(all)) {
      c_.bad("decode.state_pool",
             "expected a tensor, or an initial or a final state, whose widths say where q, k and v "
             "are in conv.x, got none");
    }
    const deltic_tensor& s = *states->tensor;
    const bool v_first = options_.state_layout == DELTIC_STATE_VK;
    if (s.rank != 4) {
      c_.bad(states->name, "expected shape ", v_first ? "[slots,HV,V,K]" : "[slots,HV,K,V]",
             ", got ",
             s.rank < 0 || s.rank > DELTIC_MAX_RANK ? cat("rank ", s.rank) : shape_text(s));
    }
    const int64_t HV = s.shape[1], K = s.shape[v_first ? 3 : 2], V = s.shape[v_first ? 2 : 3];
    const int64_t D = parts_.conv.K;
    int64_t values = 0, keys = 0;
    const bool are_sizes = HV > 0 && K > 0 && V > 0 && !__builtin_mul_overflow(HV, V, &values) &&
                           !__builtin_mul_overflow(K, int64_t{2}, &keys) && values < D;
    const int64_t H = are_sizes && (D - values) % keys == 0 ? (D - values) / keys : 0;
    if (H == 0 || HV % H != 0) {
      c_.bad("conv.x", "expected D = 2*H*K + HV*V channels, H a divisor of HV, with HV = ", HV,
             ", K = ", K, " and V = ", V, " of ", states->name, ", got D = ", D);
    }
    return {H, HV, K, V};
  }

  // Lengths are conv's, whether another part has them too or not.
  template <class Tensors>
  void share_lengths(Tensors& t, const char* cu, const char* cu_host) const {
    for (const auto& [own, ours, name] :
         {Shared{&t.cu_seqlens, &conv_.cu_seqlens, cu},
          Shared{&t.cu_seqlens_host, &conv_.cu_seqlens_host, cu_host}}) {
      if (own->rank != 0 && !is_same(*own, *ours)) {
        c_.bad(name, "expected none, or the tensor that conv has, got another");
      }
      *own = *ours;
    }
  }
  struct Shared {
    deltic_tensor* own;
    const deltic_tensor* ours;
    const char* name;
  };

  void check_decode() {
    decode_ = *t_.decode;
    c_.absent(decode_.q, "decode.q", kBetween), c_.absent(decode_.k, "decode.k", kBetween);
    c_.absent(decode_.v, "decode.v", kBetween);
    if (t_.norm != nullptr)
      c_.absent(decode_.o, "decode.o", "with a norm, whose out is the result");
    if (decode_.saved.bytes != 0) {
      c_.bad("decode.saved", "expected none, got ", decode_.saved.bytes, " bytes");
    }
    // With more taps a branch would see the inputs of its neighbour, which stand before its own.
    if (decode_.parents.rank != 0 && parts_.conv.taps > 1) {
      c_.bad("decode.parents", "expected none with W = ", parts_.conv.taps,
             " taps, whose windows are chains, got a tensor");
    }
    share_lengths(decode_, "decode.cu_seqlens", "decode.cu_seqlens_host");
    const Widths w = widths();
    const int64_t B = parts_.conv.B, T = parts_.conv.T, D = parts_.conv.K;
    decode_.q = decode_.k = between(conv_.x, {B, T, w.H, w.K}, D);
    decode_.v = between(conv_.x, {B, T, w.HV, w.V}, D);
    if (t_.norm != nullptr) decode_.o = between(conv_.x, {B, T, w.HV, w.V}, w.HV * w.V);
    deltic_options o = options_;
    o.activation = o.norm_activation = DELTIC_ACTIVATION_NONE;
    o.has_eps = 0, o.has_null_slot = 0;
    set_null_slot(o, has_lists(decode_));
    parts_.decode = check_call(DELTIC_DECODE, o, decode_, context_);
  }

  void check_norm() {
    norm_ = *t_.norm;
    const Problem& d = parts_.decode;
    c_.absent(norm_.x, "norm.x", kBetween);
    share_lengths(norm_, "norm.cu_seqlens", "norm.cu_seqlens_host");
    norm_.x = between(conv_.x, {d.B, d.T, d.HV, d.V}, d.HV * d.V);
    deltic_options o = shared();
    o.activation = options_.norm_activation;
    o.has_eps = options_.has_eps, o.eps = options_.eps;
    parts_.norm = check_call(DELTIC_RMSNORM, o, norm_, context_);
  }

  // What one part writes is no other part's. Within a part its own checks have looked.
  void check_memory() const {
    for (const StepMemory::Entry& out : memory_) {
      for (const StepMemory::Entry& other : memory_) {
        if (!out.is_output || out.prefix == other.prefix || !out.range.meets(other.range)) continue;
        if (!Checker::overlap(*out.tensor, *other.tensor)) continue;
        c_.bad(cat(out.prefix, out.name).c_str(),
               "expected memory of its own, got an overlap with ", other.prefix, other.name);
      }
    }
  }

  const deltic_options& options_;
  const deltic_step_tensors& t_;
  CheckContext context_;
  StepProblem& parts_;
  Checker c_;
  StepMemory memory_;
  deltic_conv_tensors conv_;
  deltic_tensors decode_;
  deltic_block_tensors norm_;
};

}  // namespace

Problem check_call(deltic_op, const deltic_options& options, const deltic_step_tensors& t,
                   const CheckContext& context, StepProblem& parts) {
  Problem p;
  StepChecker(options, t, context, parts, p).check();
  const Problem& d = parts.decode;
  p.step = &parts;
  p.device = d.device, p.device_index = d.device_index;
  p.B = d.B, p.T = d.T, p.N = d.N, p.H = d.H, p.HV = d.HV, p.K = d.K, p.V = d.V;
  p.packed = d.packed, p.cu = d.cu;
  for_each_part(p, [&](const Problem& part) { p.has_fp64 = p.has_fp64 || part.has_fp64; });
  return p;
}

}  // namespace deltic
