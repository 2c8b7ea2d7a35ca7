"""The sample of text that a run ends with."""

from typing import Any

from rich.console import Console

from zerotrain.data.reading.items import ids_of
from zerotrain.engine.engine import ZeroEngine
from zerotrain.errors import CommError
from zerotrain.files.printable import printable
from zerotrain.training.callback import Callback, Run
from zerotrain.training.callbacks.generate import generate

NUM_PROMPT_TOKENS = 32


class Sample(Callback):
    """Shows a sample when the last step is done."""

    def __init__(self, *, num_tokens: int, seed: int) -> None:
        self._num_tokens, self._seed = num_tokens, seed

    def end(self, run: Run) -> None:
        """See `Callback.end`."""
        if not run.stopped_by:
            show_sample(run.console, run.engine, run.dataset, num_tokens=self._num_tokens, seed=self._seed)


def show_sample(console: Console, engine: ZeroEngine, dataset: Any, *, num_tokens: int, seed: int) -> None:
    """Let the model continue the beginning of the validation text, or of the training text where there is none; unless
    by 0 tokens. Collective."""
    if num_tokens == 0:
        return
    decode = getattr(dataset, "decode", None)
    if decode is None:
        console.print("No sample of text: the dataset has no decode().")
        return
    name, rows = ("validation", dataset.validation) if len(dataset.validation) else ("training", dataset.train)
    ids = ids_of(rows[0])
    if ids is None:
        console.print("No sample of text: the items have no token ids to continue.")
        return
    ids = ids.to(engine.world.device)
    prompt = ids[:NUM_PROMPT_TOKENS]
    try:
        text = decode(generate(engine=engine, prompt=prompt, num_tokens=num_tokens, max_seq_len=len(ids), seed=seed))
    except CommError:
        raise
    except Exception as error:  # of the user's model or dataset: the training is done, and its report is due
        why = printable(f"{type(error).__name__}: {error}", keep="")
        console.print(f"No sample of text: {why}", markup=False, highlight=False)
        return
    console.rule(f"{num_tokens} tokens after {len(prompt)} of the {name} text")
    console.print(text, markup=False, highlight=False)
    console.rule()
