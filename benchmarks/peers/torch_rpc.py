"""torch.distributed.rpc (TensorPipe): one worker process, one server process.

    benchmarks/.venvs/torch/bin/python benchmarks/peers/torch_rpc.py --transport tcp

A step is one call per tensor, all in flight at once: the gradient is its argument, the new parameters its result. The
parameters go back as the tensor that the server owns, so nobody copies them besides TensorPipe.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.rpc as rpc

sys.path.insert(0, str(Path(__file__).parent))
import common

PIPES = {
    "tcp": (["uv"], ["basic"]),
    # Shared-memory rings for messages; process_vm_readv for tensors where the machine allows it.
    "shm": (["shm", "uv"], ["cma", "basic"]),
    # What TensorPipe picks by itself.
    "default": (None, None),
}

parameters: list[torch.Tensor] = []
optimizers: list[torch.optim.Optimizer] = []
"""One of each tensor; none for SGD, which one call computes."""


def create(elements: int, tensors: int, optimizer: str) -> None:
    """On the server: make the parameters."""
    parameters[:] = [torch.zeros(elements) for _ in range(tensors)]
    if optimizer == "AdamW":
        optimizers[:] = [torch.optim.AdamW([tensor], lr=common.LEARNING_RATE) for tensor in parameters]


def push_pull(number: int, gradient: torch.Tensor) -> torch.Tensor:
    """On the server: one step of one tensor; what it returns is sent back."""
    if optimizers:
        parameters[number].grad = gradient
        optimizers[number].step()
    else:
        parameters[number].add_(gradient, alpha=-common.LEARNING_RATE)
    return parameters[number]


def backend(transport: str, init_method: str) -> rpc.TensorPipeRpcBackendOptions:
    """Transports and channels of both processes."""
    transports, channels = PIPES[transport]
    return rpc.TensorPipeRpcBackendOptions(
        num_worker_threads=4, init_method=init_method, rpc_timeout=120, _transports=transports, _channels=channels
    )


def serve(transport: str, init_method: str) -> None:
    """The server's process."""
    warnings.filterwarnings("ignore", message="You are using a Backend")
    torch.set_num_threads(1)
    rpc.init_rpc("ps", rank=0, world_size=2, rpc_backend_options=backend(transport, init_method))
    rpc.shutdown()


def main() -> None:
    """Parse, run, print."""
    flags = common.parser(__doc__)
    common.optimizer_flag(flags)
    flags.add_argument("--transport", choices=sorted(PIPES), default="tcp")
    options = flags.parse_args()
    # Both ends on loopback, whatever the machine's name resolves to.
    os.environ.setdefault("TP_SOCKET_IFNAME", "lo")
    warnings.filterwarnings("ignore", message="You are using a Backend")
    torch.set_num_threads(1)
    init_method = f"tcp://127.0.0.1:{common.free_port()}"
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(options.transport, init_method))
    server.start()
    rpc.init_rpc("worker", rank=1, world_size=2, rpc_backend_options=backend(options.transport, init_method))
    elements = common.elements_of(options.megabytes, options.tensors)
    rpc.rpc_sync("ps", create, args=(elements, options.tensors, options.optimizer))
    gradients = [torch.full((elements,), common.GRADIENT) for _ in range(options.tensors)]
    held: list[torch.Tensor] = []

    def step() -> None:
        calls = [rpc.rpc_async("ps", push_pull, args=(number, g)) for number, g in enumerate(gradients)]
        held[:] = [call.wait() for call in calls]

    seconds = common.clock(step, steps=options.steps, warmup=options.warmup)
    common.check(float(held[-1][-1]), options.steps + options.warmup, options.optimizer)
    rpc.shutdown()
    server.join(timeout=30)
    transports, channels = PIPES[options.transport]
    common.report(
        f"torch.distributed.rpc ({options.transport})",
        options,
        seconds,
        versions={"torch": torch.__version__},
        settings={"transports": transports, "channels": channels, "num_worker_threads": 4, "intra_op_threads": 1},
    )


if __name__ == "__main__":
    main()
