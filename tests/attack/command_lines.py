"""Attacks on the command line, by what is wrong. Each is one mistake that a person or a script may make."""

from pathlib import Path

from attacks import Attack

YAML = 'mkdir -p mine/experiment; printf "%b" "{text}" > mine/experiment/bad.yaml'
TOP = "# @package _global_\\n"


def of_yaml(text: str, says: str, *more: str) -> Attack:
    """An attack by an experiment's yaml."""
    command = ["--config-dir=mine", "experiment=bad", *more]
    return Attack(command, says, before=YAML.replace("{text}", text.replace('"', '\\"').replace("$", "\\$")))


NAMES = [
    Attack("zero.stge=3", "zero.stge: there is no such setting; did you mean zero.stage?"),
    Attack("zero.stage.x=3", "zero.stage.x"),
    Attack("precision=bf17", "precision=bf17: there is no such choice; did you mean bf16?; there are bf16, fp16, fp32"),
    Attack("model=", "model=: there is no such choice; there are gpt2, "),
    Attack("model=../../etc", "model=../../etc: there is no such choice"),
    Attack("+foo=1", "+foo: there is no such setting"),
    Attack("+model@foo=mlp", "+model@foo=mlp: "),
    Attack("hydra.foo=1", "hydra.foo: there is no such setting"),
    Attack("hydra.mode=foo", "hydra.mode=foo: "),
    Attack("+model.depth=3", "model.depth: zerotrain.models.GPT takes no such argument"),
    Attack("+optimizer.beta=3", "optimizer.beta: torch.optim.AdamW takes no such argument; did you mean betas?"),
    Attack("zero=[3]", "zero=[3]: "),
    Attack(
        "+trainer.max_epochs=1 +trainer.x.y=2 +zero.foo.bar=1 ++other.x=1",
        ("+trainer.max_epochs: there", "+trainer.x.y: there", "+zero.foo.bar: there", "+other.x: there is no such"),
    ),
    Attack("+hydra.callbacks.x._target_=os.system", "Target 'os.system' is blocklisted because it allows config data "),
    Attack("+hydra.callbacks.x._target_=nope.x", "Error locating target 'nope.x'"),
    Attack("~hydra.launcher", "~hydra.launcher: "),
    Attack("hydra.searchpath=[nope://x]", "hydra.searchpath=[nope://x]: No config source registered for schema nope"),
    Attack("zero.stage=3 zero.stge=1 precision=x", ("precision=x: there", "zero.stge: there")),
]

FORMS = [
    Attack(["zero.stage=["], "zero.stage=[: cannot be read"),
    Attack(
        ["data.path=a (b)"],
        "data.path=a (b): cannot be read; write key=value, such as zero.stage=3; special characters",
    ),
    Attack(["data.path=é"], "data.path=é: cannot be read"),
    Attack(["data.path='é'"], "data.path=é does not exist"),
    Attack(["data.path='a\nb'"], "data.path=a\\nb does not exist"),
    Attack(["data.path='\x1b[31m'"], "data.path=\\x1b[31m matches no file"),
    Attack(["data.path='a\udcffb'"], "data.path="),
    Attack(["seed='a\nb'"], "seed: got 'a\\nb'; it must be between 0"),
    Attack(["zero.reduction='x\x07'"], "zero.reduction: got x\\x07; it must be auto, ordered, native or fp32"),
    Attack(["zero.reduction='" + "x" * 100_000 + "'"], "zero.reduction: got xxx"),
    Attack(["zero.stage=3", "zero.stage=4"], "zero.stage: got 4; it must be"),
    Attack(["zero.stage=int(x)"], "zero.stage=int(x): cannot be read"),
    Attack(["hydra.run.dir="], "hydra.run.dir: got nothing, as of a variable that is not set; name a folder"),
    Attack(["-m", "hydra.sweep.dir=", "seed=1,2"], "hydra.sweep.dir: got nothing, as of a variable that is not set"),
    Attack(["loss=own"], "loss._target_: has no value and needs one; give loss._target_=..."),
    Attack(["~model"], "model._target_: got null; it must be the import path of a class or function"),
    Attack(["~optimizer"], ("optimizer._target_: got null; it must", "optimizer._partial_: got null; it must be true")),
    Attack(
        ["~data"],
        ("model.vocab_size: got ${data.vocab_size}; Interpolation key", "model.max_seq_len: got ${data.seq"),
    ),
    Attack(["--config-dir"], ("usage: launch.py", *[" "] * 6, "launch.py: error: argument --config-dir")),
    Attack(["--cfg", "job", "--resolve", "seed=${nowhere}"], "seed: got ${nowhere}; Interpolation key 'nowhere' not"),
    Attack(["--experimental-rerun", "nowhere"], ("/", "  warnings", "File nowhere does not exist!")),
    Attack(["--package", "nope", "--cfg", "job"], "package 'nope' not found in config", code=1),
]

