"""TensorBoard: event files in the run's folder, each value once, also after a resume."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lightning.pytorch import Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from unbroken.loggers.followers import Row, WholeRows
from unbroken.results.run_result import RunResult
from unbroken.run_folder import RunFolder

FOLDER = "tensorboard"


class TensorBoardRunLogger(TensorBoardLogger):
    """Lightning's logger, whose files lie in the run's folder.

    A resumed run writes a further file. Its first entry says from which step on TensorBoard leaves
    out what stands in the earlier ones.
    """

    def __init__(self, run: RunFolder) -> None:
        # Lightning would log a value of its own, hp_metric, which nobody asked for.
        super().__init__(run.folder, name=FOLDER, version="", default_hp_metric=False)
        self._rows = WholeRows(self._write)
        self._goes_on = any(Path(self.log_dir).glob("events.*"))

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        self._rows.add(metrics, step)

    def _write(self, step: int, row: Row) -> None:
        super().log_metrics(row, step)

    @rank_zero_only
    def finalize(self, status: str) -> None:
        """Called by Lightning when training or a test has ended, or failed."""
        if status != "success":
            self._rows.flush()
        super().finalize(status)

    def leave(self, trainer: Trainer, result: RunResult) -> None:
        """Write the last row."""
        self._rows.flush()
        super().finalize("success")

    @rank_zero_only
    def go_on_after(self, rows: Sequence[Row]) -> None:
        """Let the earlier files end before the last of these rows, which may still grow."""
        if not self._goes_on:
            return
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        last: Row = rows[-1] if rows else {"step": 0}
        step = last["step"]
        start = SessionLog(status=SessionLog.START)
        self.experiment.file_writer.add_event(Event(step=step, session_log=start))
        self._rows.add(last, step)
