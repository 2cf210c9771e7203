// The keys of the case grammar: kinds of values, what a key needs beside it, and the table.
#include "cases/keys.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>

namespace deltic::cases {

void append(std::string& list, const char* separator, std::string_view item) {
  if (!list.empty()) list += separator;
  list += item;
}

void bad(std::string_view key, const std::string& expected, std::string_view got) {
  throw CaseError("case: " + std::string(key) + ": expected " + expected + ", got '" +
                  std::string(got) + "'");
}

bool is_any(Op op, std::initializer_list<Op> ops) {
  return std::find(ops.begin(), ops.end(), op) != ops.end();
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

namespace {

constexpr int64_t kMaxTokens = int64_t{1} << 32;
using Text = std::string_view;

// ---- Kinds of values ------------------------------------------------------------------------

int64_t to_int(const char* key, Text text, int64_t low, int64_t high) {
  int64_t x = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), x);
  if (error != std::errc() || end != text.data() + text.size() || x < low || x > high) {
    bad(key, "a whole number from " + std::to_string(low) + " to " + std::to_string(high), text);
  }
  return x;
}

double to_number(const char* key, Text text, const std::string& expected) {
  double x = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), x);
  if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(x)) {
    bad(key, expected, text);
  }
  return x;
}

std::string number(double x) {  // shortest text that reads back as x
  char text[32];
  const auto [end, error] = std::to_chars(text, text + sizeof text, x);
  return error == std::errc() ? std::string(text, end) : std::string("0");
}

template <size_t N>
std::string joined(const std::array<const char*, N>& names) {
  std::string s;
  for (const char* n : names) append(s, "|", n);
  return s;
}

// Names of an enum's values in their order, or of a bool's.
constexpr std::array kFlag = {"0", "1"};
constexpr std::array kGates = {"none", "head", "channel"};
constexpr std::array kForms = {"log_decay", "softplus", "bounded"};
constexpr std::array kBetas = {"none", "value", "sigmoid", "2sigmoid"};
constexpr std::array kFinals = {"0", "1", "inplace"};
constexpr std::array kPools = {"none", "identity", "inplace", "writelist", "move",  "start",
                               "peek", "mixed",    "tokens",  "fork",      "drafts"};
constexpr std::array kLayouts = {"0", "1", "headmajor", "expand", "pages"};
constexpr std::array kStates = {"kv", "vk"};
constexpr std::array kGateValues = {"random", "slow", "softplus", "mixed", "zero"};
constexpr std::array kKeyValues = {"random", "repeated", "correlated", "zero"};
constexpr std::array kSaves = {"none", "states", "all"};
constexpr std::array kActivations = {"none", "silu", "sigmoid"};
constexpr std::array kNorms = {"off", "none", "silu", "sigmoid"};
constexpr std::array kSplits = {"auto", "off", "by_length"};

template <auto Field, const auto& kNames>
constexpr Value one_of() {
  return {[] { return joined(kNames); },
          [](const Case& c) { return std::string(kNames[static_cast<size_t>(c.*Field)]); },
          [](Case& c, const char* key, Text text) {
            for (size_t i = 0; i < kNames.size(); ++i) {
              if (text != kNames[i]) continue;
              c.*Field = static_cast<std::remove_cvref_t<decltype(c.*Field)>>(i);
              return;
            }
            bad(key, joined(kNames), text);
          }};
}
template <bool Case::*Field>
constexpr Value flag() {
  return one_of<Field, kFlag>();
}

template <auto Field, int64_t Low, int64_t High>
constexpr Value whole() {
  return {[] { return std::string("number"); },
          [](const Case& c) { return std::to_string(c.*Field); },
          [](Case& c, const char* key, Text text) {
            c.*Field =
                static_cast<std::remove_cvref_t<decltype(c.*Field)>>(to_int(key, text, Low, High));
          }};
}

