"""Several processes and machines: torchrun on one node and on two, and SLURM with its variables."""

from __future__ import annotations

import multiprocessing
import os
import shlex
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from string import Template
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from torch.distributed import TCPStore
from unbroken.cli.cli import configure
from unbroken.cli.trainer_flags import build_trainer, trainer_flags
from unbroken.mirror.store import PACKAGES
from unbroken.stopping.ranks import gather_from_ranks, meet
from unbroken.storage.checkpoint_files import read

from project.fit import job as fit
from tests.commands import TORCHRUN, rows
from tests.promises import ROOT, SEARCHED

ANY_TORCHRUN = [sys.executable, *TORCHRUN[:2]]
TIMEOUT = 200
CONFIGS = ROOT / "configs" / "examples"
EXAMPLE = ["--config", f"{CONFIGS}/autoencoder.yaml"]
EXAMPLE = ["--config", f"{CONFIGS}/tabular.yaml", "--data.batch_size", "10"]
ON_DEVICE: list[str] = []
ON_DEVICE += ["--data.on_device", "true"]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("scale_out")


def flags(place: Path, name: str) -> list[str]:
    size = ["--limit_train_batches", "18", "--max_epochs", "2", "--checkpoint_every", "5"]
    where = ["--accelerator", "cpu", "--default_root_dir", str(place / name)]
    return [*EXAMPLE, *size, *where]


# Variables that tell a process its place among others begin with these words.
FOREIGN = (
    "SLURM",
    "TORCHELASTIC",
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "MASTER_",
    "PROJECT_",
    "PL_",
)


def environment(**more: str) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(FOREIGN)}
    kept["WANDB_MODE"] = "disabled"
    # With the same number of threads everywhere, sums are added in the same order.
    kept["OMP_NUM_THREADS"] = "2"
    kept["PYTHONPATH"] = SEARCHED
    return {**kept, **more}


