"""``python -m fivefold``: the command, for interpreters whose scripts are not on PATH."""

from __future__ import annotations

from fivefold.cli import main

if __name__ == "__main__":
    main()
