"""The page over HTTP: a few fixed paths, each with bounded work. Nothing here changes the job."""

from __future__ import annotations

import asyncio
import hashlib
import html
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from importlib import resources
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders, QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shardline_chief.page.access import PageAccess
from shardline_chief.page.board import Board

MEDIA_TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}


@dataclass(frozen=True)
class StaticFile:
    content: bytes
    media_type: str
    etag: str


def read_static() -> dict[str, StaticFile]:
    """All files by their path on the page; index.html is "/"."""
    found = {}
    for file in resources.files(__package__).joinpath("static").iterdir():
        suffix = "." + file.name.rpartition(".")[2]
        if suffix not in MEDIA_TYPES:
            continue
        content = file.read_bytes()
        etag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'
        path = "/" if file.name == "index.html" else f"/{file.name}"
        found[path] = StaticFile(content, MEDIA_TYPES[suffix], etag)
    return found


STREAMS = 32
"""Most browsers with live updates; further ones poll once a second instead."""
STREAM_S = 3600.0
"""Seconds after which a stream ends and its browser opens another."""
QUIET_S = 5.0
"""Seconds of silence after which a stream sends a line, to see whether the browser is still there."""
FORM_BYTES = 8192
FORM_S = 5.0
CURSOR_CHARACTERS = 256
"""A run's cursor has at most 24; see MOST_RUNS of the viewer."""
SHOWN = 120
"""Characters of a foreign path or name that an answer repeats."""
PUBLIC = ("/style.css", "/favicon.svg", "/login")
"""Files that the token form itself needs."""

SECURITY_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}


class Page:
    """The web application for one board."""

    def __init__(self, board: Board, access: PageAccess) -> None:
        self._board = board
        self._access = access
        self._files = read_static()
        self.streams = 0
        """Number of browsers that receive live updates."""
        self._closing = False
        routes = [
            Route("/api/view", self._view),
            Route("/api/history", self._history),
            Route("/api/stream", self._stream),
            Route("/api/passes", self._passes),
            Route("/pipeline-trace.json", self._trace),
            Route("/login", self._login, methods=["POST"]),
        ]
        routes += [Route(path, self._static(file)) for path, file in self._files.items()]
        application = Starlette(routes=routes, exception_handlers={HTTPException: _refused})
        # A path with an extra slash is unknown like any other.
        application.router.redirect_slashes = False
        self.application: ASGIApp = _Guard(application, access)

    def close(self) -> None:
        """Have every stream send its last events and end; called on the loop."""
        self._closing = True
        self._board.wake()

    # Data

    async def _view(self, request: Request) -> Response:
        return _json(self._board.view())

    async def _history(self, request: Request) -> Response:
        return _json(json.dumps(self._board.changes(_cursor(request)), separators=(",", ":")))

    async def _passes(self, request: Request) -> Response:
        return _json(self._board.passes.recent())

    async def _trace(self, request: Request) -> Response:
        # Some megabytes of JSON: the other readers of the page must not wait for it.
        found = await asyncio.to_thread(self._board.passes.trace)
        if found is None:
            raise HTTPException(404, "this job has no pipeline, so there is no trace of one")
        return _json(await asyncio.to_thread(json.dumps, found, separators=(",", ":")))

    async def _stream(self, request: Request) -> Response:
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        if self.streams >= STREAMS or self._closing:
            raise HTTPException(503, f"{STREAMS} browsers already receive live updates; poll /api/view instead")
        return StreamingResponse(self._news(_cursor(request)), media_type="text/event-stream")

    async def _news(self, cursor: str) -> AsyncIterator[str]:
        """Server-sent events: `view` and `history` whenever there is news, `end` when the chief ends."""
        self.streams += 1
        loop = asyncio.get_running_loop()
        until_s = loop.time() + STREAM_S
        number = -1
        try:
            while not self._closing and loop.time() < until_s:
                if not await self._board.newer(number, QUIET_S):
                    yield ":\n\n"
                    continue
                if self._closing:
                    break
                number = self._board.number
                news = self._board.changes(cursor)
                cursor = news["cursor"]
                yield _event("view", self._board.view())
                if any(part["curves"] or part["reset"] for part in (news, *news.get("beside", {}).values())):
                    yield _event("history", json.dumps(news, separators=(",", ":")))
            if self._closing:
                yield _event("view", self._board.view())
                yield _event("end", "{}")
        finally:
            self.streams -= 1

    # Files

    def _static(self, file: StaticFile) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            headers = {"Cache-Control": "no-cache", "ETag": file.etag}
            if request.headers.get("if-none-match") == file.etag:
                return Response(status_code=304, headers=headers)
            return Response(file.content, media_type=file.media_type, headers=headers)

        return answer

    # The token

    async def _login(self, request: Request) -> Response:
        try:
            body = await asyncio.wait_for(_body(request), FORM_S)
        except (TimeoutError, ClientDisconnect):
            raise HTTPException(408, f"the form did not arrive within {FORM_S:g} s") from None
        token = parse_qs(body.decode(errors="replace"), max_num_fields=4).get("token", [""])[0].strip()
        if self._access.locked and not self._access.token_is(token):
            return token_form("This is not the token of this job.")
        return admit(self._access, request.scope)


