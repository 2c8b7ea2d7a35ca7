"""Numbers of evaluations and of training beside the loss, such as accuracy: the same digits on any number of ranks."""

from zerotrain.training.metrics.metric import Accuracy, Metric, Perplexity, TorchMetric

__all__ = ["Accuracy", "Metric", "Perplexity", "TorchMetric"]
