"""Promise 15: a stranger's file gives numbers, and nothing else."""

from __future__ import annotations

import errno
import importlib
import json
import os
import pickle
import re
import shutil
import socket
import struct
import sys
import textwrap
import threading
import time
import warnings
import zipfile
import zlib
from argparse import ArgumentError, Namespace
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import GenericAlias, ModuleType, UnionType
from typing import Any

import pytest
import torch
from jsonargparse import ArgumentParser
from lightning.pytorch import LightningModule
from numerals.data import MNISTDataModule
from numerals.fit import job as fit
from numerals.model import MNISTClassifier
from torch import nn
from torch.utils.data import DataLoader
from unbroken.cli import start as entry
from unbroken.cli.moved_names import with_names_of_now
from unbroken.cli.plain_values import dump_yaml
from unbroken.cli.program import Program
from unbroken.cli.read_checkpoint import first_names, load
from unbroken.commands import test as test_command
from unbroken.commands.export import command as export
from unbroken.commands.predict import command as predict
from unbroken.commands.runs import command as runs
from unbroken.errors import UserError, without_control_characters
from unbroken.storage import checkpoint_files, seals
from unbroken.storage.checkpoint_files import AtomicCheckpointIO, read, record
from unbroken.storage.reading import yaml_in
from unbroken.storage.seals import is_own
from unbroken.storage.weights import load_weights
from unbroken.tasks.by_name import imports_judged_by, named_class
from unbroken.trust import keys, torch_file
from unbroken.trust.archive import END, ENTRY, LOCAL, NoArchive
from unbroken.trust.imports import imports_asked_of
from unbroken.trust.places import is_inside, is_place
from unbroken.trust.sizes import bounded_by
from unbroken.trust.strangers import Stranger, is_allowed
from unbroken.trust.torch_file import Foreign, TooMuch, read_file

from tests.commands import checkpoint

THEIRS = "checkpoints/theirs/best.ckpt"
CANARY = "canary"
SHORT = ["--max_epochs", "1", "--monitors", "none", "--report", "false", "--log_every_n_steps", "4"]
FEW = [
    *("--data.source", "sample", "--data.train_samples", "100", "--data.val_samples", "20"),
    *("--data.test_samples", "20"),
]
MLP = ["--model.network", "MLP", "--model.network.hidden", "[8]"]
CLASSIFIER = "unbroken.tasks.ImageClassifier"


@pytest.fixture(autouse=True)
def _no_wandb(monkeypatch: pytest.MonkeyPatch, workplace: Path) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.delenv(keys.KEY_VARIABLE, raising=False)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The best.ckpt of a run of this user."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WANDB_MODE", "disabled")
        patch.chdir(tmp_path_factory.mktemp("trained"))
        assert fit.main([*FEW, *MLP, *SHORT, "--run_name", "r"]) == 0
        return Path("checkpoints/r/best.ckpt").absolute()


@pytest.fixture
def on_another_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From here on this user's own files are a stranger's."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state-of-another"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "state-of-another"))


def spec(class_path: str, **arguments: Any) -> dict[str, Any]:
    return {"class_path": class_path, "init_args": arguments}


