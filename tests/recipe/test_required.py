"""What a run needs from its user has no default, and rows that nothing could read are refused."""

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from kit.preflight import policy
from kit.recipes import load_config
from verl_credit.cli import main
from verl_credit.errors import PreflightError
from verl_credit.recipe import compose
from verl_credit.recipe.doctor import checks
from verl_credit.recipe.doctor.data import Reads, read_rows
from verl_credit.recipe.world import DATA, without_value


def write(path, rows):
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


VERLS_GSM8K = {
    "data_source": "openai/gsm8k",
    "prompt": [
        {"role": "user", "content": 'How many? Let\'s think step by step and output the answer after "####".'}
    ],
    "reward_model": {"style": "rule", "ground_truth": "72"},
}
ASKS = [{"role": "user", "content": "How many? Write <answer>...</answer>."}]
BOXED = {"target": ["72"], "form": "boxed"}


def test_rows_whose_answers_nothing_would_read(tmp_path):
    """verl's own GSM8K: no form, and a prompt that asks for no tag. With the tool, a policy may know the tag."""
    path = write(tmp_path / "train.parquet", [{**VERLS_GSM8K, "prompt": ASKS}, VERLS_GSM8K])
    with pytest.raises(PreflightError, match=r"train.parquet row 1: .*'72' has no form"):
        read_rows(path, "data.train_files", Reads(searches=False))
    assert len(read_rows(path, "data.train_files")) == 2
    assert len(read_rows(path, "data.train_files", Reads(searches=False, our_reward=False))) == 2
    own = Reads(searches=False, agents=("guess",), default_loop="guess")  # it may give the outcome itself
    assert len(read_rows(path, "data.train_files", own)) == 2


@pytest.mark.parametrize("truth", [BOXED, {"target": ["72"], "form": "tag"}])
def test_a_form_that_is_stated_is_believed(tmp_path, truth):
    row = {**VERLS_GSM8K, "reward_model": {"ground_truth": truth}}
    assert len(read_rows(write(tmp_path / "train.parquet", [row]), "k", Reads(searches=False))) == 1


@pytest.mark.slow
def test_train_refuses_rows_whose_answers_nothing_would_read(tmp_path, capsys, monkeypatch):
    inputs = [check for check in checks.CHECKS if check.stage is checks.Stage.INPUTS]
    monkeypatch.setattr(checks, "CHECKS", inputs)
    path = write(tmp_path / "train.parquet", [VERLS_GSM8K] * 16)
    arguments = [f"data.train_files={path}", f"data.val_files={path}", f"run_dir={tmp_path}/run"]
    arguments.append(f"actor_rollout_ref.model.path={policy(tmp_path)}")
    assert main(["train", "--config-name", "math_sepa", *arguments]) == 4
    assert "train.parquet row 0: reward_model.ground_truth='72' has no form" in capsys.readouterr().out


MODEL, SERVER = "; actor_rollout_ref.model.path (a folder", "search.url (a server"
LACKING = {"math_sepa": [], "multihop_qwen3_4b": [SERVER], "search_cpu": [MODEL, SERVER]}


@pytest.mark.slow
@pytest.mark.parametrize("recipe, keys", LACKING.items())
def test_what_has_no_value_is_said_at_once_and_verls_own_is_not_taken(
    recipe, keys, tmp_path, capsys, monkeypatch
):
    """verl's defaults are its authors' GSM8K and model. The hub is not asked for a run that lacks a value."""
    asked = []
    monkeypatch.setattr("verl_credit.recipe.family.fetch_config", asked.append)
    assert main(["train", "--config-name", recipe, f"run_dir={tmp_path}/run"]) == 4
    said = capsys.readouterr().out
    keys = ["no value for data.train_files, data.val_files (parquet files", *keys]
    assert said.count("\n") == 1 and all(key in said for key in keys)
    assert not (tmp_path / "run").exists() and asked == []
    code = main(["explain", "--config-name", recipe])
    missing = capsys.readouterr().out.splitlines()[-1]
    assert code == 0 and missing.startswith("missing before it can run: data.train_files")
    assert ("model.path" in missing, "search.url" in missing) == ("model.path" in said, "search.url" in said)


@pytest.mark.slow
def test_the_hub_is_asked_once_nothing_is_missing(monkeypatch):
    asked, data = [], ["data.train_files=a.parquet", "data.val_files=b.parquet"]
    monkeypatch.setattr("verl_credit.recipe.family.fetch_config", asked.append)
    model = compose.load_config("math_sepa", data, may_fetch=True).actor_rollout_ref.model.path
    assert asked == [model]
    compose.unchecked_config("math_sepa", ["search=5"], may_fetch=True)  # refused later, by its name
    compose.unchecked_config("math_sepa", [], may_fetch=True, set_later=DATA[:1])
    assert asked == [model]
    compose.unchecked_config("math_sepa", [], may_fetch=True, set_later=DATA)
    assert asked == [model, model]


@pytest.mark.parametrize("value", ["null", "'???'", "[]", "''"])
def test_every_way_of_having_no_value_is_seen(value):
    config = load_config("lab", [f"data.val_files={value}", f"actor_rollout_ref.model.path={value}"])
    assert without_value(config) == ["data.val_files", "actor_rollout_ref.model.path"]


@pytest.mark.slow
@pytest.mark.parametrize("value", ["5", "[5]", "true"])
def test_a_number_is_no_file(value, capsys):
    config = load_config("lab", [f"data.val_files={value}"])
    assert without_value(config) == []
    with pytest.raises(PreflightError, match="data.val_files=.*give a parquet file"):
        read_rows(config.data.val_files, "data.val_files")
    assert main(["explain", "--config-name", "math_sepa", f"data.val_files={value}"]) == 0
    assert "data.val_files=" in capsys.readouterr().out.splitlines()[-1]
