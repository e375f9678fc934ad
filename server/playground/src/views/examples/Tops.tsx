// The tokens that a capture's probes read highest: one list, or two beside each other.
import { useEffect, useMemo, useState } from "preact/hooks";
import { call, type Schemas } from "../../lib/api";
import { count, number, plural } from "../../lib/format";
import { writeCsv } from "../../lib/tables";
import { useCopy } from "../../parts/CopyAs";
import { Select } from "../../parts/fields";
import { Icon } from "../../parts/Icon";
import { save } from "../../parts/LineChart";
import type { CaptureCard } from "./useCaptures";

type Top = Schemas["CaptureTop"];
type Example = Schemas["CaptureExample"];

export type ShownState = {
  /** Numbers of the lists that are seen; -1: none. */
  shown: number;
  beside: number;
};

export const INITIAL_SHOWN: ShownState = { shown: 0, beside: 1 };

const NAMES: Record<string, string> = {
  projection: "projection on it",
  cosine: "cosine with it",
  activation: "activation of the feature",
  probability: "probability",
};

function nameTop({ name, sha256, layer }: Top): string {
  return `${name ?? sha256.slice(0, 10)} at layer ${layer}`;
}

const placeOf = ({ document, position }: Example): string => `${document}:${position}`;

interface TopsProps {
  card: CaptureCard;
  tops: readonly Top[];
  state: ShownState;
  setState: (change: Partial<ShownState>) => void;
}

export function Tops({ card, tops, state, setState }: TopsProps) {
  const first = tops[state.shown] ?? tops[0];
  const second = tops[state.beside] === first ? undefined : tops[state.beside];
  const lists = [first, second].filter((top) => top !== undefined);
  const tokens = useTokens(card.model, lists);
  // Cosines have one scale; other readings have it at the same layer.
  const isShared = second === undefined || (first?.read === second.read && (first.read === "cosine" || first.layer === second.layer));
  const options = tops.map((top, at) => ({ value: String(at), label: nameTop(top) }));
  const places = new Set(second?.examples.map(placeOf));
  const common = first?.examples.filter((one) => places.has(placeOf(one))).length ?? 0;
  return (
    <div class="tops">
      {tops.length > 1 && (
        <div class="row">
          <Select
            label="Examples of"
            value={String(first ? tops.indexOf(first) : 0)}
            options={options}
            onChange={(shown) => setState({ shown: Number(shown) })}
          />
          <Select
            label="Beside them"
            value={String(second ? state.beside : -1)}
            options={[{ value: "-1", label: "nothing" }, ...options.filter(({ value }) => tops[Number(value)] !== first)]}
            onChange={(beside) => setState({ beside: Number(beside) })}
          />
        </div>
      )}
      {second && (
        <p class="hint">
          {common === 0 ? "No token is in both lists." : `${plural(common, "token")} ${common === 1 ? "is" : "are"} in both lists.`}{" "}
          {isShared ? "Bars have one scale." : "They are read in different units: each list has bars of its own scale."}
        </p>
      )}
      <div class="beside">
        {lists.map((top, at) => (
          <TopList
            key={at}
            top={top}
            model={card.model}
            tokens={tokens}
            other={lists.length > 1 ? lists[1 - at] : undefined}
            scaled={isShared ? lists.flatMap(({ examples }) => examples) : top.examples}
          />
        ))}
      </div>
      <div class="actions">
        <button type="button" class="quiet" onClick={() => saveCsv(card.name, lists, tokens)}>
          <Icon name="down" /> CSV
        </button>
        <span class="hint">
          A text is shown by its last 24 tokens up to the one that is marked. <i>Text</i> reads those alone: without
          what was before them, readings differ.
        </span>
      </div>
    </div>
  );
}

interface ListProps {
  top: Top;
  model: string;
  tokens: ReadonlyMap<number, string>;
  other: Top | undefined;
  /** Examples whose readings have one scale. */
  scaled: readonly Example[];
}

