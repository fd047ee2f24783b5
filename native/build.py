"""Compiles the native library into shardline/native/built: with cc, or with ziglang where that is installed.

    python native/build.py                     # as `make install` does
    python native/build.py --sanitize FOLDER   # with ASan and UBSan, for `make native-sanitize`
    python native/build.py --trial KIND FILE   # a program that tries the engine, with -fsanitize=KIND

Wheels are built for a named processor, by ziglang, whatever this machine's own is.

Needs nothing but the standard library: the build hook runs it before anything else is installed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
FOLDER = SOURCES.parent / "shardline" / "native" / "built"
LIBRARY = "libshardline.so"
MISSING = "missing.txt"
"""Says why there is no library."""
ZIGLANG = "ziglang==0.17.1"
FLAGS = (
    *("-std=c11", "-O3", "-fPIC", "-pthread", "-fvisibility=hidden"),
    *("-Wall", "-Wextra", "-Werror=implicit-function-declaration"),
    # The bits are torch's: a product is rounded before it is added unless the source says otherwise.
    *("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math"),
)
LEVELS = {
    "x86_64": {
        "sse2": (),
        "avx2": ("-mavx2", "-mfma"),
        "avx512": (
            *("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx2", "-mfma"),
            "-mprefer-vector-width=512",
        ),
    },
    "aarch64": {"neon": ()},
}
"""By processor: the levels that kernels.c is compiled for, and what the compiler may use in each."""
GLIBC = "2.17"
"""The oldest glibc that ziglang links for; wheels are tagged with it."""
NONE = "any"
"""In the place of a processor: no library."""
SANITIZE = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g", "-O1")
PROBE = "#include <string.h>\nint probe(void *to, const void *from) { return memcpy(to, from, 1) != to; }\n"
COST = (
    "Shardline works without it, with the same bits, but its passes over tensors take up to twice as long, "
    "and lane grpc takes the place of tcp"
)


def machine() -> str:
    """The processor by the name that LEVELS has."""
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(platform.machine().lower(), platform.machine().lower())


def compiler() -> list[str] | None:
    """The machine's own C compiler, tried on a small library; None where there is none that works."""
    named = shlex.split(os.environ.get("CC", ""))
    for command in [named] if named else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]) and _works(command):
            return command
    return None


def _works(command: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "probe.c")
        source.write_text(PROBE)
        return _run([*command, "-shared", "-fPIC", "-o", str(source.with_suffix(".so")), str(source)]) is None


def zig(processor: str) -> list[str] | None:
    """Ziglang's compiler, for any machine with this processor and glibc; None where it is not installed."""
    if importlib.util.find_spec("ziglang") is None:
        return None
    # Without a target it compiles for this very processor.
    return [sys.executable, "-m", "ziglang", "cc", "-target", f"{processor}-linux-gnu.{GLIBC}"]


def zig_helps() -> bool:
    """Whether ziglang would do where there is no compiler."""
    return sys.platform == "linux" and platform.libc_ver()[0] == "glibc" and machine() in LEVELS


def build(folder: Path = FOLDER, *, processor: str = "", sanitize: bool = False) -> str | None:
    """Compile; returns why there is no library, None where there is one. The one before is gone in either case."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LIBRARY).unlink(missing_ok=True)
    (folder / MISSING).unlink(missing_ok=True)
    reason = _build(folder / LIBRARY, processor, sanitize)
    if reason is not None:
        reason = f"{reason}; {COST}"
        (folder / MISSING).write_text(reason + "\n")
    return reason


def _units(processor: str) -> list[tuple[str, list[str]]]:
    """What is compiled: a source, and flags of its own."""
    units = [("shardline", []), ("tls", []), *(("kernels", [f"-DLEVEL={n}", *f]) for n, f in LEVELS[processor].items())]
    # It waits for sockets with epoll.
    return [*units, ("engine", [])] if sys.platform == "linux" else units


def _compile(command: list[str], flags: Sequence[str], units: Sequence[tuple[str, list[str]]], folder: Path) -> str:
    """Compile each unit to NUMBER.o in the folder; returns what went wrong."""
    for number, (unit, extra) in enumerate(units):
        target = str(folder / f"{number}.o")
        failure = _run([*command, *flags, *extra, "-c", str(SOURCES / f"{unit}.c"), "-o", target], folder)
        if failure:
            return failure
    return ""


def _build(library: Path, processor: str, sanitize: bool) -> str | None:
    here = machine()
    if processor == NONE:
        return "this is the wheel for machines that have none of their own"
    if (processor or here) not in LEVELS:
        return f"there are no native kernels for {processor or platform.machine()}, only for {' and '.join(LEVELS)}"
    command = zig(processor) if processor else compiler() or zig(here)
    if command is None:
        return f"there was no C compiler (cc) and no {ZIGLANG} in its place when Shardline was installed"
    with tempfile.TemporaryDirectory() as name:
        folder, units = Path(name), _units(processor or here)
        failure = _compile(command, [*FLAGS, *(SANITIZE if sanitize else ())], units, folder)
        if failure:
            return failure
        made, objects = folder / LIBRARY, [str(folder / f"{number}.o") for number in range(len(units))]
        # Calls within the library are its own, whatever else the process has loaded.
        extra = ["-shared", "-pthread", "-Wl,-Bsymbolic"] if sys.platform == "linux" else ["-shared"]
        failed = _run([*command, *extra, *(SANITIZE if sanitize else ("-s",)), "-o", str(made), *objects], folder)
        if failed:
            return failed
        if not sanitize and processor in ("", here):
            try:
                ctypes.CDLL(str(made))
            except OSError as error:
                return f"the native library can't be loaded: {error}"
        # In one move: a process may be looking for it.
        shutil.copy(made, library.with_suffix(".new"))
        library.with_suffix(".new").replace(library)
    return None


def build_trial(program: Path, kind: str) -> str | None:
    """Compile try_engine.c with the engine and -fsanitize=KIND to a program; returns what went wrong."""
    command = compiler()
    if command is None:
        return "there is no C compiler (cc)"
    program.parent.mkdir(parents=True, exist_ok=True)
    flags = [*FLAGS, "-O1", "-g", f"-fsanitize={kind}", *(["-DFUZZER"] if "fuzzer" in kind else [])]
    with tempfile.TemporaryDirectory() as name:
        folder, units = Path(name), [*_units(machine()), ("try_engine", [])]
        failure = _compile(command, flags, units, folder)
        objects = [str(folder / f"{number}.o") for number in range(len(units))]
        return failure or _run([*command, "-pthread", f"-fsanitize={kind}", "-o", str(program), *objects])


def _run(command: list[str], cache: Path | None = None) -> str | None:
    """Run a compiler; returns what went wrong in one line."""
    # Zig's own cache goes with the build.
    places = {} if cache is None else dict.fromkeys(("ZIG_GLOBAL_CACHE_DIR", "ZIG_LOCAL_CACHE_DIR"), str(cache / "zig"))
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=300, env={**os.environ, **places}, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{command[0]} failed: {error}"
    if done.returncode == 0:
        return None
    errors = [line for line in done.stderr.splitlines() if "error" in line.lower()] or done.stderr.splitlines()
    return f"{shlex.join(command[:4])} ... failed: {errors[0] if errors else done.returncode}"


if __name__ == "__main__":
    arguments = sys.argv[1:]
    if arguments[:1] == ["--trial"]:
        sys.exit(build_trial(Path(arguments[2]), arguments[1]))
    sys.exit(build(Path(arguments[1]), sanitize=True) if arguments[:1] == ["--sanitize"] else build())
