"""Commands for a running cluster or for what a run wrote: status, stop, drain, rebalance, page, export and
lookup.

`status` shows the cluster in one frame, or redrawn until its job has ended; `top` is `status --watch`.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from shardline import plugins
from shardline.cli import options
from shardline.cluster import chief_address
from shardline.core.status import ChiefStatus
from shardline.core.timeouts import Timeouts
from shardline.errors import TaskLostError, UnreachableError, UsageError
from shardline.host.awake import awake_s
from shardline.security import Security

if TYPE_CHECKING:
    from shardline.cli.terminal import PlainConsole

EXPORTERS = "shardline.exporters"
"""Entry points that write a checkpoint as another library does."""
VIEWERS = "shardline.viewers"
"""Entry points that serve the page of a run from its files."""
PS = re.compile(r"ps/\d+")
MOVED_S = 0.5
"""Seconds between two questions whether shards have moved."""


@click.command(short_help="End a running job with a checkpoint.")
@options.cluster
@click.option("--reason", default="asked to stop by `shardline stop`", help="For the logs.")
@options.option("--timeout", type=float, default=15.0, help="Seconds; the call waits a third of this.")
@options.secured
@options.admin
def stop(cluster: str | None, reason: str, timeout: float, **files: Path | None) -> int:
    """Ask the chief to end the job with a checkpoint; all tasks then exit."""
    timeouts = Timeouts(total_s=timeout)
    address = chief_address(cluster)
    security = options.security(files)
    from shardline.rpc.watch import ChiefWatch

    client = ChiefWatch(address, timeouts, security)
    try:
        client.stop(reason)
    finally:
        client.close()
    print("the job will end with a checkpoint at its next common step, and its tasks will exit")
    return 0


WITHIN = options.option(
    "--within", type=float, default=600.0, help="Seconds to wait for the moves; the chief goes on after that."
)


@click.command(short_help="Move the shards of a server elsewhere while the job trains.")
@click.argument("task", metavar="ps/N")
@options.cluster
@WITHIN
@options.secured
@options.admin
def drain(task: str, cluster: str | None, within: float, **files: Path | None) -> int:
    """Move all shards of a server to the others while the job trains; then it can be stopped.

    It gets no shard and no standby any more. A new process under its name may: see rebalance.
    """
    if not PS.fullmatch(task):
        raise UsageError(f"{task!r} is no server; name one, such as ps/1")
    _move(task, cluster, within, files)
    print(f"{task} holds no shard; it can be stopped")
    return 0


@click.command(short_help="Even out the shards of the servers while the job trains.")
@options.cluster
@WITHIN
@options.secured
@options.admin
def rebalance(cluster: str | None, within: float, **files: Path | None) -> int:
    """Move shards from the servers with most bytes to those with least while the job trains.

    For example to a server that came back: after a drain, or after standbys had taken over from it.
    """
    _move("", cluster, within, files)
    print("no further move would make the largest server smaller")
    return 0


def _move(drain: str, cluster: str | None, within_s: float, files: dict[str, Path | None]) -> None:
    """Ask the chief to move shards, and wait until they have moved. Raises UsageError, TaskLostError if they don't."""
    address, security = chief_address(cluster), options.security(files)
    from shardline.rpc.watch import ChiefWatch

    client, never, deadline_s = ChiefWatch(address, security=security), threading.Event(), time.monotonic() + within_s
    try:
        asked, told = client.move(drain), set[tuple[int, str]]()
        while not (asked.done or asked.failure):
            for shard, task in sorted(set(asked.moves.items()) - told):
                print(f"shard {shard} moves to {task}", flush=True)
            told.update(asked.moves.items())
            if time.monotonic() > deadline_s:
                left = ", ".join(map(str, sorted(asked.moves)))
                raise TaskLostError(f"shards {left} have not moved within {within_s:g} s; the chief's log says why")
            never.wait(MOVED_S)
            asked = client.move(number=asked.number)
        if asked.failure:
            raise UsageError(f"the move was given up: {asked.failure}")
    finally:
        client.close()


