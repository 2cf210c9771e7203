// deltic: delta-rule linear attention from C++20. A header-only layer over deltic.h: the same
// structs with names, defaults and exceptions, so that only the C ABI crosses the library's
// boundary.
//
//   deltic::Options options{.qk_l2norm = true};
//   deltic::Tensors tensors{.q = {q, {B, T, H, K}}, .k = {k, {B, T, H, K}}, .v = {v, {B, T, HV,
//   V}},
//                           .o = {o, {B, T, HV, V}}, .g = {g, {B, T, HV}}};
//   deltic::forward(options, tensors);
//
// What may alias, which alignment is needed and what threads may do is said in deltic.h.
#ifndef DELTIC_DELTIC_HPP_
#define DELTIC_DELTIC_HPP_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "deltic/deltic.h"

namespace deltic {

enum class DType : int32_t {
  f32 = DELTIC_F32,
  bf16 = DELTIC_BF16,
  f16 = DELTIC_F16,
  f64 = DELTIC_F64,
  i32 = DELTIC_I32,
  i64 = DELTIC_I64,
  u8 = DELTIC_U8
};
enum class DeviceType : int32_t { cpu = DELTIC_CPU, cuda = DELTIC_CUDA };
enum class Op : int32_t {
  forward = DELTIC_FORWARD,
  decode = DELTIC_DECODE,
  cumsum = DELTIC_CUMSUM,
  gate = DELTIC_GATE,
  l2norm = DELTIC_L2NORM,
  kkt = DELTIC_KKT,
  scores = DELTIC_SCORES,
  inverse = DELTIC_INVERSE,
  wy = DELTIC_WY,
  backward = DELTIC_BACKWARD,
  conv = DELTIC_CONV,
  scores_inverse = DELTIC_SCORES_INVERSE,
  rmsnorm = DELTIC_RMSNORM,
  move = DELTIC_MOVE,
  commit = DELTIC_COMMIT,
  step = DELTIC_STEP
};
enum class GateForm : int32_t {
  log_decay = DELTIC_GATE_LOG_DECAY,
  softplus = DELTIC_GATE_SOFTPLUS,
  bounded = DELTIC_GATE_BOUNDED
};
enum class BetaForm : int32_t {
  value = DELTIC_BETA_VALUE,
  sigmoid = DELTIC_BETA_SIGMOID,
  two_sigmoid = DELTIC_BETA_2SIGMOID
};
enum class StateLayout : int32_t { kv = DELTIC_STATE_KV, vk = DELTIC_STATE_VK };
enum class Split : int32_t {
  automatic = DELTIC_SPLIT_AUTO,
  off = DELTIC_SPLIT_OFF,
  by_length = DELTIC_SPLIT_BY_LENGTH,
  segments = DELTIC_SPLIT_SEGMENTS
};
// What forward keeps for backward. All give the same gradients to the bit.
enum class Save : int32_t {
  none = DELTIC_SAVE_NONE,
  states = DELTIC_SAVE_STATES,
  all = DELTIC_SAVE_ALL
};
// How forward goes over the tokens; recurrent: from Tensors::recurrent_from on, or all.
enum class Form : int32_t { chunked = DELTIC_FORM_CHUNKED, recurrent = DELTIC_FORM_RECURRENT };
// What conv applies to its sums, and rmsnorm to z.
enum class Activation : int32_t {
  none = DELTIC_ACTIVATION_NONE,
  silu = DELTIC_ACTIVATION_SILU,
  sigmoid = DELTIC_ACTIVATION_SIGMOID
};
enum class ErrorKind : int32_t {
  invalid_argument = DELTIC_INVALID_ARGUMENT,
  unsupported = DELTIC_UNSUPPORTED,
  out_of_memory = DELTIC_OUT_OF_MEMORY,
  runtime = DELTIC_RUNTIME_ERROR,
  abi_mismatch = DELTIC_ABI_MISMATCH
};

// What every function of this header throws, besides std::bad_alloc for memory of its own.
class Error : public std::runtime_error {
 public:
  Error(ErrorKind kind, const std::string& message) : std::runtime_error(message), kind_(kind) {}
  ErrorKind kind() const noexcept { return kind_; }

