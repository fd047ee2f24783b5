"""Who may see the page: rules without sockets.

A page on loopback without a token is for this machine only. It answers only to loopback's names; otherwise a web site
that points its own name at 127.0.0.1 could read it through a browser here. If there is a job token, the page requires
it: as `Authorization: Bearer`, or once by form or ?token=, after which the browser has a cookie. The cookie holds a
digest, so the browser's files never contain the token itself.
"""

from __future__ import annotations

import hashlib
import hmac
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie

from shardline.cluster import parse_address
from shardline.errors import UsageError
from shardline.security import TOKEN_LIMITS, Security, is_loopback, names_loopback

COOKIE = "shardline-page"
COOKIE_BYTES = 4096
"""A longer Cookie header is ignored."""


def check_exposure(address: str, security: Security) -> bool:
    """Whether the page at "host:port" is open to other machines. Raises UsageError if it is and there is no token."""
    host, _ = parse_address(address, "--page")
    exposed = not is_loopback(host)
    if exposed and not security.token:
        raise UsageError(
            f"--page {address} is open to other machines, so it needs the job's token: set --token-file, or keep the "
            "page on 127.0.0.1"
        )
    return exposed


@dataclass(frozen=True)
class PageAccess:
    """Decides on requests. exposed: the page is open to other machines, so there is a token."""

    security: Security
    exposed: bool = False

    @property
    def locked(self) -> bool:
        return bool(self.security.token)

    def right_host(self, header: str) -> bool:
        """Whether the Host header names a host under which this page may be seen."""
        return self.exposed or self.locked or names_loopback(header)

    def admitted(self, *, authorization: str, cookie: str) -> bool:
        """Whether these headers contain the token or the cookie."""
        if not self.locked:
            return True
        scheme, _, token = authorization.partition(" ")
        if scheme.lower() == "bearer" and self.token_is(token.strip()):
            return True
        if not cookie or len(cookie) > COOKIE_BYTES:
            return False
        try:
            found = SimpleCookie(cookie).get(self.cookie_name)
        except CookieError:
            return False
        return found is not None and hmac.compare_digest(found.value.encode(), self._digest("cookie").encode())

    def token_is(self, token: str) -> bool:
        """Whether this is the token; compares in constant time."""
        return len(token) <= TOKEN_LIMITS[1] and self.security.check(token)

    def _digest(self, purpose: str) -> str:
        return hmac.new(self.security.token, f"shardline page {purpose}".encode(), hashlib.sha256).hexdigest()

    @property
    def cookie_name(self) -> str:
        """Depends on the token: cookies ignore ports, and one machine may run several chiefs."""
        return f"{COOKIE}-{self._digest('name')[:8]}"

    def cookie(self, *, secure: bool) -> str:
        """Set-Cookie for a browser that has sent the token; it expires when the browser is closed."""
        text = f"{self.cookie_name}={self._digest('cookie')}; Path=/; HttpOnly; SameSite=Strict"
        return f"{text}; Secure" if secure else text
