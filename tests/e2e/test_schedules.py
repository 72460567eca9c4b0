"""The schedule changes, the numbers do not: random modules under random budgets, plans and cuts.

What contract 2 promises bit for bit is asked for bit for bit: among all schedules of one program (unless
several blocks and several micro-batches add to one gradient, in the order of the plan), and beside eager
where no activation gradient is summed across blocks and micro-batches are not summed.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import megacompile
from megacompile.hardware.machine import Machine
from megacompile.schedule.plan import BlockPlan, GroupPlan, Mode, Plan
from megacompile.schedule.workload import Workload
from tests.support.reference import Habits, train_eager

WIDTH, ROWS, STEPS = 8, 12, 2
FEW = settings(
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # to shrink one costs minutes
    suppress_health_check=[HealthCheck.too_slow],
)
_CAPTURED: dict[Any, Any] = {}  # what does not depend on the schedule is compiled once


class Block(nn.Module):
    """One layer of a random stack."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.norm = nn.RMSNorm(WIDTH) if kind == "gated" else nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH, bias=kind != "gated"), nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.2)

    def forward(self, h: Tensor) -> Tensor:
        a, b, c = self.up(self.norm(h)).chunk(3, -1)
        if self.kind == "attention":
            inner = nn.functional.scaled_dot_product_attention(a, b, c, is_causal=True)
        elif self.kind == "dropout":
            inner = self.drop(torch.tanh(a)) * b + c
        else:
            inner = nn.functional.silu(a) * b + c
        return h + self.down(inner)


class Stack(nn.Module):
    """Embedding, blocks, head; ``tied``, with a block called twice, or with a skip from start to end."""

    def __init__(self, kinds: tuple[str, ...], tied: bool, again: bool, skip: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(ROWS, WIDTH)
        self.layers = nn.ModuleList(Block(k) for k in kinds)
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.again, self.skip = again, skip

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = start = self.embed(ids)
        for layer in [*self.layers, *([self.layers[0]] if self.again else [])]:
            h = layer(h)
        h = h + start if self.skip else h
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


@dataclass(frozen=True)
class Setup:
    kinds: tuple[str, ...]
    tied: bool
    again: bool
    skip: bool
    micro: int
    clip: float | None

    def model(self) -> Stack:
        torch.manual_seed(0)
        return Stack(self.kinds, self.tied, self.again, self.skip).train()

    def steps(self) -> list[list[dict[str, Tensor]]]:
        generator = torch.Generator().manual_seed(1)
        ids = torch.randint(0, ROWS, (STEPS, self.micro, 2, 5), generator=generator)
        return [[{"ids": i, "labels": i.flip(1)} for i in micro] for micro in ids]

    @property
    def ordered(self) -> bool:
        """Whether each gradient's sum has one order, whatever the plan."""
        return self.micro == 1 or not (self.tied or self.again)

    @property
    def habits(self) -> Habits:
        return Habits(self.clip, ((1e-2, 0.1), (1e-3, 0.0)))


SETUPS = st.builds(
    Setup,
    st.lists(st.sampled_from(("plain", "gated", "attention", "dropout")), min_size=1, max_size=3).map(tuple),
    tied=st.booleans(),
    again=st.booleans(),
    skip=st.booleans(),
    micro=st.sampled_from((1, 1, 2)),
    clip=st.sampled_from((None, 0.5)),
)


def start(setup: Setup, budget: str = "1GB", **options: Any) -> megacompile.Program:
    model = setup.model()
    program = megacompile.compile(
        model, budget, optimizer=setup.habits.optimizer(model), max_grad_norm=setup.clip,
        compute_dtype=torch.float32, **options,
    )  # fmt: skip
    frontend = program._session.compiler.frontend
    before = _CAPTURED.setdefault(setup, frontend)
    frontend._fronts, frontend._made = before._fronts, before._made
    frontend._differentiated = _CAPTURED.setdefault("templates", {})
    return program


def run(setup: Setup, program: megacompile.Program) -> tuple[list[float], dict[str, Tensor]]:
    losses = [program.train_step(micro).loss for micro in setup.steps()]
    result = [float(loss) for loss in losses], program.state_dict()
    assert program.memory.device_peak_bytes <= program.memory.budget_bytes
    program.close()
    return result


def least(setup: Setup) -> int:
    try:
        start(setup, "100B").prepare(setup.steps()[0])
    except megacompile.BudgetError as error:
        assert error.least_bytes is not None
        return error.least_bytes
    raise AssertionError("a budget of 100 bytes was accepted")


def any_plan(seed: int) -> Callable[[Workload, Mode, Machine, int], Plan]:
    """A plan whose every choice is drawn by itself."""

    def plan(work: Workload, mode: Mode, machine: Machine, budget_bytes: int) -> Plan:
        rng = random.Random(seed)
        blocks = [
            BlockPlan(
                rng.choice(("all", "some", "narrow", "attention", "none", "least")),
                rng.choice(("device", "host")),
                rng.randint(0, 1),
            )
            for _ in work.blocks
        ]
        groups = [
            GroupPlan(
                rng.choice(("stream", "micro", "step")),
                rng.randint(0, 5),
                update=rng.choice(("immediate", "deferred")),
            )
            for _ in work.groups
        ]
        order = rng.choice(("depth", "breadth"))
        return Plan(tuple(blocks), tuple(groups), order, rng.randint(0, 3), rng.randint(1, 3))

    return plan


def equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[n], b[n]) for n in a)


