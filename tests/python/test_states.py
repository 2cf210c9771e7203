"""States from pool to pool, and drafted tokens that leave a record."""

import deltic
import pytest
import torch
from torch.library import opcheck

OPS = torch.ops.deltic


@pytest.mark.parametrize("layers", [0, 2])
@pytest.mark.parametrize("write_layout", ["kv", "vk"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_move(layers, write_layout, dtype):
    outer = (layers,) if layers else ()
    whole = torch.randn(*outer, 6, 4, 16, 24)
    size = (16, 24) if write_layout == "kv" else (24, 16)
    half = torch.full((*outer, 5, 3, *size), 7.0, dtype=dtype)
    read, write = torch.tensor([5, -1, 2], dtype=torch.int32), torch.tensor([0, 4, -1])
    deltic.move_states(
        whole,
        half,
        read_index=read,
        write_index=write,
        read_head=2,
        write_head=1,
        write_layout=write_layout,
    )
    expected = torch.full_like(half, 7.0)
    source = whole[..., 5, 2:, :, :]
    expected[..., 0, 1:, :, :] = (source if write_layout == "kv" else source.mT).to(dtype)
    expected[..., 4, 1:, :, :] = 0
    assert torch.equal(half, expected)


def test_move_within_one_pool():
    pool = torch.randn(6, 2, 8, 8)
    before = pool.clone()
    slots = torch.tensor([1, 1, 3])
    deltic.move_states(pool, read_index=slots, write_index=torch.tensor([0, 5, 2]), null_slot=0)
    assert torch.equal(pool[5], before[1]) and torch.equal(pool[2], before[3])
    assert torch.equal(pool[[0, 1, 3, 4]], before[[0, 1, 3, 4]])


def draft(gate="head", T=5, layers=2):
    torch.manual_seed(1)
    shapes = {"q": (3, T, 1, 16), "k": (3, T, 1, 16), "v": (3, T, 2, 24)}
    rows = {name: torch.randn(*shape) for name, shape in shapes.items()}
    rows["beta"] = torch.rand(3, T, 2)
    width = {"none": 0, "head": 1, "channel": 16}[gate]
    if gate != "none":
        rows["g"] = -torch.rand(*((3, T, 2) if gate == "head" else (3, T, 2, 16)))
    record = torch.empty(layers, 3, T, 2, 16 + 24 + width)
    return rows, torch.randn(layers, 4, 2, 16, 24), record


@pytest.mark.parametrize("gate", ["none", "head", "channel"])
@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_commit_has_the_bits_of_decode(gate, is_tree, dtype):
    rows, pools, records = draft(gate)
    pools = pools.to(dtype)
    slots = torch.tensor([2, 0, 3])
    parents = torch.tensor([[-1, 0, 0, 1, 2]] * 3) if is_tree else None
    kind = {"qk_l2norm": True, "read_index": slots}
    before = pools.clone()
    for layer in range(2):
        deltic.decode(
            **rows, **kind, state_pool=pools[layer], record=records[layer], parents=parents
        )
    assert torch.equal(pools, before)
    paths = [[0, 2, 4], [], [0]] if is_tree else [[0, 1, 2, 3, 4], [], [0]]
    deltic.commit(pools, records, torch.tensor([5, 0, 1]), read_index=slots, parents=parents)
    for n, path in enumerate(paths):
        for t in path:
            token = {name: x[n : n + 1, t : t + 1] for name, x in rows.items()}
            for layer in range(2):
                index = slots[n : n + 1]
                deltic.decode(**token, qk_l2norm=True, state_pool=before[layer], read_index=index)
    assert torch.equal(pools, before)


def test_opcheck():
    rows, pools, records = draft("channel")
    slots = torch.tensor([2, 0, 3])
    given = [rows.get(name) for name in ("q", "k", "v", "beta", "g")]
    opcheck(
        OPS.decode_record_.default,
        (*given, None, None, pools[0], slots, None, None, None, records[0], None, None, None),
    )
    deltic.decode(**rows, state_pool=pools[0], read_index=slots, record=records[0])
    accepted = torch.tensor([1, 2, 0])
    opcheck(OPS.commit_.default, (pools[0], records[0], accepted, slots, None, None, None))
    opcheck(OPS.move_.default, (pools[0], pools[1], slots, slots))


def test_compile():
    rows, pools, records = draft()
    slots, accepted = torch.tensor([2, 0, 3]), torch.tensor([3, 0, 5])

    def step(q, k, v, beta, g, pool, record):
        o = deltic.decode(q, k, v, beta=beta, g=g, state_pool=pool, read_index=slots, record=record)
        deltic.commit(pool, record, accepted, read_index=slots)
        deltic.move_states(pool, read_index=slots[:1], write_index=torch.tensor([1]))
        return o

    torch._dynamo.reset()
    tensors = tuple(rows.values())
    found, expected = (pools[0].clone(), records[0].clone()), (pools[0].clone(), records[0].clone())
    assert torch.equal(
        torch.compile(step, fullgraph=True)(*tensors, *found), step(*tensors, *expected)
    )
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])


