"""The native calls: delta_rule, recurrent and decode."""

from numbers import Real
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, NoReturn, TypedDict, overload

import torch
from torch import Tensor
from torch.compiler import is_compiling

from ._library import (
    DIRECT_DECODE,
    DIRECT_FORWARD,
    HAS_CUDA_BACKWARD,
    call,
    call_without_gradients,
    got,
)
from ._sequence_ops import (
    DECODE,
    DECODE_,
    DECODE_OUT_,
    DECODE_RECORD_,
    FORWARD,
    FORWARD_,
    FORWARD_OUT_,
    FORWARD_SAVE,
    differentiable,
)

if TYPE_CHECKING:
    from typing_extensions import Unpack

Gate = Literal["log_decay", "softplus", "bounded"]
BetaForm = Literal["value", "sigmoid", "2sigmoid"]
StateLayout = Literal["kv", "vk"]
Split = Literal["auto", "off", "by_length"] | int
Form = Literal["chunked", "recurrent"]

# Options as words of the operators' text.
GATES = {"log_decay": "", "softplus": " gate=softplus", "bounded": " gate=bounded"}
_BETA_FORMS = {"value": "", "sigmoid": " beta=sigmoid", "2sigmoid": " beta=2sigmoid"}
STATE_LAYOUTS = {"kv": "", "vk": " layout=vk"}
# The library's numbers are fp32: a larger one would become infinite.
_MOST_FP32 = 3.4028234663852886e38
_CHUNK = 64
_SPLITS = {"auto": "", "off": " split=off", "by_length": " split=by_length"}
_FORMS = {"chunked": "", "recurrent": " form=recurrent"}


class Checkpoints(NamedTuple):
    """States to be kept at tokens inside of sequences: where, and the memory they go to.

    Entries ``cu[n]`` to ``cu[n + 1] - 1`` belong to sequence n. Entry m keeps the state after the
    first ``tokens[m]`` tokens of this call (0: the initial state) in ``states[slots[m]]`` (slot -1:
    nowhere). ``states`` is written in place: ``[slots, HV, K, V]``, fp32, bf16 or fp16, in the
    call's state layout. Checkpoints are not differentiable.
    """

    cu: Tensor
    tokens: Tensor
    slots: Tensor
    states: Tensor


class _Options(TypedDict, total=False):
    """The keywords that delta_rule and recurrent share, but for ``output_final_state``.

    The type of what a call returns follows that one alone.
    """

    beta: Tensor | None
    g: Tensor | None
    scale: float | None
    initial_state: Tensor | None
    cu_seqlens: Tensor | None
    cu_seqlens_cpu: Tensor | None
    gate: Gate
    A_log: Tensor | None
    dt_bias: Tensor | None
    lower_bound: float | None
    beta_form: BetaForm
    qk_l2norm: bool
    state_layout: StateLayout
    has_initial_state: Tensor | None
    out: Tensor | None
    impl: str | None


class _ChunkOptions(_Options, total=False):
    split: Split
    chunk_size: int
    recompute: bool
    checkpoints: Checkpoints | tuple[Tensor, Tensor, Tensor, Tensor] | None
    state_pool: Tensor | None
    read_index: Tensor | None
    write_index: Tensor | None
    write_pool: Tensor | None
    accepted: Tensor | None
    null_slot: int | None
    form: Form | None
    recurrent_from: Tensor | None


class _RecurrentOptions(_Options, total=False):
    gv: Tensor | None


def word_for(op: str, argument: str, value: Any, words: dict[str, str]) -> str:
    """An option's word, or the error for a value that there is none for."""
    if isinstance(value, str) and value in words:
        return words[value]
    names = ", ".join(map(repr, words))
    raise ValueError(f"{op}: {argument}: expected one of {names}, got {value!r}")


def name_word(op: str, impl: str | None) -> str:
    """The word that names an implementation."""
    if impl is None:
        return ""
    is_name = isinstance(impl, str) and impl.isascii() and impl.isprintable() and " " not in impl
    if not is_name or not impl:
        raise ValueError(f"{op}: impl: expected an implementation's name, got {impl!r}")
    return f" impl={impl}"


