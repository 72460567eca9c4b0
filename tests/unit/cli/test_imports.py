"""What only prints or writes a text answers without torch, which takes seconds to import."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import megacompile
from megacompile.cli.main import _COMMANDS

CODE = """
import contextlib, io, json, sys
from megacompile.cli.main import main
printed, codes = io.StringIO(), []
for arguments in json.loads(sys.argv[1]):
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            codes.append(main(arguments))
        except SystemExit as end:
            codes.append(end.code)
heavy = [name for name in ("torch", "transformers", "numpy", "matplotlib") if name in sys.modules]
print(json.dumps([codes, heavy]))
"""


def test_help_new_and_mistakes_import_no_torch(tmp_path: Path) -> None:
    helps = [[name, "--help"] for name in _COMMANDS]
    helps += [["--help"], ["bench", "nvme", "--help"], ["bench", "kernels", "--help"]]
    new = ["new", str(tmp_path / "train.yaml")]
    (tmp_path / "config.json").write_text('{"model_type": 1}')
    (tmp_path / "machine.json").write_text('{"version": 2, "machine": {"name": "a"}}')
    ask = ["plan", "--model", "llama-3.1-8b", "--machine", "h200"]
    wrong = [
        ["plan", "--model", "llama-3.1-8c", "--machine", "h200"],
        ["plan", "--model", str(tmp_path / "config.json"), "--machine", "h200"],
        ["plan", "--model", "llama-3.1-8b", "--machine", "h201"],
        ["plan", "--model", "llama-3.1-8b", "--machine", str(tmp_path / "machine.json")],
        [*ask, "--hbm-budget", "22QB"],
        [*ask, "--host-budget", "90%"],
        [*ask, "--frozen", "4bit"],
    ]
    lists = [["models"], ["machines"]]
    calls = [*helps, *lists, new, new, ["pln"], ["plan"], *wrong]
    command = [sys.executable, "-c", CODE, json.dumps(calls)]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100)
    codes, heavy = json.loads(done.stdout)
    assert heavy == []
    assert codes == [0] * len(helps + lists) + [0, 2, 2, 2] + [2] * len(wrong)


def test_the_package_offers_its_names_before_they_are_imported() -> None:
    assert set(megacompile.__all__) <= set(dir(megacompile))
    assert all(callable(getattr(megacompile, name)) for name in megacompile.__all__)
    assert not hasattr(megacompile, "no_such_name")
