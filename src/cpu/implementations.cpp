// The CPU backend's lists, best first; the plain one last.
#include "cpu/cpu.h"
#include "cpu/features.h"
#include "cpu/plain.h"
#include "cpu/simd/simd.h"

namespace deltic::cpu {
namespace {

const char* takes_all(const Problem&) { return nullptr; }

// fp64 has been refused by the checks unless the oracle was named, so whatever comes is taken.
void add(std::vector<Implementation>& list, std::span<const SimdDoor> doors) {
  for (const SimdDoor& d : doors) {
    list.push_back({d.name, d.missing, takes_all, d.workspace_bytes, d.run, false});
  }
}

}  // namespace

const std::vector<Implementation>& implementations(deltic_op op) {
  static const auto lists = [] {
    std::vector<std::vector<Implementation>> all(DELTIC_NUM_OPS);
    add(all[DELTIC_FORWARD], forward_doors());
    add(all[DELTIC_DECODE], decode_doors());
    for (int i = 0; i < DELTIC_NUM_OPS; ++i) {
      all[static_cast<size_t>(i)].push_back(plain(static_cast<deltic_op>(i)));
    }
    return all;
  }();
  return lists[static_cast<size_t>(op)];
}

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
