"""Breaks the code in one place at a time and asks the tests that should notice: `python tests/mutants.py [FILE ...]`.

Works in a temporary copy. A text that has moved to another file is found there, if it stands in one place only. FILE: part
of a name. Exits 1 when a mutant survives or its text is not found.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {
    "verl_credit": "verl_credit",
    "retriever": "verl_credit_retriever",
    "recipes": "verl_credit_recipes",
}

# file below verl_credit/ or the root, text, mutated text, tests without "test_"
MUTANTS = [
    ("credit/groups.py", "/ (count_G - ddof)", "/ count_G", "credit_groups"),
    ("credit/turn/modes/turn_group.py", "* (sigma_out / sigma_gain)", "* (sigma_gain / sigma_out)", "credit_golden"),
    ("credit/turn/modes/turn_group_v1d.py", "n_B_K.clamp(min=1).sqrt()", "n_B_K.clamp(min=1)", "credit_golden"),
    ("credit/turn/modes/separate.py", "gain_scale * tables", "gain_scale + tables", "turn_credit"),
    ("credit/groups.py", "* stats.count_N / (stats.count_N", "/ (stats.count_N", "credit_unbiased"),
    ("credit/turn/info_gain.py", "finite_B_K1[:, 1:] & finite_B_K1[:, :-1]", "finite_B_K1[:, 1:]", "credit_info_gain"),
    ("credit/turn/adaptive_clip.py", "(2 * z.sigmoid() - 1)", "(z.sigmoid() - 0.5)", "primitives"),
    ("credit/token/gtpo.py", ".add_(1).clamp_(min=0)", ".add_(1)", "token_gtpo"),
    ("credit/token/sepa.py", "(1 - lam_B_T).mul_(h_B_T)", "(1 + lam_B_T).mul_(h_B_T)", "token_credit"),
    ("credit/token/sepa_controller.py", ">= self.correct_rate_gate:", "> self.correct_rate_gate:", "sepa_controller"),
    ("credit/token/hicra.py", "advantage_B_T.abs().mul_(alpha)", "advantage_B_T.mul(alpha)", "token_credit"),
    ("credit/token/entropy_mask.py", "count_G.double() * rho", "count_G.float() * rho", "token_entropy_mask"),
    ("credit/token/polarity.py", "(rewarded_G < members_G)", "(rewarded_G <= members_G)", "canonical"),
    ("credit/outcome/maxrl.py", "stats.mean_N > eps", "stats.mean_N >= 0", "outcome_operators"),
    ("credit/outcome/reinforce_pp.py", "(weight_B * spread_B**2)", "(spread_B**2)", "outcome_operators"),
    ("credit/outcome/outcome.py", "(size_G > 1) & (low_G", "(low_G", "credit_groups turn_credit step_metrics"),
    ("credit/loss/policy_loss.py", "1 - low * scale_B_T", "1 - low", "credit_loss"),
    ("credit/loss/policy_loss.py", "torch.maximum(free_B_T, bounded_B_T)", "bounded_B_T", "credit_loss"),
    ("credit/loss/aggregate.py", "loss_B_T.sum() / count * dp_size", "loss_B_T.sum() / count", "credit_loss loss_ranks"),
    ("credit/planning/planning.py", "self.last_M - self.first_M + 1", "self.last_M - self.first_M", "planning"),
    ("credit/planning/anchors.py", "execution_n + threshold", "execution_n", "planning_anchors"),
    ("log_probs/chunks.py", ".mul_(scaled).nansum(-1)", ".mul_(scaled).sum(-1)", "log_probs"),
    ("attention/pack.py", "(key < self.end_N[query])", "(key <= self.end_N[query])", "attention_kernels"),
    ("attention/pack.py", "trunk_N = torch.maximum(trunk_N,", "torch.maximum(trunk_N,", "attention_kernels"),
    ("attention/varlen.py", "(window - 1, 0)", "(window, 0)", "attention_kernels"),
    ("turns/book.py", "self.n_turns if m else -1", "self.n_turns", "turn_book"),
    ("turns/branches.py", "- 1].token_ids) <=", "- 1].token_ids) <", "gain_step turn_batch gain_rows"),
    ("turns/branches.py", "i, g=grown: -g[i].base", "i, g=grown: g[i].base", "gain_step turn_batch gain_rows"),
    ("turns/gains.py", 'gain.info_gain_B_K if on_error == "drop"', 'gain.info_gain_B_K if on_error == "zero"', "gain_step"),
    ("credit/turn/inputs.py", "~turn_reward_B_K.isfinite()", "turn_reward_B_K.isnan()", "turn_credit laws"),
    ("credit/turn/mode.py", "counts_B = counts_B & ~tied_B", "counts_B = counts_B", "turn_credit outcome_operators"),
    ("credit/turn/states.py", "tables.known_B[:, None] & (tables.anchor", "(tables.anchor", "turn_methods_worked"),
    ("credit/turn/anchors.py", "autojunk = released_order is not None", "autojunk = True", "anchors turn_methods"),
    ("turns/anchors.py", 'states[row] = ["", *shown', 'states[row] = [*shown', "turn_anchors"),
    ("turns/signals/combine.py", "torch.where(lost_B_K, torch.nan, part_B_K)", "part_B_K", "turn_signals"),
    ("host/step/store.py", "torch.where(mask_B_T.bool(), turn_ids_B_T, -1)", "turn_ids_B_T", "own_agent_loop"),
    ("host/step/stops.py", "step.token_metrics.get(turns_with(name)) == 0", "False", "signals_arrive"),
    ("turns/signals/step.py", "if len(signals) > 1 else", "if len(active) > 1 else", "turn_signals"),
    ("turns/signals/own.py", "if asyncio.current_task().cancelling():", "if True:", "turn_signals"),
    ("turns/signals/own.py", "range(judge.retries + 1)", "range(judge.retries)", "turn_signals"),
    ("turns/signals/step.py", "lost > tolerated_share * asked", "lost < tolerated_share * asked", "turn_signals"),
    ("turns/book.py", "sum(rewards) if rewards else None", "sum(rewards)", "turn_agent turn_batch"),
    ("credit/turn/info_gain.py", "exists_B_K, failed_B_K)", "exists_B_K & ~failed_B_K, failed_B_K)", "credit_info_gain"),
    ("turns/signals/known.py", "return values[:needed]", "return values", "turn_signals_fields"),
    ("turns/signals/own.py", "if not line.breaker.refuses:", "if True:", "turn_judge_breaker"),
    ("host/step/unrewarded.py", "self._counted.pop(name, None)", "pass", "signals_arrive"),
    ("host/rollout/agent_manager.py", "[0] * len(output.response_mask)", "output.response_mask", "own_agent_loop"),
    ("credit/turn/mode.py", 'options.get("norm_by_std") is False', "False", "turn_methods_worked"),
    ("credit/laws/rewards.py", "if (fell_2 & bound_2).any():", "if (fell_2 & bound_2)[0].any():", "laws"),
    ("turns/scorers/server.py", "until = max(until, end)", "until = end", "step_metrics gain_server"),
    ("host/step/trajectories.py", "(-int(turns.n_turns_B[row]), row)", "(int(turns.n_turns_B[row]), row)", "trajectories"),
    ("turns/token_stage.py", "token_ids_B_T, written_B_T)", "token_ids_B_T, mask_B_T)", "token_stage token_estimator"),
    ("turns/scorers/server.py", "len(prompt) - 1 - n_gold", "len(prompt) - n_gold", "gain_server"),
    ("host/step/row_scores.py", "% (dp_size * micro_batch)", "% dp_size", "gain_rows"),
    ("host/engine/branch_engine.py", "torch.arange(base, base + n)", "torch.arange(n)", "branch_engine"),
    ("host/engine/branch_engine.py", "row.start + row.length] = 1.0", "row.start + row.length] *= 1.0", "branch_engine"),
    ("search/circuit_breaker.py", "if ticket != self._counted:", "if False:", "circuit_breaker"),
    ("search/servers.py", "max(ready.get(server.url, now), now)", "0", "search_failover"),
    ("search/faults.py", "return seconds * jitter", "return jitter", "search_client search_failover"),
    ("search/pages.py", "page.text[:max_page_chars]", "page.text", "search_client lab_protocol"),
    ("retriever/index/exact.py", "np.lexsort((rows, -scores))", "np.lexsort((-rows, -scores))", "retriever_exact"),
    ("retriever/index/search.py", ".max() >= len(self)", ".max() > len(self)", "retriever_index retriever_faults"),
    ("retriever/index/search.py", "_D[short_N], k)", "_D[~short_N], k)", "retriever_index retriever_exact"),
    ("retriever/http/cache.py", "self._kept.move_to_end(key)", "pass", "retriever_server_batching"),
    ("retriever/http/pace.py", "now - max(began, self._last)", "now - began", "retriever_server_batching"),
    ("retriever/http/waiting.py", "wider * more >", "wider * len(texts) >", "retriever_server_batching"),
    ("run/files.py", 'if row["step"] > last_step', 'if row["step"] >= last_step', "run_files"),
    ("run/state.py", "MOVED.get(value, value)", "value", "run_files"),
    ("reward/qa.py", "while (start", "if (start", "reward"),
    ("reward/boxed.py", 're.compile(r"\\\\.|[{}]"', 're.compile(r"[{}]"', "math_reward"),
    ("data/clean.py", " or not _scores(answer)", "", "prepare prepare_output"),
    ("plan/run_time.py", "-(-steps // every)", "steps // every", "plan_memory plan_command"),
    ("plan/memory.py", '"optimizer": 2 * own', '"optimizer": own', "plan_memory"),
    ("config/row_room.py", "row + contexts * SHORT_ANSWER", "row", "answer_budget"),
    ("recipe/rules/pipeline.py", "if penalty > 0:", "if penalty > 1:", "refusals"),
    ("recipe/unread.py", "key.read is None or key.read(settings) or ", "key.read is None or ", "unread explain"),
    ("recipe/rules/known.py", "if key not in accepted:", "if False:", "known_keys"),
    ("doctor/hardware/room.py", "if state > phase.capacity", "if phase.total > phase.capacity", "doctor*"),
    ("doctor/inputs/answer_budget.py", "answer.gold_end + (answer.gold_start == 0)", "answer.gold_end", "answer_budget"),
    ("report/again.py", 'tied_groups=pipeline["tied_groups"]', 'tied_groups="keep"', "again"),
    ("report/lens_settings.py", "(self.reward_G_K > 0)", "(self.reward_G_K >= 0)", "lens"),
    ("host/step/tables.py", "chosen[-1] = telling[0]", "chosen[0] = telling[0]", "step_tables"),
    ("run/tables.py", "old <= step - keep", "old < step - keep", "tables"),
    ("report/watch.py", "kinds[-1] == END or", "kinds[0] == END or", "watch"),
    ("probe/distribution.py", "before_N_V < sampling.top_p", "before_N_V + ordered_N_V <= sampling.top_p", "worked_numbers"),
    ("probe/baselines.py", "counted_P_J.sum(0) - counted_P_J", "counted_P_J.sum(0)", "exact_gradient"),
    ("probe/baselines.py", "before.append(mu_J)", "before.append(mu_J if len(before) else summed_J)", "exact_gradient"),
    ("probe/baselines.py", "(fold_B != number)", "(fold_B >= 0)", "exact_gradient"),
    ("probe/entropy_gradient.py", "residual_B_T = where.spread(mean_B)", "residual_B_T = entropy_B_T", "exact_gradient"),
    ("probe/entropy_gradient.py", "- self.per_token * self.length", "+ self.per_token * self.length", "derivatives"),
    ("probe/prediction.py", "- d * (f_P / t - f * t_P / t**2)", "", "worked_numbers"),
    ("probe/prediction.py", "total_P - x_dot_y_P", "total_P", "exact_gradient"),
    ("probe/truth.py", "w_B * length_B, f_B", "length_B, f_B", "truth"),
    ("probe/policy.py", "where[1] - 1]", "where[1]]", "model_policy"),
    ("probe/policy.py", "and parameters is not self.parameters", "and parameters is None", "model_policy"),
    ("probe/precision.py", "if func is torch.Tensor.float:", "if False:", "model_policy"),
]  # fmt: skip


def place(tree: Path, file: str, text: str) -> Path | None:
    """The named file, or the only one in the packages, that holds the text once."""
    named = [p for p in (tree / "verl_credit" / file, tree / file) if p.is_file() and text in p.read_text()]
    found = named or [p for top in PACKAGES for p in (tree / top).rglob("*.py") if text in p.read_text()]
    return found[0] if len(found) == 1 and found[0].read_text().count(text) == 1 else None


def verdict(tree: Path, file: str, text: str, mutated: str, tests: str) -> str:
    if (target := place(tree, file, text)) is None:
        return "NOT FOUND"
    original = target.read_text()
    target.write_text(original.replace(text, mutated))
    try:
        chosen = [str(p) for name in tests.split() for p in tree.glob(f"tests/**/test_{name}.py")]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *chosen],
            cwd=tree, env={**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True, text=True, timeout=900,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return "killed by the time limit"
    finally:
        target.write_text(original)
    killer = re.search(r"^(?:FAILED|ERROR) tests/(\S+)", done.stdout, re.M)
    if killer:
        return f"killed by {killer[1]}"
    return "SURVIVED" if done.returncode == 0 else f"ERROR {done.returncode}: {done.stdout[-300:]}"


def main(words: list[str]) -> int:
    chosen = [row for row in MUTANTS if not words or any(word in row[0] for word in words)]
    results = []
    with tempfile.TemporaryDirectory(prefix="mutants") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(
            ROOT, tree, ignore=shutil.ignore_patterns(".git", ".venv*", "runs", "__pycache__", "shared")
        )
        for name, package in PACKAGES.items():
            if name != package:  # what pyproject.toml maps for an installation
                (tree / package).symlink_to(name)
        for file, text, mutated, tests in chosen:
            results.append(verdict(tree, file, text, mutated, tests))
            print(f"{file:45} {text[:45]:45} -> {mutated[:45]:45} {results[-1]}", flush=True)
    killed = sum(result.startswith("killed") for result in results)
    print(f"{killed} of {len(results)} mutants killed")
    return killed != len(results)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
