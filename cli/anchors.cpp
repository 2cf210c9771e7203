// Suites from a file of other libraries' times: every row becomes a case with that time as
// baseline.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>

#include "report.h"
#include "suites.h"

namespace deltic::cli {
namespace {

std::string lengths(const Json& row) {
  std::string text;
  for (const Json& n : row["seqs"]) {
    text += (text.empty() ? "" : ",") + std::to_string(n.get<int64_t>());
  }
  return text;
}

std::string heads(const Json& row) {
  const int64_t H = row["H"].get<int64_t>();
  const int64_t HV = row.value("HV", H);
  return " H=" + std::to_string(H) + " HV=" + std::to_string(HV);
}

std::string label_of(const Json& row) {
  const Json& seqs = row["seqs"];
  const bool equal = seqs.size() > 1 && std::all_of(seqs.begin(), seqs.end(),
                                                    [&](const Json& n) { return n == seqs[0]; });
  const std::string text =
      equal ? std::to_string(seqs.size()) + " x " + std::to_string(seqs[0].get<int64_t>())
            : lengths(row);
  return text + heads(row);
}

// The smallest of the times that a row has under these names.
std::pair<std::string, double> best_of(const Json& row, std::initializer_list<const char*> names) {
  std::pair<std::string, double> best{"", INFINITY};
  for (const char* name : names) {
    if (row.contains(name) && row[name].get<double>() < best.second)
      best = {name, row[name].get<double>()};
  }
  return best;
}

}  // namespace

std::vector<SuiteRow> anchor_suites(const std::string& path) {
  std::ifstream in(path);
  if (!in) throw UsageError("--anchors: expected a file, got '" + path + "'");
  Json document;
  try {
    document = Json::parse(in);
  } catch (const Json::exception& e) {
    throw UsageError("--anchors: expected JSON, got " + std::string(e.what()));
  }
  std::vector<SuiteRow> rows;
  const auto add = [&](const std::string& suite, const std::string& label, const std::string& line,
                       const std::pair<std::string, double>& anchor) {
    rows.push_back(
        {suite, label, cases::parse(line), Baseline::anchor, 0, anchor.first, anchor.second});
  };
  constexpr const char* kWide = " K=128 V=128 dtype=bf16";
  for (const Json& group : document["groups"]) {
    for (const Json& row : group["rows"]) {
      const std::string op = row["op"].get<std::string>();
      if (op == "kda_forward" && row.contains("flashkda")) {
        const std::pair<std::string, double> anchor{"FlashKDA", row["flashkda"].get<double>()};
        const std::string shape = " seqs=" + lengths(row) + heads(row) + kWide +
                                  " gdtype=bf16 beta=sigmoid l2norm=1 init=1 final=1 state=vk";
        for (const char* gates : {"random", "slow"}) {
          add("kda_forward_" + std::string(gates), label_of(row),
              "forward gate=channel form=bounded gates=" + std::string(gates) + shape, anchor);
        }
        add("kda_forward_softplus", label_of(row),
            "forward gate=channel form=softplus gates=softplus" + shape, anchor);
      }
      if (op == "gdn_forward" && row.contains("flashinfer_0_7_2")) {
        const auto anchor = best_of(row, {"flashinfer_0_7_2", "flashinfer", "flashqla", "fla"});
        const std::string shape =
            " seqs=" + lengths(row) + heads(row) + kWide + " init=0 final=1 state=vk";
        add("gdn_forward", label_of(row), "forward gate=head gates=slow" + shape, anchor);
        add("delta_forward", label_of(row), "forward gate=none" + shape, anchor);
      }
    }
  }
  std::stable_sort(rows.begin(), rows.end(),
                   [](const SuiteRow& a, const SuiteRow& b) { return a.suite < b.suite; });
  return rows;
}

}  // namespace deltic::cli
