"""deltic.fla: states from chunk to chunk, outputs, their gradients, sums and packing.

The references are loops over sequences and chunks in fp64, and torch's gradients of them.
"""

import math
from functools import partial

import deltic
import pytest
import torch
from deltic.fla.ops.common.chunk_delta_h import (
    chunk_gated_delta_rule_bwd_dhu,
    chunk_gated_delta_rule_fwd_h,
)
from deltic.fla.ops.common.chunk_o import (
    chunk_bwd_dqkwg,
    chunk_bwd_dv,
    chunk_bwd_dv_local,
    chunk_fwd_o,
)
from deltic.fla.ops.delta_rule.naive import delta_rule_chunkwise
from deltic.fla.ops.gated_delta_rule.chunk_fwd import chunk_gated_delta_rule_fwd_intra
from deltic.fla.ops.gated_delta_rule.naive import naive_chunk_gated_delta_rule
from deltic.fla.ops.kda import chunk_kda
from deltic.fla.ops.kda.chunk_intra import chunk_kda_fwd_intra
from deltic.fla.ops.kda.naive import naive_chunk_kda
from deltic.fla.ops.utils import (
    chunk_global_cumsum,
    chunk_global_cumsum_scalar,
    chunk_global_cumsum_vector,
    chunk_local_cumsum,
    get_max_num_splits,
    pack_sequence,
    prepare_chunk_indices,
    prepare_chunk_indices_static,
    prepare_chunk_offsets,
    unpack_sequence,
)
from deltic.fla.ops.utils.constant import RCP_LN2
from deltic.fla.ops.utils.index import prepare_split_cu_seqlens
from support import error, make
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

LENGTHS = [20, 0, 37, 33]
CU = torch.tensor([0, 20, 20, 57, 90])
packed_or_not = pytest.mark.parametrize("packed", [False, True])


class _NoCopies(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        inputs = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if any(x.device.type == "cuda" for x in inputs):
            for x in tree_leaves(out):
                assert not isinstance(x, torch.Tensor) or x.device.type == "cuda", f"{func}: a copy"
        return out


def run_without_host_reads(function, *tensors):
    """Calls a function with fake CUDA tensors, whose values nobody can read.

    torch raises where a value, or a size that follows from values, is asked for; a copy to the host
    fails here. Returns the shapes of what comes back.
    """
    with FakeTensorMode() as mode:
        fakes = [torch.empty(x.shape, dtype=x.dtype, device="cuda") for x in tensors]
        assert all(x.fake_mode is mode for x in fakes)
        with _NoCopies(), torch.no_grad():
            found = function(*fakes)
    return [tuple(x.shape) for x in tree_leaves(found) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: x.tolist(),
        lambda x: x.repeat_interleave(x),
        lambda x: bool((x > 0).all()),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
    ],
    ids=["item", "tolist", "repeat", "bool", "cpu", "nonzero"],
)
def test_host_reads_are_seen(read):
    assert run_without_host_reads(lambda x: x + 1, torch.tensor([1, 2])) == [(2,)]
    with pytest.raises((AssertionError, RuntimeError)):
        run_without_host_reads(read, torch.tensor([1, 2]))


def bounds(packed, B, T, chunk):
    """Batch row, sequence, number and rows of every chunk, in order."""
    offsets = CU.tolist() if packed else [0, T]
    found = []
    for b in range(B):
        for n, (begin, end) in enumerate(zip(offsets[:-1], offsets[1:], strict=True)):
            for i, first in enumerate(range(begin, end, chunk)):
                found.append((b, n if packed else b, i, slice(first, min(first + chunk, end))))
    return found


def rows_of(x, b, rows):
    """``[H, rows, D]``."""
    return x[b, rows].transpose(0, 1)


