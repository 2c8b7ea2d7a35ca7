"""Attacks on the command line, by what is wrong. Each is one mistake that a person or a script may make."""

from pathlib import Path

from attacks import Attack

LAUNCHERS = "hydra._internal.core_plugins.basic_launcher"
YAML = 'mkdir -p mine/experiment; printf "%b" "{text}" > mine/experiment/bad.yaml'
TOP = "# @package _global_\\n"


def of_yaml(text: str, says: str, *more: str) -> Attack:
    """An attack by an experiment's yaml."""
    command = ["--config-dir=mine", "experiment=bad", *more]
    return Attack(command, says, before=YAML.replace("{text}", text.replace('"', '\\"').replace("$", "\\$")))


NAMES = [
    Attack("zero.stge=3", "zero.stge: there is no such setting; did you mean zero.stage?"),
    Attack("Zero.stage=3", "Zero.stage: there is no such setting; did you mean zero.stage?"),
    Attack("zero.stage.x=3", "zero.stage.x"),
    Attack("precison=bf16", "precison: there is no such setting; did you mean precision?"),
    Attack("precision=bf17", "precision=bf17: there is no such choice; did you mean bf16?; there are bf16, fp16, fp32"),
    Attack("model=gpt3", "model=gpt3: there is no such choice; did you mean gpt2?"),
    Attack("model=", "model=: there is no such choice; there are gpt2, "),
    Attack("model=../../etc", "model=../../etc: there is no such choice"),
    Attack("experiment=nope", "experiment=nope: there is no such choice"),
    Attack("scheduler=step", "scheduler=step: there is no such choice; there are constant, cosine, inverse_sqrt"),
    Attack("+foo=1", "+foo: there is no such setting"),
    Attack("++zero.foo=1", "+zero.foo: there is no such setting"),
    Attack("+zero.stage=3", "+zero.stage=3: zero.stage has a value already; leave out the +"),
    Attack("+model@foo=mlp", "+model@foo=mlp: "),
    Attack("hydra.foo=1", "hydra.foo: there is no such setting"),
    Attack("hydra.mode=foo", "hydra.mode=foo: "),
    Attack("hydra/job_logging=nope", "hydra/job_logging=nope: there is no such choice"),
    Attack("hydra/launcher=rq", "hydra/launcher=rq: is not installed; pip install hydra-rq-launcher"),
    Attack("-m hydra/sweeper=ax seed=0,1", "hydra/sweeper=ax: is not installed; pip install hydra-ax-sweeper"),
    Attack("model.num_layer=3", "model.num_layer: there is no such setting; did you mean model.num_layers?"),
    Attack("+model.depth=3", "model.depth: zerotrain.models.GPT takes no such argument"),
    Attack("+optimizer.beta=3", "optimizer.beta: torch.optim.AdamW takes no such argument; did you mean betas?"),
    Attack("zero={stge:3}", "zero.stge: there is no such setting; did you mean zero.stage?"),
    Attack(
        "zero={stage:x}",
        "zero.stage: got x; it must be 0, 1, 2 or 3, or auto; the default is 2",
    ),
    Attack("train={max_step:3}", "train.max_step: there is no such setting; did you mean train.max_steps?"),
    Attack("model={_target_:torch.nn.Linear,in_features:3}", "model.in_features: there is no such setting; +model.in_"),
    Attack("zero=3", "zero=3: zero is a group of settings: zero.accumulate, "),
    Attack("zero=[3]", "zero=[3]: "),
    Attack(
        "+trainer.max_epochs=1", "+trainer.max_epochs: there is no such setting; zerotrain calls it train.num_epochs"
    ),
    Attack(
        "+trainer.max_epochs=1 +trainer.x.y=2 +zero.foo.bar=1 ++other.x=1",
        ("+trainer.max_epochs: there", "+trainer.x.y: there", "+zero.foo.bar: there", "+other.x: there is no such"),
    ),
    Attack("+hydra.callbacks.x._target_=os.system", "Target 'os.system' is blocklisted because it allows config data "),
    Attack("+hydra.callbacks.x._target_=nope.x", "Error locating target 'nope.x'"),
    Attack("~hydra.launcher", "~hydra.launcher: "),
    Attack("hydra.searchpath=[nope://x]", "hydra.searchpath=[nope://x]: No config source registered for schema nope"),
    Attack("model@x=gpt2", "model@x=gpt2: "),
    Attack("zero.stage=3 zero.stge=1 precision=x", ("precision=x: there", "zero.stge: there")),
]

