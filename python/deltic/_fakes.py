"""How fake implementations are registered, and what they refuse before they make anything.

A fake implementation makes outputs from shapes alone: for meta tensors and for compilers. Shapes
that the library refuses are refused here too, in its order and in its words. Sizes that are symbols
are taken as they are: a comparison would tie a compiled graph to its answer.
"""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ._library import OPS, argument_name, function_of, qualified

# Their elements count, in whatever shape.
ANY_SHAPE = ("A_log", "dt_bias", "saved")
# The building blocks that have an operator of their own, with their numbers at the C ABI.
BLOCKS = {
    **{"cumsum": 2, "gate": 3, "l2norm": 4, "kkt": 5, "scores": 6, "inverse": 7, "wy": 8},
    "scores_inverse": 11,
}
# The most tokens of a tree.
_MOST_DRAFTS = 16


class _Shapes:
    """The shapes of one call's tensors, and the sizes that they gave to letters."""

    def __init__(self, operator: str, function: str, given: dict[str, Any]) -> None:
        self.operator, self.function, self.given = operator, function, given
        self.words = str(given.get("options", "")).split()
        self.shapes = {
            name: list(x.shape) or [1] * (name in ANY_SHAPE)
            for name, x in given.items()
            if isinstance(x, torch.Tensor)
        }
        self.sizes: dict[str, Any] = {}
        for name, shape in self.shapes.items():
            if not shape and name not in ANY_SHAPE:
                self.refuse(name, "at least one dimension, got shape []")

    def refuse(self, name: str, text: str) -> NoReturn:
        argument = argument_name(self.operator, name)
        raise ValueError(f"{self.function}: {argument}: expected {text}")

    def need(self, name: str) -> None:
        """A tensor that is not there."""
        if name not in self.shapes:
            self.refuse(name, "a tensor, got none")

    def refuse_any(self, name: str) -> None:
        """A tensor that a call does not take."""
        if name in self.shapes:
            self.refuse(name, "none, got a tensor")

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

    def index(self, name: str, ranks: tuple[int, ...] = (1,), hint: str = "") -> bool:
        """Whether a list is there, which then has one dimension, or two where it may."""
        shape = self.shapes.get(name)
        if shape is None:
            return False
        if len(shape) not in ranks:
            text = "one dimension" if len(ranks) == 1 else "one or two dimensions"
            self.refuse(name, f"{text}{hint if len(shape) == 2 else ''}, got shape {shape}")
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
        if is_packed and _differ(self.sizes["B"], 1):
            text = f"a batch of 1 with packed sequences, got {self.sizes['B']}"
            self.refuse("cu_seqlens", text)
        sequences = self.shapes["cu_seqlens"][0] - 1 if is_packed else self.sizes["B"]
        self.sizes["N"], self.sizes["N+1"] = sequences, sequences + 1
        if is_packed:
            self.take("cu_seqlens_cpu", "N+1")

    def slots_without_lists(
        self, name: str, lists: tuple[str, str] = ("read_index", "write_index")
    ) -> None:
        """Every sequence has a slot of a pool where no list says which."""
        if name not in self.shapes or any(index in self.shapes for index in lists):
            return
        found, wanted = self.shapes[name][0], self.sizes["N"]
        if _is_less(found, wanted):
            self.refuse(name, f"at least N = {wanted} slots without indices, got {found}")


def _is_less(a: Any, b: Any) -> bool:
    return isinstance(a, int) and isinstance(b, int) and a < b


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
    _check_rule(c)


def _check_rule(c: _Shapes) -> None:
    """What the delta rule takes beside q, k and v, whose sizes are known."""
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

    c.take("out", "B,T,HV,V")
    _check_lists(c)
    for name in ("state_pool", "write_pool"):
        take_pool(name)
    for name in ("state_pool", "write_pool"):
        c.slots_without_lists(name)
    c.take("initial_state", f"N,{state}")
    has_checkpoints = [c.index(f"ckpt_{name}") for name in ("cu", "tokens", "slots")]
    take_pool("ckpt_states")
    if all(has_checkpoints):
        c.take("ckpt_cu", "N+1")
        c.sizes["entries"] = c.shapes["ckpt_tokens"][0]
        c.take("ckpt_slots", "entries")
    _check_record(c)
    _check_parents(c)
    if c.index("recurrent_from"):
        c.take("recurrent_from", "N")
    if c.index("positions"):
        if not any(word.startswith("seed=") for word in c.words):
            c.refuse("positions", "none without a seed, got a tensor")
        c.take("positions", "N")
    c.take("d_o", "B,T,HV,V")
    c.take("d_final_state", f"N,{state}")


