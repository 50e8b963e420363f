"""Promise 20: the lines that are said to mend a resume mend it, pasted as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from unbroken.testing import assert_resumes_exactly

from tests.pasted import Classes, Fault, faults, pasted

STEPS = 9
EVERY_DAY = ("object",)
NIGHTLY = (
    *("state_that_is_there", "hook_that_is_there", "object_with_state", "class_attribute"),
    *("generator", "list"),
    *("tensor_and_array", "made_at_start", "callback_of_a_package"),
    *("optimizer", "stream", "sampler", "rows", "data_module"),
)


def train(fault: Fault, classes: Classes, parts: list[Any]) -> None:
    made: list[Any] = []

    # Each run is a process of its own, and makes its objects once.
    def training() -> Any:
        if not made:
            made.append(fault.training(classes))
        return made[0]

    flags = fault.training(classes)[2]
    assert_resumes_exactly(
        lambda: training()[0],
        lambda: training()[1],
        steps=STEPS,
        kills=1,
        trainer=flags,
        parts=parts,
    )


@pytest.mark.parametrize(
    "name", [*EVERY_DAY, *(pytest.param(each, marks=pytest.mark.nightly) for each in NIGHTLY)]
)
def test_the_lines_that_are_said_to_mend_a_run_mend_it(name: str, tmp_path: Path) -> None:
    fault = faults(tmp_path)[name]
    with pytest.raises(AssertionError) as error:
        train(fault, fault.classes, [])
    text = str(error.value)
    assert text.startswith("not exact: the run that was killed ("), text
    assert fault.says in text
    if fault.can_be_pasted:
        classes, parts = pasted(text, fault)
        train(fault, classes, parts)
    else:
        assert "def " not in text
