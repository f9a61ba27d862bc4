"""Environments behind OpenEnv's wire: one WebSocket is one session with an environment of its own (``websockets``)."""

from __future__ import annotations

import json
from contextlib import ExitStack
from typing import Any

from verl_credit.worlds.environments.interface import Step


class OpenEnv:
    """The environment at ``url``. ``field``: the field of the action that gets the policy's text; without one the text is
    the action as JSON. ``text``: the field of the observation that is shown; without one the observation is shown as JSON.

    A reward of null is no reward (the server also writes NaN so), and nothing on the wire says success.
    """

    def __init__(self, url: str, field: str | None = None, text: str | None = None):
        self.url, self.field, self.text, self.opened = url, field, text, ExitStack()

    def reset(self, seed: int, options: dict) -> Step:
        from websockets.sync.client import connect

        address = self.url.replace("http", "ws", 1) if self.url.startswith("http") else self.url
        session = connect(f"{address.rstrip('/')}/ws", max_size=2**27, proxy=None)
        self.socket = self.opened.enter_context(session)
        return self._seen(self._ask({"type": "reset", "data": {"seed": seed, **options}}))

    def step(self, action: str) -> Step:
        try:
            data = {self.field: action} if self.field else json.loads(action)
        except ValueError:
            return Step("The action is no JSON.", valid=False)
        answer = self._ask({"type": "step", "data": data})
        if answer["type"] == "error":
            return Step(f"The action was refused: {answer['data'].get('message', '')}", valid=False)
        return self._seen(answer)

    def close(self) -> None:
        self.opened.close()

    def _ask(self, request: dict) -> dict:
        """Raises ConnectionError where the server is gone, and RuntimeError for any error but a wrong action."""
        from websockets.exceptions import ConnectionClosed

        try:
            self.socket.send(json.dumps(request))
            answer = json.loads(self.socket.recv())
        except ConnectionClosed as error:
            raise ConnectionError(f"{self.url}: {error}") from error
        wrong_action = request["type"] == "step" and answer["data"].get("code") == "VALIDATION_ERROR"
        if answer["type"] == "error" and not wrong_action:
            raise RuntimeError(f"{self.url}: {answer['data'].get('code')}: {answer['data'].get('message')}")
        return answer

    def _seen(self, answer: dict[str, Any]) -> Step:
        data = answer["data"]
        observation = data["observation"]
        shown = observation[self.text] if self.text else json.dumps(observation)
        return Step(shown, reward=data.get("reward"), terminated=bool(data.get("done")))
