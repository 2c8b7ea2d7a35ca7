"""HuggingFaceModel: a model of Hugging Face's transformers for one of several tasks, pretrained or from scratch."""

import difflib
from contextlib import suppress
from typing import Any

import torch

from zerotrain.files.kept_out import refusal, require_no_kernels
from zerotrain.files.terminal import package
from zerotrain.models.gpt import MeanCrossEntropy, require_at_least, require_fraction

NO_ADAPTERS: dict[str, Any] = {"rank": 0, "alpha": 16, "dropout": 0.0, "targets": None, "name_or_path": None}
"""The default of the argument `lora`."""
CAUSAL = "causal"
TASKS = {
    CAUSAL: ("CausalLM", "CAUSAL_LM", "causal language model", "gpt2, llama"),
    "seq2seq": ("Seq2SeqLM", "SEQ_TO_SEQ_CAUSAL_LM", "sequence to sequence model", "t5, bart"),
    "sequence_classification": ("SequenceClassification", "SEQUENCE_CLASSIFICATION", "classifier of sequences", "bert"),
    "token_classification": ("TokenClassification", "TOKEN_CLASSIFICATION", "classifier of tokens", "bert"),
    "image_classification": ("ImageClassification", "IMAGE_CLASSIFICATION", "classifier of images", "vit, resnet"),
}
"""(end of the name of the class in transformers, beginning of that of its models' names, words, examples) by task."""
_TASK_TYPES = {CAUSAL: "CAUSAL_LM", "seq2seq": "SEQ_2_SEQ_LM"}
_TASK_TYPES |= {"sequence_classification": "SEQ_CLS", "token_classification": "TOKEN_CLS"}
"""The names of peft for these tasks; it has none for the others."""
BALANCING_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef")
START_TOKEN = "decoder_start_token_id"
"""A field that configs of transformers need not have, and their decoders read."""
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


