"""Everything that a step stored beside its rollouts, as its file has it."""

from types import SimpleNamespace

import torch

from verl_credit.records.run.table_files import read_table
from verl_credit.study.probe.kept_rollouts import padded, read_rollouts


def facts_of(path) -> SimpleNamespace:
    """The probe's facts, and the columns and counts that it does not read."""
    _, facts = read_rollouts(path)
    table = read_table(path)
    c, about = table.columns, table.update
    return SimpleNamespace(
        **vars(facts),
        step=table.step,
        **{name: about[name] for name in ("updates", "rows", "loss_tokens")},
        uid=c["uid"],
        turn_ids_B_T=padded(c, "turn", torch.int64, fill=-1),
        clip_scale_B_T=padded(c, "clip_scale"),
        entropy_B_T=padded(c, "entropy"),
        log_prob_B_T=padded(c, "old_log_prob"),
        outcome_B=torch.tensor(c["outcome"], dtype=torch.float64),
    )
