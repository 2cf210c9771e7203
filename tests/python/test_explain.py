"""deltic.explain and deltic.show_config."""

import deltic
import deltic._explain
import pytest
import torch
from support import make, python
from test_arguments import BASE, Q

HAS_PROGRAM = hasattr(deltic._library.LIBRARY, "deltic_torch_program")
needs_program = pytest.mark.skipif(not HAS_PROGRAM, reason="built without CLI11 or nlohmann-json")


def rows(device="cpu", **options):
    case = make(**options)
    return {name: x.to(device) for name, x in case.tensors.items()} | case.options


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("function", ["delta_rule", "recurrent", "decode"])
def test_it_names_what_runs(function, device):
    """The one that runs is the one that the log of decisions names, and nothing is written."""
    given = {
        name: x.to(device) if isinstance(x, torch.Tensor) else x
        for name, x in BASE[function].items()
    }
    pool = given.get("state_pool")
    before = None if pool is None else pool.clone()
    found = deltic.explain(**given, function=getattr(deltic, function))
    names = deltic.show_config(mode="dicts")["implementations"][found.operation].split()
    assert found.operation == ("forward" if function == "delta_rule" else "decode")
    assert {x.name for x in found.choices} == set(names)
    chosen = [x.name for x in found.choices if x.chosen]
    assert chosen == [found.implementation] == [found.choices[0].name]
    assert set(found.refused) == {x.name for x in found.choices if not x.accepts}
    assert found.workspace_bytes > 0 and found.saved_bytes == 0 and found.backward is None
    assert found.copies == () and found.divisions == () and found.schedule == ""
    assert device == "meta" or before is None or torch.equal(pool, before)
    text = str(found)
    assert repr(found) == text and text.startswith(f"{function}(q fp32 [1,40,2,16], ")
    for choice in found.choices:
        line = f"  {choice.name:<{max(map(len, names))}}  {'yes' if choice.accepts else 'no '}  "
        assert line + choice.sentence in text.splitlines()
    assert f"  workspace: {found.workspace_bytes:,} bytes" in text


def test_it_agrees_with_the_log():
    said = python(
        "import logging, os, sys\n"
        "logging.basicConfig(stream=sys.stdout, format='%(message)s')\n"
        "import deltic, torch\n"
        "x = torch.ones(1, 8, 1, 16)\n"
        "for name in (None, 'cpu.plain'):\n"
        "    if name is not None:\n"
        "        os.environ['DELTIC_IMPL'] = name\n"
        "    print('explained', deltic.explain(x, x, x).implementation)\n"
        "    deltic.delta_rule(x, x, x)\n",
        DELTIC_LOG="dispatch",
    )
    _, *parts = said.split("explained ")
    names = [part.split()[0] for part in parts]
    assert len(names) == 2 and names[1] == "cpu.plain" and names[0].startswith("cpu.")
    for name, part in zip(names, parts, strict=True):
        ran = [line for line in part.splitlines() if ": chosen (" in line and "q fp32" in line]
        assert ran and all(line.startswith(f"forward: {name}: chosen") for line in ran), said


def test_a_named_implementation():
    found = deltic.explain(**BASE["delta_rule"], impl="cpu.plain")
    assert found.implementation == "cpu.plain"
    assert found.choices[0].sentence == "named by the caller"
    with pytest.raises(ValueError, match="^delta_rule: impl: expected"):
        deltic.explain(**BASE["delta_rule"], impl="none")


@pytest.mark.parametrize("recompute", [True, False])
def test_gradients(recompute):
    given = dict(BASE["delta_rule"], q=Q.clone().requires_grad_())
    found = deltic.explain(**given, recompute=recompute)
    o, _ = deltic.delta_rule(**given, recompute=recompute)
    assert found.saved_bytes == o.grad_fn.saved_tensors[-1].numel() > 0
    assert found.backward.operation == "backward" and found.backward.implementation
    assert found.backward.workspace_bytes > 0
    assert "gradients of delta_rule" in str(found) and "kept for gradients: " in str(found)
    with torch.no_grad():
        assert deltic.explain(**given).backward is None
    by_token = deltic.explain(**given, function=deltic.recurrent)
    assert by_token.backward.implementation and by_token.saved_bytes == 0


