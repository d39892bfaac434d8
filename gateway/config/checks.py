"""Checks of single values that types and bounds cannot express.

No message repeats the value, which may be a key or a password.
"""

from __future__ import annotations

import re
from ipaddress import ip_address
from typing import Annotated, Any
from urllib.parse import SplitResult, urlsplit
from zoneinfo import ZoneInfo

from pydantic import AfterValidator, BeforeValidator, SecretStr
from pydantic_core import PydanticCustomError


def fault(message: str) -> PydanticCustomError:
    return PydanticCustomError("config", "{message}", {"message": message})


def is_name(text: str) -> bool:
    """Return whether a tenant, an app, a model or a pool may have this name."""
    return re.fullmatch(r"[^\s\x00-\x1f\x7f]{1,128}", text) is not None


def checked_name(text: str) -> str:
    """Check for a name without spaces, of at most 128 characters."""
    if not is_name(text):
        raise fault("should be 1 to 128 characters, without spaces or control characters")
    return text


Name = Annotated[str, AfterValidator(checked_name)]


def checked_address(text: str) -> str:
    """Check for host:port."""
    host, port = split_address(text)
    if not host or not 0 <= port <= 65535:
        raise fault("should be host:port, such as 127.0.0.1:8080, 0.0.0.0:8080 or [::1]:8080")
    return text


def checked_addresses(value: Any) -> Any:
    """Check one address, or a list of them."""
    if isinstance(value, list | tuple) and value:
        return unique(tuple([checked_address(str(each)) for each in value]))
    return checked_address(str(value))


def split_address(text: str) -> tuple[str, int]:
    """Return host (without brackets) and port, or ("", -1) for an invalid address."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.%]+)\]|([A-Za-z0-9._-]+)):([0-9]{1,5})", text)
    return (found[1] or found[2], int(found[3])) if found else ("", -1)


def is_loopback(host: str) -> bool:
    """Return whether the host is reachable from this machine only. A name other than localhost counts as reachable from
    others."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def url_parts(text: str, should_be: str, *, credentials_go: str) -> SplitResult:
    """Split an http(s) URL without credentials, query and fragment. The error never repeats the URL."""
    try:
        parts = urlsplit(text)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or port == 0 or parts.scheme not in ("http", "https") or not re.fullmatch(r"[!-~]+", text):
        raise fault(f"should be {should_be}")
    if "@" in parts.netloc or "?" in text or "#" in text:
        raise fault(f"should hold no user, password, query or fragment; credentials go into {credentials_go}")
    return parts


def checked_url(text: str) -> str:
    """Return the URL in one spelling, without a trailing slash. The error never repeats the URL, which may hold a
    password."""
    if re.fullmatch(r"sim:[A-Za-z0-9._-]{0,64}", text):
        return text
    should_be = "http://host:port, https://host:port, or sim:NAME for an embedded simulated engine"
    parts = url_parts(text, should_be, credentials_go="api_key")
    path = parts.path.rstrip("/")
    if path.endswith("/v1"):
        raise fault("should end before /v1: the path of each request is appended to it")
    if not re.fullmatch(r"(/(?!\.\.?(/|$))[A-Za-z0-9._~%-]+)*", path):
        raise fault("should have no path, or one such as /engine-a: the path of each request is appended to it")
    return f"{parts.scheme}://{parts.netloc.lower()}{path}"


def backend_name(url: str | None) -> str:
    """Return host:port and path of a valid URL, or the URL itself for a simulated engine."""
    return (url.partition("://")[2] or url.rstrip(":")) if url else ""


def host_name(url: str) -> str | None:
    """Return the host name of a valid URL, or None for an address."""
    host = urlsplit(url).hostname
    if not host or re.fullmatch(r"[0-9.]+", host):  # 127.1 is an address as well
        return None
    try:
        ip_address(host.partition("%")[0])
    except ValueError:
        return host
    return None


def checked_zone(name: str) -> str:
    """Check that this machine has tables of the time zone."""
    try:
        ZoneInfo(name)
    except (ValueError, OSError, KeyError):
        raise fault("should be a time zone such as Europe/Berlin or UTC; its tables come with tzdata") from None
    return name


def checked_tokenizer(text: str) -> str:
    """Check that the value is the path of a tokenizer.json, or tiktoken:ENCODING."""
    if not text.endswith(".json") and not re.fullmatch(r"tiktoken:[A-Za-z0-9_.-]+", text):
        raise fault("should be the path of a tokenizer.json, or tiktoken:ENCODING such as tiktoken:o200k_base")
    return text


def checked_hash(text: str) -> str:
    """Check that the value is the hash of a key, and return the hash in lower case."""
    if not re.fullmatch(r"sha256:[0-9a-fA-F]{64}", text):
        raise fault(
            "is not the hash of a key (sha256: and 64 hex digits). Keys are never stored as they are: "
            "run `fairgate keys hash` and write here what it prints"
        )
    return text.lower()


def checked_api_key(key: SecretStr) -> SecretStr:
    """Check that the key can stand in an HTTP header."""
    if not re.fullmatch(r"[!-~]+", key.get_secret_value()):
        raise fault("is empty, or holds spaces, line ends or characters that cannot stand in an HTTP header")
    return key


def unique(names: tuple[str, ...]) -> tuple[str, ...]:
    """Check that no name comes twice."""
    if len(set(names)) != len(names):
        raise fault("holds the same name twice")
    return names


def _not_empty(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Check for at least one item. A bound in the type would not count invalid items."""
    if not values:
        raise fault("is empty; give at least one")
    return values


NotEmpty = AfterValidator(_not_empty)


def accept_bare_text(field: str, schema: Any) -> BeforeValidator:
    """Let a bare string stand for a section with only this `field` set; `schema` says so to editors."""

    def section(value: Any) -> Any:
        return {field: value} if isinstance(value, str) else value

    return BeforeValidator(section, json_schema_input_type=schema)
