from __future__ import annotations

import csv
import json
import multiprocessing
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import EMAWeightAveraging
from numerals.fit import job as fit
from numerals.model import ConvNet
from PIL import Image
from torch.utils.data import DataLoader, TensorDataset
from unbroken.checkpoint.saving import Saving
from unbroken.cli.cli import configure
from unbroken.cli.start import exit_code
from unbroken.commands.benchmark import in_turn, real_runs, table_devices, table_memory, timing
from unbroken.commands.benchmark.command import TABLES, main, measure_table, read_options
from unbroken.commands.benchmark.conditions import conditions, line_of
from unbroken.commands.benchmark.in_turn import epochs_in_turn
from unbroken.commands.benchmark.loops_by_hand import (
    FLOOR,
    FULL,
    PerSampleImages,
    in_memory,
    normalizer,
)
from unbroken.commands.benchmark.picture import draw
from unbroken.commands.benchmark.real_runs import Epoch, RunClock, run_epochs
from unbroken.commands.benchmark.table_devices import ResNet18
from unbroken.commands.benchmark.table_loaders import time_epoch
from unbroken.commands.benchmark.timing import alternate, median_and_spread
from unbroken.data import TensorImages
from unbroken.errors import UserError
from unbroken.stopping import signals

SMALL = [
    "--data.source",
    "sample",
    "--data.train_samples",
    "256",
    "--data.val_samples",
    "64",
    "--accelerator",
    "cpu",
]
TINY = ["--quick", "--n", "1", *SMALL]


def rows_of(table: str, folder: Path, *flags: str) -> list[dict[str, Any]]:
    """What a table's command writes to its JSON file."""
    assert main("numerals", [table, *TINY, "--output", str(folder / "out.json"), *flags]) == 0
    rows: list[dict[str, Any]] = json.loads((folder / "out.json").read_text())["tables"][table]
    assert all(row["n"] >= 1 for row in rows)
    return rows


@pytest.fixture(autouse=True)
def _forked_loops(monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of loops are forks of one that has imported torch already."""
    forking = multiprocessing.get_context("forkserver")
    forking.set_forkserver_preload(["unbroken.commands.benchmark.in_turn"])
    monkeypatch.setattr(in_turn, "multiprocessing", SimpleNamespace(get_context=lambda _: forking))


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# The tables


@pytest.mark.nightly
def test_a_case_that_the_table_chose_itself_is_left_out_where_it_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Such as a batch of 1024 on a small GPU. The size that the user has configured is his own."""

    def run_on(config: Any, epochs: int) -> RunClock:
        if config.datamodule.batch_size in failing:
            raise RuntimeError("CUDA out of memory")
        run = RunClock()
        run.names = {"device": "cpu", "network": "MLP"}
        run.samples = 256
        run.train_samples = 256
        run.epochs = [Epoch(1.0, 1.0)]
        return run

    monkeypatch.setattr(real_runs, "run_epochs", run_on)
    flags = [*SMALL, "--data.batch_size", "32", "--n", "2"]
    words = ["devices", "--networks", "chosen", "--precisions", "32-true", *flags]
    failing = [1024]
    rows = measure_table("numerals", "devices", read_options("numerals", words))
    assert [row["batch_size"] for row in rows] == [32, 64, 256]
    told = capsys.readouterr().err
    assert told.count("batch 1024 is left out: RuntimeError: CUDA out of memory") == 1
    failing = [32]
    with pytest.raises(RuntimeError, match="out of memory"):
        measure_table("numerals", "devices", read_options("numerals", words))


def test_a_system_that_tells_no_load_is_not_called_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "getloadavg")
    facts = conditions(Path(__file__).parent)
    assert "load_average" not in facts
    assert "quiet" not in facts
    assert "busy" not in line_of(facts)


@pytest.mark.nightly
def test_overhead_compares_real_runs_with_loops_by_hand_and_leaves_no_run_behind(
    tmp_path: Path,
) -> None:
    rows = {row["loop"]: row for row in rows_of("overhead", tmp_path)}
    loops = ["hand-written floor", "plain PyTorch loop", "all features", "Lightning, nothing on"]
    assert list(rows) == loops
    floor, full = rows["hand-written floor"], rows["all features"]
    assert floor["train_vs_floor"] == 1
    assert full["epoch_vs_floor"] == pytest.approx(
        full["epoch_s"] / floor["epoch_s"]
    )  # one epoch of each
    assert full["lowest"] == full["highest"] == full["epoch_vs_floor"]
    assert full["epoch_s"] > full["train_s"] > 0
    assert {row["batch_size"] for row in rows.values()} == {64}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.json", "out.png"]
    # Between two runs a signal ends the benchmark at once.
    assert signals.state.phase is signals.Phase.REPORTS
    assert Image.open(tmp_path / "out.png").size[0] > 1000


