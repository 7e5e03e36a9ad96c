// Buttons for what the admin API can do with a prefix or an engine's cache, and the progress of it.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { admin } from "./api.js";
import { count } from "./parts.js";

const PIN_S = 3600;
const POLL_MS = 500;
const WAIT_S = 1;

const json = async (path, options) => (await admin(path, options)).json();
// An operation that failed has the status of its error.
const post = async (verb, body) => {
  try {
    return await json(verb, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ ...body, wait_s: WAIT_S }) });
  } catch (error) {
    if (error.content?.engines) return error.content;
    throw error;
  }
};

const Operation = ({ operation }) => html`<div class="operation" role="status">
  <p class=${operation.state === "failed" ? "problem" : "note"}>
    ${operation.verb}: ${operation.state}${operation.error && html`: ${operation.error}`}${operation.note && html`: ${operation.note}`}
  </p>
  ${operation.engines.map(
    (part) => html`<div class="row">
      <span>${part.engine}</span>
      <progress max=${part.total || 1} value=${part.state === "done" ? part.total || 1 : part.done} aria-label=${`${operation.verb} on ${part.engine}`}></progress>
      <span class="note">${part.error ?? `${count(part.done)} of ${count(part.total)} blocks`}</span>
    </div>`,
  )}
</div>`;

// `target` names what the admin API acts on, `verbs` what can be done with it.
const Verbs = ({ target, verbs, again, children }) => {
  const [operation, show] = useState(null);
  const [problem, setProblem] = useState(null);
  const [asked, ask] = useState(null); // the verb that waits for a second click
  const gone = useRef(false);
  useEffect(() => () => void (gone.current = true), []);

  const run = async (verb, body) => {
    ask(null);
    setProblem(null);
    try {
      let latest = await post(verb, body);
      while (!gone.current) {
        show(latest);
        if (latest.state !== "running") break;
        await new Promise((resolve) => setTimeout(resolve, POLL_MS));
        latest = await json(`operations/${encodeURIComponent(latest.id)}`);
      }
    } catch (error) {
      setProblem(`${verb}: ${error.message}`);
    }
    if (!gone.current) again();
  };
  const isRunning = operation?.state === "running";
  const click = (verb) => (verb !== "flush" || asked === verb ? run(verb, { ...target, ...(verb === "pin" ? { ttl_s: PIN_S } : {}) }) : ask(verb));
  return html`<div class="actions">
    <div class="row">
      ${Object.entries(verbs).map(
        ([verb, label]) => html`<button disabled=${isRunning} onClick=${() => click(verb)}>${asked === verb ? `Really ${label.toLowerCase()}?` : label}</button>`,
      )}
      ${children?.(run, isRunning)}
      ${isRunning && html`<button onClick=${() => json(`operations/${encodeURIComponent(operation.id)}`, { method: "DELETE" }).then(show, (error) => setProblem(error.message))}>Cancel</button>`}
    </div>
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    ${operation && html`<${Operation} operation=${operation} />`}
  </div>`;
};

const OF_PREFIX = { pin: "Pin for an hour", offload: "Offload", restore: "Restore", warm: "Warm", flush: "Flush" };

export const Actions = ({ prefix, again }) => html`<${Verbs}
  target=${{ request_id: prefix.request_id, tokens: prefix.end }} verbs=${OF_PREFIX} again=${again}>
  ${(run, isRunning) => prefix.pins.map(
    (pin) => html`<button disabled=${isRunning} title=${pin} onClick=${() => run("unpin", { pin_id: pin })}>Unpin<span class="hidden"> ${pin}</span></button>`,
  )}
<//>
<p class="note">They act on the prompt up to this prefix's end. Flush also drops what follows it.</p>`;

const OF_ENGINE = { offload: "Offload all", restore: "Restore all", flush: "Flush all" };

export const EngineActions = ({ engine }) => html`<details class="engine-actions"><summary>KV</summary>
  <${Verbs} target=${{ engine }} verbs=${OF_ENGINE} again=${() => {}} />
</details>`;
