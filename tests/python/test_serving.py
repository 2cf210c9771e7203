"""What servers' calls have: null slots, accepted tokens, second pools, has_initial_state, out."""

import deltic
import pytest
import torch

H, HV, K, V, W = 2, 4, 32, 48, 4


def rows(batch, tokens, seed=0):
    """Slices of one packed row per token: q, k, v, and of another one beta and g."""
    torch.manual_seed(seed)
    qkv = torch.randn(batch, tokens, 2 * H * K + HV * V)
    ba = torch.randn(batch, tokens, 2 * HV)
    q, k, v = qkv.split([H * K, H * K, HV * V], -1)
    named = {"q": q.unflatten(-1, (H, K)), "k": k.unflatten(-1, (H, K))}
    named |= {"v": v.unflatten(-1, (HV, V)), "beta": ba[..., :HV], "g": ba[..., HV:]}
    return named


def gates():
    return {
        "gate": "softplus",
        "A_log": torch.zeros(HV),
        "dt_bias": torch.zeros(HV),
        "beta_form": "sigmoid",
        "qk_l2norm": True,
    }


def part(named, *index):
    return {name: x[index] for name, x in named.items()}


def test_null_slots_are_none():
    named, pool = rows(3, 1), torch.randn(4, HV, K, V)
    before, index = pool.clone(), torch.tensor([2, 0, -1])
    o = deltic.decode(**named, **gates(), state_pool=pool, read_index=index, null_slot=0)
    assert o[1:].count_nonzero() == 0
    assert torch.equal(pool[[0, 1, 3]], before[[0, 1, 3]]) and not torch.equal(pool[2], before[2])
    same = before.clone()
    alone = deltic.decode(
        **part(named, slice(0, 1)), **gates(), state_pool=same, read_index=index[:1]
    )
    assert torch.equal(alone, o[:1]) and torch.equal(same[2], pool[2])


@pytest.mark.parametrize("function", [deltic.delta_rule, deltic.recurrent])
def test_has_initial_state(function):
    named, state = rows(2, 5), torch.randn(2, HV, K, V)
    has = torch.tensor([True, False])
    o, final = function(
        **named, **gates(), initial_state=state, has_initial_state=has, output_final_state=True
    )
    zeroed = state * has[:, None, None, None]
    expected = function(**named, **gates(), initial_state=zeroed, output_final_state=True)
    assert torch.equal(o, expected[0]) and torch.equal(final, expected[1])


@pytest.mark.parametrize("function", [deltic.delta_rule, deltic.recurrent])
def test_out_is_written_and_returned(function):
    named, buffer = rows(2, 5), torch.full((2, 5, HV, 2 * V), 7.0)
    out = buffer[..., V:]
    o, final = function(**named, **gates(), out=out, output_final_state=True)
    expected = function(**named, **gates(), output_final_state=True)
    assert o is out and torch.equal(out, expected[0]) and torch.equal(final, expected[1])
    assert (buffer[..., :V] == 7).all()


def test_out_of_decode_and_of_a_wide_beta():
    named, pool = rows(2, 1), torch.randn(2, HV, K, V)
    out, other = torch.empty(2, 1, HV, V), pool.clone()
    assert deltic.decode(**named, **gates(), state_pool=pool, out=out) is out
    assert torch.equal(out, deltic.decode(**named, **gates(), state_pool=other))
    wide = {**named, "beta": torch.rand(2, 1, HV, V)}
    o, _ = deltic.delta_rule(**wide, out=out)
    assert o is out and torch.equal(out, deltic.delta_rule(**wide)[0])


def test_accepted_tokens_read_and_write_a_table():
    named, drafts = rows(2, 8), 3
    pool = torch.zeros(7, HV, V, K)
    kind = {**gates(), "state_layout": "vk"}
    table = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    expected, alone = [], torch.zeros(2, HV, V, K)
    for t in range(8):
        expected.append(
            deltic.decode(**part(named, slice(None), slice(t, t + 1)), **kind, state_pool=alone)
        )
    accepted, done = torch.tensor([1, 1]), 0
    for count in (2, 1, 3, 2):
        o = deltic.decode(
            **part(named, slice(None), slice(done, done + drafts)),
            **kind,
            state_pool=pool,
            read_index=table,
            accepted=accepted,
        )
        for t in range(count):
            assert torch.equal(o[:, t], expected[done + t][:, 0])
        accepted, done = torch.tensor([count, count]), done + count


