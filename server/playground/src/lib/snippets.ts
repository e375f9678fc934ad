// A request as text that runs as it is: for curl, the Python client and the `logsteer` command.
import { fill } from "./api";

export type Json = string | number | boolean | null | Json[] | { [name: string]: Json | undefined };
export type JsonObject = { [name: string]: Json | undefined };

/** A request, by the name that the Python client has for its endpoint. */
export interface Asked {
  endpoint: keyof typeof ENDPOINTS;
  body?: JsonObject;
  path?: Record<string, string>;
  /** A file that is its body; the fields of `body` are in the address then. */
  file?: string;
  /** The same of several files: field -> file. */
  form?: Record<string, string>;
}

const ENDPOINTS = {
  models: ["GET", "/models"],
  load_model: ["POST", "/models/{model_id}/load"],
  drain_model: ["POST", "/models/{model_id}/drain"],
  unload_model: ["POST", "/models/{model_id}/unload"],
  reload: ["POST", "/admin/reload"],
  selftest: ["POST", "/models/{model_id}/selftest"],
  logprob: ["POST", "/logprob"],
  perplexity: ["POST", "/perplexity"],
  generate: ["POST", "/generate"],
  steer: ["POST", "/steer"],
  sweep: ["POST", "/sweep"],
  lens: ["POST", "/lens"],
  patch: ["POST", "/patch"],
  gradient: ["POST", "/gradient"],
  "vectors.delete": ["DELETE", "/vectors/{name}"],
  "vectors.put": ["PUT", "/vectors/{name}"],
  "vectors.train": ["POST", "/vectors/train"],
  "vectors.combine": ["POST", "/vectors/{name}/combine"],
  "saes.put": ["PUT", "/saes/{name}"],
  "variants.put": ["PUT", "/variants/{name}"],
  "captures.put": ["PUT", "/captures/{name}/source"],
  "captures.start": ["POST", "/captures"],
  "captures.get": ["GET", "/captures/{name}"],
} as const;

