// What torch's CUDA library has for C: the current stream, and memory. A torch without CUDA has
// none of it, so it cannot be linked by name; where there are CUDA tensors, the library is loaded.
#include <dlfcn.h>

#include "bridge.h"

namespace deltic::bridge {
namespace {

struct CudaFunctions {
  AOTITorchError (*stream)(int32_t device, void** stream) = nullptr;
  AOTITorchError (*device)(int32_t* device) = nullptr;
  AOTITorchError (*allocate)(uint64_t bytes, void** memory) = nullptr;
  AOTITorchError (*release)(void* memory) = nullptr;

  CudaFunctions() {
    void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
    if (library == nullptr) return;
    find(library, "aoti_torch_get_current_cuda_stream", stream);
    find(library, "aoti_torch_get_current_device_index", device);
    find(library, "aoti_torch_cuda_caching_allocator_raw_alloc", allocate);
    find(library, "aoti_torch_cuda_caching_allocator_raw_delete", release);
  }
  bool has_memory() const { return device != nullptr && allocate != nullptr && release != nullptr; }

 private:
  template <class Function>
  static void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
  }
};
const CudaFunctions& functions() {
  static const CudaFunctions found;
  return found;
}

}  // namespace

void* stream_of(const deltic_tensor& where) {
  if (where.device_type != DELTIC_CUDA) return nullptr;
  const auto get = functions().stream;
  // The default stream instead would not wait for the tensors.
  if (get == nullptr) {
    fail(DELTIC_RUNTIME_ERROR,
         "deltic: stream: expected aoti_torch_get_current_cuda_stream in libtorch_cuda.so, got "
         "none");
  }
  void* stream = nullptr;
  DELTIC_TORCH_CHECK(get(where.device_index, &stream));
  return stream;
}

bool is_current_device(const deltic_tensor& where) {
  const CudaFunctions& torch = functions();
  int32_t current = -1;
  return torch.device != nullptr && torch.device(&current) == AOTI_TORCH_SUCCESS &&
         current == where.device_index;
}

void* allocate_raw(uint64_t bytes, const deltic_tensor& where) {
  const CudaFunctions& torch = functions();
  void* memory = nullptr;
  const bool is_here = torch.has_memory() && is_current_device(where);
  if (!is_here || torch.allocate(bytes, &memory) != AOTI_TORCH_SUCCESS) return nullptr;
  return memory;
}
void free_raw(void* memory) { functions().release(memory); }

}  // namespace deltic::bridge
