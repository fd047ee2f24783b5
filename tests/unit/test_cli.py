from __future__ import annotations

import dataclasses
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import click
import pytest
from click.testing import CliRunner

from shardline import errors, methods, plugins, roles as roles_table
from shardline.cli import main as command_line, options, progress, roles
from shardline.cli.launcher import LaunchOptions
from shardline.cli.main import main
from shardline.cli.terminal import PlainConsole
from shardline.cli.train import check_summary, launch_options, new_folder, report, train
from shardline.config import RoleConfig, environment_security, environment_switch
from shardline.core.status import Awaited, ChiefStatus, ShardStatus, Standstill, TaskStatus
from shardline.core.timeouts import Timeouts
from shardline.errors import ClusterSpecError, JobError, UsageError
from shardline.lanes import check_choice
from shardline.observability import log
from shardline.rpc.messages.status import chief_status_from_proto, chief_status_to_proto
from shardline.security import Security
from tests.support.fake_roles import launch

SPEC = {"chief": ["127.0.0.1:2220"], "ps": ["127.0.0.1:0"], "worker": ["127.0.0.1:0", "127.0.0.1:0"]}


def job_file(folder: Path) -> Path:
    path = folder / "job.py"
    path.write_text("job = None")
    return path


# Commands and flags


def parse(role: str, *arguments: str, **environment: str) -> RoleConfig:
    """The settings that a role's command line makes."""
    found: list[RoleConfig] = []

    def keep(role: str, flags: dict[str, Any]) -> int:
        found.append(options.role_config(role, flags, environ=environment))
        return 0

    roles.role_command(role, keep).main(list(arguments), standalone_mode=False)
    return found[0]


@pytest.fixture
def cluster_file(tmp_path: Path) -> str:
    path = tmp_path / "cluster.json"
    path.write_text(json.dumps(SPEC))
    return str(path)


def test_flags_become_the_roles_settings(cluster_file: str, tmp_path: Path) -> None:
    job = job_file(tmp_path)
    config = parse(
        *("worker", "--cluster", cluster_file, "--task", "worker/1", "--job", str(job), "--device", "cuda:1"),
        *("--steps", "9", "--consistency", "async", "--set", "batch_size=8", "--timeout", "30", "--life-fd", "5"),
    )
    assert (config.task, config.job, config.device, config.life_fd) == ("worker/1", job, "cuda:1", 5)
    assert config.overrides == (("steps", "9"), ("consistency", "async"), ("batch_size", "8"))
    assert config.timeouts == Timeouts(total_s=30.0)


