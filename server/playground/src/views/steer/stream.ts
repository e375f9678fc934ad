// Texts as they are generated: without steering, and at each scale, for each prompt and sample.
import { useRef } from "preact/hooks";
import { call, stream, type Schemas } from "../../lib/api";
import type { JsonObject } from "../../lib/snippets";
import { useTask, type Task } from "../../lib/task";

type Answer = Schemas["SteerAnswer"] | Schemas["GenerateAnswer"];
type Completion = Schemas["Completion"];
type Readings = Schemas["ProbeReadings"];

interface Piece {
  prompt: number;
  completion: number;
  steered: boolean;
  text: string;
  token_ids: number[];
  logprobs: (number | null)[];
  probes?: Readings[] | null;
}

/** One text, as far as it has come. */
export interface Text {
  tokens: string[];
  ids: number[];
  logprobs: (number | null)[];
  /** What the probe read at each: as it came to be steered, and as it left. In a stream the last one is missing. */
  before: (number | null)[];
  after: (number | null)[];
  /** The whole of it, once it has ended. */
  completion: Completion | null;
}

/** What is asked for one or two columns: those of an answer, and of its baseline. */
export interface Ask {
  endpoint: "steer" | "generate";
  body: JsonObject;
  column: number;
  baseline?: number;
}

export type Turn = {
  role: "system" | "user" | "assistant";
  content: string;
};

/** What the form asks for, whole. */
export interface Plan {
  /** Heads of the columns: `Without steering`, then the scales. */
  titles: { title: string; note: string }[];
  /** What each row continues; empty in a chat. */
  prompts: string[];
  /** Completions of each prompt. */
  n: number;
  /** What the probe reads, such as `projection on mood`. */
  probe: string;
  /** What the user says, one turn after the other; empty where no chat is held. */
  turns: string[];
  system: string;
  /** The requests for the last turn, or the only one; `threads` has what each column continues. */
  ask: (threads: readonly Turn[][] | null) => Ask[];
}

/** What a result is shown with: of the request that it answers, whatever the form says by now. */
export interface Steered {
  titles: Plan["titles"];
  prompts: string[];
  n: number;
  probe: string;
  /** What was asked at last; sent again it gives the same texts. */
  asks: Ask[];
  /** By column: the chat before its text. */
  threads: Turn[][] | null;
  /** By column, then by row: prompts, each with its samples. */
  texts: Text[][];
  /** By column: the answer that it is of. */
  answers: (Answer | null)[];
  /** Milliseconds from the last request until the first steered token was here. */
  firstMs: number | null;
}

const EMPTY: Text = { tokens: [], ids: [], logprobs: [], before: [], after: [], completion: null };

function addPiece(text: Text, piece: Piece): Text {
  const [probe] = piece.probes ?? [];
  const before = probe?.before ?? [];
  // A piece of several tokens has one text: which part of it is whose says the result.
  const tokens = piece.token_ids.map((_, index) => (index === 0 ? piece.text : ""));
  return {
    tokens: [...text.tokens, ...tokens],
    ids: [...text.ids, ...piece.token_ids],
    logprobs: [...text.logprobs, ...piece.logprobs],
    before: [...text.before, ...before],
    after: [...text.after, ...(probe?.after ?? before)],
    completion: null,
  };
}

function finish(completion: Completion): Text {
  const [probe] = completion.probes ?? [];
  const before = probe?.before ?? [];
  return {
    tokens: completion.tokens,
    ids: completion.token_ids,
    logprobs: completion.logprobs,
    before,
    after: probe?.after ?? before,
    completion,
  };
}

