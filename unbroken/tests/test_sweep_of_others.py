"""Promise 15 of a sweep: in a stranger's folder it uses what a sweep of this space writes, and
nothing else.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from unbroken.cli import start as entry
from unbroken.errors import CONTROL, UserError

optuna = pytest.importorskip("optuna")

from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution  # noqa: E402
from unbroken.commands.sweep import command as sweep  # noqa: E402
from unbroken.commands.sweep import journal, results, trials  # noqa: E402
from unbroken.commands.sweep import study as studies  # noqa: E402
from unbroken.commands.sweep.space import Space  # noqa: E402
from unbroken.commands.sweep.trials import RunningTrial  # noqa: E402

CHOICES = [True, 1, None, "a b", 2.5, float("nan")]
SPACE = Space(
    {
        "lr": FloatDistribution(1e-4, 1e-2, log=True),
        "size": IntDistribution(1, 5),
        "kind": CategoricalDistribution(CHOICES),
    }
)
CLASS = json.dumps({"class_path": "theirs.Class", "init_args": {"args": "touch /tmp/theirs"}})
NAN = float("nan")
# Bytes of a file with nothing in it
LARGE = 2**33

Line = dict[str, Any]
Lines = list[Any]


def open_study(folder: Path, space: Space = SPACE) -> optuna.Study:
    return studies.open_study(folder, space, trials=4, seed=0)


def lines_of(folder: Path) -> Lines:
    return [json.loads(line) for line in (folder / "journal.log").read_text().splitlines()]


def write_lines(folder: Path, lines: Lines) -> None:
    (folder / "journal.log").write_text("".join(json.dumps(line) + "\n" for line in lines))


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """A trial that has ended, one that was stopped early, and one that runs."""
    folder = tmp_path_factory.mktemp("honest")
    study = open_study(folder)
    asked = [studies.next_trial(study, SPACE) for _ in range(3)]
    for trial in asked[:2]:
        trial.report(0.5, 0)
        trial.set_user_attr("seconds", 1.5)
    study.tell(asked[0], 0.5)
    study.tell(asked[1], state=optuna.trial.TrialState.PRUNED)
    return lines_of(folder)


def changed(kind: int, trial: int, **values: Any) -> Callable[[Lines], None]:
    """Changes the last line of a kind that is about a trial."""

    def change(lines: Lines) -> None:
        found = [at for at in lines if at["op_code"] == kind and at.get("trial_id", 0) == trial]
        found[-1].update(values)

    return change


def drawn(trial: int, name: str, value: Any) -> Callable[[Lines], None]:
    """Changes a value that a trial has drawn."""

    def change(lines: Lines) -> None:
        for line in lines:
            if line.get("param_name") == name and line["trial_id"] == trial:
                line["param_value_internal"] = value

    return change


def other(text: str, instead: str) -> Callable[[Lines], None]:
    """Changes the distributions."""

    def change(lines: Lines) -> None:
        for line in lines:
            if "distribution" in line:
                line["distribution"] = line["distribution"].replace(text, instead)

    return change


def added(kind: int, **values: Any) -> Callable[[Lines], object]:
    """Adds a line about the trial that runs."""
    return lambda lines: lines.append(
        {"op_code": kind, "worker_id": "a-1", "trial_id": 2, "study_id": 0, **values}
    )


def waiting(**values: Any) -> Callable[[Lines], None]:
    """Adds a trial that waits."""
    state = {"state": 4, "datetime_start": None, "value": None, "values": None}
    return added(4, **state, **values)


def shared(*parts: Any) -> Callable[[Lines], None]:
    """Adds what the trial that runs has told the others."""

    def change(lines: Lines) -> None:
        for number, part in enumerate(parts):
            added(9, system_attr={f"tpe:relative_params:{number}": part})(lines)

    return change


RESULT = "a result that is no number"
ODD = "what no sweep writes"
OUTSIDE = "that is not in the sweep file"
OTHERS = {
    "a class for a number": (drawn(2, "lr", CLASS), f"a value of lr {OUTSIDE}"),
    "a class for a whole number": (drawn(2, "size", CLASS), f"a value of size {OUTSIDE}"),
    "above the range": (drawn(0, "lr", 1e308), f"a value of lr {OUTSIDE}"),
    "below the range": (drawn(0, "lr", -1), f"a value of lr {OUTSIDE}"),
    "no number": (drawn(0, "lr", NAN), f"a value of lr {OUTSIDE}"),
    "a half": (drawn(0, "size", 1.5), f"a value of size {OUTSIDE}"),
    "yes": (drawn(0, "size", True), f"a value of size {OUTSIDE}"),
    "no choice": (drawn(0, "kind", 6), f"a value of kind {OUTSIDE}"),
    "a choice from the end": (drawn(0, "kind", -1), f"a value of kind {OUTSIDE}"),
    "other choices": (other("2.5", "7"), "kind with other limits"),
    "choices of another kind": (other("[true, 1,", "[true, true,"), "kind with other limits"),
    "a wider range": (other('"high": 0.01', '"high": 99'), "lr with other limits"),
    "no distribution": (changed(5, 2, distribution=3), "a distribution that is no text"),
    "a damaged distribution": (changed(5, 2, distribution="{"), None),
    "a deep distribution": (changed(5, 2, distribution="[" * 10**5), None),
    "another parameter": (changed(5, 2, param_name="model"), "a parameter that is not in the"),
    "a list for a name": (changed(5, 2, param_name=["lr"]), "a parameter that is not in the"),
    "a parameter twice": (lambda lines: lines.append(lines[2]), "lr a second time"),
    "another trial": (changed(7, 0, trial_id=3), "a trial that has not begun"),
    "a list for a trial": (changed(7, 0, trial_id=[]), "a trial that has not begun"),
    "the other direction": (changed(0, 0, directions=[1]), "another direction than the goal"),
    "two directions": (changed(0, 0, directions=[2, 1]), "another direction than the goal"),
    "another study": (added(0, study_name="x", directions=[2]), "another study than the sweep's"),
    "a deleted study": (added(1), ODD),
    "no operation": (added(True), ODD),
    "a text for a result": (changed(7, 0, intermediate_value="x"), RESULT),
    "yes for a result": (changed(7, 0, intermediate_value=True), RESULT),
    "an infinite result": (changed(6, 0, values=[1e999]), RESULT),
    "no mapping": (lambda lines: lines.append(3), "no mapping"),
    "a text for an epoch": (changed(7, 0, step="a"), "an epoch that is none"),
    "an epoch without end": (changed(7, 0, step=10**50), "an epoch that is none"),
    "no result of the end": (changed(6, 0, values=None), RESULT),
    "two results": (changed(6, 0, values=[0.3, 0.2]), RESULT),
    "a text for the end": (changed(6, 1, values="x"), RESULT),
    "an unknown state": (changed(6, 0, state=7), "an unknown state"),
    "another attribute": (changed(8, 0, user_attr={"lr\x1b[31m": "x"}), ODD),
    "a list for seconds": (changed(8, 0, user_attr={"seconds": [1]}), "seconds that are no"),
    "an attribute of Optuna": (added(9, system_attr={"fixed_params": {"lr": CLASS}}), ODD),
    "a trial of another study": (added(4, study_id=1), "a trial of another study"),
    "an end at the beginning": (added(4, state=1), "a trial that has ended as it began"),
    "values at the beginning": (waiting(params={"lr": 1}), "a trial that began with params"),
    "results at the beginning": (waiting(intermediate_values={"0": 1}), "began with results"),
    "a class that waits": (
        waiting(system_attrs={"fixed_params": {"kind": CLASS}}),
        f"a value of kind {OUTSIDE}",
    ),
    "a number that waits": (
        waiting(system_attrs={"fixed_params": {"lr": 7}}),
        f"a value of lr {OUTSIDE}",
    ),
    "a parameter that waits": (
        waiting(system_attrs={"fixed_params": {"x": 7}}),
        "a parameter that",
    ),
    "an attribute at the beginning": (waiting(system_attrs={"x": 1}), ODD),
    "a list of attributes": (waiting(system_attrs=[1]), ODD),
    "a whole number with a point": (
        waiting(system_attrs={"fixed_params": {"size": 3.0}}),
        f"a value of size {OUTSIDE}",
    ),
    "a choice of another kind": (
        waiting(system_attrs={"fixed_params": {"kind": 1.0}}),
        f"a value of kind {OUTSIDE}",
    ),
    "two attributes": (added(9, system_attr={"tpe:relative_params:0": "{}", "x": 1}), ODD),
    "a shared class before a gap": (
        lambda lines: [
            added(9, system_attr={f"tpe:relative_params:{part}": text})(lines)
            for part, text in ((7, "}"), (0, json.dumps({"kind": CLASS})))
        ],
        f"a value of kind {OUTSIDE}",
    ),
    "a shared class": (shared('{"kind": ', json.dumps(CLASS), "}"), f"a value of kind {OUTSIDE}"),
    "shared values that are none": (shared("[1]"), ODD),
    "deep shared values": (shared(*["[" * 2_000] * 60), "that are damaged"),
    "a shared list": (shared([1]), ODD),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_journal_that_no_sweep_of_this_space_has_written_is_refused(
    name: str, honest: Lines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change, odd = OTHERS[name]
    lines = json.loads(json.dumps(honest))
    change(lines)
    write_lines(tmp_path, lines)
    before = (tmp_path / "journal.log").read_bytes()
    assert entry.exit_code(lambda _: bool(open_study(tmp_path)), []) == 2
    told = capsys.readouterr().err
    assert f"{tmp_path}/journal.log " in told
    assert (odd or "is damaged in line") in told
    assert told.count("\n") == 1
    assert not CONTROL.search(told)
    assert (tmp_path / "journal.log").read_bytes() == before


def test_a_journal_of_a_sweep_is_read_again_with_all_that_it_holds(tmp_path: Path) -> None:
    seen: set[int] = set()
    for _ in range(3):  # a sweep that is stopped and goes on, with what the sampler has learned
        study = open_study(tmp_path)
        for number in range(9):
            trial = studies.next_trial(study, SPACE)
            if not study.trials[trial.number].intermediate_values:
                trial.report(trial.params["lr"], 0)
            trial.set_user_attr("seconds", 1)
            if number % 4 == 3:
                study.tell(trial, state=optuna.trial.TrialState.PRUNED)
            elif number % 4:
                study.tell(trial, trial.params["lr"])
        seen |= {line["op_code"] for line in lines_of(tmp_path)}
    assert seen >= {0, 4, 5, 6, 7, 8}
    if int(optuna.__version__.split(".")[0]) >= 5:
        assert 9 in seen, "what trials at the same time share"
    grid = Space({"kind": CategoricalDistribution(CHOICES)}, method="grid")
    (tmp_path / "grid").mkdir()
    study = open_study(tmp_path / "grid", grid)
    study.enqueue_trial(grid.grid_setting(1))
    assert len(open_study(tmp_path / "grid", grid).trials) == 1


def test_a_journal_may_have_epochs_whose_loss_is_no_number(honest: Lines, tmp_path: Path) -> None:
    lines = json.loads(json.dumps(honest))
    epoch = next(line for line in lines if line["op_code"] == 7 and line["trial_id"] == 1)
    for step, value in enumerate((NAN, 1e999, -1e999), 1):
        lines.insert(-1, {**epoch, "step": step, "intermediate_value": value})
    changed(6, 1, values=[1e999])(lines)
    write_lines(tmp_path, lines)
    study = open_study(tmp_path)
    assert len(study.trials[1].intermediate_values) == 4
    assert [row[SPACE.metric] for row in results.result_rows(study, SPACE)] == [0.5, 0.5]
    results.draw(tmp_path / "sweep.png", study, SPACE, "three trials")


def test_a_rest_of_longer_shared_values_may_stand_behind_them(
    honest: Lines, tmp_path: Path
) -> None:
    lines = json.loads(json.dumps(honest))
    shared('{"size": 3}', "4}")(lines)
    write_lines(tmp_path, lines)
    assert len(open_study(tmp_path).trials) == 3


@pytest.mark.parametrize("end", [1e-4, 1e-2])
def test_a_number_that_is_rounded_beyond_an_end_is_in_the_range(
    end: float, honest: Lines, tmp_path: Path
) -> None:
    lines = json.loads(json.dumps(honest))
    for sign in (1, -1):
        drawn(0, "lr", end * (1 + sign * 1e-15))(lines)
        write_lines(tmp_path, lines)
        assert len(open_study(tmp_path).trials) == 3


@pytest.mark.parametrize(
    ("limit", "most", "odd"),
    [
        ("MOST_BYTES", 1_000, "has more than 1,000 bytes"),
        ("MOST_TRIALS", 2, "more than 2 trials"),
        ("MOST_COPIES", 1, "more epochs than can be read"),
        ("LONGEST_LINE", 100, "no end: it is cut off or too long"),
    ],
)
def test_a_journal_has_a_most(
    limit: str, most: int, odd: str, honest: Lines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_lines(tmp_path, honest)
    monkeypatch.setattr(journal, limit, most)
    with pytest.raises(UserError, match=odd):
        open_study(tmp_path)


def test_files_of_gigabytes_are_refused_unread(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text("parameters: {lr: 1}")
    folder = tmp_path / "lr"
    folder.mkdir()
    for name in ("journal.log", "sweep.json"):
        with open(folder / name, "w") as file:
            file.truncate(LARGE)
    with pytest.raises(UserError, match=r"journal\.log has more than 67,108,864 bytes"):
        open_study(folder)
    with pytest.raises(UserError, match=r"sweep\.json is damaged"):
        sweep.claim(folder, tmp_path / "space.yaml", [])


def test_options_of_others_leave_room_for_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text("parameters: {lr: 1}")
    sweep.claim(tmp_path / "lr", tmp_path / "space.yaml", ["A" * 300_000])[1].release()
    for typed in ([], ["--x"]):
        record = tmp_path / "lr" / "sweep.json"
        record.write_text(json.dumps({**json.loads(record.read_text()), "seal": None}))
        with pytest.raises(UserError) as error:
            sweep.claim(tmp_path / "lr", tmp_path / "space.yaml", typed)
        assert len(str(error.value)) < entry.LONGEST
        assert "to go on with it" in str(error.value)


@pytest.fixture
def trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunningTrial:
    """A trial of a sweep, without a process, after three that were better."""
    process = SimpleNamespace(poll=lambda: None, terminate=lambda: None)
    monkeypatch.setattr(trials.subprocess, "Popen", lambda *_, **__: process)
    space = Space({"lr": FloatDistribution(0.0, 1.0)})
    study = open_study(tmp_path, space)
    for _ in range(3):
        good = studies.next_trial(study, space)
        good.report(0.9, 0)
        study.tell(good, 0.9)
    running = RunningTrial(studies.next_trial(study, space), space, tmp_path, ["x.fit"], {})
    running.folder.mkdir()
    return running


def test_of_a_log_the_end_is_read(trial: RunningTrial) -> None:
    with open(trial.log_path, "wb") as file:
        file.truncate(LARGE)
        file.seek(0, os.SEEK_END)
        file.write(b"\nerror: no such option" + b" \x1b[2J" * 10_000 + b"\n")
    told = trial.refusal()
    assert told.startswith(r"no such option \x1b[2J")
    assert len(told) < 10_000


@pytest.mark.parametrize("epoch", ["nan", "inf", "-1", "1e300"])
def test_epochs_that_no_trial_has_written_are_none(trial: RunningTrial, epoch: str) -> None:
    rows = f"epoch,step,val/accuracy\n0,1e400,0.5\n{epoch},1,0.4\n"
    (trial.folder / "metrics.csv").write_text(rows)
    assert trial.rows() == []
    assert not trial.watch()


@pytest.mark.parametrize(
    "text", [None, "trainer: 3", "3", "trainer: {max_epochs: x, max_steps: [1]}", "a: &a [*a]"]
)
def test_limits_that_no_trial_has_written_are_none(trial: RunningTrial, text: str | None) -> None:
    (trial.folder / "metrics.csv").write_text("epoch,val/accuracy\n0,0.5\n1,0.4\n")
    if text is not None:
        (trial.folder / "config.yaml").write_text(text)
    assert not trial.watch()
    assert trial.pruned


@pytest.mark.parametrize("seconds", [[1], "x", 1e999, {}, True])
def test_seconds_that_no_trial_has_written_are_none(trial: RunningTrial, seconds: Any) -> None:
    (trial.folder / "summary.json").write_text(json.dumps({"fit_seconds": seconds}))
    assert trial.seconds_of_training() is None


def test_a_row_has_the_seconds_of_a_trial_and_nothing_else_that_it_keeps() -> None:
    study = optuna.create_study(direction="maximize")
    asked = study.ask(SPACE.parameters)
    asked.report(0.5, 0)
    for name in (SPACE.metric, "trial", "state\x1b[31m"):
        asked.set_user_attr(name, "theirs")
    asked.set_user_attr("seconds", 1.5)
    study.tell(asked, 0.5)
    [row] = results.result_rows(study, SPACE)
    assert row == {
        "trial": 0,
        SPACE.metric: 0.5,
        **asked.params,
        "epochs": 1,
        "seconds": 1.5,
        "state": "done",
    }


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("run_name", "--run_name of space.yaml is set for every trial. Use --name and --root"),
        ("trainer.default_root_dir", "--trainer.default_root_dir of space.yaml is set for every"),
        ("monitor", "--monitor of space.yaml is set for every trial. Use `metric:`"),
        ("ckpt_path=x", "--ckpt_path of space.yaml is set for every trial."),
        ("mirror", "--mirror of space.yaml copies single runs, and no sweep. Leave it out."),
    ],
)
def test_a_sweep_file_names_no_option_that_a_sweep_sets(
    name: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sweep, "refuse_what_fit_refuses", None)
    Path("space.yaml").write_text(f"parameters: {{{name}: {{values: [1]}}}}")
    with pytest.raises(UserError) as error:
        sweep.main("numerals", ["--space", "space.yaml"])
    assert message in str(error.value)
    assert os.listdir() == ["space.yaml"]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes")
def test_a_sweep_file_is_no_named_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "space.yaml"
    os.mkfifo(pipe)
    # Without the refusal this would wait for a writer.
    writer = threading.Timer(
        0.5, lambda: os.close(os.open(pipe, os.O_RDWR | getattr(os, "O_NONBLOCK", 0)))
    )
    writer.start()
    try:
        with pytest.raises(UserError, match="--space must be an ordinary file"):
            sweep.main("numerals", ["--space", str(pipe)])
    finally:
        writer.cancel()


def test_an_error_that_nobody_expected_brings_no_control_characters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def fails(_: list[str]) -> int:
        raise KeyError("x") from ValueError("a\x1b]0;title\x07\u202e\nb")

    assert entry.exit_code(fails, []) == 1
    told = capsys.readouterr().err
    assert told.startswith("ValueError: a?]0;title??\nb\n")
    assert told.endswith("KeyError: 'x'\n")
    assert not CONTROL.search(told)
