"""TensorFlow ParameterServerStrategy: coordinator, one worker, one ps, gRPC over loopback.

    benchmarks/.venvs/tensorflow/bin/python benchmarks/peers/tensorflow_ps.py

A step is one closure that the coordinator schedules on the worker: the gradient, in the worker's memory, goes
to the ps, whose own SGD kernel applies it; then the variable is read back to the worker. Gradients come from a
per-worker dataset that hands out the same memory every time, so nothing is computed for them.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import common

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
os.environ.setdefault("GRPC_FAIL_FAST", "use_caller")


def set_threads(inter_op: int) -> None:
    """One thread computes; `inter_op` threads dispatch, since sends and receives block some of them."""
    import tensorflow as tf

    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(inter_op)


def serve(cluster: dict[str, list[str]], role: str, inter_op: int) -> None:
    """The process of the worker or the ps."""
    import tensorflow as tf

    set_threads(inter_op)
    config = tf.compat.v1.ConfigProto(intra_op_parallelism_threads=1, inter_op_parallelism_threads=inter_op)
    server = tf.distribute.Server(
        tf.train.ClusterSpec(cluster), job_name=role, task_index=0, protocol="grpc", config=config, start=True
    )
    server.join()


def main() -> None:
    """Parse, run, print."""
    flags = common.parser(__doc__)
    flags.add_argument("--inter-op", type=int, default=2, help="below 2 its server can't finish a step")
    options = flags.parse_args()
    cluster = {"worker": [f"127.0.0.1:{common.free_port()}"], "ps": [f"127.0.0.1:{common.free_port()}"]}
    context = multiprocessing.get_context("spawn")
    servers = [
        context.Process(target=serve, args=(cluster, role, options.inter_op), daemon=True) for role in ("ps", "worker")
    ]
    for server in servers:
        server.start()
    try:
        run(options, cluster)
    finally:
        for server in servers:
            server.kill()


def run(options: common.argparse.Namespace, cluster: dict[str, list[str]]) -> None:
    """The coordinator: schedule closures, take the time."""
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": {**cluster, "chief": ["127.0.0.1:0"]}, "task": {"type": "chief", "index": 0}}
    )
    import tensorflow as tf

    set_threads(options.inter_op)
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(tf.train.ClusterSpec(cluster), rpc_layer="grpc")
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    elements = common.elements_of(options.megabytes, options.tensors)
    with strategy.scope():
        variables = [tf.Variable(tf.zeros([elements]), name=f"v{number}") for number in range(options.tensors)]

    def gradients() -> tf.data.Dataset:
        values = tuple(tf.fill([elements], common.GRADIENT) for _ in range(options.tensors))
        return tf.data.Dataset.from_tensors(values).repeat()

    batches = iter(coordinator.create_per_worker_dataset(gradients))

    def replica(batch: tuple[tf.Tensor, ...]) -> tf.Tensor:
        # Under the worker's device: `probe` is computed there, so the whole of every variable has to arrive.
        probes = []
        for variable, gradient in zip(variables, batch, strict=True):
            applied = tf.raw_ops.ResourceApplyGradientDescent(
                var=variable.handle, alpha=common.LEARNING_RATE, delta=gradient
            )
            with tf.control_dependencies([applied]):
                value = variable.read_value()
            probes.append(value[-1])
        return tf.add_n(probes) / len(probes)

    @tf.function
    def step_on_worker(iterator: object) -> tf.Tensor:
        return strategy.run(replica, args=(next(iterator),))

    found: list[float] = []

    def step() -> None:
        # fetch() waits: the next step needs the parameters of this one.
        found[:] = [float(coordinator.schedule(step_on_worker, args=(batches,)).fetch())]

    seconds = common.clock(step, steps=options.steps, warmup=options.warmup)
    common.check(found[0], options.steps + options.warmup)
    common.report(
        "TensorFlow ParameterServerStrategy",
        options,
        seconds,
        versions={"tensorflow": tf.__version__},
        settings={
            "protocol": "grpc",
            "intra_op_threads": 1,
            "inter_op_threads": options.inter_op,
            "devices": sorted({variable.device for variable in variables}),
        },
    )


if __name__ == "__main__":
    main()
