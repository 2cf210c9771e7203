// `deltic bench`: correctness first, then interleaved runs of a case, its baseline and a copy.
#include "bench.h"

#include <algorithm>
#include <chrono>
#include <cmath>

#include "cases/check.h"
#include "commands.h"
#include "counts.h"
#include "roofs.h"
#include "suites.h"

namespace deltic::cli {

double time_ms(const std::function<void()>& f) {
  const auto begin = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

double quantile(std::vector<double> samples, double q) {
  if (samples.empty()) return NAN;
  std::sort(samples.begin(), samples.end());
  const double at = q * static_cast<double>(samples.size() - 1);
  const auto low = static_cast<size_t>(at);
  const size_t high = std::min(low + 1, samples.size() - 1);
  return samples[low] + (samples[high] - samples[low]) * (at - static_cast<double>(low));
}

std::function<void()> recurrence_call(const cases::Instance& instance, int threads) {
  Options o = instance.options({.impl = {}, .threads = threads});
  o.chunk = 64;  // an option of the chunked form
  o.split = Split::automatic;
  o.segment_length = 0;
  auto workspace = std::make_shared<Workspace>(decode_workspace_bytes(o, instance.tensors()));
  return [o, workspace, &instance] { decode(o, instance.tensors(), workspace->c()); };
}

cases::Case reduced(const cases::Case& c) {
  constexpr int64_t kTokens = 200, kSequences = 3;
  cases::Case r = c;
  if (r.packed) {
    r.seqs.resize(static_cast<size_t>(std::min(r.num_sequences(), kSequences)));
    for (int64_t& n : r.seqs) n = std::min(n, kTokens);
    r.pad = std::min<int64_t>(r.pad, 10);
  } else {
    r.batch = std::min(r.batch, kSequences);
    r.length = std::min(r.length, kTokens);
  }
  std::erase_if(r.ckpt, [&](int64_t n) { return n > r.longest(); });
  return cases::normalise(r);
}

std::string chosen_implementation(const cases::Case& c, const std::string& named,
                                  DeviceType device) {
  if (!named.empty()) return named;
  const auto choices = cases::Instance::shapes_of(c, device).explain();
  if (choices.empty() || !choices.front().chosen) {
    std::string all = "no implementation takes it";
    for (const Choice& choice : choices) all += "; " + choice.name + ": " + choice.sentence;
    throw Error(ErrorKind::unsupported, all);
  }
  return choices.front().name;
}

namespace {

using cases::Case;
using cases::Instance;

constexpr size_t kEnoughRuns = 20, kFewestRuns = 5, kMostRuns = 1000;

Measurement measure(const SuiteRow& row, const std::string& impl, const std::string& named,
                    int threads, double seconds) {
  Measurement m;
  m.impl = impl;
  m.threads = threads;
  const ProductRoof product = measure_product_roof(threads, impl);
  m.product = product.kind + " product";
  m.product_gflops = product.gflops;
  std::vector<double> copy_times;
  const cases::RunOptions run{.impl = impl, .threads = threads};
  const bool is_backward = row.spec.op == Op::backward;
  // Forward runs on what it would choose by itself, unless a name was given for both.
  const cases::RunOptions forward_run{.impl = named, .threads = threads};
  Instance instance(row.spec, false);
  instance.reserve(run);
  if (is_backward) instance.reserve_forward(forward_run);
  instance.reset();
  m.saved_bytes = instance.saved_bytes();
  m.workspace_bytes = instance.workspace_bytes();
  m.flops = count_flops(row.spec);
  m.bytes = count_bytes(row.spec) + static_cast<double>(m.saved_bytes);
  CopyRoof copy(static_cast<size_t>(m.bytes), threads);
  const auto call = [&] { instance.call(run); };
  const auto run_copy = [&] { copy.run(); };
  std::function<void()> baseline;
  if (row.baseline == Baseline::recurrence && row.spec.op == Op::forward) {
    try {
      baseline = recurrence_call(instance, threads);
    } catch (const Error& e) {  // the recurrent form may not take what the chunked one does
      if (e.kind() != ErrorKind::unsupported) throw;
    }
  } else if (row.baseline == Baseline::one_thread) {
    baseline = [&] { instance.call({.impl = impl, .threads = 1}); };
  } else if (row.baseline == Baseline::forward && is_backward) {
    baseline = [&] { instance.call_forward(forward_run); };
  }

  if (is_backward) instance.call_forward(forward_run);  // backward starts from what it keeps
  call();                                               // warm up
  run_copy();
  if (baseline) baseline();
  double spent = 0;
  while (m.times.size() < kMostRuns) {
    m.times.push_back(time_ms(call));
    if (baseline) m.baseline_times.push_back(time_ms(baseline));
    copy_times.push_back(time_ms(run_copy));
    spent +=
        (m.times.back() + (baseline ? m.baseline_times.back() : 0.0) + copy_times.back()) * 1e-3;
    const size_t n = m.times.size();
    if (n >= kEnoughRuns && spent >= 1.0) break;
    if (n >= kFewestRuns && spent >= seconds) break;
  }
  m.copy_gbps = static_cast<double>(copy.traffic()) / quantile(copy_times, 0.5) * 1e-6;
  if (row.baseline == Baseline::copy) m.baseline_times = copy_times;
  return m;
}

struct RowResult {
  Json json;
  std::vector<std::string> cells, training_cells, step_cells;
  cases::Status status = cases::Status::passed;
  double ratio = NAN;
};

std::string mebibytes(size_t bytes) { return format("%.2f", static_cast<double>(bytes) * 0x1p-20); }

// Numbers of a measured row: for JSON and for the tables.
void put_numbers(const SuiteRow& row, const Measurement& m, RowResult& result) {
  const double median = quantile(m.times, 0.5), flops = m.flops, bytes = m.bytes;
  // The roof of a case: it can be no quicker than its products at the product roof, nor than its
  // traffic at the copy roof.
  const double product_ms = flops / m.product_gflops * 1e-6,
               traffic_ms = bytes / m.copy_gbps * 1e-6;
  const double roof_percent = 100.0 * std::max(product_ms, traffic_ms) / median;
  const double baseline_ms = quantile(m.baseline_times, 0.5);
  result.ratio = baseline_ms / median;
  const double tokens = static_cast<double>(std::max<int64_t>(row.spec.num_real_tokens(), 1));
  const bool has_forward = row.baseline == Baseline::forward && !m.baseline_times.empty();

  Json& j = result.json;
  j["median_ms"] = median;
  j["min_ms"] = quantile(m.times, 0.0);
  j["p10"] = quantile(m.times, 0.1);
  j["p90"] = quantile(m.times, 0.9);
  j["n"] = m.times.size();
  j["flops"] = flops;
  j["bytes"] = bytes;
  j["gflops"] = flops / median * 1e-6;
  j["gbps"] = bytes / median * 1e-6;
  j["us_per_token"] = median * 1e3 / tokens;
  j["roof_percent"] = roof_percent;
  j["roof"] = product_ms > traffic_ms ? m.product : std::string("copy");
  j["roof_gflops"] = m.product_gflops;
  j["roof_gbps"] = m.copy_gbps;
  j["copy_percent"] = 100.0 * traffic_ms / median;
  const std::string baseline = row.baseline == Baseline::anchor ? row.anchor.name
                               : row.baseline == Baseline::ours
                                   ? row.other_name
                                   : std::string(name_of(row.baseline));
  j["baseline"] = m.baseline_times.empty() ? Json(nullptr) : Json(baseline);
  j["baseline_ms"] = number_or_null(baseline_ms);
  j["ratio"] = number_or_null(result.ratio);
  j["workspace_bytes"] = m.workspace_bytes;
  if (row.spec.op == Op::backward) j["saved_bytes"] = m.saved_bytes;
  if (has_forward) {
    j["forward_ms"] = baseline_ms;
    j["forward_and_backward_ms"] = baseline_ms + median;
    j["backward_per_forward"] = median / baseline_ms;
    result.training_cells = {row.label,
                             format("%.3f", baseline_ms),
                             format("%.3f", median),
                             format("%.3f", baseline_ms + median),
                             format("%.2f", (baseline_ms + median) * 1e3 / tokens),
                             format("%.2f", median / baseline_ms),
                             mebibytes(m.saved_bytes),
                             mebibytes(m.workspace_bytes)};
  }
  result.cells = {
      row.label,
      m.impl,
      format("%.3f", median),
      format("%.3f", quantile(m.times, 0.1)) + ".." + format("%.3f", quantile(m.times, 0.9)),
      std::to_string(m.times.size()),
      format("%.1f", flops / median * 1e-6),
      format("%.1f", bytes / median * 1e-6),
      format("%.0f%%", roof_percent) + " of " + j["roof"].get<std::string>(),
      m.baseline_times.empty() ? "-" : format("%.2f", result.ratio) + " x " + baseline};
  if (m.call_us > 0) j["call_us"] = m.call_us;
  if (row.is_step) result.step_cells = put_memory(row, m, j);
  for (const Anchor& other : row.more) {
    j["others"].push_back({{"name", other.name}, {"ms", other.ms}, {"ratio", other.ms / median}});
  }
}

// Rows that differ in lengths alone are checked once.
cases::Result check_reduced(const Case& small, const std::string& impl, int threads) {
  static std::map<std::string, cases::Result> known;
  const auto [at, is_new] = known.try_emplace(impl + " " + cases::canonical(small));
  if (is_new) at->second = cases::check(small, {.impl = impl, .threads = threads});
  return at->second;
}

cases::Result measure_on_cpu(const SuiteRow& row, const BenchOptions& options, int threads,
                             Measurement& m) {
  const Case small = reduced(row.spec);
  m.checked = cases::canonical(small);
  const std::string lack = cases::lack_of_memory(row.spec);
  if (!lack.empty()) return {cases::Status::failed, lack, {}};
  m.impl = chosen_implementation(row.spec, options.impl, DeviceType::cpu);
  const cases::Result result = check_reduced(small, m.impl, threads);
  if (result.status == cases::Status::passed) {
    const std::string checked = m.checked;
    m = measure(row, m.impl, options.impl, threads, options.seconds);
    m.checked = checked;
  }
  return result;
}

// Medians of this run's cases on the GPU.
std::map<std::string, double>& medians() {
  static std::map<std::string, double> known;
  return known;
}
// That of another case of ours, measured once in a run; NaN where it did not pass.
double median_of(const Case& c, const BenchOptions& options) {
  const auto [at, is_new] = medians().try_emplace(cases::canonical(c), NAN);
  if (is_new) {
    SuiteRow row{"", "", c};
    row.baseline = Baseline::ours;  // compared with nothing
    Measurement m;
    const cases::Result result =
        cases::guarded([&] { return measure_on_gpu(row, options.impl, options.seconds, m); });
    if (result.status == cases::Status::passed) at->second = quantile(m.times, 0.5);
  }
  return at->second;
}

RowResult run_row(const SuiteRow& row, const BenchOptions& options) {
  RowResult result;
  const int threads = row.threads > 0              ? row.threads
                      : options.common.threads > 0 ? options.common.threads
                                                   : num_threads();
  Measurement m;
  const cases::Result check = cases::guarded([&]() -> cases::Result {
    return options.common.device == DeviceType::cuda
               ? measure_on_gpu(row, options.impl, options.seconds, m)
               : measure_on_cpu(row, options, threads, m);
  });
  if (check.status == cases::Status::passed)
    medians()[cases::canonical(row.spec)] = quantile(m.times, 0.5);
  if (check.status == cases::Status::passed && row.other)
    m.baseline_times = {median_of(*row.other, options)};
  const std::string impl = !m.impl.empty()         ? m.impl
                           : !options.impl.empty() ? options.impl
                                                   : std::string("-");
  result.status = check.status;
  result.json = {{"suite", row.suite},
                 {"label", row.label},
                 {"case", cases::canonical(row.spec)},
                 {"impl", impl},
                 {"threads", threads},
                 {"checked", m.checked},
                 {"status", cases::name_of(check.status)},
                 {"reason", check.reason}};
  std::map<std::string, double> errors;  // the largest of every tensor
  for (const cases::TensorError& e : check.errors)
    errors[e.name] = std::max(errors[e.name], e.error);
  for (const auto& [name, error] : errors) result.json["errors"][name] = number_or_null(error);
  if (check.status == cases::Status::passed) {
    put_numbers(row, m, result);
  } else {
    result.cells = {row.label, impl, cases::name_of(check.status)};
  }
  return result;
}

std::vector<SuiteRow> select(const BenchOptions& options, std::vector<LeftOut>& left_out) {
  std::vector<SuiteRow> rows;
  const auto add = [&](const std::string& suite, const Case& c) {
    rows.push_back(
        {suite, cases::brief(c), c,
         options.common.device == DeviceType::cuda ? Baseline::copy : default_baseline(c), 0,
         options.common.device});
  };
  for (const std::string& line : options.lines) {
    for (const std::string& one : cases::expand(line)) add("command line", parse_argument(one));
  }
  for (const std::string& path : options.files) {
    for (const auto& s : cases::read_cases(path)) add(s.file, s.spec);
  }
  if (options.lines.empty() && options.files.empty()) {
    std::vector<SuiteRow> all = all_suites();
    if (!options.anchors.empty()) {
      const AnchorSuites more = anchor_suites(options.anchors);
      all.insert(all.end(), more.rows.begin(), more.rows.end());
      left_out = more.left_out;
    }
    std::erase_if(all, [&](const SuiteRow& r) { return r.device != options.common.device; });
    std::vector<std::string> suites = options.suites;
    if (suites.empty() && !options.list) {
      if (options.common.device == DeviceType::cuda)
        throw UsageError(
            "--suite: expected with --device cuda a name that `deltic bench --list "
            "--device cuda` prints (or cases), got none");
      suites = {options.quick ? "quick" : "cpu"};
    }
    for (const std::string& suite : suites) {
      const bool known =
          std::any_of(all.begin(), all.end(), [&](const auto& r) { return r.suite == suite; });
      if (!known)
        throw UsageError("--suite: expected a name that --list prints, got '" + suite + "'" +
                         (options.anchors.empty() && options.common.device == DeviceType::cuda
                              ? " (--anchors FILE adds the suites of a file, in --list too)"
                              : ""));
    }
    for (const SuiteRow& r : all) {
      if (suites.empty() || std::find(suites.begin(), suites.end(), r.suite) != suites.end())
        rows.push_back(r);
    }
  } else if (!options.suites.empty()) {
    throw UsageError("--suite: expected no cases beside it, got both");
  }
  for (const std::string& f : options.filters) {
    const bool is_in_label = std::any_of(rows.begin(), rows.end(), [&](const SuiteRow& r) {
      return r.label.find(f) != std::string::npos;
    });
    if (!is_in_label) cases::check_filter(f);
  }
  std::erase_if(rows, [&](const SuiteRow& r) {
    return !std::all_of(options.filters.begin(), options.filters.end(), [&](const std::string& f) {
      return cases::matches(r.spec, f) || r.label.find(f) != std::string::npos;
    });
  });
  // As in verify: an operation that has no implementation of that name has no case here.
  std::erase_if(rows, [&](const SuiteRow& r) {
    return !cases::may_run(r.spec.listed_op(), options.impl, options.common.device);
  });
  // What others are compared with comes first, and is measured once.
  std::stable_partition(rows.begin(), rows.end(), [](const SuiteRow& r) { return !r.other; });
  for (SuiteRow& r : rows) {
    if (options.seed < 0) continue;
    r.spec.seed = static_cast<uint64_t>(options.seed);
    if (r.other) r.other->seed = r.spec.seed;
  }
  return rows;
}

// Rows of one suite that differ in length only: time per token beside that of 4096 tokens.
void print_growth(const Report& report, const Json& list) {
  const auto is_growth = [](const Json& row) {
    return row["suite"].get<std::string>() == "growth" && row.contains("us_per_token");
  };
  for (const auto& row : list) {
    if (!is_growth(row)) continue;
    const Case c = cases::parse(row["case"].get<std::string>());
    for (const auto& other : list) {
      if (!is_growth(other)) continue;
      Case same = cases::parse(other["case"].get<std::string>());
      if (same.length != 4096) continue;
      same.length = c.length;
      if (!(same == c)) continue;
      report.print("  %-28s  %8.3f us per token, %.2f of that at T=4096\n",
                   row["label"].get<std::string>().c_str(), row["us_per_token"].get<double>(),
                   row["us_per_token"].get<double>() / other["us_per_token"].get<double>());
    }
  }
}

// The three lowest ratios of every suite.
void print_slowest(Report& report,
                   std::map<std::string, std::vector<std::pair<double, std::string>>> ratios) {
  for (auto& [suite, list] : ratios) {
    std::sort(list.begin(), list.end());
    if (list.size() > 3) list.resize(3);
    for (const auto& [ratio, label] : list) {
      report.print("  slowest of %s: %.2f  %s\n", suite.c_str(), ratio, label.c_str());
      report.summary()["slowest"][suite].push_back({{"label", label}, {"ratio", ratio}});
    }
  }
}

// What the file of anchors has and no suite measures.
void print_left_out(Report& report, const std::vector<LeftOut>& list) {
  if (!list.empty()) report.print("not measured, of the file of anchors\n");
  for (const LeftOut& x : list) {
    report.print("  %-36s  %d rows: %s\n", x.op.c_str(), x.rows, x.reason.c_str());
    report.summary()["left_out"].push_back({{"op", x.op}, {"rows", x.rows}, {"reason", x.reason}});
  }
}

}  // namespace

int run_bench(const BenchOptions& given) {
  BenchOptions options = given;
  if (options.seconds == 0) options.seconds = options.quick ? 0.5 : 6.0;
  check_environment();
  check_impl_name(options.impl);
  // Wrong arguments are named before a machine that lacks something.
  std::vector<LeftOut> left_out;
  const std::vector<SuiteRow> rows = select(options, left_out);
  if (rows.empty()) throw UsageError("bench: no case matched");
  if (!options.list) check_device(options.common);
  Report report(options.common, "deltic.bench/1");
  if (options.list) {
    std::string suite;
    for (const SuiteRow& r : rows) {
      if (r.suite != suite) report.print("%s\n", r.suite.c_str());
      suite = r.suite;
      report.print("  %-36s  %s\n", r.label.c_str(), cases::brief(r.spec).c_str());
    }
    print_left_out(report, left_out);
    return kExitPass;
  }
  std::vector<std::vector<std::string>> table = {
      {"row", "implementation", "median ms", "p10..p90", "n", "GFLOP/s", "GB/s", "roof", "ratio"}};
  std::vector<std::vector<std::string>> training = {{"row", "forward ms", "backward ms", "both ms",
                                                     "us/token", "backward/forward", "saved MiB",
                                                     "workspace MiB"}};
  std::vector<std::vector<std::string>> steps = {kStepHeader};
  int failed = 0, skipped = 0;
  std::vector<std::string> reasons;
  std::map<std::string, std::pair<double, int>> means;
  std::map<std::string, std::vector<std::pair<double, std::string>>> ratios;  // by suite
  {
    Progress progress("bench", rows.size());
    for (const SuiteRow& row : rows) {
      progress.step(row.label);
      RowResult r = run_row(row, options);
      failed += r.status == cases::Status::failed ? 1 : 0;
      skipped += r.status == cases::Status::skipped ? 1 : 0;
      if (r.status != cases::Status::passed) {
        reasons.push_back(std::string(cases::name_of(r.status)) + "  " + row.label + "\n        " +
                          r.json["reason"].get<std::string>());
      }
      if (std::isfinite(r.ratio)) {
        auto& [sum, count] = means[row.suite + " against " + name_of(row.baseline)];
        sum += std::log(r.ratio);
        ++count;
        ratios[row.suite].emplace_back(r.ratio, row.label);
      }
      report.cases().push_back(std::move(r.json));
      table.push_back(std::move(r.cells));
      if (!r.training_cells.empty()) training.push_back(std::move(r.training_cells));
      if (!r.step_cells.empty()) steps.push_back(std::move(r.step_cells));
      // A run on a GPU that is cut short keeps its rows.
      if (options.common.device == DeviceType::cuda) report.save_part();
    }
  }
  print_table(report, table);
  report.print("\n");
  for (const auto* more : {&training, &steps}) {
    if (more->size() == 1) continue;
    print_table(report, *more);
    report.print("\n");
  }
  for (const std::string& reason : reasons) report.print("  %s\n", reason.c_str());
  report.summary() = {{"rows", rows.size()},
                      {"failed", failed},
                      {"skipped", skipped},
                      {"geometric_mean_ratio", Json::object()}};
  for (const auto& [name, mean] : means) {
    const double ratio = std::exp(mean.first / mean.second);
    report.summary()["geometric_mean_ratio"][name] = ratio;
    report.print("  geometric mean, %s: %.2f\n", name.c_str(), ratio);
  }
  if (options.common.device == DeviceType::cuda) print_slowest(report, ratios);
  print_growth(report, report.cases());
  print_left_out(report, left_out);
  report.print(
      options.common.device == DeviceType::cuda
          ? "  ratio: the other's time / ours. copy: one that moves as many bytes.\n"
          : "  ratio: baseline time / ours. recurrence: our decode, token by token, same threads;\n"
            "  forward: the forward call whose gradients a backward row computes.\n");
  report.write();
  return failed == 0 ? kExitPass : kExitFail;
}

}  // namespace deltic::cli
