// A text of any length by windows: how well each is read, and all up to there.
import "./windows.css";
import type { ComponentChildren } from "preact";
import { useMemo, useState } from "preact/hooks";
import { call, stream, streamFile, type Schemas } from "../../lib/api";
import { count, number, plural } from "../../lib/format";
import type { JsonObject } from "../../lib/snippets";
import { readFile } from "../../lib/tables";
import { useAutoRun, useTask } from "../../lib/task";
import type { OutcomeProps, ViewProps } from "../../lib/view";
import { ErrorNote, RunButton, RunForm } from "../../parts/controls";
import { CopyAs } from "../../parts/CopyAs";
import { ChosenFile, Checkbox, Drop, FileButton, NumberField, Select, TextArea } from "../../parts/fields";
import { LineChart } from "../../parts/LineChart";
import { Panes } from "../../parts/Panes";
import { Stats } from "../../parts/Stats";

type Protocol = "sliding" | "rolling" | "disjoint" | "llamacpp";

export type WindowState = {
  text: string;
  protocol: Protocol;
  /** Tokens of a window; 0: the model's own context. */
  length: number;
  /** Tokens from one window to the next; 0: half of a window. */
  stride: number;
  log: boolean;
};

export const INITIAL_WINDOWS: Omit<WindowState, "text"> = { protocol: "sliding", length: 64, stride: 32, log: true };

const PROTOCOLS = [
  { value: "sliding", label: "Sliding windows" },
  { value: "rolling", label: "Rolling, as lm-evaluation-harness" },
  { value: "disjoint", label: "Disjoint windows" },
  { value: "llamacpp", label: "As llama.cpp" },
] as const;

/** Bytes of a file beyond which it is sent as it is: `max_text_chars` of a server is 1,500,000. */
const MAX_JSON = 1_500_000;
/** Bytes of a text up to which it can be edited here, and its places are looked up. */
const MAX_SHOWN = 300_000;

/** An event `window` of a stream, which the OpenAPI document has no schema of. */
interface WindowEvent {
  window: Schemas["WindowScore"];
  windows_total: number | null;
  num_scored: number;
  perplexity: number | null;
}

export interface Progress {
  windows: Schemas["WindowScore"][];
  latest: WindowEvent | null;
  result: Schemas["PerplexityAnswer"] | null;
  /** What was scored, and where its tokens stand in it; null where it is too long for that. */
  text: string | null;
  offsets: [number, number][] | null;
  seconds: number;
}

function toRequest(state: WindowState, model: string, text: string): Schemas["PerplexityRequest"] {
  return {
    model,
    texts: [text],
    protocol: state.protocol,
    context_length: state.length || undefined,
    stride: state.protocol === "sliding" ? state.stride || undefined : undefined,
  };
}

type WindowsProps<S extends WindowState> = ViewProps<S, Progress> & {
  /** What is above the text in the form, and below it. */
  head: ComponentChildren;
  examples: ComponentChildren;
};

