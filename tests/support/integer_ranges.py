"""Find the integers of a Triton kernel that wrap in a launch, in what Triton compiles for it.

In: a recorded launch, so arguments and grid are known; its tensors may be on the meta device. Out: a sentence
for each integer of less than 64 bits whose exact value leaves its type in some program, if an address, a mask
or the course of the kernel depends on it. Each integer of the kernel's IR (TTIR, after Triton's passes on it)
gets the range of its values from those of its operands. Where operands depend on each other the range may be
too wide; it is never too narrow.
"""

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from benchmarks.kernel_gate import _specialise
from megacompile.kernels._triton import Launch

Range = tuple[int, int]
INTEGER = re.compile(r"(?:tensor<(?:\d+x)+)?i(\d+)\b")
LINE = re.compile(r'([\w.]+)":(\d+)')
# The operands that decide what is read and written, and what is done. A value that is stored is none of them.
DECIDING = {
    "tt.addptr": slice(1, 2),
    "tt.load": slice(1, 2),
    "tt.store": slice(2, 3),
    "scf.for": slice(0, 3),
    "scf.if": slice(0, 1),
}
SAME = {
    *(f"tt.{name}" for name in ("splat", "expand_dims", "broadcast", "reshape", "trans", "split", "join")),
    "arith.extsi",
    "arith.trunci",
}
# Operations of which no operand decides. Any other one is an error, until it stands in one of these tables.
OTHERS = re.compile(
    r"(arith|math)\.\w+|scf\.yield|tt\.(func|return|reduce|reduce\.return|scan|scan\.return|dot|bitcast|fp_to_fp"
    r"|precise_\w+|extern_elementwise|get_program_id|get_num_programs|make_range)"
)
ROUNDS = 3  # of a loop, after which an integer that it carries may be any of its type

_lowered: dict[str, tuple[Any, Any]] = {}
"""(context, module) of what was compiled."""


def wrapping_integers(launch: Launch, arch: int) -> list[str]:
    """Return where integers of the launch's kernel wrap on a chip: their ranges, and lines of the source."""
    key = repr((launch.kernel.__name__, arch, _specialise(launch), launch.options))
    if key not in _lowered:
        _lowered[key] = _lower(launch, arch)
    kernel = _Kernel(launch, _lowered[key][1])
    deciding = kernel.deciding()
    return [kernel.sentence(value) for value in kernel.wrapping if value in deciding]


