"""Random serving steps: every sequence has the bits of the same one served alone."""

import os

import pytest
import soak
import torch

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
STEPS = int(os.environ.get("DELTIC_SOAK_STEPS", "0"))


@pytest.mark.parametrize("kind", soak.KINDS)
def test_on_the_cpu(kind):
    assert "no wrong row" in soak.run(kind, "cpu", STEPS or 40, seed=3)


@on_gpu
@pytest.mark.parametrize("kind", soak.KINDS)
def test_on_a_gpu_with_graphs(kind):
    assert "no wrong row" in soak.run(kind, "cuda", STEPS or 300, seed=3)


def test_progress(monkeypatch):
    monkeypatch.setattr(soak.time, "monotonic", iter(range(0, 10**6, 10)).__next__)
    lines = []
    soak.run("gdn_plain", "cpu", 40, 3, lines.append)
    assert lines == ["gdn_plain: 40 of 40 steps, about 0 s left"]


devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])


def wrong_rows(server) -> int:
    with torch.no_grad():
        for _ in range(20):
            server.step()
    return int(server.bad)


@devices
@pytest.mark.parametrize("kind", ["gdn", "gdn_near"])
def test_wrong_rows_are_found(device, kind):
    """A server that forgets how many tokens were accepted."""

    class Forgetful(soak.Server):
        def step(self) -> None:
            for s in self.running:
                s.accepted = 1
            super().step()

    with torch.no_grad():
        server = Forgetful(soak.KINDS[kind], device, 3)
    assert wrong_rows(server) > 0


@devices
def test_wrong_paths_are_found(device, monkeypatch):
    """A server that commits a tree as a chain."""
    commit = soak.deltic.commit

    def chain(*args, parents, **options):
        commit(*args, **options)

    monkeypatch.setattr(soak.deltic, "commit", chain)
    with torch.no_grad():
        server = soak.Server(soak.KINDS["gdn_tree"], device, 3)
    assert wrong_rows(server) > 0


# What the library might do wrong: a kind of server that would see it, a function, and its keywords
# as if they had been others.
FAULTS = {
    "a channel's weight": ("gdn_step", "step", lambda o: {"norm_weight": o["norm_weight"].flip(0)}),
    "no gate of the norm": ("kda_step_record", "step", lambda o: {"z": None}),
    "no positions": ("gdn_by_chance", "decode", lambda o: {"positions": None}),
    "no positions of a step": ("kda_step_f16", "step", lambda o: {"positions": None}),
    "another seed": ("kda_step_f16", "step", lambda o: {"seed": o["seed"] + 1}),
    "a commit in place": ("kda_step_record", "commit", lambda o: {"write_index": None}),
    "layers in another order": ("gdn_layers", "commit", lambda o: {"record": o["record"].flip(0)}),
    "heads from the first": ("gdn_recurrent", "move_states", lambda o: {"read_head": 0}),
    "another layout": ("gdn_by_chance", "move_states", lambda o: {"write_layout": "vk"}),
    "chunks": ("kda_recurrent_bf16", "delta_rule", lambda o: {"form": "chunked", "impl": None}),
}


@devices
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_found(device, monkeypatch, name):
    kind, function, change = FAULTS[name]
    right = getattr(soak.deltic, function)
    with torch.no_grad():
        server = soak.Server(soak.KINDS[kind], device, 3)

    def wrong(*args, **options):
        is_alone = options.get("state_pool") is server.alone_pool
        return right(*args, **options | ({} if is_alone else change(options)))

    monkeypatch.setattr(soak.deltic, function, wrong)
    with torch.no_grad():  # steps that are captured again, with the fault in them
        server.steps = {size: server.make_step(size) for size in server.steps}
        server.bad.zero_()
    assert wrong_rows(server) > 0


@devices
def test_small_errors_are_found(device):
    """Of all rows together, where each is near enough to be no wrong one."""

    class Off(soak.Server):
        def prefill(self, rows, out, *others) -> None:
            super().prefill(rows, out, *others)
            if out.dtype == torch.bfloat16:
                out *= 1.02

    with torch.no_grad():
        server = Off(soak.KINDS["gdn_near"], device, 3)
    assert wrong_rows(server) == 0 and server.error() > soak.ERROR
