"""Users' datasets and mixes through the Trainer."""

from types import SimpleNamespace

import pytest
import torch

import zerotrain
from tests.unit.training.runs import lines_in
from zerotrain.data import Mix, SyntheticTokens


def named(items):
    """Makes a dict of pairs, its names in another order than the model's arguments."""
    ids, labels = zip(*items, strict=True)
    return {"labels": torch.stack(labels), "ids": torch.stack(ids)}


def test_named_items_train_to_the_bits_of_pairs(make_trainer, dataset, model):
    state = {name: value.clone() for name, value in model.state_dict().items()}
    pairs = make_trainer(dataset=dataset).run()["weights_sha256"]
    model.load_state_dict(state)
    assert make_trainer(dataset=dataset, collate_fn=named).run()["weights_sha256"] == pairs


@pytest.mark.case("losses", "Validation of a mix")
def test_a_mix_is_trained_on_and_each_source_has_its_loss(make_trainer, dataset, tmp_path, screen):
    other = SyntheticTokens(seq_len=16, vocab_size=32, num_sequences=3)
    mix = Mix({"counting": {"data": dataset, "weight": 1}, "few": {"data": other, "weight": 3}})
    body = make_trainer(dataset=mix, max_steps=4, eval_every=2).run()
    assert list(body["val_loss_by_source"]) == ["counting", "few"]
    last = lines_in(tmp_path, "val_loss")[-1]
    assert last["val_loss/few"] == body["val_loss_by_source"]["few"]
    assert last["val_loss"] == body["final_val_loss"]
    # 16 rows, of which 12 are of the 3 of `few`.
    assert "the run reads each row of few 4.0 times" in screen.getvalue()


@pytest.mark.case("losses", "Items without labels", "a micro-batch weighs its rows")
def test_a_model_without_labels_is_trained_by_rows_and_its_data_is_not_spoken_of_as_text(make_trainer, screen):
    class Distance(torch.nn.Linear):
        def forward(self, pixels):
            return super().forward(pixels).square().mean()

    engine = zerotrain.build_engine(Distance(4, 2), optimizer=torch.optim.SGD)
    rows = list(torch.eye(4))
    data = SimpleNamespace(train=rows, validation=rows)
    body = make_trainer(engine=engine, dataset=data, sample_tokens=9).run()
    assert body["status"] == "completed"
    assert body["final_val_loss"] > 0
    assert "an epoch is 1.0 steps" in screen.getvalue()
    assert "No sample of text" not in screen.getvalue()
    assert "more data or fewer" not in screen.getvalue()
