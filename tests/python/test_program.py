"""python -m deltic: the program's commands, from the package."""

import json
import re
import shlex
import signal
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution

import deltic
import deltic.__main__
import pytest

needs_program = pytest.mark.skipif(
    not hasattr(deltic._library.LIBRARY, "deltic_torch_program"),
    reason="built without CLI11 or nlohmann-json",
)


def run(capfd, *words):
    """Status, stdout and stderr of a command line, in this process."""
    status = deltic.__main__.main(words)
    found = capfd.readouterr()
    return status, found.out, found.err


@needs_program
def test_as_a_module():
    words = [sys.executable, "-m", "deltic", "explain", "forward gate=none seqs=3", "--json", "-"]
    found = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert found.returncode == 0, found.stderr
    document = json.loads(found.stdout)
    assert document["schema"] == "deltic.explain/1"
    assert document["summary"]["chosen"].startswith("cpu.")
    assert document["version"] == deltic.__version__


@needs_program
def test_info_and_help(capfd):
    status, out, _ = run(capfd, "info")
    assert status == 0 and out.startswith(f"deltic {deltic.__version__}\n")
    assert deltic.info()["cpu.used"] in out
    status, out, _ = run(capfd, "--help")
    assert status == 0
    for command in ("info", "explain", "verify", "bench", "demo"):
        assert f"\n  {command} " in out
    status, out, _ = run(capfd, "verify", "--help")
    assert status == 0 and "(default)" in out.partition("--quick")[2].partition("--all")[0]
    assert run(capfd, "--version") == (0, f"deltic {deltic.__version__}\n", "")


@needs_program
@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["verfy"], "deltic: command: expected .*got 'verfy' \\(did you mean verify\\?\\)\n"),
        ([], "deltic: command: expected info\\|.*, got none\n"),
        (["info", "extra"], "deltic: info: expected options alone, got 'extra'\n"),
        (["explain"], "deltic: case: expected an operation, got an empty line "),
        (["info", "--bogus"], "deltic: info: expected --help\\|.*, got '--bogus'\n"),
        (["verify", "--quick=3"], "deltic: --quick: expected no value, got one\n"),
        (["verify", "--seed", "x"], "deltic: --seed: expected a whole number .*got 'x'\n"),
        (["explain", "forward gate=x"], "deltic: .*gate"),
        (["bench", "--suite", "none"], "deltic: --suite: expected a name that --list prints"),
        (["verify", "--filter", "K=12345"], "deltic: verify: no case matched\n"),
        (["info", "\0"], "deltic: arguments: expected texts without zero bytes"),
        (["explain", "\udcff"], "deltic: "),
    ],
)
def test_bad_arguments_end_in_a_sentence(capfd, words, text):
    status, out, err = run(capfd, *words)
    assert status == 2 and out == "" and len(err.splitlines()) == 1
    assert re.match(text, err), err


@needs_program
@pytest.mark.parametrize(
    ("to", "text"),
    [
        (">&-", "deltic: output: expected an open stdout, got a closed one\n"),
        ("> /dev/full", "deltic: output: writing to stdout failed: No space left on device\n"),
    ],
)
def test_output_that_cannot_be_written(to, text):
    command = f"{shlex.quote(sys.executable)} -m deltic info {to}"
    found = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (found.returncode, found.stdout, found.stderr) == (1, "", text)


@needs_program
def test_verify_is_quick_unless_told(capfd):
    status, few, _ = run(capfd, "verify", "--list")
    assert status == 0
    _, same, _ = run(capfd, "verify", "--quick", "--list")
    _, every, _ = run(capfd, "verify", "--all", "--list")
    assert few == same
    few, every = few.splitlines(), every.splitlines()
    assert set(few) < set(every) and len(few) < len(every) / 10
    operations = {line.split()[0] for line in every}
    assert {line.split()[0] for line in few} == operations
    _, filtered, _ = run(capfd, "verify", "--filter", "kkt", "--list")
    assert set(filtered.splitlines()) == {line for line in every if "kkt" in line}


@needs_program
def test_verify_and_bench_run(capfd, tmp_path):
    before = signal.getsignal(signal.SIGINT)
    path = tmp_path / "verify.json"
    words = ("--filter", "cumsum gate=head", "--impl", "cpu.plain", "--json", str(path))
    status, out, err = run(capfd, "verify", *words)
    assert status == 0 and " passed, 0 failed" in out and "verify " in err  # progress
    assert json.loads(path.read_text())["summary"]["failed"] == 0
    status, out, _ = run(capfd, "bench", "--time", "0.001", "forward gate=none seqs=20 K=16 V=16")
    assert status == 0 and "median ms" in out
    status, out, _ = run(capfd, "bench", "--list", "--suite", "quick")
    assert status == 0 and len(out.splitlines()) > 3
    assert signal.getsignal(signal.SIGINT) is before


def test_a_package_without_the_program(monkeypatch, capsys):
    class Without:
        pass

    monkeypatch.setattr(deltic.__main__, "LIBRARY", Without())
    assert deltic.__main__.main(["info"]) == 2
    assert "deltic: program: expected a package that was built where" in capsys.readouterr().err


def test_the_script():
    try:
        scripts = distribution("deltic").entry_points.select(group="console_scripts")
    except PackageNotFoundError:
        pytest.skip("the package is not installed")
    assert [script.value for script in scripts] == ["deltic.__main__:main"]
    assert scripts["deltic"].load() is deltic.__main__.main


@needs_program
@pytest.mark.parametrize(
    ("given", "printed"),
    [
        ("0.1", "0.1"),
        ("1e-4", "1e-04"),
        ("0.001", "0.001"),
        ("100000", "1e+05"),
        ("123456", "123456"),
        ("0.30000000000000004", "0.30000000000000004"),
        ("-2.5e-7", "-2.5e-07"),
    ],
)
def test_numbers_in_a_case_are_printed_as_short_as_they_read_back(given, printed):
    """The package has its own way to read and print them, for systems whose libstdc++ has none."""
    found = deltic.explain(f"forward scale={given}")
    assert f" scale={printed} " in found.call
    assert float(printed) == float(given)
    for wrong in ("+1", "0x10", "1e", "", "1e400", "nan"):
        with pytest.raises(ValueError, match="^explain: .*scale"):
            deltic.explain(f"forward scale={wrong}")
