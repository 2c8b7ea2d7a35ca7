"""A folder that `python -m zerotrain export` has written: what it says of itself, and its weights."""

import os
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerotrain.checkpoint.others.weights import find_weights
from zerotrain.errors import ConfigError
from zerotrain.files.untrusted import Natural, OneOf, UntrustedFileError, read_json
from zerotrain.run.saved import OfRun, config_from, opened_run

ABOUT = "zerotrain_export.json"
"""What an export is of. A folder without it is none of ours, or is not whole: it is written last."""
MODEL = "the model"
HUGGING_FACE = "a model of Hugging Face"
ADAPTERS = "adapters"
MERGED = "a model of Hugging Face, adapters merged"
DCP = "a folder of torch.distributed.checkpoint"
MAX_ABOUT_NBYTES = 1 << 26
_ABOUT = {
    "step": Natural(),
    "form": OneOf((MODEL, HUGGING_FACE, ADAPTERS, MERGED, DCP)),
    "config": object,
    "data_fingerprint": object,
}
_OF_DCP = "model"
"""The part of such a folder that weights lie in."""


@dataclass(frozen=True)
class ExportedRun(OfRun):
    """An exported folder."""

    folder: Path
    said: Mapping[str, Any]
    """What `ABOUT` has in it."""

    @property
    def path(self) -> Path:
        return self.folder

    @property
    def step(self) -> int:
        return int(self.said["step"])

    @property
    def form(self) -> str:
        """What lies in the folder: `MODEL`, `HUGGING_FACE`, `ADAPTERS`, `MERGED` or `DCP`."""
        return str(self.said["form"])

    @property
    def data_fingerprint(self) -> Mapping[str, Any] | None:
        found = self.said["data_fingerprint"]
        return found if isinstance(found, dict) else None

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        with closing(find_weights(self.folder)) as weights:
            for each in weights.tensors:
                if self.form != DCP or each.part == _OF_DCP:
                    values = torch.empty(torch.Size(each.shape).numel(), dtype=each.dtype)
                    if values.numel():
                        weights.read(each, 0, values)
                    yield each.names[0], values.as_strided(each.shape, each.stride)


def exported_run(folder: Path, *, trust_code: bool = False) -> ExportedRun | None:
    """What an exported folder is of; None where it is no exported folder.

    Args:
        trust_code: see `OfRun.trusts_code`.

    Raises:
        ConfigError: it does not say so, or has a config of another version.
    """
    try:
        said = read_json(folder / ABOUT, _ABOUT, max_nbytes=MAX_ABOUT_NBYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{folder / ABOUT} cannot be read: {error.strerror}") from error
    except UntrustedFileError:
        raise ConfigError(f"{folder / ABOUT} does not say what run the folder is of; export it again") from None
    values = said["config"]
    is_of_run = isinstance(values, dict) and "model" in values
    config = config_from(values, folder) if is_of_run else None
    return ExportedRun(config, folder, said, trusts_code=trust_code)


@contextmanager
def opened_or_exported(path: str | os.PathLike[str], *, trust_code: bool = False) -> Iterator[OfRun]:
    """Of what a user named an exported folder, or the newest checkpoint.

    Args:
        trust_code: see `OfRun.trusts_code`.

    Raises:
        ConfigError: see `exported_run`.
        CheckpointError: there is none, or its manifest is not what was written.
    """
    exported = exported_run(Path(path).absolute(), trust_code=trust_code)
    if exported is not None:
        yield exported
        return
    with opened_run(path, trust_code=trust_code) as run:
        yield run
