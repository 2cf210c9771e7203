"""Training steps through torch: compiled, checkpointed, captured, distributed; bits and memory.

On a GPU where there is one. What torch does the same way on a CPU runs there too, on small tensors.
"""

import copy
import math
import os
from datetime import timedelta

import deltic
import deltic.fla.ops.delta_rule
import deltic.fla.ops.gated_delta_rule
import deltic.fla.ops.kda
import pytest
import torch
import torch.distributed as dist
from deltic._library import HAS_CUDA_BACKWARD, saved_bytes
from deltic.layers import DeltaNet, GatedDeltaNet, KimiDeltaAttention
from support import BUDGET, Case, check_against_oracle, error, magnitudes, make, python
from torch.library import opcheck
from torch.utils.checkpoint import checkpoint

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"
needs_gpu = pytest.mark.skipif(not HAS_GPU, reason="no GPU")
pytestmark = pytest.mark.skipif(
    HAS_GPU and not HAS_CUDA_BACKWARD, reason="no gradients on a GPU in this build"
)

OPS = torch.ops.deltic
NONE = (None,)
# On a GPU the widths that its tensor cores take.
WIDE = {"K": 128, "V": 128, "dtype": torch.bfloat16} if HAS_GPU else {"K": 32, "V": 16}
SHAPES = {
    "none": {"gate": "none"},
    "head": {"gate": "head", "H": 2, "HV": 4},
    "head-softplus": {"gate": "head", "form": "softplus"},
    "channel": {"gate": "channel"},
    "channel-bounded": {"gate": "channel", "form": "bounded"},
    "channel-softplus": {"gate": "channel", "form": "softplus"},
}
shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
LAYERS = {
    "DeltaNet": lambda: DeltaNet(hidden_size=64, num_heads=2),
    "GatedDeltaNet": lambda: GatedDeltaNet(
        hidden_size=64, head_dim=32, num_heads=2, num_v_heads=4, expand_v=1
    ),
    "KDA": lambda: KimiDeltaAttention(hidden_size=64, head_dim=32, num_heads=2, lower_bound=-5.0),
}
layers = pytest.mark.parametrize("name", LAYERS)
# In 16 bits, with the widths that tensor cores take.
WIDE_LAYERS = {
    "DeltaNet": lambda: DeltaNet(hidden_size=256, num_heads=2),
    "GatedDeltaNet": lambda: GatedDeltaNet(
        hidden_size=256, head_dim=64, num_heads=2, num_v_heads=4, expand_v=2
    ),
    "KDA": lambda: KimiDeltaAttention(
        hidden_size=256, head_dim=128, num_heads=2, safe_gate=True, lower_bound=-5.0
    ),
}


def inputs(case: Case, grad: bool = True) -> dict[str, torch.Tensor]:
    """Leaves of a case on the device."""
    found = {name: x.detach().to(DEVICE, copy=True) for name, x in case.tensors.items()}
    return {name: x.requires_grad_(grad and x.is_floating_point()) for name, x in found.items()}


def rows(case: Case, grad: bool = True) -> tuple[torch.Tensor, ...]:
    found = inputs(case, grad)
    return tuple(found[name] for name in ("q", "k", "v", "beta", "g"))


def weights(like: torch.Tensor) -> torch.Tensor:
    """A gradient of o that is not the same everywhere."""
    generator = torch.Generator().manual_seed(5)
    return torch.randn(like.shape, generator=generator).to(like)


def gradients(function, leaves: dict[str, torch.Tensor], **options) -> dict[str, torch.Tensor]:
    """o and the gradient of every leaf."""
    o = function(**leaves, **options)
    o = o[0] if isinstance(o, tuple) else o
    wanted = {name: x for name, x in leaves.items() if x.requires_grad}
    found = torch.autograd.grad(o, list(wanted.values()), weights(o))
    return {"o": o.detach(), **dict(zip(wanted, found, strict=True))}


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> list[str]:
    """Names of what differs; NaN is the same as NaN."""
    assert a.keys() == b.keys()
    return [name for name in a if not torch.equal(a[name].nan_to_num(7), b[name].nan_to_num(7))]


# Values


@shapes
@pytest.mark.parametrize("lengths", [None, [130, 0, 64, 7]], ids=["dense", "packed"])
def test_gradients(shape, lengths):
    case = make(T=150, lengths=lengths, **shape, **WIDE)
    tensors = {name: x.to(DEVICE) for name, x in case.tensors.items()}
    check_against_oracle(Case(tensors, {**case.options, "qk_l2norm": True}))


