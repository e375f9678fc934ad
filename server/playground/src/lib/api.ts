// Requests to this server, typed by its own OpenAPI document: `call` for answers, `stream` for
// server-sent events. Nothing else is ever fetched.
import { signal } from "@preact/signals";
import type { components, paths } from "../api";
import { recall, remember } from "./memory";

export type Schemas = components["schemas"];
export type ModelCard = Schemas["ModelCard"];
export type Problem = Schemas["Problem"];

export type Method = "get" | "post" | "put" | "delete";
export type PathOf<M extends Method> = {
  [P in keyof paths]: paths[P] extends { [K in M]: { responses: unknown } } ? P : never;
}[keyof paths];
type Operation<M extends Method, P extends keyof paths> = paths[P] extends { [K in M]: infer O }
  ? O
  : never;
export type Body<M extends Method, P extends keyof paths> =
  Operation<M, P> extends { requestBody: { content: { "application/json": infer B } } }
    ? B
    : undefined;
export type Answer<M extends Method, P extends keyof paths> =
  Operation<M, P> extends { responses: { 200: { content: { "application/json": infer A } } } }
    ? A
    : unknown;

export interface Options {
  /** Values for `{name}` in the path. */
  path?: Record<string, string>;
  query?: Record<string, string>;
  signal?: AbortSignal;
}

/** What the server refused, in its own words. */
export class ServerProblem extends Error {
  constructor(readonly problem: Problem) {
    super(problem.detail);
    this.name = "ServerProblem";
  }
}

/** No answer has come: the server is away, or the connection to it was cut. */
export class Unreachable extends Error {}

/** Whether the last request had no answer. */
export const isAway = signal(false);

function lose(message: string): Unreachable {
  isAway.value = true;
  return new Unreachable(message);
}

const KEY = "logsteer-key";

/** The key of the dialog: gone with the page, unless the browser was asked to remember it. */
export const apiKey = signal(recall(KEY) ?? "");
/** Whether the browser remembers it. */
export const isKeyKept = signal(recall(KEY) !== null);
/** Whether the server has asked for a key, and what it said. */
export const keyWanted = signal<string | null>(null);
const keyGiven: (() => void)[] = [];

/** Take a key and send what waited for it again; the browser remembers it where that was asked. */
export function giveKey(key: string, isKept: boolean): void {
  apiKey.value = key;
  isKeyKept.value = isKept;
  remember(KEY, isKept ? key : null);
  keyWanted.value = null;
  for (const resume of keyGiven.splice(0)) resume();
}

/** Forget the key, here and in the browser. */
export function forgetKey(): void {
  apiKey.value = "";
  isKeyKept.value = false;
  remember(KEY, null);
}

/** Close the dialog without a key: what waited for it fails. */
export function refuseKey(): void {
  keyWanted.value = null;
  for (const resume of keyGiven.splice(0)) resume();
}

/** Where this page is, which is where the API is: a proxy may have both below a path of its own. */
export const BASE = (location.origin + location.pathname).replace(/\/$/, "");

export function fill(path: string, values: Record<string, string> = {}): string {
  return path.replace(/\{(\w+)\}/g, (_, name: string) =>
    // A name may be `shared/NAME`, whose slash belongs to the path.
    (values[name] ?? "").split("/").map(encodeURIComponent).join("/"),
  );
}

async function readProblem(response: Response): Promise<ServerProblem> {
  try {
    const problem = (await response.json()) as Problem;
    if (typeof problem.detail === "string") return new ServerProblem(problem);
  } catch {
    // Not a problem document: something between this page and the server has answered.
  }
  return new ServerProblem({
    type: "about:blank",
    title: response.statusText,
    status: response.status,
    detail: `The server answered ${response.status} ${response.statusText}, and no reason.`,
    code: "internal",
    retryable: false,
    request_id: response.headers.get("x-request-id") ?? "",
  });
}