def reference(x, packed, chunk, scale):
    """h, v_new, final states and o, from q, k, w, u, initial states and natural cumulative gates.

    ``G`` per head goes with plain q and k, ``Gk`` per channel with rows that carry their gate.
    """
    q, k, w, u = (x[n] for n in ("q", "k", "w", "u"))
    B, T, HV, V = u.shape
    q, k = (y.repeat_interleave(HV // y.shape[2], 2) for y in (q, k))
    G = x["G"][..., None] if "G" in x else torch.zeros_like(u[..., :1])
    sequences = len(LENGTHS) if packed else B
    states = [x["state"][n] for n in range(sequences)]
    hs, fresh, outs = [], torch.zeros_like(u), torch.zeros_like(u)
    for b, n, _, rows in bounds(packed, B, T, chunk):
        q_, k_, w_, u_, G_ = (rows_of(y, b, rows) for y in (q, k, w, u, G))
        size = q_.shape[1]
        hs.append(states[n])
        new = u_ - w_ @ states[n]
        past = torch.ones(size, size).tril().bool()
        decay = (G_ - G_.transpose(1, 2)).masked_fill(~past, -math.inf).exp()
        o = scale * (G_.exp() * q_ @ states[n] + (q_ @ k_.transpose(1, 2) * decay) @ new)
        fresh = fresh.clone()
        outs = outs.clone()
        fresh[b, rows], outs[b, rows] = new.transpose(0, 1), o.transpose(0, 1)
        end = G_[:, -1:].exp()
        if "Gk" in x:
            end = end * rows_of(x["Gk"], b, rows)[:, -1, :, None].exp()
        states[n] = end * states[n] + (k_ * (G_[:, -1:] - G_).exp()).transpose(1, 2) @ new
    return torch.stack(hs), fresh, torch.stack(states), outs


def draw(gate, packed, *, chunk=32, H=1, HV=2, K=24, V=40, dtype=torch.float32, depth=1.0):
    """Rounded inputs, and the same in fp64 with natural gates."""
    generator = torch.Generator().manual_seed(3)

    def randn(*shape):
        return torch.randn(shape, generator=generator)

    B, T = (1, 90) if packed else (2, 90)
    sequences = len(LENGTHS) if packed else B
    key_heads = HV if gate == "channel" else H
    ours = {
        "q": randn(B, T, key_heads, K).to(dtype),
        "k": (0.3 * randn(B, T, key_heads, K)).to(dtype),
        "w": (0.3 * randn(B, T, HV, K)).to(dtype),
        "u": randn(B, T, HV, V).to(dtype),
        "do": randn(B, T, HV, V).to(dtype),
        "state": randn(sequences, HV, K, V),
        "dht": randn(sequences, HV, K, V),
    }
    wide = {n: y.double() for n, y in ours.items()}
    cu = CU if packed else None
    if gate != "none":
        shape = (B, T, HV) if gate == "head" else (B, T, HV, K)
        raw = -depth * torch.rand(shape, generator=generator)
        base2 = chunk_local_cumsum(raw, chunk, scale=RCP_LN2, cu_seqlens=cu)
        ours["g" if gate == "head" else "gk"] = base2
        wide["G" if gate == "head" else "Gk"] = base2.double() * math.log(2)
    return ours, wide, cu


def gates_of(ours):
    return {n: ours[n] for n in ("g", "gk") if n in ours}


def by_batch(h, like):
    return h.view(like.shape)


@pytest.mark.parametrize("gate", ["none", "head", "channel"])
@packed_or_not
@pytest.mark.parametrize("chunk", [16, 32, 64])
@pytest.mark.parametrize("v_first", [False, True])
def test_states_and_outputs(gate, packed, chunk, v_first):
    ours, wide, cu = draw(gate, packed, chunk=chunk)
    h_, fresh_, final_, o_ = reference(wide, packed, chunk, 0.3)
    state = ours["state"].mT.contiguous() if v_first else ours["state"]
    said = dict(chunk_size=chunk, state_v_first=v_first, cu_seqlens=cu)
    h, v_new, final = chunk_gated_delta_rule_fwd_h(
        ours["k"],
        ours["w"],
        ours["u"],
        **gates_of(ours),
        initial_state=state,
        output_final_state=True,
        **said,
    )
    assert h.is_contiguous() and final.dtype == torch.float32
    assert error((h.mT if v_first else h).flatten(0, 1), h_) <= 1e-5
    assert error(v_new, fresh_) <= 1e-5
    assert error(final.mT if v_first else final, final_) <= 1e-5
    if gate != "channel":
        o = chunk_fwd_o(ours["q"], ours["k"], v_new, h, ours.get("g"), scale=0.3, **said)
        assert o.dtype == torch.float32 and error(o, o_) <= 1e-5
    again = chunk_gated_delta_rule_fwd_h(
        ours["k"], ours["w"], ours["u"], **gates_of(ours), save_new_value=False, **said
    )
    assert again[1] is None and again[2] is None
    assert not again[0][:, 0].any()  # no initial state: the first chunk starts from 0


@pytest.mark.parametrize("gate", ["none", "head", "channel"])
@packed_or_not
@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("depth", [1.0, 100.0])
def test_gradients(gate, packed, v_first, depth):
    """The chain of the backward functions against torch's gradients of the reference."""
    chunk, scale = 32, 0.3
    ours, wide, cu = draw(gate, packed, chunk=chunk, depth=depth)
    leaves = {n: wide[n].requires_grad_() for n in ("q", "k", "w", "u", "state", "G") if n in wide}
    h_, fresh_, final_, o_ = reference(wide, packed, chunk, scale)
    if gate == "channel":  # outputs of rows that carry their gate: the part from the states
        o_ = torch.zeros_like(o_)
        for i, (b, _, _, rows) in enumerate(bounds(packed, *o_.shape[:2], chunk)):
            o_[b, rows] = scale * (rows_of(wide["q"], b, rows) @ h_[i]).transpose(0, 1)
    wanted = dict(
        zip(
            leaves,
            torch.autograd.grad(
                (o_, final_), list(leaves.values()), (wide["do"], wide["dht"]), retain_graph=True
            ),
            strict=True,
        )
    )

    def flip(x):
        return x.mT.contiguous() if v_first else x

    said = dict(chunk_size=chunk, cu_seqlens=cu)
    h, v_new, _ = chunk_gated_delta_rule_fwd_h(
        ours["k"],
        ours["w"],
        ours["u"],
        **gates_of(ours),
        initial_state=flip(ours["state"]),
        state_v_first=v_first,
        **said,
    )
    local = torch.zeros_like(ours["do"])
    if gate != "channel":
        local = chunk_bwd_dv_local(
            ours["q"], ours["k"], ours["do"], ours.get("g"), scale=scale, **said
        )
    dh, dh0, dv = chunk_gated_delta_rule_bwd_dhu(
        ours["q"],
        ours["k"],
        ours["w"],
        ours["do"],
        local,
        **gates_of(ours),
        h0=flip(ours["state"]),
        dht=flip(ours["dht"]),
        scale=scale,
        state_v_first=v_first,
        **said,
    )
    assert dh0.dtype == torch.float32 and error(flip(dh0), wanted["state"]) <= 1e-5
    assert error(dv, wanted["u"]) <= 1e-5
    if gate == "channel":
        return
    both = chunk_bwd_dv(
        ours["q"], ours["k"], ours["do"], dh, ours.get("g"), None, scale, v_first, **said
    )
    assert error(both, dv) <= 1e-5
    dq, dk, dw, dG = chunk_bwd_dqkwg(
        ours["q"],
        ours["k"],
        v_new,
        ours["do"],
        h,
        dh,
        ours["w"],
        ours.get("g"),
        dv=dv,
        scale=scale,
        state_v_first=v_first,
        **said,
    )
    for name, x in (("q", dq), ("k", dk), ("w", dw)):
        assert x.shape == ours[name].shape and error(x, wanted[name]) <= 1e-5, name
    assert (dG is None) == (gate == "none")
    if dG is not None:
        assert dG.dtype == torch.float32 and error(dG, wanted["G"]) <= 2e-5
    without = chunk_bwd_dqkwg(ours["q"], ours["k"], v_new, ours["do"], flip(h), flip(dh), **said)
    assert without[2] is None and without[3] is None


def test_deep_gates_are_finite():
    """-1000 per token: what a token may not see is selected away, never multiplied with 0."""
    for packed in (False, True):
        ours, wide, cu = draw("head", packed, depth=2000.0)
        h, v_new, final = chunk_gated_delta_rule_fwd_h(
            ours["k"], ours["w"], ours["u"], ours["g"], chunk_size=32, cu_seqlens=cu
        )
        said = dict(chunk_size=32, cu_seqlens=cu)
        rows = (ours["q"], ours["k"])
        o = chunk_fwd_o(*rows, v_new, h, ours["g"], **said)
        local = chunk_bwd_dv_local(*rows, ours["do"], ours["g"], **said)
        dh, _, dv = chunk_gated_delta_rule_bwd_dhu(
            *rows, ours["w"], ours["do"], local, ours["g"], **said
        )
        gradients = chunk_bwd_dqkwg(
            *rows, v_new, ours["do"], h, dh, ours["w"], ours["g"], dv=dv, **said
        )
        wide["state"] = torch.zeros_like(wide["state"])
        expected = reference(wide, packed, 32, 24**-0.5)
        assert error(o, expected[3]) <= 1e-5
        for x in (h, v_new, o, local, dh, dv, *gradients):
            assert x.isfinite().all()


@packed_or_not
def test_steady_gate(packed):
    """``g_gamma``: one gate for every token, as the cumulative gate it stands for."""
    ours, _, cu = draw("none", packed)
    gamma = torch.tensor([-0.2, -3.0])
    g = chunk_local_cumsum(gamma.expand(*ours["u"].shape[:3]), 32, cu_seqlens=cu)
    said = dict(chunk_size=32, cu_seqlens=cu)
    h, v_new, _ = chunk_gated_delta_rule_fwd_h(ours["k"], ours["w"], ours["u"], g, **said)
    rows = (ours["q"], ours["k"])
    assert (
        error(
            chunk_fwd_o(*rows, v_new, h, g_gamma=gamma, **said),
            chunk_fwd_o(*rows, v_new, h, g, **said),
        )
        <= 1e-6
    )
    pairs = zip(
        chunk_bwd_dqkwg(*rows, v_new, ours["do"], h, h, g_gamma=gamma, **said)[:2],
        chunk_bwd_dqkwg(*rows, v_new, ours["do"], h, h, g=g, **said)[:2],
        strict=True,
    )
    for x, y in pairs:
        assert error(x, y) <= 1e-6
    assert (
        error(
            chunk_bwd_dv(*rows, ours["do"], h, g_gamma=gamma, **said),
            chunk_bwd_dv(*rows, ours["do"], h, g, **said),
        )
        <= 1e-6
    )


@packed_or_not
def test_given_scores(packed):
    """The local gradient of v from scores that the caller has, as KDA does it."""
    x = make(T=90, gate="channel", lengths=LENGTHS if packed else None, state=False).tensors
    cu = x.get("cu_seqlens")
    G = chunk_local_cumsum(x["g"], 16, scale=RCP_LN2, cu_seqlens=cu)
    rows = [x[n] for n in ("q", "k", "v")]
    A = chunk_kda_fwd_intra(*rows, G, x["beta"], cu_seqlens=cu, chunk_size=16)[4]
    do = torch.randn_like(x["v"])
    found = chunk_bwd_dv_local(rows[0], rows[1], do, A=A, cu_seqlens=cu, chunk_size=16)
    expected = torch.zeros_like(do, dtype=torch.float64)
    for b, _, _, part in bounds(packed, *do.shape[:2], 16):
        scores = rows_of(A, b, part)[..., : part.stop - part.start].double()
        found_here = scores.transpose(1, 2) @ rows_of(do, b, part).double()
        expected[b, part] = found_here.transpose(0, 1)
    assert error(found, expected) <= 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_dtypes(dtype):
    ours, wide, _ = draw("head", False, dtype=dtype)
    h, v_new, final = chunk_gated_delta_rule_fwd_h(
        ours["k"],
        ours["w"],
        ours["u"],
        ours["g"],
        initial_state=ours["state"],
        output_final_state=True,
        chunk_size=32,
    )
    assert (h.dtype, v_new.dtype, final.dtype) == (dtype, dtype, torch.float32)
    h_, fresh_, final_, _ = reference(wide, False, 32, 1.0)
    # Sums are fp32: what is left is the rounding of the results.
    assert error(final, final_) <= 1e-5 and error(h.flatten(0, 1), h_) <= 3e-3
    assert error(v_new, fresh_) <= 3e-3
    o = chunk_fwd_o(ours["q"], ours["k"], v_new, h, ours["g"], chunk_size=32)
    rows = (ours["q"], ours["k"])
    local = chunk_bwd_dv_local(*rows, ours["do"], ours["g"], chunk_size=32)
    dq, dk, dw, dG = chunk_bwd_dqkwg(
        *rows, v_new, ours["do"], h, h, ours["w"], ours["g"], dv=local, chunk_size=32
    )
    assert {x.dtype for x in (o, local, dq, dk, dw)} == {dtype} and dG.dtype == torch.float32


def test_the_stages_make_the_operator():
    """Gate sums, WY pair, states and outputs in a row are the whole operator."""
    for lengths in (None, LENGTHS):
        x = make(T=90, gate="head", lengths=lengths).tensors
        cu = x.get("cu_seqlens")
        G = chunk_local_cumsum(x["g"], 64, scale=RCP_LN2, cu_seqlens=cu)
        w, u, _ = chunk_gated_delta_rule_fwd_intra(x["k"], x["v"], G, x["beta"], cu)
        h, v_new, final = chunk_gated_delta_rule_fwd_h(
            x["k"], w, u, G, None, x["initial_state"], True, cu_seqlens=cu
        )
        o = chunk_fwd_o(x["q"], x["k"], v_new, h, G, cu_seqlens=cu)
        expected = deltic.delta_rule(**x, output_final_state=True)
        assert error(o, expected[0]) <= 1e-5 and error(final, expected[1]) <= 1e-5


def test_differentiable():
    ours, _, cu = draw("head", True, dtype=torch.float64, K=3, V=2)
    leaves = [ours[n].double().requires_grad_() for n in ("q", "k", "w", "u", "g", "state")]

    def call(q, k, w, u, g, state):
        h, v_new, final = chunk_gated_delta_rule_fwd_h(
            k, w, u, g, None, state, True, chunk_size=32, cu_seqlens=cu
        )
        return chunk_fwd_o(q, k, v_new, h, g, chunk_size=32, cu_seqlens=cu), final

    assert torch.autograd.gradcheck(call, leaves, fast_mode=True)


@packed_or_not
def test_nothing_to_do(packed):
    k, u = torch.zeros(1 if packed else 2, 0, 1, 8), torch.zeros(1 if packed else 2, 0, 2, 4)
    cu = torch.tensor([0, 0, 0]) if packed else None
    w, state = torch.zeros(*u.shape[:3], 8), torch.randn(2, 2, 8, 4)
    h, v_new, final = chunk_gated_delta_rule_fwd_h(
        k, w, u, initial_state=state, output_final_state=True, cu_seqlens=cu
    )
    assert h.shape == (k.shape[0], 0, 2, 8, 4) and v_new.shape == u.shape
    assert torch.equal(final, state)
    assert chunk_fwd_o(k, k, u, h, cu_seqlens=cu).shape == u.shape
    dh, dh0, dv = chunk_gated_delta_rule_bwd_dhu(k, k, w, u, u, h0=state, dht=state, cu_seqlens=cu)
    assert dh.shape == h.shape and torch.equal(dh0, state) and dv.shape == u.shape


def test_rows_of_no_sequence_are_zero():
    ours, _, _ = draw("head", True)
    cu = torch.tensor([0, 40, 57])
    said = dict(chunk_size=32, cu_seqlens=cu)
    h, v_new, _ = chunk_gated_delta_rule_fwd_h(ours["k"], ours["w"], ours["u"], ours["g"], **said)
    o = chunk_fwd_o(ours["q"], ours["k"], v_new, h, ours["g"], **said)
    assert not v_new[:, 57:].any() and not o[:, 57:].any() and o[:, :57].any()


def test_lists_of_fixed_size():
    """With indices for as many chunks as there can be nothing is read on the host."""
    ours, _, _ = draw("head", True)
    count = -(-90 // 32) + len(LENGTHS) - 1

    def call(lists, offsets, q, k, w, u, g, do, state):
        said = dict(chunk_size=32, cu_seqlens=offsets)
        if lists:
            indices, starts = prepare_chunk_indices_static(offsets, 32, count)
            said |= {"chunk_indices": indices, "chunk_offsets": starts}
        forward = chunk_gated_delta_rule_fwd_h(k, w, u, g, None, state, True, **said)
        backward = chunk_gated_delta_rule_bwd_dhu(q, k, w, do, do, g, h0=state, **said)
        said.pop("chunk_offsets", None)
        o = chunk_fwd_o(q, k, forward[1], forward[0], g, **said)
        rest = chunk_bwd_dqkwg(q, k, forward[1], do, forward[0], backward[0], g=g, **said)
        sums = chunk_local_cumsum(g, 32, cu_seqlens=offsets, use_graph=True)
        return *forward, *backward, o, *rest, sums, chunk_global_cumsum(g, cu_seqlens=offsets)

    tensors = [ours[n] for n in ("q", "k", "w", "u", "g", "do", "state")]
    shapes = run_without_host_reads(partial(call, True), CU, *tensors)
    for offsets in (CU, torch.tensor([0, 5, 5, 90, 90]), torch.tensor([0, 0, 0, 0, 33])):
        found = [x for x in call(True, offsets, *tensors) if x is not None]
        expected = [x for x in call(False, offsets, *tensors) if x is not None]
        assert [tuple(x.shape) for x in found] == shapes
        used = len(prepare_chunk_indices(offsets, 32))
        for x, y in zip(found, expected, strict=True):
            if x.dim() == 5:  # states per chunk
                assert x.shape[1] == count and not x[:, used:].any()
                x = x[:, :used]
            assert torch.equal(x, y)


def test_refuses():
    ours, _, _ = draw("none", False)
    rows = (ours["k"], ours["w"], ours["u"])
    with pytest.raises(ValueError, match="batch size"):
        chunk_gated_delta_rule_fwd_h(*rows, cu_seqlens=CU)
    wide = torch.zeros(1, 4, 1, 300)
    with pytest.raises(AssertionError, match="256"):
        chunk_gated_delta_rule_fwd_h(wide, wide, wide)
    with pytest.raises(AssertionError, match="256"):
        chunk_gated_delta_rule_bwd_dhu(wide, wide, wide, wide, wide)
    h = torch.zeros(2, 2, 2, 24, 40)
    with pytest.raises(ValueError, match="`dv`"):
        chunk_bwd_dqkwg(ours["q"], ours["k"], ours["u"], ours["do"], h, h, ours["w"])


# ---- Intermediate states in a graph -------------------------------------------------------------


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_intermediate_states_in_buffers_of_fixed_size(v_first, dtype):
    x = make(gate="channel", lengths=LENGTHS, K=16, V=24, dtype=dtype).tensors
    if v_first:
        x["initial_state"] = x["initial_state"].mT.contiguous()

    def call(use_graph, offsets, q, k, v, g, beta, state):
        return chunk_kda(
            q,
            k,
            v,
            g,
            beta,
            initial_state=state,
            output_final_state=True,
            return_intermediate_states=True,
            state_v_first=v_first,
            chunk_size=32,
            cu_seqlens=offsets,
            use_graph=use_graph,
            max_num_seqs=4,
        )

    rows = [x[n] for n in ("q", "k", "v", "g", "beta", "initial_state")]
    shapes = run_without_host_reads(partial(call, True), CU, *rows)
    for offsets in (CU, torch.tensor([0, 5, 5, 90, 90]), torch.tensor([0, 0, 0, 0, 33])):
        with torch.no_grad():
            found, expected = call(True, offsets, *rows), call(False, offsets, *rows)
        assert [tuple(y.shape) for y in found] == shapes
        assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
        h, used = found[2], expected[2].shape[1]
        assert h.dtype == dtype and h.shape[:2] == (1, 3 + 4 - 1)
        assert torch.equal(h[:, :used], expected[2]) and not h[:, used:].any()


def test_lengths_on_the_host_are_not_those_of_a_replay():
    """A host copy of another call's lengths changes nothing with ``use_graph``."""
    x = make(gate="channel", lengths=LENGTHS, K=16, V=24, state=False).tensors
    rows = [x[n] for n in ("q", "k", "v", "g", "beta")]
    with torch.no_grad():
        expected, _ = chunk_kda(*rows, cu_seqlens=CU)
        stale = torch.tensor([0, 90, 90, 90, 90])
        found, _ = chunk_kda(*rows, cu_seqlens=CU, cu_seqlens_cpu=stale, use_graph=True)
    assert torch.equal(found, expected)


# ---- Sums over sequences, pieces, packing -------------------------------------------------------


@packed_or_not
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("width", [(), (5,)])
def test_chunk_global_cumsum(packed, reverse, width):
    s = torch.randn(1 if packed else 3, 90, 2, *width)
    cu = CU if packed else None
    expected = torch.zeros_like(s, dtype=torch.float64)
    for begin, end in zip(CU[:-1], CU[1:], strict=True) if packed else ((0, 90),):
        part = s[:, begin:end].double()
        expected[:, begin:end] = part.flip(1).cumsum(1).flip(1) if reverse else part.cumsum(1)
    found = chunk_global_cumsum(s, reverse=reverse, cu_seqlens=cu, scale=0.5)
    assert found.dtype == torch.float32 and error(found, 0.5 * expected) <= 1e-6
    named = chunk_global_cumsum_vector if width else chunk_global_cumsum_scalar
    assert torch.equal(named(s, reverse, cu, 0.5), found)
    assert chunk_global_cumsum(s.half(), output_dtype=None).dtype == torch.float16
    leaf = s.double().requires_grad_()
    chunk_global_cumsum(leaf, reverse, cu, output_dtype=torch.float64).sum().backward()
    ones = torch.ones_like(leaf)
    mirrored = chunk_global_cumsum(ones, not reverse, cu, output_dtype=torch.float64)
    assert torch.equal(leaf.grad, mirrored)


def test_sums_stay_in_their_sequence():
    for value in (math.inf, math.nan):
        s = torch.ones(1, 90, 1)
        s[0, 25] = value
        for reverse in (False, True):
            for found in (
                chunk_global_cumsum(s, reverse, CU),
                chunk_local_cumsum(s, 16, reverse, cu_seqlens=CU),
            ):
                assert found[:, :20].isfinite().all() and found[:, 57:].isfinite().all()
                beside = found[:, 26:57] if reverse else found[:, 20:25]
                assert beside.isfinite().all()


def test_global_cumsum_refuses():
    with pytest.raises(ValueError, match="B,T,H"):
        chunk_global_cumsum(torch.zeros(3, 4))
    with pytest.raises(AssertionError, match="batch size"):
        chunk_global_cumsum(torch.zeros(2, 4, 1), cu_seqlens=torch.tensor([0, 4]))
    with pytest.raises(DeprecationWarning, match="head_first"):
        chunk_global_cumsum(torch.zeros(1, 4, 1), head_first=True)


def test_pieces():
    found = prepare_split_cu_seqlens(2, 10, 4)
    assert found.tolist() == [0, 4, 8, 10, 14, 18, 20] and found.dtype == torch.int32
    found = prepare_split_cu_seqlens(split_size=16, cu_seqlens=CU, dtype=torch.int64)
    assert found.tolist() == [0, 16, 20, 36, 52, 57, 73, 89, 90] and found.dtype == torch.int64
    with pytest.raises(TypeError, match="split_size"):
        prepare_split_cu_seqlens(2, 10)
    with pytest.raises(TypeError, match="batch_size"):
        prepare_split_cu_seqlens(split_size=4)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("width", [(), (3, 2)])
def test_packing(side, width):
    x = torch.randn(4, 37, *width, requires_grad=True)
    packed = pack_sequence(x, CU, side)
    parts = [
        x[n, 37 - length :] if side == "left" else x[n, :length] for n, length in enumerate(LENGTHS)
    ]
    assert torch.equal(packed, torch.cat(parts))
    if not width:  # a packed tensor has two dimensions at least
        return
    padded = unpack_sequence(packed, CU, side)
    mask = torch.zeros(4, 37, dtype=torch.bool)
    for n, length in enumerate(LENGTHS):
        mask[n, 37 - length if side == "left" else 0 : 37 if side == "left" else length] = True
    assert torch.equal(padded, torch.where(mask[..., None, None], x, 0))
    wider = unpack_sequence(packed, CU, side, desired_shape=torch.Size((4, 50, *width)))
    kept = wider[:, 13:] if side == "left" else wider[:, :37]
    assert torch.equal(kept, padded) and wider.shape[1] == 50
    padded.sum().backward()
    assert torch.equal(x.grad != 0, mask[..., None, None].expand_as(x))


def test_packing_refuses():
    x = torch.zeros(4, 30, 2)
    with pytest.raises(AssertionError, match="30 tokens"):
        pack_sequence(x, CU)
    with pytest.raises(AssertionError, match="left"):
        pack_sequence(x, CU, "middle")
    with pytest.raises(AssertionError, match="dimensions"):
        pack_sequence(x[0, 0], CU)
    with pytest.raises(AssertionError, match="desired_shape"):
        unpack_sequence(torch.zeros(90, 2), CU, desired_shape=torch.Size((3, 40, 2)))


def test_chunk_offsets_match_the_states():
    """Chunk n of sequence s lies where the offsets say."""
    ours, _, cu = draw("none", True)
    h, _, _ = chunk_gated_delta_rule_fwd_h(
        ours["k"], ours["w"], ours["u"], initial_state=ours["state"], chunk_size=32, cu_seqlens=cu
    )
    starts = prepare_chunk_offsets(cu, 32)
    for n, length in enumerate(LENGTHS):
        if length > 0:
            assert torch.equal(h[0, starts[n]], ours["state"][n])


X = torch.zeros(1, 5, 2, 16)
SIZED = {
    prepare_chunk_indices: (CU,),
    prepare_chunk_indices_static: (CU,),
    prepare_chunk_offsets: (CU,),
    get_max_num_splits: (CU,),
    chunk_local_cumsum: (X[..., 0],),
    chunk_gated_delta_rule_fwd_h: (X, X, X),
    chunk_gated_delta_rule_bwd_dhu: (X, X, X, X, X),
    chunk_bwd_dv_local: (X, X, X),
    delta_rule_chunkwise: (*[X.transpose(1, 2)] * 3, X[..., 0].transpose(1, 2)),
    naive_chunk_gated_delta_rule: (X, X, X, X[..., 0], X[..., 0]),
    naive_chunk_kda: (X, X, X, X, X[..., 0]),
}


@pytest.mark.parametrize("function", SIZED)
@pytest.mark.parametrize("size", [0, -1])
def test_chunks_have_a_token_at_least(function, size):
    others = {"nt_max": 4} if function is prepare_chunk_indices_static else {}
    text = f"^{function.__name__}: chunk_size: expected at least 1, got {size}$"
    with pytest.raises(ValueError, match=text):
        function(*SIZED[function], chunk_size=size, **others)
