"""What the tests share: inputs, the oracle, the error measure."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import deltic
import torch

# The project's folder, or the copy of the tests that tools/test_python.sh runs.
ROOT = Path(__file__).resolve().parents[2]

# rms(x - ref) / rms(ref) by dtype: o and states; dq dk dv d(state); dbeta; dg; dA_log and ddt_bias.
BUDGET = {
    torch.float32: {"o": 1e-4, "rows": 1e-4, "beta": 1e-4, "g": 2e-4, "params": 2e-4},
    torch.bfloat16: {"o": 6e-3, "rows": 8e-3, "beta": 1.5e-2, "g": 2e-2, "params": 1e-2},
    torch.float16: {"o": 6e-3, "rows": 8e-3, "beta": 1.5e-2, "g": 2e-2, "params": 1e-2},
}
_ROWS = {"beta": "beta", "g": "g", "gv": "g", "A_log": "params", "dt_bias": "params"}


def python(code: str, **environment: str) -> str:
    """Runs code in a fresh interpreter and returns what it printed."""
    result = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def error(
    x: torch.Tensor,
    reference: torch.Tensor,
    floor: float = 0.0,
    magnitude: torch.Tensor | None = None,
) -> float:
    """The relative error; the absolute one where the reference is next to nothing.

    A reference that is smaller than ``floor`` counts as that large, and an element of it that is
    smaller than its ``magnitude`` as large as that.
    """
    x, reference = x.detach().double(), reference.detach().double()
    if reference.numel() == 0:
        return 0.0
    size = reference if magnitude is None else torch.maximum(reference.abs(), magnitude)
    rms = max(size.square().mean().sqrt().item(), floor)
    return (x - reference).square().mean().sqrt().item() / (rms if rms > 1e-6 else 1.0)


@dataclass
class Case:
    """A call: its tensors by argument, its options, and the function."""

    tensors: dict[str, torch.Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    function: Any = deltic.delta_rule


def run(case: Case, *, oracle: bool = False) -> dict[str, torch.Tensor]:
    """Outputs and gradients of a case, by the library or by the oracle in fp64."""
    leaves = {}
    for name, tensor in case.tensors.items():
        tensor = tensor.detach()
        if tensor.is_floating_point():
            tensor = (tensor.cpu().double() if oracle else tensor.clone()).requires_grad_()
        elif oracle:
            tensor = tensor.cpu()
        leaves[name] = tensor
    options = dict(case.options, output_final_state=True)
    if oracle:
        options["impl"] = "reference"
    rest = {name: tensor for name, tensor in leaves.items() if name not in ("q", "k", "v")}
    o, state = case.function(leaves["q"], leaves["k"], leaves["v"], **rest, **options)
    generator = torch.Generator().manual_seed(7)
    d_o = torch.randn(o.shape, generator=generator, dtype=torch.float64)
    d_state = torch.randn(state.shape, generator=generator, dtype=torch.float64)
    rounded = d_o.to(case.tensors["q"].dtype).to(o)
    torch.autograd.backward((o, state), (rounded, d_state.float().to(state)))
    found = {"o": o.detach().cpu(), "state": state.detach().cpu()}
    found.update({f"d_{name}": x.grad.cpu() for name, x in leaves.items() if x.is_floating_point()})
    return found


def magnitudes(case: Case, d_g: torch.Tensor) -> dict[str, torch.Tensor]:
    """Of gradients of A_log and dt_bias: the roots of the sums of their squared terms.

    Each is a sum over all tokens in which most may cancel (docs/numerics.md): errors count from
    these where they exceed the sums.
    """
    if "A_log" not in case.tensors:
        return {}
    g, bias, A_log = (case.tensors[n].cpu().double() for n in ("g", "dt_bias", "A_log"))
    x = g + bias.view(g.shape[2:])
    softplus = case.options["gate"] == "softplus"
    terms = d_g * (torch.nn.functional.softplus(x) / x.sigmoid() if softplus else x)
    heads = terms.reshape(-1, *g.shape[2:]).transpose(0, 1).reshape(g.shape[2], -1)
    return {
        "d_A_log": heads.norm(dim=1).view(A_log.shape),
        "d_dt_bias": d_g.reshape(-1, *g.shape[2:]).norm(dim=0).view(bias.shape),
    }


def check_against_oracle(case: Case) -> None:
    """Every output and gradient of a case within the budget of its dtype."""
    ours, reference = run(case), run(case, oracle=True)
    budget = BUDGET[case.tensors["q"].dtype]
    sizes = magnitudes(case, reference["d_g"]) if "d_g" in reference else {}
    for name, x in ours.items():
        kind = "o" if name in ("o", "state") else _ROWS.get(name[2:], "rows")
        found = error(x, reference[name], magnitude=sizes.get(name))
        assert found <= budget[kind], f"{name}: error {found:.2e}, allowed {budget[kind]:.0e}"


def make(
    *,
    B: int = 2,
    T: int = 70,
    H: int = 1,
    HV: int = 2,
    K: int = 32,
    V: int = 16,
    gate: str = "head",
    form: str = "log_decay",
    dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype = torch.float32,
    lengths: list[int] | None = None,
    seed: int = 0,
    state: bool = True,
    **options: Any,
) -> Case:
    """A case with standard inputs: normalised random keys, beta in [0, 1], random gates."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator)

    def rand(*shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=generator)

    if lengths is not None:
        B, T = 1, sum(lengths)
    normal = torch.nn.functional.normalize
    tensors = {
        "q": normal(randn(B, T, H, K), dim=-1).to(dtype),
        "k": normal(randn(B, T, H, K), dim=-1).to(dtype),
        "v": randn(B, T, HV, V).to(dtype),
        "beta": rand(B, T, HV).to(gate_dtype),
    }
    if gate != "none":
        shape = (B, T, HV) if gate == "head" else (B, T, HV, K)
        raw = -rand(*shape) if form == "log_decay" else randn(*shape)
        tensors["g"] = raw.to(gate_dtype)
    if form != "log_decay" and gate != "none":
        options["gate"] = form
        tensors["A_log"] = rand(HV)
        tensors["dt_bias"] = randn(*((HV,) if gate == "head" else (HV, K)))
        if form == "bounded":
            options["lower_bound"] = -5.0
    if lengths is not None:
        offsets = [0]
        for length in lengths:
            offsets.append(offsets[-1] + length)
        tensors["cu_seqlens"] = torch.tensor(offsets)
    if state:
        N = B if lengths is None else len(lengths)
        widths = (V, K) if options.get("state_layout") == "vk" else (K, V)
        tensors["initial_state"] = randn(N, HV, *widths)
    return Case(tensors, options)


# Arguments of the building blocks' operators, from block_tensors().
BLOCK_CALLS: dict[str, Any] = {
    "cumsum": lambda x: (x["g"],),
    "gate": lambda x: (x["g"], x["A_log"], x["dt_bias"], None, None, None, "gate=softplus"),
    "l2norm": lambda x: (x["q"],),
    "kkt": lambda x: (x["k"], x["G"], x["beta"], None, None, "chunk=32"),
    "scores": lambda x: (x["q"], x["k"], x["G"]),
    "inverse": lambda x: (x["a"],),
    "scores_inverse": lambda x: (x["q"], x["k"], x["G"], x["beta"], None, None, 0.5, "chunk=32"),
    "wy": lambda x: (x["k"], x["a"], x["v"], x["G"], x["beta"], None, None, None, True),
}


def block_tensors(device: str = "cpu") -> dict[str, torch.Tensor]:
    """Inputs of every building block, all of which want gradients."""
    x = make(T=40, form="softplus").tensors
    x["G"] = deltic.chunk_cumsum(-torch.rand(x["g"].shape))
    x["a"] = 0.1 * torch.randn(2, 40, 2, 64)
    return {name: tensor.to(device).requires_grad_() for name, tensor in x.items()}
