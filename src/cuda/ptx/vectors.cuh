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
// The address as the compiler has it: generic addresses of global memory are the global ones.
__device__ inline void store_vector(void* to, const uint4& w) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(w.x), "r"(w.y), "r"(w.z),
               "r"(w.w)
               : "memory");
}
// Or nothing, without a branch.
__device__ inline void store_vector(void* to, const uint4& w, bool is_there) {
  asm volatile(
      "{\n.reg .pred P;\nsetp.ne.u32 P, %5, 0;\n@P st.global.v4.b32 [%0], {%1, %2, %3, %4};\n}" ::
          "l"(to),
      "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w), "r"(static_cast<uint32_t>(is_there))
      : "memory");
}

}  // namespace deltic::gpu
