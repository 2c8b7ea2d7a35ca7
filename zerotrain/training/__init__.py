"""The training loop around an engine: schedule, metrics, evaluation, progress, report."""

from zerotrain.training.figures.result import RunResult
from zerotrain.training.figures.sinks import MetricSink
from zerotrain.training.schedule import constant, warmup_cosine
from zerotrain.training.trainer import Trainer

__all__ = ["MetricSink", "RunResult", "Trainer", "constant", "warmup_cosine"]
