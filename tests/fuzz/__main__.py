"""`python -m tests.fuzz [--seconds N] [--plain] [NAME...]`: fuzz these readers, or all, one after another.

With atheris (the extra `fuzz`) it is guided by coverage, else by chance alone. An input that breaks a property is kept
in build/fuzz/NAME; once it is understood it belongs into corpus/NAME, where every run of the tests reads it again.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import subprocess
import sys
import time
import traceback
from pathlib import Path

from tests.fuzz.harness import Harness, Measure, check
from tests.fuzz.plain import inputs
from tests.fuzz.registry import HARNESSES

FOUND = Path("build/fuzz")
MEASURED_EVERY = 64


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *HARNESSES], help="which harnesses; all, if none is named")
    parser.add_argument("--seconds", type=int, default=60, help="for each of them")
    parser.add_argument("--plain", action="store_true", help="without coverage, also where atheris is installed")
    options = parser.parse_args()
    guided = not options.plain and importlib.util.find_spec("atheris") is not None
    failed = []
    for name in options.names or HARNESSES:
        print(f"--- {name}: {options.seconds} s, {'guided by coverage' if guided else 'plain'}", flush=True)
        if not (_guided(name, options.seconds) if guided else _plain(HARNESSES[name], options.seconds)):
            failed.append(name)
    print(f"broken: {', '.join(failed)}" if failed else "every property held")
    return 1 if failed else 0


def _guided(name: str, seconds: int) -> bool:
    command = [sys.executable, "-m", "tests.fuzz.guided", name, str(seconds), str(FOUND / name)]
    return subprocess.run(command, check=False).returncode == 0


def _plain(harness: Harness, seconds: int) -> bool:
    until = time.monotonic() + seconds
    executions = 0
    for data in inputs(harness, seed=int(time.time())):
        executions += 1
        try:
            check(harness, data, Measure.TIME if executions % MEASURED_EVERY else Measure.MEMORY)
        except Exception:
            traceback.print_exc()
            directory = FOUND / harness.name
            directory.mkdir(parents=True, exist_ok=True)
            path = directory / hashlib.sha256(data).hexdigest()[:16]
            path.write_bytes(data)
            print(f"kept as {path}")
            return False
        if time.monotonic() >= until:
            break
    print(f"{executions} executions")
    return True


if __name__ == "__main__":
    sys.exit(main())
