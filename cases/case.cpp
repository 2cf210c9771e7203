// The case grammar: one table of keys, from which parsing, printing, filters and help are made.
#include "cases/case.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <set>
#include <sstream>

namespace deltic::cases {
namespace {

// Operations that a line can name, by their names in the library.
constexpr Op kOps[] = {Op::forward, Op::decode,  Op::cumsum,         Op::gate, Op::l2norm,  Op::kkt,
                       Op::scores,  Op::inverse, Op::scores_inverse, Op::wy,   Op::backward};

// Adds an item to a list in a text.
void append(std::string& list, const char* separator, std::string_view item) {
  if (!list.empty()) list += separator;
  list += item;
}

std::string op_names() {
  std::string all;
  for (Op op : kOps) append(all, "|", name(op));
  return all;
}

// Names of an enum's values in their order.
struct Names {
  std::vector<const char*> list;
  std::string joined() const {
    std::string s;
    for (const char* n : list) append(s, "|", n);
    return s;
  }
};
const Names kGateNames{{"none", "head", "channel"}};
const Names kFormNames{{"log_decay", "softplus", "bounded"}};
const Names kBetaNames{{"none", "value", "sigmoid", "2sigmoid"}};
const Names kFinalNames{{"0", "1", "inplace"}};
const Names kPoolNames{{"none", "identity", "inplace", "writelist", "move", "start", "peek",
                        "mixed", "tokens", "fork"}};
const Names kLayoutNames{{"0", "1", "headmajor", "expand"}};
const Names kStateNames{{"kv", "vk"}};
const Names kGatesNames{{"random", "slow", "softplus", "mixed", "zero"}};
const Names kKeysNames{{"random", "repeated", "correlated", "zero"}};
const Names kSaveNames{{"none", "states", "all"}};
const Names kBoolNames{{"0", "1"}};

[[noreturn]] void bad(std::string_view key, const std::string& expected, std::string_view got) {
  throw CaseError("case: " + std::string(key) + ": expected " + expected + ", got '" +
                  std::string(got) + "'");
}

int index_of(const Names& names, std::string_view key, std::string_view value) {
  for (size_t i = 0; i < names.list.size(); ++i) {
    if (value == names.list[i]) return static_cast<int>(i);
  }
  bad(key, names.joined(), value);
}

int64_t to_int(std::string_view key, std::string_view value, int64_t low, int64_t high) {
  int64_t x = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), x);
  if (error != std::errc() || end != value.data() + value.size() || x < low || x > high) {
    bad(key, "a whole number from " + std::to_string(low) + " to " + std::to_string(high), value);
  }
  return x;
}

double to_number(std::string_view key, std::string_view value, const std::string& expected) {
  double x = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), x);
  if (error != std::errc() || end != value.data() + value.size() || !std::isfinite(x)) {
    bad(key, expected, value);
  }
  return x;
}

std::string number(double x) {  // shortest text that reads back as x
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof text, x);
  return error == std::errc() ? std::string(text, end) : std::string("0");
}

std::vector<std::string> split_text(std::string_view text, char separator) {
  std::vector<std::string> parts;
  size_t begin = 0;
  while (true) {
    const size_t end = text.find(separator, begin);
    parts.emplace_back(text.substr(begin, end == std::string_view::npos ? end : end - begin));
    if (end == std::string_view::npos) return parts;
    begin = end + 1;
  }
}

constexpr int64_t kMaxTokens = int64_t{1} << 32;
constexpr int kMaxExpansion = 100000;  // cases of one line: seconds to read, a day to run

bool is_any(Op op, std::initializer_list<Op> ops) {
  return std::find(ops.begin(), ops.end(), op) != ops.end();
}
// Whether a state of sdtype is given or asked for.
bool has_states(const Case& c) {
  if (c.op == Op::backward) return c.init;
  return !c.is_block() && (c.pool != Pool::none || c.init || c.final_state != Final::none);
}

// One key. `needs` is empty if the key applies to the case, else says what it needs.
struct Key {
  const char* name;
  const char* takes;
  const char* default_text;
  const char* help;
  std::function<std::string(const Case&)> needs;
  std::function<std::string(const Case&)> get;
  std::function<void(Case&, std::string_view)> set;
};

std::string only_for(const Case& c, std::initializer_list<Op> ops) {
  if (is_any(c.op, ops)) return "";
  std::string text;
  for (Op op : ops) append(text, " or ", name(op));
  return text + " as the operation";
}

