// Modules of the client's environment, which lies outside the checkout, as node's own binary does.

import { createRequire } from "node:module";
import path from "node:path";
import { pathToFileURL } from "node:url";

const home = path.resolve(process.execPath, "../../../..");
const require = createRequire(path.join(home, "package.json"));

/** A package of the environment. */
export const load = (name) => import(pathToFileURL(require.resolve(name)));
