#!/usr/bin/env python3
"""The causal convolution beside a copy of its input and torch's own, in one run.

Every function here returns new tensors, for which the system hands out fresh pages; `clone` is the
copy that pays for them too. Calls are timed in turns and the best of many rounds counts, so that a
busy machine disturbs all alike. Needs the installed package; `bench/conv.py --threads 2`.
"""

import argparse
import time

import deltic
import torch
import torch.nn.functional as F


def best(functions, rounds):
    """Microseconds per call of each function, the best of many rounds in turns."""
    times = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            begin = time.perf_counter()
            function()
            times[name] = min(times[name], 1e6 * (time.perf_counter() - begin))
    return times


def by_torch(x, weight):
    """torch's depthwise convolution and SiLU, from and to [B,T,D]."""
    y = F.conv1d(x.mT, weight[:, None], groups=x.shape[2], padding=weight.shape[1] - 1)
    return F.silu(y[:, :, : x.shape[1]]).mT


def prefill(T, D, W, dtype, rounds, with_torch):
    """Forward and backward of one long sequence."""
    x, weight = torch.randn(1, T, D).to(dtype), torch.randn(D, W).to(dtype)
    d_y, y = torch.randn(1, T, D).to(dtype), torch.empty(1, T, D, dtype=dtype)
    none = (None,) * 4
    functions = {
        "copy": lambda: y.copy_(x),
        "clone": x.clone,
        "forward": lambda: deltic.causal_conv1d(x, weight, activation="silu"),
        "forward, no activation": lambda: deltic.causal_conv1d(x, weight),
        "backward": lambda: torch.ops.deltic.conv_backward(
            d_y, None, x, weight, *none, "activation=silu"
        ),
    }
    if with_torch:
        functions["torch's forward"] = lambda: by_torch(x, weight)
    with torch.inference_mode():
        times = best(functions, rounds)
    print(f"T={T} D={D} W={W} {dtype}")
    for name, number in times.items():
        print(f"  {name:24} {number / 1e3:8.2f} ms  {number / times['clone']:5.2f} x clone")


def steps(B, D, W, dtype, rounds):
    """One token per sequence, the states in place."""
    x, weight, state = torch.randn(B, D), torch.randn(D, W), torch.zeros(B, D, W)
    x, weight, state = x.to(dtype), weight.to(dtype), state.to(dtype)
    y = torch.empty_like(x)
    with torch.inference_mode():
        times = best(
            {
                "copy of x": lambda: y.copy_(x),
                "update": lambda: deltic.causal_conv1d_update(x, state, weight, activation="silu"),
            },
            50 * rounds,
        )
    print(f"B={B} D={D} W={W} {dtype}: " + ", ".join(f"{k} {v:.1f} us" for k, v in times.items()))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--torch", action="store_true", help="time torch's convolution too")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    for dtype in (torch.float32, torch.bfloat16):
        prefill(4096, 8192, 4, dtype, arguments.rounds, arguments.torch)
        for B in (1, 64):
            steps(B, 8192, 4, dtype, arguments.rounds)
        steps(1, 64, 4, dtype, arguments.rounds)


if __name__ == "__main__":
    main()
