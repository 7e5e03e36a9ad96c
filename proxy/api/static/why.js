// Why: the last requests, and for one of them what each engine would have cost and where its prompt left the
// nearest known one.

import { html, useState } from "./vendor/htm-preact.js";
import { count, Paged, predicted, seconds, Share, time, useAdmin, whyLink } from "./parts.js";

const PAGE = 20;
const LIMITS = [100, 1000];
const ENGINES = 16;
// The terms of a cost, those of the request itself first.
const TERMS = [
  ["queue_s", "queue"],
  ["room_s", "wait for memory"],
  ["restore_s", "restore"],
  ["prefill_s", "prefill"],
  ["transfer_s", "transfer"],
  ["interference_s", "running streams"],
  ["stall_s", "delay of streams and requests there"],
  ["congestion_s", "delay of later requests"],
  ["later_s", "its next turns"],
  ["again_s", "its beginning once more"],
  ["regret_s", "evicted KV"],
];

// Terms of pairs of engines and of hybrid models: shown where one of them is not zero.
const RARE = ["transfer_s", "stall_s", "again_s"];

const PARTS = {
  read: "kvpin: receive and parse the body",
  tokenise: "kvpin: render, tokenise, hash",
  queue: "kvpin: wait because all engines were busy",
  "failed attempts": "engines that failed before",
  place: "kvpin: choose the engine",
  gather: "kvpin: wait for another request that computes the same prefix",
  "first leg": "another engine: compute the prompt",
  hold: "kvpin: wait for a slot, save, restore",
  prefill: "the engine, by its own clock",
  decode: "the engine, by its own clock: the answer came whole",
  engine: "the rest: the engine's own queue, its other requests, the network",
};

const Costs = ({ request }) => {
  const { decision } = request;
  const [isAll, showAll] = useState(false);
  const costs = [...decision.costs].sort((a, b) => a.total_s - b.total_s);
  // Of an engine alone and the same one in a pair, the cheaper one was chosen.
  const chosen = costs.findIndex((each) => each.engine === request.engine);
  const shown = isAll ? costs : costs.filter((_, at) => at < ENGINES || at === chosen);
  const terms = TERMS.filter(([term]) => !RARE.includes(term) || shown.some((cost) => cost[term]));
  const nameOf = (cost) => (cost.prefiller ? `${cost.prefiller} → ${cost.engine}` : cost.engine);
  const measured = request.stream ? request.first_byte_s : null;
  const most = Math.max(...shown.map((each) => each.total_s), measured ?? 0);
  const x = (s) => (100 * s) / most;
  if (!(most > 0)) {
    return html`<p>Placed by load alone: ${shown.map((each) => `${each.engine} had ${each.in_flight} in flight`).join(", ")}.</p>`;
  }
  return html`
    <p class="legend">${terms.map(([term, label]) => html`<b class=${`key ${term}`}>${label}</b> `)}
      ${measured !== null && html`<b class="key measured">first byte, measured</b>`}</p>
    <ol class="costs">
      ${shown.map((cost) => {
        let left = 0;
        const isChosen = cost === costs[chosen];
        return html`<li class=${isChosen ? "chosen" : ""}>
          <span class="label">${nameOf(cost)}${isChosen ? " ✓" : ""}</span>
          <svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img"
            aria-label=${`${nameOf(cost)}: ${seconds(cost.total_s)}`}>
            <rect class="ground" width="100" height="10" />
            ${terms.map(([term, label]) => {
              const width = x(Math.max(cost[term] ?? 0, 0));
              left += width;
              return html`<rect class=${term} x=${left - width} width=${width} height="10">
                <title>${label}: ${seconds(cost[term])}</title>
              </rect>`;
            })}
            ${isChosen && measured !== null &&
            html`<rect class="measured" x=${Math.max(x(measured) - 0.6, 0)} width="0.6" height="10" />`}
          </svg>
          <span class="figure">${seconds(cost.total_s)} · ${count(cost.cached_tokens)} held</span>
        </li>`;
      })}
    </ol>
    ${costs.length > shown.length && html`<button onClick=${() => showAll(true)}>All ${costs.length} engines</button>`}
    <details><summary>Figures</summary><div class="scroll"><table>
      <thead><tr><th>engine</th>${terms.map(([, label]) => html`<th class="number">${label}</th>`)}<th class="number">sum</th></tr></thead>
      <tbody>${shown.map(
        (cost) => html`<tr><td>${nameOf(cost)}</td>
          ${terms.map(([term]) => html`<td class="number">${seconds(cost[term])}</td>`)}
          <td class="number">${seconds(cost.total_s)}</td></tr>`,
      )}</tbody>
    </table></div></details>`;
};

// What the time to the first byte was spent on. The parts add up to it.
const Spent = ({ parts, what }) => {
  const whole = Object.values(parts).reduce((sum, each) => sum + each, 0);
  return html`<section aria-label="Where the time went">
    <h3>Where the time went <small>${what} ${seconds(whole)} after the request came</small></h3>
    ${Object.entries(parts).map(
      ([part, spent]) => html`<div title=${PARTS[part]}><${Share} label=${part} part=${spent} whole=${whole} tone="selected" text=${seconds(spent)} /></div>`,
    )}
  </section>`;
};

const Tokens = ({ text, ids }) =>
  ids.length ? html`<pre>${text ?? ids.join(" ")}</pre>` : html`<p class="note">ends here</p>`;

