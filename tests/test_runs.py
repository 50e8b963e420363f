from __future__ import annotations

import csv
import fcntl
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

import project
from project import runs
from project.engine.command import exit_code
from tests.commands import SMALL, Process, popen
from tests.trained import trained_checkpoint

PACKAGE = project.__name__


def make_run(
    root: Path, name: str, lr: float = 0.02, seed: int = 1, accuracy: float = 0.9, **other: Any
) -> Path:
    """A run's folder as ``fit`` leaves it, without checkpoints."""
    folder = root / name
    folder.mkdir(parents=True)
    model = {
        "class_path": "project.model.MNISTClassifier",
        "init_args": {"lr": lr, "optimizer": other.get("optimizer", "SGD")},
    }
    config = {
        "seed_everything": seed,
        "trainer": {"max_epochs": 2},
        "model": model,
        "run_name": name,
    }
    (folder / "config.yaml").write_text(f"# python -m project.fit\n{yaml.safe_dump(config)}")
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
        f"20,1,0.4,{accuracy},1",
        "30,1,",
    ]
    (folder / "metrics.csv").write_text("\n".join(rows))
    return folder


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
    assert exit_code(runs.main, ["--root", str(root), "--output", str(output), *words]) == 0
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


def test_lists_are_sorted_and_written_as_csv(root: Path) -> None:
    assert [row["name"] for row in listed(root, "--sort", "val/accuracy")] == [
        "slow-1",
        "slow-2",
        "fast",
    ]


def test_seeds_of_one_configuration_are_averaged(root: Path) -> None:
    make_run(root, "slow-3", 0.01, 3, 0.1, finished=False)
    fast, slow = listed(root, "--seeds")
    assert (slow["runs"], slow["finished"], slow["model.lr"]) == ("slow-1 slow-2 slow-3", 2, 0.01)
    assert slow["val/accuracy"] == pytest.approx(0.91)  # of the finished ones
    assert slow["val/accuracy std"] == pytest.approx(0.02 / 2**0.5)
    assert (slow["fit_seconds"], slow["fit_seconds std"]) == (1.5, 0)
    assert (fast["runs"], fast["test/accuracy"], fast["test/accuracy std"]) == ("fast", 0.94, None)


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

    monkeypatch.setattr(runs, "subprocess", SimpleNamespace(Popen=start))
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
    assert exit_code(runs.main, words) == 143
    assert [path.name for path in Path("checkpoints").glob("s-*")] == ["s-1"]
    Path("checkpoints/other").mkdir()  # a run of something else
    Path("checkpoints/other/config.yaml").write_text("{}")
    assert exit_code(runs.main, words) == 0
    assert "going on from step 1" in capfd.readouterr().out
    facts = [json.loads(Path(f"checkpoints/s-{seed}/summary.json").read_text()) for seed in (1, 2)]
    (row,) = json.loads(Path("seeds.json").read_text())
    assert (row["runs"], row["finished"]) == ("s-1 s-2", 2)
    assert row["test/loss"] == pytest.approx(sum(fact["test/loss"] for fact in facts) / 2)
    assert row["test/loss std"] > 0


