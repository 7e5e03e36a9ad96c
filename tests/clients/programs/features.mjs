// Runs features of a node client. For each it prints a JSON line: its name, and what went wrong if something did.
// As features.py; programs give `main` one asynchronous function per feature.

import assert from "node:assert/strict";
import { randomUUID } from "node:crypto";

export const TOOL_SCHEMA = {
  type: "object",
  properties: { port: { type: "string", maxLength: 8 } },
  required: ["port"],
  additionalProperties: false,
};
export const TOOL = { name: "tide", description: "Height of the tide", parameters: TOOL_SCHEMA };
export const SCHEMA = {
  type: "object",
  properties: { port: { enum: ["Brest", "Lorient"] }, open: { type: "boolean" } },
  required: ["port", "open"],
  additionalProperties: false,
};
export const PIXEL =
  "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==";
export const TOO_LONG = "word ".repeat(40_000);
export const VECTOR = [0.25, -0.5, 1.0];
export const LONG = "The harbour opens at six. ".repeat(40);

export const world = JSON.parse(process.argv.at(-1));
export const isFake = world.engine === "fake";
export const baseURL = `${world.url}/v1`;

/** A prompt that no other feature sends. */
export const fresh = (text = "Hello") => `${text} ${randomUUID()}`;

/** A prompt that makes the fake engine do something, and its key. */
export function wish(scenario) {
  const key = randomUUID();
  return [`do: ${scenario} ${key}`, key];
}

/** All items of an asynchronous iterable. */
export async function all(items) {
  const got = [];
  for await (const item of items) got.push(item);
  return got;
}

/** The error that this must end with, of that class if one is given. */
export async function raises(kind, made) {
  let got;
  try {
    got = await made;
  } catch (error) {
    if (kind) assert.ok(error instanceof kind, `${error?.constructor?.name}: ${error?.message}`);
    return error;
  }
  assert.fail(`no error, but ${JSON.stringify(got)}`);
}

const statusOf = (error) => error?.status ?? error?.statusCode ?? (error?.cause && statusOf(error.cause));

function limited(made) {
  let timer;
  const late = new Promise((_, reject) => {
    timer = setTimeout(() => reject(new Error("took longer than 240 s")), 240_000);
  });
  return Promise.race([made, late]).finally(() => clearTimeout(timer));
}

/** Runs the features that the world on the command line asks for. */
export async function main(features) {
  for (const name of world.features) {
    const result = { feature: name };
    const started = performance.now();
    try {
      await limited(features[name]());
    } catch (error) {
      const where = `${error?.stack ?? ""}\n`;
      Object.assign(result, { error: `${error?.name}: ${error?.message}`, where, status: statusOf(error) ?? null });
    }
    result.seconds = Math.round((performance.now() - started) / 10) / 100;
    process.stdout.write(`${JSON.stringify(result)}\n`);
  }
  process.exit();
}
