"""What is sent to a cluster without a shared file system: the study's folder and this package."""

from __future__ import annotations

import fnmatch
import pkgutil
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

from ...spaces.errors import Fault, StudyFileError
from ...spaces.readable import readable_bytes

# Not sent, by name: what can be rebuilt, data, and the results and checkpoints of other runs.
FOLDERS = (
    "results",
    "data",
    "datasets",
    "checkpoints",
    "wandb",
    "mlruns",
    "build",
    "dist",
    "node_modules",
    "venv",
    "__pycache__",
)
FILES = ("*.db", "*.db-*", "*.sqlite*", "*.pt", "*.pth", "*.ckpt", "*.safetensors", "*.pyc", "*.egg-info", "*.log")
# Keys and passwords, by name or by how the file begins.
KEYS: tuple[str, ...] = ("id_rsa*", "id_dsa*", "id_ecdsa*", "id_ed25519*", "*.pem", "*.key", "*.ppk", "*.p12", "*.pfx", "*.jks")
KEYS += ("*.kdbx", "*.keytab", "kubeconfig*", "secrets.*", "client_secret*.json", "*service*account*.json")
KEYS += ("*credentials*.json", "credentials.csv")
_KEY_BEGINS = re.compile(rb"-----BEGIN [A-Z ]{0,40}PRIVATE KEY|PuTTY-User-Key-File-|AGE-SECRET-KEY-1")
LARGEST_FILE = 10 << 20  # bytes; code and settings are smaller


@dataclass(frozen=True, slots=True)
class StudyFiles:
    """A folder's files by relative path, and what of it is not sent."""

    folder: Path
    kept: tuple[Path, ...]
    left_out: tuple[str, ...]

    @property
    def bytes(self) -> int:
        return sum((self.folder / path).stat().st_size for path in self.kept)

    def copy_to(self, target: Path) -> Path:
        for path in self.kept:
            (target / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(self.folder / path, target / path)
        return target


def study_files(folder: Path, largest: int, key: str) -> StudyFiles:
    """The files of a study's folder that a job needs: code and settings, without results, databases, data or checkpoints.

    Args:
        largest: bytes that may be sent in total.
        key: of the study file, for the error message.

    Raises:
        StudyFileError: the files are larger than that.
    """
    files: list[Path] = []
    left_out: list[str] = []

    def walk(here: Path) -> None:
        for path in sorted(here.iterdir()):
            relative = path.relative_to(folder)
            if path.is_dir():
                plain = path.name in FOLDERS and not (path / "__init__.py").exists()  # a package `data` is code
                if plain or path.name.startswith(".") or path.is_symlink():
                    left_out.append(f"{relative}/")
                else:
                    walk(path)
            elif path.name.startswith(".") or _matches(path, FILES):
                left_out.append(str(relative))
            elif not path.resolve().is_relative_to(folder.resolve()):
                left_out.append(f"{relative} (a link that leads outside the folder)")
            elif _is_key(path):
                left_out.append(f"{relative} (a key)")
            elif not path.is_file() or path.stat().st_size > LARGEST_FILE:
                left_out.append(f"{relative} ({readable_bytes(path.stat().st_size)})" if path.is_file() else str(relative))
            else:
                files.append(relative)

    walk(folder)
    found = StudyFiles(folder, tuple(files), tuple(name for name in left_out if "__pycache__" not in name))
    if found.bytes > largest:
        sizes = sorted(((folder / path).stat().st_size, str(path)) for path in files)[::-1][:3]
        listed = ", ".join(f"{name} {readable_bytes(size)}" for size, name in sizes)
        raise StudyFileError(
            Fault(
                key,
                f"expected a study folder of at most {readable_bytes(largest)} to send, got {readable_bytes(found.bytes)} "
                f"({listed}). Move data to the cluster, or into a folder named data, which is not sent",
            )
        )
    return found


def _matches(path: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(path.name.lower(), pattern) for pattern in patterns)


def _is_key(path: Path) -> bool:
    if _matches(path, KEYS) and path.suffix != ".py":  # a module secrets.py is code
        return True
    if not path.is_file():
        return False
    with path.open("rb") as file:
        return _KEY_BEGINS.search(file.read(4096)) is not None


def copy_package(target: Path) -> list[Path]:
    """Copy this package and its metadata, laid out as in an installed wheel.

    It works the same from an installed wheel and from a checkout, without building anything.

    Returns:
        The folders of the package and of its metadata; with their parent on the path, the package can be imported.
    """
    root = Path(__file__).parents[2]
    packages = [module.name for module in pkgutil.walk_packages([str(root)], "bsearch.") if module.ispkg]
    folders = [root, *(root.joinpath(*name.split(".")[1:]) for name in packages)]
    templates = [folder / "templates" for folder in folders[1:] if (folder / "templates").is_dir()]
    package = target / "bsearch"
    for folder in [*folders, *templates]:
        for path in folder.iterdir():
            # From a checkout's root, only what the wheel contains.
            if path.is_file() and (
                path.suffix == ".py"
                or path.name == "py.typed"
                or (path.suffix == ".yaml" and folder != root)
                or folder in templates
            ):
                copy = package / path.relative_to(root)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
    installed = distribution("bsearch")
    metadata = target / f"bsearch-{installed.version}.dist-info"
    metadata.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        if text := installed.read_text(name):
            (metadata / name).write_text(text, encoding="utf-8")
    return [package, metadata]
