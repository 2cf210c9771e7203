"""The package in a process: import, versions, threads, forks, one OpenMP runtime."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import deltic
import pytest
import torch
from deltic import _library
from support import make, python


def test_version_and_types():
    assert deltic.__version__.count(".") == 2
    assert (Path(deltic.__file__).parent / "py.typed").exists()


def test_an_old_torch_is_refused():
    for version in ("2.10.1", "1.13.0+cpu", "unknown"):
        with pytest.raises(ImportError, match="deltic: torch: expected version 2.11 or later, got"):
            _library.check_torch_version(version)
    for version in ("2.11.0", "2.15.0+cu130", "3.0.0a0"):
        _library.check_torch_version(version)


def test_one_openmp_runtime():
    """The operators use the runtime that torch brought; none comes with them."""
    code = (
        "import torch, deltic\n"
        "q = torch.randn(1, 200, 4, 16)\n"
        "deltic.delta_rule(q, q, q)\n"
        "maps = open('/proc/self/maps').read().split()\n"
        "names = {x for x in maps if x.startswith('/')}\n"
        "print(sum(any(n in x.rsplit('/', 1)[1] for n in ('libgomp', 'libomp', 'libiomp'))"
        " for x in names))"
    )
    assert python(code) == "1"


def work():
    x = make(T=300, gate="channel").tensors
    return deltic.delta_rule(x["q"], x["k"], x["v"], g=x["g"])[0]


def test_threads_follow_torch():
    code = (
        "import os, torch, deltic\n"
        "torch.set_num_threads({n})\n"
        "q = torch.randn(2, 256, 8, 64)\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "deltic.delta_rule(q, q, q, qk_l2norm=True)\n"
        "print(len(os.listdir('/proc/self/task')) - before)"
    )
    assert [python(code.replace("{n}", str(n))) for n in (1, 3)] == ["0", "2"]


def test_threads_change_no_bit():
    before = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 5):
            torch.set_num_threads(n)
            results.append(work())
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(results[0], x) for x in results)


def test_calls_from_many_threads():
    expected = work()
    found = [None] * 4

    def call(i):
        found[i] = work()

    threads = [threading.Thread(target=call, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(expected, x) for x in found)


def test_a_forked_child_does_not_hang():
    q = torch.randn(2, 256, 8, 64)
    expected = deltic.delta_rule(q, q, q, qk_l2norm=True)[0].numpy().tobytes()
    child = os.fork()
    if child == 0:
        # Only our operator: torch's own parallel loops may hang here.
        found = deltic.delta_rule(q, q, q, qk_l2norm=True)[0].numpy().tobytes()
        threads = len(os.listdir("/proc/self/task"))
        os._exit(0 if found == expected and threads == 1 else 1)
    for _ in range(200):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == child:
            break
        time.sleep(0.1)
    else:
        os.kill(child, 9)
        os.waitpid(child, 0)
        pytest.fail("the child hangs")
    assert os.waitstatus_to_exitcode(status) == 0


class Items(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        return work()


def test_data_loader_workers():
    expected = work()
    loader = torch.utils.data.DataLoader(
        Items(), batch_size=None, num_workers=2, multiprocessing_context="fork", timeout=60
    )
    items = list(loader)
    assert len(items) == 4 and all(torch.equal(expected, x) for x in items)


LOOP = """
import os, signal, time
import torch, deltic

# A shell's background job starts with SIGINT ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(2)

def count():
    return len(os.listdir("/proc/self/task"))

x = torch.randn(1, 4096, 4, 64, requires_grad=True)
small = torch.randn(1, 100, 2, 32, requires_grad=True)

def check():
    o, _ = deltic.delta_rule(small, small, small, qk_l2norm=True)
    (gradient,) = torch.autograd.grad(o.sum(), small)
    return o.detach(), gradient

def work():
    o, _ = deltic.delta_rule(x, x, x, qk_l2norm=True)
    o.sum().backward()

work()
expected = check()
before = count()
for _ in range(2):
    begin = time.monotonic()
    try:
        print("working", flush=True)  # from here on an interruption is expected, however late
        while time.monotonic() < begin + 60:
            work()
    except KeyboardInterrupt:
        after = count()
        same = all(torch.equal(a, b) for a, b in zip(expected, check()))
        print("interrupted", after - before, count() - before, same, flush=True)
    else:
        print("not interrupted", flush=True)
"""


def test_an_interrupted_call_leaves_no_thread_behind():
    """Twice: the call after an interruption can be interrupted as well."""
    process = subprocess.Popen(
        [sys.executable, "-c", LOOP], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        for _ in range(2):
            assert process.stdout.readline() == "working\n", process.stderr.read()
            time.sleep(0.3)  # some calls on, and inside of one
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == "interrupted 0 0 True\n"
        assert process.wait(timeout=60) == 0, process.stderr.read()
    finally:
        process.kill()
        process.communicate()


LOGGED = """
import logging, torch, deltic
x = torch.randn(1, 20, 2, 16)
for _ in range(3):
    deltic.delta_rule(x, x, x)
deltic.delta_rule(x[:, :9], x[:, :9], x[:, :9], cu_seqlens=torch.tensor([0, 9]))
deltic.causal_conv1d(x[:, :, 0], torch.zeros(16, 4))
"""


def test_decisions_are_logged_once_and_with_shapes():
    """DELTIC_LOG=dispatch through Python's logging, to stderr where nobody else prints."""
    printed = subprocess.run(
        [sys.executable, "-c", LOGGED],
        capture_output=True,
        text=True,
        env={**os.environ, "DELTIC_LOG": "dispatch"},
    )
    assert printed.returncode == 0 and printed.stdout == ""
    lines = printed.stderr.splitlines()
    assert len(lines) == len(set(lines)) and all(line.startswith("deltic: ") for line in lines)
    chosen = [line for line in lines if ": chosen (" in line]
    assert len(chosen) == 3
    assert "q fp32 [1,20,2,16], k fp32 [1,20,2,16], v fp32 [1,20,2,16])" in chosen[0]
    assert "q fp32 [1,9,2,16]" in chosen[1] and "cu_seqlens int64 [2]" in chosen[1]
    assert chosen[2].startswith("deltic: conv: ") and "weight fp32 [16,4]" in chosen[2]


