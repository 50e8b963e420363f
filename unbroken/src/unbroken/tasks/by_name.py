"""Classes that a user names in a config file or on the command line, found and made.

Errors are one line.
"""

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import ModuleType
from typing import Any

from unbroken.errors import UserError, nearest

# Whether what has an import path may be imported. None: the user has typed all names.
_judge: ContextVar[Callable[[str], bool] | None] = ContextVar("judge", default=None)


@contextmanager
def imports_judged_by(allows: Callable[[str], bool]) -> Iterator[None]:
    """Inside, :func:`named_class` asks ``allows`` before it imports anything.

    Args:
        allows: Whether what has this import path may be imported.
    """
    before = _judge.set(allows)
    try:
        yield
    finally:
        _judge.reset(before)


def named_class(
    option: str, name: str, home: ModuleType, base: type, also: tuple[str, ...] = ()
) -> Any:
    """The class that a user means by ``name``.

    This is the one place where text becomes a class of his choice.

    Args:
        option: The option that holds the name, for the error.
        name: A class of ``home`` by its short name, or any class by its import path.
        home: The module in which short names are looked up.
        base: The class must be a subclass of this one, and not this one itself.
        also: Further names that the option takes, which stand for no class. The error lists them.

    Raises:
        UserError: There is no such class, it is no subclass of ``base``, or a stranger's file
            names it that may not.
    """
    module_name, _, class_name = name.rpartition(".")
    allows = _judge.get()
    if module_name and allows is not None and not allows(name):
        what = "is no class of yours, of a task or of torch, and was not imported"
        raise UserError(f"{option} {name[:200]}: it {what}. To use it, type it.")
    try:
        module = importlib.import_module(module_name) if module_name else home
        found = getattr(module, class_name, None)
    except (ImportError, TypeError, ValueError) as error:
        raise UserError(f"{option} {name}: {error}.") from None
    if is_below(found, base):
        return found
    known = [*also, *(key for key, value in vars(home).items() if is_below(value, base))]
    allowed = ", ".join([*also, f"a class of {home.__name__}"])
    hint = nearest(name, known)
    raise UserError(f"{option} must be {allowed} or an import path, got {name}.{hint}")


def is_below(found: Any, base: type) -> bool:
    """Whether ``found`` is a subclass of ``base``, and not ``base`` itself."""
    return inspect.isclass(found) and issubclass(found, base) and found is not base


def make(option: str, cls: Any, arguments: dict[str, Any], *first: Any) -> Any:
    """``cls(*first, **arguments)``.

    What the class refuses is a :class:`UserError` that names the option.
    """
    accepted = inspect.signature(cls).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in accepted.values())
    for name in arguments:
        if name not in accepted and not takes_any:
            hint = nearest(name, accepted)
            raise UserError(f"{option}_args.{name} is no argument of {cls.__name__}.{hint}")
    try:
        return cls(*first, **arguments)
    except (TypeError, ValueError, RuntimeError) as error:
        refused = f"{option} {cls.__name__} refuses its arguments {arguments}: {error}."
        raise UserError(refused) from None
