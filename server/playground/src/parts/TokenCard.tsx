// What the card of a token says: its numbers, and what the model would rather have read.
import type { ComponentChildren } from "preact";
import { fixed, percent, visible } from "../lib/format";
import { Bars } from "./Bars";

export interface Alternative {
  token: string;
  logprob: number | null;
  /** Whether it is the token of the text. */
  isTaken?: boolean;
  /** Continue from here with it. */
  onChoose?: () => void;
}

export interface TokenCardProps {
  token: string;
  id?: number;
  logprob?: number | null;
  rank?: number | null;
  /** Further rows, such as a probe's reading. */
  rows?: readonly (readonly [label: string, value: ComponentChildren])[];
  /** null: they are being fetched. */
  alternatives?: readonly Alternative[] | null;
}

export function TokenCard({ token, id, logprob, rank, rows = [], alternatives }: TokenCardProps) {
  const known = logprob !== null && logprob !== undefined;
  return (
    <>
      <div class="card-head">
        <code class="card-token">{visible(token)}</code>
        {id !== undefined && <span class="card-id num">id {id}</span>}
      </div>
      <dl class="card-rows num">
        {known && (
          <>
            <dt>Probability</dt>
            <dd>{percent(Math.exp(logprob))}</dd>
            <dt>Surprisal</dt>
            <dd>{fixed(-logprob, 3)} nats</dd>
          </>
        )}
        {rank !== null && rank !== undefined && (
          <>
            <dt>Rank</dt>
            <dd>{rank.toLocaleString("en")}</dd>
          </>
        )}
        {rows.map(([label, value]) => [<dt key={label}>{label}</dt>, <dd key={`${label}=`}>{value}</dd>])}
      </dl>
      {alternatives === null && <p class="hint">Looking up what else was likely …</p>}
      {alternatives && alternatives.length > 0 && (
        <Bars
          label="Most probable tokens"
          isDense
          bars={alternatives.map((alternative) => ({
            label: alternative.onChoose ? (
              <button type="button" title="Continue from here" onClick={alternative.onChoose}>
                {visible(alternative.token)}
              </button>
            ) : (
              visible(alternative.token)
            ),
            share: Math.exp(alternative.logprob ?? -Infinity),
            text: percent(Math.exp(alternative.logprob ?? -Infinity)),
            isStrong: alternative.isTaken,
          }))}
        />
      )}
    </>
  );
}