/** Send what is asked; the one before it is given up. */
export function useStreams(show: (shown: Steered, isWhole: boolean) => void): {
  task: Task;
  send: (plan: Plan) => void;
} {
  const task = useTask();
  const frame = useRef(0);
  /** What the model has said in earlier turns, by the request for it: a longer chat has them again. */
  const said = useRef(new Map<string, { own: string; plain: string }>());

  const hold = async (plan: Plan, signal: AbortSignal): Promise<Turn[][] | null> => {
    if (plan.turns.length === 0) return null;
    const system: Turn[] = plan.system === "" ? [] : [{ role: "system", content: plan.system }];
    const threads = plan.titles.map(() => [...system]);
    for (const turn of plan.turns.slice(0, -1)) {
      for (const thread of threads) thread.push({ role: "user", content: turn });
      const replies = await Promise.all(
        plan.ask(threads).map(async ({ endpoint, body, column, baseline }) => {
          const { stream: _s, probes: _p, n: _n, ...once } = body;
          const key = JSON.stringify(once);
          let known = said.current.get(key);
          if (known === undefined) {
            const answer = (await call("post", `/${endpoint}`, once as never, { signal })) as Answer;
            const [result] = answer.results;
            known = { own: result?.completions?.[0]?.text ?? "", plain: result?.baseline?.[0]?.text ?? "" };
            said.current.set(key, known);
          }
          const own = [column, known.own] as const;
          return baseline === undefined ? [own] : [own, [baseline, known.plain] as const];
        }),
      );
      for (const [column, content] of replies.flat()) threads[column]?.push({ role: "assistant", content });
    }
    for (const thread of threads) thread.push({ role: "user", content: plan.turns.at(-1) ?? "" });
    return threads;
  };

  const send = (plan: Plan): void =>
    task.run(async (signal) => {
      const threads = await hold(plan, signal);
      const begun = performance.now();
      const asks = plan.ask(threads);
      const rows = Math.max(1, plan.prompts.length) * plan.n;
      const { titles, prompts, n, probe } = plan;
      const now: Steered = {
        titles, prompts, n, probe, asks, threads,
        texts: titles.map(() => Array.from({ length: rows }, () => EMPTY)),
        answers: titles.map(() => null),
        firstMs: null,
      };
      const draw = (): void => {
        frame.current ||= requestAnimationFrame(() => {
          frame.current = 0;
          if (!signal.aborted) show({ ...now, texts: now.texts.map((column) => [...column]) }, false);
        });
      };
      const set = (column: number | undefined, row: number, change: (text: Text) => Text): void => {
        const texts = now.texts[column ?? -1];
        if (texts?.[row]) texts[row] = change(texts[row]);
      };
      await Promise.all(
        asks.map(async ({ endpoint, body, column, baseline }) => {
          const answer = (await stream(
            `/${endpoint}`,
            body as never,
            (name, data) => {
              if (name !== "piece") return;
              const piece = data as Piece;
              const isOwn = endpoint === "generate" || piece.steered;
              if (piece.steered) now.firstMs ??= performance.now() - begun;
              set(isOwn ? column : baseline, piece.prompt * n + piece.completion, (text) => addPiece(text, piece));
              draw();
            },
            { signal },
          )) as Answer;
          now.answers[column] = answer;
          answer.results.forEach((result, prompt) => {
            result.completions?.forEach((one, at) => set(column, prompt * n + at, () => finish(one)));
            result.baseline?.forEach((one, at) => set(baseline, prompt * n + at, () => finish(one)));
          });
          draw();
        }),
      );
      cancelAnimationFrame(frame.current);
      frame.current = 0;
      show(now, true);
    });
  return { task, send };
}

/** The ids that a column's text continues. */
export function promptIds(shown: Steered, column: number, row: number): number[] {
  const ask = shown.asks.find((one) => one.column === column || one.baseline === column);
  return shown.answers[ask?.column ?? column]?.results[Math.floor(row / shown.n)]?.prompt_ids ?? [];
}

const TOP = 6;
const looked = new WeakMap<Completion, Promise<Schemas["TopAlternatives"] | null>>();

/** The most probable tokens at each of a text's tokens, scored under what it was generated with. */
export function findAlternatives(shown: Steered, column: number, row: number): Promise<Schemas["TopAlternatives"] | null> {
  const completion = shown.texts[column]?.[row]?.completion;
  const ask = shown.asks.find((one) => one.column === column || one.baseline === column);
  if (!completion || !ask || completion.token_ids.length === 0) return Promise.resolve(null);
  const known = looked.get(completion);
  if (known !== undefined) return known;
  const body = {
    model: ask.body.model,
    items: [{ context_ids: promptIds(shown, column, row), target_ids: [completion.token_ids] }],
    steering: ask.column === column ? ask.body.steering : undefined,
    top: TOP,
  };
  const found = call("post", "/logprob", body as never).then((answer) => answer.results[0]?.targets?.[0]?.top ?? null);
  found.catch(() => looked.delete(completion));
  looked.set(completion, found);
  return found;
}
