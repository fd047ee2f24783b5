"""Make the pictures of the docs: of the chief's page from a real run, and of what the benchmarks measured.

    .venv/bin/python docs/screenshots/make.py
    .venv/bin/python docs/screenshots/make.py --only plots

The page, in docs/images, in a headless Chromium: asynchronous training of the digits example by three workers, of which
one is killed, so that staleness and a death are to be seen. Takes a minute; needs Chromium (Debian: apt-get install
chromium). The plots, in benchmarks/results, are drawn from the figures beside them; only `make bench` makes new ones.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks import plots  # noqa: E402
from shardline.cli.launcher import LaunchOptions, LocalCluster  # noqa: E402
from shardline.core.timeouts import Timeouts  # noqa: E402
from shardline.rpc.client import ChiefClient  # noqa: E402
from tests.monitoring.browser import Browser, find_chromium  # noqa: E402

LIMIT_BYTES = 300_000
STEPS = 6000
KILL_AT, SHOW_AT = 700, 2500
"""Steps: when worker/2 is killed, and when the pictures are taken, after it has been declared dead."""
DESKTOP, PHONE = (1180, 900), (390, 844)
COLOURS = 256
TIMEOUTS = Timeouts(total_s=30.0)
PATIENCE_S = 180.0


def main() -> int:
    """Make the pictures; returns the exit code."""
    parser = argparse.ArgumentParser(description="Pictures of the chief's page and of the benchmarks.")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "images", help="of the page")
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="figures to draw")
    parser.add_argument("--only", choices=["page", "plots"])
    given = parser.parse_args()
    if given.only != "page":
        print(f"drew {', '.join(path.name for path in plots.redraw(given.results))}")
    return photograph_page(given.out) if given.only != "plots" else 0


def photograph_page(folder: Path) -> int:
    """Run the job, take the pictures; returns the exit code."""
    if find_chromium() is None:
        print("there is no Chromium here; on Debian: apt-get install chromium", file=sys.stderr)
        return 1
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        launch = LaunchOptions(
            job=ROOT / "examples" / "digits" / "job.py",
            out=Path(scratch) / "digits",
            ps=2,
            workers=3,
            evaluators=1,
            overrides=(("steps", str(STEPS)), ("consistency", "async"), ("checkpoint_every", "200")),
            timeouts=TIMEOUTS,
            page="127.0.0.1:0",
        )
        with LocalCluster(launch) as cluster, Browser.start(Path(scratch) / "browser") as browser:
            browser.resize(*DESKTOP)
            browser.prefer("light")
            browser.open(page_of(cluster))
            wait_for_step(browser, KILL_AT)
            cluster.kill("worker/2", restart=False)
            wait_for_step(browser, SHOW_AT)
            browser.wait("document.querySelector('#events').innerText.includes('worker/2 is dead')", "the death")
            take(browser, folder, scratch)
    large = [path.name for path in folder.glob("page-*.png") if path.stat().st_size > LIMIT_BYTES]
    if large:
        print(f"larger than {LIMIT_BYTES} bytes: {', '.join(large)}", file=sys.stderr)
    return 1 if large else 0


def page_of(cluster: LocalCluster) -> str:
    """Address of the page, as the chief tells it."""
    client = ChiefClient(cluster.chief_address, TIMEOUTS)
    try:
        return client.status().page
    finally:
        client.close()


def wait_for_step(browser: Browser, step: int) -> None:
    """Wait until the page shows this step."""
    shown = "Number(document.querySelector('#step').textContent.replaceAll(',', ''))"
    browser.wait(f"{shown} >= {step}", f"step {step}", limit_s=PATIENCE_S)


def take(browser: Browser, folder: Path, scratch: str) -> None:
    """The page in light and dark colours, and on a phone."""
    for scheme in ("light", "dark"):
        browser.prefer(scheme)
        settle(browser)
        shorten(browser, scratch)
        photograph(browser, folder / f"page-{scheme}.png", whole=True)
    browser.prefer("light")
    browser.resize(*PHONE, scale=2, phone=True)
    settle(browser)
    photograph(browser, folder / "page-phone.png")


def shorten(browser: Browser, scratch: str) -> None:
    """Show paths as if from the folder that the command was given in; the name of a temporary one says nothing."""
    browser.ask(
        "(() => { const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT); let text;"
        f"while ((text = texts.nextNode())) text.data = text.data.replaceAll({json.dumps(scratch)}, 'runs');"
        # The folder is written anew with each news, which may come before the picture is taken.
        "const out = document.querySelector('#out');"
        "if (!out.hidden) { const shown = out.cloneNode(true); shown.id = ''; out.before(shown); }"
        "out.hidden = true; })()"
    )


def photograph(browser: Browser, path: Path, *, whole: bool = False) -> None:
    """A picture of few colours, as the page has: a third of the bytes."""
    browser.photograph(path, whole=whole)
    with Image.open(path) as picture:
        small = picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    small.save(path, optimize=True)


def settle(browser: Browser) -> None:
    """Wait for curves of the new size and colours: two frames after the next news."""
    now = browser.ask("document.querySelector('#tasks').innerText")
    browser.wait(f"document.querySelector('#tasks').innerText !== {now!r}", "news")
    browser.ask("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


if __name__ == "__main__":
    start_s = time.monotonic()
    code = main()
    print(f"took {time.monotonic() - start_s:.0f} s")
    sys.exit(code)
