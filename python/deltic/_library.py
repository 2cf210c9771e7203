"""Loads the operators into torch and turns their errors into Python's."""

import ctypes
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad, profiler
from torch.autograd.graph import increment_version

TORCH_FLOOR = (2, 11)
_LIBRARY = Path(__file__).with_name("libdeltic_torch.so")

# Patterns stay texts until the first error: compiled they would be a tenth of the import.
_TEXT = r"[a-z0-9_]+: [\w.]+: "
# Of a tensor of another dtype, and of None where a tensor must be: Python's TypeErrors.
_DTYPE = (
    r"got (fp32|bf16|fp16|fp64|u?int\d+|bool|complex\d+|float8_\w+|another dtype)\b"
    r"|: expected a tensor, got none$"
)
# A text of the functions: whose it is, about which argument.
SENTENCE = r"(?P<function>\w+): (?P<argument>[\w.]+): (?P<rest>expected .*)"
# What torch says of an argument of another type.
_TYPE = (
    r"\w+::(?P<op>\w+)\(\) Expected a value of type '(?:Optional\[)?(?P<expected>\w+)\]?' for "
    r"argument '(?P<argument>\w+)' but instead found type '(?P<found>\w+)'"
)
# What torch's dispatcher says where there is no kernel for a tensor of some kind.
_NO_KERNEL = r"Could not run '\w+::(?P<op>\w+)' with arguments from the '"
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
    library.deltic_torch_namespace.restype = ctypes.c_char_p
    library.deltic_torch_last_status.restype = ctypes.c_int32
    library.deltic_torch_has_cuda_backward.restype = ctypes.c_int32
    library.deltic_torch_runs_on.restype = ctypes.c_int32
    library.deltic_torch_runs_on.argtypes = [ctypes.c_int32] * 2
    library.deltic_torch_set_num_threads.argtypes = [ctypes.c_int32]
    library.deltic_torch_get_num_threads.restype = ctypes.c_int32
    library.deltic_torch_has_python.restype = ctypes.c_int32
    library.deltic_torch_set_log.restype = None
    library.deltic_torch_set_note.restype = None
    library.deltic_torch_types_of.restype = ctypes.c_char_p
    library.deltic_torch_types_of.argtypes = [ctypes.c_char_p]
    library.deltic_torch_implementations.restype = None
    library.deltic_torch_explain.restype = ctypes.c_int32
    library.deltic_torch_explain.argtypes = (
        [ctypes.c_char_p] * 2
        + [ctypes.c_void_p] * 2
        + [ctypes.c_int32]
        + [ctypes.c_void_p] * 2
        + [ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p]
    )
    library.deltic_torch_explain_error.restype = ctypes.c_char_p
    library.deltic_torch_argument_name.restype = ctypes.c_char_p
    library.deltic_torch_argument_name.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    library.deltic_torch_saved_bytes.restype = ctypes.c_int64
    library.deltic_torch_saved_bytes.argtypes = (
        [ctypes.c_int32] * 2
        + [ctypes.c_int64] * 7
        + [ctypes.c_int32, ctypes.c_int64, ctypes.c_int32, ctypes.c_char_p]
    )
    return library


LIBRARY = load()
# torch.ops.deltic; a build that shares its process with others has a name of its own.
NAMESPACE: str = LIBRARY.deltic_torch_namespace().decode()
OPS: Any = getattr(torch.ops, NAMESPACE)
HAS_CUDA_BACKWARD = bool(LIBRARY.deltic_torch_has_cuda_backward())


# What a direct call returns: outputs and the final state as the functions of _native.py have them.
Direct = Callable[..., tuple[Tensor, Tensor | None] | None]


