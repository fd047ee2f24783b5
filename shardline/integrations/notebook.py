"""Training from a notebook: a function of a cell runs as the script of every worker of a cluster on this machine.

    def train():
        session = shardline.connect()
        ...

    run = shardline.launch(train, ps=2, workers=2)
    model.load_state_dict(run.state_dict())

Needs cloudpickle, and matplotlib for the curve of the loss under the cell.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import json
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from shardline.checkpoint.store import newest_valid
from shardline.errors import UsageError, ended_with

DRAWN_EVERY_S = 1.0
STOP_S = 90.0
"""How long a run that was interrupted may take to write its last checkpoint."""
SCRIPT = """\
import sys

if __name__ == "__main__":
    import cloudpickle

    with open(sys.argv[1], "rb") as file:
        train = cloudpickle.load(file)
    train()
"""


@dataclass(frozen=True)
class Launched:
    """A run that has ended."""

    out: Path
    """Its folder: checkpoints, logs, summary.json."""
    summary: Mapping[str, Any]
    losses: Sequence[float]
    """Of the steps, in their order."""

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of the last checkpoint by name, on the CPU. Raises CheckpointError."""
        return newest_valid(self.out / "checkpoints").state_dict()


def launch(
    train: Callable[[], Any],
    *,
    ps: int = 1,
    workers: int = 1,
    out: str | Path | None = None,
    flags: Sequence[str] = (),
    show: bool = True,
) -> Launched:
    """Train with train() in every worker of a cluster of processes on this machine, and draw the loss meanwhile.

    train: calls shardline.connect(), as a script does. A copy of it runs in the workers, with what it refers to in the
    notebook, pickled by cloudpickle; what it changes stays there. out: a new folder; by default one under runs/.
    flags: more of `shardline train`, such as ["--codec", "bf16"]. show: print the run's lines and draw its loss.

    Interrupting the cell ends the run with a checkpoint. Raises the ShardlineError with which the run ended.
    """
    if importlib.util.find_spec("cloudpickle") is None:
        raise UsageError("shardline.launch() needs a package that is missing: pip install cloudpickle")
    import cloudpickle

    folder = Path(out) if out is not None else Path("runs") / f"notebook-{time.strftime('%Y%m%d-%H%M%S')}"
    with tempfile.TemporaryDirectory(prefix="shardline-") as scratch:
        script, pickled = Path(scratch, "notebook.py"), Path(scratch, "train.pkl")
        script.write_text(SCRIPT)
        pickled.write_bytes(cloudpickle.dumps(train))
        command = [sys.executable, "-m", "shardline", "train", "--script", str(script), "--out", str(folder)]
        command += ["--ps", str(ps), "--workers", str(workers), *flags, "--", str(pickled)]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        with _ended(process), contextlib.ExitStack() as shown:
            if show:
                figure = LossFigure(folder / "logs" / "steps.jsonl")
                shown.callback(figure.draw)
                follower = threading.Thread(target=figure.follow, args=(process,), name="figure", daemon=True)
                follower.start()
                # Until then both would draw.
                shown.callback(follower.join, STOP_S)
            told = list(_lines(process, show=show))
            code = process.wait()
    if code:
        sentence = next((line for line in told if line.startswith("shardline: ")), f"exit code {code}")
        raise ended_with(code, sentence.removeprefix("shardline: "))
    summary: dict[str, Any] = json.loads((folder / "summary.json").read_text())
    return Launched(folder, summary, _losses(folder / "logs" / "steps.jsonl"))


def _lines(process: subprocess.Popen[bytes], *, show: bool) -> Iterator[str]:
    assert process.stdout is not None
    for raw in process.stdout:
        line = raw.decode(errors="replace").rstrip("\n")
        if show:
            print(line, flush=True)
        yield line


@contextlib.contextmanager
def _ended(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """End the run where the cell is interrupted: with a checkpoint, then by force."""
    try:
        yield
    finally:
        for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
            if process.poll() is not None:
                break
            process.send_signal(stop)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=STOP_S)


def _losses(steps: Path) -> list[float]:
    """The loss of each step; of a step that a rollback repeated, the last one."""
    found: dict[int, list[float]] = {}
    timeline = 0
    with contextlib.suppress(FileNotFoundError), steps.open() as file:
        for line in file:
            with contextlib.suppress(ValueError):  # a line that is being written
                one = json.loads(line)
                if one["timeline"] != timeline:
                    timeline = one["timeline"]
                    found = {step: losses for step, losses in found.items() if step < one["step"]}
                found.setdefault(one["step"], []).append(float("nan") if one["loss"] is None else one["loss"])
    return [sum(found[step]) / len(found[step]) for step in sorted(found)]


class LossFigure:
    """The curve of a run's loss under the cell; nothing outside of a notebook, or without matplotlib."""

    def __init__(self, steps: Path) -> None:
        self._steps = steps
        self._handle: Any = None
        self._drawn = 0
        ipython = sys.modules.get("IPython")
        shell = ipython.get_ipython() if ipython is not None else None
        self._shows = shell is not None and importlib.util.find_spec("matplotlib") is not None

    def follow(self, process: subprocess.Popen[bytes]) -> None:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(DRAWN_EVERY_S)
                return
            self.draw()

    def draw(self) -> None:
        if not self._shows or len(losses := _losses(self._steps)) == self._drawn:
            return
        shown: Any = importlib.import_module("IPython.display")
        from matplotlib.figure import Figure

        self._drawn = len(losses)
        drawing = Figure(figsize=(7, 3), layout="constrained")
        axes = drawing.subplots()
        axes.plot(losses)
        axes.set(xlabel="step", ylabel="loss")
        data = io.BytesIO()
        drawing.savefig(data, format="png", dpi=100)
        image = shown.Image(data.getvalue())
        if self._handle is None:
            self._handle = shown.display(image, display_id=True)
        else:
            self._handle.update(image)
