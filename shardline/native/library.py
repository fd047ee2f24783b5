"""Which library of kernels is in use, and at which level of the processor.

Chosen once, when this is imported. SHARDLINE_NATIVE=0 turns it off; the name of a level (sse2, avx2, avx512, neon)
takes that one instead of the best; a path with a slash loads that library. Calls let go of the interpreter's lock.
"""

from __future__ import annotations

import ctypes
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

VARIABLE = "SHARDLINE_NATIVE"
ABI = 11
"""Of native/shardline.c: a library of other sources is not used."""
BUILT = Path(__file__).parent / "built" / "libshardline.so"
_REBUILD = "run `make install` or `python native/build.py`"

_ADDRESS, _COUNT, _NUMBER = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_double
_PARTS = (_ADDRESS, _ADDRESS, _COUNT, _COUNT)
_SLOTS = (_ADDRESS, _ADDRESS, _COUNT, _ADDRESS, _COUNT)
_ROWS = (_ADDRESS, _ADDRESS, _COUNT, _ADDRESS, _ADDRESS, _COUNT, _ADDRESS)


class SgdStep(ctypes.Structure):
    """`struct sgd_step` of native/kernels.h."""

    _fields_ = (
        *((name, _NUMBER) for name in ("rate", "momentum", "share", "weight_decay")),
        *((name, ctypes.c_int) for name in ("nesterov", "maximize", "first", "fused", "away")),
    )


class AdamStep(ctypes.Structure):
    """`struct adam_step` of native/kernels.h."""

    _fields_ = (
        *((n, _NUMBER) for n in ("rate", "share", "beta2", "rest", "root", "eps", "weight_decay", "keep")),
        *((name, ctypes.c_int) for name in ("maximize", "fused", "away")),
    )


def _function(result: Any, *arguments: Any) -> Any:
    return ctypes.CFUNCTYPE(result, *arguments)


class _Table(ctypes.Structure):
    """`struct kernels` of native/kernels.h."""

    _fields_ = (
        ("fma", ctypes.c_int),
        *((f"magnitude{kind}", _function(_NUMBER, _ADDRESS, _COUNT)) for kind in ("_fp16", "_bf16", 32, 64)),
        *((f"copies{bits}", _function(_NUMBER, *(_ADDRESS,) * 3, _COUNT, ctypes.c_int)) for bits in (32, 64)),
        ("fingerprint", _function(ctypes.c_uint64, _ADDRESS, _COUNT)),
        ("digest_begin", _function(None, _ADDRESS)),
        ("digest_more", _function(None, _ADDRESS, _ADDRESS, _COUNT)),
        ("digest_end", _function(ctypes.c_uint64, _ADDRESS)),
        *((f"sum{bits}", _function(None, _ADDRESS, _ADDRESS, _COUNT, _COUNT)) for bits in (32, 64)),
        *((f"sgd{bits}", _function(None, *(_ADDRESS,) * 4, _COUNT, _ADDRESS)) for bits in (32, 64)),
        *((f"moments{bits}", _function(None, *(_ADDRESS,) * 5, _COUNT, _ADDRESS)) for bits in (32, 64)),
        *((f"adam{bits}", _function(None, *(_ADDRESS,) * 4, _COUNT, _ADDRESS)) for bits in (32, 64)),
        *((name, _function(None, _ADDRESS, _ADDRESS, _COUNT)) for name in ("to_bf16", "from_bf16")),
        *((f"int8_{way}", _function(ctypes.c_int, *_PARTS)) for way in ("encode", "decode")),
        *((name, _function(None, *_PARTS)) for name in ("pack", "unpack")),
        ("signs", _function(_COUNT, *(_ADDRESS,) * 3, _COUNT)),
        *(
            (name, _function(None, *(_ADDRESS,) * arrays, ctypes.c_float, ctypes.c_float, _COUNT))
            for name, arrays in (("either", 2), ("without", 3))
        ),
        *((name, _function(ctypes.c_int, *_PARTS)) for name in ("tops", "norms")),
        ("rounded", _function(None, *(_ADDRESS,) * 3, _COUNT, _COUNT, ctypes.c_int, ctypes.c_int, ctypes.c_uint64)),
        ("ternary", _function(None, _ADDRESS, _ADDRESS, ctypes.c_float, _COUNT, ctypes.c_uint64)),
        ("largest", _function(None, *_PARTS)),
        *((f"slots_{name}", _function(None, *_SLOTS)) for name in ("find", "put", "drop")),
        ("rows_check", _function(_COUNT, _ADDRESS, *(_COUNT,) * 3)),
        ("rows_gather", _function(None, *(_ADDRESS,) * 3, _COUNT, _COUNT)),
        ("rows_merge", _function(_COUNT, *(_ADDRESS, _COUNT) * 3, _COUNT)),
        *(
            (f"first_{init}", _function(None, _ADDRESS, _ADDRESS, _COUNT, _COUNT, ctypes.c_uint64, ctypes.c_float))
            for init in ("uniform", "normal")
        ),
        *((f"rows_{rule}", _function(None, *_ROWS)) for rule in ("sgd", "rowwise_adagrad", "adagrad", "adam", "ftrl")),
    )


