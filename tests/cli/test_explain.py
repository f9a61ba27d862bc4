"""`verl-credit explain`, `check` and `modes`: what they print and how they end."""

import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from kit.recipes import OWN, load_config
from verl_credit.cli import COMMANDS, main
from verl_credit.cli.pages import keys_page, modes_page
from verl_credit.config.keys import our_keys
from verl_credit.credit import REGISTRY, laws
from verl_credit.recipe.rules.turn_mode import KEYS

LOSS = "actor_rollout_ref.actor.policy_loss"
CANONICAL = ["credit=grpo", "algorithm.uncertainty_kind=shannon_entropy"]


def run(capsys, *arguments):
    code = main(list(arguments))
    return code, capsys.readouterr().out


@pytest.mark.slow
def test_the_pipeline_is_told_in_the_order_in_which_it_acts(capsys):
    chosen = ("advantage_mode=maxrl", "transform_mode=gtpo_sepa_hicra", "info_gain_norm_mode=turn-group-v1d")
    code, said = run(capsys, "explain", *(f"algorithm.{key}" for key in chosen))
    assert code == 0
    stages = [line.split(" ", 1)[1] for line in said.splitlines() if line[:1].isdigit()]
    assert stages == [
        "information gain: prob_diff",
        "outcome: maxrl",
        "turn: turn-group-v1d",
        "uncertainty: surprisal",
        "planning mask: grams",
        "sepa controller: linear",
        "token: gtpo_sepa_hicra",
        "loss: turn_ppo",
    ]
    assert REGISTRY["outcome", "maxrl"].equation in said
    assert "up to 5 answers per alias are appended to each row" in said and "(attention: auto)" in said
    assert "missing before it can run: nothing" in said


@pytest.mark.slow
def test_inputs_that_are_missing_are_named(capsys, tmp_path):
    (tmp_path / "questions.parquet").write_bytes(b"")
    own = {"data.train_files": "questions.parquet", "data.val_files": "absent.parquet"}
    own |= {"actor_rollout_ref.model.path": "policy"}
    given = [f"{key}={tmp_path / name}" for key, name in own.items()]
    code, said = run(capsys, "explain", "--config-name", "search_cpu", *given)
    assert code == 0
    missing = said.splitlines()[-1]
    assert "absent.parquet (not there)" in missing and "policy (not there)" in missing
    assert "search.url (a server" in missing and "questions.parquet" not in missing


@pytest.mark.slow
def test_all_registered_operators_are_checked_from_the_command_line(capsys, monkeypatch):
    """With a third of the worlds and few calls in a row: ``tests/credit/test_laws.py`` tries the operators themselves."""
    monkeypatch.setattr(laws, "check", partial(laws.check, seeds=range(1)))
    monkeypatch.setattr("verl_credit.credit.laws.laws.CALLS", 100)
    code, said = run(capsys, "check")
    assert code == 0
    assert f"{len(REGISTRY)} operators, 0 broken" in said


