"""All Prometheus metrics of Shardline, in one table, and a task's /metrics page.

    metrics = Metrics("worker", "worker/3")
    pushed = metrics.counter("shardline_push_wire_bytes_total", peer="ps/0", codec="raw", lane="grpc")
    pushed.inc(4096)
    address = metrics.serve("127.0.0.1", 0)

docs/metrics.md is generated from the table: python -m shardline.observability.metrics > docs/metrics.md
"""

from __future__ import annotations

import bisect
import collections
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    make_wsgi_app,
)
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric

from shardline.cluster import format_address
from shardline.errors import InternalError, UsageError
from shardline.lanes import OPENED
from shardline.observability.metrics_page import MetricsPage
from shardline.roles import ROLES
from shardline.rpc.usage import gpu
from shardline.security import PLAIN, Security

SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Bucket bounds, in seconds, for durations of one exchange or step."""
LONG_SECONDS = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)
"""Bucket bounds, in seconds, for checkpoints and evaluations."""
UPDATES = (0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0, 128.0)
"""Bucket bounds for staleness, in versions; 0 has its own bucket, since synchronous training always has it."""
DISTANCES = (1e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1, 1.0)
"""Bucket bounds for distances of parameters, as root mean squares of their elements."""


@dataclass(frozen=True)
class MetricSpec:
    """One row of the table. Every metric also has the label `task`."""

    name: str
    kind: str
    """"counter", "gauge" or "histogram"."""
    unit: str
    roles: tuple[str, ...]
    """Empty: all. A role of a plugin names the others that its tasks have."""
    labels: tuple[str, ...]
    help: str
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram, in its unit."""
    known: tuple[str, ...] = ()
    """Label values that exist from the start, at 0, so that the first count shows as a rise; for a single label."""


def _row(kind: str, name: str, roles: str, labels: str, text: str, unit: str = "", **more: Any) -> MetricSpec:
    """roles, labels: names with spaces between. unit: the last word of the name if left out."""
    unit = unit or name.removesuffix("_total").rpartition("_")[2]
    return MetricSpec(name, kind, unit, tuple(roles.split()), tuple(labels.split()), text, **more)


_counter, _gauge = partial(_row, "counter"), partial(_row, "gauge")
_histogram = partial(_row, "histogram", buckets=SECONDS)

_WIRE, _DATA, _MOVES = "peer codec lane", "ps worker", "ps worker aggregator"

