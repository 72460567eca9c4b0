"""Models of transformers whose own loss cannot be traced, beside eager PyTorch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    DetrConfig,
    DetrForObjectDetection,
    Mask2FormerConfig,
    Mask2FormerForUniversalSegmentation,
    ResNetConfig,
    SwinConfig,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    YolosConfig,
    YolosForObjectDetection,
)

import megacompile
from megacompile.errors import BudgetError, CaptureError
from megacompile.runtime.step_results import NonFiniteError


def yolos() -> nn.Module:
    config = YolosConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=[32, 32],
        patch_size=8, num_detection_tokens=4, num_labels=3, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return YolosForObjectDetection(config)


def detr() -> nn.Module:
    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    config = DetrConfig(
        use_timm_backbone=False, backbone_config=backbone, backbone=None, use_pretrained_backbone=False,
        d_model=16, encoder_layers=1, decoder_layers=2, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=32, decoder_ffn_dim=32, num_queries=5, num_labels=3, dropout=0.0,
        auxiliary_loss=True,
    )  # fmt: skip
    return DetrForObjectDetection(config)


def detection(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    labels = [
        {
            "class_labels": torch.randint(0, 3, (n,), generator=generator),
            "boxes": torch.rand(n, 4, generator=generator) * 0.4 + 0.2,
        }
        for n in (1 + seed % 2, 2)
    ]
    return {"pixel_values": torch.randn(2, 3, 32, 32, generator=generator), "labels": labels}


def speech() -> nn.Module:
    config = Wav2Vec2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, vocab_size=8,
        conv_dim=[8, 8], conv_stride=[5, 4], conv_kernel=[10, 4], num_conv_pos_embeddings=4,
        num_conv_pos_embedding_groups=2, mask_time_prob=0.0, layerdrop=0.0, hidden_dropout=0.0,
        attention_dropout=0.0, activation_dropout=0.0, feat_proj_dropout=0.0, final_dropout=0.0,
        ctc_loss_reduction="mean", pad_token_id=0,
    )  # fmt: skip
    return Wav2Vec2ForCTC(config)


def sounds(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(1, 8, (2, 5), generator=generator)
    labels[1, 3 + seed % 2 :] = -100
    return {"input_values": torch.randn(2, 640, generator=generator), "labels": labels}


def mask2former() -> nn.Module:
    stages = ["stage1", "stage2", "stage3", "stage4"]
    backbone = SwinConfig(
        image_size=32, embed_dim=8, depths=[1] * 4, num_heads=[1, 2, 2, 4], window_size=4,
        drop_path_rate=0.0, out_features=stages,
    )  # fmt: skip
    config = Mask2FormerConfig(
        backbone_config=backbone, hidden_dim=32, feature_size=32, mask_feature_size=32, encoder_layers=1,
        decoder_layers=2, num_attention_heads=2, encoder_feedforward_dim=32, dim_feedforward=32,
        num_queries=5, num_labels=3, train_num_points=32, dropout=0.0,
    )  # fmt: skip
    return Mask2FormerForUniversalSegmentation(config)


def segments(seed: int) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(seed)
    counts = (1 + seed % 2, 2)
    return {
        "pixel_values": torch.randn(2, 3, 64, 64, generator=draw),
        "mask_labels": [torch.rand(n, 64, 64, generator=draw).round() for n in counts],
        "class_labels": [torch.randint(0, 3, (n,), generator=draw) for n in counts],
    }


class Matched(nn.Module):
    """Match predictions with what a batch holds, by values, in the loss of a small model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 2)

    def loss_function(self, points: Tensor, labels: list[Tensor], scale: float) -> dict[str, Any]:
        losses = []
        for own, wanted in zip(points, labels, strict=True):
            order = [int((own - x).abs().sum(-1).argmin()) for x in wanted]
            losses.append((own[order] - wanted).square().sum())
        return {"loss": torch.stack(losses).mean() * scale, "each": losses}

    def forward(self, x: Tensor, labels: list[Tensor] | None = None) -> dict[str, Any]:
        hidden = self.first(x)
        if not torch.isfinite(hidden).all():
            hidden = hidden.clamp(-1e4, 1e4)
        points = self.last(hidden.tanh())
        if labels is None:
            return {"points": points}
        return {"loss": self.loss_function(points, labels, scale=0.5)["loss"], "points": points}


