"""``megacompile train``: from a YAML file to a fine-tuned model, by TRL's trainers.

The keys are TRL's own (of its scripts, ``SFTConfig`` or ``DPOConfig``, ``ModelConfig``), so that a file for
TRL's scripts runs as it is, and those of :class:`TrainConfig`.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import os
import shlex
import tempfile
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn

from megacompile.cli.chat_images import NamedRows
from megacompile.cli.chat_rows import as_messages
from megacompile.cli.output import folder_of
from megacompile.cli.train_config import check_values, read_config
from megacompile.distributed.ranks import find_ranks
from megacompile.errors import MegacompileError
from megacompile.own_files import refuse_link, replace_text
from megacompile.text_files import path_of, read_text
from megacompile.units import format_bytes, format_hours, format_seconds

if TYPE_CHECKING:
    from megacompile.report.schedule import Schedule


_FILES = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
    ".md": "text",
}
_MOST_TOKENS = 1 << 24  # tokens of a row
_SHOWN = 40  # characters before and behind a mistake
_HOUR = 3600
_TOKENS_SHOWN = 32  # of the first row that a dry run shows
_TOKENIZERS = ("*token*", "*vocab*", "*.model")  # of any kind; without, transformers makes one up


@dataclass
class TrainConfig:
    """The keys that TRL's scripts do not have."""

    method: Literal["sft", "dpo"] = field(default="sft", metadata={"help": "what the data is for"})
    data: str | None = field(default=None, metadata={"help": "a file, a pattern of files, or a hub id"})
    hbm_budget: str = field(default="auto", metadata={"help": "device memory: 22GB, 90%%, auto"})
    host_budget: str | None = field(default=None, metadata={"help": "host memory for the state"})
    offload_dir: str | None = field(default=None, metadata={"help": "a directory on a drive, for the rest"})
    optimizer_state: str | None = field(default=None, metadata={"help": "fp32, int8 or int4"})
    optimizer: Literal["muon"] | None = field(
        default=None, metadata={"help": "muon for the layers' matrices; optim is for the rest"}
    )
    device: str | None = field(default=None, metadata={"help": "cuda or cpu"})
    from_scratch: bool = field(default=False, metadata={"help": "random weights, of the model's config"})
    sample_prompts: list[str] | None = field(
        default=None, metadata={"help": "prompts to answer at each evaluation"}
    )
    sample_tokens: int = field(default=64, metadata={"help": "the most tokens of an answer to a prompt"})
    dry_run: bool = field(default=False, metadata={"help": "only say whether it fits, and how long it takes"})


def run_train(options: argparse.Namespace) -> int:
    """Train as the file says; from the newest whole checkpoint of its output_dir, if there is one.

    Stopped by a signal it writes no model, and the exit code is 128 and the signal's number, as a shell's.
    """
    path = path_of(options.config)
    read_config(path)  # before imports that take seconds
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # before transformers makes the group of the ranks, which torchrun could not make again at a restart
    first = find_ranks().rank == 0  # which writes, and tells
    try:
        import trl

        from megacompile.integrations.resume import Resume
        from megacompile.integrations.training_report import Logbook, write_report
    except ImportError as error:
        raise MegacompileError(f"train needs TRL ({error}): pip install 'megacompile[trl,plots]'.") from error
    keys = _parse(trl, path, options.overrides)
    ours, arguments = keys[0], keys[2]
    _check_reports(arguments.report_to)
    resume, folder = Resume(keys), path_of(arguments.output_dir, "output_dir")
    checkpoint = resume.checkpoint()
    where = f"the model is in {folder / 'model'}, what happened in {folder / 'report.md'}"
    if resume.is_finished(checkpoint):
        if first:
            print(f"megacompile: already finished: {where}; another output_dir starts anew")
        return 0
    if ours.dry_run:
        _dry_run(options.config, keys, resume.steps(checkpoint))
        return 0
    folder_of(arguments.output_dir, "output_dir")
    try:
        refuse_link(folder / "model")
    except OSError as error:
        raise MegacompileError(f"The model cannot be written: {error}.") from error
    if first:
        _keep_keys(Path(options.config), options.overrides, folder / "config.yaml")
        (folder / "report.md").unlink(missing_ok=True)  # which says that a training has ended
    trainer = _built(options.config, keys)
    trainer.add_callback(logbook := Logbook(folder / "log.csv"))
    trainer.add_callback(resume)
    if checkpoint is not None and first:
        print(f"megacompile: going on from {checkpoint}; another output_dir starts anew")
    try:
        trainer.train(resume_from_checkpoint=checkpoint)
    finally:
        trainer._steps.progress.end()
    stopped: int | None = trainer._interruption.stopped_by
    if stopped is not None:
        if first:
            print("megacompile: the same command goes on with the training; no model was written")
        return 128 + stopped
    trainer.save_model(str(folder / "model"))
    if first:
        for said in _lacking_updates(trainer):
            print(f"megacompile: {said}")
        from megacompile.state.model_export import copy_processor

        source, made = Path(keys[3].model_name_or_path), folder / "model"
        copy_processor(source, made, known=made)  # where rows were text alone
        write_report(trainer, logbook, folder)
        print(f"megacompile: {where}")
    return 0


