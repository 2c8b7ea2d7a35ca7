"""Values and settings as they are written on the command line, and the engine's messages in these words.

comm, sharding and the engine know the arguments of `zerotrain.build_engine`, and no config: `max_grad_norm`,
`compile=True`. A user of the config must read `train.max_grad_norm`, `model.compile=true`. Dotted names, such as
`zero.units`, are the same for both.
"""

import difflib
import re
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, errors

from zerotrain.errors import naming_settings

SETTINGS = {
    "compile": "model.compile",
    "activation_checkpointing": "model.activation_checkpointing",
    "max_grad_norm": "train.max_grad_norm",
    "build_engine(max_grad_norm)": "train.max_grad_norm",
    "max_skipped_steps": "train.max_skipped_steps",
    "virtual_ranks": "train.virtual_ranks",
    "graphs": "launch.graphs",
    "param_groups": "optimizer.groups",
    "World.from_environment(device)": "launch.device",
    "World.from_environment(timeout_s)": "launch.timeout_s",
    "World.from_environment(start_timeout_s)": "launch.start_timeout_s",
    "World.from_environment(interface)": "launch.interface",
    "MuonWithAdamW(matrices)": "optimizer.matrices",
}
"""Argument in Python -> setting; arguments of other functions than `build_engine` stand in parentheses."""

PHRASES = {
    "zerotrain.MuonWithAdamW(...)": "optimizer=muon",
    "(max_skipped_steps)": "(train.on_nonfinite=skip, train.max_skipped_steps)",
    "the optimizer's lr": "optimizer.lr",
    "strict": "checkpoint.strict",
    "set `whole_tensor = True` in its class": "choose optimizer.whole_tensor=true",
    "its class says `whole_tensor = True`": "optimizer.whole_tensor=true",
    "torchrun --nproc-per-node": "launch.nproc_per_node",
}
"""Phrases with other words in the config."""


def word(value: Any) -> str:
    """A value as it is written on the command line."""
    if value is None:
        return "null"
    if value == "":
        return "''"
    return str(value).lower() if isinstance(value, bool) else str(value)


def words_of_config() -> AbstractContextManager[None]:
    """In here messages speak of the config."""
    # A list without blanks: a shell would part it there.
    return naming_settings(
        SETTINGS | PHRASES,
        lambda value: f"[{','.join(map(str, value))}]" if isinstance(value, list) else word(value),
    )


# References among values, such as ${data.vocab_size}: a line for each broken one.


def interpolation_problems(node: Any, prefix: str = "") -> Iterator[str]:
    """One line for each unresolvable value in a composed config."""
    if not isinstance(node, DictConfig | ListConfig):
        return
    names: list[Any] = list(node) if isinstance(node, DictConfig) else list(range(len(node)))
    for name in names:
        key = f"{prefix}{name}"
        try:
            value = None if OmegaConf.is_missing(node, name) else node[name]
        except errors.OmegaConfBaseException as error:
            unresolved_values: Any = OmegaConf.to_container(node, resolve=False)
            cause = str(error).strip().split("\n")[0].rstrip(".")
            or_null = f", or {key}=null, which takes the number from the data" if key == "model.vocab_size" else ""
            yield f"{key}: got {unresolved_values[name]}; {cause}; give {key}=...{or_null}"
        else:
            yield from interpolation_problems(value, f"{key}.")


