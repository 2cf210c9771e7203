"""A server's own kernels and deltic on the same batches, in a process of its own.

    TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= python server_originals.py vllm|sglang

Triton's interpreter runs the kernels on the CPU, in fp32. Two things are helped: masks that are not
boolean, which it refuses, and names for tl.exp that it does not find.
"""

import copy
import importlib
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
import triton.runtime.interpreter as interpreter
from servers import CLASSES, PLACES, SGLANG_LINEAR, Layer, Sizes, W, ints

LIMIT = 2e-5


def help_interpreter() -> None:
    def with_boolean(name: str, place: int) -> None:
        original = getattr(interpreter.InterpreterBuilder, name)

        def call(self, *args, **kwargs):
            mask = args[place]
            if mask is not None and mask.data.dtype != np.bool_:
                mask.data = mask.data.astype(np.bool_)
            return original(self, *args, **kwargs)

        setattr(interpreter.InterpreterBuilder, name, call)

    with_boolean("create_masked_load", 1)
    with_boolean("create_masked_store", 2)


def help_names(package: str) -> None:
    """Names such as `exp = tl.exp` become kernels' functions, which the interpreter follows."""
    names = ("exp", "exp2", "log", "log2")
    text = "import triton\nimport triton.language as tl\n"
    for name in names:
        text += f"@triton.jit\ndef {name}(x):\n    return tl.{name}(x)\n"
    path = Path(tempfile.mkdtemp()) / "plain_functions.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location("plain_functions", path)
    plain = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(plain)
    for module_name, module in list(sys.modules.items()):
        if module_name.partition(".")[0] == package:
            for name in names:
                if callable(vars(module).get(name)):
                    setattr(module, name, getattr(plain, name))


def near(what: str, found: torch.Tensor, expected: torch.Tensor) -> None:
    found, expected = found.double(), expected.double()
    size = expected.square().mean().sqrt().clamp(min=1e-6)
    got = float((found - expected).square().mean().sqrt() / size)
    print(f"{what}: {got:.1e}")
    assert got <= LIMIT, f"{what}: {got}"


def in_fp32(layer: Layer) -> Layer:
    """The same layer with everything in fp32: the interpreter has no bf16."""
    layer.weight, layer.norm_weight = layer.weight.float(), layer.norm_weight.float()
    layer.windows, layer.states = layer.windows.float(), layer.states.float()
    return layer


