"""Storage URLs: reading them from the environment, and detecting network file systems."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePath

from .errors import StudyFileError

# File systems whose locks and shared memory are unreliable for SQLite's write-ahead log (https://sqlite.org/wal.html).
# fmt: off
NETWORK_FILE_SYSTEMS = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "davfs", "fhgfs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs",
    "fuse.juicefs", "fuse.mfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "fuse.vmhgfs-fuse", "gfs2", "glusterfs",
    "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs", "vboxsf",
    "wekafs",
})
# fmt: on


def storage_of(environment: Mapping[str, str]) -> str | None:
    """The storage URL in `BSEARCH_STORAGE`, or in the file named by `BSEARCH_STORAGE_FILE`; None if neither is set.

    Raises:
        StudyFileError: the file cannot be read, or does not contain exactly one URL.
    """
    if url := environment.get("BSEARCH_STORAGE"):
        return url
    file = environment.get("BSEARCH_STORAGE_FILE")
    if not file:
        return None
    try:
        url = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise StudyFileError(f"BSEARCH_STORAGE_FILE: {file}: cannot be read: {reason}") from None
    if len(url.split()) != 1:
        raise StudyFileError(f"BSEARCH_STORAGE_FILE: {file}: expected one storage URL and nothing else")
    return url


def network_file_system(mounts: str, folder: PurePath) -> str | None:
    """The type of a folder's file system if it is a network file system, otherwise None.

    Args:
        mounts: the text of /proc/mounts.
        folder: an absolute path without symbolic links.

    >>> network_file_system("/dev/sda1 / ext4 rw 0 0\\nserver:/home /home nfs4 rw 0 0", PurePath("/home/ann/study"))
    'nfs4'
    """
    depth, found = -1, ""
    for line in mounts.splitlines():
        _, mount, kind, *_ = [*line.split(" "), "", "", ""]
        point = PurePath(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), mount))
        # A later mount on the same point hides an earlier one.
        if mount and len(point.parts) >= depth and folder.is_relative_to(point):
            depth, found = len(point.parts), kind
    return found if found in NETWORK_FILE_SYSTEMS else None
