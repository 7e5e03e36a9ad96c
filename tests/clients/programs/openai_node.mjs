// openai-node.

import assert from "node:assert/strict";
import { LONG, PIXEL, SCHEMA, TOO_LONG, TOOL, VECTOR, all, baseURL, fresh, isFake, main, raises, wish, world } from "./features.mjs";
import { load } from "./environment.mjs";

const { default: OpenAI } = await load("openai");
const TOOLS = [{ type: "function", function: TOOL }];

const client = (changes = {}) => new OpenAI({ baseURL, apiKey: world.key, maxRetries: 0, timeout: 60_000, ...changes });
const user = (content) => [{ role: "user", content }];
const asked = (prompt, fields = {}) => ({
  model: world.model,
  messages: typeof prompt === "string" ? user(prompt) : prompt,
  max_tokens: 8,
  temperature: 0,
  ...fields,
});
const ask = (prompt, fields, changes) => client(changes).chat.completions.create(asked(prompt, fields));
const respond = (input, fields) =>
  client().responses.create({ model: world.model, input, max_output_tokens: 16, ...fields });
const textOf = (answer) => answer.choices[0].message.content;
const count = async (key) => Number(textOf(await ask(`do: count ${key}`)));

await main({
  async models() {
    const listed = await all(client().models.list());
    assert.ok(listed.some((model) => model.id === world.model));
    assert.equal((await client().models.retrieve(world.model)).id, world.model);
  },
  async chat() {
    const [choice] = (await ask(fresh())).choices;
    assert.equal(choice.message.role, "assistant");
    assert.ok(choice.message.content);
    assert.ok(["stop", "length"].includes(choice.finish_reason));
  },
  async stream() {
    const prompt = fresh();
    const chunks = await all(await ask(prompt, { stream: true }));
    const pieces = chunks.map((chunk) => chunk.choices[0]?.delta.content ?? "");
    assert.equal(pieces.join(""), textOf(await ask(prompt)));
    assert.ok(pieces.length > 2);
  },
  async usage() {
    const prompt = fresh();
    const { usage } = await ask(prompt);
    assert.equal(usage.total_tokens, usage.prompt_tokens + usage.completion_tokens);
    const told = await all(await ask(prompt, { stream: true, stream_options: { include_usage: true } }));
    assert.equal(told.at(-1).usage.prompt_tokens, usage.prompt_tokens);
    const untold = await all(await ask(prompt, { stream: true }));
    assert.ok(untold.every((chunk) => !chunk.usage && chunk.choices.length));
  },
  async stop() {
    const prompt = fresh();
    const word = textOf(await ask(prompt)).trim().split(/\s+/)[1];
    const [choice] = (await ask(prompt, { stop: [word] })).choices;
    assert.ok(!choice.message.content.includes(word));
    assert.equal(choice.finish_reason, "stop");
  },
  async parallel() {
    const one = client();
    const made = Array.from({ length: 8 }, () => one.chat.completions.create(asked(fresh())));
    assert.ok((await Promise.all(made)).every(textOf));
  },
  async many() {
    const { choices } = await ask(fresh(), { n: 2 });
    assert.deepEqual(choices.map((choice) => choice.index), [0, 1]);
  },
  async logprobs() {
    const [first] = (await ask(fresh(), { logprobs: true, top_logprobs: 2 })).choices[0].logprobs.content;
    assert.ok(first.token && first.logprob <= 0);
  },
  async cached() {
    const first = user(fresh() + LONG);
    const said = (await ask(first)).choices[0].message;
    const { usage } = await ask([...first, { role: "assistant", content: said.content }, ...user("And then?")]);
    assert.ok(usage.prompt_tokens_details.cached_tokens > 0);
  },
  async headers() {
    const id = fresh("id").replace(" ", "-");
    const made = client().chat.completions.create(asked(fresh()), { headers: { "x-request-id": id } });
    const { response, request_id } = await made.withResponse();
    assert.equal(request_id, id);
    assert.ok(response.headers.get("x-kvpin-engine"));
    assert.ok(Number(response.headers.get("x-kvpin-predicted-tokens")) >= 0);
  },
  async tools() {
    const first = user(wish("call-tool")[0]);
    const said = (await ask(first, { tools: TOOLS })).choices[0].message;
    const [call] = said.tool_calls;
    assert.equal(call.function.name, "tide");
    assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["port"]);
    const told = { role: "tool", tool_call_id: call.id, content: "4 m" };
    assert.equal(textOf(await ask([...first, said, told], { tools: TOOLS })), "The tool said: 4 m");
  },
  async stream_tools() {
    const fields = asked(wish("call-tools")[0], { tools: TOOLS });
    const { tool_calls: calls } = await client().chat.completions.stream(fields).finalMessage();
    assert.equal(calls.length, 2);
    for (const call of calls) assert.deepEqual(Object.keys(JSON.parse(call.function.arguments)), ["port"]);
  },
  async schema() {
    const json_schema = { name: "harbour", schema: SCHEMA, strict: true };
    const answer = await ask(fresh(), { response_format: { type: "json_schema", json_schema }, max_tokens: 64 });
    assert.deepEqual(Object.keys(JSON.parse(textOf(answer))).sort(), ["open", "port"]);
  },
  async reasoning() {
    const { message } = (await ask(wish("think")[0])).choices[0];
    assert.deepEqual([message.reasoning_content, message.content], ["Ports have tides.", "The tide is high."]);
  },
  async embeddings() {
    const fields = { model: world.embedding_model, input: ["One", "Two"] };
    const floats = await client().embeddings.create({ ...fields, encoding_format: "float" });
    const unsaid = await client().embeddings.create(fields); // the SDK asks for base64 then
    for (const [index, { embedding }] of floats.data.entries())
      embedding.forEach((number, at) => assert.ok(Math.abs(number - unsaid.data[index].embedding[at]) < 1e-6));
    if (isFake) assert.deepEqual(unsaid.data[0].embedding, VECTOR);
    const packed = await client().embeddings.create({ ...fields, encoding_format: "base64" });
    assert.equal(typeof packed.data[0].embedding, "string");
  },
  async images() {
    const image_url = { url: `data:image/png;base64,${PIXEL}` };
    const parts = [{ type: "text", text: fresh() }, { type: "image_url", image_url }];
    assert.ok(textOf(await ask(user(parts))));
  },
  async responses() {
    const answer = await respond(fresh());
    assert.ok(answer.output_text);
    assert.equal(answer.usage.total_tokens, answer.usage.input_tokens + answer.usage.output_tokens);
  },
  async responses_stream() {
    const events = await all(await respond(fresh(), { stream: true }));
    assert.equal(events[0].type, "response.created");
    assert.ok(["response.completed", "response.incomplete"].includes(events.at(-1).type));
    const deltas = events.filter((event) => event.type === "response.output_text.delta");
    const done = events.find((event) => event.type === "response.output_text.done");
    assert.equal(deltas.map((event) => event.delta).join(""), done.text);
  },
  async responses_tools() {
    const tools = [{ type: "function", strict: true, ...TOOL }];
    const first = user(wish("call-tool")[0]);
    const said = await respond(first, { tools });
    const call = said.output.find((item) => item.type === "function_call");
    assert.deepEqual(Object.keys(JSON.parse(call.arguments)), ["port"]);
    const told = { type: "function_call_output", call_id: call.call_id, output: "4 m" };
    const answer = await respond([...first, ...said.output, told], { tools });
    assert.equal(answer.output_text, "The tool said: 4 m");
  },
  async responses_kept() {
    const first = await respond(fresh() + LONG);
    assert.equal((await client().responses.retrieve(first.id)).output_text, first.output_text);
    const second = await respond("And then?", { previous_response_id: first.id });
    assert.equal(second.previous_response_id, first.id);
    if (!isFake) assert.ok(second.usage.input_tokens_details.cached_tokens > 0);
  },
  async wrong_key() {
    const error = await raises(OpenAI.AuthenticationError, ask("Hi", {}, { apiKey: "wrong" }));
    assert.equal(error.code, "invalid_api_key");
  },
  async no_model() {
    const error = await raises(OpenAI.NotFoundError, ask("Hi", { model: "no-such-model" }));
    assert.equal(error.code, "model_not_found");
  },
  async bad_request() {
    const error = await raises(OpenAI.BadRequestError, ask(isFake ? wish("refuse-400")[0] : TOO_LONG));
    assert.ok(error.error.message);
  },
  async rate_limit() {
    const [prompt, key] = wish("fail-429");
    const started = performance.now();
    assert.ok(textOf(await ask(prompt, {}, { maxRetries: 1 })));
    assert.ok(performance.now() - started >= 990); // retry-after; node's timers may end 1 ms early
    assert.equal(await count(key), 2);
    const error = await raises(OpenAI.RateLimitError, ask(wish("refuse-429")[0]));
    assert.equal(error.headers.get("retry-after"), "1");
  },
  async server_error() {
    const [prompt, key] = wish("fail-503");
    assert.ok(textOf(await ask(prompt, {}, { maxRetries: 1 })));
    assert.equal(await count(key), 2);
    await raises(OpenAI.InternalServerError, ask(wish("refuse-500")[0]));
  },
  async no_retry() {
    const [prompt, key] = wish("refuse-500-final");
    await raises(OpenAI.InternalServerError, ask(prompt, {}, { maxRetries: 2 }));
    assert.equal(await count(key), 1);
  },
  async cancel() {
    const [prompt, key] = wish("endless");
    for await (const _ of await ask(prompt, { stream: true })) break;
    assert.equal(textOf(await ask(`do: left ${key}`)), "left");
  },
  async death() {
    const got = [];
    const read = async () => {
      for await (const chunk of await ask(wish("die")[0], { stream: true })) got.push(chunk.choices[0].delta.content);
    };
    await raises(Error, read());
    assert.deepEqual(got, ["The ", "tide "]);
    await raises(OpenAI.APIError, ask(wish("die")[0]));
  },
  async timeout() {
    await raises(OpenAI.APIConnectionTimeoutError, ask(wish("hang")[0], {}, { timeout: 500 }));
  },
});
