// The CPU backend's lists, best first; the plain one last.
#include "cpu/cpu.h"
#include "cpu/plain.h"

namespace deltic::cpu {

const std::vector<Implementation>& implementations(deltic_op op) {
  static const auto lists = [] {
    std::vector<std::vector<Implementation>> all(DELTIC_NUM_OPS);
    for (int i = 0; i < DELTIC_NUM_OPS; ++i) {
      all[static_cast<size_t>(i)].push_back(plain(static_cast<deltic_op>(i)));
    }
    return all;
  }();
  return lists[static_cast<size_t>(op)];
}

std::string features_found() { return "x86-64"; }
std::string features_used() { return "plain"; }

}  // namespace deltic::cpu
