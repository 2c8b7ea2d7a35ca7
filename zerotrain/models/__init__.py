"""Plain single-device models: nothing here knows of ranks, shards or the engine.

A model is an `nn.Module` with `forward(ids, labels)` -> mean loss and `forward(ids)` -> logits. Its repeated blocks are
children of one `nn.ModuleList` and its modules are defined in the order in which forward uses them.
"""

from zerotrain.models.gpt import GPT, MLP
from zerotrain.models.huggingface import HuggingFaceModel

__all__ = ["GPT", "MLP", "HuggingFaceModel"]
