"""Which port can a server of ours take?"""

from __future__ import annotations

import itertools
import os
import socket

_LOWEST, _COUNT = 20_000, 12_000
"""Below the ports that Linux gives to whoever asks for any: what we give out, it gives to nobody meanwhile."""

_next = itertools.count(os.getpid() * 2503)


def free_port() -> int:
    """A loopback port on which nobody listens; never the same one twice running."""
    for number in itertools.islice(_next, _COUNT):
        port = _LOWEST + number % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise OSError(f"no port from {_LOWEST} to {_LOWEST + _COUNT} is free")
