// Host time of C calls on a GPU, of their parts and of the driver's launches alone: nanoseconds,
// the best of many rounds. A round is a few calls on a stream with nothing on it, so that no launch
// waits for a place in its queue. Of a call: its launches, each as an empty kernel with the same
// attributes and as many bytes, by the driver's own function; the query, which is validation,
// dispatch and planning; and what is left besides the launches. Tensors that lie elsewhere in every
// call have their own column.
//   nvcc -std=c++20 -O2 -Iinclude bench/host/calls.cu -o host_calls LIBDELTIC -lcuda
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "deltic/deltic.h"

namespace {

void check(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  std::fprintf(stderr, "host_calls: %s: %s\n", what, cudaGetErrorString(error));
  std::exit(1);
}
void check(deltic_status status) {
  if (status == DELTIC_OK) return;
  std::fprintf(stderr, "host_calls: %s\n", deltic_last_error());
  std::exit(1);
}

// Nanoseconds per call, the best round.
double best(const std::function<void()>& call, int rounds = 200, int calls = 8) {
  double least = 1e30;
  for (int r = 0; r < rounds + 3; ++r) {
    check(cudaDeviceSynchronize(), "synchronize");
    const auto begin = std::chrono::steady_clock::now();
    for (int i = 0; i < calls; ++i) call();
    const std::chrono::duration<double, std::nano> took = std::chrono::steady_clock::now() - begin;
    if (r >= 3) least = std::min(least, took.count() / calls);
  }
  check(cudaDeviceSynchronize(), "synchronize");
  return least;
}

deltic_tensor tensor(int32_t dtype, const std::vector<int64_t>& shape) {
  deltic_tensor t{};
  t.dtype = dtype, t.device_type = DELTIC_CUDA;
  for (const int64_t n : shape) t.shape[t.rank++] = n;
  int64_t elements = 1;
  for (int32_t i = t.rank - 1; i >= 0; --i) t.strides[i] = elements, elements *= t.shape[i];
  const size_t bytes = size_t(elements) * (dtype == DELTIC_F32 ? 4 : 2);
  check(cudaMalloc(&t.data, bytes), "memory");
  check(cudaMemset(t.data, 0, bytes), "memory");
  return t;
}

struct Row {
  const char* name;
  bool is_decode, per_channel;
  int64_t T, H, HV;
  int32_t state;
};

struct Params {
  char bytes[1600];  // about those of the forward
};
__global__ void nothing(const __grid_constant__ Params) {}
__global__ void nothing_small() {}

double launch(cudaStream_t stream, bool is_early, bool together, int ctas, int smem) {
  cudaLaunchAttribute attributes[2]{};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(unsigned(ctas)), config.blockDim = dim3(256);
  config.dynamicSmemBytes = size_t(smem);
  config.stream = stream, config.attrs = attributes;
  if (is_early) {
    attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
  }
  if (together) {
    attributes[config.numAttrs].id = cudaLaunchAttributeCooperative;
    attributes[config.numAttrs++].val.cooperative = 1;
  }
  static const Params params{};
  check(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize, 220 * 1024),
        "shared memory");
  return best([&] { check(cudaLaunchKernelEx(&config, nothing, params), "launch"); });
}

// The same launch by the driver's own function, of a kernel's handle (for any context) or that of a
// function in the current one.
double launch_by_driver(cudaStream_t stream, bool is_early, bool together, int ctas, int smem,
                        bool of_context) {
  CUlaunchAttribute attributes[2]{};
  CUlaunchConfig config{};
  config.gridDimX = unsigned(ctas), config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = 256, config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = unsigned(smem), config.hStream = stream, config.attrs = attributes;
  if (is_early) {
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attributes[config.numAttrs++].value.programmaticStreamSerializationAllowed = 1;
  }
  if (together) {
    attributes[config.numAttrs].id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
    attributes[config.numAttrs++].value.cooperative = 1;
  }
  cudaKernel_t kernel = nullptr;
  cudaFunction_t function = nullptr;
  check(cudaGetKernel(&kernel, reinterpret_cast<const void*>(nothing)), "kernel");
  check(cudaGetFuncBySymbol(&function, reinterpret_cast<const void*>(nothing)), "function");
  static Params params{};
  void* arguments[] = {&params};
  const auto f =
      of_context ? reinterpret_cast<CUfunction>(function) : reinterpret_cast<CUfunction>(kernel);
  return best([&] {
    if (cuLaunchKernelEx(&config, f, arguments, nullptr) != CUDA_SUCCESS) std::abort();
  });
}

