"""What every schedule of a pipeline must do: those in the table."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from shardline.codecs import CODECS, of_parcels
from shardline.codecs.base import Memory
from shardline.core.orders import Orders
from shardline.core.parcel import ParcelKey
from shardline.core.settings import Settings
from shardline.data import BatchSource, replica_gradients
from shardline.errors import JobError
from shardline.job import Job
from shardline.observability.metrics import Metrics
from shardline.rpc.messages.parcels import ParcelReader, packed
from shardline.seams import doc_line
from shardline_pipeline import PIPELINES, Pass, PipelineSchedule, bubble, schedule_named
from shardline_pipeline.activations.mailbox import Mailbox
from shardline_pipeline.alone import CodedModel
from shardline_pipeline.hosts import hosts_of
from shardline_pipeline.model import Pipeline
from shardline_pipeline.replica_tensors import StepPart
from shardline_pipeline.runner import AtHome, StageRunner
from shardline_pipeline.staged import StagedModel
from tests.support.parcel_workers import JOB, parcel
from tests.support.pipelines import Mail, run_workers, stages_of

STAGED = [found for resident in PIPELINES if (found := schedule_named(resident.name)).staged]
EACH = pytest.mark.parametrize("schedule", STAGED, ids=str)
FLUSHING = [one for one in STAGED if one.flushes]
RUN = [*FLUSHING, *(schedule_named(f"{one.name}:recompute=true") for one in FLUSHING)]
EACH_RUN = pytest.mark.parametrize("schedule", RUN, ids=str)
"""Those that StageRunner computes; others: test_asynchronous_pipeline.py."""
CODED = [
    one.name
    for one in CODECS
    if CODECS.parse(one.name).memory is Memory.NONE and one.name not in ("auto", "delta", "sign-vote")
]
"""Codecs that may encode parcels."""
SIZES = [(stages, microbatches) for stages in (1, 2, 3, 5) for microbatches in (1, 2, 3, 8)]


class Points(Dataset):  # type: ignore[type-arg]
    """Points, augmented at random when they are read."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((12,), index / 64) + torch.randn(12), index % 4


def loss(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch[0] * 2), batch[1])


class Turned(nn.Module):
    """Returns a view whose dimensions are not in the order of its memory."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.reshape(values.shape[0], 4, -1).transpose(1, 2)


def plain_layers() -> list[nn.Module]:
    return [nn.Linear(12, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.3), nn.Linear(16, 16), nn.Linear(16, 4)]


def turned_layers() -> list[nn.Module]:
    return [nn.Linear(12, 32), Turned(), nn.Linear(4, 6), nn.Sequential(nn.Flatten(), nn.Linear(48, 4))]


class Forked(nn.Module):
    """A tensor, how it is to be ordered, the tensor once more, and one that nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(12, 2)

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        order = torch.randperm(values.shape[1])
        return values.relu(), order, values, values, self.unused(values)


class Between(nn.Module):
    """Uses one tensor twice, under both of its names, and passes the others on."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, values: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        made, order, first, second, unused = values
        made = nn.functional.dropout(made[:, order] * self.scale, 0.3) + second.sin() * first.cos()
        return made, order, first, second, unused


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(12))

    def forward(self, values: tuple[torch.Tensor, ...]) -> torch.Tensor:
        made, order, first, second, _ = values
        return self.scale * made[:, order] * second.sigmoid() + first.tanh()


def several_layers() -> list[nn.Module]:
    return [nn.Linear(12, 12), Forked(), Between(), Between(), Joined(), nn.Linear(12, 4)]


class Counted(nn.Module):
    """Cuts its way back: nothing before it is trained by the loss, as the stage before can't know."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.ones(12))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.detach() + self.bias


def cut_off_layers() -> list[nn.Module]:
    return [nn.Linear(12, 12), nn.Linear(12, 12), Counted(), nn.Linear(12, 4)]


