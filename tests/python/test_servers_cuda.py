"""What the plugins for servers call, with CUDA tensors: as on the CPU, and in CUDA graphs that are
replayed with other slots; needs a GPU."""

import importlib
from types import SimpleNamespace

import pytest
import torch
from deltic.integrations import sglang, vllm
from deltic.integrations._sglang_kernel import Raw
from servers import CLASSES, PLACES, Layer, Sizes, ints, put_modules, sglang_modules, vllm_modules
from support import error

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

KINDS = {
    "qwen": ("qwen", dict()),
    "qwen_grouped_bf16": ("qwen", dict(H=2, HV=8, state=torch.bfloat16)),
    "kimi": ("kimi", dict(gate="channel")),
    "kimi_bounded_bf16": ("kimi", dict(gate="channel", bound=-5.0, state=torch.bfloat16)),
}
kinds = pytest.mark.parametrize("name", KINDS)
LIMIT = 6e-3


@pytest.fixture
def core(monkeypatch):
    """Runs a layer's core of vLLM on a batch: (kind, layer, rows, out, description)."""
    put_modules(monkeypatch, vllm_modules())

    def run(kind, layer, rows, out, description):
        module = importlib.import_module(PLACES[kind])
        counts = ("num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens")
        counts += ("num_spec_decodes", "num_spec_decode_tokens", "num_actual_tokens")
        m = module.GDNAttentionMetadata(**{**dict.fromkeys(counts, 0), **description})
        context = SimpleNamespace(attn_metadata={layer.prefix: m})
        monkeypatch.setattr(module, "get_forward_context", lambda: context)
        made = getattr(module, CLASSES[kind])()
        made.__dict__.update(layer.attributes())
        x, g, beta, z = rows
        if kind == "kimi":
            made._forward(x, g.unsqueeze(0), z, beta.unsqueeze(0), out.unsqueeze(0))
        else:
            made._forward_core(x, beta, g, out)

    with vllm.enable(), torch.no_grad():
        yield run
    vllm.disable()


def there(tensors, device):
    return {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in tensors.items()}


def both(core, name, count, description, **sizes):
    """The same batch on the CPU and on the GPU: out and the layers."""
    kind, given = KINDS[name]
    found = []
    for device in ("cpu", "cuda"):
        layer = Layer(Sizes(**{**given, **sizes}), seed=1)
        mine = Layer(layer.sizes, device, seed=1)
        for part in ("weight", "A_log", "dt_bias", "norm_weight"):
            setattr(mine, part, getattr(layer, part).to(device))
        mine.memory.copy_(layer.memory)
        rows = tuple(t.to(device) for t in layer.rows(count))
        out = torch.full((count, layer.sizes.HV, 128), 7.0, device=device).bfloat16()
        core(kind, mine, rows, out, there(description, device))
        found.append((out, mine))
    (o, layer), (gpu_o, gpu_layer) = found
    assert error(gpu_o.cpu(), o) <= LIMIT
    assert error(gpu_layer.states.float().cpu(), layer.states.float()) <= LIMIT
    assert torch.equal(gpu_layer.windows.cpu(), layer.windows)
    untouched = [
        s for s in range(9) if torch.equal(layer.memory[s], Layer(layer.sizes, seed=1).memory[s])
    ]
    assert torch.equal(gpu_layer.memory[untouched].cpu(), layer.memory[untouched])
    return gpu_o.cpu(), o


@kinds
def test_decode_with_padded_rows(core, name):
    gpu, cpu = both(
        core,
        name,
        5,
        dict(
            num_decodes=5,
            num_decode_tokens=5,
            num_actual_tokens=5,
            non_spec_state_indices_tensor=ints(3, 0, 5, -1, 8),
            non_spec_query_start_loc=ints(0, 1, 2, 3, 4, 5),
        ),
    )
    assert gpu[[1, 3]].count_nonzero() == 0 and cpu[[1, 3]].count_nonzero() == 0


@kinds
@pytest.mark.parametrize("decodes", [0, 2])
def test_prompts(core, name, decodes):
    index = ints(4, 6, 7, 2, 1)[2 - decodes :]
    has = torch.tensor([True] * decodes + [True, False, True])
    cu = [0, *range(1, decodes + 1)]
    cu += [decodes + n for n in (300, 303, 370)]
    checkpoint = SimpleNamespace(
        checkpoint_offsets=ints(*[0] * decodes, 128, 0, 0),
        state_indices=ints(*[0] * decodes, 8, 0, 0),
    )
    description = dict(
        num_prefills=3,
        num_prefill_tokens=370,
        num_decodes=decodes,
        num_decode_tokens=decodes,
        num_actual_tokens=cu[-1],
        non_spec_state_indices_tensor=index,
        non_spec_query_start_loc=ints(*cu),
        has_initial_state=has,
        prefill_query_start_loc=ints(0, 300, 303, 370),
        prefill_state_indices=index[decodes:],
        prefill_has_initial_state=has[decodes:],
    )
    if KINDS[name][1].get("state") is None:
        description["checkpoint"] = checkpoint

    def run(kind, layer, rows, out, given):
        if "checkpoint" in given:  # a list of tensors travels apart
            given = {**given, "checkpoint": SimpleNamespace(**there(vars(checkpoint), out.device))}
        core(kind, layer, rows, out, given)

    both(run, name, cu[-1], description)