 private:
  ErrorKind kind_;
};

namespace detail {
inline void check(deltic_status status) {
  if (status != DELTIC_OK) throw Error(static_cast<ErrorKind>(status), deltic_last_error());
}

template <class E>
constexpr DType dtype_of() {
  using T = std::remove_cv_t<E>;
  if constexpr (std::is_same_v<T, float>) {
    return DType::f32;
  } else if constexpr (std::is_same_v<T, double>) {
    return DType::f64;
  } else if constexpr (std::is_integral_v<T> && std::is_signed_v<T> && sizeof(T) == 4) {
    return DType::i32;
  } else {
    static_assert(std::is_integral_v<T> && std::is_signed_v<T> && sizeof(T) == 8,
                  "name the dtype: TensorView(pointer, DType::bf16, {shape})");
    return DType::i64;
  }
}
}  // namespace detail

// A tensor that somebody else owns. Default-constructed: absent.
struct TensorView : deltic_tensor {
  TensorView() : deltic_tensor{} {}
  TensorView(const deltic_tensor& t) : deltic_tensor(t) {}

  // Contiguous, row-major.
  TensorView(const void* pointer, DType type, std::span<const int64_t> sizes) : deltic_tensor{} {
    if (sizes.size() > DELTIC_MAX_RANK) {
      throw Error(ErrorKind::invalid_argument,
                  "TensorView: rank: expected at most 6, got " + std::to_string(sizes.size()));
    }
    data = const_cast<void*>(pointer);
    dtype = static_cast<int32_t>(type);
    rank = static_cast<int32_t>(sizes.size());
    int64_t stride = 1;
    for (int32_t i = rank - 1; i >= 0; --i) {
      shape[i] = sizes[static_cast<size_t>(i)];
      strides[i] = stride;
      stride *= shape[i];
    }
  }
  TensorView(const void* pointer, DType type, std::initializer_list<int64_t> sizes)
      : TensorView(pointer, type, std::span<const int64_t>(sizes.begin(), sizes.size())) {}
  // Contiguous, dtype from the pointer: float, double, int32_t, int64_t.
  template <class E>
  requires(!std::is_void_v<E>) TensorView(E* pointer, std::initializer_list<int64_t> sizes)
      : TensorView(static_cast<const void*>(pointer), detail::dtype_of<E>(), sizes) {}

  // The same elements with other strides (in elements).
  TensorView with_strides(std::initializer_list<int64_t> new_strides) const {
    if (static_cast<int32_t>(new_strides.size()) != rank) {
      throw Error(ErrorKind::invalid_argument, "TensorView: strides: expected " +
                                                   std::to_string(rank) + " of them, got " +
                                                   std::to_string(new_strides.size()));
    }
    TensorView t = *this;
    int i = 0;
    for (int64_t s : new_strides) t.strides[i++] = s;
    return t;
  }
  TensorView on(DeviceType type, int32_t index = 0) const {
    TensorView t = *this;
    t.device_type = static_cast<int32_t>(type);
    t.device_index = index;
    return t;
  }
  explicit operator bool() const { return rank > 0; }
  int64_t numel() const {
    int64_t n = 1;
    for (int32_t i = 0; i < rank; ++i) n *= shape[i];
    return rank > 0 ? n : 0;
  }
};

// All options of the family; see deltic_options.
struct Options {
  GateForm gate_form = GateForm::log_decay;
  BetaForm beta_form = BetaForm::value;
  StateLayout state_layout = StateLayout::kv;
  Split split = Split::automatic;
  int64_t segment_length = 0;
  int32_t chunk = 64;
  bool qk_l2norm = false;
  bool reverse = false;
  std::optional<float> scale{};
  std::optional<float> lower_bound{};
  int32_t num_threads = 0;
  std::optional<bool> checked{};
  Save save = Save::none;                         // forward only
  std::string impl{};                             // empty: best first
  Activation activation = Activation::none;       // conv and rmsnorm; step: of its conv
  std::optional<int32_t> null_slot{};             // slots up to this one are none
  std::optional<float> eps{};                     // rmsnorm and step
  Form form = Form::chunked;                      // forward
  std::optional<uint64_t> seed{};                 // decode: 16-bit states are rounded by chance
  Activation norm_activation = Activation::none;  // step: of its norm

