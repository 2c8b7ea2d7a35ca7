"""Whether what a run begins with fits its model, looked at before any rank starts."""

from torch import nn

from zerotrain.checkpoint.manifest import Manifest
from zerotrain.config.schema import CheckpointConfig
from zerotrain.config.words import in_words_of_config
from zerotrain.engine.state.sources.files import weight_misfits
from zerotrain.engine.state.sources.fit import model_misfits
from zerotrain.sharding.units import model_parameters


def start_misfits(model: nn.Module, checkpoint: CheckpointConfig, goes_on_from: Manifest | None) -> list[str]:
    """A line for each kind of what does not fit, as far as names and shapes tell.

    Args:
        model: may be without memory.
        goes_on_from: the checkpoint; None for a run that starts anew, perhaps with weights.
    """
    if goes_on_from is not None:
        return [f"checkpoint.resume: {line}" for line in model_misfits(goes_on_from, model_parameters(model))]
    if checkpoint.init_from is None or not checkpoint.strict:
        return []
    lines = weight_misfits(checkpoint.init_from, model)
    return [f"checkpoint.init_from: {in_words_of_config(line)}" for line in lines]
