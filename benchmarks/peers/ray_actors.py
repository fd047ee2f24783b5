"""Ray: the parameter server is an actor, tensors travel through the object store in shared memory.

    benchmarks/.venvs/ray/bin/python benchmarks/peers/ray_actors.py

The worker is the driver process. A step is one call of the actor's method per tensor: Ray puts the gradient into the
object store, the actor reads it there without a copy, and the worker reads the new parameters there without a copy.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from pathlib import Path

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")

import numpy as np
import ray
import torch

sys.path.insert(0, str(Path(__file__).parent))
import common


@ray.remote(num_cpus=1)
class ParameterServer:
    """Owns the parameters."""

    def __init__(self, elements: int, tensors: int, rate: float, optimizer: str) -> None:
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        self._rate = rate
        self._parameters = [np.zeros(elements, dtype=np.float32) for _ in range(tensors)]
        self._optimizers: list[torch.optim.Optimizer] = []
        if optimizer == "AdamW":
            self._optimizers = [torch.optim.AdamW([torch.from_numpy(p)], lr=rate) for p in self._parameters]

    def push_pull(self, number: int, gradient: np.ndarray) -> np.ndarray:
        """One step of one tensor; returns its parameters."""
        parameter = self._parameters[number]
        if self._optimizers:
            optimizer = self._optimizers[number]
            optimizer.param_groups[0]["params"][0].grad = torch.from_numpy(gradient)
            optimizer.step()
        else:
            torch.from_numpy(parameter).add_(torch.from_numpy(gradient), alpha=-self._rate)
        return parameter


def main() -> None:
    """Parse, run, print."""
    flags = common.parser(__doc__)
    common.optimizer_flag(flags)
    options = flags.parse_args()
    torch.set_num_threads(1)
    store_bytes = max(512 << 20, int(options.megabytes * 1e6) * 8)
    # Ray's unix sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as scratch:
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=store_bytes,
            log_to_driver=False,
            logging_level="ERROR",
            _temp_dir=scratch,
            _node_ip_address="127.0.0.1",
        )
        try:
            run(options)
        finally:
            ray.shutdown()


def run(options: common.argparse.Namespace) -> None:
    """Measure against one actor."""
    elements = common.elements_of(options.megabytes, options.tensors)
    server = ParameterServer.remote(elements, options.tensors, common.LEARNING_RATE, options.optimizer)
    gradients = [np.full(elements, common.GRADIENT, dtype=np.float32) for _ in range(options.tensors)]
    held: list[np.ndarray] = []

    def step() -> None:
        calls = [server.push_pull.remote(number, gradient) for number, gradient in enumerate(gradients)]
        # The views of the step before are given up first, so that the store can use their memory again.
        held.clear()
        held.extend(ray.get(calls, timeout=120))

    seconds = common.clock(step, steps=options.steps, warmup=options.warmup)
    common.check(float(held[-1][-1]), options.steps + options.warmup, options.optimizer)
    common.report(
        "Ray actors",
        options,
        seconds,
        versions={"ray": ray.__version__, "torch": torch.__version__},
        settings={"object_store": "shared memory", "intra_op_threads": 1},
    )


if __name__ == "__main__":
    main()
