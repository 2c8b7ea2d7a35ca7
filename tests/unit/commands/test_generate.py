"""What continues a prompt: tokens of the model alone, as many as were asked for, within what it can look back on."""

from typing import Any

import pytest
import torch

from zerotrain.errors import ConfigError
from zerotrain.saved.text_model import TextModel, continuation

VOCAB_SIZE = 100


def counting(seen: list[int], **others: Any) -> TextModel:
    """The likeliest token is the next number; of what it was given the length is noted."""

    def logits(ids: torch.Tensor) -> torch.Tensor:
        seen.append(ids.shape[1])
        return torch.nn.functional.one_hot((ids + 1) % VOCAB_SIZE, VOCAB_SIZE).float()

    given: dict[str, Any] = {"max_seq_len": 4, "stop_token": None} | others
    return TextModel(
        logits=logits,
        encode=lambda text: [ord(each) for each in text],
        decode=lambda ids: "".join(map(chr, ids)),
        vocab_size=VOCAB_SIZE,
        device=torch.device("cpu"),
        **given,
    )


def sampling(**others: Any) -> dict[str, Any]:
    return {"max_tokens": 5, "temperature": 0.0, "top_k": 1, "seed": 0} | others


def test_as_many_tokens_come_as_were_asked_for_and_no_more_is_looked_back_on() -> None:
    seen: list[int] = []
    assert "".join(continuation(counting(seen), "AB", **sampling())) == "CDEFG"
    assert seen == [2, 3, 4, 4, 4]
    assert "".join(continuation(counting([]), "AB", **sampling(max_tokens=0))) == ""


def test_a_text_ends_with_the_stop_token_which_is_not_shown() -> None:
    assert "".join(continuation(counting([], stop_token=ord("E")), "AB", **sampling())) == "CD"


def test_a_prompt_is_of_tokens_that_the_model_knows() -> None:
    assert "".join(continuation(counting([]), chr(VOCAB_SIZE - 1), **sampling(max_tokens=1))) == "\0"
    for unknown in (VOCAB_SIZE, VOCAB_SIZE + 1):
        with pytest.raises(ConfigError, match=f"--prompt: has token {unknown}, and the model knows {VOCAB_SIZE}"):
            list(continuation(counting([]), chr(unknown), **sampling()))
    with pytest.raises(ConfigError, match="--prompt: got an empty text"):
        list(continuation(counting([]), "", **sampling()))


def test_a_temperature_near_0_draws_the_likeliest_token() -> None:
    for temperature in (5e-324, 1e-300, 1e-30):
        drawn = sampling(temperature=temperature, top_k=50)
        assert "".join(continuation(counting([]), "AB", **drawn)) == "CDEFG"
