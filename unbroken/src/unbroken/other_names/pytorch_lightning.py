"""What a worker process imports by this name: see unbroken/lightning_names.py.

A process that is started by spawn or forkserver gets its parent's search path, on which this folder
stands, but not its parent's import finders. So the first import of this name switches them on.
"""

import importlib
import sys

from unbroken import lightning_names

lightning_names.alias()
NAME = __name__.rpartition(".")[2]
# The import system hands out the module that stands here when this file has been executed.
sys.modules[__name__] = importlib.import_module(lightning_names.REAL_NAMES[NAME])
