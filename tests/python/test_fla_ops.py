"""deltic.fla: operators against the oracle in fp64, their options, errors, the decode pool."""

import inspect
from typing import Any

import deltic
import pytest
import torch
from deltic.fla.ops import (
    chunk_delta_rule,
    chunk_gated_delta_rule,
    chunk_gdn,
    chunk_kda,
    fused_chunk_delta_rule,
    fused_recurrent_delta_rule,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_gdn,
    fused_recurrent_kda,
)
from deltic.fla.ops.gated_delta_rule import (
    naive_chunk_gated_delta_rule,
    naive_recurrent_gated_delta_rule,
)
from deltic.fla.ops.kda.fused_recurrent import fused_recurrent_kda_fwd
from deltic.fla.ops.kda.naive import naive_chunk_kda, naive_recurrent_kda
from hypothesis import given, settings
from hypothesis import strategies as st
from support import BUDGET, error, make

OPS = {
    "none": (chunk_delta_rule, fused_recurrent_delta_rule),
    "head": (chunk_gated_delta_rule, fused_recurrent_gated_delta_rule),
    "channel": (chunk_kda, fused_recurrent_kda),
}
KINDS = {"beta": "beta", "g": "g", "gk": "g", "gv": "g", "A_log": "params", "dt_bias": "params"}


def compare(function: Any, oracle: Any, tensors: dict, options: dict, words: dict) -> None:
    """Outputs and gradients of one of their functions, and of the oracle under our words."""
    found = []
    for call, said, wide in ((function, options, False), (oracle, words, True)):
        leaves = {}
        for name, x in tensors.items():
            x = x.detach().clone()
            if x.is_floating_point():
                x = (x.double() if wide else x).requires_grad_()
            leaves[name] = x
        first = [leaves[n] for n in ("q", "k", "v")]
        rest = {n: x for n, x in leaves.items() if n not in ("q", "k", "v")}
        o, state = call(*first, **rest, **said, output_final_state=True)
        generator = torch.Generator().manual_seed(7)
        d_o = torch.randn(o.shape, generator=generator).to(tensors["q"].dtype)
        d_state = torch.randn(state.shape, generator=generator)
        torch.autograd.backward((o, state), (d_o.to(o.dtype), d_state.to(state.dtype)))
        grads = {n: x.grad for n, x in leaves.items() if x.is_floating_point()}
        found.append({"o": o, "state": state, **grads})
    ours, reference = found
    assert ours["o"].dtype == tensors["q"].dtype and ours["state"].dtype == torch.float32
    budget = BUDGET[tensors["q"].dtype]
    for name, x in ours.items():
        kind = "o" if name in ("o", "state") else KINDS.get(name, "rows")
        floor = sum_floor(reference) if kind == "params" else 0.0
        assert error(x, reference[name], floor) <= budget[kind], name


def sum_floor(gradients):
    """A tenth of the terms that a parameter's gradient sums: one head's may cancel to any less."""
    return 0.1 * gradients["g"].abs().sum((0, 1)).mean().item()


def oracle(q, k, v, **arguments):
    return deltic.delta_rule(q, k, v, impl="reference", **arguments)


