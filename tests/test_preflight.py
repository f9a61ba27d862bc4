"""A run that cannot work ends before Ray starts, saying why."""

import http.server
import json
import threading
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as parquet
import pytest

from verl_credit.cli import main
from verl_credit.host.preflight import PreflightError, check_data, check_model, check_server

GOOD = {"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": {"target": ["a"]}}}


def write(path, rows):
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


@pytest.mark.parametrize(
    "rows, said",
    [
        ([{**GOOD, "reward_model": {"ground_truth": {"target": [""]}}}], "row 0: reward_model.ground_truth"),
        ([GOOD, {**GOOD, "reward_model": None}], "row 1: reward_model.ground_truth"),
        ([{**GOOD, "prompt": []}], "row 0: empty prompt"),
        ([{"question": "x"}], "lacks the columns"),
    ],
)
def test_data_that_cannot_be_learnt_from(tmp_path, rows, said):
    with pytest.raises(PreflightError, match=said):
        check_data(write(tmp_path / "train.parquet", rows), "data.train_files")


def test_missing_and_empty_data(tmp_path):
    with pytest.raises(PreflightError, match=r"data.train_files: .*nowhere.parquet does not exist"):
        check_data(str(tmp_path / "nowhere.parquet"), "data.train_files")
    empty = tmp_path / "empty.parquet"
    parquet.write_table(pa.Table.from_pylist([GOOD]).slice(0, 0), empty)
    with pytest.raises(PreflightError, match="holds no rows"):
        check_data([str(empty)], "data.val_files")
    assert (
        check_data([write(tmp_path / "a.parquet", [GOOD]), write(tmp_path / "b.parquet", [GOOD])], "k") == 2
    )


def test_files_that_are_no_data(tmp_path):
    (tmp_path / "train.jsonl").write_text("{}")
    with pytest.raises(PreflightError, match="is not a parquet file"):
        check_data(str(tmp_path / "train.jsonl"), "data.train_files")
    with pytest.raises(PreflightError, match="give a parquet file"):
        check_data(None, "data.train_files")
    with pytest.raises(PreflightError, match="holds 1 rows; at least 8 are needed"):
        check_data(write(tmp_path / "a.parquet", [GOOD]), "data.train_files", at_least=8)


def test_model_folder_without_a_model(tmp_path):
    with pytest.raises(PreflightError, match=r"actor_rollout_ref.model.path=.*no config.json"):
        check_model(str(tmp_path))
    with pytest.raises(PreflightError, match="give a model folder or a hub name"):
        check_model(None)
    check_model("Qwen/Qwen3-4B")  # a hub name is left to the hub


class Server(http.server.BaseHTTPRequestHandler):
    """POST /retrieve answers what the test set; there is no readiness check, as in Search-R1's script."""

    answer = {"result": [[{"document": {"id": "1", "contents": "T\\ntext"}, "score": 1.0}]]}

    def do_POST(self):
        payload = json.dumps(self.answer).encode()
        self.send_response(200 if self.path == "/retrieve" else 404)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_port}"
        running.shutdown()
        thread.join()


def settings(url):
    return SimpleNamespace(url=url, topk=3, timeout_s=5.0, max_retries=0)


def test_a_retriever_that_answers_is_ready(server, monkeypatch):
    monkeypatch.setenv(
        "http_proxy", "http://127.0.0.1:9"
    )  # the tool's client uses no proxy, nor does the check
    for url in (server, [server], f"{server}/retrieve"):
        check_server(settings(url))


def test_a_retriever_that_answers_nonsense_is_not_ready(server, monkeypatch):
    monkeypatch.setattr(Server, "answer", {"detail": "no"})
    with pytest.raises(PreflightError, match="not ready"):
        check_server(settings(server))
    with pytest.raises(PreflightError, match="search.url has no value"):
        check_server(settings(None))


def test_train_without_a_retriever_exits_4_and_says_what_to_do(tmp_path, capsys):
    row = write(tmp_path / "train.parquet", [GOOD])
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Server) as unused:
        port = unused.server_port  # closed again below: nobody listens there
    arguments = [f"data.train_files={row}", f"data.val_files={row}", "actor_rollout_ref.model.path=x"]
    url = f"http://127.0.0.1:{port}"
    code = main(
        ["train", "--config-name", "search_cpu", *arguments, f"search.url={url}", f"run_dir={tmp_path}/run"]
    )
    assert code == 4
    assert f"search.url={url}: the retriever is not ready" in capsys.readouterr().out


def test_mistyped_key_exits_4(capsys):
    assert main(["train", "--config-name", "lab", "algorithm.gama=1"]) == 4
    assert "Did you mean algorithm.gamma" in capsys.readouterr().out