def test_a_second_pool_is_written_instead():
    named, pool, scratch = rows(2, 3), torch.randn(4, HV, K, V), torch.zeros(6, HV, K, V)
    before = pool.clone()
    read, write = torch.tensor([3, 1]), torch.arange(6).view(2, 3)
    deltic.decode(
        **named,
        **gates(),
        state_pool=pool,
        read_index=read,
        write_pool=scratch,
        write_index=write,
    )
    assert torch.equal(pool, before)
    o, final = deltic.recurrent(
        **named, **gates(), initial_state=pool[read], output_final_state=True
    )
    assert torch.equal(scratch[[2, 5]], final)
    deltic.delta_rule(
        **named,
        **gates(),
        state_pool=pool,
        read_index=read,
        write_pool=scratch,
        write_index=torch.tensor([0, 1]),
    )
    assert torch.equal(pool, before) and torch.allclose(scratch[:2], final, atol=1e-4)


def test_columns_of_a_table_are_lists():
    named, table = rows(2, 1), torch.tensor([[2, 9], [0, 9]])
    pool = torch.randn(3, HV, K, V)
    other = pool.clone()
    o = deltic.decode(**named, **gates(), state_pool=pool, read_index=table[:, 0])
    expected = deltic.decode(
        **named, **gates(), state_pool=other, read_index=table[:, 0].contiguous()
    )
    assert torch.equal(o, expected) and torch.equal(pool, other)


def test_convolution_of_servers():
    x, weight = torch.randn(1, 9, 40), torch.randn(40, W)
    cu = torch.tensor([0, 4, 4, 9])
    pool, has = torch.randn(5, 40, W - 1), torch.tensor([True, True, False])
    before, index = pool.clone(), torch.tensor([3, 0, 1])
    out = torch.empty(1, 9, 40)
    options = {"activation": "silu", "cu_seqlens": cu}
    y, _ = deltic.causal_conv1d(
        x,
        weight,
        **options,
        state=pool,
        state_index=index,
        has_initial_state=has,
        null_slot=0,
        out=out,
    )
    initial = torch.stack([before[3], before[0], torch.zeros(40, W - 1)])
    expected, final = deltic.causal_conv1d(
        x, weight, **options, initial_state=initial, output_final_state=True
    )
    assert y is out and torch.equal(y, expected)
    assert torch.equal(pool[3], final[0]) and torch.equal(pool[1], final[2])
    assert torch.equal(pool[[0, 2, 4]], before[[0, 2, 4]])


def test_convolution_from_the_accepted_token():
    x, weight, drafts = torch.randn(2, 12, 40), torch.randn(40, W), 3
    expected, _ = deltic.causal_conv1d(x, weight)
    window = torch.zeros(2, 40, W - 1 + drafts)
    deltic.causal_conv1d(x[:, :4], weight, state=window[:, :, : W - 1])
    accepted, done = torch.tensor([1, 1]), 4
    for count in (1, 3, 2, 1):
        guesses = x[:, done : done + drafts].clone()
        guesses[:, count:] = 9
        y = torch.empty_like(guesses)
        deltic.causal_conv1d_update(guesses, window, weight, accepted=accepted, out=y)
        assert torch.equal(y[:, :count], expected[:, done : done + count])
        accepted, done = torch.tensor([count, count]), done + count


def test_update_takes_a_write_index():
    x, weight, pool = torch.randn(2, 40), torch.randn(40, W), torch.randn(4, 40, W - 1)
    before, scratch = pool.clone(), torch.zeros(4, 40, W - 1)
    index, write = torch.tensor([0, 1]), torch.tensor([3, 2])
    y = deltic.causal_conv1d_update(x, pool, weight, state_index=index, write_index=write)
    other = before.clone()
    same = deltic.causal_conv1d_update(
        x, other, weight, state_index=index, write_index=write, write_state=scratch
    )
    assert torch.equal(y, same) and torch.equal(pool[2:], scratch[2:])
    assert torch.equal(other, before) and torch.equal(pool[:2], before[:2])


