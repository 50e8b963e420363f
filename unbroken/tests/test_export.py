from __future__ import annotations

import json
import os
import re
import shutil
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from numerals.data import MNISTDataModule
from numerals.fit import job as fit
from numerals.model import MLP, ConvNet, MNISTClassifier
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from unbroken.cli import start as entry
from unbroken.cli.read_checkpoint import Loaded, load
from unbroken.commands.export import command as export
from unbroken.commands.export.compare import compare
from unbroken.commands.export.forward import answer
from unbroken.commands.export.samples import Samples, find_samples
from unbroken.commands.export.trace import trace
from unbroken.commands.export.write import write_files, write_weights
from unbroken.errors import UserError
from unbroken.tables import refuse_file_of_others

from tests.commands import complete
from tests.trained import trained_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a run's best.ckpt and what `export` wrote beside it."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copy(trained_checkpoint(), folder / "best.ckpt")
    assert (
        entry.exit_code(
            partial(export.main, "numerals"), ["--ckpt_path", str(folder / "best.ckpt")]
        )
        == 0
    )
    assert sorted(os.listdir(folder)) == [
        "best.ckpt",
        "model.onnx",
        "model.pt2",
        "model.safetensors",
    ]
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    loaded = load(fit, folder / "best.ckpt", ["--data.source", "sample"])
    loaded.datamodule.setup("test")
    return loaded


@pytest.fixture(scope="module")
def images(loaded: Loaded) -> torch.Tensor:
    return loaded.datamodule.splits["test"].images


@pytest.mark.daily(1)
@pytest.mark.parametrize(("batch_size", "count"), [(1, 200), (7, 200), (1024, 2000)])
def test_onnx_and_torch_export_agree_with_the_checkpoint_on_test_images(
    batch_size: int, count: int, folder: Path, loaded: Loaded, images: torch.Tensor
) -> None:
    assert len(images) == 2000
    agree_on(images[:count], batch_size, folder, loaded)


@pytest.mark.parametrize("batch_size", [1, 7, 1024])
def test_onnx_and_torch_export_agree_with_the_checkpoint_on_all_10000_test_images(
    batch_size: int, folder: Path, loaded: Loaded, mnist_root: Path
) -> None:
    mnist = MNISTDataModule(root=str(mnist_root), source="mnist")
    mnist.setup("test")
    images = mnist.splits["test"].images  # type: ignore[attr-defined]
    assert len(images) == 10_000
    agree_on(images, batch_size, folder, loaded)


def agree_on(images: torch.Tensor, batch_size: int, folder: Path, loaded: Loaded) -> None:
    expected = answer(loaded.module, (images,))["output"]
    session = onnxruntime.InferenceSession(
        folder / "model.onnx", providers=["CPUExecutionProvider"]
    )
    program = torch.export.load(folder / "model.pt2").module()
    parts = (images.float() / 255).split(batch_size)
    by_onnx = torch.cat(
        [torch.from_numpy(session.run(["logits"], {"images": part.numpy()})[0]) for part in parts]
    )
    with torch.inference_mode():
        by_torch = torch.cat([program(part) for part in parts])
    for logits in (by_onnx, by_torch):
        assert (logits.argmax(dim=1) != expected.argmax(dim=1)).sum() == 0
        assert (logits - expected).abs().max() <= 1e-4


def test_the_files_say_what_goes_in_what_comes_out_and_where_they_are_from(
    folder: Path, loaded: Loaded
) -> None:
    model = onnx.load(folder / "model.onnx")
    for value, name, shape in (
        (model.graph.input[0], "images", [1, 28, 28]),
        (model.graph.output[0], "logits", [10]),
    ):
        dims = value.type.tensor_type.shape.dim
        assert value.name == name
        assert dims[0].dim_param == "batch"
        assert [dim.dim_value for dim in dims[1:]] == shape
    with safe_open(folder / "model.safetensors", "pt") as file:
        by_safetensors = file.metadata()
    extra = {"metadata.json": ""}
    torch.export.load(folder / "model.pt2", extra_files=extra)
    facts = {prop.key: prop.value for prop in model.metadata_props}
    assert facts == by_safetensors == json.loads(extra["metadata.json"])
    assert json.loads(facts["classes"]) == [str(digit) for digit in range(10)]
    assert facts["run_name"] == "trained"
    test = loaded.datamodule.splits["test"]
    accuracy = (
        (answer(loaded.module, (test.images,))["output"].argmax(dim=1) == test.labels)
        .double()
        .mean()
    )
    assert float(facts["test/accuracy"]) == pytest.approx(accuracy.item(), abs=1e-6)