Key enum_key(const char* name, const char* takes, const char* default_text, const char* help,
             std::function<std::string(const Case&)> needs, const Names& names,
             std::function<int(const Case&)> get, std::function<void(Case&, int)> set) {
  return {
      name,
      takes,
      default_text,
      help,
      std::move(needs),
      [&names, get](const Case& c) { return std::string(names.list[static_cast<size_t>(get(c))]); },
      [&names, name, set](Case& c, std::string_view v) { set(c, index_of(names, name, v)); }};
}

Key flag_key(const char* name, const char* default_text, const char* help,
             std::function<std::string(const Case&)> needs, bool Case::*field) {
  return enum_key(
      name, "0|1", default_text, help, std::move(needs), kBoolNames,
      [field](const Case& c) { return c.*field ? 1 : 0; },
      [field](Case& c, int i) { c.*field = i == 1; });
}

Key size_key(const char* name, const char* default_text, const char* help, int64_t low,
             int64_t high, std::function<std::string(const Case&)> needs, int64_t Case::*field) {
  return {name,
          "number",
          default_text,
          help,
          std::move(needs),
          [field](const Case& c) { return std::to_string(c.*field); },
          [=](Case& c, std::string_view v) { c.*field = to_int(name, v, low, high); }};
}

Key dtype_key(const char* name, const char* takes, const char* default_text, const char* help,
              std::function<std::string(const Case&)> needs, std::initializer_list<DType> allowed,
              DType Case::*field) {
  const std::vector<DType> list(allowed);
  return {name,
          takes,
          default_text,
          help,
          std::move(needs),
          [field](const Case& c) { return std::string(name_of(c.*field)); },
          [=](Case& c, std::string_view v) {
            for (DType t : list) {
              if (v == name_of(t)) {
                c.*field = t;
                return;
              }
            }
            bad(name, takes, v);
          }};
}

std::string list_text(const std::vector<int64_t>& list) {
  std::string s;
  for (int64_t x : list) append(s, ",", x == kCkptEnd ? "end" : std::to_string(x));
  return s.empty() ? "none" : s;
}

std::string always(const Case&) { return ""; }

