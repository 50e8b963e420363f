"""A folder that huggingface_hub uploads as it is: weights, configuration and a model card.

Nothing is uploaded here, and no account is asked for.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule
from torch import Tensor
from unbroken import contract
from unbroken.cli.plain_values import dump_yaml
from unbroken.cli.read_checkpoint import Loaded
from unbroken.commands.export.compare import as_bytes
from unbroken.commands.export.forward import first_line
from unbroken.commands.export.write import metadata
from unbroken.errors import UserError, printable, require
from unbroken.results.facts import PACKAGES
from unbroken.results.summary_file import SPLITS, read_summary
from unbroken.stopping.ranks import say
from unbroken.storage.reading import UNREADABLE, NotRead, read_text
from unbroken.tables import format_metric, is_number
from unbroken.version import __version__

WEIGHTS = "model.safetensors"
CONFIG = "config.json"
CARD = "README.md"
FILES = (WEIGHTS, CONFIG, CARD)
# Stands in a card, and tells it from a file that somebody has written himself.
MARK = "<!-- written by the command export --hub -->"
# What a page takes for markup, or for the middle of an address that it would link
MARKUP = re.compile(r"[\\`*_{}\[\]<>|#&@]|:(?=//)|(?<=www)\.", re.IGNORECASE)
LARGEST_CARD = 2**22  # bytes
# A folder at the start of an absolute path, which says something of the machine and its user
FOLDERS = re.compile(r"(?<![\w.])/(?:[^\s/'\"]+/)+")
# Loads a module from the folder of the card. The card shows it, and export runs it once.
LOADING = """\
import json

from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule
from safetensors.torch import load_file

parser = ArgumentParser()
parser.add_argument("--model", type=LightningModule)
with open("config.json") as file:
    config = parser.parse_object({"model": json.load(file)["model"]})
module = parser.instantiate(config).model
module.configure_model()
module.load_state_dict(load_file("model.safetensors"))
module.eval()
"""


def check_hub(text: str) -> Path:
    """The value of ``--hub``; a UserError where it is a file, or holds files of somebody else."""
    folder = Path(text)
    require(not folder.is_file(), "--hub", "be a folder", f"the file {text}")
    others = []
    if folder.is_dir():
        names = sorted(os.listdir(folder))
        card = folder / CARD
        is_own = False
        with contextlib.suppress(*UNREADABLE):
            is_own = MARK in read_text(card, LARGEST_CARD)
        others = [name for name in names if not is_own or name not in FILES]
    if others:
        raise UserError(
            f"--hub must be a new or empty folder, or one that --hub has written, got {text}, "
            f"which holds {others[0]}."
        )
    return folder


def write_hub(loaded: Loaded, folder: Path) -> None:
    """Write the files into a folder that is there.

    Raises:
        UserError: where the module cannot be made again from its configuration and its weights.
    """
    from safetensors.torch import save

    # A copy of each, for tied weights share their memory, which safetensors refuses.
    state = loaded.module.state_dict()
    weights = {
        name: value.clone().contiguous()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }
    with tempfile.TemporaryDirectory(dir=folder, prefix=".hub-") as scratch:
        place = Path(scratch)
        (place / WEIGHTS).write_bytes(save(weights, {"format": "pt", **metadata(loaded)}))
        text = json.dumps(configuration(loaded), indent=2, ensure_ascii=False)
        (place / CONFIG).write_text(text + "\n", encoding="utf-8")
        (place / CARD).write_text(card(loaded), encoding="utf-8")
        check_loading(place, loaded)
        # The card comes first: it says that the others are this command's.
        for name in reversed(FILES):
            os.replace(place / name, folder / name)


def configuration(loaded: Loaded) -> dict[str, Any]:
    """What ``config.json`` holds: the module, as its class and arguments, and what made it."""
    return {
        "library_name": "unbroken",
        "version": __version__,
        "model": loaded.config.resolved["model"],
        "classes": loaded.class_names,
    }


def check_loading(folder: Path, loaded: Loaded) -> None:
    """A UserError where what the card says does not give the checkpoint's module, bit for bit."""
    name = type(loaded.module).__name__
    try:
        found = module_from(folder).state_dict()
    # The class is somebody else's code, and its constructor may raise anything.
    except Exception as error:
        raise UserError(
            f"--hub: {name} cannot be made from its configuration and weights alone: "
            f"{first_line(error)}. --formats safetensors writes the weights."
        ) from error
    for key, value in loaded.module.state_dict().items():
        if isinstance(value, Tensor) and as_bytes(value) != as_bytes(found[key]):
            raise UserError(f"--hub: {key} of {name} is not the same when it is loaded again.")


