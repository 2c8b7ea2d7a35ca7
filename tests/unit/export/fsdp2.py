"""A training of plain torch with FSDP2, which begins with an exported folder. It knows nothing of zerotrain."""

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def make_model() -> nn.Module:
    model = nn.Sequential(nn.Embedding(37, 24), nn.Linear(24, 48), nn.Tanh(), nn.Linear(48, 37, bias=False))
    model[3].weight = nn.Parameter(torch.randn(37, 48) * 0.1)
    return model


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    tokens = torch.randint(37, (9,), generator=torch.Generator().manual_seed(step))
    return nn.functional.cross_entropy(model(tokens), tokens)


def train_on(folder: str, steps: list[int]) -> list[float]:
    torch.manual_seed(77)
    model = make_model()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model_state, optimizer_state = get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optimizer_state}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    losses = []
    for step in steps:
        loss = loss_of(model, step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
