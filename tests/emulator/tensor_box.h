// A box of a tensor that a bulk copy moves, by a map of (channel, head, token, batch).
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace deltic::emulator {

// What a map holds here: the arguments that it was made from.
void encode_map(CUtensorMap* map, CUtensorMapDataType type, void* data, const cuuint64_t* dims,
                const cuuint64_t* strides, const cuuint32_t* box, CUtensorMapSwizzle swizzle);
void replace_map_address(CUtensorMap* map, void* data);

class TensorBox {
 public:
  TensorBox(const CUtensorMap& map, int channel, int head, int token, int batch);
  int bytes() const;
  // Elements outside of the tensor are zeros, and are not written.
  void read_tensor(std::vector<std::byte>& to) const;
  void write_tensor(const std::vector<std::byte>& from) const;
  void read_shared(std::vector<std::byte>& to, const std::byte* from) const;
  void write_shared(const std::vector<std::byte>& from, std::byte* to) const;

 private:
  template <class F>
  void walk(F&& f) const;  // f(row of the box, address in the tensor, elements inside)
  size_t place(size_t row, size_t byte, const std::byte* shared) const;

  std::byte* data_;
  int64_t dims_[4], strides_[4], box_[4], at_[4];
  bool is_swizzled_;
};

}  // namespace deltic::emulator