  // Valid while this object lives (impl).
  deltic_options c() const {
    deltic_options o{};
    o.size = sizeof(o);
    o.gate_form = static_cast<int32_t>(gate_form);
    o.beta_form = static_cast<int32_t>(beta_form);
    o.state_layout = static_cast<int32_t>(state_layout);
    o.split = static_cast<int32_t>(split);
    o.segment_length = segment_length;
    o.chunk = chunk;
    o.qk_l2norm = qk_l2norm ? 1 : 0;
    o.reverse = reverse ? 1 : 0;
    o.has_scale = scale.has_value() ? 1 : 0;
    o.scale = scale.value_or(0.0f);
    o.has_lower_bound = lower_bound.has_value() ? 1 : 0;
    o.lower_bound = lower_bound.value_or(0.0f);
    o.num_threads = num_threads;
    o.checked = checked.has_value() ? (*checked ? 1 : 2) : 0;
    o.save = static_cast<int32_t>(save);
    o.impl = impl.empty() ? nullptr : impl.c_str();
    o.activation = static_cast<int32_t>(activation);
    o.has_null_slot = null_slot.has_value() ? 1 : 0;
    o.null_slot = null_slot.value_or(0);
    o.has_eps = eps.has_value() ? 1 : 0;
    o.eps = eps.value_or(0.0f);
    o.form = static_cast<int32_t>(form);
    o.has_seed = seed.has_value() ? 1 : 0;
    o.seed = seed.value_or(0);
    o.norm_activation = static_cast<int32_t>(norm_activation);
    return o;
  }
};

// Tensors of forward and decode; see deltic_tensors.
struct Tensors {
  TensorView q{}, k{}, v{}, o{}, beta{}, g{}, gv{}, A_log{}, dt_bias{}, cu_seqlens{},
      cu_seqlens_host{}, initial_state{}, final_state{}, state_pool{}, read_index{}, write_index{},
      ckpt_cu{}, ckpt_tokens{}, ckpt_slots{}, ckpt_states{};
  deltic_buffer saved{};  // with Options::save; Workspace::c() gives one
  TensorView write_pool{}, has_initial_state{}, accepted{}, parents{}, recurrent_from{}, record{},
      positions{};

  deltic_tensors c() const {
    return {sizeof(deltic_tensors),
            q,
            k,
            v,
            o,
            beta,
            g,
            gv,
            A_log,
            dt_bias,
            cu_seqlens,
            cu_seqlens_host,
            initial_state,
            final_state,
            state_pool,
            read_index,
            write_index,
            ckpt_cu,
            ckpt_tokens,
            ckpt_slots,
            ckpt_states,
            saved,
            write_pool,
            has_initial_state,
            accepted,
            parents,
            recurrent_from,
            record,
            positions};
  }
};

// Tensors of backward; see deltic_backward_tensors.
struct BackwardTensors {
  Tensors forward{};  // the inputs of the forward call and what it saved; no outputs
  TensorView d_o{}, d_final_state{}, dq{}, dk{}, dv{}, dbeta{}, dg{}, dgv{}, dA_log{}, ddt_bias{},
      d_initial_state{};

  // Points to `forward_c`, which receives the C form of the forward call's tensors.
  deltic_backward_tensors c(deltic_tensors& forward_c) const {
    forward_c = forward.c();
    return {sizeof(deltic_backward_tensors),
            &forward_c,
            d_o,
            d_final_state,
            dq,
            dk,
            dv,
            dbeta,
            dg,
            dgv,
            dA_log,
            ddt_bias,
            d_initial_state};
  }
};

// Tensors of the building blocks; see deltic_block_tensors.
struct BlockTensors {
  TensorView q{}, k{}, v{}, x{}, g{}, beta{}, A_log{}, dt_bias{}, a{}, cu_seqlens{},
      cu_seqlens_host{}, out{}, w{}, u{}, kg{}, qg{}, rstd{}, z{}, weight{};