TABLE: tuple[MetricSpec, ...] = (
    _counter("shardline_push_raw_bytes_total", _DATA, _WIRE, "Gradients pushed, as held in memory"),
    _counter("shardline_push_wire_bytes_total", _MOVES, _WIRE, "Gradients pushed, as sent after the codec"),
    _counter("shardline_pull_raw_bytes_total", _DATA, _WIRE, "Parameters pulled, as held in memory"),
    _counter("shardline_pull_wire_bytes_total", _MOVES, _WIRE, "Parameters pulled, as sent after the codec"),
    _gauge(
        "shardline_codec_error_ratio",
        _DATA,
        "codec way",
        "L2 norm of what the codec didn't send, over that of what was to be sent; in every 50th step",
    ),
    _gauge(
        "shardline_codec_memory_norm",
        "worker",
        "codec",
        "L2 norm of what the codec of gradients owes, to be sent later; in every 50th step",
    ),
    _gauge(
        "shardline_codec_chosen",
        "chief",
        "up down",
        "1 for the job's codecs of gradients and parameters, 0 for earlier ones; codec auto changes them",
        unit="flag",
    ),
    _histogram(
        "shardline_push_seconds",
        _DATA,
        "peer",
        "One push of a shard. ps: first byte to last reply. worker: from the end of backward to the last reply",
    ),
    _histogram(
        "shardline_pull_seconds",
        _DATA,
        "peer",
        "One pull of a shard. ps: request to last byte. worker: time after push and barrier wait",
    ),
    _counter("shardline_pushes_total", _DATA, "peer outcome", "Pushes by outcome"),
    _histogram(
        "shardline_staleness_updates",
        _DATA,
        "shard",
        "Shard version when a push was applied, minus the version its gradient was computed from",
        buckets=UPDATES,
    ),
    _histogram(
        "shardline_barrier_wait_seconds",
        _DATA,
        "shard",
        "ps: from the first to the last contribution to a step. worker: from its push to the first byte of the pull",
    ),
    _histogram("shardline_apply_seconds", "ps", "shard", "Applying the update rule to one bucket"),
    _gauge("shardline_shard_version", "ps", "shard", "Optimizer applications of a shard", unit="updates"),
    _gauge("shardline_shard_step", "ps", "shard", "Lowest step among a shard's buckets", unit="steps"),
    _gauge("shardline_table_rows", "ps", "shard table", "Rows of an embedding table in a shard"),
    _counter(
        "shardline_table_refused_total",
        "ps",
        "shard table reason",
        "Gradients dropped since their ids have no row: below the table's admission, or at its cap",
        unit="gradients",
    ),
    _counter("shardline_table_evicted_total", "ps", "shard table", "Rows removed by the table's eviction", unit="rows"),
    _counter(
        "shardline_table_memory_total",
        "ps",
        "shard table result",
        "Rows of a table with memory_rows that an update or a read found in memory (hit), or brought from disk (miss)",
        unit="rows",
    ),
    _gauge("shardline_table_disk_rows", "ps", "shard table", "Rows of an embedding table that are on disk"),
    _gauge("shardline_table_disk_bytes", "ps", "shard table", "Bytes of the disk that are taken for a table's rows"),
    _gauge("shardline_ps_standby_synced", "ps", "shard", "Whether the standby on this ps can take over", unit="0 or 1"),
    _gauge("shardline_ps_standby_bytes", "ps", "shard", "Memory of the standby on this ps"),
    _gauge(
        "shardline_ps_standby_lag_records",
        "ps",
        "shard",
        "Records of this shard that its standby has not acknowledged yet",
    ),
    _gauge("shardline_held_bytes", "ps", "kind", "Memory used by parameters, optimizer state, staging and cuts"),
    _gauge("shardline_staging_bytes", "ps", "", "Staging memory used by incoming contributions and partial sums"),
    _gauge("shardline_staging_limit_bytes", "ps", "", "Limit for staging memory; one bucket per stream may exceed it"),
    _histogram("shardline_staging_wait_seconds", "ps", "", "Time that contributions waited for room in staging"),
    _gauge("shardline_lane_attachments", _DATA, "lane", "Bulk sockets and shared segments in use"),
    _counter(
        "shardline_lane_fallbacks_total", _DATA, "lane", "Times that a lane was replaced by another", known=OPENED
    ),
    _gauge(
        "shardline_link_bytes_per_second",
        _DATA,
        "",
        "Line rate in each direction of the interface with this task's address, if known",
        unit="bytes/s",
    ),
    _counter("shardline_duplicate_mismatches_total", "ps", "", "Repeated pushes with different bits", unit="pushes"),
    _counter("shardline_refused_messages_total", "ps chief worker", "method", "Invalid messages refused"),
    _counter("shardline_fenced_messages_total", "ps chief worker", "peer", "Messages of replaced tasks"),
    _gauge("shardline_step", "", "", "Current step of this task", unit="steps"),
    _gauge(
        "shardline_gpu_used_bytes",
        "",
        "",
        "Memory in use on this task's GPU, by all processes; absent without a GPU or without nvidia-ml-py",
    ),
    _gauge(
        "shardline_gpu_busy_ratio",
        "",
        "",
        "Share of the last moments in which this task's GPU computed, for any process; absent likewise",
    ),
    _gauge(
        "shardline_certificate_expires_seconds",
        "",
        "",
        "Unix time at which the certificate in use ends; absent without TLS",
    ),
    _histogram("shardline_step_seconds", "worker chief", "", "One step: data, compute and exchange"),
    _histogram("shardline_data_seconds", "worker", "", "Part of a step spent waiting for batches"),
    _histogram("shardline_compute_seconds", "worker", "", "Forward and backward pass of one step"),
    _histogram("shardline_exchange_seconds", "worker", "", "Part of a step spent on push and pull"),
    _counter("shardline_examples_total", "worker chief", "", "Training samples done"),
    _gauge(
        "shardline_drift", "worker", "", "L2 norm of how far a replica moved in its last local training", unit="norm"
    ),
    _histogram(
        "shardline_gap",
        "worker",
        "",
        "RMS distance of the parameters before and after a push, every 20th; not where workers have common steps",
        buckets=DISTANCES,
        unit="rms",
    ),
    _gauge("shardline_clock_pushes", "worker", "", "Clock of a worker that may be held back (mode ssp)"),
    _counter(
        "shardline_parcel_raw_bytes_total",
        "worker",
        _WIRE,
        "Activations and their gradients sent to the stages of other workers, as held in memory",
    ),
    _counter("shardline_parcel_wire_bytes_total", "worker", _WIRE, "The same, as sent after the codec"),
    _counter(
        "shardline_parcel_wait_seconds_total",
        "worker",
        "",
        "Time in which the stages of this worker had nothing to compute with",
    ),
    _gauge(
        "shardline_stage_staleness_steps",
        "worker",
        "stage",
        "Updates that a stage's parameters had missed at most in its last step, in a pipeline without a flush",
    ),
    _gauge(
        "shardline_pipeline_bubble_ratio",
        "chief",
        "stage",
        "Share of the time from a step's first pass in any stage to its last in which a stage computed nothing",
    ),
    _gauge("shardline_stage_pass_seconds", "chief", "stage way", "Mean pass of one microbatch"),
    _gauge(
        "shardline_stage_held_microbatches",
        "chief",
        "stage",
        "Most microbatches of a replica whose activations a stage held in its recent steps",
    ),
    _gauge("shardline_loss", "worker chief", "", "Training loss of the last step"),
    _counter(
        "shardline_nonfinite_total",
        _DATA,
        "what",
        "NaN or infinity found, by loss or tensor name; on a ps, in a gradient",
        known=("loss", "gradient"),
        unit="values",
    ),
    _counter(
        "shardline_contributions_total",
        "chief",
        "peer outcome",
        "With spares: gradients of a worker's replicas that were used in a step, or dropped since they came too late",
        unit="gradients",
    ),
    _counter("shardline_skipped_steps_total", "ps chief", "", "Steps that advanced without an update"),
    _histogram("shardline_checkpoint_seconds", "chief", "", "Writing one checkpoint", buckets=LONG_SECONDS),
    _gauge("shardline_checkpoint_bytes", "chief", "", "Size of the last checkpoint"),
    _gauge("shardline_checkpoint_step", "chief", "", "Step of the last checkpoint", unit="steps"),
    _gauge(
        "shardline_checkpoint_timestamp_seconds",
        "chief",
        "",
        "Unix time of the last checkpoint, or of the chief's start if there is none",
    ),
    _gauge(
        "shardline_checkpoint_interval_steps",
        "chief",
        "",
        "Smallest interval between checkpoints, in steps, that writing keeps up with; absent until measured",
    ),
    _counter(
        "shardline_checkpoints_total", "chief", "outcome", "Checkpoints written and failed", known=("written", "failed")
    ),
    _counter(
        "shardline_cuts_skipped_total", "ps", "", "Cuts skipped because earlier ones were not saved yet", unit="cuts"
    ),
    _gauge("shardline_tasks", "chief", "role state", "Tasks by role and state"),
    _gauge("shardline_evaluation_metric", "evaluator chief", "metric", "Last evaluation, by metric", unit="any"),
    _histogram("shardline_evaluation_seconds", "evaluator", "", "Scoring one checkpoint", buckets=LONG_SECONDS),
    _counter(
        "shardline_evaluations_total",
        "evaluator",
        "outcome",
        "Checkpoints scored and failed",
        known=("scored", "failed"),
    ),
    _counter("shardline_heartbeats_total", "", "peer", "Heartbeats sent; on the chief, received"),
    _counter("shardline_rpc_retries_total", "", "peer", "Calls retried after a failure", unit="calls"),
)