class Criterion(nn.Module):
    """Match each label with a prediction, by values."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.Buffer(torch.tensor([1.0, 3.0]))

    def forward(self, points: Tensor, labels: list[Tensor]) -> dict[str, Any]:
        near, far = [], []
        for own, wanted in zip(points, labels, strict=True):
            gaps = (own[:, None] - wanted).square() @ self.weights
            chosen = [int(gap.argmin()) for gap in gaps.T]
            near.append(gaps[chosen].mean())
            far.append(gaps.mean())
        return {"near": torch.stack(near).mean(), "far": torch.stack(far).mean()}


class Weighted(Matched):
    """Weigh the parts of a loss that a criterion with a buffer returns, and add one of the forward."""

    def __init__(self) -> None:
        super().__init__()
        self.criterion = Criterion()

    def forward(self, x: Tensor, labels: list[Tensor]) -> dict[str, Any]:
        hidden = self.first(x)
        losses = self.losses(self.last(hidden.tanh()), labels)
        loss = sum(losses.values()) + 0.1 * hidden.square().mean()
        loss += self.behind(loss, losses)
        return {"loss": loss}

    def losses(self, points: Tensor, labels: list[Tensor]) -> dict[str, Any]:
        losses = self.criterion(points, labels)
        losses["far"] *= 0.5
        return losses

    def behind(self, loss: Tensor, losses: dict[str, Any]) -> Any:
        with torch.no_grad():
            share = losses["near"] / losses["far"]
        return losses["near"] * share


def points(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    labels = [torch.randn(1 + (seed + i) % 3, 2, generator=generator) for i in range(2)]
    return {"x": torch.randn(2, 4, 8, generator=generator), "labels": labels}


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[int], dict[str, Any]]]] = {
    "yolos": (yolos, detection),
    "detr": (detr, detection),
    "wav2vec2": (speech, sounds),
    "mask2former": (mask2former, segments),  # whose loss draws points
    "weighted": (Weighted, points),
}


def compiled(model: nn.Module, budget: str = "1GB", **options: Any) -> megacompile.Program:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-3)
    given = {"compute_dtype": torch.float32, "device": "cpu"} | options
    return megacompile.compile(model, budget, optimizer=optimizer, **given)


@pytest.mark.slow_cases(r"(detr|mask2former|wav2vec2|\w+-least)")
@pytest.mark.filterwarnings("ignore:The loss of .* cannot be traced")
@pytest.mark.parametrize("tight", [False, True], ids=["ample", "least"])
@pytest.mark.parametrize("name", CASES)
def test_trains_as_eager_does(name: str, tight: bool) -> None:
    torch.manual_seed(0)
    make, batch_of = CASES[name]
    model = make().train()
    eager = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-3, eps=1e-3)
    budget = "1GB"
    if tight:
        with pytest.raises(BudgetError) as error:
            compiled(copy.deepcopy(model), "1kB", example_batch=batch_of(0))
        budget = f"{error.value.least_bytes}B"
    program = compiled(model, budget)
    for step in range(3):
        micro = [batch_of(2 * step), batch_of(2 * step + 1)]
        optimizer.zero_grad()
        torch.manual_seed(step)
        losses = [eager(**copy.deepcopy(batch))["loss"] / 2 for batch in micro]
        torch.stack(losses).sum().backward()
        optimizer.step()
        expected = float(torch.stack(losses).sum().detach())
        torch.manual_seed(step)
        assert float(program.train_step(micro).loss) == pytest.approx(expected, rel=1e-5)
    values = program.state_dict()
    for parameter, value in eager.state_dict().items():
        torch.testing.assert_close(values[parameter], value, rtol=1e-4, atol=2e-5)
    torch.manual_seed(9)
    with torch.no_grad():
        loss = float(eager.eval()(**batch_of(0))["loss"])
    torch.manual_seed(9)
    assert float(program.evaluate(batch_of(0))) == pytest.approx(loss, rel=1e-4)
    program.close()


def test_labels_of_any_number_share_a_program_and_it_is_told_once() -> None:
    torch.manual_seed(0)
    model = Matched()
    eager = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(eager.parameters(), lr=1e-3, eps=1e-3)
    program = compiled(model)
    with pytest.warns(UserWarning, match="computed outside of the program") as told:
        for step in range(3):
            loss = eager(**points(step))["loss"]
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            assert float(program.forward_backward(points(step)).loss) == pytest.approx(float(loss.detach()))
            program.optimizer_step()
    assert len([w for w in told if "outside" in str(w.message)]) == 1
    assert len(program._session.decided.programs) == 2  # one gathers gradients, one applies them
    values = program.state_dict()
    for name, value in eager.state_dict().items():
        torch.testing.assert_close(values[name], value)
    assert program.predict({"x": points(0)["x"]})["points"].shape == (2, 4, 2)
    program.close()


@pytest.mark.filterwarnings("ignore:The loss of .* cannot be traced")
def test_a_forward_that_takes_numbers_for_finite_updates_nothing_where_they_are_not() -> None:
    torch.manual_seed(0)
    program = compiled(Matched(), on_nonfinite="raise")
    program.train_step(points(0))
    before = program.state_dict()
    batch = points(1)
    batch["x"][0, 0, 0] = torch.inf
    with pytest.raises(NonFiniteError):
        program.train_step(batch)
        program.synchronize()
    for name, value in program.state_dict().items():
        assert torch.equal(value, before[name])
    program.close()


@pytest.mark.filterwarnings("ignore:(The loss of .* cannot be traced|Compiling another)")
def test_the_loss_of_a_size_that_was_there_before_reads_the_buffers_of_now() -> None:
    torch.manual_seed(0)
    model = Weighted()
    eager = copy.deepcopy(model)
    program = compiled(model)
    batches = [points(0), {**points(1), "x": torch.randn(2, 6, 8)}, points(2)]
    for batch in batches:
        expected = float(eager(**batch)["loss"].detach())
        assert float(program.forward_backward(batch).loss) == pytest.approx(expected)
    program.close()


class Fails(Weighted):
    """Fail, as long as ``fails``, on predictions that are not made up."""

    fails = True

    def losses(self, points: Tensor, labels: list[Tensor]) -> dict[str, Any]:
        if float(points.detach().std()) and Fails.fails:
            raise KeyError("no match")
        return super().losses(points, labels)


def test_a_loss_that_failed_in_its_first_step_is_cut_off_and_told_of_by_the_next() -> None:
    program = compiled(Fails())
    with pytest.raises(KeyError, match="no match"):
        program.forward_backward(points(0))
    Fails.fails = False
    with pytest.warns(UserWarning, match="computed outside of the program"):
        program.forward_backward(points(0))
    program.close()


class Branches(Weighted):
    """Read a part of the loss."""

    def behind(self, loss: Tensor, losses: dict[str, Any]) -> Any:
        return loss if losses["near"] > 1.0 else 0.0


class Learns(Weighted):
    """Weigh a part of the loss by what is trained."""

    def behind(self, loss: Tensor, losses: dict[str, Any]) -> Any:
        return (losses["near"] * self.last.bias).sum()


class Changes(Criterion):
    """Change what the loss reads."""

    def forward(self, points: Tensor, labels: list[Tensor]) -> dict[str, Any]:
        self.weights.mul_(0.9)
        return super().forward(points, labels)


def changes() -> nn.Module:
    model = Weighted()
    model.criterion = Changes()
    return model


@pytest.mark.parametrize("make", [Branches, Learns, changes])
def test_what_no_loss_outside_may_do_is_refused(make: Callable[[], nn.Module]) -> None:
    """For the first reason: that it cannot be traced."""
    with pytest.raises(CaptureError, match="cannot be captured"):
        compiled(make(), example_batch=points(0))


class Counts(Weighted):
    """Divide by a number that a function makes of the labels."""

    def losses(self, points: Tensor, labels: list[Tensor]) -> dict[str, Any]:
        return super().losses(points, labels) | {"count": sum(map(len, labels))}

    def forward(self, x: Tensor, labels: list[Tensor]) -> dict[str, Any]:
        losses = self.losses(self.last(self.first(x)), labels)
        return {"loss": losses["far"] / losses["count"]}


@pytest.mark.filterwarnings("ignore:The loss of .* cannot be traced")
def test_a_number_of_the_labels_that_another_batch_has_not_is_refused() -> None:
    program = compiled(Counts())
    program.train_step(points(1))
    before = program.state_dict()
    with pytest.raises(CaptureError, match="losses, which runs outside of the program, returns other"):
        program.train_step(points(0))
    for name, value in program.state_dict().items():
        assert torch.equal(value, before[name])
    program.close()


def test_a_count_of_items_is_refused_beside_a_loss_that_nobody_knows() -> None:
    program = compiled(speech())
    with pytest.raises(CaptureError, match="num_items_in_batch"):
        program.train_step(sounds(0) | {"num_items_in_batch": torch.tensor(4)})
    program.close()
