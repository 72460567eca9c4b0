"""The versions of other packages that the tests run with, and a warning for those above them.

megacompile works inside ``torch.export``, AOTAutograd and the trainers, which change between releases. The
oldest and the newest version of each are those of ``make simulated`` and ``make test-newest``.
"""

from __future__ import annotations

import functools
import re
import sys

from megacompile.user_warning import warn_user

TESTED = {
    "torch": ("2.11", "2.15"),
    "triton": ("3.6", "3.9"),
    "transformers": ("5.17", "5.23"),
    "accelerate": ("1.15", "1.15"),
    "trl": ("1.16", "1.16"),
    "peft": ("0.21", "0.21"),
    "numpy": ("2.4", "2.5"),
}
"""The oldest and the newest release of each package that the tests run with."""


def describe_tested(name: str) -> str:
    """The range of a package, in words: "2.11 to 2.15"; "" where none is noted."""
    oldest, newest = TESTED.get(name, ("", ""))
    return newest if oldest == newest else f"{oldest} to {newest}"


def is_newer(name: str, version: str) -> bool:
    """Return whether a version of a package is above those that the tests run with."""
    return name in TESTED and _release(version) > _release(TESTED[name][1])


def warn_of_newer() -> None:
    """Warn, once in a process, of each package that is loaded and above the versions of the tests."""
    for name in TESTED:
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str) and is_newer(name, version):
            _warn(name, version)


@functools.cache  # so that it is said once
def _warn(name: str, version: str) -> None:
    warn_user(
        f"{name} {version} is newer than what megacompile is tested with ({describe_tested(name)}): if "
        f"something fails, try {name} {TESTED[name][1]}."
    )


def _release(version: str) -> tuple[int, int]:
    """The first two numbers of a version, which its releases are told apart by."""
    major, minor = [*re.findall(r"\d+", version), "0", "0"][:2]
    return int(major), int(minor)
