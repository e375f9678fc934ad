// What this browser has kept: results to find again, to name, and to lay beside each other.
import "./sessions.css";
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { forgetKey, isKeyKept } from "../lib/api";
import type { Fields } from "../lib/address";
import { plural } from "../lib/format";
import {
  changeSession,
  exportSessions,
  importSessions,
  loadSessions,
  readSession,
  putBack,
  removeSession,
  restored,
  sessions as kept,
  sessionsError,
  type Session,
  type SessionCard,
} from "../lib/sessions";
import { useTask } from "../lib/task";
import { view, type AnyView, type ViewProps } from "../lib/view";
import { ErrorNote } from "../parts/controls";
import { FileButton, TextField } from "../parts/fields";
import { Icon } from "../parts/Icon";
import { save } from "../parts/LineChart";

type State = {
  search: string;
  /** Ids of those beside each other. */
  compared: string[];
};

/** Sessions beside each other: more would be too narrow to read. */
const MOST_COMPARED = 4;

/** The view of kept results, which are shown by the views that asked for them. */
export function makeSessions(others: readonly AnyView[]) {
  const find = (id: string): AnyView | undefined => others.find((one) => one.id === id);

  function SessionsView({ state, setState, isShown }: ViewProps<State>) {
    const task = useTask();
    const [imported, setImported] = useState<number | null>(null);
    const [removed, setRemoved] = useState<Session | null>(null);
    useEffect(() => {
      if (isShown) void loadSessions();
    }, [isShown]);
    const cards = (kept.value ?? []).filter((card) => find(card.view)?.outcome);
    const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
    const shown = cards.filter((card) => {
      const text = `${card.name} ${card.title} ${card.model} ${find(card.view)?.title} ${JSON.stringify(card.fields)}`.toLowerCase();
      return words.every((word) => text.includes(word));
    });
    const compared = cards.filter((card) => state.compared.includes(card.id));
    return (
      <>
        <div class="row session-search">
          <TextField
            label="Search"
            value={state.search}
            placeholder="words of a prompt, a name, a vector, a model, a view"
            onChange={(search) => setState({ search })}
          />
          <div class="actions">
            <button
              type="button"
              class="quiet"
              disabled={shown.length === 0}
              onClick={() =>
                task.run(async () =>
                  save(await exportSessions(compared.length ? compared : shown), "logsteer-sessions.json"),
                )
              }
            >
              <Icon name="down" /> Export {compared.length ? "the chosen" : shown.length === cards.length ? "all" : "the found"}
            </button>
            <FileButton
              label="Import a file"
              accept=".json"
              onTake={(files) => {
                const file = files?.[0];
                if (file) task.run(async () => setImported(await importSessions(file)));
              }}
            />
            {isKeyKept.value && (
              <button type="button" class="quiet" onClick={forgetKey}>
                <Icon name="key" /> Forget the key
              </button>
            )}
          </div>
        </div>
        <p class="hint" role="status">
          {imported !== null
            ? `${plural(imported, "session")} imported.`
            : `${plural(shown.length, "result")} ${shown.length < cards.length ? `of ${cards.length}` : "kept in this browser, and nowhere else"}. Choose two or more to see them beside each other.`}
        </p>
        {removed && (
          <p class="note">
            Removed: {removed.name || removed.title}.{" "}
            <button
              type="button"
              class="quiet"
              onClick={() =>
                task.run(async () => {
                  await putBack(removed);
                  setRemoved(null);
                })
              }
            >
              Put it back
            </button>
          </p>
        )}
        <ErrorNote error={task.error ?? sessionsError.value} />
        {compared.length > 0 && <Compared cards={compared} find={find} />}
        {kept.value !== null && cards.length === 0 && (
          <p class="note">Nothing is kept yet. Every result of the other views is added here.</p>
        )}
        <ul class="session-list">
          {shown.map((card) => (
            <Entry
              key={card.id}
              card={card}
              where={find(card.view)?.title ?? card.view}
              isCompared={state.compared.includes(card.id)}
              isFull={state.compared.length >= MOST_COMPARED}
              onCompare={(is) =>
                setState({
                  compared: is ? [...compared.map(({ id }) => id), card.id] : state.compared.filter((id) => id !== card.id),
                })
              }
              onOpen={() => task.run(async () => void (restored.value = await readSession(card)))}
              onChange={(change) => task.run(() => changeSession(card, change))}
              onRemove={() => task.run(async () => setRemoved(await removeSession(card)))}
            />
          ))}
        </ul>
      </>
    );
  }

  return view<State>({
    id: "sessions",
    title: "Sessions",
    icon: "sessions",
    lead: "What was asked before, and what came back.",
    initial: { search: "", compared: [] },
    component: SessionsView,
  });
}

