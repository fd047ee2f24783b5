"""Layers that workers share: which ones, their parts, who exchanges what, and how the workers meet."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import re
import socket
import threading
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from torch import nn
from torch.utils.data import TensorDataset

import shardline_pipeline as pipeline
from shardline.client.overlap.gate import StepAgain
from shardline.consistency.assignment import assign
from shardline.core.placement import Post
from shardline.core.plan import make_plan
from shardline.core.spec import JobSpec, TensorSpec, joined
from shardline.core.timeouts import Timeouts
from shardline.errors import JobError, UnreachableError, UsageError
from shardline.host.awake import awake_s
from shardline.job import Job
from shardline.testing import reference
from shardline_lab.simulator.simulation import Setup
from shardline_pipeline.division import assign_teams
from shardline_pipeline.model import Pipeline
from shardline_pipeline.tensor_parallel import cut, shared_layers
from shardline_pipeline.tensor_parallel.meeting import Meeting, Place, hear, name_of, team_key, tell
from shardline_pipeline.tensor_parallel.team import Team, TeamStore, check_group


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.ModuleDict({"up": nn.Linear(width, 4 * width), "down": nn.Linear(4 * width, width)})

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        inner = torch.relu(self.mlp["up"](self.norm(values)))
        return values + self.mlp["down"](inner)  # type: ignore[no-any-return]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(12, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(8, 6)


def job_of(model: nn.Module, shared: dict[str, str], **fields: object) -> Job:
    given = {"batch_size": 2, "steps": 1, "optimizer": "SGD", "optimizer_args": {"lr": 0.1}, **fields}
    return Job(
        model=lambda: model,
        loss=lambda model, batch: model(batch[0]).sum(),
        dataset=TensorDataset(torch.zeros(8, 8)),
        tensor_parallel=shared,
        **given,  # type: ignore[arg-type]
    )


def spec_of(model: nn.Module, shared: dict[str, str], **fields: object) -> JobSpec:
    return job_of(model, shared, **fields).spec(model)


BOTH = {"blocks.*.mlp": "colwise/rowwise"}


@pytest.mark.parametrize(
    "choices",
    [
        pytest.param(BOTH, id="a module"),
        pytest.param({"blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise"}, id="its layers"),
        pytest.param({**BOTH, "*.*.*.up": "gathered"}, id="the first pattern counts"),
    ],
)
def test_patterns_name_layers_or_modules_with_layers(choices: dict[str, str]) -> None:
    assert list(map(str, shared_layers(Net(), choices))) == [
        f"blocks.{number}.mlp.{name} (Linear, {style})"
        for number in (0, 1)
        for name, style in (("up", "colwise"), ("down", "rowwise"))
    ]


@pytest.mark.parametrize(
    ("choices", "sentence"),
    [
        ({"blocks.*.mlp": "colwise/rowise"}, r"tensor_parallel\['blocks.\*.mlp'\] is 'colwise/rowise'; choose from"),
        ({"layers.*": "colwise"}, r"pattern 'layers.\*', which matches no module of the model; it has words, blocks.0"),
        ({"blocks.*.norm": "colwise"}, "matches 'blocks.0.norm', which is a LayerNorm; only torch.nn.Linear and"),
        ({"blocks.*": "colwise"}, "names 1 styles, but 'blocks.0' has 2 layers with weights, blocks.0.mlp.up"),
        ({"head": "colwise"}, r"head \(Linear, colwise\) leaves its output in parts, but no rowwise layer"),
        ({"head": "rowwise"}, r"head \(Linear, rowwise\) takes its input in parts, but no colwise layer"),
        ({"blocks.0.mlp.up": "colwise", "head": "gathered"}, r"blocks.0.mlp.up \(Linear, colwise\) leaves its output"),
        ({"words": "colwise"}, r"words \(Embedding, colwise\) leaves its output in parts, which an Embedding can't"),
    ],
)
def test_what_cant_be_shared_is_refused_with_its_name(choices: dict[str, str], sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        spec_of(Net(), choices)


def test_parts_that_cross_stages_are_refused() -> None:
    model = Pipeline([nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)], stages=[2])
    with pytest.raises(
        JobError, match=r"0 \(Linear, colwise\) leaves its output in parts, but no rowwise layer of the"
    ):
        shared_layers(model, {"0": "colwise", "2": "rowwise"})


def test_traced_layers_are_refused() -> None:
    model = Pipeline.split(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), torch.zeros(2, 4), cuts=["1"])
    with pytest.raises(JobError, match=r"shares layers that are modules, but Pipeline.split traces those of its model"):
        shared_layers(model, {"*": "gathered"})


def tied() -> nn.Module:
    model = Net()
    model.blocks[1].mlp["up"].weight = model.blocks[0].mlp["up"].weight  # type: ignore[union-attr,index]
    return model


@pytest.mark.parametrize(
    ("model", "fields", "sentence"),
    [
        (
            Net(),
            {"tensor_ranks": 3},
            r"can't be shared by 3 workers: 'blocks.0.mlp.up.weight' has shape \(32, 8\), and 3",
        ),
        (tied(), {}, "'blocks.0.mlp.up.weight' is also 'blocks.1.mlp.up.weight', and tied weights stay whole"),
        (Net(), {"optimizer": "Adafactor"}, "update rule or codec needs 'blocks.0.mlp.up.weight' whole"),
        (Net(), {"consistency": "async"}, "tensor_parallel over 2 ranks takes every step with all parts of all"),
        (Net(), {"cadence": "local-sgd:every=2"}, "needs workers that have the whole model, but those of tensor_par"),
        (Net(), {"apply": "worker"}, "runs the optimizer on whole tensors, but those of tensor_parallel over 2"),
        (Net(), {"codec": "topk"}, "remembers what it has sent, .* with tensor_parallel over 2 ranks choose a codec"),
        (Net(), {"nan_policy": "skip"}, "those of tensor_parallel over 2 ranks see a part; choose nan_policy='stop'"),
        (Net(), {"tensor_ranks": 0}, "tensor_ranks is 0; give a whole number >= 1"),
    ],
)
def test_what_does_not_work_with_shared_layers_is_refused(
    model: nn.Module, fields: dict[str, object], sentence: str
) -> None:
    with pytest.raises(JobError, match=sentence):
        spec_of(model, BOTH, **fields)


def test_one_rank_means_that_nothing_is_shared() -> None:
    assert spec_of(Net(), BOTH, tensor_ranks=1).tensors == spec_of(Net(), {}).tensors


def test_one_process_does_not_claim_the_bits_of_ranks() -> None:
    with pytest.raises(JobError, match="a sum over ranks is rounded in another order; compare with the job with"):
        reference(job_of(Net(), BOTH))


def test_ranks_are_not_simulated() -> None:
    with pytest.raises(UsageError, match="layers that workers share can't be simulated; --set tensor_ranks=1"):
        Setup(job=spec_of(Net(), BOTH), workers=2, times=())


def test_the_parts_of_all_ranks_make_the_tensors_of_the_model() -> None:
    spec, whole = spec_of(Net(), {**BOTH, "words": "rowwise"}), spec_of(Net(), {})
    assert joined(spec.tensors) == whole.tensors
    shapes = {tensor.name: tensor.shape for tensor in spec.tensors}
    assert shapes["blocks.0.mlp.up.weight[1/2]"] == (16, 8) and shapes["blocks.0.mlp.up.bias[0/2]"] == (16,)
    assert shapes["blocks.0.mlp.down.weight[0/2]"] == (8, 16) and shapes["blocks.0.mlp.down.bias"] == (8,)
    assert shapes["words.weight[1/2]"] == (6, 8)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
def test_every_bucket_is_pushed_by_one_rank_for_each_replica_and_pulled_where_it_is_used(
    stages: int, ranks: int, replicas: int, shards: int
) -> None:
    layers = [nn.Sequential(nn.Linear(8, 12), nn.Linear(12, 8), nn.Linear(8, 8)) for _ in range(stages)]
    model = Pipeline(layers, stages=list(range(1, stages)))
    shared = {"*.0": "colwise", "*.1": "rowwise"}
    spec = spec_of(model, shared, tensor_ranks=ranks, replicas=replicas, pipeline="flush")
    plan = make_plan(spec.tensors, shards)
    assert (pipeline.stages(spec), pipeline.ranks(spec)) == (stages, ranks)
    pushed: dict[tuple[int, tuple[int, int]], int] = {}
    for unit in range(pipeline.units(spec)):
        rank, stage = divmod(unit // replicas, stages)
        assert unit == pipeline.unit_of(spec, stage, unit % replicas, rank)
        share = pipeline.share_of(spec, plan, [unit])
        for key in share.of(unit % replicas):
            pushed[unit % replicas, key] = pushed.get((unit % replicas, key), 0) + 1
        own = {spec.tensors[piece.tensor].name for s, b in share.keys for piece in plan.shards[s].buckets[b].slices}
        assert own == {
            one.name
            for one in spec.tensors
            if one.name[0] == str(stage) and one.part in (0, rank) and (not one.parts or one.part == rank)
        }
    every = {(s, b) for s, shard in enumerate(plan.shards) for b in range(len(shard.buckets))}
    assert pushed == {(replica, key): 1 for replica in range(replicas) for key in every}


def test_units_are_named_by_rank_and_stage() -> None:
    model = Pipeline([nn.Linear(8, 8), nn.Linear(8, 8)], stages=[1])
    spec = spec_of(model, {"*": "gathered"}, replicas=2, pipeline="flush")
    assert pipeline.named(spec, [4, 5]) == "rank 1 of stage 0 of replicas 0, 1"
    plain = spec_of(Net(), BOTH, replicas=2)
    assert pipeline.named(plain, [0, 1]) == "rank 0 of replicas 0, 1"


# Who works with whom

WORKERS = [f"worker/{number}" for number in range(9)]


def teams_of(assignment: dict[int, str], cells: int, ranks: int) -> list[tuple[str, ...]]:
    return [tuple(assignment[rank * cells + cell] for rank in range(ranks)) for cell in range(cells)]


@given(
    st.integers(1, 4),
    st.integers(2, 3),
    st.lists(st.sets(st.sampled_from(WORKERS), min_size=1), min_size=1, max_size=6),
    st.integers(1, 2),
)
def test_teams_are_whole_on_one_host_and_each_worker_has_one_rank(
    cells: int, ranks: int, history: list[set[str]], machines: int
) -> None:
    found: dict[int, str] = {}
    for alive in history:
        hosts = {worker: f"host{int(worker[-1]) % machines}" for worker in sorted(alive)}
        before, found = found, assign_teams(found, hosts, cells, ranks)
        possible = sum(list(hosts.values()).count(host) // ranks for host in set(hosts.values()))
        if not possible:
            assert found == {}
            continue
        teams = teams_of(found, cells, ranks)
        assert sorted(found) == list(range(cells * ranks))
        assert len(set(teams)) == min(cells, possible)
        assert all(len({hosts[worker] for worker in team}) == 1 for team in teams)
        assert len({worker for team in set(teams) for worker in team}) == len(set(teams)) * ranks
        counts = [teams.count(team) for team in set(teams)]
        assert max(counts) - min(counts) <= 1
        # Nothing moves where nothing has happened.
        assert assign_teams(found, hosts, cells, ranks) == found, before


def test_a_team_gets_another_member_in_the_place_of_the_lost_one() -> None:
    hosts = dict.fromkeys(WORKERS[:5], "here")
    before = assign_teams({}, hosts, 2, 2)
    assert teams_of(before, 2, 2) == [("worker/0", "worker/1"), ("worker/2", "worker/3")]
    del hosts["worker/2"]
    assert teams_of(assign_teams(before, hosts, 2, 2), 2, 2) == [("worker/0", "worker/1"), ("worker/4", "worker/3")]
    del hosts["worker/4"]
    alone = assign_teams(before, hosts, 2, 2)
    assert teams_of(alone, 2, 2) == [("worker/0", "worker/1"), ("worker/0", "worker/1")]
    assert assign_teams({}, hosts, 4, 1) == assign({}, list(hosts), 4)


def test_a_member_that_comes_back_on_another_host_is_replaced_or_its_team_dissolved() -> None:
    hosts = dict.fromkeys(WORKERS[:3], "here")
    before = assign_teams({}, hosts, 1, 2)
    assert teams_of(before, 1, 2) == [("worker/0", "worker/1")]
    assert teams_of(assign_teams(before, {**hosts, "worker/1": "there"}, 1, 2), 1, 2) == [("worker/0", "worker/2")]
    assert assign_teams(before, {"worker/0": "here", "worker/1": "there"}, 1, 2) == {}


# How they meet


PATIENCE_S = 20.0
SECRET = b"of this job".ljust(32)


def key_for(*, secret: bytes = SECRET) -> bytes:
    """Of another team in each test."""
    return team_key(secret, [uuid.uuid4().hex])


@contextlib.contextmanager
def meeting(key: bytes, rank: int, *, ranks: int = 3, about: str = "step 1", wanted: bool = True) -> Iterator[Meeting]:
    place = Place(key) if rank == 0 else None
    with contextlib.closing(place) if place is not None else contextlib.nullcontext():
        yield Meeting(key=key, rank=rank, ranks=ranks, about=about, still_wanted=lambda missing: wanted, place=place)


def meet_and_tell(key: bytes, rank: int, name: str, *, about: str = "step 1") -> list[Any]:
    """Meet, then tell each other a name; returns the names that came, by rank."""
    with meeting(key, rank, about=about) as asked:
        return told_names(asked.meet(), name)


def told_names(connections: Sequence[socket.socket], name: str) -> list[Any]:
    try:
        for connection in connections:
            tell(connection, {"name": name})
        return [hear(connection, awake_s() + PATIENCE_S)["name"] for connection in connections]
    finally:
        for connection in connections:
            connection.close()


def test_rank_0_gets_a_connection_to_each_of_the_others_once_all_are_there() -> None:
    key = key_for()
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(meet_and_tell, key, rank, f"rank {rank}") for rank in (0, 2, 1)]
        assert [one.result(timeout=PATIENCE_S) for one in found] == [["rank 1", "rank 2"], ["rank 0"], ["rank 0"]]


def test_teams_of_the_same_lives_in_two_jobs_never_meet() -> None:
    lives = [f"worker/{rank} {uuid.uuid4().hex}" for rank in range(3)]
    keys = {name: team_key(name.encode().ljust(32), lives) for name in ("one", "another")}
    with ThreadPoolExecutor(6) as pool:
        # The leader of one comes before its workers, that of the other one after them.
        order = [("one", 0), ("another", 1), ("one", 2), ("another", 2), ("one", 1), ("another", 0)]
        found = {(job, rank): pool.submit(meet_and_tell, keys[job], rank, job) for job, rank in order}
        told = {place: one.result(timeout=PATIENCE_S) for place, one in found.items()}
    assert told == {(job, rank): [job] * (1 if rank else 2) for job, rank in order}


def test_those_that_begin_something_else_begin_again() -> None:
    key = key_for()
    with ThreadPoolExecutor(3) as pool:
        abouts = ["step 1", "step 1", "step 2"]
        found = [pool.submit(meet_and_tell, key, rank, "", about=about) for rank, about in enumerate(abouts)]
        assert [type(one.exception(timeout=PATIENCE_S)) for one in found] == [StepAgain] * 3


@pytest.mark.parametrize("rank", [0, 1])
def test_a_meeting_that_is_not_wanted_any_more_ends(rank: int) -> None:
    with meeting(key_for(), rank, wanted=False) as asked, pytest.raises(StepAgain):
        asked.meet()


def test_one_that_has_come_and_left_is_not_counted_but_may_come_again() -> None:
    key, enough = key_for(), threading.Event()
    with ThreadPoolExecutor(3) as pool, meeting(key, 1) as patient:
        first = pool.submit(meet_and_tell, key, 0, "rank 0")
        impatient = dataclasses.replace(patient, still_wanted=lambda missing: not enough.is_set())
        leaving = pool.submit(impatient.meet)
        with contextlib.suppress(TimeoutError):
            leaving.result(timeout=0.5)
        enough.set()
        assert isinstance(leaving.exception(timeout=PATIENCE_S), StepAgain)
        others = [pool.submit(meet_and_tell, key, rank, f"rank {rank}") for rank in (2, 1)]
        assert first.result(timeout=PATIENCE_S) == ["rank 1", "rank 2"]
        assert [one.result(timeout=PATIENCE_S) for one in others] == [["rank 0"]] * 2


def test_who_connects_without_the_secret_is_told_nothing_and_keeps_nobody_from_meeting() -> None:
    key = key_for()
    with meeting(key, 0) as first, ThreadPoolExecutor(3) as pool:
        with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as guessing:
            for stranger in (silent, guessing):
                stranger.settimeout(PATIENCE_S)
                stranger.connect(name_of(key))
            silent.shutdown(socket.SHUT_WR)
            guessing.sendall(bytes(64) + b'\0\0\0\x1c{"rank": 1, "about": "step 1"}')
            found = pool.submit(first.meet)
            assert silent.recv(1) == b""
            # A nonce, and a proof that is of no use to it.
            assert len(received(guessing)) == 64
        others = [pool.submit(meet_and_tell, key, rank, f"rank {rank}") for rank in (1, 2)]
        assert told_names(found.result(timeout=PATIENCE_S), "rank 0") == ["rank 1", "rank 2"]
        assert [one.result(timeout=PATIENCE_S) for one in others] == [["rank 0"]] * 2


def received(sock: socket.socket) -> bytes:
    """Until the other side closes it."""
    data = b""
    with contextlib.suppress(ConnectionError):
        while part := sock.recv(4096):
            data += part
    return data


def test_a_name_that_somebody_else_has_bound_is_told_and_nobody_who_comes_there_says_a_word() -> None:
    key, wanted = key_for(), threading.Event()
    with socket.socket(socket.AF_UNIX) as squatter, ThreadPoolExecutor(1) as pool, meeting(key, 1) as asked:
        squatter.bind(name_of(key))
        squatter.listen()
        squatter.settimeout(PATIENCE_S)
        with pytest.raises(UnreachableError, match=r"socket @shardline-[0-9a-f]{32}: .* end the process .* or start"):
            Place(key)
        wanted.set()
        coming = pool.submit(dataclasses.replace(asked, still_wanted=lambda missing: wanted.is_set()).meet)
        connection, _ = squatter.accept()
        with connection:
            connection.settimeout(PATIENCE_S)
            connection.sendall(bytes(64))
            assert len(received(connection)) == 32
        wanted.clear()
        assert isinstance(coming.exception(timeout=PATIENCE_S), StepAgain)


def test_the_name_of_a_team_stays_taken_between_its_meetings() -> None:
    team = Team(Timeouts(total_s=5.0), lambda: False)
    posts = tuple(Post(task=f"worker/{rank}", address="here:1", incarnation=int(uuid.uuid4())) for rank in range(2))
    key = team_key(SECRET, [f"{post.task} {post.incarnation:x}" for post in posts])
    try:
        for _ in range(2):
            with pytest.raises(StepAgain):
                team.meet(posts, 0, "step 1", SECRET)
            with socket.socket(socket.AF_UNIX) as other, pytest.raises(OSError, match="in use"):
                other.bind(name_of(key))
    finally:
        team.close()
    with contextlib.closing(Place(key)):
        pass


def test_a_member_may_come_as_late_as_a_sum_with_one_that_has_left_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    waited_s = 0.0
    monkeypatch.setattr("shardline_pipeline.tensor_parallel.team.awake_s", lambda: waited_s)
    wanted = iter([True, True, False])

    def still_ordered() -> bool:
        nonlocal waited_s
        # A join timeout as short as --timeout, which is how long a sum waits.
        waited_s += 8.0
        return next(wanted)

    team = Team(Timeouts(total_s=9.0, join_s=9.0), still_ordered)
    posts = tuple(Post(task=f"worker/{rank}", address="here:1", incarnation=int(uuid.uuid4())) for rank in range(2))
    with contextlib.closing(team):
        with pytest.raises(StepAgain):
            team.meet(posts, 0, "step 1", SECRET)
        wanted = iter([True] * 9)
        with pytest.raises(UnreachableError, match=r"worker/1 \(rank 1\) did not come .* within 24 s"):
            team.meet(posts, 0, "step 1", SECRET)


def grouped(store: dist.Store, rank: int, keys: Sequence[bytes]) -> None:
    group = dist.ProcessGroupGloo(store, rank, len(keys), datetime.timedelta(seconds=PATIENCE_S))
    check_group(group, keys[rank])


@pytest.mark.parametrize("strangers", [(), (1,), (0, 2)])
def test_a_group_in_which_somebody_lacks_the_secret_is_left_before_it_computes(
    monkeypatch: pytest.MonkeyPatch, strangers: tuple[int, ...]
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    keys = [key_for(secret=bytes(32)) if rank in strangers else SECRET for rank in range(3)]
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(grouped, store, rank, keys) for rank in range(3)]
        errors = [one.exception(timeout=PATIENCE_S) for one in found]
    assert [isinstance(error, dist.DistError) for error in errors] == [bool(strangers)] * 3, errors
    if strangers:
        assert re.search(f"in the place of rank {strangers[0]}", str(errors[2 if 2 not in strangers else 1]))


def test_members_learn_each_other_s_addresses_over_the_connections_of_the_meeting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    pairs = [socket.socketpair() for _ in range(2)]
    ends = [[one for one, _ in pairs], [pairs[0][1]], [pairs[1][1]]]
    stores = [TeamStore(connections, rank, PATIENCE_S) for rank, connections in enumerate(ends)]
    with ThreadPoolExecutor(3) as pool:
        found = [pool.submit(grouped, store, rank, [SECRET] * 3) for rank, store in enumerate(stores)]
        assert [one.result(timeout=PATIENCE_S) for one in found] == [None] * 3
        # One that is lost is missed at once.
        stores[1].close()
        lost = [pool.submit(stores[rank].set, "more", b"x") for rank in (0, 2)]
        assert isinstance(lost[0].exception(timeout=PATIENCE_S), dist.DistError)
        stores[0].close()
        assert isinstance(lost[1].exception(timeout=PATIENCE_S), dist.DistError)
    stores[2].close()


def test_a_chief_that_sends_no_secret_is_named() -> None:
    posts = (Post(task="worker/0", address="here:1", incarnation=1),)
    with pytest.raises(JobError, match=r"sent no secret .* start all tasks with the same version"):
        Team(Timeouts(total_s=5.0), lambda: True).meet(posts, 0, "step 1", b"")


def test_cutting_says_which_fragment_each_part_is_in() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    tensors: Sequence[TensorSpec] = spec_of(model, {}).tensors
    found = cut(tensors, shared_layers(model, {"0": "colwise", "1": "rowwise"}), 2)
    assert [(one.name, one.fragment) for one in found] == [
        ("0.weight[0/2]", 1),
        ("0.weight[1/2]", 2),
        ("0.bias[0/2]", 1),
        ("0.bias[1/2]", 2),
        ("1.weight[0/2]", 1),
        ("1.weight[1/2]", 2),
        ("1.bias", 0),
    ]


def test_a_process_group_of_the_job_s_own_is_refused_and_left_alone(tmp_path: Path) -> None:
    post = Post(task="worker/0", address="here:1", incarnation=int(uuid.uuid4()) >> 64)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with pytest.raises(JobError, match=r"uses torch.distributed itself, .* or train with --set tensor_ranks=1"):
            Team(Timeouts(total_s=5.0), lambda: True).meet((post,), 0, "step 1", SECRET)
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
