"""The chief's page in a real browser: over a real cluster, and over a page server alone where no cluster is needed."""

from __future__ import annotations

import http.server
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from shardline.core.orders import PassReport
from shardline.core.status import (
    Awaited,
    CheckpointStatus,
    ChiefStatus,
    EventStatus,
    PeerBytes,
    ShardStatus,
    Standstill,
    TaskLinks,
    TaskStatus,
)
from shardline.errors import UsageError
from shardline.security import PLAIN, Security
from shardline_chief.page.history import History
from shardline_chief.page.server import PageServer
from tests.e2e.support import (
    Command,
    HandCluster,
    assert_refused,
    free_ports,
    pid_of,
    shardline,
    train_command,
    wait_until,
    write_job,
)
from tests.monitoring.browser import Browser, find_chromium

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.browser,
    pytest.mark.skipif(
        find_chromium() is None, reason="there is no Chromium here; on Debian: apt-get install chromium"
    ),
]

TOKEN = "correct-horse-battery"
STILL_TIMEOUT_S = 45
SPOKEN_S = 3.0
"""From the chief's knowing to the page's showing, on a busy machine."""
PHONE = (390, 844)


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser.start(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Browser) -> Iterator[Browser]:
    chromium.open("about:blank")
    chromium.resize(1280, 900)
    chromium.prefer("light")
    chromium.console.clear()
    chromium.requests.clear()
    yield chromium
    # What still runs in the page must not reach into the next test.
    chromium.open("about:blank")


def step(browser: Browser) -> int:
    return int(browser.text("#step").replace(",", "").replace("–", "0"))


def figures(browser: Browser) -> dict[str, str]:
    """The figures beside the progress, without their notes."""
    found: dict[str, str] = browser.ask(
        "Object.fromEntries([...document.querySelectorAll('#figures > div')]"
        ".map((e) => [e.children[0].innerText, e.children[1].firstChild.data]))"
    )
    return found


def row(task: str) -> str:
    return f"document.querySelector('#tasks tr[data-key=\"{task}\"]')?.innerText"


# A real cluster


@pytest.mark.timeout(300)
def test_the_page_follows_a_run_from_its_first_steps_over_a_killed_worker_to_its_end(
    browser: Browser, tmp_path: Path
) -> None:
    job = write_job(tmp_path / "job.py", steps=1_000_000, checkpoint_every=50, replicas=2)
    out = tmp_path / "out"
    # A third of it passes while nothing moves: long enough for the banner.
    flags = ["--workers", "2", "--no-restart", "--timeout", str(STILL_TIMEOUT_S)]
    command = Command(*train_command(job, out, *flags))
    try:
        url = page_of(out, command)
        browser.open(url)
        browser.wait("document.querySelector('#contact').innerText === 'live'", "the chief's first word")
        browser.wait("document.querySelector('#doing').textContent === 'training'", "training", limit_s=120)
        # It goes on by itself while training goes on.
        first = step(browser)
        browser.wait(f"Number(document.querySelector('#step').innerText.replaceAll(',', '')) > {first + 20}", "steps")
        browser.wait("document.querySelectorAll('#curves canvas').length >= 6", "curves")
        browser.wait("document.querySelectorAll('#checkpoints tbody tr').length >= 2", "checkpoints")
        for task in ("ps/0", "worker/0", "worker/1"):
            browser.wait(f"{row(task)}?.includes('alive')", f"{task} alive")
            browser.wait(rf"/\d %\s+[\d.]+ MB/.test({row(task)})", f"CPU and memory of {task}")
        browser.wait(
            "document.querySelectorAll('#topology svg .edge').length === 2", "what workers and servers exchange"
        )
        marked = r"/^busiest: worker\/\d and ps\/0, [\d.]+ [kM]B\/s, within one machine$/"
        browser.wait(f"{marked}.test(document.querySelector('#topology .count').textContent)", "the busiest of them")
        assert "shard 0" in browser.text("#shards tbody")
        assert "joined from 127.0.0.1" in browser.text("#events")
        titles = browser.ask(
            "[...document.querySelectorAll('#curves figcaption span:first-child')].map((e) => e.innerText)"
        )
        assert titles == ["Training loss", "Gradient norm", "Learning rate", "Bytes/s", "Steps/s", "Staleness"]
        # They are drawn in the browser's next frame, and the steps above may be newer.
        browser.wait("document.querySelector('#curves .plot').plot.data[1].length > 20", "points of a curve")
        looks_right_everywhere(browser)

        os.kill(pid_of(out, "worker/1"), signal.SIGKILL)
        browser.wait("!document.querySelector('#still').hidden", "that nothing moves")
        assert re.search(r"No step since \d\d:\d\d:\d\d: waiting for worker/1\s", browser.text("#still"))
        assert browser.text("#contact") == "connected; the job stands still"
        assert figures(browser)["Steps/s"] == "–" and browser.text("#left") == ""
        browser.wait(f"{row('worker/1')}?.includes('dead')", "worker/1 dead", limit_s=60)
        browser.wait("document.querySelector('#events').innerText.includes('worker/1 is dead')", "its sentence")
        assert "1 of" not in browser.text("#tasks-count")
        after = step(browser)
        browser.wait(f"Number(document.querySelector('#step').innerText.replaceAll(',', '')) > {after}", "going on")
        browser.wait("document.querySelector('#still').hidden", "the end of the standstill")

        command.signal(signal.SIGINT)
        browser.wait("document.querySelector('#contact').className.includes('ended')", "the end", limit_s=60)
        assert browser.text("#doing") == "Ended"
        # Until here; a page whose chief has gone asks on and is refused, which the console does say.
        assert browser.console == []
        assert {re.match(r"[a-z]+://[^/]+/", address)[0] for address in browser.requests if "://" in address} == {url}  # type: ignore[index]
        assert command.finish().code == 130
    finally:
        if command.process.poll() is None:
            command.process.kill()
            command.finish()


