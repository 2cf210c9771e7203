"""deltic.step: the bits of the three calls, its errors, compiled graphs."""

from typing import Any

import deltic
import pytest
import torch
from deltic._step import _STEP_
from torch.library import opcheck

B, H, HV, K, V, W = 4, 2, 4, 32, 16, 4
D = 2 * H * K + HV * V
NO_GPU = not torch.cuda.is_available()
devices = pytest.mark.parametrize(
    "device", ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(NO_GPU, reason="no GPU"))]
)


def make(
    tokens: int = 1, dtype: torch.dtype = torch.float32, states: torch.dtype = torch.float32
) -> dict[str, Any]:
    """A call with everything that a GDN layer has."""
    torch.manual_seed(tokens)
    return {
        "x": torch.randn(B, tokens, D, dtype=dtype),
        "conv_weight": torch.randn(D, W) * 0.3,
        "conv_bias": torch.randn(D) * 0.3,
        "conv_state": torch.randn(9, D, W - 1).to(dtype),
        "beta": torch.randn(B, tokens, HV),
        "g": torch.randn(B, tokens, HV),
        "A_log": torch.zeros(HV),
        "dt_bias": torch.zeros(HV),
        "gate": "softplus",
        "beta_form": "sigmoid",
        "qk_l2norm": True,
        "state_layout": "vk",
        "state_pool": torch.randn(9, HV, V, K).to(states),
        "read_index": torch.tensor([5, 0, 2, 8]),
        "null_slot": 0,
        "z": torch.randn(B, tokens, HV, V, dtype=dtype),
        "norm_weight": torch.rand(V) + 0.5,
        "norm_activation": "silu",
        "eps": 1e-5,
    }


def clones(call: dict[str, Any], device: str | None = None) -> dict[str, Any]:
    def copy(x: Any) -> Any:
        return x.clone().to(device) if isinstance(x, torch.Tensor) else x

    return {name: copy(x) for name, x in call.items()}


def in_three(call: dict[str, Any]) -> torch.Tensor:
    """The same by the calls that a step is made of."""
    c = dict(call)
    norm = {name: c.pop(name) for name in ("z", "norm_weight", "norm_activation", "eps")}
    slots = c["read_index"]
    y = deltic.causal_conv1d_update(
        c.pop("x"),
        c.pop("conv_state"),
        c.pop("conv_weight"),
        c.pop("conv_bias"),
        activation="silu",
        state_index=c.pop("conv_index", slots),
        accepted=c.get("accepted"),
        null_slot=c["null_slot"],
        cu_seqlens=c.get("cu_seqlens"),
    )
    q, k, v = y.split([H * K, H * K, HV * V], -1)
    o = deltic.decode(
        q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), **c
    )
    return deltic.rms_norm(
        o, norm["norm_weight"], norm["z"], eps=norm["eps"], activation=norm["norm_activation"]
    )


