// Texts side by side, their tokens coloured by one scale; all of them in a table where they are many.
import { useEffect, useMemo, useState } from "preact/hooks";
import type { Schemas } from "../../lib/api";
import { fixed, number, plural } from "../../lib/format";
import { divergingScale, linearScale, type Scale } from "../../lib/scales";
import { Legend } from "../../parts/Legend";
import { Table, type TableColumn } from "../../parts/Table";
import { TokenCard } from "../../parts/TokenCard";
import { TokenText } from "../../parts/TokenText";
import { findAlternatives, promptIds, type Steered, type Text } from "./stream";

export type Colouring = "probe" | "surprisal" | "none";

/** Continue from another token in place of one: the ids up to there, and their text. */
export type OnBranch = (ids: number[], text: string) => void;

interface ColumnsProps {
  shown: Steered;
  colouring: Colouring;
  isRunning?: boolean;
  /** Whether the form asks for something else by now. */
  isStale?: boolean;
  onBranch?: OnBranch;
}

function valuesOf(text: Text, colouring: Colouring): (number | null)[] {
  if (colouring === "surprisal") return text.logprobs.map((value) => (value === null ? null : -value));
  if (colouring === "probe") return text.tokens.map((_, index) => text.after[index] ?? null);
  return [];
}

function makeScale(colouring: Colouring, probe: string, values: readonly (number | null)[]): Scale | undefined {
  if (colouring === "none") return undefined;
  const sizes = values.flatMap((value) => (value === null ? [] : [Math.abs(value)])).sort((a, b) => a - b);
  // One outlier would leave all others pale.
  const reach = sizes[Math.floor(0.97 * (sizes.length - 1))] ?? 1;
  if (colouring === "surprisal") return linearScale("Surprisal, nats", Math.max(reach, 1), (v) => number(v, 2));
  return divergingScale(`The probe's ${probe}`, reach, (v) => number(v, 2));
}

export function Columns({ shown, colouring, isRunning = false, isStale = false, onBranch }: ColumnsProps) {
  const { texts, titles, probe, n } = shown;
  const rows = texts[0]?.length ?? 0;
  const [chosen, setRow] = useState(0);
  const row = Math.min(chosen, rows - 1);
  const [marked, setMarked] = useState<number | null>(null);
  const values = useMemo(() => texts.map((column) => valuesOf(column[row] as Text, colouring)), [texts, row, colouring]);
  const colours = useMemo(() => makeScale(colouring, probe, values.flat()), [values, colouring, probe]);
  const isWhole = texts.every((column) => column.every(({ completion }) => completion !== null));
  return (
    <section
      class={`continuations ${isStale ? "is-stale" : ""}`}
      aria-label="Continuations"
      aria-busy={isRunning}
    >
      {isStale && (
        <p class="hint" role="status">
          The form has changed since: these texts answer the request before. Generate for new ones.
        </p>
      )}
      <div class="continuations-head">
        {colours && <Legend scale={colours} />}
        {rows > 1 && (
          <span class="hint num">
            {shown.prompts.length > 1 && `Prompt ${Math.floor(row / n) + 1} of ${shown.prompts.length}`}
            {shown.prompts.length > 1 && n > 1 && ", "}
            {n > 1 && `sample ${(row % n) + 1} of ${n}`}
          </span>
        )}
      </div>
      <div class="beside">
        {titles.map((title, column) => (
          <OneColumn
            key={column}
            shown={shown}
            column={column}
            row={row}
            title={title}
            values={values[column] ?? []}
            colours={colours}
            isRunning={isRunning}
            probe={colouring === "probe" ? probe : null}
            marked={marked}
            setMarked={setMarked}
            onBranch={onBranch}
          />
        ))}
      </div>
      {isWhole && titles.length === 2 && rows === 1 && shown.threads === null && (
        <p class="hint">{compare(texts[0]?.[0]?.ids ?? [], texts[1]?.[0]?.ids ?? [])}</p>
      )}
      {isWhole && (rows > 1 || titles.length > 2) && <All shown={shown} row={row} onRow={setRow} />}
    </section>
  );
}

interface Line {
  column: number;
  row: number;
  text: Text;
  completion: Schemas["Completion"];
  /** Mean log-probability of a token. */
  score: number | null;
  probe: number | null;
}

function mean(values: readonly (number | null)[]): number | null {
  const known = values.filter((value) => value !== null);
  return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
}

/** Every text, a line each, sorted by what its head says. */
function All({ shown, row, onRow }: { shown: Steered; row: number; onRow: (row: number) => void }) {
  const lines = useMemo(
    () =>
      shown.texts.flatMap((column, at) =>
        column.map((text, index): Line => {
          const completion = text.completion as Schemas["Completion"];
          const probe = mean(text.after);
          return { column: at, row: index, text, completion, score: mean(completion.logprobs), probe };
        }),
      ),
    [shown],
  );
  const columns = useMemo(() => {
    const name = (line: Line): string => shown.titles[line.column]?.note || "unsteered";
    const all: TableColumn<Line>[] = [
      { name: "Scale", value: name, isText: true },
      ...(shown.prompts.length > 1
        ? [{ name: "Prompt", value: (line: Line) => shown.prompts[Math.floor(line.row / shown.n)] ?? "", isText: true }]
        : []),
      { name: "Seed", value: (line) => line.completion.seed },
      { name: "Score a token, nats", value: (line) => line.score, show: (line) => fixed(line.score, 3), isDescending: true },
      ...(lines.some(({ probe }) => probe !== null)
        ? [{ name: "Probe, mean", value: (line: Line) => line.probe, show: (line: Line) => number(line.probe), isDescending: true }]
        : []),
      { name: "Tokens", value: (line) => line.completion.num_tokens, isDescending: true },
      { name: "Text", value: (line) => line.completion.text, isText: true },
    ];
    return all;
  }, [shown, lines]);
  return (
    <Table
      label="All texts"
      rows={lines}
      columns={columns}
      onChoose={(line) => onRow(line.row)}
      isChosen={(line) => line.row === row}
      exportName="steered"
    />
  );
}

