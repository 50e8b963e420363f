"""Promise 10, for 3,000 inputs that nobody would think of: no traceback, one line, and nothing
written when refused.

The inputs are a function of the seed. ``FUZZ_SEED=2 python -m pytest -m nightly
tests/test_fuzz.py`` tries others; ``FUZZ_SHARE=0.1`` a tenth of them.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from PIL import Image
from unbroken.tables import flat

from tests import fuzzed
from tests.commands import TINY as TINY_RUN
from tests.commands import checkpoint, made_once, run
from tests.fuzzed import MODULES, Input, entries, replacements

COUNTS = {"flags": 1100, "config files": 500, "commands": 500, "files": 200, "checkpoints": 700}
TINY = [*TINY_RUN, "--max_steps", "2", "--monitors", "none"]
TO_FOUR_STEPS = ["--run_name", "small", "--ckpt_path", "last"]
TO_FOUR_STEPS += ["--max_epochs", "2", "--max_steps", "4"]
WORDS = [
    *(
        "",
        " ",
        "x",
        "a b",
        "null",
        "None",
        "~",
        "true",
        "False",
        "-1",
        "0",
        "1",
        "2",
        "0.5",
        "1.5",
        "-0.0",
        "1e3",
        "1_0",
    ),
    *(
        "nan",
        "inf",
        "-inf",
        "1e400",
        "1e-400",
        "0x10",
        "4294967296",
        "2147483648",
        "99999999999999999999",
    ),
    *(
        "-99999999999999999999",
        "[]",
        "[1, 2]",
        "[0]",
        "[-1]",
        "[null]",
        "[x, [1]]",
        "{}",
        "{a: 1}",
        "{1: 2}",
        "[[[[[[",
    ),
    *(
        "{class_path: os.system}",
        "{class_path: torch.nn.ReLU, init_args: {x: 1}}",
        "{class_path: 5}",
        "{init_args: {}}",
    ),
    *(
        "os.system",
        "torch.nn.Linear",
        "torch.optim.SGD",
        "EarlyStopping",
        "SparseAdam",
        "lightning",
        "nix.Nix",
        "..",
        ".",
    ),
    *(
        "../x",
        "/proc/x",
        "/dev/null",
        "~nouser/x",
        "x/y/z",
        "x.json",
        "x.csv",
        "x.png",
        "é→\u2028",
        "\udcff",
        "%s",
        "--",
        "-x",
    ),
    *(
        "2020-01-01",
        "00:00:01:00",
        "!!python/object:os.system {}",
        "!!float x",
        "&a [*a]",
        "*a",
        "\x1b[31m",
        "<b>",
        "a: b: c",
    ),
    *(
        "cpu",
        "SGD",
        "ddp",
        "bf16-mixed",
        "simple",
        "xla",
        "val/loss",
        "val/accuracy",
        "nothing/logged",
        "ConvNet",
        "9" * 5000,
    ),
    *(
        "x" * 3000,
        "[" * 3000,
        "1," * 500,
        "latest",
        "best",
        "last",
        "auto",
        "60s",
        "0s",
        "norm",
        "value",
        "warn",
        "min",
    ),
]
NESTED: list[Any] = [
    *(
        None,
        True,
        False,
        0,
        -1,
        1,
        10**20,
        0.5,
        float("nan"),
        float("inf"),
        "",
        "x",
        "os.system",
        [],
        [1, "x"],
        [[]],
        {},
    ),
    *(
        {"x": 1},
        {1: 2},
        {None: None},
        {"class_path": "os.system"},
        {"class_path": None},
        {"class_path": "torch.nn.ReLU"},
    ),
    *(
        {"class_path": ["x"]},
        {"init_args": 5},
        {"class_path": "EarlyStopping", "init_args": {"monitor": "nothing"}},
    ),
    *(
        [{"class_path": "ModelCheckpoint", "init_args": {"monitor": "nothing"}}],
        "x" * 3000,
        [None] * 50,
        "2020-01-01",
    ),
]
# Options of the other commands, with a command line that a value is put into
LINES = {
    "test": [
        "--data.source sample",
        "--output",
        "--ckpt_path",
        "--devices",
        "--precision",
        "--data.root",
        "--run_name",
    ],
    "predict": [
        "digit.png",
        "--ckpt_path",
        "--output",
        "--contact_sheet",
        "--trust_checkpoint",
        "",
    ],
    "export": [
        "--data.source sample",
        "--ckpt_path",
        "--output_dir",
        "--output",
        "--data.source",
    ],
    "tune": [
        "lr --steps 20",
        "--min_lr",
        "--max_lr",
        "--steps",
        "--plot",
        "--output",
        "--max_batch_size",
        "",
    ],
    "benchmark": [
        "memory --quick",
        "--n",
        "--output",
        "--plot",
        "--data.batch_size",
        "--target",
        "",
    ],
    "devices": ["", "--output", "--data.root", "--measure", ""],
    "dashboard": ["--print", "--entity", "--project", "--name", ""],
    "sweep": [
        "--trials 1 --max_time 00:00:00:02",
        "--trials",
        "--jobs",
        "--name",
        "--space",
        "--root",
        "--seed",
        "--output",
    ],
    "runs": ["", "--root", "--sort", "--output", "--report", "--seeds", ""],
}


def settings() -> dict[str, Any]:
    """Every setting that ``--print_config`` shows, as dotted names."""
    shown = run("fit", "--print_config")
    assert shown.returncode == 0, shown.stderr
    return dict(yaml.safe_load(shown.stdout))


def flags(chance: random.Random) -> Iterator[Input]:
    names = [name.removeprefix("trainer.") for name in flat(settings())] + [
        "config",
        "model",
        "data",
        "trainer",
        "help",
    ]
    names = [name for name in names if name != "data.source"]  # which may download
    while True:
        for name in chance.sample(names, len(names)):
            words = [f"--{name}", chance.choice(WORDS)]
            if chance.random() < 0.2:
                words = [f"--{name}={words[1]}"]
            elif chance.random() < 0.1:
                words[0] += chance.choice(["+", ".x", ".class_path", ".init_args.x", "+.x", "_"])
            if chance.random() < 0.2:
                words += [f"--{chance.choice(names)}", chance.choice(WORDS)]
            yield Input("fit", [*TINY, *words])


def config_files(chance: random.Random) -> Iterator[Input]:
    whole = settings()
    places = [keys for keys in entries(whole) if keys[:2] != ("data", "init_args")] + [
        (key,) for key in whole
    ]
    while True:
        changed = json.loads(json.dumps(whole))
        for keys in chance.choices(places, k=chance.choice([1, 1, 2])):
            parent = changed
            try:
                for key in keys[:-1]:
                    parent = parent[key]
                if chance.random() < 0.1:
                    parent["unknown"] = chance.choice(NESTED)
                else:
                    parent[keys[-1]] = chance.choice(NESTED)
            except (KeyError, TypeError, IndexError):  # the first change took it away
                continue
        text = yaml.safe_dump(changed)
        if chance.random() < 0.1:
            at = chance.randrange(len(text))
            text = (
                text[:at]
                + chance.choice(["\udcff", "\t", ":", "[", "}", "&", "\x00", "%", "- "])
                + text[at + 1 :]
            )
        yield Input("fit", ["--config", "c.yaml", *TINY], {"c.yaml": text})


def commands(chance: random.Random, base: str) -> Iterator[Input]:
    # each of these takes seconds where nothing is wrong with it
    slow = {"export": 0.3, "tune": 0.4, "benchmark": 0.2, "sweep": 0.4}
    while True:
        for command, (first, *options) in LINES.items():
            if chance.random() > slow.get(command, 1):
                continue
            words = first.split()
            for option in chance.sample(options, chance.choice([1, 1, 2])):
                words += [option, chance.choice(WORDS)] if option else [chance.choice(WORDS)]
            if command in ("tune", "benchmark", "sweep"):
                words += TINY
            yield Input(command, words, base=base)


def files(chance: random.Random, base: str) -> Iterator[Input]:
    """Files of a run, of a sweep and pictures with something else in them."""
    read = {
        "checkpoints/small/summary.json": [
            ("runs", []),
            ("fit", ["--run_name", "small", "--ckpt_path", "auto"]),
        ],
        "checkpoints/small/config.yaml": [
            ("runs", ["--seeds"]),
            ("fit", ["--run_name", "small", "--ckpt_path", "auto"]),
        ],
        "checkpoints/small/metrics.csv": [
            ("runs", ["--report", "x.html"]),
            ("fit", TO_FOUR_STEPS),
        ],
        "checkpoints/small/run-id.txt": [("fit", TO_FOUR_STEPS)],
        "space.yaml": [("sweep", ["--space", "space.yaml", "--trials", "1", *TINY])],
        "digit.png": [("predict", ["digit.png"])],
    }
    texts = [
        "",
        "\udcff\udcfe",
        "null",
        "[]",
        "{}",
        "[1]",
        "5",
        "x",
        "{",
        "\x00",
        "a,b\n1\n1,2,3\n",
        "step\n-1\nx\n",
        "9" * 5000,
    ]
    while True:
        for name, uses in read.items():
            command, words = chance.choice(uses)
            if command not in MODULES:
                continue
            whole = (Path(base) / name).read_bytes().decode(errors="surrogateescape")
            text = chance.choice(texts)
            if chance.random() < 0.6:
                text = edited(whole, chance)
            yield Input(command, words, {name: text}, base=base)


def edited(text: str, chance: random.Random) -> str:
    """A file with one value replaced where it is JSON or YAML; else with one byte changed."""
    try:
        whole = yaml.safe_load(text)
        keys = chance.choice(list(entries(whole)))
        parent = whole
        for key in keys[:-1]:
            parent = parent[key]
        parent[keys[-1]] = chance.choice(NESTED)
        return (
            yaml.safe_dump(whole) if not text.startswith("{") else json.dumps(whole, skipkeys=True)
        )
    except Exception:
        at = chance.randrange(len(text))
        return text[:at] + chance.choice(["", "x", "-", ",", "\udcff"]) + text[at + 1 :]


def checkpoints(chance: random.Random, base: str) -> Iterator[Input]:
    path = "checkpoints/small/last.ckpt"
    contents = checkpoint(Path(base) / path)
    places = list(entries(contents))
    values = [*replacements(), "missing", "missing"]
    go_on = ["--run_name", "small", "--ckpt_path"]
    uses = [
        ("fit", [*go_on, "last", "--max_epochs", "2", "--max_steps", "4"]),
        ("fit", [*go_on, "last", "--max_epochs", "2", "--max_steps", "4"]),
        ("fit", [*go_on, "auto", "--max_epochs", "2", "--max_steps", "4"]),
        ("fit", [*TINY, "--init_weights", path]),
        ("test", ["--ckpt_path", path]),
        ("predict", ["digit.png", "--ckpt_path", path]),
    ]
    while True:
        # every entry of the top and of our own record as often as the hundreds of the configuration
        # and the states
        depth = chance.choice([1, 2, 3, 3, 4, 9])
        keys = chance.choice([keys for keys in places if len(keys) <= depth])
        what = chance.choice(values)
        if chance.random() < 0.06:
            keys, what = (), f"{chance.choice(['cut', 'flip'])} {chance.random()}"
        command, words = chance.choice(uses)
        yield Input(command, words, base=base, change=(path, list(keys), what))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a finished run, a picture and a sweep file."""
    import shutil

    folder = tmp_path_factory.mktemp("base")
    shutil.copytree(made_once("small", *TINY).parents[0], folder / "checkpoints", symlinks=True)
    Image.new("L", (40, 40), 200).save(folder / "digit.png")
    values = {"model.lr": {"values": [0.1, 0.2]}, "model.weight_decay": {"min": 0.0, "max": 0.1}}
    space = {
        "method": "random",
        "metric": {"name": "val/accuracy", "goal": "maximize"},
        "parameters": values,
    }
    (folder / "space.yaml").write_text(yaml.safe_dump(space))
    return str(folder)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("kind", COUNTS)
