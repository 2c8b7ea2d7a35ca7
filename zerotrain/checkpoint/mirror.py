"""A folder that fsspec opens by its URL, such as one of an object store: the mirror of a run's checkpoints.

    s3://bucket/run/step-00000100/rank-0.safetensors
    s3://bucket/run/step-00000100/manifest.json       written last, removed first

Object stores have no rename: the manifest says that a checkpoint is whole. Both ways each block is compared with its
hash in the manifest while it is copied, so nothing damaged is copied and called whole.
"""

import atexit
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any, BinaryIO

from zerotrain.checkpoint import folder as folders, manifest as manifests
from zerotrain.checkpoint.tensor_file import write_file
from zerotrain.errors import CheckpointError, ConfigError
from zerotrain.files.terminal import package
from zerotrain.files.untrusted import printable

CREDENTIALS = re.compile(r"://[^/@]*@")
"""A user and a password in a URL."""


class _CutOffError(CheckpointError):
    """A copy has no manifest, so it was cut off and counts for nothing."""


class Mirror:
    """The checkpoints under a URL. fsspec finds the credentials, in the environment or in files of the provider.

    Args:
        url: such as s3://bucket/run; needs the package of its protocol, such as s3fs.

    Raises:
        ImportError: the protocol's package is not installed.
        ValueError: there is no such protocol.
    """

    def __init__(self, url: str) -> None:
        self.url = CREDENTIALS.sub("://***@", url)
        """For messages."""
        self.moved_s = time.monotonic()
        """When the last block of a copy was taken there, by the clock of `time.monotonic`."""
        self._url = url
        self._fsspec = package("fsspec", extra="mirror", needed_by="a URL")
        self._fsspec.get_filesystem_class(url.partition("://")[0].rpartition("::")[2])

    @cached_property
    def _opened(self) -> tuple[Any, str]:
        """The file system of fsspec, and the path in it. Some, such as ftp, connect when they are made."""
        files, root = self._fsspec.url_to_fs(self._url, use_listings_cache=False)
        return files, root.rstrip("/")

    @cached_property
    def _files(self) -> Any:
        return self._opened[0]

    def names(self) -> list[str]:
        """The names of all that is there.

        Raises:
            CheckpointError: the mirror cannot be reached.
        """
        with self._raising("cannot be listed"), suppress(FileNotFoundError):
            self._files.invalidate_cache()
            return [path.rstrip("/").rpartition("/")[2] for path in self._files.ls(self._path(), detail=False)]
        return []

    def steps(self) -> list[int]:
        """The steps with a folder there, the newest first. The manifest tells which are whole.

        Raises:
            CheckpointError: the mirror cannot be reached.
        """
        steps = (int(name.removeprefix("step-")) for name in self.names() if folders.STEP.fullmatch(name))
        return sorted(steps, reverse=True)

    def manifest(self, step: int) -> manifests.Manifest | None:
        """The manifest of a step; None where there is none, so that its copy was cut off.

        Raises:
            CheckpointError: it is not what was written, or cannot be read.
        """
        with self._raising(f"has a {folders.step_name(step)} that cannot be read"):
            path = self._path(folders.step_name(step), manifests.MANIFEST)
            try:
                if self._files.info(path)["size"] > manifests.MAX_NBYTES:
                    raise CheckpointError(f"{manifests.MANIFEST} is larger than {manifests.MAX_NBYTES} bytes")
                text = self._files.cat_file(path).decode(errors="replace")
            except FileNotFoundError:
                return None
        return manifests.parse_manifest(text, Path(self.url.partition("://")[2], folders.step_name(step)))

    def push(self, path: Path) -> None:
        """Copy a whole checkpoint there. It is not removed here meanwhile, and a manifest that is there is the last
        thing written. If it is there already, sizes are compared, and a file of another size is copied again.

        Raises:
            CheckpointError: the mirror does not take it, or it is damaged here.
        """
        with folders.hold_newest(path):
            manifest, target = manifests.read_manifest(path), path.name
            text = manifest.text().encode()
            with self._raising(f"does not take {path.name}"):
                with suppress(CheckpointError, FileNotFoundError):
                    there = self.manifest(int(path.name.removeprefix("step-")))
                    if there is not None and there.text().encode() == text:
                        for file in manifest.files:
                            self._require_size(file.nbytes, target, file.name)
                        return
                with suppress(FileNotFoundError):  # of another run: its files would count as this one's
                    self._files.rm_file(self._path(target, manifests.MANIFEST))
                for file in manifest.files:
                    place = self._new_place(target, file.name)
                    with (path / file.name).open("rb") as source, self._files.open(place, "wb") as sink:
                        for block in _blocks(source, file):
                            sink.write(block)
                            self.moved_s = time.monotonic()
                    self._require_size(file.nbytes, target, file.name)
                self._files.pipe_file(self._path(target, manifests.MANIFEST), text)
                self._require_size(len(text), target, manifests.MANIFEST)

    def fetch(self, step: int, folder: Path) -> Path:
        """Copy a checkpoint into a folder of checkpoints here, where it appears when it is whole.

        Raises:
            CheckpointError: it is not whole there, is damaged, or cannot be copied.
        """
        name = folders.step_name(step)
        if (manifest := self.manifest(step)) is None:
            raise _CutOffError(f"{self.url} has no whole {name}: its copy was cut off")
        with self._raising(f"has a {name} that cannot be fetched"):
            partial = folders.PartialFolder(folder / name)
            try:
                for file in manifest.files:
                    with self._files.open(self._path(name, file.name), "rb") as source:
                        write_file(partial.path / file.name, _blocks(source, file))
                partial.publish(manifest)
            except BaseException:
                partial.remove()
                raise
        return folder / name

    def head(self, name: str, nbytes: int) -> bytes:
        """The first bytes of a file there.

        Raises:
            CheckpointError: it cannot be read.
        """
        with self._raising(f"has a {name} that cannot be read"):
            return bytes(self._files.cat_file(self._path(name), end=nbytes))

    def push_files(self, folder: Path, names: Sequence[str]) -> None:
        """Copy files of a folder there, in their order: of a whole the last tells that it is whole.

        Raises:
            CheckpointError: they are not taken.
        """
        with self._raising("does not take what is written"):
            for name in names:
                self._files.put_file(str(folder / name), self._new_place(name))
                self._require_size((folder / name).stat().st_size, name)

    def remove_old(self, keep: int | None) -> None:
        """Remove all but the newest whole checkpoints, and what copies that were cut off have left.

        Args:
            keep: so many stay; None: all.

        Raises:
            CheckpointError: one cannot be removed.
        """
        num_whole = 0
        for step in self.steps():
            name = folders.step_name(step)
            with self._raising(f"keeps its old {name}"):
                if self._files.exists(self._path(name, manifests.MANIFEST)):
                    num_whole += 1
                    if keep is None or num_whole <= keep:
                        continue
                    self._files.rm_file(self._path(name, manifests.MANIFEST))
                with suppress(FileNotFoundError):
                    self._files.rm(self._path(name), recursive=True)

    def _path(self, *names: str) -> str:
        return "/".join([self._opened[1], *names])

    def _new_place(self, *names: str) -> str:
        """The path of a file to write, in a folder that is there. Object stores have no folders."""
        place = self._path(*names)
        if "file" in self._files.protocol:
            self._files.makedirs(place.rpartition("/")[0], exist_ok=True)
        return place

    def _require_size(self, written: int, *names: str) -> None:
        if (nbytes := self._files.info(self._path(*names))["size"]) != written:
            raise CheckpointError(f"{names[-1]} has {nbytes} bytes there, and must have {written}")

    @contextmanager
    def _raising(self, outcome: str) -> Iterator[None]:
        """Raise whatever a file system answers in here as a CheckpointError: each has errors of its own."""
        try:
            yield
        except Exception as error:
            text = (str(error).splitlines() or [type(error).__name__])[0]
            if isinstance(error, FileNotFoundError) and error.errno is None:  # its text is the path alone
                text += " is not there"
            reason = CREDENTIALS.sub("://***@", printable(text, 300, keep=""))
            raise CheckpointError(f"{self.url} {outcome}: {reason}") from None