template <DType... Allowed>
std::string dtype_names() {
  std::string s;
  (append(s, "|", name_of(Allowed)), ...);
  return s;
}
template <DType Case::*Field, DType... Allowed>
constexpr Value dtype() {
  return {dtype_names<Allowed...>, [](const Case& c) { return std::string(name_of(c.*Field)); },
          [](Case& c, const char* key, Text text) {
            for (DType t : {Allowed...}) {
              if (text != name_of(t)) continue;
              c.*Field = t;
              return;
            }
            bad(key, dtype_names<Allowed...>(), text);
          }};
}
template <DType Case::*Field>
constexpr Value float_dtype() {
  return dtype<Field, DType::f32, DType::bf16, DType::f16>();
}
template <DType Case::*Field>
constexpr Value index_dtype() {
  return dtype<Field, DType::i32, DType::i64>();
}

// Values with a syntax of their own.
std::string list_text(const std::vector<int64_t>& list) {
  std::string s;
  for (int64_t x : list) append(s, ",", x == kCkptEnd ? "end" : std::to_string(x));
  return s.empty() ? "none" : s;
}
std::vector<int64_t> to_list(const char* key, Text text, bool may_end) {
  std::vector<int64_t> list;
  if (text == "none") return list;
  for (const std::string& s : split_text(text, ',')) {
    list.push_back(may_end && s == "end" ? kCkptEnd : to_int(key, s, 0, kMaxTokens));
  }
  return list;
}
constexpr Value kSequenceLengths = {[] { return std::string("lengths a,b,c or none"); },
                                    [](const Case& c) { return list_text(c.seqs); },
                                    [](Case& c, const char* key, Text text) {
                                      c.packed = true;
                                      c.seqs = to_list(key, text, false);
                                    }};
constexpr Value kCheckpoints = {
    [] { return std::string("offsets a,b,end or none"); },
    [](const Case& c) { return list_text(c.ckpt); },
    [](Case& c, const char* key, Text text) { c.ckpt = to_list(key, text, true); }};
constexpr Value kRecurrent = {
    [] { return std::string("none|all|offsets a,b,end"); },
    [](const Case& c) {
      return !c.recurrent ? "none" : c.from.empty() ? "all" : list_text(c.from);
    },
    [](Case& c, const char* key, Text text) {
      c.recurrent = text != "none";
      c.from = c.recurrent && text != "all" ? to_list(key, text, true) : std::vector<int64_t>();
    }};
constexpr Value kDense = {
    [] { return std::string("BxT"); },
    [](const Case& c) { return std::to_string(c.batch) + "x" + std::to_string(c.length); },
    [](Case& c, const char* key, Text text) {
      const auto parts = split_text(text, 'x');
      if (parts.size() != 2) bad(key, "BxT, two whole numbers", text);
      c.batch = to_int(key, parts[0], 0, kMaxTokens);
      c.length = to_int(key, parts[1], 0, kMaxTokens);
    }};
constexpr Value kLowerBound = {[] { return std::string("number < 0"); },
                               [](const Case& c) { return number(c.lower_bound); },
                               [](Case& c, const char* key, Text text) {
                                 c.lower_bound = to_number(key, text, "a number below 0");
                                 if (!(c.lower_bound < 0)) bad(key, "a number below 0", text);
                               }};
constexpr Value kScale = {
    [] { return std::string("number or default"); },
    [](const Case& c) { return c.scale ? number(*c.scale) : std::string("default"); },
    [](Case& c, const char* key, Text text) {
      c.scale.reset();
      if (text != "default") c.scale = to_number(key, text, "a number or default");
    }};
constexpr Value kEps = {
    [] { return std::string("number >= 0 or default"); },
    [](const Case& c) { return c.eps ? number(*c.eps) : std::string("default"); },
    [](Case& c, const char* key, Text text) {
      constexpr const char* kExpected = "a number of at least 0 or default";
      c.eps.reset();
      if (text == "default") return;
      c.eps = to_number(key, text, kExpected);
      if (!(*c.eps >= 0)) bad(key, kExpected, text);
    }};
constexpr Value kChunk = {[] { return std::string("16|32|64"); },
                          [](const Case& c) { return std::to_string(c.chunk); },
                          [](Case& c, const char* key, Text text) {
                            if (text != "16" && text != "32" && text != "64")
                              bad(key, "16|32|64", text);
                            c.chunk = static_cast<int>(to_int(key, text, 16, 64));
                          }};