def run(command: list[str], **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(**more),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def only_run(place: Path, name: str) -> Path:
    """The one run that a job left, however many processes it had."""
    paths = (place / name).iterdir()
    (folder,) = [path for path in paths if path.is_dir() and not path.is_symlink()]
    assert (folder / "summary.json").exists()
    return folder


def assert_same(one: Path, other: Path) -> None:
    ours = read(one / "last.ckpt")["state_dict"]
    theirs = read(other / "last.ckpt")["state_dict"]
    assert all(torch.equal(ours[key], theirs[key]) for key in theirs)
    assert rows(one) == rows(other)


@pytest.fixture(scope="module")
def undisturbed(place: Path) -> Path:
    """One machine, two processes, nobody interrupts."""
    job = run([sys.executable, *TORCHRUN, "-m", "project.fit", *flags(place, "undisturbed")])
    told, _ = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 0, told
    return only_run(place, "undisturbed")


@pytest.mark.nightly
def test_two_torchrun_nodes_inside_a_slurm_job_make_one_run_in_one_folder(
    place: Path, undisturbed: Path
) -> None:
    job_id = str(10_000 + free_port())
    meeting = ["--nnodes", "2", "--nproc_per_node", "1"]
    meeting += ["--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    fit = ["-m", "project.fit", *flags(place, "nodes")]
    nodes = []
    for rank in range(2):
        command = [*ANY_TORCHRUN, *meeting, "--node_rank", str(rank), *fit]
        nodes.append(run(command, **slurm_variables(job_id, rank, nodes=2)))
    for node in nodes:
        told, _ = node.communicate(timeout=TIMEOUT)
        assert node.returncode == 0, told
    assert_same(only_run(place, "nodes"), undisturbed)


@pytest.mark.nightly
def test_torchrun_restarts_a_killed_worker_and_ends_with_the_same_weights(
    place: Path, undisturbed: Path
) -> None:
    elastic = [*TORCHRUN, "--max_restarts", "1", "--monitor_interval", "0.2"]
    # The undisturbed run has the data on the host. Where they are changes nothing.
    killed = ["-m", "tests.interrupted", "23", "SIGKILL", *flags(place, "killed"), *ON_DEVICE]
    job = run([sys.executable, *elastic, *killed, "--run_name", "killed", "--ckpt_path", "auto"])
    told, _ = job.communicate(timeout=TIMEOUT)
    assert job.returncode == 0, told
    assert "going on from step" in told
    assert_same(only_run(place, "killed"), undisturbed)


def slurm_variables(job_id: str, rank: int, nodes: int = 1) -> dict[str, str]:
    """What srun sets for a task of a job of two tasks on one or two nodes."""
    return {
        "SLURM_JOB_ID": job_id,
        "SLURM_JOBID": job_id,
        "SLURM_JOB_NAME": "training",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NNODES": str(nodes),
        "SLURM_JOB_NUM_NODES": str(nodes),
        "SLURM_NTASKS_PER_NODE": str(2 // nodes),
        "SLURM_JOB_NODELIST": "localhost",
        "SLURM_NODELIST": "localhost",
        "SLURM_NODEID": str(rank * (nodes - 1)),
        "SLURM_PROCID": str(rank),
        "SLURM_LOCALID": str(0 if nodes == 2 else rank),
    }


# srun starts two tasks, writes down their process ids, and fails where one of them does.
SRUN = """#!/bin/bash
shift
env {first} "$@" & p0=$!
env {second} "$@" & p1=$!
echo $p0 $p1 > {folder}/tasks
wait $p0; a=$?
wait $p1
exit $((a|$?))
"""
# scontrol writes down what it is asked.
SCONTROL = """#!/bin/bash
echo "$@" >> {folder}/asked
"""


def assignments(rank: int) -> str:
    """The variables of a task as words for env; the shell fills in the job's id."""
    variables = slurm_variables("$SLURM_JOB_ID", rank)
    return " ".join(f"{name}={value}" for name, value in variables.items())


@pytest.fixture
def slurm(tmp_path: Path) -> Path:
    """A folder with stand-ins for SLURM's commands."""
    srun = SRUN.format(first=assignments(0), second=assignments(1), folder=tmp_path)
    (tmp_path / "srun").write_text(srun)
    (tmp_path / "scontrol").write_text(SCONTROL.format(folder=tmp_path))
    for name in ("srun", "scontrol"):
        (tmp_path / name).chmod(stat.S_IRWXU)
    return tmp_path


@pytest.mark.nightly
def test_a_slurm_job_at_its_time_limit_is_queued_again_and_goes_on_exactly(
    place: Path, slurm: Path, undisturbed: Path
) -> None:
    job_id = str(10_000 + free_port())
    search_path = f"{slurm}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    allocation = {**slurm_variables(job_id, 0), "PATH": search_path}
    # The batch script itself is no step.
    del allocation["SLURM_STEP_ID"]
    script = ["bash", "configs/slurm.sh", *flags(place, "slurm"), "--num_nodes", "1"]
    first = run(
        [*script, "--trainer.callbacks", "tests.interrupted.Slow"], SLOW_SECONDS="0.2", **allocation
    )
    folder = place / "slurm" / f"slurm-{job_id}"
    while not (folder / "last.ckpt").exists() and first.poll() is None:
        time.sleep(0.1)
    assert first.poll() is None, first.communicate()[0]
    for task in (slurm / "tasks").read_text().split():
        # SLURM does this where the script says `#SBATCH --signal=SIGUSR1@90`.
        os.kill(int(task), signal.SIGUSR1)
    told, _ = first.communicate(timeout=TIMEOUT)
    assert first.returncode == 143, told
    assert (slurm / "asked").read_text().split() == ["requeue", job_id], told
    assert not (folder / "summary.json").exists()

    second = run(script, **allocation)
    told, _ = second.communicate(timeout=TIMEOUT)
    assert second.returncode == 0, told
    assert_same(only_run(place, "slurm"), undisturbed)


def meet_and_stay(rank: int, told: Any) -> None:
    """One of two ranks: find the other one, tell it, and stay until this process is killed."""
    meet(rank, 2)
    told.put(sorted(gather_from_ranks(rank)))
    time.sleep(60)


def test_ranks_that_torchrun_starts_again_do_not_look_for_those_that_have_died(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The agent's store still holds the addresses of processes that were killed."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    context = multiprocessing.get_context("fork")
    for _ in range(3):
        told = context.Queue()
        ranks = [context.Process(target=meet_and_stay, args=(rank, told)) for rank in (0, 1)]
        for rank in ranks:
            rank.start()
        try:
            found = [told.get(timeout=20) for _ in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.join()
        assert found == [[0, 1], [0, 1]]


def test_torchrun_inside_a_slurm_job_counts_its_own_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "SLURM_NTASKS", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("SLURM_JOB_NAME", "batch")
    words = ["--config", "configs/examples/autoencoder.yaml"]
    words += ["--accelerator", "cpu", "--strategy", "ddp"]
    trainer = build_trainer(trainer_flags(configure(fit, "fit", words)))
    assert isinstance(trainer.strategy.cluster_environment, TorchElasticEnvironment)  # type: ignore[attr-defined]


def words_of_kubernetes() -> list[str]:
    """The command of the one container in configs/kubernetes.yaml."""
    job = yaml.safe_load((ROOT / "configs" / "kubernetes.yaml").read_text())
    pod = job["spec"]["template"]["spec"]
    # A policy of failures needs the first, and a stop takes up to ten seconds.
    assert pod["restartPolicy"] == "Never"
    assert pod["terminationGracePeriodSeconds"] > 10
    (container,) = pod["containers"]
    return [*container["command"], *container["args"]]


def words_of_skypilot() -> list[str]:
    """The command of configs/skypilot.yaml, as a shell on one of its machines reads it."""
    task = yaml.safe_load((ROOT / "configs" / "skypilot.yaml").read_text())
    assert task["resources"]["use_spot"] is True
    assert PACKAGES[task["envs"]["MIRROR"].partition(":")[0]] == task["envs"]["STORE"]
    (line,) = task["run"].splitlines()
    return shlex.split(Template(line).substitute(task["envs"], SKYPILOT_NUM_GPUS_PER_NODE="2"))


@pytest.mark.parametrize("words_of", [words_of_kubernetes, words_of_skypilot])
def test_what_starts_fit_in_a_cloud_hands_it_options_that_it_knows(
    words_of: Callable[[], list[str]],
) -> None:
    words = words_of()
    place = words.index("project.fit")
    assert Path(words[0]).name == "torchrun"
    assert not set(words[1:place]) - {"--standalone", "--nproc_per_node", "gpu", "2", "-m"}
    config = configure(fit, "fit", [*EXAMPLE, *words[place + 1 :]])
    assert config.options.run_name == "mine"
    assert config.options.ckpt_path == "auto"
    assert config.options.mirror == "s3://bucket/runs"
