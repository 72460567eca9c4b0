"""Benchmark kernels against other providers: check each one first, time it, write the results."""

from __future__ import annotations

import csv
import importlib
import importlib.util
import io
import itertools
import json
import math
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from pathlib import Path
from statistics import quantiles
from typing import Any, Protocol

import torch
from torch import Tensor

from megacompile.blocks.costs import Calls, KernelCall, total
from megacompile.errors import MegacompileError
from megacompile.json_codec import from_plain, parse_json, to_plain
from megacompile.kernels.chips import CHIPS, read_ceilings, read_table
from megacompile.kernels.registry import CALLED, SPECS, Cost, Function, Operation, Shape, normal
from megacompile.own_files import replace_text, replacing_file
from megacompile.runtime.device_failures import first_line
from megacompile.text_files import read_text

# ------------------------------------------------------------------------------------------------------------
# Bench: the operations of all operators, their inputs and gradients.


OPERATIONS = {operation.name: operation for _, spec in sorted(SPECS.items()) for operation in spec.benchmarks}


def inputs_of(operation: Operation, shape: Shape, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Fresh leaves of a shape, with the same values at each call."""
    made = operation.make(shape, torch.Generator(device).manual_seed(0))
    moved = [x.to(device, dtype if x.is_floating_point() else x.dtype) for x in made]
    return [x.detach().requires_grad_(i < operation.trained) for i, x in enumerate(moved)]


def gradients_like(outputs: Sequence[Tensor]) -> list[Tensor]:
    """A random gradient of each output, with the same values at each call."""
    generator = torch.Generator(outputs[0].device).manual_seed(1)
    return [normal(generator, *o.shape).to(o.dtype) for o in outputs]


# ------------------------------------------------------------------------------------------------------------
# Bench: times on a GPU, and what this GPU can do at most.
#
# A call is captured into a CUDA graph and replayed, so that Python's launch gaps are not measured. Where one
# cannot be captured, it and all that come after it are timed as they are called. Before each replay the
# second-level cache is overwritten.


Call = Callable[[], object]
WARMUP, MIN_REPEATS, MAX_REPEATS, SPEND_MS = 3, 10, 200, 300.0
FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Times:
    """Milliseconds of one call: the fifth, the half and the four fifths of its distribution."""

    low: float
    median: float
    high: float
    graph: bool = True


@dataclass(frozen=True)
class Roofline:
    """The rates that this device reached in this run: a copy's bytes per second, products' flop per
    second."""

    bandwidth: float
    flops: dict[torch.dtype, float]

    def best_seconds(self, nbytes: int, flops: int, dtype: torch.dtype) -> float:
        """No kernel with this work is faster."""
        return max(nbytes / self.bandwidth, flops / self.flops[dtype])


class Timer(Protocol):
    """Times calls on one device and tells what they hold."""

    def time(self, call: Call) -> Times: ...

    def peak_bytes(self, call: Call) -> int: ...

    def scope(self) -> AbstractContextManager[Any]: ...


class CudaTimer:
    """CUDA events around replayed graphs, on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        self.captures = True  # until one fails
        self._device = device
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self.flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device=device)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Everything whose backward is timed must run in here: gradients run on their forward's stream."""
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            yield
        torch.cuda.synchronize()

    def time(self, call: Call) -> Times:
        with self.scope():
            for _ in range(WARMUP):
                call()
            replay, graph = self._captured(call)
            repeats = self._repeats(replay)
            spans = [self._once(replay) for _ in range(repeats)]
        low, _, _, high = quantiles([s() for s in spans], n=5)
        median = sorted(s() for s in spans)[repeats // 2]
        return Times(low, median, high, graph)

    def _captured(self, call: Call) -> tuple[Call, bool]:
        self.stream.synchronize()
        if not self.captures:
            return call, False
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self.stream):
                call()
        except RuntimeError as error:  # it synchronises, or allocates what a capture forbids
            torch.cuda.synchronize()
            self.captures = False
            warnings.warn(
                f"A CUDA graph cannot be captured ({first_line(error)}): calls are now timed without.",
                stacklevel=3,
            )
            self._end_capture(pool)
            return call, False
        return graph.replay, True

    def _end_capture(self, pool: Any) -> None:
        """Undo what torch leaves behind of a capture that failed: its allocator keeps all pages, for the pool
        of the graph, and every random number is an error."""
        index = torch.cuda.current_device()
        with suppress(RuntimeError):  # it ended there
            torch._C._cuda_endAllocateToPool(index, pool)
            torch._C._cuda_releasePool(index, pool)
        fresh = torch.Generator(self._device).graphsafe_get_state()
        torch.cuda.default_generators[index].graphsafe_set_state(fresh)

    def _repeats(self, replay: Call) -> int:
        once = self._once(replay)
        self.stream.synchronize()
        return min(max(math.ceil(SPEND_MS / max(once(), 1e-3)), MIN_REPEATS), MAX_REPEATS)

    def _once(self, replay: Call) -> Callable[[], float]:
        self.flush.zero_()
        start = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        end = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        start.record(self.stream)
        replay()
        end.record(self.stream)
        return lambda: float(start.elapsed_time(end))

    def peak_bytes(self, call: Call) -> int:
        """The most that a call holds beyond what was there before it."""
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        with self.scope():
            kept = call()
        del kept
        return torch.cuda.max_memory_allocated() - before


