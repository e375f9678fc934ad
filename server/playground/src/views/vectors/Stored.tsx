// The stored vectors: what each is, and what can be done with it.
import { useRef, useState } from "preact/hooks";
import { call, download, upload } from "../../lib/api";
import { bytes, plural, short } from "../../lib/format";
import { useTask } from "../../lib/task";
import { refreshVectors, type VectorCard } from "../../lib/vectors";
import { Confirm } from "../../parts/Confirm";
import { ErrorNote, RunForm } from "../../parts/controls";
import { CopyAs } from "../../parts/CopyAs";
import { TextField } from "../../parts/fields";
import { Icon } from "../../parts/Icon";
import { save } from "../../parts/LineChart";
import { linkExamples } from "../examples/request";
import { Evaluate } from "./Evaluate";
import { Quality } from "./Quality";

interface StoredProps {
  cards: readonly VectorCard[];
  model: string | undefined;
  /** The one that is looked at. */
  opened: string;
  /** Words that its name, or how it was made, must have. */
  search: string;
  onSearch: (search: string) => void;
  onOpen: (name: string) => void;
  onSteer: (card: VectorCard, layer?: number, scale?: number) => void;
}

export function Stored({ cards, model, opened, search, onSearch, onOpen, onSteer }: StoredProps) {
  const words = search.toLowerCase().split(/\s+/).filter(Boolean);
  const found = cards.filter((card) => {
    const text = `${card.name} ${describe(card)} ${card.sha256}`.toLowerCase();
    return words.every((word) => text.includes(word));
  });
  const [doomed, setDoomed] = useState<VectorCard | null>(null);
  const heading = useRef<HTMLHeadingElement>(null);
  return (
    <section class="stored" aria-labelledby="stored-title">
      <h2 id="stored-title" ref={heading} tabIndex={-1}>
        {plural(cards.length, "stored vector")}
        {found.length < cards.length && `, ${found.length} found`}
      </h2>
      {(cards.length > 5 || search !== "") && (
        <TextField label="Search" value={search} placeholder="words of a name, a method, a content" onChange={onSearch} />
      )}
      <ul class="stored-list">
        {found.map((card) => (
          <Entry
            key={card.name}
            card={card}
            model={model}
            isOpen={card.name === opened}
            onOpen={onOpen}
            onSteer={onSteer}
            onDelete={setDoomed}
          />
        ))}
      </ul>
      <Confirm
        title={doomed && `Delete ${doomed.name}?`}
        keep="Keep it"
        action={
          <>
            <Icon name="trash" /> Delete
          </>
        }
        onConfirm={async (signal) => {
          await call("delete", "/vectors/{name}", undefined, { path: { name: doomed?.name ?? "" }, signal });
          await refreshVectors();
        }}
        onClose={(isDeleted) => {
          setDoomed(null);
          if (isDeleted) heading.current?.focus();
        }}
      >
        Requests and links that name it will fail. Its file can be downloaded first, and uploaded again.
      </Confirm>
    </section>
  );
}

interface EntryProps {
  card: VectorCard;
  model: string | undefined;
  isOpen: boolean;
  onOpen: (name: string) => void;
  onSteer: StoredProps["onSteer"];
  onDelete: (card: VectorCard) => void;
}

