"""Whether W&B has an account here, and how a run would log to it. Standard library only, so that asking is quick."""

from __future__ import annotations

import netrc
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlparse

Mode = Literal["online", "offline", "disabled", "refused"]
MEANINGS: dict[Mode, str] = {
    "online": "runs go online",
    "offline": "runs are kept offline, for wandb sync",
    "disabled": "switched off",
    "refused": "but WANDB_MODE wants online runs, fit will refuse",
}


@dataclass(frozen=True)
class WandbState:
    """How runs are logged to W&B."""

    mode: Mode
    logged_in: bool
    text: str  # for a person, without the key


def wandb_mode(environ: Mapping[str, str]) -> WandbState:
    """What ``WANDB_MODE`` and the like ask for; without them online with a key (variable or netrc), else offline."""
    key_from = "WANDB_API_KEY" if environ.get("WANDB_API_KEY") else _netrc_with_key(environ)
    asked = environ.get("WANDB_MODE", "").lower()
    mode: Mode = "offline" if asked in ("offline", "dryrun") or not key_from else "online"
    if asked == "disabled" or environ.get("WANDB_DISABLED", "").lower() in ("true", "1"):
        mode = "disabled"
    elif asked in ("online", "run") and not key_from:
        mode = "refused"
    login = f"logged in ({key_from})" if key_from else "not logged in (wandb login)"
    return WandbState(mode, key_from is not None, f"{login}: {MEANINGS[mode]}")


def _netrc_with_key(environ: Mapping[str, str]) -> str | None:
    path = environ.get("NETRC") or os.path.expanduser("~/.netrc")
    try:
        hosts = netrc.netrc(path).hosts
    except (OSError, netrc.NetrcParseError):
        return None
    own_server = urlparse(environ.get("WANDB_BASE_URL", "")).hostname
    return path if any(host == own_server or "wandb" in host for host in hosts) else None