@kinds
def test_drafts(core, name):
    table = torch.tensor([[1, 2, 3], [0, 0, 0], [4, 5, 6]], dtype=torch.int32)
    gpu, _ = both(
        core,
        name,
        6,
        dict(
            num_spec_decodes=3,
            num_spec_decode_tokens=5,
            num_actual_tokens=6,
            spec_state_indices_tensor=table,
            spec_query_start_loc=ints(0, 3, 3, 5),
            num_accepted_tokens=ints(2, 1, 3),
            spec_sequence_masks=torch.ones(3, dtype=torch.bool),
        ),
        drafts=2,
    )
    if KINDS[name][0] == "qwen":
        assert gpu[5].count_nonzero() == 0


def captured(work):
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph


@kinds
@pytest.mark.parametrize("drafts", [0, 2])
def test_graphs_are_replayed_with_other_slots(core, name, drafts):
    kind, given = KINDS[name]
    layer = Layer(Sizes(**given, drafts=drafts), "cuda", seed=2)
    other = Layer(layer.sizes, "cuda", seed=2)
    for part in ("weight", "A_log", "dt_bias", "norm_weight"):
        setattr(other, part, getattr(layer, part))
    other.memory.copy_(layer.memory)
    tokens = 4 * (1 + drafts)
    static = [t.clone() for t in layer.rows(tokens)]
    out = torch.zeros(tokens, layer.sizes.HV, 128, device="cuda").bfloat16()
    if drafts:
        lists = dict(
            spec_state_indices_tensor=torch.zeros(4, 3, dtype=torch.int32, device="cuda"),
            spec_query_start_loc=ints(0, 0, 0, 0, 0, device="cuda"),
            num_accepted_tokens=ints(1, 1, 1, 1, device="cuda"),
        )
        counts = dict(num_spec_decodes=4, num_spec_decode_tokens=tokens, num_actual_tokens=tokens)
        counts |= dict(spec_sequence_masks=torch.ones(4, dtype=torch.bool, device="cuda"))
        steps = [
            ([[1, 2, 3], [4, 5, 6], [0, 0, 0], [0, 0, 0]], [0, 3, 6, 6, 6], [1, 1, 1, 1]),
            ([[4, 5, 6], [0, 0, 0], [1, 2, 3], [0, 0, 0]], [0, 2, 2, 5, 5], [3, 1, 2, 1]),
            ([[1, 2, 3], [7, 8, 4], [0, 0, 0], [0, 0, 0]], [0, 1, 4, 4, 4], [1, 2, 9, 0]),
        ]
        values = [dict(zip(lists, step, strict=True)) for step in steps]
    else:
        lists = dict(
            non_spec_state_indices_tensor=ints(0, 0, 0, 0, device="cuda"),
            non_spec_query_start_loc=ints(0, 1, 2, 3, 4, device="cuda"),
        )
        counts = dict(num_decodes=4, num_decode_tokens=4, num_actual_tokens=4)
        steps = [[3, 5, 0, -1], [5, 8, 3, 0], [0, 0, 0, 1]]
        values = [dict(non_spec_state_indices_tensor=step) for step in steps]
    before = layer.memory.clone()
    graph = captured(lambda: core(kind, layer, static, out, {**counts, **lists}))
    assert torch.equal(layer.memory, before)  # lists of nothing
    for step in values:
        rows = layer.rows(tokens)
        for mine, row in zip(static, rows, strict=True):
            mine.copy_(row)
        for key, value in step.items():
            lists[key].copy_(torch.tensor(value, dtype=torch.int32))
        graph.replay()
        expected = torch.zeros_like(out)
        fresh = {key: value.clone() for key, value in lists.items()}
        core(kind, other, rows, expected, {**counts, **fresh})
        assert torch.equal(out, expected) and torch.equal(layer.memory, other.memory)


# ---- SGLang --------------------------------------------------------------------------------------


@pytest.fixture
def kernel(monkeypatch):
    put_modules(monkeypatch, sglang_modules())
    with sglang.enable(), torch.no_grad():
        yield sglang.kernel
    sglang.disable()


