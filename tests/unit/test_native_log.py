"""What strangers make gRPC write to stderr: a line per cause and minute; all else as it was written."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from shardline.certs import make_certificates
from shardline.observability.native_log import wanted
from shardline.observability.native_log_filter import HELD_S, TEXTS, WINDOW_S, Stream
from shardline.security import PLAIN, Security

SOURCE = b"ssl_transport_security.cc:2563] "
IMPORT = "from shardline.observability import native_log"


def line(text: bytes, *, thread: int = 31652, severity: bytes = b"I", source: bytes = SOURCE) -> bytes:
    return severity + b"1122 09:27:48.153876   %d " % thread + source + text + b"\n"


def test_a_cause_is_passed_on_once_and_counted_once_a_minute() -> None:
    stream = Stream()
    first = line(b"Handshake failed: error:100000f7:WRONG_VERSION_NUMBER")
    assert stream.take(first, 100.0) == first
    assert stream.next_s() == 100.0 + WINDOW_S
    for number in range(1, 1000):
        again = line(b"Handshake failed: error:%08x:WRONG_VERSION_NUMBER" % (number << 8), thread=number)
        assert stream.take(again, 100.0 + number / 20) == b""
    assert stream.tick(159.9) == b""
    # The last one as it was, so that its time and numbers are a real one's.
    assert stream.tick(160.0) == again[:-1] + b" [999 more of this kind within 60 s]\n"
    # The minute after that count: nothing is said twice, and a quiet minute ends it.
    assert stream.take(first, 161.0) == b""
    assert stream.tick(220.0) == first[:-1] + b" [1 more of this kind within 60 s]\n"
    assert stream.tick(280.0) == b"" and stream.next_s() is None
    assert stream.take(first, 281.0) == first


def test_causes_are_told_apart_by_severity_place_and_words() -> None:
    lines = [
        line(b"one peer ipv4:10.0.0.1:5000"),
        line(b"another peer ipv4:10.0.0.1:5000"),
        line(b"one peer ipv4:10.0.0.1:5000", severity=b"E"),
        line(b"one peer ipv4:10.0.0.1:5000", source=b"chttp2_server.cc:80] "),
    ]
    stream = Stream()
    assert stream.take(b"".join(lines), 0.0) == b"".join(lines)
    assert stream.take(line(b"one peer ipv4:172.16.20.255:61234"), 1.0) == b""


def test_words_that_a_stranger_chooses_do_not_make_causes_without_end() -> None:
    stream = Stream()
    named = [line(b"no such name: " + bytes([97 + n // 26, 97 + n % 26])) for n in range(500)]
    assert stream.take(b"".join(named), 0.0).count(b"\n") == TEXTS + 1
    assert stream.end().endswith(b"[%d more of this kind within 60 s]\n" % (500 - TEXTS - 1))


@pytest.mark.parametrize(
    "text",
    [
        b"Fatal Python error: Segmentation fault\n",
        b"I have a cat\n",
        b"W1122 is no line of gRPC's\n",
        line(b"Check failed: x", severity=b"F"),
        b"\x00\xff\n",
        b"\n",
    ],
)
def test_other_lines_pass_as_they_are_however_often(text: bytes) -> None:
    assert Stream().take(text * 100, 0.0) == text * 100


def test_a_line_in_pieces_is_one_line_and_a_prompt_is_not_waited_for() -> None:
    stream = Stream()
    whole = line(b"Handshake failed")
    assert stream.take(whole, 0.0) == whole
    for cut in range(1, len(whole)):
        assert stream.take(whole[:cut], 1.0) + stream.take(whole[cut:], 1.0) == b""
    assert stream.take(b"\r 37 %", 2.0) == b"\r 37 %"
    # What only looks like the beginning of one waits a moment, not longer.
    assert stream.take(b"I1122 ", 3.0) == b"" and stream.next_s() == 3.0 + HELD_S
    assert stream.tick(3.0 + HELD_S) == b"I1122 "
    assert stream.take(b"E", 5.0) == b"" and stream.end().startswith(b"E")
    assert stream.take(b"I1122 " + b"x" * (1 << 20), 6.0) == b"I1122 " + b"x" * (1 << 20)


def run(code: str, **settings: str) -> subprocess.CompletedProcess[bytes]:
    """A program whose body runs with native_log.condensed()."""
    lines = ["import faulthandler, logging, os, subprocess, sys", "from shardline.observability import native_log"]
    lines += ["with native_log.condensed():", *(f"    {text}" for text in code.splitlines())]
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)],
        check=False,
        capture_output=True,
        timeout=60,
        env={**os.environ, **settings},
    )


NATIVE = line(b"Handshake failed")
WRITE = f"for _ in range(1000): os.write(2, {NATIVE!r})"
COUNTED = NATIVE[:-1] + b" [999 more of this kind within 60 s]\n"


def test_what_is_counted_is_told_at_a_normal_end() -> None:
    done = run(f"{WRITE}\nos.write(2, b'a last word')")
    assert (done.returncode, done.stderr) == (0, NATIVE + b"a last word" + COUNTED)


def test_the_last_words_before_an_abort_get_through() -> None:
    fatal = line(b"Check failed: x", severity=b"F")
    done = run(f"{WRITE}\nos.write(2, {fatal!r})\nos.abort()")
    assert (done.returncode, done.stderr) == (-signal.SIGABRT, NATIVE + fatal + COUNTED)


def test_pythons_words_do_not_take_the_way_through_the_pipe() -> None:
    # What is written while nobody reads the pipe.
    stop = "import signal, time\nfilter = subprocess.check_output(['pgrep', '-P', str(os.getpid()), '-f', 'native_log']"
    stop += ")\nos.kill(int(filter.split()[0]), signal.SIGSTOP)\nos.write(2, b'native\\n')"
    said = "print('printed', file=sys.stderr)\nlogging.warning('logged')\nfaulthandler.dump_traceback()"
    after = "os.write(sys.stderr.fileno(), b'direct\\n')\nos.kill(int(filter.split()[0]), signal.SIGCONT)"
    done = run(f"{stop}\n{said}\n{after}", PYTHONFAULTHANDLER="1")
    lines = done.stderr.decode().splitlines()
    assert lines[:2] == ["printed", "WARNING:root:logged"], done.stderr
    assert "(most recent call first):" in lines[2] and lines[-2:] == ["direct", "native"]


def test_children_write_there_too_and_outlive_their_parent() -> None:
    read, write = os.pipe()
    child = f"import os; os.read({read}, 1); os.write(2, b'late\\\\n')"
    code = f"import os, subprocess, sys\n{IMPORT}\nwith native_log.condensed():\n    {WRITE}\n"
    code += f'    subprocess.Popen([sys.executable, "-c", "{child}"], pass_fds=[{read}])\n    os._exit(3)'
    process = subprocess.Popen([sys.executable, "-c", code], pass_fds=[read], stderr=subprocess.PIPE)
    os.close(read)
    assert process.wait(60) == 3
    os.close(write)
    assert process.communicate(timeout=60)[1] == NATIVE + b"late\n" + COUNTED


def test_a_task_without_stderr_runs() -> None:
    code = f"import os, sys\nos.close(2)\n{IMPORT}\nwith native_log.condensed():\n    os._exit(5)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 5


def test_only_a_task_that_serves_with_tls_has_a_filter(tmp_path: Path) -> None:
    make_certificates(tmp_path, {"ps-0": "127.0.0.1"}, days=1)
    asks = Security(tls_ca=tmp_path / "ca.pem")
    serves = Security(tls_cert=tmp_path / "ps-0.pem", tls_key=tmp_path / "ps-0.key", tls_ca=tmp_path / "ca.pem")
    assert [wanted(each, {}) for each in (PLAIN, asks, serves)] == [False, False, True]
    # Whoever looks into gRPC wants all that it says.
    assert not wanted(serves, {"GRPC_TRACE": "tcp"}) and not wanted(serves, {"GRPC_VERBOSITY": "debug"})


def test_a_thousand_strangers_leave_a_few_lines(tmp_path: Path) -> None:
    make_certificates(tmp_path, {"ps-0": "127.0.0.1"}, days=1)
    cluster = tmp_path / "cluster.json"
    cluster.write_text('{"chief": ["127.0.0.1:9"], "ps": ["127.0.0.1:0"]}')
    files = {"ca": tmp_path / "ca.pem", "cert": tmp_path / "ps-0.pem", "key": tmp_path / "ps-0.key"}
    read, write = os.pipe()
    command = [sys.executable, "-m", "shardline", "ps", "--cluster", str(cluster), "--ready-fd", str(write)]
    for name, path in files.items():
        command += [f"--tls-{name}", str(path)]
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, pass_fds=[write])
    os.close(write)
    try:
        with os.fdopen(read) as ready:
            host, _, port = ready.readline().strip().rpartition(":")
        for number in range(1000):
            with socket.create_connection((host, int(port)), timeout=10) as stranger:
                stranger.sendall(b"GET / HTTP/1.1\r\n\r\n" if number % 2 else b"x" * 64)
                # The server hangs up when it has written its line.
                with contextlib.suppress(ConnectionError):
                    assert stranger.recv(1) in (b"", b"\x15")
    finally:
        process.terminate()
        assert process.wait(60) == 0
    said = [text for text in (tmp_path / "log").read_text().splitlines() if "Handshake failed" in text]
    assert len(said) == 4, said
    assert sum("[499 more of this kind within 60 s]" in text for text in said) == 2
