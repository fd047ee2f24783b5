"""Wrapping of a gRPC server's call handlers, for interceptors."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc

_MAKERS = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


class HandlerCache:
    """Wraps each of a server's handlers once instead of at every call."""

    def __init__(self, wrap: Callable[[str, Any], Any]) -> None:
        """wrap(method, handler) gives the handler to use."""
        self._wrap = wrap
        self._known: dict[str, tuple[Any, Any]] = {}
        """(handler, wrapped handler) by method. Only existing methods, so that callers can't fill it."""

    def get(self, method: str, handler: Any) -> Any:
        """The wrapped handler; None if there is none."""
        if handler is None:
            return None
        known = self._known.get(method)
        if known is None or known[0] is not handler:
            known = self._known[method] = (handler, self._wrap(method, handler))
        return known[1]


def behavior_of(handler: Any) -> Any:
    """The function that serves the call."""
    if handler.request_streaming:
        return handler.stream_stream if handler.response_streaming else handler.stream_unary
    return handler.unary_stream if handler.response_streaming else handler.unary_unary


def same_kind(handler: Any, behavior: Any, *, deserializer: Any) -> Any:
    make = _MAKERS[handler.request_streaming, handler.response_streaming]
    return make(behavior, request_deserializer=deserializer, response_serializer=handler.response_serializer)


def checked(handler: Any, check: Callable[[Any], Awaitable[None]]) -> Any:
    """The handler with a check(context) before it, which aborts calls that may not be served."""
    inner = behavior_of(handler)

    # gRPC distinguishes handlers that yield their replies from those that return or write them.
    if inspect.isasyncgenfunction(inner):

        async def replies(request: Any, context: Any) -> AsyncIterator[Any]:
            await check(context)
            async with contextlib.aclosing(inner(request, context)) as answer:
                async for reply in answer:
                    yield reply

        outer: Any = replies
    else:

        async def reply(request: Any, context: Any) -> Any:
            await check(context)
            return await inner(request, context)

        outer = reply
    return same_kind(handler, outer, deserializer=handler.request_deserializer)
