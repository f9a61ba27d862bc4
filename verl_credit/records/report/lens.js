"use strict";
(() => {
  const { groups, shades } = JSON.parse(document.getElementById("lens-data").textContent);
  const at = (id) => document.getElementById(`lens-${id}`);
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

  let group;

  const open = (index) => {
    group = groups[index];
    at("group").value = String(index);
    at("said").textContent = group.said;
    at("shown").textContent = [`As the run was trained, step ${group.step}, turn mode ${group.mode}.`, ...group.notes].join(" ");
    at("low").textContent = signed(-group.limit);
    at("high").textContent = signed(group.limit);
    at("rollouts").replaceChildren(...group.rollouts.map(rollout));
    read(null);
  };

  const rollout = (data, number) => {
    const column = element("article", "rollout");
    column.append(element("h3", "", `Rollout ${number + 1} of ${group.rollouts.length}: ${data.right ? "right" : "wrong"}`));
    column.append(element("p", "facts", `outcome ${data.outcome} \u00b7 ${data.stop}`));
    const list = element("ol", "lens-turns");
    const planning = new Set(data.planning), rejected = new Set(data.rejected);
    data.turns.forEach((turn, k) => {
      const last = k === data.turns.length - 1;
      const box = element("li", "lens-turn"), advantage = group.advantage[number][k];
      const against = turn.gained && advantage < -group.floor;
      box.style.borderColor = shade(advantage);
      box.classList.toggle("against", against);
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
        span.style.background = shade(data.credit[i]);
        text.append(span);
      });
      const head = heading(name, number, k);
      if (against) head.append(element("span", "lens-flag", `positive ${group.reward}, negative credit`));
      box.append(head, text);
      if (turn.seen || turn.more) {
        const details = element("details", "lens-seen");
        details.append(element("summary", "", "What it was shown"), element("div", "text", turn.seen));
        if (turn.more) details.append(element("p", "facts", `${turn.more} more characters`));
        box.append(details);
      }
      list.append(box);
    });
    column.append(list);
    if (data.more) column.append(element("p", "facts", `${data.more} more tokens are not shown.`));
    return column;
  };

  // "Turn 2 · gain +0.100 · advantage −0.200 (GRPO +0.300) · clip range × 1.00"
  const heading = (name, r, k) => {
    const { reward } = group.rollouts[r].turns[k];
    const parts = [reward === null ? `no ${group.reward}` : `${group.reward} ${reward}`,
      `advantage ${signed(group.advantage[r][k])} (GRPO ${signed(group.grpo[r][k])})`];
    parts.push(`clip range \u00d7 ${group.clip[r][k].toFixed(2)}`);
    const head = element("p", "lens-head");
    head.append(element("b", "", name), ` \u00b7 ${parts.join(" \u00b7 ")}`);
    return head;
  };

  const read = (span) => {
    document.querySelector(".token.current")?.classList.remove("current");
    if (!span) {
      at("token").textContent = "Point at a token, or walk there with the keys, to read its credit.";
      return;
    }
    span.classList.add("current");
    const r = Number(span.dataset.rollout), i = Number(span.dataset.token), data = group.rollouts[r];
    const parts = [`\u201c${data.text[i]}\u201d: credit ${signed(data.credit[i])}`, `rollout ${r + 1}, turn ${data.turn[i] + 1}`];
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

  at("group").replaceChildren(...groups.map((one, i) => {
    const option = element("option", "", `step ${one.step}: ${one.question.slice(0, 80)}`);
    option.value = String(i);
    return option;
  }));
  at("group").addEventListener("change", () => {
    open(Number(at("group").value));
    try { // the choice stands in the address, so that it lasts when the page is read again
      history.replaceState(null, "", `#lens=${at("group").value}`);
    } catch { /* a page without an address of its own */ }
  });
  const chosen = Number(location.hash.replace(/^#lens=/, ""));
  open(groups[chosen] ? chosen : 0);
})();
