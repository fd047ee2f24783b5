"""Which ids of a table get rows, and which keep them: counted in little memory, alike for any number of servers."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import logging
import re
import resource
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st
from torch import Tensor

from shardline.core.contributions import Contributions, Partial
from shardline.core.plan import Plan, Slice, make_plan
from shardline.core.rows import PARTS, pack, part_of
from shardline.core.spec import JobSpec, ScheduleSpec, TensorKind, TensorSpec
from shardline.core.spec_json import job_from_json, job_to_json
from shardline.errors import DiskError, ProtocolError, UsageError
from shardline.model import table_spec
from shardline.nn import EmbeddingTable
from shardline.observability.metrics import Metrics
from shardline.rpc.messages.convert import tensor_from_proto, tensor_to_proto
from shardline.rpc.v1 import parameter_server_pb2
from shardline.storage import cold
from shardline.storage.population import Population
from shardline.storage.rows import RowStore
from shardline.storage.table import TableBucket
from shardline.update.rows import ROW_ADMISSIONS
from shardline_ps.memory.metering import Meter
from shardline_ps.store import ParameterStore
from tests.support.checkpoints import job_of, spec
from tests.unit.test_native import using
from tests.unit.test_rows import LEVELS

DIM = 2
MOST = 30
IDS = st.lists(st.integers(0, 60), max_size=MOST, unique=True)
STEPS = st.lists(IDS.map(sorted), max_size=12)
BOUNDS = (
    {"admit": "probability:p=0.5", "evict": "age:steps=2,every=2"},
    {"admit": "after:count=2,ids=100", "evict": "norm:least=0.05,every=3", "max_rows": PARTS},
    {"evict": "age:steps=1,every=1"},
)


def table(**bounds: Any) -> TensorSpec:
    return spec("users", (PARTS, DIM), kind=TensorKind.TABLE, rule="sgd:lr=0.1", init="uniform", **bounds)


FOLDER = Path(tempfile.gettempdir())


def buckets_of(plan: Plan, *, keeps_previous: bool = True, folder: Path = FOLDER) -> list[TableBucket]:
    return [
        TableBucket(
            number,
            0,
            shard.buckets[0],
            plan.tensors,
            ScheduleSpec(),
            contributions=Contributions(shard.buckets[0], 1, in_tree=False),
            keeps_previous=keeps_previous,
            cold=folder,
        )
        for number, shard in enumerate(plan.shards)
    ]


def gradient_of(bucket: TableBucket, ids: Tensor, seed: int) -> Partial:
    """Gradients of those ids that are the bucket's, each a function of the id and seed; without ids, none."""
    (piece,) = bucket.spec.slices
    part = part_of(ids) - piece.first_row
    mine = ids[(part >= 0) & (part < piece.rows)]
    if not len(mine):
        return Partial(None, (False,), dim=DIM)
    rows = torch.sin(torch.stack([mine * (seed + 1.0), mine + 0.5], 1).float())
    return Partial(pack(mine, rows), (True,), dim=DIM)


def whole(**bounds: Any) -> Population:
    return Population(table(**bounds), Slice(tensor=0, first_row=0, rows=PARTS, offset=0, elements=PARTS * DIM))


# Admission


@pytest.mark.parametrize(("count", "most"), [(2, 0.016), (3, 0.016)])
def test_an_id_is_never_late_and_seldom_early(count: int, most: float) -> None:
    """With as many ids as the filter is for: a million."""
    population, number = whole(admit=f"after:count={count},ids=1000000"), 1_000_000
    seen = torch.arange(number) * 0x9E3779B97F4A7
    for step, some in enumerate(seen.split(250_000)):
        population.admit(some, step)
    fresh = 7 + torch.arange(100_000) * 1_000_003
    for time in range(1, count):
        early = float(population.admit(fresh, 4).double().mean())
        assert early < (most if time == count - 1 else 0.001), f"{early:.2%} are admitted after {time} steps"
    assert population.admit(fresh, 5).all()
    for time in range(2, count + 1):
        admitted = population.admit(seen[::50], 4 + time)
    assert admitted.all()


