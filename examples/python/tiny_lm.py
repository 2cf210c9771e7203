"""What the examples share: a byte-level language model of KDA layers, and the text it learns."""

from dataclasses import asdict, dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
from deltic.layers import Cache, KimiDeltaAttention, RMSNorm
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parents[2]
BYTES = 256
# Text of the project itself: pages first, then sources.
_PATTERNS = ("*.md", "docs/**/*.md", "include/**/*.h*", "src/**/*.h", "src/**/*.cpp", "**/*.py")
# Every 16th piece of this length is held out: all kinds of text are on both sides.
_PIECE, _HELD_OUT = 2048, 16


@dataclass
class Config:
    """The sizes of a model."""

    width: int = 128
    layers: int = 4
    heads: int = 4
    head_dim: int = 32


class Block(nn.Module):
    """A token mixer and a gated feed-forward layer, each behind a norm and around a shortcut."""

    def __init__(self, config: Config, layer_idx: int) -> None:
        super().__init__()
        self.mixer_norm = RMSNorm(config.width)
        self.mixer = KimiDeltaAttention(
            hidden_size=config.width,
            head_dim=config.head_dim,
            num_heads=config.heads,
            layer_idx=layer_idx,
        )
        self.mlp_norm = RMSNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(2 * config.width, config.width, bias=False)

    def forward(self, x: Tensor, cache: Cache | None) -> Tensor:
        y, _, _ = self.mixer(self.mixer_norm(x), past_key_values=cache, use_cache=cache is not None)
        x = x + y
        gate, value = self.up(self.mlp_norm(x)).chunk(2, dim=-1)
        return x + self.down(nn.functional.silu(gate) * value)


class TinyLM(nn.Module):
    """Logits of the next byte for every byte; with a cache the call goes on where it ended."""

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(BYTES, config.width)
        self.blocks = nn.ModuleList(Block(config, i) for i in range(config.layers))
        self.norm = RMSNorm(config.width)
        self.head = nn.Linear(config.width, BYTES, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.zeros_(self.head.weight)  # starts at 8 bits per byte

    def forward(self, tokens: Tensor, cache: Cache | None = None) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x, cache)
        return self.head(self.norm(x))


def save(model: TinyLM, path: Path) -> None:
    """Writes sizes and weights."""
    torch.save({"config": asdict(model.config), "weights": model.state_dict()}, path)


def load(path: Path) -> TinyLM:
    """The model of a checkpoint, ready to be asked."""
    if not path.is_file():
        raise SystemExit(f"{path}: no checkpoint; make one with train_tiny_lm.py")
    try:
        found = torch.load(path, weights_only=True)
        model = TinyLM(Config(**found["config"]))
        model.load_state_dict(found["weights"])
    except (OSError, EOFError, KeyError, TypeError, RuntimeError, UnpicklingError):
        raise SystemExit(
            f"{path}: expected a checkpoint of train_tiny_lm.py, got another file"
        ) from None
    return model.eval()


def read_text(path: Path | None) -> bytes:
    """A file's bytes or, without one, the project's own pages and sources in a fixed order."""
    if path is not None:
        return path.read_bytes()
    files: dict[Path, None] = {}
    for pattern in _PATTERNS:
        for file in sorted(ROOT.glob(pattern)):
            parts = file.relative_to(ROOT).parts
            if not any(part.startswith((".", "build")) for part in parts):
                files[file] = None
    return b"\n".join(file.read_bytes() for file in files)


def split_text(text: bytes) -> tuple[Tensor, Tensor]:
    """The bytes to learn from and those held out."""
    kept, held_out = bytearray(), bytearray()
    for i, begin in enumerate(range(0, len(text), _PIECE)):
        (held_out if i % _HELD_OUT == _HELD_OUT - 1 else kept).extend(text[begin : begin + _PIECE])
    if not held_out:
        raise SystemExit(
            f"the text has {len(text)} bytes; at least {_PIECE * _HELD_OUT} are needed"
        )
    return (
        torch.frombuffer(kept, dtype=torch.uint8).long(),
        torch.frombuffer(held_out, dtype=torch.uint8).long(),
    )