std::vector<Key> make_keys() {
  using C = const Case&;
  const auto needs_gate_op = [](C c) {
    return only_for(c, {Op::forward, Op::decode, Op::backward, Op::cumsum, Op::gate, Op::kkt,
                        Op::scores, Op::scores_inverse, Op::wy});
  };
  const auto needs_form_op = [](C c) {
    const std::string s =
        only_for(c, {Op::forward, Op::decode, Op::backward, Op::cumsum, Op::gate});
    return !s.empty() ? s : c.gate == Gate::none ? "gate=head or gate=channel" : "";
  };
  const auto needs_form = [=](C c) {
    const std::string s = needs_form_op(c);
    return !s.empty() ? s : c.form == GateForm::log_decay ? "form=softplus or form=bounded" : "";
  };
  const auto needs_bounded = [=](C c) {
    const std::string s = needs_form_op(c);
    return !s.empty() ? s : c.form != GateForm::bounded ? "form=bounded" : "";
  };
  const auto needs_packed = [](C c) { return c.packed ? "" : "seqs"; };
  const auto needs_sequence_op = [](C c) {
    return only_for(c, {Op::forward, Op::decode, Op::backward});
  };
  // What has no gradient.
  const auto needs_inference = [](C c) { return only_for(c, {Op::forward, Op::decode}); };
  const auto needs_decode = [](C c) { return only_for(c, {Op::decode}); };
  const auto needs_backward = [](C c) { return only_for(c, {Op::backward}); };
  const auto needs_no_pool = [](C c) { return c.pool != Pool::none ? "pool=none" : ""; };
  const auto needs_block = [](C c) {
    return c.is_block() ? "" : "a building block as the operation";
  };
  const auto needs_ckpt = [](C c) {
    const std::string s = only_for(c, {Op::forward, Op::decode});
    return !s.empty() ? s : c.ckpt.empty() ? "ckpt" : "";
  };

  std::vector<Key> keys;
  keys.push_back(enum_key(
      "gate", "none|head|channel", "head", "no decay, one per value head, one per key channel",
      needs_gate_op, kGateNames, [](C c) { return static_cast<int>(c.gate); },
      [](Case& c, int i) { c.gate = static_cast<Gate>(i); }));
  keys.push_back(enum_key(
      "form", "log_decay|softplus|bounded", "log_decay", "how g becomes the log decay",
      needs_form_op, kFormNames, [](C c) { return static_cast<int>(c.form); },
      [](Case& c, int i) { c.form = static_cast<GateForm>(i); }));
  keys.push_back({"lower_bound", "number < 0", "-5", "of form=bounded", needs_bounded,
                  [](C c) { return number(c.lower_bound); },
                  [](Case& c, std::string_view v) {
                    c.lower_bound = to_number("lower_bound", v, "a number below 0");
                    if (!(c.lower_bound < 0)) bad("lower_bound", "a number below 0", v);
                  }});
  keys.push_back(
      flag_key("alog", "1", "A_log is given (softplus: always)", needs_bounded, &Case::alog));
  keys.push_back(flag_key("dtbias", "1", "dt_bias is given", needs_form, &Case::dtbias));
  keys.push_back({"seqs", "lengths a,b,c or none", "", "packed sequences (instead of dense)",
                  [](C c) { return c.packed ? "" : "no dense"; },
                  [](C c) { return list_text(c.seqs); },
                  [](Case& c, std::string_view v) {
                    c.packed = true;
                    c.seqs.clear();
                    if (v == "none") return;
                    for (const std::string& s : split_text(v, ',')) {
                      c.seqs.push_back(to_int("seqs", s, 0, kMaxTokens));
                    }
                  }});
  keys.push_back({"dense", "BxT", "1x128", "a batch of B rows of T tokens",
                  [](C c) { return c.packed ? "no seqs" : ""; },
                  [](C c) { return std::to_string(c.batch) + "x" + std::to_string(c.length); },
                  [](Case& c, std::string_view v) {
                    const auto parts = split_text(v, 'x');
                    if (parts.size() != 2) bad("dense", "BxT, two whole numbers", v);
                    c.batch = to_int("dense", parts[0], 0, kMaxTokens);
                    c.length = to_int("dense", parts[1], 0, kMaxTokens);
                  }});
  keys.push_back(size_key("pad", "0", "padding rows after the packed tokens", 0, kMaxTokens,
                          needs_packed, &Case::pad));
  keys.push_back(dtype_key("cu", "i32|i64", "i32", "dtype of cu_seqlens", needs_packed,
                           {DType::i32, DType::i64}, &Case::cu));
  keys.push_back(flag_key("cuhost", "0", "the host copy of cu_seqlens is given too", needs_packed,
                          &Case::cuhost));
  keys.push_back(size_key(
      "H", "2", "query/key heads", 1, 1 << 20,
      [](C c) {
        return only_for(c, {Op::forward, Op::decode, Op::backward, Op::l2norm, Op::kkt, Op::scores,
                            Op::scores_inverse, Op::wy});
      },
      &Case::H));
  keys.push_back(size_key(
      "HV", "H, or 2", "value heads, a multiple of H", 1, 1 << 20,
      [](C c) { return c.op == Op::l2norm ? "another operation than l2norm" : ""; }, &Case::HV));
  keys.push_back(size_key(
      "K", "64", "key width (inverse: of the keys that A is made of)", 1, 1 << 16,
      [](C c) {
        return is_any(c.op, {Op::cumsum, Op::gate}) && c.gate != Gate::channel ? "gate=channel"
                                                                               : "";
      },
      &Case::K));
  keys.push_back(size_key(
      "V", "64", "value width", 1, 1 << 20,
      [](C c) {
        const std::string s = only_for(c, {Op::forward, Op::decode, Op::backward, Op::wy});
        return !s.empty() ? s : c.op == Op::wy && !c.u ? "u among parts" : "";
      },
      &Case::V));
  keys.push_back(dtype_key(
      "dtype", "f32|bf16|f16", "f32", "of q k v o; of a building block's x q k v a",
      [](C c) {
        return is_any(c.op, {Op::cumsum, Op::gate}) ? "another operation than cumsum and gate" : "";
      },
      {DType::f32, DType::bf16, DType::f16}, &Case::dtype));
  keys.push_back(dtype_key(
      "gdtype", "f32|bf16|f16", "f32", "of g and gv",
      [=](C c) {
        const std::string s = needs_gate_op(c);
        return !s.empty() ? s : c.gate == Gate::none && !c.gv ? "gate=head or gate=channel" : "";
      },
      {DType::f32, DType::bf16, DType::f16}, &Case::gdtype));
  keys.push_back(dtype_key(
      "betadtype", "f32|bf16|f16", "f32", "of beta",
      [](C c) {
        const std::string s = only_for(
            c, {Op::forward, Op::decode, Op::backward, Op::kkt, Op::scores_inverse, Op::wy});
        return !s.empty() ? s : c.beta == Beta::none ? "a beta" : "";
      },
      {DType::f32, DType::bf16, DType::f16}, &Case::betadtype));
  keys.push_back(dtype_key("pdtype", "f32|bf16|f16", "f32", "of A_log and dt_bias", needs_form,
                           {DType::f32, DType::bf16, DType::f16}, &Case::pdtype));
  keys.push_back(dtype_key(
      "sdtype", "f32|bf16", "f32", "of initial and final state, or the pool",
      [=](C c) {
        const std::string s = needs_sequence_op(c);
        return !s.empty() ? s : has_states(c) ? "" : "init=1, final=1 or a pool";
      },
      {DType::f32, DType::bf16}, &Case::sdtype));
  keys.push_back(dtype_key("cdtype", "f32|bf16", "f32", "of the checkpoints", needs_ckpt,
                           {DType::f32, DType::bf16}, &Case::cdtype));
  keys.push_back(dtype_key("odtype", "f32|bf16|f16", "f32", "of a building block's outputs",
                           needs_block, {DType::f32, DType::bf16, DType::f16}, &Case::odtype));
  keys.push_back(enum_key(
      "beta", "none|value|sigmoid|2sigmoid", "value",
      "absent (1), as given, through a sigmoid, twice that (blocks: none|value; inverse: its data)",
      [](C c) {
        return only_for(c, {Op::forward, Op::decode, Op::backward, Op::kkt, Op::scores_inverse,
                            Op::inverse, Op::wy});
      },
      kBetaNames, [](C c) { return static_cast<int>(c.beta); },
      [](Case& c, int i) { c.beta = static_cast<Beta>(i); }));
  keys.push_back(flag_key(
      "betavec", "0", "decode: beta per value column",
      [=](C c) {
        const std::string s = needs_decode(c);
        return !s.empty() ? s : c.beta == Beta::none ? "a beta" : "";
      },
      &Case::betavec));
  keys.push_back(flag_key("gv", "0", "decode: a value-wise log decay", needs_decode, &Case::gv));
  keys.push_back(
      flag_key("l2norm", "0", "q and k are normalised inside", needs_sequence_op, &Case::l2norm));
  keys.push_back({"scale", "number or default", "default", "K^-1/2 unless given (cumsum: 1)",
                  [](C c) {
                    return only_for(c, {Op::forward, Op::decode, Op::backward, Op::cumsum,
                                        Op::scores, Op::scores_inverse});
                  },
                  [](C c) { return c.scale ? number(*c.scale) : std::string("default"); },
                  [](Case& c, std::string_view v) {
                    c.scale.reset();
                    if (v != "default") c.scale = to_number("scale", v, "a number or default");
                  }});
  keys.push_back(enum_key(
      "state", "kv|vk", "kv", "states K-first or V-first",
      [=](C c) {
        const std::string s = needs_sequence_op(c);
        return !s.empty()                                                               ? s
               : has_states(c) || !c.ckpt.empty() || (c.op == Op::backward && c.dfinal) ? ""
                                                                                        : "a state";
      },
      kStateNames, [](C c) { return static_cast<int>(c.state); },
      [](Case& c, int i) { c.state = static_cast<StateLayout>(i); }));
  keys.push_back(flag_key(
      "init", "0", "an initial state is given (backward: and its gradient asked for)",
      [=](C c) {
        const std::string s = needs_sequence_op(c);
        return !s.empty() ? s : needs_no_pool(c);
      },
      &Case::init));
  keys.push_back(enum_key(
      "final", "0|1|inplace", "1", "a final state is asked for (inplace: over the initial one)",
      [=](C c) {
        const std::string s = needs_inference(c);
        return !s.empty() ? s : needs_no_pool(c);
      },
      kFinalNames, [](C c) { return static_cast<int>(c.final_state); },
      [](Case& c, int i) { c.final_state = static_cast<Final>(i); }));
  keys.push_back(
      flag_key("do", "1", "backward: the gradient of o is given", needs_backward, &Case::d_o));
  keys.push_back(flag_key("dfinal", "1", "backward: the gradient of the final state is given",
                          needs_backward, &Case::dfinal));
  keys.push_back(enum_key(
      "save", "none|states|all", "states",
      "backward: starts from the inputs alone, from the states that forward kept, from all it kept",
      needs_backward, kSaveNames, [](C c) { return static_cast<int>(c.save); },
      [](Case& c, int i) { c.save = static_cast<Save>(i); }));
  keys.push_back(enum_key(
      "pool", "none|identity|inplace|writelist|move|start|peek|mixed|tokens|fork", "none",
      "states in a pool: no lists; one list (read, write); two lists; read -1; write -1; all by "
      "turns "
      "with skipped ones; decode: a slot per token; all read one slot",
      needs_inference, kPoolNames, [](C c) { return static_cast<int>(c.pool); },
      [](Case& c, int i) { c.pool = static_cast<Pool>(i); }));
  keys.push_back(dtype_key(
      "idx", "i32|i64", "i32", "dtype of the index lists of pool and checkpoints",
      [=](C c) {
        const std::string s = needs_inference(c);
        if (!s.empty()) return s;
        const bool lists = c.pool != Pool::none && c.pool != Pool::identity;
        return std::string(lists || !c.ckpt.empty() ? "" : "a pool with lists or ckpt");
      },
      {DType::i32, DType::i64}, &Case::idx));
  keys.push_back({"ckpt", "offsets a,b,end or none", "none",
                  "states kept after so many tokens of every sequence that is long enough",
                  needs_inference, [](C c) { return list_text(c.ckpt); },
                  [](Case& c, std::string_view v) {
                    c.ckpt.clear();
                    if (v == "none") return;
                    for (const std::string& s : split_text(v, ',')) {
                      c.ckpt.push_back(s == "end" ? kCkptEnd : to_int("ckpt", s, 0, kMaxTokens));
                    }
                  }});
  keys.push_back(flag_key("ckptskip", "0", "every second checkpoint has slot -1", needs_ckpt,
                          &Case::ckptskip));
  keys.push_back({"chunk", "16|32|64", "64", "chunk length (inverse: width of A)",
                  [](C c) {
                    return only_for(c, {Op::forward, Op::backward, Op::cumsum, Op::kkt, Op::scores,
                                        Op::scores_inverse, Op::inverse, Op::wy});
                  },
                  [](C c) { return std::to_string(c.chunk); },
                  [](Case& c, std::string_view v) {
                    if (v != "16" && v != "32" && v != "64") bad("chunk", "16|32|64", v);
                    c.chunk = static_cast<int>(to_int("chunk", v, 16, 64));
                  }});
  keys.push_back({"split", "auto|off|by_length|number", "auto", "how a sequence may be cut",
                  [](C c) { return only_for(c, {Op::forward}); },
                  [](C c) -> std::string {
                    switch (c.split) {
                      case Split::automatic:
                        return "auto";
                      case Split::off:
                        return "off";
                      case Split::by_length:
                        return "by_length";
                      default:
                        return std::to_string(c.segment);
                    }
                  },
                  [](Case& c, std::string_view v) {
                    c.segment = 0;
                    if (v == "auto") {
                      c.split = Split::automatic;
                    } else if (v == "off") {
                      c.split = Split::off;
                    } else if (v == "by_length") {
                      c.split = Split::by_length;
                    } else if (!v.empty() && v[0] >= '0' && v[0] <= '9') {
                      c.split = Split::segments;
                      c.segment = to_int("split", v, 1, kMaxTokens);
                    } else {
                      bad("split", "auto|off|by_length or a segment length", v);
                    }
                  }});
  keys.push_back(flag_key(
      "reverse", "0", "sums from the chunk's end", [](C c) { return only_for(c, {Op::cumsum}); },
      &Case::reverse));
  keys.push_back(flag_key(
      "rstd", "0", "1 / norm is asked for", [](C c) { return only_for(c, {Op::l2norm}); },
      &Case::rstd));
  keys.push_back({"parts", "list of u,kg,qg, or none", "u,kg,qg", "outputs beside w",
                  [](C c) { return only_for(c, {Op::wy}); },
                  [](C c) {
                    std::string s;
                    if (c.u) s += "u";
                    if (c.kg) s += s.empty() ? "kg" : ",kg";
                    if (c.qg) s += s.empty() ? "qg" : ",qg";
                    return s.empty() ? std::string("none") : s;
                  },
                  [](Case& c, std::string_view v) {
                    c.u = c.kg = c.qg = false;
                    if (v == "none") return;
                    for (const std::string& s : split_text(v, ',')) {
                      if (s == "u") {
                        c.u = true;
                      } else if (s == "kg") {
                        c.kg = true;
                      } else if (s == "qg") {
                        c.qg = true;
                      } else {
                        bad("parts", "a list of u, kg, qg, or none", v);
                      }
                    }
                  }});
  keys.push_back(enum_key(
      "strided", "0|1|headmajor|expand", "0",
      "contiguous; views into wider buffers; heads outside of tokens; inputs with head stride 0",
      always, kLayoutNames, [](C c) { return static_cast<int>(c.strided); },
      [](Case& c, int i) { c.strided = static_cast<Layout>(i); }));
  keys.push_back(
      {"gates", "random|slow|softplus|mixed|zero|number", "random (form=softplus: softplus)",
       "log decays: -5 sigmoid(n); a quarter of heads and channels near -1e-4; -16..-1 times "
       "softplus(n); 0/-5/-20/-1000 mixed; 0; the number",
       [=](C c) {
         const std::string s = needs_gate_op(c);
         if (!s.empty()) return s;
         return std::string(c.gate == Gate::none && !c.gv ? "a gate" : "");
       },
       [](C c) {
         return c.gates == Gates::constant
                    ? number(c.gate_value)
                    : std::string(kGatesNames.list[static_cast<size_t>(c.gates)]);
       },
       [](Case& c, std::string_view v) {
         for (size_t i = 0; i < kGatesNames.list.size(); ++i) {
           if (v == kGatesNames.list[i]) {
             c.gates = static_cast<Gates>(i);
             c.gate_value = 0;
             return;
           }
         }
         c.gates = Gates::constant;
         c.gate_value = to_number("gates", v, kGatesNames.joined() + " or a number");
       }});
  keys.push_back(enum_key(
      "keys", "random|repeated|correlated|zero", "random",
      "directions of k: independent; one for all tokens; near one; every third row of q and k zero",
      [](C c) {
        return is_any(c.op, {Op::cumsum, Op::gate}) ? "an operation with keys" : "";
      },
      kKeysNames, [](C c) { return static_cast<int>(c.keys); },
      [](Case& c, int i) { c.keys = static_cast<Keys>(i); }));
  keys.push_back({"seed", "number", "1", "of the random inputs", always,
                  [](C c) { return std::to_string(c.seed); },
                  [](Case& c, std::string_view v) {
                    c.seed = static_cast<uint64_t>(to_int("seed", v, 0, INT64_MAX));
                  }});
  return keys;
}

