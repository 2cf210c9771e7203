"""What somebody reads who passes the wrong thing: one sentence that says what was expected."""

import re

import deltic
import deltic.integrations.transformers
import pytest
import torch
from deltic.fla.ops.gated_delta_rule import (
    chunk_gated_delta_rule,
    fused_recurrent_gated_delta_rule,
)
from deltic.fla.ops.kda import chunk_kda, fused_recurrent_kda
from deltic.layers import (
    Cache,
    DeltaNet,
    GatedDeltaNet,
    GatedRMSNorm,
    KimiDeltaAttention,
    RMSNorm,
    ShortConvolution,
)

X = torch.zeros(1, 8, 2, 16)
HAS_PROGRAM = hasattr(deltic._library.LIBRARY, "deltic_torch_program")
needs_program = pytest.mark.skipif(not HAS_PROGRAM, reason="built without CLI11 or nlohmann-json")

FLA = (
    chunk_gated_delta_rule,
    chunk_kda,
    fused_recurrent_gated_delta_rule,
    fused_recurrent_kda,
)
FIRST = {
    "chunk_cumsum": ("g", 1),
    "log_decay": ("g", 1),
    "l2norm": ("x", 1),
    "kkt": ("k", 1),
    "inverse": ("a", 1),
    "scores": ("q", 2),
    "scores_inverse": ("q", 2),
    "wy": ("k", 2),
    "delta_rule": ("q", 3),
    "recurrent": ("q", 3),
    "causal_conv1d": ("x", 2),
    "causal_conv1d_update": ("x", 3),
}


@pytest.mark.parametrize("function", FIRST)
def test_a_call_without_any_tensor(function):
    argument, count = FIRST[function]
    for value, got in (([1.0], "list"), ("text", "'text'"), (3, "3"), ("x" * 99, "str")):
        text = f"^{function}: {argument}: expected a tensor, got {got}$"
        with pytest.raises(TypeError, match=text):
            getattr(deltic, function)(*[value] * count)
    with pytest.raises(TypeError, match=f"^{function}: {argument}: expected a tensor, got none$"):
        getattr(deltic, function)(*[None] * count)


@pytest.mark.parametrize("place", range(3))
def test_none_is_no_tensor_as_a_list_is_none(place):
    q = torch.zeros(1, 4, 1, 16)
    for value, got in ((None, "none"), ([1.0], "list")):
        text = f"^delta_rule: {'qkv'[place]}: expected a tensor, got {got}$"
        with pytest.raises(TypeError, match=text):
            deltic.delta_rule(*[value if i == place else q for i in range(3)])


def test_memory_for_a_copy(capfd):
    """Strides that ask for a copy, of more than there is: no C++ stack, and no note about it."""
    wide = torch.empty(1).expand(1, 2**40, 1, 64)
    for function, call in {
        "causal_conv1d": lambda: deltic.causal_conv1d(wide[:, :, 0], torch.zeros(64, 4)),
        "l2norm": lambda: deltic.l2norm(wide),
        "delta_rule": lambda: deltic.delta_rule(wide, wide, wide),
    }.items():
        text = f"^{function}: memory: expected {2**48} bytes on the CPU, got none: out of memory$"
        with pytest.raises(MemoryError, match=text):
            call()
    assert capfd.readouterr() == ("", "")


