"""The record of a run is the run: what config.yaml and a checkpoint hold is what was made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from lightning.pytorch import LightningModule
from numerals.fit import job as fit
from unbroken.cli.cli import Configuration, configure, differences
from unbroken.cli.plain_values import dump_yaml, put_into_mappings
from unbroken.cli.program import Program
from unbroken.cli.read_checkpoint import changes_between, leave_out_what_is_no_longer_taken
from unbroken.cli.typed import CommandLine
from unbroken.commands import test as test_command

from tests.commands import checkpoint
from tests.typed_settings import Rate

CLASSES = ["--model.class_path", "tests.typed_settings.Typed"]
CLASSES += ["--data.class_path", "tests.typed_settings.Numbers"]
SHORT = ["--max_epochs", "1", "--monitor", "val/loss", "--accelerator", "cpu"]
SHORT += ["--report", "false"]
BASE = """
model:
  class_path: tests.typed_settings.Typed
  init_args:
    extra: {net: {width: 32, depth: 2}, rate: 0.1}
    rate: {lr: 0.2, name: z}
data: {class_path: tests.typed_settings.Numbers}
"""


def read_again(config: Configuration) -> Configuration:
    """What the record of a configuration means, read from a file as --config reads it."""
    Path("record.yaml").write_text(dump_yaml(config.resolved))
    return configure(fit, "fit", ["--config", "record.yaml"])


@pytest.mark.parametrize(
    "text",
    [
        *("1e5", "77950e8", "#ff0000", "~"),
        *(pytest.param(text, marks=pytest.mark.nightly) for text in ("-3E7", "1_0e3", "no", "1.5")),
    ],
)
def test_a_text_that_looks_like_something_else_stays_a_text(workplace: Path, text: str) -> None:
    config = configure(fit, "fit", [*CLASSES, f"--model.text={text}", f"--data.root={text}"])
    made: Any = config.datamodule
    assert made.root == text
    resumed = configure(fit, "fit", [], config.resolved)
    for other in (config, read_again(config), resumed):
        assert other.datamodule.root == made.root  # type: ignore[union-attr]
        assert other.module.given["text"] == config.module.given["text"]
        assert other.resolved == config.resolved
    assert config.lost_in_record() == []


@pytest.mark.parametrize("text", ["#ff0000", "~", "77950e8"])
def test_an_optional_text_is_what_was_typed(text: str) -> None:
    assert configure(fit, "fit", [*CLASSES, "--model.text", text]).module.given["text"] == text


def test_null_is_nothing_and_a_number_a_number() -> None:
    words = [*CLASSES, "--model.text", "null", "--model.number", "1e3"]
    given = configure(fit, "fit", words).module.given
    assert given["text"] is None
    assert given["number"] == 1000.0


@pytest.mark.parametrize(
    "form", [["--model.extra.net.width", "64"], ["--model.extra.net.width=64"]]
)
def test_a_value_deep_in_a_mapping_leaves_its_siblings(workplace: Path, form: list[str]) -> None:
    Path("base.yaml").write_text(BASE)
    Path("more.yaml").write_text("model: {init_args: {lr: 0.5}}")
    files = ["--config", "base.yaml", "--config", "more.yaml"]
    more = ["--model.extra.net.name", "n", "--model.rate.lr", "0.3"]
    config = configure(fit, "fit", [*files, *form, *more])
    expected = {"net": {"width": 64, "depth": 2, "name": "n"}, "rate": 0.1}
    assert config.module.given["extra"] == expected
    assert config.module.given["rate"] == Rate(0.3, "z")
    assert config.module.lr == 0.5
    assert read_again(config).module.given == config.module.given
    resumed = configure(fit, "fit", ["--model.extra.net.depth", "3"], config.resolved)
    assert resumed.module.given["extra"]["net"] == {"width": 64, "depth": 3, "name": "n"}


def test_an_option_that_this_version_has_added_is_no_change_of_the_users() -> None:
    before = {"model": {"lr": 0.1, "args": {"momentum": 0.9}}}
    now = {"model": {"lr": 0.2, "new": 3, "args": {"momentum": 0.9, "nesterov": True}}}
    changed = ["model.lr: 0.1 → 0.2"]
    assert changes_between(before, now, CommandLine([])) == changed
    typed = CommandLine(["--model.args.nesterov", "true", "--model.new=3"])
    more = ["model.args.nesterov: None → True", *changed, "model.new: None → 3"]
    assert changes_between(before, now, typed) == more


def test_one_batch_and_all_batches_are_two_limits() -> None:
    before, now = ({"trainer": {"limit_val_batches": limit}} for limit in (1, 1.0))
    assert differences(before, now) == ["trainer.limit_val_batches: 1 → 1.0"]


def test_words_that_lead_into_no_mapping_stay_as_they_are() -> None:
    words = ["--trainer.max_epochs", "3", "--model.network.hidden", "[4]", "--data.root=x"]
    settings = {"model": {"class_path": "M", "init_args": {"network": {"class_path": "N"}}}}
    assert put_into_mappings(words, settings) == words


def test_a_run_in_a_folder_that_looks_like_a_number_is_tested_and_resumed(
    workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*CLASSES, *SHORT, "--data.root", "1e5", "--model.text", "77950e8", "--run_name", "r"]
    assert fit.main(words) == 0
    folder = Path("checkpoints/r")
    recorded = yaml.safe_load((folder / "config.yaml").read_text())
    assert recorded["data"]["init_args"]["root"] == "1e5"
    assert checkpoint(folder / "last.ckpt")["run"]["config"] == recorded
    assert test_command.main("numerals", []) == 0
    more = ["--run_name", "r", "--ckpt_path", "auto", "--max_epochs", "2"]
    assert fit.main(more) == 0
    assert "resuming r with trainer.max_epochs: 1 → 2\n" in capsys.readouterr().out


def test_what_the_record_would_lose_is_said_before_training(
    workplace: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from unbroken.cli import cli

    def lossy(made: cli.ProjectCLI) -> dict[str, Any]:
        values = whole(made)
        values["model"]["init_args"]["number"] = 4
        return values

    whole = cli.plain
    monkeypatch.setattr(cli, "plain", lossy)
    assert fit.main([*CLASSES, *SHORT]) == 0
    told = capsys.readouterr().out
    line = "config.yaml and checkpoints do not repeat this run: model.number: 3 → 4\n"
    assert line in told
    assert told.index(line) < told.index("parameters")


class Fewer(LightningModule):
    """A default class that took a further argument once."""

    def __init__(self, width: int = 1) -> None:
        super().__init__()


def test_settings_that_a_default_class_takes_no_more_are_left_out_and_said() -> None:
    program = Program("numerals", model=Fewer)
    path = program.default_classes["model"]
    base = {"model": {"class_path": path, "init_args": {"width": 2, "depth": 3}}, "data": None}
    told = leave_out_what_is_no_longer_taken(program, base)
    assert told.endswith("whose settings model.depth are no longer taken")
    assert base["model"] == {"class_path": path, "init_args": {"width": 2}}
    assert leave_out_what_is_no_longer_taken(program, base) == ""
    # Of another class nothing is known before it is imported.
    other = {"model": {"class_path": "mine.Module", "init_args": {"depth": 3}}}
    assert leave_out_what_is_no_longer_taken(program, other) == ""
