"""One Lightning under all of its names: ``pytorch_lightning`` is ``lightning.pytorch``.

Lightning is published twice, as ``lightning`` and as ``pytorch_lightning``. The code is the same,
but the class objects are not. Most public modules are written for ``pytorch_lightning``, and a
Trainer of ``lightning`` refuses them. After :func:`alias` both names give the same modules. So a
module, data module, callback or logger runs unedited, whether or not ``pytorch_lightning`` is
installed. The same holds for ``lightning_fabric``, on which ``pytorch_lightning`` stands.
"""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

# The package that other code imports → the same package in `lightning`.
REAL_NAMES = {"pytorch_lightning": "lightning.pytorch", "lightning_fabric": "lightning.fabric"}
# This folder holds a file for each name. Worker processes import the names from there, because
# they inherit sys.path and no finder.
FOLDER_FOR_WORKERS = str(Path(__file__).with_name("other_names"))


def alias() -> None:
    """Make ``pytorch_lightning`` and ``lightning_fabric`` other names of ``lightning``'s modules.

    Call it before the user's code is imported. It imports nothing, and a second call changes
    nothing. It holds for this process and for the worker processes that it starts, whether by
    fork, forkserver or spawn.

    Warns:
        UserWarning: ``pytorch_lightning`` has been imported already, so its classes are others.
    """
    for name, real_name in REAL_NAMES.items():
        if name in sys.modules and sys.modules[name] is not sys.modules.get(real_name):
            warnings.warn(
                f"{name} was imported before unbroken, so its classes are not those of "
                f"{real_name}. Import unbroken first.",
                stacklevel=2,
            )
    if not any(isinstance(finder, OtherNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, OtherNames())
    if FOLDER_FOR_WORKERS not in sys.path:
        # It stands before the installed packages, so that it wins where pytorch_lightning is
        # installed. The first entry keeps its place: it is the script's folder or the current
        # folder, and other code relies on that.
        sys.path.insert(1, FOLDER_FOR_WORKERS)


def name_in_lightning(name: str) -> str:
    """What ``lightning`` calls a module, class or function that a config or checkpoint names.

    ``pytorch_lightning.callbacks.Timer`` becomes ``lightning.pytorch.callbacks.Timer``. Any other
    name stays as it is.
    """
    package, dot, rest = name.partition(".")
    return REAL_NAMES.get(package, package) + dot + rest


class OtherNames(MetaPathFinder):
    """Finds modules of ``lightning`` under their other names."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Where to load a module from; None leaves the name to Python's own finders."""
        name = name_in_lightning(fullname)
        if name == fullname:
            return None
        # To look for a module inside a package imports the package, and all of Lightning. Code that
        # only asks whether pytorch_lightning is there does not wait for that.
        is_inside = "." in fullname
        if is_inside and importlib.util.find_spec(name) is None:
            return None
        return ModuleSpec(fullname, SameModule(name))


class SameModule(Loader):
    """Gives the module that ``lightning`` has, instead of a second one from the same file.

    Args:
        name: The module's name in ``lightning``.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.spec_of_its_own: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The module itself, imported by the name that it has in ``lightning``."""
        module = importlib.import_module(self.name)
        self.spec_of_its_own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Undo what the import system has written into the module. It has been executed before."""
        module.__spec__ = self.spec_of_its_own
