// What the stream of events told so far. It is watched only while the page is visible.

import { admin, ApiError, eventsOf } from "./api.js";

const MOST_REQUESTS = 50;
const MOST_POINTS = 300; // of the chart, one a second
const RENDER_MS = 250;
const LONGEST_RETRY_MS = 10_000;

export const live = {
  state: "connecting", // or "open", "lost", "key" (one is needed), "refused"
  message: "",
  snapshot: null,
  points: [], // {at, requests, prompt, available, delivered}, each a second
  requests: new Map(), // the last ones by id, newest last
  missed: 0,
};

let listener = () => {};
let timer = null;
let running = null; // aborts the stream

export const onChange = (changed) => {
  listener = changed;
};

// However many events come, the page is drawn four times a second at most, just before the browser paints.
const changed = () => {
  timer ??= setTimeout(() => {
    timer = null;
    requestAnimationFrame(() => listener());
  }, RENDER_MS);
};

const say = (state, message = "") => {
  Object.assign(live, { state, message });
  listener();
};

const note = {
  snapshot(snapshot) {
    const before = live.snapshot;
    live.snapshot = snapshot;
    if (!before) return;
    const seconds = Math.max(snapshot.at - before.at, 0.001);
    if (snapshot.requests < before.requests || seconds < 0.2) return; // kvpin was restarted
    const rate = (name) => (snapshot.reuse[name] - before.reuse[name]) / seconds;
    live.points.push({
      at: snapshot.at,
      requests: (snapshot.requests - before.requests) / seconds,
      prompt: rate("prompt_tokens"),
      available: rate("available_tokens"),
      delivered: rate("delivered_tokens"),
    });
    live.points.splice(0, live.points.length - MOST_POINTS);
  },
  placed(request) {
    live.requests.set(request.request_id, request);
    if (live.requests.size > MOST_REQUESTS) live.requests.delete(live.requests.keys().next().value);
  },
  finished(request) {
    const why = request.why ?? live.requests.get(request.request_id)?.why;
    note.placed({ ...request, why, is_over: true });
  },
  missed({ events }) {
    live.missed += events;
  },
};

// The requests from before the page was opened. Those that the stream told of are newer.
const recall = async (signal) => {
  const { requests } = await (await admin(`requests?limit=${MOST_REQUESTS}`, { signal })).json();
  const earlier = requests.reverse().map((each) => [each.request_id, { ...each, is_over: true }]);
  live.requests = new Map([...earlier, ...live.requests].slice(-MOST_REQUESTS));
  changed();
};

const follow = async (signal) => {
  const answer = await admin("events", { signal });
  say("open");
  recall(signal).catch(() => {}); // the stream goes on without them
  for await (const { name, data } of eventsOf(answer)) {
    note[name]?.(JSON.parse(data));
    changed();
  }
};

export const stop = () => {
  running?.abort();
  running = null;
};

export const start = async () => {
  stop();
  const { signal } = (running = new AbortController());
  for (let waitMs = 500; !signal.aborted; waitMs = Math.min(2 * waitMs, LONGEST_RETRY_MS)) {
    try {
      await follow(signal);
      waitMs = 500;
      say("lost", "kvpin ended the connection");
    } catch (error) {
      if (signal.aborted) return;
      if (error instanceof ApiError && error.status === 401) return say("key", error.message);
      if (error instanceof ApiError && error.status === 403) return say("refused", error.message);
      say("lost", error instanceof ApiError ? error.message : "kvpin does not answer");
    }
    await new Promise((resolve) => setTimeout(resolve, waitMs));
  }
};

document.addEventListener("visibilitychange", () => {
  if (document.hidden) stop();
  else if (live.state !== "key" && live.state !== "refused") start();
});
