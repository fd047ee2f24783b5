"""Who takes part: our own lanes and the rivals, each as a name and a call that gives one sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.network import Loopback
from benchmarks.process import ROOT, ContenderError, environment, run_json
from benchmarks.push_pull import Work, run

PEERS = ROOT / "benchmarks" / "peers"
VENVS = ROOT / "benchmarks" / ".venvs"

TENSORFLOW = "TensorFlow ParameterServerStrategy"
RPC_TCP = "torch.distributed.rpc over TCP"
RPC_SHM = "torch.distributed.rpc (shm)"
RAY = "Ray actors"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One line of a comparison. run: gives one sample, or raises ContenderError."""

    name: str
    run: Callable[[], dict[str, Any]]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How much of the work is done: all of it, or just enough to see that it runs."""

    repeats: int = 5
    steps: int = 20
    warmup: int = 10
    """So many that allocators and object stores have touched all of their memory."""
    megabytes: float = 64.0
    small_megabytes: float = 4.0
    large_megabytes: float = 400.0
    link_seconds: float = 5.0
    tensors: tuple[int, ...] = (100, 1_000, 10_000)
    peers: bool = True


QUICK = Scale(
    repeats=1,
    steps=3,
    warmup=1,
    megabytes=4.0,
    small_megabytes=1.0,
    large_megabytes=8.0,
    link_seconds=0.5,
    tensors=(10, 30, 100),
)


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What the sets are given."""

    scale: Scale
    loopback: Loopback
    say: Callable[[str], None] = print

    def work(self, **changes: Any) -> Work:
        """One run of ours at this scale."""
        return replace(
            Work(megabytes=self.scale.megabytes, steps=self.scale.steps, warmup=self.scale.warmup), **changes
        )

    def ours(self, name: str, *, tls: bool = False, **changes: Any) -> Contender:
        """One of our lanes, on loopback."""
        work = self.work(**changes)
        return Contender(name=name, run=lambda: run(work, tls=tls, prefix=self.loopback.prefix))


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One way to run a rival."""

    flags: tuple[str, ...] = ()
    tensors: int = 1
    """Pieces that travel by themselves, all in flight at once."""
    tuned: bool = True
    """With the allocator's settings that ours has."""

    def label(self) -> str:
        """A few words."""
        words = [*self.flags, f"{self.tensors} piece" + ("s" if self.tensors > 1 else "")]
        return ", ".join(words) + ("" if self.tuned else ", allocator as it is")


@dataclass(frozen=True, kw_only=True)
class Rival:
    """A peer, and the ways of running it of which the fastest counts."""

    name: str
    script: str
    venv: str
    variants: tuple[Variant, ...]
    chosen: dict[float, Variant] = field(default_factory=dict)
    """The fastest, by megabytes."""

    def contender(self, bench: Bench, megabytes: float, *, whole: bool = False) -> Contender:
        """At its best, which is found out first; whole = one tensor in one call, as the work is described."""
        name = f"{self.name}, one call" if whole else self.name
        plain = replace(self.variants[0], tensors=1)
        return Contender(
            name=name, run=lambda: self.sample(bench, megabytes, plain if whole else self.best(bench, megabytes))
        )

    def best(self, bench: Bench, megabytes: float) -> Variant:
        """The fastest variant in one trial each; remembered."""
        if megabytes not in self.chosen:
            trials: list[tuple[float, int]] = []
            for number, variant in enumerate(self.variants):
                try:
                    trials.append((float(self.sample(bench, megabytes, variant)["median_s"]), number))
                except ContenderError as error:
                    bench.say(f"    {self.name} ({variant.label()}) can't run: {error}")
            if not trials:
                raise ContenderError(f"{self.name} runs in none of its variants")
            self.chosen[megabytes] = self.variants[min(trials)[1]]
            bench.say(
                f"    {self.name}, trial: "
                + ", ".join(f"{self.variants[n].label()} {1e3 * s:.1f} ms" for s, n in trials)
            )
        return self.chosen[megabytes]

    def sample(self, bench: Bench, megabytes: float, variant: Variant) -> dict[str, Any]:
        """One run. Raises ContenderError."""
        command = [str(python_of(self.venv)), str(PEERS / self.script), *variant.flags]
        command += ["--tensors", str(variant.tensors), "--megabytes", str(megabytes)]
        command += ["--steps", str(bench.scale.steps), "--warmup", str(bench.scale.warmup)]
        found = run_json(
            command,
            what=self.name,
            timeout_s=600.0,
            prefix=bench.loopback.prefix,
            env=environment(tuned=variant.tuned),
        )
        return {**found, "variant": variant.label()}


def python_of(venv: str) -> Path:
    """A peer's python. Raises ContenderError where `make bench-peers` was not run."""
    python = VENVS / venv / "bin" / "python"
    if not python.exists():
        raise ContenderError(f"{venv} is not installed; run: make bench-peers")
    return python


def variants(flags: Sequence[tuple[str, ...]] = ((),), pieces: Sequence[int] = (1, 4)) -> tuple[Variant, ...]:
    """All combinations of flags, pieces and allocator settings; the first is the plainest."""
    return tuple(
        Variant(flags=given, tensors=count, tuned=tuned)
        for given, count, tuned in product(flags, pieces, (True, False))
    )


def rivals(*more: str) -> dict[str, Rival]:
    """The parameter servers of others, by name. more: flags of each."""
    rpc = "torch_rpc.py"
    return {
        TENSORFLOW: Rival(name=TENSORFLOW, script="tensorflow_ps.py", venv="tensorflow", variants=variants([more])),
        RPC_TCP: Rival(name=RPC_TCP, script=rpc, venv="torch", variants=variants([("--transport", "tcp", *more)])),
        RPC_SHM: Rival(
            name=RPC_SHM,
            script=rpc,
            venv="torch",
            variants=variants([("--transport", "shm", *more), ("--transport", "default", *more)]),
        ),
        RAY: Rival(name=RAY, script="ray_actors.py", venv="ray", variants=variants([more])),
    }


def gloo(processes: int) -> Rival:
    """An all-reduce of so many processes."""
    flags = ("--processes", str(processes))
    return Rival(
        name=f"gloo all-reduce, {processes} processes", script="gloo.py", venv="torch", variants=variants([flags])
    )


def interleaved(contenders: Sequence[Contender], repeats: int) -> Iterator[tuple[int, Contender]]:
    """A B C A B C ...: what slows the machine for a while slows all of them."""
    for repeat in range(repeats):
        for contender in contenders:
            yield repeat, contender


def collect(
    contenders: Sequence[Contender], repeats: int, say: Callable[[str], None] = print
) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Samples by contender, and why some have none; one that failed is not tried again."""
    samples: dict[str, list[dict[str, Any]]] = {contender.name: [] for contender in contenders}
    failures: dict[str, str] = {}
    for repeat, contender in interleaved(contenders, repeats):
        if contender.name in failures:
            continue
        try:
            sample = contender.run()
        except ContenderError as error:
            failures[contender.name] = str(error)
            samples[contender.name].clear()
            say(f"  {contender.name}: {error}")
            continue
        samples[contender.name].append(sample)
        if "median_s" in sample:
            say(f"  {repeat + 1}/{repeats} {contender.name}: {1e3 * sample['median_s']:.1f} ms a step")
    return samples, failures