def test_flag_wins_over_environment_and_environment_over_tf_config(
    cluster_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tf_config = json.dumps({"cluster": SPEC | {"chief": ["tf:1"]}, "task": {"type": "worker", "index": 0}})
    assert parse("worker", TF_CONFIG=tf_config).cluster.chief == "tf:1"
    monkeypatch.setenv("SHARDLINE_CLUSTER", cluster_file)
    monkeypatch.setenv("SHARDLINE_TASK", "worker/1")
    monkeypatch.setenv("SHARDLINE_SEED", "4")
    config = parse("worker", TF_CONFIG=tf_config)
    assert (config.cluster.chief, config.task) == ("127.0.0.1:2220", "worker/1")
    assert config.overrides == (("seed", "4"),)
    assert parse("worker", "--task", "worker/0", "--seed", "5").overrides == (("seed", "5"),)
    monkeypatch.setenv("SHARDLINE_SEED", "")
    assert parse("worker").overrides == ()


def test_lane_overlap_and_security_are_plain_unless_flag_or_environment_says_more(
    cluster_file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = ("--cluster", cluster_file, "--task", "worker/0")
    config = parse("worker", *place)
    assert (config.lane, config.overlap, config.run_dir, config.security) == ("auto", True, None, Security())
    token = tmp_path / "token"
    token.write_text("a-token-of-enough-characters")
    flags = ("--lane", "shm", "--no-overlap", "--run-dir", str(tmp_path), "--token-file", str(token))
    config = parse("worker", *place, *flags)
    assert (config.lane, config.overlap, config.run_dir) == ("shm", False, tmp_path)
    assert config.security.check("a-token-of-enough-characters") and not config.security.check(None)
    monkeypatch.setenv("SHARDLINE_LANE", "tcp")
    monkeypatch.setenv("SHARDLINE_OVERLAP", "false")
    monkeypatch.setenv("SHARDLINE_TOKEN_FILE", str(token))
    config = parse("worker", *place)
    assert (config.lane, config.overlap, config.security) == ("tcp", False, Security(token_file=token))
    config = parse("worker", *place, "--lane", "grpc", "--overlap")
    assert (config.lane, config.overlap) == ("grpc", True)


@pytest.mark.parametrize("steps", ["5", "30:20", "20:20", "a:b", "-1:4", ":"])
def test_a_profile_of_no_steps_is_refused(cluster_file: str, steps: str) -> None:
    with pytest.raises(UsageError, match=rf"--profile is '{steps}'; give the first step .* such as 20:30"):
        parse("worker", "--cluster", cluster_file, "--task", "worker/0", "--profile", steps)


def test_script_takes_the_same_settings_from_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment_security() == Security()
    assert environment_switch("overlap", default=True)
    token = tmp_path / "token"
    token.write_text("a-token-of-enough-characters")
    monkeypatch.setenv("SHARDLINE_TOKEN_FILE", str(token))
    assert environment_security() == Security(token_file=token)
    for text, value in {"0": False, "off": False, "TRUE": True, "1": True, "": True}.items():
        monkeypatch.setenv("SHARDLINE_OVERLAP", text)
        assert environment_switch("overlap", default=True) is value
    monkeypatch.setenv("SHARDLINE_OVERLAP", "perhaps")
    with pytest.raises(UsageError, match="SHARDLINE_OVERLAP is 'perhaps'; use true or false"):
        environment_switch("overlap", default=True)
    with pytest.raises(UsageError, match="--lane is 'rdma'; it must be one of auto, grpc, tcp, shm"):
        check_choice("rdma")


def test_chief_without_a_port_is_refused_unless_a_launcher_waits_for_it(tmp_path: Path) -> None:
    spec = json.dumps(SPEC | {"chief": ["127.0.0.1:0"]})
    for role, task in (("chief", "chief/0"), ("worker", "worker/0")):
        with pytest.raises(ClusterSpecError, match="needs a fixed port"):
            parse(role, "--cluster", spec, "--task", task)
    assert parse("chief", "--cluster", spec, "--ready-fd", "9").ready_fd == 9


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["worker", "--device", "tpu"], "'tpu' is not a device"),
        (["worker", "--gpu-memory-fraction", "1.5"], "1.5 is not a fraction"),
        (["worker", "--set", "batch_size"], "is not of the form FIELD=VALUE"),
        (["worker", "--steps", "0"], "0 is not in the range"),
        (["worker", "--steps", "5", "--set", "steps=6"], "'steps' is set 2 times"),
        (["worker", "--timeout", "1.9"], "--timeout is 1.9; it must be between 2 and 86400"),
        (["worker", "--task", "ps/0"], "task ps/0 does not have the role worker; start it with: shardline ps"),
        (["worker", "--task", "worker/7"], "worker/7 is not in the cluster spec; it has chief/0, ps/0, worker/0"),
        (["worker", "--job", "missing.py"], "job file missing.py does not exist"),
        (["worker", "--cluster", "missing.json"], "cluster file missing.json does not exist"),
        (["worker", "extra"], "unexpected extra argument"),
        (["train", "missing.py"], "job file missing.py does not exist"),
        (["train"], "Missing argument"),
        (["worker", "--plugin", "."], "plugin . is not a file; give a .py file that adds methods"),
        (["worker", "--plugin", "x" * 300], f"a path is longer than this system allows: {'x' * 300}; choose a shorter"),
        (["train", __file__, "--resume", "--out", "x" * 300], "a path is longer than this system allows: xxx"),
        (["train", __file__, "--summary", "x" * 300], "a path is longer than this system allows: /"),
        (["page", "x" * 300], "a path is longer than this system allows: /"),
        (["frob"], "no command 'frob'"),
        (["status", "--cluster", "missing.json"], "cluster file missing.json does not exist"),
        (["worker", "--lane", "rdma"], "--lane is 'rdma'; it must be one of auto, grpc, tcp, shm"),
        (["worker", "--run-dir", "missing"], "Directory 'missing' does not exist"),
        (["worker", "--tls-cert", "own.pem"], "--tls-cert is set without --tls-key"),
        (["worker", "--tls-ca", "missing.pem"], "--tls-ca missing.pem can't be read: No such file or directory"),
        (["worker", "--token-file", "missing"], "--token-file missing can't be read: No such file or directory"),
        (["status", "--token-file", "missing"], "--token-file missing can't be read"),
        (["stop", "--tls-ca", "missing.pem"], "--tls-ca missing.pem can't be read"),
    ],
)
def test_bad_command_line_ends_with_one_sentence_and_code_two(
    arguments: list[str],
    says: str,
    cluster_file: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SHARDLINE_CLUSTER", cluster_file)
    if "--task" not in arguments:
        monkeypatch.setenv("SHARDLINE_TASK", "worker/0")
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("shardline: ") and err.count("\n") == 1
    assert says in err


def test_help_names_every_exit_code_of_the_errors() -> None:
    text = CliRunner().invoke(command_line.cli, ["--help"]).output
    for cls in (errors.UsageError, errors.TaskLostError, errors.CheckpointError, errors.FencedError):
        assert f"{cls.exit_code}  {(cls.__doc__ or '').splitlines()[0]}" in text
    assert "130" in text and "143" in text


def in_a_process(*arguments: str) -> str:
    """What a fresh interpreter without plugins prints."""
    done = subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        env={**os.environ, plugins.VARIABLE: "", "COLUMNS": "200"},
    )
    return done.stdout