def test_a_picture_beside_the_output_replaces_its_own_and_no_other_one(workplace: Path) -> None:
    words = ["loaders", "--output", "out.json"]
    draw(Path("out.png"), {"devices": []}, {"devices": "samples_per_sec"}, "nothing")
    assert read_options("numerals", words).plot == Path("out.png")
    Path("out.png").write_bytes(b"x")
    with pytest.raises(UserError, match=r"out\.png was not written by this command"):
        read_options("numerals", words)
    assert read_options("numerals", [*words, "--plot", "out.png"]).plot == Path("out.png")


def test_a_table_without_a_measured_value_leaves_its_panel_empty(tmp_path: Path) -> None:
    rows = [{"device": "cpu", "samples_per_sec": None}]
    draw(tmp_path / "chart.png", {"devices": rows}, {"devices": "samples_per_sec"}, "nothing")
    assert (tmp_path / "chart.png").exists()


@pytest.mark.nightly
def test_loaders_times_ours_against_single_samples_and_says_on_what(tmp_path: Path) -> None:
    rows = {
        row["loader"]: row
        for row in rows_of("loaders", tmp_path, "--workers", "0", "1", "--plot", "chart.png")
    }
    assert rows["ours"]["times_ours"] == 1
    ours, plain = rows["ours"], rows["plain PyTorch, 0 workers"]
    assert plain["times_ours"] == pytest.approx(plain["ms_per_batch"] / ours["ms_per_batch"])
    assert ours["batches_per_sec"] == pytest.approx(1000 / ours["ms_per_batch"])
    assert {"plain PyTorch, 1 workers", "plain PyTorch, 1 workers, persistent"} <= set(rows)
    result = json.loads((tmp_path / "out.json").read_text())
    for fact in (
        "date",
        "command",
        "git_commit",
        "hardware",
        "versions",
        "cpu_threads",
        "load_average",
    ):
        assert result[fact], fact
    assert "quiet" in result
    assert result["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert (tmp_path / "chart.png").exists()
    assert (
        main(
            "numerals", ["loaders", *TINY, "--workers", "0", "--output", str(tmp_path / "out.csv")]
        )
        == 0
    )
    with open(tmp_path / "out.csv", newline="") as file:
        row = next(csv.DictReader(file))
    for column in ("table", "loader", "n", "date", "command", "git_dirty", "ms_per_batch"):
        assert row[column], column
    for column in ("hardware.cpu", "versions.torch"):
        assert row[column], column
    assert "hardware" not in row


@pytest.mark.nightly
def test_memory_shows_what_halves_and_what_stays(tmp_path: Path) -> None:
    rows = rows_of("memory", tmp_path, "--batch_sizes", "32", "64", "--precisions", "32-true")
    weights = sum(p.numel() for p in ConvNet().parameters()) * 4 / 1024**2
    assert [row["gradients_mib"] for row in rows] == pytest.approx([weights] * len(rows))
    adams_moments = [2 * weights] * len(rows)
    assert [row["optimizer_mib"] for row in rows] == pytest.approx(adams_moments, rel=0.01)
    peaks = {
        (r["batch_size"], r["accumulation"]): r["peak_mib"]
        for r in rows
        if not r["activation_checkpointing"]
    }
    assert 1.7 < peaks[64, 1] / peaks[32, 1] < 2.1
    assert peaks[64, 4] < peaks[64, 1] / 2
    with_checkpointing = next(
        r for r in rows if r["activation_checkpointing"] and r["batch_size"] == 64
    )
    assert with_checkpointing["peak_mib"] < peaks[64, 1]


@pytest.mark.parametrize(
    "asked", ["auto", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("cpu", "gpu"))]
)
def test_memory_measures_the_device_that_was_asked_for(
    asked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_on(config: Any, epochs: int) -> RunClock:
        measured.add(config.trainer["accelerator"])
        return RunClock()

    measured: set[str] = set()
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda")
    )
    monkeypatch.setattr(table_devices, "usable", lambda device, precisions: ["32-true"])
    monkeypatch.setattr(real_runs, "run_epochs", run_on)
    flags = [*SMALL[:2], "--accelerator", asked]
    options = read_options("numerals", ["memory", "--quick", *flags])
    assert list(table_memory.measure_memory(configure(fit, "benchmark", flags), options))
    assert measured == {"cpu" if asked == "cpu" else "gpu"}


