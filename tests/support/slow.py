"""Marks cases that repeat others as slow: ``@pytest.mark.slow_cases("regular expression")`` beside a test.

The expression is matched with the text in brackets behind the test's name, from its first character. What
``slow`` and this leave to ``make test`` tries every feature at least once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest


def mark_slow_cases(items: Sequence[pytest.Item]) -> set[str]:
    """Mark the cases as ``slow``. Return the tests whose expressions match none of their cases."""
    unmatched, matched = set(), set()
    for item in items:
        for mark in item.iter_markers("slow_cases"):
            test, _, case = item.nodeid.partition("[")
            (pattern,) = mark.args
            if re.match(pattern, case):
                item.add_marker(pytest.mark.slow)
                matched.add(test)
            else:
                unmatched.add(test)
    return unmatched - matched