def error(function, *args, **kwargs):
    with pytest.raises((ValueError, TypeError, NotImplementedError)) as info:
        function(*args, **kwargs)
    return str(info.value)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_errors_are_sentences(device):
    rows, pools, records = draft()
    rows = {name: x.to(device) for name, x in rows.items()}
    pool, record = pools[0].to(device), records[0].to(device)
    slots = torch.tensor([2, 0, 3], device=device)
    lists = {"read_index": slots, "write_index": slots}
    assert error(deltic.move_states, pool, pool.mT.contiguous(), **lists) == (
        "move_states: write_pool: expected states of K = 16 and V = 24 as state_pool has, got 24 "
        "and 16"
    )
    assert error(deltic.move_states, pool, pool[None].clone(), **lists).startswith(
        "move_states: write_pool: expected layers as state_pool has them, got shape [1, 4, 2, 16"
    )
    text = error(deltic.move_states, pool, read_index=slots, write_index=slots[:2])
    assert text == "move_states: write_index: expected shape [3], got [2]"
    assert error(deltic.move_states, pool, write_layout="vk", **lists) == (
        "move_states: write_layout: expected that of state_pool without a write_pool, got 'vk'"
    )
    assert error(deltic.move_states, pool, num_heads=0, **lists) == (
        "move_states: num_heads: expected at least 1, got 0"
    )
    assert error(deltic.commit, pool, record[..., :-2], slots) == (
        "commit: record: expected HV = 2 as state_pool has, and rows of K + V numbers, one or K "
        "more of a gate, K = 16, V = 24, got shape [3, 5, 2, 39]"
    )
    assert error(deltic.commit, pool, record, slots[:2]) == (
        "commit: accepted: expected shape [3], got [2]"
    )
    many = torch.empty(3, 17, 2, 41, device=device)
    assert error(deltic.commit, pool, many, slots) == (
        "commit: record: expected at most 16 drafted tokens T', got 17"
    )
    text = "decode: record: expected shape [3, 5, 2, 41], got [3, 5, 2, 40]"
    assert error(deltic.decode, **rows, state_pool=pool, record=record[..., 1:]) == text
    assert error(deltic.decode, **rows, state_pool=pool, record=record[:, :4]) == (
        "decode: record: expected at least T = 5 tokens T', got shape [3, 4, 2, 41]"
    )
    assert error(deltic.decode, **rows, state_pool=pool, record=record, write_index=slots) == (
        "decode: write_index: expected none with a record, got a tensor"
    )


def test_errors_of_values_and_gradients():
    _, pools, records = draft()
    records = torch.zeros_like(records)
    slots = torch.tensor([2, 0, 3])
    accepted = torch.tensor([0, 6, 0])
    assert error(deltic.commit, pools, records, accepted, read_index=slots) == (
        "commit: accepted: expected 0 to 5 accepted tokens, got 6 for sequence 1"
    )
    parents = torch.tensor([[-1, 0, 1, 2, 3]] * 2 + [[-1, 0, 1, 3, 3]])
    text = error(
        deltic.commit, pools, records, torch.tensor([0, 0, 5]), read_index=slots, parents=parents
    )
    assert text == (
        "commit: parents: expected a parent before its token, or -1, got 3 at sequence 2, token 3"
    )
    lists = {"read_index": slots, "write_index": slots}
    for function in (
        lambda pool: deltic.move_states(pool, **lists),
        lambda pool: deltic.commit(pool, records, accepted),
    ):
        assert "expected no gradients to be asked for" in error(
            function, pools.clone().requires_grad_()
        )
