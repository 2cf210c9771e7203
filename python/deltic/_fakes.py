"""How fake implementations are registered, and what they refuse before they make anything.

A fake implementation makes outputs from shapes alone: for meta tensors and for compilers. Shapes
that the library refuses are refused here too, in its order and in its words. Sizes that are symbols
are taken as they are: a comparison would tie a compiled graph to its answer.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ._library import OPS, argument_name, function_of, qualified


class _Shapes:
    """The shapes of one call's tensors, and the sizes that they gave to letters."""

    def __init__(self, operator: str, function: str, given: dict[str, Any]) -> None:
        self.operator, self.function = operator, function
        self.words = str(given.get("options", "")).split()
        # The library sees a tensor without dimensions as one of one element.
        self.shapes = {
            name: list(x.shape) or [1] for name, x in given.items() if isinstance(x, torch.Tensor)
        }
        self.sizes: dict[str, Any] = {}

    def refuse(self, name: str, text: str) -> NoReturn:
        argument = argument_name(self.operator, name)
        raise ValueError(f"{self.function}: {argument}: expected {text}")

    def bind(self, letter: str, size: Any, name: str) -> None:
        """Gives a letter its size; value heads come in groups of the others."""
        self.sizes[letter] = size
        heads = self.sizes.get("H")
        if letter != "HV" or not isinstance(size, int) or not isinstance(heads, int) or heads < 1:
            return
        if size % heads != 0:
            text = f"a number of value heads HV that is a multiple of H = {heads}, got {size}"
            self.refuse(name, text)

    def take(self, name: str, letters: str) -> None:
        """Compares a tensor, if it is there, with a shape; letters without a size get theirs."""
        shape = self.shapes.get(name)
        if shape is None:
            return
        wanted = letters.split(",")
        if len(shape) == len(wanted):
            for letter, size in zip(wanted, shape, strict=True):
                if letter not in self.sizes:
                    self.bind(letter, size, name)
        elif any(letter not in self.sizes for letter in wanted):
            self.refuse(name, f"shape [{letters}], got {shape}")
        expected = [self.sizes[letter] for letter in wanted]
        if len(shape) != len(expected) or any(map(_differ, shape, expected)):
            self.refuse(name, f"shape {expected}, got {shape}")

    def elements(self, name: str, letters: str) -> None:
        """Compares a number of elements, which may have any shape."""
        shape = self.shapes.get(name)
        if shape is None:
            return
        expected = _product(self.sizes[letter] for letter in letters.split("*"))
        if _differ(_product(shape), expected):
            self.refuse(name, f"{letters} = {expected} elements, got shape {shape}")

    def index(self, name: str, ranks: tuple[int, ...] = (1,)) -> bool:
        """Whether a list is there, which then has one dimension, or two where it may."""
        shape = self.shapes.get(name)
        if shape is None:
            return False
        if len(shape) not in ranks:
            text = "one dimension" if len(ranks) == 1 else "one or two dimensions"
            self.refuse(name, f"{text}, got shape {shape}")
        return True

    def gates(self) -> None:
        rank = len(self.shapes.get("g", ()))
        if "g" in self.shapes:
            if rank not in (3, 4):
                self.refuse("g", f"shape [B,T,HV] or [B,T,HV,K], got {self.shapes['g']}")
            self.take("g", "B,T,HV" if rank == 3 else "B,T,HV,K")
        self.elements("A_log", "HV")
        self.elements("dt_bias", "HV*K" if rank == 4 else "HV")

    def sequences(self) -> None:
        is_packed = self.index("cu_seqlens")
        sequences = self.shapes["cu_seqlens"][0] - 1 if is_packed else self.sizes["B"]
        self.sizes["N"], self.sizes["N+1"] = sequences, sequences + 1
        if is_packed:
            self.take("cu_seqlens_cpu", "N+1")


def _differ(a: Any, b: Any) -> bool:
    return isinstance(a, int) and isinstance(b, int) and a != b


def _product(sizes: Any) -> Any:
    result = 1
    for size in sizes:
        result = result * size
    return result


def _check_sequences(c: _Shapes) -> None:
    """forward, decode and backward; a tensor that an operator does not have is not there."""
    c.take("q", "B,T,H,K")
    c.take("k", "B,T,H,K")
    c.take("v", "B,T,HV,V")
    is_wide = not c.operator.startswith("forward") and len(c.shapes.get("beta", ())) == 4
    c.take("beta", "B,T,HV,V" if is_wide else "B,T,HV")
    c.gates()
    c.take("gv", "B,T,HV,V")
    c.sequences()
    state = "HV,V,K" if "layout=vk" in c.words else "HV,K,V"

    def take_pool(name: str) -> None:
        if name in c.shapes:
            c.sizes["slots"] = c.shapes[name][0]
            c.take(name, f"slots,{state}")

    c.take("has_initial_state", "N")
    if c.index("accepted"):
        c.take("accepted", "N")
    is_table = "accepted" in c.shapes
    c.index("read_index", (1, 2) if is_table else (1,))
    c.index("write_index", (1, 2) if c.operator.startswith("decode") else (1,))
    if not is_table:
        c.take("read_index", "N")
    _check_writes(c)
    take_pool("state_pool")
    take_pool("write_pool")
    c.take("out", "B,T,HV,V")
    c.take("initial_state", f"N,{state}")
    has_checkpoints = [c.index(f"ckpt_{name}") for name in ("cu", "tokens", "slots")]
    take_pool("ckpt_states")
    if all(has_checkpoints):
        c.take("ckpt_cu", "N+1")
        c.sizes["entries"] = c.shapes["ckpt_tokens"][0]
        c.take("ckpt_slots", "entries")
    c.take("d_o", "B,T,HV,V")
    c.take("d_final_state", f"N,{state}")


