// The caller's structs, older or newer than the library's: what is read of them, and written to
// them.
#include "core/structs.h"

#include <gtest/gtest.h>

#include <string>

namespace deltic {

// Of 24 bytes in its first version, with one field more since.
struct Sample {
  uint64_t size;
  int64_t first, second, later;
};
template <>
struct Versioned<Sample> {
  static constexpr const char* kName = "sample";
  static constexpr uint64_t kFirstSize = 24;
};
struct Outer {
  uint64_t size;
  const Sample* forward;
};
template <>
struct Versioned<Outer> {
  static constexpr const char* kName = "outer";
  static constexpr uint64_t kFirstSize = 16;
};

namespace {

// A caller's struct of so many bytes, in memory that goes on with other numbers.
struct Caller {
  Sample s;
  int64_t behind[4];

  explicit Caller(uint64_t size) : s{size, 1, 2, 3}, behind{4, 5, 6, 7} {}
};

std::string error_of(const Sample& s) {
  try {
    read_struct("op", "sample", &s);
  } catch (const Failure& failure) {
    return failure.what();
  }
  return "";
}

TEST(Structs, AnOlderOneHasZeroForTheRest) {
  const Caller older(24);
  const Sample s = read_struct("op", "sample", &older.s);
  EXPECT_EQ(s.size, sizeof(Sample));
  EXPECT_EQ(s.first, 1);
  EXPECT_EQ(s.second, 2);
  EXPECT_EQ(s.later, 0) << "read from behind the caller's struct";
  const Caller same(32);
  EXPECT_EQ(read_struct("op", "sample", &same.s).later, 3);
}

TEST(Structs, ANewerOneHasNothingBehind) {
  Caller newer(48);
  EXPECT_NE(error_of(newer.s).find("got 48 bytes with a later version's field set"),
            std::string::npos);
  newer.behind[0] = 0;
  EXPECT_NE(error_of(newer.s), "") << "the second number behind is set";
  newer.behind[1] = 0;
  EXPECT_EQ(error_of(newer.s), "");
  newer.behind[1] = int64_t{1} << 56;  // the last byte
  EXPECT_NE(error_of(newer.s), "");
}

TEST(Structs, SizesThatNobodyHad) {
  EXPECT_NE(error_of(Caller(23).s).find("op: sample.size: expected at least 24, got 23"),
            std::string::npos);
  EXPECT_NE(error_of(Caller(32 + 4097).s).find("expected at most 4128, got 4129"),
            std::string::npos);
  EXPECT_THROW(read_struct<Sample>("op", "sample", nullptr), Failure);
}

TEST(Structs, ResultsEndWithTheCallersStruct) {
  const Sample result{sizeof(Sample), 11, 12, 13};
  Caller older(24);
  write_struct(result, older.s.size, &older.s);
  EXPECT_EQ(older.s.size, 24u);
  EXPECT_EQ(older.s.second, 12);
  EXPECT_EQ(older.s.later, 3) << "written behind the caller's struct";
  Caller newer(48);
  write_struct(result, newer.s.size, &newer.s);
  EXPECT_EQ(newer.s.later, 13);
  EXPECT_EQ(newer.behind[0], 4);
}

TEST(Structs, AGradientSeesACompleteForwardCall) {
  const Caller older(24);
  const Outer outer{sizeof(Outer), &older.s};
  const GivenTensors<Outer> given("op", &outer);
  ASSERT_EQ(given.tensors.forward, &given.forward);
  EXPECT_EQ(given.tensors.forward->second, 2);
  EXPECT_EQ(given.tensors.forward->later, 0);
}

TEST(Structs, AStepSeesCompleteParts) {
  deltic_conv_tensors conv{};
  conv.size = Versioned<deltic_conv_tensors>::kFirstSize;
  conv.x.rank = 3;
  deltic_tensors decode{};
  decode.size = Versioned<deltic_tensors>::kFirstSize;
  decode.positions.rank = 1;  // behind the caller's struct
  const deltic_step_tensors step{sizeof step, &conv, &decode, nullptr};
  const GivenTensors<deltic_step_tensors> given("step", &step);
  ASSERT_EQ(given.tensors.conv, &given.conv);
  ASSERT_EQ(given.tensors.decode, &given.decode);
  EXPECT_EQ(given.tensors.norm, nullptr);
  EXPECT_EQ(given.tensors.conv->x.rank, 3);
  EXPECT_EQ(given.tensors.conv->size, sizeof conv);
  EXPECT_EQ(given.tensors.decode->positions.rank, 0);
  const deltic_step_tensors without{sizeof step, nullptr, &decode, nullptr};
  EXPECT_THROW(GivenTensors<deltic_step_tensors>("step", &without), Failure);
}

}  // namespace
}  // namespace deltic