  deltic_block_tensors c() const {
    return {sizeof(deltic_block_tensors),
            q,
            k,
            v,
            x,
            g,
            beta,
            A_log,
            dt_bias,
            a,
            cu_seqlens,
            cu_seqlens_host,
            out,
            w,
            u,
            kg,
            qg,
            rstd,
            z,
            weight};
  }
};

// Tensors of a building block's gradient; see deltic_block_backward_tensors.
struct BlockBackwardTensors {
  BlockTensors forward{};  // the inputs; no outputs, but `out` of inverse
  TensorView d_out{}, d_w{}, d_u{}, d_kg{}, d_qg{}, dq{}, dk{}, dv{}, dx{}, dg{}, dbeta{}, da{},
      dA_log{}, ddt_bias{}, dz{}, dweight{};

  // Points to `forward_c`, which receives the C form of the forward call's tensors.
  deltic_block_backward_tensors c(deltic_block_tensors& forward_c) const {
    forward_c = forward.c();
    return {sizeof(deltic_block_backward_tensors),
            &forward_c,
            d_out,
            d_w,
            d_u,
            d_kg,
            d_qg,
            dq,
            dk,
            dv,
            dx,
            dg,
            dbeta,
            da,
            dA_log,
            ddt_bias,
            dz,
            dweight};
  }
};

// Tensors of the causal depthwise convolution; see deltic_conv_tensors.
struct ConvTensors {
  TensorView x{}, weight{}, bias{}, cu_seqlens{}, cu_seqlens_host{}, initial_state{}, final_state{},
      state_pool{}, read_index{}, write_index{}, out{}, write_pool{}, has_initial_state{},
      accepted{}, ckpt_cu{}, ckpt_tokens{}, ckpt_slots{}, ckpt_states{};

  deltic_conv_tensors c() const {
    return {sizeof(deltic_conv_tensors),
            x,
            weight,
            bias,
            cu_seqlens,
            cu_seqlens_host,
            initial_state,
            final_state,
            state_pool,
            read_index,
            write_index,
            out,
            write_pool,
            has_initial_state,
            accepted,
            ckpt_cu,
            ckpt_tokens,
            ckpt_slots,
            ckpt_states};
  }
};

// Tensors of its gradient; see deltic_conv_backward_tensors.
struct ConvBackwardTensors {
  ConvTensors forward{};  // the inputs; no outputs
  TensorView d_out{}, d_final_state{}, dx{}, dweight{}, dbias{}, d_initial_state{};

  // Points to `forward_c`, which receives the C form of the forward call's tensors.
  deltic_conv_backward_tensors c(deltic_conv_tensors& forward_c) const {
    forward_c = forward.c();
    return {sizeof(deltic_conv_backward_tensors),
            &forward_c,
            d_out,
            d_final_state,
            dx,
            dweight,
            dbias,
            d_initial_state};
  }
};

// Tensors of a move of states between slots; see deltic_move_tensors.
struct MoveTensors {
  TensorView state_pool{}, write_pool{}, read_index{}, write_index{};
  int64_t read_head = 0, write_head = 0, num_heads = 0;  // 0 heads: all from read_head on
  bool transpose = false;

  deltic_move_tensors c() const {
    return {sizeof(deltic_move_tensors),
            state_pool,
            write_pool,
            read_index,
            write_index,
            read_head,
            write_head,
            num_heads,
            transpose ? 1 : 0,
            0};
  }
};

// Tensors of a commit of drafted tokens; see deltic_commit_tensors.
struct CommitTensors {
  TensorView state_pool{}, record{}, accepted{}, read_index{}, write_index{}, has_initial_state{},
      parents{};

  deltic_commit_tensors c() const {
    return {sizeof(deltic_commit_tensors),
            state_pool,
            record,
            accepted,
            read_index,
            write_index,
            has_initial_state,
            parents};
  }
};

// Tensors of a step, by the names that its parts have them under; see deltic_step_tensors.
struct StepTensors {
  ConvTensors conv{};   // no out
  Tensors decode{};     // no q, k and v; with a norm no o
  BlockTensors norm{};  // no x; without out there is no norm

