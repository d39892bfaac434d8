"""TLS of the listener and towards engines, with PEM files."""

from __future__ import annotations

import ssl
from typing import Self

from pydantic import Field, model_validator

from backends.tls_contexts import client_context, server_context
from gateway.config.checks import fault
from gateway.config.section import Section


class _TlsConfig(Section):
    """Base of TLS settings: certificate, key and CA files, which are loaded once to check them."""

    @model_validator(mode="after")
    def _check_files(self) -> Self:
        try:
            self.make_context()
        except ValueError as error:
            raise fault(str(error)) from None
        return self

    def make_context(self) -> ssl.SSLContext:
        """Load the files as they are now. Raise ValueError for an unusable file."""
        raise NotImplementedError


class ListenerTlsConfig(_TlsConfig):
    """Certificate for clients, and the clients that are admitted. Changed files are read again at run time."""

    cert_file: str = Field(min_length=1)
    """Certificate of the gateway, then the intermediate certificates."""
    key_file: str | None = Field(default=None, min_length=1)
    """Key of the certificate, without a password. Default: cert_file has the key, too."""
    client_ca_file: str | None = Field(default=None, min_length=1)
    """Authorities of client certificates, needed beside API keys (mutual TLS)."""

    @property
    def files(self) -> tuple[str, ...]:
        """All files, the certificate first."""
        named = (self.cert_file, self.key_file, self.client_ca_file)
        return tuple(file for file in named if file is not None)

    def make_context(self) -> ssl.SSLContext:
        return server_context(self.cert_file, key_file=self.key_file, client_ca_file=self.client_ca_file)


class BackendTlsConfig(_TlsConfig):
    """Trust in an engine at an https url, and the gateway's own certificate. Files are PEM."""

    ca_file: str | None = Field(default=None, min_length=1)
    """Trusted authorities. Default: the system's."""
    cert_file: str | None = Field(default=None, min_length=1)
    """Certificate of the gateway for the backend (mutual TLS)."""
    key_file: str | None = Field(default=None, min_length=1)
    """Key of the certificate, without a password. Default: cert_file has the key, too."""
    verify: bool = True
    """false: trust any server at the url, which can then read all prompts and the api_key. For tests only."""

    def make_context(self) -> ssl.SSLContext:
        if self.key_file is not None and self.cert_file is None:
            raise ValueError("has a key_file and no cert_file: name the certificate, too")
        if not self.verify and self.ca_file is not None:
            raise ValueError("has a ca_file, which is without effect where verify is false")
        return client_context(
            ca_file=self.ca_file, cert_file=self.cert_file, key_file=self.key_file, verify=self.verify
        )
