// Tensor maps by the driver's function.
#include "cuda/tensor_map.h"

#include <cudaTypedefs.h>

#include <algorithm>
#include <array>
#include <cstring>

#include "core/error.h"
#include "cuda/device.h"

namespace deltic::gpu {

bool is_16_bytes(const Rows& rows, int64_t heads, int64_t tokens, int64_t batches) {
  const auto fits = [&](int64_t stride, int64_t size) {
    return size <= 1 || (stride > 0 && stride * size_of(rows.dtype) % 16 == 0);
  };
  return reinterpret_cast<uintptr_t>(rows.data) % 16 == 0 && fits(rows.sh, heads) &&
         fits(rows.st, tokens) && fits(rows.sb, batches);
}

namespace {

// All that a map is made from, but the address.
struct Form {
  cuuint64_t dims[4], strides[3];
  CUtensorMapDataType type;
  Box channels;

  // There are no bytes without a name.
  bool operator==(const Form& other) const { return std::memcmp(this, &other, sizeof other) == 0; }
};
static_assert(sizeof(Form) == 64);
struct Map {
  Form form{};  // of no width: not used yet
  void* data = nullptr;
  CUtensorMap map;
};

template <class Function>
Function driver_function(const char* name) {
  void* f = nullptr;
  cudaDriverEntryPointQueryResult result;
  check_cuda(cudaGetDriverEntryPointByVersion(name, &f, 12000, cudaEnableDefault, &result), name);
  return reinterpret_cast<Function>(f);
}

// call(): a function of the driver that needs a context. A thread whose first call this is has none
// yet (torch's thread for gradients, in a process that has not used it before): it gets the one
// that the runtime's own calls would give it, and cudaSetDevice is allowed during capture.
template <class Call>
void call_driver(const char* op, const char* function, Call call) {
  CUresult error = call();
  if (error == CUDA_ERROR_INVALID_CONTEXT) {
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
    error = call();
  }
  if (error == CUDA_SUCCESS) return;
  fail(DELTIC_RUNTIME_ERROR, op, ": ", function, " failed with error ", int(error));
}

void encode(const char* op, Map& to) {
  static const auto function =
      driver_function<PFN_cuTensorMapEncodeTiled_v12000>("cuTensorMapEncodeTiled");
  const Form& f = to.form;
  const cuuint32_t box[4] = {cuuint32_t(f.channels), 1, 64, 1}, ones[4] = {1, 1, 1, 1};
  const CUtensorMapSwizzle swizzle =
      f.channels == Box::wide ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE;
  call_driver(op, "cuTensorMapEncodeTiled", [&] {
    return function(&to.map, f.type, 4, to.data, f.dims, f.strides, box, ones,
                    CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                    CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  });
}
void replace_address(const char* op, Map& in) {
  static const auto function =
      driver_function<PFN_cuTensorMapReplaceAddress_v12000>("cuTensorMapReplaceAddress");
  call_driver(op, "cuTensorMapReplaceAddress", [&] { return function(&in.map, in.data); });
}

// A map follows from its form and address alone: a call has up to five, and calls are alike. The
// driver's function takes up to 1 us.
constexpr size_t kKept = 16;
struct Maps {
  std::array<Map, kKept> maps;
  size_t oldest = 0;
};

}  // namespace

CUtensorMap make_map(const char* op, const Rows& rows, int64_t batches, int64_t tokens,
                     int64_t heads, int64_t width, void* fallback, Box channels) {
  static thread_local Maps kept;
  const bool is_empty = tokens == 0 || batches == 0;  // nothing is read through the map
  const auto size = [](int64_t n) { return cuuint64_t(std::max<int64_t>(n, 1)); };
  const auto stride = [&](int64_t s, int64_t n) {
    return cuuint64_t(n > 1 ? s * 2 : (width * 2 + 15) / 16 * 16);
  };
  const Form form = {
      .dims = {cuuint64_t(width), size(heads), size(tokens), size(batches)},
      .strides = {stride(rows.sh, heads), stride(rows.st, tokens), stride(rows.sb, batches)},
      .type = rows.dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                       : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      .channels = channels};
  void* const data = is_empty ? fallback : rows.data;
  const Map* alike = nullptr;
  for (const Map& m : kept.maps) {
    if (!(m.form == form)) continue;
    if (m.data == data) return m.map;
    alike = &m;
  }
  Map made{form, data, alike != nullptr ? alike->map : CUtensorMap{}};
  alike != nullptr ? replace_address(op, made) : encode(op, made);
  kept.maps[kept.oldest] = made;
  kept.oldest = (kept.oldest + 1) % kKept;
  return made.map;
}

}  // namespace deltic::gpu
