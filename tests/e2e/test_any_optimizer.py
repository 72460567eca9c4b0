"""Any optimizer: its own class steps on the host, bitwise as in a plain loop."""

from __future__ import annotations

import copy
import functools
import math
import mmap
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from megacompile.blocks.cpu_products import float32_products
from megacompile.blocks.memory_meter import StorageMeter
from megacompile.blocks.weight_groups import GroupLayout, Parameter, Slot
from megacompile.capture.trace import TRACING
from megacompile.cli.plan_arguments import OPTIMIZERS
from megacompile.state import host_budget, param_group, torch_optimizer
from megacompile.state.several_optimizers import Several
from tests.support.models import Plain, batch_for, build
from tests.support.reference import EagerTrainer, HostAdamW

Make = Callable[[Any], torch.optim.Optimizer]


def lion(groups: Any) -> torch.optim.Optimizer:
    made: torch.optim.Optimizer = pytest.importorskip("lion_pytorch").Lion(groups, weight_decay=0.1)
    return made


def schedule_free(groups: Any) -> torch.optim.Optimizer:
    made = pytest.importorskip("schedulefree").AdamWScheduleFree(groups, warmup_steps=3)
    made.train()
    assert isinstance(made, torch.optim.Optimizer)
    return made


def transformers_adafactor(groups: Any) -> torch.optim.Optimizer:
    made = pytest.importorskip("transformers.optimization").Adafactor(groups, relative_step=False)
    assert isinstance(made, torch.optim.Optimizer)
    return made


class Heavy(torch.optim.SGD):
    """A class of the user's own, which keeps a number of each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["largest"] = max(state.get("largest", 0.0), float(p.grad.abs().max()))
                    state["mean"] = p.grad + state["mean"] * 0.5 if "mean" in state else p.grad.clone()
                    p.add_(state["mean"] / (state["largest"] + 1.0), alpha=-group["lr"])


MAKES: dict[str, Make] = {
    "SGD": lambda g: torch.optim.SGD(g, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD, plain": torch.optim.SGD,
    "AMSGrad": lambda g: torch.optim.Adam(g, amsgrad=True),
    "Adagrad": lambda g: torch.optim.Adagrad(g, initial_accumulator_value=0.1),
    "RMSprop": lambda g: torch.optim.RMSprop(g, centered=True, momentum=0.5),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "ASGD": lambda g: torch.optim.ASGD(g, t0=2),
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
    "Adafactor of transformers": transformers_adafactor,
    "Lion": lion,
    "schedule-free": schedule_free,
    "the user's own": Heavy,
}


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {k: torch.randn(4, n, generator=generator) for k, n in (("x", 16), ("y", 3))}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    return [{"params": matrices, "lr": 1e-2}, {"params": vectors, "lr": 3e-3}]


class Pair:
    """A program, and the plain loop that it is to equal."""

    def __init__(
        self,
        make: Make,
        model: nn.Module,
        groups: Callable[[nn.Module], Any] = groups_of,
        plain: Make | None = None,
        **options: Any,
    ) -> None:
        self.eager, self.options, self.groups, self.make = copy.deepcopy(model), options, groups, make
        self.plain = (plain or make)(groups(self.eager))
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.plain, 0.8)
        self.compile(model)

    def compile(self, model: nn.Module) -> None:
        options = {"hbm_budget": "1GB", "compute_dtype": torch.float32, "max_grad_norm": 0.5} | self.options
        self.program = megacompile.compile(model, optimizer=self.make(self.groups(model)), **options)
        self.ours = torch.optim.lr_scheduler.ExponentialLR(self.program.optimizer, 0.8)

    def step(self, *batches: dict[str, Any]) -> None:
        self.program.train_step(list(batches))
        self.plain.zero_grad()
        for one in batches:
            (self.eager(**one) / len(batches)).backward()
        if self.options.get("max_grad_norm", 0.5) is not None:
            nn.utils.clip_grad_norm_(self.eager.parameters(), 0.5)
        with float32_products():  # as Muon's run in a program, on a CPU without bf16 ones
            self.plain.step()
        self.schedule.step()
        self.ours.step()

    def check(self) -> None:
        state = self.program.state_dict()
        for name, value in self.eager.named_parameters():
            assert torch.equal(state[name], value), name


def host_bytes(program: megacompile.Program) -> int:
    """What a program's plan takes of the host."""
    session = program._session
    scheduled = session.scheduled()
    form, planned = session.settings.optimizer_state, scheduled.planned
    return host_budget.host_bytes(scheduled.compiled.assembly, form, planned.plan, planned.step).total


