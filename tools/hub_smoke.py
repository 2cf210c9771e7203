"""Loads a kernel repository with Hugging Face's package `kernels`: hub_smoke.py FOLDER.

Its parser reads build.toml, its loader chooses the variant, and its validator looks at the layers.
"""

import sys
from pathlib import Path

import torch
from kernels import get_local_kernel
from kernels._rust import Build
from kernels.layer.layer import _validate_layer
from wheel_smoke import check

LAYERS = {
    "chunk_gated_delta_rule": True,
    "recurrent_gated_delta_rule": False,
    "chunk_kimi_delta_attention": True,
    "recurrent_kimi_delta_attention": False,
}


class Chunked(torch.nn.Module):
    """The signature of transformers' chunked functions."""

    def forward(
        self,
        query,
        key,
        value,
        g,
        beta,
        chunk_size=64,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        raise NotImplementedError


class Recurrent(torch.nn.Module):
    """The signature of its recurrent ones."""

    def forward(
        self,
        query,
        key,
        value,
        g,
        beta,
        initial_state=None,
        output_final_state=False,
        use_qk_l2norm_in_kernel=False,
        **kwargs,
    ):
        raise NotImplementedError


def main() -> int:
    folder = Path(sys.argv[1]).resolve()
    Build.open(str(folder))
    kernel = get_local_kernel(folder, backend="cpu")
    check(kernel)
    q, k, v = (torch.randn(1, 70, 2, 32) for _ in range(3))
    g, beta = -torch.rand(1, 70, 2), torch.rand(1, 70, 2)
    for name, is_chunked in LAYERS.items():
        layer = getattr(kernel.layers, name)
        _validate_layer(check_cls=Chunked if is_chunked else Recurrent, cls=layer, repo=name)
        decay = g[..., None].expand(-1, -1, -1, 32).contiguous() if "kimi" in name else g
        o, state = layer()(
            q, k, v, decay, beta, output_final_state=True, use_qk_l2norm_in_kernel=True
        )
        same, last = kernel.delta_rule(
            q, k, v, g=g, beta=beta, qk_l2norm=True, output_final_state=True
        )
        torch.testing.assert_close(o, same, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(state, last, rtol=1e-4, atol=1e-5)
    print(f"hub: {kernel.__name__}: loaded by kernels, {len(LAYERS)} layers are valid and right")
    return 0


if __name__ == "__main__":
    sys.exit(main())
