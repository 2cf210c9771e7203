"""A server in small that runs long: every token of every sequence must have the bits that the same
sequence has without company.

    python soak.py [--device cuda] [--steps 10000] [--seed 1] [--seconds 240] [KIND...]

So many steps of every kind, of the seed's own sequences: another seed is another run, so a long one
can be had in slices (--steps 2000 --seed 1, --seed 2, ...).

Sequences come and go on pools that lie in pages as vLLM's do: windows of the convolution, then the
state, then a gap. Prompts continue prefixes that others left at multiples of the chunk; drafted
tokens are accepted and rejected, their states in slots or, of a record, committed; rows of padding
have slot 0 or none. Slots that nobody owns are NaN. On a GPU the steps are CUDA graphs, replayed
with other slots in their lists, that also count wrong rows.

A step is a convolution and a decode, or `deltic.step` with the gated norm; alone it is always its
parts. Prompts in the recurrent form are compared with their tokens one by one. States of 16 bits
may be rounded by chance, each token's by its own position. Between steps states move: to other
slots, or to two pools of some heads each in another layout and dtype, and back. Where a pool has
several layers, they are committed and moved at once; all but the first have the values v negated,
and so their rows.

Kinds that are `near` are cut into segments as the device likes and continue prefixes of any length:
other bits. Their tokens alone are computed in fp32, and all rows together may be off by the error
that docs/numerics.md allows, none by ten times that.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import deltic
import torch

W, CHUNK, FAMILY = 4, 64, 128
ERROR = 6e-3  # of o in 16 bits
SLOTS, LONGEST, SEQUENCES = 96, 256, 24
SEED = 0x123456789ABCDEF  # of states that are rounded by chance


@dataclass(frozen=True)
class Kind:
    """A layer and how it is served."""

    gate: str = "head"  # head or channel
    bound: float | None = None
    state: torch.dtype = torch.float32
    drafts: int = 3
    records: bool = False  # drafted tokens leave a record that is committed, not states
    trees: bool = False  # of a record: drafted tokens branch; no convolution, whose are chains
    near: bool = False  # split as the device likes, prefixes at any token
    step: bool = False  # convolution, decode and gated norm in one call
    forks: bool = False  # of a record: committed to another slot
    recurrent: bool = False  # prompts too, which are short; prefixes at any token
    by_chance: bool = False  # 16-bit states are rounded so
    moves: bool = False  # states move between steps
    layers: int = 1  # of the pool, for kinds without `step`
    H: int = 2
    HV: int = 4
    K: int = 128
    V: int = 128

    @property
    def D(self) -> int:
        return 2 * self.H * self.K + self.HV * self.V

    @property
    def gate_shape(self) -> tuple[int, ...]:
        return (self.HV,) if self.gate == "head" else (self.HV, self.K)

    @property
    def slots(self) -> int:
        """Of a sequence: a state after every token of a step, or the one that is committed to."""
        return 1 + (self.forks if self.records else self.drafts)

    @property
    def columns(self) -> int:
        """Of the table of slots: `accepted` looks into it, which is for windows in a step too."""
        return 1 if self.records and not self.step else 1 + self.drafts

    @property
    def record_width(self) -> int:
        return self.K + self.V + (1 if self.gate == "head" else self.K)

    @property
    def has_prefixes(self) -> bool:
        """A kept 16-bit state is rounded in the middle of a prompt: it continues otherwise."""
        return self.state == torch.float32

    @property
    def longest_prompt(self) -> int:
        return 40 if self.recurrent else 200


KINDS = {
    "gdn": Kind(),
    "gdn_plain": Kind(drafts=0),
    "kda": Kind("channel", -5.0),
    "kda_softplus": Kind("channel"),
    "gdn_bf16": Kind(state=torch.bfloat16),
    "kda_bf16": Kind("channel", -5.0, torch.bfloat16),
    "gdn_record": Kind(records=True),
    "kda_record": Kind("channel", -5.0, records=True),
    "gdn_f16": Kind(state=torch.float16),
    "kda_f16": Kind("channel", -5.0, torch.float16),
    "gdn_tree": Kind(drafts=6, records=True, trees=True),
    "kda_tree_bf16": Kind("channel", -5.0, torch.bfloat16, drafts=6, records=True, trees=True),
    "gdn_near": Kind(near=True),
    "kda_near": Kind("channel", -5.0, near=True),
    "gdn_step": Kind(step=True),
    "kda_step_record": Kind("channel", -5.0, records=True, step=True, forks=True),
    "kda_step_f16": Kind("channel", -5.0, torch.float16, 0, step=True, by_chance=True),
    "gdn_by_chance": Kind(state=torch.bfloat16, by_chance=True, moves=True),
    "gdn_recurrent": Kind(recurrent=True, moves=True),
    "kda_recurrent_bf16": Kind("channel", -5.0, torch.bfloat16, recurrent=True),
    "gdn_layers": Kind(records=True, forks=True, moves=True, layers=2),
}


def pages(
    kind: Kind, slots: int, places: int, device: str, layers: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Windows ``[slots, D, places]`` and states ``[layers, slots, HV, V, K]`` in pages of one
    buffer; windows are the first layer's."""
    size = torch.empty(0, dtype=kind.state).element_size()
    first = places * kind.D * 2
    content = first + kind.HV * kind.V * kind.K * size
    page = -(-content * 5 // 4 // 64) * 64
    memory = torch.zeros(layers * slots * page, dtype=torch.uint8, device=device)
    windows = memory.view(torch.bfloat16).as_strided(
        (slots, places, kind.D), (page // 2, kind.D, 1)
    )
    states = memory.view(kind.state).as_strided(
        (layers, slots, kind.HV, kind.V, kind.K),
        (slots * page // size, page // size, kind.V * kind.K, kind.K, 1),
        first // size,
    )
    return windows.transpose(1, 2), states


@dataclass
class Sequence:
    base: int  # its first row in the bank
    family: int
    prompt: int
    length: int
    done: int = 0
    accepted: int = 1
    window: int = 0
    slots: list[int] = field(default_factory=list)


class Graph:
    """Work that is captured on a GPU and replayed; elsewhere it just runs."""

    def __init__(self, work, device: str) -> None:
        self._work, self._graph = work, None
        if device == "cuda":
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                work()
            torch.cuda.current_stream().wait_stream(stream)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph):
                work()

    def __call__(self) -> None:
        if self._graph is None:
            self._work()
        else:
            self._graph.replay()


class Server:
    def __init__(self, kind: Kind, device: str, seed: int) -> None:
        self.kind, self.device = kind, device
        self.random = random.Random(seed)
        self.generator = torch.Generator(device).manual_seed(seed)
        self.weight = self.randn(kind.D, W) / 2
        self.gate = {
            "gate": "softplus" if kind.bound is None else "bounded",
            "A_log": self.randn(kind.HV),
            "dt_bias": self.randn(*kind.gate_shape),
            "lower_bound": kind.bound,
            "beta_form": "sigmoid",
            "qk_l2norm": True,
            "state_layout": "vk",
            "null_slot": 0,
        }
        self.norm_weight = self.randn(kind.V)
        self.chance = {"seed": SEED} if kind.by_chance else {}
        # Records are the general kernels', and tokens at which states are kept: so tokens alone are
        # too, as bits are an implementation's.
        is_general = kind.records or (kind.recurrent and kind.has_prefixes)
        self.impl = "cuda.general" if is_general and device == "cuda" else None
        rows = SEQUENCES * LONGEST
        self.x = torch.zeros(rows, kind.D, dtype=torch.bfloat16, device=device)
        self.g = torch.zeros(rows, *kind.gate_shape, dtype=torch.bfloat16, device=device)
        self.beta = torch.zeros(rows, kind.HV, dtype=torch.bfloat16, device=device)
        heads = (kind.HV, kind.V) if kind.step else (1, 1)
        self.z = torch.zeros(rows, *heads, dtype=torch.bfloat16, device=device)
        self.banks = (self.x, self.g, self.beta, self.z)
        dtype = torch.float32 if kind.near else torch.bfloat16
        self.expected = torch.zeros(rows, kind.HV, kind.V, dtype=dtype, device=device)
        self.families = [self.draw(FAMILY) for _ in range(3)]
        self.put(0, self.draw(LONGEST))  # the first rows of the bank are wrong guesses
        self.bases = list(range(LONGEST, rows, LONGEST))
        places = W - 1 + kind.drafts
        self.windows, self.states = pages(kind, SLOTS, places, device, kind.layers)
        self.pool, *self.others = self.states
        if not self.others:
            self.states = self.pool
        self.free, self.free_windows = list(range(SLOTS - 1, 0, -1)), list(range(SLOTS - 1, 0, -1))
        self.windows.fill_(torch.nan), self.states.fill_(torch.nan)
        self.bad = torch.zeros((), dtype=torch.int64, device=device)
        self.squares = torch.zeros(2, dtype=torch.float64, device=device)  # of errors, of numbers
        self.running: list[Sequence] = []
        self.prefixes: list[tuple[int, int, int, int]] = []  # family, tokens, slot, window
        self.finished = self.tokens = self.reused = self.rejected = self.padding = self.moved = 0
        self.steps = {size: self.make_step(size) for size in (4, 8)}
        self.make_alone()
        self.bad.zero_(), self.squares.zero_()  # captures have run on lists of nothing

    # ---- Rows

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device)

    def draw(self, count: int) -> tuple[torch.Tensor, ...]:
        kind = self.kind
        rows = (self.randn(count, kind.D), self.randn(count, *kind.gate_shape))
        return (*rows, self.randn(count, kind.HV), self.randn(count, *self.z.shape[1:]))

    def put(self, at: int, rows: tuple[torch.Tensor, ...]) -> None:
        for bank, given in zip(self.banks, rows, strict=True):
            bank[at : at + given.shape[0]] = given

    def split(self, rows: torch.Tensor) -> dict[str, torch.Tensor]:
        kind = self.kind
        widths = [kind.H * kind.K, kind.H * kind.K, kind.HV * kind.V]
        q, k, v = rows.split(widths, -1)
        return {
            "q": q.unflatten(-1, (kind.H, kind.K)),
            "k": k.unflatten(-1, (kind.H, kind.K)),
            "v": v.unflatten(-1, (kind.HV, kind.V)),
        }

    def ints(self, values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def wrong_rows(self, o, wanted, counts: torch.Tensor) -> torch.Tensor:
        """Which rows are not as they are alone; of those that count, how far they are."""
        if not self.kind.near:
            return (o != wanted).flatten(1).any(1)
        apart = (o.float() - wanted).flatten(1).square().sum(1)
        size = wanted.flatten(1).square().sum(1)
        self.squares.add_(torch.stack([torch.where(counts, x, 0).sum() for x in (apart, size)]))
        return ~(apart <= (10 * ERROR) ** 2 * size)

    def error(self) -> float:
        apart, size = self.squares.tolist()
        return (apart / size) ** 0.5 if size > 0 else 0.0

    # ---- The layer

    def convolved(self, x, cu, has, kept, lists, windows) -> torch.Tensor:
        if self.kind.trees:
            return x
        y, _ = deltic.causal_conv1d(
            x,
            self.weight,
            activation="silu",
            cu_seqlens=cu,
            state=windows[:, :, : W - 1],
            state_index=self.ints(lists["windows"]),
            write_index=self.ints(lists["windows_to"]),
            has_initial_state=has,
            null_slot=0,
            checkpoints=(*kept, self.ints(lists["ckpt_windows"]), windows[:, :, : W - 1])
            if lists["ckpt_tokens"]
            else None,
        )
        return y

    def normed(self, o, z, out=None):
        """The gated norm, where the layer has one."""
        if not self.kind.step:
            return o
        return deltic.rms_norm(o, self.norm_weight, z=z, activation="silu", out=out)

    def in_layers(self, rule, pool, v, o) -> None:
        """A call on the pool, and on the other layers' states, if it has any: their v and o are
        negative."""
        rule(0, pool, v, o)
        for i, other in enumerate(self.others if pool is self.pool else ()):
            found = torch.full_like(o, torch.nan)
            rule(1 + i, other, -v, found)
            self.bad.add_((found != -o).sum())

    def prefill(self, rows, out, lists, pool, windows) -> None:
        """Prompts of packed rows: (x, g, beta, z) of ``[T, ...]``."""
        x, g, beta, z = (t.unsqueeze(0) for t in rows)
        cu = self.ints(lists["cu"])
        has = torch.tensor(lists["has"], dtype=torch.bool, device=self.device)
        kept = [self.ints(lists[name]) for name in ("ckpt_cu", "ckpt_tokens")]
        y = self.convolved(x, cu, has, kept, lists, windows).to(out.dtype)
        form = {"form": "recurrent", "impl": self.impl} if self.kind.recurrent else {}
        o = out.unsqueeze(0)
        parts, has_kept = self.split(y), bool(lists["ckpt_tokens"])
        keeps = (*kept, self.ints(lists["ckpt_slots"])) if has_kept else ()

        def rule(layer: int, state_pool, v, out) -> None:
            deltic.delta_rule(
                *(parts["q"], parts["k"], v),
                **form,
                g=g,
                beta=beta,
                **self.gate,
                cu_seqlens=cu,
                state_pool=state_pool,
                read_index=self.ints(lists["read"]),
                write_index=self.ints(lists["write"]),
                has_initial_state=has,
                checkpoints=(*keeps, state_pool) if has_kept else None,
                split="auto" if self.kind.near or self.kind.recurrent else "off",
                out=out,
            )

        self.in_layers(rule, pool, parts["v"], o)
        if self.kind.step:
            self.normed(o.clone(), z, o)

    def make_step(self, size: int):
        """A step of so many sequences: (its lists on the host, those on the device, the graph)."""
        kind, tokens = self.kind, size * (1 + self.kind.drafts) + 1
        sizes = {"src": tokens, "what": tokens, "cu": size + 1, "window": size}
        sizes |= {"accepted": size, "table": size * kind.columns, "right": size}
        sizes |= {"parents": size * (1 + kind.drafts), "to": size, "position": size}
        host = torch.zeros(sum(sizes.values()), dtype=torch.int32)
        device, at, lists = torch.zeros_like(host, device=self.device), 0, {}
        for name, count in sizes.items():
            lists[name] = device[at : at + count]
            at += count
        table = lists["table"].view(size, -1)
        rows = [torch.zeros_like(bank[:tokens]) for bank in self.banks]
        o = torch.zeros_like(self.expected[:tokens], dtype=torch.bfloat16)
        record, tree = None, {}
        if kind.trees:
            tree["parents"] = lists["parents"].view(size, -1)
        if kind.records:
            shape = (kind.layers, size, 1 + kind.drafts, kind.HV, kind.record_width)
            record = torch.full(shape, torch.nan, device=self.device)
        to = {"write_index": lists["to"]} if kind.forks else {}
        chance = {**self.chance, "positions": lists["position"]} if kind.by_chance else {}

        def work() -> None:
            for bank, row in zip(self.banks, rows, strict=True):
                torch.index_select(bank, 0, lists["src"], out=row)
            if kind.step:
                self.step_at_once(rows, lists, table, record, chance, o)
            else:
                self.step_in_parts(rows, lists, table, record, {**tree, **chance}, o)
            if record is not None:
                where = {"read_index": table[:, 0], "null_slot": 0, "state_layout": "vk"}
                where |= {"impl": self.impl, **to, **tree}
                whole = record if self.others else record[0]
                deltic.commit(self.states, record=whole, accepted=lists["right"], **where)
            wanted, counts = self.expected.index_select(0, lists["src"]), lists["what"] == 1
            wrong = self.wrong_rows(o, wanted, counts) & counts
            wrong |= (o != 0).flatten(1).any(1) & (lists["what"] == 2)
            self.bad.add_(wrong.sum())

        return sizes, host, device, Graph(work, self.device)

    def laid(self, rows, size: int):
        """A step's rows: packed, where tokens are drafted, else one per sequence."""
        return (row.unsqueeze(0) if self.kind.drafts else row[:size].unsqueeze(1) for row in rows)

    def step_at_once(self, rows, lists, table, record, chance, out) -> None:
        """A step's convolution, decode and norm in one call."""
        x, g, beta, z, out = self.laid((*rows, out), len(table))
        call = {"read_index": table[:, 0]}
        if self.kind.drafts:
            call = {"cu_seqlens": lists["cu"], "accepted": lists["accepted"], "read_index": table}
        deltic.step(
            x,
            conv_weight=self.weight,
            conv_state=self.windows,
            conv_index=lists["window"],
            g=g,
            beta=beta,
            z=z,
            norm_weight=self.norm_weight,
            **self.gate,
            **call,
            **chance,
            out=out,
            state_pool=self.pool,
            record=None if record is None else record[0],
        )

    def step_in_parts(self, rows, lists, table, record, more, out) -> None:
        """A step's convolution and decode."""
        kind = self.kind
        common = {"activation": "silu", "null_slot": 0, "state_index": lists["window"]}
        x, g, beta, _, out = self.laid((*rows, out), len(table))
        call, index, y = {}, table[:, 0], x
        if kind.drafts:
            call, index = {"cu_seqlens": lists["cu"], "accepted": lists["accepted"]}, table
        if not kind.trees:
            y = deltic.causal_conv1d_update(x, self.windows, self.weight, **common, **call)
        if kind.drafts and record is not None:
            call, index = {"cu_seqlens": lists["cu"]}, table[:, 0]
        parts = self.split(y)

        def rule(layer: int, state_pool, v, out) -> None:
            deltic.decode(
                *(parts["q"], parts["k"], v),
                g=g,
                beta=beta,
                **self.gate,
                **call,
                **more,
                state_pool=state_pool,
                read_index=index,
                record=None if record is None else record[layer],
                impl=self.impl,
                out=out,
            )

        self.in_layers(rule, self.pool, parts["v"], out)

    def make_alone(self) -> None:
        """One sequence without company: its tokens one by one."""
        self.alone_windows, (self.alone_pool,) = pages(self.kind, 2, W - 1, self.device)
        self.at = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.position = self.ints([0])
        slot = self.ints([1])
        chance = {**self.chance, "positions": self.position} if self.chance else {}

        def work() -> None:
            x, g, beta, z = (b.index_select(0, self.at) for b in self.banks)
            y = x
            if not self.kind.trees:
                y = deltic.causal_conv1d_update(
                    x,
                    self.alone_windows,
                    self.weight,
                    activation="silu",
                    state_index=slot,
                )
            o = deltic.decode(
                **self.split(y.unsqueeze(1).to(self.expected.dtype)),
                g=g.unsqueeze(1),
                beta=beta.unsqueeze(1),
                **self.gate,
                state_pool=self.alone_pool,
                read_index=slot,
                impl=self.impl,
                **chance,
            )
            self.expected.index_copy_(0, self.at, self.normed(o[0], z))
            self.at.add_(1), self.position.add_(1)

        self.alone = Graph(work, self.device)

    def serve_alone(self, s: Sequence) -> None:
        first = s.base
        if self.kind.recurrent:  # token by token from the first one on
            self.alone_windows.zero_(), self.alone_pool.zero_()
        else:
            self.prefill_alone(s)
            first += s.prompt
        self.at.fill_(first), self.position.fill_(first - s.base)
        for _ in range(s.base + s.length - first):
            self.alone()

    def prefill_alone(self, s: Sequence) -> None:
        lists = {"cu": [0, s.prompt], "has": [False], "ckpt_tokens": [], "ckpt_cu": [0, 0]}
        lists |= dict.fromkeys(("windows", "windows_to", "read", "write"), [1])
        prompt = slice(s.base, s.base + s.prompt)
        rows = [bank[prompt] for bank in self.banks]
        self.prefill(rows, self.expected[prompt], lists, self.alone_pool, self.alone_windows)

    # ---- Serving

    def release(self, slots: list[int], windows: list[int]) -> None:
        for slot in slots:
            self.states.select(-4, slot).fill_(torch.nan)
        for window in windows:
            self.windows[window].fill_(torch.nan)
        self.free[:0], self.free_windows[:0] = slots, windows

    def arrival(self) -> Sequence:
        below = self.random.randrange
        prompt = 1 + below(self.kind.longest_prompt)
        s = Sequence(self.bases.pop(), below(3), prompt, prompt + 1 + below(20))
        self.put(s.base, self.draw(s.length))
        shared = min(FAMILY, s.length)
        self.put(s.base, tuple(rows[:shared] for rows in self.families[s.family]))
        self.serve_alone(s)
        s.slots = [self.free.pop() for _ in range(self.kind.slots)]
        s.window = self.free_windows.pop()
        return s

    def admit(self) -> None:
        names = ("cu", "has", "read", "write", "windows", "windows_to", "ckpt_cu", "ckpt_tokens")
        lists = {name: [] for name in (*names, "ckpt_slots", "ckpt_windows")}
        lists["cu"], lists["ckpt_cu"] = [0], [0]
        arrivals, made = [], []
        for _ in range(1 + self.random.randrange(2)):
            if min(len(self.free), len(self.free_windows)) < 16 or not self.bases:
                break
            s = self.arrival()
            arrivals.append(s)
            known = [p for p in self.prefixes if p[0] == s.family and p[1] < s.prompt]
            best = max(known, key=lambda p: p[1], default=None)
            s.done = 0 if best is None else best[1]
            self.reused += best is not None
            lists["read"].append(s.slots[0] if best is None else best[2])
            lists["windows"].append(s.window if best is None else best[3])
            lists["has"].append(best is not None)
            lists["write"].append(s.slots[0]), lists["windows_to"].append(s.window)
            lists["cu"].append(lists["cu"][-1] + s.prompt - s.done)
            most = min(FAMILY, s.prompt)
            places = range(CHUNK, most + 1, CHUNK)
            if (self.kind.near or self.kind.recurrent) and most > 2:
                places = sorted({1 + self.random.randrange(most) for _ in range(2)})
            for at in places:
                old = any(p[:2] == (s.family, at) for p in self.prefixes + made)
                if not self.kind.has_prefixes or old or at <= s.done or len(self.free) < 24:
                    continue
                made.append((s.family, at, self.free.pop(), self.free_windows.pop()))
                lists["ckpt_tokens"].append(at - s.done)
                lists["ckpt_slots"].append(made[-1][2])
                lists["ckpt_windows"].append(made[-1][3])
            lists["ckpt_cu"].append(len(lists["ckpt_tokens"]))
        if not arrivals:
            return
        gap = self.random.randrange(3)  # rows of padding
        source = [r for s in arrivals for r in range(s.base + s.done, s.base + s.prompt)]
        index = torch.tensor(source + [0] * gap, device=self.device)
        rows = [bank[index] for bank in self.banks]
        out = torch.full_like(self.expected[: len(index)], torch.nan, dtype=torch.bfloat16)
        self.prefill(rows, out, lists, self.pool, self.windows)
        wanted = self.expected[index]
        wanted[len(source) :] = 0
        self.bad.add_(self.wrong_rows(out, wanted, index >= 0).sum())
        self.tokens += len(source)
        for s in arrivals:
            s.done = s.prompt
        self.running += arrivals
        self.prefixes += made

    def move(self, s: Sequence) -> None:
        """A sequence's states to other slots: at once, or its heads by way of two other pools."""
        kind, below = self.kind, self.random.randrange
        count, old = len(s.slots), self.ints(s.slots)
        own = {"state_layout": "vk", "null_slot": 0}
        if below(2):
            first = 1 + below(kind.HV - 1)
            parts = [(0, first), (first, kind.HV - first)]
            there = self.random.sample(range(1, 9), count)
            lists = {"read_index": self.ints(there), "write_index": old}
            pools = []
            for at, heads in parts:
                shape = (*self.states.shape[:-4], 9, heads, kind.K, kind.V)
                pools.append(torch.full(shape, torch.nan, device=self.device))
                deltic.move_states(
                    *(self.states, pools[-1]),
                    read_index=old,
                    write_index=lists["read_index"],
                    read_head=at,
                    num_heads=heads,
                    write_layout="kv",
                    **own,
                )
            self.release(s.slots, [])
            s.slots = [self.free.pop() for _ in range(count)]
            lists["write_index"] = self.ints(s.slots)
            for (at, heads), pool in zip(parts, pools, strict=True):
                deltic.move_states(
                    *(pool, self.states), **lists, write_head=at, num_heads=heads, write_layout="vk"
                )
        else:
            new = [self.free.pop() for _ in range(count)]
            deltic.move_states(self.states, read_index=old, write_index=self.ints(new), **own)
            self.release(s.slots, [])
            s.slots = new
        self.moved += 1

    def step(self) -> None:
        below, kind = self.random.randrange, self.kind
        if len(self.running) < 10 and below(3):
            self.admit()
        if kind.moves and self.running and len(self.free) > 2 * kind.slots and below(4) == 0:
            self.move(self.random.choice(self.running))
        first, live = below(len(self.running) or 1), len(self.running)
        batch: list[Sequence | None] = []
        for row in range(min(1 + below(8), max(live, 1))):
            is_padding = below(5) == 0 or row >= live
            batch.append(None if is_padding else self.running[(first + row) % live])
        size = 4 if len(batch) <= 4 else 8
        batch += [None] * (size - len(batch))
        sizes, host, device, graph = self.steps[size]
        tokens = sizes["src"]
        src, what, cu, windows, accepted, table, rights = [], [], [0], [], [], [], []
        parents: list[int] = []
        to, positions = [], []
        for s in batch:
            if s is None:
                count = below(2) if kind.drafts else 1
                self.padding += 1
                src += [below(LONGEST)] * count
                what += [2] * count
                windows.append(0), accepted.append(below(3))
                table += [below(2) - 1] * kind.columns
                to.append(0), positions.append(0)
                rights.append(below(1 + count))
                parents += range(-1, kind.drafts)
            else:
                count = 1 + below(1 + kind.drafts)
                right = min(1 + below(count), s.length - s.done)
                places = list(range(right))
                if kind.trees:  # the right ones are a path through the others
                    places = sorted(self.random.sample(range(count), right))
                    before = [below(1 + t) - 1 for t in range(1 + kind.drafts)]
                    for t, parent in zip(places, [-1, *places], strict=False):
                        before[t] = parent
                    parents += before
                else:
                    parents += range(-1, kind.drafts)
                real = iter(range(s.base + s.done, s.base + s.done + right))
                src += [next(real) if t in places else below(LONGEST) for t in range(count)]
                what += [int(t in places) for t in range(count)]
                windows.append(s.window), accepted.append(s.accepted)
                table += s.slots[:1] * kind.columns if kind.records else s.slots
                to.append(s.slots[-1]), positions.append(s.done)
                if kind.forks:
                    s.slots.reverse()
                rights.append(places[-1] + 1)
                self.tokens += right
                self.rejected += count - right
                s.done, s.accepted = s.done + right, right
            cu.append(cu[-1] + count)
        beyond = tokens - len(src)  # past the last offset: o is 0 there
        src += [0] * beyond
        what += [2 if kind.drafts else 0] * beyond
        values = src + what + cu + windows + accepted + table + rights + parents + to + positions
        host.copy_(torch.tensor(values, dtype=torch.int32))
        device.copy_(host)
        graph()
        for s in [s for s in self.running if s.done >= s.length]:
            self.running.remove(s)
            self.release(s.slots, [s.window])
            self.bases.insert(0, s.base)
            self.finished += 1
        if self.prefixes and below(40) == 0:  # one is forgotten
            gone = self.prefixes.pop(below(len(self.prefixes)))
            self.release([gone[2]], [gone[3]])


def run(kind: str, device: str, steps: int, seed: int, tell: Callable[[str], object] = str) -> str:
    """Serves so many steps; a line about it, or an AssertionError.

    About every five seconds `tell` gets a line: how far it is, and how long the rest will take.
    """
    began = time.monotonic()
    with torch.no_grad():
        server = Server(KINDS[kind], device, seed)
        first = last = time.monotonic()
        for i in range(steps):
            server.step()
            if i % 200 == 199 or i == steps - 1:
                wrong = int(server.bad)
                assert wrong == 0, f"{kind}: {wrong} wrong rows by step {i + 1}, seed {seed}"
                far = server.error()
                assert far <= ERROR, f"{kind}: error {far:.2e} by step {i + 1}, seed {seed}"
                now = time.monotonic()
                if now - last > 5:
                    last, rest = now, (now - first) / (i + 1) * (steps - i - 1)
                    tell(f"{kind}: {i + 1} of {steps} steps, about {rest:.0f} s left")
    assert server.finished > 0 and server.tokens > steps and (server.moved > 0) == server.kind.moves
    return (
        f"{kind}: {steps} steps, {server.tokens} tokens of {server.finished} finished sequences, "
        f"{server.reused} from a prefix, {server.rejected} drafts rejected, {server.padding} rows "
        f"of padding{f', {server.moved} moves' if server.moved else ''}: "
        f"no wrong row{f', error {far:.1e}' if far else ''}, {time.monotonic() - began:.1f} s"
    )


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(arguments: list[str]) -> int:
    began = time.monotonic()
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--steps", type=int, default=10000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=240.0, help="for all kinds together")
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    given = parser.parse_args(arguments)
    kinds = given.kinds or list(KINDS)
    for i, kind in enumerate(kinds):
        line = run(kind, given.device, given.steps, given.seed, progress)
        print(f"{line}, seed {given.seed}", flush=True)
        if time.monotonic() - began > given.seconds and i + 1 < len(kinds):
            print(f"soak: stopped after {given.seconds:g} s, not run: {' '.join(kinds[i + 1 :])}")
            return 1
    print(f"soak: {len(kinds)} kinds, {time.monotonic() - began:.0f} s, no wrong row", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
