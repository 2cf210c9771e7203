#!/usr/bin/env python3
"""Times deltic beside the PyTorch fallback of transformers and beside copies, in one process.

Every group is measured in interleaved rounds: each side once per round, in an order that turns.
Both sides get the same tensors, and their outputs must agree. The result is JSON for
bench/cpu_table.py.
"""

import argparse
import ctypes
import datetime
import json
import os
import re
import statistics
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import transformers
from deltic_c import Library, Training
from sources import commit_of
from transformers.models.qwen3_next import modeling_qwen3_next as peer

ROOT = Path(__file__).resolve().parent.parent.parent
# Largest rms(ours - theirs) / rms(theirs): the error budgets of both sides together.
AGREEMENT = {torch.float32: 2e-4, torch.bfloat16: 1.2e-2}
PAUSE_S = 0.02  # lets the spinning threads of the other side's OpenMP runtime fall asleep
SHORT_S = 0.1  # shorter calls run once untimed before each sample: threads awake, caches filled


def sample(function, is_short):
    time.sleep(PAUSE_S)
    if is_short:
        function()
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def measure(sides, rounds):
    """Interleaved times of the functions in `sides`, as statistics in ms."""
    short = {}
    for name, function in sides.items():
        function()
        begin = time.perf_counter()
        function()
        short[name] = time.perf_counter() - begin < SHORT_S
    times = {name: [] for name in sides}
    names = list(sides)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            times[name].append(1e3 * sample(sides[name], short[name]))
    result = {}
    for name, values in times.items():
        values.sort()
        result[name] = {
            "median_ms": statistics.median(values),
            "min_ms": values[0],
            "p10": values[len(values) // 10],
            "p90": values[len(values) * 9 // 10],
            "n": len(values),
        }
    return result


def inputs(B, T, H, dtype, gate="head", K=128, V=128):
    """Random inputs of a layer: normalised inside, decay per token of a few per cent."""
    generator = torch.Generator().manual_seed(1)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    shape = (B, T, H, K) if gate == "channel" else (B, T, H)
    return {
        "q": normal(B, T, H, K).to(dtype),
        "k": normal(B, T, H, K).to(dtype),
        "v": normal(B, T, H, V).to(dtype),
        "g": -0.1 * torch.rand(*shape, generator=generator),
        "beta": torch.sigmoid(normal(B, T, H)).to(dtype),
    }


def peak_memory(function):
    """Bytes by which the process grows at most while the function runs; None if Linux won't say."""
    try:
        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    except OSError:
        return None

    def status(key):
        text = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(rf"^{key}:\s*(\d+) kB", text, re.M).group(1))

    before = status("VmRSS")
    function()
    return status("VmHWM") - before


def relative_error(x, ref):
    x, ref = x.double(), ref.double()
    return float(((x - ref).square().mean() / ref.square().mean()).sqrt())


class Runner:
    def __init__(self, library, threads, quick):
        self.library = library
        self.threads = threads
        self.quick = quick
        self.groups = []
        self.agree = True

    def rounds(self, n):
        return 2 if self.quick else n

    def add(self, name, sides, rounds, bytes_moved=None, errors=None, impl=None, memory=None):
        result = measure(sides, self.rounds(rounds))
        group = {"name": name, "sides": result}
        if bytes_moved is not None:
            group["bytes"] = bytes_moved
        if errors is not None:
            group["difference"] = errors
        if impl is not None:
            group["impl"] = impl
        if memory is not None:
            group["memory"] = memory
        self.groups.append(group)
        medians = ", ".join(f"{side} {value['median_ms']:.3f} ms" for side, value in result.items())
        print(f"{name}: {medians}", file=sys.stderr, flush=True)

    def ours(self, op, threads=None, **tensors):
        return self.library.call(op, threads or self.threads, **tensors)

    def compare(self, name, x, ref, dtype, factor=1):
        error = relative_error(x, ref)
        if not error <= factor * AGREEMENT[dtype]:
            print(f"{name}: outputs differ by {error:.2e}", file=sys.stderr)
            self.agree = False
        return error

    def forward_beside_fallback(self, name, T, dtype, rounds):
        t = inputs(1, T, 16, dtype)
        o = torch.empty_like(t["v"])
        call = self.ours("forward", **t, o=o)
        theirs = []

        def fallback():
            theirs[:] = peer.torch_chunk_gated_delta_rule(
                t["q"], t["k"], t["v"], t["g"], t["beta"], use_qk_l2norm_in_kernel=True
            )

        call()
        fallback()
        error = self.compare(name, o, theirs[0], dtype)
        self.add(
            name,
            {"deltic": call, "fallback": fallback},
            rounds,
            errors={"o": error},
            impl=call.impl,
        )

    def training(self, t, save):
        o, d_o = torch.empty_like(t["v"]), torch.randn_like(t["v"])
        gradients = {name: torch.empty_like(x) for name, x in t.items()}
        return Training(self.library, self.threads, t | {"o": o}, d_o, gradients, save)

    def training_beside_autograd(self, name, T, dtype, rounds):
        """Forward and backward, keeping states, beside autograd through the fallback."""
        t = inputs(1, T, 16, dtype)
        ours = self.training(t, 1)
        d_o, gradients = ours.backward.keep
        leaves = {key: x.clone().requires_grad_() for key, x in t.items()}

        @torch.enable_grad()
        def fallback():
            for x in leaves.values():
                x.grad = None
            o, _ = peer.torch_chunk_gated_delta_rule(*leaves.values(), use_qk_l2norm_in_kernel=True)
            o.backward(d_o)

        ours()
        memory = peak_memory(fallback)
        errors = {
            key: self.compare(f"{name} d{key}", gradients[key], leaves[key].grad, dtype, 3)
            for key in t
        }
        kept = sum(t[key].nbytes for key in "qkvg") + t["v"].nbytes
        self.add(
            name,
            {"deltic": ours, "fallback": fallback},
            rounds,
            errors=errors,
            impl=ours.impl,
            memory={"deltic": ours.extra_bytes, "fallback": memory, "inputs": kept},
        )

    def backward_beside_forward(self, name, dtype, rounds):
        """GDN: forward alone, backward in both memory modes; KDA: forward and backward."""
        gdn = inputs(1, 4096, 16, dtype)
        kda = inputs(1, 4096, 16, dtype, gate="channel")
        states, everything = self.training(gdn, 1), self.training(gdn, 2)
        states()
        everything.backward.keep[0].copy_(states.backward.keep[0])
        everything()
        for key, x in states.backward.keep[1].items():
            if not torch.equal(x, everything.backward.keep[1][key]):
                print(f"{name}: bits of d{key} depend on what is kept", file=sys.stderr)
                self.agree = False
        sides = {
            "forward": self.ours("forward", **gdn, o=torch.empty_like(gdn["v"])),
            "backward states": states.backward,
            "backward all": everything.backward,
            "gdn": self.training(gdn, 1),
            "kda": self.training(kda, 1),
        }
        self.add(name, sides, rounds, impl=states.impl)

    def kda_beside_gdn(self, name, dtype, rounds):
        gdn = inputs(1, 4096, 16, dtype)
        kda = inputs(1, 4096, 16, dtype, gate="channel")
        sides = {
            "gdn": self.ours("forward", **gdn, o=torch.empty_like(gdn["v"])),
            "kda": self.ours("forward", **kda, o=torch.empty_like(kda["v"])),
        }
        self.add(name, sides, rounds, impl=sides["kda"].impl)

    def growth(self, name, dtype, rounds):
        sides = {}
        for T in (1024, 4096, 65536):
            t = inputs(1, T, 16, dtype)
            sides[str(T)] = self.ours("forward", **t, o=torch.empty_like(t["v"]))
        self.add(name, sides, rounds, impl=sides["4096"].impl)

    def decode_beside_copy(self, name, sequences, rounds):
        heads, K, V = 32, 128, 128
        t = inputs(sequences, 1, heads, torch.float32)
        state = 0.1 * torch.randn(
            sequences, heads, K, V, generator=torch.Generator().manual_seed(2)
        )
        ref, ref_state = peer.torch_recurrent_gated_delta_rule(
            t["q"],
            t["k"],
            t["v"],
            t["g"],
            t["beta"],
            initial_state=state.clone(),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        pool, o = state.clone(), torch.empty_like(t["v"])
        call = self.ours("decode", **t, o=o, state_pool=pool)
        call()
        errors = {
            "o": self.compare(name, o, ref, torch.float32),
            "state": self.compare(name, pool, ref_state, torch.float32),
        }
        del ref, ref_state

        def fallback():
            peer.torch_recurrent_gated_delta_rule(
                t["q"],
                t["k"],
                t["v"],
                t["g"],
                t["beta"],
                initial_state=state,
                output_final_state=True,
                use_qk_l2norm_in_kernel=True,
            )

        copy = torch.empty_like(state)
        size = state.numel() * 4
        part = (size // self.threads + 63) // 64 * 64
        workers = ThreadPoolExecutor(self.threads)

        def copy_part(i):
            begin = i * part
            ctypes.memmove(
                copy.data_ptr() + begin, state.data_ptr() + begin, min(part, size - begin)
            )

        sides = {
            "deltic": call,
            "fallback": fallback,
            # Two ways to copy; the table takes the better one.
            "copy (torch)": lambda: copy.copy_(state),
            "copy (memmove)": lambda: list(workers.map(copy_part, range(self.threads))),
        }
        self.add(name, sides, rounds, bytes_moved=2 * size, errors=errors, impl=call.impl)
        workers.shutdown()

    def threads_on_one_head(self, name, dtype, rounds):
        t = inputs(1, 65536, 1, dtype)
        o = {n: torch.empty_like(t["v"]) for n in (1, self.threads)}
        sides = {f"{n}": self.ours("forward", threads=n, **t, o=o[n]) for n in o}
        self.add(name, sides, rounds, impl=sides["1"].impl)
        if not torch.equal(o[1], o[self.threads]):
            print(f"{name}: bits depend on the number of threads", file=sys.stderr)
            self.agree = False


def machine(threads):
    cpu = Path("/proc/cpuinfo").read_text()
    flags = set(re.search(r"^flags\s*: (.*)$", cpu, re.M).group(1).split())
    known = ["avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16"]
    return {
        "cpu": re.search(r"^model name\s*: (.*)$", cpu, re.M).group(1),
        "cores": os.cpu_count(),
        "threads": threads,
        "virtual": "hypervisor" in flags,
        "features": [name for name in known if name in flags],
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--library", required=True, help="libdeltic.so")
    parser.add_argument("--json", required=True, help="where the result goes")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="two rounds of everything")
    parser.add_argument("--isa", help="what bench/peers/run.sh bound both sides to")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.set_grad_enabled(False)
    library = Library(args.library)
    runner = Runner(library, args.threads, args.quick)
    commit = commit_of(ROOT)  # before the hour in which somebody may go on working
    f32, bf16 = torch.float32, torch.bfloat16

    runner.forward_beside_fallback("gdn_f32_4096", 4096, f32, 11)
    runner.forward_beside_fallback("gdn_bf16_4096", 4096, bf16, 11)
    runner.forward_beside_fallback("gdn_f32_1024", 1024, f32, 21)
    runner.kda_beside_gdn("kda_f32", f32, 11)
    runner.kda_beside_gdn("kda_bf16", bf16, 11)
    runner.growth("growth_f32", f32, 7)
    runner.growth("growth_bf16", bf16, 7)
    runner.decode_beside_copy("decode_16", 16, 41)
    runner.decode_beside_copy("decode_256", 256, 11)
    runner.threads_on_one_head("one_head_f32", f32, 9)
    runner.threads_on_one_head("one_head_bf16", bf16, 9)

    runner.training_beside_autograd("train_f32_4096", 4096, f32, 5)
    runner.training_beside_autograd("train_bf16_4096", 4096, bf16, 5)
    runner.training_beside_autograd("train_f32_1024", 1024, f32, 11)
    runner.backward_beside_forward("backward_f32", f32, 9)
    runner.backward_beside_forward("backward_bf16", bf16, 9)

    result = {
        "schema": "deltic.peers.1",
        "version": library.version,
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "machine": machine(args.threads),
        "isa": args.isa,
        "peers": {"torch": torch.__version__, "transformers": transformers.__version__},
        "agree": runner.agree,
        "quick": args.quick,
        "groups": runner.groups,
    }
    Path(args.json).write_text(json.dumps(result, indent=1) + "\n")
    return 0 if runner.agree else 1


if __name__ == "__main__":
    sys.exit(main())
