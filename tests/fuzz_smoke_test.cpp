// The fuzz target's function on random bytes: what a run without libFuzzer can see.
#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "fuzz/descriptors.h"
#include "support.h"

namespace deltic::test {
namespace {

TEST(FuzzSmoke, RandomDescriptorsNeverCrash) {
  std::mt19937_64 random(1);
  std::vector<uint8_t> bytes(512);
  for (int i = 0; i < (kSanitized ? 2500 : 6000); ++i) {
    for (uint8_t& b : bytes) b = static_cast<uint8_t>(random());
    fuzz_descriptors(bytes.data(), bytes.size());
  }
  // Most descriptors must be sound, or the run is never reached.
  EXPECT_GT(fuzz_counts().accepted, fuzz_counts().calls / 3);
  EXPECT_GT(fuzz_counts().runs, fuzz_counts().calls / 8);
  RecordProperty("runs", static_cast<int>(fuzz_counts().runs));
}

TEST(FuzzSmoke, ShortInputs) {
  for (int length = 0; length < 64; ++length) {
    const std::vector<uint8_t> zeros(static_cast<size_t>(length), 0),
        ones(static_cast<size_t>(length), 0xFF);
    fuzz_descriptors(zeros.data(), zeros.size());
    fuzz_descriptors(ones.data(), ones.size());
  }
}

}  // namespace
}  // namespace deltic::test