def test_help_shows_the_methods_that_are_in_the_tables() -> None:
    made = json.loads(in_a_process("-m", "shardline.methods"))
    assert made == methods.written()
    assert list(made) == list(methods.SEAMS) and all(made.values())
    # Lines may break within a name, after a hyphen.
    text = "".join(in_a_process("-m", "shardline", "train", "--help").split())
    for rows in made.values():
        assert ",".join(usage.partition(":")[0] for usage, _ in rows) in text


def test_methods_lists_every_table_and_what_a_plugin_adds() -> None:
    toy = Path(__file__).parents[1] / "conformance" / "toys" / "toy_codec.py"
    program = f"main(['methods']); print('---'); main(['methods', 'codec', '--plugin', {str(toy)!r}])"
    both = in_a_process("-c", f"from shardline.cli.main import main; {program}")
    listed, _, codecs = both.partition("---\n")
    for seam, rows in methods.written().items():
        assert f"--{seam}: {methods.SEAMS[seam][2]}" in listed
        for usage, line in rows:
            assert re.search(rf"^  {re.escape(usage)} +{re.escape(line)}$", listed, re.MULTILINE)
    line = "The largest entries of each tensor, with error memory."
    assert re.search(rf"^  top:ratio=0.01 +{re.escape(line)}$", codecs, re.MULTILINE)
    assert "--rule" not in codecs and "top:" not in listed


