"""Whether W&B has an account on this machine, and how a run would log to it."""

from __future__ import annotations

import contextlib
import netrc
import os
import typing
from urllib.parse import urlparse

# W&B's key of the optimizer step, which is the axis of every chart.
STEP = "trainer/global_step"

MEANINGS = {
    "online": "runs go online",
    "offline": "runs are kept offline, for wandb sync",
    "disabled": "switched off",
    "refused": "but WANDB_MODE wants online runs, fit will refuse",
}


class WandbState(typing.NamedTuple):
    """Whether W&B has an account here, and how a run would log to it."""

    mode: str  # online, offline, disabled, or refused: online without a key
    logged_in: bool
    text: str  # for a person, without the key


def wandb_state() -> WandbState:
    """What ``WANDB_MODE`` and the like ask for; without them online with a key (variable or netrc),
    else offline.
    """
    key_from = where_the_key_is()
    mode = run_mode(has_key=key_from is not None)
    login = "not logged in (wandb login)"
    if key_from is not None:
        login = f"logged in ({key_from})"
    return WandbState(mode, key_from is not None, f"{login}: {MEANINGS[mode]}")


def where_the_key_is() -> str | None:
    """The variable or the file that holds an API key; None where there is none."""
    if os.environ.get("WANDB_API_KEY"):
        return "WANDB_API_KEY"
    path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
    hosts: list[str] = []
    with contextlib.suppress(OSError, ValueError, netrc.NetrcParseError):
        hosts = list(netrc.netrc(path).hosts)
    own_server = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname
    has_key = any(host == own_server or "wandb" in host for host in hosts)
    return path if has_key else None


def run_mode(has_key: bool) -> str:
    """How a run logs, as W&B's variables ask for it: see :class:`WandbState`."""
    asked = os.environ.get("WANDB_MODE", "").lower()
    if asked == "disabled" or os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1"):
        return "disabled"
    if asked in ("online", "run") and not has_key:
        return "refused"
    if asked in ("offline", "dryrun") or not has_key:
        return "offline"
    return "online"