FORMS = [
    Attack([""], "'': cannot be read; write key=value"),
    Attack(["="], "=: cannot be read; write key=value"),
    Attack(["zero.stage"], "zero.stage: cannot be read; write key=value"),
    Attack(["zero.stage=["], "zero.stage=[: cannot be read"),
    Attack(["zero.stage="], "zero.stage: got ''; it must be 0, 1, 2 or 3"),
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
    Attack(["model._target_=a\nb.C"], "model._target_=a\\nb.C: cannot be read"),
    Attack(["zero.stage=3", "zero.stage=4"], "zero.stage: got 4; it must be"),
    Attack(["zero.stage=0,1"], "zero.stage=0,1: got several values; -m runs a job for each"),
    Attack(["model=glob(*)"], "model=glob(*): got several values"),
    Attack(["zero.stage=int(x)"], "zero.stage=int(x): cannot be read"),
    Attack(["~zero.stage"], "~zero.stage: zero.stage cannot be left out; give it another value"),
    Attack(["~data.path"], "~data.path: is null, and Hydra can only leave out a setting with a value"),
    Attack(["~model"], "model._target_: got null; it must be the import path of a class or function"),
    Attack(["~optimizer"], ("optimizer._target_: got null; it must", "optimizer._partial_: got null; it must be true")),
    Attack(
        ["~data"],
        ("model.vocab_size: got ${data.vocab_size}; there is no data.vo", "model.max_seq_len: got ${data.seq"),
    ),
    Attack(["~scheduler.warmup_steps", "scheduler._target_=builtins.dict"], "scheduler"),
    Attack(["--config-dir"], ("usage: launch.py", *[" "] * 6, "launch.py: error: argument --config-dir")),
    Attack(["--foo"], ("usage: launch.py", *[" "] * 6, "launch.py: error: unrecognized arguments: --foo")),
    Attack(["zero.stge=3", "--config-dir=.", "seed=1"], "zero.stge: there is no such setting"),
    Attack(["--cfg", "job", "zero.stge=1"], "zero.stge: there is no such setting"),
    Attack(["--cfg", "job", "--resolve", "seed=${nowhere}"], "seed: got ${nowhere}; there is no nowhere"),
    Attack(["--experimental-rerun", "nowhere"], ("/", "  warnings", "File nowhere does not exist!")),
    Attack(["--package", "nope", "--cfg", "job"], "package 'nope' not found in config", code=1),
]