class Skips(nn.Module):
    """Like a U-Net: what the first blocks make goes to the last ones, past those between."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Linear(12, 12) for _ in range(3)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(12) for _ in range(3)])
        self.up = nn.ModuleList([nn.Linear(24, 12) for _ in range(3)])
        self.drop = nn.Dropout(0.3)
        self.out = nn.Linear(12, 4)
        self.register_buffer("scale", torch.full((12,), 0.5))

    def forward(self, values: torch.Tensor, *, noise: torch.Tensor) -> dict[str, torch.Tensor]:
        seen = []
        for down, norm in zip(self.down, self.norms, strict=True):
            values = self.drop(norm(down(values)).relu_())
            seen.append(values)
        for up in self.up:
            values = up(torch.cat([values * self.scale, seen.pop()], 1)) + torch.rand(12) + noise
        return {"logits": self.out(values), "size": values.square().mean()}


def skips() -> nn.Module:
    noise = {"noise": torch.zeros(4, 12)}
    cuts = ["down.1", "norms.2", "up.1", "out"]
    return Pipeline.split(Skips(), torch.zeros(4, 12), cuts=cuts, example_kwargs=noise)


def skips_loss(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    found = model(batch[0], noise=torch.randn(4, 12))
    return nn.functional.cross_entropy(found["logits"], batch[1]) + found["size"]


class Words(nn.Module):
    """A small transformer whose head is the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.blocks = nn.ModuleList([nn.TransformerEncoderLayer(8, 2, 16, 0.2, batch_first=True) for _ in range(3)])
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        mask = torch.full((12, 12), -torch.inf, device=words.device).triu(1)
        values = self.embed(words)
        for block in self.blocks:
            values = block(values, src_mask=mask, is_causal=True)
        return self.head(values)  # type: ignore[no-any-return]


def words() -> nn.Module:
    return Pipeline.split(Words(), torch.zeros(4, 12, dtype=torch.int64), cuts=["blocks.1", "blocks.2"])


