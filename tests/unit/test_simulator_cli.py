"""shardline simulate and advise: what it prints and writes, what it reads of a real run, and what it refuses."""

from __future__ import annotations

import itertools
import json
import re
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from shardline.cli import quantities
from shardline.cli.main import main
from shardline.codecs import CODECS
from shardline.codecs.base import Memory
from shardline.errors import UsageError
from shardline_lab.simulate import death
from shardline_lab.simulator import menu, runs
from shardline_lab.simulator.simulation import Death
from shardline_lab.simulator.times import Gamma, Measured

JOB = """
import torch
from torch import nn
from torch.utils.data import TensorDataset
import shardline

job = shardline.Job(
    model=lambda: nn.Linear(4, 2),
    loss=lambda model, batch: model(batch[0]).square().mean(),
    dataset=TensorDataset(torch.randn(64, 4, generator=torch.Generator().manual_seed(0))),
    optimizer="SGD", optimizer_args={"lr": 0.1}, batch_size=4, replicas=2, steps=50,
)
"""

STAGED = JOB.replace(
    "nn.Linear(4, 2)", "shardline.Pipeline([nn.Linear(4, 300), nn.Linear(300, 2)], stages=[1])"
).replace("replicas=2", 'accumulate=4, pipeline="flush"')


@pytest.fixture
def staged_file(tmp_path: Path) -> str:
    path = tmp_path / "staged.py"
    path.write_text(STAGED)
    return str(path)


@pytest.fixture
def job_file(tmp_path: Path) -> str:
    path = tmp_path / "job.py"
    path.write_text(JOB)
    return str(path)


