// The case grammar: lines and files of them, read and printed by the table of keys.
#include "cases/case.h"

#include <dirent.h>
#include <sys/stat.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <set>
#include <sstream>

#include "cases/keys.h"

namespace deltic::cases {
namespace {

constexpr int64_t kMostDrafts = 16;
constexpr int kMaxExpansion = 100000;  // cases of one line: seconds to read, a day to run
// For who has not seen a line yet.
constexpr const char* kExample = " (a line: forward gate=head dense=1x4096 H=16 K=128 V=128)";

std::string text_of(const Operation& o) {
  return std::string(name(o.op)) + (o.gradient ? "_backward" : "");
}
std::string op_names() {
  std::string all;
  for (const Operation& o : operations()) append(all, "|", text_of(o));
  return all;
}

std::string key_names() {
  std::string all;
  for (const Key& k : keys()) append(all, " ", k.name);
  return all;
}

// Defaults that depend on other keys. `given` holds the keys of the line.
void apply_defaults(Case& c, const std::set<std::string, std::less<>>& given) {
  const auto is_given = [&](const char* key) { return given.find(key) != given.end(); };
  if (c.op == Op::move && !is_given("pool")) c.pool = Pool::move;
  if (c.op == Op::commit && !is_given("pool")) c.pool = Pool::inplace;
  if (c.record && !is_given("final")) c.final_state = Final::none;
  if (is_any(c.op, {Op::cumsum, Op::gate, Op::inverse, Op::move, Op::commit})) {
    c.H = c.HV;
  } else if (!is_given("HV")) {
    c.HV = c.H;
  }
  if (!is_given("gates")) {
    c.gates = c.form == GateForm::softplus ? Gates::softplus : Gates::random;
  }
  if (c.op == Op::backward && !is_given("save")) c.save = Save::states;
  if (!is_given("S")) c.S = std::max<int64_t>(c.W - 1, 1);
  if (!is_given("S") && c.pool == Pool::drafts) c.S = c.W + std::max<int64_t>(c.longest(), 1);
  if (c.op == Op::step && !is_given("windows")) c.windows = c.dtype;
  if (c.pool != Pool::none) {
    c.init = false;
    c.final_state = Final::none;
  }
}

[[noreturn]] void fail(const std::string& text) { throw CaseError("case: " + text); }

// What conv and step have in common.
void check_taps(const Case& c) {
  if (c.activation == Activation::sigmoid) {
    fail("act: expected none or silu for " + op_name(c) + ", got 'sigmoid'");
  }
  if (c.S < c.W - 1) {
    fail("S: expected at least W - 1 = " + std::to_string(c.W - 1) + ", got " +
         std::to_string(c.S));
  }
  const int64_t window = c.W - 2 + std::max<int64_t>(c.longest(), 1);
  if (c.pool == Pool::drafts && c.S < window) {
    fail("S: expected at least W - 2 and the longest length, " + std::to_string(window) +
         ", with pool=drafts, got " + std::to_string(c.S));
  }
}

void check_step(const Case& c) {
  check_taps(c);
  if (c.windows != DType::f32 && c.windows != c.dtype) {
    fail("windows: expected f32 or dtype's " + std::string(name_of(c.dtype)) + ", got '" +
         name_of(c.windows) + "'");
  }
  if (c.pool == Pool::none && !c.init && c.final_state == Final::none) {
    fail("final: expected a state for step (a pool, init=1 or final=1), got '0'");
  }
  if (c.tree && c.W > 1) {
    fail("tree: expected 0 for step with W above 1, got 1");
  }
  if (c.has_norm() && !c.z && c.norm != StepNorm::none) {
    fail("norm: expected none or off without z, got '" + *value_of(c, "norm") + "'");
  }
}

void check_conv(const Case& c) {
  check_taps(c);
  if (c.sdtype != DType::f32 && c.sdtype != c.dtype) {
    fail("sdtype: expected f32 or dtype's " + std::string(name_of(c.dtype)) + ", got '" +
         name_of(c.sdtype) + "'");
  }
  if (!c.ckpt.empty() && c.cdtype != DType::f32 && c.cdtype != c.dtype) {
    fail("cdtype: expected f32 or dtype's " + std::string(name_of(c.dtype)) + " for conv, got '" +
         name_of(c.cdtype) + "'");
  }
  if (!c.ckpt.empty() && c.pool == Pool::drafts) {
    fail("ckpt: expected another pool than drafts for conv, got '" + *value_of(c, "ckpt") + "'");
  }
  if (c.strided == Layout::head_major || c.strided == Layout::expand) {
    fail("strided: expected 0, 1 or pages for conv, which has no heads, got '" +
         *value_of(c, "strided") + "'");
  }
}

void check_move(const Case& c) {
  const bool has_two_lists = c.pool == Pool::move || c.pool == Pool::start ||
                             c.pool == Pool::peek || c.pool == Pool::mixed || c.pool == Pool::fork;
  if (!has_two_lists) {
    fail("pool: expected move, start, peek, mixed or fork for move, got '" + *value_of(c, "pool") +
         "'");
  }
  const int64_t apart = std::abs(c.read_head - c.write_head);
  if (!c.write_pool && apart > 0 && apart < c.HV) {
    fail("whead: expected the heads that are read, or none of them, without writepool=1, got " +
         std::to_string(c.write_head));
  }
}

void check_lengths(const Case& c, const char* key) {
  if (c.longest() <= kMostDrafts) return;
  fail(std::string(key) + ": expected lengths up to " + std::to_string(kMostDrafts) + ", got " +
       std::to_string(c.longest()));
}
void check_record(const Case& c) {
  check_lengths(c, "record");
  const bool only_reads = c.pool == Pool::none || c.pool == Pool::identity ||
                          c.pool == Pool::inplace || c.pool == Pool::drafts;
  if (!only_reads || c.final_state != Final::none || c.write_pool || !c.ckpt.empty() || c.gv) {
    fail(
        "record: expected final=0 or a pool of identity, inplace or drafts, and no writepool, "
        "ckpt or gv, got '1'");
  }
}
void check_commit(const Case& c) {
  check_lengths(c, "dense");
  if (c.pool == Pool::none || c.pool == Pool::tokens || c.pool == Pool::drafts) {
    fail("pool: expected slots of one state each for commit, got '" + *value_of(c, "pool") + "'");
  }
}

// Conflicts between keys that each have a good value.
void check_conflicts(const Case& c) {
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
  if (c.pool == Pool::tokens && !c.is_decode()) {
    fail("pool: expected decode or step as the operation for tokens, got '" + op_name(c) + "'");
  }
  if (c.op == Op::conv) check_conv(c);
  if (c.op == Op::step) check_step(c);
  if (c.op == Op::move) check_move(c);
  if (c.record) check_record(c);
  if (c.op == Op::commit) check_commit(c);
  if (c.tree && c.longest() > kMostDrafts) {
    fail("tree: expected lengths up to " + std::to_string(kMostDrafts) + ", got " +
         std::to_string(c.longest()));
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
  constexpr const char* names[] = {"f32", "bf16", "f16", "f64", "i32", "i64", "u8"};
  return names[static_cast<int>(t)];
}
bool is_half(DType t) { return t == DType::bf16 || t == DType::f16; }
int64_t size_of(DType t) {
  if (t == DType::u8) return 1;
  return is_half(t) ? 2 : t == DType::f32 || t == DType::i32 ? 4 : 8;
}

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
int64_t Case::recurrent_from(int64_t n) const {
  const int64_t token = from[static_cast<size_t>(n) % from.size()], end = sequence_length(n);
  return token == kCkptEnd ? end : std::min(token, end);
}
int64_t Case::longest() const {
  if (!packed) return batch > 0 ? length : 0;
  return seqs.empty() ? 0 : *std::max_element(seqs.begin(), seqs.end());
}

int64_t Case::record_tokens() const {
  return op == Op::commit ? longest() : std::min<int64_t>(longest() + 1, kMostDrafts);
}

Case parse(std::string_view line) {
  std::istringstream words{std::string(line)};
  std::string word;
  if (!(words >> word))
    throw CaseError(std::string("case: expected an operation, got an empty line") + kExample);
  Case c;
  const auto all_ops = operations();
  const auto found = std::find_if(all_ops.begin(), all_ops.end(),
                                  [&](const Operation& o) { return word == text_of(o); });
  if (found == all_ops.end()) {
    throw CaseError("case: operation: expected one of " + op_names() + ", got '" + word + "'" +
                    kExample);
  }
  c.op = found->op;
  c.gradient = found->gradient;

  std::map<std::string, std::string, std::less<>> given;
  while (words >> word) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos || equals == 0) {
      throw CaseError("case: line: expected key=value, got '" + word + "'" + kExample);
    }
    if (word.find_first_of("{}") != std::string::npos) {
      throw CaseError("case: line: expected one case, got braces, which stand for several: '" +
                      word + "'" + kExample);
    }
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
    k.value.set(c, k.name, it->second);
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

std::string op_name(const Case& c) { return text_of(Operation{c.op, c.gradient}); }

std::string canonical(const Case& c) {
  std::string line = op_name(c);
  for (const Key& k : keys()) {
    if (k.needs(c).empty()) append(line, " ", std::string(k.name) + "=" + k.value.get(c));
  }
  return line;
}

std::string brief(const Case& c) {
  // Leaves out every key without which the line still means the same; a few are always shown.
  std::vector<std::string> words;
  for (const Key& k : keys()) {
    if (k.needs(c).empty()) words.push_back(std::string(k.name) + "=" + k.value.get(c));
  }
  const auto joined = [&] {
    std::string line = op_name(c);
    for (const std::string& w : words) line += " " + w;
    return line;
  };
  const Case whole = parse(joined());
  for (size_t i = words.size(); i-- > 0;) {
    const std::string word = words[i];
    const std::string name = word.substr(0, word.find('='));
    if (name == "gate" || name == "seqs" || name == "dense" || name == "K" || name == "V" ||
        name == "dtype" || name == "H" || name == "D" || name == "W") {
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
  if (key == "op") return op_name(c);
  const Key* k = find_key(key);
  if (k == nullptr || !k->needs(c).empty()) return std::nullopt;
  return k->value.get(c);
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

// A path's last part without its ending. These few functions are POSIX's, because std::filesystem
// is in no libstdc++ of 2018, which the Python package runs with.
static std::string stem_of(const std::string& path) {
  std::string name = path.substr(path.rfind('/') + 1);
  const size_t dot = name.rfind('.');
  if (dot != std::string::npos && dot > 0) name.erase(dot);
  return name;
}

bool is_folder(const std::string& path) {
  struct stat found {};
  return stat(path.c_str(), &found) == 0 && S_ISDIR(found.st_mode);
}

std::vector<SourcedCase> read_text(std::string_view text, const std::string& path) {
  std::istringstream in{std::string(text)};
  const std::string stem = stem_of(path);
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
  errno = 0;
  std::ifstream in(path);
  if (!in) {
    throw CaseError("case: file: expected a readable file, got '" + path + "' (" +
                    std::strerror(errno) + ")");
  }
  std::string text;
  char part[4096];
  while (in.read(part, sizeof part), in.gcount() > 0) {
    const std::string_view read(part, static_cast<size_t>(in.gcount()));
    const bool is_text = std::none_of(read.begin(), read.end(), [](char c) {
      return (c >= 0 && c < ' ' && std::strchr("\t\n\r\f", c) == nullptr) || c == 0;
    });
    if (!is_text) {
      throw CaseError("case: file: expected lines of text, got '" + path + "', a binary file");
    }
    text += read;
  }
  return read_text(text, path);
}

std::vector<SourcedCase> read_folder(const std::string& path) {
  const std::unique_ptr<DIR, int (*)(DIR*)> folder(opendir(path.c_str()), closedir);
  if (folder == nullptr)
    throw CaseError("case: folder: expected a readable folder, got '" + path + "'");
  std::vector<std::string> files;
  while (const dirent* entry = readdir(folder.get())) {
    const std::string_view name = entry->d_name;
    if (name.size() > 4 && name.ends_with(".txt")) files.push_back(path + "/" + std::string(name));
  }
  if (files.empty()) {
    throw CaseError("case: folder: expected files *.txt in it, got '" + path + "', which has none");
  }
  std::sort(files.begin(), files.end());
  std::vector<SourcedCase> list;
  for (const std::string& f : files) {
    for (SourcedCase& c : read_file(f)) list.push_back(std::move(c));
  }
  return list;
}

std::vector<SourcedCase> read_cases(const std::string& path) {
  std::vector<SourcedCase> list = is_folder(path) ? read_folder(path) : read_file(path);
  if (list.empty()) throw CaseError("case: file: expected cases, got '" + path + "' without any");
  return list;
}

void check_filter(std::string_view filter) {
  const auto refuse = [](const std::string& key, const std::string& list, const std::string& got) {
    throw CaseError("filter: " + key + ": expected one of " + list + ", got '" + got + "'");
  };
  const auto all_ops = operations();
  std::istringstream words{std::string(filter)};
  for (std::string word; words >> word;) {
    const size_t equals = word.find('=');
    if (equals == std::string::npos) continue;
    const std::string key = word.substr(0, equals), value = word.substr(equals + 1);
    if (key == "op") {
      const bool is_known = std::any_of(all_ops.begin(), all_ops.end(),
                                        [&](const Operation& o) { return value == text_of(o); });
      if (!is_known) refuse(key, op_names(), value);
      continue;
    }
    const Key* known = find_key(key);
    if (known == nullptr) refuse("key", "op " + key_names(), key);
    try {
      Case c;
      known->value.set(c, known->name, value);
    } catch (const CaseError& e) {
      // A list of names is said in full; of numbers and the like, what the key itself says.
      const std::string takes = known->value.takes(), text = e.what();
      if (takes.find('|') != std::string::npos) refuse(key, takes, value);
      throw CaseError("filter: " + text.substr(text.find(": ") + 2));
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
    out << "  " << k.name << "=" << k.value.takes();
    if (k.default_text[0] != '\0') out << "  (" << k.default_text << ")";
    out << "\n      " << k.help << "\n";
  }
  return out.str();
}

bool is_standard(const Case& c) {
  const bool gated = c.gate != Gate::none || c.gv;
  const bool gates =
      !gated || c.gates == Gates::random || c.gates == Gates::slow || c.gates == Gates::softplus;
  return gates && !has_adversarial_keys(c);
}

bool has_adversarial_keys(const Case& c) {
  return c.keys != Keys::random || c.beta == Beta::two_sigmoid;
}

}  // namespace deltic::cases
