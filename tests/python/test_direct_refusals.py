"""What is special goes by the operators, not by direct calls, and what is strange harms nobody."""

import deltic
import pytest
import torch
from direct import by_operator, check_alike, needs_direct, outcome, rows, state
from support import python


class Plus(torch.Tensor):
    """A subclass that does nothing."""


class Watched(torch.Tensor):
    """A subclass that sees its calls."""

    seen: list = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.seen.append(function)
        return super().__torch_function__(function, types, args, kwargs or {})


def strange_tensors(v):
    """Objects in the place of v, by name; dense tensors of a plain class are not among them."""
    functional = torch._to_functional_tensor(v)
    escaped = []
    torch.vmap(lambda x: (escaped.append(x), x)[1])(v)
    tracked = []
    torch.func.grad(lambda x: (tracked.append(x), x.sum())[1])(v)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = mode.from_tensor(v)
    return {
        "none": None,
        "number": 3.0,
        "text": "v",
        "list": v.tolist(),
        "array": v.numpy(),
        "class": torch.Tensor,
        "subclass": v.as_subclass(Plus),
        "watched": v.as_subclass(Watched),
        "fake": fake,
        "functional": functional,
        "batched": escaped[0],
        "tracked": tracked[0],
        "meta": v.to("meta"),
        "sparse": v.to_sparse(),
        "csr": v[0, 0].to_sparse_csr(),
        "nested": torch.nested.nested_tensor([v[0], v[1]]),
        "jagged": torch.nested.nested_tensor([v[0], v[1]], layout=torch.jagged),
        "quantized": torch.quantize_per_tensor(v, 0.1, 0, torch.qint8),
        "mkldnn": v.to_mkldnn(),
        "complex": v.to(torch.complex64),
        "conjugate": v.to(torch.complex64).conj(),
        "negated": torch._neg_view(v),
        "zeros": torch._efficientzerotensor(v.shape),
        "scalar": v.sum(),
        "vector": v.flatten(),
        "five": v[None],
        "strided": v.mT.contiguous().mT,
        "int": v.int(),
        "float8": v.to(torch.float8_e4m3fn),
        "uninitialized": torch.nn.UninitializedParameter(),
        "freed": freed(v),
    }


def freed(v):
    """A tensor whose memory was taken away."""
    x = v.clone()
    x.untyped_storage().resize_(0)
    return x


@needs_direct
@pytest.mark.parametrize("place", ["q", "v", "g", "initial_state", "out", "scale"])
@pytest.mark.filterwarnings("ignore")
def test_strange_objects_go_by_the_operator(taken, place):
    (q, k, v), gates = rows()
    given = {"q": q, "k": k, "v": v, **gates, "initial_state": state(), "out": None, "scale": 1.0}
    plain = {"out": v, "scale": v}.get(place, given[place])
    with torch.no_grad():
        for name, x in strange_tensors(plain if plain.dim() == 4 else v).items():
            if name == "freed" and place != "out":
                continue  # torch does not look either
            if x is None and place in ("g", "initial_state", "out", "scale"):
                continue
            if place == "scale" and name == "number":
                continue
            taken.clear()
            args = given | {place: x}
            q, k, v = (args.pop(n) for n in ("q", "k", "v"))
            found = outcome(lambda a=(q, k, v), o=args: deltic.delta_rule(*a, **o))
            assert not any(taken), name
            again = by_operator(
                lambda a=(q, k, v), o=args: outcome(lambda: deltic.delta_rule(*a, **o))
            )
            assert type(found[0]) is type(again[0]), name
            if isinstance(found[0], type):
                assert found == again, name
            q, k, v = given["q"], given["k"], given["v"]


def modes():
    """Ways of torch to be around a call, by name."""

    class Function(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    class Dispatch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            return function(*args, **(kwargs or {}))

    return {
        "function": Function,
        "dispatch": Dispatch,
        "device": lambda: torch.device("cpu"),
        "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
        "profiler": lambda: torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU]
        ),
        "forward_ad": torch.autograd.forward_ad.dual_level,
    }


@needs_direct
@pytest.mark.parametrize("name", list(modes()))
@pytest.mark.filterwarnings("ignore")
def test_modes_go_by_the_operator(taken, name):
    (q, k, v), gates = rows()
    with torch.no_grad():
        with modes()[name]():
            check_alike(lambda: deltic.delta_rule(q, k, v, **gates, output_final_state=True))
            check_alike(lambda: deltic.recurrent(q, k, v, **gates))
        assert taken == [False, False]
        deltic.delta_rule(q, k, v, **gates)
        assert taken[2:] == [True]


