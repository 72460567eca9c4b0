"""Bytes and nodes of a Mamba-2 layer with its scan as an operator, and as transformers writes it: Markdown.

    python -m benchmarks.mamba2_scan [--tokens 4096]

One layer of Mamba-2 2.7B and of Bamba 9B on the meta device, one sequence, bfloat16, as plans for a GPU count
them: what a forward takes at most beside its inputs, what a backward does that is given nothing but these
(recompute and backward), and what all saved activations take.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any
from unittest import mock

from torch import nn

from benchmarks.one_layer import compiled_layer, tokens_asked
from megacompile.blocks.differentiated_template import PolicyFunctions
from megacompile.capture import patches

_COLUMNS = ("layer", "scan", "nodes", "forward", "recompute and backward", "saved")


def mamba2() -> nn.Module:
    """Mamba-2 2.7B's layer."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    made: nn.Module = Mamba2ForCausalLM(
        Mamba2Config(
            vocab_size=50288, hidden_size=2560, num_heads=80, head_dim=64, state_size=128, n_groups=1,
            chunk_size=256, num_hidden_layers=1,
        )
    )  # fmt: skip
    return made


def bamba() -> nn.Module:
    """Bamba 9B's layer, with its MLP."""
    from transformers import BambaConfig, BambaForCausalLM

    made: nn.Module = BambaForCausalLM(
        BambaConfig(
            vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_attention_heads=32,
            num_key_value_heads=8, mamba_n_heads=128, mamba_d_head=64, mamba_d_state=128, mamba_n_groups=1,
            mamba_chunk_size=256, num_hidden_layers=1, attn_layer_indices=[],
        )
    )  # fmt: skip
    return made


def theirs(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What capture puts in the place of transformers' function: that function."""
    return function(*args, **kwargs)


def layer(make: Callable[[], nn.Module], tokens: int) -> tuple[int, int, int, int]:
    """Nodes of the graph; bytes of a forward, of a recompute and backward, and of what is saved."""
    compiled, template = compiled_layer(make, tokens)
    policies = template.policies
    least = min(_at_once(p) for p in policies.values())
    return len(compiled.fused.graph.nodes), template.forward.peak_bytes, least, policies["all"].saved_bytes


def _at_once(policy: PolicyFunctions) -> int:
    """What a backward and the recompute before it hold together at most."""
    assert policy.backward is not None
    before = policy.recompute.peak_bytes if policy.recompute is not None else 0
    return max(before, policy.backward.peak_bytes + policy.saved_bytes)


def main() -> None:
    tokens = tokens_asked(__doc__.splitlines()[0])
    print("| " + " | ".join(_COLUMNS) + " |\n|---|---|" + "--:|" * 4)
    own = mock.patch.dict(patches._RECURRENCES, {"mamba2_chunk_scan": (theirs, "")})
    for name, make in (("Mamba-2 2.7B", mamba2), ("Bamba 9B", bamba)):
        for how, patched in (("transformers'", own), ("operator", contextlib.nullcontext())):
            with patched:
                nodes, *sizes = layer(make, tokens)
            print(f"| {name} | {how} | {nodes} | " + " | ".join(f"{n / 1e9:.2f} GB" for n in sizes) + " |")


if __name__ == "__main__":
    main()