def figures(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    path = tmp_path / "figures.json"
    assert main(["simulate", *arguments, "--json", str(path)]) == 0
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def test_it_prints_the_figures_and_writes_them(
    job_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = figures(tmp_path, job_file, "--workers", "2", "--compute", "100ms", "--cv", "0")
    assert found["steps"] == 50 and found["steps_per_s"] == pytest.approx(10)
    said = capsys.readouterr().out
    assert "2 workers, 1 ps, sync, every-step, raw: 50 steps in 5.0 s of virtual time" in said
    assert "100 ms in the mean" in said and "10.00 steps/s, 80 samples/s" in said
    again = figures(tmp_path, job_file, "--workers", "2", "--compute", "100ms", "--cv", "0")
    assert again == found
    slower = figures(tmp_path, job_file, "--workers", "2", "--compute", "100ms", "--cv", "0", "--exchange", "25ms")
    assert slower["steps_per_s"] == pytest.approx(8, rel=0.02)


def test_without_a_time_it_measures_one(job_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = figures(tmp_path, job_file, "--steps", "5")
    (ms,) = re.findall(r"measured here: ([0-9.]+) ms per pass", capsys.readouterr().out)
    assert found["seconds"] == pytest.approx(5 * 2 * float(ms) / 1e3, rel=0.5)


def test_it_trains_and_draws(job_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "run.svg"
    arguments = [job_file, "--workers", "2", "--compute", "1s,2s", "--gradients", "--plot", str(picture)]
    found = figures(tmp_path, *arguments, "--kill", "worker/1@20s:back=3s", "--set", "consistency=async")
    assert found["loss"]["last"] < found["loss"]["first"]
    assert "  loss " in capsys.readouterr().out
    root = ET.fromstring(picture.read_text())
    texts = [text.text or "" for text in root.iter("{http://www.w3.org/2000/svg}text")]
    lines = list(root.iter("{http://www.w3.org/2000/svg}polyline"))
    for title in ("seconds per step", "steps per second", "staleness in updates, mean", "loss"):
        assert title in texts
    assert len(lines) == 5 and all(len(line.attrib["points"].split()) > 10 for line in lines)


def test_a_cluster_file_says_who_shares_a_machine(job_file: str, tmp_path: Path) -> None:
    def seconds(ps: str) -> float:
        path = tmp_path / "cluster.json"
        cluster = {"chief": ["a:1"], "ps": [ps], "worker": ["b:1", "b:2"]}
        path.write_text(json.dumps(cluster))
        shape = ["--cluster", str(path), "--link", "1kbit", "--compute", "1ms", "--no-overlap"]
        return float(figures(tmp_path, job_file, *shape)["seconds"])

    assert seconds("b:3") < 1 < 50 < seconds("a:3")


def mesh_file(path: Path, machines: dict[str, list[str]], **more: Any) -> str:
    pairs = itertools.permutations(machines, 2)
    links = [{"from": a, "to": b, "bytes_per_s": 1e3, "round_trip_s": 0.0} for a, b in pairs]
    path.write_text(json.dumps({"machines": machines, "links": links, **more}))
    return str(path)


RACK = {"s": ["chief/0", "ps/0"], "a": ["worker/0", "worker/1"], "b": ["worker/2", "worker/3"]}


def test_a_mesh_ranks_topologies_and_places_of_servers(
    job_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = mesh_file(tmp_path / "mesh.json", RACK)
    shape = [job_file, "--mesh", mesh, "--compute", "1ms", "--cv", "0", "--no-overlap", "--set", "replicas=4"]
    rows = advise(tmp_path, *shape)
    found = {(row["topology"], *row["servers"]): row["expected_s"] for row in rows}
    assert [row["expected_s"] for row in rows] == sorted(found.values())
    assert found.keys() == {
        (name, *servers) for name in ("flat", "local-sum", "aggregators") for servers in (("s",), ("a", "b", "s"))
    }
    assert all(row["aggregators"] == ["a", "b"] for row in rows if row["topology"] == "aggregators")
    # Transfers are all but 1 ms of a step; each host sends once instead of twice.
    assert found["flat", "s"] == pytest.approx(2 * found["local-sum", "s"], rel=0.01)
    assert found["flat", "s"] > found["flat", "a", "b", "s"] > found["local-sum", "a", "b", "s"]
    said = capsys.readouterr().out
    assert "topology='local-sum'," in said and re.search('"ps" on .*a', said)
    # Real gradients have the same sums, whatever the way.
    shape = [*shape, "--gradients", "--steps", "5"]
    losses = [figures(tmp_path, *shape, "--topology", name)["loss"] for name in ("flat", "local-sum")]
    assert losses[0] == losses[1]


def test_racks_have_an_aggregator_each(job_file: str, tmp_path: Path) -> None:
    machines = {"s": ["chief/0", "ps/0"], **{name: [f"worker/{index}"] for index, name in enumerate("abcd")}}
    racks = {"a": "r1", "c": "r1", "b": "r2", "d": "r2"}
    mesh = mesh_file(tmp_path / "mesh.json", machines, racks=racks)
    shape = [job_file, "--mesh", mesh, "--compute", "1ms", "--cv", "0", "--no-overlap", "--set", "replicas=4"]
    found = [row for row in advise(tmp_path, *shape) if row["topology"] == "aggregators"]
    assert [row["aggregators"] for row in found] == [["a", "b"]] * 2
    # Replicas 0 and 2 are no node of the sum, so nothing is saved on the way up, but pulls are.
    (theirs,) = (row for row in found if row["servers"] == ["s"])
    assert theirs["bytes_per_step"]["push"] == pytest.approx(2 * theirs["bytes_per_step"]["pull"], rel=0.05)


def test_a_mesh_says_what_it_replaces_and_what_the_job_cannot_have(
    job_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mesh = mesh_file(tmp_path / "mesh.json", RACK)
    assert main(["advise", job_file, "--mesh", mesh, "--link", "1Gbit"]) == UsageError.exit_code
    assert "leave out --cluster, --link and --latency" in capsys.readouterr().err
    assert main(["advise", job_file, "--mesh", mesh, "--compute", "1ms", "--consistency", "async"]) == 0
    said = capsys.readouterr().out
    assert "Not local-sum: topology local-sum has one pull of a step serve several workers" in said
    mesh = mesh_file(tmp_path / "mesh.json", {"s": ["chief/0", "ps/0"], "a": ["evaluator/0"]})
    assert main(["advise", job_file, "--mesh", mesh, "--compute", "1ms"]) == UsageError.exit_code
    assert "has no worker or no ps" in capsys.readouterr().err


def test_idle_workers_are_mentioned(job_file: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", job_file, "--workers", "5", "--compute", "1s"]) == 0
    assert "3 of 5 workers have nothing to do: the job has 2 replicas" in capsys.readouterr().out


def lines_of(path: Path, lines: list[dict[str, Any]]) -> Path:
    (path / "logs").mkdir(parents=True)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (path / "logs" / "steps.jsonl").write_text(text + '{"timeline": 1, "st')
    return path


def test_each_worker_of_an_asynchronous_run_has_its_own_times(job_file: str, tmp_path: Path) -> None:
    lines = [
        {"step": step, "compute_s": seconds if step > 3 else 60.0, "replicas": 1, "task": task}
        for step in range(40)
        for task, seconds in (("worker/10", 0.4), ("worker/2", 0.1))
    ]
    lines.sort(key=lambda line: line["step"])
    # The first two steps of each worker are left out; two more are slow.
    for line in lines[4:8]:
        line["compute_s"] = 0.1 if line["task"] == "worker/2" else 0.4
    found = runs.read_times(lines_of(tmp_path / "run", lines))
    assert found == (Measured((0.1,) * 38), Measured((0.4,) * 38))
    shape = ["--from", str(tmp_path / "run"), "--workers", "2", "--set", "consistency=async"]
    assert figures(tmp_path, job_file, *shape)["steps_per_s"] == pytest.approx(12.5, rel=0.05)


def test_a_synchronous_run_gives_the_same_step_time_again(job_file: str, tmp_path: Path) -> None:
    generator = np.random.default_rng(2)
    largest = Gamma(0.2, 0.5).draw(generator, 4000).reshape(1000, 4).max(1)
    lines = [{"step": step, "compute_s": value, "replicas": 4} for step, value in enumerate(largest.tolist())]
    lines_of(tmp_path / "run", lines)
    shape = ["--from", str(tmp_path / "run"), "--workers", "4", "--set", "replicas=4", "--steps", "1000"]
    assert figures(tmp_path, job_file, *shape)["step_s"]["mean"] == pytest.approx(largest.mean(), rel=0.02)


def test_a_round_of_several_passes_is_divided(tmp_path: Path) -> None:
    lines = [{"step": step, "compute_s": 0.8, "replicas": 1, "task": "worker/0"} for step in range(9)]
    assert runs.read_times(lines_of(tmp_path / "run", lines), 8)[0].mean_s == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("text", "value"), [("80ms", 0.08), ("1.5s", 1.5), ("2 min", 120), ("3", 3), ("1h", 3600), ("5e-3", 5e-3)]
)
def test_durations(text: str, value: float) -> None:
    assert quantities.seconds(text, "--latency") == pytest.approx(value)


@pytest.mark.parametrize(("text", "value"), [("1Gbit", 125e6), ("100mbit/s", 12.5e6), ("25MB", 25e6)])
def test_bandwidths(text: str, value: float) -> None:
    assert quantities.bytes_per_s(text, "--link") == pytest.approx(value)


def test_deaths() -> None:
    assert death("worker/3@2min:back=10s", "--kill") == Death(worker=3, at_s=120, back_s=10)
    assert death("worker/0@1.5s", "--kill") == Death(worker=0, at_s=1.5)
    with pytest.raises(UsageError, match="worker/INDEX@TIME"):
        death("worker@3", "--kill")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--compute", "1x"), "'1x' is not a duration such as 80ms"),
        (("--compute", "0s"), "a pass takes 0.0 s; give a time above 0"),
        (("--compute", "1s", "--link", "1Gb"), "--link: '1Gb' is not a bandwidth: none, 100Mbit"),
        (("--compute", "1s", "--link", "0Gbit"), "a bandwidth of 0 bytes/s; give one above 0"),
        (("--compute", "1s", "--kill", "worker/7@1s"), "worker/7 can't die: the simulated workers are"),
        (("--kill", "worker/1@soon"), "--kill: 'soon' is not a duration"),
        (("--compute", "1s", "--from", "."), "--from and --compute both say how long a pass takes"),
        (("--from", "nowhere"), "--from nowhere: nowhere can't be read: No such file or directory"),
        (("--compute", "1s", "--plot", "nowhere/x.svg"), "nowhere/x.svg can't be written"),
        (("--compute", "1s", "--cv", "-1"), "the coefficient of variation is -1.0"),
    ],
)
def test_wrong_options_are_refused(
    arguments: tuple[str, ...], said: str, job_file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", job_file, "--workers", "2", *arguments]) == 2
    assert said in capsys.readouterr().err


def test_files_that_hold_no_times_are_refused(tmp_path: Path) -> None:
    for text, said in (("0.1\nslow\n", "neither a run's folder nor"), ("", "0 measured times"), ("0.1 -1", "above 0")):
        (tmp_path / "times").write_text(text)
        with pytest.raises(UsageError, match=said):
            runs.read_times(tmp_path / "times")
    with pytest.raises(UsageError, match="has no compute times of more than 2 steps"):
        runs.read_times(lines_of(tmp_path / "run", [{"compute_s": 1.0, "replicas": 1}] * 2))


@pytest.fixture
def few_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """For advice on passes that all take equally long, or that is not compared."""
    monkeypatch.setattr(menu, "PASSES", 60)
    monkeypatch.setattr(menu, "STEPS", 6)


def advise(tmp_path: Path, *arguments: str) -> list[dict[str, Any]]:
    path = tmp_path / "rows.json"
    assert main(["advise", *arguments, "--json", str(path)]) == 0
    found: list[dict[str, Any]] = json.loads(path.read_text())
    return found


def test_advice_ranks_what_a_slow_link_allows(
    job_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 40 bytes each way, of two workers at once: 40 ms, beside passes of 10 ms.
    rows = advise(tmp_path, job_file, "--workers", "2", "--link", "16kbit", "--compute", "10ms")
    speeds = [row["samples_per_s"] for row in rows]
    assert speeds[0] > 3 * speeds[-1]
    best, said = rows[0], capsys.readouterr().out.splitlines()
    assert (best["consistency"], best["cadence"]) == ("sync", "diloco") and best["codec"] != "raw"
    changes = [line for line in said if line.startswith("    ")]
    assert "    cadence='diloco'," in changes and not any("consistency=" in line for line in changes)
    assert any(line.startswith("*  sync") for line in said)
    assert "diloco, 50 passes a step" in "".join(said)
    # The same line in the job, simulated by itself.
    shape = ["--workers", "2", "--link", "16kbit", "--compute", "10ms", "--set", "cadence=diloco"]
    alone = figures(tmp_path, job_file, *shape, "--set", f"codec={best['codec']}", "--steps", "30")
    assert alone["steps_per_s"] == pytest.approx(best["steps_per_s"])


@pytest.mark.usefixtures("few_passes")
def test_advice_gives_every_worker_a_replica(job_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = advise(tmp_path, job_file, "--workers", "6", "--compute", "10ms", "--cv", "0")
    (mine,) = (row for row in rows if row["replicas"] == 2 and row["consistency"] == "sync")
    assert rows[0]["samples_per_s"] == pytest.approx(3 * mine["samples_per_s"], rel=0.05)
    assert "    replicas=6," in capsys.readouterr().out
    # Of these alone the loss can be simulated, too.
    codecs = {row["codec"] for row in rows}
    assert {"raw", "bf16", "qsgd"} <= codecs
    assert all(CODECS.parse(codec).memory is Memory.NONE for codec in codecs)


@pytest.mark.usefixtures("few_passes")
def test_advice_leaves_pipelines_out_where_the_model_has_too_few_layers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (
        "import torch, shardline\n"
        "from torch import nn\n"
        "job = shardline.Job(\n"
        "    model=lambda: shardline.Pipeline([nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)], stages='auto'),\n"
        "    loss=lambda model, batch: model(batch[0]).mean(), optimizer='SGD', optimizer_args={'lr': 0.1},\n"
        "    dataset=torch.utils.data.TensorDataset(torch.zeros(64, 4)), batch_size=4, steps=4,\n"
        ")\n"
    )
    job = tmp_path / "auto.py"
    job.write_text(text)
    rows = advise(tmp_path, str(job), "--workers", "6", "--compute", "10ms")
    assert {row["pipeline"] for row in rows} == {"whole-model"}
    assert "No pipeline is compared: Pipeline: 6 stages of 3 layers" in capsys.readouterr().out
    assert any(row["pipeline"] == "flush" for row in advise(tmp_path, str(job), "--workers", "2", "--compute", "10ms"))


@pytest.mark.usefixtures("few_passes")
def test_advice_names_what_the_job_cannot_have(
    job_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = [job_file, "--workers", "2", "--compute", "10ms", "--consistency", "async", "--rule", "gap-aware"]
    rows = advise(tmp_path, *shape)
    modes = {row["consistency"] for row in rows}
    # Plugins of other tests may be in the tables.
    assert modes >= {"async", "ssp"} and not modes & {"sync", "softsync"}
    said = capsys.readouterr().out
    assert re.search(r"Not sync, raw, every-step, nor \d+ others: update rule gap-aware needs", said)
    assert said.count("update rule gap-aware needs") < 5


@pytest.mark.usefixtures("few_passes")
def test_gradients_that_come_too_late_are_not_counted(
    job_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow = ["--workers", "3", "--compute", "10ms,10ms,20ms", "--cv", "0", "--set", "replicas=3"]
    found = figures(tmp_path, job_file, *slow, "--consistency", "sync:spares=1")
    assert found["passes_per_s"] == pytest.approx(2 * 100, rel=0.02)
    assert found["passes_unused"] == pytest.approx(1 / 3, abs=0.2) and found["passes_unused"] > 0.1
    assert re.search("and [0-9]+ % of the passes for nothing", capsys.readouterr().out)
    # Plugins of other tests may be in the tables.
    places = ("consistency", "codec", "cadence")
    rows = {tuple(row[name] for name in places): row for row in advise(tmp_path, job_file, *slow)}
    row = rows["sync:spares=1", "raw", "every-step"]
    assert row["samples_per_s"] == pytest.approx(4 * 2 * 100, rel=0.02)


@pytest.mark.usefixtures("few_passes")
def test_a_cadence_that_changes_has_no_number_of_passes(
    job_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    advise(tmp_path, job_file, "--workers", "2", "--compute", "10ms", "--set", "cadence=post-local-sgd:start=10")
    (mine,) = (line for line in capsys.readouterr().out.splitlines() if "post-local-sgd" in line and line[0] == "*")
    assert "passes a step" not in mine


@pytest.mark.usefixtures("few_passes")
def test_nothing_is_advised_without_need(job_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    advise(tmp_path, job_file, "--workers", "2", "--compute", "10ms", "--cv", "0")
    assert "Nothing that was simulated is faster than the job as it is." in capsys.readouterr().out


def test_a_pipeline_is_simulated_with_its_bubbles(
    staged_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shape = (staged_file, "--workers", "2", "--compute", "10ms", "--cv", "0")
    found = figures(tmp_path, *shape)
    assert found["steps_per_s"] == pytest.approx(1 / 0.05)
    assert [stage["bubble"] for stage in found["stages"]] == pytest.approx([0.2, 0.2])
    assert found["bytes_per_step"]["parcels"] == 4 * 2 * (4 * 300 * 4)
    said = capsys.readouterr().out
    assert "2 workers, 1 ps, flush, sync, every-step, raw: 50 steps in 2.5 s of virtual time" in said
    assert "38.4 kB between stages" in said
    assert "stage 1         20 % idle within steps, holds 1 microbatches at most, stale by 0 at most" in said
    slower = figures(tmp_path, *shape, "--parcel", "1ms")
    # One on the way there, one on the way back.
    assert slower["step_s"]["median"] == pytest.approx(0.052, rel=0.05)
    figures(tmp_path, staged_file, "--workers", "3", "--steps", "5")
    said = capsys.readouterr().out
    assert re.search(r"measured here: [0-9.]+, [0-9.]+ ms per microbatch, by stage", said)
    assert "1 of 3 workers have nothing to do: the job has 2 stages, 1 times" in said


def test_advice_compares_pipelines_with_the_whole_model(
    staged_file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fixed = ("--set", "codec_up=raw")
    rows = advise(tmp_path, staged_file, "--workers", "2", "--compute", "10ms", "--cv", "0", *fixed)
    rates = {
        row["pipeline"]: row["steps_per_s"]
        for row in rows
        if row["cadence"] == "every-step" and row["consistency"] == "sync"
    }
    # Four microbatches of two stages of 10 ms: by one worker 80 ms, with a flush 50, without one 40.
    for pipeline, seconds in (("whole-model", 0.08), ("gpipe", 0.05), ("flush", 0.05), ("stash", 0.04)):
        assert rates[pipeline] == pytest.approx(1 / seconds, rel=0.03), pipeline
    said = capsys.readouterr().out
    assert re.search(r"^\* +flush x 1 ", said, re.MULTILINE)