constexpr Value kSplit = {[] { return joined(kSplits) + "|number"; },
                          [](const Case& c) {
                            return c.split == Split::segments
                                       ? std::to_string(c.segment)
                                       : std::string(kSplits[static_cast<size_t>(c.split)]);
                          },
                          [](Case& c, const char* key, Text text) {
                            c.segment = 0;
                            for (size_t i = 0; i < kSplits.size(); ++i) {
                              if (text != kSplits[i]) continue;
                              c.split = static_cast<Split>(i);
                              return;
                            }
                            if (text.empty() || text[0] < '0' || text[0] > '9')
                              bad(key, joined(kSplits) + " or a segment length", text);
                            c.split = Split::segments;
                            c.segment = to_int(key, text, 1, kMaxTokens);
                          }};
constexpr Value kParts = {
    [] { return std::string("list of u,kg,qg, or none"); },
    [](const Case& c) {
      std::string s;
      if (c.u) append(s, ",", "u");
      if (c.kg) append(s, ",", "kg");
      if (c.qg) append(s, ",", "qg");
      return s.empty() ? std::string("none") : s;
    },
    [](Case& c, const char* key, Text text) {
      c.u = c.kg = c.qg = false;
      if (text == "none") return;
      for (const std::string& s : split_text(text, ',')) {
        bool* part = s == "u" ? &c.u : s == "kg" ? &c.kg : s == "qg" ? &c.qg : nullptr;
        if (part == nullptr) bad(key, "a list of u, kg, qg, or none", text);
        *part = true;
      }
    }};
constexpr Value kLogDecays = {
    [] { return joined(kGateValues) + "|number"; },
    [](const Case& c) {
      return c.gates == Gates::constant ? number(c.gate_value)
                                        : std::string(kGateValues[static_cast<size_t>(c.gates)]);
    },
    [](Case& c, const char* key, Text text) {
      c.gate_value = 0;
      for (size_t i = 0; i < kGateValues.size(); ++i) {
        if (text != kGateValues[i]) continue;
        c.gates = static_cast<Gates>(i);
        return;
      }
      c.gates = Gates::constant;
      c.gate_value = to_number(key, text, joined(kGateValues) + " or a number");
    }};

// ---- What a key needs beside it -------------------------------------------------------------

using C = const Case&;

template <Op... Ops>
std::string only(C c) {
  if (is_any(c.op, {Ops...})) return "";
  std::string text;
  (append(text, " or ", name(Ops)), ...);
  return text + " as the operation";
}
// The first of two needs that is not met.
template <auto First, auto Second>
std::string both(C c) {
  const std::string s = First(c);
  return s.empty() ? Second(c) : s;
}
std::string need(bool is_met, const char* what) { return is_met ? "" : what; }

std::string always(C) { return ""; }
std::string packed(C c) { return need(c.packed, "seqs"); }
std::string no_pool(C c) { return need(c.pool == Pool::none, "pool=none"); }
std::string a_gate(C c) { return need(c.gate != Gate::none || c.gv, "gate=head or gate=channel"); }
std::string a_beta(C c) { return need(c.beta != Beta::none, "a beta"); }
std::string a_form(C c) {
  return need(c.form != GateForm::log_decay, "form=softplus or form=bounded");
}
std::string is_bounded(C c) { return need(c.form == GateForm::bounded, "form=bounded"); }
std::string has_ckpt(C c) { return need(!c.ckpt.empty(), "ckpt"); }
std::string no_gradient(C c) { return need(!c.is_gradient(), "an operation that is no gradient"); }

constexpr auto kSequenceOp = only<Op::forward, Op::decode, Op::backward, Op::step>;
constexpr auto kStateOp =
    only<Op::forward, Op::decode, Op::backward, Op::conv, Op::move, Op::commit, Op::step>;
constexpr auto kInitialOp = only<Op::forward, Op::decode, Op::backward, Op::conv, Op::step>;
constexpr auto kForward = only<Op::forward>;
constexpr auto kSplitOp = only<Op::forward, Op::backward>;
constexpr auto kDecode = only<Op::decode, Op::step>;
constexpr auto kBackward = only<Op::backward>;
std::string by_tokens(C c) {
  return need(c.is_decode() || c.save == Save::none, "decode, or backward with save=none");
}
constexpr auto kByTokens = both<only<Op::decode, Op::backward, Op::step>, by_tokens>;
constexpr auto kConv = only<Op::conv>;
constexpr auto kConvOrStep = only<Op::conv, Op::step>;
constexpr auto kStep = only<Op::step>;
constexpr auto kMove = only<Op::move>;
constexpr auto kLayersOp = only<Op::move, Op::commit>;
constexpr auto kKeptOp = both<only<Op::forward, Op::decode, Op::conv, Op::step>, no_gradient>;
constexpr auto kTwoPoolsOp =
    both<only<Op::forward, Op::decode, Op::conv, Op::move, Op::step>, no_gradient>;
