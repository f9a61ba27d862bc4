"""A run's folder as the report reads it, and the report as a browser would see it."""

import json
import shutil
from html.parser import HTMLParser

from verl_credit.records.report.text import Scale
from verl_credit.records.run.table_files import SAMPLE_NAMES, SAMPLES, TURNS, TURNS_SCHEMA, write_table

SCALES = {"advantage": Scale(0.0), "reward": Scale(0.0)}  # nothing but 0 is noise


def turn(text="<think>look</think>", observation="Page 1: Town\nA town.", gain=0.25, advantage=0.5, clip=1.1):
    return {
        "text": text,
        "observation": observation,
        "reward": gain,
        "z": None,
        "advantage": advantage,
        "clip_scale": clip,
    }


def trajectory(step=3, outcome=1.0, n_turns=2, question="Where is the town?", **changes):
    turns = [turn() for _ in range(n_turns - 1)]
    turns.append(turn("<answer>here</answer>", "", None, -0.75, 1.0))
    row = {
        "step": step,
        "question": question,
        "golds": ["here", "there"],
        "outcome": outcome,
        "stop_reason": "answer",
        "place": 0,
    }
    row = row | {"turns": turns} | changes
    return {"group": [{"outcome": row["outcome"], "turns": row["turns"]}]} | row


def sibling(outcome, *turns):
    """A member of a group; of every turn (gain, z, advantage)."""
    names = ("reward", "z", "advantage")
    return {"outcome": outcome, "turns": [dict(zip(names, one, strict=True)) for one in turns]}


def training(step):
    return {
        "step": step,
        "credit/outcome/em": 0.25 * step,
        "credit/outcome/format_ok": 1.0,
        "critic/score/mean": 0.2 * step,
        "credit/turns_cut": 0.04 * step,
        "credit/turns_per_row": 3.0 - 0.25 * step,
        "credit/gain/mean": 0.0625 * step,
        "credit/gain/turn_0": 0.125 * step,
        "credit/gain/turn_1": None if step == 2 else -0.01,
        "credit/gain/share_positive": 0.5,
        "credit/groups/all_solved": 0.1,
        "credit/groups/all_failed": 0.2,
        "actor/pg_clipfrac": 0.0125 * step,
        "timing_s/step": 10.0 + step,
    }


def evaluation(step, greedy, sampled):
    return {
        "step": step,
        "val-core/lab-greedy/em/mean@1": greedy,
        "val-aux/lab-sampled/em/mean@1": sampled,
        "val-aux/lab-sampled/format_ok/mean@1": 0.8,
    }


def write_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def write_trajectories(folder, rows, signals=("info_gain",)):
    """The tables in which a run keeps the texts of ``rows``, in place of those of `write_run`.

    The numbers of a row are those of its member at ``place``.
    """
    shutil.rmtree(folder / "tables", ignore_errors=True)
    for step in {row["step"] for row in rows}:
        samples, turns = dict.fromkeys(SAMPLE_NAMES, ()), dict.fromkeys(TURNS_SCHEMA.names, ())
        for group, row in enumerate(one for one in rows if one["step"] == step):
            number = 100 * group + row["place"]
            sample = {"gold_ids": "[]", "searches": "[]"} | row | {"group": group, "row": number}
            for name, values in (("texts", "text"), ("observations", "observation")):
                sample[name] = [turn[values] for turn in row["turns"]]
            samples = {name: (*column, sample[name]) for name, column in samples.items()}
            for place, member in enumerate(row["group"]):
                for turn in member["turns"]:
                    line = {
                        "row": 100 * group + place,
                        "group": group,
                        "valid": True,
                        "clip_scale": 1.0,
                    } | turn
                    line |= {"outcome": member["outcome"]}
                    turns = {name: (*column, line.get(name)) for name, column in turns.items()}
        pipeline = {"signals": signals}
        write_table(folder, SAMPLES, step, {name: list(column) for name, column in samples.items()}, pipeline)
        write_table(folder, TURNS, step, {name: list(column) for name, column in turns.items()}, pipeline)


def write_run(folder):
    write_lines(folder / "metrics.jsonl", [training(step) for step in (1, 2, 3)])
    write_lines(folder / "validation.jsonl", [evaluation(0, 0.375, 0.2), evaluation(3, 0.625, 0.4)])
    rows = [trajectory(), trajectory(outcome=0.0, question="Who?"), trajectory(step=1, question="What?")]
    write_trajectories(folder, rows)
    write_lines(
        folder / "events.jsonl",
        [
            {"time": 1.0, "kind": "banner", "text": "verl_credit: advantage=turn-group-v1d"},
            {"time": 2.0, "kind": "resume", "text": "resume: exact (step 2)"},
            {"time": 3.0, "kind": "turn_length", "text": "warning: in step 2 8% of the turns were cut"},
            {"time": 4.0, "kind": "rows_left_out", "text": "warning: in step 2 30% of the rows are left out"},
        ],
    )
    (folder / "config.yaml").write_text(
        "seed: 7\nalgorithm:\n  info_gain_norm_mode: turn-group-v1d\n  info_gain_type: prob_diff\n"
        "actor_rollout_ref: {}\ndata: {}\ntrainer: {}\nrun_dir: r\nfaults: {}\nevaluation: {}\n"
    )


class Page(HTMLParser):
    """Tags, attributes and text as a browser would see them; unbalanced tags fail."""

    VOID = {"meta", "img", "wbr"}

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.text, self.rows = [], set(), [], "", []
        self.feed(text)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "style" in self.open:
            return
        self.text += data
        if {"td", "th"} & set(self.open):
            self.rows[-1][-1] += data

    def values(self, name, attribute):
        return [value for tag, key, value in self.attributes if (tag, key) == (name, attribute)]


def report(run_dir):
    from verl_credit.records.report.write import write_report

    return write_report(run_dir).read_text(encoding="utf-8")
