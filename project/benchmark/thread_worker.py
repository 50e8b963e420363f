"""Trains a few steps whenever it is asked to, under the thread settings of its environment. See threads.py.

Reads the configuration as JSON from the first line of stdin, then one line per measurement; answers each with
milliseconds per step. Not through project.engine.command: that would choose the thread settings that are to be measured.
"""

from __future__ import annotations

import json
import os
import sys
import time


def main(steps: int) -> None:
    """Answer until stdin ends."""
    config = json.loads(sys.stdin.readline())
    from project.threads import keep_freed_memory

    keep_freed_memory()
    import torch

    from project.benchmark.by_hand import FloorLoop
    from project.engine.cli import build_from_config

    with open(os.devnull, "w") as nowhere:  # stdout is for the answers
        answers, sys.stdout = sys.stdout, nowhere
        module, datamodule = build_from_config(config, [])
        datamodule.setup("fit")
        datamodule.splits.pop("val", None)
        loop = FloorLoop(module.network, datamodule, torch.device("cpu"), steps=steps)  # type: ignore[arg-type]
        for _ in sys.stdin:
            began = time.perf_counter()
            loop.epoch()
            count = min(steps, datamodule.train_batches_per_epoch())
            print(1000 * (time.perf_counter() - began) / count, file=answers, flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]))
