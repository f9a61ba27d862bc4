"""A plain retrieval server of the usual design, for comparison: one request at a time, encode, then search.

    python evidence/retriever/plain_server.py --index FOLDER --encoder FOLDER --port-file FILE [--threads N]

No batching across requests, no queue bound, no cache, no health, no limits: a synchronous endpoint behind a lock. It
reads the same encoder folder, index file and corpus as our server, with plain transformers and FAISS calls, and
documents from disk as ours does. One request's queries are encoded together, padded to the longest.
"""

import argparse
import json
import os
import socket
import threading
from pathlib import Path

import faiss
import numpy as np
import torch
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel
from transformers import AutoModel, AutoTokenizer

from verl_credit_retriever.index.corpus import Documents


class Query(BaseModel):
    queries: list[str]
    topk: int | None = None
    return_scores: bool = False


def create_plain_app(index_folder: Path, encoder_folder: Path) -> FastAPI:
    """POST /retrieve over the folder's vectors (flat inner product)."""
    tokenizer = AutoTokenizer.from_pretrained(str(encoder_folder))
    model = AutoModel.from_pretrained(str(encoder_folder), dtype=torch.float32).eval()
    index = _flat_index(index_folder)
    offsets = np.load(index_folder / "offsets.npy", allow_pickle=False)
    documents = Documents(index_folder / "corpus.jsonl", offsets)
    one_at_a_time, app = threading.Lock(), FastAPI()

    @torch.inference_mode()
    def encode(queries: list[str]) -> np.ndarray:
        texts = [f"query: {query}" for query in queries]
        batch = tokenizer(texts, max_length=256, padding=True, truncation=True, return_tensors="pt")
        hidden_N_L_D = model(**batch).last_hidden_state
        mask_N_L_1 = batch["attention_mask"][..., None].to(hidden_N_L_D.dtype)
        mean_N_D = (hidden_N_L_D * mask_N_L_1).sum(1) / mask_N_L_1.sum(1)
        return torch.nn.functional.normalize(mean_N_D, dim=-1).numpy()

    @app.post("/retrieve")
    def retrieve(request: Query):
        with one_at_a_time:
            scores_N_K, rows_N_K = index.search(encode(request.queries), request.topk or 3)
            results = []
            for scores, rows in zip(scores_N_K.tolist(), rows_N_K.tolist(), strict=True):
                found = [documents[row] for row in rows]
                if request.return_scores:
                    found = [{"document": d, "score": s} for d, s in zip(found, scores, strict=True)]
                results.append(found)
        return {"result": results}

    return app


def _flat_index(folder: Path) -> faiss.Index:
    if (folder / "index.faiss").exists():
        return faiss.read_index(str(folder / "index.faiss"))
    vectors_N_D = np.load(folder / "vectors.npy", mmap_mode="r", allow_pickle=False)
    index = faiss.IndexFlatIP(vectors_N_D.shape[1])
    index.add(np.ascontiguousarray(vectors_N_D, dtype=np.float32))
    return index


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--index", type=Path, required=True)
    parser.add_argument("--encoder", type=Path, required=True)
    parser.add_argument("--port-file", type=Path, required=True, help="JSON {port, pid}, written when ready")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    faiss.omp_set_num_threads(options.threads)
    app = create_plain_app(options.index, options.encoder)
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    listener.listen(2048)
    # Connections wait in the listening socket until uvicorn accepts them.
    temporary = options.port_file.with_suffix(".tmp")
    temporary.write_text(json.dumps({"port": listener.getsockname()[1], "pid": os.getpid()}))
    os.replace(temporary, options.port_file)
    config = uvicorn.Config(app, log_level="warning", access_log=False)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()
