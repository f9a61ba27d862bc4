"""Where grams stand, by the definition: an oracle that walks the text character by character."""

APOSTROPHES = "'\u2019\u02bc`"


def is_word(c):
    return c.isalnum() and c not in APOSTROPHES


def walk(text, at, gram):
    """Where `gram`, begun at text[at], ends; None if it is not there."""
    for n, c in enumerate(gram):
        if is_word(c):
            if at == len(text) or not is_word(text[at]) or text[at].lower() != c.lower():
                return None
            at += 1
            continue
        optional = c in APOSTROPHES and is_word(gram[n - 1]) and is_word(gram[n + 1])
        if not optional and (at == len(text) or is_word(text[at])):
            return None
        while at < len(text) and not is_word(text[at]):
            at += 1
    return at if at == len(text) or not is_word(text[at]) else None


def oracle_spans(text, grams):
    starts = [s for s in range(len(text)) if is_word(text[s]) and (s == 0 or not is_word(text[s - 1]))]
    return [(s, end) for s in starts for gram in grams if (end := walk(text, s, gram)) is not None]


def oracle(pieces, mask, grams):
    """One row by the definition."""
    planning, run = [False] * len(pieces), []
    for column in range(len(pieces) + 1):
        if column < len(pieces) and mask[column]:
            run.append(column)
            continue
        owner = [t for t in run for _ in pieces[t]]
        for begin, end in oracle_spans("".join(pieces[t] for t in run), grams):
            for t in range(owner[begin], owner[end - 1] + 1):
                planning[t] = True
        run = []
    return planning
