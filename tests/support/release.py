"""Try a built wheel as a stranger would: installed outside of the checkout, it trains, resumes and plans.

python -m tests.support.release dist/*.whl                      # in a new environment, from the index
python -m tests.support.release dist/*.whl --beside PYTHON      # with the packages of another environment
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
EXTRAS = "triton,transformers,plots"

TRAINS = """
import sys, torch, megacompile
from transformers import LlamaConfig, LlamaForCausalLM

assert "site-packages" in megacompile.__file__, megacompile.__file__
first, checkpoint = int(sys.argv[1]), sys.argv[2]
torch.manual_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128,
                                     num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
program = megacompile.compile(model, "8MB", optimizer=optimizer, max_grad_norm=1.0, device="cpu")
batches = torch.randint(0, 256, (6, 2, 32))
if first:
    program.prepare({"input_ids": batches[0], "labels": batches[0]})
    program.load(checkpoint)
for number in range(first, 6):
    ids = batches[number]
    print(f"{number} {float(program.train_step({'input_ids': ids, 'labels': ids}).loss)!r}", flush=True)
    if number == 2:
        program.save(checkpoint)
program.close()
"""


def run(*command: str | Path, where: Path) -> str:
    """Run a command outside of the checkout, whose sources are not on its path, and return what it prints."""
    given = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=where, env=given, text=True, stdout=subprocess.PIPE, check=True)
    return done.stdout


def installed(wheel: Path, folder: Path, beside: Path | None) -> Path:
    """A new environment in ``folder`` that holds the wheel: its interpreter."""
    packages = None if beside is None else run(beside, "-c", _PACKAGES, where=folder).strip()
    run(beside or sys.executable, "-m", "venv", folder / "venv", where=folder)
    python = folder / "venv" / "bin" / "python"
    pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    if packages is None:
        constraints = ROOT / "constraints.txt"
        run(*pip, "--constraint", constraints, f"{wheel}[{EXTRAS}]", where=folder)
    else:
        own = run(python, "-c", _PACKAGES, where=folder).strip()
        Path(own, "beside.pth").write_text(f"{packages}\n")
        run(*pip, "--no-deps", wheel, where=folder)
    return python


_PACKAGES = "import sysconfig; print(sysconfig.get_path('purelib'))"
_VERSIONS = (
    "import torch, transformers as t; print('torch', torch.__version__, 'transformers', t.__version__)"
)


def main() -> None:
    """Try one wheel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--beside", type=Path, help="an interpreter whose environment has the other packages")
    options = parser.parse_args()
    wheel = options.wheel.resolve()
    compiled = [
        name for name in zipfile.ZipFile(wheel).namelist() if name.startswith(("tests/", "benchmarks/"))
    ]
    assert not compiled, f"not for users: {compiled[:3]}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        python = installed(wheel, folder, options.beside and options.beside.absolute())
        (folder / "train.py").write_text(TRAINS)
        whole = run(python, "train.py", "0", "saved", where=folder).splitlines()
        resumed = run(python, "train.py", "3", "saved", where=folder).splitlines()
        assert len(whole) == 6 and resumed == whole[3:], (whole, resumed)
        command = python.with_name("megacompile")
        for arguments in (
            "--help",
            "doctor",
            "machines",
            "plan --model qwen2.5-0.5b --machine h100-pcie --seq 512",
        ):
            assert run(command, *arguments.split(), where=folder), arguments
        versions = run(python, "-c", _VERSIONS, where=folder).strip()
        print(f"{wheel.name} with {versions}: trains, goes on from a checkpoint bit for bit, plans.")


if __name__ == "__main__":
    main()