def size_word(op: str, argument: str, word: str, value: int) -> str:
    """The word for a number of tokens."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {argument}: expected a name or a number of tokens, got {value!r}")
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"{op}: {argument}: expected a number of tokens, got {value}")
    return f" {word}={value}"


def chunk_word(op: str, value: int) -> str:
    """The word for a chunk's length, which fake implementations take as it is."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: chunk_size: expected an int, got {value!r}")
    if value not in (16, 32, 64):
        raise ValueError(f"{op}: chunk_size: expected 16, 32 or 64, got {value}")
    return f" chunk={value}" if value != 64 else ""


def null_word(op: str, value: int | None) -> str:
    """The word for the slots that are none."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: null_slot: expected an int, got {value!r}")
    if not -(2**31) <= value < 2**31:
        raise ValueError(f"{op}: null_slot: expected a slot, got {value}")
    return f" null_slot={value}"


def seed_word(op: str, value: int | None) -> str:
    """The word for a seed."""
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: seed: expected an int, got {value!r}")
    if not 0 <= value < 2**64:
        raise ValueError(f"{op}: seed: expected a number of 0 to 2^64 - 1, got {value}")
    return f" seed={value}"


def flag_word(op: str, argument: str, word: str, value: bool) -> str:
    """The word for a switch, which a text such as "no" must not turn on."""
    if value is True:
        return word
    if value is False:
        return ""
    raise TypeError(f"{op}: {argument}: expected a bool, got {value!r}")


def check_numbers(op: str, scale: float | None, lower_bound: float | None) -> None:
    """A TypeError for a tensor, whose value torch would take without its gradient, or a bool."""
    if scale is None and lower_bound is None:
        return
    for argument, value in (("scale", scale), ("lower_bound", lower_bound)):
        if value is None:
            continue
        if isinstance(value, (Tensor, bool)):
            found = "a tensor" if isinstance(value, Tensor) else value
            raise TypeError(f"{op}: {argument}: expected a float, got {found}")
        if isinstance(value, (int, float)) and _MOST_FP32 < abs(value) < float("inf"):
            raise ValueError(
                f"{op}: {argument}: expected a number that fp32 holds, got {got(value)}"
            )


def is_eps(value: Any) -> bool:
    """Whether it is a finite number of at least 0, and one that fp32 holds."""
    is_number = isinstance(value, (int, float, Real)) and not isinstance(value, bool)
    return is_number and bool(0 <= value <= _MOST_FP32)


# By function and options, of those that are right: at most 72 for each function.
_KNOWN_WORDS: dict[tuple[Any, ...], str] = {}


def option_words(
    op: str,
    gate: str,
    beta_form: str,
    qk_l2norm: bool,
    state_layout: str,
    output_final_state: bool,
    impl: str | None,
) -> str:
    """The options that forward and decode share."""
    key = (op, gate, beta_form, qk_l2norm, state_layout, output_final_state)
    # 1 would be found as True is, and is no bool.
    is_plain = impl is None and type(qk_l2norm) is bool and type(output_final_state) is bool
    if is_plain:
        try:
            return _KNOWN_WORDS[key]
        except KeyError:
            is_plain = all(type(word) is str for word in (gate, beta_form, state_layout))
        except TypeError:
            is_plain = False  # something unhashable, which is said below
    try:
        words = f"as={op}" + GATES[gate] + _BETA_FORMS[beta_form] + STATE_LAYOUTS[state_layout]
    except (KeyError, TypeError):
        words = f"as={op}" + word_for(op, "gate", gate, GATES)
        words += word_for(op, "beta_form", beta_form, _BETA_FORMS)
        words += word_for(op, "state_layout", state_layout, STATE_LAYOUTS)
    words += flag_word(op, "qk_l2norm", " qk_l2norm", qk_l2norm)
    words += flag_word(op, "output_final_state", " final", output_final_state)
    if is_plain:
        _KNOWN_WORDS[key] = words
    return words if impl is None else words + name_word(op, impl)


def autocast(x: Tensor) -> Tensor:
    """A tensor in autocast's dtype."""
    if not isinstance(x, Tensor):
        return x  # the operator says what is wrong with it
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device) or x.dtype == torch.float64:
        return x
    return x.to(torch.get_autocast_dtype(device))


