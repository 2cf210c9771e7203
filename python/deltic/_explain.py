"""What would run: the answers of every implementation to a call, before it is made."""

import ctypes
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ._fakes import ANY_SHAPE
from ._library import (
    LIBRARY,
    NAMESPACE,
    argument_name,
    function_of,
    said_in,
    translated,
    type_name,
)
from ._native import decode, delta_rule, recurrent
from ._settings import info

_FUNCTIONS = (delta_rule, recurrent, decode)
_DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int32,
    torch.int64,
)
_MOST_DIMENSIONS = 6
_BYTES_DTYPES = (torch.bool, torch.uint8)  # of has_initial_state
_IN_PLACE = ("state_pool", "ckpt_states", "write_pool", "out")
# The gradients that backward has, in the order of its outputs.
_GRADIENTS = ("q", "k", "v", "beta", "g", "gv", "A_log", "dt_bias", "initial_state")
_SAVES = {"states": 1, "all": 2}
# SMs that work is divided over where there is no GPU to ask: those of an H200.
_SMS = 132
_NO_CUDA = (
    "this build has no CUDA support (build the package where nvcc is found, or with "
    "DELTIC_PYTHON_CUDA=ON make wheel)"
)


class Choice(NamedTuple):
    """An implementation's answer to a call."""

    name: str
    accepts: bool
    chosen: bool
    sentence: str


class Division(NamedTuple):
    """A way to divide a forward's work over a GPU, with its predicted time."""

    implementation: str
    what: str
    microseconds: float
    chosen: bool
    reason: str


@dataclass(frozen=True, repr=False)
class Explanation:
    """What :func:`explain` found; ``print`` shows all of it.

    Attributes:
        call: the function and its tensors, or the case's canonical line.
        operation: of the library, such as ``"forward"``.
        implementation: the name of the one that would run; None where nobody takes the call.
        choices: the answers, the chosen one first, then the others, best first.
        workspace_bytes: memory during the call beside its tensors; None where nobody takes it, and
            for a GPU that is not there.
        saved_bytes: what forward would keep for gradients.
        divisions: on a GPU the ways to divide a forward's work, the chosen one first.
        copies: arguments that would be copied because of their strides.
        backward: the same of the gradients, where a tensor of the call asks for one.
    """

    call: str
    operation: str
    choices: tuple[Choice, ...]
    workspace_bytes: int | None = None
    saved_bytes: int = 0
    divisions: tuple[Division, ...] = ()
    copies: tuple[str, ...] = ()
    backward: "Explanation | None" = None
    notes: tuple[str, ...] = field(default=())

    @property
    def implementation(self) -> str | None:
        return next((x.name for x in self.choices if x.chosen), None)

    @property
    def refused(self) -> dict[str, str]:
        """Why others do not take the call, by name."""
        return {x.name: x.sentence for x in self.choices if not x.accepts}

    @property
    def schedule(self) -> str:
        """How the work would be divided over a GPU, in words; empty for the CPU."""
        lines = [
            f"{x.implementation}: {x.what}: {x.microseconds:.0f} us, {x.reason}"
            if x.what
            else f"{x.implementation} divides no work here: {x.reason}"
            for x in self.divisions
        ]
        return "\n".join(lines)

    def _nobody(self) -> str:
        """Why nothing would run."""
        for x in self.choices:
            if x.sentence.startswith("named "):
                return (
                    f"nothing runs this call: {x.name} alone may (impl or DELTIC_IMPL), and does "
                    "not take it"
                )
        none = "no implementation takes this call"
        if self.choices:
            return none  # each has said why
        return f"{none}: {_NO_CUDA if info()['cuda'] == 'no' else 'there is none for such tensors'}"

    def __str__(self) -> str:
        width = max((len(x.name) for x in self.choices), default=0)
        lines = [self.call]
        for x in self.choices:
            lines.append(f"  {x.name:<{width}}  {'yes' if x.accepts else 'no':<3}  {x.sentence}")
        if self.implementation is None:
            lines.append(f"  {self._nobody()}")
        lines += [f"  {line}" for line in self.notes]
        if self.workspace_bytes is not None:
            lines.append(f"  workspace: {self.workspace_bytes:,} bytes")
        if self.saved_bytes:
            lines.append(f"  kept for gradients: {self.saved_bytes:,} bytes")
        if self.copies:
            lines.append(f"  copied first, because of their strides: {', '.join(self.copies)}")
        lines += [f"  {line}" for line in self.schedule.splitlines()]
        if self.backward is not None:
            lines += ["", str(self.backward)]
        return "\n".join(lines)

    __repr__ = __str__