def direct_calls() -> tuple[Direct, Direct] | None:
    """The functions that take the plain case of eager calls past torch's dispatcher, or None.

    Their arguments are those of :data:`DIRECT_FORWARD`; where one returns None nothing was done and
    the operator is to be called. What torch may do around an operator (modes, transforms, tracing,
    autocast, profiling) they ask for in every call, and then return None.
    """
    c, tensor = torch._C, torch.Tensor
    said = os.environ.get("DELTIC_DIRECT") or "1"
    if said not in ("0", "1"):
        raise ImportError(f"deltic: DELTIC_DIRECT: expected 0 or 1, got {said!r}")
    # Without the lock for all threads Python's rules about references are others.
    if said == "0" or "t" in sys.abiflags or not LIBRARY.deltic_torch_has_python():
        return None
    sample = torch.empty((2, 3), dtype=torch.bfloat16, device="cpu").T
    # Where the functions are that compiled graphs make their tensors with.
    made = getattr(getattr(c, "_dynamo", None), "guards", None)
    try:
        questions = (
            (c._is_any_autocast_enabled, False),
            (c._are_functorch_transforms_active, False),
            (c._is_torch_function_mode_enabled, False),
            (c._len_torch_dispatch_stack, 0),
            (c._is_tracing, False),
        )
        facts = (
            (vars(forward_ad), "_current_level", -1),
            (vars(profiler), "_is_profiler_enabled", False),
        )
        handed = (
            *(None, tensor, torch.nn.Parameter, float, int, str, tensor.__dlpack_c_exchange_api__),
            *(questions, facts, torch.is_grad_enabled, True, False, "requires_grad", tensor.is_neg),
            *(torch.empty_like, {"memory_format": torch.contiguous_format}),
            *(tensor.new_empty, {"dtype": torch.float32}, {"dtype": torch.float64}),
            *(
                getattr(made, "_empty_strided_cuda", None),
                getattr(made, "_empty_strided_cpu", None),
            ),
            (torch.float32, torch.bfloat16, torch.float16, torch.float64),
            *(c._increment_version, sample, sample.data_ptr()),
        )
    except AttributeError:  # a torch that has other names
        return None
    make = ctypes.PyDLL(str(_LIBRARY)).deltic_torch_direct
    make.argtypes, make.restype = [ctypes.py_object], ctypes.py_object
    functions: tuple[Direct, Direct] | None = make(handed)
    return functions


# q, k, v, beta, g, gv, A_log, dt_bias, initial_state, state_pool, read_index, write_index,
# write_pool, has_initial_state, accepted, parents, cu_seqlens, cu_seqlens_cpu, out, scale,
# lower_bound, gate, beta_form, state_layout, qk_l2norm, output_final_state, impl and null_slot, to
# (o, final state or None).
DIRECT_FORWARD, DIRECT_DECODE = direct_calls() or (None, None)


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


def said_in(options: str) -> dict[str, str]:
    """The words ``name=value`` of an operator's options; a bare word has no value."""
    return dict(word.partition("=")[::2] for word in options.split())


def function_of(operator: str, args: Iterable[Any]) -> str:
    """What an error of an operator names: the function that was called, else the operator."""
    options = [x for x in args if isinstance(x, str) and "as=" in x]
    return said_in(options[0]).get("as", operator) if options else operator


def argument_name(operator: str, name: str) -> str:
    """What the library's argument is called here."""
    found: bytes = LIBRARY.deltic_torch_argument_name(operator.encode(), name.encode())
    return found.decode()


def qualified(name: str) -> str:
    """An operator's name with its namespace, as torch.library takes it."""
    return f"{NAMESPACE}::{name}"


def operator_name(op: Any) -> str:
    """An operator's name; also of what stands for one, and has it in its attribute `operator`."""
    op = getattr(getattr(op, "__self__", op), "operator", op)
    return str(op.name()).partition("::")[2]


def got(value: Any) -> str:
    """What an error says it got: a value that is short, else the name of its type."""
    if value is None:
        return "none"
    if isinstance(value, int) and abs(value) >= 10**60:  # thousands of digits say no more
        return "an int beyond 1e60"
    if isinstance(value, (bool, int, float)) or (isinstance(value, str) and len(value) <= 60):
        return repr(value)
    return type(value).__name__


