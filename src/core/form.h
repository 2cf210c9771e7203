// A forward in two forms as what it is: a chunked call over the first tokens of every sequence, and
// a decode over the others that starts from the states the first one left.
#pragma once

#include <cstddef>
#include <span>

#include "core/problem.h"

namespace deltic {

// Where each half's tokens lie and its states come from and go to. Filled on the call's device,
// because lengths and slots are there.
struct FormLists {
  Span *before, *after;                              // [N]
  int64_t *read, *between, *write;                   // [N] slots; -1: none
  int64_t *tokens_after, *ckpt_before, *ckpt_after;  // [M] checkpoints: counts from there on, slots
};

struct TwoForms {
  Problem before, after;
  FormLists lists;
};

// Bytes of lists and states between the halves, which lie at the start of the workspace: a multiple
// of what any implementation aligns its own part to.
size_t form_bytes(const Problem& p);
// Both halves of a call that has_two_forms. Their lists are empty memory.
TwoForms two_forms(const Problem& p, std::byte* memory);
// Of tensors that the host can see.
void fill_lists(const Problem& p, const FormLists& lists);

// A forward that is recurrent from its first token on.
inline Problem as_decode(Problem p) {
  p.op = DELTIC_DECODE, p.form = DELTIC_FORM_CHUNKED;
  return p;
}

}  // namespace deltic
