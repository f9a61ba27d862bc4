"""A run that cannot work ends before Ray starts, saying why."""

import http.server
import json
import threading

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


def test_model_folder_without_a_model(tmp_path):
    with pytest.raises(PreflightError, match=r"actor_rollout_ref.model.path=.*no config.json"):
        check_model(str(tmp_path))
    check_model("Qwen/Qwen3-4B")  # a hub name is left to the hub


class Server(http.server.BaseHTTPRequestHandler):
    """Status by path; POST /retrieve answers what the test set."""

    ready, answer = 200, {"result": [[]]}

    def do_GET(self):
        self._reply(self.ready, {})

    def do_POST(self):
        self._reply(200, self.answer)

    def _reply(self, status, body):
        payload = json.dumps(body).encode()
        self.send_response(status)
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


@pytest.mark.parametrize(
    "ready, answer, said",
    [
        (200, {}, None),
        (503, {}, "not ready"),
        (404, {"result": [[]]}, None),  # a server without readiness check is asked a real query
        (404, {"detail": "no"}, "returned no 'result'"),
    ],
)
def test_retriever_readiness(server, monkeypatch, ready, answer, said):
    monkeypatch.setattr(Server, "ready", ready)
    monkeypatch.setattr(Server, "answer", answer)
    if said is None:
        check_server(server, 5.0)
    else:
        with pytest.raises(PreflightError, match=said):
            check_server([server], 5.0)


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