class _Kernel:
    """The integers of one launch, by their ``id``."""

    def __init__(self, launch: Launch, module: Any) -> None:
        self.name, self.grid = launch.kernel.__name__, (*launch.grid, 1, 1)[:3]
        self.operations: list[Any] = []
        self.inside: dict[int, list[Any]] = defaultdict(list)  # operations of each region
        module.walk(self._take)
        self.ranges: dict[int, Range] = {}
        self.wrapping: dict[int, tuple[Any, Range]] = {}
        (function,) = (x for x in self.operations if x.get_name() == "tt.func")
        given = [x for x in launch.args if not (isinstance(x, int) and x == 1)]  # to Triton one is a constant
        for parameter, value in zip(self._parameters(function, len(given)), given, strict=True):
            if isinstance(value, int):
                self.ranges[parameter.id()] = value, value
        self._run(function)

    def _take(self, operation: Any) -> None:
        if (block := operation.get_block()) is not None:  # the module has none
            self.operations.append(operation)
            self.inside[block.get_parent().id()].append(operation)

    def _parameters(self, operation: Any, count: int) -> list[Any]:
        """Return the arguments of an operation's first region."""
        block = self.inside[operation.get_region(0).id()][0].get_block()
        return [block.arg(place) for place in range(count)]

    def _yielded(self, operation: Any) -> list[list[Any]]:
        """Return what each region of an operation gives its results."""
        regions = range(operation.get_num_regions() if operation.get_num_results() else 0)
        return [_operands(self.inside[operation.get_region(n).id()][-1]) for n in regions]

    def _run(self, operation: Any) -> None:
        for region in range(operation.get_num_regions()):
            for each in self.inside[operation.get_region(region).id()]:
                self._visit(each)

    def _visit(self, operation: Any) -> None:
        name = operation.get_name()
        known = name in DECIDING or name in SAME or OTHERS.fullmatch(name)
        assert known, f"{self.name} has {name}: say in integer_ranges.py which of its operands decide"
        if name == "scf.for":
            self._loop(operation)
        elif name == "scf.if":
            self._run(operation)
            for value, *of in zip(_results(operation), *self._yielded(operation), strict=True):
                self._join(value, *of)
        else:
            for value in _results(operation):
                if _bits(value) is not None:
                    self._set(value, self._computed(operation, name))

    def _range(self, value: Any) -> Range | None:
        """The range of a value: its type's where no more is known, None where that is no integer."""
        bits = _bits(value)
        return None if bits is None else self.ranges.get(value.id(), _of_type(bits))

    def _join(self, value: Any, *of: Any) -> None:
        """Give a value that may be one of several its range."""
        if _bits(value) is not None:
            self.ranges[value.id()] = _hull(*(self._range(each) for each in of))

    def _set(self, value: Any, exact: Range | None) -> None:
        bits = _bits(value)
        least, most = _of_type(bits)
        low, high = exact or (least, most)
        self.wrapping.pop(value.id(), None)  # of an earlier round of a loop
        if 1 < bits < 64 and (low < least or high > most):
            self.wrapping[value.id()] = value, (low, high)
        self.ranges[value.id()] = max(low, least), min(high, most)

    def _loop(self, loop: Any) -> None:
        begin, end, step, *first = _operands(loop)
        counter, *carried = self._parameters(loop, 1 + len(first))
        (low, latest), (least, most) = self._range(begin), self._range(step)
        high = max(low, self._range(end)[1] - 1)
        if (low, least) == (latest, most):
            high -= (high - low) % least
        self._set(counter, (low, high + most))  # it passes the last one before the loop ends
        self.ranges[counter.id()] = low, high
        for value, of in zip(carried, first, strict=True):
            self._join(value, of)
        for n in range(ROUNDS + 1):
            self._run(loop)
            before = [self._range(value) for value in carried]
            for value, *of in zip(carried, first, *self._yielded(loop), strict=True):
                self._join(value, *of)
            grown = [value for value, was in zip(carried, before, strict=True) if self._range(value) != was]
            if n >= ROUNDS - 1:
                self.ranges |= {value.id(): _of_type(_bits(value)) for value in grown}
            if not grown:
                break
        for value, of in zip(_results(loop), carried, strict=True):
            self._join(value, of)

    def _computed(self, operation: Any, name: str) -> Range | None:
        """The exact range of an operation's results; None where they may be any of their type."""
        given = [self._range(x) for x in _operands(operation)]
        if name == "tt.get_program_id":
            return 0, max(0, self.grid[operation.get_int_attr("axis")] - 1)
        if name == "tt.get_num_programs":
            return (self.grid[operation.get_int_attr("axis")],) * 2
        if name == "tt.make_range":
            return operation.get_int_attr("start"), operation.get_int_attr("end") - 1
        if name == "arith.constant":
            value = operation.get_constant_value()
            return None if value is None else (int(value),) * 2
        if name == "arith.select":
            return _hull(*given[1:])
        if name in SAME:
            signed = name == "arith.extsi" and given[0] == _of_type(1)
            return (-1, 0) if signed else _hull(*given)
        if name == "tt.reduce":
            (*combined, _) = self.inside[operation.get_region(0).id()]
            return given[0] if {x.get_name() for x in combined} <= {"arith.minsi", "arith.maxsi"} else None
        compute = ARITHMETIC.get(name.removeprefix("arith."))
        return compute(*given) if compute and None not in given else None

    def deciding(self) -> set[int]:
        """Return the values on which an address, a mask or the kernel's course depends."""
        sources: dict[int, list[Any]] = {}  # what a value is made of
        found = []
        for operation in self.operations:
            name, operands, results = operation.get_name(), _operands(operation), _results(operation)
            found += operands[DECIDING.get(name, slice(0))]
            if name == "scf.for":
                counter, *carried = self._parameters(operation, len(operands) - 2)
                found.append(counter)
                ways = list(zip(operands[3:], *self._yielded(operation), strict=True)) if carried else []
                sources |= {x.id(): list(of) for x, of in zip(carried + results, ways + ways, strict=True)}
            elif name == "scf.if":
                ways = list(zip(*self._yielded(operation), strict=True))
                sources |= {x.id(): list(of) for x, of in zip(results, ways, strict=True)}
            elif name != "tt.load":
                sources |= {x.id(): operands for x in results}
        deciding: set[int] = set()
        while found:
            value = found.pop().id()
            found += [] if value in deciding else sources.get(value, [])
            deciding.add(value)
        return deciding

    def sentence(self, key: int) -> str:
        """Say what wraps, and where."""
        value, (low, high) = self.wrapping[key]
        lines = ", called at ".join(f"{file}:{line}" for file, line in LINE.findall(str(value.get_loc())))
        return f"{self.name}: {value.get_type()} in [{low}, {high}], {lines}"


