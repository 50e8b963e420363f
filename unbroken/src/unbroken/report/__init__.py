"""The run report, ``report.html``: one file with charts, images and styles, no script, and no
address outside it.
"""

import time
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from unbroken.report.samples import Sample, first_samples
from unbroken.results.run_result import RunResult
from unbroken.storage.files import write_atomically

# Seconds for the report of a stopped run, which has ten for everything
PATIENCE = 4.0


class Report(Callback):
    """Writes ``report.html`` into a folder when a run has ended or was stopped.

    It is drawn in the main thread: a thread that is left behind inside matplotlib would abort the
    process as it ends.

    Args:
        folder: The run's folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        # Of the first batch, as the network gets them; empty where batches are no images
        self.samples: list[Sample] = []
        self._has_looked = False

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if not self._has_looked and trainer.is_global_zero:
            self._has_looked = True
            self.samples = first_samples(batch)

    def leave(self, trainer: Trainer, result: RunResult) -> None:
        """Write the page; where that fails it is a warning."""
        deadline = time.monotonic() + PATIENCE if result.stopped_by else None
        try:
            # matplotlib takes half a second to import.
            from unbroken.report.page import render

            write_atomically(render(result, deadline, self.samples), self.folder / "report.html")
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            rank_zero_warn(f"report.html could not be written ({reason}). The run is safe.")
