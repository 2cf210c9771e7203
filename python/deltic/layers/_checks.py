"""The errors for arguments of layers and norms."""

from numbers import Real
from typing import Any

from torch import Tensor

from .._library import got, type_name
from .._native import is_eps


def expect(is_fine: bool, layer: str, argument: str, expected: str, value: Any) -> None:
    """Raises the error for a constructor's argument of another value."""
    if not is_fine:
        raise ValueError(f"{layer}: {argument}: expected {expected}, got {value!r}")


def expect_int(layer: str, argument: str, number: int) -> None:
    """Raises the error for a constructor's argument that is no int."""
    if isinstance(number, bool) or not hasattr(number, "__index__"):
        raise TypeError(f"{layer}: {argument}: expected an int, got {number!r}")


def expect_size(layer: str, argument: str, size: int) -> None:
    """Raises the error for a constructor's argument that is no size."""
    expect_int(layer, argument, size)
    expect(size > 0, layer, argument, "at least 1", size)


def expect_number(layer: str, argument: str, number: float) -> None:
    """Raises the error for a constructor's argument that is no number."""
    if isinstance(number, bool) or not isinstance(number, Real):
        raise TypeError(f"{layer}: {argument}: expected a float, got {number!r}")


def expect_eps(layer: str, argument: str, eps: float) -> None:
    """Raises the error for a constructor's argument that cannot be added to a mean square."""
    expect_number(layer, argument, eps)
    expect(is_eps(eps), layer, argument, "a finite number of at least 0", eps)


def check_rows(layer: str, argument: str, x: Any, width: int) -> None:
    """Raises the error for an input of a norm that has other rows."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{layer}: {argument}: expected a tensor, got {got(x)}")
    if not x.is_floating_point():
        raise TypeError(f"{layer}: {argument}: expected a float dtype, got {type_name(x.dtype)}")
    if x.dim() == 0 or x.shape[-1] != width:
        raise ValueError(f"{layer}: {argument}: expected shape [..., {width}], got {list(x.shape)}")
