"""The inputs of a turn mode, checked."""

import torch

from verl_credit.credit.checks import as_bool, as_group_ids, check_shape, check_tensor, first_row
from verl_credit.credit.groups import group_counts, valid_rows
from verl_credit.credit.turn.tables import Tables


def make_tables(
    outcome_B, turn_reward_B_K, turn_mask_B_K, group_B, row_valid_B, n_tool_turns_B, on_nonfinite, given
) -> tuple[Tables, dict[str, int]]:
    """Checked tables, and counts of what was dropped."""
    valid_B = valid_rows(outcome_B, group_B, row_valid_B)
    check_tensor("turn_reward_B_K", turn_reward_B_K)
    if turn_reward_B_K.dim() != 2:
        raise ValueError(
            f"turn_reward_B_K has shape {tuple(turn_reward_B_K.shape)}; expected rows x tool turns"
        )
    rows, turns = outcome_B.shape[0], turn_reward_B_K.shape[1]
    check_shape("turn_reward_B_K", turn_reward_B_K, (rows, turns), "outcome_B has rows")
    check_shape("turn_mask_B_K", turn_mask_B_K, (rows, turns), "turn_reward_B_K")
    has_reward_B_K = as_bool("turn_mask_B_K", turn_mask_B_K)
    bad_B = valid_B & ~outcome_B.isfinite()
    lost_B_K = valid_B[:, None] & has_reward_B_K & ~turn_reward_B_K.isfinite()
    if on_nonfinite == "raise":
        _refuse("outcome_B", bad_B)
        _refuse("turn_reward_B_K", lost_B_K)
    usable_B = valid_B & ~bad_B
    known_B_K = has_reward_B_K & usable_B[:, None] & ~lost_B_K
    tables = Tables(
        outcome_B=torch.where(usable_B, outcome_B.to(torch.float64), 0.0),
        reward_B_K=torch.where(known_B_K, turn_reward_B_K.to(torch.float64), 0.0),
        has_reward_B_K=known_B_K,
        lost_reward_B_K=lost_B_K & usable_B[:, None],
        group_B=as_group_ids("group_B", group_B),
        valid_B=usable_B,
        resolution=_resolution(outcome_B, turn_reward_B_K),
        n_tool_turns_B=_n_tool_turns(n_tool_turns_B, has_reward_B_K, usable_B),
        **{name: _optional(name, table, rows, turns) for name, table in given.items()},
    )
    if n_tool_turns_B is None:
        _refuse_ambiguous(given, has_reward_B_K, usable_B)
    _refuse_unusable(tables)
    counts = {
        "invalid_rows": int((~valid_B).sum()),
        "nonfinite_outcomes": int(bad_B.sum()),
        "nonfinite_rewards": int(lost_B_K.sum()),
        "turns_without_reward": int((tables.turn_B_K1[:, 1:] & ~has_reward_B_K).sum()),
        "skipped_rows": 0,
        **group_counts(outcome_B, group_B, row_valid_B=valid_B),
        **_turn_group_counts(tables),
        **_optional_counts(tables),
    }
    return tables, counts


def _resolution(*tensors: torch.Tensor) -> float:
    """The resolution of float32 if a tensor is no float64: half precision is only a coarser input."""
    coarse = any(tensor.dtype.is_floating_point and tensor.dtype != torch.float64 for tensor in tensors)
    return torch.finfo(torch.float32 if coarse else torch.float64).eps


def _n_tool_turns(n_tool_turns_B, has_reward_B_K: torch.Tensor, valid_B: torch.Tensor) -> torch.Tensor:
    """The tool turns of each row: as given, or up to the last one with a reward. 0 for rows that are not valid."""
    turns = has_reward_B_K.shape[1]
    number_K = torch.arange(1, turns + 1, device=has_reward_B_K.device)
    last_B = (number_K * has_reward_B_K).amax(dim=1) if turns else torch.zeros_like(valid_B, dtype=torch.long)
    if n_tool_turns_B is not None:
        check_shape("n_tool_turns_B", n_tool_turns_B, valid_B.shape, "outcome_B")
        n_tool_turns_B = _integers("n_tool_turns_B", n_tool_turns_B, "integers")
        bad_B = valid_B & ((n_tool_turns_B < last_B) | (n_tool_turns_B > turns))
        if bad_B.any():
            row = first_row(bad_B)
            raise ValueError(
                f"n_tool_turns_B row {row} is {int(n_tool_turns_B[row])}; turn_reward_B_K has {turns} columns and the "
                f"row's last reward stands in turn {int(last_B[row]) - 1}"
            )
        last_B = n_tool_turns_B
    return torch.where(valid_B, last_B, 0)


