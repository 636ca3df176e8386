"""The pages: what they tell people to type runs, what they list is whole, and nothing in them is fetched from elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import click
import pytest
from bsearch import __version__
from bsearch.cli import main
from bsearch.spaces.boundary.distribution import DISTRIBUTION
from bsearch.spaces.learning_rate import RATE_RULES
from bsearch.spaces.study.spec import StudySpec
from conftest import BSEARCH

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
# A marker and the fenced block after it: `<!-- run -->` is typed into a shell, `<!-- file: NAME -->` is written first.
MARKED = re.compile(r"<!-- (run|file: (?P<name>[\w./-]+)) -->\n```\w*\n(?P<text>.*?)```\n", re.DOTALL)
PAGES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in [ROOT / "README.md", *DOCS.rglob("*.md")]
    if MARKED.search(page.read_text())
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site; strict, so broken links, missing anchors and pages outside the navigation are errors."""
    pytest.importorskip("material", reason="the pages need .[docs]")
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (built.returncode, built.stdout + built.stderr) == (0, "")
    return folder


def ids(page: Path) -> set[str]:
    return set(re.findall(r'id="([^"]+)"', page.read_text()))


# The tutorial runs the same commands as these, and the notebook the same calls as python.md.
OTHERS = ("own-model", "devices", "python", "own-loop", "from-elsewhere")
TRIED_ELSEWHERE = ("README.md", *(f"docs/{name}.md" for name in OTHERS))


