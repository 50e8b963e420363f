from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EMAWeightAveraging
from PIL import Image

from project.benchmark import steps as progress
from project.benchmark.__main__ import main, read_options
from project.benchmark.flags import TABLES
from project.benchmark.measure import measure_table
from project.benchmark.peak_memory import MARK, largest_sum
from project.benchmark.plain_loop import ExampleNetwork
from project.benchmark.timing import alternate, median_and_spread
from project.benchmark.with_lightning import EpochClock, add_callbacks
from project.engine import signals
from project.engine.cli import ProjectCLI
from project.engine.command import exit_code
from project.errors import UserError
from project.model import ConvNet

TINY = ["--quick", "--n", "1", "--accelerator", "cpu", "--data.train_samples", "256", "--data.val_samples", "64"]


def rows_of(table: str, folder: Path, *flags: str) -> list[dict[str, Any]]:
    """What a table's command writes to its JSON file."""
    assert main([table, *TINY, "--output", str(folder / "out.json"), *flags]) == 0
    rows: list[dict[str, Any]] = json.loads((folder / "out.json").read_text())["tables"][table]
    assert all(row["n"] >= 1 for row in rows)
    return rows


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("WANDB_MODE", "disabled")


def test_overhead_compares_real_runs_with_loops_by_hand_and_leaves_no_run_behind(tmp_path: Path) -> None:
    rows = {row["loop"]: row for row in rows_of("overhead", tmp_path)}
    assert {
        "hand-written floor",
        "floor with index_select",
        "course loop",
        "all features",
        "without memory monitor",
        "Lightning, nothing on",
    } <= set(rows)
    floor, full = rows["hand-written floor"], rows["all features"]
    assert floor["train_vs_floor"] == 1
    assert full["epoch_vs_floor"] == pytest.approx(full["epoch_s"] / floor["epoch_s"])
    assert full["epoch_s"] > full["train_s"] > 0
    assert {row["batch_size"] for row in rows.values()} == {64}
    for name in ("ThroughputMonitor", "MemoryMonitor", "OptimizerMonitor", "RunCheckpoint"):
        assert 0 < rows[f"inside {name}"]["pct_of_run"] < 100
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.png"]
    assert not signals._State.deferring  # between two runs a signal ends the benchmark at once
    assert Image.open(tmp_path / "out.png").size[0] > 1000


@pytest.mark.parametrize(
    ("argv", "table", "rest"),
    [
        ([], None, []),
        (["--data.root", "memory"], None, ["--data.root", "memory"]),
        (["--quick", "memory", "--data.root", "d"], "memory", ["--data.root", "d"]),
        (["--n", "3", "overhead"], "overhead", []),
        (["overhead", "--data.root=threads"], "overhead", ["--data.root=threads"]),
    ],
)
def test_the_table_is_told_from_the_values_of_fits_flags(argv: list[str], table: str | None, rest: list[str]) -> None:
    found, _, flags = read_options(argv)
    assert (found, flags) == (table, rest)


