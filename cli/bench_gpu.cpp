// Timing on the GPU: graphs of calls, by the GPU's clock, with a cold cache.
#include <algorithm>
#include <cmath>

#include "bench.h"
#include "counts.h"
#include "suites.h"

namespace deltic::cli {
namespace {

using cases::Instance;
namespace device = cases::device;

// Data sheet of the H200: dense bf16. Products of large matrices reach 70 to 80 % of it.
constexpr double kProductGflops = 989e3;

// Bytes read and written per nanosecond by a copy far beyond the cache; measured once.
double copy_gbps() {
  static const double rate = [] {
    constexpr size_t kBytes = size_t{1} << 30;
    constexpr int kRuns = 10;
    const auto from = device::allocate(kBytes), to = device::allocate(kBytes);
    device::Graph graph([&](void* stream) {
      for (int i = 0; i < kRuns; ++i) device::copy(to.get(), from.get(), kBytes, stream);
    });
    graph.replay_ms();
    return 2.0 * kRuns * kBytes / graph.replay_ms() * 1e-6;
  }();
  return rate;
}

// Sets of tensors that together are three times the cache, where memory allows.
size_t copies_for(double bytes) {
  const double wanted = 3.0 * static_cast<double>(device::cache_bytes()) / std::max(bytes, 1.0);
  const double possible = 0.5 * static_cast<double>(device::memory_bytes()) / std::max(bytes, 1.0);
  return static_cast<size_t>(std::clamp(std::ceil(std::min(wanted, possible)), 1.0, 64.0));
}

}  // namespace

Measurement measure_on_gpu(const SuiteRow& row, const std::string& impl, double seconds) {
  constexpr size_t kFewestRuns = 21;
  Measurement m;
  m.impl = impl;
  m.product = "bf16 product";
  m.product_gflops = kProductGflops;
  m.copy_gbps = copy_gbps();
  const size_t copies = copies_for(Instance::shapes_of(row.spec).tensor_bytes());
  Instance instance(row.spec, false, {.device = DeviceType::cuda, .copies = copies});
  const cases::RunOptions run{.impl = impl};
  instance.reserve(run);
  instance.reset();
  m.workspace_bytes = instance.workspace_bytes();
  m.bytes = count_bytes(row.spec);

  instance.call(run);  // warm up: loads the kernels
  device::synchronize();
  constexpr int kEager = 20;
  m.call_us = time_ms([&] {
                for (int i = 0; i < kEager; ++i) instance.call(run);
              }) /
              kEager * 1e3;
  device::synchronize();
  // So many calls that a replay's own cost is lost in them.
  const size_t calls = std::max<size_t>(copies, 8);
  device::Graph graph([&](void* stream) {
    for (size_t i = 0; i < calls; ++i) {
      instance.call({.impl = impl, .copy = i % copies, .stream = stream});
    }
  });
  graph.replay_ms();
  double spent = 0;
  while (m.times.size() < kFewestRuns || (spent < 0.05 && spent < seconds)) {
    const double ms = graph.replay_ms();
    spent += ms * 1e-3;
    m.times.push_back(ms / static_cast<double>(calls));
    if (spent > seconds && m.times.size() >= 5) break;
  }
  if (row.baseline == Baseline::anchor) m.baseline_times = {row.anchor_ms};
  if (row.baseline == Baseline::copy) m.baseline_times = {m.bytes / m.copy_gbps * 1e-6};
  return m;
}

}  // namespace deltic::cli
