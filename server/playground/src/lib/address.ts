// The state of a view in the address: `#text?text=Once+upon+a+time&colour=rank`. Only what differs
// from the view's initial state is written, so that a link stays readable.

export type Value = string | number | boolean | string[] | number[];
export type Fields = { [name: string]: Value };

/** Bytes of the address beyond which a field is left out of it: longer links are cut on their way. */
const MAX_FIELD = 6000;

export interface Place {
  view: string;
  /** Fields as they stand in the address. */
  fields: Map<string, string>;
}

export function readAddress(hash: string): Place {
  const [view = "", query = ""] = splitOnce(hash.replace(/^#/, ""), "?");
  return { view, fields: new Map(new URLSearchParams(query)) };
}

function splitOnce(text: string, at: string): [string, string] {
  const index = text.indexOf(at);
  return index < 0 ? [text, ""] : [text.slice(0, index), text.slice(index + at.length)];
}

/** Return `initial` with what the address says in its place; what does not fit is left as it was. */
export function parseFields<S extends Fields>(initial: S, fields: Map<string, string>): S {
  const state: Fields = { ...initial };
  for (const [name, value] of Object.entries(initial)) {
    const given = fields.get(name);
    if (given !== undefined) state[name] = parse(given, value) ?? value;
  }
  return state as S;
}

function parse(given: string, like: Value): Value | undefined {
  if (typeof like === "string") return given;
  if (typeof like === "boolean") return given === "1";
  if (typeof like === "number") return toNumber(given);
  try {
    const list: unknown = JSON.parse(given);
    return Array.isArray(list) ? (list as string[] | number[]) : undefined;
  } catch {
    return undefined;
  }
}

function toNumber(given: string): number | undefined {
  const number = Number(given);
  return given !== "" && Number.isFinite(number) ? number : undefined;
}

function print(value: Value): string {
  if (Array.isArray(value)) return JSON.stringify(value);
  return typeof value === "boolean" ? (value ? "1" : "0") : String(value);
}

/** Return the address of a view, and the fields that are too long for one. */
export function writeAddress(
  view: string,
  state: Fields,
  initial: Fields,
  shared: Record<string, string>,
): { hash: string; omitted: string[] } {
  const { query, omitted } = writeFields(state, initial, shared);
  const written = query.toString();
  return { hash: `#${view}${written && `?${written}`}`, omitted };
}

/** Fields that differ from `initial`, as a query; those that are too long are omitted. */
export function writeFields(
  state: Fields,
  initial: Fields,
  shared: Record<string, string> = {},
): { query: URLSearchParams; omitted: string[] } {
  const query = new URLSearchParams(Object.entries(shared).filter(([, value]) => value !== ""));
  const omitted: string[] = [];
  for (const [name, value] of Object.entries(state)) {
    const printed = print(value);
    if (printed === print(initial[name] ?? "")) continue;
    if (encodeURIComponent(printed).length > MAX_FIELD) omitted.push(name);
    else query.set(name, printed);
  }
  return { query, omitted };
}
