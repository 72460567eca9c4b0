"""Padding to few lengths: only where the model is known not to see it."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import megacompile
from tests.models import build

_SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16, "pad_token_id": 0,
    "max_position_embeddings": 64, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def fnet() -> nn.Module:
    from transformers import FNetConfig, FNetForMaskedLM

    return FNetForMaskedLM(FNetConfig(**_SMALL))


def convbert() -> nn.Module:
    from transformers import ConvBertConfig, ConvBertForMaskedLM

    return ConvBertForMaskedLM(ConvBertConfig(**_SMALL, num_attention_heads=4, embedding_size=16))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**_SMALL, num_attention_heads=2))


def llama() -> nn.Module:
    return build("llama")


@pytest.mark.parametrize(("make", "lengths"), [(fnet, 3), (convbert, 3), (bert, 2), (llama, 2)])
def test_padded_only_where_the_model_does_not_see_it(make: Any, lengths: int) -> None:
    torch.manual_seed(0)
    model = make().train()
    eager = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    program = megacompile.compile(
        model, "1GB", optimizer=optimizer, compute_dtype=torch.float32, policy="full-recompute"
    )
    with warnings.catch_warnings(record=True) as compiled:
        warnings.simplefilter("always")
        for length in (16, 19, 20):
            ids = torch.randint(5, 64, (2, length))
            loss = float(program.train_step({"input_ids": ids, "labels": ids}).loss)
            assert loss == pytest.approx(float(eager(input_ids=ids, labels=ids).loss), rel=1e-6)
    assert 1 + sum("another program" in str(w.message) for w in compiled) == lengths
    program.close()
