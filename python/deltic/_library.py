"""Loads the operators into torch and turns their errors into Python's."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

TORCH_FLOOR = (2, 11)
_LIBRARY = Path(__file__).with_name("libdeltic_torch.so")

# The library's own names of arguments that are called otherwise here.
_NAMES = {
    "cu_seqlens_host": "cu_seqlens_cpu",
    "chunk": "chunk_size",
    "gate_form": "gate",
    "ckpt_cu": "checkpoints.cu",
    "ckpt_tokens": "checkpoints.tokens",
    "ckpt_slots": "checkpoints.slots",
    "ckpt_states": "checkpoints.states",
    "conv.state_pool": "state",
    "conv.read_index": "state_index",
}
_TEXT = re.compile(r"^(?P<op>[a-z0-9_]+): (?P<argument>\w+): (?P<rest>.*)$", re.DOTALL)
_DTYPE = re.compile(
    r"got (fp32|bf16|fp16|fp64|u?int\d+|bool|complex\d+|an unknown dtype|another dtype)\b"
)
_OUT_OF_MEMORY, _UNSUPPORTED, _INVALID_ARGUMENT = 3, 2, 1


def check_torch_version(version: str) -> None:
    """Raises ImportError where torch is older than the operators need."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or (int(found[1]), int(found[2])) < TORCH_FLOOR:
        floor = ".".join(map(str, TORCH_FLOOR))
        raise ImportError(f"deltic: torch: expected version {floor} or later, got {version}")


def load() -> ctypes.CDLL:
    """The library of the operators, registered with torch."""
    check_torch_version(torch.__version__)
    if not _LIBRARY.exists():
        raise ImportError(
            f"deltic: {_LIBRARY.name}: expected next to {Path(__file__).name}, got none: this is "
            "the source folder, or a package that was built without its library"
        )
    torch.ops.load_library(str(_LIBRARY))
    library = ctypes.CDLL(str(_LIBRARY))
    library.deltic_torch_version.restype = ctypes.c_char_p
    library.deltic_torch_last_status.restype = ctypes.c_int32
    library.deltic_torch_saved_bytes.restype = ctypes.c_int64
    library.deltic_torch_saved_bytes.argtypes = (
        [ctypes.c_int32] * 2
        + [ctypes.c_int64] * 7
        + [ctypes.c_int32, ctypes.c_int64, ctypes.c_int32, ctypes.c_char_p]
    )
    return library


LIBRARY = load()


def saved_bytes(
    device: str,
    dtype: torch.dtype,
    sizes: tuple[int, ...],
    packed: bool,
    chunk: int,
    save: int,
    impl: str | None,
) -> int:
    """Bytes that forward keeps for backward with the sizes B, T, H, K, HV, V, N."""
    return int(
        LIBRARY.deltic_torch_saved_bytes(
            device == "cuda",
            dtype == torch.float64,
            *sizes,
            packed,
            chunk,
            save,
            None if impl is None else impl.encode(),
        )
    )


def translated(error: RuntimeError) -> Exception:
    """The same text as the exception that a Python caller expects."""
    text = str(error).splitlines()[0] if str(error) else ""
    if "Expected a value of type" in text or "expected at most" in text and "argument" in text:
        return TypeError(text)
    match = _TEXT.match(text)
    if match is None:
        return error
    name = match["argument"]
    argument = _NAMES.get(f"{match['op']}.{name}", _NAMES.get(name, name))
    text = f"{match['op']}: {argument}: {match['rest']}"
    status = LIBRARY.deltic_torch_last_status()
    if status == _UNSUPPORTED:
        return NotImplementedError(text)
    if status == _INVALID_ARGUMENT:
        return TypeError(text) if _DTYPE.search(text) else ValueError(text)
    if status == _OUT_OF_MEMORY:
        return MemoryError(text)
    return RuntimeError(text)


def call(op: Callable[..., Any], *args: Any) -> Any:
    """An operator, with its errors translated. A compiled graph calls the operator alone."""
    if torch.compiler.is_compiling():
        return op(*args)
    try:
        return op(*args)
    except RuntimeError as error:
        raise translated(error) from None
