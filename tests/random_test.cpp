// Stochastic rounding: the random numbers are Philox's, a number comes to one of its neighbours and
// on average to itself, and the oracle, which is written by itself, says the same.
#include "core/random.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "reference/chance.h"

namespace deltic::test {
namespace {

// Known answers of the generator's authors.
TEST(Random, IsPhilox) {
  struct Known {
    Random128 counter;
    uint32_t key[2];
    Random128 result;
  };
  constexpr Known all[] = {
      {{{0, 0, 0, 0}}, {0, 0}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}}},
      {{{~0u, ~0u, ~0u, ~0u}}, {~0u, ~0u}, {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}}},
      {{{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}},
       {0xa4093822, 0x299f31d0},
       {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}}}};
  for (const Known& x : all) {
    const Random128 result = philox(x.counter, x.key[0], x.key[1]);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(result.word[i], x.result.word[i]);
  }
}

struct Format {
  DType type;
  uint16_t (*nearest)(float);
  uint16_t (*by_chance)(float, uint32_t);
  float (*value)(uint16_t);
  float largest;
};
const Format kFormats[] = {
    {DType::bf16, f32_to_bf16, stochastic_bf16, bf16_to_f32, 0x1.FEp127f},
    {DType::f16, f32_to_f16, stochastic_f16, f16_to_f32, 65504.0f},
};

// Numbers of all sizes, the edges of the formats among them.
std::vector<float> numbers() {
  std::vector<float> all = {0.0f,        -0.0f,          1.0f,       -1.0f,       65504.0f,
                            65519.0f,    65520.0f,       65535.9f,   65536.0f,    -65519.0f,
                            0x1p-24f,    0x1p-25f,       0x1.8p-24f, 0x1p-14f,    0x1.FFFp-15f,
                            0x1p-40f,    0x1p-41f,       0x1p-149f,  0x1.FEp127f, 0x1.FEFFFEp127f,
                            0x1.FFp127f, 0x1.FFFFFEp127f};
  std::mt19937_64 random(3);
  std::normal_distribution<float> normal;
  for (int i = 0; i < 4000; ++i) {
    const float size = std::exp2(12 * normal(random));
    all.push_back(size * normal(random));
  }
  return all;
}

TEST(Random, RoundsToANeighbour) {
  for (const Format& f : kFormats) {
    for (const float x : numbers()) {
      const uint16_t low = f.by_chance(x, 0);
      if (std::abs(x) >= f.largest) {
        for (const uint32_t r : {0u, 30000u, 65535u}) EXPECT_EQ(f.by_chance(x, r), f.nearest(x));
        continue;
      }
      const auto high = static_cast<uint16_t>(low + 1);
      ASSERT_LE(std::abs(f.value(low)), std::abs(x));
      ASSERT_GT(std::abs(f.value(high)), std::abs(x));
      // How many of all 2^16 numbers take it up: the fraction of the way that it is beyond `low`.
      const double way = std::abs(double{x} - double{f.value(low)}) /
                         std::abs(double{f.value(high)} - double{f.value(low)});
      const auto ups = static_cast<uint32_t>(std::floor(way * 65536));
      EXPECT_EQ(f.by_chance(x, 65535 - ups), low) << x;
      if (ups == 0) continue;
      EXPECT_EQ(f.by_chance(x, 65536 - ups), high) << x;
    }
  }
}

TEST(Random, LeavesWhatIsNoNumber) {
  const float inf = std::numeric_limits<float>::infinity();
  for (const Format& f : kFormats) {
    for (const uint32_t r : {0u, 1u, 65535u}) {
      EXPECT_EQ(f.value(f.by_chance(inf, r)), inf);
      EXPECT_EQ(f.value(f.by_chance(-inf, r)), -inf);
      EXPECT_TRUE(std::isnan(f.value(f.by_chance(std::nanf(""), r))));
      EXPECT_TRUE(std::isnan(f.value(f.by_chance(std::bit_cast<float>(0xFFFFFFFFu), r))));
    }
  }
}

TEST(Random, IsWhatTheOracleSays) {
  std::mt19937_64 random(5);
  for (const float x : numbers()) {
    const uint64_t seed = random(), position = random();
    const auto head = static_cast<int64_t>(random() % 64);
    const auto element = static_cast<int64_t>(random() % (1 << 20));
    const Random128 draw =
        draw_group(seed, static_cast<int64_t>(position), static_cast<uint32_t>(head),
                   static_cast<uint32_t>(element / 8));
    const uint32_t half = draw.half(static_cast<int>(element % 8));
    const double chance = reference::chance(seed, static_cast<int64_t>(position), head, element);
    ASSERT_EQ(chance, half / 65536.0);
    for (const Format& f : kFormats) {
      const double want = reference::rounded_by_chance(f.type, double{x}, chance);
      ASSERT_EQ(double{f.value(f.by_chance(x, half))}, want) << x;
    }
  }
}

// The draws of many positions, heads and elements: every number of 1 to 2 comes on average to
// itself, within five standard errors, and the bits of neighbours are not related.
TEST(Random, IsUnbiased) {
  constexpr int kPositions = 400, kHeads = 4, kGroups = 32;
  double sum = 0, squares = 0, products = 0, count = 0;
  for (int t = 0; t < kPositions; ++t) {
    for (int h = 0; h < kHeads; ++h) {
      for (int g = 0; g < kGroups; ++g) {
        const Random128 draw = draw_group(7, t, static_cast<uint32_t>(h), static_cast<uint32_t>(g));
        double before = 0;
        for (int j = 0; j < 8; ++j) {
          const float x = 1.0f + static_cast<float>((t * 8 + j) % 997) / 997.0f;
          const float step = 0x1p-7f;
          const double error =
              (double{bf16_to_f32(stochastic_bf16(x, draw.half(j)))} - double{x}) / double{step};
          sum += error, squares += error * error, products += error * before, count += 1;
          before = error;
        }
      }
    }
  }
  const double deviation = std::sqrt(squares / count);
  EXPECT_LT(std::abs(sum / count), 5 * deviation / std::sqrt(count));
  EXPECT_LT(std::abs(products / count), 5 * deviation * deviation / std::sqrt(count));
  EXPECT_NEAR(squares / count, 1.0 / 6, 0.01);  // the mean of f (1 - f)
}

}  // namespace
}  // namespace deltic::test
