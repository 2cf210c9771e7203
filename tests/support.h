// What the tests share: owned tensors between sentinels, inputs that depend on (sequence, token,
// head, channel) only, and one function that runs a batch and hands back each sequence's bytes.
#pragma once

#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "cases/call.h"
#include "deltic/deltic.hpp"

namespace deltic::test {

// Sanitizer builds run the same tests on fewer inputs.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#elif defined(__has_feature)
#if __has_feature(address_sanitizer) || __has_feature(thread_sanitizer)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif
#else
inline constexpr bool kSanitized = false;
#endif

size_t element_bytes(DType type);
const char* dtype_name(DType type);
// Rounds to nearest even; exact the other way.
void store(uint8_t* at, DType type, double x);
double load(const uint8_t* at, DType type);

// A tensor with memory of its own. Bytes that belong to no element (before, after and between rows)
// are 0xFF, a NaN in every float dtype: a read of them spoils the result, a write is seen by
// `sentinels_intact`. The data is aligned to its element and to nothing more.
class Buffer {
 public:
  Buffer() = default;  // absent
  Buffer(DType type, std::vector<int64_t> shape, std::vector<int64_t> strides = {});

  explicit operator bool() const { return memory_ != nullptr; }
  DType dtype() const { return type_; }
  int64_t at(std::initializer_list<int64_t> index) const;  // element offset
  void set(int64_t offset, double x) { store(data() + offset * size_, type_, x); }
  double get(int64_t offset) const { return load(data() + offset * size_, type_); }
  void set_index(int64_t offset, int64_t x);  // int32 and int64 tensors
  uint8_t* data() const { return memory_.get() + front_; }
  TensorView view() const;
  std::vector<uint8_t> all_bytes() const { return {memory_.get(), memory_.get() + bytes_}; }
  bool sentinels_intact() const;

 private:
  DType type_ = DType::f32;
  int64_t size_ = 0;  // bytes of an element
  std::vector<int64_t> shape_{}, strides_{};
  size_t front_ = 0, bytes_ = 0;
  std::shared_ptr<uint8_t> memory_{};
  size_t elements_ = 0;       // from the first to the last
  std::vector<bool> used_{};  // by element offset; empty: all of them
};

// 64-byte aligned scratch of exactly `bytes`, filled with NaN, with a sentinel behind it.
class Scratch {
 public:
  explicit Scratch(size_t bytes);
  deltic_workspace c() const { return {bytes_ > 0 ? memory_.get() : nullptr, bytes_}; }
  bool sentinels_intact() const;

 private:
  size_t bytes_;
  std::shared_ptr<uint8_t> memory_;
};

// Runs a call in a workspace of just the size that it asks for, filled with NaN, and sees that
// nothing behind it is written.
void run_guarded(const cases::Call& call, const Options& options);

enum class GateKind { none, head, channel };
enum class BetaKind { none, head, value };
// Log decays. deep*: that number times a factor in [0.9, 1.1]; mixed: 0, -5, -20, -1000 drawn for
// every channel and token, times such a factor. growing: above 0 in one token of 32, up to 3.85, so
// that a chunk's sum stays below 8, and below 0 between them.
enum class GateValues { zero, slow, random, deep5, deep20, deep1000, mixed, growing };
double growing_gate(double u, int64_t t, int64_t d);  // u: from [0, 1]
enum class KeyValues { random, repeated, correlated, zero_rows };

// Everything about a call that is the same for all its sequences.
struct Layer {
  int64_t H = 2, HV = 4, K = 32, V = 32;
  GateKind gate = GateKind::head;
  GateValues gate_values = GateValues::random;
  GateForm gate_form = GateForm::log_decay;
  BetaKind beta = BetaKind::head;
  BetaForm beta_form = BetaForm::value;
  std::optional<double> beta_value{};  // else drawn from [0, 1]
  KeyValues keys = KeyValues::random;
  bool gv = false;  // decode only
  DType dtype = DType::f32, gate_dtype = DType::f32, beta_dtype = DType::f32,
        state_dtype = DType::f32;
  bool qk_l2norm = false;
  int32_t chunk = 64;
  StateLayout layout = StateLayout::kv;
  std::optional<float> scale{};
  bool has_initial = true;
};
std::string name(const Layer& layer);

// One element replaced after all else: of tensor q, k, v, g or b (beta).
struct Poison {
  char tensor = 'v';
  int64_t token = 0, head = 0, channel = 0;
  double value = 0;
};

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

// A sequence's content follows from its seed: token t of two sequences with one seed is the same
// wherever it is placed.
struct Sequence {
  uint64_t seed = 1;
  int64_t length = 0;
  int64_t first = 0;               // the call begins at this token
  int64_t changed_from = kNever;   // tokens from here on have other content
  std::vector<uint8_t> initial{};  // state bytes in [HV,K,V] order; empty: drawn from the seed
  std::vector<int64_t> checkpoints{};
  std::vector<Poison> poison{};
};

enum class Pool { none, in_place, moved };  // moved: read and write slots differ

struct Batch {
  std::vector<Sequence> sequences{};
  bool dense = false;  // else packed; needs equal lengths
  DType index_dtype = DType::i64;
  int64_t padding = 0;   // tokens behind the last sequence of a pack
  bool strided = false;  // heads before tokens, gaps between rows
  bool want_final = true;
  bool state_in_place = false;  // final_state is initial_state's memory
  Pool pool = Pool::none;
  int32_t threads = 1;
};

struct SequenceResult {
  std::vector<uint8_t> o{};            // [length,HV,V]
  std::vector<uint8_t> final_state{};  // [HV,K,V], whatever the layout
  std::vector<std::vector<uint8_t>> checkpoints{};
};
using Results = std::vector<SequenceResult>;

// Runs the batch on outputs and workspace filled with NaN, and checks what must hold in every call:
// sentinels and inputs untouched, padding zero, unused slots untouched. Throws what the library
// throws.
Results run(Op op, const std::string& impl, const Layer& layer, const Batch& batch);

// Whether an implementation takes such a call.
bool accepts(Op op, const std::string& impl, const Layer& layer);
// Names of an operation's implementations that this machine can run, the oracle included.
std::vector<std::string> runnable(Op op);
// Whether this build has code of it for a GPU of this machine.
bool runs_on_gpu(Op op, const std::string& impl);

std::vector<double> numbers(const std::vector<uint8_t>& bytes, DType type);
bool all_finite(const std::vector<uint8_t>& bytes, DType type);
// rms(x - ref) / rms(ref); absolute where rms(ref) is below 1e-6.
double error(const std::vector<uint8_t>& x, const std::vector<uint8_t>& ref, DType type);
// The first `rows` rows of o.
std::vector<uint8_t> prefix(const std::vector<uint8_t>& o, const Layer& layer, int64_t rows);
std::vector<uint8_t> state_bits(const std::vector<double>& values, DType type);

// Letters, digits and underscores, as a test's name needs it.
std::string identifier(std::string text);

// Numbers from a hash: the same for the same arguments, on every machine.
double uniform(uint64_t seed, uint64_t a, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0);
double normal(uint64_t seed, uint64_t a, uint64_t b = 0, uint64_t c = 0, uint64_t d = 0);

}  // namespace deltic::test
