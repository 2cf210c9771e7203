// Between torch tensors and the structs of the C ABI: views, outputs, options, errors, threads.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "deltic/deltic.h"

// Later headers than those of 2.11 have a check that also quotes torch's own text.
#ifdef STABLE_TORCH_ERROR_CODE_CHECK
#define DELTIC_TORCH_CHECK STABLE_TORCH_ERROR_CODE_CHECK
#else
#define DELTIC_TORCH_CHECK TORCH_ERROR_CODE_CHECK
#endif

// torch.ops.NAMESPACE: with another name a second build of the operators can live in the same
// process.
#ifndef DELTIC_TORCH_NAMESPACE
#define DELTIC_TORCH_NAMESPACE deltic
#endif
// torch's macros paste their arguments; in between the name is replaced by what it stands for.
#define DELTIC_TORCH_OPERATORS(name, m) STABLE_TORCH_LIBRARY_FRAGMENT(name, m)
#define DELTIC_TORCH_KERNELS(name, device, m) STABLE_TORCH_LIBRARY_IMPL(name, device, m)
#define DELTIC_TORCH_TEXT_OF(name) #name
#define DELTIC_TORCH_TEXT(name) DELTIC_TORCH_TEXT_OF(name)

extern "C" {
typedef void (*deltic_torch_log_fn)(const char* line, const char* tensors);
typedef void (*deltic_torch_note_fn)(const char* text);

// The status of this thread's last failed operator.
DELTIC_API int32_t deltic_torch_last_status();
DELTIC_API int32_t deltic_torch_get_num_threads();
}

namespace deltic::bridge {

using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;
using MaybeFloat = std::optional<double>;
using MaybeType = std::optional<torch::headeronly::ScalarType>;

// Throws what torch turns into a RuntimeError, with the names of the function that was called and
// of its arguments. The status stays readable for the Python functions, which raise ValueError,
// TypeError or NotImplementedError with the same text.
[[noreturn]] void fail(deltic_status status, const std::string& text);
void check(deltic_status status);

// A view of a tensor's memory; absent for none. A tensor without dimensions is seen as one of one
// element, because rank 0 means absent.
deltic_tensor view(const char* op, const char* name, const Tensor& tensor);
deltic_tensor view(const char* op, const char* name, const MaybeTensor& tensor);
// Of a tensor of yes and no: bool, or uint8.
deltic_tensor view_flags(const char* op, const char* name, const MaybeTensor& tensor);

// An output to be: shape, dtype and device, contiguous, no memory yet. Queries need no more.
deltic_tensor plan(std::initializer_list<int64_t> shape, int32_t dtype, const deltic_tensor& where);
deltic_tensor plan_like(const deltic_tensor& t);
// Gives a planned output its memory. An absent one becomes an empty tensor of shape [0].
Tensor allocate(deltic_tensor& planned, const deltic_tensor& where);

// The dtype of what is kept in fp32: fp64 where the inputs are (the oracle).
inline int32_t wide(const deltic_tensor& t) {
  return t.dtype == DELTIC_F64 ? DELTIC_F64 : DELTIC_F32;
}
int32_t dtype_of(const char* op, MaybeType type, int32_t otherwise);

// Fails for bits of a gradient's `want` that stand for none of its `count` outputs.
void check_wanted(const char* op, int64_t want, int count);

// Memory of torch's CUDA allocator for the current stream, without a tensor around it (which takes
// 2 us); null where the device is not the current one, or torch refuses: a tensor then says why.
void* allocate_raw(uint64_t bytes, const deltic_tensor& where);
// Whether a CUDA tensor's device is torch's current one.
bool is_current_device(const deltic_tensor& where);
void free_raw(void* memory);

// Scratch memory on the device of `where`, 64-byte aligned.
class Workspace {
 public:
  Workspace(uint64_t bytes, const deltic_tensor& where);
  ~Workspace() {
    if (raw_ != nullptr) free_raw(raw_);
  }
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;
  const deltic_buffer* c() const { return &buffer_; }

