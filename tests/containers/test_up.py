"""`docker compose up` as it comes: the digits are trained to their end, by containers that may do little else."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from shardline.job import load_job
from shardline.testing import reference
from tests.containers.stack import IMAGE, ROOT, TASKS, Stack, run

EXAMPLE = ROOT / "examples" / "digits" / "job.py"


@pytest.fixture(scope="module")
def done() -> Iterator[Stack]:
    """A stack whose job has ended."""
    with Stack("up") as stack:
        stack.up()
        stack.exit_codes()
        yield stack


def test_up_trains_the_digits_to_their_end_and_every_task_ends_with_0(done: Stack) -> None:
    codes = done.exit_codes()
    assert len(codes) == 6
    assert set(codes.values()) == {0}
    summary = done.summary()
    assert summary["steps"] == 500
    assert summary["evaluation"]["last"]["metrics"]["accuracy"] > 0.97
    assert [done.restarts(name) for name in codes] == [0] * 6


def test_result_is_bit_identical_to_one_process_without_any_cluster(done: Stack) -> None:
    assert done.summary()["sha256"] == reference(load_job(EXAMPLE)).sha256


def test_lane_between_containers_is_tcp_and_nothing_had_to_be_fallen_back_from(done: Stack) -> None:
    lines = done.lines("worker")
    lanes = [line for line in lines if ": lane " in line]
    assert len(lanes) == 4
    assert all(line.endswith("lane tcp") for line in lanes)
    assert not [line for line in lines if "can't be used" in line]


@pytest.mark.parametrize("service", TASKS)
def test_container_is_confined(done: Stack, service: str) -> None:
    found = done.inspect(done.one(service))
    host = found["HostConfig"]
    assert found["Config"]["User"] == "shardline"
    assert host["ReadonlyRootfs"]
    assert host["CapDrop"] == ["ALL"]
    assert "no-new-privileges:true" in host["SecurityOpt"]
    assert host["Memory"] == 2 << 30
    assert host["NanoCpus"] == 1_000_000_000
    assert host["RestartPolicy"] == {"Name": "on-failure", "MaximumRetryCount": 5}
    assert not host["PortBindings"]


def test_image_runs_as_a_fixed_user_and_holds_no_compiler() -> None:
    script = "id -u; for tool in gcc g++ cc c++ clang make ld; do command -v $tool; done; true"
    assert run("docker", "run", "--rm", "--entrypoint", "sh", IMAGE, "-c", script).split() == ["10001"]


def test_torch_of_the_image_is_the_pinned_one_for_the_device_asked_for() -> None:
    pin = next(line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    script = "import torch; print(torch.__version__.split('+')[0], 'cuda' if torch.version.cuda else 'cpu')"
    found = run("docker", "run", "--rm", "--entrypoint", "python", IMAGE, "-c", script).split()
    assert found == [pin.removeprefix("torch=="), os.environ.get("TORCH", "cpu")]


def test_commands_of_the_image_are_those_of_shardline() -> None:
    assert run("docker", "run", "--rm", IMAGE, "--version").startswith("shardline ")
    help_text = run("docker", "run", "--rm", IMAGE)
    for command in ("chief", "ps", "worker", "evaluator"):
        assert f"\n  {command} " in help_text


def test_every_knob_is_in_the_example_of_env() -> None:
    files = [ROOT / "docker-compose.yml", *sorted((ROOT / "deploy" / "compose").glob("*.yaml"))]
    text = "".join(path.read_text() for path in files)
    used = {*re.findall(r"\$\{([A-Z_]+)", text), *re.findall(r"^ +(PIP_[A-Z_]+):", text, re.MULTILINE)}
    shown = set(re.findall(r"^#([A-Z_]+)=", (ROOT / ".env.example").read_text(), re.MULTILINE))
    assert used == shown - {"COMPOSE_PROFILES", "COMPOSE_FILE"}


def test_defaults_in_the_example_of_env_are_those_of_the_compose_files(tmp_path: Path) -> None:
    env = tmp_path / "env"
    knobs = re.findall(r"^#([A-Z_]+=.*)$", (ROOT / ".env.example").read_text(), re.MULTILINE)
    # Set to nothing is another thing than not set, to pip.
    env.write_text("\n".join(knob for knob in knobs if not knob.startswith("PIP_")))
    shown = [
        run("docker", "compose", "--env-file", str(file), "-f", "docker-compose.yml", "config", "--format", "json")
        for file in (env, Path("/dev/null"))
    ]
    assert json.loads(shown[0])["services"] == json.loads(shown[1])["services"]


def test_down_leaves_nothing_but_the_volumes_and_up_goes_on_from_them(done: Stack) -> None:
    # The last test of this stack: it takes the containers away.
    done.down()
    assert done.left("container") == done.left("network") == []
    kept = ("checkpoints", "logs", "prometheus", "state")
    assert sorted(done.left("volume")) == [f"{done.project}_{name}" for name in kept]
    # The chief waits for all tasks, to tell them.
    done.up()
    done.wait_line("chief", "nothing to do: /out/checkpoints/step-00000500 already has all 500 steps")
    codes = done.exit_codes()
    assert len(codes) == 6
    assert set(codes.values()) == {0}
