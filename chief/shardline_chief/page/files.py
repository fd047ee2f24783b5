"""The page's files, read once; requests never touch the file system."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources

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
