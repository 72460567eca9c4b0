"""A user's mistakes: one clear error that names the thing, and the model left as it was."""

from __future__ import annotations

import copy
import math
import pickle
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor

import megacompile
from megacompile.capture.batch import check_signature, read_batch
from megacompile.units import parse_bytes
from tests.support.models import Plain, batch_for, build


def compile_plain(model: nn.Module | None = None, budget: Any = "1GB", **options: Any) -> megacompile.Program:
    model = model if model is not None else Plain()
    options.setdefault("optimizer", torch.optim.AdamW(model.parameters(), lr=1e-3))
    options.setdefault("compute_dtype", torch.float32)
    return megacompile.compile(model, budget, **options)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (-1, "positive"),
        (0, "positive"),
        (math.nan, "positive"),
        (math.inf, "positive"),
        ("nan GB", "not understood"),
        ("12 parsecs", "not understood"),
        ("", "not understood"),
        ("0GB", "positive"),
        ("120%", "at most"),
        (0.9, "did you mean '90%'"),
        (80e9, "did you mean 80"),
        (True, "no budget"),
        (None, "no budget"),
        ("900GB", "exist"),
    ],
)
def test_budget_is_refused(value: Any, words: str) -> None:
    with pytest.raises(megacompile.BudgetError, match=words):
        parse_bytes(value, what="hbm_budget", available=100 * 10**9)


def test_a_host_budget_beyond_what_is_free_is_taken_with_a_warning() -> None:
    options: Any = {"device": "cpu", "example_batch": batch_for("plain")}
    with pytest.warns(UserWarning, match="memory grows as it is used"):
        program = compile_plain(build("plain"), host_budget="900TB", **options)
    assert program.memory.host_budget_bytes == 900 * 10**12
    program.close()
    with pytest.raises(megacompile.BudgetError, match="exist"):
        compile_plain(build("plain"), "900TB", host_budget="900TB", **options)


@pytest.mark.parametrize(
    ("value", "nbytes"),
    [(80, 80 * 10**9), (1.5, 1_500_000_000), ("24GiB", 24 * 2**30), ("512MB", 512 * 10**6),
     ("90%", 90 * 10**9), ("auto", 90 * 10**9), ("1e3 MB", 10**9)],
)  # fmt: skip
def test_budget_is_read(value: Any, nbytes: int) -> None:
    assert parse_bytes(value, what="hbm_budget", available=100 * 10**9) == nbytes


def test_least_feasible_budget_is_named_and_works() -> None:
    model, batch = build("llama", layers=1), batch_for("llama")
    before = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(megacompile.BudgetError, match="least feasible budget") as info:
        compile_plain(model, "10kB", example_batch=batch)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    least = int(str(info.value).split("batch is ")[1].split(" bytes")[0])
    with pytest.raises(megacompile.BudgetError):
        compile_plain(build("llama", layers=1), f"{least - 1}B", example_batch=batch)
    program = compile_plain(build("llama", layers=1), f"{least}B", example_batch=batch)
    assert math.isfinite(program.train_step(batch).loss)
    assert program.memory.device_peak_bytes <= least
    program.close()


def test_host_budget_too_small_leaves_the_model() -> None:
    model, batch = build("llama", layers=1), batch_for("llama")
    with pytest.raises(megacompile.BudgetError, match="host_budget"):
        compile_plain(model, host_budget="10kB", example_batch=batch)
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_wrong_batches() -> None:
    program = compile_plain()
    good = batch_for("plain")
    with pytest.raises(megacompile.MegacompileError, match="missing a required argument: 'y'"):
        program.train_step({"x": good["x"]})
    with pytest.raises(megacompile.MegacompileError, match="takes no z"):
        program.train_step({**good, "z": good["x"]})
    with pytest.raises(megacompile.MegacompileError, match="empty tensor"):
        program.train_step({"x": torch.empty(0, 16), "y": torch.empty(0, 3)})
    with pytest.raises(megacompile.MegacompileError, match="no tensor"):
        program.train_step({})
    with pytest.raises(megacompile.MegacompileError, match="empty"):
        program.train_step([])
    with pytest.raises(megacompile.CaptureError, match=r"first multiplies torch\.float32 by torch\.int64"):
        program.train_step({"x": good["x"].long(), "y": good["y"]})
    with pytest.raises(megacompile.CaptureError, match="give the batch's floats in float32"):
        program.train_step({"x": good["x"].double(), "y": good["y"].double()})
    assert math.isfinite(program.train_step(good).loss)
    program.close()


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (torch.ones(2, 3, device="meta"), r"a meta tensor of shape \(2, 3\)"),
        (torch.ones(2, 3).to_sparse(), r"a sparse_coo tensor of shape \(2, 3\)"),
        (torch.ones(2, 3, requires_grad=True), "requires a gradient"),
        (np.ones((2, 3)), "a ndarray"),
        ({1.0}, "a set"),
        (1j, "a complex"),
        (torch.Generator(), "a Generator"),
    ],
)
def test_an_entry_that_no_program_can_be_given(entry: Any, words: str) -> None:
    model, good = Plain(), batch_for("plain")
    for batch in ({**good, "y": entry}, (good["x"], entry), {**good, "y": {"of": [good["y"], entry]}}):
        with pytest.raises(megacompile.MegacompileError, match=words):
            read_batch(batch, model)