def roofline(timer: Timer, device: torch.device, dtypes: tuple[torch.dtype, ...]) -> Roofline:
    """Measure a copy of 1 GiB and square products of random numbers."""
    return Roofline(_copy_rate(timer, device), {d: _product_rate(timer, device, d) for d in dtypes})


def _copy_rate(timer: Timer, device: torch.device) -> float:
    source = torch.empty(1 << 30, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * source.nbytes / timer.time(lambda: target.copy_(source)).median * 1e3


def _product_rate(timer: Timer, device: torch.device, dtype: torch.dtype) -> float:
    side = 8192 if dtype != torch.float32 else 4096
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    return 2 * side**3 / timer.time(lambda: a @ b).median * 1e3


# ------------------------------------------------------------------------------------------------------------
# Bench: who computes an operation. Eager torch, torch.compile, megacompile, Liger, and files of users.
#
# A provider maps an operation's name to a function with the arguments of its eager form, or to None where it
# does not have the operation. A file of a user is a Python module with functions of those names.


Provider = Callable[[str], Function | None]


def providers(files: Sequence[str], device: torch.device) -> dict[str, Provider]:
    """Those that can run on ``device``, by name, megacompile's and eager's first."""
    found: dict[str, Provider] = {"eager": lambda name: OPERATIONS[name].eager, "megacompile": OURS.get}
    if device.type == "cuda":
        found["torch.compile"] = _compiled
        if importlib.util.find_spec("liger_kernel") is not None:
            found["liger"] = _liger
    for file in files:
        found[Path(file).stem] = from_file(Path(file))
    return found


OURS: dict[str, Function] = {name: operation.ours for name, operation in OPERATIONS.items()}


def _compiled(name: str) -> Function:
    torch._dynamo.reset()
    torch._functorch.config.donated_buffer = False  # one graph's backward is timed again and again
    function: Function = torch.compile(OPERATIONS[name].eager, dynamic=False)
    return function


def _liger(name: str) -> Function | None:
    """Liger-Kernel's functional interface."""
    run = OPERATIONS[name].liger
    interface = importlib.import_module("liger_kernel.transformers.functional")
    return None if run is None else partial(run, interface)


def from_file(path: Path) -> Provider:
    """The functions of a Python file, by name."""
    if not path.is_file():
        raise MegacompileError(f"--provider {path}: there is no such file.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise MegacompileError(f"--provider {path}: this is no Python file.")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise MegacompileError(f"--provider {path} fails on import: {error}") from error
    if not any(hasattr(module, name) for name in OPERATIONS):
        raise MegacompileError(
            f"--provider {path} defines none of the operations: name its functions {', '.join(OPERATIONS)}."
        )
    return lambda name: getattr(module, name, None)


# ------------------------------------------------------------------------------------------------------------
# Bench: run every provider of an operation, first for correctness, then for time.
#
# In: operations, shapes, dtypes, providers and a timer. Out: :class:`Row` per provider and pass. A provider
# that is wrong or fails is not timed, and says so. Correct is: in no tensor, results and gradients, farther
# from float64 than eager torch is in the same dtype, by more than a tolerance.


SLACK = {torch.float32: 5e-4, torch.float16: 1e-3, torch.bfloat16: 1e-2}
MODES = ("forward", "backward", "full")


@dataclass(frozen=True)
class Row:
    """One provider's result. Times in milliseconds (zero where nothing was timed), ``roofline`` the
    share of the best possible time, ``error`` the worst against float64 as a share of a tensor's largest
    element, ``note`` why something is missing."""

    operation: str
    dtype: str
    shape: str
    provider: str
    mode: str
    median_ms: float = 0.0
    low_ms: float = 0.0
    high_ms: float = 0.0
    gigabytes_per_second: float = 0.0
    teraflops: float = 0.0
    roofline: float = 0.0
    peak_bytes: int = 0
    error: float = 0.0
    note: str = ""

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        return self.operation, self.dtype, self.shape, self.provider, self.mode


def shape_text(shape: Shape) -> str:
    return "x".join(map(str, shape))


def _outputs(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def _all_results(function: Function, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, then gradients, where there are some."""
    leaves = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
    outputs = _outputs(function(*leaves))
    wanted = [x for x in leaves if x.requires_grad]
    grads = torch.autograd.grad(outputs, wanted, gradients_like(outputs)) if wanted else ()
    return [*(o.detach() for o in outputs), *grads]


def check(
    operation: Operation,
    shape: Shape,
    dtype: torch.dtype,
    functions: Mapping[str, Function],
    device: torch.device,
) -> dict[str, tuple[float, str]]:
    """(worst error, what is wrong or nothing) of each provider."""
    inputs = inputs_of(operation, operation.check_shape(shape, device), dtype, device)
    doubles = [
        x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x for x in inputs
    ]
    exact = _all_results(operation.eager, doubles)
    allowed = [e + SLACK[dtype] for e in _errors(_all_results(operation.eager, inputs), exact)]
    found = {}
    for name, function in functions.items():
        try:
            errors = _errors(_all_results(function, inputs), exact)
        except Exception as error:
            found[name] = (0.0, f"fails: {_first_line(error)}")
            continue
        wrong = [i for i, (e, a) in enumerate(zip(errors, allowed, strict=True)) if not e <= a]
        note = f"wrong: result {wrong[0]} is off by {errors[wrong[0]]:.1e} of scale" if wrong else ""
        found[name] = (max(errors), note)
    return found


def _errors(got: Sequence[Tensor], exact: Sequence[Tensor]) -> list[float]:
    if [tuple(x.shape) for x in got] != [tuple(x.shape) for x in exact]:
        raise ValueError(f"its results are {[tuple(x.shape) for x in got]}")
    pairs = zip(got, exact, strict=True)
    return [float((a.double() - b).abs().max() / b.abs().max().clamp(min=1e-30)) for a, b in pairs]


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:120]


@dataclass(frozen=True)
class Bench:
    """The settings of a run; ``timer`` and ``roof`` are None where correctness alone is checked."""

    providers: Mapping[str, Provider]
    device: torch.device
    timer: Timer | None
    roof: Roofline | None

    def rows(self, operation: Operation, shape: Shape, dtype: torch.dtype) -> Iterator[Row]:
        """Every provider of one operation on one shape; one row that says why where the operation fails."""
        try:
            yield from self._rows(operation, shape, dtype)
        except Exception as error:  # the operations after it are worth having
            head = operation.name, str(dtype).removeprefix("torch."), shape_text(shape)
            yield Row(*head, "megacompile", "full", note=f"fails: {_first_line(error)}")

    def _rows(self, operation: Operation, shape: Shape, dtype: torch.dtype) -> Iterator[Row]:
        functions = {n: f for n, p in self.providers.items() if (f := p(operation.name)) is not None}
        head = operation.name, str(dtype).removeprefix("torch."), shape_text(shape)
        for name, (error, note) in check(operation, shape, dtype, functions, self.device).items():
            if note or self.timer is None:
                yield Row(*head, name, "full", error=error, note=note or "checked")
                continue
            try:
                yield from self._timed(operation, shape, dtype, functions[name], (*head, name), error)
            except torch.OutOfMemoryError:
                yield Row(*head, name, "full", error=error, note="out of memory")
            except Exception as raised:  # the other providers' times are worth having
                yield Row(*head, name, "full", error=error, note=f"fails: {_first_line(raised)}")

    def _timed(
        self,
        operation: Operation,
        shape: Shape,
        dtype: torch.dtype,
        function: Function,
        head: tuple[str, str, str, str],
        error: float,
    ) -> Iterator[Row]:
        assert self.timer is not None and self.roof is not None
        inputs = inputs_of(operation, shape, dtype, self.device)
        wanted = [x for x in inputs if x.requires_grad]
        with self.timer.scope():
            outputs = _outputs(function(*inputs))
        grads = gradients_like(outputs)

        def forward() -> Any:
            return function(*inputs)

        def backward() -> Any:
            return torch.autograd.grad(outputs, wanted, grads, retain_graph=True)

        def full() -> Any:
            return torch.autograd.grad(_outputs(function(*inputs)), wanted, grads)

        costs = operation.costs(shape, inputs[0].element_size())
        passes = zip(MODES, (forward, backward, full), (*costs, costs[0] + costs[1]), strict=True)
        for mode, call, cost in passes if wanted else itertools.islice(passes, 1):
            times, peak = self.timer.time(call), self.timer.peak_bytes(call)
            rates = self._rates(cost, times.median, dtype)
            note = "" if times.graph else "timed without a graph"
            yield Row(*head, mode, times.median, times.low, times.high, *rates, peak, error, note)

    def _rates(self, cost: Cost, median_ms: float, dtype: torch.dtype) -> tuple[float, float, float]:
        assert self.roof is not None
        seconds = median_ms / 1e3
        best = self.roof.best_seconds(cost.nbytes, cost.flops, dtype)
        return cost.nbytes / seconds / 1e9, cost.flops / seconds / 1e12, best / seconds


# ------------------------------------------------------------------------------------------------------------
# Bench: the shapes of one program, and what each kernel is worth in a step of it.


@dataclass(frozen=True)
class Target:
    """A benchmark of a program: an operation on a shape, and its calls per step."""

    operation: str
    dtype: str
    shape: Shape
    forward: int
    backward: int


def read_calls(plan: Path) -> Calls:
    """The calls of the program whose plan this is, from the file that its dump wrote beside it."""
    path = plan.with_name("kernel_calls.json")
    if not plan.is_file():
        raise MegacompileError(f"--plan {plan}: there is no such file.")
    if not path.is_file():
        raise MegacompileError(
            f"--plan {plan}: the shapes of a plan stand in kernel_calls.json beside it, which is missing: "
            "give the plan.json of a dump (megacompile.compile(..., dump=folder))."
        )
    items = from_plain(list[dict[str, Any]], parse_json(read_text(path), str(path)), str(path))
    counts = [from_plain(int, item.pop("calls", None), f"{path}: calls") for item in items]
    calls = from_plain(tuple[KernelCall, ...], items, str(path), partial=True)
    return total(zip(calls, counts, strict=True))


def targets(calls: Calls) -> tuple[list[Target], list[str]]:
    """Return what a program's calls are benchmarked as; and the calls for which there is no benchmark."""
    counts: dict[tuple[str, str, Shape], Counter[str]] = defaultdict(Counter)
    unknown = []
    for call, count in calls:
        found = operation_of(call)
        if found is None:
            unknown.append(f"{call.op} on {' '.join(map(shape_text, call.shapes))} (×{count})")
            continue
        operation, shape, kind = found
        counts[operation, call.dtype, shape][kind] += count
    made = [Target(*key, kinds["forward"], kinds["backward"]) for key, kinds in counts.items()]
    return sorted(made, key=lambda t: (list(OPERATIONS).index(t.operation), t.dtype, t.shape)), unknown


def operation_of(call: KernelCall) -> tuple[str, Shape, str] | None:
    """(operation, its shape, which pass) of a call."""
    op = CALLED.get(call.op)
    if op is None or not op.spec.benchmarks:
        return None
    operation, *_ = op.spec.benchmarks
    backward = op.part is op.spec.backward
    read, first = (
        [a.name for a in getattr(torch.ops.megacompile, name).default._schema.arguments]
        for name in (call.op, op.spec.name)
    )
    behind = backward and first[0] in read  # else the gradient, of the same shape, stands in its place
    shape = operation.shape_of(call.shapes[behind:], call.constants)
    return None if shape is None else (operation.name, shape, "backward" if backward else "forward")


def worth(made: Sequence[Target], rows: Sequence[Row]) -> str:
    """Calls per step and milliseconds per step of each provider, as Markdown."""
    times = {row.key: row.median_ms for row in rows if row.median_ms}
    names = list(dict.fromkeys(row.provider for row in rows))
    lines = [
        "| kernel | calls forward | backward | "
        + " | ".join(f"{n}, ms per step" for n in names)
        + " | saved |",
        "|---|--:|--:|" + "--:|" * (len(names) + 1),
    ]
    sums: Counter[str] = Counter()
    for target in made:
        spent = {n: t for n in names if (t := _per_step(target, n, times)) is not None}
        sums.update(spent)
        name = f"{target.operation} {target.dtype} {shape_text(target.shape)}"
        lines.append(_worth_line(name, f"{target.forward} | {target.backward}", names, spent))
    lines.append(_worth_line("all", " | ", names, dict(sums)))
    return "\n".join(lines)


def _per_step(
    target: Target, provider: str, times: dict[tuple[str, str, str, str, str], float]
) -> float | None:
    head = target.operation, target.dtype, shape_text(target.shape), provider
    found = [times.get((*head, mode)) for mode in ("forward", "backward")]
    if any(t is None for t in found):
        return None
    return target.forward * (found[0] or 0.0) + target.backward * (found[1] or 0.0)


def _worth_line(name: str, counts: str, names: Sequence[str], spent: dict[str, float]) -> str:
    cells = [f"{spent[n]:.2f}" if n in spent else "" for n in names]
    both = "eager" in spent and "megacompile" in spent
    saved = f"{spent['eager'] - spent['megacompile']:.2f}" if both else ""
    return f"| {name} | {counts} | " + " | ".join([*cells, saved]) + " |"


# ------------------------------------------------------------------------------------------------------------
# Bench: results as Markdown, CSV, JSON and a picture; compared with older ones; the gate's ceilings.


SLOWER = 1.05
"""A median this many times an older one is called slower: below that is noise."""
Hardware = Mapping[str, Any]


def markdown(rows: Sequence[Row], hardware: Hardware) -> str:
    """One table per operation, dtype and shape."""
    lines = [", ".join(f"{name} {value}" for name, value in hardware.items()), ""]
    groups: dict[tuple[str, str, str], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row.key[:3]].append(row)
    for (operation, dtype, shape), members in groups.items():
        lines += [f"### {operation} {dtype} {shape}", ""]
        lines += ["| provider | pass | ms | 20 %–80 % | GB/s | TFLOPS | % of roofline | peak MB | error | |"]
        lines += ["|---|---|--:|--:|--:|--:|--:|--:|--:|---|"]
        lines += [_line(row) for row in sorted(members, key=lambda r: MODES.index(r.mode))]
        lines.append("")
    return "\n".join(lines)


def _line(row: Row) -> str:
    cells = [row.provider, row.mode]
    if row.median_ms:
        flops = f"{row.teraflops:.1f}" if row.teraflops else ""
        cells += [f"{row.median_ms:.4f}", f"{row.low_ms:.4f}–{row.high_ms:.4f}",
                  f"{row.gigabytes_per_second:,.0f}", flops, f"{row.roofline:.0%}",
                  f"{row.peak_bytes / 1e6:,.1f}"]  # fmt: skip
    else:
        cells += [""] * 6
    return "| " + " | ".join([*cells, f"{row.error:.1e}", row.note]) + " |"


def write(folder: Path, rows: Sequence[Row], hardware: Hardware) -> list[Path]:
    """kernels.json, kernels.csv, kernels.md and, with matplotlib, kernels.png in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    text = io.StringIO()
    writer = csv.DictWriter(text, [*hardware, *(f.name for f in fields(Row))], lineterminator="\n")
    writer.writeheader()
    writer.writerows({**hardware, **asdict(row)} for row in rows)
    document = {"hardware": dict(hardware), "rows": to_plain(rows)}
    files = {
        "kernels.json": json.dumps(document, indent=1, allow_nan=False) + "\n",
        "kernels.csv": text.getvalue(),
        "kernels.md": markdown(rows, hardware) + "\n",
    }
    for name, content in files.items():
        replace_text(folder / name, content)
    picture = _plot(folder / "kernels.png", rows)
    return [folder / name for name in files] + ([picture] if picture else [])


def _plot(path: Path, rows: Sequence[Row]) -> Path | None:
    """Share of the roofline per operation and provider, one panel per pass."""
    timed = [row for row in rows if row.median_ms]
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    if not timed:
        return None
    names = list(dict.fromkeys(f"{r.operation} {r.dtype}\n{r.shape}" for r in timed))
    providers = list(dict.fromkeys(r.provider for r in timed))
    figure = Figure(figsize=(2.5 + 1.3 * len(names), 10), layout="constrained")
    for mode, axes in zip(MODES, figure.subplots(3, 1, sharex=True), strict=True):
        for i, provider in enumerate(providers):
            mine = [r for r in timed if r.provider == provider and r.mode == mode]
            at = [names.index(f"{r.operation} {r.dtype}\n{r.shape}") for r in mine]
            width = 0.8 / len(providers)
            bars = [x - 0.4 + (i + 0.5) * width for x in at]
            axes.bar(bars, [100 * r.roofline for r in mine], width, label=provider)
        axes.set_ylabel(f"{mode}: % of roofline")
        axes.set_xticks(range(len(names)), names, fontsize=7)
    figure.axes[0].legend(ncols=len(providers))
    with replacing_file(path) as written:
        figure.savefig(written, dpi=120)
    return path


def read_rows(path: Path) -> list[Row]:
    """The rows of a kernels.json."""
    what = f"--compare {path}: this is no kernels.json of bench kernels; it"
    document = parse_json(read_text(path), what)
    table = from_plain(dict[str, Any], document, what)
    rows: list[Row] = from_plain(list[Row], table.get("rows"), f"{what}s list of rows")
    return rows


def compare(old: Sequence[Row], new: Sequence[Row]) -> str:
    """Medians then and now, as Markdown; what became slower or wrong is marked."""
    before = {row.key: row for row in old}
    lines = ["| operation | provider | pass | ms then | ms now | ratio | |", "|---|---|---|--:|--:|--:|---|"]
    for row in new:
        past = before.get(row.key)
        if past is None or not (past.median_ms and row.median_ms):
            continue
        ratio = row.median_ms / past.median_ms
        mark = "slower" if ratio > SLOWER else "faster" if ratio < 1 / SLOWER else ""
        name = f"{row.operation} {row.dtype} {row.shape}"
        cells = [
            name,
            row.provider,
            row.mode,
            f"{past.median_ms:.4f}",
            f"{row.median_ms:.4f}",
            f"{ratio:.2f}",
        ]
        lines.append("| " + " | ".join([*cells, mark]) + " |")
    if len(lines) == 2:
        return "Nothing was timed both then and now."
    return "\n".join(lines)


def ceilings() -> str:
    """The checked-in ceilings of the ahead-of-time gate and what binds, a line per kernel and case."""
    chips = sorted(CHIPS)
    lines = [
        "| kernel | case | " + " | ".join(f"{CHIPS[chip].name} (sm_{chip})" for chip in chips) + " |",
        "|---|---|" + "---|" * len(chips),
    ]
    cells: dict[tuple[str, str, int, str], dict[int, str]] = defaultdict(dict)
    spilled = {row.key: f", {row.local} B spilled" for row in read_table() if row.local}
    for row in read_ceilings():
        more = f", executes {row.executed:.2f}" if row.executed > 1 else ""
        cells[row.kernel, row.case, row.variant, row.operator][row.arch] = (
            row.text + more + spilled.get(row.key, "")
        )
    for (kernel, case, *_), found in cells.items():
        lines.append(f"| {kernel} | {case} | " + " | ".join(found.get(chip, "") for chip in chips) + " |")
    return "\n".join(lines)
