// What runs a call: an implementation, or of a forward in two forms one after the other.
#pragma once

#include <span>

#include "core/dispatch.h"

namespace deltic {

struct Work {
  const Implementation* first;
  const Implementation* second = nullptr;  // decode's, of the tokens that run in the recurrent form

  size_t bytes(const Problem& p) const;
  void run(const Problem& p, std::span<std::byte> memory, void* stream) const;
};

// The first implementations that take the call, or those that it names: `named`, and of the second
// the one of that name, where decode has one. option: options.impl.
Work choose_work(const Problem& p, const Implementation* named, const char* option);

// The name of the one that runs the tokens in the recurrent form, of a call in two; empty where one
// implementation runs all of it. Throws with every sentence if nobody does.
const char* name_behind(const Problem& p, const Implementation* named, const char* option);

// The call whose implementations are asked: the call, or the part of it that the first one runs.
Problem asked_call(const Problem& p, const Implementation* named);

}  // namespace deltic
