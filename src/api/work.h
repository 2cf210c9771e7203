// What runs a call: an implementation, or one for each of the calls that it is made of, one after
// the other in one workspace: a forward in two forms, a step.
#pragma once

#include <span>
#include <string>

#include "core/dispatch.h"

namespace deltic {

struct Work {
  static constexpr int kMost = 3;
  const Implementation* runs[kMost] = {};
  int count = 0;

  size_t bytes(const Problem& p) const;
  void run(const Problem& p, std::span<std::byte> memory, void* stream) const;
};

// The first implementations that take the call, or those that it names: `named`, and behind it
// those of the same name, where the operation has one. option: options.impl.
Work choose_work(const Problem& p, const Implementation* named, const char* option);

// A step as the calls that it is made of, whoever runs them: its last implementation on a device.
// Behind it stand those that DELTIC_IMPL names, or the first that take them.
const Implementation& in_parts(deltic_device_type device);

// Who runs what else of a call that is made of several, for its explanation; empty where one
// implementation runs all of it. Throws with every sentence if nobody does.
std::string text_behind(const Problem& p, const Implementation* named, const char* option);

// The call whose implementations are asked: the call, or the part of it that the first one runs.
Problem asked_call(const Problem& p, const Implementation* named);

}  // namespace deltic