def test_entries_that_are_no_tensors_are_part_of_the_key() -> None:
    model, good = Plain(), batch_for("plain")
    values = (None, True, 1, 1.0, 0.0, -0.0, False, 2, "mean", "1", torch.float32)
    keys = {read_batch({**good, "how": value}, model).key for value in values}
    assert len(keys) == len(values)
    assert read_batch({**good, "how": 2}, model).key in keys
    assert read_batch({**good, "x": good["x"] + 1, "how": 2}, model).key in keys  # values of tensors are not
    assert read_batch({**good, "x": good["x"].double(), "how": 2}, model).key not in keys


def test_a_batch_from_another_device_is_brought_to_the_host() -> None:
    class Elsewhere(Tensor):
        """Says that it is on a GPU, as far as a batch is concerned."""

        @property
        def device(self) -> torch.device:  # type: ignore[override]
            return torch.device("cuda", 0)

        def cpu(self) -> Tensor:  # type: ignore[override]
            return self.as_subclass(Tensor)

    good = batch_for("plain")
    found = read_batch({"x": good["x"].as_subclass(Elsewhere), "y": good["y"]}, Plain())
    assert [leaf.device.type for leaf in found.tensors] == ["cpu", "cpu"]
    assert type(found.kwargs["x"]) is Tensor and torch.equal(found.kwargs["x"], good["x"])


def test_what_a_forward_does_not_take_is_named() -> None:
    model = build("llama")
    good = batch_for("llama")
    for batch, words in (
        ({**good, "lables": good["labels"]}, "takes no lables"),
        ({"labels": good["labels"], "id": 3, "weight": 0.5, "input_ids": good["input_ids"]}, "id, weight"),
    ):
        with pytest.raises(megacompile.MegacompileError, match=words):
            check_signature(Strict(model), read_batch(batch, model), function=None)
    for more in ("num_items_in_batch", "mm_token_type_ids", "packed_position_ids"):  # into **kwargs
        check_signature(model, read_batch({**good, more: 7}, model), function=None)


