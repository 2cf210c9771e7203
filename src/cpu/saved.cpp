// What forward keeps for backward on the CPU.
#include "cpu/saved.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>
#include <string>

#include "core/error.h"
#include "core/sizes.h"

namespace deltic::cpu {
namespace {

constexpr int64_t kVersion = 3;
constexpr size_t kHeaderBytes = 256;
constexpr char kMagic[8] = {'d', 'e', 'l', 't', 'i', 'c', 'S', 'V'};

// The facts a buffer must share with the call that reads it.
struct Fact {
  const char* name;
  int64_t value;
  enum Kind {
    number,
    real,
    dtype,
    yes_no,
    gate,
    beta_form,
    gate_form,
    arithmetic,
    lengths
  } kind = number;
};
constexpr int kFacts = 22;
struct Header {
  char magic[8];
  int64_t values[kFacts];
};
static_assert(sizeof(Header) <= kHeaderBytes);

int64_t bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof(u));
  return u;
}

// Equal for equal lengths, and hardly ever for others.
int64_t hash_lengths(const Problem& p) {
  uint64_t hash = 14695981039346656037u;
  for (int64_t n = 0; p.packed && n <= p.N; ++n) {
    hash = (hash ^ static_cast<uint64_t>(p.cu(n))) * 1099511628211u;
  }
  return static_cast<int64_t>(hash >> 1);
}

void facts(const Problem& p, deltic_save save, Arithmetic how, Fact (&f)[kFacts]) {
  const Fact all[kFacts] = {
      {"version", kVersion},
      {"save", save},
      {"B", p.B},
      {"T", p.T},
      {"N", p.sequences_given()},
      {"H", p.H},
      {"HV", p.HV},
      {"K", p.K},
      {"V", p.V},
      {"chunk", p.chunk},
      {"gate", static_cast<int64_t>(p.gate), Fact::gate},
      {"gate_form", p.gate_form, Fact::gate_form},
      {"beta_form", p.beta_form, Fact::beta_form},
      {"beta", p.beta ? 1 : 0, Fact::yes_no},
      {"initial_state", p.state_in ? 1 : 0, Fact::yes_no},
      {"qk_l2norm", p.l2norm ? 1 : 0, Fact::yes_no},
      {"dtype", static_cast<int64_t>(p.q.dtype), Fact::dtype},
      {"cu_seqlens", p.packed ? 1 : 0, Fact::yes_no},
      {"cu_seqlens", hash_lengths(p), Fact::lengths},
      {"scale", bits(p.scale), Fact::real},
      {"lower_bound", bits(p.lower_bound), Fact::real},
      {"implementation", static_cast<int64_t>(how), Fact::arithmetic},
  };
  std::copy(std::begin(all), std::end(all), std::begin(f));
}

std::string text_of(Fact::Kind kind, int64_t value) {
  const auto one_of = [&](std::initializer_list<const char*> names) {
    const bool known = value >= 0 && value < static_cast<int64_t>(names.size());
    return known ? std::string(names.begin()[value]) : std::to_string(value);
  };
  switch (kind) {
    case Fact::real: {
      const auto u = static_cast<uint32_t>(value);
      float x;
      std::memcpy(&x, &u, sizeof(x));
      return cat(x);
    }
    case Fact::dtype:
      return value >= 0 && value <= DELTIC_F64 ? name_of(static_cast<DType>(value))
                                               : std::to_string(value);
    case Fact::yes_no:
      return one_of({"absent", "given"});
    case Fact::gate:
      return one_of({"none", "per head", "per channel"});
    case Fact::gate_form:
      return one_of({"log_decay", "softplus", "bounded"});
    case Fact::beta_form:
      return one_of({"value", "sigmoid", "2sigmoid"});
    case Fact::arithmetic:
      return one_of({"with fp32 products", "cpu.amx", "cpu.plain"});
    case Fact::lengths:
      return "";
    default:
      return std::to_string(value);
  }
}

}  // namespace