/** Send a request and return the response. Throws ServerProblem; Unreachable; DOMException where aborted. */
export async function send(
  method: Method,
  path: string,
  body: unknown,
  options: Options,
  accept = "application/json",
): Promise<Response> {
  const query = new URLSearchParams(options.query).toString();
  const url = BASE + fill(path, options.path) + (query && `?${query}`);
  for (;;) {
    const headers: Record<string, string> = { Accept: accept };
    const isForm = body instanceof FormData;
    const isFile = body instanceof Blob;
    // A form's type names its boundary, which the browser chooses.
    if (body !== undefined && !isForm) {
      headers["Content-Type"] = isFile ? body.type || "application/octet-stream" : "application/json";
    }
    if (apiKey.value) headers.Authorization = `Bearer ${apiKey.value}`;
    const sent = apiKey.value;
    let response: Response;
    try {
      response = await fetch(url, {
        method: method.toUpperCase(),
        headers,
        body: body === undefined ? undefined : isFile || isForm ? body : JSON.stringify(body),
        signal: options.signal,
      });
    } catch (error) {
      if (error instanceof DOMException && error.name === "AbortError") throw error;
      throw lose("The server does not answer: is it still running?");
    }
    isAway.value = false;
    if (response.ok) return response;
    const problem = await readProblem(response);
    if (response.status !== 401) throw problem;
    if (apiKey.value === sent) {
      keyWanted.value = problem.problem.detail;
      await new Promise<void>((resume) => keyGiven.push(resume));
      if (!apiKey.value || apiKey.value === sent) throw problem;
    }
  }
}

/** Send a request and return its answer. Throws ServerProblem; DOMException where aborted. */
export async function call<M extends Method, P extends PathOf<M>>(
  method: M,
  path: P,
  body: Body<M, P>,
  options: Options = {},
): Promise<Answer<M, P>> {
  const response = await send(method, path, body, options);
  return (await response.json()) as Answer<M, P>;
}

/** Send a file. */
export async function upload<P extends PathOf<"put">>(
  path: P,
  file: Blob,
  options: Options,
): Promise<Answer<"put", P>> {
  return (await (await send("put", path, file, options)).json()) as Answer<
    "put",
    P
  >;
}

/** Fetch a file. */
export async function download<P extends PathOf<"get">>(path: P, options: Options): Promise<Blob> {
  return (await send("get", path, undefined, options, "*/*")).blob();
}

/**
 * Send a request with `stream: true`, hand each event to `onEvent`, and return the last one, which
 * is the whole answer. `onEvent` gets the events' names as the server gives them: `start`,
 * `window` | `piece` | `check`.
 */
export async function stream<P extends PathOf<"post">>(
  path: P,
  body: Body<"post", P>,
  onEvent: (name: string, data: unknown) => void,
  options: Options = {},
): Promise<Answer<"post", P>> {
  const asked = { ...(body as object), stream: true };
  const response = await send("post", path, asked, options, "text/event-stream");
  return (await readStream(response, onEvent)) as Answer<"post", P>;
}

const LOST =
  "The connection was lost before the answer was complete: the server may have been stopped. " +
  "What had arrived is shown.";

async function readStream(
  response: Response,
  onEvent: (name: string, data: unknown) => void,
): Promise<unknown> {
  if (response.body === null) throw new Error("The server sent no events.");
  let result: { data: unknown } | null = null;
  for await (const event of readEvents(response.body)) {
    if (event.name === "error") throw new ServerProblem(event.data as Problem);
    if (event.name === "result") result = event;
    else onEvent(event.name, event.data);
  }
  if (result !== null) return result.data;
  throw lose(LOST);
}

interface ServerEvent {
  name: string;
  data: unknown;
}

async function* readEvents(body: ReadableStream<Uint8Array>): AsyncGenerator<ServerEvent> {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  try {
    for (;;) {
      const { done, value } = await reader.read().catch((error: unknown) => {
        if (error instanceof DOMException && error.name === "AbortError") throw error;
        throw lose(LOST);
      });
      if (done) return;
      rest += decoder.decode(value, { stream: true });
      const blocks = rest.split(/\r?\n\r?\n/);
      rest = blocks.pop() ?? "";
      for (const block of blocks) {
        let name = "message";
        const data: string[] = [];
        for (const line of block.split(/\r?\n/)) {
          if (line.startsWith("event:")) name = line.slice(6).trim();
          else if (line.startsWith("data:")) data.push(line.slice(5).trimStart());
        }
        if (data.length) yield { name, data: JSON.parse(data.join("\n")) as unknown };
      }
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

/**
 * Send a file of any size as text, and return the last of the events that answer it.
 *
 * The server scores it while it arrives; events follow once it has arrived.
 */
export async function streamFile(
  file: Blob,
  onEvent: (name: string, data: unknown) => void,
  options: Options,
): Promise<Schemas["PerplexityAnswer"]> {
  const text = new Blob([file], { type: "text/plain" });
  const response = await send("post", "/perplexity/stream", text, options, "text/event-stream");
  return (await readStream(response, onEvent)) as Schemas["PerplexityAnswer"];
}