def test_no_input_ends_in_a_traceback_and_a_refused_one_writes_nothing(
    kind: str, base: str, tmp_path: Path
) -> None:
    chance = random.Random(f"{os.environ.get('FUZZ_SEED', '1')} {kind}")
    made = {
        "flags": lambda: flags(chance),
        "config files": lambda: config_files(chance),
        "commands": lambda: commands(chance, base),
        "files": lambda: files(chance, base),
        "checkpoints": lambda: checkpoints(chance, base),
    }[kind]()
    count = int(COUNTS[kind] * float(os.environ.get("FUZZ_SHARE", "1")))
    assert_all_right([next(made) for _ in range(count)], tmp_path)


def assert_all_right(inputs: list[Input], folder: Path) -> None:
    (folder / "inputs.json").write_text(json.dumps([vars(given) for given in inputs]))
    (folder / "each").mkdir()
    (folder / "home").mkdir()
    words = [
        sys.executable,
        "-m",
        fuzzed.__name__,
        str(folder / "inputs.json"),
        str(folder / "each"),
    ]
    # a home without files: predict may be told to look through all of it
    environment = {
        **os.environ,
        "WANDB_MODE": "disabled",
        "OMP_NUM_THREADS": "1",
        "HOME": str(folder / "home"),
    }
    with open(folder / "wrong.jsonl", "w") as found:
        done = subprocess.run(
            words, env=environment, stdout=found, stderr=subprocess.PIPE, text=True
        )
    assert done.returncode == 0, done.stderr[-2000:]
    wrong = [json.loads(line) for line in (folder / "wrong.jsonl").read_text().splitlines()]
    told = [f"{number}: {what}\n    {shorten(inputs[number])}" for number, what in wrong]
    assert not wrong, f"{len(wrong)} of {len(inputs)} inputs:\n" + "\n".join(told)


def shorten(given: Input) -> str:
    words = [word for word in given.words if word not in TINY]
    return f"{given.command} {words} {given.change or ''} {list(given.files)}"[:300]
