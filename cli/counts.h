// What a case costs: floating-point operations and bytes, counted by formula.
#pragma once

#include "cases/case.h"

namespace deltic::cli {

// A multiplication and an addition count 1 each; exponentials and the norm are left out (they are
// of the order of T*HV*K, a hundredth of the products).
//
// Chunked form, per value head and chunk of C tokens (triangular products count their half):
//   k k^T, q k^T         C^2 K each
//   (I + L)^-1           C^3 / 3
//   u = A (beta v)       C^2 V
//   w = A (beta k e^G)   C^2 K
//   w S, (q e^G) S       2 C K V each
//   Aqk v_new            C^2 V
//   k^T v_new            2 C K V
// together per token C (3 K + 2 V + C / 3) + 6 K V.
//
// Recurrent form, per token and value head: decay K V, S^T k 2 K V, k u^T 2 K V, S^T q 2 K V: 7 K
// V.
//
// Backward, per value head and chunk, from the state before it and the gradient D of the one after:
//   Aqk^T do, do v_new^T, A^T d(v_new), d(v_new) (beta v)^T                    C^2 V each
//   A^T dw, dw (beta k e^G)^T, and dq, dk, dk, dk from d(Aqk) and dL           C^2 K each
//   A^T dA A^T                                                                 2 C^3 / 3
//   kg D, do S^T, v_new D^T, d(v_new) S^T, (q e^G)^T do, w^T d(v_new)          2 C K V each
// together per token C (6 K + 4 V + 2 C / 3) + 12 K V. What was not kept is computed again: the
// chunk's scores, inverse, w, u and v_new, C (3 K + V + C / 3) + 4 K V, once from kept states and
// twice from the inputs alone; with everything kept w alone, C K.
//
// Building blocks: cumsum and gate 1 per element, l2norm 3 per element, kkt and scores C K, inverse
// C^2 / 3, wy C (K + V) + 2 K, each per token and value head. Their gradients twice as much: every
// product has two. conv 2 W per channel and token, its gradient three times that (the sums again,
// dx, dweight).
double count_flops(const cases::Case& c);

// Every input is read once and every output written once: tensors of tokens, and of the states
// those of sequences that read or write one. Index lists and parameters are left out, and so is
// what forward keeps for backward (see Instance::saved_bytes). Of a building block's gradient, and
// of conv's, all tensors count.
double count_bytes(const cases::Case& c);

}  // namespace deltic::cli
