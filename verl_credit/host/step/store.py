"""The rows of a step in TransferQueue (no other module calls it), and rows beside them that are scored.

verl hands a handle of the rows (``KVBatchMeta``) from method to method. Only the handle that a write returns has the
new fields.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import transfer_queue as tq
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import response_from_nested

from verl_credit.config.keys import AUTO
from verl_credit.credit import turn_table
from verl_credit.host.engine.log_prob_engine import nested
from verl_credit.names import AGENTS, SCORES, TURN_IDS
from verl_credit.turns.rollout.book import TurnBatch, record_of, turn_ids_of, turn_rewards_of, turns_of_mask
from verl_credit.turns.rollout.sessions import link_of, sessions_of
from verl_credit.turns.score.scorers import ScoreRow


def read(batch, *names: str, rows: list[int] | None = None) -> TensorDict:
    """Returns these fields of all rows, or of ``rows``."""
    keys = batch.keys if rows is None else [batch.keys[row] for row in rows]
    return tq.kv_batch_get(keys=keys, partition_id=batch.partition_id, select_fields=list(names))


def prompt_ids(batch) -> list[str]:
    """verl's ``uid`` of each row: rollouts of one prompt share it."""
    return [str(uid) for uid in _objects(read(batch, "uid")["uid"])]


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


def write_tokens(batch, turns: TurnBatch, name: str, values_B_T: torch.Tensor):
    """Write a padded tensor, each row cut to its own response."""
    cut = [row[: len(ids)] for row, ids in zip(values_B_T, turns.response_ids, strict=True)]
    return write(batch, {name: nested(cut)})


def write_turn_ids(batch, turns: TurnBatch):
    """Write the turn ids, unless our agent loops wrote all of them. A padding row of verl's has those of another row.

    They are int16, as the agent loops write them: TransferQueue keeps one dtype per field. ValueError: too many turns.
    """
    if turns.ids_stored:
        return batch
    if (most := int(turns.n_turns_B.max())) > 2**15:
        raise ValueError(f"a row has {most} turns; expected at most {2**15}, whose ids int16 holds")
    return write_tokens(batch, turns, TURN_IDS, turns.turn_ids_B_T.to(torch.int16))


def fetch_turn_batch(batch, columns: Sequence[str] = (), ids: str = AUTO) -> TurnBatch:
    """Turn ids, the agent loops' records, and which rows are valid. ``columns``: of the data file, which verl writes beside
    the trajectory; a tensor of that name is a field of verl's, and no column.

    Turn ids are a field of the row (our agent loops) or among its ``extra_fields`` (others), or follow from its mask, as
    ``ids`` says (`algorithm.turn_ids`). Raises RuntimeError where there are none, ValueError where those or the turn rewards
    cannot be right.
    """
    names = ("extra_fields", SCORES, "reward_model", "extra_info", *columns)
    data = read(batch, "prompts", "responses", "response_mask", TURN_IDS, *names)
    fetched = {name: data[name] for name in columns if name in data}
    values = {name: _objects(of) for name, of in fetched.items() if not isinstance(of, torch.Tensor)}
    is_padding = [bool(tag.get("is_padding", False)) for tag in batch.tags]
    mask_B_T = data["response_mask"].to_padded_tensor(padding=0)
    extra_fields = _extra_fields(data, len(is_padding))
    response_ids = [ids.tolist() for ids in data["responses"].unbind()]
    # A padding row has the turns of the row that it was copied from.
    rows = [row for row, padded in enumerate(is_padding) if not padded]
    turn_ids_B_T = torch.full(mask_B_T.shape, -1, dtype=torch.int64)
    found, masked = _turn_ids(batch, data, extra_fields, response_ids, rows if ids != "mask" else [])
    masked = rows if ids == "mask" else masked
    if masked and ids == "loop":
        raise RuntimeError(
            f"row {masked[0]}: rollouts carry no {TURN_IDS!r} (algorithm.turn_ids=loop): set the rows' agent_name (or "
            f"rollout.agent.default_agent_loop) to {' or '.join(map(repr, AGENTS))}; an agent loop of your own puts "
            f"extra_fields[{TURN_IDS!r}] into its AgentLoopOutput, a whole number per response token "
            "(docs/agent-loops.md)"
        )
    found |= {row: turns_of_mask(mask_B_T[row]) for row in masked}
    for row, turns in found.items():
        turn_ids_B_T[row, : len(turns)] = turns
    turn_ids_B_T = torch.where(mask_B_T.bool(), turn_ids_B_T, -1)
    n_turns_B = turn_table(turn_ids_B_T, mask_B_T).n_turns_B
    records = [record_of(fields, row) for row, fields in enumerate(extra_fields)]
    faulty = torch.tensor([bool(record["tool_fault"]) for record in records])
    padding = torch.tensor(is_padding)
    ours = TURN_IDS in data and not masked and not any(TURN_IDS in fields for fields in extra_fields)
    alone = {row for outputs in sessions_of(batch.keys) for row in outputs if len(outputs) == 1}
    rewards = {
        row: turn_rewards_of(extra_fields[row], row, int(n_turns_B[row]), last=row in alone) for row in rows
    }
    return TurnBatch(
        prompt_ids=[ids.tolist() for ids in data["prompts"].unbind()],
        response_ids=response_ids,
        turn_ids_B_T=turn_ids_B_T,
        response_mask_B_T=mask_B_T,
        records=records,
        scores=[fields.get(SCORES) or {} for fields in extra_fields],
        ground_truths=[item["ground_truth"] for item in _objects(data["reward_model"])],
        extra_infos=_objects(data["extra_info"]),
        columns=[{name: of[row] for name, of in values.items()} for row in range(len(is_padding))],
        is_padding=is_padding,
        row_valid_B=~(padding | faulty),
        n_turns_B=n_turns_B,
        turn_rewards=[rewards.get(row, []) for row in range(len(is_padding))],
        ids_from_mask=len(masked),
        keys=list(batch.keys),
        links=[link_of(fields, row) for row, fields in enumerate(extra_fields)],
        ids_stored=ours and torch.equal(data[TURN_IDS].offsets(), data["responses"].offsets()),
    )