def _autocast(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v in autocast's dtype; gates and beta stay as they are."""
    if not torch._C._is_any_autocast_enabled():
        return q, k, v
    if not isinstance(q, Tensor) or q.device.type == "meta":
        return q, k, v
    if not torch.is_autocast_enabled(q.device.type):
        return q, k, v
    return autocast(q), autocast(k), autocast(v)


def needs_grad(tensors: tuple[Tensor | None, ...]) -> bool:
    """Whether somebody will ask for gradients of a call with these tensors."""
    return torch.is_grad_enabled() and any(
        isinstance(t, Tensor) and t.requires_grad for t in tensors
    )


def has_any(*given: Any) -> bool:
    """Whether one of them is there. Not by `in` or `==`: tensors answer with tensors."""
    for x in given:
        if x is not None:
            return True
    return False


def is_cuda(x: Any) -> bool:
    """Whether it is a tensor on a GPU."""
    return isinstance(x, Tensor) and x.device.type == "cuda"


def check_has_gradient(op: str, q: Tensor) -> None:
    """Raises where the device of a call over sequences has no gradient: now, not in backward."""
    if is_cuda(q) and not HAS_CUDA_BACKWARD:
        raise NotImplementedError(
            f"{op}: requires_grad: expected CPU tensors where gradients are asked for (there is no "
            "backward for CUDA tensors in this build: use torch.no_grad()), got CUDA tensors"
        )


@overload
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    output_final_state: Literal[True],
    **options: "Unpack[_ChunkOptions]",
) -> tuple[Tensor, Tensor]: ...
@overload
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    output_final_state: Literal[False] = False,
    **options: "Unpack[_ChunkOptions]",
) -> tuple[Tensor, None]: ...
@overload
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    output_final_state: bool,
    **options: "Unpack[_ChunkOptions]",
) -> tuple[Tensor, Tensor | None]: ...
def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor | None = None,
    g: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    split: Split = "auto",
    gate: Gate = "log_decay",
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_form: BetaForm = "value",
    qk_l2norm: bool = False,
    state_layout: StateLayout = "kv",
    chunk_size: int = 64,
    recompute: bool = True,
    checkpoints: Checkpoints | tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
    state_pool: Tensor | None = None,
    read_index: Tensor | None = None,
    write_index: Tensor | None = None,
    write_pool: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    accepted: Tensor | None = None,
    null_slot: int | None = None,
    form: Form | None = None,
    recurrent_from: Tensor | None = None,
    out: Tensor | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Delta-rule linear attention over whole sequences: DeltaNet, Gated DeltaNet, KDA.

    Per sequence and value head, with a state S of K x V numbers::

        S'  = decay_t * S_{t-1}            decay_t = 1 | exp(g_t) | Diag(exp(g_t))
        u_t = beta_t * (v_t - S'^T k_t)
        S_t = S' + k_t u_t^T
        o_t = scale * S_t^T q_t

    Args:
        q, k: ``[B, T, H, K]``, fp32, bf16 or fp16; K up to 256.
        v: ``[B, T, HV, V]`` in q's dtype; HV a multiple of H: value head h reads q and k of
            head h // (HV // H).
        beta: ``[B, T, HV]``, any float dtype; absent means 1. Of shape ``[B, T, HV, V]`` the
            recurrent form runs (see :func:`recurrent`).
        g: ``[B, T, HV]`` (Gated DeltaNet) or ``[B, T, HV, K]`` (KDA), natural log; absent:
            DeltaNet.
        scale: of q, by default ``K ** -0.5``.
        initial_state: ``[N, HV, K, V]``, fp32, bf16 or fp16; absent means 0.
        output_final_state: returns the state after the last token, as ``initial_state``, else fp32.
        cu_seqlens: ``[N + 1]`` int32 or int64 offsets of packed sequences, with B = 1. Rows past
            the last offset are padding: o is 0 there.
        cu_seqlens_cpu: a copy of ``cu_seqlens`` on the CPU, for tensors on a GPU.
        split: how a sequence may be cut into segments: ``"auto"``, ``"off"``, ``"by_length"`` or a
            length in tokens. On the CPU ``"auto"`` is ``"off"``, and there is no other.
        gate: ``"log_decay"``: g as it is; ``"softplus"``: ``-exp(A_log) * softplus(g + dt_bias)``;
            ``"bounded"``: ``lower_bound * sigmoid(exp(A_log) * (g + dt_bias))``.
        A_log: HV elements in any shape.
        dt_bias: HV elements (gate per head) or HV * K (per channel) in any shape.
        lower_bound: of the gate ``"bounded"``, below 0.
        beta_form: ``"value"``, ``"sigmoid"`` or ``"2sigmoid"`` (negative eigenvalues).
        qk_l2norm: divides q and k by ``sqrt(sum(x ** 2) + 1e-6)`` inside.
        state_layout: ``"kv"``, or ``"vk"`` for states of shape ``[N, HV, V, K]``.
        chunk_size: 16, 32 or 64.
        recompute: for gradients keeps about sqrt(chunks) states and computes the rest again; False
            keeps everything: a faster backward, more memory, the same bits. Of CUDA tensors nothing
            is kept either way: their backward starts from the inputs.
        checkpoints: states inside of sequences, see :class:`Checkpoints`.
        state_pool: ``[slots, HV, K, V]``, read and written in place instead of initial and final
            state. Not differentiable.
        read_index, write_index: ``[N]``, the slots of each sequence (-1: from zero, nowhere). One
            list serves for both; without any, sequence n has slot n, of a pool that may have more.
        write_pool: a second pool that is written instead of ``state_pool``, with its own slots.
        has_initial_state: ``[N]`` bool: where False the sequence starts from zero, whatever its
            read slot or initial state.
        accepted: ``[N]`` int32 or int64, with ``read_index [N, T']``: sequence n starts from slot
            ``read_index[n, accepted[n] - 1]``.
        null_slot: slots from -1 up to this one are none, in every list of slots; by default -1.
        form: ``"chunked"``, or ``"recurrent"``: token by token, with the bits of :func:`decode`.
            Gradients are those of the same function and come chunk by chunk; nothing is kept for
            them (``recompute``).
        recurrent_from: ``[N]`` int32 or int64, 0 to the length of each sequence: from this token
            on the form is recurrent, before it is chunked. o and states have the bits of a call
            over the first tokens and a :func:`decode` of the others, started from the state that
            the first one left (with a pool of 16 bits: as it is stored there).
        out: ``[B, T, HV, V]`` in v's dtype, in which o is written and returned; rows of a longer
            buffer will do.
        impl: the name of an implementation, by default the best that takes the call. float64 runs
            in the oracle only, ``"reference"``.

    Returns:
        ``o [B, T, HV, V]`` in v's dtype, and the final state or None.

    Under autocast q, k and v are cast to its dtype, gates and beta are not.

    >>> import torch, deltic
    >>> q, k, v = (torch.randn(1, 100, 2, 64) for _ in range(3))
    >>> g = -torch.rand(1, 100, 2)
    >>> o, state = deltic.delta_rule(q, k, v, g=g, qk_l2norm=True, output_final_state=True)
    >>> o.shape, state.shape
    (torch.Size([1, 100, 2, 64]), torch.Size([1, 2, 64, 64]))
    """
    is_plain = checkpoints is None and form is None and recurrent_from is None
    is_plain = is_plain and split == "auto" and chunk_size is _CHUNK and recompute is True
    if is_plain and DIRECT_FORWARD is not None and not is_compiling():
        found = DIRECT_FORWARD(
            q,
            k,
            v,
            beta,
            g,
            None,
            A_log,
            dt_bias,
            initial_state,
            state_pool,
            read_index,
            write_index,
            write_pool,
            has_initial_state,
            accepted,
            None,
            cu_seqlens,
            cu_seqlens_cpu,
            out,
            scale,
            lower_bound,
            gate,
            beta_form,
            state_layout,
            qk_l2norm,
            output_final_state,
            impl,
            null_slot,
        )
        if found is not None:
            return found
    if isinstance(beta, Tensor) and beta.dim() == 4:
        for name, value, default in (
            ("split", split, "auto"),
            ("chunk_size", chunk_size, 64),
            ("recompute", recompute, True),
            ("checkpoints", checkpoints, None),
            ("state_pool", state_pool, None),
            ("read_index", read_index, None),
            ("write_index", write_index, None),
            ("write_pool", write_pool, None),
            ("accepted", accepted, None),
            ("null_slot", null_slot, None),
            ("form", form, None),
            ("recurrent_from", recurrent_from, None),
        ):
            if value is not None if default is None else value != default:
                expected, got = ("none", "one") if default is None else (repr(default), repr(value))
                raise ValueError(
                    f"delta_rule: {name}: expected {expected} with a beta per value column (the "
                    f"recurrent form), got {got}"
                )
        _check_wide_beta(q, v, beta)
        return _by_token(
            "delta_rule",
            (q, k, v, beta, g, None, A_log, dt_bias, initial_state),
            (cu_seqlens, cu_seqlens_cpu),
            (scale, lower_bound),
            (gate, beta_form, qk_l2norm, state_layout, output_final_state, impl),
            (has_initial_state, out),
        )
    q, k, v = _autocast(q, k, v)
    check_numbers("delta_rule", scale, lower_bound)
    words = option_words(
        "delta_rule", gate, beta_form, qk_l2norm, state_layout, output_final_state, impl
    )
    if split != "auto":
        words += (
            word_for("delta_rule", "split", split, _SPLITS)
            if isinstance(split, str)
            else size_word("delta_rule", "split", "split", split)
        )
    if chunk_size is not _CHUNK or null_slot is not None:
        words += chunk_word("delta_rule", chunk_size) + null_word("delta_rule", null_slot)
    kept = flag_word("delta_rule", "recompute", " save=states", recompute) or " save=all"
    if form is not None or recurrent_from is not None:
        word = _form_word(form, recurrent_from)
        words += word
        kept = kept if word == "" else ""
    if output_final_state and state_pool is not None:
        refuse_final_state("delta_rule", "state_pool")
    ckpt = _NO_CHECKPOINTS if checkpoints is None else checkpoint_tensors("delta_rule", checkpoints)
    rows = (q, k, v, beta, g, A_log, dt_bias, initial_state)
    trains = needs_grad(rows)
    in_place = state_pool is not None or read_index is not None or write_index is not None
    servers = (write_pool, has_initial_state, accepted)
    has_from = recurrent_from is not None and not trains
    if out is not None or null_slot is not None or has_from or has_any(*servers):
        if trains or needs_grad((state_pool, write_pool, out)):
            _refuse_gradient("delta_rule", (state_pool, write_pool), has_initial_state, out)
        o, final_state = call(
            FORWARD_OUT_,
            *rows,
            state_pool,
            read_index,
            write_index,
            *servers,
            cu_seqlens,
            cu_seqlens_cpu,
            *ckpt,
            recurrent_from,
            out,
            scale,
            lower_bound,
            words,
        )
        o = o if out is None else out
    elif in_place or (checkpoints is not None and not trains):
        if trains or needs_grad((state_pool,)):
            _refuse_pool("delta_rule")
        o, final_state = call(
            FORWARD_,
            *rows,
            state_pool,
            read_index,
            write_index,
            cu_seqlens,
            cu_seqlens_cpu,
            *ckpt,
            scale,
            lower_bound,
            words,
        )
    elif trains:
        check_has_gradient("delta_rule", q)
        if not is_cuda(q):  # there backward starts from the inputs, whatever was kept
            words += kept
        o, final_state, ckpt_states, _ = call(
            differentiable(FORWARD_SAVE),
            *rows,
            cu_seqlens,
            cu_seqlens_cpu,
            *ckpt,
            recurrent_from,
            scale,
            lower_bound,
            words,
        )
        if ckpt[3] is not None:
            with torch.no_grad():
                ckpt[3].copy_(ckpt_states)
    else:
        o, final_state = call_without_gradients(
            FORWARD, *rows, cu_seqlens, cu_seqlens_cpu, scale, lower_bound, words
        )
    return o, final_state if output_final_state else None


def _form_word(form: Any, recurrent_from: Tensor | None) -> str:
    """The word for a form, which a first token of it says too."""
    if form is None:
        return _FORMS["recurrent"]
    if recurrent_from is not None and form == "chunked":
        raise ValueError(
            "delta_rule: recurrent_from: expected none with the form 'chunked', got a tensor"
        )
    return word_for("delta_rule", "form", form, _FORMS)


def _check_wide_beta(q: Tensor, v: Tensor, beta: Tensor) -> None:
    """The error for a beta of four dimensions that is no beta per value column: here three do too.

    Where v is wrong, or sizes are symbols of a graph, the operator's own check has the word.
    """
    if torch.compiler.is_compiling() or not (isinstance(q, Tensor) and isinstance(v, Tensor)):
        return
    shape, expected = list(beta.shape), list(v.shape)
    if len(expected) != 4 or not all(type(size) is int for size in shape + expected):
        return
    if shape != expected and list(q.shape[:2]) == expected[:2]:
        raise ValueError(
            f"delta_rule: beta: expected shape {expected[:3]} or {expected}, got {shape}"
        )


_NO_CHECKPOINTS = (None, None, None, None)
_POOL_HAS_NO_GRADIENT = (
    "{}: state_pool: expected none where gradients are asked for (a pool is not differentiable: "
    "use torch.no_grad(), or {}), got a tensor"
)


def _refuse_pool(op: str) -> NoReturn:
    """The error for a pool in a call that somebody asks for gradients of."""
    instead = "recurrent with initial_state" if op == "decode" else "initial_state"
    raise ValueError(_POOL_HAS_NO_GRADIENT.format(op, instead))


def refuse_final_state(op: str, pool: str) -> NoReturn:
    """The error for a final state that is asked for where a pool keeps it."""
    raise ValueError(
        f"{op}: output_final_state: expected False with {pool}, where the last states are left, "
        "got True"
    )


def _refuse_gradient(
    op: str, pools: tuple[Tensor | None, ...], has_initial_state: Tensor | None, out: Tensor | None
) -> NoReturn:
    """The error for what has no gradient in a call that somebody asks for gradients of."""
    if any(pool is not None for pool in pools):
        _refuse_pool(op)
    name = "has_initial_state" if out is None and has_initial_state is not None else "out"
    if out is None and has_initial_state is None:
        name = "null_slot"
    raise ValueError(
        f"{op}: {name}: expected none where gradients are asked for (use torch.no_grad()), got one"
    )


def checkpoint_tensors(op: str, given: Any) -> tuple[Tensor, ...]:
    """The four tensors of checkpoints, or the error for what is something else."""
    found = tuple(given) if isinstance(given, (tuple, list)) else ()
    if len(found) != 4:
        is_list = isinstance(given, (tuple, list))
        said = f"{len(found)} of them" if is_list else type(given).__name__
        raise ValueError(f"{op}: checkpoints: expected (cu, tokens, slots, states), got {said}")
    for name, tensor in zip(Checkpoints._fields, found, strict=True):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{op}: checkpoints.{name}: expected a tensor, got {got(tensor)}")
    if needs_grad((found[3],)):
        raise ValueError(
            f"{op}: checkpoints.states: expected a tensor that requires no gradient "
            "(checkpoints are not differentiable), got one that does"
        )
    return found


@overload
def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    output_final_state: Literal[True],
    **options: "Unpack[_RecurrentOptions]",
) -> tuple[Tensor, Tensor]: ...
@overload
def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    output_final_state: Literal[False] = False,
    **options: "Unpack[_RecurrentOptions]",
) -> tuple[Tensor, None]: ...
@overload
def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    output_final_state: bool,
    **options: "Unpack[_RecurrentOptions]",
) -> tuple[Tensor, Tensor | None]: ...
def recurrent(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor | None = None,
    g: Tensor | None = None,
    gv: Tensor | None = None,
    scale: float | None = None,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    gate: Gate = "log_decay",
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_form: BetaForm = "value",
    qk_l2norm: bool = False,
    state_layout: StateLayout = "kv",
    has_initial_state: Tensor | None = None,
    out: Tensor | None = None,
    impl: str | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The same operator token by token, differentiable.

    Shapes and options as in :func:`delta_rule`. This form also takes what chunks cannot: ``beta``
    of shape ``[B, T, HV, V]`` and ``gv [B, T, HV, V]``, a log decay per value column.

    >>> import torch, deltic
    >>> q, k, v = (torch.randn(2, 3, 1, 16) for _ in range(3))
    >>> beta, gv = torch.rand(2, 3, 1, 16), -torch.rand(2, 3, 1, 16)
    >>> o, state = deltic.recurrent(q, k, v, beta=beta, gv=gv, output_final_state=True)
    >>> o.shape, state.shape
    (torch.Size([2, 3, 1, 16]), torch.Size([2, 1, 16, 16]))
    """
    if DIRECT_DECODE is not None and not is_compiling():
        found = DIRECT_DECODE(
            q,
            k,
            v,
            beta,
            g,
            gv,
            A_log,
            dt_bias,
            initial_state,
            None,
            None,
            None,
            None,
            has_initial_state,
            None,
            None,
            cu_seqlens,
            cu_seqlens_cpu,
            out,
            scale,
            lower_bound,
            gate,
            beta_form,
            state_layout,
            qk_l2norm,
            output_final_state,
            impl,
            None,
        )
        if found is not None:
            return found
    return _by_token(
        "recurrent",
        (q, k, v, beta, g, gv, A_log, dt_bias, initial_state),
        (cu_seqlens, cu_seqlens_cpu),
        (scale, lower_bound),
        (gate, beta_form, qk_l2norm, state_layout, output_final_state, impl),
        (has_initial_state, out),
    )


def _by_token(
    function: str,
    rows: tuple[Any, ...],
    sequences: tuple[Tensor | None, Tensor | None],
    numbers: tuple[float | None, float | None],
    options: tuple[str, str, bool, str, bool, str | None],
    servers: tuple[Tensor | None, Tensor | None],
) -> tuple[Tensor, Tensor | None]:
    """The recurrent form for the function that was called: :func:`recurrent`, or another."""
    q, k, v, *others = rows
    rows = (*_autocast(q, k, v), *others)
    check_numbers(function, *numbers)
    words = option_words(function, *options)
    trains = needs_grad(rows)
    has_initial_state, out = servers
    if has_initial_state is not None or out is not None:
        if trains or needs_grad((out,)):
            _refuse_gradient(function, (), has_initial_state, out)
        pools = (None, None, None, None, has_initial_state, None, None, None)
        o, final_state = call(DECODE_OUT_, *rows, *pools, *sequences, out, *numbers, words)
        return o if out is None else out, final_state if " final" in words else None
    if trains:
        check_has_gradient(function, q)
        o, final_state = call(differentiable(DECODE), *rows, *sequences, *numbers, words)
    else:
        o, final_state = call_without_gradients(DECODE, *rows, *sequences, *numbers, words)
    return o, final_state if " final" in words else None


def decode(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    beta: Tensor | None = None,
    g: Tensor | None = None,
    gv: Tensor | None = None,
    state_pool: Tensor,
    read_index: Tensor | None = None,
    write_index: Tensor | None = None,
    write_pool: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    accepted: Tensor | None = None,
    parents: Tensor | None = None,
    record: Tensor | None = None,
    null_slot: int | None = None,
    seed: int | None = None,
    positions: Tensor | None = None,
    scale: float | None = None,
    cu_seqlens: Tensor | None = None,
    cu_seqlens_cpu: Tensor | None = None,
    gate: Gate = "log_decay",
    A_log: Tensor | None = None,
    dt_bias: Tensor | None = None,
    lower_bound: float | None = None,
    beta_form: BetaForm = "value",
    qk_l2norm: bool = False,
    state_layout: StateLayout = "kv",
    out: Tensor | None = None,
    impl: str | None = None,
) -> Tensor:
    """One or a few tokens per sequence, the states updated in place in a pool.

    Shapes and options as in :func:`delta_rule`, ``gv`` as in :func:`recurrent`.

    Args:
        state_pool: ``[slots, HV, K, V]`` (``"vk"``: ``[slots, HV, V, K]``), fp32, bf16 or fp16, in
            and out.
        read_index: ``[N]`` int32 or int64, the slot each sequence starts from; -1: from zero.
            Without this and ``write_index`` sequence n has slot n, of a pool that may have more.
        write_index: ``[N]``, the slot its last state goes to (-1: nowhere), or ``[N, T]``: the slot
            of the state after every token. Both -1: the sequence is skipped and its o is 0.
        write_pool, has_initial_state, null_slot, out: as in :func:`delta_rule`.
        accepted: ``[N]`` with a table ``read_index [N, T']``: sequence n starts from slot
            ``read_index[n, accepted[n] - 1]``. Without ``write_index`` the state after token t then
            goes to ``read_index[n, t]``: the slots of the drafted tokens.
        parents: ``[N, T']`` int32 or int64, a tree of up to 16 drafted tokens: token t starts from
            the state after token ``parents[n, t]``, one before it, or (-1) from where the sequence
            starts. Needs a slot per token, or a record.
        record: ``[N, T', HV, W]`` fp32, written: what up to 16 drafted tokens do to the states,
            which stay as they are; :func:`commit` applies those that are accepted. A row is k, u
            and the decay, ``W = K + V`` and K, 1 or 0 for a gate per channel, per head or none.
            Not with ``gv``, ``write_index`` or ``write_pool``.
        seed: a number of 64 bits: a pool of bf16 or fp16 is rounded after every token to one of the
            two neighbours by chance, so that the mean is right (stochastic rounding), instead of to
            the nearest. The chance is a function of the seed, the token's position in its sequence,
            the value head and the element: neither the batch nor the division into calls changes a
            bit.
        positions: ``[N]`` int32 or int64 with ``seed``: the position of each sequence's first token
            of this call; by default 0.

    Returns:
        ``o [B, T, HV, V]``. Not differentiable: see :func:`recurrent`.

    >>> import torch, deltic
    >>> q, k, v = (torch.randn(3, 1, 2, 64) for _ in range(3))
    >>> pool = torch.zeros(8, 2, 64, 64)
    >>> o = deltic.decode(q, k, v, state_pool=pool, read_index=torch.tensor([5, 0, 2]))
    >>> o.shape, [slot for slot in range(8) if pool[slot].any()]
    (torch.Size([3, 1, 2, 64]), [0, 2, 5])
    """
    is_plain = record is None and seed is None and positions is None and state_pool is not None
    if is_plain and DIRECT_DECODE is not None and not is_compiling():
        found = DIRECT_DECODE(
            q,
            k,
            v,
            beta,
            g,
            gv,
            A_log,
            dt_bias,
            None,
            state_pool,
            read_index,
            write_index,
            write_pool,
            has_initial_state,
            accepted,
            parents,
            cu_seqlens,
            cu_seqlens_cpu,
            out,
            scale,
            lower_bound,
            gate,
            beta_form,
            state_layout,
            qk_l2norm,
            False,
            impl,
            null_slot,
        )
        if found is not None:
            return found[0]
    words = option_words("decode", gate, beta_form, qk_l2norm, state_layout, False, impl)
    q, k, v = _autocast(q, k, v)
    rows = (q, k, v, beta, g, gv, A_log, dt_bias)
    if needs_grad((*rows, state_pool)):
        _refuse_pool("decode")
    check_numbers("decode", scale, lower_bound)
    servers = (write_pool, has_initial_state, accepted, parents, positions)
    if record is not None:
        for name, given in (("gv", gv), ("write_index", write_index), ("write_pool", write_pool)):
            if given is not None:
                raise ValueError(f"decode: {name}: expected none with a record, got a tensor")
        if seed is not None or positions is not None:
            name = "positions" if seed is None else "seed"
            raise ValueError(f"decode: {name}: expected none with a record, got one")
        if needs_grad((record, out)):
            _refuse_gradient("decode", (record,), None, out)
        if state_pool is None:
            raise TypeError("decode: state_pool: expected a tensor, got none")
        o = call(
            DECODE_RECORD_,
            *(q, k, v, beta, g, A_log, dt_bias),
            *(state_pool, read_index, has_initial_state, accepted, parents, record),
            cu_seqlens,
            cu_seqlens_cpu,
            out,
            scale,
            lower_bound,
            words + null_word("decode", null_slot),
        )
        scored = o if out is None else out
        return scored
    if out is not None or null_slot is not None or seed is not None or has_any(*servers):
        if needs_grad((write_pool, out)):
            _refuse_gradient("decode", (write_pool,), None, out)
        if state_pool is None:
            raise TypeError("decode: state_pool: expected a tensor, got none")
        o, _ = call(
            DECODE_OUT_,
            *rows,
            None,
            state_pool,
            read_index,
            write_index,
            *servers,
            cu_seqlens,
            cu_seqlens_cpu,
            out,
            scale,
            lower_bound,
            words + null_word("decode", null_slot) + seed_word("decode", seed),
        )
        result: Tensor = o if out is None else out
        return result
    result = call(
        DECODE_,
        *rows,
        state_pool,
        read_index,
        write_index,
        cu_seqlens,
        cu_seqlens_cpu,
        scale,
        lower_bound,
        words,
    )
    return result
