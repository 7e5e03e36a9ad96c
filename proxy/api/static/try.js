// Try: a chat with any served model. Each turn shows what its KV cache did. Beside it, the same questions may be asked
// without reuse: each under a new cache salt, so that no engine finds KV of an earlier turn.

import { html, useEffect, useRef, useState } from "./vendor/htm-preact.js";
import { ApiError, clientKey, data, eventsOf } from "./api.js";
import { count, percent, pure, seconds, whyLink } from "./parts.js";

const newSession = () => Array.from(crypto.getRandomValues(new Uint32Array(4)), (n) => n.toString(16)).join("");

const newColumn = (reuses) => ({ reuses, turns: [], session: newSession() });

// The turns outlive a look at another view.
const chat = { columns: [newColumn(true), newColumn(false)], isCompared: false, model: "", maxTokens: 128 };
const columns = () => (chat.isCompared ? chat.columns : chat.columns.slice(0, 1));

// Streams the answer to the chat so far into `turn`.
const stream = async ({ turns, session, reuses }, turn, signal, show) => {
  const messages = turns.filter((each) => each.text && !each.error).map(({ role, text }) => ({ role, content: text }));
  const body = { model: chat.model, messages, max_tokens: chat.maxTokens, stream: true, stream_options: { include_usage: true } };
  if (!reuses) body.cache_salt = newSession();
  const began = performance.now();
  const answer = await data("chat/completions", {
    method: "POST",
    headers: { "content-type": "application/json", ...(reuses ? { "x-session-id": session } : {}) },
    body: JSON.stringify(body),
    signal,
  });
  turn.engine = answer.headers.get("x-kvpin-engine");
  turn.request = answer.headers.get("x-request-id");
  for await (const event of eventsOf(answer)) {
    if (event.data === "[DONE]") break;
    const { choices, usage, error } = JSON.parse(event.data);
    if (error) throw new Error(error.message);
    const delta = choices?.[0]?.delta ?? {};
    const text = delta.content || delta.reasoning_content || delta.reasoning || "";
    if (text) turn.firstTokenS ??= (performance.now() - began) / 1000;
    turn.text += text;
    if (usage) {
      turn.promptTokens = usage.prompt_tokens;
      turn.outputTokens = usage.completion_tokens;
      turn.cachedTokens = usage.prompt_tokens_details?.cached_tokens ?? null;
    }
    show();
  }
  turn.durationS = (performance.now() - began) / 1000;
};

const Facts = ({ turn }) => html`<dl>
  <div><dt>engine</dt><dd>${turn.engine ?? "–"}</dd></div>
  <div><dt>first token</dt><dd>${seconds(turn.firstTokenS)}</dd></div>
  <div><dt>cached tokens</dt>
    <dd>${count(turn.cachedTokens)} of ${count(turn.promptTokens)} (${percent(turn.cachedTokens ?? 0, turn.promptTokens)})</dd></div>
  <div><dt>answer</dt><dd>${count(turn.outputTokens)} tokens, ${seconds(turn.durationS)}</dd></div>
  ${turn.request && turn.durationS !== undefined && html`<div><dd><a href=${whyLink(turn.request)}>Why?</a></dd></div>`}
</dl>`;

const Column = ({ column }) => html`<div class="turns" aria-live="polite" role="group" aria-label=${`Reuse ${column.reuses ? "on" : "off"}`}>
  ${chat.isCompared && html`<h3>Reuse ${column.reuses ? "on" : html`off <small>a new cache salt each turn</small>`}</h3>`}
  ${column.turns.map((turn) => html`<${Turn} turn=${turn} />`)}
  ${!column.reuses && column.turns.some((turn) => turn.cachedTokens > 0) &&
  html`<p class="note">Some of it came from cache: these engines take no salts.</p>`}
</div>`;