def _extra_fields(data, rows: int) -> list[dict]:
    """verl's ``extra_fields`` of each row. Where a manager of somebody else writes none: the reward's values, if it has them
    in a field of their own."""
    if "extra_fields" in data:
        return [fields if isinstance(fields, dict) else {} for fields in _objects(data["extra_fields"])]
    return [{SCORES: one} for one in _objects(data[SCORES])] if SCORES in data else [{}] * rows


def _turn_ids(
    batch, data, extra_fields, response_ids, rows: list[int]
) -> tuple[dict[int, torch.Tensor], list[int]]:
    """(the turn ids that agent loops gave, the rows without). verl's store returns a field only when every requested row has
    it. Where rows of our loops stand among rows without turn ids, the turns of all of them follow from the mask."""
    given = [row for row in rows if TURN_IDS in extra_fields[row]]
    found = {row: torch.tensor(turn_ids_of(extra_fields[row], row, len(response_ids[row]))) for row in given}
    others = [row for row in rows if TURN_IDS not in extra_fields[row]]
    if not others:
        return found, []
    place = {row: row for row in others}
    if TURN_IDS not in data and given:
        data = read(batch, TURN_IDS, rows=others)
        place = {row: number for number, row in enumerate(others)}
    if TURN_IDS not in data:
        return found, others
    fields = data[TURN_IDS].unbind()
    return found | {row: fields[place[row]] for row in others}, []


def _objects(column) -> list:
    """A non-tensor column as a list; TransferQueue returns lists, stacks or wrapped items by backend."""
    return [getattr(item, "data", item) for item in column]


def score_rows(
    compute_log_prob: Callable[[TensorDict], TensorDict],
    rows: Sequence[ScoreRow],
    *,
    dp_size: int,
    micro_batch: int = 1,
    adapter: bool = True,
) -> torch.Tensor:
    """Mean log-prob of the gold tokens for every row, float64 [N], at temperature 1. Identical rows are computed once.

    score = (1/|gold|) sum_j log pi(gold_j | context, template, gold_<j)

    Without dynamic batching verl divides every rank's rows into micro-batches of ``micro_batch`` rows, and refuses a
    remainder; therefore the first row is repeated until there is none. ``adapter`` False: LoRA's is left out.
    """
    distinct = list(dict.fromkeys(rows))
    padded = distinct + [distinct[0]] * (-len(distinct) % (dp_size * micro_batch))
    batch = _log_prob_batch(padded)
    if not adapter:
        tu.assign_non_tensor(batch, no_lora_adapter=True)
    output = compute_log_prob(batch)
    answers = nested([torch.ones(len(row.answer.token_ids)) for row in padded])
    log_probs = response_from_nested(output["log_probs"], answers)
    value = {
        row: log_probs[i][row.answer.gold_start : row.answer.gold_end].double().mean()
        for i, row in enumerate(distinct)
    }
    return torch.stack([value[row] for row in rows])


def _log_prob_batch(rows: Sequence[ScoreRow]) -> TensorDict:
    prompts = [torch.tensor(row.context_ids) for row in rows]
    answers = [torch.tensor(row.answer.token_ids) for row in rows]
    whole = [torch.cat(pair) for pair in zip(prompts, answers, strict=True)]
    mask = nested([torch.ones_like(answer) for answer in answers])
    batch = TensorDict(
        {
            "prompts": nested(prompts),
            "responses": nested(answers),
            "input_ids": nested(whole),
            "position_ids": nested([torch.arange(len(ids)) for ids in whole]),
            "response_mask": mask,
            "loss_mask": mask.clone(),
        },
        batch_size=len(rows),
    )
    tu.assign_non_tensor(batch, calculate_entropy=False, compute_loss=False, temperature=1.0)
    return batch
