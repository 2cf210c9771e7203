// The inverse on a GPU by itself: against fp64 with every width, dtype, layout and tail, then timed
// at the sizes that have a target. `probe check`, `probe time`, or both.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "../probe.h"
#include "core/problem.h"
#include "cuda/sm80/inverse/launch.h"

namespace {

using namespace deltic;
using probe::check;

// --- elements on the host ------------------------------------------------------------------------
double load(const unsigned char* x, DType type, int64_t i) {
  if (type == DType::f32) return reinterpret_cast<const float*>(x)[i];
  if (type == DType::f16) return __half2float(reinterpret_cast<const __half*>(x)[i]);
  return __bfloat162float(reinterpret_cast<const __nv_bfloat16*>(x)[i]);
}
void store(unsigned char* x, DType type, int64_t i, double y) {
  const float z = static_cast<float>(y);
  if (type == DType::f32) {
    reinterpret_cast<float*>(x)[i] = z;
  } else if (type == DType::f16) {
    reinterpret_cast<__half*>(x)[i] = __float2half_rn(z);
  } else {
    reinterpret_cast<__nv_bfloat16*>(x)[i] = __float2bfloat16_rn(z);
  }
}
double half_ulp(double x, DType type) {
  const int digits = type == DType::f32 ? 24 : type == DType::f16 ? 11 : 8;
  const int least = type == DType::f16 ? -14 : -126;
  return x == 0 ? 0 : std::ldexp(1.0, std::max(std::ilogb(x), least) - digits);
}

// --- cases ---------------------------------------------------------------------------------------
enum class Keys { random, correlated, repeated, doubled };  // doubled: repeated, beta up to 2
enum class Layout { plain, head_major, odd };
constexpr const char* kKeys[] = {"random", "correlated", "repeated", "repeated, beta < 2"};

struct Case {
  int W;
  DType in, out;
  int64_t B, T, H;
  std::vector<int> cu;  // packed if not empty
  Keys keys = Keys::random;
  Layout layout = Layout::plain;
};

constexpr unsigned char kSentinel = 0x5B;

// A tensor [B,T,H,W] inside of a larger one, in the host's memory and the GPU's.
struct Tensor {
  Rows rows;
  std::vector<unsigned char> host;
  Tensor(const Case& c, DType type) {
    const bool head_major = c.layout == Layout::head_major, odd = c.layout == Layout::odd;
    const int64_t gap = odd ? 3 : 0, lead = 64 + gap;
    rows.dtype = type, rows.present = true;
    rows.sh = head_major ? c.T * c.W : c.W + gap;
    rows.st = head_major ? c.W : c.H * rows.sh;
    rows.sb = c.T * c.H * (c.W + gap);
    const int64_t count = lead + c.B * rows.sb + 64;
    host.assign(static_cast<size_t>(count * size_of(type)), kSentinel);
    check(cudaMalloc(&rows.data, host.size()));
    base_ = rows.data, lead_ = lead * size_of(type);
    rows.data = static_cast<char*>(rows.data) + lead_;
  }
  Tensor(const Tensor&) = delete;
  ~Tensor() { cudaFree(base_); }
  unsigned char* data() { return host.data() + lead_; }
  void upload() { check(cudaMemcpy(base_, host.data(), host.size(), cudaMemcpyHostToDevice)); }
  void download() { check(cudaMemcpy(host.data(), base_, host.size(), cudaMemcpyDeviceToHost)); }

