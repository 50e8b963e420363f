"""How runs would log to W&B, by the environment alone: no network, no import of wandb or Lightning."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlparse


@dataclass(frozen=True)
class WandbState:
    """How ``fit`` would log to W&B."""

    mode: str  # online, offline, disabled, or refused: WANDB_MODE wants online runs and there is no API key
    logged_in: bool
    text: str  # the same for a person


def has_wandb_key() -> bool:
    """Whether a W&B API key is configured."""
    return wandb_mode(os.environ).logged_in


def wandb_mode(environ: Mapping[str, str]) -> WandbState:
    """Online where an API key is configured, else offline; ``WANDB_MODE`` and ``WANDB_DISABLED`` win."""
    logged_in = "WANDB_API_KEY" if environ.get("WANDB_API_KEY") else _wandb_netrc(environ)
    mode = environ.get("WANDB_MODE", "").lower()
    if mode == "disabled" or environ.get("WANDB_DISABLED", "").lower() in ("true", "1"):
        mode = "disabled"
    elif mode in ("online", "run") and not logged_in:
        mode = "refused"
    else:
        mode = "offline" if mode in ("offline", "dryrun") or not logged_in else "online"
    login = f"logged in ({logged_in})" if logged_in else "not logged in (wandb login)"
    then = {
        "online": "runs go online",
        "offline": "runs are kept offline, for wandb sync",
        "disabled": "switched off",
        "refused": "but WANDB_MODE wants online runs, fit will refuse",
    }
    return WandbState(mode, bool(logged_in), f"{login}: {then[mode]}")


def _wandb_netrc(environ: Mapping[str, str]) -> str | None:
    path = environ.get("NETRC", str(Path.home() / ".netrc"))
    try:
        hosts = netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError):
        return None
    own_server = urlparse(environ.get("WANDB_BASE_URL", "")).hostname
    return path if any(host == own_server or "wandb" in host for host in hosts) else None
