"""Errors of this surface: in the words of the function that was called, about its own arguments."""

import functools
import inspect
import re
from collections.abc import Callable
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from .._fakes import _Shapes
from .._library import SENTENCE, got, type_name

Function = TypeVar("Function", bound=Callable[..., Any])

# The functions of this surface, which may call one another.
_FUNCTIONS: set[str] = set()
# What arguments of those functions are called here: the first name that a function has.
_NAMES = {
    "a": ("A",),
    "g": ("gk", "s"),
    "dtype": ("output_dtype",),
    "state_pool": ("initial_state",),
    "read_index": ("ssm_state_indices",),
    "write_index": ("ssm_state_indices",),
    "qk_l2norm": ("use_qk_l2norm_in_kernel",),
    "out": ("A", "out"),
    "d_out": ("dyg", "do"),
}
_KINDS: dict[Any, tuple[Any, str]] = {
    Tensor: (Tensor, "a tensor"),
    int: (int, "an int"),
    float: ((int, float), "a float"),
    torch.dtype: (torch.dtype, "a torch.dtype"),
}
# The letters of tensors' dimensions, where a function says nothing else.
_SHAPES = {
    **dict.fromkeys(("q", "k"), "B,T,H,K"),
    **dict.fromkeys(("v", "u", "gv", "do", "dv", "du"), "B,T,HV,V"),
    **dict.fromkeys(("w", "gk", "dw"), "B,T,HV,K"),
    **dict.fromkeys(("h", "dh"), "B,chunks,HV,K,V"),
    **dict.fromkeys(("initial_state", "h0", "dht"), "N,HV,K,V"),
    "beta": "B,T,HV",
    "A": "B,T,HV,C",
    "g_gamma": "HV",
    "cu_seqlens": "N+1",
}
# Errors that are made anew with another text; others, such as torch's for memory, stay.
_RENAMED = (ValueError, TypeError, AssertionError, NotImplementedError, IndexError, RuntimeError)
_MISTAKES = (*_RENAMED, AttributeError, MemoryError, torch.OutOfMemoryError)


def _is_said(error: Exception) -> bool:
    """Whether it is a sentence about an argument, and not what became of a wrong one."""
    if isinstance(error, (ValueError, AssertionError, NotImplementedError)):
        return "values to unpack" not in str(error)
    return re.match(SENTENCE, str(error)) is not None


def _is_list(name: str) -> bool:
    """Whether an argument holds whole numbers."""
    return name.startswith(("cu_seqlens", "num_accepted", "lens")) or name.endswith(
        ("_indices", "_offsets")
    )


class _Kind(NamedTuple):
    """What an argument may be."""

    types: Any
    text: str
    may_be_none: bool
    is_list: bool  # a tensor of whole numbers
    is_rows: bool  # one of floats


def _kind(name: str, hint: Any) -> _Kind | None:
    """An argument's kind by its annotation; None for what is not looked at."""
    for known, (types, text) in _KINDS.items():
        if hint == known or hint == known | None:
            is_tensor, is_list = known is Tensor, _is_list(name)
            is_rows = is_tensor and not is_list and name != "mask"
            return _Kind(types, text, hint != known, is_tensor and is_list, is_rows)
    return None