const std::vector<Key>& keys() {
  static const std::vector<Key> list = make_keys();
  return list;
}

const Key* find_key(std::string_view name) {
  for (const Key& k : keys()) {
    if (name == k.name) return &k;
  }
  return nullptr;
}

std::string key_names() {
  std::string all;
  for (const Key& k : keys()) append(all, " ", k.name);
  return all;
}

// Defaults that depend on other keys. `given` holds the keys of the line.
void apply_defaults(Case& c, const std::set<std::string, std::less<>>& given) {
  const auto is_given = [&](const char* key) { return given.find(key) != given.end(); };
  if (is_any(c.op, {Op::cumsum, Op::gate, Op::inverse})) {
    c.H = c.HV;
  } else if (!is_given("HV")) {
    c.HV = c.H;
  }
  if (!is_given("gates")) {
    c.gates = c.form == GateForm::softplus ? Gates::softplus : Gates::random;
  }
  if (c.op == Op::backward && !is_given("save")) c.save = Save::states;
  if (c.pool != Pool::none) {
    c.init = false;
    c.final_state = Final::none;
  }
}

// Conflicts between keys that each have a good value.
void check_conflicts(const Case& c) {
  const auto fail = [](const std::string& text) { throw CaseError("case: " + text); };
  if (c.HV % c.H != 0) {
    fail("HV: expected a multiple of H=" + std::to_string(c.H) + ", got " + std::to_string(c.HV));
  }
  if (is_any(c.op, {Op::cumsum, Op::gate}) && c.gate == Gate::none) {
    fail("gate: expected head or channel for this operation, got 'none'");
  }
  if (is_any(c.op, {Op::kkt, Op::scores_inverse, Op::wy}) && c.beta != Beta::none &&
      c.beta != Beta::value) {
    fail("beta: expected none or value for this operation, got '" + *value_of(c, "beta") + "'");
  }
  if (c.final_state == Final::inplace && !c.init) {
    fail("final: expected init=1 beside inplace, got init=0");
  }
  if (c.pool == Pool::tokens && c.op != Op::decode) {
    fail("pool: expected decode as the operation for tokens, got 'forward'");
  }
  for (int64_t n : c.ckpt) {
    if (n > c.longest()) {
      fail("ckpt: expected offsets up to the longest length " + std::to_string(c.longest()) +
           ", got " + std::to_string(n));
    }
  }
}

}  // namespace

