"""While parameters are on their way, a module's tensors can be reached only through tables that wait for them."""

from __future__ import annotations

import contextlib
import importlib
import logging
import threading
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from shardline.client.overlap.reach import Reach

log = logging.getLogger("shardline.client")


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
        """Don't call this any more."""
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
