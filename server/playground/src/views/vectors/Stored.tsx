// The stored vectors: what each is, and what can be done with it.
import { useEffect, useRef, useState } from "preact/hooks";
import { call, download } from "../../lib/api";
import { bytes, plural, short } from "../../lib/format";
import { useTask } from "../../lib/task";
import { refreshVectors, type VectorCard } from "../../lib/vectors";
import { ErrorNote } from "../../parts/controls";
import { Icon } from "../../parts/Icon";
import { save } from "../../parts/LineChart";
import { Quality } from "./Quality";

interface StoredProps {
  cards: readonly VectorCard[];
  /** The one that is looked at. */
  opened: string;
  onOpen: (name: string) => void;
  onSteer: (card: VectorCard, layer?: number, scale?: number) => void;
}

export function Stored({ cards, opened, onOpen, onSteer }: StoredProps) {
  const [doomed, setDoomed] = useState<VectorCard | null>(null);
  const heading = useRef<HTMLHeadingElement>(null);
  return (
    <section class="stored" aria-labelledby="stored-title">
      <h2 id="stored-title" ref={heading} tabIndex={-1}>
        {plural(cards.length, "stored vector")}
      </h2>
      <ul class="stored-list">
        {cards.map((card) => (
          <Entry
            key={card.name}
            card={card}
            isOpen={card.name === opened}
            onOpen={onOpen}
            onSteer={onSteer}
            onDelete={setDoomed}
          />
        ))}
      </ul>
      <DeleteDialog
        card={doomed}
        onClose={(isDeleted) => {
          setDoomed(null);
          if (isDeleted) heading.current?.focus();
        }}
      />
    </section>
  );
}

interface EntryProps {
  card: VectorCard;
  isOpen: boolean;
  onOpen: (name: string) => void;
  onSteer: StoredProps["onSteer"];
  onDelete: (card: VectorCard) => void;
}

function Entry({ card, isOpen, onOpen, onSteer, onDelete }: EntryProps) {
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
          </>
        )}
      </div>
    </li>
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
  return `${made} · ${layers} · ${card.created.slice(0, 10)}`;
}

interface DeleteProps {
  card: VectorCard | null;
  onClose: (isDeleted: boolean) => void;
}

/** Asks first: a name that is gone cannot be brought back from here. */
function DeleteDialog({ card, onClose }: DeleteProps) {
  const dialog = useRef<HTMLDialogElement>(null);
  const task = useTask();
  useEffect(() => {
    if (card !== null) dialog.current?.showModal();
  }, [card]);
  const remove = (name: string): void =>
    task.run(async (signal) => {
      await call("delete", "/vectors/{name}", undefined, { path: { name }, signal });
      await refreshVectors();
      dialog.current?.close("deleted");
    });
  return (
    <dialog
      ref={dialog}
      class="dialog"
      aria-labelledby="delete-title"
      aria-describedby="delete-text"
      onClose={(event) => onClose(event.currentTarget.returnValue === "deleted")}
    >
      <form
        onSubmit={(event) => {
          event.preventDefault();
          if (card) remove(card.name);
        }}
      >
        <h2 id="delete-title">Delete {card?.name}?</h2>
        <p id="delete-text">
          Requests and links that name it will fail. Its file can be downloaded first, and uploaded again.
        </p>
        <ErrorNote error={task.error} />
        <div class="dialog-actions">
          <button type="button" class="quiet" autofocus onClick={() => dialog.current?.close("")}>
            Keep it
          </button>
          <button type="submit" class="run is-danger" disabled={task.isRunning}>
            <Icon name="trash" /> Delete
          </button>
        </div>
      </form>
    </dialog>
  );
}
