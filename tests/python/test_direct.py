"""Direct calls: what goes past torch's dispatcher, with the bits and errors of the operators."""

import contextlib
import gc
import sys
import threading
import weakref

import deltic
import pytest
import torch
from direct import (
    DEVICES,
    WIDTHS,
    D,
    H,
    by_operator,
    check_alike,
    needs_direct,
    needs_gpu,
    outcome,
    rows,
    state,
)


def calls(device="cpu", dtype=torch.float32):
    """Calls by name: functions without arguments that return tensors."""
    (q, k, v), gates = rows(device=device, dtype=dtype)
    wide = torch.cat([q, k, v], -1)
    one, first = [x[:, :1] for x in (q, k, v)], {n: x[:, :1] for n, x in gates.items()}
    initial = state(device=device, dtype=dtype)
    packed = torch.tensor([0, 2, 5], device=device)
    A_log, dt_bias = torch.nn.Parameter(torch.rand(H, device=device)), torch.rand(H, device=device)

    def version(x):
        return -1 if x.is_inference() else x._version

    def decode(**options):
        pool = initial.clone()
        o = deltic.decode(*one, **first, state_pool=pool, **options)
        assert version(pool) in (-1, 1)
        return o, pool

    def out(function, **options):
        buffer = torch.full_like(v, 7)
        o, last = function(q, k, v, **gates, out=buffer, **options)
        assert o is buffer and version(buffer) in (-1, 2)
        return o, last

    def written():
        pool, other = initial.clone(), initial.clone()
        o, last = deltic.delta_rule(q, k, v, **gates, state_pool=pool, write_pool=other)
        assert last is None and {version(pool), version(other)} in ({-1}, {1})
        return o, pool, other

    def server(name, **options):
        """A server's step: raw gates, slot 0 nobody's, an output of its own."""
        given = dict(zip(("q", "k", "v"), one if name == "tokens" else drafts, strict=True))
        count = given["q"].shape[1]
        raw = {"g": gates["g"][:, :count], "beta": gates["beta"][:, :count], "beta_form": "sigmoid"}
        raw |= {"gate": "softplus", "A_log": A_log, "dt_bias": dt_bias, "qk_l2norm": True}
        if name == "drafts":
            given = {n: x.flatten(0, 1)[None] for n, x in given.items()}
            raw |= {n: raw[n].flatten(0, 1)[None] for n in ("g", "beta")}
        pool = torch.linspace(-1, 1, 8 * initial[0].numel(), device=device, dtype=dtype)
        pool = pool.view(8, *initial.shape[1:])
        buffer = torch.full_like(given["v"], 7)
        o = deltic.decode(
            *(given.values()), **raw, state_layout="vk", state_pool=pool, out=buffer, **options
        )
        assert o is buffer and version(buffer) in (-1, 2)
        return o, pool

    index = torch.arange(2, device=device).flip(0)
    drafts = [x[:, :3] for x in (q, k, v)]
    table = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32, device=device)
    tree = torch.tensor([[-1, 0, 0], [-1, 0, 1]], dtype=torch.int32, device=device)
    flags = torch.tensor([True, False], device=device)
    whole = [x[:1] for x in (q, k, v)], {n: x[:1] for n, x in gates.items()}
    return {
        "forward": lambda: deltic.delta_rule(q, k, v, **gates),
        "final": lambda: deltic.delta_rule(q, k, v, **gates, output_final_state=True),
        "initial": lambda: deltic.delta_rule(
            q, k, v, **gates, initial_state=initial, output_final_state=True
        ),
        "options": lambda: deltic.delta_rule(
            *(q, k, v),
            **gates,
            qk_l2norm=True,
            scale=0.3,
            state_layout="vk",
            beta_form="sigmoid",
            has_initial_state=flags,
            initial_state=initial,
            output_final_state=True,
        ),
        "softplus": lambda: deltic.delta_rule(
            q, k, v, **gates, gate="softplus", A_log=A_log, dt_bias=dt_bias
        ),
        "packed": lambda: deltic.delta_rule(
            *whole[0], **whole[1], cu_seqlens=packed, output_final_state=True
        ),
        "views": lambda: deltic.delta_rule(*wide.split(WIDTHS[device], -1), **gates),
        "one row": lambda: deltic.delta_rule(
            *whole[0][:2], v[:1].as_strided(v[:1].shape, (7, *v.stride()[1:])), **whole[1]
        ),
        "no tokens": lambda: deltic.delta_rule(
            *(x[:, :0] for x in (q, k, v)),
            **{n: x[:, :0] for n, x in gates.items()},
            initial_state=initial,
            output_final_state=True,
        ),
        "out": lambda: out(deltic.delta_rule),
        "pools": written,
        "recurrent": lambda: deltic.recurrent(
            q, k, v, **gates, initial_state=initial, output_final_state=True
        ),
        "recurrent, out": lambda: out(
            deltic.recurrent, initial_state=initial, has_initial_state=flags
        ),
        "columns": lambda: deltic.recurrent(q, k, v, g=gates["g"], beta=v.sigmoid(), gv=-v.abs()),
        "decode": decode,
        "decode, slots": lambda: decode(read_index=index, write_index=index),
        "prompts, null slot": lambda: deltic.delta_rule(
            *(q, k, v), **gates, state_pool=initial.clone(), read_index=index, null_slot=0
        )[:1],
        "tokens of a server": lambda: server("tokens", read_index=index, null_slot=0),
        "no null slot": lambda: server("tokens", read_index=index - 1, null_slot=-1),
        "drafts of a server": lambda: server(
            "drafts",
            read_index=table,
            accepted=torch.tensor([2, 1], dtype=torch.int32, device=device),
            cu_seqlens=torch.tensor([0, 3, 6], dtype=torch.int32, device=device),
            null_slot=0,
        ),
        "tree of a server": lambda: server(
            "tree",
            read_index=index,
            write_index=table - 1,
            write_pool=torch.zeros(8, *initial.shape[1:], device=device, dtype=dtype),
            parents=tree,
        ),
    }