def page_of(out: Path, command: Command) -> str:
    """Address of the page, from the chief's log."""
    log = out / "logs" / "chief-0.log"

    def found() -> str:
        match = re.search(r"page at (http://127\.0\.0\.1:\d+/)", log.read_text()) if log.is_file() else None
        return match[1] if match else ""

    return str(wait_until(found, "the page's address", while_runs=command))


def looks_right_everywhere(browser: Browser) -> None:
    """Light and dark differ, and nothing is wider than a phone."""
    light = browser.ask("getComputedStyle(document.body).backgroundColor")
    browser.prefer("dark")
    browser.wait(f"getComputedStyle(document.body).backgroundColor !== {json.dumps(light)}", "dark colours")
    browser.wait("document.querySelectorAll('#curves canvas').length >= 6", "curves in dark colours")
    browser.prefer("light")
    browser.resize(*PHONE, scale=2, phone=True)
    browser.wait("document.querySelector('#curves canvas').getBoundingClientRect().width < innerWidth", "narrow curves")
    assert browser.ask("innerWidth") == PHONE[0]
    assert browser.ask("document.documentElement.scrollWidth") <= PHONE[0]
    assert browser.ask("getComputedStyle(document.querySelector('#tasks tbody tr')).display") == "grid"
    browser.resize(1280, 900)


def test_a_page_open_to_others_without_a_token_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    cluster = HandCluster.write(tmp_path, ps=1, worker=1)
    place = ("--cluster", str(cluster.path), "--task", "chief/0", "--out", str(tmp_path / "out"))
    refused = shardline("chief", *place, "--page", "0.0.0.0:0", "--insecure-bind")
    assert_refused(refused, UsageError.exit_code, r"--page 0\.0\.0\.0:0 is open to other machines.*--token-file")
    assert not (tmp_path / "out" / "chief").exists()


# A page server alone

ALONE = """
import sys, threading
from shardline.core.status import ChiefStatus
from shardline.security import PLAIN
from shardline_chief.page.history import History
from shardline_chief.page.server import PageServer

page = PageServer(sys.argv[1], PLAIN, History())
print(page.start(), flush=True)
while not threading.Event().wait(0.2):
    page.show(ChiefStatus(job=sys.argv[2], phase=sys.argv[3], step=7, steps=10))
"""


