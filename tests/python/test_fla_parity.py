"""deltic.fla against flash-linear-attention itself: signatures, references, indices.

Its kernels need a GPU; what is compared here runs on a CPU. Skipped where it is not installed.
"""

import importlib
import inspect

import pytest
import torch
from support import error, make

pytest.importorskip("fla.ops.kda.naive", exc_type=Exception)

FUNCTIONS = {
    "ops.delta_rule": "chunk_delta_rule fused_chunk_delta_rule fused_recurrent_delta_rule",
    "ops.delta_rule.naive": "delta_rule_recurrence delta_rule_chunkwise delta_rule_parallel",
    "ops.delta_rule.wy_fast": "prepare_wy_repr_fwd prepare_wy_repr_bwd recompute_w_u_fwd "
    "fwd_prepare_wy_repr bwd_prepare_wy_repr fwd_recompute_w_u",
    "ops.gated_delta_rule": "chunk_gated_delta_rule chunk_gdn fused_recurrent_gated_delta_rule "
    "fused_recurrent_gdn naive_chunk_gated_delta_rule naive_recurrent_gated_delta_rule",
    "ops.gated_delta_rule.chunk_fwd": "chunk_gated_delta_rule_fwd_intra",
    "ops.gated_delta_rule.gate": "naive_gdn_gate fused_gdn_gate gdn_gate_fwd gdn_gate_bwd "
    "gdn_gate_chunk_cumsum",
    "ops.gated_delta_rule.wy_fast": "prepare_wy_repr_bwd recompute_w_u_fwd",
    "ops.kda": "chunk_kda fused_recurrent_kda",
    "ops.kda.chunk_intra": "chunk_kda_fwd_intra",
    "ops.kda.fused_recurrent": "fused_recurrent_kda_fwd",
    "ops.kda.gate": "naive_kda_gate naive_kda_lowerbound_gate fused_kda_gate kda_gate_fwd "
    "kda_gate_bwd kda_gate_chunk_cumsum",
    "ops.kda.naive": "naive_recurrent_kda naive_chunk_kda",
    "ops.kda.wy_fast": "prepare_wy_repr_bwd recompute_w_u_fwd",
    "ops.common.chunk_delta_h": "chunk_gated_delta_rule_fwd_h chunk_gated_delta_rule_bwd_dhu",
    "ops.common.chunk_o": "chunk_fwd_o chunk_bwd_dv chunk_bwd_dv_local chunk_bwd_dqkwg",
    "ops.common.chunk_scaled_dot_kkt": "chunk_scaled_dot_kkt_fwd",
    "ops.common.gate": "fused_beta_sigmoid fused_beta_sigmoid_fwd fused_beta_sigmoid_bwd",
    "ops.utils.index": "prepare_split_cu_seqlens",
    "ops.utils": "chunk_global_cumsum chunk_global_cumsum_scalar chunk_global_cumsum_vector "
    "chunk_local_cumsum chunk_local_cumsum_scalar chunk_local_cumsum_vector "
    "get_max_num_splits pack_sequence prepare_chunk_indices prepare_chunk_indices_static "
    "prepare_chunk_offsets unpack_sequence "
    "prepare_cu_seqlens_from_lens prepare_cu_seqlens_from_mask prepare_lens "
    "prepare_lens_from_mask prepare_position_ids prepare_sequence_ids prepare_token_indices "
    "solve_tril",
}
# Ours has a default where theirs has none.
MORE_DEFAULTS = {"cu_seqlens"}


def both(module, name):
    return [
        getattr(importlib.import_module(f"{root}.{module}"), name) for root in ("deltic.fla", "fla")
    ]


@pytest.mark.parametrize(
    ("module", "name"), [(m, n) for m in FUNCTIONS for n in FUNCTIONS[m].split()]
)
def test_signatures(module, name):
    ours, theirs = (inspect.signature(inspect.unwrap(f)).parameters for f in both(module, name))
    assert list(ours) == list(theirs)
    for argument, parameter in ours.items():
        assert parameter.kind == theirs[argument].kind
        default = theirs[argument].default
        if argument not in MORE_DEFAULTS or default is not inspect.Parameter.empty:
            assert parameter.default == default, argument


