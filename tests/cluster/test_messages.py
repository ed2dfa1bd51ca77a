"""Values that the daemon and the agents of other hosts exchange."""

from __future__ import annotations

import json
from dataclasses import replace

from teimgr.cluster.messages import FleetFacts, NodeFacts, Versions, exit_from_dict, exit_to_dict
from teimgr.control.launch.process_handle import Exit, ExitReport
from teimgr.observability.logs import LogLines

VERSIONS = Versions(teimgr="0.1.0", ray="2.60.0", python="3.11.7", torch="2.13.0")


def test_versions_that_differ_are_named_with_both() -> None:
    other = replace(VERSIONS, teimgr="0.2.0", torch="2.14.0")

    assert other.differences(VERSIONS) == "teimgr 0.2.0 (here 0.1.0), torch 2.14.0 (here 2.13.0)"
    assert VERSIONS.differences(VERSIONS) == ""


def test_facts_and_exits_survive_json() -> None:
    facts = NodeFacts(
        name="a",
        versions=VERSIONS,
        labels={"zone": "a"},
        cores=2,
        memory_total_bytes=3,
        memory_free_bytes=1,
    )
    exit = Exit(-9, ExitReport(64, "broken", permanent=True), "the last", LogLines(("first", "the last")))

    fleet = FleetFacts(removed={"b": 1.0}, services=(("a", "10.0.0.1:1"),), models_from="hub-only")

    assert NodeFacts.from_dict(json.loads(json.dumps(facts.to_dict()))) == facts
    assert FleetFacts.from_dict(json.loads(json.dumps(fleet.to_dict()))) == fleet
    assert FleetFacts.from_dict(json.loads(json.dumps(FleetFacts().to_dict()))) == FleetFacts()
    assert exit_from_dict(json.loads(json.dumps(exit_to_dict(exit)))) == exit
