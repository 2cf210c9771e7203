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