INTERPOLATIONS = [
    Attack(["data=own"], "data._target_: has no value and needs one; give data._target_=..."),
    Attack(["seed=${nowhere}"], "seed: got ${nowhere}; Interpolation key 'nowhere' not found; give seed=..."),
    Attack(["seed=${oc.env:SET}"], "seed: got ${oc.env:SET}; ", environment={"SET": "text"}),
    Attack(["seed=${data.path}"], "seed: got ${data.path}; "),
    Attack(["zero.units=${zero}"], "zero.units: got ${zero}; Interpolation to parent node detected; give zero.units"),
    Attack(["optimizer=${nope}"], "optimizer=${nope}: "),
    Attack(["hydra.run.dir=${nowhere}"], "hydra.run.dir: Interpolation key 'nowhere' not found"),
    Attack(["hydra.run.dir='a${b'"], "hydra.run.dir"),
    Attack(["-m", "seed=0,1", "hydra.sweep.dir=${nowhere}"], "hydra.sweep.dir: Interpolation key 'nowhere' not found"),
    Attack(
        ["-m", "seed=0,1", "hydra.sweep.subdir=${nowhere}"],
        "hydra.sweep.subdir: Interpolation key 'nowhere' not found",
        left=("multirun.yaml",),
    ),
]

FOLDERS = [
    Attack("--config-dir nowhere", "Additional config directory '/"),
    Attack("--config-path nowhere", "Primary config directory not found. Check that the config directory '/"),
    Attack("--config-path /tmp zero.stage=9", "Cannot find primary config 'train'. Check that it's in your config"),
    Attack(
        ["--config-path", str(Path(__file__).with_name("conf_of_its_own")), "data=synthetic"],
        "In 'train': Could not find 'model/none'",
    ),
    Attack("--config-name ../train", "Cannot find primary config '../train'. Check that it's in your config"),
    Attack("hydra.run.dir=file/x", "hydra.run.dir: file/x cannot be made: Not a directory", before="touch file"),
    Attack("hydra.run.dir=r", "hydra.run.dir: r cannot be made: File exists", before="ln -s nowhere r"),
    Attack("hydra.run.dir=r", "hydra.run.dir: got ", before="mkdir -p r/.lock"),
    Attack(["hydra.run.dir=" + "x" * 300], "hydra.run.dir: xxx"),
    Attack("-m seed=0,1 hydra.sweep.dir=file/x", "hydra.sweep.dir: file/x cannot be made", before="touch file"),
    Attack("data.path=nowhere", "data.path=nowhere does not exist; give a file, a folder or a glob pattern"),
    Attack("data.path=short", "data.path=short holds 2 tokens; ", before="printf hi > short"),
    Attack("data.cache_dir=file", "data", before="touch file"),
]

VALUES = [
    Attack("data=synthetic model.max_seq_len=8", "data.seq_len=128, but GPT knows 8 positions"),
    Attack("launch.timeout_s=1e300", "launch.timeout_s: got 1e+300; it must be between 0.001 and 31536000 seconds"),
    Attack("launch.nproc_per_node=100000", "launch.nproc_per_node: got 100000; it must be between 1 and 1024 ranks"),
    Attack("launch.device=cuda data=synthetic", "launch.device=cuda, but torch sees no GPU here"),
    Attack("data=synthetic model=mlp model.hidden_size=1000000", "model: needs more memory than there is: weights, "),
    Attack("data=synthetic model.dropout=2", "model.dropout=2 is out of range"),
    Attack("data=synthetic data.num_sequences=0", "data.num_sequences=0 is too small"),
    Attack("data=synthetic optimizer.lr=-1", "optimizer.lr: got -1; Invalid learning rate: -1"),
    Attack(
        "data=synthetic scheduler.warmup_steps=abc", "scheduler.warmup_steps: got abc; zerotrain.training.warmup_cosine"
    ),
    Attack("data=synthetic zero.stage=9 train.max_steps=0", ("train.max_steps: got 0", "zero.stage: got 9")),
]

CLASSES = [
    Attack("model._target_=nowhere.Model", "model._target_: got nowhere.Model; there is no module nowhere"),
    Attack(
        "model._target_=mine.Model",
        "model._target_: got mine.Model; importing mine failed: SyntaxError",
        before="echo 'class (' > mine.py",
    ),
    Attack(
        "model._target_=mine.Model",
        "model._target_: got mine.Model; importing mine failed: SystemExit",
        before="echo 'import sys; sys.exit(0)' > mine.py",
    ),
]

