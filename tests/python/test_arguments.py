"""Every argument of every public function does something, or is refused by its name."""

import inspect

import deltic
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

T, H, HV, K, V = 40, 2, 4, 16, 8
_GENERATOR = torch.Generator().manual_seed(0)


def randn(*shape):
    return torch.randn(shape, generator=_GENERATOR)


def rand(*shape):
    return torch.rand(shape, generator=_GENERATOR)


Q, X, VALUES = randn(1, T, H, K), randn(1, T, H, K), randn(1, T, HV, V)
KEYS = torch.nn.functional.normalize(X, dim=-1)
BETA, G, GV = rand(1, T, HV), -rand(1, T, HV), -rand(1, T, HV, V)
CUMULATIVE = deltic.chunk_cumsum(G, chunk_size=16)
SQUARE = 0.1 * randn(1, T, HV, 16)
STATE = randn(1, HV, K, V)
POOL = randn(3, HV, K, V)
CU = torch.tensor([0, 15, T])
A_LOG, DT_BIAS = rand(HV), randn(HV)
ENTRY = (torch.tensor([0, 1]), torch.tensor([16]), torch.tensor([1]))

# What a function is called with where nothing else is said.
BASE = {
    "delta_rule": dict(q=Q, k=KEYS, v=VALUES, beta=BETA, g=G),
    "recurrent": dict(q=Q, k=KEYS, v=VALUES, beta=BETA, g=G),
    "decode": dict(q=Q, k=KEYS, v=VALUES, beta=BETA, g=G, state_pool=POOL),
    "chunk_cumsum": dict(g=G),
    "log_decay": dict(g=G),
    "l2norm": dict(x=Q),
    "kkt": dict(k=KEYS, g=CUMULATIVE, beta=BETA, chunk_size=16),
    "scores": dict(q=Q, k=KEYS, g=CUMULATIVE, chunk_size=16),
    "inverse": dict(a=SQUARE),
    "scores_inverse": dict(q=Q, k=KEYS, g=CUMULATIVE, beta=BETA, chunk_size=16),
    "wy": dict(k=KEYS, a=SQUARE, v=VALUES, g=CUMULATIVE, beta=BETA, q=Q, output_kg=True),
}
SEQUENCES = ("delta_rule", "recurrent", "decode")
BLOCKS = tuple(name for name in BASE if name not in SEQUENCES)

SOFTPLUS = dict(gate="softplus", A_log=A_LOG)
BOUNDED = dict(gate="bounded", lower_bound=-2.0)


def run(function, **changes):
    """Outputs of a call, the tensors that it writes to, and the gradients that are asked for."""
    given = {**BASE[function], **changes}
    written = []
    if given.get("state_pool") is not None:
        given["state_pool"] = given["state_pool"].clone()
        written.append(given["state_pool"])
    if isinstance(given.get("checkpoints"), tuple):
        *lists, states = given["checkpoints"]
        given["checkpoints"] = (*lists, states.clone())
        written.append(given["checkpoints"][3])
    out = getattr(deltic, function)(**given)
    outputs = out if isinstance(out, tuple) else (out,)
    asked = [x for x in given.values() if isinstance(x, torch.Tensor) and x.requires_grad]
    gradients = torch.autograd.grad(outputs[0].square().sum(), asked) if asked else ()
    return [*outputs, *written, *gradients]


def same(a, b):
    return all(
        (x is None) == (y is None)
        and (x is None or (x.dtype == y.dtype and x.shape == y.shape and torch.equal(x, y)))
        for x, y in zip(a, b, strict=True)
    )


# ---- What each argument does: the first and the second call of a pair differ ------------------