def _keep_keys(given: Path, flags: Sequence[str], kept: Path) -> None:
    """A copy of the file, which says what flags were given beside it."""
    if kept.exists() and kept.samefile(given):
        return
    beside = f"# Trained with these flags: {shlex.join(flags)}\n" if flags else ""
    replace_text(kept, beside + read_text(given))


def _built(path: str, keys: Any) -> Any:
    """The trainer of the keys, or what is wrong with them."""
    try:
        return _trainer(*keys)
    except MegacompileError:
        raise
    except (ValueError, OSError) as error:  # what TRL and transformers say of keys, data and models
        raise MegacompileError(f"{path}: {error}") from error


def _trainer(ours: TrainConfig, script: Any, arguments: Any, model_config: Any, mixture: Any) -> Any:
    """TRL's trainer for the method, over a program, with its model and data."""
    from trl import get_peft_config

    from megacompile.integrations.samples import Samples
    from megacompile.integrations.training_arguments import MegacompileConfig
    from megacompile.integrations.trl import DPOTrainer, SFTTrainer

    if ours.sample_prompts and arguments.eval_strategy == "no":
        raise MegacompileError(
            "sample_prompts are answered at evaluations: give eval_strategy and eval_steps."
        )
    train_data, eval_data = _data(ours, script, mixture, arguments)
    images = bool({"image", "images"} & {*(train_data.column_names or ())})
    if images and ours.method != "sft":
        raise MegacompileError(f"data: rows have images, which method: {ours.method} does not take: use sft.")
    names = {f.name for f in dataclasses.fields(MegacompileConfig)}
    trainer = {"sft": SFTTrainer, "dpo": DPOTrainer}[ours.method](
        args=arguments,
        train_dataset=train_data,
        eval_dataset=eval_data,
        peft_config=get_peft_config(model_config),
        config=MegacompileConfig(**{k: v for k, v in vars(ours).items() if k in names}),
        **_model(ours, model_config, arguments, images),
    )
    if images:
        trainer.data_collator = _collator_of_images(trainer)
    if ours.optimizer == "muon":
        trainer.optimizer = _muon_and_others(trainer)
    if ours.sample_prompts:
        path = Path(arguments.output_dir) / "samples.jsonl"
        trainer.add_callback(Samples(trainer, ours.sample_prompts, ours.sample_tokens, path))
    if not arguments.push_to_hub:  # of a folder's model TRL's card says None
        trainer.create_model_card = lambda *args, **kwargs: None
    return trainer


def _muon_and_others(trainer: Any) -> Any:
    """Return Muon for the layers' matrices, and for the rest what ``optim`` names. Muon's updates are as long
    as AdamW's, so that one learning rate, its schedule and one weight decay are for both."""
    import torch

    from megacompile.cli.models import inner_matrices
    from megacompile.state.several_optimizers import Several

    model, arguments = trainer.model, trainer.args
    matrices, decayed = inner_matrices(model), set(trainer.get_decay_parameter_names(model))
    chosen = set(map(id, matrices))
    rest = [(n, p) for n, p in model.named_parameters() if p.requires_grad and id(p) not in chosen]
    decay = arguments.weight_decay
    muon = torch.optim.Muon(
        matrices, lr=arguments.learning_rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"
    )
    groups = [
        {"params": [p for n, p in rest if (n in decayed) == decays], "weight_decay": decay if decays else 0.0}
        for decays in (True, False)
    ]
    kind, options = trainer.get_optimizer_cls_and_kwargs(arguments, model)
    groups = [group for group in groups if group["params"]]
    return Several([muon, *([kind(groups, **options)] if groups else [])])


