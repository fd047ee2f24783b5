"""Which servers hold which tensors: those in workers' processes, or those of their own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import nn

from shardline.cluster import ClusterSpec
from shardline.config import RoleConfig
from shardline.core.places import ALLREDUCE, PS, place_of, placed
from shardline.core.plan import Plan, check_plan
from shardline.core.rows import PARTS
from shardline.core.spec import JobSpec, TensorKind, TensorSpec
from shardline.core.spec_json import job_from_json, job_to_json
from shardline.errors import JobError
from shardline.rpc.messages.convert import tensor_from_proto, tensor_to_proto
from shardline_chief.rules.state.settings import ChiefSettings
from tests.support.chief_cluster import Cluster, make_job as chief_job
from tests.support.jobs import make_job

DENSE = tuple(TensorSpec(name=f"layer{n}", shape=(256, 300), dtype="float32") for n in range(4))
SMALL = tuple(dataclasses.replace(tensor, shape=(4, 4)) for tensor in DENSE)
TABLE = TensorSpec(name="users", shape=(PARTS, 4), dtype="float32", kind=TensorKind.TABLE, rule="sgd", init="zeros")
BOTH = (*DENSE[:2], TABLE, *DENSE[2:])


def settings(own: int, others: int, **more: Any) -> ChiefSettings:
    ps = tuple(f"h:{n}" for n in range(own + others))
    return ChiefSettings(term=1, chief_uuid="c", chief_address="h:0", ps=ps, workers=max(own, 1), own_ps=own, **more)


def job(tensors: tuple[TensorSpec, ...], **communication: str) -> JobSpec:
    given = placed(tensors, communication) if communication else tensors
    return dataclasses.replace(chief_job(tensors=DENSE), tensors=given)


def names(plan: Plan) -> list[set[str]]:
    check_plan(plan)
    return [{plan.tensors[p.tensor].name for b in shard.buckets for p in b.slices} for shard in plan.shards]


@pytest.mark.parametrize(
    ("communication", "servers"),
    [({}, {"users"}), ({"layer1": PS, "*": ALLREDUCE}, {"layer1"}), ({"layer*": PS, "*": ALLREDUCE}, {"layer0"})],
    ids=["auto", "one-layer", "layers"],
)
def test_each_place_has_shards_of_its_own(communication: dict[str, str], servers: set[str]) -> None:
    spec = job(BOTH, **communication)
    places = [tensor.place for tensor in spec.tensors]
    assert [tensor.place for tensor in job_from_json(job_to_json(spec)).tensors] == places
    assert [tensor_from_proto(tensor_to_proto(tensor)).place for tensor in spec.tensors] == places
    # It changes no step, so a job may go on with other ones.
    assert spec == job(BOTH)
    # What the machines' links would say is for a cluster whose servers hold anything.
    plan = settings(3, 2, shares=(0.4, 0.3, 0.3, 0, 0)).plan(spec)
    found = names(plan)
    assert [plan.place(shard) for shard in range(len(plan.shards))] == [ALLREDUCE] * 3 + [PS] * 2
    aside = {tensor.name for tensor in spec.tensors if place_of(tensor) == PS}
    assert set.union(*found[3:]) == aside >= servers
    assert set.union(*found[:3]) == {tensor.name for tensor in BOTH} - aside


def test_a_cluster_with_servers_of_one_kind_has_one_group() -> None:
    for own, others in ((3, 0), (0, 3)):
        assert settings(own, others).plan(job(BOTH)) == settings(0, 3).plan(job(BOTH))
    assert settings(2, 1).plan(job(DENSE)) == settings(0, 3).plan(job(DENSE))
    assert len(settings(2, 1).plan(job(DENSE, **{"*": ALLREDUCE})).shards) == 2


@pytest.mark.parametrize(
    ("own", "others", "communication", "says"),
    [
        (2, 0, {"users": PS, "*": ALLREDUCE}, "'users' with 'ps', but all servers are in workers' processes: .*--ps N"),
        (0, 2, {"users": PS, "*": ALLREDUCE}, "'layer0' with 'allreduce', but no worker holds .*--mirrored N"),
        (2, 2, {"*": "ring"}, "'layer0' with 'ring', but there are only allreduce and ps"),
        (2, 1, {"users": PS}, "leaves a tensor without a place: 'layer0' matches none; end it with '\\*'"),
        (2, 1, {"*": PS, "users": ALLREDUCE}, "has the pattern 'users', which no tensor matches first"),
    ],
)
def test_a_tensor_that_nobody_may_hold_is_named(
    own: int, others: int, communication: dict[str, str], says: str
) -> None:
    with pytest.raises(JobError, match=says):
        settings(own, others).plan(job(BOTH, **communication))


def test_tied_weights_have_one_place_and_shards_are_counted_by_place() -> None:
    tied = dataclasses.replace(DENSE[0], aliases=("head",))
    with pytest.raises(JobError, match=r"in two ways: 'layer0' matches '\*', 'head' matches 'head'"):
        placed([tied], {"head": PS, "*": ALLREDUCE})
    assert placed([tied], {"head": PS, "layer0": PS})[0].place == PS
    with pytest.raises(JobError, match="--shards cuts a model for servers that may all hold any part"):
        settings(2, 1, shards=6).plan(job(BOTH))


def test_a_job_says_what_is_where() -> None:
    found = make_job(model=lambda: nn.Linear(4, 2), communication={"bias": "ps", "*": "allreduce"})
    spec = found.spec(found.build_model())
    assert {tensor.name: tensor.place for tensor in spec.tensors} == {"weight": ALLREDUCE, "bias": PS}
    for wrong in ("ps", {}, {"*": "ring"}, 3, {"*": ["ps"]}, {1: "ps", "*": "ps"}):
        with pytest.raises(JobError, match=r"Job\.communication is .*; give 'auto', or a dict .*'allreduce' or 'ps'"):
            make_job(communication=wrong)


def test_a_chief_places_shards_and_evens_them_out_by_their_kind() -> None:
    cluster = Cluster(job=job(BOTH), ps=4, workers=2, own_ps=2)
    cluster.start()
    where = [place.task for place in cluster.program.state.layout.placement]
    assert where == ["ps/0", "ps/1", "ps/2", "ps/3"]
    assert "2 among the workers and 2 on servers" in cluster.text()
    assert "hold any shard" not in cluster.text()
    # The servers of tables have next to no bytes, and still get no layers.
    assert not cluster.program.move("", 0, cluster.now_s).moves
    assert cluster.program.move("ps/1", 0, cluster.now_s).moves == {1: "ps/0"}


def test_servers_that_are_left_out_are_told_why() -> None:
    for communication, says in (
        ({"*": PS}, "communication leaves them out: ps/0, ps/1 will not hold any shard"),
        ({"layer0": PS, "*": ALLREDUCE}, "the model is too small for 2 ps: ps/3 will not hold any shard"),
    ):
        cluster = Cluster(
            job=job((*(dataclasses.replace(one, shape=(4, 4)) for one in DENSE),), **communication),
            ps=4,
            workers=2,
            own_ps=2,
        )
        cluster.start()
        assert says in cluster.text()


def test_only_workers_of_the_cluster_file_are_servers_too() -> None:
    spec = ClusterSpec({"chief": ("h:1",), "ps": ("h:2", "h:3", "h:4"), "worker": ("h:5", "h:6")})
    made = [RoleConfig(role="worker", index=n, cluster=spec, with_ps=True, insecure_bind=True) for n in range(3)]
    assert [one.is_ps_too for one in made] == [True, True, False] and made[0].own_ps == 2
    assert not RoleConfig(role="worker", index=0, cluster=spec, insecure_bind=True).is_ps_too
