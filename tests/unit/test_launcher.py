from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from shardline.certs import make_certificates
from shardline.cli import prints
from shardline.cli.launcher import LaunchError, LocalCluster, task_command, task_environment
from shardline.cli.main import main
from shardline.cli.process_exits import MAX_RESTARTS, exception_in, may_restart, says_more
from shardline.cli.terminal import PlainConsole
from shardline.cli.train import LaunchedRun, Polled, run
from shardline.core.status import ChiefStatus, TaskStatus
from shardline.core.timeouts import Timeouts
from shardline.errors import ShardlineError, TaskLostError, UsageError
from shardline.host import lifeline
from shardline.security import Security
from tests.support.fake_roles import (
    children,
    is_gone,
    job_file,
    launch,
    next_end,
    read_back,
    started_train,
    tell_chief,
    wait_for_start,
    wait_gone,
)


def status(phase: str, *, step: int, joined: tuple[str, ...]) -> ChiefStatus:
    rows = tuple(TaskStatus(task=task, state="alive", incarnation=1) for task in joined)
    return ChiefStatus(job="job", phase=phase, step=step, tasks=rows)


# Launcher: pure parts


def test_children_get_every_setting_from_one_file_and_nothing_from_the_environment(tmp_path: Path) -> None:
    settings = launch(
        tmp_path, chief_trains=True, resume=True, overrides=(("steps", "5"),), device="cuda", gpu_memory_fraction=0.5
    )
    chief = read_back(settings, "chief/0", ready_fd=7)
    assert (chief.resume, chief.chief_trains, chief.ready_fd, chief.life_fd) == (True, True, 7, 8)
    assert (chief.device, chief.gpu_memory_fraction, chief.overrides) == ("cuda", 0.5, (("steps", "5"),))
    assert chief.job == settings.job and chief.page is None
    ps = read_back(settings, "ps/0")
    assert ps.device == "cpu", "a ps never touches a GPU unless told to"
    assert (ps.resume, ps.chief_trains, ps.ready_fd, ps.job, ps.overrides) == (False, False, None, None, ())

    leaks = {"TF_CONFIG": "x", "SHARDLINE_TASK": "ps/9", "SHARDLINE_METRICS_PORT": "9000", "SHARDLINE_STEPS": "1"}
    leaks |= {"LOCAL_RANK": "0", "SLURM_LOCALID": "0"}
    base = {**leaks, "PATH": "/bin", "SHARDLINE_JOB_ARGS": "--text x"}
    environment = task_environment(settings, "ps/0", life_fd=8, base=base)
    assert not set(leaks) & set(environment)
    assert environment["SHARDLINE_JOB_ARGS"] == "--text x"
    assert "MALLOC_MMAP_THRESHOLD_" in environment and "OMP_NUM_THREADS" not in environment


def test_script_is_run_as_it_is_and_finds_its_cluster_in_the_environment(tmp_path: Path) -> None:
    settings = launch(tmp_path, script=True, script_args=("--lr", "0.1"), overrides=(("seed", "3"),))
    assert task_command(settings, "worker/1", ready_fd=None, life_fd=8) == [
        sys.executable,
        str(settings.job),
        "--lr",
        "0.1",
    ]
    assert read_back(settings, "chief/0").job is None
    environment = task_environment(settings, "worker/1", life_fd=8, base={})
    assert environment["SHARDLINE_TASK"] == "worker/1"
    assert environment["SHARDLINE_CLUSTER"] == str(settings.out / "cluster.json")
    assert (environment["SHARDLINE_LIFE_FD"], environment["SHARDLINE_SEED"]) == ("8", "3")


