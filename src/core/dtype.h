// Element types: sizes, names, and scalar conversions that round to nearest even.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <cstring>

#include "deltic/deltic.h"

namespace deltic {

enum class DType : int32_t {
  f32 = DELTIC_F32,
  bf16 = DELTIC_BF16,
  f16 = DELTIC_F16,
  f64 = DELTIC_F64,
  i32 = DELTIC_I32,
  i64 = DELTIC_I64,
  u8 = DELTIC_U8
};

constexpr bool is_valid(DType t) { return t >= DType::f32 && t <= DType::u8; }
constexpr bool is_float(DType t) { return t >= DType::f32 && t <= DType::f64; }
constexpr bool is_index(DType t) { return t == DType::i32 || t == DType::i64; }
constexpr int64_t size_of(DType t) {
  return t == DType::u8                        ? 1
         : t == DType::bf16 || t == DType::f16 ? 2
         : t == DType::f32 || t == DType::i32  ? 4
                                               : 8;
}
constexpr const char* name_of(DType t) {
  constexpr const char* names[] = {"fp32", "bf16", "fp16", "fp64", "int32", "int64", "uint8"};
  return is_valid(t) ? names[static_cast<int>(t)] : "an unknown dtype";
}

constexpr float bf16_to_f32(uint16_t x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x) << 16);
}

inline uint16_t f32_to_bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u)
    return static_cast<uint16_t>((bits >> 16) | 0x40u);  // NaN
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline float f16_to_f32(uint16_t x) {
  const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16;
  const uint32_t exponent = (x >> 10) & 0x1Fu, mantissa = x & 0x3FFu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000u | (mantissa << 13));
  if (exponent == 0) {
    const float m = static_cast<float>(mantissa) * 0x1p-24f;  // exact: zero or subnormal
    return sign ? -m : m;
  }
  return std::bit_cast<float>(sign | ((exponent + 112) << 23) | (mantissa << 13));
}

inline uint16_t f32_to_f16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint16_t sign = static_cast<uint16_t>((bits >> 16) & 0x8000u);
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return static_cast<uint16_t>(sign | 0x7E00u);
  if (magnitude >= 0x477FF000u) return static_cast<uint16_t>(sign | 0x7C00u);  // rounds to infinity
  if (magnitude < 0x38800000u) {  // subnormal in fp16: units of 2^-24, rounded by the fp32 adder
    const float units = std::bit_cast<float>(magnitude) * 0x1p24f;
    return static_cast<uint16_t>(sign | static_cast<uint16_t>(std::nearbyint(units)));
  }
  const uint32_t rounded = magnitude + 0xFFFu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

// One element of any float dtype, as double. Exact.
inline double load_f64(const void* data, DType type, int64_t i) {
  switch (type) {
    case DType::f32:
      return static_cast<const float*>(data)[i];
    case DType::bf16:
      return static_cast<double>(bf16_to_f32(static_cast<const uint16_t*>(data)[i]));
    case DType::f16:
      return static_cast<double>(f16_to_f32(static_cast<const uint16_t*>(data)[i]));
    default:
      return static_cast<const double*>(data)[i];
  }
}
inline float load_f32(const void* data, DType type, int64_t i) {
  return static_cast<float>(load_f64(data, type, i));
}
// Rounds to fp32, then to the narrower type.
inline void store(void* data, DType type, int64_t i, double x) {
  switch (type) {
    case DType::f32:
      static_cast<float*>(data)[i] = static_cast<float>(x);
      break;
    case DType::bf16:
      static_cast<uint16_t*>(data)[i] = f32_to_bf16(static_cast<float>(x));
      break;
    case DType::f16:
      static_cast<uint16_t*>(data)[i] = f32_to_f16(static_cast<float>(x));
      break;
    default:
      static_cast<double*>(data)[i] = x;
      break;
  }
}

// The number that is left of x when it has been stored.
inline double rounded_to(DType type, double x) {
  double place = 0;
  store(&place, type, 0, x);
  return load_f64(&place, type, 0);
}

}  // namespace deltic
