// Between torch tensors and the structs of the C ABI.
#include "bridge.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <limits>
#include <stdexcept>

namespace deltic::bridge {
namespace {

thread_local int32_t t_last_status = DELTIC_OK;

// OpenMP's threads do not survive a fork, and a parallel region in the child would wait for them.
std::atomic<bool> g_is_forked_child{false};
[[maybe_unused]] const int g_at_fork =
    pthread_atfork(nullptr, nullptr, [] { g_is_forked_child.store(true); });

int32_t num_threads() {
  if (g_is_forked_child.load(std::memory_order_relaxed)) return 1;
  return static_cast<int32_t>(std::min<uint32_t>(torch::stable::get_num_threads(), 4096));
}

struct TypePair {
  int32_t torch;
  int32_t deltic;
};
const TypePair kTypes[] = {
    {aoti_torch_dtype_float32(), DELTIC_F32}, {aoti_torch_dtype_bfloat16(), DELTIC_BF16},
    {aoti_torch_dtype_float16(), DELTIC_F16}, {aoti_torch_dtype_float64(), DELTIC_F64},
    {aoti_torch_dtype_int32(), DELTIC_I32},   {aoti_torch_dtype_int64(), DELTIC_I64}};
const int32_t kCpu = aoti_torch_device_type_cpu();
const int32_t kCuda = aoti_torch_device_type_cuda();
const int32_t kByte = aoti_torch_dtype_uint8();

const char* foreign_type_name(int32_t type) {
  const std::pair<int32_t, const char*> names[] = {
      {aoti_torch_dtype_uint8(), "uint8"},         {aoti_torch_dtype_int8(), "int8"},
      {aoti_torch_dtype_int16(), "int16"},         {aoti_torch_dtype_bool(), "bool"},
      {aoti_torch_dtype_complex64(), "complex64"}, {aoti_torch_dtype_complex128(), "complex128"}};
  for (const auto& [known, name] : names) {
    if (known == type) return name;
  }
  return "another dtype";
}

int32_t torch_device_type(const deltic_tensor& t) { return t.device_type == DELTIC_CPU ? kCpu : kCuda; }

Tensor empty(int32_t rank, const int64_t* shape, const int64_t* strides, int32_t type,
             const deltic_tensor& where) {
  AtenTensorHandle handle = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(rank, shape, strides, type,
                                                         torch_device_type(where),
                                                         where.device_index, &handle));
  return Tensor(handle);
}

}  // namespace

void fail(deltic_status status, const std::string& text) {
  t_last_status = status;
  throw std::runtime_error(text);
}

void check(deltic_status status) {
  if (status != DELTIC_OK) fail(status, deltic_last_error());
}

deltic_tensor view(const char* op, const char* name, const Tensor& tensor) {
  const AtenTensorHandle handle = tensor.get();
  deltic_tensor t{};
  int32_t type = 0, device = 0;
  int64_t rank = 0, *sizes = nullptr, *strides = nullptr;
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(handle, &type));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(handle, &device));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(handle, &rank));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(handle, &sizes));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(handle, &strides));
  STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(handle, &t.data));
  const TypePair* pair = std::find_if(std::begin(kTypes), std::end(kTypes),
                                      [&](const TypePair& p) { return p.torch == type; });
  if (pair == std::end(kTypes)) {
    fail(DELTIC_INVALID_ARGUMENT, std::string(op) + ": " + name +
                                      ": expected fp32, bf16, fp16, fp64, int32 or int64, got " +
                                      foreign_type_name(type));
  }
  t.dtype = pair->deltic;
  if (device == kCuda) {
    t.device_type = DELTIC_CUDA;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(handle, &t.device_index));
  } else if (device != kCpu) {
    fail(DELTIC_UNSUPPORTED,
         std::string(op) + ": " + name + ": expected a CPU or CUDA tensor, got another device's");
  }
  t.rank = static_cast<int32_t>(std::min<int64_t>(rank, std::numeric_limits<int32_t>::max()));
  const int64_t held = std::min<int64_t>(rank, DELTIC_MAX_RANK);
  std::copy(sizes, sizes + held, t.shape);
  std::copy(strides, strides + held, t.strides);
  if (rank == 0) t.rank = 1, t.shape[0] = 1, t.strides[0] = 1;
  return t;
}

deltic_tensor view(const char* op, const char* name, const MaybeTensor& tensor) {
  return tensor.has_value() ? view(op, name, *tensor) : deltic_tensor{};
}

deltic_tensor packed_view(const char* op, const char* name, MaybeTensor& tensor) {
  deltic_tensor t = view(op, name, tensor);
  if (t.rank < 1 || t.rank > DELTIC_MAX_RANK) return t;
  if (t.shape[t.rank - 1] <= 1 || t.strides[t.rank - 1] == 1) return t;
  tensor = torch::stable::contiguous(*tensor);
  return view(op, name, tensor);
}

deltic_tensor plan(std::initializer_list<int64_t> shape, int32_t dtype, const deltic_tensor& where) {
  deltic_tensor t{};
  t.dtype = dtype;
  t.device_type = where.device_type;
  t.device_index = where.device_index;
  for (int64_t n : shape) t.shape[t.rank++] = n;
  int64_t stride = 1;
  for (int32_t i = t.rank - 1; i >= 0; --i) {
    t.strides[i] = stride;
    stride *= std::max<int64_t>(t.shape[i], 1);
  }
  return t;
}