class Wide(nn.Module):
    """Layers of which two in FP32 are more than an update's scratch."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(96, 96) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x.square().mean()


def wide(seed: int) -> dict[str, Tensor]:
    return {"x": torch.randn(4, 96, generator=torch.Generator().manual_seed(seed))}


@pytest.mark.slow_cases(r"(?!SGD\]|sched)")
@pytest.mark.parametrize("name", MAKES)
def test_trains_bitwise_as_a_plain_loop_and_resumes(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With two param groups, a schedule, clipping, micro-batches, chunks, and a checkpoint in the middle;
    from it the least device budget goes on, with state on a drive."""
    monkeypatch.setattr(param_group, "CHUNK", 64)
    torch.manual_seed(0)
    model = Wide()
    fresh = copy.deepcopy(model)
    pair = Pair(MAKES[name], model)
    for index in range(3):
        pair.step(wide(index), wide(index + 10))
    pair.program.save(tmp_path / "saved")
    before, room = pair.ours.state_dict(), host_bytes(pair.program) * 9 // 10
    pair.program.close()
    pair.options |= {"host_budget": f"{room}B", "offload_dir": tmp_path, "example_batch": [wide(0), wide(10)]}
    pair.options["hbm_budget"] = "1kB"
    with pytest.raises(megacompile.BudgetError) as refused:
        pair.compile(copy.deepcopy(fresh))
    pair.options["hbm_budget"] = f"{refused.value.least_bytes}B"
    pair.compile(fresh)
    assert {"nvme", "nvme-all"} & {group.state for group in pair.program.plan.groups}
    pair.program.load(tmp_path / "saved")
    pair.ours.load_state_dict(before)
    for index in range(3, 6):
        pair.step(wide(index), wide(index + 10))
    pair.check()
    pair.program.close()


