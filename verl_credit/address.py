"""Addresses of search servers: a check, the address without its password, and whether it is a loopback address."""

from __future__ import annotations

from ipaddress import ip_address
from socket import inet_aton
from typing import TYPE_CHECKING

from verl_credit.redact import redact

if TYPE_CHECKING:
    import httpx


def endpoint(url: str) -> str:
    """The address of POST /retrieve, from itself or from the server's address. Errors: ValueError names the address."""
    import httpx

    wrong = f"address {redact(url)!r}; expected http://HOST:PORT"
    try:
        parts = httpx.URL(url)
    except (httpx.InvalidURL, TypeError) as error:
        raise ValueError(f"{wrong} ({error})") from None
    known = parts.scheme in ("http", "https") and parts.host and 0 < (parts.port or 80) < 65536
    if not known or parts.query or parts.fragment:
        raise ValueError(wrong)
    return url.rstrip("/") if parts.path.rstrip("/").endswith("/retrieve") else url.rstrip("/") + "/retrieve"


def without_password(url: str) -> tuple[httpx.URL, httpx.BasicAuth | None]:
    """The address, and its user and password for a header: httpx logs the address of every request."""
    import httpx

    address = httpx.URL(url)
    if not address.userinfo:
        return address, None
    return address.copy_with(userinfo=b""), httpx.BasicAuth(address.username, address.password)


def loopback(url: str) -> bool:
    """Returns whether every machine resolves the address to itself: localhost, 127.0.0.0/8, ::1, the "any" addresses."""
    import httpx

    host = httpx.URL(url).host.rstrip(".").lower()
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        address = ip_address(host)
    except ValueError:
        try:
            address = ip_address(inet_aton(host))  # 127.1 and other short forms that resolvers accept
        except OSError:
            return False
    address = getattr(address, "ipv4_mapped", None) or address
    return address.is_loopback or address.is_unspecified


def base(url: str) -> str:
    """The server's address without /retrieve and a final slash."""
    return endpoint(url).removesuffix("/retrieve")


def urls_of(settings) -> list[str]:
    """The addresses of ``search.url`` as a list."""
    return [settings.url] if isinstance(settings.url, str) else list(settings.url)
