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
  for (const Json& n : row.at("seqs")) {
    text += (text.empty() ? "" : ",") + std::to_string(n.get<int64_t>());
  }
  return text;
}

std::string heads(const Json& row) {
  const int64_t H = row.at("H").get<int64_t>();
  const int64_t HV = row.value("HV", H);
  return " H=" + std::to_string(H) + " HV=" + std::to_string(HV);
}

std::string number(const Json& row, const char* key) {
  return std::to_string(row.at(key).get<int64_t>());
}

std::string label_of(const Json& row) {
  const Json& seqs = row.at("seqs");
  const bool equal = seqs.size() > 1 && std::all_of(seqs.begin(), seqs.end(),
                                                    [&](const Json& n) { return n == seqs[0]; });
  const std::string text =
      equal ? std::to_string(seqs.size()) + " x " + std::to_string(seqs[0].get<int64_t>())
            : lengths(row);
  return text + heads(row);
}

// The smallest of the times that a row has under these keys.
Anchor best_of(const Json& row, const std::vector<std::pair<const char*, const char*>>& keys) {
  Anchor best{"", INFINITY};
  for (const auto& [key, name] : keys) {
    if (row.contains(key) && row.at(key).get<double>() < best.ms)
      best = {name, row.at(key).get<double>()};
  }
  return best;
}

// The rows of one file, suite by suite.
class Anchors {
 public:
  void add_group(const Json& group) {
    for (const Json& row : group.at("rows")) {
      const std::string op = row.at("op").get<std::string>();
      if (op == "kda_forward" && row.contains("flashkda")) add_kda(row);
      if (op == "gdn_forward" && row.contains("flashinfer_0_7_2")) add_gdn(row);
      if (op == "gdn_forward" && row.contains("fla_before")) add_layer(row);
      if (op == "kda_scores_inverse") add_scores(row);
      if ((op == "gdn_decode" || op == "kda_decode") && row.contains("flashinfer_us"))
        add_decode(row, op == "kda_decode");
      if (op == "kda_decode" && row.contains("fla_graph")) add_decode(row, true);
    }
  }
  std::vector<SuiteRow> rows;

 private:
  SuiteRow& add(const std::string& suite, const std::string& label, const std::string& line,
                const Anchor& anchor) {
    rows.push_back({suite, label, cases::parse(line), Baseline::anchor, 0, DeviceType::cuda});
    rows.back().anchor = anchor;
    return rows.back();
  }

  void add_kda(const Json& row) {
    const Anchor anchor{"FlashKDA", row.at("flashkda").get<double>()};
    const std::string shape = " seqs=" + lengths(row) + heads(row) + kWide +
                              " gdtype=bf16 beta=sigmoid l2norm=1 init=1 final=1 state=vk";
    for (const std::string gates : {"random", "slow"}) {
      SuiteRow& r = add("kda_forward_" + gates, label_of(row),
                        "forward gate=channel form=bounded gates=" + gates + shape, anchor);
      if (row.contains("cudnn_" + gates))
        r.more.push_back({"cuDNN", row.at("cudnn_" + gates).get<double>()});
    }
    // FlashKDA has bounded gates only: its time is that of the same shape.
    if (row.at("seqs").size() == 1 && row.at("seqs")[0] == 8192) {
      add("kda_forward_softplus", label_of(row),
          "forward gate=channel form=softplus gates=softplus" + shape, anchor);
    }
  }

  void add_gdn(const Json& row) {
    const Anchor anchor = best_of(row, {{"flashinfer_0_7_2", "FlashInfer 0.7.2"},
                                        {"flashinfer", "FlashInfer 0.6.13"},
                                        {"flashqla", "FlashQLA"},
                                        {"fla", "fla"}});
    const std::string shape =
        " seqs=" + lengths(row) + heads(row) + kWide + " init=0 final=1 state=vk";
    const std::string line = "forward gate=head gates=slow" + shape;
    add("gdn_forward", label_of(row), line, anchor);
    // Every sixth: 29 rows over all lengths and heads.
    if (gdn_rows_++ % 6 != 0) return;
    SuiteRow& r = add("delta_forward", label_of(row), "forward gate=none" + shape, {});
    r.baseline = Baseline::ours;
    r.other = cases::parse(line);
    r.other_name = "GDN";
  }

  void add_layer(const Json& row) {
    add("layers", "GDN 8 x 1024, 8 heads, K = V = 64",
        "forward gate=head dense=" + number(row, "B") + "x" + number(row, "T") + heads(row) +
            " K=" + number(row, "K") + " V=" + number(row, "V") + " dtype=bf16 l2norm=1",
        {"fla", row.at("fla_before").get<double>()});
  }

  // Scores of k and of q with decays per channel, and the inverse.
  void add_scores(const Json& row) {
    const std::string sizes = " H=" + number(row, "H") + " K=" + number(row, "K");
    add("blocks",
        "scores and inverse, B=" + number(row, "B") + " T=" + number(row, "T") + sizes + " f16",
        "scores_inverse gate=channel dense=" + number(row, "B") + "x" + number(row, "T") + sizes +
            " dtype=f16 odtype=f16",
        best_of(row, {{"fla_subchunk", "fla"}, {"fla_token_parallel", "fla"}}));
  }

  void add_decode(const Json& row, bool is_channel) {
    const bool is_flashinfer = row.contains("flashinfer_us");
    const std::string gate = row.value("gate", "");
    const bool is_bf16 = row.at("state") == "bfloat16",
               is_k_first = row.value("layout", "") == "k_first";
    const bool is_raw = !is_channel || gate.find("raw") != std::string::npos;
    std::string line =
        "decode dense=" + number(row, "B") + "x1 K=128 V=128 dtype=bf16 pool=inplace";
    line += is_channel ? " gate=channel gdtype=bf16 H=32 HV=32" : " gate=head H=16 HV=32";
    line += std::string(" state=") + (is_k_first ? "kv" : "vk") + (is_bf16 ? " sdtype=bf16" : "");
    if (is_raw) {
      line += " beta=sigmoid l2norm=1";
      line += is_channel ? " form=bounded" : " form=softplus gates=softplus";
    }
    add("decode",
        std::string(is_channel ? "KDA" : "GDN") + " B=" + number(row, "B") +
            (is_bf16 ? " bf16 " : " fp32 ") + (is_k_first ? "K-first" : "V-first") +
            (is_channel && is_raw ? " raw gate" : ""),
        line,
        is_flashinfer ? Anchor{"FlashInfer 0.7.2", row.at("flashinfer_us").get<double>() * 1e-3}
                      : Anchor{"fla", row.at("fla_graph").get<double>()});
  }

  static constexpr const char* kWide = " K=128 V=128 dtype=bf16";
  int gdn_rows_ = 0;
};

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
  Anchors anchors;
  try {
    for (const Json& group : document.at("groups")) anchors.add_group(group);
  } catch (const Json::exception& e) {
    throw UsageError("--anchors: expected rows of times, got " + std::string(e.what()));
  }
  std::stable_sort(anchors.rows.begin(), anchors.rows.end(),
                   [](const SuiteRow& a, const SuiteRow& b) { return a.suite < b.suite; });
  return anchors.rows;
}

}  // namespace deltic::cli
