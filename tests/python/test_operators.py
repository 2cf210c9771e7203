"""The operators as torch sees them: opcheck, compile, gradcheck, autocast, modes of autograd."""

import deltic
import pytest
import torch
from support import BLOCK_CALLS, block_tensors, make
from torch.library import opcheck

OPS = torch.ops.deltic
NONE = (None,)


def rows(case, grad=True):
    names = ("q", "k", "v", "beta", "g")
    return tuple(case.tensors[n].detach().clone().requires_grad_(grad) for n in names)


@pytest.mark.parametrize("words", ["", "final", "final save=states", "save=all"])
def test_opcheck_forward(words):
    case = make(T=70)
    state = case.tensors["initial_state"].requires_grad_()
    given = (*rows(case), *NONE * 2, state)
    opcheck(OPS.forward_save.default, (*given, *NONE * 9, words))
    if "save" not in words:
        opcheck(OPS.forward.default, (*given, *NONE * 4, words))


def test_opcheck_forward_packed_with_checkpoints():
    case = make(lengths=[40, 0, 30], gate="channel")
    lists = (torch.tensor([0, 1, 1, 2]), torch.tensor([3, 30]), torch.tensor([1, -1]))
    args = (case.tensors["cu_seqlens"], None, *lists, torch.zeros(2, 2, 32, 16), None)
    opcheck(OPS.forward_save.default, (*rows(case), *NONE * 3, *args, 0.5, None, "qk_l2norm final"))


def test_opcheck_in_place():
    case = make(T=5)
    pool, index = torch.randn(4, 2, 32, 16), torch.tensor([3, 1])
    values = rows(case, grad=False)
    opcheck(OPS.decode_.default, (*values, *NONE * 3, pool, index, *NONE * 3))
    opcheck(OPS.forward_.default, (*values, *NONE * 3, pool, index, *NONE * 7))


def test_opcheck_decode_and_backward():
    case = make(T=5)
    state = case.tensors["initial_state"].requires_grad_()
    args = (*rows(case), *NONE * 3, state, *NONE * 4)
    opcheck(OPS.decode.default, (*args, "final"))
    opcheck(OPS.backward.default, (torch.randn(2, 5, 2, 16), None, *rows(case, False), *NONE * 7))


@pytest.mark.parametrize("name", BLOCK_CALLS)
def test_opcheck_blocks(name):
    opcheck(getattr(OPS, name).default, BLOCK_CALLS[name](block_tensors()))


def test_opcheck_block_backward():
    g = -torch.rand(1, 40, 2)
    args = (2, *NONE * 4, g, *NONE * 7, torch.randn(1, 40, 2), *NONE * 4)
    opcheck(OPS.block_backward.default, args)


def layer(q, k, v, beta, g):
    o, state = deltic.delta_rule(q, k, v, beta=beta, g=g, qk_l2norm=True, output_final_state=True)
    return torch.tanh(o), state


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(dynamic):
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic)
    for T in (70, 200, 130) if dynamic else (70,):
        case = make(T=T)
        eager, graph = rows(case), rows(case)
        expected, found = layer(*eager), compiled(*graph)
        assert torch.equal(expected[1], found[1])
        torch.testing.assert_close(found[0], expected[0])
        for output in (expected, found):
            (output[0].sum() + output[1].sum()).backward()
        for x, y in zip(eager, graph, strict=True):
            torch.testing.assert_close(x.grad, y.grad)


def test_compile_without_gradients_and_in_place():
    torch._dynamo.reset()

    def step(q, k, v, pool, index):
        return deltic.decode(q, k, v, state_pool=pool, read_index=index) * 2

    case = make(T=1)
    q, k, v, *_ = rows(case, grad=False)
    index = torch.tensor([2, 0])
    pool = torch.randn(3, 2, 32, 16)
    pools = (pool, pool.clone())
    with torch.no_grad():
        expected = step(q, k, v, pools[0], index)
        found = torch.compile(step, fullgraph=True)(q, k, v, pools[1], index)
    assert torch.equal(expected, found) and torch.equal(*pools)


