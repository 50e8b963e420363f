from __future__ import annotations

import json
import os
import re
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from project import export
from project import export_files as export_check
from project.data import MNISTDataModule
from project.engine import command as entry
from project.engine.checkpoint_files import Loaded, load
from project.errors import UserError
from project.export_files import InferenceGraph, compare, reference_logits, write_onnx, write_pt2, write_safetensors
from project.model import MLP, ConvNet, MNISTClassifier
from tests.trained import trained_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a run's best.ckpt and what `export` wrote beside it."""
    folder = tmp_path_factory.mktemp("run")
    shutil.copy(trained_checkpoint(), folder / "best.ckpt")
    assert entry.exit_code(export.main, ["--ckpt_path", str(folder / "best.ckpt")]) == 0
    assert sorted(os.listdir(folder)) == ["best.ckpt", "model.onnx", "model.pt2", "model.safetensors"]
    return folder


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    loaded = load(folder / "best.ckpt", ["--data.source", "sample"])
    loaded.datamodule.setup("test")
    return loaded


@pytest.fixture(scope="module")
def images(loaded: Loaded) -> torch.Tensor:
    return loaded.datamodule.splits["test"].images


@pytest.mark.parametrize("batch_size", [1, 7, 1024])
def test_onnx_and_torch_export_agree_with_the_checkpoint_on_every_test_image(
    batch_size: int, folder: Path, loaded: Loaded, images: torch.Tensor
) -> None:
    agree_on(images, batch_size, folder, loaded)


@pytest.mark.full_mnist
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
    expected = reference_logits(loaded, images)
    session = onnxruntime.InferenceSession(folder / "model.onnx", providers=["CPUExecutionProvider"])
    program = torch.export.load(folder / "model.pt2").module()
    parts = (images.float() / 255).split(batch_size)
    by_onnx = torch.cat([torch.from_numpy(session.run(["logits"], {"images": part.numpy()})[0]) for part in parts])
    with torch.inference_mode():
        by_torch = torch.cat([program(part) for part in parts])
    for logits in (by_onnx, by_torch):
        assert (logits.argmax(dim=1) != expected.argmax(dim=1)).sum() == 0
        assert (logits - expected).abs().max() <= 1e-4


def test_the_files_say_what_goes_in_what_comes_out_and_where_they_are_from(folder: Path, loaded: Loaded) -> None:
    model = onnx.load(folder / "model.onnx")
    for value, name, shape in ((model.graph.input[0], "images", [1, 28, 28]), (model.graph.output[0], "logits", [10])):
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
    accuracy = (reference_logits(loaded, test.images).argmax(dim=1) == test.labels).double().mean()
    assert float(facts["test/accuracy"]) == pytest.approx(accuracy.item(), abs=1e-6)


def test_safetensors_hold_the_checkpoints_weights_bit_for_bit(folder: Path) -> None:
    saved = torch.load(folder / "best.ckpt", weights_only=True)["state_dict"]
    weights = load_file(folder / "model.safetensors")
    assert {f"network.{name}" for name in weights} == {name for name in saved if name.startswith("network.")}
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
def test_other_shapes_and_ways_of_training_export_as_well(tmp_path: Path, network: nn.Module, options: dict) -> None:
    module = MNISTClassifier(network, **options).eval()
    loaded = Loaded(module, ThreeColours(), {}, {}, Path("best.ckpt"))
    exported = InferenceGraph(loaded).export()
    files = [tmp_path / name for name in export.NAMES]
    for write, path in zip((write_onnx, write_pt2), files, strict=False):
        write(path, exported, {})
    write_safetensors(files[2], loaded, {})
    images = torch.randint(256, (100, 3, 16, 24), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    rows = compare(loaded, images, *files)
    assert len(rows) == 7
    assert all(row["agrees"] and row["images"] == 100 for row in rows)


def test_an_export_that_disagrees_is_an_error_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The export normalises with another mean: the kind of mistake that the comparison is for."""
    normalize = MNISTDataModule.normalize
    monkeypatch.setattr(
        MNISTDataModule, "normalize", lambda self, x: normalize(self, x) + 0.01 * (x.dtype != torch.uint8)
    )
    flags = ["--ckpt_path", str(trained_checkpoint()), "--output_dir", str(tmp_path / "out")]
    assert entry.exit_code(export.main, flags) == 1
    assert os.listdir(tmp_path / "out") == []
    assert re.search("onnx .* no ", capsys.readouterr().out)


def test_a_network_that_cannot_be_exported_is_one_line(tmp_path: Path) -> None:
    class Undecided(ConvNet):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images) if images.sum() > 0 else super().forward(-images)

    loaded = Loaded(MNISTClassifier(Undecided()).eval(), MNISTDataModule(), {}, {}, Path("best.ckpt"))
    with pytest.raises(UserError, match="its network cannot be exported: ") as error:
        InferenceGraph(loaded).export()
    assert "\n" not in str(error.value)


def test_without_the_training_data_an_export_is_checked_on_random_images(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_network(self: MNISTDataModule) -> None:
        raise OSError("no network")

    monkeypatch.setattr(MNISTDataModule, "_download", no_network)
    flags = ["--output_dir", str(tmp_path / "out"), "--data.root", str(tmp_path / "none"), "--data.source", "mnist"]
    assert entry.exit_code(export.main, ["--ckpt_path", str(trained_checkpoint()), *flags]) == 0
    assert "1,000 random images" in capsys.readouterr().out
    metadata = onnx.load(tmp_path / "out" / "model.onnx").metadata_props
    assert not any(prop.key == "test/accuracy" for prop in metadata)


@pytest.mark.full_mnist
@pytest.mark.parametrize(("typed", "source"), [([], "sample test"), (["--data.root"], "mnist test")])
def test_a_run_that_found_the_bundled_digits_is_checked_on_them_unless_others_are_named(
    typed: list[str], source: str, tmp_path: Path, mnist_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(trained_checkpoint(), ["--data.source", "auto", "--data.root", str(mnist_root)])
    seen: list[str] = []
    find_images = export_check.test_images

    def noted(loaded: Loaded, as_in_training: bool) -> Any:
        seen.append(find_images(loaded, as_in_training)[2])
        raise UserError("enough")

    monkeypatch.setattr("project.engine.checkpoint_files.load", lambda *_: loaded)
    monkeypatch.setattr("project.export_files.test_images", noted)
    words = [word for name in typed for word in (name, str(mnist_root))]
    assert entry.exit_code(export.main, ["--ckpt_path", str(loaded.path), "--output_dir", str(tmp_path), *words]) == 2
    assert seen == [source]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--ckpt_path", "missing.ckpt"], "there is no checkpoint missing.ckpt"),
        (["--output", "x.onnx"], "--output must end in .json or .csv, got x.onnx"),
        (["--outputdir", "x"], "unknown option --outputdir. Did you mean --output_dir?"),
        (["--output_dir", "FILE"], "--output_dir must be a folder"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    words = [str(tmp_path / "file") if word == "FILE" else word for word in words]
    checkpoint = [] if "--ckpt_path" in words else ["--ckpt_path", str(trained_checkpoint())]
    assert entry.exit_code(export.main, [*words, *checkpoint]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_a_pixel_in_0_to_1_is_what_a_byte_was_in_training(loaded: Loaded) -> None:
    images = torch.arange(256, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 28, 28)
    difference = loaded.datamodule.normalize(images) - loaded.datamodule.normalize(images.float() / 255)
    np.testing.assert_allclose(difference, 0, atol=1e-6)
