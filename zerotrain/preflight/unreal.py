"""Operations on tensors without memory: each gives tensors of the right shapes, and computes nothing."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from types import TracebackType
from typing import Any, Self
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_iter

from zerotrain.engine import ZeroEngine
from zerotrain.offload.tier import Crossing, Tier

# The bytes of all live tensors, counted operation by operation, and their kinds at the peak.


OTHERS = "activations"
"""The kind of all memory without a name: saved by a forward, or alive for a moment."""
SCRATCH = "scratch"


class LiveMemory(TorchDispatchMode):
    """Counts the memory behind each tensor given to or returned by an operation within it, once, until it is freed.

    Bytes are those the tensors ask for. An allocator rounds them up and keeps freed memory, and a kernel takes memory
    without a tensor.

    Offloaded memory of an engine does not count.
    """

    def __init__(self) -> None:
        super().__init__()
        self._engine: ZeroEngine | None = None
        self._off_device: list[tuple[str, Tier | Crossing]] = []
        """The tiers with memory off the device."""
        self.peak_phase = ""
        """The part of a step with the most bytes."""
        self._most = 0
        """Most bytes alive at once since `begin`, without scratch."""
        self._at_most: dict[str, int] = {}
        """Bytes alive then, by kind."""
        self._by_kind: dict[str, int] = {OTHERS: 0}
        self._known: dict[int, tuple[ref[torch.UntypedStorage], str, int]] = {}
        """(storage, kind, bytes) by the id of the storage: one object as long as its memory lives."""
        self._resize: Any = None

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch asks this of a mode. Within this one nothing is compiled, and operations need no care for that."""
        return False

    @property
    def nbytes(self) -> int:
        """Bytes alive now."""
        return sum(self._by_kind.values()) - sum(tier.placed_nbytes for _, tier in self._off_device)

    def begin(self, engine: ZeroEngine) -> None:
        """Look for the most from now on, in the steps of an engine."""
        self._engine, self._off_device = engine, engine.held.homes.off_device
        self._most = 0
        self._look()

    @property
    def peak_nbytes(self) -> int:
        """Most bytes alive at once since `begin`. Scratch is kept from step to step: all of it counts, as in each step
        after the first."""
        return self._most + self._by_kind.get(SCRATCH, 0)

    @property
    def at_peak(self) -> dict[str, int]:
        """The same by kind, without the memory elsewhere."""
        return self._at_most | {SCRATCH: self._by_kind.get(SCRATCH, 0)}

    def name(self, kind: str, *tensors: torch.Tensor) -> None:
        """Count the memory of these tensors as of a kind, now and once it is given back and comes again."""
        for tensor in tensors:
            self._note(tensor)
            entry = self._known.get(id(tensor.untyped_storage()))
            if entry is not None:
                storage, old_kind, nbytes = entry
                self._by_kind[old_kind] -= nbytes
                self._by_kind[kind] = self._by_kind.get(kind, 0) + nbytes
                self._known[id(tensor.untyped_storage())] = (storage, kind, nbytes)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_iter((args, result)):
            if isinstance(leaf, torch.Tensor):
                self._note(leaf)
        return result

    def __enter__(self) -> Self:
        """Notice memory given back and taken again under the same tensor: that is no operation."""
        self._resize = torch.UntypedStorage.resize_

        def resize(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            resized: torch.UntypedStorage = self._resize(storage, nbytes)
            if (entry := self._known.get(id(storage))) is not None:
                reference, kind, old_nbytes = entry
                self._known[id(storage)] = (reference, kind, storage.nbytes())
                self._by_kind[kind] += storage.nbytes() - old_nbytes
                self._look()
            return resized

        setattr(torch.UntypedStorage, "resize_", resize)  # noqa: B010 -- a method of torch, for a while
        super().__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, trace)
        setattr(torch.UntypedStorage, "resize_", self._resize)  # noqa: B010

    def _note(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if (key := id(storage)) in self._known:
            return
        nbytes = storage.nbytes()
        self._known[key] = (ref(storage, partial(self._forget, key)), OTHERS, nbytes)
        if nbytes:
            self._by_kind[OTHERS] += nbytes
            self._look()

    def _forget(self, key: int, _: Any) -> None:
        _, kind, nbytes = self._known.pop(key)
        self._by_kind[kind] -= nbytes

    def _look(self) -> None:
        nbytes = self.nbytes - self._by_kind.get(SCRATCH, 0)
        if nbytes > self._most:
            self._most, self._at_most = nbytes, dict(self._by_kind)
            self.peak_phase = "" if self._engine is None else self._engine.schedule.phase.value


_aten = torch.ops.aten
_META = torch.device("meta")
_COUNTS = {_aten.arange.default, _aten.arange.start, _aten.arange.start_step}
_CONSTANTS = {_aten.ones.default, _aten.zeros.default, _aten.full.default, _aten.scalar_tensor.default}
_LIKE = {_aten.empty_like.default, _aten.zeros_like.default, _aten.ones_like.default}
_CHANGES_MEMORY = {
    _aten.resize_.default,
    _aten.resize_as_.default,
    *map(_aten.set_.__getattr__, _aten.set_.overloads()),
}
MAX_KNOWN_NUMEL = 2**22
"""Largest number of elements of a tensor to keep values of, such as positions and masks: a model may branch on them."""
FLASH = 1
"""torch's number of the attention without a tensor of all pairs of tokens."""


_IS_SET_TO, _NUMBER = _aten.is_set_to.default, _aten._local_scalar_dense.default
_GROUPED = _aten._grouped_mm.default


_OPERATIONS: dict[int, "_Operation"] = {}
"""By the id of torch's object: it is there for good."""
_RESULTS: dict[Any, Any] = {}
"""(shape, stride, dtype) of each result, by operation and arguments: layers are alike, and so are stages."""


class Unreal(LiveMemory):
    """Within it tensors on the meta device are computed with, and their memory counted as if they had any.

    Results of weights have no values. Results of positions, masks and inputs alone have: they are small, and computed
    on the CPU, since models branch on them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.failed = ""
        """The first operation not to be followed without values."""
        self.unknown: float | None = None
        """Number taken for one without a value; None: asking for it is an error."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        operation = _OPERATIONS.get(id(func)) or _Operation.look_at(func)
        if operation.is_view and args[0].is_meta:  # half of all: its memory is known
            return func(*args, **kwargs) if kwargs else func(*args)
        if operation.overwrites_first and args[0].is_meta and args[0].numel():
            return args[0]
        kwargs = kwargs or {}
        if kwargs and kwargs.get("device") == _META:
            kwargs = self._with_values(func, args, kwargs)
        tensors = _tensors_in((args, kwargs.values()) if kwargs else (args,))
        if num_unreal := sum([tensor.is_meta for tensor in tensors]):
            if func is _IS_SET_TO:
                return True
            if func is _NUMBER and self.unknown is not None:
                return self.unknown
            if num_unreal < len(tensors):
                if operation.is_mutable and not tensors[0].is_meta:
                    return tensors[0]  # a known number stays what it was
                args, kwargs = _without_values(args), {name: _without_values(value) for name, value in kwargs.items()}
            result = self._result(func, operation, args, kwargs)
        else:
            result = func(*args, **kwargs)
        for output in result if isinstance(result, tuple | list) else (result,):
            if isinstance(output, torch.Tensor):
                self._note(output)
        return result

    def _result(self, func: Any, operation: "_Operation", args: Any, kwargs: Any) -> Any:
        if (target := operation.target) is not None:
            into = kwargs.get(target[1], args[target[0]] if target[0] < len(args) else None)
            if isinstance(into, torch.Tensor) and into.numel():  # an empty one is to be made as large as the result
                return into
        if func in _LIKE and args[0].is_contiguous():  # torch's own way imports symbolic shapes: 0.5 s of CPU, 34 MB
            return _empty(args[0].shape, args[0].stride(), kwargs.get("dtype") or args[0].dtype)
        key = _key(operation, args, kwargs) if operation.makes_new else None
        if key is not None and (layouts := _RESULTS.get(key)) is not None:
            outputs = [None if layout is None else _empty(*layout) for layout in layouts]
            return outputs[0] if len(outputs) == 1 else tuple(outputs)
        try:
            result = _grouped(args, kwargs) if func is _GROUPED else func(*args, **kwargs)
        except (RuntimeError, NotImplementedError):
            self.failed = self.failed or str(func).removesuffix(".default")
            raise
        if key is not None:
            results = result if isinstance(result, tuple | list) else (result,)
            if all(output is None or isinstance(output, torch.Tensor) for output in results) and (
                isinstance(result, tuple) == (len(results) > 1)
            ):
                _RESULTS[key] = list(map(_layout, results))
        return result

    def _with_values(self, func: Any, args: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        """The arguments with the CPU for the device, where what is made is to have values."""
        if func in _COUNTS:
            is_known = True
        elif func in _CONSTANTS:
            dtype, sizes = kwargs.get("dtype") or torch.float32, args[0] if args and isinstance(args[0], list) else []
            is_known = not dtype.is_floating_point and torch.Size(sizes).numel() <= MAX_KNOWN_NUMEL
        else:
            is_known = func is _aten._to_copy.default and not args[0].is_meta and args[0].numel() <= MAX_KNOWN_NUMEL
        return kwargs | {"device": torch.device("cpu")} if is_known else kwargs


@contextmanager
def attention_of(*, on_host: bool) -> Iterator[None]:
    """In here attention without memory is the kernel of the CPU or of a GPU; else torch takes the one with a tensor of
    all pairs of tokens."""
    library = torch.library.Library("aten", "IMPL")
    library.impl("scaled_dot_product_attention", partial(_attention, on_host), "AutogradMeta")
    try:
        yield
    finally:
        library._destroy()


def _attention(
    on_host: bool,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    arguments = (query, key, value, mask, dropout_p, is_causal, enable_gqa)
    out: torch.Tensor
    if on_host and _choice(*map(_layout, arguments)) != FLASH:
        out, _ = _aten._scaled_dot_product_attention_math(
            query, key, value, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return out
    if mask is not None and mask.dtype == torch.bool:  # torch makes numbers of it, to be added
        mask = torch.zeros_like(mask, dtype=query.dtype, device=_META).masked_fill(mask.to(_META), 0.0)
    if on_host:
        out, _ = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, dropout_p, is_causal, attn_mask=mask, scale=scale
        )
        return out
    if enable_gqa and (times := query.shape[-3] // key.shape[-3]) > 1:
        key, value = key.repeat_interleave(times, -3), value.repeat_interleave(times, -3)
    out, *_ = _aten._scaled_dot_product_efficient_attention(
        query, key, value, mask, True, dropout_p, is_causal, scale=scale
    )
    return out


def _layout(argument: Any) -> Any:
    return (argument.shape, argument.stride(), argument.dtype) if isinstance(argument, torch.Tensor) else argument


@cache
def _choice(query: Any, key: Any, value: Any, mask: Any, dropout_p: float, is_causal: bool, enable_gqa: bool) -> int:
    """torch's choice for tensors of these shapes on the CPU. It looks at no values: their memory is never touched."""
    layouts = [layout for layout in (query, key, value, mask) if layout is not None]
    is_batched = all(len(shape) == 4 for shape, _, _ in layouts)  # then one row chooses as all do
    with _disable_current_modes():
        tensors = [
            torch.empty_strided((1, *shape[1:]) if is_batched else shape, stride, dtype=dtype)
            for shape, stride, dtype in layouts
        ]
        of_mask = None if mask is None else tensors.pop()
        choose: Any = torch._fused_sdp_choice  # its stub lacks an argument
        chosen: int = choose(*tensors, of_mask, dropout_p, is_causal, enable_gqa=enable_gqa)
        return chosen


def _grouped(args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
    """A product of matrices by groups, such as the experts of a mixture: torch knows its shape in bf16 alone."""
    dtype = kwargs.get("out_dtype") or args[0].dtype
    matrices = [_empty(matrix.shape, matrix.stride(), torch.bfloat16) for matrix in args[:2]]
    product: torch.Tensor = _GROUPED(*matrices, *args[2:], **kwargs | {"out_dtype": None})
    return _empty(product.shape, product.stride(), dtype)


def _tensors_in(argument_lists: Iterable[Iterable[Any]]) -> list[torch.Tensor]:
    tensors: list[torch.Tensor] = []
    for arguments in argument_lists:
        for argument in arguments:
            if isinstance(argument, torch.Tensor):
                tensors.append(argument)
            elif isinstance(argument, list | tuple):
                tensors += [inner for inner in argument if isinstance(inner, torch.Tensor)]
    return tensors


def _without_values(value: Any) -> Any:
    """The same with tensors without values in the place of those with. (torch's tree_map takes ten times as long.)"""
    if isinstance(value, torch.Tensor):
        return value if value.is_meta else _empty(value.shape, value.stride(), value.dtype)
    return type(value)(map(_without_values, value)) if isinstance(value, list | tuple) else value


def _empty(shape: torch.Size, stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device=_META)


@dataclass(frozen=True, eq=False)
class _Operation:
    """One of torch's operations, looked at once."""

    is_mutable: bool
    makes_new: bool
    """Whether all its results are new memory, and none of its arguments is written to."""
    is_view: bool
    """Whether all its results are memory of its first argument."""
    overwrites_first: bool
    """Whether it writes into its first argument, and returns that."""
    target: tuple[int, str] | None
    """(place, name) of the argument it writes into and returns. Without values it stays what it was."""

    @classmethod
    def look_at(cls, func: Any) -> "_Operation":
        schema = func._schema
        places = [
            (place, argument.name)
            for place, argument in enumerate(schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        is_plain = len(places) == len(schema.returns) == 1 and schema.returns[0].alias_info is not None
        changes_shape = torch.Tag.inplace_view in func.tags or func in _CHANGES_MEMORY
        # Its one tensor is its first argument, and all its results are parts of that. Operations composed of others,
        # such as `reshape`, may copy.
        tensors = [argument for argument in schema.arguments if "Tensor" in str(argument.type)]
        aliases = [argument.alias_info for argument in (*tensors, *schema.returns)]
        is_composed = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
        gives_part_of_first = (
            tensors == schema.arguments[:1] and bool(schema.returns) and None not in aliases and not is_composed
        )
        target = places[0] if is_plain and not changes_shape else None
        operation = _OPERATIONS[id(func)] = cls(
            schema.is_mutable,
            not schema.is_mutable and all(output.alias_info is None for output in schema.returns),
            not schema.is_mutable and func is not _aten.lift_fresh.default and gives_part_of_first,
            target is not None and target[0] == 0 and not schema.arguments[0].kwarg_only,
            target,
        )
        return operation


def _key(operation: _Operation, args: Any, kwargs: dict[str, Any]) -> Any:
    key = (operation, tuple(map(_part, args)), tuple((name, _part(value)) for name, value in kwargs.items()))
    try:
        hash(key)
    except TypeError:
        return None
    return key


def _part(argument: Any) -> Any:
    if isinstance(argument, torch.Tensor):
        return _layout(argument)
    # 1, 1.0 and True are equal, and make tensors of other dtypes.
    return tuple(map(_part, argument)) if isinstance(argument, list | tuple) else (type(argument), argument)
