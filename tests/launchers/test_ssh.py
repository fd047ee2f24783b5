"""Plain machines by ssh: a program of this name that runs everything here, and a real sshd on loopback."""

from __future__ import annotations

import json
import os
import pwd
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from shardline.host.ports import held_port
from shardline_launchers.host_tasks import ENDED, STARTED
from shardline_launchers.places import Asked
from shardline_launchers.ssh import host_name, spread
from tests.e2e.support import expected_sha256, processes, slow_job, summary_of, wait_for_step, wait_until, write_job
from tests.launchers.support import RUN, SCRIPT, Started

FAKE = """#!/bin/sh
# What ssh does with a host: -G tells its name, else the last argument is a line for a shell there.
for last; do :; done
case "$1" in -G) echo "user root"; echo "hostname 127.0.0.1"; exit 0;; esac
case "$*" in *"-- closed "*) echo "ssh: connect to host closed port 22: Connection refused" >&2; exit 255;; esac
case "$*" in *"-- greets "*) printf "Welcome! ";; esac
exec sh -c "$last"
"""
HOST = "from shardline_launchers import host_tasks as h; h.COMMAND = ['sh', '-c']; h.serve()"
"""The process of a host whose tasks are lines for a shell."""
SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
processes_only = pytest.mark.processes