def test_chunk_sizes():
    for size in (48, 0, -16, 2**62, -(2**70)):
        for name, call in {
            "delta_rule": lambda size=size: deltic.delta_rule(X, X, X, chunk_size=size),
            "kkt": lambda size=size: deltic.kkt(X, chunk_size=size),
        }.items():
            text = f"^{name}: chunk_size: expected 16, 32 or 64, got {size}$"
            with pytest.raises(ValueError, match=text):
                call()
    with pytest.raises(TypeError, match="^kkt: chunk_size: expected an int, got True$"):
        deltic.kkt(X, chunk_size=True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_other_kinds_of_tensors():
    nested = torch.nested.nested_tensor([X[0], X[0]])
    for wrong, kind in ((nested, "nested"), (X.to_sparse(), "sparse_coo")):
        with pytest.raises(TypeError, match=f"^delta_rule: q: expected a dense tensor, got {kind}"):
            deltic.delta_rule(wrong, X, X)
    with pytest.raises(TypeError, match="^delta_rule: split: expected a name or a number of tok"):
        deltic.delta_rule(X, X, X, split=None)


@pytest.mark.parametrize("function", FLA)
def test_functions_of_flash_linear_attention(function):
    name = function.__name__
    with pytest.raises(TypeError, match=f"^{name}: q: expected a tensor, got list$"):
        function([1.0], X, X, X, beta=X[..., 0])
    with pytest.raises(TypeError, match=f"^{name}: v: expected a tensor, got none$"):
        function(X, X, None, X, beta=X[..., 0])
    g = X if "kda" in name else X[..., 0]
    with pytest.raises(TypeError, match=f"^{name}: k: expected fp32, bf16 or fp16, got int32$"):
        function(X, X.int(), X, g, beta=X[..., 0])
    with pytest.raises(TypeError, match=f"^{name}: scale: expected a float, got 'a'$"):
        function(X, X, X, g, beta=X[..., 0], scale="a")
    with pytest.raises(TypeError, match=f"^{name}: beta: expected fp32, bf16 or fp16, got int32$"):
        function(X, X, X, g, beta=X[..., 0].int())


def test_the_gate_of_the_other_operator():
    """One per channel would be computed, as another operator than the one that was asked for."""
    with pytest.raises(ValueError, match=r"^chunk_gated_delta_rule: `g` must have the shape \["):
        chunk_gated_delta_rule(X, X, X, g=X, beta=X[..., 0])


def test_names_of_the_package():
    """What an editor offers: the documented names."""
    public = {name for name in dir(deltic) if not name.startswith("__")}
    assert public == {*deltic.__all__, "fla", "integrations", "layers"}
    assert "__version__" in dir(deltic)
    assert all(hasattr(deltic, name) for name in dir(deltic))


def test_enable_takes_names():
    enable = deltic.integrations.transformers.enable
    for models in (5, object(), True):
        kind = type(models).__name__
        with pytest.raises(TypeError, match=f"^enable: models: expected None, or names .*{kind}$"):
            enable(models)


# ---- explain -------------------------------------------------------------------------------------

AMX = deltic.show_config(mode="dicts")["implementations"]["forward"].split()


@pytest.mark.skipif("cpu.amx" not in AMX, reason="built without AMX")
@pytest.mark.parametrize("by_name", [True, False])
def test_explain_says_that_a_setting_restricts_it(by_name, monkeypatch):
    if not by_name:
        monkeypatch.setenv("DELTIC_IMPL", "cpu.amx")
    said = str(deltic.explain(X, X, X, impl="cpu.amx" if by_name else None))
    restricted = "nothing runs this call: cpu.amx alone may (impl or DELTIC_IMPL), and does not"
    assert restricted in said and "no implementation takes" not in said
    refusal = r"cpu.amx +no +named \(impl or DELTIC_IMPL\), but does not take the call: \w+"
    assert re.search(refusal, said)
    assert "takes the call, but another was named" in said


def test_explain_of_cuda_in_a_build_without():
    if deltic.info()["cuda"] != "no":
        pytest.skip("this build has CUDA support")
    text = "this build has no CUDA support (build the package where nvcc is found, or with DELTIC_"
    assert text in str(deltic.explain(X, X, X, device="cuda"))
    if HAS_PROGRAM:
        assert text in str(deltic.explain("forward K=16", device="cuda"))


@needs_program
@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("forward K={16,32}", "line: expected one case, got braces, which stand for several: "),
        ("{{{", "operation: expected one of forward|decode|"),
        ("hello world", "operation: expected one of forward|decode|"),
        ("", "expected an operation, got an empty line"),
        ("forward fast", "line: expected key=value, got 'fast'"),
    ],
)
def test_explain_of_other_texts_shows_a_line(line, text):
    with pytest.raises(ValueError, match="^explain: case: " + re.escape(text)) as error:
        deltic.explain(line)
    example = str(error.value).rpartition(" (a line: ")[2].removesuffix(")")
    assert deltic.explain(example).implementation is not None