def open_mirror(url: str, setting: str) -> Mirror:
    """The folder behind a URL.

    Args:
        setting: that has it, for messages.

    Raises:
        ConfigError: fsspec does not open it.
    """
    try:
        return Mirror(url)
    except (ImportError, ValueError) as error:
        problem = str(error).splitlines()[0]
        raise ConfigError(f"{setting}: got {CREDENTIALS.sub('://***@', url)}; {problem}") from error


def fetch_newest(
    mirror: Mirror, folder: Path, newest: int | None, say: Callable[[str], object] = print, latest: int | None = None
) -> tuple[Path | None, list[str]]:
    """Fetch the newest whole checkpoint of a mirror into a folder of checkpoints, if it is newer than the newest there.

    Args:
        newest: its step; None: there is none.
        say: prints a line.
        latest: the last step whose checkpoint may be taken; None: any may.

    Returns:
        Its path, or None; and a line for each that was newer, and is damaged. A copy that was cut off is none.

    Raises:
        CheckpointError: the mirror cannot be reached.
    """
    problems: list[str] = []
    for step in mirror.steps():
        if newest is not None and step <= newest:
            break
        if latest is not None and step > latest:
            continue
        begun_s = time.monotonic()
        try:
            path = mirror.fetch(step, folder)
        except _CutOffError as error:
            say(str(error))
            continue
        except CheckpointError as error:
            problems.append(str(error))
            continue
        nbytes = sum(file.stat().st_size for file in path.iterdir())
        say(f"fetched {path.name} from {mirror.url}: {nbytes / 1e6:.1f} MB in {time.monotonic() - begun_s:.2f} s")
        return path, problems
    return None, problems


def local_folder() -> Path:
    """A new folder, which is gone when this process has ended."""
    folder = Path(tempfile.mkdtemp(prefix="zerotrain-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


def local_run(path: str) -> Path:
    """The folder of a run. The URL of a mirror gives its newest whole checkpoint, or the one that it names.

    Raises:
        ConfigError: fsspec does not open the URL.
        CheckpointError: the mirror cannot be reached, or has no whole checkpoint.
    """
    if "://" not in path:
        return Path(path)
    above, _, name = path.rstrip("/").rpartition("/")
    if folders.STEP.fullmatch(name):
        return open_mirror(above, "RUN").fetch(int(name.removeprefix("step-")), local_folder())
    mirror = open_mirror(path, "RUN")
    checkpoint, problems = fetch_newest(mirror, local_folder(), None, partial(print, file=sys.stderr))
    if checkpoint is None:
        raise CheckpointError("\n".join(problems) or f"{mirror.url} has no checkpoint")
    return checkpoint


def _blocks(source: BinaryIO | Any, file: manifests.SavedFile) -> Iterator[bytes]:
    """The blocks of a file, each of which is what was written, and all of them."""
    num_read = 0
    for number, written in enumerate(file.hashes):
        block = source.read(min(manifests.BLOCK_NBYTES, file.nbytes - num_read))
        num_read += len(block)
        if manifests.hash_of(block) != written:
            raise CheckpointError(f"{file.name} is not what was written, from its block {number} on")
        yield block
    if num_read != file.nbytes or source.read(1):
        raise CheckpointError(f"{file.name} has more or fewer bytes than the {file.nbytes} that were written")