// States are kept as panels of 32 value columns with K rounded up to 16 rows, in fp32.
SavedLayout::SavedLayout(const Problem& p, deltic_save save) : segment(segment_chunks(p)) {
  const int64_t columns = round_up(p.V, 32);
  state_floats = checked_product(round_up(p.K, 16), columns);
  y_floats = checked_product(p.chunk, columns);
  square_floats = int64_t{p.chunk} * p.chunk;
  const int64_t all_chunks = (p.T + p.chunk - 1) / p.chunk;
  if (save == DELTIC_SAVE_NONE) return;
  int64_t payload = 0;
  if (save == DELTIC_SAVE_STATES) {
    // The first segment starts from the initial state: only later starts are kept. Over packed
    // sequences that is at most one per `segment` chunks of tokens.
    max_states = p.packed         ? p.T / (segment * p.chunk)
                 : all_chunks > 0 ? p.B * ((all_chunks - 1) / segment)
                                  : 0;
    payload = checked_product(max_states, p.HV, state_floats, sizeof(float));
  } else {
    max_chunks = p.packed ? p.T / p.chunk + p.N : p.B * all_chunks;
    payload = checked_product(max_chunks, p.HV, chunk_floats(), sizeof(float));
  }
  bytes = static_cast<size_t>(checked_sum(kHeaderBytes, payload));
}

float* saved_payload(const deltic_buffer& saved) {
  return reinterpret_cast<float*>(static_cast<std::byte*>(saved.data) + kHeaderBytes);
}

void count_saved(const Problem& p, int64_t segment, int64_t* first_state, int64_t* first_chunk) {
  first_state[0] = first_chunk[0] = 0;
  for (int64_t n = 0; n < p.N; ++n) {
    const int64_t chunks = (sequence(p, n).length + p.chunk - 1) / p.chunk;
    first_state[n + 1] = first_state[n] + std::max<int64_t>(0, (chunks - 1) / segment);
    first_chunk[n + 1] = first_chunk[n] + chunks;
  }
}

void write_saved_header(const Problem& p, deltic_save save, Arithmetic how) {
  Header h;
  std::memcpy(h.magic, kMagic, sizeof(kMagic));
  Fact f[kFacts];
  facts(p, save, how, f);
  for (int i = 0; i < kFacts; ++i) h.values[i] = f[i].value;
  std::memcpy(p.saved.data, &h, sizeof(h));
}

deltic_save check_saved_header(const Problem& p, Arithmetic how) {
  if (p.saved.bytes == 0) return DELTIC_SAVE_NONE;
  Header h;
  if (p.saved.data == nullptr || p.saved.bytes < kHeaderBytes) {
    fail(DELTIC_INVALID_ARGUMENT, "backward: saved: expected at least ", kHeaderBytes,
         " bytes, got ", p.saved.data == nullptr ? 0 : p.saved.bytes);
  }
  std::memcpy(&h, p.saved.data, sizeof(h));
  if (std::memcmp(h.magic, kMagic, sizeof(kMagic)) != 0) {
    fail(DELTIC_INVALID_ARGUMENT,
         "backward: saved: expected a buffer that forward filled, got other bytes");
  }
  const int64_t save = h.values[1];
  if (save != DELTIC_SAVE_STATES && save != DELTIC_SAVE_ALL) {
    fail(DELTIC_INVALID_ARGUMENT, "backward: saved: expected save states or all, got ", save);
  }
  Fact f[kFacts];
  facts(p, static_cast<deltic_save>(save), how, f);
  for (int i = 0; i < kFacts; ++i) {
    if (h.values[i] == f[i].value) continue;
    if (f[i].kind == Fact::lengths) {
      fail(DELTIC_INVALID_ARGUMENT,
           "backward: saved: expected the cu_seqlens of this call, got other lengths");
    }
    fail(DELTIC_INVALID_ARGUMENT, "backward: saved: expected ", f[i].name, " ",
         text_of(f[i].kind, f[i].value), " as in this call, got ", text_of(f[i].kind, h.values[i]));
  }
  return static_cast<deltic_save>(save);
}

}  // namespace deltic::cpu
