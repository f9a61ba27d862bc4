"""Adapters of packages that are not installed here, on stubs that speak their interface as it was found by running them."""

import json
import sys
from contextlib import contextmanager
from threading import Thread
from types import SimpleNamespace

import pytest

from verl_credit.worlds.environments.interface import BadAnswer, checked
from verl_credit.worlds.environments.process import load


class Game:
    """TextWorld's: three commands win; the fourth room is never seen."""

    closed, objective = False, "Win."

    def seed(self, seed):
        self.seeded = seed

    def reset(self):
        self.done = 0
        return self._state("Welcome.\n\n\nA room.\n> -= Room =-0/3")

    def step(self, text):
        self.done += text == f"go {self.done}"
        return self._state(f"You {text}.\n> status"), self.done, self.done == 3

    def _state(self, feedback):
        left = [f"go {n}" for n in range(self.done, 3)]
        told = {
            "feedback": feedback,
            "objective": self.objective,
            "description": f"room {self.done}",
            "inventory": "",
        }
        may = {"policy_commands": left, "admissible_commands": ["look", *left[:1]]}
        return SimpleNamespace(score=2 * self.done, won=self.done == 3, **told, **may)

    def close(self):
        self.closed = True


def test_textworld_earns_what_its_score_rises_by(monkeypatch):
    game, asked = Game(), []
    stub = SimpleNamespace(
        EnvInfos=lambda **infos: infos, start=lambda *a, **more: asked.append((a, more)) or game
    )
    monkeypatch.setitem(sys.modules, "textworld", stub)
    env = load("textworld")()
    first = env.reset(3, {"game": "g.z8"})
    assert asked[0][0] == ("g.z8",) and asked[0][1]["request_infos"]["policy_commands"] and game.seeded == 3
    assert (first.observation, first.actions, first.progress) == ("Win.\nroom 0", ["look", "go 0"], 0)
    steps = [env.step(text) for text in ("go 0", "look", "go 1", "go 2")]
    assert [step.reward for step in steps] == [2, 0, 2, 2] and [step.success for step in steps] == [
        False
    ] * 3 + [True]
    assert steps[0].progress == pytest.approx(1 / 3) and steps[0].state == steps[1].state != steps[2].state
    assert steps[3].terminated and steps[1].observation == "You look."
    env.close()
    assert game.closed
    game.objective = ""  # a game of somebody else's
    assert load("textworld")().reset(3, {"game": "g.z8"}).observation == "Welcome.\nA room."
    with pytest.raises(ValueError, match=r"options\.game"):
        load("textworld")().reset(0, {})


class Hanoi:
    """TextArena's: every observation is the whole game so far; the end has a reward."""

    def __init__(self, reward):
        self.state = SimpleNamespace(rewards=None, game_info={0: {}}, error_count=0)
        self.reward, self.text = reward, ""

    def reset(self, num_players, seed):
        assert num_players == 1
        self.text = f"Rules of game {seed}."

    def get_observation(self):
        return 0, self.text

    def step(self, action):
        self.text += f"\n[Player] {action}\n[GAME] moved"
        wrong = action == "what?"
        self.state.error_count = wrong and self.state.error_count + 1
        done = action == "last" or self.state.error_count > 1
        if done:
            said = {"reason": "Invalid.", "invalid_move": True} if wrong else {"reason": "Solved."}
            self.state.rewards, self.state.game_info = {0: -1 if wrong else self.reward}, {0: said}
        return done, {}


def test_textarena_hands_on_what_is_new(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", SimpleNamespace(make=lambda id, **kwargs: Hanoi(**kwargs)))
    env = load("textarena")("TowerOfHanoi-v0", reward=1)
    assert env.reset(5, {}).observation == "Rules of game 5."
    step = env.step("[A C]")
    assert (step.observation, step.reward, step.done) == ("[Player] [A C]\n[GAME] moved", None, False)
    last = env.step("last")
    assert (last.observation, last.reward, last.terminated, last.success) == ("Solved.", 1, True, True)
    env = load("textarena")("TowerOfHanoi-v0", reward=1)
    env.reset(5, {})
    wrong = [env.step(text) for text in ("what?", "[A C]", "what?", "what?")]
    assert [step.valid for step in wrong] == [False, True, False, False] and wrong[3].terminated
    assert (wrong[3].reward, wrong[3].success, wrong[0].done) == (-1, False, False)
    lost = load("textarena")("x", reward="a text")
    lost.reset(0, {})
    with pytest.raises(BadAnswer, match="reward is 'a text'"):
        checked(lost.step("last"), 100)


@contextmanager
def served():
    """A server of OpenEnv's wire: a counter that ends at 2; ``crash`` is its own error, ``leave`` closes the session."""
    from websockets.sync.server import serve

    def session(socket):
        assert socket.request.path == "/ws"
        at = 0
        for line in socket:
            request = json.loads(line)
            at = request["data"].get("seed", 0) if request["type"] == "reset" else at + 1
            word, error = request["data"].get("word"), None
            if word == "leave":
                return
            if word == 7 or word == "crash":
                at, error = at - 1, "VALIDATION_ERROR" if word == 7 else "EXECUTION_ERROR"
            data = {"observation": {"count": at}, "reward": None if at == 0 else 0.5, "done": at == 2}
            if error:
                data = {"code": error, "message": "no"}
            socket.send(json.dumps({"type": "error" if error else "observation", "data": data}))

    with serve(session, "127.0.0.1", 0) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()


def test_openenv_over_its_wire():
    with served() as url:
        env = load("openenv")(url, field="word", text=None)
        first, other = env.reset(0, {}), load("openenv")(url)
        assert (first.observation, first.reward, first.terminated) == ('{"count": 0}', None, False)
        assert other.reset(1, {}).observation == '{"count": 1}'  # a session of its own
        assert not other.step("no JSON").valid and not other.step('{"word": 7}').valid
        one, two = env.step("on"), env.step("on")
        assert (one.reward, one.terminated, two.terminated, two.success) == (0.5, False, True, None)
        with pytest.raises(RuntimeError, match="EXECUTION_ERROR"):
            other.step('{"word": "crash"}')
        with pytest.raises(ConnectionError, match=url):
            other.step('{"word": "leave"}')
        env.close()
