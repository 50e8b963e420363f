"""Which file measures which table, and on what: the configuration behind it."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

from project.benchmark.flags import QUICK, Settings
from project.engine.cli import ProjectCLI, config_files

# What a table measures unless flags say otherwise. The MLP at batch 64 is the course's, and the hardest for overhead.
COURSE = ["--model.network", "MLP", "--model.lr", "0.002", "--model.label_smoothing", "0", "--data.batch_size", "64"]
PRESETS: dict[str, list[str]] = {"overhead": COURSE, "loaders": COURSE, "threads": COURSE}
# The whole pass has ten minutes for six tables.
IN_WHOLE_PASS: dict[str, dict[str, Any]] = {
    "devices": {"n": 3},
    "overhead": {"n": 3, "each_feature": False},
    "threads": {"n": 3},
    "accuracy": {"n": 3},
}


def measure_table(
    name: str, fit_flags: list[str], typed: dict[str, Any], whole_pass: bool = False
) -> list[dict[str, Any]]:
    """The rows of one table. What was typed, flags of ``fit`` and ``typed`` settings, comes last and wins."""
    usual = IN_WHOLE_PASS.get(name, {}) if whole_pass else {}
    settings = Settings(**{**usual, **typed})
    preset = [] if config_files(fit_flags) else PRESETS.get(name, [])  # a file says what is measured
    flags = [*preset, *(QUICK if settings.quick else []), *fit_flags]
    cli = ProjectCLI(flags, "project.benchmark")
    settings = replace(settings, fit_flags=flags, n=min(settings.n, 2) if settings.quick else settings.n)
    module = importlib.import_module(f"project.benchmark.{name}")
    rows: list[dict[str, Any]] = module.measure(cli, settings)
    return rows