def alone(address: str, job: str, *, phase: str = "running") -> subprocess.Popen[str]:
    """A page server in a process of its own, serving when this returns."""
    process = subprocess.Popen([sys.executable, "-c", ALONE, address, job, phase], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline().startswith("http://")
    return process


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_a_chief_that_is_gone_is_said_with_the_time_and_its_return_is_seen(browser: Browser) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    chief = alone(address, "first")
    try:
        browser.open(f"http://{address}/")
        browser.wait("document.querySelector('#contact').innerText === 'live'", "the chief's word")
        end(chief)
        browser.wait("document.querySelector('#contact').className.includes('lost')", "the loss")
        assert re.fullmatch(r"lost contact with the chief since \d\d:\d\d:\d\d", browser.text("#contact"))
        # What was there stays to be read.
        assert (browser.text("#job"), step(browser)) == ("first", 7)
        chief = alone(address, "second")
        browser.wait("document.querySelector('#job').innerText === 'second'", "the chief's return")
        assert browser.text("#contact") == "live"
    finally:
        end(chief)


@pytest.fixture
def page(tmp_path: Path) -> Iterator[PageServer]:
    (tmp_path / "token").write_text(TOKEN)
    server = PageServer("127.0.0.1:0", Security(token_file=tmp_path / "token"), History())
    server.start()
    yield server
    server.close()


def test_a_person_signs_in_with_the_token_and_stays_signed_in(browser: Browser, page: PageServer) -> None:
    page.show(ChiefStatus(job="secret", phase="running", time=time.time()))
    browser.open(page.url)
    assert "Token of this job" in browser.text("main")

    def give(token: str) -> None:
        browser.ask(f"document.querySelector('#token').value = {json.dumps(token)}, document.forms[0].submit()")

    give("a wrong guess")
    browser.wait("document.querySelector('[role=alert]')?.innerText.includes('not the token')", "the refusal")
    give(TOKEN)
    browser.wait("document.querySelector('#job')?.innerText === 'secret'", "the page")
    browser.open(page.url)
    browser.wait("document.querySelector('#job')?.innerText === 'secret'", "the page once more")
    assert not browser.ask("document.cookie")


def test_the_token_does_not_stay_in_the_address(browser: Browser, page: PageServer) -> None:
    page.show(ChiefStatus(job="secret", phase="running"))
    browser.open(f"{page.url}?token={TOKEN}")
    browser.wait("document.querySelector('#job')?.innerText === 'secret'", "the page")
    assert browser.ask("location.href") == page.url
    assert browser.console == []


def test_names_and_sentences_are_text_and_never_markup(browser: Browser) -> None:
    history = History()
    bad = "<img src=x onerror=document.title='broken'>"
    for number in range(3):
        history.add(f"evaluation/{bad}", number, number)
    server = PageServer("127.0.0.1:0", PLAIN, history)
    try:
        url = server.start()
        server.show(
            ChiefStatus(
                job=bad,
                phase="ended",
                exit_code=6,
                reason=bad,
                tasks=(TaskStatus(task="worker/0", state="dead", address=bad),),
                said=(EventStatus(time=1.0, level="error", sentence=bad),),
                last_metrics={bad: 0.5},
                last_metrics_step=3,
                faults=(bad,),
            )
        )
        browser.open(url)
        browser.wait("document.querySelector('#curves canvas')", "the curve")
        for place in ("#job", "#reason", "#faults", "#events", "#figures", "#curves", "#tasks tbody"):
            assert bad in browser.text(place), place
        assert browser.ask("document.querySelectorAll('main img').length") == 0
        assert browser.console == []
    finally:
        server.close()


def test_what_fails_stands_on_the_page_for_as_long_as_it_does(browser: Browser) -> None:
    server = PageServer("127.0.0.1:0", PLAIN, History())
    try:
        url = server.start()
        server.show(ChiefStatus(phase="running", faults=("no checkpoint at step 40: the disk is full", "no logs")))
        browser.open(url)
        browser.wait("!document.querySelector('#faults').hidden", "the faults")
        assert browser.text("#faults") == "no checkpoint at step 40: the disk is full · no logs"
        server.show(ChiefStatus(phase="running"))
        browser.wait("document.querySelector('#faults').hidden", "the end of the faults")
        assert browser.console == []
    finally:
        server.close()


# Curves of several runs


def test_curves_of_several_runs_are_smoothed_and_drawn_by_their_logarithm(browser: Browser) -> None:
    own, other = History(), History()
    for number in range(100):
        own.add("loss", number, 2.0 * 0.95**number + (number % 2) / 1000)
        # A logarithm has no place for its end.
        other.add("loss", 2 * number, 0.0 if number == 99 else 1.0 * 0.95**number)
        for at, history in ((1000.0, own), (5000.0, other)):
            history.add("push", at + number, 100.0 + number, axis="time")
            history.add("pull", at + number, 50.0, axis="time")
    server = PageServer("127.0.0.1:0", PLAIN, own, runs={"today": own, "yesterday": other})
    try:
        url = server.start()
        server.show(ChiefStatus(phase="running", step=100))
        browser.open(url)
        browser.wait("document.querySelectorAll('#curves canvas').length === 2", "the curves")
        assert browser.text("#runs").split() == ["today", "yesterday"]
        plot = "document.querySelector('#curves .plot').plot"
        assert browser.ask(f"{plot}.series.length") == 3
        assert browser.ask(f"{plot}.data[0].at(-1)") == 198
        assert browser.ask(f"{plot}.data[2].findLast((value) => value != null)") == 0
        assert browser.ask(f"{plot}.scales.y.distr") == 1
        # Both began at once.
        assert browser.ask("document.querySelectorAll('#curves .plot')[1].plot.data[0].slice(0, 2)") == [0, 1]

        browser.ask("document.querySelector('#log').click()")
        assert browser.ask(f"{plot}.scales.y.distr") == 3
        assert browser.ask(f"{plot}.data[2].findLast((value) => value != null)") == pytest.approx(0.95**98)
        # What cannot be below 0 keeps its axis.
        assert browser.ask("document.querySelectorAll('#curves .plot')[1].plot.scales.y.distr") == 1

        browser.ask(
            "Object.assign(document.querySelector('#smoothing'), {value: 0.5}).dispatchEvent(new Event('input'))"
        )
        assert browser.ask(f"{plot}.series.length") == 5
        assert browser.ask(f"{plot}.data[1].slice(0, 2)") == pytest.approx([2.0, (2.0 * 0.25 + 1.901 * 0.5) / 0.75])
        # What comes later is drawn so, too.
        other.add("loss", 300, 0.5)
        server.show(ChiefStatus(phase="running", step=101))
        browser.wait(f"{plot}.data[0].at(-1) === 300", "the other run's next point")
        assert browser.console == []
    finally:
        server.close()


HELD = ShardStatus(shard=0, version=330, pushes=660, bytes=9 << 20, standby="synced", standby_task="ps/1")
STILL = ChiefStatus(
    job="digits",
    phase="running",
    step=330,
    steps=5000,
    seconds=20.0,
    time=1_000_000.0,
    shard_bytes=(8 << 20,),
    tasks=(
        TaskStatus(task="ps/0", state="alive", shards=(replace(HELD, waiting_for=(1,)),)),
        TaskStatus(task="worker/1", state="suspect", last_heard_s=11.0, replicas=(1,)),
    ),
    checkpoints=(CheckpointStatus(step=300, path="/home/me/digits/step-00000300", bytes=9 << 20, age_s=9.0),),
    standstill=Standstill(seconds=12.0, awaited=(Awaited(task="worker/1", why="replica 1, last heard 11 s ago"),)),
)


def test_a_job_that_stands_still_is_told_with_time_and_names_until_it_moves(browser: Browser) -> None:
    server = PageServer("127.0.0.1:0", PLAIN, History())
    try:
        url = server.start()
        server.show(STILL)
        browser.open(url)
        browser.wait("!document.querySelector('#still').hidden", "the standstill")
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(STILL.time - 12.0))
        assert browser.text("#still").split("\n\n") == [
            f"No step since {since}: waiting for worker/1",
            "For 12 s; awaited: worker/1 (replica 1, last heard 11 s ago)",
        ]
        assert browser.text("#contact") == "connected; the job stands still"
        assert figures(browser)["Steps/s"] == "–" and browser.text("#left") == ""
        server.show(replace(STILL, standstill=None, steps_per_s=10.0))
        browser.wait("document.querySelector('#still').hidden", "the next step")
        assert browser.text("#contact") == "live"
        assert figures(browser)["Steps/s"] == "10" and browser.text("#left").endswith(" left")
        assert browser.console == []
    finally:
        server.close()


