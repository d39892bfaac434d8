"""Does work of the interpreter itself hold streams up?"""

from __future__ import annotations

import signal
import sys

from tests.commands import running
from tests.ports import free_port

PRINTS_SWITCH_INTERVAL = """
import atexit, runpy, sys
atexit.register(lambda: print("a thread has its turn for", sys.getswitchinterval(), flush=True))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


async def test_no_stream_waits_while_a_thread_computes() -> None:
    options = ("--backend", f"http://127.0.0.1:{free_port()}", "--port", "0", "--admin-port", "0")
    async with running("serve", *options, by=(sys.executable, "-c", PRINTS_SWITCH_INTERVAL)) as gateway:
        await gateway.says("serving on")
        gateway.signal(signal.SIGTERM)
        found = await gateway.says(r"a thread has its turn for ([\d.]+)")
        assert float(found[1]) <= 0.0005
