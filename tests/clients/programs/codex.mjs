// Codex, as a command: one task in an empty directory. It speaks Responses only.

import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { existsSync, mkdtempSync } from "node:fs";
import os from "node:os";
import path from "node:path";
import { baseURL, main, wish, world } from "./features.mjs";

const command = path.resolve(process.execPath, "../../../@openai/codex/bin/codex.js");

await main({
  async agent() {
    const home = mkdtempSync(path.join(os.tmpdir(), "codex-"));
    const settings = {
      model_provider: "kvpin",
      "model_providers.kvpin.name": "kvpin",
      "model_providers.kvpin.base_url": baseURL,
      "model_providers.kvpin.env_key": "KVPIN_KEY",
      "model_providers.kvpin.wire_api": "responses",
    };
    const flags = Object.entries(settings).flatMap(([name, value]) => ["-c", `${name}=${JSON.stringify(value)}`]);
    const asked = ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "--json"];
    const child = spawn(process.execPath, [command, ...asked, "-m", world.model, ...flags, wish("touch")[0]], {
      cwd: home,
      env: { ...process.env, HOME: home, CODEX_HOME: home, KVPIN_KEY: world.key },
      stdio: ["ignore", "pipe", "pipe"],
    });
    let printed = "";
    for (const stream of [child.stdout, child.stderr]) stream.on("data", (data) => (printed += data));
    const code = await new Promise((resolve) => child.on("close", resolve));
    assert.equal(code, 0, printed);
    assert.ok(printed.includes('"turn.completed"'), printed);
    assert.ok(existsSync(path.join(home, "made.txt")), printed);
  },
});