def module_from(folder: Path) -> LightningModule:
    """The module of a folder, as :data:`LOADING` makes it."""
    from safetensors.torch import load_file

    parser = ArgumentParser()
    parser.add_argument("--model", type=LightningModule)
    settings = json.loads((folder / CONFIG).read_text(encoding="utf-8"))
    module = parser.instantiate(parser.parse_object({"model": settings["model"]})).model
    module.configure_model()
    module.load_state_dict(load_file(folder / WEIGHTS))
    return module.eval()


# The model card


def card(loaded: Loaded) -> str:
    """README.md: the front matter that the Hub reads, then what people read."""
    summary = summary_of(loaded)
    results = results_of(loaded, summary)
    name = str(loaded.run.get("run_name") or loaded.path.stem)
    network = type(getattr(loaded.module, "network", loaded.module)).__name__
    lines = [
        f"---\n{dump_yaml(front_matter(loaded, name, results))}---",
        MARK,
        f"# {plain(name)}",
        f"{a_or_an(type(loaded.module).__name__)} with the network {code(network)}, "
        f"{count_parameters(loaded):,} parameters.",
        "## Results",
        *table(
            ("metric", "value"),
            [(key, format_metric(value)) for key, value in results.items()],
        ),
        "## How it was made",
        *table(("", ""), facts_of(loaded, summary)),
        "## How to load it",
        f"Install {code('unbroken')} {__version__} with its packages, or have the code of "
        f"{code(loaded.config.resolved['model']['class_path'])} where Python finds it. "
        "In this folder:",
        f"```python\n{LOADING}```",
        *words_on_inputs(loaded),
    ]
    return "\n\n".join(lines) + "\n"


def front_matter(loaded: Loaded, name: str, results: dict[str, float]) -> dict[str, Any]:
    """What the Hub reads of a card. It has no licence: that is the user's to choose."""
    matter: dict[str, Any] = {"library_name": "unbroken", "tags": ["pytorch", "lightning"]}
    task = task_of(loaded)
    if task is None:
        return matter
    tests = {key: value for key, value in results.items() if key.startswith("test")}
    metrics = []
    for key, value in tests.items():
        # accuracy, of test/accuracy or test_accuracy
        kind = key.rpartition("/")[2].removeprefix("test_")
        metrics.append({"type": kind, "name": key, "value": round(value, 6)})
    matter["pipeline_tag"] = task
    if metrics:
        matter["metrics"] = [metric["type"] for metric in metrics]
        result = {
            "task": {"type": task},
            "dataset": {
                "type": dataset_of(loaded),
                "name": type(loaded.datamodule).__name__,
                "split": "test",
            },
            "metrics": metrics,
        }
        matter["model-index"] = [{"name": printable(name), "results": [result]}]
    return matter


def task_of(loaded: Loaded) -> str | None:
    """The Hub's word for the task; None where it is not known."""
    is_of_images = isinstance(loaded.datamodule, contract.ShapesImages)
    if is_of_images and loaded.class_names and labels_whole_images(loaded):
        return "image-classification"
    return None


def labels_whole_images(loaded: Loaded) -> bool:
    """Whether the module returns (1, classes) for one image. One of pixels, such as a mask, does
    not.
    """
    data: Any = loaded.datamodule
    image = torch.zeros(1, *data.image_shape, dtype=torch.uint8)
    try:
        with torch.no_grad():
            logits = loaded.module(image)
    # forward is somebody else's code.
    except Exception:
        return False
    return isinstance(logits, Tensor) and tuple(logits.shape) == (1, len(loaded.class_names))


def dataset_of(loaded: Loaded) -> str:
    """The name of the data."""
    return printable(str(loaded.run.get("data_source") or type(loaded.datamodule).__name__))