// Nanoseconds of a call's launches alone: of forward the plan and the kernel, of decode one.
double launches(const Row& row, int sms, cudaStream_t stream) {
  if (row.is_decode) return launch_by_driver(stream, true, false, 32, 16 * 1024, true);
  const bool together = sms <= 128;  // as schedule/attendance.h has it
  return launch_by_driver(stream, true, false, 2, 0, true) +
         launch_by_driver(stream, true, together, sms, 200 * 1024, true);
}

void measure(const Row& row, int sms, cudaStream_t stream) {
  constexpr int64_t K = 128;
  deltic_options options;
  deltic_options_init(&options, sizeof options);
  options.qk_l2norm = 1;
  deltic_tensors t;
  deltic_tensors_init(&t, sizeof t);
  const int32_t x = DELTIC_BF16;
  t.q = tensor(x, {1, row.T, row.H, K}), t.k = tensor(x, {1, row.T, row.H, K});
  t.v = tensor(x, {1, row.T, row.HV, K}), t.o = tensor(x, {1, row.T, row.HV, K});
  t.beta = tensor(x, {1, row.T, row.HV});
  t.g = row.per_channel ? tensor(x, {1, row.T, row.HV, K}) : tensor(x, {1, row.T, row.HV});
  if (row.per_channel) {
    options.gate_form = DELTIC_GATE_BOUNDED;
    options.has_lower_bound = 1, options.lower_bound = -5;
  }
  if (row.is_decode) {
    options.state_layout = DELTIC_STATE_VK;
    t.state_pool = tensor(row.state, {1, row.HV, K, K});
  }
  deltic_workspace workspace{};
  const auto query = row.is_decode ? deltic_decode_workspace : deltic_forward_workspace;
  const auto run = row.is_decode ? deltic_decode : deltic_forward;
  check(query(&options, &t, stream, &workspace.bytes));
  if (workspace.bytes > 0) check(cudaMalloc(&workspace.data, workspace.bytes), "workspace");
  uint64_t bytes = 0;
  const double asked = best([&] { check(query(&options, &t, stream, &bytes)); });
  const double ran = best([&] { check(run(&options, &t, &workspace, stream)); });
  std::printf("%-28s call %6.0f ns, query %5.0f", row.name, ran, asked);
  if (row.T <= 128) {
    // Other places in every call: more maps than are kept.
    std::vector<deltic_tensors> places(6, t);
    for (deltic_tensors& p : places) {
      for (deltic_tensor* at = &p.q; at <= &p.o; ++at)
        *at = tensor(at->dtype, {at->shape, at->shape + at->rank});
    }
    size_t next = 0;
    const double moved = best([&] {
      check(run(&options, &places[next], &workspace, stream));
      next = (next + 1) % places.size();
    });
    for (deltic_tensors& p : places) {
      for (deltic_tensor* at = &p.q; at <= &p.o; ++at) cudaFree(at->data);
    }
    const double alone = launches(row, sms, stream);
    std::printf(", launches %5.0f, besides them %5.0f, of moving tensors %5.0f", alone, ran - alone,
                moved - alone);
  }
  std::printf("\n");
  for (const deltic_tensor* at = &t.q; at <= &t.ckpt_states; ++at) cudaFree(at->data);
  cudaFree(workspace.data);
}

void print(const char* name, double ns) { std::printf("%-34s      %7.0f ns\n", name, ns); }

}  // namespace