def _collator_of_images(trainer: Any) -> Any:
    """Return the trainer's collator; of images of several sizes, where the model takes these by grids, one
    that fills batches up to few shapes."""
    from megacompile.integrations.image_buckets import BucketCollator, measure

    collator, rows = NamedRows(trainer.data_collator), trainer.args.per_device_train_batch_size
    if "image_grid_thw" not in getattr(collator.processor, "model_input_names", ()):
        return collator
    data = [of for of in (trainer.train_dataset, trainer.eval_dataset) if of is not None]
    sizes = [size for of in data for size in measure(collator, of)]
    if len(set(sizes)) == 1:
        return collator
    if trainer.args.per_device_eval_batch_size > rows:
        raise MegacompileError(
            "per_device_eval_batch_size is larger than per_device_train_batch_size, and batches of images "
            "are filled up to the shapes of training: give the same for both."
        )
    filled: Any = collator
    said: object
    try:
        said = filled = BucketCollator(collator, trainer.model.config, sizes, batch_size=rows)
    except MegacompileError as error:  # of a model whose batches cannot be filled up
        said = f"{error} Each combination of sizes is a program."
    if find_ranks().rank == 0:
        print(f"images    {said}".replace("\n", "\n          "))
    return filled


def _parse(trl: Any, path: Path, overrides: Sequence[str]) -> Any:
    """The file and the flags as dataclasses: ours, TRL's of scripts, training, the model, the data."""
    import torch
    from transformers import integrations

    from megacompile.integrations.trl import DPOConfig, SFTConfig

    keys = read_config(path)
    given = list(overrides)
    method = given[given.index("--method") + 1] if "--method" in given[:-1] else keys.get("method", "sft")
    training = DPOConfig if method == "dpo" else SFTConfig
    if "use_cpu" not in keys and "--use_cpu" not in given and not torch.cuda.is_available():
        given += ["--use_cpu", "True"]
    kinds = (TrainConfig, trl.ScriptArguments, training, trl.ModelConfig, trl.DatasetMixtureConfig)

    class Parser(trl.TrlParser):
        def error(self, message: str) -> NoReturn:  # rather than a page of usage
            raise MegacompileError(message)

    parser = Parser(kinds)
    flags = {flag.removeprefix("--") for flag in parser._option_string_actions} | {"env"}
    names = [str(key) for key in keys] + [
        flag.removeprefix("--").split("=")[0] for flag in given if flag[:2] == "--"
    ]
    for name in names:
        if name not in flags:
            near = difflib.get_close_matches(name, flags, n=1)
            hint = f": did you mean {near[0]}?" if near else "."
            raise MegacompileError(f"{path}: there is no key {name!r}{hint}")
    try:
        parsed = parser.parse_args_and_config(["--config", str(path), *given])
    except MegacompileError as error:  # of a flag, or of a value in the file
        raise MegacompileError(f"{path}: {error}") from error
    except Exception as error:  # of many kinds: values are checked by the classes that take them
        raise MegacompileError(f"{path}: {' '.join(str(error).split())[:400]}") from error
    check_values(path, parsed)
    prompts = parsed[0].sample_prompts
    if prompts is not None and not (isinstance(prompts, list) and all(isinstance(p, str) for p in prompts)):
        raise MegacompileError(f"{path}: sample_prompts must be a list of texts.")
    if parsed[2].max_length is not None and not 0 < parsed[2].max_length <= _MOST_TOKENS:
        raise MegacompileError(
            f"{path}: max_length {parsed[2].max_length}: give 1 to {_MOST_TOKENS:,} tokens."
        )
    if "per_device_eval_batch_size" not in names:
        parsed[2].per_device_eval_batch_size = parsed[2].per_device_train_batch_size
    if "report_to" not in names and integrations.is_tensorboard_available():
        parsed[2].report_to = ["tensorboard"]
    if parsed[2].include_num_input_tokens_seen == "all":  # which is what the parser makes of true
        parsed[2].include_num_input_tokens_seen = "non_padding"
    return parsed