def test_a_beta_per_value_column():
    beta = torch.rand(1, 40, 4, 8)
    found = deltic.explain(**dict(BASE["delta_rule"], beta=beta))
    assert found.operation == "decode" and found.call.startswith("delta_rule(")


def test_copies_are_said():
    wide = torch.zeros(1, 40, 2, 32)[..., ::2]
    found = deltic.explain(**dict(BASE["delta_rule"], q=wide))
    assert found.copies == ("q",) and "copied first, because of their strides: q" in str(found)
    pool = torch.zeros(3, 4, 16, 16)[..., ::2]
    with pytest.raises(ValueError, match="^decode: state_pool: expected stride 1"):
        deltic.explain(**dict(BASE["decode"], state_pool=pool), function=deltic.decode)


def test_sizes_that_nobody_has_memory_for():
    q = torch.empty(1, 2**36, 16, 128, device="meta", dtype=torch.bfloat16)
    found = deltic.explain(q, q, q, output_final_state=True)
    assert found.implementation and found.workspace_bytes > 0
    empty = torch.empty(1, 0, 2, 16)
    assert deltic.explain(empty, empty, empty).implementation


def test_packed_sequences_checkpoints_and_gate_parameters():
    given = rows("meta", gate="channel", form="softplus", lengths=[30, 0, 40])
    entry = (torch.tensor([0, 1, 1, 1]), torch.tensor([16]), torch.tensor([0]))
    checkpoints = tuple(x.to("meta") for x in (*entry, torch.zeros(1, 2, 32, 16)))
    found = deltic.explain(**given, checkpoints=checkpoints)
    assert found.implementation
    for word in ("cu_seqlens int64 [4]", "A_log fp32 [2]", "checkpoints.tokens int64 [1]"):
        assert word in found.call
    assert "gate=softplus" in found.call


def test_a_device_that_is_not_here():
    q = torch.empty(1, 4096, 16, 128, device="meta", dtype=torch.bfloat16)
    found = deltic.explain(q, q, q, device="cuda")
    if deltic.info()["cuda"] == "no":
        assert found.choices == () and found.implementation is None
        assert "no implementation takes this call: this build has no CUDA support" in str(found)
    else:
        assert found.choices and all(x.name.startswith(("cuda", "ref")) for x in found.choices)
        assert found.divisions and found.schedule


X = torch.zeros(1, 8, 1, 16)
BAD = {
    "nothing": ((), {}, TypeError, "^explain: q: expected a tensor, or one text .*, got none$"),
    "none": ((None, X, X), {}, TypeError, "^explain: q: expected a tensor, or one text"),
    "no k": ((X, None, X), {}, TypeError, "^delta_rule: k: expected a tensor, got none"),
    "number": ((X, X, 3.0), {}, TypeError, "^delta_rule: v: expected a tensor, got 3.0"),
    "shape": ((X, X[:, :3], X), {}, ValueError, r"^delta_rule: k: expected shape \[1, 8, 1, 16\]"),
    "rank": ((X[0], X, X), {}, ValueError, r"^delta_rule: q: expected shape \[B,T,H,K\]"),
    "many dimensions": ((X[None, None, None, None], X, X), {}, ValueError, "^delta_rule: q: "),
    "dtype": ((X, X, X.int()), {}, TypeError, "^delta_rule: v: expected .*, got int32"),
    "other dtype": ((X, X, X.to(torch.int8)), {}, TypeError, "^delta_rule: v: .*, got int8"),
    "list": (
        (X, X, X),
        dict(cu_seqlens=torch.zeros(2)),
        TypeError,
        "^delta_rule: cu_seqlens: expected int32 or int64, got fp32",
    ),
    "bool list": (
        (X, X, X),
        dict(cu_seqlens=torch.ones(2, dtype=torch.bool)),
        TypeError,
        "^delta_rule: cu_seqlens: expected int32 or int64, got bool",
    ),
    "sparse": ((X.to_sparse(), X, X), {}, TypeError, "^delta_rule: q: expected a dense tensor"),
    "keyword": ((X, X, X), dict(scal=1.0), TypeError, "unexpected keyword argument 'scal'"),
    "gate": ((X, X, X), dict(gate="relu"), ValueError, "^delta_rule: gate: expected one of"),
    "device": ((X, X, X), dict(device="tpu"), ValueError, "^explain: device: expected 'cpu' or"),
    "function": ((X,), dict(function=deltic.kkt), ValueError, "^explain: function: expected one"),
    "no function": ((X,), dict(function=None), ValueError, "^explain: function: expected one"),
    "overflow": (
        (torch.empty(2**40, 2**20, 1, 1, device="meta"),) * 3,
        {},
        ValueError,
        "^delta_rule: ",
    ),
    "case": (("forward gate=x",), {}, ValueError, "^explain: .*gate"),
    "empty case": (("",), {}, ValueError, "^explain: "),
    "zero byte": (("forward\0",), {}, ValueError, "^explain: case: expected a text without zero"),
    "case and option": (("forward",), dict(scale=1.0), TypeError, "^explain: scale: expected impl"),
    "case and impl": (("forward",), dict(impl=3), TypeError, "^explain: impl: expected"),
    "case of no implementation": (("forward",), dict(impl="x"), ValueError, "^explain: .*impl"),
}


