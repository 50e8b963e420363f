"""The run report's pictures and tables as W&B's own, so that runs can be compared by them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import wandb

from project.engine.summary import RunRecord

MOST_CLASSES = 50  # in a confusion matrix, whose table has a row per cell


def log_record(run: Any, record: RunRecord, folder: Path) -> None:
    """Add the test's pictures, the summary's facts and, of a finished run, best.ckpt to a W&B run.

    Keys: ``test/confusion_matrix``, ``test/class_accuracy``, ``test/mistakes``, ``memory/breakdown``, ``report``.

    Args:
        run: The W&B run.
        record: What the report shows.
        folder: The run's folder, with ``best.ckpt`` and ``report.html`` where they exist.
    """
    pictures: dict[str, Any] = {}
    if (folder / "report.html").exists():
        pictures["report"] = wandb.Html(str(folder / "report.html"), inject=False)
    if record.confusion is not None:
        pictures |= test_pictures(record)
    if record.breakdown:
        parts = wandb.Table(columns=["use", "GiB"], data=[list(part) for part in record.breakdown.items()])
        pictures["memory/breakdown"] = wandb.plot.bar(parts, "use", "GiB", title="Memory by use")
    run.log(pictures)
    facts = record.summary.to_plain()
    # logged metrics have their last or best value there already
    run.summary.update({key: value for key, value in facts.items() if key not in record.series})
    best = folder / "best.ckpt"
    if record.stopped_by is None and best.exists():
        plain = {key: value for key, value in facts.items() if isinstance(value, (int, float, str))}
        artifact = wandb.Artifact(f"model-{run.id}", type="model", metadata=plain)
        artifact.add_file(str(best), policy="mutable")  # a copy: a resumed run writes another best.ckpt before a sync
        run.log_artifact(artifact, aliases=["best"])


def test_pictures(record: RunRecord) -> dict[str, Any]:
    """Confusion matrix, accuracy per class and the most confident mistakes, as W&B charts and a table of images."""
    assert record.confusion is not None
    names = record.names
    classes = wandb.Table(columns=["class", "accuracy", "samples"], data=[list(row) for row in record.class_accuracy])
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
        columns: list[str | int] = ["Actual", "Predicted", "nPredictions"]
        cells = [[y, p, int(record.confusion[i, j])] for i, y in enumerate(names) for j, p in enumerate(names)]
        pictures["test/confusion_matrix"] = wandb.plot_table(
            vega_spec_name="wandb/confusion_matrix/v1",
            data_table=wandb.Table(columns=columns, data=cells),
            fields={str(name): str(name) for name in columns},
            string_fields={"title": "Confusion matrix"},
        )
    return pictures
