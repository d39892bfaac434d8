"""How long does a body of any kind keep the event loop, and how much memory does reading it take?

    python -m bench.bodies [--megabytes 8] [--runs 3]

Every kind of body that the tests know is read as the gateway reads it, with all edits. `took` is CPU time, the shortest
of the runs: as long nothing else is done. `memory` is the most that the process held beyond what it held before, the
body with it, over the size of the body.
"""

import argparse
import gc
import time
from pathlib import Path

from bench import report
from gateway.http.errors import ApiError
from tests.request.large_bodies import KINDS, Kind, read


def took_s(kind: Kind, body: bytes) -> tuple[float, str]:
    """CPU time of one reading, and how it ended."""
    began_s = time.thread_time()
    try:
        read(kind, body)
    except ApiError as error:
        return time.thread_time() - began_s, f"refused: {error.code.value}"
    return time.thread_time() - began_s, "read"


def resident_bytes(field: str) -> int:
    """`VmRSS`: now. `VmHWM`: at most, since it was last set back."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise ValueError(f"no {field} in /proc/self/status")


def measure(kind: Kind, size: int, runs: int) -> dict[str, float | str]:
    gc.collect()
    before = resident_bytes("VmRSS")
    body = kind[1](size)
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back
    found = [took_s(kind, body) for _ in range(runs)]
    times_body = (resident_bytes("VmHWM") - before) / len(body)
    return {"took_ms": 1000 * min(found)[0], "times_body": times_body, "ended": found[0][1]}


def main() -> None:
    parser = argparse.ArgumentParser(description="large bodies of every kind: how long reading takes, and memory")
    parser.add_argument("--megabytes", type=float, default=8 * 1.048576)
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    rows = []
    found = {}
    for name, kind in KINDS.items():
        row = found[name] = measure(kind, int(options.megabytes * 1_000_000), options.runs)
        rows.append([name, f"{row['took_ms']:.1f} ms", f"{row['times_body']:.2f}", str(row["ended"])])
        print(" | ".join(rows[-1]), flush=True)
    report.save("bodies", {"megabytes": options.megabytes, "kinds": found})
    print(f"\n{report.table(['body', 'took', 'memory, times the body', 'ends'], rows)}\n")


if __name__ == "__main__":
    main()
