"""The errors for arguments of layers and norms."""

import functools
import re
from collections.abc import Callable
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from .._library import SENTENCE, got, type_name
from .._native import is_eps

Method = TypeVar("Method", bound=Callable[..., Any])
# What layers call; others' texts, of modules that a user put in, stay.
_INNER = {
    "causal_conv1d",
    "causal_conv1d_update",
    "decode",
    "delta_rule",
    "recurrent",
    "rms_norm",
    "ShortConvolution",
}


def own_words(**names: str) -> Callable[[Method], Method]:
    """Makes the errors of what a layer's method calls the layer's own: its name, its arguments.

    ``names`` has for an argument the names of those below that come from it; others stay as they
    are. A compiler sees the method alone.
    """
    arguments = {inner: argument for argument, text in names.items() for inner in text.split()}

    def decorate(method: Method) -> Method:
        @functools.wraps(method)
        def called(self: Any, *args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return method(self, *args, **kwargs)
            try:
                return method(self, *args, **kwargs)
            except (TypeError, ValueError, NotImplementedError) as error:
                match = re.fullmatch(SENTENCE, str(error), re.DOTALL)
                if match is None or match["function"] not in _INNER:
                    raise
                name = arguments.get(match["argument"], match["argument"])
                text = f"{type(self).__name__}: {name}: {match['rest']}"
                found = type(error)(text)
            raise found

        return called  # type: ignore[return-value]

    return decorate


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
