"""How much may each part of a gateway hold, so that all of them together stay within `memory_max`?

`memory_max` is divided: `BASE_BYTES` are the process itself, and the rest goes to the parts in `PARTS`. What a client
invents (names, prompts, bodies, connections) fills tables and buffers whose bounds follow from that, by the bytes that
one entry takes with the longest names. docs/reference/memory.md is made from here, and a test measures each entry.
"""

from __future__ import annotations

from typing import Final, NamedTuple

MEMORY_MAX: Final = 448 << 20
"""For a container of 512 MiB: the rest is the kernel's, which holds what is on its way through sockets and to files."""
MEMORY_MAX_LEAST: Final = 192 << 20
BASE_BYTES: Final = 88 << 20
"""A process that serves and has nothing to remember: 66 MB at the start, and what is loaded with the first requests."""
PARTS: Final = {
    "names": 0.31, "prompts": 0.08, "bodies": 0.29, "lines": 0.03, "results": 0.04, "connections": 0.15,
    "answers": 0.10,
}  # fmt: skip
"""Of `memory_max` without `BASE_BYTES`."""
ALLOCATED: Final = 1.25
"""Memory that a process has over what its entries take: the allocator cannot give back all that is free."""
CONNECTION_BYTES: Final = 20_000
"""An open stream, with its connection to an engine; and a request of a few kB."""
READ_PART: Final = 0.35
"""Of what is for bodies: what reading one takes beside it."""
READ_TIMES: Final = 4
"""Reading JSON takes memory of at most this many times its size beside it, since its turns are copied and it may be
written anew."""
LINE_PART: Final = 0.25
"""Of what is for lines of batches: a larger line would find no room beside those of two other tenants."""
BODY_BYTES_MAX: Final = 32 << 20
JSON_BYTES_MAX: Final = 8 << 20
"""Reading so much keeps the event loop for 30 ms if it is text, and for 70 ms at most, whatever it holds."""


class Table(NamedTuple):
    """What is remembered of each of many names."""

    what: str
    entry_bytes: int
    """With the longest names, each in a copy of its own."""
    part: int
    """One entry for so many names."""
    of_pool: bool = False
    """Each pool has one: the names are divided among them."""


TABLES: Final = {
    "flows": Table("a user of a tenant: its counter, its limits in two windows, what is usual for it", 5000, 1, True),
    "tenants": Table("a tenant with recent requests: what it holds", 810, 2, True),
    "lengths": Table("the last 64 lengths of answers of one app", 2200, 16, True),
    "decisions": Table("one of the last decisions, for `explain`", 2200, 8, True),
    "interactions": Table("an open interaction, and what it is known by", 2300, 1),
    "ends": Table("one of the last requests that ended, for the page and `top`; half as many of tenants' own", 2050, 4),
    "quotas": Table("the counts of a tenant or a group for its quota, of a minute, a day and a month", 10_400, 4),
    "sums": Table("usage of one user in an hour, not yet written", 1260, 2),
    "users": Table("a tenant or a user of this hour, that is counted by itself in usage", 740, 1),
    "texts": Table("the lengths of a user's last 32 raw prompts", 2850, 16),
    "paces": Table("how soon the users of one app answer", 890, 16),
    "responses": Table("a stored response: whose it is, and which engine has it", 1130, 2),
    "rates": Table("a tenant or an address that asks too fast", 790, 4),
}
"""By what their bounds are called below."""
BLOCK_BYTES: Final = 376
"""A block of a prompt that an engine has cached; the first of its prompt."""


class Bounds(NamedTuple):
    """How many entries each table may have, and how many bytes may be held."""

    names: int
    """One entry in each table of `TABLES` for each, or for `part` of them."""
    pools: int
    blocks: int
    """Of prompts, in each pool."""
    connections: int
    body_bytes: int
    """The largest one, unless it is configured."""
    body_bytes_most: int
    """As large as it may be configured."""
    json_bytes: int
    """The largest one of JSON, unless it is configured."""
    json_bytes_most: int
    """As large as that may be configured."""
    bodies_bytes: int
    """All that are received, wait or run."""
    client_bodies_bytes: int
    """Those of one tenant or address."""
    queue_bytes: int
    """Bytes of the requests that wait."""
    lines_bytes: int
    """Lines of batches that are asked at once."""
    line_bytes: int
    """The largest one."""
    results_bytes: int
    """Answers to them, until they are written down."""
    reading_bytes: int
    """What reading one takes beside it: they are read one after the other."""
    answers_bytes: int
    """What clients have not taken yet; and as much of answers that are kept until they are whole."""

    def of(self, table: str) -> int:
        """How many entries the table may have, in each pool if each has one; at least 1."""
        found = TABLES[table]
        return max(1, self.names // found.part // (self.pools if found.of_pool else 1))


def bounds_of(memory_max: int, pools: int) -> Bounds:
    """What follows from `memory_max` (bytes, at least `MEMORY_MAX_LEAST`) for a gateway with so many pools."""
    rest = memory_max - BASE_BYTES
    part = {name: int(rest * share) for name, share in PARTS.items()}
    name_bytes = ALLOCATED * sum([table.entry_bytes / table.part for table in TABLES.values()])
    reading = int(part["bodies"] * READ_PART)
    bodies = part["bodies"] - reading
    largest = min(reading, bodies // 2)
    return Bounds(
        names=int(part["names"] / name_bytes),
        pools=pools,
        blocks=part["prompts"] // int(ALLOCATED * BLOCK_BYTES) // pools,
        connections=part["connections"] // CONNECTION_BYTES,
        body_bytes=min(BODY_BYTES_MAX, largest),
        body_bytes_most=largest,
        json_bytes=min(JSON_BYTES_MAX, reading // READ_TIMES),
        json_bytes_most=reading // READ_TIMES,
        bodies_bytes=bodies,
        client_bodies_bytes=bodies * 3 // 4,
        queue_bytes=bodies // 2,
        lines_bytes=part["lines"],
        line_bytes=int(part["lines"] * LINE_PART),
        results_bytes=part["results"],
        reading_bytes=reading,
        answers_bytes=part["answers"] // 2,
    )
