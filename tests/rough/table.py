"""A table of attacks: kind, tried, broken at an earlier commit, broken now.

    python tests/rough/table.py [COMMIT]

The earlier commit is checked out beside this one and given this folder's attacks; without one, only today's are counted.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent


def counted(root: Path, python: Path) -> dict[str, dict[str, int]]:
    """Attacks tried and broken by kind, against the version in `root`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "counts.json"
        command = [
            python,
            "-m",
            "pytest",
            "-q",
            "--tb=no",
            "-n",
            "2",
            "-m",
            "rough",
            "--timeout=1200",
            "tests/rough",
        ]
        subprocess.run(
            command,
            cwd=root,
            env={**os.environ, "BSEARCH_ATTACKS": str(file)},
            stdout=sys.stderr,
            check=False,
        )
        return json.loads(file.read_text()) if file.exists() else {}  # type: ignore[no-any-return]


def before(commit: str) -> dict[str, dict[str, int]]:
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "before"
        subprocess.run(
            ["git", "worktree", "add", "--detach", root, commit], cwd=ROOT, check=True, stdout=sys.stderr
        )
        try:
            subprocess.run(["make", "install"], cwd=root, check=True, stdout=sys.stderr)
            conftest = root / "tests" / "conftest.py"
            if "attacks" not in conftest.read_text():
                conftest.write_text(conftest.read_text() + '\npytest_plugins = ["attacks"]\n')
            shutil.copy(ROOT / "tests" / "attacks.py", root / "tests" / "attacks.py")
            shutil.copytree(ROOT / "tests" / "rough", root / "tests" / "rough", dirs_exist_ok=True)
            pyproject = root / "pyproject.toml"
            pyproject.write_text(
                pyproject.read_text().replace("markers = [\n", 'markers = [\n  "rough: attacks",\n', 1)
            )
            return counted(root, root / ".venv" / "bin" / "python")
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", root], cwd=ROOT, check=True)


def main(commit: str | None) -> None:
    earlier = before(commit) if commit else {}
    now = counted(ROOT, Path(sys.executable))
    print(f"{'kind':60}{'tried':>7}{'broken before':>15}{'broken now':>12}")
    for kind, counts in sorted(now.items()):
        was = earlier.get(kind)
        before_now = "" if was is None else f"{was['broken']} of {was['tried']}"
        print(f"{kind:60}{counts['tried']:7}{before_now:>15}{counts['broken']:12}")
    total = [
        sum(counts[key] for counts in table.values())
        for table, key in ((now, "tried"), (earlier, "broken"), (now, "broken"))
    ]
    print(f"{'all':60}{total[0]:7}{total[1] if earlier else '':>15}{total[2]:12}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else None)