@pytest.mark.parametrize("gate", ["none", "head", "channel"])
@pytest.mark.parametrize("how", ["argument", "environment"])
def test_gradcheck(gate, how, monkeypatch):
    case = make(B=1, T=6, K=4, V=3, gate=gate)
    names = [n for n in case.tensors]
    values = [case.tensors[n].double().requires_grad_() for n in names]
    options = {"output_final_state": True, "qk_l2norm": True}
    if how == "argument":
        options["impl"] = "reference"
    else:
        monkeypatch.setenv("DELTIC_IMPL", "reference")

    def call(*given):
        x = dict(zip(names, given, strict=True))
        return deltic.delta_rule(x.pop("q"), x.pop("k"), x.pop("v"), **x, **options)

    assert torch.autograd.gradcheck(call, values)


def test_gradcheck_recurrent_and_blocks():
    x = {n: t.double().requires_grad_() for n, t in make(B=1, T=5, K=4, V=3).tensors.items()}
    beta = torch.rand(1, 5, 2, 3, dtype=torch.float64, requires_grad=True)
    oracle = {"impl": "reference"}

    def recurrent(q, k, v, b, g):
        return deltic.recurrent(q, k, v, beta=b, gv=-torch.exp(b), g=g, **oracle)[0]

    assert torch.autograd.gradcheck(recurrent, (x["q"], x["k"], x["v"], beta, x["g"]))
    assert torch.autograd.gradcheck(
        lambda k, g, b: deltic.inverse(
            deltic.kkt(k, g=g, beta=b, chunk_size=16, **oracle), **oracle
        ),
        (x["k"], x["g"], x["beta"]),
    )
    assert torch.autograd.gradcheck(
        lambda q, k, g, b: deltic.scores_inverse(q, k, g=g, beta=b, chunk_size=16, **oracle),
        (x["q"], x["k"], x["g"], x["beta"]),
    )


def test_float64_needs_the_oracle():
    q = torch.randn(1, 3, 1, 4, dtype=torch.float64)
    with pytest.raises(TypeError, match="delta_rule: q: expected fp32, bf16 or fp16, got fp64"):
        deltic.delta_rule(q, q, q)


def test_autocast_leaves_gates_alone():
    case = make(gate="channel", state=False)
    q, k, v, beta, g = rows(case)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _ = deltic.delta_rule(q, k, v, beta=beta, g=g)
    o.float().sum().backward()
    assert o.dtype == torch.bfloat16 and q.grad.dtype == g.grad.dtype == torch.float32
    cast = (x.detach().bfloat16() for x in (q, k, v))
    expected, _ = deltic.delta_rule(*cast, beta=beta, g=g)
    assert torch.equal(o, expected)
    rounded, _ = deltic.delta_rule(
        *(x.detach().bfloat16() for x in (q, k, v)), beta=beta, g=g.bfloat16()
    )
    assert not torch.equal(o, rounded)


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpointing(reentrant):
    from torch.utils.checkpoint import checkpoint

    plain, again = rows(make()), rows(make())
    (layer(*plain)[0].sum()).backward()
    checkpoint(layer, *again, use_reentrant=reentrant)[0].sum().backward()
    for x, y in zip(plain, again, strict=True):
        assert torch.equal(x.grad, y.grad)


def test_modes_and_repetition_give_the_same_bits():
    case = make(gate="channel")
    x = rows(case)
    with_grad, state = layer(*x)
    assert with_grad.grad_fn is not None and state.grad_fn is not None
    with torch.no_grad():
        no_grad, _ = layer(*x)
    with torch.inference_mode():
        inference, _ = layer(*x)
    again, _ = layer(*x)
    assert no_grad.grad_fn is None and inference.is_inference()
    for other in (no_grad, inference, again):
        assert torch.equal(with_grad, other)


