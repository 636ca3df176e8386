"""`bsearch mcp`: tools and resources of the Model Context Protocol, over stdin and stdout, for one folder.

Protocol and SDK: https://modelcontextprotocol.io. What the tools say comes from `folder.py`, which asks the commands.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from mcp.server.mcpserver import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.types import CallToolResult, TextContent

from ... import __version__
from ...search.report.stdio.answer import schemas
from ...spaces.errors import BsearchError, StudyFileError, cut
from ...spaces.study.spec import Framework, StudySpec
from .folder import Folder, error_document


class _Server(MCPServer):
    """Answers with one JSON document, errors alike; what no tool knows is refused, not ignored."""

    async def call_tool(self, name: str, arguments: dict[str, Any], context: Any = None) -> Any:
        tool = self._tool_manager.get_tool(name)
        try:
            if tool is not None and (
                unknown := sorted(arguments.keys() - tool.parameters["properties"].keys())
            ):
                known = ", ".join(tool.parameters["properties"])
                raise StudyFileError(f"{name}: expected {known}, got {cut(', '.join(unknown), 200)}")
            return await super().call_tool(name, arguments, context)
        except (BsearchError, ToolError) as error:
            cause = error.__cause__ if isinstance(error, ToolError) else error
            return _result(
                error_document(cause if isinstance(cause, BsearchError) else StudyFileError(cut(str(error))))
            )


def _result(document: Mapping[str, Any]) -> CallToolResult:
    text = TextContent(type="text", text=json.dumps(document, separators=(",", ":")))
    return CallToolResult(content=[text], structured_content=dict(document), is_error="error" in document)


class Tools:
    """A tool for each method."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder

    async def check(self, study: str, settings: Settings = ()) -> CallToolResult:
        """Validate a study file and forecast it: plans, seconds, what limits speed. Settings: KEY=VALUE, as space.width=32."""
        self.folder.study(study, settings)
        changes = [part for one in settings for part in ("--set", one)]
        return _result(await self.folder.ask("check", self.folder.path(study), *changes))

    async def run(
        self, study: str, trials: int | None = None, settings: Settings = (), serial: bool = False
    ) -> CallToolResult:
        """Start a study, or resume it, and return at once; poll with status. Starting it twice runs it once."""
        return _result(await self.folder.run(study, trials, settings, serial))

    async def status(self, study: str) -> CallToolResult:
        """Whether a study runs, its trials by outcome, its front, and how its last run ended."""
        return _result(await self.folder.status(study))

    async def stop(self, study: str) -> CallToolResult:
        """Stop a study's run on this machine. Nothing is lost: run resumes it."""
        return _result(await self.folder.stop(study))

    async def front(self, study: str) -> CallToolResult:
        """The Pareto front of speed against the metric, its best trial, what limits speed, and commands that use it."""
        return _result(await self.folder.of_study(study, "show"))

    async def explain(self, study: str, trial: int) -> CallToolResult:
        """One trial: its settings, its learning curve, its attempts and errors."""
        return _result(await self.folder.of_study(study, "show", "--pick", str(trial)))

    async def ask(self, source: str, until: float | None = None) -> CallToolResult:
        """What a study's trials, or a table of runs that exist, can tell: best rates by batch, noise, blow-ups, the next runs;
        with until, the samples that it takes to reach a value of the metric.
        """
        if source.endswith((".yaml", ".yml")):
            self.folder.study(source)
        options = () if until is None else ("--until", repr(until))
        return _result(await self.folder.ask("ask", self.folder.path(source), *options))

    async def compare(
        self,
        study: str,
        change: str | None = None,
        against: str | None = None,
        trials: int | None = None,
        margin: float = 0.0,
    ) -> CallToolResult:
        """Whether a change is better, each side at its best settings: study with change, another study file; or study as it is
        now against a git revision. Says better, worse or cannot tell; pending where it is not settled yet: ask again.
        """
        if (change is None) == (against is None):
            raise StudyFileError("compare: expected change or against, one of them")
        names = [study] if change is None else [study, change]
        specs = [self.folder.study(name) for name in names]
        options = [] if against is None else [f"--against={against}"]
        options += [] if trials is None else ["--trials", str(trials)]
        options += ["--margin", repr(margin), "--serial"]
        return _result(await self.folder.compare([*map(self.folder.path, names)], specs[0].study, options))

    async def export(self, study: str, to: Framework, trial: int) -> CallToolResult:
        """A trial's settings for another library, as text to paste."""
        self.folder.study(study)
        return _result(
            await self.folder.text("export", self.folder.path(study), "--to", to, "--pick", str(trial))
        )


Settings = Sequence[str]


def server(root: Path) -> MCPServer:
    """The server of a folder."""
    tools, kit = Tools(Folder(root)), _Server("bsearch", version=__version__, instructions=skill())
    runs_code: Sequence[Callable[..., Any]] = (tools.check, tools.run, tools.compare)
    reads: Sequence[Callable[..., Any]] = (
        tools.status,
        tools.stop,
        tools.front,
        tools.explain,
        tools.ask,
        tools.export,
    )
    for tool in runs_code:
        kit.add_tool(
            tool,
            description=f"{tool.__doc__} A study's task is Python code, which this runs with your rights.",
        )
    for tool in reads:
        kit.add_tool(tool)

    @kit.resource("bsearch://schemas/{name}", mime_type="application/json")
    def schema(name: Literal["study", "answers"]) -> str:
        """The JSON Schema of study files, or of answers."""
        return json.dumps(StudySpec.model_json_schema() if name == "study" else schemas())

    @kit.resource("bsearch://skill", mime_type="text/markdown")
    def how() -> str:
        """When to use bsearch, recipes, and what its numbers mean."""
        return skill()

    return kit


def skill() -> str:
    """What an agent has to know, in a page."""
    return resources.files(__package__).joinpath("SKILL.md").read_text(encoding="utf-8")


def serve(root: Path) -> None:
    """Serve a folder until stdin ends."""
    server(root).run("stdio")
