// Checks of calls that copy states from slot to slot.
#include "core/check.h"
#include "core/checker.h"

namespace deltic {
namespace {

// The pool from head `first` on.
States from_head(const States& s, int64_t first) {
  States x = s;
  if (x.data != nullptr && first > 0) {
    x.data = static_cast<std::byte*>(x.data) + first * x.s_head * size_of(x.dtype);
  }
  return x;
}

void check_heads(const Checker& c, const deltic_move_tensors& t, int64_t from, int64_t to) {
  if (t.read_head < 0 || t.read_head >= from) {
    c.bad("read_head", "expected a head of state_pool, 0 to ", from - 1, ", got ", t.read_head);
  }
  if (t.num_heads < 0 || t.num_heads > from - t.read_head) {
    c.bad("num_heads", "expected 0 (all) to ", from - t.read_head,
          ", the heads of state_pool from read_head on, got ", t.num_heads);
  }
  const int64_t heads = t.num_heads > 0 ? t.num_heads : from - t.read_head;
  if (t.write_head < 0 || t.write_head > to - heads) {
    c.bad("write_head", "expected 0 to ", to, " - ", heads,
          " heads of the pool that is written, got ", t.write_head);
  }
  const int64_t apart =
      t.read_head < t.write_head ? t.write_head - t.read_head : t.read_head - t.write_head;
  if (t.write_pool.rank == 0 && apart > 0 && apart < heads) {
    c.bad("write_head", "expected the heads that are read, or none of them, within one pool, got ",
          heads, " heads from ", t.read_head, " to ", t.write_head);
  }
}

}  // namespace

Problem check_call(deltic_op op, const deltic_options& options, const deltic_move_tensors& t,
                   const CheckContext& context) {
  Problem p;
  Checker c(op, context, p);
  c.options(options);
  c.one_of("transpose", t.transpose, 1, "0 or 1");
  if (t.reserved != 0) c.bad("reserved", "expected 0, got ", t.reserved);
  p.is_pool = true, p.has_write_pool = t.write_pool.rank != 0;
  const Checker::Pool from = c.pool(t.state_pool, "state_pool", !p.has_write_pool, p.v_first);
  Checker::Pool to = from;
  if (p.has_write_pool) {
    to = c.pool(t.write_pool, "write_pool", true, p.v_first != (t.transpose == 1));
    if (t.write_pool.rank != t.state_pool.rank || to.layers != from.layers) {
      c.bad("write_pool", "expected layers as state_pool has them, got shape ",
            shape_text(t.write_pool), " and ", shape_text(t.state_pool));
    }
    if (to.K != from.K || to.V != from.V) {
      c.bad("write_pool", "expected states of K = ", from.K, " and V = ", from.V,
            " as state_pool has, got ", to.K, " and ", to.V);
    }
  } else if (t.transpose == 1) {
    c.bad("transpose", "expected 0 within one pool, which has one layout, got 1");
  }
  p.transposes = t.transpose == 1;
  check_heads(c, t, from.heads, to.heads);
  p.layers = from.layers, p.K = from.K, p.V = from.V;
  p.H = p.HV = t.num_heads > 0 ? t.num_heads : from.heads - t.read_head;
  p.state_in = from_head(from.states, t.read_head);
  p.state_out = from_head(to.states, t.write_head);
  p.read_index = c.indices(t.read_index, "read_index");
  p.write_index = c.indices(t.write_index, "write_index");
  if (!p.read_index) c.bad("read_index", "expected a tensor, got none");
  if (!p.write_index) c.bad("write_index", "expected a tensor, got none");
  p.N = p.B = p.read_index.n0;
  c.shape(t.write_index, "write_index", {p.N});
  c.null_slot(true);
  c.sizes_together();
  c.output(p.has_write_pool ? t.write_pool : t.state_pool,
           p.has_write_pool ? "write_pool" : "state_pool");
  if (p.has_write_pool) c.input(t.state_pool, "state_pool");
  c.input(t.read_index, "read_index"), c.input(t.write_index, "write_index");
  return p;
}

}  // namespace deltic
