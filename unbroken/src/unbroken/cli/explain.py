"""A parser's error as one line: option, value received, what is allowed.

argparse and jsonargparse speak of their own insides ("Parser key ...", "NestedArg", "Union
subtypes"). Each function here knows one of their sentences, and returns None for any other.
"""

import re
import sys
import typing
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from unbroken.cli.tracker_words import told_as_words
from unbroken.errors import nearest

LONGEST_UNKNOWN = 400  # characters of a sentence that nothing here knows
LONGEST_REASON = 300
SEE = "See --help."
NOTHING = "nothing"  # what an empty value is
# What jsonargparse calls a type, and what a user is told
KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "dict": "key: value pairs",
    "list": "a list in brackets, such as [a,b]",
}


def explain(
    message: str,
    options: Sequence[str],
    elsewhere: Mapping[str, str] = {},
    switches: Collection[str] = (),
) -> str:
    """A parser's error as one line.

    Args:
        message: What argparse or jsonargparse says.
        options: The options that there are. The nearest to a wrong one is suggested.
        elsewhere: What other tools call an option → its name here.
        switches: The options, without ``--``, that are true or false.
    """
    message = " ".join(message.split())
    keys = re.findall(r'[Pp]arser key "([\w.]+)"', message)
    option = "--" + ".".join(keys)
    told = (
        _unknown_inside(message, keys, elsewhere)
        or _unknown_in_group(message, options, elsewhere)
        or _unrecognized(message, options, elsewhere)
        or _required_class(message)
        or _missing_value(message, switches)
    )
    if told is not None:
        return told
    if not keys:
        return _refused_by_constructor(message) or message[:LONGEST_UNKNOWN]
    return (
        _of_a_class(message, option)
        or _no_such_file(message, option)
        or _no_file_of_flags(message)
        or _not_one_of(message, option)
        or told_as_words(option, message, _given)
        or _no_class(message, option)
        or _no_class_there(message, option)
        or _other_class(message, option)
        or _of_another_kind(message, option)
        or f"{option}: {_innermost_reason(message)}"
    )


# An option that does not exist


def _unknown_inside(message: str, keys: Sequence[str], elsewhere: Mapping[str, str]) -> str | None:
    """A nested parser of a class has explained it already, without the keys around it."""
    found = re.search(r"unknown option --([\w.\-]+)\.(?: Did you mean --([\w.\-]+)\?)?", message)
    if found is None:
        return None
    name, meant = found.groups()
    prefix = "--" + "".join(f"{key}." for key in keys)
    option = prefix + name
    hint = ""
    if option in elsewhere:
        hint = f" Did you mean {elsewhere[option]}?"
    # What other tools call it says nothing about this class, and has no keys around it.
    elif meant is not None and elsewhere.get(f"--{name}") != f"--{meant}":
        hint = f" Did you mean {prefix}{meant}?"
    return f"unknown option {option}.{hint} {SEE}"


def _unknown_in_group(
    message: str, options: Sequence[str], elsewhere: Mapping[str, str]
) -> str | None:
    found = re.search(r"(?:^Option|Group '([\w.]+)' does not accept option) '([\w.]+)'", message)
    if found is None:
        return None
    group, name = found.groups()
    option = f"--{group}.{name}" if group else f"--{name}"
    hint = nearest(option, options)
    if option in elsewhere:
        hint = f" Did you mean {elsewhere[option]}?"
    return f"unknown option {option}.{hint} {SEE}"


def _unrecognized(message: str, options: Sequence[str], elsewhere: Mapping[str, str]) -> str | None:
    found = re.search(r"[Uu]nrecognized arguments?:? (.*)", message)
    if found is None:
        return None
    words = found[1].split()
    typed = [word.partition("=")[0] for word in words if word.startswith("-")]
    if not typed:
        return f"unexpected argument '{words[0]}': every value follows its --option. {SEE}"
    option = typed[0]
    if option in elsewhere:
        hint = f" Did you mean {elsewhere[option]}?"
    else:
        hint = nearest(option, options)
    return f"unknown option {option}.{hint} {SEE}"


# Something is missing


def _required_class(message: str) -> str | None:
    found = re.search(r"arguments are required: (model|data)$", message)
    if found is None:
        return None
    ways = f"--{found[1]}.class_path PACKAGE.CLASS, or a --config FILE with a section {found[1]}"
    return f"{ways}, is needed."


def _missing_value(message: str, switches: Collection[str]) -> str | None:
    found = re.search(r"argument (?:\S+/)?(\S+): expected one argument", message)
    if found is None:
        return None
    option = found[1]
    if option.removeprefix("--") in switches:
        return f"{option} needs a value, as in {option} true."
    return f"{option} needs a value."


# What a class says of its arguments


def _refused_by_constructor(message: str) -> str | None:
    """A constructor has raised an error, and jsonargparse lists it beside other types that there
    are.
    """
    if not message.startswith("Does not validate against any of the Union"):
        return None
    _, _, errors = message.partition("Errors: - ")
    reasons, _, _ = errors.partition(" Given value type: ")
    of_parser = (
        "Expected a",
        "Not a valid",
        "Subclass types expect",
        "a class path",
        "a dict with",
        # It stands before the reasons of an argument that is a class as well.
        "Does not validate against any of the Union",
    )
    own = [each for each in reasons.split(" - ") if not each.startswith(of_parser)]
    if not own:
        return None
    named = re.search(r"Problem with given class_path '([\w.]+)': (.+)", own[0])
    if named:
        return f"{named[1]}: {named[2]}"
    classes = set(re.findall(r"class_path='([\w.]+)'", message))
    return f"{classes.pop()}: {own[0]}" if len(classes) == 1 else own[0]


