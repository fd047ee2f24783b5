"""The chief's machine has a row for whatever can happen, and a reader of a worker's death passes few functions."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from shardline_chief.rules import events
from shardline_chief.rules.events import ANY, PHASES, TAKEOVER, Stage
from shardline_chief.rules.machine import Flows, rows
from shardline_chief.rules.state.settings import ChiefSettings
from shardline_chief.rules.state.state import State
from tests.support.chief_cluster import running

ROOT = Path(__file__).parents[2]
MOST_ROOMS = 8


@pytest.fixture
def flows() -> Flows:
    settings = ChiefSettings(term=1, chief_uuid="u", chief_address="a:1", ps=("b:1",), workers=1)
    return Flows(State(settings, 0.0, resume=None))


def test_every_event_has_its_rows(flows: Flows) -> None:
    assert set(rows(flows)) == set(events.Event.__subclasses__())
    assert all(stages <= ANY for found in rows(flows).values() for stages, _ in found)


def test_every_stage_has_a_phase_but_those_in_which_tasks_keep_theirs() -> None:
    assert set(PHASES) == set(Stage) - TAKEOVER


def test_nothing_follows_from_a_wish_to_end_or_a_found_checkpoint_after_the_end(flows: Flows) -> None:
    for event in (events.EndAsked, events.CheckpointFound, events.Arrived, events.Progressed):
        assert all(Stage.ENDED not in stages for stages, _ in rows(flows)[event])


# A worker is silent


def walk() -> list[tuple[str, str]]:
    """(file, function) as docs/concepts.md has them."""
    text = (ROOT / "docs" / "concepts.md").read_text()
    found = re.search(r"<!-- walk: worker silent -->\n(.*?)<!-- end of walk -->", text, re.DOTALL)
    assert found is not None
    return re.findall(r"^\d+\. `([\w/.]+\.py):([\w.]+)`", found.group(1), re.MULTILINE)


def functions_of(path: Path) -> set[str]:
    names = set()
    for node in ast.parse(path.read_text()).body:
        inside = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        names |= {f"{prefix}{item.name}" for item in inside if isinstance(item, ast.FunctionDef)}
    return names


def test_a_reader_of_a_workers_silence_passes_few_functions_and_none_twice() -> None:
    rooms = walk()
    assert 0 < len(rooms) <= MOST_ROOMS
    assert len(set(rooms)) == len(rooms)
    for file, function in rooms:
        assert function in functions_of(ROOT / file), f"{file} has no {function}"


def test_a_workers_silence_takes_the_way_that_the_docs_describe() -> None:
    cluster = running()
    passed: list[str] = []
    rooms = [function for file, function in walk() if "/io/" not in file]

    def called(frame: FrameType, kind: str, argument: Any) -> None:
        if kind != "call" or frame.f_code.co_qualname not in rooms:
            return
        event = frame.f_locals.get("event")
        if event is None or isinstance(event, (events.TrainerLost, events.Fenced)):
            passed.append(frame.f_code.co_qualname)

    before = len(cluster.said)
    while not any(said.kind == "life" and "replica" in said.sentence for said in cluster.said[before:]):
        passed.clear()
        sys.setprofile(called)
        try:
            cluster.tick(1.0, silent=("worker/1",))
        finally:
            sys.setprofile(None)
    first = [name for number, name in enumerate(passed) if name not in passed[:number]]
    assert first == rooms
