"""Other people's models on deltic's operators.

Each module here has ``enable()`` and ``disable()`` for one package, and imports that package when
``enable()`` is called, not before.
"""

from . import fla, sglang, transformers, vllm

__all__ = ["fla", "sglang", "transformers", "vllm"]
