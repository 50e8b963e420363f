"""What is typed means the same for every command: home folders, pipes, places of nobody."""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path

import pytest
from lightning.pytorch.utilities import rank_zero_only
from numerals.fit import job as fit
from unbroken.cli import words
from unbroken.cli.output import Output, Printed, Terminal, open_streams, told_of_lost
from unbroken.cli.typed import CommandLine
from unbroken.errors import UserError
from unbroken.run import progress
from unbroken.stopping import ranks

from tests.commands import TINY


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_a_home_folder_is_expanded_in_every_option(home: Path) -> None:
    typed = ["--default_root_dir=~/runs", "--mirror", "~/m", "--data.root=~", "--model.name=a~/b"]
    assert words.settled(typed) == [
        f"--default_root_dir={home}/runs",
        "--mirror",
        f"{home}/m",
        f"--data.root={home}",
        "--model.name=a~/b",
    ]


def test_a_home_folder_in_a_config_file_is_expanded_unless_typed_otherwise(home: Path) -> None:
    Path(home, "a.yaml").write_text("data: {init_args: {root: ~/digits}}\ntrainer: {max_epochs: 1}")
    line = CommandLine(["--config", f"{home}/a.yaml", "--data.root=/typed"])
    assert line.words == [
        f"--config={home}/a.yaml",
        f"--data.root={home}/digits",
        "--data.root=/typed",
    ]
    assert CommandLine(["--config", f"{home}/a.yaml"]).value("data.root") == f"{home}/digits"


@pytest.mark.parametrize(
    ("typed", "told"),
    [
        (["--model", "own.py"], "--model own.CLASS"),
        (["--model=own.py:Net"], "--model own.Net"),
        (["--data", "./nets/own.py::Rows"], "--data nets.own.Rows"),
        (["--data", "rows.csv"], "--data PACKAGE.CLASS"),
    ],
)
def test_a_file_in_the_place_of_a_class_is_told_with_what_to_write(
    typed: list[str], told: str, workplace: Path
) -> None:
    Path("rows.csv").write_text("a,b\n1,2")
    with pytest.raises(UserError) as error:
        CommandLine(typed)
    assert "must be a class, got the file " in str(error.value)
    assert str(error.value).endswith(told)


def test_sections_may_stand_in_files_of_their_own(workplace: Path) -> None:
    Path("net.yaml").write_text("class_path: own.Net")
    assert CommandLine(["--model", "net.yaml"]).value("model.class_path") == "net.yaml"


def test_a_config_from_a_pipe_is_read_once_and_by_ranks_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"trainer: {max_epochs: 7}")
    os.close(writing)
    name = f"/dev/fd/{reading}"
    monkeypatch.setattr(sys, "argv", ["fit", "--config", name])
    settled = words.settled(["--config", name])
    assert sys.argv[1:] == settled
    for _ in range(2):
        assert CommandLine(words.settled(settled)).value("trainer.max_epochs") == "7"
    os.close(reading)


def test_a_terminal_that_is_closed_takes_what_is_written() -> None:
    master, slave = os.openpty()
    terminal = Terminal(slave, "w", closefd=False)
    assert terminal.write(b"seen") == 4
    os.close(master)
    assert terminal.write(b"unseen") == 6
    assert terminal.write(b"unseen") == 6
    os.close(slave)


