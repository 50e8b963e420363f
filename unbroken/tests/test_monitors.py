"""Monitors work in any Trainer, and never end a run."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from unbroken.monitors.memory import MemoryMonitor, dense_parts, size_gib
from unbroken.monitors.monitor import Monitor, never_ends_the_run
from unbroken.monitors.optimizer import OptimizerMonitor, gradient_norm
from unbroken.monitors.throughput import ThroughputMonitor
from unbroken.results.facts import Summary
from unbroken.results.run_result import AddsFacts, RunResult

from tests.commands import complete
from tests.monitored import (
    in_a_fork,
    make_trainer,
    one_thread,  # noqa: F401 - the fixture of every test here
    read,
)


def monitors() -> list[Monitor]:
    return [
        ThroughputMonitor(),
        MemoryMonitor(),
        OptimizerMonitor(),
    ]


def points(count: int = 40) -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(count, 4, generator=generator)
    return DataLoader(TensorDataset(inputs, inputs.sum(1).sin()), 8)


class Regression(LightningModule):
    """The smallest module with a network."""

    def __init__(self, network: nn.Module | None = None) -> None:
        super().__init__()
        self.network = network or nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.network(batch[0]).squeeze(1), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Lazy(Regression):
    """Shapes are known at the first batch."""

    def __init__(self) -> None:
        super().__init__(nn.Sequential(nn.LazyLinear(6), nn.ReLU(), nn.LazyLinear(1)))


class Graph(Regression):
    """A sparse matrix as a buffer, and an expanded one."""

    def __init__(self, layout: torch.layout) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.eye(30).to_sparse(layout=layout))
        self.register_buffer("expanded", torch.ones(1, 1).expand(30, 30))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (self.adjacency @ torch.ones(30, 1)).mean()


class Words(LightningModule):
    """An embedding whose gradient holds only the rows of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8, sparse=True)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return ((self.table(batch[0]).sum(1).mean(1) - batch[1]) ** 2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SparseAdam(list(self.parameters()), lr=0.05)

    def train_dataloader(self) -> DataLoader[Any]:
        words = torch.randint(50, (40, 3), generator=torch.Generator().manual_seed(0))
        return DataLoader(TensorDataset(words, words.float().mean(1)), 8)


@pytest.mark.parametrize(
    "make",
    [
        Lazy,
        Words,
        partial(Graph, torch.sparse_coo),
        partial(Graph, torch.sparse_csr),
        partial(Graph, torch.sparse_csc),
    ],
    ids=["lazy", "sparse gradient", "COO buffer", "CSR buffer", "CSC buffer"],
)
@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:Lazy:UserWarning")
def test_tensors_that_are_not_dense_and_made_are_measured(
    make: Callable[[], LightningModule], tmp_path: Path
) -> None:
    used = monitors()
    module = make()
    made = make_trainer(tmp_path, *used, log_every_n_steps=1)
    trainer = made[0]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, None if isinstance(module, Words) else points())
    assert trainer.global_step == 5
    assert [str(each.message) for each in caught if "switched off" in str(each.message)] == []
    (memory,) = [each for each in used if isinstance(each, MemoryMonitor)]
    assert memory.breakdown["weights"] > 0
    norms = [row["grad_norm"] for _, row in made[1].of("optimizer")]
    assert len(norms) == 5
    assert all(norm > 0 for norm in norms)


def test_the_norm_of_a_sparse_gradient_is_that_of_the_dense_one() -> None:
    norms = []
    for sparse in (True, False):
        table = nn.Embedding(5, 2, sparse=sparse)
        nn.init.ones_(table.weight)
        (table(torch.tensor([1, 1, 3])) ** 2).sum().backward()  # one row occurs twice
        norms.append(float(gradient_norm(torch.optim.SGD(table.parameters(), lr=1))))
    assert norms[0] == pytest.approx(norms[1])


@pytest.mark.filterwarnings("ignore:Sparse:UserWarning", "ignore:Lazy:UserWarning")
def test_sizes_of_sparse_and_lazy_tensors_are_those_of_what_they_hold() -> None:
    coo = torch.eye(30).to_sparse()
    assert size_gib([coo]) * 1024**3 == 30 * 2 * 8 + 30 * 4  # indices int64, values float32
    assert size_gib([coo.to_sparse_csr()]) * 1024**3 == (31 + 30) * 8 + 30 * 4
    assert dense_parts(nn.LazyLinear(3).weight) == []