def words_loss(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    found = (batch[0] * 3).long() % 9
    return nn.functional.cross_entropy(model(found).flatten(0, 1), found.roll(-1, 1).flatten())


class Drifting(nn.Module):
    """Computes with a buffer, and changes it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("level", torch.ones(12))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        made = values * self.level.clone()
        with torch.no_grad():
            self.level.mul_(0.9).add_(0.1 * values.mean(0).tanh())
        return made


def drifting_layers() -> list[nn.Module]:
    return [nn.Linear(12, 12), Drifting(), nn.Linear(12, 12), Drifting(), nn.Linear(12, 4)]


def frozen_layers() -> list[nn.Module]:
    layers = plain_layers()
    layers[0].weight.requires_grad_(False)
    return layers


def job_of(layers: Callable[[], list[nn.Module] | nn.Module], cuts: list[int], **fields: object) -> Job:
    """A job with these layers in stages, or with this model, which knows its stages."""

    def model() -> nn.Module:
        made = layers()
        return made if isinstance(made, nn.Module) else Pipeline(made, stages=cuts)

    used = {skips: skips_loss, words: words_loss}.get(layers, loss)
    given = {"batch_size": 4, "accumulate": 3, "steps": 4, "optimizer": "SGD", "optimizer_args": {"lr": 0.1}, **fields}
    return Job(model=model, loss=used, dataset=Points(), **given)  # type: ignore[arg-type]


def play(schedule: PipelineSchedule, stages: int, microbatches: int) -> int:
    """Ticks until all stages are done, if every pass takes one; each stage runs its next pass as soon as it can."""
    todo = [deque(schedule.passes(stage, stages, microbatches)) for stage in range(stages)]
    done: set[tuple[int, int, bool]] = set()
    ticks = 0
    while any(todo):
        ran = []
        for stage, passes in enumerate(todo):
            if not passes:
                continue
            one = passes[0]
            before = (stage + 1, one.microbatch, True) if one.back else (stage - 1, one.microbatch, False)
            if before in done or before[0] in (-1, stages):
                ran.append((stage, passes.popleft()))
        assert ran, f"{schedule} of {stages} stages and {microbatches} microbatches hangs after {ticks} ticks"
        done.update((stage, one.microbatch, one.back) for stage, one in ran)
        ticks += 1
    return ticks


def order(schedule: PipelineSchedule, stage: int, stages: int, microbatches: int, steps: int) -> list[Pass]:
    """The passes of a stage in so many steps. Microbatches are counted from the first step's first one."""
    if not schedule.flushes:
        return list(schedule.passes(stage, stages, steps * microbatches))
    return [
        Pass(step * microbatches + one.microbatch, one.back)
        for step in range(steps)
        for one in schedule.passes(stage, stages, microbatches)
    ]


def early(schedule: PipelineSchedule, slow: int, stages: int, microbatches: int, step: int) -> set[ParcelKey]:
    """Parcels for later steps that come to a stage which has done this step and not begun the next one.

    All others have done whatever they can without it.
    """
    todo = [deque(order(schedule, stage, stages, microbatches, step + 2 * stages + 2)) for stage in range(stages)]
    done: set[tuple[int, Pass]] = set()

    def ready(stage: int) -> bool:
        if not todo[stage] or (stage == slow and waits()):
            return False
        near = stage + (1 if todo[stage][0].back else -1)
        return near in (-1, stages) or (near, todo[stage][0]) in done

    def waits() -> bool:
        return (slow, Pass((step + 1) * microbatches - 1, back=True)) in done

    while able := [stage for stage in range(stages) if ready(stage)]:
        done.update((stage, todo[stage].popleft()) for stage in able)
    assert {(slow, Pass(number, back=True)) for number in range((step + 1) * microbatches)} <= done
    return {
        ParcelKey(one.microbatch // microbatches, 0, slow, one.microbatch % microbatches, one.back)
        for stage, one in done
        if stage == slow + (1 if one.back else -1) and one.microbatch >= (step + 1) * microbatches
    }


@EACH
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_a_worker_takes_every_parcel_that_can_come_early(
    schedule: PipelineSchedule, stages: int, microbatches: int
) -> None:
    job = replace(
        JOB,
        tensors=tuple(replace(JOB.tensors[0], name=f"{stage}.weight", fragment=stage) for stage in range(stages)),
        pipeline=str(schedule),
        accumulate=microbatches,
    )
    farthest = 0
    for slow in range(stages):
        mailbox = Mailbox("worker/0", Metrics("worker", "worker/0"), 1.0, still_open=lambda key: True)
        mailbox.begin(job, Orders(timeline=1), 3)
        for key in early(schedule, slow, stages, microbatches, 3):
            header = packed(job.name, 1, parcel(key)).header
            assert mailbox.awaits(ParcelReader(header), wait_s=0.0), key
            farthest = max(farthest, key.step - 3)
    assert farthest <= (1 if schedule.flushes else stages)
    if stages > 1 and microbatches == 1:
        assert farthest == (1 if schedule.flushes else stages), "the bound is wider than the schedules need"


@EACH
def test_it_is_written_as_it_is_read_and_says_what_it_is(schedule: PipelineSchedule) -> None:
    assert schedule_named(str(schedule)) == schedule
    assert doc_line(type(schedule)).endswith(".")


@EACH
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_each_stage_runs_every_pass_once_and_in_ascending_order(
    schedule: PipelineSchedule, stages: int, microbatches: int
) -> None:
    for stage in range(stages):
        passes = schedule.passes(stage, stages, microbatches)
        for back in (False, True):
            assert [one.microbatch for one in passes if one.back is back] == list(range(microbatches))
        for number in range(microbatches):
            forward, backward = (
                next(i for i, one in enumerate(passes) if one == type(one)(number, back)) for back in (False, True)
            )
            assert forward < backward


@EACH
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_it_never_hangs_and_its_bubble_is_that_of_a_flush(
    schedule: PipelineSchedule, stages: int, microbatches: int
) -> None:
    ticks = play(schedule, stages, microbatches)
    assert ticks == 2 * (microbatches + stages - 1)
    assert 1.0 - 2 * microbatches / ticks == pytest.approx(bubble(stages, microbatches))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_what_stages_hold_at_a_time(stages: int, microbatches: int) -> None:
    gpipe, flush = schedule_named("gpipe"), schedule_named("flush")
    for stage in range(stages):
        assert gpipe.held(stage, stages, microbatches) == microbatches
        assert flush.held(stage, stages, microbatches) == min(microbatches, stages - stage)


@pytest.mark.part(of=3, first=1)
@pytest.mark.usefixtures("traced_once")
@EACH_RUN
@pytest.mark.parametrize(
    ("layers", "cuts"),
    [
        pytest.param(plain_layers, [], id="one stage"),
        pytest.param(plain_layers, [1, 4], id="dropout and batch norm"),
        pytest.param(plain_layers, [1, 4, 5], id="four stages"),
        pytest.param(turned_layers, [2, 3], id="an activation that is a view"),
        pytest.param(frozen_layers, [1, 4], id="frozen weights"),
        pytest.param(several_layers, [2, 3, 4], id="several tensors, some twice, some unused"),
        pytest.param(several_layers, [1, 5], id="several tensors inside of a stage"),
        pytest.param(cut_off_layers, [1, 2], id="no gradient comes back"),
        pytest.param(drifting_layers, [1, 3], id="buffers that passes use and change"),
        pytest.param(skips, [], id="traced, with skip connections"),
        pytest.param(words, [], id="traced, with tied weights"),
    ],
)
def test_gradients_buffers_and_loss_have_the_bits_of_one_process(
    schedule: PipelineSchedule, layers: Callable[[], list[nn.Module]], cuts: list[int]
) -> None:
    job = job_of(layers, cuts)
    whole, parts = job.build_model(), job.build_model()
    assert isinstance(parts, StagedModel)
    home = AtHome()
    runner = StageRunner(parts, job, BatchSource(job), schedule, home)
    for step in range(3):
        home.passes.clear()
        expected, _ = replica_gradients(whole, job, BatchSource(job), step, 0)
        part = runner.run(step, {0: range(parts.num_stages)})[0]
        assert part.loss == expected
        assert_gradients(whole, part.gradients)
        for (name, ours), theirs in zip(whole.named_buffers(), parts.buffers(), strict=True):
            assert torch.equal(ours, theirs), name
        for stage in range(parts.num_stages):
            told = [one for one in home.passes if one.stage == stage]
            order = schedule.passes(stage, parts.num_stages, job.accumulate)
            assert [(one.microbatch, one.back) for one in told] == [(one.microbatch, one.back) for one in order]
            assert max(one.held for one in told) == schedule.held(stage, parts.num_stages, job.accumulate)
            assert {one.version for one in told} == {step}


def wide_layers() -> list[nn.Module]:
    """Activations that every codec takes, one of them a view, with gradients that are added up from two uses."""
    return [
        nn.Sequential(nn.Linear(12, 512), nn.BatchNorm1d(512), Turned()),
        nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.3), Twice()),
        nn.Sequential(nn.Flatten(), nn.Linear(1024, 300), nn.Tanh()),
        nn.Linear(300, 4),
    ]


