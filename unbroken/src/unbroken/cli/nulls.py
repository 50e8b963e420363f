"""``null`` for an argument of a class that takes a number, a text or a switch.

jsonargparse lets it through: to its parser of a class, None means that nothing was given.
"""

import inspect
from collections.abc import Iterator
from contextlib import suppress
from pkgutil import resolve_name
from typing import Any, get_type_hints

from unbroken.cli.explain import KINDS
from unbroken.errors import UserError

# What refuses None. Other types may allow it somewhere inside.
REFUSING = (int, float, bool, str)


def refuse_nulls(option: str, section: Any) -> None:
    """A UserError for the first null that an argument does not take.

    Args:
        option: The section's option, such as ``--model``.
        section: A class and its arguments, as parsed: ``{class_path: ..., init_args: {...}}``,
            with further ones inside.
    """
    for name, kind in nulls_refused(option, section):
        raise UserError(f"{name} must be {KINDS[kind.__name__]}, got null.")


def nulls_refused(option: str, section: Any) -> Iterator[tuple[str, type]]:
    """The options that are null and may not be, each with the type that it takes."""
    arguments = getattr(section, "init_args", None)
    if arguments is None:
        return
    for name, value in vars(arguments).items():
        if value is None:
            kind = type_of_argument(section.class_path, name)
            if kind in REFUSING:
                yield f"{option}.{name}", kind
        else:
            yield from nulls_refused(f"{option}.{name}", value)


def type_of_argument(class_path: str, name: str) -> Any:
    """The type of a constructor's argument, also of one that it passes on by ``**kwargs``; None
    where the default is None, or nothing says the type.
    """
    with suppress(Exception):  # a type that cannot be read
        for cls in resolve_name(class_path).__mro__:
            parameter = inspect.signature(cls.__init__).parameters.get(name)
            if parameter is not None:
                has_null = parameter.default is None
                return None if has_null else get_type_hints(cls.__init__).get(name)
    return None