export function Windows<S extends WindowState>(props: WindowsProps<S>) {
  const { state, model, isShown, result: progress, onResult, isKept } = props;
  const setState = props.setState as (change: Partial<WindowState>) => void;
  const task = useTask();
  const [file, setFile] = useState<File | null>(null);
  const [fileError, setFileError] = useState<unknown>(null);
  const isSent = file === null || file.size <= MAX_JSON;
  const canRun = model?.state === "ready" && (file !== null || state.text !== "");

  const run = (): void => {
    if (model === null || !canRun) return;
    task.run(async (signal) => {
      const text = file === null ? state.text : isSent ? await readFile(file) : null;
      const request = toRequest(state, model.id, text ?? "");
      const title = file?.name ?? state.text.slice(0, 80);
      const work = watch((now, isWhole) => onResult(now, isWhole ? { fields: state, title } : undefined), text);
      const places =
        text !== null && text.length <= MAX_SHOWN
          ? findPlaces(model.id, text, signal).then(work.setOffsets, () => undefined)
          : null;
      const result =
        text !== null
          ? await stream("/perplexity", request, work.onEvent, { signal })
          : await streamFile(file as File, work.onEvent, { signal, query: toQuery(request) });
      await places;
      work.finish(result);
    });
  };
  const asked = JSON.stringify([state.protocol, state.length, state.stride, model?.id]);
  const isSmall = file === null && state.text.length <= 40_000;
  useAutoRun(canRun && isShown && isSmall && !isKept ? asked + state.text : null, run, 600);

  const take = (files: FileList | null | undefined): void => {
    const chosen = files?.[0];
    if (chosen === undefined) return;
    setFileError(null);
    setFile(chosen);
    if (chosen.size > MAX_SHOWN) return;
    readFile(chosen).then(
      (text) => {
        setState({ text });
        setFile(null);
      },
      (error: unknown) => {
        setFile(null);
        setFileError(error);
      },
    );
  };

  return (
    <Panes
      isStale={props.isStale}
      form={
      <RunForm label="Text to score" onRun={run}>
        {props.head}
        <Drop onTake={take}>
          {file === null ? (
            <TextArea
              label="Text"
              value={state.text}
              onChange={(text) => setState({ text })}
              rows={5}
              maxRows={9}
            />
          ) : (
            <ChosenFile file={file} onRemove={() => setFile(null)} />
          )}
        </Drop>
        {props.examples}
        <div class="row">
          <Select
            label="Windows"
            value={state.protocol}
            options={PROTOCOLS}
            onChange={(protocol) => setState({ protocol })}
          />
          <NumberField
            label="Tokens in a window"
            value={state.length || null}
            min={2}
            placeholder={model?.context_length ? `${model.context_length}, the model's own` : ""}
            onChange={(length) => setState({ length: length ?? 0 })}
          />
          {state.protocol === "sliding" && (
            <NumberField
              label="Stride"
              value={state.stride || null}
              min={1}
              placeholder="half a window"
              onChange={(stride) => setState({ stride: stride ?? 0 })}
            />
          )}
        </div>
        <div class="actions">
          <RunButton task={task} onRun={run} label="Score" disabled={!canRun} />
          <FileButton label="Choose a file" onTake={take} />
          {progress && <Bar progress={progress} isRunning={task.isRunning} />}
        </div>
        {!isSent && (
          <p class="note">
            This file is sent as it is and scored while it arrives, in bounded memory: sums come at
            the end, and no curve.
          </p>
        )}
      </RunForm>
      }
      below={
        model && file === null && (
          <CopyAs
            asked={{
              endpoint: "perplexity",
              body: JSON.parse(JSON.stringify(toRequest(state, model.id, state.text))) as JsonObject,
            }}
          />
        )
      }
    >
      <ErrorNote error={fileError ?? task.error} onRetry={run} />
      {progress && <WindowsOutcome result={progress} state={state} setState={setState} />}
    </Panes>
  );
}

async function findPlaces(
  model: string,
  text: string,
  signal: AbortSignal,
): Promise<[number, number][]> {
  const cut = await call("post", "/tokenize", { model, texts: [text] }, { signal });
  return (cut.results[0]?.offsets ?? []).filter((offset) => offset !== null);
}

function toQuery(request: Schemas["PerplexityRequest"]): Record<string, string> {
  const { model, protocol, context_length: length, stride } = request;
  const given = { model, protocol, context_length: length, stride };
  return Object.fromEntries(
    Object.entries(given)
      .filter(([, value]) => value !== undefined && value !== null)
      .map(([name, value]) => [name, String(value)]),
  );
}

/** Milliseconds between two looks at what has come. */
const DRAW_EVERY = 80;

/** Collect events, and show what there is from time to time. */
function watch(show: (progress: Progress, isWhole: boolean) => void, text: string | null) {
  const began = performance.now();
  const kept: Progress = { windows: [], latest: null, result: null, text, offsets: null, seconds: 0 };
  let timer = 0;
  const draw = (): void => {
    timer = 0;
    kept.seconds = (performance.now() - began) / 1000;
    show({ ...kept, windows: [...kept.windows] }, kept.result !== null);
  };
  const later = (): void => {
    timer ||= window.setTimeout(draw, DRAW_EVERY);
  };
  // What is shown is of another text; that of a short one may stand until this one's is there.
  if (text === null || text.length > MAX_SHOWN / 4) draw();
  return {
    onEvent: (name: string, data: unknown): void => {
      if (name !== "window") return;
      kept.latest = data as WindowEvent;
      kept.windows.push(kept.latest.window);
      later();
    },
    setOffsets: (offsets: [number, number][]): void => {
      kept.offsets = offsets;
      later();
    },
    finish: (result: Schemas["PerplexityAnswer"]): void => {
      kept.result = result;
      clearTimeout(timer);
      draw();
    },
  };
}

