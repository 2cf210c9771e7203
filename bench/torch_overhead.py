#!/usr/bin/env python3
"""What a native call costs over the C call, at T = 1, B = 1 on one CPU thread.

Needs the installed package and a shared libdeltic of the same version:
  bench/torch_overhead.py --library build/release/src/libdeltic.so
Calls are timed in turns and the best of many rounds counts, so that a busy machine disturbs both
alike.
"""

import argparse
import sys
import time
from pathlib import Path

import deltic
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))
from deltic_c import Library, Training  # noqa: E402


def best(functions, rounds, calls=20):
    """Microseconds per call of each function, the best of many rounds in turns.

    A round is shorter than the time slices of a busy machine, so that some are not interrupted.
    """
    times = dict.fromkeys(functions, float("inf"))
    for _ in range(rounds):
        for name, function in functions.items():
            begin = time.perf_counter()
            for _ in range(calls):
                function()
            times[name] = min(times[name], 1e6 * (time.perf_counter() - begin) / calls)
    return times


def measure(library, rounds=600):
    """Microseconds per call by name, and of each native call over its C call."""
    H, K = 2, 64
    q, k, v = (torch.randn(1, 1, H, K) for _ in range(3))
    g, beta = -torch.rand(1, 1, H), torch.rand(1, 1, H)
    state, o = torch.zeros(1, H, K, K), torch.empty(1, 1, H, K)
    shared = dict(q=q, k=k, v=v, o=o, g=g, beta=beta)
    c_forward = library.call("forward", 1, **shared, final_state=torch.empty_like(state))
    c_decode = library.call("decode", 1, **shared, state_pool=state)
    # What ctypes itself costs is not the C call's.
    empty = library.call("forward", 1, **shared)
    empty.run = library.lib.deltic_get_num_threads
    empty.library = type("NoCheck", (), {"check": staticmethod(lambda status: None)})
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    gradients = {name: torch.empty_like(x) for name, x in zip("qkv", leaves, strict=True)}

    c_training = Training(library, 1, shared, o.clone(), gradients, 1)
    options = dict(g=g, beta=beta, qk_l2norm=True)
    prefill = dict(options, output_final_state=True)

    def train():
        out, _ = deltic.delta_rule(*leaves, **options)
        torch.autograd.grad(out, leaves, o)

    with torch.inference_mode():
        times = best(
            {
                "ctypes": empty,
                "C forward": c_forward,
                "C decode": c_decode,
                "delta_rule": lambda: deltic.delta_rule(q, k, v, **prefill),
                "decode": lambda: deltic.decode(q, k, v, **options, state_pool=state),
            },
            rounds=rounds,
        )
    times |= best({"C training": c_training, "training": train}, rounds=rounds // 2, calls=10)
    pairs = (
        ("delta_rule", "C forward", 1),
        ("decode", "C decode", 1),
        ("training", "C training", 2),
    )
    over = {
        name: times[name] - times[reference] + calls * times["ctypes"]
        for name, reference, calls in pairs
    }
    return times, over


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="a shared libdeltic of the same version")
    library = Library(parser.parse_args().library)
    torch.set_num_threads(1)
    times, over = measure(library)
    for name, number in times.items():
        print(f"{name:12} {number:7.1f} us")
    for name, number in over.items():
        print(f"{name}: {number:.1f} us over the C call")


if __name__ == "__main__":
    main()
