"""A chief and servers as threads of this process, for a user's own loop; the sockets between them are real."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

import shardline
from shardline.client.api.session import Session
from shardline.cluster import ClusterSpec
from shardline.config import RoleConfig
from shardline.core.timeouts import Timeouts
from shardline.lanes import AUTO
from shardline_chief import service as chief_service
from shardline_ps import service as ps_service

T = TypeVar("T")
TIMEOUTS = Timeouts(total_s=20.0)
PATIENCE_S = 60.0


class Services:
    """A chief and parameter servers in threads, for a script's job."""

    def __init__(self, out: Path, *, ps: int, workers: int, resume: bool = False, lane: str = AUTO) -> None:
        self.out = out
        self._pool = ThreadPoolExecutor(max_workers=16)
        any_port = ("127.0.0.1:0",)
        spec = ClusterSpec({"chief": any_port, "ps": any_port * ps, "worker": any_port * workers})
        started = threading.Event()
        address: list[str] = []

        def ready(_ready_fd: int | None, found: str) -> None:
            address.append(found)
            started.set()

        chief = RoleConfig(role="chief", index=0, cluster=spec, out=out, resume=resume, timeouts=TIMEOUTS)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(chief_service, "tell_ready", ready)
            self.chief = self._pool.submit(chief_service.run, chief)
            assert started.wait(PATIENCE_S), self.chief
        self.spec = spec.with_address("chief/0", address[0])
        configs = [RoleConfig(role="ps", index=i, cluster=self.spec, timeouts=TIMEOUTS, lane=lane) for i in range(ps)]
        self.ps = [self._pool.submit(ps_service.run, config) for config in configs]

    def connect(self, index: int = 0, **settings: Any) -> Session:
        return shardline.connect(
            cluster=self.spec.to_json(), task=f"worker/{index}", timeout_s=TIMEOUTS.total_s, name="loop", **settings
        )

    def workers(self, *bodies: Callable[[], T]) -> list[T]:
        """Run the functions concurrently; returns their results."""
        futures = [self._pool.submit(body) for body in bodies]
        return [future.result(PATIENCE_S) for future in futures]

    def end(self, code: int = 0) -> dict[str, Any]:
        """Wait until all have ended by themselves, the servers with 0, the chief with `code`; returns the summary."""
        assert self.chief.result(PATIENCE_S) == code
        assert [server.result(PATIENCE_S) for server in self.ps] == [0] * len(self.ps)
        self._pool.shutdown(wait=True)
        found: dict[str, Any] = json.loads((self.out / "summary.json").read_text())
        return found


SEEDING = threading.Lock()
"""The random generator belongs to the process, which all workers share as threads."""


def make_model() -> nn.Module:
    with SEEDING:
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def batch(step: int, replica: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step * 10 + replica)
    return torch.randn(8, 6, generator=generator), torch.randint(3, (8,), generator=generator)


def backward(model: nn.Module, step: int) -> None:
    points, labels = batch(step)
    nn.functional.cross_entropy(model(points), labels).backward()  # type: ignore[no-untyped-call]