@pytest.mark.nightly
def test_devices_has_a_row_per_precision_that_this_device_really_has(tmp_path: Path) -> None:
    rows = rows_of("devices", tmp_path, "--networks", "chosen", "--model.network", "MLP")
    assert [(row["device"], row["precision"]) for row in rows] == [
        ("cpu", "32-true"),
        ("cpu", "bf16-mixed"),
    ]
    assert rows[0]["speed_up"] == 1
    assert rows[0]["accuracy_difference"] == 0
    assert rows[1]["accuracy_difference"] == pytest.approx(
        rows[1]["val/accuracy"] - rows[0]["val/accuracy"]
    )
    assert rows[0]["epoch_s"] == pytest.approx(256 / rows[0]["samples_per_sec"])
    assert "peak_allocated_gib" not in rows[0]  # the CPU's allocator does not tell


def test_the_network_to_compare_with_is_the_published_one() -> None:
    assert sum(p.numel() for p in ResNet18().parameters()) == 11_175_370


# How it is measured


def test_variants_take_turns_and_every_other_round_runs_backwards() -> None:
    order: list[str] = []
    alternate("t", {name: lambda name=name: order.append(name) for name in "abc"}, 3)
    assert "".join(order) == "abccbaabc"


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_shown_on_a_terminal_only(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal)
    alternate("devices", {"cpu": lambda: None}, 2)
    shown = capsys.readouterr().err
    assert ("devices" in shown) == terminal
    assert ("0/2" in shown) == terminal


def of_loops() -> list[multiprocessing.process.BaseProcess]:
    """The processes that this one has started for a loop each; those of loaders are daemons."""
    return [each for each in multiprocessing.active_children() if not each.daemon]


