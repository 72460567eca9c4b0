"""The gradient of transformers' grouped product as one operator, where transformers itself has a loop.

Before 5.23 the backward of ``transformers::grouped_mm_fallback`` loops over how many rows each expert has,
which a graph does not know. Later versions call an operator there, which runs that loop.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

_PRODUCT = "grouped_mm_fallback"
_PRODUCT_BACKWARD = f"{_PRODUCT}_backward"


def define_grouped_gradient() -> None:
    """Define the operator that later versions of transformers have; the product calls it."""
    moe = sys.modules.get("transformers.integrations.moe")
    operators = torch.ops.transformers
    if moe is None or not hasattr(operators, _PRODUCT) or hasattr(operators, _PRODUCT_BACKWARD):
        return
    loop = moe._grouped_mm_fallback_backward

    def gradients(input: Tensor, weight: Tensor, offs: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        of_input, of_weight, _ = loop(SimpleNamespace(saved_tensors=(input, weight), offs=offs), grad_output)
        return of_input, of_weight

    def shapes(input: Tensor, weight: Tensor, offs: Tensor, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(input), torch.empty_like(weight)

    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor, None]:
        input, weight = ctx.saved_tensors
        return *getattr(operators, _PRODUCT_BACKWARD)(input, weight, ctx.offs, grad_output), None

    schema = "(Tensor input, Tensor weight, Tensor offs, Tensor grad_output) -> (Tensor, Tensor)"
    torch.library.custom_op(f"transformers::{_PRODUCT_BACKWARD}", gradients, mutates_args=(), schema=schema)
    torch.library.register_fake(f"transformers::{_PRODUCT_BACKWARD}", shapes)
    context = moe._grouped_mm_fallback_setup_context
    torch.library.register_autograd(f"transformers::{_PRODUCT}", backward, setup_context=context)
