from __future__ import annotations

import csv
import io
import json
import os
import shutil
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from numerals.fit import job as fit
from numerals.model import MNISTClassifier
from PIL import Image, ImageDraw, ImageFont
from unbroken import pictures
from unbroken.cli import start as entry
from unbroken.cli.read_checkpoint import Loaded, load
from unbroken.commands.predict import command as predict
from unbroken.commands.predict import contact_sheet
from unbroken.commands.predict.answers import predict_batch, to_rows
from unbroken.commands.predict.files import find_files
from unbroken.commands.predict.labelling import predict_files
from unbroken.commands.predict.preparation import choose_preparation
from unbroken.data import PictureFolder, class_folders
from unbroken.data.drawn_figures import find_figure, is_unclear
from unbroken.data.images import collate_images, fit_image
from unbroken.errors import BadImage, UserError
from unbroken.pictures import read_pixels

from configs.examples.png_folder import PngFolder
from tests.digit_files import WAYS
from tests.photos import KINDS, photograph, take_photographs
from tests.plain_module import rows
from tests.stopped_runs import SHORT, error_of, train
from tests.trained import trained_checkpoint


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    loaded = load(fit, trained_checkpoint())
    loaded.datamodule.setup("test")
    return loaded


@pytest.fixture(scope="module")
def digits(loaded: Loaded) -> tuple[np.ndarray, np.ndarray]:
    """300 test digits spread over the test set: uint8 (300, 28, 28), and their labels (300,)."""
    test = loaded.datamodule.splits["test"]
    chosen = np.arange(300) * (len(test) // 300)
    return test.images[chosen, 0].numpy(), test.labels[chosen].numpy()


def test_without_files_the_batches_of_the_predict_dataloader_are_answered(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    for module, precision in (("Answers", "32"), ("Lists", "64"), ("Queue", "32")):
        train(
            module,
            *("--model", f"tests.odd_modules.{module}", "--data", "null", "--accelerator", "cpu"),
            *("--precision", f"{precision}-true"),
            *SHORT,
        )
    capsys.readouterr()
    best = ["--ckpt_path", "checkpoints/Answers/best.ckpt"]
    assert predict.main("numerals", [*best, "--output", "answers.csv"]) == 0
    assert "answer" in capsys.readouterr().out
    with open("answers.csv", newline="") as file:
        found = list(csv.DictReader(file))
    assert [row["row"] for row in found] == [f"row {index % 4}" for index in range(11)]
    module = load(fit, Path(best[1])).module
    with torch.no_grad():
        expected = module(torch.stack([row[0] for row in rows(11, 2)]))
    assert [float(row["answer"]) for row in found] == pytest.approx(expected.flatten().tolist())

    # One loader whose answers are lists, of a run in float64.
    best = ["--ckpt_path", "checkpoints/Lists/best.ckpt"]
    assert predict.main("numerals", [*best, "--output", "answers.json"]) == 0
    found = json.loads(Path("answers.json").read_text())
    module = load(fit, Path(best[1])).module.double()
    with torch.no_grad():
        expected = module(torch.stack([row[0] for row in rows(11, 2)]).double())
    assert [row.keys() for row in found] == [{"prediction"}] * 11
    answers = [row["prediction"] for row in found]
    assert answers == pytest.approx(expected.flatten().tolist(), rel=1e-12)

    line = error_of(
        capsys, "--ckpt_path", "checkpoints/Queue/best.ckpt", main=partial(predict.main, "numerals")
    )
    assert line == (
        "error: there is nothing to predict: name files, or give Queue a predict_dataloader, for"
        " example of the rows of a table."
    )


@pytest.mark.parametrize(
    ("count", "worse"), [(4, 0.0), pytest.param(300, 0.01, marks=pytest.mark.nightly)]
)
def test_digits_in_ten_kinds_of_file_are_predicted_as_well_as_straight_from_mnist(
    loaded: Loaded, digits: tuple[np.ndarray, np.ndarray], tmp_path: Path, count: int, worse: float
) -> None:
    """None of four worse, and at most three of 300."""
    images, labels = digits[0][:count], digits[1][:count]
    answer = predict_batch(loaded, torch.from_numpy(images)[:, None])
    direct = np.mean(answer.argmax(dim=1).numpy() == labels)
    assert direct > 0.9
    rng = np.random.default_rng(0)
    found = {}
    for way in WAYS:
        paths = [
            way(image, tmp_path / f"{way.__name__}_{index:03}", rng)
            for index, image in enumerate(images)
        ]
        rows, _, bad = predict_files(loaded, paths)
        assert not bad
        assert [row["file"] for row in rows] == [str(path) for path in paths]
        found[way.__name__] = np.mean(accurate(rows, labels))
    print(f"straight from MNIST {direct:.4f}", found)
    assert min(found.values()) >= direct - worse - 1e-9, found
    assert found["as_it_is"] == direct


def accurate(rows: list[dict], labels: np.ndarray) -> list[bool]:
    return [int(row["digit"]) == label for row, label in zip(rows, labels, strict=True)]


def test_an_mnist_image_comes_out_of_preparation_unchanged(
    digits: tuple[np.ndarray, np.ndarray],
) -> None:
    for image in digits[0]:
        pixels = np.repeat(image[..., None].astype(np.float32) / 255, 3, axis=2)
        np.testing.assert_array_equal(find_figure(pixels)[0], image[None])


@pytest.mark.nightly
def test_prepared_digits_have_mnists_box_and_centre_of_mass(
    digits: tuple[np.ndarray, np.ndarray],
) -> None:
    for image in digits[0][:50]:
        wide = np.zeros((200, 300), dtype=np.float32)
        wide[20:160, 150:290] = (
            np.asarray(Image.fromarray(image).resize((140, 140)), dtype=np.float32) / 255
        )
        prepared = find_figure(1 - np.repeat(wide[..., None], 3, axis=2))[0][0].astype(np.float64)
        rows, columns = np.flatnonzero(prepared.any(axis=1)), np.flatnonzero(prepared.any(axis=0))
        assert max(np.ptp(rows), np.ptp(columns)) + 1 in (
            19,
            20,
        )  # 19: a faint outermost row rounds to 0
        centre = [
            prepared.sum(axis=1) @ np.arange(28),
            prepared.sum(axis=0) @ np.arange(28),
        ] / prepared.sum()
        np.testing.assert_allclose(centre, 14, atol=0.51)


def test_digits_of_a_system_font_are_read(loaded: Loaded, tmp_path: Path) -> None:
    """DejaVu ships with matplotlib. Bar for a net of seconds; the README's figure is of many fonts
    and a full run.
    """
    import matplotlib

    font = ImageFont.truetype(
        str(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"), 150
    )
    for digit in range(10):
        picture = Image.new("RGB", (300, 220), "navy")
        ImageDraw.Draw(picture).text((20, 20), str(digit), font=font, fill="yellow")
        picture.save(tmp_path / f"{digit}.png")
    rows, _, _ = predict_files(loaded, find_files([str(tmp_path)])[0])
    assert sum(row["digit"] == Path(row["file"]).stem for row in rows) >= 7


@pytest.mark.nightly
@pytest.mark.parametrize("every", [5, 1])
def test_photographs_under_uneven_light_on_ruled_paper_and_with_noise_are_read(
    loaded: Loaded, tmp_path: Path, every: int
) -> None:
    """Of all 60 a background that is one plane, without removal of lines, leaves 35 right; 8 of the
    ruled ones.
    """
    test = loaded.datamodule.splits["test"]
    labels = take_photographs(test.images[:, 0].numpy(), test.labels.numpy(), tmp_path, every)
    rows, _, bad = predict_files(loaded, list(labels))
    assert not bad
    right = np.array([int(row["digit"]) == labels[Path(row["file"])] for row in rows]).reshape(
        len(KINDS), -1
    )
    right_of_each = dict(zip(KINDS, right.sum(axis=1).tolist(), strict=True))
    print(f"right of {right.shape[1]} photographs each: {right_of_each}")
    assert right.mean() >= 0.9
    wrong_and_sure = [
        row for row, fits in zip(rows, right.flat, strict=True) if not fits and not row["note"]
    ]
    assert len(wrong_and_sure) <= 1
    assert sum(row["note"] == "more than one digit" for row in rows) <= 2


@pytest.mark.nightly
def test_several_digits_are_said_and_counted_and_noise_is_no_digit(
    digits: tuple[np.ndarray, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rng = np.random.default_rng(0)
    for number, kind in enumerate(KINDS):
        photograph(list(digits[0][number : number + 3]), kind, rng).save(
            tmp_path / f"photo{number}.png"
        )
    scan = Image.fromarray(255 - np.concatenate(list(digits[0][:2]), axis=1))
    scan.resize((280, 140)).save(tmp_path / "scan.png")
    Image.fromarray(rng.integers(0, 256, (150, 200, 3), dtype=np.uint8)).save(
        tmp_path / "television.png"
    )
    Image.fromarray(digits[0][0]).save(tmp_path / "one.png")
    output = tmp_path / "labels.json"
    words = [
        str(tmp_path / "*.png"),
        "--ckpt_path",
        str(trained_checkpoint()),
        "--output",
        str(output),
    ]
    assert entry.exit_code(partial(predict.main, "numerals"), words) == 2
    told = capsys.readouterr()
    assert "television.png: nothing in it stands out like a drawn figure" in told.err
    assert "of 5 files: 4 more than one digit" in told.out
    notes = {Path(row["file"]).stem: row["note"] for row in json.loads(output.read_text())}
    assert [name for name, note in sorted(notes.items()) if note == "more than one digit"] == [
        *("photo0", "photo1", "photo2", "scan"),
    ]


def test_an_unsure_label_says_so(loaded: Loaded, tmp_path: Path) -> None:
    picture = np.zeros((28, 28), dtype=np.uint8)
    picture[6:22, 4:24] = 255
    Image.fromarray(picture).save(tmp_path / "block.png")
    (row,), _, _ = predict_files(loaded, [tmp_path / "block.png"])
    assert row["probability"] < 0.7
    assert row["note"] == "unsure (below 70%)"


@pytest.mark.nightly
def test_dust_and_a_digit_in_a_corner_do_not_matter(
    loaded: Loaded, digits: tuple[np.ndarray, np.ndarray]
) -> None:
    clean, dusty = [], []
    for image in digits[0][:100]:
        page = np.ones((200, 200, 3), dtype=np.float32)
        page[110:194, 110:194] -= (
            np.asarray(Image.fromarray(image).resize((84, 84)), dtype=np.float32)[..., None] / 255
        )
        clean.append(find_figure(page)[0])
        page[10:13, 10:13] = 0
        dusty.append(find_figure(page)[0])
    np.testing.assert_allclose(
        np.array(dusty, dtype=int), np.array(clean, dtype=int), atol=8
    )  # full ink is re-estimated


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 40), (40, 1), (2, 2), (3, 500)])
def test_pictures_of_odd_sizes_are_prepared_or_refused_never_a_crash(
    height: int, width: int
) -> None:
    rng = np.random.default_rng(0)
    for picture in (
        np.zeros((height, width, 3)),
        np.ones((height, width, 3)),
        rng.random((height, width, 3)),
    ):
        try:
            prepared = find_figure(picture.astype(np.float32))[0]
        except BadImage:
            continue
        assert prepared.shape == (1, 28, 28)
        assert prepared.any()


def test_a_picture_whose_ink_is_all_below_its_noise_is_looked_at_as_a_photograph() -> None:
    assert is_unclear(np.zeros((60, 60), dtype=np.float32), 0.0)


def test_a_picture_for_another_networks_shape_keeps_its_middle_and_colours() -> None:
    pixels = np.zeros((10, 30, 3), dtype=np.uint8)
    pixels[:, 10:20] = (255, 0, 0)
    fitted = fit_image(Image.fromarray(pixels), (3, 32, 32))
    assert fitted.shape == (3, 32, 32)
    assert (fitted[0, :, 4:28] == 255).all()
    assert (fitted[1:] == 0).all()
    assert fit_image(Image.fromarray(pixels), (1, 8, 8)).shape == (1, 8, 8)


def test_bad_files_are_named_and_skipped_and_the_exit_code_says_so(
    digits: tuple[np.ndarray, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "scans"
    (folder / "below").mkdir(parents=True)
    Image.fromarray(digits[0][0]).save(folder / "good.png")
    Image.fromarray(digits[0][1]).save(folder / "below" / "also good.webp", lossless=True)
    (folder / "truncated.png").write_bytes((folder / "good.png").read_bytes()[:100])
    (folder / "text.jpg").write_text("no image at all")
    Image.new("L", (50, 50), 200).save(folder / "blank.bmp")
    Image.new("1", (20_000, 20_000)).save(folder / "bomb.png")
    (folder / "notes.txt").write_text("not taken from a folder")
    output = tmp_path / "labels.csv"
    words = [
        str(folder),
        str(folder / "*.png"),
        str(folder / "missing.png"),
        "--ckpt_path",
        str(trained_checkpoint()),
    ]
    assert (
        entry.exit_code(partial(predict.main, "numerals"), [*words, "--output", str(output)]) == 2
    )
    told = capsys.readouterr()
    assert [
        line.split(": ", 1)[0].removeprefix(f"skipped {folder}/") for line in told.err.splitlines()
    ] == [
        "blank.bmp",
        "bomb.png",
        "text.jpg",
        "truncated.png",
        "missing.png",
        "error",
    ]
    assert "Traceback" not in told.err
    with open(output, newline="") as file:
        rows = list(csv.DictReader(file))
    assert [Path(row["file"]).name for row in rows] == ["also good.webp", "good.png"]
    assert list(rows[0]) == [
        "file",
        "digit",
        "probability",
        "runner_up",
        "runner_up_probability",
        "note",
    ]
    for name in ("also good.webp", "good.png"):
        assert name in told.out


@pytest.mark.nightly
def test_an_older_table_stays_where_no_file_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "text.jpg").write_text("no image at all")
    (tmp_path / "labels.json").write_text("older")
    words = [str(tmp_path / "text.jpg"), "--ckpt_path", str(trained_checkpoint())]
    assert (
        entry.exit_code(
            partial(predict.main, "numerals"), [*words, "--output", str(tmp_path / "labels.json")]
        )
        == 2
    )
    assert (tmp_path / "labels.json").read_text() == "older"


def test_good_files_give_exit_code_0_a_json_file_and_a_contact_sheet(
    digits: tuple[np.ndarray, np.ndarray], tmp_path: Path
) -> None:
    for index in range(7):
        Image.fromarray(digits[0][index]).save(tmp_path / f"{index}.png")
    words = [str(tmp_path / "[0-9].png"), "--ckpt_path", str(trained_checkpoint())]
    flags = ["--output", str(tmp_path / "out.json"), "--contact_sheet", str(tmp_path / "sheet.png")]
    assert entry.exit_code(partial(predict.main, "numerals"), [*words, *flags]) == 0
    rows = json.loads((tmp_path / "out.json").read_text())
    assert len(rows) == 7
    assert all(
        0.5 >= row["runner_up_probability"] >= 0 and row["digit"] != row["runner_up"]
        for row in rows
    )
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert np.asarray(sheet).min() == 0  # the digits' background, black on the white sheet
        assert sheet.width > 3 * 84
        colours = {colour for _, colour in sheet.convert("RGB").getcolors(1 << 20)}
    assert (192, 80, 0) in colours  # of unsure labels, in the legend at least


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["no*such.png"], "IMAGE no*such.png matches no file"),
        ([""], "IMAGE must be a file, a folder or a pattern, got nothing"),
        (["EMPTY"], "is a folder without files in it"),
        (["x.png", "--output", "x.txt"], "--output must end in .json or .csv, got x.txt"),
        (["x.png", "--contact_sheet", "x.csv"], "--contact_sheet must end in .png, got x.csv"),
        (
            ["x.png", "--output", "/proc/x.json"],
            "--output must be a file you may write, got /proc/x.json",
        ),
        (["~nouser/*.png"], "IMAGE ~nouser/*.png matches no file"),
        (["x.png", "--ckpt", "a"], "unknown option --ckpt. Did you mean --ckpt_path?"),
        (["--contact_sheet", "x.png"], "--contact_sheet must draw files, got no IMAGE"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [str(tmp_path) if word == "EMPTY" else word for word in words]
    assert entry.exit_code(partial(predict.main, "numerals"), words) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.nightly
def test_a_checkpoint_of_somebody_elses_package_is_used_only_where_that_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = ModuleType("theirs")
    theirs.Classifier = type("Classifier", (MNISTClassifier,), {"__module__": "theirs"})
    monkeypatch.setitem(sys.modules, "theirs", theirs)
    saved = torch.load(trained_checkpoint(), weights_only=True)
    saved["run"]["config"]["model"]["class_path"] = "theirs.Classifier"
    torch.save(saved, tmp_path / "theirs.ckpt")
    Image.new("L", (28, 28)).save(tmp_path / "black.png")
    words = [str(tmp_path / "black.png"), "--ckpt_path", str(tmp_path / "theirs.ckpt")]
    assert entry.exit_code(partial(predict.main, "numerals"), words) == 2
    assert "add --trust_checkpoint true if you trust who made the file" in capsys.readouterr().err
    assert (
        entry.exit_code(partial(predict.main, "numerals"), [*words, "--trust_checkpoint", "true"])
        == 2
    )
    assert "one plain colour, nothing drawn in it" in capsys.readouterr().err


def test_each_file_is_taken_once_and_hidden_ones_are_not(tmp_path: Path) -> None:
    tmp_path = tmp_path / ".named"
    (tmp_path / ".ipynb_checkpoints" / "in").mkdir(parents=True)
    for name in ("b.png", "a.PNG", ".hidden.png", "c.txt", ".ipynb_checkpoints/in/d.png"):
        (tmp_path / name).write_bytes(b"")
    words = [str(tmp_path), str(tmp_path / "b.png")]
    images = [tmp_path / "a.PNG", tmp_path / "b.png"]
    assert find_files(words, only_images=True) == (images, [])
    assert find_files(words) == ([*images, tmp_path / "c.txt"], [])
    with pytest.raises(UserError):
        find_files([str(tmp_path / "*.gif")])
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "c.txt").write_bytes(b"")
    with pytest.raises(UserError, match="is a folder without files with an image's ending"):
        find_files([str(tmp_path / "texts")], only_images=True)


def test_a_linked_folder_is_left_out_and_said(tmp_path: Path) -> None:
    (tmp_path / "scans").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "scans" / "a.png").write_bytes(b"")
    (tmp_path / "elsewhere" / "b.png").write_bytes(b"")
    link = tmp_path / "scans" / "more"
    link.symlink_to(tmp_path / "elsewhere")
    found, told = find_files([str(tmp_path / "scans")])
    assert found == [tmp_path / "scans" / "a.png"]
    assert told == [f"{link} is a link to a folder: name it, or {link}/*"]
    assert find_files([str(link)]) == ([link / "b.png"], [])
    # Somebody else may have named it.
    link.rename(link.with_name("more\x1b[2J"))
    _, (line,) = find_files([str(tmp_path / "scans")])
    assert line.isprintable()


def test_the_contact_sheet_has_room_for_its_legend_and_letters_of_many_alphabets(
    tmp_path: Path,
) -> None:
    missing = bytes(contact_sheet.font(14).getmask("\U0010fffd"))
    for letter in "éößñΩжł":
        assert bytes(contact_sheet.font(14).getmask(letter)) != missing
    row = {"file": "größe-é.png", "digit": "7", "probability": 0.5, "note": "unsure"}
    path = tmp_path / "sheet.png"
    contact_sheet.draw_contact_sheet(path, [torch.zeros(1, 28, 28)], [row])
    with Image.open(path) as sheet:
        legend = np.asarray(sheet)[-20:]
    # The last letter of the legend is not cut.
    assert (legend[:, -10:] == 255).all()
    assert contact_sheet.shortened("a" * 40, 14).count("…") == 1
    assert contact_sheet.shortened("abc", 14) == "abc"


@pytest.mark.nightly
def test_an_empty_folder_among_others_is_skipped_and_named(
    digits: tuple[np.ndarray, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("full", "empty", "texts"):
        (tmp_path / "scans" / name).mkdir(parents=True)
    Image.fromarray(digits[0][0]).save(tmp_path / "scans" / "full" / "a.png")
    (tmp_path / "scans" / "texts" / "b.txt").write_text("no image")
    every_folder = sorted(str(path) for path in (tmp_path / "scans").iterdir())
    checkpoint = ["--ckpt_path", str(trained_checkpoint())]
    for words in (every_folder, [str(tmp_path / "scans" / "*")]):
        assert entry.exit_code(partial(predict.main, "numerals"), [*words, *checkpoint]) == 0
        told = capsys.readouterr()
        assert "full/a.png" in told.out
        empty, texts = told.err.splitlines()
        assert empty.startswith(f"skipped: {tmp_path}/scans/empty is a folder without files")
        assert texts.startswith(f"skipped: {tmp_path}/scans/texts is a folder without files")


def test_the_name_of_a_file_does_not_reach_the_terminal_as_a_command(
    digits: tuple[np.ndarray, np.ndarray], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    clears_the_screen = "\x1b[2J.png"
    Image.fromarray(digits[0][0]).save(tmp_path / f"good{clears_the_screen}")
    (tmp_path / f"bad{clears_the_screen}").write_text("no image at all")
    words = [str(tmp_path), "--ckpt_path", str(trained_checkpoint())]
    assert entry.exit_code(partial(predict.main, "numerals"), words) == 2
    told = capsys.readouterr()
    assert r"good\x1b[2J.png" in told.out
    assert r"bad\x1b[2J.png: not an image" in told.err
    assert "\x1b" not in told.out + told.err


def test_postscript_is_never_started(tmp_path: Path) -> None:
    """Pillow would hand an .eps file to Ghostscript, a whole programming language, whatever its
    name ends in.
    """
    Image.new("RGB", (50, 50)).save(tmp_path / "x.eps")
    shutil.copy(tmp_path / "x.eps", tmp_path / "x.png")
    with pytest.raises(BadImage, match="not an image"):
        read_pixels(tmp_path / "x.png")


def test_sixteen_bits_and_transparency_are_not_clipped(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, 32768, 65535]], dtype=np.uint16)).save(tmp_path / "deep.png")
    np.testing.assert_allclose(read_pixels(tmp_path / "deep.png")[0, :, 0], [0, 0.5, 1], atol=1e-4)
    for shade in (0, 255):
        Image.fromarray(np.array([[[shade] * 3 + [0], [shade] * 3 + [255]]], dtype=np.uint8)).save(
            tmp_path / "c.png"
        )
        np.testing.assert_allclose(np.ptp(read_pixels(tmp_path / "c.png"), axis=1), 1)


def test_a_large_picture_is_reduced_to_the_same_pixels_with_and_without_transparency(
    tmp_path: Path,
) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (60, 2100, 3), dtype=np.uint8)
    opaque = Image.fromarray(noise)
    opaque.save(tmp_path / "opaque.png")
    opaque.convert("RGBA").save(tmp_path / "alpha.png")
    found = read_pixels(tmp_path / "opaque.png")
    assert found.shape == (30, 1050, 3)
    np.testing.assert_array_equal(found, read_pixels(tmp_path / "alpha.png"))