def test_a_filter_for_100_million_ids_takes_no_more_than_a_gigabyte() -> None:
    assert ROW_ADMISSIONS.parse("after:ids=100000000").width * PARTS <= 1_000_000_000
    assert whole(admit="after:ids=1000000").nbytes < 10_000_000
    assert whole().nbytes == 0


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), unique=True, max_size=40), st.integers(1, PARTS - 1))
@pytest.mark.parametrize("admit", ["probability:p=0.5", "after:count=2,ids=1"])
def test_an_id_is_admitted_alike_whatever_it_comes_with(admit: str, chosen: list[int], cut: int) -> None:
    ids = torch.tensor(sorted(chosen), dtype=torch.int64)
    spec = table(admit=admit)
    sides = [(first <= part_of(ids)) & (part_of(ids) < end) for first, end in ((0, cut), (cut, PARTS))]
    halves = [
        Population(spec, Slice(tensor=0, first_row=first, rows=end - first, offset=0, elements=0))
        for first, end in ((0, cut), (cut, PARTS))
    ]
    one = whole(admit=admit)
    for step in range(3):
        expected = one.admit(ids, step)
        for side, half in zip(sides, halves, strict=True):
            assert torch.equal(half.admit(ids[side], step), expected[side])
    assert expected.all() or admit.startswith("probability")


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_counted_and_drawn_has_known_bits(level: str | None) -> None:
    """Checkpoints have the counters, and other machines go on with them."""
    ids = torch.arange(-50, 50)
    with using(level):
        counting, drawing = whole(admit="after:count=3,ids=100000"), whole(admit="probability:p=0.5,seed=7")
        for step in range(2):
            assert not counting.admit(ids[: 60 + 40 * step], step).any()
        counters = counting.counters()
        assert counters is not None
        assert hashlib.sha256(counters.numpy()).hexdigest()[:16] == "aa832b2442bc0ac4"
        assert drawing.admit(ids[:16], 3).int().tolist() == [0, 1, 1, 0, 1, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 1]


def test_probability_is_the_share_of_ids_and_of_steps() -> None:
    ids, population = torch.arange(20_000), whole(admit="probability:p=0.3")
    drawn = torch.stack([population.admit(ids, step) for step in range(20)]).double()
    assert abs(float(drawn.mean()) - 0.3) < 0.003
    assert float(drawn.mean(0).std()) == pytest.approx((0.3 * 0.7 / 20) ** 0.5, rel=0.05), "steps are alike"
    assert population.refused["below_admission"] == int((drawn == 0).sum())
    other = whole(admit="probability:p=0.3,seed=1").admit(ids, 0).double()
    assert abs(float((other * drawn[0]).mean()) - 0.09) < 0.01


# The cap


def test_a_full_table_trains_the_rows_that_it_has_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    (bucket,) = buckets_of(make_plan([table(max_rows=PARTS + 500, evict="age:steps=3,every=4")], 1))
    ids = torch.arange(9000)
    # One of each of 200 parts, which have room for it.
    first = torch.stack([ids[part_of(ids) == part][0] for part in range(200)]).sort().values
    others = ids[~torch.isin(ids, first)]
    bucket.apply(gradient_of(bucket, first, 0))
    kept = bucket.rows(first, 1).clone()
    with caplog.at_level(logging.WARNING, logger="shardline.table"):
        bucket.apply(gradient_of(bucket, torch.cat([first[:100], others]).sort().values, 1))
        assert len(bucket.store) == PARTS + 500
        refused = bucket.population.refused["cap"]
        assert refused == len(ids) - PARTS - 500
        bucket.apply(gradient_of(bucket, others, 2))
    assert len(bucket.store) == PARTS + 500 and bucket.population.refused["cap"] == 2 * refused
    (said,) = [record.getMessage() for record in caplog.records]
    assert "table 'users' has no room for some new ids (max_rows=1524): from step 1 on they get no row" in said
    assert "Raise max_rows, or choose evict=" in said
    # Rows that were there are there: trained where they had a gradient, and else as they were.
    assert bool((bucket.store.find(first) >= 0).all())
    assert torch.equal(bucket.rows(first, 3)[100:], kept[100:])
    assert not torch.equal(bucket.rows(first, 3)[:100], kept[:100])
    # Half of them age, which makes room.
    bucket.apply(Partial(None, (False,), dim=DIM))
    assert bucket.population.evicted == 100 and len(bucket.store) == PARTS + 400
    bucket.apply(gradient_of(bucket, torch.arange(20 * PARTS), 4))
    assert len(bucket.store) == PARTS + 500


