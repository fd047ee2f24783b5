"""Children of a connected process, such as workers of a DataLoader: they never speak for their parent."""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

import shardline
from shardline.client.api.session import Session
from shardline.errors import JobError, UsageError
from shardline.host.process import Termination
from tests.support.services import Services, backward, make_model
from tests.support.waiting import wait_for

CLUSTER = {"chief": ["127.0.0.1:1"], "ps": ["127.0.0.1:2"], "worker": ["127.0.0.1:0"]}


def in_a_child(does: Callable[[], bool]) -> None:
    """Run it in a forked child, which must end with True."""
    child = os.fork()
    if not child:
        code = 1
        try:
            code = 0 if does() else 3
        finally:
            os._exit(code)
    ended: list[int] = []

    def reaped() -> bool:
        pid, status = os.waitpid(child, os.WNOHANG)
        ended.extend([os.waitstatus_to_exitcode(status)] if pid else [])
        return bool(ended)

    try:
        wait_for(reaped, "the child's end")
    finally:
        if not ended:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    assert ended == [0]


def test_what_a_child_does_at_its_end_leaves_its_parent_connected(start: Callable[..., Services]) -> None:
    services = start(ps=2, workers=1)
    session, model = services.connect(), make_model()
    optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def ends_as_a_script_does() -> bool:
        session.fail(JobError("a worker of a DataLoader raised"))
        session.close()
        session.shutdown()
        return True

    def makes_a_step() -> bool:
        try:
            optimizer.step()
        except UsageError as error:
            return "is a forked child of worker/0" in str(error)
        return False

    for step in session.steps(4):
        optimizer.zero_grad()
        backward(model, step)
        if step == 2:
            in_a_child(ends_as_a_script_does)
            in_a_child(makes_a_step)
        optimizer.step()
    assert session.step == 4
    session.close()
    assert services.end()["steps"] == 4


@pytest.mark.usefixtures("start")
def test_a_forked_child_of_a_connected_process_cannot_take_its_task() -> None:
    def connect() -> Session:
        return shardline.connect(cluster=json.dumps(CLUSTER), task="worker/0", timeout_s=2.0)

    session = connect()

    def connects() -> bool:
        try:
            connect()
        except UsageError as error:
            return "forked child of the process that is connected as worker/0" in str(error)
        return False

    try:
        in_a_child(connects)
    finally:
        session.shutdown()
    # Not of one whose session has ended.
    in_a_child(lambda: connect() is not None)


def test_signals_end_a_child_as_they_would_end_any_process() -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    Termination().install()
    try:
        in_a_child(lambda: signal.getsignal(signal.SIGTERM) is signal.SIG_DFL)
        in_a_child(lambda: signal.getsignal(signal.SIGINT) is signal.default_int_handler)
        assert isinstance(signal.getsignal(signal.SIGTERM).__self__, Termination)  # type: ignore[union-attr]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize(("given", "found"), [(None, "0"), ("1", "1")])
def test_grpc_has_no_fork_handlers_unless_the_user_wants_them(given: str | None, found: str) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
    environment |= {"GRPC_ENABLE_FORK_SUPPORT": given} if given is not None else {}
    code = "import sys, shardline; assert 'grpc' not in sys.modules; import os; print(os.environ[sys.argv[1]])"
    command = [sys.executable, "-c", code, "GRPC_ENABLE_FORK_SUPPORT"]
    assert subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip() == found


FILE = """
class Square:
    def __init__(self, side):
        self.side = side

def area(square):
    return square.side ** 2
"""
READER = """
import multiprocessing
import sys
from pathlib import Path
from shardline.host.python_file import run_file

if __name__ == "__main__":
    file = run_file(Path(sys.argv[1]), "job")
    for start in ("spawn", "forkserver"):
        with multiprocessing.get_context(start).Pool(1) as pool:
            print(start, pool.map(file.area, [file.Square(side) for side in (2, 3)]))
"""


def test_children_that_are_not_forked_find_the_classes_of_a_job_file(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    file, script = tmp_path / "jobs" / "job.py", tmp_path / "read.py"
    file.write_text(FILE)
    script.write_text(READER)
    # A child that can't import the file's module is replaced for ever.
    run = subprocess.run(
        [sys.executable, str(script), str(file)], capture_output=True, text=True, timeout=100, check=False
    )
    assert run.stdout.splitlines() == ["spawn [4, 9]", "forkserver [4, 9]"], run.stderr


UNGUARDED = """
import multiprocessing
import sys
import shardline

if __name__ == "__mp_main__":
    shardline.connect()
child = multiprocessing.get_context("spawn").Process(target=print)
child.start()
child.join()
sys.exit(child.exitcode)
"""


def test_a_child_that_imports_a_script_without_a_guard_says_so_at_once(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(UNGUARDED)
    run = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=100, check=False)
    assert run.returncode == 1
    assert 'put the script\'s own code under if __name__ == "__main__":' in run.stderr


def lane_sockets() -> list[socket.socket]:
    """Open sockets of Python that have a name at the other end; gRPC's are its own."""
    found = []
    for one in gc.get_objects():
        if isinstance(one, socket.socket) and one.fileno() >= 0:
            with contextlib.suppress(OSError):
                found += [one] if one.getpeername() or one.getsockname() else []
    return found


@pytest.mark.parametrize("lane", ["shm", "tcp"])
def test_a_child_keeps_no_socket_of_its_parents_lanes(
    start: Callable[..., Services], monkeypatch: pytest.MonkeyPatch, lane: str
) -> None:
    monkeypatch.setenv("SHARDLINE_LANE", lane)
    services = start(ps=1, workers=1)
    session, model = services.connect(), make_model()
    optimizer = session.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in session.steps(3):
        optimizer.zero_grad()
        backward(model, step)
        if step == 2:
            assert lane_sockets()
            in_a_child(lambda: not lane_sockets())
        optimizer.step()
    assert session.step == 3
    session.close()
    services.end()
