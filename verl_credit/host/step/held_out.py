"""The trajectories of a held-out evaluation as rows of JSON (`evaluation.keep_trajectories`).

verl clears a batch once it has its metrics, therefore the rows are read as soon as the batch is sampled.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from numbers import Real

from verl_credit.errors import IntegrityError
from verl_credit.host.step import store
from verl_credit.records.run.files import plain
from verl_credit.turns.reward.golds import gold_answers
from verl_credit.turns.signals.signal import turn_texts


def held_out_rows(batch, mode: str, tokenizer) -> list[dict]:
    """A row per trajectory, with the scores of the reward function. Of a trajectory of several outputs the last one counts,
    as in verl's metrics.

    ``id`` names the question by its data source, prompt and gold answers, so that it is the same for every policy.
    """
    turns = store.fetch_turn_batch(batch, ("raw_prompt", "data_source"))
    data = store.read(batch, "rm_scores")
    if "rm_scores" not in data:
        raise IntegrityError(
            "evaluation.keep_trajectories=true: the held-out rows have no score when they are sampled, because a reward "
            "model on the trainer's devices gives it later; set reward.reward_model.enable_resource_pool=true, or "
            "evaluation.keep_trajectories=false"
        )
    outcomes = [float(values.double().sum()) for values in data["rm_scores"].unbind()]
    rows = []
    for row in last_outputs(batch.keys):
        ids, turn_ids = turns.response_ids[row], turns.turn_ids_B_T[row].tolist()
        texts = turn_texts(ids, turn_ids, int(turns.n_turns_B[row]), tokenizer.decode)
        record, info, columns = turns.records[row], turns.extra_infos[row], turns.columns[row]
        golds, source = (
            list(map(str, gold_answers(turns.ground_truths[row]))),
            str(columns.get("data_source", "unknown")),
        )
        prompt = plain(columns["raw_prompt"])
        same = json.dumps([source, prompt, golds], sort_keys=True, default=str)
        rows.append(
            {
                "id": hashlib.blake2b(same.encode("utf-8", "replace"), digest_size=8).hexdigest(),
                "source": source,
                "mode": mode,
                "question": str((info or {}).get("question") or prompt[-1]["content"]),
                "golds": golds,
                "outcome": outcomes[row],
                "scores": {
                    name: float(value) for name, value in turns.scores[row].items() if isinstance(value, Real)
                },
                "stop_reason": record["stop_reason"],
                "tool_fault": record["tool_fault"],
                "calls": record["n_searches"] + record["n_other_calls"],
                "searches": record["searches"],
                "turns": [{"text": written, "observation": seen} for written, seen in texts],
            }
        )
    return rows


def last_outputs(keys: Sequence[str]) -> list[int]:
    """The places of each trajectory's last output among verl's keys, PROMPT_SESSION_OUTPUT."""
    last: dict[str, tuple[int, int]] = {}
    for place, key in enumerate(keys):
        session, _, output = key.rpartition("_")
        last[session] = max(last.get(session, (-1, -1)), (int(output), place))
    return sorted(place for _, place in last.values())
