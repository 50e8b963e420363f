"""What a run records of itself: in its folder, and in each of its checkpoints beside what a resume
needs.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from unbroken import contract
from unbroken.cli.plain_values import dump_yaml
from unbroken.errors import printable
from unbroken.parts.metrics import logged_since
from unbroken.results.facts import command_line, versions
from unbroken.results.run_result import RunResult
from unbroken.run.uncommitted import UNCOMMITTED, write_uncommitted
from unbroken.run_folder import RUN_ID, point_latest_at
from unbroken.stopping.ranks import say
from unbroken.storage.contents import RUN_KEY, record_in
from unbroken.storage.files import write_atomically
from unbroken.tables import flat

# What an earlier run of this name may have left that saved nothing, or this run at a shorter end
SUMMARY = "summary.json"
OF_AN_END = (SUMMARY, "report.html", "digests.csv")


class RunRecord(Callback):
    """Writes down what a run is: its name, its configuration, the code that it is made by.

    - When training starts: ``config.yaml``, ``uncommitted.diff`` and the link ``latest``, on rank
      zero.
      Not earlier: a run that cannot start changes nothing of older ones.
      ``config.yaml`` says of each setting that was changed at a resume from which step on.
    - In each checkpoint, under ``run``: name, id, configuration and its changes, versions, data,
      precision, and what was logged since the newest validation began, if no step was trained
      after it.

    It stands before the callback that saves checkpoints in the list of callbacks.

    Args:
        folder: The run's folder.
        run_id: Belongs to the folder, and tells its checkpoints from those of another run.
        config: Every setting as a plain value.
        code: The folder of the package that trains.
        changes: A line for each setting that differs from the checkpoint's, where this is a resume.
    """

    # No hook of this puts other weights in for a validation.
    validates_trained_weights = True

    def __init__(
        self,
        folder: Path,
        run_id: str,
        config: dict[str, Any],
        code: Path,
        changes: Sequence[str] = (),
    ) -> None:
        self.folder = folder
        self.changes = changes
        self.code = code
        self.config = config
        self.facts: dict[str, Any] = {
            "run_name": folder.name,
            "run_id": run_id,
            "config": config,
            # A line for each setting that was changed at a resume
            "resumed_with": [],
            "versions": versions(),
        }
        self.deleted_in: int | None = None  # the epoch in which the folder was deleted
        self._resumes = False
        self._has_written = False  # config.yaml
        self._notes: list[str] = []
        # The step of the newest validation, and the latest values as it began
        self._validation: tuple[int | None, dict[str, Any]] = (None, {})

    def on_save_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        self._make_again(trainer)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        checkpoint.setdefault(RUN_KEY, {}).update(
            self.facts,
            epoch=trainer.current_epoch,
            global_step=trainer.global_step,
            metrics=self._metrics_of_weights(trainer),
            data_source=data.data_source if isinstance(data, contract.NamesSource) else None,
            data=data.description() if contract.describes_data(data) else {},
            precision=trainer.precision,
            world_size=trainer.world_size,
        )

    def _metrics_of_weights(self, trainer: Trainer) -> dict[str, float]:
        """What was logged since the validation of the present weights began; nothing where a step
        was trained after it.
        """
        step, before = self._validation
        if step != trainer.global_step:
            return {}
        return {name: float(value) for name, value in logged_since(before, trainer).items()}

    def on_load_checkpoint(
        self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]
    ) -> None:
        if trainer.state.fn != "fit":
            return
        self._resumes = True
        saved = record_in(checkpoint)
        step = checkpoint["global_step"]
        earlier = [printable(str(each)) for each in saved.get("resumed_with", [])]
        new = [f"step {step}: {change}" for change in self.changes]
        self.facts["resumed_with"] = [*earlier, *new]
        before = flat(saved.get("config", {})).get("model.optimizer")
        now = flat(self.config).get("model.optimizer")
        if before != now:
            self._notes.append(f"optimizer {before} → {now}: its state starts anew.")
            checkpoint["optimizer_states"] = []
            forget_groups(saved.get("state"))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        say(*self._notes)
        if not trainer.is_global_zero:
            return
        point_latest_at(self.folder)
        is_new = not self._resumes and trainer.global_step == 0
        if is_new:
            # Of a start that was killed before its first save
            (self.folder / UNCOMMITTED).unlink(missing_ok=True)
        self._write_config()
        self._has_written = True
        # A summary is that of a run that has ended. This one has more to do: it was made longer.
        if is_new or (self.folder / SUMMARY).exists():
            for name in OF_AN_END:
                (self.folder / name).unlink(missing_ok=True)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._make_again(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._make_again(trainer)
        self._validation = (trainer.global_step, dict(trainer.callback_metrics))

    def add_facts(self, trainer: Trainer, result: RunResult) -> None:
        """Note which settings resumes have changed, and that the folder was deleted."""
        result.summary.resumed_with = self.facts["resumed_with"] or None
        if self.deleted_in is not None:
            result.summary.notes.append(_deleted(self.deleted_in))

    def _make_again(self, trainer: Trainer) -> None:
        """Make the folder again if somebody deleted it. A checkpoint alone would be half a run."""
        has_begun = trainer.state.fn == "fit" and not trainer.sanity_checking
        if not (trainer.is_global_zero and has_begun) or not self._is_deleted():
            return
        self.deleted_in = trainer.current_epoch
        say(_deleted(self.deleted_in))
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(f"{self.facts['run_id']}\n", self.folder / RUN_ID)
        self._write_config()
        point_latest_at(self.folder)

    def _write_config(self) -> None:
        write_config(self.folder, self.config, self.code, self.facts["resumed_with"])

    def _is_deleted(self) -> bool:
        """Whether the folder is gone, or was made again by a logger that had something to save."""
        if not self.folder.exists():
            return True
        return self._has_written and not (self.folder / "config.yaml").exists()


def forget_groups(state: dict[str, Any] | None) -> None:
    """Forget what the optimizer of a checkpoint started with: its rates are not compared.

    A run that ended inside an epoch has two states.
    """
    if state is None:
        return
    if state.get("start"):
        state["start"] |= {"groups": [], "optimizers": []}
    forget_groups((state.get("inside_epoch") or {}).get("state"))


def _deleted(epoch: int) -> str:
    lost = "what metrics.csv held before is lost"
    return f"the run's folder was deleted in epoch {epoch + 1}, and made again: {lost}."


def write_config(
    folder: Path, config: dict[str, Any], code: Path, resumed_with: Sequence[str] = ()
) -> None:
    """Write the configuration, whose ``--config`` repeats the run, and how the code differs from
    its commit.

    Args:
        folder: The run's folder.
        config: Every setting as a plain value.
        code: The folder of the package that trains.
        resumed_with: A line for each setting that was changed at a resume, such as
            ``step 20: model.lr: 0.1 → 0.02``.
    """
    comments = "".join(f"# {line}\n" for line in [command_line(), *resumed_with])
    write_atomically(f"{comments}{dump_yaml(config)}", folder / "config.yaml")
    write_uncommitted(folder, code)
