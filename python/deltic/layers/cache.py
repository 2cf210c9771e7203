"""What the layers of a model remember between calls."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from .._library import got, type_name

States = Tensor | tuple[Tensor, ...] | None


class Cache:
    """The states of a model's layers while it decodes, by layer.

    A layer's entry is a dict: ``recurrent_state [N, HV, K, V]`` and ``conv_state``, the last inputs
    of the q, k and v convolutions, ``[N, D, W - 1]`` each. One entry serves as many sequences as
    the batch has. Without gradients layers write into the tensors in place: take :meth:`clone` of a
    cache to come back to.

    >>> import torch
    >>> from deltic.layers import Cache, DeltaNet
    >>> layer = DeltaNet(hidden_size=64, num_heads=2, layer_idx=0).eval()
    >>> x, cache = torch.randn(3, 10, 64), Cache()
    >>> with torch.inference_mode():
    ...     o, _, cache = layer(x, past_key_values=cache, use_cache=True)
    >>> cache.get_seq_length(), cache[0]["recurrent_state"].shape
    (10, torch.Size([3, 2, 32, 32]))
    """

    is_compileable = False

    def __init__(self) -> None:
        self._states: list[dict[str, States] | None] = []
        self._seen: list[int] = []
        self._kept: dict[int, Cache] = {}

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, layer_idx: int) -> dict[str, States] | None:
        if not isinstance(layer_idx, int) or not -len(self) <= layer_idx < len(self):
            kind = IndexError if isinstance(layer_idx, int) else TypeError
            raise kind(
                f"Cache: layer_idx: expected the number of one of its {len(self)} layers, "
                f"got {got(layer_idx)}"
            )
        return self._states[layer_idx]

    def __iter__(self) -> Iterator[dict[str, States] | None]:
        return iter(self._states)

    def __repr__(self) -> str:
        return f"Cache(layers={len(self)}, tokens={self.get_seq_length()})"

    def update(
        self,
        recurrent_state: Tensor | None = None,
        conv_state: tuple[Tensor, ...] | None = None,
        layer_idx: int = 0,
        offset: int = 1,
        **others: States,
    ) -> dict[str, States]:
        """Stores states of a layer after ``offset`` more tokens; what is None stays as it was."""
        if isinstance(layer_idx, bool) or not isinstance(layer_idx, int):
            raise TypeError(f"Cache: layer_idx: expected an int, got {got(layer_idx)}")
        if layer_idx < 0:
            raise ValueError(f"Cache: layer_idx: expected at least 0, got {layer_idx}")
        if recurrent_state is not None and not isinstance(recurrent_state, Tensor):
            raise TypeError(
                f"Cache: recurrent_state: expected a tensor, got {got(recurrent_state)}"
            )
        while len(self._states) <= layer_idx:
            self._states.append(None)
            self._seen.append(0)
        entry = self._states[layer_idx] or {"recurrent_state": None, "conv_state": None}
        states = {"recurrent_state": recurrent_state, "conv_state": conv_state, **others}
        entry.update({name: state for name, state in states.items() if state is not None})
        self._states[layer_idx] = entry
        self._seen[layer_idx] += offset
        return entry

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """The tokens per sequence that a layer has seen, padding included."""
        return self._seen[layer_idx] if layer_idx < len(self._seen) else 0

    def get_max_cache_shape(self, layer_idx: int = 0) -> int:
        """-1: a state does not grow with its sequence."""
        return -1

    def _map(self, function: Callable[[Tensor], Tensor]) -> list[dict[str, States] | None]:
        def mapped(state: States) -> States:
            if isinstance(state, tuple):
                return tuple(map(function, state))
            return None if state is None else function(state)

        return [
            None if entry is None else {name: mapped(state) for name, state in entry.items()}
            for entry in self._states
        ]

    def _change(self, function: Callable[[Tensor], Tensor]) -> None:
        """Every state, and those that were kept, by a function."""
        self._states = self._map(function)
        for kept in self._kept.values():
            kept._change(function)

    def reorder(self, indices: Tensor | Sequence[int]) -> None:
        """Sequence n continues what sequence ``indices[n]`` was: beams, or part of a batch."""
        index = self._indices(indices)
        self._change(lambda state: state.index_select(0, index.to(state.device)))

    def _indices(self, indices: Any) -> Tensor:
        """Numbers of sequences as a tensor; a GPU's are not looked at."""
        expected = "Cache: reorder: expected a list or tensor [n] of sequences' numbers, got "
        if isinstance(indices, str) or not hasattr(indices, "__len__"):
            raise TypeError(expected + got(indices))
        if isinstance(indices, Tensor):
            index = indices
        elif all(hasattr(x, "__index__") for x in indices):
            index = torch.tensor([int(x) for x in indices], dtype=torch.int64)
        else:
            raise TypeError(expected + repr(indices))
        if index.dim() != 1:
            raise ValueError(f"{expected}shape {list(index.shape)}")
        if index.dtype not in (torch.int32, torch.int64):
            raise TypeError(expected + type_name(index.dtype))
        count = self._sequences()
        if count is not None and index.device.type == "cpu":
            wrong = [x for x in index.tolist() if not 0 <= x < count]
            if wrong:
                raise IndexError(
                    f"Cache: reorder: expected numbers from 0 to {count - 1}, got {wrong[0]}"
                )
        return index

    def _sequences(self) -> int | None:
        """How many sequences the states are of; None before the first."""
        for entry in self._states:
            state = None if entry is None else entry["recurrent_state"]
            if isinstance(state, Tensor):
                return state.shape[0]
        return None

    def reorder_cache(self, beam_idx: Tensor | Sequence[int]) -> None:
        """:meth:`reorder`, by the name that transformers has for it."""
        self.reorder(beam_idx)

    def batch_select_indices(self, indices: Tensor | Sequence[int]) -> None:
        """:meth:`reorder` to fewer sequences, by the name that transformers has for it."""
        self.reorder(indices)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Every sequence ``repeats`` times, next to each other."""
        if isinstance(repeats, bool) or not hasattr(repeats, "__index__") or repeats < 1:
            raise ValueError(
                "Cache: batch_repeat_interleave: expected a number of times, at least 1, "
                f"got {got(repeats)}"
            )
        self._change(lambda state: state.repeat_interleave(repeats, dim=0))

    def keep(self) -> None:
        """Keeps a copy of the states as they are now, for :meth:`crop` to come back to."""
        self._kept[self.get_seq_length()] = self._with(torch.clone)

    def crop(self, max_length: int) -> None:
        """Goes back to the first ``max_length`` tokens; below 0: forgets so many.

        A length that is not shorter changes nothing, as in transformers' caches.

        A state holds all tokens in one and cannot forget the last ones: there is a way back to a
        length at which :meth:`keep` was called, and to 0.
        """
        if isinstance(max_length, bool) or not hasattr(max_length, "__index__"):
            raise TypeError(f"Cache: crop: expected a number of tokens, got {got(max_length)}")
        seen = self.get_seq_length()
        length = seen + max_length if max_length < 0 else max_length
        if length >= seen:
            return
        if length != 0 and length not in self._kept:
            known = ", ".join(map(str, sorted({0, *self._kept})))
            raise ValueError(
                f"Cache: crop: expected a length at which keep() was called ({known}: a state "
                f"cannot forget its last tokens), got {max_length}"
                + (f", which is {length} of {seen} tokens" if max_length < 0 else "")
            )
        kept = {tokens: cache for tokens, cache in self._kept.items() if tokens <= length}
        past = kept[length].clone() if length in kept else Cache()
        self._states, self._seen, self._kept = past._states, past._seen, kept

    def to(self, *args: Any, **kwargs: Any) -> "Cache":
        """A cache with every state moved or cast as ``Tensor.to`` does."""
        found = self._with(lambda state: state.to(*args, **kwargs))
        found._kept = {tokens: kept.to(*args, **kwargs) for tokens, kept in self._kept.items()}
        return found

    def clone(self) -> "Cache":
        """A cache that later calls on this one do not change."""
        found = self._with(torch.clone)
        found._kept = {tokens: kept.clone() for tokens, kept in self._kept.items()}
        return found

    def _with(self, function: Callable[[Tensor], Tensor]) -> "Cache":
        found = Cache()
        found._states, found._seen = self._map(function), list(self._seen)
        return found

    def detach_(self) -> None:
        """Cuts the states off their graph: training on parts of a sequence."""
        self._change(torch.Tensor.detach)

    def reset(self) -> None:
        """Forgets everything."""
        self._states, self._seen, self._kept = [], [], {}


def is_cache(found: object) -> bool:
    """Whether something can take the place of a :class:`Cache` for a layer.

    A dict has an ``update`` too, and would take the states where no layer finds them again.
    """
    if isinstance(found, Cache):
        return True
    if isinstance(found, (dict, list, tuple)) or not hasattr(found, "__getitem__"):
        return False
    update = getattr(found, "update", None)
    if update is None or not hasattr(found, "__len__"):
        return False
    return (
        torch.compiler.is_compiling() or "recurrent_state" in inspect.signature(update).parameters
    )