def expect_differences(case: Case, budget: dict[str, float], **options) -> None:
    """The gradient along a direction, half its own, against differences of the oracle in fp64.

    A gradient whose error is within its budget may have all of it along the direction, no more.
    """
    leaves = inputs(case)
    found = gradients(deltic.delta_rule, leaves, **case.options, **options)
    generator = torch.Generator().manual_seed(3)
    step, sizes = 1e-5, magnitudes(case, found["g"].cpu().double()) if "g" in found else {}
    for name, x in case.tensors.items():
        if not x.is_floating_point():
            continue
        gradient = found[name].cpu().double()
        direction = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        direction = direction / direction.norm() + gradient / gradient.norm()

        def value(by, name=name, direction=direction):
            wide = {n: y.double() for n, y in case.tensors.items()}
            wide[name] = wide[name] + by * direction
            given = {**case.options, **options, "split": "auto", "impl": "reference"}
            with torch.no_grad():
                o, _ = deltic.delta_rule(**wide, **given)
            return (o * weights(found["o"]).cpu().double()).sum().item()

        expected = (value(step) - value(-step)) / (2 * step)
        along = (gradient * direction).sum().item()
        size = torch.maximum(gradient.abs(), sizes.get(f"d_{name}", torch.zeros(())))
        kind = {"beta": "beta", "g": "g", "A_log": "params", "dt_bias": "params"}.get(name, "rows")
        allowed = budget[kind] * size.norm().item() * direction.norm().item()
        assert abs(along - expected) <= allowed, name


@shapes
def test_finite_differences(shape):
    case = make(B=1, T=70, **{"H": 1, "HV": 2, "K": 16, "V": 16, **shape})
    expect_differences(case, BUDGET[torch.float32])


@shapes
@pytest.mark.parametrize("split", ["off", 64], ids=["whole", "segments"])
def test_finite_differences_in_16_bits(shape, split, monkeypatch):
    """The same of rounded inputs with K = V = 64, which tensor cores take on Hopper."""
    if HAS_GPU and torch.cuda.get_device_capability()[0] == 9:
        monkeypatch.setenv("DELTIC_IMPL", "forward:cuda.sm90.forward,backward:cuda.sm90.backward")
    elif split != "off":
        pytest.skip("no segments here")
    wide = {"H": 2, "HV": 2, "K": 64, "V": 64, "dtype": torch.bfloat16}
    case = make(B=1, T=200, **{**shape, **wide})
    expect_differences(case, BUDGET[torch.bfloat16], qk_l2norm=True, split=split)


@shapes
@pytest.mark.parametrize("lengths", [None, [40, 0, 33]], ids=["dense", "packed"])
@pytest.mark.parametrize(
    "forms", [{}, {"qk_l2norm": True, "beta_form": "sigmoid"}], ids=["plain", "norm-sigmoid"]
)
def test_differences_of_the_call(shape, lengths, forms):
    """The gradient along a direction against differences of the call itself, in fp32.

    Fourth order, so that the step can be large: 0.003 of a tensor's size along a direction that is
    half the gradient's, half random. fp32 leaves errors of 1e-6 in o; 1e-3 of the gradient's length
    is allowed.
    """
    case = make(B=1, T=70, lengths=lengths, **{"H": 1, "HV": 2, "K": 16, "V": 16, **shape})
    options = {**case.options, **forms, "output_final_state": True}

    def value(leaves):
        o, state = deltic.delta_rule(**leaves, **options)
        return sum((x.double() * weights(x).double()).sum() for x in (o, state))

    leaves = inputs(case)
    wanted = [name for name, x in leaves.items() if x.requires_grad]
    found = torch.autograd.grad(value(leaves), [leaves[name] for name in wanted])
    generator = torch.Generator().manual_seed(3)
    for name, gradient in zip(wanted, (x.double() for x in found), strict=True):
        x = leaves[name].detach()
        direction = torch.randn(x.shape, generator=generator).to(gradient)
        direction = direction / direction.norm() + gradient / gradient.norm()
        step = 0.003 * x.double().norm()
        difference = along = 0.0
        for by, factor in ((1, 8 / 12), (2, -1 / 12)):
            sides = [(x.double() + sign * by * step * direction).float() for sign in (1, -1)]
            with torch.no_grad():
                ends = [value({**leaves, name: side}).item() for side in sides]
            difference += factor * (ends[0] - ends[1])
            # Along what the rounded ends are apart.
            along += factor * (gradient * (sides[0].double() - sides[1].double())).sum().item()
        assert abs(difference - along) <= 1e-3 * (step * gradient.norm()).item(), name


