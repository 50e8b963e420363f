from __future__ import annotations

import asyncio
import html
import json
import math
import re
import shutil
import subprocess
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Trainer
from matplotlib.figure import Figure
from numerals.data import MNISTDataModule
from numerals.fit import job as fit
from unbroken.cli.read_checkpoint import load
from unbroken.monitors import monitor
from unbroken.monitors.test_predictions import TestPredictions
from unbroken.report import Report, page
from unbroken.report.charts import (
    CELL,
    FULLEST,
    MOST_POINTS,
    amounts,
    confusion_matrix,
    curves,
)
from unbroken.report.page import render
from unbroken.report.samples import first_samples
from unbroken.results import facts
from unbroken.results.facts import Summary
from unbroken.results.run_result import Mistake, read_epochs, read_series
from unbroken.results.run_result import RunResult as RunRecord
from unbroken.run import run_record

from tests.commands import REPORTED, summary, two_rank_run
from tests.reported import reported_run, wandb_folders

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
LARGEST = 2_000_000  # bytes of a report


def report() -> str:
    return (reported_run() / "report.html").read_text()


def text_of(page_source: str) -> str:
    return html.unescape(
        re.sub(
            r"\s+",
            " ",
            re.sub(r"<[^>]+>", " ", re.sub(r"<style.*?</style>", "", page_source, flags=re.S)),
        )
    )


def test_report_is_one_small_file_that_names_no_address() -> None:
    source = report()
    assert len(source.encode()) < LARGEST
    addresses = re.findall(r'(?:src|href|srcset|action)="([^"]*)"|url\(([^)]*)\)', source)
    assert {
        address[:5]
        for pair in addresses
        for address in pair
        if address and not address.startswith("#")
    } == {"data:"}
    assert "<script" not in source


def test_report_shows_figures_curves_configuration_and_origin_of_the_run() -> None:
    source, facts = report(), summary(reported_run())
    text = text_of(source)
    wrong = round(200 * (1 - facts["test/accuracy"]))
    assert f"{100 * facts['test/accuracy']:.2f} % test accuracy" in text
    assert f"{wrong} wrong of 200" in text
    best = f"best, epoch {facts['best_epoch'] + 1} of 3"
    assert f"{100 * facts['val/accuracy']:.2f} % validation accuracy {best}" in text
    assert f"{facts['test/loss']:.4g} test loss" in text
    titles = re.findall("<h3>([^<]+)</h3><svg", source)
    assert titles == [
        *("Loss", "Accuracy"),
        *("Learning rate", "Gradient norm"),
        *("Training samples per second", "Waiting for data"),
        *("Host memory", "Memory by use"),
        *("Confusion matrix", "Accuracy per class"),
    ]
    for label in (
        *("optimizer step", "end of epoch"),
        "% of the time",
        "MiB on one device",
    ):
        assert label in text
    assert facts["command"] in text
    assert facts["git_commit"] in text
    assert all(version in text for version in facts["versions"].values())
    assert "class_path: numerals.model.MLP" in text
    assert source.count('alt="test image') == min(24, wrong)
    # What the network got first, and a row for each epoch
    assert source.count('alt="training sample"') == 16
    assert "epoch train/loss train/accuracy val/loss val/accuracy" in text


def record_of(
    metrics: dict[str, float] | None = None, stopped_by: str | None = None, **facts: Any
) -> RunRecord:
    """A record of a run of four epochs of ten steps."""
    known: dict[str, Any] = {
        "run_name": "r",
        "finished": True,
        "device": "cpu",
        "precision": "32-true",
    }
    known |= {
        "world_size": 1,
        "parameters": 10,
        "epochs": 4,
        "steps": 40,
        "fit_seconds": 1.0,
        "command": "fit",
    }
    return RunRecord(
        Summary(**(known | facts), metrics=metrics or {}), config="", stopped_by=stopped_by
    )


