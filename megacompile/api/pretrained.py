"""Compile a model whose weights are read from safetensors files, tensor by tensor, into the host state."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from megacompile.api.checkpoint_conversions import Conversions, Merged
from megacompile.api.compile import compile
from megacompile.api.program import Program
from megacompile.capture.patches import Patch, replaced
from megacompile.errors import MegacompileError
from megacompile.json_codec import parse_json
from megacompile.state.safetensors_io import open_shard
from megacompile.text_files import read_text
from megacompile.user_warning import warn_user

OptimizerOf = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def from_pretrained(
    path: str | Path, hbm_budget: float | str, *, optimizer: OptimizerOf | None = None, **options: Any
) -> Program:
    """Compile a transformers model from a folder with ``config.json`` and safetensors files.

    The model is built without values; each parameter is read when its masters are allocated, so the
    host never holds more than the state and one file. ``optimizer`` makes one from the parameters
    (``lambda parameters: AdamW(parameters, lr=1e-5)``); the other options are those of
    :func:`megacompile.compile`. The model is in train mode. Code in the folder is never run.

    Raises :class:`MegacompileError` for a folder that does not hold such a model, by name.
    """
    folder = Path(path)
    if not (folder / "config.json").is_file():
        raise MegacompileError(
            f"{folder} has no config.json: give a local folder (hf download NAME --local-dir FOLDER)."
        )
    model = build_empty(folder)
    weights = Shards(folder)
    weights.fit(model)
    made = optimizer(model.parameters()) if optimizer is not None else None
    return compile(model, hbm_budget, optimizer=made, weights=weights.read, **options)


def build_empty(folder: Path) -> nn.Module:
    """The model that ``config.json`` names, in train mode, its parameters on the meta device."""
    try:
        import transformers
    except ImportError as error:
        raise MegacompileError(
            "from_pretrained needs transformers: pip install 'megacompile[transformers]'."
        ) from error
    try:
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise MegacompileError(f"{folder / 'config.json'} is no config of transformers: {error}") from error
    names = config.architectures or []
    kind = getattr(transformers, names[0], None) if names else None
    if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
        raise MegacompileError(
            f"{folder} is of {names or 'no architecture'}, which transformers does not have."
        )
    made: Callable[..., nn.Module] = kind._from_config  # type: ignore[attr-defined]
    with parameters_on_meta():
        model: Any = made(config, dtype=torch.float32)
    defaults = folder / "generation_config.json"
    if model.can_generate() and defaults.is_file():
        try:
            model.generation_config = transformers.GenerationConfig.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise MegacompileError(f"{defaults} is no generation config of transformers: {error}") from error
    loaded: nn.Module = model.train()
    return loaded


def auto_class(config: Any) -> Any:
    """Return transformers' class of models that continue text, those that read images for such a config."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

    if config.model_type in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        return transformers.AutoModelForImageTextToText
    return transformers.AutoModelForCausalLM


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Parameters lose their values as this thread builds modules; buffers keep theirs."""

    def register_empty(theirs: Any, self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        theirs(self, name, param)

    with replaced(
        [Patch(nn.Module, "register_parameter", register_empty, "values are read later, each once")]
    ):
        yield


class Shards:
    """The tensors of a folder's safetensors files by name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, str] = {}
        for file in sorted(_files(folder)):
            with open_shard(folder / file) as handle:
                self._files |= dict.fromkeys(handle.keys(), file)
        self._keys: dict[str, Merged] = {}
        self._renamed: dict[str, str] = {}

    def fit(self, model: nn.Module) -> None:
        """Find every parameter and persistent buffer of the model; buffers are set here."""
        prefix = getattr(model, "base_model_prefix", "") + "."
        conversions = Conversions(model)
        self._renamed = conversions.renamed(self._files)
        state = model.state_dict(keep_vars=True)
        found = {n: f for n in state if (f := self._find(n, prefix, conversions)) is not None}
        tied = {id(p): name for name, p in state.items() if name in found}
        for name, parameter in model.named_parameters():
            place = found.get(name) or found.get(tied.get(id(parameter), ""))
            if place is None:
                raise MegacompileError(
                    f"{self._folder} has no {name}, or under another name: load it with transformers' "
                    "from_pretrained and give the model to megacompile.compile."
                )
            self._keys[name] = place
            shape = self._shape(place)
            if shape != tuple(parameter.shape):
                raise MegacompileError(
                    f"{self._folder} has {name} in the shape {shape}; the model has {tuple(parameter.shape)}."
                )
        for name, buffer in model.named_buffers():
            if name in found:
                buffer.copy_(self._tensor(found[name].sources[0][0]))
        known = {key for place in found.values() for part in place.sources for key in part}
        extra = sorted(set(self._files) - known)
        if extra:
            text = f"{self._folder} holds {extra[0]} and {len(extra) - 1} more that the model has not."
            warn_user(text)

    def read(self, name: str) -> Tensor:
        """A parameter's value: mapped from its file, or, where transformers merges several, made."""
        sources = self._keys[name].sources
        if _is_whole(sources):
            return self._tensor(sources[0][0])
        return torch.cat([torch.stack([self._tensor(key) for key in part]) for part in sources], dim=1)

    def _find(self, name: str, prefix: str, conversions: Conversions) -> Merged | None:
        """Find a parameter in the files: under its name, without the head's name for its base model, renamed,
        in parts."""
        for known in (name, name.removeprefix(prefix)):
            for candidate in conversions.names(known):
                if candidate in self._files:
                    return Merged(((candidate,),))
            if known in self._renamed:
                return Merged(((self._renamed[known],),))
            merged = conversions.merged(known, self._files)
            if merged is not None:
                return merged
        return None

    def _shape(self, place: Merged) -> tuple[int, ...]:
        shapes = [self._shape_of(part[0]) for part in place.sources]
        if _is_whole(place.sources):
            return shapes[0]
        return (len(place.sources[0]), sum(s[0] for s in shapes), *shapes[0][1:])

    def _shape_of(self, key: str) -> tuple[int, ...]:
        with open_shard(self._folder / self._files[key]) as handle:
            return tuple(handle.get_slice(key).get_shape())

    def _tensor(self, key: str) -> Tensor:
        with open_shard(self._folder / self._files[key]) as handle:
            tensor: Tensor = handle.get_tensor(key)
        return tensor


def _is_whole(sources: tuple[tuple[str, ...], ...]) -> bool:
    """Return whether it is one tensor under one name; a name without a number is never merged."""
    return len(sources) == 1 and len(sources[0]) == 1


def _files(folder: Path) -> set[str]:
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return {"model.safetensors"}
    if not index.is_file():
        raise MegacompileError(f"{folder} has no model.safetensors and no {index.name}.")
    try:
        files = set(parse_json(read_text(index), str(index))["weight_map"].values())
    except (KeyError, AttributeError, TypeError) as error:
        raise MegacompileError(f"{index} is malformed: {error}.") from error
    for file in files:
        if not isinstance(file, str) or Path(file).name != file or not (folder / file).is_file():
            raise MegacompileError(f"{index} names {file!r}, which is no file in {folder}.")
    return files