# ---- Layers --------------------------------------------------------------------------------------

LAYERS = {
    DeltaNet: dict(hidden_size=64, num_heads=2),
    GatedDeltaNet: dict(hidden_size=64, num_heads=2, head_dim=16),
    KimiDeltaAttention: dict(hidden_size=64, num_heads=2, head_dim=16),
}


@pytest.mark.parametrize("kind", LAYERS)
def test_rows_of_another_dtype(kind):
    layer = kind(**LAYERS[kind])
    for dtype, name in ((torch.bfloat16, "bf16"), (torch.int32, "int32"), (torch.bool, "bool")):
        text = f"^{kind.__name__}: hidden_states: expected fp32 as the layer's weights .*got {name}"
        with pytest.raises(TypeError, match=text):
            layer(torch.zeros(1, 4, 64).to(dtype))
    with pytest.raises(TypeError, match="expected bf16 as the layer's weights .*, got fp32"):
        layer.bfloat16()(torch.zeros(1, 4, 64))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.zeros(1, 4, 64))[0].dtype == torch.bfloat16


@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (dict(hidden_size="64"), TypeError, "hidden_size: expected an int, got '64'"),
        (dict(hidden_size=0), ValueError, "hidden_size: expected at least 1, got 0"),
        (dict(num_heads=2.0), TypeError, "num_heads: expected an int, got 2.0"),
        (dict(num_heads=True), TypeError, "num_heads: expected an int, got True"),
        (dict(expand_v="a"), TypeError, "expand_v: expected a float, got 'a'"),
        (dict(conv_size=4.0), TypeError, "conv_size: expected an int, got 4.0"),
        (dict(layer_idx="a"), TypeError, "layer_idx: expected an int, got 'a'"),
        (dict(layer_idx=-1), ValueError, "layer_idx: expected at least 0, got -1"),
        (dict(norm_eps="a"), TypeError, "eps: expected a float, got 'a'"),
        (dict(norm_eps=-1.0), ValueError, "eps: expected a finite number of at least 0, got -1.0"),
    ],
)
def test_arguments_of_layers(kind, wrong, error, text):
    with pytest.raises(error, match=f"^(?:Gated)?\\w+: {text}$"):
        kind(**LAYERS[kind] | wrong)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: ShortConvolution("a", 4), TypeError, "hidden_size: expected an int, got 'a'"),
        (lambda: ShortConvolution(16, 0), ValueError, "kernel_size: expected at least 1, got 0"),
        (lambda: ShortConvolution(16, 4)([1]), TypeError, "x: expected a tensor, got list"),
        (
            lambda: ShortConvolution(16, 4)(torch.zeros(1, 4, 15)),
            ValueError,
            r"x: expected shape \[batch, tokens, 16\], got \[1, 4, 15\]",
        ),
        (lambda: RMSNorm(16)(X.int()), TypeError, "x: expected a float dtype, got int32"),
        (lambda: RMSNorm(15)(X), ValueError, r"x: expected shape \[..., 15\], got \[1, 8, 2, 16\]"),
        (lambda: GatedRMSNorm(16, activation="relu"), ValueError, "activation: expected 'swish', "),
        (
            lambda: KimiDeltaAttention(hidden_size=32, lower_bound="a"),
            TypeError,
            "lower_bound: expected a float, got 'a'",
        ),
        (
            lambda: DeltaNet(hidden_size=32)(torch.zeros(1, 2, 32), use_cache="no"),
            TypeError,
            "use_cache: expected a bool, got 'no'",
        ),
        (
            lambda: RMSNorm(16, eps=float("nan")),
            ValueError,
            "eps: expected a finite number of at least 0, got nan",
        ),
        (
            lambda: GatedRMSNorm(16, eps=float("inf")),
            ValueError,
            "eps: expected a finite number of at least 0, got inf",
        ),
        (lambda: GatedRMSNorm(16)(X, None), TypeError, "gate: expected a tensor, got none"),
        (lambda: GatedRMSNorm(16)(X, X[:, :1]), ValueError, "gate: expected x's shape"),
    ],
)
def test_arguments_of_modules(call, error, text):
    with pytest.raises(error, match=f"^\\w+: {text}"):
        call()