def _check_lists(c: _Shapes) -> None:
    """Slots of sequences: lists, or tables with a column per token."""
    is_decode = c.operator.startswith(("decode", "step"))
    c.take("has_initial_state", "N")
    if c.index("accepted"):
        c.take("accepted", "N")
    has_table = "accepted" in c.shapes
    for name, may_be_table in (("read_index", has_table), ("write_index", is_decode)):
        hint = " (a table [N,T'] needs accepted)" if name == "read_index" else ""
        c.index(name, (1, 2) if may_be_table else (1,), hint)
    if has_table and len(c.shapes.get("read_index", ())) != 2:
        got = "a list" if "read_index" in c.shapes else "none"
        c.refuse("read_index", f"a table [N,T'] with accepted counts, got {got}")
    for name, may_be_table in (("read_index", has_table), ("write_index", is_decode)):
        shape = c.shapes.get(name)
        if shape is None:
            continue
        if not may_be_table:
            c.take(name, "N")
        elif _differ(shape[0], c.sizes["N"]):
            c.refuse(name, f"N = {c.sizes['N']} rows, got shape {shape}")
    # Without a list of its own decode writes where the table reads.
    name = "write_index" if "write_index" in c.shapes or not is_decode else "read_index"
    _check_columns(c, name)


def _check_columns(c: _Shapes, name: str) -> None:
    """A table has a column for each token."""
    shape = c.shapes.get(name, [])
    if len(shape) == 2 and "cu_seqlens" not in c.shapes and _is_less(shape[1], c.sizes["T"]):
        c.refuse(name, f"at least T = {c.sizes['T']} columns, got shape {shape}")


def _check_record(c: _Shapes) -> None:
    """The updates of drafted tokens."""
    shape = c.shapes.get("record")
    if shape is None:
        return
    if len(shape) != 4:
        c.refuse("record", f"shape [N,T',HV,W], got {shape}")
    if _is_less(_MOST_DRAFTS, shape[1]):
        c.refuse("record", f"at most {_MOST_DRAFTS} drafted tokens T', got {shape[1]}")
    gate = len(c.shapes.get("g", ()))
    decays = 0 if gate == 0 else 1 if gate == 3 else c.sizes["K"]
    c.sizes["T'"], c.sizes["W"] = shape[1], c.sizes["K"] + c.sizes["V"] + decays
    c.take("record", "N,T',HV,W")
    if "cu_seqlens" not in c.shapes and _is_less(shape[1], c.sizes["T"]):
        c.refuse("record", f"at least T = {c.sizes['T']} tokens T', got shape {shape}")


def _check_parents(c: _Shapes) -> None:
    """Trees of drafted tokens."""
    shape = c.shapes.get("parents")
    if shape is None:
        return
    name = "write_index" if "write_index" in c.shapes else "read_index"
    if len(c.shapes.get(name, ())) != 2 and "record" not in c.shapes:
        c.refuse("parents", "none without a write index per token, got a tensor")
    c.index("parents", (1, 2))
    if len(shape) != 2 or _differ(shape[0], c.sizes["N"]):
        c.refuse("parents", f"shape [N,T'] with N = {c.sizes['N']}, got {shape}")
    if "cu_seqlens" not in c.shapes and _is_less(_MOST_DRAFTS, c.sizes["T"]):
        c.refuse("parents", f"at most {_MOST_DRAFTS} drafted tokens, got T = {c.sizes['T']}")
    _check_columns(c, "parents")


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
    width = c.sizes.get("W")
    if c.operator.startswith("inverse") and isinstance(width, int) and width not in (16, 32, 64):
        c.refuse("a", f"a width of 16, 32 or 64, got {width}")
    c.gates()
    c.sequences()
    c.take("q", "B,T,H,K")
    c.take("beta", "B,T,HV")
    c.take("v", "B,T,HV,V")


