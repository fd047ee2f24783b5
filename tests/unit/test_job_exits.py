"""Code of a job file that raises or ends the process: it is named, with its line, wherever it is called from."""

from __future__ import annotations

import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from shardline.data import BatchSource, replica_gradients
from shardline.errors import JobError, JobExitError, ShardlineError, TensorError, as_error, calling, telling
from shardline.job import Job, load_job

JOB = """
import sys
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset
from shardline import Job

class Samples:
    def __len__(self):
        {len}
        return 8
    def __getitem__(self, index):
        {getitem}
        return torch.ones(2)

class Stream(IterableDataset):
    def set_epoch(self, epoch):
        {set_epoch}
        pass
    def __iter__(self):
        {iter}
        yield torch.ones(2)
        {next}

class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, value):
        return 2 * value
    @staticmethod
    def backward(ctx, gradient):
        {backward}
        return 2 * gradient

def model():
    {model}
    return nn.Linear(2, 1)

def dataset():
    {dataset}
    return {data}()

def loss(model, batch):
    {loss}
    return Double.apply(model(batch)).mean()

def collate(samples):
    {collate}
    return torch.stack(samples)

def groups(model):
    {param_groups}
    return [{{"params": list(model.parameters())}}]

def evaluate(model):
    {evaluate}
    return {{"loss": 0.0}}

job = Job(
    model=model, loss=loss, dataset=dataset, collate=collate, evaluate=evaluate, param_groups=groups,
    optimizer="SGD", optimizer_args={{"lr": 0.1}}, batch_size=2, steps=4,
)
{end}
"""
PLACES = ["len", "getitem", "set_epoch", "iter", "next", "backward", "model", "dataset", "loss", "collate"]
PLACES += ["param_groups", "evaluate", "end"]


def write(folder: Path, place: str, statement: str, data: str) -> tuple[Path, int]:
    """The job file with a statement in one place, and the statement's line."""
    fields = {**dict.fromkeys(PLACES, "pass"), place: statement, "data": data}
    path = folder / "job.py"
    path.write_text(JOB.format(**fields))
    line = next(n for n, text in enumerate(path.read_text().splitlines(), 1) if text.strip() == statement)
    return path, line


def train(path: Path) -> None:
    """Everything that a worker and an evaluator call of a job."""
    job = load_job(path)
    model = job.build_model()
    job.spec(model)
    source = BatchSource(job)
    for step in range(2):
        replica_gradients(model, job, source, step, 0)
    job.score(model)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("statement", ["sys.exit(3)", "raise LookupError('mine')"])
def test_an_exit_or_exception_anywhere_in_a_job_file_is_an_error_of_the_job_with_its_line(
    tmp_path: Path, place: str, statement: str
) -> None:
    data = "Stream" if place in ("set_epoch", "iter", "next") else "Samples"
    path, line = write(tmp_path, place, statement, data)
    with pytest.raises(JobError) as caught:
        train(path)
    assert caught.value.exit_code == 2
    exits = "SystemExit: 3" if place == "end" else "sys.exit(3)"
    assert (exits if statement == "sys.exit(3)" else "LookupError: mine") in str(caught.value), caught.value
    assert f"job.py, line {line}" in str(caught.value), caught.value


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("return (model(batch) * 1j).sum()", r"returned a tensor of dtype torch\.complex64; it must be real"),
        ("model.weight.register_hook(lambda gradient: 1 / 0)", r"backward\(\), .*ZeroDivisionError: .*line {line}\)"),
        ("value = model(batch).exp(); model = lambda _: value; value.add_(1)", r"backward\(\), .*inplace operation"),
    ],
    ids=["complex", "hook", "in-place"],
)
def test_a_loss_that_has_no_gradient_is_an_error_of_the_job(tmp_path: Path, statement: str, says: str) -> None:
    path, line = write(tmp_path, "loss", statement, "Samples")
    with pytest.raises(JobError, match=says.format(line=line)):
        train(path)


@pytest.mark.parametrize(
    ("raised", "says"),
    [
        ("ValueError('x' * 100_000)", r"raised ValueError: x{2000}\.\.\. \("),
        ("type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})()", r"raised Odd: \(its str\(\) raises\) \("),
    ],
)
def test_an_exception_of_any_text_is_told(tmp_path: Path, raised: str, says: str) -> None:
    path, _ = write(tmp_path, "collate", f"raise {raised}", "Samples")
    with pytest.raises(JobError, match=says):
        train(path)


def test_a_job_that_ends_nothing_is_trained_and_scored(tmp_path: Path) -> None:
    for data in ("Samples", "Stream"):
        path, _ = write(tmp_path, "loss", "assert True", data)
        train(path)


