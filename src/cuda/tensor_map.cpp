// Tensor maps by the driver's function.
#include "cuda/tensor_map.h"

#include <cudaTypedefs.h>

#include <algorithm>

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

CUtensorMap make_map(const char* op, const Rows& rows, int64_t batches, int64_t tokens,
                     int64_t heads, int64_t width, void* fallback, Box channels) {
  static const auto encode = [] {
    void* f = nullptr;
    cudaDriverEntryPointQueryResult result;
    check_cuda(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &f, 12000,
                                                cudaEnableDefault, &result),
               "cuTensorMapEncodeTiled");
    return reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(f);
  }();
  const bool is_empty = tokens == 0 || batches == 0;  // nothing is read through the map
  const auto size = [](int64_t n) { return cuuint64_t(std::max<int64_t>(n, 1)); };
  const auto stride = [&](int64_t s, int64_t n) {
    return cuuint64_t(n > 1 ? s * 2 : (width * 2 + 15) / 16 * 16);
  };
  const cuuint64_t dims[4] = {cuuint64_t(width), size(heads), size(tokens), size(batches)};
  const cuuint64_t strides[3] = {stride(rows.sh, heads), stride(rows.st, tokens),
                                 stride(rows.sb, batches)};
  const cuuint32_t box[4] = {cuuint32_t(channels), 1, 64, 1}, ones[4] = {1, 1, 1, 1};
  CUtensorMap map;
  const CUresult error = encode(
      &map,
      rows.dtype == DType::f16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
      4, is_empty ? fallback : rows.data, dims, strides, box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
      channels == Box::wide ? CU_TENSOR_MAP_SWIZZLE_128B : CU_TENSOR_MAP_SWIZZLE_NONE,
      CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (error != CUDA_SUCCESS) {
    fail(DELTIC_RUNTIME_ERROR, op, ": cuTensorMapEncodeTiled failed with error ", int(error));
  }
  return map;
}

}  // namespace deltic::gpu
