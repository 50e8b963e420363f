"""Linux, as code of ours would see Windows or macOS: what they lack is hidden from it.

``hide("windows")`` or ``hide("macos")`` holds for this process and for code in the package's folder
only. Python's own library, torch and Lightning have branches of their own for each system, which
ask for other things that Linux in turn lacks, so they see Linux as it is.

A test starts each command with a ``sitecustomize.py`` that calls :func:`hide`.
"""

from __future__ import annotations

import builtins
import errno
import multiprocessing
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import unbroken
import yaml

OURS = f"{Path(unbroken.__file__).parent}{os.sep}"
# Frames of Python's own library pass a call on: Path.symlink_to calls os.symlink.
LIBRARY = (sysconfig.get_path("stdlib"), "<frozen", __file__)
# Some installations keep other people's packages inside the folder of Python's library.
PACKAGES = ("site-packages", "dist-packages")
FORBIDDEN_IN_NAMES = '<>:"|?*'

# What a system has under another value, or what it alone has. The numbers are Windows' own, but for
# CREATE_NEW_PROCESS_GROUP: Linux would refuse any other.
VALUES: dict[str, dict[str, dict[str, Any]]] = {
    "windows": {
        "sys": {"platform": "win32"},
        "os": {"name": "nt"},
        "signal": {"SIGBREAK": 21, "CTRL_C_EVENT": 0, "CTRL_BREAK_EVENT": 1},
        "subprocess": {"CREATE_NEW_PROCESS_GROUP": 0},
    },
    "macos": {"sys": {"platform": "darwin"}},
}
# What a system lacks: modules, and attributes of modules.
LACKS: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
# Folders that only Linux has.
LINUX_FOLDERS = ("/proc", "/sys", "/dev/shm")


def hide(system: str) -> None:
    """Hide from code of ours what a system lacks.

    Args:
        system: ``windows`` or ``macos``.
    """
    _hide_names(system)
    _hide_folders()
    # Both systems start processes by spawn.
    multiprocessing.set_start_method("spawn")
    if system == "windows":
        _behave_as_windows()


def is_ours(frame: FrameType | None) -> bool:
    """Whether this code is ours, or is a function of Python's library that code of ours called."""
    while frame is not None and is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return is_file_of_ours(frame)


def is_file_of_ours(frame: FrameType | None) -> bool:
    """Whether this code stands in a file of ours. Code that the interpreter runs has no frame."""
    return frame is not None and frame.f_code.co_filename.startswith(OURS)


def is_library(file: str) -> bool:
    """Whether a file belongs to Python's own library, or is this one."""
    return file.startswith(LIBRARY) and not any(folder in file for folder in PACKAGES)


class ModuleThere(ModuleType):
    """A module as it is on another system.

    Args:
        module: The module as it is here.
        lacks: Names that it does not have there.
        values: Values that it has there.
    """

    def __init__(self, module: ModuleType, lacks: list[str], values: dict[str, Any]) -> None:
        super().__init__(module.__name__)
        self.__dict__.update(module_here=module, lacks=lacks, **values)

    def __getattr__(self, name: str) -> Any:
        if name in self.lacks:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self.module_here, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.module_here, name, value)


def _hide_names(system: str) -> None:
    """Code of ours that imports a module gets it as it is on another system, or not at all."""
    import_here = builtins.__import__
    missing: list[str] = LACKS[system]["modules"]
    lacks: dict[str, list[str]] = LACKS[system]["attributes"]
    values = VALUES[system]
    there: dict[str, ModuleThere] = {}

    def import_there(name: str, *arguments: Any, **named: Any) -> ModuleType:
        by_us = is_file_of_ours(sys._getframe().f_back)
        if by_us and name in missing:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        module = import_here(name, *arguments, **named)
        if by_us and module.__name__ in {*lacks, *values}:
            name = module.__name__
            if name not in there:
                there[name] = ModuleThere(module, lacks.get(name, []), values.get(name, {}))
            return there[name]
        return module

    builtins.__import__ = import_there


def _hide_folders() -> None:
    """Reading a folder that only Linux has ends as where there is none."""

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event not in ("open", "os.listdir", "os.scandir") or not arguments:
            return
        if is_linux_folder(arguments[0]) and is_ours(get_frame().f_back):
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(arguments[0]))

    get_frame = sys._getframe
    sys.addaudithook(check)
    # To look at a file is no event for an audit hook.
    os.stat = _guarded(os.stat, lambda path, **_: not is_linux_folder(path), errno.ENOENT)


def is_linux_folder(path: Any) -> bool:
    """Whether a path lies in a folder that only Linux has."""
    if not isinstance(path, str | os.PathLike):
        return False
    return os.fspath(path).startswith(LINUX_FOLDERS)


def _guarded(
    function: Callable[..., Any], is_allowed: Callable[..., bool], code: int
) -> Callable[..., Any]:
    """A function that ends in an OSError where code of ours calls it with what is not allowed."""

    def guarded(*arguments: Any, **named: Any) -> Any:
        if is_ours(sys._getframe().f_back) and not is_allowed(*arguments, **named):
            raise OSError(code, os.strerror(code), str(arguments[0]))
        return function(*arguments, **named)

    return guarded


def _behave_as_windows() -> None:
    """Functions that Windows has, and that do less there."""
    # An ordinary account may make no symbolic links, a folder cannot be opened, and a rename does
    # not replace a file.
    os.symlink = _guarded(os.symlink, lambda *_, **__: False, errno.EINVAL)
    os.open = _guarded(os.open, lambda path, *_, **__: not os.path.isdir(path), errno.EACCES)
    # Python's own rmtree opens folders only where that is possible.
    shutil._use_fd_functions = False  # type: ignore[attr-defined]
    os.rename = _guarded(
        os.rename, lambda _, target, **__: not os.path.exists(target), errno.EEXIST
    )
    os.mkdir = _guarded(os.mkdir, has_possible_name, errno.EINVAL)

    def check(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and is_ours(get_frame().f_back) and not has_possible_name(*arguments):
            raise OSError(errno.EINVAL, "Invalid argument", str(arguments[0]))

    get_frame = sys._getframe
    sys.addaudithook(check)

    begin = subprocess.Popen.__init__

    def begin_as_on_windows(self: Any, *arguments: Any, **named: Any) -> None:
        if is_ours(sys._getframe().f_back):
            for name in ("preexec_fn", "pass_fds"):
                if named.get(name):
                    raise ValueError(f"{name} is not supported on Windows platforms")
        begin(self, *arguments, **named)

    subprocess.Popen.__init__ = begin_as_on_windows  # type: ignore[method-assign]


def has_possible_name(path: Any, *_: Any, **__: Any) -> bool:
    """Whether Windows allows the characters of a file's name."""
    if not isinstance(path, str | os.PathLike):
        return True
    name = os.path.basename(os.fspath(path))
    return not any(character in name for character in FORBIDDEN_IN_NAMES)
