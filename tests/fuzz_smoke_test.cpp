// The fuzz target's function on random bytes: what a run without libFuzzer can see.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <iterator>
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

TEST(FuzzSmoke, StoredInputs) {
  int count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(DELTIC_FUZZ_CORPUS)) {
    std::ifstream in(entry.path(), std::ios::binary);
    const std::vector<char> text{std::istreambuf_iterator<char>(in), {}};
    const std::vector<uint8_t> bytes(text.begin(), text.end());
    fuzz_descriptors(bytes.data(), bytes.size());
    ++count;
  }
  EXPECT_GT(count, 0) << DELTIC_FUZZ_CORPUS;
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