class TurnedAround(nn.Module):
    """A layer in the dimensions of which one has size 1, before them or after them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(64, 64)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.inner(values.view(-1, 1, 64).transpose(0, 1)).transpose(0, 1)


def turned_around_layers() -> list[nn.Module]:
    """The gradient of an activation has its dimension of size 1 elsewhere in memory."""
    return [
        nn.Sequential(nn.Linear(12, 16384), nn.Unflatten(1, (256, 1, 64)), nn.Flatten(0, 1)),
        TurnedAround(),
        nn.Sequential(nn.Unflatten(0, (4, 256)), nn.Flatten(1), nn.Linear(16384, 4)),
    ]


class Twice(nn.Module):
    """Uses its input twice."""

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.sin() * values


def alone(job: Job, whole: nn.Module, step: int, replica: int = 0) -> float:
    """Gradients of one process, with the job's codec between stages; returns the loss."""
    assert isinstance(whole, StagedModel)
    coded = CodedModel(job, whole)
    coded.begin(step, replica)
    computed = replace(job, loss=lambda _, batch: job.loss(coded, batch))  # type: ignore[arg-type]
    return replica_gradients(whole, computed, BatchSource(job), step, replica)[0]


@pytest.mark.part(of=5)
@pytest.mark.usefixtures("traced_once")
@EACH_RUN
@pytest.mark.parametrize(
    ("layers", "cuts", "codec"),
    [
        *(pytest.param(wide_layers, [1, 2, 3], codec, id=codec) for codec in CODED),
        pytest.param(wide_layers, [1, 2, 3], "int8:stochastic=true", id="random rounding"),
        pytest.param(turned_around_layers, [1, 2], "qsgd", id="a dimension of size 1 that moves"),
        pytest.param(several_layers, [2, 3, 4], "bf16", id="several tensors, some twice, some unused, an order"),
        pytest.param(cut_off_layers, [1, 2], "bf16", id="no gradient comes back"),
        pytest.param(frozen_layers, [1, 4], "fp16", id="frozen weights"),
        pytest.param(skips, [], "bf16", id="traced, with skip connections"),
        pytest.param(words, [], "bf16", id="traced, with tied weights"),
    ],
)
def test_with_a_codec_between_stages_the_bits_are_those_of_one_process_that_encodes_there(
    schedule: PipelineSchedule, layers: Callable[[], list[nn.Module]], cuts: list[int], codec: str
) -> None:
    job = job_of(layers, cuts, codec_parcels=codec)
    whole, parts, home = job.build_model(), job.build_model(), AtHome()
    assert isinstance(parts, StagedModel)
    runner = StageRunner(parts, job, BatchSource(job), schedule, home)
    for step in range(2):
        expected = alone(job, whole, step)
        part = runner.run(step, {0: range(parts.num_stages)})[0]
        assert part.loss == expected
        assert_gradients(whole, part.gradients)
    plain, _ = replica_gradients(job.build_model(), job, BatchSource(job), 0, 0)
    if CODECS.parse(codec).exact:
        assert alone(job, job.build_model(), 0) == plain
    else:
        assert alone(job, job.build_model(), 0) != plain