@shapes
def test_the_recurrent_form_has_chunked_gradients(shape):
    """o with the bits of decode, gradients of the same function."""
    case = make(T=100, **shape, **WIDE)
    tensors = {name: x.to(DEVICE) for name, x in case.tensors.items()}
    options = {**case.options, "form": "recurrent"}
    check_against_oracle(Case(tensors, options))
    with torch.no_grad():
        o, state = deltic.delta_rule(**tensors, **options, output_final_state=True)
        by_token, last = deltic.recurrent(**tensors, **case.options, output_final_state=True)
    assert torch.equal(o, by_token) and torch.equal(state, last)


FLA = {
    "chunk_delta_rule": (deltic.fla.ops.delta_rule.chunk_delta_rule, "none"),
    "fused_recurrent_delta_rule": (deltic.fla.ops.delta_rule.fused_recurrent_delta_rule, "none"),
    "chunk_gated_delta_rule": (deltic.fla.ops.gated_delta_rule.chunk_gated_delta_rule, "head"),
    "fused_recurrent_gated_delta_rule": (
        deltic.fla.ops.gated_delta_rule.fused_recurrent_gated_delta_rule,
        "head",
    ),
    "chunk_kda": (deltic.fla.ops.kda.chunk_kda, "channel"),
    "fused_recurrent_kda": (deltic.fla.ops.kda.fused_recurrent_kda, "channel"),
}


@pytest.mark.parametrize("name", FLA)
def test_gradients_under_the_other_names(name):
    function, gate = FLA[name]
    case = make(T=100, gate=gate, H=2, HV=2, **WIDE)
    ours = gradients(function, inputs(case))
    wide = {n: x.double().requires_grad_() for n, x in case.tensors.items()}
    reference = gradients(deltic.delta_rule, wide, impl="reference")
    assert same_bits(ours, gradients(function, inputs(case))) == []
    budget = BUDGET[case.tensors["q"].dtype]
    for key, x in ours.items():
        kind = {"o": "o", "beta": "beta", "g": "g"}.get(key, "rows")
        assert error(x.cpu(), reference[key]) <= budget[kind], key


def layer_gradients(layer, x, **options):
    layer.zero_grad()
    x = x.detach().requires_grad_()
    o = layer(x, **options)[0]
    o.backward(weights(o))
    return {"o": o.detach(), "x": x.grad, **{n: p.grad for n, p in layer.named_parameters()}}


def wide_layer(name) -> tuple[torch.nn.Module, torch.Tensor]:
    """One of WIDE_LAYERS and its input, three chunks to a sequence, on the CPU."""
    torch.manual_seed(0)
    return WIDE_LAYERS[name]().bfloat16(), torch.randn(2, 150, 256).bfloat16()


@pytest.fixture
def who_ran(monkeypatch):
    """Who ran the operator of a layer and its gradients, as explain says of the very call; of
    calls that have gradients."""
    found = set()

    def explained(*args, **options):
        said = deltic.explain(*args, **options)
        if said.backward is not None:
            found.add((said.implementation, said.backward.implementation))
        return deltic.delta_rule(*args, **options)

    monkeypatch.setattr("deltic.layers._base.delta_rule", explained)
    return found


def is_everything_on_tensor_cores(found) -> bool:
    """On Hopper. On other GPUs, and on the CPU: that one implementation ran, with gradients."""
    if HAS_GPU and torch.cuda.get_device_capability()[0] == 9:
        return found == {("cuda.sm90.forward", "cuda.sm90.backward")}
    return len(found) == 1 and all(name.startswith(DEVICE) for name in min(found))


@layers
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
def test_gradients_of_layers_in_16_bits(name, packed, who_ran):
    """As far from those in fp32 as the CPU's in bf16 are (0.55 %) and as the operator may add: of
    all numbers, each counted from its tensor's size. A tensor alone may have few, in which much
    cancels."""
    layer, x = wide_layer(name)
    options = {}
    if packed:
        x, options["cu_seqlens"] = x.flatten(0, 1)[None], torch.tensor([0, 130, 131, 300])
    exact = layer_gradients(copy.deepcopy(layer).float(), x.float(), **options)
    theirs = layer_gradients(layer, x, **options)
    who_ran.clear()
    there = {key: value.to(DEVICE) for key, value in options.items()}
    found = layer_gradients(copy.deepcopy(layer).to(DEVICE), x.to(DEVICE), **there)
    assert is_everything_on_tensor_cores(who_ran), who_ran
    assert all(y.dtype == torch.bfloat16 and y.any() for y in found.values())

    def apart(grads):
        """By tensor, and together."""
        scaled = {
            n: (grads[n].cpu().float() - y) / y.square().mean().sqrt() for n, y in exact.items()
        }
        together = torch.cat([y.flatten() for y in scaled.values()])
        alone = {n: y.square().mean().sqrt().item() for n, y in scaled.items()}
        return alone, together.square().mean().sqrt().item()

    alone, together = apart(found)
    assert together <= math.hypot(apart(theirs)[1], BUDGET[torch.bfloat16]["rows"])
    assert all(x <= 5e-2 for x in alone.values()), alone


