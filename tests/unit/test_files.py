"""What stands where a person's file should be: a FIFO, a device, a folder, a socket, a file without an end."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from shardline.certs import make_certificates
from shardline.checkpoint import Checkpoint, CheckpointStore, manifest as manifests
from shardline.checkpoint.export import export
from shardline.checkpoint.manifest import FileEntry, shard_file
from shardline.cli.main import cli
from shardline.cli.options import existing_job
from shardline.cli.train import read_summary
from shardline.cluster import ClusterSpec
from shardline.core.plan import make_plan
from shardline.errors import CheckpointError, ClusterSpecError, JobError, ShardlineError, UsageError
from shardline.host import files
from shardline.host.files import UnsuitableFileError
from shardline.host.python_file import installed_imports, run_file
from shardline.observability.log import close, setup
from shardline.observability.metrics import Metrics
from shardline.rpc.limits import MAX_TENSORS
from shardline.security import Security
from shardline_chief.io.journal import Journal
from shardline_chief.io.reporter import Reporter
from shardline_chief.page.history import History
from tests.support.checkpoints import SHARD_0, job_of, prepare, spec, state_of

DEADLINE_S = 10.0
SPARSE_BYTES = 1 << 40


@pytest.fixture(autouse=True)
def deadline() -> Iterator[None]:
    """Whatever waits is interrupted, and fails."""

    def late(number: int, frame: object) -> None:
        raise TimeoutError(f"still not done after {DEADLINE_S} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0.0)
    signal.signal(signal.SIGALRM, before)


def put_socket(path: Path) -> None:
    # A socket's name may be longer where it is told relative to a folder.
    before = Path.cwd()
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(path.name)
    finally:
        os.chdir(before)


def put_sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(SPARSE_BYTES)


def put_loop(path: Path) -> None:
    path.symlink_to(path.name)


Put = Callable[[Path], None]
STRANGE: dict[str, tuple[Put, str]] = {
    "a FIFO": (os.mkfifo, "it is a FIFO, not a regular file"),
    "a link to a device": (lambda path: path.symlink_to("/dev/zero"), "it is a device, not a regular file"),
    "a folder": (Path.mkdir, "it is a folder, not a regular file"),
    "a socket": (put_socket, "it is a socket, not a regular file"),
    "a link to itself": (put_loop, "Too many levels of symbolic links"),
}
ENDLESS = {**STRANGE, "a sparse file": (put_sparse, "bytes")}

in_place_of_a_file = pytest.mark.parametrize(("put", "sentence"), list(ENDLESS.values()), ids=list(ENDLESS))


def instead(path: Path, put: Put) -> Path:
    path.unlink(missing_ok=True)
    put(path)
    return path


@pytest.mark.parametrize(("put", "sentence"), list(STRANGE.values()), ids=list(STRANGE))
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, put: Put, sentence: str) -> None:
    path = instead(tmp_path / "x", put)

    def pin() -> None:
        with files.pinned(path):
            pass

    for use in (lambda: files.read_bytes(path, 100), lambda: files.open_append(path), pin):
        with pytest.raises(OSError) as caught:
            use()
        assert sentence in str(caught.value.strerror) and str(path) in str(caught.value)


@in_place_of_a_file
def test_python_code_that_is_no_regular_file_is_refused_at_once(tmp_path: Path, put: Put, sentence: str) -> None:
    path = instead(tmp_path / "job.py", put)
    with pytest.raises(JobError, match=rf"job\.py can't be read: .*{re.escape(sentence)}"):
        run_file(path, "job")
    assert installed_imports(path) == []


def test_a_job_file_that_is_a_fifo_is_refused_before_a_task_starts(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "job.py")
    with pytest.raises(JobError, match="is no regular file; give the"):
        existing_job(tmp_path / "job.py")


def test_a_file_is_read_up_to_its_limit_and_not_opened_where_it_is_larger(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    assert files.read_bytes(path, 3) == b"abc" and files.read_text(path, 3) == "abc"
    link = tmp_path / "link"
    link.symlink_to(path)
    assert files.read_bytes(link, 3) == b"abc"
    with pytest.raises(UnsuitableFileError, match=r"x: it has more than 2 bytes; is it the right file\?"):
        files.read_bytes(path, 2)
    # Files of /proc have a size of 0, and content.
    assert files.read_bytes(Path("/proc/self/stat"), 4096).startswith(str(os.getpid()).encode())
    with pytest.raises(UnsuitableFileError):
        files.read_bytes(Path("/proc/self/stat"), 10)


def test_a_pinned_file_stays_the_same_whatever_becomes_of_its_name(tmp_path: Path) -> None:
    path = tmp_path / "x"
    path.write_bytes(b"abc")
    with files.pinned(path) as pinned:
        path.unlink()
        os.mkfifo(path)
        assert pinned.read_bytes() == b"abc"


def test_a_replaced_file_is_the_old_one_or_the_new_one_and_follows_no_link(tmp_path: Path) -> None:
    victim, path = tmp_path / "victim", tmp_path / "x"
    victim.write_text("precious")
    path.symlink_to(victim)
    umask = os.umask(0o027)
    try:
        files.replace(path, b"new")
    finally:
        os.umask(umask)
    assert (path.read_text(), victim.read_text(), path.is_symlink()) == ("new", "precious", False)
    assert path.stat().st_mode & 0o777 == 0o640
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError):
        files.replace(tmp_path / "folder", b"new")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["folder", "victim", "x"]


# Checkpoints.


@in_place_of_a_file
@pytest.mark.parametrize("name", [SHARD_0, "manifest.json"])
def test_checkpoint_with_a_strange_file_is_passed_over(tmp_path: Path, name: str, put: Put, sentence: str) -> None:
    prepare(tmp_path)
    instead(tmp_path / "step-00000020" / name, put)
    store = CheckpointStore(tmp_path, keep=2)
    with pytest.raises(CheckpointError) as caught:
        store.open(20)
    assert sentence in str(caught.value) and f"step-00000020/{name}" in str(caught.value)
    found = store.newest_valid()
    assert found.step == 10 and sentence in found.warnings[0]
    assert export(tmp_path, tmp_path / "model.pt").step == 10


@in_place_of_a_file
def test_shard_that_became_strange_after_its_check_is_not_mapped(tmp_path: Path, put: Put, sentence: str) -> None:
    prepare(tmp_path)
    checkpoint = CheckpointStore(tmp_path, keep=2).open(20)
    instead(tmp_path / "step-00000020" / SHARD_0, put)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.tensor("fc1.weight")
    assert sentence in str(caught.value) and SHARD_0 in str(caught.value)


def test_no_shard_is_read_before_all_have_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path)
    last = tmp_path / "step-00000020" / SHARD_0.replace("00000-of", "00001-of")
    last.write_bytes(last.read_bytes() + b"x")
    monkeypatch.setattr("shardline.checkpoint.reader.file_digest", lambda path: pytest.fail(f"{path} was read"))
    with pytest.raises(CheckpointError, match=r"shard-00001-of-00002.safetensors has \d+ bytes; the manifest says"):
        CheckpointStore(tmp_path, keep=2).open(20)


@in_place_of_a_file
def test_strange_hints_hint_at_nothing_and_are_replaced(tmp_path: Path, put: Put, sentence: str) -> None:
    prepare(tmp_path)
    store = CheckpointStore(tmp_path, keep=2)
    for name in ("best", "latest"):
        instead(tmp_path / name, put)
    assert store.best() is None and store.newest_valid().step == 20
    store.mark_best(20, {"loss": 0.5})
    if put is not Path.mkdir:
        best = store.best()
        assert best is not None and best.step == 20


MEASURE = """
import json, os, sys
from pathlib import Path
from shardline.checkpoint import Checkpoint
from shardline.errors import CheckpointError

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) << 10

