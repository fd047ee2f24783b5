"""The files that a gradient passes on its way to the servers and back, by a trace of real steps.

`make way` prints them: a script's loop, one worker, one server, synchronous, raw, over tcp.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from tests.support.services import Services
from tests.support.sources import ROOT

FOLDERS = {"shardline": "library", "worker": "worker", "services": "server"}
ASIDE = tuple(
    str(ROOT / name) for name in ("chief", "shardline/rpc/link.py", "shardline/observability/metrics_page.py")
)
"""The chief, heartbeats, and reads of metrics: on a busy machine each step meets one."""
WARM, TRACED = 3, 20
"""Steps before the trace, and steps of it. A file counts if every traced step enters it."""


@dataclass
class Way:
    """entered: for each file the files that call into it, in the order of their first call."""

    entered: dict[str, dict[str, None]] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        return list(self.entered)

    @property
    def again(self) -> int:
        """Number of ways into files, beyond the first into each."""
        return sum(len(callers) - 1 for callers in self.entered.values())


class Tracer:
    """Notes calls from one product file into another, in all threads."""

    def __init__(self) -> None:
        self.steps: list[dict[str, dict[str, None]]] = []
        self._names: dict[str, str | None] = {}

    def begin(self) -> None:
        self.steps.append(defaultdict(dict))

    def _name(self, filename: str) -> str | None:
        """The product's name of a source file; None for others, and for generated ones."""
        if filename not in self._names:
            path = Path(filename)
            inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in FOLDERS and "v1" not in path.parts
            self._names[filename] = str(path.relative_to(ROOT)) if inside else None
        return self._names[filename]

    def profile(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call" or not self.steps:
            return
        name = self._name(frame.f_code.co_filename)
        if name is None:
            return
        caller = frame.f_back
        while caller is not None and self._name(caller.f_code.co_filename) is None:
            caller = caller.f_back
        source = self._name(caller.f_code.co_filename) if caller is not None else None
        if source != name and not self._aside(frame):
            self.steps[-1][name].setdefault(source or "a thread", None)

    def _aside(self, frame: FrameType | None) -> bool:
        while frame is not None and not frame.f_code.co_filename.startswith(ASIDE):
            frame = frame.f_back
        return frame is not None

    def way(self) -> Way:
        first, *others = self.steps
        return Way({name: found for name, found in first.items() if all(name in other for other in others)})


def trace(folder: Path, lane: str = "tcp") -> Way:
    """Train a model of 12 MB for a few steps; the last are traced from backward() to the optimizer's end."""
    tracer = Tracer()
    threading.setprofile(tracer.profile)
    try:
        services = Services(folder, ps=1, workers=1, lane=lane)
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("SHARDLINE_LANE", lane)
            session = services.connect()
        model = nn.Sequential(nn.Linear(1024, 1536), nn.ReLU(), nn.Linear(1536, 1024))
        optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.01), overlap=False)
        for step in range(WARM + TRACED):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 1024)).square().mean()
            if step >= WARM:
                tracer.begin()
                sys.setprofile(tracer.profile)
            loss.backward()
            optimizer.step()
            sys.setprofile(None)
        session.close()
        services.end()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]  # as documented for sys.setprofile
    return tracer.way()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        way = trace(Path(folder))
    for name, callers in way.entered.items():
        print(f"{name}  <- {', '.join(callers)}")
    print(f"{len(way.files)} files, {way.again} more ways into them")


if __name__ == "__main__":
    main()
