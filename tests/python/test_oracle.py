"""Outputs and gradients against the fp64 oracle, on inputs drawn at random."""

import deltic
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support import BUDGET, Case, check_against_oracle, error, make, run

DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
QUICK = settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@st.composite
def cases(draw):
    gate = draw(st.sampled_from(["none", "head", "channel"]))
    form = (
        "log_decay"
        if gate == "none"
        else draw(st.sampled_from(["log_decay", "softplus", "bounded"]))
    )
    H = draw(st.integers(1, 2))
    lengths = draw(st.none() | st.lists(st.integers(0, 150), min_size=1, max_size=4))
    options = {}
    if draw(st.booleans()):
        options["qk_l2norm"] = True
    if draw(st.booleans()):
        options["beta_form"] = draw(st.sampled_from(["sigmoid", "2sigmoid"]))
    if draw(st.booleans()):
        options["state_layout"] = "vk"
    if draw(st.booleans()):
        options["chunk_size"] = draw(st.sampled_from([16, 32]))
    if draw(st.booleans()):
        options["recompute"] = False
    if draw(st.booleans()):
        options["scale"] = draw(st.floats(0.1, 2.0))
    dtype = draw(DTYPES)
    # Normalised keys of one or two channels repeat each other: no standard inputs, where 16-bit
    # operands are promised little.
    narrow = [1, 2] if dtype == torch.float32 else []
    return make(
        B=draw(st.integers(1, 2)),
        T=draw(st.integers(1, 200)),
        H=H,
        HV=H * draw(st.integers(1, 3)),
        K=draw(st.sampled_from([*narrow, 8, 32, 40, 64])),
        V=draw(st.sampled_from([8, 20, 64])),
        gate=gate,
        form=form,
        dtype=dtype,
        lengths=lengths,
        seed=draw(st.integers(0, 1000)),
        state=draw(st.booleans()),
        **options,
    )


@QUICK
@given(cases())
def test_delta_rule(case):
    check_against_oracle(case)


@pytest.mark.parametrize("function", [deltic.delta_rule, deltic.recurrent])
@pytest.mark.parametrize("size", [0.1, 1.0, 10.0])
def test_norm_of_one_channel(function, size):
    """What is left of such a gradient is 1e-6 / x^2 of its parts, and counts to its last digits."""
    case = make(K=1, T=70, gate="channel", qk_l2norm=True)
    for name in ("q", "k"):
        case.tensors[name] = case.tensors[name] * size
    case.function = function
    ours, reference = run(case), run(case, oracle=True)
    for name in ("d_q", "d_k"):
        scale = reference[name].square().mean().sqrt()
        assert 0 < scale < 1e-2 and error(ours[name] / scale, reference[name] / scale) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value_beta", [False, True])
@pytest.mark.parametrize("value_gate", [False, True])
def test_recurrent(dtype, value_beta, value_gate):
    case = make(T=9, gate="channel", dtype=dtype)
    shape = case.tensors["v"].shape
    if value_beta:
        case.tensors["beta"] = torch.rand(shape)
    if value_gate:
        case.tensors["gv"] = -torch.rand(shape)
    check_against_oracle(Case(case.tensors, case.options, deltic.recurrent))


def test_delta_rule_takes_beta_per_column():
    case = make(T=9)
    case.tensors["beta"] = torch.rand(case.tensors["v"].shape)
    check_against_oracle(case)


BLOCKS = {
    "cumsum": lambda x, o: deltic.chunk_cumsum(x["g"], chunk_size=32, scale=0.5, **o),
    "reverse": lambda x, o: deltic.chunk_cumsum(x["g"], reverse=True, **o),
    "softplus_cumsum": lambda x, o: deltic.chunk_cumsum(
        x["g"], gate="softplus", A_log=x["A_log"], dt_bias=x["dt_bias"], **o
    ),
    "gate": lambda x, o: deltic.log_decay(
        x["g"], gate="bounded", lower_bound=-5.0, A_log=x["A_log"], dt_bias=x["dt_bias"], **o
    ),
    "l2norm": lambda x, o: deltic.l2norm(x["q"], **o)[0],
    "kkt": lambda x, o: deltic.kkt(x["k"], g=x["G"], beta=x["beta"], **o),
    "kkt_plain": lambda x, o: deltic.kkt(x["k"], chunk_size=16, **o),
    "scores": lambda x, o: deltic.scores(x["q"], x["k"], g=x["G"], chunk_size=32, **o),
    "inverse": lambda x, o: deltic.inverse(x["a"], **o),
    "scores_inverse": lambda x, o: torch.cat(
        deltic.scores_inverse(x["q"], x["k"], g=x["G"], beta=x["beta"], scale=0.3, **o), dim=-1
    ),
    "wy": lambda x, o: torch.cat(
        deltic.wy(
            x["k"], x["a"], v=x["v"], g=x["G"], beta=x["beta"], q=x["q"], output_kg=True, **o
        ),
        dim=-1,
    ),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name, gate, packed):
    lengths = [50, 0, 33] if packed else None
    x = dict(make(T=70, gate=gate, form="softplus", lengths=lengths).tensors)
    options = {"cu_seqlens": x["cu_seqlens"]} if packed else {}
    width = 32 if name == "scores" else 64
    x["G"] = deltic.chunk_cumsum(-torch.rand(x["g"].shape), chunk_size=width, **options)
    x["a"] = 0.1 * torch.randn(*x["v"].shape[:3], 64).tril(-1)

    def gradients(oracle):
        leaves = {
            n: (t.detach().double() if oracle else t.detach().clone()).requires_grad_()
            for n, t in x.items()
            if t.is_floating_point()
        }
        out = BLOCKS[name](leaves, options | ({"impl": "reference"} if oracle else {}))
        weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(3))
        out.backward(weights.to(out.dtype))
        return {"out": out, **{n: t.grad for n, t in leaves.items() if t.grad is not None}}

    ours, reference = gradients(False), gradients(True)
    assert ours.keys() == reference.keys() and len(ours) > 1
    for key, tensor in ours.items():
        assert error(tensor, reference[key]) <= 2 * BUDGET[torch.float32]["g"], key


def test_blocks_make_the_operator():
    """o of one chunk from the building blocks, as the operator gives it."""
    case = make(T=50, HV=1, gate="channel", state=False)
    q, k, v, beta, g = (case.tensors[n] for n in ("q", "k", "v", "beta", "g"))
    G = deltic.chunk_cumsum(g)
    a = deltic.inverse(deltic.kkt(k, g=G, beta=beta))
    _, u, _, _ = deltic.wy(k, a, v=v, g=G, beta=beta)
    attention, same = deltic.scores_inverse(q, k, g=G, beta=beta)
    assert torch.equal(attention, deltic.scores(q, k, g=G)) and torch.equal(same, a)
    attention = attention[:, :, :, :50]
    o = torch.einsum("bihj,bjhv->bihv", attention, u)
    assert error(o, deltic.delta_rule(q, k, v, beta=beta, g=g)[0]) < 1e-5


def test_block_dtypes():
    g = -torch.rand(1, 5, 2, dtype=torch.bfloat16)
    assert deltic.chunk_cumsum(g).dtype == torch.float32
    assert deltic.chunk_cumsum(g, dtype=torch.bfloat16).dtype == torch.bfloat16
    with pytest.raises(TypeError, match="cumsum: dtype: expected fp32, bf16 or fp16, got int8"):
        deltic.chunk_cumsum(g, dtype=torch.int8)
