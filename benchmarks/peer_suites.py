"""The trainers of this repository in the place of transformers' and TRL's, for these libraries' own tests.

In: a checkout of one of them, in which pytest runs. Out: what pytest says. A plugin of pytest:

    HF_HUB_OFFLINE=1 PYTHONPATH=../megacompile python -m pytest -p benchmarks.peer_suites tests/trainer

``PEER=plain`` leaves the library's own trainers, which tells the tests that pass at all on this machine.

Nothing comes from the network: models and tokenizers of TRL's tests are made here, of the same architectures
and chat templates with few tokens, and their data by the scripts of the checkout.
"""

from __future__ import annotations

import functools
import importlib
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import transformers

_BUDGET = {"hbm_budget": "2GB"}
# Names that test modules import and that are gone since: tests of them fail, all others run.
_GONE = {
    "transformers": ("GlueDataset", "GlueDataTrainingArguments"),
    "trl.import_utils": ("is_joblib_available",),
    "trl.trainer.sft_trainer": ("_chunked_cross_entropy_loss", "_patch_chunked_ce_lm_head", "dft_loss"),
}
_HUB, _REVISION = "trl-internal-testing", "0" * 40
_SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|start|>", "<|end|>", "<|return|>"]
_ENDS = {"Llama": "<|eot_id|>", "GptOss": "<|return|>"}  # of a turn; others have <|im_end|>
_TEMPLATES = {  # chat templates that TRL has a file of
    "Qwen2ForCausalLM-2.5": "qwen2_5",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3",
    "LlamaForCausalLM-3": "llama3",
    "LlamaForCausalLM-3.1": "llama3_1",
    "LlamaForCausalLM-3.2": "llama3_2",
    "GptOssForCausalLM": "gptoss",
    "CohereForCausalLM": "cohere",
    "Cohere2ForCausalLM": "cohere2",
    "Glm4MoeForCausalLM": "glm4moe",
    "GemmaForCausalLM": "gemma",
    "Phi3ForCausalLM-3": "phi3",
    "Lfm2ForCausalLM": "lfm2",
}
_SMALL = {
    "hidden_size": 8,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_EXPERTS = {
    "Qwen3Moe": {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 128},
    "GptOss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "Glm4Moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
}


def pytest_sessionstart() -> None:
    """Replace classes and hub before a test module imports them."""
    of_trl = Path("tests/test_sft_trainer.py").is_file()
    if of_trl:
        _stand_in_for_the_hub()
    for place, names in _GONE.items():
        if of_trl or place == "transformers":
            module = importlib.import_module(place)
            for name in names:
                if not hasattr(module, name):
                    setattr(module, name, lambda: False)
    if os.environ.get("PEER") != "plain":
        _replace_trainers(of_trl)


def _replace_trainers(of_trl: bool) -> None:
    from megacompile.integrations.transformers import Trainer

    ours = _released(Trainer)
    for module in (transformers, transformers.trainer, sys.modules["transformers"]):  # conftest makes another
        module.Trainer = ours  # type: ignore[attr-defined]
    if of_trl:
        import trl

        from megacompile.integrations.trl import DPOTrainer, SFTTrainer

        trl.SFTTrainer, trl.DPOTrainer = _released(SFTTrainer), _released(DPOTrainer)


def _released(kind: Any) -> Any:
    """A trainer with a budget, which gives a model its values back when it is made, and when it was trained:
    tests read them."""

    class Released(kind):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **_BUDGET | kwargs)
            if self.program is not None:  # DPO's reference was computed
                self.release()

        def train(self, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().train(*args, **kwargs)
            finally:
                self.release()

    Released.__name__ = Released.__qualname__ = kind.__name__
    return Released


def _stand_in_for_the_hub() -> None:
    """Fill a cache of the hub with small models, and answer ``load_dataset`` by what the checkout's scripts
    make."""
    import datasets
    from huggingface_hub import constants

    cache = Path(tempfile.mkdtemp(prefix="peer-suites-"))
    constants.HF_HUB_CACHE = str(cache)
    names = {
        name
        for file in Path("tests").glob("test_*.py")
        for name in re.findall(rf"{_HUB}/(tiny-[\w.-]+)", file.read_text())
    }
    for name in sorted(names):
        _put_model(name, cache / f"models--{_HUB}--{name}")
    load = datasets.load_dataset

    def load_dataset(path: str, name: str | None = None, *, split: str | None = None, **given: Any) -> Any:
        if not path.startswith(_HUB):
            return load(path, name, split=split, **given)
        found = _data(path.removeprefix(f"{_HUB}/"))[name or "default"]
        part = found if split is None else found[split]
        return part.to_iterable_dataset() if given.get("streaming") else part

    datasets.load_dataset = load_dataset


@functools.cache
def _data(name: str) -> dict[str, Any]:
    """The configurations of a data set, by the script that pushes it to the hub."""
    import datasets

    made: dict[str, Any] = {}

    def keep(data: Any, repo: str, config_name: str = "default", **_: Any) -> None:
        made[config_name] = data

    given, sys.argv = sys.argv, ["script", "--push_to_hub", "true"]
    push = datasets.DatasetDict.push_to_hub, datasets.Dataset.push_to_hub
    datasets.DatasetDict.push_to_hub = datasets.Dataset.push_to_hub = keep
    try:
        runpy.run_path(f"scripts/generate_{name}_dataset.py", run_name="__main__")
    finally:
        sys.argv = given
        datasets.DatasetDict.push_to_hub, datasets.Dataset.push_to_hub = push
    return made


def _put_model(name: str, folder: Path) -> None:
    """A model and its tokenizer as a cache of the hub holds them; nothing where it is none of text."""
    import torch

    found = re.fullmatch(r"tiny-(\w+)(ForCausalLM)(-[\w.]+)?", name)
    config_class = getattr(transformers, f"{found[1]}Config", None) if found else None
    if found is None or config_class is None:
        return
    tokenizer = _tokenizer(name.removeprefix("tiny-"), _ENDS.get(found[1], "<|im_end|>"))
    ids = {
        "vocab_size": len(tokenizer),
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    torch.manual_seed(0)
    model = getattr(transformers, f"{found[1]}ForCausalLM")(
        config_class(**_SMALL, **ids, **_EXPERTS.get(found[1], {}))
    )
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.xavier_uniform_(weight)
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text(_REVISION)
    model.to(torch.bfloat16).save_pretrained(folder / "snapshots" / _REVISION)
    tokenizer.save_pretrained(folder / "snapshots" / _REVISION)


def _tokenizer(name: str, end: str) -> Any:
    """Build a tokenizer of bytes, with the chat template of the named model."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from trl import chat_template_utils

    alphabet = [*_SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    templates = Path(chat_template_utils.__file__).parent / "chat_templates"
    file = templates / f"{_TEMPLATES.get(name, 'qwen2_5')}.jinja"
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made,
        pad_token=_SPECIAL[0],
        eos_token=end,
        additional_special_tokens=_SPECIAL[1:],
        chat_template=file.read_text(),
    )
