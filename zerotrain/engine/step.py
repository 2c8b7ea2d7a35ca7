"""The steps of a training: forward, backward, update; and the engine as torch's schedulers see it."""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import islice
from numbers import Integral
from threading import get_ident
from typing import Any, NoReturn

import torch

from zerotrain.device.device import lies_on_host
from zerotrain.engine.agreement import StepStamps
from zerotrain.engine.buckets.life import Backward, Phase
from zerotrain.engine.graphs import AfterEach, BeforeEach, Calls, graphs_of, no_seed
from zerotrain.engine.model.forward import makes_memory, outside_graphs
from zerotrain.engine.model.live_parameter import left_its_unit, reads_freed_memory
from zerotrain.engine.model.precision import LossScaler, WideArguments, require_one_dtype
from zerotrain.engine.optimizer_step import OptimizerStep
from zerotrain.engine.results import StepResult, TrainStepResult
from zerotrain.engine.schedule.hooks import require_graph
from zerotrain.engine.sharded_model import ShardedModel
from zerotrain.errors import CommError, ConfigError, EngineStateError, TrainingError, argument

# The micro-batches of one virtual rank. See [Note: leaves] in `buckets/gradient.py`.


MicroBatch = Sequence[Any] | Mapping[str, Any]
"""The model's inputs, or named ones; it returns the loss."""
Weight = float | torch.Tensor


def weighs_nothing(weight: Weight) -> bool:
    """Whether a loss of this weight counts for nothing, as far as the host can know without waiting for the device."""
    is_known = not isinstance(weight, torch.Tensor) or lies_on_host(weight)
    return is_known and bool(weight == 0)


def shared_out(
    micro_batches: Sequence[MicroBatch], weights: Sequence[Weight] | None, num_leaves: int
) -> Iterator[list[tuple[MicroBatch, Weight]]]:
    """The micro-batches of each virtual rank, with their weights; without any each has those of a mean.

    Raises:
        EngineStateError: before anything is computed; a micro-batch is none or has no weight, or the virtual ranks
            cannot share them evenly.
    """
    if type(micro_batches) in (list, tuple):  # other sequences may load as they are asked
        for micro_batch in micro_batches:
            require_micro_batch(micro_batch)
    per_leaf, left_over = divmod(len(micro_batches), num_leaves)
    weights = [1.0 / max(1, per_leaf)] * len(micro_batches) if weights is None else list(weights)
    if len(weights) != len(micro_batches):
        raise EngineStateError(
            f"train_step got {len(weights)} weights for {len(micro_batches)} micro-batches; give one for each"
        )
    if left_over:
        raise EngineStateError(
            f"train_step got {len(micro_batches)} micro-batches, which this rank's {num_leaves} virtual ranks cannot "
            "share; give each as many"
        )
    weighted = iter(zip(micro_batches, weights, strict=True))
    return (list(islice(weighted, per_leaf)) for _ in range(num_leaves))


def require_micro_batch(micro_batch: object) -> None:
    """Refuse anything but a micro-batch.

    Raises:
        EngineStateError: it is a tensor, or nothing that can be iterated over.
    """
    if isinstance(micro_batch, torch.Tensor) or not isinstance(micro_batch, Iterable):
        kind = "tensor" if isinstance(micro_batch, torch.Tensor) else type(micro_batch).__name__
        raise EngineStateError(f"train_step got a {kind} for a micro-batch; give it as a sequence: (tensor,)")


def call_model(model: Callable[..., Any], inputs: MicroBatch, **switches: bool) -> Any:
    """The model's output for a micro-batch."""
    return model(**inputs, **switches) if isinstance(inputs, Mapping) else model(*inputs, **switches)


def is_loss(output: Any) -> bool:
    """Whether what a model returns can be its loss."""
    return isinstance(output, torch.Tensor) and output.is_floating_point() and output.numel() == 1


def loss_in(output: Any) -> Any:
    """The loss in what a model returns: its `loss`, or the one 0-dim tensor of a tuple. The output stays as it is if it
    has none."""
    if isinstance(output, Mapping):
        return output.get("loss", output)
    if isinstance(output, tuple | list) and not hasattr(output, "loss"):
        numbers = [item for item in output if is_loss(item) and item.dim() == 0]
        return numbers[0] if len(numbers) == 1 else output
    return getattr(output, "loss", output)