@click.command(short_help="Serve the page of runs from their files.")
@click.argument("runs", metavar="RUN...", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--port", type=click.IntRange(0, 65_535), default=0, show_default=True, help="Port on 127.0.0.1; 0 = a free one."
)
@options.plugin
@options.token
def page(runs: tuple[Path, ...], port: int, token_file: Path | None) -> int:
    """Serve the page of RUN, the --out of a run that has ended or goes on, until Ctrl-C.

    The curves of further runs, up to 8 in all, are drawn beside its own. It reads their files, and changes nothing.
    With a token, a browser has to give it.
    """
    security = Security(token_file=token_file)
    code: int = plugins.installed(VIEWERS, "run", "the page of a run")(runs, port, security)
    return code


@click.command(short_help="Export a checkpoint as a PyTorch file, or as a folder of transformers.")
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("out", type=click.Path(path_type=Path), metavar="OUT.safetensors|OUT.pt|FOLDER")
@click.option("--best", is_flag=True, help="The best checkpoint of a run, by its metric, instead of the newest.")
@click.option("--hf", is_flag=True, help="A new folder that from_pretrained() of transformers, or of peft, reads.")
def export(checkpoint: Path, out: Path, best: bool, hf: bool) -> int:
    """Write the parameters of CHECKPOINT as one state_dict that loads in PyTorch without Shardline.

    With --hf, as a folder with the model's config and weights; of a model of peft its adapters alone.

    CHECKPOINT: a run's --out, its folder of checkpoints, one of these (step-00000100), or the file `best` or `latest`
    there.
    """
    from shardline.checkpoint import export as write

    if hf:
        write = plugins.installed(EXPORTERS, "hf", "--hf")
    for warning in write(checkpoint, out, best=best).warnings:
        print(f"shardline: {warning}", file=sys.stderr)
    print(out)
    return 0


@click.command(
    short_help="Print rows of an embedding table in a checkpoint.", context_settings={"ignore_unknown_options": True}
)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.argument("table")
@click.argument("ids", nargs=-1, required=True, metavar="ID...", type=click.IntRange(-(1 << 63), (1 << 63) - 1))
@click.option("--best", is_flag=True, help="The best checkpoint of a run, by its metric, instead of the newest.")
def lookup(checkpoint: Path, table: str, ids: tuple[int, ...], best: bool) -> int:
    """Print a line of JSON for each ID: its row of TABLE in CHECKPOINT (see export), and if that is stored.

    A row that is not stored has had no gradient: it is as the table's `init` makes it.
    """
    import torch

    from shardline.checkpoint import find_checkpoint

    rows, stored = find_checkpoint(checkpoint, best=best).table(table).find(torch.tensor(ids))
    for number, row, there in zip(ids, rows.tolist(), stored.tolist(), strict=True):
        print(json.dumps({"id": number, "stored": there, "values": row}))
    return 0


ASK_S = 3.0
"""Deadline of one request, in seconds; after that the chief counts as silent."""
POLL_S = 1.0
"""Longest pause between two requests, in seconds: a chief whose job has ended stays only briefly."""
PIPE_WIDTH = 1000
"""Columns if the output has no width: nothing is cut."""
Answers = Iterator[tuple[ChiefStatus | None, str]]
"""The chief's last status, None before the first one, and since when it is silent, "" if it answers."""


def answers(ask: Callable[[float], ChiefStatus], address: str, every_s: float, deadline_s: float) -> Answers:
    """Ask the chief every every_s seconds until its job has ended. Raises UnreachableError after deadline_s of silence.

    ask: returns the chief's status within a number of seconds, or raises UnreachableError.
    """
    from shardline.cli.status_frame import clock
    from shardline.observability.view import doing

    status: ChiefStatus | None = None
    since: tuple[float, float] | None = None
    while True:
        asked = awake_s(), time.time()
        silence = ""
        try:
            status, since = ask(min(ASK_S, max(0.5, deadline_s / 3))), None
        except UnreachableError as error:
            since = since or asked
            if awake_s() - since[0] >= deadline_s:
                last = "" if status is None else f"; the job was {doing(status)} at step {status.step}"
                raise UnreachableError(
                    f"the chief at {address} has not answered since {clock(since[1])}, for {deadline_s:.0f} s{last}: "
                    f"{error}"
                ) from error
            until = f"retrying until {clock(since[1] + deadline_s)}"
            silence = f"no answer from the chief at {address} since {clock(since[1])}; {until}: {error}"
        yield status, silence
        if status is not None and status.phase == "ended":
            return
        time.sleep(max(0.05, asked[0] + every_s - awake_s()))


