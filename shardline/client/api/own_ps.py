"""The ps in a worker's own process (--with-ps): the worker's share of the parameters and of the optimizer's state."""

from __future__ import annotations

import logging
import os
import threading
from dataclasses import replace
from typing import Any

import torch

from shardline import plugins
from shardline.config import RoleConfig
from shardline.errors import InternalError, as_error
from shardline.host.process import Termination, torch_threads

log = logging.getLogger("shardline.client")


class OwnPs:
    """Serves on threads of this process until the chief ends the job. Its failure ends the process, as a ps's does."""

    def __init__(self, config: RoleConfig, termination: Termination) -> None:
        self._config, self._termination = replace(config, role="ps", metrics_port=0, ready_fd=None), termination
        # A ps sets the number of threads with which torch computes.
        with torch_threads(torch.get_num_threads()):
            self._ps: Any = plugins.installed("shardline.servers", "ps", "a ps in a worker's process")(self._config)
        self._thread = threading.Thread(target=self._run, name=self._config.task, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            code = self._ps.run(self._termination)
            if code and self._termination.event.is_set():
                # The chief did not end the job in time.
                os._exit(code)
        except Exception as error:
            found = as_error(error) or InternalError(f"{type(error).__name__}: {error}")
            log.error("%s: %s", self._config.task, found)
            os._exit(found.exit_code)

    def close(self, *, ended: bool) -> None:
        """Wait until it has heard of the job's end. Where the worker failed before that, it ends with the process."""
        if ended:
            self._thread.join(self._config.timeouts.total_s)
            if self._thread.is_alive():
                log.warning("%s has not heard of the job's end, and ends with this process", self._config.task)
