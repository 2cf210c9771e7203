#!/usr/bin/env python3
"""Times a Qwen3-Next layer and a small model of transformers with deltic and with its fallback.

    python bench/transformers_layer.py [--tokens 4096] [--dtype float32] [--repeats 5] [--json FILE]
    python bench/transformers_layer.py --device cuda --tokens 8192 --dtype bfloat16 [--profile]

Fallback and deltic take turns in one run; the table has medians in milliseconds. The fallback is
what transformers has in torch and uses where no other package is installed. The rows:

    operator         the delta rule alone, q and k normalised inside
    with its edges   convolution, gates, repeated heads, delta rule and gated norm
    layer            the whole layer with its projections
    layer: training  the same, and its gradients
    KDA layer        a layer of Kimi Delta Attention as large, of flash-linear-attention where that
                     is installed (--fla; its first calls compile for minutes) and of deltic
    model            four layers, three of them linear, with a quarter of the width: a prompt of
                     --tokens, one token from the cache, and a training step of a quarter as many

On a GPU a call lasts from its start until the GPU is done, in eager mode: what a user sees.
--profile lists after each row with deltic where the GPU's time goes, by kernel.
"""

import argparse
import inspect
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import transformers
from deltic.integrations import transformers as integration
from deltic.layers import KimiDeltaAttention
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

HIDDEN, KEY_HEADS, VALUE_HEADS, WIDTH, TAPS = 2048, 16, 32, 128, 4


def use_fallback() -> None:
    """The torch functions, also where flash-linear-attention is installed."""
    for name in integration._FUNCTIONS:
        if name in vars(qwen):
            setattr(qwen, name, inspect.unwrap(vars(qwen)[name]))


class Pair(NamedTuple):
    """A row: a call with what others have, the same with deltic."""

    theirs: Callable[[], Any] | None
    ours: Callable[[], Any]
    switch: Callable[[], AbstractContextManager[Any]] = nullcontext  # around ours, not timed


def switched(call: Callable[[], Any]) -> Pair:
    """A call into transformers, by its fallback and with its functions replaced."""
    return Pair(call, call, lambda: integration.enable("qwen3_next"))


def milliseconds(call: Callable[[], Any], device: str) -> float:
    if device != "cuda":
        start = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    call()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end)


def take_turns(pair: Pair, repeats: int, device: str) -> tuple[float, float]:
    """Medians of both, in milliseconds; NaN where there is nobody to compare with."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + (2 if device == "cuda" else 1)):
        for call, found in zip(pair[:2], times, strict=True):
            if call is None:
                continue
            with pair.switch() if found is times[1] else nullcontext():
                spent = milliseconds(call, device)
            if repeat > (device == "cuda"):  # the first ones warm up
                found.append(spent)
    return statistics.median(times[0] or [math.nan]), statistics.median(times[1])


def profile(pair: Pair) -> list[str]:
    """Kernels of deltic's call, by their time on the GPU; the ten that take most."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with pair.switch(), torch.profiler.profile(activities=activities) as found:
        pair.ours()
        torch.cuda.synchronize()
    rows = sorted(found.key_averages(), key=lambda r: -r.device_time_total)
    rows = [r for r in rows if r.device_time_total > 0]
    total = sum(r.device_time_total for r in rows)
    lines = [f"    {total:9.1f} us in {sum(r.count for r in rows)} kernels"]
    return lines + [
        f"    {r.device_time_total:9.1f} us {r.count:3} {r.key[:88]}" for r in rows[:10]
    ]


def config(**values: Any) -> Any:
    return transformers.Qwen3NextConfig(
        **{
            "hidden_size": HIDDEN,
            "linear_num_key_heads": KEY_HEADS,
            "linear_num_value_heads": VALUE_HEADS,
            "linear_key_head_dim": WIDTH,
            "linear_value_head_dim": WIDTH,
            "linear_conv_kernel_dim": TAPS,
            "num_hidden_layers": 4,
            **values,
        }
    )


def edges(layer: Any, mixed: Tensor, z: Tensor, b: Tensor, a: Tensor) -> Tensor:
    """What the layer does between its projections, from the channels of q, k and v on."""
    mixed = qwen.causal_conv1d_fn(
        mixed.transpose(1, 2), layer.conv1d.weight.squeeze(1), None, activation=layer.activation
    ).transpose(1, 2)
    batch, tokens, _ = mixed.shape
    sizes = [layer.key_dim, layer.key_dim, layer.value_dim]
    q, k, v = (x.reshape(batch, tokens, -1, WIDTH) for x in mixed.split(sizes, dim=-1))
    g = -layer.A_log.float().exp() * F.softplus(a.float() + layer.dt_bias)
    group = VALUE_HEADS // KEY_HEADS
    q, k = (x.repeat_interleave(group, dim=2) for x in (q, k))
    o, _ = qwen.torch_chunk_gated_delta_rule(
        q, k, v, g=g, beta=b.sigmoid(), use_qk_l2norm_in_kernel=True
    )
    normed: Tensor = layer.norm(o.reshape(-1, WIDTH), z.reshape(-1, WIDTH))
    return normed


def training(layer: Any, x: Tensor, dy: Tensor) -> Callable[[], None]:
    """A step of a layer: its output and all gradients."""

    def call() -> None:
        with torch.enable_grad():
            y = layer(x)
            (y[0] if isinstance(y, tuple) else y).backward(dy)
        layer.zero_grad()
        x.grad = None

    return call


