"""A serving loop over a pool of states: continuous batching, prefill, drafted tokens.

    python serving_loop.py [--requests 6] [--tokens 24] [--batch 4]

The model is one Gated DeltaNet layer with random weights between an embedding and its transpose.
Requests come and go; the running ones decode together, each with up to three tokens that are
guessed from what it said before and verified in the same call. At the end every request is served
once more alone, token by token: both must say the same.
"""

import argparse
from dataclasses import dataclass, field

import deltic
import torch

VOCABULARY, WIDTH, H, HV, K, V, W, DRAFTS = 64, 64, 2, 4, 32, 32, 4, 3
CHANNELS = 2 * H * K + HV * V
NULL = 0  # slot 0 of both pools belongs to nobody: rows of padding point there


@dataclass
class Request:
    prompt: list[int]
    slots: torch.Tensor = field(default_factory=lambda: torch.zeros(DRAFTS + 1, dtype=torch.int32))
    said: list[int] = field(default_factory=list)
    accepted: int = 1  # tokens of the last step that count

    def guesses(self) -> list[int]:
        """What followed the last token before, and what followed that."""
        text, found = self.prompt + self.said, []
        for _ in range(DRAFTS):
            last = (text + found)[-1]
            before = [i for i, token in enumerate(text[:-1]) if token == last]
            if not before:
                break
            found.append(text[before[-1] + 1])
        return found