def close(found, reference):
    assert (found is None) == (reference is None)
    if found is not None:
        assert found.shape == reference.shape and found.dtype == reference.dtype
        assert error(found, reference) <= 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("final", [False, True])
def test_references(dtype, final):
    said = {"output_final_state": final}
    for name in ("naive_recurrent_kda", "naive_chunk_kda"):
        x = make(gate="channel", T=64, dtype=dtype).tensors
        rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
        found = [
            f(*rows, initial_state=x["initial_state"], **said) for f in both("ops.kda.naive", name)
        ]
        for pair in zip(*found, strict=True):
            close(*pair) if dtype == torch.float32 else None
            assert pair[0] is None or error(*pair) <= 4e-3
    x = make(gate="head", T=70, HV=1, dtype=dtype).tensors
    for name, order in (
        ("naive_recurrent_gated_delta_rule", ("q", "k", "v", "beta", "g")),
        ("naive_chunk_gated_delta_rule", ("q", "k", "v", "g", "beta")),
    ):
        rows = [x[n] for n in order]
        functions = both("ops.gated_delta_rule", name)
        for pair in zip(
            *(f(*rows, initial_state=x["initial_state"], **said) for f in functions), strict=True
        ):
            close(*pair)


def test_delta_references():
    x = make(gate="none", T=128, HV=1, V=32, state=False).tensors
    rows = [x[n].transpose(1, 2) for n in ("q", "k", "v", "beta")]
    for name in ("delta_rule_recurrence", "delta_rule_chunkwise", "delta_rule_parallel"):
        ours, theirs = both("ops.delta_rule.naive", name)
        for pair in zip(ours(*rows), theirs(*[y.clone() for y in rows]), strict=True):
            close(*pair)


def test_gates():
    g, A_log, bias = torch.randn(2, 9, 3, 8), torch.rand(3), torch.randn(24)
    for module, name, arguments in (
        ("ops.kda.gate", "naive_kda_gate", (g, A_log, bias)),
        ("ops.kda.gate", "naive_kda_lowerbound_gate", (g, A_log, bias)),
        ("ops.kda.gate", "naive_kda_lowerbound_gate", (g,)),
        ("ops.gated_delta_rule.gate", "naive_gdn_gate", (g[..., 0], A_log, bias[:3])),
    ):
        close(*(f(*arguments) for f in both(module, name)))


def test_indices():
    cu = torch.tensor([0, 20, 57, 90], dtype=torch.int32)
    for name, arguments in (
        ("prepare_chunk_indices", (cu, 16)),
        ("prepare_chunk_indices_static", (cu, 16, 12)),
        ("prepare_chunk_offsets", (cu, 16)),
        ("prepare_lens", (cu,)),
        ("prepare_position_ids", (cu,)),
        ("prepare_sequence_ids", (cu,)),
        ("prepare_token_indices", (cu,)),
        ("prepare_cu_seqlens_from_lens", (cu.diff(),)),
        ("get_max_num_splits", (cu, 16)),
    ):
        found, expected = (f(*arguments) for f in both("ops.utils", name))
        if not isinstance(found, tuple):
            found, expected = (found,), (expected,)
        for x, y in zip(found, expected, strict=True):
            assert torch.equal(torch.as_tensor(x), torch.as_tensor(y)), name
            assert not isinstance(y, torch.Tensor) or x.dtype == y.dtype, name


def test_pieces():
    ours, theirs = both("ops.utils.index", "prepare_split_cu_seqlens")
    cu = torch.tensor([0, 20, 20, 57, 90])
    for arguments in (
        (2, 10, 4),
        (3, 8, 8),
        (None, None, 16, cu),
        (None, None, 7, cu, torch.int64),
    ):
        found, expected = ours(*arguments), theirs(*arguments)
        assert torch.equal(found, expected) and found.dtype == expected.dtype
    for wrong in ((2, 10), (None, None, 4)):
        for function in (ours, theirs):
            with pytest.raises(TypeError):
                function(*wrong)
