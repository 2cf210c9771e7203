// Features: what a case has of each.
#include "cases/features.h"

namespace deltic::cases {
namespace {

using C = const Case&;

bool has_value(C c, const char* key, const char* value) { return value_of(c, key) == value; }

// In the order of verify's table.
constexpr Feature kFeatures[] = {
    {"forward", [](C c) { return c.listed_op() == Op::forward; }},
    {"decode", [](C c) { return c.op == Op::decode; }},
    {"recurrent form", [](C c) { return c.recurrent && c.from.empty(); }},
    {"  from a token on", [](C c) { return !c.from.empty(); }},
    {"backward", [](C c) { return c.op == Op::backward; }},
    {"  from the inputs alone", [](C c) { return has_value(c, "save", "none"); }},
    {"  from kept states", [](C c) { return has_value(c, "save", "states"); }},
    {"  from everything kept", [](C c) { return has_value(c, "save", "all"); }},
    {"building blocks", [](C c) { return c.is_block() && c.op != Op::rmsnorm && !c.gradient; }},
    {"  their gradients", [](C c) { return c.is_block() && c.op != Op::rmsnorm && c.gradient; }},
    {"gated norm", [](C c) { return c.op == Op::rmsnorm && !c.gradient; }},
    {"  its gradients", [](C c) { return c.op == Op::rmsnorm && c.gradient; }},
    {"convolution", [](C c) { return c.op == Op::conv && !c.gradient; }},
    {"  its gradient", [](C c) { return c.op == Op::conv && c.gradient; }},
    {"state move", [](C c) { return c.op == Op::move; }},
    {"  to the other layout", [](C c) { return c.transpose; }},
    {"  to another dtype",
     [](C c) { return c.op == Op::move && c.write_pool && c.sdtype != c.odtype; }},
    {"  of several layers", [](C c) { return c.op == Op::move && c.layers > 1; }},
    {"  of some heads", [](C c) { return c.read_head > 0 || c.write_head > 0; }},
    {"record of drafts", [](C c) { return c.record; }},
    {"  of trees", [](C c) { return c.record && c.tree; }},
    {"commit of drafts", [](C c) { return c.op == Op::commit; }},
    {"  of all layers", [](C c) { return c.op == Op::commit && c.layers > 1; }},
    {"  of paths in trees", [](C c) { return c.op == Op::commit && c.tree; }},
    {"step", [](C c) { return c.op == Op::step; }},
    {"  without a norm", [](C c) { return c.op == Op::step && !c.has_norm(); }},
    {"  of several tokens", [](C c) { return c.op == Op::step && c.longest() > 1; }},
    {"no gate", [](C c) { return has_value(c, "gate", "none"); }},
    {"gate per head", [](C c) { return has_value(c, "gate", "head"); }},
    {"gate per channel", [](C c) { return has_value(c, "gate", "channel"); }},
    {"gate forms", [](C c) { return value_of(c, "form").value_or("log_decay") != "log_decay"; }},
    {"fp32", [](C c) { return has_value(c, "dtype", "f32"); }},
    {"bf16", [](C c) { return has_value(c, "dtype", "bf16"); }},
    {"fp16", [](C c) { return has_value(c, "dtype", "f16"); }},
    {"packed sequences", [](C c) { return c.packed; }},
    {"padding", [](C c) { return c.packed && c.pad > 0; }},
    {"grouped values", [](C c) { return (c.is_sequence() || c.op == Op::step) && c.HV != c.H; }},
    {"L2 norm inside", [](C c) { return has_value(c, "l2norm", "1"); }},
    {"V-first states", [](C c) { return has_value(c, "state", "vk"); }},
    {"16-bit states", [](C c) { return value_of(c, "sdtype").value_or("f32") != "f32"; }},
    {"pools", [](C c) { return c.pool != Pool::none; }},
    {"  null slots", [](C c) { return c.null_slot >= 0; }},
    {"  a second one to write", [](C c) { return c.write_pool; }},
    {"  read by accepted tokens", [](C c) { return c.pool == Pool::drafts; }},
    {"  trees of tokens", [](C c) { return c.tree; }},
    {"has_initial_state", [](C c) { return c.has_init; }},
    {"stochastic rounding", [](C c) { return c.stochastic; }},
    {"checkpoints", [](C c) { return !c.ckpt.empty(); }},
    {"strides", [](C c) { return c.strided != Layout::packed; }},
    {"chunks of 16 and 32", [](C c) { return c.chunk != 64; }},
    {"in segments", [](C c) { return c.split == Split::by_length || c.split == Split::segments; }},
    {"vector beta, gv", [](C c) { return c.betavec || c.gv; }},
    {"standard inputs", [](C c) { return is_standard(c); }},
    {"adversarial inputs", [](C c) { return !is_standard(c); }},
};

}  // namespace

std::span<const Feature> features() { return kFeatures; }

}  // namespace deltic::cases