@pytest.mark.parametrize(
    ("commit", "dirty", "said"),
    [
        ("abc123", False, "git commit abc123 git state clean"),
        ("abc123", True, "git commit abc123 git state files were changed"),
        ("abc123", None, "git commit abc123 git state not known"),
        (None, None, "git commit not known: the code is in no git checkout"),
    ],
)
def test_report_says_whether_the_code_was_the_commits(
    commit: str | None, dirty: bool | None, said: str
) -> None:
    text = text_of(page.render(record_of(git_commit=commit, git_dirty=dirty)))
    assert said in text
    assert ("git state" in text) == (commit is not None)


def test_what_the_commit_lacks_is_kept_beside_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "clone" / "mine"
    code = package / "model.py"
    code.parent.mkdir(parents=True)
    code.write_text("before\n")
    git = ["git", "-C", str(tmp_path / "clone"), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *words], check=True)
    run_record.write_config(tmp_path, {"a": 1}, package)
    assert (facts.git_state(package)[1], (tmp_path / "uncommitted.diff").exists()) == (
        False,
        False,
    )
    code.write_text("after\n")
    run_record.write_config(tmp_path, {"a": 1}, package)
    assert facts.git_state(package)[1]
    assert "-before\n+after\n" in (tmp_path / "uncommitted.diff").read_text()
    code.write_text("before\n")
    unknown = code.with_name("new.py")
    unknown.touch()  # git does not know it
    run_record.write_config(tmp_path, {"a": 1}, package)
    named, _, _ = (tmp_path / "uncommitted.diff").read_text().partition("\n\n")
    assert named == f"?? {unknown.relative_to(tmp_path / 'clone')}"
    (tmp_path / "clone" / ".git" / "index").write_text(
        "damaged"
    )  # status fails, rev-parse does not
    assert facts.git_state(package)[1] is None


def test_report_shows_where_the_time_went_and_what_leaks() -> None:
    record = record_of(advice="loader-bound: try more workers")
    record.leaks = ["host memory looks like it leaks"]
    assert "loader-bound: try more workers host memory looks like it leaks" in text_of(
        page.render(record)
    )


def test_report_names_machine_and_date() -> None:
    text = text_of(
        page.render(record_of(date="2026-11-22 06:25 UTC", hardware="AMD EPYC 9B14, 2 cores"))
    )
    assert "date 2026-11-22 06:25 UTC hardware AMD EPYC 9B14, 2 cores" in text


@pytest.fixture
def marked(monkeypatch: pytest.MonkeyPatch) -> list[dict[int, int]]:
    """The epochs that each chart marks: number from 1 → step of its end."""
    seen: list[dict[int, int]] = []
    monkeypatch.setattr("unbroken.report.charts.mark_epochs", lambda _, epochs: seen.append(epochs))
    return seen


def test_report_of_a_regression_follows_its_own_metric_and_shows_nothing_of_classes(
    marked: list[dict[int, int]],
) -> None:
    record = record_of(
        {"test/mean_absolute_error": 0.25, "test/r2": 0.75},
        monitor="val/mean_absolute_error",
        mode="min",
        best_score=0.2112,
        best_epoch=2,
    )
    record.series = {
        "epoch": [(9, 0), (19, 1), (29, 2), (39, 3)],
        "train/loss": [(9, 1.0), (39, 0.5)],
        "train/mean_absolute_error": [(9, 0.5), (39, 0.2)],
        "val/mean_absolute_error": [(9, 0.6), (39, 0.3)],
    }
    source = page.render(record)
    text = text_of(source)
    assert "0.25 test mean absolute error" in text
    assert "0.2112 validation mean absolute error best, epoch 3 of 4" in text
    assert "%" not in text
    assert re.findall("<h3>([^<]+)</h3><svg", source) == ["Loss", "mean_absolute_error"], (
        "train and val share a chart"
    )
    assert "cross-entropy" not in text
    assert "Predictions on the test set" not in text
    assert marked == [{1: 9, 2: 19, 3: 29, 4: 39}] * 2


