// The caller's structs, which may be older or newer than this library's: complete copies of them.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <type_traits>
#include <utility>

#include "core/error.h"
#include "deltic/deltic.h"

namespace deltic {

// A struct that grows: its name, and its size in the first version of this ABI. Smaller ones were
// never filled by anybody. These numbers change with DELTIC_ABI_VERSION alone.
template <class Struct>
struct Versioned;
#define DELTIC_VERSIONED(suffix, first_bytes, last_field)                                         \
  template <>                                                                                     \
  struct Versioned<deltic_##suffix> {                                                             \
    static constexpr const char* kName = #suffix;                                                 \
    static constexpr uint64_t kFirstSize = first_bytes;                                           \
  };                                                                                              \
  static_assert(offsetof(deltic_##suffix, last_field) +                                           \
                            sizeof(std::declval<deltic_##suffix>().last_field) ==                 \
                        first_bytes &&                                                            \
                    offsetof(deltic_##suffix, size) == 0,                                         \
                "a field moved, or the first version ends in padding: a later field there would " \
                "be read from bytes that nobody set")
DELTIC_VERSIONED(options, 88, reserved);
DELTIC_VERSIONED(tensors, 2424, saved);
DELTIC_VERSIONED(backward_tensors, 1336, d_initial_state);
DELTIC_VERSIONED(block_tensors, 2048, rstd);
DELTIC_VERSIONED(block_backward_tensors, 1696, ddt_bias);
DELTIC_VERSIONED(conv_tensors, 1328, out);
DELTIC_VERSIONED(conv_backward_tensors, 736, d_initial_state);
DELTIC_VERSIONED(memory_plan, 48, workspace_bytes);
DELTIC_VERSIONED(move_tensors, 520, reserved);
DELTIC_VERSIONED(commit_tensors, 848, parents);
DELTIC_VERSIONED(step_tensors, 32, norm);
#undef DELTIC_VERSIONED

// These two are inside of the others and have no size: they stay as they are.
static_assert(sizeof(deltic_tensor) == 120 && offsetof(deltic_tensor, dtype) == 8 &&
              offsetof(deltic_tensor, device_type) == 12 &&
              offsetof(deltic_tensor, device_index) == 16 && offsetof(deltic_tensor, rank) == 20 &&
              offsetof(deltic_tensor, shape) == 24 && offsetof(deltic_tensor, strides) == 72);
static_assert(sizeof(deltic_buffer) == 16 && offsetof(deltic_buffer, bytes) == 8);

// The size a caller's struct says it has. `argument`: what the caller knows it as.
template <class Struct>
uint64_t checked_size(const char* op, const char* argument, const Struct& given) {
  constexpr uint64_t kUnknown = 4096;  // the most that is looked at behind what is known
  using V = Versioned<Struct>;
  const uint64_t size = given.size;
  if (size < V::kFirstSize || size > sizeof(Struct) + kUnknown) {
    const bool is_small = size < V::kFirstSize;
    fail(DELTIC_INVALID_ARGUMENT, op, ": ", argument, ".size: expected at ",
         is_small ? "least " : "most ", is_small ? V::kFirstSize : sizeof(Struct) + kUnknown,
         ", got ", size, " (sizeof the struct: see deltic_", V::kName, "_init)");
  }
  const auto* bytes = reinterpret_cast<const unsigned char*>(&given);
  const bool is_known = std::all_of(bytes + std::min<uint64_t>(size, sizeof(Struct)), bytes + size,
                                    [](unsigned char byte) { return byte == 0; });
  if (!is_known) {
    fail(DELTIC_INVALID_ARGUMENT, op, ": ", argument, ".size: expected zeros behind the ",
         sizeof(Struct), " bytes that deltic " DELTIC_VERSION_STRING " knows, got ", size,
         " bytes with a later version's field set");
  }
  return size;
}

// What the caller's struct has, and zero for the rest. Its size is ours.
template <class Struct>
Struct read_struct(const char* op, const char* argument, const Struct* given) {
  if (given == nullptr) {
    fail(DELTIC_INVALID_ARGUMENT, op, ": ", argument, ": expected a struct, got a null pointer");
  }
  const uint64_t size = checked_size(op, argument, *given);
  if (size == sizeof(Struct)) return *given;  // mostly: 3 KB of tensors are written once
  Struct s{};
  std::memcpy(&s, given, std::min<uint64_t>(size, sizeof(Struct)));
  s.size = sizeof(Struct);
  return s;
}

// Writes a result: as much of it as the caller's struct has room for, and no byte more.
template <class Struct>
void write_struct(const Struct& s, uint64_t size, Struct* to) {
  constexpr size_t kBegin = sizeof(s.size);
  std::memcpy(reinterpret_cast<char*>(to) + kBegin, reinterpret_cast<const char*>(&s) + kBegin,
              std::min<uint64_t>(size, sizeof(Struct)) - kBegin);
}

inline deltic_options read_options(const char* op, const deltic_options* given) {
  return given == nullptr ? deltic_options{} : read_struct(op, "options", given);
}

// A call's tensors. Those of a gradient point to the copy of the forward call's.
template <class Tensors>
struct GivenTensors {
  Tensors tensors;

  GivenTensors(const char* op, const Tensors* given) : tensors(read_struct(op, "tensors", given)) {}
};
template <class Tensors>
requires requires(Tensors t) { t.forward; }
struct GivenTensors<Tensors> {
  Tensors tensors;
  std::remove_cvref_t<decltype(*std::declval<Tensors>().forward)> forward;

  GivenTensors(const char* op, const Tensors* given)
      : tensors(read_struct(op, "tensors", given)),
        forward(read_struct(op, "forward", tensors.forward)) {
    tensors.forward = &forward;
  }
  GivenTensors(const GivenTensors&) = delete;
  GivenTensors& operator=(const GivenTensors&) = delete;
};
// Those of a step point to copies of its parts'; without a norm to none.
template <>
struct GivenTensors<deltic_step_tensors> {
  deltic_step_tensors tensors;
  deltic_conv_tensors conv;
  deltic_tensors decode;
  deltic_block_tensors norm;

  GivenTensors(const char* op, const deltic_step_tensors* given)
      : tensors(read_struct(op, "tensors", given)),
        conv(read_struct(op, "conv", tensors.conv)),
        decode(read_struct(op, "decode", tensors.decode)),
        norm(tensors.norm != nullptr ? read_struct(op, "norm", tensors.norm)
                                     : deltic_block_tensors{}) {
    tensors.conv = &conv, tensors.decode = &decode;
    if (tensors.norm != nullptr) tensors.norm = &norm;
  }
  GivenTensors(const GivenTensors&) = delete;
  GivenTensors& operator=(const GivenTensors&) = delete;
};

}  // namespace deltic
