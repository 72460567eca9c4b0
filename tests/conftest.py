"""Random problems are the same in every run; ``--hypothesis-profile=explore`` looks for new ones."""

import os
import tempfile

from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

_COMMON = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("repeatable", _COMMON, derandomize=True)
settings.register_profile("explore", _COMMON)
settings.load_profile("repeatable")
# It draws the constants of imported modules too, which are others after other tests in the same process.
providers._get_local_constants = lambda: providers._local_constants

# Plans and kernels of this run alone: those that a user's own runs left decide nothing here.
_CACHE = tempfile.TemporaryDirectory(prefix="megacompile-tests-", ignore_cleanup_errors=True)
os.environ["XDG_CACHE_HOME"] = _CACHE.name
