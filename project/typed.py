"""What was typed: put in order before the parser sees it, and read where the parser sees only text."""

from __future__ import annotations

import contextlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from project.errors import UserError
from project.model import networks


def typed_value(argv: list[str], option: str) -> str | None:
    """What was typed for one option, before anything is parsed; the last one counts, as it does when parsing."""
    values = [after for word, after in pairwise(argv) if word == option]
    values += [word.split("=", 1)[1] for word in argv if word.startswith(f"{option}=")]
    return values[-1] if values else None


def typed_or_configured(argv: list[str], name: str) -> str | None:
    """An option's value before anything is parsed: typed (one of ``trainer.`` also flat), else of the last config file
    that has it; None where it is not given, or null.
    """
    group, _, key = name.rpartition(".")
    spellings = [f"--{name}", *([f"--{key}"] if group == "trainer" else [])]
    values: list[Any] = [content.get(key) for content in config_sections(argv, group)]
    values += [typed_value(argv, spelling) for spelling in spellings]
    found = [str(value) for value in values if value is not None]
    return found[-1] if found and found[-1] != "null" else None


def configs_first(argv: list[str]) -> list[str]:
    """``argv`` with every ``--config FILE`` moved to the front, in order: what is typed wins wherever it stands."""
    configs: list[str] = []
    others: list[str] = []
    words = iter(argv)
    for word in words:
        if word in ("--config", "-c"):
            configs += [word, *([value] if (value := next(words, None)) is not None else [])]
        elif word.startswith("--config="):
            configs.append(word)
        else:
            others.append(word)
    return configs + others


def config_files(argv: list[str]) -> list[str]:
    """The FILE of every ``--config FILE``, in order."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else [word])]
    return [value for flag, value in pairwise(words) if flag in ("--config", "-c")]


def check_configs(argv: list[str]) -> None:
    """Raise a UserError that names the file where a ``--config`` is missing, no YAML, or not a mapping."""
    for name in config_files(argv):
        try:
            content = yaml.safe_load(Path(name).read_text())
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"--config {name} cannot be read: {getattr(error, 'strerror', None) or error}.") from None
        except yaml.YAMLError as error:
            mark = getattr(error, "problem_mark", None)
            place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
            raise UserError(f"--config {name} is not valid YAML{place}.") from None
        if not isinstance(content, dict):
            raise UserError(f"--config {name} must hold sections (trainer:, model:, data:), got {str(content)[:40]}.")


def config_sections(argv: list[str], section: str) -> list[dict[str, Any]]:
    """The section (the whole where it is "") of every config file that has it.

    What is wrong with a file, :func:`check_configs` says.
    """
    found = []
    for name in config_files(argv):
        with contextlib.suppress(OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
            content = yaml.safe_load(Path(name).read_text())
            found.append(content[section] if section else content)
    return [content for content in found if isinstance(content, dict)]


def sets_a_length(argv: list[str]) -> bool:
    """Whether ``max_steps`` or ``max_time`` is typed, flat or nested, or stands in a config file, as a real limit."""
    return any(typed_or_configured(argv, f"trainer.{flag}") not in (None, "-1") for flag in ("max_steps", "max_time"))


def names_a_network(argv: list[str]) -> bool:
    """Whether a network's class is typed, or stands in a config file."""
    if typed_value(argv, "--model.network") is not None:
        return True
    for model in config_sections(argv, "model"):
        network = (model.get("init_args") or model).get("network")
        if isinstance(network, str) or (isinstance(network, dict) and "class_path" in network):
            return True
    return False


def our_networks(argv: list[str]) -> list[str]:
    """``argv`` with ``--model.network MLP`` spelled out: torchvision, which torchmetrics imports, has an MLP, too."""
    flag = "--model.network"
    spelled = []
    for before, word in zip(["", *argv], argv, strict=False):
        option, _, name = word.rpartition("=")
        if (before == flag or option == flag) and name in networks.__all__:
            word = f"{option}{'=' if option else ''}{networks.__name__}.{name}"
        spelled.append(word)
    return spelled


def parse_interval(text: str) -> tuple[float, int | None]:
    """``"60s"`` → (60.0, None); ``"500"`` or ``"500steps"`` → (60.0, 500).

    Raises:
        UserError: It is neither, or not above 0.
    """
    number = text.strip().removesuffix("steps").removesuffix("step").strip()
    try:
        if text.strip().endswith("s") and not text.strip().endswith(("steps", "step")):
            seconds = float(text.strip()[:-1])
            if seconds > 0:
                return seconds, None
        elif int(number) > 0:
            return 60.0, int(number)
    except ValueError:
        pass
    raise UserError(f"--checkpoint_every must be optimizer steps (500) or seconds (60s), above 0, got {text}.")
