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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])
def test_wrong_rows_are_found(device):
    """A server that forgets how many tokens were accepted."""

    class Forgetful(soak.Server):
        def step(self) -> None:
            for s in self.running:
                s.accepted = 1
            super().step()

    with torch.no_grad():
        server = Forgetful(soak.KINDS["gdn"], device, 3)
        for _ in range(20):
            server.step()
    assert int(server.bad) > 0