def test_any_modules_curves_share_charts_units_and_colours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    drawn: dict[str, tuple[list[str], str]] = {}
    colours: dict[str, set[str]] = {}

    def noted(name: str, paint: Any, *facts: Any) -> str:
        lines, unit = facts[:2]
        drawn[name] = (list(lines), unit)
        axes = Figure().subplots()
        paint(axes, *facts)
        for label, line in zip(lines, axes.lines, strict=False):
            colours.setdefault(label, set()).add(line.get_color())
        assert all(tick == int(tick) for tick in axes.get_xticks())
        return ""

    monkeypatch.setattr(page, "draw", noted)
    points = [(0, 1.0), (3, 0.5)]
    record = record_of()
    names = ["val_loss", "train_loss_step", "train_loss_epoch", "val_mse", "train_mse", "val/acc"]
    record.series = dict.fromkeys([*names, "own"], points)
    page.render(record)
    assert drawn == {
        "Loss": (["train, each step", "train", "validation"], "loss"),
        "mse": (["validation", "train"], "mse"),
        "acc": (["validation"], "fraction"),
        "own": (["own"], "own"),
    }
    drawn.clear()
    # A module may log percent.
    record.series["val/accuracy"] = record.series["val/acc"] = [(0, 10.0), (3, 42.0)]
    page.render(record)
    assert drawn["acc"] == (["validation"], "acc")
    assert drawn["Accuracy"] == (["validation"], "accuracy")
    assert all(len(each) == 1 for each in colours.values())
    assert colours["train"] == colours["train, each step"] != colours["validation"]


def test_the_page_has_a_table_of_epochs_and_the_first_batch_as_the_network_got_it(
    tmp_path: Path,
) -> None:
    rows = [
        "step,epoch,train_loss,val_loss,memory/rss_gib",
        "0,0,0.9,,1",
        "4,0,0.5,0.75,1",
        "9,1,0.25,0.125,1",
        "10,2,0.0625,,1",
    ]
    (tmp_path / "metrics.csv").write_text("\n".join(rows))
    record = record_of()
    record.epochs = read_epochs(tmp_path / "metrics.csv", epochs=2)
    assert record.epochs == [
        {"epoch": 1, "train_loss": 0.5, "val_loss": 0.75},
        {"epoch": 2, "train_loss": 0.25, "val_loss": 0.125},
    ]
    record.class_names = ["cat", "dog"]
    callback = Report(tmp_path)
    images = torch.linspace(-1, 3, 20 * 3 * 4 * 5).reshape(20, 3, 4, 5)
    labels = torch.arange(20) % 2
    trainer: Any = SimpleNamespace(is_global_zero=True)
    module: Any = None
    callback.on_train_batch_start(trainer, module, [images, labels], 0)
    callback.on_train_batch_start(trainer, module, [images * 0, labels], 1)
    assert [each.target for each in callback.samples] == [0, 1] * 8
    assert callback.samples[0].image.shape == (4, 5, 3)
    assert callback.samples[0].image.min() == 0
    source = render(record, samples=callback.samples)
    text = text_of(source)
    assert "epoch train_loss val_loss 1 0.5000 0.7500 2 0.2500 0.1250" in text
    assert source.count('alt="training sample"') == 16
    assert text.count("dog") == 8
    # Batches of somebody else's are no images.
    for batch in ({"x": images}, images, [images[:, 0], labels], [], ["text"]):
        assert first_samples(batch) == []


def test_the_text_of_the_confusion_matrix_is_readable_on_every_shade() -> None:
    css = (Path(page.__file__).parent / "report.css").read_text()

    def light_of(colour: str) -> float:
        parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
        linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
        return float(np.dot(linear, [0.2126, 0.7152, 0.0722]))

    axes = Figure().subplots()
    confusion_matrix(axes, np.diag([1, 25, 100]), ["a", "b", "c"])
    assert {text.get_color() for text in axes.texts} == {Figure().text(0, 0, "").get_color()}
    shade, alpha = CELL, int(FULLEST, 16) / 255
    cards = re.findall("--card: (#[0-9a-f]{6})", css)
    inks = re.findall("--ink: (#[0-9a-f]{6})", css)
    assert len(cards) == len(inks) == 2
    for card, ink in zip(cards, inks, strict=True):
        mixed = "#"
        for place in (1, 3, 5):
            cell = int(shade[place : place + 2], 16)
            below = int(card[place : place + 2], 16)
            mixed += f"{round(alpha * cell + (1 - alpha) * below):02x}"
        for cell_colour in (mixed, card):
            lights = sorted([light_of(cell_colour), light_of(ink)])
            assert (lights[1] + 0.05) / (lights[0] + 0.05) > 4.5