class HuggingFaceModel(torch.nn.Module):
    """One of the models of `transformers.AutoModelForCausalLM`, or of the class of another task.

    Args:
        task: causal, seq2seq, sequence_classification, token_classification or image_classification. Models of all but
            the first get labels as transformers takes them, and return its loss.
        name_or_path: a folder with a model, or the name of one on the Hugging Face hub; None for one from scratch.
        config: fields of the model's config. From scratch: `model_type`, such as gpt2 or llama, and what shall differ
            from its defaults. Pretrained: what shall differ from the model's own config.
        vocab_size: tokens that a model from scratch knows, unless `config` says so; a pretrained one has its own.
        lora: low-rank adapters (LoRA, arXiv 2106.09685), which alone are trained: `rank` (0: none), `alpha` (their
            output is scaled by alpha / rank), `dropout`, `targets`, the last parts of the names of the layers that
            get one (None: all linear layers but the head), and all other fields of peft's LoraConfig; or
            `name_or_path`, a folder of adapters to go on from. None: no adapters. A classifier's head trains too.

    Raises:
        ImportError: transformers, or for adapters peft, is not installed.
        ValueError: an argument is out of range, a pattern matches nothing, or there is no such model.
    """

    next_token_labels = True
    """For a causal model: labels[t] is the token after ids[t]; data whose labels equal its ids is refused."""

    def __init__(
        self,
        *,
        task: str = CAUSAL,
        name_or_path: str | None = None,
        config: dict[str, Any] | None = None,
        vocab_size: int | None = None,
        lora: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(config, dict | None):
            raise ValueError(f"model.config={config} is no group of fields; give each, such as +model.config.n_layer=2")
        if task not in TASKS:
            raise ValueError(f"model.task={task}: there is no such task; there are {', '.join(TASKS)}")
        adapters = NO_ADAPTERS | (lora or {})
        _require_adapters(adapters)
        self.next_token_labels = task == CAUSAL
        _transformers()
        from huggingface_hub.errors import StrictDataclassError

        try:
            if name_or_path is None:
                model = _build_from_scratch(task, dict(config or {}), vocab_size)
            else:
                model = _load_pretrained(task, name_or_path, dict(config or {}))
        except StrictDataclassError as error:  # of a config, about the values of its fields
            raise ValueError(f"model.config: {error.__cause__ or error}") from error
        text_config = model.config.get_text_config()  # a model of text and images has one config for each
        self.vocab_size: int | None = getattr(text_config, "vocab_size", None)
        self._main_input = "input_ids" if task == CAUSAL else model.main_input_name
        positions = getattr(text_config, "max_position_embeddings", None)
        self.max_seq_len: int | None = positions if isinstance(positions, int) and positions > 0 else None
        self.loss = MeanCrossEntropy()
        self._added_loss = _AddedLoss()
        if task == CAUSAL:
            model.loss_function = self._added_loss
        if adapters["rank"] or adapters["name_or_path"] is not None:
            from zerotrain.models.pretrained import add_adapters  # it needs the extra

            parts = {name for name, part in model.named_children() if part.state_dict()}
            heads = sorted(parts - {model.base_model_prefix}) if task.endswith("classification") else ()
            model = add_adapters(model, adapters, _TASK_TYPES.get(task), heads)
        self.model = model

    def forward(
        self,
        ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        *,
        input_ids: torch.Tensor | None = None,
        with_outputs: bool = False,
        **inputs: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Compute the loss, or the logits where no labels are given.

        Args:
            ids: (B, T) int64 tokens; of a classifier of images the pixels.
            labels: (B, T) int64, labels[:, t] the token after ids[:, t], or -100 where there is none to learn; as
                transformers takes them for another task.
            input_ids: another name for `ids`, that of transformers.
            with_outputs: give the logits beside the loss, detached.
            inputs: further arguments of the model, such as attention_mask (B, T).

        Returns:
            The mean cross entropy over the labels (0-dim, fp32), in training with what the model itself adds to its
            loss, such as the balancing loss of a mixture of experts that `output_router_logits` asks for; or the
            logits (B, T, vocab_size), or (loss, logits).

        Raises:
            ValueError: a sequence is longer than `max_seq_len`, the positions that the model's config has; or there are
                no ids, or two.
        """
        given_ids = [tensor for tensor in (ids, input_ids) if tensor is not None]
        if not self.next_token_labels:
            inputs |= dict(zip((self._main_input,), given_ids, strict=False))
            outputs = self.model(**inputs, **({} if labels is None else {"labels": labels}))
            if labels is None:
                return outputs.logits
            return (outputs.loss.float(), outputs.logits.detach()) if with_outputs else outputs.loss.float()
        if len(given_ids) != 1:
            raise ValueError(f"forward got {len(given_ids)} of ids and input_ids; give one of them")
        [ids] = given_ids
        if self.max_seq_len is not None and ids.shape[1] > self.max_seq_len:
            raise ValueError(
                f"a sequence of {ids.shape[1]} tokens is longer than the model's {self.max_seq_len} positions"
            )
        if labels is None:
            return self.model(input_ids=ids, **inputs).logits
        label_inputs = {"labels": labels.contiguous()} if self.training and self._added_loss.may_come else {}
        outputs = self.model(input_ids=ids, **label_inputs, **inputs)
        loss = self.loss(outputs.logits, labels) + self._added_loss.take(outputs)
        return (loss, outputs.logits.detach()) if with_outputs else loss


class _AddedLoss:
    """Stands for the loss function of a model of transformers, and gives it 0: the model's loss is then the part that
    it adds. The models compute balancing losses and their like in lines of their own, with coefficients of many
    names."""

    may_come = True
    """False once a model has computed its loss without it: a few old ones, without added losses."""

    def __init__(self) -> None:
        self._is_called = False

    def __call__(self, logits: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        self._is_called = True
        return torch.zeros((), device=logits.device)

    def take(self, outputs: Any) -> torch.Tensor | float:
        """The loss added by the model in the forward of `outputs`."""
        if outputs.loss is None:
            return 0.0
        self.may_come = self._is_called
        return outputs.loss if self._is_called else 0.0


def _build_from_scratch(task: str, fields: dict[str, Any], vocab_size: int | None) -> Any:
    transformers = _transformers()
    model_type = fields.pop("model_type", None)
    _, group, words, examples = TASKS[task]
    model_types = getattr(transformers.models.auto.modeling_auto, f"MODEL_FOR_{group}_MAPPING_NAMES")
    if model_type not in model_types:
        near = difflib.get_close_matches(str(model_type), model_types, n=3)
        raise ValueError(
            f"model.config.model_type={'null' if model_type is None else model_type} is no {words} of "
            f"transformers; give one such as {', '.join(near) or examples}, or model.name_or_path"
        )
    config = transformers.AutoConfig.for_model(model_type)
    if vocab_size is not None and hasattr(config, "vocab_size"):
        fields.setdefault("vocab_size", vocab_size)
    _require_effects(fields, config)
    if task == "seq2seq" and getattr(config, START_TOKEN, None) is None:
        fields.setdefault(START_TOKEN, config.pad_token_id)  # as T5 was trained
    for token in SPECIAL_TOKENS:  # of the tokenizer the type is known for, and unknown to a smaller vocabulary
        if fields.get("vocab_size") is not None and (getattr(config, token, None) or 0) >= fields["vocab_size"]:
            fields.setdefault(token, None)
    # Made anew: some fields follow from others in the constructor of a config.
    return _build(task, transformers.AutoConfig.for_model(model_type, **fields))


def _load_pretrained(task: str, name_or_path: str, fields: dict[str, Any]) -> Any:
    # Imported here: it needs the extra.
    from zerotrain.models.pretrained import find_weights, load_weights, require_shapes

    transformers = _transformers()
    try:
        config = transformers.AutoConfig.from_pretrained(name_or_path, trust_remote_code=False)
        require_no_kernels(config, "its config")
        files = find_weights(name_or_path)
    except Exception as error:  # transformers raises all kinds for a config.json that it cannot read
        raise ValueError(
            f"model.name_or_path={name_or_path} is neither a folder with a model nor one that the Hugging Face hub can "
            f"give: {refusal(name_or_path, error)}"
        ) from error
    _require_effects(fields, config)
    for name, value in fields.items():
        setattr(config, name, value)
    model = _build(task, config)
    with suppress(OSError):  # few have none; the config of the model then says when an answer ends
        model.generation_config = transformers.GenerationConfig.from_pretrained(name_or_path)
    if fields and files is not None:
        require_shapes(model, files)
    if torch.get_default_device().type == "meta" or (files is not None and load_weights(model, files)):
        return model
    # Files in another form than the model's own: transformers knows how to convert them, holding the model whole.
    return _auto_class(task).from_pretrained(
        name_or_path, config=config, dtype=torch.float32, trust_remote_code=False, weights_only=True
    )


def _build(task: str, config: Any) -> Any:
    require_no_kernels(config, "model.config")
    config.use_cache = False  # of keys and values, for generation
    return _auto_class(task).from_config(config, dtype=torch.float32, trust_remote_code=False)


def _auto_class(task: str) -> Any:
    return getattr(_transformers(), f"AutoModelFor{TASKS[task][0]}")


def _require_effects(fields: dict[str, Any], config: Any) -> None:
    """Refuse what transformers takes without a word: a field that there is not, and the coefficient of a loss without
    its computation."""
    for name in fields:
        if not hasattr(config, name) and name != START_TOKEN:
            near = difflib.get_close_matches(name, config.to_dict(), n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"model.config.{name}: a model of type {config.model_type} has no such field{hint}")
    computed = fields.get("output_router_logits", getattr(config, "output_router_logits", True))
    for name in BALANCING_COEFFICIENTS:
        if fields.get(name) and not computed:
            raise ValueError(
                f"model.config.{name}={fields[name]} has no effect without +model.config.output_router_logits=true, "
                "which computes the balancing loss"
            )


def _require_adapters(adapters: dict[str, Any]) -> None:
    require_at_least(0, **{"lora.rank": adapters["rank"]})
    folder = adapters["name_or_path"]
    for name, value in adapters.items():
        is_set = value != NO_ADAPTERS.get(name) and name != "name_or_path"
        if is_set and folder is not None:
            raise ValueError(
                f"model.lora.{name}={value} has no effect beside model.lora.name_or_path={folder}: leave it out"
            )
        if is_set and not adapters["rank"]:
            raise ValueError(f"model.lora.{name}={value} has no effect without adapters; model.lora.rank=8 adds them")
    targets = adapters["targets"]
    if isinstance(targets, str) and targets.isidentifier():  # peft takes it for a pattern of whole names
        raise ValueError(f"model.lora.targets={targets} is no list of names; give model.lora.targets=[{targets}]")
    if not adapters["alpha"] > 0:
        raise ValueError(f"model.lora.alpha={adapters['alpha']} is out of range; it must be above 0")
    require_fraction(**{"lora.dropout": adapters["dropout"]})


def _transformers() -> Any:
    """The package. It takes a second to import, and few runs need it."""
    return package("transformers", extra="hf", needed_by="HuggingFaceModel")
