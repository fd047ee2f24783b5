"""MLflow as a tracker: `shardline train job.py --tracker mlflow`.

Set up by its own variables, such as MLFLOW_TRACKING_URI.
"""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Sequence

from shardline.core.points import Point, TrackedRun
from shardline.errors import UsageError

REQUIRES = "mlflow"
MAX_VALUE = 500
"""Characters of a parameter that MLflow takes."""
REFUSED = r"[^\w.\-/ :]"
"""Characters that MLflow refuses in a metric's name, with all other values of the call."""


class MlflowTracker:
    """A run of MLflow, continued by every chief of the same --out folder.

    Without MLFLOW_TRACKING_URI it is in a database under the folder's logs, which needs the whole of MLflow.
    """

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param

        folder = run.out / "logs"
        local = None if "MLFLOW_TRACKING_URI" in os.environ else f"sqlite:///{(folder / 'mlflow.db').absolute()}"
        if local and importlib.util.find_spec("sqlalchemy") is None:
            raise UsageError("set MLFLOW_TRACKING_URI, or have a database in the run's folder: pip install mlflow")
        self._client = MlflowClient(tracking_uri=local)
        name = folder / "mlflow-run"
        if name.exists():
            self._run = name.read_text()
            self._client.update_run(self._run, status="RUNNING")
            return
        title = os.environ.get("MLFLOW_EXPERIMENT_NAME") or run.job
        found = self._client.get_experiment_by_name(title)
        experiment = self._client.create_experiment(title) if found is None else found.experiment_id
        self._run = self._client.create_run(experiment, run_name=run.out.name).info.run_id
        name.write_text(self._run)
        settings = [Param(key, str(value)[:MAX_VALUE]) for key, value in run.settings.items()]
        self._client.log_batch(self._run, params=settings)

    def write(self, points: Sequence[Point]) -> None:
        from mlflow.entities import Metric

        self._client.log_batch(
            self._run,
            metrics=[
                Metric(re.sub(REFUSED, "_", point.name), point.value, int(1e3 * point.time_s), point.step)
                for point in points
            ],
        )

    def close(self) -> None:
        self._client.set_terminated(self._run)
