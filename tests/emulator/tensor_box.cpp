#include "tensor_box.h"

#include <algorithm>
#include <cstring>
#include <iterator>

#include "cta.h"

namespace deltic::emulator {
namespace {
constexpr int64_t kElement = 2;  // bytes: bf16 and fp16 alone
constexpr cuuint64_t kMagic = 0x4D4150;
enum Word { kMagicWord, kData, kSwizzle, kDims, kBox = kDims + 4, kStrides = kBox + 4 };
}  // namespace

void encode_map(CUtensorMap* map, CUtensorMapDataType type, void* data, const cuuint64_t* dims,
                const cuuint64_t* strides, const cuuint32_t* box, CUtensorMapSwizzle swizzle) {
  if (type != CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 && type != CU_TENSOR_MAP_DATA_TYPE_FLOAT16)
    fault("a tensor map of numbers that are not two bytes");
  auto& w = map->opaque;
  w[kMagicWord] = kMagic, w[kData] = reinterpret_cast<uintptr_t>(data), w[kSwizzle] = swizzle;
  for (int i = 0; i < 4; ++i) w[kDims + i] = dims[i], w[kBox + i] = box[i];
  for (int i = 0; i < 3; ++i) w[kStrides + i] = strides[i];
}
void replace_map_address(CUtensorMap* map, void* data) {
  map->opaque[kData] = reinterpret_cast<uintptr_t>(data);
}

TensorBox::TensorBox(const CUtensorMap& map, int channel, int head, int token, int batch)
    : at_{channel, head, token, batch} {
  const auto& w = map.opaque;
  if (w[kMagicWord] != kMagic) fault("a bulk tensor copy by something that is no map");
  data_ = reinterpret_cast<std::byte*>(w[kData]);
  is_swizzled_ = w[kSwizzle] == CU_TENSOR_MAP_SWIZZLE_128B;
  strides_[0] = kElement;
  for (int i = 0; i < 4; ++i) dims_[i] = int64_t(w[kDims + i]), box_[i] = int64_t(w[kBox + i]);
  for (int i = 0; i < 3; ++i) strides_[i + 1] = int64_t(w[kStrides + i]);
}
int TensorBox::bytes() const { return int(box_[0] * box_[1] * box_[2] * box_[3] * kElement); }

template <class F>
void TensorBox::walk(F&& f) const {
  size_t row = 0;
  for (int64_t b = 0; b < box_[3]; ++b)
    for (int64_t t = 0; t < box_[2]; ++t)
      for (int64_t h = 0; h < box_[1]; ++h, ++row) {
        const int64_t x[4] = {at_[0], at_[1] + h, at_[2] + t, at_[3] + b};
        bool is_inside = x[0] >= 0;
        for (int i = 1; i < 4; ++i) is_inside = is_inside && x[i] >= 0 && x[i] < dims_[i];
        const int64_t count = is_inside ? std::clamp<int64_t>(dims_[0] - x[0], 0, box_[0]) : 0;
        std::byte* place = data_;
        for (int i = 0; i < 4; ++i) place += x[i] * strides_[i];
        f(row, place, size_t(count * kElement));
      }
}
void TensorBox::read_tensor(std::vector<std::byte>& to) const {
  to.assign(size_t(bytes()), std::byte{0});
  const size_t row_bytes = size_t(box_[0] * kElement);
  walk([&](size_t row, const std::byte* from, size_t count) {
    if (count > 0) std::memcpy(to.data() + row * row_bytes, from, count);
  });
}
void TensorBox::write_tensor(const std::vector<std::byte>& from) const {
  const size_t row_bytes = size_t(box_[0] * kElement);
  walk([&](size_t row, std::byte* to, size_t count) {
    if (count > 0) std::memcpy(to, from.data() + row * row_bytes, count);
  });
}

// With swizzle pieces of 16 bytes are exchanged by bits 7 to 9 of their address.
size_t TensorBox::place(size_t row, size_t byte, const std::byte* shared) const {
  const size_t plain = row * size_t(box_[0] * kElement) + byte;
  if (!is_swizzled_) return plain;
  const size_t base = shared_address(shared);
  return ((base + plain) ^ (((base + plain) >> 7 & 7) << 4)) - base;
}
void TensorBox::write_shared(const std::vector<std::byte>& from, std::byte* to) const {
  const size_t row_bytes = size_t(box_[0] * kElement);
  if (shared_address(to) % 128 != 0) fault("a bulk tensor copy to an odd address");
  for (size_t i = 0; i < from.size(); i += 16)
    std::memcpy(to + place(i / row_bytes, i % row_bytes, to), from.data() + i, 16);
}
void TensorBox::read_shared(std::vector<std::byte>& to, const std::byte* from) const {
  const size_t row_bytes = size_t(box_[0] * kElement);
  to.resize(size_t(bytes()));
  if (shared_address(from) % 128 != 0) fault("a bulk tensor copy from an odd address");
  for (size_t i = 0; i < to.size(); i += 16)
    std::memcpy(to.data() + i, from + place(i / row_bytes, i % row_bytes, from), 16);
}

}  // namespace deltic::emulator
