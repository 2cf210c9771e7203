#!/usr/bin/env python3
"""A Hugging Face model from its configuration, with transformers' own delta rule and with deltic's.

  python examples/python/huggingface_compare.py                          a small Qwen3-Next
  python examples/python/huggingface_compare.py --config FOLDER_OR_JSON  one that you have

The weights are random, the same for both. Prints the largest differences of logits and gradients,
the tokens that both write, and the times.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from checked import existing, integer, positive, seed

HERE = Path(__file__).resolve().parent
# Largest differences that count as rounding, of the largest number compared.
TOLERANCE = {"float32": 1e-3, "bfloat16": 5e-2}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument(
        "--config",
        type=existing,
        default=HERE / "qwen3_next_tiny.json",
        help="a model's config.json, or the folder it is in",
    )
    parser.add_argument("--batch", type=positive, default=1, help="sequences")
    parser.add_argument("--length", type=integer(2), default=512, help="tokens of the prompt")
    parser.add_argument("--tokens", type=positive, default=32, help="tokens to write")
    parser.add_argument("--dtype", choices=TOLERANCE, default="float32")
    parser.add_argument(
        "--repeats", type=positive, default=3, help="the best time of so many counts"
    )
    parser.add_argument("--seed", type=seed, default=0, help="of weights and prompt")
    parser.add_argument("--threads", type=positive, help="CPU threads (torch's own choice)")
    return parser.parse_args(arguments)


def make_model(path: Path, dtype: torch.dtype, **changes: Any) -> Any:
    """A causal language model with random weights; `changes`: of its configuration."""
    # transformers would choose flash-linear-attention where it is installed, whose kernels are for
    # GPUs: kept from being found, what is left is the fallback in torch.
    sys.modules.setdefault("fla", None)  # type: ignore[arg-type]
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ImportError:
        raise SystemExit("this example needs transformers: pip install transformers") from None
    try:
        config = AutoConfig.from_pretrained(path, **changes)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise SystemExit(
            f"--config {path}: expected a causal language model's, got: {reason}"
        ) from None


def best_time(function: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """The function's result, and the least time of several calls in seconds."""
    least = float("inf")
    for _ in range(max(1, repeats)):
        begin = time.perf_counter()
        result = function()
        least = min(least, time.perf_counter() - begin)
    return result, least


def measure(model: Any, prompt: torch.Tensor, options: argparse.Namespace) -> dict[str, Any]:
    """Logits, gradients and written tokens, each with its time."""

    def prefill() -> torch.Tensor:
        with torch.inference_mode():
            return model(prompt, use_cache=False).logits

    def training() -> dict[str, torch.Tensor]:
        model.zero_grad()
        model(prompt, labels=prompt, use_cache=False).loss.backward()
        return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

    def writing() -> torch.Tensor:
        size = {"min_new_tokens": options.tokens, "max_new_tokens": options.tokens}
        mask = torch.ones_like(prompt)
        found = model.generate(prompt, attention_mask=mask, do_sample=False, pad_token_id=0, **size)
        return found[:, prompt.shape[1] :]

    return {
        function.__name__: best_time(function, options.repeats)
        for function in (prefill, training, writing)
    }


def largest(tensors: Iterable[torch.Tensor]) -> float:
    return max(float(x.abs().max()) for x in tensors)


def compare(theirs: dict[str, Any], ours: dict[str, Any], tolerance: float) -> bool:
    """Prints differences and times; whether the differences are rounding."""
    before, after = theirs["prefill"][0], ours["prefill"][0]
    logits = largest([before - after]) / largest([before])
    before, after = theirs["training"][0], ours["training"][0]
    gradients = largest(before[n] - after[n] for n in before) / largest(before.values())
    same = int((theirs["writing"][0] == ours["writing"][0]).sum())
    total = theirs["writing"][0].numel()
    print(f"logits: largest difference {logits:.1e} of the largest logit")
    print(f"gradients: largest difference {gradients:.1e} of the largest gradient")
    print(f"written tokens: {same} of {total} the same")
    print(f"\n{'':10}{'fallback ms':>14}{'deltic ms':>14}{'ratio':>8}")
    for name, (_, seconds) in theirs.items():
        ratio = seconds / ours[name][1]
        print(f"{name:10}{1e3 * seconds:14.1f}{1e3 * ours[name][1]:14.1f}{ratio:8.2f}")
    return logits <= tolerance and gradients <= tolerance


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = make_model(options.config, getattr(torch, options.dtype)).eval()
    from deltic.integrations import transformers as integration

    prompt = torch.randint(model.config.vocab_size, (options.batch, options.length))
    count = sum(p.numel() for p in model.parameters())
    print(f"{type(model).__name__}: {count:,} parameters, prompt {tuple(prompt.shape)}")
    theirs = measure(model, prompt, options)
    with integration.enable() as report:
        mine = [line for line in report.done if line.startswith(model.config.model_type + ":")]
        print(*(mine or [report]), "", sep="\n")
        ours = measure(model, prompt, options)
    if not compare(theirs, ours, TOLERANCE[options.dtype]):
        print("the two differ by more than rounding", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
