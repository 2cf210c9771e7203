"""A name that is kept so that its error can say what to use."""

from typing import Any, NoReturn


def fused_chunk_delta_rule(**kwargs: Any) -> NoReturn:
    """Gone: always raises."""
    raise NotImplementedError("`fused_chunk_delta_rule` is deprecated: use `chunk_delta_rule`")
