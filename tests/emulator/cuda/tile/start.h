// Emulated: a launch with its kernel and that one's parameters.
#pragma once

#include <type_traits>

#include "cuda/tile/launch_kernel.h"
#include "machine.h"

namespace deltic::gpu {

template <class... Parameters, class... Arguments>
cudaError_t launch_as(const Launch& launch, void (*kernel)(Parameters...),
                      const Arguments&... arguments) {
  static_assert((std::is_same_v<Parameters, Arguments> && ...), "read where they lie, as they are");
  return emulator::launch(
      {launch.grid, launch.threads, launch.smem, launch.is_early, launch.is_together},
      launch.stream, reinterpret_cast<const void*>(kernel), [=] { kernel(arguments...); });
}

}  // namespace deltic::gpu