def test_accuracies_of_classes_stand_on_an_axis_from_0_to_1() -> None:
    axes = Figure().subplots()
    amounts(axes, [("a", 0.25), ("b", 1.0)], "accuracy", True)
    assert axes.get_xlim() == (0, 1)


@pytest.mark.nightly
def test_charts_that_are_too_many_are_said_to_be_left_out() -> None:
    record = record_of()
    record.series = {f"own/{index}": [(1, 1.0)] for index in range(page.MOST_OTHERS + 2)}
    source = page.render(record)
    assert source.count("<svg") == page.MOST_OTHERS
    assert "metrics.csv has 2 more." in text_of(source)


def test_an_epoch_that_was_not_trained_to_its_end_is_not_marked(
    marked: list[dict[int, int]],
) -> None:
    record = record_of(epochs=1)
    record.series = {"epoch": [(4, 0), (9, 0), (14, 1)], "own": [(4, 1.0)]}
    page.render(record)
    assert marked == [{1: 9}]


def trained_predictions(
    callback: TestPredictions, batch_size: int = 77
) -> tuple[torch.Tensor, MNISTDataModule]:
    """Test the small run's best checkpoint with the callback; returns its probabilities (200,
    10).
    """
    loaded = load(fit, reported_run() / "best.ckpt")
    datamodule = MNISTDataModule(source="sample", test_samples=200, eval_batch_size=batch_size)
    trainer = Trainer(
        accelerator="cpu",
        logger=False,
        callbacks=[callback],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.test(loaded.module, datamodule=datamodule, verbose=False)
    with torch.no_grad():
        images = datamodule.splits["test"].images  # type: ignore[attr-defined]
        return loaded.module.eval()(images).softmax(dim=1), datamodule


def test_confusion_and_mistakes_are_exact_and_show_the_images_themselves() -> None:
    callback = TestPredictions(most=5)
    probabilities, datamodule = trained_predictions(callback)
    test_set: Any = datamodule.splits["test"]
    sureness, predictions = probabilities.max(dim=1)
    wanted = np.zeros((10, 10), dtype=np.int64)
    np.add.at(wanted, (test_set.labels.numpy(), predictions.numpy()), 1)
    assert callback.confusion is not None
    assert callback.confusion.tolist() == wanted.tolist()
    wrong = (predictions != test_set.labels).nonzero().flatten()
    surest = wrong[sureness[wrong].argsort(descending=True)][:5]
    assert len(callback.mistakes) == 5
    for mistake, index in zip(callback.mistakes, surest.tolist(), strict=True):
        assert (mistake.label, mistake.prediction) == (
            int(test_set.labels[index]),
            int(predictions[index]),
        )
        assert mistake.probability == pytest.approx(float(sureness[index]), abs=1e-6)
        assert (mistake.image[..., 0] == test_set.images[index, 0].numpy()).all()


def test_predictions_of_all_ranks_are_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = TestPredictions(most=6)
    trained_predictions(alone)
    monkeypatch.setattr(monitor, "gather_from_ranks", lambda mine: [mine, (None, []), mine])
    twice = TestPredictions(most=6)
    trained_predictions(twice)
    assert alone.confusion is not None
    assert twice.confusion is not None
    assert (twice.confusion == 2 * alone.confusion).all()
    assert [m.probability for m in twice.mistakes] == [
        m.probability for m in alone.mistakes[:3] for _ in range(2)
    ]


def test_two_processes_report_every_test_sample_once() -> None:
    folder = two_rank_run()
    wrong = round(199 * (1 - summary(folder)["test/accuracy"]))
    assert f"{wrong} wrong of 199" in text_of((folder / "report.html").read_text())
    assert len(wandb_folders(folder)) == 1, "one W&B run per job"


def test_a_report_that_fails_is_one_warning_and_no_failed_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space")

    monkeypatch.setattr(page, "render", fail)
    flags = [
        *REPORTED,
        "--accelerator",
        "cpu",
        "--max_epochs",
        "1",
        "--default_root_dir",
        str(tmp_path),
        "--run_name",
        "r",
    ]
    with pytest.warns(UserWarning, match=r"report.html could not be written \(OSError: no space\)"):
        assert fit.main(flags) == 0
    assert summary(tmp_path / "r")["test/accuracy"] > 0.1


def test_the_page_says_what_resumes_have_changed() -> None:
    change = "step 20: model.lr: 0.1 → 0.02"
    assert f"Changed at a resume {change}" in text_of(page.render(record_of(resumed_with=[change])))
    assert "Changed at a resume" not in page.render(record_of())


class Ended:
    """Stands in for a Trainer: the report asks it nothing."""


def test_the_callback_writes_the_page_into_its_folder(tmp_path: Path) -> None:
    Report(tmp_path).leave(Ended(), record_of())  # type: ignore[arg-type]
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]
    # The page says when it was made.
    pages = [(tmp_path / "report.html").read_text(), render(record_of())]
    assert len({re.sub(r"\d\d:\d\d:\d\d", "", page) for page in pages}) == 1