class _Tensor(ctypes.Structure):
    """``deltic_tensor`` of the C interface, where it is frozen."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("dtype", ctypes.c_int32),
        ("device_type", ctypes.c_int32),
        ("device_index", ctypes.c_int32),
        ("rank", ctypes.c_int32),
        ("shape", ctypes.c_int64 * _MOST_DIMENSIONS),
        ("strides", ctypes.c_int64 * _MOST_DIMENSIONS),
    ]


_CHOICE = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_char_p
)
_BYTES = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64)
_WAY = ctypes.CFUNCTYPE(
    None, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_double, ctypes.c_int32, ctypes.c_char_p
)


class _Listener(ctypes.Structure):
    _fields_ = [("choice", _CHOICE), ("bytes", _BYTES), ("way", _WAY)]


class _Asked(BaseException):
    """Carries a call out of the function that was about to make it."""

    def __init__(self, operator: str, given: dict[str, Any]) -> None:
        self.operator, self.given = operator, given


class _Ask(TorchDispatchMode):
    """Under it an operator of ours raises its arguments instead of running."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        if getattr(func, "namespace", "") == NAMESPACE:
            names = [x.name for x in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | (kwargs or {})
            raise _Asked(func.name().partition("::")[2], given)
        return func(*args, **(kwargs or {}))


def explain(
    *args: Any,
    function: Callable[..., Any] | str = delta_rule,
    device: str | None = None,
    **options: Any,
) -> Explanation:
    """Which implementation would run a call, why not the others, and what it would need.

    Nothing runs, and no tensor's values are looked at: tensors of torch's meta device do.

    Args:
        args, options: the arguments of ``function`` as they would be passed; or one text, a case as
            the program ``deltic explain`` takes it, with ``impl`` the only option.
        function: :func:`delta_rule`, :func:`recurrent` or :func:`decode`, or its name.
        device: ``"cpu"`` or ``"cuda"``, where the tensors would lie; by default where they do, and
            the CPU for meta tensors and texts. ``"cuda"`` needs no GPU, but a package built with
            GPU kernels: without a GPU it divides the work as for an H200.

    Raises:
        ValueError, TypeError: as the call itself would. A call that nobody takes is an answer, not
            an error.

    >>> import torch, deltic
    >>> q = torch.empty(1, 4096, 16, 128, device="meta")
    >>> found = deltic.explain(q, q, q, qk_l2norm=True)
    >>> found.operation, found.implementation == found.choices[0].name
    ('forward', True)
    """
    if isinstance(function, str):
        function = {x.__name__: x for x in _FUNCTIONS}.get(function, function)
    if device not in (None, "cpu", "cuda"):
        raise ValueError(f"explain: device: expected 'cpu' or 'cuda', got {device!r}")
    if len(args) == 1 and isinstance(args[0], str):
        return _explain_case(args[0], function, device or "cpu", options)
    if isinstance(function, str) or function not in _FUNCTIONS:
        names = ", ".join(x.__name__ for x in _FUNCTIONS)
        got = getattr(function, "__name__", repr(function))
        raise ValueError(f"explain: function: expected one of {names}, got {got}")
    if not args and "q" not in options:
        raise TypeError("explain: q: expected a tensor, or one text as the only argument, got none")
    if args and not isinstance(args[0], Tensor):
        raise TypeError(
            "explain: q: expected a tensor, or one text as the only argument, "
            f"got {type(args[0]).__name__}"
        )
    asked = None
    try:
        with _Ask():  # type: ignore[no-untyped-call]
            function(*args, **options)
    except _Asked as found:
        asked = found
    assert asked is not None  # each of them calls an operator, or raises
    return _explain_tensors(asked.operator, asked.given, device)


def _description(name: str, x: Tensor) -> str:
    return f"{name} {type_name(x.dtype)} [{','.join(map(str, x.shape))}]"


def _view(
    operator: str, function: str, name: str, x: Tensor, device: str | None
) -> tuple[_Tensor, bool]:
    """A tensor as the library sees it, and whether it would be a copy."""
    argument = argument_name(operator, name)
    if x.layout != torch.strided:
        layout = str(x.layout).removeprefix("torch.")
        raise TypeError(f"{function}: {argument}: expected a dense tensor, got {layout}")
    if x.dim() == 0 and name not in ANY_SHAPE:
        raise ValueError(f"{function}: {argument}: expected at least one dimension, got shape []")
    is_bytes = x.dtype in _BYTES_DTYPES and name == "has_initial_state"
    if x.dtype not in _DTYPES and not is_bytes:
        expected = LIBRARY.deltic_torch_types_of(name.encode()).decode()
        raise TypeError(f"{function}: {argument}: expected {expected}, got {type_name(x.dtype)}")
    where = device or ("cpu" if x.device.type == "meta" else x.device.type)
    if where not in ("cpu", "cuda"):
        raise NotImplementedError(
            f"{function}: {argument}: expected a CPU or CUDA tensor, got another device's"
        )
    found = _Tensor(dtype=len(_DTYPES) if is_bytes else _DTYPES.index(x.dtype))
    found.device_type = int(where == "cuda" and name != "cu_seqlens_cpu")
    found.device_index = x.device.index or 0
    shape, strides = list(x.shape) or [1], list(x.stride()) or [1]
    found.rank = len(shape)
    is_copied = len(shape) <= _MOST_DIMENSIONS and shape[-1] > 1 and strides[-1] != 1
    if is_copied and name not in _IN_PLACE:
        strides = [1]
        for size in reversed(shape[1:]):
            strides.insert(0, strides[0] * max(size, 1))
    for i, (size, stride) in enumerate(zip(shape, strides, strict=True)):
        if i < _MOST_DIMENSIONS:
            found.shape[i], found.strides[i] = size, stride
    return found, is_copied and name not in _IN_PLACE and 0 not in shape


def _explain_tensors(operator: str, given: dict[str, Any], device: str | None) -> Explanation:
    words = given.get("options", "")
    function = function_of(operator, (words,))
    tensors = {name: x for name, x in given.items() if isinstance(x, Tensor)}
    views: list[_Tensor] = []
    copies: list[str] = []
    for name, x in tensors.items():
        view, is_copied = _view(operator, function, name, x, device)
        views.append(view)
        if is_copied:
            copies.append(argument_name(operator, name))
    said = said_in(words)
    want = 0
    if torch.is_grad_enabled() and operator in ("forward_save", "decode"):
        want = sum(
            1 << i
            for i, name in enumerate(_GRADIENTS)
            if name in tensors and tensors[name].requires_grad
        )
    heard = _Heard()
    status = LIBRARY.deltic_torch_explain(
        operator.encode(),
        words.encode(),
        _number(given.get("scale")),
        _number(given.get("lower_bound")),
        len(views),
        (ctypes.c_char_p * len(views))(*(name.encode() for name in tensors)),
        (_Tensor * len(views))(*views),
        want,
        0 if any(key.startswith("gpu.") for key in info()) else _SMS,
        ctypes.byref(heard.listener),
    )
    if status != 0:
        raise translated(RuntimeError(LIBRARY.deltic_torch_explain_error().decode()), function)
    listed = ", ".join(_description(argument_name(operator, n), x) for n, x in tensors.items())
    options = " ".join(word for word in words.split() if not word.startswith(("as=", "save=")))
    call = f"{function}({listed}{'; ' + options if options else ''})"
    main = "decode" if operator.startswith("decode") else "forward"
    keeps = said.get("save") in _SAVES
    backward = None
    if want:
        backward = Explanation(
            call=f"gradients of {function}",
            operation="backward",
            choices=tuple(heard.choices.get("backward", ())),
            workspace_bytes=heard.bytes.get(("backward", "workspace")),
        )
    return Explanation(
        call=call,
        operation=main,
        choices=tuple(heard.choices.get(main, ())),
        workspace_bytes=heard.bytes.get((main, "workspace")),
        saved_bytes=heard.bytes.get(("forward", "saved"), 0) if keeps else 0,
        divisions=tuple(heard.divisions),
        copies=tuple(copies),
        backward=backward,
    )


def _number(value: float | None) -> Any:
    return None if value is None else ctypes.byref(ctypes.c_double(value))


class _Heard:
    """What the library says while it explains a call."""

    def __init__(self) -> None:
        self.choices: dict[str, list[Choice]] = {}
        self.bytes: dict[tuple[str, str], int] = {}
        self.divisions: list[Division] = []

        def choice(operation: bytes, name: bytes, accepts: int, chosen: int, why: bytes) -> None:
            found = Choice(name.decode(), bool(accepts), bool(chosen), why.decode())
            self.choices.setdefault(operation.decode(), []).append(found)

        def size(operation: bytes, what: bytes, found: int) -> None:
            self.bytes[operation.decode(), what.decode()] = found

        def way(impl: bytes, what: bytes, time: float, chosen: int, reason: bytes) -> None:
            self.divisions.append(
                Division(impl.decode(), what.decode(), time, bool(chosen), reason.decode())
            )

        self.listener = _Listener(_CHOICE(choice), _BYTES(size), _WAY(way))


def _explain_case(
    line: str, function: Callable[..., Any] | str, device: str, options: dict[str, Any]
) -> Explanation:
    """The program's answer to a case."""
    impl = options.pop("impl", None)
    if options or function is not delta_rule:
        name = next(iter(options), "function")
        raise TypeError(f"explain: {name}: expected impl and device alone with a case's text")
    if impl is not None and not isinstance(impl, str):
        raise TypeError(f"explain: impl: expected an implementation's name, got {impl!r}")
    if "\0" in line or "\0" in (impl or ""):
        raise ValueError("explain: case: expected a text without zero bytes, got one with them")
    if not hasattr(LIBRARY, "deltic_torch_explain_case"):
        raise NotImplementedError(
            "explain: case: expected tensors (this package was built without the program, which "
            "reads cases: it needs libcli11-dev and nlohmann-json3-dev), got a text"
        )
    answers: list[str] = []

    @ctypes.CFUNCTYPE(None, ctypes.c_char_p)
    def take(text: bytes) -> None:
        answers.append(text.decode())

    ask = LIBRARY.deltic_torch_explain_case
    ask.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_int32, ctypes.c_int32, type(take)]
    ask.restype = ctypes.c_int32
    # The number of SMs is the program's own choice: those of the GPU here, or of an H200.
    if ask(line.encode(), (impl or "").encode(), int(device == "cuda"), 0, take) == 0:
        raise ValueError(f"explain: {answers[0].removeprefix('--')}")
    found = json.loads(answers[0])
    return _of_json(line, found["cases"], found["summary"])


def _of_json(line: str, rows: list[dict[str, Any]], summary: dict[str, Any]) -> Explanation:
    choices = tuple(Choice(x["impl"], x["accepts"], x["chosen"], x["sentence"]) for x in rows)
    call = rows[0]["case"] if rows else line
    divisions = [
        Division(x["impl"], x["what"], x["predicted_us"], x["chosen"], x["reason"])
        for x in summary.get("divisions", ())
    ]
    if "not_divided" in summary:
        none = summary["not_divided"]
        divisions.append(Division(none["impl"], "", 0.0, False, none["reason"]))
    notes: list[str] = []
    workspace, saved = summary.get("workspace_bytes"), 0
    memory = summary.get("memory")
    if memory is not None:
        said = said_in(call).get("save", "states")
        for name, plan in memory["save"].items():
            notes.append(
                f"save={name}: {plan['saved_bytes']:,} bytes kept, "
                f"workspace {plan['workspace_bytes']:,} bytes"
            )
        saved = memory["save"][said]["saved_bytes"]
    return Explanation(
        call=call,
        operation=call.split()[0],
        choices=choices,
        workspace_bytes=workspace,
        saved_bytes=saved,
        divisions=tuple(divisions),
        notes=tuple(notes),
    )
