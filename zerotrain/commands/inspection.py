"""`zerotrain inspect PATH`: what a checkpoint holds, or which a run has, and whether they are what was
written; `--diff A B` compares two.

One process, no ranks. Exit code 0; 1 for a checkpoint that is damaged or, with --diff, two that differ; 2 for none.
"""

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path

from zerotrain.checkpoint import folder as folders
from zerotrain.checkpoint.manifest import MANIFEST, Manifest, read_manifest
from zerotrain.checkpoint.mirror import local_run
from zerotrain.checkpoint.verification import differences, problems_in
from zerotrain.commands.frame import exit_code, parser_of
from zerotrain.errors import CheckpointError
from zerotrain.files.untrusted import printable, shown

MIB = 2**20
MAX_LINE = 100_000
"""Characters: a tensor is one of a hundred roles."""
FILES_OF_RUNS = ("config.yaml", "result.json")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was asked for; returns the exit code."""
    parser = parser_of("inspect", "Show what is in checkpoints of zerotrain.")
    parser.add_argument("path", nargs="*", metavar="PATH", help="a checkpoint, a run, or the URL of a mirror")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="which tensors differ between two of them")
    options = parser.parse_args(arguments)
    if not options.path and options.diff is None:
        parser.error("give the PATH of a checkpoint or of a run, or --diff A B")

    def inspect() -> int:
        codes = [show_run(path) if _is_run(path) else show(path) for path in map(local_run, options.path)]
        if options.diff is not None:
            codes.append(compare(*(folders.candidates(local_run(path))[0] for path in options.diff)))
        return max(codes)

    return exit_code(inspect)


def show(folder: Path) -> int:
    """Print what one holds, and what is broken in it."""
    manifest = read_manifest(folder)
    for line in _lines(folder, manifest):
        _say(line)
    if problems := problems_in(folder, manifest):
        print("BROKEN: do not load it")
        for problem in problems:
            _say(f"  {problem}")
        return 1
    num_blocks = sum(len(file.hashes) for file in manifest.files)
    _say(f"verified: the manifest and {num_blocks} blocks in {len(manifest.files)} files are what was written")
    return 0


def _is_run(path: Path) -> bool:
    """Tell a run, which has checkpoints or may come to have some, from a checkpoint. A CheckpointError where it is
    neither."""
    if os.path.isfile(path / MANIFEST):
        return False
    names = (folders.CHECKPOINTS, *FILES_OF_RUNS)
    if any(os.path.lexists(path / name) for name in names) or folders.checkpoints_in(path):
        return True
    if os.path.isdir(path):
        raise CheckpointError(
            f"{path} is no checkpoint and no run: it has no {MANIFEST}, and none of {folders.CHECKPOINTS}/, "
            f"{', '.join(FILES_OF_RUNS)}"
        )
    raise CheckpointError(
        f"{path} is {'a file, and no' if os.path.lexists(path) else 'not there: give the'} folder of "
        "a checkpoint or of a run"
    )


def show_run(run: Path) -> int:
    """Print which checkpoints a run has, each as it is verified, and what else lies beside them."""
    folder = run if folders.checkpoints_in(run) else run / folders.CHECKPOINTS
    checkpoints = folders.checkpoints_in(folder)
    _say(f"{run}: {len(checkpoints) or 'no'} {'checkpoint' if len(checkpoints) == 1 else 'checkpoints'}")
    whole, num_broken = [], 0
    for path in checkpoints:
        problems = _line(path)
        if not problems:
            whole.append(path)
        elif path.exists():
            num_broken += 1
            print("BROKEN: do not load it", *problems, sep="\n  ")
        else:
            print("removed meanwhile")
    for path in folders.entries(folder, folders.PARTIAL):
        if folders.is_under_way(path):
            nbytes = 0
            for file in folders.entries(path):
                with suppress(OSError):  # published meanwhile
                    nbytes += file.stat().st_size
            _say(f"{path.name}: a save under way, {nbytes / MIB:.1f} MiB so far")
        else:
            _say(f"{path.name}: a save that was cut off; the next one removes it")
    for path in folders.entries(folder, folders.REMOVED):
        _say(f"{path.name}: a removal under way or cut off; the next one removes it")
    for path in folders.entries(folder, folders.ASIDE):
        _say(f"{path.name}: set aside when the run went on from an earlier one")
    if (best := folders.best_in(folder)) is not None:
        _say(f"{folders.BEST}: {best.name}, of the best evaluation{'' if best.exists() else ', which is gone'}")
    if whole:
        _say(f"to go on from {whole[-1].name}: checkpoint.resume={run if whole[-1] == checkpoints[-1] else whole[-1]}")
    return 1 if num_broken else 0 if checkpoints else 2


def _line(path: Path) -> list[str]:
    """Print what one of a run is, and verify it; returns what is wrong with it."""
    began = time.monotonic()
    _say(path.name, end="  ")
    try:
        manifest = read_manifest(path)
        saved = datetime.fromtimestamp((path / MANIFEST).stat().st_mtime)
        nbytes, ranks = sum(file.nbytes for file in manifest.files), manifest.num_ranks
        placement = f"stage {manifest.content['stage']}, {ranks} {'ranks' if ranks > 1 else 'rank'}"
        _say(f"{saved:%Y-%m-%d %H:%M:%S}  {nbytes / MIB:.1f} MiB  {placement}", end="  ")
        problems = problems_in(path, manifest)
    except (CheckpointError, OSError) as error:
        return [str(error)]
    if not problems:
        _say(f"verified in {time.monotonic() - began:.1f} s")
    return problems


def compare(path: Path, other: Path) -> int:
    """Print what differs between two."""
    manifests = read_manifest(path), read_manifest(other)
    num_different = 0
    for line in differences((path, manifests[0]), (other, manifests[1])):
        _say(line)
        num_different += 1
    num_tensors = len({(name, role) for manifest in manifests for name, role, _ in manifest.tensors()})
    _say(f"{num_different} of {num_tensors} tensors differ (step {manifests[0].step} against step {manifests[1].step})")
    return 1 if num_different else 0


def _lines(folder: Path, manifest: Manifest) -> list[str]:
    content, versions = manifest.content, manifest.content["versions"]
    nbytes = sum(file.nbytes for file in manifest.files)
    numel = sum(parameter.numel for parameter in manifest.parameters.values())
    trained = sum(parameter.numel for parameter in manifest.parameters.values() if parameter.trains)
    lines = [
        f"{folder}: step {manifest.step}, saved by {manifest.num_ranks} ranks ({content['virtual_ranks']} virtual) at "
        f"stage {content['stage']} in {content['precision']}",
        f"written by zerotrain {versions.get('zerotrain')}, torch {versions.get('torch')}, "
        f"Python {versions.get('python')}",
        f"{len(manifest.parameters)} parameters of {numel:,} elements, {trained:,} of them trained; "
        f"{len(manifest.buffers)} buffers; {nbytes / MIB:.1f} MiB in {len(manifest.files)} files",
    ]
    for group in content["groups"]:
        settings = group["hyperparameters"]
        lines.append(f"group {settings['name']!r}: {group['optimizer']}, lr {settings.get('lr')}")
    width = max((len(name) for name in (*manifest.parameters, *manifest.buffers)), default=0)
    for name, parameter in manifest.parameters.items():
        tensors = ", ".join(f"{role} {tensor.dtype}" for role, tensor in parameter.tensors.items())
        counts = ""
        for count, value in parameter.counts.items():
            number = value["value"] if isinstance(value, dict) else value
            counts += f", {count} {number:g}" if isinstance(number, float) else f", {count} {shown(number)}"
        frozen = "" if parameter.trains else ", frozen"
        lines.append(f"  {name:{width}}  {'x'.join(map(str, parameter.shape)) or '()'}  {tensors}{counts}{frozen}")
    for name, buffer in manifest.buffers.items():
        of_ranks = f", of {len(buffer.pieces)} ranks each its own" if len(buffer.pieces) > 1 else ""
        lines.append(f"  {name:{width}}  {'x'.join(map(str, buffer.shape)) or '()'}  buffer {buffer.dtype}{of_ranks}")
    return lines


def _say(line: str, end: str = "\n") -> None:
    """Names and texts come out of files."""
    print(printable(line, MAX_LINE, keep=""), end=end, flush=True)