def test_a_large_grey_picture_is_reduced_to_every_nth_of_its_pixels(tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 65536, (60, 2100), dtype=np.uint16)
    Image.fromarray(noise).save(tmp_path / "deep.png")
    expected = np.repeat(noise[::2, ::2, None].astype(np.float32) / 65535, 3, axis=2)
    np.testing.assert_array_equal(read_pixels(tmp_path / "deep.png"), expected)


def icon_of(picture: bytes) -> bytes:
    """A file of one icon that says that it is 16 x 16, whatever the picture in it."""
    return struct.pack("<HHHBBBBHHII", 0, 1, 1, 16, 16, 0, 0, 1, 32, len(picture), 22) + picture


@pytest.mark.filterwarnings("ignore:Image was not the expected size")
def test_the_bound_of_pixels_holds_for_the_picture_in_an_icon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5000)
    picture = io.BytesIO()
    Image.new("RGBA", (80, 80)).save(picture, "png")
    path = tmp_path / "large.ico"
    bitmap = struct.pack("<IiiHHIIiiII", 40, 80, 160, 1, 32, 0, 0, 0, 0, 0, 0)
    for inside in (picture.getvalue(), bitmap + b"\0" * 80 * 80 * 5):
        path.write_bytes(icon_of(inside))
        # What is refused is not decoded.
        monkeypatch.setattr(Image, "open", None)
        with pytest.raises(BadImage, match="more than 5,000 pixels"):
            read_pixels(path)
        monkeypatch.undo()
        assert read_pixels(path).shape == (80, 80, 3)
        monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5000)
    path.write_bytes(icon_of(picture.getvalue())[:20])
    with pytest.raises(BadImage):
        read_pixels(path)


