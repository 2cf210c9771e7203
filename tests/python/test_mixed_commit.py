"""States that one implementation decodes and another one commits: the error of the mixture.

Bits are an implementation's; a server that decodes with the best one and verifies drafted tokens
with records, on a GPU cuda.general's, mixes two. Every second step here is a commit, for hundreds
of tokens from one state, against the oracle over all of them.
"""

import deltic
import pytest
import torch
from support import BUDGET, error, make

HAS_GPU = torch.cuda.is_available()
TOKENS, DRAFTS = 240, 4


def chosen(device):
    """What decodes, and what leaves records and commits them."""
    return (None, "cuda.general") if device == "cuda" else (None, "cpu.plain")


def part(x, places):
    """Tokens of every sequence."""
    return {name: t[:, places] for name, t in x.items() if name in ("q", "k", "v", "beta", "g")}


def serve(case, device, decodes, commits):
    """o and the states after all tokens, single ones and drafts of which some are refused."""
    x = {name: t.to(device) for name, t in case.tensors.items()}
    pool = x["initial_state"].clone()
    N, HV, V, K = pool.shape
    width = K + V + (1 if x["g"].dim() == 3 else K)
    slots = torch.arange(N, dtype=torch.int32, device=device)
    outputs, done, step = [], 0, 0
    while done < TOKENS:
        kind = {**case.options, "state_pool": pool, "read_index": slots}
        if step % 2 == 0 or done + DRAFTS > TOKENS:
            outputs.append(deltic.decode(**part(x, slice(done, done + 1)), **kind, impl=decodes))
            done += 1
        else:
            right = 1 + step // 2 % DRAFTS
            record = torch.empty(N, DRAFTS, HV, width, device=device)
            given = part(x, slice(done, done + DRAFTS))
            given["v"] = given["v"].clone()
            given["v"][:, right:] = 3  # guesses that are wrong
            o = deltic.decode(**given, **kind, record=record, impl=commits)
            accepted = torch.full((N,), right, dtype=torch.int32, device=device)
            deltic.commit(pool, record, accepted, read_index=slots, state_layout="vk", impl=commits)
            outputs.append(o[:, :right])
            done += right
        step += 1
    return torch.cat(outputs, 1).cpu(), pool.cpu()


def token_by_token(case, device, impl):
    """The same tokens by one implementation."""
    x = {name: t.to(device) for name, t in case.tensors.items()}
    kind = {**case.options, "state_pool": x["initial_state"].clone()}
    one = [deltic.decode(**part(x, slice(t, t + 1)), **kind, impl=impl) for t in range(TOKENS)]
    return torch.cat(one, 1).cpu(), kind["state_pool"].cpu()


@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not HAS_GPU, reason="no GPU"))],
)
@pytest.mark.parametrize("gate", ["head", "channel"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_error_of_a_mixture(device, gate, dtype):
    sizes = {"B": 3, "T": TOKENS, "H": 1, "HV": 2, "K": 128, "V": 128}
    case = make(**sizes, gate=gate, dtype=dtype, state_layout="vk", qk_l2norm=True)
    case.tensors["g"] *= 0.05  # states that remember hundreds of tokens
    wide = {name: t.double() for name, t in case.tensors.items()}
    expected = deltic.recurrent(**wide, **case.options, output_final_state=True, impl="reference")
    decodes, commits = chosen(device)
    mixed = serve(case, device, decodes, commits)
    budget = BUDGET[dtype]["o"]
    assert error(mixed[0], expected[0]) < budget and error(mixed[1], expected[1]) < budget
    assert error(mixed[1], expected[1]) < BUDGET[torch.float32]["o"]  # its states are fp32
    # No more than what either implementation alone is off by.
    one, other = serve(case, device, commits, commits), token_by_token(case, device, decodes)
    for x, y, z, reference in zip(mixed, one, other, expected, strict=True):
        assert error(x, reference) < 1.5 * max(error(y, reference), error(z, reference)) + 1e-6
    again = serve(case, device, decodes, commits)
    assert all(torch.equal(x, y) for x, y in zip(mixed, again, strict=True))
