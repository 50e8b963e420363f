"""Promise 20: whether a killed run is the undisturbed one is shown on anybody's code, and where it
is not, what to write.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from unbroken.parts.users_callbacks import users_callbacks
from unbroken.tensors.bits import tensors_and_plain
from unbroken.testing import NotRestoredWarning, assert_resumes_exactly
from unbroken.verifying.digests import of_plain, of_tensor
from unbroken.verifying.held_values import HeldValues
from unbroken.verifying.kills import ACCUMULATED, EDGE, INSIDE, VALIDATION, Kill, choose
from unbroken.verifying.operations import Operation, Operations, first_difference
from unbroken.verifying.processes import Ended
from unbroken.verifying.recordings import Recording, Row
from unbroken.verifying.trial import Start, Trial, Tried
from unbroken.verifying.verdict import judge

from tests.commands import TINY, complete, run
from tests.pasted import blocks_of
from tests.planted import PLANTED, Averages, Objects, Patience, Plain, Unseeded, table

STEPS = 12


def failure_of(make: Any, **kwargs: Any) -> str:
    """What is said of a training that does not resume exactly."""
    with pytest.raises(AssertionError) as error:
        assert_resumes_exactly(make, steps=STEPS, **kwargs)
    return str(error.value)


def test_a_run_with_nothing_hidden_resumes_exactly() -> None:
    data = torch.utils.data.DataLoader(table(104, 0), 8, shuffle=True)
    assert_resumes_exactly(
        lambda: Plain(), lambda: data, steps=STEPS, trainer={"accumulate_grad_batches": 2}
    )


TRACES = """
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from unbroken.testing import assert_resumes_exactly

with FakeTensorMode():
    torch.ones(3, requires_grad=True).sum().backward()
assert_resumes_exactly(lambda: None, lambda: None, steps=12)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no process can be forked")
def test_a_process_that_has_traced_a_backward_pass_says_that_it_cannot_fork() -> None:
    """An error of autograd's would name none of it."""
    ended = complete([sys.executable, "-c", TRACES])
    assert "this one cannot fork" in ended.stderr
    assert "Autograd-and-Fork" not in ended.stderr


@pytest.mark.nightly
def test_what_is_not_kept_is_named_with_the_lines_that_mend_it() -> None:
    text = failure_of(Plain, trainer={"callbacks": [Averages()]})
    assert text.startswith("not exact: the run that was killed (")
    assert "as soon as it was resumed" in text
    assert "1. callback Averages.losses changes in training and is not kept: it begins anew" in text

    # The lines are pasted as they are.
    body = re.search(r"(?m)((?:^       .*\n)+)", text)
    assert body is not None
    names: dict[str, Any] = {"Averages": Averages}
    exec("class Mended(Averages):\n" + body[1], names)
    assert_resumes_exactly(Plain, steps=STEPS, trainer={"callbacks": [names["Mended"]()]})


@pytest.mark.nightly
def test_an_attribute_that_changes_no_result_is_named_in_a_warning() -> None:
    with pytest.warns(NotRestoredWarning) as warned:
        assert_resumes_exactly(Plain, steps=STEPS, trainer={"callbacks": [Patience()]})
    text = str(warned[0].message)
    assert text.startswith("exact in its results, but not in callback Patience.waited: killed 2")
    assert "changed nothing in these 12 steps" in text
    assert 'return {"waited": self.waited}' in text


@pytest.mark.nightly
def test_two_undisturbed_runs_that_differ_are_said_first() -> None:
    text = failure_of(Unseeded)
    assert text.startswith("not deterministic: two undisturbed runs differ")
    assert "--deterministic true" in text
    assert "module.noise is another one in each, too" in text


