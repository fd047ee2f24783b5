"""Simulations with real gradients: the bits of the reference where there are such, and a falling loss elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from shardline import Job
from shardline.consistency import CONSISTENCIES
from shardline.core.choices import members
from shardline.core.tensor_bytes import params_sha256
from shardline.errors import UsageError
from shardline.schedule import cosine
from shardline.testing import reference
from shardline.update import RULES
from shardline_lab.simulator.gradients import parameters, training_contents
from shardline_lab.simulator.links import Network
from shardline_lab.simulator.result import Result
from shardline_lab.simulator.simulation import Contents, Death, Setup, Simulation
from shardline_lab.simulator.times import Gamma
from tests.support.cluster import Cluster
from tests.support.covering import covering


def points() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(64, 6, generator=generator)
    return TensorDataset(inputs, (inputs @ torch.randn(6, 1, generator=generator)).tanh())


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def make_job(**changes: Any) -> Job:
    fields: dict[str, Any] = {
        "model": make_model,
        "loss": lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        "dataset": points(),
        "optimizer": "SGD",
        "optimizer_args": {"lr": 0.05, "momentum": 0.5},
        "batch_size": 8,
        "steps": 20,
        "seed": 5,
    }
    return Job(**{**fields, **changes})


def train(job: Job, workers: int, **more: Any) -> tuple[Result, dict[str, torch.Tensor]]:
    """The result, and the parameters and buffers that the servers hold at the end."""
    setup: dict[str, Any] = {"times": (Gamma(1.0, 0.3),), "network": Network(bytes_per_s=1e5, latency_s=0.01), **more}
    made = Setup(job=job.spec(job.build_model()), workers=workers, **setup)
    contents: Contents = training_contents(job, made)
    simulation = Simulation(made, contents)
    return simulation.run(), parameters(contents.plan, simulation.servers, job.build_model())


def trained(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: values[name] for name, _ in make_model().named_parameters()}


@pytest.mark.parametrize(
    ("changes", "tasks"),
    covering([{}, {"clip_norm": 0.1}, {"optimizer": "AdamW", "optimizer_args": {"lr": 0.01}}], [(4, 1), (3, 2)]),
    ids=str,
)
def test_a_synchronous_simulation_has_the_bits_of_the_reference(
    changes: dict[str, Any], tasks: tuple[int, int]
) -> None:
    workers, servers = tasks
    job = make_job(replicas=4, **changes)
    found, values = train(job, workers, servers=servers)
    expected = reference(job)
    assert params_sha256(trained(values)) == params_sha256(trained(expected.params))
    assert torch.equal(values["1.running_mean"], expected.buffers["1.running_mean"])
    assert found.losses[0][1] > found.losses[-1][1]


def test_a_death_changes_no_bit_of_a_synchronous_simulation() -> None:
    job = make_job(replicas=4)
    deaths = [Death(worker=0, at_s=5.5, back_s=9.0), Death(worker=2, at_s=7.2)]
    _, values = train(job, 3, deaths=deaths, fence_s=2.0)
    assert params_sha256(trained(values)) == reference(job).sha256


@pytest.mark.parametrize("servers", [1, 3])
def test_steps_with_spares_have_the_bits_of_the_reference_with_their_choices(servers: int) -> None:
    job = make_job(replicas=5, consistency="sync:spares=1")
    made = Setup(job=job.spec(job.build_model()), workers=5, servers=servers, times=(Gamma(1.0, 0.6),))
    contents = training_contents(job, made)
    simulation = Simulation(made, contents)
    simulation.run()
    made_by = [server.choices.made() for server in simulation.servers if server.choices is not None]
    choices = [members(made_by[0].at(step) or 0) for step in range(20)]
    assert all(one == made_by[0] for one in made_by) and len(made_by) == servers
    assert all(len(choice) == 4 for choice in choices) and len(set(map(tuple, choices))) > 1
    values = parameters(contents.plan, simulation.servers, job.build_model())
    assert params_sha256(trained(values)) == reference(job, choices=choices).sha256


@pytest.mark.parametrize("rule", RULES.names)
def test_one_asynchronous_worker_has_the_bits_of_the_reference(rule: str) -> None:
    job = make_job(consistency="async", rule=rule, clip_norm=0.5)
    _, values = train(job, 1)
    assert params_sha256(trained(values)) == params_sha256(trained(reference(job).params))


@pytest.mark.parametrize(
    ("mode", "cadence"),
    covering(CONSISTENCIES.names, ["every-step", "local-sgd:every=4", "diloco:every=4,outer_momentum=0.5"]),
)
def test_the_loss_falls_in_every_mode_and_cadence(mode: str, cadence: str) -> None:
    job = make_job(consistency=mode, cadence=cadence, replicas=3, steps=40, optimizer_args={"lr": 0.02})
    found, _ = train(job, 3)
    assert found.loss(-1) < 0.8 * found.loss(0)


def test_a_round_of_local_training_costs_as_many_passes_and_the_bytes_of_one() -> None:
    jobs = [make_job(cadence=cadence, replicas=2) for cadence in ("every-step", "local-sgd:every=8")]
    once, rounds = (train(job, 2, network=Network(), times=(Gamma(1.0),))[0] for job in jobs)
    assert once.seconds == pytest.approx(20) and rounds.seconds == pytest.approx(160)
    assert rounds.passes == pytest.approx(8 * once.passes)
    assert rounds.push_bytes == once.push_bytes


def layers() -> nn.Module:
    """Six matrices of one size, and no buffers."""
    return nn.Sequential(*(nn.Linear(6, 6, bias=False) for _ in range(5)), nn.Linear(6, 1, bias=False))


def test_a_step_moves_the_bytes_of_its_fragment_alone() -> None:
    whole, parts = (
        make_job(cadence=cadence, model=layers, replicas=2, steps=steps)
        for cadence, steps in (("diloco:every=6", 4), ("streaming-diloco:every=6,fragments=3", 12))
    )
    (once, _), (turns, _) = train(whole, 2), train(parts, 2)
    assert turns.passes == once.passes and turns.push_bytes == once.push_bytes == 4 * 2 * 6 * 64 * 4
    rounds, steps = (np.diff([nbytes for nbytes, _, _ in found.traffic]) for found in (once, turns))
    # A third of a round's pushes, and its pulls or those of the step before or both.
    third = 2 * 2 * 64 * 4
    assert set(steps) <= {third, 2 * third, 3 * third} and set(rounds) == {2 * 3 * third}
    assert steps.mean() == pytest.approx(2 * third, rel=0.1)
    setup = Setup(job=parts.spec(parts.build_model()), workers=2, times=(Gamma(1.0),))
    timed = Simulation(setup).run()
    assert timed.push_bytes == pytest.approx(turns.push_bytes) and timed.pull_bytes == pytest.approx(turns.pull_bytes)


@pytest.mark.parametrize(
    "cadence",
    [
        "diloco:every=3",
        "slowmo:every=3",
        "easgd:every=3",
        "post-local-sgd:start=2,every=3",
        "streaming-diloco:every=4,fragments=2,alpha=0.5",
        "streaming-diloco:every=6,fragments=2,alpha=0.5,overlap=2",
    ],
)
def test_local_training_has_the_bits_of_real_servers(cadence: str) -> None:
    job = make_job(cadence=cadence, replicas=2, steps=4, schedule=cosine(warmup_steps=2))
    _, values = train(job, 2)
    with Cluster(job) as cluster:
        cluster.train([[0], [1]])
        assert params_sha256(trained(values)) == params_sha256(trained(cluster.state().params))


def test_steps_of_different_lengths_take_different_times() -> None:
    job = make_job(cadence="post-local-sgd:start=5,every=4", replicas=2, steps=8)
    found, _ = train(job, 2, network=Network(), times=(Gamma(1.0),))
    assert found.step_s.tolist() == pytest.approx([1.0] * 5 + [4.0] * 3)
    assert found.passes == 2 * 17


def test_a_codec_halves_the_bytes_and_rounds_what_arrives() -> None:
    jobs = [make_job(codec=codec, replicas=2) for codec in ("raw", "bf16")]
    (plain, exact), (coded, rounded) = (train(job, 2) for job in jobs)
    assert coded.push_bytes < 0.75 * plain.push_bytes
    assert not torch.equal(exact["0.weight"], rounded["0.weight"])
    assert torch.allclose(exact["0.weight"], rounded["0.weight"], atol=0.05)


def test_gradients_and_timing_alone_take_equally_long() -> None:
    job = make_job(replicas=4)
    made = Setup(job=job.spec(job.build_model()), workers=4, times=(Gamma(1.0, 0.3),))
    alone = Simulation(made).run()
    assert train(job, 4, network=Network())[0].step_ends_s == alone.step_ends_s


def test_a_codec_with_a_memory_is_refused() -> None:
    with pytest.raises(UsageError, match="codec topk, which remembers"):
        train(make_job(codec="topk"), 1)
