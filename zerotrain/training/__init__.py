"""The training loop around an engine: schedule, metrics, evaluation, progress, report."""

from zerotrain.training.callback import Callback, Run
from zerotrain.training.metrics import Accuracy, Metric, Perplexity, TorchMetric
from zerotrain.training.request import Request
from zerotrain.training.result import MetricSink, RunResult
from zerotrain.training.schedule import (
    constant,
    warmup_cosine,
    warmup_inverse_sqrt,
    warmup_linear,
    warmup_polynomial,
    warmup_stable_decay,
)
from zerotrain.training.trainer import Trainer

__all__ = [
    "Accuracy",
    "Callback",
    "Metric",
    "MetricSink",
    "Perplexity",
    "Request",
    "Run",
    "RunResult",
    "TorchMetric",
    "Trainer",
    "constant",
    "warmup_cosine",
    "warmup_inverse_sqrt",
    "warmup_linear",
    "warmup_polynomial",
    "warmup_stable_decay",
]
