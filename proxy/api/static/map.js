// Cache map: what the last prompts share, as an icicle, and which engines hold what of it.
//
// A box is a part of prompts that all prompts through it share. Its width is the number of different tokens in it and
// below, so boxes under another are never wider than that.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { live } from "./live.js";
import { Actions } from "./actions.js";
import { count, seconds, Share, short, time, useAdmin, whyLink } from "./parts.js";

const DEPTH = 8;
const BOXES = 300;
const ROW = 34;
const NARROWEST = 0.35; // percent of the width: narrower boxes are left out
const LETTERS = 8; // percent of the width from which a box has a label
const REFRESH_MS = 10_000;
const HEAT = [[60, "hot", "a minute"], [600, "warm", "ten minutes"], [3600, "mild", "an hour"], [Infinity, "cold", "longer ago"]];
const TIERS = { gpu: "GPU", host: "host", disk: "disk", pending: "running request", none: "no engine" };
const ENGINE_TONES = 8;

export const mapLink = (id) => `#map/${id ?? ""}`;

const heatOf = (prefix) => HEAT.find(([age]) => Date.now() / 1000 - prefix.last_used < age)[1];

// The fastest tier on which an engine holds all of the prefix's beginning.
const tierOf = (prefix) => Object.keys(TIERS).find((tier) => prefix.holders.some((each) => each.tokens[tier])) ?? "none";

const engineTone = (engine, engines) => `t${(engines.indexOf(engine) % ENGINE_TONES) + 1}`;

const COLORS = {
  tier: { label: "tier", tone: tierOf, legend: () => Object.entries(TIERS) },
  engine: {
    label: "engine",
    tone: (prefix, engines) => (prefix.holders.length ? engineTone(prefix.holders[0].engine, engines) : "none"),
    legend: (engines) => [...engines.slice(0, ENGINE_TONES).map((each) => [engineTone(each, engines), each]), ["none", "no engine"]],
  },
  heat: { label: "last use", tone: heatOf, legend: () => HEAT.map(([, tone, label]) => [tone, label]) },
};

// Boxes with their place: {prefix, x, width (percent), level}.
const laidOut = (prefixes, whole) => {
  const boxes = [];
  const lay = (each, x, level) => {
    const width = (100 * each.below) / whole;
    if (width < NARROWEST) return;
    boxes.push({ prefix: each, x, width, level });
    let left = x;
    for (const child of each.children) {
      lay(child, left, level + 1);
      left += (100 * child.below) / whole;
    }
  };
  let left = 0;
  for (const each of prefixes) {
    lay(each, left, 0);
    left += (100 * each.below) / whole;
  }
  return boxes;
};

const sizeOf = (prefix) => `${short(prefix.end - prefix.start)} tokens, ${count(prefix.requests)} ${prefix.requests === 1 ? "request" : "requests"}`;

// Its first words, if they were asked for; else whose it is, and when it was used last.
const nameOf = (prefix) =>
  prefix.words ?? [prefix.tenant, prefix.session, time(prefix.last_used)].filter(Boolean).join(" · ");

const describe = (prefix) =>
  `${nameOf(prefix)}: ${sizeOf(prefix)}, from token ${count(prefix.start)} to ${count(prefix.end)}, on ${count(prefix.engines)} engines` +
  (prefix.pins.length ? ", pinned" : "");

const KEYS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

