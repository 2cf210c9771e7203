// Timing on the GPU: the row's own results against the host first, then graphs of calls, by the
// GPU's clock, with a cold cache.
#include <algorithm>
#include <cmath>

#include "bench.h"
#include "cases/check.h"
#include "counts.h"
#include "report.h"
#include "suites.h"

namespace deltic::cli {
namespace {

using cases::Case;
using cases::Instance;
using cases::Result;
using cases::Status;
namespace device = cases::device;

// Data sheet of the H200: dense bf16. Products of large matrices reach 70 to 80 % of it.
constexpr double kProductGflops = 989e3;
// Tokens of heads that are compared: 0.05 s of the oracle, which runs on one core (decode: of
// states that are converted); 0.1 s of fp32 on 16 cores, conversions included.
constexpr int64_t kOracleTokens = 2048, kOracleStates = 256, kLongTokens = 32768;

// Bytes read and written per nanosecond by a copy far beyond the cache; measured once. In a graph
// the copy engines do it, which are slower than the kernel of a plain call.
double copy_gbps() {
  static const double rate = [] {
    constexpr size_t kBytes = size_t{1} << 30;
    constexpr int kRuns = 10;
    const auto from = device::allocate(kBytes), to = device::allocate(kBytes);
    const auto copies = [&](void* stream) {
      for (int i = 0; i < kRuns; ++i) device::copy(to.get(), from.get(), kBytes, stream);
    };
    device::Graph graph(copies);
    graph.replay_ms(), graph.calls_ms(copies);
    return 2.0 * kRuns * kBytes / std::min(graph.replay_ms(), graph.calls_ms(copies)) * 1e-6;
  }();
  return rate;
}

// Sets of tensors that together are three times the cache, where memory allows.
size_t copies_for(double bytes) {
  const double wanted = 3.0 * static_cast<double>(device::cache_bytes()) / std::max(bytes, 1.0);
  const double possible = 0.5 * static_cast<double>(device::memory_bytes()) / std::max(bytes, 1.0);
  return static_cast<size_t>(std::clamp(std::ceil(std::min(wanted, possible)), 1.0, 64.0));
}

// Rows of a suite often differ in lengths alone, and have one tile.
const Instance& tile_for(const Case& c) {
  static std::unique_ptr<Instance> last;
  const Case wanted = Instance::tile_of(c);
  if (last == nullptr || !(last->spec() == wanted))
    last = std::make_unique<Instance>(wanted, false);
  return *last;
}

std::string describe(const char* what, const Case& c, const cases::Slice& slice) {
  return std::to_string(slice.token_heads(c)) + " tokens of heads (" +
         std::to_string(slice.sequences.size()) + " sequences, " +
         std::to_string(slice.heads.size()) + " heads) against " + what;
}

// One call of a row.
class Call {
 public:
  Call(const Case& c, const std::string& impl, size_t copies)
      : run_{.impl = impl},
        copies_(copies),
        is_tiled_(Instance::can_be_tiled(c)),
        instance_(is_tiled_ ? Instance::tiled(c, copies, tile_for(c))
                            : Instance(c, false, {.device = DeviceType::cuda, .copies = copies})) {
    instance_.reserve(run_);
    instance_.reset();
  }

  // The first call's results. `what` becomes a sentence about what was compared.
  Result check(std::string& what) {
    if (!is_tiled_) {
      const Case small = reduced(instance_.spec());
      what = cases::canonical(small);
      return cases::check(small, run_, DeviceType::cuda);
    }
    const Case& c = instance_.spec();
    const cases::Slice few =
        cases::few_tokens(c, c.op == Op::decode ? kOracleStates : kOracleTokens);
    const cases::Slice whole = cases::whole_sequence(c, kLongTokens);
    const bool is_long = c.op == Op::forward && !few.is_whole(c);
    Instance part = instance_.inputs_of(few);
    std::unique_ptr<Instance> sequence;
    if (is_long) sequence = std::make_unique<Instance>(instance_.inputs_of(whole));
    (*this)(0, nullptr);
    device::synchronize();

    what = describe("the oracle", c, few);
    instance_.outputs_of(few, part);
    Result result = cases::compare(part, cases::expect(part));
    if (is_long && result.status == Status::passed) {
      what += "; " + describe("fp32 on the CPU", c, whole);
      instance_.outputs_of(whole, *sequence);
      const Result more = cases::compare_in_f32(*sequence);
      result.status = more.status, result.reason = more.reason;
      result.errors.insert(result.errors.end(), more.errors.begin(), more.errors.end());
    }
    const std::string bad = instance_.not_finite();
    if (result.status == Status::passed && !bad.empty())
      result.status = Status::failed, result.reason = bad;
    return result;
  }

  void operator()(size_t copy, void* stream) {
    instance_.call({.impl = run_.impl, .copy = copy % copies_, .stream = stream});
  }
  size_t workspace_bytes() const { return instance_.workspace_bytes(); }

 private:
  cases::RunOptions run_;
  size_t copies_;
  bool is_tiled_;
  Instance instance_;
};

}  // namespace

Result measure_on_gpu(const SuiteRow& row, const std::string& named, double seconds,
                      Measurement& m) {
  constexpr size_t kFewestRuns = 21, kFewestSlowRuns = 5;
  m.product = "bf16 product";
  m.product_gflops = kProductGflops;
  m.copy_gbps = copy_gbps();
  const Case& c = row.spec;
  m.flops = count_flops(c), m.bytes = count_bytes(c);
  m.impl = chosen_implementation(c, named, DeviceType::cuda);
  const size_t copies = copies_for(Instance::shapes_of(c).tensor_bytes());
  Call run(c, m.impl, copies);
  Result all = run.check(m.checked);
  if (all.status != Status::passed) return all;
  m.workspace_bytes = run.workspace_bytes();

  // The kernels are loaded; about how long one takes.
  const double about = time_ms([&] {
    run(0, nullptr);
    device::synchronize();
  });
  const auto eager = static_cast<size_t>(std::clamp(20.0 / about, 2.0, 20.0));
  m.call_us = time_ms([&] {
                for (size_t i = 0; i < eager; ++i) run(0, nullptr);
              }) /
              static_cast<double>(eager) * 1e3;
  device::synchronize();
  // So many that a replay's own cost, a few microseconds, is lost in them.
  const size_t count = std::max(copies, static_cast<size_t>(std::clamp(4.0 / about, 1.0, 8.0)));
  device::Graph graph([&](void* stream) {
    for (size_t i = 0; i < count; ++i) run(i, stream);
  });
  graph.replay_ms();
  double spent = 0;
  while (m.times.size() < kFewestRuns || spent < seconds) {
    const double ms = graph.replay_ms();
    spent += ms * 1e-3;
    m.times.push_back(ms / static_cast<double>(count));
    if (spent > std::max(1.0, seconds) && m.times.size() >= kFewestSlowRuns) break;
  }
  if (row.baseline == Baseline::anchor) m.baseline_times = {row.anchor.ms};
  if (row.baseline == Baseline::copy) m.baseline_times = {m.bytes / m.copy_gbps * 1e-6};
  return all;
}

}  // namespace deltic::cli
