"""Clipping beside plain PyTorch: as docs/reference/bits.md says to compare it."""

import pytest
import torch

from tests.unit.engine.parts import Linears, alone, engine_on, inputs, seeded

MAX_NORM = 0.05


def clipped_as_in_the_docs(gradients: list[torch.Tensor]) -> None:
    norm = torch.cat([gradient.double().flatten() for gradient in gradients]).norm()
    coefficient = torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0).float()
    for gradient in gradients:
        gradient *= coefficient


def plain(clip_by_torch: bool) -> dict[str, torch.Tensor]:
    model = seeded(Linears)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(5):
        optimizer.zero_grad()
        model(10 * inputs(step, 0)).backward()
        if clip_by_torch:
            torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
        else:
            clipped_as_in_the_docs([each.grad for each in model.parameters() if each.grad is not None])
        optimizer.step()
    return {name: each.detach() for name, each in model.named_parameters()}


@pytest.mark.parametrize("stage", range(4))
def test_a_loop_that_clips_as_the_docs_say_has_the_engines_bits(stage: int) -> None:
    engine = engine_on(alone(), zero={"stage": stage}, max_grad_norm=MAX_NORM)
    for step in range(5):
        result = engine.train_step([(10 * inputs(step, 0),)])
        assert result.clip_coefficient < 1
    exact, by_torch = plain(clip_by_torch=False), plain(clip_by_torch=True)
    for name, value in engine.full_state_dict().items():
        assert torch.equal(value, exact[name]), name
        torch.testing.assert_close(value, by_torch[name], rtol=1e-5, atol=1e-6)
