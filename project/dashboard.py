"""Build a saved W&B workspace for this project's runs: Training, Throughput, Memory, Mistakes.

python -m project.dashboard --entity ME --project mnist-lightning
python -m project.dashboard --entity ME --project mnist-lightning --print

Needs a W&B login and the optional extra ``dashboard`` (wandb-workspaces); ``--print`` needs no login and no network.
"""

from __future__ import annotations

import argparse
import json
from typing import Any, NoReturn

from project.errors import UserError
from project.loggers.panels import PANELS

STEP = "trainer/global_step"
# Section → panels: title → metrics. BARS, CHARTS, TABLES and MEDIA name what a run logs at its end.
LINES: dict[str, dict[str, list[str]]] = {
    section: {
        f"{panel.title} ({panel.unit})" if panel.unit else panel.title: list(panel.lines)
        for panel in PANELS
        if panel.section == section
    }
    for section in ("Training", "Throughput", "Memory", "Mistakes")
}
BARS: dict[str, dict[str, str]] = {
    "Training": {"Best validation accuracy": "val/accuracy.max", "Test accuracy": "test/accuracy"},
    "Memory": {"Peak host memory (GiB)": "memory/peak_rss_gib"},
}
# Section → (table that a run logs, chart of W&B's that shows it, the chart's fields → the table's columns)
CHARTS: dict[str, list[tuple[str, str, dict[str, str]]]] = {
    "Memory": [("memory/breakdown_table", "wandb/bar/v0", {"label": "use", "value": "GiB"})],
    "Mistakes": [
        (
            "test/confusion_matrix_table",
            "wandb/confusion_matrix/v1",
            {"Actual": "Actual", "Predicted": "Predicted", "nPredictions": "nPredictions"},
        ),
        ("test/class_accuracy_table", "wandb/bar/v0", {"label": "class", "value": "accuracy"}),
    ],
}
TABLES: dict[str, list[str]] = {"Mistakes": ["test/mistakes"]}
MEDIA: dict[str, dict[str, str]] = {"Mistakes": {"Run report": "report"}}


class OneLineParser(argparse.ArgumentParser):
    """argparse, its errors as a :class:`UserError`."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message + ". See python -m project.dashboard --help.")


def main(argv: list[str]) -> int:
    """Save or print the workspace that ``argv`` names."""
    parser = OneLineParser(
        prog="python -m project.dashboard", description="Build a saved W&B workspace.", allow_abbrev=False
    )
    parser.add_argument("--entity", required=True, help="W&B user or team")
    parser.add_argument("--project", required=True, help="W&B project of the runs")
    parser.add_argument("--name", default="Training, throughput, memory, mistakes", help="what the workspace is called")
    parser.add_argument("--print", action="store_true", help="print the specification as JSON and save nothing")
    options = parser.parse_args(argv)
    for option in ("entity", "project", "name"):
        if not getattr(options, option).strip():
            raise UserError(f"--{option} must not be empty.")
    if not options.print:
        require_login()
    workspace = build_workspace(options.entity, options.project, options.name)
    if options.print:
        print(json.dumps(specification(workspace), indent=2))
        return 0
    print(save(workspace))
    return 0


def require_login() -> None:
    """Check for a W&B API key, without a network.

    Raises:
        UserError: There is none.
    """
    from project.loggers.wandb import has_wandb_key

    if not has_wandb_key():
        raise UserError(
            "saving a workspace needs a W&B login, and no API key is configured. Run wandb login, or see what would be "
            "saved with --print."
        )


def build_workspace(entity: str, project: str, name: str) -> Any:
    """The workspace; nothing is sent.

    Raises:
        UserError: The extra ``dashboard`` is not installed.
    """
    try:
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
    except ImportError:
        raise UserError(
            "python -m project.dashboard needs wandb-workspaces. Install it: pip install 'wandb-workspaces>=0.1.12'."
        ) from None
    sections = []
    for section, lines in LINES.items():
        panels: list[Any] = [wr.LinePlot(title=title, x=STEP, y=list(metrics)) for title, metrics in lines.items()]
        panels += [
            wr.BarPlot(title=title, metrics=[wr.SummaryMetric(metric)])
            for title, metric in BARS.get(section, {}).items()
        ]
        panels += [
            wr.CustomChart(query={"summaryTable": {"tableKey": table}}, chart_name=chart, chart_fields=fields)
            for table, chart, fields in CHARTS.get(section, [])
        ]
        panels += [wr.WeavePanelSummaryTable(table_name=table) for table in TABLES.get(section, [])]
        panels += [wr.MediaBrowser(title=title, media_keys=[key]) for title, key in MEDIA.get(section, {}).items()]
        sections.append(ws.Section(name=section, panels=panels, is_open=True))
    return ws.Workspace(
        entity=entity, project=project, name=name, sections=sections, settings=ws.WorkspaceSettings(x_axis=STEP)
    )


def specification(workspace: Any) -> dict[str, Any]:
    """What would be sent to W&B, as plain values."""
    spec: dict[str, Any] = json.loads(workspace._to_model().model_dump_json(by_alias=True, exclude_none=True))
    return spec


def save(workspace: Any) -> str:
    """Save the workspace; returns its address.

    Raises:
        UserError: W&B refuses it or cannot be reached.
    """
    try:
        return str(workspace.save().url)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"--entity {workspace.entity} --project {workspace.project}: W&B did not save the workspace ({reason}). "
            "Check both names, the login and the network."
        ) from None


if __name__ == "__main__":
    from project.engine.command import run

    run(main)
