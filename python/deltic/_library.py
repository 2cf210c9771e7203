"""Loads the operators into torch and turns their errors into Python's."""

import ctypes
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.autograd import forward_ad

TORCH_FLOOR = (2, 11)
_LIBRARY = Path(__file__).with_name("libdeltic_torch.so")

# The library's own names of arguments that are called otherwise here.
_NAMES = {
    "cu_seqlens_host": "cu_seqlens_cpu",
    "chunk": "chunk_size",
    "segment_length": "split",
    "final_state": "output_final_state",
    "gate_form": "gate",
    "ckpt_cu": "checkpoints.cu",
    "ckpt_tokens": "checkpoints.tokens",
    "ckpt_slots": "checkpoints.slots",
    "ckpt_states": "checkpoints.states",
    "conv.state_pool": "state",
    "conv.read_index": "state_index",
}
# Patterns stay texts until the first error: compiled they would be a tenth of the import.
_TEXT = r"(?P<op>[a-z0-9_]+): (?P<argument>\w+): (?P<rest>.*)$"
_DTYPE = r"got (fp32|bf16|fp16|fp64|u?int\d+|bool|complex\d+|an unknown dtype|another dtype)\b"
# What torch says of an argument of another type.
_TYPE = (
    r"deltic::(?P<op>\w+)\(\) Expected a value of type '(?:Optional\[)?(?P<expected>\w+)\]?' for "
    r"argument '(?P<argument>\w+)' but instead found type '(?P<found>\w+)'"
)
# What torch's dispatcher says where there is no kernel for a tensor of some kind.
_NO_KERNEL = r"Could not run 'deltic::(?P<op>\w+)' with arguments from the '"
_EXPECTED = {"Tensor": "a tensor", "float": "a float", "bool": "a bool", "int": "a torch.dtype"}
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
    library.deltic_torch_has_cuda_backward.restype = ctypes.c_int32
    library.deltic_torch_saved_bytes.restype = ctypes.c_int64
    library.deltic_torch_saved_bytes.argtypes = (
        [ctypes.c_int32] * 2
        + [ctypes.c_int64] * 7
        + [ctypes.c_int32, ctypes.c_int64, ctypes.c_int32, ctypes.c_char_p]
    )
    return library


LIBRARY = load()
HAS_CUDA_BACKWARD = bool(LIBRARY.deltic_torch_has_cuda_backward())


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


def operation_of(operator: str) -> str:
    """The operation that an operator is a form of: `forward` of `forward_save`."""
    return operator.removesuffix("_save").removesuffix("_")


def argument_name(operation: str, name: str) -> str:
    """What the library's argument is called here."""
    return _NAMES.get(f"{operation}.{name}", _NAMES.get(name, name))


def op_name(op: Any) -> str:
    """An operator's operation."""
    return operation_of(str(op.name()).partition("::")[2])


def translated(error: RuntimeError) -> Exception:
    """The same text as the exception that a Python caller expects."""
    if isinstance(error, NotImplementedError):  # a RuntimeError too, and already what is expected
        return error
    text = str(error).splitlines()[0] if str(error) else ""
    match = re.match(_TYPE, text)
    if match is not None:
        op = operation_of(match["op"])
        argument = _NAMES.get(match["argument"], match["argument"])
        expected = _EXPECTED.get(match["expected"], match["expected"])
        return TypeError(f"{op}: {argument}: expected {expected}, got {match['found']}")
    if ": no implementation takes this call: " in text:
        return NotImplementedError(text)
    match = re.match(_TEXT, text)
    if match is None:
        return error
    argument = argument_name(match["op"], match["argument"])
    is_output = argument in ("out", "w") or (match["op"], argument) == ("scores_inverse", "a")
    if is_output and re.search(_DTYPE, text):
        # The outputs of blocks have the shape they need, and the dtype asked for.
        argument = "dtype"
    text = f"{match['op']}: {argument}: {match['rest']}"
    status = LIBRARY.deltic_torch_last_status()
    if status == _UNSUPPORTED:
        return NotImplementedError(text)
    if status == _INVALID_ARGUMENT:
        return TypeError(text) if re.search(_DTYPE, text) else ValueError(text)
    if status == _OUT_OF_MEMORY:
        return MemoryError(text)
    return RuntimeError(text)


def refused_layout(error: RuntimeError, args: tuple[Any, ...]) -> Exception | None:
    """The error for an argument that is no dense tensor, which has no kernel: or None."""
    match = re.match(_NO_KERNEL, str(error)) if isinstance(error, NotImplementedError) else None
    if match is None:
        return None
    operation = operation_of(match["op"])
    schema = getattr(torch.ops.deltic, match["op"]).default._schema
    for argument, x in zip(schema.arguments, args, strict=False):
        if isinstance(x, torch.Tensor) and x.layout != torch.strided:
            name, layout = argument_name(operation, argument.name), str(x.layout)
            return TypeError(
                f"{operation}: {name}: expected a dense tensor, got {layout.removeprefix('torch.')}"
            )
    return None


def refuse_transforms(op: Any, args: tuple[Any, ...]) -> None:
    """Raises where a transform of torch.func or forward-mode AD goes through the arguments.

    The operators have first gradients in reverse mode. torch.vmap reaches the rule of its own that
    every operator has; without this check torch.func.grad would end in a text about autograd's
    classes, and a forward derivative would come back as zero.
    """
    functorch = torch._C._functorch
    under_func = torch._C._are_functorch_transforms_active()
    for x in args:
        if not isinstance(x, torch.Tensor) or functorch.is_batchedtensor(x):
            continue
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{op_name(op)}: forward_ad: expected tensors without a tangent (gradients are of "
                "reverse mode only), got a dual tensor or a call under torch.func.jvp"
            )
        if under_func and torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError(
                f"{op_name(op)}: torch.func: expected gradients through torch.autograd, got a call "
                "under a transform of torch.func"
            )


def call(op: Callable[..., Any], *args: Any) -> Any:
    """An operator, with its errors translated. A compiled graph calls the operator alone."""
    if forward_ad._current_level >= 0:
        refuse_transforms(op, args)
    if torch.compiler.is_compiling():
        return op(*args)
    if torch._C._are_functorch_transforms_active():
        refuse_transforms(op, args)
    try:
        return op(*args)
    except RuntimeError as error:
        if not any(isinstance(x, torch.Tensor) for x in args):  # torch asks for a backend then
            name = op._schema.arguments[0].name  # type: ignore[attr-defined]
            raise ValueError(f"{op_name(op)}: {name}: expected a tensor, got none") from None
        raise (refused_layout(error, args) or translated(error)) from None