def test_safetensors_hold_the_checkpoints_weights_bit_for_bit(folder: Path) -> None:
    saved = torch.load(folder / "best.ckpt", weights_only=True)["state_dict"]
    weights = load_file(folder / "model.safetensors")
    assert {f"network.{name}" for name in weights} == {
        name for name in saved if name.startswith("network.")
    }
    assert all(torch.equal(weights[name], saved[f"network.{name}"]) for name in weights)
    ConvNet().load_state_dict(weights)


def test_no_path_of_the_exporting_machine_is_in_the_files(folder: Path) -> None:
    contents = [(folder / "model.onnx").read_bytes(), (folder / "model.safetensors").read_bytes()]
    with zipfile.ZipFile(folder / "model.pt2") as archive:
        contents += [archive.read(name) for name in archive.namelist()]
    here = str(Path(export.__file__).parent).encode()
    assert not any(here in content or b"site-packages" in content for content in contents)


class ThreeColours(MNISTDataModule):
    image_shape = (3, 16, 24)
    class_names = ["cat", "dog", "bird", "fish"]
    mean = [0.4, 0.5, 0.6]
    std = [0.2, 0.3, 0.4]

    def prepare_data(self) -> None:
        raise OSError("there are none")


def exported_rows(loaded: Loaded, folder: Path) -> tuple[Samples, list[dict[str, Any]]]:
    """What is exported to ``folder``, and how it compares with the checkpoint."""
    samples = find_samples(loaded)
    files = {name: folder / file for name, file in export.FILES.items()}
    write_files(files, loaded, trace(loaded, samples), samples)
    return samples, compare(files, loaded, samples)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("network", "options"),
    [
        (MLP(image_shape=(3, 16, 24), num_classes=4, dropout=0.5), {}),
        (
            ConvNet(image_shape=(3, 16, 24), padding=True, num_classes=4, dropout=0.5),
            {"channels_last": True, "activation_checkpointing": True},
        ),
    ],
)
def test_other_shapes_and_ways_of_training_export_as_well(
    tmp_path: Path, network: nn.Module, options: dict
) -> None:
    loaded = Loaded(
        MNISTClassifier(network, **options).eval(), ThreeColours(), {}, {}, Path("best.ckpt")
    )
    samples, rows = exported_rows(loaded, tmp_path)
    assert samples.names == ["images"]
    assert [output.name for output in samples.outputs] == ["logits"]
    assert samples.source == "random images; no test set of tensors: there are none"
    assert len(rows) == 7
    assert all(
        row["agrees"] and row["samples"] == 1000 and row["different_labels"] == 0 for row in rows
    )


class Empty(ThreeColours):
    """With a test set that has no batch."""

    def prepare_data(self) -> None: ...

    def setup(self, stage: str) -> None: ...

    def test_dataloader(self) -> Any:
        return []


def test_a_test_set_without_a_batch_is_said_to_be_one() -> None:
    network = MLP(image_shape=(3, 16, 24), num_classes=4)
    loaded = Loaded(MNISTClassifier(network).eval(), Empty(), {}, {}, Path("best.ckpt"))
    assert find_samples(loaded).source == "random images; the test set has no batch"


class Houses(LightningDataModule):
    """Somebody else's data: floats, and their names."""

    def setup(self, stage: str) -> None:
        self.test = TensorDataset(torch.rand(50, 5), torch.rand(50, 5), torch.rand(50))

    def test_dataloader(self) -> DataLoader[Any]:
        return DataLoader(self.test, batch_size=20)


