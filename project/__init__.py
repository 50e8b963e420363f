"""An MNIST classifier in PyTorch Lightning, whose runs are never lost."""

import sys
from importlib.util import find_spec

__version__ = "0.1.0"

library = find_spec("unbroken")
# A folder of its source is found as well, but has no file of its own to import.
if library is None or library.origin is None:
    print(
        f"error: the library unbroken is not installed for {sys.executable}. Activate the virtual"
        " environment that has it, or set one up: README.md, Start.",
        file=sys.stderr,
    )
    raise SystemExit(2)
