// A step as what it is: a convolution, a decode of its rows, and the norm of what decode leaves.
#pragma once

#include <cstddef>

#include "core/problem.h"

namespace deltic {

// The rows in between - conv.out, which decode's q, k and v are columns of, and decode.o, which is
// norm.x - have strides and dtypes, x's, and no data until they are laid in the workspace.
struct StepProblem {
  Problem conv, decode, norm;
  bool has_norm = false;  // else decode.o is the caller's
};

// Bytes of the rows in between, which lie at the start of the workspace: a multiple of what any
// implementation aligns its own part to.
size_t rows_bytes(const StepProblem& s);
void lay_rows(StepProblem& s, std::byte* memory);

// f of every part, in the order in which they run; of another call f of itself. P: Problem or const
// Problem.
template <class P, class F>
void for_each_part(P& p, const F& f) {
  if (p.step == nullptr) return f(p);
  f(p.step->conv), f(p.step->decode);
  if (p.step->has_norm) f(p.step->norm);
}

}  // namespace deltic