def _check_writes(c: _Shapes) -> None:
    """A slot per sequence, or one per sequence and token."""
    shape = c.shapes.get("write_index")
    if shape is None:
        return
    sequences, tokens = c.sizes["N"], c.sizes["T"]
    if _differ(shape[0], sequences):
        c.refuse("write_index", f"N = {sequences} rows, got shape {shape}")
    if len(shape) == 1 or "cu_seqlens" in c.shapes:
        return
    if isinstance(shape[1], int) and isinstance(tokens, int) and shape[1] < tokens:
        c.refuse("write_index", f"at least T = {tokens} columns, got shape {shape}")


def _check_block(c: _Shapes) -> None:
    """The building blocks: x, a, k or g leads."""
    c.take("x", "B,T,H,D")
    c.take("k", "B,T,H,K")
    square = c.shapes.get("a")
    if "k" in c.shapes and square is None:
        lead = next((name for name in ("g", "beta") if len(c.shapes.get(name, ())) >= 3), "k")
        c.bind("HV", c.shapes[lead][2], lead)
    elif "k" in c.shapes and square is not None and len(square) == 4:
        is_size = isinstance(square[3], int) and square[3] not in (16, 32)
        c.sizes["W"] = 64 if is_size else square[3]
    c.take("a", "B,T,HV,W")
    c.gates()
    c.sequences()
    c.take("q", "B,T,H,K")
    c.take("beta", "B,T,HV")
    c.take("v", "B,T,HV,V")


def _check_conv(c: _Shapes) -> None:
    """The convolution, whose weight may be [D,1,W], and in place x [B,D]."""
    if "state_pool" in c.shapes and len(c.shapes["x"]) == 2:
        c.shapes["x"].insert(1, 1)
    weight = c.shapes["weight"]
    if len(weight) == 3 and weight[1] == 1:
        del weight[1]
    c.take("x", "B,T,D")
    c.take("weight", "D,W")
    c.take("bias", "D")
    c.sequences()
    c.take("has_initial_state", "N")
    if c.index("accepted"):
        c.take("accepted", "N")
    if "out" in c.shapes and len(c.shapes["out"]) == 2 and "state_pool" in c.shapes:
        c.shapes["out"].insert(1, 1)
    c.take("out", "B,T,D")
    c.take("state_pool", "slots,D,S")
    if "write_pool" in c.shapes:
        c.sizes["slots"] = c.shapes["write_pool"][0]
        c.take("write_pool", "slots,D,S")
    for name in ("read_index", "write_index"):
        c.index(name)
    for name in ("read_index", "write_index"):
        c.take(name, "N")
    c.take("initial_state", "N,D,S")
    c.take("d_out", "B,T,D")
    c.take("d_final_state", "N,D,S")


_CHECKS: dict[str, Callable[[_Shapes], None]] = {
    **dict.fromkeys(
        (
            *("forward", "forward_save", "forward_", "forward_out_"),
            *("decode", "decode_", "decode_out_", "backward"),
        ),
        _check_sequences,
    ),
    **dict.fromkeys(
        ("cumsum", "gate", "l2norm", "kkt", "scores", "inverse", "scores_inverse", "wy"),
        _check_block,
    ),
    **dict.fromkeys(("conv", "conv_", "conv_out_", "conv_backward"), _check_conv),
}


def _check_devices(function: str, given: dict[str, Any]) -> None:
    """A call with one meta tensor among others must not pass for a result."""
    first, where = "", None
    for name, x in given.items():
        if not isinstance(x, torch.Tensor) or name == "cu_seqlens_cpu":
            continue
        if where is None:
            first, where = name, x.device
        elif x.device.type != where.type:
            raise ValueError(
                f"{function}: {name}: expected device {where} as {first}, got {x.device}"
            )


def register_fake(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Registers a fake implementation behind the checks of devices and shapes.

    ``block_backward`` has that of devices alone: its shapes are those of a call that passed.
    """

    def register(fake: Callable[..., Any]) -> Callable[..., Any]:
        schema = getattr(OPS, name).default._schema
        arguments = [x.name for x in schema.arguments]
        required = [x.name for x in schema.arguments if str(x.type) == "Tensor"]

        def checked(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(arguments, args, strict=False)), **kwargs}
            function = function_of(name, given.values())
            for argument in required:
                if given.get(argument) is None:
                    raise ValueError(f"{function}: {argument}: expected a tensor, got none")
            _check_devices(function, given)
            if name in _CHECKS:
                _CHECKS[name](_Shapes(name, function, given))
            return fake(*args, **kwargs)

        torch.library.register_fake(qualified(name), checked)
        return fake

    return register
