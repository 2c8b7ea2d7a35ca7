"""What users call an engine for in a step, each as a few lines that the engine and plain PyTorch both run.

A step is written against the engine's calls. `Plain` has the same calls for one rank's part of a step in plain
PyTorch, in one process; `reference_weights` sums the ranks' gradients in rank order in fp32 and steps torch's AdamW.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerotrain.errors import EngineStateError

WIDTH, CLASSES, ROWS = 16, 64, 4
NUM_STEPS = 2
BUCKET_MB = 0.0045
"""One block a bucket, and the output layer in a tail of its own."""
ADAMW: Any = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True)


class Block(nn.Module):
    """(ROWS, WIDTH) -> the same shape."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(F.gelu(self.up(self.norm(x)))))


class Net(nn.Module):
    """(ROWS, WIDTH) -> (ROWS, CLASSES), through three blocks."""

    block: Callable[[], nn.Module] = Block
    num_blocks = 3

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(self.num_blocks))
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.out(x)


class Skipping(Net):
    """Leaves two of its blocks unused."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks[1](self.embed(x)))


class Repeated(Net):
    """Blocks called again at once, and again after others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.blocks
        return self.out(third(first(second(second(first(self.embed(x)))))))


class Checkpointed(Net):
    """Calls torch's checkpoint by itself, around one block and around two, which drop values at random."""

    block = functools.partial(Block, dropout=0.2)

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.checkpoint = functools.partial(checkpoint, use_reentrant=use_reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, third = self.blocks
        x = self.checkpoint(first, self.embed(x))
        return self.out(self.checkpoint(lambda x: third(second(x)), x))


class CheckpointingBlock(Block):
    """Checkpoints a part of itself."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__(dropout=0.2)
        self.checkpoint = functools.partial(checkpoint, use_reentrant=use_reentrant)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.checkpoint(lambda x: self.down(F.gelu(self.up(x))), self.norm(x)))


class CheckpointedInside(Net):
    def __init__(self, use_reentrant: bool) -> None:
        self.block = functools.partial(CheckpointingBlock, use_reentrant)
        super().__init__()


class RoutedBlock(Block):
    """Leaves a loss of its own in an attribute, as mixtures of experts do, before its output is computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.aux = self.norm(x).softmax(dim=-1).square().sum()
        return super().forward(x)


class RoutedLateBlock(Block):
    """After its output is computed."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        self.aux = self.up(x).softmax(dim=-1).square().sum()
        return output


class Routed(Net):
    """Adds the losses its blocks left in an attribute."""

    block = RoutedBlock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean() + 0.01 * sum(block.aux for block in self.blocks)


class RoutedLate(Routed):
    block = RoutedLateBlock


class Greedy(Routed):
    """Each block learns from its own loss alone: nothing flows back through its output."""

    is_greedy = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x).detach() if self.is_greedy else block(x)
        return self.out(x).square().mean() + sum(block.aux for block in self.blocks)


class Shell:
    """An output that nothing can look into."""

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


class ShellBlock(Block):
    def forward(self, x: torch.Tensor) -> Any:
        return Shell(super().forward(x))


class InShells(Net):
    block = ShellBlock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x).hidden
        return self.out(x)


class PassingBlock(Block):
    """Hands on to the next block what the first one computed, and returns its own parameter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        bias = self.up(x).mean(dim=-1, keepdim=True) if bias is None else bias
        return super().forward(x) + bias, bias, self.gain


class PassingOn(Net):
    block = PassingBlock

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, bias = self.embed(x), None
        for block in self.blocks:
            x, bias, gain = block(x, bias)
            x = x * gain
        return self.out(x)


class Nested(Net):
    """The first block calls the second within its own forward, between two uses of its own weights."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.blocks[2](self.blocks[0](self.embed(x))))

    def __init__(self) -> None:
        super().__init__()
        inner = self.blocks[1]
        self.blocks[0].dropout.register_forward_hook(lambda module, inputs, output: inner(output))


class Head(nn.Module):
    """(ROWS, WIDTH) -> (ROWS, CLASSES): with weights of its own, which it reads before and behind its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(CLASSES))
        self.norm, self.proj = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)
        self.refine: Callable[[torch.Tensor], torch.Tensor] = torch.tanh

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(self.norm(x * self.gain) + self.refine(x)) * self.gain.mean() + self.bias


class Headed(Net):
    """Its late root has modules within one another; the outer one calls a unit too, if asked to."""

    def __init__(self, refines: bool = False) -> None:
        super().__init__()
        self.out = Head()  # type: ignore[assignment]
        if refines:
            block = self.blocks[1]
            self.out.refine = lambda x: block(x)


