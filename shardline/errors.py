"""Every error Shardline raises on purpose, and the exit code and gRPC status that go with it.

ShardlineError                    exit  gRPC status
  UsageError                         2  INVALID_ARGUMENT     flags, cluster spec, TF_CONFIG
    JobError                         2  INVALID_ARGUMENT     the job file or script
      JobExitError                   2  INVALID_ARGUMENT     the job's code called sys.exit()
    ClusterSpecError                 2  INVALID_ARGUMENT
    ForbiddenError                   2  PERMISSION_DENIED    credentials that don't allow what was asked
  MismatchError                      2  FAILED_PRECONDITION  a task's job differs from the cluster's
  TensorError                        2  INVALID_ARGUMENT     unknown tensor, wrong shape or dtype
  UnreachableError                   3  UNAVAILABLE          a task that doesn't answer within its deadline
  TaskLostError                      4  UNAVAILABLE          a task died and nobody can take its place
  NonFiniteError                     5  FAILED_PRECONDITION  NaN or infinity in a loss or gradient
  CheckpointError                    6  DATA_LOSS            missing, truncated, corrupt or foreign checkpoint
    DiskError                        6  UNAVAILABLE          a server's disk has no room for a table's rows
  FencedError                        7  FAILED_PRECONDITION  this incarnation was replaced by a newer one
  ProtocolError                      8  INVALID_ARGUMENT     a message that breaks the contract
  RolledBackError                    9  ABORTED              the job went back to a checkpoint under a script
  InternalError                      1  INTERNAL
JobStopped                           0                       a script's own loop goes on although the job has ended
Interrupted by a signal: exit 130 (SIGINT) or 143 (SIGTERM) for the launcher, 0 for a task that ended cleanly.
"""

from __future__ import annotations

import difflib
import errno
import signal
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import PurePath
from types import TracebackType
from typing import ClassVar

MAX_TYPED = 80
"""Characters of a name that are compared with others."""


def nearest(name: str, offered: Iterable[str]) -> str:
    """The end of a refusal: "; did you mean 'sync'?"; empty where no offered name is like this one."""
    close = difflib.get_close_matches(name[:MAX_TYPED], list(offered), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


class ShardlineError(Exception):
    """Base of all errors raised on purpose; str() is the message for the user."""

    exit_code: ClassVar[int] = 1
    grpc_status: ClassVar[str] = "INTERNAL"


class UsageError(ShardlineError):
    """A flag, file or setting that can't be used as given."""

    exit_code = 2
    grpc_status = "INVALID_ARGUMENT"


class JobError(UsageError):
    """The job file or training script can't be used."""


class JobExitError(JobError):
    """The job's own code ended the process: sys.exit() in a function of the job file."""


class ClusterSpecError(UsageError):
    """cluster.json or TF_CONFIG can't be used."""


class ForbiddenError(UsageError):
    """The caller's credentials don't allow the request; nothing changed."""

    grpc_status = "PERMISSION_DENIED"


class MismatchError(ShardlineError):
    """A task's model or settings differ from the job's."""

    exit_code = 2
    grpc_status = "FAILED_PRECONDITION"


class TensorError(ShardlineError):
    """An unknown tensor, or one whose shape or dtype differs from the plan's."""

    exit_code = 2
    grpc_status = "INVALID_ARGUMENT"


class UnreachableError(ShardlineError):
    """A task did not answer within its deadline."""

    exit_code = 3
    grpc_status = "UNAVAILABLE"


class TaskLostError(ShardlineError):
    """A task died and no other task can replace it."""

    exit_code = 4
    grpc_status = "UNAVAILABLE"


class NonFiniteError(ShardlineError):
    """NaN or infinity in a loss or gradient, with nan_policy "stop"."""

    exit_code = 5
    grpc_status = "FAILED_PRECONDITION"


class CheckpointError(ShardlineError):
    """A checkpoint is missing, truncated, corrupt or belongs to another job."""

    exit_code = 6
    grpc_status = "DATA_LOSS"


class DiskError(CheckpointError):
    """Rows of a table can't be kept on a server's disk: it is full, or fails. The server tells the chief."""

    grpc_status = "UNAVAILABLE"


class FencedError(ShardlineError):
    """The incarnation was replaced by a newer one; its messages change nothing."""

    exit_code = 7
    grpc_status = "FAILED_PRECONDITION"


class RolledBackError(ShardlineError):
    """The job was rolled back to an earlier step, and the script's own loop can't follow.

    `for step in session.steps(...)` restarts its body instead of raising this. With standbys (--standbys 1) the loss of
    a server makes no job go back. step: the job's current step, which is that of the model's parameters.
    """

    exit_code = 9
    grpc_status = "ABORTED"

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class JobStopped(SystemExit):
    """The job has ended, so `optimizer.step()`, `push` or `push_pull` outside of session.steps() changed nothing.

    Raised for every end: stopped (Ctrl-C, `shardline stop`), failed, or at the job's last step. It is a SystemExit with
    code 0, so it passes through the `except Exception` of training libraries and ends the process as a job that is
    done does, unless the script catches it. step: the step at which the job ended.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.code = 0
        self.step = step


class ProtocolError(ShardlineError):
    """A message that violates the protocol; it changed nothing."""

    exit_code = 8
    grpc_status = "INVALID_ARGUMENT"


class InternalError(ShardlineError):
    """A defect in Shardline."""


CODED = (UsageError, UnreachableError, TaskLostError, NonFiniteError, CheckpointError, FencedError, ProtocolError)
BY_CODE: dict[int, type[ShardlineError]] = {cls.exit_code: cls for cls in CODED}
SIGNALLED = {130: "interrupted", 143: "terminated"}
"""Exit codes after SIGINT and SIGTERM."""


def exit_code_name(code: int) -> str:
    """Name of the error class that ends a process with this code, for messages."""
    known = {0: "done", RolledBackError.exit_code: RolledBackError.__name__, **SIGNALLED}
    return known.get(code) or BY_CODE.get(code, InternalError).__name__


def ended_with(code: int, sentence: str) -> ShardlineError:
    """The error of another process that ended with this code: lost, if a signal or a rollback ended it."""
    lost = code < 0 or code in (RolledBackError.exit_code, *SIGNALLED)
    return (TaskLostError if lost else BY_CODE.get(code, InternalError))(sentence)


# Exceptions of the user's code

PACKAGES = ("shardline", *(f"shardline_{name}" for name in ("ps", "worker", "chief", "evaluator", "lab", "launchers")))
MOST_TEXT = 2000
"""Characters of an exception's text that are told: compilers write pages, which no message to the chief can hold."""
_PYTHON = (sysconfig.get_paths()["stdlib"], "<")
"""Beginnings of the names of files that are Python's own, and of code without a file."""


class _UserCode:
    """A context manager around the user's code. Not a generator: several are entered in every pass of a pipeline."""

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, Exception):
            if not isinstance(error, ShardlineError) and not _is_own(trace.tb_next if trace is not None else None):
                raise job_error(self._what, error) from error
        elif isinstance(error, SystemExit):
            code = "" if error.code is None else repr(error.code)
            raise JobExitError(f"{self._what} called sys.exit({code}){where_raised(error)}") from error
        # Tasks handle the signal themselves; elsewhere it is the user's Ctrl-C.
        elif isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
            raise JobExitError(f"{self._what} raised KeyboardInterrupt{where_raised(error)}") from error


