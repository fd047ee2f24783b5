"""shardline top: live view of a running cluster in a terminal; elsewhere a line per interval."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Protocol, TextIO

import click

from shardline.cli import options
from shardline.cli.cluster_commands import chief_address
from shardline.core.timeouts import Timeouts
from shardline.errors import ShardlineError, UnreachableError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from shardline.cli.terminal import PlainConsole
    from shardline.cli.top_frame import ChiefSilence
    from shardline.core.status import ChiefStatus
    from shardline.observability.view import ClusterView

ASK_S = 3.0
"""Deadline of one request, in seconds; after that the chief counts as silent."""
POLL_S = 1.0
"""Longest pause between two requests, in seconds: a chief whose job has ended stays only briefly."""
PIPE_WIDTH = 120
"""Columns of --once if the output has no width."""
QUIT = ("q", "Q", "\x03")


class Source(Protocol):
    """Source of the chief's status."""

    def status(self, timeout_s: float | None = None) -> ChiefStatus:
        """The newest status. Raises ShardlineError."""


@dataclass
class KnownStatus:
    """Current knowledge about the cluster."""

    view: ClusterView | None = None
    asked: int = 0
    """Number of answers so far."""
    silent_since: float | None = None
    """Unix time of the first unanswered request; None while the chief answers."""
    reason: str = ""
    failure: ShardlineError | None = None
    """An error that makes further requests pointless; None if there is none."""


@dataclass
class Poller:
    """Polls the chief on a thread of its own, so that keys and redrawing never wait for it."""

    source: Source
    interval_s: float
    deadline_s: float
    """Seconds without an answer after which it gives up."""
    changed: threading.Event = field(default_factory=threading.Event)
    now: Callable[[], float] = time.time

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self._known = KnownStatus()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="top", daemon=True)

    @property
    def known(self) -> KnownStatus:
        """A copy of what is known."""
        with self._lock:
            return KnownStatus(**vars(self._known))

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            began = time.monotonic()
            self._ask()
            self.changed.set()
            if self.known.failure is not None:
                return
            self._stop.wait(max(0.05, self.interval_s - (time.monotonic() - began)))

    def _ask(self) -> None:
        asked_at = self.now()
        # Imports grpc, which --help must not do.
        from shardline.observability.view import cluster_view

        try:
            view = cluster_view(self.source.status(timeout_s=min(ASK_S, max(0.5, self.deadline_s / 3))))
        except UnreachableError as error:
            with self._lock:
                self._known.silent_since = self._known.silent_since or asked_at
                self._known.reason = str(error)
                if self.now() - self._known.silent_since >= self.deadline_s:
                    self._known.failure = error
        except ShardlineError as error:
            with self._lock:
                self._known.failure = error
        else:
            with self._lock:
                self._known.view, self._known.silent_since = view, None
                self._known.asked += 1


class Screen:
    """Draws what a poller knows, until the job has ended, a key ends it, or the chief is given up."""

    def __init__(self, poller: Poller, console: PlainConsole, address: str) -> None:
        from shardline.cli.top_frame import Curves

        self._poller = poller
        self._console = console
        self._address = address
        self._curves = Curves()
        self._seen = 0
        self._events_until = 0.0

    def first(self) -> KnownStatus:
        """Wait for the first answer. Raises if none comes within the deadline."""
        while True:
            known = self._next()
            if known.view is not None:
                return known

    def once(self) -> int:
        self.first()
        self._console.print(self._frame(self._poller.known, height=None))
        return 0

    def lines(self, every_s: float = 0.0) -> int:
        """Print a line every every_s seconds, and the chief's events as they come; no escape codes."""
        from shardline.cli.top_frame import clock, plain_event, plain_line, silence_text

        silent_since: float | None = None
        next_s = 0.0
        while True:
            known = self._next()
            if known.silent_since is not None and silent_since is None:
                silence = self._silence(known)
                assert silence is not None
                self._say(silence_text(silence, self._address))
                self._say(known.reason)
            if known.silent_since is None and silent_since is not None:
                self._say(f"{clock(self._poller.now())} the chief answers again")
            silent_since = known.silent_since
            if known.view is None or known.silent_since is not None:
                continue
            for event in known.view.events:
                if event.time > self._events_until:
                    self._say(plain_event(event))
            self._events_until = max([self._events_until, *(event.time for event in known.view.events)])
            ended = known.view.phase == "ended"
            if ended or time.monotonic() >= next_s:
                # Slightly early is better than one whole interval late.
                next_s = time.monotonic() + every_s - min(POLL_S, every_s) / 2
                self._say(plain_line(known.view))
            if ended:
                return 0

    def live(self, keys: Keys) -> int:
        """Redraw at each answer, and once a second without one, until q or Ctrl-C."""
        from rich.live import Live

        known = self._poller.known
        with Live(console=self._console, screen=True, auto_refresh=False, transient=True) as live:
            while True:
                known = self._poller.known
                self._take(known)
                live.update(self._frame(known, height=self._console.height), refresh=True)
                if known.failure is not None or (known.view is not None and known.view.phase == "ended"):
                    break
                if keys.wait(1.0, self._poller.changed):
                    return 0
        # The previous screen content is restored now; leave the last frame on it.
        if known.view is not None:
            self._console.print(self._frame(known, height=None))
        if known.failure is not None:
            raise self._given_up(known)
        return 0

    def _next(self) -> KnownStatus:
        """The state after the next request. Raises if the chief is given up."""
        # Requests have their own deadline; this one only ends a wait that a bug would make endless.
        if not self._poller.changed.wait(self._poller.deadline_s + 60.0):
            raise UnreachableError(f"the thread that polls the chief at {self._address} has stopped")
        self._poller.changed.clear()
        known = self._poller.known
        self._take(known)
        if known.failure is not None:
            raise self._given_up(known)
        return known

    def _take(self, known: KnownStatus) -> None:
        if known.view is not None and known.asked != self._seen:
            self._seen = known.asked
            self._curves.add(known.view)

    def _given_up(self, known: KnownStatus) -> ShardlineError:
        assert known.failure is not None
        if known.silent_since is None:
            return known.failure
        from shardline.cli.top_frame import clock

        last = "" if known.view is None else f"; the job was {known.view.doing} at step {known.view.step}"
        return UnreachableError(
            f"the chief at {self._address} has not answered since {clock(known.silent_since)}, for "
            f"{self._poller.deadline_s:.0f} s{last}: {known.reason}"
        )

    def _silence(self, known: KnownStatus) -> ChiefSilence | None:
        from shardline.cli.top_frame import ChiefSilence

        since = known.silent_since
        if since is None:
            return None
        now = self._poller.now()
        return ChiefSilence(since=since, now=now, until=since + self._poller.deadline_s, reason=known.reason)

    def _frame(self, known: KnownStatus, *, height: int | None) -> RenderableType:
        from shardline.cli.top_frame import ASCII, FANCY, ChiefSilence, frame, waiting

        glyphs = ASCII if self._console.options.ascii_only else FANCY
        silence = self._silence(known)
        if known.view is None:
            now = self._poller.now()
            nothing_yet = ChiefSilence(since=now, now=now, until=now + self._poller.deadline_s, reason="")
            return waiting(silence or nothing_yet, self._address)
        return frame(
            known.view,
            self._curves,
            width=self._console.width,
            height=height,
            silence=silence,
            address=self._address,
            glyphs=glyphs,
        )

    def _say(self, text: str) -> None:
        self._console.say(text)


