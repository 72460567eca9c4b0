"""The numerical check of loops: a template's functions over chunks beside the whole ones, on random numbers.

Both are made of one joint graph at a short length. Forward, recompute and backward of each checkpoint
policy run on equal inputs; a backward is given what the whole forward saved.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacompile.blocks.block_functions import BlockFunction
from megacompile.blocks.differentiated_template import DifferentiatedTemplate
from megacompile.blocks.joint_graph import Ref
from megacompile.blocks.partition import Template
from megacompile.graph.fusion_check import TOLERANCE

IGNORED = -100  # labels, every fifth
_SMALL_SHARE = 1e-2
"""Of a function's largest result. Smaller ones may be sums of terms that cancel; their rounding does not."""
_CPU = torch.device("cpu")


def disagreement(
    template: Template, whole: DifferentiatedTemplate, looped: DifferentiatedTemplate
) -> str | None:
    """Name the function whose loops do not compute what the whole one does; None where all do."""
    inputs = _random_inputs(template)
    floats = [e.dtype for e in template.examples if e.is_floating_point()]
    allowed = max((TOLERANCE[d] for d in floats), default=0.0)
    for name, policy in whole.policies.items():
        known: dict[Ref, Tensor] = {("in", i): x for i, x in enumerate(inputs)}
        pairs = [
            (policy.forward, looped.policies[name].forward),
            (policy.recompute, looped.policies[name].recompute),
            (policy.backward, looped.policies[name].backward),
        ]
        for function, other in pairs:
            if function is None or other is None:
                continue
            if function is policy.backward:
                known |= _random_gradients(function, known)
            results, others = _run_function(function, known), _run_function(other, known)
            least = _SMALL_SHARE * max((_largest(x) for x in results), default=0.0)
            for ref, a, b in zip(function.outputs, results, others, strict=True):
                if why := _differ(a, b, allowed, least):
                    return f"{function.name}: {ref[0]} {ref[1]} {why}"
            if function is not policy.backward:
                known |= dict(zip(function.outputs, results, strict=True))
    return None


def _run_function(function: BlockFunction, known: dict[Ref, Tensor]) -> list[Tensor]:
    """The function on copies of what it is given to keep, which it may write over."""
    donated = ("saved", "grad")
    given = [known[r].clone() if r[0] in donated else known[r] for r in function.inputs]
    with function.products():
        return function.load(_CPU)(given)


def _largest(x: Tensor) -> float:
    """Return the largest of the elements that are finite: those of a mask may not be."""
    finite = x[x.isfinite()] if x.is_floating_point() else x.new_empty(0)
    return float(finite.abs().amax()) if finite.numel() else 0.0


def _differ(a: Tensor, b: Tensor, allowed: float, least: float) -> str | None:
    """Describe how two results differ, in parts of their scale: of the largest element, or of ``least``."""
    if (a.shape, a.dtype, a.stride()) != (b.shape, b.dtype, b.stride()):
        return f"is {b.dtype}{list(b.shape)}, not {a.dtype}{list(a.shape)}"
    if not a.is_floating_point():
        return None if torch.equal(a, b) else "differs"
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    scale = max(_largest(a), least) or 1.0
    apart = (a.to(wide) - b.to(wide)).abs().masked_fill(a == b, 0.0)
    distance = float(apart.amax()) / scale if a.numel() else 0.0
    return None if distance <= allowed else f"is off by {distance:.1e} of scale, allowed are {allowed:.0e}"


def _random_inputs(template: Template) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    labels = any(n.target is torch.ops.aten.nll_loss_forward.default for n in template.graph.nodes)
    given = [n for n in template.graph.nodes if n.op == "placeholder"]
    made = [_random(e, k, labels, generator) for e, k in zip(template.examples, template.kinds, strict=True)]
    for node, value in zip(given, made, strict=True):
        if value.dtype == torch.int32 and any("attention" in str(user.target) for user in node.users):
            value[0], value[1] = 0, value.shape[-1]  # the keys that a packed token sees: all
    return made


def _random(example: Tensor, kind: str, labels: bool, generator: torch.Generator) -> Tensor:
    """Weights of a size that keeps activations near 1; small labels and ids."""
    made = torch.empty_strided(example.shape, example.stride(), dtype=example.dtype)
    if not (example.is_floating_point() or example.is_complex()):
        made.random_(0, 2, generator=generator)
        if made.dim():
            made[..., :1] = 1  # of a mask: a position that sees no key would give no number
        if labels and kind == "value":
            made.flatten()[::5] = IGNORED
        return made
    made.normal_(generator=generator)
    if kind == "weight":
        made.mul_(example.shape[-1] ** -0.5 if example.dim() > 1 else 0.1).add_(float(example.dim() == 1))
    return made


def _random_gradients(function: BlockFunction, known: dict[Ref, Tensor]) -> dict[Ref, Tensor]:
    generator = torch.Generator().manual_seed(1)
    wanted = [ref for ref in function.inputs if ref[0] == "grad"]
    return {("grad", k): torch.empty_like(known["out", k]).normal_(generator=generator) for _, k in wanted}
