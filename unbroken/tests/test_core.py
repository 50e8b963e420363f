"""The core of the library alone: a Trainer's script needs none of what the commands need."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

SOURCE = Path(__file__).parents[1]
CORE = tomllib.loads((SOURCE / "pyproject.toml").read_text())["project"]["dependencies"]


def closure(requirements: Sequence[str]) -> set[str]:
    """The installed distributions that these requirements bring, and those that these bring."""
    found: set[tuple[str, str]] = set()
    wanted = [Requirement(line) for line in requirements]
    while wanted:
        requirement = wanted.pop()
        for extra in {"", *requirement.extras}:
            if (requirement.name, extra) in found:
                continue
            with contextlib.suppress(PackageNotFoundError):
                needs = distribution(requirement.name).requires or []
                found.add((requirement.name, extra))
                wanted += [each for each in map(Requirement, needs) if is_needed(each, extra)]
    return {name for name, _ in found}


def is_needed(requirement: Requirement, extra: str) -> bool:
    return requirement.marker is None or requirement.marker.evaluate({"extra": extra})


def environment_with(requirements: Sequence[str], folder: Path) -> Path:
    """A folder that holds what these requirements bring, and nothing else: links to what is
    installed here.

    It stands for a fresh environment, in which a missing dependency shows. To install PyTorch once
    more would take minutes and gigabytes.
    """
    folder.mkdir()
    for name in closure(requirements):
        installed = distribution(name)
        for top in {file.parts[0] for file in installed.files or ()} - {"..", "__pycache__"}:
            place = Path(str(installed.locate_file(top)))
            link = folder / top
            if place.exists() and not link.exists():
                link.symlink_to(place)
    return folder


def run_alone(script: str, packages: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a script in a Python that finds its own modules and those of a folder."""
    lines = f"import sys; sys.path.insert(0, {str(packages)!r})\n"
    # Without -S the packages of this environment would be found as well.
    command = [sys.executable, "-I", "-S", "-c", lines + script]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240)


# What nobody gets with the core
EXTRA_PACKAGES = {
    *("wandb", "matplotlib", "jsonargparse", "pytest", "torchvision", "PIL", "optuna"),
}
# Rooms and files of the library that need an extra
WITH_EXTRAS = {"cli", "commands", "report", "run", "start", "trust"}
FILES_WITH_EXTRAS = {
    *("data.augmentation", "data.drawn_figures", "data.idx_files", "data.images"),
    *("data.picture_folder", "pictures", "loggers.chosen"),
}
IMPORT_THE_CORE = """
import importlib
from pathlib import Path
import unbroken
top = Path(unbroken.__file__).parent
for path in sorted(top.rglob("*.py")):
    parts = path.relative_to(top).with_suffix("").parts
    if parts[0] not in WITH_EXTRAS and ".".join(parts) not in FILES_WITH_EXTRAS:
        importlib.import_module(".".join(["unbroken", *parts]))
print(sorted({*sys.modules} & EXTRA_PACKAGES))
"""
# A small Trainer's script. The run in the first folder is killed at a step; the next start finishes
# it, and trains another one that is not killed.
TRAIN = """
import os, signal
from pathlib import Path
import torch
from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything
from torch.utils.data import DataLoader, TensorDataset
from unbroken import ExactCheckpoint

class Noisy(LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, index):
        return (self.layer(batch[0] + torch.randn_like(batch[0])) ** 2).mean()
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)

class Kill(Callback):
    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 13:
            os.kill(os.getpid(), signal.SIGKILL)

def train(folder, *callbacks):
    seed_everything(1, verbose=False)
    module = Noisy()
    loader = DataLoader(TensorDataset(torch.randn(64, 4)), batch_size=8, shuffle=True)
    keep = ExactCheckpoint(folder, every="5")
    trainer = Trainer(max_epochs=3, accelerator="cpu", logger=False, callbacks=[keep, *callbacks],
                      enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(module, loader, ckpt_path=keep.resume_from)
    assert trainer.global_step == 24
    return module.layer.weight

begins = not Path("killed").exists()
resumed = train("killed", *([Kill()] if begins else []))
assert torch.equal(resumed, train("whole")), "the resume is not exact"
print("the resume is exact")
"""


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the library's wheel and what its core asks for."""
    if sys.platform == "win32":
        pytest.skip("links need rights on Windows")
    folder = tmp_path_factory.mktemp("core")
    packages = environment_with(CORE, folder / "packages")
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel"]
    command += ["--directory", str(folder)]
    subprocess.run(command, cwd=SOURCE, check=True, capture_output=True, timeout=120)
    (wheel,) = folder.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(packages)
    return packages


def test_the_core_alone_imports_all_that_needs_no_extra(core: Path, tmp_path: Path) -> None:
    assert not {path.name for path in core.iterdir()} & EXTRA_PACKAGES
    names = f"WITH_EXTRAS = {WITH_EXTRAS}\nFILES_WITH_EXTRAS = {FILES_WITH_EXTRAS}\n"
    names += f"EXTRA_PACKAGES = {EXTRA_PACKAGES}\n"
    done = run_alone(names + IMPORT_THE_CORE, core, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "[]\n"


@pytest.mark.nightly
def test_a_script_with_the_core_alone_resumes_exactly_after_a_kill(
    core: Path, tmp_path: Path
) -> None:
    killed = run_alone(TRAIN, core, tmp_path)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    resumed = run_alone(TRAIN, core, tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert resumed.stdout.splitlines()[-1] == "the resume is exact"