def test_a_run_is_running_while_its_lock_is_held_and_interrupted_without_an_end(root: Path) -> None:
    make_run(root, "stopped", finished=False)
    (root / "slow-1" / ".lock").touch()
    with open(root / "fast" / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        states = {row["name"]: row["state"] for row in listed(root)}
        assert states == {
            "fast": "running",
            "slow-1": "finished",
            "slow-2": "finished",
            "stopped": "interrupted",
        }


def test_damaged_files_of_a_run_hide_no_other_run(root: Path) -> None:
    (root / "slow-1" / "config.yaml").write_bytes(b"\xff{")
    (root / "slow-2" / "summary.json").write_text("[1")
    (root / "slow-2" / "metrics.csv").write_text("step,epoch\n1,0,7\n")  # a value too many
    (root / "fast" / "metrics.csv").unlink()
    (root / "fast" / "config.yaml").write_text("[" * 20_000)
    assert [row["name"] for row in listed(root)] == ["fast", "slow-1", "slow-2"]
    listed(root, "--report", str(root / "page.html"))  # feature: report


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("summary.json", '{"finished": true, "test/loss": 1' + "0" * 400 + "}"),
        ("summary.json", '{"finished": true, "test/loss": 1e308, "fit_seconds": 1e308}'),
        ("summary.json", '{"finished": true, "epochs": Infinity}'),
        ("config.yaml", "a: &x {b: *x}"),
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
    listed(root, "--report", str(root / "page.html"))  # feature: report


def test_a_run_whose_name_is_not_unicode_is_listed(root: Path) -> None:
    make_run(root, os.fsdecode(b"na\xffme"))
    assert "na\udcffme" in [row["name"] for row in listed(root)]
    listed(root, "--report", str(root / "page.html"))  # feature: report


# feature: report
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
    page = Page(text)
    assert "script" not in page.tags
    assert not page.attributes & {"src", "onload", "onerror"}
    assert not re.search(r"url\(\s*[\"']?(?!#)|@import", text)
    headings = [
        "Runs",
        "Mean and standard deviation over seeds",
        "Settings that differ",
        "Test results",
    ]
    assert all(heading in page.texts for heading in headings)
    assert {"train/loss", "val/accuracy"} <= set(page.texts)
    assert "memory/rss_gib" not in page.texts
    assert text.count("<svg") == 2
    for colour in runs.COLOURS[:2]:  # two configurations: the seeds of one share a colour
        assert colour in text
    assert runs.COLOURS[2] not in text


def test_no_markup_of_a_run_reaches_the_page(root: Path) -> None:
    evil = "<script>alert(1)</script><img src=x onerror=alert(2)>{{ 7 * 7 }}$\\frac$"
    folder = make_run(root, "_<b>evil", optimizer=evil)
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(
        json.dumps(summary | {"monitor": evil, evil: 0.5, f"test/{evil}": 0.5})
    )
    (folder / "metrics.csv").write_text(f'step,"{evil}"\n1,2\n')
    listed(root, "--report", str(root / "page.html"))
    page = Page((root / "page.html").read_text())
    assert not page.tags & {"script", "img", "b"}
    assert evil in page.texts


# end feature: report


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--root", "nowhere"], "--root must hold runs, got nowhere"),
        (["--sort", "val/acuracy"], "got val/acuracy. Did you mean val/accuracy?"),
        (["--seeds", "2"], "--seeds N, at least 1, and --run_name NAME go together"),
        (["--run_name", "s"], "--seeds N, at least 1, and --run_name NAME go together"),
        (["--max_epochs", "2"], "unknown option --max_epochs"),
        (["--report", "x.csv"], "--report must end in .html, got x.csv"),  # feature: report
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], message: str, root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(runs.main, ["--root", str(root), *words]) == 2
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
        from project import runs
        assert runs.main(sys.argv[1:]) == 0
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
    here = Path(runs.__file__).parent
    files = {
        path
        for path in (*here.glob("*.py"), *here.glob("*/__main__.py"))
        if path.name != "__main__.py" or path.parent != here
    }
    commands = {path for path in files if "\n    run(main)" in path.read_text()}
    assert set(told) == {
        path.parent.name if path.name == "__main__.py" else path.stem for path in commands
    }
    assert told["runs"] == (runs.__doc__ or "").partition("\n")[0]
    assert done.stdout.startswith(f"python -m {PACKAGE}.fit ")
    assert not re.search(rf"torch|lightning|{PACKAGE}\.", done.stderr)
    piped = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {shlex.join(words[:1])} -m {PACKAGE} | true"], stderr=-1
    )
    assert (piped.returncode, piped.stderr) == (0, b"")
