// Checks of calls that bring states to where accepted tokens left them.
#include "core/check.h"
#include "core/checker.h"

namespace deltic {

Problem check_call(deltic_op op, const deltic_options& options, const deltic_commit_tensors& t,
                   const CheckContext& context) {
  Problem p;
  Checker c(op, context, p);
  c.options(options);
  p.is_pool = true;
  const Checker::Pool pool = c.pool(t.state_pool, "state_pool", true, p.v_first);
  p.layers = pool.layers, p.H = p.HV = pool.heads, p.K = pool.K, p.V = pool.V;
  p.state_in = p.state_out = pool.states;
  if (p.K > 256) c.bad("state_pool", "expected a key width K of 1 to 256, got ", p.K);

  c.required(t.record, "record");
  const int32_t first = t.state_pool.rank - 4;
  if (t.record.rank != 4 + first) {
    c.bad("record", "expected shape ", first == 1 ? "[layers,N,T',HV,W]" : "[N,T',HV,W]", ", got ",
          shape_text(t.record));
  }
  p.N = p.B = t.record.shape[first], p.T = t.record.shape[first + 1];
  const int64_t gate = t.record.shape[first + 3] - p.K - p.V;
  if ((first == 1 && t.record.shape[0] != p.layers) || t.record.shape[first + 2] != p.HV ||
      (gate != 0 && gate != 1 && gate != p.K)) {
    c.bad("record", "expected ", first == 1 ? "layers and " : "", "HV = ", p.HV,
          " as state_pool has, and rows of K + V numbers, one or K more of a gate, K = ", p.K,
          ", V = ", p.V, ", got shape ", shape_text(t.record));
  }
  p.gate = gate == 0 ? Gate::none : gate == 1 ? Gate::head : Gate::channel;
  c.record(t.record, first);

  p.has_initial = c.flags(t.has_initial_state, "has_initial_state");
  p.accepted = c.indices(t.accepted, "accepted");
  if (!p.accepted) c.bad("accepted", "expected a tensor, got none");
  c.shape(t.accepted, "accepted", {p.N});
  p.read_index = c.indices(t.read_index, "read_index");
  if (p.read_index) c.shape(t.read_index, "read_index", {p.N});
  p.write_index = c.indices(t.write_index, "write_index");
  if (p.write_index) c.shape(t.write_index, "write_index", {p.N});
  c.slots_without_lists(p.state_in, "state_pool");
  p.parents = c.indices(t.parents, "parents", true);
  if (p.parents && (p.parents.n1 < p.T || p.parents.n0 != p.N)) {
    c.bad("parents", "expected shape [N,T'] with N = ", p.N, " and T' = ", p.T,
          " as the record has, got ", shape_text(t.parents));
  }
  c.null_slot(p.read_index || p.write_index);
  c.sizes_together();
  c.output(t.state_pool, "state_pool");
  c.input(t.record, "record"), c.input(t.accepted, "accepted");
  c.input(t.read_index, "read_index"), c.input(t.write_index, "write_index");
  c.input(t.has_initial_state, "has_initial_state"), c.input(t.parents, "parents");
  return p;
}

}  // namespace deltic
