"""Who holds how much of the listener? Open connections, bytes of unfinished bodies, and of the heads of those who are
not known yet: by tenant and by address."""

from __future__ import annotations

from typing import Final

from gateway.http.errors import ApiError, Reason

_RETRY_S: Final = 2.0


class Account:
    """What one tenant, or one address, holds now."""

    __slots__ = ("bodies_bytes", "connections", "heads_bytes", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.connections = 0
        self.bodies_bytes = 0
        self.heads_bytes = 0
        """Of those of its connections on which nobody has shown a key."""


class Accounts:
    """The clients that hold any bytes, and how many each may hold. There are never more of them than connections."""

    def __init__(self, whose: str, connections_max: int, bodies_bytes_max: int) -> None:
        """`whose`: in words, for the client that is refused."""
        self._accounts: dict[str, Account] = {}
        self._whose = whose
        self.set(connections_max, bodies_bytes_max)

    def set(self, connections_max: int, bodies_bytes_max: int) -> None:
        """From now on each may hold this much. What is held stays."""
        self._connections_max = connections_max
        self._bodies_bytes_max = bodies_bytes_max

    def __len__(self) -> int:
        return len(self._accounts)

    def connect(self, name: str) -> Account:
        """The account of one more connection. ApiError: it has too many of them."""
        account = self._of(name)
        if account.connections >= self._connections_max:
            message = f"{self._whose} has {account.connections} connections open, and may have no more; close some"
            raise ApiError(Reason.TOO_MANY_AT_ONCE, message, retry_after_s=_RETRY_S)
        account.connections += 1
        return account

    def disconnect(self, account: Account) -> None:
        account.connections -= 1
        self._forget(account)

    def hold(self, name: str, body_bytes: int) -> None:
        """So many more bytes of an unfinished body. ApiError: it has too many of them (and these are counted)."""
        account = self._of(name)
        account.bodies_bytes += body_bytes
        if account.bodies_bytes > self._bodies_bytes_max:
            message = f"{self._whose} is sending too many large requests at once; send them one after another"
            raise ApiError(Reason.TOO_MANY_AT_ONCE, message, retry_after_s=_RETRY_S)

    def release(self, name: str, body_bytes: int) -> None:
        account = self._of(name)
        account.bodies_bytes -= body_bytes
        self._forget(account)

    def _of(self, name: str) -> Account:
        account = self._accounts.get(name)
        if account is None:
            account = self._accounts[name] = Account(name)
        return account

    def _forget(self, account: Account) -> None:
        if not account.connections and not account.bodies_bytes:
            self._accounts.pop(account.name, None)
