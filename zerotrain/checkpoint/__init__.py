"""Checkpoints as files: one safetensors file a rank and a manifest, written whole or not at all, verified when read.

Nothing here knows an engine or another rank: `engine/state` says what is saved and where it goes. The format is told in
docs/reference/checkpoint_promises.md.
"""

from zerotrain.checkpoint.folder import checkpoints_in
from zerotrain.checkpoint.verification import verify

__all__ = ["checkpoints_in", "verify"]
