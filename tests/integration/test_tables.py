"""Embedding tables on real servers: the bits of one process, whoever computes, and whoever is lost."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import TensorDataset

import shardline
from shardline.checkpoint import CheckpointStore
from shardline.consistency.server import StepWanted
from shardline.core.image import BucketImage
from shardline.core.rows import PARTS
from shardline.errors import DiskError, JobError, NonFiniteError
from shardline.job import Job
from shardline.nn import Embedding, EmbeddingBag, EmbeddingBagCollection, EmbeddingTable, tables_of
from shardline.server.pull_sender import encode_rows
from shardline.storage.table import TableBucket
from shardline.testing import ReferenceResult, reference
from shardline.update.rows.turnover import After
from shardline_chief.io.summary import tables
from shardline_lab.comparison.plain import PlainTraining
from tests.support.checkpoints import cut_of
from tests.support.cluster import Cluster, assert_same_end, same_bits
from tests.support.jobs import make_job
from tests.support.standbys import Protected

DIM = 4
ROWWISE = "rowwise-adagrad:lr=0.1"


def clicks() -> TensorDataset:
    """Bags of three ids, often the same ones, negative and large ones among them; and what to tell from them."""
    generator = torch.Generator().manual_seed(3)
    ids = (torch.rand(96, 3, generator=generator) ** 3 * 40).long() * 0x123456789ABCD - 5
    return TensorDataset(ids, (ids.sum(1) % 3 == 0).float())


def with_memory(model: Callable[[], nn.Module], memory_rows: int) -> nn.Module:
    """The model with so few rows in memory, fewer than a script may ask for; 0 = all."""
    made = model()
    for table in tables_of(made).values():
        table.memory_rows = memory_rows
    return made


class Clicks(nn.Module):
    """Two layers over one table, one over another, and three features with one pull, two of which share a table."""

    def __init__(self, rule: str = ROWWISE, num_ids: int | None = None) -> None:
        super().__init__()
        shared = EmbeddingTable("things", DIM, rule=rule, num_ids=num_ids)
        self.each, self.bag = Embedding(shared), EmbeddingBag(shared, mode="sum")
        self.other = EmbeddingBag(EmbeddingTable("others", 3, rule="sgd:lr=0.2", init="normal:std=0.1"))
        far = EmbeddingTable("far", 2)
        self.features = EmbeddingBagCollection({"a": far, "b": far, "c": shared})
        self.last = nn.Linear(3 * DIM + DIM + 3 + 2 + 2 + DIM, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        parts = [self.each(ids).flatten(1), self.bag(ids), self.other(ids[:, :2])]
        offsets = torch.arange(0, 2 * len(ids), 2)
        parts += self.features({"a": ids[:, :1], "b": (ids[:, 1:].flatten(), offsets), "c": ids + 1}).values()
        found: torch.Tensor = self.last(torch.cat(parts, 1)).squeeze(1)
        return found


def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(model(batch[0]), batch[1])


def bag_loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    return functional.binary_cross_entropy_with_logits(model(batch[0]).squeeze(1), batch[1])


def table_job(
    rule: str = ROWWISE, memory_rows: int = 0, model: Callable[[], nn.Module] | None = None, **changes: Any
) -> Job:
    made = functools.partial(with_memory, model or functools.partial(Clicks, rule), memory_rows)
    return make_job(**{"model": made, "dataset": clicks, "loss": loss, "steps": 6, **changes})


class Bounded(nn.Module):
    """Tables that refuse ids and give rows up: by chance and by age; after two steps, by norm and at a cap."""

    def __init__(self) -> None:
        super().__init__()
        aged = EmbeddingTable("aged", 2, admit="probability:p=0.5", evict="age:steps=2,every=2")
        bounds: dict[str, Any] = {"admit": "after:count=2,ids=1000", "evict": "norm:least=0.08,every=3"}
        few = EmbeddingTable("few", 3, init="normal:std=0.05", max_rows=PARTS, **bounds)
        self.aged, self.few, self.last = EmbeddingBag(aged), EmbeddingBag(few), nn.Linear(5, 1)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.last(torch.cat([self.aged(ids), self.few(ids)], 1)).squeeze(1)
        return found


def many() -> TensorDataset:
    generator = torch.Generator().manual_seed(4)
    ids = (torch.rand(96, 100, generator=generator) ** 2 * 3000).long()
    return TensorDataset(ids, (ids.sum(1) % 3 == 0).float())


def bounded_job(memory_rows: int = 0) -> Job:
    return table_job(model=Bounded, dataset=many, steps=8, memory_rows=memory_rows)


@functools.cache
def bounded_end() -> ReferenceResult:
    return reference(bounded_job())


def assert_same_tables(cluster: Cluster, expected: ReferenceResult) -> None:
    """As assert_same_end(), and all else that servers keep of tables: states, ages, and counted ids."""
    assert_same_end(cluster.state(), expected)
    held: dict[str, list[BucketImage]] = {name: [] for name in expected.tables}
    for shard, images in zip(cluster.plan.shards, cluster.images(), strict=True):
        for bucket, image in zip(shard.buckets, images, strict=True):
            name = cluster.plan.tensors[bucket.slices[0].tensor].name
            held.get(name, []).append(image)
    for name, whole in expected.tables.items():
        for key, value in whole.tensors.items():
            assert same_bits(torch.cat([image.tensors[key] for image in held[name]]), value), (name, key)


@functools.cache
def expected_end(rule: str = ROWWISE) -> ReferenceResult:
    return reference(table_job(rule))


some_in_memory = pytest.mark.parametrize("memory_rows", [0, 12])


@some_in_memory
@pytest.mark.parametrize("lane", ["grpc", "tcp"])
@pytest.mark.parametrize("ownership", [[[0, 1, 2]], [[2], [0, 1]]], ids=str)
def test_the_bits_are_those_of_one_process(ownership: list[list[int]], lane: str, memory_rows: int) -> None:
    with Cluster(table_job(memory_rows=memory_rows), ps=3, lane=lane) as cluster:
        assert len(cluster.plan.shards) == 3
        cluster.train(ownership)
        assert_same_end(cluster.state(), expected_end())
        assert not cluster.fallbacks


@some_in_memory
@pytest.mark.parametrize("rule", ["sgd", "adagrad", "adam:lr=0.05", "ftrl:l1=0.001"])
def test_every_rule_has_the_bits_of_one_process(rule: str, memory_rows: int) -> None:
    with Cluster(table_job(rule, memory_rows), ps=2) as cluster:
        cluster.train([[0], [1, 2]])
        assert_same_end(cluster.state(), expected_end(rule))


@pytest.mark.parametrize("consistency", ["async", "ssp:slack=2", "softsync:n=1"])
def test_one_worker_that_pushes_for_itself_has_the_bits_of_one_process(consistency: str) -> None:
    job = table_job(consistency=consistency, replicas=1)
    with Cluster(job, ps=2, lane="tcp") as cluster:
        cluster.worker(0).run_async(range(job.steps))
        assert_same_end(cluster.state(), reference(job))


def test_steps_of_the_first_replicas_are_those_of_one_process() -> None:
    job = table_job(consistency="sync:spares=1", replicas=3)
    with Cluster(job, ps=2) as cluster:
        cluster.train([[0, 1, 2]])
        assert_same_end(cluster.state(), reference(job, choices=[(0, 1)] * job.steps))


@pytest.mark.parametrize(
    ("codecs", "exact"),
    [
        ({"codec": "fp16"}, False),
        ({"codec_up": "int8", "codec_down": "bf16"}, False),
        ({"codec": "lossless"}, True),
        ({"codec_up": "topk:ratio=0.1"}, None),
        ({"codec_tensors": {"things": "bf16"}}, False),
    ],
    ids=str,
)
def test_codecs_encode_rows_and_the_bits_depend_on_nobody(codecs: dict[str, Any], exact: bool | None) -> None:
    job = table_job(**codecs)
    ends = []
    for lane, ownership in (("grpc", [[0, 1, 2]]), ("tcp", [[0], [2, 1]])):
        with Cluster(job, ps=2, lane=lane) as cluster:
            cluster.train(ownership)
            ends.append(cluster.state().params)
    assert ends[0].keys() == ends[1].keys() and all(same_bits(value, ends[1][name]) for name, value in ends[0].items())
    if exact is not None:
        assert same_bits(ends[0]["things.rows"], expected_end().params["things.rows"]) is exact


def wide(dim: int) -> nn.Module:
    """A bag whose rows are long enough for blocks of their own."""
    return nn.Sequential(EmbeddingBag(EmbeddingTable("wide", dim, rule=ROWWISE)), nn.Linear(dim, 1))


@pytest.mark.parametrize(
    ("codec", "dim", "rounds"), [("int8", 16, True), ("fp8", 24, True), ("int8", 512, True), ("qsgd", 16, False)]
)
def test_rounded_rows_do_not_depend_on_the_servers_that_share_them(codec: str, dim: int, rounds: bool) -> None:
    # The rest of the model as it is: quanta of a dense tensor are the same on any servers anyway.
    settings = {"model": functools.partial(wide, dim), "dataset": clicks, "loss": bag_loss, "steps": 4}
    job = make_job(**settings, codec_tensors={"wide": codec})
    ends, sent = [], []
    for ps, ownership in ((1, [[0, 1, 2]]), (3, [[0], [2, 1]])):
        with Cluster(job, ps=ps, lane="tcp") as cluster:
            cluster.train(ownership)
            ends.append(cluster.state().params["wide.rows"])
            sent.append(sum(host.store.traffic.push_wire_bytes for host in cluster.hosts))
    assert same_bits(*ends)
    plain = reference(dataclasses.replace(job, codec_tensors={})).params["wide.rows"]
    assert same_bits(ends[0], plain) is not rounds
    with Cluster(dataclasses.replace(job, codec_tensors={}), ps=1, lane="tcp") as cluster:
        cluster.train([[0, 1, 2]])
        assert (sent[0] < cluster.hosts[0].store.traffic.push_wire_bytes) is rounds


@some_in_memory
@pytest.mark.parametrize("ownership", [[[0, 1, 2]], [[2], [0, 1]]], ids=str)
def test_the_ids_that_get_and_keep_rows_are_those_of_one_process(ownership: list[list[int]], memory_rows: int) -> None:
    with Cluster(bounded_job(memory_rows), ps=3) as cluster:
        cluster.train(ownership)
        assert_same_tables(cluster, bounded_end())
        # As they are told at the end of a run.
        found = tables([shard for control in cluster.controls for shard in control.status().shards])
        assert found.keys() == {"aged", "few"}
        for name, counts in found.items():
            assert counts["rows"] == len(bounded_end().params[f"{name}.ids"])
            assert counts["below_admission"] > 1000 and counts["evicted"] > 30
            assert (counts["cap"] > 100) == (name == "few")
            for what in ("memory_hits", "memory_misses", "disk_rows", "disk_bytes"):
                assert (counts[what] > 10) == bool(memory_rows), what


@some_in_memory
@pytest.mark.parametrize("lost", [0, 1])
def test_a_standby_has_counted_the_same_ids(lost: int, memory_rows: int) -> None:
    with Protected(bounded_job(memory_rows), ps=2) as cluster:
        cluster.await_synced()
        cluster.train_through([[0, 2], [1]], cluster.at_step(3, lost, functools.partial(cluster.fail_over, lost)))
        assert_same_tables(cluster, bounded_end())


@pytest.mark.parametrize("memory_rows", [(0, 0), (0, 12), (12, 0)], ids=str)
@pytest.mark.parametrize(("before", "after"), [(1, 3), (3, 2)])
def test_tables_with_bounds_go_onto_another_number_of_servers(
    before: int, after: int, memory_rows: tuple[int, int], tmp_path: Path
) -> None:
    store = CheckpointStore(tmp_path, keep=1)
    with Cluster(bounded_job(memory_rows[0]), ps=before) as cluster:
        cluster.train([[0, 1, 2]], steps=3)
        images = dict(enumerate(cluster.images()))
        store.commit(cut_of(cluster.spec, step=3, plan=cluster.plan, images=images))
    with Cluster(bounded_job(memory_rows[1]), ps=after) as cluster, contextlib.closing(store.open(3)) as stored:
        cluster.configure_anew(cluster.timeline + 1)
        for shard, control in enumerate(cluster.controls):
            control.restore(cluster.timeline, shard, functools.partial(stored.images, cluster.plan, shard))
        for control in cluster.controls:
            control.activate(cluster.timeline)
        cluster.train([[0, 1], [2]])
        assert_same_tables(cluster, bounded_end())
        again = reference(bounded_job(), start=reference(bounded_job(), 3))
        assert_same_tables(cluster, again)


@some_in_memory
@pytest.mark.parametrize("lost", [0, 1])
def test_a_server_that_is_lost_costs_no_step_and_no_bit(lost: int, memory_rows: int) -> None:
    with Protected(table_job(memory_rows=memory_rows), ps=2) as cluster:
        cluster.await_synced()
        cluster.train_through([[0, 2], [1]], cluster.at_step(2, lost, functools.partial(cluster.fail_over, lost)))
        assert_same_end(cluster.state(), expected_end())


def test_a_worker_that_comes_back_to_a_step_that_others_have_closed_gets_its_rows() -> None:
    """Pushes of one shard may count while those of another don't: the next life needs both steps' rows."""
    with Cluster(table_job(), ps=2) as cluster:
        first, second = cluster.worker(0), cluster.worker(1)
        cluster.together([lambda: first.run([0, 2], 3), lambda: second.run([1], 3)])
        held = [shard.buckets[-1] for shard in cluster.shards]
        for bucket in held:
            assert isinstance(bucket, TableBucket)
            ids = bucket.store.ordered()[0]
            with bucket.lock:
                now, before = bucket.rows(ids, 3), bucket.rows(ids, 2)
            assert (now != before).any(), "no row has changed in the last step"
        with Cluster(table_job(), ps=2) as other:
            other.train([[0, 1, 2]], steps=2)
            for mine, bucket in zip(held, (shard.buckets[-1] for shard in other.shards), strict=True):
                assert isinstance(mine, TableBucket) and isinstance(bucket, TableBucket)
                ids = mine.store.ordered()[0]
                with mine.lock, bucket.lock:
                    assert same_bits(mine.rows(ids, 2), bucket.rows(ids, 2))
        again = cluster.worker(0, incarnation=2)
        cluster.together([lambda: again.run([0, 2], 6), lambda: second.run([1], 6)])
        assert_same_end(cluster.state(), expected_end())


def test_a_read_for_which_the_disk_has_no_room_ends_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(ids: torch.Tensor, step: int) -> torch.Tensor:
        raise DiskError("table 'far' can't keep rows")

    failures = list[Exception]()
    with Cluster(table_job(memory_rows=12), ps=1) as cluster:
        store, (shard,) = cluster.hosts[0].store, cluster.shards
        store.on_failure = failures.append
        cluster.train([[0, 1, 2]], steps=1)
        monkeypatch.setattr(shard.buckets[-1], "rows", full)
        want, number = StepWanted(step=1, task="worker/0"), shard.buckets[-1].number
        with pytest.raises(DiskError) as told:
            encode_rows(shard, number, want=want, coding=store.coding, ids=torch.arange(3))
    assert failures == [told.value]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"clip_norm": 1.0}, "global norm"),
        ({"cadence": "local-sgd:every=2"}, "cadence local-sgd"),
        ({"topology": "local-sum"}, "topology='flat'"),
        ({"apply": "worker"}, "apply='worker'"),
    ],
)
def test_methods_that_need_dense_tensors_are_refused(changes: dict[str, Any], words: str) -> None:
    job = table_job(**changes)
    with pytest.raises(JobError, match=f"embedding table 'things'.*{words}"):
        job.spec(job.build_model())


def test_a_comparison_with_plain_pytorch_is_refused() -> None:
    with pytest.raises(JobError, match="embedding tables, whose rows plain PyTorch can't train"):
        PlainTraining(table_job(), torch.device("cpu"))


def test_a_row_with_nan_is_named_by_its_table_and_id() -> None:
    def broken(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        assert isinstance(model, Clicks)
        row, _ = model.each.table.look_up(torch.tensor([77]))
        return loss(model, batch) + (row * torch.nan).nan_to_num().sum() + (row - row).sqrt().sum() * 0

    with (
        Cluster(table_job(loss=broken), ps=2) as cluster,
        pytest.raises(NonFiniteError, match=r"the gradient of 'things\[77\]' has NaN"),
    ):
        cluster.train([[0, 1, 2]])


def test_ids_that_are_none_are_refused() -> None:
    table = EmbeddingTable("users", 2, num_ids=10)
    for ids, words in (
        (torch.tensor([1.0]), "ids are torch.float32"),
        (torch.tensor([3, 10]), "id 10 is not within 0 to 9"),
        (torch.tensor([-1]), "id -1"),
    ):
        with pytest.raises(JobError, match=f"table 'users': {words}"):
            table.look_up(ids)
    with pytest.raises(JobError, match="two tables named 'users'"):
        make_job(model=lambda: nn.ModuleList([table, EmbeddingTable("users", 2), nn.Linear(1, 1)])).spec(
            nn.ModuleList([table, EmbeddingTable("users", 2), nn.Linear(1, 1)])
        )


def test_zero_grad_drops_gradients_of_rows_and_keeps_passes_that_go_on() -> None:
    with shardline.connect() as session:
        model, (ids, _) = Clicks(), clicks()[:8]
        optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
        rows = []
        for step in session.steps(2):
            if step == 0:
                model(ids).sum().backward()
            found = model(ids).sum()
            optimizer.zero_grad()
            found.backward()
            packed = model.each.table.take()
            assert packed is not None
            rows.append(packed.view(torch.int32))
            optimizer.zero_grad()
            optimizer.step()
    assert torch.equal(*rows), "the gradient of a pass before zero_grad() is in the step's"


def test_a_compiled_model_has_the_gradients_of_the_model() -> None:
    ids, packed = clicks()[:8][0], []
    for compiled in (False, True):
        model = Clicks()
        for parameter in model.parameters():
            nn.init.constant_(parameter, 0.5)
        run = torch.compile(model, backend="eager") if compiled else model
        run(ids).sum().backward()
        taken = [table.take() for table in tables_of(model).values()]
        packed.append([held.view(torch.int32) for held in taken if held is not None])
    assert len(packed[0]) == 3 and all(map(torch.equal, *packed))


def test_a_step_moves_the_rows_that_its_batch_names_and_no_others() -> None:
    """Of 10 million ids one percent: 8U + 4UD bytes pushed, 4UD pulled, and the linear layer's."""
    rows, dim, steps = 100_000, 8, 3
    ids = torch.arange(rows) * 97 + torch.arange(steps)[:, None]

    def model() -> nn.Module:
        table = EmbeddingTable("wide", dim, num_ids=10_000_000)
        return nn.Sequential(EmbeddingBag(table, mode="sum"), nn.Linear(dim, 1))

    job = make_job(
        model=model,
        dataset=lambda: TensorDataset(ids, torch.zeros(steps)),
        loss=lambda model, batch: model(batch[0]).square().mean(),
        batch_size=1,
        replicas=1,
        steps=steps,
    )
    with Cluster(job, ps=2, lane="tcp") as cluster:
        cluster.train([[0]])
        tallies = [host.store.traffic for host in cluster.hosts]
    named = steps * rows
    assert sum(tally.push_wire_bytes for tally in tallies) == pytest.approx(named * (8 + 4 * dim), rel=0.05)
    assert sum(tally.pull_wire_bytes for tally in tallies) == pytest.approx(named * 4 * dim, rel=0.05)