def test_a_page_of_files_says_so_with_the_day_that_they_are_of(browser: Browser) -> None:
    server = PageServer("127.0.0.1:0", PLAIN, History())
    try:
        url = server.start()
        server.show(replace(STILL, standstill=None), written=time.time())
        browser.open(url)
        browser.wait("document.querySelector('#job').innerText === 'digits'", "the page")
        assert re.fullmatch(r"files of \d\d:\d\d:\d\d", browser.text("#contact"))
        server.show(replace(STILL, standstill=None, phase="ended"), written=STILL.time)
        browser.wait("document.querySelector('#contact').innerText.includes('ended')", "the end")
        assert re.fullmatch(r"the job has ended; files of 1970-01-\d\d \d\d:\d\d:\d\d", browser.text("#contact"))
        server.close()
        browser.wait("document.querySelector('#contact').innerText.includes('viewer')", "the end of the viewer")
        assert browser.text("#job") == "digits"
    finally:
        server.close()


@pytest.mark.parametrize("width", [900, 1280, 1920])
def test_every_column_of_the_shards_is_in_sight(browser: Browser, width: int) -> None:
    server = PageServer("127.0.0.1:0", PLAIN, History())
    try:
        url = server.start()
        server.show(STILL)
        browser.resize(width, 800)
        browser.open(url)
        browser.wait("document.querySelectorAll('#shards tbody tr').length", "the shards")
        tables = "[...document.querySelectorAll('#shards, #checkpoints')]"
        assert browser.ask(f"{tables}.every((e) => e.scrollWidth <= e.parentElement.clientWidth)")
        assert "replica 1" in browser.text("#shards tbody")
    finally:
        server.close()


