"""The report as one HTML file: charts, images, styles inside it; no script, no address outside it."""

from __future__ import annotations

import base64
import io
from pathlib import Path

from project.engine.checkpoint_files import write_atomically
from project.report import charts
from project.report.record import RunRecord
from project.report.sections import chart_sections, headline, origin

MOST_PIXELS = 96  # of a mistake's longer side: 24 such colour images are about half a megabyte


def write_report(path: Path, record: RunRecord) -> None:
    """Write the report of a run, whole or not at all."""
    write_atomically(render(record).encode(), path)


def render(record: RunRecord) -> str:
    """The report's HTML."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    here = Path(__file__).parent
    environment = Environment(
        loader=FileSystemLoader(here), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    sections = {name: [(title, Markup(svg)) for title, svg in drawn] for name, drawn in chart_sections(record).items()}
    predictions = []
    most = charts.MOST_CLASS_ROWS
    per_class = "Accuracy per class" + (f", the {most} worst" if len(record.names) > most else "")
    if record.confusion is not None:
        predictions = [
            ("Confusion matrix", Markup(charts.confusion_matrix(record))),
            (per_class, Markup(charts.class_accuracy(record))),
        ]
    return environment.get_template("report.html.j2").render(
        record=record,
        facts=record.facts,
        status=status(record),
        tiles=headline(record),
        sections=sections,
        predictions=predictions,
        confusions=record.confusions[:8],
        mistakes=[(png(mistake.image), record.names[mistake.label], mistake) for mistake in record.mistakes],
        origin=origin(record.facts),
        style=Markup((here / "report.css").read_text()),
    )


def status(record: RunRecord) -> str:
    """How the run ended."""
    epochs = record.facts.get("epochs", 0)
    if record.stopped_by:
        of = f" of {record.max_epochs}" if record.max_epochs and record.max_epochs > 0 else ""
        where = f"step {record.facts.get('steps', 0):,}, {epochs}{of} epochs done"
        return f"stopped by {record.stopped_by} at {where}"
    return f"finished after {epochs} epoch{'s' if epochs != 1 else ''}"


def png(image: object) -> str:
    """An image, uint8 (height, width, channels), as a ``data:`` address."""
    import numpy as np
    from PIL import Image

    pixels = np.asarray(image)
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else np.ascontiguousarray(pixels[..., :3]))
    picture.thumbnail((MOST_PIXELS, MOST_PIXELS))
    file = io.BytesIO()
    picture.save(file, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
