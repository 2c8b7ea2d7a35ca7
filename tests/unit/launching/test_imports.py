import json
import subprocess
import sys

PROGRAM = """
import sys
from zerotrain.launching.imports import importing
with importing():
    import torch
torch.manual_seed(0)
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


def told(program: str) -> list[object]:
    done = subprocess.run([sys.executable, "-c", program + TOLD], capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


def test_no_optimizer_of_torch_imports_its_compiler_and_each_does_what_it_did() -> None:
    weights, hooked, compiler = told(PROGRAM)
    plain, plain_hooked, plain_compiler = told(
        PROGRAM.replace("from zerotrain.launching.imports import", "from contextlib import nullcontext as")
    )
    assert (compiler, plain_compiler) == (False, True)
    assert weights == plain
    assert len(plain) > 10
    assert hooked == plain_hooked
