"""Prints the commands of README.md that are marked for automatic runs, so that what is tested is what is written.

A block is marked by a comment before it:

    <!-- ci: install -->
    ```bash
    pip install ...
    ```

Use: python tools/readme_commands.py install
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

README = Path(__file__).resolve().parent.parent / "README.md"
BLOCK = re.compile(r"^<!-- ci: (?P<name>\w+) -->\s*^```(?:bash|sh|console)\n(?P<commands>.*?)^```", re.MULTILINE | re.DOTALL)


def marked_blocks(text: str) -> dict[str, str]:
    """Marked blocks by name, in order."""
    return {match["name"]: match["commands"] for match in BLOCK.finditer(text)}


def main(name: str) -> None:
    blocks = marked_blocks(README.read_text(encoding="utf-8"))
    if name not in blocks:
        sys.exit(f"{README.name}: no block marked <!-- ci: {name} -->; there are: {', '.join(blocks) or 'none'}")
    print(blocks[name], end="")


if __name__ == "__main__":
    main(sys.argv[1])
