"""Build a saved W&B workspace for this project's runs: Training, Throughput, Memory, Mistakes.

python -m NAME.dashboard --entity ME --project mine
python -m NAME.dashboard --print      # what would be saved; needs no login and no network

Saving needs a W&B login; both need the extra ``dashboard``. The panels are those of report.html and
dashboard.yaml.
"""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from unbroken.cli.parser import CommandParser
from unbroken.errors import UserError
from unbroken.loggers.panels import PANELS
from unbroken.loggers.wandb_account import STEP, wandb_state

SECTIONS_FILE = Path(__file__).with_suffix(".yaml")


def main(package: str, argv: list[str]) -> int:
    """Save or print the workspace that ``argv`` names."""
    parser = CommandParser(package, "dashboard", __doc__)
    parser.add_argument("--entity", help="W&B user or team")
    parser.add_argument("--project", help="W&B project of the runs")
    parser.add_argument(
        "--name",
        default="Training, throughput, memory, mistakes",
        help="what the workspace is called",
    )
    parser.add_argument(
        "--print", action="store_true", help="print the specification as JSON and save nothing"
    )
    options = parser.parse_args(argv)
    if not options.print:
        check_can_save(options)
    workspace = build_workspace(
        options.entity or "ENTITY", options.project or "PROJECT", options.name
    )
    if options.print:
        print(json.dumps(specification(workspace), indent=2, default=str))
    else:
        print(save(workspace, options))
    return 0


def check_can_save(options: argparse.Namespace) -> None:
    """A UserError where a workspace has no place to be saved in, or nobody is logged in."""
    for option in ("entity", "project", "name"):
        value = getattr(options, option) or ""
        if not value.strip():
            raise UserError(
                f"--{option} must be given, to save a workspace. To look at it: --print."
            )
    if not wandb_state().logged_in:
        raise UserError(
            "no W&B API key is configured. Run wandb login, or look at the workspace with --print."
        )


def specification(workspace: Any) -> dict[str, Any]:
    """What is set in a workspace, as plain values, without W&B's own notes."""

    def without_notes(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        return {name: value for name, value in pairs if value is not None and name[0] != "_"}

    return dataclasses.asdict(workspace, dict_factory=without_notes)


def save(workspace: Any, options: argparse.Namespace) -> str:
    """Save a workspace; returns its address. A UserError where W&B refuses."""
    try:
        return workspace.save().url
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"--entity {options.entity} --project {options.project}: "
            f"W&B did not save the workspace ({reason}). "
            "Check both names, the login and the network."
        ) from None


def build_workspace(entity: str, project: str, name: str) -> Any:
    """The workspace; nothing is sent. A UserError where the extra ``dashboard`` is not
    installed.
    """
    try:
        import wandb_workspaces.workspaces as ws
    except ImportError:
        raise UserError(
            "the dashboard needs wandb-workspaces. Run pip install 'wandb-workspaces>=0.4.2'."
        ) from None
    sections = []
    for section, shows in yaml.safe_load(SECTIONS_FILE.read_text(encoding="utf-8")).items():
        panels = build_panels(section, shows)
        sections.append(ws.Section(name=section, panels=panels, is_open=True))
    try:
        return ws.Workspace(
            entity=entity,
            project=project,
            name=name,
            sections=sections,
            settings=ws.WorkspaceSettings(x_axis=STEP),
        )
    except ValueError as error:  # pydantic raises it
        raise UserError(f"--entity, --project or --name is refused by W&B: {error}") from None


def build_panels(section: str, shows: Mapping[str, Any]) -> list[Any]:
    """A section's panels: the lines of its metrics, then what ``dashboard.yaml`` says that it
    ``shows`` besides.
    """
    import wandb_workspaces.reports.v2 as wr

    panels: list[Any] = []
    for panel in PANELS:
        if panel.section == section:
            title = f"{panel.title} ({panel.unit})" if panel.unit else panel.title
            panels.append(wr.LinePlot(title=title, x=STEP, y=list(panel.lines)))
    for title, metric in shows.get("bars", {}).items():
        panels.append(wr.BarPlot(title=title, metrics=[wr.SummaryMetric(metric)]))
    for chart in shows.get("charts", []):
        query = {"summaryTable": {"tableKey": chart["table"]}}
        panels.append(
            wr.CustomChart(query=query, chart_name=chart["chart"], chart_fields=chart["fields"])
        )
    tables = shows.get("tables", [])
    panels += [wr.WeavePanelSummaryTable(table_name=table) for table in tables]
    media = shows.get("media", {}).items()
    panels += [wr.MediaBrowser(title=title, media_keys=[key]) for title, key in media]
    return panels