class FragileHead(Head):
    """A layer of it raises an exception in its second call, which the head answers by another way."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits = super().forward(x)
        handle = self.proj.register_forward_pre_hook(fail)
        with expected(StopError):
            self.proj(x)
        handle.remove()
        return logits + self.bias


class Fragile(Net):
    def __init__(self) -> None:
        super().__init__()
        self.out = FragileHead()  # type: ignore[assignment]


class RecursiveBlock(Block):
    """Calls itself within its forward, between two uses of its own weights."""

    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        inner = self(self.up(x)[:, :WIDTH], depth - 1) if depth else x
        return x + super().forward(inner)


class Recursive(Net):
    block = RecursiveBlock


class GradientPenalty(Net):
    """Returns logits, and the squared gradient of their sum at the input (WGAN-GP, R1)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        logits = super().forward(x)
        (gradient,) = torch.autograd.grad(logits.square().sum(), x, create_graph=True)
        return logits.square().mean() + 0.1 * gradient.square().sum()


class Forces(Net):
    """Returns the gradient of the sum of its logits at the input alone, as models of forces do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(super().forward(x).sum(), x, create_graph=True)
        return gradient


class Tied(Net):
    """Reads the weight of a layer it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Embedding(CLASSES, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + F.linear(F.gelu(F.linear(x, block.up.weight)), block.down.weight)
        return F.linear(x, self.codes.weight)


class Loss(Net):
    """Returns its loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).square().mean()


class Double(Net):
    """Two outputs by name."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = super().forward(x)
        return {"logits": logits, "length": logits.norm(dim=-1)}


def inputs(step: int, rank: int, part: int = 0) -> torch.Tensor:
    """(ROWS, WIDTH), another one for each part of a step."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + 10 * part + rank))


def labels(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, CLASSES, (ROWS,), generator=torch.Generator().manual_seed(100 * step + rank))


# ---- steps: the calls between two optimizer steps


def ordinary(engine: Any, step: int, rank: int) -> None:
    engine.backward(engine(inputs(step, rank)).square().mean())


def loss_from_model(engine: Any, step: int, rank: int) -> None:
    engine.backward(engine(inputs(step, rank)))


def loss_outside(engine: Any, step: int, rank: int) -> None:
    engine.backward(F.cross_entropy(engine(inputs(step, rank)), labels(step, rank), label_smoothing=0.1))


def preference(engine: Any, step: int, rank: int) -> None:
    chosen, rejected = (engine(inputs(step, rank, part)).log_softmax(dim=-1).amax(dim=-1) for part in (0, 1))
    engine.backward(-F.logsigmoid(chosen - rejected).mean())


def checkpointed_calls(engine: Any, step: int, rank: int) -> None:
    """Two forwards that are computed again as a whole, with an ordinary one between them."""
    first, last = (checkpoint(engine, inputs(step, rank, part), use_reentrant=False) for part in (0, 1))
    between = engine(inputs(step, rank, 2))
    engine.backward((first * between * last).square().mean())


def evaluation_in_backward(engine: Any, step: int, rank: int) -> None:
    def evaluate(*_: Any) -> None:
        with torch.no_grad():
            engine(inputs(step, rank, 5))

    handle = engine.module.blocks[1].register_full_backward_hook(evaluate)
    ordinary(engine, step, rank)
    handle.remove()


def two_losses_at_once(engine: Any, step: int, rank: int) -> None:
    outputs = engine(inputs(step, rank))
    engine.backward(F.cross_entropy(outputs["logits"], labels(step, rank)) + 0.1 * outputs["length"].mean())


def two_losses_one_after_the_other(engine: Any, step: int, rank: int) -> None:
    outputs = engine(inputs(step, rank))
    with engine.no_sync():
        engine.backward(F.cross_entropy(outputs["logits"], labels(step, rank)), retain_graph=True)
    engine.backward(outputs["length"].mean(), weight=0.1)


def two_reduced_backwards(engine: Any, step: int, rank: int) -> None:
    loss = engine(inputs(step, rank)).square().mean()
    engine.backward(loss, retain_graph=True)
    engine.backward(loss, weight=0.5)


def late_backwards(engine: Any, step: int, rank: int) -> None:
    """Two forwards, evaluations between, and the backward of the first comes first."""
    losses = []
    for part in (0, 1):
        losses.append(engine(inputs(step, rank, part)).square().mean())
        with torch.no_grad():
            engine(inputs(step, rank, part))
    with engine.no_sync():
        engine.backward(losses[0])
    engine.backward(losses[1])


def parts_alone(engine: Any, step: int, rank: int) -> None:
    """The model is not called, but its parts, in an order of our own."""
    with engine.forward_scope():
        features = engine.module.blocks[1](engine.module.embed(inputs(step, rank)))
        loss = engine.module.out(engine.module.blocks[0](features)).square().mean()
    engine.backward(loss)


# ---- asides: what is done before each step and must leave no trace in it


def forward_only(engine: Any, step: int, rank: int) -> None:
    engine(inputs(step, rank, 5))


def part_evaluated(engine: Any, step: int, rank: int) -> None:
    with torch.no_grad(), engine.forward_scope():
        engine.module.blocks[2](inputs(step, rank, 5))


def generation(engine: Any, step: int, rank: int) -> None:
    """Each rank goes on for its own number of forwards, over its own number of rows."""
    remaining, rows = 3 * rank + step, inputs(step, rank)
    with torch.no_grad():
        while engine.any_rank(remaining > 0):
            logits = engine(rows if remaining > 0 else rows[:1])  # a rank that is done calls on, for the others
            if remaining > 0:
                rows = torch.cat([rows, logits[-1:, :WIDTH]])
            remaining -= 1
    assert len(rows) == ROWS + 3 * rank + step


class StopError(Exception):
    """What the failing parts of these cases raise."""


@contextmanager
def expected(error: type[Exception]) -> Iterator[None]:
    try:
        yield
    except error:
        return
    raise AssertionError("nothing was raised")


def fail(*_: Any) -> None:
    raise StopError


def fails_in_forward(place: str, engine: Any, step: int, rank: int) -> None:
    handle = engine.module.get_submodule(place).register_forward_hook(fail)
    with expected(StopError):
        engine(inputs(step, rank, 5))
    handle.remove()


def fails_in_backward(place: str, accumulate: bool, engine: Any, step: int, rank: int) -> None:
    """In a micro-batch behind one that went well, or in the only one."""
    if accumulate:
        with engine.no_sync():
            ordinary(engine, step + 5, rank)
    handle = engine.module.get_submodule(place).register_full_backward_hook(fail)
    with expected(StopError):
        ordinary(engine, step + 6, rank)
    handle.remove()


def fails_in_train_step(engine: Any, step: int, rank: int) -> None:
    handle = engine.module.blocks[1].register_full_backward_hook(fail)
    with expected(StopError):
        engine.train_step([(inputs(step, rank, 5),)] * 2)
    handle.remove()


def backward_without_engine(engine: Any, step: int, rank: int) -> None:
    """Is refused, and what it computed until then is not added to the next backward."""
    with expected(EngineStateError):
        engine(inputs(step, rank, 5)).square().mean().backward()


@dataclass(frozen=True)
class Call:
    """A model, what is called in a step, and what is done before each step."""

    model: Callable[[], nn.Module] = Net
    step: Callable[[Any, int, int], None] = ordinary
    aside: Callable[[Any, int, int], None] | None = None
    rests: bool = True
    """Whether the aside leaves nothing gathered."""
    reshards: bool = True
    """The setting zero.reshard_after_forward."""


CALLS = {
    "loss outside the model": Call(step=loss_outside),
    "two losses, one backward": Call(Double, two_losses_at_once),
    "two losses, two backwards": Call(Double, two_losses_one_after_the_other),
    "retain_graph, both reduced": Call(step=two_reduced_backwards),
    "retain_graph, unannounced reads": Call(Tied, two_reduced_backwards),
    "a unit twice in one forward": Call(Repeated),
    "a unit within a unit": Call(Nested),
    "a unit within itself": Call(Recursive),
    "modules of the late root within one another": Call(Headed),
    "a unit within the late root": Call(functools.partial(Headed, refines=True)),
    "an exception that the late root answers": Call(Fragile),
    "units that are not called": Call(Skipping),
    "two forwards, one backward": Call(step=preference),
    "two forwards, two backwards": Call(step=late_backwards),
    "two forwards, unannounced reads": Call(Tied, late_backwards),
    "parts of the model alone": Call(step=parts_alone),
    "checkpoint": Call(functools.partial(Checkpointed, use_reentrant=False)),
    "checkpoint, reentrant": Call(functools.partial(Checkpointed, use_reentrant=True)),
    "checkpoint within a unit": Call(functools.partial(CheckpointedInside, use_reentrant=False)),
    "checkpoint within a unit, reentrant": Call(functools.partial(CheckpointedInside, use_reentrant=True)),
    "checkpoint around the engine": Call(step=checkpointed_calls),
    "evaluation in a backward": Call(step=evaluation_in_backward),
    "checkpoint, two forwards": Call(functools.partial(Checkpointed, use_reentrant=False), preference),
    "auxiliary loss": Call(Routed, loss_from_model),
    "auxiliary loss after the output": Call(RoutedLate, loss_from_model),
    "auxiliary losses alone": Call(Greedy, loss_from_model, reshards=False),
    "outputs that cannot be looked into": Call(InShells),
    "outputs handed on": Call(PassingOn),
    "gradient penalty": Call(GradientPenalty, loss_from_model),
    "gradients alone, two forwards": Call(Forces, preference),
    "forward without backward": Call(aside=forward_only, rests=False),
    "a part evaluated": Call(aside=part_evaluated),
    "generation": Call(aside=generation),
    "exception in the head's forward": Call(aside=functools.partial(fails_in_forward, "embed")),
    "exception in a unit's forward": Call(aside=functools.partial(fails_in_forward, "blocks.1.up")),
    "exception in the first backward": Call(aside=functools.partial(fails_in_backward, "out", False)),
    "exception within a unit's backward": Call(aside=functools.partial(fails_in_backward, "blocks.1.up", False)),
    "exception in the last backward": Call(aside=functools.partial(fails_in_backward, "embed", False)),
    "exception while accumulating": Call(aside=functools.partial(fails_in_backward, "blocks.1.up", True)),
    "exception in train_step": Call(Loss, loss_from_model, aside=fails_in_train_step),
    "exception under checkpoint": Call(
        functools.partial(Checkpointed, use_reentrant=True),
        aside=functools.partial(fails_in_backward, "blocks.1.up", False),
    ),
    "loss.backward()": Call(aside=backward_without_engine, rests=False),
}
HARD = (
    "retain_graph, both reduced",
    "a unit twice in one forward",
    "two forwards, one backward",
    "two forwards, unannounced reads",
    "checkpoint, reentrant",
    "auxiliary loss after the output",
    "outputs handed on",
    "gradient penalty",
    "generation",
    "exception within a unit's backward",
    "exception while accumulating",
)
"""Run again with three ranks, with accumulation, with a rank that is late, and with the backend's own reduction."""


class Plain:
    """One rank's calls in a step, in plain PyTorch."""

    def __init__(self, model: nn.Module) -> None:
        self.module = model
        self.reduced: list[list[torch.Tensor]] = []
        """The gradients of each backward that a rank would reduce, with those accumulated before it."""
        self._accumulates = False

    def __call__(self, *args: Any) -> Any:
        return self.module(*args)

    def forward_scope(self) -> Any:
        return nullcontext()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        before, self._accumulates = self._accumulates, True
        yield
        self._accumulates = before

    def backward(self, loss: torch.Tensor, *, weight: float = 1.0, retain_graph: bool = False) -> None:
        loss.backward(gradient=torch.full_like(loss, weight), retain_graph=retain_graph)
        if not self._accumulates:
            parameters = list(self.module.parameters())
            self.reduced.append([torch.zeros_like(p) if p.grad is None else p.grad for p in parameters])
            self.module.zero_grad()


def reference_weights(call: Call, num_ranks: int, num_micro_batches: int = 1) -> dict[str, torch.Tensor]:
    """Name -> weight after the case's steps in one process: a parameter without a gradient gets one of zeros."""
    torch.set_num_threads(1)
    model = call.model()
    parameters = list(model.parameters())
    optimizer = ADAMW(parameters)
    for step in range(NUM_STEPS):
        by_rank = []
        for rank in range(num_ranks):
            torch.manual_seed(10 * step + rank)
            plain = Plain(model)
            micro_batches(call, plain, step, rank, num_micro_batches)
            by_rank.append(plain.reduced)
        means = [[total / num_ranks for total in summed(each)] for each in zip(*by_rank, strict=True)]
        for parameter, gradient in zip(parameters, summed(means), strict=True):
            parameter.grad = gradient
        optimizer.step()
        model.zero_grad()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def summed(gradients: Any) -> list[torch.Tensor]:
    """Lists of gradients, added in order."""
    return [functools.reduce(torch.add, parts) for parts in zip(*gradients, strict=True)]


def micro_batches(call: Call, engine: Any, step: int, rank: int, num_micro_batches: int) -> None:
    """The calls of a step for each of its micro-batches."""
    for index in range(num_micro_batches):
        with nullcontext() if index == num_micro_batches - 1 else engine.no_sync():
            call.step(engine, step * num_micro_batches + index, rank)
