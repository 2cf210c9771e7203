"""The native calls: pools, checkpoints, layouts, and errors with nothing written."""

import inspect

import deltic
import pytest
import torch
from support import make


def rows(case):
    return [case.tensors[n] for n in ("q", "k", "v")]


def test_signatures():
    expected = (
        "q k v beta g scale initial_state output_final_state cu_seqlens cu_seqlens_cpu split gate "
        "A_log dt_bias lower_bound beta_form qk_l2norm state_layout chunk_size recompute "
        "checkpoints state_pool read_index write_index write_pool has_initial_state accepted "
        "null_slot form recurrent_from out impl"
    )
    assert list(inspect.signature(deltic.delta_rule).parameters) == expected.split()
    for function in (deltic.delta_rule, deltic.decode, deltic.recurrent):
        parameters = list(inspect.signature(function).parameters.values())
        assert all(p.kind is inspect.Parameter.KEYWORD_ONLY for p in parameters[3:])
    with pytest.raises(TypeError, match="unexpected keyword"):
        deltic.delta_rule(*rows(make()), unknown=1)


def test_results_have_names():
    x = torch.randn(1, 20, 2, 16)
    y = deltic.l2norm(x)
    assert y._fields == ("y", "rstd") and torch.equal(y.y, y[0]) and y.rstd.shape == (1, 20, 2)
    both = deltic.scores_inverse(y.y, y.y)
    assert both._fields == ("scores", "inverse")
    torch.testing.assert_close(both.scores, deltic.scores(y.y, y.y))
    torch.testing.assert_close(both.inverse, deltic.inverse(deltic.kkt(y.y)))
    pair = deltic.wy(x, both.inverse, v=x)
    assert pair._fields == ("w", "u", "kg", "qg")
    assert pair.w.shape == pair.u.shape == x.shape and pair.kg is None and pair.qg is None


