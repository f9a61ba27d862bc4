"""The names of verl that the host uses, compared with any tree of verl. Nothing is imported: both sides are read as syntax.

    contacts.py                the contacts of verl_credit/host with the installed verl, beside contacts.json
    contacts.py --verl PATH    contacts.json beside another verl: a checkout, a package folder or a wheel
    contacts.py --write        writes contacts.json anew from the installed verl

A contact is an imported name, or an attribute of an imported module or of a class of verl that a class of ours extends: a
method that is overridden or called, or a value that is read. `NAMED` adds objects whose class the syntax does not show. The
manifest has the arguments of each; "=" marks an argument with a default.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from package_syntax import Sources, dotted_name, imported, members_of, of_self

ROOT = Path(__file__).parents[2]
HOST = "verl_credit.host."
MANIFEST = Path(__file__).with_name("contacts.json")
NAMED = {
    "verl.experimental.agent_loop.agent_loop:AgentLoopBase": ("ct_merge_context_msg",),
    "verl.single_controller.base.worker:Worker": ("_query_dispatch_info",),
    "verl.single_controller.ray.base:RayWorkerGroup": ("_dispatch_info",),
    "verl.trainer.ppo.v1.replay_buffer:ReplayBuffer": ("_wait_for_next_poll", "poll_interval", "sample"),
    "verl.trainer.ppo.v1.replay_buffer:ReplayBufferAsync": ("_select_prompt_uids",),
    "verl.utils.tokenizer.continuous_token:ContinuousTokenBuilder": ("_merge_context_token_ids", "_render_tokens"),
}  # fmt: skip


def arguments(node: ast.AST | None) -> str | None:
    """The argument names of a function, or of a class's own __init__; None for what has none."""
    if isinstance(node, ast.ClassDef):
        node = members_of(node).get("__init__")
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return None
    of, names = node.args, []
    placed = [*of.posonlyargs, *of.args]
    for number, one in enumerate(placed):
        names.append(one.arg + "=" * (number >= len(placed) - len(of.defaults)))
    names += [f"*{of.vararg.arg}"] if of.vararg else ["*"] if of.kwonlyargs else []
    keyed = zip(of.kwonlyargs, of.kw_defaults, strict=True)
    names += [one.arg + "=" * (default is not None) for one, default in keyed]
    return ", ".join(names + ([f"**{of.kwarg.arg}"] if of.kwarg else []))


def look_up(verl: Sources, contact: str) -> tuple[bool, str | None]:
    """(whether this verl has it, its arguments)."""
    module, _, path = contact.partition(":")
    name, _, member = path.partition(".")
    place = verl.resolve(module, name or None)
    if place is None or not member:
        return place is not None, arguments(place[1]) if place else None
    found = verl.member(*place, member) if isinstance(place[1], ast.ClassDef) else None
    return found is not None, arguments(found[2]) if found else None


def contacts_of(ours: Sources, verl: Sources) -> dict[str, set[str]]:
    """contact -> the modules of ours that have it."""
    found: dict[str, set[str]] = {}
    for module in sorted(name for name in ours.names if name.startswith(HOST)):
        tree, package = ours.tree(module)
        modules, classes, nodes = {}, {}, list(ast.walk(tree))
        for node in (one for one in nodes if isinstance(one, ast.Import | ast.ImportFrom)):
            for local, target in imported(node, module, package):
                if target[0].split(".")[0] != "verl":
                    continue
                found.setdefault(":".join(filter(None, target)), set()).add(module)
                place = verl.resolve(*target)
                if place and place[1] is None:
                    modules[local] = place[0]
                elif place and isinstance(place[1], ast.ClassDef):
                    classes[local] = place
        for node in nodes:
            holder = dotted_name(node.value) if isinstance(node, ast.Attribute) else ""
            if holder in modules and not verl.tree(f"{modules[holder]}.{node.attr}"):
                found.setdefault(f"{modules[holder]}:{node.attr}", set()).add(module)
            elif holder in classes and verl.member(*classes[holder], node.attr):
                place, owner, _ = verl.member(*classes[holder], node.attr)
                found.setdefault(f"{place}:{owner.name}.{node.attr}", set()).add(module)
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                for contact, place in _inherited(ours, verl, module, node):
                    found.setdefault(contact, set()).add(place)
    for owner, members in NAMED.items():
        found |= {f"{owner}.{member}": {"named in contacts.py"} for member in members}
    return found


def _inherited(ours: Sources, verl: Sources, module: str, node: ast.ClassDef) -> Iterator[tuple[str, str]]:
    """What a class of ours, and the mixins beside it, override and use of the classes of verl that it extends."""
    family, theirs = ours.ancestors(module, node), []
    for place, owner in family:
        for base in owner.bases:
            holder, _, last = dotted_name(base).removesuffix(".__ray_actor_class__").rpartition(".")
            target = ours.scope(place).get(holder or last)
            if isinstance(target, tuple) and target[0].split(".")[0] == "verl":
                whole = ".".join(filter(None, target))
                theirs.append(verl.resolve(whole, last) if holder else verl.resolve(*target))
    for place, owner in family if theirs else ():
        used = {name for one in ast.walk(owner) if (name := of_self(one))} | set(members_of(owner))
        for name in sorted(used):
            for their in theirs:
                if their and isinstance(their[1], ast.ClassDef) and (known := verl.member(*their, name)):
                    yield f"{known[0]}:{known[1].name}.{name}", place


def host() -> Sources:
    return Sources(ROOT / "verl_credit", "verl_credit")


def installed() -> Sources:
    return Sources(Path(importlib.util.find_spec("verl").origin).parents[1], "verl")


def manifest(uses: dict[str, set[str]], verl: Sources) -> dict[str, str | None]:
    return {contact: look_up(verl, contact)[1] for contact in sorted(uses)}


def differences(known: dict[str, str | None], verl: Sources) -> dict[str, str]:
    """contact -> what this verl has instead; contacts that are the same are left out."""
    found = {}
    for contact, args in known.items():
        there, its = look_up(verl, contact)
        if not there:
            found[contact] = "absent"
        elif its != args:
            found[contact] = f"({its})" if its is not None else "not a function"
    return found


def table(known: dict, verl: Sources, uses: dict[str, set[str]]) -> list[str]:
    """The differences as rows of Markdown."""
    lines = ["| contact | verl of the manifest | this verl | used in |", "|---|---|---|---|"]
    for contact, now in differences(known, verl).items():
        was = f"({known[contact]})" if known[contact] is not None else "there"
        where = ", ".join(sorted(one.removeprefix("verl_credit.") for one in uses.get(contact, ())))
        lines.append(f"| `{contact.removeprefix('verl.')}` | `{was}` | `{now}` | {where} |")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verl", type=Path)
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    here = installed()
    uses = contacts_of(host(), here)
    if options.write:
        stored = {"verl": here.version, "contacts": manifest(uses, here)}
        MANIFEST.write_text(json.dumps(stored, indent=1) + "\n")
    stored = json.loads(MANIFEST.read_text())
    known, verl = stored["contacts"], here if options.verl is None else Sources(options.verl, "verl")
    names = sum("." not in contact.partition(":")[2] for contact in known)
    members = len(known) - names
    print(f"{names} names and {members} members of classes of verl {stored['verl']}, beside {verl.version}:")
    changed = differences(known, verl)
    print(*(table(known, verl, uses) if changed else ["all are the same"]), sep="\n")
    if gone := sorted(set(uses) ^ set(known)):
        print("contacts.json is not of this code (--write):", *gone, sep="\n  ")
    return bool(changed or gone)


if __name__ == "__main__":
    sys.exit(main())