def test_a_stopped_run_waits_for_its_charts_no_longer_than_it_has_and_leaves_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread that is left behind inside matplotlib aborts the process as it ends."""
    threads: list[int] = []
    drawn = page.draw

    def noted(*arguments: Any) -> Any:
        threads.append(threading.get_ident())
        return drawn(*arguments)

    monkeypatch.setattr(page, "draw", noted)
    # However busy this machine is, the first page has time for all.
    monkeypatch.setattr("unbroken.report.PATIENCE", 1000.0)
    record = record_of(stopped_by="SIGTERM")
    record.series = {f"own/{index}": [(1, 1.0)] for index in range(3)}
    Report(tmp_path).leave(Ended(), record)  # type: ignore[arg-type]
    assert threads == [threading.get_ident()] * 3
    whole = (tmp_path / "report.html").read_text()
    assert whole.count("<svg") == 3
    assert "Charts that are left out" not in whole
    # The time is over when the first chart is drawn.
    times = iter([0.0])
    clock = SimpleNamespace(monotonic=lambda: next(times, math.inf))
    monkeypatch.setattr(page, "time", clock)
    Report(tmp_path).leave(Ended(), record)  # type: ignore[arg-type]
    cut = (tmp_path / "report.html").read_text()
    assert cut.count("<svg") == 1
    assert "a run that is stopped has little time: 2. metrics.csv has their values." in cut


def crowded_record() -> RunRecord:
    """A record as a user's own data may make it: many classes, colour images, long hostile names, a
    long run.
    """
    generator = np.random.default_rng(0)
    names = [f'<b>&class</b> "{i}" {"x" * (i % 40)}' for i in range(150)]
    confusion = generator.integers(0, 3, (150, 150)) + 50 * np.eye(150, dtype=np.int64)
    confusion[7] = 0  # a class without any test sample
    images = generator.integers(0, 256, (24, 224, 180, 3), dtype=np.uint8)
    series = [(step, 1 / (1 + step)) for step in range(100_000)]
    hostile = "</title><script>alert(1)</script>"
    record = record_of(
        {"test/accuracy": 0.5, f"test/{hostile}": 1.0},
        run_name=hostile,
        command=hostile,
        device=hostile,
        data_source=hostile,
        precision=hostile,
        monitor=f"val/{hostile}",
        best_score=0.5,
        best_epoch=1,
        hardware=hostile,
        date=hostile,
        versions={hostile: hostile},
    )
    record.config = f"key: </pre>{hostile}"
    record.class_names = names
    record.series = {
        "train/loss": series,
        "train/f1 <x>": series,
        f"val/{hostile}": series,
        f"{hostile}$\\frac{{$ \\1": series,
        "memory/rss_gib": [(5, 0.0)],
    }
    record.breakdown = {hostile: 0.5, "$\\oops$": 0.1}
    record.confusion = confusion
    record.mistakes = [Mistake(image, 3, 149, 0.9) for image in images]
    record.leaks = [hostile]
    return record


@pytest.mark.nightly
def test_report_of_any_data_is_small_quick_and_safe(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    began = time.process_time()
    path.write_text(render(crowded_record()), encoding="utf-8")
    assert time.process_time() - began < 6
    source = path.read_text()
    assert len(source.encode()) < LARGEST
    assert "<script" not in source
    assert "<b>&class" not in source
    assert "<h3>f1 &lt;x&gt;</h3><svg" in source, "a metric of the user's own gets a chart"
    elements = {
        match.lower()
        for match in re.findall(
            r"<([a-zA-Z!/][\w:-]*)", re.sub(r"<style.*?</style>", "", source, flags=re.S)
        )
    }
    assert not elements & {"script", "iframe", "a", "object", "foreignobject"}


def test_report_of_a_run_stopped_before_it_logged_anything(tmp_path: Path) -> None:
    record = record_of(steps=3, epochs=0)
    record.stopped_by, record.max_epochs = "SIGTERM", 5
    text = text_of(page.render(record))
    assert "stopped by SIGTERM at step 3, 0 of 5 epochs done" in text
    assert "No value was logged before the run ended." in text


def test_a_curve_within_epochs_has_no_peak_at_their_ends_where_the_mean_of_the_epoch_stands(
    tmp_path: Path,
) -> None:
    rows = [
        "step,epoch,train/loss,train/accuracy,val/loss",
        "9,0,0.5,,",
        "14,0,0.8,0.7,0.4",
        "19,1,0.3,,",
    ]
    (tmp_path / "metrics.csv").write_text("\n".join([*rows, "29,1,0.4,0.9,0.3", "34,2,0.2,,"]))
    series = read_series(tmp_path / "metrics.csv", epochs=2)
    assert series["train/loss"] == [(9, 0.5), (19, 0.3), (34, 0.2)]
    assert series["train/accuracy"] == [(14, 0.7), (29, 0.9)]
    assert series["val/loss"] == [(14, 0.4), (29, 0.3)]
    (tmp_path / "metrics.csv").write_text(
        "step,epoch,train/loss\n4,0,0.8\n9,1,0.5\n10,2,0.4\n14,2,0.3"
    )
    assert read_series(tmp_path / "metrics.csv", epochs=3)["train/loss"] == [
        (4, 0.8),
        (9, 0.5),
        (14, 0.3),
    ]


@pytest.mark.parametrize(
    ("earlier", "value", "shown"),
    [([0.1, 0.9], 0.875, "87.50 %"), ([10.0, 42.0], 42.0, "42"), ([10.0, 42.0], 0.9, "0.9")],
)
def test_an_accuracy_is_shown_in_percent_where_it_is_a_fraction(
    earlier: list[float], value: float, shown: str
) -> None:
    record = record_of()
    record.series = {"val_accuracy": list(enumerate(earlier))}
    assert page.figure_of("test/accuracy", value, record) == shown
    assert page.figure_of("test/loss", value, record) == f"{value:.4g}"


def test_a_long_line_is_thinned_and_keeps_its_mean_and_ends() -> None:
    axes = Figure().subplots()
    curves(
        axes,
        {"loss": [(step, float(step)) for step in range(30_000)]},
        "nats",
        "fitting",
        30_000,
        {},
    )
    steps, values = map(np.asarray, axes.lines[0].get_data())
    assert len(steps) == len(values) == MOST_POINTS
    assert values.mean() == pytest.approx(14_999.5)
    assert (steps[0], steps[-1]) == (49.5, 29_949.5)


# In the browser


@contextmanager
def browser(folder: Path) -> Iterator[str]:
    """A headless Chromium; gives the address of its debugging socket."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    words = [
        CHROMIUM or "",
        *flags,
        "--remote-debugging-port=0",
        f"--user-data-dir={folder}",
        "about:blank",
    ]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        place = folder / "DevToolsActivePort"
        end = time.monotonic() + 60
        while not (place.exists() and len(place.read_text().splitlines()) == 2):
            assert time.monotonic() < end, "Chromium did not start"
            time.sleep(0.05)
        yield f"http://127.0.0.1:{place.read_text().splitlines()[0]}"
    finally:
        process.terminate()
        process.wait(20)


