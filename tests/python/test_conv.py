"""The causal depthwise convolution: torch's own, states, packs, modes of autograd, errors."""

import deltic
import pytest
import torch
import torch.nn.functional as F
from support import error
from torch.library import opcheck

OPS = torch.ops.deltic
NONE = (None,)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BUDGET = {torch.float32: 5e-7, torch.bfloat16: 4e-3, torch.float16: 5e-4}


def inputs(B=2, T=50, D=24, W=4, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(shape, generator=generator).to(dtype)

    return draw(B, T, D), draw(D, W), draw(D), draw(B, D, W - 1)


def by_torch(x, weight, bias, activation, state):
    """torch's convolution in fp64, of the inputs with the state in front."""
    x, weight, state = x.double(), weight.double(), state.double()
    before = state[:, :, state.shape[2] - weight.shape[1] + 1 :]
    line = torch.cat([before, x.mT], 2)
    y = F.conv1d(line, weight[:, None], None if bias is None else bias.double(), groups=x.shape[2])
    return (F.silu(y) if activation else y).mT


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("W", [2, 3, 4, 8])
def test_values_and_gradients(dtype, activation, W):
    x, weight, bias, state = inputs(W=W, dtype=dtype)
    d_y = torch.randn(x.shape).to(dtype)
    mine = [t.clone().requires_grad_() for t in (x, weight, bias, state)]
    y, final = deltic.causal_conv1d(
        *mine[:3], activation=activation, initial_state=mine[3], output_final_state=True
    )
    theirs = [t.double().requires_grad_() for t in (x, weight, bias, state)]
    want = by_torch(*theirs[:3], activation, theirs[3])
    assert y.dtype == dtype and error(y, want) < BUDGET[dtype]
    assert final.dtype == dtype and torch.equal(final, x[:, -(W - 1) :].mT)
    y.backward(d_y)
    want.backward(d_y.double())
    for a, b in zip(mine, theirs, strict=True):
        assert a.grad.dtype == dtype and error(a.grad, b.grad) < 2 * BUDGET[dtype]


def test_weight_of_a_conv1d_module_and_strides():
    x, weight, bias, _ = inputs(T=20)
    module = torch.nn.Conv1d(24, 24, 4, groups=24, padding=3)
    y, _ = deltic.causal_conv1d(x, module.weight, module.bias)
    assert error(y, module(x.mT)[:, :, :20].mT) < 1e-6
    y.sum().backward()
    assert module.weight.grad.shape == (24, 1, 4)
    want = deltic.causal_conv1d(x, weight, bias)[0]
    wide = torch.randn(2, 20, 60)
    wide[:, :, 7:31] = x
    assert torch.equal(deltic.causal_conv1d(wide[:, :, 7:31], weight, bias)[0], want)
    turned = weight.T.contiguous().T
    assert torch.equal(deltic.causal_conv1d(x, turned, bias)[0], want)
    channels = x.mT  # [B,D,T], as a model may carry it
    assert torch.equal(deltic.causal_conv1d(channels.mT, weight, bias)[0], want)


def test_gradcheck_in_the_oracle():
    tensors = [t.double().requires_grad_() for t in inputs(T=6, D=3)]
    cu = torch.tensor([0, 2, 2, 5])
    for activation in (None, "silu"):

        def dense(x, weight, bias, state, activation=activation):
            return deltic.causal_conv1d(
                x,
                weight,
                bias,
                activation=activation,
                initial_state=state,
                output_final_state=True,
                impl="reference",
            )

        def packed(x, weight, bias, state, activation=activation):
            return deltic.causal_conv1d(
                x[:1],
                weight[:, None],
                bias,
                activation=activation,
                initial_state=torch.cat([state, state[:1]]),
                output_final_state=True,
                cu_seqlens=cu,
                impl="reference",
            )

        assert torch.autograd.gradcheck(dense, tensors)
        assert torch.autograd.gradcheck(packed, tensors)


def test_only_the_state_has_a_gradient():
    x, weight, bias, state = inputs(T=2)
    state.requires_grad_()
    _, final = deltic.causal_conv1d(x, weight, bias, initial_state=state, output_final_state=True)
    final.sum().backward()
    assert torch.equal(state.grad, torch.tensor([0.0, 0.0, 1.0]).expand(2, 24, 3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packs_are_sequences_alone(dtype):
    x, weight, bias, _ = inputs(B=1, T=310, dtype=dtype)
    cu = torch.tensor([0, 5, 5, 300, 307])
    states = torch.randn(4, 24, 3).to(dtype)
    y, final = deltic.causal_conv1d(
        x,
        weight,
        bias,
        activation="silu",
        initial_state=states,
        output_final_state=True,
        cu_seqlens=cu,
        cu_seqlens_cpu=cu,
    )
    assert not y[:, 307:].any()
    for n in range(4):
        a, b = cu[n : n + 2].tolist()
        alone, left = deltic.causal_conv1d(
            x[:, a:b],
            weight,
            bias,
            activation="silu",
            initial_state=states[n : n + 1],
            output_final_state=True,
        )
        assert torch.equal(alone, y[:, a:b]) and torch.equal(left[0], final[n])
    small = deltic.causal_conv1d(x, weight, bias, activation="silu", cu_seqlens=cu.int())[0]
    assert torch.equal(small[:, 8:300], y[:, 8:300])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_dtype", [torch.float32, None])
@pytest.mark.parametrize("S", [3, 4, 7])
def test_steps_are_one_pass(dtype, state_dtype, S):
    x, weight, bias, _ = inputs(T=9, D=40, dtype=dtype)
    want, final = deltic.causal_conv1d(
        x,
        weight,
        bias,
        activation="silu",
        initial_state=torch.zeros(2, 40, S, dtype=dtype),
        output_final_state=True,
    )
    state = torch.zeros(2, 40, S, dtype=state_dtype or dtype)
    steps = [
        deltic.causal_conv1d_update(x[:, t], state, weight, bias, activation="silu")
        for t in range(5)
    ]
    rest = deltic.causal_conv1d_update(x[:, 5:8], state, weight, bias, activation="silu")
    last = deltic.causal_conv1d_update(x[:, 8:], state, weight, bias, activation="silu")
    assert torch.equal(torch.cat([torch.stack(steps, 1), rest, last], 1), want)
    assert torch.equal(state, final.to(state.dtype))


def test_slots_of_a_pool():
    x, weight, bias, _ = inputs(B=3, T=1)
    pool = torch.randn(8, 24, 4)
    before = pool.clone()
    index = torch.tensor([5, -1, 2], dtype=torch.int32)
    y = deltic.causal_conv1d_update(x, pool, weight, bias, state_index=index)
    assert not y[1].any()
    for row, slot in ((0, 5), (2, 2)):
        state = before[slot : slot + 1].clone()
        alone = deltic.causal_conv1d_update(x[row : row + 1], state, weight, bias)
        assert torch.equal(alone[0], y[row]) and torch.equal(state[0], pool[slot])
    untouched = [0, 1, 3, 4, 6, 7]
    assert torch.equal(pool[untouched], before[untouched])


def test_threads_change_no_bit():
    x, weight, bias, state = (
        t.requires_grad_() for t in inputs(B=1, T=700, D=400, dtype=torch.bfloat16)
    )
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            y, final = deltic.causal_conv1d(
                x, weight, bias, activation="silu", initial_state=state, output_final_state=True
            )
            d_y = torch.ones_like(y)
            gradients = torch.autograd.grad((y, final), (x, weight, bias, state), (d_y, final))
            found.append((y, final, *gradients))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_opcheck():
    x, weight, bias, state = (t.requires_grad_() for t in inputs(T=7))
    cu = torch.tensor([0, 3, 7])
    opcheck(OPS.conv.default, (x, weight, bias, state, *NONE * 2, "final activation=silu"))
    opcheck(OPS.conv.default, (x[:1], weight[:, None], None, None, cu, None, "final"))
    opcheck(OPS.conv.default, (x, weight, *NONE * 4))
    given = [t.detach() for t in (x, weight, bias, state)]
    pool, index = torch.randn(4, 24, 4), torch.tensor([3, 0])
    opcheck(OPS.conv_.default, (*given[:3], pool, index, *NONE * 3))
    opcheck(OPS.conv_.default, (given[0][:, 0], *given[1:3], pool, index, *NONE * 3))
    opcheck(
        OPS.conv_backward.default, (torch.randn(2, 7, 24), torch.randn(2, 24, 3), *given, *NONE * 2)
    )
    opcheck(OPS.conv_backward.default, (torch.randn(2, 7, 24), None, *given[:2], *NONE * 4, "", 1))


def test_compile_whole_graph_and_lengths():
    def layer(x, weight, bias):
        y, state = deltic.causal_conv1d(x, weight, bias, activation="silu", output_final_state=True)
        return 2 * y, state  # doubling is exact however it is compiled

    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for T in (5, 8, 300):
        x, weight, bias, _ = (t.requires_grad_() for t in inputs(T=T))
        pairs = [f(x, weight, bias) for f in (layer, compiled)]
        assert all(torch.equal(a, b) for a, b in zip(*pairs, strict=True))
        grads = [torch.autograd.grad(y.sum() + s.sum(), (x, weight, bias)) for y, s in pairs]
        assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))


def test_compile_update():
    x, weight, bias, _ = inputs(T=3)
    step = torch.compile(deltic.causal_conv1d_update, fullgraph=True)
    mine, theirs = torch.zeros(2, 24, 4), torch.zeros(2, 24, 4)
    for t in range(3):
        assert torch.equal(
            step(x[:, t], mine, weight, bias),
            deltic.causal_conv1d_update(x[:, t], theirs, weight, bias),
        )
    assert torch.equal(mine, theirs)


def test_modes():
    x, weight, bias, _ = inputs(T=6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, _ = deltic.causal_conv1d(x, weight, bias)
        assert y.dtype == torch.bfloat16
    with torch.inference_mode():
        assert not deltic.causal_conv1d(x, weight, bias)[0].requires_grad
    weight.requires_grad_()
    y, _ = deltic.causal_conv1d(x, weight, bias)
    (grad,) = torch.autograd.grad(y.sum(), weight, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward"):
        grad.sum().backward()
    with pytest.raises(
        Exception, match="causal_conv1d: vmap: expected a batch in the first dimension"
    ):
        torch.vmap(lambda x: deltic.causal_conv1d(x, weight.detach())[0])(x[None])


ERRORS = {
    "rank": (lambda a: a.update(x=a["x"][0]), ValueError, r"x: expected shape \[B,T,D\]"),
    "taps": (lambda a: a.update(weight=torch.randn(24, 9)), ValueError, "1 to 8 taps W, got 9"),
    "channels": (
        lambda a: a.update(weight=torch.randn(23, 4)),
        ValueError,
        r"weight: expected shape \[24, 4\], got \[23, 4\]",
    ),
    "dtype": (lambda a: a.update(x=a["x"].int()), TypeError, "x: expected fp32, bf16 or fp16"),
    "double": (lambda a: a.update(x=a["x"].double()), TypeError, "got fp64"),
    "activation": (
        lambda a: a.update(activation="relu"),
        ValueError,
        "activation: expected None or 'silu', got 'relu'",
    ),
    "state": (
        lambda a: a.update(initial_state=torch.zeros(2, 24, 2)),
        ValueError,
        "initial_state: expected at least W - 1 = 3 inputs",
    ),
    "offsets": (
        lambda a: a.update(cu_seqlens=torch.tensor([0, 5])),
        ValueError,
        "cu_seqlens: expected a batch of 1",
    ),
    "impl": (lambda a: a.update(impl="none"), ValueError, "impl: expected one of"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    x, weight, bias, _ = inputs(T=9)
    arguments = {"x": x, "weight": weight, "bias": bias}
    spoil, kind, text = ERRORS[name]
    spoil(arguments)
    with pytest.raises(kind, match=text):
        deltic.causal_conv1d(**arguments)


def test_errors_of_an_update():
    x, weight, bias, state = inputs(T=1)
    with pytest.raises(ValueError, match="state_index: expected slots of -1 to 1, got 2 at 0"):
        deltic.causal_conv1d_update(x, state, weight, bias, state_index=torch.tensor([2, 0]))
    with pytest.raises(
        ValueError, match="causal_conv1d_update: state: expected at least N = 2 slots"
    ):
        deltic.causal_conv1d_update(x, state[:1], weight, bias)
    more, before = torch.cat((state, state[:1])), state.clone()
    offsets = torch.tensor([0, 1, 2])
    for rows, changes in ((x, {}), (x[:, 0], {}), (x.view(1, 2, -1), dict(cu_seqlens=offsets))):
        text = r"each of the 2 sequences .*state_index\), got shape \[3, "
        with pytest.raises(ValueError, match=f"^causal_conv1d_update: state: expected .*{text}"):
            deltic.causal_conv1d_update(rows, more, weight, bias, **changes)
    assert torch.equal(more[:2], before)
    deltic.causal_conv1d_update(x, more, weight, bias, write_index=torch.tensor([2, -1]))
    with pytest.raises(TypeError, match="causal_conv1d_update: state: expected fp32"):
        deltic.causal_conv1d_update(x, state.half(), weight, bias)
    with pytest.raises(ValueError, match="not differentiable"):
        deltic.causal_conv1d_update(x, state, weight.requires_grad_(), bias)