def layer_rows(tokens: int, dtype: torch.dtype, device: str) -> dict[str, Pair]:
    layer = qwen.Qwen3NextGatedDeltaNet(config(), 0).to(dtype).eval()
    x = torch.randn(1, tokens, HIDDEN, dtype=dtype)
    mixed = torch.randn(1, tokens, layer.conv_dim, dtype=dtype)
    z = torch.randn(1, tokens, layer.value_dim, dtype=dtype)
    b, a = (torch.randn(1, tokens, VALUE_HEADS, dtype=dtype) for _ in range(2))
    q, k, v = (torch.randn(1, tokens, VALUE_HEADS, WIDTH, dtype=dtype) for _ in range(3))
    g, beta = -torch.rand(1, tokens, VALUE_HEADS), torch.rand(1, tokens, VALUE_HEADS, dtype=dtype)
    layer = layer.to(device)
    x, mixed, z, b, a, q, k, v, g, beta = (
        y.to(device) for y in (x, mixed, z, b, a, q, k, v, g, beta)
    )
    leaf = x.clone().requires_grad_()

    def operator() -> None:
        qwen.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)

    return {
        "operator": switched(operator),
        "with its edges": switched(lambda: edges(layer, mixed, z, b, a)),
        "layer": switched(lambda: layer(x)),
        "layer: training": switched(training(layer, leaf, torch.randn_like(x))),
    }


def kda_rows(tokens: int, dtype: torch.dtype, device: str, use_fla: bool) -> dict[str, Pair]:
    """Layers of Kimi Delta Attention with the same weights."""
    sizes: Any = dict(hidden_size=HIDDEN, head_dim=WIDTH, num_heads=VALUE_HEADS)
    ours: Any = KimiDeltaAttention(**sizes).to(device, dtype)
    theirs: Any = None
    if use_fla:
        try:
            from fla.layers import KimiDeltaAttention as Theirs
        except ImportError as error:
            print(f"KDA layers without flash-linear-attention's: {error}", flush=True)
        else:
            theirs = Theirs(**sizes).to(device, dtype)
            theirs.load_state_dict(ours.state_dict())
    x = torch.randn(1, tokens, HIDDEN, dtype=dtype, device=device)
    leaf, dy = x.clone().requires_grad_(), torch.randn_like(x)
    return {
        "KDA layer": Pair(theirs and (lambda: theirs(x)), lambda: ours(x)),
        "KDA layer: training": Pair(
            theirs and training(theirs, leaf, dy), training(ours, leaf, dy)
        ),
    }


def model_rows(tokens: int, dtype: torch.dtype, device: str) -> dict[str, Pair]:
    values = dict(
        hidden_size=HIDDEN // 4,
        linear_num_key_heads=KEY_HEADS // 4,
        linear_num_value_heads=VALUE_HEADS // 4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        intermediate_size=1024,
        moe_intermediate_size=256,
        shared_expert_intermediate_size=256,
        num_experts=4,
        num_experts_per_tok=2,
        vocab_size=8192,
    )
    model = transformers.Qwen3NextForCausalLM(config(**values)).to(device, dtype).eval()
    ids = torch.randint(0, 8192, (1, tokens)).to(device)
    short = ids[:, : max(tokens // 4, 1)]
    cache = model(short, use_cache=True).past_key_values

    def train() -> None:
        model.train()
        with torch.enable_grad():
            model(short, labels=short, use_cache=False).loss.backward()
        model.zero_grad()
        model.eval()

    return {
        "model: prompt": switched(lambda: model(ids, use_cache=True, logits_to_keep=1)),
        "model: one token": switched(
            lambda: model(ids[:, :1], past_key_values=cache, use_cache=True)
        ),
        "model: training step": switched(train),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096, help="of the prompt (default 4096)")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--repeats", type=int, default=5, help="per row and kind (default 5)")
    parser.add_argument("--json", type=Path, help="also writes the numbers to this file")
    parser.add_argument("--rows", default="", help="only rows with this text in their names")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--fla", action="store_true", help="also flash-linear-attention's KDA layer"
    )
    parser.add_argument(
        "--profile", action="store_true", help="kernels of deltic's calls, on a GPU"
    )
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    use_fallback()

    device = arguments.device
    sizes: tuple[Any, ...] = (arguments.tokens, dtype, device)
    found = {}
    where = (
        torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads"
    )
    print(f"{arguments.tokens} tokens, {arguments.dtype}, {where}")
    print(f"{'':22}{'fallback':>12}{'deltic':>12}{'times':>8}")
    kinds: dict[str, Callable[[], dict[str, Pair]]] = {
        "operator with its edges layer layer: training": lambda: layer_rows(*sizes),
        "KDA layer KDA layer: training": lambda: kda_rows(*sizes, arguments.fla),
        "model: prompt model: one token model: training step": lambda: model_rows(*sizes),
    }
    with torch.no_grad():
        for names, make in kinds.items():
            for name, pair in (make() if arguments.rows in names else {}).items():
                if arguments.rows not in name:
                    continue
                repeats = arguments.repeats * (10 if name.endswith("one token") else 1)
                theirs, ours = take_turns(pair, repeats, device)
                found[name] = {"deltic_ms": ours}
                if not math.isnan(theirs):
                    found[name]["fallback_ms"] = theirs
                row = f"{ours:>9.2f} ms{theirs / ours:>8.2f}"
                if math.isnan(theirs):
                    row = f"{ours:>9.2f} ms{'-':>8}"
                print(f"{name:22}{theirs:>9.2f} ms{row}", flush=True)
                if arguments.profile and device == "cuda":
                    print("\n".join(profile(pair)), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