@asynccontextmanager
async def tab(address: str) -> AsyncIterator[Any]:
    """A page of the browser: a function that sends it a command and returns the answer, with all
    events so far.
    """
    import aiohttp

    async with aiohttp.ClientSession() as session:
        async with session.get(f"{address}/json/list") as answer:
            (target,) = [
                entry for entry in json.loads(await answer.text()) if entry["type"] == "page"
            ]
        async with session.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            events: list[dict[str, Any]] = []
            numbers = iter(range(1, 10_000))

            async def send(method: str, **parameters: Any) -> dict[str, Any]:
                number = next(numbers)
                await socket.send_json({"id": number, "method": method, "params": parameters})
                while True:
                    message = await asyncio.wait_for(socket.receive_json(), 60)
                    if message.get("id") == number:
                        assert "error" not in message, message
                        return dict(message["result"])
                    events.append(message)

            send.events = events  # type: ignore[attr-defined]
            yield send


async def look(address: str, path: Path, width: int, scheme: str) -> dict[str, Any]:
    """Open a report as a device shows it: its requests, console messages, overflow and colours."""
    async with tab(address) as send:
        for domain in ("Network", "Log", "Runtime", "Page"):
            await send(f"{domain}.enable")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        await send("Emulation.setDeviceMetricsOverride", **size)
        await send(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": scheme}],
        )
        await send("Page.navigate", url=path.as_uri())
        facts: dict[str, Any] = {}
        ask = """({ready: document.readyState, width: document.documentElement.scrollWidth,
            ground: getComputedStyle(document.body).backgroundColor,
            ink: getComputedStyle(document.body).color,
            axis: getComputedStyle(document.querySelector('svg text')).fill,
            charts: [...document.querySelectorAll('svg')]
                .filter(svg => svg.getBoundingClientRect().height > 80).length,
            images: [...document.images]
                .filter(image => image.complete && image.naturalWidth > 0).length})"""
        for _ in range(100):
            result = await send("Runtime.evaluate", expression=ask, returnByValue=True)
            facts = result["result"].get("value") or {}
            if facts.get("ready") == "complete" and facts["charts"]:
                break
            await asyncio.sleep(0.1)
        events = send.events
        urls = [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]
        facts["requests"] = [url for url in urls if not url.startswith("data:")]
        noise = ("Log.entryAdded", "Runtime.consoleAPICalled", "Runtime.exceptionThrown")
        facts["console"] = [event["params"] for event in events if event["method"] in noise]
        return facts


OTHERS = [
    pytest.param(*screen, marks=pytest.mark.nightly) for screen in ((1280, "dark"), (390, "light"))
]


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize(("width", "scheme"), [(390, "dark"), (1280, "light"), *OTHERS])
def test_report_in_the_browser_asks_no_network_and_fits_screen_and_theme(
    width: int, scheme: str, tmp_path: Path
) -> None:
    path = reported_run() / "report.html"
    with browser(tmp_path / "profile") as address:
        facts = asyncio.run(look(address, path, width, scheme))
    assert facts["requests"] == [path.as_uri()]
    assert facts["console"] == []
    assert facts["width"] <= width, "the page scrolls sideways"
    assert facts["charts"] == report().count("<svg")
    assert facts["images"] == report().count("<img ")
    light = {"ground": "rgb(246, 247, 249)", "ink": "rgb(27, 36, 48)", "axis": "rgb(27, 36, 48)"}
    dark = {"ground": "rgb(15, 20, 27)", "ink": "rgb(228, 233, 240)", "axis": "rgb(228, 233, 240)"}
    assert {key: facts[key] for key in light} == (light if scheme == "light" else dark)
