"""How do workers and hub speak on a Unix socket? In frames: a length of four bytes, then one value as MessagePack.

A worker sends `[number, what, *arguments]`, and gets `[number, answer]`. What the hub sends unasked is number 0: news,
as `[0, pool, content]`.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

import msgspec

FRAME_BYTES_MAX: Final = 17 * 1024 * 1024
"""What was learned of the apps of one pool is the largest that is said: 16 MiB."""
UNREAD_BYTES_MAX: Final = 2 * FRAME_BYTES_MAX
"""Who has not read so much has stopped: the connection is ended."""
LENGTH_BYTES: Final = 4

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Frames(asyncio.Protocol):
    """One end of a connection. `said` is what it does with what the other says."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._buffer = bytearray()

    def received(self, value: list[Any]) -> None:
        """The other end said this. A ValueError, TypeError or ArithmeticError ends the connection."""
        raise NotImplementedError

    def send(self, value: list[Any]) -> None:
        """Say this; nothing happens if the connection has ended."""
        if self.transport is None or self.transport.is_closing():
            return
        content = _encode(value)
        self.transport.write(len(content).to_bytes(LENGTH_BYTES, "big") + content)
        if self.transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's has another ancestor

    def data_received(self, data: bytes) -> None:
        buffer = self._buffer
        buffer += data
        begin = 0
        try:
            while len(buffer) - begin >= LENGTH_BYTES:
                length = int.from_bytes(buffer[begin : begin + LENGTH_BYTES], "big")
                if length > FRAME_BYTES_MAX:
                    raise ValueError(f"a frame of {length} bytes")
                end = begin + LENGTH_BYTES + length
                if len(buffer) < end:
                    break
                value = _decode(bytes(buffer[begin + LENGTH_BYTES : end]))
                begin = end
                if not isinstance(value, list):
                    raise ValueError("no list")
                self.received(value)
        except (ValueError, TypeError, ArithmeticError, RecursionError):
            if self.transport is not None:
                self.transport.abort()
        del buffer[:begin]
