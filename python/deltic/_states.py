"""Operators on states alone: from slot to slot of pools."""

from typing import Any

from torch import Tensor

from ._fakes import register_fake
from ._library import OPS, call
from ._native import STATE_LAYOUTS, StateLayout, name_word, needs_grad, null_word, word_for
from ._sequence_ops import refuse_vmap

_MOVE_ = OPS.move_.default


@register_fake("move_")
def _move_fake(state_pool: Tensor, *others: Any, **options: Any) -> None:
    return None


refuse_vmap("move_")


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
    if needs_grad((state_pool, write_pool)):
        raise ValueError(
            "move_states: state_pool: expected no gradients to be asked for (pools are not "
            "differentiable: use torch.no_grad()), got a tensor that needs one"
        )
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