class Model:
    """One layer, and the pools that its states and windows lie in."""

    def __init__(self, slots: int) -> None:
        torch.manual_seed(0)
        self.embedding = torch.randn(VOCABULARY, WIDTH)
        self.project = torch.randn(WIDTH, CHANNELS + 2 * HV) * WIDTH**-0.5
        self.weight = torch.randn(CHANNELS, W) * 0.5
        self.back = torch.randn(HV * V, WIDTH)
        self.A_log, self.dt_bias = torch.zeros(HV), torch.zeros(HV)
        self.states = torch.zeros(slots, HV, V, K)
        self.windows = torch.zeros(slots, CHANNELS, W - 1 + DRAFTS)

    def rows(self, tokens: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the projections give: rows for the convolution, beta and the gate."""
        # Row by row, so that a token's numbers do not depend on how many are multiplied at once.
        mixed = torch.stack([self.embedding[token] @ self.project for token in tokens])[None]
        return mixed.split([CHANNELS, HV, HV], -1)

    def heads(self, mixed: torch.Tensor) -> dict[str, torch.Tensor]:
        """q, k and v: slices of one packed row."""
        q, k, v = mixed.split([H * K, H * K, HV * V], -1)
        return {
            "q": q.unflatten(-1, (H, K)),
            "k": k.unflatten(-1, (H, K)),
            "v": v.unflatten(-1, (HV, V)),
        }

    def next_tokens(self, o: torch.Tensor) -> list[int]:
        rows = o.flatten(2)[0]
        return [int((row @ self.back @ self.embedding.T).argmax()) for row in rows]

    def options(self) -> dict:
        return {
            "gate": "softplus",
            "A_log": self.A_log,
            "dt_bias": self.dt_bias,
            "beta_form": "sigmoid",
            "qk_l2norm": True,
            "state_layout": "vk",
            "state_pool": self.states,
            "null_slot": NULL,
        }

    def prefill(self, requests: list[Request]) -> None:
        """Prompts of any lengths in one call each; states and windows go straight to slots."""
        lengths = [len(r.prompt) for r in requests]
        cu = torch.tensor([0, *lengths]).cumsum(0).int()
        slots = torch.stack([r.slots[0] for r in requests])
        fresh = torch.zeros(len(requests), dtype=torch.bool)
        mixed, b, a = self.rows([token for r in requests for token in r.prompt])
        mixed, _ = deltic.causal_conv1d(
            mixed,
            self.weight,
            activation="silu",
            cu_seqlens=cu,
            state=self.windows[:, :, : W - 1],
            state_index=slots,
            has_initial_state=fresh,
            null_slot=NULL,
        )
        o, _ = deltic.delta_rule(
            **self.heads(mixed),
            beta=b,
            g=a,
            cu_seqlens=cu,
            read_index=slots,
            has_initial_state=fresh,
            split="off",
            **self.options(),
        )
        found = self.next_tokens(o[:, cu[1:].long() - 1])
        for request, token in zip(requests, found, strict=True):
            request.said.append(token)
            request.accepted = 1

    def step(self, requests: list[Request | None]) -> None:
        """The last token and the guesses of every request in one call; None is padding."""
        drafted = [[] if r is None else [r.said[-1], *r.guesses()] for r in requests]
        cu = torch.tensor([0, *map(len, drafted)]).cumsum(0).int()
        none = torch.full((DRAFTS + 1,), NULL, dtype=torch.int32)
        table = torch.stack([none if r is None else r.slots for r in requests])
        accepted = torch.tensor([1 if r is None else r.accepted for r in requests])
        mixed, b, a = self.rows([token for tokens in drafted for token in tokens])
        mixed = deltic.causal_conv1d_update(
            mixed,
            self.windows,
            self.weight,
            activation="silu",
            cu_seqlens=cu,
            state_index=table[:, 0],
            accepted=accepted,
            null_slot=NULL,
        )
        o = deltic.decode(
            **self.heads(mixed),
            beta=b,
            g=a,
            cu_seqlens=cu,
            read_index=table,
            accepted=accepted,
            **self.options(),
        )
        found = self.next_tokens(o)
        for n, request in enumerate(requests):
            if request is None:
                continue
            answers = found[cu[n] : cu[n + 1]]
            request.accepted = 1
            while (
                request.accepted < len(answers)
                and drafted[n][request.accepted] == answers[request.accepted - 1]
            ):
                request.accepted += 1
            request.said += answers[: request.accepted]


def serve(prompts: list[list[int]], tokens: int, batch: int) -> tuple[list[list[int]], int]:
    """All prompts' continuations, and how many steps they took."""
    model = Model(1 + batch * (DRAFTS + 1))
    free = list(range(batch))
    waiting = [Request(prompt) for prompt in prompts]
    running: dict[int, Request] = {}
    done, steps, everything = 0, 0, list(waiting)
    while done < len(prompts):
        arrivals = []
        while waiting and free:
            place, request = free.pop(), waiting.pop(0)
            first = 1 + place * (DRAFTS + 1)
            request.slots = torch.arange(first, first + DRAFTS + 1, dtype=torch.int32)
            running[place] = request
            arrivals.append(request)
        if arrivals:
            model.prefill(arrivals)
        model.step([running.get(place) for place in range(batch)])
        steps += 1
        for place in [p for p, r in running.items() if len(r.said) >= tokens]:
            del running[place]
            free.append(place)
            done += 1
    return [request.said[:tokens] for request in everything], steps


def serve_alone(prompt: list[int], tokens: int) -> list[int]:
    """The same without company and without guesses."""
    model, request = Model(DRAFTS + 2), Request(prompt)
    request.slots = torch.arange(1, DRAFTS + 2, dtype=torch.int32)
    request.guesses = list  # type: ignore[method-assign]
    model.prefill([request])
    while len(request.said) < tokens:
        model.step([request])
    return request.said


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--requests", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=24, help="of every answer")
    parser.add_argument("--batch", type=int, default=4, help="requests that run together")
    given = parser.parse_args()
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(VOCABULARY, (3 + 17 * n,), generator=generator).tolist()
        for n in range(given.requests)
    ]
    answers, steps = serve(prompts, given.tokens, given.batch)
    total = sum(map(len, answers))
    print(f"{total} tokens of {len(answers)} requests in {steps} steps of {given.batch} rows")
    for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        if serve_alone(prompt, given.tokens) != answer:
            raise SystemExit(f"request {n}: other tokens than when it is served alone")
    print("every request has the tokens that it has when it is served alone")


if __name__ == "__main__":
    main()
