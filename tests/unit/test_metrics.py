from __future__ import annotations

import io
import json
import logging
import socket
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shardline.errors import InternalError, UsageError
from shardline.observability import log
from shardline.observability.metrics import BY_NAME, TABLE, UNTOLD, Metrics, table_markdown
from shardline.roles import ROLES


@pytest.fixture
def worker() -> Iterator[Metrics]:
    metrics = Metrics("worker", "worker/3")
    yield metrics
    metrics.close()


def scrape(address: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as reply:
        text = reply.read().decode()
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_names_are_unique_and_say_their_unit_as_prometheus_wants() -> None:
    assert len({spec.name for spec in TABLE}) == len(TABLE)
    for spec in TABLE:
        assert spec.name.startswith("shardline_")
        assert spec.name.endswith("_total") == (spec.kind == "counter"), spec.name
        if spec.unit in ("seconds", "bytes"):
            assert spec.name.removesuffix("_total").endswith(f"_{spec.unit}"), spec.name
        assert bool(spec.buckets) == (spec.kind == "histogram")
        assert spec.help and spec.unit and set(spec.roles) <= set(ROLES)


@pytest.mark.parametrize("role", tuple(ROLES))
def test_page_of_every_role_declares_exactly_its_own_metrics(role: str) -> None:
    metrics = Metrics(role, f"{role}/0")
    names = {family.name for family in metrics.registry.collect() if family.name.startswith("shardline_")}
    assert names == {spec.name.removesuffix("_total") for spec in TABLE if role in (spec.roles or ROLES)}


def test_what_is_counted_is_what_a_scrape_over_http_reads(worker: Metrics) -> None:
    peer = {"peer": "ps/0", "codec": "raw", "lane": "grpc"}
    worker.counter("shardline_push_wire_bytes_total", **peer).inc(4096)
    worker.counter("shardline_push_wire_bytes_total", **peer).inc(4)
    worker.gauge("shardline_loss").set(0.25)
    worker.histogram("shardline_staleness_updates", shard=2).observe(0)
    worker.histogram("shardline_staleness_updates", shard=2).observe(3)
    samples = scrape(worker.serve("127.0.0.1", 0))

    task = ("task", "worker/3")
    assert samples["shardline_push_wire_bytes_total", tuple(sorted([*peer.items(), task]))] == 4100
    assert samples["shardline_loss", (task,)] == 0.25
    shard = ("shard", "2")
    assert samples["shardline_staleness_updates_bucket", (("le", "0.0"), shard, task)] == 1
    assert samples["shardline_staleness_updates_sum", (shard, task)] == 3
    assert samples["process_resident_memory_bytes", ()] > 1e6
    assert not [name for name, _ in samples if name.endswith("_created")]


@pytest.mark.parametrize("count", [1, UNTOLD - 1, UNTOLD, 3 * UNTOLD + 1])
def test_what_is_told_later_is_on_the_page_once(worker: Metrics, count: int) -> None:
    counter = worker.counter("shardline_rpc_retries_total", peer="ps/0")

    def tell(figures: Sequence[int]) -> None:
        counter.inc(sum(figures))

    for _ in range(count):
        worker.later(tell, 1)
    address = worker.serve("127.0.0.1", 0)
    key = ("shardline_rpc_retries_total", (("peer", "ps/0"), ("task", "worker/3")))
    assert [scrape(address)[key] for _ in range(2)] == [count, count]


@pytest.mark.parametrize("name", ["shardline_push_seconds", "shardline_staleness_updates"])
def test_many_values_at_once_are_those_one_by_one(name: str) -> None:
    label = {"peer": "ps/0"} if name == "shardline_push_seconds" else {"shard": 1}
    pages = []
    for together in (False, True):
        metrics = Metrics("worker", "worker/0")
        histogram = metrics.histogram(name, **label)
        values = [*(bound + more for bound in BY_NAME[name].buckets for more in (-0.25, 0.0, 0.25)), 1e9, 0.0]
        if together:
            histogram.observe_all(values)
        else:
            for one in values:
                histogram.observe(one)
        pages.append(
            {
                (s.name, *sorted(s.labels.items())): s.value
                for f in metrics.registry.collect()
                for s in f.samples
                if s.name.startswith(name)
            }
        )
    assert pages[0] == pytest.approx(pages[1])


def test_what_can_be_counted_begins_at_zero_and_what_is_measured_does_not() -> None:
    chief = Metrics("chief", "chief/0")
    task = {"task": "chief/0"}
    assert chief.registry.get_sample_value("shardline_checkpoints_total", {**task, "outcome": "failed"}) == 0.0
    assert chief.registry.get_sample_value("shardline_skipped_steps_total", task) == 0.0
    assert chief.registry.get_sample_value("shardline_step_seconds_count", task) == 0.0
    # 0 would be a value of its own here: the best of all losses, a checkpoint of 1970.
    for name in ("shardline_loss", "shardline_checkpoint_timestamp_seconds"):
        assert chief.registry.get_sample_value(name, task) is None
    for spec in TABLE:
        assert not spec.known or (spec.kind == "counter" and len(spec.labels) == 1), spec.name


def test_children_are_made_once(worker: Metrics) -> None:
    first = worker.counter("shardline_heartbeats_total", peer="chief/0")
    assert worker.counter("shardline_heartbeats_total", peer="chief/0") is first


def test_names_labels_and_kinds_outside_the_table_are_refused(worker: Metrics) -> None:
    with pytest.raises(InternalError, match="not in the table"):
        worker.counter("shardline_made_up_total")
    with pytest.raises(InternalError, match="is for chief, not for worker/3"):
        worker.gauge("shardline_checkpoint_bytes")
    with pytest.raises(InternalError, match=r"has labels \['peer'\], not \['shard'\]"):
        worker.histogram("shardline_push_seconds", shard=0)
    worker.gauge("shardline_loss")
    with pytest.raises(InternalError, match="is a gauge, not a counter"):
        worker.counter("shardline_loss")


def test_port_in_use_is_refused_with_the_address_and_the_flag(worker: Metrics) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(UsageError, match=rf"worker/3 can't serve metrics at 127\.0\.0\.1:{port}.*--metrics-port"):
            worker.serve("127.0.0.1", port)


def test_close_frees_the_port(worker: Metrics) -> None:
    address = worker.serve("127.0.0.1", 0)
    worker.close()
    worker.close()
    port = int(address.rpartition(":")[2])
    assert worker.serve("127.0.0.1", port) == address


def test_page_of_documentation_is_what_the_table_says() -> None:
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == table_markdown(), "run: make docs"


@pytest.fixture
def events(tmp_path: Path) -> Iterator[tuple[io.StringIO, Path]]:
    stream, path = io.StringIO(), tmp_path / "logs" / "worker-1.jsonl"
    log.setup("worker/1", json_path=path, stream=stream)
    yield stream, path
    log.close()


def test_event_is_one_line_for_people_and_one_for_programs(events: tuple[io.StringIO, Path]) -> None:
    logging.getLogger("shardline_worker.loop").info("loss %.2f\nfalls", 0.5, extra={"step": 120, "shard": 2})
    stream, path = events
    assert stream.getvalue().split(" ", 1)[1] == "worker/1 step 120 loss 0.50 | falls\n"
    (line,) = path.read_text().splitlines()
    event = json.loads(line)
    assert event.pop("time_s") > 1e9
    assert event == {
        "task": "worker/1",
        "level": "INFO",
        "logger": "shardline_worker.loop",
        "message": "loss 0.50\nfalls",
        "step": 120,
        "shard": 2,
    }


def test_traceback_reaches_both_logs(events: tuple[io.StringIO, Path]) -> None:
    try:
        raise ValueError("17 is odd")
    except ValueError:
        logging.getLogger("shardline").exception("stopped")
    stream, path = events
    assert "ERROR stopped\nTraceback" in stream.getvalue()
    assert "ValueError: 17 is odd" in json.loads(path.read_text())["exception"]


def test_setup_leaves_the_root_logger_alone_and_does_not_repeat_events(events: tuple[io.StringIO, Path]) -> None:
    stream, _ = events
    before = list(logging.getLogger().handlers)
    log.setup("worker/2", stream=stream)
    logging.getLogger("shardline").warning("once")
    assert stream.getvalue().count("once") == 1
    assert "worker/2 WARNING once" in stream.getvalue()
    assert logging.getLogger().handlers == before


def test_log_in_a_folder_that_can_not_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"the log .* can't be written"):
        log.setup("worker/1", json_path=tmp_path / "file" / "x.jsonl")
