// A steered continuation and the unsteered one beside it, as they are generated.
import { useRef } from "preact/hooks";
import { stream, type Schemas } from "../../lib/api";
import { useTask, type Task } from "../../lib/task";

type Answer = Schemas["SteerAnswer"];
type Completion = Schemas["Completion"];
type Readings = Schemas["ProbeReadings"];

interface Piece {
  steered: boolean;
  text: string;
  token_ids: number[];
  logprobs: (number | null)[];
  probes?: Readings[] | null;
}

/** One of the two texts, as far as it has come. */
export interface Column {
  tokens: string[];
  ids: number[];
  logprobs: (number | null)[];
  /** Of the token in front of each: as it came to be steered, and as it left. */
  before: (number | null)[];
  after: (number | null)[];
  /** The whole of it, once it has ended. */
  completion: Completion | null;
}

/** What a result is shown with: of the request that it answers, whatever the form says by now. */
export interface Caption {
  /** Stands before both texts. */
  prompt: string;
  /** What was done, such as `scale 2`. */
  scale: string;
  /** What the probe reads, such as `projection on mood`. */
  probe: string;
}

export interface Streams {
  body: object;
  caption: Caption;
  steered: Column;
  baseline: Column;
  answer: Answer | null;
  /** Milliseconds from the request until the first steered token was here. */
  firstMs: number | null;
}

const EMPTY: Column = { tokens: [], ids: [], logprobs: [], before: [], after: [], completion: null };

function addPiece(column: Column, piece: Piece): Column {
  const [probe] = piece.probes ?? [];
  const before = probe?.before ?? [];
  // A piece of several tokens has one text: which part of it is whose says the result.
  const tokens = piece.token_ids.map((_, index) => (index === 0 ? piece.text : ""));
  return {
    tokens: [...column.tokens, ...tokens],
    ids: [...column.ids, ...piece.token_ids],
    logprobs: [...column.logprobs, ...piece.logprobs],
    before: [...column.before, ...before],
    after: [...column.after, ...(probe?.after ?? before)],
    completion: null,
  };
}

function finish(completion: Completion | undefined): Column {
  if (completion === undefined) return EMPTY;
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

/** What is shown of the last request, and how to send one; the one before it is given up. */
export function useStreams(setShown: (shown: Streams, caption?: Caption) => void): {
  task: Task;
  send: (body: object, caption: Caption) => void;
} {
  const task = useTask();
  const frame = useRef(0);
  const send = (body: object, caption: Caption): void =>
    task.run(async (signal) => {
      const begun = performance.now();
      let now: Streams = { body, caption, steered: EMPTY, baseline: EMPTY, answer: null, firstMs: null };
      const draw = (): void => {
        frame.current ||= requestAnimationFrame(() => {
          frame.current = 0;
          if (!signal.aborted) setShown(now);
        });
      };
      const answer = (await stream(
        "/steer",
        body as never,
        (name, data) => {
          if (name !== "piece") return;
          const piece = data as Piece;
          const side = piece.steered ? "steered" : "baseline";
          if (piece.steered) now = { ...now, firstMs: now.firstMs ?? performance.now() - begun };
          now = { ...now, [side]: addPiece(now[side], piece) };
          draw();
        },
        { signal },
      )) as Answer;
      const [result] = answer.results;
      now = {
        ...now,
        steered: finish(result?.completions[0]),
        baseline: finish(result?.baseline?.[0]),
        answer,
      };
      cancelAnimationFrame(frame.current);
      frame.current = 0;
      setShown(now, caption);
    });
  return { task, send };
}