def test_arguments_of_a_cache():
    cache = Cache()
    cache.update(torch.zeros(2, 1, 4, 4), layer_idx=0, offset=5)
    for indices in ("ab", None, 3, [0.5], [[0, 1]], torch.tensor([True, False])):
        with pytest.raises(TypeError, match="^Cache: reorder: expected a list or tensor"):
            cache.reorder(indices)
    for indices in ([0, 2], [-1], torch.tensor([7])):
        with pytest.raises(IndexError, match="^Cache: reorder: expected numbers from 0 to 1, got"):
            cache.reorder(indices)
    for length in ("a", None, 1.5, True):
        with pytest.raises(TypeError, match="^Cache: crop: expected a number of tokens, got"):
            cache.crop(length)
    for times in ("a", -1, 0.5, 0, True):
        with pytest.raises(ValueError, match="^Cache: batch_repeat_interleave: expected a number"):
            cache.batch_repeat_interleave(times)
    with pytest.raises(ValueError, match="^Cache: layer_idx: expected at least 0, got -1"):
        cache.update(layer_idx=-1)
    for layer_idx in (None, "a", True):
        with pytest.raises(TypeError, match="^Cache: layer_idx: expected an int, got"):
            cache.update(layer_idx=layer_idx)
    with pytest.raises(TypeError, match="^Cache: recurrent_state: expected a tensor, got 'x'$"):
        cache.update("x", layer_idx=0)
    with pytest.raises(IndexError, match="^Cache: layer_idx: expected .* its 1 layers, got 3$"):
        cache[3]
    with pytest.raises(TypeError, match="^Cache: layer_idx: expected .* its 1 layers, got 'a'$"):
        cache["a"]
    cache.reorder([1, 1, 0])
    assert cache[0]["recurrent_state"].shape[0] == 3
    cache.reorder([])
    assert cache[0]["recurrent_state"].shape[0] == 0 and cache.get_seq_length() == 5


# ---- Names of arguments, and tensors without dimensions ------------------------------------------


def test_the_other_argument_has_its_name_of_here():
    """An error that speaks of two arguments names both as the function's parameters."""
    pool, state = torch.zeros(2, 2, 16, 16), torch.zeros(2, 8, 3)
    inside = pool.view(-1)[: X.numel()].view(X.shape)
    text = "^decode: state_pool: expected memory of its own, got an overlap with out$"
    with pytest.raises(ValueError, match=text):
        deltic.decode(X, X, X, state_pool=pool, out=inside)
    x, weight = torch.zeros(2, 8), torch.zeros(8, 4)
    for changes, argument, other in (
        (dict(out=state.view(-1)[:16].view(2, 8)), "state", "out"),
        (dict(write_state=state), "write_state", "state"),
    ):
        text = f"^causal_conv1d_update: {argument}: expected memory of its own, got an overlap with"
        with pytest.raises(ValueError, match=f"{text} {other}$"):
            deltic.causal_conv1d_update(x, state, weight, **changes)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_out_has_the_shape_of_the_input(device):
    x, state, weight = torch.zeros(2, 8), torch.zeros(2, 8, 3), torch.zeros(8, 4)
    for given, out in ((x, x[:, None]), (x[:, None], x)):
        shapes = re.escape(f"{list(given.shape)}, got {list(out.shape)}")
        tensors = [t.clone().to(device) for t in (given, state, weight, out)]
        text = f"^causal_conv1d_update: out: expected shape {shapes}$"
        with pytest.raises(ValueError, match=text):
            deltic.causal_conv1d_update(*tensors[:3], out=tensors[3])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_lists_without_a_dimension(device):
    """One number is no list, though it has as many elements as a list of one."""
    x, one = X.to(device), torch.tensor(0, device=device)
    pool = torch.zeros(1, 2, 16, 16, device=device)
    for call, argument in (
        (lambda: deltic.delta_rule(x, x, x, cu_seqlens=one), "cu_seqlens"),
        (lambda: deltic.decode(x, x, x, state_pool=pool, read_index=one), "read_index"),
        (lambda: deltic.decode(x, x, x, state_pool=pool, write_index=one), "write_index"),
        (lambda: deltic.explain(x, x, x, cu_seqlens=one), "cu_seqlens"),
    ):
        text = rf"^\w+: {argument}: expected at least one dimension, got shape \[\]$"
        with pytest.raises(ValueError, match=text):
            call()
    g = torch.zeros(1, 8, 1, device=device)
    parameter = torch.tensor(0.0, device=device)
    found = deltic.log_decay(g, gate="softplus", A_log=parameter, dt_bias=parameter)
    assert found.shape == g.shape


