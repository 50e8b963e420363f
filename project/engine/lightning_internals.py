"""What is reached into Lightning for: private names of its objects, in this file only, each with its reason."""

from __future__ import annotations

from lightning.pytorch import Trainer


def leave_signals_alone(trainer: Trainer) -> None:
    """Keep Lightning from putting its own signal handlers in the place of ours, which end the command."""
    trainer._signal_connector.register_signal_handlers = lambda: None  # type: ignore[method-assign]
