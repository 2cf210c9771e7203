// Timing on the GPU: the row's own results against the host first, then graphs of calls, by the
// GPU's clock, with a cold cache.
#include <algorithm>
#include <cmath>
#include <map>

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

// The call whose gradients a backward case computes.
Case forward_of(const Case& c) {
  Case forward = c;
  forward.op = Op::forward;
  forward.final_state = cases::Final::none;
  return cases::normalise(forward);
}

// Gradients against the oracle, once for rows that differ in lengths alone: 0.5 to 1.5 s of 16
// cores for 200 tokens of 32 to 96 heads, whether in one sequence or in three.
Result check_reduced(const Case& c, bool is_step, const cases::RunOptions& run, std::string& what) {
  constexpr int64_t kTokens = 200;
  static std::map<std::string, Result> known;
  Case small = reduced(c);
  if (small.op == Op::backward && !small.packed)
    small.length = std::min(small.length, kTokens / small.batch);
  what = cases::canonical(small);
  const auto check_once = [](const Case& one, const cases::RunOptions& how) {
    const auto [at, is_new] = known.try_emplace(how.impl + " " + cases::canonical(one));
    if (is_new) at->second = cases::check(one, how, DeviceType::cuda);
    return at->second;
  };
  Result result = check_once(small, run);
  if (!is_step || result.status != Status::passed) return result;
  const Case forward = forward_of(small);
  what += "; " + cases::canonical(forward);
  const Result o = check_once(forward, {});
  result.status = o.status, result.reason = o.reason;
  result.errors.insert(result.errors.end(), o.errors.begin(), o.errors.end());
  return result;
}

// One call of a row; of a step two of them, forward before backward.
class Call {
 public:
  Call(const Case& c, bool is_step, const std::string& impl, size_t copies)
      : run_{.impl = impl},
        copies_(copies),
        is_step_(is_step),
        instance_(Instance::can_be_repeated(c)
                      ? Instance::tiled(c, copies, tile_for(c))
                      : Instance(c, false, {.device = DeviceType::cuda, .copies = copies})) {
    instance_.reserve(run_);
    if (is_step_ && !instance_.keeps_for_backward()) instance_.reserve_forward(run_);
    instance_.reset();
    // Backward alone starts from what forward kept.
    for (size_t i = 0; i < copies_ && !is_step_ && instance_.keeps_for_backward(); ++i)
      instance_.call_forward(at(i, nullptr));
  }

  // The first call's results. `what` becomes a sentence about what was compared.
  Result check(std::string& what) {
    const Case& c = instance_.spec();
    if (!Instance::can_be_tiled(c)) {
      Result result = check_reduced(c, is_step_, run_, what);
      if (!Instance::can_be_repeated(c)) return result;
      (*this)(0, nullptr);
      device::synchronize();
      add_not_finite(result);
      return result;
    }
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
    add_not_finite(result);
    return result;
  }

  void operator()(size_t copy, void* stream) {
    if (is_step_) instance_.call_forward(at(copy, stream));
    instance_.call(at(copy, stream));
  }
  const Instance& instance() const { return instance_; }

 private:
  // The whole call's results, of which a check sees a part.
  void add_not_finite(Result& result) const {
    const std::string bad = instance_.not_finite();
    if (result.status == Status::passed && !bad.empty())
      result.status = Status::failed, result.reason = bad;
  }
  cases::RunOptions at(size_t copy, void* stream) const {
    return {.impl = run_.impl, .copy = copy % copies_, .stream = stream};
  }

  cases::RunOptions run_;
  size_t copies_;
  bool is_step_;
  Instance instance_;
};

std::string mebibytes(double bytes) { return format("%.0f", bytes * 0x1p-20); }

}  // namespace

std::vector<std::string> put_memory(const SuiteRow& row, const Measurement& m, Json& j) {
  const auto bytes = [](size_t n) { return mebibytes(static_cast<double>(n)); };
  j["peak_bytes"] = m.peak_bytes;
  std::string others;
  const auto add = [&](const Anchor& a) {
    if (a.peak_bytes == 0) return;
    j["others_peak"].push_back({{"name", a.name}, {"bytes", a.peak_bytes}});
    others += (others.empty() ? "" : ", ") + mebibytes(a.peak_bytes) + " " + a.name;
  };
  if (row.baseline == Baseline::anchor) add(row.anchor);
  for (const Anchor& a : row.more) add(a);
  return {row.label,
          format("%.3f", quantile(m.times, 0.5)),
          bytes(m.saved_bytes),
          bytes(m.workspace_bytes),
          bytes(m.peak_bytes),
          others.empty() ? "-" : others};
}

Result measure_on_gpu(const SuiteRow& row, const std::string& named, double seconds,
                      Measurement& m) {
  constexpr size_t kFewestRuns = 21, kFewestSlowRuns = 5;
  m.product = "bf16 product";
  m.product_gflops = kProductGflops;
  m.copy_gbps = copy_gbps();
  const Case& c = row.spec;
  m.flops = count_flops(c), m.bytes = count_bytes(c);
  if (row.is_step) m.flops += count_flops(forward_of(c)), m.bytes += count_bytes(forward_of(c));
  m.impl = chosen_implementation(c, named, DeviceType::cuda);
  const size_t copies = copies_for(Instance::shapes_of(c).tensor_bytes());
  Call run(c, row.is_step, m.impl, copies);
  Result all = run.check(m.checked);
  if (all.status != Status::passed) return all;
  m.workspace_bytes = run.instance().workspace_bytes();
  m.saved_bytes = run.instance().saved_bytes();
  if (row.is_step) m.peak_bytes = run.instance().step_bytes();

  // The kernels are loaded; about how long one takes.
  const double about = time_ms([&] {
    run(0, nullptr);
    device::synchronize();
  });
  if (!row.is_step) {
    const auto eager = static_cast<size_t>(std::clamp(20.0 / about, 2.0, 20.0));
    m.call_us = time_ms([&] {
                  for (size_t i = 0; i < eager; ++i) run(0, nullptr);
                }) /
                static_cast<double>(eager) * 1e3;
  }
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
