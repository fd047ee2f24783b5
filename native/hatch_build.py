"""The build hook: compiles the native library at installation. Where that can't be done, pure Python is installed.

SHARDLINE_WHEEL is what `make wheel` builds for: x86_64 or aarch64, on any Linux with glibc 2.17 or newer, or `any`, all
other machines, without the library.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


def _builder() -> ModuleType:
    spec = importlib.util.spec_from_file_location("shardline_native_build", Path(__file__).with_name("build.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


builder = _builder()
WHEEL = os.environ.get("SHARDLINE_WHEEL", "")


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """For wheels, editable ones too."""

    def dependencies(self) -> list[str]:
        """Ziglang where it compiles: for a named processor, or for want of a C compiler if a package index has it."""
        if self.target_name != "wheel" or WHEEL == builder.NONE:
            return []
        if WHEEL:
            return [builder.ZIGLANG]
        if not builder.zig_helps() or builder.compiler() is not None:
            return []
        # A missing one must not fail pip.
        return [builder.ZIGLANG] if _index_has_ziglang() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and take the library, or why there is none, into the wheel. An editable one reads it in place."""
        if self.target_name != "wheel":
            return
        if version == "editable":
            reason, folder = builder.build(), builder.FOLDER
        else:
            folder = Path(self.root, "build", "native", WHEEL or "here")
            reason = builder.build(folder, processor=WHEEL)
            made = builder.LIBRARY if reason is None else builder.MISSING
            build_data["force_include"][str(folder / made)] = f"shardline/native/built/{made}"
        if reason is not None:
            if WHEEL not in ("", builder.NONE):
                raise RuntimeError(f"SHARDLINE_WHEEL={WHEEL}: {reason}")
            self.app.display_warning(reason)
            return
        build_data["pure_python"] = False
        # Python loads it with ctypes, whatever Python it is.
        here = self.build_config.builder.get_best_matching_tag().rpartition("-")[2]
        platform = f"manylinux_{builder.GLIBC.replace('.', '_')}_{WHEEL}" if WHEEL else here
        build_data["tag"] = f"py3-none-{platform}"


def _index_has_ziglang() -> bool:
    name, _, version = builder.ZIGLANG.partition("==")
    # -I: pip shows its build environment to Python by PYTHONPATH, where it is not itself.
    pip = [sys.executable, "-I", "-m", "pip", "--disable-pip-version-check", "--retries", "1", "--timeout", "10"]
    try:
        done = subprocess.run(
            [*pip, "index", "versions", name],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
        )
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and version in done.stdout.replace(",", " ").split()
