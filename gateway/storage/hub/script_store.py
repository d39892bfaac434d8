"""The store of one pool in this process: the script that Redis runs, on a table of Lua instead of a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from lupa.lua51 import LuaError, LuaRuntime, lua_type

from policies.replicas.messages import ReplicaReport

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(ReplicaReport).decode
_COMMANDS, _SCRIPT = [
    (Path(__file__).parent / file).read_text(encoding="utf-8")
    for file in ("redis_commands.lua", "../redis/exchange.lua")
]


class ScriptStore:
    """The store of the gateways of one pool, or of the limits and interactions of all pools."""

    def __init__(self) -> None:
        self.lua = LuaRuntime(register_eval=False, register_builtins=False)
        self._run = self.lua.execute(_COMMANDS)
        self._script = self.lua.compile(_SCRIPT)

    def exchange(self, me: str, number: int, report: bytes, now_ms: int) -> bytes:
        """Return the reply to the report of one gateway, both as MessagePack.

        Raise ValueError for a report with a number that cannot be counted.
        """
        arguments = self.lua.table_from([me, number, _decode(report)], recursive=True)
        try:
            return _encode(_plain(self._run(self._script, arguments, now_ms)))
        except LuaError as error:
            raise ValueError(str(error).partition("\n")[0]) from None

    def leave(self, me: str) -> None:
        """Remove a gateway that is gone, with its part of every engine."""
        self.lua.globals().redis.call("HDEL", "replicas", me)


def _plain(value: Any) -> Any:
    """Return a table of Lua as a list, and any other value as it is."""
    return [_plain(each) for each in value.values()] if lua_type(value) == "table" else value