int main() {
  cudaStream_t stream = nullptr;
  check(cudaFree(nullptr), "context");
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "stream");
  int sms = 0;
  check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0), "SMs");
  print("clock", best([] { static_cast<void>(std::chrono::steady_clock::now()); }));
  print("launch <<<>>>, no parameters", best([&] {
          nothing_small<<<1, 32, 0, stream>>>();
          check(cudaGetLastError(), "launch");
        }));
  print("launch, 1600 bytes", launch(stream, false, false, 1, 0));
  print("launch, early", launch(stream, true, false, 1, 0));
  print("launch, cooperative, all SMs", launch(stream, false, true, sms, 200 * 1024));
  print("launch, early and cooperative", launch(stream, true, true, sms, 200 * 1024));
  print("driver's, early, of a kernel", launch_by_driver(stream, true, false, 1, 0, false));
  print("driver's, early, of a function", launch_by_driver(stream, true, false, 1, 0, true));
  print("driver's, early, coop., kernel",
        launch_by_driver(stream, true, true, sms, 200 * 1024, false));
  print("driver's, early, coop., function",
        launch_by_driver(stream, true, true, sms, 200 * 1024, true));
  print("driver's, early, all SMs, kernel",
        launch_by_driver(stream, true, false, sms, 200 * 1024, false));
  print("launch, early, all SMs", launch(stream, true, false, sms, 200 * 1024));
  print("cudaFuncSetAttribute", best([] {
          check(cudaFuncSetAttribute(nothing, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                     220 * 1024),
                "shared memory");
        }));
  print("cudaGetDevice", best([] {
          int device = 0;
          check(cudaGetDevice(&device), "device");
        }));
  print("cudaGetLastError", best([] { check(cudaGetLastError(), "last"); }));
  print("cudaStreamGetId", best([&] {
          unsigned long long id = 0;
          check(cudaStreamGetId(stream, &id), "id");
        }));
  print("cuStreamGetCtx", best([&] {
          CUcontext context = nullptr;
          CUgreenCtx green = nullptr;
          cuStreamGetCtx_v2(stream, &context, &green);
        }));
  CUcontext context = nullptr;
  cuCtxGetCurrent(&context);
  print("cuCtxGetCurrent", best([] {
          CUcontext current = nullptr;
          cuCtxGetCurrent(&current);
        }));
  print("cuCtxGetId", best([&] {
          unsigned long long id = 0;
          cuCtxGetId(context, &id);
        }));
  print("getenv", best([] {
          static const char* volatile name = "DELTIC_LOG";
          static_cast<void>(std::getenv(name));
        }));
  print("cuCtxGetDevResource", best([&] {
          CUdevResource resource{};
          cuCtxGetDevResource(context, &resource, CU_DEV_RESOURCE_TYPE_SM);
        }));
  void* memory = nullptr;
  check(cudaMalloc(&memory, 1 << 22), "memory");
  print("cuTensorMapEncodeTiled", best([&] {
          CUtensorMap map;
          const cuuint64_t dims[4] = {128, 16, 128, 1}, strides[3] = {256, 4096, 524288};
          const cuuint32_t box[4] = {64, 1, 64, 1}, ones[4] = {1, 1, 1, 1};
          cuTensorMapEncodeTiled(&map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 4, memory, dims, strides,
                                 box, ones, CU_TENSOR_MAP_INTERLEAVE_NONE,
                                 CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
                                 CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
        }));
  print("cuTensorMapReplaceAddress", best([&] {
          static CUtensorMap map;
          cuTensorMapReplaceAddress(&map, memory);
        }));
  const Row rows[] = {{"GDN T=128 H=16", false, false, 128, 16, 16, 0},
                      {"KDA T=128 H=16", false, true, 128, 16, 16, 0},
                      {"KDA T=8192 H=32", false, true, 8192, 32, 32, 0},
                      {"KDA T=8192 H=8 (split)", false, true, 8192, 8, 8, 0},
                      {"decode GDN B=1 fp32 state", true, false, 1, 16, 32, DELTIC_F32},
                      {"decode GDN B=1 bf16 state", true, false, 1, 16, 32, DELTIC_BF16},
                      {"decode KDA B=1 bf16 state", true, true, 1, 32, 32, DELTIC_BF16}};
  for (const Row& row : rows) measure(row, sms, stream);
}