constexpr auto kFlagOp =
    both<only<Op::forward, Op::decode, Op::conv, Op::commit, Op::step>, no_gradient>;
constexpr auto kPoolOp =
    both<only<Op::forward, Op::decode, Op::conv, Op::move, Op::commit, Op::step>, no_gradient>;
constexpr auto kGateOp = only<Op::forward, Op::decode, Op::backward, Op::cumsum, Op::gate, Op::kkt,
                              Op::scores, Op::scores_inverse, Op::wy, Op::step>;
constexpr auto kGateKindOp =
    only<Op::forward, Op::decode, Op::backward, Op::cumsum, Op::gate, Op::kkt, Op::scores,
         Op::scores_inverse, Op::wy, Op::commit, Op::step>;
constexpr auto kFormOp =
    both<only<Op::forward, Op::decode, Op::backward, Op::cumsum, Op::gate, Op::step>, a_gate>;
constexpr auto kKeyHeadOp = only<Op::forward, Op::decode, Op::backward, Op::l2norm, Op::kkt,
                                 Op::scores, Op::scores_inverse, Op::wy, Op::rmsnorm, Op::step>;
constexpr auto kBetaOp =
    only<Op::forward, Op::decode, Op::backward, Op::kkt, Op::scores_inverse, Op::wy, Op::step>;

std::string value_heads(C c) {
  return need(!is_any(c.op, {Op::l2norm, Op::rmsnorm, Op::conv}),
              "another operation than l2norm, rmsnorm and conv");
}
std::string key_width(C c) {
  if (c.op == Op::conv) return "another operation than conv";
  return need(!is_any(c.op, {Op::cumsum, Op::gate}) || c.gate == Gate::channel, "gate=channel");
}
std::string an_activation(C c) {
  return need(c.op == Op::conv || c.op == Op::step || (c.op == Op::rmsnorm && c.z),
              "conv, step or rmsnorm with z");
}
std::string a_weight(C c) {
  return need(c.op == Op::conv || c.op == Op::step || (c.op == Op::rmsnorm && c.weight),
              "conv, step or rmsnorm");
}
std::string a_norm(C c) {
  return need(c.op == Op::rmsnorm || c.has_norm(), "rmsnorm, or step with a norm");
}
std::string value_width(C c) { return need(c.op != Op::wy || c.u, "u among parts"); }
std::string rows_dtype(C c) {
  return need(!is_any(c.op, {Op::cumsum, Op::gate, Op::move, Op::commit}),
              "another operation than cumsum, gate, move and commit");
}
std::string own_outputs(C c) {
  return need(c.is_block() || (c.op == Op::conv && c.gradient) ||
                  (c.op == Op::move && c.write_pool) || c.has_norm(),
              "a building block, conv_backward, move with writepool=1 or step with a norm");
}
// Whether a state of sdtype is given or asked for.
bool has_states(C c) {
  if (c.is_gradient()) return c.init;
  return c.pool != Pool::none || c.init || c.final_state != Final::none;
}
std::string a_state(C c) { return need(has_states(c), "init=1, final=1 or a pool"); }
std::string any_state(C c) {
  return need(has_states(c) || !c.ckpt.empty() || (c.is_gradient() && c.dfinal), "a state");
}
std::string index_lists(C c) {
  return need((c.pool != Pool::none && c.pool != Pool::identity) || !c.ckpt.empty(),
              "a pool with lists or ckpt");
}
std::string any_lists(C c) { return c.from.empty() ? index_lists(c) : ""; }
std::string two_lists(C c) {
  const bool has_one = c.pool == Pool::none || c.pool == Pool::inplace ||
                       c.pool == Pool::writelist || c.pool == Pool::drafts;
  return need(!has_one || (c.pool == Pool::drafts && !c.is_decode()),
              "a pool without lists, or with two");
}
std::string half_states(C c) {
  return need(has_states(c) && c.sdtype != DType::f32 && !c.record,
              "a state, sdtype=bf16 or f16, and no record");
}
std::string other_pool(C c) { return need(c.write_pool, "writepool=1"); }
std::string drafts(C c) {
  const bool may_branch = c.pool == Pool::drafts || (c.record && c.pool == Pool::inplace);
  return need(c.op == Op::commit || (c.is_decode() && may_branch),
              "commit, or decode with pool=drafts, or with record=1 and pool=inplace");
}
std::string initial_state(C c) { return need(c.init || c.pool != Pool::none, "init=1 or a pool"); }
std::string incoming(C c) {
  return need(c.op == Op::backward || (c.gradient && is_any(c.op, {Op::conv, Op::wy})),
              "backward, conv_backward or wy_backward as the operation");
}
std::string incoming_state(C c) {
  return need(c.op == Op::backward || (c.gradient && c.op == Op::conv),
              "backward or conv_backward as the operation");
}
std::string inverse_gradient(C c) {
  return need(c.op == Op::inverse && c.gradient, "inverse_backward as the operation");
}
std::string with_keys(C c) {
  return need(
      !is_any(c.op, {Op::cumsum, Op::gate, Op::rmsnorm, Op::conv, Op::move, Op::commit, Op::step}),
      "an operation with keys");
}
std::string no_dense(C c) { return need(c.packed, "no dense"); }
std::string no_seqs(C c) { return need(!c.packed, "no seqs"); }

