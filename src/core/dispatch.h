// Implementation lists: what an implementation is, and how one is chosen.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "core/problem.h"

namespace deltic {

// One way to divide a call's work over a device, for `deltic explain`.
struct WorkDivision {
  std::string what;
  double predicted_us = 0;
  bool chosen = false;
  std::string reason;
};

struct Implementation {
  const char* name;  // says what it is: `cpu.avx512`
  // Null: the machine can run it; else the sentence why not (static text: refusing allocates
  // nothing).
  const char* (*missing)();
  // Null: takes the call; else the sentence why not. Looks at widths, dtypes and options only,
  // never at a length or at data: a sequence's bits must not depend on its neighbours.
  const char* (*refuse)(const Problem&);
  size_t (*workspace_bytes)(const Problem&);
  void (*run)(const Problem&, std::span<std::byte> workspace, void* stream);
  bool only_when_named = false;  // the oracle, and what is not proven on its device
  // Null: there is one way. Else the ways on a GPU with so many SMs, which need not be here; empty
  // for a call without tokens, and for one that `refuse` has a sentence for on every GPU.
  std::vector<WorkDivision> (*divisions)(const Problem&, int num_sms) = nullptr;
};

using ImplementationList = std::span<const Implementation>;

// Of every implementation but the oracle.
inline const char* refuse_fp64(const Problem& p) {
  return p.has_fp64 ? "a tensor is fp64, which only the oracle takes" : nullptr;
}

}  // namespace deltic