INTERPOLATIONS = [
    Attack(["seed=${nowhere}"], "seed: got ${nowhere}; there is no nowhere; give seed=..."),
    Attack(
        ["seed=${oc.env:NOT_SET}"], "seed: got ${oc.env:NOT_SET}; the environment variable NOT_SET is not set; set it"
    ),
    Attack(["seed=${oc.env:SET}"], "seed: got ${oc.env:SET}; ", environment={"SET": "text"}),
    Attack(["seed=${nope:1}"], "seed: got ${nope:1}; there is no resolver nope"),
    Attack(["seed=${seed}"], "seed: got ${seed}, which leads back to itself"),
    Attack(
        ["seed=${train.max_steps}", "train.max_steps=${seed}"],
        ("seed: got ${train.max_steps}, which leads back", "train.max_steps: got ${seed}, which leads back"),
    ),
    Attack(["seed=${data.path}"], "seed: got ${data.path}; "),
    Attack(["zero.units=${zero}"], "zero.units: got ${zero}, which leads back to itself"),
    Attack(["data.path='a${b'"], "data.path='a${b': ${ begins a reference and needs a } to close it"),
    Attack(["optimizer=${nope}"], "optimizer=${nope}: "),
    Attack(["optimizer.betas=[0.9,${x}]"], "optimizer.betas.1: got ${x}; there is no x"),
    Attack(["model.vocab_size=${data.nothing}"], "model.vocab_size: got ${data.nothing}; there is no data.nothing"),
    Attack(["hydra.run.dir=${nowhere}"], "hydra.run.dir: got ${nowhere}; there is no nowhere"),
    Attack(["hydra.run.dir=${oc.env:NOT_SET}/x"], "hydra.run.dir: got ${oc.env:NOT_SET}/x; the environment variable"),
    Attack(["-m", "seed=0,1", "hydra.sweep.dir=${nowhere}"], "hydra.sweep.dir: got ${nowhere}; there is no nowhere"),
    Attack(
        ["-m", "seed=0,1", "hydra.sweep.subdir=${nowhere}"],
        "hydra.sweep.subdir: got ${nowhere}; there is no nowhere",
        left=("multirun.yaml",),
    ),
]

FOLDERS = [
    Attack("--config-dir nowhere", "--config-dir: got nowhere; there is no such folder in /"),
    Attack("--config-dir file", "--config-dir: got file; there is no such folder", before="touch file"),
    Attack("--config-path nowhere", "--config-path: got nowhere; there is no such folder in /"),
    Attack("--config-path /tmp zero.stage=9", "--config-path: got /tmp, which has no train.yaml; give --config-name"),
    Attack("--config-path conf/model experiment=x", "--config-path: got conf/model, which has no train.yaml; give"),
    Attack(
        ["--config-path", str(Path(__file__).with_name("conf_of_its_own")), "data=synthetic"],
        "model/none: there is no such yaml in /",
    ),
    Attack("--config-name ../train", "../train: there is no such yaml in /"),
    Attack("--config-name nowhere", "--config-name: got nowhere; there is no such config; there are train"),
    Attack("--config-name tran", "--config-name: got tran; there is no such config; did you mean train?"),
    Attack("hydra.run.dir=file/x", "hydra.run.dir: file/x cannot be made: Not a directory", before="touch file"),
    Attack("hydra.run.dir=/proc/x/y", "hydra.run.dir: /proc/x cannot be made: No such file or directory"),
    Attack("hydra.run.dir=r", "hydra.run.dir: r cannot be made: File exists", before="ln -s nowhere r"),
    Attack("hydra.run.dir=r", "hydra.run.dir: got ", before="mkdir -p r/.lock"),
    Attack(["hydra.run.dir=" + "x" * 300], "hydra.run.dir: xxx"),
    Attack("-m seed=0,1 hydra.sweep.dir=file/x", "hydra.sweep.dir: file/x cannot be made", before="touch file"),
    Attack("data.path=nowhere", "data.path=nowhere does not exist; give a file, a folder or a glob pattern"),
    Attack("data.path=empty", "data.path=empty", before="touch empty"),
    Attack("data.path=folder", "data.path=folder", before="mkdir folder"),
    Attack(["data.path='*.none'"], "data.path=*.none"),
    Attack("data.path=short", "data.path=short holds 2 tokens; ", before="printf hi > short"),
    Attack("data=tokens", "data.path: has no value and needs one; give data.path=..."),
    Attack("data=tokens data.path=nowhere", "data.path=nowhere does not exist; give a file of tokens"),
    Attack("data=tokens data.path=odd", "data.path=odd", before="printf abc > odd"),
    Attack("experiment=gpt2_bf16", "data.path: has no value and needs one; give data.path=..."),
    Attack("data.cache_dir=file", "data", before="touch file"),
    Attack("data.cache_dir=/proc/none", "data"),
]

