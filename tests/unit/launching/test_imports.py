import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys
from zerotrain.launching.imports import importing
with importing():
    import torch
weights, hooked = {}, []
for name, make in vars(torch.optim).items():
    if not isinstance(make, type) or name in ("Optimizer", "LBFGS", "SparseAdam"):
        continue
    weight = torch.nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))
    optimizer = make([weight], lr=0.1)
    optimizer.register_step_post_hook(lambda *_: hooked.append(torch.is_grad_enabled()))
    for step in range(3):
        weight.grad = torch.full_like(weight, 0.5 + step)
        if step == 1:
            optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()
        optimizer.zero_grad()
    weights[name] = weight.tolist()
"""
TOLD = """
import json
print(json.dumps([weights, hooked, "torch._dynamo" in sys.modules]))
"""


def told(program: str) -> list[Any]:
    done = subprocess.run([sys.executable, "-c", program + TOLD], capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


@pytest.mark.slow
def test_no_optimizer_of_torch_imports_its_compiler_and_each_does_what_it_did() -> None:
    weights, hooked, compiler = told(PROGRAM)
    plain, plain_hooked, plain_compiler = told(
        PROGRAM.replace("from zerotrain.launching.imports import", "from contextlib import nullcontext as")
    )
    assert (compiler, plain_compiler) == (False, True)
    assert weights == plain
    assert len(plain) > 10
    assert hooked == plain_hooked


COMPUTED_AGAIN = """
import os, sys
os.environ["MASTER_ADDR"] = "127.0.0.1"
from zerotrain.launching.imports import importing
with importing():
    import torch
    import zerotrain
from torch.utils.checkpoint import checkpoint
with importing():  # as each job of a sweep does
    pass
assert torch.utils.checkpoint.checkpoint is checkpoint

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.drop, self.second = torch.nn.Linear(16, 16), torch.nn.Dropout(0.3), torch.nn.Linear(16, 16)
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        x = self.drop(self.first(x)).tanh()
        return x + checkpoint(self.second, x, use_reentrant=False)

weights, hooked = [], []
torch.manual_seed(0)
model = torch.nn.Sequential(*(Block() for _ in range(3)))
engine = zerotrain.build_engine(
    model, optimizer=lambda groups: torch.optim.AdamW(groups, lr=0.01), activation_checkpointing=True,
    zero=zerotrain.ZeroConfig(stage=3, bucket_mb=0.001),
)
for step in range(4):
    if step == 3:
        hooked.append([block.calls for block in model])
        engine.module.compile(backend="eager")
    inputs = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
    engine.backward(engine(inputs).square().mean())
    engine.step()
    weights.append(engine.weights_sha256())
    hooked.append("torch._dynamo" in sys.modules)
"""


@pytest.mark.slow
def test_units_are_computed_again_without_torch_s_compiler_until_something_imports_it() -> None:
    """Each rank took 2 s and 71 MB for it, which no plan counted."""
    weights, hooked, _ = told(COMPUTED_AGAIN)
    plain, plain_hooked, _ = told(
        COMPUTED_AGAIN.replace("from zerotrain.launching.imports import", "from contextlib import nullcontext as")
    )
    assert hooked == [False, False, False, [6, 6, 6], True]
    assert plain_hooked == [True, True, True, [6, 6, 6], True]
    assert weights == plain


STEPS = """
import os, sys
os.environ["MASTER_ADDR"] = "127.0.0.1"
from zerotrain.launching.imports import importing
with importing():
    import torch
    import zerotrain
before = set(sys.modules)
for stage in range(4):
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    optimizer = lambda groups: torch.optim.AdamW(groups, lr=0.01)
    engine = zerotrain.build_engine(model, optimizer=optimizer, zero=zerotrain.ZeroConfig(stage=stage))
    with engine.no_sync():
        engine.backward(engine(torch.ones(4, 16)).mean(), weight=0.5)
    engine.backward(engine(torch.ones(4, 16)).mean(), weight=0.5)
    engine.step()
weights, hooked = {}, sorted(name for name in set(sys.modules) - before if name.partition(".")[0] == "sympy")
"""


def test_no_step_imports_what_symbolic_shapes_need() -> None:
    """0.4 s of CPU and 40 MB of every rank, for `backward(gradient=...)` and for strides on the meta device."""
    assert told(STEPS)[1] == []


def test_a_python_without_what_zerotrain_needs_says_so_in_a_line() -> None:
    ending = subprocess.run([sys.executable, "-S", REPOSITORY / "launch.py"], capture_output=True, text=True)
    assert ending.returncode == 2
    [line] = ending.stderr.splitlines()
    assert line.startswith(f"{sys.executable} has no package hydra; in a clone, `make install` makes one that has it")


@pytest.mark.parametrize(
    ("command", "lack"),
    [
        (["launch.py"], "No module named 'torch."),
        (["-m", "zerotrain", "inspect", "a"], "module 'torch' has no attribute"),
    ],
    ids=["a module", "an attribute"],
)
def test_a_torch_that_lacks_a_part_is_named_in_a_line(command: list[str], lack: str, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("__version__ = '2.1.0'\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    ending = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, cwd=REPOSITORY)
    assert (ending.returncode, ending.stdout) == (2, "")
    [line] = ending.stderr.splitlines()
    assert line.startswith(f"torch 2.1.0 of {sys.executable} is not one of 2.11 to 2.15, or is damaged: {lack}")


def test_a_python_that_is_too_old_is_named_in_a_line() -> None:
    program = "import sys; sys.version_info = (3, 10, 9); import zerotrain"
    ending = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ending.returncode, ending.stdout) == (2, "")
    assert ending.stderr.startswith(f"zerotrain needs Python 3.11 or newer; {sys.executable} is ")


def test_what_the_imports_froze_is_collected_at_the_end_where_triton_is_loaded(tmp_path: Path) -> None:
    circle = "kernel = Kernel()\nkernel.itself = kernel\ndel kernel\n"
    (tmp_path / "triton.py").write_text(f"class Kernel:\n    def __del__(self): print('collected')\n\n{circle}")
    program = "from zerotrain.launching.imports import importing\nwith importing(): import triton"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(REPOSITORY)])}
    ending = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=environment, check=True
    )
    assert ending.stdout == "collected\n"