class Prices(LightningModule):
    """Somebody else's module: two inputs, a dictionary of two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.example_input_array = torch.rand(1, 5), torch.rand(1, 5)

    def forward(self, inside: torch.Tensor, outside: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"price": self.layer(inside - outside), "rooms": inside.sum(dim=1).round().long()}


def test_any_module_exports_by_its_own_names_and_is_compared_output_by_output(
    tmp_path: Path,
) -> None:
    loaded = Loaded(Prices().eval(), Houses(), {}, {}, Path("best.ckpt"))
    samples, rows = exported_rows(loaded, tmp_path)
    assert samples.source == "Houses test"
    assert all(
        row["agrees"] and row["samples"] == 50 and "different_labels" not in row for row in rows
    )
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert [value.name for value in graph.input] == ["inside", "outside"]
    assert [value.name for value in graph.output] == ["price", "rooms"]
    assert load_file(tmp_path / "model.safetensors").keys() == {"layer.weight", "layer.bias"}
    assert (tmp_path / "model.safetensors").stat().st_mode == (
        tmp_path / "model.onnx"
    ).stat().st_mode


class HalfPrices(Prices):
    """Keeps its layer in bfloat16, which onnxruntime does not multiply on a CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.layer.to(torch.bfloat16)

    def forward(self, inside: torch.Tensor, outside: torch.Tensor) -> torch.Tensor:
        return self.layer((inside - outside).to(torch.bfloat16)).float()


def test_what_onnxruntime_cannot_run_is_one_line_and_the_other_formats_are_written(
    tmp_path: Path,
) -> None:
    loaded = Loaded(HalfPrices().eval(), Houses(), {}, {}, Path("best.ckpt"))
    with pytest.raises(UserError, match=r"model.onnx was not written: onnxruntime cannot run"):
        export.export_all(loaded, tmp_path, ["onnx", "pt2", "safetensors"], None)
    assert sorted(os.listdir(tmp_path)) == ["model.pt2", "model.safetensors"]


@pytest.mark.nightly
def test_a_module_says_itself_whether_its_outputs_agree(tmp_path: Path) -> None:
    class Doubtful(Prices):
        def outputs_agree(
            self, expected: dict[str, torch.Tensor], found: dict[str, torch.Tensor]
        ) -> bool:
            return expected.keys() != found.keys()

    _, rows = exported_rows(
        Loaded(Doubtful().eval(), Houses(), {}, {}, Path("best.ckpt")), tmp_path
    )
    assert not any(row["agrees"] for row in rows)


@pytest.mark.nightly
def test_without_a_test_set_the_example_input_array_is_taken(tmp_path: Path) -> None:
    samples, rows = exported_rows(
        Loaded(Prices().eval(), None, {}, {}, Path("best.ckpt")), tmp_path
    )
    assert samples.source.startswith("example_input_array; no test set")
    assert all(row["agrees"] and row["samples"] == 2 for row in rows)


class RawHouses(Houses):
    """Batches that the module's steps prepare for its forward."""

    def setup(self, stage: str) -> None:
        self.test = TensorDataset(torch.rand(50, 7), torch.rand(50, 7))


@pytest.mark.nightly
def test_where_forward_takes_no_batch_of_the_test_set_the_example_input_array_is_taken(
    tmp_path: Path,
) -> None:
    samples, rows = exported_rows(
        Loaded(Prices().eval(), RawHouses(), {}, {}, Path("best.ckpt")), tmp_path
    )
    told, fault = samples.source.split(" test: ")
    assert told == "example_input_array; Prices.forward fails on RawHouses"
    assert "mat1 and mat2" in fault
    assert all(row["agrees"] and row["samples"] == 2 for row in rows)


class BringsHouses(Prices):
    """Brings its own loader, and no data module."""

    def test_dataloader(self) -> DataLoader[Any]:
        houses = Houses()
        houses.setup("test")
        return houses.test_dataloader()


@pytest.mark.nightly
def test_a_module_that_brings_its_test_set_is_compared_on_it(tmp_path: Path) -> None:
    samples, rows = exported_rows(
        Loaded(BringsHouses().eval(), None, {}, {}, Path("best.ckpt")), tmp_path
    )
    assert samples.source == "BringsHouses test"
    assert rows
    assert all(row["agrees"] for row in rows)