@needs_direct
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_direct_calls_have_the_bits_of_operators(taken, device, dtype, mode):
    with mode():
        for name, function in calls(device, dtype).items():
            taken.clear()
            found = check_alike(function)
            assert taken == [True], (name, found)


@needs_direct
def test_pools_and_outputs_of_inference_mode(taken):
    """They have no versions, and are written all the same."""
    (q, k, v), gates = rows(T=1)
    with torch.inference_mode():
        pool, out = state(), torch.empty_like(v)
    for mode in (torch.inference_mode, torch.no_grad):

        def call(mode=mode):
            with mode():
                kept = pool.clone()
                o = deltic.decode(q, k, v, **gates, state_pool=kept, out=out)
                return o.clone(), kept

        check_alike(call)
        check_alike(lambda: deltic.decode(q, k, v, **gates, state_pool=pool.mul(1)))
    assert all(taken)


@needs_direct
def test_gradients_go_by_the_operator(taken):
    (q, k, v), gates = rows()
    q.requires_grad_()
    seen = []
    q.register_hook(seen.append)
    deltic.delta_rule(q, k, v, **gates)[0].sum().backward()
    assert taken == [False] and len(seen) == 1 and q.grad is not None
    with torch.no_grad():  # where nobody asks for them the same tensor is plain
        o, _ = deltic.delta_rule(q, k, v, **gates)
    assert taken == [False, True] and not o.requires_grad
    pool = state()
    kept = (pool * torch.ones_like(pool).requires_grad_()).sum()
    q = q.detach()[:, :1]
    deltic.decode(q, k[:, :1], v[:, :1], state_pool=pool)
    assert taken[-1]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.backward()


@needs_direct
@pytest.mark.parametrize(
    "wrong",
    [
        {"scale": 1e39},
        {"scale": float("nan")},
        {"lower_bound": -5.0},
        {"beta": torch.ones(2, 5, H, D)},
        {"beta": torch.ones(2, 5, H, 1)},
        {"initial_state": torch.ones(2, H, D, D + 1)},
        {"initial_state": torch.ones(2, H, D, D).bfloat16(), "output_final_state": True},
        {"state_pool": torch.ones(2, H, D, D), "output_final_state": True},
        {"state_pool": torch.ones(1, H, D, D)},
        {"read_index": torch.zeros(2, dtype=torch.int64)},
        {"cu_seqlens": torch.tensor([0, 5])},
        {"out": torch.ones(2, 5, H, D + 1)},
        {"out": torch.ones(2, 5, H, D, dtype=torch.float64)},
        {"has_initial_state": torch.ones(3, dtype=torch.bool)},
        {"gate": "softplus"},
        {"gate": "none"},
    ],
    ids=lambda wrong: " ".join(wrong),
)
def test_errors_are_those_of_the_operator(wrong):
    (q, k, v), gates = rows()
    with torch.no_grad():
        for function in (deltic.delta_rule, deltic.recurrent):
            direct = outcome(lambda f=function: f(q, k, v, **gates | wrong))
            operator = by_operator(lambda f=function: outcome(lambda: f(q, k, v, **gates | wrong)))
            if isinstance(operator[0], type):
                assert direct == operator
            else:
                assert torch.equal(direct[0], operator[0])


