"""Changes to the model while it is trained: as in plain torch, or refused by the tensor's name."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrize, prune, vector_to_parameters
from torch.optim.swa_utils import AveragedModel

from shardline.client.watch.first_loss import FirstLoss
from shardline.client.watch.model_watch import ModelWatch
from shardline.errors import JobError
from shardline.model import model_tensors, named_values
from shardline.testing import reference
from tests.support.cluster import Cluster, Worker, assert_same_end
from tests.support.jobs import make_job
from tests.support.overlap import OverlapWorker
from tests.support.services import Services, backward, make_model

pytestmark = pytest.mark.usefixtures("no_push_is_small")
SMALL_BUCKETS = 256
STEPS = 4


class Watched(nn.Module):
    """Calls `act` in each pass, with the number of the pass, before or after the layers."""

    act: Callable[[Watched, int], None] = staticmethod(lambda model, number: None)
    first_act: Callable[[Watched, int], None] = staticmethod(lambda model, number: None)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 8)
        self.last = nn.Linear(8, 1)
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("seen", torch.tensor(0))
        self.register_buffer("scratch", torch.zeros(8), persistent=False)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first_act(self, self.passes)
        hidden = torch.tanh(self.frozen(self.first(x)))
        found: torch.Tensor = self.last(hidden - self.mean)
        self.act(self, self.passes)
        self.passes += 1
        return found


def watched(act: Callable[[Watched, int], None], *, first: bool = False) -> Callable[[], Watched]:
    def make() -> Watched:
        model = Watched()
        setattr(model, "first_act" if first else "act", act)
        return model

    return make


def assign_buffers(model: Watched, number: int) -> None:
    model.mean = 0.9 * model.mean + 0.1 * model.first.weight.detach().mean(1)
    model.seen = model.seen + 4
    model.scratch = torch.ones(number)


def assign_views_of_buffers(model: Watched, number: int) -> None:
    model.mean.data = torch.full((8,), 0.1 * number)
    model.seen = model.seen.view(())


def clone_parameters(model: Watched, number: int) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()


def transpose_memory(model: Watched, number: int) -> None:
    model.first.weight.data = model.first.weight.data.t().contiguous().t()


def one_vector(model: Watched, number: int) -> None:
    vector_to_parameters(parameters_to_vector(model.parameters()), model.parameters())


def write_and_undo(model: Watched, number: int) -> None:
    with kept(model), torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)


def write_late_and_undo(model: Watched, number: int) -> None:
    if number >= 6:
        write_and_undo(model, number)


def perturb_and_undo(model: Watched, number: int) -> None:
    for parameter in model.parameters():
        old = parameter.data.clone()
        with torch.no_grad():
            parameter.add_(1.0)
        parameter.data = old


def freeze_at_first(model: Watched, number: int) -> None:
    model.first.requires_grad_(number >= 5)


def add_a_module_without_tensors(model: Watched, number: int) -> None:
    model.another = nn.Tanh()


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """As averaged weights are put into a model for an evaluation."""
    values = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    yield
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(values[name])


ALLOWED: dict[str, tuple[Callable[[Watched, int], None], bool]] = {
    "buffers that are assigned anew": (assign_buffers, False),
    "buffers with other memory": (assign_views_of_buffers, False),
    "parameters with other memory": (clone_parameters, False),
    "parameters with other strides": (transpose_memory, True),
    "parameters in one vector": (one_vector, False),
    "parameters that are written to and put back": (write_and_undo, True),
    "the same for the first time later": (write_late_and_undo, True),
    "sharpness-aware": (perturb_and_undo, True),
    "parameters that begin to train later": (freeze_at_first, True),
    "a module without tensors": (add_a_module_without_tensors, False),
}


def train(cluster: Cluster, overlap: bool, replicas: int = 2) -> Worker:
    worker = OverlapWorker(cluster, 0) if overlap else cluster.worker(0)
    if overlap:
        cluster.workers.append(worker)
    return worker.run(list(range(replicas)), cluster.job.steps)


@pytest.mark.parametrize("way", ["grpc", "overlap", "shm", "shm overlap"])
@pytest.mark.parametrize("what", ALLOWED)
def test_what_has_a_meaning_ends_in_the_bits_of_plain_torch(what: str, way: str) -> None:
    act, first = ALLOWED[what]
    job = make_job("momentum", model=watched(act, first=first), replicas=2, steps=STEPS)
    with Cluster(job, ps=2, bucket_bytes=SMALL_BUCKETS, lane="shm" if "shm" in way else "grpc") as cluster:
        worker = train(cluster, "overlap" in way)
        assert_same_end(cluster.state(), reference(job))
        for name, value in worker.values.items():
            assert torch.equal(value, {**cluster.state().params, **cluster.state().buffers}[name]), name


def at(number: int, act: Callable[[Watched], Any]) -> Callable[[Watched, int], None]:
    def maybe(model: Watched, passes: int) -> None:
        if passes == number:
            act(model)

    return maybe


def write(model: Watched) -> None:
    with torch.no_grad():
        model.last.weight.mul_(0.5)


def replace_parameter(model: Watched) -> None:
    model.last.weight = nn.Parameter(model.last.weight.detach().clone())


def tie(model: Watched) -> None:
    model.frozen.bias = model.first.bias


def share_memory(model: Watched) -> None:
    model.first.bias.data = model.frozen.bias.data


def merge_into_frozen(model: Watched) -> None:
    model.frozen.weight.data += 1.0


def assign_longer(model: Watched) -> None:
    model.mean = torch.zeros(9)


def assign_graph(model: Watched) -> None:
    model.mean = model.first.bias * 2


class Doubled(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


REFUSED: dict[str, tuple[Callable[[Watched], Any], str]] = {
    "written in place": (write, "step 1: 'last.weight' was written to in this process"),
    "written through data": (lambda model: model.last.weight.data.mul_(0.5), "'last.weight' was written to"),
    "data with other values": (
        lambda model: setattr(model.last.weight, "data", model.last.weight.data * 0.5),
        "'last.weight' was written to",
    ),
    "frozen and written through data": (merge_into_frozen, "'frozen.weight' was written to"),
    "replaced": (replace_parameter, "step 1: the model has another object as parameter 'last.weight'"),
    "tied": (tie, "the model has another object as parameter 'frozen.bias'"),
    "pruned": (
        lambda model: prune.l1_unstructured(model.last, "weight", 0.3),
        r"'last.weight' is now called 'last.weight_orig' \(pruned",
    ),
    "parametrized": (
        lambda model: parametrize.register_parametrization(model.last, "weight", Doubled()),
        "'last.weight' is now called 'last.parametrizations.weight.original'",
    ),
    "gone": (lambda model: delattr(model, "frozen"), "'frozen.weight' is no longer in the model"),
    "a new module": (lambda model: setattr(model, "head", nn.Linear(1, 1)), "'head.(weight|bias)' is new in the model"),
    "a new buffer": (
        lambda model: model.register_buffer("more", torch.zeros(1)),
        "'more' is new in the model.* persistent=False",
    ),
    "double": (
        lambda model: setattr(model.frozen.bias, "data", model.frozen.bias.data.double()),
        r"'frozen.bias' has shape \(8,\) and dtype float64 on cpu now, and had .* float32",
    ),
    "shared memory": (share_memory, "'(first|frozen).bias' and '(first|frozen).bias' are different tensors that share"),
    "unfrozen": (lambda model: model.frozen.requires_grad_(True), "'frozen.weight' requires a gradient now"),
    "a buffer with another shape": (assign_longer, r"buffer 'mean' was assigned a value of shape \(9,\)"),
    "a buffer with a graph": (assign_graph, "buffer 'mean' was assigned a value that carries the graph"),
    "no buffer": (lambda model: setattr(model, "mean", None), "'mean' is no longer in the model"),
}


@pytest.mark.parametrize("way", ["grpc", "shm overlap"])
@pytest.mark.parametrize("what", REFUSED)
def test_what_has_no_meaning_is_refused_by_name_at_the_step_where_it_happens(what: str, way: str) -> None:
    act, message = REFUSED[what]
    # After the layers where possible: some of these let the pass itself fail.
    model = watched(at(1, act), first=what in ("written in place", "parametrized"))
    job = make_job("momentum", model=model, replicas=1, steps=STEPS)
    with Cluster(job, ps=2, bucket_bytes=SMALL_BUCKETS, lane="shm" if "shm" in way else "grpc") as cluster:
        with pytest.raises(JobError, match=message) as found:
            train(cluster, "overlap" in way, replicas=1)
        assert str(found.value).startswith("step 1: ") or what == "shared memory"


@pytest.mark.parametrize("way", ["grpc", "overlap", "shm"])
def test_a_value_that_is_written_in_a_later_step_is_compared_with_the_servers(way: str) -> None:
    job = make_job("adam", model=watched(at(3, write), first=True), replicas=1, steps=5)
    with (
        Cluster(job, ps=2, bucket_bytes=SMALL_BUCKETS, lane="shm" if way == "shm" else "grpc") as cluster,
        pytest.raises(JobError, match=r"step 3: 'last.weight' was written to in this process"),
    ):
        train(cluster, "overlap" in way, replicas=1)


def test_a_pass_that_is_repeated_begins_with_the_buffers_of_its_step() -> None:
    job = make_job("momentum", model=watched(assign_buffers), replicas=1, steps=STEPS)
    with Cluster(job, ps=1) as cluster:
        worker = cluster.worker(0)
        worker.run([0], 2)
        # As a pass leaves it that is given up in the middle.
        worker.model.mean = torch.full((8,), float("nan"))
        worker.run([0], STEPS)
        assert_same_end(cluster.state(), reference(job))


def test_replicas_with_parameters_of_their_own_may_write_to_them() -> None:
    def clip(model: Watched, number: int) -> None:
        with torch.no_grad():
            model.last.weight.clamp_(-0.1, 0.1)

    job = make_job("momentum", model=watched(clip, first=True), replicas=1, steps=3, cadence="local-sgd:every=2")
    with Cluster(job, ps=1) as cluster:
        worker = cluster.worker(0)
        worker.run([0], 3)
        assert worker.trainer.step == 3


def test_parameters_that_the_loss_uses_and_the_model_has_not_are_told_once(caplog: pytest.LogCaptureFixture) -> None:
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    data = torch.randn(4, 2, generator=torch.Generator().manual_seed(0))

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = (model(batch) - other(batch)).square().mean()
        return found

    first = FirstLoss(loss)
    for _ in range(2):
        first(model, data)
    assert [text for text in caplog.messages if "2 parameters that are not in the model" in text and "(1, 2)" in text]
    assert len(caplog.messages) == 1
    caplog.clear()
    # Inputs that need gradients, and frozen parameters, are nothing to speak of.
    other.requires_grad_(False)
    FirstLoss(loss)(model, data.clone().requires_grad_())
    assert not caplog.messages


def test_extra_state_is_said_not_to_be_kept(caplog: pytest.LogCaptureFixture) -> None:
    class Extra(nn.Linear):
        def get_extra_state(self) -> Any:
            return {"calls": 3}

    model = nn.Sequential(Extra(2, 1))
    ModelWatch(model, named_values(model), (), script=True, divided=False)
    assert [text for text in caplog.messages if text.startswith("module 0 has extra state") and "strict=False" in text]


# A loop of the user's own


def plain(steps: int, act: Callable[[nn.Module, torch.optim.Optimizer, int], None], **settings: Any) -> nn.Module:
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, **settings)
    loop(model, optimizer, steps, act)
    return model


def loop(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    steps: int,
    act: Callable[[nn.Module, torch.optim.Optimizer, int], None],
) -> None:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.2, total_steps=steps + 1)
    for step in range(steps):
        optimizer.zero_grad()
        backward(model, step)
        act(model, optimizer, step)
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("how", ["plain", "zero_copy", "async"])
def test_a_loop_of_the_users_own_may_move_average_perturb_and_schedule(
    start: Callable[..., Services], how: str
) -> None:
    averages: list[AveragedModel] = []

    def act(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 0:
            averages.append(AveragedModel(model))
        averages[-1].update_parameters(model)
        optimizer.param_groups[0]["weight_decay"] = 0.01 * step
        if step == 2:
            clone_parameters(model, step)  # type: ignore[arg-type]
        if step == 3:
            write_and_undo(model, step)  # type: ignore[arg-type]
        if step >= 5:
            perturb_and_undo(model, step)  # type: ignore[arg-type]

    services = start(ps=2, workers=1)
    session = services.connect(consistency="async") if how == "async" else services.connect()
    model = make_model()
    inner = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    optimizer = session.attach(model, inner, zero_copy=how == "zero_copy")
    loop(model, optimizer, 8, act)
    session.close()
    services.end()
    expected = plain(8, act, momentum=0.9)
    for name, value in named_values(expected).items():
        assert torch.equal(named_values(model)[name], value), name
    ours, theirs = averages
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def refuse(optimizer: torch.optim.Optimizer, message: str) -> None:
    with pytest.raises(JobError, match=message):
        optimizer.step()


def test_a_loop_of_the_users_own_is_refused_what_the_servers_do_not_follow(start: Callable[..., Services]) -> None:
    services = start(ps=1, workers=1)
    session = services.connect()
    model = make_model()
    optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
    group = optimizer.param_groups[0]
    for _ in session.steps(3):
        backward(model, 0)
        group["nesterov"] = True
        refuse(optimizer, "nesterov of parameter group 0 is True and was False when training began")
        group["nesterov"] = False
        group["lr"] = None
        refuse(optimizer, "lr of parameter group 0 is None and was 'a number'")
        group["lr"] = 0.05
        members = group["params"]
        group["params"] = members[1:]
        refuse(optimizer, "the parameters in the optimizer's groups are not those that the servers train")
        group["params"] = members
        values = copy.deepcopy(model.state_dict())
        model.load_state_dict({name: value + 1 for name, value in values.items()})
        refuse(optimizer, "'0.weight' and 3 more were written to in this process")
        model.load_state_dict(values)
        with pytest.raises(JobError, match="no 'momentum_buffer' in this process"):
            optimizer.state[members[0]]["momentum_buffer"]
        optimizer.step()
    assert session.step == 3
    # Such a dict is loaded without classes of Shardline.
    assert all(type(value) is dict for value in optimizer.state_dict()["state"].values())
    session.close()
    services.end()


def test_a_group_with_a_parameter_that_is_not_in_the_model_is_refused() -> None:
    model, temperature = make_model(), nn.Parameter(torch.tensor(0.5))
    groups = [{"params": list(model.parameters())}, {"params": [temperature]}]
    with pytest.raises(JobError, match=r"parameter group 1 has a parameter of shape \(\) that is not in the model"):
        model_tensors(model, groups)
    temperature.requires_grad_(False)
    assert len(model_tensors(model, groups)) == 4