def vllm() -> None:
    import vllm.v1.attention.backends.utils as backends
    from deltic.integrations import vllm as plugin

    qwen, kimi = (importlib.import_module(PLACES[kind]) for kind in ("qwen", "kimi"))
    ops = importlib.import_module(PLACES["k3_ops"])
    cpu = importlib.import_module("vllm.model_executor.layers.mamba.ops.cpu.causal_conv1d")
    recurrent = importlib.import_module(
        "vllm.third_party.flash_linear_attention.ops.fused_recurrent"
    )
    backends.PIN_MEMORY = False
    help_names("vllm")
    owners = {"qwen": (qwen, "_forward_core"), "kimi": (kimi, "_forward")}
    theirs = {k: getattr(getattr(m, CLASSES[k]), name) for k, (m, name) in owners.items()}
    their_ops = {n: getattr(ops, n) for n in ("fused_recurrent_kda", "chunk_kda_with_fused_gate")}
    their_ops["packed"] = ops.fused_recurrent_kda_packed_decode
    plugin.enable()
    # Prompts: vLLM's kernels over chunks have no fp32, its recurrent one is what they compute; its
    # convolution of prompts does not run in the interpreter, its CPU version does.
    qwen.causal_conv1d_fn = kimi.causal_conv1d_fn = cpu.causal_conv1d_fn_cpu

    def tokens_of(q, k, v, g, beta, initial_state, cu_seqlens, **_):
        o, last = torch.empty_like(v), initial_state.clone()
        for n in range(cu_seqlens.shape[0] - 1):
            part = slice(int(cu_seqlens[n]), int(cu_seqlens[n + 1]))
            length = part.stop - part.start
            pool = torch.cat((torch.zeros_like(last[:1]), last[n : n + 1]))
            o[:, part], _ = recurrent.fused_recurrent_gated_delta_rule(
                q=q[:, part],
                k=k[:, part],
                v=v[:, part],
                g=g[:, part],
                beta=beta[:, part],
                initial_state=pool,
                cu_seqlens=ints(0, length),
                ssm_state_indices=torch.ones(1, length, dtype=torch.int32),
                use_qk_l2norm_in_kernel=False,
            )
            last[n] = pool[1]
        return o, last

    def compare(kind: str, sizes: Sizes, count: int, seed: int, windows=None, **description):
        layer = in_fp32(Layer(sizes, seed=seed))
        module, name = owners[kind]
        owner = getattr(module, CLASSES[kind])
        rows = [t.float().contiguous() for t in layer.rows(count)]
        counts = ("num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens")
        counts += ("num_spec_decodes", "num_spec_decode_tokens")
        m = module.GDNAttentionMetadata(
            **{**dict.fromkeys(counts, 0), "num_actual_tokens": count, **description}
        )
        module.get_forward_context = lambda: SimpleNamespace(
            attn_metadata={layer.prefix: m}, cudagraph_runtime_mode=None
        )
        outs, layers = [], []
        for function in (getattr(owner, name), theirs[kind]):
            mine = copy.copy(layer)
            mine.windows, mine.states = layer.windows.clone(), layer.states.clone()
            made = owner.__new__(owner)
            torch.nn.Module.__init__(made)
            for key, value in mine.attributes().items():
                setattr(made, key, value)
            s = sizes
            extra = {"num_k_heads": s.H, "num_v_heads": s.HV, "head_k_dim": s.K, "head_v_dim": s.V}
            extra |= {"tp_size": 1, "key_dim": s.H * s.K, "value_dim": s.HV * s.V}
            extra |= {"enable_packed_recurrent_decode": True, "local_num_heads": s.HV}
            extra |= {"head_dim": s.K, "local_projection_size": s.HV * s.K}
            extra |= {"chunk_gated_delta_rule": tokens_of}
            made.__dict__.update(extra)
            norm = mine.attributes()["o_norm"]

            def gated(x, z, norm=norm):
                x = x * (x.square().mean(-1, keepdim=True) + norm.eps).rsqrt()
                return x * norm.weight * torch.sigmoid(z)

            x, g, beta, z = (t.clone() for t in rows)
            if kind == "kimi":
                out = torch.zeros(1, count, s.HV, s.V)
                if function is theirs[kind]:
                    made.__dict__["o_norm"] = gated
                function(made, x, g[None], z, beta[None], out)
                out = out[0]
            else:
                out = torch.zeros(count, s.HV, s.V)
                function(made, x, beta, g, out)
            outs.append(out), layers.append(mine)
        what = f"{kind} {count} tokens"
        live = slice(None) if kind != "kimi" else description.get("_live", slice(None))
        near(f"{what}: o", outs[0][live], outs[1][live])
        near(f"{what}: states", layers[0].states[1:], layers[1].states[1:])
        for slot, places in (windows or {}).items():
            near(
                f"{what}: window {slot}",
                layers[0].window()[slot, :, :places],
                layers[1].window()[slot, :, :places],
            )

    small = dict(K=32, V=32, H=1, HV=2)
    table = torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32)
    for kind, sizes in (
        ("qwen", small),
        ("kimi", {**small, "gate": "channel", "bound": -5.0}),
        ("kimi", {**small, "gate": "channel"}),
    ):
        compare(
            kind,
            Sizes(**sizes),
            3,
            1,
            {3: W - 1, 5: W - 1, 8: W - 1},
            num_decodes=3,
            num_decode_tokens=3,
            non_spec_state_indices_tensor=ints(3, 8, 5),
            non_spec_query_start_loc=ints(0, 1, 2, 3),
        )
        compare(
            kind,
            Sizes(**sizes, drafts=2),
            5,
            2,
            {1: W + 1, 4: W},
            num_spec_decodes=2,
            num_spec_decode_tokens=5,
            spec_state_indices_tensor=table,
            spec_query_start_loc=ints(0, 3, 5),
            num_accepted_tokens=ints(2, 3),
            spec_sequence_masks=torch.ones(2, dtype=torch.bool),
        )
    index, has = ints(3, 5), torch.tensor([True, False])
    compare(
        "qwen",
        Sizes(**small),
        75,
        3,
        {3: W - 1, 5: W - 1},
        num_prefills=2,
        num_prefill_tokens=75,
        non_spec_state_indices_tensor=index,
        non_spec_query_start_loc=ints(0, 70, 75),
        has_initial_state=has,
        prefill_query_start_loc=ints(0, 70, 75),
        prefill_state_indices=index,
        prefill_has_initial_state=has,
    )
    print("vLLM agrees")