function Entry({ card, model, isOpen, onOpen, onSteer, onDelete }: EntryProps) {
  const task = useTask();
  const fetchFile = (format: "safetensors" | "gguf"): void =>
    task.run(async (signal) => {
      const options = { path: { name: card.name }, query: { format }, signal };
      save(await download("/vectors/{name}/content", options), `${card.name.split("/").at(-1)}.${format}`);
    });
  const id = `vector-${card.name}`;
  return (
    <li class="vector" data-vector={card.name}>
      <div class="vector-head">
        <button
          type="button"
          class="vector-name"
          aria-expanded={isOpen}
          aria-controls={id}
          onClick={() => onOpen(isOpen ? "" : card.name)}
        >
          {card.name}
        </button>
        <span class="hint vector-what">{describe(card)}</span>
        <span class="vector-actions">
          <button type="button" class="quiet" aria-label={`Steer with ${card.name}`} onClick={() => onSteer(card)}>
            <Icon name="steer" /> Steer
          </button>
          <a class="quiet" title="Examples" aria-label={`Examples of ${card.name}`} href={linkExamples(card.name)}>
            <Icon name="examples" />
          </a>
          <button type="button" class="quiet" aria-label={`Download ${card.name} as safetensors`} onClick={() => fetchFile("safetensors")}>
            <Icon name="down" /> safetensors
          </button>
          <button type="button" class="quiet" aria-label={`Download ${card.name} as GGUF`} onClick={() => fetchFile("gguf")}>
            <Icon name="down" /> GGUF
          </button>
          <button type="button" class="quiet" aria-label={`Delete ${card.name}`} onClick={() => onDelete(card)}>
            <Icon name="trash" />
          </button>
        </span>
      </div>
      <ErrorNote error={task.error} />
      <div id={id} hidden={!isOpen}>
        {isOpen && (
          <>
            <dl class="vector-facts">
              <dt>Content</dt>
              <dd><code>{card.sha256}</code></dd>
              <dt>Activations</dt>
              <dd>
                {card.hook}, {plural(card.width, "number")} a layer, {bytes(card.bytes)}
              </dd>
              {card.about.parts && (
                <>
                  <dt>Made of</dt>
                  <dd>
                    {card.about.parts.map((part) => `${short(part.weight ?? 1)} × ${part.name}`).join(" + ")}
                    {card.about.orthogonal_to && `, without what it shares with ${card.about.orthogonal_to.map((part) => part.name).join(", ")}`}
                  </dd>
                </>
              )}
            </dl>
            <Quality card={card} onSteer={(layer, scale) => onSteer(card, layer, scale)} />
            <Evaluate card={card} model={model} />
            <Rename card={card} onDone={onOpen} />
            <CopyAs label="Copy its deletion as" asked={{ endpoint: "vectors.delete", path: { name: card.name } }} />
          </>
        )}
      </div>
    </li>
  );
}

/** The file under another name: the server has no request for that. */
function Rename({ card, onDone }: { card: VectorCard; onDone: (name: string) => void }) {
  const task = useTask();
  const [typed, setTyped] = useState("");
  const name = typed.trim();
  const run = (): void => {
    if (name === "") return;
    task.run(async (signal) => {
      const file = await download("/vectors/{name}/content", { path: { name: card.name }, query: { format: "safetensors" }, signal });
      await upload("/vectors/{name}", file, { path: { name }, signal });
      await call("delete", "/vectors/{name}", undefined, { path: { name: card.name }, signal });
      await refreshVectors();
      onDone(name);
    });
  };
  return (
    <details class="more">
      <summary>Rename it</summary>
      <RunForm label={`Rename ${card.name}`} onRun={run}>
        <TextField
          label="New name"
          value={typed}
          hint="Its file is stored under the new name, then the old name is deleted. What training measured of it is not in the file, and is lost."
          onChange={setTyped}
        />
        <div class="actions">
          <button type="submit" class="quiet" disabled={name === "" || task.isRunning}>
            <Icon name="pen" /> Rename
          </button>
        </div>
        <ErrorNote error={task.error} />
      </RunForm>
    </details>
  );
}

function describe(card: VectorCard): string {
  const { about } = card;
  const layers = card.layers.length > 4 ? `layers ${card.layers[0]} to ${card.layers.at(-1)}` : `layer ${card.layers.join(", ")}`;
  const made = {
    training: `trained from ${plural(about.pairs ?? 0, "pair")} by ${(about.method ?? "").replace("_", " ")}`,
    upload: `uploaded as ${about.format ?? "a file"}`,
    combination: "combined",
  }[about.source];
  return `${made}${card.other_weights ? " on other weights" : ""} · ${layers} · ${card.created.slice(0, 10)}`;
}
