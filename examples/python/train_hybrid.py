#!/usr/bin/env python3
"""Trains a small Qwen3-Next of transformers on the CPU, on a GPU and with other operators.

  python examples/python/train_hybrid.py                 the CPU and, where there is one, the GPU
  python examples/python/train_hybrid.py --steps 5       a look at it

Two models learn this project's own text: three Gated DeltaNet layers and one of softmax attention,
and the same with a layer of Kimi Delta Attention (deltic.layers) among them. Each starts from the
same weights and sees the same batches on every device and with every set of operators: deltic's,
transformers' own in torch, and flash-linear-attention's where asked for. Prints how far the losses
are apart, and tokens per second of a training step; writes both as JSON. Ends with status 1 where
the losses differ by more than rounding.
"""

import argparse
import json
import math
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from checked import positive, positive_number, readable_file, seed
from tiny_lm import BYTES, read_text, split_text
from torch import Tensor, nn

# The largest difference of the mean loss of the last tenth of the steps that counts as rounding.
TOLERANCE = 0.02
LAYERS = ("linear_attention", "linear_attention", "linear_attention", "full_attention")
KDA_LAYER = 1
# Seconds for flash-linear-attention, which compiles and tunes its kernels when they first run.
FLA_SECONDS = 600


class Run(NamedTuple):
    """What is trained, with which operators, where."""

    model: str  # gdn or kda
    operators: str  # deltic, fallback or fla
    device: str

    @property
    def name(self) -> str:
        return f"{self.operators} {self.device}"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--text", type=readable_file, help="a file to learn instead of the project's text"
    )
    parser.add_argument("--steps", type=positive, default=60, help="optimiser steps")
    parser.add_argument("--batch", type=positive, default=8, help="sequences per step")
    parser.add_argument("--length", type=positive, default=256, help="bytes per sequence")
    parser.add_argument("--width", type=positive, default=256, help="width of the model")
    parser.add_argument("--heads", type=positive, default=2, help="key heads, twice as many values")
    parser.add_argument("--head-width", type=positive, default=128, help="width of their heads")
    parser.add_argument("--rate", type=positive_number, default=2e-3, help="highest learning rate")
    parser.add_argument("--seed", type=seed, default=0, help="of weights and batches")
    parser.add_argument("--threads", type=positive, help="CPU threads (torch's own choice)")
    parser.add_argument("--no-fallback", action="store_true", help="deltic's operators alone")
    parser.add_argument("--fla", action="store_true", help="flash-linear-attention's too, on a GPU")
    parser.add_argument("--timed-width", type=positive, help="also time a step of this width")
    parser.add_argument("--timed-length", type=positive, default=4096, help="bytes of that step")
    parser.add_argument("--timed-heads", type=positive, default=8, help="key heads of that step")
    parser.add_argument("--json", type=Path, help="file that losses and times are written to")
    parser.add_argument("--only", help=argparse.SUPPRESS)  # MODEL,OPERATORS,DEVICE in this process
    return parser.parse_args(arguments)


def import_transformers(with_fla: bool) -> Any:
    """transformers; without flash-linear-attention it has its operators in torch."""
    if with_fla:
        try:
            import fla.ops.gated_delta_rule  # noqa: F401
        except ImportError as error:  # transformers would say nothing and take its own
            raise SystemExit(f"no flash-linear-attention: {error}") from None
    else:
        sys.modules.setdefault("fla", None)  # type: ignore[arg-type]
    try:
        import transformers
    except ImportError:
        raise SystemExit("this example needs transformers: pip install transformers") from None
    return transformers


