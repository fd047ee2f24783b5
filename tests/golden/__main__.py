"""Where known jobs end, to the bit: `python -m tests.golden` trains each and compares; `--write` writes them down anew.

For whoever moves code about: modes, rules, accumulation, clipping, kills, resuming and lanes, with real processes. The
bits belong to one class of machine (docs/protocol.md, E); on another the comparison is left out and said to be.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shardline.cli.launcher import LaunchOptions, LocalCluster
from shardline.client.api.joining import machine_fingerprint
from shardline.core.timeouts import Timeouts
from tests.e2e.support import PATIENCE_S, slow_job, summary_of, wait_for_step, write_job

EXPECTED = Path(__file__).with_name("expected.json")


def no_kills(cluster: LocalCluster, out: Path) -> None:
    """Nobody is harmed."""


def kill(*victims: tuple[int, str]) -> Callable[[LocalCluster, Path], None]:
    """Kill tasks one after another, each when its step is reached."""

    def act(cluster: LocalCluster, out: Path) -> None:
        for step, task in victims:
            wait_for_step(out, step)
            cluster.kill(task)

    return act


@dataclass(frozen=True, kw_only=True)
class Golden:
    """One run. job: fields of the small job, `changes` more of them as code; options: of the launcher; slow: at a pace
    that leaves time for kills.
    """

    job: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    act: Callable[[LocalCluster, Path], None] = no_kills
    slow: bool = False
    then: Mapping[str, Any] | None = None
    """Resume with these options, up to 20 steps more."""


ADAMW = "optimizer='AdamW', optimizer_args={'lr': 0.003, 'weight_decay': 0.05}"
ONE = {"ps": 1, "workers": 1}

RUNS: dict[str, Golden] = {
    "sync-sgd-grpc": Golden(options={"lane": "grpc"}),
    "sync-sgd-tcp": Golden(options={"lane": "tcp"}),
    "sync-sgd-shm": Golden(options={"lane": "shm"}),
    "sync-three-replicas-on-two": Golden(job={"replicas": 3}),
    "sync-adamw-cosine": Golden(job={"changes": f"{ADAMW}, schedule=shardline.schedule.cosine(warmup_steps=5)"}),
    "sync-adagrad-accumulate": Golden(
        job={"changes": "optimizer='Adagrad', optimizer_args={'lr': 0.02}, accumulate=3"}
    ),
    "sync-clipped": Golden(job={"clip_norm": 0.5, "replicas": 3}),
    "sync-skip": Golden(job={"nan_policy": "skip", "replicas": 2}),
    "sync-bf16-tcp": Golden(job={"codec": "bf16", "replicas": 2}, options={"lane": "tcp"}),
    "sync-chief-trains": Golden(job={"replicas": 2}, options={"chief_trains": True, "workers": 1}),
    "sync-killed-workers": Golden(
        job={"replicas": 2, "steps": 60}, act=kill((10, "worker/1"), (25, "worker/0")), slow=True
    ),
    "sync-killed-server": Golden(
        job={"replicas": 2, "steps": 60, "checkpoint_every": 10}, act=kill((25, "ps/1")), slow=True
    ),
    "sync-killed-chief": Golden(job={"replicas": 2, "steps": 60}, act=kill((15, "chief/0")), slow=True),
    "sync-standby": Golden(
        job={"replicas": 2, "steps": 60}, options={"standbys": 1}, act=kill((20, "ps/0")), slow=True
    ),
    "voted-standby": Golden(
        job={"replicas": 2, "steps": 60, "clip_norm": 0.5},
        options={"standbys": 1},
        act=kill((20, "ps/0")),
        slow=True,
    ),
    "sync-resumed-on-another-cluster": Golden(job={"changes": ADAMW}, then={"ps": 3, "workers": 1}),
    "async-one-worker": Golden(job={"consistency": "async"}, options=ONE),
    "async-adamw-clipped": Golden(job={"consistency": "async", "clip_norm": 0.5, "changes": ADAMW}, options=ONE),
}


def train(golden: Golden, folder: Path) -> str:
    """sha256 of the parameters that a run ends with."""
    out, fields = folder / "run", {"replicas": 2, **golden.job}
    write = slow_job if golden.slow else write_job
    changes = fields.pop("changes", "")
    after = f"import dataclasses, shardline\njob = dataclasses.replace(job, {changes})" if changes else ""
    job = write(folder / "job.py", after=after, **fields)
    options = {"ps": 2, "workers": 2, "timeouts": Timeouts(total_s=90.0), **golden.options}
    _run(LaunchOptions(job=job, out=out, **options), golden.act)
    if golden.then is not None:
        steps = int(fields.get("steps", 40)) + 20
        more = {**options, **golden.then, "overrides": (("steps", str(steps)),), "resume": True}
        _run(LaunchOptions(job=job, out=out, **more), no_kills)
    return str(summary_of(out)["sha256"])


def _run(options: LaunchOptions, act: Callable[[LocalCluster, Path], None]) -> None:
    with LocalCluster(options) as cluster:
        act(cluster, options.out)
        code = cluster.wait(timeout_s=2 * PATIENCE_S)
        if code != 0:
            raise SystemExit(f"the run ended with {code}: {cluster.last_words('chief/0')}")
        cluster.wait_all(timeout_s=30.0)


def main() -> int:
    """Train and compare; the exit code says whether all bits are as written down."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="write down where the runs end")
    parser.add_argument("--only", default="", help="runs whose name has this in it")
    arguments = parser.parse_args()
    machine = machine_fingerprint(1, "cpu")
    expected = json.loads(EXPECTED.read_text(encoding="utf-8")) if EXPECTED.exists() else {"machine": {}, "sha256": {}}
    comparable = expected["machine"] == machine
    if not comparable and not arguments.write:
        print(f"the bits written down are of another class of machine ({expected['machine']}); only trained")
    found: dict[str, str] = {}
    differ = []
    for name, golden in RUNS.items():
        if arguments.only not in name:
            continue
        with tempfile.TemporaryDirectory(prefix="golden-") as folder:
            found[name] = train(golden, Path(folder))
        same = found[name] == expected["sha256"].get(name)
        if comparable and not same and not arguments.write:
            differ.append(name)
        print(f"{name}: {found[name][:16]} {'as before' if same else 'OTHER BITS' if comparable else ''}", flush=True)
    if arguments.write:
        known = {**expected["sha256"], **found} if comparable else found
        EXPECTED.write_text(json.dumps({"machine": machine, "sha256": known}, indent=2) + "\n", encoding="utf-8")
    if differ:
        print(f"other bits than before: {', '.join(differ)}", file=sys.stderr)
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