BY_NAME: Mapping[str, MetricSpec] = {spec.name: spec for spec in TABLE}


class Spread(Histogram):
    """A histogram that takes many values at once."""

    def observe_all(self, amounts: Sequence[float]) -> None:
        places = collections.Counter([bisect.bisect_left(self._upper_bounds, amount) for amount in amounts])
        self._sum.inc(sum(amounts))
        for place, number in places.items():
            self._buckets[place].inc(number)


_M = TypeVar("_M", Counter, Gauge, Spread)
_KINDS: Mapping[str, type[Counter] | type[Gauge]] = {"counter": Counter, "gauge": Gauge}
Tell = Callable[[Sequence[Any]], None]
"""Called with what later() was given, in order."""


UNTOLD = 64
"""Changes that later() keeps at most."""


class _Registry(CollectorRegistry):
    """Omits the *_created series, which double the page and which our dashboards don't use.

    prometheus_client's own switch is global, so it would change the user's own metrics in a script.
    """

    def __init__(self, before: Callable[[], None]) -> None:
        """before: called before the metrics are read."""
        super().__init__()
        self._before = before

    def collect(self) -> Iterator[Metric]:
        self._before()
        for family in super().collect():
            family.samples = [sample for sample in family.samples if not sample.name.endswith("_created")]
            yield family