widths = pytest.mark.parametrize("wide", [False, True], ids=["fp32", "bf16"])


def layer_on_device(name, wide) -> tuple[torch.nn.Module, torch.Tensor, float]:
    """A layer, its input, and how far the same step may be from another one: sums in another order,
    where weights lie elsewhere. In bf16 that is a unit in the last place."""
    torch.manual_seed(0)
    layer, x = wide_layer(name) if wide else (LAYERS[name](), torch.randn(2, 70, 64))
    return layer.to(DEVICE), x.to(DEVICE), 2**-8 if wide else 1e-5


@needs_gpu
@layers
def test_gradients_of_layers(name):
    torch.manual_seed(0)
    layer, x = LAYERS[name](), torch.randn(2, 70, 64)
    expected = layer_gradients(layer, x)
    found = layer_gradients(copy.deepcopy(layer).to(DEVICE), x.to(DEVICE))
    for key, reference in expected.items():
        assert error(found[key].cpu(), reference, 1e-3) <= 2e-3, key


# torch around the step


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_step(backend):
    """Forward and loss in one graph, the gradients by its backward."""
    if backend == "inductor" and not HAS_GPU:
        pytest.skip("tests of operators compile on the CPU")
    case = make(T=100, **SHAPES["head"], **WIDE)

    def loss(q, k, v, beta, g):
        o, state = deltic.delta_rule(q, k, v, beta=beta, g=g, output_final_state=True)
        return (o.float() ** 2).sum() + state.sum()

    found = []
    for function in (loss, torch.compile(loss, fullgraph=True, backend=backend)):
        x = rows(case)
        function(*x).backward()
        found.append([y.grad for y in x])
    for ours, expected in zip(found[1], found[0], strict=True):
        # A code generator may add the loss's squares in another order, but not change gradients.
        assert torch.equal(ours, expected)


@layers
def test_compiled_layers(name):
    torch.manual_seed(0)
    layer, x = LAYERS[name]().to(DEVICE), torch.randn(2, 70, 64, device=DEVICE)
    expected = layer_gradients(layer, x)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found = layer_gradients(compiled, x)
    for key, reference in expected.items():
        ours = found[key if key in found else f"_orig_mod.{key}"]
        assert error(ours, reference, 1e-3) <= 1e-3, key


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("form", ["chunked", "recurrent"])
def test_activation_checkpointing(reentrant, form):
    case = make(T=150, **SHAPES["channel"], **WIDE)

    def rule(q, k, v, beta, g):
        return deltic.delta_rule(q, k, v, beta=beta, g=g, form=form)[0]

    found = []
    for call in (rule, lambda *x: checkpoint(rule, *x, use_reentrant=reentrant)):
        x = rows(case)
        o = call(*x)
        o.backward(weights(o))
        found.append([y.grad for y in x])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@widths
@layers
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers(name, reentrant, wide, who_ran):
    layer, x, allowed = layer_on_device(name, wide)
    expected = layer_gradients(layer, x)
    whole = lambda x: (checkpoint(lambda y: layer(y)[0], x, use_reentrant=reentrant),)  # noqa: E731
    layer.zero_grad()
    x = x.detach().requires_grad_()
    o = whole(x)[0]
    o.backward(weights(o))
    assert torch.equal(o.detach(), expected["o"]) and torch.equal(x.grad, expected["x"])
    for key, p in layer.named_parameters():
        assert error(p.grad, expected[key], 1e-6) <= allowed, key
    assert not wide or is_everything_on_tensor_cores(who_ran), who_ran


