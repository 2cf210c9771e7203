"""The examples run, with sizes that take seconds, and do what they say."""

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys

import pytest
import torch
from support import ROOT

EXAMPLES = ROOT / "examples" / "python"
HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None
SMALL = ("--steps", "50", "--batch", "4", "--length", "96", "--width", "32", "--layers", "2")
SMALL += ("--heads", "2", "--threads", "1")


def run(name, *arguments, status=0):
    """An example's output; it must end with this status."""
    environment = dict(os.environ, OMP_NUM_THREADS="1", PYTHONWARNINGS="ignore")
    found = subprocess.run(
        [sys.executable, EXAMPLES / name, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert found.returncode == status, found.stdout + found.stderr
    return found.stdout + found.stderr


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder that training left, and what it printed."""
    folder = tmp_path_factory.mktemp("out")
    plot = () if HAS_MATPLOTLIB else ("--no-plot",)
    return folder, run("train_tiny_lm.py", *SMALL, *plot, "--out", folder)


def bits(text):
    return [
        float(x) for x in re.search(r"([\d.]+) bits/byte before, ([\d.]+) after", text).groups()
    ]


def test_training_learns(trained):
    folder, text = trained
    before, after = bits(text)
    assert before == 8.0 and after < 5.7
    assert "50/50" in text and (folder / "tiny_lm.pt").exists()
    if HAS_MATPLOTLIB:
        assert (folder / "loss.png").read_bytes().startswith(b"\x89PNG")
    else:
        assert "needs matplotlib" in run("train_tiny_lm.py", *SMALL, status=1)


def test_training_is_repeatable(trained, tmp_path):
    """The numbers on the way, times aside, and the weights."""
    again = run("train_tiny_lm.py", *SMALL, "--out", tmp_path, "--no-plot")
    assert bits(again) == bits(trained[1]) and not (tmp_path / "loss.png").exists()
    weights = [
        torch.load(folder / "tiny_lm.pt", weights_only=True)["weights"]
        for folder in (trained[0], tmp_path)
    ]
    assert all(torch.equal(x, weights[1][name]) for name, x in weights[0].items())


@pytest.mark.parametrize("temperature", [0, 1.0])
def test_generation_agrees_with_a_full_pass(trained, temperature):
    given = ("--checkpoint", trained[0] / "tiny_lm.pt", "--temperature", temperature)
    text = run("generate.py", *given, "--prompt", "state", "--tokens", 70, "--check")
    assert text.startswith("state") and "check: 70 of 70 bytes the same without a cache" in text
    assert re.search(r"prefill: 5 bytes in [\d.]+ ms; decoding: [\d,]+ bytes/s", text)


def test_the_check_of_generation_can_fail(trained, tmp_path):
    """A cache that forgets is seen."""
    code = (
        f"import sys; sys.path.insert(0, {str(EXAMPLES)!r})\n"
        "import generate\n"
        "update = generate.Cache.update\n"
        "def forget(self, recurrent_state=None, *args, **kwargs):\n"
        "    recurrent_state = None if recurrent_state is None else recurrent_state * 0.5\n"
        "    return update(self, recurrent_state, *args, **kwargs)\n"
        "generate.Cache.update = forget\n"
        f"sys.exit(generate.main(['--checkpoint', {str(trained[0] / 'tiny_lm.pt')!r}, '--check']))"
    )
    script = tmp_path / "forget.py"
    script.write_text(code)
    assert "the two passes differ" in run(script, status=1)


def ends_with(name, arguments, text, monkeypatch):
    """An example's main ends in a sentence and status 1, which is what exit makes of a text."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)  # this process's stay
    main = importlib.import_module(name.removesuffix(".py")).main
    with pytest.raises(SystemExit) as end:
        main([str(x) for x in arguments])
    assert isinstance(end.value.code, str) and text in end.value.code


def test_messages(tmp_path, monkeypatch):
    assert "no checkpoint" in run("generate.py", "--checkpoint", tmp_path / "none", status=1)
    short = tmp_path / "short.txt"
    short.write_text("few words")
    given = ("--text", short, "--no-plot")
    ends_with("train_tiny_lm.py", given, "the text has 9 bytes", monkeypatch)


TRAIN, GENERATE, COMPARE = "train_tiny_lm.py", "generate.py", "huggingface_compare.py"
SIZES = {
    TRAIN: ("steps", "batch", "length", "width", "layers", "heads", "threads"),
    GENERATE: ("tokens", "threads"),
    COMPARE: ("batch", "tokens", "repeats", "threads"),
}
REFUSED = [
    *(
        (name, f"--{size}={value}", f"--{size}: expected an integer of at least 1, got {value}")
        for name, sizes in SIZES.items()
        for size in sizes
        for value in (0, -1)
    ),
    (TRAIN, "--steps=few", "--steps: expected an integer of at least 1, got few"),
    (TRAIN, f"--seed={2**64}", f"--seed: expected an integer of at most {2**63 - 1}, got {2**64}"),
    (TRAIN, "--rate=0", "--rate: expected a number above 0, got 0"),
    (TRAIN, "--rate=nan", "--rate: expected a number above 0, got nan"),
    (TRAIN, "--heads=3", "--heads: expected a divisor of --width 128, got 3"),
    (TRAIN, "--width=2048", "--heads: expected 8 or more of --width 2048, got 4"),
    (TRAIN, "--text=/none", "--text: expected a readable file, got /none (No such file or"),
    (TRAIN, "--text=/", "--text: expected a readable file, got / (Is a directory)"),
    (TRAIN, f"--out={__file__}/a", "--out: expected a folder, got "),
    (GENERATE, "--prompt=", "--prompt: expected a text, got an empty one"),
    (GENERATE, "--temperature=-1", "--temperature: expected a number of 0 or more, got -1"),
    (GENERATE, "--temperature=inf", "--temperature: expected a number of 0 or more, got inf"),
    (COMPARE, "--length=1", "--length: expected an integer of at least 2, got 1"),
    (COMPARE, "--config=/none", "--config: expected a file or a folder, got /none (there is none)"),
]


@pytest.mark.parametrize("name", SIZES)
def test_wrong_options_are_refused(name, monkeypatch, capsys):
    """With status 2 and one line that says what was expected, before anything is done."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    parse = importlib.import_module(name.removesuffix(".py")).parse
    for _, option, text in (refused for refused in REFUSED if refused[0] == name):
        with pytest.raises(SystemExit) as end:
            parse([option])
        assert end.value.code == 2, option
        assert f"error: argument {text}" in capsys.readouterr().err
    assert parse([]).threads == (1 if name == GENERATE else None)


def test_a_refused_run_leaves_the_checkpoint_alone(trained):
    before = (trained[0] / "tiny_lm.pt").read_bytes()
    text = run(TRAIN, "--steps", "-1", "--no-plot", "--out", trained[0], status=2)
    assert "Traceback" not in text and (trained[0] / "tiny_lm.pt").read_bytes() == before


def test_what_is_no_checkpoint(tmp_path, monkeypatch):
    for content in (b"", b"no checkpoint at all"):
        (tmp_path / "other").write_bytes(content)
        text = "expected a checkpoint of train_tiny_lm.py"
        ends_with(GENERATE, ("--checkpoint", tmp_path / "other"), text, monkeypatch)
    ends_with(GENERATE, ("--checkpoint", tmp_path), "no checkpoint", monkeypatch)


def test_serving_loop():
    text = run("serving_loop.py", "--requests", "5", "--tokens", "12", "--batch", "3")
    assert "60 tokens of 5 requests" in text and "served alone" in text


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("batch", [1, 3, 8])
def test_serving_loop_on_a_gpu(batch):
    """Steps are replays of a graph: with other slots, rows of padding, a batch that never fills."""
    given = ("--requests", "5", "--tokens", "24", "--batch", batch, "--device", "cuda")
    text = run("serving_loop.py", *given)
    assert "120 tokens of 5 requests" in text and "served alone" in text
    assert "every step was a replay of one CUDA graph" in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
def test_serving_loop_without_a_gpu():
    text = run("serving_loop.py", "--device", "cuda", status=2)
    assert "error: argument --device: expected cpu where torch finds no GPU, got cuda" in text


@pytest.mark.parametrize("spoiled", ["accepted", "table", "tokens"])
def test_the_check_of_the_serving_loop_can_fail(spoiled, monkeypatch):
    """A list of the step that is not as it should be changes what is said."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    loop = importlib.import_module("serving_loop")
    decode, prompts = loop.Model.decode, [[1, 2, 3], [5, 6, 5, 6, 5]]

    def spoil(self):
        if spoiled == "accepted":
            self.accepted.fill_(1)
        elif spoiled == "table":
            self.table.copy_(self.table.flip(1))
        else:
            self.tokens.add_(1).remainder_(loop.VOCABULARY)
        decode(self)

    with torch.no_grad():
        alone = [loop.serve_alone(prompt, 16, "cpu")[:16] for prompt in prompts]
        assert loop.serve(prompts, 16, 3, "cpu")[0] == alone
        monkeypatch.setattr(loop.Model, "decode", spoil)
        assert loop.serve(prompts, 16, 3, "cpu")[0] != alone


def test_hugging_face_model():
    pytest.importorskip("transformers", minversion="5.16")
    given = ("--length", "70", "--tokens", "4", "--repeats", "1", "--threads", "1")
    text = run("huggingface_compare.py", *given)
    assert "written tokens: 4 of 4 the same" in text
    differences = [float(x) for x in re.findall(r"largest difference ([\d.e-]+)", text)]
    assert len(differences) == 2 and 0 < max(differences) < 1e-4
    assert "qwen3_next: torch_chunk_gated_delta_rule -> deltic." in text
    assert len(re.findall(r"^(prefill|training|writing) +[\d.]+", text, re.MULTILINE)) == 3


HYBRID = ("--steps", 10, "--batch", 2, "--length", 64, "--width", 32, "--heads", 1)
HYBRID += ("--head-width", 32, "--rate", 5e-3, "--threads", 1)
HYBRID += ("--timed-width", 32, "--timed-length", 70, "--timed-heads", 1)


def test_a_hybrid_trains_as_with_other_operators(tmp_path):
    pytest.importorskip("transformers")
    file = tmp_path / "losses.json"
    text = run("train_hybrid.py", *HYBRID, "--json", file)
    found = json.loads(file.read_text())
    assert set(found["models"]) == {"gdn", "kda"}
    for model in found["models"].values():
        losses = model["deltic cpu"]["losses"]
        assert len(losses) == 10 and losses[-1] < losses[0] - 0.3
        assert model["deltic cpu"]["tokens_per_second"] > 0
    if "fallback cuda" not in found["models"]["gdn"]:
        assert re.search(r"gdn  fallback cpu .* 0\.\d% from the first", text)


def test_losses_that_differ_are_seen(monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    hybrid = importlib.import_module("train_hybrid")
    runs = {"deltic cuda": {"losses": [5.0, 2.0]}, "deltic cpu": {"losses": [5.0, 2.03]}}
    assert hybrid.compare("gdn", runs)
    assert not hybrid.compare("gdn", {**runs, "fallback cpu": {"losses": [5.0, 2.1]}})
    assert hybrid.compare("gdn", {**runs, "fla cuda": {"error": "RuntimeError: refuses"}})
    assert "refuses" in capsys.readouterr().out


def test_operators_that_are_not_there_are_not_measured(monkeypatch):
    """transformers would take its own in torch, whose times would stand under another name."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    hybrid = importlib.import_module("train_hybrid")
    monkeypatch.setitem(sys.modules, "fla", None)
    with pytest.raises(SystemExit, match="no flash-linear-attention: "):
        hybrid.import_transformers(True)
