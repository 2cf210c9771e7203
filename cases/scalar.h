// Scalars: conversions of the small float dtypes (to nearest even), and random numbers by counter.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <string_view>

#include "cases/case.h"

namespace deltic::cases {

inline float bf16_to_float(uint16_t x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x) << 16);
}
inline uint16_t float_to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (std::isnan(x)) return 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}
// 2^exponent, within the normal numbers. (ldexp is a tenth of verify's time.)
inline float power_of_two(int exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}
inline float f16_to_float(uint16_t x) {
  const int exponent = (x >> 10) & 31, mantissa = x & 1023;
  float magnitude;
  if (exponent == 31) {
    magnitude = mantissa != 0 ? NAN : INFINITY;
  } else if (exponent == 0) {
    magnitude = static_cast<float>(mantissa) * power_of_two(-24);
  } else {
    magnitude = static_cast<float>(mantissa + 1024) * power_of_two(exponent - 25);
  }
  return (x & 0x8000) != 0 ? -magnitude : magnitude;
}
inline uint16_t float_to_f16(float x) {
  const uint16_t sign = std::signbit(x) ? 0x8000 : 0;
  if (std::isnan(x)) return 0x7E00;
  const float magnitude = std::fabs(x);
  if (magnitude >= 65520.0f) return static_cast<uint16_t>(sign | 0x7C00);  // half-way above 65504
  // magnitude is in [2^(exponent-1), 2^exponent), unless it is below what fp32 has in full.
  const int exponent = static_cast<int>(std::bit_cast<uint32_t>(magnitude) >> 23) - 126;
  const int unit = std::max(exponent - 11, -24);  // power of two of the last place
  const auto units = static_cast<int>(std::nearbyint(magnitude * power_of_two(-unit)));
  // The leading bit of `units` adds 1 to the exponent field; subnormals have none.
  return static_cast<uint16_t>(sign | (((unit + 24) << 10) + units));
}

// x as the dtype holds it.
inline float round_to(float x, DType type) {
  if (type == DType::bf16) return bf16_to_float(float_to_bf16(x));
  if (type == DType::f16) return f16_to_float(float_to_f16(x));
  return x;
}

inline double load(const void* data, DType type, int64_t i) {
  switch (type) {
    case DType::f32:
      return static_cast<const float*>(data)[i];
    case DType::bf16:
      return bf16_to_float(static_cast<const uint16_t*>(data)[i]);
    case DType::f16:
      return f16_to_float(static_cast<const uint16_t*>(data)[i]);
    case DType::f64:
      return static_cast<const double*>(data)[i];
    case DType::i32:
      return static_cast<const int32_t*>(data)[i];
    case DType::u8:
      return static_cast<const uint8_t*>(data)[i];
    default:
      return static_cast<double>(static_cast<const int64_t*>(data)[i]);
  }
}
inline void store(void* data, DType type, int64_t i, double x) {
  switch (type) {
    case DType::f32:
      static_cast<float*>(data)[i] = static_cast<float>(x);
      break;
    case DType::bf16:
      static_cast<uint16_t*>(data)[i] = float_to_bf16(static_cast<float>(x));
      break;
    case DType::f16:
      static_cast<uint16_t*>(data)[i] = float_to_f16(static_cast<float>(x));
      break;
    case DType::f64:
      static_cast<double*>(data)[i] = x;
      break;
    case DType::i32:
      static_cast<int32_t*>(data)[i] = static_cast<int32_t>(x);
      break;
    case DType::u8:
      static_cast<uint8_t*>(data)[i] = static_cast<uint8_t>(x);
      break;
    default:
      static_cast<int64_t*>(data)[i] = static_cast<int64_t>(x);
      break;
  }
}

// Half a unit in the last place of the dtype at x: the most that rounding to it can change.
inline double half_ulp(double x, DType type) {
  if (!is_half(type)) return 0.0;
  const int digits = type == DType::bf16 ? 8 : 11;
  const int lowest = type == DType::bf16 ? -133 : -24;  // power of two of the smallest subnormal
  int exponent = 0;
  std::frexp(x, &exponent);
  return std::ldexp(0.5, x == 0.0 ? lowest : std::max(exponent - digits, lowest));
}

// Random numbers that depend on (seed, stream name, index) only, so that elements can be drawn in
// any order and by any number of threads.
class Random {
 public:
  Random(uint64_t seed, std::string_view stream) : base_(mix(seed + 0x9E3779B97F4A7C15u)) {
    for (char ch : stream) base_ = mix(base_ ^ static_cast<unsigned char>(ch));
  }
  uint64_t bits(int64_t i) const {
    return mix(base_ + 0x9E3779B97F4A7C15u * static_cast<uint64_t>(i));
  }
  // In (0, 1), never an end.
  double uniform(int64_t i) const { return (static_cast<double>(bits(i) >> 12) + 0.5) * 0x1p-52; }
  double uniform(int64_t i, double low, double high) const {
    return low + (high - low) * uniform(i);
  }
  // Box-Muller; the second of the pair is not used.
  double normal(int64_t i) const {
    constexpr double kTwoPi = 6.283185307179586;
    return std::sqrt(-2.0 * std::log(uniform(2 * i))) * std::cos(kTwoPi * uniform(2 * i + 1));
  }

 private:
  static uint64_t mix(uint64_t z) {  // the finaliser of splitmix64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
  }
  uint64_t base_;
};

}  // namespace deltic::cases
