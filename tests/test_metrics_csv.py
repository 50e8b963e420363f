from __future__ import annotations

import os
from pathlib import Path

import pytest

from project.loggers.metrics_csv import MetricsCSV
from tests.monitored import read


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.csv"


def test_what_is_logged_at_one_step_is_one_row_whenever_it_is_written(path: Path) -> None:
    logger = MetricsCSV(path)
    logger.log_metrics({"train/loss": 2.5, "train/größe": 1}, 9)
    logger.save()
    logger.log_metrics(
        {"val/loss": 0.1, "train/loss": 3, "note": "of a module that tells all of its loggers"}, 19
    )
    logger.save()
    logger.log_metrics({"val/loss": 0.125}, 19)
    logger.finalize("success")
    assert read(path) == [
        {"step": 9, "train/loss": 2.5, "train/größe": 1},
        {"step": 19, "train/loss": 3, "val/loss": 0.125},
    ]


def test_a_row_that_grows_or_shrinks_is_written_over_and_the_file_not_anew(path: Path) -> None:
    logger = MetricsCSV(path)
    for step in range(3):
        logger.log_metrics({"a": step, "b": step / 3}, step)
        logger.save()
    file = path.stat().st_ino
    for value in (1e-9 / 3, 5):
        logger.log_metrics({"b": value}, 2)
        logger.save()
        assert read(path)[2] == {"step": 2, "a": 2, "b": value}
        assert path.stat().st_ino == file
    logger.log_metrics({"a": 7}, 3)
    logger.save()
    assert [row["step"] for row in read(path)] == [0, 1, 2, 3]


@pytest.mark.parametrize("kept", [0, 1, 2])
def test_a_resumed_run_goes_on_behind_the_rows_that_its_checkpoint_knew(
    path: Path, kept: int
) -> None:
    first = MetricsCSV(path)
    for step in range(4):
        first.log_metrics({"a": step}, step)
        first.save()
    with open(path, "a") as file:
        file.write("4,")  # killed in the middle of a row
    again = MetricsCSV(path)
    again.keep_rows(kept)
    if kept:
        again.log_metrics({"b": 0.5}, kept - 1)  # joins the row that was saved with the checkpoint
        again.save()
    again.log_metrics({"a": 9}, 9)
    again.finalize("success")
    rows = [{"step": step, "a": step} for step in range(kept)]
    if kept:
        rows[-1]["b"] = 0.5
    assert read(path) == [*rows, {"step": 9, "a": 9}]


def test_a_file_that_was_taken_away_is_begun_again(path: Path) -> None:
    logger = MetricsCSV(path)
    logger.log_metrics({"a": 1}, 1)
    logger.save()
    path.unlink()
    logger.log_metrics({"a": 2}, 2)
    logger.save()
    assert read(path) == [{"step": 2, "a": 2}]


def test_rows_that_a_checkpoint_counts_are_on_the_disk(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = MetricsCSV(path)
    logger.log_metrics({"a": 1}, 1)
    logger.save()
    on_disk: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: on_disk.append(os.fstat(file).st_size))
    logger.log_metrics({"a": 2}, 2)
    logger.save()
    assert not on_disk, "a log step need not wait for the disk"
    assert logger.save(to_disk=True) == 2
    assert on_disk == [path.stat().st_size]
    path.unlink()
    assert logger.save(to_disk=True) == 2


def test_any_metric_name_is_kept_and_none_takes_the_place_of_the_step(path: Path) -> None:
    names = ['a,b "c"\nd', "<script>", "größe/µ", "", "step"]
    logger = MetricsCSV(path)
    logger.log_metrics(dict.fromkeys(names, 2.5), 7)
    logger.save()
    logger.log_metrics({"$x^2$": 1.0}, 8)
    logger.finalize("success")
    MetricsCSV(path).keep_rows(2)
    assert read(path) == [{**dict.fromkeys(names, 2.5), "step": 7}, {"step": 8, "$x^2$": 1.0}]


def test_a_file_taken_away_after_some_rows_gets_no_row_twice(path: Path) -> None:
    logger = MetricsCSV(path)
    for step in range(3):
        logger.log_metrics({"a": step}, step)
        logger.save()
    path.unlink()
    for name in ("a", "b"):
        logger.log_metrics({name: 5}, 5)
        logger.save()
    assert read(path) == [{"step": 5, "a": 5, "b": 5}]