def passes_of(stage: int, step: int) -> list[PassReport]:
    """Two stages, two microbatches, passes of 10 ms: each stage is idle for a third of a step."""
    ticks = ((0, 0, False), (1, 1, False), (4, 0, True), (5, 1, True))
    if stage:
        ticks = ((1, 0, False), (2, 1, False), (3, 0, True), (4, 1, True))
    return [
        PassReport(
            step=step,
            replica=0,
            stage=stage,
            microbatch=microbatch,
            back=back,
            start_s=step + tick / 100,
            end_s=step + (tick + 1) / 100,
            version=step,
            held=2,
        )
        for tick, microbatch, back in ticks
    ]


def test_a_pipeline_is_drawn_with_its_passes_stash_and_versions(browser: Browser) -> None:
    server = PageServer("127.0.0.1:0", PLAIN, History())
    try:
        url = server.start()
        server.show(ChiefStatus(phase="running"))
        browser.open(url)
        browser.wait("document.querySelector('#contact').innerText === 'live'", "the chief's word")
        assert browser.ask("document.querySelector('#pipeline').hidden")
        server.passes.begin("digits", "flush", stages=2, replicas=1, microbatches=2)
        for stage in (0, 1):
            passes = [one for step in (7, 8) for one in passes_of(stage, step)]
            server.passes.told(f"worker/{stage}", 1, passes, sent_s=10.0, now_s=20.0)
        server.show(ChiefStatus(phase="running", stages=server.passes.figures()))
        browser.wait("document.querySelectorAll('#pipeline svg rect title').length === 16", "every pass")
        told = browser.ask("document.querySelector('#pipeline svg rect title').textContent")
        assert told == "step 7, microbatch 0, forward\n10 ms\nversion 7\nholds 2 microbatches"
        names = browser.ask(
            "[...document.querySelectorAll('#pipeline svg .name, #pipeline svg .version')].map((e) => e.textContent)"
        )
        assert names == ["stage 0", "v7", "v8", "stage 1", "v7", "v8"]
        assert "33 %" in browser.text("#pipeline tbody")
        # A pass of the second stage begins to the right of the one that it waits for.
        places = browser.ask(
            "[...document.querySelectorAll('#pipeline svg rect.forward')].map((e) => Number(e.getAttribute('x')))"
        )
        assert places[0] < places[4] and places[1] == places[4]
        trace = browser.ask(
            "fetch('pipeline-trace.json').then((answer) => answer.json()).then((t) => t.traceEvents.length)"
        )
        assert trace > 16
        assert browser.console == []
    finally:
        server.close()