# A value that an option does not take


def _of_a_class(message: str, option: str) -> str | None:
    """The arguments of a class: a nested parser has explained a value, or one is missing."""
    if found := re.search(r"- --([\w.]+) (must be .+?, got .+?[.?])(?= - |$)", message):
        return f"{option}.{found[1]} {found[2]}"
    if found := re.search(r"the following arguments are required: (\w+)", message):
        return f"{option} needs {option}.{found[1]}."
    return None


def _no_such_file(message: str, option: str) -> str | None:
    found = re.search(r"File does not exist: '?([^']+)'?", message)
    return found and f"{option}: there is no file {found[1]}."


def _no_file_of_flags(message: str) -> str | None:
    reason = r"((?: - (?!Parser).+)?)"
    found = re.search(rf"([\w.]+)\": Unable to load config '(.+?)'{reason}", message)
    return found and f"--{found[1]}: {found[2]} is no file of flags and values{found[3]}."


def _not_one_of(message: str, option: str) -> str | None:
    """A value that is none of a ``Literal``."""
    choices = re.findall(r"Expected a typing\.Literal\[([^\]]*)\]", message)
    if not choices:
        return None
    names = [name.strip(" '") for part in choices for name in part.split(",")]
    return f"{option} must be one of {', '.join(dict.fromkeys(names))}, got {_given(message)}."


def _no_class(message: str, option: str) -> str | None:
    if not re.search("dot import path", message):
        return None
    allowed = "a known class or an import path (package.module.Class)"
    given = _given(message)
    hint = nearest(given, names_of_callbacks()) if option.endswith("callbacks") else ""
    return f"{option} must be {allowed}, got {given}.{hint}"


def _no_class_there(message: str, option: str) -> str | None:
    """An import path that leads to nothing."""
    pattern = r"given class_path '([\w.]+)': (No module named '[\w.]+'|module .+? has no attribute"
    found = re.search(pattern + r" '\w+'|cannot import name '\w+'[^-]*)", message)
    if found is None:
        return None
    told = f"{option} must be an import path (package.module.Class), got {found[1]}: {found[2]}."
    return told + nearest_class(found[1])


def nearest_class(path: str) -> str:
    """``" Did you mean package.module.Class?"`` for the class of the same module whose name is the
    closest; ``""`` where none is close, or the module is not imported.
    """
    module, _, name = path.rpartition(".")
    there = vars(sys.modules[module]) if module in sys.modules else {}
    meant = nearest(name, [each for each, value in there.items() if isinstance(value, type)])
    return meant.replace("mean ", f"mean {module}.")


def _other_class(message: str, option: str) -> str | None:
    """An import path that leads to a class of another kind."""
    pattern = r"Import path(?: ([\w.]+))? does not correspond to a subclass of (\w+)"
    found = re.search(pattern, message)
    if found is None:
        return None
    return of_another_class(option, found[2], found[1] or _given(message))


def of_another_class(option: str, kind: str, given: str) -> str:
    """An error about a class that is none of the kind that an option takes."""
    fix = f"Name such a class, or derive yours from {kind}."
    return f"{option} must be a subclass of {kind}, got {given}. {fix}"


def names_of_callbacks() -> list[str]:
    """The names of the callbacks that there are, as far as they are imported."""
    # Not before there is an error: it takes seconds.
    from lightning.pytorch import Callback

    found: list[str] = []
    waiting = [Callback]
    while waiting:
        kind = waiting.pop()
        waiting += kind.__subclasses__()
        found.append(kind.__name__)
    return found


def _of_another_kind(message: str, option: str) -> str | None:
    """A value of another type, such as text for a number."""
    found = re.findall(r"Expected an? <class '(\w+)'>", message)
    kinds = [KINDS[kind] for kind in found if kind in KINDS]
    if not kinds:
        return None
    return f"{option} must be {' or '.join(dict.fromkeys(kinds))}, got {_given(message)}."


def _given(message: str) -> str:
    """The value that was typed: of an argument inside a class, or of the option itself."""
    nested = r"NestedArg\(key='[\w.]+', val=(.+?)\)(?: -|$| Given)"
    if inner := re.findall(nested, message + " Given"):
        return str(inner[-1]).strip("' ") or NOTHING
    found = re.search(r"(?:Given value|Got value):(.+?)?(?: - | Given | Expected |$)", message)
    if found is None:
        return "something else"
    return (found[1] or "").strip() or NOTHING


def _innermost_reason(message: str) -> str:
    """The last of nested reasons, which is the innermost one."""
    reasons = re.findall(r"Errors: - (.+?)(?= - Expected| Given value|$)", message)
    return str(reasons[-1] if reasons else message)[:LONGEST_REASON]


def with_choices(message: str, hints: Mapping[str, Any]) -> str:
    """A message about an argument of a class, with the values that its ``Literal`` allows.

    jsonargparse names only one type of a ``Literal`` that mixes text, numbers and None.

    Args:
        message: What :func:`explain` returned.
        hints: Argument → its type.
    """
    found = re.match(r"(--\w+\.(\w+)) must be (?!one of).+, got (.+)\.$", message)
    if found is None:
        return message
    option, name, value = found.groups()
    choices = list(_literals(hints.get(name)))
    if not choices:
        return message
    shown = ["null" if choice is None else str(choice) for choice in choices]
    return f"{option} must be one of {', '.join(shown)}, got {value}."


def _literals(hint: Any) -> Iterator[Any]:
    """The values of each ``Literal`` in a type, as in ``Literal["x", 1] | None``."""
    if typing.get_origin(hint) is typing.Literal:
        yield from typing.get_args(hint)
        return
    for part in typing.get_args(hint):
        yield from _literals(part)
