// Now: what reuse saves, each engine, and requests as they pass.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { EngineActions } from "./actions.js";
import { live } from "./live.js";
import { count, Paged, percent, predicted, pure, seconds, Share, short, time, whyLink } from "./parts.js";
import { axis, color, plotIn } from "./plots.js";
import { Slots } from "./slots.js";

const CARDS = 24;

const Totals = pure(({ snapshot }) => {
  const { reuse } = snapshot;
  const last = live.points.at(-1);
  return html`<section aria-label="Reuse">
    <h2>Reuse <small>since kvpin started</small></h2>
    <div class="totals">
      <div class="card wide">
        ${[
          ["available", "available", "What the engine that held most of each prompt held"],
          ["selected", "selected", "What the chosen engine held"],
          ["delivered", "delivered", "What it reported to have reused"],
        ].map(
          ([name, tone, title]) => html`<div title=${title}>
            <${Share} label=${name} part=${reuse[`${name}_tokens`]} whole=${reuse.prompt_tokens} tone=${tone} />
          </div>`,
        )}
        <p class="note">of ${count(reuse.prompt_tokens)} prompt tokens${!snapshot.reuse_on && "; reuse is off"}</p>
      </div>
      <dl class="card tiles">
        <div><dt>prompt tokens not computed</dt><dd>${short(reuse.delivered_tokens)}</dd></div>
        <div><dt>prefill saved</dt><dd>${seconds(reuse.saved_s)}</dd></div>
        <div><dt>requests</dt><dd>${short(snapshot.requests)}</dd></div>
        <div><dt>a second</dt><dd>${last ? last.requests ? last.requests.toFixed(last.requests < 10 ? 1 : 0) : 0 : "–"}</dd></div>
      </dl>
      <${Chart} />
    </div>
  </section>`;
});

// Tokens a second over the last five minutes.
const Chart = () => {
  const box = useRef();
  const plot = useRef();
  useEffect(() => {
    const options = () => ({
      legend: { show: false },
      cursor: { show: false },
      scales: { y: { range: (_, __, most) => [0, Math.max(most, 1)] } },
      axes: [
        { ...axis(), size: 24, space: 90, values: (_, values) => values.map(time) },
        { ...axis(), size: 48, values: (_, values) => values.map(short) },
      ],
      series: [
        {},
        ...["prompt", "available", "delivered"].map((name) => ({
          label: name,
          stroke: color(`--${name}`),
          fill: name === "delivered" ? color("--delivered-fill") : undefined,
          width: 1.5,
          points: { show: false },
        })),
      ],
    });
    plot.current = plotIn(box.current, 150, options, columns);
    return () => plot.current.end();
  }, []);
  useEffect(() => plot.current?.update());
  return html`<figure class="card chart">
    <figcaption>
      tokens a second: <b class="key prompt">prompts</b> <b class="key available">available</b>
      <b class="key delivered">delivered</b>
    </figcaption>
    <div ref=${box}></div>
  </figure>`;
};

const columns = () => ["at", "prompt", "available", "delivered"].map((name) => live.points.map((each) => each[name]));

const SIGNS = { ready: "●", draining: "◐", connecting: "…", suspect: "▲", down: "✕", refused: "✕", elsewhere: "⇢" };

const WHO = { local: "made by kvpin", engine: "made by the engine", none: "not followed" };

// Who makes the tokens of each form of prompt.
const Forms = ({ forms }) => {
  const all = Object.entries(forms);
  const here = all.filter(([, source]) => source === "local").length;
  const title = all.map(([form, source]) => `${form}: ${WHO[source]}`).join("\n");
  return all.length > 0 && html`<span class="chip" title=${title}>tokens of ${here} of ${all.length} forms made here</span>`;
};

// How many predictions were exact, and why others were not checked.
const Checked = ({ audit: { checked, exact, unchecked } }) => {
  const reasons = Object.entries(unchecked).sort((a, b) => b[1] - a[1]);
  const all = reasons.reduce((sum, [, n]) => sum + n, 0);
  const why = all ? `; ${count(all)} not checked (${reasons.map(([reason, n]) => `${reason}: ${count(n)}`).join(", ")})` : "";
  return checked + all > 0 && html`<p class="note">exact ${count(exact)} of ${count(checked)} checked${why}</p>`;
};

// Before it has connected, nobody knows what it holds.
const isConnected = ({ held_tokens: held }) => Object.keys(held).length > 0;

