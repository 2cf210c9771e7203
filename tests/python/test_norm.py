"""The gated RMS norm: values and gradients against the formula, and what torch asks of it."""

import deltic
import pytest
import torch
import torch.nn.functional as F

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
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