def test_what_is_decoded_is_bound_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pictures, "MOST_DECODED", 40 * 40 * 4)
    sizes = {"RGBA.png": 1, "F.tiff": 1, "L.png": 2, "RGBA.jp2": 0.5}
    for name, factor in sizes.items():
        side = int(40 * factor)
        Image.new(name.partition(".")[0], (side, side)).save(tmp_path / name)
        read_pixels(tmp_path / name)
        Image.new(name.partition(".")[0], (side + 1, side)).save(tmp_path / name)
        with pytest.raises(BadImage, match="more than 6,400 bytes while"):
            read_pixels(tmp_path / name)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no named pipes")
def test_a_named_pipe_is_skipped_and_one_that_was_given_is_read(
    tmp_path: Path, loaded: Loaded
) -> None:
    Image.new("L", (28, 28)).save(tmp_path / "a.png")
    os.mkfifo(tmp_path / "z.png")
    for typed in (str(tmp_path / "*.png"), str(tmp_path / "z.png")):
        found, _ = find_files([typed])
        skipped = predict_files(loaded, found).skipped[-1]
        assert skipped == (tmp_path / "z.png", "no ordinary file")
    with pytest.raises(BadImage, match="no ordinary file"):
        read_pixels(tmp_path / "z.png")
    reading, writing = os.pipe()
    os.write(writing, (tmp_path / "a.png").read_bytes())
    os.close(writing)
    assert read_pixels(f"/dev/fd/{reading}").shape == (28, 28, 3)
    os.close(reading)