OWN_FLAGS = {
    "--job": ("worker", "chief", "evaluator"),
    "--steps": ("worker", "chief", "evaluator"),
    "--set": ("worker", "chief", "evaluator"),
    "--device": ("ps", "worker", "chief", "evaluator"),
    "--lane": ("ps", "worker", "chief"),
    "--run-dir": ("ps", "worker", "chief"),
    "--overlap": ("worker", "chief"),
    "--exit-with-job": ("ps", "worker", "evaluator"),
    "--admin-token-file": ("ps", "chief"),
    "--resume": ("chief",),
    "--replay": ("chief",),
    "--chief-trains": ("chief",),
    "--min-workers": ("chief",),
    "--max-workers": ("chief",),
    "--standbys": ("chief",),
    "--inexact": ("chief",),
    "--page": ("chief",),
    "--no-page": ("chief",),
    "--cluster": ("ps", "worker", "chief", "evaluator"),
    "--token-file": ("ps", "worker", "chief", "evaluator"),
}


@pytest.mark.parametrize("role", ["ps", "worker", "chief", "evaluator"])
def test_help_of_a_role_shows_the_flags_that_it_reads_and_no_others(role: str) -> None:
    text = CliRunner().invoke(command_line.cli, [role, "--help"], terminal_width=200).output
    shown = {flag for flag in OWN_FLAGS if re.search(rf"(?<![\w-]){flag}(?![\w-])", text)}
    assert shown == {flag for flag, roles in OWN_FLAGS.items() if role in roles}


