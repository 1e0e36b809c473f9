"""A terminal, as far as the views use one: what a person sees after some output, at a size."""

from __future__ import annotations

import re

from rich.cells import cell_len

_CODE = re.compile(r"\x1b\[([?0-9;]*)([A-Za-z])")


class Screen:
    """Rows of cells and a cursor; knows wrapping, wide and combining characters, returns, cursor up, erasing below, colours, and no more.

    Args:
        columns, rows: of the window. Rows that leave it at the top are kept in `past`.
    """

    def __init__(self, columns: int = 10_000, rows: int = 10_000) -> None:
        self.columns, self.rows = columns, rows
        self.past: list[str] = []
        self.cursor_shown = True
        self._cells: list[list[str]] = [[]]
        self._row, self._column = 0, 0

    def feed(self, output: str) -> Screen:
        at = 0
        while at < len(output):
            code = _CODE.match(output, at)
            if code is None:
                self._put(output[at])
                at += 1
            else:
                self._obey(code[1], code[2])
                at = code.end()
        return self

    def lines(self) -> list[str]:
        """What is in the window, without blanks at the ends of rows."""
        return ["".join(cells).rstrip() for cells in self._cells]

    def _obey(self, argument: str, kind: str) -> None:
        if kind == "A":
            self._row -= int(argument or 1)
            assert self._row >= 0, "the cursor left the window at its top: what is to be redrawn has scrolled away"
        elif kind == "J":
            assert not argument, argument
            del self._cells[self._row][self._column :]
            del self._cells[self._row + 1 :]
        elif argument == "?25" and kind in "lh":
            self.cursor_shown = kind == "h"
        else:
            assert kind == "m", f"a code that no view needs: {argument}{kind}"

    def _put(self, char: str) -> None:
        if char == "\n":
            self._next_row()
        elif char == "\r":
            self._column = 0
        else:
            assert char.isprintable(), repr(char)
            width = cell_len(char)
            if width and self._column + width > self.columns:
                self._next_row()
            cells = self._cells[self._row]
            if not width:
                cells[self._column - 1] += char
                return
            cells.extend(" " * (self._column + width - len(cells)))
            cells[self._column : self._column + width] = [char, *[""] * (width - 1)]
            self._column += width

    def _next_row(self) -> None:
        self._row, self._column = self._row + 1, 0
        if self._row == len(self._cells):
            self._cells.append([])
        if len(self._cells) > self.rows:
            self.past.append("".join(self._cells.pop(0)).rstrip())
            self._row -= 1


def screen(output: str) -> list[str]:
    """The rows that a terminal, wide and high enough, shows after this output."""
    return Screen().feed(output).lines()
