"""Limits of the listener, and bytes and connections that each client holds of it, by tenant and by address.

Counted are open connections, bytes of bodies until their answers begin, and bytes of unfinished heads on connections
without a key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from gateway.http.errors import ApiError, Reason

_RETRY_S: Final = 2.0


@dataclass(slots=True, frozen=True)
class ServerLimits:
    """The limits of one server. Limits per client hold for each tenant and for each address."""

    header_bytes_max: int = 65536
    """The head of one request; also all unfinished heads from one address on connections without a key, together."""
    headers_count_max: int = 200
    target_bytes_max: int = 16384
    body_bytes_max: int = 33554432
    bodies_bytes_max: int = 1 << 30
    """All bodies whose answers have not begun, over all clients."""
    answers_bytes_max: int = 1 << 28
    """Unsent answers of all clients that read too slowly, together."""
    client_bodies_bytes_max: int = 1 << 28
    """Bodies of one tenant, and bodies from one address."""
    connections_max: int = 20000
    client_connections_max: int = 10000
    """Connections of one tenant, and connections from one address."""
    client_head_s: float = 10.0
    """Time from a request's first byte, or from the connection's start, to the end of the head."""
    client_body_s: float = 300.0
    """Time from the end of the head to the end of the body."""
    body_grace_s: float = 20.0
    """Time that any body may take; each received byte adds time at `client_body_bytes_per_s`."""
    client_body_bytes_per_s: float = 1000.0
    client_idle_s: float = 75.0
    client_stall_s: float = 60.0
    """Time for which a client may take none of its unsent data."""
    linger_s: float = 5.0
    """Time after a last answer for which further bytes of the client are read and dropped, so that it sees the
    answer."""
    write_buffer_bytes: int = 65536
    pipelined_bytes_max: int = 65536


class Account:
    """Connections and bytes that one tenant or one address has open now."""

    __slots__ = ("bodies_bytes", "connections", "heads_bytes", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.connections = 0
        self.bodies_bytes = 0
        self.heads_bytes = 0
        """Bytes of unfinished heads on those connections on which no key has been shown."""


class Accounts:
    """The accounts of all clients that hold anything, and the bounds of each. There are at most as many as
    connections."""

    def __init__(self, whose: str, connections_max: int, bodies_bytes_max: int) -> None:
        """Create an empty table. `whose` names the client in the message that refuses it."""
        self._accounts: dict[str, Account] = {}
        self._whose = whose
        self.set(connections_max, bodies_bytes_max)

    def set(self, connections_max: int, bodies_bytes_max: int) -> None:
        """Replace the bounds of each client. Present holdings stay."""
        self._connections_max = connections_max
        self._bodies_bytes_max = bodies_bytes_max

    def __len__(self) -> int:
        return len(self._accounts)

    def connect(self, name: str) -> Account:
        """Count a connection and return its account. Raise ApiError if the client has too many connections."""
        account = self._of(name)
        if account.connections >= self._connections_max:
            message = f"{self._whose} has {account.connections} connections open, and may have no more; close some"
            raise ApiError(Reason.TOO_MANY_AT_ONCE, message, retry_after_s=_RETRY_S)
        account.connections += 1
        return account

    def disconnect(self, account: Account) -> None:
        """Count the end of a connection. Forget the account if nothing of it is left."""
        account.connections -= 1
        self._forget(account)

    def hold(self, name: str, body_bytes: int) -> None:
        """Count bytes of a body whose answer has not begun, or count released ones off by a number below 0.

        Raise ApiError if the client has too many; the bytes stay counted until they are released.
        """
        account = self._of(name)
        account.bodies_bytes += body_bytes
        if body_bytes <= 0:
            self._forget(account)
        elif account.bodies_bytes > self._bodies_bytes_max:
            message = f"{self._whose} is sending too many large requests at once; send them one after another"
            raise ApiError(Reason.TOO_MANY_AT_ONCE, message, retry_after_s=_RETRY_S)

    def _of(self, name: str) -> Account:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(name)
        return account

    def _forget(self, account: Account) -> None:
        if not account.connections and not account.bodies_bytes:
            self._accounts.pop(account.name, None)