def assert_gradients(whole: nn.Module, found: Mapping[str, torch.Tensor]) -> None:
    """The gradients that one process has left in its model."""
    assert {name for name, one in whole.named_parameters() if one.grad is not None} == set(found)
    for name, parameter in whole.named_parameters():
        assert parameter.grad is None or torch.equal(parameter.grad, found[name]), name


HOSTS = [
    pytest.param([[0], [1], [2]], 1, id="a worker per stage"),
    pytest.param([2, 1, 1], 2, id="2-1-1"),
    pytest.param([1, 2, 1], 4, id="1-2-1, two replicas each"),
    pytest.param([[0], [1], [0]], 2, id="stages that are not neighbours"),
    pytest.param([[0, 1], [1, 0], [0, 1]], 2, id="replicas that cross"),
    pytest.param([[0], [0], [0]], 2, id="one worker"),
]


@pytest.mark.part(of=3)
@EACH_RUN
@pytest.mark.parametrize("codec", ["", "int8:stochastic=true"])
@pytest.mark.parametrize(("workers", "replicas"), HOSTS)
def test_whoever_has_which_stages_each_replica_has_the_bits_that_it_has_alone(
    schedule: PipelineSchedule, workers: list[int | list[int]], replicas: int, codec: str
) -> None:
    layers, cuts = (wide_layers, [1, 2]) if codec else (plain_layers, [1, 4])
    job = job_of(layers, cuts, replicas=replicas, codec_parcels=codec)
    hosts, mail = hosts_of(workers, 3), Mail()

    def work(number: int) -> tuple[dict[int, StepPart], nn.Module]:
        model = job.build_model()
        assert isinstance(model, Pipeline)
        runner = StageRunner(model, job, BatchSource(job), schedule, mail)
        return runner.run(0, stages_of(hosts, replicas, number)), model

    found = run_workers(hosts, mail.turn, work)
    for replica in range(replicas):
        whole = job.build_model()
        expected = alone(job, whole, 0, replica)
        parts = [parts[replica] for parts, _ in found if replica in parts]
        assert_gradients(whole, {name: values for part in parts for name, values in part.gradients.items()})
        assert [part.loss for part in parts if part.loss is not None] == [expected]
        if replica == 0:
            norm = "0.1.bias" if codec else "1.bias"
            owner = next(model for parts, model in found if 0 in parts and norm in parts[0].gradients)
            for (name, ours), theirs in zip(whole.named_buffers(), owner.buffers(), strict=True):
                assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("pipeline", ["flush", "flush:recompute=true"])
