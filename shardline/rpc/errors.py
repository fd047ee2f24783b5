"""Converts Shardline's errors to gRPC statuses and back."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NoReturn, TypeVar

import grpc

from shardline.errors import InternalError, ProtocolError, ShardlineError, UnreachableError, UsageError, as_error
from shardline.host.printable import printable, unicode

log = logging.getLogger("shardline.rpc")
F = TypeVar("F", bound=Callable[..., Any])
OF_GRPC = (grpc.aio.BaseError, grpc.RpcError)
"""Errors that gRPC handles: that a call was aborted, or is still read when the server has stopped."""
SENTENCE = 4000
"""Most characters of an error that are sent: gRPC replaces one that is too long for its metadata by another error."""


async def _abort(servicer: Any, method: str, context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    count_refusal(servicer, method, error)
    code, sentence = status_of(error, context.peer())
    # gRPC keeps the error for a while, and its frames would keep alive everything that the call used.
    drop_frames(error)
    await context.abort(code, sentence)
    raise AssertionError("abort always raises")


def count_refusal(servicer: Any, method: str, error: Exception) -> None:
    """Tell a servicer that counts refusals, which has the attribute on_refused, of an error that ends a call."""
    refused: Callable[[str, Exception], None] | None = getattr(servicer, "on_refused", None)
    if refused is not None:
        refused(method, error)


def status_of(error: Exception, peer: str) -> tuple[grpc.StatusCode, str]:
    """Status and sentence for the caller of a call that this error ended. peer: the caller, for the log."""
    found = as_error(error)
    if found is not None:
        return getattr(grpc.StatusCode, found.grpc_status), unicode(str(found))[:SENTENCE]
    # An unforeseen error is a bug of ours: the caller gets no internals, the log gets everything.
    log.error("unexpected error in a call from %s", peer, exc_info=error)
    return grpc.StatusCode.INTERNAL, f"{type(error).__name__} in this call; see the log of the task called"


def drop_frames(error: BaseException) -> None:
    """Drop an error's traceback and its causes, and with them everything that their frames keep alive."""
    error.__traceback__ = error.__context__ = error.__cause__ = None


def unary(method: Callable[[Any, Any, Any], Awaitable[Any]]) -> Callable[[Any, Any, Any], Awaitable[Any]]:
    """Convert errors of an async handler with one reply."""

    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: Any) -> Any:
        try:
            return await method(self, request, context)
        except OF_GRPC:
            raise
        except Exception as error:
            await _abort(self, method.__name__, context, error)

    return handler


def stream(method: Callable[[Any, Any, Any], AsyncIterator[Any]]) -> Callable[[Any, Any, Any], AsyncIterator[Any]]:
    """Convert errors of an async handler with a stream of replies."""

    @functools.wraps(method)
    async def handler(self: Any, request: Any, context: Any) -> AsyncIterator[Any]:
        try:
            # Closed as soon as the call ends, so that nothing it uses outlives the call.
            generator: Any = method(self, request, context)
            async with contextlib.aclosing(generator) as replies:
                async for reply in replies:
                    yield reply
        except OF_GRPC:
            raise
        except Exception as error:
            await _abort(self, method.__name__, context, error)

    return handler


def writer(method: Callable[[Any, Any, Any], Awaitable[None]]) -> Any:
    """Like unary(), for an async handler that writes a stream of replies to its context.

    For handlers that may be cancelled from within while a slow reader blocks a message: a yielded message is sent
    outside of the handler, which then could not send the reader the reason.
    """
    return unary(method)


async def write(context: Any, message: Any, reader_s: float) -> None:
    """Send one message of an answer. Raises UnreachableError if the caller reads nothing for reader_s seconds.

    Send the initial metadata before: if they went with the first message, gRPC could not end the call in mid-write.
    """
    try:
        async with asyncio.timeout(reader_s):
            await context.write(message)
    except TimeoutError:
        sentence = f"the call was ended: its caller read nothing of the answer for {reader_s:g} s"
        raise UnreachableError(sentence) from None


def from_status(error: grpc.RpcError, *, peer: str, what: str, waited_s: float) -> ShardlineError:
    """The Shardline error for a failed call. peer: such as "ps/0 at host:port". waited_s: seconds waited."""
    code, details = code_and_details(error)
    return from_code(code, details, peer=peer, what=what, waited_s=waited_s)


def code_and_details(error: grpc.RpcError) -> tuple[grpc.StatusCode, str]:
    """Status and sentence of a failed call."""
    if isinstance(error, grpc.Call):
        return error.code(), error.details() or ""
    return grpc.StatusCode.UNKNOWN, str(error)


def from_code(code: grpc.StatusCode, details: str, *, peer: str, what: str, waited_s: float) -> ShardlineError:
    details = printable(details)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED):
        return UnreachableError(
            f"{peer} did not answer {what} within {waited_s:.1f} s ({code.name.lower()}: {details}); "
            "is it running, and is the address right?"
        )
    if code is grpc.StatusCode.INTERNAL:
        return InternalError(f"{peer} failed in {what}: {details}")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return UsageError(f"{peer} refused {what}: {details}")
    return ProtocolError(f"{peer} refused {what}: {details} ({code.name.lower()})")
