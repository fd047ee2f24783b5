"""Streaming DiLoCo: fragments take turns, each as DiLoCo would treat it, and a step moves no other fragment's bytes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from shardline import schedule
from shardline.cadence import CADENCES, StreamingDiLoCo, fragmented
from shardline.checkpoint.compat import resume_notes
from shardline.core.reduce import mean_, tree_sum
from shardline.core.spec import TensorKind, TensorSpec
from shardline.core.spec_json import job_from_json, job_to_json
from shardline.data import BatchSource, replica_gradients
from shardline.errors import JobError
from shardline.job import Job
from shardline.rpc.messages.convert import job_from_proto, job_to_proto
from shardline.schedule import complete, factor
from shardline.testing import reference
from tests.conformance.test_local_training import Values, after_a_death, assert_close, parameters, trained
from tests.support.cluster import Cluster, assert_same_end, same_bits
from tests.support.covering import covering
from tests.support.jobs import Rich, Wide, make_job
from tests.support.services import Services, backward, make_model


class Towers(nn.Module):
    """Two networks that don't influence each other, each a fragment of two."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(5, 4)
        self.two = nn.Linear(5, 4)


def towers_loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
    points, targets = batch
    return sum(((tower(points) - targets) ** 2).mean() for tower in (model.one, model.two))  # type: ignore[return-value]


def fragments(job: Job) -> dict[str, int]:
    """The fragment of each trained tensor."""
    return {t.name: t.fragment for t in job.spec(job.build_model()).tensors if t.kind is TensorKind.PARAM}


def by_hand(job: Job) -> Values:
    """The servers' parameters after the job, from torch.optim alone: a model per replica, and the outer SGD."""
    cadence = CADENCES.parse(str(job.cadence))
    assert isinstance(cadence, StreamingDiLoCo)
    models = [job.build_model() for _ in range(job.replicas)]
    inner = [job.build_optimizer(model) for model in models]
    rates = [group["lr"] for group in inner[0].param_groups]
    theta = {name: nn.Parameter(value) for name, value in parameters(job).items()}
    outer = torch.optim.SGD(theta.values(), **cadence.outer_rule)  # type: ignore[arg-type]
    source, own = BatchSource(job), fragments(job)
    for step in range(job.steps):
        for replica, (model, optimizer) in enumerate(zip(models, inner, strict=True)):
            for group, rate in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = rate * factor(complete(job.schedule, job.steps), step)
            for tick in range(cadence.rounds.ticks):
                if step and tick == cadence.rounds.overlap:
                    merge(model, theta, [n for n in own if own[n] == (step - 1) % cadence.fragments], cadence.alpha)
                replica_gradients(model, job, source, step * cadence.rounds.ticks + tick, replica)
                if job.clip_norm:
                    nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
                optimizer.step()
        local = [dict(model.named_parameters()) for model in models]
        for name, value in theta.items():
            value.grad = None
            if own.get(name) == step % cadence.fragments:
                total = tree_sum([(value - values[name]).detach() for values in local])
                assert total is not None
                value.grad = mean_(total, job.replicas)
        outer.step()
    return {name: value.detach() for name, value in theta.items()}


@torch.no_grad()
def merge(model: nn.Module, theta: Mapping[str, torch.Tensor], names: list[str], alpha: float) -> None:
    own = dict(model.named_parameters())
    for name in names:
        own[name].copy_(torch.lerp(theta[name], own[name], alpha))


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {"optimizer": "adamw"},
    "clipped": {"optimizer": "momentum", "clip_norm": 0.05},
    "scheduled": {"optimizer": "adamw", "schedule": schedule.cosine(warmup_steps=2)},
}


@pytest.mark.part(of=2)
@pytest.mark.parametrize(
    ("cadence", "settings"),
    covering(
        [
            "every=6,fragments=3",
            "every=4,fragments=2,alpha=0.5",
            "every=3,fragments=3",
            "every=6,fragments=2,overlap=1",
            "every=6,fragments=2,alpha=0.5,overlap=2",
            "every=4,fragments=1,alpha=0.5,overlap=3",
        ],
        list(SETTINGS),
    ),
)
def test_the_servers_end_where_torch_alone_ends_to_the_bit(cadence: str, settings: str) -> None:
    job = make_job(replicas=4, steps=8, cadence=f"streaming-diloco:{cadence}", **SETTINGS[settings])
    expected = by_hand(job)
    for ownership in ([[0, 1, 2, 3]], [[0, 2], [1, 3]], [[0], [1], [2], [3]]):
        assert_same_params(trained(job, ownership).params, expected)


def assert_same_params(found: Mapping[str, torch.Tensor], expected: Values) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert same_bits(found[name], value), name


