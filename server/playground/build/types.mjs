// Writes src/api.d.ts: the types of the endpoints in api-paths.json, from openapi.json.
// Its first line has the digest of what it was written from; tests/server/test_playground.py
// computes the same digest, so that a schema that has changed since is noticed without node.
import { createHash } from "node:crypto";
import { readFileSync, writeFileSync } from "node:fs";
import openapiTS, { astToString } from "openapi-typescript";

const here = (name) => new URL(name, import.meta.url);
const read = (name) => JSON.parse(readFileSync(here(name), "utf8"));

/** What shapes no type: words, bounds and defaults; a property that is called so is an object. */
const UNTYPED = new Set([
  "default", "description", "exclusiveMaximum", "exclusiveMinimum", "maximum", "maxItems",
  "maxLength", "minimum", "minItems", "minLength", "pattern", "title",
]);
const isUntyped = (key, value) =>
  UNTYPED.has(key) &&
  (value === null || typeof value !== "object" || (key === "default" && !("content" in value)));

/** The document with these paths alone, and the schemas that they come to. */
function prune(document, paths) {
  const kept = {};
  const schemas = {};
  const visit = (value) => {
    if (Array.isArray(value)) return value.map(visit);
    if (value === null || typeof value !== "object") return value;
    const found = {};
    for (const key of Object.keys(value).sort()) {
      if (!isUntyped(key, value[key])) found[key] = visit(value[key]);
    }
    const name = typeof value.$ref === "string" ? value.$ref.split("/").at(-1) : null;
    if (name !== null && !(name in schemas)) {
      schemas[name] = null;
      schemas[name] = visit(document.components.schemas[name]);
    }
    return found;
  };
  for (const path of paths) kept[path] = visit(document.paths[path]);
  const sorted = Object.fromEntries(Object.keys(schemas).sort().map((n) => [n, schemas[n]]));
  return { components: { schemas: sorted }, paths: kept };
}

const document = prune(read("../../../openapi.json"), read("api-paths.json").sort());
const digest = createHash("sha256").update(JSON.stringify(document)).digest("hex");
const info = { openapi: "3.1.0", info: { title: "logsteer", version: "0" } };
const tree = await openapiTS({ ...info, ...document }, { defaultNonNullable: false });
const head = `// Written by build/types.mjs from openapi.json, sha256 ${digest}\n`;
writeFileSync(here("../src/api.d.ts"), head + astToString(tree));