const Turn = ({ turn }) => html`<article class=${`turn ${turn.role}`}>
  <h3>${turn.role === "user" ? "You" : chat.model}</h3>
  <p class="text">${turn.text}</p>
  ${turn.error && html`<p class="problem" role="alert">${turn.error}</p>`}
  ${turn.role === "assistant" && turn.engine && html`<${Facts} turn=${turn} />`}
</article>`;

export const Try = pure(() => {
  const [, draw] = useState(0);
  const show = () => draw((n) => n + 1);
  const [models, setModels] = useState(null);
  const [problem, setProblem] = useState(null);
  const [needsKey, askForKey] = useState(!!clientKey.get());
  const [text, setText] = useState("");
  const running = useRef(null);

  const load = async () => {
    try {
      const { data: found } = await (await data("models")).json();
      setModels(found.map((each) => each.id));
      chat.model ||= found[0]?.id ?? "";
      setProblem(found.length ? null : "No engine serves a model yet.");
    } catch (error) {
      if (error instanceof ApiError && error.status === 401) askForKey(true);
      setProblem(error.message);
    }
  };
  useEffect(() => {
    load();
    return () => running.current?.abort();
  }, []);

  const send = async (event) => {
    event.preventDefault();
    if (running.current || !text.trim()) return;
    running.current = new AbortController();
    const { signal } = running.current;
    setText("");
    // One after the other, so that none waits for the other.
    for (const column of columns()) {
      if (signal.aborted) break;
      await ask(column, text, signal);
    }
    running.current = null;
    show();
  };
  const ask = async (column, question, signal) => {
    const asked = { role: "user", text: question };
    const turn = { role: "assistant", text: "" };
    column.turns.push(asked);
    try {
      const going = stream(column, turn, signal, show);
      column.turns.push(turn);
      show();
      await going;
    } catch (error) {
      const isStopped = error.name === "AbortError";
      turn.error = isStopped ? null : error.message;
      if (!turn.text) asked.error = isStopped ? "stopped" : "not answered";
    }
  };
  const onKey = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && send(event);
  const renew = () => {
    running.current?.abort();
    chat.columns = [newColumn(true), newColumn(false)];
    show();
  };
  const compare = (event) => {
    chat.isCompared = event.target.checked;
    renew();
  };
  const useKey = (event) => {
    event.preventDefault();
    clientKey.set(new FormData(event.target).get("key").trim());
    load();
  };

  return html`<section class="try" aria-label="Try">
    <h2>Try <small>ask twice, or go on: what the engine still holds is not computed again</small></h2>
    ${needsKey &&
    html`<form class="row" onSubmit=${useKey}>
      <label>API key <input name="key" type="password" autocomplete="off" defaultValue=${clientKey.get()} /></label>
      <button>Use it</button>
    </form>`}
    ${problem && html`<p class="problem" role="alert">${problem}</p>`}
    <div class=${chat.isCompared ? "sides" : ""}>${columns().map((column) => html`<${Column} column=${column} />`)}</div>
    <form onSubmit=${send}>
      <label class="hidden" for="prompt">Prompt</label>
      <textarea id="prompt" rows="3" value=${text} placeholder="Ask something. Enter sends."
        onInput=${(e) => setText(e.target.value)} onKeyDown=${onKey}></textarea>
      <div class="row">
        <label>model
          <select value=${chat.model} onChange=${(e) => ((chat.model = e.target.value), show())}>
            ${(models ?? []).map((each) => html`<option value=${each}>${each}</option>`)}
          </select>
        </label>
        <label>at most
          <input type="number" min="1" max="4096" value=${chat.maxTokens} onInput=${(e) => (chat.maxTokens = +e.target.value || 128)} /> tokens
        </label>
        <label><input type="checkbox" checked=${chat.isCompared} disabled=${!!running.current} onChange=${compare} /> compare with reuse off</label>
        ${running.current
          ? html`<button type="button" onClick=${() => running.current?.abort()}>Stop</button>`
          : html`<button class="main" disabled=${!chat.model}>Send</button>`}
        <button type="button" onClick=${renew}>New chat</button>
      </div>
    </form>
  </section>`;
});
