"""The same calls with CUDA tensors: values, streams, graphs. Skipped without a GPU."""

import deltic
import pytest
import torch
from support import BUDGET, Case, error, make

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

SHAPES = [
    {"gate": "head", "H": 2, "HV": 4, "K": 128, "V": 128, "dtype": torch.bfloat16},
    {"gate": "channel", "form": "bounded", "K": 128, "V": 128, "dtype": torch.bfloat16},
    {"gate": "none", "K": 64, "V": 64, "dtype": torch.float16},
    {"gate": "channel", "form": "softplus", "K": 40, "V": 24, "dtype": torch.float32},
]


def forward(case: Case, device: str, **options):
    """Outputs of a case on a device, back on the CPU."""
    tensors = {name: x.to(device) for name, x in case.tensors.items()}
    q, k, v = (tensors.pop(name) for name in "qkv")
    given = {**case.options, "output_final_state": True, **options}
    with torch.no_grad():
        o, state = deltic.delta_rule(q, k, v, **tensors, **given)
    return o.cpu(), state.cpu()


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s['gate']}-{s['K']}")
@pytest.mark.parametrize("lengths", [None, [130, 0, 64, 7]])
def test_delta_rule(shape, lengths):
    case = make(lengths=lengths, T=150, **shape)
    o, state = forward(case, "cuda")
    wide = Case({n: x.double() if x.is_floating_point() else x for n, x in case.tensors.items()},
                case.options)  # fmt: skip
    reference = forward(wide, "cpu", impl="reference")
    budget = BUDGET[shape["dtype"]]["o"]
    assert error(o, reference[0]) <= budget
    assert error(state, reference[1]) <= budget
    again = forward(case, "cuda")
    assert torch.equal(o, again[0]) and torch.equal(state, again[1])


def test_decode_updates_the_pool():
    case = make(B=3, T=1, K=128, V=128, H=2, HV=4, dtype=torch.bfloat16)
    pool = torch.randn(5, 4, 128, 128)
    index = torch.tensor([4, 0, 2])
    tensors = {n: x for n, x in case.tensors.items() if n != "initial_state"}
    expected = pool.clone()
    with torch.no_grad():
        o = deltic.decode(**tensors, state_pool=expected, read_index=index)
        on_gpu = pool.cuda()
        moved = {n: x.cuda() for n, x in tensors.items()}
        ours = deltic.decode(**moved, state_pool=on_gpu, read_index=index.cuda())
    assert error(ours.cpu(), o) <= BUDGET[torch.bfloat16]["o"]
    assert error(on_gpu.cpu(), expected) <= BUDGET[torch.float32]["o"] * 10


def test_a_stream_of_its_own():
    case = make(T=300, **SHAPES[0])
    expected = forward(case, "cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        found = forward(case, "cuda")
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def test_a_graph():
    case = make(lengths=[130, 64, 0], **SHAPES[0])
    tensors = {name: x.cuda() for name, x in case.tensors.items()}
    tensors["cu_seqlens"] = tensors["cu_seqlens"].int()
    q, k, v = (tensors.pop(name) for name in "qkv")

    def call():
        with torch.no_grad():
            return deltic.delta_rule(q, k, v, **tensors, output_final_state=True, split="off")

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o, state = call()
    for offsets in ([0, 130, 194, 194], [0, 10, 150, 150], [0, 0, 0, 64]):
        tensors["cu_seqlens"].copy_(torch.tensor(offsets))
        graph.replay()
        torch.cuda.synchronize()
        expected = call()
        assert torch.equal(o, expected[0]) and torch.equal(state, expected[1])
        assert not o[:, offsets[-1] :].any()


def test_devices_must_agree():
    case = make(**SHAPES[0])
    tensors = {name: x.cuda() for name, x in case.tensors.items()}
    tensors["beta"] = tensors["beta"].cpu()
    q, k, v = (tensors.pop(name) for name in "qkv")
    with pytest.raises((ValueError, RuntimeError), match="beta"):
        deltic.delta_rule(q, k, v, **tensors)


def test_building_blocks():
    g = -torch.rand(2, 100, 3, 64)
    k = torch.nn.functional.normalize(torch.randn(2, 100, 3, 64), dim=-1)
    for name, call in {
        "cumsum": lambda d: deltic.cumsum(g.to(d)),
        "l2norm": lambda d: deltic.l2norm(k.to(d)),
    }.items():
        ours, expected = call("cuda").cpu(), call("cpu")
        assert error(ours, expected) <= 1e-5, name


def test_a_call_is_cheap():
    """The host's share of an eager call, the GPU not waited for."""
    import time

    case = make(B=1, T=1, K=128, V=128, H=2, HV=4, dtype=torch.bfloat16, state=False)
    pool = torch.zeros(4, 4, 128, 128, device="cuda")
    tensors = {n: x.cuda() for n, x in case.tensors.items()}
    index = torch.tensor([1], device="cuda")

    def microseconds():
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(200):
            deltic.decode(**tensors, state_pool=pool, read_index=index)
        return (time.perf_counter() - begin) / 200 * 1e6

    with torch.inference_mode():
        microseconds()
        best = min(microseconds() for _ in range(10))
    print(f"decode, host time per call: {best:.1f} us")
    assert best < 60


def test_checked_mode_raises(monkeypatch):
    case = make(lengths=[70, 0, 64], **SHAPES[0])
    monkeypatch.setenv("DELTIC_CHECKED", "1")
    expected = forward(case, "cuda")
    right = case.tensors["cu_seqlens"]
    case.tensors["cu_seqlens"] = torch.tensor([0, 70, 60, 134])
    with pytest.raises(ValueError, match="cu_seqlens: expected offsets that never decrease, got"):
        forward(case, "cuda")
    case.tensors["cu_seqlens"] = right
    case.tensors["k"] = case.tensors["k"].clone()
    case.tensors["k"][0, 71, 1, 3] = float("nan")
    with pytest.raises(ValueError, match="k: expected finite values, got nan at sequence 2, token"):
        forward(case, "cuda")
    case.tensors["k"][0, 71, 1, 3] = 0.0
    monkeypatch.setenv("DELTIC_CHECKED", "0")
    again = forward(case, "cuda")
    assert torch.equal(again[0][:, :70], expected[0][:, :70])


@pytest.mark.parametrize("gate", ["head", "channel"])
def test_scores_inverse(gate):
    case = make(T=150, H=2, HV=4, K=64, gate=gate, dtype=torch.float16)
    q, k, beta = (case.tensors[n] for n in ("q", "k", "beta"))
    G = deltic.cumsum(case.tensors["g"])
    found = deltic.scores_inverse(*(x.cuda() for x in (q, k)), g=G.cuda(), beta=beta.cuda())
    wide = {"g": G.double(), "beta": beta.double(), "impl": "reference"}
    expected = deltic.scores_inverse(q.double(), k.double(), **wide)
    assert error(found[0].cpu(), expected[0]) <= BUDGET[torch.float16]["o"]
    assert error(found[1].cpu(), expected[1]) <= BUDGET[torch.float16]["o"]
