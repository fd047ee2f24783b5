"""Shardline's errors to gRPC statuses and back, in one place each way."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc

from shardline.errors import InternalError, ProtocolError, ShardlineError, UnreachableError, UsageError
from shardline.host.printable import printable

log = logging.getLogger("shardline.rpc")
F = TypeVar("F", bound=Callable[..., Any])
SENTENCE = 4000
"""Characters of an error that travel: gRPC takes one that is longer than its metadata for another error."""


async def _abort(servicer: Any, method: str, context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    # A servicer that counts what it refuses has this attribute.
    refused: Callable[[str, Exception], None] | None = getattr(servicer, "on_refused", None)
    if refused is not None:
        refused(method, error)
    if not isinstance(error, ShardlineError):
        # What we did not foresee is our defect: the caller gets no internals, the log gets everything.
        log.error("unexpected error in a call from %s", context.peer(), exc_info=error)
    # gRPC keeps what ended a call for a while; with its frames it would keep all that the call worked on.
    drop_frames(error)
    if isinstance(error, ShardlineError):
        await context.abort(getattr(grpc.StatusCode, error.grpc_status), str(error)[:SENTENCE])
    await context.abort(grpc.StatusCode.INTERNAL, f"{type(error).__name__} in this call; see the log of the task asked")
    raise AssertionError("abort always raises")


def drop_frames(error: BaseException) -> None:
    """Make an error let go of the frames it passed and of the errors before it, and so of all that those work on."""
    error.__traceback__ = error.__context__ = error.__cause__ = None


def unary(method: Callable[[Any, Any, Any], Awaitable[Any]]) -> Callable[[Any, Any, Any], Awaitable[Any]]:
    """Translate errors of an async handler with one reply."""

    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: Any) -> Any:
        try:
            return await method(self, request, context)
        except (grpc.aio.AbortError, grpc.RpcError):
            raise
        except Exception as error:
            await _abort(self, method.__name__, context, error)

    return handler


def stream(method: Callable[[Any, Any, Any], AsyncIterator[Any]]) -> Callable[[Any, Any, Any], AsyncIterator[Any]]:
    """Translate errors of an async handler with a stream of replies."""

    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            # Closed at once when the call ends early, so that nothing it holds outlives the call.
            generator: Any = method(self, request, context)
            async with contextlib.aclosing(generator) as replies:
                async for reply in replies:
                    yield reply
        except (grpc.aio.AbortError, grpc.RpcError):
            raise
        except Exception as error:
            await _abort(self, method.__name__, context, error)

    return handler


def writer(method: Callable[[Any, Any, Any], Awaitable[None]]) -> Any:
    """unary() for an async handler that writes a stream of replies to its context.

    For one that may be cancelled from within while a slow reader holds back a message: what it yields is sent outside
    of it, so it could not tell the reader why.
    """
    return unary(method)


def from_status(error: grpc.RpcError, *, peer: str, what: str, waited_s: float) -> ShardlineError:
    """The Shardline error for a failed call; `peer` is "ps/0 at host:port"."""
    code = error.code() if isinstance(error, grpc.Call) else grpc.StatusCode.UNKNOWN
    details = printable((error.details() or "") if isinstance(error, grpc.Call) else str(error))
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return UnreachableError(
            f"{peer} did not answer {what} within {waited_s:.1f} s ({code.name.lower()}: {details}); "
            f"is it running, and is the address right?"
        )
    if code is grpc.StatusCode.INTERNAL:
        return InternalError(f"{peer} failed in {what}: {details}")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return UsageError(f"{peer} refused {what}: {details}")
    return ProtocolError(f"{peer} refused {what}: {details} ({code.name.lower()})")
