"""Each container is killed, one is paused, one is cut off, and training goes on."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

import pytest

from tests.containers.stack import TASKS, Stack, run, until


@pytest.fixture(scope="module")
def running() -> Iterator[Stack]:
    """A stack with Prometheus that trains until it is told to stop; each test leaves it training."""
    with Stack("faults", STEPS="10000000", RESTARTS="100", TIMEOUT="30") as stack:
        stack.up(*TASKS, "prometheus")
        stack.wait_line("chief", "training from step 0")
        stack.goes_on()
        yield stack


def test_prometheus_scrapes_every_task(running: Stack) -> None:
    def all_up() -> bool:
        return [target["health"] for target in running.targets()] == ["up"] * 6

    until(all_up, lambda: str(running.targets()), 60.0)
    tasks = {"chief/0", "evaluator/0", "ps/0", "ps/1", "worker/0", "worker/1"}

    def named() -> bool:
        return {sample["metric"]["task"] for sample in running.query("{__name__=~'shardline_.+'}")} == tasks

    until(named, lambda: str(running.query("count by (task) ({__name__=~'shardline_.+'})")), 30.0)


def test_prometheus_sees_bytes_and_steps_move(running: Stack) -> None:
    def moving() -> bool:
        rates = ("shardline_push_wire_bytes_total", "shardline_pull_wire_bytes_total")
        found = [running.query(f"sum(rate({name}{{task=~'worker/.'}}[30s])) > 0") for name in rates]
        return all(found) and bool(running.query("min(delta(shardline_step{task=~'worker/.'}[30s])) > 0"))

    until(moving, "rates of bytes and steps above 0", 60.0)


def test_killed_worker_is_started_again_and_takes_its_own_place(running: Stack) -> None:
    after = running.mark("chief")
    running.kill(running.one("worker"))
    said = running.wait_line("chief", r"worker/\d is suspect: .*its stream broke", after=after)
    task = said.split("WARNING ")[1].split()[0]
    # On a busy machine it may be declared dead before the next one is there.
    running.wait_line("chief", f"{task}: a new process replaces a silent one|{task} is dead: ", after=after)
    running.wait_line("chief", f"{task} joined", after=after)
    running.goes_on()
    assert running.restarts(running.one("worker")) == 1


@pytest.mark.long
def test_killed_evaluator_is_started_again_and_scores(running: Stack) -> None:
    after = running.mark("chief")
    running.kill(running.one("evaluator"))
    running.wait_line("chief", "evaluator/0 joined", after=after)
    running.wait_line("chief", r"step \d+: accuracy", after=running.mark("chief"))
    assert running.restarts(running.one("evaluator")) == 1


@pytest.mark.long
def test_killed_prometheus_is_started_again_with_what_it_knew(running: Stack) -> None:
    running.kill(running.one("prometheus"))
    until(lambda: running.restarts(running.one("prometheus")) == 1, "a restart", 60.0)
    until(lambda: running.query("up"), "answers", 60.0)
    until(lambda: [target["health"] for target in running.targets()] == ["up"] * 6, "all scraped again", 60.0)


def test_killed_server_is_started_again_and_the_job_goes_on_from_its_newest_checkpoint(running: Stack) -> None:
    after = running.mark("chief")
    running.kill(running.one("ps"))
    said = running.wait_line(
        "chief", r"ps/\d .*held shard \d; rolling back all shards to the newest checkpoint \(step \d+", after=after
    )
    running.wait_line("chief", r"training continues from step \d+, \d+ steps are repeated", after=after)
    assert "so the job ends" not in said
    running.goes_on()
    assert running.restarts(running.one("ps")) == 1


def test_killed_chief_goes_on_where_it_was(running: Stack) -> None:
    after = running.mark("chief")
    running.kill(running.one("chief"))
    said = running.wait_line("chief", r"the chief is back after .*: training continues at step \d+", after=after)
    assert "no step is repeated" in said
    running.goes_on()


@pytest.mark.long
def test_paused_worker_loses_its_replicas_and_gets_them_back(running: Stack) -> None:
    after = running.mark("chief")
    paused = running.one("worker")
    run("docker", "pause", paused)
    try:
        said = running.wait_line("chief", r"worker/\d is dead: last heard .*replica \d to worker/\d", after=after)
        # The other one goes on with both replicas.
        running.goes_on()
    finally:
        again = running.mark("chief")
        run("docker", "unpause", paused)
    task = said.split("WARNING ")[1].split()[0]
    running.wait_line("worker", f"{task}: incarnation .* was replaced", timeout_s=60.0)
    running.wait_line("chief", f"{task} joined", after=again)
    running.goes_on()


@contextlib.contextmanager
def cut(stack: Stack, worker: str, server: str) -> Iterator[None]:
    """Packets between two containers vanish, both ways, and between no others."""
    address = stack.address(server)
    inside = ("nsenter", "-t", str(stack.inspect(worker)["State"]["Pid"]), "-n", "iptables")
    rules = [("INPUT", "-s", address, "-j", "DROP"), ("OUTPUT", "-d", address, "-j", "DROP")]
    for chain, *rule in rules:
        run(*inside, "-I", chain, *rule)
    try:
        yield
    finally:
        for chain, *rule in rules:
            # Where the worker was started again its network is new, and the rules are gone.
            run(*inside, "-D", chain, *rule, check=False)


needs_iptables = pytest.mark.skipif(
    shutil.which("nsenter") is None or shutil.which("iptables") is None, reason="needs nsenter and iptables"
)


@needs_iptables
@pytest.mark.long
def test_cut_that_is_shorter_than_the_timeout_heals_without_any_restart(running: Stack) -> None:
    after, restarts = running.mark("chief"), [running.restarts(name) for name in running.containers()]
    said = running.mark("worker")
    with cut(running, running.one("worker"), running.one("ps")):
        # Longer than one call may take, so that calls are given up and made again.
        running.wait_line("worker", r"did not answer .* trying again", after=said)
        running.wait_line("worker", r"is waiting for replicas \[\d\] in step", after=said)
    running.goes_on()
    assert not [line for line in running.lines("chief")[after:] if "ERROR" in line or "dead" in line]
    assert [running.restarts(name) for name in running.containers()] == restarts


@needs_iptables
@pytest.mark.long
def test_cut_that_is_longer_costs_the_worker_its_replicas_until_it_comes_back(running: Stack) -> None:
    after = running.mark("chief")
    with cut(running, running.one("worker"), running.one("ps")):
        said = running.wait_line(
            "chief", r"worker/\d got no answer from ps/\d at .*, but the others did; replica", after=after
        )
    task = said.split("WARNING ")[1].split()[0]
    running.wait_line("chief", f"{task} joined", after=after)
    running.goes_on()


@pytest.mark.long
def test_container_that_loses_the_network_comes_back(running: Stack) -> None:
    network, lost = f"{running.project}_cluster", running.one("worker", 2)
    after = running.mark("chief")
    run("docker", "network", "disconnect", network, lost)
    running.wait_line("chief", r"worker/\d is dead: last heard .*replica \d to worker/\d", after=after)
    again = running.mark("chief")
    run("docker", "network", "connect", "--alias", "worker", network, lost)
    running.wait_line("chief", r"worker/\d joined", after=again)
    running.goes_on()


def test_stop_from_inside_ends_every_task_with_0(running: Stack) -> None:
    # The last test of this stack.
    running.compose("exec", "chief", "shardline", "stop", "--reason", "enough")
    codes = running.exit_codes()
    assert len(codes) == 6
    assert set(codes.values()) == {0}
    assert running.summary()["reason"].endswith("enough")