def test_a_worker_that_waits_rests_only_once_all_have_begun_the_step(pipeline: str) -> None:
    schedule = schedule_named(pipeline)
    job, hosts, mail = job_of(plain_layers, [1, 4]), hosts_of([[0], [1], [2]], 3), Mail()
    began: set[int] = set()
    rests: list[set[int]] = []

    def work(number: int) -> None:
        began.add(number)
        model = job.build_model()
        assert isinstance(model, Pipeline)
        runner = StageRunner(model, job, BatchSource(job), schedule, mail, rest=lambda: rests.append(set(began)))
        runner.run(0, stages_of(hosts, 1, number))

    run_workers(hosts, mail.turn, work)
    assert rests and all(found == {0, 1, 2} for found in rests)


@EACH_RUN
def test_replicas_of_a_worker_take_turns(schedule: PipelineSchedule) -> None:
    job, home = job_of(plain_layers, [1, 4], replicas=2), AtHome()
    model = job.build_model()
    assert isinstance(model, Pipeline)
    StageRunner(model, job, BatchSource(job), schedule, home).run(0, {0: [0, 1, 2], 1: [0, 1, 2]})
    forward = [one.replica for one in home.passes if one.stage == 0 and not one.back]
    assert forward == [0, 1] * job.accumulate


class Rows(IterableDataset):  # type: ignore[type-arg]
    """Reads in one direction, and counts."""

    read = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        for index in range(48):
            Rows.read += 1
            yield torch.full((12,), index / 48) + torch.randn(12), index % 4


def test_data_in_one_direction_is_read_once_although_replicas_take_turns() -> None:
    job = replace(job_of(plain_layers, [1, 4], replicas=2), dataset=Rows)
    model = job.build_model()
    assert isinstance(model, Pipeline)
    runner, Rows.read = StageRunner(model, job, BatchSource(job), schedule_named("flush"), AtHome()), 0
    both = {0: [0, 1, 2], 1: [0, 1, 2]}
    parts = [runner.run(step, both) for step in range(2)]
    # 2 steps of 2 replicas with 3 microbatches of 4.
    assert Rows.read == 48
    for step, replica in itertools.product(range(2), range(2)):
        expected, _ = replica_gradients(job.build_model(), job, BatchSource(job), step, replica)
        assert parts[step][replica].loss == expected


@pytest.mark.parametrize("name", [one.name for one in CODECS if one.name not in CODED])
def test_codecs_that_need_more_than_the_numbers_are_refused(name: str) -> None:
    with pytest.raises(JobError, match=f"codec_parcels is '{name}.*', which needs "):
        of_parcels(Settings(codec_parcels=name))


