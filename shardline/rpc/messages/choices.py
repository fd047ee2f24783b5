"""Choices of steps: values to messages and back."""

from __future__ import annotations

from shardline.core.choices import Choices
from shardline.rpc.v1 import parameter_server_pb2


def choices_to_proto(choices: Choices) -> parameter_server_pb2.Choices | None:
    """The choices as a message; None if there are none."""
    if not choices.made:
        return None
    width = choices.width
    return parameter_server_pb2.Choices(first=choices.first, width=width, packed=choices.packed(width))


def choices_from_proto(message: parameter_server_pb2.Choices) -> Choices:
    """The choices of a message. Raises ProtocolError if they are malformed."""
    return Choices.unpacked(message.first, message.width, message.packed) if message.packed else Choices()
