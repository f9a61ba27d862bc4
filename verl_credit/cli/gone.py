"""Words of the command line that are gone, each with what is there now. Commit 33b16abd last had all of them."""

_LOOP = "a loop of the shell over overrides, or verl-credit campaign (docs/campaigns.md)"
_TRIALS = "FOLDER/results.tsv is the table, and verl-credit lineage render makes KNOWLEDGE.md of it"
WORDS: dict[tuple[str, str], str] = {
    ("train", "-m"): _LOOP,
    ("train", "--multirun"): _LOOP,
    ("report", "--watch"): "verl-credit report RUN, at any time while the run goes on",
    ("report", "A B"): "verl-credit diff A B (settings, last metrics), or a campaign (docs/campaigns.md)",
    ("lineage", "show"): _TRIALS,
    ("lineage", "best"): _TRIALS,
    ("bench", "--table"): "leave it out: verl-credit bench measures a row of the table in any case",
    ("prepare check", "--search"): "--corpus=FILE, a file of JSON lines or an index's folder (docs/data.md)",
    ("fidelity", "lens"): "verl-credit fidelity RUN --dir FOLDER; no report has true advantages any more",
}


def gone_word(line: list[str]) -> str:
    """The refusal of a command line with such a word; "" for any other line."""
    for (command, word), now in WORDS.items():
        given = line[len(command.split()) :] if " ".join([*line, ""]).startswith(f"{command} ") else []
        options = [one.partition("=")[0] for one in given if one.startswith("-")]
        two = ["A B"] if len(given) == 2 and not options else []
        if word in [*options, *given[:1], *two]:
            return f"verl-credit {command} {word} is gone (commit 33b16abd last had it); now: {now}"
    return ""
