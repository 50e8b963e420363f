from __future__ import annotations

from pathlib import Path

import pytest
from unbroken.loggers.wandb_account import wandb_state


@pytest.mark.parametrize(
    ("environ", "netrc", "mode", "logged_in"),
    [
        ({}, "", "offline", False),
        ({"WANDB_API_KEY": "x"}, "", "online", True),
        ({}, "machine api.wandb.ai login user password x", "online", True),
        ({}, "machine example.com login user password x", "offline", False),
        (
            {"WANDB_BASE_URL": "https://own.example.com"},
            "machine own.example.com login u password x",
            "online",
            True,
        ),
        ({}, "this is no netrc", "offline", False),
        ({"WANDB_API_KEY": "x"}, "machine e login ü password x", "online", True),  # not in UTF-8
        ({"WANDB_API_KEY": "x", "WANDB_MODE": "offline"}, "", "offline", True),
        ({"WANDB_MODE": "disabled"}, "", "disabled", False),
        ({"WANDB_MODE": "online"}, "", "refused", False),
    ],
)
def test_where_runs_go_follows_the_variables_and_the_login_and_no_key_is_shown(
    environ: dict[str, str],
    netrc: str,
    mode: str,
    logged_in: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "netrc").write_text(netrc, encoding="latin-1")
    (tmp_path / "netrc").chmod(0o600)
    monkeypatch.delenv("WANDB_MODE")
    for key, value in {"NETRC": str(tmp_path / "netrc"), **environ}.items():
        monkeypatch.setenv(key, value)
    state = wandb_state()
    assert (state.mode, state.logged_in) == (mode, logged_in)
    assert "password" not in state.text