const char* name_of(DType t) {
  constexpr const char* names[] = {"f32", "bf16", "f16", "f64", "i32", "i64"};
  return names[static_cast<int>(t)];
}
bool is_half(DType t) { return t == DType::bf16 || t == DType::f16; }
int64_t size_of(DType t) { return is_half(t) ? 2 : t == DType::f32 || t == DType::i32 ? 4 : 8; }

int64_t Case::num_sequences() const { return packed ? static_cast<int64_t>(seqs.size()) : batch; }
int64_t Case::num_batches() const { return packed ? 1 : batch; }
int64_t Case::num_tokens() const {
  if (!packed) return length;
  int64_t sum = pad;
  for (int64_t n : seqs) sum += n;
  return sum;
}
int64_t Case::num_real_tokens() const { return packed ? num_tokens() - pad : batch * length; }
int64_t Case::sequence_length(int64_t n) const {
  return packed ? seqs[static_cast<size_t>(n)] : length;
}
int64_t Case::sequence_begin(int64_t n) const {
  int64_t begin = 0;
  for (int64_t i = 0; packed && i < n; ++i) begin += seqs[static_cast<size_t>(i)];
  return begin;
}
int64_t Case::longest() const {
  if (!packed) return batch > 0 ? length : 0;
  return seqs.empty() ? 0 : *std::max_element(seqs.begin(), seqs.end());
}