/** A shell word: bare where it may be, else in single quotes. */
export function quote(text: string): string {
  return /^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", "'\\''")}'`;
}

function withoutUndefined(body: JsonObject): JsonObject {
  return Object.fromEntries(Object.entries(body).filter(([, value]) => value !== undefined));
}

/** The request for curl; `$LOGSTEER_API_KEY` has the key, which is never written out. */
export function toCurl(asked: Asked, origin: string, needsKey: boolean): string {
  const [method, path] = ENDPOINTS[asked.endpoint];
  const body = asked.body && withoutUndefined(asked.body);
  const query = (asked.file ?? asked.form) === undefined ? "" : new URLSearchParams(body as Record<string, string>).toString();
  const url = origin + fill(path, asked.path) + (query && `?${query}`);
  const parts = [`curl -s${body?.stream ? "N" : ""} ${quote(url)}`];
  if (method === "DELETE") parts.push("-X DELETE");
  if (needsKey) parts.push('-H "Authorization: Bearer $LOGSTEER_API_KEY"');
  if (asked.file !== undefined) parts.push(`-T ${quote(asked.file)}`);
  if (asked.form !== undefined) {
    parts.push("-X PUT", ...Object.entries(asked.form).map(([field, file]) => `-F ${quote(`${field}=@${file}`)}`));
  }
  if (method === "POST") {
    parts.push("-H 'Content-Type: application/json'", `-d ${quote(JSON.stringify(body ?? {}))}`);
  }
  return parts.join(" \\\n  ");
}

/** A value as a Python literal, on several lines where one would be long. */
export function toPythonLiteral(value: Json | undefined, indent = ""): string {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "number") return String(value);
  // JSON's escapes are Python's, except for characters beyond U+FFFF, which are written as they are.
  if (typeof value === "string") return JSON.stringify(value);
  const inner = `${indent}    `;
  const entries = Array.isArray(value)
    ? value.map((entry) => toPythonLiteral(entry, inner))
    : Object.entries(withoutUndefined(value)).map(
        ([name, entry]) => `${JSON.stringify(name)}: ${toPythonLiteral(entry, inner)}`,
      );
  const [open, close] = Array.isArray(value) ? ["[", "]"] : ["{", "}"];
  const line = `${open}${entries.join(", ")}${close}`;
  if (line.length + indent.length <= 88 && !line.includes("\n")) return line;
  return `${open}\n${entries.map((entry) => `${inner}${entry},\n`).join("")}${indent}${close}`;
}

/** What an answer shows at a glance. */
const SHOWN: { [endpoint: string]: string } = {
  models: "for model in answer.models:\n        print(model.id, model.state)",
  selftest: "for check in answer.checks:\n        print(check.verdict, check.promise)",
  logprob:
    "for item in answer.results:\n        for target in item.targets:\n" +
    "            print(repr(target.target), target.logprob)",
  perplexity: "print(answer.total.perplexity, answer.total.bits_per_byte)",
  generate: "print(answer.results[0].completions[0].text)",
  steer: "print(answer.results[0].completions[0].text)\n    print(answer.steering)",
  "captures.get":
    "for top in (answer.reduced and answer.reduced.top) or []:\n        for example in top.examples:\n" +
    "            print(top.name, example.reading, repr(example.text))",
};

export function toPython(asked: Asked, origin: string): string {
  const { stream: _, ...body } = withoutUndefined(asked.body ?? {});
  const files = asked.file ? { source: asked.file } : asked.form ? { directory: "." } : {};
  const keywords = { ...asked.path, ...files, ...body } as JsonObject;
  // What is continued is the client's first parameter, whatever form it has.
  if (body.messages !== undefined) keywords.prompts = null;
  if (asked.endpoint === "vectors.combine" && Array.isArray(keywords.vectors)) {
    const weighed = keywords.vectors as { name: string; weight: number }[];
    keywords.weights = Object.fromEntries(weighed.map(({ name, weight }) => [name, weight]));
    delete keywords.vectors;
  }
  const given = Object.entries(keywords).map(
    ([name, value]) => `        ${name}=${toPythonLiteral(value, "        ")},\n`,
  );
  const called = given.length ? `(\n${given.join("")}    )` : "()";
  return (
    `from logsteer import Client\n\nwith Client(${JSON.stringify(origin)}) as client:\n` +
    `    answer = client.${asked.endpoint}${called}\n    ${SHOWN[asked.endpoint] ?? "print(answer)"}\n`
  );
}

/** What options say of a vector. */
const VECTOR_FIELDS = ["name", "scale", "layers", "op", "unit"];

interface VectorBody extends JsonObject {
  name?: string;
  scale?: number;
  layers?: number[];
  op?: string;
  unit?: string;
}

/** Options of the command line for a steering object: by its vectors' names, or as a file. */
function steeringOptions(steering: Json | undefined): { options: string[]; input: string | null } {
  if (steering === null || steering === undefined) return { options: [], input: null };
  const { vectors, positions } = steering as { vectors: VectorBody[]; positions?: Json };
  const [first] = vectors;
  const plain = vectors.every(
    (vector) =>
      vector.name !== undefined &&
      Object.keys(withoutUndefined(vector)).every((field) => VECTOR_FIELDS.includes(field)) &&
      vector.op === first?.op &&
      vector.unit === first?.unit,
  );
  if (!plain || (positions !== undefined && typeof positions !== "string")) {
    return { options: ["--steering /dev/stdin"], input: JSON.stringify(steering) };
  }
  const options = vectors.map((vector) => {
    const scale = vector.scale === undefined ? "" : `:${vector.scale}`;
    const layers = vector.layers ? `@${vector.layers.join(",")}` : "";
    return `--vector ${quote(`${vector.name}${scale}${layers}`)}`;
  });
  if (first?.op && first.op !== "add") options.push(`--op ${first.op}`);
  if (first?.unit && first.unit !== "raw") options.push(`--unit ${first.unit}`);
  if (typeof positions === "string" && positions !== "all") options.push(`--positions ${positions}`);
  return { options, input: null };
}

interface ProbeBody {
  name?: string;
  layers?: number[];
  read?: string;
}

/** Commands that take --probe. */
const READING = new Set<string>(["logprob", "generate", "steer"]);

function probeOptions({ endpoint }: Asked, probes: Json | undefined): string[] {
  if (!READING.has(endpoint)) return [];
  return ((probes ?? []) as ProbeBody[]).map(({ name, layers, read }) => {
    if (name === undefined) throw new Error("the command reads no features");
    const at = layers ? `@${layers.join(",")}` : "";
    return `--probe ${quote(`${name}${at}${read && read !== "projection" ? `:${read}` : ""}`)}`;
  });
}

/** Fields of a body that are options of the same name, with their defaults, which are left out. */
const PLAIN: { [field: string]: Json } = {
  boundary: "joint",
  metric: "logprob",
  direction: "denoise",
  hook: "resid_post",
  space: "as_given",
  top: 0,
  protocol: "sliding",
  context_length: null,
  stride: null,
  rows: null,
  max_tokens: 64,
  n: 1,
  temperature: 1,
  top_p: 1,
  top_k: 0,
  min_p: 0,
  seed: null,
  baseline: false,
  bos: "auto",
  method: "mean_difference",
  whiten: false,
  read: "last",
  overwrite: false,
  adapter: null,
  precision: "float32",
};

const TAKES: { [endpoint: string]: string[] } = {
  logprob: ["boundary", "space", "top", "precision", "adapter"],
  perplexity: ["protocol", "context_length", "stride", "rows", "bos", "precision", "adapter"],
  generate: ["max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "seed", "bos", "adapter"],
  steer: ["max_tokens", "n", "temperature", "top_p", "top_k", "min_p", "seed", "bos", "baseline", "adapter"],
  sweep: ["boundary", "bos", "adapter"],
  lens: ["top", "boundary", "bos", "adapter"],
  patch: ["metric", "direction", "hook", "boundary", "bos"],
  "vectors.train": ["method", "whiten", "read", "bos", "overwrite"],
  "vectors.combine": ["overwrite"],
  "vectors.put": ["overwrite"],
  "saes.put": ["overwrite"],
};

/** What else a command says of a body: in options of other names, or after the options. */
const SAYS: { [endpoint: string]: string[] } = {
  logprob: ["items", "probes"],
  perplexity: ["texts"],
  generate: ["prompts", "messages", "probes"],
  steer: ["prompts", "messages", "probes"],
  sweep: ["items", "texts", "layers", "scales"],
  lens: ["items", "layers", "columns"],
  patch: ["pairs", "layers"],
  selftest: ["against"],
  "vectors.train": ["name", "pairs", "layers"],
  "vectors.combine": ["vectors", "orthogonal_to"],
};
const SAID_BY_ALL = ["model", "steering", "stream"];

/** Fields of a request that its command has no option for. */
export function findUnsaid({ endpoint, body }: Asked): string[] {
  const said = [...SAID_BY_ALL, ...(TAKES[endpoint] ?? []), ...(SAYS[endpoint] ?? [])];
  return Object.keys(withoutUndefined(body ?? {})).filter((field) => !said.includes(field));
}

function plainOptions(asked: Asked, body: JsonObject): string[] {
  return (TAKES[asked.endpoint] ?? []).flatMap((field) => {
    const value = body[field];
    if (value === undefined || value === null || value === PLAIN[field]) return [];
    const flag = `--${field.replaceAll("_", "-")}`;
    return value === true ? [flag] : [`${flag} ${quote(String(value))}`];
  });
}

const ONE_PIPE = new Error("the command reads one file, and this needs two");

interface ItemBody {
  context?: string;
  targets?: string[];
}

/**
 * The request for the `logsteer` command. Throws Error with what the command lacks.
 *
 * What the command reads from a file comes through a pipe.
 */
export function toCommand(asked: Asked, origin: string): string {
  const body = withoutUndefined(asked.body ?? {});
  const { options, input } = steeringOptions(body.steering);
  const words = ["logsteer", ...COMMANDS[asked.endpoint] ?? []];
  if (words.length === 1) throw new Error("no command does this");
  if (body.probes !== undefined && !READING.has(asked.endpoint)) throw new Error("the command reads no probes");
  if (body.prompt_ids !== undefined) throw new Error("the command takes no ids");
  let piped = input;
  const pipe = (text: string): string => {
    if (piped !== null) return "";
    piped = text;
    return "-";
  };
  let last: string[] = [];
  const items = (body.items ?? []) as ItemBody[];
  switch (asked.endpoint) {
    case "logprob":
      if (items.length !== 1 || items[0]?.context === undefined) throw new Error("the command takes one context");
      last = [items[0].context, ...(items[0].targets ?? [])].map(quote);
      break;
    case "perplexity": {
      const texts = body.texts as string[];
      if (texts.length !== 1) throw new Error("the command takes one text");
      if (piped !== null) throw ONE_PIPE;
      last = [pipe(texts[0] as string)];
      break;
    }
    case "generate":
    case "steer":
      if (body.messages !== undefined) {
        const messages = body.messages as { role: string; content: string }[];
        if (messages.length !== 1 || messages[0]?.role !== "user") throw new Error("the command takes one message");
        options.push("--chat");
        last = [quote(messages[0].content)];
      } else last = (body.prompts as string[]).map(quote);
      if (asked.endpoint === "steer" && last.length > 1) throw new Error("the command takes one prompt");
      break;
    case "sweep": {
      const { layers, scales, texts } = body as { layers?: number[][]; scales: number[]; texts?: string[] };
      options.push(`--scales=${scales.join(",")}`);
      if (layers) options.push(`--layers ${quote(layers.map((set) => set.join(",")).join(";"))}`);
      for (const item of items) {
        options.push(`--item ${[item.context ?? "", ...(item.targets ?? [])].map(quote).join(" ")}`);
      }
      if (texts !== undefined) {
        if (piped !== null) throw ONE_PIPE;
        piped = texts[0] as string;
        options.push("--text /dev/stdin");
      }
      break;
    }
    case "lens": {
      const [item] = body.items as (string | ItemBody)[];
      if (typeof item === "string") last = [quote(item)];
      else last = [item?.context ?? "", ...(item?.targets ?? [])].map(quote);
      if (body.layers) options.push(`--layers ${(body.layers as number[]).join(",")}`);
      for (const column of (body.columns ?? []) as string[]) options.push(`--columns ${column}`);
      break;
    }
    case "patch": {
      const [{ clean, corrupted }] = body.pairs as unknown as [{ clean: ItemBody; corrupted: ItemBody }];
      last = [clean.context ?? "", corrupted.context ?? "", ...(clean.targets ?? [])].map(quote);
      for (const set of (body.layers ?? []) as number[][]) options.push(`--layers ${set.join(",")}`);
      break;
    }
    case "vectors.train": {
      const pairs = (body.pairs as Json[]).map((pair) => JSON.stringify(pair)).join("\n");
      if (body.layers) options.push(`--layers ${(body.layers as number[]).join(",")}`);
      last = [quote(String(body.name)), pipe(pairs)];
      break;
    }
    case "vectors.combine": {
      const parts = body.vectors as { name: string; weight: number }[];
      for (const name of (body.orthogonal_to ?? []) as string[]) options.push(`--orthogonal-to ${quote(name)}`);
      last = [quote(asked.path?.name ?? ""), ...parts.map(({ name, weight }) => quote(`${name}=${weight}`))];
      break;
    }
    case "vectors.put":
      last = [quote(asked.path?.name ?? ""), quote(asked.file ?? "")];
      break;
    case "variants.put": {
      const vectors = options.splice(0);
      if (input !== null || vectors.some((option) => !option.startsWith("--vector "))) {
        throw new Error("the command takes names, scales and layers");
      }
      last = [quote(asked.path?.name ?? ""), ...vectors.map((option) => option.slice("--vector ".length))];
      break;
    }
    case "saes.put":
      last = [quote(asked.path?.name ?? ""), "."];
      break;
    case "selftest":
      options.push(`--model ${quote(asked.path?.model_id ?? "")}`);
      if (body.against) options.push(`--against ${quote(String(body.against))}`);
      break;
    case "load_model":
    case "drain_model":
    case "unload_model":
      last = [quote(asked.path?.model_id ?? "")];
      break;
    case "vectors.delete":
      last = [quote(asked.path?.name ?? "")];
      break;
  }
  if (typeof body.model === "string") options.unshift(`--model ${quote(body.model)}`);
  options.unshift(`--base-url ${quote(origin)}`);
  const parts = [words.join(" "), ...options, ...plainOptions(asked, body), ...probeOptions(asked, body.probes)];
  // A target may begin with a minus sign: words after -- are not options.
  const dashes = last.some((word) => /^'?-./.test(word)) ? ["--"] : [];
  const command = [parts.join(" \\\n  "), ...dashes, ...last].join(" ");
  return piped === null ? command : `printf %s ${quote(piped)} | ${command}`;
}

const COMMANDS: { [endpoint: string]: string[] } = {
  models: ["models"],
  load_model: ["models", "load"],
  drain_model: ["models", "drain"],
  unload_model: ["models", "unload"],
  reload: ["models", "reload"],
  selftest: ["selftest"],
  logprob: ["score"],
  perplexity: ["perplexity"],
  generate: ["generate"],
  steer: ["steer"],
  sweep: ["sweep"],
  lens: ["lens"],
  patch: ["patch"],
  "vectors.delete": ["vectors", "delete"],
  "vectors.train": ["vectors", "train"],
  "vectors.combine": ["vectors", "combine"],
  "vectors.put": ["vectors", "put"],
  "saes.put": ["saes", "put"],
  "variants.put": ["variants", "put"],
};
