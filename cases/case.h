// Cases: one text line describes one call; the grammar that verify, bench, explain and the tests
// share.
#pragma once

#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "deltic/deltic.hpp"

namespace deltic::cases {

enum class Gate { none, head, channel };
enum class Beta { none, value, sigmoid, two_sigmoid };
// How the log decays are drawn. `constant` is a number in the line.
enum class Gates { random, slow, softplus, mixed, zero, constant };
enum class Keys { random, repeated, correlated, zero };
// none: no final state. separate: own tensor. inplace: the same tensor as the initial state.
enum class Final { none, separate, inplace };
// States in a pool. identity: no index lists, slot n. inplace, writelist: one list for both, given
// as the read or as the write list. move: read from one slot, write to another. start: read -1.
// peek: write -1. mixed: these by turns, and skipped sequences (both -1). tokens (decode only): a
// write slot for every token, every third -1. fork: all read one slot and write to their own.
// drafts: read by accepted counts from a table of slots, which decode also writes, token by token;
// conv: windows in place. Every fourth sequence is skipped.
enum class Pool {
  none,
  identity,
  inplace,
  writelist,
  move,
  start,
  peek,
  mixed,
  tokens,
  fork,
  drafts
};
// Memory of the tensors. packed: contiguous. wide: views into wider buffers. head_major: heads
// outside of tokens. expand: as packed, but the inputs' head stride is 0 (all heads read one).
// pages: rows as slices of longer rows, slots of states half as long again as what they hold.
enum class Layout { packed, wide, head_major, expand, pages };

// Of a step: no norm; with a gate z that goes through nothing, silu or sigmoid.
enum class StepNorm { off, none, silu, sigmoid };

// A line was wrong. The text names the key and what was expected.
class CaseError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

inline constexpr int64_t kCkptEnd = -1;  // offset `end`: the sequence's length

// Plain data. Fields that mean nothing for the operation keep their defaults (see normalise).
struct Case {
  Op op = Op::forward;
  bool gradient = false;  // of a building block or of conv: kkt_backward, conv_backward, ...

  // The gate
  Gate gate = Gate::head;
  GateForm form = GateForm::log_decay;
  double lower_bound = -5.0;  // of form=bounded
  bool alog = true;           // A_log is given (softplus: always)
  bool dtbias = true;         // dt_bias is given

  // Tokens: packed sequences or a dense batch
  bool packed = false;
  std::vector<int64_t> seqs;        // lengths, if packed
  int64_t batch = 1, length = 128;  // if dense
  int64_t pad = 0;                  // rows after the last packed token
  DType cu = DType::i32;
  bool cuhost = false;  // also give the host copy of cu_seqlens

  // Sizes
  int64_t H = 2, HV = 2, K = 64, V = 64;
  int64_t D = 64, W = 4, S = 3;           // conv: channels, taps, inputs in a state
  int64_t layers = 0;                     // move, commit: of pools; 0: they have no such dimension
  int64_t read_head = 0, write_head = 0;  // move: the first of HV heads

  // Dtypes
  DType dtype = DType::f32;      // q k v o; of a building block all inputs that are not named below
  DType gdtype = DType::f32;     // g and gv
  DType betadtype = DType::f32;  // beta
  DType pdtype = DType::f32;     // A_log and dt_bias
  DType wdtype = DType::f32;     // conv: weight and bias; rmsnorm: weight
  DType sdtype = DType::f32;     // initial and final state, pool
  DType cdtype = DType::f32;     // checkpoints
  DType odtype = DType::f32;     // outputs of a building block; gradients of one, of parameters of
                                 // conv; move: the pool that is written; step: out
  DType windows = DType::f32;    // step: the states of its conv

  // Options
  Beta beta = Beta::value;
  bool betavec = false;  // decode and its gradient: beta per value column
  bool gv = false;       // likewise: value-wise log decay
  bool l2norm = false;
  std::optional<double> scale;
  int chunk = 64;
  Split split = Split::automatic;
  int64_t segment = 0;        // segment length of split=<number>
  bool recurrent = false;     // forward: in the recurrent form, all tokens or, of sequence n, those
  std::vector<int64_t> from;  // from from[n % size] or its end on
  bool reverse = false;       // cumsum
  bool rstd = false;          // l2norm: the second output
  bool u = true, kg = true, qg = true;       // wy: optional outputs
  bool from_result = false;                  // inverse_backward: from the result instead of A
  Activation activation = Activation::none;  // conv; rmsnorm: of z
  bool bias = true;                          // conv: a bias is given
  bool z = true, weight = true;              // rmsnorm: they are given
  std::optional<double> eps;                 // rmsnorm
  StepNorm norm = StepNorm::off;             // step; z, weight and eps are its norm's

