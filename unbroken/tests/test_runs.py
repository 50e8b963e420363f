from __future__ import annotations

import csv
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numerals
import pytest
import yaml
from filelock import FileLock
from fsspec.implementations.memory import MemoryFileSystem
from unbroken.cli.start import exit_code
from unbroken.commands.runs import command as runs
from unbroken.commands.runs import page, saved_run, seeds
from unbroken.mirror import lease
from unbroken.mirror.manifest import Entry, Manifest
from unbroken.mirror.store import Store
from unbroken.results.run_result import thinned
from unbroken.storage import reading
from unbroken.tables import read_rows

from tests.commands import SMALL, Process, popen
from tests.trained import trained_checkpoint

PACKAGE = numerals.__name__


def make_run(
    root: Path, name: str, lr: float = 0.02, seed: int = 1, accuracy: float = 0.9, **other: Any
) -> Path:
    """A run's folder as ``fit`` leaves it, without checkpoints."""
    folder = root / name
    folder.mkdir(parents=True)
    model = {
        "class_path": "numerals.model.MNISTClassifier",
        "init_args": {"lr": lr, "optimizer": other.get("optimizer", "SGD")},
    }
    config = {
        "seed_everything": seed,
        "trainer": {"max_epochs": 2},
        "model": model,
        "run_name": name,
    }
    (folder / "config.yaml").write_text(f"# python -m numerals.fit\n{yaml.safe_dump(config)}")
    facts = {
        "run_name": name,
        "finished": other.get("finished", True),
        "monitor": "val/accuracy",
        "epochs": 2,
    }
    results = {
        "fit_seconds": 1.5,
        "val/accuracy": accuracy,
        "test/accuracy": accuracy - 0.01,
        "test/loss": 0.3,
    }
    (folder / "summary.json").write_text(json.dumps(facts | results))
    rows = [
        "step,epoch,train/loss,val/accuracy,memory/rss_gib",
        "10,0,0.5,,1",
        "15,0,0.45,,1",
        f"20,0,,{accuracy - 0.1},1",
        f"25,1,0.4,{accuracy},1",
        "30,1,",
    ]
    (folder / "metrics.csv").write_text("\n".join(rows))
    return folder


def test_runs_that_follow_different_metrics_are_compared_by_those_that_both_have(
    tmp_path: Path,
) -> None:
    make_run(tmp_path, "by_accuracy", accuracy=0.9)
    folder = make_run(tmp_path, "by_loss", accuracy=0.8)
    facts = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(facts | {"monitor": "val/loss"}))
    found = {run.name: run.results["val/accuracy"] for run in saved_run.find_runs(tmp_path)}
    assert found == {"by_accuracy": 0.9, "by_loss": 0.8}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "checkpoints"
    for seed, accuracy in ((1, 0.90), (2, 0.92)):
        make_run(root, f"slow-{seed}", 0.01, seed, accuracy)
    make_run(root, "fast", 0.1, 1, 0.95)
    (root / "latest").symlink_to("fast")
    (root / "notes").mkdir()
    return root


def listed(root: Path, *words: str) -> list[dict[str, Any]]:
    output = root.parent / "out.json"
    assert (
        exit_code(
            partial(runs.main, "numerals"), ["--root", str(root), "--output", str(output), *words]
        )
        == 0
    )
    return list(json.loads(output.read_text()))


def test_the_list_tells_what_differs_and_what_came_out(root: Path) -> None:
    rows = listed(root)
    assert [row["name"] for row in rows] == ["fast", "slow-1", "slow-2"]
    facts = {"state": "finished", "epochs": 2, "fit_seconds": 1.5}
    expected = {
        "name": "fast",
        "seed_everything": 1,
        "model.lr": 0.1,
        "val/accuracy": 0.95,
        **facts,
    }
    assert {name: rows[0][name] for name in expected} == expected
    assert "model.optimizer" not in rows[0]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d", rows[0]["date"])


def shown(capsys: pytest.CaptureFixture[str], root: Path, *words: str) -> str:
    capsys.readouterr()
    assert exit_code(partial(runs.main, "numerals"), ["--root", str(root), *words]) == 0
    return capsys.readouterr().out


