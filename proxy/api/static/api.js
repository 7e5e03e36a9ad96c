// Requests to kvpin: the admin API with the admin key, the data plane with a client's key. Both keys stay in this
// tab's session storage.

const stored = (name) => ({
  get: () => sessionStorage.getItem(name) ?? "",
  set: (value) => (value ? sessionStorage.setItem(name, value) : sessionStorage.removeItem(name)),
});
export const adminKey = stored("kvpin-admin-key");
export const clientKey = stored("kvpin-client-key");

// An answer that is an error. `message` is kvpin's own sentence, `content` its JSON.
export class ApiError extends Error {
  constructor(status, message, content) {
    super(message);
    this.status = status;
    this.content = content;
  }
}

const ask = async (url, key, options = {}) => {
  const headers = { ...options.headers, ...(key ? { authorization: `Bearer ${key}` } : {}) };
  const answer = await fetch(url, { cache: "no-store", ...options, headers });
  if (answer.ok) return answer;
  const text = await answer.text();
  let content = null;
  try {
    content = JSON.parse(text);
  } catch {
    // no JSON: an answer of a server in between
  }
  const told = content?.error?.message ?? content?.error; // of an operation that failed, a string
  const message = (typeof told === "string" && told) || text.slice(0, 300) || `status ${answer.status}`;
  throw new ApiError(answer.status, message, content);
};

export const admin = (path, options) => ask(`../admin/v1/${path}`, adminKey.get(), options);
export const data = (path, options) => ask(`../v1/${path}`, clientKey.get(), options);

// The server-sent events of an answer, as {name, data}.
export async function* eventsOf(answer) {
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      text += value.replaceAll("\r", "");
      const whole = text.split("\n\n");
      text = whole.pop();
      for (const lines of whole) {
        const event = { name: "message", data: "" };
        for (const line of lines.split("\n")) {
          if (line.startsWith("event:")) event.name = line.slice(6).trim();
          if (line.startsWith("data:")) event.data += line.slice(5).trim();
        }
        if (event.data) yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