def test_autocast():
    """fp32 leaves, 16-bit rows inside: gradients in fp32, of the rounded rows."""
    case = make(T=100, gate="head", K=WIDE["K"], V=WIDE["V"])
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        found = gradients(deltic.delta_rule, inputs(case), **case.options)
    assert found["o"].dtype == torch.bfloat16
    assert all(x.dtype == torch.float32 for name, x in found.items() if name != "o")
    wide = {
        n: (x.bfloat16() if n in "qkv" else x).double().requires_grad_()
        for n, x in case.tensors.items()
    }
    reference = gradients(deltic.delta_rule, wide, impl="reference")
    for name, x in found.items():
        kind = {"beta": "beta", "g": "g", "o": "o"}.get(name, "rows")
        assert error(x.cpu(), reference[name]) <= BUDGET[torch.bfloat16][kind], name


@needs_gpu
@pytest.mark.parametrize("shape", ["head", "channel-bounded"])
def test_a_graph_of_a_step(shape):
    """Forward, backward and the optimiser in one graph: the bits of as many eager steps."""
    case = make(lengths=[130, 64, 0, 30], **SHAPES[shape], **WIDE)
    target = torch.randn(1, 224, case.tensors["v"].shape[2], 128, device=DEVICE)

    def trained(steps, captured):
        leaves = inputs(case)
        leaves["cu_seqlens"] = leaves["cu_seqlens"].int()
        parameters = [x for x in leaves.values() if x.requires_grad]
        optimizer = torch.optim.SGD(parameters, lr=0.05)

        def step():
            optimizer.zero_grad(set_to_none=True)
            o, _ = deltic.delta_rule(**leaves, **case.options, qk_l2norm=True, split="off")
            ((o.float() - target) ** 2).sum().backward()
            optimizer.step()

        if not captured:
            for _ in range(steps):
                step()
            return parameters
        start = [x.detach().clone() for x in parameters]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()
            step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            step()
        with torch.no_grad():
            for x, first in zip(parameters, start, strict=True):
                x.copy_(first)
        for _ in range(steps):
            graph.replay()
        torch.cuda.synchronize()
        return parameters

    eager, replayed = trained(4, False), trained(4, True)
    assert all(torch.isfinite(x).all() for x in eager)
    assert all(torch.equal(a, b) for a, b in zip(eager, replayed, strict=True))


@needs_gpu
@layers
def test_a_graph_of_a_layer_in_training(name):
    """A layer in bf16 with AdamW, captured; eager steps and replays lose alike."""
    first, x, _ = layer_on_device(name, wide=True)
    target = torch.randn_like(x)

    def trained(captured):
        layer = copy.deepcopy(first)
        optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3, capturable=True)

        def step():
            optimizer.zero_grad(set_to_none=True)
            loss = torch.nn.functional.mse_loss(layer(x)[0].float(), target.float())
            loss.backward()
            optimizer.step()
            return loss

        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        if not captured:
            return [step().item() for _ in range(5)]
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            loss = step()
        losses = []
        for _ in range(5):
            graph.replay()
            losses.append(loss.item())
        return losses

    eager, replayed = trained(False), trained(True)
    assert eager[-1] < eager[0]
    assert eager == pytest.approx(replayed, rel=1e-3)


# Several processes: a group of one, which is what one GPU has room for


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    backend = "nccl" if HAS_GPU and dist.is_nccl_available() else "gloo"
    if not dist.is_available() or (backend == "gloo" and not dist.is_gloo_available()):
        pytest.skip("torch without process groups")
    if dist.is_initialized():
        pytest.skip("a process group of somebody else's")
    place = tmp_path_factory.mktemp("group") / "store"
    store = dist.FileStore(str(place), 1)
    options = {"device_id": torch.device("cuda", 0)} if backend == "nccl" else {}
    dist.init_process_group(
        backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=60), **options
    )
    yield backend
    dist.destroy_process_group()


@widths
@layers
def test_ddp(name, wide, group, who_ran):
    layer, x, allowed = layer_on_device(name, wide)
    expected = layer_gradients(layer, x)
    wrapped = torch.nn.parallel.DistributedDataParallel(
        copy.deepcopy(layer), device_ids=[0] if HAS_GPU else None
    )
    for _ in range(2):  # the second time with its buckets built
        who_ran.clear()
        found = layer_gradients(wrapped, x)
        assert not wide or is_everything_on_tensor_cores(who_ran), who_ran
        for key, reference in expected.items():
            ours = found[key if key in ("o", "x") else f"module.{key}"]
            assert error(ours, reference, 1e-6) <= allowed, key