def test_decisions_go_to_the_handlers_there_are():
    code = (
        "import logging, sys\n"
        "form = '%(name)s|%(levelname)s|%(message)s'\n"
        "logging.basicConfig(stream=sys.stdout, format=form)\n" + LOGGED
    )
    lines = python(code, DELTIC_LOG="dispatch").splitlines()
    assert lines and all(line.startswith("deltic.dispatch|INFO|") for line in lines)
    assert python(code, DELTIC_LOG="") == ""


def test_threads_by_number():
    """deltic's own number, where it is set; else torch's."""
    assert deltic.get_num_threads() == torch.get_num_threads()
    try:
        deltic.set_num_threads(3)
        assert deltic.get_num_threads() == 3 and deltic.info()["threads"] == "3"
        x = torch.randn(1, 70, 4, 16)
        three = deltic.delta_rule(x, x, x)[0]
        deltic.set_num_threads(1)
        assert torch.equal(deltic.delta_rule(x, x, x)[0], three)
    finally:
        deltic.set_num_threads(0)
    assert deltic.get_num_threads() == torch.get_num_threads()
    for wrong in (-1, 4097):
        with pytest.raises(ValueError, match=f"set_num_threads: n: expected 0 .* got {wrong}"):
            deltic.set_num_threads(wrong)
    for wrong in (True, 2.0, None):
        with pytest.raises(TypeError, match=f"set_num_threads: n: expected an int, got {wrong}"):
            deltic.set_num_threads(wrong)


def test_parts_are_imported_when_asked_for():
    code = """
import sys, deltic
parts = ("deltic.layers", "deltic.fla", "deltic.integrations")
assert not [name for name in sys.modules if name.startswith(parts)]
assert {"fla", "integrations", "layers", "delta_rule"} <= set(dir(deltic))
deltic.layers.GatedDeltaNet, deltic.fla.ops.kda.chunk_kda, deltic.integrations.transformers.enable
try:
    deltic.nothing
except AttributeError as error:
    print(error)
"""
    assert python(code) == "module 'deltic' has no attribute 'nothing'"


def test_info():
    facts = deltic.info()
    assert facts["version"] == deltic.__version__ and facts["torch"] == torch.__version__
    assert {"compiler", "cuda", "cpu.found", "cpu.used", "threads"} <= facts.keys()
    code = "import deltic; print(deltic.show_config('dicts')['process']['log'])"
    assert python(code, DELTIC_LOG="dispatch") == "dispatch"
    assert python(code, DELTIC_LOG="loud") == "DELTIC_LOG is not dispatch"


def test_types_follow_the_arguments(tmp_path, monkeypatch):
    """What a type checker says of calls: the final state is there where it was asked for."""
    # torch's own types take half a minute to read: two are enough, anything else may be anything.
    rest = "from typing import Any\ndef __getattr__(name: str) -> Any: ...\n"
    stubs = {"": rest + "class Tensor: ...\nclass dtype: ...\n"}
    stubs |= dict.fromkeys(("autograd", "autograd/function", "nn", "nn/functional"), rest)
    stubs |= dict.fromkeys(("utils", "utils/_python_dispatch"), rest)
    for name, text in stubs.items():
        (tmp_path / "torch" / name).mkdir(parents=True, exist_ok=True)
        (tmp_path / "torch" / name / "__init__.pyi").write_text(text)
    monkeypatch.setenv("MYPYPATH", str(tmp_path))
    api = pytest.importorskip("mypy.api")
    lines = {
        "deltic.delta_rule(x, x, x)": "tuple[Tensor, None]",
        "deltic.delta_rule(x, x, x, g=x, output_final_state=True)": "tuple[Tensor, Tensor]",
        "deltic.recurrent(x, x, x, gv=x, output_final_state=yes)": "tuple[Tensor, Tensor | None]",
        "deltic.causal_conv1d(x, x, output_final_state=True)": "tuple[Tensor, Tensor]",
        "deltic.l2norm(x).rstd": "Tensor",
        "deltic.wy(x, x).kg": "Tensor | None",
        "deltic.scores_inverse(x, x).inverse": "Tensor",
        "deltic.layers.Cache().crop": "def (max_length: int)",
    }
    code = "import deltic\nimport deltic.layers\nfrom torch import Tensor\n"
    code += "def call(x: Tensor, yes: bool) -> None:\n"
    code += "".join(f"    reveal_type({line})\n" for line in lines)
    code += "    deltic.delta_rule(x, x, x, gt=x)\n"
    (tmp_path / "calls.py").write_text(code)
    found, _, _ = api.run(
        [
            "--no-incremental",
            "--config-file=",
            "--follow-imports=silent",
            "--ignore-missing-imports",
            "--allow-subclassing-any",
            str(tmp_path / "calls.py"),
        ]
    )
    said = [line.partition('Revealed type is "')[2] for line in found.splitlines()]
    said = [text.rstrip('"').replace("torch.", "") for text in said if text]
    assert len(said) == len(lines), found
    for text, expected in zip(said, lines.values(), strict=True):
        assert text.startswith(expected), found
    assert 'No overload variant of "delta_rule"' in found, found