def test_decode_continues_prefill():
    case = make(T=80, gate="channel")
    x = case.tensors
    whole, final = deltic.delta_rule(*rows(case), beta=x["beta"], g=x["g"], output_final_state=True)

    def part(begin, end):
        return {n: x[n][:, begin:end] for n in ("q", "k", "v", "beta", "g")}

    first = part(0, 64)
    pool = torch.randn(5, 2, 32, 16)
    o, none = deltic.delta_rule(
        first.pop("q"),
        first.pop("k"),
        first.pop("v"),
        **first,
        state_pool=pool,
        read_index=torch.tensor([-1, -1]),
        write_index=torch.tensor([3, 1], dtype=torch.int32),
    )
    assert none is None
    outputs = [o]
    for t in range(64, 80):
        step = part(t, t + 1)
        outputs.append(
            deltic.decode(
                step.pop("q"),
                step.pop("k"),
                step.pop("v"),
                **step,
                state_pool=pool,
                read_index=torch.tensor([3, 1]),
            )
        )
    torch.testing.assert_close(torch.cat(outputs, 1), whole, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(pool[[3, 1]], final, rtol=1e-4, atol=1e-5)


def test_decode_writes_the_state_after_every_token():
    case = make(B=1, T=3)
    q, k, v = rows(case)
    pool = torch.zeros(4, 2, 32, 16)
    slots = torch.tensor([[1, 2, 3]])
    deltic.decode(q, k, v, state_pool=pool, read_index=torch.tensor([0]), write_index=slots)
    _, two = deltic.recurrent(q[:, :2], k[:, :2], v[:, :2], output_final_state=True)
    assert torch.equal(pool[2:3], two) and not pool[0].any()


def test_checkpoints_with_and_without_gradients():
    case = make(B=1, T=130)
    q, k, v = rows(case)
    lists = torch.tensor([0, 2]), torch.tensor([64, 128]), torch.tensor([2, 0])
    kept = []
    for grad in (False, True):
        q.requires_grad_(grad)
        states = torch.full((3, 2, 32, 16), 9.0)
        o, _ = deltic.delta_rule(q, k, v, checkpoints=deltic.Checkpoints(*lists, states))
        assert (o.grad_fn is not None) == grad
        kept.append(states)
    assert torch.equal(*kept) and (kept[0][1] == 9.0).all()
    _, first = deltic.delta_rule(q.detach()[:, :64], k[:, :64], v[:, :64], output_final_state=True)
    assert torch.equal(kept[0][2:], first)


def test_layouts_are_transposes_of_each_other():
    case = make()
    state = case.tensors["initial_state"]
    _, kv = deltic.delta_rule(*rows(case), initial_state=state, output_final_state=True)
    _, vk = deltic.delta_rule(
        *rows(case),
        initial_state=state.mT.contiguous(),
        output_final_state=True,
        state_layout="vk",
    )
    assert torch.equal(kv, vk.mT)


def test_padding_and_empty_sequences():
    case = make(lengths=[10, 0, 20], state=False)
    q, k, v = rows(case)
    cu = torch.tensor([0, 10, 10, 25])
    o, state = deltic.delta_rule(
        q, k, v, cu_seqlens=cu, cu_seqlens_cpu=cu.clone(), output_final_state=True
    )
    assert not o[:, 25:].any() and not state[1].any() and state.shape[0] == 3
    empty = torch.zeros(2, 0, 1, 8)
    o, state = deltic.delta_rule(empty, empty, empty, output_final_state=True)
    assert o.shape == (2, 0, 1, 8) and not state.any()


def test_inputs_are_taken_as_they_lie():
    case = make()
    packed = torch.cat([x.flatten(2) for x in rows(case)], dim=-1)
    widths = [x.flatten(2).shape[-1] for x in rows(case)]
    views = [
        part.unflatten(2, x.shape[2:])
        for part, x in zip(packed.split(widths, dim=-1), rows(case), strict=True)
    ]
    assert not views[0].is_contiguous()
    assert torch.equal(deltic.delta_rule(*views)[0], deltic.delta_rule(*rows(case))[0])


Q = torch.randn(1, 8, 2, 16)
POOL = torch.zeros(2, 2, 16, 16)
BAD = {
    "shape": (dict(k=Q[:, :3]), ValueError, r"delta_rule: k: expected shape \[1, 8, 2, 16\], got"),
    "heads": (dict(v=torch.randn(1, 8, 3, 16)), ValueError, "delta_rule: v: expected a number of"),
    "rank": (dict(q=Q[0]), ValueError, r"delta_rule: q: expected shape \[B,T,H,K\]"),
    "width": (
        dict(q=torch.randn(1, 8, 2, 300)),
        ValueError,
        "delta_rule: q: expected a key width K",
    ),
    "scalar": (dict(beta=torch.tensor(1.0)), ValueError, "delta_rule: beta: expected"),
    "dtype": (dict(v=Q.bfloat16()), TypeError, "delta_rule: v: expected fp32 as q, got bf16"),
    "int8": (dict(v=Q.to(torch.int8)), TypeError, "delta_rule: v: expected .*, got int8"),
    "cu dtype": (dict(cu_seqlens=torch.tensor([0.0])), TypeError, "cu_seqlens: expected int32"),
    "not a tensor": (dict(v=3.0), TypeError, "delta_rule: v: expected a tensor, got 3.0"),
    "stride": (
        dict(state_pool=POOL.mT),
        ValueError,
        "delta_rule: state_pool: expected stride 1 .*: state_pool.contiguous",
    ),
    "lengths": (dict(cu_seqlens=torch.tensor([0, 9])), ValueError, "delta_rule: cu_seqlens: "),
    "copy": (
        dict(cu_seqlens=torch.tensor([0, 8]), cu_seqlens_cpu=torch.tensor([0, 7])),
        ValueError,
        "delta_rule: cu_seqlens_cpu: expected the values of cu_seqlens",
    ),
    "gate": (dict(gate="relu"), ValueError, "delta_rule: gate: expected one of 'log_decay'"),
    "no g": (
        dict(gate="softplus"),
        ValueError,
        "delta_rule: g: expected a tensor with the gate form",
    ),
    "A_log": (dict(A_log=torch.zeros(2)), ValueError, "delta_rule: A_log: expected none"),
    "bound": (
        dict(gate="bounded", g=Q[..., 0], lower_bound=1.0),
        ValueError,
        "delta_rule: lower_bound: expected a finite number below 0, got 1",
    ),
    "beta form": (dict(beta_form="tanh"), ValueError, "delta_rule: beta_form: expected one of"),
    "layout": (dict(state_layout="hv"), ValueError, "delta_rule: state_layout: expected one of"),
    "chunk": (
        dict(chunk_size=48),
        ValueError,
        "delta_rule: chunk_size: expected 16, 32 or 64",
    ),
    "chunk type": (dict(chunk_size="64"), TypeError, "delta_rule: chunk_size: expected an int"),
    "split": (dict(split="on"), ValueError, "delta_rule: split: expected one of 'auto'"),
    "segments": (dict(split=128), NotImplementedError, "delta_rule: split: expected auto or off"),
    "impl": (dict(impl="none"), ValueError, "delta_rule: impl: expected"),
    "impl text": (
        dict(impl="a b"),
        ValueError,
        "delta_rule: impl: expected an implementation's name",
    ),
    "index": (
        dict(read_index=torch.tensor([0])),
        ValueError,
        "delta_rule: read_index: expected none",
    ),
    "pool": (
        dict(state_pool=POOL, read_index=torch.tensor([7])),
        ValueError,
        "delta_rule: read_index: ",
    ),
    "both": (dict(state_pool=POOL, initial_state=POOL[:1]), ValueError, "initial_state: expected"),
    "checkpoints": (dict(checkpoints=(Q,)), ValueError, "delta_rule: checkpoints: expected"),
    "slots": (
        dict(checkpoints=(torch.tensor([0, 1]), torch.tensor([4]), torch.tensor([5]), POOL)),
        ValueError,
        "delta_rule: checkpoints.slots: ",
    ),
    "columns": (
        dict(beta=torch.rand(1, 8, 2, 9)),
        ValueError,
        r"^delta_rule: beta: expected shape \[1, 8, 2\] or \[1, 8, 2, 16\], got \[1, 8, 2, 9\]$",
    ),
    "columns of another v": (
        dict(v=Q[:, :3], beta=torch.rand(1, 8, 2, 16)),
        ValueError,
        r"^delta_rule: v: expected shape \[1, 8, 2, 16\], got \[1, 3, 2, 16\]$",
    ),
    "sparse": (
        dict(q=Q.to_sparse()),
        TypeError,
        "^delta_rule: q: expected a dense tensor, got sparse_coo$",
    ),
    "sparse beta": (
        dict(beta=Q[..., 0].to_sparse()),
        TypeError,
        "^delta_rule: beta: expected a dense tensor, got sparse_coo$",
    ),
    "sparse with a gradient": (
        dict(q=Q.clone().requires_grad_(), v=Q.to_sparse()),
        TypeError,
        "^delta_rule: v: expected a dense tensor, got sparse_coo$",
    ),
    "sparse pool": (
        dict(state_pool=POOL.to_sparse()),
        TypeError,
        "^delta_rule: state_pool: expected a dense tensor, got sparse_coo$",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    changes, kind, text = BAD[name]
    arguments = {"q": Q, "k": Q, "v": Q, **changes}
    if name == "width":
        arguments["k"] = arguments["q"]
    call = (arguments.pop("q"), arguments.pop("k"), arguments.pop("v"))
    with pytest.raises(kind, match=text):
        deltic.delta_rule(*call, **arguments)
    assert not POOL.any()


def test_pools_have_no_gradient():
    q = Q.clone().requires_grad_()
    pool = torch.zeros(1, 2, 16, 16)
    with pytest.raises(ValueError, match="delta_rule: state_pool: expected none where gradients"):
        deltic.delta_rule(q, Q, Q, state_pool=pool)
    with pytest.raises(ValueError, match="decode: state_pool: expected none where gradients"):
        deltic.decode(q, Q, Q, state_pool=pool)
    with torch.no_grad():
        deltic.decode(q, Q, Q, state_pool=pool)
    assert pool.any()


def test_a_direct_call_gives_the_same_text():
    with pytest.raises(RuntimeError, match=r"^forward: k: expected shape \[1, 8, 2, 16\]"):
        torch.ops.deltic.forward(Q, Q[:, :3], Q, *[None] * 7)
    with pytest.raises(RuntimeError, match="forward: options: expected words .* got gate=relu"):
        torch.ops.deltic.forward(Q, Q, Q, *[None] * 9, "gate=relu")
    for words in ("impl=cpu.plain\0", "impl=cpu.plain\0x", "impl=\0", "as=a\0b", "\0"):
        with pytest.raises(RuntimeError, match="forward: options: expected a text without zero"):
            torch.ops.deltic.forward(Q, Q, Q, *[None] * 9, words)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_direct_call_is_named_by_its_operator(device):
    q = Q.to(device)
    k, pool, nothing = q[:, :3], POOL.to(device), [None] * 7
    rows, x, weight = (q, k, q), q[:, :, 0], torch.zeros(16, 4, device=device)
    calls = {
        "forward": lambda: torch.ops.deltic.forward(*rows, *nothing),
        "forward_save": lambda: torch.ops.deltic.forward_save(*rows, *nothing, *[None] * 5),
        "forward_": lambda: torch.ops.deltic.forward_(*rows, *nothing, *[None] * 7),
        "decode": lambda: torch.ops.deltic.decode(*rows, *nothing, None),
        "decode_": lambda: torch.ops.deltic.decode_(*rows, *[None] * 5, pool, *[None] * 4),
    }
    for name, call in calls.items():
        with pytest.raises((RuntimeError, ValueError), match=f"^{name}: k: expected shape"):
            call()
    with pytest.raises((RuntimeError, ValueError), match="^conv_: weight: expected shape"):
        torch.ops.deltic.conv_(x, weight[:3], None, pool[0], *[None] * 4)
    with pytest.raises((RuntimeError, ValueError), match="^conv: x: expected shape"):
        torch.ops.deltic.conv(q, weight, *[None] * 4)


def wrong_values(q):
    """Values that no fake implementation sees: the operators of a compiled graph find them."""
    offsets = torch.tensor([0, 9])
    state, weight = torch.zeros(1, 16, 3), torch.zeros(16, 4)
    lists = dict(cu_seqlens=torch.tensor([0, 8]), cu_seqlens_cpu=torch.tensor([0, 7]))
    return {
        "delta_rule: cu_seqlens_cpu": lambda: deltic.delta_rule(q, q, q, **lists),
        "delta_rule: cu_seqlens": lambda: deltic.delta_rule(
            q, q, q, beta=q.sigmoid(), cu_seqlens=offsets
        ),
        "recurrent: cu_seqlens": lambda: deltic.recurrent(q, q, q, cu_seqlens=offsets),
        "decode: read_index": lambda: deltic.decode(
            q, q, q, state_pool=POOL.clone(), read_index=torch.tensor([7])
        ),
        "chunk_cumsum: cu_seqlens": lambda: deltic.chunk_cumsum(q, cu_seqlens=offsets),
        "log_decay: cu_seqlens": lambda: deltic.log_decay(q, cu_seqlens=offsets),
        "causal_conv1d: cu_seqlens": lambda: deltic.causal_conv1d(
            q[:, :, 0], weight, cu_seqlens=offsets
        )[0],
        "causal_conv1d_update: state_index": lambda: deltic.causal_conv1d_update(
            q[:, :1, 0], state, weight, state_index=torch.tensor([5])
        ),
        "kkt: cu_seqlens": lambda: deltic.kkt(q, cu_seqlens=offsets),
    }


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("text", wrong_values(Q))
def test_errors_name_the_function_that_was_called(text, grad):
    """In a direct call and in a compiled graph; a beta per value column is delta_rule's too."""
    if grad and ("decode" in text or "update" in text):
        pytest.skip("states in place have no gradients")
    q = Q.clone().requires_grad_(grad)
    call = wrong_values(q)[text]
    with pytest.raises(ValueError, match=f"^{text}: expected"):
        call()
    torch._dynamo.reset()
    with pytest.raises((RuntimeError, ValueError), match=rf"(^|\s){text}: expected"):
        torch.compile(call, backend="aot_eager")()


def test_errors_of_a_beta_per_value_column_are_those_of_its_function():
    beta = torch.rand(1, 8, 2, 16)
    for changes, text in (
        (dict(g=Q[0]), "delta_rule: g: expected shape"),
        (dict(initial_state=POOL[0]), "delta_rule: initial_state: expected shape"),
        (dict(scale=Q), "delta_rule: scale: expected a float"),
        (dict(impl="none"), "delta_rule: impl: expected"),
        (dict(beta_form="tanh"), "delta_rule: beta_form: expected"),
    ):
        with pytest.raises((ValueError, TypeError), match=f"^{text}"):
            deltic.delta_rule(Q, Q, Q, beta=beta, **changes)
    with pytest.raises(ValueError, match="^recurrent: g: expected shape"):
        deltic.recurrent(Q, Q, Q, beta=beta, g=Q[0])


def test_block_errors():
    with pytest.raises(ValueError, match="inverse: a: expected a width of 16, 32 or 64, got 5"):
        deltic.inverse(torch.zeros(1, 3, 1, 5))
    with pytest.raises(ValueError, match="^chunk_cumsum: g: expected shape"):
        deltic.chunk_cumsum(torch.zeros(3))
    with pytest.raises(TypeError, match="^log_decay: g: expected fp32, bf16 or fp16, got int64"):
        deltic.log_decay(torch.zeros(1, 3, 1, dtype=torch.int64))


def test_errors_of_gradients_are_translated():
    q = Q.clone().requires_grad_()
    o, _ = deltic.delta_rule(q, Q, Q)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t) or t, lambda t: t.zero_() if t.dtype == torch.uint8 else t
    ):
        o, _ = deltic.delta_rule(q, Q, Q)
    with pytest.raises(
        ValueError, match="^delta_rule: saved: expected a buffer that forward filled"
    ):
        o.sum().backward()


@pytest.mark.parametrize("name", ["q", "k", "v", "g", "beta"])
@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("form", ["log_decay", "softplus", "bounded"])
@pytest.mark.parametrize("function", [deltic.delta_rule, deltic.recurrent])
def test_nan_shows(name, gate, form, function):
    case = make(B=1, T=10, K=16, V=8, gate=gate, form=form, state=False)
    tensors = dict(case.tensors)
    tensors[name] = tensors[name].clone()
    tensors[name][:, 4] = float("nan")
    q, k, v = (tensors.pop(n) for n in "qkv")
    options = {**case.options, "beta_form": "sigmoid", "qk_l2norm": True}
    o, _ = function(q, k, v, **tensors, **options)
    assert o[:, 4].isnan().all()
    assert o[:, :4].isfinite().all() or function is deltic.delta_rule


@pytest.mark.parametrize("name", ["k", "g", "beta", "initial_state"])
def test_devices_are_not_mixed(name):
    case = make()
    tensors = dict(case.tensors)
    tensors[name] = tensors[name].to("meta")
    q, k, v = (tensors.pop(n) for n in "qkv")
    with pytest.raises(ValueError, match=f"{name}: expected device cpu as q, got meta"):
        deltic.delta_rule(q, k, v, **tensors)


def test_meta_tensors_have_shapes():
    case = make()
    tensors = {n: x.to("meta") for n, x in case.tensors.items()}
    q, k, v = (tensors.pop(n) for n in "qkv")
    o, state = deltic.delta_rule(q, k, v, **tensors, output_final_state=True)
    assert o.shape == v.shape and o.device.type == "meta"
    assert state.shape == tensors["initial_state"].shape
