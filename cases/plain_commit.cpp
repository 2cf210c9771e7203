// The plain algorithm of a commit: the updates of the accepted tokens one after the other, in fp32.
#include "cases/plain.h"

namespace deltic::cases::plain {

Values commit(const Instance& instance) {
  const Problem p(instance);
  const Case& c = p.c;
  const Floats record = p.floats("record");
  const std::vector<int64_t> accepted = p.whole("accepted");
  const TensorView& pool = instance.tensor("state_pool").view;
  const int64_t slots = pool.shape[pool.rank - 4], N = c.num_sequences(), W = c.record_width();
  Values all;
  const Output out = make_output(instance, all, "state_pool", NAN);
  for (int64_t i = 0; i < std::max<int64_t>(c.layers, 1) * N * c.HV; ++i) {
    const int64_t layer = i / (N * c.HV), n = i / c.HV % N, h = i % c.HV;
    const int64_t to = instance.write_slots()[static_cast<size_t>(n)];
    if (to < 0) continue;
    int64_t from = instance.read_slots()[static_cast<size_t>(n)];
    if (!p.has_initial.empty() && p.has_initial[static_cast<size_t>(n)] == 0) from = -1;
    std::vector<int64_t> path;
    for (int64_t t = accepted[static_cast<size_t>(n)] - 1; t >= 0;) {
      path.insert(path.begin(), t);
      t = c.tree ? p.parents[static_cast<size_t>(n * p.parent_columns() + t)] : t - 1;
    }
    for (int64_t j = 0; j < c.K * c.V; ++j) {
      const int64_t d = j / c.V, v = j % c.V;
      const auto place = [&](int64_t slot) {
        const int64_t state = ((layer * slots + slot) * c.HV + h) * c.K * c.V;
        return static_cast<size_t>(state + (c.state == StateLayout::vk ? v * c.K + d : j));
      };
      float x = from < 0 ? 0.0f : p.state[place(from)];
      for (const int64_t t : path) {
        const float* row =
            record.data() + (((layer * N + n) * c.record_tokens() + t) * c.HV + h) * W;
        const float decay =
            c.gate == Gate::none ? 1.0f : row[c.K + c.V + (c.gate == Gate::head ? 0 : d)];
        x = round_to(x * decay + row[d] * row[c.K + v], c.sdtype);
      }
      out.put(place(to), x);
    }
  }
  return all;
}

}  // namespace deltic::cases::plain
