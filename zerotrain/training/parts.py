"""The callbacks of a run in their order: those of the house, and the user's own among them."""

from rich.console import Console

from zerotrain.training.callback import Callback, CallbackList
from zerotrain.training.callbacks.checkpoints import RunCheckpoints
from zerotrain.training.callbacks.control import CONTROL_NAME, Control
from zerotrain.training.callbacks.evaluation import RunEvaluation, num_eval_rows
from zerotrain.training.callbacks.profile import Recording
from zerotrain.training.callbacks.progress import ShowProgress
from zerotrain.training.callbacks.sample import Sample
from zerotrain.training.callbacks.stages import RunFreezing, RunStages
from zerotrain.training.feed import TrainingFeed
from zerotrain.training.figures.metrics import StepClock
from zerotrain.training.figures.result import RunResult
from zerotrain.training.loggers.record import StepRecord
from zerotrain.training.loggers.sinks import Sinks
from zerotrain.training.measuring import Measuring
from zerotrain.training.metrics.metric import OF_VALIDATION, metrics_in
from zerotrain.training.metrics.steps import TrainingMetrics
from zerotrain.training.settings import TrainerSettings
from zerotrain.training.start import ShowStart


def callbacks_of(
    given: TrainerSettings,
    console: Console,
    feed: TrainingFeed,
    result: RunResult,
    clock: StepClock,
    checkpoints: RunCheckpoints,
    metrics: TrainingMetrics,
) -> CallbackList:
    """All callbacks of a run. After a step they are called from first to last, at the end from last to first:

    - the user's own come before the save, which has their state, and see a step logged and at its stage;
    - an evaluation comes before the save of the same step, which it may ask for;
    - the last step is saved before anything else ends; what the user's log at the end still finds the file open.
    """
    engine, world = given.engine, given.world
    stages = RunStages(engine, world, result, console, given.stages, given.gradient_accumulation_steps)
    before: list[Callback] = [
        StepRecord(feed.sampler),
        Sinks(given.sinks),
        metrics,
        Measuring(
            engine,
            world,
            feed,
            result,
            clock,
            stages,
            metrics,
            model_flops=given.model_flops,
            log_every=given.log_every,
        ),
        Sample(num_tokens=given.sample_tokens, prompts=given.sample_prompts, seed=given.seed),
        stages,
        RunFreezing(engine, console, given.frozen),
        ShowStart(stages, feed.sampler, given.validation_sets, num_eval_rows(given.eval_batches)),
        ShowProgress(),
        Recording(trace=given.profile, memory=given.memory_snapshot),
    ]
    after: list[Callback] = [
        RunEvaluation(
            console,
            num_batches=given.eval_batches,
            every=given.eval_every,
            evaluated_at=given.first_step or None,
            engine=engine,
            world=world,
            dataset=given.dataset.validation,
            validation_sets=given.validation_sets,
            micro_batch_size=given.micro_batch_size,
            seed=given.seed,
            collate=given.collate_fn,
            loss_over=given.loss_over,
            metrics=metrics_in(given.callbacks, OF_VALIDATION),
        ),
        *([] if given.pruning is None else [given.pruning]),
        checkpoints.best,
        checkpoints,
        Control(given.run_dir / CONTROL_NAME, world, console),
    ]
    return CallbackList(before, given.callbacks, after, world=world, console=console)
