"""Contenders as processes: the same environment for all, a deadline for every one, one JSON object a line from each."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from shardline.host.allocator import ALLOCATOR

ROOT = Path(__file__).resolve().parent.parent
Prefix = tuple[str, ...]
"""What stands before a command to run it elsewhere, such as ("ip", "netns", "exec", "bench")."""
HERE: Prefix = ()

COMMAND_S = 600.0
"""Most seconds of a command that is timed as a whole."""
THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}


class ContenderError(Exception):
    """A contender can't run here; the sentence says why."""


def environment(*, tuned: bool = True, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment of a contender: one thread computes; tuned = the allocator's settings too.

    The hosts of a lab are namespaces of this machine, whose links nobody else is on: tasks may go without TLS there.
    """
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("SHARDLINE_", "MALLOC_"))}
    settings.pop("TF_CONFIG", None)
    settings["SHARDLINE_INSECURE_BIND"] = "true"
    return {**settings, **THREADS, **(ALLOCATOR if tuned else {}), **(more or {})}


def settle_environment() -> None:
    """Start this program anew with the settings above, where it was started without."""
    wanted = {**THREADS, **ALLOCATOR}
    if any(os.environ.get(name) != value for name, value in wanted.items()):
        os.environ.update(wanted)
        os.execv(sys.executable, [sys.executable, *sys.argv])


class Child:
    """A process that writes JSON objects, one a line; it and what it started end with the `with` block.

    what: names it in errors.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        prefix: Prefix = HERE,
        what: str,
        env: Mapping[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> None:
        self.what = what
        # A file, not a pipe: nobody reads it unless the contender fails, and a full pipe would stop it.
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  (end() closes it)
        self._line = bytearray()
        try:
            self._process = subprocess.Popen(
                [*prefix, *command],
                env=dict(env) if env is not None else environment(),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                start_new_session=True,
            )
        except OSError as error:
            raise ContenderError(f"{what} can't be started: {error}") from error

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def read_json(self, timeout_s: float) -> dict[str, Any]:
        """The next line that is a JSON object; other lines are passed over. Raises ContenderError."""
        return read_all([self], timeout_s)[0]

    def fileno(self) -> int:
        """Descriptor of what it prints."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def taken(self) -> dict[str, Any] | None:
        """The next object of what was read so far."""
        while b"\n" in self._line:
            line, _, self._line = self._line.partition(b"\n")
            found = _object(line)
            if found is not None:
                return found
        return None

    def read(self) -> None:
        """Take what there is. Raises ContenderError where the process has ended."""
        data = os.read(self.fileno(), 1 << 16)
        if not data:
            code = self._process.wait(timeout=30)
            raise ContenderError(f"{self.what} ended with code {code} without figures{self.last_words()}")
        self._line += data

    @property
    def ended(self) -> bool:
        """Whether it has ended by itself."""
        return self._process.poll() is not None

    def terminate(self) -> None:
        """Ask the process to end; what it still prints can be read."""
        self._process.terminate()

    def wait(self, timeout_s: float) -> int:
        """Exit code. Raises ContenderError where it goes on."""
        try:
            return self._process.wait(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            raise ContenderError(f"{self.what} did not end within {timeout_s:.0f} s{self.last_words()}") from None

    def last_words(self) -> str:
        """The end of what it wrote to stderr, for a sentence."""
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return f": {lines[-1].strip()[:300]}" if lines else ""

    def end(self, grace_s: float = 10.0) -> None:
        """End the process and its children; safe to repeat."""
        if self._process.poll() is None:
            self._process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=grace_s)
        # Its session is its own, so this reaches what it left behind and nobody else.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait(timeout=grace_s)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()


def read_all(children: Sequence[Child], timeout_s: float) -> list[dict[str, Any]]:
    """The next object of each, as soon as all have one. Raises ContenderError at once where one of them has ended."""
    end_s = time.monotonic() + timeout_s
    found = {number: child.taken() for number, child in enumerate(children)}
    with selectors.DefaultSelector() as selector:
        for number, child in enumerate(children):
            if found[number] is None:
                selector.register(child.fileno(), selectors.EVENT_READ, number)
        while selector.get_map():
            ready = selector.select(max(0.0, end_s - time.monotonic()))
            if not ready:
                late = children[next(iter(selector.get_map().values())).data]
                raise ContenderError(f"{late.what} gave no figures within {timeout_s:.0f} s{late.last_words()}")
            for key, _ in ready:
                child = children[key.data]
                child.read()
                found[key.data] = child.taken()
                if found[key.data] is not None:
                    selector.unregister(key.fd)
    return [value for value in found.values() if value is not None]


def _object(line: bytes | bytearray) -> dict[str, Any] | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found if isinstance(found, dict) else None


def run_json(
    command: Sequence[str],
    *,
    what: str,
    timeout_s: float,
    prefix: Prefix = HERE,
    env: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """The JSON object that a command prints before it ends well. Raises ContenderError."""
    with Child(command, prefix=prefix, what=what, env=env) as child:
        found = child.read_json(timeout_s)
        code = child.wait(60.0)
        if code:
            raise ContenderError(f"{what} ended with code {code} after its figures")
        return found


def timed(command: Sequence[str], more: Mapping[str, str] | None = None) -> tuple[float, float]:
    """When a command began and ended. more: of its environment. Raises ContenderError where it fails."""
    start_s = time.time()
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=environment(tuned=False, more=more),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise ContenderError(f"{' '.join(command)} took longer than {COMMAND_S:.0f} s") from None
    if done.returncode != 0:
        raise ContenderError(f"{' '.join(command)} ended with {done.returncode}: {done.stdout[-1000:]}")
    return start_s, time.time()
