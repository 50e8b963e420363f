from __future__ import annotations

import csv
import json
import math
import os
from pathlib import Path

import pytest
import torch
from unbroken.errors import UserError
from unbroken.tables import check_output, format_metric, format_table, write_rows

ROWS = [
    {"file": "a b.png", "digit": "7", "probability": 0.1 + 0.2, "size": 12345},
    {"file": "ü,\n.png", "digit": "1", "probability": math.nan, "size": 3, "note": Path("x")},
]


def test_json_holds_the_rows_in_full_precision_and_null_for_what_is_not_a_number(
    tmp_path: Path,
) -> None:
    write_rows(tmp_path / "out.json", ROWS)
    read = json.loads((tmp_path / "out.json").read_text())
    assert read[0] == ROWS[0]
    assert read[1] == {
        "file": "ü,\n.png",
        "digit": "1",
        "probability": None,
        "size": 3,
        "note": "x",
    }


def test_tensors_and_arrays_are_written_whole(tmp_path: Path) -> None:
    mask = torch.arange(4000).view(2, 2000)
    write_rows(tmp_path / "out.json", [{"mask": [mask, mask.numpy()]}])
    (row,) = json.loads((tmp_path / "out.json").read_text())
    assert row["mask"] == [mask.tolist(), mask.tolist()]


def test_csv_reads_back_with_every_column_of_every_row(tmp_path: Path) -> None:
    write_rows(tmp_path / "out.CSV", ROWS)
    with open(tmp_path / "out.CSV", newline="") as file:
        first, second = csv.DictReader(file)
    assert float(first["probability"]) == 0.1 + 0.2
    assert (first["note"], second["note"], second["probability"], second["file"]) == (
        "",
        "x",
        "",
        "ü,\n.png",
    )


@pytest.mark.parametrize("start", ["=", "+", "-", "@", "\t"])
def test_a_text_in_a_csv_is_never_a_formula_and_stays_what_it_is_in_json(
    tmp_path: Path, start: str
) -> None:
    rows = [{"file": f"{start}cmd|'/c calc'!A1", f"{start}name": -1.5}]
    write_rows(tmp_path / "out.csv", rows)
    with open(tmp_path / "out.csv", newline="") as file:
        heading, cells = csv.reader(file)
    assert heading == ["file", f"'{start}name"]
    assert cells == [f"'{start}cmd|'/c calc'!A1", "-1.5"]
    write_rows(tmp_path / "out.json", rows)
    assert json.loads((tmp_path / "out.json").read_text()) == rows


def test_a_control_character_reaches_a_terminal_as_its_code() -> None:
    clears_the_screen = "\x1b[2J\x1b]0;title\x07a.png"
    turns_the_line = "\u202egnp.exe"
    table = format_table([{"file": clears_the_screen, "na\x1bme": turns_the_line}])
    assert "\x1b" not in table
    assert "\x07" not in table
    assert "\u202e" not in table
    assert r"\x1b[2J\x1b]0;title\x07a.png" in table
    assert r"na\x1bme" in table


def test_a_folder_that_cannot_be_opened_or_flushed_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Windows cannot open a folder."""

    def cannot_open(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    # pytest, too, opens folders.
    with monkeypatch.context() as patch:
        patch.setattr("unbroken.tables.os.open", cannot_open)
        write_rows(tmp_path / "out.json", ROWS[:1])
    assert json.loads((tmp_path / "out.json").read_text()) == ROWS[:1]


@pytest.mark.parametrize("name", ["out.csv", "out.json"])
def test_a_name_that_is_not_unicode_is_written_with_its_byte_as_a_code(
    tmp_path: Path, name: str
) -> None:
    write_rows(tmp_path / name, [{"file": os.fsdecode(b"a\xff.png")}])
    assert r"a\udcff.png" in (tmp_path / name).read_text(encoding="utf-8")


def test_table_aligns_numbers_right_and_marks_what_was_not_measured() -> None:
    table = format_table(
        [
            {"size": 16, "rate": 12345.6, "name": "a"},
            {"size": 1024, "rate": None, "name": "long name"},
        ]
    )
    assert table.split("\n") == [
        " size    rate  name",
        "-----  ------  ---------",
        "   16  12,346  a",
        "1,024       -  long name",
    ]


def test_a_metric_has_four_decimals_and_a_small_one_its_digits() -> None:
    values = [0.99123, 12.34567, 0.0, -0.001, 3.04e-05, -3.04e-05, math.nan]
    assert [format_metric(value) for value in values] == [
        "0.9912",
        "12.3457",
        "0.0000",
        "-0.0010",
        "3.04e-05",
        "-3.04e-05",
        "nan",
    ]


def test_of_a_long_list_the_terminal_shows_the_first_values(tmp_path: Path) -> None:
    mask = [[0] * 32, [1] * 32]
    short = [0.5, 0.25]
    table = format_table([{"mask": mask, "short": short}])
    zeros = " ".join(["0"] * 16)
    assert table.splitlines()[-1] == f"{zeros} ... (64 values)  0.5000 0.2500"
    write_rows(tmp_path / "out.json", [{"mask": mask}])
    assert json.loads((tmp_path / "out.json").read_text()) == [{"mask": mask}]


@pytest.mark.parametrize("name", ["out.txt", "out", "folder.csv", "missing/out.csv"])
def test_an_output_that_cannot_be_written_is_refused_in_one_line_before_any_work(
    tmp_path: Path, name: str
) -> None:
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(UserError, match=r"^--output must .*got .*\.") as error:
        check_output(tmp_path / name)
    assert "\n" not in str(error.value)
    assert os.listdir(tmp_path) == ["folder.csv"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_rows(tmp_path / "out.csv", ROWS)
    before = (tmp_path / "out.csv").read_bytes()

    def full_disk(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("unbroken.tables.os.replace", full_disk)
    with pytest.raises(
        UserError, match=r"could not be saved: No space left on device\. What was there before"
    ):
        write_rows(tmp_path / "out.csv", ROWS[:1])
    assert (tmp_path / "out.csv").read_bytes() == before
    assert os.listdir(tmp_path) == ["out.csv"]


def test_what_no_option_named_is_not_blamed_on_an_option(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"summary\.json could not be saved: No such file or directory\."
    ):
        write_rows(tmp_path / "gone" / "summary.json", ROWS)