function Bar({ progress, isRunning }: { progress: Progress; isRunning: boolean }) {
  const { latest, result, seconds, windows } = progress;
  if (latest === null && result === null && !isRunning) return null;
  const total = latest?.windows_total;
  const scored = result?.total.num_scored ?? latest?.num_scored ?? 0;
  const rate = `${count(Math.round(scored / Math.max(seconds, 1e-3)))} tokens/s`;
  if (isRunning) {
    return (
      <span class="progress">
        <progress max={total ?? undefined} value={total ? windows.length : undefined}>
          {windows.length}
        </progress>
        <span class="hint num" role="status">
          {latest === null ? "Sent, and running …" : `${windows.length} of ${total ?? "?"} windows`}
        </span>
      </span>
    );
  }
  return (
    <span class="hint num" role="status">
      {result === null
        ? `Cancelled after ${plural(windows.length, "window")}: the sums are of what was scored`
        : result.usage.cached_results
          ? `${plural(scored, "token")}, from the result cache`
          : `${plural(scored, "token")} in ${number(seconds)} s, ${rate}`}
    </span>
  );
}

export function WindowsOutcome({ result: progress, state, setState }: OutcomeProps<WindowState, Progress>) {
  const [at, setAt] = useState<number | null>(null);
  const windows = useMemo(
    () => [...progress.windows].sort((a, b) => a.end - b.end),
    [progress.windows],
  );
  const [x, series] = useMemo(() => toCurves(windows), [windows]);
  const latest = progress.latest;
  const total = progress.result?.total;
  if ((progress.latest ?? progress.result) === null) return null;
  const looked = at === null ? undefined : windows[Math.min(at, windows.length - 1)];
  return (
    <section class="result" aria-label="Result">
      <Stats
        label="Sums"
        stats={[
          {
            label: "Perplexity",
            value: number(total?.perplexity ?? latest?.perplexity),
            note: total ? `± ${number(total.stderr)}` : "so far",
          },
          { label: "Bits per byte", value: number(total?.bits_per_byte) },
          { label: "Tokens scored", value: count(total?.num_scored ?? latest?.num_scored ?? 0) },
          ...(windows.length ? [{ label: "Windows", value: count(windows.length) }] : []),
        ]}
      />
      {windows.length > 1 && (
        <div class="sheet">
          <div class="long-head">
            <h2>Perplexity along the text</h2>
            <Checkbox label="Logarithmic" value={state.log} onChange={(log) => setState({ log })} />
          </div>
          <LineChart
            label={`Perplexity of each of ${windows.length} windows, and of the text up to there`}
            x={x}
            series={series}
            xLabel="Token"
            yLabel="Perplexity"
            logY={state.log}
            height={300}
            xFormat={(value) => count(Math.round(value))}
            onHover={setAt}
            exportName="perplexity"
          />
          <Excerpt progress={progress} window={looked} />
        </div>
      )}
    </section>
  );
}

/** A step for each window over the tokens that it scored, and the perplexity of all up to there. */
function toCurves(windows: readonly Schemas["WindowScore"][]) {
  const x: number[] = [];
  const own: (number | null)[] = [];
  const all: (number | null)[] = [];
  let [sum, scored] = [0, 0];
  for (const window of windows) {
    const logprob = window.sum_logprob ?? null;
    x.push(window.end - window.num_scored);
    own.push(logprob === null ? null : Math.exp(-logprob / window.num_scored));
    sum += logprob ?? 0;
    scored += window.num_scored;
    all.push(Math.exp(-sum / scored));
  }
  const last = windows.at(-1);
  if (last !== undefined) {
    x.push(last.end);
    own.push(own.at(-1) ?? null);
    all.push(all.at(-1) ?? null);
  }
  const series = [
    { label: "Each window", values: own, stepped: true, colour: 0 },
    { label: "The text so far", values: all, colour: 1, dash: [6, 4] },
  ];
  return [x, series] as const;
}

interface ExcerptProps {
  progress: Progress;
  window: Schemas["WindowScore"] | undefined;
}

/** Characters of a window's text that are shown. */
const MAX_EXCERPT = 420;

function Excerpt({ progress: { text, offsets }, window }: ExcerptProps) {
  if (window === undefined || text === null || offsets === null) {
    return <p class="excerpt hint">Point at the curve to read the text there.</p>;
  }
  const first = window.end - window.num_scored;
  const characters = Array.from(text);
  const [start, end] = [offsets[first]?.[0] ?? 0, offsets[window.end - 1]?.[1] ?? characters.length];
  const own = characters.slice(start, end).join("").trim();
  return (
    <div class="excerpt" aria-live="polite">
      <p class="hint num">
        Tokens {count(first)} to {count(window.end - 1)}
      </p>
      <blockquote>{own.length > MAX_EXCERPT ? `${own.slice(0, MAX_EXCERPT)}…` : own}</blockquote>
    </div>
  );
}
