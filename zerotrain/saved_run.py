"""A checkpoint of a run from a config: what it was trained with, and its model again, without an engine."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf.errors import OmegaConfBaseException
from torch import nn

from zerotrain.checkpoint.whole import SavedTensors, opened
from zerotrain.config.compose import first_line, from_values
from zerotrain.config.schema import Config
from zerotrain.errors import CheckpointError, ConfigError
from zerotrain.factory import build, build_on_meta

TEXT = "zerotrain.data.TextDataset"
HUGGING_FACE = "zerotrain.models.HuggingFaceModel"
NO_CONFIG = (
    "was not saved by a run of launch.py, and does not say what its model is; build it in Python, and load what "
    "`python -m zerotrain.export` writes of it"
)


@dataclass(frozen=True)
class SavedRun:
    """An open checkpoint, and the resolved config of the run that saved it; None for a loop of one's own."""

    saved: SavedTensors
    config: Config | None

    @property
    def path(self) -> Path:
        return self.saved.path

    def require_config(self) -> Config:
        """The config.

        Raises:
            ConfigError: there is none.
        """
        if self.config is None:
            raise ConfigError(f"{self.path} {NO_CONFIG}")
        return self.config

    @property
    def is_hugging_face(self) -> bool:
        return self.config is not None and self.config.model.get("_target_") == HUGGING_FACE

    @property
    def tokenizer_name(self) -> str | None:
        """The Hugging Face tokenizer of the data; None for bytes, or where the data names none."""
        name = None if self.config is None else self.config.data.get("tokenizer")
        return name if isinstance(name, str) else None

    @property
    def reads_bytes(self) -> bool:
        """Whether a token is a byte of text."""
        return self.config is not None and self.config.data.get("_target_") == TEXT and self.tokenizer_name is None

    def on_meta(self) -> nn.Module:
        """The model without memory.

        Raises:
            ConfigError: it cannot be built.
        """
        model = build_on_meta(self.require_config())
        if model is None:
            raise ConfigError(f"model: {self.require_config().model.get('_target_')} cannot be built without memory")
        return model

    def model(self, device: torch.device) -> nn.Module:
        """The model with the weights and buffers of the checkpoint, in fp32, in evaluation mode.

        Raises:
            ConfigError: it cannot be built.
            CheckpointError: the checkpoint is not what was written, or of another model.
        """
        model: nn.Module = build("model", self.require_config().model_target)
        targets = model.state_dict(keep_vars=True)
        given = {id(targets[name]) for name in self.saved.names if name in targets}
        missing = [name for name, tensor in targets.items() if isinstance(tensor, torch.Tensor)]
        missing = [name for name in missing if id(targets[name]) not in given]
        unknown = [name for name in self.saved.names if name not in targets]
        if missing or unknown:
            first = missing[0] if missing else unknown[0]
            raise CheckpointError(
                f"{self.path} does not fit the model that its config builds: {first} is in one of the two alone; was "
                "the class changed?"
            )
        with torch.no_grad():
            for name in self.saved.names:
                values, target = self.saved.read(name), targets[name]
                if values.shape != target.shape:
                    raise CheckpointError(
                        f"{self.path} does not fit the model that its config builds: {name} is of shape "
                        f"{tuple(values.shape)}, and the model's of shape {tuple(target.shape)}"
                    )
                target.copy_(values)
        return model.to(device).eval()


def has_tokenizer(name: str) -> bool:
    """Whether a folder has files of a tokenizer; transformers makes an empty one for a folder with a model alone.
    What is no folder may be a name on the hub."""
    if not os.path.isdir(name):
        return True
    kinds = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "*.spm")
    return any(True for kind in kinds for _ in Path(name).glob(kind))


@contextmanager
def opened_run(path: str | os.PathLike[str]) -> Iterator[SavedRun]:
    """Of what a user named, a checkpoint, a folder of them or a run, the newest checkpoint.

    Raises:
        CheckpointError: there is none, or its manifest is not what was written.
        ConfigError: its config is of another version.
    """
    with opened(Path(path).absolute()) as saved:
        values = saved.manifest.content["config"]
        try:
            config = from_values(values) if isinstance(values, dict) and "model" in values else None
        except OmegaConfBaseException as error:
            raise ConfigError(
                f"{saved.path} has a config that this zerotrain does not know: {first_line(error)}"
            ) from None
        yield SavedRun(saved, config)