interface OneColumnProps {
  shown: Steered;
  column: number;
  row: number;
  title: { title: string; note: string };
  values: readonly (number | null)[];
  colours: Scale | undefined;
  isRunning: boolean;
  probe: string | null;
  marked: number | null;
  setMarked: (index: number | null) => void;
  onBranch?: OnBranch;
}

function OneColumn(props: OneColumnProps) {
  const { shown, column, row, title: { title, note }, values, colours, isRunning, probe, marked, setMarked, onBranch } = props;
  const text = shown.texts[column]?.[row] as Text;
  const prompt = shown.prompts[Math.floor(row / shown.n)] ?? "";
  const thread = shown.threads?.[column]?.filter(({ role }) => role !== "system") ?? [];
  const offset = prompt === "" ? 0 : 1;
  const tokens = useMemo(
    () => (prompt === "" ? text.tokens : [prompt, ...text.tokens]),
    [prompt, text.tokens],
  );
  const shifted = useMemo(() => (prompt === "" ? values : [null, ...values]), [prompt, values]);
  const describe = (at: number, isHeld: boolean) => {
    const index = at - offset;
    if (index < 0) return <p>The prompt</p>;
    return <TextCard {...{ shown, column, row, index, probe }} onBranch={isHeld ? onBranch : undefined} />;
  };
  return (
    <section class="column sheet" data-column={title}>
      <h2>
        {title} {note && <small class="num">{note}</small>}
      </h2>
      {thread.map(({ role, content }, at) => (
        <p key={at} class={`turn is-${role}`}>
          <span class="off-screen">{role === "user" ? "You: " : "Model: "}</span>
          {content}
        </p>
      ))}
      <div class={`continuation ${offset ? "has-prompt" : ""}`}>
        <TokenText
          label={`${title === "Steered" ? title : `${title}${note && ` ${note}`}`}: the text, by its tokens`}
          tokens={tokens}
          values={shifted}
          scale={colours}
          describe={describe}
          marked={marked}
          onActive={setMarked}
          noLegend
        />
      </div>
      {text.completion === null && !isRunning && <p class="hint num">{plural(text.ids.length, "token")}, then it was cut off</p>}
      {text.completion && (
        <p class="hint num">
          {plural(text.completion.num_tokens, "token")},{" "}
          {text.completion.finish_reason === "stop" ? "ended by itself" : "ended at the limit"} ·
          log-probability {fixed(text.completion.logprob, 2)}
        </p>
      )}
    </section>
  );
}

interface TextCardProps {
  shown: Steered;
  column: number;
  row: number;
  index: number;
  probe: string | null;
  onBranch?: OnBranch;
}

/** A token's numbers, and what else was likely there: under steering, where there was any. */
function TextCard({ shown, column, row, index, probe, onBranch }: TextCardProps) {
  const text = shown.texts[column]?.[row] as Text;
  const [top, setTop] = useState<Schemas["TopAlternatives"] | null | undefined>(undefined);
  useEffect(() => {
    let isWanted = true;
    const timer = setTimeout(() => {
      findAlternatives(shown, column, row).then(
        (found) => isWanted && setTop(found),
        () => isWanted && setTop(null),
      );
    }, 30);
    return () => {
      isWanted = false;
      clearTimeout(timer);
    };
  }, [text.completion]);
  const [before, after] = [text.before[index], text.after[index]];
  const isChanged = before !== after;
  const readings = [
    [isChanged ? "Probe, before steering" : "Probe", number(before)],
    ...(isChanged ? [["Probe, after steering", number(after)]] : []),
  ] as [string, string][];
  const branch = (id: number, token: string) => () => {
    const prompt = shown.prompts[Math.floor(row / shown.n)] ?? "";
    const ids = [...promptIds(shown, column, row), ...text.ids.slice(0, index), id];
    onBranch?.(ids, prompt + text.tokens.slice(0, index).join("") + token);
  };
  const ids = top?.token_ids[index] ?? [];
  return (
    <>
      <TokenCard
        token={text.tokens[index] ?? ""}
        id={text.ids[index]}
        logprob={text.logprobs[index]}
        rows={probe === null ? [] : before === null || before === undefined ? [["Probe", "not read"]] : readings}
        alternatives={
          text.completion === null
            ? undefined
            : top === undefined
              ? null
              : ids.map((id, at) => ({
                  token: top?.tokens?.[index]?.[at] ?? "",
                  logprob: top?.logprobs[index]?.[at] ?? null,
                  isTaken: id === text.ids[index],
                  onChoose: onBranch && branch(id, top?.tokens?.[index]?.[at] ?? ""),
                }))
        }
      />
      {onBranch && ids.length > 0 && <p class="hint">Press one to continue from here with it.</p>}
    </>
  );
}

function compare(baseline: readonly number[], steered: readonly number[]): string {
  const length = Math.max(baseline.length, steered.length);
  let same = 0;
  while (same < length && baseline[same] === steered[same]) same += 1;
  if (same === length) return "Both texts are the same, token by token.";
  return same === 0
    ? "The texts differ from their first token on: same prompt, same seed."
    : `Same prompt, same seed: the texts are the same for ${plural(same, "token")}, then differ.`;
}
