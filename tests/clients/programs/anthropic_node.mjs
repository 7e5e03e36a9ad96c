// anthropic-sdk-typescript.

import assert from "node:assert/strict";
import { load } from "./environment.mjs";
import { LONG, PIXEL, TOO_LONG, TOOL_SCHEMA, all, fresh, isFake, main, raises, wish, world } from "./features.mjs";

const { default: Anthropic } = await load("@anthropic-ai/sdk");
const TOOLS = [{ name: "tide", description: "Height of the tide", input_schema: TOOL_SCHEMA }];

const client = (changes = {}) =>
  new Anthropic({ baseURL: world.url, apiKey: world.key, maxRetries: 0, timeout: 60_000, ...changes });
const user = (content) => [{ role: "user", content }];
const asked = (prompt, fields = {}) => ({
  model: world.model,
  messages: typeof prompt === "string" ? user(prompt) : prompt,
  max_tokens: 16,
  temperature: 0,
  ...fields,
});
const say = (prompt, fields, changes) => client(changes).messages.create(asked(prompt, fields));
const textOf = (message) => message.content.map((block) => block.text ?? "").join("");
const count = async (key) => Number(textOf(await say(`do: count ${key}`)));
const callsOf = (message) => message.content.filter((block) => block.type === "tool_use");

await main({
  async chat() {
    const message = await say(fresh());
    assert.deepEqual([message.type, message.role], ["message", "assistant"]);
    assert.ok(textOf(message));
  },
  async stream() {
    const prompt = fresh();
    const events = await all(await say(prompt, { stream: true }));
    assert.deepEqual([events[0].type, events.at(-1).type], ["message_start", "message_stop"]);
    const pieces = events.map((event) => event.delta?.text ?? "");
    assert.equal(pieces.join(""), textOf(await say(prompt)));
  },
  async usage() {
    const prompt = fresh();
    const { usage } = await say(prompt);
    assert.ok(usage.input_tokens > 0 && usage.output_tokens > 0);
    const told = await client().messages.stream(asked(prompt)).finalMessage();
    assert.equal(told.usage.output_tokens, usage.output_tokens);
  },
  async stop() {
    const prompt = fresh();
    const word = textOf(await say(prompt)).trim().split(/\s+/)[1];
    assert.ok(!textOf(await say(prompt, { stop_sequences: [word] })).includes(word));
  },
  async parallel() {
    assert.ok((await Promise.all(Array.from({ length: 8 }, () => say(fresh())))).every(textOf));
  },
  async cached() {
    const first = user(fresh() + LONG);
    const said = textOf(await say(first));
    const { usage } = await say([...first, { role: "assistant", content: said }, ...user("And then?")]);
    assert.ok(usage.cache_read_input_tokens > 0);
  },
  async headers() {
    const { response } = await client().messages.create(asked(fresh())).withResponse();
    assert.ok(response.headers.get("x-request-id"));
    assert.ok(response.headers.get("x-kvpin-engine"));
  },
  async tools() {
    const first = user(wish("call-tool")[0]);
    const said = await say(first, { tools: TOOLS });
    const [call] = callsOf(said);
    assert.deepEqual([call.name, Object.keys(call.input), said.stop_reason], ["tide", ["port"], "tool_use"]);
    const told = user([{ type: "tool_result", tool_use_id: call.id, content: "4 m" }]);
    const answer = await say([...first, { role: "assistant", content: said.content }, ...told], { tools: TOOLS });
    assert.equal(textOf(answer), "The tool said: 4 m");
  },
  async stream_tools() {
    const fields = asked(wish("call-tools")[0], { tools: TOOLS });
    const calls = callsOf(await client().messages.stream(fields).finalMessage());
    assert.equal(calls.length, 2);
    for (const call of calls) assert.deepEqual(Object.keys(call.input), ["port"]);
  },
  async reasoning() {
    const [thought, text] = (await say(wish("think")[0])).content;
    assert.deepEqual([thought.thinking, text.text], ["Ports have tides.", "The tide is high."]);
  },
  async images() {
    const source = { type: "base64", media_type: "image/png", data: PIXEL };
    assert.ok(textOf(await say(user([{ type: "text", text: fresh() }, { type: "image", source }]))));
  },
  async count_tokens() {
    const prompt = fresh();
    const counted = await client().messages.countTokens({ model: world.model, messages: user(prompt) });
    const { usage } = await say(prompt);
    assert.equal(counted.input_tokens, usage.input_tokens + (usage.cache_read_input_tokens ?? 0));
  },
  async wrong_key() {
    const { error } = await raises(Anthropic.AuthenticationError, say("Hi", {}, { apiKey: "wrong" }));
    assert.deepEqual([error.type, error.error.type], ["error", "authentication_error"]);
  },
  async no_model() {
    const { error } = await raises(Anthropic.NotFoundError, say("Hi", { model: "no-such-model" }));
    assert.deepEqual([error.type, error.error.type], ["error", "not_found_error"]);
  },
  async bad_request() {
    const { error } = await raises(Anthropic.BadRequestError, say(isFake ? wish("refuse-400")[0] : TOO_LONG));
    assert.deepEqual([error.type, error.error.type], ["error", "invalid_request_error"]);
  },
  async rate_limit() {
    const [prompt, key] = wish("fail-429");
    const started = performance.now();
    assert.ok(textOf(await say(prompt, {}, { maxRetries: 1 })));
    assert.ok(performance.now() - started >= 990); // retry-after; node's timers may end 1 ms early
    assert.equal(await count(key), 2);
    await raises(Anthropic.RateLimitError, say(wish("refuse-429")[0]));
  },
  async server_error() {
    const [prompt, key] = wish("fail-503");
    assert.ok(textOf(await say(prompt, {}, { maxRetries: 1 })));
    assert.equal(await count(key), 2);
    await raises(Anthropic.InternalServerError, say(wish("refuse-500")[0]));
  },
  async no_retry() {
    const [prompt, key] = wish("refuse-500-final");
    await raises(Anthropic.InternalServerError, say(prompt, {}, { maxRetries: 2 }));
    assert.equal(await count(key), 1);
  },
  async cancel() {
    const [prompt, key] = wish("endless");
    for await (const event of await say(prompt, { stream: true })) if (event.type === "content_block_delta") break;
    assert.equal(textOf(await say(`do: left ${key}`)), "left");
  },
  async death() {
    const got = [];
    const read = async () => {
      for await (const event of await say(wish("die")[0], { stream: true })) got.push(event.type);
    };
    await raises(Error, read());
    assert.ok(got.includes("content_block_delta") && !got.includes("message_stop"));
    await raises(Anthropic.APIError, say(wish("die")[0]));
  },
  async timeout() {
    await raises(Anthropic.APIConnectionTimeoutError, say(wish("hang")[0], {}, { timeout: 500 }));
  },
});
