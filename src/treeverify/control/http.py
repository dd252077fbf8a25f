"""How a live server is asked over HTTP: one address, key, trust and route to it for every call of this package.

*Trust*: the system's certificates, or those that ``SSL_CERT_FILE`` and ``SSL_CERT_DIR`` name. *Key*: the bearer token
of every request, ``/health`` too. *Proxies*: none, whatever the environment names.
"""

from __future__ import annotations

import ssl
from functools import cache
from typing import Self

import httpx

from treeverify import env
from treeverify.errors import AccessError, ConfigError, ServerError, ServerUnreachableError

TIMEOUT_S = 30.0
"""For one answer: the info query waits for the step that runs."""
OK = 200
Response = httpx.Response
_EXCERPT = 200
_NO_ADDRESS = (httpx.InvalidURL, UnicodeError)
"""What httpx raises for what cannot be an address; the second: a lone surrogate, a name that DNS cannot hold."""


class Connection:
    """The server at ``url`` (``http://HOST:PORT``), for one request or many; close it, or use it as a context."""

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = TIMEOUT_S) -> None:
        """``api_key`` None: ``TREEVERIFY_API_KEY``. ``timeout``: seconds for one answer.

        Raises ConfigError for a key that no header can carry.
        """
        self._url, self._timeout = url.rstrip("/"), timeout
        self._key = _checked(env.api_key() if api_key is None else api_key)
        self._client = httpx.Client(timeout=timeout, verify=_trust(), trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def request(self, method: str, path: str, body: object = None) -> Response:
        """Return the answer, whatever its status; ``body`` goes out as JSON.

        Raises AccessError (a key that is refused, a certificate that is not trusted) and ServerUnreachableError
        (nothing answers, not in time, or this is no address); the messages never hold the key.
        """
        where = f"{self._url}{path}"
        try:
            response = self._client.request(method, where, json=body, headers=self._headers())
        except (httpx.UnsupportedProtocol, *_NO_ADDRESS) as error:
            raise ServerUnreachableError(f"{where}: expected an address like http://HOST:PORT: {error}") from error
        except httpx.TimeoutException as error:
            raise ServerUnreachableError(f"{where}: no answer within {self._timeout:g} s") from error
        except httpx.HTTPError as error:
            if _untrusted(error):
                hint = "SSL_CERT_FILE or SSL_CERT_DIR names other authorities than the system's"
                raise AccessError(f"{where}: {error}; {hint}") from error
            raise ServerUnreachableError(f"{where}: {error or type(error).__name__}") from error
        if response.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            wants = "another key than the one it got" if self._key else "a key"
            raise AccessError(f"{where}: status {response.status_code}: the server wants {wants} (TREEVERIFY_API_KEY)")
        return response

    def fetch(self, method: str, path: str, body: object = None) -> Response:
        """As ``request``; raises ServerError for a status other than 200."""
        response = self.request(method, path, body)
        if response.status_code != OK:
            raise ServerError(
                f"{self._url}{path}: expected status 200, got {response.status_code}: {excerpt(response.text)}"
            )
        return response

    def _headers(self) -> dict[str, str]:
        return {} if self._key is None else {"Authorization": f"Bearer {self._key}"}


def port(url: str) -> int:
    """Return the port of ``url``; raises ServerUnreachableError where it is no address."""
    try:
        parsed = httpx.URL(url)
    except _NO_ADDRESS as error:
        raise ServerUnreachableError(f"{url}: expected an address like http://HOST:PORT: {error}") from None
    return parsed.port or (443 if parsed.scheme == "https" else 80)


def excerpt(text: str) -> str:
    """Return what an error message shows of ``text``."""
    return text if len(text) <= _EXCERPT else f"{text[:_EXCERPT]}..."


def _checked(key: str | None) -> str | None:
    if key is not None and not (key.isascii() and key.isprintable() and key == key.strip()):
        raise ConfigError(
            "API key (TREEVERIFY_API_KEY): expected printable ASCII without blanks around it, got something else"
        )
    return key


@cache
def _trust() -> ssl.SSLContext:
    """Made once, since reading the certificates takes longer than a request."""
    return ssl.create_default_context()


def _untrusted(error: BaseException | None) -> bool:
    while error is not None and not isinstance(error, ssl.SSLCertVerificationError):
        error = error.__cause__ or error.__context__
    return error is not None
