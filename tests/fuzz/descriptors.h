// One fuzzed call of the C interface, built from bytes.
#pragma once

#include <cstddef>
#include <cstdint>

namespace deltic::test {

// Makes descriptors from the bytes, mostly sound, with some fields replaced by arbitrary ones; asks
// for the workspace and the explanation, and runs what is small. Memory is allocated to the byte,
// so that a sanitizer sees every access outside. Aborts if a promise of the interface is broken.
void fuzz_descriptors(const uint8_t* data, size_t size);

struct FuzzCounts {
  long calls = 0, accepted = 0, runs = 0;
};
const FuzzCounts& fuzz_counts();

}  // namespace deltic::test
