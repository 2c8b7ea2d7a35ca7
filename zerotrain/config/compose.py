"""From what Hydra composed to a typed Config, and to and from the config.yaml of a run."""

import hashlib
import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import MISSING, DictConfig, OmegaConf

from zerotrain.config.schema import Config
from zerotrain.config.words import did_you_mean, interpolation_problems, we_call_it
from zerotrain.errors import ConfigError
from zerotrain.files.lock import whole
from zerotrain.files.untrusted import dotted

_INTERPOLATION = re.compile(r"(\\*)\$\{")
"""With the backslashes before it: each would be taken for an escape."""


@dataclass
class OptunaConfig:
    """The settings of `hydra/sweeper=optuna`, by the names that hydra-optuna-sweeper has for them."""

    _target_: str = "hydra_plugins.zerotrain.OptunaSweeper"
    _recursive_: bool = False
    defaults: list[Any] = field(default_factory=lambda: ["_self_", {"sampler": "tpe"}])
    sampler: Any = MISSING
    direction: Any = None
    """Null: that of `sweep`."""
    storage: Any = None
    """The address of a database; null: study.db in the folder of the sweep."""
    study_name: str | None = None
    n_trials: int = 20
    n_jobs: int = 2
    """Trials at a time."""
    params: dict[str, str] | None = None
    """The settings with several values, beside those of the command line."""


_SAMPLERS: dict[str, dict[str, Any]] = {
    "TPE": {"seed": None, "n_startup_trials": 10, "n_ei_candidates": 24, "multivariate": None},
    "Random": {"seed": None},
    "CmaEs": {"seed": None, "x0": None, "sigma0": None, "consider_pruned_trials": False, "use_separable_cma": False},
    "NSGAII": {
        "seed": None, "population_size": 50, "mutation_prob": None, "crossover_prob": 0.9, "swapping_prob": 0.5
    },
    "Grid": {"_partial_": True},
}  # fmt: skip


def register_schema() -> None:
    """Make the schema known to Hydra as `schema`, the first entry of the defaults list: it checks names and types. And
    `hydra/sweeper=optuna` with its samplers. And `${slurm_job:OTHERWISE}`, which is slurm-123_4 in a job of Slurm: a
    job that is queued again finds its folder."""
    Plugins.instance()  # finds those installed, of which hydra-optuna-sweeper would take the place of ours later
    store = ConfigStore.instance()
    store.store(name="schema", node=Config)
    store.store(group="hydra/sweeper", name="optuna", node=OptunaConfig)
    for name, arguments in _SAMPLERS.items():
        target = {"_target_": f"optuna.samplers.{name}Sampler"}
        store.store(group="hydra/sweeper/sampler", name=name.lower(), node=target | arguments)
    OmegaConf.register_new_resolver(
        "slurm_job",
        lambda otherwise: f"slurm-{job}" if (job := slurm_job(os.environ)) else otherwise,
        use_cache=True,
        replace=True,
    )


def slurm_job(environment: Mapping[str, str]) -> str | None:
    """The Slurm job of this process, as scontrol names it: 123, or 123_4 for the fourth of an array. None outside of
    jobs."""
    array = [environment.get(f"SLURM_ARRAY_{name}_ID", "") for name in ("JOB", "TASK")]
    parts = array if all(array) else [environment.get("SLURM_JOB_ID", "")]
    return "_".join(parts) if all(re.fullmatch("[0-9]{1,19}", part, re.ASCII) for part in parts) else None


NEEDS_VALUE = "{0}: has no value and needs one; give {0}=..."


def to_config(composed: DictConfig) -> tuple[Config, list[str]]:
    """Resolve what Hydra composed and type it.

    Returns:
        The config, and a line for each problem that Hydra's own pass lets through: a `+key` that the schema does not
        have (left out of the config), a `???` that nobody filled (null in the config).

    Raises:
        ConfigError: an interpolation leads nowhere.
    """
    if leading_nowhere := list(interpolation_problems(composed)):
        if OmegaConf.is_missing(composed.data, "_target_"):  # what leads to the arguments of this class leads nowhere
            raise ConfigError(NEEDS_VALUE.format("data._target_"))
        raise ConfigError(*leading_nowhere)
    missing = sorted(OmegaConf.missing_keys(composed))
    problems = [NEEDS_VALUE.format(key) for key in missing]
    nulls = (OmegaConf.from_dotlist([f"{key}=null"]) for key in missing)
    values = OmegaConf.to_container(OmegaConf.merge(composed, *nulls) if missing else composed, resolve=True)
    unknown: list[str] = []
    values = _known_part(values, Config(), unknown)
    names = known_keys(composed) if unknown else []
    problems += [f"+{key}: there is no such setting{we_call_it(key) or did_you_mean(key, names)}" for key in unknown]
    return from_values(values), problems