def test_a_tree_and_its_commit():
    named, pool = rows(1, 4), torch.randn(3, HV, K, V)
    before, scratch = pool.clone(), torch.zeros(4, HV, K, V)
    slots = torch.arange(4).view(1, 4)
    o = deltic.decode(
        **named,
        **gates(),
        state_pool=pool,
        read_index=torch.tensor([1]),
        write_pool=scratch,
        write_index=slots,
        parents=torch.tensor([[-1, 0, 0, 2]]),
    )
    assert torch.equal(pool, before)
    path = {name: x[:, [0, 2, 3]] for name, x in named.items()}
    expected, final = deltic.recurrent(
        **path, **gates(), initial_state=before[1:2], output_final_state=True
    )
    assert torch.equal(o[:, [0, 2, 3]], expected) and torch.equal(scratch[3], final[0])
    nothing = {name: x[:, :0] for name, x in named.items()}
    deltic.decode(
        **nothing,
        **gates(),
        cu_seqlens=torch.zeros(2, dtype=torch.int32),
        state_pool=scratch,
        read_index=slots,
        accepted=torch.tensor([4]),
        write_pool=pool,
        write_index=torch.tensor([1]),
    )
    assert torch.equal(pool[1], final[0]) and torch.equal(pool[[0, 2]], before[[0, 2]])
    with pytest.raises(ValueError, match="decode: parents: expected a parent before its token"):
        deltic.decode(
            **named,
            **gates(),
            state_pool=pool,
            read_index=torch.tensor([1]),
            write_pool=scratch,
            write_index=slots,
            parents=torch.tensor([[-1, 0, 3, 2]]),
        )


def test_a_seed_rounds_states_by_chance():
    """A sequence has the bits of itself alone, in calls of any length; other seeds have others."""
    named, tokens = rows(2, 6), torch.tensor([100, 5])

    def served(seed, sequences, lengths):
        pool, first = torch.zeros(2, HV, K, V, dtype=torch.bfloat16), 0
        for length in lengths:
            deltic.decode(
                **{n: x[sequences, first : first + length] for n, x in named.items()},
                **gates(),
                state_pool=pool,
                read_index=torch.tensor(sequences),
                seed=seed,
                positions=tokens[sequences] + first,
            )
            first += length
        return pool

    whole = served(11, [0, 1], [6])
    assert torch.equal(whole, served(11, [0, 1], [1, 2, 3]))
    assert torch.equal(whole[1], served(11, [1], [1] * 6)[1])
    assert not torch.equal(whole, served(12, [0, 1], [6]))
    exact = deltic.recurrent(**named, **gates(), output_final_state=True)[1]
    assert (whole.float() - exact).square().mean() < 1e-4 * exact.square().mean()
    with pytest.raises(ValueError, match="decode: seed: expected none but with states of 16 bits"):
        deltic.decode(**named, **gates(), state_pool=torch.zeros(2, HV, K, V), seed=1)
    with pytest.raises(TypeError, match="decode: seed: expected an int, got 1.5"):
        deltic.decode(**named, **gates(), state_pool=whole, seed=1.5)


def test_checkpoints_go_into_the_pools():
    named, pool = rows(1, 90), torch.zeros(4, HV, K, V)
    lists = (torch.tensor([0, 2]), torch.tensor([64, 3]), torch.tensor([3, 2]))
    kind = {"read_index": torch.tensor([1]), "has_initial_state": torch.tensor([False])}
    deltic.delta_rule(
        **named, **gates(), **kind, state_pool=pool, checkpoints=(*lists, pool), split="off"
    )
    for slot, tokens in ((3, 64), (2, 3), (1, 90)):
        part_of = part(named, slice(None), slice(0, tokens))
        _, final = deltic.delta_rule(**part_of, **gates(), output_final_state=True)
        assert torch.equal(pool[slot], final[0])
    x, weight, windows = torch.randn(1, 90, 16), torch.randn(16, W), torch.zeros(4, 16, 5)
    deltic.causal_conv1d(
        x,
        weight,
        state=windows,
        state_index=torch.tensor([1]),
        has_initial_state=torch.tensor([False]),
        checkpoints=(*lists, windows),
    )
    assert torch.equal(windows[3], x[0, 59:64].T) and torch.equal(windows[1], x[0, 85:].T)
    assert torch.equal(windows[2, :, 2:], x[0, :3].T) and windows[2, :, :2].count_nonzero() == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"null_slot": -2}, "decode: null_slot: expected -1 (none) or a slot, got -2"),
        ({"null_slot": True}, "decode: null_slot: expected an int, got True"),
        ({"accepted": torch.tensor([1])}, "read_index: expected a table"),
        (
            {"has_initial_state": torch.tensor([1])},
            "decode: has_initial_state: expected bool or uint8, got int64",
        ),
        ({"out": torch.empty(1, 1, HV, V + 1)}, f"decode: out: expected shape [1, 1, {HV}, {V}]"),
        (
            {"out": torch.empty(1, 1, HV, V, dtype=torch.bfloat16)},
            "decode: out: expected fp32 as q, got bf16",
        ),
        ({"write_pool": torch.zeros(2, HV, K, V)}, "write_index: expected a tensor"),
    ],
)
def test_wrong_arguments_are_named(arguments, text):
    call = {**rows(1, 1), **gates(), "state_pool": torch.zeros(2, HV, K, V)}
    call["read_index"] = torch.tensor([1])
    with pytest.raises((ValueError, TypeError)) as error:
        deltic.decode(**call, **arguments)
    assert text in str(error.value)


