"""The building blocks into memory of the caller's."""

import deltic
import pytest
import torch
from torch.library import opcheck

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
W = 32


def calls(dtype=torch.float32, device="cpu", T=50, **lists):
    """Every block: a function of its keywords, and what it takes beside them."""
    torch.manual_seed(T)
    made = dict(dtype=dtype, device=device)
    q, k, v = (torch.randn(2, T, h, 16, **made) for h in (2, 2, 4))
    if lists:
        q, k, v = (x.flatten(0, 1)[None] for x in (q, k, v))
    k = torch.nn.functional.normalize(k, dim=-1)
    lead = v.shape[:3]
    g, beta = -torch.rand(lead, **made), torch.rand(lead, **made)
    G = deltic.chunk_cumsum(g, chunk_size=W, **lists)
    A_log, dt_bias = torch.rand(4, device=device), torch.rand(4, device=device)
    form = dict(gate="softplus", A_log=A_log, dt_bias=dt_bias)
    a = deltic.inverse(deltic.kkt(k, g=G, beta=beta, chunk_size=W, **lists), **lists)
    chunk = dict(chunk_size=W)
    return {
        "chunk_cumsum": dict(g=g, **form, scale=0.5, reverse=True, **chunk, **lists),
        "log_decay": dict(g=g, **form, **lists),
        "l2norm": dict(x=q, **lists),
        "kkt": dict(k=k, g=G, beta=beta, **chunk, **lists),
        "scores": dict(q=q, k=k, g=G, scale=0.3, **chunk, **lists),
        "inverse": dict(a=a, **lists),
        "scores_inverse": dict(q=q, k=k, g=G, beta=beta, **chunk, **lists),
        "wy": dict(k=k, a=a, v=v, g=G, beta=beta, q=q, output_kg=True, **lists),
        "wy alone": dict(k=k, a=a, **lists),
    }


NAMES = list(calls(T=3))


def run(name, given, **options):
    return getattr(deltic, name.partition(" ")[0])(**given, **options)


def parts(result):
    return [x for x in (result if isinstance(result, tuple) else (result,)) if x is not None]


def inside(x, dtype=None):
    """A tensor of x's shape in the middle of wider rows of sevens."""
    *lead, width = x.shape
    wide = torch.full((*lead, width + 16), 7.0, dtype=dtype or x.dtype, device=x.device)
    return wide[..., 8 : width + 8] if x.dim() == 4 else torch.full_like(x, 7.0)


def alike(result, make):
    """The same structure of other tensors."""
    if isinstance(result, torch.Tensor):
        return make(result)
    return tuple(None if x is None else make(x) for x in result)


def check(name, given, dtype=None):
    plain = run(name, given, **({} if dtype is None else {"dtype": dtype}))
    out = alike(plain, inside)
    found = run(name, given, out=out)
    assert type(found) is type(plain)
    assert [x is y for x, y in zip(parts(found), parts(out), strict=True)].count(False) == 0
    for x, y in zip(parts(found), parts(plain), strict=True):
        assert x.dtype == y.dtype and torch.equal(x, y)
        if x.dim() == 4:
            wide = x._base
            assert (wide[..., :8] == 7).all() and (wide[..., -8:] == 7).all()
            assert x._version >= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_out_is_written_and_returned(name, dtype, device):
    check(name, calls(dtype, device)[name])
    ends = dict(cu_seqlens=torch.tensor([0, 40, 40, 90], device=device))  # and ten rows of padding
    check(name, calls(dtype, device, **ends)[name])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NAMES)
def test_out_has_its_own_dtype(name, dtype):
    check(name, calls()[name], dtype)


@pytest.mark.parametrize("name", NAMES)
def test_no_tokens(name):
    given = calls()[name]
    given = {n: x[:, :0] if torch.is_tensor(x) and x.dim() > 1 else x for n, x in given.items()}
    check(name, given)


@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_compiled_graphs(name):
    given = calls()[name]
    plain = run(name, given)
    meta = {n: x.to("meta") if torch.is_tensor(x) else x for n, x in given.items()}
    out = alike(plain, lambda x: x.to("meta"))
    assert parts(run(name, meta, out=out))[0] is parts(out)[0]

    def call(given, out):
        result = run(name, given, out=out)
        return [x + 1 for x in parts(result)]

    torch._dynamo.reset()
    out = alike(plain, torch.zeros_like)
    more = torch.compile(call, backend="aot_eager", fullgraph=True)(given, out)
    for x, y, z in zip(parts(out), parts(plain), more, strict=True):
        assert torch.equal(x, y) and torch.equal(z, y + 1)