EVERY_SEQUENCE = {
    "q": ({}, dict(q=2 * Q)),
    "k": ({}, dict(k=0.5 * KEYS)),
    "v": ({}, dict(v=2 * VALUES)),
    "beta": ({}, dict(beta=None)),
    "g": ({}, dict(g=None)),
    "scale": ({}, dict(scale=0.5)),
    "cu_seqlens": ({}, dict(cu_seqlens=CU)),
    "gate": ({}, SOFTPLUS),
    "A_log": (SOFTPLUS, dict(SOFTPLUS, A_log=2 * A_LOG)),
    "dt_bias": (SOFTPLUS, dict(SOFTPLUS, dt_bias=DT_BIAS)),
    "lower_bound": (BOUNDED, dict(BOUNDED, lower_bound=-3.0)),
    "beta_form": ({}, dict(beta_form="2sigmoid")),
    "qk_l2norm": (dict(k=X), dict(k=X, qk_l2norm=True)),
}
WITH_SQUARE_STATE = dict(v=randn(1, T, HV, K), state_pool=randn(1, HV, K, K))
CHECKPOINTS = (*ENTRY, torch.zeros(2, HV, K, V))
ASKED = dict(q=Q.clone().requires_grad_())
NEVER = torch.tensor([False])
ONE, TWO = torch.tensor([1]), torch.tensor([2])
MOVED = dict(state_pool=POOL, read_index=TWO, write_index=ONE)
DRAFTS = dict(state_pool=POOL, read_index=torch.tensor([[0, 1]]), write_index=TWO)
SERVERS = {
    "write_pool": (MOVED, dict(MOVED, write_pool=torch.zeros_like(POOL))),
    "has_initial_state": (MOVED, dict(MOVED, has_initial_state=NEVER)),
    "accepted": (dict(DRAFTS, accepted=ONE), dict(DRAFTS, accepted=TWO)),
    "null_slot": (MOVED, dict(MOVED, null_slot=1)),
}
BEGUN = dict(initial_state=STATE)
# Three tokens with a slot each: one after the other, or all from the start.
FEW = dict(q=Q[:, :3], k=KEYS[:, :3], v=VALUES[:, :3], beta=BETA[:, :3], g=G[:, :3])
CHAIN = torch.tensor([[-1, 0, 1]])
TREE = dict(FEW, state_pool=POOL, read_index=torch.tensor([-1]), write_index=CHAIN + 1)
HALF = dict(state_pool=POOL.bfloat16(), read_index=ONE)
# With a record of what the tokens do the pool stays as it is.
RECORDED = dict(FEW, state_pool=POOL, read_index=torch.tensor([0]))
RECORD = torch.zeros(1, 3, HV, K + V + 1)
EFFECTS = {
    "delta_rule": EVERY_SEQUENCE
    | {
        "form": ({}, dict(form="recurrent")),
        "recurrent_from": ({}, dict(recurrent_from=ONE)),
        "initial_state": ({}, dict(initial_state=STATE)),
        "output_final_state": ({}, dict(output_final_state=True)),
        "state_layout": (
            dict(output_final_state=True),
            dict(output_final_state=True, state_layout="vk"),
        ),
        # The forward of fp32 steps over 16 tokens whatever this says; the gradients go by chunks.
        "chunk_size": (ASKED, dict(ASKED, chunk_size=16)),
        "checkpoints": (
            dict(checkpoints=(*ENTRY[:2], torch.tensor([0]), CHECKPOINTS[3])),
            dict(checkpoints=CHECKPOINTS),
        ),
        "state_pool": (dict(state_pool=POOL), dict(state_pool=2 * POOL)),
        "read_index": (dict(state_pool=POOL), dict(state_pool=POOL, read_index=torch.tensor([2]))),
        "write_index": (
            dict(state_pool=POOL, read_index=torch.tensor([2])),
            dict(state_pool=POOL, read_index=torch.tensor([2]), write_index=torch.tensor([1])),
        ),
    }
    | SERVERS,
    "recurrent": EVERY_SEQUENCE
    | {
        "has_initial_state": (BEGUN, dict(BEGUN, has_initial_state=NEVER)),
        "gv": ({}, dict(gv=GV)),
        "initial_state": ({}, dict(initial_state=STATE)),
        "output_final_state": ({}, dict(output_final_state=True)),
        "state_layout": (
            dict(output_final_state=True),
            dict(output_final_state=True, state_layout="vk"),
        ),
    },
    "decode": EVERY_SEQUENCE
    | {
        "gv": ({}, dict(gv=GV)),
        "state_pool": ({}, dict(state_pool=2 * POOL)),
        "read_index": ({}, dict(read_index=torch.tensor([2]))),
        "write_index": (
            dict(read_index=torch.tensor([0])),
            dict(read_index=torch.tensor([0]), write_index=torch.tensor([1])),
        ),
        "state_layout": (WITH_SQUARE_STATE, dict(WITH_SQUARE_STATE, state_layout="vk")),
    }
    | SERVERS
    | {
        "record": (RECORDED, dict(RECORDED, record=RECORD)),
        "parents": (dict(TREE, parents=CHAIN), dict(TREE, parents=0 * CHAIN - 1)),
        "seed": (HALF, dict(HALF, seed=1)),
        "positions": (dict(HALF, seed=1), dict(HALF, seed=1, positions=ONE)),
    },
    "chunk_cumsum": {
        "g": ({}, dict(g=2 * G)),
        "scale": ({}, dict(scale=0.5)),
        "gate": ({}, SOFTPLUS),
        "A_log": (SOFTPLUS, dict(SOFTPLUS, A_log=2 * A_LOG)),
        "dt_bias": (SOFTPLUS, dict(SOFTPLUS, dt_bias=DT_BIAS)),
        "lower_bound": (BOUNDED, dict(BOUNDED, lower_bound=-3.0)),
        "reverse": ({}, dict(reverse=True)),
        "chunk_size": ({}, dict(chunk_size=16)),
        "cu_seqlens": ({}, dict(cu_seqlens=CU)),
        "dtype": ({}, dict(dtype=torch.bfloat16)),
    },
    "log_decay": {
        "g": ({}, dict(g=2 * G)),
        "gate": ({}, SOFTPLUS),
        "A_log": (SOFTPLUS, dict(SOFTPLUS, A_log=2 * A_LOG)),
        "dt_bias": (SOFTPLUS, dict(SOFTPLUS, dt_bias=DT_BIAS)),
        "lower_bound": (BOUNDED, dict(BOUNDED, lower_bound=-3.0)),
        "cu_seqlens": ({}, dict(cu_seqlens=torch.tensor([0, 15]))),  # the rest is padding
        "dtype": ({}, dict(dtype=torch.bfloat16)),
    },
    "l2norm": {
        "x": ({}, dict(x=2 * Q)),
        "cu_seqlens": ({}, dict(cu_seqlens=torch.tensor([0, 15]))),
        "dtype": ({}, dict(dtype=torch.bfloat16)),
    },
    "kkt": {
        "k": ({}, dict(k=2 * KEYS)),
        "g": ({}, dict(g=None)),
        "beta": ({}, dict(beta=None)),
        "chunk_size": ({}, dict(chunk_size=32)),
        "cu_seqlens": ({}, dict(cu_seqlens=CU)),
        "dtype": ({}, dict(dtype=torch.bfloat16)),
    },
    "scores": {
        "q": ({}, dict(q=2 * Q)),
        "k": ({}, dict(k=2 * KEYS)),
        "g": ({}, dict(g=None)),
        "scale": ({}, dict(scale=0.5)),
        "chunk_size": ({}, dict(chunk_size=32)),
        "cu_seqlens": ({}, dict(cu_seqlens=CU)),
        "dtype": ({}, dict(dtype=torch.bfloat16)),
    },
    "scores_inverse": {
        "q": ({}, dict(q=2 * Q)),
        "k": ({}, dict(k=2 * KEYS)),
        "g": ({}, dict(g=None)),
        "beta": ({}, dict(beta=None)),
        "scale": ({}, dict(scale=0.5)),
        "chunk_size": ({}, dict(chunk_size=32)),
        "cu_seqlens": ({}, dict(cu_seqlens=CU)),
        "dtype": ({}, dict(dtype=torch.bfloat16)),
    },
    "inverse": {
        "a": ({}, dict(a=2 * SQUARE)),
        "cu_seqlens": ({}, dict(cu_seqlens=CU)),
        "dtype": ({}, dict(dtype=torch.bfloat16)),
    },
    "wy": {
        "k": ({}, dict(k=2 * KEYS)),
        "a": ({}, dict(a=2 * SQUARE)),
        "v": ({}, dict(v=None)),
        "g": ({}, dict(g=None)),
        "beta": ({}, dict(beta=None)),
        "q": ({}, dict(q=None)),
        "output_kg": ({}, dict(output_kg=False)),
        "cu_seqlens": ({}, dict(cu_seqlens=CU)),
        "dtype": ({}, dict(dtype=torch.bfloat16)),
    },
}
# Arguments that say how, not what: any bit that they changed would be an error.
COPY = {"cu_seqlens_cpu": (dict(cu_seqlens=CU), dict(cu_seqlens=CU, cu_seqlens_cpu=CU.clone()))}
OUT = {"out": ({}, dict(out=torch.full((1, T, HV, V), float("nan"))))}
SAME_BITS = {name: COPY | OUT if name in SEQUENCES else COPY for name in BASE}
for name in BLOCKS:
    results = getattr(deltic, name)(**BASE[name])
    empty = tuple(x * float("nan") for x in results) if isinstance(results, tuple) else results * 0
    SAME_BITS[name] = COPY | {"out": ({}, dict(out=empty))}
