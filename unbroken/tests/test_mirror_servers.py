"""Runs whose machine is lost again and again, with mirrors on real servers."""

from __future__ import annotations

import os
import random
import shutil
import statistics
import time
from pathlib import Path
from typing import Any

import pytest

from tests.commands import (
    SMALL,
    assert_same_run,
    checkpoint,
    complete,
    kill_group,
    popen,
    run_ranks,
    summary,
    wait_for,
)
from tests.promises import SEARCHED
from tests.store_servers import KINDS, Server, free_port, python_with_stores, sftp

pytestmark = pytest.mark.nightly
# Enough steps for the uploads that are killed.
FLAGS = [*SMALL, "--data.train_samples", "3200", "--checkpoint_every", "10"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that nobody disturbs, and that has no mirror."""
    place = tmp_path_factory.mktemp("undisturbed")
    words = [python_with_stores(), "-m", "tests.mirrored", *FLAGS, "--run_name", "run"]
    # It is made before a test sets its environment.
    env = {**os.environ, "PYTHONPATH": SEARCHED, "WANDB_MODE": "disabled"}
    done = complete(words, cwd=place, env=env)
    assert done.returncode == 0, done.stderr
    return place / "checkpoints" / "run"


class Machine:
    """A folder that stands for a machine, whose run has a mirror."""

    def __init__(self, place: Path, server: Server) -> None:
        self.place = place
        self.server = server
        self.folder = place / "checkpoints" / "run"
        self.log = place.parent / "log.txt"

    def start(self, *more: str, **environment: str) -> Any:
        """The same command, on a machine where nothing is left."""
        shutil.rmtree(self.place, ignore_errors=True)
        self.place.mkdir()
        words = [python_with_stores(), "-m", "tests.mirrored", *FLAGS, "--run_name", "run"]
        words += ["--ckpt_path", "auto", "--mirror", self.server.url, *more]
        env = {**os.environ, **self.server.environment, **environment}
        with open(self.log, "ab") as file:
            return popen(words, file.fileno(), file.fileno(), cwd=self.place, env=env)

    def wait_for_step(self, step: int, process: Any) -> None:
        """Wait until the last checkpoint on this machine has reached a step, or the run ends."""
        last = self.folder / "last.ckpt"
        while process.poll() is None:
            if last.exists() and checkpoint(last)["global_step"] >= step:
                return
            time.sleep(0.02)

    def told(self) -> str:
        return self.log.read_text(errors="replace")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(900)
def test_a_run_whose_machine_is_lost_five_times_ends_as_if_it_were_not(
    tmp_path: Path, undisturbed: Path, kind: str
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    with KINDS[kind](data) as server:
        machine = Machine(tmp_path / "machine", server)
        steps = summary(undisturbed)["steps"]
        moments = sorted(random.Random(kind).sample(range(1, steps), 5))
        for moment in moments:
            process = machine.start()
            machine.wait_for_step(moment, process)
            kill_group(process)
        process = machine.start()
        assert process.wait(300) == 0, machine.told()[-3000:]
        assert_same_run(undisturbed, machine.folder)
        assert "brought from" in machine.told()
        assert "secret" not in machine.told()
        # Once more, of the finished run.
        assert machine.start().wait(300) == 0
        assert machine.told().rstrip().endswith("summary.json.")
        assert_same_run(undisturbed, machine.folder)


@pytest.mark.parametrize("kind", ["folder", "s3"])
@pytest.mark.timeout(900)
def test_kills_inside_uploads_and_downloads_leave_no_half_state(
    tmp_path: Path, undisturbed: Path, kind: str
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    with KINDS[kind](data) as server:
        machine = Machine(tmp_path / "machine", server)
        for moment in ("upload 3", "upload 8", "download 2", "upload 5", "download 4", "upload 4"):
            process = machine.start(KILL_IN=moment)
            assert process.wait(300) == -9, machine.told()[-3000:]
        assert machine.start().wait(300) == 0, machine.told()[-3000:]
        assert_same_run(undisturbed, machine.folder)
        assert "passed over" not in machine.told()


@pytest.mark.timeout(900)
def test_a_server_that_dies_inside_an_upload_and_comes_back_misses_nothing(
    tmp_path: Path, undisturbed: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    port = free_port()
    with sftp(data, port) as server:
        machine = Machine(tmp_path / "machine", server)
        slow = ["--trainer.callbacks", "tests.interrupted.Slow"]
        process = machine.start(*slow, SLOW_SECONDS="0.1")
        machine.wait_for_step(20, process)
    # The server is gone, with whatever it was receiving.
    assert wait_for("takes no copies", machine.log, process), machine.told()[-3000:]
    with sftp(data, port):
        assert process.wait(300) == 0, machine.told()[-3000:]
        told = machine.told()
        assert told.count("takes copies again") == 1
        assert "mirror: step 150 is in" in told
        shutil.rmtree(machine.place)
        assert machine.start().wait(300) == 0
        assert_same_run(undisturbed, machine.folder)


def test_commands_read_a_checkpoint_in_a_bucket(tmp_path: Path, undisturbed: Path) -> None:
    with KINDS["s3"](tmp_path) as server:
        machine = Machine(tmp_path / "machine", server)
        assert machine.start().wait(300) == 0, machine.told()[-3000:]
        env = {**os.environ, **server.environment}
        python = python_with_stores()
        for words in (
            ["test", "--ckpt_path", f"{server.url}/run", "--data.source", "sample"],
            ["export", "--ckpt_path", f"{server.url}/run/last.ckpt", "--formats", "safetensors"],
            ["runs", "--root", server.url],
        ):
            if words[0] == "export":
                words += ["--output_dir", str(tmp_path)]
            done = complete(
                [python, "-m", f"numerals.{words[0]}", *words[1:]], cwd=tmp_path, env=env
            )
            assert done.returncode == 0, done.stderr
            assert "run" in done.stdout
        assert (tmp_path / "model.safetensors").exists()


@pytest.mark.timeout(900)
def test_two_ranks_whose_machine_is_lost_end_as_if_it_were_not(tmp_path: Path) -> None:
    flags = [*FLAGS, "--data.batch_size", "32", "--run_name", "run"]
    done = run_ranks("tests.mirrored", *flags, cwd=tmp_path, timeout=400)
    assert done.returncode == 0, done.stderr
    (tmp_path / "checkpoints").rename(tmp_path / "undisturbed")
    flags += ["--ckpt_path", "auto", "--mirror", str(tmp_path / "store")]
    killed = {**os.environ, "KILL_IN": "upload 12"}
    assert run_ranks("tests.mirrored", *flags, cwd=tmp_path, env=killed, timeout=400).returncode
    shutil.rmtree(tmp_path / "checkpoints")
    done = run_ranks("tests.mirrored", *flags, cwd=tmp_path, timeout=400)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("brought from") == 1
    assert_same_run(tmp_path / "undisturbed/run", tmp_path / "checkpoints/run")


def test_a_stop_with_a_slow_mirror_ends_in_ten_seconds_and_says_how_far_it_came(
    tmp_path: Path,
) -> None:
    machine = Machine(tmp_path / "machine", Server("slow://store", {}))
    process = machine.start(SLOW_LATENCY_S="2", SLOW_BYTES_PER_SEC="100000")
    machine.wait_for_step(20, process)
    begun = time.monotonic()
    process.terminate()
    assert process.wait(30) == 143, machine.told()[-3000:]
    assert time.monotonic() - begun < 10
    told = machine.told()
    assert "the mirror is not complete: slow://store/run holds nothing of this run's" in told
    assert told.rstrip().endswith("--ckpt_path auto --mirror slow://store")


def test_a_mirror_that_is_required_and_not_complete_is_exit_code_1(tmp_path: Path) -> None:
    machine = Machine(tmp_path / "machine", Server("failing://store", {}))
    for more, code in ((["--mirror_required", "true"], 1), ([], 0)):
        process = machine.start(*more, STORE_REFUSES="no space left")
        assert process.wait(300) == code, machine.told()[-3000:]
        (note,) = [each for each in summary(machine.folder)["notes"] if "mirror" in each]
        assert "the mirror is not complete" in note
        assert "(no space left)" in note
        assert note in machine.told()
    # Later the store is well again, and the same line brings over what it lacks.
    assert machine.start().wait(300) == 0, machine.told()[-3000:]
    assert [each for each in summary(machine.folder)["notes"] if "mirror" in each] == []
    assert machine.told().count("mirror: step") == 1


@pytest.mark.alone
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("slow", [{"SLOW_LATENCY_S": "2"}, {"SLOW_BYTES_PER_SEC": str(200 * 1024)}])
def test_a_slow_mirror_costs_a_run_no_time(tmp_path: Path, slow: dict[str, str]) -> None:
    """Seconds of training with and without, in turn; and the memory, which is printed."""
    ratios = []
    for index in range(int(os.environ.get("ROUNDS", "5"))):
        found = {}
        for url in ("slow://store", ""):
            machine = Machine(tmp_path / f"{index}{bool(url)}", Server(url or "null", {}))
            process = machine.start("--max_epochs", "60", **slow)
            assert process.wait(600) == 0, machine.told()[-3000:]
            found[url] = summary(machine.folder)
        with_it, without = found["slow://store"], found[""]
        ratios.append(with_it["fit_seconds"] / without["fit_seconds"])
        memory = [each["memory/peak_rss_gib"] for each in (with_it, without)]
        print(slow, f"ratio {ratios[-1]:.3f}", f"{without['fit_seconds']:.2f} s", "GiB", memory)
    assert statistics.median(ratios) < 1.03, ratios
