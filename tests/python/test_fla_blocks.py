"""deltic.fla: gates, references and the functions inside of chunks, against plain fp64 torch."""

import math

import deltic.fla._naive as naive
import pytest
import torch
from deltic.fla.ops.common import chunk_scaled_dot_kkt_fwd
from deltic.fla.ops.common.gate import (
    fused_beta_sigmoid,
    fused_beta_sigmoid_bwd,
    fused_beta_sigmoid_fwd,
)
from deltic.fla.ops.delta_rule import naive as delta_naive
from deltic.fla.ops.delta_rule import wy_fast as delta_wy
from deltic.fla.ops.gated_delta_rule import gate as gdn_gate
from deltic.fla.ops.gated_delta_rule import wy_fast as gdn_wy
from deltic.fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from deltic.fla.ops.kda import gate as kda_gate
from deltic.fla.ops.kda import wy_fast as kda_wy
from deltic.fla.ops.kda.chunk_intra import chunk_kda_fwd_intra
from deltic.fla.ops.utils import (
    chunk_local_cumsum,
    get_max_num_splits,
    prepare_chunk_indices,
    prepare_chunk_indices_static,
    prepare_chunk_offsets,
    prepare_cu_seqlens_from_mask,
    prepare_lens,
    prepare_token_indices,
    solve_tril,
)
from deltic.fla.ops.utils.constant import RCP_LN2
from support import error, make

CU = torch.tensor([0, 20, 20, 57, 90])
LENGTHS = [20, 0, 37, 33]
FP32 = 1e-4


def close(x, reference, allowed=FP32):
    assert x.shape == reference.shape
    assert error(x, reference) <= allowed


# ---- Indices and sums ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_indices(dtype):
    cu = CU.to(dtype)
    indices = prepare_chunk_indices(cu, 16)
    assert indices.dtype == dtype
    assert indices.tolist() == [[0, 0], [0, 1], [2, 0], [2, 1], [2, 2], [3, 0], [3, 1], [3, 2]]
    assert torch.equal(indices, prepare_chunk_indices(cu, 16, cu_seqlens_cpu=cu.clone()))
    assert prepare_chunk_offsets(cu, 16).tolist() == [0, 2, 2, 5, 8]
    assert prepare_lens(cu).tolist() == LENGTHS and get_max_num_splits(cu, 16) == 3
    assert prepare_token_indices(cu)[[0, 19, 20, 57]].tolist() == [[0, 0], [0, 19], [2, 0], [3, 0]]
    static, offsets = prepare_chunk_indices_static(cu, 16, 10)
    assert torch.equal(static[:8], indices) and static[8:, 0].tolist() == [-1, -1]
    assert offsets.tolist() == [0, 2, 2, 5, 8]
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]], dtype=torch.bool)
    assert prepare_cu_seqlens_from_mask(mask).tolist() == [0, 2, 5]


def cumsum_reference(g, chunk_size, reverse, cu):
    out = torch.zeros_like(g, dtype=torch.float64)
    for b in range(g.shape[0]):
        bounds = [0, g.shape[1]] if cu is None else cu.tolist()
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
            for first in range(begin, end, chunk_size):
                part = g[b, first : min(first + chunk_size, end)].double()
                sums = part.flip(0).cumsum(0).flip(0) if reverse else part.cumsum(0)
                out[b, first : first + len(part)] = sums
    return out


@pytest.mark.parametrize("chunk_size", [8, 16, 64, 128])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_chunk_local_cumsum(chunk_size, reverse, packed):
    g = torch.randn(1 if packed else 2, 90, 2, 5) * 100  # far past what a decay may be
    cu = CU if packed else None
    found = chunk_local_cumsum(g, chunk_size, reverse=reverse, scale=0.5, cu_seqlens=cu)
    close(found, 0.5 * cumsum_reference(g, chunk_size, reverse, cu), 1e-6)
    assert chunk_local_cumsum(g[..., 0].half(), 16, output_dtype=None).dtype == torch.float16