@settings(FEW, max_examples=5)
@given(SETUPS, st.integers(0, 1 << 30), st.sampled_from((0.0, 0.2, 1.0)))
def test_budgets_and_plans_change_no_bit(setup: Setup, seed: int, share: float) -> None:
    reference = start(setup, planner=any_plan(seed))
    losses, weights = run(setup, reference)
    lowest, highest = least(setup), reference.memory.predicted_peak_bytes
    others = [
        start(setup, f"{max(lowest, int(lowest + share * (highest - lowest)))}B"),
        *(start(setup, planner=any_plan(seed + i)) for i in (1, 2, 3)),
    ]
    for program in others:
        found = run(setup, program)
        assert found[0] == losses or not setup.ordered
        assert equal(found[1], weights) or not setup.ordered
        torch.testing.assert_close(torch.tensor(found[0]), torch.tensor(losses), rtol=1e-5, atol=0)
    eager = train_eager(setup.habits.trainer(copy.deepcopy(setup.model())), setup.steps())
    if setup.micro == 1 and not (setup.skip or setup.again):
        assert eager.losses == losses
        assert all(torch.equal(weights[n], v) for n, v in eager.weights.items())
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(eager.losses), rtol=1e-5, atol=0)


@settings(FEW, max_examples=3)
@given(SETUPS, st.sets(st.integers(1, ROWS - 1), min_size=1, max_size=3), st.integers(0, 1 << 30))
def test_cuts_change_rounding_at_most(setup: Setup, places: set[int], seed: int) -> None:
    """A cut table that is only looked up changes no bit; sums over pieces, as of a norm, are rounded anew."""
    table, layer = (0, *sorted(places), ROWS), (0, 2 * min(places), 3 * WIDTH)
    first = {"layers.0.up.weight": layer}
    if setup.kinds[0] != "gated":
        first["layers.0.up.bias"] = layer
    whole, weights = run(setup, start(setup, planner=any_plan(seed)))
    for cuts, bitwise in (({"embed.weight": table}, not (setup.tied or setup.clip)), (first, False)):
        program = start(setup, planner=any_plan(seed + 1))
        session = program._session
        session.decided = session.decided.anew(session.decided.room, cuts)
        losses, found = run(setup, program)
        pieces = {p for p in session.compiler.pieces(session.decided) if "[" in p}
        assert pieces == {f"{n}[{a}:{b}]" for n, c in cuts.items() for a, b in itertools.pairwise(c)}
        assert not (bitwise and setup.ordered) or (losses == whole and equal(found, weights))
        torch.testing.assert_close(torch.tensor(losses), torch.tensor(whole), rtol=1e-5, atol=0)
