"""While parameters are on their way, a module's tensors can be reached only through tables that wait for them."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from sys import getrefcount
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardline.client.exchange.shard_exchange import Interrupted, Restart, Stopped
from shardline.core.tensor_bytes import memory_uses
from shardline.data import Watch

log = logging.getLogger("shardline.client")

TABLES = ("_parameters", "_buffers")
"""Where an nn.Module keeps its own tensors, by attribute name."""


class Reach:
    """Counts who refers to a model's tensors besides its modules.

    To read a tensor, code needs a reference to it, or to another tensor over the same memory. Python counts references
    to the object, torch those from C++ and those to the memory. A tensor is *firm* if the only one besides our own is
    an entry of a module's table: then every reader has to ask that table. A list of parameters, a closure, a view, a
    scripted module or a living autograd graph makes a tensor *loose*.

    tensors: the model's own, from a container that holds each once. known: further containers that hold some of them,
    such as an optimizer's groups.
    """

    def __init__(
        self, model: nn.Module, tensors: Collection[torch.Tensor], known: Iterable[Collection[torch.Tensor]] = ()
    ) -> None:
        self._tensors = list(tensors)
        self.tables = list(tables_of(model))
        """Of all modules that the model has at first, with the names of their attributes."""
        self.loose: set[int] = set()
        """id() of each tensor that something else refers to, at the last look."""
        listed = Counter(id(item) for items in (tensors, *known) for item in items)
        if self._loose_at_first(listed):
            # What only garbage refers to is firm.
            gc.collect()
            self.loose = self._loose_at_first(listed)
        self.rebase()

    def _loose_at_first(self, listed: Mapping[int, int]) -> set[int]:
        counts, references = firm_counts()
        found = {
            id(item)
            for item, (python, *others) in zip(self._tensors, self._counts(), strict=True)
            if -1 in counts or (python - listed[id(item)], *others) != counts
        }
        return found | self._inside(number for number, held in enumerate(self._held()) if held != references)

    def rebase(self) -> None:
        """Count all present references as our own. Tensors that are loose now are so for good."""
        self._always = frozenset(self.loose)
        self._base = self._counts(), self._held()

    def look(self) -> None:
        """Find the tensors that are loose."""
        found = self._changed() | self._always
        if found - self.loose:
            # Young garbage only: it may come in each step, and going through all objects takes a tenth of a second.
            gc.collect(1)
            found = self._changed() | self._always
        self.loose = found

    def _changed(self) -> set[int]:
        counts, held = self._counts(), self._held()
        if (counts, held) == self._base:
            return set()
        found = {id(item) for item, now, then in zip(self._tensors, counts, self._base[0], strict=True) if now != then}
        found |= self._inside(n for n, (now, then) in enumerate(zip(held, self._base[1], strict=True)) if now != then)
        return found

    def _inside(self, tables: Iterable[int]) -> set[int]:
        return {id(value) for number in tables for value in self.tables[number][2].values()}

    def _counts(self) -> list[tuple[int, int, int, int]]:
        """References to each tensor: from Python besides tables (weak ones too), from C++, to its memory, to
        Python's object of its memory.
        """
        placed = Counter(id(value) for _, _, table in self.tables for value in table.values())
        return [
            (
                getrefcount(item) + weakref.getweakrefcount(item) - placed[id(item)],
                _count_native(item),
                memory_uses(item),
                getrefcount(item.untyped_storage()),
            )
            for item in self._tensors
        ]

    def _held(self) -> list[tuple[int, bool]]:
        """References to each table; whether its module still keeps its tensors there."""
        return [(getrefcount(table), module.__dict__.get(name) is table) for module, name, table in self.tables]


def tables_of(model: nn.Module) -> Iterator[tuple[nn.Module, str, dict[str, Any]]]:
    """Every module's tables that are ordinary dicts, with the names of their attributes."""
    for module in model.modules():
        for name in TABLES:
            table = module.__dict__.get(name)
            if type(table) is dict and table:
                yield module, name, table


# Not part of torch's interface: without it no tensor is firm.
_count_native: Callable[[torch.Tensor], int] = getattr(torch.Tensor, "_use_count", lambda _tensor: -1)


@functools.cache
def firm_counts() -> tuple[tuple[int, int, int, int], tuple[int, bool]]:
    """Counts of a tensor that only a module's table refers to, and of that table."""
    module = nn.Linear(1, 1, bias=False)
    probe = Reach.__new__(Reach)
    probe._tensors = list(module.parameters())
    probe.tables = list(tables_of(module))
    (counts,), (references,) = probe._counts(), probe._held()
    return counts, references


