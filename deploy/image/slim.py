"""Takes out of an environment what no program at run time opens: `slim.py VENV`.

Headers and sources to compile against, the libraries' own tests, copies of one shared library
under three names (a wheel holds no links), and Arrow's Flight, which nobody here speaks.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

NOT_NEEDED = (
    "numpy/**/tests",
    "numpy/_core/include",
    "numpy/_core/lib/*.a",
    "numpy/distutils",
    "numpy/f2py",
    "numpy/random/lib",
    "numpy/**/*.pyi",
    "pyarrow/tests",
    "pyarrow/include",
    "pyarrow/includes",
    "pyarrow/src",
    "pyarrow/*.p[xy][xdi]",
    "pyarrow/*_cpp_tests*",
    "pyarrow/*flight*",
    "pyarrow/libarrow_python.so",
    "pyarrow/libarrow_python.so.*.*.*",
)


def main(environment: Path) -> int:
    (site,) = environment.glob("lib/python3.*/site-packages")
    for pattern in NOT_NEEDED:
        for path in sorted(site.glob(pattern)):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)  # its folder has gone before it
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
