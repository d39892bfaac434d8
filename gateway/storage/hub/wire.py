"""Frames between workers and hub on a Unix socket: a length of four bytes, then one value as MessagePack.

A worker sends `[number, question, *arguments]` and gets `[number, answer]`. Number 0 marks unsolicited messages of the
hub: `[0, pool, content]`.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

import msgspec

FRAME_BYTES_MAX: Final = 17 * 1024 * 1024
"""Bound on a frame. The largest content is a pool's learned state: 16 MiB."""
UNREAD_BYTES_MAX: Final = 2 * FRAME_BYTES_MAX
"""Unread bytes that show a hanging peer, whose connection is closed."""
LENGTH_BYTES: Final = 4
BROKEN: Final = (OSError, EOFError, ValueError, TypeError, ArithmeticError, RecursionError)
"""Errors that end a connection: the peer has gone, or has sent what makes no sense."""

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(list[Any]).decode


async def receive(reader: asyncio.StreamReader) -> list[Any]:
    """Return the next value. Raise an error of `BROKEN` if none comes."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES))
    if length > FRAME_BYTES_MAX:
        raise ValueError(f"a frame of {length} bytes")
    return _decode(await reader.readexactly(length))


def send(writer: asyncio.StreamWriter, value: list[Any]) -> None:
    """Send a value. Do nothing on a closed connection."""
    if writer.is_closing():
        return
    content = _encode(value)
    writer.write(len(content).to_bytes(LENGTH_BYTES) + content)
    if writer.transport.get_write_buffer_size() > UNREAD_BYTES_MAX:
        writer.transport.abort()