def _check_reports(names: Sequence[str]) -> None:
    """Refuse a report_to that is not installed, before the data is read."""
    from transformers.integrations import get_reporting_integration_callbacks

    try:
        for kind in get_reporting_integration_callbacks(names):
            kind()
    except (ValueError, RuntimeError, ImportError) as error:
        raise MegacompileError(f"report_to: {error}") from error


def _data(ours: TrainConfig, script: Any, mixture: Any, arguments: Any) -> tuple[Any, Any]:
    """(training, evaluation): from ``data``, or as TRL's own keys say; None where nothing is kept for it."""
    from datasets import Dataset, load_dataset
    from datasets.utils.logging import CRITICAL, get_verbosity, set_verbosity
    from trl import get_dataset

    if ours.data is not None:
        kind, told = _FILES.get(Path(ours.data).suffix), get_verbosity()
        set_verbosity(CRITICAL)  # what is logged of a failure is told below
        try:
            found = load_dataset(kind, data_files=ours.data) if kind else load_dataset(ours.data)
        except Exception as error:  # of many kinds, of the reader of each format
            reason = _broken_line(ours.data) or error.__cause__ or error  # which tells the line
            raise MegacompileError(f"data: {ours.data} cannot be read: {reason}") from error
        finally:
            set_verbosity(told)
    elif mixture.datasets:
        found = get_dataset(mixture)
    elif script.dataset_name:
        found = load_dataset(
            script.dataset_name, name=script.dataset_config, streaming=script.dataset_streaming
        )
    else:
        raise MegacompileError("There is nothing to train on: give data, dataset_name or datasets.")
    text, folder = getattr(arguments, "dataset_text_field", "text"), Path(ours.data or ".").parent
    try:
        train, test = (
            part
            if part is None
            else as_messages(part, text, folder)  # before a split, so that rows keep their numbers
            for part in (found[script.dataset_train_split], found.get(script.dataset_test_split))
        )
    except UnicodeDecodeError as error:
        raise MegacompileError(f"data: {ours.data} cannot be read: {error}") from error
    if isinstance(train, Dataset) and test is None and mixture.test_split_size:
        parts = train.train_test_split(test_size=mixture.test_split_size, seed=arguments.seed)
        train, test = parts["train"], parts["test"]
    if arguments.eval_strategy == "no":
        test = None
    elif test is None:
        raise MegacompileError("eval_strategy needs data for evaluation: give test_split_size, or 'no'.")
    return train, test


def _broken_line(pattern: str) -> str | None:
    """The first line of the files that is no JSON, where each line should be."""
    path = Path(pattern)
    for file in sorted(path.parent.glob(path.name)) if path.suffix == ".jsonl" else ():
        with file.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    json.loads(line if line.strip() else "{}")
                except (ValueError, RecursionError) as error:
                    start = max(0, getattr(error, "pos", 0) - _SHOWN)
                    shown = "…" * (start > 0) + line[start : start + 2 * _SHOWN].strip()
                    return f"line {number} of {file.name} is no JSON: {error}, in {shown!r}"
    return None


def _tokenizer(model_config: Any, arguments: Any, images: bool) -> Any:
    """Load the model's tokenizer, in its processor for ``images``; refuse a model or a template that is not
    there."""
    import transformers

    name = model_config.model_name_or_path
    if name is None:
        raise MegacompileError("There is no model: give model_name_or_path.")
    folder, template = Path(name), getattr(arguments, "chat_template_path", None)
    if name.startswith((".", "/")) and not folder.is_dir():
        raise MegacompileError(f"model_name_or_path: there is no folder {name}.")
    if folder.is_dir() and not any(next(folder.glob(files), None) for files in _TOKENIZERS):
        raise MegacompileError(
            f"model_name_or_path: {name} has no tokenizer: tokenizer.save_pretrained({name!r}) puts it there."
        )
    load = _processor if images else transformers.AutoTokenizer.from_pretrained
    tokenizer = load(name, revision=model_config.model_revision)
    _check_template(tokenizer, name, template, getattr(arguments, "assistant_only_loss", False))
    return tokenizer