def test_a_training_that_fails_is_not_taken_for_one_that_differs() -> None:
    class Fails(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise RuntimeError("no such layer")

    text = failure_of(Fails)
    assert text.startswith("the undisturbed run failed: nothing was compared.")
    assert "no such layer" in text


@pytest.mark.nightly
def test_the_command_is_silent_but_for_a_line_and_leaves_no_run(workplace: Path) -> None:
    done = run("verify", *TINY, "--steps", "6", "--kills", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    line, report = done.stdout.splitlines()
    assert line.startswith("exact: killed 1 times (")
    assert report == "report in verify.txt"
    assert [path.name for path in workplace.iterdir()] == ["verify.txt"]
    assert (workplace / "verify.txt").read_text(encoding="utf-8").startswith(line)


@pytest.mark.nightly
def test_the_command_ends_with_1_and_a_table_where_a_run_differs(workplace: Path) -> None:
    flags = ["--model", "tests.planted.Objects", "--data", "null", "--accelerator", "cpu"]
    done = run("verify", *flags, "--steps", "9", "--kills", "1")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1. module.seen changes in training and is not kept" in done.stdout
    assert [path.name for path in workplace.iterdir()] == ["verify.txt"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--run_name", "mine"], "--run_name: verify trains in a temporary folder"),
        (["--steps", "2"], "--steps must be at least 6, got 2"),
        (["--kills", "0"], "--kills must be at least 1, got 0"),
    ],
)
def test_the_command_refuses_what_it_cannot_do(
    words: list[str], says: str, workplace: Path
) -> None:
    done = run("verify", *words)
    assert done.returncode == 2
    assert says in done.stderr


def rows_of_a_run() -> list[dict[str, Any]]:
    """The moments of three epochs of four batches, two of which make a step."""
    rows: list[dict[str, Any]] = []
    step = 0
    for epoch in range(3):
        for batch in range(4):
            rows.append({"at": ["train", epoch, batch], "step": step})
            step += batch % 2
            rows.append({"at": ["trained", epoch, batch], "step": step})
        rows.append({"at": ["validation", step, 0, 0], "step": step})
        rows.append({"at": ["epoch", epoch], "step": step})
    return rows


def test_kills_are_of_every_kind_and_in_the_order_of_the_run() -> None:
    rows = rows_of_a_run()
    chosen = choose(rows, 4, seed=1)
    assert {kill.kind for kill in chosen} == {INSIDE, VALIDATION, ACCUMULATED, EDGE}
    moments = [row["at"] for row in rows]
    places = [moments.index(kill.moment) for kill in chosen]
    assert places == sorted(places)
    assert chosen == choose(rows, 4, seed=1)
    assert any(choose(rows, 4, seed) != chosen for seed in range(5))


def test_the_sentence_and_the_file_name_the_same_starts(tmp_path: Path) -> None:
    rows: dict[Any, Row] = {(0, "train", 0, 0): Row(4, {}, 0)}
    undisturbed = Tried(Recording(rows), Ended(0, "", 1.0))
    # The first start came before anything was saved.
    starts: list[Any] = [(0, "train", 0, 0), (0, "train", 0, 2), (0, "train", 1, 0)]
    of_each = [Kill(INSIDE, ["train", 0, 1])] * len(starts)
    killed = Tried(Recording(rows, starts), Ended(0, "", 1.0), of_each)
    trial = Trial(lambda _: 0, tmp_path, 3, first=undisturbed, second=undisturbed, killed=killed)
    text = judge(trial).text
    assert "killed 3 times" in text
    assert "and resumed 2 times, begun anew 1 times" in text
    assert text.count("\nresumed at epoch") == 2
    assert text.count("\nbegun anew at epoch 1, batch 0") == 1


def test_one_bit_makes_another_digest() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
        tensor = torch.zeros(3, 2, dtype=dtype)
        other = tensor.clone()
        other.view(torch.uint8)[1, 0] = 1
        one, two = of_tensor(tensor, with_rows=True), of_tensor(other, with_rows=True)
        assert one.digest != two.digest
        assert [a == b for a, b in zip(one.rows, two.rows, strict=True)] == [True, False, True]
    assert of_tensor(torch.zeros(2, 3)).digest != of_tensor(torch.zeros(3, 2)).digest
    assert of_tensor(torch.tensor(0.0)).digest != of_tensor(torch.tensor(-0.0)).digest


def test_values_are_found_wherever_an_object_holds_them() -> None:
    count = 3

    def counts() -> int:
        return count

    class Holder:
        __slots__ = ("inside",)

    holder = Holder()
    holder.inside = {"a": [torch.ones(1)], "b": counts}  # type: ignore[attr-defined]
    found = HeldValues().of({"it": holder}, [])
    assert found["it.inside['a'][0]"].shown == "[1.0]"
    assert found["it.inside['b']()'s count"].shown == "3"


@pytest.mark.nightly
@pytest.mark.parametrize("name", list(PLANTED))
def test_a_planted_fault_is_found_and_its_cause_named(name: str, workplace: Path) -> None:
    planted = PLANTED[name]
    with pytest.raises(AssertionError) as error:
        assert_resumes_exactly(planted.make, steps=18, trainer=planted.trainer)
    for words in planted.says:
        assert words in str(error.value)
    for block in blocks_of(str(error.value)):
        if not block.startswith("--"):
            # Methods of a class, or classes
            ast.parse(f"class Any:\n    ...\n{textwrap.indent(block, '    ')}")


@pytest.mark.nightly
def test_the_command_ends_with_0_and_names_an_attribute_that_changes_no_result(
    workplace: Path,
) -> None:
    flags = ["--model", "tests.planted.Unread", "--data", "null", "--accelerator", "cpu"]
    done = run("verify", *flags, "--steps", "9", "--kills", "1")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("exact in its results, but not in module.seen: ")
    assert "1. module.seen changes in training and is not kept" in done.stdout


@pytest.mark.nightly
def test_two_ranks_are_compared_each(workplace: Path) -> None:
    ranks = ["--devices", "2", "--strategy", "ddp"]
    done = run("verify", *TINY, *ranks, "--steps", "6", "--kills", "1", fresh=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("exact: ")


@pytest.mark.nightly
def test_a_rank_that_differs_is_named(workplace: Path) -> None:
    flags = ["--model", "tests.planted.Objects", "--data", "null", "--accelerator", "cpu"]
    ranks = ["--devices", "2", "--strategy", "ddp"]
    done = run("verify", *flags, *ranks, "--steps", "6", "--kills", "1", fresh=True, timeout=280)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "module.seen changes in training and is not kept" in done.stdout


def test_a_set_of_objects_counts_by_its_number() -> None:
    one, other = Objects(), Objects()
    one.seen.add(object())
    entries = [HeldValues().of({"module": each}, []) for each in (one, other)]
    assert [each["module.seen"].shown for each in entries] == ["1 entries", "0 entries"]


def test_an_object_that_raises_at_every_question_stops_nothing() -> None:
    class Raises:
        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(name)

    values = HeldValues()
    found = values.of({"module": {"a": Raises(), "b": [1, torch.ones(1)]}}, [])
    assert found["module['b'][1]"].shown == "[1.0]"


def test_the_first_operation_that_differs_is_named_with_its_module() -> None:
    def step(factor: float) -> list[Operation]:
        torch.manual_seed(1)
        module = Plain()
        operations = Operations(module)
        operations.begin()
        loss = module.net(torch.ones(2, 4)).sum()
        (loss * factor).backward()
        operations.end()
        return operations.found

    one = step(1.0)
    assert first_difference(one, step(1.0)) is None
    differs = "aten.mul.Tensor outside of modules, with the same operations and results before it"
    assert first_difference(one, step(2.0)) == differs
    assert any(each.module == "net.0" and "addmm" in each.name for each in one)
    assert any(each.is_backward and not each.module for each in one)


def test_one_object_under_two_names_has_an_entry_under_each() -> None:
    best = torch.ones(1)
    found = HeldValues().of({"it": {"best": best, "last": best}}, [])
    assert found["it['last']"] == found["it['best']"]


def test_a_number_of_numpy_is_pythons_number() -> None:
    assert of_plain(np.float64(0.1)) == of_plain(0.1)
    assert tensors_and_plain([np.float64(0.1)]) == tensors_and_plain([0.1])


def test_what_verify_adds_to_a_run_is_none_of_the_users_callbacks(tmp_path: Path) -> None:
    added = Start(tmp_path).callbacks(tmp_path / "last.ckpt")
    trainer: Any = SimpleNamespace(callbacks=[*added, Averages()])
    assert [type(each) for each in users_callbacks(trainer)] == [Averages]