 private:
  void* base_;
  int64_t lead_;
};

struct Chunk {
  int64_t b, begin, length;
};
std::vector<Chunk> chunks_of(const Case& c) {
  std::vector<Chunk> all;
  const auto add = [&](int64_t b, int64_t begin, int64_t end) {
    for (; begin < end; begin += c.W)
      all.push_back({b, begin, std::min<int64_t>(c.W, end - begin)});
  };
  for (size_t n = 0; n + 1 < c.cu.size(); ++n) add(0, c.cu[n], c.cu[n + 1]);
  for (int64_t b = 0; b < c.B && c.cu.empty(); ++b) add(b, 0, c.T);
  return all;
}

// beta k k^T below the diagonal, not numbers elsewhere: those may not be looked at.
void draw(const Case& c, Tensor& a) {
  std::mt19937_64 random(1234);
  std::normal_distribution<double> normal;
  std::uniform_real_distribution<double> uniform;
  constexpr int K = 64;
  for (const Chunk& chunk : chunks_of(c)) {
    for (int64_t h = 0; h < c.H; ++h) {
      std::vector<double> k(static_cast<size_t>(chunk.length * K)), base(K);
      for (double& x : base) x = normal(random);
      for (int64_t i = 0; i < chunk.length; ++i) {
        double size = 0;
        for (int d = 0; d < K; ++d) {
          double& x = k[static_cast<size_t>(i * K + d)];
          x = normal(random) * (c.keys == Keys::random       ? 1
                                : c.keys == Keys::correlated ? 0.3
                                                             : 0) +
              (c.keys == Keys::random ? 0 : base[static_cast<size_t>(d)]);
          size += x * x;
        }
        const double beta = uniform(random) * (c.keys == Keys::doubled ? 2 : 1);
        for (int d = 0; d < K; ++d) k[static_cast<size_t>(i * K + d)] /= std::sqrt(size);
        const int64_t row = a.rows.at(chunk.b, chunk.begin + i, h);
        for (int64_t j = 0; j < c.W; ++j) {
          double sum = 0;
          for (int d = 0; j < i && d < K; ++d) {
            sum += k[static_cast<size_t>(i * K + d)] * k[static_cast<size_t>(j * K + d)];
          }
          store(a.data(), a.rows.dtype, row + j, j < i ? beta * sum : NAN);
        }
      }
    }
  }
  a.upload();
}

Problem problem_of(const Case& c, const Tensor& a, const Tensor& out, const int* cu) {
  Problem p;
  p.op = DELTIC_INVERSE, p.B = c.B, p.T = c.T, p.H = p.HV = c.H, p.chunk = c.W;
  p.packed = !c.cu.empty();
  p.N = p.packed ? static_cast<int64_t>(c.cu.size()) - 1 : c.B;
  p.cu = {cu, p.packed, false, static_cast<int64_t>(c.cu.size()), 0, 1, 0};
  p.a = a.rows, p.out = out.rows;
  return p;
}

using Call = std::function<void(const Problem&, cudaStream_t)>;

struct Errors {
  double past_half_ulp = 0, all = 0;
  bool ok = true;
};
Errors run(const Case& c, const Call& call) {
  Tensor a(c, c.in), out(c, c.out);
  draw(c, a);
  out.upload();
  int* cu = nullptr;
  if (!c.cu.empty()) {
    check(cudaMalloc(&cu, c.cu.size() * 4));
    check(cudaMemcpy(cu, c.cu.data(), c.cu.size() * 4, cudaMemcpyHostToDevice));
  }
  call(problem_of(c, a, out, cu), nullptr);
  check(cudaDeviceSynchronize());
  out.download();
  cudaFree(cu);

  Errors e;
  double past = 0, all = 0, size = 0;
  std::vector<bool> written(out.host.size(), false);  // bytes from data() on
  const auto see = [&](int64_t at) {
    const int64_t n = size_of(c.out);
    std::fill_n(written.begin() + at * n, n, true);
    return load(out.data(), c.out, at);
  };
  for (const Chunk& chunk : chunks_of(c)) {
    for (int64_t h = 0; h < c.H; ++h) {
      std::vector<double> x(static_cast<size_t>(c.W * c.W), 0.0);
      for (int64_t i = 0; i < chunk.length; ++i) {
        double* row = &x[static_cast<size_t>(i * c.W)];
        const int64_t from = a.rows.at(chunk.b, chunk.begin + i, h);
        const int64_t at = out.rows.at(chunk.b, chunk.begin + i, h);
        row[i] = 1;
        for (int64_t j = 0; j < i; ++j) {
          const double l = load(a.data(), c.in, from + j);
          for (int64_t m = 0; m <= j; ++m) row[m] -= l * x[static_cast<size_t>(j * c.W + m)];
        }
        for (int64_t j = 0; j < c.W; ++j) {
          const double found = see(at + j), difference = std::fabs(found - row[j]);
          if (!std::isfinite(found) || (j >= i && found != row[j])) e.ok = false;
          const double half = std::max(half_ulp(found, c.out), half_ulp(row[j], c.out));
          past += std::pow(std::max(0.0, difference - half), 2);
          all += difference * difference, size += row[j] * row[j];
        }
      }
    }
  }
  for (int64_t t = c.cu.empty() ? c.T : c.cu.back(); t < c.T; ++t) {  // padding
    for (int64_t h = 0; h < c.H; ++h) {
      for (int64_t j = 0; j < c.W; ++j) e.ok = e.ok && see(out.rows.at(0, t, h) + j) == 0;
    }
  }
  const int64_t lead = out.data() - out.host.data();
  for (size_t i = 0; i < out.host.size(); ++i) {  // nothing else was touched
    const bool is_written =
        static_cast<int64_t>(i) >= lead && written[i - static_cast<size_t>(lead)];
    if (!is_written && out.host[i] != kSentinel) e.ok = false;
  }
  e.past_half_ulp = std::sqrt(past / size), e.all = std::sqrt(all / size);
  // What `deltic verify` allows.
  e.ok = e.ok && e.past_half_ulp <= (c.keys == Keys::random ? 2e-6 : 1e-4);
  return e;
}

// Changing a token changes no row before it, and a sequence's bits don't depend on its place.
bool check_bits(int W, DType type, const Call& call) {
  const Case whole{.W = W, .in = type, .out = type, .B = 1, .T = 100, .H = 3};
  const Case packed{.W = W, .in = type, .out = type, .B = 1, .T = 140, .H = 3, .cu = {0, 37, 137}};
  Tensor a(whole, type), x(whole, type), y(whole, type), a_packed(packed, type), z(packed, type);
  draw(whole, a), draw(packed, a_packed);
  const auto row_bytes = static_cast<size_t>(3 * W * size_of(type));
  std::memcpy(a_packed.data() + 37 * row_bytes, a.data(), 100 * row_bytes);
  a_packed.upload(), x.upload(), y.upload(), z.upload();
  int* cu;
  check(cudaMalloc(&cu, 12));
  check(cudaMemcpy(cu, packed.cu.data(), 12, cudaMemcpyHostToDevice));
  call(problem_of(whole, a, x, nullptr), nullptr);
  call(problem_of(packed, a_packed, z, cu), nullptr);
  constexpr size_t kFrom = 75;
  for (size_t i = kFrom * row_bytes; i < 100 * row_bytes; ++i) a.data()[i] ^= 1;  // the last bits
  a.upload();
  call(problem_of(whole, a, y, nullptr), nullptr);
  check(cudaDeviceSynchronize());
  x.download(), y.download(), z.download();
  cudaFree(cu);
  return std::memcmp(x.data(), y.data(), kFrom * row_bytes) == 0 &&
         std::memcmp(x.data() + kFrom * row_bytes, y.data() + kFrom * row_bytes, row_bytes) != 0 &&
         std::memcmp(x.data(), z.data() + 37 * row_bytes, 100 * row_bytes) == 0;
}

bool check_all(const Call& call) {
  const std::vector<int> cu = {0, 1, 16, 16, 33, 96, 161, 290};
  bool ok = true;
  std::printf("%-18s %-5s %3s %12s %12s\n", "keys", "dtype", "W", "past ulp/2", "error");
  for (const DType type : {DType::f32, DType::bf16, DType::f16}) {
    for (const int W : {16, 32, 64}) {
      for (const Keys keys : {Keys::random, Keys::correlated, Keys::repeated, Keys::doubled}) {
        Errors worst;
        const auto add = [&](const Case& c) {
          const Errors e = run(c, call);
          worst.past_half_ulp = std::max(worst.past_half_ulp, e.past_half_ulp);
          worst.all = std::max(worst.all, e.all), worst.ok = worst.ok && e.ok;
        };
        for (const int64_t H : {1, 3, 16}) {
          add({W, type, type, 2, 130, H, {}, keys, Layout::plain});
          add({W, type, type, 1, 293, H, cu, keys, Layout::plain});
        }
        add({W, type, type, 2, 75, 3, {}, keys, Layout::head_major});
        add({W, type, type, 1, 293, 3, cu, keys, Layout::odd});
        add({W, type, type == DType::f32 ? DType::bf16 : DType::f32, 2, 130, 3, {}, keys});
        std::printf("%-18s %-5s %3d %12.1e %12.1e%s\n", kKeys[static_cast<int>(keys)],
                    name_of(type), W, worst.past_half_ulp, worst.all, worst.ok ? "" : "  WRONG");
        ok = ok && worst.ok;
      }
      const bool bits = check_bits(W, type, call);
      if (!bits) std::printf("%s W=%d: bits differ  WRONG\n", name_of(type), W);
      ok = ok && bits;
    }
  }
  std::printf("%s\n", ok ? "all right" : "WRONG");
  return ok;
}

// --- times ---------------------------------------------------------------------------------------
// Milliseconds of one of `calls`, the median.
template <class Call>
double time(int calls, Call call) {
  const std::vector<float> ms = probe::replay_ms(calls, 15, 1, call);
  return ms[ms.size() / 2];
}

// Bytes read and written by copies of the driver's, called one after the other: in a graph they are
// a third slower.
double copy_tbps(void* to, const void* from, int64_t bytes) {
  constexpr int kCopies = 8;
  cudaEvent_t begin, end;
  check(cudaEventCreate(&begin)), check(cudaEventCreate(&end));
  float ms = 0;
  for (int i = 0; i <= kCopies; ++i) {
    if (i == 1) check(cudaEventRecord(begin));
    check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice));
  }
  check(cudaEventRecord(end)), check(cudaEventSynchronize(end));
  check(cudaEventElapsedTime(&ms, begin, end));
  check(cudaEventDestroy(begin)), check(cudaEventDestroy(end));
  return 2e-9 * kCopies * static_cast<double>(bytes) / ms;
}