@pytest.mark.slow
def test_an_operator_of_ones_own_is_checked_from_the_command_line(capsys, tmp_path, monkeypatch):
    (tmp_path / "my_operators.py").write_text(
        "def best(rewards):\n    return [float(r == max(rewards)) for r in rewards]\n"
        "def scaled(rewards, params):\n    mean = sum(rewards) / len(rewards)\n"
        "    tied = max(rewards) == min(rewards)\n"
        "    return [0.0 if tied else params['by'] * (r - mean) for r in rewards]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    code, said = run(capsys, "check", "my_operators:best")
    assert code == 1
    assert "BROKEN  ties" in said and "all outcomes 0.0" in said
    assert "          rewards = [0.0]\n            -> [1.0]\n" in said
    code, said = run(capsys, "check", "my_operators:scaled", "--params", '{"by": 2.0}')
    assert code == 0 and "lawful" in said
    code, said = run(capsys, "check", "my_operators:scaled")
    assert code == 1
    assert said.startswith(
        "outcome my_operators:scaled: BROKEN: KeyError: 'by' for rewards = [1.0, 0.0]; --params "
    )
    code, said = run(capsys, "check", "my_operators:bset")
    assert code == 4 and "did you mean 'best'" in said


def test_the_page_of_modes_is_the_registrys(capsys):
    written = (Path(__file__).parents[2] / "docs" / "modes.md").read_text()
    assert written == modes_page(), "run: verl-credit modes > docs/modes.md"
    assert run(capsys, "modes") == (0, written)
    assert all(f"### `{name}`" in written for _, name in REGISTRY)


def test_the_page_of_modes_says_what_a_recipe_gives_the_options_that_have_keys():
    """Some of these keys are verl's, whose configuration has a default of its own."""
    config, page = load_config("search_cpu", OWN), modes_page()
    for option, key in KEYS.items():
        (default,) = re.findall(rf"`{option}` from `{re.escape(key)}` \((.*?)\)", page)
        given = (
            "auto" if option == "lam" else OmegaConf.select(config, key)
        )  # auto is decided when a recipe is composed
        assert OmegaConf.create([given]) == OmegaConf.create(f"[{default}]"), option


@pytest.mark.slow
def test_the_page_of_keys_is_what_is_declared(capsys):
    written = (Path(__file__).parents[2] / "docs" / "keys.md").read_text()
    assert written == keys_page(), "run: verl-credit keys > docs/keys.md"
    assert run(capsys, "keys") == (0, written)
    assert all(f"| `{key.name}` |" in written for key in our_keys())


IMPORTS = """
import sys
from verl_credit.cli import COMMANDS, main
pages, hub = ("keys", "modes"), ""  # pages have no options
for command in (
    "--help",
    *(f"{name} --help" for name in COMMANDS if name not in pages),
    "explain",
    "plan --hardware h100",
    "diff lab lab",
    "explain --config-name multihop_qwen3_4b",
    "plan --config-name lab --config-name multihop_qwen3_4b",
    "train --config-name lab algorithm.gama=1",
):
    main(command.split())
    hub += "multihop" * ("multihop" in command)  # asks the hub for a model
    heavy = "scipy verl ray transformers transfer_queue tensordict pandas pyarrow matplotlib jinja2".split()
    heavy += [] if command.startswith("train ") and "--help" not in command else ["torch", "numpy"]
    heavy += [] if hub else ["httpx", "huggingface_hub.file_download"]
    heavy += ["omegaconf", "pydantic", "rich"] if command == "--help" else []
    print("heavy:", command, [name for name in heavy if name in sys.modules])
"""


@pytest.mark.slow
def test_commands_that_only_read_or_refuse_import_nothing_heavy():
    """So that they answer at once (evidence/start)."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", IMPORTS], capture_output=True, text=True)
    found = [line for line in done.stdout.splitlines() if line.startswith("heavy: ")]
    assert len(found) == 7 + len(COMMANDS) - 2, done.stderr[-500:]
    assert all(line.endswith("[]") for line in found), found


@pytest.mark.parametrize(
    "override, says",
    [
        ("my/mine.yaml", "--config-dir my --config-name mine"),
        ("algorithm.info_gain_norm_mode=grpo", "algorithm.info_gain_norm_mode=grpo: none: "),
        (
            "algorithm.turn_signal=tool_rewards",
            "'tool_rewards' (did you mean tool_reward?): accepted are auto",
        ),
        ("data.apply_chat_template_kwargs.a=False", "write +data.apply_chat_template_kwargs.a=False"),
        ("actor_rollout_ref.rollout.n_samples=8", "write actor_rollout_ref.rollout.n=VALUE"),
        ("trainer.epochs=3", "write trainer.total_epochs=VALUE"),
        ("lr=1e-6", "write actor_rollout_ref.actor.optim.lr=VALUE"),
        ("do_search=true", "write search.max_searches=N"),
    ],
)
def test_what_is_probably_meant_is_named_once(override, says, capsys):
    code, said = run(capsys, "explain", override)
    assert code == 4 and said.count(says) == 1
