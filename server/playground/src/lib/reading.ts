// A text as a model reads it: its tokens, their columns, and what else would have been likely.
import { call, type Schemas } from "./api";

export interface Query {
  model: string;
  text: string;
  steering?: Schemas["Steering"];
  probe?: Schemas["ProbeRequest"];
  /** The layer that colours the text, where the probe is read at several. */
  bestLayer?: number;
}

export interface Reading {
  tokens: string[];
  ids: number[];
  /** Each has an entry for each token; null where the token was not scored. */
  logprobs: (number | null)[];
  ranks: (number | null)[];
  entropies: (number | null)[];
  /** Projections on the probe at each token, after steering where there was any; null: not read. */
  readings: (number | null)[] | null;
  /** What was read, and where. */
  probe: string;
  /** The same at every layer that was asked for. */
  layers: { layer: number; readings: (number | null)[] }[];
  total: Schemas["TextResult"];
  answer: Schemas["PerplexityAnswer"];
  /** The most probable tokens at token `index`; null: it was not scored. */
  findAlternatives: (index: number) => Promise<Alternatives | null>;
}

/** What a text's reading is made of: plain data, which a session keeps. */
export interface Read {
  query: Query;
  answer: Schemas["PerplexityAnswer"];
  encoded: Schemas["Encoded"];
}

export interface Alternatives {
  tokens: string[];
  logprobs: (number | null)[];
}

const TOP = 6;
const READS: Record<string, string> = { cosine: "Cosine with", projection: "Projection on", activation: "Activation of" };

export function toRequest(query: Query): Schemas["PerplexityRequest"] {
  return {
    model: query.model,
    texts: [query.text],
    tokens: true,
    windows: true,
    columns: ["logprob", "rank", "entropy"],
    steering: query.steering,
    // What is before the first scored token has readings, too.
    probes: query.probe && [{ ...query.probe, context: true }],
  };
}

export async function readText(query: Query, signal: AbortSignal): Promise<Read> {
  const { model, text } = query;
  const [answer, cut] = await Promise.all([
    call("post", "/perplexity", toRequest(query), { signal }),
    call("post", "/tokenize", { model, texts: [text] }, { signal }),
  ]);
  const encoded = cut.results[0];
  if (!answer.results[0]?.tokens || !encoded) throw new Error("The answer has no tokens.");
  return { query, answer, encoded };
}

/** The columns of a text, a number for each of its tokens. */
export function makeReading({ query, answer, encoded }: Read): Reading {
  const total = answer.results[0] as Schemas["TextResult"];
  const scored = total.tokens as NonNullable<typeof total.tokens>;
  // What is before the text, such as a beginning of sequence, has no place in it.
  const first = encoded.offsets.findIndex((offset) => offset !== null);
  const prefix = encoded.token_ids.slice(0, first < 0 ? 0 : first);
  const ids = encoded.token_ids.slice(prefix.length);
  const spread = <T,>(values: readonly T[] | null | undefined): (T | null)[] => {
    const all = new Array<T | null>(ids.length).fill(null);
    scored.positions.forEach((position, at) => (all[position] = values?.[at] ?? null));
    return all;
  };
  const readProbe = (one: Schemas["ProbeReadings"]): (number | null)[] => {
    const all = spread(one.after ?? one.before);
    const front = one.context_after ?? one.context_before ?? [];
    const first = (scored.positions[0] ?? 0) - front.length;
    front.forEach((value, at) => {
      if (first + at >= 0) all[first + at] = value;
    });
    return all;
  };
  const probed = scored.probes?.find(({ layer }) => layer === query.bestLayer) ?? scored.probes?.[0];
  return {
    tokens: cutTokens(query.text, encoded.tokens.slice(prefix.length), encoded.offsets.slice(prefix.length)),
    ids,
    logprobs: spread(scored.logprobs),
    ranks: spread(scored.ranks),
    entropies: spread(scored.columns?.entropy),
    readings: probed ? readProbe(probed) : null,
    layers: (scored.probes ?? []).map((one) => ({ layer: one.layer, readings: readProbe(one) })),
    probe: probed ? `${READS[probed.read] ?? probed.read} ${probed.name} at layer ${probed.layer}` : "",
    total,
    answer,
    findAlternatives: findAlternatives(query, ids, prefix, total.windows ?? []),
  };
}

type Offsets = readonly (readonly number[] | null)[];

/** The tokens as the text has them; a character that is several tokens is shown at its first, the others are empty. */
export function cutTokens(text: string, tokens: readonly string[], offsets: Offsets): string[] {
  const characters = Array.from(text);
  let end = 0;
  return tokens.map((token, at) => {
    const [begin, stop] = offsets[at] ?? [];
    if (begin === undefined || stop === undefined) return token;
    const from = Math.max(end, begin);
    end = Math.max(end, stop);
    return characters.slice(from, stop).join("");
  });
}

/**
 * Look a token's alternatives up where they are wanted, all those of its window at once.
 *
 * The window is scored again as ids, with the same tokens in front, so the numbers are the same.
 */
function findAlternatives(
  { model, steering }: Query,
  ids: number[],
  prefix: number[],
  windows: readonly Schemas["WindowScore"][],
): Reading["findAlternatives"] {
  const known = new Map<number, Promise<Schemas["TargetScore"] | null>>();
  return async (index) => {
    const at = windows.findIndex((w) => index >= w.end - w.num_scored && index < w.end);
    const window = windows[at];
    if (window === undefined) return null;
    const first = window.end - window.num_scored;
    let found = known.get(at);
    if (found === undefined) {
      const context = [...(window.start === 0 ? prefix : []), ...ids.slice(window.start, first)];
      const items = [{ context_ids: context, target_ids: [ids.slice(first, window.end)] }];
      found = call("post", "/logprob", { model, items, top: TOP, steering }).then(
        (answer) => answer.results[0]?.targets?.[0] ?? null,
      );
      found.catch(() => known.delete(at));
      known.set(at, found);
    }
    const top = (await found)?.top;
    const tokens = top?.tokens?.[index - first];
    const logprobs = top?.logprobs[index - first];
    return tokens && logprobs ? { tokens, logprobs } : null;
  };
}
