"""The output of a run from a config, a checkpoint or an exported folder: its settings, and its model again, without an
engine."""

import inspect
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from functools import cache
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Annotated, Any

import torch
from msgspec import Struct
from omegaconf.errors import ConfigKeyError, OmegaConfBaseException

import zerotrain.data
import zerotrain.models
import zerotrain.training.losses
import zerotrain.training.metrics
from zerotrain.checkpoint.others.weights import find_weights
from zerotrain.checkpoint.verification import CheckpointTensors, open_checkpoint
from zerotrain.config import checks, compose, words
from zerotrain.config.schema import Config
from zerotrain.engine import MuonWithAdamW
from zerotrain.errors import CheckpointError, ConfigError
from zerotrain.files import kept_out, untrusted
from zerotrain.files.match import StoredTensor, match, model_tensors
from zerotrain.preflight import choice, room
from zerotrain.run.factory import averages_in, build, build_on_meta, in_group
from zerotrain.training.callbacks.checkpoints import OF_TRAINER

TEXT = "zerotrain.data.TextDataset"
SPARE_PARAMETERS = 2**20
"""A model may have so many parameters beyond its files' bytes: the reader of the files reports other errors."""
HUGGING_FACE = "zerotrain.models.HuggingFaceModel"
NO_CONFIG = (
    "was not saved by a run of launch.py, and does not say what its model is; build the model in Python, and load "
    "the weights that `zerotrain export` writes"
)


@dataclass(frozen=True, kw_only=True)
class OfRun:
    """A run, as a checkpoint or an exported folder has it."""

    path: Path
    """Path of the folder."""
    step: int
    """Steps done."""
    config: Config | None
    """Resolved; None for a loop of one's own."""
    form: str | None = None
    """Form to which the weights were exported, see `zerotrain.saved.saved`; None: they were not."""
    data_fingerprint: Mapping[str, Any] | None
    """Fingerprint of the run's data, see `zerotrain.data.fetch`; None if unknown."""
    tensors: Callable[[], Iterator[tuple[str, torch.Tensor]]]
    """Gives parameters, under their first name if tied, and buffers, one at a time; raises CheckpointError where they
    are not what was written."""
    trusts_code: bool = False
    """Whether classes may be built that `require_trusted` does not know: the user trusts whoever wrote this."""

    def require_config(self) -> Config:
        """The config; ConfigError where there is none."""
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

    def built(self, group: str, make: Callable[[Config], Any]) -> Any:
        """Build the object of a group of the config, such as model or data.

        Raises:
            ConfigError: it names a class that is not trusted, or cannot be built.
        """
        config = self.require_config()
        values = config.target(group)
        if not self.trusts_code:
            require_trusted(config, (group,), self.path)
        nbytes = sum(file.stat().st_size for file in self.path.rglob("*") if file.is_file())

        def refuse_countless(numel: int) -> None:
            """The files have all parameters of their model: a config that makes more of them, such as a million layers,
            is not the one they were written with."""
            if numel > nbytes + SPARE_PARAMETERS:
                raise ConfigError(
                    f"{self.path} does not fit the model that its config builds, which has more parameters than the "
                    f"files have bytes ({nbytes:,})"
                )

        with kept_out.nothing_imported_from(self.path), room.watching_parameters(refuse_countless):
            if problems := list(checks.target_problems(values, name=group)):
                raise ConfigError(*(f"{self.path}: {line}" for line in problems))
            try:
                return make(config)
            except ConfigError:
                raise
            except Exception as error:  # whatever a class makes of arguments that nobody has checked
                raise ConfigError(f"{self.path}: {in_group(group, error, values)}") from error

    def on_meta(self) -> torch.nn.Module:
        """The model without memory; ConfigError where it cannot be built."""
        model: torch.nn.Module | None = self.built("model", build_on_meta)
        if model is None:
            raise ConfigError(f"model: {self.require_config().model.get('_target_')} cannot be built without memory")
        return model

    def model(self, device: torch.device) -> torch.nn.Module:
        """The model with the weights and buffers of the checkpoint, in fp32, in evaluation mode.

        Raises:
            ConfigError: it cannot be built.
            CheckpointError: the checkpoint is not what was written, or of another model.
        """
        model = self.built("model", lambda config: build("model", config.target("model")))
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(f"{self.path}: model._target_ makes a {type(model).__name__}, and no torch.nn.Module")
        own = {name: tensor for name, tensor in model.state_dict(keep_vars=True).items() if torch.is_tensor(tensor)}
        tensors = []
        with torch.no_grad():
            for name, values in self.tensors():
                kind = str(values.dtype).removeprefix("torch.")
                tensors.append(StoredTensor([name], kind, values.dtype, tuple(values.shape)))
                if name in own and own[name].shape == values.shape:
                    own[name].copy_(values)
        if problems := match(tensors, model_tensors(own.items())).problems("; was the class changed?"):
            misfit = f"{self.path} does not fit the model that its config builds: "
            raise CheckpointError("\n".join(misfit + problem for problem in problems))
        return model.to(device).eval()


