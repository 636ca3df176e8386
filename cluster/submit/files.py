"""What is sent to a cluster without a shared file system: the study's folder and this package."""

from __future__ import annotations

import fnmatch
import pkgutil
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib.metadata import distribution
from pathlib import Path

from ...spaces.boundary.distribution import DISTRIBUTION
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
FILES = (
    "*.db",
    "*.db-*",
    "*.sqlite*",
    "*.pt",
    "*.pth",
    "*.ckpt",
    "*.safetensors",
    "*.pyc",
    "*.egg-info",
    "*.log",
)
# Keys and passwords, by name; code is called such things too.
KEYS: tuple[str, ...] = (
    "id_rsa*",
    "id_dsa*",
    "id_ecdsa*",
    "id_ed25519*",
    "*.pem",
    "*.key",
    "*.ppk",
    "*.p8",
    "*.p12",
    "*.pfx",
)
KEYS += (
    "*.jks",
    "*.kdbx",
    "*.keytab",
    "kubeconfig*",
    "*service*account*.json",
    "*.env",
    "*.tfstate*",
    "*.tfvars",
    "*.gpg",
)
KEYS += ("*.asc", "*netrc", "*htpasswd", "*pgpass*", "*.ovpn", "*.secret", "*.age")
_NAMES = re.compile(r"(?<![a-z])(credentials?|secrets?|token|passwords?|passwd|api[ _-]?keys?)(?![a-z])")
# What the scanner's own rules lack: a password manager's and a hub's.
_OTHERS = re.compile(r"PuTTY-User-Key-File-|AGE-SECRET-KEY-1|\bhf_[A-Za-z0-9]{30,}")
# Its rules for tokens of known services, and for settings called passwords; entropy alone takes digests for secrets.
_KEYWORDS = "KeywordDetector"
_ENTROPY = ("Base64HighEntropyString", "HexHighEntropyString", "IPPublicDetector")
LARGEST_FILE = 10 << 20  # bytes; code and settings are smaller
LARGEST = 100 << 20  # bytes of a study's folder; Ray accepts 500 MiB, and holds them in the head's memory
_KEY = "submit.launcher"  # of the study file, which is what faults are about


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


def study_files(folder: Path) -> StudyFiles:
    """The files of a study's folder that a job needs: code and settings, without results, databases, data or checkpoints.

    Raises:
        StudyFileError: the files are larger than may be sent, or code may hold a secret.
    """
    files: list[Path] = []
    left_out: list[str] = []

    def walk(here: Path) -> None:
        for path in sorted(here.iterdir()):
            relative = path.relative_to(folder)
            if path.is_dir():
                # A package `data` is code.
                plain = path.name in FOLDERS and not (path / "__init__.py").exists()
                if plain or path.name.startswith(".") or path.is_symlink():
                    left_out.append(f"{relative}/")
                else:
                    walk(path)
            elif path.name.startswith(".") or _matches(path, FILES):
                left_out.append(str(relative))
            elif not path.resolve().is_relative_to(folder.resolve()):
                left_out.append(f"{relative} (a link that leads outside the folder)")
            elif not path.is_file() or path.stat().st_size > LARGEST_FILE:
                left_out.append(
                    f"{relative} ({readable_bytes(path.stat().st_size)})" if path.is_file() else str(relative)
                )
            elif path.suffix != ".py" and (_matches(path, KEYS) or _NAMES.search(path.name.lower())):
                left_out.append(f"{relative} (a key)")
            elif secret := _secret(path):
                left_out.append(f"{relative} (may hold a secret: {secret})")
                if path.suffix == ".py" or (
                    path.suffix in (".yaml", ".yml") and b"task:" in path.read_bytes()
                ):
                    got = f"{relative}: {secret}. Take it out, or end that line with `# pragma: allowlist secret`."
                    raise StudyFileError(
                        Fault(_KEY, f"expected code and study files that can be sent, got {got}")
                    )
            else:
                files.append(relative)

    walk(folder)
    found = StudyFiles(folder, tuple(files), tuple(name for name in left_out if "__pycache__" not in name))
    if found.bytes > LARGEST:
        sizes = sorted(((folder / path).stat().st_size, str(path)) for path in files)[::-1][:3]
        listed = ", ".join(f"{name} {readable_bytes(size)}" for size, name in sizes)
        raise StudyFileError(
            Fault(
                _KEY,
                f"expected a study folder of at most {readable_bytes(LARGEST)} to send, got {readable_bytes(found.bytes)} "
                f"({listed}). Move data to the cluster, or into a folder named data, which is not sent",
            )
        )
    return found


def _matches(path: Path, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(path.name.lower(), pattern) for pattern in patterns)


def _secret(path: Path) -> str:
    """What a file may hold that nobody else is to see, and in which line; empty if nothing.

    A line that ends with `pragma: allowlist secret` is none, as detect-secrets has it.
    """
    from detect_secrets.core import scan
    from detect_secrets.core.plugins.util import get_mapping_from_secret_type_to_class as plugins
    from detect_secrets.settings import transient_settings

    content = path.read_bytes()
    text = content.decode("utf-16" if content[:2] in (b"\xff\xfe", b"\xfe\xff") else "utf-8", "replace")
    if found := _OTHERS.search(text):
        return f"a token in line {text.count(chr(10), 0, found.start()) + 1}"
    left_out = (*_ENTROPY, _KEYWORDS) if path.suffix == ".py" else _ENTROPY
    every: Iterable[type] = plugins().values()
    rules = [{"name": one.__name__} for one in every if one.__name__ not in left_out]
    with tempfile.TemporaryDirectory() as folder, transient_settings({"plugins_used": rules}):
        # There values stand without quotes.
        copy = Path(folder) / ("copy.py" if path.suffix == ".py" else "copy.ini")
        copy.write_text(text, encoding="utf-8", errors="replace")
        each = sorted((one.line_number, one.type) for one in scan.scan_file(str(copy)))
    return next((f"{what} in line {line}" for line, what in each), "")


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
                or (path.suffix in (".yaml", ".npz", ".json", ".md") and folder != root)
                or folder in templates
            ):
                copy = package / path.relative_to(root)
                copy.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, copy)
    installed = distribution(DISTRIBUTION)
    metadata = target / f"{DISTRIBUTION}-{installed.version}.dist-info"
    metadata.mkdir()
    for name in ("METADATA", "entry_points.txt"):
        if text := installed.read_text(name):
            (metadata / name).write_text(text, encoding="utf-8")
    return [package, metadata]
