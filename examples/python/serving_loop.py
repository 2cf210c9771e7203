"""A serving loop over a pool of states: continuous batching, prefill, drafted tokens.

    python serving_loop.py [--requests 6] [--tokens 24] [--batch 4] [--device cuda]

The model is one Gated DeltaNet layer with random weights between an embedding and its transpose.
Requests come and go; the running ones decode together, each with up to three tokens that are
guessed from what it said before and verified in the same call. On a GPU a step is a CUDA graph,
captured once and replayed with other slots, lengths and rows of padding in its lists. At the end
every request is served once more alone, token by token: both must say the same.
"""

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field

import deltic
import torch

VOCABULARY, WIDTH, H, HV, K, V, W, DRAFTS = 64, 64, 2, 4, 64, 64, 4, 3
CHANNELS = 2 * H * K + HV * V
NULL = 0  # slot 0 of both pools belongs to nobody: rows of padding point there


@dataclass
class Request:
    prompt: list[int]
    slots: list[int] = field(default_factory=list)
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


def make_replay(work: Callable[[], None], device: str) -> Callable[[], None]:
    """What does the work again: on a GPU the replay of a graph that is captured here."""
    if device != "cuda":
        return work
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()  # once outside of a graph: libraries make their handles at the first call
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


class Model:
    """One layer, the pools that its states and windows lie in, and a step of `batch` requests."""

    def __init__(self, batch: int, device: str = "cpu") -> None:
        generator = torch.Generator().manual_seed(0)

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device)

        self.device = device
        self.dtype = torch.bfloat16 if device == "cuda" else torch.float32  # for tensor cores
        self.embedding = randn(VOCABULARY, WIDTH)
        self.project = randn(WIDTH, CHANNELS + 2 * HV) * WIDTH**-0.5
        self.weight = randn(CHANNELS, W) * 0.5
        self.back = randn(HV * V, WIDTH)
        self.A_log, self.dt_bias = (torch.zeros(HV, device=device) for _ in range(2))
        slots = 1 + batch * (DRAFTS + 1)
        self.states = torch.zeros(slots, HV, V, K, device=device)
        windows = (slots, CHANNELS, W - 1 + DRAFTS)
        self.windows = torch.zeros(windows, dtype=self.dtype, device=device)
        # The lists of a step lie in one piece, so that one copy brings them; the numbers of tokens
        # and rows are always the same, what is not used is padding.
        tokens = batch * (DRAFTS + 1)
        sizes = [tokens, batch + 1, tokens, batch]
        self.lists = torch.zeros(sum(sizes), dtype=torch.int32, device=device)
        self.tokens, self.cu, table, self.accepted = self.lists.split(sizes)
        self.table = table.view(batch, DRAFTS + 1)
        self.answers = torch.zeros(tokens, dtype=torch.int64, device=device)
        self.replay = make_replay(self.decode, device)

    def rows(self, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """What the projections give: rows for the convolution, beta and the gate."""
        # Row by row, so that a token's numbers do not depend on how many are multiplied at once.
        rows = self.embedding.index_select(0, tokens)
        mixed = torch.stack([row @ self.project for row in rows])[None].to(self.dtype)
        return mixed.split([CHANNELS, HV, HV], -1)

    def heads(self, mixed: torch.Tensor) -> dict[str, torch.Tensor]:
        """q, k and v: slices of one packed row."""
        q, k, v = mixed.split([H * K, H * K, HV * V], -1)
        return {
            "q": q.unflatten(-1, (H, K)),
            "k": k.unflatten(-1, (H, K)),
            "v": v.unflatten(-1, (HV, V)),
        }

    def next_tokens(self, o: torch.Tensor) -> torch.Tensor:
        rows = o.flatten(2)[0].float()
        return torch.stack([(row @ self.back @ self.embedding.T).argmax() for row in rows])

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

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def prefill(self, requests: list[Request]) -> None:
        """Prompts of any lengths in one call each; states and windows go straight to slots."""
        lengths = [len(r.prompt) for r in requests]
        cu = self.ints([0, *lengths]).cumsum(0).int()
        slots = self.ints([r.slots[0] for r in requests])
        fresh = torch.zeros(len(requests), dtype=torch.bool, device=self.device)
        mixed, b, a = self.rows(self.ints([token for r in requests for token in r.prompt]))
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
        found = self.next_tokens(o[:, cu[1:].long() - 1]).tolist()
        for request, token in zip(requests, found, strict=True):
            request.said.append(token)
            request.accepted = 1

    def decode(self) -> None:
        """The tokens of a step, as its lists say; nothing of it waits for the host."""
        mixed, b, a = self.rows(self.tokens)
        mixed = deltic.causal_conv1d_update(
            mixed,
            self.windows,
            self.weight,
            activation="silu",
            cu_seqlens=self.cu,
            state_index=self.table[:, 0],
            accepted=self.accepted,
            null_slot=NULL,
        )
        o = deltic.decode(
            **self.heads(mixed),
            beta=b,
            g=a,
            cu_seqlens=self.cu,
            read_index=self.table,
            accepted=self.accepted,
            **self.options(),
        )
        self.answers.copy_(self.next_tokens(o))

    def step(self, requests: list[Request | None]) -> None:
        """The last token and the guesses of every request in one call; None is padding."""
        drafted = [[] if r is None else [r.said[-1], *r.guesses()] for r in requests]
        tokens = [token for tokens in drafted for token in tokens]
        cu = [0]
        for rows in drafted:
            cu.append(cu[-1] + len(rows))
        tokens += [0] * (len(self.tokens) - len(tokens))  # behind the last offset
        table = [[NULL] * (DRAFTS + 1) if r is None else r.slots for r in requests]
        accepted = [1 if r is None else r.accepted for r in requests]
        self.lists.copy_(torch.tensor([*tokens, *cu, *sum(table, []), *accepted]))
        self.replay()
        found = self.answers.tolist()
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


def serve(
    prompts: list[list[int]], tokens: int, batch: int, device: str
) -> tuple[list[list[int]], int]:
    """All prompts' continuations, and how many steps they took."""
    model = Model(batch, device)
    free = list(range(batch))
    waiting = [Request(prompt) for prompt in prompts]
    running: dict[int, Request] = {}
    done, steps, everything = 0, 0, list(waiting)
    while done < len(prompts):
        arrivals = []
        while waiting and free:
            place, request = free.pop(), waiting.pop(0)
            first = 1 + place * (DRAFTS + 1)
            request.slots = list(range(first, first + DRAFTS + 1))
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


def serve_alone(prompt: list[int], tokens: int, device: str) -> list[int]:
    """The same without company and without guesses."""
    model, request = Model(1, device), Request(prompt)
    request.slots = list(range(1, DRAFTS + 2))
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
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    given = parser.parse_args()
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("argument --device: expected cpu where torch finds no GPU, got cuda")
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(VOCABULARY, (3 + 17 * n,), generator=generator).tolist()
        for n in range(given.requests)
    ]
    with torch.no_grad():
        answers, steps = serve(prompts, given.tokens, given.batch, given.device)
        alone = [serve_alone(prompt, given.tokens, given.device) for prompt in prompts]
    total = sum(map(len, answers))
    print(f"{total} tokens of {len(answers)} requests in {steps} steps of {given.batch} rows")
    for n, (answer, expected) in enumerate(zip(answers, alone, strict=True)):
        if answer != expected:
            raise SystemExit(f"request {n}: other tokens than when it is served alone")
    print("every request has the tokens that it has when it is served alone")
    if given.device == "cuda":
        print("on a GPU: every step was a replay of one CUDA graph")


if __name__ == "__main__":
    main()
