// The CPU backend's lists, best first; the plain one last.
#include "cpu/cpu.h"
#include "cpu/features.h"
#include "cpu/plain.h"
#include "cpu/saved.h"
#include "cpu/simd/simd.h"

namespace deltic::cpu {
namespace {

// fp64 has been refused by the checks unless the oracle was named, so whatever comes is taken.
const char* takes_all(const Problem&) { return nullptr; }

// Tiles multiply bf16: exact for bf16 inputs, a loss for the others.
const char* takes_bf16(const Problem& p) {
  return p.q.dtype == DType::bf16  ? nullptr
         : p.q.dtype == DType::f32 ? "q, k and v are fp32, tiles multiply bf16"
                                   : "q, k and v are fp16, tiles multiply bf16";
}

void add(std::vector<Implementation>& list, std::span<const SimdDoor> doors,
         const char* (*refuse)(const Problem&)) {
  for (const SimdDoor& d : doors) {
    list.push_back({d.name, d.missing, refuse, d.workspace_bytes, d.run, false});
  }
}

}  // namespace

const std::vector<Implementation>& implementations(deltic_op op) {
  static const auto lists = [] {
    std::vector<std::vector<Implementation>> all(DELTIC_NUM_OPS);
    add(all[DELTIC_FORWARD], tile_forward_doors(), takes_bf16);
    add(all[DELTIC_FORWARD], forward_doors(), takes_all);
    add(all[DELTIC_DECODE], decode_doors(), takes_all);
    add(all[DELTIC_BACKWARD], backward_doors(), takes_all);
    for (int i = DELTIC_CUMSUM; i <= DELTIC_WY; ++i)
      add(all[static_cast<size_t>(i)], block_doors(), takes_all);
    for (int i = 0; i < DELTIC_NUM_OPS; ++i) {
      all[static_cast<size_t>(i)].push_back(plain(static_cast<deltic_op>(i)));
    }
    return all;
  }();
  return lists[static_cast<size_t>(op)];
}

size_t saved_bytes(const Problem& p) { return SavedLayout(p, p.save).bytes; }

std::string features_used() {
  std::string s;
  for (const Implementation& i : implementations(DELTIC_FORWARD)) {
    if (i.missing() != nullptr) continue;
    if (!s.empty()) s += ' ';
    s += i.name;
  }
  return s;
}

}  // namespace deltic::cpu