SAME_BITS["delta_rule"] |= {
    "split": ({}, dict(split="off")),
    "recompute": ({}, dict(recompute=False)),
}


def both(function, pair):
    return [run(function, **changes) for changes in pair]


@pytest.mark.parametrize(
    ("function", "argument"), [(f, a) for f, table in EFFECTS.items() for a in table]
)
def test_an_argument_has_its_effect(function, argument):
    first, second = both(function, EFFECTS[function][argument])
    assert not same(first, second)


@pytest.mark.parametrize(
    ("function", "argument"), [(f, a) for f, table in SAME_BITS.items() for a in table]
)
def test_an_argument_that_says_how_changes_no_bit(function, argument):
    first, second = both(function, SAME_BITS[function][argument])
    assert same(first, second)


@pytest.mark.parametrize("function", BASE)
def test_a_named_implementation_is_the_one_that_runs(function, capfd, monkeypatch):
    default = run(function)
    monkeypatch.setenv("DELTIC_LOG", "dispatch")
    plain = run(function, impl="cpu.plain")
    chosen = {line.split()[2] for line in capfd.readouterr().err.splitlines() if "chosen" in line}
    assert chosen == {"cpu.plain:"}
    for x, y in zip(default, plain, strict=True):
        assert x is y is None or torch.allclose(x, y, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("function", ("delta_rule", "chunk_cumsum"))
@pytest.mark.parametrize(
    "name", ("", "cpu.plain ", "cpu.plain\nfinal", "cpu.plain\0", "cpu.\ud800")
)
def test_what_is_no_name_of_an_implementation(function, name):
    with pytest.raises(ValueError, match=f"{function}: impl: expected an implementation's name"):
        run(function, impl=name)


# ---- What each argument refuses ---------------------------------------------------------------

LISTS = {
    "cu_seqlens": (dict(cu_seqlens=torch.tensor([0, T + 1])), ValueError, "cu_seqlens: expected"),
    "cu_seqlens_cpu": (dict(cu_seqlens_cpu=CU), ValueError, "expected none without cu_seqlens"),
    "impl": (dict(impl="none"), ValueError, "impl: expected one of"),
}
GATES = {
    "gate": (dict(gate="relu"), ValueError, "gate: expected one of 'log_decay'"),
    "A_log": (dict(A_log=A_LOG), ValueError, "A_log: expected none with the gate form log_decay"),
    "dt_bias": (dict(dt_bias=DT_BIAS), ValueError, "dt_bias: expected none with the gate form"),
    "lower_bound": (dict(lower_bound=-1.0), ValueError, "expected none without the gate form"),
}
OUTPUT = {
    "dtype": (dict(dtype=torch.int8), TypeError, "dtype: expected fp32, bf16 or fp16"),
    "out": (dict(out=1), TypeError, "out: expected .*, got 1$"),
}
CHUNK = {"chunk_size": (dict(chunk_size=48), ValueError, "chunk_size: expected 16, 32 or 64")}
SCALE = {"scale": (dict(scale=float("nan")), ValueError, "scale: expected a finite number")}
FINAL = {
    "initial_state": (dict(initial_state=POOL), ValueError, "initial_state: expected shape"),
    "output_final_state": (dict(output_final_state="no"), TypeError, "expected a bool, got 'no'"),
}
POOLS = {
    "read_index": (
        dict(state_pool=POOL, read_index=torch.tensor([7])),
        ValueError,
        "read_index: expected",
    ),
    "write_index": (
        dict(state_pool=POOL, read_index=torch.tensor([0]), write_index=torch.tensor([0.0])),
        TypeError,
        "write_index: expected int32 or int64",
    ),
}
EVERY_REFUSAL = (
    {name: (dict([(name, None)]), TypeError, f"{name}: expected a tensor") for name in "qkv"}
    | {
        "beta": (dict(beta=BETA[0]), ValueError, "beta: expected shape"),
        "g": (dict(g=G[0]), ValueError, "g: expected shape"),
        "beta_form": (dict(beta_form="tanh"), ValueError, "beta_form: expected one of"),
        "qk_l2norm": (dict(qk_l2norm="no"), TypeError, "qk_l2norm: expected a bool, got 'no'"),
        "state_layout": (dict(state_layout="hv"), ValueError, "state_layout: expected one of"),
    }
    | LISTS
    | GATES
    | SCALE
)
COLUMNS = {"gv": (dict(gv=G), ValueError, "gv: expected shape")}
BEGINS = {
    "has_initial_state": (
        dict(initial_state=STATE, has_initial_state=torch.tensor([True, False])),
        ValueError,
        r"has_initial_state: expected shape \[1\], got \[2\]",
    ),
    "out": (dict(out=torch.empty(1, T, HV, V + 1)), ValueError, "out: expected shape"),
}
DRAFTED = {
    "write_pool": (
        dict(MOVED, write_pool=POOL[..., :1]),
        ValueError,
        "write_pool: expected shape",
    ),
    "accepted": (dict(DRAFTS, accepted=torch.tensor([3])), ValueError, "accepted: expected 1 to 2"),
    "null_slot": (dict(MOVED, null_slot=True), TypeError, "null_slot: expected an int, got True"),
}
REFUSALS = {
    "delta_rule": EVERY_REFUSAL
    | FINAL
    | CHUNK
    | POOLS
    | BEGINS
    | DRAFTED
    | {
        "split": (dict(split=0), ValueError, "split: expected a number of tokens above 0"),
        "recompute": (dict(recompute="no"), TypeError, "recompute: expected a bool, got 'no'"),
        "form": (dict(form="rnn"), ValueError, "form: expected one of 'chunked', 'recurrent'"),
        "recurrent_from": (
            dict(recurrent_from=torch.tensor([-1])),
            ValueError,
            f"recurrent_from: expected 0 to {T}, the length of sequence 0, got -1",
        ),
        "checkpoints": (dict(checkpoints=5), ValueError, r"checkpoints: expected \(cu, tokens"),
        "state_pool": (dict(state_pool=POOL[..., 0]), ValueError, "state_pool: expected shape"),
    },
    "recurrent": EVERY_REFUSAL | FINAL | COLUMNS | BEGINS,
    "decode": EVERY_REFUSAL
    | POOLS
    | COLUMNS
    | BEGINS
    | DRAFTED
    | {
        "parents": (
            dict(TREE, parents=CHAIN + 1),
            ValueError,
            "parents: expected a parent before its token",
        ),
        "record": (
            dict(RECORDED, record=RECORD[..., 1:]),
            ValueError,
            "record: expected shape",
        ),
        "seed": (dict(HALF, seed=-1), ValueError, "seed: expected a number of 0 to 2.64 - 1"),
        "positions": (
            dict(HALF, positions=ONE),
            ValueError,
            "positions: expected none without a seed, got a tensor",
        ),
        "has_initial_state": (
            dict(has_initial_state=torch.tensor([True, False])),
            ValueError,
            "has_initial_state: expected shape",
        ),
        "state_pool": (
            dict(state_pool=None),
            TypeError,
            "state_pool: expected a tensor, got none",
        ),
    },
    "chunk_cumsum": {"g": (dict(g=G[0]), ValueError, "g: expected shape")}
    | LISTS
    | GATES
    | SCALE
    | CHUNK
    | OUTPUT
    | {"reverse": (dict(reverse=1), TypeError, "reverse: expected a bool, got 1")},
    "log_decay": {"g": (dict(g=G[0]), ValueError, "g: expected shape")} | LISTS | GATES | OUTPUT,
    "l2norm": {"x": (dict(x=None), TypeError, "x: expected a tensor, got none")} | LISTS | OUTPUT,
    "kkt": {
        "k": (dict(k=Q[0]), ValueError, "k: expected shape"),
        "g": (dict(g=-rand(1, T, 3), beta=None), ValueError, "g: expected a number of value heads"),
        "beta": (dict(beta=rand(1, T, 3), g=None), ValueError, "beta: expected a number of value"),
    }
    | LISTS
    | CHUNK
    | OUTPUT,
    "scores": {
        "q": (dict(q=Q[0]), ValueError, "q: expected shape"),
        "k": (dict(k=Q[0]), ValueError, "k: expected shape"),
        "g": (dict(g=-rand(1, T, 3)), ValueError, "g: expected a number of value heads"),
    }
    | LISTS
    | SCALE
    | CHUNK
    | OUTPUT,
    "scores_inverse": {
        "q": (dict(q=Q[0]), ValueError, "q: expected shape"),
        "k": (dict(k=Q[0]), ValueError, "k: expected shape"),
        "g": (dict(g=-rand(1, T, 3), beta=None), ValueError, "g: expected a number of value heads"),
        "beta": (dict(beta=rand(1, T, 3), g=None), ValueError, "beta: expected a number of value"),
    }
    | LISTS
    | SCALE
    | CHUNK
    | OUTPUT,
    "inverse": {"a": (dict(a=SQUARE[..., :5]), ValueError, "a: expected a width of 16, 32 or 64")}
    | LISTS
    | OUTPUT,
    "wy": {
        "k": (dict(k=Q[0]), ValueError, "k: expected shape"),
        "a": (dict(a=SQUARE[..., :5]), ValueError, "a: expected"),
        "v": (dict(v=VALUES[:, :3]), ValueError, "v: expected shape"),
        "g": (dict(g=-rand(1, T, 3)), ValueError, "g: expected shape"),
        "beta": (dict(beta=rand(1, T, 3)), ValueError, "beta: expected shape"),
        "q": (dict(q=Q[:, :3]), ValueError, "q: expected shape"),
        "output_kg": (dict(output_kg="no"), TypeError, "output_kg: expected a bool, got 'no'"),
    }
    | LISTS
    | OUTPUT,
}


@pytest.mark.parametrize(
    ("function", "argument"), [(f, a) for f, table in REFUSALS.items() for a in table]
)
def test_a_wrong_argument_is_refused_by_name(function, argument):
    changes, kind, text = REFUSALS[function][argument]
    pool = POOL.clone()
    with pytest.raises(kind, match=text) as error:
        run(function, **changes)
    assert str(error.value).startswith(f"{function}: {argument}: expected ")
    assert ", got " in str(error.value) and torch.equal(pool, POOL)


# ---- Meta tensors: the same words ---------------------------------------------------------------

ONE_SEQUENCE = dict(cu_seqlens=torch.tensor([0, T]), cu_seqlens_cpu=torch.tensor([0, T]))
FORMED = dict(SOFTPLUS, dt_bias=DT_BIAS)
STATES = dict(ONE_SEQUENCE, initial_state=STATE, output_final_state=True)
INDEXED = dict(state_pool=POOL, read_index=torch.tensor([0]), write_index=torch.tensor([1]))
CONV = dict(x=randn(2, 9, 6), weight=randn(6, 4), bias=randn(6))
# A tree of four drafted tokens, as servers call it.
DRAFTS = dict(
    {name: x[:, :4] for name, x in BASE["decode"].items() if name in ("q", "k", "v", "beta", "g")},
    state_pool=randn(5, *POOL.shape[1:]),
    read_index=torch.tensor([4]),
    write_index=torch.tensor([[0, 1, 2, 3]]),
    write_pool=randn(5, *POOL.shape[1:]),
    has_initial_state=torch.tensor([True]),
    parents=torch.tensor([[-1, 0, 0, 2]]),
    out=randn(1, 4, HV, V),
)
ROUNDED = dict(
    {name: DRAFTS[name] for name in ("q", "k", "v", "beta", "g")},
    state_pool=randn(1, *POOL.shape[1:]).bfloat16(),
    positions=torch.tensor([7]),
    seed=3,
)
# Calls that together have every tensor argument.
CALLS = [
    ("delta_rule", dict(BASE["delta_rule"], **FORMED, **STATES)),
    ("delta_rule", dict(BASE["delta_rule"], g=-rand(1, T, HV, K), **INDEXED)),
    ("delta_rule", dict(BASE["delta_rule"], checkpoints=CHECKPOINTS)),
    ("recurrent", dict(BASE["recurrent"], **FORMED, **STATES, gv=GV)),
    ("recurrent", dict(BASE["recurrent"], beta=rand(1, T, HV, V))),
    ("decode", dict(BASE["decode"], **INDEXED, gv=GV)),
    ("decode", dict(BASE["decode"], **INDEXED | dict(write_index=-torch.ones(1, T).long()))),
    ("chunk_cumsum", dict(BASE["chunk_cumsum"], **FORMED, **ONE_SEQUENCE)),
    ("log_decay", dict(BASE["log_decay"], **FORMED, **ONE_SEQUENCE)),
    *((name, dict(BASE[name], **ONE_SEQUENCE)) for name in BLOCKS[2:]),
    ("kkt", dict(BASE["kkt"], g=None)),
    *(
        (name, dict(BASE[name], out=getattr(deltic, name)(**BASE[name]).clone()))
        for name in ("chunk_cumsum", "log_decay", "kkt", "scores", "inverse")
    ),
    ("causal_conv1d", dict(CONV, initial_state=randn(2, 6, 3), output_final_state=True)),
    ("causal_conv1d_update", dict(CONV, state=randn(2, 6, 3), state_index=torch.tensor([0, 1]))),
    (
        "causal_conv1d_update",
        dict(CONV, x=randn(2, 6), weight=randn(6, 1, 4), state=randn(2, 6, 3)),
    ),
    ("delta_rule", dict(BASE["delta_rule"], out=randn(1, T, HV, V))),
    ("recurrent", dict(BASE["recurrent"], out=randn(1, T, HV, V))),
    ("decode", DRAFTS),
    ("decode", ROUNDED),
    ("decode", dict(DRAFTS, read_index=torch.tensor([[4, 1, 2, 3]]), accepted=torch.tensor([2]))),
    *(
        ("causal_conv1d_update", dict(CONV, x=x, state=randn(2, 6, 3), out=x.clone()))
        for x in (randn(2, 6), randn(2, 1, 6))
    ),
]
OTHER_RANKS = (
    lambda x: x[0],
    lambda x: x[None],
    lambda x: x[..., None],
    lambda x: x.flatten()[0],
    lambda x: x[..., :-1],
    lambda x: torch.cat((x, x)),
    lambda x: x,
)


def answer(function, given, device):
    """What a call says, or the shapes that it gives."""

    def move(x):
        return x.clone().to(device) if isinstance(x, torch.Tensor) else x

    moved = {
        name: tuple(map(move, x)) if isinstance(x, tuple) else move(x)
        for name, x in given.items()
        if name != "cu_seqlens_cpu"
    }
    if "cu_seqlens_cpu" in given:
        moved["cu_seqlens_cpu"] = given["cu_seqlens_cpu"]
    try:
        out = getattr(deltic, function)(**moved)
    except Exception as error:
        return type(error), str(error)
    return [None if x is None else x.shape for x in (out if isinstance(out, tuple) else (out,))]


@pytest.mark.parametrize(
    ("function", "given", "argument"),
    [
        pytest.param(function, given, argument, id=f"{function}{i}-{argument}")
        for i, (function, given) in enumerate(CALLS)
        for argument, x in given.items()
        if isinstance(x, torch.Tensor)
    ],
)
def test_meta_tensors_of_another_rank_are_refused_alike(function, given, argument):
    for change in OTHER_RANKS:
        changed = {**given, argument: change(given[argument])}
        assert answer(function, changed, "meta") == answer(function, changed, "cpu")


@pytest.mark.parametrize("at", range(4))
def test_meta_checkpoints_of_another_rank_are_refused_alike(at):
    for change in OTHER_RANKS:
        changed = tuple(change(x) if i == at else x for i, x in enumerate(CHECKPOINTS))
        given = dict(BASE["delta_rule"], checkpoints=changed)
        assert answer("delta_rule", given, "meta") == answer("delta_rule", given, "cpu")


@pytest.mark.parametrize(
    ("function", "argument"),
    [(f, a) for f in BASE for a in ("q", "k", "v", "a", "x") if BASE[f].get(a) is not None],
)
def test_meta_tensors_that_are_missing_are_refused_alike(function, argument):
    given = {**BASE[function], argument: None}
    assert answer(function, given, "meta") == answer(function, given, "cpu")


def test_what_a_wrong_rank_says():
    """In words: the comparisons above would also pass if both sides said nothing."""
    for device in ("cpu", "meta"):
        for function, changes, text in (
            (
                "delta_rule",
                dict(q=Q[0]),
                "delta_rule: q: expected shape [B,T,H,K], got [40, 2, 16]",
            ),
            ("kkt", dict(beta=BETA[0]), "kkt: beta: expected shape [1, 40, 4], got [40, 4]"),
            ("wy", dict(a=SQUARE[0]), "wy: a: expected shape [B,T,HV,W], got [40, 4, 16]"),
            (
                "recurrent",
                dict(g=G[0]),
                "recurrent: g: expected shape [B,T,HV] or [B,T,HV,K], got [40, 4]",
            ),
        ):
            assert answer(function, BASE[function] | changes, device) == (ValueError, text)
    with FakeTensorMode(), pytest.raises(ValueError, match="k: expected shape .B,T,H,K., got"):
        deltic.kkt(torch.empty(T, H, K))


def test_symbolic_sizes_are_compared_by_rank_alone():
    def call(k, g):
        return deltic.kkt(k, g=g, chunk_size=16)

    torch._dynamo.reset()
    compiled = torch.compile(call, backend="eager", fullgraph=True, dynamic=True)
    for tokens in (T, 33, 17):
        k, g = KEYS[:, :tokens], CUMULATIVE[:, :tokens]
        assert torch.equal(compiled(k, g), call(k, g))
    with pytest.raises(Exception, match=r"kkt: k: expected shape \[B,T,H,K\], got \["):
        compiled(KEYS[0], CUMULATIVE)


@pytest.mark.parametrize("function", BASE)
def test_the_tables_have_every_argument(function):
    arguments = set(inspect.signature(getattr(deltic, function)).parameters)
    assert set(EFFECTS[function]) | set(SAME_BITS[function]) | {"impl"} == arguments
    assert set(REFUSALS[function]) == arguments


# ---- Combinations -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("split", "off"),
        ("chunk_size", 32),
        ("recompute", False),
        ("checkpoints", CHECKPOINTS),
        ("state_pool", POOL),
        ("read_index", torch.tensor([0])),
        ("write_index", torch.tensor([0])),
        ("write_pool", POOL),
        ("accepted", torch.tensor([1])),
        ("null_slot", 0),
        ("form", "chunked"),
        ("recurrent_from", torch.tensor([0])),
    ],
)
def test_the_recurrent_form_behind_delta_rule_ignores_nothing(argument, value):
    beta = rand(1, T, HV, V)
    o, _ = deltic.delta_rule(Q, KEYS, VALUES, beta=beta)
    assert torch.equal(o, deltic.recurrent(Q, KEYS, VALUES, beta=beta)[0])
    with pytest.raises(
        ValueError, match=f"^delta_rule: {argument}: expected .* beta per value column"
    ):
        deltic.delta_rule(Q, KEYS, VALUES, beta=beta, **{argument: value})


