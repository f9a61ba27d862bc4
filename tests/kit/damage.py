"""Damage to what a file holds: its bytes, or a value anywhere in it."""

from __future__ import annotations

import copy
import random

import yaml

ODD = (
    "text", None, [], [1, "a"], {}, {"a": 1}, True, -1, 0.5, 10**400, 1e308, -1e308, float("nan"), float("inf"), "\ud800",
    "\x00", "<b>", "x" * 100_000, [[[[]]]],
)  # fmt: skip

# Deeper than Python's limit. Not deeper by much: the C loader that kit.recipes puts in has no limit but the stack.
DEEP = b"[" * 5_000

BYTES = {
    "cut": lambda content, place, draw: content[:place],
    "flip": lambda content, place, draw: content[:place] + draw.randbytes(1) + content[place + 1 :],
    "flip many": lambda content, place, draw: bytes(b ^ (draw.random() < 0.02) * 32 for b in content),
    "insert": lambda content, place, draw: content[:place] + draw.randbytes(5) + content[place:],
    "twice": lambda content, place, draw: content[:place] + content,
    "empty": lambda content, place, draw: b"",
    "BOM": lambda content, place, draw: b"\xef\xbb\xbf" + content,
    "UTF-16": lambda content, place, draw: content.decode("utf-8", "replace").encode("utf-16"),
    "CRLF": lambda content, place, draw: content.replace(b"\n", b"\r\n"),
    "long line": lambda content, place, draw: content[:place] + DEEP + content[place:],
    "nulls": lambda content, place, draw: content[:place] + bytes(100),
}


def damaged_bytes(content: bytes, draw: random.Random) -> tuple[str, bytes]:
    """(what was done, the damaged content)"""
    kind, place = draw.choice(list(BYTES)), draw.randrange(len(content) + 1)
    return f"{kind} at byte {place} of {len(content)}", BYTES[kind](content, place, draw)


def written(tree: dict, draw: random.Random) -> bytes:
    """The YAML file of a tree, with its Unicode as it is or escaped."""
    plain = draw.random() < 0.5
    return yaml.dump(tree, Dumper=yaml.CSafeDumper, allow_unicode=plain, sort_keys=False).encode()


def damaged_value(tree: dict | list, draw: random.Random, odd: tuple = ODD) -> str:
    """Puts another value anywhere into the tree; returns where, and which."""
    value, at, node = copy.deepcopy(draw.choice(odd)), "", tree
    while isinstance(node, dict | list) and node:
        name = draw.choice(list(node) if isinstance(node, dict) else range(len(node)))
        at += f"[{name!r}]"
        if not isinstance(node[name], dict | list) or draw.random() < 0.3:
            node[name] = value
            break
        node = node[name]
    return f"{at} = {repr(value)[:60]}"
