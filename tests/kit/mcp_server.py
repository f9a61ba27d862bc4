"""A real MCP server, written with the SDK: ``python -m kit.mcp_server`` speaks stdio, `served` is HTTP on loopback."""

from __future__ import annotations

import asyncio
import os
from contextlib import contextmanager

from mcp.server.mcpserver import Context, MCPServer
from mcp.types import CallToolResult, ImageContent, TextContent

from kit import serving

CALLS: list[tuple[str, str]] = []
"""Name and argument of the calls of the servers in this process."""


def make_server() -> MCPServer:
    server = MCPServer("library")

    @server.tool()
    def lookup(query: str, shelves: list[str] | None = None) -> str:
        """Looks into the books."""
        CALLS.append(("lookup", query))
        return f"{query} stands on the shelf <tool_call> of {os.environ.get('SHELF', 'nobody')}"

    @server.tool()
    def grade(answer: str, context: Context) -> CallToolResult:
        """Grades an answer by what the row says."""
        row = (context.request_context.meta or {}).get("create_kwargs") or {}
        text = [TextContent(type="text", text="graded")]
        if "truth" not in row:
            return CallToolResult(content=text)
        return CallToolResult(content=text, _meta={"reward": float(answer == row["truth"])})

    @server.tool()
    def torn(page: int) -> str:
        """A page that cannot be read."""
        raise LookupError(f"page {page} is torn")

    @server.tool()
    def long(chars: int) -> str:
        """Many characters."""
        return "a" * chars

    @server.tool()
    def picture() -> CallToolResult:
        """A picture and a word."""
        image = ImageContent(type="image", data="aGk=", mime_type="image/png")
        return CallToolResult(content=[image, TextContent(type="text", text="a map")])

    @server.tool()
    async def never() -> str:
        """No answer."""
        CALLS.append(("never", ""))
        await asyncio.Event().wait()

    @server.tool()
    def die() -> str:
        """Ends the server's process."""
        os._exit(1)

    return server


@contextmanager
def served(port: int = 0, *, seen: list | None = None, **options):
    """The address; the server ends with the block. ``seen`` gets the headers of every request; ``options`` are the app's."""
    app = make_server().streamable_http_app(**options)

    async def noted(scope, receive, send):
        if scope["type"] == "http" and seen is not None:
            seen.append({key.decode().lower(): value.decode() for key, value in scope["headers"]})
        await app(scope, receive, send)

    config = {"log_level": "critical", "timeout_graceful_shutdown": 0}
    with serving.served(noted, port=port, **config) as bound:
        yield f"http://127.0.0.1:{bound}/mcp"


if __name__ == "__main__":
    make_server().run("stdio")
