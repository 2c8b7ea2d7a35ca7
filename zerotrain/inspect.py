"""`python -m zerotrain.inspect CHECKPOINT`: what it holds, and whether it is what was written; `--diff A B` compares.

One process, no ranks. Exit code 0; 1 for a checkpoint that is damaged or, with --diff, two that differ; 2 for none.
"""

import argparse
import sys
from collections.abc import Sequence
from math import prod
from pathlib import Path

from zerotrain.checkpoint.compare import differences
from zerotrain.checkpoint.manifest import Manifest, dtype_of, pieces_of, read_manifest
from zerotrain.checkpoint.verify import problems_in
from zerotrain.errors import CheckpointError

MIB = 2**20


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what was asked for; returns the exit code."""
    parser = argparse.ArgumentParser("python -m zerotrain.inspect", description="What a checkpoint of zerotrain holds.")
    parser.add_argument("checkpoint", nargs="*", metavar="CHECKPOINT", help="the folder with manifest.json")
    parser.add_argument("--diff", nargs=2, metavar=("A", "B"), help="which tensors differ between two, and by how much")
    asked = parser.parse_args(arguments)
    if not asked.checkpoint and asked.diff is None:
        parser.error("give a CHECKPOINT, or --diff A B")
    try:
        codes = [show(Path(each)) for each in asked.checkpoint]
        if asked.diff is not None:
            codes.append(compare(*map(Path, asked.diff)))
        return max(codes)
    except CheckpointError as error:
        print(error, file=sys.stderr)
        return 2


def show(folder: Path) -> int:
    """Print what one holds, and what is broken in it."""
    manifest = read_manifest(folder)
    for line in _lines(folder, manifest):
        print(line)
    if problems := problems_in(folder, manifest):
        print("BROKEN: do not load it")
        for problem in problems:
            print(f"  {problem}")
        return 1
    num_blocks = sum(len(file["hashes"]) for file in manifest.files)
    print(f"verified: the manifest and {num_blocks} blocks in {len(manifest.files)} files are what was written")
    return 0


def compare(left: Path, right: Path) -> int:
    """Print what differs between two."""
    manifests = read_manifest(left), read_manifest(right)
    found = 0
    for each in differences((left, manifests[0]), (right, manifests[1])):
        print(f"{each.label}: {each.what}")
        found += 1
    num_tensors = len({(name, role) for manifest in manifests for name, role, _ in manifest.tensors()})
    print(f"{found} of {num_tensors} tensors differ (step {manifests[0].step} against step {manifests[1].step})")
    return 1 if found else 0


def _lines(folder: Path, manifest: Manifest) -> list[str]:
    said, told = manifest.content, manifest.content["versions"]
    nbytes = sum(file["nbytes"] for file in manifest.files)
    numel = sum(prod(each["shape"]) for each in manifest.parameters.values())
    trained = sum(prod(each["shape"]) for each in manifest.parameters.values() if each["trains"])
    lines = [
        f"{folder}: step {manifest.step}, saved by {manifest.num_ranks} ranks ({said['virtual_ranks']} virtual) at "
        f"stage {said['stage']} in {said['precision']}",
        f"written by zerotrain {told['zerotrain']}, torch {told['torch']}, Python {told['python']}",
        f"{len(manifest.parameters)} parameters of {numel:,} elements, {trained:,} of them trained; "
        f"{len(manifest.buffers)} buffers; {nbytes / MIB:.1f} MiB in {len(manifest.files)} files",
    ]
    for group in said["groups"]:
        settings = group["hyperparameters"]
        lines.append(f"group {settings['name']!r}: {group['optimizer']}, lr {settings.get('lr')}")
    width = max((len(name) for name in (*manifest.parameters, *manifest.buffers)), default=0)
    for name, parameter in manifest.parameters.items():
        kept = ", ".join(f"{role} {tensor['dtype']}" for role, tensor in parameter["tensors"].items())
        counts = "".join(f", {count} {_number(value)}" for count, value in parameter["counts"].items())
        frozen = "" if parameter["trains"] else ", frozen"
        lines.append(f"  {name:{width}}  {'x'.join(map(str, parameter['shape'])) or '()'}  {kept}{counts}{frozen}")
    for name, buffer in manifest.buffers.items():
        of_ranks = f", of {len(pieces_of(buffer))} ranks each its own" if len(pieces_of(buffer)) > 1 else ""
        dtype = str(dtype_of(buffer)).removeprefix("torch.")
        lines.append(f"  {name:{width}}  {'x'.join(map(str, buffer['shape'])) or '()'}  buffer {dtype}{of_ranks}")
    return lines


def _number(value: object) -> str:
    number = value["value"] if isinstance(value, dict) else value
    return f"{number:g}" if isinstance(number, float) else str(number)


if __name__ == "__main__":
    sys.exit(main())
