"""deltic.integrations.fla: which CUDA calls with gradients are taken, and which are left.

Needs no flash-linear-attention: what is asked before a call, and the replacement of a function.
Without a GPU the calls are of fake tensors, and a stand-in answers for the library.
"""

import deltic
import pytest
import torch
from deltic._explain import Choice, Explanation
from deltic._library import HAS_CUDA_BACKWARD
from deltic.integrations import _patch
from deltic.integrations import fla as integration
from support import BUDGET, error
from torch._subclasses.fake_tensor import FakeTensorMode

HAS_GPU = torch.cuda.is_available()
# The test's own knowledge, to see that the library is asked: the code says nothing of it.
HAS_HOPPER = HAS_GPU and HAS_CUDA_BACKWARD and torch.cuda.get_device_capability() == (9, 0)
TENSOR_CORES = "cuda.sm90.backward"
OURS = {name: ours for name, (_, ours) in integration._OPERATORS.items()}


def call(K=128, V=128, dtype=torch.bfloat16, gate=4, beta=3, device="cuda", T=4, gap=0, **more):
    """A call of two value heads to one key head; `gate` and `beta` are ranks."""
    shapes = {"q": (1, T, 1, K + gap), "k": (1, T, 1, K + gap), "v": (1, T, 2, V)}
    found = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
    found |= {name: found[name][..., :K] for name in ("q", "k")}
    if gate:
        found["g"] = torch.zeros((1, T, 2, K)[:gate], device=device)
    found["beta"] = torch.ones((1, T, 2, V)[:beta], device=device)
    found["v"].requires_grad_()
    return found | more


@pytest.fixture
def asked(monkeypatch):
    """The calls that the library was asked about, and answers as on a Hopper GPU."""
    found = []

    def explain(q, k, v, **given):
        found.append({"q": q, "k": k, "v": v, **given})
        words = {
            "q, k and v are not bf16 or fp16": q.dtype == torch.float32,
            "K or V is neither 64 nor 128": {q.shape[-1], v.shape[-1]} - {64, 128},
            "the chunk length is not 64": given.get("chunk_size", 64) != 64,
            "beta is per value channel": given["beta"].dim() == 4,
            "a decay per value column has no gradient here": given.get("gv") is not None,
            "an address or a stride is no multiple of 16 bytes": q.stride(2) % 8,
        }
        why = next((text for text, is_so in words.items() if is_so), "best")
        takes = why == "best"
        choices = [
            Choice(TENSOR_CORES, takes, takes, why),
            Choice("cuda.general", True, not takes, "takes every call"),
        ]
        backward = Explanation("", "backward", tuple(sorted(choices, key=lambda x: not x.chosen)))
        return Explanation("", "forward", (), backward=backward)

    monkeypatch.setattr(integration, "explain", explain)
    integration._left_in_training.cache_clear()
    yield found
    integration._left_in_training.cache_clear()