  // Points to `parts_c`, which receives the C form of the parts.
  struct Parts {
    deltic_conv_tensors conv;
    deltic_tensors decode;
    deltic_block_tensors norm;
  };
  deltic_step_tensors c(Parts& parts_c) const {
    parts_c = {conv.c(), decode.c(), norm.c()};
    const bool has_norm = norm.out || norm.z || norm.weight;
    return {sizeof(deltic_step_tensors), &parts_c.conv, &parts_c.decode,
            has_norm ? &parts_c.norm : nullptr};
  }
};

// Scratch memory for run functions: 64-byte aligned, grows on demand, reusable from call to call.
class Workspace {
 public:
  Workspace() = default;
  explicit Workspace(size_t bytes) { reserve(bytes); }
  void reserve(size_t bytes) {
    if (bytes <= bytes_) return;
    data_.reset(static_cast<std::byte*>(::operator new (bytes, std::align_val_t{64})));
    bytes_ = bytes;
  }
  std::byte* data() const { return data_.get(); }
  size_t bytes() const { return bytes_; }
  deltic_workspace c() const { return {data_.get(), bytes_}; }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete (p, std::align_val_t{64}); }
  };
  std::unique_ptr<std::byte, Free> data_{};
  size_t bytes_ = 0;
};

namespace detail {
// A C function on the C forms of options and tensors, with its operation where it takes one.
template <class T, class F>
void with_c(const Options& options, const T& tensors, const F& function) {
  const deltic_options o = options.c();
  if constexpr (requires { tensors.forward; }) {
    decltype(tensors.forward.c()) forward;
    const auto t = tensors.c(forward);
    check(function(&o, &t));
  } else if constexpr (requires { typename T::Parts; }) {
    typename T::Parts parts;
    const auto t = tensors.c(parts);
    check(function(&o, &t));
  } else {
    const auto t = tensors.c();
    check(function(&o, &t));
  }
}
template <class F, class T, class... Rest>
void call(F function, const Options& options, const T& tensors, Rest... rest) {
  with_c(options, tensors, [&](const auto* o, const auto* t) { return function(o, t, rest...); });
}
template <class F, class T, class... Rest>
void call(F function, Op op, const Options& options, const T& tensors, Rest... rest) {
  with_c(options, tensors, [&](const auto* o, const auto* t) {
    return function(static_cast<deltic_op>(op), o, t, rest...);
  });
}
// A query: it ends with a pointer for the answer.
template <class F, class... Call>
size_t bytes(F function, const Call&... of_call) {
  uint64_t found = 0;
  call(function, of_call..., &found);
  return static_cast<size_t>(found);
}
}  // namespace detail

// `stream` is the one that the call will have, for CUDA tensors.
inline size_t forward_workspace_bytes(const Options& options, const Tensors& tensors,
                                      void* stream = nullptr) {
  return detail::bytes(deltic_forward_workspace, options, tensors, stream);
}
// Bytes of Tensors::saved for Options::save.
inline size_t forward_saved_bytes(const Options& options, const Tensors& tensors) {
  return detail::bytes(deltic_forward_saved, options, tensors);
}
inline size_t backward_workspace_bytes(const Options& options, const BackwardTensors& tensors,
                                       void* stream = nullptr) {
  return detail::bytes(deltic_backward_workspace, options, tensors, stream);
}
inline size_t decode_workspace_bytes(const Options& options, const Tensors& tensors,
                                     void* stream = nullptr) {
  return detail::bytes(deltic_decode_workspace, options, tensors, stream);
}
inline size_t block_workspace_bytes(Op op, const Options& options, const BlockTensors& tensors,
                                    void* stream = nullptr) {
  return detail::bytes(deltic_block_workspace, op, options, tensors, stream);
}
inline size_t block_backward_workspace_bytes(Op op, const Options& options,
                                             const BlockBackwardTensors& tensors,
                                             void* stream = nullptr) {
  return detail::bytes(deltic_block_backward_workspace, op, options, tensors, stream);
}

inline size_t conv_workspace_bytes(const Options& options, const ConvTensors& tensors,
                                   void* stream = nullptr) {
  return detail::bytes(deltic_conv_workspace, options, tensors, stream);
}
inline size_t conv_backward_workspace_bytes(const Options& options,
                                            const ConvBackwardTensors& tensors,
                                            void* stream = nullptr) {
  return detail::bytes(deltic_conv_backward_workspace, options, tensors, stream);
}
inline size_t move_workspace_bytes(const Options& options, const MoveTensors& tensors,
                                   void* stream = nullptr) {
  return detail::bytes(deltic_move_workspace, options, tensors, stream);
}
inline size_t commit_workspace_bytes(const Options& options, const CommitTensors& tensors,
                                     void* stream = nullptr) {
  return detail::bytes(deltic_commit_workspace, options, tensors, stream);
}

