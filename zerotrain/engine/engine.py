"""The facade: wraps a model and runs forward, backward and step on sharded state."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from zerotrain.comm.collectives import Collectives
from zerotrain.comm.ledger import Ledger
from zerotrain.comm.scratch import ScratchPools
from zerotrain.comm.world import World
from zerotrain.engine.agreement import StepStamps, require_same
from zerotrain.engine.build import Builder, require_values, share_unmanaged
from zerotrain.deferred.init import InitialValues
from zerotrain.engine.state.full_weights import full_state_dict, weights_sha256
from zerotrain.engine.schedule.hooks import connect, next_node, require_graph, require_no_engine
from zerotrain.engine.precision.kept_fp32 import cast_around_kept, dtypes_of
from zerotrain.engine.precision.loss_scale import LossScaler
from zerotrain.engine.groups.optimizer_factory import OptimizerFactory
from zerotrain.engine.update.optimizer_step import OptimizerStep
from zerotrain.engine.options import EngineOptions
from zerotrain.engine.groups.param_groups import ParamGroups
from zerotrain.engine.schedule.schedule import Schedule
from zerotrain.engine.buckets.life import Phase
from zerotrain.engine.results import StepResult, TrainStepResult
from zerotrain.engine.state.transfer import Transfer
from zerotrain.engine.buckets.unready_parameter import LEFT_ITS_UNIT, reads_freed_memory
from zerotrain.engine.usage import memory_bytes, volume_of
from zerotrain.errors import CommError, EngineStateError, TrainingError
from zerotrain.sharding.units import model_parameters


class ZeroEngine:
    """A model whose parameters, gradients and optimizer state are held as a plan says.

    All ranks make the same calls in the same order. Gradients are the mean over ranks of the sum over the backwards
    since the last step; a caller who accumulates divides the loss, or gives `backward` a weight, as with plain PyTorch.

    Args:
        model: built alike on every rank; rank 0's weights and buffers are used. It is changed in place: its parameters
            become views of the engine's buckets, on `world.device`, in the compute precision.
        optimizer: makes an optimizer from a list of parameter groups: an element-wise one, or one that is declared to
            update whole tensors (see `zerotrain.engine.groups.optimizer_factory`).
        decay_all, param_groups: as for `build_engine`.
        initial: of a model that `deferred_init` has built; default: the values that the parameters have.
        loss_scaler: scales the loss, for a precision that needs it; None for no scaling.

    Raises:
        ConfigError: the model or the optimizer cannot be trained so.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        optimizer: OptimizerFactory,
        world: World,
        options: EngineOptions,
        decay_all: bool = False,
        param_groups: Sequence[dict[str, Any]] | None = None,
        initial: InitialValues | None = None,
        loss_scaler: LossScaler | None = None,
    ) -> None:
        require_values(model)
        require_no_engine(model)
        self.module = model
        self.world = world
        self.options = options
        self.plan, self.precision, self.max_grad_norm = options.plan, options.precision, options.max_grad_norm
        self.loss_scaler = loss_scaler
        self.ledger = Ledger()
        self.collectives = Collectives(world, ledger=self.ledger, ordered=options.ordered, overlap=options.overlap)
        self.stamps = StepStamps(self.collectives)
        require_same(self.collectives, options.settings())
        self._syncs = True
        self._losses: list[torch.Tensor] = []
        self._optimizer_step = OptimizerStep(model, options, self.collectives, self.stamps, loss_scaler)
        parameters = model_parameters(model)
        dtypes = dtypes_of(parameters, self.precision)
        self._groups = ParamGroups(parameters, optimizer, param_groups, decay_all=decay_all, warns=world.rank == 0)
        self._pools = ScratchPools(world.device)
        share_unmanaged(model, parameters, self.collectives)
        self._builder = Builder(
            model,
            parameters,
            dtypes,
            options=options,
            groups=self._groups,
            collectives=self.collectives,
            pools=self._pools,
        )
        self._connect(self._builder.schedule(initial or InitialValues()))
        cast_around_kept(model, dtypes, self.precision)

    def _connect(self, schedule: Schedule) -> None:
        """Let the model tell a schedule of buckets, which were just cut, where it is."""
        self.schedule = schedule
        self._disconnect = connect(self, schedule)
        self._first_node_after_update = next_node()

    # ---- forward, backward, step

    def __call__(self, *inputs: Any, **named_inputs: Any) -> Any:
        """Run the model; floating-point inputs are cast to the compute precision. Returns what the model returns."""
        with self.forward_scope():
            inputs, named_inputs = self.precision.cast_inputs((inputs, named_inputs))
            return self.module(*inputs, **named_inputs)

    @contextmanager
    def forward_scope(self) -> Iterator[None]:
        """In here the model may be called by another name, such as `engine.module.encoder(inputs)`: on all ranks the
        same modules in the same order, with inputs in the compute precision. What comes out may go into a loss."""
        in_step, backward_follows = self.ledger.in_step, torch.is_grad_enabled()
        self.ledger.in_step = backward_follows
        returned = False
        try:
            with self._phase(Phase.FORWARD):
                self.schedule.begin_forward()
                yield
                returned = True
        finally:
            self.schedule.end_forward(backward_follows=backward_follows and returned)
            self.ledger.in_step = backward_follows or in_step

    def backward(self, loss: torch.Tensor, *, weight: float | torch.Tensor = 1.0, retain_graph: bool = False) -> None:
        """Compute gradients of `weight * loss` and, outside `no_sync`, reduce them while they arrive. An exception
        forgets the gradients since the last step; who catches it, does so on all ranks.

        Args:
            loss: 0-dim, this rank's.
            weight: factor on this loss; the engine's own 1 / world size comes on top.

        Raises:
            EngineStateError: `loss` is not one number, or does not depend on the parameters since the last step.
        """
        require_graph(loss, self._first_node_after_update)
        self.ledger.in_step = True
        self._losses.append(loss.detach())
        scale = torch.ones_like(loss).mul_(weight / (self.world.size / self.loss_scale))
        self.stamps.num_backwards += 1
        with self._phase(Phase.BACKWARD), self._clean_after_error():
            self.schedule.begin_backward(
                more_to_come=not self._syncs, loss_scale=self.loss_scale, frees_graph=not retain_graph
            )
            loss.backward(gradient=scale, retain_graph=retain_graph)
            self.schedule.end_backward()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backwards in here only add up gradients on this rank. For all but the last micro-batch of a step."""
        before, self._syncs = self._syncs, False
        try:
            yield
        finally:
            self._syncs = before

    def zero_grad(self) -> None:
        """Forget the gradients since the last step; what was reduced is waited for. All ranks call it."""
        self.schedule.drop_gradients()
        self.ledger.drop_step()
        self._losses.clear()

    @contextmanager
    def _clean_after_error(self) -> Iterator[None]:
        try:
            yield
        except CommError:
            raise  # another rank is gone or elsewhere: there is nothing to wait for
        except Exception as error:
            self.zero_grad()
            if reads_freed_memory(error):
                raise EngineStateError(LEFT_ITS_UNIT.format("its unit")) from error
            raise

    @contextmanager
    def _phase(self, phase: Phase) -> Iterator[None]:
        before = self.schedule.phase
        self.schedule.phase = self.stamps.phase = phase
        try:
            yield
        finally:
            self.schedule.phase = self.stamps.phase = before

    def step(self) -> StepResult:
        """Clip, update the master weights bucket by bucket, and issue each bucket's gather as it is done.

        A gradient that is not finite skips the update on every rank. An exception of the optimizer forgets the
        gradients: some may be clipped already, and some buckets updated.

        Raises:
            EngineStateError: no backward has reduced its gradients since the last step.
            DisagreementError: the ranks have not done the same since the last step.
            TrainingError: too many steps in a row were skipped, on every rank alike, or no smaller loss scale is left.
        """
        if not all(bucket.gradient.is_reduced for bucket in self.schedule.trained):
            raise EngineStateError(
                "step came before a backward outside no_sync(): call engine.backward(loss) first, the last "
                "micro-batch of a step outside `with engine.no_sync()`"
            )
        with self._phase(Phase.UPDATE), self._clean_after_error():
            result, reason_to_stop = self._optimizer_step.run(self.schedule, self.param_groups, self._losses)
        self._losses.clear()
        if not result.skipped:
            self._first_node_after_update = next_node()
        self.stamps.close_step()
        self.ledger.close_step()
        if reason_to_stop is not None:
            raise TrainingError(reason_to_stop)
        if self.loss_scaler is not None:
            self.loss_scaler.update(overflowed=result.skipped)
        return result

    def train_step(
        self, micro_batches: Sequence[Sequence[Any]], *, weights: Sequence[float | torch.Tensor] | None = None
    ) -> TrainStepResult:
        """Forward and backward of each micro-batch, then one step.

        Args:
            micro_batches: the model's inputs, one sequence for each; the model returns the loss.
            weights: factor on the loss of each; default 1 / number of micro-batches.

        An exception in the data, the model or a backward forgets the gradients of all micro-batches.
        """
        weights = weights or [1.0 / max(1, len(micro_batches))] * len(micro_batches)
        total = torch.zeros((), dtype=torch.float32, device=self.world.device)
        with self._clean_after_error():
            for index, (inputs, weight) in enumerate(zip(micro_batches, weights, strict=True)):
                loss = self(*inputs)
                total += weight * loss.detach().float()
                with nullcontext() if index == len(micro_batches) - 1 else self.no_sync():
                    self.backward(loss, weight=weight)
                del loss
        return TrainStepResult(**vars(self.step()), loss=total)

    def train(self) -> "ZeroEngine":
        """Put the model into training mode."""
        self.module.train()
        return self

    def eval(self) -> "ZeroEngine":
        """Put the model into evaluation mode."""
        self.module.eval()
        return self

    def any_rank(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank; all ranks call it. For loops of forwards whose length differs by rank."""
        return self.world.sum(torch.tensor(float(flag), device=self.world.device)).item() > 0

    # ---- what trains

    def freeze(self, *named: str | nn.Parameter) -> None:
        """Let parameters train no more: only their weights in the compute precision are kept.

        Args:
            named: names, patterns such as "blocks.0.*", or parameters; the same on all ranks, between two steps.

        Raises:
            ConfigError: one of them is nothing the model has, or nothing would be left to train.
            EngineStateError: gradients of a step are waiting.
        """
        self._change(lambda: self._groups.freeze(named))

    def unfreeze(self, *named: str | nn.Parameter) -> None:
        """Let frozen parameters train, in the group they have, as new to the optimizer. Otherwise as `freeze`."""
        self._change(lambda: self._groups.unfreeze(named))

    def add_param_group(self, group: dict[str, Any]) -> None:
        """Let the frozen parameters of `group`, as in `build_engine`, train in a group of their own. As `unfreeze`."""
        self._change(lambda: self._groups.add(group))

    def _change(self, change: Callable[[], bool]) -> None:
        """Make a change of what trains and, if it changed anything, cut the buckets anew."""
        if not all(bucket.gradient.is_empty for bucket in self.schedule.trained):
            raise EngineStateError("what trains cannot change while a gradient waits; call engine.step() first")
        transfer = Transfer(self.schedule.buckets, self.collectives)
        if change():
            self._disconnect()
            for bucket in self.schedule.buckets:
                bucket.weights.let_go()
            self._pools.clear()
            schedule = self._builder.schedule(InitialValues(), transfer.fill)
            transfer.restore_state(schedule.trained)
            self._connect(schedule)

    # ---- what is held, and what the theory says

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The optimizer's hyperparameters; a schedule sets group["lr"] from group["initial_lr"]."""
        return self._groups.hyperparameters

    @property
    def loss_scale(self) -> float:
        """What the loss of the next backward is multiplied with; 1.0 but in fp16."""
        return 1.0 if self.loss_scaler is None else self.loss_scaler.scale

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return sum(bucket.layout.numel for bucket in self.schedule.buckets)

    def memory_bytes(self) -> dict[str, Any]:
        """Bytes this rank holds now, by kind, and under "theory" what ZeRO's formulas give without padding.

        "scratch" is what the buffers reused from step to step hold beside the model state.
        """
        return memory_bytes(self.schedule, self._groups.factory, self._pools, self.world.shards.size)

    def theoretical_sent_nbytes(self, num_micro_batches: int) -> int:
        """Bytes this rank sends in a step by ZeRO's count, without padding and without the norm's few bytes; and
        those of tensors that are updated whole, on their way to their owners and back."""
        volume, reshards = volume_of(self.schedule, self.world.shards.size), self.options.reshard_after_forward
        whole_tensors = sum(bucket.update.sent_nbytes for bucket in self.schedule.trained)
        return volume.sent_nbytes(self.plan, num_micro_batches, reshards) + whole_tensors

    # ---- weights out

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The model's state dict: original names, full fp32 parameters on the CPU, on rank 0; {} elsewhere.

        Collective: all ranks call it.
        """
        return full_state_dict(self.module, self.schedule.buckets, self.collectives)

    def weights_sha256(self) -> str:
        """SHA-256 over the full fp32 master weights in name order, the same on every rank. Collective."""
        return weights_sha256(self.schedule.buckets, self.collectives)
