"""Old class paths in checkpoints, and the new ones. Only checkpoints of older versions need it."""

from typing import Any

# Until the library had a package of its own, all of it stood in this one, and the classifier was
# what unbroken.tasks.ImageClassifier is now.
MOVED: dict[str, str | dict[str, Any]] = {
    "project.model.MNISTClassifier": {
        "class_path": "unbroken.tasks.ImageClassifier",
        "init_args": {"network": {"class_path": "project.model.ConvNet", "init_args": {}}},
    },
    "project.model.ImageClassifier": "unbroken.tasks.ImageClassifier",
    "project.model.SupervisedModule": "unbroken.tasks.SupervisedModule",
    "project.model.supervised": "unbroken.tasks.supervised",
    "project.data.SplitDataModule": "unbroken.data.SplitDataModule",
    "project.data.BatchedDataModule": "unbroken.data.BatchedDataModule",
    "project.data.base": "unbroken.data.base",
    "project.data.images": "unbroken.data.images",
    "project.data.augmentation": "unbroken.data.augmentation",
    "project.profiler": "unbroken.monitors.profiler",
}