  // States
  StateLayout state = StateLayout::kv;
  bool init = false;
  Final final_state = Final::separate;
  Pool pool = Pool::none;
  bool write_pool = false;    // a second pool is written instead
  int64_t null_slot = -1;     // slots up to this one are none
  bool tree = false;          // decode: parents are given
  bool record = false;        // decode: tokens leave a record instead of states
  bool transpose = false;     // move: the pool that is written has the other layout
  bool has_init = false;      // has_initial_state is given, 0 for every third sequence
  bool stochastic = false;    // decode: 16-bit states are rounded by chance, positions are given
  DType idx = DType::i32;     // index lists of pool and checkpoints
  std::vector<int64_t> ckpt;  // token offsets, each for every sequence that is long enough
  bool ckptskip = false;      // every second checkpoint has slot -1

  // Gradients
  Save save = Save::none;  // backward: where it starts from (a line without the key: states)
  bool d_o = true;         // the gradient of o (conv: of out; wy: of w) is given
  bool dfinal = true;      // the gradient of the final state is given

  // Data
  Layout strided = Layout::packed;
  Gates gates = Gates::random;
  double gate_value = 0.0;  // of Gates::constant
  Keys keys = Keys::random;
  uint64_t seed = 1;

  bool operator==(const Case&) const = default;

  // forward, decode, backward: the operations with states.
  bool is_sequence() const { return op == Op::forward || op == Op::decode || op == Op::backward; }
  bool is_block() const {
    return !is_sequence() && op != Op::conv && op != Op::move && op != Op::commit && op != Op::step;
  }
  // Whether token after token goes through states: decode, and a step around it.
  bool is_decode() const { return op == Op::decode || op == Op::step; }
  bool has_norm() const { return op == Op::step && norm != StepNorm::off; }
  // Of conv, or of a step's: q, k and v side by side.
  int64_t channels() const { return op == Op::step ? 2 * H * K + HV * V : D; }
  bool is_gradient() const { return gradient || op == Op::backward; }
  // Lists of servers beside the pool's own two, and those with another meaning.
  bool has_servers_lists() const {
    return null_slot >= 0 || has_init || write_pool || pool == Pool::drafts || tree;
  }
  // Whether states of 16 bits are rounded from token to token.
  bool hands_states_on() const { return is_decode() || op == Op::commit || recurrent; }
  // The operation whose implementations run it.
  Op listed_op() const { return recurrent && from.empty() ? Op::decode : op; }
  int64_t num_sequences() const;    // N
  int64_t num_batches() const;      // B
  int64_t num_tokens() const;       // T, padding included
  int64_t num_real_tokens() const;  // over all batch rows, padding excluded
  int64_t sequence_length(int64_t n) const;
  int64_t sequence_begin(int64_t n) const;  // in the T dimension
  int64_t recurrent_from(int64_t n) const;  // with `from`
  int64_t longest() const;
  // Of a record: numbers of a row, and tokens: one more than there are where it may have them.
  int64_t record_width() const {
    return K + V + (gate == Gate::none ? 0 : gate == Gate::head ? 1 : K);
  }
  int64_t record_tokens() const;
};

// As a line begins: forward, kkt, kkt_backward, ...
std::string op_name(const Case& c);

// One line. Throws CaseError.
Case parse(std::string_view line);
// Every key that matters for the operation, in a fixed order. parse(canonical(c)) == c.
std::string canonical(const Case& c);
// As canonical, but without the keys that have their default: for tables.
std::string brief(const Case& c);
// Resets the fields that mean nothing for the operation, so that equal calls compare equal.
Case normalise(const Case& c);
// The value of one key as canonical prints it; nothing if the key does not apply.
std::optional<std::string> value_of(const Case& c, std::string_view key);

// A line with braces is the product of its alternatives: K={64,128} dtype={f32,bf16} gives four.
// More than 100000 are refused.
std::vector<std::string> expand(std::string_view line);
// Comments start with #; blank lines are skipped. An error names the file and the line number.
struct SourcedCase {
  Case spec;
  std::string file;  // name without folder and ending
};
std::vector<SourcedCase> read_file(const std::string& path);
std::vector<SourcedCase> read_text(std::string_view text, const std::string& path);
// The files under tests/cases as they were when this was built.
std::vector<SourcedCase> built_in_cases();
bool is_folder(const std::string& path);
// Every *.txt in a folder, in order of name.
std::vector<SourcedCase> read_folder(const std::string& path);
// One of the two, whichever the path is; without any case an error.
std::vector<SourcedCase> read_cases(const std::string& path);

// A filter is terms separated by blanks, all of which must hold. key=value: that key has that
// value; anything else: the canonical line contains it.
bool matches(const Case& c, std::string_view filter);
// Throws a CaseError at a term key=value whose key no case has, or whose value that key never has.
void check_filter(std::string_view filter);

// Keys with what they take, their default and the operations they belong to: text for --help.
std::string grammar_help();

// Standard inputs of the error budget: random keys, beta at most 1, gates random, slow or softplus.
// All others are adversarial.
bool is_standard(const Case& c);
// Repeated, correlated or zero keys, or beta above 1: what costs digits whatever the gates are.
bool has_adversarial_keys(const Case& c);

const char* name_of(DType t);  // as in a line: f32, bf16, f16, f64, i32, i64, u8
bool is_half(DType t);         // bf16 or f16
int64_t size_of(DType t);

}  // namespace deltic::cases
