"""Two judges of a step that share no code with verify: reachability in a graph, and random execution.

Both know only what an operation touches: device tokens, bytes of the slab, host buffers, masters. The
graph tells which pairs of conflicting accesses some order could swap or overlap. The execution picks
orders at random, moves symbols through memory, and compares what every operation sees with what it
sees when the step runs one operation at a time.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import combinations
from random import Random

import networkx as nx

from megacompile.schedule.op_table import STREAMS, Stream, Token
from megacompile.schedule.step import Event, Op, Step

REPEATS = 2
Bytes = tuple[int, int]
"""First and past last byte in the slab."""


@dataclass(frozen=True, slots=True)
class Touch:
    """What an operation reads and changes: tokens by name, weight slots also by their bytes."""

    reads: frozenset[Token]
    changes: frozenset[Token]
    slab_reads: frozenset[Bytes]
    slab_changes: frozenset[Bytes]

    def conflicts(self, other: Touch) -> bool:
        return bool(
            self.changes & (other.changes | other.reads)
            or self.reads & other.changes
            or _overlap(self.slab_changes, other.slab_changes | other.slab_reads)
            or _overlap(self.slab_reads, other.slab_changes)
        )


def _overlap(some: frozenset[Bytes], others: frozenset[Bytes]) -> bool:
    return any(a < d and c < b for a, b in some for c, d in others)


def touches(ops: tuple[Op, ...]) -> list[Touch]:
    """Accesses in program order; a use of a weight touches the bytes of its latest prefetch."""
    slots: dict[int, Bytes] = {}
    found = []
    for op in ops:
        changes: frozenset[Bytes] = frozenset()
        if op.kind == "prefetch":
            slots[op.group] = (op.offset, op.offset + op.nbytes)
            changes = frozenset([slots[op.group]])
        if op.kind == "all_gather":
            changes = frozenset([slots[op.group]])
        reads = frozenset(slots[t[1]] for t in op.reads if t[0] == "w" and t[1] in slots)
        changed = frozenset([*op.writes, *op.donates, *op.frees])
        found.append(Touch(frozenset(op.reads), changed, reads, changes))
    return found


def takes_memory(op: Op) -> bool:
    """Whether an operation takes device memory outside the stream that gives it back."""
    return op.stream != "compute" and any(t.on_device for t in op.writes)


def happens_before(ops: tuple[Op, ...]) -> nx.DiGraph:
    """Edges between positions: program order on each stream, and from records to their waits."""
    graph: nx.DiGraph = nx.DiGraph()
    graph.add_nodes_from(range(len(ops)))
    last: dict[str, int] = {}
    record: dict[Event, int] = {}
    for index, op in enumerate(ops):
        if op.stream in last:
            graph.add_edge(last[op.stream], index)
        graph.add_edges_from((record[e], index) for e in op.waits if e in record)
        last[op.stream] = record[op.event] = index
    return graph


def unordered(step: Step) -> list[tuple[int, int]]:
    """Pairs of conflicting accesses of a repeated step that some order swaps or overlaps."""
    ops = step.ops * REPEATS
    after = nx.transitive_closure_dag(happens_before(ops))
    pairs = _pairs(ops)
    return sorted(pair for pair in pairs if not after.has_edge(*pair))


def _pairs(ops: tuple[Op, ...]) -> set[tuple[int, int]]:
    by_token: dict[Token, list[tuple[int, bool]]] = defaultdict(list)
    in_slab: list[tuple[int, Touch]] = []
    pairs: set[tuple[int, int]] = set()
    compute = -1
    for index, (op, touch) in enumerate(zip(ops, touches(ops), strict=True)):
        for token in touch.reads | touch.changes:
            by_token[token].append((index, token in touch.changes))
        if touch.slab_reads or touch.slab_changes:
            in_slab.append((index, touch))
        if takes_memory(op) and compute >= 0:
            pairs.add((compute, index))
        compute = index if op.stream == "compute" else compute
    for uses in by_token.values():
        pairs |= {(i, j) for (i, a), (j, b) in combinations(uses, 2) if a or b}
    pairs |= {(i, j) for (i, a), (j, b) in combinations(in_slab, 2) if a.conflicts(b)}
    return pairs


class UnsafeError(AssertionError):
    """An order was found in which an operation sees what it should not."""


def execute(step: Step, seed: int) -> int:
    """Run the repeated step in a random order that streams and waits allow; returns peak bytes.

    An operation takes time: it starts, others may start and end, then it ends. Raises
    :class:`UnsafeError` where it overlaps with a conflicting one, or sees other symbols than in a run
    of one operation at a time.
    """
    expected = in_order(step)
    run = _Run(step)
    random = Random(seed)
    while choices := list(run.possible()):
        index, ending = random.choice(choices)
        run.end(index) if ending else run.start(index)
    if len(run.ended) < len(run.ops):
        raise UnsafeError("a deadlock: no operation can start")
    for index, op in enumerate(run.ops):
        if run.saw[index] != expected.saw[index]:
            raise UnsafeError(f"{op.event} sees {run.saw[index]}, not {expected.saw[index]}")
    return run.memory.highest


def in_order(step: Step) -> _Run:
    """The repeated step, one operation at a time."""
    run = _Run(step)
    for index in range(len(run.ops)):
        run.start(index)
        run.end(index)
    return run


def sees_garbage(step: Step) -> bool:
    """Whether an operation, run in program order, uses weights that are not in their slot."""
    seen = (s for saw in in_order(step).saw.values() for s in saw)
    return any(s in ("overwritten", "evicted") for s in seen)


@dataclass
class _Memory:
    """Symbols in places, device tokens alive, and workspace of the operation that is running."""

    content: dict[Token, object] = field(default_factory=dict)
    slab: dict[int, tuple[Bytes, object]] = field(default_factory=dict)
    alive: dict[Token, int] = field(default_factory=dict)
    workspace: int = 0
    highest: int = 0

    def measure(self) -> None:
        self.highest = max(self.highest, self.workspace + sum(self.alive.values()))


class _Run:
    def __init__(self, step: Step) -> None:
        self.step = step
        self.ops = step.ops * REPEATS
        self.touches = touches(self.ops)
        self.memory = _Memory(highest=step.slab_bytes + step.constant_bytes)
        self.memory.alive["slab",] = self.memory.highest
        self.saw: dict[int, tuple[object, ...]] = {}
        self.running: set[int] = set()
        self.ended: set[int] = set()
        self.needs: list[list[int]] = []
        self.queues: dict[Stream, list[int]] = {s: [] for s in STREAMS}
        record: dict[Event, int] = {}
        for index, op in enumerate(self.ops):
            self.needs.append([record[e] for e in op.waits if e in record])
            record[op.event] = index
            self.queues[op.stream].append(index)
        self.next = dict.fromkeys(STREAMS, 0)

    def possible(self) -> Iterator[tuple[int, bool]]:
        """Operations that may end, and the next of each idle stream whose waits are over."""
        yield from ((index, True) for index in sorted(self.running))
        for stream, queue in self.queues.items():
            position = self.next[stream]
            if position == len(queue) or (position and queue[position - 1] not in self.ended):
                continue
            if all(n in self.ended for n in self.needs[queue[position]]):
                yield queue[position], False

    def start(self, index: int) -> None:
        op = self.ops[index]
        for other in self.running:
            if self.touches[other].conflicts(self.touches[index]):
                raise UnsafeError(f"{op.event} overlaps with {self.ops[other].event}")
        self.running.add(index)
        self.next[op.stream] += 1
        self.saw[index] = tuple(self._look(t) for t in op.reads)
        memory, size = self.memory, self.step.token_bytes
        before = sum(memory.alive.values())
        written = [t for t in op.writes if t.on_device]
        merged = max((size[t] for t in written if t in memory.alive), default=0)
        inside = before + max(op.peak_bytes, op.end_bytes + merged if merged else 0)
        for token in op.donates:
            if memory.alive.pop(token, None) is None:
                raise UnsafeError(f"{op.event} consumes {token}, which is not alive")
        memory.alive |= {t: size[t] for t in written}
        if op.stream == "compute":
            memory.workspace = max(0, inside - sum(memory.alive.values()))
        memory.measure()

    def _look(self, token: Token) -> object:
        if token[0] == "w":
            return self.memory.slab.get(token[1], ((0, 0), "evicted"))[1]
        return self.memory.content.get(token, "nothing")

    def end(self, index: int) -> None:
        op, memory = self.ops[index], self.memory
        self.running.remove(index)
        self.ended.add(index)
        symbol = (op.event, index // len(self.step.ops))
        for token in op.writes:
            sums = token[0] in ("hgrad", "dgrad", "g") and token in memory.content
            memory.content[token] = (memory.content[token], symbol) if sums else symbol
        if op.kind == "adam":
            memory.content.pop(op.reads[0], None)
        elif op.kind == "prefetch":
            place = (op.offset, op.offset + op.nbytes)
            for group, (other, _) in list(memory.slab.items()):
                if _overlap(frozenset([place]), frozenset([other])):
                    memory.slab[group] = (other, "overwritten")
            memory.slab[op.group] = (place, self.saw[index])
        elif op.kind == "all_gather" and op.group in memory.slab:
            place, seen = memory.slab[op.group]
            memory.slab[op.group] = (place, seen if seen == "overwritten" else ("whole", seen))
        elif op.kind == "evict":
            memory.slab.pop(op.group, None)
        if op.stream == "compute":
            memory.workspace = 0
        for token in (*op.donates, *op.frees):
            memory.alive.pop(token, None)
            memory.content.pop(token, None)