 private:
  MaybeTensor tensor_;
  void* raw_ = nullptr;
  deltic_buffer buffer_;
};

// Zeroed bytes as a tensor, 64-byte aligned: what forward keeps has gaps that nobody writes, and
// what an operator returns is the same in every run.
Tensor zeroed_bytes(uint64_t bytes, const deltic_tensor& where);

// A shape as the library's errors have it: [2, 3].
std::string shape_text(const deltic_tensor& t, const char* between = ", ");

// A call's options. Operators take them as one text of words, because each number of a schema costs
// 0.3 us in torch's argument parser:
//
//   gate=softplus|bounded  beta=sigmoid|2sigmoid  layout=vk  qk_l2norm  split=off|by_length|TOKENS
//   chunk=16|32|64  reverse  final  save=states|all  impl=NAME
//   activation=silu  null_slot=SLOT  form=recurrent  seed=NUMBER  norm=none|silu|sigmoid
//   as=FUNCTION
//
// `as` is the function that somebody called, which errors then name, in compiled graphs too;
// without it they name the operator. Threads are those torch would use (in a forked child the
// library takes one).
struct Options {
  deltic_options c;
  bool final_state = false;  // forward and decode return the final state
  bool norm = false;         // step has one
  std::string impl;          // c.impl points here
  std::string function;      // what errors name

  Options(const char* op, const std::string& words, MaybeFloat scale, MaybeFloat lower_bound);
  Options(const Options&) = delete;
  Options& operator=(const Options&) = delete;

 private:
  bool take(std::string_view key, std::string_view value);  // false: no such word
};

// One call: its options, and views of its tensors as the library takes them.
struct Call {
  Options options;

  Call(const char* op, const std::string& words, MaybeFloat scale = {}, MaybeFloat lower_bound = {})
      : options(op, words, scale, lower_bound) {}

  const char* function() const { return options.function.c_str(); }
  // What is only read. Where the last dimension's stride is not 1, the view is of a copy that lives
  // as long as the call; the first one of a function's argument is said (deltic_torch_set_note).
  template <class T>
  deltic_tensor input(const char* name, const T& tensor) {
    return packed(name, tensor, true);
  }
  // The same for gradients that came back, whose strides are autograd's choice
  // (`o.sum().backward()` gives all zeros): nothing is said.
  deltic_tensor gradient(const char* name, const MaybeTensor& tensor) {
    return packed(name, tensor, false);
  }
  // What is written in place, which a copy would not reach, or may have any strides.
  template <class T>
  deltic_tensor as_given(const char* name, const T& tensor) const {
    return view(function(), name, tensor);
  }
  deltic_tensor flags(const char* name, const MaybeTensor& tensor) const {
    return view_flags(function(), name, tensor);
  }

 private:
  deltic_tensor packed(const char* name, const MaybeTensor& tensor, bool is_said);
  std::vector<Tensor> copies_;
};

// A weight of shape [D,1,W], as torch's convolutions have it, is one of [D,W].
deltic_tensor without_groups(deltic_tensor weight);

// o, where there is none yet, and the final state where asked for: as the initial state, else fp32.
void plan_outputs(deltic_tensors& t, const deltic_options& options, bool final_state);
inline void plan_outputs(deltic_tensors& t, const Options& options) {
  plan_outputs(t, options.c, options.final_state);
}

// Checks a forward call and says what it needs. An implementation that keeps nothing for backward
// (the oracle) is given save = none: backward then starts from the inputs.
struct ForwardBytes {
  uint64_t workspace = 0;
  uint64_t saved = 0;
};
ForwardBytes forward_bytes(deltic_options& options, const deltic_tensors& tensors, void* stream);

// The status of a call that had this workspace. On a GPU in checked mode the checks run there:
// waits for the call and fails with what they found. One under capture cannot be waited for.
void check_call(deltic_status status, const Workspace& workspace, const deltic_tensor& where);

// Whether somebody is told of every decision.
bool is_logged();

// The stream of a CUDA tensor's device, null on the CPU.
void* stream_of(const deltic_tensor& where);

}  // namespace deltic::bridge