# The inputs that each of them needs, and those that it may have.
_INPUTS = {
    "cumsum": ("g", "A_log dt_bias"),
    "gate": ("g", "A_log dt_bias"),
    "l2norm": ("x", ""),
    "kkt": ("k", "g beta"),
    "scores": ("q k", "g"),
    "inverse": ("a", ""),
    "wy": ("k a", "q v g beta"),
    "scores_inverse": ("q k", "g beta"),
}
# What they write into memory of the caller's.
_RESULTS = {
    "cumsum": {"out": "g"},
    "gate": {"out": "g"},
    "l2norm": {"out": "B,T,H,D", "rstd": "B,T,H"},
    "kkt": {"out": "B,T,HV,W"},
    "scores": {"out": "B,T,HV,W"},
    "inverse": {"out": "B,T,HV,W"},
    "wy": {"w": "B,T,HV,K", "u": "B,T,HV,V", "kg": "B,T,HV,K", "qg": "B,T,HV,K"},
    "scores_inverse": {"out": "B,T,HV,W", "inverse": "B,T,HV,W"},
}


def _operator_of(name: str, given: dict[str, Any]) -> str:
    """The operator that errors are about: block_out_ is one for each block."""
    if name != "block_out_":
        return name
    block = next((block for block, number in BLOCKS.items() if number == given["op"]), None)
    if block is None:
        text = f"expected a building block, 2 to 8 or 11, got {given['op']}"
        raise ValueError(f"{name}: op: {text}")
    return f"{block}_out_"


def _check_block_out(c: _Shapes) -> None:
    """The building blocks with outputs of the caller's."""
    block = c.operator.removesuffix("_out_")
    needed, optional = (names.split() for names in _INPUTS[block])
    for name in ("q", "k", "v", "x", "g", "beta", "A_log", "dt_bias", "a"):
        if name in needed:
            c.need(name)
        elif name not in optional:
            c.refuse_any(name)
    _check_block(c)
    chunk = [word.removeprefix("chunk=") for word in c.words if word.startswith("chunk=")]
    c.sizes.setdefault("W", int(chunk[0]) if chunk else 64)
    results = dict(_RESULTS[block])
    for name, input_name in (("u", "v"), ("qg", "q"), ("kg", "kg")):  # what `wy` is not asked for
        if input_name not in c.shapes:
            results.pop(name, None)
    for name in ("out", "rstd", "inverse", "w", "u", "kg", "qg"):
        if name not in results:
            c.refuse_any(name)
            continue
        c.need(name)
        letters = results[name]
        if letters == "g":
            letters = "B,T,HV" if len(c.shapes["g"]) == 3 else "B,T,HV,K"
        c.take(name, letters)


def _check_norm(c: _Shapes) -> None:
    c.take("x", "B,T,H,D")
    if c.sizes["D"] == 0:
        c.refuse("x", "a width of at least 1, got 0")
    c.take("z", "B,T,H,D")
    c.take("weight", "D")
    c.take("out", "B,T,H,D")


def _take_windows(c: _Shapes, name: str, slots: str) -> None:
    """States of the convolution."""
    shape, taps = c.shapes.get(name), c.sizes["W"]
    if shape is None:
        return
    if slots == "slots":
        c.sizes["slots"] = shape[0]
    if len(shape) == 3 and isinstance(taps, int) and _is_less(shape[2], max(taps - 1, 1)):
        text = f"at least W - 1 = {taps - 1} inputs S per channel (and 1), got {shape[2]}"
        c.refuse(name, text)
    c.take(name, f"{slots},D,S")


