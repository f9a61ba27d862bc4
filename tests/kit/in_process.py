"""A pool of environments in the test's own process, for tests that are about something else than processes."""

from itertools import count

from verl_credit.worlds.environments.interface import BadAnswer, Step
from verl_credit.worlds.environments.pool import Fault
from verl_credit.worlds.environments.process import Rollouts


class Here:
    """Stands in for `pool.Pool`."""

    def __init__(self, path, kwargs, *, max_chars=4000, **limits):
        self.made, self.rollouts, self.number = (path, kwargs), Rollouts(max_chars), count()
        self.opened, self.closed, self.actions = [], [], []

    def _answer(self, *request):
        try:
            return Step(**self.rollouts.answer(*request))
        except BadAnswer as error:
            raise Fault("env_bad_answer", str(error)) from error
        except Exception as error:
            raise Fault("env_raised", f"{type(error).__name__}: {error}") from error

    async def reset(self, seed, options):
        number = next(self.number)
        step = self._answer(number, "reset", *self.made, seed, options)
        self.opened.append(number)
        return number, step

    async def step(self, number, action):
        self.actions.append(action)
        return self._answer(number, "step", action)

    async def close(self, number):
        self.closed.append(number)
        self.rollouts.answer(number, "close")

    async def end(self):
        pass