@pytest.mark.nightly
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_a_large_picture_takes_little_more_memory_than_its_pixels(
    tmp_path: Path, mode: str
) -> None:
    decoded_bytes = len(Image.new(mode, (9000, 9000), 255).tobytes())
    Image.new(mode, (9000, 9000), 255).save(tmp_path / "large.png", compress_level=1)
    # Room for the reduced pixels as floats, of which there are some copies
    most_bytes = 1.5 * decoded_bytes + 200e6
    code = """
import sys
from pathlib import Path
from unbroken.pictures import read_pixels

def peak() -> int:
    # The figure of getrusage begins with that of the process before exec.
    text = Path("/proc/self/status").read_text()
    return 1024 * int(text.partition("VmHWM:")[2].split()[0])

before = peak()
read_pixels(sys.argv[1])
print(peak() - before)
"""
    command = [sys.executable, "-c", code, str(tmp_path / "large.png")]
    found = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(found.stdout) < most_bytes


def save_in_four_ways(ink: np.ndarray, folder: Path) -> list[Path]:
    """A dark drawing (height, width) on white: plain, upside down, with 16 bits, transparent."""
    paths = [folder / f"{name}.png" for name in ("plain", "turned", "deep", "clear")]
    grey = Image.fromarray(255 - ink)
    grey.convert("RGB").save(paths[0])
    upside_down = Image.Exif()
    upside_down[0x0112] = 3
    grey.transpose(Image.Transpose.ROTATE_180).save(paths[1], exif=upside_down)
    Image.fromarray((255 - ink).astype(np.uint16) * 257).save(paths[2])
    Image.merge("RGBA", (grey, grey, grey, Image.fromarray(ink))).save(paths[3])
    return paths