def require_loss(output: Any, model: str) -> None:
    """ConfigError if a model returns no loss to an evaluation."""
    if not is_loss(output):
        shape = f" of shape {tuple(output.shape)}" if isinstance(output, torch.Tensor) else ""
        raise ConfigError(
            f"model: {model}.forward returns a {type(output).__name__}{shape} for a batch in evaluation mode; let it "
            "return the mean loss, a tensor of one number, alone, as `loss`, or as the one number of a tuple"
        )


# The engine as torch's learning rate schedulers and loops written for torch see it.


class EngineOptimizer(torch.optim.Optimizer):
    """The `engine.optimizer`: a `torch.optim.Optimizer` whose groups are those of `engine.param_groups`.

    It updates nothing itself, and does not keep its engine alive.

    Args:
        engine: a `ZeroEngine`. Schedulers of momentum look at the settings of its optimizers.
    """

    _opt_called: bool
    """Torch's: its schedulers warn of a schedule without a step."""

    def __init__(self, engine: Any) -> None:
        groups = engine.held.groups
        super().__init__([torch.zeros(0)], dict(groups.defaults))  # it must have a parameter, which is forgotten
        self.param_groups = groups.hyperparameters
        self._engine = weakref.ref(engine)

    @property
    def engine(self) -> Any:
        """The engine of this optimizer.

        Raises:
            EngineStateError: it is gone.
        """
        engine = self._engine()
        if engine is None:
            raise EngineStateError("the engine of this optimizer is gone; keep it as long as you train")
        return engine

    def step(self, closure: Callable[[], Any] | None = None) -> StepResult:  # type: ignore[override]
        """`engine.step()`.

        Raises:
            EngineStateError: there is a closure.
        """
        if closure is not None:
            raise EngineStateError("step takes no closure here; call engine.backward(loss) before it")
        result: StepResult = self.engine.step()
        return result

    def zero_grad(self, set_to_none: bool = True) -> None:
        """`engine.zero_grad()`: before a backward and after a step there is nothing to forget."""
        self.engine.zero_grad()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """`engine.add_param_group`."""
        if hasattr(self, "_engine"):
            self.engine.add_param_group(param_group)
        else:
            super().add_param_group(param_group)

    def state_dict(self) -> NoReturn:
        """Refused.

        Raises:
            EngineStateError: always.
        """
        raise EngineStateError(
            "engine.optimizer has no state dict: its state is sharded over the ranks, and engine.save(path) saves it "
            "with the weights; a scheduler's state is in its own state_dict()"
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> NoReturn:
        """Refused, as `state_dict`.

        Raises:
            EngineStateError: always.
        """
        self.state_dict()


MAX_SIGNAL = 2**31


class Steps:
    """Trains a sharded model, step by step.

    Args:
        loss_scaler: scales the loss, for a precision that needs it; None for no scaling.
    """

    def __init__(self, held: ShardedModel, loss_scaler: LossScaler | None) -> None:
        self.loss_scaler = loss_scaler
        self.stamps = StepStamps(held.collectives)
        config, leaves = held.options.config, held.options.leaves_per_rank
        self.virtual_ranks = range(held.world.shards.rank * leaves, (held.world.shards.rank + 1) * leaves)
        """Those that this rank runs."""
        self.optimizer_step = OptimizerStep(held.module, config, held.collectives, self.stamps, loss_scaler)
        self.held = held
        self.graphs, self.graph_reasons = graphs_of(held)
        """The graphs that steps are replayed from, if any; and the reasons for steps without, each once."""
        self.optimizer_step.graphs = held.graphs = self.graphs
        self._wide_arguments = WideArguments(held.precision.compute)
        self._syncs = True
        self._in_last_leaf = leaves == 1
        self._discards = False
        """Whether gradients are discarded: a leaf is computed again for its digest."""
        self.losses: list[torch.Tensor] = []
        """The losses of this rank's micro-batches since the last step."""
        self._loss: torch.Tensor | None = None
        """0-dim fp64, the mean of this rank's virtual ranks in a `train_step`."""
        self._broken_off_by = ""
        """The exception, mostly Ctrl-C, that cut off a backward or a step and left a part of the gradient."""
        self._optimizer: EngineOptimizer | None = None

    @property
    def signal(self) -> int:
        """A whole number from 0 to 2**31 for all ranks, which rides on the exchange of the norm: see
        `StepResult.signals`."""
        return self.stamps.signal

    @signal.setter
    def signal(self, signal: int) -> None:
        if not isinstance(signal, Integral) or not 0 <= signal <= MAX_SIGNAL:
            raise ConfigError(f"engine.signal: got {signal!r}; it must be a whole number from 0 to {MAX_SIGNAL}")
        self.stamps.signal = int(signal)

    @property
    def num_replayed(self) -> int:
        """Steps so far that were told to the device as graphs."""
        return 0 if self.graphs is None else self.graphs.num_replayed

    @property
    def loss_scale(self) -> float:
        """Factor of the loss in the next backward; 1.0 but in fp16."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.scale

    @property
    @outside_graphs
    def optimizer(self) -> EngineOptimizer:
        """For torch's learning rate schedulers, such as `CosineAnnealingLR(engine.optimizer, 10)`: a
        `torch.optim.Optimizer` with the groups of `param_groups`. Its `step` is `engine.step`, its `zero_grad` is
        `engine.zero_grad`; it has no state dict."""
        if self._optimizer is None:
            self._optimizer = EngineOptimizer(self)
        return self._optimizer

    @outside_graphs
    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Run the model; in 16 bits wider floating-point inputs are rounded where PyTorch wants one dtype beside
        weights, and nowhere else. Returns what the model returns."""
        with self.forward_scope(), self._wide_arguments.around_forward((inputs, named_inputs)):
            output = self.held.module(*inputs, **named_inputs)
        if not torch.is_grad_enabled():
            self._warn_of_overflow()
        return output

    @contextmanager
    def forward_scope(self) -> Iterator[None]:
        """In here the model may be called by another name, such as `engine.module.encoder(inputs)`: on all ranks the
        same modules in the same order, with floats in the compute precision. A loss may use the outputs."""
        self.require_ready()
        in_step, backward_follows = self.held.ledger.in_step, torch.is_grad_enabled()
        self.held.ledger.in_step = backward_follows
        within_backward = self.held.schedule.phase in (Phase.BACKWARD, Phase.RECOMPUTATION)
        phase = Phase.RECOMPUTATION if within_backward else Phase.FORWARD
        returned = False
        try:
            with self._phase(phase):
                self.held.schedule.begin_forward()
                yield
                returned = True
        except RuntimeError as error:
            require_one_dtype(self.held.module, self.held.precision, error)
            raise
        finally:
            if phase is Phase.FORWARD:
                self.held.schedule.gathers.end_forward(backward_follows=backward_follows and returned)
            self.held.ledger.in_step = backward_follows or in_step

    @outside_graphs
    def backward(self, loss: torch.Tensor, *, weight: float | torch.Tensor = 1.0, retain_graph: bool = False) -> None:
        """Compute gradients of `weight * loss` and, outside `no_sync`, reduce them while they arrive. An exception
        forgets the gradients since the last step; who catches it, does so on all ranks.

        Args:
            loss: 0-dim, this rank's.
            weight: factor on this loss. A loss that weighs nothing puts nothing into the gradients, nan neither: a
                batch without labels has nan for its mean. So the weight is looked at, unless it is a tensor on a GPU,
                which the host would have to wait for. The mean over ranks is taken of gradients, in their reduction:
                those of this rank are what plain PyTorch computes (in fp16 times `loss_scale`).

        Raises:
            EngineStateError: `loss` is not one number, or does not depend on the parameters since the last step.
        """
        self._require_unbroken()
        self.held.schedule.require_unchanged()
        if self.held.average is not None:
            self.held.average.require_out_of_use("engine.backward was called")
        require_graph(loss, self.held.first_nodes.get(get_ident(), 0))
        counts = not weighs_nothing(weight)
        factor, scaled = weight * self.loss_scale, loss
        if not (isinstance(factor, float) and factor == 1.0):
            # Torch's own way, `backward(gradient=factor)`, imports its symbolic shapes: 0.4 s of CPU and 40 MB of every
            # rank.
            with torch.enable_grad():
                scaled = loss * torch.ones_like(loss).mul_(factor).detach()
        self.held.ledger.in_step = True
        if counts:
            self.losses.append(loss.detach())
        self.stamps.num_backwards += 1
        with self._phase(Phase.BACKWARD), self._clean_after_error(), self._wide_arguments.around_backward():
            completes = self._syncs and self._in_last_leaf
            self.held.schedule.begin_backward(
                Backward(
                    reduces=completes or (self.held.options.reduces_each and self._in_last_leaf),
                    completes=completes,
                    in_last_leaf=self._in_last_leaf,
                    counts=counts,
                    frees_graph=not retain_graph,
                    loss_scale=self.loss_scale,
                    discards=self._discards,
                )
            )
            at_root = loss.register_hook(self.held.schedule.root_reached)
            # Below the functions of torch, which would leave the mode of arguments.
            torch.autograd.graph._engine_run_backward(
                (scaled,),
                (torch.ones_like(scaled),),
                retain_graph,
                False,
                (),
                allow_unreachable=True,
                accumulate_grad=True,
            )
            at_root.remove()
            self.held.schedule.end_backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here do not complete the step's gradient: they add it up, on this rank alone unless
        zero.accumulate='reduced'. For all but the last micro-batch of a step."""
        former, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = former

    def each_virtual_rank(self) -> Iterator[int]:
        """This rank's virtual ranks, one after the other: the backwards between two are one leaf of the sum over all.

            for number in engine.each_virtual_rank():
                engine.backward(engine(*batch_of(number)))
            engine.step()

        Each may have several micro-batches, all but its last in `no_sync`. With one virtual rank per rank, the default,
        it may be left out.
        """
        for number in self.virtual_ranks:
            self._in_last_leaf = number == self.virtual_ranks[-1]
            yield number
            if not self._in_last_leaf:
                self.held.schedule.reductions.close_leaf()

    @makes_memory
    def zero_grad(self) -> None:
        """Forget the gradients since the last step; what was reduced is waited for. All ranks call it."""
        self._in_last_leaf = self.held.options.leaves_per_rank == 1
        self.held.schedule.drop_gradients()
        self._broken_off_by = ""
        self.stamps.num_backwards = 0
        self.held.ledger.drop_step()
        self.losses.clear()
        self._loss = None

    @contextmanager
    def _clean_after_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if not isinstance(error, Exception) and self.held.world.size > 1:  # ranks are elsewhere: wait for none
                self._broken_off_by = type(error).__name__
            elif not isinstance(error, CommError):  # otherwise there is nobody to wait for
                with suppress(Exception):  # of what is under way: the first cause is what the user reads
                    self.zero_grad()
            if reads_freed_memory(error):
                raise EngineStateError(left_its_unit("its unit")) from error
            raise

    @contextmanager
    def _phase(self, phase: Phase) -> Iterator[None]:
        former = self.held.schedule.phase
        self.held.schedule.phase = self.stamps.phase = phase
        try:
            yield
        finally:
            self.held.schedule.phase = self.stamps.phase = former

    @makes_memory
    def step(self) -> StepResult:
        """Clip, update the master weights bucket by bucket, and issue each bucket's gather as it is done.

        A gradient that is not finite skips the update on every rank. An exception of the optimizer forgets the
        gradients: some may be clipped already, and some buckets updated.

        Raises:
            EngineStateError: no backward has reduced its gradients since the last step, or a group of `param_groups`
                has lost what an update needs.
            DisagreementError: the ranks have not done the same since the last step.
            TrainingError: too many steps in a row were skipped, on every rank alike, or no smaller loss scale is left.
        """
        self._require_unbroken()
        if not all(bucket.gradient.is_reduced for bucket in self.held.schedule.trained):
            leaves = len(self.virtual_ranks)
            raise EngineStateError(
                "step came before a backward outside no_sync(): first call engine.backward(loss), for the last "
                "micro-batch of a step outside `with engine.no_sync()`"
                + (f", and this rank's {leaves} virtual ranks in engine.each_virtual_rank()" if leaves > 1 else "")
            )
        refusal = None
        try:
            self.held.groups.require_usable()
        except EngineStateError as error:  # raised once the ranks have compared their groups: others would wait
            refusal = error
        with self._phase(Phase.UPDATE), self._clean_after_error(), self.held.ledger.updating():
            groups, average = self.held.groups.hyperparameters, self.held.average
            share = None if average is None else average.share(self.stamps.num_steps + 1)
            loss, self._loss = self._loss, None
            if loss is None:
                loss = torch.full((), torch.nan, dtype=torch.float64, device=self.held.world.device)
            result, reason = self.optimizer_step.run(self.held.schedule, groups, self.losses, loss, share, refusal)
        self._warn_of_overflow()
        self.losses.clear()
        self._in_last_leaf = self.held.options.leaves_per_rank == 1
        if not result.skipped:
            self.held.weights_changed()
            self.held.groups.count_step()
            if average is not None and share is not None:
                average.num_updates += 1
        self.stamps.num_steps += 1
        self.stamps.num_backwards = 0
        self.held.ledger.close_step()
        self.optimizer._opt_called = True
        if reason is not None:
            raise TrainingError(reason)
        if self.loss_scaler is not None:
            self.loss_scaler.update(overflowed=result.skipped)
        return result

    @outside_graphs
    def train_step(
        self,
        micro_batches: Sequence[MicroBatch],
        *,
        weights: Sequence[Weight] | None = None,
        before_each: BeforeEach = no_seed,
        after_each: AfterEach | None = None,
        with_outputs: bool = False,
        before_update: Callable[[], object] | None = None,
    ) -> TrainStepResult:
        """Forward and backward of each micro-batch, then one step.

        Args:
            micro_batches: the model's inputs, one sequence for each, or a dict of named ones. It returns the loss, or
                outputs with one, see `loss_in`.
            weights: factor on the loss of each, as for `backward`; default 1 / number of those of a virtual rank.
            before_each: called before each forward with the number of the virtual rank, and that of the micro-batch in
                it: the place to seed what the model draws. With graphs it must do no more, and say so by an attribute
                `only_seeds = True`; otherwise steps are computed without.
            after_each: called after each forward with the same numbers, the loss, and the model's outputs or None. It
                must not wait for other ranks.
            with_outputs: call the model with `with_outputs=True`, for which it returns (loss, outputs).
            before_update: called between the last backward and the update, on all ranks or on none; the step is then
                computed without graphs. If it raises an exception, nothing is updated.

        An exception in the data, the model or a backward forgets the gradients of all micro-batches.

        Raises:
            EngineStateError: the virtual ranks of this rank cannot share the micro-batches evenly.
        """
        calls = Calls(before_each, after_each, with_outputs)
        leaves = shared_out(micro_batches, weights, len(self.virtual_ranks))
        if self.graphs is None or before_update is not None:
            self._loss = self.run_leaves(leaves, calls)
            if before_update is not None:
                with self._clean_after_error():
                    before_update()
            return TrainStepResult(loss=self._loss, **vars(self.step()))
        loss, result = self.graphs.train_step(self, list(leaves), calls)
        return TrainStepResult(loss=loss, **vars(result))

    def run_leaves(self, leaves: Iterable[Sequence[tuple[MicroBatch, Weight]]], calls: Calls) -> torch.Tensor:
        """Forward and backward of the micro-batches of each virtual rank. Returns the mean loss, 0-dim fp64."""
        total = torch.zeros((), dtype=torch.float64, device=self.held.world.device)
        with self._clean_after_error():
            for number, weighted in zip(self.each_virtual_rank(), leaves, strict=True):
                total += self._run_leaf(number, weighted, calls)
        return total / len(self.virtual_ranks)

    def finish_step(self, loss: torch.Tensor) -> StepResult:
        """The step behind forwards and backwards of this loss."""
        self._loss = loss
        return self.step()

    @outside_graphs
    def leaf(
        self,
        virtual_rank: int,
        micro_batches: Sequence[MicroBatch],
        *,
        weights: Sequence[Weight] | None = None,
        before_each: BeforeEach = no_seed,
        after_each: AfterEach | None = None,
    ) -> dict[str, torch.Tensor]:
        """The gradient that a virtual rank puts into the sum over all, computed alone, whichever rank runs it in a
        step: the same bits wherever the same weights, micro-batches and seeds are. Trains nothing. At stage 3 all ranks
        call it together, each for a leaf of its choice.

        Args:
            virtual_rank: passed to `before_each`.
            micro_batches, weights, before_each, after_each: of this virtual rank, as for `train_step`.

        Returns:
            By the name of each parameter that trains, of its shape: in the dtype that leaves are added in, rounded as
            it would travel, and in fp16 times `loss_scale`.

        Raises:
            EngineStateError: gradients of a step are waiting.
        """
        (weighted,) = shared_out(micro_batches, weights, 1)
        with self._leaf_alone(in_last_leaf=False):
            self._run_leaf(virtual_rank, weighted, Calls(before_each, after_each))
            return {
                managed.names[0]: gradient
                for bucket in self.held.schedule.trained
                for managed, gradient in zip(bucket.spec.parameters, bucket.gradient.leaf_alone(), strict=True)
            }

    def run_discarded(
        self, virtual_rank: int, micro_batches: Sequence[MicroBatch], weights: Sequence[Weight] | None, calls: Calls
    ) -> None:
        """Compute the leaf of any virtual rank as a step does, in the same memory, and discard it where it would be
        added to others. Arguments are those of `leaf` and `train_step`. All ranks call it together, each for a leaf at
        the same place among those of its rank. It changes neither weights nor the model's buffers."""
        (weighted,) = shared_out(micro_batches, weights, 1)
        is_last = (virtual_rank + 1) % len(self.virtual_ranks) == 0
        with self._leaf_alone(in_last_leaf=is_last, discards=True):
            self._run_leaf(virtual_rank, weighted, calls)
            if not is_last:
                self.held.schedule.reductions.close_leaf(discards=True)
        self.held.schedule.end_update()  # no backward will come through the forwards of this

    @contextmanager
    def _leaf_alone(self, *, in_last_leaf: bool, discards: bool = False) -> Iterator[None]:
        """In here a leaf is computed for its own sake, between steps: neither its gradients nor what its forwards write
        into the model's buffers stay."""
        self.held.require_no_gradient("a leaf cannot be computed")
        buffers = [(buffer, buffer.clone()) for buffer in self.held.module.buffers()]
        self._in_last_leaf, self._discards = in_last_leaf, discards
        try:
            with self._clean_after_error():
                yield
        finally:
            self._discards = False
            self.zero_grad()
            with torch.no_grad():
                for buffer, former in buffers:
                    buffer.copy_(former)

    def _run_leaf(self, number: int, weighted: Sequence[tuple[MicroBatch, Weight]], calls: Calls) -> torch.Tensor:
        """Forward and backward of a virtual rank's micro-batches. Returns the weighted sum of their losses, 0-dim."""
        total = torch.zeros((), dtype=torch.float32, device=self.held.world.device)
        for index, (inputs, weight) in enumerate(weighted):
            calls.before_each(number, index)
            require_micro_batch(inputs)
            if calls.with_outputs:
                result = call_model(self, inputs, with_outputs=True)
            else:
                result = loss_in(call_model(self, inputs)), None
            if not isinstance(result, tuple) or len(result) != 2:
                kind = type(result).__name__
                raise EngineStateError(
                    f"a model that is called with with_outputs=True must return (loss, outputs), not a {kind}"
                )
            loss, outputs = result
            if calls.after_each is not None:
                with torch.no_grad():
                    calls.after_each(number, index, loss.detach().squeeze(), outputs)
            del result, outputs
            with nullcontext() if index == len(weighted) - 1 else self.no_sync():
                self.backward(loss, weight=weight)
            if not weighs_nothing(weight):  # a loss that is nan would spoil the sum
                total += weight * loss.detach().squeeze().float()
            del loss
        return total

    def _warn_of_overflow(self) -> None:
        if self._wide_arguments.take_overflow():
            warnings.warn(
                f"a floating-point argument of the model has values that {self.held.precision.name} does not reach, "
                "and became inf where it met 16-bit weights; scale it, keep the module that reads it in "
                f"precision.keep_fp32, or use {argument('precision', 'bf16')}",
                RuntimeWarning,
                stacklevel=2,
            )

    def require_ready(self) -> None:
        """Refuse a forward of a model that is not whole, or that another has been put into."""
        self.held.newcomers.require_none()
        self.held.require_whole()
        if self._broken_off_by:
            self._require_unbroken()

    def _require_unbroken(self) -> None:
        if self._broken_off_by:
            raise EngineStateError(
                f"{self._broken_off_by} interrupted a backward or a step, and a part of the gradient is left: "
                "first call engine.zero_grad() on all ranks"
            )