def test_opcheck():
    operator = torch.ops.deltic.block_out_.default
    given = calls()
    for name, number, kinds in (
        ("kkt", 5, {"out": 11}),
        ("l2norm", 4, {"out": 11, "rstd": 12}),
        ("wy", 8, {"w": 14, "u": 15, "kg": 16, "qg": 17}),
    ):
        inputs = ("q", "k", "v", "x", "g", "beta", "A_log", "dt_bias", "a")
        args = [number, *(given[name].get(x) for x in inputs), *[None] * 9, None, None, ""]
        for x, place in zip(parts(run(name, given[name])), kinds.values(), strict=True):
            args[place + 1] = torch.zeros_like(x)
        args[-1] = "chunk=32" if name == "kkt" else ""
        opcheck(operator, tuple(args), test_utils=("test_schema", "test_faketensor"))
    for device in ("cpu", "meta"):
        with pytest.raises((RuntimeError, ValueError), match="block_out_: op: expected a building"):
            x = torch.ones(1, 2, 2, 4, device=device)
            operator(9, None, x, *[None] * 9, x, *[None] * 6)


OPERATOR = torch.ops.deltic.block_out_.default
NUMBERS = {"chunk_cumsum": 2, "log_decay": 3, "l2norm": 4, "kkt": 5, "scores": 6, "inverse": 7}
NUMBERS |= {"scores_inverse": 11, "wy": 8}
RESULTS = ("out", "rstd", "inverse", "w", "u", "kg", "qg")


def operands(name):
    """The operator's tensors, outputs among them, and its options."""
    given = calls(T=5)[name]
    tensors = {n: x for n, x in given.items() if torch.is_tensor(x)}
    written = {"l2norm": ("out", "rstd"), "wy": ("w", "u", "kg", "qg"), "wy alone": ("w",)}
    written = written.get(name, ("out", "inverse"))
    tensors |= dict(zip(written, map(torch.zeros_like, parts(run(name, given))), strict=False))
    words = ["chunk=32"] if "chunk_size" in given else []
    return tensors, " ".join(words + ["gate=softplus"] * ("A_log" in given))


def said_of(name, tensors, options, device):
    """The error of a call of the operator; none where it is taken."""
    names = [x.name for x in OPERATOR._schema.arguments][1:-3]
    given = [tensors.get(n) for n in names]
    given = [x if x is None else x.to(device) for x in given]
    try:
        OPERATOR(NUMBERS[name.partition(" ")[0]], *given, None, None, options)
    except (RuntimeError, ValueError) as error:
        return str(error).partition("\n")[0]
    return ""


@pytest.mark.parametrize("name", NAMES)
def test_shapes_are_refused_as_tensors_are(name):
    """Tensors that are left out, too many or of another shape: meta's errors are the CPU's."""
    tensors, options = operands(name)
    assert said_of(name, tensors, options, "cpu") == said_of(name, tensors, options, "meta") == ""
    others = [None, torch.ones(()), *(torch.ones(s) for s in ((4,), (2, 5, 4), (2, 5, 4, 16)))]
    refused = 0
    for changed in ("q", "k", "v", "x", "g", "beta", "A_log", "dt_bias", "a", *RESULTS):
        for other in others:
            if changed == "A_log" and other is None:
                continue  # that the form of the gate needs it is not said of shapes
            given = {**tensors, changed: other}
            found = said_of(name, given, options, "cpu")
            assert said_of(name, given, options, "meta") == found, changed
            is_more = changed not in tensors and other is not None
            if is_more and changed in RESULTS and other.dim() and changed != "kg":
                assert ": expected none, got a tensor" in found, changed
            refused += bool(found)
    assert refused > 40