def error_of(capsys: pytest.CaptureFixture[str], main: Any, *words: str) -> str:
    """The one line that a command prints as it refuses."""
    capsys.readouterr()
    assert entry.exit_code(main, list(words)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    return lines[0]


def exit_code_of_test(*words: str) -> int:
    return entry.exit_code(lambda argv: test_command.main("numerals", argv), list(words))


# What a process does, as Python itself reports it


@dataclass
class Deeds:
    """What happened inside :func:`watched`."""

    events: list[str] = field(default_factory=list)
    is_watching: bool = False

    def note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.is_watching:
            return
        forbidden = ("os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen")
        others = ("socket.connect", "socket.getaddrinfo", "sqlite3.connect", "pickle.find_class")
        # jsonargparse looks for the stubs of torch's types in the interpreter's folders.
        is_for_stubs = "json.dumps(sys.path)" in str(arguments)
        if event in (*forbidden, *others) and not is_for_stubs:
            self.events.append(f"{event} {arguments}")
        if event == "import" and str(arguments[0]).split(".")[0] in ("evil", "this", "antigravity"):
            self.events.append(f"import {arguments[0]}")


DEEDS = Deeds()
sys.addaudithook(DEEDS.note)


@contextmanager
def watched() -> Iterator[Deeds]:
    DEEDS.events.clear()
    DEEDS.is_watching = True
    try:
        yield DEEDS
    finally:
        DEEDS.is_watching = False


def memory(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name):
            return int(line.split()[1]) * 1024
    raise AssertionError(name)


# Forged files. Each is a change of a whole checkpoint, or of the entries of its archive.


def model(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """Another argument of the module."""

    def forge(contents: dict[str, Any]) -> None:
        contents["run"]["config"]["model"]["init_args"][key] = value

    return forge


def trainer(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def forge(contents: dict[str, Any]) -> None:
        contents["run"]["config"]["trainer"][key] = value

    return forge


def data(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    def forge(contents: dict[str, Any]) -> None:
        contents["run"]["config"]["data"]["init_args"][key] = value

    return forge


def nested_classes(depth: int) -> dict[str, Any]:
    """A class in the arguments of another, and so on. The parser reads each again and again."""
    found = spec("torch.nn.ReLU")
    layer = spec("torch.nn.TransformerEncoderLayer", d_model=8, nhead=1)
    for _ in range(depth):
        found = spec("torch.nn.TransformerEncoder", encoder_layer=layer, num_layers=1, norm=found)
    return found


class Planted(nn.Module):
    """A class that is imported, and is nobody's: jsonargparse finds it by its last name."""

    def __init__(self) -> None:
        super().__init__()
        Path(CANARY).touch()


# What steers how weights are loaded, in what nn.Module knows of a part
STEERED = {"assign_to_params_buffers": True}
COMMAND = {"args": f"touch {CANARY}", "shell": True}
POPEN = spec("subprocess.Popen", **COMMAND)
# What once ran something, wrote, fetched or took memory. All is refused by test, predict, export.
REFUSED: dict[str, Callable[[dict[str, Any]], None]] = {
    "unpickles bytes": model(
        "optimizer_args",
        {"x": spec("torch.utils.data.datapipes.utils.decoder.basichandlers", data="!!binary x")},
    ),
    "runs a command": model("network", POPEN),
    "a command of the tests": model("network", spec("tests.commands.complete", words=["touch"])),
    "a type hint's class": model(
        "network",
        spec(
            "lightning.fabric.strategies.launchers.subprocess_script._ChildProcessObserver",
            child_processes=[COMMAND],
        ),
    ),
    "imports a module": model("network", spec("torch.nn.attention._fa3._fa3_import_module")),
    "opens a database": model("network", spec("unbroken.commands.sweep.trials.RunningTrial")),
    "an alias": model("network", spec("torch.utils.collect_env.subprocess.Popen", **COMMAND)),
    "a function": model("network", spec("torch.utils.collect_env.run", command="touch canary")),
    "maps a file": model("network", spec("torch.from_file", filename=CANARY, shared=True, size=1)),
    "an attribute": model("network", spec("torch.nn.Module.forward.__globals__.pop")),
    "as YAML": model("network", "{class_path: subprocess.Popen, init_args: {args: touch canary}}"),
    "in a key": model("optimizer_args", {"{class_path: subprocess.Popen}": 1}),
    "with a dot": model("optimizer_args", {"x.class_path": "subprocess.Popen"}),
    "a loss as text": model("loss", "unittest.__main__.json"),
    "arguments alone": model("network", {"init_args": COMMAND}),
    "a list of arguments": model("network", {"class_path": "torch.nn.Linear", "init_args": [1]}),
    "no arguments": model("network", {}),
    "a list of arguments of the module": lambda contents: contents["run"]["config"]["model"].update(
        init_args=[1, 2]
    ),
    "arguments as text": lambda contents: contents["run"]["config"]["model"].update(init_args="x"),
    "a document": model(
        "optimizer_args", {"x": '--- {"class_path":"checkpoints.theirs.evil.Net"}'}
    ),
    "a short name": model("network", "Planted"),
    "a short name in a list": data("transforms", ["Planted"]),
    "a short name that is added to a list": data("transforms+", ["Planted"]),
    "planted in a folder with a hyphen": lambda contents: contents["run"]["config"].update(
        model=spec(
            "unbroken.tasks.SupervisedModule",
            network=spec("torch.nn.Flatten"),
            loss="checkpoints.run-1.evil.Net",
        )
    ),
    "a metric of any name": lambda contents: contents["run"]["config"].update(
        model=spec(
            "unbroken.tasks.SupervisedModule",
            network=spec("torch.nn.Flatten"),
            metrics={"monitor": "checkpoints.theirs.evil.Net"},
        )
    ),
    "a data module": lambda contents: contents["run"]["config"].update(data=POPEN),
    "our own command line": model("network", spec("unbroken.cli.typed.CommandLine")),
    "our own main job": model("network", spec("numerals.fit.main")),
    "a metric with lists": model("metrics", {"x": spec("torchmetrics.text.BLEUScore", n_gram=9)}),
    "a picture": data("transforms", [spec("torchvision.transforms.v2.Resize", size=60000)]),
    "planted": model("network", spec("checkpoints.theirs.evil.Net")),
    "planted as data": model("network", spec("data.evil.Net")),
    "a script": model("network", spec("cleanup.Path")),
    "a script's class": model("network", spec("cleanup.Net")),
    "a class section many times": data("transforms", [spec("torch.nn.ReLU")] * 300),
    "classes in each other": model("network", nested_classes(6)),
    "many numbers": model("network", spec("numerals.model.networks.MLP", hidden=[1] * 1000)),
    "many lists": model("optimizer_args", {"x": [[1] * 300] * 6}),
    "a section in disguise": lambda contents: contents["run"]["config"].update(
        {"trainer.logger": [spec("CSVLogger", save_dir="/elsewhere")]}
    ),
    "a long text": model("optimizer_args", {"x": "x" * 50_000}),
    "a long name": model("network", spec("x." * 4_500 + "x")),
    "aliases": model("optimizer_args", {"x": "{a: &a [x, x], b: &b [*a, *a], c: &c [*b, *b]}"}),
    "brackets": model("optimizer_args", {"x": "[" * 500}),
    "a large layer": model(
        "network", spec("torch.nn.Linear", in_features=10**5, out_features=10**5)
    ),
    "many layers": model(
        "network", spec("torch.nn.LSTM", input_size=1, hidden_size=1, num_layers=10**9)
    ),
    "many copies": model(
        "network", spec("torch.nn.Transformer", d_model=8, nhead=1, num_encoder_layers=10**9)
    ),
    "another network": model("network", spec("torch.nn.Linear", in_features=2, out_features=3)),
}
# What is not used at all, so that these commands work. Only a resume is refused.
HARMLESS: dict[str, Callable[[dict[str, Any]], None]] = {
    "a name as text": model("optimizer", "subprocess.Popen"),
    "beside": trainer("logger", [spec("CSVLogger", save_dir="file://../checkpoints/x")]),
    "root": trainer("logger", [spec("CSVLogger", save_dir="file:///../checkpoints/x")]),
    "http": trainer("logger", [spec("CSVLogger", save_dir="http://127.0.0.1:PORT/../x")]),
    "width": trainer("callbacks", [spec("ModelCheckpoint", filename="{epoch:01000000000d}")]),
    "a callback": trainer("callbacks", [spec("evil.Callback")]),
    "a strategy": trainer("strategy", "evil.Strategy"),
    "spikes": trainer("callbacks", [spec("lightning.pytorch.callbacks.SpikeDetection")]),
    "functions": trainer("callbacks", [spec("LambdaCallback", setup="print")]),
    "a profiler": trainer("profiler", spec("SimpleProfiler", dirpath="/elsewhere", filename="f")),
    "workers": data("num_workers", 120),
    "batches ahead": data("prefetch_factor", 10**9),
    "another root": data("root", "/elsewhere"),
    "an address": data("root", "http://127.0.0.1:PORT/x"),
    "a state": lambda contents: contents["callbacks"].update(
        ModelCheckpoint={"best_k_models": {"/precious": 1.0}, "kth_best_model_path": "/precious"}
    ),
    "attributes": lambda contents: contents["run"]["state"]["ranks"][0].update(
        attributes={"data.may_download": True, "data.num_workers": 120}
    ),
    "an odd state": lambda contents: contents["run"].update(state={"ranks": [[7]]}),
    "control characters": lambda contents: contents["run"].update(run_name="r\x1b]0;t\x07\x1b[2J"),
}


def u(text: str) -> bytes:
    return b"X" + len(text).to_bytes(4, "little") + text.encode()


def in_callbacks(opcodes: bytes) -> Callable[[list[tuple[str, bytes]]], list[tuple[str, bytes]]]:
    """Put a value, as opcodes of pickle make it, in the place of a text."""

    def rewrite(parts: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        assert any(u("MARK") in each for name, each in parts if name.endswith("data.pkl"))
        return [
            (name, each.replace(u("MARK"), opcodes) if name.endswith("data.pkl") else each)
            for name, each in parts
        ]

    return rewrite


def whole_pickle(pickled: bytes) -> Callable[[list[tuple[str, bytes]]], list[tuple[str, bytes]]]:
    def rewrite(parts: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        return [(name, pickled if name.endswith("data.pkl") else each) for name, each in parts]

    return rewrite


def encoded_again(times: int) -> bytes:
    call = b"c_codecs\nencode\n"
    value = call + u("a" * 64) + u("utf-8") + b"\x86R"
    for _ in range(times):
        value = call + value + u("hex") + b"\x86R"
    return value


def nested_key() -> bytes:
    """A dictionary with one key: 60 tuples in each other, each holding the one before twice."""
    value = b"\x80\x02}q\x00" + u("x") + b"\x85q\x01"
    for place in range(1, 60):
        value += bytes([ord("h"), place]) + b"\x86q" + bytes([place + 1])
    return value + b"K\x01s."


def colliding_keys(count: int) -> bytes:
    """Tuples of two numbers that have one hash (the hash of a tuple is xxHash of its elements')."""
    mask = 2**64 - 1
    first, second, last = 11400714785074694791, 14029467366897019727, 2870177450012600261
    inverse = pow(second, -1, 2**64)
    target = 12345
    value = b"}("
    found = 0
    lane = 0
    while found < count:
        lane += 1
        total = (last + lane * second) & mask
        total = ((total << 31 | total >> 33) & mask) * first & mask
        other = (target - total) * inverse & mask
        if other < 2**59:
            found += 1
            value += b"K\x01" if lane == 1 else b"J" + struct.pack("<i", lane)
            value += b"\x8a\x08" + other.to_bytes(8, "little") + b"\x86N"
    return value + b"u"


class Payload:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {CANARY}",)


REWRITTEN: dict[str, Callable[[list[tuple[str, bytes]]], list[tuple[str, bytes]]]] = {
    "a payload": whole_pickle(pickle.dumps(Payload(), protocol=2)),
    "a payload inside": in_callbacks(b"cposix\nsystem\n" + u(f"touch {CANARY}") + b"\x85R"),
    "encoded in hex": in_callbacks(encoded_again(23)),
    "an array of bytes": in_callbacks(b"c__builtin__\nbytearray\nJ\x00\x00\x00\x7f\x85R"),
    "a key that is hashed for ever": whole_pickle(nested_key()),
    "keys with one hash": in_callbacks(colliding_keys(3000)),
    "deep lists": in_callbacks(b"]" * 3000 + b"a" * 2999),
    "a million lists": in_callbacks(b"(" + b"]" * 2_000_000 + b"l"),
    "a million dictionaries": in_callbacks(b"](" + b"}" * 2_000_000 + b"e"),
    "a long text, many times": in_callbacks(
        b"](" + u("x" * 1_000_000) + b"r\x01\x00\x10\x00" + b"2" * 1_000_000 + b"e"
    ),
    "tensors of nothing": in_callbacks(
        b"](" + b"ctorch._utils\n_rebuild_tensor_v2\n" + b")R" * 1_000_000 + b"e"
    ),
    "a second pickle": lambda parts: [
        ("best/0data.pkl", b"\x80\x02N."),
        *whole_pickle(nested_key())(parts),
    ],
    "a second data.pkl": lambda parts: [*parts, (parts[0][0], b"\x80\x02N.")],
    "two roots": lambda parts: [("x/data.pkl", b"\x80\x02N."), *parts],
}


def multiplied(contents: dict[str, Any]) -> None:
    item: list[Any] = ["x"] * 10
    for _ in range(40):
        item = [item, item]
    contents["callbacks"]["more"] = item


def hidden(contents: dict[str, Any]) -> None:
    """Many values in dictionaries whose methods say that there are none."""
    item: Any = OrderedDict(a=1)
    item.values = Counter
    contents["callbacks"]["more"] = item


def huge(contents: dict[str, Any]) -> None:
    contents["state_dict"]["more"] = torch.zeros(1).expand(2**40)


def sparse(contents: dict[str, Any]) -> None:
    """A shape of 2**60 values, of which one is stored."""
    contents["state_dict"]["more"] = torch.sparse_coo_tensor(
        [[0], [0]], [1.0], (2**30, 2**30), check_invariants=True
    )


REFUSED |= {"multiplied": multiplied, "hidden": hidden, "huge": huge, "sparse": sparse}


def prefixed(whole: bytes) -> bytes:
    return pickle.dumps(Payload(), protocol=2) + whole


def with_two_directories(whole: bytes) -> bytes:
    return whole + whole


def without_an_end(whole: bytes) -> bytes:
    return whole[: len(whole) // 2]


def flipped(whole: bytes) -> bytes:
    place = len(whole) // 2
    return whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :]


def pickled_alone(whole: bytes) -> bytes:
    return pickle.dumps(Payload())


BYTES: dict[str, Callable[[bytes], bytes]] = {
    each.__name__: each
    for each in (prefixed, with_two_directories, without_an_end, flipped, pickled_alone)
}
KINDS = [*REFUSED, *HARMLESS, *REWRITTEN, *BYTES, "compressed"]


def with_port(value: Any, port: str) -> Any:
    if isinstance(value, dict):
        return {with_port(key, port): with_port(item, port) for key, item in value.items()}
    if isinstance(value, list):
        return [with_port(item, port) for item in value]
    return value.replace("PORT", port) if isinstance(value, str) else value


def forge(trained: Path, kind: str, path: str = THEIRS, port: int = 0) -> None:
    """Write a stranger's file of this kind, in a folder of a run with what he may put there."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    for name in ("config.yaml", "run-id.txt"):
        shutil.copy(trained.parent / name, Path(path).parent)
    evil = f"open({CANARY!r}, 'w')\nimport torch\nclass Net(torch.nn.Identity): ...\n"
    for folder in (Path(path).parent, Path(path).parents[1] / "run-1"):
        folder.mkdir(exist_ok=True)
        (folder / "evil.py").write_text(evil)
    contents = checkpoint(trained)
    contents["run"]["seal"] = None
    if kind in REWRITTEN:
        contents["callbacks"]["zzz"] = "MARK"
    for changes in (REFUSED, HARMLESS):
        if kind in changes:
            changes[kind](contents)
    contents["run"]["config"] = with_port(contents["run"]["config"], str(port))
    torch.save(contents, path)
    if kind in REWRITTEN or kind == "compressed":
        with zipfile.ZipFile(path) as archive:
            parts = [(name, archive.read(name)) for name in archive.namelist()]
        packing = zipfile.ZIP_DEFLATED if kind == "compressed" else zipfile.ZIP_STORED
        with zipfile.ZipFile(path, "w", packing) as archive:
            for name, each in REWRITTEN.get(kind, list)(parts):
                archive.writestr(name, each)
    if kind in BYTES:
        Path(path).write_bytes(BYTES[kind](Path(path).read_bytes()))


COMMANDS: dict[str, tuple[Any, list[str]]] = {
    "test": (lambda argv: test_command.main("numerals", argv), ["--ckpt_path", THEIRS]),
    "predict": (
        lambda argv: predict.main("numerals", argv),
        ["digit.png", "--ckpt_path", THEIRS],
    ),
    "export": (
        lambda argv: export.main("numerals", argv),
        ["--ckpt_path", THEIRS, "--formats", "safetensors", "--output_dir", "out"],
    ),
    "fit": (fit.main, ["--ckpt_path", THEIRS, "--max_epochs", "2"]),
    "runs": (lambda argv: runs.main("numerals", argv), []),
}


def draw_digit() -> None:
    from PIL import Image

    image = Image.new("L", (28, 28))
    image.paste(255, (12, 4, 16, 24))
    image.save("digit.png")


@pytest.fixture
def surroundings(monkeypatch: pytest.MonkeyPatch, trained: Path) -> Iterator[tuple[int, list[Any]]]:
    """What a stranger's file could use: scripts of the user's, a picture, a server that listens."""
    draw_digit()
    monkeypatch.syspath_prepend(str(Path.cwd()))
    script = f"from pathlib import Path\nopen({CANARY!r}, 'w')\nclass Net: ...\n"
    Path("cleanup.py").write_text(script)
    Path("data").mkdir()
    Path("data/evil.py").write_text(script)
    connections: list[Any] = []
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()

        def serve() -> None:
            with pytest.MonkeyPatch.context():
                while True:
                    try:
                        connections.append(server.accept())
                    except OSError:
                        return

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1], connections


@pytest.mark.daily(47)
@pytest.mark.filterwarnings("ignore:Duplicate name")
@pytest.mark.parametrize(
    ("kind", "command"),
    [
        pytest.param(
            kind,
            command,
            marks=() if command == "test" or not number % 7 else pytest.mark.nightly,
        )
        for number, kind in enumerate(KINDS)
        for command in COMMANDS
    ],
)
def test_a_forged_file_is_refused_in_one_line_or_harmless(
    kind: str,
    command: str,
    trained: Path,
    surroundings: tuple[int, list[Any]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    port, connections = surroundings
    forge(trained, kind, port=port)
    main, words = COMMANDS[command]
    before = {path: path.stat().st_mtime_ns for path in Path.cwd().rglob("*")}
    size = Path(THEIRS).stat().st_size
    torch.zeros(1).add(1)
    can_measure = Path("/proc/self/clear_refs").exists()
    if can_measure:
        Path("/proc/self/clear_refs").write_text("5")
        taken = -memory("VmRSS")
    capsys.readouterr()
    began = time.monotonic()
    with watched() as deeds:
        code = entry.exit_code(main, words)
    seconds = time.monotonic() - began
    if can_measure:
        taken += memory("VmHWM")
        assert taken < 3 * size + 160 * 2**20
    shown = capsys.readouterr()
    if command == "runs" or (command != "fit" and kind in HARMLESS):
        assert code == 0, shown.err
        assert not set(shown.out) & {"\x1b", "\x07"}
    else:
        lines = [line for line in shown.err.splitlines() if line.startswith("error: ")]
        assert (code, len(lines)) == (2, 1), shown.err
        assert "Traceback" not in shown.err
    assert not deeds.events
    assert not connections
    assert seconds < 10
    out = Path.cwd() / "out"
    caches = list(Path.cwd().rglob("__pycache__"))
    after = {path: path.stat().st_mtime_ns for path in Path.cwd().rglob("*")}
    changed = {path for path in after if after[path] != before.get(path) and path not in caches}
    changed = {path for path in changed if "__pycache__" not in path.parts and path != out}
    assert {path.name for path in changed} <= {"checkpoints", "theirs", "model.safetensors"}
    assert not Path(CANARY).exists()


def test_each_class_of_a_stranger_is_refused_before_it_is_imported(
    trained: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "theirs_9.py").write_text("raise SystemExit('imported')\n")
    monkeypatch.syspath_prepend(str(tmp_path / "elsewhere"))
    REFUSED["one"] = model("network", spec("theirs_9.Net", size=3))
    forge(trained, "one")
    del REFUSED["one"]
    line = error_of(capsys, COMMANDS["test"][0], "--ckpt_path", THEIRS)
    assert line == (
        f"error: --ckpt_path {THEIRS}: model.network in its configuration names theirs_9.Net, which"
        " is no class of yours, of a task or of torch.nn. Nothing was imported. To use it, type"
        " --model.network CLASS, or add --trust_checkpoint true if you trust who made the file."
    )
    assert "theirs_9" not in sys.modules


# Texts: the parser reads YAML, and takes some texts for names


@pytest.mark.parametrize(
    "text",
    [
        *('--- {"class_path":"a.B"}', '---\r{"a":"b"}', "--- a.B", "a.B\n---", "...\n{a: b}"),
        *(
            '\ufeff{"class_path":"a.B"}',
            '#\r{"class_path":"a.B"}',
            '#\x85{"a":"b"}',
            '#\u2028{"a":"b"}',
        ),
        *('{"a":"b"}', "{a: b}", '[{"a":"b"}]', "- a", "a b: c", "? a", "a b:\n  c", '\t{"a":"b"}'),
        *("!!python/name:os.system", "!!binary aGk=", "!!map {a: b}", "! a.B", "!<tag:x> a.B"),
        *("&a a.B", "*a", '% YAML 1.1\n--- {"a":"b"}', "%\n--- !y a", "|\n a.B"),
        *('"a.B"', "'a.B'", " a.B", "a.B ", "a.B #", "a.B\n", "\x01a.B"),
    ],
)
@pytest.mark.parametrize(
    "place",
    [
        lambda text: {"network": text},
        lambda text: {"optimizer_args": {"x": [[text]]}},
        lambda text: {"optimizer_args": {text: 1}},
        lambda text: {"network": {"class_path": text}},
    ],
    ids=["value", "in lists", "key", "class"],
)
def test_a_text_that_the_parser_reads_as_more_than_this_text_is_refused(
    place: Callable[[str], dict[str, Any]], text: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="in its configuration "):
        Stranger(tmp_path, [], {}).settings({"model": spec(CLASSIFIER, **place(text))})


@pytest.mark.parametrize(
    "text",
    [
        "AdamW",
        "val/loss",
        "1e5",
        "0.5",
        "true",
        "null",
        "",
        " ",
        "a, b",
        "#ff0000",
        "é 数",
        "a.b",
    ],
)
def test_an_ordinary_text_is_used_as_it_is(text: str, tmp_path: Path) -> None:
    given = {"model": spec(CLASSIFIER, optimizer_args={"x": text})}
    assert Stranger(tmp_path, [], {}).settings(given) == given


# The gate before each import


EVIL = "checkpoints.theirs.evil.Net"


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module of a stranger's, in a folder that Python looks into."""
    folder = Path("checkpoints/theirs")
    folder.mkdir(parents=True)
    (folder / "evil.py").write_text(f"open({CANARY!r}, 'w')\nclass Net: ...\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    yield
    assert not Path(CANARY).exists()


def stranger_with(value: Any, typed: dict[str, Any] | None = None) -> Stranger:
    """A stranger whose file has this argument."""
    stranger = Stranger(Path("x"), [], typed or {})
    stranger.settings({"model": spec(CLASSIFIER, x=value)})
    return stranger


def parsed_as(hint: Any, value: Any) -> Any:
    """What the command line's parser makes of a value, for an argument of that type."""
    parser = ArgumentParser(exit_on_error=False)
    parser.add_argument("--x", type=hint)
    return parser.parse_object({"x": value}).x


@pytest.mark.parametrize("name", [EVIL, "os.system", "antigravity.fly", "torch.hub.load"])
@pytest.mark.parametrize(
    ("hint", "value"),
    [
        (nn.Module, "{}"),
        (Callable[..., Any], "{}"),
        (Callable[[int], nn.Module], "{}"),
        (type[nn.Module], "{}"),
        (type, "{}"),
        (ModuleType, "{}"),
        (UnionType, "{} | None"),
        (GenericAlias, "list[{}]"),
        (dict[str, nn.Module], {"monitor": "{}"}),
        (dict[str, list[Callable[..., Any]]], {"monitor": ["{}"]}),
        (tuple[int, Callable[..., Any] | None], [1, "{}"]),
    ],
)
def test_a_name_is_asked_for_before_it_is_imported_whatever_takes_it(
    hint: Any, value: Any, name: str, planted: None
) -> None:
    def named(part: Any) -> Any:
        if isinstance(part, dict):
            return {key: named(item) for key, item in part.items()}
        if isinstance(part, list):
            return [named(item) for item in part]
        return part.format(name) if isinstance(part, str) else part

    value = named(value)
    with (
        watched() as deeds,
        imports_asked_of(stranger_with(value)),
        pytest.raises(
            (UserError, ArgumentError), match=r"which is no class of yours|type expression"
        ),
    ):
        parsed_as(hint, value)
    assert not deeds.events
    assert "antigravity" not in sys.modules


def test_a_text_is_a_name_only_where_what_takes_it_asks_for_one(planted: None) -> None:
    for text in (EVIL, "test.loss", "os.system"):
        with watched() as deeds, imports_asked_of(stranger_with({"x": text})):
            assert parsed_as(str, text) == text
            assert parsed_as(dict[str, Any], {"network": text}) == {"network": text}
        assert not deeds.events


def test_what_the_user_names_is_imported_beside_a_strangers_texts(planted: None) -> None:
    with imports_asked_of(stranger_with(["dedent", "CTCLoss", "torch.nn.ReLU"])):
        # As a default, which no text of the file names
        assert parsed_as(Callable[..., Any], "textwrap.dedent") is textwrap.dedent
        assert parsed_as(nn.Module, "CTCLoss").class_path == "torch.nn.CTCLoss"
        assert parsed_as(type[nn.Module], "torch.nn.ReLU") is nn.ReLU
    # Typed, and in the file as well
    with imports_asked_of(stranger_with("textwrap.dedent", {"model.x": "textwrap.dedent"})):
        assert parsed_as(Callable[..., Any], "textwrap.dedent") is textwrap.dedent
    assert parsed_as(type, "collections.Counter") is Counter, "the gate stands no more"


def test_code_of_ones_own_that_imports_by_name_imports_nothing_of_a_strangers(
    planted: None,
) -> None:
    with imports_asked_of(stranger_with([EVIL, "yours/evil"])):
        with pytest.raises(UserError, match=f"names {EVIL}, which is no class of yours"):
            importlib.import_module(EVIL.rpartition(".")[0])
        assert "checkpoints" not in sys.modules
        importlib.import_module("colorsys")


def test_the_name_of_a_metric_is_no_module(tmp_path: Path) -> None:
    given = {"model": spec(CLASSIFIER, schedule_args={"monitor": "test.loss"})}
    assert Stranger(tmp_path, [], {}).settings(given) == given


def test_the_place_where_text_becomes_a_class_asks_before_it_imports(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = Path("checkpoints/run-1")
    folder.mkdir(parents=True)
    (folder / "evil.py").write_text(f"open({CANARY!r}, 'w')\n")
    monkeypatch.syspath_prepend(str(Path.cwd()))
    stranger = Stranger(Path("x"), [], {"model.optimizer": "checkpoints.mine.Loss"})
    with imports_judged_by(stranger.allows):
        for name in ("checkpoints.run-1.evil.Net", "os.system", "torch.nn.functional.relu"):
            with pytest.raises(UserError, match="was not imported"):
                named_class("--model.loss", name, nn, nn.Module)
        for name in ("L1Loss", "torch.nn.L1Loss", "torch.nn.modules.loss.L1Loss"):
            assert named_class("--model.loss", name, nn, nn.Module) is nn.L1Loss
        with pytest.raises(UserError, match=r"No module named 'checkpoints\.mine'"):
            named_class("--model.loss", "checkpoints.mine.Loss", nn, nn.Module)
    assert not Path(CANARY).exists()


class Section(Namespace):
    """A class and its arguments, as the parser has made them."""


def made(class_path: str, **arguments: Any) -> Namespace:
    return Section(class_path=class_path, init_args=Section(**arguments))


@pytest.mark.parametrize(
    ("given", "parsed"),
    [
        ("Net", made("a.Net")),
        ({}, made("torch.nn.Linear")),
        ({"x": 1}, made("torch.nn.Linear", x=1)),
        (["Net"], [made("a.Net")]),
        (["Linear", ["Net"]], [made("torch.nn.Linear"), (made("a.Net"),)]),
        ("Net", [made("a.Net")]),
        ({"0x1": "Net"}, {1: made("a.Net")}),
        ({"x": "Net"}, Section(x=made("a.Net"))),
        (spec("torch.nn.Linear", x="Net"), made("torch.nn.Linear", x=made("a.Net"))),
        ("Net", {"class_path": "a.Net"}),
    ],
)
def test_a_class_that_the_parser_makes_of_a_strangers_value_is_judged(
    given: Any, parsed: Any, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=r"names a\.Net|is no class with arguments"):
        Stranger(tmp_path, [], {}).judge("model", given, parsed)


def test_a_class_that_a_stranger_does_not_name_is_the_users(tmp_path: Path) -> None:
    typed = {"model.network.class_path": "a.Net", "data": "a.Data"}
    stranger = Stranger(tmp_path, [], typed)
    network = made("a.Net", inner=made("a.Default"))
    given = {"class_path": "a.Net"}
    stranger.judge("model.network", given, network)
    parsed = made("torch.nn.Linear", network=network, loss=made("a.Default"))
    stranger.judge("model", spec("torch.nn.Linear", network=given), parsed)
    stranger.judge("data", {}, made("a.Data"))
    stranger.judge("more", ["Linear"], [made("torch.nn.Linear"), made("a.Added")])


# What is allowed, by rule


@pytest.mark.parametrize(
    ("name", "is_so"),
    [
        ("torch.nn.Linear", True),
        ("torch.nn.modules.linear.Linear", True),
        ("torch.nn.DataParallel", False),
        ("torch.nn.Parameter", False),
        ("torch.nn.functional.relu", False),
        ("torch.nn.modules.module._IncompatibleKeys", False),
        ("torch.float32", True),
        ("torch.load", False),
        ("torch.hub.load", False),
        ("torch.optim.AdamW", True),
        ("torch.optim.lr_scheduler.StepLR", True),
        ("torch.optim.lr_scheduler.warnings", False),
        ("torchvision.models.resnet18", True),
        ("torchvision.models.get_model", False),
        ("torchvision.datasets.MNIST", False),
        ("unbroken.tasks.ImageClassifier", True),
        ("unbroken.data.SplitDataModule", True),
        ("unbroken.data.base.copy", False),
        ("unbroken.tasks.by_name.importlib", False),
        ("unbroken.tables.write_rows", False),
        ("numerals.model.networks.MLP", True),
        ("numerals.model.networks.check_sizes", False),
        ("numerals.model.networks.nn.Linear", False),
        ("numerals.fit.Job", False),
        ("lightning.pytorch.Trainer", False),
        ("os.system", False),
        ("MLP", False),
    ],
)
def test_a_class_is_allowed_by_where_it_is_defined_and_what_it_is(name: str, is_so: bool) -> None:
    assert is_allowed(name, ["numerals"]) is is_so


def test_a_factory_of_networks_fetches_no_weights(tmp_path: Path) -> None:
    detector = "torchvision.models.detection.fasterrcnn_resnet50_fpn"
    arguments = {"network": spec(detector, weights="DEFAULT", num_classes=3)}
    given = {"model": spec(CLASSIFIER, **arguments), "trainer": {}, "seed_everything": 1}
    used = Stranger(tmp_path, [], {}).settings(given)
    network = used["model"]["init_args"]["network"]["init_args"]
    assert network == {"weights": None, "weights_backbone": None, "num_classes": 3}
    assert used.keys() == {"model"}
    # Its name alone, wherever it stands
    nothing = spec(detector, weights=None, weights_backbone=None)
    layers = {"class_path": "torch.nn.Sequential", "dict_kwargs": {"args": [detector]}}
    for network, expected in (
        (detector, nothing),
        (layers, {**layers, "dict_kwargs": {"args": [nothing]}, "init_args": {}}),
    ):
        used = Stranger(tmp_path, [], {}).settings({"model": spec(CLASSIFIER, network=network)})
        assert used["model"]["init_args"]["network"] == expected


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("typed", "may"),
    [
        ([], False),
        (["--data.test_samples", "20"], False),
        (["--data.source", "mnist"], True),
        (["--data.root", "data"], True),
    ],
)
def test_a_strangers_file_downloads_data_only_for_who_types_where_they_are(
    typed: list[str], may: bool, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from numerals.data import MNISTDataModule

    asked: list[str] = []
    monkeypatch.setattr(MNISTDataModule, "_download", lambda module: asked.append(module.root))
    REFUSED["auto"] = data("source", "auto")
    forge(trained, "auto")
    del REFUSED["auto"]
    words = ["--ckpt_path", THEIRS, *typed]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        code = exit_code_of_test(*words)
    assert asked == (["data"] if may else [])
    # Nothing was downloaded. The bundled digits are used, unless more was asked for.
    assert code == (2 if "mnist" in typed else 0)


def test_what_is_typed_takes_the_place_of_what_a_stranger_says(tmp_path: Path) -> None:
    network = spec("evil.Net", width=3)
    given = {"model": spec("evil.Model", lr=1.0, network=network, root="/x", names=["a", "/b"])}
    typed = {"model.class_path": CLASSIFIER}
    assert Stranger(tmp_path, [], typed).settings(given) == {"model": {"class_path": CLASSIFIER}}
    given["model"]["class_path"] = CLASSIFIER
    typed = {"model.network.class_path": "mine.Net"}
    used = Stranger(tmp_path, [], typed).settings(given)["model"]["init_args"]
    assert used == {
        "lr": 1.0,
        "network": {"class_path": "mine.Net", "init_args": {"width": 3}},
    } or (used == {"lr": 1.0, "network": {"class_path": "mine.Net"}})


def test_a_class_of_ones_own_package_or_further_code_needs_no_flag(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(Path.cwd()))
    for package in ("mine", "more"):
        Path(package).mkdir()
        Path(package, "__init__.py").touch()
    text = "import torch\n\n\nclass Net(torch.nn.Sequential):\n"
    text += "    def __init__(self):\n        super().__init__(torch.nn.Flatten())\n"
    Path("mine/nets.py").write_text(text)
    Path("more/nets.py").write_text(text)
    program = Program("mine", own_code=("more",))
    for name in ("mine.nets.Net", "more.nets.Net"):
        REFUSED["own"] = lambda contents, name=name: contents["run"]["config"].update(
            model=spec(CLASSIFIER, network=spec(name)), data=None
        )
        forge(trained, "own")
        del REFUSED["own"]
        with pytest.raises(UserError, match="its weights do not fit"):
            load(program, Path(THEIRS))
        assert name.rpartition(".")[0] in sys.modules
    with pytest.raises(UserError, match=r"names more\.nets\.Net"):
        load(Program("mine"), Path(THEIRS))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("swin_v2_t", marks=pytest.mark.nightly),
        pytest.param("densenet121", marks=pytest.mark.nightly),
        "efficientnet_b0",
    ],
)
def test_a_network_saved_in_half_precision_is_made(name: str, tmp_path: Path) -> None:
    import torchvision

    network = torchvision.models.get_model_builder(name)
    weights = network().state_dict()
    size = sum(weight.nbytes for weight in weights.values()) // 2
    path = tmp_path / "half.ckpt"
    with open(path, "wb") as file:
        file.truncate(size)
    with bounded_by(path, len(weights)):
        network()


def jagged(count: int) -> Any:
    return torch.nested.nested_tensor([torch.ones(count)], layout=torch.jagged)


KINDS_OF_TENSORS = {
    "coo": lambda count: torch.sparse_coo_tensor(
        torch.arange(count)[None], torch.ones(count), (10**9,)
    ),
    "csr": lambda count: torch.ones(1, count).to_sparse_csr(),
    "nested": lambda count: torch.nested.nested_tensor([torch.ones(count)]),
    "jagged": jagged,
    "MKL-DNN": lambda count: torch.ones(count).to_mkldnn(),
    "quantized": lambda count: torch.quantize_per_tensor(torch.ones(count), 0.1, 0, torch.quint8),
}


@pytest.mark.filterwarnings("ignore:.*(prototype|beta|invariant checks|deprecated)")
@pytest.mark.parametrize("kind", KINDS_OF_TENSORS)
def test_tensors_of_any_kind_are_made_unless_they_are_too_large(kind: str, tmp_path: Path) -> None:
    """The network of a colleague may hold the graph of a data set."""
    path = tmp_path / "theirs.ckpt"
    path.write_bytes(bytes(1000))
    make = KINDS_OF_TENSORS[kind]
    with bounded_by(path, 1):
        assert make(1000).numel() >= 1000
    with pytest.raises(UserError, match="larger layers than the file holds"), bounded_by(path, 1):
        make(2**25)


# What people do with files of their own


@pytest.mark.nightly
def test_a_class_that_was_typed_needs_no_flag_later_nor_on_a_machine_with_the_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = tmp_path / "installed"
    folder.mkdir()
    (folder / "somebodys.py").write_text(
        "import torch\n\n\nclass Net(torch.nn.Sequential):\n"
        "    def __init__(self, size: int = 10):\n"
        "        super().__init__(torch.nn.Flatten(), torch.nn.Linear(784, size))\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    typed = [*FEW, "--model.network", "somebodys.Net"]
    assert fit.main([*typed, *SHORT, "--run_name", "mine"]) == 0
    assert fit.main(["--run_name", "mine", "--ckpt_path", "auto", "--max_epochs", "2"]) == 0
    best = ["--ckpt_path", "checkpoints/mine/best.ckpt"]
    assert exit_code_of_test(*best) == 0
    resume = ["--run_name", "mine", "--ckpt_path", "auto", "--max_epochs", "3"]
    # Another machine of the same person, with the key's file
    machine = keys.folder()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "second"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "second"))
    if machine != keys.folder():
        shutil.copytree(machine, keys.folder())
    assert exit_code_of_test(*best) == 0
    # A colleague, without it: refused, typed, trusted
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "colleague"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "colleague"))
    refused = error_of(capsys, COMMANDS["test"][0], *best)
    assert "model.network in its configuration names somebodys.Net" in refused
    assert exit_code_of_test(*best, "--model.network", "somebodys.Net") == 0
    assert exit_code_of_test(*best, "--trust_checkpoint", "true") == 0
    refused = error_of(capsys, fit.main, *resume)
    assert "has no seal of yours, and a resume takes over all that it says" in refused
    assert fit.main([*resume, "--trust_checkpoint", "true"]) == 0
    # From now on it is the colleague's own.
    assert is_own(read(Path("checkpoints/mine/last.ckpt")))
    resume[-1] = "4"
    assert fit.main(resume) == 0


def test_a_colleagues_ordinary_run_is_tested_without_a_flag_and_its_weights_start_a_new_one(
    trained: Path, on_another_machine: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not is_own(read(trained))
    for command in ("test", "predict", "export"):
        shutil.copytree(trained.parent, "checkpoints/theirs", dirs_exist_ok=True)
        draw_digit()
        main, words = COMMANDS[command]
        assert entry.exit_code(main, words) == 0, capsys.readouterr().err
    words = [*FEW, *MLP, *SHORT, "--run_name", "new", "--init_weights", str(trained)]
    assert fit.main(words) == 0
    assert "6 of 6 tensors taken" in capsys.readouterr().out


# The file that is judged is the file that is used


class Swaps:
    """Puts a stranger's file in the place of another as soon as that was read so many times."""

    def __init__(self, trained: Path, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
        shutil.copytree(trained.parent, "checkpoints/r")
        Path("checkpoints/r/evil.py").write_text(f"open({CANARY!r}, 'w')\n")
        monkeypatch.syspath_prepend(str(Path.cwd()))
        contents = checkpoint(trained)
        contents["run"]["config"]["trainer"]["callbacks"] = [spec("checkpoints.r.evil.X")]
        contents["callbacks"]["Evil"] = {"path": "/precious"}
        contents["run"]["seal"] = None
        torch.save(contents, "evil.ckpt")
        self.reads = 0
        self._after = after
        self._open = checkpoint_files.opened
        monkeypatch.setattr(checkpoint_files, "opened", self._opened)

    def _opened(self, path: Path, check_sums: bool = False) -> Any:
        found = self._open(path, check_sums)
        self.reads += 1
        if self.reads == self._after:
            os.replace("evil.ckpt", path)
        return found


RESUME = ["--run_name", "r", "--ckpt_path", "last", "--max_epochs", "2"]
BEST = ["--ckpt_path", "checkpoints/r/best.ckpt"]


@pytest.mark.daily(2)
@pytest.mark.parametrize(
    ("main", "words", "after"),
    [
        *((fit.main, RESUME, after) for after in (2, 3)),
        (fit.main, [*RESUME, "--trust_checkpoint", "true"], 3),
        (COMMANDS["test"][0], BEST, 1),
    ],
)
def test_a_file_that_is_replaced_between_two_reads_is_refused(
    main: Any,
    words: list[str],
    after: int,
    trained: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    swaps = Swaps(trained, after, monkeypatch)
    capsys.readouterr()
    assert entry.exit_code(main, words) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    # Before or after the run's folder is locked
    is_before = "was written by another process while this one started" in lines[0]
    is_after = "was replaced while it was read, and nothing of the new file was used" in lines[0]
    assert is_before or is_after
    assert swaps.reads == after + is_after
    assert not Path(CANARY).exists()


def test_the_best_that_another_has_put_there_gives_a_runs_test_its_weights_alone(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = checkpoint(trained)
    contents["run"]["seal"] = None
    contents["callbacks"]["Evil"] = {"path": "/precious"}
    torch.save(contents, "evil.ckpt")
    seen: list[Any] = []
    load_checkpoint = AtomicCheckpointIO.load_checkpoint

    def load_and_note(io: AtomicCheckpointIO, path: Any, *more: Any, **kwargs: Any) -> Any:
        seen.append(load_checkpoint(io, path, *more, **kwargs))
        return seen[-1]

    def replace_best(*_: object) -> None:
        os.replace("evil.ckpt", "checkpoints/r/best.ckpt")

    monkeypatch.setattr(AtomicCheckpointIO, "load_checkpoint", load_and_note)
    monkeypatch.setattr(MNISTClassifier, "on_fit_end", replace_best)
    assert fit.main([*FEW, *MLP, *SHORT, "--run_name", "r"]) == 0
    assert "best.ckpt has no seal of yours: its weights alone are" in capsys.readouterr().out
    (read_for_test,) = seen
    assert "callbacks" not in read_for_test
    assert "state" not in read_for_test["run"]


@pytest.mark.parametrize("command", ["test", "predict", "export"])
def test_what_is_judged_is_what_a_command_uses(
    command: str, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stranger's file, replaced by another that these commands would refuse."""
    contents = checkpoint(trained)
    contents["run"]["seal"] = None
    Path(THEIRS).parent.mkdir(parents=True)
    torch.save(contents, THEIRS)
    swaps = Swaps(trained, 1, monkeypatch)
    draw_digit()
    main, words = COMMANDS[command]
    assert entry.exit_code(main, words) == 0
    assert swaps.reads == 1


class MakesItsHeadInSetup(LightningModule):
    """As Lightning's documentation has it: each call of setup makes the layer anew."""

    def setup(self, stage: str) -> None:
        self.head = nn.Linear(784, 10)

    def loss(self, batch: Any) -> torch.Tensor:
        images, labels = batch
        return nn.functional.cross_entropy(self.head(images.float().flatten(1) / 255), labels)

    def training_step(self, batch: Any) -> torch.Tensor:
        return self.loss(batch)

    def validation_step(self, batch: Any) -> None:
        self.log("val/loss", self.loss(batch))

    def test_step(self, batch: Any) -> None:
        self.log("test/loss", self.loss(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def test_layers_that_setup_makes_anew_get_a_strangers_weights(
    request: pytest.FixtureRequest,
) -> None:
    data = ["--data", "numerals.data.MNISTDataModule"]
    words = ["--model", f"{__name__}.MakesItsHeadInSetup", *data, *FEW]
    best = ["--monitor", "val/loss", "--mode", "min"]
    assert fit.main([*words, *SHORT, *best, "--run_name", "late"]) == 0
    tested = ["--ckpt_path", "checkpoints/late/best.ckpt", *words]
    assert exit_code_of_test(*tested, "--output", "own.json") == 0
    request.getfixturevalue("on_another_machine")
    assert exit_code_of_test(*tested, "--output", "theirs.json") == 0
    assert Path("theirs.json").read_text() == Path("own.json").read_text()


def test_a_strangers_file_is_read_once_to_predict_what_the_data_give(
    trained: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(
        MNISTDataModule,
        "predict_dataloader",
        lambda self: DataLoader(torch.zeros(4, 1, 28, 28), batch_size=2),
    )
    monkeypatch.setattr(MNISTDataModule, "on_after_batch_transfer", lambda self, batch, _: batch)
    monkeypatch.setattr(MNISTDataModule, "load_state_dict", lambda self, state: given.append(state))
    contents = checkpoint(trained)
    contents["run"]["seal"] = None
    contents["MNISTDataModule"] = {"root": "/precious"}
    Path(THEIRS).parent.mkdir(parents=True)
    torch.save(contents, THEIRS)
    swaps = Swaps(trained, 1, monkeypatch)
    main, _ = COMMANDS["predict"]
    capsys.readouterr()
    assert entry.exit_code(main, ["--ckpt_path", THEIRS, "--output", "x.json"]) == 0
    assert swaps.reads == 1
    assert not given
    assert len(json.loads(Path("x.json").read_text())) == 4


def test_a_changed_entry_makes_a_file_a_strangers(trained: Path) -> None:
    assert is_own(read(trained))
    changes: list[Callable[[dict[str, Any]], Any]] = [
        lambda contents: contents["run"]["config"]["model"]["init_args"].update(lr=0.5),
        lambda contents: contents["callbacks"].update(Evil={"path": "/"}),
        lambda contents: contents["callbacks"].update(Evil={"count": 120}),
        lambda contents: contents["run"]["state"].update(more=1),
        lambda contents: contents["optimizer_states"][0].update(more=True),
        lambda contents: contents["run"].update(run_name="other"),
        lambda contents: vars(contents["state_dict"])["_metadata"][""].update(STEERED),
        lambda contents: vars(contents["state_dict"])["_metadata"][""].update(version=0),
        lambda contents: vars(contents["state_dict"]).update(more=1),
        lambda contents: next(iter(contents["state_dict"].values())).requires_grad_(),
    ]
    for change in changes:
        contents = checkpoint(trained)
        assert is_own(contents)
        change(contents)
        assert not is_own(contents)


def sealed_by_an_older_version(contents: dict[str, Any]) -> dict[str, Any]:
    contents["run"]["seal"] = None
    contents["run"]["seal"] = f"all:{keys.seal(seals._all_sealed_before(contents))}"
    return contents


def test_what_an_older_version_has_sealed_is_ones_own_with_the_attributes_of_then(
    trained: Path,
) -> None:
    contents = sealed_by_an_older_version(checkpoint(trained))
    assert is_own(contents)
    vars(contents["state_dict"])["_metadata"][""].update(STEERED)
    assert not is_own(contents)
    contents = sealed_by_an_older_version(checkpoint(trained))
    contents["run"]["config"] = OrderedDict(contents["run"]["config"])
    contents = sealed_by_an_older_version(contents)
    assert is_own(contents)
    vars(contents["run"]["config"])["more"] = 1
    assert not is_own(contents)
    contents = sealed_by_an_older_version(checkpoint(trained))
    contents["run"]["seal"] = contents["run"]["seal"].replace("all:", "seal:1:x:")
    assert not is_own(contents), "the text of the new seal is none of an older version"


def in_a_file(path: Path, contents: dict[str, Any]) -> Path:
    torch.save(contents, path)
    return path


def test_a_strangers_values_are_bounded_and_ones_own_are_not(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.ckpt"
    contents = checkpoint(trained)
    storages = len(zipfile.ZipFile(trained).namelist())
    many = torch_file.STEPS_OF_STORAGE * storages + 4000
    contents["callbacks"]["more"] = [1.5] * many
    monkeypatch.setattr(torch_file, "MOST_STEPS", 3000)
    AtomicCheckpointIO().write(contents, path)
    assert record(read(path), path)["is_own"]
    refused = "claims more than it can hold .it has very many values beside its tensors"
    contents["callbacks"]["more"][0] = 2.5
    with pytest.raises(UserError, match=refused):
        read(in_a_file(path, contents))
    assert is_own(read(in_a_file(path, sealed_by_an_older_version(contents))))
    monkeypatch.setenv(keys.KEY_VARIABLE, "short")
    with pytest.raises(UserError, match="UNBROKEN_KEY must be a secret"):
        read(path)
    monkeypatch.delenv(keys.KEY_VARIABLE)
    contents["callbacks"]["more"][0] = 3.5
    with pytest.raises(UserError, match=refused):
        read(in_a_file(path, contents))
    contents["run"]["seal"] = None
    with pytest.raises(UserError, match=refused):
        read(in_a_file(path, contents))
    contents["callbacks"]["more"] = "x" * (torch_file.BYTES_OF_STEP * 2 * many)
    with pytest.raises(UserError, match=refused):
        read(in_a_file(path, contents))


def test_very_many_values_of_a_stranger_are_refused_in_a_moment(tmp_path: Path) -> None:
    value = b"\x80\x02](" + b"N" * 4_000_000 + b"e."
    path = pickled_alone_in(tmp_path / "x.ckpt", value)
    began = time.process_time()
    with pytest.raises(UserError, match="very many values"):
        read(path)
    # It took three seconds to read them, and thirty until they were looked through.
    assert time.process_time() - began < 1.5


@pytest.mark.parametrize(
    ("dtype", "fits"),
    [
        (torch.float64, True),
        (torch.float8_e4m3fn, True),
        (torch.int64, True),
        (torch.complex64, False),
    ],
)
def test_a_strangers_weights_are_numbers_of_the_modules_own_kind(
    dtype: torch.dtype, fits: bool, tmp_path: Path
) -> None:
    module = LightningModule()
    module.layer = nn.Linear(2, 1)
    before = module.layer.weight
    weights: Any = module.state_dict()
    weights["layer.weight"] = torch.ones(1, 2).to(dtype)
    weights._metadata["layer"] = {"version": 1} | STEERED
    path = in_a_file(tmp_path / "x.ckpt", {"state_dict": weights, "loops": {}})
    if fits:
        assert load_weights(module, read(path), path, own=False)
    else:
        with pytest.raises(UserError, match=r"layer\.weight is complex64 and not float32"):
            load_weights(module, read(path), path, own=False)
    assert module.layer.weight is before
    assert before.dtype is torch.float32
    assert module.layer(torch.ones(1, 2)).shape == (1, 1)


@pytest.mark.parametrize("entry_of_run", ["config", "metrics", "versions", "state", "chosen"])
def test_what_a_run_records_has_names(entry_of_run: str, trained: Path, tmp_path: Path) -> None:
    contents = checkpoint(trained)
    contents["run"].setdefault(entry_of_run, {})[1] = 2
    with pytest.raises(UserError, match=rf"its entry run\.{entry_of_run} is not what this project"):
        record(read(in_a_file(tmp_path / "x.ckpt", contents)), tmp_path)


def test_a_key_in_the_environment_is_shared_by_those_who_have_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    before = keys.seal(["x", "y"])
    monkeypatch.setenv(keys.KEY_VARIABLE, "k" * 32)
    shared = keys.seal(["xy"])
    assert keys.is_sealed(lambda: ["x", "y"], shared)
    assert keys.is_sealed(lambda: ["xy"], before), "the machine's own key counts as well"
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state of a colleague"))
    assert keys.is_sealed(lambda: ["xy"], shared)
    assert not keys.is_sealed(lambda: ["xy"], before)
    monkeypatch.setenv(keys.KEY_VARIABLE, "short")
    with pytest.raises(UserError, match="UNBROKEN_KEY must be a secret of at least 32 characters"):
        keys.seal(["x"])


def test_the_key_is_the_users_alone_and_a_home_that_is_read_only_seals_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    seal = keys.seal(["x"])
    assert keys.is_sealed(lambda: ["x"], seal)
    assert not keys.is_sealed(lambda: ["y"], seal)
    assert not keys.is_sealed(lambda: ["x"], None)
    key = keys.folder() / "key"
    assert os.name == "nt" or key.stat().st_mode & 0o077 == 0
    monkeypatch.setenv("XDG_STATE_HOME", "relative")
    assert keys.seal(["x"]) is None
    assert not Path("relative").exists()
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    assert keys.seal(["x"]) is None


def test_an_ordinary_large_configuration_is_used(tmp_path: Path) -> None:
    layers = [spec("torch.nn.Linear", in_features=8, out_features=8) for _ in range(20)]
    arguments = {"network": spec("torch.nn.Sequential", layers=layers), "class_names": ["x"] * 200}
    given = {"model": spec(CLASSIFIER, **arguments), "data": spec("unbroken.data.SplitDataModule")}
    assert Stranger(tmp_path, [], {}).settings(given) == given


def test_many_letters_of_a_strangers_configuration_are_refused_before_they_are_read(
    tmp_path: Path,
) -> None:
    texts = ["a" * 990] * 50
    arguments = {"network": spec("torch.nn.Identity"), "class_names": texts}
    with pytest.raises(UserError, match="too large or too deep"):
        Stranger(tmp_path, [], {}).settings({"model": spec(CLASSIFIER, **arguments)})


def test_a_list_of_what_was_left_out_holds_names(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    REFUSED["lists"] = lambda contents: contents["run"].update(left_out=[[1], {}])
    forge(trained, "lists")
    del REFUSED["lists"]
    line = error_of(capsys, COMMANDS["test"][0], "--ckpt_path", THEIRS)
    assert "its entry run.left_out is not what this project writes" in line


def test_weights_that_a_new_run_cannot_take_are_an_error_of_one_line(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = checkpoint(trained)
    weights = contents["state_dict"]
    for name in weights:
        if weights[name].dim() == 2:
            weights[name] = weights[name].to_sparse().coalesce()
    torch.save(contents, "sparse.ckpt")
    words = [*FEW, *MLP, *SHORT, "--run_name", "new", "--init_weights", "sparse.ckpt"]
    assert entry.exit_code(fit.main, words) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1
    assert lines[0].startswith(
        "error: --init_weights sparse.ckpt: its weights do not fit the network"
    )


def test_a_class_that_computes_nothing_is_an_error_of_one_line(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    contents = checkpoint(trained)
    contents["run"]["seal"] = None
    contents["run"]["config"]["data"] = spec("unbroken.data.SplitDataModule")
    torch.save(contents, "base.ckpt")
    shown = error_of(capsys, COMMANDS["test"][0], "--ckpt_path", "base.ckpt")
    assert "SplitDataModule must define make_split(split)" in shown
    contents = checkpoint(trained)
    contents["run"]["seal"] = None
    contents["state_dict"] = {}
    contents["run"]["config"]["model"]["init_args"]["network"] = spec("torch.nn.ModuleList")
    torch.save(contents, "holds.ckpt")
    shown = error_of(capsys, COMMANDS["test"][0], "--ckpt_path", "holds.ckpt")
    assert 'Module [ModuleList] is missing the required "forward" function' in shown


# Folders of runs


def test_a_strangers_folder_of_runs_is_shown_in_a_moment(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n"
    more = [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 8)]
    merged = [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}\n" for n in range(1, 9)]
    configs = {
        "lists": first + "".join(more),
        "merged": "a0: &a0 {x: 1}\n" + "".join(merged),
        "large": "x: [" + "1, " * 200_000 + "1]\n",
        "ordinary": (trained.parent / "config.yaml").read_text(),
    }
    columns = ",".join(f"val/{number}" for number in range(2000))
    for name, config in configs.items():
        folder = Path("checkpoints", f"{name}\x1b[2J")
        folder.mkdir(parents=True)
        (folder / "config.yaml").write_text(config)
        (folder / "summary.json").write_text('{"epochs": 3}')
        rows = "".join(f"{step},0{',1' * 2000}\n" for step in (1, 2))
        (folder / "metrics.csv").write_text(f"step,epoch,{columns}\n{rows}")
    began = time.monotonic()
    assert entry.exit_code(COMMANDS["runs"][0], ["--report", "runs.html"]) == 0
    assert time.monotonic() - began < 60
    page = Path("runs.html").read_text()
    assert "\x1b" not in page + capsys.readouterr().out
    assert page.count("<svg") == 60
    assert "1,940 further metrics are not drawn" in page


def test_our_own_writer_makes_no_aliases() -> None:
    shared = [1, {"a": [2]}]
    text = dump_yaml({"x": shared, "y": shared})
    assert "&" not in text
    assert yaml_in(text) == {"x": shared, "y": shared}
    with pytest.raises(ValueError, match="is damaged"):
        yaml_in("x: &a [1]\ny: *a\n")


# Names of older versions


def test_an_older_name_leads_to_where_the_class_is_now() -> None:
    network = spec("numerals.model.networks.MLP")
    moved: dict[str, Any] = {
        "numerals.model.supervised": "unbroken.tasks.supervised",
        "numerals.model.networks.MLP": spec(CLASSIFIER, network=network, lr=1.0),
        "numerals.gone.Net": "torch.nn.Identity",
    }
    old = {"model": spec("numerals.model.supervised.SupervisedModule", network=network)}
    now = with_names_of_now(old, moved)
    assert now["model"]["class_path"] == "unbroken.tasks.supervised.SupervisedModule"
    assert now["model"]["init_args"]["network"] == network, "it still takes these arguments"
    old = {"model": spec("numerals.model.networks.MLP", schedule="cosine", network=None)}
    assert with_names_of_now(old, moved)["model"] == spec(
        CLASSIFIER, network=network, lr=1.0, schedule="cosine"
    )
    assert with_names_of_now([spec("numerals.gone.Net")], moved) == [spec("torch.nn.Identity")]
    assert old["model"]["class_path"] == "numerals.model.networks.MLP", "it is not changed"


# Places


@pytest.mark.parametrize(
    ("name", "text", "is_one"),
    [
        ("root", "data", True),
        ("log_path", "x", True),
        ("x", "/etc", True),
        ("x", "~/x", True),
        ("x", "$HOME/x", True),
        ("x", "a/../../b", True),
        ("x", "C:\\x", True),
        ("x", "file:x", True),
        ("x", "http://host/x", True),
        ("x", "there/file", True),
        ("x", "there", False),
        ("monitor", "val/loss", False),
        ("profile", "min", False),
        ("optimizer", "AdamW", False),
    ],
)
def test_a_text_is_a_place_by_its_name_or_look_or_because_it_is_there(
    name: str, text: str, is_one: bool
) -> None:
    Path("there").mkdir()
    Path("there/file").touch()
    assert is_place(name, text) is is_one


def test_a_place_is_inside_after_all_that_can_be_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = Path.cwd() / "run"
    folder.mkdir()
    monkeypatch.setenv("AWAY", "..")
    (folder / "link").symlink_to("/")
    assert is_inside(folder / "a" / "b", folder)
    assert is_inside("run/a/../b", folder)
    for outside in (
        "run/..",
        "run/$AWAY",
        "run/link/x",
        "~/x",
        "file://run/x",
        "run\0",
        "s3://run",
    ):
        assert not is_inside(outside, folder), outside


@pytest.mark.daily(2)
@pytest.mark.parametrize("name", ["run-id.txt", ".lock", "metrics.csv", "tensorboard"])
def test_nothing_is_written_through_a_link_in_a_runs_folder(
    name: str, trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(trained.parent, "checkpoints/r")
    target = Path("precious")
    target.write_text("text")
    link = Path("checkpoints/r", name)
    link.unlink(missing_ok=True)
    link.symlink_to(target.absolute())
    words = ["--run_name", "r", "--ckpt_path", "auto", "--max_epochs", "2"]
    assert "is a link out of the run's folder" in error_of(capsys, fit.main, *words)
    assert target.read_text() == "text"


def test_a_run_that_starts_afresh_in_a_strangers_folder_reads_none_of_his_rows(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    forge(trained, "")
    theirs = Path(THEIRS).parent
    Path(THEIRS).unlink()
    rows = "step,epoch,x\n" + "1,0,2\n" * 10
    # Rows without end take no more room than these.
    (theirs / "metrics.csv").write_text(f"{rows}no row\n")
    words = [*FEW, *MLP, *SHORT, "--run_name", "theirs", "--ckpt_path", "auto"]
    assert entry.exit_code(fit.main, words) == 0, capsys.readouterr().err
    assert "x" not in (theirs / "metrics.csv").read_text().splitlines()[0].split(",")


@pytest.mark.parametrize("name", ["../../x", "a\x1b[2Jb", "a\nerror: b", "", "x" * 65])
def test_a_runs_id_is_a_name_and_nothing_else(name: str, trained: Path, capsys: Any) -> None:
    forge(trained, "")
    Path(THEIRS).unlink()
    (Path(THEIRS).parent / "run-id.txt").write_text(f"{name}\n")
    assert "theirs is no run's folder" in error_of(
        capsys, fit.main, "--run_name", "theirs", "--ckpt_path", "auto"
    )


def test_control_characters_reach_no_terminal(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evil = "\x1b]0;title\x07\x1b[2J\x9b31m\u202e"
    REFUSED["shown"] = model("network", spec(f"somewhere.{evil}"))
    forge(trained, "shown")
    del REFUSED["shown"]
    line = error_of(capsys, COMMANDS["test"][0], "--ckpt_path", THEIRS)
    assert not set(evil) & set("\x1b\x07\x9b\u202e") & set(line)
    assert without_control_characters("a\tb\nc é 数") == "a\tb\nc é 数"


def test_the_name_of_a_strangers_folder_moves_no_cursor(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # It is the newest run, which commands take where no checkpoint is named.
    forge(trained, "", "checkpoints/r\x1b[2J\x9b/best.ckpt")
    main, _ = COMMANDS["export"]
    words = ["--formats", "pt2", "--output_dir", "out"]
    assert entry.exit_code(main, words) == 0
    assert exit_code_of_test() == 0
    shown = capsys.readouterr()
    assert not {"\x1b", "\x9b"} & {*shown.out, *shown.err}
    assert "r\\x1b[2J" in shown.out


def test_letters_that_no_file_can_hold_are_taken_out_of_a_strangers_names(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The half of a pair of UTF-16. A pickle holds it, and nothing that is written in UTF-8.
    half = "r\ud800\x1b"
    contents = checkpoint(trained)
    contents["run"] |= {
        "run_name": half,
        "data_source": half,
        "metrics": OrderedDict({f"val/{half}": 1.0}),
        "versions": OrderedDict(torch=(half,)),
    }
    Path(THEIRS).parent.mkdir(parents=True)
    torch.save(contents, THEIRS)
    found = record(read(Path(THEIRS)), Path(THEIRS))
    assert (found["run_name"], found["metrics"]) == ("r??", {"val/r??": 1.0})
    assert found["versions"] == {"torch": ("r??",)}
    main, words = COMMANDS["export"]
    assert entry.exit_code(main, words) == 0, capsys.readouterr().err
    assert Path("out/model.safetensors").is_file()


def test_a_name_in_a_line_makes_no_line_of_its_own() -> None:
    names = ["a\nerror: your key has leaked\nb", "\x1b[2J\u202e", "ordinary.weight"]
    line = first_names(names)
    assert line.isprintable()
    assert "a error: your key has leaked b" in line
    assert "ordinary.weight" in line


# The reader


def pickled_alone_in(path: Path, pickled: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", pickled)
    return path


def number(value: int) -> bytes:
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def together(*values: bytes) -> bytes:
    return b"(" + b"".join(values) + b"t"


def numbers(*values: int) -> bytes:
    return together(*map(number, values))


def called(name: str, *arguments: bytes) -> bytes:
    module, _, last = name.rpartition(".")
    return f"c{module}\n{last}\n".encode() + together(*arguments) + b"R"


def forged_tensor(size: bytes, stride: bytes, offset: bytes = number(0), count: int = 4) -> bytes:
    """A tensor on a storage of so many float32."""
    parts = (u("storage"), b"ctorch\nFloatStorage\n", u(str(count)), u("cpu"), number(count))
    stored = together(*parts) + b"Q"
    tensor = "torch._utils._rebuild_tensor_v2"
    return called(tensor, stored, offset, size, stride, b"\x89", called("collections.OrderedDict"))


def pickled_with_storages(path: Path, value: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a/data.pkl", b"\x80\x02" + value + b".")
        for count in (0, 4):
            archive.writestr(f"a/data/{count}", bytes(4 * count))
    return path


ONE = numbers(1)
OUTSIDE: dict[str, bytes] = {
    "on nothing": forged_tensor(numbers(2, 3), numbers(3, 1), count=0),
    "far apart on nothing": forged_tensor(numbers(2), numbers(2**28), count=0),
    "behind nothing": forged_tensor(ONE, ONE, number(2**20), count=0),
    "longer": forged_tensor(numbers(5), ONE),
    "far apart": forged_tensor(numbers(2), numbers(2**28)),
    "very far apart": forged_tensor(numbers(2, 2), numbers(2**62, 2**62)),
    "behind": forged_tensor(ONE, ONE, number(4)),
    "before": forged_tensor(ONE, ONE, number(-1)),
    "a negative size": forged_tensor(numbers(-1, -1), numbers(1, 1)),
    "a negative stride": forged_tensor(numbers(2), numbers(-1), number(3)),
    "fewer strides": forged_tensor(numbers(2, 2), ONE),
}


@pytest.mark.parametrize("kind", OUTSIDE)
def test_a_tensor_lies_inside_its_storage(kind: str, tmp_path: Path) -> None:
    with pytest.raises((Foreign, TooMuch)):
        read_file(pickled_with_storages(tmp_path / "x.pt", OUTSIDE[kind]))


def test_a_tensor_at_the_end_of_its_storage_or_of_no_values_is_read(tmp_path: Path) -> None:
    whole = {
        (2,): forged_tensor(numbers(2), numbers(3)),
        (1,): forged_tensor(ONE, numbers(2**40), number(3)),
        (0, 3): forged_tensor(numbers(0, 3), numbers(3, 1), number(9), count=0),
    }
    for size, value in whole.items():
        assert read_file(pickled_with_storages(tmp_path / "x.pt", value)).shape == size


TEXT = u("a")
FLAT = forged_tensor(ONE, ONE)
LAYOUT = called("torch.serialization._get_layout", u("torch.sparse_coo"))
MANY = number(4 * 10**9)
# Each would be multiplied, compared or walked through as something else than it should be.
WRONG_ARGUMENTS: dict[str, bytes] = {
    "a text as a size": forged_tensor(together(TEXT, MANY), ONE),
    "a list as a size": forged_tensor(together(b"]K\x00a", MANY), ONE),
    "a size that is a text": forged_tensor(TEXT, ONE),
    "a truth as a size": forged_tensor(b"\x88\x85", ONE),
    "a text as a stride": forged_tensor(ONE, TEXT + b"\x85"),
    "a text as an offset": forged_tensor(ONE, ONE, TEXT),
    "a hundred dimensions": forged_tensor(numbers(*[1] * 100), numbers(*[1] * 100)),
    "no arguments": called("torch._utils._rebuild_tensor_v2"),
    "a parameter of a number": called("torch._utils._rebuild_parameter", number(1), b"\x89", b"N"),
    "a parameter that may": called("torch._utils._rebuild_parameter", FLAT, number(1), b"N"),
    "a sparse one of lists": called(
        "torch._utils._rebuild_sparse_tensor", LAYOUT, together(b"]", b"]", ONE, b"\x88")
    ),
    "a sparse one without layout": called("torch._utils._rebuild_sparse_tensor", TEXT, b")"),
    "a layout that is none": called("torch.serialization._get_layout", b"]"),
    "a size of texts": called("torch.Size", TEXT + b"\x85"),
    "a size of a list": called("torch.Size", b"]"),
    "a long device": called("torch.device", u("cuda:" + "9" * 100)),
    "a device of a number": called("torch.device", number(2**40)),
    "an ordered dictionary of pairs": called("collections.OrderedDict", b"]"),
    "a counter of a text": called("collections.Counter", TEXT),
    "a set of a text": called("__builtin__.set", TEXT),
    "a complex number of texts": called("__builtin__.complex", u("1" * 100), TEXT),
    "bytes of a number": called("__builtin__.bytes", MANY),
    "an encoding": called("_codecs.encode", TEXT, u("hex")),
    "an encoded number": called("_codecs.encode", MANY, u("latin1")),
    "a storage that is a text": u("abcde") + b"Q",
}


@pytest.mark.parametrize("kind", WRONG_ARGUMENTS)
def test_arguments_are_looked_at_before_anything_is_done_with_them(
    kind: str, tmp_path: Path
) -> None:
    with pytest.raises(Foreign):
        read_file(pickled_with_storages(tmp_path / "x.pt", WRONG_ARGUMENTS[kind]))


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux measures memory")
def test_many_values_are_looked_at_without_a_copy_of_them(tmp_path: Path) -> None:
    count = 2_000_000
    path = pickled_alone_in(tmp_path / "x.pt", b"\x80\x02](" + b"N" * count + b"e.")
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    assert len(read_file(path)) == count
    # The list, what stood on the stack, and the pickle
    assert memory("VmHWM") - before < (8 + 8 + 8) * count


def test_fields_of_an_archive_are_read_once(tmp_path: Path) -> None:
    body = b""
    directory = b""
    extra = bytes(65_532)
    for number in range(60):
        name = f"a/data/{number}".encode() if number else b"a/data.pkl"
        content = b"" if number else b"\x80\x02N."
        sizes = (zlib.crc32(content), len(content), len(content), len(name))
        at = len(body)
        entry_fields = (20, 20, 0, 0, 0, 0, *sizes, len(extra), 0, 0, 0, 0, at)
        directory += ENTRY.pack(b"PK\x01\x02", *entry_fields) + name + extra
        body += LOCAL.pack(b"PK\x03\x04", 20, 0, 0, 0, 0, *sizes, 0) + name + content
    end = END.pack(b"PK\x05\x06", 0, 0, 60, 60, len(directory), len(body), 0)
    path = tmp_path / "x.pt"
    path.write_bytes(body + directory + end)
    began = time.process_time()
    assert read_file(path) is None
    # To copy what is left of them at each field took twenty seconds.
    assert time.process_time() - began < 5


EVERYTHING: dict[str, Any] = {
    "numbers": [0, -1, 255, 65_535, 2**31, -(2**70), 1.5, float("inf"), 2 + 3j, True, None],
    "texts": ["", "é 数", "x" * 300, "\ud800"],
    "bytes": [b"", b"\x00\xff"],
    "containers": [(), (1,), (1, 2), (1, 2, 3), (1, 2, 3, 4), [], {}, set(), {1, "a"}],
    "keys": {1: 2, 1.5: 3, None: 4, (1, ("a", b"b")): 5, torch.float32: 7},
    "kinds": [OrderedDict(a=1), Counter("aab"), torch.Size([2, 3]), torch.device("cpu")],
    "dtypes": [torch.float32, torch.bfloat16, torch.uint8],
}
TENSORS: dict[str, torch.Tensor] = {
    **{
        str(dtype): torch.arange(6).to(dtype)
        for dtype in (
            *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.bool),
            *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
            *(torch.complex64, torch.complex128, torch.uint16, torch.float8_e4m3fn),
        )
    },
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "view": torch.arange(12.0).reshape(3, 4)[1:, ::2],
    "transposed": torch.arange(12.0).reshape(3, 4).T,
    "parameter": nn.Parameter(torch.ones(2)),
    "coo": torch.eye(3).to_sparse().coalesce(),
    "csr": torch.eye(3).to_sparse_csr(),
    "csc": torch.eye(3).to_sparse_csc(),
    "bsr": torch.eye(4).to_sparse_bsr((2, 2)),
}


@pytest.mark.filterwarnings("ignore:Sparse")
def test_the_reader_gives_what_torch_load_gives(tmp_path: Path) -> None:
    path = tmp_path / "all.pt"
    shared = torch.ones(4)
    weights = nn.BatchNorm1d(2).state_dict()
    contents = EVERYTHING | {"tensors": TENSORS, "shared": [shared, shared[2:]], "weights": weights}
    torch.save(contents, path)
    found = read_file(path, check_sums=True)
    assert {name: found[name] for name in EVERYTHING} == EVERYTHING
    assert [type(each) for each in found["kinds"]] == [type(e) for e in EVERYTHING["kinds"]]
    for name, tensor in TENSORS.items():
        read_again = found["tensors"][name]
        assert (read_again.dtype, read_again.layout) == (tensor.dtype, tensor.layout), name
        assert str(read_again) == str(tensor), name
    assert found["tensors"]["view"].stride() == TENSORS["view"].stride()
    assert type(found["tensors"]["parameter"]) is nn.Parameter
    found["shared"][0][3] = 7
    assert found["shared"][1][1] == 7, "two tensors on one storage"
    assert found["weights"]._metadata == weights._metadata  # type: ignore[attr-defined]
    assert read_file(path)["shared"][0][3] == 1, "what is written into a tensor changes no file"


def test_a_checkpoint_is_an_ordinary_one_of_lightning(trained: Path) -> None:
    from numerals.model import MNISTClassifier, networks

    theirs = torch.load(trained, weights_only=True, mmap=True)
    ours = read(trained)
    assert repr(theirs["run"]) == repr(ours["run"])
    for name, weight in theirs["state_dict"].items():
        assert torch.equal(weight, ours["state_dict"][name])
    loaded = MNISTClassifier.load_from_checkpoint(
        trained, weights_only=True, network=networks.MLP(hidden=[8])
    )
    assert torch.equal(
        loaded.state_dict()["network.blocks.1.weight"],
        ours["state_dict"]["network.blocks.1.weight"],
    )


def test_what_a_tensor_has_beside_its_values_is_not_saved(tmp_path: Path) -> None:
    noted = torch.ones(2)
    noted.note = "x"
    contents = {
        "noted": noted,
        "conjugate": torch.tensor([1 + 2j]).conj(),
        "negative": torch.tensor([1 + 2j]).conj().imag,
    }
    AtomicCheckpointIO().save_checkpoint({"state_dict": contents, "loops": {}}, tmp_path / "x.ckpt")
    found = read(tmp_path / "x.ckpt")["state_dict"]
    assert torch.equal(found["noted"], torch.ones(2))
    assert found["conjugate"].tolist() == [1 - 2j]
    assert found["negative"].tolist() == [-2.0]


def test_flipped_bits_are_found_by_whoever_compares_sums(trained: Path) -> None:
    whole = trained.read_bytes()
    place = whole.index(b"/data/") + 4096
    broken = bytearray(whole)
    broken[place] ^= 1
    read_file(trained, check_sums=True)
    Path("broken.ckpt").write_bytes(broken)
    read_file(Path("broken.ckpt"))
    with pytest.raises(NoArchive, match="checksum of"):
        read_file(Path("broken.ckpt"), check_sums=True)


def test_a_file_system_without_mapped_files_is_read(
    trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lacking(*_: object, **__: object) -> None:
        raise OSError(errno.ENODEV, "No such device")

    monkeypatch.setattr("mmap.mmap", lacking)
    assert read_file(trained, check_sums=True)["run"]["run_name"] == "r"


def test_a_root_with_a_zero_byte_is_not_used(
    trained: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    REFUSED["zero"] = data("root", "a\0b")
    forge(trained, "zero")
    del REFUSED["zero"]
    assert exit_code_of_test("--ckpt_path", THEIRS) == 0
    assert re.search("test/accuracy", capsys.readouterr().out)