Case parse(std::string_view line) {
  std::istringstream words{std::string(line)};
  std::string word;
  if (!(words >> word)) throw CaseError("case: expected an operation, got an empty line");
  Case c;
  const auto* op =
      std::find_if(std::begin(kOps), std::end(kOps), [&](Op o) { return word == name(o); });
  if (op == std::end(kOps)) bad("operation", op_names(), word);
  c.op = *op;

  std::map<std::string, std::string, std::less<>> given;
  while (words >> word) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos || equals == 0) bad("line", "key=value", word);
    const std::string key = word.substr(0, equals);
    if (find_key(key) == nullptr) bad("key", "one of " + key_names(), key);
    if (!given.emplace(key, word.substr(equals + 1)).second) {
      throw CaseError("case: " + key + ": expected once, got twice");
    }
  }
  if (given.count("seqs") != 0 && given.count("dense") != 0) {
    throw CaseError("case: seqs: expected no dense beside it, got both");
  }
  std::set<std::string, std::less<>> names;
  for (const Key& k : keys()) {
    const auto it = given.find(k.name);
    if (it == given.end()) continue;
    k.set(c, it->second);
    names.insert(k.name);
  }
  apply_defaults(c, names);
  for (const Key& k : keys()) {
    if (names.find(k.name) == names.end()) continue;
    const std::string needs = k.needs(c);
    if (!needs.empty()) {
      throw CaseError("case: " + std::string(k.name) + ": expected " + needs + " beside it, got '" +
                      std::string(line) + "'");
    }
  }
  check_conflicts(c);
  return c;
}

