"""Reads a request's body as JSON, without what Python accepts beyond it."""

import json

from fastapi import Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException


def loads(body: bytes):
    """The value of a JSON text. Errors: json.JSONDecodeError; HTTPException 422 for NaN, Infinity, and a name that occurs
    twice in an object: which of its values was meant, nobody knows."""
    return json.loads(body, object_pairs_hook=_object, parse_constant=_refuse)


def _object(pairs: list[tuple[str, object]]) -> dict:
    found = {}
    for name, value in pairs:
        if name in found:
            raise HTTPException(422, f"{name[:40]!r} occurs twice in the body")
        found[name] = value
    return found


def _refuse(constant: str):
    raise HTTPException(422, f"body: {constant} is not JSON")


class StrictJsonRoute(APIRoute):
    """A route whose bodies `loads` reads."""

    def get_route_handler(self):
        handle = super().get_route_handler()

        async def strict(request: Request):
            return await handle(_Request(request.scope, request.receive))

        return strict


class _Request(Request):
    async def json(self):
        if not hasattr(self, "_json"):
            self._json = loads(await self.body())
        return self._json