def calling(what: str) -> AbstractContextManager[None]:
    """Turn errors of the user's code, and exits such as sys.exit(), into a JobError that names it and the line.

    The original is its cause. Errors of Shardline's own code that is called within stay what they are.
    """
    return _UserCode(what)


def as_error(error: BaseException, what: str = "the job's own code") -> ShardlineError | None:
    """An exception as an error that ends the job: itself, or a JobError if the user's code raised it.

    None for a defect in Shardline. what: the user's code, for the message.
    """
    if isinstance(error, ShardlineError):
        return error
    # The innermost of theirs and of ours.
    owners = [owner for owner, _, _ in _frames(error.__traceback__) if owner in ("user", "shardline")]
    if isinstance(error, Exception) and owners[-1:] == ["user"]:
        return job_error(what, error)
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        # Path.is_dir() and its like raise this one instead of returning False.
        return UsageError(f"a path is longer than this system allows: {error.filename}; choose a shorter one")
    return None


@contextmanager
def telling(tell: Callable[[ShardlineError], None]) -> Iterator[None]:
    """Call tell(error) for an error that ends this task, and raise it; one of the user's code becomes a JobError."""
    try:
        yield
    except Exception as error:
        found = as_error(error)
        if found is None:
            raise
        tell(found)
        if found is error:
            raise
        raise found from error


def job_error(what: str, error: BaseException) -> JobError:
    """An exception of the user's code, with its type and line. what: the code, for the message."""
    try:
        text = str(error)
    except Exception:
        text = "(its str() raises)"
    if len(text) > MOST_TEXT:
        text = f"{text[:MOST_TEXT]}..."
    return JobError(f"{what} raised {type(error).__name__}: {text}{where_raised(error)}")


def where_raised(error: BaseException) -> str:
    """The innermost line of the user's code, such as " (job.py, line 41)"; empty if there is none."""
    last = None
    for owner, frame, line in _frames(error.__traceback__):
        if owner == "user":
            last = (frame, line)
    return f" ({last[0]}, line {last[1]})" if last is not None else ""


def _is_own(trace: TracebackType | None) -> bool:
    """Return whether Shardline's own code raised, called by nobody but itself, torch and Python."""
    owners = [owner for owner, _, _ in _frames(trace) if owner != "python"]
    return bool(owners) and owners[-1] == "shardline" and {"shardline", "torch"}.issuperset(owners)


def _frames(trace: TracebackType | None) -> Iterator[tuple[str, str, int]]:
    """(owner, file, line) from the outermost frame on; owner: shardline, torch, python, package or user."""
    for frame, line in traceback.walk_tb(trace):
        name, path = str(frame.f_globals.get("__name__", "")), frame.f_code.co_filename
        top = name.partition(".")[0]
        owner = "shardline" if top in PACKAGES else "torch" if top == "torch" else owner_of(path)
        yield owner, path, line


def owner_of(path: str) -> str:
    """Whose file this is: python, package (of the installation) or user."""
    if not {"site-packages", "dist-packages"}.isdisjoint(PurePath(path).parts):
        return "package"
    return "python" if path.startswith(_PYTHON) else "user"
