"""Who may see the page: rules, no sockets.

A page on loopback without a token is for this machine; it answers to loopback's names only, or else a web site that
points its own name at 127.0.0.1 could read it in a person's browser. Wherever there is a job token, the page asks for
it: as `Authorization: Bearer`, or once by form or ?token=, after which the browser has a cookie. The cookie holds a
digest, so the token itself is not left in a browser's files.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie

from shardline.cluster import parse_address
from shardline.errors import UsageError
from shardline.observability.host_header import names_loopback
from shardline.security import TOKEN_LIMITS, Security, is_loopback

COOKIE = "shardline-page"
COOKIE_BYTES = 4096
"""A longer Cookie header is not looked into."""


def check_exposure(address: str, security: Security) -> bool:
    """Whether the page at "host:port" is open to other machines. Raises UsageError where that would need a token."""
    host, _ = parse_address(address, "--page")
    exposed = not is_loopback(host)
    if exposed and not security.token:
        raise UsageError(
            f"--page {address} is open to other machines, so it needs the job's token: give --token-file, or keep the "
            "page on 127.0.0.1"
        )
    return exposed


@dataclass(frozen=True)
class PageAccess:
    """Decides about requests. exposed: the page is open to other machines; then there is a token."""

    security: Security
    exposed: bool = False

    @property
    def locked(self) -> bool:
        """Whether the token is asked for."""
        return bool(self.security.token)

    def right_host(self, header: str) -> bool:
        """Whether the Host header is one under which this page is meant to be seen."""
        return self.exposed or self.locked or names_loopback(header)

    def admitted(self, *, authorization: str, cookie: str) -> bool:
        """Whether these headers bring the token or the cookie."""
        if not self.locked:
            return True
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() == "bearer" and self.token_is(token.strip()):
            return True
        return self._cookie_is(cookie)

    def token_is(self, token: str) -> bool:
        """Whether this is the token, in constant time."""
        return len(token) <= TOKEN_LIMITS[1] and self.security.check(token)

    def _cookie_is(self, header: str) -> bool:
        if not header or len(header) > COOKIE_BYTES:
            return False
        try:
            found = SimpleCookie(header).get(self.cookie_name)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode(), self._digest("cookie").encode())

    def _digest(self, purpose: str) -> str:
        return hmac.new(self.security.token, f"shardline page {purpose}".encode(), hashlib.sha256).hexdigest()

    @property
    def cookie_name(self) -> str:
        """Differs by token: browsers know no ports, and one machine may have several chiefs."""
        return f"{COOKIE}-{self._digest('name')[:8]}"

    def cookie(self, *, secure: bool) -> str:
        """Set-Cookie for a browser that brought the token; it goes when the browser is closed."""
        text = f"{self.cookie_name}={self._digest('cookie')}; Path=/; HttpOnly; SameSite=Strict"
        return f"{text}; Secure" if secure else text
