"""A step's loss is an ordinary tensor, but for its ``backward``, which a step has made already."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import Tensor

import megacompile
from tests.support.models import batch_for, build


def test_backward_says_what_a_step_has_done() -> None:
    model, batch = build("plain"), batch_for("plain")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    program = megacompile.compile(model, "1MB", optimizer=optimizer, device="cpu")
    steps = [program.train_step(batch), program.train_step([batch, batch]), program.forward_backward(batch)]
    for out in steps:
        for loss in (out.loss, *out.losses):
            with pytest.raises(megacompile.ProgramError, match=r"leave out loss\.backward\(\)"):
                loss.backward()
            plain, file = torch.tensor(loss.item()), io.BytesIO()
            assert (repr(loss), f"{loss:.3f}", float(loss)) == (repr(plain), f"{plain:.3f}", float(plain))
            torch.save({"loss": loss}, file)
            file.seek(0)
            kept = [torch.load(file)["loss"], pickle.loads(pickle.dumps(loss)), copy.deepcopy(loss)]
            kept += [loss.detach(), loss + 0, torch.stack([loss, loss])[0], sum([loss], torch.tensor(0.0))]
            assert all(type(tensor) is Tensor and torch.equal(tensor, plain) for tensor in kept)
    program.close()