def exchanging(task: str, host: str, *peers: str, out_bytes: float = 4e7) -> TaskStatus:
    """A task that sends this many bytes per second to each peer, and gets a quarter of that."""
    told = tuple(PeerBytes(task=peer, out_bytes=out_bytes, in_bytes=out_bytes / 4) for peer in peers)
    links = TaskLinks(line_bytes_per_s=125e6, peers=told)
    return TaskStatus(task=task, state="alive", address=f"{host}:2222", links=links)


def test_a_topology_is_drawn_with_machines_tasks_and_the_full_link_between_them(browser: Browser) -> None:
    server = PageServer("127.0.0.1:0", PLAIN, History())
    try:
        url = server.start()
        tasks = (
            exchanging("chief/0", "10.0.0.1"),
            exchanging("ps/0", "10.0.0.1"),
            exchanging("aggregator/0", "10.0.0.2", "ps/0", out_bytes=6e7),
            exchanging("worker/0", "10.0.0.3", "aggregator/0"),
            exchanging("worker/1", "10.0.0.3", "aggregator/0"),
            exchanging("worker/2", "10.0.0.4", "ps/0", out_bytes=1e6),
        )
        server.show(ChiefStatus(phase="running", tasks=tasks))
        browser.prefer("dark")
        browser.open(url)
        browser.wait("document.querySelectorAll('#topology .edge').length === 4", "every edge")
        assert browser.text("#topology .count") == "fullest link: 10.0.0.2 in, 95.0 MB/s, 76% of 125.0 MB/s"
        told = browser.ask("[...document.querySelectorAll('#topology .edge.marked title')].map((e) => e.textContent)")
        assert told == [
            "aggregator/0 to ps/0: 60.0 MB/s, back: 15.0 MB/s",
            "worker/0 to aggregator/0: 40.0 MB/s, back: 10.0 MB/s",
            "worker/1 to aggregator/0: 40.0 MB/s, back: 10.0 MB/s",
        ]
        # Each task is inside its machine, and none of these lies over another.
        assert browser.ask(PLACES) == {
            "10.0.0.1": ["ps/0"],
            "10.0.0.2": ["aggregator/0"],
            "10.0.0.3": ["worker/0", "worker/1"],
            "10.0.0.4": ["worker/2"],
        }
        assert browser.ask(f"{OVERLAPS}('.machine') + {OVERLAPS}('.label')") == 0
        colours = "getComputedStyle(document.querySelector('#topology .edge.marked')).stroke"
        dark = browser.ask(colours)
        browser.prefer("light")
        browser.wait(f"{colours} !== {json.dumps(dark)}", "light colours")
        browser.resize(*PHONE, phone=True)
        browser.wait("document.querySelector('#topology svg').clientWidth === 640", "a drawing to scroll")
        assert browser.ask("document.documentElement.scrollWidth") <= PHONE[0]
        server.show(ChiefStatus(phase="ended", tasks=tasks))
        browser.wait("document.querySelector('#topology').hidden", "the end")
        assert browser.console == []
    finally:
        server.close()


PLACES = """Object.fromEntries([...document.querySelectorAll("#topology .machine")].map((box) => {
    const outer = box.getBoundingClientRect();
    const held = [...document.querySelectorAll("#topology .task")].filter((task) => {
        const inner = task.getBoundingClientRect();
        return outer.left < inner.left && inner.right < outer.right
            && outer.top < inner.top && inner.bottom < outer.bottom;
    });
    return [box.nextSibling.textContent, held.map((task) => task.nextSibling.textContent)];
}))"""
"""The tasks in each machine, by their places."""
OVERLAPS = """((kind) => {
    const boxes = [...document.querySelectorAll(`#topology ${kind}`)].map((e) => e.getBoundingClientRect());
    const over = (a, b) => a.left < b.right && b.left < a.right && a.top < b.bottom && b.top < a.bottom;
    return boxes.filter((box, at) => boxes.slice(at + 1).some((other) => over(box, other))).length;
})"""
"""How many things of a kind lie over a later one."""


