"""Host time of eager calls on a GPU: Python functions, operators, and what torch itself takes."""

import argparse
import cProfile
import pstats
import time

import deltic
import torch


def best(function, rounds=150, calls=8):
    """Microseconds per call, the best of many rounds that begin with an idle GPU."""
    least = float("inf")
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(calls):
            function()
        least = min(least, 1e6 * (time.perf_counter() - begin) / calls)
    torch.cuda.synchronize()
    return least


def rows(T, H, per_channel):
    """q, k, v, g, beta in bf16."""
    made = dict(device="cuda", dtype=torch.bfloat16)
    q, k, v = (torch.randn(1, T, H, 128, **made) for _ in range(3))
    g = -torch.rand(1, T, H, *([128] if per_channel else []), **made)
    return q, k, v, g, torch.rand(1, T, H, **made)


def layers(ops):
    """Calls of a decode by layer, from torch's own to the whole function, and of forward."""
    library = deltic._library
    q, k, v, g, beta = rows(1, 32, False)
    state = torch.zeros(1, 32, 128, 128, device="cuda", dtype=torch.bfloat16)
    words = "as=decode layout=vk qk_l2norm"
    options = dict(g=g, beta=beta, qk_l2norm=True, state_layout="vk")
    out = torch.empty_like(v)
    operator = (q, k, v, beta, g, None, None, None, state, *[None] * 6, words)
    x = torch.zeros(4, device="cuda")
    found = {
        "torch x.add_(1)": lambda: x.add_(1),
        "torch.empty_like(v)": lambda: torch.empty_like(v),
        "operator decode_": lambda: ops.decode_.default(*operator),
    }
    direct = getattr(library, "DIRECT_DECODE", None)
    if direct is not None:
        given = (q, k, v, beta, g, *[None] * 4, state, *[None] * 8)
        said = (None, None, "log_decay", "value", "vk", True, False, None, None)
        found["direct decode, out"] = lambda: direct(*given, out, *said)
        found["direct decode"] = lambda: direct(*given, None, *said)
    found["decode, out"] = lambda: deltic.decode(q, k, v, **options, state_pool=state, out=out)
    found["decode"] = lambda: deltic.decode(q, k, v, **options, state_pool=state)
    found["recurrent"] = lambda: deltic.recurrent(
        q, k, v, **options, initial_state=state, output_final_state=True
    )
    a, b, c, decay, rate = rows(128, 16, False)
    sequence = (a, b, c, rate, decay, *[None] * 7, "as=delta_rule qk_l2norm")
    found["operator forward T=128"] = lambda: ops.forward.default(*sequence)
    direct_forward = getattr(library, "DIRECT_FORWARD", None)
    if direct_forward is not None:
        args = (a, b, c, rate, decay, *[None] * 13)
        form = (None, None, "log_decay", "value", "kv", True, False, None, None)
        out_rows = torch.empty_like(c)
        found["direct forward T=128"] = lambda: direct_forward(*args, None, *form)
        found["direct forward T=128, out"] = lambda: direct_forward(*args, out_rows, *form)
    found["delta_rule T=128"] = lambda: deltic.delta_rule(
        a, b, c, g=decay, beta=rate, qk_l2norm=True
    )
    return found


def measure_layers():
    """Prints microseconds per call."""
    ops = getattr(torch.ops, deltic._library.NAMESPACE)
    with torch.no_grad():
        for name, function in layers(ops).items():
            print(f"{name:38} {best(function):7.2f} us", flush=True)


def measure(profile):
    """Prints microseconds per call."""
    ops = getattr(torch.ops, deltic._library.NAMESPACE)
    x = torch.zeros(4, device="cuda")
    y = torch.zeros(128, 4, device="cuda")
    found = {
        "torch x.add_(1)": lambda: x.add_(1),
        "torch.empty(4, cuda)": lambda: torch.empty(4, device="cuda"),
        "torch empty_like": lambda: torch.empty_like(y),
        "torch.empty(1 MB)": lambda: torch.empty(1 << 20, device="cuda", dtype=torch.uint8),
    }
    functions = {}
    for name, T, H, per_channel in (
        ("GDN T=128 H=16", 128, 16, False),
        ("KDA T=128 H=16", 128, 16, True),
        ("KDA T=8192 H=32", 8192, 32, True),
    ):
        q, k, v, g, beta = rows(T, H, per_channel)
        functions[f"delta_rule {name}"] = lambda a=(q, k, v), g=g, b=beta: deltic.delta_rule(
            *a, g=g, beta=b, qk_l2norm=True
        )
        given = (q, k, v, beta, g, *[None] * 7, "as=delta_rule qk_l2norm")
        found[f"operator forward {name}"] = lambda a=given: ops.forward.default(*a)

        def below(a=given, op=ops.forward.default):
            with torch._C._AutoDispatchBelowAutograd():
                return op(*a)

        found[f"  below autograd {name}"] = below
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        q, k, v, g, beta = rows(1, 32, False)
        state = torch.zeros(1, 32, 128, 128, device="cuda", dtype=dtype)
        options = dict(g=g, beta=beta, qk_l2norm=True, state_layout="vk")
        functions[f"decode {name} state"] = lambda a=(q, k, v), s=state, o=options: deltic.decode(
            *a, **o, state_pool=s
        )
        functions[f"recurrent {name} state"] = lambda a=(q, k, v), s=state, o=options: (
            deltic.recurrent(*a, **o, initial_state=s, output_final_state=True)
        )
        words = "as=decode layout=vk qk_l2norm"
        given = (q, k, v, beta, g, None, None, None, state, *[None] * 6, words)
        found[f"operator decode_ {name}"] = lambda a=given: ops.decode_.default(*a)
        given = (q, k, v, beta, g, None, None, None, state, *[None] * 4, words + " final")
        found[f"operator decode {name}"] = lambda a=given: ops.decode.default(*a)
    with torch.no_grad():
        for name, function in (found | functions).items():
            print(f"{name:38} {best(function):7.1f} us", flush=True)
        if profile:
            for name, function in functions.items():
                profiler = cProfile.Profile()
                profiler.enable()
                for _ in range(300):
                    function()
                profiler.disable()
                print(name)
                pstats.Stats(profiler).sort_stats("tottime").print_stats(6)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--profile", action="store_true", help="also where Python's time goes")
    parser.add_argument("--layers", action="store_true", help="decode and T = 128 alone, by layer")
    given = parser.parse_args()
    measure_layers() if given.layers else measure(given.profile)
