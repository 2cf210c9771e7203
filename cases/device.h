// Memory and time on a GPU, for the cases; without CUDA's headers. A build without CUDA has the
// same functions (device_absent.cpp), which throw.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace deltic::cases::device {

// The library's words: it is not asked, since a call with tensors would be needed.
inline constexpr const char* kNotBuilt =
    "this build has no CUDA support (build where nvcc is found, or with DELTIC_CUDA=ON)";
// Empty: there is a GPU; else the sentence why not.
std::string missing();
std::string name();     // of the current GPU
size_t cache_bytes();   // its L2
size_t memory_bytes();  // free on it now

// Memory on the current GPU.
std::shared_ptr<std::byte> allocate(size_t bytes);
// Both wait for everything before them.
void upload(std::byte* to, const std::byte* from, size_t bytes);
void download(std::byte* to, const std::byte* from, size_t bytes);
void copy(std::byte* to, const std::byte* from, size_t bytes, void* stream);
// Rows of `width` bytes, of which two begin a pitch apart.
void copy_2d(std::byte* to, size_t to_pitch, const std::byte* from, size_t from_pitch, size_t width,
             size_t rows);
void set(std::byte* to, uint8_t value, size_t bytes);
// Waits for the GPU; throws deltic::Error with what went wrong there.
void synchronize();

// Calls recorded once and replayed, as a serving engine does: no launch costs between them.
class Graph {
 public:
  explicit Graph(const std::function<void(void* stream)>& calls);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  double replay_ms();                                               // by the GPU's own clock
  double calls_ms(const std::function<void(void* stream)>& calls);  // likewise, without a graph
  void replay();                                                    // waits for its end

 private:
  struct Handles;
  std::unique_ptr<Handles> handles_;
};

}  // namespace deltic::cases::device
