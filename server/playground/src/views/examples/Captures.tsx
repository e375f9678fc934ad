// The stored captures: how far each has come, and what it has found.
import { useState } from "preact/hooks";
import { call, type Schemas } from "../../lib/api";
import { bytes, count, plural } from "../../lib/format";
import { nameLayers } from "../../lib/steering";
import { useTask } from "../../lib/task";
import { Confirm } from "../../parts/Confirm";
import { CopyAs } from "../../parts/CopyAs";
import { ErrorNote } from "../../parts/controls";
import { Icon } from "../../parts/Icon";
import { Tops, type ShownState } from "./Tops";
import type { CaptureCard } from "./useCaptures";

const STATES: Record<CaptureCard["state"], [name: string, dot: string]> = {
  running: ["Running", "loading"],
  paused: ["Paused", "loading"],
  done: ["Done", "ready"],
  failed: ["Failed", "failed"],
};

interface CapturesProps {
  cards: readonly CaptureCard[];
  opened: string;
  state: ShownState;
  setState: (change: Partial<ShownState>) => void;
  onOpen: (name: string) => void;
  onChange: (card: CaptureCard) => void;
  onDelete: (name: string) => Promise<void>;
}

export function Captures({ cards, opened, onDelete, ...shared }: CapturesProps) {
  const [doomed, setDoomed] = useState<string | null>(null);
  const newest = [...cards].sort((a, b) => b.created.localeCompare(a.created) || a.name.localeCompare(b.name));
  return (
    <section class="stored" aria-labelledby="captures-title">
      <h2 id="captures-title">{plural(cards.length, "stored capture")}</h2>
      <ul class="stored-list">
        {newest.map((card) => (
          <Entry key={card.name} card={card} isOpen={card.name === opened} onDoom={setDoomed} {...shared} />
        ))}
      </ul>
      <Confirm
        title={doomed && `Delete ${doomed}?`}
        keep="Keep it"
        action={
          <>
            <Icon name="trash" /> Delete
          </>
        }
        onConfirm={async (signal) => {
          const name = doomed ?? "";
          await call("delete", "/captures/{name}", undefined, { path: { name }, signal });
          await onDelete(name);
        }}
        onClose={() => setDoomed(null)}
      >
        Its job ends; its texts, what was captured of them, and its examples are removed.
      </Confirm>
    </section>
  );
}

interface EntryProps extends Pick<CapturesProps, "state" | "setState" | "onOpen" | "onChange"> {
  card: CaptureCard;
  isOpen: boolean;
  onDoom: (name: string) => void;
}

function Entry({ card, isOpen, state, setState, onOpen, onChange, onDoom }: EntryProps) {
  const task = useTask();
  const { name } = card;
  const [word, dot] = STATES[card.state];
  const isRunning = card.state === "running";
  const turn = isRunning ? "pause" : "resume";
  const id = `capture-${name}`;
  return (
    <li class="vector" data-capture={name}>
      <div class="vector-head">
        <button type="button" class="vector-name" aria-expanded={isOpen} aria-controls={id} onClick={() => onOpen(isOpen ? "" : name)}>
          {name}
        </button>
        <span class="hint vector-what">
          <span class={`state-dot is-${dot}`} aria-hidden="true" /> <b>{word}</b> · {describe(card)}
        </span>
        <span class="vector-actions">
          {card.state !== "done" && (
            <button
              type="button"
              class="quiet"
              aria-label={`${isRunning ? "Pause" : "Resume"} ${name}`}
              disabled={task.isRunning}
              onClick={() =>
                task.run(async (signal) => onChange(await call("post", `/captures/{name}/${turn}`, undefined, { path: { name }, signal })))
              }
            >
              <Icon name={isRunning ? "pause" : "play"} /> {isRunning ? "Pause" : "Resume"}
            </button>
          )}
          <button type="button" class="quiet" aria-label={`Delete ${name}`} onClick={() => onDoom(name)}>
            <Icon name="trash" />
          </button>
        </span>
      </div>
      {isRunning && (
        <span class="progress">
          <progress aria-label={`Texts of ${name}`} max={card.documents_total} value={card.documents} />
          <span class="hint num" role="status">
            {count(card.documents)} of {plural(card.documents_total, "text")}, counted by the shard
            {card.seconds > 0 && `; ${count(Math.round(card.tokens / card.seconds))} tokens/s`}
          </span>
        </span>
      )}
      {card.error && <ErrorNote error={card.error} />}
      <ErrorNote error={task.error} />
      <div id={id} hidden={!isOpen}>
        {isOpen && (
          <div class="capture">
            {card.problems > 0 && <Problems card={card} />}
            {card.reduced?.top ? (
              <Tops card={card} tops={card.reduced.top} state={state} setState={setState} />
            ) : card.num_shards === 0 && card.state !== "done" ? (
              <p class="hint">Nothing is stored yet: what it finds is seen from its first shard on.</p>
            ) : (
              <p class="hint">
                It lists no examples.
                {card.bytes > 0 && ` Its activations, ${bytes(card.bytes)} in ${plural(card.num_shards, "shard")}, are read by client.activation_loader.`}
              </p>
            )}
            <CopyAs label="Copy reading it as" asked={{ endpoint: "captures.get", path: { name } }} />
          </div>
        )}
      </div>
    </li>
  );
}

function describe(card: CaptureCard): string {
  const { documents: some, documents_total: all } = card;
  const texts = some < all ? `${count(some)} of ${plural(all, "text")}` : plural(all, "text");
  const parts = [
    card.model,
    `layer${card.layers.length > 1 ? "s" : ""} ${nameLayers(card.layers)}`,
    texts,
    plural(card.tokens, "token"),
    card.truncated > 0 && `${plural(card.truncated, "text")} cut`,
    card.reduced?.sinks && `${plural(card.reduced.sinks, "attention sink")} left out`,
    card.reduced?.non_finite && `${plural(card.reduced.non_finite, "token")} not finite`,
    card.created.slice(0, 10),
  ];
  return parts.filter(Boolean).join(" · ");
}

/** The texts that could not be read, asked for once somebody wants to know. */
function Problems({ card }: { card: CaptureCard }) {
  const task = useTask();
  const [found, setFound] = useState<Schemas["CaptureProblem"][]>([]);
  return (
    <details
      class="more"
      onToggle={(event) => {
        if (!event.currentTarget.open) return;
        task.run(async (signal) =>
          setFound((await call("get", "/captures/{name}/index", undefined, { path: { name: card.name }, signal })).failures),
        );
      }}
    >
      <summary>{plural(card.problems, "text")} could not be read</summary>
      <ErrorNote error={task.error} />
      <ul>
        {found.slice(0, 20).map(({ document, detail }) => (
          <li key={document} class="wrong">
            Text {document}: {detail}
          </li>
        ))}
      </ul>
      {found.length > 20 && <p class="hint">The first 20; the capture's index has more.</p>}
    </details>
  );
}
