"""What ``--logger`` may name: a tracker by one word, several with commas, or a class of a logger.

A class of Lightning's whose folder is not given gets the run's folder. That folder is not known yet
when the command line is read, so such a logger is made later.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jsonargparse.typing import restricted_string_type
from lightning.pytorch.loggers import Logger
from unbroken.cli.tracker_words import TRACKERS
from unbroken.errors import UserError
from unbroken.run_folder import RUN_FOLDER

# Those that log where --logger names none by a word
USUAL: tuple[str, ...] = ("wandb",)
# Lightning's own loggers, and the package that each needs
PACKAGES_OF_CLASSES = {
    "CometLogger": "comet_ml",
    "MLFlowLogger": "mlflow",
    "TensorBoardLogger": "tensorboard",
    "WandbLogger": "wandb",
}
LIGHTNINGS = ("lightning.pytorch.loggers.", "pytorch_lightning.loggers.")

_WORD = f"({'|'.join(TRACKERS)})"
TrackerWords = restricted_string_type(
    "TrackerWords",
    rf"^{_WORD}(,{_WORD})*$",
    docstring="Trackers by their words, with commas between them.",
)


@dataclass(frozen=True)
class MadeInRunFolder:
    """A logger that is made when the run's folder is known."""

    kind: type[Logger]
    arguments: dict[str, Any]

    def make(self, folder: Path) -> Logger:
        """The logger, with its files in ``folder``. A UserError where it refuses its arguments."""
        arguments = {**self.arguments, "save_dir": str(folder)}
        is_local = not arguments.get("tracking_uri") and not os.environ.get("MLFLOW_TRACKING_URI")
        if "tracking_uri" in arguments and is_local:
            # MLflow makes no new folders of files any more. It wants a database.
            arguments["tracking_uri"] = f"sqlite:///{folder / 'mlflow.db'}"
        try:
            return self.kind(**arguments)
        except (ValueError, TypeError, ImportError) as error:
            reason = " ".join(str(error).split())
            raise UserError(f"--logger {self.kind.__name__}: {reason}") from None


def make_later(kind: type[Logger], *args: Any, **arguments: Any) -> Logger | MadeInRunFolder:
    """How the parser makes a logger: at once, or later where it lies in the run's folder."""
    if arguments.get("save_dir") == RUN_FOLDER:
        return MadeInRunFolder(kind, arguments)
    return kind(*args, **arguments)


def takes_run_folder(kind: Any) -> bool:
    """Whether the run's folder is the place of a logger whose ``save_dir`` is not given.

    That holds for Lightning's own classes, and for others that cannot be made without a
    ``save_dir``.
    """
    if not inspect.isclass(kind) or not issubclass(kind, Logger):
        return False
    parameter = inspect.signature(kind).parameters.get("save_dir")
    if parameter is None:
        return False
    is_lightnings = kind.__module__.startswith(LIGHTNINGS)
    return is_lightnings or parameter.default is parameter.empty


def words_of(logger: Any) -> list[str]:
    """The trackers that a value of ``--logger`` means, each once.

    Args:
        logger: What the parser makes of it: words, objects, a list of these, True, False or None.
    """
    if logger is False:
        return []
    parts = logger if isinstance(logger, list | tuple) else [logger]
    texts = [part for part in parts if isinstance(part, str)]
    if not texts:
        return list(USUAL)
    return list(dict.fromkeys(word for text in texts for word in text.split(",")))


def check_packages(words: Iterable[str], loggers: Any) -> None:
    """A UserError where the package of a tracker, or of a logger of Lightning's, is missing."""
    for word in words:
        _check_package(word, TRACKERS[word])
    for logger in loggers if isinstance(loggers, list | tuple) else [loggers]:
        if isinstance(logger, MadeInRunFolder):
            name = logger.kind.__name__
            _check_package(name, PACKAGES_OF_CLASSES.get(name))


def _check_package(name: str, package: str | None) -> None:
    if package is not None and importlib.util.find_spec(package) is None:
        raise UserError(
            f"--logger {name} needs the package {package}, which is not installed."
            f" Run pip install {package}."
        )
