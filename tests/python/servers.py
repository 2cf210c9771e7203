"""Inference servers in small: the names and signatures of vLLM 0.33.0 and SGLang 0.5.23, batches as
those servers describe them, and plain formulas to compare with.

A stand-in's functions only say that they were called: what is tested is that deltic takes their
place, and what it then computes. Where the servers are installed the same tests run on their own
classes.
"""

import sys
import types
from dataclasses import dataclass, field, make_dataclass
from enum import Enum
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F

W = 4


class Original(Exception):
    """What a stand-in's own function raises: the name that was called."""


def ints(*values: int, device: str = "cpu") -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


# ---- Plain formulas ------------------------------------------------------------------------------


def rule(q, k, v, g, beta, state):
    """o ``[T, HV, V]`` and the last state ``[HV, V, K]`` of one sequence, in fp64; g log decays."""
    HV, scale = v.shape[1], q.shape[-1] ** -0.5
    q, k = (x.double().repeat_interleave(HV // x.shape[1], 1) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    state, rows, states = state.double().clone(), [], []
    for t in range(q.shape[0]):
        decay = g[t].double().exp()
        state = state * (decay[:, None, None] if decay.dim() == 1 else decay[:, None, :])
        u = beta[t].double()[:, None] * (v[t].double() - (state @ k[t][:, :, None])[..., 0])
        state = state + u[:, :, None] * k[t][:, None, :]
        rows.append((state @ q[t][:, :, None])[..., 0] * scale)
        states.append(state)
    return torch.stack(rows) if rows else v.double(), states


def gates(raw, A_log, dt_bias, bound=None):
    """Log decays of raw rows ``[T, HV]`` or ``[T, HV, K]``."""
    A = A_log.double().flatten().exp()
    A = A[:, None] if raw.dim() == 3 else A
    x = raw.double() + dt_bias.double().view(raw.shape[1:])
    return -A * F.softplus(x) if bound is None else bound * torch.sigmoid(A * x)


def conv(x, before, weight):
    """SiLU of the convolution of ``x [T, D]`` behind ``before [D, W - 1]``, and all inputs."""
    rows = torch.cat((before.double().T, x.double()))
    y = sum(rows[j : j + x.shape[0]] * weight[:, j].double() for j in range(W))
    return F.silu(y).to(x.dtype), rows


# ---- Layers and batches as vLLM has them ---------------------------------------------------------

_COUNTS = ("num_prefills", "num_prefill_tokens", "num_decodes", "num_decode_tokens")
_COUNTS += ("num_spec_decodes", "num_spec_decode_tokens", "num_actual_tokens")
_FIELDS = (
    "checkpoint",
    "flashinfer_checkpoint_plan",
    "has_initial_state",
    "spec_query_start_loc",
    "non_spec_query_start_loc",
    "spec_state_indices_tensor",
    "non_spec_state_indices_tensor",
    "spec_sequence_masks",
    "spec_sequence_masks_cpu",
    "spec_token_indx",
    "non_spec_token_indx",
    "num_accepted_tokens",
    "uniform_spec_sequence_length",
    "chunk_indices",
    "chunk_offsets",
    "prefill_query_start_loc",
    "prefill_state_indices",
    "prefill_has_initial_state",
    "aiter_prefill_metadata",
    "nums_dict",
    "batch_ptr",
    "token_chunk_offset_ptr",
)


@dataclass
class Sizes:
    """A layer's: heads, widths, the gate, what its pools hold."""

    gate: str = "head"
    bound: float | None = None
    drafts: int = 0
    state: torch.dtype = torch.float32
    dim_first: bool = False
    doubled: bool = False  # beta up to 2
    H: int = 1
    HV: int = 2
    K: int = 128
    V: int = 128
    slots: int = 9

    def __post_init__(self) -> None:
        if self.gate == "channel":
            self.H = self.HV

    @property
    def D(self) -> int:
        return 2 * self.H * self.K + self.HV * self.V

    @property
    def gate_shape(self) -> tuple[int, ...]:
        return (self.HV,) if self.gate == "head" else (self.HV, self.K)


def paged(sizes: Sizes, device: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The pages of a layer, and in them its windows and states with a gap behind them."""
    places, size = W - 1 + sizes.drafts, torch.empty(0, dtype=sizes.state).element_size()
    first = places * sizes.D * 2
    page = -(-(first + sizes.HV * sizes.V * sizes.K * size + 4096) // 64) * 64
    memory = torch.zeros(sizes.slots, page, dtype=torch.uint8, device=device)
    flat = memory.view(-1)
    shape = (sizes.D, places) if sizes.dim_first else (places, sizes.D)
    windows = flat.view(torch.bfloat16).as_strided((sizes.slots, *shape), (page // 2, shape[1], 1))
    states = flat.view(sizes.state).as_strided(
        (sizes.slots, sizes.HV, sizes.V, sizes.K),
        (page // size, sizes.V * sizes.K, sizes.K, 1),
        first // size,
    )
    return memory, windows, states


@dataclass
class Layer:
    """The tensors of a layer and of a step, drawn on the CPU whatever the device."""

    sizes: Sizes
    device: str = "cpu"
    seed: int = 0
    prefix: str = "layers.0"
    made: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.random = torch.Generator().manual_seed(self.seed)
        s = self.sizes
        self.weight = (self.draw(s.D, W) / 2).bfloat16()
        self.A_log = self.draw(s.HV).float()
        self.dt_bias = self.draw(*s.gate_shape).flatten().float()
        self.norm_weight = self.draw(s.V).bfloat16()
        self.memory, self.windows, self.states = paged(s, self.device)
        (
            self.windows.copy_(self.draw(*self.windows.shape)),
            self.states.copy_(self.draw(*self.states.shape)),
        )

    def draw(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.random).to(self.device)

    def rows(self, count: int) -> tuple[torch.Tensor, ...]:
        """x, g, beta and z as slices of wider rows."""
        s = self.sizes
        wide = self.draw(count, s.D + s.HV * s.V + 8).bfloat16()
        g = self.draw(count, *s.gate_shape).bfloat16()
        ba = self.draw(count, 2 * s.HV).bfloat16()
        z = wide[:, s.D : s.D + s.HV * s.V].unflatten(-1, (s.HV, s.V))
        return wide[:, : s.D], g, ba[:, : s.HV], z

    def window(self) -> torch.Tensor:
        """Windows ``[slots, D, S]``."""
        return self.windows if self.sizes.dim_first else self.windows.transpose(1, 2)

    def attributes(self) -> dict[str, Any]:
        """What vLLM's layers have of it."""
        s = self.sizes
        norm = SimpleNamespace(
            weight=self.norm_weight, bias=None, eps=1e-5, activation="silu", group_size=None
        )
        return {
            "prefix": self.prefix,
            "activation": "silu",
            "conv1d": SimpleNamespace(weight=self.weight.unsqueeze(1), bias=None),
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "kv_cache": [self.windows, self.states],
            "norm": norm,
            "o_norm": SimpleNamespace(**{**vars(norm), "activation": "sigmoid"}),
            "gate_lower_bound": s.bound,
            "allow_neg_eigval": s.doubled,
        }

    def expect(self, x, g, beta, state, before):
        """o, the states after every token and all inputs of one sequence."""
        s = self.sizes
        y, inputs = conv(x, before, self.weight)
        q, k, v = y.split([s.H * s.K, s.H * s.K, s.HV * s.V], -1)
        o, states = rule(
            q.unflatten(-1, (s.H, s.K)),
            k.unflatten(-1, (s.H, s.K)),
            v.unflatten(-1, (s.HV, s.V)),
            gates(g, self.A_log, self.dt_bias, s.bound),
            torch.sigmoid(beta.double()) * (2 if s.doubled else 1),
            state,
        )
        return o, states, inputs


# ---- Stand-ins -----------------------------------------------------------------------------------


def _module(name: str, **content: Any) -> types.ModuleType:
    module = types.ModuleType(name)
    module.__dict__.update(content)
    module.__path__ = []  # packages all
    for value in content.values():
        if isinstance(value, (type, types.FunctionType)):
            value.__module__ = name
    return module


def _says(name: str, arguments: str) -> Any:
    """A function of a name and signature that raises :class:`Original`."""
    space: dict[str, Any] = {"Original": Original}
    exec(f"def {name}({arguments}):\n    raise Original({name!r})", space)
    return space[name]


# Arguments of vLLM 0.33.0.
VLLM = {
    "causal_conv1d_fn": "x, weight, bias, conv_states, query_start_loc, cache_indices=None, "
    "has_initial_state=None, activation='silu', pad_slot_id=-1, null_block_id=0, metadata=None, "
    "validate_data=False",
    "causal_conv1d_update": "x, conv_state, weight, bias=None, activation=None, "
    "conv_state_indices=None, num_accepted_tokens=None, query_start_loc=None, max_query_len=-1, "
    "null_block_id=0, validate_data=False, out=None",
    "k3.fused_recurrent_kda": "q, k, v, raw_g, raw_beta, A_log, dt_bias, lower_bound, "
    "initial_state, cu_seqlens, ssm_state_indices, num_accepted_tokens=None, out=None, "
    "fuse_gate=None",
    "k3.fused_recurrent_kda_packed_decode": "mixed_qkv, raw_g, raw_beta, A_log, dt_bias, "
    "lower_bound, initial_state, state_indices, scale=None, out=None",
    "k3.chunk_kda_with_fused_gate": "q, k, v, raw_g, raw_beta, A_log, g_bias, scale=None, "
    "initial_state=None, output_final_state=False, lower_bound=None, "
    "use_qk_l2norm_in_kernel=False, cu_seqlens=None, out=None, **kwargs",
    "glm.fused_recurrent_kda": "q, k, v, g, beta=None, scale=None, initial_state=None, "
    "inplace_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=None, "
    "ssm_state_indices=None, num_accepted_tokens=None, out=None, sigmoid_beta=False, a_log=None, "
    "g_bias=None, compute_gate=False, lower_bound=-5.0, **kwargs",
    "glm.chunk_kda_with_fused_gate": "q, k, v, raw_g, beta, A_log, g_bias, scale=None, "
    "initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, "
    "cu_seqlens=None, safe_gate=False, lower_bound=-5.0, **kwargs",
    "bailing.fused_recurrent_kda": "q, k, v, g, beta=None, scale=None, initial_state=None, "
    "inplace_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=None, "
    "ssm_state_indices=None, **kwargs",
    "bailing.fused_recurrent_kda_fwd": "q, k, v, g, beta, scale, initial_state, "
    "inplace_final_state=True, cu_seqlens=None, ssm_state_indices=None, num_accepted_tokens=None, "
    "use_qk_l2norm_in_kernel=False",
    "bailing.chunk_kda": "q, k, v, g, beta, scale=None, initial_state=None, "
    "output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None, **kwargs",
    "_forward_core": "self, mixed_qkv, b, a, core_attn_out",
    "_forward_core_fused_norm": "self, mixed_qkv, b, a, output_gate, core_attn_out",
    "_warmup_prefill_kernels": "self, qkv_or_qkvz, v_dim",
    "_forward": "self, mixed_qkv, g1, g2, beta, core_attn_out",
    "forward_cuda": "self, q, k, v, g, beta, initial_state, output_final_state, cu_seqlens=None, "
    "chunk_indices=None, chunk_offsets=None, use_qk_l2norm_in_kernel=True, core_attn_out=None, "
    "aiter_prefill_metadata=None",
}
GDN_LAYERS = "vllm.model_executor.layers.mamba.gdn"
PLACES = {
    "qwen": f"{GDN_LAYERS}.qwen_gdn_linear_attn",
    "olmo": f"{GDN_LAYERS}.olmo_gdn_linear_attn",
    "kimi": f"{GDN_LAYERS}.kimi_gdn_linear_attn",
    "k3": "vllm.models.kimi_k3.nvidia.kda",
    "k3_ops": "vllm.models.kimi_k3.nvidia.ops.third_party.kda",
    "glm": "vllm.models.glm5next.common.kda",
    "bailing": "vllm.model_executor.models.bailing_moe_v3",
}
CLASSES = {
    "qwen": "QwenGatedDeltaNetAttention",
    "olmo": "OlmoHybridGatedDeltaNetAttention",
    "kimi": "KimiGatedDeltaNetAttention",
}


def vllm_modules(version: str = "0.33.0") -> dict[str, types.ModuleType]:
    """The modules of a small vLLM, by name."""
    metadata = make_dataclass(
        "GDNAttentionMetadata", [*_COUNTS, *((name, Any, None) for name in _FIELDS)]
    )

    def layer(name: str, *methods: str) -> type:
        return type(name, (), {method: _says(method, VLLM[method]) for method in methods})

    registry: dict[str, type] = {}

    class CustomOp:
        def __new__(cls):
            return super().__new__(registry.get(cls.__name__, cls))

        def forward(self, *args, **kwargs):
            return self._forward_method(*args, **kwargs)

        __call__ = forward

    class ChunkGatedDeltaRule(CustomOp):
        def __init__(self) -> None:
            super().__init__()
            self.gdn_prefill_backend = "triton"
            self._forward_method = self.forward_cuda

        forward_cuda = _says("forward_cuda", VLLM["forward_cuda"])

    def context() -> Any:
        raise AssertionError("no forward context")

    common = {
        "GDNAttentionMetadata": metadata,
        "get_forward_context": context,
        "is_conv_state_dim_first": lambda: False,
        "eager_break_during_capture": lambda function: function,
    }
    convs = {n: _says(n, VLLM[n]) for n in ("causal_conv1d_fn", "causal_conv1d_update")}

    def functions(kind: str) -> dict[str, Any]:
        names = [name for name in VLLM if name.startswith(f"{kind}.")]
        return {n.partition(".")[2]: _says(n.partition(".")[2], VLLM[n]) for n in names}

    content: dict[str, dict[str, Any]] = {
        "vllm": {"__version__": version},
        "vllm.envs": {"VLLM_BATCH_INVARIANT": False},
        "vllm.model_executor.custom_op": {"op_registry_oot": registry, "CustomOp": CustomOp},
        PLACES["qwen"]: {
            **common,
            "ChunkGatedDeltaRule": ChunkGatedDeltaRule,
            CLASSES["qwen"]: layer(
                CLASSES["qwen"],
                "_forward_core",
                "_forward_core_fused_norm",
                "_warmup_prefill_kernels",
            ),
        },
        PLACES["olmo"]: {**common, CLASSES["olmo"]: layer(CLASSES["olmo"], "_forward_core")},
        PLACES["kimi"]: {**common, CLASSES["kimi"]: layer(CLASSES["kimi"], "_forward")},
        PLACES["k3"]: convs,
        PLACES["k3_ops"]: functions("k3"),
        PLACES["glm"]: {**convs, **functions("glm")},
        PLACES["bailing"]: {**convs, **functions("bailing")},
    }
    modules = {name: _module(name, **inside) for name, inside in content.items()}
    for name in list(modules):
        while "." in name:
            name = name.rpartition(".")[0]
            modules.setdefault(name, _module(name))
    return modules


# ---- SGLang --------------------------------------------------------------------------------------

SGLANG_LINEAR = "sglang.srt.layers.attention.linear"
SGLANG = {
    "causal_conv1d_update": "x, conv_state, weight, bias=None, activation=None, "
    "cache_seqlens=None, conv_state_indices=None, num_accept_tokens=None, "
    "intermediate_conv_window=None, intermediate_state_indices=None, retrieve_next_token=None, "
    "retrieve_next_sibling=None, retrieve_parent_token=None, pad_slot_id=-1, metadata=None, "
    "validate_data=False",
    "_convolve_prefill": "self, layer, forward_batch, mixed_qkv, conv_states, cache_indices",
    "packed_decode": "self, mixed_qkv, a, b, *, A_log, dt_bias, scale, ssm_states, "
    "cache_indices, num_v_heads, head_v_dim, **kwargs",
    "decode": "self, q, k, v, a, b, *, A_log, dt_bias, ssm_states, cache_indices, "
    "query_start_loc, **kwargs",
    "extend": "self, q, k, v, g, beta, *, ssm_states, cache_indices, query_start_loc, **kwargs",
    "target_verify": "self, A_log, dt_bias, q, k, v, a, b, *, ssm_states, cache_indices, "
    "query_start_loc, intermediate_states_buffer, intermediate_state_indices, cache_steps, "
    "retrieve_parent_token, **kwargs",
}


class KernelBackend(Enum):
    """Names of kernels; one that is not known is custom."""

    TRITON = "triton"
    FLASHINFER = "flashinfer"
    CUSTOM = "custom"

    @classmethod
    def _missing_(cls, value):
        return cls.CUSTOM


def sglang_modules(version: str = "0.5.23") -> dict[str, types.ModuleType]:
    """The modules of a small SGLang, by name."""

    class LinearAttnKernelBase:
        uses_state_checkpoints = False
        supports_fused_chain_verify = False
        supports_strided_target_verify_qkv = False
        supports_track_state_snapshot = False

    def triton(name: str) -> type:
        methods = ("packed_decode", "decode", "extend", "target_verify")
        inside = {method: _says(method, SGLANG[method]) for method in methods}
        return type(name, (LinearAttnKernelBase,), inside)

    gdn_kernel, kda_kernel = triton("TritonGDNKernel"), triton("TritonKDAKernel")

    def dispatcher(name: str, kernel: type, default: bool) -> type:
        def make(self, decode_backend, prefill_backend, verify_backend):
            for backend in (decode_backend, prefill_backend, verify_backend):
                if backend is not None and backend is not KernelBackend.TRITON:
                    raise ValueError(f"Unsupported backend: {backend}")
            self.decode_kernel = self.extend_kernel = self.verify_kernel = kernel()
            self.tree_verify_kernel = self.decode_kernel
            self.supports_packed_decode = True

        if default:
            make.__defaults__ = (None,)
        return type(name, (), {"__init__": make})

    gdn_dispatcher = dispatcher("GDNKernelDispatcher", gdn_kernel, True)
    kda_dispatcher = dispatcher("KDAKernelDispatcher", kda_kernel, False)

    class GDNAttnBackend:
        requires_contiguous_prefill_state = True
        _convolve_prefill = _says("_convolve_prefill", SGLANG["_convolve_prefill"])

        def __init__(self, backends) -> None:
            self.kernel_dispatcher = gdn_dispatcher(*backends)

        @staticmethod
        def _prefill_gates(layer, a, b):
            raise Original("_prefill_gates")

        def _init_target_verify_qkv_routing(self, forward_batch) -> None:
            self._use_strided_target_verify_qkv = False

    class KDAAttnBackend:
        _convolve_prefill = _says("_convolve_prefill", SGLANG["_convolve_prefill"])

        def __init__(self, backends) -> None:
            self.kernel_dispatcher = kda_dispatcher(*backends)

    def unset() -> Any:
        raise RuntimeError("no settings")

    def gating(A_log, a, b, dt_bias):
        raise Original("fused_gdn_gating")

    update = {"causal_conv1d_update": _says("causal_conv1d_update", SGLANG["causal_conv1d_update"])}
    content: dict[str, dict[str, Any]] = {
        "sglang": {"__version__": version},
        "sglang.srt.runtime_context": {"get_exec": unset},
        "sglang.srt.arg_groups.choices": {
            "LINEAR_ATTN_KERNEL_BACKEND_CHOICES": ["triton", "cutedsl", "flashinfer"]
        },
        f"{SGLANG_LINEAR}.kernels.kernel_backend": {"LinearAttnKernelBase": LinearAttnKernelBase},
        f"{SGLANG_LINEAR}.kernels.gdn_triton": {"TritonGDNKernel": gdn_kernel},
        f"{SGLANG_LINEAR}.kernels.kda_triton": {"TritonKDAKernel": kda_kernel},
        f"{SGLANG_LINEAR}.utils": {"LinearAttnKernelBackend": KernelBackend},
        f"{SGLANG_LINEAR}.gdn_backend": {
            **update,
            "GDNKernelDispatcher": gdn_dispatcher,
            "GDNAttnBackend": GDNAttnBackend,
            "fused_gdn_gating": gating,
        },
        f"{SGLANG_LINEAR}.kda_backend": {
            **update,
            "KDAKernelDispatcher": kda_dispatcher,
            "KDAAttnBackend": KDAAttnBackend,
        },
    }
    modules = {name: _module(name, **inside) for name, inside in content.items()}
    for name in list(modules):
        while "." in name:
            name = name.rpartition(".")[0]
            modules.setdefault(name, _module(name))
    return modules


def put_modules(monkeypatch: Any, modules: dict[str, types.ModuleType]) -> None:
    """Makes these the modules of their packages, without any others, while a test runs."""
    tops = {name.partition(".")[0] for name in modules}
    for name in list(sys.modules):
        if name.partition(".")[0] in tops:
            monkeypatch.delitem(sys.modules, name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(modules[parent], child, module)
