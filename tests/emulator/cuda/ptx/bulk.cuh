// Emulated: copies that go by themselves, of contiguous bytes and of boxes of tensors.
#pragma once

#include <cuda.h>

#include <cstdint>
#include <cstring>

#include "cuda/ptx/policies.cuh"
#include "cuda/ptx/shared.cuh"
#include "tensor_box.h"

namespace deltic::gpu {

inline void check_bulk(const void* shared, const void* global, int bytes) {
  if (reinterpret_cast<uintptr_t>(shared) % 16 != 0 ||
      reinterpret_cast<uintptr_t>(global) % 16 != 0 || bytes % 16 != 0 || bytes <= 0)
    emulator::fault("a bulk copy of %d bytes, or at an odd address", bytes);
}
inline void bulk_load(void* dst, const void* src, int bytes, uint64_t* bar) {
  check_bulk(dst, src, bytes);
  auto& cta = emulator::Cta::current();
  cta.add_copy(
      emulator::Copy::Kind::load,
      [=](std::vector<std::byte>& held) {
        held.resize(size_t(bytes));
        std::memcpy(held.data(), src, size_t(bytes));
      },
      [=, &cta](const std::vector<std::byte>& held) {
        std::memcpy(dst, held.data(), size_t(bytes));
        cta.barrier_complete(bar, bytes);
      });
}
inline void bulk_prefetch(const void*, int) {}
template <uint64_t kPolicy = kEvictLast>
inline void bulk_store(void* dst, const void* src, int bytes) {
  check_bulk(src, dst, bytes);
  emulator::Cta::current().add_copy(
      emulator::Copy::Kind::store,
      [=](std::vector<std::byte>& held) {
        held.resize(size_t(bytes));
        std::memcpy(held.data(), src, size_t(bytes));
      },
      [=](const std::vector<std::byte>& held) { std::memcpy(dst, held.data(), size_t(bytes)); });
}
inline void bulk_store_wait() { emulator::Cta::current().wait_stores(false); }
inline void bulk_store_wait_read() { emulator::Cta::current().wait_stores(true); }
inline void store_packet(void* p, uint32_t v) { std::memcpy(p, &v, sizeof v); }

template <uint64_t kPolicy = kEvictFirst>
inline void tensor_load(void* dst, const CUtensorMap* map, int channel, int head, int token,
                        int batch, uint64_t* bar) {
  const emulator::TensorBox box(*map, channel, head, token, batch);
  auto& cta = emulator::Cta::current();
  cta.add_copy(
      emulator::Copy::Kind::load, [=](std::vector<std::byte>& held) { box.read_tensor(held); },
      [=, &cta](const std::vector<std::byte>& held) {
        box.write_shared(held, static_cast<std::byte*>(dst));
        cta.barrier_complete(bar, box.bytes());
      });
}
inline void tensor_store(const CUtensorMap* map, const void* src, int channel, int head, int token,
                         int batch) {
  const emulator::TensorBox box(*map, channel, head, token, batch);
  emulator::Cta::current().add_copy(
      emulator::Copy::Kind::store,
      [=](std::vector<std::byte>& held) {
        box.read_shared(held, static_cast<const std::byte*>(src));
      },
      [=](const std::vector<std::byte>& held) { box.write_tensor(held); });
}

}  // namespace deltic::gpu