class Sometimes(nn.Module):
    """A layer that a pass uses or not, by its data."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(5, 1)
        self.some = nn.Linear(5, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.always(x)
        return found + self.some(x) if float(x[0, 0]) > 0.5 else found


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_what_moved_before_the_step_that_exchanges_it_is_sent_too(alpha: float) -> None:
    cadence = f"streaming-diloco:every=2,fragments=2,outer_momentum=0.0,alpha={alpha}"
    job = make_job("adamw", model=Sometimes, replicas=2, steps=10, cadence=cadence)
    assert_close(trained(job, [[0], [1]]).params, by_hand(job))


def test_the_settings_of_these_jobs_matter() -> None:
    texts = (
        "every=4,fragments=2",
        "every=4,fragments=2,alpha=0.5",
        "every=4,fragments=4",
        "every=4,fragments=2,overlap=1",
    )
    ends = [by_hand(make_job("adamw", steps=8, cadence=f"streaming-diloco:{text}")) for text in texts]
    for other in ends[1:]:
        assert max(float((other[name] - value).abs().max()) for name, value in ends[0].items()) > 1e-4


def test_one_fragment_is_diloco_to_the_bit() -> None:
    plain = make_job("adamw", model=Rich, cadence="diloco:every=3")
    one = make_job("adamw", model=Rich, cadence="streaming-diloco:every=3,fragments=1")
    assert_same_end(trained(one, [[0, 1], [2]]), trained(plain, [[0, 1], [2]]))  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_fragment_that_depends_on_no_other_is_trained_as_by_diloco_to_the_bit(optimizer: str) -> None:
    # The last of the fragments is exchanged exactly after each `every` passes.
    common = {"model": Towers, "loss": towers_loss}
    streaming = make_job(optimizer, steps=6, cadence="streaming-diloco:every=4,fragments=2", **common)
    plain = make_job(optimizer, steps=3, cadence="diloco:every=4", **common)
    assert fragments(streaming) == {"one.weight": 0, "two.weight": 1, "one.bias": 0, "two.bias": 1}
    found, expected = trained(streaming, [[0, 1], [2]]), trained(plain, [[0, 1], [2]])
    for name in ("two.weight", "two.bias"):
        assert same_bits(found.params[name], expected.params[name])
        assert same_bits(found.optimizer[name]["momentum_buffer"], expected.optimizer[name]["momentum_buffer"])
    assert not same_bits(found.params["one.weight"], expected.params["one.weight"])


def test_one_replica_with_a_plain_outer_step_trains_as_if_alone() -> None:
    cadence = "streaming-diloco:every=6,fragments=3,outer_lr=1.0,outer_momentum=0.0"
    job, plain = make_job("adamw", replicas=1, steps=7, cadence=cadence), make_job("adamw", replicas=1, steps=14)
    found = trained(job, [[0]]).params
    for name, fragment in fragments(job).items():
        # The last step that exchanged it; steps have two passes.
        last = max(step for step in range(7) if step % 3 == fragment)
        assert_close({name: found[name]}, {name: reference(plain, 2 * last + 2).params[name]})


def test_a_step_changes_neither_parameters_nor_momentum_of_other_fragments() -> None:
    job = make_job("adamw", model=Rich, replicas=2, cadence="streaming-diloco:every=4,fragments=4", steps=9)
    own = fragments(job)
    with Cluster(job, ps=2) as cluster:
        worker, before = cluster.worker(0), cluster.state()
        for step in range(job.steps):
            worker.run([0, 1], step + 1)
            after = cluster.state()
            for name, value in before.params.items():
                if own.get(name) != step % 4:
                    assert same_bits(after.params[name], value), (step, name)
                    for key, kept in before.optimizer.get(name, {}).items():
                        assert same_bits(after.optimizer[name][key], kept), (step, name, key)
            changed = [name for name in own if not same_bits(after.params[name], before.params[name])]
            assert changed and {own[name] for name in changed} == {step % 4}
            before = after


# What travels


def traffic(job: Job, ps: int = 2) -> list[tuple[int, int]]:
    """(pushed, pulled) bytes of a worker in every step after its first pull."""
    found = []
    with Cluster(job, ps=ps) as cluster:
        worker = cluster.worker(0).run([0], 0)

        def totals() -> tuple[int, int]:
            return worker.trainer.meter.total[0], sum(sink.wire_bytes for sink in worker.trainer.weights.sinks.values())

        last = totals()
        for step in range(job.steps):
            worker.run([0], step + 1) if step == 0 else worker.step([0])
            now = totals()
            found.append((now[0] - last[0], now[1] - last[1]))
            last = now
    return found


@pytest.mark.parametrize("codec", ["raw", "bf16"])
def test_a_step_moves_the_bytes_of_one_fragment(codec: str) -> None:
    job = make_job("sgd", model=Wide, replicas=1, steps=4, codec=codec, cadence="streaming-diloco:every=2,fragments=2")
    whole = make_job("sgd", model=Wide, replicas=1, steps=2, codec=codec, cadence="diloco:every=2")
    steps, rounds = traffic(job)[2:], traffic(whole)[1:]
    assert rounds[0][0] > 400_000 / (2 if codec == "bf16" else 1)
    # The padding of a bucket goes with its fragment.
    assert sum(pushed for pushed, _ in steps) == pytest.approx(rounds[0][0], abs=512)
    assert sum(pulled for _, pulled in steps) == pytest.approx(rounds[0][1], abs=512)
    # 81,920 of 114,689 elements are one tensor, which a fragment has whole.
    assert max(pushed + pulled for pushed, pulled in steps) < 0.72 * sum(rounds[0])


def test_equal_layers_are_dealt_out_in_turn() -> None:
    layers = [TensorSpec(name=f"l{n}.{kind}", shape=shape, dtype="float32") for n in range(6) for kind, shape in
              (("weight", (8, 8)), ("bias", (8,)))]  # fmt: skip
    stats = TensorSpec(name="stats", shape=(999,), dtype="float32", kind=TensorKind.BUFFER)
    found = fragmented(StreamingDiLoCo(every=3, fragments=3), [*layers, stats])
    assert [tensor.name for tensor in found] == [*(tensor.name for tensor in layers), "stats"]
    assert [tensor.fragment for tensor in found] == [0, 0, 1, 1, 2, 2, 0, 0, 1, 1, 2, 2, 0]


def test_fragments_differ_by_no_more_than_a_tensor() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in range(5, 40):
        sizes = torch.randint(0, 1000, (count,), generator=generator).tolist()
        tensors = [TensorSpec(name=f"w{n}", shape=(size,), dtype="float64") for n, size in enumerate(sizes)]
        found = fragmented(StreamingDiLoCo(every=5), tensors)
        totals = [sum(one.elements for one in found if one.fragment == number) for number in range(5)]
        assert sum(totals) == sum(sizes) and max(totals) - min(totals) <= max(sizes)


# What stays, and what is lost


def test_a_replica_that_moves_starts_from_the_servers_parameters() -> None:
    job = make_job("sgd", replicas=2, steps=3, cadence="streaming-diloco:every=4,fragments=2")
    undisturbed, moved = dict(trained(job, [[0, 1]]).params), after_a_death(job)
    assert not all(same_bits(moved[name], value) for name, value in undisturbed.items())
    with Cluster(job, ps=2) as cluster:
        first, second = cluster.worker(0), cluster.worker(1)
        cluster.together([lambda: first.run([0], 2), lambda: second.run([1], 2)])
        # Every replica changes places with another.
        cluster.together([lambda: first.run([1], 3), lambda: second.run([0], 3)])
        swapped: Mapping[str, torch.Tensor] = cluster.state().params
    for name, value in moved.items():
        assert same_bits(swapped[name], value), name


def test_fragments_are_a_part_of_the_job_and_may_change_when_it_resumes() -> None:
    job = make_job("adamw", cadence="streaming-diloco:every=4,fragments=2")
    spec = job.spec(job.build_model())
    assert {tensor.fragment for tensor in spec.tensors} == {0, 1}
    assert job_from_proto(job_to_proto(spec)) == spec
    assert job_from_json(job_to_json(spec)) == spec
    for other in ("streaming-diloco:every=4,fragments=4", "diloco:every=4"):
        changed = make_job("adamw", cadence=other)
        notes = resume_notes(spec, changed.spec(changed.build_model()), "step-40")
        assert notes == [f"cadence: {other} in the job, streaming-diloco:every=4,fragments=2 in the checkpoint"]


# Scripts


def alone(cadence: StreamingDiLoCo, steps: int) -> nn.Module:
    """The servers' parameters after a script's one replica has trained, from torch.optim alone."""
    theta, model = make_model(), make_model()
    outer = torch.optim.SGD(theta.parameters(), **cadence.outer_rule)  # type: ignore[arg-type]
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    pairs = [(name, value, dict(model.named_parameters())[name]) for name, value in theta.named_parameters()]
    specs = fragmented(cadence, [TensorSpec(name=n, shape=tuple(v.shape), dtype="float32") for n, v, _ in pairs])
    for number in range(steps * cadence.rounds.ticks):
        step, tick = divmod(number, cadence.rounds.ticks)
        with torch.no_grad():
            for spec, (_, servers, own) in zip(specs, pairs, strict=True):
                if step and tick == cadence.rounds.overlap and spec.fragment == (step - 1) % cadence.fragments:
                    own.copy_(torch.lerp(servers, own, cadence.alpha))
        inner.zero_grad()
        backward(model, number)
        inner.step()
        if tick + 1 == cadence.rounds.ticks:
            for spec, (_, servers, own) in zip(specs, pairs, strict=True):
                goes = spec.fragment == step % cadence.fragments
                servers.grad = (servers - own).detach() if goes else None
            outer.step()
    return theta


@pytest.mark.parametrize(
    "cadence",
    [
        StreamingDiLoCo(every=4, fragments=2),
        StreamingDiLoCo(every=6, fragments=2, alpha=0.5, overlap=2),
        StreamingDiLoCo(every=3, fragments=1, alpha=0.25, overlap=1),
    ],
    ids=str,
)
def test_a_script_goes_on_with_its_own_parameters_and_ends_with_the_servers(
    cadence: StreamingDiLoCo, start: Any
) -> None:
    services: Services = start(ps=2, workers=1)
    model, steps, running = make_model(), 5, []
    with services.connect(cadence=str(cadence)) as session:
        optimizer = session.attach(model, torch.optim.AdamW(model.parameters(), lr=0.05))
        for number in session.steps(steps * cadence.rounds.ticks):
            running.append(session.trainer.open.sent)
            optimizer.zero_grad()
            backward(model, number)
            optimizer.step()
        expected = alone(cadence, steps).state_dict()
        for name, value in model.state_dict().items():
            assert same_bits(value, expected[name]), name
    # The first step after a start waits.
    first = 2 * cadence.rounds.ticks
    assert running[first:] == [
        n % cadence.rounds.ticks < cadence.rounds.overlap for n in range(first, steps * cadence.rounds.ticks)
    ]
    assert not any(running[: cadence.rounds.ticks])
    assert services.end()["steps"] == steps


def test_a_script_that_ends_during_the_overlap_ends_with_what_it_has_sent(start: Any) -> None:
    services: Services = start(ps=1, workers=1)
    cadence, model = StreamingDiLoCo(every=4, fragments=2, alpha=0.5, overlap=1), make_model()
    with services.connect(cadence=str(cadence)) as session:
        optimizer = session.attach(model, torch.optim.AdamW(model.parameters(), lr=0.05))
        for number in session.steps():
            optimizer.zero_grad()
            backward(model, number)
            optimizer.step()
            if session.step == 3:
                assert session.trainer.open.sent
                break
        session.wait()
        expected = alone(cadence, 3).state_dict()
        for name, value in model.state_dict().items():
            assert same_bits(value, expected[name]), name
    assert services.end()["steps"] == 3


@pytest.mark.parametrize("cadence", ["easgd:every=2", "streaming-diloco:every=2,fragments=2"])
def test_a_loop_that_nothing_tells_when_a_pass_begins_is_refused(cadence: str, start: Any) -> None:
    services: Services = start(ps=1, workers=1)

    def train() -> None:
        model = make_model()
        with services.connect(cadence=cadence) as session:
            optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.05))
            backward(model, 0)
            optimizer.step()

    with pytest.raises(
        JobError, match=r"keeps parameters of each replica's own, which only a loop over session\.steps"
    ):
        train()
    services.end(code=JobError.exit_code)


# Refusals


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ("fragments=0", "fragments is 0; give a whole number, at least 1"),
        ("every=50,fragments=4", "every is 50, which is not a multiple of fragments=4; choose one, such as every=52"),
        ("alpha=1", r"alpha is 1\.0; give a number from 0 to below 1, such as 0\.5"),
        ("alpha=-0.5", r"alpha is -0\.5"),
        ("outer_lr=0", r"streaming-diloco: outer_lr is 0\.0; give a finite number above 0"),
        ("every=0", "streaming-diloco: every is 0"),
        ("overlap=10", r"overlap is 10, but one fragment goes every 10 passes .*; give .*, from 0 to 9"),
        ("overlap=-1", "overlap is -1"),
        (
            "fragments=1,overlap=5",
            "with fragments=1 and alpha=0 the passes during an exchange would be lost; give alpha",
        ),
    ],
)
def test_settings_out_of_range_are_refused(settings: str, sentence: str) -> None:
    with pytest.raises(JobError, match=sentence):
        make_job(cadence=f"streaming-diloco:{settings}")


def test_more_fragments_than_tensors_are_refused() -> None:
    job = make_job(cadence="streaming-diloco:every=14,fragments=7")
    sentence = "fragments is 7, but the model has 6 trained tensors; choose at most fragments=6"
    with pytest.raises(JobError, match=sentence):
        job.spec(job.build_model())


def test_workers_without_common_steps_are_refused() -> None:
    for more, sentence in (
        ("", "steps of cadence streaming-diloco.* differ from each other, but in consistency async workers"),
        (",overlap=1", "merges what an exchange returns 1 passes later, but in consistency async workers have no"),
    ):
        job = make_job("sgd", consistency="async", cadence=f"streaming-diloco:every=4,fragments=2{more}")
        with pytest.raises(JobError, match=sentence):
            job.spec(job.build_model())
