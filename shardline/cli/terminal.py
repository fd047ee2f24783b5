"""The console of every command: prints plain text, whatever its origin, never markup or control codes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console, JustifyMethod, OverflowMethod
from rich.style import Style
from rich.text import Text

from shardline.host.printable import printable


class PlainConsole(Console):
    """rich's console, but strings, also in table cells, have no markup, emoji or highlights; see printable()."""

    def render_str(
        self,
        text: str,
        *,
        style: str | Style = "",
        justify: JustifyMethod | None = None,
        overflow: OverflowMethod | None = None,
        **how: Any,
    ) -> Text:
        """The one place where rich interprets a string."""
        return Text(printable(text), style=style, justify=justify, overflow=overflow)

    def say(self, sentence: str) -> None:
        self.print(sentence, soft_wrap=True)


def aligned(rows: Sequence[Sequence[str]], *, texts: int) -> list[str]:
    """Lines whose columns are aligned: the first `texts` of them to the left, those of numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if place < texts else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in rows
    ]