@pytest.mark.parametrize("channels", [1, 3])
def test_training_and_prediction_see_the_same_pixels_of_a_picture(
    channels: int, tmp_path: Path
) -> None:
    ink = np.zeros((12, 12), np.uint8)
    ink[2:5, 1:7] = 255
    folder = tmp_path / "train" / "up"
    folder.mkdir(parents=True)
    paths = save_in_four_ways(ink, folder)
    shape = (channels, 12, 12)
    data = SimpleNamespace(image_shape=shape)
    prepare = choose_preparation(SimpleNamespace(datamodule=data)).prepare  # type: ignore[arg-type]
    expected = torch.from_numpy(255 - ink).expand(shape)
    trained = PictureFolder(tmp_path / "train", ["up"])
    assert len(trained) == 4
    for picture, _ in trained:
        assert torch.equal(fit_image(picture, shape), expected)
    for path in paths:
        prepared, _ = prepare(path)
        assert torch.equal(prepared, expected)
        # A data set of somebody's own opens its files by Pillow alone.
        images, _ = collate_images([(Image.open(path), 0)], shape)
        assert torch.equal(images[0], expected)


def test_classes_are_numbered_by_the_training_folder_alone(tmp_path: Path) -> None:
    picture = Image.new("RGB", (4, 4))
    for name in ("train/rare", "train/common", "train/.ipynb_checkpoints", "test/rare"):
        (tmp_path / name).mkdir(parents=True)
        picture.save(tmp_path / name / "a.png")
        picture.save(tmp_path / name / "._a.png")
    assert class_folders(tmp_path / "train") == ["common", "rare"]
    with pytest.raises(UserError, match=r"\(common, rare\), got rare\."):
        PictureFolder(tmp_path / "test", ["common", "rare"])
    # The example says so before it trains.
    with pytest.raises(UserError, match=r"/test must hold .* \(common, rare\), got rare\."):
        PngFolder(str(tmp_path)).setup("fit")
    (tmp_path / "test" / "common").mkdir()
    samples = PictureFolder(tmp_path / "test", ["common", "rare"])
    assert [number for _, number in samples] == [1]
    other_order = PictureFolder(tmp_path / "test", ["rare", "common"])
    assert [number for _, number in other_order] == [0]


