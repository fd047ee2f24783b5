"""A chief in a thread of this process, over real gRPC, without parameter servers."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from shardline.cluster import ClusterSpec
from shardline.config import RoleConfig, Timeouts
from shardline.host.process import Termination
from shardline.rpc.client import ChiefClient
from shardline.rpc.joining import Applicant
from shardline.rpc.link import ChiefLink
from shardline.security import PLAIN, Security
from shardline_chief import service
from shardline_chief.io import control
from shardline_chief.io.journal import Journal
from tests.support.builders import make_job_spec

TIMEOUTS = Timeouts(total_s=6.0)


class Chief:
    """A chief in a thread of this process."""

    def __init__(self, out: Path, security: Security = PLAIN) -> None:
        self.security = security
        cluster = ClusterSpec({"chief": ("127.0.0.1:0",), "ps": ("127.0.0.1:0",), "worker": ("127.0.0.1:0",)})
        self.config = RoleConfig(role="chief", index=0, cluster=cluster, out=out, timeouts=TIMEOUTS, security=security)
        self.journal = Journal(out / "chief")
        settings = dataclasses.replace(service.settings_of(self.config), term=self.journal.begin_term(), chief_uuid="u")
        self.process = service.ChiefProcess(self.config, out, self.journal, make_job_spec(), None, settings)
        self.code: int | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        deadline_s = time.monotonic() + 10.0
        while not self.process.server.address:
            assert time.monotonic() < deadline_s
            assert self._thread.is_alive()
            self._thread.join(0.01)
        self.address = self.process.server.address
        self.client = ChiefClient(self.address, TIMEOUTS, security)

    def _run(self) -> None:
        self.code = self.process.run(Termination())

    def link(self, role: str, index: int = 0, **fields: Any) -> ChiefLink:
        """A task's link to this chief. fields: of Applicant or of ChiefLink."""
        own = {item.name for item in dataclasses.fields(Applicant)} & fields.keys()
        said: dict[str, Any] = {"address": "127.0.0.1:9", **{name: fields.pop(name) for name in own}}
        return ChiefLink(
            self.address,
            TIMEOUTS,
            Applicant(role=role, index=index, **said),
            **{"security": self.security, **fields},
        )

    def wait(self, timeout_s: float = 10.0) -> int | None:
        """Its exit code, or None if it has not ended by then."""
        self._thread.join(timeout_s)
        return self.code

    def close(self) -> None:
        if self._thread.is_alive():
            with pytest.MonkeyPatch.context() as patch:
                # Nobody watches any more, and tasks that a test has left say nothing.
                patch.setattr(control, "WATCHER_S", 0.0)
                patch.setattr(control, "GOODBYE_S", 0.1)
                self.process.control.request_stop("test over")
                self._thread.join(10.0)
        self.client.close()
        self.process.close()
        self.journal.close()
