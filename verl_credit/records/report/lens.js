"use strict";
(() => {
  // Credit comes from the library. Here it is looked up, and a token's is its turn's size times the credit of one.
  const { groups, shades } = JSON.parse(document.getElementById("lens-data").textContent);
  const at = (id) => document.getElementById(`lens-${id}`);
  const selects = Object.fromEntries(["group", "mode", "alpha", "gamma", "transform"].map((id) => [id, at(id)]));
  const floats = (text) => new Float32Array(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);
  const minus = (text) => text.replace("-", "\u2212");
  const signed = (value) => {
    const text = value.toFixed(3);
    return Number(text) === 0 ? "0.000" : (value > 0 ? "+" : "") + minus(text);
  };
  const element = (name, className, text) => {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  };
  const shade = (value) => {
    const half = (shades.length - 1) / 2, share = Math.abs(value) > group.floor ? value / group.limit : 0;
    return shades[half + Math.round(half * Math.max(-1, Math.min(1, share)))];
  };

  let group, shown; // shown: per rollout { turns: [{ box, head, texts }], spans, values }

  const fill = (select, entries, chosen) => {
    select.replaceChildren(...entries.map(({ value, label, reason }) => {
      const option = element("option", "", reason ? `${label} (not here)` : label);
      option.value = value;
      option.disabled = Boolean(reason);
      option.selected = value === chosen;
      return option;
    }));
  };

  const open = (index) => {
    group = groups[index];
    fill(selects.mode, group.modes.map((mode) => ({ value: mode.name, label: mode.name, reason: mode.reason })));
    for (const name of ["alpha", "gamma"])
      fill(selects[name], group[`${name}s`].map((value, i) => ({ value: String(i), label: String(value) })));
    fill(selects.transform, group.transforms.map((one, i) => ({ value: String(i), label: one.name, reason: one.reason })));
    const reasons = [...group.modes, ...group.transforms].filter((one) => one.reason);
    at("reasons").replaceChildren(...reasons.flatMap((one) => [element("dt", "", one.name), element("dd", "", one.reason)]));
    at("reasons").parentElement.hidden = !reasons.length;
    at("rollouts").replaceChildren(...group.rollouts.map(rollout));
    own();
  };

  const own = () => {
    const transform = group.transforms.findIndex((one) => one.own);
    selects.mode.value = group.own.mode;
    for (const name of ["alpha", "gamma"]) selects[name].value = String(group.own[name]);
    selects.transform.value = String(transform);
    paint(true);
  };

  const rollout = (data, number) => {
    if (number === 0) shown = [];
    const column = element("article", "rollout");
    column.append(element("h3", "", `Rollout ${number + 1} of ${group.rollouts.length}: ${data.right ? "right" : "wrong"}`));
    column.append(element("p", "facts", `outcome ${data.outcome} \u00b7 ${data.stop}`));
    const list = element("ol", "lens-turns");
    const record = { turns: [], spans: [], values: [] };
    const planning = new Set(data.planning), rejected = new Set(data.rejected);
    data.turns.forEach((turn, k) => {
      const last = k === data.turns.length - 1;
      const box = element("li", "lens-turn"), head = element("p", "lens-head");
      const name = `Turn ${k + 1}${last ? ", answer" : ""}`;
      const text = element("p", "tokens");
      text.tabIndex = 0;
      text.dir = "auto";
      text.setAttribute("role", "group");
      text.setAttribute("aria-label", `Rollout ${number + 1}, ${name}: tokens`);
      data.turn.forEach((id, i) => {
        if (id !== k) return;
        const span = element("span", "token", data.text[i]);
        if (planning.has(i)) span.classList.add("planning");
        if (rejected.has(i)) span.classList.add("rejected");
        span.dataset.rollout = number;
        span.dataset.token = i;
        record.spans[i] = span;
        text.append(span);
      });
      box.append(head, text);
      if (turn.seen || turn.more) {
        const details = element("details", "lens-seen");
        details.append(element("summary", "", "What it was shown"), element("div", "text", turn.seen));
        if (turn.more) details.append(element("p", "facts", `${turn.more} more characters`));
        box.append(details);
      }
      record.turns.push({ box, head, name });
      list.append(box);
    });
    column.append(list);
    if (data.more) column.append(element("p", "facts", `${data.more} more tokens are not shown.`));
    shown[number] = record;
    return column;
  };

  const chosenMode = () => group.modes.find((mode) => mode.name === selects.mode.value);

  const paint = (given) => {
    const mode = chosenMode(), transform = group.transforms[Number(selects.transform.value)];
    const key = (name) => (mode[name] ? selects[name].value : "");
    const text = (name) => (mode[name] ? `, ${name} ${group[`${name}s`][selects[name].value]}` : "");
    const turns = given ? group.given : mode.credit[`${key("alpha")}|${key("gamma")}`];
    for (const name of ["alpha", "gamma"]) selects[name].disabled = !mode[name];
    at("said").textContent = turns.said;
    at("shown").textContent = given ? `As the run was trained, step ${group.step}. ${group.check} ${group.notes.join(" ")}`
      : `What ${mode.name}${text("alpha")}${text("gamma")}, tokens ${transform.name}, would have given. ${group.notes.join(" ")}`;
    at("low").textContent = signed(-group.limit);
    at("high").textContent = signed(group.limit);
    group.rollouts.forEach((data, r) => {
      const own = given ? floats(group.given.tokens[r]) : null;
      const up = given ? null : floats(transform.up[r]), down = given || !transform.down ? null : floats(transform.down[r]);
      const { spans, turns: boxes } = shown[r];
      shown[r].values = data.turn.map((k, i) => {
        const turn = turns.advantage[r][k];
        const value = given ? own[i] : turn < 0 ? -turn * (down ? down[i] : -up[i]) : turn * up[i];
        spans[i].style.background = shade(value);
        return value;
      });
      boxes.forEach(({ box, head, name }, k) => {
        const advantage = turns.advantage[r][k], clip = turns.clip[r][k], { reward, gained, star } = data.turns[k];
        const good = gained && advantage < -group.floor;
        box.style.borderColor = shade(advantage);
        box.classList.toggle("against", good);
        head.replaceChildren(element("b", "", name), ` \u00b7 ${reward === null ? `no ${group.reward}` : `${group.reward} ${reward}`}`,
          ` \u00b7 advantage ${signed(advantage)} (GRPO ${signed(group.grpo[r][k])})${star === null ? "" : ` \u00b7 A* ${star}`} \u00b7 clip range \u00d7 ${clip.toFixed(2)}`);
        if (good) head.append(element("span", "lens-flag", `positive ${group.reward}, negative credit`));
      });
    });
    read(null);
    remember(given);
  };

  // The choice stands in the address, so that it lasts when the page is read again.
  const remember = (given) => {
    const state = given ? [selects.group.value] : Object.values(selects).map((select) => select.value);
    try {
      history.replaceState(null, "", `#lens=${state.map(encodeURIComponent).join(",")}`);
    } catch { /* a page without an address of its own */ }
  };

  const recall = () => {
    let state = [];
    try {
      state = location.hash.replace(/^#lens=/, "").split(",").map(decodeURIComponent);
    } catch { /* an address that we did not write */ }
    const index = Number(state[0]);
    open(groups[index] ? index : 0);
    selects.group.value = String(groups[index] ? index : 0);
    const names = Object.keys(selects);
    const offered = (name, i) => [...selects[name].options].some((option) => option.value === state[i] && !option.disabled);
    if (state.length !== names.length || !names.every(offered)) return;
    names.forEach((name, i) => { selects[name].value = state[i]; });
    paint(false);
  };

  const read = (span) => {
    document.querySelector(".token.current")?.classList.remove("current");
    if (!span) {
      at("token").textContent = "Point at a token, or walk there with the keys, to read its credit.";
      return;
    }
    span.classList.add("current");
    const r = Number(span.dataset.rollout), i = Number(span.dataset.token), data = group.rollouts[r];
    const parts = [`\u201c${data.text[i]}\u201d: credit ${signed(shown[r].values[i])}`, `rollout ${r + 1}, turn ${data.turn[i] + 1}`];
    if (data.uncertainty.length) parts.push(`uncertainty ${data.uncertainty[i].toFixed(3)}`);
    if (span.classList.contains("planning")) parts.push("planning");
    if (span.classList.contains("rejected")) parts.push("left out of the update");
    at("token").textContent = parts.join(" \u00b7 ");
  };

  at("rollouts").addEventListener("mouseover", (event) => {
    if (event.target.classList.contains("token")) read(event.target);
  });
  at("rollouts").addEventListener("focusin", (event) => {
    if (event.target.classList.contains("tokens")) read(event.target.firstElementChild);
  });
  at("rollouts").addEventListener("keydown", (event) => {
    if (!event.target.classList.contains("tokens")) return;
    const spans = [...event.target.children], place = spans.findIndex((span) => span.classList.contains("current"));
    const next = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: spans.length - 1 }[event.key];
    if (next === undefined) return;
    event.preventDefault();
    const span = spans[Math.max(0, Math.min(spans.length - 1, next))];
    read(span);
    span.scrollIntoView({ block: "nearest", inline: "nearest" });
  });

  fill(selects.group, groups.map((one, i) => ({ value: String(i), label: `step ${one.step}: ${one.question.slice(0, 80)}` })), "0");
  selects.group.addEventListener("change", () => open(Number(selects.group.value)));
  for (const name of ["mode", "alpha", "gamma", "transform"]) selects[name].addEventListener("change", () => paint(false));
  at("own").addEventListener("click", own);
  at("controls").addEventListener("submit", (event) => event.preventDefault());
  recall();
})();