class Keys:
    """Single key presses from a terminal, without echo; waiting ends early when something has changed."""

    def __init__(self, stream: TextIO | None) -> None:
        self._descriptor: int | None = None
        if stream is not None and stream.isatty():
            self._descriptor = stream.fileno()

    @contextlib.contextmanager
    def raw(self) -> Iterator[Keys]:
        """Take keys without waiting for Enter; the terminal's mode is restored at the end."""
        if self._descriptor is None:
            yield self
            return
        import termios
        import tty

        before = termios.tcgetattr(self._descriptor)
        try:
            # Ctrl-C still sends a signal.
            tty.setcbreak(self._descriptor)
            yield self
        finally:
            termios.tcsetattr(self._descriptor, termios.TCSADRAIN, before)

    def wait(self, timeout_s: float, changed: threading.Event) -> bool:
        """Whether a key that ends the view was pressed within timeout_s seconds, or before something changed."""
        if self._descriptor is None:
            changed.wait(timeout_s)
            changed.clear()
            return False
        deadline_s = time.monotonic() + timeout_s
        while (left_s := deadline_s - time.monotonic()) > 0 and not changed.is_set():
            # A short poll, since select can't wait for a terminal and an event together.
            ready, _, _ = select.select([self._descriptor], [], [], min(0.1, left_s))
            if ready:
                text = os.read(self._descriptor, 64).decode(errors="replace")
                # A closed terminal gives no more input.
                if not text or any(key in text for key in QUIT):
                    return True
        changed.clear()
        return False


@contextlib.contextmanager
def ended_by_sigterm() -> Iterator[None]:
    """Have SIGTERM end like Ctrl-C, so that the terminal is restored; the exit code is 143."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@click.command(short_help="Watch a running cluster in the terminal.")
@options.cluster
@options.option(
    "--interval", type=click.FloatRange(0.1, 3600.0), default=1.0, help="Seconds between two lines or frames."
)
@click.option("--once", is_flag=True, help="Print one frame and exit.")
@options.option(
    "--timeout",
    type=click.FloatRange(1.0, 86_400.0),
    default=15.0,
    help="Seconds without an answer after which top gives up.",
)
@options.secured
def top(cluster: str | None, interval: float, once: bool, timeout: float, **files: Path | None) -> int:
    """Show progress, tasks, shards, curves and events of a running cluster; press q or Ctrl-C to quit.

    If the output is not a terminal, a line is printed every interval. The exit code is 0 when the job has ended,
    successfully or not, and 3 if the chief does not answer for --timeout.
    """
    address = chief_address(cluster)
    security = options.security(files)
    from shardline.cli.progress import on_terminal
    from shardline.cli.terminal import PlainConsole
    from shardline.rpc.watch import ChiefWatch

    console = PlainConsole()
    live = on_terminal(console) and not once
    if not console.file.isatty():
        console = PlainConsole(force_terminal=False, width=None if "COLUMNS" in os.environ else PIPE_WIDTH)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A sparkline is no reason to fail if the terminal's encoding lacks its characters.
        sys.stdout.reconfigure(errors="replace")
    # Log messages on the way, such as a host name that doesn't resolve, are shown as the reason for the silence.
    logging.getLogger("shardline").addHandler(logging.NullHandler())
    client = ChiefWatch(address, Timeouts(total_s=timeout), security)
    poller = Poller(client, min(interval, POLL_S), timeout)
    screen = Screen(poller, console, address)
    poller.start()
    try:
        with ended_by_sigterm():
            if once:
                return screen.once()
            if not live:
                return screen.lines(interval)
            with Keys(sys.stdin).raw() as keys:
                return screen.live(keys)
    except KeyboardInterrupt:
        return 0
    finally:
        poller.stop()
        client.close()