def test_eighty_columns_have_room_for_the_result_and_for_what_differs(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # So it is also where the output is no terminal.
    monkeypatch.setenv("COLUMNS", "80")
    make_run(root, "2026-11-25_19-48-32", optimizer="AdamW")
    lines = shown(capsys, root, "--sort", "lr").splitlines()
    names = ["name", "lr", "optimizer", "seed_everything", "val/accuracy"]
    assert lines[0].split()[:5] == names
    assert max(len(line) for line in lines) <= 80
    # A setting may be named without its section here, too.
    names = [line.split()[0] for line in lines[2:-1]]
    assert names[-1] == "fast"
    # What is sorted by is shown, wherever its column stands.
    for column in ("fit_seconds", "date"):
        lines = shown(capsys, root, "--sort", column).splitlines()
        assert column in lines[0].split()
        assert "val/accuracy" in lines[0].split()
        assert max(len(line) for line in lines) <= 80


def test_what_was_typed_is_shown_before_what_follows_from_it(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in (1, 2):
        folder = make_run(root, f"typed-{seed}", 0.01 * seed, 7)
        trainer = {f"flag_{letter}": seed for letter in "abcdefghij"} | {"max_epochs": seed}
        change(folder, {}, trainer=trainer)
        text = (folder / "config.yaml").read_text()
        command = f"python -m numerals.fit --max_epochs {seed} --model.lr=0.0{seed}"
        (folder / "config.yaml").write_text(f"# {command}\n{text}")
    for name in ("fast", "slow-1", "slow-2"):
        shutil.rmtree(root / name)
    for width in (50, 80, 200):
        monkeypatch.setenv("COLUMNS", str(width))
        heading = shown(capsys, root).splitlines()[0].split()
        assert heading[:3] == ["name", "lr", "max_epochs"]
        assert "val/accuracy" in heading


def test_two_runs_stand_side_by_side(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown(capsys, root, "--compare", "slow-1", "fast").splitlines()
    assert lines[0].split() == ["slow-1", "fast"]
    assert [line.split() for line in lines[2:5]] == [
        ["model.lr", "0.0100", "0.1000"],
        ["val/accuracy", "0.9000", "0.9500"],
        ["test/accuracy", "0.8900", "0.9400"],
    ]
    words = ["--root", str(root), "--compare", "slow-1", "fats"]
    assert exit_code(partial(runs.main, "numerals"), words) == 2
    error = "error: --compare must name runs, got fats. Did you mean fast?\n"
    assert capsys.readouterr().err == error


def test_a_class_under_two_names_and_another_tracker_are_one_configuration(root: Path) -> None:
    ways = {
        "default": ("numerals.model.ConvNet", None),
        "typed": ("numerals.model.networks.ConvNet", "csv"),
        "tracked": ("numerals.model.ConvNet", {"class_path": "a.B", "init_args": {"c": 1}}),
    }
    for seed, (name, (network, logger)) in enumerate(ways.items(), start=1):
        init_args = {"lr": 0.5, "network": {"class_path": network}}
        model = {"class_path": "numerals.model.MNISTClassifier", "init_args": init_args}
        trainer = {"max_epochs": 2, "logger": logger}
        change(make_run(root, name, 0.5, seed), {}, model=model, trainer=trainer)
    groups = [row["runs"] for row in listed(root, "--seeds")]
    assert "default tracked typed" in groups


def make_runs_of_three_tasks(root: Path) -> None:
    """Runs of modules that share hardly a setting: twenty of their own each."""
    for task in ("Prices", "Names", "Weather"):
        for seed in (1, 2):
            folder = make_run(root, f"{task}-{seed}", 0.01 * seed, seed)
            own = {f"{task.lower()}_{letter}": seed for letter in "abcdefghijklmnopqrst"}
            model = {"class_path": f"mine.{task}", "init_args": {**own, "lr": 0.01 * seed}}
            (folder / "config.yaml").write_text(yaml.safe_dump({"model": model}))
            summary = json.loads((folder / "summary.json").read_text())
            summary |= {"monitor": f"val/{task}", f"val/{task}": 0.5}
            (folder / "summary.json").write_text(json.dumps(summary))


@pytest.mark.parametrize("width", [80, 120])
def test_runs_of_several_tasks_fit_the_terminal(
    width: int, root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_runs_of_three_tasks(root)
    monkeypatch.setenv("COLUMNS", str(width))
    lines = shown(capsys, root).splitlines()
    assert max(len(line) for line in lines) <= width
    headings = [line.split()[:4] for line in lines if line.startswith("name ")]
    assert headings == [
        ["name", "lr", "names_a", "names_b"],
        ["name", "lr", "prices_a", "prices_b"],
        ["name", "lr", "weather_a", "weather_b"],
        ["name", "lr", "seed_everything", "val/accuracy"],
    ]
    # However many settings differ, the metric by which runs are judged is there.
    results = ["val/Names", "val/Prices", "val/Weather", "val/accuracy"]
    headings = [line.split() for line in lines if line.startswith("name ")]
    for heading, result in zip(headings, results, strict=True):
        assert result in heading
    modules = [line for line in lines if line in ("Names", "Prices", "Weather", "MNISTClassifier")]
    assert modules == ["Names", "Prices", "Weather", "MNISTClassifier"]
    assert "more columns do not fit: --settings, or --output FILE)" in lines[-1]


def test_all_settings_are_shown_where_they_are_asked_for_and_always_written(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_runs_of_three_tasks(root)
    monkeypatch.setenv("COLUMNS", "80")
    own = [f"model.prices_{letter}" for letter in "abcdefghijklmnopqrst"]
    told = shown(capsys, root, "--settings")
    assert all(name in told for name in own)
    assert "do not fit" not in told
    (row, *_) = [row for row in listed(root) if row["name"] == "Prices-1"]
    assert {name: row[name] for name in own} == dict.fromkeys(own, 1)


def test_a_long_text_is_cut_and_a_runs_name_is_whole_and_no_command_of_the_terminal(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "a-run-with-a-name-that-is-longer-than-any-text-is-shown\x1b[2J\u202e"
    make_run(root, name, optimizer="o" * 60)
    monkeypatch.setenv("COLUMNS", "300")
    assert "o" * 60 in shown(capsys, root), "there is room for it"
    monkeypatch.setenv("COLUMNS", "130")
    told = shown(capsys, root)
    assert "o" * 23 + "…" in told
    assert "o" * 24 not in told
    assert r"is-shown\x1b[2J" in told
    assert "\x1b" not in told
    for ending in ("csv", "json"):
        output = root.parent / f"out.{ending}"
        shown(capsys, root, "--output", str(output))
        assert not {"\x1b", "\u202e"} & set(output.read_text())
    assert name in [row["name"] for row in json.loads(output.read_text())]


def test_lists_are_sorted_and_written_as_csv(root: Path) -> None:
    assert [row["name"] for row in listed(root, "--sort", "val/accuracy")] == [
        "slow-1",
        "slow-2",
        "fast",
    ]


def test_a_seed_that_was_run_twice_counts_once(root: Path) -> None:
    before = next(row for row in listed(root, "--seeds") if "slow" in row["runs"])
    make_run(root, "slow-2-again", 0.01, 2, 0.92)
    again = next(row for row in listed(root, "--seeds") if "slow" in row["runs"])
    assert "slow-2-again" in again["runs"]
    assert again["finished"] == before["finished"] + 1
    for name in ("seeds", "val/accuracy", "val/accuracy std"):
        assert again[name] == before[name]


def test_seeds_of_one_configuration_are_averaged(root: Path) -> None:
    make_run(root, "slow-3", 0.01, 3, 0.1, finished=False)
    fast, slow = listed(root, "--seeds")
    assert (slow["runs"], slow["finished"], slow["model.lr"]) == ("slow-1 slow-2 slow-3", 2, 0.01)
    assert slow["val/accuracy"] == pytest.approx(0.91)  # of the finished ones
    assert slow["val/accuracy std"] == pytest.approx(0.02 / 2**0.5)
    assert (slow["fit_seconds"], slow["fit_seconds std"]) == (1.5, 0)
    assert (fast["runs"], fast["test/accuracy"], fast["test/accuracy std"]) == ("fast", 0.94, None)


def test_of_many_seeds_the_mean_is_shown_and_the_first_names(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for seed in range(3, 13):
        make_run(root, f"slow-{seed}", 0.01, seed, 0.1)
    (line,) = (line for line in shown(capsys, root, "--seeds").splitlines() if "slow-1" in line)
    assert line.startswith("slow-1 and 11 more ")
    assert " 0.2350 " in line
    # A file has them all.
    assert max(len(row["runs"].split()) for row in listed(root, "--seeds")) == 12


def change(folder: Path, summary: dict[str, Any], **config: Any) -> None:
    """Change what the files of a run say."""
    facts = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(facts | summary))
    settings = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(settings | config))


def test_classes_of_one_name_in_two_modules_are_two_configurations(root: Path) -> None:
    for version in ("v1", "v2"):
        model = {"class_path": f"mine.{version}.Net", "init_args": {"block": {"class_path": "a.B"}}}
        change(make_run(root, version), {}, model=model)
    found = {row["runs"]: row["model"] for row in listed(root, "--seeds")}
    assert {"v1": "mine.v1.Net", "v2": "mine.v2.Net"}.items() <= found.items()
    # A name that is clear stays short.
    shutil.rmtree(root / "v2")
    names = {row["name"]: row["model"] for row in listed(root)}
    assert (names["v1"], names["fast"]) == ("Net", "MNISTClassifier")


def test_a_run_that_was_resumed_with_other_settings_is_no_further_seed(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def add_comment(name: str, change: str) -> None:
        path = root / name / "config.yaml"
        command, _, settings = path.read_text().partition("\n")
        path.write_text(f"{command}\n# step 20: {change}\n{settings}")

    make_run(root, "slow-3", 0.01, 3, 0.1)
    add_comment("slow-3", "model.lr: 0.5 → 0.01")
    # A mapping's keys are the user's own.
    add_comment("slow-3", "model.weights.New York: 1.0 → 1.0")
    # No number depends on it.
    add_comment("slow-2", "trainer.logger: csv → False")
    found = {row["runs"]: row for row in listed(root, "--seeds")}
    assert found.keys() == {"fast", "slow-1 slow-2", "slow-3"}
    assert found["slow-3"]["resumed_with"].endswith("; step 20: model.lr: 0.5 → 0.01")
    # It is said where there is no other run as well.
    for name in ("fast", "slow-1", "slow-2"):
        shutil.rmtree(root / name)
    assert "resumed_with" in shown(capsys, root)


def test_runs_that_began_with_other_weights_are_not_averaged(root: Path) -> None:
    for seed, typed in ((3, "--init_weights a.ckpt"), (4, "--init_weights=a.ckpt"), (5, "'")):
        path = make_run(root, f"slow-{seed}", 0.01, seed) / "config.yaml"
        command, _, settings = path.read_text().partition("\n")
        path.write_text(f"{command} {typed}\n{settings}")
    found = {row["runs"]: row["init_weights"] for row in listed(root, "--seeds")}
    assert found == {"fast": None, "slow-1 slow-2 slow-5": None, "slow-3 slow-4": "a.ckpt"}


def test_runs_that_found_other_data_are_not_averaged(root: Path) -> None:
    of_auto = {"class_path": "numerals.data.MNISTDataModule", "init_args": {"source": "auto"}}
    for seed, source in ((1, "sample"), (2, "mnist"), (3, "mnist")):
        # Where MNIST lies makes no difference.
        data = {**of_auto, "init_args": {**of_auto["init_args"], "root": f"data{seed}"}}
        folder = make_run(root, f"auto-{seed}", 0.5, seed)
        change(folder, {"data_source": source}, data=data)
    found = {row["runs"]: row["data_source"] for row in listed(root, "--seeds")}
    assert {"auto-1": "sample", "auto-2 auto-3": "mnist"}.items() <= found.items()
    # A run that trains has told no source yet, and belongs to the only one there is.
    shutil.rmtree(root / "auto-1")
    (root / "auto-3" / "summary.json").unlink()
    shutil.rmtree(root / "fast")
    rows = listed(root, "--seeds")
    assert "auto-2 auto-3" in [row["runs"] for row in rows]
    assert not any("data_source" in row for row in rows)


def test_runs_on_the_data_of_other_folders_are_not_averaged(root: Path) -> None:
    for seed, place in ((1, "cats"), (2, "dogs"), (3, "dogs")):
        data = {"class_path": "mine.Folder", "init_args": {"root": place}}
        folder = make_run(root, f"own-{seed}", 0.5, seed)
        change(folder, {"data_source": "Folder"}, data=data)
    found = {row["runs"]: row["data.root"] for row in listed(root, "--seeds")}
    assert {"own-1": "cats", "own-2 own-3": "dogs"}.items() <= found.items()


def test_results_that_are_called_test_loss_are_results(root: Path) -> None:
    results = {"monitor": "val_loss", "val_loss": 0.5, "test_acc": 0.25, "test_loss": 0.75}
    change(make_run(root, "plain"), results)
    (row,) = [row for row in listed(root) if row["name"] == "plain"]
    assert {"val_loss": 0.5, "test_acc": 0.25, "test_loss": 0.75}.items() <= row.items()
    # What the run is judged by comes first.
    assert list(saved_run.SavedRun(root / "plain").results)[:2] == ["val_loss", "test_loss"]
    means = {row["runs"]: row.get("test_loss") for row in listed(root, "--seeds")}
    assert means["plain"] == 0.75
    tests = page.test_row(saved_run.SavedRun(root / "plain"))
    assert {"test_acc": 0.25, "test_loss": 0.75}.items() <= tests.items()


@pytest.mark.nightly
@pytest.mark.usefixtures("workplace")
def test_a_configuration_is_trained_with_several_seeds_and_goes_on_after_a_stop(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    stopped: list[int] = []

    def start(words: list[str], env: dict[str, str]) -> Process:
        if not stopped:  # the first is asked to stop
            stopped.append(1)
            words = [*words[:2], "tests.interrupted", "10", "SIGTERM", *words[3:]]
        return popen(words, 1, 2, env=env)

    monkeypatch.setattr(seeds, "subprocess", SimpleNamespace(Popen=start))
    monkeypatch.setenv("WANDB_MODE", "disabled")
    small = SMALL[: SMALL.index("MLP") + 1]  # --report is the page of these runs
    words = [
        "--seeds",
        "2",
        "--run_name",
        "s",
        *small,
        "--max_epochs",
        "1",
        "--output",
        "seeds.json",
    ]
    assert exit_code(partial(runs.main, "numerals"), words) == 143
    assert [path.name for path in Path("checkpoints").glob("s-*")] == ["s-1"]
    Path("checkpoints/other").mkdir()  # a run of something else
    Path("checkpoints/other/config.yaml").write_text("{}")
    assert exit_code(partial(runs.main, "numerals"), words) == 0
    assert "going on from step 1" in capfd.readouterr().out
    facts = [json.loads(Path(f"checkpoints/s-{seed}/summary.json").read_text()) for seed in (1, 2)]
    (row,) = json.loads(Path("seeds.json").read_text())
    assert (row["runs"], row["finished"]) == ("s-1 s-2", 2)
    assert row["test/loss"] == pytest.approx(sum(fact["test/loss"] for fact in facts) / 2)
    assert row["test/loss std"] > 0


def test_a_run_is_running_while_its_lock_is_held_and_interrupted_without_an_end(root: Path) -> None:
    make_run(root, "stopped", finished=False)
    (root / "slow-1" / ".lock").touch()
    with FileLock(root / "fast" / ".lock"):
        states = {row["name"]: row["state"] for row in listed(root)}
        assert states == {
            "fast": "running",
            "slow-1": "finished",
            "slow-2": "finished",
            "stopped": "interrupted",
        }


@pytest.mark.nightly
def test_damaged_files_of_a_run_hide_no_other_run(root: Path) -> None:
    (root / "slow-1" / "config.yaml").write_bytes(b"\xff{")
    (root / "slow-2" / "summary.json").write_text("[1")
    (root / "slow-2" / "metrics.csv").write_text("step,epoch\n1,0,7\n")  # a value too many
    (root / "fast" / "metrics.csv").unlink()
    (root / "fast" / "config.yaml").write_text("[" * 20_000)
    assert [row["name"] for row in listed(root)] == ["fast", "slow-1", "slow-2"]
    listed(root, "--report", str(root / "page.html"))


@pytest.mark.daily(6)
@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("summary.json", '{"finished": true, "test/loss": 1' + "0" * 400 + "}"),
        ("summary.json", '{"finished": true, "test/loss": 1e308, "fit_seconds": 1e308}'),
        ("summary.json", '{"finished": true, "epochs": Infinity}'),
        ("config.yaml", "a: &x {b: *x}"),
        # No text can be made of a number of so many digits.
        ("config.yaml", "a: 0x" + "f" * 5_000),
        ("config.yaml", 'a: !!int ""'),
        ("summary.json", '{"finished": true, "x":' + "[" * 100_000),
        (
            "summary.json",
            '{"finished": 1, "epochs": "2", "monitor": ["a"], "data_source": {"a": 1}}',
        ),
        ("config.yaml", "a: &x [*x]"),
        ("config.yaml", 'a: "\\uD800"'),
        ("metrics.csv", "step,epoch,val/loss\ninf,0,1\n"),
        ("metrics.csv", "step,epoch,val/loss\n1,0,1e308\n2,1,-1e308\n"),
    ],
)
def test_odd_values_of_a_run_hide_no_other_run(root: Path, name: str, text: str) -> None:
    for run in ("slow-1", "slow-2"):
        (root / run / name).write_text(text)
    assert [row["name"] for row in listed(root)] == ["fast", "slow-1", "slow-2"]
    listed(root, "--seeds")
    listed(root, "--report", str(root / "page.html"))


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such pipes")
@pytest.mark.parametrize("name", ["summary.json", "config.yaml", "metrics.csv"])
def test_a_pipe_or_a_huge_file_hides_no_other_run(root: Path, name: str) -> None:
    pipe = root / "slow-1" / name
    pipe.unlink()
    os.mkfifo(pipe)
    # It has holes, and takes no place on the disk.
    os.truncate(root / "slow-2" / name, 2**38)
    assert [row["name"] for row in listed(root)] == ["fast", "slow-1", "slow-2"]
    listed(root, "--report", str(root / "page.html"))


def test_a_link_in_a_runs_folder_is_not_read_and_is_said(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "summary.json").write_text('{"finished": true, "test/secret": 1234}')
    (outside / "config.yaml").write_text("secret_key: AKIA\n")
    (outside / "metrics.csv").write_text("step,epoch,secret\n1,0,1\n2,0,2\n")
    (outside / "digests.csv").write_text("secret\n")
    for path in outside.iterdir():
        link = root / "slow-1" / path.name
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    capsys.readouterr()
    page_of_runs = root.parent / "page.html"
    rows = listed(root, "--report", str(page_of_runs))
    told = capsys.readouterr()
    listed(root, "--compare", "slow-1", "fast")
    assert "secret" not in json.dumps(rows) + told.out + page_of_runs.read_text()
    for name in ("summary.json", "config.yaml", "metrics.csv"):
        assert f"slow-1/{name} is a link, and is not read" in told.err
    assert "slow-1/digests.csv is a link, and is not read" in capsys.readouterr().err


def many_of(kind: str, run: int) -> tuple[str, str]:
    """The name and the text of a file of a run that holds very many of something."""
    numbers = range(2_400)
    if kind == "classes":
        return "config.yaml", "".join(f"a{n}: {{class_path: b{run}{n}}}\n" for n in numbers)
    if kind == "settings":
        return "config.yaml", "".join(f"{run}x{n}: 1\n" for n in numbers)
    if kind == "values":
        return "config.yaml", "a: [" + "[]," * 80_000 + "]\n"
    if kind == "json":
        return "summary.json", '{"x":[' + "{}," * 200_000 + "{}]}"
    results = [f'"test{run}x{n}": 1' for n in range(20_000)]
    return "summary.json", f'{{"finished": true, {", ".join(results)}}}'


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("classes", "r1: 1,400 more settings are left out"),
        ("settings", "r1: 1,400 more settings are left out"),
        ("values", "r1/config.yaml has more than 10,000 values, and is not read"),
        ("json", "r1/summary.json has more than 100,000 values, and is not read"),
        ("results", "r1: 19,000 more results are left out"),
    ],
)
def test_very_much_in_a_runs_folder_is_listed_in_a_moment(
    kind: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for run in range(3):
        folder = tmp_path / "checkpoints" / f"r{run}"
        folder.mkdir(parents=True)
        name, text = many_of(kind, run)
        (folder / name).write_text(text)
    began = time.process_time()
    rows = listed(tmp_path / "checkpoints")
    # It takes half a second. What grows with the square of the names takes a minute.
    assert time.process_time() - began < 5
    assert [row["name"] for row in rows] == ["r0", "r1", "r2"]
    # Each run has a cell for every name of all of them.
    assert len({name for row in rows for name in row}) < 2_100
    assert said in capsys.readouterr().err


def test_rows_of_another_width_than_the_heading_are_damage(
    root: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Each short row would be filled up to the width of the heading.
    heading = "step," + ",".join(f"m{n}" for n in range(5_000))
    wide = root / "slow-1" / "metrics.csv"
    wide.write_text(f"{heading}\n" + "1\n" * 1_000)
    with pytest.raises(ValueError, match="has a row with more or fewer cells"):
        list(read_rows(wide, is_bounded=True))
    # Half a line is what a killed run leaves.
    wide.write_text("step,epoch,a\r\n1,0,2\r\n2,")
    assert list(read_rows(wide)) == [{"step": 1, "epoch": 0, "a": 2}]
    monkeypatch.setattr(reading, "MOST_COLUMNS", 2)
    with pytest.raises(reading.NotRead, match="has more than 2 columns"):
        reading.Cells(wide)
    with pytest.raises(reading.NotRead, match="has more than 4 cells"):
        reading.Cells(wide, most_cells=4)
    listed(root, "--report", str(root / "page.html"))
    assert "slow-1/metrics.csv has more than 2 columns, and is not read" in capsys.readouterr().err


def test_a_chart_of_very_many_points_keeps_what_is_seen() -> None:
    values = [0.0] * 10_000
    values[4_321] = 5.0
    values[8_765] = -5.0
    series = thinned(range(10_000), values, 400)
    assert len(series) <= 400
    assert {(0, 0.0), (4_321, 5.0), (8_765, -5.0), (9_999, 0.0)} <= set(series)
    assert series == sorted(series)
    assert thinned([1, 2], [3.0, 4.0], 2) == [(1, 3.0), (2, 4.0)]


def test_a_run_whose_name_is_not_unicode_is_listed(root: Path) -> None:
    make_run(root, os.fsdecode(b"na\xffme"))
    assert "na\udcffme" in [row["name"] for row in listed(root)]
    listed(root, "--report", str(root / "page.html"))


class Page(HTMLParser):
    """The tags, attributes and texts of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_the_page_compares_all_runs_and_needs_no_network(root: Path) -> None:
    listed(root, "--report", str(root / "page.html"))
    text = (root / "page.html").read_text()
    shown = Page(text)
    assert "script" not in shown.tags
    assert not shown.attributes & {"src", "onload", "onerror"}
    assert not re.search(r"url\(\s*[\"']?(?!#)|@import", text)
    headings = [
        "Runs",
        "Mean and standard deviation over seeds",
        "Settings that differ",
        "Test results",
    ]
    assert all(heading in shown.texts for heading in headings)
    assert {"train/loss", "val/accuracy"} <= set(shown.texts)
    assert "memory/rss_gib" not in shown.texts
    assert text.count("<svg") == 2
    for colour in page.COLOURS[:2]:  # two configurations: the seeds of one share a colour
        assert colour in text
    assert page.COLOURS[2] not in text


def test_no_markup_of_a_run_reaches_the_page(root: Path) -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}$\\frac$"
    folder = make_run(root, "_<b>evil", optimizer=evil)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(
        json.dumps(summary | {"monitor": evil, evil: 0.5, f"test/{evil}": 0.5})
    )
    (folder / "metrics.csv").write_text(f'step,"{evil}"\n1,2\n')
    listed(root, "--report", str(root / "page.html"))
    shown = Page((root / "page.html").read_text())
    assert not shown.tags & {"script", "img", "b"}
    assert evil in shown.texts


def test_a_metric_with_a_single_value_is_a_number_and_no_empty_chart(root: Path) -> None:
    for run in ("fast", "slow-1", "slow-2"):
        (root / run / "metrics.csv").write_text(
            "step,epoch,train/loss,only/once\n1,0,0.5,0.25\n2,0,0.4,\n3,0,,\n"
        )
    listed(root, "--report", str(root / "page.html"))
    text = (root / "page.html").read_text()
    assert text.count("<svg") == 1
    assert "Metrics with a single value" in text
    assert text.count("0.2500") == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--root", "nowhere"], "--root must hold runs, got nowhere"),
        (["--sort", "val/acuracy"], "got val/acuracy. Did you mean val/accuracy?"),
        (["--seeds", "2"], "--seeds N, at least 1, and --run_name NAME go together"),
        (["--run_name", "s"], "--seeds N, at least 1, and --run_name NAME go together"),
        (["--max_epochs", "2"], "unknown option --max_epochs"),
        (["--report", "x.csv"], "--report must end in .html, got x.csv"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], message: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(partial(runs.main, "numerals"), ["--root", str(root), *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_real_run_is_listed_without_torch(tmp_path: Path) -> None:
    folder = trained_checkpoint().parent
    for name in ("config.yaml", "summary.json", "metrics.csv"):
        (tmp_path / "runs" / "trained").mkdir(parents=True, exist_ok=True)
        shutil.copy(folder / name, tmp_path / "runs" / "trained" / name)
    script = """if True:
        import sys
        from unbroken.commands import runs as runs
        assert runs.main("numerals", sys.argv[1:]) == 0
        assert not {"torch", "lightning", "matplotlib", "numpy"} & set(sys.modules)
    """
    words = ["--root", str(tmp_path / "runs"), "--output", str(tmp_path / "out.csv")]
    subprocess.run([sys.executable, "-c", script, *words], check=True, timeout=60)
    with open(tmp_path / "out.csv", newline="") as file:
        (row,) = csv.DictReader(file)
    summary = json.loads((folder / "summary.json").read_text())
    assert (row["name"], row["state"]) == ("trained", "finished")
    assert float(row["val/accuracy"]) == summary["val/accuracy"]
    assert float(row["fit_seconds"]) == summary["fit_seconds"]


def test_python_m_project_lists_every_command_without_importing_one() -> None:
    words = [sys.executable, "-X", "importtime", "-m", PACKAGE]
    done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
    told = dict(re.findall(rf"^python -m {PACKAGE}\.(\w+) +(\S.*)$", done.stdout, re.MULTILINE))
    here = Path(numerals.__file__).parent
    commands = {path for path in here.glob("*.py") if "\n    run_command(" in path.read_text()}
    commands.add(here / "fit.py")
    assert set(told) == {path.stem for path in commands}
    assert told["runs"] == (runs.__doc__ or "").partition("\n")[0]
    assert done.stdout.startswith(f"python -m {PACKAGE}.fit ")
    assert not re.search(rf"\| +(torch|lightning|{PACKAGE}\..*)$", done.stderr, re.MULTILINE)
    piped = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {shlex.join(words[:1])} -m {PACKAGE} | true"], stderr=-1
    )
    assert (piped.returncode, piped.stderr) == (0, b"")


def test_of_a_run_in_a_mirror_no_larger_file_is_fetched_than_is_read(
    capsys: pytest.CaptureFixture[str],
) -> None:
    MemoryFileSystem.store.clear()
    store = Store("memory://store/run")
    summary = b'{"finished": true}'
    files = {"summary.json": Entry(len(summary), hashlib.sha256(summary).hexdigest())}
    store.write(files["summary.json"].place("summary.json"), summary)
    # It is not even looked for.
    files["metrics.csv"] = Entry(3 * 2**30, "a" * 64)
    save = Manifest(1, 1, "id", "b" * 32, 1_000_000_000.0, files)
    store.write(save.name, save.to_bytes())
    assert runs.main("numerals", ["--root", "memory://store"]) == 0
    told = capsys.readouterr().out
    assert "its metrics.csv is left out: it has more than 268,435,456 bytes." in told
    assert "finished" in told


def test_a_list_of_runs_shows_those_of_a_mirror(capsys: pytest.CaptureFixture[str]) -> None:
    MemoryFileSystem.store.clear()
    store = Store("memory://store/run")
    contents = {"config.yaml": b"seed_everything: 7", "summary.json": b'{"finished": true}'}
    files = {}
    for name, data in contents.items():
        entry = Entry(len(data), hashlib.sha256(data).hexdigest())
        store.write(entry.place(name), data)
        files[name] = entry
    save = Manifest(1, 1, "id", "b" * 32, 1_000_000_000.0, files)
    store.write(save.name, save.to_bytes())
    runs.main("numerals", ["--root", "memory://store"])
    told = capsys.readouterr().out
    assert "finished" in told
    assert "09-0" in told
    store.write(lease.FILE, b"{}")
    runs.main("numerals", ["--root", "memory://store"])
    assert "running or killed" in capsys.readouterr().out
