"""Texts of others on their way to a terminal or a log: without what a terminal would obey."""

from __future__ import annotations


def printable(text: str) -> str:
    """The text on one line; control characters and what turns the direction of writing become spaces.

    Who names a job, a metric or an error could otherwise clear a person's screen, set its title, or write lines that
    look like the program's own.
    """
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else " " for character in " | ".join(text.splitlines()))


def printable_lines(text: str) -> str:
    """The same for a text of several lines, such as a traceback, which keeps them."""
    return "\n".join(map(printable, text.split("\n")))