inline size_t step_workspace_bytes(const Options& options, const StepTensors& tensors,
                                   void* stream = nullptr) {
  return detail::bytes(deltic_step_workspace, options, tensors, stream);
}

inline void forward(const Options& options, const Tensors& tensors,
                    const deltic_workspace& workspace, void* stream = nullptr) {
  detail::call(deltic_forward, options, tensors, &workspace, stream);
}
inline void backward(const Options& options, const BackwardTensors& tensors,
                     const deltic_workspace& workspace, void* stream = nullptr) {
  detail::call(deltic_backward, options, tensors, &workspace, stream);
}
inline void decode(const Options& options, const Tensors& tensors,
                   const deltic_workspace& workspace, void* stream = nullptr) {
  detail::call(deltic_decode, options, tensors, &workspace, stream);
}
inline void block(Op op, const Options& options, const BlockTensors& tensors,
                  const deltic_workspace& workspace, void* stream = nullptr) {
  detail::call(deltic_block, op, options, tensors, &workspace, stream);
}
inline void block_backward(Op op, const Options& options, const BlockBackwardTensors& tensors,
                           const deltic_workspace& workspace, void* stream = nullptr) {
  detail::call(deltic_block_backward, op, options, tensors, &workspace, stream);
}

inline void conv(const Options& options, const ConvTensors& tensors,
                 const deltic_workspace& workspace, void* stream = nullptr) {
  detail::call(deltic_conv, options, tensors, &workspace, stream);
}
inline void conv_backward(const Options& options, const ConvBackwardTensors& tensors,
                          const deltic_workspace& workspace, void* stream = nullptr) {
  detail::call(deltic_conv_backward, options, tensors, &workspace, stream);
}
inline void move(const Options& options, const MoveTensors& tensors,
                 const deltic_workspace& workspace, void* stream = nullptr) {
  detail::call(deltic_move, options, tensors, &workspace, stream);
}
inline void commit(const Options& options, const CommitTensors& tensors,
                   const deltic_workspace& workspace, void* stream = nullptr) {
  detail::call(deltic_commit, options, tensors, &workspace, stream);
}
inline void step(const Options& options, const StepTensors& tensors,
                 const deltic_workspace& workspace, void* stream = nullptr) {
  detail::call(deltic_step, options, tensors, &workspace, stream);
}

// What checked mode found in the last call on a GPU with this workspace: waits for the stream, then
// throws as the call would have on the CPU. See deltic_device_error.
inline void device_error(const deltic_workspace& workspace, void* stream = nullptr) {
  detail::check(deltic_device_error(&workspace, stream));
}

