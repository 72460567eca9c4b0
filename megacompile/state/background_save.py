"""Write checkpoints while training goes on, each by a thread of its own.

In:  what :func:`~megacompile.state.checkpoint.save_checkpoint` takes, the state as a snapshot. Out: the
same folder, bit for bit, as it would have written at that moment.

The thread waits for nothing that trains, but of several ranks for the others' threads, and ends with the
process at the latest when its folder is whole. It takes a small share of the machine until somebody waits.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from megacompile.distributed.world import World
from megacompile.state.checkpoint import checked_folder, save_checkpoint
from megacompile.state.checkpoint_manifest import RunProgress
from megacompile.state.masters import HostState
from megacompile.state.snapshot import Snapshot
from megacompile.state.write_throttle import paced

Then = Callable[[BaseException | None], None]


class BackgroundSave:
    """One checkpoint; :meth:`start` it before anything changes.

    ``then`` is called in the thread at its end, with what kept the checkpoint from being written, if anything
    did; that is raised here where there is no ``then``.
    """

    def __init__(
        self,
        folder: Path,
        snapshot: Snapshot,
        buffers: Mapping[str, Tensor],
        progress: RunProgress,
        world: World,
        then: Then | None = None,
    ) -> None:
        self._snapshot = snapshot
        self._failures: list[BaseException] = []
        work = (checked_folder(folder), {n: v.clone() for n, v in buffers.items()}, progress, world)
        arguments = (snapshot, *work, then or _raise, self._failures)
        self._thread = threading.Thread(target=_write_snapshot, args=arguments, name="megacompile-save")
        weakref.finalize(self, _tell, self._failures)

    def start(self, state: HostState) -> None:
        """Start the thread; from now on the state behind the snapshot may change."""
        state.guard(self._snapshot)
        try:
            self._thread.start()
        except BaseException:  # Ctrl-C may come at any line
            self._snapshot.cancel()
            raise

    def finish(self) -> None:
        """Return when the checkpoint is on disk, or raise why it is not."""
        if self._thread.ident is not None:  # else it was interrupted before it began
            self._snapshot.hurry()
            self._thread.join()
        self.raise_failure()

    def raise_failure(self) -> None:
        """Raise, once, what kept the checkpoint from being written, if that is known."""
        if self._failures:
            raise self._failures.pop()


def _write_snapshot(
    snapshot: Snapshot,
    folder: Path,
    buffers: Mapping[str, Tensor],
    progress: RunProgress,
    world: World,
    then: Then,
    failures: list[BaseException],
) -> None:
    if not snapshot.begin():
        return
    with paced(snapshot.hurried):
        found: BaseException | None = None
        try:
            with world.together():
                save_checkpoint(folder, snapshot, buffers, progress, world)
        except BaseException as error:
            found = error
        finally:
            snapshot.end()
        try:
            then(found)
        except BaseException as error:  # for whoever calls the program next
            failures.append(error)


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _tell(failures: list[BaseException]) -> None:
    """Nobody called the program again."""
    for error in failures:
        print(f"megacompile: {error}", file=sys.stderr)
