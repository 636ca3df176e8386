"""Where a study is kept: what of its URL may be shown, where a secret URL is read from, what its folder lies on."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path, PurePath

from .errors import StudyFileError

# To the last @: a password that was not percent-encoded may hold one itself.
_PASSWORD = re.compile(r"(^(?!\S*//)|//)([^:/@\s]*:)\S*@")
_SECRET_OPTION = re.compile(r"([?&][^=&\s]*(?:pass|pwd|secret|token)[^=&\s]*=)[^&\s'\"]*", re.IGNORECASE)

# File systems whose locks and shared memory SQLite's write-ahead log cannot trust (https://sqlite.org/wal.html).
# fmt: off
NETWORK_FILE_SYSTEMS = frozenset({
    "9p", "afs", "beegfs", "ceph", "cifs", "davfs", "fhgfs", "fuse.ceph", "fuse.gcsfuse", "fuse.glusterfs",
    "fuse.juicefs", "fuse.mfs", "fuse.rclone", "fuse.s3fs", "fuse.sshfs", "fuse.vmhgfs-fuse", "gfs2", "glusterfs",
    "gpfs", "lustre", "ncpfs", "nfs", "nfs4", "ocfs2", "orangefs", "panfs", "pvfs2", "smb2", "smb3", "smbfs", "vboxsf",
    "wekafs",
})
# fmt: on


def masked(text: str) -> str:
    """A storage URL, or a text with one in it, without its passwords.

    >>> masked("postgresql+psycopg://ann:s3cret@db/studies?sslpassword=x&sslmode=require")
    'postgresql+psycopg://ann:***@db/studies?sslpassword=***&sslmode=require'
    """
    return _SECRET_OPTION.sub(r"\1***", _PASSWORD.sub(r"\1\2***@", text))


def storage_of(environment: Mapping[str, str]) -> str | None:
    """The storage that `BSEARCH_STORAGE` names, or the file that `BSEARCH_STORAGE_FILE` names holds; None where neither does.

    Raises:
        StudyFileError: the file cannot be read or holds nothing.
    """
    if url := environment.get("BSEARCH_STORAGE"):
        return url
    file = environment.get("BSEARCH_STORAGE_FILE")
    if not file:
        return None
    try:
        url = Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is no text"
        raise StudyFileError(f"BSEARCH_STORAGE_FILE: {file}: cannot be read: {why}") from None
    if len(url.split()) != 1:
        raise StudyFileError(f"BSEARCH_STORAGE_FILE: {file}: expected one storage URL and nothing else")
    return url


def network_file_system(mounts: str, folder: PurePath) -> str | None:
    """The type of the file system that holds a folder, where it is one of a network; None elsewhere.

    Args:
        mounts: the text of /proc/mounts.
        folder: an absolute path without symbolic links.

    >>> network_file_system("/dev/sda1 / ext4 rw 0 0\\nserver:/home /home nfs4 rw 0 0", PurePath("/home/ann/study"))
    'nfs4'
    """
    depth, found = -1, ""
    for line in mounts.splitlines():
        _, place, kind, *_ = [*line.split(" "), "", "", ""]
        point = PurePath(re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), place))
        # Of two on the same place the later one hides the earlier.
        if place and len(point.parts) >= depth and folder.is_relative_to(point):
            depth, found = len(point.parts), kind
    return found if found in NETWORK_FILE_SYSTEMS else None