def test_numbers_beyond_fp32():
    """Made infinite on the way they would be refused as what nobody passed."""
    for value, said in (
        (1e39, "1e+39"),
        (-(10**50), str(-(10**50))),
        (10**400, "an int beyond 1e60"),
    ):
        text = f"^delta_rule: scale: expected a number that fp32 holds, got {re.escape(said)}$"
        with pytest.raises(ValueError, match=text):
            deltic.delta_rule(X, X, X, scale=value)
    with pytest.raises(ValueError, match="^recurrent: scale: expected a finite number, got inf$"):
        deltic.recurrent(X, X, X, scale=float("inf"))
    text = r"^delta_rule: checkpoints: expected \(cu, tokens, slots, states\), got 0 of them$"
    with pytest.raises(ValueError, match=text):
        deltic.delta_rule(X, X, X, checkpoints=())
    with pytest.raises(TypeError, match="^explain: q: expected a tensor, or one text .*got none$"):
        deltic.explain()


# ---- What goes together, and what does not -------------------------------------------------------


def test_a_final_state_beside_a_pool():
    """Who passed True reads True."""
    pool, taps = torch.zeros(1, 2, 16, 16), torch.zeros(1, 16, 3)
    for call, name, argument in (
        (lambda: deltic.delta_rule(X, X, X, state_pool=pool, output_final_state=True), "", ""),
        (
            lambda: deltic.causal_conv1d(
                X[:, :, 0], torch.zeros(16, 4), state=taps, output_final_state=True
            ),
            "causal_conv1d",
            "state",
        ),
    ):
        name, argument = name or "delta_rule", argument or "state_pool"
        text = f"^{name}: output_final_state: expected False with {argument}, .*, got True$"
        with pytest.raises(ValueError, match=text):
            call()


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_out_of_one_token_is_printed_as_it_was_given(device):
    x, state, weight, out = (
        torch.zeros(shape, device=device) for shape in ((2, 8), (2, 8, 3), (8, 4), (2, 7))
    )
    text = r"^causal_conv1d_update: out: expected shape \[2, 8\], got \[2, 7\]$"
    with pytest.raises(ValueError, match=text):
        deltic.causal_conv1d_update(x, state, weight, out=out)


def test_decode_advises_what_it_takes():
    q, pool = X.clone().requires_grad_(), torch.zeros(1, 2, 16, 16)
    text = r"^decode: state_pool: .*use torch.no_grad\(\), or recurrent with initial_state\), got a"
    with pytest.raises(ValueError, match=text):
        deltic.decode(q, X, X, state_pool=pool)
    text = r"^delta_rule: state_pool: .*use torch.no_grad\(\), or initial_state\), got a tensor$"
    with pytest.raises(ValueError, match=text):
        deltic.delta_rule(q, X, X, state_pool=pool)


