"""Bytes and connections that each client holds of the listener, by tenant and by address.

Counted are open connections, bytes of unfinished bodies, and bytes of unfinished heads on connections without a key.
"""

from __future__ import annotations

from typing import Final

from gateway.http.errors import ApiError, Reason

_RETRY_S: Final = 2.0


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
        """Count bytes of an unfinished body, or count released ones off by a number below 0. Raise ApiError if the
        client has too many; the bytes stay counted until they are released."""
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