class Gate:
    """Keeps user code from reading a tensor before its values of the step have arrived.

    From shut() to open(), the tables in which the modules keep parameters and buffers are replaced by tables that wait
    for each tensor that they give out, on whichever thread. Since nothing else refers to these tensors, no reader can
    pass by: a function of torch.jit, a thread or torch.func gets them from Python code that asked the module. Tensors
    that something else refers to (see Reach) are waited for by shut(). A compiler would read the tables themselves, so
    the gate stays open in a process that compiles, and opens before a first compilation begins.

    tensors: of the plan, by number. wait_for: returns when these tensors contain the step's values; any thread may call
    it. waiting: whether there is anything to wait for.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        reach: Reach,
        *,
        wait_for: Callable[[Iterable[int]], None],
        waiting: Callable[[], bool],
    ) -> None:
        self._numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        self._reach = reach
        self._wait_for = wait_for
        self._waiting = waiting
        self._lock = threading.RLock()
        self._uses: dict[int, None] | None = None
        self._replaced: list[tuple[nn.Module, str, WaitingTable]] = []
        self._compiler = Compiler()
        self._told = False
        self._reads_nothing = 0
        """Identifier of the thread that is in unread(); 0 = none."""

    def why_not(self) -> str:
        """Why user code can't run while parameters are on their way, as the end of a sentence; "" if it can."""
        if self._compiler.used:
            return "torch.compile is in use, and its code reads parameters unseen"
        self.look()
        if len(self._reach.loose) == len(self._numbers):
            return "something besides the model's modules refers to each of its tensors, so they may be read unseen"
        return ""

    def tell_wait(self, reason: str, seconds: float) -> None:
        """Say once that parameters are waited for before forward passes, and for how long in this step."""
        if not self._told:
            self._told = True
            log.warning(
                "each forward pass waits for all parameters before it begins (%.0f ms in this step): %s",
                seconds * 1e3,
                reason,
            )

    def look(self) -> None:
        """Find tensors that something besides their modules has come to refer to."""
        self._reach.look()

    @property
    def loose(self) -> list[int]:
        """Numbers of the tensors that could be read unseen at the last look."""
        return sorted(self._numbers[key] for key in self._reach.loose if key in self._numbers)

    def shut(self) -> None:
        """Make readers wait from now on. Tensors that can be read unseen are waited for here."""
        self._replace()
        loose = self.loose
        if loose and self._waiting():
            if not self._told:
                self._told = True
                log.info(
                    "the next forward pass waits for %d of %d tensors before it begins, since something besides the "
                    "model's modules (such as a list or a view) refers to them",
                    len(loose),
                    len(self._numbers),
                )
            self._wait_for(loose)

    def open(self) -> None:
        """Give the modules their own tables back: everything has arrived, or is of no use any more."""
        self._restore()
        self._compiler.ignore(self._before_compiling)

    @contextlib.contextmanager
    def forward(self, uses: dict[int, None] | None = None) -> Iterator[None]:
        """Context manager around a forward pass; when it ends, everything has arrived.

        uses: collects the tensors' numbers in the order of their first use.
        """
        if uses is None:
            with self._whole_at_end():
                yield
            return
        if not self._compiler.used:
            self._uses = uses
            self._replace()
        try:
            yield
        finally:
            self._uses = None
            self.open()

    @contextlib.contextmanager
    def _whole_at_end(self) -> Iterator[None]:
        try:
            yield
        except Exception:
            # If the exchange failed, this may come of a thread that StepAgain has ended.
            if self._waiting():
                self._await_all()
            raise
        if self._waiting():
            # A backward pass may read them without asking a table.
            self._await_all()

    @contextlib.contextmanager
    def unread(self) -> Iterator[None]:
        """Context manager around our own code on this thread that gets tensors and reads no values."""
        self._reads_nothing = threading.get_ident()
        try:
            yield
        finally:
            self._reads_nothing = 0

    def _give_out(self, tensor: Any) -> None:
        """Wait for a tensor that a module is asked for."""
        number = self._numbers.get(id(tensor))
        if number is None or self._reads_nothing == threading.get_ident():
            return
        if self._uses is not None:
            self._uses[number] = None
        if self._waiting():
            with self._lock:
                self._wait_for((number,))

    def _await_all(self) -> None:
        with self._lock:
            self._wait_for(range(len(self._numbers)))

    def _before_compiling(self, *_args: object) -> None:
        """Called by torch's compiler before it looks at anything: open the gate."""
        if self._waiting():
            self._await_all()
        self._restore()

    def _replace(self) -> None:
        if self._replaced:
            return
        self._replaced = [
            (module, name, WaitingTable(table, self._give_out))
            for module, name, table in self._reach.tables
            if module.__dict__.get(name) is table
        ]
        for module, name, table in self._replaced:
            module.__dict__[name] = table
        self._compiler.tell(self._before_compiling)

    def _restore(self) -> None:
        replaced, self._replaced = self._replaced, []
        for module, name, table in replaced:
            if module.__dict__.get(name) is table:
                module.__dict__[name] = table.values_of_module


