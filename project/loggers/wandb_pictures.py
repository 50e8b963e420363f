"""The run report's pictures and tables as W&B's own, so that runs can be compared by them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.fabric.loggers.logger import _DummyExperiment

from project.loggers.wandb import WandbRunLogger
from project.report.record import RunRecord

MOST_CLASSES = 50  # in a confusion matrix, whose table has a row per cell


def log_results(logger: WandbRunLogger, record: RunRecord, folder: Path) -> None:
    """Add the test's pictures, the summary's facts and, online, best.ckpt to a W&B run.

    Keys: ``test/confusion_matrix``, ``test/class_accuracy``, ``test/mistakes``, ``memory/breakdown``, ``report``.
    """
    logger.send()
    run = logger.wait()
    if isinstance(run, _DummyExperiment):
        return  # W&B could not start, which was said
    with staged_in(folder / "wandb"):
        log_record(logger, run, record, folder)


@contextmanager
def staged_in(folder: Path) -> Iterator[None]:
    """Let W&B copy what it is to upload into ``folder``; its default is the home folder."""
    if os.environ.get("WANDB_DATA_DIR"):  # the user's own choice
        yield
        return
    os.environ["WANDB_DATA_DIR"] = str(folder)
    try:
        yield
    finally:  # this is one run's folder: not for later runs of this process, nor for its children
        os.environ.pop("WANDB_DATA_DIR", None)


def log_record(logger: WandbRunLogger, run: Any, record: RunRecord, folder: Path) -> None:
    """See :func:`log_results`, for a W&B run that has started."""
    import wandb

    pictures: dict[str, Any] = {"report": wandb.Html(str(folder / "report.html"), inject=False)}
    if record.confusion is not None:
        pictures |= test_pictures(record)
    if record.breakdown:
        parts = wandb.Table(columns=["use", "GiB"], data=[list(part) for part in record.breakdown.items()])
        pictures["memory/breakdown"] = wandb.plot.bar(parts, "use", "GiB", title="Memory by use")
    run.log(pictures)
    # what was logged over time has its summary already: the last value, or the best
    run.summary.update({key: value for key, value in record.facts.items() if key not in logger.metric_names})
    best = folder / "best.ckpt"
    if not logger.offline and record.stopped_by is None and best.exists():
        facts = {key: value for key, value in record.facts.items() if isinstance(value, (int, float, str))}
        artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata=facts)
        artifact.add_file(str(best))
        run.log_artifact(artifact, aliases=["best"])


def test_pictures(record: RunRecord) -> dict[str, Any]:
    """Confusion matrix, accuracy per class and the most confident mistakes, as W&B charts and a table of images."""
    import wandb

    assert record.confusion is not None
    names = record.names
    classes = wandb.Table(
        columns=["class", "accuracy", "samples"], data=[[name, right, n] for name, right, n in record.class_accuracy]
    )
    mistakes = wandb.Table(
        columns=["image", "label", "prediction", "probability"],
        data=[
            [wandb.Image(m.image.squeeze()), names[m.label], names[m.prediction], m.probability]
            for m in record.mistakes
        ],
    )
    pictures: dict[str, Any] = {
        "test/class_accuracy": wandb.plot.bar(classes, "class", "accuracy", title="Accuracy per class"),
        "test/mistakes": mistakes,
    }
    if len(names) <= MOST_CLASSES:
        cells = wandb.Table(
            columns=["Actual", "Predicted", "nPredictions"],
            data=[[y, p, int(record.confusion[i, j])] for i, y in enumerate(names) for j, p in enumerate(names)],
        )
        pictures["test/confusion_matrix"] = wandb.plot_table(
            vega_spec_name="wandb/confusion_matrix/v1",
            data_table=cells,
            fields={name: name for name in ("Actual", "Predicted", "nPredictions")},
            string_fields={"title": "Confusion matrix"},
        )
    return pictures