@pytest.mark.parametrize("gate", OPS)
@pytest.mark.parametrize("form", [0, 1], ids=["chunk", "recurrent"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("packed", [False, True])
def test_against_the_oracle(gate, form, dtype, packed):
    lengths = [40, 0, 65] if packed else None
    case = make(gate=gate, dtype=dtype, lengths=lengths)
    norm = {"use_qk_l2norm_in_kernel": True}
    compare(OPS[gate][form], oracle, case.tensors, norm, {"qk_l2norm": True})


@pytest.mark.parametrize("gate", OPS)
@pytest.mark.parametrize("size", [16, 32])
def test_chunk_size(gate, size):
    case = make(gate=gate, HV=1, T=40)
    compare(OPS[gate][0], oracle, case.tensors, {"chunk_size": size}, {"chunk_size": size})


@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("form", [0, 1], ids=["chunk", "recurrent"])
@pytest.mark.parametrize("negative", [False, True])
def test_gate_beta_and_layout_inside(gate, form, negative):
    case = make(gate=gate, form="softplus", state_layout="vk")
    case.tensors["beta"] = torch.randn_like(case.tensors["beta"])
    case.tensors["A_log"] = case.tensors["A_log"].view(1, 1, -1, 1)
    options = dict(
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=negative,
        state_v_first=True,
        scale=0.3,
    )
    beta = "2sigmoid" if negative else "sigmoid"
    words = dict(gate="softplus", beta_form=beta, state_layout="vk", scale=0.3)
    compare(OPS[gate][form], oracle, case.tensors, options, words)


@pytest.mark.parametrize("form", [0, 1], ids=["chunk", "recurrent"])
@pytest.mark.parametrize("factor", [True, False])
def test_bounded_gate(form, factor):
    case = make(gate="channel", form="bounded")
    if not factor:
        del case.tensors["A_log"]
    options = {"use_gate_in_kernel": True, "lower_bound": -5.0}
    if form == 0:
        options |= {"safe_gate": True, "disable_recompute": True}
    words = {"gate": "bounded", "lower_bound": -5.0}
    compare(OPS["channel"][form], oracle, case.tensors, options, words)


@pytest.mark.parametrize("gate", OPS)
def test_wide_keys_and_values(gate):
    case = make(gate=gate, K=256, V=40, T=20, B=1)
    for function in OPS[gate]:
        compare(function, oracle, case.tensors, {}, {})


@pytest.mark.parametrize("raw", [False, True])
@pytest.mark.parametrize("with_g", [False, True])
def test_gk_gv_and_vector_beta(raw, with_g):
    if raw and not with_g:
        return
    case = make(T=20, gate="head" if with_g else "none", form="softplus" if raw else "log_decay")
    x = case.tensors
    x["gk"], x["gv"] = -torch.rand(2, 20, 2, 32), -torch.rand(2, 20, 2, 16)
    x["beta"] = torch.rand(2, 20, 2, 16)

    def reference(q, k, v, *, gk, g=None, A_log=None, dt_bias=None, **arguments):
        if raw:
            g = -A_log.exp() * torch.nn.functional.softplus(g + dt_bias)
        gk = gk if g is None else gk + g.unsqueeze(-1)
        return deltic.recurrent(q, k, v, g=gk, impl="reference", **arguments)

    options = {"use_gate_in_kernel": True} if raw else {}
    compare(fused_recurrent_gdn, reference, x, options, {})
    del x["gk"], x["gv"]
    if not with_g:
        compare(fused_recurrent_delta_rule, oracle, x, {}, {})


@settings(max_examples=40, deadline=None, derandomize=True)
@given(data=st.data())
def test_any_combination(data):
    draw = data.draw
    gate, form = draw(st.sampled_from(list(OPS))), draw(st.integers(0, 1))
    lengths = draw(st.none() | st.lists(st.integers(0, 70), min_size=1, max_size=4))
    H, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    sizes = dict(H=H, HV=H * group, K=draw(st.integers(1, 40)), V=draw(st.integers(1, 40)))
    raw = gate != "none" and draw(st.booleans())
    bound = raw and gate == "channel" and draw(st.booleans())
    name = "bounded" if bound else "softplus" if raw else "log_decay"
    options, words = {"scale": 0.5}, {"scale": 0.5}
    if draw(st.booleans()):
        options["use_qk_l2norm_in_kernel"] = words["qk_l2norm"] = True
    if raw:
        options["use_gate_in_kernel"], words["gate"] = True, name
    if bound:
        options["lower_bound"] = words["lower_bound"] = -5.0
    if gate != "none" and draw(st.booleans()):
        options["use_beta_sigmoid_in_kernel"], words["beta_form"] = True, "sigmoid"
    if gate != "none" and draw(st.booleans()):
        options["state_v_first"], words["state_layout"] = True, "vk"
    if form == 0:
        options["chunk_size"] = words["chunk_size"] = draw(st.sampled_from([16, 32, 64]))
    T = draw(st.integers(0, 80))
    layout = {"state_layout": words.get("state_layout", "kv")}
    case = make(B=2, T=T, gate=gate, form=name, lengths=lengths, **sizes, **layout)
    compare(OPS[gate][form], oracle, case.tensors, options, words)


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_against_the_references(gate):
    x = make(gate=gate, T=70).tensors
    q, k, v, g, beta = (x[n] for n in ("q", "k", "v", "g", "beta"))
    said = dict(initial_state=x["initial_state"], output_final_state=True)
    o, state = OPS[gate][0](q, k, v, g, beta, **said)
    if gate == "head":
        others = [
            naive_recurrent_gated_delta_rule(q, k, v, beta, g, **said),
            naive_chunk_gated_delta_rule(q, k, v, g, beta, **said),
        ]
    else:
        others = [f(q, k, v, g, beta, **said) for f in (naive_recurrent_kda, naive_chunk_kda)]
    for other in others:
        assert error(o, other[0]) <= 1e-4 and error(state, other[1]) <= 1e-4


def test_beta_may_be_absent():
    x = make(gate="head", T=9, state=False).tensors
    q, k, v, g = (x[n] for n in ("q", "k", "v", "g"))
    one = torch.ones(2, 9, 2)
    for function, arguments in (
        (fused_recurrent_gdn, {"g": g}),
        (fused_recurrent_delta_rule, {}),
    ):
        o, none = function(q, k, v, **arguments)
        assert none is None and torch.equal(o, function(q, k, v, beta=one, **arguments)[0])


def test_dtypes_strides_and_autocast():
    x = make(gate="head", T=9).tensors
    q, k, v, g, beta = (x[n] for n in ("q", "k", "v", "g", "beta"))
    state = x["initial_state"].half()
    said = dict(g=g, beta=beta, initial_state=state, output_final_state=True)
    o, final = fused_recurrent_gdn(q, k, v.half(), **said)
    assert o.dtype == torch.float16 and final.dtype == torch.float32
    o, final = chunk_gdn(q.bfloat16(), k.bfloat16(), v.bfloat16(), **said)
    assert o.dtype == torch.bfloat16 and final.dtype == torch.float32
    strided = [torch.stack([y, y], -1).flatten(-2)[..., ::2] for y in (q, k, v, g, beta)]
    assert strided[0].stride(-1) == 2
    expected = chunk_gdn(q, k, v, g, beta)[0]
    assert torch.equal(chunk_gdn(*strided)[0], expected)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(chunk_gdn(q, k, v, g, beta)[0], expected)


@pytest.mark.parametrize("gate", OPS)
@pytest.mark.parametrize("form", [0, 1], ids=["chunk", "recurrent"])
def test_compiles_into_one_graph(gate, form):
    x = make(gate=gate, T=20).tensors
    x["v"].requires_grad_()
    compiled = torch.compile(OPS[gate][form], fullgraph=True, backend="aot_eager")
    found = compiled(**x, output_final_state=True)
    for y, expected in zip(found, OPS[gate][form](**x, output_final_state=True), strict=True):
        assert torch.equal(y, expected)


def test_lengths_on_the_host_and_chunk_indices():
    x = make(gate="head", lengths=[20, 13], state=False).tensors
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    cu = x["cu_seqlens"].int()
    expected = chunk_gdn(*rows, cu_seqlens=cu)[0]
    indices = deltic.fla.ops.utils.prepare_chunk_indices(cu, 64)
    found = chunk_gdn(*rows, cu_seqlens=cu, cu_seqlens_cpu=cu.clone(), chunk_indices=indices)[0]
    assert torch.equal(found, expected)


# ---- What chunk_kda alone has -------------------------------------------------------------------


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_intermediate_states(packed, v_first, dtype):
    lengths = [40, 0, 33] if packed else None
    x = make(gate="channel", lengths=lengths, dtype=dtype, T=70).tensors
    q, k, v, g, beta = (x[n] for n in ("q", "k", "v", "g", "beta"))
    cu = x.get("cu_seqlens")
    state = x["initial_state"].mT.contiguous() if v_first else x["initial_state"]
    with torch.inference_mode():
        o, none, h = chunk_kda(
            q,
            k,
            v,
            g,
            beta,
            initial_state=state,
            cu_seqlens=cu,
            state_v_first=v_first,
            chunk_size=32,
            return_intermediate_states=True,
        )
    assert none is None and h.dtype == dtype
    assert h.shape == ((1, 4) if packed else (2, 3)) + (2, *((16, 32) if v_first else (32, 16)))
    bounds = [(0, 0, 40), (0, 40, 73)] if packed else [(0, 0, 70), (1, 0, 70)]
    places = [(b, t, begin) for b, begin, end in bounds for t in range(begin, end, 32)]
    states = [0, 2] if packed else [0, 1]
    starts = [
        n for n, (_, begin, end) in zip(states, bounds, strict=True) for _ in range(begin, end, 32)
    ]
    for found, (b, t, begin), n in zip(h.flatten(0, 1), places, starts, strict=True):
        part = [y[b : b + 1, begin:t] for y in (q, k, v, g, beta)]
        expected = x["initial_state"][n : n + 1]
        if t > begin:
            expected = chunk_kda(*part, initial_state=expected, output_final_state=True)[1]
        found = found.mT if v_first else found
        assert error(found, expected[0]) <= (1e-4 if dtype == torch.float32 else 1e-2)


def test_graph_lengths():
    x = make(gate="channel", lengths=[40, 33], state=False).tensors
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    cu = torch.tensor([0, 40, 73, 73, 73])
    o, _ = chunk_kda(*rows, cu_seqlens=cu, use_graph=True, max_num_seqs=4)
    assert torch.equal(o, chunk_kda(*rows, cu_seqlens=x["cu_seqlens"])[0])
    assert torch.equal(o, chunk_kda(*rows, cu_seqlens=cu, use_graph=True)[0])
    h = chunk_kda(*rows, cu_seqlens=cu, use_graph=True, return_intermediate_states=True)[2]
    assert h.shape[1] == 2 + 4 - 1
    with pytest.raises(AssertionError, match="max_num_seqs"):
        chunk_kda(*rows, cu_seqlens=cu, use_graph=True, max_num_seqs=5)


# ---- The pool -----------------------------------------------------------------------------------


def steps(x, slots, pool, **options):
    return fused_recurrent_kda_fwd(
        x["q"], x["k"], x["v"], x["g"], x["beta"], initial_state=pool,
        ssm_state_indices=slots, **options
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("v_first", [False, True])
def test_pool_of_states(dtype, v_first):
    x = make(B=3, T=1, gate="channel", state=False).tensors
    pool = torch.randn(8, 2, 32, 16).to(dtype)
    if v_first:
        pool = pool.mT.contiguous()
    before = pool.clone()
    slots = torch.tensor([5, -1, 2], dtype=torch.int32)
    out = torch.full_like(x["v"], 9.0)
    o, same = steps(x, slots, pool, out=out, state_v_first=v_first)
    assert o is out and same is pool
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    expected, states = fused_recurrent_kda(
        *rows, initial_state=before[[5, 0, 2]], output_final_state=True, state_v_first=v_first
    )
    assert error(o[[0, 2]], expected[[0, 2]]) <= 1e-5 and not o[1].any()
    assert torch.equal(pool[[5, 2]], states[[0, 2]].to(dtype))
    untouched = [0, 1, 3, 4, 6, 7]
    assert torch.equal(pool[untouched], before[untouched])


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_drafted_tokens(packed, dtype):
    lengths = [3, 0, 2] if packed else None
    x = make(B=2, T=3, gate="channel", lengths=lengths, state=False).tensors
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    cu = x.get("cu_seqlens")
    slots = torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]])[: 3 if packed else 2]
    accepted = torch.tensor([2, 1, 3])[: 3 if packed else 2]
    pool = torch.randn(10, 2, 32, 16).to(dtype)
    before = pool.clone()
    starts = before[slots.gather(1, accepted[:, None] - 1)[:, 0]].float()
    said = dict(num_accepted_tokens=accepted, cu_seqlens=cu)
    o, _ = steps(x, slots, pool, **said)
    aside, kept = steps(
        x, slots, before, inplace_final_state=False, output_final_state=True, **said
    )
    assert torch.equal(o, aside) and kept.dtype == torch.float32
    bounds = [(0, 3, 0), (3, 5, 2)] if packed else [(0, 3, 0), (0, 3, 1)]
    for b, (begin, end, n) in enumerate(bounds):
        for t in range(begin, end):
            part = [y[0 if packed else b][None, begin : t + 1] for y in rows]
            step, state = fused_recurrent_kda(
                *part, initial_state=starts[n : n + 1], output_final_state=True
            )
            assert error(o[0 if packed else b, t], step[0, -1]) <= 1e-5
            slot = slots[n, t - begin]
            assert error(pool[slot], state[0]) <= (1e-5 if dtype == torch.float32 else 1e-3)
            row = t if packed else b * 3 + t
            assert error(kept[row], state[0]) <= 1e-5
    written = {int(slots[n, t]) for begin, end, n in bounds for t in range(end - begin)}
    others = [slot for slot in range(10) if slot not in written]
    assert torch.equal(pool[others], before[others])


