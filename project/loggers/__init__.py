"""Where metrics go, metrics.csv and W&B, and which of them share a chart in ``report.html`` and the W&B dashboard."""

import contextlib  # feature: wandb
import netrc  # feature: wandb
import os  # feature: wandb
import typing  # feature: wandb
from dataclasses import dataclass  # feature: report, dashboard
from pathlib import Path  # feature: report, dashboard
from typing import Literal  # feature: report, dashboard
from urllib.parse import urlparse  # feature: wandb

import yaml  # feature: report, dashboard

STEP = "trainer/global_step"  # W&B's key of the optimizer step, the axis of every chart  # feature: wandb


# feature: report, dashboard
@dataclass(frozen=True)
class Panel:
    """A chart of metrics over optimizer steps. It is left out where none of them was logged."""

    section: str
    title: str
    lines: dict[str, str]  # metric → label
    unit: str = ""
    axis: Literal["from zero", "fitting", "log"] = (
        "from zero"  # vertical; log only where values span a factor of ten
    )
    in_report: bool = True  # False: one run shows it elsewhere, but runs are compared by it


PARTS = {
    "train": "train",
    "val": "validation",
    "test": "test",
}  # first word of a metric's name → label
PANELS = [
    Panel(**each)
    for each in yaml.safe_load(Path(__file__).with_name("panels.yaml").read_text(encoding="utf-8"))
]
# end feature: report, dashboard


# feature: wandb
MEANINGS = {
    "online": "runs go online",
    "offline": "runs are kept offline, for wandb sync",
    "disabled": "switched off",
}
MEANINGS["refused"] = "but WANDB_MODE wants online runs, fit will refuse"


class WandbState(typing.NamedTuple):
    """Whether W&B has an account here, and how a run would log to it."""

    mode: str  # online, offline, disabled, or refused: online without a key
    logged_in: bool
    text: str  # for a person, without the key


def wandb_state() -> WandbState:
    """What ``WANDB_MODE`` and the like ask for; without them online with a key (variable or netrc), else offline."""
    path, hosts = os.environ.get("NETRC") or os.path.expanduser("~/.netrc"), list[str]()
    with contextlib.suppress(OSError, ValueError, netrc.NetrcParseError):
        hosts = [*netrc.netrc(path).hosts]
    own_server = urlparse(os.environ.get("WANDB_BASE_URL", "")).hostname
    has_key = any(host == own_server or "wandb" in host for host in hosts)
    key_from = "WANDB_API_KEY" if os.environ.get("WANDB_API_KEY") else path if has_key else None
    asked = os.environ.get("WANDB_MODE", "").lower()
    mode = "offline" if asked in ("offline", "dryrun") or not key_from else "online"
    if asked == "disabled" or os.environ.get("WANDB_DISABLED", "").lower() in ("true", "1"):
        mode = "disabled"
    elif asked in ("online", "run") and not key_from:
        mode = "refused"
    login = f"logged in ({key_from})" if key_from else "not logged in (wandb login)"
    return WandbState(mode, key_from is not None, f"{login}: {MEANINGS[mode]}")


# end feature: wandb