// Uniform in [-0.1, 0.1), a hash of the place.
template <class E>
__global__ void fill(E* x, int64_t n) {
  for (int64_t i = blockIdx.x * int64_t{blockDim.x} + threadIdx.x; i < n;
       i += int64_t{gridDim.x} * blockDim.x) {
    uint32_t h = static_cast<uint32_t>(i) * 2654435761u;
    h ^= h >> 16, h *= 0x85EBCA6Bu, h ^= h >> 13, h *= 0xC2B2AE35u, h ^= h >> 16;
    x[i] = static_cast<E>(0.2f * (h * 0x1p-32f) - 0.1f);
  }
}

void time_all(const Call& call) {
  constexpr int64_t kBytes = int64_t{1} << 30;  // far beyond the cache
  char *a, *out;
  check(cudaMalloc(&a, kBytes)), check(cudaMalloc(&out, kBytes));
  const double copy = copy_tbps(out, a, kBytes);
  std::printf("copy %.2f TB/s; B=8 T=4096: us, of the copy\n", copy);
  for (const DType type : {DType::f32, DType::bf16}) {
    type == DType::f32 ? fill<<<1024, 256>>>(reinterpret_cast<float*>(a), kBytes / 4)
                       : fill<<<1024, 256>>>(reinterpret_cast<__nv_bfloat16*>(a), kBytes / 2);
    for (const int64_t H : {16, 64}) {
      for (const int W : {16, 32, 64}) {
        Problem p;
        p.op = DELTIC_INVERSE, p.B = p.N = 8, p.T = 4096, p.H = p.HV = H, p.chunk = W;
        const int64_t bytes = p.B * p.T * H * W * size_of(type);
        const int sets = static_cast<int>(kBytes / bytes);
        const double ms = time(std::max(sets, 4), [&](int i, cudaStream_t stream) {
          p.a = {a + i % sets * bytes, type, true, p.T * H * W, H * W, W};
          p.out = {out + i % sets * bytes, type, true, p.T * H * W, H * W, W};
          call(p, stream);
        });
        std::printf("%s H=%ld W=%d %8.1f us %4.0f %%\n", name_of(type), H, W, ms * 1e3,
                    100 * 2.0 * static_cast<double>(bytes) / ms * 1e-9 / copy);
      }
    }
  }
  check(cudaFree(a)), check(cudaFree(out));
}

}  // namespace

#ifndef DELTIC_PROBE_NO_MAIN
int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "";
  const Call call = [](const Problem& p, cudaStream_t stream) { gpu::inverse::run(p, stream); };
  const bool ok = what == "time" || check_all(call);
  if (what != "check") time_all(call);
  return ok ? 0 : 1;
}
#endif