@dataclass(frozen=True, kw_only=True)
class SavedRun(OfRun):
    """An open checkpoint."""

    saved: CheckpointTensors

    @property
    def evaluates_average(self) -> bool:
        """Whether the run's evaluation at this step was that of its average of weights."""
        averages = [] if self.config is None else averages_in(self.config)
        return self.saved.manifest.num_average_updates > 0 and any(
            average.get("evaluate", True) for average in averages
        )


def has_tokenizer(name: str) -> bool:
    """Whether a folder has files of a tokenizer; transformers makes an empty one for a folder with a model alone.
    A name without a folder may be one on the hub."""
    if not os.path.isdir(name):
        return True
    kinds = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "*.spm")
    return any(True for kind in kinds for _ in Path(name).glob(kind))


def config_from(values: Any, path: Path) -> Config | None:
    """The config in a file's values; None where they are none of a run.

    Raises:
        ConfigError: it is of another version, or was edited.
    """
    if not isinstance(values, dict) or "model" not in values:
        return None
    unknown = f"{path} has a config that this zerotrain does not know: "
    try:
        config = compose.from_values(values)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{unknown}{_refusal_line(values, error)}") from None
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise ConfigError(f"{unknown}{compose.first_paragraph(error)}") from None
    for group in fields(config):
        value, expected = getattr(config, group.name), type(getattr(Config(), group.name))
        if not isinstance(value, expected):
            raise ConfigError(f"{unknown}{group.name} is a {type(value).__name__}")
    if problems := checks.value_problems(config) + choice.unchosen_problems(config):
        raise ConfigError(*(f"{unknown}{line}" for line in problems))
    return config


def _refusal_line(values: Any, error: OmegaConfBaseException) -> str:
    """OmegaConf's error about a config, in the user's words: the setting, and its value."""
    if isinstance(error, ConfigKeyError):
        return f"{error.full_key}: there is no such setting"
    name = str(error.full_key or "").partition("[")[0]
    if not name:  # of a group that is none
        defaults = asdict(Config())
        groups = [
            group for group in values if isinstance(defaults.get(group), dict) and not isinstance(values[group], dict)
        ]
        if not groups:
            return compose.first_paragraph(error)
        name = groups[0]
    value = untrusted.value_at(values, *name.split("."))
    return checks.must_be(name, value) or f"{name}: got {words.word(value)}; it must be a group of settings"


@contextmanager
def opened_run(path: str | os.PathLike[str], *, trust_code: bool = False, averaged: bool = False) -> Iterator[SavedRun]:
    """Open the newest checkpoint of a user's path: a checkpoint, a folder of them or a run.

    Args:
        trust_code: see `OfRun.trusts_code`.
        averaged: whether its weights are to be their averages.

    Raises:
        CheckpointError: there is none, its manifest is not what was written, or it has no average.
        ConfigError: its config is of another version.
    """
    with open_checkpoint(Path(path).absolute(), averaged=averaged) as saved:
        content = saved.manifest.content
        fingerprint = untrusted.value_at(content["extra"], OF_TRAINER, "run", "data", "fingerprint")
        yield SavedRun(
            path=saved.path,
            step=saved.manifest.step,
            config=config_from(content["config"], saved.path),
            data_fingerprint=fingerprint if isinstance(fingerprint, dict) else None,
            tensors=lambda: ((name, saved.read(name)) for name in saved.names),
            trusts_code=trust_code,
            saved=saved,
        )


# A folder that `zerotrain export` has written: its description, and its weights.


ABOUT = "zerotrain_export.json"
"""Describes an export. It is written last: a folder without it is no export, or an incomplete one."""
MODEL = "the model"
EXPORTED_MODEL = "a model of Hugging Face"
ADAPTERS = "adapters"
MERGED = "a model of Hugging Face, adapters merged"
DCP = "a folder of torch.distributed.checkpoint"
MAX_ABOUT_NBYTES = 1 << 26
_Form = Annotated[str, untrusted.one_of(MODEL, EXPORTED_MODEL, ADAPTERS, MERGED, DCP)]


class _ExportAbout(Struct):
    step: untrusted.Natural
    form: _Form
    config: Any
    data_fingerprint: dict[str, Any] | None


ONE_SET = "--weights: got ema, but {} holds one set of weights; leave it out"
_OF_DCP = "model"
"""The part of such a folder with the weights."""