class MadeInSetup(BringsHouses):
    """Makes its layers in ``setup``, anew whenever it is called."""

    def setup(self, stage: str) -> None:
        self.layer = nn.Sequential(nn.Linear(5, 3), nn.Dropout(0.5))


def test_a_module_that_makes_its_layers_in_setup_keeps_the_weights_that_were_loaded() -> None:
    module = MadeInSetup()
    module.setup("test")
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    samples = find_samples(Loaded(module.eval(), None, {}, {}, Path("best.ckpt")))
    assert samples.source == "MadeInSetup test"
    found = module.state_dict()
    assert found.keys() == weights.keys()
    assert all(torch.equal(found[name], weights[name]) for name in weights)
    assert not module.layer.training


class GrowsInSetup(BringsHouses):
    """Makes one more layer whenever ``setup`` is called."""

    def setup(self, stage: str) -> None:
        self.layer = nn.Sequential(self.layer, nn.Linear(3, 3))


def test_of_a_module_whose_setup_makes_other_layers_nothing_is_written(tmp_path: Path) -> None:
    loaded = Loaded(GrowsInSetup().eval(), None, {}, {}, Path("best.ckpt"))
    with pytest.raises(UserError, match=r"^GrowsInSetup.setup makes other layers when .*") as error:
        export.export_all(loaded, tmp_path, ["pt2", "safetensors"], None)
    assert "\n" not in str(error.value)
    assert not os.listdir(tmp_path)


class TwoParts(Prices):
    """Has a head beside what it calls its network."""

    def __init__(self) -> None:
        super().__init__()
        del self.layer
        self.network = nn.Linear(5, 4)
        self.head = nn.Linear(4, 3)

    def layer(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.network(x))


def test_safetensors_hold_the_whole_module_where_its_network_is_only_a_part(tmp_path: Path) -> None:
    loaded = Loaded(TwoParts().eval(), Houses(), {}, {}, Path("best.ckpt"))
    samples = find_samples(loaded)
    files = {"safetensors": tmp_path / "model.safetensors"}
    before = {name: value.clone() for name, value in loaded.module.state_dict().items()}
    write_weights(files["safetensors"], loaded, {})
    written = load_file(files["safetensors"])
    assert written.keys() == before.keys()
    (row,) = compare(files, loaded, samples)
    assert row["agrees"]
    assert all(torch.equal(value, before[name]) for name, value in written.items())
    del written["head.weight"]
    save_file(written, files["safetensors"])
    (row,) = compare(files, loaded, samples)
    assert not row["agrees"]


class Named(LightningModule):
    """Somebody else's module with a forward of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


class LikeInput(Named):
    def forward(self, x: torch.Tensor) -> Any:
        return {"x": self.layer(x), "x_output": x.sum(dim=1)}


class Fixed(Named):
    """Some outputs are no batch: one never changes, one depends on all samples."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"y": self.layer(x), "bias": self.layer.bias, "mean": x.mean()}


class Nothing(Named):
    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x), None


class OneDictionary(Named):
    def forward(self, batch: dict[str, torch.Tensor]) -> Any:
        return self.layer(batch["x"])


class Rooms(LightningDataModule):
    """Data whose batches are dictionaries, with a text among them."""

    def test_dataloader(self) -> Any:
        for _ in range(3):
            yield {"label": torch.zeros(4).long(), "x": torch.rand(4, 5), "name": ["a"] * 4}


class Pairs(Rooms):
    """Data whose batches are inputs by name, and targets."""

    def test_dataloader(self) -> Any:
        for batch in super().test_dataloader():
            yield {"x": batch["x"]}, batch["label"]


