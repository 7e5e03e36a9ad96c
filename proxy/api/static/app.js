// The page: its head, and the view that the address names.

import { html, render, useEffect, useState } from "./vendor/htm-preact.js";
import { adminKey } from "./api.js";
import { live, onChange, start } from "./live.js";
import { CacheMap } from "./map.js";
import { Now } from "./now.js";
import { Replay } from "./replay.js";
import { Try } from "./try.js";
import { Use } from "./use.js";
import { Why } from "./why.js";

const VIEWS = { now: "Now", map: "Map", why: "Why", use: "Use", try: "Try", replay: "Replay" };
const STATES = { open: "● live", connecting: "… connecting", lost: "▲ connection lost", key: "key needed", refused: "✕ refused" };

const address = () => {
  const [view, id] = location.hash.slice(1).split("/");
  return { view: view in VIEWS ? view : "now", id: id && decodeURIComponent(id) };
};

const KeyForm = () => {
  const use = (event) => {
    event.preventDefault();
    adminKey.set(new FormData(event.target).get("key").trim());
    start();
  };
  return html`<form class="card key-form" onSubmit=${use}>
    <h2>The admin key</h2>
    <p>This page shows what the admin API tells. The key stays in this tab, until you close it.</p>
    <div class="row">
      <label>admin key <input name="key" type="password" autocomplete="off" autofocus required /></label>
      <button class="main">Open</button>
    </div>
    ${adminKey.get() && html`<p class="problem" role="alert">${live.message}</p>`}
  </form>`;
};

const App = () => {
  const [, draw] = useState(0);
  const [{ view, id }, go] = useState(address());
  useEffect(() => {
    onChange(() => draw((n) => n + 1));
    addEventListener("hashchange", () => go(address()));
    start();
  }, []);
  const body = () => {
    if (view === "try") return html`<${Try} />`;
    if (live.state === "key") return html`<${KeyForm} />`;
    if (live.state === "refused") return html`<p class="problem" role="alert">${live.message}</p>`;
    if (view === "replay") return html`<${Replay} />`;
    if (view === "use") return html`<${Use} />`;
    if (view === "map") return html`<${CacheMap} under=${id} />`;
    return view === "why" ? html`<${Why} id=${id} />` : html`<${Now} />`;
  };
  return html`
    <header>
      <h1>kvpin</h1>
      <nav aria-label="Views">
        ${Object.entries(VIEWS).map(
          ([name, label]) => html`<a href=${`#${name}`} aria-current=${name === view ? "page" : undefined}>${label}</a>`,
        )}
      </nav>
      <span class=${`connection ${live.state}`} role="status" title=${live.message}>${STATES[live.state]}</span>
    </header>
    <main>${body()}</main>
    <footer>
      <a href="../metrics">metrics</a> · libraries: <a href="vendor/preact.LICENSE">Preact</a>,
      ${" "}<a href="vendor/htm.LICENSE">htm</a>, <a href="vendor/uplot.LICENSE">uPlot</a>
    </footer>`;
};

render(html`<${App} />`, document.body);