VALUES = [
    Attack("data=synthetic model.vocab_size=100", "data.vocab_size=256, but GPT knows 100 tokens"),
    Attack("data=synthetic model=mlp model.vocab_size=100", "data.vocab_size=256, but MLP knows 100 tokens"),
    Attack("data=synthetic model.max_seq_len=8", "data.seq_len=128, but GPT knows 8 positions"),
    Attack("launch.timeout_s=1e300", "launch.timeout_s: got 1e+300; it must be between 0.001 and 31536000 seconds"),
    Attack("launch.nproc_per_node=100000", "launch.nproc_per_node: got 100000; it must be between 1 and 1024 ranks"),
    Attack("launch.device=cuda data=synthetic", "launch.device=cuda, but torch sees no GPU here"),
    Attack(
        "data=synthetic train.micro_batch_size=1000000000", "train.micro_batch_size: got 1000000000; a rank would read"
    ),
    Attack(
        "data=synthetic train.gradient_accumulation_steps=1000000000", "train.gradient_accumulation_steps: got 1000000"
    ),
    Attack("data=synthetic data.seq_len=1000000000000", "data: needs more memory than there is"),
    Attack("data=synthetic data.seq_len=1000000000 model=mlp", "data: needs more memory than there is: the 8 rows of"),
    Attack(
        "data=synthetic data.seq_len=100000 train.micro_batch_size=2000 model.max_seq_len=100000",
        "train.micro_batch_size: needs more memory than there is: a step with micro-batches of 2000 rows of a rank wo",
    ),
    Attack("data=synthetic model.hidden_size=200000 model.num_layers=1000", "model: needs more memory than there is: "),
    Attack("data=synthetic model=mlp model.hidden_size=1000000", "model: needs more memory than there is: weights, "),
    Attack("data=synthetic model.num_heads=3", "model.num_heads=3 does not divide model.hidden_size=128"),
    Attack("data=synthetic model.num_layers=x", "model.num_layers: got x; zerotrain.models.GPT takes a whole number"),
    Attack("data=synthetic model.dropout=2", "model.dropout=2 is out of range"),
    Attack("data=synthetic data.num_sequences=0", "data.num_sequences=0 is too small"),
    Attack("data=synthetic optimizer.lr=-1", "optimizer.lr: got -1; Invalid learning rate: -1"),
    Attack("data=synthetic optimizer.lr=nan", "optimizer.lr: got nan; it must be a finite number"),
    Attack(
        "data=synthetic optimizer.betas=3", "optimizer.betas: got 3; torch.optim.AdamW takes a list of 2, each a number"
    ),
    Attack("data=synthetic optimizer.betas=[0.9,1.5]", "optimizer.betas: got [0.9, 1.5]; Invalid beta parameter"),
    Attack("data=synthetic optimizer.fused=maybe", "optimizer.fused: got maybe; torch.optim.AdamW takes true or false"),
    Attack("data=synthetic optimizer._partial_=false", "optimizer._partial_: got false; it must be true"),
    Attack(
        "data=synthetic scheduler.warmup_steps=abc", "scheduler.warmup_steps: got abc; zerotrain.training.warmup_cosine"
    ),
    Attack("data=synthetic scheduler.warmup_steps=-5", "scheduler.warmup_steps=-5 is negative"),
    Attack("data=synthetic zero.units=[nope]", "zero.units: no module with parameters matches 'nope'"),
    Attack("data=synthetic precision=bf16 precision.keep_fp32=[nope]", "precision.keep_fp32: no module or parameter"),
    Attack("data=synthetic precision=fp16 train.on_nonfinite=stop", "train.on_nonfinite: got stop; it must be skip"),
    Attack("data=synthetic zero.stage=9 train.max_steps=0", ("train.max_steps: got 0", "zero.stage: got 9")),
    Attack("data=synthetic optimizer=muon optimizer.matrices=[no]", "optimizer.matrices: "),
]