function TopList({ top, model, tokens, other, scaled }: ListProps) {
  const readings = scaled.map(({ reading }) => reading ?? 0);
  const [low, high] = [Math.min(0, ...readings), Math.max(...readings)];
  // A feature that is off at a token reads 0 there.
  const shown = top.read === "activation" ? top.examples.filter(({ reading }) => reading) : top.examples;
  const places = other?.examples.map(placeOf) ?? [];
  return (
    <section class="sheet top" aria-label={nameTop(top)}>
      <h3>{nameTop(top)}</h3>
      <p class="hint">
        {NAMES[top.read] ?? top.read}
        {top.hook !== "resid_post" && `, ${top.hook}`}
        {shown.length < top.examples.length && `; it is off at all but ${plural(shown.length, "token")}`}
      </p>
      {top.examples.length === 0 && <p class="note">No token has been read yet.</p>}
      <ol aria-label={`Tokens that ${nameTop(top)} reads highest`}>
        {shown.map((example, at) => {
          const rank = places.indexOf(placeOf(example));
          return (
            <Entry
              key={placeOf(example)}
              number={at + 1}
              example={example}
              token={tokens.get(example.token_id)}
              share={((example.reading ?? 0) - low) / (high - low || 1)}
              note={rank < 0 ? "" : `; number ${rank + 1} beside`}
              href={`#text?${new URLSearchParams({
                model,
                text: example.text,
                ...(top.name ? { colour: "probe", probe: top.name, at: String(top.layer) } : {}),
                ...(top.read === "cosine" ? { by: "cosine" } : {}),
              })}`}
            />
          );
        })}
      </ol>
    </section>
  );
}

interface EntryProps {
  number: number;
  example: Example;
  token: string | undefined;
  share: number;
  note: string;
  href: string;
}

function Entry({ number: rank, example, token, share, note, href }: EntryProps) {
  const [isCopied, copy] = useCopy();
  const [before, marked] = mark(example, token);
  return (
    <li class="example">
      <span class="example-reading">
        <b class="num">{number(example.reading)}</b>
        <span class="bar-track" aria-hidden="true">
          <span class="bar-fill" style={{ width: `${(100 * share).toFixed(1)}%` }} />
        </span>
      </span>
      <p class="example-text" dir="auto">
        {before.trimStart()}
        {marked && (
          <>
            <wbr />
            <mark>{marked}</mark>
          </>
        )}
      </p>
      <span class="example-more">
        <span class="hint num">
          text {count(example.document)}
          {example.position >= 0 ? `, token ${count(example.position)}` : ", the mean of its tokens"}
          {note}
        </span>
        <a class="quiet" href={href} aria-label={`Read example ${rank} in Text`}>
          <Icon name="text" /> Text
        </a>
        <button
          type="button"
          class="quiet"
          aria-label={`Copy example ${rank}`}
          onClick={() => void copy(example.text)}
        >
          <Icon name={isCopied ? "check" : "copy"} />
        </button>
        <span class="off-screen" role="status">{isCopied ? "Copied" : ""}</span>
      </span>
    </li>
  );
}

/** What is before the token that was read, and that token, as they are shown; no token of a mean. */
function mark({ text, position }: Example, token: string | undefined): [before: string, marked: string] {
  const show = (part: string): string => part.replace(/\n/g, "↵");
  if (position < 0 || !token) return [show(text), ""];
  // Some tokenizers leave out a space at the beginning; of a character's parts the text has the whole.
  const found = [token, token.trimStart()].find((one) => one !== "" && text.endsWith(one)) ?? Array.from(text).at(-1) ?? "";
  // Its first space stays with it where a line ends.
  return [show(text.slice(0, text.length - found.length)), show(found).replaceAll(" ", "\u00a0")];
}

/** The texts of the tokens that were read, by their ids. */
function useTokens(model: string, lists: readonly Top[]): ReadonlyMap<number, string> {
  const [known, setKnown] = useState<ReadonlyMap<number, string>>(new Map());
  const ids = useMemo(
    () => [...new Set(lists.flatMap(({ examples }) => examples.map(({ token_id: id }) => id)))].filter((id) => id >= 0).sort((a, b) => a - b),
    [lists],
  );
  useEffect(() => {
    const work = new AbortController();
    const lacking = ids.filter((id) => !known.has(id));
    if (lacking.length > 0) {
      call("post", "/detokenize", { model, token_ids: lacking.map((id) => [id]) }, { signal: work.signal }).then(
        ({ texts }) => setKnown((old) => new Map([...old, ...lacking.map((id, at) => [id, texts[at] ?? ""] as const)])),
        // The model may be gone: then no token is marked.
        () => undefined,
      );
    }
    return () => work.abort();
  }, [model, ids.join()]);
  return known;
}

function saveCsv(name: string, lists: readonly Top[], tokens: ReadonlyMap<number, string>): void {
  const head = ["name", "layer", "read", "reading", "document", "position", "token_id", "token", "text"];
  const rows = lists.flatMap((top) =>
    top.examples.map((one) => [
      top.name, top.layer, top.read, one.reading, one.document, one.position, one.token_id, tokens.get(one.token_id), one.text,
    ]),
  );
  save(new Blob([writeCsv(head, rows)], { type: "text/csv" }), `${name}.csv`);
}