def test_what_has_no_gradient_says_so():
    named = rows(1, 2)
    named["q"] = named["q"].clone().requires_grad_()
    with pytest.raises(ValueError, match="delta_rule: out: expected none where gradients"):
        deltic.delta_rule(**named, **gates(), out=torch.empty(1, 2, HV, V))
    with pytest.raises(ValueError, match="recurrent: has_initial_state: expected none where"):
        deltic.recurrent(**named, **gates(), has_initial_state=torch.tensor([True]))
    x, weight = torch.randn(1, 2, 8, requires_grad=True), torch.randn(8, W)
    with pytest.raises(ValueError, match="causal_conv1d: out: expected none where gradients"):
        deltic.causal_conv1d(x, weight, out=torch.empty(1, 2, 8))


def test_meta_tensors_have_the_shapes():
    named = {name: x.to("meta") for name, x in rows(2, 1).items()}
    kind = {name: x.to("meta") if hasattr(x, "to") else x for name, x in gates().items()}
    pool, index = torch.empty(4, HV, K, V, device="meta"), torch.empty(2, device="meta").int()
    o = deltic.decode(**named, **kind, state_pool=pool, read_index=index, null_slot=0)
    assert o.shape == (2, 1, HV, V)
    with pytest.raises(ValueError, match="accepted: expected shape"):
        deltic.decode(
            **named, **kind, state_pool=pool, read_index=index[:, None], accepted=index[:1]
        )


@pytest.mark.parametrize("operator", ["decode_out_", "forward_out_", "conv_out_"])
def test_operators_are_sound(operator):
    named = {name: x.contiguous() for name, x in rows(2, 3).items()}
    pool, out = torch.randn(3, HV, K, V), torch.empty(2, 3, HV, V)
    index, has = torch.tensor([1, 2]), torch.tensor([True, False])
    op = getattr(torch.ops.deltic, operator).default
    if operator == "conv_out_":
        x, weight, state = torch.randn(2, 3, 8), torch.randn(8, W), torch.randn(3, 8, W - 1)
        args = (x, weight, None, None, state, index, None, None, has, *[None] * 7)
        args += (torch.empty(2, 3, 8), "null_slot=0")
    else:
        given = [named[name] for name in ("q", "k", "v", "beta", "g")]
        given += [None] * (3 if operator == "decode_out_" else 2)
        pools = [None, pool, index, None, None, has, None]
        checkpoints = [None] * (4 if operator == "decode_out_" else 7)
        args = (*given, *pools, *checkpoints, out, None, None, "null_slot=0")
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


def test_autograd_sees_what_a_call_writes():
    x, pool = torch.randn(1, 2, 1, 16), torch.zeros(2, 1, 16, 16)
    out, window = torch.zeros(1, 2, 1, 16), torch.zeros(2, 8, 3)
    for written, write in (
        (pool, lambda: deltic.decode(x, x, x, state_pool=pool[:1])),
        (pool, lambda: deltic.delta_rule(x, x, x, state_pool=pool[:1])),
        (out, lambda: deltic.decode(x, x, x, state_pool=pool[:1], out=out)),
        (out, lambda: deltic.recurrent(x, x, x, out=out)),
        (window, lambda: deltic.causal_conv1d_update(torch.randn(2, 8), window, torch.randn(8, 4))),
    ):
        w = torch.ones_like(written, requires_grad=True)
        y = (w * written).sum()
        write()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward()


def test_null_slots_are_of_the_pool():
    x, pool = torch.randn(1, 2, 1, 16), torch.zeros(2, 1, 16, 16)
    index = torch.tensor([1])
    deltic.decode(x, x, x, state_pool=pool, read_index=index, null_slot=0)
    with pytest.raises(ValueError, match="null_slot: expected one of the pool's 2 slots, or -1"):
        deltic.decode(x, x, x, state_pool=pool, read_index=index, null_slot=2)