def calls_twice(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return loss(model, batch) + loss(model, batch)


def looks_inside(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return loss(model, batch) + sum(value.norm() for value in model.parameters())


def calls_nothing(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return batch[0].sum().requires_grad_()


def draws(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    """Draws random numbers before it calls the model, and after that."""
    outputs = model(batch[0] + torch.randn(12))
    return nn.functional.cross_entropy(outputs + torch.randn(4), batch[1])


@EACH_RUN
def test_random_numbers_around_the_model_are_those_of_one_process(schedule: PipelineSchedule) -> None:
    job = replace(job_of(plain_layers, [1, 4]), loss=draws)
    model = job.build_model()
    assert isinstance(model, Pipeline)
    runner = StageRunner(model, job, BatchSource(job), schedule, AtHome())
    expected, _ = replica_gradients(job.build_model(), job, BatchSource(job), 0, 0)
    assert runner.run(0, {0: range(3)})[0].loss == expected


def calls_with_two(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    return model(batch[0], batch[1]).sum()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("used", "sentence"),
    [
        (calls_twice, "called the model of a pipeline twice"),
        (looks_inside, "asks for model.parameters, but no worker of a pipeline has the whole model"),
        (calls_nothing, "does not call the model"),
        (calls_with_two, "takes one input, a tensor or a tuple of tensors, but was called with 2"),
    ],
)
def test_a_loss_that_needs_the_whole_model_is_refused(used: Callable[..., torch.Tensor], sentence: str) -> None:
    job = job_of(plain_layers, [4])
    fields = {"batch_size": 4, "accumulate": 3, "steps": 4, "optimizer": "SGD"}
    job = Job(model=job.model, loss=used, dataset=Points(), optimizer_args={"lr": 0.1}, **fields)  # type: ignore[arg-type]
    model = job.build_model()
    assert isinstance(model, Pipeline)
    runner = StageRunner(model, job, BatchSource(job), schedule_named("gpipe"), AtHome())
    with pytest.raises(JobError, match=sentence):
        runner.run(0, {0: [0, 1]})


def doubles_its_batch(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    batch[0].mul_(2)
    return loss(model, batch)


class Growing(nn.Module):
    """Returns one more tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(12))
        self.count = 0

    def forward(self, values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        self.count += 1
        return tuple(values * self.scale for _ in range(self.count))


class First(nn.Module):
    def forward(self, values: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return values[0]


@pytest.mark.parametrize(
    ("layers", "used", "sentence"),
    [
        pytest.param(
            plain_layers,
            doubles_its_batch,
            "changes in place what it is given, in step 0 of replica 0, stage 0, so",
            id="in place",
        ),
        pytest.param(
            lambda: [Growing(), First(), nn.Linear(12, 4)],
            loss,
            r"returns \d tensors, in step 0 of replica 0, stage 0, where it has returned \d",
            id="other outputs",
        ),
    ],
)
def test_a_pass_that_can_not_be_repeated_is_refused(
    layers: Callable[[], list[nn.Module]], used: Callable[..., torch.Tensor], sentence: str
) -> None:
    job = replace(job_of(layers, [1]), loss=used)
    model = job.build_model()
    assert isinstance(model, Pipeline)
    runner = StageRunner(model, job, BatchSource(job), schedule_named("flush:recompute=true"), AtHome())
    with pytest.raises(JobError, match=sentence):
        runner.run(0, {0: [0, 1]})


@EACH_RUN
def test_a_stage_computes_each_microbatch_as_often_as_the_schedule_says(schedule: PipelineSchedule) -> None:
    job, passes = job_of(plain_layers, [1, 4]), [0, 0, 0]
    model = job.build_model()
    assert isinstance(model, Pipeline)
    for stage in range(3):

        def count(*_: object, stage: int = stage) -> None:
            passes[stage] += 1

        model[model.span(stage)[0]].register_forward_hook(count)
    StageRunner(model, job, BatchSource(job), schedule, AtHome()).run(0, {0: range(3)})
    assert passes == [(1 + schedule.recompute) * job.accumulate] * 3


def test_a_stage_that_nobody_computes_is_named() -> None:
    job = job_of(plain_layers, [1, 4])
    model = job.build_model()
    assert isinstance(model, Pipeline)
    runner = StageRunner(model, job, BatchSource(job), schedule_named("flush"), AtHome())
    with pytest.raises(JobError, match="the gradient for stage 0 of replica 0, microbatch 0 of step 7"):
        runner.run(7, {0: [0]})


def casts(model: nn.Module, batch: Sequence[torch.Tensor]) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return loss(model, batch)


@pytest.mark.parametrize("codec", ["", "bf16"])
def test_autocast_in_the_loss_reaches_two_stages_and_more_are_refused(codec: str) -> None:
    def run(cuts: list[int]) -> tuple[StepPart, nn.Module, float]:
        job = replace(job_of(plain_layers, cuts, codec_parcels=codec), loss=casts)
        whole, parts = job.build_model(), job.build_model()
        assert isinstance(parts, Pipeline)
        runner = StageRunner(parts, job, BatchSource(job), schedule_named("flush"), AtHome())
        part = runner.run(0, {0: range(parts.num_stages)})[0]
        return part, whole, alone(job, whole, 0)

    part, whole, expected = run([4])
    assert part.loss == expected
    assert_gradients(whole, part.gradients)
    with pytest.raises(JobError, match=r"calls the model under torch.autocast, in step 0 .* stage 0, but the stages"):
        run([1, 4])
