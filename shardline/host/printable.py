"""Makes foreign texts safe for a terminal or log: removes everything that a terminal would interpret."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text on one line; control characters and changes of text direction become spaces.

    Otherwise the name of a job or metric, or an error, could clear the user's screen, set its title, or imitate the
    program's own lines.
    """
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else " " for character in " | ".join(text.splitlines()))


def unicode(text: str) -> str:
    """The text with "?" for what UTF-8 can't hold: bytes of file names in another encoding."""
    return text.encode(errors="replace").decode()


def printable_lines(text: str) -> str:
    """The same, but keeps line breaks, for texts such as a traceback."""
    return "\n".join(map(printable, text.split("\n")))
