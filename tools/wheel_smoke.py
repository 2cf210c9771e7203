"""Runs an installed deltic on small numbers: outputs and gradients beside the plain recurrence.

For an environment that has the wheel and torch alone, from outside of the sources.
"""

import importlib.metadata
import sys
from pathlib import Path

import torch


def recurrence(q, k, v, g, beta):
    """o_t = S_t^T q_t, token by token in fp64."""
    q, k, v, g, beta = (x.double() for x in (q, k, v, g, beta))
    state, rows = torch.zeros(*q.shape[::2], q.shape[3], v.shape[3]).double(), []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        u = beta[:, t, :, None] * (v[:, t] - torch.einsum("bhkv,bhk->bhv", state, k[:, t]))
        state = state + k[:, t, :, :, None] * u[:, :, None]
        rows.append(torch.einsum("bhkv,bhk->bhv", state, q[:, t]))
    return torch.stack(rows, 1) * q.shape[3] ** -0.5


def check(deltic):
    """Outputs and gradients of the module's delta_rule beside the recurrence."""
    torch.manual_seed(0)
    q, v = torch.randn(2, 100, 2, 32), torch.randn(2, 100, 2, 16)
    k = torch.nn.functional.normalize(torch.randn(2, 100, 2, 32), dim=-1)
    g, beta = -torch.rand(2, 100, 2), torch.rand(2, 100, 2)
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    weights = torch.randn(2, 100, 2, 16)
    exact = recurrence(*inputs)
    truth = [exact, *torch.autograd.grad((exact * weights).sum(), inputs)]
    o, _ = deltic.delta_rule(q, k, v, g=g, beta=beta)
    found = [o, *torch.autograd.grad((o * weights).sum(), inputs)]
    names = ("o", "dq", "dk", "dv", "dg", "dbeta")
    for name, ours, theirs in zip(names, found, truth, strict=True):
        error = float((ours - theirs).detach().norm() / theirs.detach().norm())
        if not error < 1e-5:  # measured: 3e-7
            sys.exit(f"smoke: {name}: expected an error below 1e-5, got {error:.1e}")


def main() -> int:
    import deltic

    place = Path(deltic.__file__).resolve()
    if Path(sys.prefix).resolve() not in place.parents:
        sys.exit(f"smoke: expected deltic of {sys.prefix}, got {place}")
    version = importlib.metadata.version("deltic")
    if deltic.__version__ != version:
        sys.exit(f"smoke: expected version {version}, got {deltic.__version__}")
    check(deltic)
    print(f"smoke: deltic {version}, torch {torch.__version__}, outputs and gradients are right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