@pytest.mark.daily(1)
@pytest.mark.parametrize(
    ("module", "data", "outputs"),
    [
        (Named, Rooms, ["output"]),
        (Named, Pairs, ["output"]),
        (OneDictionary, Rooms, ["output"]),
        (LikeInput, Rooms, ["x_output_output", "x_output"]),
        (Fixed, Rooms, ["y", "bias", "mean"]),
        (Nothing, Rooms, ["output_0"]),
    ],
)
def test_batches_may_be_dictionaries_and_outputs_what_they_like(
    module: type[Named], data: type[Rooms], outputs: list[str], tmp_path: Path
) -> None:
    loaded = Loaded(module().eval(), data(), {}, {}, Path("best.ckpt"))
    samples, rows = exported_rows(loaded, tmp_path)
    assert samples.source == f"{data.__name__} test"
    assert len(rows) == 7
    assert all(row["agrees"] and row["samples"] == 12 for row in rows)
    graph = onnx.load(tmp_path / "model.onnx").graph
    assert [value.name for value in graph.input] == ["x"]
    assert [value.name for value in graph.output] == outputs


def test_an_output_with_another_name_is_told_and_no_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for module, told in ((LikeInput, True), (Named, False)):
        loaded = Loaded(module().eval(), Rooms(), {}, {}, Path("best.ckpt"))
        assert export.export_all(loaded, tmp_path, ["pt2"], None) == 0
        out = capsys.readouterr().out
        assert ("the output x is called x_output_output: an input has its name\n" in out) == told
        assert ("is called" in out) == told


@pytest.mark.nightly
def test_an_example_may_be_a_dictionary_of_inputs_by_name(tmp_path: Path) -> None:
    module = Prices()
    module.example_input_array = {"outside": torch.rand(1, 5), "inside": torch.rand(1, 5)}
    samples, rows = exported_rows(Loaded(module.eval(), None, {}, {}, Path("best.ckpt")), tmp_path)
    assert (samples.names, samples.way) == (["inside", "outside"], "names")
    assert all(row["agrees"] for row in rows)


class Squeezed(Named):
    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x).sum(dim=1, keepdim=True).squeeze()


class Branches(Named):
    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) if x.sum() > 0 else self.layer(-x)


class OfOneSize(Named):
    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x.view(12, 5)) if len(x) == 12 else self.layer(x)


class Leaves(Named):
    def forward(self, x: torch.Tensor) -> Any:
        return torch.from_numpy(self.layer(x).detach().numpy())


class Noisy(Named):
    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x) + torch.rand(1)


