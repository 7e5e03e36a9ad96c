// Replay: recorded traffic on simulated engines, as `kvpin replay` plays it: what other engines and policies would do.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { admin } from "./api.js";
import { count, pure, seconds, Share } from "./parts.js";
import { drawCurves } from "./plots.js";

const FIELDS = [
  ["engines", "engines", "1,2,4", "numbers of engines: 2,4,8; empty: as many as the recording names"],
  ["gpu_tokens", "GPU tokens of each", "", "KV that each engine holds: 300k,1M; empty: as recorded"],
  ["prefill_rate", "prefill tokens a second", "", "prompt tokens that an engine computes a second; empty: as recorded"],
  ["policies", "policies", "kvpin,sticky,round-robin,oracle", "names, or all"],
  ["load", "load", "", "0.9: engines would be busy for 90% of the time if nothing were cached; empty: as recorded"],
];

// Outlives a look at another view.
const state = { fields: Object.fromEntries(FIELDS.map(([name, , value]) => [name, value])), began: null, answer: null, error: "" };
let running = null; // ends the replay

const textOf = async (file) => {
  const isPacked = file.name.endsWith(".gz");
  return isPacked ? new Response(file.stream().pipeThrough(new DecompressionStream("gzip"))).blob() : file;
};

const play = async (file, show) => {
  running = new AbortController();
  Object.assign(state, { began: Date.now(), answer: null, error: "" });
  show();
  try {
    const given = Object.entries(state.fields).filter(([, value]) => value.trim());
    const headers = { "content-type": "application/octet-stream" };
    const options = { method: "POST", headers, body: await textOf(file), signal: running.signal };
    state.answer = await (await admin(`replays?${new URLSearchParams(given)}`, options)).json();
  } catch (error) {
    state.error = running.signal.aborted ? "" : error.message;
  }
  state.began = null;
  show();
};

const Curves = ({ curves }) => {
  const box = useRef();
  useEffect(() => {
    const end = drawCurves(box.current, curves);
    return () => {
      end();
      box.current?.replaceChildren();
    };
  }, [curves]);
  return html`<div class="curves" ref=${box}></div>`;
};

const Runs = ({ runs }) => {
  const slowest = Math.max(...runs.map((run) => run.mean_ttft_s ?? 0));
  return html`<div class="scroll"><table>
    <thead><tr><th class="number">engines</th><th class="number">GPU tokens</th><th>policy</th><th>token hits</th>
      <th>mean TTFT</th><th class="number">p99</th></tr></thead>
    <tbody>${runs.map(
      (run) => html`<tr key=${[run.engines, run.gpu_tokens, run.policy]}>
        <td class="number">${run.engines}</td><td class="number">${count(run.gpu_tokens)}</td><td>${run.policy}</td>
        <td><${Share} label="" part=${run.hit_percent} whole=${100} tone="delivered" text=${`${run.hit_percent.toFixed(1)}%`} /></td>
        <td>${run.mean_ttft_s !== null && html`<${Share} label="" part=${run.mean_ttft_s} whole=${slowest} tone="selected" text=${seconds(run.mean_ttft_s)} />`}</td>
        <td class="number">${seconds(run.p99_ttft_s)}</td>
      </tr>`,
    )}</tbody>
  </table></div>`;
};

export const Replay = pure(() => {
  const [, draw] = useState(0);
  const show = () => draw((n) => n + 1);
  useEffect(() => {
    if (!state.began) return;
    const timer = setInterval(show, 1000);
    return () => clearInterval(timer);
  }, [state.began]);
  const submit = (event) => {
    event.preventDefault();
    play(event.target.elements.recording.files[0], show);
  };
  const { answer, began, error } = state;
  return html`<section aria-label="Replay">
    <h2>Replay <small>recorded traffic on simulated engines</small></h2>
    <form class="card" onSubmit=${submit}>
      <div class="row">
        <label>recording <input type="file" name="recording" accept=".jsonl,.gz" required /></label>
        ${FIELDS.map(
          ([name, label, , title]) => html`<label title=${title}>${label}
            <input name=${name} size=${name === "policies" ? 30 : 12} value=${state.fields[name]} onInput=${(event) => (state.fields[name] = event.target.value)} /></label>`,
        )}
      </div>
      <div class="row">
        <button class="main" disabled=${!!began}>Replay</button>
        ${began && html`<progress aria-label="Replaying"></progress> <span>${seconds(Math.round((Date.now() - began) / 1000))}</span>
          <button type="button" onClick=${() => running.abort()}>Stop</button>`}
        <span class="note">A recording of <code>kvpin serve --record-traffic FILE</code> holds hashes and lengths, no text.</span>
      </div>
      ${error && html`<p class="problem" role="alert">${error}</p>`}
    </form>
    ${answer &&
    html`<p class="lead">${answer.title}</p>
      ${answer.notes.map((note) => html`<p class="note">${note}</p>`)}
      <${Curves} curves=${answer.curves} />
      <h2>Runs</h2>
      <${Runs} runs=${answer.runs} />`}
  </section>`;
});
