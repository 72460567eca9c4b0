"""What the first compilation of a process imports and sets up: done in the fork server, its forks have it.

torch imports a third of itself when it first exports a model. Most tests of several ranks train one small
model, whose capture is remembered here for all of them. Importing this module starts no thread, draws
no number of the default generator, and says nothing.
"""

from __future__ import annotations

import contextlib
import io
from unittest import mock

import torch
import tqdm
from torch import nn

import megacompile
from megacompile.api import session
from tests.support.captures import Captures
from tests.support.models import batch_for, build

captures = Captures()


def compile_once() -> None:
    """Compile small models, and forget all but the capture of one."""
    with contextlib.redirect_stderr(io.StringIO()), torch.random.fork_rng(devices=[]):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        program = megacompile.compile(
            model, "1MB", optimizer=torch.optim.AdamW(model.parameters()), max_grad_norm=1.0,
            loss_fn=lambda out, batch: out.sum(), example_batch=torch.zeros(2, 4, dtype=torch.bfloat16),
        )  # fmt: skip
        program.close()
        plain = build("plain")
        with captures.shared():
            megacompile.compile(
                plain, 1, optimizer=torch.optim.AdamW(plain.parameters()), device="cpu",
                compute_dtype=torch.float32, example_batch=batch_for("plain"),
            ).close()  # fmt: skip
    session._announce.cache_clear()  # each process says it once


tqdm.tqdm.monitor_interval = 0  # torch makes a progress bar for each graph that it runs; no thread for it
if torch.version.cuda is None:
    compile_once()
else:  # forks cannot use CUDA once it was asked for devices, nor autograd once it has had threads
    layer = nn.Linear(2, 2)
    with mock.patch.object(torch._C, "_cuda_getDeviceCount", lambda: 0):
        torch.optim.AdamW(layer.parameters())
        torch.export.export(layer, (torch.zeros(1, 2),)).module()
