"""Worker processes give the same numbers however they are started: fork, forkserver or spawn.

Linux forks by default up to Python 3.13 and uses forkserver from 3.14 on. macOS and Windows spawn.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import made_data
from tests.commands import assert_same_run, complete
from tests.promises import ROOT, environment

# This is what a user of Python 3.14, macOS or Windows has without asking for it.
FIT = """
import multiprocessing, sys
from numerals.fit import job as fit
multiprocessing.set_start_method(sys.argv.pop(1), force=True)
sys.exit(fit.main(sys.argv[1:]))
"""
LIGHTNINGS_OWN = ["--model", "tests.other_tasks.TestedAutoEncoder"]
LIGHTNINGS_OWN += ["--data", "tests.other_tasks.NoisyWaves"]
LIGHTNINGS_OWN += ["--monitor", "val_loss", "--mode", "min"]
WORKERS = ["--data.num_workers", "2"]
# Every example that reads its data in worker processes, or can.
EXAMPLES = {"lightnings_own": LIGHTNINGS_OWN}
EXAMPLES["tabular"] = ["--config", "configs/examples/tabular.yaml", *WORKERS]
for name in ("image_regression", "multi_label", "png_folder", "tensor_dataset"):
    EXAMPLES[name] = ["--config", f"configs/examples/{name}.yaml", *WORKERS]
EXAMPLES["finetune_backbone"] = [
    *("--config", "configs/examples/finetune_backbone.yaml", *WORKERS),
    *("--model.network.name", "shufflenet_v2_x0_5"),
]


def make_data(name: str, root: Path) -> list[str]:
    """Make the files that an example reads. Returns the flag that names their folder."""
    if name in ("png_folder", "finetune_backbone"):
        made_data.make_picture_folder(root, ["bud", "fruit", "leaf"], train=90, test=20)
    elif name == "tensor_dataset":
        made_data.make_tensor_files(root, train=120, test=20)
    else:
        return []
    return ["--data.root", str(root)]


def train(flags: list[str], start_method: str, place: Path) -> Path:
    """The folder of a run whose worker processes were started in this way."""
    size = ["--max_epochs", "1", "--limit_train_batches", "6", "--log_every_n_steps", "2"]
    where = ["--accelerator", "cpu", "--default_root_dir", str(place), "--run_name", start_method]
    words = [sys.executable, "-c", FIT, start_method, *flags, *size, *where]
    done = complete(words, cwd=ROOT, env=environment())
    assert done.returncode == 0, done.stderr
    return place / start_method


def examples() -> list[object]:
    """All are nightly; but where workers are spawned by default, one example is tried every day."""
    found: list[object] = []
    for name in EXAMPLES:
        for start_method in ("forkserver", "spawn"):
            is_usual = start_method == "spawn" and sys.platform == "darwin"
            is_quick = name == "lightnings_own" and is_usual
            marks = () if is_quick else pytest.mark.nightly
            found.append(pytest.param(name, start_method, marks=marks))
    return found


@pytest.mark.skipif(sys.platform == "win32", reason="Windows can only spawn")
@pytest.mark.parametrize(("name", "start_method"), examples())
def test_worker_processes_give_the_same_numbers_however_they_are_started(
    name: str, start_method: str, tmp_path: Path
) -> None:
    flags = [*EXAMPLES[name]]
    flags += make_data(name, tmp_path / "data")
    forked = train(flags, "fork", tmp_path)
    assert_same_run(forked, train(flags, start_method, tmp_path))