def test_explain_takes_what_servers_give():
    x, pool = torch.randn(2, 3, 1, 16), torch.zeros(8, 1, 16, 16)
    table, rows = torch.arange(1, 7).view(2, 3), torch.tensor([True, False])
    named = dict(q=x, k=x, v=x, state_pool=pool, null_slot=0)
    for function, options in (
        ("delta_rule", dict(read_index=table[:, 0], has_initial_state=rows)),
        ("decode", dict(read_index=table[:, 0], has_initial_state=rows.to(torch.uint8))),
        ("decode", dict(read_index=table, accepted=torch.tensor([1, 3]))),
        (
            deltic.decode,
            dict(
                read_index=table[:, 0],
                write_index=table,
                write_pool=pool.clone(),
                parents=torch.tensor([[-1, 0, 0], [-1, 0, 1]]),
                out=torch.empty_like(x),
            ),
        ),
    ):
        found = deltic.explain(**named, **options, function=function)
        assert found.implementation is not None and found.implementation.startswith("cpu.")
        getattr(deltic, found.operation.replace("forward", "delta_rule"))(**named, **options)
    with pytest.raises(ValueError, match="parents: expected none without a write index per token"):
        wrong = dict(read_index=table[:, 0], parents=table)
        deltic.explain(**named, **wrong, function=deltic.decode)
    with pytest.raises(ValueError, match="function: expected one of delta_rule, recurrent, decode"):
        deltic.explain(**named, function="encode")
    with pytest.raises(TypeError, match="beta: expected .*, got bool"):
        deltic.explain(**named, beta=torch.ones(2, 3, 1, dtype=torch.bool))


def test_counts_of_padding_rows_may_be_anything():
    """A row without slots is skipped: servers leave 0, or what was there, in its count."""
    named, table = rows(3, 2), torch.tensor([[1, 2], [0, 0], [-1, -1]])
    pool = torch.randn(3, HV, K, V)
    expected, other = pool.clone(), pool.clone()
    first = part(named, slice(0, 1))
    o = deltic.decode(
        **first, **gates(), state_pool=expected, read_index=table[:1], accepted=torch.tensor([2])
    )
    for rubbish in (0, 3, -(2**63), 2**63 - 1):
        pool = other.clone()
        counts = torch.tensor([2, rubbish, rubbish])
        call = dict(**named, **gates(), read_index=table, accepted=counts, null_slot=0)
        found = deltic.decode(**call, state_pool=pool)
        assert torch.equal(found[:1], o) and found[1:].count_nonzero() == 0
        assert torch.equal(pool[1:], expected[1:]) and torch.equal(pool[0], other[0])
        # Slots that are there are another matter, in the table or in a list of their own.
        for call["read_index"] in (table + 1, torch.tensor([[1, 2], [0, 0], [0, 1]])):
            with pytest.raises(ValueError, match="^decode: accepted: expected 1 to 2 accepted"):
                deltic.decode(**call, state_pool=pool)
    x, weight, windows = torch.randn(2, 2, 8), torch.randn(8, W), torch.randn(2, 8, W + 1)
    before, call = windows.clone(), dict(state_index=torch.tensor([1, -1]), null_slot=0)
    counts = torch.tensor([1, -(2**63)])
    y = deltic.causal_conv1d_update(x, windows, weight, accepted=counts, **call)
    alone = deltic.causal_conv1d_update(x[:1], before[1:], weight, accepted=counts[:1])
    assert torch.equal(y[:1], alone) and y[1].count_nonzero() == 0 and torch.equal(windows, before)


def test_checked_mode_does_not_look_at_skipped_rows(monkeypatch):
    monkeypatch.setenv("DELTIC_CHECKED", "1")
    named, pool = rows(2, 1), torch.zeros(2, HV, K, V)
    for name in named:
        named[name] = named[name].clone()
        named[name][1] = torch.nan
    o = deltic.decode(**named, **gates(), state_pool=pool, read_index=torch.tensor([1, -1]))
    assert o.isfinite().all() and pool.isfinite().all()
    plain = {**part(named, slice(None)), "g": named["g"].abs() * 1e5}  # grows beyond any sum
    plain["g"][0] = -1
    kind = dict(state_pool=pool, read_index=torch.tensor([1, -1]))
    assert deltic.delta_rule(**plain, **kind)[0].isfinite().all()
    with pytest.raises(ValueError, match="^decode: q: expected finite values, got nan at sequence"):
        deltic.decode(**named, **gates(), state_pool=pool, read_index=torch.tensor([1, 0]))
    x, windows = torch.full((2, 8), torch.nan), torch.zeros(2, 8, W - 1)
    x[0] = 1
    y = deltic.causal_conv1d_update(x, windows, torch.ones(8, W), state_index=torch.tensor([0, -1]))
    assert torch.equal(y, torch.stack((torch.ones(8), torch.zeros(8))))
