#!/usr/bin/env python3
"""Writes text with the model of train_tiny_lm.py: the prompt at once, then byte by byte.

  python examples/python/generate.py --prompt "The state " --tokens 300

The prompt goes through the chunked operator and leaves one state per layer in a cache; every byte
after it costs the same, however long the text is. --check runs the whole text again without a cache
and compares byte for byte.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from checked import number, positive, seed, words
from deltic.layers import Cache
from tiny_lm import TinyLM, load
from torch import Tensor

HERE = Path(__file__).resolve().parent
# Largest difference of a logit between the recurrent and the chunked form that counts as rounding.
TOLERANCE = 1e-3


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--checkpoint", type=Path, default=HERE / "out" / "tiny_lm.pt")
    parser.add_argument(
        "--prompt", type=words, default="The state of a ", help="how the text begins"
    )
    parser.add_argument("--tokens", type=positive, default=300, help="bytes to write")
    parser.add_argument("--temperature", type=number, default=0.7, help="0: the likeliest byte")
    parser.add_argument("--seed", type=seed, default=0)
    # A token's products are too small for two threads, and torch's wait for each other spinning:
    # beside busy processes two wrote 20 bytes/s where one wrote 230.
    parser.add_argument("--threads", type=positive, default=1, help="CPU threads")
    parser.add_argument("--check", action="store_true", help="compare with a pass without a cache")
    return parser.parse_args(arguments)


def noise_of(tokens: int, temperature: float, seed: int) -> Tensor:
    """What is added to each step's logits: their largest sum is then a draw at that temperature."""
    uniform = torch.rand(tokens, 256, generator=torch.Generator().manual_seed(seed))
    return -temperature * torch.log(-torch.log(uniform.clamp(1e-20, 1 - 1e-7)))


def generate(model: TinyLM, prompt: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, list[float]]:
    """The bytes, the logits that each was drawn from, the seconds of prefill and of decoding."""
    cache = Cache()
    times = [time.perf_counter()]
    logits = [model(prompt[None], cache)[0, -1]]
    times.append(time.perf_counter())
    tokens = [(logits[0] + noise[0]).argmax()]
    for row in noise[1:]:
        logits.append(model(tokens[-1].view(1, 1), cache)[0, -1])
        tokens.append((logits[-1] + row).argmax())
    times.append(time.perf_counter())
    seconds = [end - begin for begin, end in zip(times, times[1:], strict=False)]
    return torch.stack(tokens), torch.stack(logits), seconds


def check(model: TinyLM, prompt: Tensor, tokens: Tensor, logits: Tensor, noise: Tensor) -> bool:
    """Compares with one pass over the whole text and no cache; says what was found."""
    text = torch.cat([prompt, tokens[:-1]])
    full = model(text[None])[0, len(prompt) - 1 :]
    again = (full + noise).argmax(dim=-1)
    same = int((again == tokens).sum())
    difference = float((full - logits).abs().max())
    print(f"check: {same} of {len(tokens)} bytes the same without a cache, ", end="")
    print(f"largest difference of a logit {difference:.1e}")
    return same == len(tokens) and difference <= TOLERANCE


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    torch.set_num_threads(options.threads)
    model = load(options.checkpoint)
    prompt = torch.tensor(list(options.prompt.encode()))
    noise = noise_of(options.tokens, options.temperature, options.seed)
    with torch.inference_mode():
        generate(model, prompt, noise[:2])  # memory and threads are there after the first call
        tokens, logits, (prefill, decode) = generate(model, prompt, noise)
        print(options.prompt + bytes(tokens.tolist()).decode(errors="replace"))
        print(f"\nprefill: {len(prompt)} bytes in {1e3 * prefill:.1f} ms", end="")
        if len(tokens) > 1:
            rate = (len(tokens) - 1) / decode
            print(f"; decoding: {rate:,.0f} bytes/s", end="")
        print()
        if options.check and not check(model, prompt, tokens, logits, noise):
            print("check: the two passes differ", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