class Plain(LightningModule):
    """Somebody else's module: what it answers is given."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> Any:
        return self.answer(batch)


class Numbers(LightningDataModule):
    """Somebody else's data: a file holds numbers."""

    def prepare_file(self, path: Path) -> torch.Tensor:
        return torch.tensor([float(word) for word in path.read_text().split()])


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (lambda x: x.sum(dim=1), {"prediction": 6.0}),
        (lambda x: x.sum(dim=1, keepdim=True), {"prediction": 6.0}),
        (lambda x: 2 * x, {"prediction_0": 2.0, "prediction_1": 4.0, "prediction_2": 6.0}),
        (
            lambda x: {"price": x[:, 0], "where": x[:, 1:]},
            {"price": 1.0, "where_0": 2.0, "where_1": 3.0},
        ),
        (lambda x: [f"{len(row)} numbers" for row in x], {"prediction": "3 numbers"}),
        (lambda x: x[:, None, :], {"prediction": [[1.0, 2.0, 3.0]]}),
    ],
)
def test_what_predict_step_returns_becomes_the_columns(
    answer: Any, expected: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "a.txt").write_text("1 2 3")
    (tmp_path / "b.txt").write_text("no numbers")
    (tmp_path / "c.txt").write_text("1 2 3 4")  # of another length: a batch of its own
    files, _ = find_files([str(tmp_path)])
    rows, _, bad = predict_files(Loaded(Plain(answer), Numbers(), {}, {}, tmp_path), files[:2])
    assert rows == [{"file": str(files[0]), **expected}]
    assert bad == [(files[1], "ValueError: could not convert string to float: 'no'")]
    assert len(predict_files(Loaded(Plain(answer), Numbers(), {}, {}, tmp_path), files)[0]) == 2