// The same with a workspace allocated for the call: for CPU tensors, where it costs little.
inline void forward(const Options& options, const Tensors& tensors) {
  const Workspace w(forward_workspace_bytes(options, tensors));
  forward(options, tensors, w.c());
}
inline void backward(const Options& options, const BackwardTensors& tensors) {
  const Workspace w(backward_workspace_bytes(options, tensors));
  backward(options, tensors, w.c());
}
inline void decode(const Options& options, const Tensors& tensors) {
  const Workspace w(decode_workspace_bytes(options, tensors));
  decode(options, tensors, w.c());
}
inline void block(Op op, const Options& options, const BlockTensors& tensors) {
  const Workspace w(block_workspace_bytes(op, options, tensors));
  block(op, options, tensors, w.c());
}
inline void block_backward(Op op, const Options& options, const BlockBackwardTensors& tensors) {
  const Workspace w(block_backward_workspace_bytes(op, options, tensors));
  block_backward(op, options, tensors, w.c());
}
inline void conv(const Options& options, const ConvTensors& tensors) {
  const Workspace w(conv_workspace_bytes(options, tensors));
  conv(options, tensors, w.c());
}
inline void conv_backward(const Options& options, const ConvBackwardTensors& tensors) {
  const Workspace w(conv_backward_workspace_bytes(options, tensors));
  conv_backward(options, tensors, w.c());
}
inline void move(const Options& options, const MoveTensors& tensors) {
  const Workspace w(move_workspace_bytes(options, tensors));
  move(options, tensors, w.c());
}
inline void commit(const Options& options, const CommitTensors& tensors) {
  const Workspace w(commit_workspace_bytes(options, tensors));
  commit(options, tensors, w.c());
}
inline void step(const Options& options, const StepTensors& tensors) {
  const Workspace w(step_workspace_bytes(options, tensors));
  step(options, tensors, w.c());
}
inline void cumsum(const Options& o, const BlockTensors& t) { block(Op::cumsum, o, t); }
inline void gate(const Options& o, const BlockTensors& t) { block(Op::gate, o, t); }
inline void l2norm(const Options& o, const BlockTensors& t) { block(Op::l2norm, o, t); }
inline void kkt(const Options& o, const BlockTensors& t) { block(Op::kkt, o, t); }
inline void scores(const Options& o, const BlockTensors& t) { block(Op::scores, o, t); }
inline void inverse(const Options& o, const BlockTensors& t) { block(Op::inverse, o, t); }
inline void wy(const Options& o, const BlockTensors& t) { block(Op::wy, o, t); }
inline void rmsnorm(const Options& o, const BlockTensors& t) { block(Op::rmsnorm, o, t); }
// Writes out and a.
inline void scores_inverse(const Options& o, const BlockTensors& t) {
  block(Op::scores_inverse, o, t);
}
inline void cumsum_backward(const Options& o, const BlockBackwardTensors& t) {
  block_backward(Op::cumsum, o, t);
}
inline void gate_backward(const Options& o, const BlockBackwardTensors& t) {
  block_backward(Op::gate, o, t);
}
inline void rmsnorm_backward(const Options& o, const BlockBackwardTensors& t) {
  block_backward(Op::rmsnorm, o, t);
}
inline void l2norm_backward(const Options& o, const BlockBackwardTensors& t) {
  block_backward(Op::l2norm, o, t);
}
inline void kkt_backward(const Options& o, const BlockBackwardTensors& t) {
  block_backward(Op::kkt, o, t);
}
inline void scores_backward(const Options& o, const BlockBackwardTensors& t) {
  block_backward(Op::scores, o, t);
}
inline void inverse_backward(const Options& o, const BlockBackwardTensors& t) {
  block_backward(Op::inverse, o, t);
}
inline void wy_backward(const Options& o, const BlockBackwardTensors& t) {
  block_backward(Op::wy, o, t);
}

// One implementation's answer to a call.
struct Choice {
  std::string name;
  bool accepts = false;
  bool chosen = false;
  std::string sentence;
};
namespace detail {
inline void collect_choice(void* user, const char* name, int32_t accepts, int32_t chosen,
                           const char* sentence) {
  static_cast<std::vector<Choice>*>(user)->push_back({name, accepts != 0, chosen != 0, sentence});
}
template <class F, class... Call>
std::vector<Choice> choices(F function, const Call&... of_call) {
  std::vector<Choice> found;
  call(function, of_call..., collect_choice, &found);
  return found;
}
}  // namespace detail
// The chosen implementation first, then the others in list order.
inline std::vector<Choice> explain(Op op, const Options& options, const Tensors& tensors) {
  return detail::choices(deltic_explain, op, options, tensors);
}
// One way to divide a call's work over a GPU; with `what` empty, why there is none.
struct Division {
  std::string impl, what;
  double predicted_us = 0;
  bool chosen = false;
  std::string reason;
};
// The chosen way first, then the others; num_sms 0: those that the stream may use on the call's
// device.
namespace detail {
template <class Function, class Any>
std::vector<Division> divisions(Function function, const Options& options, const Any& tensors,
                                int32_t num_sms, void* stream) {
  std::vector<Division> found;
  const deltic_division_fn collect = [](void* user, const char* impl, const char* what, double us,
                                        int32_t chosen, const char* reason) {
    static_cast<std::vector<Division>*>(user)->push_back({impl, what, us, chosen != 0, reason});
  };
  call(function, options, tensors, num_sms, stream, collect, &found);
  return found;
}
}  // namespace detail
inline std::vector<Division> explain_division(const Options& options, const Tensors& tensors,
                                              int32_t num_sms = 0, void* stream = nullptr) {
  return detail::divisions(deltic_explain_division, options, tensors, num_sms, stream);
}
// Of the chains of a backward's states.
inline std::vector<Division> explain_division(const Options& options,
                                              const BackwardTensors& tensors, int32_t num_sms = 0,
                                              void* stream = nullptr) {
  return detail::divisions(deltic_backward_explain_division, options, tensors, num_sms, stream);
}
inline std::vector<Choice> explain(Op op, const Options& options, const BlockTensors& tensors) {
  return detail::choices(deltic_block_explain, op, options, tensors);
}
inline std::vector<Choice> explain(Op op, const Options& options,
                                   const BlockBackwardTensors& tensors) {
  return detail::choices(deltic_block_backward_explain, op, options, tensors);
}

