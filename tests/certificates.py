"""An authority of a test's own, and certificates that it has signed, made by openssl."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path


class Authority:
    """Writes PEM files into `directory`: ca.pem, and NAME.pem with NAME.key for each certificate."""

    def __init__(self, directory: Path, name: str = "ca") -> None:
        self._directory = directory
        self._name = name
        self._openssl(
            *("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"),
            *("-keyout", f"{name}.key", "-out", f"{name}.pem", "-subj", f"/CN={name}"),
            *("-addext", "basicConstraints=critical,CA:TRUE", "-addext", "keyUsage=critical,keyCertSign"),
        )

    @property
    def ca(self) -> str:
        return self.path(f"{self._name}.pem")

    def path(self, file: str) -> str:
        return str(self._directory / file)

    def sign(self, name: str, host: str = "IP:127.0.0.1", days: int = 2) -> tuple[str, str]:
        """A certificate for this host, and its key."""
        self._openssl(
            *("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={name}"),
            *("-keyout", f"{name}.key", "-out", f"{name}.csr"),
        )
        (self._directory / f"{name}.ext").write_text(f"subjectAltName={host}\n")
        self._openssl(
            *("x509", "-req", "-in", f"{name}.csr", "-CA", f"{self._name}.pem", "-CAkey", f"{self._name}.key"),
            *("-days", str(days), "-extfile", f"{name}.ext", "-out", f"{name}.pem"),
        )
        return self.path(f"{name}.pem"), self.path(f"{name}.key")

    def server(self, name: str = "server", *, asks_clients: bool = False, **made: str) -> ssl.SSLContext:
        """What a server shows; it may ask its clients for one that this authority signed, too."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(*self.sign(name, **made))
        if asks_clients:
            context.load_verify_locations(self.ca)
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def client(self, certificate: tuple[str, str] | None = None) -> ssl.SSLContext:
        """Whom a client trusts, and what it shows if it is asked."""
        context = ssl.create_default_context(cafile=self.ca)
        if certificate is not None:
            context.load_cert_chain(*certificate)
        return context

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self._directory, check=True, capture_output=True)
