"""The second start of a script: what the first kept gives the same program, and decides nothing wrongly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacompile.api.frontend import Division, Frontend
from megacompile.blocks import template_cache
from megacompile.blocks.differentiated_template import DifferentiatedTemplate
from megacompile.blocks.policies import differentiate
from megacompile.capture.batch import read_batch
from megacompile.graph.fusion_rewriter import PATTERNS
from megacompile.kernels import _triton
from megacompile.kernels._triton import Gpu
from tests.support.models import batch_for, build

LENGTH = 40  # no size of a layer


@pytest.fixture(autouse=True)
def templates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of templates' functions, empty at first."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "megacompile" / "templates"


@pytest.fixture
def differentiated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The names of the templates that are differentiated anew."""
    found: list[str] = []

    def noted(template: object, *rest: object, **options: object) -> DifferentiatedTemplate:
        found.append(template.name)  # type: ignore[attr-defined]
        return differentiate(template, *rest, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(template_cache, "differentiate", noted)
    yield found


def start(
    kind: str = "plain",
    dtype: torch.dtype = torch.float32,
    gpu: Gpu | None = None,
    chunk: int = 0,
    kernels: Mapping[str, bool] | None = None,
) -> tuple[DifferentiatedTemplate, ...]:
    """The functions of a model, which is captured anew."""
    torch.manual_seed(0)
    model, batch = build(kind), batch_for(kind, size=1, length=LENGTH)
    frontend = Frontend(model, dtype, gpu=gpu, kernels=kernels)
    return frontend.build(read_batch(batch, model), Division(chunk=chunk)).templates


@pytest.mark.parametrize("gpu", [None, Gpu(132, 90)])
@pytest.mark.parametrize("kind", ["llama", "plain"])
def test_equal_blocks_are_differentiated_once(kind: str, gpu: Gpu | None, differentiated: list[str]) -> None:
    first = start(kind, gpu=gpu)
    assert len(differentiated) == len(first)
    assert start(kind, gpu=gpu) == first
    assert len(differentiated) == len(first)


def test_loops_over_chunks_are_kept(differentiated: list[str]) -> None:
    first = start("llama", chunk=8)
    assert any(template.loops for template in first)
    count = len(differentiated)
    assert start("llama", chunk=8) == first and len(differentiated) == count


def test_another_mode_of_torch_differentiates_again(differentiated: list[str]) -> None:
    frontend = Frontend(build("plain"), torch.float32)
    batch = read_batch(batch_for("plain"), frontend.model)
    count = len(frontend.build(batch).templates)
    frontend.forget()
    torch.use_deterministic_algorithms(True)
    try:
        frontend.build(batch)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(differentiated) == 2 * count


def test_what_functions_depend_on_differentiates_again(differentiated: list[str]) -> None:
    count = len(start())
    for other in (
        lambda: start(dtype=torch.bfloat16),
        lambda: start(gpu=Gpu(132, 90)),
        lambda: start(gpu=Gpu(114, 90)),
        lambda: start(chunk=8),
        lambda: start(kernels=dict.fromkeys(PATTERNS, False)),  # sums are folded alone
    ):
        differentiated.clear()
        other()
        assert len(differentiated) == count


def test_whether_kernels_run_is_part_of_the_key(
    differentiated: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where Triton does not work, references run, which launch and hold other things."""
    count = len(start(gpu=Gpu(132, 90)))
    monkeypatch.setattr(_triton, "_gave_up", not _triton._gave_up)
    start(gpu=Gpu(132, 90))
    assert len(differentiated) == 2 * count


def test_other_code_differentiates_again(differentiated: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    count = len(start())
    monkeypatch.setattr(template_cache, "code_digest", lambda *_: "another version")
    start()
    assert len(differentiated) == 2 * count


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "binary"])
def test_a_damaged_file_is_as_none(damage: str, differentiated: list[str], templates: Path) -> None:
    first = start()
    texts = {file: file.read_text() for file in templates.iterdir()}
    for file, text in texts.items():
        if damage == "binary":
            file.write_bytes(b"\xff\x00" * 100)
        else:
            changed = text.replace("def ", "def  ", 1)
            file.write_text({"cut": text[:-9], "empty": "", "changed": changed}[damage])
    differentiated.clear()
    assert start() == first and len(differentiated) == len(first)
    assert {file: file.read_text() for file in templates.iterdir()} == texts  # written anew


def test_the_newest_files_stay(templates: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_cache, "_MOST", 1)
    start()
    start(gpu=Gpu(132, 90))
    assert len(list(templates.iterdir())) == 1


@torch.library.custom_op("tests::kept_double", mutates_args=())
def kept_double(x: Tensor) -> Tensor:
    """An operator whose code another run may have changed."""
    return 2 * x


@kept_double.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


kept_double.register_autograd(lambda ctx, grad: 2 * grad)


class Doubles(nn.Module):
    """A layer around an operator that is not torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.double(self.linear(x)).square().mean()

    def double(self, x: Tensor) -> Tensor:
        return kept_double(x)


class Opaque(torch.autograd.Function):
    """Double by what cannot be traced, whose code another run may have changed, too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.from_numpy(2 * x.numpy())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.from_numpy(2 * grad.numpy())


class Doubled(Doubles):
    """A layer around a function of the user's."""

    def double(self, x: Tensor) -> Tensor:
        doubled: Tensor = Opaque.apply(x)
        return doubled


@pytest.mark.parametrize("make", [Doubles, Doubled])
def test_a_template_with_code_of_others_is_not_kept(
    make: type[Doubles], differentiated: list[str], templates: Path
) -> None:
    for _ in range(2):
        model = make()
        batch = read_batch({"x": torch.ones(2, 4)}, model)
        (template,) = Frontend(model, torch.float32).build(batch).templates
    assert differentiated == [template.name] * 2 and not templates.exists()