@pytest.mark.nightly
def test_each_loop_trains_in_a_process_of_its_own_in_turn_with_the_others(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def watched(table: str, variants: dict[str, Any], rounds: int) -> dict[str, list[Epoch]]:
        def noted(name: str) -> Epoch:
            alive.append((name, len(of_loops())))
            return variants[name]()  # type: ignore[no-any-return]

        return alternate(table, {name: partial(noted, name) for name in variants}, rounds)

    alive: list[tuple[str, int]] = []
    monkeypatch.setattr(timing, "alternate", watched)
    found = epochs_in_turn("numerals", "t", [FLOOR, FULL], [*SMALL, "--model.network", "MLP"], 2)
    order = [
        FLOOR,
        FULL,
        FULL,
        FLOOR,
        FLOOR,
        FULL,
    ]
    assert alive == [
        (name, 2) for name in order
    ]  # a process each, alive from the first turn to the last
    assert of_loops() == []
    assert {name: len(epochs) for name, epochs in found.items()} == {
        FLOOR: 2,
        FULL: 2,
    }  # one warmed up
    assert all(epoch.epoch_s >= epoch.train_s > 0 for epochs in found.values() for epoch in epochs)
    assert capfd.readouterr() == ("", "")


@pytest.mark.nightly
def test_what_a_loop_refuses_in_its_process_is_one_line() -> None:
    with pytest.raises(UserError, match=r"^--model.lr must be above 0, got -1\.0\.$"):
        epochs_in_turn("numerals", "t", [FLOOR], [*SMALL, "--model.lr", "-1"], 1)


@pytest.mark.nightly
def test_a_benchmark_that_is_stopped_ends_its_processes_without_a_word(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def stopped(table: str, variants: dict[str, Any], rounds: int) -> None:
        variants[FULL]()  # its next epoch waits, and the floor has not begun
        raise KeyboardInterrupt

    monkeypatch.setattr(timing, "alternate", stopped)
    with pytest.raises(KeyboardInterrupt):
        epochs_in_turn("numerals", "t", [FULL, FLOOR], [*SMALL, "--model.network", "MLP"], 2)
    assert of_loops() == []
    assert capfd.readouterr() == ("", "")


def test_a_median_comes_with_n_and_spread() -> None:
    assert median_and_spread("ms", [4.0, 2.0, 3.0]) == {
        "ms": 3.0,
        "n": 3,
        "spread_pct": pytest.approx(200 / 3),
    }
    assert median_and_spread("ms", [4.0]) == {"ms": 4.0, "n": 1}


def test_every_run_has_new_weights_and_unused_copies_of_the_users_callbacks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = [*SMALL, "--trainer.callbacks", "lightning.pytorch.callbacks.EMAWeightAveraging"]
    config = configure(fit, "benchmark", flags)
    before = {name: value.clone() for name, value in config.module.state_dict().items()}
    trained: list[Any] = []
    monkeypatch.setattr(
        "unbroken.commands.benchmark.real_runs.Trainer.fit",
        lambda trainer, module, **_: trained.append((trainer, module)),
    )
    for _ in range(2):
        run_epochs(config, 1)
    (one, module), (other, second) = trained
    assert torch.equal(next(module.parameters()), next(second.parameters()))
    assert len({id(each) for each in (module, second, config.module)}) == 3
    found = [
        next(each for each in trainer.callbacks if isinstance(each, EMAWeightAveraging))
        for trainer in (one, other)
    ]
    assert len({id(each) for each in (*found, config.trainer["callbacks"])}) == 3
    assert all(
        torch.equal(value, before[name]) for name, value in config.module.state_dict().items()
    )


def test_an_epoch_is_timed_whatever_limits_were_typed() -> None:
    config = configure(fit, "benchmark", [*SMALL, "--data.batch_size", "128", "--max_steps", "1"])
    run = run_epochs(config, 2, bare=True)
    assert [epoch.epoch_s >= epoch.train_s > 0 for epoch in run.epochs] == [True, True]
    assert (run.samples, run.train_samples) == (256, 256)


def test_the_samples_of_a_smaller_last_batch_are_those_that_it_has(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    images = torch.zeros(130, 1, 28, 28, dtype=torch.uint8)
    data = TensorDataset(images, torch.zeros(130, dtype=torch.long))
    config = configure(fit, "benchmark", SMALL)
    monkeypatch.setattr(config.datamodule, "train_dataloader", lambda: DataLoader(data, 100))
    run = run_epochs(config, 2, bare=True)
    assert (run.samples, run.train_samples) == (130, 130)


def test_an_epoch_ends_after_its_checkpoint_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    def noted(owner: type, name: str, event: str) -> None:
        method = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *args: (method(*args), events.append(event)))

    events: list[str] = []
    noted(Saving, "training_ends", "saved")
    noted(RunClock, "_end_epoch", "ended")
    run = run_epochs(configure(fit, "benchmark", SMALL), 1)
    assert events == [
        "ended",
        "saved",
        "ended",
    ]  # the first is that of no epoch, when the first one begins
    assert len(run.epochs) == 1


def test_batches_are_copied_without_waiting_on_cuda_only(monkeypatch: pytest.MonkeyPatch) -> None:
    def copy(self: torch.Tensor, device: torch.device, non_blocking: bool = False) -> torch.Tensor:
        waits.append((device.type, non_blocking))
        return self

    waits: list[tuple[str, bool]] = []
    loader = [(torch.zeros(2, 1, 4, 4), torch.zeros(2))]
    monkeypatch.setattr(
        "unbroken.commands.benchmark.table_loaders.synchronize", lambda device: None
    )
    monkeypatch.setattr(torch.Tensor, "to", copy)
    for device in ("cuda", "mps"):
        time_epoch(loader, lambda images: images, torch.device(device), 1)
    assert waits == [("cuda", True)] * 2 + [("mps", False)] * 2


def test_loops_by_hand_get_the_images_that_a_run_trains_on() -> None:
    config = configure(fit, "benchmark", SMALL)
    data, train, cpu = config.datamodule, in_memory(config, "train"), torch.device("cpu")
    batch = normalizer(data, train.images, cpu)(train.images)
    expected = (train.images.double() / 255 - data.mean[0]) / data.std[0]
    assert torch.allclose(batch.double(), expected, atol=1e-5)
    image, label = PerSampleImages(data, train)[3]
    assert torch.allclose(image.double(), expected[3], atol=1e-5)
    assert label == train.labels[3]
    bytes_of_colours = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    for images in (bytes_of_colours, bytes_of_colours / 255):
        for colours in (SimpleNamespace(mean=[0.1, 0.2, 0.3], std=[0.5] * 3), None):
            image, _ = PerSampleImages(colours, TensorImages(images, torch.tensor([0, 1])))[1]
            assert torch.allclose(image, normalizer(colours, images, cpu)(images)[1], atol=1e-5)


# What is typed


@pytest.mark.parametrize(
    ("argv", "table", "rest"),
    [
        ([], None, []),
        (["--data.root", "memory"], None, ["--data.root", "memory"]),
        (
            ["--quick", "memory", "--data.root", "d"],
            "memory",
            ["--data.root", "d"],
        ),
        (["--n", "3", "overhead"], "overhead", []),
        (["overhead", "--data.root=loaders"], "overhead", ["--data.root=loaders"]),
    ],
)
def test_the_table_is_told_from_the_values_of_fits_flags(
    argv: list[str], table: str | None, rest: list[str]
) -> None:
    options = read_options("numerals", argv)
    assert (options.table, options.fit_flags) == (table, rest)


@pytest.mark.nightly
def test_a_file_and_typed_flags_say_what_is_measured_and_how_often(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def measure(config: Any, options: Any) -> list[dict[str, Any]]:
        measured.append((type(config.module.network).__name__, options.batch_size, options.n))
        return []

    measured: list[tuple[str, int, int]] = []
    monkeypatch.setattr("unbroken.commands.benchmark.table_overhead.measure_overhead", measure)
    Path("mine.yaml").write_text("data: {batch_size: 32}\n")
    for flags in ([], ["--config", "mine.yaml"], ["--data.batch_size", "16"]):
        measure_table("numerals", "overhead", read_options("numerals", ["overhead", *flags]))
    assert measured == [("MLP", 64, 5), ("ConvNet", 32, 5), ("MLP", 16, 5)]
    for typed in ([], ["--n", "7"]):  # a pass over all tables measures less unless told otherwise
        measure_table("numerals", "overhead", read_options("numerals", typed))
    assert [n for _, _, n in measured[3:]] == [3, 7]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["devcies"], f"TABLE must be one of {', '.join(TABLES)}, got devcies."),
        (["loaders", "--n", "0"], "--n must be at least 1, got 0."),
        (["loaders", "--workers", "0", "-1"], "--workers must be at least 0, got -1."),
        (["loaders", "--output", "x.txt"], "--output must end in .json or .csv, got x.txt."),
        (["loaders", "--plot", "x.jpg"], "--plot must end in .png, got x.jpg."),
        (["loaders", "--data.batch_sice", "3"], "--data.batch_sice"),
        (["overhead", *TINY, "--model.lr", "-1"], "--model.lr must be above 0, got -1"),
        (
            ["loaders", *TINY, "--accelerator", "tpu"],
            "--accelerator must be auto or what this machine has (cpu",
        ),
        (
            ["loaders", *TINY, "--data.batch_size", "200"],
            "must be at most half of 256 samples",
        ),
    ],
)
def test_bad_input_is_one_line(
    argv: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_code(partial(main, "numerals"), argv) == 2
    error = capsys.readouterr().err.strip()
    assert said in error
    assert len(error.splitlines()) == 1
    assert not Path("checkpoints").exists()


class Vectors(LightningDataModule):
    """No images, and no batch_size."""

    def train_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.rand(8, 3), torch.rand(8)), 4)