def test_every_result_says_where_when_and_with_what_it_was_measured(tmp_path: Path) -> None:
    rows_of("loaders", tmp_path, "--workers", "0", "--plot", str(tmp_path / "chart.png"))
    result = json.loads((tmp_path / "out.json").read_text())
    for fact in ("date", "command", "hardware", "versions", "cpu_threads", "load_average"):
        assert result[fact], fact
    assert result["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert (tmp_path / "chart.png").exists()
    main(["loaders", *TINY, "--workers", "0", "--output", str(tmp_path / "out.csv")])
    with open(tmp_path / "out.csv", newline="") as file:
        row = next(csv.DictReader(file))
    for column in ("table", "loader", "n", "cpu", "version_torch", "date", "command", "ms_per_batch"):
        assert row[column], column


def test_loaders_times_ours_against_single_samples(tmp_path: Path) -> None:
    rows = {row["loader"]: row for row in rows_of("loaders", tmp_path, "--workers", "0", "1")}
    assert rows["ours"]["times_ours"] == 1
    ours, course = rows["ours"], rows["course, 0 workers"]
    assert course["times_ours"] == pytest.approx(course["ms_per_batch"] / ours["ms_per_batch"])
    assert ours["batches_per_sec"] == pytest.approx(1000 / ours["ms_per_batch"])
    assert {"course, 1 workers", "course, 1 workers, persistent"} <= set(rows)


def test_memory_shows_what_halves_and_what_stays(tmp_path: Path) -> None:
    rows = rows_of("memory", tmp_path, "--batch_sizes", "32", "64", "--precisions", "32-true")
    weights = sum(p.numel() for p in ConvNet().parameters()) * 4 / 1024**2
    assert [row["gradients_mib"] for row in rows] == pytest.approx([weights] * len(rows))
    assert [row["optimizer_mib"] for row in rows] == pytest.approx(
        [2 * weights] * len(rows), rel=0.01
    )  # Adam's two moments
    peaks = {(r["batch_size"], r["accumulation"]): r["peak_mib"] for r in rows if not r["activation_checkpointing"]}
    assert 1.7 < peaks[64, 1] / peaks[32, 1] < 2.1
    assert peaks[64, 4] < peaks[64, 1] / 2


def test_peak_is_the_largest_sum_since_the_mark() -> None:
    def event(time: int, size: int, name: str = "[memory]") -> Any:
        return SimpleNamespace(name=lambda: name, start_ns=lambda: time, nbytes=lambda: size)

    before = [event(1, 900), event(2, -800)]
    after = [event(4, 50), event(5, 200), event(6, -250), event(7, 20)]
    assert largest_sum([*after, event(3, 0, MARK), *before]) == 350


def test_devices_has_a_row_per_precision_that_this_device_really_has(tmp_path: Path) -> None:
    rows = rows_of("devices", tmp_path, "--networks", "chosen", "--model.network", "MLP")
    assert [(row["device"], row["precision"]) for row in rows] == [("cpu", "32-true"), ("cpu", "bf16-mixed")]
    assert rows[0]["speed_up"] == 1
    assert rows[0]["accuracy_difference"] == 0
    assert rows[1]["accuracy_difference"] == pytest.approx(rows[1]["val/accuracy"] - rows[0]["val/accuracy"])
    assert "peak_allocated_gib" not in rows[0]  # the CPU's allocator does not tell


def test_accuracy_is_the_mean_over_seeds_beside_a_plain_loop(tmp_path: Path) -> None:
    flags = ["--n", "2", "--max_epochs", "1", "--target", "0.01", "--baseline", "--model.network", "MLP"]
    ours, plain = rows_of("accuracy", tmp_path, *flags)
    assert ours["test/accuracy"] == pytest.approx(sum(ours["test_accuracies"]) / 2)
    assert ours["at_target"] == "2 of 2"
    assert min(ours["all_fit_s"]) <= ours["fit_s"] <= max(ours["all_fit_s"])
    assert 0 < ours["to_target_s"] <= ours["fit_s"]
    assert plain["epochs"] == 1
    assert ours["times_faster_than_plain"] == pytest.approx(plain["to_target_s"] / ours["fit_s"])


def test_a_pass_over_all_tables_measures_less_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(cli: Any, settings: Any) -> list[dict[str, Any]]:
        counts.append(settings.n)
        return []

    counts: list[int] = []
    monkeypatch.setattr("project.benchmark.threads.measure", measure)
    for typed in ({}, {"n": 7}):
        measure_table("threads", ["--data.source", "sample"], typed, whole_pass=True)
    assert counts == [3, 7]


def test_a_config_file_says_what_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(cli: Any, settings: Any) -> list[dict[str, Any]]:
        measured.append((type(cli.model.network).__name__, cli.datamodule.batch_size))
        return []

    measured: list[tuple[str, int]] = []
    monkeypatch.setattr("project.benchmark.overhead.measure", measure)
    Path("mine.yaml").write_text("data: {batch_size: 32}\n")
    for flags in ([], ["--config", "mine.yaml"], ["--data.batch_size", "16"]):
        measure_table("overhead", flags, {})
    assert measured == [("MLP", 64), ("ConvNet", 32), ("MLP", 16)]


def test_plain_loop_has_the_examples_network() -> None:
    assert sum(p.numel() for p in ExampleNetwork().parameters()) == 1_199_882


def test_threads_asks_every_setting_alone_and_beside_a_neighbour(tmp_path: Path) -> None:
    rows = rows_of("threads", tmp_path)
    assert {row["beside"] for row in rows} == {"nobody", "busy neighbour"}
    assert {row["threads"] for row in rows} >= {1}
    assert all(row["step_ms"] > 0 for row in rows)


def test_variants_take_turns_and_every_other_round_runs_backwards() -> None:
    order: list[str] = []
    out = io.StringIO()
    alternate({name: lambda name=name: order.append(name) for name in "abc"}, 3, progress.Steps("t", 9, out))
    assert "".join(order) == "abccbaabc"
    assert out.getvalue().count("\n") == 9
    assert "t 9/9" in out.getvalue()


def test_a_median_comes_with_n_and_spread() -> None:
    assert median_and_spread("ms", [4.0, 2.0, 3.0]) == {"ms": 3.0, "n": 3, "spread_pct": pytest.approx(200 / 3)}
    assert median_and_spread("ms", [4.0]) == {"ms": 4.0, "n": 1}


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["devcies"], "TABLE must be one of devices, loaders, memory, overhead, threads, accuracy, got devcies."),
        (["loaders", "--n", "0"], "--n must be at least 1, got 0."),
        (["accuracy", "--target", "99"], "--target must be above 0 and below 1, got 99.0. 0.99 is 99 %."),
        (["loaders", "--output", "x.txt"], "--output must end in .json or .csv, got x.txt."),
        (["loaders", "--plot", "x.jpg"], "--plot must end in .png, got x.jpg."),
        (["loaders", "--data.batch_sice", "3"], "--data.batch_sice"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_code(main, argv) == 2  # type: ignore[arg-type]
    error = capsys.readouterr().err.strip()
    assert said in error
    assert len(error.splitlines()) == 1


def test_help_is_quick_and_names_every_table() -> None:
    code = "import sys; from project.benchmark.__main__ import main; main(['--help'])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert all(table in shown.stdout for table in TABLES)
    loaded = "import sys\nfrom project.benchmark.__main__ import read_options\nread_options(['overhead'])\n"
    loaded += "assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", loaded], check=True, env=os.environ)


def test_a_bad_model_flag_is_refused_before_anything_is_measured() -> None:
    with pytest.raises(UserError):
        main(["overhead", *TINY, "--model.lr", "-1"])
    assert not Path("checkpoints").exists()


def test_a_configurations_own_callbacks_are_measured_with_it() -> None:
    flags = ["--data.source", "sample", "--trainer.callbacks", "lightning.pytorch.callbacks.EMAWeightAveraging"]
    cli = ProjectCLI(flags)
    add_callbacks(cli, [clock := EpochClock()])
    first, second = cli.config_init.trainer.callbacks
    assert isinstance(first, EMAWeightAveraging)
    assert second is clock
