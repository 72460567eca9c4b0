"""Models that torch wrapped: trained and saved under the names that they have without."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import megacompile
from tests.support.models import batch_for, build
from tests.support.scripts import output_of

transformers = pytest.importorskip("transformers", reason="transformers is missing: pip install transformers")


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def compiled_layers(model: Any) -> Any:
    """Each layer by itself, as torchtitan does."""
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = compiled(layer)
    return model


def compiled_forward(model: Any) -> Any:
    model.forward = compiled(model.forward)
    return model


def compiled_methods(model: Any) -> Any:
    """The forward of each layer, and of a module of torch's own."""
    for layer in model.model.layers:
        compiled_forward(layer)
        compiled_forward(layer.mlp.down_proj)
    return model


def started(model: nn.Module, **options: Any) -> megacompile.Program:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return megacompile.compile(
        model, "1GB", optimizer=optimizer, compute_dtype=torch.float32, device="cpu", **options
    )


WRAPPERS = {
    "compiled": compiled,
    "both": lambda model: compiled(nn.DataParallel(model)),
    "compiled layers": compiled_layers,
    "compiled forward": compiled_forward,
    "compiled methods": compiled_methods,
}


@pytest.mark.slow_cases(r"compiled forward")
@pytest.mark.parametrize("wrap", list(WRAPPERS.values()), ids=list(WRAPPERS))
def test_transformers_loads_what_was_trained(wrap: Callable[..., Any], tmp_path: Path) -> None:
    plain, wrapped = started(build("llama", layers=1)), started(wrap(build("llama", layers=1)))
    for seed in range(2):
        assert torch.equal(*(p.train_step(batch_for("llama", seed)).loss for p in (plain, wrapped)))
    wrapped.export(tmp_path, torch.float32)
    loaded, report = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    trained = plain.state_dict()
    assert all(torch.equal(value, trained[name]) for name, value in loaded.named_parameters())


def classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 3))


@pytest.mark.parametrize("wrap", [compiled, compiled_forward, nn.DataParallel])
def test_a_wrapped_module_takes_its_batch_and_its_values(wrap: Callable[..., Any]) -> None:
    batch = (torch.randn(4, 8), torch.tensor([0, 1, 2, 0]))

    def trained(wrap: Callable[..., Any], loss_fn: Any) -> tuple[Any, dict[str, Tensor], list[Tensor]]:
        model = wrap(classifier())
        program = started(model, loss_fn=loss_fn)
        results = [
            program.train_step(batch).loss, program.evaluate(batch), program.predict(batch[0])
        ]  # fmt: skip
        return model, program.state_dict(), [*results, program.release()(batch[0])]

    _, values, results = trained(lambda model: model, nn.CrossEntropyLoss())
    model, same, others = trained(wrap, compiled(nn.CrossEntropyLoss()))
    assert all(map(torch.equal, [*values.values(), *results], [*same.values(), *others]))
    assert torch.equal(model(batch[0]), results[-1])


def test_sync_to_a_wrapped_model() -> None:
    program = started(classifier(), loss_fn=nn.CrossEntropyLoss())
    program.prepare((torch.randn(4, 8), torch.tensor([0, 1, 2, 0])))
    other = classifier()
    nn.init.zeros_(other[0].weight)
    program.sync_to(compiled(other))
    program.sync_to(compiled(program.model))
    assert torch.equal(other[0].weight, program.model[0].weight)


def test_a_hook_of_the_wrapper_is_refused() -> None:
    model = compiled(classifier())
    model.register_forward_hook(lambda *_: None)
    with pytest.raises(megacompile.MegacompileError, match="register it on the model that this wraps"):
        started(model)


def test_a_trainer_of_a_compiled_model_saves_plain_names(tmp_path: Path) -> None:
    from megacompile.integrations.transformers import Trainer

    model = compiled(build("llama", layers=1))
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=2, save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True,
        remove_unused_columns=False,  # upstream reads the signature of the compiled forward
    )  # fmt: skip
    rows = [{name: value[0] for name, value in batch_for("llama", seed).items()} for seed in range(16)]
    trainer = Trainer(model=model, args=arguments, train_dataset=rows, hbm_budget="20MB")
    trainer.train()
    trainer.save_model(str(tmp_path / "model"))
    trained = trainer.program.state_dict()
    for folder in ("model", "checkpoint-2"):
        loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / folder, output_loading_info=True
        )
        assert not any(report.values())
        assert all(torch.equal(value, trained[name]) for name, value in loaded.named_parameters())


DDP = """
import sys
import torch
import megacompile
from safetensors.torch import load_file
from tests.support.models import batch_for, build

torch.distributed.init_process_group("gloo", init_method=f"file://{sys.argv[1]}/store", rank=0, world_size=1)
model = torch.nn.parallel.DistributedDataParallel(build("plain"))
optimizer = torch.optim.AdamW(model.parameters())
program = megacompile.compile(model, "1GB", optimizer=optimizer, device="cpu")
program.train_step(batch_for("plain"))
program.export(f"{sys.argv[1]}/model")
print(load_file(f"{sys.argv[1]}/model/model.safetensors").keys() == program.model.state_dict().keys())
"""


def test_a_model_of_ddp(tmp_path: Path) -> None:
    assert output_of(DDP, tmp_path).split() == ["True"]