@dataclass(frozen=True, eq=False)
class Level:
    """The kernels of one level of the processor. Addresses are given as numbers, sizes in elements."""

    name: str
    fma: bool
    """Products can be added with one rounding."""
    call: dict[str, Any]
    """The kernels by name: `struct kernels` of native/kernels.h says what they take."""
    table: int
    """Address of the `struct kernels`."""


@dataclass
class _State:
    levels: dict[str, Level]
    """Those that this machine can run, the best last."""
    reason: str
    """Why there is none."""
    level: Level | None = None
    library: ctypes.CDLL | None = None


def _load(path: Path) -> _State:
    if not path.exists():
        missing = path.with_name("missing.txt")
        return _State({}, missing.read_text().strip() if missing.exists() else f"they were not built; {_REBUILD}")
    try:
        library = ctypes.CDLL(str(path))
        if library.shardline_abi() != ABI:
            return _State({}, f"{path} was built from other sources; {_REBUILD}")
    except (OSError, AttributeError) as error:
        return _State({}, f"{error}; {_REBUILD}")
    library.shardline_name.restype = ctypes.c_char_p
    library.shardline_kernels.restype = ctypes.POINTER(_Table)
    levels = {}
    for number in range(library.shardline_best() + 1):
        table = library.shardline_kernels(number).contents
        name = library.shardline_name(number).decode()
        call = {field[0]: getattr(table, field[0]) for field in _Table._fields_ if field[0] != "fma"}
        levels[name] = Level(name, bool(table.fma), call, ctypes.addressof(table))
    return _State(levels, "", library=library)


def _choose(state: _State, wanted: str) -> None:
    if wanted == "0":
        state.reason = f"{VARIABLE}=0"
    elif wanted in state.levels:
        state.level = state.levels[wanted]
    elif wanted not in ("", "1") and "/" not in wanted:
        state.reason = state.reason or f"{VARIABLE}={wanted!r} is not one of 0, 1, {', '.join(state.levels)}"
    elif state.levels:
        state.level = list(state.levels.values())[-1]


_wanted = os.environ.get(VARIABLE, "")
_state = _load(Path(_wanted) if "/" in _wanted else BUILT)
_choose(_state, _wanted)


def level() -> Level | None:
    """The level in use; None = torch computes."""
    return _state.level


def functions() -> ctypes.CDLL | None:
    """The library itself, for what is alike at every level; None if it is not in use."""
    return _state.library if _state.level is not None else None


def levels() -> tuple[str, ...]:
    """Names of the levels that this machine can run, the best last."""
    return tuple(_state.levels)


def use(name: str | None) -> None:
    """Use this level from now on, for tests: one of levels(); None = torch computes."""
    _state.level = None if name is None else _state.levels[name]


def describe() -> str:
    """What is in use, or why nothing is, for `shardline --version`."""
    return f"native kernels: {_state.level.name}" if _state.level else f"native kernels: none ({_state.reason})"
