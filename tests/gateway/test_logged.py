"""Who was ahead, by the log alone: those that the same engines had while a request waited."""

from __future__ import annotations

from pathlib import Path

from gateway.telemetry.logged import LogExcerpt
from tests.kit.access_logs import logged, write


def had(tenant: str, dispatched_s: float, ended_s: float, backend: str = "a", **more: object) -> str:
    """What an engine had from then to then, dispatched as it came."""
    return logged(
        tenant=tenant, ts=ended_s, total_ms=1000 * (ended_s - dispatched_s), queue_ms=0, backend=backend, **more
    )


def waited(name: str, since_s: float, until_s: float) -> str:
    """A request of `slow` that waited from then to then, and took a second at engine a."""
    queue_ms = 1000 * (until_s - since_s)
    return logged(
        request_id=name, tenant="slow", ts=until_s + 1, total_ms=queue_ms + 1000, queue_ms=queue_ms, backend="a",
        waited_ms={"turn": queue_ms},
    )  # fmt: skip


def test_those_are_ahead_that_the_same_engines_had_meanwhile(tmp_path: Path) -> None:
    log = write(
        tmp_path,
        waited("one", 100, 110),
        waited("two", 200, 210),
        *(had("before", 90 + n, 99 + n) for n in range(3)),  # the third ended while `one` waited
        *(had("batch", 101, 111) for _ in range(4)),
        had("batch", 205, 206, backend="b"),
        had("between", 150, 160),
        had("after", 110.5, 120),
        had("elsewhere", 101, 111, backend="c", model="another"),
    )
    both = LogExcerpt([log], lambda line: line.tenant == "slow")
    assert both.ahead == {"batch": 5, "before": 1}
    one = LogExcerpt([log], lambda line: line.request_id == "one", has="one")
    assert one.ahead == {"batch": 4, "before": 1}
    assert one.sentence() == (
        "one of slow was dispatched to a; it waited 10 s behind 4 requests of batch, 1 of before: 10 s for its turn; "
        "it had its first token after 0.2 s; it completed after 11 s."
    )
    assert LogExcerpt([log], lambda line: line.request_id == "two").ahead == {"batch": 1}
