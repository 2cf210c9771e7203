// How long L2 is asked to keep lines.
#pragma once

#include <cstdint>

namespace deltic::gpu {

// Inputs and outputs pass through L2 once; the ring of packets is to stay there.
constexpr uint64_t kEvictFirst = 0x12F0000000000000ull;  // what createpolicy gives for evict_first
constexpr uint64_t kEvictLast = 0x14F0000000000000ull;
constexpr uint64_t kEvictNormal = 0x1000000000000000ull;

}  // namespace deltic::gpu
