"""The rows of a step in TransferQueue: no other module calls it.

verl hands a handle of the rows (``KVBatchMeta``) from method to method. Only the handle that a write returns knows the
new fields.
"""

from __future__ import annotations

import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.workers.utils.padding import response_to_nested

from verl_credit.credit import turn_table
from verl_credit.names import AGENT_NAME, ROW_RECORD, TURN_IDS
from verl_credit.turns.batch import TurnBatch
from verl_credit.turns.book import RowRecord


def read(batch, *names: str) -> TensorDict:
    """These fields of all rows."""
    return tq.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(names))


def write(batch, fields: dict[str, torch.Tensor]):
    """Put fields (nested, a row each) beside the others; the handle that knows them."""
    written = tq.kv_batch_put(
        keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(fields, batch_size=len(batch))
    )
    written.extra_info.update(batch.extra_info)
    return written


def write_tokens(batch, padded_B_T: dict[str, torch.Tensor]):
    """Write padded tensors, each row cut to its own response."""
    mask = read(batch, "response_mask")["response_mask"]
    return write(batch, {name: response_to_nested(value, mask) for name, value in padded_B_T.items()})


def fetch_turn_batch(batch) -> TurnBatch:
    """Turn ids, what the agent loops reported, and which rows count. Raises RuntimeError where there are no turn ids."""
    columns = ("extra_fields", "reward_model", "extra_info")
    data = read(batch, "prompts", "responses", "response_mask", TURN_IDS, *columns)
    if TURN_IDS not in data:
        raise RuntimeError(
            f"rollouts carry no {TURN_IDS!r}: set the rows' agent_name (or rollout.agent.default_agent_loop) "
            f"to {AGENT_NAME!r}"
        )
    is_padding = [bool(tag.get("is_padding", False)) for tag in batch.tags]
    mask_B_T = data["response_mask"].to_padded_tensor(padding=0)
    turn_ids_B_T = torch.full(mask_B_T.shape, -1, dtype=torch.int64)
    for row, ids in enumerate(data[TURN_IDS].unbind()):
        if not is_padding[row]:  # a padding row carries the ids of the row it was copied from
            turn_ids_B_T[row, : len(ids)] = ids
    extra_fields = _objects(data["extra_fields"])
    records = [_record(fields) for fields in extra_fields]
    faulty = torch.tensor([bool(record["tool_fault"]) for record in records])
    padding = torch.tensor(is_padding)
    return TurnBatch(
        prompt_ids=[ids.tolist() for ids in data["prompts"].unbind()],
        response_ids=[ids.tolist() for ids in data["responses"].unbind()],
        turn_ids_B_T=turn_ids_B_T,
        response_mask_B_T=mask_B_T,
        records=records,
        scores=[fields.get("reward_extra_info") or {} for fields in extra_fields],
        ground_truths=[item["ground_truth"] for item in _objects(data["reward_model"])],
        extra_infos=_objects(data["extra_info"]),
        is_padding=is_padding,
        row_valid_B=~(padding | faulty),
        n_turns_B=turn_table(turn_ids_B_T, mask_B_T).n_turns_B,
    )


def _objects(column) -> list:
    """A non-tensor column as a list; TransferQueue returns lists, stacks or wrapped items by backend."""
    return [getattr(item, "data", item) for item in column]


def _record(extra_fields) -> dict:
    record = extra_fields.get(ROW_RECORD) if isinstance(extra_fields, dict) else None
    return record if record is not None else RowRecord().as_dict()