def _check_windows(
    c: _Shapes, weights: tuple[str, str], lists: tuple[str, str], pools: tuple[str, str]
) -> None:
    """Rows, weights and bias of a convolution, lengths, its pools of windows with their lists."""
    weight = c.shapes[weights[0]]
    if len(weight) == 3 and weight[1] == 1:
        del weight[1]
    c.take("x", "B,T,D")
    c.take(weights[0], "D,W")
    c.take(weights[1], "D")
    c.sequences()
    c.take("has_initial_state", "N")
    if c.index("accepted"):
        c.take("accepted", "N")
    for name in lists:
        c.index(name)
    for name in lists:
        c.take(name, "N")
    for name in pools:
        _take_windows(c, name, "slots")
    for name in pools:
        c.slots_without_lists(name, lists)


def _check_conv(c: _Shapes) -> None:
    """The convolution, whose weight may be [D,1,W], and in place x [B,D]."""
    out = c.shapes.get("out")
    if "state_pool" in c.shapes:
        x = c.shapes["x"]
        is_other = out is not None and (
            len(x) in (2, 3) and len(out) != len(x) or len(x) == 2 and any(map(_differ, x, out))
        )
        if is_other:
            c.refuse("out", f"shape {x}, got {out}")
        for shape in (x, out):
            if shape is not None and len(shape) == 2:
                shape.insert(1, 1)
    lists, pools = ("read_index", "write_index"), ("state_pool", "write_pool")
    _check_windows(c, ("weight", "bias"), lists, pools)
    _take_windows(c, "initial_state", "N")
    c.take("out", "B,T,D")
    c.take("d_out", "B,T,D")
    _take_windows(c, "d_final_state", "N")


def _check_step(c: _Shapes) -> None:
    """The convolution, the delta rule on its rows, and the norm."""
    lists, pools = ("conv_index", "conv_write_index"), ("conv_state", "conv_write_state")
    _check_windows(c, ("conv_weight", "conv_bias"), lists, pools)
    taps = c.sizes["W"]
    if "parents" in c.shapes and _is_less(1, taps):
        c.refuse("parents", f"none with W = {taps} taps, whose windows are chains, got a tensor")
    _bind_widths(c)
    _check_rule(c)
    c.take("z", "B,T,HV,V")
    c.take("norm_weight", "V")


def _bind_widths(c: _Shapes) -> None:
    """HV, K and V of a step's states, and the H that x has channels for."""
    shape, is_v_first = c.shapes["state_pool"], "layout=vk" in c.words
    if len(shape) != 4:
        c.refuse("state_pool", f"shape [slots,HV,{'V,K' if is_v_first else 'K,V'}], got {shape}")
    _, heads, K, V = (*shape[:2], *shape[2:][:: -1 if is_v_first else 1])
    channels = c.sizes["D"]
    c.sizes.update(HV=heads, K=K, V=V)
    if not all(isinstance(size, int) for size in (heads, K, V, channels)):
        return
    keys = channels - heads * V
    H = keys // (2 * K) if min(heads, K, V) > 0 and keys > 0 and keys % (2 * K) == 0 else 0
    if H == 0 or heads % H != 0:
        text = f"D = 2*H*K + HV*V channels, H a divisor of HV, with HV = {heads}, K = {K} and "
        c.refuse("x", f"{text}V = {V} of state_pool, got D = {channels}")


def _check_pool(c: _Shapes, name: str, v_first: bool) -> tuple[list[Any], list[Any]]:
    """A pool of states, maybe of layers: these, and K and V."""
    shape = c.shapes[name]
    state = "HV,V,K" if v_first else "HV,K,V"
    if len(shape) not in (4, 5):
        c.refuse(name, f"shape [slots,{state}], or with layers before them, got {shape}")
    if any(isinstance(size, int) and size == 0 for size in shape[-3:]):
        c.refuse(name, f"at least one head, key channel and value column, got shape {shape}")
    return shape[:-4], shape[-2:][:: -1 if v_first else 1]