// One box has the focus at a time; arrows go on from it, Enter chooses it, and once more zooms in.
const Icicle = ({ boxes, tone, chosen, choose }) => {
  const box = useRef();
  const levels = 1 + Math.max(...boxes.map((each) => each.level), 0);
  const at = Math.max(boxes.findIndex((each) => each.prefix.id === chosen), 0);
  const act = (prefix) => (prefix.id === chosen ? (location.hash = mapLink(prefix.id)) : choose(prefix.id));
  const onKey = (event, n) => {
    const step = KEYS[event.key];
    if (!step && event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    if (!step) return act(boxes[n].prefix);
    const next = boxes[n + step];
    if (next) {
      choose(next.prefix.id);
      box.current.querySelectorAll("[role=button]")[n + step].focus();
    }
  };
  return html`<div class="icicle" ref=${box}>
    <svg width="100%" height=${levels * ROW} role="group" aria-label="Prefixes">
      ${boxes.map(
        ({ prefix, x, width, level }, n) => html`<svg key=${prefix.id} x=${`${x}%`} y=${level * ROW} width=${`${width}%`} height=${ROW - 2}
          role="button" tabindex=${n === at ? 0 : -1} aria-label=${describe(prefix)} aria-pressed=${prefix.id === chosen}
          class=${`box ${tone(prefix)} ${prefix.id === chosen ? "is-chosen" : ""}`}
          onClick=${() => act(prefix)} onKeyDown=${(event) => onKey(event, n)}>
          <title>${describe(prefix)}</title>
          <rect width="100%" height="100%" />
          ${prefix.pins.length > 0 && html`<path class="pin" d="M0 0h12l-12 12z" />`}
          ${width > LETTERS && html`<text x="14" y="21">${short(prefix.end - prefix.start)} · ${nameOf(prefix)}</text>`}
        </svg>`,
      )}
    </svg>
  </div>`;
};

const Details = ({ prefix, again }) => html`<article class="card prefix" aria-label="The chosen prefix">
  <h3>Tokens ${count(prefix.start)} to ${count(prefix.end)} ${prefix.pins.length > 0 && html`<span class="chip">pinned</span>`}</h3>
  <dl>
    <div><dt>model</dt><dd>${prefix.lora ?? prefix.model}</dd></div>
    ${prefix.words && html`<div><dt>begins</dt><dd>${prefix.words}</dd></div>`}
    ${prefix.tenant && html`<div><dt>tenant</dt><dd>${prefix.tenant}</dd></div>`}
    ${prefix.session && html`<div><dt>session</dt><dd>${prefix.session}</dd></div>`}
    <div><dt>with all that follows</dt><dd>${short(prefix.below)} tokens</dd></div>
    <div><dt>requests</dt><dd>${count(prefix.requests)}</dd></div>
    <div><dt>last used</dt><dd>${seconds(Math.max(Date.now() / 1000 - prefix.last_used, 0))} ago</dd></div>
    <div><dt>last request</dt><dd><a href=${whyLink(prefix.request_id)}>Why?</a></dd></div>
    ${(prefix.children.length > 0 || prefix.unshown > 0) && html`<div><dd><a href=${mapLink(prefix.id)}>Zoom in</a></dd></div>`}
  </dl>
  ${prefix.holders.map((holder) =>
    Object.entries(holder.tokens).map(
      ([tier, tokens]) => html`<${Share} label=${`${holder.engine}, ${TIERS[tier]}`} part=${tokens} whole=${prefix.end - prefix.start} tone=${tier} />`,
    ),
  )}
  ${prefix.engines > prefix.holders.length && html`<p class="note">and ${count(prefix.engines - prefix.holders.length)} more engines</p>`}
  ${prefix.engines === 0 && html`<p class="note">No engine is known to hold it any more.</p>`}
  <${Actions} key=${prefix.id} prefix=${prefix} again=${again} />
</article>`;

const Path = ({ path }) => html`<nav class="path" aria-label="Zoom">
  <a href=${mapLink()}>all prompts</a>
  ${path.map((each, n) => html` › <a href=${mapLink(each.id)} aria-current=${n === path.length - 1 ? "location" : undefined}>${short(each.end - each.start)} tokens</a>`)}
</nav>`;

export const CacheMap = ({ under }) => {
  const [color, setColor] = useState("tier");
  const [chosen, choose] = useState(null);
  const [words, showWords] = useState(false);
  const [answer, error, again] = useAdmin(`prefixes?depth=${DEPTH}&limit=${BOXES}${words ? "&words=true" : ""}${under ? `&under=${encodeURIComponent(under)}` : ""}`);
  useEffect(() => {
    const timer = setInterval(() => document.hidden || again(), REFRESH_MS);
    return () => clearInterval(timer);
  }, [under]);
  const whole = answer?.prefixes.reduce((sum, each) => sum + each.below, 0);
  const boxes = answer ? laidOut(answer.prefixes, whole) : [];
  const engines = (live.snapshot?.engines ?? []).map((each) => each.id).sort();
  const { tone, legend } = COLORS[color];
  const shown = boxes.find((each) => each.prefix.id === chosen)?.prefix ?? boxes[0]?.prefix;
  return html`<section aria-label="Cache map">
    <h2>Cache map <small>what the last ${count(answer?.requests)} prompts share, and who holds it</small>
      <button onClick=${again}>Refresh</button>
    </h2>
    ${error && html`<p class="problem" role="alert">${error}${under && html` <a href=${mapLink()}>All prompts</a>`}</p>`}
    ${answer && html`<${Path} path=${answer.path} />
      <div class="row">
        <label>colour
          <select value=${color} onChange=${(e) => setColor(e.target.value)}>
            ${Object.entries(COLORS).map(([name, { label }]) => html`<option value=${name}>${label}</option>`)}
          </select>
        </label>
        <label><input type="checkbox" checked=${words} onChange=${(e) => showWords(e.target.checked)} /> first words (prompt text)</label>
        <span class="legend">${legend(engines).map(([name, label]) => html`<b class=${`key ${name}`}>${label}</b> `)}</span>
      </div>`}
    ${boxes.length > 0 &&
    html`<${Icicle} boxes=${boxes} tone=${(prefix) => tone(prefix, engines)} chosen=${shown.id} choose=${choose} />
      ${answer.unshown > 0 && html`<p class="note">${count(answer.unshown)} smaller ones are not shown.</p>`}
      <${Details} prefix=${shown} again=${again} />`}
    ${answer && !boxes.length && html`<p class="note">No prompt is known yet${live.snapshot?.reuse_on === false && ": reuse is off"}. <a href="#try">Try one</a>.</p>`}
  </section>`;
};