def test_a_plain_embedding_with_sparse_gradients_sends_what_is_not_zero() -> None:
    rows, dim = 5000, 8

    def model() -> nn.Module:
        return nn.Sequential(nn.EmbeddingBag(rows, dim, mode="sum", sparse=True), nn.Linear(dim, 1))

    job = make_job(model=model, dataset=lambda: TensorDataset(clicks()[:][0] % rows, clicks()[:][1]), loss=bag_loss)
    with Cluster(job, ps=2, lane="tcp") as cluster:
        cluster.train([[0, 1], [2]])
        pushed = sum(host.store.traffic.push_wire_bytes for host in cluster.hosts)
        assert_same_end(cluster.state(), reference(job))
    assert pushed < 0.1 * 3 * job.steps * rows * dim * 4
    for changes, codec in (
        ({"codec": "bf16"}, ""),
        ({"codec_tensors": {"0.weight": "int8"}}, "int8"),
        ({"model": lambda: frozen(model())}, ""),
    ):
        other = dataclasses.replace(job, **changes)
        assert {tensor.name: tensor.codec for tensor in other.spec(other.build_model()).tensors}["0.weight"] == codec


def frozen(model: nn.Module) -> nn.Module:
    next(model.parameters()).requires_grad_(False)
    return model


def test_what_a_table_can_not_be_is_said_with_its_name() -> None:
    with pytest.raises(JobError, match=r"table 'users': rule 'rowise-adagrad' does not exist.*did you mean"):
        EmbeddingTable("users", 2, rule="rowise-adagrad")
    with pytest.raises(JobError, match=r"table 'users': admit 'aftr' does not exist.*did you mean 'after'"):
        EmbeddingTable("users", 2, admit="aftr:count=2")
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"evict": "age:steps=0"}, "eviction age: steps is 0; give a whole number at least 1"),
        ({"evict": "norm:every=0"}, "eviction norm: every is 0"),
        ({"admit": "after:count=256"}, "admission after: count is 256; give a whole number from 1 to 255"),
        ({"admit": "after:ids=0"}, "admission after: ids is 0"),
        ({"admit": "probability:p=1.5"}, "admission probability: p is 1.5; give a number from 0 to 1"),
        *(
            ({name: most}, f"has {name}={most}; its 1024 parts share them: give a whole number from 1024 to")
            for name in ("max_rows", "memory_rows")
            for most in (0, 1023, -1, 1 << 62, 1 << 63, 5000.0, True)
        ),
    ]
    for bounds, words in wrong:
        with pytest.raises(JobError, match=re.escape(words)):
            EmbeddingTable("users", 2, **bounds)
    job = make_job(model=lambda: Embedding(EmbeddingTable("users", 2)))
    with pytest.raises(JobError, match="mode is 'maximum'; it must be"):
        EmbeddingBag(EmbeddingTable("users", 2), mode="maximum")
    with pytest.raises(JobError, match=r"admission after: ids is 1000\.5; give a whole number from 1 to"):
        After(ids=1000.5)  # type: ignore[arg-type]
    with pytest.raises(JobError, match="beside its embedding tables it needs one"):
        job.spec(job.build_model())
