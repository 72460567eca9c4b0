"""One layer of a model as plans for an H100 count it: on the meta device, one sequence, bfloat16."""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from megacompile.api.frontend import Compiled, Frontend
from megacompile.blocks.differentiated_template import DifferentiatedTemplate
from megacompile.capture.batch import read_batch

_PROCESSORS = 132  # of an H100


def compiled_layer(
    make: Callable[[], nn.Module], tokens: int, **options: Any
) -> tuple[Compiled, DifferentiatedTemplate]:
    """A model with one layer, and that layer's functions; ``options`` are the frontend's."""
    with torch.device("meta"):
        model = make().train()
    ids = torch.zeros(1, tokens, dtype=torch.long)
    batch = read_batch({"input_ids": ids, "labels": ids}, model)
    frontend = Frontend(model, torch.bfloat16, processors=_PROCESSORS, **options)
    compiled = frontend.build(batch)
    (template,) = (t for t in compiled.templates if t.name.endswith("layers.0"))
    return compiled, template


def tokens_asked(description: str) -> int:
    """``--tokens`` of a benchmark's command line."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--tokens", type=int, default=4096)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    return int(parser.parse_args().tokens)
