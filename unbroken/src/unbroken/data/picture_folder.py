"""Pictures in a folder for each class: ``folder/CLASS/picture.png``."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image
from torchvision.datasets import DatasetFolder
from unbroken.errors import BadImage, UserError
from unbroken.pictures import image_endings
from unbroken.pictures import read_picture as read_picture


def class_folders(folder: str | Path) -> list[str]:
    """The classes of a training folder: its folders' names in alphabetical order.

    A hidden folder, such as ``.ipynb_checkpoints``, is no class. Without a folder there is none.
    """
    path = Path(folder)
    if not path.is_dir():
        return []
    return sorted(each.name for each in path.iterdir() if each.is_dir() and is_visible(each))


def check_classes(folder: str | Path, classes: Sequence[str]) -> None:
    """A UserError where a split's folder has other classes than the training's."""
    found = class_folders(folder)
    if sorted(found) != sorted(classes):
        raise UserError(
            f"{folder} must hold a folder for each class of the training"
            f" ({', '.join(classes)}), got {', '.join(found) or 'none'}."
            " A class without a picture there needs an empty folder."
        )


def is_visible(path: str | Path) -> bool:
    """Whether a file or folder is not hidden."""
    return not Path(path).name.startswith(".")


class PictureFolder(DatasetFolder):
    """Samples are ``(picture, class number)``: pictures as :func:`read_picture` reads them.

    Args:
        folder: Holds a folder for each class.
        classes: The names of all classes, in the order of their numbers. They are numbered once, by
            the training folder (:func:`class_folders`), and every split uses these numbers.
        transform: Changes a picture, an 8-bit RGB image of Pillow's.

    Raises:
        UserError: The folder has other classes. A class without a picture has an empty folder.
    """

    def __init__(
        self,
        folder: str | Path,
        classes: Sequence[str],
        transform: Callable[[Image.Image], Any] | None = None,
    ) -> None:
        self.numbered = list(classes)
        super().__init__(
            str(folder),
            read_or_name,
            transform=transform,
            is_valid_file=is_picture,
            allow_empty=True,
        )

    def find_classes(self, directory: str) -> tuple[list[str], dict[str, int]]:
        """The classes by their numbers. torchvision would number the folders that it finds."""
        check_classes(directory, self.numbered)
        return self.numbered, {name: number for number, name in enumerate(self.numbered)}


def is_picture(path: str) -> bool:
    """Whether a file is a picture by its ending, and not hidden."""
    return is_visible(path) and Path(path).suffix.lower() in image_endings()


def read_or_name(path: str) -> Image.Image:
    """:func:`read_picture`; a UserError that names the file where it cannot be read."""
    try:
        return read_picture(path)
    except BadImage as error:
        raise UserError(f"{path} cannot be read: {error}.") from None
