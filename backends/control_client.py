"""Requests to an engine beside those of tenants: probes, lists of models, facts, metrics, the feed of steps."""

from __future__ import annotations

import ssl
from typing import Any, Final

import aiohttp
from yarl import URL

from backends.tls_contexts import what_failed
from backends.upstream_errors import ConnectFailed, ProtocolViolation

BODY_BYTES_MAX: Final = 8 * 1024 * 1024
TIMEOUT_S: Final = 2.0


class ControlClient:
    """A client of one engine, on a session that other engines may share."""

    def __init__(
        self,
        url: str,
        session: aiohttp.ClientSession,
        *,
        api_key: str | None = None,
        tls: ssl.SSLContext | None = None,
        address: str | None = None,
    ) -> None:
        """Create a client. `address`: where to connect, in place of the URL's host. Certificate and Host header stay
        those of the URL."""
        named = URL(url)
        self.url = url.rstrip("/")
        self._reached = self.url if address is None else str(named.with_host(address)).rstrip("/")
        self._server_hostname = None if address is None else named.host
        self._session = session
        self._headers = {"Host": named.host_port_subcomponent or ""}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self._tls = tls or True

    def request(self, path: str, timeout: aiohttp.ClientTimeout, accept: str = "*/*") -> Any:
        """Return aiohttp's context of a GET.

        Redirects are not followed: requests of tenants would not follow them, and the key is for this engine alone.
        """
        url, headers, name = self._reached + path, {**self._headers, "Accept": accept}, self._server_hostname
        return self._session.get(
            url, headers=headers, timeout=timeout, allow_redirects=False, ssl=self._tls, server_hostname=name
        )

    async def get(self, path: str, *, timeout_s: float = TIMEOUT_S, accept: str = "*/*") -> bytes:
        """Return the body of an answer with status 200.

        Raise ConnectFailed where nothing answers in time, and ProtocolViolation for any other answer.
        """
        url, body = self.url + path, bytearray()
        try:
            async with self.request(path, aiohttp.ClientTimeout(total=timeout_s), accept) as response:
                async for piece in response.content.iter_chunked(65536):
                    body += piece
                    if len(body) > BODY_BYTES_MAX:
                        raise ProtocolViolation(url, f"more than {BODY_BYTES_MAX} bytes")
                status = response.status
        except TimeoutError as error:
            raise ConnectFailed(url, f"no answer within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            cause = getattr(error, "os_error", None)  # a fault of TLS says more than aiohttp's error around it
            raise ConnectFailed(url, what_failed(cause if isinstance(cause, ssl.SSLError) else error)) from error
        if status != 200:
            why = f"status {status}, not 200"
            if status in (401, 403):
                why = f"status {status}: the api_key of this backend is missing or wrong"
            raise ProtocolViolation(url, why)
        return bytes(body)