def sglang() -> None:
    from deltic.integrations import sglang as plugin

    plugin.enable()
    gdn = importlib.import_module(f"{SGLANG_LINEAR}.gdn_backend")
    update = importlib.import_module(
        "sglang.kernels.ops.attention.linear.fused_sigmoid_gating_recurrent"
    ).fused_sigmoid_gating_delta_rule_update
    packed = importlib.import_module("sglang.kernels.ops.attention.fla.fused_recurrent")
    help_names("sglang")
    assert gdn.GDNKernelDispatcher is not None
    for per_channel in (False, True):
        kernel = plugin.kernel(per_channel)
        sizes = Sizes("channel" if per_channel else "head", None, K=32, V=32, H=1, HV=2)
        layer = in_fp32(Layer(sizes, seed=4))
        x, g, beta, _ = (t.float().contiguous() for t in layer.rows(6))
        s = sizes
        q, k, v = x.split([s.H * s.K, s.H * s.K, s.HV * s.V], -1)
        q, k = (t.reshape(1, 6, s.H, s.K) for t in (q, k))
        v = v.reshape(1, 6, s.HV, s.V)
        flat = g.flatten(1)
        gate = {"A_log": layer.A_log, "dt_bias": layer.dt_bias}
        for bound in (None, -5.0) if per_channel else (None,):
            more = {} if bound is None else {"lower_bound": bound}
            mine, other = layer.states.clone(), layer.states.clone()
            call = dict(query_start_loc=ints(0, 1, 2, 3, 4, 5, 6))
            index = ints(3, 5, -1, 1, 7, 2)
            o = kernel.decode(
                q, k, v, flat, beta, **gate, ssm_states=mine, cache_indices=index, **call, **more
            )
            ref = update(
                **gate,
                a=flat,
                b=beta,
                q=q,
                k=k,
                v=v,
                softplus_beta=1.0,
                softplus_threshold=20.0,
                initial_state_source=other,
                initial_state_indices=index,
                cu_seqlens=call["query_start_loc"],
                use_qk_l2norm_in_kernel=True,
                is_kda=per_channel,
                lower_bound=bound,
            )
            live = [0, 1, 3, 4, 5]
            near(f"decode {per_channel} {bound}: o", o[0, live], ref[0, live])
            near("states", mine, other)
            scratch = torch.zeros(3, 3, s.HV, s.V, s.K)
            mine_scratch, rows, cu = scratch.clone(), ints(0, 1), ints(0, 3, 6)
            for parents in (None, torch.tensor([[0, 0, 0], [0, 0, 1]], dtype=torch.int32)):
                verify = dict(
                    intermediate_state_indices=rows, cache_steps=3, retrieve_parent_token=parents
                )
                ref = update(
                    **gate,
                    a=flat,
                    b=beta,
                    q=q,
                    k=k,
                    v=v,
                    softplus_beta=1.0,
                    softplus_threshold=20.0,
                    initial_state_source=other,
                    initial_state_indices=ints(3, 5),
                    cu_seqlens=cu,
                    use_qk_l2norm_in_kernel=True,
                    is_kda=per_channel,
                    lower_bound=bound,
                    disable_state_update=True,
                    intermediate_states_buffer=scratch,
                    **verify,
                )
                before = mine.clone()
                o = kernel.target_verify(
                    q=q,
                    k=k,
                    v=v,
                    a=flat,
                    b=beta,
                    **gate,
                    ssm_states=mine,
                    cache_indices=ints(3, 5),
                    query_start_loc=cu,
                    intermediate_states_buffer=mine_scratch,
                    **verify,
                    **more,
                )
                near(f"verify {parents is not None}: o", o, ref)
                near("scratch", mine_scratch, scratch)
                assert torch.equal(mine, before)
        if not per_channel:
            mine, other = layer.states.clone(), layer.states.clone()
            index, out = ints(3, 5, -1, 1, 7, 2), torch.zeros(6, 1, s.HV, s.V)
            o = kernel.packed_decode(
                x,
                g,
                beta,
                **gate,
                scale=s.K**-0.5,
                ssm_states=mine,
                cache_indices=index,
                num_v_heads=s.HV,
                head_v_dim=s.V,
            )
            packed.fused_recurrent_gated_delta_rule_packed_decode(
                mixed_qkv=x,
                a=g,
                b=beta,
                **gate,
                scale=s.K**-0.5,
                initial_state=other,
                out=out,
                ssm_state_indices=index,
                use_qk_l2norm_in_kernel=True,
            )
            near("packed: o", o, out.transpose(0, 1))
            near("states", mine, other)
    print("SGLang agrees")


if __name__ == "__main__":
    help_interpreter()
    with torch.no_grad():
        {"vllm": vllm, "sglang": sglang}[sys.argv[1]]()
