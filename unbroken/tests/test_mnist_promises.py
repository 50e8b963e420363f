"""The promises on MNIST itself: the bundled digits, augmented."""

from __future__ import annotations

from pathlib import Path

from tests.promises import PictureSuite, PromiseSuite


class TestMNIST(PromiseSuite, PictureSuite):
    reached = ("test/accuracy", 0.25)  # real digits, twenty steps

    @classmethod
    def arguments(cls, folder: Path) -> list[str]:
        sizes = [
            "--data.train_samples",
            "320",
            "--data.val_samples",
            "100",
            "--data.test_samples",
            "201",
        ]
        augmentation = ["--data.rotate_degrees", "10", "--data.shift_pixels", "2"]
        return ["--data.source", "sample", *sizes, *augmentation, "--data.batch_size", "32"]