CLASSES = [
    Attack("model._target_=nowhere.Model", "model._target_: got nowhere.Model; there is no module nowhere"),
    Attack(
        "model._target_=zerotrain.models.GTP", "model._target_: got zerotrain.models.GTP; zerotrain.models has no GTP"
    ),
    Attack("model._target_=null", "model._target_: got null; it must be the import path"),
    Attack("model._target_=math.pi", "model._target_: got math.pi, a float; it must be a class or function"),
    Attack(
        "model._target_=builtins.dict", "model._target_: got builtins.dict, which makes a dict; it must make a torch"
    ),
    Attack(
        "model._target_=torch.nn.Linear",
        (
            "model.vocab_size: torch.nn",
            "model.max_seq",
            "model.num_layers",
            "model.num_heads",
            "model.hidden_size",
            "model.dropout",
            "model.vocab_multiple",
            "model.loss_chunks",
            "model: torch.nn.Linear: ",
        ),
    ),
    Attack(
        "data._target_=builtins.dict", "data._target_: got builtins.dict, which makes a dict with no dataset called tr"
    ),
    Attack(
        "optimizer._target_=builtins.dict data=synthetic", "optimizer._target_: got builtins.dict, which makes a dict"
    ),
    Attack(
        "scheduler._target_=builtins.divmod data=synthetic ~scheduler.warmup_steps ~scheduler.final_fraction",
        "scheduler._target_: got builtins.divmod, which returns a tuple",
    ),
    Attack(
        "model._target_=mine.Model",
        "model._target_: got mine.Model; importing mine failed: SyntaxError",
        before="echo 'class (' > mine.py",
    ),
    Attack(
        "model._target_=mine.Model",
        "model._target_: got mine.Model; importing mine failed: ZeroDivisionError",
        before="echo '1/0' > mine.py",
    ),
    Attack(
        "model._target_=mine.Model",
        "model._target_: got mine.Model; importing mine failed: SystemExit",
        before="echo 'import sys; sys.exit(0)' > mine.py",
    ),
    Attack(
        "model._target_=mine.Model",
        "model._target_: got mine.Model; there is no module missing_of_mine",
        before="echo 'import missing_of_mine' > mine.py",
    ),
]

YAMLS = [
    of_yaml(
        TOP + "train:\\n  max_stps: 3\\n",
        "mine/experiment/bad.yaml, line 3: train.max_stps: there is no such setting; did",
    ),
    of_yaml(
        TOP + "train:\\n  gradient_accumulation_steps: abc\\n",
        "mine/experiment/bad.yaml, line 3: train.gradient_accumulation_steps: got abc; it must be 1",
    ),
    of_yaml(
        TOP + "train:\\n  log_every: abc\\n",
        "train.log_every: got abc; it must be a number of steps such as 100, of tokens such as 5e6tokens or of epochs",
    ),
    of_yaml(
        TOP + "train:\\n  max_steps: -3\\n",
        "train.max_steps: got -3; it must be 1 or more steps, or null with num_epochs or max_tokens; the default "
        "is 400 (mine",
    ),
    of_yaml(
        TOP + "optimizer:\\n  lr: abc\\n",
        "optimizer.lr: got abc; torch.optim.AdamW takes a number; its default is 0.001 (m",
    ),
    of_yaml(TOP + "seed: ${nope}\\n", "seed: got ${nope}; there is no nope; give seed=..."),
    of_yaml(TOP + "train: [\\n", "/"),
    of_yaml(TOP + "seed: 1\\nseed: 2\\n", "/"),
    of_yaml(TOP + "zero:\\n\\tstage: 1\\n", "/"),
    of_yaml(
        "seed: 1\\n",
        "mine/experiment/bad.yaml: its settings go to experiment, which does not exist; its first line must",
    ),
    of_yaml("just text", "mine/experiment/bad.yaml, line 1: there must be settings"),
    of_yaml("\\xff\\xfe", "mine/experiment/bad.yaml"),
    of_yaml("- a\\n- b\\n", "mine/experiment/bad.yaml, line 1: there must be settings"),
    of_yaml(
        TOP + "defaults:\\n  - override /model: gpt3\\n", "experiment=bad: needs model/gpt3, which does not exist; did"
    ),
    of_yaml(TOP + "defaults: 3\\n", "experiment=bad: "),
    of_yaml(TOP + "defaults:\\n  - nope: x\\n", "experiment=bad: needs experiment/nope/x, which does not exist"),
    of_yaml(TOP + "train: 3\\n", "mine/experiment/bad.yaml: Merge error: int is not"),
    of_yaml(TOP + "zero: null\\n", ""),
    of_yaml(TOP + "train:\\n  max_steps: 3\\n", "zero.stage: got 9", "zero.stage=9"),
]