class Strict(nn.Module):
    """A forward without ``**kwargs``."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)


def test_no_trainable_parameter() -> None:
    model = Plain().requires_grad_(False)
    with pytest.raises(megacompile.MegacompileError, match="no trainable parameter"):
        compile_plain(model, optimizer=None)


def test_an_optimizer_that_is_not_the_models_or_wraps_another() -> None:
    model = Plain()
    wrapping = torch.optim.SGD(model.parameters())
    wrapping.optimizer = torch.optim.AdamW(model.parameters())  # type: ignore[attr-defined]  # as accelerate's
    with pytest.raises(megacompile.MegacompileError, match=r"SGD .* that it wraps"):
        compile_plain(model, optimizer=wrapping)
    with pytest.raises(megacompile.MegacompileError, match="not the model's"):
        compile_plain(model, optimizer=torch.optim.AdamW(Plain().parameters()))
    with pytest.raises(megacompile.MegacompileError, match=r"is a Plain: give a torch\.optim"):
        compile_plain(model, optimizer=model)
    hooked = torch.optim.AdamW(model.parameters())
    hooked.register_step_post_hook(lambda *given: None)
    with pytest.raises(megacompile.MegacompileError, match="step hooks"):
        compile_plain(model, optimizer=hooked)


class OnlyDefaults(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"lr": None}, "lr is None"),
        ({"lr": math.nan}, "lr is nan"),
        ({"betas": (1.0, 0.9)}, "Betas"),
        ({"amsgrad": True}, "amsgrad"),
    ],
)
def test_a_setting_that_no_update_can_follow_changes_nothing(changed: dict[str, Any], words: str) -> None:
    model = Plain()
    program = compile_plain(model, optimizer=OnlyDefaults(model.parameters()))
    program.train_step(batch_for("plain"))
    group = program.optimizer.param_groups[0]
    before, kept = program.state_dict(), dict(group)
    group.update(changed)
    with pytest.raises(ValueError, match=words):
        program.train_step(batch_for("plain"))
    group.update(kept)
    for name, value in program.state_dict().items():
        assert torch.equal(value, before[name]), name
    program.train_step(batch_for("plain"))
    program.close()


class Shared(nn.Module):
    """Two parameters over one memory, which is not the same as one parameter under two names."""

    def __init__(self, apart: bool = False) -> None:
        super().__init__()
        whole = torch.randn(8, 4)
        self.first = nn.Parameter(whole[:4])
        self.second = nn.Parameter(whole[4 if apart else 3 :])

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first.T).sum() + (x @ self.second.T).square().sum()


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.ones(4, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.turn).abs().sum()


def test_parameters_that_no_program_could_keep() -> None:
    with pytest.raises(megacompile.MegacompileError, match="first and second share memory"):
        compile_plain(Shared())
    with pytest.raises(megacompile.MegacompileError, match=r"turn is torch\.complex64"):
        compile_plain(Complex())
    program = compile_plain(Shared(apart=True))
    assert torch.isfinite(program.train_step((torch.randn(2, 4),)).loss)
    program.close()


class Codes(nn.Parameter):
    """As bitsandbytes keeps weights."""


@pytest.mark.parametrize(
    "weight",
    [Codes(torch.zeros(4, dtype=torch.uint8), requires_grad=False), TwoTensor(torch.ones(4), torch.ones(4))],
)
def test_quantised_parameters_are_refused_by_name(weight: Tensor) -> None:
    model = Plain()
    model.last.weight = nn.Parameter(weight, requires_grad=False) if isinstance(weight, TwoTensor) else weight
    kind = type(weight)
    with pytest.raises(
        megacompile.MegacompileError,
        match=rf"last\.weight is a {kind.__name__} of .* without quantization_config",
    ):
        compile_plain(model)


class Odd(nn.Module):
    """Parameters of other kinds: frozen integers, booleans, complex numbers; a scalar, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.scale, self.none = nn.Parameter(torch.tensor(2.0)), nn.Parameter(torch.zeros(0, 4))
        self.numbers = nn.Parameter(torch.arange(4), requires_grad=False)
        self.chosen = nn.Parameter(torch.arange(4) > 1, requires_grad=False)
        self.turn = nn.Parameter(torch.full((4,), 1j), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.scale * self.layer(x * self.numbers * self.chosen) * self.turn.abs()
        return h.square().mean() + self.none.sum()


def test_parameters_of_odd_kinds_train_beside_others() -> None:
    model, x = Odd(), torch.randn(3, 4)
    eager = copy.deepcopy(model)
    plain = torch.optim.AdamW(eager.parameters(), lr=1e-3)
    program = compile_plain(model)
    for _ in range(2):
        program.train_step((x,))
        plain.zero_grad()
        eager(x).backward()
        plain.step()
    program.sync_to(model)
    for name, value in eager.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), value)
    program.close()
    compile_plain(model).close()


class WithBatchNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.norm(self.first(x)).sum() + y.sum()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.first(x)
        if h.sum() > 0:  # a branch on data
            h = h * 2
        return h.sum() + y.sum()


