"""A folder for the Hugging Face Hub: what it holds, and that it loads without our commands."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import yaml
from lightning.pytorch import LightningModule
from numerals.data import MNISTDataModule
from numerals.fit import job as fit
from torch import nn
from unbroken.chosen import Chosen
from unbroken.cli import start as entry
from unbroken.cli.cli import Configuration
from unbroken.cli.read_checkpoint import Loaded, load
from unbroken.commands.export import command as export
from unbroken.commands.export.hub import CARD, FILES, card, check_hub, plain, write_hub
from unbroken.errors import UserError

from tests.commands import complete, summary
from tests.trained import trained_checkpoint

# Markup, links, a line of its own, and commands of a terminal
EVIL = (
    "<script>x</script> [click](http://evil) ![a](b) https://evil www.evil.com"
    "\n\nSent by itself\x1b[2J\u202e"
)


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``export --hub`` writes of a trained run."""
    folder = tmp_path_factory.mktemp("hub") / "digits"
    words = ["--ckpt_path", str(trained_checkpoint()), "--hub", str(folder)]
    for _ in range(2):  # a folder of its own is written anew
        assert entry.exit_code(partial(export.main, "numerals"), words) == 0
    assert sorted(os.listdir(folder)) == sorted(FILES)
    return folder


def front_matter(text: str) -> dict[str, object]:
    _, matter, _ = text.split("---\n", 2)
    return dict(yaml.safe_load(matter))


