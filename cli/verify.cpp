// `deltic verify`: every case on every implementation that takes it, against the oracle.
#include <algorithm>
#include <map>
#include <set>

#include "cases/check.h"
#include "cases/features.h"
#include "commands.h"

namespace deltic::cli {
namespace {

using cases::Case;
using cases::Result;
using cases::SourcedCase;
using cases::Status;

struct Count {
  int passed = 0, failed = 0, skipped = 0;
  double worst = 0;  // largest error / budget
  void add(const Result& r) {
    (r.status == Status::passed ? passed : r.status == Status::failed ? failed : skipped) += 1;
    for (const cases::TensorError& e : r.errors) {
      if (e.budget > 0) worst = std::max(worst, e.error / e.budget);
    }
  }
  std::vector<std::string> cells(const std::string& name) const {
    return {name, std::to_string(passed), std::to_string(failed), std::to_string(skipped),
            passed + failed > 0 ? format("%.2f", worst) : "-"};
  }
};

std::vector<DeviceType> devices_of(const VerifyOptions& options) {
  if (!options.both_devices) return {options.common.device};
  return {DeviceType::cpu, DeviceType::cuda};
}

// Who names cases has chosen already.
bool is_few(const VerifyOptions& options) {
  return options.quick && options.filters.empty() && options.files.empty();
}

// Of every operation and feature the smallest case that has tokens, in the order of the list.
std::vector<SourcedCase> few_cases(const std::vector<SourcedCase>& all) {
  const auto size = [](const Case& c) {
    return c.num_batches() * c.num_tokens() * c.HV * (c.K + c.V);
  };
  std::map<std::string, size_t> smallest;
  for (size_t i = 0; i < all.size(); ++i) {
    const Case& c = all[i].spec;
    if (c.num_batches() * c.num_tokens() < 2) continue;
    const std::string op = std::string(name(c.op)) + (c.gradient ? "_backward" : "");
    for (const cases::Feature& row : cases::features()) {
      if (!row.fits(c)) continue;
      const auto [known, is_new] = smallest.emplace(op + " " + row.name, i);
      if (!is_new && size(c) < size(all[known->second].spec)) known->second = i;
    }
  }
  std::set<size_t> chosen;
  for (const auto& [group, i] : smallest) chosen.insert(i);
  std::vector<SourcedCase> few;
  for (const size_t i : chosen) few.push_back(all[i]);
  return few;
}

std::vector<SourcedCase> select(const VerifyOptions& options) {
  for (const std::string& f : options.filters) cases::check_filter(f);
  std::vector<SourcedCase> all;
  for (const std::string& path : options.files) {
    const auto list = cases::read_cases(path);
    all.insert(all.end(), list.begin(), list.end());
  }
  if (options.files.empty()) all = cases::built_in_cases();
  const std::vector<DeviceType> devices = devices_of(options);
  std::vector<SourcedCase> chosen;
  for (SourcedCase& s : all) {
    if (options.seed >= 0) s.spec.seed = static_cast<uint64_t>(options.seed);
    const bool fits = std::all_of(options.filters.begin(), options.filters.end(),
                                  [&](const std::string& f) { return cases::matches(s.spec, f); });
    const bool may_run = std::any_of(devices.begin(), devices.end(), [&](DeviceType device) {
      return cases::may_run(s.spec.listed_op(), options.impl, device);
    });
    if (fits && may_run) chosen.push_back(std::move(s));
  }
  if (is_few(options)) chosen = few_cases(chosen);
  if (!chosen.empty() && chosen.size() < static_cast<size_t>(options.part)) {
    throw UsageError("--share: expected I of at most " + std::to_string(chosen.size()) +
                     ", the cases chosen, got " + std::to_string(options.part));
  }
  std::vector<SourcedCase> share;
  const auto parts = static_cast<size_t>(options.parts);
  for (size_t i = static_cast<size_t>(options.part) - 1; i < chosen.size(); i += parts)
    share.push_back(std::move(chosen[i]));
  return share;
}

using Results = std::vector<std::pair<std::string, Result>>;

// One case on one device: a result per implementation that the operation has there. `expected` is
// filled where somebody takes the case, for the other device too.
void run_on(const Case& c, DeviceType device, const VerifyOptions& options,
            std::optional<cases::Expected>& expected, Results& results) {
  std::optional<cases::Instance> instance;
  std::vector<Choice> choices;
  const Result asked = cases::guarded([&]() -> Result {
    // Asked about shapes first: a case that nobody takes needs no memory.
    choices = cases::Instance::shapes_of(c, device).explain();
    const bool taken = std::any_of(choices.begin(), choices.end(), [&](const Choice& x) {
      return x.accepts && (options.impl.empty() || x.name == options.impl);
    });
    if (!taken) return {};
    const std::string lack = cases::lack_of_memory(c, device);
    if (!lack.empty()) return {Status::failed, lack, {}};
    instance.emplace(c, true, cases::Place{.device = device});
    return {};
  });
  for (const std::string& impl : cases::implementation_names(c.listed_op(), options.impl, device)) {
    if (asked.status != Status::passed) {
      results.push_back({impl, asked});
      continue;
    }
    const auto choice = std::find_if(choices.begin(), choices.end(),
                                     [&](const Choice& x) { return x.name == impl; });
    if (!choice->accepts) {
      results.push_back({impl, {Status::skipped, choice->sentence, {}}});
      continue;
    }
    Result oracle = cases::guarded([&]() -> Result {
      if (!expected) expected = cases::expect(*instance);
      return {};
    });
    if (oracle.status != Status::passed) {
      oracle.status = Status::failed;
      oracle.reason = "oracle: " + oracle.reason;
      results.push_back({impl, oracle});
      continue;
    }
    results.emplace_back(impl, cases::check(*instance, *expected,
                                            {.impl = impl, .threads = options.common.threads}));
  }
}

Results run_case(const Case& c, const VerifyOptions& options) {
  Results results;
  std::optional<cases::Expected> expected;
  for (const DeviceType device : devices_of(options)) run_on(c, device, options, expected, results);
  return results;
}

Json to_json(const SourcedCase& s, const std::string& impl, const Result& r) {
  Json j = {
      {"case", cases::canonical(s.spec)},   {"file", s.file},         {"impl", impl},
      {"status", cases::name_of(r.status)}, {"reason", r.reason},     {"error", Json::object()},
      {"budget", Json::object()},           {"plain", Json::object()}};
  for (const cases::TensorError& e : r.errors) {
    j["error"][e.name] = number_or_null(e.error);
    j["budget"][e.name] = number_or_null(e.budget);
    j["plain"][e.name] = number_or_null(e.plain);
  }
  return j;
}

// Instruction sets and devices that this machine cannot answer for.
void print_not_run(Report& report) {
  for (const ImplementationInfo& i : cases::not_run_here()) {
    report.print("not run here: %s (%s)\n", i.name.c_str(), i.sentence.c_str());
    report.summary()["not_run_here"][i.name] = i.sentence;
  }
}

}  // namespace

int run_verify(const VerifyOptions& options) {
  check_environment();
  check_impl_name(options.impl);
  // As in bench: wrong arguments are named before a machine that lacks something.
  const std::vector<SourcedCase> chosen = select(options);
  if (chosen.empty()) throw UsageError("verify: no case matched");
  if (!options.list) check_device(options.common);
  Report report(options.common, "deltic.verify/1");
  if (options.list) {
    for (const SourcedCase& s : chosen) report.print("%s\n", cases::canonical(s.spec).c_str());
    return kExitPass;
  }

  Count total;
  std::map<std::string, Count> by_impl;
  std::vector<std::string> impl_order;
  const auto rows = cases::features();
  std::vector<Count> by_feature(rows.size());
  std::map<std::string, int> refusals;
  {
    Progress progress("verify", chosen.size());
    for (const SourcedCase& s : chosen) {
      progress.step(cases::canonical(s.spec));
      for (const auto& [impl, result] : run_case(s.spec, options)) {
        total.add(result);
        if (by_impl.find(impl) == by_impl.end()) impl_order.push_back(impl);
        by_impl[impl].add(result);
        for (size_t i = 0; i < rows.size(); ++i) {
          if (rows[i].fits(s.spec)) by_feature[i].add(result);
        }
        if (result.status == Status::failed) {
          report.print("FAIL %s  %s\n     %s\n", impl.c_str(), cases::canonical(s.spec).c_str(),
                       result.reason.c_str());
        }
        if (result.status == Status::skipped) ++refusals[impl + ": " + result.reason];
        report.cases().push_back(to_json(s, impl, result));
      }
    }
  }
  std::vector<std::vector<std::string>> table = {
      {"feature", "passed", "failed", "skipped", "worst"}};
  for (size_t i = 0; i < rows.size(); ++i) {
    const Count& n = by_feature[i];
    if (n.passed + n.failed + n.skipped > 0) table.push_back(n.cells(rows[i].name));
  }
  table.push_back({""});
  table.push_back({"implementation", "passed", "failed", "skipped", "worst"});
  for (const std::string& impl : impl_order) table.push_back(by_impl[impl].cells(impl));
  print_table(report, table);
  report.print("\n  worst: the largest error of any tensor as a fraction of its budget\n");
  if (!refusals.empty()) report.print("\nskipped, and why\n");
  for (const auto& [why, count] : refusals) report.print("  %5d  %s\n", count, why.c_str());

  report.summary() = {{"passed", total.passed},
                      {"failed", total.failed},
                      {"skipped", total.skipped},
                      {"worst", number_or_null(total.worst)}};
  for (size_t i = 0; i < rows.size(); ++i) {
    const Count& n = by_feature[i];
    if (n.passed + n.failed + n.skipped == 0) continue;
    report.summary()["features"][rows[i].name] = {{"passed", n.passed},
                                                  {"failed", n.failed},
                                                  {"skipped", n.skipped},
                                                  {"worst", number_or_null(n.worst)}};
  }
  report.print("\n");
  print_not_run(report);
  if (options.parts > 1) {
    const std::string share = std::to_string(options.part) + "/" + std::to_string(options.parts);
    report.print("share %s: %zu cases\n", share.c_str(), chosen.size());
    report.summary()["share"] = share;
  }
  report.print("%d passed, %d failed, %d skipped\n", total.passed, total.failed, total.skipped);
  if (is_few(options)) report.print("quick: %zu cases; --all runs every one\n", chosen.size());
  report.write();
  return total.failed == 0 ? kExitPass : kExitFail;
}

}  // namespace deltic::cli
