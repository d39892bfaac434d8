"""The division of `memory_max` among the parts of a gateway.

`BASE_BYTES` are the process itself; the rest is divided by `PARTS`. Client input (names, prompts, bodies, connections)
fills tables and buffers. Their bounds follow from their part and from the bytes of one entry with the longest names.
docs/reference/memory.md is generated from this module, and a test measures each entry.
"""

from __future__ import annotations

from typing import Final, NamedTuple

MEMORY_MAX: Final = 448 << 20
"""Memory bound for a container of 512 MiB. The rest belongs to the kernel, for data in sockets and files."""
MEMORY_MAX_LEAST: Final = 192 << 20
BASE_BYTES: Final = 88 << 20
"""A process that serves and remembers nothing: 66 MB at the start, and modules loaded by the first requests."""
PARTS: Final = {
    "names": 0.31, "prompts": 0.08, "bodies": 0.29, "lines": 0.03, "results": 0.04, "connections": 0.15,
    "answers": 0.10,
}  # fmt: skip
"""Fractions of `memory_max` without `BASE_BYTES`."""
ALLOCATED: Final = 1.25
"""Memory of a process in relation to its entries: the allocator cannot return all free memory."""
CONNECTION_BYTES: Final = 20_000
"""An open stream, its connection to an engine, and a request of a few kB."""
READ_PART: Final = 0.35
"""Fraction of the part for bodies that reading one body takes."""
READ_TIMES: Final = 4
"""Memory of reading JSON, in multiples of its size: turns are copied, and the body may be rewritten."""
LINE_PART: Final = 0.25
"""Fraction of the part for batch lines that one line may take, so that lines of two other tenants have room."""
BODY_BYTES_MAX: Final = 32 << 20
JSON_BYTES_MAX: Final = 8 << 20
"""Reading this much JSON blocks the event loop for 30 ms if it is text, and for 70 ms in the worst case."""


class Table(NamedTuple):
    """A table with an entry for each of many names."""

    what: str
    entry_bytes: int
    """Size of an entry with the longest names, each in a copy of its own."""
    part: int
    """Names per entry."""
    of_pool: bool = False
    """True if each pool has a table, so that the names are divided among pools."""


TABLES: Final = {
    "flows": Table("a user of a tenant: its counter, its limits in two windows, what is usual for it", 5000, 1, True),
    "tenants": Table("a tenant with requests or contexts: what it uses", 2330, 2, True),
    "lengths": Table("the last 64 lengths of answers of one app", 2200, 16, True),
    "decisions": Table("one of the last decisions, for `explain`", 2260, 8, True),
    "interactions": Table("an open interaction, and what it is known by", 2400, 1),
    "ends": Table("one of the last requests that ended, for the page and `top`; half as many of tenants' own", 2050, 4),
    "quotas": Table("the counts of a tenant or a group for its quota, of a minute, a day and a month", 10_400, 4),
    "sums": Table("usage of one user in an hour, not yet written", 1260, 2),
    "users": Table("a tenant or a user of this hour, that is counted by itself in usage", 740, 1),
    "texts": Table("the lengths of a user's last 32 raw prompts", 2850, 16),
    "paces": Table("how soon the users of one app answer", 890, 16),
    "responses": Table("a stored response: whose it is, and which engine has it", 1130, 2),
    "rates": Table("a tenant or an address that asks too fast", 790, 4),
}
NAME_BYTES: Final = ALLOCATED * sum([table.entry_bytes / table.part for table in TABLES.values()])
BLOCK_BYTES: Final = 220
"""A cached block of a prompt."""


class MemoryBounds:
    """Bounds of all tables and buffers, by `memory_max` (bytes, at least `MEMORY_MAX_LEAST`) and the pools."""

    def __init__(self, memory_max: int, pools: int) -> None:
        rest = memory_max - BASE_BYTES
        part = {name: int(rest * share) for name, share in PARTS.items()}
        self.names = int(part["names"] / NAME_BYTES)
        """Names that each table in `TABLES` has an entry for, or for a `part` of them."""
        self.pools = pools
        self.blocks = part["prompts"] // int(ALLOCATED * BLOCK_BYTES) // pools
        self.connections = part["connections"] // CONNECTION_BYTES
        self.reading_bytes = int(part["bodies"] * READ_PART)
        """Memory for reading a body; bodies are read one after the other."""
        self.bodies_bytes = part["bodies"] - self.reading_bytes
        """All bodies that are being received, wait or run."""
        self.client_bodies_bytes = self.bodies_bytes * 3 // 4
        """Bodies of one tenant or address."""
        self.queue_bytes = self.bodies_bytes // 2
        self.body_bytes_most = min(self.reading_bytes, self.bodies_bytes // 2)
        """Largest value that may be configured for the largest body."""
        self.body_bytes = min(BODY_BYTES_MAX, self.body_bytes_most)
        """Largest body, unless configured."""
        self.json_bytes_most = self.reading_bytes // READ_TIMES
        """Largest value that may be configured for the largest JSON body."""
        self.json_bytes = min(JSON_BYTES_MAX, self.json_bytes_most)
        """Largest JSON body, unless configured."""
        self.lines_bytes = part["lines"]
        """Batch lines that run or wait at once."""
        self.line_bytes = int(part["lines"] * LINE_PART)
        """Largest batch line."""
        self.results_bytes = part["results"]
        """Results of batch lines until they are stored."""
        self.answers_bytes = part["answers"] // 2
        """Bytes of answers that clients have not read yet, and again for answers that are sent whole."""

    def size(self, table: str) -> int:
        """Return the bound of a table, per pool if each pool has one; at least 1."""
        found = TABLES[table]
        return max(1, self.names // found.part // (self.pools if found.of_pool else 1))


def memory_max_for(table: str, entries: int) -> int:
    """Return the least `memory_max` with which a table that no pool has of its own has room for so many entries."""
    return BASE_BYTES + int((entries + 1) * TABLES[table].part * NAME_BYTES / PARTS["names"])