@devices
@pytest.mark.parametrize("tokens", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_has_the_bits_of_the_three_calls(tokens: int, dtype: torch.dtype, device: str) -> None:
    one = clones(make(tokens, dtype), device)
    three = clones(one)
    y = deltic.step(**one)
    assert y.shape == (B, tokens, HV, V) and y.dtype == dtype
    assert torch.equal(y, in_three(three))
    assert torch.equal(one["state_pool"], three["state_pool"])
    assert torch.equal(one["conv_state"], three["conv_state"])
    assert y[1].count_nonzero() == 0  # slot 0 is none


@devices
def test_drafts_by_a_table(device: str) -> None:
    one = make(3)
    table = torch.arange(1, 13).view(B, 3)
    one |= {
        "state_pool": torch.randn(13, HV, V, K),
        "conv_state": torch.randn(9, D, W - 1 + 3),
        "read_index": table,
        "conv_index": torch.tensor([1, 3, 5, 7]),
        "accepted": torch.tensor([1, 2, 3, 1]),
    }
    one = clones(one, device)
    three = clones(one)
    y = deltic.step(**one)
    assert torch.equal(y, in_three(three))
    assert torch.equal(one["state_pool"], three["state_pool"])
    assert torch.equal(one["conv_state"], three["conv_state"])


@devices
def test_packed_sequences(device: str) -> None:
    one = make(1)
    cu = torch.tensor([0, 2, 2, 3, 6])
    for name in ("x", "beta", "g", "z"):
        one[name] = torch.randn(1, 7, *one[name].shape[2:])
    one["cu_seqlens"] = cu
    one["read_index"] = torch.tensor([5, 1, 2, 8])
    one = clones(one, device)
    three = clones(one)
    y = deltic.step(**one)
    assert torch.equal(y[:, :6], in_three(three)[:, :6])
    assert y[:, 6].count_nonzero() == 0


def test_without_a_norm_and_without_its_factors() -> None:
    call = make(2)
    for name in ("z", "norm_weight"):
        del call[name]
    o = deltic.step(**clones(call), norm=False)
    normed = deltic.step(**clones(call))
    assert torch.equal(normed, deltic.rms_norm(o))


def test_out() -> None:
    call = make(2, torch.bfloat16)
    expected = deltic.step(**clones(call))
    rows = torch.zeros(B, 2, 3, HV, V, dtype=torch.bfloat16)
    out = rows[:, :, 1]
    assert deltic.step(**clones(call), out=out) is out
    assert torch.equal(out, expected) and rows[:, :, 0].count_nonzero() == 0
    wide = torch.empty(B, 2, HV, V)
    deltic.step(**clones(call), out=wide)
    assert torch.equal(wide.bfloat16(), expected)


def test_a_record_leaves_states_alone() -> None:
    call = make(3)
    record = torch.zeros(B, 3, HV, K + V + 1)
    before = call["state_pool"].clone()
    scored = deltic.step(**call, record=record)
    assert torch.equal(call["state_pool"], before)
    again = make(3)
    assert torch.equal(scored, deltic.step(**again))
    deltic.commit(
        call["state_pool"],
        record,
        torch.full((B,), 3),
        read_index=call["read_index"],
        null_slot=0,
        state_layout="vk",
    )
    assert torch.equal(call["state_pool"], again["state_pool"])


def test_weight_as_torch_has_it() -> None:
    call = make()
    expected = deltic.step(**clones(call))
    call["conv_weight"] = call["conv_weight"].unsqueeze(1)
    assert torch.equal(deltic.step(**call), expected)


@devices
def test_compiled(device: str) -> None:
    call = clones(make(2), device)
    tensors = {name: x for name, x in call.items() if isinstance(x, torch.Tensor)}
    options = {name: x for name, x in call.items() if name not in tensors}

    def run(**given: torch.Tensor) -> torch.Tensor:
        return deltic.step(**given, **options) + 1

    mine = clones(tensors)
    compiled = torch.compile(run, backend="aot_eager", fullgraph=True)
    y = compiled(**mine)
    other = clones(tensors)
    assert torch.equal(y, run(**other))
    assert torch.equal(mine["state_pool"], other["state_pool"])
    assert torch.equal(mine["conv_state"], other["conv_state"])


def test_meta_tensors() -> None:
    call = make(2)
    meta = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    y = deltic.step(**meta)
    assert y.shape == (B, 2, HV, V) and y.device.type == "meta"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"z": None, "norm_activation": "relu"}, "norm_activation: expected None, 'silu' or 'sig"),
        ({"activation": "relu"}, "activation: expected None or 'silu', got 'relu'"),
        ({"eps": -1.0}, "eps: expected a finite number of at least 0, got -1.0"),
        ({"norm": False}, "z: expected none without a norm, got a tensor"),
        ({"conv_weight": torch.ones(D - 1, W)}, r"conv_weight: expected shape \[192, 4\]"),
        ({"conv_bias": torch.ones(3)}, r"conv_bias: expected shape \[192\], got \[3\]"),
        ({"conv_state": torch.ones(9, D, 2)}, "conv_state: expected at least W - 1 = 3 inputs S"),
        ({"state_pool": torch.ones(9, 3, V, K)}, r"x: expected D = 2\*H\*K \+ HV\*V channels"),
        ({"state_pool": torch.ones(9, HV, V)}, r"state_pool: expected shape \[slots,HV,V,K\]"),
        ({"z": torch.ones(B, 1, 2, V)}, r"z: expected shape \[4, 1, 4, 16\], got \[4, 1, 2, 16\]"),
        ({"norm_weight": torch.ones(3)}, r"norm_weight: expected shape \[16\], got \[3\]"),
        ({"beta": torch.ones(B, 2, HV)}, r"beta: expected shape \[4, 1, 4\], got \[4, 2, 4\]"),
        (
            {"parents": torch.full((B, 1), -1)},
            "parents: expected none with W = 4 taps, whose windows ",
        ),
        ({"read_index": torch.ones(B, 2, dtype=torch.int64)}, r"conv_index: expected a tensor \[N"),
    ],
)
def test_says_what_is_wrong(changes: dict[str, Any], text: str) -> None:
    call = make() | changes
    with pytest.raises(ValueError, match=f"^step: {text}"):
        deltic.step(**call)
    if "conv_index" in text or "eps" in text:
        return
    meta = {name: x.to("meta") if isinstance(x, torch.Tensor) else x for name, x in call.items()}
    with pytest.raises(ValueError, match=f"^step: {text}"):
        deltic.step(**meta)