def _processor(name: str, revision: str | None) -> Any:
    """Load what makes images what the model reads."""
    import transformers

    from megacompile.api.pretrained import auto_class

    config = transformers.AutoConfig.from_pretrained(name, revision=revision)
    if auto_class(config) is not transformers.AutoModelForImageTextToText:
        raise MegacompileError(
            f"data: rows have images, and {name} is a {config.model_type}, which reads text alone: give a "
            "vision-language model, or remove the images."
        )
    try:
        processor = transformers.AutoProcessor.from_pretrained(name, revision=revision)
    except (ImportError, OSError, ValueError) as error:  # ImportError: torchvision
        raise MegacompileError(f"The processor of {name} cannot be loaded: {str(error).strip()}") from error
    if not isinstance(processor, transformers.ProcessorMixin):
        raise MegacompileError(
            f"{name} has no processor for images: processor.save_pretrained({name!r}) puts it there."
        )
    return processor


def _model(ours: TrainConfig, model_config: Any, arguments: Any, images: bool) -> dict[str, Any]:
    """The trainer's arguments that say what is trained.

    A folder's weights go straight into the masters where they can; else TRL loads the model by its name.
    """
    import transformers

    from megacompile.api.pretrained import Shards, auto_class, build_empty

    tokenizer, name = _tokenizer(model_config, arguments, images), model_config.model_name_or_path
    folder, template = Path(name), getattr(arguments, "chat_template_path", None)
    if ours.from_scratch:
        transformers.set_seed(arguments.seed)
        config = transformers.AutoConfig.from_pretrained(name)
        made = auto_class(config).from_config(config)
        return {"model": made, "processing_class": tokenizer}
    plain = not (model_config.use_peft or template)
    if ours.method == "sft" and plain and (folder / "config.json").is_file():
        empty, shards = build_empty(folder), Shards(folder)
        shards.fit(empty)
        return {"model": empty, "weights": shards.read, "processing_class": tokenizer}
    given = {
        "revision": model_config.model_revision,
        "attn_implementation": model_config.attn_implementation,
        "dtype": model_config.dtype,
    }
    arguments.model_init_kwargs = given | (arguments.model_init_kwargs or {})
    return {"model": name, "processing_class": tokenizer}


def _check_template(tokenizer: Any, name: str, path: str | None, assistant_only: bool) -> None:
    """Refuse a chat template that cannot be read, or does not say what is learned."""
    import jinja2
    from trl.chat_template_utils import get_training_chat_template, has_generation_markers

    template, where = tokenizer.chat_template, f"The chat template of {name}"
    if path is not None and path.endswith((".jinja", ".j2")):
        where = f"chat_template_path: {path}"
        if not Path(path).is_file():
            raise MegacompileError(f"{where} is no file.")
        template = read_text(Path(path))
    elif path is not None:  # of another tokenizer, which TRL reads
        return
    if template is None and assistant_only:
        raise MegacompileError(
            f"The tokenizer of {name} has no chat template: give chat_template_path, a .jinja file, or set "
            "assistant_only_loss to false for data that are no chats."
        )
    tokenizer.chat_template = template
    try:
        if template is not None:
            tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=False)
    except jinja2.TemplateSyntaxError as error:
        raise MegacompileError(f"{where} is no template: line {error.lineno}: {error.message}") from error
    except jinja2.TemplateError:
        pass  # of this chat alone, as far as is known
    if not assistant_only or has_generation_markers(template):
        return
    try:
        get_training_chat_template(tokenizer)
    except ValueError as error:
        raise MegacompileError(
            f"{where} does not mark what the assistant says: put it between {{% generation %}} and "
            "{% endgeneration %}, in a .jinja file for chat_template_path, or set assistant_only_loss false."
        ) from error


def _dry_run(path: str, keys: Any, steps: int) -> None:
    """Say what the training would run, and how long it takes, by its trainer, which stops before the first
    step; ``steps`` were made before. Raises what the training would."""
    with tempfile.TemporaryDirectory() as folder:
        vars(keys[2]).update(output_dir=folder, report_to=[], disable_tqdm=True)  # nothing cuts the report
        trainer = _built(path, keys)
        programs = trainer.plan()
        if find_ranks().rank == 0:
            print("\n".join(_described_data(trainer)))
            print("\n".join(_described_programs(trainer, programs, steps)))


