// Whether a thread computes with denormals: a call may flush them, and stops when it is done.
#pragma once

#include <limits>

namespace deltic::test {

inline bool keeps_denormals() {
  volatile float smallest = std::numeric_limits<float>::min(), tiny = 0x1p-140f;
  return smallest * 0.5f != 0.0f && tiny * 0x1p100f != 0.0f;  // flushed out, and in
}

}  // namespace deltic::test
