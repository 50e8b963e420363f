"""What jsonargparse and argparse say, as one line that names option, value and what is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
from lightning.pytorch import Callback
from numerals.fit import job as fit
from torch.distributed.run import parse_args
from unbroken.cli import start as entry
from unbroken.cli.cli import configure
from unbroken.cli.explain import explain, with_choices
from unbroken.cli.typed import CommandLine
from unbroken.errors import UserError

from tests.typed_settings import Typed

CLASSES = ["--model.class_path", "tests.typed_settings.Typed"]
CLASSES += ["--data.class_path", "tests.typed_settings.Numbers"]


class Refuses(Callback):
    """Its constructor takes no number below 1."""

    def __init__(self, count: int = 0) -> None:
        raise ValueError(f"count must be at least 1, not {count}")


class Sized(Typed):
    """Has a list among its settings."""

    def __init__(self, sizes: list[int] = [64]) -> None:  # noqa: B006 - it is only read
        super().__init__()


class Inherits(Typed):
    """LoaderPosition its arguments on."""

    def __init__(self, depth: int = 2, **kwargs: Any) -> None:
        super().__init__(**kwargs)


def error_of(*words: str) -> str:
    with pytest.raises(UserError) as error:
        configure(fit, "fit", [*CLASSES, *words])
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("path", "reason"), [("nope.Net", "No module named 'nope'"), ("tests.Net", "has no attribute")]
)
def test_of_a_class_that_is_not_there_the_class_is_told_and_no_option(
    path: str, reason: str
) -> None:
    for words in (["--model.lr", "1", "--model", path], ["--model", path, "--model.lr", "1"]):
        with pytest.raises(
            UserError, match=f"--model must be an import path .*, got {path}: "
        ) as e:
            configure(fit, "fit", words)
        assert reason in str(e.value)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--model.mode", "z"], "--model.mode must be one of x, y, 1, null, got z."),
        (["--model.lr", "x"], "--model.lr must be a number, got x."),
        (["--model.lr", "null"], "--model.lr must be a number, got null."),
        (
            ["--model.class_path", "tests.test_explain.Inherits", "--model.lr=null"],
            "--model.lr must be a number, got null.",
        ),
        (["--data.workers", "null"], "--data.workers must be a whole number, got null."),
        (
            ["--model.class_path", "tests.test_explain.Sized", "--model.sizes", "64,32"],
            "--model.sizes must be a list in brackets, such as [a,b], got 64,32.",
        ),
        # Names that are right for other classes are not suggested for this one.
        (["--model.weight_decay", "1"], "unknown option --model.weight_decay. See --help."),
        (["--data.source", "x"], "unknown option --data.source. See --help."),
        (
            ["--model.learning_rate", "1"],
            "unknown option --model.learning_rate. Did you mean --model.lr? See --help.",
        ),
        (
            ["--data.worker", "1"],
            "unknown option --data.worker. Did you mean --data.workers? See --help.",
        ),
        (
            ["--matmul_precision", "low"],
            "--matmul_precision must be one of highest, high, medium, got low.",
        ),
        (
            ["--logger", "torch.nn.Linear"],
            "--logger must be any of wandb, tensorboard, mlflow, trackio, csv, with commas between"
            " them, or false, or a class (package.module.Class), got torch.nn.Linear.",
        ),
        (
            ["--trainer.callbacks+=tests.test_explain.Refuses"],
            "tests.test_explain.Refuses: count must be at least 1, not 0",
        ),
        (
            [
                *("--trainer.callbacks+=EarlyStopping", "--trainer.callbacks.monitor", "x"),
                "--trainer.callbacks.mode",
                "up",
            ],
            "lightning.pytorch.callbacks.EarlyStopping: `mode` can be min, max, got up",
        ),
        (
            ["--default_root_dir", "s3://bucket/x"],
            "--default_root_dir must be a folder of this machine, or one that is mounted here,"
            " got s3://bucket/x. To keep runs there as well: --mirror s3://bucket/x",
        ),
    ],
)
def test_a_mistake_is_told_with_option_value_and_what_is_allowed(
    words: list[str], told: str
) -> None:
    assert error_of(*words) == told


def test_null_is_taken_where_an_argument_allows_it() -> None:
    words = [*CLASSES, "--model.text", "null", "--model.extra", "null", "--data.folder", "null"]
    assert configure(fit, "fit", words).resolved["model"]["init_args"]["text"] is None


def test_a_library_that_a_logger_lacks_is_told_in_a_short_line() -> None:
    told = error_of("--logger", "MLFlowLogger", "--trainer.logger.save_dir", "x")
    assert told.startswith("lightning.pytorch.loggers.MLFlowLogger: ")
    assert "mlflow" in told
    assert len(told) < 160


def test_a_literal_inside_another_type_names_its_values() -> None:
    hints = {"size": Literal["small", 2] | None}
    message = "--model.size must be a whole number, got x."
    expected = "--model.size must be one of small, 2, got x."
    assert with_choices(message, hints) == expected
    assert with_choices(message, {"size": int}) == message
    assert with_choices("anything else", hints) == "anything else"


def test_what_a_class_inside_another_refuses_is_told() -> None:
    sizes = {"d_model": 8, "nhead": 2, "activation": "torch.nn.functional.relu"}
    layer = {"class_path": "torch.nn.TransformerEncoderLayer", "init_args": sizes}
    layers = {"encoder_layer": layer, "num_layers": 2}
    network = {"class_path": "torch.nn.TransformerEncoder", "init_args": layers}
    model = {"class_path": "numerals.model.MNISTClassifier", "init_args": {"network": network}}
    base = {"model": model, "data": {"class_path": "numerals.data.MNISTDataModule"}}
    with pytest.raises(UserError) as error:
        configure(fit, "test", ["--data.source", "sample"], base)
    assert str(error.value) == "activation should be relu/gelu, not torch.nn.functional.relu"


@pytest.mark.parametrize("text", ["{a: b}", "a: b", "[1, 2]"])
def test_a_text_that_looks_like_a_mapping_or_a_list_stays_text(text: str) -> None:
    words = [*CLASSES, "--model.text", text, f"--data.root={text}"]
    config = configure(fit, "fit", words)
    assert config.module.given["text"] == text  # type: ignore[index]
    assert config.datamodule.root == text  # type: ignore[union-attr]
    assert config.resolved["model"]["init_args"]["text"] == text
    assert config.lost_in_record() == []


def test_an_unknown_sentence_is_shown_as_it_is() -> None:
    assert explain("something  new\nhappened", []) == "something new happened"


def test_a_monitor_passes_torchrun_behind_two_dashes() -> None:
    words = ["--nproc_per_node", "2", "-m", "numerals.fit", "--", "--monitor", "val/loss"]
    handed_on = parse_args(words).training_script_args
    seen: list[str] = []
    assert entry.exit_code(lambda argv: seen.extend(argv), handed_on) == 0
    assert entry.exit_code(lambda argv: seen.extend(argv), ["--", *seen[:2]]) == 0
    assert seen == ["--monitor", "val/loss"] * 2
    assert CommandLine(seen).value("monitor") == "val/loss"


@pytest.mark.parametrize(
    ("flags", "part"),
    [
        (["--gradient_clip_val", "-1"], "--gradient_clip_val must be at least 0, got -1"),
        (["--num_sanity_val_steps", "-5"], "--num_sanity_val_steps must be at least 0, or -1 for"),
        (
            ["--sync_batchnorm", "true", "--devices", "2", "--accelerator", "cpu"],
            "--sync_batchnorm needs GPUs",
        ),
    ],
)
def test_a_flag_that_would_do_nothing_or_crash_is_refused(
    workplace: Path, capsys: pytest.CaptureFixture[str], flags: list[str], part: str
) -> None:
    from numerals.fit import job as fit

    assert entry.exit_code(fit.main, [*CLASSES, "--max_epochs", "1", *flags]) == 2
    told = capsys.readouterr().err
    assert part in told
    assert told.count("\n") == 1