def test_children_get_lane_overlap_and_where_the_secrets_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    token = Path("token")
    token.write_text("never-on-a-command-line")
    made = make_certificates(tmp_path / "certs", {"here": "127.0.0.1"}, days=1)
    cert, key = made.pairs["here"]
    secured = Security(token_file=token, tls_cert=cert, tls_key=key)
    settings = launch(
        tmp_path, security=secured, lane="tcp", overlap=False, run_dir=tmp_path, script=True, profile="2:4"
    )
    ps, chief = read_back(settings, "ps/0"), read_back(settings, "chief/0")
    assert (ps.lane, ps.run_dir, chief.overlap) == ("tcp", tmp_path, False)
    assert ps.security.token_file == tmp_path / "token", "a script may change its folder"
    assert (ps.security.tls_cert, ps.security.tls_key) == (cert, key)
    assert "never-on-a-command-line" not in (settings.out / "settings.json").read_text()

    leaks = {"SHARDLINE_TLS_CA": "/elsewhere", "SHARDLINE_LANE": "shm"}
    environment = task_environment(settings, "worker/0", life_fd=8, base=leaks)
    assert environment["SHARDLINE_TOKEN_FILE"] == str(tmp_path / "token")
    assert (environment["SHARDLINE_LANE"], environment["SHARDLINE_OVERLAP"]) == ("tcp", "0")
    assert environment["SHARDLINE_RUN_DIR"] == str(tmp_path)
    assert (environment["SHARDLINE_PROFILE"], environment["SHARDLINE_OUT"]) == ("2:4", str(settings.out))
    assert "SHARDLINE_TLS_CA" not in environment
    assert not set(leaks) & set(task_environment(settings, "ps/0", life_fd=8, base=leaks))

    assert not {"tls_cert", "token_file", "run_dir"} & set(launch(tmp_path).settings())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"ps": 0}, "--ps is 0"),
        ({"workers": 0}, "no task would train"),
        ({"workers": -1}, "can't be negative"),
        (
            {"workers": 2, "min_workers": 3},
            "--min-workers is 3, but only 2 tasks train.*use at most 2, or more --workers",
        ),
        ({"workers": 1, "chief_trains": True, "min_workers": 3}, "--min-workers is 3, but only 2 tasks train"),
        ({"tasks": (("worker", 2),)}, "--tasks worker=2: the role has a flag of its own; use --ps, --workers or"),
        (
            {"tasks": (("agregator", 1),)},
            "--tasks agregator=1: the role does not .* load its plugin: --plugin FILE; did you mean .aggregator.?",
        ),
        ({"script": True, "evaluators": 1}, "--script allows only workers"),
        ({"script": True, "overrides": (("steps", "9"),)}, "steps is decided by the script itself.*after --"),
        ({"script": True, "overrides": (("batch_size", "9"),)}, "batch_size is decided by the script itself.*after --"),
    ],
)
def test_cluster_that_can_not_train_is_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        launch(tmp_path, **change)


def test_chief_that_trains_counts_among_the_workers_that_a_job_needs(tmp_path: Path) -> None:
    assert launch(tmp_path, workers=1, chief_trains=True, min_workers=2).min_workers == 2
    assert launch(tmp_path, workers=2, min_workers=2).min_workers == 2


@pytest.mark.parametrize(
    ("role", "code", "restarts", "again"),
    [
        ("worker", -9, 0, True),
        ("ps", 1, 0, True),
        ("ps", 2, 0, False),
        ("evaluator", 1, MAX_RESTARTS - 1, True),
        ("evaluator", 3, MAX_RESTARTS, False),
        ("worker", 0, 0, False),
        ("worker", 2, 0, False),
        ("worker", 5, 0, False),
        ("worker", 7, 0, True),
        ("chief", -9, 0, True),
        ("chief", -9, MAX_RESTARTS, False),
        ("chief", 4, 0, False),
        ("chief", 1, 0, False),
    ],
)
def test_dead_task_is_restarted_where_that_can_help(role: str, code: int, restarts: int, again: bool) -> None:
    assert may_restart(role, code, restarts)[0] is again