OF_A_SWEEP = ("multirun.yaml", "sweep.jsonl", "report.html", "sweep.csv", "sweep.json")
SWEEPS = [
    Attack("-m seed=interval(0,3)", "seed=interval(0,3): the basic sweeper does not support interval()"),
    Attack(
        "-m optimizer.lr=interval(0.1,1)", "optimizer.lr=interval(0.1,1): the basic sweeper does not support interval()"
    ),
    Attack("-m seed=1,abc", "seed: got abc; it must be between 0 and 2**63 - 1", left=("multirun.yaml",)),
    Attack(
        "-m seed=0,1 hydra.launcher._target_=os.system", "hydra.launcher._target_: got os.system; it must be a class"
    ),
    Attack(
        "-m seed=0,1 hydra.launcher._target_=nope.Nope", "hydra.launcher._target_: got nope.Nope; it must be a class"
    ),
    Attack(
        f"-m seed=0,1 hydra.launcher._target_={LAUNCHERS}.Nope",
        "the command line cannot be run: RuntimeError: Unknown plugin class",
    ),
    Attack("-m seed=0,1 hydra.launcher=null", "the command line cannot be run: RuntimeError: Hydra launcher is not"),
    Attack("-m seed=0,1 +hydra.sweeper.foo=1", "Error in call to target 'hydra._internal.core_plugins.basic_sweeper."),
    Attack("-m zero.stage=range(1,2,0)", "zero.stage=range(1,2,0): range() arg 3 must not be zero"),
    Attack("-m hydra.sweep.dir=1,2", "Sweeping over Hydra's configuration is not supported"),
    Attack("-m zero.stage=choice()", "zero.stage=choice(): cannot be read"),
    Attack("-m zero.stage=range(0,0)", "-m: there is no job to run", left=("multirun.yaml",)),
    Attack("-m zero.stage=glob(*)", "-m: there is no job to run", left=("multirun.yaml",)),
    Attack("-m zero.stge=1,2", "zero.stge: there is no such setting", left=("multirun.yaml",)),
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
    Attack("offload.parameters=gpu zero.stage=3", "offload.parameters: got gpu; it must be device, cpu or disk"),
    Attack("offload=cpu", "offload=cpu: offload is a group of settings: "),
    Attack("offload.keep=1.5 offload.optimizer=cpu", "offload.keep: got 1.5; it must be between 0 and 1 of the opt"),
    Attack("offload.keep=nan offload.optimizer=cpu", "offload.keep: got nan; it must be "),
    Attack("offload.update=gpu offload.optimizer=cpu", "offload.update: got gpu; it must be device or host"),
    Attack(
        "offload.update=host offload.optimizer=cpu optimizer=muon",
        "offload.update: got host; tensors that the optimizer updates whole are exchanged and updated on the device",
    ),
    Attack(f"{DISK}''", "offload.path: got ''; it must be the path of a folder"),
    Attack(f"{DISK}/proc/x", "offload.path: no file can be made in /proc ("),
    Attack(f"{DISK}file/x", "offload.path: no file can be made in /", before="touch file"),
    Attack(f"{DISK}. optimizer.lr=-1", "optimizer.lr: got -1"),
    Attack(f"{DISK}. model.num_heads=3", "model.num_heads=3 does not divide "),
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
