"""Answers to callers that may read nothing of them: what they hold is given back within their time."""

from __future__ import annotations

import asyncio
from typing import Any

from shardline.errors import UnreachableError


async def write_within(context: Any, message: Any, reader_s: float) -> None:
    """Write one message of an answer. Raises UnreachableError if the caller reads nothing for reader_s seconds.

    Send the call's initial metadata before a message that may have to wait: if they were sent with it, gRPC could not
    end the call in mid-write.
    """
    try:
        async with asyncio.timeout(reader_s):
            await context.write(message)
    except TimeoutError:
        raise UnreachableError(
            f"the call was ended: its caller read nothing of the answer for {reader_s:g} s"
        ) from None
