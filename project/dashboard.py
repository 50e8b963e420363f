"""Build a saved W&B workspace for this project's runs: Training, Throughput, Memory, Mistakes.

python -m project.dashboard --entity ME --project mnist-lightning
python -m project.dashboard --print      # what would be saved; needs no login and no network

Saving needs a W&B login; both need the extra ``dashboard``. The panels are those of report.html and dashboard.yaml.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import yaml

from project.engine.command import CommandParser, run
from project.errors import UserError
from project.loggers import PANELS, STEP, wandb_state


def main(argv: list[str]) -> int:
    """Save or print the workspace that ``argv`` names."""
    parser = CommandParser("project.dashboard", __doc__)
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
    for option in () if options.print else ("entity", "project", "name"):
        if not (getattr(options, option) or "").strip():
            raise UserError(
                f"--{option} must be given, to save a workspace. To look at it: --print."
            )
    if not (options.print or wandb_state().logged_in):
        raise UserError(
            "no W&B API key is configured. Run wandb login, or look at the workspace with --print."
        )
    workspace = build_workspace(
        options.entity or "ENTITY", options.project or "PROJECT", options.name
    )
    if options.print:  # what is set, without W&B's own notes
        plain = dataclasses.asdict(
            workspace,
            dict_factory=lambda pairs: {k: v for k, v in pairs if v is not None and k[0] != "_"},
        )
        print(json.dumps(plain, indent=2, default=str))
        return 0
    try:
        print(workspace.save().url)
    except Exception as error:
        said = f"W&B did not save the workspace ({' '.join(str(error).split())[:300]})."
        where = f"--entity {options.entity} --project {options.project}"
        raise UserError(f"{where}: {said} Check both names, the login and the network.") from None
    return 0


def build_workspace(entity: str, project: str, name: str) -> Any:
    """The workspace; nothing is sent. A UserError where the extra ``dashboard`` is not installed."""
    try:
        import wandb_workspaces.reports.v2 as wr
        import wandb_workspaces.workspaces as ws
    except ImportError:
        raise UserError(
            "the dashboard needs wandb-workspaces. Run pip install 'wandb-workspaces>=0.4.2'."
        ) from None
    sections = []
    for section, shows in yaml.safe_load(
        Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    ).items():
        panels: list[Any] = []
        for panel in PANELS:
            if panel.section == section:
                title = f"{panel.title} ({panel.unit})" if panel.unit else panel.title
                panels.append(wr.LinePlot(title=title, x=STEP, y=list(panel.lines)))
        for title, metric in shows.get("bars", {}).items():
            panels.append(wr.BarPlot(title=title, metrics=[wr.SummaryMetric(metric)]))
        for each in shows.get("charts", []):
            query = {"summaryTable": {"tableKey": each["table"]}}
            panels.append(
                wr.CustomChart(query=query, chart_name=each["chart"], chart_fields=each["fields"])
            )
        panels += [wr.WeavePanelSummaryTable(table_name=table) for table in shows.get("tables", [])]
        panels += [
            wr.MediaBrowser(title=title, media_keys=[key])
            for title, key in shows.get("media", {}).items()
        ]
        sections.append(ws.Section(name=section, panels=panels, is_open=True))
    settings = ws.WorkspaceSettings(x_axis=STEP)
    try:
        return ws.Workspace(
            entity=entity, project=project, name=name, sections=sections, settings=settings
        )
    except ValueError as error:  # of pydantic
        raise UserError(f"--entity, --project or --name is refused by W&B: {error}") from None


if __name__ == "__main__":
    run(main)
