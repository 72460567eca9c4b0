"""Write the plain step: loads of the batch, forwards and backwards, in the plan's loop order.

A forward alone is followed by copies of those of its outputs that are results of the step. So is one whose
loss is computed outside; gradients by the results then come before the backwards that read them.
"""

from __future__ import annotations

from megacompile.schedule.op_table import (
    Buffers,
    Kind,
    Master,
    Result,
    Saved,
    Token,
    Value,
    ValueGrad,
    WeightGrad,
)
from megacompile.schedule.plan import Mode, Plan
from megacompile.schedule.step import Op, Step, compute_op
from megacompile.schedule.workload import CheckpointPolicy, ValueWork, Workload


def compute_order(step: Step, *, work: Workload, plan: Plan, mode: Mode) -> Step:
    """Order the compute operations: depth first or breadth first over micro-batches."""
    if mode.kind == "update":
        return step
    builder = _Order(work, plan, mode)
    micros = range(mode.micro_batches)
    blocks = range(len(work.blocks))
    if plan.order == "depth":
        for m in micros:
            builder.load(m)
            for b in blocks:
                builder.forward(b, m)
            for b in reversed(blocks):
                builder.backward(b, m)
    else:
        for m in micros:
            builder.load(m)
        for b in blocks:
            for m in micros:
                builder.forward(b, m)
        for b in reversed(blocks):
            for m in micros:
                builder.backward(b, m)
    return step.with_(ops=tuple(builder.ops), token_bytes=builder.token_bytes)


def known_losses(step: Step, work: Workload) -> list[int]:
    """Return the operation behind which each micro-batch's loss is known: a forward, or the first gradient
    from a loss outside of the program."""
    if work.outside:
        first: dict[int, int] = {}
        for index, op in enumerate(step.ops):
            if op.kind == "load_grad":
                first.setdefault(op.micro, index)
        return sorted(first.values())
    return [
        index
        for index, op in enumerate(step.ops)
        if op.kind == "forward" and any(isinstance(t, Value) and t.value == work.loss for t in op.writes)
    ]


class _Order:
    def __init__(self, work: Workload, plan: Plan, mode: Mode) -> None:
        self.work = work
        self.plan = plan
        self.mode = mode
        self.ops: list[Op] = []
        self.token_bytes: dict[Token, int] = {}

    def _policy(self, b: int) -> CheckpointPolicy:
        name = "none" if self.mode.kind == "evaluate" else self.plan.blocks[b].checkpoint
        return self.work.blocks[b].policy(name)

    def _take(self, token: Token, nbytes: int) -> Token:
        self.token_bytes[token] = nbytes
        return token

    @property
    def _gives_results(self) -> bool:
        return self.work.outside or self.mode.kind == "evaluate"

    def _load_grad(self, v: int, m: int) -> Op:
        nbytes, reads = self.work.values[v].nbytes, tuple(Result(r, m) for r in self.work.results)
        assert ValueGrad(v, m) not in self.token_bytes, "no block reads a result, so none gives it a gradient"
        given = self._take(ValueGrad(v, m), nbytes)
        return Op("load_grad", "compute", micro=m, reads=reads, writes=(given,), nbytes=nbytes)

    def load(self, m: int) -> None:
        for v, value in enumerate(self.work.values):
            if value.batch:
                token = self._take(Value(v, m), value.nbytes)
                table = tuple(Master(g) for g in value.rows)
                kind: Kind = "gather" if table else "load"
                copied = 2 * value.nbytes if table else 0  # rows are read, and written side by side
                self.ops.append(
                    Op(kind, "compute", micro=m, reads=table, writes=(token,), nbytes=value.nbytes,
                       moved_bytes=copied)
                )  # fmt: skip

    def forward(self, b: int, m: int) -> None:
        block, policy = self.work.blocks[b], self._policy(b)
        outputs = [self._take(Value(v, m), self.work.values[v].nbytes) for v in block.outputs]
        keeps = policy.recompute is None and policy.saved_bytes and self.mode.kind != "evaluate"
        if keeps:
            outputs.append(self._take(Saved(b, m), policy.saved_bytes))
        op = compute_op("forward", b, m, policy, policy.forward, (), tuple(outputs))
        changed = tuple(Buffers(n) for n, blocks in enumerate(self.work.changes) if b in blocks)
        if changed:
            op = op.with_(reads=op.reads + changed, writes=op.writes + changed)
        seeds = self.work.loss in block.tangents and not self._gives_results
        if seeds:  # the gradient of the loss itself, where the backward starts
            nbytes = self.work.values[self.work.loss].nbytes
            seed = self._take(ValueGrad(self.work.loss, m), nbytes)
            peak = max(op.peak_bytes, op.end_bytes + nbytes)  # it is made when the block has returned
            op = op.with_(writes=(*op.writes, seed), peak_bytes=peak)
        self.ops.append(op)
        for v in block.outputs if self._gives_results else ():
            if v in self.work.results:
                given, nbytes = (Value(v, m),), self.work.values[v].nbytes
                copied = (Result(v, m),)
                self.ops.append(
                    Op("copy_result", "compute", micro=m, reads=given, writes=copied, nbytes=nbytes)
                )

    def backward(self, b: int, m: int) -> None:
        block, policy, values = self.work.blocks[b], self._policy(b), self.work.values
        if self.mode.kind == "evaluate" or policy.backward is None:
            return
        if self.work.outside:
            self.ops += [self._load_grad(v, m) for v in block.tangents if v in self.work.results]
        given = [v for v in block.tangents if ValueGrad(v, m) in self.token_bytes]
        missing = sum(values[v].nbytes for v in block.tangents if v not in given)
        kept = policy.saved_bytes or policy.recompute is not None
        saved: tuple[Token, ...] = (Saved(b, m),) if kept else ()
        reads = tuple(ValueGrad(v, m) for v in given) + saved
        sums = [v for v in block.grad_values if values[v].sum_bytes]
        begun = [v for v in sums if ValueGrad(v, m) not in self.token_bytes]
        writes = tuple(
            [self._take(ValueGrad(v, m), values[v].sum_bytes or values[v].nbytes) for v in block.grad_values]
            + [self._take(WeightGrad(g, b, m), nbytes) for g, nbytes in block.grad_groups]
        )
        op = compute_op("backward", b, m, policy, policy.backward, reads, writes)
        op = op.with_(reads=op.reads + tuple(ValueGrad(v, m) for v in sums if v not in begun))
        self.ops.append(_around_sums(op, [values[v] for v in given], [values[v] for v in begun], missing))


def _around_sums(op: Op, given: list[ValueWork], begun: list[ValueWork], missing_bytes: int) -> Op:
    """A backward with what sums in FP32 take around it: those that it is ``given`` are cast before it runs,
    beside zeros for ``missing_bytes`` of others; those ``begun`` are cast as it returns.
    """
    cast = [value for value in given if value.sum_bytes]
    less = sum(value.sum_bytes - value.nbytes for value in cast) - missing_bytes
    more = sum(value.sum_bytes - value.nbytes for value in begun)
    end = op.end_bytes - less
    casting = max((value.nbytes for value in cast), default=-missing_bytes) + missing_bytes
    returned = end + more + max((value.nbytes for value in begun), default=0)
    return op.with_(peak_bytes=max(op.peak_bytes - less, casting, returned), end_bytes=end + more)