@pytest.mark.parametrize("argument", ["read_index", "write_index"])
def test_an_index_needs_a_pool(argument):
    with pytest.raises(
        ValueError, match=f"^delta_rule: {argument}: expected none without a state pool"
    ):
        deltic.delta_rule(Q, KEYS, VALUES, **{argument: torch.tensor([0])})


def test_tensors_that_are_written_require_no_gradient():
    pool = POOL.clone().requires_grad_()
    for function in ("delta_rule", "decode"):
        with pytest.raises(
            ValueError, match=f"{function}: state_pool: expected none where gradients"
        ):
            run(function, state_pool=pool)
    with pytest.raises(ValueError, match="checkpoints.states: expected a tensor that requires no"):
        run("delta_rule", checkpoints=(*ENTRY, torch.zeros(2, HV, K, V).requires_grad_()))
    with torch.no_grad():
        run("decode", state_pool=pool)


@pytest.mark.parametrize(
    "function", ["delta_rule", "recurrent", "decode", "chunk_cumsum", "scores"]
)
def test_a_number_is_no_tensor(function):
    """torch would read the number and drop the gradient."""
    with pytest.raises(TypeError, match=": scale: expected a float, got a tensor"):
        run(function, scale=torch.tensor(0.5, requires_grad=True))
    with pytest.raises(TypeError, match=": scale: expected a float, got '1'"):
        run(function, scale="1")
    with pytest.raises(TypeError, match=": scale: expected a float, got True"):
        run(function, scale=True)