YAMLS = [
    of_yaml(
        TOP + "train:\\n  max_stps: 3\\n",
        "mine/experiment/bad.yaml, line 3: train.max_stps: there is no such setting; did",
    ),
    of_yaml(
        TOP + "train:\\n  max_steps: -3\\n",
        "train.max_steps: got -3; it must be 1 or more steps, or null with num_epochs or max_tokens; the default "
        "is 400 (mine",
    ),
    of_yaml(TOP + "train: [\\n", "experiment=bad: while parsing a flow node expected the node content"),
    of_yaml("\\xff\\xfe", "experiment=bad: 'utf-8' codec can't decode byte 0xff"),
    of_yaml(TOP + "defaults: 3\\n", "experiment=bad: "),
    of_yaml(TOP + "train: 3\\n", "mine/experiment/bad.yaml: Merge error: int is not"),
]

OF_A_SWEEP = ("multirun.yaml", "sweep.jsonl", "report.html", "sweep.csv", "sweep.json")
SWEEPS = [
    Attack(
        "-m optimizer.lr=interval(1e-4,1e-2)",
        "optimizer.lr=interval(1e-4,1e-2): only hydra/sweeper=optuna chooses from an interval; add it, or list values, "
        "such as optimizer.lr=0.0001,0.01",
    ),
    Attack("-m seed=1,abc", "seed: got abc; it must be between 0 and 2**63 - 1", left=("multirun.yaml",)),
    Attack("-m seed=0,1 hydra.launcher._target_=os.system", "the command line cannot be run: RuntimeError: Invalid"),
    Attack("-m seed=0,1 +hydra.sweeper.foo=1", "Error in call to target 'hydra._internal.core_plugins.basic_sweeper."),
    Attack("-m zero.stage=range(1,2,0)", "zero.stage=range(1,2,0): range() arg 3 must not be zero"),
    Attack("-m seed=0,1 hydra/sweeper/sampler=foo", "hydra/sweeper/sampler=foo: needs hydra/sweeper=optuna too"),
    Attack(
        "-m hydra/sweeper=optuna seed=1,2 hydra/sweeper/sampler=foo", "hydra/sweeper/sampler=foo: there is no such "
    ),
    Attack("-m seed=0,1 hydra/launcher=ray hydra.launcher.n_jobs=2", "hydra/launcher=ray: is not installed; "),
    Attack("-m hydra.sweep.dir=1,2", "Sweeping over Hydra's configuration is not supported"),
    Attack("-m zero.stage=range(0,0)", "-m: there is no job to run", left=("multirun.yaml",)),
    Attack(
        "-m data=synthetic zero.stage=8,9",
        ("job 0: zero.stage: got 8; it must", "job 1: zero.stage: got 9; it must"),
        code=1,
        left=OF_A_SWEEP,
    ),
    Attack(
        "-m data=synthetic zero.stage=9 seed=0,1 hydra.sweep.subdir=same",
        ("job 0: zero.stage: got 9", "job 1: hydra.sweep.subdir: got same, which job 0 uses too"),
        code=1,
        left=OF_A_SWEEP,
    ),
]

DISK = "offload.optimizer=disk offload.path="
OFFLOADING = [
    Attack("offload.optimizer=nvme", "offload.optimizer: got nvme; it must be device, cpu or disk, or auto; the "),
    Attack("offload=cpu", "offload=cpu: offload is a group of settings: "),
    Attack("offload.keep=1.5 offload.optimizer=cpu", "offload.keep: got 1.5; it must be between 0 and 1 of the opt"),
    Attack(
        "offload.update=host offload.optimizer=cpu optimizer=muon",
        "offload.update: got host; tensors that the optimizer updates whole are exchanged and updated on the device",
    ),
    Attack(f"{DISK}''", "offload.path: got ''; it must be the path of a folder"),
    Attack(f"{DISK}/proc/x", "offload.path: no file can be made in /proc ("),
    Attack(f"{DISK}. optimizer.lr=-1", "optimizer.lr: got -1"),
    Attack(f"{DISK}. model=mlp model.hidden_size=300000 zero.stage=3", "offload.path: /"),
]

GROUPS = {
    "offloading": OFFLOADING,
    "names": NAMES,
    "forms": FORMS,
    "interpolations": INTERPOLATIONS,
    "folders": FOLDERS,
    "values": VALUES,
    "classes": CLASSES,
    "yamls": YAMLS,
    "sweeps": SWEEPS,
}