@pytest.mark.parametrize(
    ("statement", "says"),
    [
        ("sys.exit()", r"called sys\.exit\(\)"),
        ("sys.exit(0)", r"called sys\.exit\(0\)"),
        ("sys.exit('enough')", r"called sys\.exit\('enough'\)"),
        ("raise SystemExit(7)", r"called sys\.exit\(7\)"),
    ],
)
def test_the_code_that_was_given_is_told(tmp_path: Path, statement: str, says: str) -> None:
    path, line = write(tmp_path, "loss", statement, "Samples")
    with pytest.raises(
        JobExitError, match=rf"^loss\(model, batch\), in step 0 of replica 0, {says} \(.*line {line}\)$"
    ):
        train(path)


def test_what_collate_raises_is_named_too(tmp_path: Path) -> None:
    path, line = write(tmp_path, "collate", "raise KeyError('label')", "Samples")
    with pytest.raises(JobError, match=rf"^collate\(samples\) raised KeyError: 'label' \(.*job\.py, line {line}\)$"):
        train(path)


def test_the_line_is_the_persons_own_and_not_one_of_a_library_that_it_calls(tmp_path: Path) -> None:
    statement = "__import__('argparse').ArgumentParser().error('no such flag')"
    path, line = write(tmp_path, "loss", statement, "Samples")
    with pytest.raises(JobExitError, match=rf"called sys\.exit\(2\) \(.*job\.py, line {line}\)$"):
        train(path)


def interrupt() -> None:
    raise KeyboardInterrupt


def test_keyboard_interrupt_of_the_job_is_named_and_that_of_a_person_is_theirs() -> None:
    # A process started in the background has the signal ignored.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt), calling("loss"):
            interrupt()
        signal.signal(signal.SIGINT, lambda *_: None)
        says = r"^loss raised KeyboardInterrupt \(.*test_job_exits\.py, line \d+\)$"
        with pytest.raises(JobExitError, match=says), calling("loss"):
            interrupt()
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize(("module", "ends"), [("shardline.client.hooks", ZeroDivisionError), ("job_hooks", JobError)])
def test_a_defect_in_shardline_is_no_error_of_the_job(module: str, ends: type[Exception]) -> None:
    code: dict[str, Any] = {"__name__": module}
    exec(compile("def fired(value): 1 / 0", "hooks.py", "exec"), code)
    value = torch.ones(2, requires_grad=True)
    value.register_post_accumulate_grad_hook(code["fired"])  # type: ignore[no-untyped-call]
    with pytest.raises(ends), calling("backward()"):
        value.sum().backward()  # type: ignore[no-untyped-call]


def test_an_exception_of_the_users_code_is_known_wherever_it_is_caught() -> None:
    with pytest.raises(LookupError) as caught:
        raise LookupError("mine")
    found = as_error(caught.value, "the job")
    assert isinstance(found, JobError)
    assert re.fullmatch(r"the job raised LookupError: mine \(.*test_job_exits\.py, line \d+\)", str(found))
    error = TensorError("no such tensor")
    assert as_error(error, "the job") is error
    assert as_error(ZeroDivisionError("raised by nobody"), "the job") is None


def test_an_exception_that_ends_a_task_is_told_before_and_a_defect_is_not() -> None:
    told: list[str] = []

    def tell(error: ShardlineError) -> None:
        told.append(str(error))

    with pytest.raises(JobError), telling(tell):
        raise LookupError("mine")
    with pytest.raises(TensorError), telling(tell):
        raise TensorError("no such tensor")
    assert len(told) == 2 and "raised LookupError: mine" in told[0] and told[1] == "no such tensor"
    code: dict[str, Any] = {"__name__": "shardline.client"}
    exec(compile("def train(telling, tell):\n  with telling(tell): 1 / 0", "train.py", "exec"), code)
    with pytest.raises(ZeroDivisionError):
        code["train"](telling, tell)
    assert len(told) == 2


def test_the_evaluator_ends_where_evaluate_ends_it_and_not_where_it_raises(tmp_path: Path) -> None:
    from shardline.model import named_values
    from shardline_evaluator.service import score

    def no_rows(table: str, ids: torch.Tensor) -> torch.Tensor:
        raise AssertionError(f"the model has no table {table!r}")

    def scored(statement: str) -> str:
        path, _ = write(tmp_path, "evaluate", statement, "Samples")
        job: Job = load_job(path)
        model = job.build_model()
        return score(job, model, 1, dict(named_values(model)), no_rows).failure

    assert "evaluate(model) raised ValueError: no" in scored("raise ValueError('no')")
    with pytest.raises(JobExitError, match=r"^evaluate\(model\) called sys\.exit\(3\)"):
        scored("sys.exit(3)")
