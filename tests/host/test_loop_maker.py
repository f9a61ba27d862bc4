"""A loop of `make_loop` is the one that hydra makes of the same entry."""

import hydra
import pytest
from omegaconf import OmegaConf

from verl_credit.host.rollout.loop_maker import make_loop


class Loop:
    def __init__(self, tokenizer, limit=1, name=None, kept=None, trainer_config=None):
        self.given = (tokenizer, limit, name, kept, trainer_config)


PATH = f"{__name__}.Loop"


@pytest.mark.parametrize(
    "entry",
    [
        {"_target_": PATH},
        OmegaConf.create({"_target_": PATH, "name": "own", "limit": 3}),
        OmegaConf.create({"_target_": PATH, "limit": "${name}", "name": "7"}),
        {"_target_": PATH, "kept": {"a": [1, 2]}},
        {"_target_": PATH, "kept": {"_target_": "pathlib.PurePath", "_args_": ["a"]}},
        {"_target_": PATH, "limit": 2, "_convert_": "all"},
        {"_target_": PATH, "tokenizer": "the part wins"},
    ],
)
def test_it_is_what_hydra_makes(entry):
    parts = {"tokenizer": object(), "trainer_config": object()}
    ours, hydras = make_loop(entry, **parts), hydra.utils.instantiate(config=entry, **parts)
    assert type(ours) is type(hydras) is Loop
    assert ours.given == hydras.given
    assert [type(one) for one in ours.given] == [type(one) for one in hydras.given]


def test_a_class_that_is_not_there_is_named():
    with pytest.raises(Exception, match=r"NoSuchLoop"):
        make_loop({"_target_": f"{__name__}.NoSuchLoop"}, tokenizer=None)