class Metrics:
    """The metrics of one task, in a registry of its own. Thread-safe."""

    def __init__(self, role: str, task: str) -> None:
        self.task = task
        self.role = role
        self._untold: deque[tuple[Tell, Any]] = deque()
        self._telling = threading.Lock()
        self.registry = _Registry(self.tell)
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self._families: dict[str, MetricWrapperBase] = {}
        for spec in TABLE:
            if not spec.roles or role in spec.roles or spec.name in ROLES[role].metrics:
                self._families[spec.name] = self._family(spec)
        self._children: dict[tuple[str, tuple[tuple[str, str], ...]], MetricWrapperBase] = {}
        self._lock = threading.Lock()
        self._page: MetricsPage | None = None
        self.address = ""
        """Address that serve() listens on; empty before."""
        self.url = ""
        """The same as a URL; https if the task uses TLS and the address is not loopback."""
        # Start counters with known labels at 0: Prometheus doesn't see a rise from no value.
        for spec in TABLE:
            if spec.name not in self._families or spec.kind == "gauge":
                continue
            if not spec.labels:
                self._families[spec.name].labels(task=self.task)
            for value in spec.known:
                self._families[spec.name].labels(**{"task": self.task, spec.labels[0]: value})

    def _family(self, spec: MetricSpec) -> MetricWrapperBase:
        labels = ("task", *spec.labels)
        if spec.kind == "histogram":
            return Spread(spec.name, spec.help, labels, registry=self.registry, buckets=spec.buckets)
        return _KINDS[spec.kind](spec.name, spec.help, labels, registry=self.registry)

    def later(self, tell: Tell, figures: Any) -> None:
        """Have metrics changed before anyone reads them, not now: while a small step is answered, each counts.

        tell: called once with all that came for it.
        """
        self._untold.append((tell, figures))
        if len(self._untold) >= UNTOLD:
            self.tell()

    def tell(self) -> None:
        """Change what later() was given."""
        with self._telling:
            batches: dict[Tell, list[Any]] = {}
            while self._untold:
                tell, figures = self._untold.popleft()
                batches.setdefault(tell, []).append(figures)
            for tell, batch in batches.items():
                tell(batch)

    def counter(self, name: str, **labels: str | int) -> Counter:
        """The counter with these labels; keep it if used often. Raises InternalError if it is not in the table."""
        return self._child(Counter, name, labels)

    def gauge(self, name: str, **labels: str | int) -> Gauge:
        return self._child(Gauge, name, labels)

    def histogram(self, name: str, **labels: str | int) -> Spread:
        return self._child(Spread, name, labels)

    def sums(self, name: str, by: str) -> dict[str, float]:
        """The sums of a counter or a gauge by the values of a label; empty if this task does not have it."""
        self.tell()
        found: dict[str, float] = {}
        families = self._families[name].collect() if name in self._families else ()
        for sample in (sample for family in families for sample in family.samples):
            if sample.name == name:
                found[sample.labels[by]] = found.get(sample.labels[by], 0.0) + sample.value
        return found

    def _child(self, cls: type[_M], name: str, labels: Mapping[str, str | int]) -> _M:
        key = (name, tuple((label, str(value)) for label, value in labels.items()))
        child = self._children.get(key)
        if child is None:
            child = self._make_child(cls, name, dict(key[1]))
            with self._lock:
                child = self._children.setdefault(key, child)
        if not isinstance(child, cls):
            raise InternalError(f"metric {name!r} is a {BY_NAME[name].kind}, not a {cls.__name__.lower()}")
        return child

    def _make_child(self, cls: type[_M], name: str, labels: dict[str, str]) -> MetricWrapperBase:
        spec = BY_NAME.get(name)
        if spec is None:
            raise InternalError(f"metric {name!r} is not in the table of shardline/observability/metrics.py")
        if name not in self._families:
            raise InternalError(f"metric {name!r} is for {', '.join(spec.roles)}, not for {self.task}")
        if set(labels) != set(spec.labels):
            raise InternalError(f"metric {name!r} has labels {sorted(spec.labels)}, not {sorted(labels)}")
        return self._families[name].labels(task=self.task, **labels)

    def serve(self, host: str, port: int, security: Security = PLAIN, *, device: str = "cpu") -> str:
        """Serve GET /metrics at host:port (0 = a free one); returns the bound address.

        device: what the task computes on. security: requests from other machines need the job's token, if there is one.
        Raises UsageError if the port is taken or the host is not this machine's.
        """
        if self._page is not None:
            raise InternalError(f"the metrics of {self.task} are already being served")
        try:
            page = MetricsPage(host, port, make_wsgi_app(self.registry), security)
        except OSError as error:
            raise UsageError(
                f"{self.task} can't serve metrics at {format_address(host, port)}: {error.strerror or error}; "
                "use another --metrics-port (0 = a free one) or --host"
            ) from None
        self._page, self.address, self.url = page, page.address, page.url
        if security.tls_cert is not None:
            self.gauge("shardline_certificate_expires_seconds").set_function(security.expires)
        if gpu(device)[0]:
            self.gauge("shardline_gpu_used_bytes").set_function(lambda: gpu(device)[0])
            self.gauge("shardline_gpu_busy_ratio").set_function(lambda: gpu(device)[1])
        return self.address

    def close(self) -> None:
        """Stop serving and free the port. May be called twice."""
        page, self._page = self._page, None
        if page is not None:
            page.close()


def table_markdown() -> str:
    """The text of docs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Every task answers `GET /metrics` (`--metrics-port`, `--host`). From outside the task's machine that needs",
        "the job's token, where there is one ([security](security.md#metrics)). Each metric has the label `task`, such",
        "as `worker/3`, besides those below; the usual `process_*` and `python_*` figures, such as",
        "`process_cpu_seconds_total` and `process_resident_memory_bytes`, are there too.",
        "This page is generated from the table in `shardline/observability/metrics.py` by `make docs`.",
        "",
        "| name | kind, unit if the name lacks it | labels | tasks | what |",
        "|---|---|---|---|---|",
    ]
    for spec in TABLE:
        labels = ", ".join(f"`{label}`" for label in spec.labels)
        roles = "all" if not spec.roles else ", ".join(spec.roles)
        said = spec.name.removesuffix("_total").endswith(f"_{spec.unit}")
        kind = spec.kind if said else f"{spec.kind}, {spec.unit}"
        lines.append(f"| `{spec.name}` | {kind} | {labels} | {roles} | {spec.help} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    print(table_markdown(), end="")
