// `deltic bench --compare`: two results side by side; a loss beyond threshold and spread fails.
#include <charconv>
#include <map>

#include "commands.h"

namespace deltic::cli {
namespace {

Json load(const std::string& path) {
  const auto refuse = [&](const std::string& what) {
    throw UsageError("--compare: expected a result of deltic bench, got '" + path + "', " + what);
  };
  Json j = read_json(path, "--compare", "a result of deltic bench");
  const bool has_schema = j.is_object() && j.contains("schema") && j["schema"].is_string();
  const std::string schema = has_schema ? j["schema"].get<std::string>() : "";
  if (schema.rfind("deltic.bench/", 0) != 0)
    refuse(has_schema ? "whose schema is " + schema : "which has no schema of deltic");
  if (!j.contains("cases") || !j["cases"].is_array() || !j.contains("machine") ||
      !j["machine"].is_object()) {
    refuse("which has no cases or no machine");
  }
  for (size_t i = 0; i < j["cases"].size(); ++i) {
    const Json& row = j["cases"][i];
    const std::string which = "whose case " + std::to_string(i + 1) + " has ";
    const auto need_text = [&](const char* key) {
      if (!row.is_object() || !row.contains(key) || !row[key].is_string())
        refuse(which + "no text " + key);
    };
    need_text("suite"), need_text("case");
    if (row.contains("threads") && !row["threads"].is_number_integer())
      refuse(which + "threads that are no whole number");
    // One that did not pass has a status and no times.
    if (!row.contains("median_ms")) {
      need_text("status");
      continue;
    }
    for (const char* key : {"median_ms", "p10", "p90"}) {
      if (!row.contains(key) || !row[key].is_number()) refuse(which + "no number " + key);
    }
  }
  return j;
}

std::string key_of(const Json& row) {
  return row.value("suite", "") + "\n" + row.value("case", "") + "\n" +
         std::to_string(row.value("threads", 0));
}

}  // namespace

double parse_percent(const std::string& text) {
  const size_t end = !text.empty() && text.back() == '%' ? text.size() - 1 : text.size();
  double x = 0;
  const auto [stop, error] = std::from_chars(text.data(), text.data() + end, x);
  if (error != std::errc() || stop != text.data() + end || !(x >= 0)) {
    throw UsageError("--threshold: expected per cent such as 5%, got '" + text + "'");
  }
  return x / 100.0;
}

int run_compare(const BenchOptions& options) {
  const double threshold = parse_percent(options.threshold);
  const Json before = load(options.compare[0]), after = load(options.compare[1]);
  Report report(options.common, "deltic.compare/1");
  std::map<std::string, const Json*> old_rows;
  for (const Json& row : before["cases"]) {
    if (row.contains("median_ms")) old_rows[key_of(row)] = &row;
  }
  if (before["machine"].value("cpu", "") != after["machine"].value("cpu", "")) {
    report.print("note: the results come from different machines\n");
  }
  std::vector<std::vector<std::string>> table = {{"row", "old ms", "new ms", "change", ""}};
  int same = 0, losses = 0, gains = 0, unknown = 0;
  for (const Json& row : after["cases"]) {
    if (!row.contains("median_ms")) continue;
    const auto found = old_rows.find(key_of(row));
    if (found == old_rows.end()) {
      ++unknown;
      continue;
    }
    const Json& old = *found->second;
    const double from = old["median_ms"].get<double>(), to = row["median_ms"].get<double>();
    const double change = to / from - 1.0;
    // Significant: more than the threshold, and the middle 80 % of the runs do not overlap.
    const bool loss = change > threshold && row["p10"].get<double>() > old["p90"].get<double>();
    const bool gain = change < -threshold && row["p90"].get<double>() < old["p10"].get<double>();
    (loss ? losses : gain ? gains : same) += 1;
    if (!loss && !gain) continue;
    table.push_back({row.value("label", row.value("case", "")), format("%.3f", from),
                     format("%.3f", to), format("%+.1f%%", 100 * change), loss ? "LOSS" : "gain"});
    report.cases().push_back({{"suite", row["suite"]},
                              {"case", row["case"]},
                              {"old_ms", from},
                              {"new_ms", to},
                              {"change", change},
                              {"verdict", loss ? "loss" : "gain"}});
  }
  if (same + losses + gains == 0) throw UsageError("--compare: no row is in both results");
  if (table.size() > 1) print_table(report, table);
  report.print(
      "%d slower, %d quicker, %d unchanged within %s and spread, %d without a counterpart\n",
      losses, gains, same, options.threshold.c_str(), unknown);
  report.summary() = {
      {"losses", losses}, {"gains", gains}, {"unchanged", same}, {"unmatched", unknown}};
  report.write();
  return losses == 0 ? kExitPass : kExitFail;
}

}  // namespace deltic::cli