class Breaks(Monitor):
    """A monitor that fails at its second step, and writes down what it measured."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.shared: list[Any] = []

    @never_ends_the_run
    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 1 and trainer.global_rank == trainer.world_size - 1:
            raise ZeroDivisionError("in the monitor")
        self.steps.append(trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        self.shared.append(self.gather_from_ranks(trainer.global_rank))


def test_a_monitor_that_fails_gives_one_warning_and_measures_nothing_more(tmp_path: Path) -> None:
    monitor = Breaks()
    trainer, _ = make_trainer(tmp_path, monitor)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(Regression(), points())
    (told,) = [str(each.message) for each in caught if "Breaks" in str(each.message)]
    assert told == ("Breaks is switched off, the run goes on (ZeroDivisionError: in the monitor).")
    assert trainer.global_step == 5
    assert monitor.steps == [0]


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(
    "hook",
    [
        "on_train_start",
        "on_train_batch_start",
        "on_train_batch_end",
        "on_before_optimizer_step",
        "on_train_epoch_end",
    ],
)
def test_whatever_fails_in_our_monitors_the_run_goes_on(
    hook: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the monitors read by fails from one of the hooks on."""
    used = monitors()

    def sabotage(*_: Any, **__: Any) -> None:
        for monitor in used:
            for name in ("clock", "_read", "_read_host", "wait_for_device"):
                if hasattr(monitor, name):
                    monkeypatch.setattr(monitor, name, None)

    saboteur = Callback()
    monkeypatch.setattr(saboteur, hook, sabotage)
    trainer, _ = make_trainer(tmp_path, saboteur, *used, log_every_n_steps=1, max_epochs=2)
    trainer.fit(Regression(), points())
    assert trainer.global_step == 10


def two_rank_run(folder: Path) -> None:
    """The monitor of rank 1 alone fails."""
    monitor = Breaks()
    trainer, _ = make_trainer(
        folder, monitor, *monitors(), accelerator="cpu", devices=2, strategy="ddp_fork"
    )

    class Report(Callback):
        def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
            (folder / f"{trainer.global_rank}.json").write_text(json.dumps(monitor.shared))

    trainer.callbacks.append(Report())  # type: ignore[attr-defined]
    trainer.fit(Regression(), points())


@pytest.mark.nightly
def test_a_monitor_that_fails_on_one_rank_holds_up_no_other(tmp_path: Path) -> None:
    in_a_fork(two_rank_run, tmp_path)
    for rank in (0, 1):
        shared = json.loads((tmp_path / f"{rank}.json").read_text())
        assert shared == [[0, 1], None, None]


def empty_result() -> RunResult:
    facts = Summary("r", True, "cpu", "32-true", 1, parameters=5, epochs=1, steps=5, fit_seconds=1)
    return RunResult(facts, config="")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_what_the_monitors_measured_is_in_the_runs_result(tmp_path: Path) -> None:
    used = monitors()
    trainer, _ = make_trainer(tmp_path, *used)
    trainer.fit(Regression(), points())
    result = empty_result()
    for monitor in used:
        if isinstance(monitor, AddsFacts):
            monitor.add_facts(trainer, result)
    (throughput,) = [each for each in used if isinstance(each, ThroughputMonitor)]
    assert throughput.summary().items() <= result.summary.metrics.items()
    assert result.summary.metrics["throughput/samples_per_sec"] > 0
    assert result.summary.advice == throughput.advice(trainer, throughput.summary())
    (memory,) = [each for each in used if isinstance(each, MemoryMonitor)]
    assert memory.peaks.items() <= result.summary.metrics.items()
    assert result.summary.metrics["memory/peak_rss_gib"] > 0
    assert result.breakdown == memory.breakdown
    assert result.breakdown["weights"] == 5 * 4 / 1024**3
    memory.leaks = {"host": "it leaks"}
    memory.add_facts(trainer, result)
    assert result.leaks == ["it leaks"]


SCRIPT = """
import sys
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
import unbroken.monitors
# The tests' own helpers import it.
assert "unbroken.cli.cli" not in sys.modules
from tests.test_monitors import Regression, monitors, points

trainer = Trainer(
    accelerator="cpu",
    max_epochs=2,
    log_every_n_steps=1,
    logger=CSVLogger(sys.argv[1]),
    callbacks=monitors(),
    enable_progress_bar=False,
    enable_checkpointing=False,
)
trainer.fit(Regression(), points())
assert "numerals.fit" not in sys.modules
"""


@pytest.mark.nightly
def test_monitors_work_in_a_plain_script_without_our_command_line(tmp_path: Path) -> None:
    words = [sys.executable, "-W", "ignore", "-c", SCRIPT, str(tmp_path)]
    done = complete(words, fresh=True)
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.rglob("metrics.csv")
    names = {name for row in read(file) for name in row}
    assert names
    assert "throughput/samples_per_sec" in names
    assert "memory/rss_gib" in names
    assert {"optimizer/lr", "optimizer/grad_norm"} <= names
