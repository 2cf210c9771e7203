#!/usr/bin/env python3
"""Times a Qwen3-Next layer and a small model of transformers with deltic and with its fallback.

    python bench/transformers_layer.py [--tokens 4096] [--dtype float32] [--repeats 5] [--json FILE]

Fallback and deltic take turns in one run; the table has medians in milliseconds. The fallback is
what transformers has in torch and uses where no other package is installed. The rows:

    operator         the delta rule alone, q and k normalised inside
    with its edges   convolution, gates, repeated heads, delta rule and gated norm
    layer            the whole layer with its projections
    model            four layers, three of them linear, with a quarter of the width: a prompt of
                     --tokens, one token from the cache, and a training step of a quarter as many
"""

import argparse
import inspect
import json
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from deltic.integrations import transformers as integration
from torch import Tensor
from transformers.models.qwen3_next import modeling_qwen3_next as qwen

HIDDEN, KEY_HEADS, VALUE_HEADS, WIDTH, TAPS = 2048, 16, 32, 128, 4


def use_fallback() -> None:
    """The torch functions, also where flash-linear-attention is installed."""
    for name in integration._FUNCTIONS:
        if name in vars(qwen):
            setattr(qwen, name, inspect.unwrap(vars(qwen)[name]))


def take_turns(call: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Medians of the fallback and of deltic, in milliseconds."""
    times: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for kind, found in enumerate(times):
            with integration.enable("qwen3_next") if kind else nullcontext():
                start = time.perf_counter()
                call()
                if repeat:  # the first one warms up
                    found.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times[0]), statistics.median(times[1])


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


def layer_rows(tokens: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    layer = qwen.Qwen3NextGatedDeltaNet(config(), 0).to(dtype).eval()
    x = torch.randn(1, tokens, HIDDEN, dtype=dtype)
    mixed = torch.randn(1, tokens, layer.conv_dim, dtype=dtype)
    z = torch.randn(1, tokens, layer.value_dim, dtype=dtype)
    b, a = (torch.randn(1, tokens, VALUE_HEADS, dtype=dtype) for _ in range(2))
    q, k, v = (torch.randn(1, tokens, VALUE_HEADS, WIDTH, dtype=dtype) for _ in range(3))
    g, beta = -torch.rand(1, tokens, VALUE_HEADS), torch.rand(1, tokens, VALUE_HEADS, dtype=dtype)

    def operator() -> None:
        qwen.torch_chunk_gated_delta_rule(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)

    return {
        "operator": operator,
        "with its edges": lambda: edges(layer, mixed, z, b, a),
        "layer": lambda: layer(x),
    }


def model_rows(tokens: int, dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
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
    model = transformers.Qwen3NextForCausalLM(config(**values)).to(dtype).eval()
    ids = torch.randint(0, 8192, (1, tokens))
    short = ids[:, : max(tokens // 4, 1)]
    cache = model(short, use_cache=True).past_key_values

    def train() -> None:
        model.train()
        with torch.enable_grad():
            model(short, labels=short, use_cache=False).loss.backward()
        model.zero_grad()
        model.eval()

    return {
        "model: prompt": lambda: model(ids, use_cache=True, logits_to_keep=1),
        "model: one token": lambda: model(ids[:, :1], past_key_values=cache, use_cache=True),
        "model: training step": train,
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
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    torch.manual_seed(0)
    dtype = getattr(torch, arguments.dtype)
    use_fallback()

    found = {}
    print(f"{arguments.tokens} tokens, {arguments.dtype}, {torch.get_num_threads()} threads")
    print(f"{'':22}{'fallback':>11}{'deltic':>11}{'times':>8}")
    with torch.no_grad():
        for rows in (layer_rows, model_rows):
            for name, call in rows(arguments.tokens, dtype).items():
                if arguments.rows not in name:
                    continue
                repeats = arguments.repeats * (10 if name.endswith("one token") else 1)
                theirs, ours = take_turns(call, repeats)
                found[name] = {"fallback_ms": theirs, "deltic_ms": ours}
                print(f"{name:22}{theirs:>8.1f} ms{ours:>8.1f} ms{theirs / ours:>8.2f}", flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
