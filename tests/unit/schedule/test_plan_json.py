"""Plan files: an exact round trip, and a clear refusal of everything else."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacompile.errors import MegacompileError
from megacompile.schedule.plan import PLAN_VERSION, BlockPlan, GroupPlan, Plan
from tests.support.problems import plans, workloads

PLAN = Plan(
    (BlockPlan("none"), BlockPlan("all", "host")), (GroupPlan("micro", 3, "nvme"),), "breadth", 0, 4, 3
)


@given(workloads(4).flatmap(plans))
def test_round_trip_is_exact(plan: Plan) -> None:
    text = plan.to_json()
    assert Plan.from_json(text) == plan
    assert Plan.from_json(text).to_json() == text


def test_files_are_plain_json_with_a_version() -> None:
    fields = json.loads(PLAN.to_json())
    assert fields["version"] == PLAN_VERSION
    assert fields["blocks"][1] == {"checkpoint": "all", "saved_on": "host", "reload": 1}
    assert fields["groups"] == [
        {"residency": "micro", "prefetch_depth": 3, "state": "nvme", "update": "immediate"}
    ]
    whole = (fields["order"], fields["grad_lag"], fields["ring"], fields["window"])
    assert whole == ("breadth", 0, 4, 3)


@given(st.integers(0, len(PLAN.to_json()) - 1))
def test_a_truncated_file_is_refused(length: int) -> None:
    with pytest.raises(MegacompileError, match="plan file"):
        Plan.from_json(PLAN.to_json()[:length])


@pytest.mark.parametrize("text", ["", "[]", "3", "null", '"plan"', "{}", '{"blocks": []}'])
def test_other_json_is_refused(text: str) -> None:
    with pytest.raises(MegacompileError, match=r"is no plan file|is no JSON"):
        Plan.from_json(text)


@pytest.mark.parametrize("version", [PLAN_VERSION + 1, 0, None, str(PLAN_VERSION)])
def test_another_version_is_refused(version: Any) -> None:
    fields = json.loads(PLAN.to_json()) | {"version": version}
    with pytest.raises(MegacompileError, match=f"has version {version}.*plan again"):
        Plan.from_json(json.dumps(fields))


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_what_is_no_number_is_refused(constant: str) -> None:
    text = PLAN.to_json().replace('"ring": 4', f'"ring": {constant}')
    with pytest.raises(MegacompileError, match=f"contains {constant}"):
        Plan.from_json(text)


@pytest.mark.parametrize(
    ("where", "name", "value"),
    [
        ("", "ring", 0),
        ("", "window", 0),
        ("", "ring", 2.0),
        ("", "ring", True),
        ("", "grad_lag", -1),
        ("", "grad_lag", "1"),
        ("", "order", "width"),
        ("", "order", None),
        ("groups[0].", "prefetch_depth", -1),
        ("groups[0].", "prefetch_depth", [2]),
        ("groups[0].", "residency", "forever"),
        ("groups[0].", "state", "tape"),
        ("blocks[1].", "saved_on", "disk"),
        ("blocks[1].", "checkpoint", 3),
        ("blocks[1].", "checkpoint", "\x1b[2J"),
        ("blocks[1].", "reload", 5),
        ("blocks[1].", "free_after", 0),
        ("blocks[1].", "free_after", 5),
    ],
)
def test_a_wrong_value_is_named(where: str, name: str, value: Any) -> None:
    fields = json.loads(PLAN.to_json())
    target = {"": fields, "groups[0].": fields["groups"][0], "blocks[1].": fields["blocks"][1]}
    target[where][name] = value
    with pytest.raises(MegacompileError) as caught:
        Plan.from_json(json.dumps(fields))
    assert f"The plan file.{where}{name} is {value!r}" in str(caught.value)


@pytest.mark.parametrize("change", ["missing", "unknown"])
@pytest.mark.parametrize("where", ["plan", "block", "group"])
def test_fields_must_be_exactly_those_of_a_plan(where: str, change: str) -> None:
    fields = json.loads(PLAN.to_json())
    target = {"plan": fields, "block": fields["blocks"][0], "group": fields["groups"][0]}[where]
    if change == "missing":
        del target[{"plan": "order", "block": "saved_on", "group": "prefetch_depth"}[where]]
    else:
        target["colour"] = "blue"
    with pytest.raises(MegacompileError, match="lacks" if change == "missing" else "has a field 'colour'"):
        Plan.from_json(json.dumps(fields))


@pytest.mark.parametrize("value", [None, {}, "blocks", [3], [[]]])
def test_lists_must_be_lists_of_objects(value: Any) -> None:
    fields = json.loads(PLAN.to_json()) | {"blocks": value}
    with pytest.raises(MegacompileError, match="blocks"):
        Plan.from_json(json.dumps(fields))