def type_name(dtype: torch.dtype) -> str:
    """A dtype as errors call it."""
    found = str(dtype).removeprefix("torch.")
    names = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float64": "fp64"}
    return names.get(found, found)


def refused_type(text: str, args: tuple[Any, ...]) -> TypeError | None:
    """The error for an argument that is none of the type that torch's schema has, or None."""
    match = re.match(_TYPE, text)
    if match is None:
        return None
    operator, found = match["op"], match["found"]
    names = [x.name for x in getattr(OPS, operator).default._schema.arguments]
    place = names.index(match["argument"])
    if place < len(args):
        found = got(args[place])
    argument = argument_name(operator, match["argument"])
    expected = _EXPECTED.get(match["expected"], match["expected"])
    function = function_of(operator, args)
    return TypeError(f"{function}: {argument}: expected {expected}, got {found}")


def missing_memory(text: str, function: str) -> Exception | None:
    """The error for memory that torch did not find inside of an operator, or None."""
    if text == "std::bad_alloc":
        return MemoryError(f"{function}: memory: expected some bytes more, got none: out of memory")
    match = re.search(r"you tried to allocate (\d+) bytes", text)
    if match is not None:
        return MemoryError(
            f"{function}: memory: expected {match[1]} bytes on the CPU, got none: out of memory"
        )
    match = re.search(r"CUDA out of memory\. Tried to allocate ([\d.]+ \w+)", text)
    if match is not None:
        return torch.OutOfMemoryError(
            f"{function}: memory: expected {match[1]} on a CUDA device, got none: out of memory"
        )
    return None


def translated(error: RuntimeError, function: str = "", args: tuple[Any, ...] = ()) -> Exception:
    """The same text as the exception that a caller of a function expects."""
    if isinstance(error, NotImplementedError):  # a RuntimeError too, and already what is expected
        return error
    text = str(error).splitlines()[0] if str(error) else ""
    wrong_type = refused_type(text, args)
    if wrong_type is not None:
        return wrong_type
    if ": no implementation takes this call: " in text:
        return NotImplementedError(text)
    if re.match(_TEXT, text) is None:
        return missing_memory(text, function) or error
    status = LIBRARY.deltic_torch_last_status()
    if status == _UNSUPPORTED:
        return NotImplementedError(text)
    if status == _INVALID_ARGUMENT:
        return TypeError(text) if re.search(_DTYPE, text) else ValueError(text)
    if status == _OUT_OF_MEMORY:
        return torch.OutOfMemoryError(text) if " on CUDA device " in text else MemoryError(text)
    return RuntimeError(text)


def kind_of(x: torch.Tensor) -> str:
    """What a tensor is that is not dense; else nothing."""
    if x.layout != torch.strided:
        return str(x.layout).removeprefix("torch.")
    return "nested" if x.is_nested else "quantized" if x.is_quantized else ""


def refused_layout(error: RuntimeError, args: tuple[Any, ...]) -> Exception | None:
    """The error for an argument that is no dense tensor, which has no kernel: or None."""
    match = re.match(_NO_KERNEL, str(error)) if isinstance(error, NotImplementedError) else None
    if match is None:
        return None
    operator, function = match["op"], function_of(match["op"], args)
    schema = getattr(OPS, operator).default._schema
    for argument, x in zip(schema.arguments, args, strict=False):
        kind = kind_of(x) if isinstance(x, torch.Tensor) else ""
        if kind:
            name = argument_name(operator, argument.name)
            return TypeError(f"{function}: {name}: expected a dense tensor, got {kind}")
    return None


