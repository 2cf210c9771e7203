#!/usr/bin/env python3
"""Device time of a call's kernels on a GPU, by torch's profiler: where the time of a call goes.

    python bench/kernel_times.py [--rows NAME,...] [--repeats 5] [--check]

Of each row forward and gradients in bf16, K = V = 128; microseconds of a call, by kernel, each
without the time in which the one before it still ran. --check
compares the gradients with those of the same call in fp32, whose kernels are others.
"""

import argparse
import re
from collections.abc import Callable, Iterable
from typing import Any

import deltic
import torch
from torch import Tensor

# Name: sequences, tokens, key heads, value heads, gate per channel, forms inside, dtype of g.
ROWS = {
    "kda_96": (1, 8192, 96, 96, True, "", torch.float32),
    "kda_96_bounded": (1, 8192, 96, 96, True, "bounded", torch.bfloat16),
    "kda_96_softplus": (1, 8192, 96, 96, True, "softplus", torch.bfloat16),
    "kda_32": (1, 8192, 32, 32, True, "", torch.float32),
    "kda_32_bounded": (1, 8192, 32, 32, True, "bounded", torch.bfloat16),
    "gdn_32": (1, 8192, 16, 32, False, "", torch.float32),
    "gdn_long": (1, 32768, 16, 32, False, "", torch.float32),
}


def make(name: str, tokens: int | None = None) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Tensors that want gradients, and the options of the call."""
    batch, length, keys, values, per_channel, inside, gates = ROWS[name]
    length = tokens or length
    made = {"device": "cuda", "dtype": torch.bfloat16}
    generator = torch.Generator("cuda").manual_seed(1)

    def normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return torch.randn(shape, device="cuda", generator=generator).to(dtype)

    q, k = (normal(batch, length, keys, 128) for _ in range(2))
    g = normal(batch, length, values, *([128] if per_channel else []), dtype=torch.float32)
    beta = normal(batch, length, values)
    x = {"q": q, "k": k, "v": normal(batch, length, values, 128)}
    options: dict[str, object] = {"qk_l2norm": True}
    if inside:
        x |= {"g": g.to(gates), "beta": beta, "A_log": torch.zeros(values, device="cuda")}
        x["dt_bias"] = torch.zeros(values * (128 if per_channel else 1), device="cuda")
        options |= {"gate": inside, "beta_form": "sigmoid"}
        options |= {"lower_bound": -5.0} if inside == "bounded" else {}
    else:
        norm = torch.nn.functional.normalize
        x |= {"q": norm(q.float(), dim=-1).to(**made), "k": norm(k.float(), dim=-1).to(**made)}
        x |= {"g": (-5 * g.sigmoid()).to(gates), "beta": beta.sigmoid()}
        options = {}
    return {n: t.requires_grad_() for n, t in x.items()}, options


def step(x: dict[str, Tensor], options: dict[str, object]) -> Callable[[], None]:
    out = torch.ones_like(x["v"])

    def call() -> None:
        for t in x.values():
            t.grad = None
        deltic.delta_rule(**x, **options)[0].backward(out)

    return call


def short(kernel: str) -> str:
    """The function's name, without templates and places."""
    return re.sub(r"<.*|\(.*", "", kernel.removeprefix("void ")).split("::")[-1]


def own_times(events: Iterable[Any], repeats: int) -> dict[str, float]:
    """Microseconds of each kernel in a call, from the end of the one before it or its own start.

    Launches overlap: a kernel's CTAs may be there, and wait, long before the last one's are gone.
    """
    times: dict[str, float] = {}
    before = float("-inf")
    for event in sorted(events, key=lambda event: event.time_range.end):
        own = event.time_range.end - max(event.time_range.start, before)
        before = max(before, event.time_range.end)
        kernel = short(event.name)
        times[kernel] = times.get(kernel, 0) + own / repeats
    return times


def profile(name: str, repeats: int) -> None:
    call = step(*make(name))
    call()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(repeats):
            call()
        torch.cuda.synchronize()
    kernels = [e for e in found.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    times = own_times(kernels, repeats)
    total = sum(times.values())
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    print(f"{name}: {total:.0f} us of kernels, {peak:.2f} GiB beyond what was there")
    for kernel, us in sorted(times.items(), key=lambda item: -item[1]):
        if us >= 0.005 * total:
            print(f"  {us:8.1f} us  {kernel}")


def check(name: str) -> None:
    x, options = make(name, tokens=300)
    step(x, options)()
    y = {n: t.detach().float().requires_grad_() for n, t in x.items()}
    step(y, options)()
    errors = []
    for n, t in x.items():
        ours, exact = t.grad.double(), y[n].grad.double()
        errors.append(f"d{n} {(ours - exact).norm() / exact.norm():.2%}")
    print(f"{name}, 300 tokens, beside fp32: " + ", ".join(errors))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS), help="names, separated by commas")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--check", action="store_true", help="compare with fp32 first")
    args = parser.parse_args()
    for name in args.rows.split(","):
        if name not in ROWS:
            parser.error(f"--rows: expected one of {', '.join(ROWS)}, got {name}")
    for name in args.rows.split(","):
        if args.check:
            check(name)
        profile(name, args.repeats)


if __name__ == "__main__":
    main()