deltic_tensor plan_like(const deltic_tensor& like) {
  deltic_tensor t = plan({}, like.dtype, like);
  if (like.rank > DELTIC_MAX_RANK) return t;
  t.rank = like.rank;
  int64_t stride = 1;
  for (int32_t i = t.rank - 1; i >= 0; --i) {
    t.shape[i] = like.shape[i];
    t.strides[i] = stride;
    stride *= std::max<int64_t>(t.shape[i], 1);
  }
  return t;
}

Tensor allocate(deltic_tensor& planned, const deltic_tensor& where) {
  if (planned.rank == 0) {
    const int64_t none = 0, one = 1;
    return empty(1, &none, &one, kTypes[0].torch, where);
  }
  Tensor tensor =
      empty(planned.rank, planned.shape, planned.strides, kTypes[planned.dtype].torch, planned);
  planned.data = tensor.data_ptr();
  return tensor;
}

int32_t dtype_of(MaybeType type, int32_t otherwise) {
  if (!type.has_value()) return otherwise;
  const auto code = torch::stable::detail::to<int32_t>(torch::stable::detail::from(*type));
  for (const TypePair& pair : kTypes) {
    if (pair.torch == code) return pair.deltic;
  }
  fail(DELTIC_INVALID_ARGUMENT,
       std::string("block: dtype: expected fp32, bf16 or fp16, got ") + foreign_type_name(code));
}

Bytes::Bytes(uint64_t bytes, const deltic_tensor& where)
    : tensor_([&] {
        const auto size = static_cast<int64_t>(bytes);
        const int64_t one = 1;
        return empty(1, &size, &one, kByte, where);
      }()),
      buffer_{bytes > 0 ? tensor_.data_ptr() : nullptr, bytes} {}

deltic_options default_options() {
  deltic_options o;
  deltic_options_init(&o);
  o.num_threads = num_threads();
  return o;
}

void set(int32_t& field, int64_t value) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  field = static_cast<int32_t>(std::clamp<int64_t>(value, -kMax, kMax));
}

void set_scale(deltic_options& options, MaybeFloat scale) {
  options.has_scale = scale.has_value() ? 1 : 0;
  options.scale = static_cast<float>(scale.value_or(0.0));
}

void set_lower_bound(deltic_options& options, MaybeFloat lower_bound) {
  options.has_lower_bound = lower_bound.has_value() ? 1 : 0;
  options.lower_bound = static_cast<float>(lower_bound.value_or(0.0));
}

void set_impl(deltic_options& options, const MaybeName& impl) {
  options.impl = impl.has_value() ? impl->c_str() : nullptr;
}

ForwardBytes forward_bytes(deltic_options& options, const deltic_tensors& tensors) {
  ForwardBytes bytes;
  deltic_status status = deltic_forward_workspace(&options, &tensors, &bytes.workspace);
  if (status == DELTIC_UNSUPPORTED && options.save != DELTIC_SAVE_NONE) {
    options.save = DELTIC_SAVE_NONE;
    status = deltic_forward_workspace(&options, &tensors, &bytes.workspace);
  }
  check(status);
  if (options.save != DELTIC_SAVE_NONE) {
    check(deltic_forward_saved(&options, &tensors, &bytes.saved));
  }
  return bytes;
}

void* stream_of(const deltic_tensor& where) {
  if (where.device_type != DELTIC_CUDA) return nullptr;
  // Not in a torch without CUDA, so it cannot be linked by name.
  using Get = AOTITorchError (*)(int32_t, void**);
  static const auto get = reinterpret_cast<Get>(
      torch::stable::detail::lookup_stable_symbol("aoti_torch_get_current_cuda_stream"));
  void* stream = nullptr;
  if (get != nullptr) STABLE_TORCH_ERROR_CODE_CHECK(get(where.device_index, &stream));
  return stream;
}

}  // namespace deltic::bridge

using namespace deltic;

// For the Python side, which reads them through ctypes: they take no tensors.
extern "C" {

// The status of this thread's last failed operator.
DELTIC_API int32_t deltic_torch_last_status() { return bridge::t_last_status; }
DELTIC_API const char* deltic_torch_version() { return deltic_version(); }

// Bytes that forward keeps for these sizes (packed: B = 1, N sequences); 0 for a call it refuses.
DELTIC_API int64_t deltic_torch_saved_bytes(int32_t device, int32_t is_f64, int64_t B, int64_t T,
                                            int64_t H, int64_t K, int64_t HV, int64_t V, int64_t N,
                                            int32_t packed, int64_t chunk, int32_t save,
                                            const char* impl) {
  deltic_options options;
  deltic_options_init(&options);
  bridge::set(options.chunk, chunk);
  options.save = save;
  options.impl = impl;
  deltic_tensor where{};
  where.device_type = device;
  const int32_t dtype = is_f64 ? DELTIC_F64 : DELTIC_F32;
  deltic_tensors t;
  deltic_tensors_init(&t);
  t.q = t.k = bridge::plan({B, T, H, K}, dtype, where);
  t.v = t.o = bridge::plan({B, T, HV, V}, dtype, where);
  if (packed) t.cu_seqlens = bridge::plan({N + 1}, DELTIC_I64, where);
  try {
    return static_cast<int64_t>(bridge::forward_bytes(options, t).saved);
  } catch (const std::exception&) {
    return 0;
  }
}

}  // extern "C"
