"""A plain Trainer script, with ExactCheckpoint as its only addition: plain_script.py FOLDER WORKERS
DEVICES.
"""

import sys

from lightning.pytorch import Trainer, seed_everything
from lightning.pytorch.loggers import CSVLogger
from unbroken import ExactCheckpoint

from tests.plain_module import Regression

folder, workers, devices = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
seed_everything(7, workers=True, verbose=False)
keep = ExactCheckpoint(folder, monitor="val_loss", mode="min", every="5")
trainer = Trainer(
    max_epochs=2,
    accelerator="cpu",
    devices=devices,
    callbacks=[keep],
    log_every_n_steps=10,
    logger=CSVLogger(folder, "log", version=str(len(list(keep.folder.glob("log/*"))))),
)
trainer.fit(Regression(workers), ckpt_path=keep.resume_from)
