"""session.barrier(): all workers of a script meet, or are told who does not come."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import nn

from shardline.client.api.session import Session
from shardline.errors import JobError, TaskLostError, UnreachableError, UsageError
from tests.support.services import PATIENCE_S, Services


def attached(services: Services, index: int, **settings: str) -> tuple[Session, nn.Parameter, torch.optim.Optimizer]:
    session = services.connect(index, **settings)
    w = nn.Parameter(torch.zeros(4))
    return session, w, session.attach({"w": w}, torch.optim.SGD([w], lr=0.1))


def step(w: nn.Parameter, optimizer: torch.optim.Optimizer) -> None:
    w.grad = torch.ones(4)
    optimizer.step()


@pytest.mark.parametrize("consistency", ["sync", "async"])
def test_all_workers_meet_before_in_and_after_their_loops(start: Callable[..., Services], consistency: str) -> None:
    services = start(ps=1, workers=3)
    lock = threading.Lock()
    arrived: dict[str, set[int]] = {}

    def worker(index: int) -> None:
        session, w, optimizer = attached(services, index, consistency=consistency)

        def meet(name: str) -> None:
            with lock:
                arrived.setdefault(name, set()).add(index)
            assert session.barrier()
            with lock:
                assert arrived[name] == {0, 1, 2}, name

        meet("before")
        meet("before again")
        for number in session.steps(6):
            if number % 2:
                meet(f"in step {number}")
                meet(f"in step {number} again")
            # Two, of which one comes while some have not seen the answer to the other.
            assert session.broadcast({"of": index, "at": number}) == {"of": 0, "at": number}
            assert session.broadcast(f"worker/{index}") == "worker/0"
            step(w, optimizer)
        meet("after")
        session.close()

    services.workers(*(lambda index=index: worker(index) for index in range(3)))  # type: ignore[misc]
    assert len(arrived) == 9
    services.end()


def test_a_barrier_needs_an_attached_session_of_a_script(start: Callable[..., Services]) -> None:
    services = start(ps=1, workers=1)
    session = services.connect(0)
    with pytest.raises(UsageError, match=r"call session.attach\(model, optimizer\) first"):
        session.barrier()
    w = nn.Parameter(torch.zeros(4))
    session.attach({"w": w}, torch.optim.SGD([w], lr=0.1))
    assert session.barrier()
    assert session.broadcast() is None
    for value, says in ((torch.zeros(1), "takes JSON values"), ("x" * 70_000, "70,002 characters of JSON; 65,536 are")):
        with pytest.raises(UsageError, match=says):
            session.broadcast(value)
    session.close()
    with pytest.raises(UsageError, match="this session is closed"):
        session.barrier()
    services.end()


def test_a_worker_that_has_ended_is_named_to_whom_waits_for_it(start: Callable[..., Services]) -> None:
    services = start(ps=1, workers=2)

    def short() -> None:
        session, w, optimizer = attached(services, 0)
        step(w, optimizer)
        session.close()

    def waiting() -> None:
        session, w, optimizer = attached(services, 1)
        step(w, optimizer)
        with pytest.raises(
            JobError,
            match=r"worker/1 is waiting at a barrier in step 1 for worker/0, which has ended: .* same number of times",
        ) as found:
            session.barrier()
        session.fail(found.value)
        session.shutdown()

    services.workers(short, waiting)
    assert "worker/0, which has ended" in services.end(code=2)["reason"]


def test_a_worker_that_does_not_come_in_time_is_named(start: Callable[..., Services]) -> None:
    services = start(ps=1, workers=2)
    given_up = threading.Event()

    def late() -> None:
        session, _, _ = attached(services, 0)
        assert given_up.wait(PATIENCE_S)
        assert session.barrier()
        session.close()

    def waiting() -> None:
        session, _, _ = attached(services, 1)
        with pytest.raises(UnreachableError, match=r"worker/1 waited 0.5 s at a barrier in step 0 for worker/0; .*"):
            session.barrier(timeout_s=0.5)
        given_up.set()
        # Whoever catches it may go on waiting.
        assert session.barrier()
        session.close()

    services.workers(late, waiting)
    services.end()


def test_a_job_that_fails_ends_the_wait_with_its_reason(start: Callable[..., Services]) -> None:
    services = start(ps=1, workers=2)

    def failing() -> None:
        session, _, _ = attached(services, 0)
        session.fail(JobError("the data is not there"))
        session.shutdown()

    def waiting() -> None:
        session, _, _ = attached(services, 1)
        with pytest.raises(TaskLostError, match=r"the job has ended with exit code 2: worker/0: the data is not there"):
            session.barrier()
        session.shutdown()

    services.workers(failing, waiting)
    services.end(code=2)


def test_a_job_that_is_stopped_opens_no_barrier_that_can_not_be_met(start: Callable[..., Services]) -> None:
    services = start(ps=1, workers=2)
    at_barrier = threading.Event()

    def stopping() -> None:
        session, _, _ = attached(services, 0)
        assert at_barrier.wait(PATIENCE_S)
        session.link.client.stop("enough")
        session.close()

    def waiting() -> None:
        session, _, _ = attached(services, 1)
        at_barrier.set()
        assert session.barrier() is False
        session.close()

    services.workers(stopping, waiting)
    assert services.end()["reason"] == "stopped: enough"