@needs_direct
@pytest.mark.parametrize("null_slot", [-2, -1, 1, 2, 7, 2**31, -(2**31) - 1, 2**70, True, 1.0, "0"])
@pytest.mark.parametrize("has_index", [False, True])
def test_null_slots_are_those_of_the_operator(taken, null_slot, has_index):
    (q, k, v), gates = rows(T=1)
    states, index = state(slots=3), torch.tensor([1, 2]) if has_index else None

    def call():
        pool = states.clone()
        lists = {"read_index": index, "null_slot": null_slot}
        return deltic.decode(q, k, v, **gates, state_pool=pool, **lists), pool

    with torch.no_grad():
        check_alike(call)
    is_slot = type(null_slot) is int and 0 <= null_slot < 3
    assert taken == [null_slot == -1 or is_slot and has_index]


@needs_direct
def test_deterministic_memory_is_torchs(taken):
    """What nobody writes is filled where torch fills it; results are the same."""
    (q, k, v), gates = rows()
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        with torch.no_grad():
            check_alike(lambda: deltic.delta_rule(q, k, v, **gates, output_final_state=True))
    finally:
        torch.use_deterministic_algorithms(before)
    assert taken == [True]


@needs_direct
@pytest.mark.parametrize("is_wrong", [False, True])
def test_references_and_memory_come_back(is_wrong):
    (q, k, v), gates = rows()
    objects = [q, k, v, *gates.values(), torch.empty_like(v), state(), None, 0.25]
    last = objects[-4][:, :3] if is_wrong else objects[-4]

    def call():
        with contextlib.suppress(ValueError):
            deltic.delta_rule(
                q, k, v, **gates, initial_state=objects[-3], scale=objects[-1], out=last
            )
        with contextlib.suppress(ValueError):
            o, final = deltic.recurrent(
                q, k, v if not is_wrong else v[..., :3], **gates, output_final_state=True
            )
            results.append(weakref.ref(o))
            assert sys.getrefcount(o) == 2 and sys.getrefcount(final) == 2

    results: list = []
    with torch.no_grad():
        call()
        gc.collect()
        counts = [sys.getrefcount(x) for x in objects]
        alive = len(gc.get_objects())
        for _ in range(200):
            call()
        results.clear()
        gc.collect()
        assert len(gc.get_objects()) - alive < 100
    after = [sys.getrefcount(x) for x in objects]
    # None has uses everywhere.
    none = objects.index(None)
    assert abs(after.pop(none) - counts.pop(none)) < 100 and after == counts


@needs_direct
def test_threads(taken):
    (q, k, v), gates = rows(T=40)
    with torch.no_grad():
        plain = deltic.delta_rule(q, k, v, **gates)[0]
    wrong = []

    def work(i):
        scales = [0.25, 0.5]  # options and shapes differ
        with torch.no_grad():
            for n in range(50):
                o, _ = deltic.delta_rule(q, k, v, **gates, output_final_state=n % 3 == i % 3)
                p, _ = deltic.delta_rule(
                    *(x[:, : 5 + i] for x in (q, k, v)),
                    **{name: x[:, : 5 + i] for name, x in gates.items()},
                    scale=scales[n % 2] * 2,
                )
                wrong.extend([] if torch.equal(o, plain) else [(i, n)])
                wrong.extend([] if bool(p.isfinite().all()) else [(i, n)])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and all(taken)


@needs_direct
@needs_gpu
def test_streams_and_graphs(taken):
    """A call is on the current stream, and can be captured."""
    (q, k, v), gates = rows(T=70, device="cuda", dtype=torch.bfloat16)

    def call():
        return deltic.delta_rule(q, k, v, **gates, qk_l2norm=True)[0]

    with torch.no_grad():
        plain = call()
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            q.mul_(2)
            o = call()
        assert not side.query()
        side.synchronize()
        assert not torch.equal(o, plain) and torch.equal(o, by_operator(call))
        q.div_(2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = call()
        v.mul_(3)
        graph.replay()
        assert torch.equal(captured, by_operator(call))
    assert all(taken)