class _Surface:
    """One function: its parameters, and the shapes that its tensors have."""

    def __init__(self, function: Callable[..., Any], shapes: dict[str, str]) -> None:
        self.name = function.__name__
        _FUNCTIONS.add(self.name)
        self.signature = inspect.signature(function)
        self.parameters = self.signature.parameters
        known = _SHAPES | shapes
        self.shapes = {name: known[name] for name in self.parameters if name in known}
        kinds = {name: _kind(name, p.annotation) for name, p in self.parameters.items()}
        self.kinds = {name: kind for name, kind in kinds.items() if kind is not None}

    def refuse(self, kind: type[Exception], argument: str, text: str) -> NoReturn:
        raise kind(f"{self.name}: {argument}: expected {text}")

    def check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raises for the first argument of another type, dtype or shape than it should have."""
        try:
            given = self.signature.bind(*args, **kwargs).arguments
        except TypeError as error:  # Python's own words about missing and unknown arguments
            raise TypeError(f"{self.name}() {error}") from None
        for argument, value in given.items():
            self._check_type(argument, value)
        found = _Shapes("", self.name, {n: x for n, x in given.items() if n in self.shapes})
        for argument, letters in self.shapes.items():
            if argument in found.shapes:
                self._check_shape(found, argument, letters, given)

    def _check_type(self, argument: str, value: Any) -> None:
        kind = self.kinds.get(argument)
        if kind is None or (value is None and kind.may_be_none):
            return
        if not isinstance(value, kind.types) or isinstance(value, bool):
            self.refuse(TypeError, argument, f"{kind.text}, got {got(value)}")
        if argument == "chunk_size" and value is not None and value < 1:
            self.refuse(ValueError, argument, f"at least 1, got {value}")
        if kind.is_list:
            if value.dtype not in (torch.int32, torch.int64):
                self.refuse(TypeError, argument, f"int32 or int64, got {type_name(value.dtype)}")
        elif kind.is_rows and not value.is_floating_point():
            self.refuse(TypeError, argument, f"fp32, bf16 or fp16, got {type_name(value.dtype)}")

    def _check_shape(
        self, found: _Shapes, argument: str, letters: str, given: dict[str, Any]
    ) -> None:
        choices = letters.split("|")
        rank = len(found.shapes[argument])
        fitting = [x for x in choices if len(x.split(",")) == rank]
        if not fitting:
            text = " or ".join(f"[{x}]" for x in choices)
            found.refuse(argument, f"shape {text}, got {found.shapes[argument]}")
        chosen = fitting[0]
        if given.get("state_v_first") and chosen.endswith(",K,V"):
            chosen = chosen.removesuffix("K,V") + "V,K"
        if argument == "cu_seqlens":
            if found.sizes.get("B") == 1:  # else the function has its own sentence
                found.sequences()
            return
        if "N" in chosen.split(",") and "N" not in found.sizes and "B" in found.sizes:
            found.sequences()
        found.take(argument, chosen)

    def renamed(self, error: Exception) -> Exception:
        """An error as this function's own."""
        text = str(error)
        if text.startswith((f"{self.name}: ", f"{self.name}()")) or type(error) not in _RENAMED:
            return error
        match = re.fullmatch(SENTENCE, text, re.DOTALL)
        if match is None:
            inner, _, rest = text.partition(": ")
            return type(error)(f"{self.name}: {rest if inner in _FUNCTIONS else text}")
        argument = match["argument"]
        if argument not in self.parameters:
            names = (x for x in _NAMES.get(argument, ()) if x in self.parameters)
            argument = next(names, argument)
        return type(error)(f"{self.name}: {argument}: {match['rest']}")


def surface(*, ahead: bool = False, **shapes: str) -> Callable[[Function], Function]:
    """Makes the errors of a function its own: its name, its arguments' names.

    ``shapes`` has letters for the dimensions of tensors that differ from ``_SHAPES``: a letter has
    one size, ``|`` stands between choices. They are looked at where a call failed, so that one that
    runs costs nothing more; with ``ahead`` before the call, for what is computed by plain
    operations, which would broadcast. A compiler sees the function alone.
    """

    def decorate(function: Function) -> Function:
        known = _Surface(function, shapes)

        @functools.wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return function(*args, **kwargs)
            if ahead:
                known.check(args, kwargs)
            try:
                return function(*args, **kwargs)
            except _MISTAKES as error:
                found: Exception = error
            if not _is_said(found):
                known.check(args, kwargs)
            raise known.renamed(found)

        return called  # type: ignore[return-value]

    return decorate
