#!/usr/bin/env python3
"""How exact the gradient of Qwen3-Next's A_log is: transformers' fallback and deltic, beside fp64.

  python bench/gradient_accuracy.py              a small model, random weights, 512 tokens, fp32

The truth is autograd through the fallback with every cast to fp32 in it made a cast to fp64. Prints
the largest error of both: of a head, relative to that head's own gradient, and relative to the
largest gradient of its layer.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")
import torch
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples" / "python"))
from checked import integer, positive, seed  # noqa: E402
from huggingface_compare import make_model  # noqa: E402


class Wide(TorchFunctionMode):
    """Casts to fp32 become casts to fp64: a model in fp64 stays there."""

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        def wide(value: Any) -> Any:
            return torch.float64 if value is torch.float32 else value

        if function is torch.Tensor.float:
            function = torch.Tensor.double
        kwargs = {name: wide(value) for name, value in (kwargs or {}).items()}
        return function(*map(wide, args), **kwargs)


def gradients(model: Any, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """dA_log of every linear-attention layer."""
    model.zero_grad()
    model(tokens, labels=tokens, use_cache=False).loss.backward()
    found = {n: p.grad.double() for n, p in model.named_parameters() if n.endswith("A_log")}
    if not found:
        raise SystemExit("expected a model with A_log, got one without")
    return found


def largest_errors(
    found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]
) -> tuple[float, float]:
    """Relative to the head's gradient, and to the largest of the layer."""
    own, layer = 0.0, 0.0
    for name, exact in truth.items():
        error = (found[name] - exact).abs()
        own = max(own, float((error / exact.abs()).max()))
        layer = max(layer, float(error.max() / exact.abs().max()))
    return own, layer


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--length", type=integer(2), default=512, help="tokens of a sequence")
    parser.add_argument("--seeds", type=positive, default=3, help="models to draw")
    parser.add_argument("--seed", type=seed, default=0, help="of the first model")
    parser.add_argument("--most", type=float, help="fail where deltic's error is above this")
    options = parser.parse_args(arguments)
    from deltic.integrations import transformers as integration

    worst = {"fallback": (0.0, 0.0), "deltic": (0.0, 0.0)}

    def said(errors: dict[str, tuple[float, float]]) -> str:
        return ", ".join(f"{n} {own:.1e} (layer {all_:.1e})" for n, (own, all_) in errors.items())

    for number in range(options.seed, options.seed + options.seeds):
        torch.manual_seed(number)
        # No experts: a choice that rounding turns would hide what is compared.
        path = ROOT / "examples" / "python" / "qwen3_next_tiny.json"
        model = make_model(path, torch.float32, mlp_only_layers=[0, 1, 2, 3])
        tokens = torch.randint(model.config.vocab_size, (1, options.length))
        theirs = gradients(model, tokens)
        with integration.enable():
            ours = gradients(model, tokens)
        with Wide():
            truth = gradients(model.double(), tokens)
        errors = {
            "fallback": largest_errors(theirs, truth),
            "deltic": largest_errors(ours, truth),
        }
        print(f"seed {number}: {said(errors)}")
        for name, (own, layer) in errors.items():
            worst[name] = (max(worst[name][0], own), max(worst[name][1], layer))
    print(f"largest relative error of dA_log: {said(worst)}")
    if options.most is not None and worst["deltic"][0] > options.most:
        print(f"expected at most {options.most:g} from deltic", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
