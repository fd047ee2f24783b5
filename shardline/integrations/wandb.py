"""Weights & Biases as a tracker: `shardline train job.py --tracker wandb`.

Set up by its own variables, such as WANDB_PROJECT.
"""

from __future__ import annotations

import logging
import os
import re
import uuid
from collections.abc import Sequence

from shardline.core.points import Point, TrackedRun
from shardline.host import files

REQUIRES = "wandb"
log = logging.getLogger("shardline.integrations")


class WandbTracker:
    """A run of Weights & Biases, continued by every chief of the same --out folder.

    The curves are drawn over "step", which may go back.
    """

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        folder = run.out / "logs"
        file = folder / "wandb-run"
        number = (file.read_text() if file.exists() else "") or uuid.uuid4().hex[:8]
        files.replace(file, number.encode())
        offline = "WANDB_MODE" not in os.environ and not wandb.api.api_key
        if offline:
            log.warning("there is no key of Weights & Biases: the run stays in %s; send it with: wandb sync", folder)
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT") or re.sub(r"[/\\#?%:]", "-", run.job),
            name=run.out.name,
            id=number,
            resume="allow",
            dir=str(folder),
            config=dict(run.settings),
            mode="offline" if offline else None,
            settings=wandb.Settings(silent=True, console="off", disable_code=True),
        )
        self._run.define_metric("step")
        self._run.define_metric("*", step_metric="step")

    def write(self, points: Sequence[Point]) -> None:
        for point in points:
            self._run.log({point.name: point.value, "step": point.step})

    def close(self) -> None:
        self._run.finish()
