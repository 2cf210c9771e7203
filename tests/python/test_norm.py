"""The gated RMS norm: values and gradients against the formula, and what torch asks of it."""

import deltic
import pytest
import torch
import torch.nn.functional as F
from deltic.layers import GatedRMSNorm, RMSNorm
from support import python

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
X = torch.ones(2, 3, 4)
GATES = {None: lambda z: z, "silu": F.silu, "sigmoid": torch.sigmoid}


def by_torch(x, weight, z, eps, activation):
    x = x.double()
    y = x * (x.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        y = y * weight.double()
    return y if z is None else y * GATES[activation](z.double())


def make(shape, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).requires_grad_()


def error(found, expected):
    expected = expected.double()
    return ((found.double() - expected).norm() / expected.norm().clamp(min=1e-6)).item()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", [None, "silu", "sigmoid"])
@pytest.mark.parametrize("shape", [(2, 5, 3, 64), (7, 33), (16,), (2, 2, 2, 2, 40)])
def test_values_and_gradients(dtype, activation, shape):
    x, z, dy = make(shape, dtype), make(shape, dtype, 1), make(shape, dtype, 2).detach()
    weight = make(shape[-1:], torch.float32, 3)
    y = deltic.rms_norm(x, weight, z, eps=1e-6, activation=activation)
    assert y.shape == x.shape and y.dtype == dtype
    reference = by_torch(x, weight, z, 1e-6, activation)
    budget = 1e-5 if dtype == torch.float32 else 6e-3
    assert error(y, reference) < budget
    found = torch.autograd.grad(y, (x, z, weight), dy)
    expected = torch.autograd.grad(reference, (x, z, weight), dy.double())
    for got, want, given in zip(found, expected, (x, z, weight), strict=True):
        assert got.dtype == given.dtype and error(got, want) < budget


def test_without_weight_or_gate():
    x = make((3, 4, 20), torch.float32)
    for weight in (None, make((20,), torch.bfloat16, 1)):
        y = deltic.rms_norm(x, weight)
        assert error(y, by_torch(x, weight, None, 1e-5, None)) < 1e-5
        y.sum().backward()


def test_slices_of_a_longer_row():
    rows = make((2, 5, 3 * 64), torch.bfloat16).detach()
    x, z = rows[..., :64], rows[..., 64:128]
    assert error(deltic.rms_norm(x, z=z), by_torch(x, None, z, 1e-5, "silu")) < 6e-3


def test_opcheck_and_compile():
    x, z, weight = make((1, 3, 2, 32), torch.float32), make((1, 3, 2, 32), torch.float32, 1), None
    op = torch.ops.deltic.rmsnorm.default
    torch.library.opcheck(op, (x, z, weight, 1e-5, "activation=silu"))
    compiled = torch.compile(lambda a, b: deltic.rms_norm(a, z=b), fullgraph=True, backend="eager")
    assert torch.equal(compiled(x, z), deltic.rms_norm(x, z=z))


@pytest.mark.parametrize(
    "shape", [(0, 64), (5, 0, 64), (0, 5, 64), (2, 3, 0, 64), (0, 2, 3, 64), (2, 0, 3, 2, 64)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_no_rows(shape, dtype):
    def check(norm, weight):
        x, z = make(shape, dtype), make(shape, dtype, 1)
        y = norm(x, z)
        assert y.shape == shape and y.dtype == dtype
        dx, dz, dweight = torch.autograd.grad(y.sum(), (x, z, weight))
        assert dx.shape == dz.shape == shape
        assert dweight.shape == (64,) and not dweight.any()

    layer = GatedRMSNorm(64)
    check(layer, layer.weight)
    if dtype == torch.float64:
        return
    weight = make((64,), torch.float32, 2)
    check(lambda x, z: deltic.rms_norm(x, weight, z), weight)
    torch._dynamo.reset()
    compiled = torch.compile(deltic.rms_norm, fullgraph=True, backend="aot_eager")
    check(lambda x, z: compiled(x, weight, z), weight)


@pytest.mark.parametrize("activation", ["swish", "sigmoid"])
@pytest.mark.parametrize("shape", [(3, 4), (4,)])
def test_second_gradients_where_the_layers_norm_is_torchs(activation, shape):
    gated, plain = GatedRMSNorm(4, 1e-2, activation), RMSNorm(4)
    x, z = (make(shape, torch.float64, seed) for seed in (0, 1))
    weight = make((4,), torch.float64, 2)

    def run(x, z, weight):
        return torch.func.functional_call(gated, {"weight": weight}, (x, z))

    assert torch.autograd.gradcheck(run, (x, z, weight))
    assert torch.autograd.gradgradcheck(run, (x, z, weight))
    assert torch.autograd.gradgradcheck(plain.double(), (x,))
    assert torch.autograd.gradgradcheck(gated.double(), (torch.zeros_like(x).requires_grad_(), z))


def test_a_penalty_on_the_gradient_of_turned_rows():
    z, layer = make((2, 5, 64), torch.float32, 1).detach(), GatedRMSNorm(64)
    x = make((2, 64, 5), torch.float32).detach().transpose(1, 2).requires_grad_()

    def penalised(y):
        (dx,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return torch.autograd.grad(y.sum() + dx.square().sum(), x)[0]

    expected = penalised(by_torch(x, None, z, 1e-5, "silu"))
    assert error(penalised(layer(x, z)), expected) < 1e-5


def test_the_copy_of_a_gradient_is_not_said():
    said = python(
        "import deltic, torch, logging, sys\n"
        "logging.basicConfig(stream=sys.stdout)\n"
        "deltic.rms_norm(torch.ones(2, 3, 8, requires_grad=True)).sum().backward()\n"
    )
    assert said == ""


EPS = "eps: expected a finite number of at least 0, got "


@pytest.mark.parametrize(
    ("wrong", "kind", "text"),
    [
        (dict(x=None), TypeError, "x: expected a tensor, got none"),
        (dict(x=[1.0]), TypeError, "x: expected a tensor, got list"),
        (dict(x=X.numpy()), TypeError, "x: expected a tensor, got ndarray"),
        (dict(x=X.to_sparse()), TypeError, "x: expected a dense tensor, got sparse_coo"),
        (dict(x=X[0, 0, 0]), ValueError, r"x: expected shape \[..., D\], got \[\]"),
        (dict(z=1.0), TypeError, "z: expected a tensor, got 1.0"),
        (dict(z=X.to_sparse()), TypeError, "z: expected a dense tensor, got sparse_coo"),
        (dict(weight=1.0), TypeError, "weight: expected a tensor, got 1.0"),
        (
            dict(z=X, activation=["silu"]),
            ValueError,
            r"activation: expected None, 'silu' or 'sigmoid', got \['silu'\]",
        ),
        (dict(eps=torch.tensor(1e-5)), TypeError, EPS + "a tensor"),
        (dict(eps="1e-5"), TypeError, EPS + "'1e-5'"),
        (dict(eps=True), TypeError, EPS + "True"),
        (dict(eps=None), TypeError, EPS + "none"),
        (dict(eps=1j), TypeError, EPS + "complex"),
        (dict(eps=1e300), ValueError, EPS + r"1e\+300"),
        (dict(eps=float("nan")), ValueError, EPS + "nan"),
        (dict(eps=float("inf")), ValueError, EPS + "inf"),
        (dict(eps=X.numpy()[0, 0, 0] * -1), ValueError, EPS + "-1.0"),
        (dict(eps=10**400), ValueError, EPS + "an int beyond 1e60"),
    ],
)
def test_arguments(wrong, kind, text):
    with pytest.raises(kind, match=f"^rms_norm: {text}$"):
        deltic.rms_norm(**dict(x=X) | wrong)


def test_nested_rows():
    x = torch.nested.nested_tensor([torch.ones(2, 4), torch.ones(3, 4)], layout=torch.jagged)
    with pytest.raises(TypeError, match="^rms_norm: x: expected a dense tensor, got jagged$"):
        deltic.rms_norm(x)


def test_errors():
    x = torch.zeros(2, 3, 4)
    with pytest.raises(ValueError, match=r"rms_norm: z: expected x's shape \[2, 3, 4\]"):
        deltic.rms_norm(x, z=torch.zeros(2, 3, 5))
    with pytest.raises(ValueError, match=r"rms_norm: activation: expected None, 'silu' or"):
        deltic.rms_norm(x, z=x, activation="relu")
    with pytest.raises(ValueError, match=r"rms_norm: weight: expected shape \[4\]"):
        deltic.rms_norm(x, torch.ones(5))
    with pytest.raises(ValueError, match=r"rms_norm: eps: expected a finite number"):
        deltic.rms_norm(x, eps=-1.0)
    with pytest.raises(NotImplementedError):
        x = torch.zeros(2, 4, requires_grad=True)
        (dx,) = torch.autograd.grad(deltic.rms_norm(x).sum(), x, create_graph=True)
        dx.sum().backward()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_autocast_as_torch_does(device):
    """fp32 on a GPU, where it is one of the operations that autocast keeps wide; as it is else."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU")
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        x, weight = torch.randn(3, 64, device=device).to(dtype), torch.randn(64, device=device)
        for kind in (torch.bfloat16, torch.float16):
            with torch.autocast(device, dtype=kind):
                found = deltic.rms_norm(x, weight)
                gated = deltic.rms_norm(x, weight, x)
                expected = torch.nn.functional.rms_norm(x, (64,), weight.to(dtype), 1e-5)
            assert found.dtype == gated.dtype == expected.dtype
            assert torch.allclose(found.float(), expected.float(), rtol=2e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
def test_out_is_written_and_returned(dtype):
    for shape in ((2, 5, 3, 64), (7, 64), (64,), (2, 2, 2, 2, 64), (0, 64)):
        x, z = make(shape, dtype).detach(), make(shape, dtype, 1).detach()
        weight, buffer = torch.randn(64), torch.full((*shape[:-1], 80), 7.0, dtype=dtype)
        out = buffer[..., 8:72]
        y = deltic.rms_norm(x, weight, z, activation="sigmoid", out=out)
        expected = deltic.rms_norm(x, weight, z, activation="sigmoid")
        assert y is out and torch.equal(out, expected)
        assert (buffer[..., :8] == 7).all() and (buffer[..., 72:] == 7).all()


def test_errors_of_out():
    x = torch.zeros(2, 3, 4)
    for out, text in (
        (torch.zeros(2, 3, 5), r"^rms_norm: out: expected x's shape \[2, 3, 4\], got \[2, 3, 5\]$"),
        (x, "^rms_norm: out: expected memory of its own, got an overlap with x$"),
        (
            torch.zeros(4, 3, 2).transpose(0, 2),
            "^rms_norm: out: expected stride 1 in the last dimension",
        ),
    ):
        with pytest.raises(ValueError, match=text):
            deltic.rms_norm(x, out=out)
    with pytest.raises(TypeError, match="^rms_norm: out: expected a tensor, got 1$"):
        deltic.rms_norm(x, out=1)
    wide = torch.zeros(2, 2, 2, 2, 4)
    with pytest.raises(
        ValueError, match="^rms_norm: out: expected leading dimensions that are one"
    ):
        deltic.rms_norm(wide, out=torch.zeros(2, 3, 2, 2, 4)[:, :2])
    with pytest.raises(ValueError, match="^rms_norm: out: expected none where gradients are asked"):
        deltic.rms_norm(x.clone().requires_grad_(), out=torch.zeros(2, 3, 4))
    meta = x.to("meta")
    assert deltic.rms_norm(meta, out=torch.empty_like(meta)).shape == x.shape
    heads = torch.ones(1, 2, 3, 4)
    args = (heads, None, None, torch.empty_like(heads), 1e-5)
    operator = torch.ops.deltic.rmsnorm_out_.default
    torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))


def test_the_library_says_what_runs_where():
    """Layers ask it before they take convolution and norm, of GPUs of every age."""
    from deltic._library import LIBRARY

    cpu, cuda = 0, 1
    assert LIBRARY.deltic_torch_runs_on(cpu, 0) == 1
    assert LIBRARY.deltic_torch_runs_on(cuda, torch.cuda.device_count()) == 0
    assert LIBRARY.deltic_torch_runs_on(cuda, -1) == 0
    if torch.cuda.is_available():
        assert LIBRARY.deltic_torch_runs_on(cuda, 0) == 1
