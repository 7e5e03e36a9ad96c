// Small pieces that several views share: numbers as people read them, bars, pages of a list.

import { html, useEffect, useState } from "./vendor/htm-preact.js";
import { admin } from "./api.js";

const SHORT = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

export const count = (n) => (n === null || n === undefined ? "–" : WHOLE.format(n));
// A prediction of cached tokens, with a mark if the engine may reuse another number.
export const predicted = (request) => (request.is_firm === false ? "~" : "") + count(request.predicted_tokens);
export const short = (n) => (n < 10_000 ? WHOLE.format(n) : SHORT.format(n));
export const percent = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part === whole ? 0 : 1)}%` : "–");
export const time = (at) => new Date(1000 * at).toLocaleTimeString("en-GB");

export const seconds = (s) => {
  if (s === null || s === undefined) return "–";
  if (s >= 86_400) return `${(s / 86_400).toFixed(1)} days`;
  if (s >= 3600) return `${(s / 3600).toFixed(1)} h`;
  if (s >= 60) return `${(s / 60).toFixed(1)} min`;
  if (s >= 1) return `${s.toFixed(2)} s`;
  return s === 0 ? "0" : `${(1000 * s).toFixed(s >= 0.01 ? 0 : 1)} ms`;
};

// A bar that shows a share, with its figures beside it.
export const Share = ({ label, part, whole, tone, text }) => html`
  <div class="share">
    <span class="label">${label}</span>
    <svg class="bar" viewBox="0 0 100 10" preserveAspectRatio="none" role="img"
      aria-label=${`${label}: ${percent(part, whole)}`}>
      <rect class="ground" width="100" height="10" />
      <rect class=${tone} width=${whole ? Math.min((100 * part) / whole, 100) : 0} height="10" />
    </svg>
    <span class="figure">${text ?? `${short(part)} · ${percent(part, whole)}`}</span>
  </div>`;

// A component that is drawn again only if one of its properties is another one.
export const pure = (draw) =>
  function Pure(props) {
    this.shouldComponentUpdate = (next) => Object.keys(next).some((name) => next[name] !== this.props[name]);
    return html`<${draw} ...${props} />`; // beneath, so that its own state draws it, too
  };

// One page of a long list, and the buttons that lead to the others.
export const Paged = ({ items, size, children, name }) => {
  const [page, turn] = useState(0);
  const last = Math.max(Math.ceil(items.length / size) - 1, 0);
  const at = Math.min(page, last);
  const shown = items.slice(at * size, (at + 1) * size);
  return html`
    ${children(shown)}
    ${last > 0 &&
    html`<nav class="pages" aria-label=${`Pages of ${name}`}>
      <button disabled=${at === 0} onClick=${() => turn(at - 1)}>Previous</button>
      <span>${at * size + 1}–${at * size + shown.length} of ${count(items.length)}</span>
      <button disabled=${at === last} onClick=${() => turn(at + 1)}>Next</button>
    </nav>`}`;
};

export const whyLink = (id) => `#why/${encodeURIComponent(id)}`;

// What GET answers: [answer, error, again]. While another path is asked for, the answer is null.
export const useAdmin = (path) => {
  const [state, set] = useState({});
  const [round, again] = useState(0);
  useEffect(() => {
    const gone = new AbortController();
    admin(path, { signal: gone.signal })
      .then((answer) => answer.json())
      .then((answer) => set({ path, answer }))
      .catch((error) => gone.signal.aborted || set({ path, error: error.message }));
    return () => gone.abort();
  }, [path, round]);
  const { answer, error } = state.path === path ? state : {};
  return [answer, error, () => again((n) => n + 1)];
};