class Compiler:
    """torch's compiler (dynamo), as far as it can be watched. Its package is imported by any optimizer anyway."""

    def __init__(self) -> None:
        self._frames = importlib.import_module("torch._dynamo.eval_frame")
        self._events = importlib.import_module("torch._dynamo.callback").callback_handler
        self._used = False

    @property
    def used(self) -> bool:
        """True if something in this process has been given to it."""
        # Without a backend, an entry only keeps a function from being compiled. torch._dynamo.reset() empties the dict.
        backends = getattr(self._frames, "cached_backends", None)
        self._used = self._used or backends is None or any(one is not None for one in list(backends.values()))
        return self._used

    def tell(self, callback: Callable[..., None]) -> None:
        """Call this before a compilation begins."""
        self._events.register_start_callback(callback)

    def ignore(self, callback: Callable[..., None]) -> None:
        with contextlib.suppress(ValueError):
            self._events.remove_start_callback(callback)


if TYPE_CHECKING:
    _Dict = dict[str, Any]
else:

    class _Dict(MutableMapping, dict):
        """A dict whose methods are all made of the five below, instead of C code that passes them by."""


class WaitingTable(_Dict):
    """A module's table of tensors: waits for each before it gives it out.

    A dict for those who ask for its type, but the entries are elsewhere: C code that passes by its methods finds none.
    """

    def __init__(self, values: dict[str, Any], give_out: Callable[[Any], None]) -> None:
        self.values_of_module = values
        self._give_out = give_out

    def __getitem__(self, key: str) -> Any:
        value = self.values_of_module[key]
        if value is not None:
            self._give_out(value)
        return value

    def __setitem__(self, key: str, value: Any) -> None:
        self.values_of_module[key] = value

    def __delitem__(self, key: str) -> None:
        del self.values_of_module[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_of_module)

    def __reversed__(self) -> Iterator[str]:
        return reversed(self.values_of_module)

    def __len__(self) -> int:
        return len(self.values_of_module)

    def __contains__(self, key: object) -> bool:
        return key in self.values_of_module

    def copy(self) -> dict[str, Any]:
        """An ordinary dict of the same entries, all of which have arrived."""
        return dict(self.items())

    def __or__(self, other: Any) -> Any:
        return self.copy() | other

    def __ror__(self, other: Any) -> Any:
        return other | self.copy()

    def __ior__(self, other: Any) -> WaitingTable:  # type: ignore[override]
        self.values_of_module |= other
        return self

    def __repr__(self) -> str:
        return repr(self.copy())

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, (self.copy(),)


class StepAgain(BaseException):
    """The running step's parameters did not come, or the step is not wanted any more: the loop begins it again.

    A BaseException, so that it unwinds the user's loss function whatever that catches. cause: the error that ended the
    exchange.
    """

    def __init__(self, cause: Exception | None = None) -> None:
        super().__init__(cause)
        self.cause = cause


class BodyWaits:
    """What the loop's body waits for the previous step."""

    def __init__(self) -> None:
        self.seconds = 0.0
        """In the open step; set to 0 when it begins."""

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """Turn a failed exchange of the previous step into StepAgain, which ends the body of this one."""
        began_s = time.monotonic()
        try:
            yield
        except (Restart, Interrupted, Stopped) as error:
            raise StepAgain(error) from error
        finally:
            self.seconds += time.monotonic() - began_s


class StepWatch(Watch):
    """Keeps the gate during forward passes and reports the last backward pass.

    uses: see Gate.forward; called before every pass. expect(loss, samples): called right before the last backward pass.
    """

    def __init__(
        self,
        gate: Gate | None,
        uses: Callable[[], dict[int, None] | None],
        expect: Callable[[Callable[[], float], int], None],
    ) -> None:
        self._gate = gate
        self._uses = uses
        self._expect = expect

    def unread(self) -> AbstractContextManager[None]:
        return self._gate.unread() if self._gate is not None else contextlib.nullcontext()

    @contextlib.contextmanager
    def forward(self) -> Iterator[None]:
        if self._gate is None:
            yield
            return
        with self._gate.forward(self._uses()):
            yield

    def backward(self, loss: Callable[[], float], samples: int) -> None:
        self._expect(loss, samples)
