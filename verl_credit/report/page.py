"""The page around summary, curves and trajectories."""

from __future__ import annotations

from verl_credit.report.choose import choose
from verl_credit.report.curves import panel_data_uri
from verl_credit.report.markup import escape
from verl_credit.report.numbers import percent
from verl_credit.report.panels import Panel
from verl_credit.report.run_data import Run
from verl_credit.report.style import CSS
from verl_credit.report.summary import summary_html
from verl_credit.report.trajectory import trajectories_html
from verl_credit.run.files import TRAJECTORIES, VALIDATION


def page(run: Run, panels: list[Panel]) -> str:
    """A complete HTML document: no script, no address to fetch."""
    title = f"Run report: {run.folder.resolve().name}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="only light">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n<main>\n"
        f"<header><h1>{escape(title)}</h1>{_lede(run)}{_banner(run)}</header>\n"
        f"<section><h2>First and last values</h2>{_validation_notice(run)}{summary_html(run)}</section>\n"
        f'<section><h2>Learning curves</h2><div class="figures">{"".join(map(_figure, panels))}</div></section>\n'
        f"<section><h2>Trajectories</h2>{_trajectories(run)}</section>\n"
        f"<section><h2>Settings</h2>{_settings(run)}</section>\n"
        "</main>\n</body>\n</html>\n"
    )


def _lede(run: Run) -> str:
    first, last = run.metrics[0]["step"], run.metrics[-1]["step"]
    text = [f"Training step {first}." if first == last else f"Training steps {first} to {last}."]
    for entry in run.held_out():
        if entry.mode == "greedy" and len(entry.em.steps) > 1:
            text.append(
                f"Held-out exact match (EM, greedy, {escape(entry.source)}): {percent(entry.em.values[0])} at step "
                f"{entry.em.steps[0]}, <b>{percent(entry.em.values[-1])}</b> at step {entry.em.steps[-1]}."
            )
    return f'<p class="lede">{" ".join(text)}</p>'


def _banner(run: Run) -> str:
    """The last banner is the one in force; every resume is told."""
    banners = run.event("banner")
    lines = [f"<code>{escape(banners[-1])}</code>" if banners else "events.jsonl has no banner line."]
    lines += [f"<code>{escape(text)}</code>" for text in dict.fromkeys(run.event("idle"))]
    lines += [f"<code>{escape(text)}</code>" for text in run.event("turn_length")[-1:]]
    lines += [f"<code>{escape(text)}</code>" for text in run.event("resume")]
    return "".join(f'<p class="banner">{line}</p>' for line in lines)


def _settings(run: Run) -> str:
    if not run.settings:
        return _notice("config.yaml is missing or has none of the keys shown here: no settings.")
    items = "".join(
        f"<div><dt>{escape(key).replace('.', '.<wbr>')}</dt><dd>{escape(value)}</dd></div>"
        for key, value in run.settings.items()
    )
    return f'<dl class="settings">{items}</dl>'


def _validation_notice(run: Run) -> str:
    if not run.validation:
        return _notice(f"{VALIDATION} is missing or empty: this run has no held-out evaluation.")
    if not run.held_out():
        names = ", ".join(sorted(name for name in run.validation[-1] if name != "step")[:6])
        return _notice(
            f"{VALIDATION} has no exact match under a data source ending in -greedy or -sampled. It has: {names}."
        )
    return ""


def _figure(panel: Panel) -> str:
    if not panel.lines:
        return f"<figure><figcaption><b>{panel.title}</b></figcaption>{_notice(f'No data: {panel.needs}.')}</figure>"
    return (
        f"<figure><figcaption><b>{panel.title}</b> {panel.caption}</figcaption>"
        f'<img src="{panel_data_uri(panel)}" alt="{escape(panel.alt)}"></figure>'
    )


def _trajectories(run: Run) -> str:
    chosen = choose(run.trajectories)
    if not chosen:
        return _notice(f"{TRAJECTORIES} is missing or empty: no trajectories to show.")
    context = run.settings.get("algorithm.info_gain_context", "observation")
    return trajectories_html(chosen, context)


def _notice(text: str) -> str:
    return f'<p class="notice">{escape(text)}</p>'
