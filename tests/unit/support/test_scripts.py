"""Forks of the fork server have what it has imported."""

from __future__ import annotations

from tests.support.scripts import output_of


def test_a_script_need_not_import_what_the_fork_server_has() -> None:
    """Whatever else this process has imported: the server's list of modules is one of the process."""
    assert output_of("import sys; print('tests.support.warm' in sys.modules)") == "True\n"