class Slopes(Named):
    def forward(self, x: torch.Tensor) -> Any:
        with torch.enable_grad():
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.layer(x).tanh().sum(), x)
        return slope


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Squeezed, "output must have the batch as its first dimension, got the shape () for one"),
        (Branches, "it decides by the values of its inputs"),
        (OfOneSize, "it is written for certain batch sizes"),
        (Leaves, "it leaves PyTorch by .numpy()"),
        (Noisy, "it gives two answers to the same input"),
    ],
)
def test_a_forward_that_cannot_be_traced_is_told_in_its_own_terms_and_its_weights_are_written(
    module: type[Named], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = Loaded(module().eval(), Rooms(), {}, {}, Path("best.ckpt"))
    with pytest.raises(UserError) as error:
        export.export_all(loaded, tmp_path, ["onnx", "pt2", "safetensors"], None)
    assert str(error.value).startswith(f"{module.__name__}.forward cannot be exported: {reason}")
    assert "\n" not in str(error.value)
    assert "def forward" not in "".join(capsys.readouterr())
    assert os.listdir(tmp_path) == ["model.safetensors"]
    written = load_file(tmp_path / "model.safetensors")
    assert torch.equal(written["layer.weight"], loaded.module.layer.weight)


TRACES_A_BACKWARD_PASS = """
import sys
from pathlib import Path
from tests.test_export import Loaded, Rooms, Slopes, UserError, export

loaded = Loaded(Slopes().eval(), Rooms(), {}, {}, Path("best.ckpt"))
try:
    export.export_all(loaded, Path(sys.argv[1]), ["pt2", "safetensors"], None)
except UserError as error:
    print(error)
"""


def test_a_forward_that_asks_for_gradients_is_told_so(tmp_path: Path) -> None:
    """In a process of its own: autograd starts threads for it, and no fork can train then."""
    ended = complete([sys.executable, "-c", TRACES_A_BACKWARD_PASS, str(tmp_path)])
    assert "Slopes.forward cannot be exported: it asks for gradients" in ended.stdout
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_weights_alone_need_neither_a_trace_nor_a_test_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.export.export", None)
    monkeypatch.setattr(MNISTDataModule, "prepare_data", None)
    flags = ["--output_dir", str(tmp_path / "out"), "--formats", "safetensors"]
    table = ["--output", str(tmp_path / "table.json")]
    words = ["--ckpt_path", str(trained_checkpoint()), *flags, *table]
    assert entry.exit_code(partial(export.main, "numerals"), words) == 0
    assert os.listdir(tmp_path / "out") == ["model.safetensors"]
    (row,) = json.loads((tmp_path / "table.json").read_text())
    assert row["agrees"] is True
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata()["run_name"] == "trained"


def test_a_file_that_no_export_has_written_is_not_replaced_and_an_older_export_is(
    folder: Path, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in export.FILES.values():
        refuse_file_of_others(folder / name, export.MARK, "--output_dir")
    theirs = workplace / "out/model.safetensors"
    theirs.parent.mkdir()
    theirs.write_text("x")
    words = ["--ckpt_path", str(trained_checkpoint()), "--output_dir", "out"]
    for formats in (["--formats", "safetensors"], []):
        assert entry.exit_code(partial(export.main, "numerals"), [*words, *formats]) == 2
        told = capsys.readouterr().err
        assert "out/model.safetensors was not written by this command" in told
        assert told.count("\n") == 1
    assert theirs.read_text() == "x"
    assert os.listdir("out") == ["model.safetensors"]


class NoForward(LightningModule):
    pass


class TakesText(LightningModule):
    def forward(self, text: str) -> str:
        return text


class Fails(Prices):
    def forward(self, inside: torch.Tensor, outside: torch.Tensor) -> Any:
        return self.layer(torch.cat([inside, outside], dim=1))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (NoForward(), "export traces the module's forward, and NoForward has none. Write one."),
        (TakesText(), "export has nothing to trace TakesText with: no test set"),
        (
            Fails(),
            "export has nothing .*: no test set.*; "
            "Fails.forward fails on example_input_array: .*mat1 and mat2",
        ),
    ],
)
def test_what_a_module_lacks_is_one_line_before_any_work(
    module: LightningModule, message: str
) -> None:
    with pytest.raises(UserError, match=f"^{message}") as error:
        find_samples(Loaded(module.eval(), None, {}, {}, Path("best.ckpt")))
    assert "\n" not in str(error.value)


