// move: states from slot to slot.
#include "reference/elements.h"
#include "reference/operations.h"

namespace deltic::reference {

size_t move_bytes(const Problem&) { return 0; }

void run_move(const Problem& p, std::byte*) {
  for (int64_t n = 0; n < p.N; ++n) {
    const Sequence s = sequence(p, n);
    if (s.write_slot < 0) continue;
    for (int64_t layer = 0; layer < p.layers; ++layer) {
      for (int64_t h = 0; h < p.HV; ++h) {
        const int64_t from = p.state_in.at(layer, std::max<int64_t>(s.read_slot, 0), h);
        const int64_t to = p.state_out.at(layer, s.write_slot, h);
        for (int64_t d = 0; d < p.K; ++d) {
          for (int64_t v = 0; v < p.V; ++v) {
            const double x = s.read_slot < 0
                                 ? 0
                                 : load_f64(p.state_in.data, p.state_in.dtype,
                                            from + d * p.state_in.s_k + v * p.state_in.s_v);
            store(p.state_out.data, p.state_out.dtype,
                  to + d * p.state_out.s_k + v * p.state_out.s_v, x);
          }
        }
      }
    }
  }
}

}  // namespace deltic::reference
