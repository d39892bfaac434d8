"""Frames between workers and hub on a Unix socket: a length of four bytes, then one value as MessagePack.

A worker sends `[number, question, *arguments]` and gets `[number, answer]`. Number 0 marks unsolicited messages of the
hub: `[0, pool, content]`.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, cast

import msgspec

FRAME_BYTES_MAX: Final = 17 * 1024 * 1024
"""Bound on a frame. The largest content is a pool's learned state: 16 MiB."""
UNREAD_BYTES_MAX: Final = 2 * FRAME_BYTES_MAX
"""Unread bytes that show a hanging peer, whose connection is closed."""
LENGTH_BYTES: Final = 4

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class Frames(asyncio.Protocol):
    """An end of a connection. Subclasses handle frames in `received`."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self._buffer = bytearray()

    def received(self, value: list[Any]) -> None:
        """Handle a frame. A ValueError, TypeError or ArithmeticError closes the connection."""
        raise NotImplementedError

    def send(self, value: list[Any]) -> None:
        """Send a value. Do nothing on a closed connection."""
        if self.transport is None or self.transport.is_closing():
            return
        content = _encode(value)
        self.transport.write(len(content).to_bytes(LENGTH_BYTES, "big") + content)
        if self.transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
            self.transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's transport has another base class

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