def test_a_picture_that_needs_a_package_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pictures, "readable_formats", lambda: ["PNG", "JPEG"])
    (tmp_path / "x.heic").write_bytes(b"\0\0\0\x18ftypheic")
    assert find_files([str(tmp_path)], only_images=True) == ([tmp_path / "x.heic"], [])
    with pytest.raises(BadImage, match=r"HEIC, .* pip install pillow-heif"):
        read_pixels(tmp_path / "x.heic")


def test_of_several_frames_the_first_is_used_and_that_is_said_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pictures.Said, "of_frames", False)
    white, black = (Image.new("L", (4, 4), grey) for grey in (255, 0))
    for name in ("a.gif", "b.tiff"):
        white.save(tmp_path / name, save_all=True, append_images=[black])
    white.save(tmp_path / "one.png")
    assert (read_pixels(tmp_path / "one.png") == 1).all()
    assert capsys.readouterr().err == ""
    for name in ("a.gif", "b.tiff"):
        assert (read_pixels(tmp_path / name) == 1).all()
    told = f"{tmp_path}/a.gif has several frames. Of each such file the first alone is used.\n"
    assert capsys.readouterr().err == told


class Force(LightningModule):
    """Answers with the energy of an input, and how it changes with it."""

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> dict[str, torch.Tensor]:
        x = batch.clone().requires_grad_()
        with torch.enable_grad():
            energy = (x**2).sum(dim=1)
            (slope,) = torch.autograd.grad(energy.sum(), x)
            return {"energy": energy, "force": -slope}


def test_a_module_that_needs_gradients_predicts_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 2")
    loaded = Loaded(Force(), Numbers(), {}, {}, tmp_path)
    (row,), _, _ = predict_files(loaded, [tmp_path / "a.txt"])
    del row["file"]
    assert row == {"energy": 5.0, "force_0": -2.0, "force_1": -4.0}