def test_flags_of_initial_states():
    state = torch.randn(1, 2, 16, 16)
    found = [
        deltic.delta_rule(X + 1, X, X, initial_state=state, has_initial_state=flags)[0]
        for flags in (torch.tensor([False]), torch.tensor([0], dtype=torch.uint8))
    ]
    assert torch.equal(*found)
    for dtype, name in ((torch.int64, "int64"), (torch.float32, "fp32"), (torch.int8, "int8")):
        text = f"^delta_rule: has_initial_state: expected bool or uint8, got {name}$"
        with pytest.raises(TypeError, match=text):
            flags = torch.ones(1, dtype=dtype)
            deltic.delta_rule(X, X, X, initial_state=state, has_initial_state=flags)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_table_of_slots_needs_accepted_counts(device):
    x, pool = X.to(device), torch.zeros(9, 2, 16, 16, device=device)
    table = torch.zeros(1, 8, dtype=torch.int64, device=device)
    hint = r"\(a table \[N,T'\] needs accepted\)"
    text = rf"read_index: expected one dimension {hint}, got shape \[1, 8\]"
    for function in (deltic.decode, deltic.delta_rule):
        with pytest.raises(ValueError, match=f"^{function.__name__}: {text}$"):
            function(x, x, x, state_pool=pool, read_index=table)
    with pytest.raises(
        ValueError, match=r"read_index: expected one dimension, got shape \[1, 8, 1"
    ):
        deltic.decode(x, x, x, state_pool=pool, read_index=table[..., None])


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_bits_of_gradients(device):
    """The operators themselves, as torch.ops has them."""
    x, weight = X.to(device), torch.zeros(16, device=device)
    rows, taps = X[:, :, 0].to(device), torch.zeros(16, 4, device=device)
    ops, refused = deltic._library.OPS, (ValueError, RuntimeError)
    for want in (8, 99, -1):
        with pytest.raises(refused, match="want: expected bits of 3 gradients, 0 to 7"):
            ops.rmsnorm_backward(x, x, None, weight, 1e-5, "", want)
    with pytest.raises(refused, match="want: expected bits of 4 gradients, 0 to 15, got 16"):
        ops.conv_backward(rows, None, rows, taps, None, None, None, None, "", 16)
    given = [2, *[None] * 17]
    given[5] = given[13] = torch.zeros(1, 8, 2, device=device)
    assert ops.block_backward(*given)[4].shape == (1, 8, 2)
    with pytest.raises(refused, match="want: expected bits of 9 gradients, 0 to 511, got 512"):
        ops.block_backward(*given, want=512)
    names = [argument.name for argument in ops.backward.default._schema.arguments]
    tensors = dict.fromkeys(names[: names.index("scale")])
    tensors |= dict.fromkeys(("q", "k", "v", "d_o"), x)
    assert ops.backward(**tensors)[0].shape == x.shape
    with pytest.raises(refused, match="want: expected bits of 9 gradients, 0 to 511, got 512"):
        ops.backward(**tensors, want=512)


@pytest.mark.parametrize("kind", LAYERS)
def test_padding_between_tokens(kind):
    layer = kind(**LAYERS[kind]).eval()
    x = torch.randn(2, 5, 64)
    text = (
        f"^{kind.__name__}: attention_mask: expected padding to the left or right .*them in row 1$"
    )
    for hole in ([1, 0, 1, 0, 0], [0, 1, 0, 1, 1], [1, 1, 1, 0, 1]):
        for dtype in (torch.int64, torch.bool):
            with pytest.raises(ValueError, match=text):
                layer(x, attention_mask=torch.tensor([[1] * 5, hole], dtype=dtype))
    for row in ([0, 1, 1, 1, 0], [0, 0, 0, 0, 0], [1, 1, 1, 1, 0], [0, 0, 0, 0, 1]):
        layer(x, attention_mask=torch.tensor([[1] * 5, row]))
    # A row that was padded on the right goes on: only the columns of this call count.
    layer(x, attention_mask=torch.tensor([[1] * 7, [1, 0, 1, 1, 1, 1, 1]]))


def test_a_negated_pool():
    """torch would end in an assertion of its own."""
    pool = torch._neg_view(torch.zeros(1, 2, 16, 16))
    text = "^decode: state_pool: expected a tensor that can be written in place, got a negated view"
    with pytest.raises(ValueError, match=text):
        deltic.decode(X, X, X, state_pool=pool)


def test_shapes_of_meta_rows():
    x, weight = X.to("meta"), torch.zeros(15, device="meta")
    for rows in (X, x):
        text = r"^rms_norm: weight: expected shape \[16\], got \[15\]$"
        with pytest.raises(ValueError, match=text):
            deltic.rms_norm(rows, weight.to(rows.device) if rows is x else torch.zeros(15))
        with pytest.raises(
            ValueError, match="^rms_norm: x: expected a width of at least 1, got 0$"
        ):
            deltic.rms_norm(rows[..., :0])