const Engine = ({ engine }) => html`<article class=${`card engine ${engine.state}`}>
  <h3>${engine.id} <span class="chip state">${SIGNS[engine.state]} ${engine.state}</span></h3>
  <p class="note">${isConnected(engine) ? engine.model : "not connected"}${" "}<span class="chip" title=${engine.why}>${engine.trust} view</span>
    ${" "}<${Forms} forms=${engine.forms} /></p>
  ${engine.state !== "ready" && engine.last_error && html`<p class="problem">${engine.last_error}</p>`}
  ${Object.entries(engine.held_tokens)
    .filter(([tier, held]) => held || engine.capacity_tokens[tier])
    .map(
      ([tier, held]) => html`<${Share} label=${tier} part=${held} whole=${engine.capacity_tokens[tier]} tone=${tier}
        text=${`${short(held)}${engine.capacity_tokens[tier] ? ` of ${short(engine.capacity_tokens[tier])}` : ""}`} />`,
    )}
  <dl>
    <div><dt>queue</dt><dd>${seconds(engine.queue_s)}</dd></div>
    <div><dt>streams</dt><dd>${count(engine.decoding)}</dd></div>
    <div><dt>in flight</dt><dd>${count(engine.in_flight)}</dd></div>
    <div><dt>hit share</dt><dd>${percent(engine.reuse.delivered_tokens, engine.reuse.prompt_tokens)}</dd></div>
  </dl>
  <${Checked} audit=${engine.audit} />
  ${isConnected(engine) && html`<${EngineActions} engine=${engine.id} />`}
</article>`;

const Engines = pure(({ snapshot }) => {
  const engines = [...snapshot.engines].sort((a, b) => (a.state === "ready") - (b.state === "ready"));
  const ready = engines.filter((each) => each.state === "ready").length;
  const elsewhere = engines.filter((each) => each.state === "elsewhere" && each.last_error === null).length;
  const more = elsewhere ? ` and ${elsewhere} used through another kvpin` : "";
  const waiting = Object.entries(snapshot.waiting);
  return html`<section aria-label="Engines">
    <h2>Engines <small>${ready} of ${engines.length} ready${more}</small></h2>
    ${snapshot.unserved.map((model) => html`<p class="problem">No engine takes requests for ${model}</p>`)}
    ${waiting.map(([model, n]) => html`<p class="problem">${count(n)} requests for ${model} wait: all its engines are busy</p>`)}
    <${Paged} items=${engines} size=${CARDS} name="engines">
      ${(shown) => html`<div class="engines">${shown.map((each) => html`<${Engine} key=${each.id} engine=${each} />`)}</div>`}
    <//>
  </section>`;
});

const Row = pure(({ request }) => {
  const { predicted_tokens: expected, reported_tokens: reported, is_firm: isFirm } = request;
  const isMissed = request.is_over && isFirm && reported !== null && expected !== null && reported < expected;
  return html`<tr class=${request.is_over ? "" : "running"}>
    <td>${time(request.started)}</td>
    <td>${request.engine ?? "none"}</td>
    <td class="number">${count(request.n_tokens)}</td>
    <td class="number spare">${count(request.available_tokens)}</td>
    <td class="number spare">${predicted(request)}</td>
    <td class=${`number ${isMissed ? "missed" : ""}`}>${request.is_over ? count(reported) : "…"}</td>
    <td class="number">${request.is_over ? seconds(request.first_byte_s) : "…"}</td>
    <td>${request.status ?? "running"}</td>
    <td class="why spare">${request.why ?? request.miss}</td>
    <td>${request.is_over && html`<a href=${whyLink(request.request_id)}>Why<span class="hidden"> ${request.request_id}</span></a>`}</td>
  </tr>`;
});

const Requests = ({ snapshot }) => {
  const [frozen, freeze] = useState(null);
  const requests = frozen ?? [...live.requests.values()].reverse();
  const unshown = snapshot.unshown + live.missed;
  return html`<section aria-label="Requests">
    <h2>Requests <small>newest first</small>
      <button onClick=${() => freeze(frozen ? null : requests)} aria-pressed=${!!frozen}>${frozen ? "Go on" : "Pause"}</button>
    </h2>
    ${unshown > 0 && html`<p class="note">A sample: ${count(snapshot.unshown)} more in the last second</p>`}
    <div class="scroll long">
      <table>
        <thead><tr>
          <th>time</th><th>engine</th><th class="number">prompt</th><th class="number spare">available</th>
          <th class="number spare">predicted</th><th class="number">reported</th><th class="number">first byte</th>
          <th>status</th><th class="spare">why there</th><th><span class="hidden">more</span></th>
        </tr></thead>
        <tbody>${requests.map((each) => html`<${Row} key=${each.request_id} request=${each} />`)}</tbody>
      </table>
    </div>
    ${!requests.length && html`<p class="note">No request yet. <a href="#try">Try one</a>.</p>`}
  </section>`;
};

export const Now = () => {
  const { snapshot } = live;
  if (!snapshot) return html`<p class="note">Waiting for the first events …</p>`;
  return html`<${Totals} snapshot=${snapshot} /><${Engines} snapshot=${snapshot} />
    ${snapshot.engines.some((each) => each.kind === "llama_server") && html`<${Slots} />`}<${Requests} snapshot=${snapshot} />`;
};
