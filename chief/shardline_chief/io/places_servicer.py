"""The gRPC service that assigns indices: see places.proto."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc

from shardline.cluster import format_address, parse_address
from shardline.errors import ForbiddenError, ProtocolError
from shardline.rpc import errors as rpc_errors
from shardline.rpc.auth.access import Access
from shardline.rpc.auth.rights import joining_refusal
from shardline.rpc.v1 import places_pb2, places_pb2_grpc
from shardline_chief.io.control import Control

PLACES = "shardline.rpc.v1.Places"
TAKE = f"/{PLACES}/Take"
MAX_NAME = 256


class PlacesServicer(places_pb2_grpc.PlacesServicer):
    """Serves Places for one Control."""

    def __init__(self, control: Control, access: Access) -> None:
        self._control = control
        self._access = access

    @rpc_errors.unary
    async def Take(self, request: places_pb2.PlaceRequest, context: Any) -> places_pb2.PlaceReply:
        """An index, or why there is none."""
        for what, text in (("role", request.role), ("address", request.address)):
            if len(text) > MAX_NAME:
                raise ProtocolError(f"Take: {what} has {len(text)} characters; the limit is {MAX_NAME}")
        refusal = joining_refusal(request.role, self._access.caller(TAKE, context))
        if refusal:
            raise ForbiddenError(f"no index for {request.address}: {refusal}")
        # Normalized: a returning task is recognized by its address, and port 0, which many may send, by its form.
        address = format_address(*parse_address(request.address, "Take: the address"))
        answer = await asyncio.wrap_future(
            self._control.call(lambda now_s: self._control.program.place(request.role, address, now_s))
        )
        return places_pb2.PlaceReply(task=answer.task, reason=answer.reason, retry=answer.retry)


def register_places(control: Control, access: Access) -> Callable[[grpc.aio.Server], None]:
    """Registration function for RpcServer."""
    return lambda server: places_pb2_grpc.add_PlacesServicer_to_server(PlacesServicer(control, access), server)