def test_a_flag_of_another_role_is_accepted_and_said_not_to_be_read(
    cluster_file: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found: list[RoleConfig] = []

    monkeypatch.setattr(roles_table.Role, "runner", lambda row: lambda config: found.append(config) or 0)
    monkeypatch.setattr(log, "setup", lambda *_, **__: None)
    monkeypatch.setenv("SHARDLINE_STANDBYS", "1")
    place = ["--cluster", cluster_file, "--task", "ps/0"]
    assert main(["ps", *place, "--lane", "grpc"]) == 0
    assert caplog.messages == []
    assert main(["ps", *place, "--steps", "9", "--resume"]) == 0
    assert caplog.messages == [
        "ps/0 does not use --resume; it is for chief",
        "ps/0 does not use --steps; it is for chief, worker, evaluator",
    ]
    # Nor a variable, which all tasks of a machine may have.
    assert [one.standbys for one in found] == [0, 0]


def test_help_needs_neither_torch_nor_grpc() -> None:
    code = (
        "import sys; from shardline.cli.main import main; assert main(['train', '--help']) == 0;"
        "from shardline.roles import ROLES; assert tuple(ROLES)[0] == 'chief';"
        "heavy = {'torch', 'grpc', 'rich', 'numpy'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=30, stdout=subprocess.DEVNULL)


FEW = "import resource as r; r.setrlimit(r.RLIMIT_NOFILE, (24, 24)); main(['status'])"
LEFT = """
import sys, threading
from shardline.host import lifeline
lifeline.LEFT_S, sys.argv = 0.0, ["shardline", "--version"]
threading.Thread(target=threading.Event().wait, name="mine").start()
sys.exit(main())
"""
GONE = "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone'); main(['status'])"


@pytest.mark.parametrize(
    ("flags", "commands", "says"),
    [
        (["-OO"], "main(['--help'])", "130  Interrupted"),
        ([], GONE, "the working directory of this process was deleted"),
        ([], FEW, "this process may have 24 files open, but at least 64 are needed; raise the limit"),
        ([], LEFT, "ended without waiting for threads that are not ours: mine"),
    ],
    ids=["without docstrings", "no folder", "few files", "thread"],
)
def test_odd_surroundings_work_or_get_a_sentence(tmp_path: Path, flags: list[str], commands: str, says: str) -> None:
    program = [sys.executable, *flags, "-c", f"import os; from shardline.cli.main import main; {commands}"]
    done = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert says in done.stdout + done.stderr and "Traceback" not in done.stderr, done


def test_runs_that_begin_in_one_second_get_a_folder_each(tmp_path: Path) -> None:
    wanted = tmp_path / "runs" / "job-20261127-100000"
    names = [new_folder(wanted).name for _ in range(3)]
    assert names == [wanted.name, f"{wanted.name}-2", f"{wanted.name}-3"]
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="can't be written"):
        new_folder(tmp_path / "file" / "job")


def test_a_folder_for_results_must_be_utf8(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"caf\? is not UTF-8"):
        launch(tmp_path, out=tmp_path / os.fsdecode(b"caf\xe9"))


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (errors.NonFiniteError("loss is nan at step 7"), 5, "shardline: loss is nan at step 7\n"),
        (click.Abort(), 130, ""),
        (KeyboardInterrupt(), 130, ""),
        (ZeroDivisionError("oops"), 1, "ZeroDivisionError: oops\n"),
    ],
)
def test_error_ends_the_command_with_its_code(
    error: BaseException, code: int, says: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    # As code of the library: that of a person would be no defect.
    ours = FunctionType(fail.__code__, {"__name__": "shardline.cli"}, closure=fail.__closure__)
    monkeypatch.setattr(command_line.cli, "main", ours)
    assert main(["status"]) == code
    err = capsys.readouterr().err
    assert err.endswith(says)
    assert ("Traceback" in err) is (code == 1)


def test_earlier_run_is_not_overwritten_and_resume_needs_one(tmp_path: Path) -> None:
    def flags(**change: Any) -> dict[str, Any]:
        defaults = train.make_context("train", [str(job_file(tmp_path))]).params
        return {**defaults, **change}

    used = tmp_path / "used"
    (used / "chief").mkdir(parents=True)
    with pytest.raises(UsageError, match="contains an earlier run"):
        launch_options(flags(out=used))
    assert launch_options(flags(out=used, resume=True)).resume
    with pytest.raises(UsageError, match="contains no earlier run"):
        launch_options(flags(out=tmp_path / "new", resume=True))
    with pytest.raises(UsageError, match="--resume needs --out"):
        launch_options(flags(resume=True))
    assert launch_options(flags()).out.parent == Path.cwd() / "runs"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--workers", "2"], "--mirrored 3 starts 3 workers that hold .* leave --workers out"),
        (["--chief-trains"], "leave --chief-trains out"),
        (["--ps-device", "cuda"], "leave --ps-device out"),
        (["--token-file", "token", "--admin-token-file", "token"], "leave --admin-token-file out"),
    ],
)
def test_mirrored_stands_for_workers_that_hold_the_parameters_and_refuses_others(
    tmp_path: Path, more: list[str], says: str
) -> None:
    def options(*flags: str) -> LaunchOptions:
        return launch_options(train.make_context("train", [str(job_file(tmp_path)), "--mirrored", "3", *flags]).params)

    found = options()
    assert found.processes == ("chief/0", "worker/0", "worker/1", "worker/2")
    assert (found.spec().num("ps"), found.spec().num("worker"), found.min_workers) == (3, 3, 3)
    assert found.settings()["with_ps"] is True
    assert (found.bucket_mb, options("--bucket-mb", "2").bucket_mb) == (16, 2)
    beside = options("--ps", "2", "--ps-device", "cuda")
    assert beside.processes == ("chief/0", "ps/3", "ps/4", "worker/0", "worker/1", "worker/2")
    assert (beside.spec().num("ps"), beside.ps_device, beside.min_workers) == (5, "cuda", 3)
    with pytest.raises(UsageError, match=says):
        options(*more)


def test_missing_role_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roles_table, "ENTRY_POINTS", "shardline.nothing")
    with pytest.raises(UsageError, match="no installed package provides the role 'ps'"):
        roles_table.ROLES["ps"].runner()


def test_a_package_whose_command_can_not_be_loaded_costs_no_other_command(tmp_path: Path) -> None:
    package = tmp_path / "broken-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[shardline.commands]\nbroken = not_there:command\n")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "shardline", *arguments],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=30,
            check=False,
        )

    done = run("methods", "rule")
    assert (done.returncode, done.stderr) == (0, "") and "--rule: " in done.stdout
    helped = run("--help")
    assert helped.returncode == 0 and "  train " in helped.stdout
    assert helped.stderr == (
        "shardline: its command broken can't be loaded from not_there:command (No module named 'not_there'); "
        "repair the package broken, or remove it\n"
    )