// ---- The table ------------------------------------------------------------------------------

// In the order in which a canonical line has them.
constexpr Key kKeys[] = {
    {"gate", one_of<&Case::gate, kGates>(), "head",
     "no decay, one per value head, one per key channel", kGateKindOp},
    {"form", one_of<&Case::form, kForms>(), "log_decay", "how g becomes the log decay", kFormOp},
    {"lower_bound", kLowerBound, "-5", "of form=bounded", both<kFormOp, is_bounded>},
    {"alog", flag<&Case::alog>(), "1", "A_log is given (softplus: always)",
     both<kFormOp, is_bounded>},
    {"dtbias", flag<&Case::dtbias>(), "1", "dt_bias is given", both<kFormOp, a_form>},
    {"seqs", kSequenceLengths, "", "packed sequences (instead of dense)", no_dense},
    {"dense", kDense, "1x128", "a batch of B rows of T tokens", no_seqs},
    {"pad", whole<&Case::pad, 0, kMaxTokens>(), "0", "padding rows after the packed tokens",
     packed},
    {"cu", index_dtype<&Case::cu>(), "i32", "dtype of cu_seqlens", packed},
    {"cuhost", flag<&Case::cuhost>(), "0", "the host copy of cu_seqlens is given too", packed},
    {"H", whole<&Case::H, 1, 1 << 20>(), "2", "query/key heads", kKeyHeadOp},
    {"HV", whole<&Case::HV, 1, 1 << 20>(), "H, or 2", "value heads, a multiple of H", value_heads},
    {"K", whole<&Case::K, 1, 1 << 16>(), "64",
     "key width (rmsnorm, l2norm: of a row; inverse: of the keys that A is made of)", key_width},
    {"V", whole<&Case::V, 1, 1 << 20>(), "64", "value width",
     both<only<Op::forward, Op::decode, Op::backward, Op::wy, Op::move, Op::commit, Op::step>,
          value_width>},
    {"layers", whole<&Case::layers, 0, 1 << 20>(), "0",
     "move, commit: layers of the pools (0: without that dimension)", kLayersOp},
    {"rhead", whole<&Case::read_head, 0, 1 << 20>(), "0",
     "move: the first of the HV heads that are read (above 0: one more behind them)", kMove},
    {"whead", whole<&Case::write_head, 0, 1 << 20>(), "0",
     "move: the first of those that are written, likewise", kMove},
    {"D", whole<&Case::D, 1, 1 << 20>(), "64", "conv: channels", kConv},
    {"W", whole<&Case::W, 1, 8>(), "4", "conv, step: taps", kConvOrStep},
    {"S", whole<&Case::S, 1, 64>(), "W - 1, at least 1", "conv, step: inputs in a state of conv",
     both<kConvOrStep, any_state>},
    {"dtype", float_dtype<&Case::dtype>(), "f32",
     "of q k v o; of a building block's x q k v a; of conv's x and out; of step's x and z",
     rows_dtype},
    {"gdtype", float_dtype<&Case::gdtype>(), "f32", "of g and gv", both<kGateOp, a_gate>},
    {"betadtype", float_dtype<&Case::betadtype>(), "f32", "of beta", both<kBetaOp, a_beta>},
    {"pdtype", float_dtype<&Case::pdtype>(), "f32", "of A_log and dt_bias", both<kFormOp, a_form>},
    {"wdtype", float_dtype<&Case::wdtype>(), "f32", "conv, rmsnorm, step: of weights and bias",
     a_weight},
    {"sdtype", float_dtype<&Case::sdtype>(), "f32",
     "of initial and final state, or the pool (f16: conv)", both<kStateOp, a_state>},
    {"cdtype", float_dtype<&Case::cdtype>(), "f32", "of the checkpoints", both<kKeptOp, has_ckpt>},
    {"odtype", float_dtype<&Case::odtype>(), "f32",
     "of a building block's outputs or gradients; conv_backward: all but dx; move: of the pool "
     "that is written; step: of out",
     own_outputs},
    {"windows", float_dtype<&Case::windows>(), "dtype's", "step: of the states of its conv", kStep},
    {"beta", one_of<&Case::beta, kBetas>(), "value",
     "absent (1), as given, through a sigmoid, twice that (blocks: none|value; inverse: its data)",
     only<Op::forward, Op::decode, Op::backward, Op::kkt, Op::scores_inverse, Op::inverse, Op::wy,
          Op::step>},
    {"betavec", flag<&Case::betavec>(), "0",
     "decode, and backward with save=none: beta per value column", both<kByTokens, a_beta>},
    {"gv", flag<&Case::gv>(), "0", "decode, and backward with save=none: a value-wise log decay",
     kByTokens},
    {"l2norm", flag<&Case::l2norm>(), "0", "q and k are normalised inside", kSequenceOp},
    {"scale", kScale, "default", "K^-1/2 unless given (cumsum: 1)",
     only<Op::forward, Op::decode, Op::backward, Op::cumsum, Op::scores, Op::scores_inverse,
          Op::step>},
    {"act", one_of<&Case::activation, kActivations>(), "none",
     "what the sums of conv (or step's) go through, or z of rmsnorm (which alone has sigmoid)",
     an_activation},
    {"norm", one_of<&Case::norm, kNorms>(), "off", "step: no norm, or what its z goes through",
     kStep},
    {"z", flag<&Case::z>(), "1", "rmsnorm, step: a gate is given", a_norm},
    {"weight", flag<&Case::weight>(), "1", "rmsnorm, step: a weight is given", a_norm},
    {"eps", kEps, "default", "rmsnorm, step: what is added to the mean square", a_norm},
    {"bias", flag<&Case::bias>(), "1", "conv, step: a bias is given", kConvOrStep},
    {"state", one_of<&Case::state, kStates>(), "kv",
     "states K-first or V-first; conv: [D,S] or [S,D] in memory", both<kStateOp, any_state>},
    {"init", flag<&Case::init>(), "0",
     "an initial state is given (gradients: and its gradient asked for)",
     both<kInitialOp, no_pool>},
    {"final", one_of<&Case::final_state, kFinals>(), "1",
     "a final state is asked for (inplace: over the initial one)", both<kKeptOp, no_pool>},
    {"do", flag<&Case::d_o>(), "1", "gradients: that of o (conv: of out; wy: of w) is given",
     incoming},
    {"dfinal", flag<&Case::dfinal>(), "1", "gradients: that of the final state is given",
     incoming_state},
    {"save", one_of<&Case::save, kSaves>(), "states",
     "backward: starts from the inputs alone, from the states that forward kept, from all it kept",
     kBackward},
    {"pool", one_of<&Case::pool, kPools>(), "none",
     "states in a pool: no lists; one list (read, write); two lists; read -1; write -1; all by "
     "turns with skipped ones; decode: a slot per token; all read one slot; by accepted tokens",
     kPoolOp},
    {"writepool", flag<&Case::write_pool>(), "0", "another pool is written than the one read",
     both<kTwoPoolsOp, two_lists>},
    {"transpose", flag<&Case::transpose>(), "0", "move: to the other layout",
     both<kMove, other_pool>},
    {"record", flag<&Case::record>(), "0",
     "decode: drafted tokens leave a record, no state is written", kDecode},
    {"tree", flag<&Case::tree>(), "0",
     "decode, commit: drafted tokens are a tree, parents are given", drafts},
    {"null", whole<&Case::null_slot, -1, 1000>(), "-1", "slots up to this one are none",
     both<kPoolOp, index_lists>},
    {"hasinit", flag<&Case::has_init>(), "0",
     "has_initial_state is given: every third sequence starts from zero",
     both<kFlagOp, initial_state>},
    {"stochastic", flag<&Case::stochastic>(), "0",
     "decode: 16-bit states are rounded by chance, a seed and positions are given",
     both<kDecode, half_states>},
    {"idx", index_dtype<&Case::idx>(), "i32",
     "dtype of the index lists of pool and checkpoints, of offsets and positions",
     both<kPoolOp, any_lists>},
    {"ckpt", kCheckpoints, "none",
     "states kept after so many tokens of every sequence that is long enough", kKeptOp},
    {"ckptskip", flag<&Case::ckptskip>(), "0", "every second checkpoint has slot -1",
     both<kKeptOp, has_ckpt>},
    {"chunk", kChunk, "64", "chunk length (inverse: width of A)",
     only<Op::forward, Op::backward, Op::cumsum, Op::kkt, Op::scores, Op::scores_inverse,
          Op::inverse, Op::wy>},
    {"split", kSplit, "auto", "how a sequence may be cut", kSplitOp},
    {"recurrent", kRecurrent, "none",
     "tokens in the recurrent form: from so many on, by turns for the sequences", kForward},
    {"reverse", flag<&Case::reverse>(), "0", "sums from the chunk's end", only<Op::cumsum>},
    {"rstd", flag<&Case::rstd>(), "0", "1 / norm is asked for",
     both<only<Op::l2norm>, no_gradient>},
    {"parts", kParts, "u,kg,qg", "outputs beside w", only<Op::wy>},
    {"result", flag<&Case::from_result>(), "0", "inverse_backward: from the result instead of A",
     inverse_gradient},
    {"strided", one_of<&Case::strided, kLayouts>(), "0",
     "contiguous; views into wider buffers; heads outside of tokens; inputs with head stride 0; "
     "slices of longer rows and gaps between states, all at multiples of 16 bytes",
     always},
    {"gates", kLogDecays, "random (form=softplus: softplus)",
     "log decays: -5 sigmoid(n); a quarter of heads and channels near -1e-4; -16..-1 times "
     "softplus(n); 0/-5/-20/-1000 mixed; 0; the number",
     both<kGateOp, a_gate>},
    {"keys", one_of<&Case::keys, kKeyValues>(), "random",
     "directions of k: independent; one for all tokens; near one; every third row of q and k zero",
     with_keys},
    {"seed", whole<&Case::seed, 0, INT64_MAX>(), "1", "of the random inputs", always},
};

constexpr Operation kOperations[] = {{Op::forward, false},
                                     {Op::decode, false},
                                     {Op::backward, false},
                                     {Op::cumsum, false},
                                     {Op::gate, false},
                                     {Op::l2norm, false},
                                     {Op::kkt, false},
                                     {Op::scores, false},
                                     {Op::inverse, false},
                                     {Op::wy, false},
                                     {Op::scores_inverse, false},
                                     {Op::rmsnorm, false},
                                     {Op::conv, false},
                                     {Op::move, false},
                                     {Op::commit, false},
                                     {Op::step, false},
                                     {Op::cumsum, true},
                                     {Op::gate, true},
                                     {Op::l2norm, true},
                                     {Op::kkt, true},
                                     {Op::scores, true},
                                     {Op::inverse, true},
                                     {Op::wy, true},
                                     {Op::rmsnorm, true},
                                     {Op::conv, true}};

}  // namespace

std::span<const Key> keys() { return kKeys; }
std::span<const Operation> operations() { return kOperations; }

const Key* find_key(std::string_view name) {
  for (const Key& k : kKeys) {
    if (name == k.name) return &k;
  }
  return nullptr;
}

}  // namespace deltic::cases