interface EntryProps {
  card: SessionCard;
  where: string;
  isCompared: boolean;
  isFull: boolean;
  onCompare: (is: boolean) => void;
  onOpen: () => void;
  onChange: (change: Partial<SessionCard>) => void;
  onRemove: () => void;
}

function Entry({ card, where, isCompared, isFull, onCompare, onOpen, onChange, onRemove }: EntryProps) {
  const [name, setName] = useState<string | null>(null);
  const called = card.name || card.title || "without a text";
  const rename = (): void => {
    if (name !== null && name.trim() !== card.name) onChange({ name: name.trim() });
    setName(null);
  };
  return (
    <li class="session">
      <input
        type="checkbox"
        checked={isCompared}
        disabled={isFull && !isCompared}
        aria-label={`Compare ${called}`}
        onChange={(event) => onCompare(event.currentTarget.checked)}
      />
      {name === null ? (
        <button type="button" class="session-open" onClick={onOpen}>
          <b>{called}</b>
          <span class="hint">
            {where} · {card.model} · {new Date(card.at).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })}
            {card.name !== "" && ` · ${card.title}`}
          </span>
        </button>
      ) : (
        <form
          onSubmit={(event) => {
            event.preventDefault();
            rename();
          }}
        >
          <input
            type="text"
            ref={(input) => input?.focus()}
            aria-label={`Name of ${called}`}
            value={name}
            onInput={(event) => setName(event.currentTarget.value)}
            onBlur={rename}
            onKeyDown={(event) => {
              if (event.key === "Escape") setName(null);
            }}
          />
        </form>
      )}
      <span class="session-actions">
        <button
          type="button"
          class="quiet"
          aria-pressed={card.isPinned}
          aria-label={`Pin ${called}`}
          onClick={() => onChange({ isPinned: !card.isPinned })}
        >
          <Icon name="pin" />
        </button>
        <button type="button" class="quiet" aria-label={`Name ${called}`} onClick={() => setName(card.name)}>
          <Icon name="pen" />
        </button>
        <button type="button" class="quiet" aria-label={`Remove ${called}`} onClick={onRemove}>
          <Icon name="trash" />
        </button>
      </span>
    </li>
  );
}

interface ComparedProps {
  cards: readonly SessionCard[];
  find: (id: string) => AnyView | undefined;
}

/** Results beside each other, each under what sets its request apart from the others'. */
function Compared({ cards, find }: ComparedProps) {
  const [whole, setWhole] = useState<Session[]>([]);
  const ids = cards.map(({ id }) => id).join();
  useEffect(() => {
    let isWanted = true;
    void Promise.all(cards.map(readSession)).then((read) => isWanted && setWhole(read));
    return () => {
      isWanted = false;
    };
  }, [ids]);
  const differing = useMemo(() => {
    const names = [...new Set(cards.flatMap(({ fields }) => Object.keys(fields)))];
    const isShared = (name: string): boolean =>
      new Set(cards.map(({ fields }) => JSON.stringify(fields[name]))).size === 1;
    return names.filter((name) => !isShared(name));
  }, [ids]);
  return (
    <div class="compared">
      {whole
        .filter(({ id }) => cards.some((card) => card.id === id))
        .map((session) => (
          <Side key={session.id} session={session} view={find(session.view)} differing={differing} />
        ))}
    </div>
  );
}

function Side({ session, view: shownBy, differing }: { session: Session; view: AnyView | undefined; differing: string[] }) {
  const [state, setState] = useState<Fields>({ ...shownBy?.initial, ...session.fields });
  const title = useRef(session.name || session.title).current;
  const Outcome = shownBy?.outcome;
  if (Outcome === undefined) return null;
  return (
    <section aria-label={title}>
      <h2>{title}</h2>
      <dl class="compared-fields">
        <dt>model</dt>
        <dd>{session.model}</dd>
        {differing
          .filter((name) => session.fields[name] !== undefined)
          .map((name) => [<dt key={name}>{name}</dt>, <dd key={`${name}=`}>{String(session.fields[name]) || "–"}</dd>])}
      </dl>
      <Outcome
        result={session.result}
        state={state}
        setState={(change) => setState((old) => ({ ...old, ...change }) as Fields)}
      />
    </section>
  );
}
