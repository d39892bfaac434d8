"""Coverage-guided fuzzing of one harness, in a process of its own: `python -m tests.fuzz.guided NAME SECONDS FOUND`.

libFuzzer ends the process itself when it has had its time or found something.
"""

from __future__ import annotations

import sys
from pathlib import Path
from zlib import crc32

import atheris

with atheris.instrument_imports(include=["gateway", "backends"]):
    from tests.fuzz.registry import HARNESSES

from tests.fuzz.harness import CORPUS, Measure, check, grown

GROWN_EVERY = 64
MEASURED_EVERY = 512
INPUT_BYTES_MAX = 4096
SLOWER = 8.0
"""What it costs at most to record coverage. Quadratic would be a hundred times slower."""


def main(name: str, seconds: str, found: str) -> None:
    harness = HARNESSES[name]
    executions = 0

    def read_one(data: bytes) -> None:
        nonlocal executions
        executions += 1
        check(harness, data, Measure.TIME, slower=SLOWER)
        if executions % GROWN_EVERY == 0:
            mark = crc32(data)
            long = grown(data, mark >> 8, 1 + mark % 40, harness.grown_bytes)
            check(harness, long, Measure.TIME if executions % MEASURED_EVERY else Measure.MEMORY, slower=SLOWER)

    directory = Path(found)
    directory.mkdir(parents=True, exist_ok=True)
    tokens = directory / "tokens.dict"
    lines = ["".join(f"\\x{byte:02x}" for byte in token) for token in harness.tokens]
    tokens.write_text("".join(f'"{line}"\n' for line in lines))
    options = [f"-max_total_time={seconds}", f"-max_len={INPUT_BYTES_MAX}", "-timeout=60", f"-dict={tokens}"]
    grew = directory / "grew"
    grew.mkdir(exist_ok=True)
    options += [f"-artifact_prefix={directory}/", "-print_final_stats=1", "-verbosity=1"]
    atheris.PoolSettings([sys.argv[0], *options, str(grew), str(CORPUS / name)], read_one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(*sys.argv[1:4])
