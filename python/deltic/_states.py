"""Operators on states alone: from slot to slot of pools, and to where accepted tokens left them."""

from typing import Any

from torch import Tensor

from ._fakes import register_fake
from ._library import OPS, call
from ._native import STATE_LAYOUTS, StateLayout, name_word, needs_grad, null_word, word_for
from ._sequence_ops import refuse_vmap

_MOVE_ = OPS.move_.default
_COMMIT_ = OPS.commit_.default


@register_fake("move_")
def _move_fake(state_pool: Tensor, *others: Any, **options: Any) -> None:
    return None


@register_fake("commit_")
def _commit_fake(state_pool: Tensor, *others: Any, **options: Any) -> None:
    return None


for _name in ("move_", "commit_"):
    refuse_vmap(_name)


def _check_no_gradients(function: str, *tensors: Tensor | None) -> None:
    if needs_grad(tensors):
        raise ValueError(
            f"{function}: state_pool: expected no gradients to be asked for (pools are not "
            "differentiable: use torch.no_grad()), got a tensor that needs one"
        )


def _check_head(argument: str, value: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"move_states: {argument}: expected an int, got {value!r}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"move_states: {argument}: expected a number of heads, got {value}")
    return value


def move_states(
    state_pool: Tensor,
    write_pool: Tensor | None = None,
    *,
    read_index: Tensor,
    write_index: Tensor,
    read_head: int = 0,
    write_head: int = 0,
    num_heads: int | None = None,
    state_layout: StateLayout = "kv",
    write_layout: StateLayout | None = None,
    null_slot: int | None = None,
    impl: str | None = None,
) -> None:
    """Copies states from slots of a pool to slots of another one, or of the same.

    One pass over memory for what servers do with pools: slots forked or put in order, heads split
    over ranks or merged from them, another layout, another dtype; of all layers at once.

    Args:
        state_pool: ``[slots, HV, K, V]`` (``"vk"``: ``[slots, HV, V, K]``) or, of several layers,
            ``[layers, slots, ...]``; fp32, bf16 or fp16. Slots may lie apart by more than they
            hold.
        write_pool: the pool that is written, with as many layers, its own slots, heads and dtype
            (rounded to nearest even); by default ``state_pool`` itself, where no slot may be read
            by one entry and written by another.
        read_index: ``[M]`` int32 or int64, the slot that each entry reads; -1: zeros.
        write_index: ``[M]``, the slot that it writes, each once; -1: none.
        read_head, write_head: the first head that is read and that is written.
        num_heads: how many; by default all of ``state_pool`` from ``read_head`` on.
        state_layout: of ``state_pool``.
        write_layout: of ``write_pool``, by default the same.
        null_slot: slots from -1 up to this one are none; by default -1.
        impl: the name of an implementation, by default the best that takes the call.

    Everything that is not written stays as it is. Not differentiable.

    >>> import torch, deltic
    >>> pool, half = torch.randn(6, 4, 64, 64), torch.zeros(6, 2, 64, 64, dtype=torch.bfloat16)
    >>> slots = torch.tensor([5, 0, 2])
    >>> deltic.move_states(
    ...     pool, half, read_index=slots, write_index=slots, read_head=2, write_layout="vk"
    ... )
    >>> bool((half[5] == pool[5, 2:].mT.bfloat16()).all())
    True
    """
    words = "as=move_states" + word_for("move_states", "state_layout", state_layout, STATE_LAYOUTS)
    transposes = False
    if write_layout is not None:
        word_for("move_states", "write_layout", write_layout, STATE_LAYOUTS)
        transposes = write_layout != state_layout
    if transposes and write_pool is None:
        raise ValueError(
            "move_states: write_layout: expected that of state_pool without a write_pool, got "
            f"{write_layout!r}"
        )
    _check_no_gradients("move_states", state_pool, write_pool)
    words += null_word("move_states", null_slot)
    if impl is not None:
        words += name_word("move_states", impl)
    heads = 0 if num_heads is None else _check_head("num_heads", num_heads)
    if num_heads is not None and heads < 1:
        raise ValueError(f"move_states: num_heads: expected at least 1, got {heads}")
    call(
        _MOVE_,
        state_pool,
        write_pool,
        read_index,
        write_index,
        _check_head("read_head", read_head),
        _check_head("write_head", write_head),
        heads,
        transposes,
        words,
    )


def commit(
    state_pool: Tensor,
    record: Tensor,
    accepted: Tensor,
    *,
    read_index: Tensor | None = None,
    write_index: Tensor | None = None,
    has_initial_state: Tensor | None = None,
    parents: Tensor | None = None,
    state_layout: StateLayout = "kv",
    null_slot: int | None = None,
    impl: str | None = None,
) -> None:
    """Brings states to where the accepted ones of drafted tokens left them.

    What :func:`decode` left in ``record`` is applied to the pool, token by token, without another
    look at q, k or v. The states have the bits of decoding the accepted tokens one by one on the
    implementation of the same name (on a GPU ``cuda.general``).

    Args:
        state_pool: ``[slots, HV, K, V]`` (``"vk"``: ``[slots, HV, V, K]``) or, of several layers,
            ``[layers, slots, ...]``, in and out.
        record: as :func:`decode` left it, ``[N, T', HV, W]``; of several layers
            ``[layers, N, T', HV, W]``, where each layer's call of decode had its own part.
        accepted: ``[N]`` int32 or int64, how many tokens count, 0 to T'. With ``parents`` the last
            of them is token ``accepted[n] - 1``, the others those it comes from.
        read_index, write_index, has_initial_state, parents, null_slot: as in the call of decode;
            ``write_index`` where the state goes to another slot.
        impl: the name of an implementation, by default the best that takes the call.

    Not differentiable.

    >>> import torch, deltic
    >>> q, k, v = (torch.randn(2, 4, 1, 16) for _ in range(3))
    >>> pool, record = torch.zeros(2, 1, 16, 16), torch.zeros(2, 4, 1, 32)
    >>> o = deltic.decode(q, k, v, state_pool=pool, record=record)
    >>> bool(pool.any())
    False
    >>> deltic.commit(pool, record, torch.tensor([3, 0]))
    >>> bool(pool[0].any()), bool(pool[1].any())
    (True, False)
    """
    words = "as=commit" + word_for("commit", "state_layout", state_layout, STATE_LAYOUTS)
    _check_no_gradients("commit", state_pool, record)
    words += null_word("commit", null_slot)
    if impl is not None:
        words += name_word("commit", impl)
    lists = (read_index, write_index, has_initial_state, parents)
    call(_COMMIT_, state_pool, record, accepted, *lists, words)