def test_only_probabilities_of_the_named_classes_become_a_label(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("0.2 0.7 0.1")
    (tmp_path / "b.txt").write_text("0.9 0.9 0.1")
    files, _ = find_files([str(tmp_path)])
    loaded = Loaded(Plain(lambda x: x), Numbers(), {}, {}, tmp_path)
    loaded.datamodule.class_names = ["cat", "dog", "bird"]
    (row,), _, _ = predict_files(loaded, files[:1])
    assert (row["label"], row["runner_up"]) == ("dog", "cat")
    assert (row["probability"], row["runner_up_probability"]) == pytest.approx((0.7, 0.2))
    rows, _, _ = predict_files(
        loaded, files
    )  # several labels may hold at once: no label is the answer
    assert list(rows[0]) == ["file", "prediction_0", "prediction_1", "prediction_2"]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (
            lambda x: x @ torch.zeros(7, 2),
            "Plain.predict_step must take a batch of inputs alone, got (1, 3) of torch.float",
        ),
        (lambda x: x.sum(), "Plain.predict_step must return a tensor or a dict of tensors"),
        (lambda x: None, "with an entry for each of 1 inputs, got NoneType"),
        (lambda x: torch.zeros(5, 2), "got (5, 2)"),
    ],
)
def test_a_module_that_does_not_fit_is_one_line(answer: Any, message: str, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1 2 3")
    with pytest.raises(UserError) as error:
        predict_files(Loaded(Plain(answer), Numbers(), {}, {}, tmp_path), [tmp_path / "a.txt"])
    assert message in str(error.value)


def test_what_a_file_becomes_depends_on_the_data_module(tmp_path: Path) -> None:
    def chosen(**attributes: Any) -> str:
        data = LightningDataModule()
        for name, value in attributes.items():
            setattr(data, name, value)
        return choose_preparation(Loaded(Plain(None), data, {}, {}, tmp_path))[1]

    assert "scaled to 1 x 28 x 28" in chosen(image_shape=(1, 28, 28))
    assert "scaled to 3 x 28 x 28" in chosen(image_shape=(3, 28, 28))
    assert "prepare_image" in chosen(image_shape=(1, 28, 28), prepare_image=lambda pixels: pixels)
    assert "prepare_file" in chosen(
        prepare_image=lambda pixels: pixels, prepare_file=lambda path: path
    )
    for attributes in ({}, {"image_shape": (2, 28, 28)}):
        with pytest.raises(
            UserError, match=r"Give LightningDataModule a method prepare_file\(path\)"
        ):
            chosen(**attributes)


@pytest.mark.parametrize(("returned", "note"), [(0.5, ""), ((0.5, "blurred"), "blurred")])
def test_a_data_module_may_note_what_it_finds_in_a_picture(
    tmp_path: Path, returned: Any, note: str
) -> None:
    data = LightningDataModule()
    data.prepare_image = lambda pixels: returned
    Image.new("L", (4, 4)).save(tmp_path / "picture.png")
    preparation = choose_preparation(Loaded(Plain(None), data, {}, {}, tmp_path))
    assert preparation.prepare(tmp_path / "picture.png") == (0.5, note)


def test_a_data_module_names_the_column_of_the_most_likely_class(tmp_path: Path) -> None:
    data = LightningDataModule()
    data.class_names = ["oak", "elm"]
    loaded = Loaded(Plain(None), data, {}, {}, tmp_path)
    answers = [(torch.tensor([[0.25, 0.75]]), 1)]
    assert to_rows(loaded, answers)[0]["label"] == "elm"
    data.label_name = "species"
    assert next(iter(to_rows(loaded, answers)[0])) == "species"


def test_help_and_typing_errors_come_before_torch() -> None:
    script = """if True:
        import sys
        from functools import partial
        from unbroken.commands.predict import main
        predict = partial(main, "numerals")
        from unbroken.cli.start import exit_code
        assert exit_code(predict, ["--help"]) == 0
        assert exit_code(predict, ["no*such.png"]) == 2
        assert not {"torch", "lightning", "torchvision", "matplotlib"} & set(sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "--contact_sheet" in done.stdout


@pytest.mark.gpu
def test_a_gpu_checkpoint_predicts_the_same_labels_on_cpu(tmp_path: Path) -> None:
    from numerals.fit import job as fit

    flags = [
        "--data.source",
        "sample",
        "--max_epochs",
        "2",
        "--accelerator",
        "gpu",
        "--devices",
        "1",
    ]
    for precision in ("32-true", "16-mixed", "bf16-mixed"):
        where = [
            "--default_root_dir",
            str(tmp_path),
            "--run_name",
            precision,
            "--precision",
            precision,
        ]
        assert fit.main([*flags, *where]) == 0
        loaded = load(fit, tmp_path / precision / "best.ckpt")
        loaded.datamodule.setup("test")
        images = loaded.datamodule.splits["test"].images
        with torch.inference_mode():
            on_cpu = loaded.module(images).argmax(dim=1)
            on_gpu = loaded.module.cuda()(images.cuda()).argmax(dim=1).cpu()
        assert (on_cpu != on_gpu).sum() == 0
