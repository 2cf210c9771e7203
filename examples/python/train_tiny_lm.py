#!/usr/bin/env python3
"""Trains a byte-level language model of KDA layers on this project's own text.

  python examples/python/train_tiny_lm.py                 a few minutes on two CPU cores
  python examples/python/train_tiny_lm.py --steps 20      a look at it

Writes a checkpoint for generate.py and a picture of the loss. The same seed gives the same numbers.
"""

import argparse
import math
import sys
import time
from pathlib import Path

import torch
from checked import folder, positive, positive_number, readable_file, seed
from tiny_lm import BYTES, Config, TinyLM, read_text, save, split_text
from torch import Tensor

HERE = Path(__file__).resolve().parent
# The widest head that the operators take.
WIDEST_HEAD = 256


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--text", type=readable_file, help="a file to learn instead of the project's text"
    )
    parser.add_argument("--steps", type=positive, default=400, help="optimiser steps")
    parser.add_argument("--batch", type=positive, default=8, help="sequences per step")
    parser.add_argument("--length", type=positive, default=256, help="bytes per sequence")
    parser.add_argument("--width", type=positive, default=128, help="width of the model")
    parser.add_argument("--layers", type=positive, default=4, help="number of blocks")
    parser.add_argument("--heads", type=positive, default=4, help="heads per block")
    parser.add_argument("--rate", type=positive_number, default=3e-3, help="highest learning rate")
    parser.add_argument("--seed", type=seed, default=0, help="of weights and batches")
    parser.add_argument("--threads", type=positive, help="CPU threads (torch's own choice)")
    parser.add_argument(
        "--out", type=folder, default=HERE / "out", help="folder of what is written"
    )
    parser.add_argument("--no-plot", action="store_true", help="no picture (needs no matplotlib)")
    options = parser.parse_args(arguments)
    width, heads = options.width, options.heads
    if width % heads:
        parser.error(f"argument --heads: expected a divisor of --width {width}, got {heads}")
    if width // heads > WIDEST_HEAD:
        least = -(-width // WIDEST_HEAD)
        parser.error(f"argument --heads: expected {least} or more of --width {width}, got {heads}")
    return options


def import_pyplot():
    """matplotlib without a display, or a text that says what to do."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit(
            "the picture of the loss needs matplotlib: pip install matplotlib, or --no-plot"
        ) from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


class Progress:
    """One line that is redrawn on a terminal, ten lines elsewhere."""

    def __init__(self, total: int, tokens_per_step: int) -> None:
        self.total, self.tokens_per_step = total, tokens_per_step
        self.begin = time.perf_counter()
        self.is_terminal = sys.stdout.isatty()

    def show(self, step: int, bits: float) -> None:
        seconds = time.perf_counter() - self.begin
        rate = step * self.tokens_per_step / seconds
        left = seconds / step * (self.total - step)
        text = f"{step}/{self.total}  {bits:.3f} bits/byte  {rate:,.0f} bytes/s  {left:.0f} s left"
        if self.is_terminal:
            done = 30 * step // self.total
            end = "\n" if step == self.total else ""
            print(f"\r[{'#' * done:30}] {text:60}", end=end, flush=True)
        elif step * 10 // self.total > (step - 1) * 10 // self.total:
            print(text, flush=True)


def bits_per_byte(model: TinyLM, data: Tensor, length: int, most: int = 64) -> float:
    """The mean over (at most so many) pieces of held-out text."""
    count = min(most, (len(data) - 1) // length)
    if count < 1:
        raise SystemExit(f"--length {length}: the held-out text has {len(data)} bytes")
    starts = torch.linspace(0, len(data) - length - 1, count).long()
    rows = torch.stack([data[start : start + length + 1] for start in starts])
    with torch.inference_mode():
        losses = [loss_of(model, part) * len(part) for part in rows.split(8)]
    return float(torch.stack(losses).sum()) / count / math.log(2)


def loss_of(model: TinyLM, rows: Tensor) -> Tensor:
    """The mean cross entropy of rows of bytes, in nats."""
    logits = model(rows[:, :-1])
    return torch.nn.functional.cross_entropy(logits.reshape(-1, BYTES), rows[:, 1:].reshape(-1))


def optimizer_of(model: TinyLM, rate: float) -> torch.optim.Optimizer:
    """AdamW; gates, norms and biases are not pulled to zero."""
    decayed, others = [], []
    for parameter in model.parameters():
        keeps = parameter.dim() < 2 or getattr(parameter, "_no_weight_decay", False)
        (others if keeps else decayed).append(parameter)
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))


def rate_at(step: int, steps: int) -> float:
    """A share of the highest rate: up over a tenth of the steps, then down along a cosine."""
    warm = max(1, steps // 10)
    if step < warm:
        return (step + 1) / warm
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm) / max(1, steps - warm)))


def train(model: TinyLM, data: Tensor, options: argparse.Namespace) -> list[float]:
    """Bits per byte of every step's batch."""
    optimizer = optimizer_of(model, options.rate)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: rate_at(i, options.steps))
    generator = torch.Generator().manual_seed(options.seed)
    progress = Progress(options.steps, options.batch * options.length)
    curve = []
    for step in range(1, options.steps + 1):
        starts = torch.randint(len(data) - options.length, (options.batch,), generator=generator)
        rows = torch.stack([data[start : start + options.length + 1] for start in starts])
        loss = loss_of(model, rows)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        curve.append(loss.item() / math.log(2))
        progress.show(step, curve[-1])
    return curve


def draw(pyplot, curve: list[float], before: float, after: float, path: Path) -> None:
    """The loss of every step, and the held-out text before and after."""
    figure, axes = pyplot.subplots(figsize=(7, 4))
    axes.plot(range(1, len(curve) + 1), curve, linewidth=1, label="batch")
    axes.plot([0, len(curve)], [before, after], "o", label="held-out text")
    axes.set(xlabel="step", ylabel="bits per byte", ylim=(0, None))
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    pyplot = None if options.no_plot else import_pyplot()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    data, held_out = split_text(read_text(options.text))
    if len(data) <= options.length:
        raise SystemExit(f"--length {options.length}: the text has {len(data)} bytes")
    try:  # now, and not after the work
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SystemExit(f"--out {options.out}: {error.strerror}") from None
    heads = options.heads
    model = TinyLM(Config(options.width, options.layers, heads, options.width // heads))
    count = sum(p.numel() for p in model.parameters())
    print(f"{count:,} parameters, {len(data):,} bytes to learn, {len(held_out):,} held out")

    before = bits_per_byte(model, held_out, options.length)
    curve = train(model, data, options)
    after = bits_per_byte(model, held_out, options.length)
    print(f"held-out text: {before:.3f} bits/byte before, {after:.3f} after")

    save(model, options.out / "tiny_lm.pt")
    print(f"checkpoint: {options.out / 'tiny_lm.pt'}")
    if pyplot is not None:
        draw(pyplot, curve, before, after, options.out / "loss.png")
        print(f"loss curve: {options.out / 'loss.png'}")


if __name__ == "__main__":
    main()
