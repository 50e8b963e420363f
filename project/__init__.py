"""An MNIST classifier in PyTorch Lightning, whose runs are never lost."""

import sys
from importlib.util import find_spec

__version__ = "0.1.0"
# The folder of its source is found as well, but has no file of its own to import.
if getattr(find_spec("unbroken"), "origin", None) is None:
    print(f"error: unbroken is not installed for {sys.executable}: see README.md", file=sys.stderr)
    raise SystemExit(2)
