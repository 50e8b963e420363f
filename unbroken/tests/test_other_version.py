"""A resume by another version of the library is exact, says that it may not be, or is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from lightning.pytorch import Trainer
from unbroken import ExactCheckpoint, __version__
from unbroken.checkpoint import saving
from unbroken.checkpoint.other_version import note_of_version
from unbroken.errors import UserError
from unbroken.results.facts import versions
from unbroken.storage.checkpoint_files import read

from tests.plain_module import Regression


def train(folder: Path, epochs: int) -> None:
    keep = ExactCheckpoint(folder)
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[keep],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Regression(0), ckpt_path=keep.resume_from)


def test_a_checkpoint_and_a_summary_name_the_version(tmp_path: Path) -> None:
    train(tmp_path, epochs=1)
    assert read(tmp_path / "last.ckpt")["run"]["versions"] == {"unbroken": __version__}
    assert json.loads(json.dumps(versions()))["unbroken"] == __version__


def test_a_resume_by_another_version_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(saving, "__version__", "0.1.7")
    train(tmp_path, epochs=1)
    capsys.readouterr()
    train(tmp_path, epochs=2)
    told = capsys.readouterr()
    assert "saved by unbroken 0.1.7" in told.out + told.err


def test_a_resume_by_another_major_version_is_refused_and_changes_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "__version__", "7.0.0")
    train(tmp_path, epochs=1)
    before = {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()}
    with pytest.raises(UserError, match=r"saved by unbroken 7\.0\.0, .* Install 7\.0\.0 again"):
        train(tmp_path, epochs=2)
    assert {path: path.read_bytes() for path in tmp_path.iterdir() if path.is_file()} == before


@pytest.mark.parametrize(
    ("before", "now", "told"),
    [
        ("1.2.3", "1.2.3", None),
        ("1.2.3", "1.2.4", "both resume it exactly."),
        ("1.2.4", "1.2.3", "both resume it exactly."),
        ("1.2.3", "1.3.0", "it is not promised that the resume is bit for bit."),
        ("1.20.3", "1.2.3", "it is not promised that the resume is bit for bit."),
    ],
)
def test_a_patch_is_exact_and_a_minor_version_may_not_be(
    before: str, now: str, told: str | None
) -> None:
    line = note_of_version({"versions": {"unbroken": before}}, now)
    if told is None:
        assert line is None
    else:
        assert line == f"that checkpoint was saved by unbroken {before}, and this is {now}: {told}"


@pytest.mark.parametrize("before", ["2.0.0", "0.9.0", "", "x\n"])
def test_another_major_version_or_none_that_can_be_read_is_refused(before: str) -> None:
    with pytest.raises(UserError, match="cannot resume it exactly"):
        note_of_version({"versions": {"unbroken": before}}, "1.2.3")


def test_a_checkpoint_that_names_no_version_is_said_to_be_of_an_older_one() -> None:
    assert "older than 0.2.0: the resume is not exact" in str(note_of_version({}, "1.2.3"))