def summary_of(loaded: Loaded) -> dict[str, Any]:
    """``summary.json`` beside the checkpoint, if it is of the same end of the same run; else
    nothing.
    """
    path = loaded.path.parent / "summary.json"
    try:
        summary, _ = read_summary(path)
    except NotRead as error:
        say(f"{printable(str(path))} {error}, and the card does not show it.")
        return {}
    except UNREADABLE:
        return {}
    if summary.get("run_name") != loaded.run.get("run_name"):
        return {}
    # A run that went on after its end, and was killed, has a best checkpoint of later steps.
    step: Any = loaded.run.get("global_step")
    last_step: Any = summary.get("steps")
    if not is_number(step) or not is_number(last_step) or step > last_step:
        return {}
    # The summary tells what the best checkpoint has reached.
    return summary if loaded.path.name == "best.ckpt" else {}


def results_of(loaded: Loaded, summary: dict[str, Any]) -> dict[str, float]:
    """The metrics of validation and test; without a summary those that the checkpoint holds."""
    saved = loaded.run.get("metrics")
    known = {**(saved if isinstance(saved, dict) else {}), **summary}
    names = sorted(name for name in known if isinstance(name, str) and name.startswith(SPLITS))
    return {printable(name): float(known[name]) for name in names if is_number(known[name])}


def facts_of(loaded: Loaded, summary: dict[str, Any]) -> list[tuple[str, Any]]:
    """Data, length, command, commit and versions, each with its name."""
    samples = summary.get("train_samples")
    versions = summary.get("versions") or loaded.run.get("versions")
    versions = versions if isinstance(versions, dict) else {}
    used = [f"{name} {versions[name]}" for name in PACKAGES if name in versions]
    data = f"{plain(dataset_of(loaded))} ({code(type(loaded.datamodule).__name__)})"
    facts: dict[str, Any] = {
        "data": Escaped(data),
        "training samples": None if samples is None else f"{samples:,}",
        "epochs": summary.get("epochs") or loaded.run.get("epoch"),
        "optimizer steps": loaded.run.get("global_step"),
        "precision": loaded.run.get("precision"),
        "hardware": summary.get("hardware"),
        "command": code(FOLDERS.sub(".../", summary.get("command") or "")),
        "git commit": summary.get("git_commit"),
        "versions": ", ".join(used),
    }
    return [(name, value) for name, value in facts.items() if value not in (None, "", "``")]


def words_on_inputs(loaded: Loaded) -> list[str]:
    """What an image classifier takes and returns."""
    classes = loaded.class_names
    if task_of(loaded) is None:
        return []
    data: Any = loaded.datamodule
    shape = ", ".join(str(size) for size in data.image_shape)
    shown = ", ".join(plain(name) for name in classes)
    return [
        f"`module(images)` takes pixels as bytes, or as numbers from 0 to 1, (batch, {shape}), "
        f"and returns (batch, {len(classes)}) logits of: {shown}."
    ]


def count_parameters(loaded: Loaded) -> int:
    """The number of the module's parameters."""
    return sum(parameter.numel() for parameter in loaded.module.parameters())


class Escaped(str):
    """A text of the card that is no markup any more, or markup of our own making."""


def table(heading: tuple[str, str], rows: list[tuple[str, Any]]) -> list[str]:
    """A table of two columns; a sentence where there is no row. Every cell is escaped."""
    if not rows:
        return ["Not recorded."]
    lines = [f"| {heading[0]} | {heading[1]} |", "| --- | --- |"]
    lines += [f"| {plain(left)} | {plain(right)} |" for left, right in rows]
    return ["\n".join(lines)]


def plain(value: Any) -> Escaped:
    """Any value as a text that is no markup and no link, on one line: a checkpoint's names are a
    stranger's, and so is what should be a number.
    """
    if isinstance(value, Escaped):
        return value
    return Escaped(MARKUP.sub(r"\\\g<0>", printable(str(value))))


def code(value: Any) -> Escaped:
    """Any value as code, on one line."""
    shown = printable(str(value).replace("`", "'").replace("|", "\\|"))
    return Escaped(f"`{shown}`")


def a_or_an(name: str) -> str:
    """A class's name with its article."""
    article = "An" if name[:1] in "AEIOU" else "A"
    return f"{article} {code(name)}"