def test_a_cap_is_shared_by_parts_and_a_restore_loses_no_row_to_a_lower_one() -> None:
    for most in (PARTS, PARTS + 1, 5000):
        (bucket,) = buckets_of(make_plan([table(max_rows=most)], 1))
        bucket.apply(gradient_of(bucket, torch.arange(40 * PARTS), 0))
        number = torch.bincount(part_of(bucket.store.ordered()[0]), minlength=PARTS)
        assert len(bucket.store) == most and int(number.max() - number.min()) <= 1
    (lower,) = buckets_of(make_plan([table(max_rows=PARTS)], 1))
    image = bucket.image()
    lower.restore(image, lower.rule_of(image))
    lower.apply(gradient_of(lower, torch.arange(40 * PARTS), 1))
    assert torch.equal(lower.store.ordered()[0], bucket.store.ordered()[0])


# Eviction


def test_rows_age_by_the_steps_since_their_last_gradient() -> None:
    (bucket,) = buckets_of(make_plan([table(evict="age:steps=3,every=2")], 1))
    for step, ids in enumerate([[1, 2, 3], [2], [3], [], [2], []]):
        bucket.apply(gradient_of(bucket, torch.tensor(ids, dtype=torch.int64), step))
        there = set(bucket.store.ordered()[0].tolist())
        # At the end of steps 3 and 5: 1 had its last gradient in step 0, 3 in step 2, 2 in step 4.
        assert there == ({1, 2, 3} if step < 3 else {2, 3} if step < 5 else {2})
    assert bucket.population.evicted == 2
    assert bucket.version == bucket.step == 6


def test_rows_with_a_small_norm_go_however_they_lie() -> None:
    (bucket,) = buckets_of(make_plan([table(evict="norm:least=0.05,every=1")], 1))
    ids = torch.arange(3000)
    bucket.apply(gradient_of(bucket, ids, 0))
    (free,) = buckets_of(make_plan([table()], 1))
    free.apply(gradient_of(free, ids, 0))
    norms = free.rows(ids, 1).double().norm(dim=1)
    assert torch.equal(bucket.store.find(ids) >= 0, norms >= 0.05) and 0 < bucket.population.evicted < 3000
    assert torch.equal(bucket.rows(ids, 1)[norms >= 0.05], free.rows(ids, 1)[norms >= 0.05])


@pytest.mark.parametrize("memory_rows", [0, 9])
@pytest.mark.parametrize("bounds", BOUNDS, ids=str)
@given(steps=STEPS, servers=st.integers(2, 4))
def test_both_steps_are_read_and_servers_share_a_table_alike(
    bounds: dict[str, Any], memory_rows: int, steps: list[list[int]], servers: int
) -> None:
    """Wherever rows are: one process has them in memory at first."""
    ids = torch.arange(61)
    (one,) = buckets_of(make_plan([table(**bounds)], 1))
    bounds = bounds | {"memory_rows": memory_rows}
    several = buckets_of(make_plan([table(**bounds)], servers))
    before = one.rows(ids, 0)
    for step, chosen in enumerate(steps):
        named = torch.tensor(chosen, dtype=torch.int64)
        changed = one.compute(gradient_of(one, named, step))
        # Computed, and not published yet.
        assert torch.equal(one.rows(ids, step), before)
        one.publish(changed)
        now = one.rows(ids, step + 1)
        assert changed or torch.equal(now, before)
        assert torch.equal(one.rows(ids, step), before)
        for bucket in several:
            bucket.apply(gradient_of(bucket, named, step))
        # As a standby's copy has it.
        image, previous = one.image(), one.previous()
        (copy,) = buckets_of(make_plan([table(**bounds)], 1))
        copy.restore(image, copy.rule_of(image), previous=previous)
        assert torch.equal(copy.rows(ids, step + 1), now) and torch.equal(copy.rows(ids, step), before)
        one, before = copy if step % 2 else one, now
    images = [bucket.image() for bucket in several]
    for name, value in one.image().tensors.items():
        assert torch.equal(torch.cat([image.tensors[name] for image in images]), value), name