def _described_data(trainer: Any) -> Iterator[str]:
    """Yield the rows by number and length, and how the first one begins."""
    from megacompile.integrations.lengths import row_lengths

    most, held_out = trainer.args.max_length, trainer.eval_dataset
    for name, data in (("to train on", trainer.train_dataset), ("for evaluation", held_out)):
        if not isinstance(data, Sized):
            continue
        lengths = row_lengths(data)
        said = f"data      {len(data):,} rows {name}"
        if lengths:
            said += f", of {min(lengths):,} to {max(lengths):,} tokens"
            full = sum(length >= most for length in lengths) if most is not None else 0
            said += f", {full:,} of them as long as max_length, which cuts what is longer" if full else ""
        yield said
    row = next(iter(trainer.train_dataset))
    ids = next((row[name] for name in ("input_ids", "prompt_ids") if name in row), None)
    if ids is not None:
        yield f"          the first row begins {trainer.processing_class.decode(ids[:_TOKENS_SHOWN])!r}"


def _described_programs(trainer: Any, programs: Sequence[tuple[str, Schedule]], steps: int) -> Iterator[str]:
    """Yield the verdict, each program, and the time in all."""
    program = trainer.program
    timed = [(name, dataclasses.replace(schedule, machine=program.machine)) for name, schedule in programs]
    peak = max(schedule.peak_bytes for _, schedule in timed)
    yield f"FITS      {format_bytes(peak)} of the device at most, of {format_bytes(program.budget_bytes)}"
    slowest: dict[str, float] = {}
    for name, schedule in timed:
        seconds, kind = schedule.predicted_seconds, schedule.mode.kind
        runs = trainer.args.gradient_accumulation_steps if kind == "accumulate" else 1
        what = name.split()[0] if kind == "evaluate" else "train" if kind == "accumulate" else kind
        slowest[what] = max(runs * seconds, slowest.get(what, 0.0))
        yield f"program   {name}: {format_bytes(schedule.peak_bytes)}, {format_seconds(seconds)}"
    times = list(_times(trainer, trainer.planned_updates - steps, slowest))
    total = sum(count * seconds for count, _, seconds in times)
    in_all = format_seconds(total) if total < _HOUR else format_hours(total / _HOUR)
    parts = ", ".join(f"{count:,} {what} of {format_seconds(seconds)}" for count, what, seconds in times)
    yield f"time      {parts}: {in_all} in all, as"
    yield (
        f"          predicted for {program.machine.name}, with all rows as long as the longest, without "
        "compilation and checkpoints"
    )
    for said in _lacking_updates(trainer):
        yield f"warning   {said}"


def _lacking_updates(trainer: Any) -> Iterator[str]:
    """Say that a training ends before its learning rate is the one given, as one of few rows does."""
    updates, args = trainer.planned_updates, trainer.args
    if args.get_warmup_steps(updates) >= updates:
        yield (
            f"all updates ({updates:,}) are warm-up, the first at a learning rate of 0: give more "
            "num_train_epochs, fewer gradient_accumulation_steps, or warmup_steps: 0"
        )


def _times(trainer: Any, updates: int, slowest: Mapping[str, float]) -> Iterator[tuple[int, str, float]]:
    """Yield how often what is done, and how many seconds it takes."""
    from megacompile.integrations.samples import Samples

    args, state, evaluation = trainer.args, trainer.state, slowest.get("evaluation", 0.0)
    yield updates, "updates", slowest["train"]
    sets = trainer.eval_dataset if isinstance(trainer.eval_dataset, dict) else {"": trainer.eval_dataset}
    counts = [len(data) for data in sets.values() if isinstance(data, Sized)]
    rows = args.eval_batch_size * args.world_size
    if hasattr(trainer, "precompute_ref_logps"):
        count = len(trainer.train_dataset) + sum(counts)
        yield -(-count // rows), "batches of the reference", evaluation
    if args.eval_strategy == "no":
        return
    state.compute_steps(args, trainer.planned_updates)
    by_steps = args.eval_strategy == "steps"
    times = updates // state.eval_steps if by_steps else math.ceil(args.num_train_epochs)
    yield times * sum(-(-count // rows) for count in counts), "batches of evaluation", evaluation
    for callback in trainer.callback_handler.callbacks:
        if isinstance(callback, Samples):
            yield times * callback.tokens, "tokens of samples", slowest["samples"]
