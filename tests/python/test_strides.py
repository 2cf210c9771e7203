"""Tensors of any strides: what is read is copied and said once, what is written is refused."""

import deltic
import pytest
import torch
from support import error, make, python, run
from test_arguments import BASE, POOL, Q


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with another stride in the last dimension."""
    return torch.stack([x, x], dim=-1)[..., 0]


GIVEN = {
    **BASE,
    "causal_conv1d": dict(
        x=Q[:, :, 0], weight=torch.randn(16, 4), initial_state=torch.randn(1, 16, 3)
    ),
    "causal_conv1d_update": dict(
        x=Q[:, :, 0], state=torch.randn(1, 16, 3), weight=torch.randn(16, 4)
    ),
}
WRITTEN = {"decode": "state_pool", "causal_conv1d_update": "state"}


def outputs(function, given):
    given = {k: x.clone() if k in WRITTEN.values() else x for k, x in given.items()}
    found = getattr(deltic, function)(**given)
    found = found if isinstance(found, tuple) else (found,)
    return [*found, *(given[k] for k in given if k in WRITTEN.values())]


@pytest.mark.parametrize("function", GIVEN)
def test_what_is_read_may_have_any_strides(function):
    given = GIVEN[function]
    expected = outputs(function, given)
    odd = {
        name: turned(x) if isinstance(x, torch.Tensor) and name != WRITTEN.get(function) else x
        for name, x in given.items()
    }
    assert any(isinstance(x, torch.Tensor) and x.stride(-1) == 2 for x in odd.values())
    for x, y in zip(outputs(function, odd), expected, strict=True):
        assert x is y or torch.equal(x, y)


def test_lists_and_gate_parameters_too():
    case = make(gate="channel", form="softplus", lengths=[20, 0, 30])
    tensors = {name: turned(x) for name, x in case.tensors.items()}
    o, state = deltic.delta_rule(**tensors, **case.options, output_final_state=True)
    expected = deltic.delta_rule(**case.tensors, **case.options, output_final_state=True)
    assert torch.equal(o, expected[0]) and torch.equal(state, expected[1])
    token, pool = Q[0, :2, None], torch.zeros(4, 2, 16, 16)
    deltic.decode(token, token, token, state_pool=pool, read_index=turned(torch.tensor([3, 1])))
    assert [n for n in range(4) if pool[n].any()] == [1, 3]


@pytest.mark.parametrize("function", ["delta_rule", "recurrent"])
def test_gradients_through_copies(function):
    case = make(gate="channel", form="softplus")
    ours = case.function = getattr(deltic, function)
    expected = run(case)

    def through_views(q, k, v, **others):
        for name, x in others.items():
            if isinstance(x, torch.Tensor):
                others[name] = turned(x)
        return ours(turned(q), turned(k), turned(v), **others)

    case.function = through_views
    for name, x in run(case).items():
        assert error(x, expected[name]) == 0.0, name


def test_expanded_and_empty_tensors():
    ones = torch.ones(1, 1, 1, 1).expand(1, 8, 2, 16)  # stride 0 in the last dimension
    expected, _ = deltic.delta_rule(ones.contiguous(), ones.contiguous(), ones.contiguous())
    assert torch.equal(deltic.delta_rule(ones, ones, ones)[0], expected)
    empty = torch.zeros(1, 0, 2, 32)[..., ::2]
    assert deltic.delta_rule(empty, empty, empty)[0].shape == (1, 0, 2, 16)


@pytest.mark.parametrize("function", ["delta_rule", "decode"])
def test_a_pool_is_never_copied(function):
    pool = turned(POOL)
    given = {**BASE[function], "state_pool": pool}
    with pytest.raises(
        ValueError,
        match=rf"^{function}: state_pool: expected stride 1 in the last "
        r"dimension.*state_pool\.contiguous\(\) has it\)$",
    ):
        getattr(deltic, function)(**given)
    assert torch.equal(pool, POOL)


def test_checkpoints_are_never_copied():
    lists = (torch.tensor([0, 1]), torch.tensor([3]), torch.tensor([0]))
    states = torch.zeros(1, 4, 16, 16)[..., ::2]
    for grad in (False, True):
        given = dict(BASE["delta_rule"], q=Q.clone().requires_grad_(grad))
        with pytest.raises(ValueError, match=r"checkpoints\.states: expected stride 1.*in place"):
            deltic.delta_rule(**given, checkpoints=(*lists, states))
    assert not states.any()
    # The lists beside them are read only.
    states = torch.zeros(1, 4, 16, 8)
    deltic.delta_rule(**BASE["delta_rule"], checkpoints=(*map(turned, lists), states))
    assert states.any()


def test_a_copy_is_said_once():
    said = python(
        "import deltic, torch, logging, sys\n"
        "logging.basicConfig(stream=sys.stdout, format='%(name)s %(levelname)s %(message)s')\n"
        "x = torch.zeros(1, 8, 2, 32)[..., ::2]\n"
        "for _ in range(2):\n"
        "    deltic.delta_rule(x, x.contiguous(), x.contiguous())\n"
        "deltic.kkt(x)\n"
        "leaf = x.contiguous().requires_grad_()\n"
        "deltic.delta_rule(leaf, leaf, leaf)[0].sum().backward()\n"
    )
    rest = "copied in every such call, because its last dimension has stride 2"
    assert said.splitlines() == [
        f"deltic.copies WARNING delta_rule: q: {rest} (q.contiguous() before spares that)",
        f"deltic.copies WARNING kkt: k: {rest} (k.contiguous() before spares that)",
    ]


def test_strides_in_a_compiled_graph():
    x = torch.randn(1, 8, 2, 32)[..., ::2]
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: deltic.delta_rule(x, x, x)[0], fullgraph=True)
    assert torch.equal(compiled(x), deltic.delta_rule(x, x, x)[0])
