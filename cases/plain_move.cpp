// The plain algorithm of a move: element by element, through fp32.
#include "cases/plain.h"

namespace deltic::cases::plain {

Values move(const Instance& instance) {
  const Problem p(instance);
  const Case& c = p.c;
  const TensorView& from = instance.tensor("state_pool").view;
  const char* name = c.write_pool ? "write_pool" : "state_pool";
  const TensorView& to = instance.tensor(name).view;
  Values all;
  const Output out = make_output(instance, all, name, NAN);
  // [layers,slots,heads,K,V], the last two turned V-first.
  const auto place = [&](const TensorView& x, int64_t layer, int64_t slot, int64_t head, int64_t d,
                         int64_t v, bool v_first) {
    const int64_t slots = x.shape[x.rank - 4], heads = x.shape[x.rank - 3];
    const int64_t state = ((layer * slots + slot) * heads + head) * c.K * c.V;
    return static_cast<size_t>(state + (v_first ? v * c.K + d : d * c.V + v));
  };
  const bool v_first = c.state == StateLayout::vk;
  for (int64_t n = 0; n < c.num_sequences(); ++n) {
    const int64_t read = instance.read_slots()[static_cast<size_t>(n)];
    const int64_t write = instance.write_slots()[static_cast<size_t>(n)];
    if (write < 0) continue;
    for (int64_t i = 0; i < std::max<int64_t>(c.layers, 1) * c.HV * c.K * c.V; ++i) {
      const int64_t v = i % c.V, d = i / c.V % c.K, h = i / c.V / c.K % c.HV;
      const int64_t layer = i / c.V / c.K / c.HV;
      out.put(place(to, layer, write, c.write_head + h, d, v, v_first != c.transpose),
              read < 0 ? 0.0f : p.state[place(from, layer, read, c.read_head + h, d, v, v_first)]);
    }
  }
  return all;
}

}  // namespace deltic::cases::plain
