"""Cadences that train locally do what their equations say, on real servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shardline import schedule
from shardline.cadence import CADENCES, EASGD, DiLoCo, Held, LocalSGD, Outgoing, SlowMo
from shardline.checkpoint.compat import resume_notes
from shardline.core.spec import InnerSpec, JobSpec, TensorSpec
from shardline.core.spec_json import job_from_json, job_to_json
from shardline.data import BatchSource, replica_gradients
from shardline.errors import CheckpointError, JobError
from shardline.job import Job
from shardline.rpc.messages.convert import job_from_proto, job_to_proto
from shardline.schedule import complete, factor
from shardline.testing import reference
from shardline.update import rule
from shardline.update.torch_optim.inner import InnerOptimizers
from tests.integration.test_spares import made, spare_job, train
from tests.support.cluster import Cluster, ClusterState, assert_same_end, same_bits
from tests.support.covering import covering
from tests.support.jobs import Rich, Wide, make_job, mlp
from tests.support.services import Services, batch, make_model

Values = dict[str, torch.Tensor]


def trained(job: Job, ownership: list[list[int]], *, ps: int = 2) -> ClusterState:
    with Cluster(job, ps=ps) as cluster:
        cluster.train(ownership)
        return cluster.state()


def parameters(job: Job) -> Values:
    return {name: value.detach().clone() for name, value in job.build_model().named_parameters()}


def assert_close(ours: Any, theirs: Any, *, atol: float = 1e-6) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        torch.testing.assert_close(
            ours[name], value, rtol=0.0, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def by_hand(job: Job, choices: Sequence[Sequence[int]] = ()) -> Values:
    """The parameters after the job, from torch.optim alone: a model per replica, and the outer SGD over the mean.

    choices: by step, the replicas whose mean it is; empty = all.
    """
    cadence = CADENCES.parse(str(job.cadence))
    assert cadence.outer_rule is not None
    models = [job.build_model() for _ in range(job.replicas)]
    inner = [job.build_optimizer(model) for model in models]
    rates = [group["lr"] for group in inner[0].param_groups]
    theta = [nn.Parameter(value) for value in parameters(job).values()]
    outer = torch.optim.SGD(theta, **cadence.outer_rule)  # type: ignore[arg-type]
    source = BatchSource(job)
    for step in range(job.steps):
        for replica, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            with torch.no_grad():
                for value, start in zip(model.parameters(), theta, strict=True):
                    value.copy_(start)
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor(complete(job.schedule, job.steps), step)
            for tick in range(cadence.rounds.ticks_in(step)):
                replica_gradients(model, job, source, cadence.rounds.ticks_before(step) + tick, replica)
                if job.clip_norm:
                    nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
                optimizer.step()
        chosen = [models[replica] for replica in choices[step]] if choices else models
        for values in zip(theta, *(model.parameters() for model in chosen), strict=True):
            start, *ends = values
            start.grad = torch.stack([(start - end).detach() for end in ends]).mean(dim=0)
        if isinstance(cadence, SlowMo):
            # u <- beta u + mean(x - x_i) / gamma; x <- x - alpha gamma u.
            (rate,) = {group["lr"] for group in inner[0].param_groups}
            outer.param_groups[0]["lr"] = cadence.outer_lr * rate
            for value in theta:
                assert value.grad is not None
                value.grad /= rate or 1.0
        outer.step()
    return dict(zip(parameters(job), [value.detach() for value in theta], strict=True))


@pytest.mark.parametrize("cadence", ["local-sgd:every=2", "slowmo:every=2", "diloco:every=3", "post-local-sgd:every=2"])
def test_a_round_with_spares_is_the_mean_over_those_that_came(cadence: str) -> None:
    job = spare_job(cadence=cadence, model=mlp)
    with Cluster(job, ps=2) as cluster:
        train(cluster, [[0], [1], [2], [3]], late=[2], behind=1)
        assert made(cluster) == [(0, 1, 3)] * 6
        assert_close(cluster.state().params, by_hand(job, made(cluster)))
    # Otherwise it would not matter who came.
    assert any(not torch.allclose(ours, by_hand(job)[name]) for name, ours in by_hand(job, [(0, 1, 3)] * 6).items())


@pytest.mark.parametrize("model", [None, Rich], ids=["mlp", "rich"])
def test_rounds_of_one_sgd_step_are_synchronous_sgd(model: Any) -> None:
    more = {} if model is None else {"model": model}
    local = make_job("sgd", cadence="local-sgd:every=1", **more)
    expected = reference(make_job("sgd", **more))
    found = trained(local, [[0, 2], [1]])
    assert_close(found.params, expected.params)
    assert_close(found.buffers, expected.buffers)


@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "adagrad", "rmsprop"])
def test_one_replica_that_averages_with_nobody_is_plain_torch_after_each_round(optimizer: str) -> None:
    job = make_job(optimizer, replicas=1, steps=3, cadence="local-sgd:every=5")
    plain = make_job(optimizer, replicas=1, steps=15)
    with Cluster(job, ps=2) as cluster:
        worker = cluster.worker(0)
        for step in range(1, job.steps + 1):
            worker.run([0], step)
            assert_close(cluster.state().params, reference(plain, 5 * step).params)
        assert cluster.state().optimizer == {}


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip_norm": 0.05},
    "scheduled": {"schedule": schedule.cosine(warmup_steps=2)},
    "rich": {"model": Rich},
}


@pytest.mark.parametrize(
    ("cadence", "settings"),
    covering(
        ["local-sgd:every=3", "diloco:every=3", "slowmo:every=3", "post-local-sgd:start=2,every=3"], list(SETTINGS)
    ),
)
def test_the_servers_end_where_torch_alone_ends(cadence: str, settings: str) -> None:
    more = SETTINGS[settings]
    # AdamW makes whole steps of the rounding errors that are the gradient of a bias before batch norm.
    optimizer = "momentum" if "model" in more and cadence.startswith("slowmo") else "adamw"
    job = make_job(optimizer, replicas=3, steps=5, **{"cadence": cadence, **more})
    assert_close(trained(job, [[0, 2], [1]]).params, by_hand(job))


def test_the_settings_of_these_jobs_matter() -> None:
    plain = by_hand(make_job("adamw", replicas=2, steps=4, cadence="diloco:every=3"))
    for more in ({"clip_norm": 0.05}, {"schedule": schedule.cosine(warmup_steps=2)}, {"cadence": "local-sgd:every=3"}):
        other = by_hand(make_job("adamw", **{"replicas": 2, "steps": 4, "cadence": "diloco:every=3", **more}))
        assert max(float((other[name] - plain[name]).abs().max()) for name in plain) > 1e-4, more


def test_diloco_with_a_plain_outer_step_is_local_sgd_to_the_bit() -> None:
    plain = DiLoCo(every=3, outer_lr=1.0, outer_momentum=0.0)
    ends = [trained(make_job("adamw", model=Rich, cadence=one), [[0, 1], [2]]) for one in (plain, LocalSGD(every=3))]
    assert_same_end(*ends)  # type: ignore[arg-type]


def test_slowmo_without_momentum_is_local_sgd() -> None:
    more = {"replicas": 3, "schedule": schedule.cosine(warmup_steps=2)}
    plain = make_job("adamw", cadence="slowmo:every=3,outer_momentum=0.0", **more)
    assert_close(trained(plain, [[0, 1], [2]]).params, by_hand(make_job("adamw", cadence="local-sgd:every=3", **more)))


def test_slow_momentum_keeps_its_effect_when_the_inner_rate_changes() -> None:
    more = {"replicas": 2, "schedule": schedule.cosine(warmup_steps=2), "steps": 5}
    in_units, plain = (
        by_hand(make_job("adamw", cadence=text, **more))
        for text in ("slowmo:every=3,outer_momentum=0.5", "diloco:every=3,outer_lr=1.0,outer_momentum=0.5")
    )
    assert max(float((in_units[name] - plain[name]).abs().max()) for name in plain) > 1e-4


def test_post_local_sgd_is_synchronous_sgd_with_momentum_until_it_starts() -> None:
    job = make_job("momentum", steps=6, cadence="post-local-sgd:start=4,every=3")
    plain = reference(make_job("momentum", steps=6), 4)
    with Cluster(job, ps=2) as cluster:
        worker = cluster.worker(0).run([0, 1, 2], 4)
        assert_close(cluster.state().params, plain.params)
        worker.run([0, 1, 2], 6)
        assert_close(cluster.state().params, by_hand(job))


# Elastic averaging


def elastic_by_hand(job: Job, pull: float, every: int) -> Values:
    """The center after the job, from torch.optim alone."""
    models = [job.build_model() for _ in range(job.replicas)]
    inner = [job.build_optimizer(model) for model in models]
    center = parameters(job)
    source, alpha = BatchSource(job), pull / job.replicas
    for number in range(job.steps * every):
        for replica, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            replica_gradients(model, job, source, number, replica)
            optimizer.step()
        if number % every == every - 1:
            total = sum_of(models, center)
            old = {name: value.clone() for name, value in center.items()}
            with torch.no_grad():
                for model in models:
                    for name, value in model.named_parameters():
                        force = alpha * (value - old[name])
                        value -= force
                        center[name] += force
            assert_close(sum_of(models, center), total)
    return center


def sum_of(models: list[nn.Module], center: Values) -> Values:
    return {
        name: value + sum(dict(model.named_parameters())[name] for model in models) for name, value in center.items()
    }


@pytest.mark.parametrize(("setting", "optimizer"), covering([(0.9, 3), (0.3, 1), (1.0, 2)], ["sgd", "adamw"]))
def test_the_center_of_elastic_averaging_moves_as_the_paper_says(setting: tuple[float, int], optimizer: str) -> None:
    pull, every = setting
    job = make_job(optimizer, replicas=3, steps=4, cadence=EASGD(every=every, pull=pull))
    assert_close(trained(job, [[0, 2], [1]]).params, elastic_by_hand(job, pull, every))


def test_what_the_replicas_lose_in_an_elastic_exchange_the_center_gains() -> None:
    specs = (TensorSpec(name="w", shape=(64,), dtype="float64"),)
    generator = torch.Generator().manual_seed(0)
    model = {"w": torch.randn(64, generator=generator, dtype=torch.float64)}
    center = {"w": model["w"].clone()}
    inner = InnerOptimizers(InnerSpec(rule=rule("SGD", ({"lr": 0.1},))), specs, model)
    for contributors in (4, 1):
        held = Held(model=model, pulled=center, specs=specs, inner=inner, replicas=4, contributors=contributors)
        local = EASGD(every=1, pull=0.9).local(held)
        gained = torch.zeros(64, dtype=torch.float64)
        before, lost = {}, torch.zeros(64, dtype=torch.float64)
        local.began(0)
        for replica in range(4):
            gradient = torch.randn(64, generator=generator, dtype=torch.float64)
            local.enter(replica, 0)
            before[replica] = model["w"] - 0.1 * gradient
            sent = local.take(replica, 0, Outgoing(values={"w": gradient}))
            gained -= sent.values["w"] / contributors
        local.began(1)
        for replica in range(4):
            local.enter(replica, 0)
            lost += before[replica] - model["w"]
        assert float(gained.abs().max()) > 0.01
        torch.testing.assert_close(gained, lost, rtol=0.0, atol=1e-15)


def test_the_number_of_servers_and_workers_changes_no_bit() -> None:
    job = make_job("adamw", model=Wide, steps=2, cadence="diloco:every=3")
    assert_same_end(trained(job, [[0, 1, 2]], ps=1), trained(job, [[2], [0], [1]], ps=3))  # type: ignore[arg-type]


def test_the_first_outer_step_moves_as_far_as_torchs_nesterov_momentum_says() -> None:
    start = parameters(make_job("adamw"))
    delta = {
        name: start[name] - value
        for name, value in trained(make_job("adamw", steps=1, cadence="local-sgd:every=4"), [[0, 1, 2]]).params.items()
    }
    moved = trained(make_job("adamw", steps=1, cadence="diloco:every=4"), [[0, 1, 2]]).params
    for name, value in delta.items():
        assert float(value.abs().max()) > 1e-3
        torch.testing.assert_close(start[name] - moved[name], 1.33 * value, rtol=1e-3, atol=1e-6)


def pushed_bytes(job: Job) -> tuple[int, int]:
    """(bytes pushed, passes) of a worker."""
    with Cluster(job, ps=2) as cluster:
        (worker,) = cluster.train([[0]])
        return worker.trainer.meter.total[0], job.steps * worker.trainer.methods.cadence.rounds.ticks


def test_a_pass_costs_a_fraction_of_the_bytes() -> None:
    often, passes = pushed_bytes(make_job("adamw", replicas=1, steps=10))
    seldom, local_passes = pushed_bytes(make_job("adamw", replicas=1, steps=2, cadence="local-sgd:every=5"))
    assert passes == local_passes == 10
    assert often == 5 * seldom > 0


def digits(train: bool) -> TensorDataset:
    from sklearn.datasets import load_digits  # takes a second

    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    chosen = order[360:] if train else order[:360]
    return TensorDataset(torch.tensor(found.data, dtype=torch.float32)[chosen] / 16, torch.tensor(found.target)[chosen])


def classifier() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def accuracy(params: Mapping[str, torch.Tensor]) -> float:
    model = classifier()
    model.load_state_dict(dict(params))
    points, labels = digits(train=False).tensors
    return float((model(points).argmax(dim=1) == labels).double().mean())


@pytest.mark.long
def test_forty_rounds_of_ten_passes_learn_what_four_hundred_steps_learn() -> None:
    common: dict[str, Any] = {
        "model": classifier,
        "dataset": lambda: digits(train=True),
        "loss": lambda model, batch: nn.functional.cross_entropy(model(batch[0]), batch[1]),
        "optimizer": "AdamW",
        "optimizer_args": {"lr": 0.003},
        "batch_size": 32,
        "replicas": 2,
        "seed": 7,
    }
    wanted = accuracy(reference(Job(**common, steps=400)).params)
    assert wanted > 0.95
    for cadence in ("local-sgd:every=10", "diloco:every=10", "slowmo:every=10", "easgd:every=10"):
        found = accuracy(trained(Job(**common, steps=40, cadence=cadence), [[0], [1]]).params)
        # One of 360 pictures is 0.003.
        assert found > wanted - 0.02, (cadence, found, wanted)


# What stays, and what is lost


def test_servers_keep_no_state_of_the_inner_optimizer_and_its_decay_is_the_workers() -> None:
    def groups(model: nn.Module) -> list[dict[str, Any]]:
        first, *others = model.parameters()
        return [{"params": [first], "lr": 0.1}, {"params": others, "weight_decay": 0.0}]

    job = make_job("adamw", cadence="diloco", param_groups=groups)
    spec = job.spec(job.build_model())
    assert spec.inner is not None and spec.inner.rule.name == "AdamW" and spec.rule.name == "SGD"
    assert [group["weight_decay"] for group in spec.inner.rule.groups] == [0.1, 0.0]
    assert [(g["lr"], g["momentum"], g["nesterov"], g["weight_decay"]) for g in spec.rule.groups] == [
        (0.7, 0.9, True, 0.0)
    ] * 2
    assert {tensor.group for tensor in spec.tensors} == {0, 1}
    with Cluster(make_job("adamw", cadence="diloco:every=2", param_groups=groups, steps=2), ps=2) as cluster:
        cluster.train([[0, 1, 2]])
        assert {key for state in cluster.state().optimizer.values() for key in state} == {"momentum_buffer"}


def after_a_death(job: Job) -> Values:
    """The parameters of a job whose worker dies before the last round."""
    with Cluster(job, ps=2) as cluster:
        doomed = cluster.worker(0).run([0, 1], job.steps - 1)
        doomed.close()
        cluster.workers.remove(doomed)
        cluster.worker(1).run([0, 1], job.steps)
        return dict(cluster.state().params)


def test_a_replica_that_moves_starts_with_a_new_optimizer() -> None:
    """The guarantee of docs/cadences.md: a death costs the inner state, and so the bits, but nothing else."""
    job = make_job("adamw", replicas=2, steps=3, cadence="local-sgd:every=2")
    undisturbed, moved = dict(trained(job, [[0, 1]]).params), after_a_death(job)
    assert not all(same_bits(moved[name], value) for name, value in undisturbed.items())
    with Cluster(job, ps=2) as cluster:
        cluster.worker(0).run([0], 0).close()
        cluster.workers.pop()
        first, second = cluster.worker(0), cluster.worker(1)
        cluster.together([lambda: first.run([0], 2), lambda: second.run([1], 2)])
        # Every replica changes places with another.
        cluster.together([lambda: first.run([1], 3), lambda: second.run([0], 3)])
        swapped = cluster.state().params
    for name, value in moved.items():
        assert same_bits(swapped[name], value), name


def test_a_job_that_is_kept_or_sent_comes_back_equal() -> None:
    job = make_job("adamw", cadence="diloco", clip_norm=0.5, schedule=schedule.cosine(warmup_steps=1))
    spec = job.spec(job.build_model())
    assert spec.inner is not None and spec.inner.clip_norm == 0.5 and spec.inner.schedule.kind == "cosine"
    assert spec.consistency.clip_norm == 0.0 and spec.schedule.kind == "constant"
    assert job_from_proto(job_to_proto(spec)) == spec
    assert job_from_json(job_to_json(spec)) == spec
    plain = job_to_json(make_job("adamw").spec(job.build_model()))
    del plain["inner"]
    assert job_from_json(plain).inner is None


def spec_of(optimizer: str, cadence: str) -> JobSpec:
    job = make_job(optimizer, cadence=cadence)
    return job.spec(job.build_model())


def test_a_momentum_of_gradients_is_not_resumed_as_one_of_deltas() -> None:
    with pytest.raises(CheckpointError, match="momentum_buffer of deltas in the job, momentum_buffer in the"):
        resume_notes(spec_of("momentum", "every-step"), spec_of("momentum", "diloco"), "step-40")
    assert resume_notes(spec_of("adamw", "diloco"), spec_of("momentum", "diloco:every=9"), "step-40")


# Scripts


def test_a_scripts_scheduler_sets_the_inner_rate(start: Callable[..., Services]) -> None:
    services = start(ps=1, workers=1)
    plain = make_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)

    def follow(model: nn.Module, optimizer: Any, scheduler: Any, number: int) -> None:
        points, labels = batch(number)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points), labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        scheduler.step()

    for number in range(8):
        follow(plain, optimizer, scheduler, number)
    with services.connect(cadence="local-sgd:every=2") as session:
        model = make_model()
        ours = session.attach(model, torch.optim.AdamW(model.parameters(), lr=0.05))
        again = torch.optim.lr_scheduler.StepLR(ours, 3, 0.5)
        for number in session.steps(8):
            follow(model, ours, again, number)
        assert session.step == 4
    assert_close(model.state_dict(), plain.state_dict())
    assert services.end()["steps"] == 4


# Refusals


@pytest.mark.parametrize(
    ("cadence", "sentence"),
    [
        ("local-sgd:every=0", "local-sgd: every is 0; give a whole number of passes, at least 1"),
        ("diloco:every=-1", "diloco: every is -1"),
        ("diloco:outer_lr=0", r"outer_lr is 0\.0; give a finite number above 0"),
        ("diloco:outer_momentum=1", r"outer_momentum is 1\.0; give a number from 0 to below 1"),
        ("diloco:outer_momentum=-0.1", r"outer_momentum is -0\.1"),
        ("slowmo:outer_lr=0", r"slowmo: outer_lr is 0\.0; give a finite number above 0"),
        ("slowmo:outer_momentum=1", r"slowmo: outer_momentum is 1\.0; give a number from 0 to below 1"),
        ("easgd:pull=0", r"easgd: pull is 0\.0; give a number above 0 and at most 1"),
        ("easgd:pull=1.5", r"easgd: pull is 1\.5; give a number above 0 and at most 1"),
        ("post-local-sgd:start=-1", r"post-local-sgd: start is -1; give a step, at least 0"),
    ],
)
def test_settings_out_of_range_are_refused(cadence: str, sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        make_job(cadence=cadence)


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (
            {"rule": "dana", "consistency": "async"},
            "update rule dana changes gradients on the servers, but cadence diloco runs the optimizer on the workers",
        ),
        ({"nan_policy": "skip"}, "nan_policy 'skip' would leave a NaN in the optimizer that cadence diloco"),
        (
            {"consistency": "async", "schedule": schedule.cosine()},
            "cosine schedule counts updates in consistency async, but .* cadence diloco .* knows only its own rounds",
        ),
        (
            {"cadence": "easgd", "consistency": "softsync"},
            "cadence easgd moves a replica and the servers' parameters by equal amounts, but consistency softsync",
        ),
        (
            {"cadence": "post-local-sgd", "consistency": "ssp"},
            "steps of cadence post-local-sgd differ from each other, but in consistency ssp workers have no",
        ),
    ],
    ids=["rule", "nan", "schedule", "elastic", "uneven"],
)
def test_what_has_no_meaning_together_is_refused(more: dict[str, Any], sentence: str) -> None:
    job = make_job("momentum", **{"cadence": "diloco", **more})
    with pytest.raises(JobError, match=sentence):
        job.spec(job.build_model())


def test_the_reference_does_not_pretend_to_know_them() -> None:
    with pytest.raises(JobError, match="cadence local-sgd has other ones"):
        reference(make_job(cadence="local-sgd"))