class Between(http.server.BaseHTTPRequestHandler):
    """What stands between a browser and the chief, and keeps a part of it to itself."""

    page: PageServer
    hold: tuple[str, ...] = ()
    """Paths whose answer never comes."""
    refuse: tuple[str, ...] = ()
    """Paths that are answered with 502."""
    over: threading.Event

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path in self.hold:
            self.over.wait(60.0)
            return
        if path in self.refuse:
            self.send_error(502)
            return
        with urllib.request.urlopen(self.page.url.rstrip("/") + self.path, timeout=10.0) as reply:
            body = reply.read()
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.headers["Content-Type"])
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def between() -> Iterator[Callable[..., tuple[PageServer, str]]]:
    """A page server and the address at which something between shows it."""
    page, over = PageServer("127.0.0.1:0", PLAIN, History()), threading.Event()
    page.start()
    servers: list[http.server.ThreadingHTTPServer] = []

    def make(**settings: tuple[str, ...]) -> tuple[PageServer, str]:
        handler = type("Here", (Between,), {"page": page, "over": over, **settings})
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        return page, f"http://127.0.0.1:{server.server_address[1]}/"

    yield make
    over.set()
    for server in servers:
        server.shutdown()
        server.server_close()
    page.close()


def test_a_stream_whose_news_do_not_come_through_leaves_a_page_that_asks(
    browser: Browser, between: Callable[..., tuple[PageServer, str]]
) -> None:
    page, url = between(hold=("/api/stream",))
    page.show(ChiefStatus(phase="running", step=1, steps=10))
    browser.open(url)
    browser.wait("document.querySelector('#step').innerText === '1'", "the first step")
    assert browser.text("#contact") == "live"
    for step_now in (2, 3, 4):
        page.show(ChiefStatus(phase="running", step=step_now, steps=10))
        took_s = browser.wait(f"document.querySelector('#step').innerText === '{step_now}'", "the next step")
        assert took_s < SPOKEN_S


def test_a_page_that_has_never_reached_the_chief_says_so(
    browser: Browser, between: Callable[..., tuple[PageServer, str]]
) -> None:
    _, url = between(refuse=("/api/stream", "/api/view", "/api/history"))
    browser.open(url)
    browser.wait("document.querySelector('#contact').className.includes('lost')", "that there is no chief")
    assert re.fullmatch(r"can't reach the chief; trying since \d\d:\d\d:\d\d", browser.text("#contact"))


def test_a_page_whose_scripts_do_not_load_does_not_say_that_it_connects(
    browser: Browser, between: Callable[..., tuple[PageServer, str]]
) -> None:
    _, url = between(refuse=("/feed.js",))
    browser.open(url)
    assert browser.text("#contact") == "not connected to the chief"


def test_a_page_that_saw_the_end_keeps_saying_so_when_the_chief_is_gone(browser: Browser) -> None:
    address = f"127.0.0.1:{free_ports(1)[0]}"
    chief = alone(address, "over", phase="ended")
    try:
        browser.open(f"http://{address}/")
        browser.wait("document.querySelector('#job').innerText === 'over'", "the page")
    finally:
        end(chief)
    browser.requests.clear()
    never = threading.Event()
    deadline_s = time.monotonic() + 20.0
    while sum("api/view" in address for address in browser.requests) < 3:
        assert time.monotonic() < deadline_s, browser.requests
        browser.ask("0")
        never.wait(0.05)
    said = browser.text("#contact")
    assert re.fullmatch(r"the job has ended; last update at \d\d:\d\d:\d\d", said)
    assert browser.ask("document.body.className") == ""


def test_a_refused_stream_leaves_a_page_that_asks(browser: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardline_chief.page.app.STREAMS", 0)
    history = History()
    server = PageServer("127.0.0.1:0", PLAIN, history)
    try:
        url = server.start()
        server.show(ChiefStatus(phase="running", step=1, steps=10))
        browser.open(url)
        browser.wait("document.querySelector('#step').innerText === '1'", "the first step")
        history.add("loss", 1, 0.5)
        server.show(ChiefStatus(phase="running", step=2, steps=10))
        browser.wait("document.querySelector('#step').innerText === '2'", "the next step")
        browser.wait("document.querySelector('#curves canvas')", "the curve")
    finally:
        server.close()