def test_lines_for_a_closed_terminal_go_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    master, slave = os.openpty()
    with open(slave, "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        os.close(master)
        ranks.say("unseen")
        ranks.say("unseen")


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /dev/full")
def test_lines_that_a_full_disk_does_not_take_go_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    with open("/dev/full", "w") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        for _ in range(2):
            ranks.say("unseen")
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /dev/full")
@pytest.mark.parametrize("is_unbuffered", [False, True])
def test_a_command_s_stream_on_a_full_disk_takes_what_is_printed(
    is_unbuffered: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open("/dev/full", "w") as full, open("/dev/full", "w") as also_full:
        full.reconfigure(write_through=is_unbuffered)
        monkeypatch.setattr(sys, "stdout", full)
        monkeypatch.setattr(sys, "stderr", also_full)
        open_streams()
        for stream in (sys.stdout, sys.stderr):
            for _ in range(3):
                print("unseen" * 4096, file=stream)
            stream.flush()


@pytest.mark.parametrize(("is_log", "code", "word"), [(True, 0, "warning"), (False, 1, "error")])
def test_lost_lines_are_told_and_are_an_error_where_they_were_the_result(
    is_log: bool,
    code: int,
    word: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Printed, "is_log", is_log)
    monkeypatch.setattr(Printed, "lost", None)
    assert told_of_lost(0) == 0
    with open(os.devnull, "w") as stream:
        monkeypatch.setattr(Output, "fileno", lambda _: 1)
        output = Output(stream.fileno(), "w", closefd=False)
        output.lose(OSError(errno.ENOSPC, "No space left on device"))
    assert told_of_lost(0) == code
    assert told_of_lost(0) == 0
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"{word}: stdout cannot be written: No space left on device.")


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "SLURM_PROCID"])
def test_a_rank_that_no_launcher_has_given_is_said_and_ignored(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    ranks.ignore_rank_without_launcher()
    assert name not in os.environ
    told = capsys.readouterr().out
    assert (
        told == f"{name}=1 of the environment is ignored: no launcher has started this process.\n"
    )


@pytest.mark.daily(1)
@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK"])
def test_main_in_a_notebook_ignores_such_a_rank_as_well(
    name: str, workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "1")
    # Lightning has read it as it was imported.
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    monkeypatch.setattr(ranks.ThisProcess, "is_alone", False)
    assert fit.main([*TINY, "--logger", "tensorboard", "--run_name", "r"]) == 0
    line = f"{name}=1 of the environment is ignored: no launcher has started this process."
    assert capsys.readouterr().out.splitlines().count(line) == 1
    assert Path("checkpoints/r/metrics.csv").exists()
    assert list(Path("checkpoints/r").rglob("events.out.*"))


def test_a_rank_of_a_launcher_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    ranks.ignore_rank_without_launcher()
    assert os.environ["RANK"] == "1"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("RANK=0 WORLD_SIZE=y", "WORLD_SIZE must be a whole number of at least 1, got 'y'"),
        ("RANK=0 WORLD_SIZE=0", "WORLD_SIZE must be a whole number of at least 1, got '0'"),
        ("RANK=0 WORLD_SIZE=2 LOCAL_WORLD_SIZE=z", "LOCAL_WORLD_SIZE must be a whole number"),
        ("TORCHELASTIC_RUN_ID=x", "TORCHELASTIC_RUN_ID is set without RANK"),
        ("TORCHELASTIC_RUN_ID=x RANK=0 WORLD_SIZE=", "TORCHELASTIC_RUN_ID is set without WORLD_"),
        ("SLURM_STEP_ID=1 SLURM_NTASKS=x", "SLURM_NTASKS must be a whole number"),
        ("SLURM_STEP_ID=1 SLURM_NTASKS=2 SLURM_NNODES=0", "SLURM_NNODES must be a whole number"),
        ("RANK=5 WORLD_SIZE=2", "RANK must be less than WORLD_SIZE, which is 2, got 5."),
        ("SLURM_STEP_ID=1 SLURM_PROCID=2 SLURM_NTASKS=2", "SLURM_PROCID must be less than"),
    ],
)
def test_what_is_no_place_of_a_process_is_refused_before_anything_reads_it(
    given: str,
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for word in given.split():
        monkeypatch.setenv(*word.split("="))
    for read in (ranks.settle_launcher, ranks.is_child, ranks.is_rank_zero):
        with pytest.raises(UserError, match=told):
            read()
    assert fit.main(TINY) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert told in line


@pytest.mark.parametrize(
    "names", ["RANK WORLD_SIZE", "LOCAL_RANK", "SLURM_STEP_ID SLURM_NTASKS", "TORCHELASTIC_RUN_ID"]
)
def test_an_empty_variable_of_a_launcher_counts_as_unset(
    names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in names.split():
        monkeypatch.setenv(name, "")
    assert ranks.launched_world() == (0, 1, 1)
    assert not ranks.is_child()
    ranks.settle_launcher()
    assert not {*names.split()} & {*os.environ}


def test_python_alone_in_a_slurm_job_of_several_tasks_is_refused(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    monkeypatch.setenv("SLURM_JOB_NAME", "x")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert fit.main(TINY) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: this SLURM job has 4 tasks (SLURM_NTASKS)")
    assert "srun" in line
    assert not Path("checkpoints").exists()


def test_main_returns_the_exit_code_and_raises_what_is_the_users_own(
    workplace: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert fit.main(["--max_epochs", "x"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    monkeypatch.setattr("unbroken.run.main_job.main", interrupted)
    assert fit.main([]) == 130
    monkeypatch.setattr("unbroken.run.main_job.main", mistaken)
    with pytest.raises(ZeroDivisionError):
        fit.main([])


def interrupted(*_: object) -> int:
    raise KeyboardInterrupt


def mistaken(*_: object) -> int:
    return 1 // 0


def test_the_line_that_resumes_begins_as_it_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    command = "python -m project.fit"
    assert progress.with_launcher(command) == command
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert progress.with_launcher(command) == "torchrun --nproc_per_node 2 -m project.fit"
    for typed, shown in (
        (["/v/bin/python", "/v/bin/torchrun", "--nnodes", "2"], "torchrun --nnodes 2"),
        (["python3.11", "-m", "torch.distributed.run"], "python -m torch.distributed.run"),
    ):
        agent = [*typed, "-m", "project.fit", "--max_epochs", "3"]
        monkeypatch.setattr(progress.psutil.Process, "cmdline", lambda _, agent=agent: agent)
        assert progress.with_launcher(command) == f"{shown} -m project.fit"


def test_the_line_that_resumes_names_the_options_of_srun_that_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "last.ckpt").touch()
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    job = {"SLURM_STEP_ID": "0", "SLURM_JOB_NAME": "x", "SLURM_NTASKS": "8", "SLURM_NNODES": "4"}
    step = {"SLURM_STEP_NUM_NODES": "2", "SLURM_STEP_NUM_TASKS": "4", "SLURM_CPUS_PER_TASK": "3"}
    for name, value in {**job, **step}.items():
        monkeypatch.setenv(name, value)
    first, command = progress.stopped_lines("python -m project.fit", tmp_path, 5, 5)
    assert first.endswith("To go on, with whatever else srun was given:")
    expected = "  srun --nodes 2 --ntasks 4 --cpus-per-task 3 python -m project.fit --run_name "
    assert command.startswith(expected)
    for name in ("SLURM_STEP_ID", *step):
        monkeypatch.delenv(name)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    first, command = progress.stopped_lines("python -m project.fit", tmp_path, 5, 5)
    assert first.endswith("To go on, by the launcher that has set RANK and WORLD_SIZE:")
    assert command.startswith("  python -m project.fit --run_name ")