@pytest.mark.parametrize("name", NAMES)
def test_gradients_have_no_out(name):
    given = calls()[name]
    out = alike(run(name, given), torch.empty_like)
    function = name.partition(" ")[0]
    text = f"^{function}: out: expected none where gradients are asked for .use torch.no_grad"
    for tensor in (*(x for x in given.values() if torch.is_tensor(x)), parts(out)[0]):
        tensor.requires_grad_()
        with pytest.raises(ValueError, match=text):
            run(name, given, out=out)
        with torch.no_grad():
            run(name, given, out=out)
        tensor.requires_grad_(False)
    kept = (parts(out)[0].clone() * torch.ones(()).requires_grad_()).sum()
    run(name, given, out=out)
    kept.backward()
    saved = (parts(out)[0] * torch.ones_like(parts(out)[0]).requires_grad_()).sum()
    run(name, given, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        saved.backward()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_no_out(name):
    given = calls()[name]
    plain, function = run(name, given), name.partition(" ")[0]
    names = getattr(plain, "_fields", None)

    def refused(kind, text, **options):
        with pytest.raises(kind, match=text) as error:
            run(name, given, **options)
        assert str(error.value).startswith(f"{function}: ") and ", got " in str(error.value)

    good = alike(plain, torch.zeros_like)
    refused(ValueError, "dtype: expected none with out, which", out=good, dtype=torch.float32)
    for i, x in enumerate(parts(plain)):
        there = [n for n in names or () if getattr(plain, n) is not None]
        at = f"out.{there[i]}" if there else "out"

        def with_part(y, i=i):
            count = iter(range(9))
            return alike(plain, lambda z: y if next(count) == i else torch.zeros_like(z))

        refused(TypeError, f"{at}: expected a tensor, got 1$", out=with_part(1))
        refused(TypeError, f"{at}: expected a dense tensor, got", out=with_part(x.to_sparse()))
        refused(TypeError, f"{at}: expected fp32", out=with_part(x.int()))
        shape = str(list(x.shape)).replace("[", r"\[").replace("]", r"\]")
        for other in (x[:, :-1], x[0], x[None], torch.cat((x, x), 2)):
            text = rf"{at}: expected shape {shape}, got \["
            refused(ValueError, text, out=with_part(torch.zeros_like(other)))
        for whose, y in given.items():
            if torch.is_tensor(y) and y.shape == x.shape and y.dtype == x.dtype:
                text = f"{at}: expected memory of its own, got an overlap with {whose}$"
                refused(ValueError, text, out=with_part(y))
        if x.dim() == 4:
            apart = torch.zeros(*x.shape[:3], 2 * x.shape[3], dtype=x.dtype)[..., ::2]
            text = f"{at}: expected stride 1 in the last dimension.*{at}.contiguous"
            refused(ValueError, text, out=with_part(apart))
    if names is None:
        refused(TypeError, "out: expected a tensor, got tuple$", out=(good,))
        return
    said = f"out: expected .{', '.join(names)}., got "
    refused(ValueError, f"{said}1 of them", out=good[:1])
    refused(TypeError, f"{said}a tensor$", out=good[0])
    for i, n in enumerate(names):
        changed = list(good)
        if good[i] is None:
            changed[i] = torch.zeros_like(good[0])
            text = f"out.{n}: expected none, as it is not asked for, got one$"
            refused(ValueError, text, out=changed)
        else:
            changed[i] = None
            refused(TypeError, f"out.{n}: expected a tensor, got none$", out=changed)
    if name in ("scores_inverse", "wy"):
        either = f"out.({names[0]}|{names[1]})"
        text = f"{either}: expected memory of its own, got an overlap with {either}$"
        refused(ValueError, text, out=(good[0], good[0], *good[2:]))


def test_wrong_inputs_come_first():
    """An output of another shape than the inputs say is not what is wrong."""
    given = calls()["kkt"]
    out = torch.zeros(2, 50, 4, W)
    for changes, text in (
        ({"k": given["k"][0]}, r"kkt: k: expected shape \[B,T,H,K\], got"),
        ({"beta": given["beta"][:, :3]}, "kkt: beta: expected shape"),
        ({"g": given["g"][..., :3]}, "kkt: g: expected a number of value heads HV"),
        ({"chunk_size": 16}, r"kkt: out: expected shape \[2, 50, 4, 16\], got \[2, 50, 4, 32\]"),
        ({"k": None}, "kkt: k: expected a tensor, got none"),
    ):
        with pytest.raises((ValueError, TypeError), match=text):
            deltic.kkt(**given | changes, out=out)