def test_an_exception_of_a_script_is_not_raised_again_by_a_restart() -> None:
    assert may_restart("worker", 1, 0, script=True)[0] is False
    assert may_restart("worker", -9, 0, script=True)[0] is True


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import json\n\njson.loads('{')", r"the script raised json\.decoder\.JSONDecodeError: .* \(.*s\.py, line 3\)"),
        ("try: 1 / 0\nexcept ArithmeticError:\n  raise KeyError('x')", r"the script raised KeyError: 'x' .*line 3\)"),
        ("raise ValueError('one\\ntwo')", r"the script raised ValueError: one \(.*s\.py, line 1\)"),
        ("x =", r"the script raised SyntaxError: invalid syntax \(.*s\.py, line 1\)"),
        ("print('  File of all files')", ""),
    ],
)
def test_the_exception_that_ends_a_script_is_read_from_its_log(tmp_path: Path, source: str, says: str) -> None:
    script = tmp_path / "s.py"
    script.write_text(f"{source}\n")
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=False)
    assert re.fullmatch(says, exception_in(["said before", *ended.stdout.splitlines(), *ended.stderr.splitlines()]))


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"overrides": (("codec", "typo"),)}, "codec 'typo' does not exist"),
        ({"overrides": (("nope", "1"),)}, "job field 'nope' can't be set from the command line"),
        ({"overrides": (("codec", "typo:x=1"),)}, "codec 'typo' does not exist"),
        ({"overrides": (("steps", "many"),)}, "steps"),
        ({"overrides": (("batch_size", "0"),)}, "Job.batch_size is 0; give a whole number >= 1"),
        ({"overrides": (("prefetch", "0"),)}, "Job.prefetch is 0; give a whole number from 1 to 64"),
        ({"overrides": (("clip_norm", "-1"),)}, "Job.clip_norm is -1.0; give a finite number >= 0"),
        ({"overrides": (("nan_policy", "foo"),)}, "Job.nan_policy is 'foo'; it must be stop or skip"),
        ({"overrides": (("best_mode", "foo"),)}, "Job.best_mode is 'foo'; it must be max or min"),
        ({"page": "1.2.3.4:0"}, "the chief's page would listen at 1.2.3.4 without TLS"),
    ],
)
def test_flags_that_can_not_work_are_refused_before_a_process_is_started(
    tmp_path: Path, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        launch(tmp_path, **settings)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"overrides": (("consistency", "ssp:slack=x"),)}, "consistency 'ssp:slack=x': slack is 'x'; give a whole"),
        ({"overrides": (("codec", "topk:ratio=7"),)}, r"codec topk: ratio is 7\.0; give a number above 0"),
        ({"overrides": (("codec_up", "topk:ratio=7"),)}, r"codec topk: ratio is 7\.0; give a number above 0"),
        ({"overrides": (("codec-down", "bf16:x=1"),)}, "codec_down 'bf16:x=1': bf16 has no setting 'x'"),
        ({"overrides": (("cadence", "diloco:every=0"),)}, "cadence diloco: every is 0; give a whole number"),
        ({"overrides": (("rule", "lwp:lag=x"),)}, "rule 'lwp:lag=x': lag is 'x'; give a whole number"),
        ({"overrides": (("pipeline", "gpipe:x=1"),)}, "pipeline 'gpipe:x=1': gpipe has no setting 'x'"),
        ({"device": "cuda"}, r"--device cuda: this torch \(.*\) is a CPU build; install .* or use --device cpu"),
        ({"ps_device": "cuda:7"}, r"--ps-device cuda:7: this torch \(.*\) is a CPU build; .* or use --ps-device cpu"),
        (
            {"lane": "cuda"},
            "--lane cuda can't share the memory of --device cpu: use --device cuda and --ps-device cuda",
        ),
        ({"lane": "cuda", "script": True}, "--lane cuda can't share the memory of --ps-device cpu"),
        ({"script": True, "device": "cuda"}, r"--device cuda: this torch \(.*\) is a CPU build"),
    ],
)
def test_flags_that_every_task_would_refuse_start_none_and_leave_nothing(
    tmp_path: Path, settings: dict[str, Any], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    cluster = LocalCluster(launch(tmp_path, **settings))
    with pytest.raises(UsageError, match=says), cluster:
        pass
    assert cluster.running() == () and not (tmp_path / "out").exists()


@pytest.mark.parametrize(("name", "there"), [("cuda", True), ("cuda:1", True), ("cuda:2", False)])
def test_a_device_is_looked_for_before_a_process_is_started(
    tmp_path: Path, name: str, there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    # The launcher's own number on its machine says nothing about its tasks.
    monkeypatch.setenv("LOCAL_RANK", "no number")
    with contextlib.nullcontext() if there else pytest.raises(UsageError, match="torch sees 2 CUDA devices"):
        launch(tmp_path, device=name).check_tasks()


@pytest.mark.parametrize(
    ("lines", "more"),
    [
        ([], False),
        (["shardline: job.py, line 1: no"], False),
        (["12:00:00 worker/0 ERROR job.py, line 1: no", "shardline: job.py, line 1: no"], False),
        (["12:00:00 worker/0 joined", "shardline: job.py, line 1: no"], True),
        (["shardline: something else"], True),
    ],
)
def test_logs_are_named_where_they_have_more_than_what_is_said(lines: list[str], more: bool) -> None:
    assert says_more(lines, "worker/0: job.py, line 1: no; no task is left to train") is more


# Launcher: processes


@pytest.mark.processes
def test_cluster_runs_until_the_chief_ends_and_leaves_nothing(tmp_path: Path, fake_roles: Path) -> None:
    with LocalCluster(launch(tmp_path, ps=2, evaluators=1)) as cluster:
        pids = [cluster.pid(task) for task in cluster.tasks()]
        spec = json.loads((tmp_path / "out" / "cluster.json").read_text())
        assert spec["chief"] == [cluster.chief_address] and spec["ps"] == ["127.0.0.1:0"] * 2
        tell_chief(cluster, "exit 4")
        assert cluster.wait(timeout_s=10) == 4
        assert cluster.wait_all(timeout_s=10) == ()
    assert all(is_gone(pid) for pid in pids)


@pytest.mark.processes
@pytest.mark.parametrize(("chosen", "of"), [("first", {"worker/0"}), ("all", {"ps/0", "worker/0", "worker/1"})])
def test_prints_of_the_chosen_tasks_are_handed_on_and_all_are_in_the_logs(
    chosen: str, of: set[str], tmp_path: Path, fake_roles: Path
) -> None:
    found: list[tuple[str, str]] = []
    starting = LocalCluster(launch(tmp_path, prints=chosen))
    starting.printed = lambda *line: found.append(line)
    with starting as cluster:
        tell_chief(cluster, "exit 0")
        assert cluster.wait_all(timeout_s=10) == ()
        # Before their ends are known.
        assert sorted(found) == [(task, f"{task} args ") for task in sorted(of)]
        for task in ("ps/0", "worker/0", "worker/1"):
            assert cluster.log_tail(task)[:1] == [f"{task} args "]


def test_printed_lines_are_whole_and_as_a_terminal_leaves_them(tmp_path: Path) -> None:
    found: list[str] = []
    written = [b"one\ntw", b"o\n\n", b"10 %\r20 %\r\nb\xff\n" + b"x" * (2 * prints.LINE_BYTES), b"\nlast"]
    with (tmp_path / "log").open("ab") as log, prints.Printed(log.fileno(), found.append) as printed:
        for part in written:
            os.write(printed.fd, part)
    printed.join(10.0)
    assert found[:5] == ["one", "two", "", "20 %", "b\ufffd"] and found[-1] == "last"
    assert "".join(found[5:-1]) == "x" * (2 * prints.LINE_BYTES)
    assert (tmp_path / "log").read_bytes() == b"".join(written)


def test_prints_are_written_until_nobody_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    read, write = os.pipe()
    with open(write, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        prints.show(PlainConsole(), "one")
        assert os.read(read, 10) == b"one\n"
        os.close(read)
        for text in ("two", "three"):
            prints.show(PlainConsole(), text)
        assert sys.stdout is not stream
        with contextlib.suppress(OSError):
            stream.close()


@pytest.mark.processes
def test_killed_worker_is_restarted_and_said_so(tmp_path: Path, fake_roles: Path) -> None:
    with LocalCluster(launch(tmp_path, workers=1)) as cluster:
        before = cluster.pid("worker/0")
        cluster.kill("worker/0")
        event = next_end(cluster)
        assert event.restarted and event.code == -signal.SIGKILL
        assert event.reason == f"worker/0 was killed by SIGKILL: restart 1 of {MAX_RESTARTS}"
        assert cluster.pid("worker/0") != before and "worker/0" in cluster.running()
        cluster.kill("worker/0", restart=False)
        assert not next_end(cluster).restarted
        assert "worker/0" not in cluster.running()
        cluster.restart("worker/0")
        assert "worker/0" in cluster.running()


@pytest.mark.processes
def test_worker_that_fails_the_same_way_is_not_restarted(tmp_path: Path, fake_roles: Path) -> None:
    with LocalCluster(launch(tmp_path, workers=1, job=job_file(tmp_path, **{"worker/0": 2}))) as cluster:
        event = next_end(cluster)
        assert (event.task, event.code, event.restarted) == ("worker/0", 2, False)
        assert cluster.last_words("worker/0") == "worker/0 has had enough"
        assert "chief/0" in cluster.running()


def test_last_words_are_the_commands_sentence_or_the_last_error_logged(tmp_path: Path) -> None:
    cluster = LocalCluster(launch(tmp_path))
    log = cluster.log_path("ps/0")
    assert cluster.last_words("ps/0") == ""
    log.parent.mkdir(parents=True)
    log.write_text("02:07:48 ps/0 step 7 ERROR the disk is full\n02:07:49 ps/0 closed\n")
    assert cluster.last_words("ps/0") == "the disk is full"
    with log.open("a") as file:
        file.write("shardline: gave up\n")
    assert cluster.last_words("ps/0") == "gave up"
    cluster.stop()


@pytest.mark.processes
def test_chief_that_fails_at_start_ends_the_launch_with_its_sentence(tmp_path: Path, fake_roles: Path) -> None:
    cluster = LocalCluster(launch(tmp_path, job=job_file(tmp_path, chief="the disk is full")))
    with pytest.raises(LaunchError, match="the disk is full") as caught, cluster:
        pass
    assert caught.value.code == 6
    assert cluster.running() == ()


@pytest.mark.parametrize("task", ["chief-0", "ps-0"])
def test_a_log_that_can_not_be_written_is_named_when_the_job_starts(
    tmp_path: Path, fake_roles: Path, task: str
) -> None:
    options = launch(tmp_path, resume=True)
    (options.out / "logs").mkdir(parents=True)
    log = options.out / "logs" / f"{task}.log"
    os.mkfifo(log)
    cluster = LocalCluster(options)
    with pytest.raises(UsageError, match=f"{log}: it is a FIFO, not a regular file; choose a folder"), cluster:
        pass
    assert cluster.running() == ()


@pytest.mark.processes
def test_a_chief_that_takes_long_to_start_is_waited_for_as_long_as_joining_may_take_and_that_is_said(
    tmp_path: Path, fake_roles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardline.cli.launcher.EVERY_S", 0.5)
    options = launch(tmp_path, job=job_file(tmp_path, busy=True), timeouts=Timeouts(total_s=2.0, join_s=2.0))
    cluster = LocalCluster(options)
    said: list[str] = []
    cluster.say = said.append
    with (
        pytest.raises(TaskLostError, match=r"chief/0 did not report its address within 2 s; see .*chief-0\.log"),
        cluster,
    ):
        pass
    # On a busy machine its imports are waited for too, and that is said first.
    (sentence,) = [text for text in said if "chief/0" in text]
    assert re.fullmatch(r"waiting for chief/0 to start, [01] s left", sentence)


@pytest.mark.processes
def test_the_chiefs_port_is_its_own_while_it_is_being_started_again(tmp_path: Path, fake_roles: Path) -> None:
    with LocalCluster(launch(tmp_path, workers=1, restart=False)) as cluster:
        address = cluster.chief_address
        host, port = address.split(":")
        cluster.kill("chief/0", restart=False)
        # As a connection that this machine opens would.
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind((host, int(port)))
        cluster.restart("chief/0")
        wait_for_answer(address)


def wait_for_answer(address: str) -> None:
    host, port = address.split(":")
    deadline_s = time.monotonic() + 20.0
    while True:
        try:
            socket.create_connection((host, int(port)), timeout=5.0).close()
            return
        except ConnectionRefusedError:
            assert time.monotonic() < deadline_s, f"nobody listens at {address}"
            threading.Event().wait(0.05)


@pytest.mark.processes
def test_interrupt_ends_the_chief_and_with_it_the_others(tmp_path: Path, fake_roles: Path) -> None:
    with LocalCluster(launch(tmp_path)) as cluster:
        cluster.interrupt()
        assert cluster.wait(timeout_s=10) == 0
        assert cluster.wait_all(timeout_s=10) == ()


@pytest.mark.processes
def test_waits_have_deadlines(tmp_path: Path, fake_roles: Path) -> None:
    with LocalCluster(launch(tmp_path, workers=1)) as cluster:
        with pytest.raises(ShardlineError, match="chief/0 did not end within 0 s"):
            cluster.wait(timeout_s=0.01)
        assert "worker/0" in cluster.wait_all(timeout_s=0.01)


@pytest.mark.processes
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signal_ends_the_job_by_way_of_the_chief(
    tmp_path: Path, fake_roles: Path, number: signal.Signals, code: int
) -> None:
    with started_train(tmp_path, "--", "--text", "a b") as process:
        pids = wait_for_start(process, tmp_path)
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
    assert process.returncode == code, err
    assert "ending with a checkpoint" in err
    assert (tmp_path / "run" / "logs" / "worker-0.log").read_text() == "worker/0 args --text 'a b'\n"
    assert all(is_gone(pid) for pid in pids.values())


@pytest.mark.processes
def test_train_ends_at_once_with_the_words_of_workers_that_can_not_start(
    tmp_path: Path, fake_roles: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # This chief answers no question.
    monkeypatch.setattr("shardline.cli.train.POLL_TIMEOUT_S", 2.0)
    job_file(tmp_path, **{"worker/0": 2, "worker/1": 2})
    assert main(["train", str(tmp_path / "job.py"), "--out", str(tmp_path / "run"), "--workers", "2"]) == 2
    assert "has had enough; no task is left to train" in capsys.readouterr().err.splitlines()[-2]
    assert children(tmp_path) == {}


@pytest.mark.processes
def test_a_failure_is_shown_first_and_who_never_joined_is_not_waited_for(
    tmp_path: Path, fake_roles: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    job = job_file(tmp_path, stays="evaluator/0")
    options = launch(tmp_path, job=job, workers=1, evaluators=1, timeouts=Timeouts(total_s=600.0))
    shown: list[str] = []
    with LocalCluster(options) as cluster:
        kill = cluster.kill

        def killed(task: str, *, restart: bool = True) -> None:
            shown.append(capsys.readouterr().err)
            assert task == "evaluator/0"
            kill(task, restart=restart)

        monkeypatch.setattr(cluster, "kill", killed)
        # It asks nobody: this chief speaks another protocol.
        monkeypatch.setattr("shardline.cli.train.POLL_S", 600.0)
        cluster.events.put(Polled(status("running", step=3, joined=("chief/0", "ps/0", "worker/0"))))
        tell_chief(cluster, "exit 4")
        began_s = time.monotonic()
        assert LaunchedRun(cluster, PlainConsole(stderr=True)).to_the_end(None) == 4
        assert time.monotonic() - began_s < options.timeouts.dead_s / 4
    assert len(shown) == 1 and "shardline: the chief ended with exit code 4" in shown[0]
    assert "still running after the chief ended" not in capsys.readouterr().err


@pytest.mark.processes
def test_as_long_as_one_worker_is_there_somebody_trains(tmp_path: Path, fake_roles: Path) -> None:
    with LocalCluster(launch(tmp_path, job=job_file(tmp_path, **{"worker/0": 2}))) as cluster:
        assert next_end(cluster).task == "worker/0"
        assert cluster.lacking(begun=True) == ""
        cluster.kill("worker/1", restart=False)
        assert cluster.lacking(begun=True) == "no task is left to train"
    staying = job_file(tmp_path, stays="worker/0")
    with LocalCluster(launch(tmp_path, job=staying, out=tmp_path / "second", workers=1)) as cluster:
        cluster.kill("worker/0")
        # The others do nothing and may be done already.
        ends = iter(lambda: next_end(cluster), None)
        assert next(end for end in ends if end.task == "worker/0").restarted
        assert cluster.lacking(begun=True) == ""


def test_signal_at_the_birth_of_a_process_leaves_none_behind(
    tmp_path: Path, fake_roles: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    born: list[int] = []
    plain = subprocess.Popen

    def popen(*arguments: Any, **settings: Any) -> subprocess.Popen[bytes]:
        process = plain(*arguments, **settings)
        born.append(process.pid)
        # Handled before the caller has the process in its hands.
        os.kill(os.getpid(), signal.SIGTERM)
        return process

    monkeypatch.setattr(subprocess, "Popen", popen)
    assert run(launch(tmp_path)) == 143
    assert len(born) == 1
    assert all(is_gone(pid) for pid in born)


@pytest.mark.processes
def test_tasks_end_when_the_launcher_is_killed(tmp_path: Path, fake_roles: Path) -> None:
    with started_train(tmp_path) as process:
        pids = wait_for_start(process, tmp_path)
        process.kill()
        process.communicate(timeout=5)
        wait_gone(pids, 5.0)


ABANDONS = """
import os, sys
from pathlib import Path
from tests.support.fake_roles import started_train, wait_for_start
with started_train(Path(sys.argv[1])) as process:
    print(*wait_for_start(process, Path(sys.argv[1])).values(), process.pid)
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.processes
def test_no_train_of_a_test_outlives_a_test_run_that_is_ended(tmp_path: Path, fake_roles: Path) -> None:
    command = [sys.executable, "-c", ABANDONS, str(tmp_path)]
    ended = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=60, check=True
    )
    wait_gone({pid: int(pid) for pid in ended.stdout.split()}, 5.0)


@pytest.mark.processes
def test_train_that_is_done_copies_the_summary_and_says_where_things_are(tmp_path: Path, fake_roles: Path) -> None:
    with started_train(tmp_path, "--summary", str(tmp_path / "new" / "summary.json")) as process:
        wait_for_start(process, tmp_path)
        cluster = LocalCluster(launch(tmp_path))
        cluster.chief_address = json.loads((tmp_path / "run" / "cluster.json").read_text())["chief"][0]
        tell_chief(cluster, "exit 0")
        out, err = process.communicate(timeout=20)
    assert process.returncode == 0, err
    assert json.loads((tmp_path / "new" / "summary.json").read_text())["steps"] == 3
    assert "3 steps in 1.5 s (2.0 steps/s)" in out
    assert f"logs:        {tmp_path / 'run' / 'logs'}" in out


def test_lifeline_ends_a_process_that_ignores_the_polite_signal() -> None:
    read, write = os.pipe()
    code = (
        "import signal, sys, threading; from shardline.host import lifeline; "
        "signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        "lifeline.watch(int(sys.argv[1]), grace_s=0.05); threading.Event().wait(20)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(read)], pass_fds=[read], stderr=subprocess.DEVNULL)
    os.close(read)
    assert process.poll() is None
    os.close(write)
    assert process.wait(timeout=10) == lifeline.EXIT_CODE


def test_out_that_can_not_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    cluster = LocalCluster(launch(tmp_path, out=tmp_path / "file" / "out"))
    with pytest.raises(UsageError, match=r"--out .* can't be written: .*/file is a file; choose a folder"), cluster:
        pass