@pytest.mark.parametrize("rule", ["sgd", "rowwise-adagrad", "adam", "ftrl:lr=0.1"])
@pytest.mark.parametrize("bounds", [{}, *BOUNDS], ids=str)
@given(
    changes=st.lists(
        st.tuples(st.sampled_from(["step", "step", "read", "nothing", "restore"]), IDS.map(sorted)), max_size=20
    )
)
def test_rows_on_disk_are_the_rows_that_they_would_be_in_memory(
    rule: str, bounds: dict[str, Any], changes: list[tuple[str, list[int]]]
) -> None:
    def made(memory_rows: int) -> TableBucket:
        tensor = dataclasses.replace(table(**bounds, memory_rows=memory_rows), rule=rule)
        (bucket,) = buckets_of(make_plan([tensor], 1))
        return bucket

    warm, part = made(0), made(9)
    for number, (what, chosen) in enumerate(changes):
        ids = torch.tensor(chosen, dtype=torch.int64)
        if what == "restore":
            # Each from what the other has, as from a checkpoint, or as a standby.
            images, befores = [one.image() for one in (warm, part)], [one.previous() for one in (warm, part)]
            warm, part = made(0), made(9)
            for one, image, before in zip((part, warm), images, befores, strict=True):
                one.restore(image, one.rule_of(image), previous=before)
        elif what != "read":
            for one in (warm, part):
                one.apply(gradient_of(one, ids if what == "step" else ids[:0], number))
            assert torch.equal(warm.values, part.values)
        for step in {warm.step, max(warm.oldest, warm.step - 1)}:
            assert torch.equal(warm.rows(ids, step), part.rows(ids, step))
        assert len(warm.store) == len(part.store)
        assert part.counts()["rows"] - part.counts()["disk_rows"] <= 9 + MOST
        for name, value in warm.image().tensors.items():
            assert torch.equal(bits(part.image().tensors[name]), bits(value)), name