def test_job_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(JobError, match="does not exist"):
        options.existing_job(tmp_path / "nothing.py")
    with pytest.raises(JobError, match="does not exist"):
        options.existing_job(job_file(tmp_path) / "in_a_file.py")
    with pytest.raises(JobError, match="is not a file name"):
        options.existing_job(Path("a\0b.py"))


def test_folder_in_the_place_of_a_job_file_names_the_files_in_it(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"is a folder, not a job file; it contains no \.py file"):
        options.existing_job(tmp_path)
    (tmp_path / "__init__.py").touch()
    for name in ("one", "two"):
        (tmp_path / f"{name}.py").touch()
    with pytest.raises(JobError, match=r"give a file in it: \S+/one\.py or \S+/two\.py$"):
        options.existing_job(tmp_path)
    for name in ("three", "four", "five"):
        (tmp_path / f"{name}.py").touch()
    with pytest.raises(JobError, match=r"give one of its 5 \.py files, such as \S+/five\.py"):
        options.existing_job(tmp_path)


# What is shown


RUNNING = ChiefStatus(
    job="digits",
    phase="running",
    step=120,
    steps=400,
    loss=0.31,
    steps_per_s=50.0,
    bytes_per_s=3.4e6,
    last_metrics={"accuracy": 0.97, "loss": 0.2},
    last_metrics_step=100,
    checkpoint_step=100,
    checkpoint_path="/out/step-00000100",
    tasks=(
        TaskStatus(task="chief/0", state="alive", incarnation=(1 << 32) | 1, address="127.0.0.1:1"),
        TaskStatus(task="ps/0", state="alive", shards=(ShardStatus(shard=0, version=119),), push_bytes_per_s=2e6),
        TaskStatus(task="worker/1", state="missing"),
    ),
)


def test_skipped_steps_are_said_while_the_job_runs_and_at_its_end(tmp_path: Path) -> None:
    shards = (ShardStatus(shard=0, skipped_steps=3), ShardStatus(shard=1, skipped_steps=2))
    status = dataclasses.replace(RUNNING, tasks=(TaskStatus(task="ps/0", state="alive", shards=shards),))
    assert "3.4 MB/s  3 skipped  " in progress.line(status)
    first, *_ = report(tmp_path, {"skipped_steps": 3}, None)
    assert first == "skipped:     3 steps with NaN or infinity, changing nothing"


def test_line_shows_what_is_known() -> None:
    evaluated = "evaluated at step 100: accuracy 0.97, loss 0.2"
    assert progress.line(RUNNING) == f"step 120/400  loss 0.3100  50.0 steps/s  3.4 MB/s  {evaluated}  ETA 6 s"
    assert progress.line(ChiefStatus(phase="waiting", tasks=RUNNING.tasks)) == "step 0  waiting for worker/1"
    assert progress.line(ChiefStatus(phase="stopping", step=7)) == "step 7  stopping"


def test_line_of_a_job_that_is_over_promises_no_time_and_long_times_are_no_seconds() -> None:
    assert "ETA" not in progress.line(dataclasses.replace(RUNNING, phase="ended"))
    for steps, expected in ((5_000, "98 s"), (10_000, "3 min"), (1_000_000, "5.6 h")):
        assert progress.line(dataclasses.replace(RUNNING, steps=steps)).endswith(f"  ETA {expected}")


STILL = dataclasses.replace(
    RUNNING,
    steps_per_s=0.0,
    bytes_per_s=0.0,
    standstill=Standstill(seconds=12.3, awaited=(Awaited(task="worker/1", why="last heard 12 s ago"),)),
)