async def _body(request: Request) -> bytes:
    found = b""
    async for part in request.stream():
        found += part
        if len(found) > FORM_BYTES:
            raise HTTPException(413, f"the form is longer than {FORM_BYTES} bytes")
    return found


class _Guard:
    """Checks host and token before any route, and adds security headers to every answer."""

    def __init__(self, application: ASGIApp, access: PageAccess) -> None:
        self._application = application
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in SECURITY_HEADERS.items():
                    headers[name] = value
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        refusal = self._refusal(scope)
        await (refusal or self._application)(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        """The answer to a request that is refused; None if it may pass."""
        headers = Headers(scope=scope)
        path: str = scope["path"]
        host = headers.get("host", "")
        if not self._access.right_host(host):
            return _sentence(
                421,
                f"this page is only served for 127.0.0.1 and localhost, but was requested from host {host[:SHOWN]!r}",
                path,
            )
        if path in PUBLIC:
            return None
        token = QueryParams(scope["query_string"]).get("token") if path == "/" and scope["method"] == "GET" else None
        if token is not None and self._access.token_is(token):
            # Even if a cookie is there already: the token must not stay in the address.
            return admit(self._access, scope)
        if self._access.admitted(authorization=headers.get("authorization", ""), cookie=headers.get("cookie", "")):
            return None
        if path == "/":
            return token_form("This is not the token of this job." if token else "")
        answer = _sentence(401, "this page needs the job's token: Authorization: Bearer TOKEN, or sign in at /", path)
        answer.headers["WWW-Authenticate"] = "Bearer"
        return answer


def admit(access: PageAccess, scope: Scope) -> Response:
    """Redirect to the page, with a cookie and without the token in the address."""
    answer = RedirectResponse("/", status_code=303)
    if access.locked:
        answer.headers["Set-Cookie"] = access.cookie(secure=scope["scheme"] == "https")
    return answer


def token_form(problem: str) -> Response:
    """The form that asks for the token; `problem` is shown above it unless empty."""
    said = f'<p role="alert">{html.escape(problem)}</p>' if problem else ""
    text = f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>Shardline: token</title><link rel="icon" href="favicon.svg"><link rel="stylesheet" href="style.css"></head>
<body><main class="door"><h1>Shardline</h1>{said}
<form method="post" action="login"><label for="token">Token of this job</label>
<input id="token" name="token" type="password" autocomplete="current-password" required autofocus>
<button>Sign in</button></form>
<p class="hint">It is in the file passed to the chief with <code>--token-file</code>.</p></main></body></html>
"""
    return Response(text, 401, media_type="text/html", headers={"WWW-Authenticate": "Bearer"})


async def _refused(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path
    if error.status_code == 404:
        sentence = f"there is no {path[:SHOWN]!r}; the page is at /, its data at /api/view and /api/history"
        if error.detail != HTTPStatus.NOT_FOUND.phrase:
            sentence = error.detail
    elif error.status_code == 405:
        allowed = (error.headers or {}).get("Allow", "GET")
        sentence = f"{path} allows {allowed}, not {request.method[:SHOWN]}"
    else:
        sentence = error.detail
    answer = _sentence(error.status_code, sentence, path)
    answer.headers.update(error.headers or {})
    return answer


def _sentence(status: int, sentence: str, path: str) -> Response:
    """An error message: JSON for programs, plain text for people."""
    if path.startswith("/api/"):
        return _json(json.dumps({"error": sentence}), status)
    return PlainTextResponse(f"{sentence}\n", status)


def _json(text: str, status: int = 200) -> Response:
    return Response(text, status, media_type="application/json")


def _event(name: str, data: str) -> str:
    return f"event: {name}\ndata: {data}\n\n"


def _cursor(request: Request) -> str:
    return request.query_params.get("since", "")[:CURSOR_CHARACTERS]