def _check_commit(c: _Shapes) -> None:
    """A pool, the record of its drafted tokens, and lists."""
    layers, (K, V) = _check_pool(c, "state_pool", "layout=vk" in c.words)
    heads, record = c.shapes["state_pool"][-3], c.shapes["record"]
    if len(record) != 4 + len(layers):
        letters = "layers,N,T',HV,W" if layers else "N,T',HV,W"
        c.refuse("record", f"shape [{letters}], got {record}")
    is_other = any(map(_differ, layers, record)) or _differ(record[-2], heads)
    sizes = (record[-1], K, V)
    if all(isinstance(size, int) for size in sizes):
        is_other = is_other or record[-1] - K - V not in (0, 1, K)
    if is_other:
        text = (
            f"{'layers and ' if layers else ''}HV = {heads} as state_pool has, and rows of K + V "
        )
        text += f"numbers, one or K more of a gate, K = {K}, V = {V}, got shape {record}"
        c.refuse("record", text)
    if _is_less(_MOST_DRAFTS, record[-3]):
        c.refuse("record", f"at most {_MOST_DRAFTS} drafted tokens T', got {record[-3]}")
    c.sizes["N"] = record[-4]
    c.take("has_initial_state", "N")
    for name in ("accepted", "read_index", "write_index"):
        if c.index(name):
            c.take(name, "N")
    slots, has_lists = c.shapes["state_pool"][-4], {"read_index", "write_index"} & set(c.shapes)
    if not has_lists and _is_less(slots, c.sizes["N"]):
        text = f"at least N = {c.sizes['N']} slots without indices, got {slots}"
        c.refuse("state_pool", text)
    parents = c.shapes.get("parents")
    if parents is not None:
        c.index("parents", (1, 2))
        is_short = len(parents) != 2 or _is_less(parents[1], record[-3])
        if is_short or _differ(parents[0], c.sizes["N"]):
            text = f"shape [N,T'] with N = {c.sizes['N']} and T' = {record[-3]} as the record has"
            c.refuse("parents", f"{text}, got {parents}")


def _check_move(c: _Shapes) -> None:
    """Two pools of states of one size, and their lists."""
    is_v_first = "layout=vk" in c.words
    layouts = {
        "state_pool": is_v_first,
        "write_pool": is_v_first != c.given.get("transpose", False),
    }
    sizes = [_check_pool(c, name, v) for name, v in layouts.items() if name in c.shapes]
    if len(sizes) == 2:
        (layers, state_sizes), (other_layers, others) = sizes
        if len(layers) != len(other_layers) or any(map(_differ, layers, other_layers)):
            text = f"layers as state_pool has them, got shape {c.shapes['write_pool']} and "
            c.refuse("write_pool", f"{text}{c.shapes['state_pool']}")
        if any(map(_differ, state_sizes, others)):
            text = f"states of K = {state_sizes[0]} and V = {state_sizes[1]} as state_pool has, got"
            c.refuse("write_pool", f"{text} {others[0]} and {others[1]}")
    c.index("read_index")
    c.index("write_index")
    c.sizes["M"] = c.shapes["read_index"][0]
    c.take("write_index", "M")


_CHECKS: dict[str, Callable[[_Shapes], None]] = {
    **dict.fromkeys(
        (
            *("forward", "forward_save", "forward_", "forward_out_"),
            *("decode", "decode_", "decode_out_", "decode_record_", "backward"),
        ),
        _check_sequences,
    ),
    **dict.fromkeys(
        ("cumsum", "gate", "l2norm", "kkt", "scores", "inverse", "scores_inverse", "wy"),
        _check_block,
    ),
    "block_out_": _check_block_out,
    **dict.fromkeys(("rmsnorm", "rmsnorm_out_"), _check_norm),
    "move_": _check_move,
    "commit_": _check_commit,
    "step_": _check_step,
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
            operator = _operator_of(name, given)
            function = function_of(operator, given.values())
            for argument in required:
                if given.get(argument) is None:
                    raise TypeError(f"{function}: {argument}: expected a tensor, got none")
            _check_devices(function, given)
            want, count = given.get("want", 0), len(schema.returns)
            if not 0 <= want < 1 << count:
                raise ValueError(
                    f"{function}: want: expected bits of {count} gradients, 0 to {2**count - 1}, "
                    f"got {want}"
                )
            if name in _CHECKS:
                _CHECKS[name](_Shapes(operator, function, given))
            return fake(*args, **kwargs)

        torch.library.register_fake(qualified(name), checked)
        return fake

    return register