CASES = {
    "128": (call, {}, None),
    "64": (call, {"K": 64, "V": 64}, None),
    "64 and 128": (call, {"K": 64}, None),
    "fp16": (call, {"dtype": torch.float16}, None),
    "96": (call, {"K": 96, "V": 96}, "K or V"),
    "V of 256": (call, {"V": 256}, "K or V"),
    "fp32": (call, {"dtype": torch.float32}, "not bf16 or fp16"),
    "chunks of 16": (call, {"chunk_size": 16}, "chunk length"),
    "rows of 132": (call, {"gap": 4}, "stride"),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_taken(case, asked):
    make, given, left = CASES[case]
    with FakeTensorMode():
        reason = integration._refusal(OURS["chunk_kda"], (), make(**given))
        if left is None:
            assert reason is None
        else:
            start = f"gradients without tensor cores ({TENSOR_CORES}: "
            assert reason.startswith(start) and left in reason
        # Other lengths are no other question.
        assert integration._refusal(OURS["chunk_kda"], (), make(T=7, **given)) == reason
    assert len(asked) == 1 and asked[0]["device"] == "cuda" and asked[0]["q"].is_meta
    assert asked[0]["q"].requires_grad and asked[0]["function"] is deltic.delta_rule
    assert asked[0]["g"].dim() == 4 and asked[0]["v"].shape[2] == 2


def test_functions_by_token(asked):
    gdn, delta = OURS["fused_recurrent_gated_delta_rule"], OURS["fused_recurrent_delta_rule"]
    with FakeTensorMode():
        assert integration._refusal(gdn, (), call(gate=3)) is None
        assert integration._refusal(delta, (), call(gate=0)) is None
        assert asked[0]["g"].dim() == 3 and asked[1]["g"] is None
        assert all(x["function"] is deltic.recurrent for x in asked)
        gv = torch.zeros(1, 4, 2, 128, device="cuda")
        assert "value column" in integration._refusal(gdn, (), call(gate=3, gv=gv))
        assert "per value channel" in integration._refusal(delta, (), call(gate=0, beta=4))
        gk = call().pop("g")
        assert integration._refusal(gdn, (), call(gate=0, gk=gk)) is None
    assert asked[-1]["g"].dim() == 4


def test_wrong_calls_are_told_by_the_function(asked):
    """What is no call has no form: nobody is asked, and the function says what is wrong."""
    with FakeTensorMode():
        flat = call()
        flat["q"] = flat["q"].flatten(2)
        assert integration._refusal(OURS["chunk_kda"], (), flat) is None
        assert integration._refusal(OURS["chunk_kda"], (), call(chunk_size="64")) is None
        wide = call(dtype=torch.float64)
        assert "float64" in integration._refusal(OURS["chunk_kda"], (), wide)
        assert "context" in integration._refusal(OURS["chunk_kda"], (), call(cp_context=1))
    assert len(asked) == 1


@pytest.mark.skipif(HAS_CUDA_BACKWARD and HAS_GPU, reason="a GPU's gradients are there")
def test_a_build_without_gradients_on_gpus():
    """The library itself: nobody computes them."""
    integration._left_in_training.cache_clear()
    with FakeTensorMode():
        reason = integration._refusal(OURS["chunk_kda"], (), call())
        assert "no gradients of cuda tensors in this build" in reason


@pytest.mark.parametrize("dynamic", [False, True])
def test_nothing_of_it_is_in_a_graph(dynamic, asked):
    """A compiler asks once, about whole numbers."""
    graphs = []

    def keep(graph, example):
        graphs.append(graph)
        return graph

    def function(q, k, v):
        form = integration._form_of(False, {"q": q, "k": k, "v": v, "beta": q[..., 0]})
        return v * 2 if integration._in_training(form) is None else v

    given = [call(device="cpu")[name] for name in "qkv"]
    torch._dynamo.reset()
    compiled = torch.compile(function, backend=keep, fullgraph=True, dynamic=dynamic)
    compiled(*given)
    assert len(asked) == 1 and tuple(asked[0]["v"].shape) == (1, 1, 2, 128)
    targets = [str(x.target) for x in graphs[0].graph.nodes if x.op.startswith("call")]
    assert len(graphs) == 1 and any("mul" in x for x in targets)
    assert not [x for x in targets if "empty" in x or "deltic" in x]
    given = [call(device="cpu", T=9)[name] for name in "qkv"]
    assert compiled(*given).shape == given[2].shape and len(graphs) == (1 if dynamic else 2)


# ---- On a GPU


def said(caplog):
    return [x.getMessage() for x in caplog.records if x.name == "deltic.integrations"]


def original(*args, **kwargs):
    raise AssertionError("handed to flash-linear-attention")


@pytest.mark.skipif(not HAS_HOPPER, reason="no Hopper GPU, or no gradients on it in this build")
@pytest.mark.parametrize("name", OURS)
def test_gradients_on_a_gpu(name, caplog):
    """Of the replaced function: bf16 of width 128 within the budget, the rest handed back."""
    integration._left_in_training.cache_clear(), _patch._said.clear()
    function = integration._make_operator(original, name)
    gate = 4 if "kda" in name else 3 if "gated" in name else 0
    generator = torch.Generator("cuda").manual_seed(0)
    leaves = {}
    for key, x in call(gate=gate, T=130).items():
        x = torch.randn(x.shape, generator=generator, device="cuda")
        if key in ("q", "k"):
            x = torch.nn.functional.normalize(x, dim=-1)
        x = x.sigmoid() if key == "beta" else -x.abs() if key == "g" else x.bfloat16()
        leaves[key] = x.requires_grad_()
    o, _ = function(**leaves)
    d_o = torch.randn(o.shape, generator=generator, device="cuda").to(o)
    found = torch.autograd.grad(o, list(leaves.values()), d_o)
    exact = {key: x.detach().float().cpu().requires_grad_() for key, x in leaves.items()}
    form = "recurrent" if name.startswith("fused") else "delta_rule"
    expected_o, _ = getattr(deltic, form)(**exact)
    expected = torch.autograd.grad(expected_o, list(exact.values()), d_o.float().cpu())
    budget = BUDGET[torch.bfloat16]
    assert error(o.cpu(), expected_o) < budget["o"]
    for key, x, y in zip(leaves, found, expected, strict=True):
        assert error(x.cpu(), y) < budget[key if key in budget else "rows"], key
    assert not said(caplog)
    for other in ({"K": 96, "V": 96}, {"dtype": torch.float32}):
        with pytest.raises(AssertionError, match="handed to"):
            function(**call(gate=gate, **other))
    assert len(said(caplog)) == 2 and all("without tensor cores" in x for x in said(caplog))