@pytest.mark.parametrize("name", BAD)
def test_errors(name):
    args, options, kind, text = BAD[name]
    if args and isinstance(args[0], str) and not HAS_PROGRAM:
        pytest.skip("built without the program")
    with pytest.raises(kind, match=text):
        deltic.explain(*args, **options)


@needs_program
def test_a_case(capfd):
    found = deltic.explain("forward gate=head dense=1x100 H=2 dtype=bf16")
    assert found.operation == "forward" and found.implementation == found.choices[0].name
    assert found.call.startswith("forward gate=head form=log_decay dense=1x100 H=2 HV=2")
    assert found.workspace_bytes > 0 and str(found).startswith(found.call)
    q = torch.empty(1, 100, 2, 64, dtype=torch.bfloat16, device="meta")
    g, beta = torch.empty(1, 100, 2, device="meta"), torch.empty(1, 100, 2, device="meta")
    same = deltic.explain(q, q, q, g=g, beta=beta, output_final_state=True)
    assert same.choices == found.choices and same.workspace_bytes == found.workspace_bytes
    assert deltic.explain("kkt gate=none seqs=10", impl="cpu.plain").implementation == "cpu.plain"
    backward = deltic.explain("backward gate=head dense=1x300 save=all")
    assert backward.saved_bytes > 0 and "save=none: 0 bytes kept" in str(backward)
    assert capfd.readouterr().out == ""


def test_a_case_without_the_program(monkeypatch):
    class Without:
        pass

    monkeypatch.setattr(deltic._explain, "LIBRARY", Without())
    with pytest.raises(NotImplementedError, match="^explain: case: expected tensors"):
        deltic.explain("forward")


def test_show_config(capsys):
    found = deltic.show_config(mode="dicts")
    assert capsys.readouterr().out == ""
    facts = deltic.info()
    assert found["build"]["version"] == facts["version"] == deltic.__version__
    assert found["machine"]["CPU code used"].split() == facts["cpu.used"].split()
    assert set(found["machine"]["CPU code used"].split()) <= set(found["build"]["CPU code"].split())
    assert found["process"]["torch"] == torch.__version__
    assert found["process"]["threads"] == str(deltic.get_num_threads())
    assert set(found["implementations"]) >= {"forward", "decode", "backward", "conv"}
    assert found["only when named"]["reference"].split() == list(found["implementations"])
    assert not any(name.startswith("cpu.") for name in found["only when named"])
    assert deltic.show_config() is None
    text = capsys.readouterr().out
    assert text.startswith(f"deltic {deltic.__version__}\n\nbuild\n")
    for section in found.values():
        assert all(value in text for value in section.values())
    with pytest.raises(ValueError, match="^show_config: mode: expected 'stdout' or 'dicts', got 3"):
        deltic.show_config(3)