def test_nothing_is_kept_without_gradients():
    case = make(T=640)
    x = rows(case)
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        with torch.no_grad():
            layer(*x)
        assert kept == []
        deltic.delta_rule(*x[:3], recompute=True)
        few = sum(t.nbytes for t in kept if t.dtype == torch.uint8)
        kept.clear()
        deltic.delta_rule(*x[:3], recompute=False)
        everything = sum(t.nbytes for t in kept if t.dtype == torch.uint8)
    assert 0 < few < everything / 3


def test_recompute_gives_the_same_bits():
    gradients = []
    for recompute in (True, False):
        x = rows(make(T=300))
        deltic.delta_rule(*x[:3], beta=x[3], g=x[4], recompute=recompute)[0].sum().backward()
        gradients.append([t.grad for t in x])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_gradients_are_made_where_asked_for():
    q, k, v, beta, g = rows(make(), grad=False)
    v.requires_grad_()
    o, _ = deltic.delta_rule(q, k, v, beta=beta, g=g)
    (gradient,) = torch.autograd.grad(o.sum(), v)
    assert gradient.shape == v.shape and q.grad is None


def test_bf16_state_has_a_bf16_gradient():
    case = make()
    state = case.tensors["initial_state"].bfloat16().requires_grad_()
    q, k, v, *_ = rows(case)
    _, final = deltic.delta_rule(q, k, v, initial_state=state, output_final_state=True)
    assert final.dtype == torch.bfloat16
    final.float().sum().backward()
    assert state.grad.dtype == torch.bfloat16


@pytest.mark.parametrize("call", [deltic.delta_rule, deltic.recurrent])
def test_double_backward_is_refused(call):
    q, k, v, *_ = rows(make(T=5))
    (dq,) = torch.autograd.grad(call(q, k, v)[0].sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward is not supported"):
        dq.sum().backward()


def pool_of(case):
    return torch.zeros(case.shape[0], 2, 32, 16)


# Each form of every operator, of one tensor x [B, T, H, K] under the transform.
CALLS = {
    "delta_rule": lambda x, v: deltic.delta_rule(x, x, v)[0],
    "delta_rule, pool": lambda x, v: deltic.delta_rule(x, x, v, state_pool=pool_of(v))[0],
    "recurrent": lambda x, v: deltic.recurrent(x, x, v)[0],
    "decode": lambda x, v: deltic.decode(x, x, v, state_pool=pool_of(v)),
    "l2norm": lambda x, v: deltic.l2norm(x)[0],
    "kkt": lambda x, v: deltic.kkt(x),
    "scores": lambda x, v: deltic.scores(x, x),
    "inverse": lambda x, v: deltic.inverse(x, impl="cpu.plain"),
    "scores_inverse": lambda x, v: deltic.scores_inverse(x, x)[1],
    "wy": lambda x, v: deltic.wy(x, x)[0],
    "chunk_cumsum": lambda x, v: deltic.chunk_cumsum(x),
    "log_decay": lambda x, v: deltic.log_decay(x),
    "log_decay, out": lambda x, v: deltic.log_decay(x, out=torch.empty(x.shape)),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("grad", [False, True])
def test_vmap_is_refused(name, grad):
    q, _, v, *_ = rows(make(T=5), grad=False)
    with pytest.raises(NotImplementedError) as error:
        torch.vmap(CALLS[name], in_dims=(0, None))(torch.stack([q, q]).requires_grad_(grad), v)
    op = name.partition(",")[0]
    text = f"{op}: vmap: expected a batch in the first dimension (or packed sequences), got"
    assert str(error.value).startswith(text)


@pytest.mark.parametrize("name", [name for name in CALLS if "," not in name and name != "decode"])
@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.jacrev, torch.func.hessian])
def test_transforms_of_torch_func_are_refused(name, transform):
    q, _, v, *_ = rows(make(T=5), grad=False)
    function = transform(lambda x: CALLS[name](x, v).sum())
    text = f"{name}: (torch.func|forward_ad): expected"  # a Hessian takes forward derivatives
    with pytest.raises(NotImplementedError, match=text):
        function(q)


