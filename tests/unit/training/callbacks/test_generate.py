from functools import partial

import pytest
import torch

import zerotrain
from zerotrain.training.callbacks.sample import generate


@pytest.fixture
def engine(model, world):
    return zerotrain.build_engine(model, optimizer=partial(torch.optim.AdamW, lr=1e-2), world=world)


def generate_ids(engine, **changes):
    arguments = {"prompt": torch.tensor([1, 2, 3]), "num_tokens": 30, "max_seq_len": 16, "seed": 0}
    return generate(engine=engine, **arguments | changes)


def test_the_prompt_is_continued_by_so_many_tokens_even_beyond_the_longest_sequence(engine):
    ids = generate_ids(engine)
    assert ids.shape == (33,)
    assert ids[:3].tolist() == [1, 2, 3]
    assert ids.min() >= 0
    assert ids.max() < 32


def test_the_same_seed_gives_the_same_tokens_whatever_the_global_generator_says(engine):
    torch.manual_seed(1)
    first = generate_ids(engine)
    torch.manual_seed(2)
    assert torch.equal(generate_ids(engine), first)
    assert not torch.equal(generate_ids(engine, seed=1), first)


def test_one_of_one_likeliest_tokens_is_the_likeliest(engine):
    ids = generate_ids(engine, num_tokens=5, top_k=1)
    for position in range(3, 8):
        with torch.no_grad():
            assert ids[position] == engine.module(ids[None, :position])[0, -1].argmax()


def test_a_model_that_has_learned_to_count_goes_on_counting(engine):
    ids = torch.arange(17).repeat(4, 1)
    for _ in range(40):
        engine.train_step([(ids[:, :-1], ids[:, 1:])])
    assert generate_ids(engine, prompt=torch.tensor([0, 1, 2]), num_tokens=10).tolist() == list(range(13))


def test_generating_leaves_the_engine_able_to_train(engine):
    generate_ids(engine, num_tokens=2)
    assert engine.module.training
    ids = torch.zeros(1, 16, dtype=torch.int64)
    assert not engine.train_step([(ids, ids)]).skipped


def test_a_stop_token_ends_the_text_and_is_part_of_it(engine):
    whole = generate_ids(engine)
    stop_token = whole[8].item()
    first = whole[3:].tolist().index(stop_token) + 3
    assert torch.equal(generate_ids(engine, stop_token=stop_token), whole[: first + 1])