class Layers(nn.Module):
    """A second layer that only some batches use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(16, 16), nn.Linear(16, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor, y: Tensor, both: bool = True) -> Tensor:
        h = self.first(x)
        return nn.functional.mse_loss(self.third(h + self.second(x) if both else h), y)


def test_no_update_runs_while_torch_traces() -> None:
    """A flag of tracing is the whole process's; by it torch's optimizers keep numbers as tensors, and round
    otherwise. So both hold one lock."""
    held: dict[str, list[bool]] = {"update": [], "capture": []}

    class Watched(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            held["update"].append(TRACING._is_owned())  # type: ignore[attr-defined]
            return super().step(closure)

    class Traced(Layers):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            held["capture"].append(TRACING._is_owned())  # type: ignore[attr-defined]
            return super().forward(*args, **kwargs)

    model = Traced()
    optimizer = Watched(model.parameters(), lr=0.1)
    program = megacompile.compile(model, "1GB", optimizer=optimizer, compute_dtype=torch.float32)
    held["update"].clear()  # of trials, which no other thread's tracing meets
    program.train_step(batch(0))
    program.synchronize()
    assert held["update"] and held["capture"] and all(held["update"]) and all(held["capture"])
    program.close()


@pytest.mark.filterwarnings("ignore:Compiling another program")
@pytest.mark.parametrize("name", ["RAdam", "Adafactor", "schedule-free"])
def test_what_has_no_gradient_in_a_step_is_left_alone(name: str) -> None:
    torch.manual_seed(0)
    pair = Pair(MAKES[name], Layers(), max_grad_norm=None)
    for index, both in enumerate((False, True, False, False, True)):
        pair.step({**batch(index), "both": both})
    pair.check()
    pair.program.close()


@pytest.mark.parametrize("name", ["SGD", "Adafactor"])
def test_masters_of_bfloat16_weights_are_stepped_in_fp32(name: str) -> None:
    """Halves are joined and split bit for bit: one step by gradients that are given."""
    torch.manual_seed(0)
    model = Plain(depth=1)
    eager = copy.deepcopy(model)
    plain = MAKES[name](groups_of(eager))
    program = megacompile.compile(
        model, "1GB", optimizer=MAKES[name](groups_of(model)), example_batch=batch(0)
    )
    state = program._session.runtime.state  # type: ignore[union-attr]
    named = dict(eager.named_parameters())
    for step in range(3):
        for group in state.groups:
            if not group.trainable:
                continue
            grad = torch.zeros(group.elements)
            for slot in group.slots:
                p = named[slot.parameter.name]
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
                grad[slot.offset :][: p.numel()] = p.grad.reshape(-1)
            form = state.form
            assert isinstance(form, torch_optimizer.TorchOptimizer)
            meter = StorageMeter()
            meter.ignore(state.arena.tensor)
            meter.ignore(grad)
            with meter:
                state.update(group.index, grad, form.settings(), range(len(group.slots)), threads=1)
            assert meter.peak <= state.scratch_bytes
        plain.step()
    values = program.state_dict()
    assert all(torch.equal(values[name], p) for name, p in named.items())
    program.close()


def test_a_setting_that_asks_for_state_that_is_not_there_is_refused() -> None:
    torch.manual_seed(0)
    pair = Pair(MAKES["SGD, plain"], Plain(depth=1))
    pair.step(batch(0))
    pair.program.optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(megacompile.MegacompileError, match=r"SGD keeps momentum_buffer .* compile the model"):
        pair.program.train_step(batch(1))
    pair.program.optimizer.param_groups[0]["momentum"] = 0
    pair.check()
    pair.step(batch(1))
    pair.check()
    pair.program.close()


def test_a_checkpoint_of_another_optimizer_is_refused(tmp_path: Path) -> None:
    torch.manual_seed(0)
    pair = Pair(MAKES["SGD"], Plain(depth=1))
    pair.step(batch(0))
    pair.program.save(tmp_path / "saved")
    pair.program.close()
    other = Pair(MAKES["RAdam"], Plain(depth=1))
    other.program.prepare(batch(0))
    with pytest.raises(
        megacompile.MegacompileError, match=r"state of torch\.optim\.sgd\.SGD and this .*\.RAdam"
    ):
        other.program.load(tmp_path / "saved")
    other.program.close()


def test_each_optimizer_of_torch_is_told_of_planned_and_tried_or_refused() -> None:
    classes = {
        name
        for name, kind in vars(torch.optim).items()
        if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and name != "Optimizer"
    }
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "optimizers.md").read_text()
    table, refused = (
        page[page.index("| AdamW, Adam") : page.index('\n\n"Chunks"')],
        page.rpartition("## What")[2],
    )
    told = {name for name in classes if re.search(rf"\b{name}\b", table)}
    assert sorted(classes - told) == ["LBFGS", "SparseAdam"]
    assert all(f"`{name}`" in refused for name in classes - told)
    assert {name.lower() for name in told} - {"adam"} == set(OPTIMIZERS)
    parameters = [{"params": [nn.Parameter(torch.ones(2, 2))]}]
    tried = {type(MAKES[name](parameters)).__name__ for name in MAKES}
    assert told - tried == {"Muon", "AdamW"}  # by test_muon.py; by a kernel of the host's


class Coupled(torch.optim.SGD):
    """Steps by a length that all gradients decide."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            trained = [p for p in group["params"] if p.grad is not None]
            total = sum(float(p.grad.abs().sum()) for p in trained)  # type: ignore[union-attr]
            for p in trained:
                assert p.grad is not None
                p.sub_(p.grad, alpha=group["lr"] / (1 + total))


class Estimating(torch.optim.SGD):
    """Notes in its param group what all gradients decide, as Prodigy does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["d"] = max(group.get("d", 0.0), *(float(p.grad.abs().max()) for p in group["params"]))


class Random(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.data += torch.rand_like(p)


class Counting(torch.optim.SGD):
    count = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count += 1


class Writing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1


class Odd(torch.optim.SGD):
    """Keeps what is not laid out by a parameter's sizes."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["last"] = torch.zeros(10)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (torch.optim.LBFGS, r"LBFGS computes the loss anew .* closure"),
        (torch.optim.SparseAdam, r"SparseAdam cannot run .* does not support dense gradients"),
        (lambda p: torch.optim.SGD(p, fused=True), r"SGD\(fused=True\) .* leave the option out"),
        (lambda p: torch.optim.NAdam(p, capturable=True), r"NAdam\(capturable=True\)"),
        (lambda p: torch.optim.RAdam(p, differentiable=True), r"RAdam\(differentiable=True\)"),
        (Coupled, r"Coupled cannot run .* depends on the others"),
        (Estimating, r"Estimating cannot run .* depends on the others"),
        (Random, "draws random numbers"),
        (Counting, "sets count of the optimizer itself"),
        (Odd, "keeps last of .* not laid out by the parameter's sizes"),
        (lambda p: [torch.optim.SGD(p), 1], "list of SGD, int"),
        (lambda p: [], "list of nothing"),
    ],
)
def test_what_cannot_step_over_one_parameter_is_refused_by_name(
    make: Callable[[Any], Any], words: str
) -> None:
    model = Plain()
    with pytest.raises(megacompile.MegacompileError, match=words):
        megacompile.compile(model, "1GB", optimizer=make(list(model.parameters())))
    model(**batch(0)).backward()  # which is its own still


