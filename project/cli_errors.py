"""jsonargparse's error texts, which recite every type that was tried, as one line a person can act upon."""

from __future__ import annotations

import re

from project.errors import nearest

KINDS = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "text",
    "dict": "key: value pairs",
}


def explain(message: str, options: list[str]) -> str:  # noqa: C901 - one case after another reads best
    """One line: option, value received, what is allowed, and the nearest real option where it is a typing error.

    Args:
        message: What jsonargparse or argparse says.
        options: The parser's option strings, for suggestions.
    """
    message = " ".join(str(message).split())
    keys = re.findall(r'[Pp]arser key "([\w.]+)"', message)
    option = "--" + ".".join(keys) if keys else ""
    inner = re.search(r"unknown option --([\w.\-]+)\.(?: Did you mean --([\w.\-]+)\?)?", message)
    if inner:  # what a nested parser of a class's arguments said, by this same function
        hint = f" Did you mean {option}.{inner[2]}?" if inner[2] else ""
        return f"unknown option {option}.{inner[1]}.{hint} See --help."
    if option and (refused := re.search(r"- --([\w.]+) (must be .+?, got .+?)\.(?= - |$)", message)):
        return f"{option}.{refused[1]} {refused[2]}."
    if unknown := re.search(r"[Uu]nrecognized arguments?:? (.*)", message):
        words = unknown[1].split()
        name = next((word for word in words if word.startswith("-")), None)
        if name is None:
            return f"unexpected argument '{words[0]}': every value follows its --option. See --help."
        name = name.split("=")[0]
        return f"unknown option {name}.{nearest(name, options)} See --help."
    if refused := re.search(r"^Option '([\w.]+)' is not accepted", message):
        return f"unknown option --{refused[1]}.{nearest('--' + refused[1], options)}"
    if group := re.search(r"Group '([\w.]+)' does not accept option '([\w.]+)'", message):
        known = [o[2:] for o in options]
        return f"unknown option {group[1]}.{group[2]}.{nearest(f'{group[1]}.{group[2]}', known)} See --help."
    if missing := re.search(r"File does not exist: '?([^']+)'?", message):
        return f"{option or '--config'}: there is no file {missing[1]}."
    if "Problems parsing config" in message or "while parsing" in message or "while scanning" in message:
        where = re.search(r"line (\d+), column (\d+)", message)
        place = f" at line {where[1]}, column {where[2]}" if where else ""
        return f"--config: a config file is not valid YAML{place}."
    if lone := re.search(r"argument (\S+): expected one argument", message):
        return f"{lone[1].split('/')[-1]} needs a value."
    if option and (allowed := _allowed(message)):
        return f"{option} must be {allowed}, got {_given(message)}."
    if option:  # the innermost of the reasons
        reasons = re.findall(r"Errors: - (.+?)(?= - Expected| Given value|$)", message)
        return f"{option}: {(reasons[-1] if reasons else message)[:300]}"
    return message[:400]


def _given(message: str) -> str:
    if nested := re.findall(r"NestedArg\(key='[\w.]+', val=(.+?)\)(?: -|$| Given)", message + " Given"):
        return nested[-1].strip("'")
    found = re.search(r"(?:Given value|Got value): (.+?)(?: - | Given | Expected |$)", message)
    return found[1] if found else "something else"


def _allowed(message: str) -> str:
    choices = re.findall(r"Expected a typing\.Literal\[([^\]]*)\]", message)
    if choices:
        names = [name.strip(" '") for choice in choices for name in choice.split(",")]
        return "one of " + ", ".join(dict.fromkeys(names))
    if "dot import path" in message or "not a subclass" in message or "Import of" in message:
        return "a known class or an import path (package.module.Class)"
    kinds = [KINDS[kind] for kind in re.findall(r"Expected an? <class '(\w+)'>", message) if kind in KINDS]
    return " or ".join(dict.fromkeys(kinds))