def _refuse_ambiguous(given: dict, has_reward_B_K: torch.Tensor, valid_B: torch.Tensor) -> None:
    """Raise ValueError for a table with answer turns, if rows may have more tool turns than rewards."""
    wide = [name for name in given if name.endswith("_K1")]
    # Without columns no row has tool turns, and `all` is True.
    open_B = valid_B & ~has_reward_B_K[:, -1:].all(dim=1)
    if wide and open_B.any():
        raise ValueError(
            f"{wide[0]} without n_tool_turns_B: row {first_row(open_B)} has no reward in the last column of "
            "turn_reward_B_K, so how many tool turns it has, and in which column its answer stands, is not known; give "
            "n_tool_turns_B"
        )


def _optional(name: str, table: torch.Tensor, rows: int, turns: int) -> torch.Tensor:
    shape = (rows, turns + 1) if name.endswith("_K1") else (rows,)
    check_shape(name, table, shape, "outcome_B has rows and turn_reward_B_K turns, plus the answer turn")
    if name not in ("anchor_B_K1", "result_turn_B"):
        return table.to(torch.float64)
    return _integers(name, table, "integers, -1 for none")


def _integers(name: str, table: torch.Tensor, expected: str) -> torch.Tensor:
    if table.dtype.is_floating_point or table.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {table.dtype}; expected {expected}")
    return table.long()


def _refuse_unusable(tables: Tables) -> None:
    """Raise ValueError for a number that no turn mode can use, on a turn that the row has."""
    turn_B_K1, valid_B = tables.turn_B_K1, tables.valid_B[:, None]
    columns = turn_B_K1.shape[1]
    for name, member, use, good in (
        ("value_B_K1", turn_B_K1, "finite values", torch.isfinite),
        ("bootstrap_B", valid_B, "finite values", torch.isfinite),
        ("turn_tokens_B_K1", turn_B_K1, "0 or more tokens", lambda x: x.isfinite() & (x >= 0)),
        ("state_score_B_K1", turn_B_K1, "finite scores, NaN for none", lambda x: ~x.isinf()),
        ("initial_score_B", valid_B, "finite scores, NaN for none", lambda x: ~x.isinf()),
        ("result_turn_B", valid_B, "a turn's number, -1 for none", lambda x: (x >= -1) & (x < columns)),
    ):
        table = getattr(tables, name)
        if table is None:
            continue
        table = table if table.dim() == 2 else table[:, None]
        bad = member & ~good(table)
        if bad.any():
            row, turn = bad.nonzero()[0].tolist()
            where = f"row {row}, turn {turn}" if name.endswith("_K1") else f"row {row}"
            raise ValueError(f"{name} {where} is {float(table[row, turn]):g}; expected {use}")


def _turn_group_counts(tables: Tables) -> dict[str, int]:
    """Groups per prompt and tool turn with a reward, and those of one (z = 0) and two members (z = +-1 or 0)."""
    turns = tables.reward_B_K.shape[1]
    group_B_K = tables.group_B[:, None] * turns + torch.arange(turns, device=tables.group_B.device)
    size_G = group_B_K[tables.has_reward_B_K].bincount()
    return {
        "turn_groups": int((size_G > 0).sum()),
        "turn_groups_of_one": int((size_G == 1).sum()),
        "turn_groups_of_two": int((size_G == 2).sum()),
    }


def _optional_counts(tables: Tables) -> dict[str, int]:
    """Anchors: turns without one, states per prompt and those with a single turn. State scores: turns without one, and
    groups in which some rows have a score and others have none."""
    counts, turn_B_K1 = {}, tables.turn_B_K1
    if tables.anchor_B_K1 is not None:
        visit_B_K1 = turn_B_K1 & (tables.anchor_B_K1 != -1)
        pair_B_K1 = torch.stack([tables.group_B[:, None].expand_as(visit_B_K1), tables.anchor_B_K1])
        size_S = pair_B_K1[:, visit_B_K1].unique(dim=1, return_counts=True)[1]
        counts["turns_without_anchor"] = int((turn_B_K1 & ~visit_B_K1).sum())
        counts["states"], counts["states_of_one"] = len(size_S), int((size_S == 1).sum())
    if tables.state_score_B_K1 is not None:
        scored_B_K1 = turn_B_K1 & tables.state_score_B_K1.isfinite()
        scored_B = scored_B_K1.any(dim=1)
        of_both = (tables.group_B[member_B].tolist() for member_B in (scored_B, tables.valid_B & ~scored_B))
        counts["turns_without_score"] = int((turn_B_K1 & ~scored_B_K1).sum())
        counts["groups_with_and_without_scores"] = len(set.intersection(*map(set, of_both)))
    return counts


def _refuse(name: str, bad: torch.Tensor) -> None:
    if bad.any():
        raise ValueError(
            f"{name} row {first_row(bad)} holds a value that is not finite; expected finite numbers"
        )
