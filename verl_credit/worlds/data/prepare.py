"""`verl-credit prepare`: read, check, split, write, report."""

from __future__ import annotations

import json
import random
from contextlib import closing
from pathlib import Path

from verl_credit.built_folder import sha256_of
from verl_credit.turns.rollout.reward.golds import doubt
from verl_credit.turns.rollout.reward.qa import BOXED
from verl_credit.worlds.data.catalogue import DataSet, find
from verl_credit.worlds.data.output import CorpusWriter, Tally, check_free, staged, write_rows
from verl_credit.worlds.data.records import DUPLICATE, UNREADABLE, PrepareError, Record, Rejected, clean
from verl_credit.worlds.data.sources import SPLIT_WORDS, SPLITS, Source, open_source

FORMAT = 1  # manifest.json and report.json have it


def prepare(
    name: str,
    source: str,
    out: Path,
    *,
    limit: int | None = None,
    val_size: int | None = None,
    seed: int = 0,
    splits: list[str] | None = None,
    overwrite: bool = False,
    subset: str | None = None,
    revision: str | None = None,
) -> Tally:
    """Write ``out``: a parquet file per split, corpus.jsonl if there are paragraphs, report.json, manifest.json.

    ``limit``: take the first rows of each split. ``val_size``: draw this many rows of the only split into val.parquet
    (with ``seed``); the rest is train.parquet. ``splits``: the splits to read, default all. Raises PrepareError and
    writes nothing when no row is left or an option is wrong.
    """
    data_set = find(name)
    for key, value in (("limit", limit), ("val-size", val_size)):
        if value is not None and value < 1:
            raise PrepareError(f"--{key}={value}: expected 1 or more")
    out = Path(out).expanduser().resolve()
    check_free(out, overwrite)
    opened = open_source(source, data_set, subset, revision)
    chosen = _choose(opened.splits(), splits)
    if val_size is not None and len(chosen) > 1:
        use = f"the source has {', '.join(chosen)}; choose the one to divide with --splits"
        raise PrepareError(f"--val-size={val_size}: {use}")
    settings = {"limit": limit, "val_size": val_size, "seed": seed, "splits": chosen}
    with staged(out, overwrite) as folder:
        tally = Tally(not_read=[Path(file).name for file in opened.about.get("not_read", ())])
        with closing(CorpusWriter(folder / "corpus.jsonl")) as corpus:
            records = {split: _read(opened, split, data_set, limit, tally, corpus) for split in chosen}
        if not any(records.values()):
            read = sum(split.records for split in tally.splits.values())
            why = _reasons(tally) or "it is empty"
            raise PrepareError(f"--source={source}: no row is left of {read} records: {why}")
        if val_size is not None:
            records = _hold_out(records[chosen[0]], val_size, random.Random(f"{seed} {name}"), tally)
        _remove_overlap(records, tally)
        if val_size is not None and not records["train"]:
            raise PrepareError(f"--val-size={val_size} leaves no row for training")
        for split, kept in records.items():
            if kept:  # a split without rows (a test set without answers) has no file
                write_rows(kept, data_set, split, folder / f"{split}.parquet")
                answers = sum(len(record.answers) for record in kept)
                tally.files[f"{split}.parquet"] = {"rows": len(kept), "gold_answers": answers}
        if corpus.counts["paragraphs"]:
            tally.files["corpus.jsonl"] = corpus.counts
        else:
            (folder / "corpus.jsonl").unlink()
        _write_json(folder / "report.json", {"format": FORMAT, **tally.as_dict(name)})
        files = {file.name: {"sha256": sha256_of(file)} for file in sorted(folder.iterdir())}
        for file, counts in tally.files.items():
            files[file] |= counts
        manifest = {"data_set": name, "source": opened.about, "settings": settings, "files": files}
        _write_json(folder / "manifest.json", {"format": FORMAT, **manifest})
    return tally


def _choose(there: list[str], wanted: list[str] | None) -> list[str]:
    """The source's splits that are ``wanted``, in the order train, val, test; "dev" and "validation" mean val."""
    if wanted is None:
        return there
    names = {SPLIT_WORDS.get(name.lower(), name) for name in wanted}
    missing = sorted(names - set(there))
    if missing:
        use = f"the source has no {', '.join(missing)}; it has {', '.join(there)}"
        raise PrepareError(f"--splits={','.join(wanted)}: {use}")
    return [split for split in there if split in names]


def _read(
    source: Source, split: str, data_set: DataSet, limit: int | None, tally: Tally, corpus: CorpusWriter
) -> list[Record]:
    counts, kept = tally.splits[split], []
    seen: dict[str, set[frozenset[str]]] = {}
    for item in source.items(split):
        counts.records += 1
        if item.problem:
            counts.drop(UNREADABLE, item.where, item.problem)
            continue
        try:
            record = clean(data_set.read(item.raw), data_set.form, tally.left_out)
        except Rejected as rejected:
            counts.drop(rejected.reason, item.where, rejected.detail)
            continue
        answers = seen.setdefault(_key(record), set())
        if frozenset(record.answers) in answers:
            counts.drop(DUPLICATE, item.where, record.question[:80])
            continue
        for gold in record.answers:
            if looks := doubt(gold, number=data_set.form == BOXED):
                tally.doubt(gold, looks, item.where)
                break
        tally.other_answers += bool(answers)
        answers.add(frozenset(record.answers))
        record.origin = split
        record.id = record.id or item.where
        corpus.add(record.paragraphs)
        record.paragraphs = []
        kept.append(record)
        if len(kept) == limit:
            break
    counts.kept = len(kept)
    return kept


def _key(record: Record) -> str:
    return " ".join(record.question.casefold().split())


def _hold_out(
    records: list[Record], val_size: int, rng: random.Random, tally: Tally
) -> dict[str, list[Record]]:
    if val_size >= len(records):
        left = f"only {len(records)} rows are left; at least one must remain for training"
        raise PrepareError(": ".join(filter(None, (f"--val-size={val_size}: {left}", _reasons(tally)))))
    held = set(rng.sample(range(len(records)), val_size))
    return {
        "train": [record for i, record in enumerate(records) if i not in held],
        "val": [record for i, record in enumerate(records) if i in held],
    }


def _remove_overlap(records: dict[str, list[Record]], tally: Tally) -> None:
    """Remove the questions of val and test from train, and the questions of test from val."""
    later: dict[str, str] = {}
    for split in reversed(SPLITS):
        kept = []
        for record in records.get(split, []):
            if (where := later.get(_key(record))) is None:
                kept.append(record)
                continue
            counts = tally.splits[record.origin]
            counts.drop(f"question also in {where}", record.id, record.question[:80])
            counts.kept -= 1
        if split in records:
            records[split] = kept
            later |= {_key(record): split for record in kept}


def _reasons(tally: Tally) -> str:
    """Why records were dropped, the most frequent reasons of each split with an example."""
    return "; ".join(
        f"{count} {reason} (first {split.examples[reason][0]})"
        for split in tally.splits.values()
        for reason, count in split.dropped.most_common(3)
    )


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
