"""HTTP requests by the standard library, and what their failures mean.

Nothing but `http` and `https` is opened, and a redirect does not lead out of them.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import socket
import ssl
import time
import urllib.error
import urllib.request
from typing import Any
from urllib.parse import urlsplit

#: Answers that another attempt may mend.
RETRY_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
USER_AGENT = "osciformer (python-urllib)"


class InterruptedTransferError(Exception):
    """Another attempt at the same address may succeed."""

    def __init__(self, message: str, wait: float | None = None) -> None:
        super().__init__(message)
        self.wait = wait


class RefusedTransferError(Exception):
    """This address will not give the file."""


class WrongContentError(RefusedTransferError):
    """This address gives another file."""


def open_address(address: str, headers: dict[str, str], *, timeout: float) -> Any:
    """Return the answer of a server to a GET request.

    Raises:
        HTTPError: If the status is not one of success. The caller closes it.
        InterruptedTransferError: If the connection failed, and may not do so again.
        RefusedTransferError: If it failed for good.
    """
    fixed = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
    request = urllib.request.Request(address, headers=fixed | headers)
    try:
        return _opener().open(request, timeout=timeout)
    except urllib.error.HTTPError:
        raise
    except (OSError, http.client.HTTPException) as error:
        raise connection_error(error) from error


def read_block(response: Any, size: int) -> bytes:
    """Return what has arrived of an answer, at most `size` bytes; nothing at its end."""
    try:
        block: bytes = response.read1(size)
    except (OSError, http.client.HTTPException) as error:
        raise connection_error(error) from error
    return block


class _SafeRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects, but neither to another scheme nor from https back to http."""

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        scheme = urlsplit(newurl).scheme
        if scheme != "https" and scheme != urlsplit(req.full_url).scheme:
            raise urllib.error.HTTPError(
                newurl, code, f"{msg} (a redirect to {scheme!r} is not followed)", headers, fp
            )
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _opener() -> urllib.request.OpenerDirector:
    """Return an opener for http and https alone; the usual one also opens files and ftp."""
    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        urllib.request.HTTPHandler(),
        urllib.request.HTTPSHandler(),
        urllib.request.HTTPDefaultErrorHandler(),
        _SafeRedirects(),
        urllib.request.HTTPErrorProcessor(),
    ):
        opener.add_handler(handler)
    return opener


def check_scheme(address: str) -> None:
    """Refuse an address that is not of http or https."""
    if urlsplit(address).scheme not in ("http", "https"):
        raise ValueError(f"an address must begin with http:// or https://, got {address!r}")


def connection_error(error: Exception) -> InterruptedTransferError | RefusedTransferError:
    """Return whether a broken connection is worth another attempt."""
    reason = error.reason if isinstance(error, urllib.error.URLError) else error
    if isinstance(reason, socket.gaierror):
        return RefusedTransferError(
            f"the name of the server cannot be resolved ({reason.strerror})"
        )
    if isinstance(reason, ssl.SSLCertVerificationError):
        return RefusedTransferError(f"the certificate of the server is not valid ({reason})")
    if isinstance(reason, TimeoutError):
        return InterruptedTransferError("the server did not answer in time")
    return InterruptedTransferError(f"the connection failed ({reason or type(reason).__name__})")


def retry_after(value: str | None) -> float | None:
    """Return the seconds that a `Retry-After` header asks for: a number or a date."""
    if not value:
        return None
    if value.isdigit():
        return float(value)
    with contextlib.suppress(ValueError, TypeError):
        return max(0.0, email.utils.parsedate_to_datetime(value).timestamp() - time.time())
    return None
