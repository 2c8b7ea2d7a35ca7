"""Pre-train a small GPT in a loop of one's own: data, model, engine, steps, evaluation, checkpoints, a sample of text.

    torchrun --nproc-per-node 2 examples/pretrain.py --text "src/**/*.py" --stage 3

The same command goes on from the newest checkpoint, on 1, 2 or 4 ranks and at any stage: the weights are the same bits.
"""

import argparse
import functools
import math

import torch

import zerotrain
from zerotrain.data import GlobalBatchSampler, TextDataset
from zerotrain.models import GPT

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("--text", help="a file, a folder or a pattern; by default the standard library of this Python")
parser.add_argument("--tokenizer", help="a folder of `zerotrain tokenizer`; by default bytes")
parser.add_argument("--out", default="pretrained", help="the folder for checkpoints and weights")
parser.add_argument("--stage", type=int, default=2, choices=(0, 1, 2, 3))
parser.add_argument("--steps", type=int, default=400)
parser.add_argument("--seq-len", type=int, default=128)
parser.add_argument("--hidden-size", type=int, default=128)
parser.add_argument("--layers", type=int, default=4)
parser.add_argument("--batch", type=int, default=4, help="rows of a forward; a step has 4 x 2 of them")
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--precision", default="fp32", choices=("fp32", "bf16"))
parser.add_argument("--every", type=int, default=100, help="steps between evaluations, and between checkpoints")
args = parser.parse_args()

VIRTUAL_RANKS, ACCUMULATION, WARMUP, SEED = 4, 2, 20, 0


def rate_of(step: int) -> float:
    """The learning rate: it rises in a line, and falls in half a cosine to a tenth."""
    progress = max(0.0, (step - WARMUP) / max(1, args.steps - WARMUP))
    return args.lr * min((step + 1) / WARMUP, 0.55 + 0.45 * math.cos(math.pi * progress))


def read_batch(dataset: torch.utils.data.Dataset, rows: list[int], device: torch.device) -> tuple[torch.Tensor, ...]:
    """(ids, labels), each (rows, seq_len) int64."""
    return tuple(part.to(device) for part in torch.utils.data.default_collate([dataset[row] for row in rows]))


@torch.no_grad()
def evaluate(engine: zerotrain.ZeroEngine, data: TextDataset, world: zerotrain.World) -> float:
    """The mean loss over the first rows of the validation set, shared by all ranks."""
    engine.eval()
    rows = range(min(len(data.validation), 64) // world.size * world.size)
    losses = []
    for start in range(0, len(rows), args.batch * world.size):  # each rank calls the model as often as the others
        mine = rows[start : start + args.batch * world.size][world.rank :: world.size]
        losses.append(engine(*read_batch(data.validation, list(mine), world.device)).double() * len(mine))
    engine.train()
    return world.sum(torch.stack(losses).sum()).item() / len(rows)


@torch.no_grad()
def sample(engine: zerotrain.ZeroEngine, data: TextDataset, num_tokens: int, device: torch.device) -> str:
    """A text that the model goes on with. All ranks compute it: at stage 3 each holds a part of the weights."""
    engine.eval()
    generator = torch.Generator().manual_seed(SEED)
    ids = torch.as_tensor(data.encode("import "), dtype=torch.int64, device=device)
    for _ in range(num_tokens):
        logits = engine(ids[None, -args.seq_len :])[0, -1].float().cpu()
        top = (logits / 0.8).topk(20)
        choice = top.indices[torch.multinomial(top.values.softmax(0), 1, generator=generator)]
        ids = torch.cat([ids, choice.to(device)])
    engine.train()
    return data.decode(ids.tolist())


with zerotrain.World.from_environment() as world:  # torchrun's ranks; without torchrun one process
    data = TextDataset(
        args.text, seq_len=args.seq_len, tokenizer=args.tokenizer, vocab_size=None if args.tokenizer else 256
    )
    torch.manual_seed(SEED)
    model = GPT(
        vocab_size=data.vocab_size,
        max_seq_len=args.seq_len,
        num_layers=args.layers,
        num_heads=4,
        hidden_size=args.hidden_size,
    )
    engine = zerotrain.build_engine(
        model,
        optimizer=functools.partial(torch.optim.AdamW, lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True),
        zero=zerotrain.ZeroConfig(stage=args.stage),
        precision=args.precision,
        max_grad_norm=1.0,
        virtual_ranks=VIRTUAL_RANKS,
        decay_all=False,  # matrices alone
        world=world,
    )
    saved = zerotrain.checkpoint.checkpoints_in(args.out)
    start = engine.load(saved[-1])["step"] if saved else 0
    sampler = GlobalBatchSampler(
        num_sequences=len(data.train),
        micro_batch_size=args.batch,
        num_micro_batches=ACCUMULATION,
        rank=world.rank,
        num_ranks=world.size,
        leaves_per_rank=VIRTUAL_RANKS // world.size,
        seed=SEED,
    )
    saving = None
    for step in range(start, args.steps):
        for group in engine.optimizer.param_groups:
            group["lr"] = rate_of(step)
        rows_of_step = sampler.micro_batches(step * sampler.global_batch_size)
        result = engine.train_step([read_batch(data.train, batch.rows, world.device) for batch in rows_of_step])
        done = step + 1
        if world.rank == 0 and (done % 20 == 0 or done == args.steps):
            print(f"step {done}: loss {result.loss.item():.4f}, gradient norm {result.grad_norm:.3f}", flush=True)
        if done % args.every == 0 or done == args.steps:
            saving = engine.begin_save(f"{args.out}/step-{done:08d}", extra={"step": done})  # beside the training
            loss = evaluate(engine, data, world)
            if world.rank == 0:
                print(f"step {done}: validation loss {loss:.4f}", flush=True)
    if saving is not None:
        saving.wait()
    text = sample(engine, data, 200, world.device)
    weights, sha256 = engine.full_state_dict(), engine.weights_sha256()
    if world.rank == 0:
        torch.save(weights, f"{args.out}/weights.pt")
        print(f"{text}\nweights: {args.out}/weights.pt, sha256 {sha256[:16]}", flush=True)