def test_names_the_arguments_of_this_function() -> None:
    call = make()
    call["conv_index"] = torch.tensor([1, 2, 3, 99])
    with pytest.raises(ValueError, match="^step: conv_index: expected slots of -1 to 8, got 99"):
        deltic.step(**call)
    call = make()
    call["out"] = call["z"]
    with pytest.raises(ValueError, match="^step: out: expected memory of its own, got an overlap"):
        deltic.step(**call)
    call = make()
    call["conv_state"] = call["conv_state"].double()
    with pytest.raises(TypeError, match="^step: conv_state: expected fp32, bf16 or fp16, got fp64"):
        deltic.step(**call)


def test_has_no_gradient() -> None:
    for name in ("x", "conv_weight", "norm_weight", "g", "state_pool"):
        call = make()
        call[name].requires_grad_()
        with pytest.raises(ValueError, match="^step: x: expected no gradients to be asked for"):
            deltic.step(**call)
        with torch.no_grad():
            deltic.step(**call)


def test_write_pools() -> None:
    call = make()
    call |= {
        "write_pool": torch.zeros(9, HV, V, K),
        "write_index": torch.tensor([1, 0, 3, 4]),
    }
    with pytest.raises(ValueError, match="^step: conv_write_state: expected a tensor with write_p"):
        deltic.step(**call)
    call["conv_write_state"] = torch.zeros(9, D, W - 1)
    before = call["conv_state"].clone()
    deltic.step(**call)
    assert torch.equal(call["conv_state"], before)
    assert [s for s in range(9) if call["conv_write_state"][s].any()] == [1, 3, 4]
    assert [s for s in range(9) if call["write_pool"][s].any()] == [1, 3, 4]


def test_operator() -> None:
    """What torch asks of an operator: its schema, its fake, its mutations."""
    call = make(2)
    names = (
        "x conv_weight conv_bias conv_state conv_index conv_write_index conv_write_state beta g gv "
        "A_log dt_bias state_pool read_index write_index write_pool has_initial_state accepted "
        "parents positions record cu_seqlens cu_seqlens_cpu z norm_weight out"
    ).split()
    call["conv_index"] = call["read_index"]
    words = "as=step gate=softplus beta=sigmoid layout=vk qk_l2norm activation=silu norm=silu"
    args = [call.get(name) for name in names]
    args += [None, None, 1e-5, f"{words} null_slot=0"]
    opcheck(_STEP_, tuple(args), test_utils=("test_schema", "test_faketensor"))