def test_lists_may_be_wider_than_the_tokens():
    x = make(lengths=[1, 1], gate="channel", state=False).tensors
    pool, slots = torch.randn(9, 2, 32, 16), torch.arange(8).view(2, 4)
    before = pool.clone()
    steps(x, slots, pool, cu_seqlens=x["cu_seqlens"])
    assert [n for n in range(9) if not torch.equal(pool[n], before[n])] == [0, 4]
    for accepted in ([0, 1], [1, 5]):
        with pytest.raises(ValueError, match="num_accepted_tokens"):
            steps(
                x,
                slots,
                pool,
                cu_seqlens=x["cu_seqlens"],
                num_accepted_tokens=torch.tensor(accepted),
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_slot_named_again_holds_the_last_state(dtype):
    x = make(B=2, T=3, gate="channel", state=False).tensors
    pools = [torch.ones(9, 2, 32, 16, dtype=dtype) for _ in range(2)]
    steps(x, torch.tensor([[5, 5, 5], [2, 3, 2]]), pools[0])
    steps(x, torch.tensor([5, 2]), pools[1])
    assert torch.equal(pools[0][[5, 2]], pools[1][[5, 2]])
    assert not torch.equal(pools[0][3], pools[1][3])


def test_states_without_a_list():
    x = make(B=2, T=4, gate="channel").tensors
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    o, states = fused_recurrent_kda(
        *rows, initial_state=x["initial_state"], output_final_state=True
    )
    for in_place in (False, True):
        pool = x["initial_state"].clone()
        found, final = fused_recurrent_kda_fwd(
            *rows, initial_state=pool, output_final_state=True, inplace_final_state=in_place
        )
        assert torch.equal(found, o) and torch.equal(final, states) and (final is pool) == in_place
    found, none = fused_recurrent_kda_fwd(*rows, inplace_final_state=False)
    assert none is None and torch.equal(found, fused_recurrent_kda(*rows)[0])
    with pytest.raises(AssertionError, match="initial_state"):
        fused_recurrent_kda_fwd(*rows)
    with pytest.raises(AssertionError, match="out"):
        fused_recurrent_kda_fwd(*rows, initial_state=pool, out=rows[2][:1])


# ---- Signatures and errors ----------------------------------------------------------------------

FLAGS = "use_beta_sigmoid_in_kernel allow_neg_eigval"
STATE = "scale initial_state output_final_state use_qk_l2norm_in_kernel"
SIGNATURES = {
    chunk_delta_rule: f"q k v beta {STATE} cu_seqlens cu_seqlens_cpu kwargs",
    fused_recurrent_delta_rule: f"q k v beta {STATE} cu_seqlens",
    chunk_gated_delta_rule: f"q k v g beta {STATE} {FLAGS} state_v_first cu_seqlens "
    "cu_seqlens_cpu chunk_indices cp_context kwargs",
    fused_recurrent_gated_delta_rule: f"q k v g gk gv beta {STATE} use_gate_in_kernel A_log "
    f"dt_bias {FLAGS} state_v_first cu_seqlens kwargs",
    chunk_kda: f"q k v g beta {STATE} use_gate_in_kernel {FLAGS} safe_gate lower_bound "
    "disable_recompute return_intermediate_states state_v_first cu_seqlens cu_seqlens_cpu "
    "cp_context use_graph max_num_seqs kwargs",
    fused_recurrent_kda: f"q k v g beta A_log dt_bias {STATE} use_gate_in_kernel {FLAGS} "
    "lower_bound state_v_first cu_seqlens kwargs",
}


@pytest.mark.parametrize("function", SIGNATURES, ids=lambda f: f.__name__)
def test_signatures(function):
    assert list(inspect.signature(function).parameters) == SIGNATURES[function].split()
    assert chunk_gdn is chunk_gated_delta_rule
    assert fused_recurrent_gdn is fused_recurrent_gated_delta_rule


def call_of(function, gate, **changes):
    x = make(gate=gate, T=5, state=False).tensors
    x.pop("cu_seqlens", None)
    return lambda: function(**{**x, **changes})


@pytest.mark.parametrize("gate", OPS)
@pytest.mark.parametrize("form", [0, 1], ids=["chunk", "recurrent"])
def test_shared_errors(gate, form):
    function = OPS[gate][form]
    cu = torch.tensor([0, 2, 5])
    cases = [
        (TypeError, "unknown", {"unknown": 1}),
        (ValueError, "batch size", {"cu_seqlens": cu}),
        (TypeError, "head_first", {"head_first": True})
        if form or gate == "channel"
        else (DeprecationWarning, "head_first", {"head_first": False}),
    ]
    if gate != "none":
        both = {"state_v_first": True, "transpose_state_layout": True}
        cases += [
            (ValueError, "transpose_state_layout", both),
            (ValueError, "use_beta_sigmoid_in_kernel", {"allow_neg_eigval": True}),
        ]
    if form == 0:
        cases.append((ValueError, "chunk_size", {"chunk_size": 128}))
        wide = torch.zeros(2, 5, 1, 257)
        more = {"g": torch.zeros(2, 5, 2, 257)} if gate == "channel" else {}
        cases.append((AssertionError, "key width", {"q": wide, "k": wide, **more}))
        if gate != "none":
            cases.append((NotImplementedError, "cp_context", {"cp_context": object()}))
    for kind, text, changes in cases:
        with pytest.raises(kind, match=text):
            call_of(function, gate, **changes)()
    x = make(gate=gate, lengths=[2, 3]).tensors
    x["initial_state"] = x["initial_state"][:1]
    with pytest.raises(ValueError, match="initial_state must have a state for each of"):
        function(**x)


@pytest.mark.parametrize(
    ("function", "gate", "kind", "text", "changes"),
    [
        (chunk_delta_rule, "none", AssertionError, "dtype", {"q": torch.zeros(2, 5, 1, 32).half()}),
        (chunk_delta_rule, "none", AssertionError, "beta", {"beta": torch.zeros(2, 5)}),
        (fused_recurrent_delta_rule, "none", AssertionError, "scale", {"scale": -1.0}),
        (chunk_gdn, "head", ValueError, "heads", {"q": torch.zeros(2, 5, 2, 32)}),
        (chunk_gdn, "head", ValueError, "value heads", {"v": torch.zeros(2, 5, 3, 32),
         "q": torch.zeros(2, 5, 2, 32), "k": torch.zeros(2, 5, 2, 32)}),
        (chunk_gdn, "head", AssertionError, "A_log", {"use_gate_in_kernel": True}),
        (fused_recurrent_gdn, "head", ValueError, "A_log", {"use_gate_in_kernel": True}),
        (fused_recurrent_gdn, "head", ValueError, "`g`", {"use_gate_in_kernel": True, "g": None,
         "A_log": torch.zeros(2)}),
        (chunk_kda, "channel", AssertionError, "float32",
         {"initial_state": torch.zeros(2, 2, 32, 16).bfloat16()}),
        (chunk_kda, "channel", ValueError, "A_log", {"use_gate_in_kernel": True}),
        (chunk_kda, "channel", ValueError, "lower_bound", {"use_gate_in_kernel": True,
         "safe_gate": True, "A_log": torch.zeros(2)}),
        (chunk_kda, "channel", ValueError, "safe range", {"use_gate_in_kernel": True,
         "safe_gate": True, "lower_bound": -6.0}),
        (chunk_kda, "channel", AssertionError, "same shape", {"q": torch.zeros(2, 5, 2, 32)}),
        (chunk_kda, "channel", AssertionError, "value heads", {"q": torch.zeros(2, 5, 3, 32),
         "k": torch.zeros(2, 5, 3, 32)}),
        (chunk_kda, "channel", AssertionError, "g must", {"g": torch.zeros(2, 5, 2)}),
        (chunk_kda, "channel", AssertionError, "beta must", {"beta": torch.zeros(2, 5, 1)}),
        (chunk_kda, "channel", AssertionError, "return_intermediate_states",
         {"return_intermediate_states": True, "v": torch.zeros(2, 5, 2, 16, requires_grad=True)}),
    ],
)  # fmt: skip
def test_errors(function, gate, kind, text, changes):
    with pytest.raises(kind, match=text):
        call_of(function, gate, **changes)()


def test_older_name_of_the_layout():
    x = make(gate="channel", T=5, state=False).tensors
    with pytest.warns(DeprecationWarning, match="state_v_first"):
        _, state = chunk_kda(**x, output_final_state=True, transpose_state_layout=True)
    assert state.shape == (2, 2, 16, 32)
    with pytest.raises(NotImplementedError, match="chunk_delta_rule"):
        fused_chunk_delta_rule()
