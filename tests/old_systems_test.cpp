// bindings/torch/old_systems.cpp: numbers as text, where it stands in for a younger libstdc++'s
// functions.
#include <gtest/gtest.h>

#include <bit>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <string_view>

extern "C" std::from_chars_result __wrap__ZSt10from_charsPKcS0_RdSt12chars_format(
    const char*, const char*, double&, std::chars_format);
extern "C" std::to_chars_result __wrap__ZSt8to_charsPcS_d(char*, char*, double);

namespace {

void expect_same_reading(std::string_view text) {
  const char *const first = text.data(), *const last = first + text.size();
  double expected = 7, got = 7;
  const auto theirs = std::from_chars(first, last, expected);
  const auto ours =
      __wrap__ZSt10from_charsPKcS0_RdSt12chars_format(first, last, got, std::chars_format::general);
  EXPECT_EQ(ours.ptr - first, theirs.ptr - first) << text;
  EXPECT_EQ(ours.ec, theirs.ec) << text;
  if (!std::isnan(expected)) {
    EXPECT_EQ(std::bit_cast<uint64_t>(got), std::bit_cast<uint64_t>(expected)) << text;
  } else {
    EXPECT_TRUE(std::isnan(got)) << text;
  }
}

void expect_same_text(double x) {
  char expected[64], got[64];
  const auto theirs = std::to_chars(expected, expected + sizeof expected, x);
  const auto ours = __wrap__ZSt8to_charsPcS_d(got, got + sizeof got, x);
  ASSERT_EQ(ours.ec, std::errc());
  const std::string text(expected, theirs.ptr);
  EXPECT_EQ(std::string(got, ours.ptr), text);
  expect_same_reading(text);
}

TEST(OldSystems, NumbersAreWrittenAndReadAsByTheStandardLibrary) {
  std::mt19937_64 random(1);
  for (int i = 0; i < 20000; ++i) {
    const uint64_t bits = random();
    expect_same_text(std::bit_cast<double>(bits));  // subnormal, infinite and NaN among them
    expect_same_text(static_cast<double>(bits % 2000000) / 1000);
    expect_same_text(static_cast<double>(bits % 100000000));
  }
  for (const double x :
       {0.0, -0.0, 5e-324, 2.2250738585072014e-308, 1.7976931348623157e308, 1e22}) {
    expect_same_text(x);
  }
}

TEST(OldSystems, WhatIsNoNumberIsRefusedAlike) {
  for (const char* text :
       {"",    "-",     "+1",     "-+1",    " 1",   "1 ",  "0x10", "-0x1",    "1e",
        "1e+", "1.",    ".",      ".5",     "-.5",  "inf", "-inf", "nan",     "INF",
        "e5",  "1e999", "-1e999", "1e-999", "1.5x", "--1", "1,5",  "infinity"}) {
    expect_same_reading(text);
  }
}

TEST(OldSystems, ATextThatDoesNotFit) {
  char text[4];
  const auto found = __wrap__ZSt8to_charsPcS_d(text, text + sizeof text, 0.12345);
  EXPECT_EQ(found.ec, std::errc::value_too_large);
  EXPECT_EQ(found.ptr, text + sizeof text);
}

}  // namespace