INDICES = ("cu_seqlens", "cu_seqlens_cpu", "read_index", "write_index")


@pytest.mark.parametrize("dtype", [torch.complex64, torch.bool, torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize(
    "function", ["delta_rule", "recurrent", "decode", "kkt", "chunk_cumsum", "wy"]
)
def test_dtypes_that_the_library_has_no_number_for(function, dtype):
    """Only what the argument may be is listed."""
    for argument, x in BASE[function].items():
        if not isinstance(x, torch.Tensor):
            continue
        expected = "fp32, bf16 or fp16"
        if argument in INDICES:
            expected = "int32 or int64"
        with pytest.raises(TypeError) as error, torch.no_grad():
            run(function, **{argument: torch.zeros(x.shape, dtype=dtype)})
        name = str(dtype).removeprefix("torch.")
        assert str(error.value) == f"{function}: {argument}: expected {expected}, got {name}"


def test_dtypes_of_indices():
    offsets = torch.tensor([0, T])
    with pytest.raises(TypeError, match="^delta_rule: cu_seqlens: expected int32 or int64, got bo"):
        run("delta_rule", cu_seqlens=offsets.bool())
    with pytest.raises(
        TypeError, match="^delta_rule: cu_seqlens_cpu: expected int32 or int64, got"
    ):
        run("delta_rule", cu_seqlens=offsets, cu_seqlens_cpu=offsets.to(torch.int16))
    with pytest.raises(
        TypeError, match="^decode: read_index: expected int32 or int64, got complex"
    ):
        run("decode", read_index=torch.zeros(1, dtype=torch.complex64))
    with pytest.raises(TypeError, match="^causal_conv1d: x: expected fp32, bf16 or fp16, got comp"):
        deltic.causal_conv1d(torch.zeros(1, 8, 4, dtype=torch.complex64), torch.zeros(4, 3))


def test_what_is_no_tensor_is_shown():
    for value, text in ((True, "True"), (0, "0"), ("x", "'x'"), ([1], "list"), (1j, "complex")):
        with pytest.raises(TypeError, match=f"^delta_rule: g: expected a tensor, got {text}$"):
            deltic.delta_rule(Q, KEYS, VALUES, g=value)
        with pytest.raises(
            TypeError, match=f"^causal_conv1d: bias: expected a tensor, got {text}$"
        ):
            deltic.causal_conv1d(Q[:, :, 0], torch.zeros(K, 3), value)


@pytest.mark.parametrize("gradients", [False, True])
def test_out_of_memory(gradients, capfd):
    """The bytes that were asked for, and no stack of C++ frames."""
    x = torch.zeros(1, 1, 1, 64).expand(1, 2**40, 1, 64)  # no memory; o would need 2**48 bytes
    weight = torch.zeros(64, 4, requires_grad=gradients)
    beta = torch.zeros(1, 1, 1, requires_grad=gradients).expand(1, 2**40, 1)
    for call, name in (
        (lambda: deltic.delta_rule(x, x, x, beta=beta), "delta_rule"),
        (lambda: deltic.recurrent(x, x, x, beta=beta), "recurrent"),
        (lambda: deltic.causal_conv1d(x[:, :, 0], weight), "causal_conv1d"),
        (lambda: deltic.l2norm(x), "l2norm"),
    ):
        with pytest.raises(MemoryError, match=rf"^{name}: memory: expected {2**48} bytes on the C"):
            call()
    assert "frame #" not in capfd.readouterr().err


def test_checkpoints_of_other_kinds():
    states = CHECKPOINTS[3]
    for given, text in (
        ((*ENTRY, None), "checkpoints.states: expected a tensor, got none"),
        ((None,) * 4, "checkpoints.cu: expected a tensor, got none"),
        ((*ENTRY[:2], [1], states), "checkpoints.slots: expected a tensor, got list"),
    ):
        with pytest.raises(TypeError, match=f"^delta_rule: {text}"):
            deltic.delta_rule(Q, KEYS, VALUES, checkpoints=given)


def test_a_device_without_gradients(monkeypatch):
    """An error before anything runs, not when backward is called."""
    monkeypatch.setattr(deltic._native, "HAS_CUDA_BACKWARD", False)
    with FakeTensorMode(), torch.device("cuda"):
        q, k, v = (torch.empty(1, 8, 1, 16, requires_grad=name == "v") for name in "qkv")
        for function in (deltic.delta_rule, deltic.recurrent):
            name = function.__name__
            with pytest.raises(NotImplementedError, match=f"{name}: requires_grad: expected CPU"):
                function(q, k, v)
        with torch.no_grad():
            assert deltic.delta_rule(q, k, v)[0].shape == v.shape


def test_gradients_that_a_gpu_has(monkeypatch):
    """Of value-wise decays and of building blocks, as of the rest."""
    monkeypatch.setattr(deltic._native, "HAS_CUDA_BACKWARD", True)
    with FakeTensorMode(), torch.device("cuda"):
        q, k, v = (torch.empty(1, 8, 1, 16, requires_grad=True) for _ in range(3))
        a = torch.empty(1, 8, 1, 64, requires_grad=True)
        for result in (
            deltic.recurrent(q, k, v, gv=v)[0],
            deltic.l2norm(q).y,
            deltic.kkt(k),
            deltic.inverse(a),
        ):
            assert result.requires_grad and result.device.type == "cuda"


@pytest.mark.parametrize("recompute", [True, False])
def test_nothing_is_kept_on_a_gpu(recompute, monkeypatch):
    """Backward starts from the inputs there: states would be memory for nobody."""
    monkeypatch.setattr(deltic._native, "HAS_CUDA_BACKWARD", True)
    with FakeTensorMode(), torch.device("cuda"):
        q, k, v = (torch.empty(1, 300, 1, 16, requires_grad=True) for _ in range(3))
        o, _ = deltic.delta_rule(q, k, v, recompute=recompute)
        assert o.grad_fn.saved_tensors[-1] is None
    q, k, v = (torch.ones(1, 300, 1, 16, requires_grad=True) for _ in range(3))
    o, _ = deltic.delta_rule(q, k, v, recompute=recompute)
    assert o.grad_fn.saved_tensors[-1].numel() > 0


def test_nobody_takes_the_call():
    text = "delta_rule: no implementation takes this call: this build has no CUDA support"
    assert isinstance(deltic._library.translated(RuntimeError(text)), NotImplementedError)


def test_older_names():
    assert deltic.cumsum is deltic.chunk_cumsum and deltic.gate is deltic.log_decay