@widths
@layers
def test_fsdp2(name, wide, group, who_ran):
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("torch without fully_shard")
    from torch.distributed.device_mesh import init_device_mesh

    layer, x, allowed = layer_on_device(name, wide)
    expected = layer_gradients(layer, x)
    sharded = copy.deepcopy(layer)
    fsdp.fully_shard(sharded, mesh=init_device_mesh(DEVICE, (1,)))
    who_ran.clear()
    found = layer_gradients(sharded, x)
    assert not wide or is_everything_on_tensor_cores(who_ran), who_ran
    for key, reference in expected.items():
        ours = found[key]
        ours = ours.full_tensor() if hasattr(ours, "full_tensor") else ours
        assert error(ours, reference, 1e-6) <= allowed, key
    torch.optim.SGD(sharded.parameters(), lr=0.1).step()
    assert torch.isfinite(sharded(x)[0]).all()


# Operators as torch knows them, with gradients


@needs_gpu
@pytest.mark.parametrize("words", ["", "final", "final save=states", "save=all"])
@pytest.mark.parametrize("lengths", [None, [40, 0, 30]], ids=["dense", "packed"])
def test_opcheck_forward(words, lengths):
    case = make(T=70, lengths=lengths, **SHAPES["head"], **WIDE)
    x = inputs(case)
    given = (*(x[n] for n in ("q", "k", "v", "beta", "g")), *NONE * 2, x["initial_state"])
    offsets = (x.get("cu_seqlens"), None)
    opcheck(OPS.forward_save.default, (*given, *offsets, *NONE * 7, words))
    if "save" not in words:
        opcheck(OPS.forward.default, (*given, *offsets, *NONE * 2, words))


@needs_gpu
def test_opcheck_the_others():
    case = make(T=5, **SHAPES["head"], **WIDE)
    x = inputs(case)
    given = tuple(x[n] for n in ("q", "k", "v", "beta", "g"))
    opcheck(OPS.decode.default, (*given, *NONE * 3, x["initial_state"], *NONE * 4, "final"))
    d_o = torch.randn(2, 5, 4, 128, device=DEVICE, dtype=torch.bfloat16)
    opcheck(OPS.backward.default, (d_o, None, *rows(case, False), *NONE * 7))
    y = torch.randn(2, 5, 64, device=DEVICE, requires_grad=True)
    weight = torch.randn(64, 4, device=DEVICE, requires_grad=True)
    opcheck(OPS.conv.default, (y, weight, None, None, None, None, "activation=silu"))
    y, z = (torch.randn(2, 5, 2, 64, device=DEVICE, requires_grad=True) for _ in range(2))
    scale = torch.rand(64, device=DEVICE, requires_grad=True)
    opcheck(OPS.rmsnorm.default, (y, z, scale, 1e-5, "activation=silu"))


def test_opcheck_of_states_in_place():
    """What changes pools: commit, move, the convolution; and a record."""
    size = (WIDE["K"], WIDE["V"])
    torch.manual_seed(1)
    pool = torch.randn(4, 2, *size, device=DEVICE)
    slots, accepted = (torch.tensor(x, device=DEVICE) for x in ([2, 0, 3], [1, 2, 0]))
    case = make(B=3, T=5, **SHAPES["channel"], **WIDE)
    given = rows(case, False)
    record = torch.empty(3, 5, 2, 2 * size[0] + size[1], device=DEVICE)
    opcheck(
        OPS.decode_record_.default, (*given, *NONE * 2, pool, slots, *NONE * 3, record, *NONE * 3)
    )
    names = ("q", "k", "v", "beta", "g")
    with torch.no_grad():
        deltic.decode(
            **dict(zip(names, given, strict=True)), state_pool=pool, read_index=slots, record=record
        )
    opcheck(OPS.commit_.default, (pool, record, accepted, slots, *NONE * 3))
    opcheck(OPS.move_.default, (pool, torch.randn_like(pool), slots, slots))
    x, weight = torch.randn(2, 7, 24, device=DEVICE), torch.randn(24, 4, device=DEVICE)
    windows, index = torch.randn(4, 24, 4, device=DEVICE), torch.tensor([3, 0], device=DEVICE)
    opcheck(OPS.conv_.default, (x, weight, None, windows, index, *NONE * 3))
    opcheck(OPS.conv_.default, (x[:, 0], weight, None, windows, index, *NONE * 3))


def test_opcheck_of_two_forms():
    case = make(T=70, **SHAPES["head"], **WIDE)
    from_ = torch.tensor([64, 10], device=DEVICE)
    opcheck(
        OPS.forward_save.default, (*rows(case), *NONE * 9, from_, *NONE * 2, "final form=recurrent")
    )


