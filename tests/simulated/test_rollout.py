"""A rollout on ``torch.cuda``: the tokens and the next steps are those of the CPU backend."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megacompile.api.pipeline import Compiler
from tests.support.cuda_programs import program
from tests.support.models import batch_for, build


@pytest.mark.parametrize("streams", [False, True])
def test_tokens_and_steps_are_those_of_the_cpu_backend(
    streams: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megacompile.api.generate_with_cache import Rollout

    if streams:
        monkeypatch.setattr(Rollout, "_place_weights", Rollout._stream)
    monkeypatch.setattr(Compiler, "_may_reside", lambda *_: ())
    results: list[Any] = []
    for device in ("cpu", "cuda"):
        torch.manual_seed(0)
        policy: Any = build("llama")
        policy.set_attn_implementation("eager")  # torch would take cuDNN's
        trained = program(policy, device, "1GB", compute_dtype=torch.bfloat16)
        trained.train_step(batch_for("llama", 0, size=4, length=64))
        prompts = batch_for("llama", 1, size=2, length=8)["input_ids"]
        with trained.rollout() as model:
            tokens = model.generate(prompts, max_new_tokens=4, do_sample=False, pad_token_id=0)
        assert tokens.device.type == "cpu"
        loss = trained.train_step(batch_for("llama", 2, size=4, length=64)).loss
        results.append((tokens, loss, trained.state_dict()))
        trained.close()
    (tokens, loss, state), (others, other, ours) = results
    assert torch.equal(tokens, others) and loss == other
    assert all(torch.equal(ours[name], value) for name, value in state.items())