def test_what_would_not_run_or_has_run_is_refused() -> None:
    model = Plain()
    parameters = list(model.parameters())

    def refused(words: str, optimizer: Any, **options: Any) -> None:
        with pytest.raises(megacompile.MegacompileError, match=words):
            megacompile.compile(model, "1GB", optimizer=optimizer, **options)

    hooked = torch.optim.SGD(parameters)
    hooked.register_step_pre_hook(lambda *given: None)
    refused("step hooks", hooked)
    patched = torch.optim.SGD(parameters)
    patched.step = lambda closure=None: None  # type: ignore[method-assign, assignment]
    refused("step of its own", patched)
    refused("hold one parameter", [torch.optim.SGD(parameters), torch.optim.AdamW(parameters)])
    refused("format of Adam's moments", torch.optim.SGD(parameters), optimizer_state="int8")
    refused("counts in its param groups", Writing(parameters), on_nonfinite="skip")
    model(**batch(0)).backward()
    steps = []
    for make in (torch.optim.RMSprop, torch.optim.Adagrad):
        stepped = make(parameters)
        stepped.step()
        steps.append(stepped)
    model.zero_grad()
    for stepped in steps:
        refused("already taken steps", stepped)
    late = torch.optim.RMSprop(parameters)
    program = megacompile.compile(model, "1GB", optimizer=late, compute_dtype=torch.float32)
    model(**batch(0)).backward()
    with pytest.warns(UserWarning, match="in plain PyTorch"):
        late.step()
    model.zero_grad()
    with pytest.raises(megacompile.MegacompileError, match="already taken steps"):
        program.train_step(batch(0))


class Own(torch.optim.Muon):
    """A class of the user's own, of which the host makes the products."""


@pytest.mark.parametrize("shape", [(48, 96), (1024, 768)])
def test_an_update_is_priced_by_what_its_step_does(shape: tuple[int, int]) -> None:
    optimizer = Own([nn.Parameter(torch.empty(shape))])
    parameter = Parameter("w", shape, (shape[1], 1), torch.bfloat16, 0)
    numel, (m, n) = math.prod(shape), sorted(shape)
    group = GroupLayout(0, "w", torch.bfloat16, True, (Slot(parameter, 0),), numel)
    moved, products = torch_optimizer.TorchOptimizer(optimizer).update_work(group)
    assert products == pytest.approx(20 * m * m * n + 10 * m**3, rel=0.02)  # of the large one, of a sample
    # halves, gradient; the momentum and Nesterov's step, to bfloat16 and its norm; decay, the step itself
    assert moved == pytest.approx(numel * (22 + 12 + 12 + 6 + 2 + 4 + 8 + 10), rel=0.01)


def muon_beside_adamw(model: nn.Module, adamw: Callable[..., Any]) -> list[torch.optim.Optimizer]:
    named = list(model.named_parameters())
    matrices = [p for n, p in named if p.dim() == 2 and "layers" in n]
    others = [p for n, p in named if p.dim() != 2 or "layers" not in n]
    return [torch.optim.Muon(matrices, lr=0.02), adamw(others, lr=1e-2)]