def test_a_table_has_the_batch_size_that_is_one_of_the_hparams(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def configured(program: Any, command: str, argv: list[str]) -> Any:
        config = configure(program, command, SMALL)
        config.datamodule = Vectors()  # type: ignore[assignment]
        config.datamodule.save_hyperparameters({"batch_size": 4})
        return config

    monkeypatch.setattr("unbroken.cli.cli.configure", configured)
    # The size is no longer what is missing.
    with pytest.raises(UserError, match="Vectors has none for train"):
        measure_table("numerals", "loaders", read_options("numerals", ["loaders"]))


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("loaders", "the table loaders needs a batch_size, Vectors has none"),
        ("devices", "--networks ResNet18 needs images"),
        ("overhead", "loops written by hand need TensorImages, Vectors has none for train"),
    ],
)
def test_data_that_a_table_cannot_use_is_one_line(
    table: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def configured(program: Any, command: str, argv: list[str]) -> Any:
        config = configure(program, command, SMALL)
        config.datamodule = Vectors()  # type: ignore[assignment]
        if table != "loaders":
            config.datamodule.batch_size = 4
        return config

    monkeypatch.setattr("unbroken.cli.cli.configure", configured)
    with pytest.raises(UserError, match=r"^[^\n]+$") as error:
        measure_table("numerals", table, read_options("numerals", [table]))
    assert said in str(error.value)


def test_help_is_quick_and_names_every_table() -> None:
    code = "import sys\nfrom unbroken.commands.benchmark.command import main\n"
    code += (
        "try:\n    main('numerals', ['--help'])\nfinally:\n    assert 'torch' not in sys.modules"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ
    )
    assert shown.returncode == 0, shown.stderr
    assert all(table in shown.stdout for table in TABLES)
