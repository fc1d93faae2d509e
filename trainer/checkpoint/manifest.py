"""The files of a checkpoint: synced, listed with size and CRC-32 in manifest.json, verified against it. No torch.

write_manifest(path, {name: digest(os.path.join(path, name)) for name in names})
verify(path)                        # Damaged: "path/__0_0.distcp: checksum differs"
"""

import errno
import json
import os
import re
import shutil
import stat
import sys
import tempfile
import zlib
from pathlib import Path

from trainer.terminal.output import tell

# All that a manifest may name.
FILE = re.compile(r"\.metadata|train_state\.json|__[0-9]+_[0-9]+\.distcp")
# Other errors of reading may pass, and the file may be whole.
DAMAGE = errno.ENOENT, errno.ENOTDIR, errno.EIO


class CheckpointError(Exception):
    """A checkpoint that cannot be used or written, in one line."""


class Damaged(CheckpointError):
    """A step that is not, byte for byte, what was saved. An older step may be good."""


class Refused(ValueError):
    """Flags that this run cannot have, as is seen once it has begun: a folder that another run uses, a loss that the
    model does not allow. Exit code 2."""


def check_directory(path: str, flag: str = "--save") -> None:
    """Creates the directory of a flag, and its parents; ValueError if nothing can be written there."""
    try:
        whole = Path(path).absolute()
        new = [each for each in (whole, *whole.parents) if not each.exists()]
        if new:
            os.makedirs(path, exist_ok=True)  # another rank may be doing the same
        for each in new:
            sync(each.parent)  # so that it survives a power cut
        tempfile.TemporaryFile(dir=path).close()
    except OSError as error:
        raise ValueError(
            f"{flag} {path}: {error.strerror}; name a directory that can be written"
        ) from None


def sync(path: str | Path) -> None:
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)


def discard(path: str, aside: str | None = None) -> bool:
    """Removes a directory, renamed to `aside` first if given; returns whether it is gone. Failing is only a warning."""
    try:
        if aside is not None:
            os.rename(path, aside)
        shutil.rmtree(aside or path)
    except OSError as error:
        tell(
            f"warning: {path}: could not be removed completely ({error.strerror}: {error.filename})",
            sys.stderr,
        )
        return False
    return True


def write_json(path: str, content: dict) -> None:
    with open(path, "w") as file:
        json.dump(content, file)
    sync(path)


def digest(path: str) -> list[int]:
    """[bytes, CRC-32] of a file. Damaged: missing or no plain file; CheckpointError: unreadable now, perhaps whole."""
    size = crc = 0
    try:
        if not stat.S_ISREG(os.lstat(path).st_mode):
            raise Damaged(f"{path}: is not a plain file")
        with open(path, "rb") as file:
            while block := file.read(16 << 20):
                size = size + len(block)
                crc = zlib.crc32(block, crc)
    except OSError as error:
        raise (Damaged if error.errno in DAMAGE else CheckpointError)(
            f"{path}: {error.strerror}"
        ) from error
    return [size, crc]


def _crc_of(files: dict) -> int:
    return zlib.crc32(json.dumps(files, sort_keys=True).encode())


def write_manifest(path: str, files: dict[str, list[int]]) -> None:
    """Writes the last file of a step: {file: [bytes, CRC-32]} of all others and a checksum of that; syncs `path`."""
    write_json(os.path.join(path, "manifest.json"), dict(crc32=_crc_of(files), files=files))
    sync(path)


def verify(path: str, rank: int = 0, world: int = 1) -> dict[str, list[int]]:
    """The manifest's {file: [bytes, CRC-32]}; checks every `world`-th file from `rank` on, and raises as `digest`."""
    if os.path.islink(path):
        raise Damaged(f"{path}: is a symbolic link")
    where = os.path.join(path, "manifest.json")
    digest(where)  # raises if it is not a plain file
    try:
        manifest = json.loads(Path(where).read_bytes())
        files = manifest["files"]
        checksum = manifest["crc32"]
        names = sorted(files.keys())
        sizes = {name: size for name, (size, _) in files.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise Damaged(f"{where}: is not a manifest ({type(error).__name__})") from error
    if checksum != _crc_of(files):
        raise Damaged(f"{where}: checksum differs")
    if strange := [name for name in names if not FILE.fullmatch(name)]:
        raise Damaged(f"{where}: names {strange[0]!r}, which is not a file of a checkpoint")
    if not {".metadata", "train_state.json"} <= files.keys():
        raise Damaged(f"{where}: lacks .metadata or train_state.json")
    for name in names[rank::world]:
        size, crc = digest(os.path.join(path, name))
        if [size, crc] != files[name]:
            how = (
                "checksum differs"
                if size == sizes[name]
                else f"{size} bytes instead of {sizes[name]}"
            )
            raise Damaged(f"{os.path.join(path, name)}: {how}")
    return files
