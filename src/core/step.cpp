// The rows between the parts of a step.
#include "core/step.h"

#include "core/scratch.h"

namespace deltic {
namespace {

struct Memory {
  std::byte *qkv, *o;
  size_t bytes;
};

Memory memory_of(const StepProblem& s, std::byte* base) {
  constexpr int64_t kAlign = 1024;
  Scratch scratch(base);
  const Problem &conv = s.conv, &norm = s.norm;
  Memory m{};
  m.qkv = scratch.take<std::byte>(conv.B, conv.T, conv.K, size_of(conv.out.dtype));
  if (s.has_norm)
    m.o = scratch.take<std::byte>(norm.B, norm.T, norm.H, norm.K, size_of(norm.x.dtype));
  m.bytes = static_cast<size_t>(round_up(static_cast<int64_t>(scratch.used()), kAlign));
  return m;
}

}  // namespace

size_t rows_bytes(const StepProblem& s) { return memory_of(s, nullptr).bytes; }

void lay_rows(StepProblem& s, std::byte* memory) {
  const Memory m = memory_of(s, memory);
  Problem& d = s.decode;
  const int64_t element = size_of(s.conv.out.dtype), keys = d.H * d.K * element;
  s.conv.out.data = m.qkv;
  // Without memory, for a query, they stay null.
  const auto at = [&](int64_t offset) { return m.qkv == nullptr ? nullptr : m.qkv + offset; };
  d.q.data = at(0), d.k.data = at(keys), d.v.data = at(2 * keys);
  if (s.has_norm) d.o.data = s.norm.x.data = m.o;
}

}  // namespace deltic
