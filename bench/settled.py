"""What the end of a request costs the gateway's loop: metrics and access log, with and without durable usage.

    python -m bench.settled [--rounds 60]

A thousand records of 20 tenants with 50 users are settled in each round, the two ways in turns; and their sums are
written to SQLite, as the thread beside the loop does. CPU time of the process, median of the rounds.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from pydantic import SecretStr

from bench import report
from gateway.config.sections.usage import UsageConfig
from gateway.telemetry.access_log import AccessLog
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.record import Outcome, RequestRecord
from gateway.usage.counts import UsageCounts
from gateway.usage.database import Database
from gateway.usage.written import Batch, add
from policies.request import Flow, Request, ServiceTokens
from tests.records import record_of as made_record

RECORDS = 1000


def record_of(number: int) -> RequestRecord:
    record = made_record(f"req_{number}")
    record.tenant, record.app, record.model, record.pool = f"t{number % 20}", "default", "m", "pool"
    flow = Flow(record.tenant, record.app, f"user-{number % 50}")
    record.request = Request(record.id, flow, 1.0, 1, 1, 0.0)
    record.ended(Outcome.COMPLETED, "", ServiceTokens(300, 20, 100), 0.25)
    return record


def cpu_us(work: Callable[[], None]) -> float:
    begun_ns = time.process_time_ns()
    work()
    return (time.process_time_ns() - begun_ns) / 1000


async def run(rounds: int) -> None:
    records = [record_of(number) for number in range(RECORDS)]
    metrics, log, counts = Metrics(), AccessLog("/dev/null"), UsageCounts(100)

    def without() -> None:
        for record in records:
            metrics.ended(record)
            log.write(record, "fairserve")

    def with_usage() -> None:
        for record in records:
            metrics.ended(record)
            counts.ended(record)
            log.write(record, "fairserve")

    with tempfile.TemporaryDirectory() as folder:
        database = Database(UsageConfig(url=SecretStr(str(Path(folder, "usage.db")))))
        times: dict[str, list[float]] = {"without": [], "with usage": [], "written": []}
        for number in range(rounds):
            times["without"].append(cpu_us(without) / RECORDS)
            times["with usage"].append(cpu_us(with_usage) / RECORDS)
            batch = Batch("bench", number, counts.take())
            times["written"].append(cpu_us(lambda: add(database, batch, 0)) / len(batch.sums))  # noqa: B023
            await asyncio.sleep(0)
        database.close()
    found = {name: statistics.median(each) for name, each in times.items()}
    added = found["with usage"] - found["without"]
    rows = [
        ["settled without usage, a request", f"{found['without']:.2f} us"],
        ["settled with usage, a request", f"{found['with usage']:.2f} us ({added:+.2f})"],
        [f"written by the thread, one of {len(batch.sums)} sums", f"{found['written']:.1f} us"],
    ]
    print(report.table(["", "CPU"], rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="what the end of a request costs")
    parser.add_argument("--rounds", type=int, default=60)
    asyncio.run(run(parser.parse_args().rounds))


if __name__ == "__main__":
    main()
