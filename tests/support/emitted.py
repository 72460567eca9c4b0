"""Compare what two checkouts emit: sources, fusions, plans, schedules and losses of a set of small models.

    python -m tests.support.emitted ../other           # prints the files that differ, exit code 1
    python -m tests.support.emitted ../other --keep F --only llama

Small models are trained for two steps on the CPU, and planned for a GPU, whose prices, launches and chunk
loops no CPU has. Each side runs under its own ``.venv`` in its own checkout, where it writes nothing.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path

TRAINED = (
    "llama, right-padded", "gemma2, right-padded", "gpt_oss, left-padded", "mistral, packed", "qwen3",
    "qwen3_moe, experts without tokens", "qwen3_next", "mamba2", "gpt2", "LSTM, bidirectional, dropout",
    "nn.Transformer",
)  # fmt: skip
PLANNED = ("llama", "qwen3", "gpt2", "gpt_oss", "gemma2", "qwen3_next", "mamba2")
MACHINE, LENGTH = "h100-sxm", 40960


def write(folder: Path, only: str) -> None:
    """Write what the checkout in the working directory emits into ``folder``."""
    sys.path[0] = str(Path.cwd())
    import torch

    import megacompile
    from tests.support.zoo import cases

    torch.set_num_threads(1)
    known = cases()
    for name in (n for n in TRAINED if only in n):
        case, target = known[name], folder / "trained" / name.replace(", ", "-")
        model = case.build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        program = megacompile.compile(
            model, "1GB", optimizer=optimizer, device="cpu", kernels=case.kernels, dump=target, **case.options
        )
        losses = [float(program.train_step(case.batch(step)).loss) for step in range(2)]
        (target / "losses.txt").write_text("\n".join(map(float.hex, losses)) + "\n")
    for name in (n for n in PLANNED if only in n):
        plan(name, folder / "planned" / name)


def plan(name: str, target: Path) -> None:
    """Plan a small model of a type for a GPU, in long sequences, and write the dump and the answer."""
    from contextlib import redirect_stdout
    from io import StringIO

    from megacompile.cli.main import main
    from tests.support.shrink import shrink
    from tests.support.zoo import config_class_of

    target.mkdir(parents=True)
    config = shrink(config_class_of(name))
    config.architectures = None
    (target / "config.json").write_text(config.to_json_string())
    answer = StringIO()
    os.chdir(target)  # paths stand in what is written
    options = ("--model", "./config.json", "--machine", MACHINE, "--seq", str(LENGTH))
    with redirect_stdout(answer):
        main(["plan", *options, "--json", "--dump", "."])
    Path("answer.json").write_text(answer.getvalue())


def emitted(checkout: Path, folder: Path, only: str) -> dict[str, str]:
    """Return the hash of each file that a checkout emits, by its name."""
    command = [str(checkout / ".venv" / "bin" / "python"), __file__, "--write", str(folder), "--only", only]
    with tempfile.TemporaryDirectory() as cache:  # a plan that an earlier run kept says so
        environment = {"PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": cache}
        subprocess.run(command, cwd=checkout, env=os.environ | environment, check=True, timeout=3000)
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {str(f.relative_to(folder)): hashlib.sha256(f.read_bytes()).hexdigest() for f in files}


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("other", nargs="?", type=Path, help="the checkout to compare with")
    parser.add_argument("--keep", type=Path, help="a folder for what both emit")
    parser.add_argument("--only", default="", help="models whose name contains this text")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write(options.write, options.only)
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        sides = [
            emitted(checkout.resolve(), folder.resolve() / side, options.only)
            for checkout, side in ((options.other, "before"), (Path.cwd(), "after"))
        ]
    before, after = sides
    different = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    print(*different, f"{len(after)} files, {len(different)} differ", sep="\n")
    return bool(different)


if __name__ == "__main__":
    sys.exit(main())