class Picks(nn.Module):
    """Chooses rows by their values, and needs to know how many in another module."""

    def __init__(self) -> None:
        super().__init__()
        self.body = self.Body()

    class Body(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = Picks.Pairs(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            rows = x[self.first.weight.sum() * x.sum(-1) > 0]
            return self.first(rows)

    class Pairs(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if len(x) > 2 else x

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.body(x).sum() + y.sum()


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.inner(x) + torch.poisson(torch.ones(x.shape[0], 8))).sum() + y.sum()


class NoLoss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.first(x)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (Branches, r"test_bad_input\.py:\d+ \(if h\.sum\(\) > 0.*\): its control flow"),
        (
            Picks,
            r"captured: test_bad_input\.py:\d+ \(rows = x\[.*\) of body makes a size .*"
            r"and test_bad_input\.py:\d+ \(return super.*\) needs it\. Keep all rows",
        ),
        (Noisy, "poisson"),
        (NoLoss, "no scalar loss"),
    ],
)
def test_models_that_would_train_wrong(
    model: type[nn.Module], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    module = model().train()
    before = {n: p.clone() for n, p in module.named_parameters()}
    with pytest.raises(megacompile.CaptureError, match=words):
        compile_plain(module, example_batch=batch_for("plain"))
    assert "def forward" not in capfd.readouterr().err  # torch prints graphs that it cannot finish
    assert all(torch.equal(p, before[n]) for n, p in module.named_parameters())


def test_a_mistake_in_the_users_own_code_is_told_as_it_is() -> None:
    with pytest.raises(megacompile.CaptureError, match=r"^loss_fn fails: TypeError: .*2 were given; "):
        compile_plain(nn.Linear(4, 4), loss_fn=lambda out: out.mean(), example_batch=torch.randn(2, 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_frozen_batch_norm_is_fine(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = WithBatchNorm().eval()
    expected = float(copy.deepcopy(module)(**batch_for("plain")).detach())
    program = compile_plain(module, compute_dtype=dtype)
    batch = {name: v.to(dtype) if v.is_floating_point() else v for name, v in batch_for("plain").items()}
    assert float(program.train_step(batch).loss) == pytest.approx(expected, rel=2e-2)
    program.close()


def test_gradient_hooks_are_refused() -> None:
    model = Plain()
    model.first.weight.register_hook(lambda g: g)
    with pytest.raises(megacompile.MegacompileError, match=r"first\.weight has a gradient hook"):
        compile_plain(model)


def test_gradients_from_before_are_not_lost_silently() -> None:
    model = build("plain")
    model(**batch_for("plain")).backward()
    with pytest.raises(megacompile.MegacompileError, match=r"first\.weight has a gradient, .*zero_grad"):
        compile_plain(model)
    model.zero_grad()
    compile_plain(model).close()


def test_owned_model_says_the_way_out() -> None:
    model, batch = build("plain"), batch_for("plain")
    program = compile_plain(model)
    program.train_step(batch)
    with pytest.raises(megacompile.ProgramError, match="sync_to"):
        model(**batch)
    with pytest.raises(megacompile.MegacompileError, match="already belongs"):
        compile_plain(model)
    with pytest.raises(megacompile.ProgramError, match=r"optimizer\.step"):
        program.optimizer.step()
    with pytest.raises(megacompile.ProgramError, match="pickled"):
        pickle.dumps(program)
    program.sync_to(model)
    assert torch.isfinite(model(**batch))
    program.close()


def test_other_arguments() -> None:
    for options, words in (
        ({"compute_dtype": torch.float16}, "float16"),
        ({"device": "cuda"}, "cuda"),
        ({"max_grad_norm": -1.0}, "positive"),
        ({"max_grad_norm": "1"}, "positive"),
        ({"on_nonfinite": "maybe"}, "maybe"),
        ({"device": "tpu"}, "device='tpu'"),
        ({"seed": None}, "seed=None"),
        ({"seed": 1.5}, "seed=1.5"),
        ({"max_seq_len": "8"}, "max_seq_len='8'"),
        ({"loss_fn": 3}, "loss_fn=3"),
        ({"weights": 3}, "weights=3"),
        ({"kernels": "rope"}, "kernels='rope'"),
        ({"offload_dir": ""}, "no directory"),
    ):
        with pytest.raises(megacompile.MegacompileError, match=words):
            compile_plain(**options)
    with pytest.raises(megacompile.MegacompileError, match="Module"):
        megacompile.compile("a model", "1GB")  # type: ignore[arg-type]


def test_evaluate_takes_one_batch() -> None:
    program, batch = compile_plain(), batch_for("plain")
    with pytest.raises(megacompile.MegacompileError, match="one batch, not a list of 2"):
        program.evaluate([batch, batch])
    assert program.evaluate([batch]) == program.evaluate(batch)
    program.close()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ids: {"labels": ids.float()}, r"dtype int32/int64 for index.*: give them as .long\(\)"),
        (lambda ids: {"input_ids": ids.float()}, r"argument #1 'indices'.*: give them as .long\(\)"),
        (lambda ids: {"labels": None}, "The forward returned no scalar loss"),
        (lambda ids: {"atention_mask": ids > 0}, "has no 'atention_mask': did you mean 'attention_mask'"),
        (lambda ids: {"labels": None, "lables": ids}, "has no 'lables': did you mean 'labels'"),
    ],
    ids=["labels", "ids", "no labels", "mask", "misspelt labels"],
)
def test_a_mistake_in_a_batch_is_named_without_the_noise_of_torch(
    change: Callable[[Tensor], dict[str, Any]], words: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Also where the forward takes anything, and would train on without the key."""
    program = compile_plain(build("llama", layers=1), device="cpu")
    ids = torch.randint(3, 60, (2, 8))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": None} | change(ids)
    with pytest.raises(megacompile.MegacompileError, match=words) as raised:
        program.train_step({name: value for name, value in batch.items() if value is not None})
    error = raised.value
    assert error.__cause__ is None and (error.__context__ is None or error.__suppress_context__)
    assert not any("site-packages/torch/_" in frame.filename for frame in traceback.extract_tb(raised.tb))
    assert "Traceback" not in capfd.readouterr().err
