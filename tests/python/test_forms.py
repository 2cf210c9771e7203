"""The recurrent form of delta_rule: bits of decode, gradients of the chunked form."""

import deltic
import pytest
import torch
from support import make
from torch.library import opcheck

OPS = torch.ops.deltic
H, HV, K, V = 2, 4, 32, 16
KIND = {"qk_l2norm": True, "beta_form": "sigmoid"}


def inputs(batch, tokens, dtype=torch.float32, *, gate="head", grad=False):
    torch.manual_seed(3)
    widths = {"q": (H, K), "k": (H, K), "v": (HV, V), "beta": (HV,)}
    rows = {name: torch.randn(batch, tokens, *w).to(dtype) for name, w in widths.items()}
    shape = (batch, tokens, HV) if gate == "head" else (batch, tokens, HV, K)
    rows["g"] = -torch.rand(shape)
    return {name: x.requires_grad_(grad) for name, x in rows.items()}


def part(rows, n, first, end):
    return {name: x[n : n + 1, first:end] for name, x in rows.items()}


@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("state_dtype", [None, torch.float32, torch.bfloat16])
def test_two_forms_are_two_calls(gate, dtype, state_dtype):
    rows = inputs(3, 100, dtype, gate=gate)
    state = None if state_dtype is None else torch.randn(3, HV, K, V).to(state_dtype)
    from_ = [64, 0, 37]
    o, last = deltic.delta_rule(
        **rows,
        **KIND,
        initial_state=state,
        output_final_state=True,
        recurrent_from=torch.tensor(from_),
    )
    for n, first in enumerate(from_):
        start = None if state is None else state[n : n + 1]
        before, left = deltic.delta_rule(
            **part(rows, n, 0, first), **KIND, initial_state=start, output_final_state=True
        )
        pool = left.clone()
        after = deltic.decode(**part(rows, n, first, 100), **KIND, state_pool=pool)
        assert torch.equal(o[n], torch.cat([before, after], 1)[0])
        assert torch.equal(last[n], pool[0])


def test_packed_pools_and_lists():
    rows = inputs(1, 130)
    cu, slots = torch.tensor([0, 100, 130]), torch.tensor([3, 0])
    pools = [torch.randn(5, HV, K, V).bfloat16()]
    pools.append(pools[0].clone())
    out = torch.empty(1, 130, HV, V)
    lists = {"read_index": slots, "null_slot": -1}
    o, _ = deltic.delta_rule(
        **rows,
        **lists,
        cu_seqlens=cu,
        state_pool=pools[0],
        recurrent_from=torch.tensor([70, 30], dtype=torch.int32),
        out=out,
    )
    assert o is out
    for n, (begin, first, end) in enumerate(((0, 70, 100), (100, 130, 130))):
        given = {"state_pool": pools[1], "read_index": slots[n : n + 1]}
        before, _ = deltic.delta_rule(**part(rows, 0, begin, first), **given)
        after = deltic.decode(**part(rows, 0, first, end), **given)
        assert torch.equal(o[:, begin:end], torch.cat([before, after], 1))
    assert torch.equal(*pools)


def test_all_tokens_are_decode():
    rows = inputs(2, 20, torch.bfloat16)
    o, state = deltic.delta_rule(**rows, **KIND, form="recurrent", output_final_state=True)
    pool = torch.zeros(2, HV, K, V)
    assert torch.equal(o, deltic.decode(**rows, **KIND, state_pool=pool))
    assert torch.equal(state, pool)


@pytest.mark.parametrize("recompute", [True, False])
def test_gradients_come_chunk_by_chunk(recompute):
    found = []
    d_o, d_state = torch.randn(2, 100, HV, V), torch.randn(2, HV, K, V)
    forms = ({}, {"form": "recurrent"}, {"recurrent_from": torch.tensor([64, 30])})
    for form in forms:
        rows = inputs(2, 100, gate="channel", grad=True)
        state = torch.ones(2, HV, K, V, requires_grad=True)
        given = {"initial_state": state, "output_final_state": True, "recompute": recompute}
        o, last = deltic.delta_rule(**rows, **KIND, **given, **form)
        torch.autograd.backward([o, last], [d_o, d_state])
        found.append([x.grad for x in (*rows.values(), state)])
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


def test_gradients_are_those_of_the_function():
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 5, 1, 3, dtype=torch.float64, requires_grad=True) for _ in range(3))
    from_ = torch.tensor([2])

    def call(*rows):
        return deltic.delta_rule(*rows, recurrent_from=from_, impl="reference")[0]

    assert torch.autograd.gradcheck(call, (q, k, v))


def test_operators_are_sound():
    case = make(T=70)
    rows = tuple(
        case.tensors[n].detach().clone().requires_grad_() for n in ("q", "k", "v", "beta", "g")
    )
    from_, none = torch.tensor([3, 70]), (None,)
    words = "final form=recurrent"
    opcheck(OPS.forward_save.default, (*rows, *none * 9, from_, *none * 2, words))
    opcheck(OPS.forward_save.default, (*rows, *none * 9, None, *none * 2, words))
    plain = tuple(x.detach() for x in rows)
    args = (*plain, *none * 15, from_, *none * 3, words)
    opcheck(OPS.forward_out_.default, args, test_utils=("test_schema", "test_faketensor"))


def test_compiled():
    rows = inputs(2, 70, grad=True)
    from_ = torch.tensor([64, 3])

    def loss(from_, **rows):
        return deltic.delta_rule(**rows, **KIND, recurrent_from=from_)[0].square().sum()

    expected = torch.autograd.grad(loss(from_, **rows), tuple(rows.values()))
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    found = torch.autograd.grad(compiled(from_, **rows), tuple(rows.values()))
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def test_explained():
    rows = inputs(2, 70)
    both = deltic.explain(**rows, recurrent_from=torch.tensor([64, 3]))
    assert "runs the tokens from recurrent_from on" in both.choices[0].sentence
    assert deltic.explain(**rows, form="recurrent").implementation is not None


Q = torch.zeros(1, 8, 2, 16)
ONE = torch.tensor([1])
WRONG = {
    "form: expected one of 'chunked', 'recurrent', got 'both'": {"form": "both"},
    "recurrent_from: expected none with the form 'chunked', got a tensor": {
        "form": "chunked",
        "recurrent_from": ONE,
    },
    r"recurrent_from: expected shape \[1\], got \[2\]": {"recurrent_from": torch.tensor([1, 2])},
    "recurrent_from: expected 0 to 8, the length of sequence 0, got 9": {
        "recurrent_from": torch.tensor([9])
    },
    "form: expected none with a beta per value column": {
        "form": "recurrent",
        "beta": torch.zeros(1, 8, 2, 16),
    },
}


@pytest.mark.parametrize("text", WRONG)
def test_errors(text):
    with pytest.raises(ValueError, match=f"^delta_rule: {text}"):
        deltic.delta_rule(Q, Q, Q, **WRONG[text])


def test_wrong_types():
    with pytest.raises(TypeError, match=r"recurrent_from: expected int32 or int64, got fp32"):
        deltic.delta_rule(Q, Q, Q, recurrent_from=torch.zeros(1))
    with pytest.raises(ValueError, match=r"recurrent_from: expected shape \[1\], got \[2\]"):
        q = Q.to("meta")
        deltic.delta_rule(q, q, q, recurrent_from=torch.zeros(2, device="meta").int())