def from_values(values: Any) -> Config:
    """Type the values of a config that `dataclasses.asdict` or a yaml file has given. They are resolved: what looks
    like `${oc.env:HOME}` is a text."""
    config = OmegaConf.to_object(OmegaConf.merge(_schema(), literal(values)))
    assert isinstance(config, Config)
    if isinstance(stage := config.zero.stage, str) and stage.isdecimal():  # of a variable of the environment
        config.zero.stage = int(stage)
    if not isinstance(config.zero.bucket_mb, bool):
        with suppress(TypeError, ValueError, OverflowError):
            config.zero.bucket_mb = float(config.zero.bucket_mb)  # 25 and 25.0 are one setting, and have one hash
    return config


@cache
def _schema() -> DictConfig:
    """The defaults of all settings with their types. A merge copies it."""
    return OmegaConf.structured(Config)


def literal(values: Any) -> Any:
    """The same values, with texts escaped so that OmegaConf takes each as it is written."""
    if OmegaConf.is_config(values):
        values = OmegaConf.to_container(values, resolve=False)
    if isinstance(values, dict):
        return {name: literal(value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [literal(value) for value in values]
    return _INTERPOLATION.sub(r"\1\1\\${", values) if isinstance(values, str) else values


def save_config(config: Config, path: Path) -> None:
    """Write the resolved config as yaml, whole or not at all: another driver of a sweep may read it."""
    with whole(path) as file:
        file.write(OmegaConf.to_yaml(OmegaConf.create(asdict(config))).encode())


def checkpoint_settings(config: Config) -> dict[str, Any]:
    """The settings as a checkpoint has them: without those of a plan or the sweep."""
    values = asdict(config)
    del values["plan"]
    del values["sweep"]
    return values


def config_hash(config: Config) -> str:
    """16 hex digits, equal for two runs if they compute the same: a hash of all settings but `launch`, `sweep` and
    `checkpoint`; its `init_from` counts, where it is given. Steps are left out if they follow from epochs or tokens:
    they depend on the data, and the first hash is made before it is read."""
    values = checkpoint_settings(config)
    del values["launch"]
    if config.train.num_epochs is not None or config.train.max_tokens is not None:
        del values["train"]["max_steps"]
    init_from = values.pop("checkpoint")["init_from"]
    values |= {} if init_from is None else {"init_from": init_from}
    return digest(values)


def digest(values: dict[str, Any]) -> str:
    """16 hex digits of settings, equal where the settings are."""
    # Twice: steps of a schedule are numbers in the composing process, and texts in ranks, after JSON.
    canonical = json.dumps(json.loads(json.dumps(values)), sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def known_keys(values: Any = None) -> list[str]:
    """The names of all groups and settings: those of the schema, and those of `values` in open groups."""
    schema = asdict(Config())
    present = {} if values is None else OmegaConf.to_container(values, resolve=False)
    known = _known_part(present, Config(), [])
    return sorted({*schema, *dotted(schema, with_empty=True), *dotted(known, with_empty=True)})


def first_paragraph(error: Exception) -> str:
    """The first paragraph of an exception's text in one line: Hydra breaks its lines anywhere. Lines with `full_key`
    and the like repeat the rest in OmegaConf's own names, and are left out."""
    lines = (line.strip() for line in str(error).strip().split("\n\n")[0].splitlines())
    internal = ("full_key:", "object_type=", "reference_type=")
    return " ".join(line for line in lines if not line.startswith(internal)).rstrip(".")


def _known_part(values: Any, schema: Any, unknown: list[str], prefix: str = "") -> Any:
    """The values that the schema, or an open group in it, has a place for. The names of the others go to `unknown`."""
    if not is_dataclass(schema) or not isinstance(values, dict):
        return values
    names, known = {field.name for field in fields(schema)}, {}
    for name, value in values.items():
        if name in names:
            known[name] = _known_part(value, getattr(schema, name), unknown, f"{prefix}{name}.")
        else:
            unknown += dotted({name: value}, prefix, with_empty=True)
    return known