def test_cumsum_refuses():
    with pytest.raises(ValueError, match="B,T,H"):
        chunk_local_cumsum(torch.zeros(3, 4), 16)
    with pytest.raises(AssertionError, match="power of 2"):
        chunk_local_cumsum(torch.zeros(1, 4, 1), 24)
    with pytest.raises(AssertionError, match="batch size"):
        chunk_local_cumsum(torch.zeros(2, 4, 1), 16, cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(DeprecationWarning, match="head_first"):
        chunk_local_cumsum(torch.zeros(1, 4, 1), 16, head_first=False)
    with pytest.raises(TypeError, match="unknown"):
        chunk_local_cumsum(torch.zeros(1, 4, 1), 16, unknown=1)
    with pytest.raises(AssertionError, match="columns"):
        solve_tril(torch.zeros(1, 4, 1, 24))


# ---- Gates --------------------------------------------------------------------------------------

GATES = {
    "gdn": (
        (2, 9, 3),
        (3,),
        None,
        gdn_gate.naive_gdn_gate,
        gdn_gate.fused_gdn_gate,
        gdn_gate.gdn_gate_fwd,
        gdn_gate.gdn_gate_bwd,
        gdn_gate.gdn_gate_chunk_cumsum,
    ),
    "kda": (
        (2, 9, 3, 12),
        (36,),
        None,
        kda_gate.naive_kda_gate,
        kda_gate.fused_kda_gate,
        kda_gate.kda_gate_fwd,
        kda_gate.kda_gate_bwd,
        kda_gate.kda_gate_chunk_cumsum,
    ),
    "bounded": (
        (2, 9, 3, 12),
        (36,),
        -4.0,
        kda_gate.naive_kda_lowerbound_gate,
        kda_gate.fused_kda_gate,
        kda_gate.kda_gate_fwd,
        kda_gate.kda_gate_bwd,
        kda_gate.kda_gate_chunk_cumsum,
    ),
}


@pytest.mark.parametrize("kind", GATES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("factor", [True, False])
def test_gates(kind, dtype, bias, factor):
    shape, bias_shape, bound, plain, fused, fwd, bwd, cumsum = GATES[kind]
    if not factor and bound is None:
        if kind == "kda":
            with pytest.raises(ValueError, match="A_log"):
                fused(torch.zeros(shape))
        return
    g = (torch.randn(shape) * 8).to(dtype)
    A_log = torch.rand(1, 1, 3, 1) * 4 if factor else None
    dt_bias = torch.randn(bias_shape) if bias else None
    options = {} if bound is None else {"lower_bound": bound}

    leaves = [None if x is None else x.double().requires_grad_() for x in (g, A_log, dt_bias)]
    reference = plain(*leaves, **options, output_dtype=torch.float64)
    dy = torch.randn(shape)
    there = [x for x in leaves if x is not None]
    wanted = torch.autograd.grad(reference, there, dy.double())

    ours = [None if x is None else x.clone().requires_grad_() for x in (g, A_log, dt_bias)]
    out = fused(*ours, **options)
    assert out.dtype == torch.float32
    close(out, reference)
    torch.testing.assert_close(fwd(g, A_log, dt_bias, **options), out.detach(), rtol=0, atol=0)
    assert fwd(g, A_log, dt_bias, output_dtype=torch.bfloat16, **options).dtype == torch.bfloat16
    # Any leading shape.
    flat = fwd(g.flatten(0, 1), A_log, dt_bias, **options)
    assert torch.equal(flat.view(shape), out.detach())

    out.backward(dy)
    by_hand = bwd(g, A_log, dt_bias, dy, **options)
    allowed = FP32 if dtype == torch.float32 else 1e-2
    for x, y, reference_grad in zip(
        [x.grad for x in ours if x is not None],
        [x for x in by_hand if x is not None],
        wanted,
        strict=True,
    ):
        close(x, reference_grad, allowed)
        close(y, reference_grad, allowed)
    assert [x is None for x in by_hand] == [x is None for x in ours]

    sums = cumsum(g, A_log, 16, scale=RCP_LN2, dt_bias=dt_bias, **options)
    close(sums, cumsum_reference(reference, 16, False, None) / math.log(2))
    packed = g.flatten(0, 1)[None]
    cu = torch.tensor([0, 9, 18])
    found = cumsum(packed, A_log, 16, scale=RCP_LN2, dt_bias=dt_bias, cu_seqlens=cu, **options)
    assert torch.equal(found.view(sums.shape), sums)


def test_gate_cumsum_refuses():
    g = torch.zeros(2, 4, 1, 8)
    with pytest.raises(AssertionError, match="batch size"):
        kda_gate.kda_gate_chunk_cumsum(g, torch.zeros(1), 16, cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(AssertionError, match="B, T, HV, K"):
        kda_gate.kda_gate_chunk_cumsum(g[0], torch.zeros(1), 16)
    with pytest.raises(AssertionError, match="power of 2"):
        kda_gate.kda_gate_chunk_cumsum(g, torch.zeros(1), 24)


def test_beta_sigmoid():
    x = torch.randn(3, 4, dtype=torch.bfloat16, requires_grad=True)
    y = fused_beta_sigmoid(x, 2.0)
    assert y.dtype == torch.float32 and torch.equal(fused_beta_sigmoid_fwd(x, 2.0), y)
    dy = torch.randn(3, 4)
    y.backward(dy)
    assert torch.equal(fused_beta_sigmoid_bwd(x, dy, 2.0), x.grad)


# ---- Inside of chunks ---------------------------------------------------------------------------


def chunk_reference(x, G, chunk, cu):
    """kk^T, scores, inverse, w, u, qg, kg of fp64 tensors and the natural cumulative gate."""
    q, k, v, beta = (x[n] for n in ("q", "k", "v", "beta"))
    group = v.shape[2] // q.shape[2]
    q, k = q.repeat_interleave(group, 2), k.repeat_interleave(group, 2)
    if G is None:
        G = torch.zeros_like(k[..., :1])
    elif G.dim() == 3:
        G = G.unsqueeze(-1)
    B, T, HV, _ = v.shape
    names = ("L", "Aqk", "A", "w", "u", "qg", "kg")
    parts = {name: [[] for _ in range(B)] for name in names}
    for b in range(B):
        bounds = [0, T] if cu is None else cu.tolist()
        for begin, end in zip(bounds[:-1], bounds[1:], strict=True):
            for first in range(begin, end, chunk):
                rows = slice(first, min(first + chunk, end))
                q_, k_, v_, b_, G_ = (y[b, rows].transpose(0, 1) for y in (q, k, v, beta, G))
                n = q_.shape[1]
                past = torch.ones(n, n).tril().bool()
                decay = (G_[:, :, None] - G_[:, None]).masked_fill(~past[None, ..., None], -1e9)
                pairs = k_[:, None] * decay.exp()
                L = (b_[..., None] * (k_[:, :, None] * pairs).sum(-1)).tril(-1)
                Aqk = (q_[:, :, None] * pairs).sum(-1) * q.shape[-1] ** -0.5
                A = torch.linalg.inv(torch.eye(n, dtype=q.dtype) + L)
                found = {
                    "L": torch.nn.functional.pad(L, (0, chunk - n)),
                    "Aqk": torch.nn.functional.pad(Aqk, (0, chunk - n)),
                    "A": torch.nn.functional.pad(A, (0, chunk - n)),
                    "w": A @ (b_[..., None] * k_ * G_.exp()),
                    "u": A @ (b_[..., None] * v_),
                    "qg": q_ * G_.exp(),
                    "kg": k_ * (G_[:, -1:] - G_).exp(),
                }
                for name, y in found.items():
                    parts[name][b].append(y.transpose(0, 1))
    return {name: torch.stack([torch.cat(rows) for rows in y]) for name, y in parts.items()}


def chunk_case(gate, packed, chunk, H=1):
    lengths = LENGTHS if packed else None
    x = make(T=90, gate=gate, lengths=lengths, H=H, state=False).tensors
    cu = x.get("cu_seqlens")
    base2 = None
    if gate != "none":
        base2 = chunk_local_cumsum(x["g"], chunk, scale=RCP_LN2, cu_seqlens=cu)
    wide = {n: x[n].double().requires_grad_() for n in ("q", "k", "v", "beta")}
    G = None if base2 is None else (base2.double() * math.log(2)).requires_grad_()
    return x, cu, base2, wide, G, chunk_reference(wide, G, chunk, cu)


@pytest.mark.parametrize("gate", ["none", "head", "channel"])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("chunk", [16, 64])
def test_inside_of_chunks(gate, packed, chunk):
    x, cu, base2, wide, G, reference = chunk_case(gate, packed, chunk)
    q, k, v, beta = (x[n] for n in ("q", "k", "v", "beta"))
    lower = chunk_scaled_dot_kkt_fwd(k, base2, beta, cu_seqlens=cu, chunk_size=chunk)
    close(lower, reference["L"])
    half = chunk_scaled_dot_kkt_fwd(k, base2, beta, cu, chunk, torch.bfloat16)
    assert half.dtype == torch.bfloat16
    A = solve_tril(lower, cu_seqlens=cu)
    close(A, reference["A"])
    assert solve_tril(lower.half(), cu, output_dtype=None).dtype == torch.float16

    # Gradients of w and u, through A as well.
    dw, du = torch.randn_like(reference["w"]).float(), torch.randn_like(reference["u"]).float()
    leaves = [wide["k"], wide["v"], wide["beta"]] + ([] if G is None else [G])
    outputs, grads = [reference["w"], reference["u"]], [dw.double(), du.double()]
    wanted = torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
    if gate == "none":
        w, u, a = delta_wy.prepare_wy_repr_fwd(k, v, beta, cu, chunk_size=chunk)
        again = delta_wy.recompute_w_u_fwd(k, v, beta, a, cu)
        found = delta_wy.prepare_wy_repr_bwd(k, v, beta, A, dw, du, cu)
    elif gate == "head":
        w, u, a = chunk_gated_delta_rule_fwd_intra(k, v, base2, beta, cu, chunk)
        again = gdn_wy.recompute_w_u_fwd(k, v, beta, a, base2, cu)
        found = gdn_wy.prepare_wy_repr_bwd(k, v, beta, A, dw, du, base2, cu)
    else:
        w, u, qg, kg, Aqk, a = chunk_kda_fwd_intra(
            q, k, v, base2, beta, cu_seqlens=cu, chunk_size=chunk, disable_recompute=True
        )
        for name, y in (("qg", qg), ("kg", kg), ("Aqk", Aqk)):
            close(y, reference[name])
        assert chunk_kda_fwd_intra(q, k, v, base2, beta, cu_seqlens=cu)[2] is None
        *again, _, kg = kda_wy.recompute_w_u_fwd(k, v, beta, a, base2, cu_seqlens=cu)
        close(kg, reference["kg"])
        found = None
    close(a, reference["A"])
    for x_, name in zip((w, u, *again), ("w", "u", "w", "u"), strict=True):
        close(x_, reference[name])
    if found is not None:
        assert len(found) == len(wanted)
        for y, grad in zip(found, wanted, strict=True):
            close(y, grad, 2e-4)


@pytest.mark.parametrize("packed", [False, True])
def test_kda_pair_gradients(packed):
    x, cu, base2, wide, G, reference = chunk_case("channel", packed, 32, H=2)
    k, v, beta = (x[n] for n in ("k", "v", "beta"))
    dw, du = torch.randn_like(reference["w"]).float(), torch.randn_like(reference["u"]).float()
    dk, dg = torch.randn_like(base2), torch.randn_like(base2)
    A = reference["A"].detach().float()
    found = kda_wy.prepare_wy_repr_bwd(k, v, beta, base2, A, dk, dw, du, dg, cu_seqlens=cu)
    # What A passes on, taken through kk^T, completes the gradients.
    leaves = [wide[n] for n in ("k", "v", "beta")] + [G]
    outputs, grads = [reference["w"], reference["u"]], [dw.double(), du.double()]
    wanted = torch.autograd.grad(outputs, leaves, grads, retain_graph=True)
    rest = torch.autograd.grad(
        reference["L"], leaves, found[4].double(), allow_unused=True, retain_graph=True
    )
    ours = [found[0] - dk, found[1], found[2], found[3] - dg]
    for y, more, grad in zip(ours, rest, wanted, strict=True):
        close(y if more is None else y + more, grad, 2e-4)


def test_chunk_size_is_checked():
    x = make(T=20, gate="head", state=False).tensors
    with pytest.raises(ValueError, match="chunk_size"):
        chunk_gated_delta_rule_fwd_intra(x["k"], x["v"], x["g"], x["beta"], chunk_size=24)


# ---- References ---------------------------------------------------------------------------------


@pytest.mark.parametrize("gate", ["none", "head", "channel"])
def test_references_agree_with_each_other(gate):
    x = {n: y.double() for n, y in make(T=50, gate=gate).tensors.items()}
    arguments = (x["q"], x["k"], x["v"], x["beta"], x.get("g"), None, x["initial_state"])
    o, state = naive.recurrent(*arguments)
    for chunk_size in (16, 64):
        for found, reference in zip(naive.chunked(*arguments, chunk_size), (o, state), strict=True):
            close(found, reference, 1e-12)


def test_delta_references():
    x = make(T=50, gate="none", H=2, state=False).tensors
    q, k, v, beta = (x[n].transpose(1, 2) for n in ("q", "k", "v", "beta"))
    o, state = delta_naive.delta_rule_recurrence(q, k, v, beta)
    assert delta_naive.delta_rule_recurrence(q, k, v, beta, output_final_state=False)[1] is None
    for found, reference in zip(
        delta_naive.delta_rule_chunkwise(q, k, v, beta), (o, state), strict=True
    ):
        close(found, reference)
    parallel, A = delta_naive.delta_rule_parallel(q, k, v, beta)
    close(parallel, o)
    close(A @ (beta[..., None] * v), o)
