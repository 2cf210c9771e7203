// Suites from a file of other libraries' times: every row becomes a case with that time as
// baseline.
#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <string_view>

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

// Tokens of a row whose `seqs` say "8k_1seq"; 0 where it has several sequences.
int64_t one_sequence(const Json& row) {
  const std::string text = row.at("seqs").get<std::string>();
  int64_t thousands = 0;
  const char* end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, thousands);
  return error == std::errc() && std::string_view(rest, end) == "k_1seq" ? 1024 * thousands : 0;
}

// A row that says B and T, with its sequences as a list.
Json dense(const Json& row) {
  Json r = row;
  if (!r.contains("seqs"))
    r["seqs"] = std::vector<int64_t>(row.at("B").get<size_t>(), row.at("T").get<int64_t>());
  return r;
}

// flash-linear-attention's training step, with the memory that it took beyond the inputs.
Anchor fla_of(const Json& row) {
  return {row.at("keep_all").get<bool>() ? "fla, keeps all" : "fla",
          row.at("fla_forward_backward").get<double>(),
          row.value("fla_peak_extra_MiB", 0.0) * 0x1p20};
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

// Why a row is no case of a suite.
std::string reason_to_leave_out(const std::string& op) {
  const auto has = [&](const char* part) { return op.find(part) != std::string::npos; };
  if (has("backward")) return "sequences whose lengths the file does not say";
  if (has("forward") || has("decode"))
    return "not the call that is measured, or slower than the time it is compared with";
  return "an operation that bench does not know";
}

// The rows of one file, suite by suite.
class Anchors {
 public:
  void add_row(const Json& row) {
    const std::string op = row.at("op").get<std::string>();
    const bool is_decode = op == "gdn_decode" || op == "kda_decode";
    if (op == "kda_forward" && row.contains("flashkda")) {
      add_kda(row);
    } else if (op == "gdn_forward" && row.contains("flashinfer_0_7_2")) {
      add_gdn(row);
    } else if (op == "gdn_forward" && row.contains("fla_before")) {
      add_layer(row);
    } else if (op == "kda_backward_log_form") {
      add_kda_backward(row);
    } else if (op == "gdn_backward" && row.at("seqs").is_array()) {
      add_gdn_backward(row, {"FlashQLA 0.1.3", row.at("flashqla_0_1_3").get<double>()});
    } else if (op == "gdn_backward" && row.contains("lengths")) {
      Json several = row;
      several["seqs"] = row.at("lengths");
      add_gdn_backward(several, best_of(row, {{"flashqla", "FlashQLA"}, {"fla", "fla"}}),
                       "gdn_backward_packed");
    } else if (const int64_t tokens = op == "gdn_backward" ? one_sequence(row) : 0; tokens > 0) {
      Json one = row;
      one["seqs"] = {tokens};
      add_gdn_backward(one, best_of(row, {{"flashqla", "FlashQLA"}, {"fla", "fla"}}));
    } else if (op == "kda_train_bounded_gate" || op == "kda_train_softplus_gate") {
      add_kda_step(row, op == "kda_train_softplus_gate");
    } else if (op == "delta_train") {
      add_step("DeltaNet " + label_of(dense(row)), "gate=none l2norm=1", row, fla_of(row));
    } else if (op == "kda_forward_backward_log_form") {
      const std::string gates = row.at("gate").get<std::string>();
      add_step("KDA " + label_of(row) + " log decay, " + gates, "gate=channel gates=" + gates, row,
               {"cuDNN", row.at("cudnn").get<double>()});
    } else if (op == "gdn_forward_backward") {
      add_step("GDN " + label_of(row), "gate=head gates=slow", row,
               {"FlashQLA 0.1.3", row.at("flashqla_0_1_3").get<double>()});
    } else if (op == "kda_scores_inverse") {
      add_scores(row);
    } else if (is_decode && row.contains("flashinfer_us")) {
      add_decode(row, op == "kda_decode", 1);
    } else if (op == "kda_decode" && row.contains("fla_graph")) {
      add_decode(row, true, 1);
    } else if (op == "gdn_decode_tokens" || op == "kda_decode_tokens") {
      add_decode(row, op == "kda_decode_tokens", row.at("tokens").get<int64_t>());
    } else {
      leave_out(op);
    }
  }
  AnchorSuites result;

 private:
  SuiteRow& add(const std::string& suite, const std::string& label, const std::string& line,
                const Anchor& anchor) {
    result.rows.push_back(
        {suite, label, cases::parse(line), Baseline::anchor, 0, DeviceType::cuda});
    result.rows.back().anchor = anchor;
    return result.rows.back();
  }

  void leave_out(const std::string& op) {
    auto at = std::find_if(result.left_out.begin(), result.left_out.end(),
                           [&](const LeftOut& x) { return x.op == op; });
    if (at == result.left_out.end())
      at = result.left_out.insert(at, {op, 0, reason_to_leave_out(op)});
    ++at->rows;
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

  // Gradients, from the inputs alone.
  void add_kda_backward(const Json& row) {
    const std::string gates = row.at("gate").get<std::string>();
    add("kda_backward", label_of(row) + " " + gates,
        "backward gate=channel gates=" + gates + " seqs=" + lengths(row) + heads(row) + kWide +
            " dfinal=0 save=none",
        {"cuDNN", row.at("cudnn").get<double>()});
  }
  // A shape that is there already gets a further time.
  void add_gdn_backward(const Json& row, const Anchor& anchor,
                        const std::string& suite = "gdn_backward") {
    const std::string label = label_of(row);
    const auto at = std::find_if(result.rows.begin(), result.rows.end(), [&](const SuiteRow& r) {
      return r.suite == suite && r.label == label;
    });
    if (at != result.rows.end()) {
      at->more.push_back(anchor);
      return;
    }
    add(suite, label,
        "backward gate=head gates=slow seqs=" + lengths(row) + heads(row) + kWide +
            " dfinal=0 save=none",
        anchor);
  }

  // A training step as the Python package runs it on CUDA: forward that keeps nothing, and backward
  // from the inputs. The quickest of several times of one case is what it is compared with.
  void add_step(const std::string& label, const std::string& options, const Json& row,
                const Anchor& anchor) {
    const Json r = dense(row);
    const std::string length = std::to_string(r.at("seqs").at(0).get<int64_t>());
    const std::string line = "backward dense=" + std::to_string(r.at("seqs").size()) + "x" +
                             length + heads(r) + kWide + " dfinal=0 save=none " + options;
    const auto at = std::find_if(result.rows.begin(), result.rows.end(), [&](const SuiteRow& x) {
      return x.is_step && x.spec == cases::parse(line);
    });
    if (at == result.rows.end()) {
      add("train", label, line, anchor).is_step = true;
      return;
    }
    at->more.push_back(anchor);
    if (anchor.ms < at->anchor.ms) std::swap(at->anchor, at->more.back());
  }
  void add_kda_step(const Json& row, bool is_softplus) {
    const std::string gates = is_softplus ? "softplus" : row.value("gate", "random");
    add_step("KDA " + label_of(dense(row)) + (is_softplus ? " " : " bounded, ") + gates,
             "gate=channel gdtype=bf16 beta=sigmoid l2norm=1 form=" +
                 std::string(is_softplus ? "softplus" : "bounded") + " gates=" + gates,
             row,
             row.contains("fla_forward_backward")
                 ? fla_of(row)
                 : Anchor{"cuDNN with torch", row.at("cudnn_with_compiled_torch_around")});
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

  void add_decode(const Json& row, bool is_channel, int64_t tokens) {
    const bool is_flashinfer = row.contains("flashinfer_us");
    const std::string gate = row.value("gate", "");
    const bool is_bf16 = row.at("state") == "bfloat16",
               is_k_first = row.value("layout", "") == "k_first";
    const bool is_raw = !is_channel || gate.find("raw") != std::string::npos;
    std::string line = "decode dense=" + number(row, "B") + "x" + std::to_string(tokens) +
                       " K=128 V=128 dtype=bf16 pool=inplace";
    line += is_channel ? " gate=channel gdtype=bf16 H=32 HV=32" : " gate=head H=16 HV=32";
    line += std::string(" state=") + (is_k_first ? "kv" : "vk") + (is_bf16 ? " sdtype=bf16" : "");
    if (is_raw) {
      line += " beta=sigmoid l2norm=1";
      line += is_channel ? " form=bounded" : " form=softplus gates=softplus";
    }
    add(tokens > 1 ? "decode_tokens" : "decode",
        std::string(is_channel ? "KDA" : "GDN") + " B=" + number(row, "B") +
            (is_bf16 ? " bf16 " : " fp32 ") + (is_k_first ? "K-first" : "V-first") +
            (tokens > 1 ? " " + std::to_string(tokens) + " tokens" : "") +
            (is_channel && is_raw ? " raw gate" : ""),
        line,
        is_flashinfer ? Anchor{"FlashInfer 0.7.2", row.at("flashinfer_us").get<double>() * 1e-3}
                      : Anchor{"fla", row.at("fla_graph").get<double>()});
  }

  static constexpr const char* kWide = " K=128 V=128 dtype=bf16";
  int gdn_rows_ = 0;
};

}  // namespace

AnchorSuites anchor_suites(const std::string& path) {
  const std::string expected = "a file of other libraries' times";
  const auto refuse = [&](const std::string& what) {
    throw UsageError("--anchors: expected " + expected + ", got '" + path + "', " + what);
  };
  const Json document = read_json(path, "--anchors", expected);
  if (!document.is_object() || !document.contains("groups") || !document["groups"].is_array())
    refuse("which has no list of groups");
  if (document["groups"].empty()) refuse("whose list of groups is empty");
  Anchors anchors;
  size_t group_number = 0;
  for (const Json& group : document["groups"]) {
    const std::string where = "whose group " + std::to_string(++group_number);
    if (!group.is_object() || !group.contains("rows") || !group["rows"].is_array())
      refuse(where + " has no list of rows");
    size_t row_number = 0;
    for (const Json& row : group["rows"]) {
      const std::string which = where + ", row " + std::to_string(++row_number);
      try {
        anchors.add_row(row);
      } catch (const Json::exception&) {
        refuse(which + " lacks a key of its operation, or has one of another type");
      } catch (const cases::CaseError& e) {
        refuse(which + " is no case (" + e.what() + ")");
      }
    }
  }
  if (anchors.result.rows.empty()) {
    const std::vector<LeftOut>& others = anchors.result.left_out;
    if (others.empty()) refuse("whose groups have no row");
    refuse("of whose rows none can be measured (" + others[0].op + ": " + others[0].reason + ")");
  }
  std::stable_sort(anchors.result.rows.begin(), anchors.result.rows.end(),
                   [](const SuiteRow& a, const SuiteRow& b) { return a.suite < b.suite; });
  return anchors.result;
}

}  // namespace deltic::cli
