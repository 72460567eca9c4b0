"""Scripts in processes of their own, each a fork of one that has imported everything and compiled a program.

In: a script's text and its arguments. Out: its process, and what that prints. It ends as one that Python
started for the script: its threads are awaited, its interpreter is finalised, its exit code is told.
"""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
import subprocess
import sys
import traceback
import types
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from typing import NoReturn, TextIO

context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(
    ["torch", "torch.distributed", "transformers", "transformers.models.llama.modeling_llama",
     "transformers.models.gpt2.modeling_gpt2", "megacompile", "tests.support.models", "tests.support.warm"]
)  # fmt: skip


class Script:
    """A script that runs; ``output`` and ``errors`` are what it prints, until it ends."""

    def __init__(self, code: str, *arguments: object, environment: Mapping[str, str] | None = None) -> None:
        pipes = [context.Pipe(duplex=False) for _ in range(2)]
        given = (code, [str(a) for a in arguments], dict(environment or {}), *(end for _, end in pipes))
        self.process: ForkServerProcess = context.Process(target=_run, args=given)
        self.process.start()
        self.output, self.errors = (_text(reader) for reader, _ in pipes)
        for _, writer in pipes:
            writer.close()

    def finish(self) -> subprocess.CompletedProcess[str]:
        """Its exit code, or minus the signal that ended it, and what it has printed."""
        with self.output, self.errors, ThreadPoolExecutor(2) as pool:
            printed = list(pool.map(lambda stream: stream.read(), (self.output, self.errors)))
        self.process.join()
        code = self.process.exitcode
        assert code is not None
        return subprocess.CompletedProcess([], code, *printed)


def run_script(
    code: str, *arguments: object, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a script to its end."""
    return Script(code, *arguments, environment=environment).finish()


def output_of(code: str, *arguments: object) -> str:
    """What a script prints that ends well."""
    done = run_script(code, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _text(reader: Connection) -> TextIO:
    stream = os.fdopen(os.dup(reader.fileno()))
    reader.close()
    return stream


def _run(
    code: str, arguments: list[str], environment: Mapping[str, str], output: Connection, errors: Connection
) -> NoReturn:
    for end, number in ((output, 1), (errors, 2)):
        os.dup2(end.fileno(), number)
        end.close()
    os.environ |= environment
    gc.freeze()  # what the server has imported: to free that at the end took most of a short script
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    status = 0
    try:
        exec(compile(code, "<script>", "exec"), vars(main))
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException as error:
        sys.last_value = error  # as whoever prints it last sets this
        traceback.print_exc()
        status = 1
    ctypes.pythonapi.Py_Exit(status)
    raise AssertionError("the interpreter has ended")