# A model of transformers


def test_a_step_of_transformers(monkeypatch):
    """A step in bf16 with heads of 64: the gradient is no further from that of the fallback in fp32
    than the fallback's own in bf16, half as much allowed on top, and training goes on from it."""
    models = pytest.importorskip("test_transformers")
    name = "qwen3_5"
    sizes = {f"linear_{part}_head_dim": 64 for part in ("key", "value")}
    config, model, values = models.SMALL[name]
    monkeypatch.setitem(models.SMALL, name, (config, model, {**values, **sizes}))
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # the fallback's convolution
    ids = models.tokens(2, 150).to(DEVICE)

    def step(model):
        """The loss and the gradient, all of it in one row."""
        model.train()
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        assert len(grads) > 40 and all(x.any() for x in grads.values())
        return loss.item(), torch.cat([x.flatten().double() for x in grads.values()])

    rounded = models.build(name, torch.bfloat16).to(DEVICE)
    exact = models.build(name).to(DEVICE)
    exact.load_state_dict(rounded.state_dict())
    with models.fallback(name):
        loss, reference = step(exact)
        _, theirs = step(rounded)
        with models.integration.enable(name):
            found, ours = step(rounded)
            assert not torch.equal(ours, theirs), "the two ran on the same functions"
            assert abs(found - loss) < 0.01 * loss
            assert error(ours, reference) < 1.5 * error(theirs, reference)
            torch.optim.SGD(rounded.parameters(), lr=0.05).step()
            assert step(rounded)[0] < found


# Bits


@shapes
def test_the_same_bits_beside_another_stream(shape):
    """Steps while another stream keeps the GPU busy, over and over."""
    runs = 200 if HAS_GPU else 5
    case = make(lengths=[200, 0, 64, 130], **shape, **WIDE)
    leaves = inputs(case)
    expected = gradients(deltic.delta_rule, leaves, **case.options, qk_l2norm=True)
    busy = torch.randn(2048, 2048, device=DEVICE) if HAS_GPU else None
    stream = torch.cuda.Stream() if HAS_GPU else None
    wrong = torch.zeros((), device=DEVICE, dtype=torch.int64)
    for run in range(runs):
        if busy is not None and run % 4 == 0:
            with torch.cuda.stream(stream):
                for _ in range(1 + run % 3):
                    torch.mm(busy, busy)
        found = gradients(deltic.delta_rule, leaves, **case.options, qk_l2norm=True)
        for name, x in found.items():  # counted on the device: a wait would end the company
            a, b = (y.view(torch.int16 if y.element_size() == 2 else torch.int32)
                    for y in (x, expected[name]))  # fmt: skip
            wrong += (a != b).any()
    assert wrong.item() == 0, f"{wrong.item()} tensors of {runs} runs differ"


@shapes
def test_gradients_of_nan_stay_in_their_sequence(shape):
    case = make(lengths=[70, 64, 0, 100], **shape, **WIDE)
    expected = gradients(deltic.delta_rule, inputs(case), **case.options)
    spans = {0: (0, 70), 1: (70, 134), 3: (134, 234)}
    for bad in spans:
        spoilt = Case({n: x.clone() for n, x in case.tensors.items()}, case.options)
        first, last = spans[bad]
        spoilt.tensors["k"][0, first + 5] = float("nan")
        spoilt.tensors["v"][0, last - 3] = float("inf")
        found = gradients(deltic.delta_rule, inputs(spoilt), **case.options)
        assert not torch.isfinite(found["k"][0, first:last]).all()
        for good, (a, b) in spans.items():
            if good == bad:
                continue
            for name in ("o", "q", "k", "v", "beta", "g"):
                if name in found:
                    same = torch.equal(found[name][0, a:b], expected[name][0, a:b])
                    assert same, f"{name} of sequence {good}, NaN in {bad}"
            same = torch.equal(found["initial_state"][good], expected["initial_state"][good])
            assert same, f"initial_state of sequence {good}, NaN in {bad}"


