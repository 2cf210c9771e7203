// The GPU of a build without CUDA: there is none.
#include "cases/device.h"
#include "deltic/deltic.hpp"

namespace deltic::cases::device {
namespace {
[[noreturn]] void refuse() { throw Error(ErrorKind::unsupported, missing()); }
}  // namespace

std::string missing() { return kNotBuilt; }
std::string name() { refuse(); }
size_t cache_bytes() { refuse(); }
size_t memory_bytes() { refuse(); }
std::shared_ptr<std::byte> allocate(size_t) { refuse(); }
void upload(std::byte*, const std::byte*, size_t) { refuse(); }
void download(std::byte*, const std::byte*, size_t) { refuse(); }
void copy(std::byte*, const std::byte*, size_t, void*) { refuse(); }
void copy_2d(std::byte*, size_t, const std::byte*, size_t, size_t, size_t) { refuse(); }
void set(std::byte*, uint8_t, size_t) { refuse(); }
void synchronize() { refuse(); }

struct Graph::Handles {};
Graph::Graph(const std::function<void(void*)>&) { refuse(); }
Graph::~Graph() = default;
double Graph::replay_ms() { refuse(); }
double Graph::calls_ms(const std::function<void(void*)>&) { refuse(); }
void Graph::replay() { refuse(); }

}  // namespace deltic::cases::device
