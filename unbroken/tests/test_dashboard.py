from __future__ import annotations

import json
import socket
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from unbroken.cli import start as entry
from unbroken.commands import dashboard
from unbroken.loggers.panels import PANELS

from tests.reported import of_type, reported_run, wandb_folders, wandb_records

pytest.importorskip("wandb_workspaces")
NAMES = ["--entity", "me", "--project", "mine"]


@pytest.fixture
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))


@pytest.mark.usefixtures("_no_network")
def test_print_shows_the_specification_without_login_or_network(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert entry.exit_code(partial(dashboard.main, "numerals"), [*NAMES, "--print"]) == 0
    workspace = json.loads(capsys.readouterr().out)
    assert (workspace["entity"], workspace["project"]) == ("me", "mine")
    assert [section["name"] for section in workspace["sections"]] == [
        "Training",
        "Throughput",
        "Memory",
        "Mistakes",
    ]
    for section in workspace["sections"]:
        lines = {panel["title"]: panel["y"] for panel in section["panels"] if "y" in panel}
        panels = [panel for panel in PANELS if panel.section == section["name"]]
        assert lines == {f"{p.title} ({p.unit})" if p.unit else p.title: [*p.lines] for p in panels}
    lines = [
        panel for section in workspace["sections"] for panel in section["panels"] if "y" in panel
    ]
    assert [panel["title"] for panel in lines[:2]] == ["Loss", "Accuracy (fraction)"]
    assert len(lines) == len(PANELS)
    assert {panel["x"] for panel in lines} == {"trainer/global_step"}


@pytest.mark.usefixtures("_no_network")
def test_print_asks_for_no_names(capsys: pytest.CaptureFixture[str]) -> None:
    assert entry.exit_code(partial(dashboard.main, "numerals"), ["--print"]) == 0
    assert json.loads(capsys.readouterr().out)["entity"] == "ENTITY"


def test_every_panel_shows_what_runs_log(capsys: pytest.CaptureFixture[str]) -> None:
    (folder,) = wandb_folders(reported_run())
    keys: set[str] = set()
    for item in of_type(wandb_records(folder), "history"):
        keys |= {
            name.split("._")[0].split(".path")[0] for name in item["item"]
        }  # media are dictionaries
    only_gpu = {"optimizer/loss_scale", "throughput/gpu_utilization_pct", "throughput/mfu_pct"}
    only_gpu |= {"memory/peak_reserved_gib", "memory/peak_allocated_gib", "memory/allocated_gib"}
    only_gpu |= {"memory/peak_reserved_pct"}
    assert entry.exit_code(partial(dashboard.main, "numerals"), ["--print"]) == 0
    panels = [
        panel
        for section in json.loads(capsys.readouterr().out)["sections"]
        for panel in section["panels"]
    ]
    shown = {metric for panel in panels for metric in panel.get("y", [])}
    tables = {
        panel["query"]["summaryTable"]["tableKey"] for panel in panels if "chart_name" in panel
    }
    tables |= {panel["table_name"] for panel in panels if "table_name" in panel}
    media = {key for panel in panels for key in panel.get("media_keys", [])}
    assert len(tables) == 4
    assert (shown - only_gpu) | tables <= keys
    assert media == {"report"}
    assert media <= keys
    assert {key for key in keys if key.startswith(("train/", "val/", "optimizer/"))} <= shown


@pytest.mark.usefixtures("_no_network")
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            NAMES,
            "error: no W&B API key is configured. Run wandb login, "
            "or look at the workspace with --print.",
        ),
        (["--entity", "me"], "error: --project must be given, to save a workspace."),
        (["--entity", "", "--project", "p"], "error: --entity must be given, to save a workspace."),
        ([*NAMES, "--pront"], "error: unknown option --pront. Did you mean --print?"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert entry.exit_code(partial(dashboard.main, "numerals"), arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(said)


def test_a_workspace_is_saved_and_its_address_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb_workspaces.workspaces as ws

    saved = []

    class Saved:
        url = "https://example.invalid/me/mine?nw=1"

    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(ws.Workspace, "save", lambda self: saved.append(self) or Saved())
    assert entry.exit_code(partial(dashboard.main, "numerals"), NAMES) == 0
    assert capsys.readouterr().out.strip() == Saved.url
    assert [workspace.entity for workspace in saved] == ["me"]


def test_a_refused_workspace_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import wandb_workspaces.workspaces as ws

    def refuse(_: Any) -> None:
        raise ConnectionError("permission\ndenied")

    monkeypatch.setenv("WANDB_API_KEY", "0" * 40)
    monkeypatch.setattr(ws.Workspace, "save", refuse)
    assert entry.exit_code(partial(dashboard.main, "numerals"), NAMES) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        "error: --entity me --project mine: W&B did not save the workspace (permission denied)."
    )