for folder in sys.stdin:
    # A child's peak begins with what it has, whatever was opened before.
    if os.fork():
        os.wait()
        continue
    before = peak()
    try:
        Checkpoint(Path(json.loads(folder)))
    except CheckpointError as error:
        said = str(error)
    else:
        said = "taken"
    print(json.dumps([said, peak() - before]), flush=True)
    os._exit(0)
"""
Cost = Callable[[Path], tuple[str, int]]


@pytest.fixture(scope="module")
def cost() -> Iterator[Cost]:
    """What opening a checkpoint in a process of its own says, and the bytes that it takes."""
    command = [sys.executable, "-c", MEASURE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as measuring:
        to, back = measuring.stdin, measuring.stdout
        assert to is not None and back is not None

        def measure(folder: Path) -> tuple[str, int]:
            print(json.dumps(str(folder)), file=to, flush=True)
            said, taken = json.loads(back.readline())
            return said, taken

        yield measure
        to.close()
        assert measuring.wait(10.0) == 0


@pytest.mark.parametrize(
    ("content", "size", "sentence"),
    [
        (lambda: b'{"format": "', 300 << 20, "it has more than 268,435,456 bytes"),
        # 64 MB of these would be 5 GB of lists.
        (lambda: b"[" + b"[]," * (21 << 20) + b"[]]", 0, "would take 2,290,"),
        (lambda: b'{"a":' * 100 + b"{}" + b"}" * 100 + b"x", 0, "is not JSON"),
    ],
    ids=["300 MB", "lists", "objects"],
)
def test_memory_for_a_manifest_that_is_none_is_bounded(
    tmp_path: Path, content: Callable[[], bytes], size: int, sentence: str, cost: Cost
) -> None:
    signal.setitimer(signal.ITIMER_REAL, 120.0)
    path = tmp_path / "manifest.json"
    path.write_bytes(content())
    os.truncate(path, max(size, path.stat().st_size))
    size = path.stat().st_size if path.stat().st_size < manifests.MAX_BYTES else 0
    said, taken = cost(tmp_path)
    assert sentence in said
    assert taken < size + (20 << 20), f"{taken} bytes for a file of {size}"


@pytest.mark.long
def test_a_large_manifest_takes_memory_in_proportion(tmp_path: Path) -> None:
    signal.setitimer(signal.ITIMER_REAL, 120.0)
    job = job_of(tuple(spec(f"model.layers.{number}.attention.weight", (64, 768)) for number in range(8192)))
    plan = make_plan(job.tensors, 2)
    data = manifests.encode(
        job,
        plan,
        step=1,
        timeline=0,
        term=1,
        consistent=True,
        versions=[1, 1],
        steps=[1, 1],
        files=[FileEntry(name=shard_file(shard, 2), bytes=1, sha256="0" * 64) for shard in range(2)],
        content_sha256="0" * 64,
        cursor={"step": 1},
        extra={},
    )
    (tmp_path / "manifest.json").write_bytes(data)
    tracemalloc.start()
    try:
        described = manifests.read(tmp_path)
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (described.job, described.plan) == (job, plan)
    fixed = 2 << 20
    assert held < fixed + 2 * len(data) and peak < fixed + 4 * len(data), (held / len(data), peak / len(data))


def test_the_bounds_of_a_manifest_fit_the_largest_job() -> None:
    assert manifests.MAX_BYTES == 1024 * MAX_TENSORS and manifests.MAX_PARSED_BYTES == 2048 * MAX_TENSORS


# Other files that a person names.


@pytest.fixture
def tls(tmp_path: Path) -> dict[str, Path]:
    make_certificates(tmp_path / "certs", {"localhost": "localhost"}, days=1)
    token = tmp_path / "token"
    token.write_text("x" * 32)
    names = {"tls_ca": "ca.pem", "tls_cert": "localhost.pem", "tls_key": "localhost.key"}
    return {**{name: tmp_path / "certs" / file for name, file in names.items()}, "token_file": token}


@in_place_of_a_file
@pytest.mark.parametrize("flag", ["tls_ca", "tls_cert", "tls_key", "token_file"])
def test_strange_tls_and_token_files_are_named(tls: dict[str, Path], flag: str, put: Put, sentence: str) -> None:
    Security(**tls)
    path = instead(tls[flag], put)
    with pytest.raises(UsageError) as caught:
        Security(**tls)
    assert str(caught.value).startswith(f"--{flag.replace('_', '-')} {path} can't be read: ")
    assert sentence in str(caught.value)


@in_place_of_a_file
def test_strange_cluster_file_is_named(tmp_path: Path, put: Put, sentence: str) -> None:
    path = instead(tmp_path / "cluster.json", put)
    with pytest.raises(ClusterSpecError, match="can't be read") as caught:
        ClusterSpec.read(path)
    assert sentence in str(caught.value)


@in_place_of_a_file
@pytest.mark.parametrize("name", ["ca.pem", "ca.key"])
def test_strange_file_of_a_ca_signs_nothing(tls: dict[str, Path], name: str, put: Put, sentence: str) -> None:
    path = instead(tls["tls_ca"].with_name(name), put)
    with pytest.raises(UsageError) as caught:
        make_certificates(path.parent, {"more": "localhost"}, days=1)
    # One that links to itself is none, and the other half of the CA is.
    assert (sentence in str(caught.value) and str(path) in str(caught.value)) or put is put_loop


@in_place_of_a_file
def test_strange_summary_is_named(tmp_path: Path, put: Put, sentence: str) -> None:
    instead(tmp_path / "summary.json", put)
    with pytest.raises(ShardlineError, match=r"summary\.json can't be read") as caught:
        read_summary(tmp_path)
    assert sentence in str(caught.value)


@in_place_of_a_file
def test_strange_journal_is_named(tmp_path: Path, put: Put, sentence: str) -> None:
    with Journal(tmp_path) as journal:
        assert journal.begin_term() == 1
        journal.write("joined", task="ps/0")
        assert [entry["kind"] for entry in journal.read()] == ["joined"]
    instead(tmp_path / "journal-1.jsonl", put)
    # A line of the greatest length is read before it is refused, which takes a busy machine its time.
    signal.setitimer(signal.ITIMER_REAL, 120.0)
    with Journal(tmp_path) as journal, pytest.raises(UsageError, match=r"journal-1\.jsonl") as caught:
        list(journal.read())
    assert sentence in str(caught.value)


@pytest.mark.parametrize("put", [put for put, _ in STRANGE.values()], ids=list(STRANGE))
@pytest.mark.parametrize("name", [".lock", "journal-1.jsonl"])
def test_the_chief_writes_on_no_strange_journal(tmp_path: Path, name: str, put: Put) -> None:
    instead(tmp_path / name, put)
    with pytest.raises(UsageError, match=r"can't (be written|write to)"), Journal(tmp_path) as journal:
        journal.begin_term()


@in_place_of_a_file
def test_strange_log_files_cost_the_logs_alone(
    tmp_path: Path, put: Put, sentence: str, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("steps", "events", "rates"):
        instead(tmp_path / f"{name}.jsonl", put)
    reporter = Reporter(tmp_path, Metrics("chief", "chief/0"), History())
    reporter.begin(replicas=1, joined=True, timeline=1, first_step=0)
    reporter.event("joined", "ps/0 joined", "info", {})
    reporter.close()
    if put is not put_sparse:
        assert sentence in caplog.text and "training continues without them" in caplog.text


@pytest.mark.parametrize(("put", "sentence"), list(STRANGE.values()), ids=list(STRANGE))
def test_strange_log_of_a_task_is_named(tmp_path: Path, put: Put, sentence: str) -> None:
    path = instead(tmp_path / "ps-0.jsonl", put)
    try:
        with pytest.raises(UsageError, match=r"ps-0\.jsonl can't be written") as caught:
            setup("ps/0", json_path=path)
    finally:
        close()
    assert sentence in str(caught.value)


def test_export_follows_no_link_and_leaves_the_model_alone(tmp_path: Path) -> None:
    prepare(tmp_path / "checkpoints")
    victim = tmp_path / "victim"
    victim.write_text("precious")
    target = tmp_path / "target"
    target.mkdir()
    for suffix in ("pt", "safetensors"):
        out = target / f"model.{suffix}"
        (target / f".model.{suffix}.new").symlink_to(victim)
        out.symlink_to(victim)
        export(tmp_path, out)
        assert not out.is_symlink() and victim.read_text() == "precious"
    loaded = torch.load(target / "model.pt", weights_only=True)
    for name, value in state_of(Checkpoint(tmp_path / "checkpoints/step-00000020").job.tensors, 20).items():
        assert torch.equal(loaded[name], value)
    assert sorted(path.name for path in target.iterdir()) == [
        ".model.pt.new",
        ".model.safetensors.new",
        "model.pt",
        "model.safetensors",
    ]


def test_export_says_which_newer_checkpoints_it_passed_over(tmp_path: Path) -> None:
    prepare(tmp_path / "checkpoints")
    instead(tmp_path / "checkpoints/step-00000020" / SHARD_0, os.mkfifo)
    done = CliRunner().invoke(cli, ["export", str(tmp_path), str(tmp_path / "model.pt")], standalone_mode=False)
    assert done.return_value == 0 and done.stdout == f"{tmp_path / 'model.pt'}\n"
    assert re.fullmatch(r"shardline: skipping the checkpoint of step 20: .* it is a FIFO.*\n", done.stderr)


def test_run_folder_has_no_temporary_name_that_could_be_foreseen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from shardline_chief.io.summary import write_json
    from shardline_chief.io.targets import Targets

    made: list[str] = []
    real = os.open

    def note(path: object, *more: object, **named: object) -> int:
        made.append(Path(str(path)).name)
        return real(path, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", note)
    for _ in range(2):
        write_json(tmp_path / "summary.json", {"steps": 3})
        Targets(tmp_path, chief="127.0.0.1:1", chief_metrics="127.0.0.1:2").clear()
    temporary = [name for name in made if name.startswith((".summary.json.", ".prometheus-targets.json."))]
    assert len(set(temporary)) == len(temporary) == 4
    assert json.loads((tmp_path / "summary.json").read_text()) == {"steps": 3}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["prometheus-targets.json", "summary.json"]