def find_references(value: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """(name, text) of each text with a reference among plain values: OmegaConf would resolve it."""
    return ((name, text) for name, text in walk_values(value, prefix) if isinstance(text, str) and "${" in text)


def walk_values(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """(dotted name, value) of a plain value and of all values in it."""
    yield name, value
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    for key, item in items:
        yield from walk_values(item, f"{name}.{key}")


def quote(text: str) -> str:
    """A value of a setting, as Hydra reads it: a quote is escaped, and a backslash where one ends the text or stands
    before a quote."""
    escaped = re.sub(r"(\\*)('|\Z)", lambda match: match[1] * 2 + (r"\'" if match[2] else ""), text)
    return f"'{escaped}'"


# Did you mean: our name for a word of other trainers, or else the nearest name; and the advice for a removed setting.


_WORDS = {
    "accelerator": "launch.device",
    "no_cuda use_cpu": "launch.device=cpu",
    "devices gpus n_gpu ngpus nproc_per_node num_devices num_gpus num_processes world_size": "launch.nproc_per_node",
    "epochs max_epochs n_epochs num_train_epochs train_epochs": "train.num_epochs",
    "iterations max_iters max_iterations max_train_steps num_steps num_train_steps total_steps": "train.max_steps",
    "total_tokens train_tokens": "train.max_tokens",
    "batch_size micro_batch per_device_batch_size per_device_train_batch_size per_gpu_train_batch_size "
    "train_batch_size train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "accumulate_grad_batches accumulation_steps grad_accum grad_accum_steps gradient_accumulation": (
        "train.gradient_accumulation_steps"
    ),
    "clip_grad clip_grad_norm grad_clip grad_norm_clip gradient_clip gradient_clip_val gradient_clipping max_norm": (
        "train.max_grad_norm"
    ),
    "eval_freq eval_interval eval_steps val_check_interval val_every": "train.eval_every",
    "eval_iters limit_val_batches": "train.eval_batches",
    "log_every_n_steps log_freq log_interval log_steps logging_steps": "train.log_every",
    "base_lr learning_rate lr max_lr peak_lr": "optimizer.lr",
    "lr_groups no_decay_params optimizer_groups optimizer_grouped_parameters param_groups": "optimizer.groups",
    "freeze_layers freeze_modules frozen_layers frozen_modules trainable_layers": "model.freeze",
    "optim optimizer_name optimizer_type": "optimizer",
    "wd": "optimizer.weight_decay",
    "lr_schedule lr_scheduler lr_scheduler_type": "scheduler",
    "num_warmup_steps warmup warmup_fraction warmup_iters warmup_ratio": "scheduler.warmup_steps",
    "min_lr_rate min_lr_ratio": "scheduler.final_fraction",
    "data_seed global_seed manual_seed random_seed seed_everything": "seed",
    "amp dtype mixed_precision torch_dtype": "precision",
    "fp16 precision=16 precision=16-mixed precision=float16": "precision=fp16",
    "bf16 precision=bf16-mixed precision=bf16-true precision=bfloat16": "precision=bf16",
    "precision=32 precision=32-true precision=float32": "precision=fp32",
    "allow_tf32 tf32 use_tf32": "precision.tf32",
    "deepspeed fsdp sharding_strategy strategy zero_optimization zero_stage": "zero.stage",
    "strategy=ddp": "zero.stage=0",
    "strategy=fsdp strategy=fsdp2 sharding_strategy=FULL_SHARD": "zero.stage=3",
    "sharding_strategy=SHARD_GRAD_OP": "zero.stage=2",
    "cpu_offload offload_optimizer offload_optimizer_device": "offload.optimizer",
    "offload_param offload_param_device offload_params": "offload.parameters",
    "activation_checkpoint grad_checkpointing gradient_checkpointing": "model.activation_checkpointing",
    "compile_model torch_compile use_compile": "model.compile",
    "model_name_or_path pretrained_model_name_or_path": "model=huggingface model.name_or_path",
    "lora.r lora_r lora_rank peft use_lora": "model=huggingface model.lora.rank",
    "lora.lora_alpha lora_alpha": "model=huggingface model.lora.alpha",
    "lora.lora_dropout lora_dropout": "model=huggingface model.lora.dropout",
    "lora.target_modules lora_target_modules target_modules": "model=huggingface model.lora.targets",
    "use_dora": "model=huggingface +model.lora.use_dora=true",
    "use_rslora": "model=huggingface +model.lora.use_rslora=true",
    "modules_to_save": "model=huggingface +model.lora.modules_to_save=[lm_head]",
    "adapter_name_or_path lora_model_dir": "model=huggingface model.lora.name_or_path",
    "block_size context_length ctx_len max_length max_seq_length sequence_length": "data.seq_len",
    "data_dir data_path dataset_path train_file": "data.path",
    "dataloader_num_workers": "data.num_workers",
    "eval_dataset eval_datasets eval_sets val_datasets": "data.validation_sets",
    "compute_metrics": "metrics",
    "val_fraction val_split validation_split_percentage": "data.validation_fraction",
    "early_stopping": "callbacks=early_stopping",
    "early_stopping_patience patience": "callbacks=early_stopping callbacks.early_stopping.patience",
    "early_stopping_threshold min_delta": "callbacks=early_stopping callbacks.early_stopping.min_delta",
    "ema_decay": "callbacks=ema callbacks.ema.decay",
    "ema model_ema use_ema callbacks=weight_averaging": "callbacks=ema",
    "report_to tracker": "logger",
    "report_to=tensorboard": "logger=tensorboard",
    "report_to=wandb": "logger=wandb",
    "checkpoint_every checkpoint_interval every_n_train_steps save_every save_every_n save_every_n_steps save_freq "
    "save_interval save_steps callbacks=checkpoint callbacks=model_checkpoint": "checkpoint.every",
    "keep_last max_checkpoints save_total_limit": "checkpoint.keep",
    "load_best_model_at_end metric_for_best_model monitor save_best": "checkpoint.best",
    "ckpt_path resume_from resume_from_checkpoint resume_path": "checkpoint.resume",
    "init_checkpoint load_weights": "checkpoint.init_from",
    "default_root_dir out_dir output_dir run_dir save_dir": "hydra.run.dir",
}
OURS = {word: ours for words, ours in _WORDS.items() for word in words.split()}
"""Words of other trainers: a name, one with its group, or with the value that it is given, and what a command line here
has for it: choices and the name of a setting."""

_OF_EXAMPLE = "examples/{0}_logger.py of the repository does it, from the folder that you start in: +callbacks.{0}={1}"
_OF_SEARCH = "give each setting its values, such as 'optimizer.lr=tag(log,interval(1e-4,1e-2))'"


REMOVED = {
    "launch.shared_memory": "leave it out: ranks of one host send through sockets, to the same bits",
    "offload.heap": "leave it out: freed memory is kept for the next step, and given back with a disk",
    "data.cache_dir": "leave it out: only text is kept in a cache",
    "hydra.sweeper.max_failure_rate": "give sweep.max_failures_in_a_row",
    "hydra.sweeper.search_space": _OF_SEARCH,
    "hydra.sweeper.custom_search_space": _OF_SEARCH,
    "logger=mlflow": _OF_EXAMPLE.format("mlflow", "{_target_:mlflow_logger.MLflowLogger}"),
    "logger=trackio": _OF_EXAMPLE.format("trackio", "{_target_:trackio_logger.TrackioLogger}"),
}
"""Removed settings and choices of zerotrain, and the advice for them."""


def did_you_mean(name: str, candidates: Iterable[str]) -> str:
    """`"; did you mean X?"` where a candidate is near to `name`, else nothing. Names may be dotted. For a setting that
    was removed: what to do.

    The same one elsewhere comes first (`max_steps` for `train.max_steps`), then one beside `name` (`zero.stge` for
    `zero.stage`), then one anywhere.
    """
    if name in REMOVED:
        return f" any more; {REMOVED[name]}"
    options = sorted(set(candidates))
    parent, _, leaf = name.rpartition(".")
    siblings = {
        candidate.rpartition(".")[2]: candidate for candidate in options if candidate.rpartition(".")[0] == parent
    }
    anywhere = {candidate.rpartition(".")[2]: candidate for candidate in options}
    for names, cutoff in ((anywhere, 1.0), (siblings, 0.6), (anywhere, 0.7)):
        near = difflib.get_close_matches(leaf, names, n=1, cutoff=cutoff)
        if near:
            return f"; did you mean {names[near[0]]}?"
    return ""


def we_call_it(name: str, value: str = "") -> str:
    """`"; zerotrain calls it X"` where others use this word, whatever group they have it in, else nothing."""
    *_, leaf = parts = name.split(".")
    for word in (f"{leaf}={value}", ".".join(parts[-2:]), leaf):
        if word in OURS:
            return f"; zerotrain calls it {OURS[word]}"
    return ""


_OPTIONS = {
    "max_length max_new_tokens num_tokens": "--max-tokens",
    "do_sample greedy": "--temperature 0, the likeliest token, or above",
    "temp": "--temperature",
    "num_beams top_p": "--top-k",
    "input input_text text": "--prompt",
    "checkpoint ckpt ckpt_path model model_name_or_path model_path run": "RUN, a path without an option",
    "o out_dir output output_dir output_path save_dir": "--out",
    "precision torch_dtype": "--dtype",
    "merge_and_unload merge_lora": "--merge",
    "trust_remote_code": "--trust-code",
}
_OPTION = {word: ours for words, ours in _OPTIONS.items() for word in words.split()}
"""Options of other programs, such as transformers' generate, and ours for them."""


def hint_for_option(option: str, ours: Iterable[str], *, takes_settings: bool) -> str:
    """The option or setting that a user may have meant with an unknown one such as `--max-new-tokens=8`.

    Args:
        ours: the options that there are.
        takes_settings: whether settings may be written, too.
    """
    name = option.lstrip("-").partition("=")[0].replace("-", "_")
    meant = _OPTION.get(name, "")
    if meant.split(" ")[0] in ours or meant.startswith("RUN"):
        return f"; zerotrain calls it {meant}"
    if takes_settings and (setting := we_call_it(name) or (f"; write {name}=VALUE" if "." in name else "")):
        return f"{setting}, a setting without dashes"
    return did_you_mean(option.partition("=")[0], ours)
