"""Name the first rank that differs from rank 0 in what must be alike before ranks do anything together.

In: what every rank says of itself, by name. Out: nothing, or a sentence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import torch

_PACKAGES = ("megacompile", "torch", "triton", "transformers")  # what programs and their numbers depend on
_SENTENCES = {  # in the order in which they are looked at
    "device": "Rank {rank} trains on {theirs}, and rank 0 on {first}: give all ranks one kind of device.",
    "mesh": "Rank {rank} has a mesh of {theirs}, and rank 0 of {first}: give all ranks the same.",
    **dict.fromkeys(
        _PACKAGES, "Rank {rank} runs {theirs}, and rank 0 {first}: install the same versions on all machines."
    ),
    "settings": "Rank {rank} was compiled with {theirs}, and rank 0 with {first}: give all ranks the same.",
    "updates": (
        "Rank {rank} updates by {theirs}, rank 0 by {first}: give all machines of a mesh the same, or their "
        "copies of the state drift apart."
    ),
    "layout": "The weight groups of rank {rank} are not those of rank 0: make the same model on every rank.",
    "source": "Rank {rank} compiled another program than rank 0: please report this schedule.",
    "micro": "Rank {rank} brought {theirs} micro-batches, rank 0 {first}: give every rank as many.",
    "shapes": (
        "Rank {rank} brought a batch of {theirs}, rank 0 one of {first}: give all ranks batches of one "
        "shape, padded where they are shorter."
    ),
    "program": (
        "The model or the batch of rank {rank} is set otherwise than on rank 0 (a mode, an attribute, a "
        "constant): set all alike."
    ),
    "optimizer": "The optimizer of rank {rank} has {theirs}, that of rank 0 {first}: set all alike.",
    "place": "Rank {rank} is at another step, or has another seed, than rank 0: load the same checkpoint.",
    "count": (
        "Rank {rank} gave num_items_in_batch={theirs}, rank 0 {first}: give every rank the count of all "
        "ranks' batches together."
    ),
    "trained": (
        "Rank {rank} has made {theirs} updates, and rank 0 {first}: give every rank the same arguments, and "
        "an output_dir that all see."
    ),
    "names": "Rank {rank} loads other names, shapes or dtypes than rank 0: give every rank the same state.",
}


def versions() -> dict[str, str]:
    """Return the versions of the packages that ranks must have alike, by name."""
    return {name: _installed(name) for name in _PACKAGES}


def _installed(name: str) -> str:
    if name == "torch":
        return f"torch {torch.__version__}"  # with what it was built for
    try:
        return f"{name} {metadata.version(name)}"
    except metadata.PackageNotFoundError:
        return f"no {name}"


def difference(said: Sequence[Mapping[str, Any]]) -> str:
    """The first thing in which a rank differs from rank 0, in a sentence; "" where all are alike."""
    for what, sentence in _SENTENCES.items():
        values = [of_rank.get(what) for of_rank in said]
        for rank, theirs in enumerate(values):
            if theirs != values[0]:
                return sentence.format(rank=rank, theirs=theirs, first=values[0])
    return ""


def shared_gpu(gpus: Sequence[str]) -> str:
    """Say which ranks were given one GPU, by the GPUs' identifiers, in a sentence; "" where each has its
    own."""
    for rank, gpu in enumerate(gpus):
        first = gpus.index(gpu)
        if gpu and first < rank:
            return (
                f"Ranks {first} and {rank} have one GPU: start no more processes than there are GPUs, and "
                "give device='cuda' without a number."
            )
    return ""
