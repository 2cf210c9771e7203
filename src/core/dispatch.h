// Implementation lists: what an implementation is, and how one is chosen.
#pragma once

#include <span>

#include "core/problem.h"

namespace deltic {

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
  bool only_when_named = false;  // the oracle
};

using ImplementationList = std::span<const Implementation>;

}  // namespace deltic
