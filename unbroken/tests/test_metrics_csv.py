from __future__ import annotations

import os
import sys
import tracemalloc
from pathlib import Path

import pytest
from unbroken.errors import UserError
from unbroken.loggers.metrics_csv import MetricsCSV, read_metrics

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


def test_lines_are_appended_and_a_row_that_grew_is_joined_when_it_is_read_and_at_the_end(
    path: Path,
) -> None:
    logger = MetricsCSV(path)
    for step in range(3):
        logger.log_metrics({"a": step, "b": step / 3}, step)
        logger.save()
        assert logger.count == step + 1
    before = path.read_bytes()
    logger.log_metrics({"b": 1e-9 / 3}, 2)
    logger.save()
    assert logger.count == 3
    assert path.read_bytes().startswith(before), "no line is written over while a run goes on"
    wanted = [{"step": step, "a": step, "b": step / 3} for step in range(3)]
    wanted[2]["b"] = 1e-9 / 3
    assert read_metrics(path) == wanted
    logger.finalize("success")
    assert read(path) == wanted
    logger.log_metrics({"a": 7}, 3)
    logger.finalize("success")
    assert [row["step"] for row in read(path)] == [0, 1, 2, 3]


def test_a_line_that_a_kill_cut_short_is_no_row(path: Path) -> None:
    logger = MetricsCSV(path)
    logger.log_metrics({"a": 1.25}, 1)
    logger.save()
    with open(path, "ab") as file:
        file.write(b"1,,0.7")
    assert read_metrics(path) == [{"step": 1, "a": 1.25}]


def test_texts_make_no_rows(path: Path) -> None:
    logger = MetricsCSV(path)
    logger.log_metrics({"phase": "warm-up"}, 1)
    logger.log_metrics({"phase": "main"}, 2)
    logger.log_metrics({"a": 0.5}, 3)
    logger.save()
    assert logger.count == 1
    assert read_metrics(path) == [{"step": 3, "a": 0.5}]


def test_numbers_that_are_not_finite_are_kept(path: Path) -> None:
    logger = MetricsCSV(path)
    nan, infinity = float("nan"), float("inf")
    logger.log_metrics({"train/loss": 1.0, "val/loss": nan, "epoch": 0}, 1)
    logger.log_metrics({"train/loss": infinity, "val/loss": 0.5, "epoch": nan}, 2)
    logger.log_metrics({"train/loss": nan}, 3)
    logger.save()
    again = MetricsCSV(path)
    again.keep_rows(3)
    assert str(read_metrics(path)) == str(
        [
            {"step": 1, "epoch": 0, "train/loss": 1.0, "val/loss": nan},
            {"step": 2, "epoch": nan, "train/loss": infinity, "val/loss": 0.5},
            {"step": 3, "train/loss": nan},
        ]
    )


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
    logger.write(to_disk=True)
    assert on_disk == [path.stat().st_size]
    path.unlink()
    logger.write(to_disk=True)
    assert logger.count == 2


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


@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no limit of a file's size")
@pytest.mark.parametrize("further", [{}, {"new": 0.25}], ids=["a line", "a column"])
def test_rows_that_the_disk_does_not_take_wait_for_it(
    path: Path, capsys: pytest.CaptureFixture[str], further: dict[str, float]
) -> None:
    import resource

    logger = MetricsCSV(path)
    logger.log_metrics({"a": 0.5}, 0)
    logger.save()
    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    # A part of the next line fits, and the whole does not.
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 3, hard))
    try:
        for step in range(1, 4):
            logger.log_metrics({"a": step / 3, **further}, step)
        with pytest.raises(UserError, match=r"metrics.csv could not be saved: File too large\."):
            logger.write()
        with pytest.raises(UserError, match="File too large"):
            logger.finalize("success")
        # An error that ends the run is not hidden by this one.
        logger.finalize("failed")
        assert path.read_bytes() == before
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    logger.log_metrics({"b": 7.0}, 3)
    logger.log_metrics({"a": 4 / 3}, 4)
    logger.finalize("success")
    assert read(path) == [
        {"step": 0, "a": 0.5},
        {"step": 1, "a": 1 / 3, **further},
        {"step": 2, "a": 2 / 3, **further},
        {"step": 3, "a": 1.0, **further, "b": 7.0},
        {"step": 4, "a": 4 / 3},
    ]
    told = capsys.readouterr().out
    assert told.count("metrics.csv is not written: ") == 1
    assert told.count("metrics.csv is written again, since ") == 1


def test_a_resume_reads_a_long_file_line_by_line(path: Path) -> None:
    lines = (f"{step},0,{step / 3}" for step in range(20_000))
    path.write_text("\n".join(["step,epoch,a", *lines, ""]))
    tracemalloc.start()
    logger = MetricsCSV(path)
    logger.keep_rows(2)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The file has 550,000 bytes.
    assert peak < 300_000
    assert [row["step"] for row in read(path)] == [0, 1]
    assert logger.count == 2


@pytest.mark.skipif(sys.platform == "win32", reason="a file of zeros takes its room there")
def test_a_line_without_an_end_is_not_read_to_its_end(path: Path) -> None:
    path.write_bytes(b"step,a\n1,2\n")
    os.truncate(path, 3 * 2**30)
    with pytest.raises(UserError, match="has a line that is too long"):
        MetricsCSV(path)
