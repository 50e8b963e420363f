"""Virtual environments above the running one."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path


def make_environment_above(folder: Path) -> str:
    """Make a virtual environment that sees all that the running one does, and return its Python.

    One that is made by an environment's Python sees only the packages below that environment.
    ``addsitedir`` also follows the running one's links, as an editable installation leaves one.
    """
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True)
    (python,) = [*folder.glob("bin/python"), *folder.glob("Scripts/python.exe")]
    asked = [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    packages = subprocess.run(asked, check=True, capture_output=True, text=True).stdout.strip()
    running = sysconfig.get_path("purelib")
    link = Path(packages, "running.pth")
    link.write_text(f"import site; site.addsitedir({running!r})\n")
    return str(python)