const Divergence = ({ divergence, at }) => html`<section>
  <h3>Where it left the nearest known prompt</h3>
  <p>It shares ${count(divergence.common_tokens)} tokens with
    ${" "}<a href=${whyLink(divergence.request_id)}>${divergence.request_id}</a>${at && html`; they differ first in <code>${at}</code>`}.</p>
  <div class="sides">
    <div><h4>this request</h4><${Tokens} text=${divergence.text} ids=${divergence.token_ids} /></div>
    <div><h4>the earlier one</h4><${Tokens} text=${divergence.other_text} ids=${divergence.other_token_ids} /></div>
  </div>
</section>`;

const Request = ({ id }) => {
  const [request, error] = useAdmin(`requests/${encodeURIComponent(id)}`);
  if (error) return html`<p class="problem" role="alert">${error}</p>`;
  if (!request) return html`<p class="note">Asking kvpin …</p>`;
  return html`<article class="card">
    <h2>${request.request_id}</h2>
    <p class="lead">${request.explanation}.</p>
    ${request.n_tokens !== null &&
    html`<${Share} label="predicted" part=${request.predicted_tokens ?? 0} whole=${request.n_tokens} tone="selected"
        text=${request.is_firm === false ? `${predicted(request)}, not firm` : undefined} />
      <${Share} label="reported" part=${request.reported_tokens ?? 0} whole=${request.n_tokens} tone="delivered"
        text=${request.reported_tokens === null ? "not told" : undefined} />
      <p class="note">of ${count(request.n_tokens)} prompt tokens</p>`}
    <dl>
      <div><dt>tenant</dt><dd>${request.tenant ?? "–"}</dd></div>
      <div><dt>route</dt><dd>${request.route}</dd></div>
      <div><dt>model</dt><dd>${request.model ?? "–"}</dd></div>
      <div><dt>at</dt><dd>${time(request.started)}</dd></div>
      <div><dt>status</dt><dd>${request.status}</dd></div>
      <div><dt>cache</dt><dd class=${request.is_miss ? "missed" : ""}>${request.miss ?? "–"}</dd></div>
      <div><dt>queued</dt><dd>${seconds(request.queued_s)}</dd></div>
      <div><dt>first byte, expected</dt><dd>${seconds(request.expected_first_token_s)}</dd></div>
      <div><dt>first byte</dt><dd>${seconds(request.first_byte_s)}</dd></div>
      <div><dt>duration</dt><dd>${seconds(request.duration_s)}</dd></div>
      <div><dt>output tokens</dt><dd>${count(request.output_tokens)}</dd></div>
    </dl>
    ${request.first_byte_parts && html`<${Spent} parts=${request.first_byte_parts} what=${request.stream ? "first byte" : "answer"} />`}
    ${request.decision && html`<h3>Why ${request.engine}</h3><p>${request.decision.why}.</p><${Costs} request=${request} />`}
    ${request.divergence && html`<${Divergence} divergence=${request.divergence} at=${request.differs_at} />`}
  </article>`;
};

const List = ({ chosen }) => {
  const [limit, setLimit] = useState(LIMITS[0]);
  const [filter, setFilter] = useState("");
  const [answer, error, again] = useAdmin(`requests?limit=${limit}`);
  const words = filter.trim().toLowerCase();
  const requests = (answer?.requests ?? []).filter((each) =>
    [each.request_id, each.client_request_id, each.engine, each.model, each.miss].join(" ").toLowerCase().includes(words),
  );
  return html`<section aria-label="Last requests">
    <h2>Last requests
      <button onClick=${again}>Refresh</button>
      <label><span class="hidden">Filter</span>
        <input type="search" placeholder="id, engine, model, cache" value=${filter} onInput=${(e) => setFilter(e.target.value)} />
      </label>
    </h2>
    ${error && html`<p class="problem" role="alert">${error}</p>`}
    <${Paged} items=${requests} size=${PAGE} name="requests">
      ${(shown) => html`<div class="scroll"><table>
        <thead><tr><th>request</th><th>time</th><th>engine</th><th class="number">prompt</th>
          <th class="number spare">predicted</th><th class="number">reported</th><th>cache</th></tr></thead>
        <tbody>${shown.map(
          (each) => html`<tr key=${each.request_id} class=${each.request_id === chosen ? "chosen" : ""}>
            <td><a href=${whyLink(each.request_id)}>${each.request_id.slice(0, 12)}…</a></td>
            <td>${time(each.started)}</td><td>${each.engine ?? "none"}</td>
            <td class="number">${count(each.n_tokens)}</td>
            <td class="number spare">${predicted(each)}</td>
            <td class="number">${count(each.reported_tokens)}</td>
            <td class=${each.is_miss ? "missed" : ""}>${each.error ? `failed (${each.status})` : (each.miss ?? "–")}</td>
          </tr>`,
        )}</tbody>
      </table></div>`}
    <//>
    ${answer?.requests.length === LIMITS[0] && limit === LIMITS[0] && html`<button onClick=${() => setLimit(LIMITS[1])}>Up to ${LIMITS[1]}</button>`}
    ${answer && !requests.length && html`<p class="note">No request${words ? " like that" : " yet"}.</p>`}
  </section>`;
};

export const Why = ({ id }) => html`${id && html`<${Request} key=${id} id=${id} />`}<${List} chosen=${id} />`;
