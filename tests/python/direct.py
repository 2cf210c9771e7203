"""What the tests of direct calls share: inputs, and the same call by its operator."""

import pytest
import torch
from deltic import _library, _native

H, D = 2, 16
WIDTHS = {"cpu": D, "cuda": 128}  # of heads
needs_direct = pytest.mark.skipif(
    _library.DIRECT_FORWARD is None, reason="this torch has no table of functions"
)
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICES = ["cpu", pytest.param("cuda", marks=needs_gpu)]


def rows(T=5, B=2, device="cpu", dtype=torch.float32):
    """q, k, v and the gates."""
    torch.manual_seed(T)
    made = dict(device=device, dtype=dtype)
    q, k, v = (torch.randn(B, T, H, WIDTHS[device], **made) for _ in range(3))
    k = torch.nn.functional.normalize(k, dim=-1)
    return (q, k, v), {"g": -torch.rand(B, T, H, **made), "beta": torch.rand(B, T, H, **made)}


def state(slots=2, device="cpu", dtype=torch.float32):
    return torch.randn(slots, H, WIDTHS[device], WIDTHS[device], device=device, dtype=dtype)


def by_operator(function):
    """The same without direct calls."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_native, "DIRECT_FORWARD", None)
        patch.setattr(_native, "DIRECT_DECODE", None)
        return function()


def outcome(function):
    """What a call returns, or the error that it raises."""
    try:
        result = function()
    except Exception as error:  # whatever it is: two are compared
        return type(error), str(error)
    return result if isinstance(result, tuple) else (result,)


def check_alike(function):
    """One outcome with and without direct calls: bits, strides, kinds of tensors, errors."""
    direct, operator = outcome(function), by_operator(lambda: outcome(function))
    assert len(direct) == len(operator)
    for x, y in zip(direct, operator, strict=True):
        if not isinstance(y, torch.Tensor):
            assert x == y
            continue
        assert type(x) is type(y)
        assert (x.dtype, x.shape, x.stride()) == (y.dtype, y.shape, y.stride())
        assert (x.requires_grad, x.is_inference()) == (y.requires_grad, y.is_inference())
        assert torch.equal(x, y) and bool(x.isfinite().all())
    return direct
