"""Which file is damaged how, and who reads it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.attack.fuzz import data, runs, tensors
from tests.attack.fuzz.mutations import damaged_bytes, damaged_json, damaged_kind, text_of
from zerotrain.errors import CheckpointError, ConfigError

Refusals = tuple[type[BaseException], ...]
Reader = Callable[[Path], Any]
"""Gives what it has read, to be compared by its `repr`."""


OF_KINDS = 10**6
"""Seeds from here on damage kinds and sizes: the damage of the others stays what it was when they found something."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """A file of a folder."""

    make: Callable[[Path], None]
    """Writes the folder."""
    file: str
    read: Reader
    json: bool = False
    """Every second damage is to its values."""
    form: str = ""
    """lines of JSON, or yaml: of a file with values that is no JSON."""
    reseal: Callable[[bytes], bytes] | None = None
    """All damage is to values, and the hash is made to fit: the schema is all there is to find it."""
    others: tuple[str, ...] = ()
    """Files it may be swapped with."""
    hot: int = 0
    """Bytes of its header, which is damaged in every second case."""
    refusals: Refusals = (CheckpointError, ConfigError)
    """What the command turns into one line."""
    is_the_word: bool = False
    """It has no hash, and nothing says the same again: what can be read of it counts."""
    says: Reader | None = None
    """What the library of its format reads of it."""

    def damaged(self, original: bytes, others: tuple[bytes, ...], seed: int) -> tuple[bytes, bool]:
        """The damaged file, and whether its hash fits."""
        if seed >= OF_KINDS:
            damaged = damaged_kind(original, seed, "json" if self.json or self.reseal else self.form)
            return (damaged, False) if self.reseal is None else (_resealed(self.reseal, damaged), True)
        if self.reseal is not None:
            return _resealed(self.reseal, text_of(damaged_json(original, seed))), True
        if self.json and seed % 2:
            return text_of(damaged_json(original, seed)), False
        return damaged_bytes(original, seed, others, self.hot), False


def _resealed(reseal: Callable[[bytes], bytes], text: bytes) -> bytes:
    try:
        return reseal(text)
    except (ValueError, RecursionError):
        return text


OF_DATA = (ValueError, OSError)
"""`preflight_data` turns them into a ConfigError."""
RANK_0, RANK_1, INDEX = "rank-00000.safetensors", "rank-00001.safetensors", "model.safetensors.index.json"


def _of_checkpoint(file: str, **how: Any) -> Target:
    return Target(make=tensors.make_checkpoint, read=tensors.read_checkpoint, file=file, **how)


def _of_weights(make: Callable[[Path], None], file: str, **how: Any) -> Target:
    return Target(**{"make": make, "read": tensors.read_weights, "file": file, **how})


def _of_data(make: Callable[[Path], None], file: str, read: Reader, **how: Any) -> Target:
    return Target(make=make, read=read, file=file, refusals=OF_DATA, is_the_word=True, **how)


def _of_run(make: Callable[[Path], None], file: str, read: Reader, **how: Any) -> Target:
    return Target(make=make, read=read, file=file, is_the_word=True, **how)


TARGETS: dict[str, Target] = {
    "manifest.json": _of_checkpoint("manifest.json", json=True, others=(RANK_0,)),
    "manifest.json, its hash made to fit": _of_checkpoint("manifest.json", reseal=tensors.resealed),
    "rank file of a checkpoint": _of_checkpoint(RANK_0, others=(RANK_1, "manifest.json"), hot=1500),
    "safetensors": _of_weights(tensors.make_safetensors, "model.safetensors", hot=500, says=tensors.safetensors_says),
    "torch.save": _of_weights(tensors.make_pt, "pytorch_model.bin", hot=800, says=tensors.pt_says),
    "torch.save before 1.6": _of_weights(tensors.make_legacy, "pytorch_model.bin"),
    "DCP .metadata": _of_weights(tensors.make_dcp, ".metadata", others=("__0_0.distcp",)),
    "DCP .distcp": _of_weights(tensors.make_dcp, "__0_0.distcp", others=(".metadata",), says=tensors.dcp_says),
    "index of Hugging Face": _of_weights(tensors.make_parts, INDEX, json=True),
    "index of Hugging Face, by transformers": _of_weights(
        tensors.make_parts, INDEX, json=True, read=tensors.read_pretrained, refusals=(ConfigError, *OF_DATA)
    ),
    "export json": _of_run(tensors.make_export, tensors.ABOUT, tensors.read_export, json=True),
    "index.json of a store": _of_data(data.make_store, "index.json", data.read_store, json=True),
    "documents.bin": _of_data(data.make_store, "documents.bin", data.read_store),
    "shard": _of_data(data.make_store, "000001.bin", data.read_store),
    "seal.json": Target(make=data.make_kept, file="kept/seal.json", read=data.read_kept, json=True),
    "sealed shard": Target(make=data.make_kept, file="kept/000000.bin", read=data.read_kept),
    "sealed documents.bin": Target(make=data.make_kept, file="kept/documents.bin", read=data.read_kept),
    "note of a shard": Target(make=data.make_begun, file="000001.note", read=data.read_begun),
    "tokenizer.json": _of_data(data.make_tokenizer, "tokenizer.json", data.read_tokenizer, json=True),
    "jsonl": _of_data(data.make_jsonl, "texts.jsonl", data.read_jsonl, form="lines"),
    "text": _of_data(data.make_text, "text.txt", data.read_text),
    "text.gz": _of_data(data.make_text, "text.txt.gz", data.read_text),
    "jsonl.zst": _of_data(data.make_text, "rows.jsonl.zst", data.read_text),
    "parquet": _of_data(data.make_text, "rows.parquet", data.read_text),
    "tokens.npy": _of_data(data.make_tokens, "numpy.npy", data.read_tokens, hot=128),
    "tokens of llm.c": _of_data(data.make_tokens, "llm_c.bin", data.read_tokens, hot=16),
    "index of Megatron": _of_data(data.make_tokens, "megatron.idx", data.read_tokens, hot=34),
    "plain tokens": _of_data(data.make_tokens, "plain.bin", data.read_tokens),
    "job.json": _of_run(runs.make_job, "job.json", runs.read_job, json=True),
    "error of a rank": _of_run(runs.make_ranks, "1.error.json", runs.read_ranks, json=True),
    "state of a rank": _of_run(runs.make_ranks, "0.state", runs.read_ranks),
    ".lock": _of_run(runs.make_lock, ".lock", runs.read_lock, json=True),
    "lock of a store": _of_run(runs.make_lock, "lock", runs.read_lock, json=True),
    "metrics.jsonl": _of_run(runs.make_metrics, "metrics.jsonl", runs.read_metrics, form="lines"),
    "steps.jsonl": _of_run(runs.make_steps, "steps.jsonl", runs.read_steps, form="lines"),
    "config.yaml": _of_run(runs.make_settings, "config.yaml", runs.read_settings, form="yaml"),
    "plan.json": _of_run(runs.make_plan, "plan.json", runs.read_plan, json=True),
    "result.json, how a run has ended": _of_run(runs.make_ended, "result.json", runs.read_ended, json=True),
    "refused.json": _of_run(runs.make_ended, "ranks/refused.json", runs.read_ended, json=True),
    "note of a tracker": _of_run(runs.make_note, "wandb.json", runs.read_note, json=True),
    "study.db": _of_run(runs.make_study, "study.db", runs.read_study),
    "config.json of Hugging Face": _of_run(runs.make_auto_map, "config.json", runs.read_auto_map, json=True),
    "adapter_config.json": _of_run(
        runs.make_adapters, "adapter_config.json", runs.read_adapters, json=True, refusals=(CheckpointError, *OF_DATA)
    ),
    "loss.json of an evaluation": _of_run(
        runs.make_loss, "loss.json", runs.read_loss, json=True, refusals=(CheckpointError, *OF_DATA)
    ),
    "zerotrain_export.json to be replaced": _of_run(runs.make_exported, tensors.ABOUT, runs.read_exported, json=True),
    "described by a rank": Target(
        make=runs.make_described, read=runs.read_described, file="described-00001.json", json=True, is_the_word=True
    ),
    "result.json": _of_run(runs.make_result, "0/result.json", runs.read_result, json=True),
    "sweep.jsonl": _of_run(runs.make_result, "sweep.jsonl", runs.read_journal, form="lines"),
    "control.yaml": _of_run(runs.make_control, "control.yaml", runs.read_control, form="yaml"),
}