def exported_run(folder: Path, *, trust_code: bool = False) -> OfRun | None:
    """The run of an exported folder; None where it is no exported folder.

    Raises:
        ConfigError: it does not say so, or has a config of another version.
    """
    try:
        about: _ExportAbout = untrusted.read_json(folder / ABOUT, _ExportAbout, max_nbytes=MAX_ABOUT_NBYTES)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise ConfigError(f"{folder / ABOUT} cannot be read: {error.strerror}") from error
    except untrusted.UntrustedFileError:
        raise ConfigError(f"{folder / ABOUT} does not name the run that was exported; export it again") from None
    return OfRun(
        path=folder,
        step=about.step,
        config=config_from(about.config, folder),
        form=about.form,
        data_fingerprint=about.data_fingerprint,
        tensors=lambda: _tensors(folder, about.form),
        trusts_code=trust_code,
    )


def _tensors(folder: Path, form: str) -> Iterator[tuple[str, torch.Tensor]]:
    with closing(find_weights(folder)) as weights:
        for tensor in weights.tensors:
            if form != DCP or tensor.part == _OF_DCP:
                values = torch.empty(torch.Size(tensor.shape).numel(), dtype=tensor.dtype)
                if values.numel():
                    weights.fill(tensor, 0, values)
                yield tensor.names[0], values.as_strided(tensor.shape, tensor.stride)


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


# The classes and functions that a config out of a file may name. The author of the file chooses them: a checkpoint's
# manifest, and the json of an export, name the classes of a run. Those known here only compute and read. All others
# need the user's permission.


TARGET = "_target_"
_MAX_SHOWN = 300
_PACKAGES = ("zerotrain", "torch")
"""A name may lead through modules of these alone: others lie in them too, such as `zerotrain.inspect.os`."""


def require_trusted(
    config: Config, groups: Collection[str], path: Path, *, overrides: Mapping[str, Any] | None = None
) -> None:
    """Check the classes of a config from a file: none may run code of the file's author.

    Nothing is imported for it.

    Args:
        groups: the groups of the config that are built, such as model.
        path: the folder that the config is from.
        overrides: the settings that the user has named, in the form of the config. Classes named there are trusted.

    Raises:
        ConfigError: a class that is not known, or a text that Hydra would resolve.
    """
    for group in groups:
        values = getattr(config, group)
        own = list(_targets((overrides or {}).get(group), group))
        foreign = [
            f"{name}={untrusted.printable(str(target), _MAX_SHOWN, keep='')}"
            for name, target in _targets(values, group)
            if not _is_known(target) and (name, target) not in own
        ]
        if foreign:
            raise ConfigError(
                f"{path} names {', '.join(foreign)}; a file may only name models and data of zerotrain, layers of "
                "torch.nn and optimizers of torch.optim, because other classes can run any code; give --trust-code if "
                "you trust the author of the file"
            )
        for name, text in words.find_references(values, group):
            raise ConfigError(f"{path}: {name} is {text}, and a reference in a file is never resolved")


def are_known(values: Any) -> bool:
    """Whether all classes named in values, at any depth, are known."""
    return all(_is_known(target) for _, target in _targets(values, ""))


def _targets(values: Any, group: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of each `_target_`, at any depth."""
    for name, value in words.walk_values(values, group):
        if isinstance(value, dict) and TARGET in value:
            yield f"{name}.{TARGET}", value[TARGET]


def _is_known(target: Any) -> bool:
    value = _find_imported(target) if isinstance(target, str) else None
    return isinstance(value, type | FunctionType) and value in _safe_objects()


def _find_imported(target: str) -> Any:
    """The object of a dotted name among modules imported already; None if it leads anywhere else."""
    package, *parts = target.split(".")
    value: Any = sys.modules.get(package) if package in _PACKAGES else None
    for part in parts:
        if not isinstance(value, ModuleType) or value.__name__.partition(".")[0] not in _PACKAGES:
            return None
        inside = sys.modules.get(f"{value.__name__}.{part}")
        # Our own packages take their names from their modules at the first use.
        is_lazy = value in (zerotrain, zerotrain.data)
        value = getattr(value, part, inside) if is_lazy else vars(value).get(part, inside)
    return value


@cache
def _safe_objects() -> frozenset[Any]:
    """Read at the first use, when torch.nn is whole."""
    kinds = ((torch.nn, torch.nn.Module, "torch.nn.modules."), (torch.optim, torch.optim.Optimizer, "torch."))
    of_torch = [
        member
        for package, kind, home in kinds
        for member in vars(package).values()
        if isinstance(member, type) and issubclass(member, kind) and member.__module__.startswith(home)
    ]
    packages = (zerotrain.models, zerotrain.data, zerotrain.training.metrics, zerotrain.training.losses)
    ours = [getattr(package, name) for package in packages for name in package.__all__]
    schedules = (vars(zerotrain.training)[name] for name in zerotrain.training.__all__)
    return frozenset([*of_torch, *filter(inspect.isclass, ours), MuonWithAdamW, *filter(inspect.isfunction, schedules)])
