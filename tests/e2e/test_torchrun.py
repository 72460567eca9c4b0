"""``torchrun`` itself: a rank is killed, both start again, and go on from the last checkpoint."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.support.ranks import saved

STEPS, KILLED = 5, 3  # the last step that is saved before rank 1 is killed
SCRIPT = """
import os, signal, sys
from pathlib import Path
import torch, megacompile
from tests.support.models import batch_for, build

folder, steps, killed, alone = Path(sys.argv[1]), *map(int, sys.argv[2:5])
model = build("plain", depth=1)
program = megacompile.compile(model, 1, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
                              compute_dtype=torch.float32, device="cpu")
rank, size = (0, 1) if alone else (torch.distributed.get_rank(), 2)
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
program.prepare(batch_for("plain"))
begin = 0
if (folder / "state").exists():
    program.load(folder / "state")
    begin = killed
(folder / f"rank-{rank}-attempt-{attempt}").write_text(str(begin))
for step in range(begin, steps):
    if rank == 1 and attempt == 0 and step == killed:
        os.kill(os.getpid(), signal.SIGKILL)
    mine = [batch_for("plain", 10 * step + r) for r in (range(2) if alone else [rank])]
    program.train_step(mine)
    if step + 1 == killed:
        program.save(folder / "state")
program.save(folder / "state")
"""


def run(folder: Path, command: list[str], alone: bool) -> None:
    folder.mkdir()
    script = folder / "train.py"
    script.write_text(SCRIPT)
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "GLOO_SOCKET_IFNAME": "lo"}
    arguments = [str(script), str(folder), str(STEPS), str(KILLED), str(int(alone))]
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_restart_goes_on_from_the_last_checkpoint_bitwise(tmp_path: Path) -> None:
    """Two ranks, one of them killed and both started again, end where one process does."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    run(tmp_path / "ranks", [*torchrun, "--max-restarts", "1"], alone=False)
    run(tmp_path / "one", [sys.executable], alone=True)
    begun = {file.name: file.read_text() for file in (tmp_path / "ranks").glob("rank-*")}
    assert begun == {f"rank-{r}-attempt-{a}": str(KILLED * a) for r in range(2) for a in range(2)}
    ranks, one = saved(tmp_path / "ranks" / "state"), saved(tmp_path / "one" / "state")
    assert ranks.keys() == one.keys() and one
    assert [name for name in one if not torch.equal(ranks[name], one[name])] == []