@shapes
def test_gradients_of_nan_stay_in_their_head(shape):
    case = make(T=150, **{"H": 2, "HV": 4, **shape}, **WIDE)
    expected = gradients(deltic.delta_rule, inputs(case), **case.options)
    case.tensors["v"] = case.tensors["v"].clone()
    case.tensors["v"][0, 20, 1] = float("nan")  # value head 1, of key head 0
    found = gradients(deltic.delta_rule, inputs(case), **case.options)
    assert torch.isnan(found["beta"][0, :, 1]).any()
    for name, x in found.items():
        if name in ("q", "k"):
            heads, axis = [1], 2
        elif name in ("A_log", "dt_bias"):
            heads, axis = [0, 2, 3], 0
        else:
            heads, axis = [0, 2, 3], 1 if name == "initial_state" else 2
        index = torch.tensor(heads, device=x.device)
        a, b = (y.index_select(axis, index) for y in (x, expected[name]))
        assert torch.equal(a, b), name


# Memory


def requested() -> int:
    """Bytes that were asked of the allocator and are not freed: its blocks may be larger, by up to
    1 MiB that it does not split off."""
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"]) if HAS_GPU else 0


def kept(words: str, case: Case) -> tuple[dict[str, torch.Tensor], int, int]:
    """o and gradients with something kept; its bytes, and what the allocator counts as kept."""
    x = inputs(case)
    given = (*(x[n] for n in ("q", "k", "v", "beta", "g")), *NONE * 2, x["initial_state"])
    before = requested()
    o, _, _, saved = OPS.forward_save(*given, *NONE * 9, words)
    counted = requested() - before - o.nbytes
    names = ("q", "k", "v", "beta", "g", "initial_state")
    found = torch.autograd.grad(o, [x[n] for n in names], weights(o))
    return {"o": o.detach(), **dict(zip(names, found, strict=True))}, saved.nbytes, counted


@pytest.mark.parametrize("shape", ["head", "channel"])
def test_what_is_kept(shape):
    """The same bits whatever forward kept, which is as large as the library said before."""
    case = make(T=1000, **SHAPES[shape], **WIDE)
    q, v = case.tensors["q"], case.tensors["v"]
    sizes = (*q.shape, *v.shape[2:], q.shape[0])
    expected, *_ = kept("", case)
    for save, words in ((0, ""), (1, "save=states"), (2, "save=all")):
        found, held, counted = kept(words, case)
        assert same_bits(found, expected) == [], words
        said = saved_bytes(DEVICE, q.dtype, sizes, False, 64, save, None) if save else 0
        assert held == said, words
        if HAS_GPU:
            assert counted == held, words


@needs_gpu
def test_a_step_keeps_its_inputs_alone():
    """Between forward and backward of delta_rule: o. After backward: gradients."""
    case = make(B=1, T=4096, **SHAPES["channel"], **WIDE)
    x = inputs(case)
    torch.cuda.synchronize()
    before = requested()
    o, _ = deltic.delta_rule(**x)
    assert requested() - before == o.nbytes
    o.backward(torch.ones_like(o))
    grads = sum(y.grad.nbytes for y in x.values())
    assert requested() - before == o.nbytes + grads


# A fresh process


FIRST_STEP = """
import sys, time, torch, deltic
q, k, v = (torch.randn(1, 2048, 8, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
           for _ in range(3))
g = (-torch.rand(1, 2048, 8, 128, device="cuda")).requires_grad_()
torch.cuda.synchronize()
imported = set(sys.modules)
start = time.perf_counter()
o, _ = deltic.delta_rule(q, k, v, g=g, qk_l2norm=True)
BACKWARD
torch.cuda.synchronize()
print(1e3 * (time.perf_counter() - start), *sorted(set(sys.modules) - imported))
"""


@needs_gpu
@pytest.mark.parametrize("start", ["loss", "gradient"])
def test_the_first_step_of_a_process(start, capsys):
    """torch imported and the context made; the kernels are loaded by these calls.

    From a loss, as a training has it, nothing else is there before. Where it is given a gradient,
    ``Tensor.backward`` itself imports torch.fx.experimental.symbolic_shapes with all of sympy, 480
    modules, whatever was computed (H200 machine without byte code of them: 2.1 s of 2.15; forward
    and kernels of a step: 20 ms): here they are imported ahead.
    """
    code = FIRST_STEP.replace("BACKWARD", "o.float().mean().backward()")
    if start == "gradient":
        code = FIRST_STEP.replace("BACKWARD", "o.backward(torch.ones_like(o))")
        code = "import torch.fx.experimental.symbolic_shapes\n" + code
    found, *imported = python(code, **{"CUDA_MODULE_LOADING": "LAZY", **os.environ}).split()
    with capsys.disabled():
        print(f"first training step from a {start}: {float(found):.1f} ms")
    assert float(found) < 500
    assert not {"sympy", "torch._dynamo", "torch._inductor"} & set(imported)