std::string canonical(const Case& c) {
  std::string line(name(c.op));
  for (const Key& k : keys()) {
    if (k.needs(c).empty()) append(line, " ", std::string(k.name) + "=" + k.get(c));
  }
  return line;
}

std::string brief(const Case& c) {
  // Leaves out every key without which the line still means the same; a few are always shown.
  std::vector<std::string> words;
  for (const Key& k : keys()) {
    if (k.needs(c).empty()) words.push_back(std::string(k.name) + "=" + k.get(c));
  }
  const auto joined = [&] {
    std::string line(name(c.op));
    for (const std::string& w : words) line += " " + w;
    return line;
  };
  const Case whole = parse(joined());
  for (size_t i = words.size(); i-- > 0;) {
    const std::string word = words[i];
    const std::string name = word.substr(0, word.find('='));
    if (name == "gate" || name == "seqs" || name == "dense" || name == "K" || name == "V" ||
        name == "dtype" || name == "H") {
      continue;
    }
    words.erase(words.begin() + static_cast<std::ptrdiff_t>(i));
    bool same = false;
    try {
      same = parse(joined()) == whole;
    } catch (const CaseError&) {  // another key needs this one
    }
    if (!same) words.insert(words.begin() + static_cast<std::ptrdiff_t>(i), word);
  }
  return joined();
}

Case normalise(const Case& c) { return parse(canonical(c)); }

std::optional<std::string> value_of(const Case& c, std::string_view key) {
  if (key == "op") return std::string(name(c.op));
  const Key* k = find_key(key);
  if (k == nullptr || !k->needs(c).empty()) return std::nullopt;
  return k->get(c);
}

