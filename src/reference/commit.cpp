// commit: the recorded updates of the accepted tokens.
#include "reference/operations.h"
#include "reference/token.h"

namespace deltic::reference {

size_t commit_bytes(const Problem& p) {
  Scratch scratch(nullptr);
  Matrix(scratch, p.K, p.V);
  return scratch.used();
}

// S_t = decay_t S_{t-1} + k_t u_t^T
void run_commit(const Problem& call, std::byte* workspace) {
  Scratch scratch(workspace);
  const Matrix S(scratch, call.K, call.V);
  for (int64_t i = 0; i < call.layers * call.N * call.HV; ++i) {
    const Problem p = layer_of(call, i / (call.N * call.HV));
    const int64_t n = i / p.HV % p.N, h = i % p.HV;
    const Sequence s = sequence(p, n);
    if (s.write_slot < 0) continue;
    load_state(p.state_in, s.read_slot, h, S);
    const Path path = path_to(p, n, p.accepted(n) - 1);
    for (int64_t j = 0; j < path.length; ++j) {
      const int64_t t = path.tokens[j];
      for (int64_t d = 0; d < p.K; ++d) {
        const double decay = p.gate == Gate::none ? 1
                                                  : get(p.updates, n, t, h,
                                                        p.K + p.V + (p.gate == Gate::head ? 0 : d));
        for (int64_t c = 0; c < p.V; ++c) {
          S(d, c) = decay * S(d, c) + get(p.updates, n, t, h, d) * get(p.updates, n, t, h, p.K + c);
          if (rounds_tokens(p)) S(d, c) = rounded_to(p.state_out.dtype, S(d, c));
        }
      }
    }
    store_state(p.state_out, s.write_slot, h, S);
  }
}

}  // namespace deltic::reference