@pytest.mark.slow_cases(r"Adafactor")
@pytest.mark.parametrize("make", [MAKES["SGD"], MAKES["Adafactor"]], ids=["SGD", "Adafactor"])
def test_a_host_budget_is_kept_to_the_byte_and_state_beyond_it_is_on_nvme(make: Make, tmp_path: Path) -> None:
    torch.manual_seed(0)
    options = {"groups": lambda model: model.parameters(), "example_batch": wide(0)}
    model = Wide(6)
    pair = Pair(make, copy.deepcopy(model), **options)
    need = host_bytes(pair.program)
    assert 0 < pair.program.memory.host_bytes["scratch"] < need
    pair.program.close()
    pair = Pair(make, copy.deepcopy(model), **options, host_budget=f"{need}B")
    for step in range(3):
        pair.step(wide(step))
    pair.check()
    pair.program.close()
    less = need - mmap.PAGESIZE
    with pytest.raises(megacompile.BudgetError, match="host_budget"):
        Pair(make, copy.deepcopy(model), **options, host_budget=f"{less}B")
    for budget, state in ((less, "nvme"), (need * 2 // 3, "nvme-all")):
        (tmp_path / state).mkdir()
        pair = Pair(
            make, copy.deepcopy(model), **options, host_budget=f"{budget}B", offload_dir=tmp_path / state
        )
        assert state in {group.state for group in pair.program.plan.groups}
        assert host_bytes(pair.program) <= budget
        for step in range(2):
            pair.step(wide(step))
        pair.program.save(tmp_path / "saved")
        pair.step(wide(2))
        pair.check()
        expected = pair.program.state_dict()
        pair.program.load(tmp_path / "saved")
        pair.program.train_step(wide(2))
        assert all(torch.equal(expected[n], v) for n, v in pair.program.state_dict().items())
        pair.program.close()


def test_a_list_of_optimizers_trains_bitwise_as_each_of_them_does() -> None:
    model = build("llama", layers=1)
    eager = copy.deepcopy(model)
    fused = functools.partial(torch.optim.AdamW, fused=True)
    plain, ours = muon_beside_adamw(eager, HostAdamW), muon_beside_adamw(model, fused)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in (*plain, *ours)]
    reference = EagerTrainer(eager, Several(plain))
    program = megacompile.compile(
        model, "1GB", optimizer=ours, compute_dtype=torch.float32, max_grad_norm=0.5
    )
    for step in range(3):
        program.train_step(batch_for("llama", step))
        reference.loss(batch_for("llama", step)).backward()
        nn.utils.clip_grad_norm_(eager.parameters(), 0.5)
        for each in plain:
            with float32_products():
                each.step()
            each.zero_grad()
        for schedule in schedules:
            schedule.step()
    state = program.state_dict()
    assert all(torch.equal(state[name], p) for name, p in eager.named_parameters())
    for each in (program.optimizer, *ours):
        with pytest.raises(megacompile.ProgramError, match=r"instead of optimizer\.step"):
            each.step()
    program.close()


def test_state_stays_on_the_host_and_whole_weights_are_not_cut() -> None:
    torch.manual_seed(0)
    programs = []
    for make in (torch.optim.AdamW, torch.optim.Adafactor):
        model = Wide()
        programs.append(
            megacompile.compile(model, "1GB", optimizer=make(model.parameters()), example_batch=wide(0))
        )
    states = [{group.state for group in program.plan.groups} for program in programs]
    assert states == [{"device"}, {"host"}]
    for program in programs:
        program.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eval_and_train_of_the_optimizer_change_the_weights(dtype: torch.dtype) -> None:
    """Schedule-free optimizers train other weights than those that are evaluated."""
    torch.manual_seed(0)
    pair = Pair(MAKES["schedule-free"], Plain(depth=2), compute_dtype=dtype)
    ours: Any = pair.program.optimizer
    plain: Any = pair.plain
    ours.eval()
    ours.train()  # before there is any state
    for step in range(6):
        pair.step(batch(step))
        if dtype == torch.bfloat16:
            continue
        if step % 2:
            ours.eval()
            plain.eval()
            pair.check()
            with torch.no_grad():
                assert float(pair.program.evaluate(batch(9))) == float(pair.eager(**batch(9)))
            with pytest.raises(megacompile.MegacompileError, match="train mode"):
                pair.program.train_step(batch(0))
            ours.train()
            plain.train()
        pair.check()
    trained = pair.program.state_dict()
    ours.eval()
    averaged = pair.program.state_dict()
    ours.train()
    again = pair.program.state_dict()
    for name, value in trained.items():
        assert not torch.equal(averaged[name], value), name
        torch.testing.assert_close(again[name], value)
    assert pair.program.release() is not None
    ours.eval()  # which is its own again
