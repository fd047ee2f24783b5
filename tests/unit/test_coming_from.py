"""docs/coming-from.md: each test that it names is there."""

from __future__ import annotations

import re
from collections import Counter

from tests.support.sources import ROOT

ROW = re.compile(r"^\| (?:.+ )?\| .+ \| (yes|no) \| `(test_\w+)` \|$")
DEFINED = re.compile(r"^def (test_\w+)\(", re.M)


def test_each_expectation_names_a_test_that_is_there_once() -> None:
    _, *rows = re.findall(
        r"^\|.*\|$", (ROOT / "docs/coming-from.md").read_text().replace("|---|---|---|---|\n", ""), re.M
    )
    found = [ROW.match(row) for row in rows]
    assert len(found) > 20 and all(found), rows[found.index(None)]
    there = Counter(
        name for path in ROOT.glob("tests/*/test_*.py") for name in DEFINED.findall(path.read_text(encoding="utf-8"))
    )
    named = [row[2] for row in found if row is not None]
    assert {name: there[name] for name in named if there[name] != 1} == {}
