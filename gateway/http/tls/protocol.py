"""TLS between a client and its `Connection`: encrypted on the wire, plain to the connection, with no buffer between.

asyncio's own TLS creates a connection only after the handshake, so connections could not be counted before. It has a
second buffer, which no limit covers, and no half-close. Here the wire's buffer is the only one, as without TLS.

Received bytes go wire -> `_arrived` -> `_seal` -> `Connection`, sent bytes `Connection` -> `_seal` -> `_sealed` ->
wire.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Iterable
from typing import Final, cast

from backends.tls_contexts import what_failed
from gateway.http.connection import Connection
from gateway.http.errors import ApiError, Reason
from gateway.http.server import HttpServer
from gateway.http.sockets import peer_of
from gateway.http.tls.certificates import Certificates

_RECORD_BYTES: Final = 16384
"""Most bytes of one TLS record, so of one read."""
_OF_THE_WIRE: Final = (
    "abort", "get_extra_info", "get_write_buffer_size", "is_closing", "pause_reading", "resume_reading",
    "set_write_buffer_limits",
)  # fmt: skip


class TlsProtocol(asyncio.Protocol):
    """Server side of one TLS connection. The `Connection` counts toward the connection limits from the TCP accept, and
    receives bytes after the handshake.

    A client whose handshake fails gets no answer, because the client could not read it. The failure is counted and
    logged like a malformed request; a client that only connects and goes is not.
    """

    __slots__ = (
        "_arrived", "_connection", "_is_established", "_is_in_handshake", "_seal", "_sealed", "_server", "_wire",
    )  # fmt: skip

    def __init__(self, server: HttpServer, certificates: Certificates) -> None:
        self._server = server
        self._arrived = ssl.MemoryBIO()
        self._sealed = ssl.MemoryBIO()
        self._seal = certificates.context.wrap_bio(self._arrived, self._sealed, server_side=True)
        self._connection = Connection(server)
        self._is_established = False
        self._is_in_handshake = False
        """Whether a handshake has begun and has not ended."""

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._wire = cast(asyncio.Transport, transport)
        self._connection.connection_made(TlsTransport(self._wire, self._seal, self._sealed))

    def data_received(self, data: bytes) -> None:
        self._arrived.write(data)
        if not self._is_established and not self._wire.is_closing():
            self._continue_handshake()
        if self._is_established:
            self._decrypt(self._connection)

    def eof_received(self) -> None:
        self._is_in_handshake = False
        self._connection.eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._is_in_handshake and exc is None:
            self._refuse(ApiError(Reason.CLIENT_TOO_SLOW, "TLS was not agreed on in time."))
        self._connection.connection_lost(exc)

    def pause_writing(self) -> None:
        self._connection.pause_writing()

    def resume_writing(self) -> None:
        self._connection.resume_writing()

    def _continue_handshake(self) -> None:
        """Take the next step of the handshake. Refuse the client if the handshake fails."""
        fault: ssl.SSLError | None = None
        self._is_in_handshake = True
        try:
            self._seal.do_handshake()
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError as error:
            fault = error
        else:
            self._is_established, self._is_in_handshake = True, False
        self._wire.write(self._sealed.read())  # after a fault the alert that says why
        if fault is not None:
            self._refuse(ApiError(Reason.MALFORMED_HTTP, f"TLS was not agreed on: {what_failed(fault)}."))

    def _decrypt(self, connection: Connection) -> None:
        """Hand the content of all complete records to the connection."""
        pieces: list[bytes] = []
        has_ended = False
        try:
            while self._arrived.pending or self._seal.pending():  # an empty read costs more than this check
                piece = self._seal.read(_RECORD_BYTES)
                has_ended = not piece
                if has_ended:
                    break
                pieces.append(piece)
        except ssl.SSLWantReadError:
            pass
        except ssl.SSLError:
            self._wire.abort()  # no later byte can be decrypted
            return
        if self._sealed.pending:
            self._reply()
        if pieces:
            connection.data_received(pieces[0] if len(pieces) == 1 else b"".join(pieces))
        if has_ended:
            connection.eof_received()

    def _reply(self) -> None:
        """Send TLS's own answer, such as one to a key update. Abort if the client asks again and again and takes no
        answer."""
        if self._wire.get_write_buffer_size() > self._server.limits.write_buffer_bytes:
            self._wire.abort()
        else:
            self._wire.write(self._sealed.read())

    def _refuse(self, error: ApiError) -> None:
        """Record a client without TLS, and end its connection."""
        self._server.on_refused(self._server.unread_request(peer_of(self._wire)), error)
        self.eof_received()


class TlsTransport(asyncio.Transport):
    """The encrypting transport of a `Connection`. All but writing and closing is done by the wire's own methods."""

    def __init__(self, wire: asyncio.Transport, seal: ssl.SSLObject, sealed: ssl.MemoryBIO) -> None:
        super().__init__()
        self._wire = wire
        self._seal = seal
        self._sealed = sealed
        for name in _OF_THE_WIRE:
            setattr(self, name, getattr(wire, name))

    def write(self, data: bytes | bytearray | memoryview) -> None:
        try:
            self._seal.write(data)  # a memory BIO takes all of it
        except ssl.SSLError:
            self._wire.abort()  # the peer has ended TLS with an alert
        else:
            self._wire.write(self._sealed.read())

    def writelines(self, list_of_data: Iterable[bytes | bytearray | memoryview]) -> None:
        self.write(b"".join(list_of_data))  # in as few records as possible

    def write_eof(self) -> None:
        """End TLS, but not the wire's sending side: some clients drop unread data when that ends."""
        self._send_end()

    def close(self) -> None:
        if not self._wire.is_closing():
            self._send_end()
        self._wire.close()

    def _send_end(self) -> None:
        """Send TLS's end, which shows that nothing is missing."""
        try:
            self._seal.unwrap()
        except ssl.SSLError:
            pass  # the peer has not ended its side, which is not awaited
        if self._sealed.pending:  # the first call only
            self._wire.write(self._sealed.read())
