"""The rows of a step in TransferQueue: no other module calls it.

verl hands a handle of the rows (``KVBatchMeta``) from method to method. Only the handle that a write returns knows the
new fields.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.workers.utils.padding import response_to_nested

from verl_credit.credit import turn_table
from verl_credit.names import TURN_IDS
from verl_credit.turns.batch import TurnBatch, no_turn_ids, record_of, turn_ids_of, turn_rewards_of
from verl_credit.turns.token_stage import TokenInputs


def read(batch, *names: str, rows: list[int] | None = None) -> TensorDict:
    """Returns these fields of all rows, or of ``rows``."""
    keys = batch.keys if rows is None else [batch.keys[row] for row in rows]
    return tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=list(names))


def prompt_ids(batch) -> list[str]:
    """verl's ``uid`` of each row: rollouts of one prompt share it."""
    return [str(uid) for uid in _objects(read(batch, "uid")["uid"])]


def token_inputs(batch, step: int, row_valid_B: torch.Tensor, *, entropy: bool) -> TokenInputs:
    """Log-probs and entropies of the policy that is trained, as verl computed them for this step.

    ``entropy`` False: ``rollout_correction.bypass_mode`` leaves out verl's forward, and with it the entropies.
    """
    names = ["old_log_probs", "responses", "response_mask", *(["entropy"] if entropy else [])]
    data = read(batch, *names)
    padded = {name: data[name].to_padded_tensor(padding=0) for name in names}
    return TokenInputs(
        step=step,
        mask_B_T=padded["response_mask"].bool(),
        token_ids_B_T=padded["responses"],
        log_prob_B_T=padded["old_log_probs"],
        entropy_B_T=padded.get("entropy"),
        row_valid_B=row_valid_B,
    )


def write(batch, fields: dict[str, torch.Tensor]):
    """Adds fields (nested, a row each) to the batch, and returns the handle that includes them."""
    written = tq.kv_batch_put(
        keys=batch.keys, partition_id=batch.partition_id, fields=TensorDict(fields, batch_size=len(batch))
    )
    written.extra_info.update(batch.extra_info)
    return written


def announce_prompts(uids: list[str], partition: str, step: int) -> None:
    """Tags the prompts as verl's trainer does before it sends them to the agent loops: its replay buffer waits for them."""
    tag = {"is_prompt": True, "status": "pending", "global_steps": step}
    tq.kv_batch_put(keys=uids, partition_id=partition, tags=[tag] * len(uids))


def clear(batch) -> None:
    """Remove the rows."""
    tq.kv_clear(keys=batch.keys, partition_id=batch.partition_id)


def write_tokens(batch, padded_B_T: dict[str, torch.Tensor]):
    """Write padded tensors, each row cut to its own response."""
    mask = read(batch, "response_mask")["response_mask"]
    return write(batch, {name: response_to_nested(value, mask) for name, value in padded_B_T.items()})


def fetch_turn_batch(batch, columns: Iterable[str] = ()) -> TurnBatch:
    """Turn ids, the agent loops' records, and which rows are valid. ``columns``: of the data file, which verl writes beside
    the trajectory; a tensor of that name is a field of verl's, and no column.

    Turn ids are a field of the row (our agent loops) or among its ``extra_fields`` (others). Raises RuntimeError where there
    are none, ValueError where those or the turn rewards cannot be right.
    """
    names = ("extra_fields", "reward_model", "extra_info", *columns)
    data = read(batch, "prompts", "responses", "response_mask", TURN_IDS, *names)
    fetched = {name: data[name] for name in columns if name in data}
    values = {name: _objects(of) for name, of in fetched.items() if not isinstance(of, torch.Tensor)}
    is_padding = [bool(tag.get("is_padding", False)) for tag in batch.tags]
    mask_B_T = data["response_mask"].to_padded_tensor(padding=0)
    extra_fields = [fields if isinstance(fields, dict) else {} for fields in _objects(data["extra_fields"])]
    response_ids = [ids.tolist() for ids in data["responses"].unbind()]
    # A padding row has the turns of the row that it was copied from.
    rows = [row for row, padded in enumerate(is_padding) if not padded]
    turn_ids_B_T = torch.full(mask_B_T.shape, -1, dtype=torch.int64)
    for row, ids in _turn_ids(batch, data, extra_fields, response_ids, rows):
        turn_ids_B_T[row, : len(ids)] = ids
    turn_ids_B_T = torch.where(mask_B_T.bool(), turn_ids_B_T, -1)
    n_turns_B = turn_table(turn_ids_B_T, mask_B_T).n_turns_B
    records = [record_of(fields, row) for row, fields in enumerate(extra_fields)]
    faulty = torch.tensor([bool(record["tool_fault"]) for record in records])
    padding = torch.tensor(is_padding)
    rewards = {row: turn_rewards_of(extra_fields[row], row, int(n_turns_B[row])) for row in rows}
    return TurnBatch(
        prompt_ids=[ids.tolist() for ids in data["prompts"].unbind()],
        response_ids=response_ids,
        turn_ids_B_T=turn_ids_B_T,
        response_mask_B_T=mask_B_T,
        records=records,
        scores=[fields.get("reward_extra_info") or {} for fields in extra_fields],
        ground_truths=[item["ground_truth"] for item in _objects(data["reward_model"])],
        extra_infos=_objects(data["extra_info"]),
        columns=[{name: of[row] for name, of in values.items()} for row in range(len(is_padding))],
        is_padding=is_padding,
        row_valid_B=~(padding | faulty),
        n_turns_B=n_turns_B,
        turn_rewards=[rewards.get(row, []) for row in range(len(is_padding))],
    )


def _turn_ids(batch, data, extra_fields, response_ids, rows: list[int]) -> Iterator[tuple[int, torch.Tensor]]:
    """Yields each row's turn ids. verl's store returns a field only when every requested row has it."""
    given = [row for row in rows if TURN_IDS in extra_fields[row]]
    for row in given:
        yield row, torch.tensor(turn_ids_of(extra_fields[row], row, len(response_ids[row])))
    others = [row for row in rows if TURN_IDS not in extra_fields[row]]
    if not others:
        return
    place = {row: row for row in others}
    if TURN_IDS not in data and given:
        keys = [batch.keys[row] for row in others]
        data = tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=[TURN_IDS])
        place = {row: number for number, row in enumerate(others)}
    if TURN_IDS not in data:
        raise RuntimeError(no_turn_ids(others[0]))
    fields = data[TURN_IDS].unbind()
    yield from ((row, fields[place[row]]) for row in others)


def _objects(column) -> list:
    """A non-tensor column as a list; TransferQueue returns lists, stacks or wrapped items by backend."""
    return [getattr(item, "data", item) for item in column]