def sglang_layer(per_channel, state, device):
    """A layer with pools of several layers in each page, and rows of a step."""
    cpu = Layer(Sizes("channel" if per_channel else "head", state=state), seed=3)
    s = cpu.sizes
    pool = torch.zeros(s.slots, 3, s.HV, s.V, s.K, dtype=state)
    pool[:, 1] = cpu.states
    pool = pool.to(device)
    x, g, beta, _ = (t.to(device) for t in cpu.rows(370))
    q, k, v = x.split([s.H * s.K, s.H * s.K, s.HV * s.V], -1)
    shapes = ((s.H, s.K), (s.H, s.K), (s.HV, s.V))
    rows = [t.unflatten(-1, e)[None] for t, e in zip((q, k, v), shapes, strict=True)]
    gate = {"A_log": cpu.A_log.to(device), "dt_bias": cpu.dt_bias.to(device)}
    return pool, x, rows, g, beta, gate


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("state", [torch.float32, torch.bfloat16])
def test_sglang_s_kernel(kernel, per_channel, state):
    found = []
    for device in ("cpu", "cuda"):
        pool, x, (q, k, v), g, beta, gate = sglang_layer(per_channel, state, device)
        made, outs = kernel(per_channel), []
        index = ints(3, -1, 5, 1, device=device)
        outs.append(
            made.packed_decode(
                x[:4],
                g[:4].flatten(1),
                beta[:4],
                **gate,
                scale=128**-0.5,
                ssm_states=pool[:, 1],
                cache_indices=index,
                num_v_heads=2,
                head_v_dim=128,
            )
        )
        call = dict(ssm_states=pool[:, 1], cache_indices=ints(2, 6, device=device))
        call |= dict(query_start_loc=ints(0, 300, 370, device=device))
        track = torch.zeros(2, 2, 128, 128, device=device)
        call |= dict(track_state=track, track_chunk_idx=ints(2, -1, device=device))
        if per_channel:
            outs.append(made.extend(q, k, v, g[None], beta[None], **call, **gate, beta_is_raw=True))
        else:
            raw = Raw(g, {**gate, "gate": "softplus"})
            outs.append(made.extend(q, k, v, raw, beta, **call)[0])
        scratch = torch.zeros(3, 4, 2, 128, 128, dtype=state, device=device)
        parents = torch.tensor([[0, 0, 0, 1], [0, 0, 1, 2]], dtype=torch.int32, device=device)
        for tree in (None, parents):
            outs.append(
                made.target_verify(
                    q=q[:, :8],
                    k=k[:, :8],
                    v=v[:, :8],
                    a=g[:8].flatten(1),
                    b=beta[:8],
                    **gate,
                    ssm_states=pool[:, 1],
                    cache_indices=index[2:],
                    cache_steps=4,
                    query_start_loc=ints(0, 4, 8, device=device),
                    retrieve_parent_token=tree,
                    intermediate_states_buffer=scratch,
                    intermediate_state_indices=ints(1, 0, device=device),
                )
            )
        outs += [track, scratch.float(), pool.float()]
        found.append([t.cpu() for t in outs])
    for cpu, gpu in zip(*found, strict=True):
        assert error(gpu, cpu) <= LIMIT


def test_sglang_s_graphs_are_replayed_with_other_slots(kernel):
    pool, x, (q, k, v), g, beta, gate = sglang_layer(False, torch.float32, "cuda")
    made, index = kernel(False), ints(-1, -1, -1, -1, device="cuda")
    rows = ints(0, 1, 2, 3, device="cuda")
    scratch = torch.zeros(4, 2, 2, 128, 128, device="cuda")
    cu = ints(0, 2, 4, 6, 8, device="cuda")

    def verify(states, index, scratch):
        return made.target_verify(
            q=q[:, :8],
            k=k[:, :8],
            v=v[:, :8],
            a=g[:8],
            b=beta[:8],
            **gate,
            ssm_states=states,
            cache_indices=index,
            cache_steps=2,
            query_start_loc=cu,
            retrieve_parent_token=None,
            intermediate_states_buffer=scratch,
            intermediate_state_indices=rows,
        )

    def step(states, index):
        return made.packed_decode(
            x[:4],
            g[:4],
            beta[:4],
            **gate,
            scale=128**-0.5,
            ssm_states=states,
            cache_indices=index,
            num_v_heads=2,
            head_v_dim=128,
        )

    outs = {}

    def work():
        outs["verify"] = verify(pool[:, 1], index, scratch)
        outs["step"] = step(pool[:, 1], index)

    graph, other = captured(work), pool.clone()
    for slots in ([3, 5, -1, 1], [1, -1, 3, 8], [-1, -1, -1, 2]):
        index.copy_(torch.tensor(slots, dtype=torch.int32))
        graph.replay()
        mine = torch.zeros_like(scratch)
        expected = verify(other[:, 1], index.clone(), mine)
        assert torch.equal(outs["verify"], expected) and torch.equal(scratch, mine)
        assert torch.equal(outs["step"], step(other[:, 1], index.clone()))
        assert torch.equal(pool, other)


def test_layers_ask_the_library_for_kernels():
    from deltic._conv import _GPUS, has_kernels
    from deltic._library import LIBRARY

    x = torch.zeros(1, device="cuda")
    assert has_kernels(x) and _GPUS[x.device.index]
    assert LIBRARY.deltic_torch_runs_on(1, torch.cuda.device_count()) == 0
