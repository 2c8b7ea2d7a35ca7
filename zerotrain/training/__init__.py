"""The training loop around an engine: schedule, metrics, evaluation, progress, report."""

from zerotrain.training.result import RunResult
from zerotrain.training.schedule import constant, warmup_cosine
from zerotrain.training.sinks import MetricSink
from zerotrain.training.trainer import Trainer

__all__ = ["MetricSink", "RunResult", "Trainer", "constant", "warmup_cosine"]