@needs_direct
@pytest.mark.filterwarnings("ignore")
def test_transforms_and_tracers_go_by_the_operator(taken):
    (q, k, v), gates = rows()

    def function(q):
        return deltic.delta_rule(q, k, v, **gates)[0]

    with torch.no_grad():
        plain = function(q)
        taken.clear()
        with pytest.raises(NotImplementedError, match="delta_rule: vmap: expected a batch"):
            torch.vmap(function)(torch.stack([q, q]))
        with pytest.raises(NotImplementedError, match="torch.func: expected gradients"):
            with torch.enable_grad():
                torch.func.grad(lambda x: function(x).sum())(q)
        assert not any(taken)
        traced = torch.jit.trace(function, q, check_trace=False)
        assert not any(taken)
        assert torch.equal(traced(q + 1), function(q + 1))
        taken.clear()
        graph = torch.fx.experimental.proxy_tensor.make_fx(function)(q)
        assert not any(taken) and "deltic" in graph.code
        compiled = torch.compile(function, backend="eager", fullgraph=True)
        assert torch.equal(compiled(q), plain) and not any(taken)
        saved = torch.export.export(Module(function), (q,))
        assert torch.equal(saved.module()(q), plain) and not any(taken)


class Module(torch.nn.Module):
    """A function as a module, which torch.export takes."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, q):
        return self.function(q)


@needs_direct
@pytest.mark.parametrize("function", ["delta_rule", "recurrent", "decode"])
def test_texts_do_not_end_at_a_zero_byte(taken, function):
    """What is right up to there is not what was written."""
    (q, k, v), gates = rows()
    more = {"state_pool": state()} if function == "decode" else {}
    call = getattr(deltic, function)
    with torch.no_grad():
        for name, text in (
            *(("gate", text) for text in ("log_decay", "softplus")),
            *(("beta_form", text) for text in ("value", "sigmoid")),
            *(("state_layout", text) for text in ("kv", "vk")),
            *(("impl", text) for text in ("cpu.plain", "reference")),
        ):
            for wrong in (f"{text}\0", f"{text}\0x", "\0", f"\0{text}"):
                taken.clear()
                with pytest.raises(ValueError, match=f"^{function}: {name}: expected .*, got '"):
                    call(q, k, v, **gates, **more, **{name: wrong})
                assert not any(taken)


@needs_direct
def test_settings_go_by_the_operator(taken, monkeypatch):
    (q, k, v), gates = rows()

    def call(**options):
        taken.clear()
        o = deltic.delta_rule(q, k, v, **gates, **options)[0]
        return o, list(taken)

    with torch.no_grad():
        plain, was_direct = call()
        assert was_direct == [True]
        named, was_direct = call(impl="reference")
        assert was_direct == [False]
        monkeypatch.setenv("DELTIC_IMPL", "forward:reference")
        for _ in range(2):
            assert torch.equal(call()[0], named)
        monkeypatch.delenv("DELTIC_IMPL")
        assert torch.equal(call()[0], plain)
        for options in ({"scale": 1}, {"split": "off"}, {"chunk_size": 32}, {"form": "recurrent"}):
            assert not any(call(**options)[1])
    code = (
        "import torch, deltic\nfrom deltic import _native\n"
        "direct, x = _native.DIRECT_FORWARD, torch.ones(1, 3, 1, 16)\n"
        "_native.DIRECT_FORWARD = lambda *args: print(direct(*args)) or direct(*args)\n"
        "with torch.no_grad():\n    deltic.delta_rule(x, x, x)"
    )
    assert python(code, DELTIC_CHECKED="1") == "None"


def test_a_switch_turns_them_off():
    code = "from deltic import _library; print(_library.DIRECT_FORWARD, _library.DIRECT_DECODE)"
    assert python(code, DELTIC_DIRECT="0") == "None None"
    assert "None" not in python(code, DELTIC_DIRECT="")  # as if it were not there
    code = "try:\n    import deltic\nexcept ImportError as error:\n    print(error)"
    assert python(code, DELTIC_DIRECT="no") == "deltic: DELTIC_DIRECT: expected 0 or 1, got 'no'"


@pytest.mark.parametrize(
    "change",
    [
        "sys.abiflags = 't'",
        "del torch._C._len_torch_dispatch_stack",
        "del torch.Tensor.__dlpack_c_exchange_api__",
        "torch.Tensor.data_ptr = lambda self: 64",
    ],
)
def test_an_unknown_python_or_torch_has_operators_alone(change):
    """Names that are missing, and a table that says another address than torch."""
    code = (
        f"import sys, torch\n{change}\nimport deltic\nfrom deltic import _library\n"
        "assert _library.DIRECT_FORWARD is None and _library.DIRECT_DECODE is None\n"
        "x = torch.ones(1, 3, 1, 16)\n"
        "with torch.no_grad():\n    print(deltic.delta_rule(x, x, x)[0].shape)"
    )
    assert python(code) == "torch.Size([1, 3, 1, 16])"
