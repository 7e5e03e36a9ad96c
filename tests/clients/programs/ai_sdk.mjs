// Vercel's AI SDK, with its package for servers like OpenAI's, its OpenAI and its Anthropic package.

import assert from "node:assert/strict";
import { load } from "./environment.mjs";
import { PIXEL, SCHEMA, TOO_LONG, TOOL, TOOL_SCHEMA, VECTOR, all, baseURL, fresh, isFake, main, raises, wish, world } from "./features.mjs";

const ai = await load("ai");
const { createOpenAICompatible } = await load("@ai-sdk/openai-compatible");
const { createOpenAI } = await load("@ai-sdk/openai");
const { createAnthropic } = await load("@ai-sdk/anthropic");

const provider = (apiKey = world.key) =>
  createOpenAICompatible({ name: "kvpin", baseURL, apiKey, includeUsage: true, supportsStructuredOutputs: true });
const responses = () => createOpenAI({ baseURL, apiKey: world.key }).responses(world.model);
const messages = () => createAnthropic({ baseURL, apiKey: world.key })(world.model);
const asked = (prompt, fields = {}) => ({
  model: provider()(world.model),
  prompt,
  maxRetries: 0,
  maxOutputTokens: 16,
  temperature: 0,
  onError() {},
  ...fields,
});
const ask = async (prompt, fields) => (await ai.generateText(asked(prompt, fields))).text;
const count = async (key) => Number(await ask(`do: count ${key}`));
const tide = ai.tool({ description: TOOL.description, inputSchema: ai.jsonSchema(TOOL_SCHEMA), execute: () => "4 m" });
const toolFields = { tools: { tide }, stopWhen: ai.stepCountIs(2) };

await main({
  async chat() {
    assert.ok(await ask(fresh()));
  },
  async stream() {
    const prompt = fresh();
    const pieces = await all(ai.streamText(asked(prompt)).textStream);
    assert.equal(pieces.join(""), await ask(prompt));
    assert.ok(pieces.length > 2);
  },
  async usage() {
    const prompt = fresh();
    const { usage } = await ai.generateText(asked(prompt));
    assert.equal(usage.totalTokens, usage.inputTokens + usage.outputTokens);
    const told = await ai.streamText(asked(prompt)).usage;
    assert.equal(told.inputTokens, usage.inputTokens);
  },
  async stop() {
    const prompt = fresh();
    const word = (await ask(prompt)).trim().split(/\s+/)[1];
    assert.ok(!(await ask(prompt, { stopSequences: [word] })).includes(word));
  },
  async parallel() {
    assert.ok((await Promise.all(Array.from({ length: 8 }, () => ask(fresh())))).every(Boolean));
  },
  async headers() {
    const { response } = await ai.generateText(asked(fresh()));
    assert.ok(response.headers["x-request-id"]);
    assert.ok(response.headers["x-kvpin-engine"]);
  },
  async tools() {
    const { steps, text } = await ai.generateText(asked(wish("call-tool")[0], toolFields));
    assert.deepEqual(Object.keys(steps[0].toolCalls[0].input), ["port"]);
    assert.equal(steps.length, 2);
    assert.equal(text, "The tool said: 4 m");
  },
  async stream_tools() {
    const run = ai.streamText(asked(wish("call-tools")[0], toolFields));
    const [first] = await run.steps;
    assert.equal(first.toolCalls.length, 2);
  },
  async schema() {
    const output = ai.Output.object({ schema: ai.jsonSchema(SCHEMA) });
    const made = await ai.generateText(asked(fresh(), { output, maxOutputTokens: 64 }));
    assert.deepEqual(Object.keys(made.output).sort(), ["open", "port"]);
  },
  async reasoning() {
    const { reasoningText, text } = await ai.generateText(asked(wish("think")[0]));
    assert.deepEqual([reasoningText, text], ["Ports have tides.", "The tide is high."]);
  },
  async embeddings() {
    const model = provider().embeddingModel(world.embedding_model);
    const { embeddings } = await ai.embedMany({ model, values: ["One", "Two"], maxRetries: 0 });
    assert.equal(embeddings.length, 2);
    if (isFake) assert.deepEqual(embeddings[0], VECTOR);
  },
  async images() {
    const content = [
      { type: "text", text: fresh() },
      { type: "image", image: PIXEL, mediaType: "image/png" },
    ];
    assert.ok(await ask([{ role: "user", content }]));
  },
  async responses() {
    assert.ok(await ask(fresh(), { model: responses() }));
  },
  async responses_stream() {
    const pieces = await all(ai.streamText(asked(fresh(), { model: responses() })).textStream);
    assert.ok(pieces.join(""));
  },
  async messages() {
    const pieces = await all(ai.streamText(asked(fresh(), { model: messages() })).textStream);
    assert.ok(pieces.join(""));
  },
  async wrong_key() {
    const error = await raises(ai.APICallError, ask("Hi", { model: provider("wrong")(world.model) }));
    assert.equal(error.statusCode, 401);
  },
  async no_model() {
    const error = await raises(ai.APICallError, ask("Hi", { model: provider()("no-such-model") }));
    assert.equal(error.statusCode, 404);
  },
  async bad_request() {
    const error = await raises(ai.APICallError, ask(isFake ? wish("refuse-400")[0] : TOO_LONG));
    assert.equal(error.statusCode, 400);
    assert.equal(error.isRetryable, false);
  },
  async rate_limit() {
    const [prompt, key] = wish("fail-429");
    assert.ok(await ask(prompt, { maxRetries: 1 }));
    assert.equal(await count(key), 2);
    const error = await raises(ai.APICallError, ask(wish("refuse-429")[0]));
    assert.equal(error.responseHeaders["retry-after"], "1");
  },
  async server_error() {
    const [prompt, key] = wish("fail-503");
    assert.ok(await ask(prompt, { maxRetries: 1 }));
    assert.equal(await count(key), 2);
    const error = await raises(ai.APICallError, ask(wish("refuse-500")[0]));
    assert.equal(error.statusCode, 500);
  },
  async cancel() {
    const [prompt, key] = wish("endless");
    const stopping = new AbortController();
    for await (const _ of ai.streamText(asked(prompt, { abortSignal: stopping.signal })).textStream) stopping.abort();
    assert.equal(await ask(`do: left ${key}`), "left");
  },
  async death() {
    const read = async () => {
      const parts = await all(ai.streamText(asked(wish("die")[0])).fullStream);
      const failed = parts.find((part) => part.type === "error");
      if (failed) throw failed.error;
    };
    await raises(undefined, read());
    await raises(Error, ask(wish("die")[0]));
  },
  async timeout() {
    const error = await raises(undefined, ask(wish("hang")[0], { abortSignal: AbortSignal.timeout(500) }));
    assert.match(`${error.name} ${error.cause?.name}`, /Timeout|Abort/);
  },
});