def refuse_transforms(op: Any, args: tuple[Any, ...]) -> None:
    """Raises where a transform of torch.func or forward-mode AD goes through the arguments.

    The operators have first gradients in reverse mode. torch.vmap reaches the rule of its own that
    every operator has; without this check torch.func.grad would end in a text about autograd's
    classes, and a forward derivative would come back as zero.
    """
    functorch = torch._C._functorch
    function = function_of(operator_name(op), args)
    under_func = torch._C._are_functorch_transforms_active()
    for x in args:
        if not isinstance(x, torch.Tensor) or functorch.is_batchedtensor(x):
            continue
        if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{function}: forward_ad: expected tensors without a tangent (gradients are of "
                "reverse mode only), got a dual tensor or a call under torch.func.jvp"
            )
        if under_func and torch.is_grad_enabled() and x.requires_grad:
            raise NotImplementedError(
                f"{function}: torch.func: expected gradients through torch.autograd, got a call "
                "under a transform of torch.func"
            )


def refused_negation(op: Any, args: tuple[Any, ...]) -> Exception | None:
    """The error for a tensor that is to be written while its negation is pending, or None.

    torch resolves it in a copy, and then misses the operator's writes to the tensor itself.
    """
    operator = operator_name(op)
    for i in written_places(op):
        if isinstance(args[i], torch.Tensor) and args[i].is_neg():
            argument = argument_name(operator, op._schema.arguments[i].name)
            return ValueError(
                f"{function_of(operator, args)}: {argument}: expected a tensor that can be written "
                f"in place, got a negated view ({argument}.resolve_neg() has its values)"
            )
    return None


# By operator, where the arguments stand that it writes to.
_WRITTEN: dict[Any, tuple[int, ...]] = {}


def written_places(op: Any) -> tuple[int, ...]:
    """Where the arguments stand that an operator writes to.

    Autograd has to be told: a graph that kept such a tensor would take its new values for the old.
    """
    arguments = op._schema.arguments if hasattr(op, "_schema") else ()
    _WRITTEN[op] = tuple(
        i for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write
    )
    return _WRITTEN[op]


def call(op: Callable[..., Any], *args: Any) -> Any:
    """An operator, with its errors translated. A compiled graph calls the operator alone."""
    if forward_ad._current_level >= 0:
        refuse_transforms(op, args)
    if torch.compiler.is_compiling():
        return op(*args)
    if torch._C._are_functorch_transforms_active():
        refuse_transforms(op, args)
    try:
        result = op(*args)
        places = _WRITTEN.get(op)
        if places is None:
            places = written_places(op)
        if places:
            increment_version([args[i] for i in places if args[i] is not None])
        return result
    except RuntimeError as error:
        raise explained(error, op, args) from None


def call_without_gradients(op: Callable[..., Any], *args: Any) -> Any:
    """The same for an operator that writes to no argument, where nobody asks for gradients.

    Autograd's rule of an operator is a Python function, called whether there are gradients or not:
    5 to 10 us.
    """
    if is_transformed():
        return call(op, *args)
    try:
        with torch._C._AutoDispatchBelowAutograd():
            return op(*args)
    except RuntimeError as error:
        raise explained(error, op, args) from None


def is_transformed() -> bool:
    """Compilers and functorch's transforms know operators; the plain case takes shorter ways."""
    return (
        forward_ad._current_level >= 0
        or torch._C._are_functorch_transforms_active()
        or torch.compiler.is_compiling()
    )


def explained(error: RuntimeError, op: Any, args: tuple[Any, ...]) -> Exception:
    """An operator's error as the exception that a caller of a function expects."""
    operator = operator_name(op)
    function = function_of(operator, args)
    if not any(isinstance(x, torch.Tensor) for x in args):  # torch asks for a backend then
        schema = getattr(OPS, operator).default._schema.arguments[0].name
        first = argument_name(operator, schema)
        return TypeError(f"{function}: {first}: expected a tensor, got {got(args[0])}")
    if "INTERNAL ASSERT FAILED" in str(error):
        return refused_negation(op, args) or error
    return refused_layout(error, args) or translated(error, function, args)