@pytest.mark.parametrize("name", CALLS)
def test_forward_derivatives_are_refused(name):
    """Unseen they would come back as zero."""
    q, _, v, *_ = rows(make(T=5), grad=False)
    op = name.partition(",")[0]
    text = f"{op}: forward_ad: expected tensors without a tangent"
    with pytest.raises(NotImplementedError, match=text):
        torch.func.jvp(lambda x: CALLS[name](x, v), (q,), (q,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(q, q)
        with pytest.raises(NotImplementedError, match=text):
            CALLS[name](dual, v)
        assert CALLS[name](q, v).isfinite().all()  # tensors without a tangent go on


def test_transforms_in_a_compiled_graph_are_refused():
    torch._dynamo.reset()
    q, _, v, *_ = rows(make(T=5), grad=False)

    def call(x):
        return deltic.delta_rule(x, x, v)[0].sum()

    # torch.func.grad ends in an error of the compiler's, in words that differ from torch to torch.
    for function in (
        lambda x: torch.func.jvp(call, (x,), (x,)),
        lambda x: torch.vmap(call)(torch.stack([x, x])),
    ):
        with pytest.raises(NotImplementedError, match="delta_rule: .*: expected"):
            torch.compile(function, backend="eager")(q)


def test_batched_gradients():
    """autograd's own loop over several d_o goes one by one."""
    q, k, v, *_ = rows(make(T=5))
    o, _ = deltic.delta_rule(q, k, v)
    d_o = torch.randn(3, *o.shape)
    (together,) = torch.autograd.grad(o, q, d_o, is_grads_batched=True, retain_graph=True)
    for gradient, single in zip(together, d_o, strict=True):
        assert torch.equal(gradient, torch.autograd.grad(o, q, single, retain_graph=True)[0])


@pytest.mark.parametrize("name", ["l2norm", "kkt", "scores", "chunk_cumsum", "log_decay"])
def test_double_backward_of_blocks_is_refused(name):
    q, _, v, *_ = rows(make(T=5))
    (dq,) = torch.autograd.grad(CALLS[name](q, v).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward is not supported"):
        dq.sum().backward()


def test_gradients_through_views_and_odd_strides():
    x = torch.randn(2, 40, 3, 16, requires_grad=True)
    q, k, v = x.transpose(1, 2).contiguous().transpose(1, 2).split(1, dim=2)
    o, _ = deltic.delta_rule(q, k, v, qk_l2norm=True)
    o.mean().expand(3).sum().backward()
    assert x.grad.shape == x.shape and torch.isfinite(x.grad).all()


@pytest.mark.parametrize(
    "call",
    [
        lambda x, y: deltic.scores_inverse(x, y),
        lambda x, y: (deltic.kkt(x), deltic.scores(y, y)),
        lambda x, y: deltic.delta_rule(x, y, y)[:1],
    ],
)
def test_no_tokens_have_empty_gradients(call):
    x, y = (torch.randn(1, 0, 2, 8, requires_grad=True) for _ in range(2))
    found = torch.autograd.grad(sum(out.sum() for out in call(x, y)), (x, y))
    assert [f.shape for f in found] == [x.shape, y.shape]


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("size", [0, 17, 128])
def test_a_chunk_has_16_32_or_64_tokens(size, device):
    x = torch.randn(1, 20, 2, 8, device=device)
    for call in (
        lambda: deltic.scores_inverse(x, x, chunk_size=size),
        lambda: deltic.kkt(x, chunk_size=size),
        lambda: deltic.delta_rule(x, x, x, chunk_size=size),
    ):
        with pytest.raises(ValueError, match=f"chunk_size: expected 16, 32 or 64, got {size}"):
            call()


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("number", [-1, 1, 9, 10, 11, 12])
def test_a_gradient_of_no_block(number, device):
    k, d_out = torch.ones(1, 20, 1, 8, device=device), torch.ones(1, 20, 1, 64, device=device)
    arguments = (number, None, k, *[None] * 10, d_out, *[None] * 4)
    with pytest.raises(
        ValueError, match=f"^block_backward: op: expected a building block, 2 to 8, got {number}$"
    ):
        deltic._library.call(torch.ops.deltic.block_backward.default, *arguments)
