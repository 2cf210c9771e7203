// Stores of 16 and 8 bytes: the words of a struct, or of a uint4, the compiler may store one by
// one, which is four requests of a quarter of every sector.
#pragma once

#include <cstdint>

namespace deltic::gpu {

__device__ inline void store_vector(void* to, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(a), "r"(b), "r"(c), "r"(d)
               : "memory");
}
__device__ inline void store_vector(void* to, uint32_t a, uint32_t b) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(a),
               "r"(b)
               : "memory");
}

}  // namespace deltic::gpu
