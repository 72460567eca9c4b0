"""The table of seeded faults is of this tree."""

from __future__ import annotations

import re

from tests.support.seeded_faults import FAULTS, ROOT


def test_each_fault_has_its_place_and_its_tests() -> None:
    for number, fault in enumerate(FAULTS):
        assert (ROOT / fault.file).read_text().count(fault.old) == 1, (number, fault.file, fault.old)
        assert fault.new != fault.old
        for test in fault.tests:
            file, _, name = test.partition("::")
            text = (ROOT / file).read_text()
            assert re.search(rf"^def {re.escape(name.partition('[')[0])}", text, re.MULTILINE), (number, test)