@contextlib.contextmanager
def files_of(nbytes: int) -> Iterator[None]:
    """Refuse this process files of more bytes, as a full disk does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("reads", [False, True])
def test_a_full_disk_is_told_and_loses_no_row(reads: bool, tmp_path: Path) -> None:
    tensor = spec("users", (PARTS, 500), kind=TensorKind.TABLE, rule="adam", init="uniform", memory_rows=PARTS)
    (part,) = buckets_of(make_plan([tensor], 1), folder=tmp_path)
    (warm,) = buckets_of(make_plan([dataclasses.replace(tensor, memory_rows=0)], 1))
    ids = torch.arange(3000).split(300)

    def push(number: int) -> None:
        for bucket in (part, warm):
            bucket.apply(Partial(pack(ids[number], torch.ones(300, 500)), (True,), dim=500))

    def fill() -> None:
        for number in range(5, 10):
            if reads:
                part.rows(ids[number % 5], part.step)
            else:
                push(number)

    for number in range(5):
        push(number)
    with files_of(part.counts()["disk_bytes"]), pytest.raises(DiskError) as told:
        fill()
    words = rf"table 'users' can't keep rows beyond its memory_rows in {tmp_path}, where they take [0-9,]+ bytes: "
    assert re.match(words + r"File too large\. Make room there, .* --cold-dir, .* --resume", str(told.value))
    assert part.step == warm.step and not [*tmp_path.iterdir()]
    for name, value in warm.image().tensors.items():
        assert torch.equal(part.image().tensors[name], value), name


def bits(values: Tensor) -> Tensor:
    return values.view(torch.int32) if values.dtype is torch.float32 else values


def test_a_row_of_the_step_before_may_be_missing_only_where_rows_are_evicted() -> None:
    before = pack(torch.tensor([5]), torch.zeros(1, DIM))
    for bounds, right in (({}, False), ({"evict": "age"}, True)):
        (bucket,) = buckets_of(make_plan([table(**bounds)], 1))
        image = bucket.image()
        if right:
            bucket.restore(image, None, previous=before)
        else:
            with pytest.raises(ProtocolError, match="has rows that its own lacks"):
                bucket.restore(image, None, previous=before)


def test_what_rows_on_disk_need_is_said_before_there_are_any(tmp_path: Path) -> None:
    tensors = [table(), table(memory_rows=PARTS)]
    cold.check(tensors, tmp_path)
    assert not [*tmp_path.iterdir()]
    with pytest.raises(UsageError, match=rf"in {tmp_path}/none, .*: No such file or directory\. Make room there"):
        cold.check(tensors, tmp_path / "none")
    # All are in memory where nobody asks for a disk.
    assert type(buckets_of(make_plan([table()], 1))[0].store) is RowStore


# What others see


def test_a_table_without_bounds_is_written_as_before_there_were_any() -> None:
    made = EmbeddingTable("users", DIM, admit="after:count=2", evict="age:steps=5", max_rows=5000)
    plain, bounded = table_spec(EmbeddingTable("users", DIM)), table_spec(made)
    assert (plain.admit, plain.evict, plain.max_rows) == ("", "", 0)
    (written,) = job_to_json(job_of((plain,)))["tensors"]
    assert not {"admit", "evict", "max_rows"} & written.keys()
    assert {field.name for field, _ in tensor_to_proto(plain).ListFields()} & {"admit", "evict", "max_rows"} == set()
    assert set(buckets_of(make_plan([plain], 1))[0].image().tensors) == {"value", "ids", "sum"}
    assert bounded.admit == "after:count=2" and bounded.evict == "age:steps=5" and bounded.max_rows == 5000
    for one in (plain, bounded):
        assert tensor_from_proto(tensor_to_proto(one)) == one
        job: JobSpec = job_of((one,))
        assert job_from_json(job_to_json(job)) == job


def test_counts_of_tables_are_told_with_every_heartbeat() -> None:
    metrics, store = Metrics("ps", "ps/0"), ParameterStore(device=torch.device("cpu"), pool_threads=1)
    counts = {"rows": 5, "below_admission": 9, "cap": 1, "evicted": 2}
    counts |= {"memory_hits": 7, "memory_misses": 3, "disk_rows": 2, "disk_bytes": 4096}
    held = parameter_server_pb2.TableStatus(table="users", **counts)
    reply = parameter_server_pb2.PsStatusReply(shards=[parameter_server_pb2.ShardStatus(tables=[held])])
    observe = Meter(metrics, store).observed(lambda: reply)

    def told(name: str, **labels: str) -> float | None:
        labels |= {"task": "ps/0", "shard": "0", "table": "users"}
        return metrics.registry.get_sample_value(f"shardline_table_{name}", labels)

    for rows, cap in ((5, 1), (4, 1), (4, 3)):
        reply.shards[0].tables[0].rows, reply.shards[0].tables[0].cap = rows, cap
        observe()
        assert told("rows") == rows and told("evicted_total") == 2
        assert (told("memory_total", result="hit"), told("memory_total", result="miss")) == (7, 3)
        assert (told("disk_rows"), told("disk_bytes")) == (2, 4096)
        assert told("refused_total", reason="below_admission") == 9
        assert told("refused_total", reason="cap") == cap
    store.close()
