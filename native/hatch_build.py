"""The build hook: compiles the native library at installation. Where that can't be done, pure Python is installed."""

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


class NativeBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """For wheels, editable ones too."""

    def dependencies(self) -> list[str]:
        """Ziglang where there is no C compiler but a package index that has it: a missing one must not fail pip."""
        if self.target_name != "wheel" or not builder.zig_helps() or builder.compiler() is not None:
            return []
        return [builder.ZIGLANG] if _index_has_ziglang() else []

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, and take the library, or why there is none, into the wheel. An editable one reads it in place."""
        if self.target_name != "wheel":
            return
        reason = builder.build()
        if reason is not None:
            self.app.display_warning(reason)
        else:
            build_data["pure_python"] = False
            build_data["infer_tag"] = True
        if version != "editable":
            made = builder.LIBRARY if reason is None else builder.MISSING
            build_data["force_include"][str(builder.FOLDER / made)] = f"shardline/native/built/{made}"


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