@pytest.mark.nightly
def test_an_export_that_disagrees_is_an_error_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exports see other pixels than the checkpoint: the kind of mistake that the comparison is
    for.
    """
    exported = Samples.exported.fget
    assert exported is not None
    monkeypatch.setattr(Samples, "exported", property(lambda self: (exported(self)[0] + 0.01,)))
    flags = ["--ckpt_path", str(trained_checkpoint()), "--output_dir", str(tmp_path / "out")]
    assert entry.exit_code(partial(export.main, "numerals"), flags) == 1
    assert os.listdir(tmp_path / "out") == []
    assert re.search("onnx .* no ", capsys.readouterr().out)


def test_a_network_that_cannot_be_exported_is_one_line(tmp_path: Path) -> None:
    class Undecided(ConvNet):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images) if images.sum() > 0 else super().forward(-images)

    loaded = Loaded(
        MNISTClassifier(Undecided()).eval(),
        MNISTDataModule(source="sample"),
        {},
        {},
        Path("best.ckpt"),
    )
    samples = find_samples(loaded)
    with pytest.raises(UserError, match=r"MNISTClassifier.forward cannot be exported: ") as error:
        trace(loaded, samples)
    assert "\n" not in str(error.value)


@pytest.mark.nightly
def test_without_the_training_data_an_export_is_checked_on_random_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_network(self: MNISTDataModule) -> None:
        raise OSError("no network")

    monkeypatch.setattr(MNISTDataModule, "_download", no_network)
    flags = [
        "--output_dir",
        str(tmp_path / "out"),
        "--data.root",
        str(tmp_path / "none"),
        "--data.source",
        "mnist",
    ]
    assert (
        entry.exit_code(
            partial(export.main, "numerals"), ["--ckpt_path", str(trained_checkpoint()), *flags]
        )
        == 0
    )
    assert "on 1,000 samples (random images; no test set" in capsys.readouterr().out
    metadata = onnx.load(tmp_path / "out" / "model.onnx").metadata_props
    assert not any(prop.key == "test/accuracy" for prop in metadata)


@pytest.mark.parametrize(
    ("typed", "source"), [([], "sample test"), (["--data.root"], "mnist test")]
)
def test_a_run_that_found_the_bundled_digits_is_checked_on_them_unless_others_are_named(
    typed: list[str], source: str, tmp_path: Path, mnist_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(
        fit, trained_checkpoint(), ["--data.source", "auto", "--data.root", str(mnist_root)]
    )
    seen: list[str] = []

    def noted(loaded: Loaded) -> Any:
        seen.append(find_samples(loaded).source)
        raise UserError("enough")

    monkeypatch.setattr("unbroken.cli.read_checkpoint.load", lambda *_: loaded)
    monkeypatch.setattr("unbroken.commands.export.samples.find_samples", noted)
    words = [word for name in typed for word in (name, str(mnist_root))]
    assert (
        entry.exit_code(
            partial(export.main, "numerals"),
            ["--ckpt_path", str(loaded.path), "--output_dir", str(tmp_path), *words],
        )
        == 2
    )
    assert seen == [source]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ckpt_path", "missing.ckpt"], "there is no checkpoint missing.ckpt"),
        (["--output", "x.onnx"], "--output must end in .json or .csv, got x.onnx"),
        (["--outputdir", "x"], "unknown option --outputdir. Did you mean --output_dir?"),
        (["--output", "x.onnx"], "--output_dir says where the model's files go"),
        (["--output_dir", "FILE"], "--output_dir must be a folder"),
        (["--output_dir", "x.csv"], "is a file of its own: --output x.csv"),
        (["--formats", "onxx"], "be any of onnx, pt2, safetensors, got onxx. Did you mean onnx?"),
        (
            ["--output_dir", "new", "--data.source", "x"],
            "--data.source must be one of auto, mnist, sample, got x",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    workplace: Path,
) -> None:
    (tmp_path / "file").touch()
    words = [str(tmp_path / "file") if word == "FILE" else word for word in words]
    checkpoint = [] if "--ckpt_path" in words else ["--ckpt_path", str(trained_checkpoint())]
    assert entry.exit_code(partial(export.main, "numerals"), [*words, *checkpoint]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not Path("new").exists()


@pytest.mark.nightly
def test_a_folder_whose_name_is_not_utf8_is_refused_before_anything_is_made(
    workplace: Path,
) -> None:
    with pytest.raises(UserError, match=r"--output_dir must be a folder .*its name is not UTF-8"):
        export.main(
            "numerals",
            ["--ckpt_path", str(trained_checkpoint()), "--output_dir", os.fsdecode(b"new\xff")],
        )
    assert not os.listdir()


def test_packages_that_are_allowed_are_told_to_whoever_loads_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def noted(program: Any, path: Path, words: list[str]) -> Any:
        raise UserError(" ".join(words))

    monkeypatch.setattr("unbroken.cli.read_checkpoint.load", noted)
    flags = [
        "--ckpt_path",
        str(trained_checkpoint()),
        "--output_dir",
        str(tmp_path),
        "--data.source",
        "sample",
    ]
    with pytest.raises(UserError, match=r"^--trust_checkpoint=true --data.source=sample$"):
        export.main("numerals", [*flags, "--trust_checkpoint", "true"])


def test_a_pixel_in_0_to_1_is_what_a_byte_was_in_training(loaded: Loaded) -> None:
    images = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 28, 28)
    of_bytes = answer(loaded.module, (images,))["output"]
    np.testing.assert_allclose(
        of_bytes, answer(loaded.module, (images.float() / 255,))["output"], atol=1e-4
    )
