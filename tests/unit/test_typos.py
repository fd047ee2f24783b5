"""A name that doesn't exist is refused with the nearest one that does, whatever it names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardline import Job
from shardline.cli.main import main
from shardline.cluster import ClusterSpec
from shardline.errors import UsageError, nearest
from shardline.lanes import check_choice
from shardline.roles import ROLES
from shardline.schedule import ScheduleSpec, check
from shardline.update import RULES
from shardline.update.arguments import optimizer_class, rule
from shardline_lab.init import EXAMPLES

JOB = EXAMPLES / "digits" / "job.py"


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (("train", JOB, "--set", "batchsize=3"), "; did you mean 'batch_size'?"),
        (("train", JOB, "--set", "nan_policy=stopp"), "; did you mean 'stop'?"),
        (("train", JOB, "--rule", "damna"), "; did you mean 'dana'?"),
        (("train", JOB, "--codec-up", "topk:ratoi=0.1"), "; did you mean 'ratio'?"),
        (("train", JOB, "--lane", "tpc"), "; did you mean 'tcp'?"),
        (("train", JOB, "--sedd", "3"), "Did you mean one of: '--seed'"),
        (("trian", JOB), "; did you mean 'train'?"),
        (("worker", "--task", "workr/0", "--cluster", "none.json"), "; did you mean 'worker'?"),
    ],
)
def test_a_typo_in_the_command_line_is_answered_with_the_nearest_name(
    typed: tuple[object, ...], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([str(part) for part in typed]) == 2
    assert meant in capsys.readouterr().err


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        (lambda: Job(batchsize=3), "batch_size"),  # type: ignore[call-arg]
        (lambda: optimizer_class("AdmaW"), "AdamW"),
        (lambda: rule("SGD", [{"lr": 0.1, "momentun": 0.9}]), "momentum"),
        (lambda: check(ScheduleSpec(kind="cosin")), "cosine"),
        (lambda: check_choice("smh"), "shm"),
        (lambda: ROLES["evaluater"], "evaluator"),
        (lambda: RULES["gap-awear"], "gap-aware"),
        (lambda: ClusterSpec.from_json('{"chief": ["a:1"], "ps": ["a:2"], "workers": ["a:3"]}', "x"), "worker"),
    ],
)
def test_a_typo_in_code_is_answered_with_the_nearest_name(typed: object, meant: str) -> None:
    assert callable(typed)
    with pytest.raises(UsageError, match=f"; did you mean '{meant}'\\?"):
        typed()


def test_what_is_like_nothing_gets_no_hint_and_a_long_name_costs_no_time() -> None:
    assert nearest("zzz", ["sync", "async"]) == ""
    assert nearest("x" * 10_000_000, ["x" * 80]) == f"; did you mean {'x' * 80!r}?"


def test_the_shells_completion_lists_commands_and_options() -> None:
    def completed(words: str) -> list[str]:
        complete = {"_SHARDLINE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        command = [Path(sys.executable).with_name("shardline")]
        done = subprocess.run(
            command, env={**os.environ, **complete}, capture_output=True, text=True, timeout=60, check=False
        )
        return [line.removeprefix("plain,") for line in done.stdout.split()]

    assert {"train", "top"} <= set(completed("shardline t")) and "status" not in completed("shardline t")
    assert "--prints" in completed("shardline train --pr")