std::vector<std::string> expand(std::string_view line) {
  // The line in pieces: alternatives of the first brace, of the second, and so on; text between
  // braces is one alternative.
  std::vector<std::vector<std::string>> pieces;
  double count = 1;  // a product that may leave every whole type
  for (size_t begin = 0; begin < line.size();) {
    const size_t open = line.find('{', begin);
    if (open != begin) {
      pieces.push_back({std::string(line.substr(begin, open - begin))});
      if (open == std::string_view::npos) break;
    }
    const size_t close = line.find('}', open);
    if (close == std::string_view::npos) bad("line", "a closing brace", line);
    const std::string_view inside = line.substr(open + 1, close - open - 1);
    // Alternatives that hold commas themselves (lists) are separated by bars.
    pieces.push_back(split_text(inside, inside.find('|') == std::string_view::npos ? ',' : '|'));
    count *= static_cast<double>(pieces.back().size());
    begin = close + 1;
  }
  if (count > kMaxExpansion) {
    char text[32];
    std::snprintf(text, sizeof text, "%.15g", count);
    throw CaseError("case: line: expected at most " + std::to_string(kMaxExpansion) +
                    " cases from its braces, got " + text);
  }
  std::vector<std::string> lines = {""};
  for (const auto& alternatives : pieces) {
    std::vector<std::string> longer;
    longer.reserve(lines.size() * alternatives.size());
    for (const std::string& begin : lines) {
      for (const std::string& piece : alternatives) longer.push_back(begin + piece);
    }
    lines = std::move(longer);
  }
  return lines;
}

std::vector<SourcedCase> read_text(std::string_view text, const std::string& path) {
  std::istringstream in{std::string(text)};
  const std::string stem = std::filesystem::path(path).stem().string();
  std::vector<SourcedCase> list;
  std::string line;
  for (int number_of_line = 1; std::getline(in, line); ++number_of_line) {
    const size_t comment = line.find('#');
    if (comment != std::string::npos) line.erase(comment);
    if (line.find_first_not_of(" \t\r") == std::string::npos) continue;
    try {
      for (const std::string& l : expand(line)) list.push_back({parse(l), stem});
    } catch (const CaseError& e) {
      throw CaseError(path + ":" + std::to_string(number_of_line) + ": " + e.what());
    }
  }
  return list;
}

std::vector<SourcedCase> read_file(const std::string& path) {
  std::ifstream in(path);
  if (!in) throw CaseError("case: file: expected a readable file, got '" + path + "'");
  std::ostringstream text;
  text << in.rdbuf();
  return read_text(text.str(), path);
}

std::vector<SourcedCase> read_folder(const std::string& path) {
  std::error_code error;
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(path, error)) {
    if (entry.path().extension() == ".txt") files.push_back(entry.path().string());
  }
  if (error) throw CaseError("case: folder: expected a readable folder, got '" + path + "'");
  std::sort(files.begin(), files.end());
  std::vector<SourcedCase> list;
  for (const std::string& f : files) {
    for (SourcedCase& c : read_file(f)) list.push_back(std::move(c));
  }
  return list;
}

void check_filter(std::string_view filter) {
  std::istringstream words{std::string(filter)};
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    const std::string key = word.substr(0, equals);
    if (equals != std::string::npos && key != "op" && find_key(key) == nullptr) {
      throw CaseError("filter: key: expected one of op " + key_names() + ", got '" + key + "'");
    }
  }
}

bool matches(const Case& c, std::string_view filter) {
  std::istringstream words{std::string(filter)};
  const std::string line = canonical(c);
  std::string word;
  while (words >> word) {
    const size_t equals = word.find('=');
    const std::string key = equals == std::string::npos ? "" : word.substr(0, equals);
    if (key == "op" || find_key(key) != nullptr) {
      const auto value = value_of(c, key);
      if (!value || *value != word.substr(equals + 1)) return false;
    } else if (line.find(word) == std::string::npos) {
      return false;
    }
  }
  return true;
}

std::string grammar_help() {
  std::ostringstream out;
  out << "A case is an operation and key=value pairs on one line:\n  " << op_names() << "\n";
  out << "Braces give alternatives: K={64,128}, seqs={1,15,64|0,3}.\n\n";
  for (const Key& k : keys()) {
    out << "  " << k.name << "=" << k.takes;
    if (k.default_text[0] != '\0') out << "  (" << k.default_text << ")";
    out << "\n      " << k.help << "\n";
  }
  return out.str();
}

bool is_standard(const Case& c) {
  const bool gated = c.gate != Gate::none || c.gv;
  const bool gates =
      !gated || c.gates == Gates::random || c.gates == Gates::slow || c.gates == Gates::softplus;
  return gates && c.keys == Keys::random && c.beta != Beta::two_sigmoid;
}

}  // namespace deltic::cases