def test_a_job_that_stands_still_has_no_rates_and_names_whom_it_waits_for() -> None:
    said = "standing still for 12 s, waiting for worker/1"
    shown = progress.line(STILL)
    assert shown.endswith(f"  {said}") and "steps/s" not in shown and "ETA" not in shown
    console = PlainConsole(file=io.StringIO(), width=160, force_terminal=True)
    with progress.BarDisplay(console) as display:
        display.update(STILL)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert said in shown and "ETA" not in shown


def test_lines_come_every_few_seconds_and_the_last_one_always() -> None:
    stream = io.StringIO()
    times = iter([0.0, 0.0, 0.5, 1.0, 3.5, 3.5, 4.0])
    with progress.LineDisplay(PlainConsole(file=stream, width=200), now_s=lambda: next(times)) as display:
        for step in (1, 2, 3, 4, 5):
            display.update(ChiefStatus(phase="running", step=step))
    assert stream.getvalue().splitlines() == ["step 1", "step 4", "step 5"]


def test_bar_shows_loss_and_rates() -> None:
    console = PlainConsole(file=io.StringIO(), width=160, force_terminal=True)
    with progress.BarDisplay(console) as display:
        display.update(RUNNING)
        display.say("worker/1 was killed")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    for part in ("step ", "120/400", "loss 0.3100", "50.0 steps/s", "3.4 MB/s", "ETA 6 s", "worker/1 was killed"):
        assert part in shown


def test_bar_keeps_its_figures_whole_in_80_columns_and_gives_each_evaluation_a_line() -> None:
    console = PlainConsole(file=io.StringIO(), width=80, force_terminal=True)
    with progress.BarDisplay(console) as display:
        display.update(RUNNING)
        display.update(dataclasses.replace(RUNNING, loss=12.3456, steps_per_s=1234.5, bytes_per_s=1.2345e9))
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert shown.count("evaluated at step 100: accuracy 0.97, loss 0.2") == 1
    for part in ("loss 12.3456  1234.5 steps/s  1234.5 MB/s", "120/400"):
        assert part in shown, shown


def test_report_names_only_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    scored = {"last": {"step": 8, "metrics": {"accuracy": 0.98, "loss": None}}}
    summary = {"steps": 9, "seconds": 2.0, "steps_per_second": 4.5, "evaluation": scored, "checkpoint": "/gone"}
    assert report(tmp_path, summary, None) == [
        "9 steps in 2.0 s (4.5 steps/s)",
        "evaluation at step 8: accuracy 0.9800, loss nan",
        f"logs:        {tmp_path / 'logs'}",
    ]
    assert report(tmp_path, None, RUNNING)[0] == "evaluation: accuracy 0.9700, loss 0.2000"
    counts = {"worker/0": {"used": 5, "dropped": 0}, "worker/1": {"used": 1, "dropped": 4}}
    assert report(tmp_path, {"contributions": counts}, None)[0] == "too late:    4 gradients of worker/1"


def test_run_whose_evaluator_scored_nothing_says_so_and_why(tmp_path: Path) -> None:
    why = "evaluate(model) raised ZeroDivisionError"
    assert report(tmp_path, {"unscored": why}, None) == [f"evaluation: no checkpoint was scored: {why}"]
    assert report(tmp_path, {"unscored": ""}, None) == report(tmp_path, {}, None) == []


def test_place_for_the_summary_that_can_not_be_written_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to(tmp_path / "file" / "nothing")
    for bad in (tmp_path, tmp_path / "file" / "summary.json", tmp_path / "fifo", tmp_path / "link"):
        with pytest.raises(UsageError, match=r"--summary .* can't be written: .*; choose a file in a folder"):
            check_summary(bad)
    check_summary(tmp_path / "new" / "summary.json")
    assert not (tmp_path / "new").exists()


def test_status_messages_survive_the_wire() -> None:
    assert chief_status_from_proto(chief_status_to_proto(RUNNING)) == RUNNING


@pytest.fixture(autouse=True)
def _own_job_args(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(options.JOB_ARGS, raising=False)
    yield
    os.environ.pop(options.JOB_ARGS, None)