class KdaMixer(nn.Module):
    """A layer of Kimi Delta Attention where Qwen3-Next calls one of its own."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        return self.layer(hidden_states)[0]


def make_kda(width: int, heads: int, head_width: int, with_fla: bool) -> KdaMixer:
    """The layer, with the same weights whoever's it is."""
    import deltic.layers

    sizes: dict[str, Any] = {
        "hidden_size": width,
        "head_dim": head_width,
        "num_heads": heads,
        "num_v_heads": 2 * heads,
        "safe_gate": True,
        "lower_bound": -5.0,
    }
    layer = deltic.layers.KimiDeltaAttention(**sizes)
    if with_fla:
        import fla.layers

        theirs = fla.layers.KimiDeltaAttention(**sizes)
        theirs.load_state_dict(layer.state_dict())
        return KdaMixer(theirs)
    return KdaMixer(layer)


def make_model(run: Run, width: int, heads: int, head_width: int, number: int) -> nn.Module:
    """A causal language model of bytes, on the CPU, whose weights follow from the seed."""
    transformers = import_transformers(run.operators == "fla")
    config = transformers.Qwen3NextConfig(
        vocab_size=BYTES,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=len(LAYERS),
        layer_types=list(LAYERS),
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=max(width // 4, 16),
        linear_num_key_heads=heads,
        linear_num_value_heads=2 * heads,
        linear_key_head_dim=head_width,
        linear_value_head_dim=head_width,
        num_experts=0,  # a router's choice may change with the last bit
        max_position_embeddings=1 << 16,
    )
    torch.manual_seed(number)
    model = transformers.Qwen3NextForCausalLM(config).float()
    if run.model == "kda":
        torch.manual_seed(number + 1)
        mixer = make_kda(width, heads, head_width, run.operators == "fla")
        model.model.layers[KDA_LAYER].linear_attn = mixer
    return model


def operators_of(run: Run) -> Any:
    """A context in which the models run on them."""
    if run.operators != "deltic":
        return nullcontext()
    from deltic.integrations import transformers as integration

    return integration.enable()


def loss_of(model: nn.Module, rows: Tensor, device: str) -> Tensor:
    """The mean cross entropy in nats, with products in bf16."""
    with torch.autocast(device, dtype=torch.bfloat16):
        logits = model(rows[:, :-1], use_cache=False).logits
    return nn.functional.cross_entropy(logits.float().reshape(-1, BYTES), rows[:, 1:].reshape(-1))


def step_of(model: nn.Module, rate: Callable[[int], float]) -> Callable[[Tensor, str], Tensor]:
    """A training step: loss, gradients, AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def step(rows: Tensor, device: str) -> Tensor:
        loss = loss_of(model, rows, device)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        return loss.detach()

    return step


def train(run: Run, data: Tensor, options: argparse.Namespace) -> list[float]:
    """The loss of every step's batch."""
    model = make_model(run, options.width, options.heads, options.head_width, options.seed)
    model = model.to(run.device).train()
    warm = max(1, options.steps // 10)
    step = step_of(model, lambda i: options.rate * min(1.0, (i + 1) / warm))
    generator = torch.Generator().manual_seed(options.seed)
    losses = []
    with operators_of(run):
        for _ in range(options.steps):
            starts = torch.randint(
                len(data) - options.length, (options.batch,), generator=generator
            )
            rows = torch.stack([data[start : start + options.length + 1] for start in starts])
            losses.append(step(rows.to(run.device), run.device))
    return [round(float(loss), 5) for loss in losses]


def tokens_per_second(run: Run, data: Tensor, options: argparse.Namespace) -> float:
    """Of training steps of one long sequence, the median of five after two."""
    width, heads = options.timed_width, options.timed_heads
    model = make_model(run, width, heads, options.head_width, options.seed).to(run.device).train()
    step = step_of(model, lambda _: 1e-4)
    rows = data[: options.timed_length + 1][None].to(run.device)
    seconds = []
    with operators_of(run):
        for _ in range(7):
            if run.device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            step(rows, run.device).item()
            seconds.append(time.perf_counter() - begin)
    return round(options.timed_length / sorted(seconds[2:])[2], 1)


def result_of(run: Run, data: Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Losses and, where asked for, tokens per second."""
    found: dict[str, Any] = {"losses": train(run, data, options)}
    if options.timed_width and (run.device == "cuda" or not torch.cuda.is_available()):
        found["tokens_per_second"] = tokens_per_second(run, data, options)
    return found


def in_another_process(run: Run, arguments: list[str]) -> dict[str, Any]:
    """The same there, where flash-linear-attention is found; or why not."""
    command = [sys.executable, __file__, *arguments, "--only", ",".join(run)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FLA_SECONDS)
    except subprocess.TimeoutExpired:
        return {"error": f"not done after {FLA_SECONDS} s"}
    if done.returncode != 0:
        return {"error": (done.stderr.strip().splitlines() or ["it failed"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def runs_of(options: argparse.Namespace) -> list[Run]:
    devices = ["cuda", "cpu"] if torch.cuda.is_available() else ["cpu"]
    found = []
    for model in ("gdn", "kda"):
        found += [Run(model, "deltic", device) for device in devices]
        if model == "gdn" and not options.no_fallback:  # of KDA transformers has none here
            found.append(Run(model, "fallback", devices[0]))
        if options.fla and devices[0] == "cuda":
            found.append(Run(model, "fla", "cuda"))
    return found


def end_of(losses: list[float]) -> float:
    last = losses[-max(1, len(losses) // 10) :]
    return sum(last) / len(last)


def compare(model: str, results: dict[str, Any]) -> bool:
    """Prints a model's runs beside its first one; whether they differ by rounding alone."""
    first, same = next(iter(results.values()))["losses"], True
    for name, found in results.items():
        if "error" in found:
            print(f"{model}  {name:14} {found['error']}")
            continue
        losses = found["losses"]
        apart = abs(end_of(losses) - end_of(first)) / end_of(first)
        most = max(abs(a - b) for a, b in zip(losses, first, strict=True))
        rate = found.get("tokens_per_second")
        said = f"  {rate:,.0f} tokens/s" if rate else ""
        bits = losses[0] / math.log(2), end_of(losses) / math.log(2)
        print(
            f"{model}  {name:14} {bits[0]:.3f} -> {bits[1]:.3f} bits/byte, "
            f"{apart:.1%} from the first, at most {most:.4f} in a step{said}"
        )
        same = same and apart <= TOLERANCE
    return same


def machine() -> dict[str, str]:
    """What the numbers were measured on."""
    import transformers

    found = {"torch": torch.__version__, "transformers": transformers.__version__}
    if torch.cuda.is_available():
        found["gpu"] = torch.cuda.get_device_name(0)
    found["cpu"] = f"{platform.machine()}, {torch.get_num_threads()} threads"
    return found


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    data, _ = split_text(read_text(options.text))
    needed = max(options.length, options.timed_length if options.timed_width else 0)
    if len(data) <= needed:
        raise SystemExit(f"expected a text of more than {needed} bytes, got {len(data)}")
    if options.only:
        print(json.dumps(result_of(Run(*options.only.split(",")), data, options)))
        return 0
    import_transformers(False)
    if options.fla and not torch.cuda.is_available():
        print("flash-linear-attention's operators are left out: they need a GPU", flush=True)
    results: dict[str, dict[str, Any]] = {}
    for run in runs_of(options):
        begin = time.perf_counter()
        if run.operators == "fla":
            found = in_another_process(run, sys.argv[1:] if arguments is None else arguments)
        else:
            found = result_of(run, data, options)
        results.setdefault(run.model, {})[run.name] = found
        print(f"{run.model} on {run.name}: {time.perf_counter() - begin:.1f} s", flush=True)
    same = [compare(model, found) for model, found in results.items()]
    if options.json is not None:
        sizes = ("steps", "batch", "length", "width", "heads", "head_width", "seed")
        sizes += ("timed_width", "timed_length", "timed_heads")
        told = {name: getattr(options, name) for name in sizes}
        text = {"machine": machine(), "sizes": told, "models": results}
        options.json.write_text(json.dumps(text, indent=1) + "\n")
    if not all(same):
        print("losses differ by more than rounding", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