def test_the_folder_loads_without_our_commands_and_predicts_the_same(
    hub: Path, tmp_path: Path
) -> None:
    (loading,) = re.findall(r"```python\n(.*?)```", (hub / CARD).read_text(), flags=re.DOTALL)
    script = [
        loading,
        "import sys",
        "import torch",
        "images = torch.rand(20, 1, 28, 28, generator=torch.Generator().manual_seed(0))",
        "torch.save(module(images), sys.argv[1])",
    ]
    words = [sys.executable, "-c", "\n".join(script), str(tmp_path / "logits.pt")]
    done = complete(words, cwd=hub)
    assert done.returncode == 0, done.stderr
    images = torch.rand(20, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    expected = load(fit, trained_checkpoint()).module(images)
    assert torch.equal(torch.load(tmp_path / "logits.pt"), expected)


def test_the_card_says_what_was_reached_and_how(hub: Path) -> None:
    text = (hub / CARD).read_text()
    facts = summary(trained_checkpoint().parent)
    assert f"| test/accuracy | {facts['test/accuracy']:.4f} |" in text
    assert f"| epochs | {facts['epochs']} |" in text
    assert f"| git commit | {facts['git_commit']} |" in text
    assert facts["versions"]["torch"] in text
    assert "numerals.fit --data.source sample --max_epochs 3" in text
    # Nothing of this machine
    assert "/home" not in text
    assert str(hub.parent) not in text
    matter = front_matter(text)
    assert matter["pipeline_tag"] == "image-classification"
    (model,) = matter["model-index"]  # type: ignore[misc]
    (result,) = model["results"]
    accuracy = {each["type"]: each["value"] for each in result["metrics"]}["accuracy"]
    assert accuracy == pytest.approx(facts["test/accuracy"], abs=1e-6)


@pytest.mark.nightly
def test_the_hubs_own_reader_takes_the_card(hub: Path) -> None:
    huggingface_hub = pytest.importorskip("huggingface_hub")
    found = huggingface_hub.ModelCard.load(hub / CARD)
    facts = summary(trained_checkpoint().parent)
    assert found.data.pipeline_tag == "image-classification"
    values = {each.metric_type: each.metric_value for each in found.data.eval_results}
    assert values["accuracy"] == pytest.approx(facts["test/accuracy"], abs=1e-6)
    assert "How to load it" in found.text


class Made(LightningModule):
    """It has a weight that no configuration makes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)


def loaded_of(module: LightningModule) -> Loaded:
    config = Configuration(
        program=fit,
        chosen=Chosen(),
        module=module,
        datamodule=None,
        trainer={},
        options=None,
        resolved={"model": {"class_path": f"{__name__}.Made"}},
        notes=[],
        _make=id,
        _reread=list,
    )
    return Loaded(module.eval(), None, config, {"run_name": "a|b `c` <i>"}, Path("best.ckpt"))


def test_any_module_has_a_card_and_a_name_is_no_markup(tmp_path: Path) -> None:
    loaded = loaded_of(Made())
    write_hub(loaded, tmp_path)
    assert sorted(os.listdir(tmp_path)) == sorted(FILES)
    text = card(loaded)
    assert f"# {plain('a|b `c` <i>')}" in text
    assert "<i>" not in text.split("---\n", 2)[2]
    assert front_matter(text)["library_name"] == "unbroken"
    assert json.loads((tmp_path / "config.json").read_text())["model"]["class_path"]


class Masks(LightningModule):
    """Labels each pixel."""

    class_names = ["sky", "sea", "land"]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.float().expand(-1, 3, -1, -1)


def test_a_module_that_labels_pixels_is_said_to_be_no_classifier_of_images() -> None:
    loaded = dataclasses.replace(loaded_of(Masks()), datamodule=MNISTDataModule())
    text = card(loaded)
    assert "pipeline_tag" not in front_matter(text)
    assert "logits" not in text


def test_results_of_an_earlier_end_are_not_those_of_a_later_best_checkpoint(tmp_path: Path) -> None:
    run = trained_checkpoint().parent
    shutil.copy(run / "best.ckpt", tmp_path)
    facts = summary(run) | {"test_loss": 0.5}
    loaded = load(fit, tmp_path / "best.ckpt")
    step = loaded.run["global_step"]
    for steps, is_there in ((step, True), (step - 1, False)):
        (tmp_path / "summary.json").write_text(json.dumps(facts | {"steps": steps}))
        text = card(loaded)
        assert (f"| test/accuracy | {facts['test/accuracy']:.4f} |" in text) == is_there
        assert ("| test\\_loss | 0.5000 |" in text) == is_there
        assert ("name: test_loss\n" in text) == is_there


def with_summary(folder: Path, facts: object) -> Loaded:
    """A module as if it were of a checkpoint beside a ``summary.json``."""
    facts = facts if isinstance(facts, str) else json.dumps(facts)
    (folder / "summary.json").write_text(facts)
    run = {"run_name": "r", "global_step": 1, "precision": EVIL, "metrics": {EVIL: 1, 2: 3}}
    return dataclasses.replace(loaded_of(Made()), run=run, path=folder / "best.ckpt")


def test_every_cell_of_a_card_is_escaped_whatever_it_should_be(tmp_path: Path) -> None:
    facts = {
        "run_name": "r",
        "steps": 1,
        f"test/{EVIL}": 0.5,
        "versions": [1],
        "train_samples": "x",
    }
    texts = ("hardware", "git_commit", "data_source", "epochs", "command")
    loaded = with_summary(tmp_path, facts | dict.fromkeys(texts, EVIL))
    _, matter, text = card(loaded).split("---\n", 2)
    assert text.count("| precision |") == text.count("| hardware |") == 1
    assert "| epochs |" not in text
    # In code nothing is markup.
    shown = re.sub("`[^`]*`", "", text)
    assert not re.search(r"(?<!\\)[<\[]|(?<!\\)://|www\.", shown.replace("<!-- ", ""))
    assert not {"\x1b", "\u202e"} & set(text + matter)
    assert "\nSent by itself" not in text


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="Windows has no such pipes")
def test_a_summary_that_is_a_link_a_pipe_or_nested_deeply_is_not_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = with_summary(tmp_path, "[" * 100_000)
    card(loaded)
    assert "summary.json is nested too deeply, and the card does not show it" in (
        capsys.readouterr().out
    )
    path = tmp_path / "summary.json"
    secret = {"run_name": "r", "steps": 1, "test/secret": 1, "command": "--password hunter2"}
    path.rename(tmp_path / "outside.json").write_text(json.dumps(secret))
    path.symlink_to("outside.json")
    text = card(loaded)
    assert "secret" not in text
    assert "hunter2" not in text
    assert "summary.json is a link, and" in capsys.readouterr().out
    path.unlink()
    os.mkfifo(path)
    card(loaded)
    assert "summary.json is no ordinary file, and" in capsys.readouterr().out


def test_weights_without_this_commands_card_are_not_replaced_and_its_own_are(
    hub: Path, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = workplace / "mine/model.safetensors"
    weights.parent.mkdir()
    weights.write_text("mine")
    checkpoint = ["--ckpt_path", str(trained_checkpoint())]
    assert entry.exit_code(partial(export.main, "numerals"), ["--hub", "mine", *checkpoint]) == 2
    assert "which holds model.safetensors." in capsys.readouterr().err
    assert weights.read_text() == "mine"
    assert check_hub(str(hub)) == hub


def test_a_module_that_cannot_be_made_again_is_told_and_leaves_no_file(tmp_path: Path) -> None:
    module = Made()
    module.further = nn.Linear(2, 2)
    with pytest.raises(UserError, match="--hub: Made cannot be made from its configuration and"):
        write_hub(loaded_of(module), tmp_path)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--hub", "mine"], "which holds README.md."),
        (["--hub", "mine/README.md"], "--hub must be a folder, got the file"),
        (
            ["--hub", "new", "--output_dir", "x"],
            "--hub writes a folder of its own: remove --output",
        ),
        (["--hub", "new", "--formats", "onnx"], "--hub writes a folder of its own: remove --form"),
    ],
)
def test_bad_input_is_one_line_and_leaves_what_is_there(
    words: list[str], message: str, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = workplace / "mine" / "README.md"
    mine.parent.mkdir()
    mine.write_text("mine")
    checkpoint = ["--ckpt_path", str(trained_checkpoint())]
    assert entry.exit_code(partial(export.main, "numerals"), [*words, *checkpoint]) == 2
    told = capsys.readouterr().err
    assert message in told
    assert told.count("\n") == 1
    assert mine.read_text() == "mine"
    assert os.listdir() == ["mine"]