@pytest.fixture
def fake(tmp_path: Path) -> Mapping[str, str]:
    """An environment in which `ssh` runs everything on this machine."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(FAKE)
    (folder / "ssh").chmod(0o755)
    return {"PATH": f"{folder}:{os.environ['PATH']}"}


def free_port() -> str:
    with held_port() as held:
        return str(held.getsockname()[1])


def run(job: Path, out: Path, *flags: str) -> list[str | Path]:
    return [*RUN, job, "--out", out, "--port", free_port(), "--page", "off", *flags]


def test_tasks_go_to_the_hosts_in_turn_and_a_worker_to_each() -> None:
    spec, on = spread(["a", "me@b", "c"], Asked(ps=2, evaluators=1), 2222, lambda target: target.rpartition("@")[2])
    assert on == {
        "chief/0": "a", "ps/0": "a", "ps/1": "me@b", "worker/0": "a", "worker/1": "me@b", "worker/2": "c",
        "evaluator/0": "a",
    }  # fmt: skip
    assert (spec.chief, spec.addresses("worker")) == ("a:2222", ("a:0", "b:0", "c:0"))
    here, _ = spread(["x", "y"], Asked(), 7, lambda target: "localhost")
    assert (here.chief, here.addresses("worker")) == ("127.0.0.1:7", ("127.0.0.1:0", "127.0.0.1:0"))


@pytest.mark.skipif(shutil.which("ssh") is None, reason="there is no ssh")
def test_an_alias_of_the_users_own_files_is_the_host_behind_it() -> None:
    assert host_name("127.0.0.1") == "127.0.0.1"
    assert host_name("me@somewhere") == "somewhere"


@processes_only
@pytest.mark.timeout(300)
def test_a_job_on_two_hosts_and_every_line_with_its_task(fake: Mapping[str, str], tmp_path: Path) -> None:
    job, out = write_job(tmp_path / "job.py", replicas=2, steps=30), tmp_path / "run"
    ended = Started(run(job, out, "--hosts", "a,greets", "--timeout", "60"), tmp_path / "log", env=fake).end()
    assert ended.code == 0, ended.said
    assert summary_of(out)["sha256"] == expected_sha256(job)
    lines = [line for line in ended.said.splitlines() if line]
    assert {line.partition(" | ")[0] for line in lines} == {"chief/0", "ps/0", "worker/0", "worker/1"}, ended.said


@processes_only
@pytest.mark.timeout(300)
def test_one_interrupt_ends_the_job_with_a_checkpoint(fake: Mapping[str, str], tmp_path: Path) -> None:
    job, out = slow_job(tmp_path / "job.py", replicas=1, steps=100_000), tmp_path / "run"
    started = Started(run(job, out, "--hosts", "a", "--timeout", "60"), tmp_path / "log", env=fake)
    wait_for_step(out, 5)
    started.process.send_signal(signal.SIGINT)
    ended = started.end()
    assert ended.code == 130, ended.said
    assert "ending with a checkpoint" in ended.said
    assert summary_of(out)["checkpoint_step"] >= 5


@processes_only
@pytest.mark.timeout(300)
def test_a_second_interrupt_kills(fake: Mapping[str, str], tmp_path: Path) -> None:
    job, out = slow_job(tmp_path / "job.py", replicas=1, steps=100_000), tmp_path / "run"
    started = Started(run(job, out, "--hosts", "a", "--timeout", "60"), tmp_path / "log", env=fake)
    wait_for_step(out, 5)
    # Nobody hears the first: the chief is stopped.
    (chief,) = [
        pid
        for pid, line in processes(os.environ["E2E_RUN_ID"]).items()
        if "--task chief/0" in line and "ssh" not in line
    ]
    os.kill(chief, signal.SIGSTOP)
    started.process.send_signal(signal.SIGINT)
    wait_until(lambda: "ending with a checkpoint" in started.said(), "the first is taken", seen=started.said)
    started.process.send_signal(signal.SIGINT)
    wait_until(lambda: "ended immediately" in started.said(), "the second is taken", seen=started.said)
    os.kill(chief, signal.SIGCONT)
    assert started.end().code == 130


@processes_only
@pytest.mark.timeout(300)
def test_tasks_end_with_the_launcher_that_is_killed(fake: Mapping[str, str], tmp_path: Path) -> None:
    job, out = slow_job(tmp_path / "job.py", replicas=1, steps=100_000), tmp_path / "run"
    started = Started(run(job, out, "--hosts", "a", "--timeout", "60"), tmp_path / "log", env=fake)
    wait_for_step(out, 5)
    started.process.kill()
    started.end()
    mark = os.environ["E2E_RUN_ID"]
    wait_until(lambda: not processes(mark), "all tasks have ended", limit_s=60, seen=lambda: processes(mark))


@processes_only
@pytest.mark.timeout(300)
def test_a_killed_worker_is_started_again_and_a_script_is_a_worker(fake: Mapping[str, str], tmp_path: Path) -> None:
    text = SCRIPT.read_text()
    script, out = tmp_path / "train.py", tmp_path / "run"
    script.write_text(text.replace("STEPS = 500", "STEPS = 60"))
    command = run(script, out, "--script", "--hosts", "a,b", "--timeout", "30", "--set", "checkpoint_every=10")
    started = Started(command[:-2], tmp_path / "log", env={**fake, "SHARDLINE_CHECKPOINT_EVERY": "10"})
    wait_for_step(out, 10)
    found = processes(os.environ["E2E_RUN_ID"])
    assert not any("SHARDLINE_CHECKPOINT_EVERY" in line for line in found.values()), "variables may be secret"
    victims = [pid for pid, line in found.items() if line.strip().endswith(str(script))]
    os.kill(victims[0], signal.SIGKILL)
    ended = started.end()
    assert ended.code == 0, ended.said
    assert "was killed by SIGKILL: restart 1 of 3" in ended.said
    assert summary_of(out)["steps"] == 60


@processes_only
def test_a_host_that_refuses_is_named_before_training(fake: Mapping[str, str], tmp_path: Path) -> None:
    job, out = write_job(tmp_path / "job.py"), tmp_path / "run"
    ended = Started(run(job, out, "--hosts", "a,closed"), tmp_path / "log", env=fake).end()
    assert ended.code == 2, ended.said
    assert "ssh closed failed for worker/1: ssh: connect to host closed port 22: Connection refused" in ended.said
    assert not (out / "checkpoints").exists()


def host_says(orders: list[object], until: str) -> list[str]:
    """What a host says after these orders, up to the first line that begins so."""
    command = [sys.executable, "-P", "-c", HOST]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as host:
        assert host.stdin is not None and host.stdout is not None
        host.stdin.write("".join(f"{json.dumps(order)}\n" for order in [[{}, None], *orders]))
        host.stdin.flush()
        said: list[str] = []
        while not said or not said[-1].startswith(until):
            said.append(host.stdout.readline().rstrip("\n"))
            assert said[-1], said
        host.stdin.close()
        assert host.wait(30) == 0
    return said


@processes_only
def test_a_task_ends_though_its_child_keeps_its_output() -> None:
    said = host_says([["worker/0", ["sleep 1000 & echo here; exit 3"]]], ENDED)
    assert said == [STARTED, "worker/0 | here", f'{ENDED}["worker/0", 3]']


@processes_only
def test_a_task_that_is_asked_to_end_before_it_starts_never_does() -> None:
    start = ["chief/0", ["echo here"]]
    said = host_says([start, ["chief/0", None], start], ENDED)
    assert said == [STARTED, f'{ENDED}["chief/0", 143]']


def test_hosts_that_can_not_be_are_refused(tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py")
    for hosts, says in (("a,a", "each once"), ("-oProxyCommand=x", "each once"), (",", "each once")):
        ended = Started([*RUN, job, f"--hosts={hosts}"], tmp_path / "log").end()
        assert ended.code == 2 and says in ended.said, ended.said
    ended = Started([*RUN, job, "--hosts", "a", "--task", "worker/0"], tmp_path / "log").end()
    assert ended.code == 2 and "use only one" in ended.said, ended.said


# With a real sshd


@pytest.fixture
def sshd(tmp_path: Path) -> Iterator[Mapping[str, str]]:
    """A server of ssh on loopback with its own keys; an environment whose `ssh` knows it as host `there`."""
    if SSHD is None or os.geteuid() != 0:
        pytest.skip("no sshd that this user can start: apt-get install openssh-server")
    folder, port = tmp_path / "ssh", free_port()
    folder.mkdir(mode=0o700)
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True, timeout=30)
    shutil.copy(folder / "user.pub", folder / "authorized_keys")
    host_key = (folder / "host.pub").read_text().split()
    (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {host_key[0]} {host_key[1]}\n")
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nPidFile {folder}/pid\n"
        f"AuthorizedKeysFile {folder}/authorized_keys\nStrictModes no\nUsePAM no\nPasswordAuthentication no\n"
        "PermitRootLogin yes\n"
    )
    me = pwd.getpwuid(os.geteuid()).pw_name
    (folder / "config").write_text(
        f"Host there strange\n  HostName 127.0.0.1\n  Port {port}\n  User {me}\n  IdentityFile {folder}/user\n"
        f"  IdentitiesOnly yes\nHost there\n  UserKnownHostsFile {folder}/known_hosts\n"
        f"Host strange\n  UserKnownHostsFile {folder}/nobody\n"
    )
    # The user's own files are those of this test.
    wrapper = folder / "bin" / "ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    wrapper.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    with (folder / "log").open("wb") as output:
        daemon = subprocess.Popen([SSHD, "-D", "-e", "-f", folder / "sshd_config"], stdout=output, stderr=output)
    try:
        wait_until(lambda: "listening on" in (folder / "log").read_text(), "sshd listens", limit_s=30)
        yield {"PATH": f"{wrapper.parent}:{os.environ['PATH']}"}
    finally:
        daemon.terminate()
        daemon.wait(10)


@processes_only
@pytest.mark.timeout(300)
def test_a_real_server_of_ssh_runs_the_tasks(sshd: Mapping[str, str], tmp_path: Path) -> None:
    job, out = slow_job(tmp_path / "job.py", replicas=1, steps=40), tmp_path / "run"
    ended = Started(run(job, out, "--hosts", "there", "--timeout", "60"), tmp_path / "log", env=sshd).end()
    assert ended.code == 0, ended.said
    assert summary_of(out)["sha256"] == expected_sha256(job)


@processes_only
def test_a_server_whose_key_is_not_known_is_refused(sshd: Mapping[str, str], tmp_path: Path) -> None:
    job = write_job(tmp_path / "job.py")
    ended = Started(run(job, tmp_path / "run", "--hosts", "strange"), tmp_path / "log", env=sshd).end()
    assert ended.code == 2, ended.said
    assert "ssh strange failed for " in ended.said and "Host key verification failed" in ended.said