def lines(console: PlainConsole, found: Answers, every_s: float) -> None:
    """Print a line every every_s seconds, and the chief's events as they come; no escape codes."""
    from shardline.cli.progress import line
    from shardline.cli.status_frame import clock, event_line

    silent, next_s, events_until = False, 0.0, 0.0
    for status, silence in found:
        if bool(silence) != silent:
            silent = not silent
            console.say(silence or f"{clock(time.time())} the chief answers again")
        if status is None or silent:
            continue
        for event in status.said:
            if event.time > events_until:
                console.say(event_line(event))
        events_until = max([events_until, *(event.time for event in status.said)])
        if status.phase == "ended" or awake_s() >= next_s:
            # Slightly early is better than one whole interval late.
            next_s = awake_s() + every_s - min(POLL_S, every_s) / 2
            console.say(f"{clock(status.time)}  {status.job or 'job'}  {line(status)}")


def live(console: PlainConsole, found: Answers, address: str) -> None:
    """Redraw the frame at each answer; the last one stays on the terminal."""
    from rich.live import Live

    from shardline.cli.status_frame import Frame
    from shardline.observability.view import cluster_view

    # The frame says why the chief is silent.
    logging.getLogger("shardline").addHandler(logging.NullHandler())
    left: list[BaseException] = []

    def leave(number: int, _: object) -> None:
        # Python drops what is raised while it runs a destructor or a library's callback, so the loop looks, too.
        left.append(KeyboardInterrupt() if number == signal.SIGINT else SystemExit(128 + number))
        raise left[0]

    # Both leave by an exception, so that the terminal is restored.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, leave)
    view, silence = None, f"waiting for the chief at {address}"
    try:
        with Live(Frame(view=view, silence=silence), console=console, screen=True, auto_refresh=False) as screen:
            for status, silence in found:
                if left:
                    raise left[0]
                view = None if status is None else cluster_view(status)
                screen.update(Frame(view=view, silence=silence, height=console.height), refresh=True)
    finally:
        console.print(Frame(view=view, silence=silence))


def show(cluster: str | None, interval: float, timeout: float, watch: bool, **files: Path | None) -> int:
    address = chief_address(cluster)
    security = options.security(files)
    from shardline.cli.progress import on_terminal
    from shardline.cli.status_frame import Frame
    from shardline.cli.terminal import PlainConsole
    from shardline.observability.view import cluster_view
    from shardline.rpc.watch import ChiefWatch

    width = None if sys.stdout.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    console = PlainConsole(width=width, force_terminal=None if sys.stdout.isatty() else False)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A bar is no reason to fail if the terminal's encoding lacks its characters.
        sys.stdout.reconfigure(errors="replace")
    client = ChiefWatch(address, Timeouts(total_s=timeout), security)
    try:
        if not watch:
            console.print(Frame(view=cluster_view(client.status(timeout_s=timeout))))
            return 0
        found = answers(client.status, address, min(interval, POLL_S), timeout)
        with contextlib.suppress(KeyboardInterrupt):
            if on_terminal(console):
                live(console, found, address)
            else:
                lines(console, found, interval)
        return 0
    finally:
        client.close()


watched = options.together(
    options.cluster,
    options.option("--interval", type=click.FloatRange(0.1, 3600.0), default=1.0, help="Seconds between two lines."),
    options.option("--timeout", type=float, default=15.0, help="Seconds without an answer until it gives up."),
    options.secured,
)


@click.command(short_help="Show a running cluster.")
@click.option("--watch", is_flag=True, help="Show it until the job has ended, or Ctrl-C.")
@watched
def status(**flags: Any) -> int:
    """Show progress, tasks, shards and events of a running cluster.

    With --watch they are redrawn; if the output is not a terminal, a line is printed every interval. The exit code is
    0 when the job has ended, successfully or not, and 3 if the chief does not answer for --timeout.
    """
    return show(**flags)


@click.command(short_help="Watch a running cluster: status --watch.")
@click.option("--once", is_flag=True, help="Print one frame and exit, as `shardline status` does.")
@watched
def top(once: bool, **flags: Any) -> int:
    """Show a running cluster until its job has ended or Ctrl-C, as `shardline status --watch` does."""
    return show(watch=not once, **flags)