def _lower(launch: Launch, arch: int) -> tuple[Any, Any]:
    """Compile a kernel to TTIR: (context, module), of which the second lives no longer than the first."""
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend

    target = GPUTarget("cuda", arch, 32)
    backend = make_backend(target)
    options, context = backend.parse_options(launch.options), ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    source = ASTSource(launch.kernel, *_specialise(launch))
    functions = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, *functions, context)
    return context, backend.make_ttir(module, {}, options, arch)


def _operands(operation: Any) -> list[Any]:
    return [operation.get_operand(place) for place in range(operation.get_num_operands())]


def _results(operation: Any) -> list[Any]:
    return [operation.get_result(place) for place in range(operation.get_num_results())]


def _bits(value: Any) -> int | None:
    """The bits of an integer, or of the elements of a tensor of these."""
    found = INTEGER.match(str(value.get_type()))
    return int(found[1]) if found else None


def _of_type(bits: int) -> Range:
    return (0, 1) if bits == 1 else (-(1 << (bits - 1)), (1 << (bits - 1)) - 1)


def _hull(*ranges: Range) -> Range:
    return min(low for low, _ in ranges), max(high for _, high in ranges)


def _corners(compute: Callable[[int, int], int]) -> Callable[[Range, Range], Range]:
    """The range of a function that rises or falls all along each operand."""

    def of(a: Range, b: Range) -> Range:
        found = [compute(x, y) for x in a for y in b]
        return min(found), max(found)

    return of


def _not_negative(compute: Callable[[Range, Range], Range]) -> Callable[[Range, Range], Range | None]:
    return lambda a, b: compute(a, b) if min(a[0], b[0]) >= 0 else None


def _quotient(a: Range, b: Range) -> Range | None:
    towards_zero = _corners(lambda x, y: x // y if x >= 0 else -(-x // y))
    return towards_zero(a, b) if b[0] > 0 else None


def _remainder(a: Range, b: Range) -> Range | None:
    if b[0] <= 0:
        return None
    if a[0] >= 0 and a[1] < b[0]:
        return a
    return max(min(a[0], 0), 1 - b[1]), min(max(a[1], 0), b[1] - 1)


ARITHMETIC: dict[str, Callable[..., Range | None]] = {
    "addi": _corners(lambda x, y: x + y),
    "subi": _corners(lambda x, y: x - y),
    "muli": _corners(lambda x, y: x * y),
    "minsi": _corners(min),
    "maxsi": _corners(max),
    "divsi": _quotient,
    "remsi": _remainder,
    "shli": _not_negative(_corners(lambda x, y: x << y)),
    "shrsi": _not_negative(_corners(lambda x, y: x >> y)),
    "shrui": _not_negative(_corners(lambda x, y: x >> y)),
    "andi": _not_negative(lambda a, b: (0, min(a[1], b[1]))),
    "extui": lambda a: a if a[0] >= 0 else None,
}