@pytest.mark.docs
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=pytest.mark.long) if page in TRIED_ELSEWHERE else page for page in PAGES],
)
def test_what_a_page_says_to_type_runs(page: str, tmp_path: Path) -> None:
    script = ["set -e"]
    for found in MARKED.finditer((ROOT / page).read_text()):
        if found["name"]:
            (tmp_path / found["name"]).write_text(found["text"])
        else:
            # A few trials in one process show that it runs; the pages show what a whole run prints.
            text = re.sub(r"^bsearch train ", "bsearch train --serial ", found["text"], flags=re.MULTILINE)
            script.append(
                re.sub(r"^bsearch run ", "bsearch run --serial --trials 4 ", text, flags=re.MULTILINE)
            )
    environment = {**os.environ, "PATH": f"{BSEARCH.parent}:{os.environ['PATH']}"}
    done = subprocess.run(
        ["bash", "-c", "\n".join(script)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_some_pages_are_tried() -> None:
    assert {"README.md", "docs/tutorial.md", "docs/own-model.md", "docs/own-loop.md"} <= set(PAGES)


def test_the_reference_is_that_of_this_code() -> None:
    spec = importlib.util.spec_from_file_location("docs_hooks", DOCS / "hooks.py")
    assert spec is not None and spec.loader is not None
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    for rule in RATE_RULES:
        assert "rate = " in hooks.rule_fact(rule, "Formula") and "arXiv" in hooks.rule_fact(rule, "Source")
        assert hooks.rule_fact(rule, "Summary").endswith(".")
    for page, content in hooks.written_pages():
        assert page.read_text() == content, f"{page.name} is out of date: python docs/hooks.py"


def typed(page: Path) -> Iterator[tuple[click.Command, str]]:
    """Each command of ours that a page has in code, with the options that it is given."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    blocks = re.findall(r"^```.*?\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    lines = [line for block in blocks for line in block.splitlines()] + re.findall(r"`([^`\n]+)`", text)
    for found in (re.match(r"\s*(?:\$ )?bsearch ((?:[a-z]+ ?)+)(.*)", line) for line in lines):
        command: click.Command | None = main if found else None
        for word in found[1].split() if found else ():
            command = command.commands.get(word, command) if isinstance(command, click.Group) else command
        if found and command is not None and command is not main:
            yield from (
                (command, option)
                for option in re.findall(
                    r"(?:^| )(--[a-z][\w-]+)", re.split(r"(?:^| )-- | [#|>] ?|&&", found[2])[0]
                )
            )


@pytest.mark.parametrize(
    "page",
    [
        ROOT / "README.md",
        *sorted(set(DOCS.rglob("*.md")) - {DOCS / "log.md"} - set(DOCS.glob("decisions/*"))),
    ],
    ids=lambda page: page.stem,
)
def test_options_that_a_page_names_are_there(page: Path) -> None:
    for command, option in typed(page):
        assert option in {
            name for one in command.params for name in (*one.opts, *one.secondary_opts, "--help")
        }, (
            command.name,
            option,
        )


def commands(command: click.Command, path: str = "bsearch") -> Iterator[str]:
    for name, one in getattr(command, "commands", {}).items():
        yield f"{path}-{name}"
        yield from commands(one, f"{path}-{name}")


@pytest.mark.slow
def test_every_command_rule_and_key_is_in_the_reference(site: Path) -> None:
    assert set(commands(main)) <= ids(site / "reference" / "commands.html")
    assert set(RATE_RULES) <= ids(site / "reference" / "rules.html")
    assert set(keys(StudySpec.model_json_schema())) <= ids(site / "reference" / "study.html")


def keys(schema: Mapping[str, Any]) -> Iterator[str]:
    """Every key of a study file by its path; what a searched parameter is made of has a table of its own."""
    parts = schema["$defs"]

    def within(part: Mapping[str, Any], path: str) -> Iterator[str]:
        for key, value in part["properties"].items():
            yield path + key
            for name in dict.fromkeys(re.findall(r"#/\$defs/(\w+)", str(value))):
                if name not in ("Range", "Choices", "Fixed"):
                    yield from within(parts[name], f"{path}{key}.")

    return within(schema, "")


def test_every_key_says_what_it_means() -> None:
    schema = StudySpec.model_json_schema()
    for name, part in {"study": schema, **schema["$defs"]}.items():
        for key, value in part["properties"].items():
            meaning = (
                value.get("description") or schema["$defs"][value["$ref"].rpartition("/")[2]]["description"]
            )
            assert meaning.endswith("."), f"{name}.{key}: {meaning!r} is no sentence"


@pytest.mark.slow
def test_nothing_is_fetched_from_elsewhere(site: Path) -> None:
    fetched = re.compile(
        r'<(?:script|img|iframe|source)[^>]+src="(?:https?:)?//|<link[^>]+(?:stylesheet|preconnect|icon)[^>]+"(?:https?:)?//'
    )
    for page in site.rglob("*.html"):
        text = page.read_text()
        assert not fetched.search(text), f"{page.name}: {fetched.search(text)}"
    for style in site.rglob("*.css"):
        assert not re.search(r"url\(['\"]?(?:https?:)?//|@import", style.read_text()), style.name


def test_the_readmes_walk_is_true() -> None:
    """Each numbered file is there, and is imported by one before it."""
    readme = (ROOT / "README.md").read_text()
    folder, walk = "", []
    for line in readme[readme.index("## The code") :].splitlines():
        if found := re.match(r"(\s*)(\S+?\.py)\s+\((\d+)\)", line):
            walk.append((int(found[3]), ROOT / (folder if found[1] else "") / found[2]))
        elif found := re.match(r"(\w+/) ", line):
            folder = found[1]
    walk.sort()
    assert [number for number, _ in walk] == list(range(1, 15))
    for place, (_, path) in enumerate(walk[1:], 1):
        name = path.stem if path.parent.name != "commands" else path.name
        before = "".join(one.read_text() for _, one in walk[:place])
        assert re.search(rf"\.{name}(:\w+\"| import)", before), path


# Texts that people run, and that neither the type checker nor an import of the package reads.
WRITTEN_TO_BE_RUN = sorted(
    path.relative_to(ROOT).as_posix()
    for pattern in (
        "*.md",
        "docs/*",
        "examples/**/*.*",
        "benchmarks/**/*.py",
        "objectives/starter/*",
        "search/report/**/*.jinja",
    )
    for path in ROOT.glob(pattern)
    if path.suffix in (".md", ".py", ".ipynb", ".jinja", ".yaml") and "from bsearch" in path.read_text()
)


@pytest.mark.parametrize("text", WRITTEN_TO_BE_RUN)
def test_what_a_text_imports_is_there(text: str) -> None:
    written = re.findall(
        r'^[ "]*from (bsearch[\w.]*) import (\([^)]*\)|[\w, ]+)', (ROOT / text).read_text(), re.MULTILINE
    )
    for module, names in written:
        imported = [name.split(" as ")[0].strip() for name in names.strip("()").split(",")]
        missing = [
            name
            for name in imported
            if name
            and not hasattr(importlib.import_module(module), name)
            and not importlib.util.find_spec(f"{module}.{name}")
        ]
        assert not missing, f"{text}: {module} has no {', '.join(missing)}"


# What the package index has under the name of our command is another project, which such a line would install.
ANOTHER_PROJECT = re.compile(
    r"\bbsearch\[(?!\\)|\b(?:pip3?|pipx|uv|uvx) (?:(?:pip|tool|install|add|-\S+) )*['\"]?bsearch\b|Install bsearch\b"
)

TEXTS = (".md", ".py", ".yaml", ".yml", ".ipynb", ".jinja", ".sh", "Makefile")


def test_nothing_tells_to_install_the_other_project_of_this_name() -> None:
    texts = [
        path for pattern in ("*", "[!.]*/**/*") for path in ROOT.glob(pattern) if path.name.endswith(TEXTS)
    ]
    found = [
        f"{path.relative_to(ROOT)}: {line}"
        for path in texts
        if path != Path(__file__)
        for line in path.read_text().splitlines()
        if ANOTHER_PROJECT.search(line)
    ]
    assert not found
    typed = [
        "pip install bsearch",
        "pip install 'bsearch[mcp]'",
        "uv add bsearch",
        "uvx bsearch",
        "uv tool install -U bsearch",
    ]
    assert all(map(ANOTHER_PROJECT.search, typed))
    assert not ANOTHER_PROJECT.search("pip install '.[mcp]'  # in a checkout of bsearch")


def test_the_package_is_installed_under_one_name() -> None:
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == DISTRIBUTION
    assert __version__ == distribution(DISTRIBUTION).version
    commands = [point.value for point in distribution(DISTRIBUTION).entry_points if point.name == "bsearch"]
    assert commands == ["bsearch.__main__:main"]


def test_links_of_the_readme_lead_somewhere() -> None:
    for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text()):
            if "://" in target:
                continue
            path, _, anchor = target.partition("#")
            assert not path or (ROOT / path).exists(), f"{name}: {target}"
            if anchor:
                text = (ROOT / (path or name)).read_text()
                slugs = {
                    re.sub(r"[^\w\- ]", "", head).strip().lower().replace(" ", "-")
                    for head in re.findall(r"^#+ (.+)$", text, re.M)
                }
                assert anchor in slugs or f"{{#{anchor}}}" in text, f"{name}: {target}"


@pytest.mark.browser
def test_the_site_opens_from_a_disk_and_searches(site: Path) -> None:
    playwright = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("no chromium here")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page()
        asked: list[str] = []
        faults: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.goto((site / "index.html").as_uri())
        page.locator("input.md-search__input").click()
        page.keyboard.type("largest_micro_batch")
        page.locator(".md-search-result__item a[href*='study.html']").first.wait_for(
            state="attached", timeout=120_000
        )
        browser.close()
    assert not faults
    assert all(url.startswith(("file:", "data:", "about:", "blob:")) for url in asked), asked
