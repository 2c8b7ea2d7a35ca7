"""A folder that `python -m zerotrain export` has written: what it says of itself, and its weights."""

import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any, TypedDict

import torch

from zerotrain.checkpoint.others.weights import find_weights
from zerotrain.errors import ConfigError
from zerotrain.files.untrusted import Natural, UntrustedFileError, one_of, read_json
from zerotrain.run.saved import OfRun, config_from, opened_run

ABOUT = "zerotrain_export.json"
"""Describes an export. It is written last: a folder without it is no export, or an incomplete one."""
MODEL = "the model"
HUGGING_FACE = "a model of Hugging Face"
ADAPTERS = "adapters"
MERGED = "a model of Hugging Face, adapters merged"
DCP = "a folder of torch.distributed.checkpoint"
MAX_ABOUT_NBYTES = 1 << 26
_Form = Annotated[str, one_of(MODEL, HUGGING_FACE, ADAPTERS, MERGED, DCP)]


class _ExportAbout(TypedDict):
    step: Natural
    form: _Form
    config: Any
    data_fingerprint: Any


ONE_SET = "--weights: got ema, but {} holds one set of weights; leave it out"
_OF_DCP = "model"
"""The part of such a folder that weights lie in."""


def exported_run(folder: Path, *, trust_code: bool = False) -> OfRun | None:
    """The run that an exported folder is of; None where it is no exported folder.

    Raises:
        ConfigError: it does not say so, or has a config of another version.
    """
    try:
        said = read_json(folder / ABOUT, _ExportAbout, max_nbytes=MAX_ABOUT_NBYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{folder / ABOUT} cannot be read: {error.strerror}") from error
    except UntrustedFileError:
        raise ConfigError(f"{folder / ABOUT} does not name the run that was exported; export it again") from None
    form, fingerprint = str(said["form"]), said["data_fingerprint"]
    return OfRun(
        path=folder,
        step=int(said["step"]),
        config=config_from(said["config"], folder),
        form=form,
        data_fingerprint=fingerprint if isinstance(fingerprint, dict) else None,
        tensors=lambda: _tensors(folder, form),
        trusts_code=trust_code,
    )


def _tensors(folder: Path, form: str) -> Iterator[tuple[str, torch.Tensor]]:
    with closing(find_weights(folder)) as weights:
        for each in weights.tensors:
            if form != DCP or each.part == _OF_DCP:
                values = torch.empty(torch.Size(each.shape).numel(), dtype=each.dtype)
                if values.numel():
                    weights.read(each, 0, values)
                yield each.names[0], values.as_strided(each.shape, each.stride)


@contextmanager
def opened_or_exported(
    path: str | os.PathLike[str], *, trust_code: bool = False, averaged: bool = False
) -> Iterator[OfRun]:
    """Open an exported folder, or the newest checkpoint of what a user named; raises as `exported_run`.

    Args:
        averaged: whether the weights of a checkpoint are to be their averages. An export has one set of weights: a
            ConfigError.
    """
    exported = exported_run(Path(path).absolute(), trust_code=trust_code)
    if exported is not None:
        if averaged:
            raise ConfigError(ONE_SET.format(path))
        yield exported
        return
    with opened_run(path, trust_code=trust_code, averaged=averaged) as run:
        yield run
