"""Prints what an extra of pyproject.toml asks for: `requirements.py EXTRA`.

The image installs the dependencies before the code is copied, so that a change of the code does
not fetch them again.
"""

from __future__ import annotations

import sys
from pathlib import Path

import tomllib

PROJECT = Path(__file__).parents[2] / "pyproject.toml"

if __name__ == "__main__":
    with PROJECT.open("rb") as file:
        extras = tomllib.load(file)["project"]["optional-dependencies"]
    print("\n".join(extras[sys.argv[1]]))
