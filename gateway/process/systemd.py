"""systemd's socket activation and notifications.

With a socket unit the kernel keeps connections while no process serves, and the old and the new process of an upgrade
accept from one queue. The protocols are those of sd_listen_fds(3) and sd_notify(3).
"""

from __future__ import annotations

import os
import socket
from typing import Final

_FIRST_DESCRIPTOR: Final = 3
"""SD_LISTEN_FDS_START: inherited descriptors begin after standard error."""
CLIENTS: Final = "http"
OPERATOR: Final = "admin"
"""Names of the two listeners: `FileDescriptorName=` of a socket unit."""


def inherited_listeners() -> dict[str, socket.socket]:
    """Return the listening sockets that systemd passed to this process, by name; a second call returns none.

    Raise OSError if a socket has a name other than `http` and `admin`, or if two sockets have one name.
    """
    process, count, names = (os.environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if process != str(os.getpid()):
        return {}
    found: dict[str, socket.socket] = {}
    for descriptor, name in enumerate(names.split(":")[: int(count)], _FIRST_DESCRIPTOR):
        if name not in (CLIENTS, OPERATOR) or name in found:
            wanted = f"FileDescriptorName={CLIENTS} for clients, FileDescriptorName={OPERATOR} for the operator"
            raise OSError(f"systemd passed a socket named {name!r}: one socket unit each, with {wanted}")
        os.set_inheritable(descriptor, False)
        found[name] = socket.socket(fileno=descriptor)
        found[name].setblocking(False)
    return found


def notify(state: str) -> None:
    """Tell systemd the state of this process, such as `READY=1`. Do nothing without a listener."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if not address:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as to:
        # A leading @ means the abstract namespace, whose names begin with a zero byte.
        to.connect("\0" + address[1:] if address[0] == "@" else address)
        to.send(state.encode())
