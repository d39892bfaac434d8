"""How long does a large body of any kind keep the event loop, and how much memory does reading it take?

    python -m bench.bodies [--megabytes 32] [--runs 2]

Every kind of body that the tests know is read as the gateway reads it: at one go, or slice by slice.
`longest slice` is how long everybody else waits at most, in CPU time: of each run the longest, of the runs the
shortest.
`memory` is the most that the process held beyond what it held before, the body with it, over the size of the body.
"""

import argparse
import gc
import time
from pathlib import Path

from bench import report
from gateway.http.errors import ApiError
from tests.request.large_bodies import KINDS, Kind, is_read_at_once, read_at_once, reading


def longest_slice_s(kind: Kind, body: bytes) -> tuple[float, str]:
    """Of one reading, and how it ended."""
    longest_s = 0.0
    if is_read_at_once(kind, body):
        began_s = time.thread_time()
        try:
            read_at_once(kind, body)
        except ApiError as error:
            return time.thread_time() - began_s, f"refused: {error.code.value}"
        return time.thread_time() - began_s, "read at one go"
    work = reading(kind, body)
    while True:
        began_s = time.thread_time()
        try:
            next(work)
        except StopIteration:
            return max(longest_s, time.thread_time() - began_s), "read"
        except ApiError as error:
            return max(longest_s, time.thread_time() - began_s), f"refused: {error.code.value}"
        longest_s = max(longest_s, time.thread_time() - began_s)


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
    slices = []
    for _ in range(runs):
        longest_s, ended = longest_slice_s(kind, body)
        slices.append(longest_s)
    times_body = (resident_bytes("VmHWM") - before) / len(body)
    return {"longest_ms": 1000 * min(slices), "times_body": times_body, "ended": ended}


def main() -> None:
    parser = argparse.ArgumentParser(description="large bodies of every kind: the longest slice, and memory")
    parser.add_argument("--megabytes", type=int, default=32)
    parser.add_argument("--runs", type=int, default=2)
    options = parser.parse_args()
    rows = []
    found = {}
    for name, kind in KINDS.items():
        row = found[name] = measure(kind, options.megabytes * 1_000_000, options.runs)
        rows.append([name, f"{row['longest_ms']:.1f} ms", f"{row['times_body']:.2f}", str(row["ended"])])
        print(" | ".join(rows[-1]), flush=True)
    report.save("bodies", {"megabytes": options.megabytes, "kinds": found})
    print(f"\n{report.table(['body', 'longest slice', 'memory, times the body', 'ends'], rows)}\n")


if __name__ == "__main__":
    main()
