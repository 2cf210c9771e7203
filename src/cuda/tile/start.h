// A launch with its kernel and that one's parameters.
#pragma once

#include <type_traits>

#include "cuda/tile/launch_kernel.h"

namespace deltic::gpu {

template <class... Parameters, class... Arguments>
cudaError_t launch_as(const Launch& launch, void (*kernel)(Parameters...),
                      const Arguments&... arguments) {
  static_assert((std::is_same_v<Parameters, Arguments> && ...), "read where they lie, as they are");
  void* pointers[] = {const_cast<void*>(static_cast<const void*>(&arguments))...};
  return launch_kernel(launch, reinterpret_cast<const void*>(kernel), pointers);
}

}  // namespace deltic::gpu
