"""The training loop around an engine: schedule, metrics, evaluation, progress, report."""

from zerotrain.training.result import RunResult
from zerotrain.training.schedule import constant, warmup_cosine
from zerotrain.training.trainer import Trainer

__all__ = ["RunResult", "Trainer", "constant", "warmup_cosine"]