inline std::vector<Choice> explain(const Options& options, const BackwardTensors& tensors) {
  return detail::choices(deltic_backward_explain, options, tensors);
}
inline std::vector<Choice> explain(const Options& options, const ConvTensors& tensors) {
  return detail::choices(deltic_conv_explain, options, tensors);
}
inline std::vector<Choice> explain(const Options& options, const ConvBackwardTensors& tensors) {
  return detail::choices(deltic_conv_backward_explain, options, tensors);
}
inline std::vector<Choice> explain(const Options& options, const MoveTensors& tensors) {
  return detail::choices(deltic_move_explain, options, tensors);
}
inline std::vector<Choice> explain(const Options& options, const CommitTensors& tensors) {
  return detail::choices(deltic_commit_explain, options, tensors);
}
inline std::vector<Choice> explain(const Options& options, const StepTensors& tensors) {
  return detail::choices(deltic_step_explain, options, tensors);
}
// What backward needs, and forward keeps for it, under a Save; see deltic_memory_plan.
inline deltic_memory_plan backward_memory(const Options& options, const BackwardTensors& tensors,
                                          Save save, void* stream = nullptr) {
  deltic_memory_plan plan{};
  plan.size = sizeof(plan);
  detail::call(deltic_backward_memory, options, tensors, static_cast<int32_t>(save), stream, &plan);
  return plan;
}

struct ImplementationInfo {
  std::string name;
  bool runs_here = false;
  std::string sentence;          // why not
  bool only_when_named = false;  // never chosen for a call
};
inline std::vector<ImplementationInfo> implementations(Op op, DeviceType device = DeviceType::cpu) {
  std::vector<ImplementationInfo> list;
  const auto c_op = static_cast<deltic_op>(op);
  const auto c_device = static_cast<deltic_device_type>(device);
  for (int32_t i = 0;; ++i) {
    const char* name = deltic_implementation(c_op, c_device, i);
    if (name == nullptr) return list;
    const char* sentence = "";
    const bool runs = deltic_implementation_runs_here(c_op, c_device, i, &sentence) != 0;
    const bool is_named = deltic_implementation_only_when_named(c_op, c_device, i) != 0;
    list.push_back({name, runs, sentence, is_named});
  }
}

// Facts about build and machine.
inline std::vector<std::pair<std::string, std::string>> info() {
  std::vector<std::pair<std::string, std::string>> facts;
  detail::check(deltic_info(
      [](void* user, const char* key, const char* value) {
        static_cast<std::vector<std::pair<std::string, std::string>>*>(user)->emplace_back(key,
                                                                                           value);
      },
      &facts));
  return facts;
}

inline std::string_view version() { return deltic_version(); }
inline std::string_view name(Op op) { return deltic_op_name(static_cast<deltic_op>(op)); }
// Throws if the program was compiled with another ABI's header than the library it found.
inline void check_abi() { detail::check(deltic_check_abi(DELTIC_ABI_VERSION)); }
inline void set_num_threads(int32_t n) { detail::check(deltic_set_num_threads(n)); }
inline int32_t num_threads() { return deltic_get_num_threads(); }
// Nothing: as DELTIC_CHECKED says.
inline void set_checked(std::optional<bool> on) {
  detail::check(deltic_set_checked(on ? (*on ? 1 : 0) : -1));
}

}  // namespace deltic

#endif  // DELTIC_DELTIC_HPP_
