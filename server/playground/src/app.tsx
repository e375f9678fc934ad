// The page: its head, the tabs, and the view that the address names.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { parseFields, readAddress, writeAddress, type Fields } from "./lib/address";
import {
  chosenModel,
  currentModel,
  isLockedOut,
  models,
  modelsError,
  watchModels,
} from "./lib/models";
import { keepSession, restored, type Session } from "./lib/sessions";
import type { AnyView } from "./lib/view";
import { HelpDialog } from "./parts/HelpDialog";
import { Header } from "./parts/Header";
import { KeyDialog } from "./parts/KeyDialog";
import { ErrorNote } from "./parts/controls";
import { Icon } from "./parts/Icon";
import { VIEWS } from "./views";

type States = Record<string, Fields>;

/** The session that a view was opened from. */
interface Opened {
  session: Session;
  /** Whether the form is still as it was kept. */
  isUntouched: boolean;
}

const FIRST = VIEWS[0] as AnyView;

/** Read which view the address names, and its state; the model goes where models are kept. */
function readPlace(): { id: string; fields: Fields } {
  const place = readAddress(location.hash);
  if (place.view === "long") {
    // A link from before long texts were read under Text.
    place.view = "text";
    place.fields.set("read", "windows");
  }
  const found = VIEWS.find((view) => view.id === place.view) ?? FIRST;
  chosenModel.value = place.fields.get("model") ?? chosenModel.value;
  return { id: found.id, fields: parseFields(found.initial, place.fields) };
}

export function App() {
  const [id, setId] = useState(() => readPlace().id);
  const [states, setStates] = useState<States>(() => {
    const place = readPlace();
    const initial = VIEWS.map((view) => [view.id, view.initial] as const);
    return { ...Object.fromEntries(initial), [place.id]: place.fields };
  });
  const [seen, setSeen] = useState<ReadonlySet<string>>(() => new Set([id]));
  const written = useRef(location.hash);
  const [omitted, setOmitted] = useState<string[]>([]);
  const [opened, setOpened] = useState<Record<string, Opened>>({});
  const model = currentModel.value;

  // The address follows the state; a link that is opened here, or a step back, goes the other way.
  useEffect(() => {
    const current = VIEWS.find((view) => view.id === id) ?? FIRST;
    const shared = { model: chosenModel.value };
    const address = writeAddress(id, states[id] ?? current.initial, current.initial, shared);
    setOmitted(address.omitted);
    if (address.hash === written.current) return;
    const isOtherView = readAddress(written.current).view !== id;
    written.current = address.hash;
    history[isOtherView ? "pushState" : "replaceState"](null, "", address.hash);
  }, [id, states, chosenModel.value]);

  useEffect(() => {
    document.title = `${(VIEWS.find((view) => view.id === id) ?? FIRST).title} · logsteer`;
  }, [id]);

  useEffect(() => {
    const follow = (): void => {
      if (location.hash === written.current) return;
      written.current = location.hash;
      const place = readPlace();
      setStates((old) => ({ ...old, [place.id]: place.fields }));
      show(place.id);
    };
    addEventListener("hashchange", follow);
    addEventListener("popstate", follow);
    return () => {
      removeEventListener("hashchange", follow);
      removeEventListener("popstate", follow);
    };
  }, []);

  useEffect(() => {
    const session = restored.value;
    const view = VIEWS.find((one) => one.id === session?.view);
    if (session === null || view === undefined) return;
    restored.value = null;
    chosenModel.value = session.model;
    setStates((old) => ({ ...old, [view.id]: { ...view.initial, ...session.fields } }));
    setOpened((old) => ({ ...old, [view.id]: { session, isUntouched: true } }));
    show(view.id);
  }, [restored.value]);

  const touch = (view: string): void =>
    setOpened((old) => {
      const one = old[view];
      return one?.isUntouched ? { ...old, [view]: { ...one, isUntouched: false } } : old;
    });

  const show = useCallback((next: string) => {
    setSeen((old) => new Set(old).add(next));
    setId(next);
  }, []);

  return (
    <>
      <a class="skip" href="#main" onClick={(event) => {
        event.preventDefault();
        document.getElementById("main")?.focus();
      }}>
        Skip to the view
      </a>
      <Header />
      <Tabs id={id} onShow={show} />
      <main id="main" tabIndex={-1}>
        <ErrorNote error={modelsError.value} />
        {isLockedOut.value && (
          <button type="button" class="run" onClick={() => void watchModels()}>
            <Icon name="key" /> Give a key
          </button>
        )}
        {model !== null && model.state !== "ready" && (
          <p class="note" role="status">
            {model.id} is {model.state}: {model.detail}
          </p>
        )}
        {VIEWS.map(
          (view) =>
            seen.has(view.id) && (
              <Panel
                key={view.id}
                view={view}
                isShown={view.id === id}
                state={states[view.id] ?? view.initial}
                opened={opened[view.id] ?? null}
                onChange={(change) => {
                  touch(view.id);
                  setStates((old) => ({
                    ...old,
                    [view.id]: { ...(old[view.id] ?? view.initial), ...change } as Fields,
                  }));
                }}
              />
            ),
        )}
        {omitted.length > 0 && (
          <p class="hint footnote">
            The address leaves out {omitted.join(" and ")}: too long for a link.
          </p>
        )}
      </main>
      <footer>
        <p>
          Numbers are exact: natural logarithms over the whole vocabulary. Everything here is also
          an endpoint: <a href="docs">API</a>.
        </p>
      </footer>
      <KeyDialog />
      <HelpDialog />
    </>
  );
}

interface TabsProps {
  id: string;
  onShow: (id: string) => void;
}

function Tabs({ id, onShow }: TabsProps) {
  const list = useRef<HTMLDivElement>(null);
  useEffect(() => {
    document.getElementById(`tab-${id}`)?.scrollIntoView({ block: "nearest", inline: "nearest" });
  }, [id]);
  const move = (event: KeyboardEvent): void => {
    const at = VIEWS.findIndex((view) => view.id === id);
    const last = VIEWS.length - 1;
    const next = {
      ArrowRight: at === last ? 0 : at + 1,
      ArrowLeft: at === 0 ? last : at - 1,
      Home: 0,
      End: last,
    }[event.key];
    const chosen = next === undefined ? undefined : VIEWS[next];
    if (chosen === undefined) return;
    event.preventDefault();
    onShow(chosen.id);
    list.current?.querySelector<HTMLElement>(`#tab-${chosen.id}`)?.focus();
  };
  return (
    <nav class="tabs-bar" aria-label="Views">
      <div class="tabs" role="tablist" aria-label="Views" ref={list} onKeyDown={move}>
        {VIEWS.map((view) => (
          <button
            key={view.id}
            type="button"
            role="tab"
            id={`tab-${view.id}`}
            aria-selected={view.id === id}
            aria-controls={`view-${view.id}`}
            tabIndex={view.id === id ? 0 : -1}
            onClick={() => onShow(view.id)}
          >
            <Icon name={view.icon} />
            <span>{view.title}</span>
          </button>
        ))}
      </div>
    </nav>
  );
}

interface PanelProps {
  view: AnyView;
  state: Fields;
  isShown: boolean;
  opened: Opened | null;
  onChange: (change: Partial<Fields>) => void;
}

/** What a view shows, and which form asked for it. */
interface Latest {
  since: Session | null;
  result: unknown;
  /** null: it is not whole yet. */
  fields: Fields | null;
  model: string;
}

function Panel({ view, state, isShown, opened, onChange }: PanelProps) {
  const Component = view.component;
  const session = opened?.session ?? null;
  const [latest, setLatest] = useState<Latest>({ since: null, result: null, fields: null, model: "" });
  const isLatest = session === null || latest.since === session;
  const onResult = (result: unknown, asked?: { fields: Fields; title: string }): void => {
    const model = currentModel.value?.id;
    setLatest({ since: session, result, fields: asked?.fields ?? null, model: model ?? "" });
    if (asked && model !== undefined) void keepSession({ ...asked, view: view.id, model, result });
  };
  const shown = isLatest ? latest : session;
  const isStale =
    view.asks !== undefined && shown.fields !== null &&
    (shown.model !== currentModel.value?.id ||
      JSON.stringify(view.asks(shown.fields)) !== JSON.stringify(view.asks(state)));
  return (
    <section
      id={`view-${view.id}`}
      class="view"
      role="tabpanel"
      aria-labelledby={`tab-${view.id}`}
      hidden={!isShown}
    >
      <h1>{view.lead}</h1>
      <Component
        state={state}
        setState={onChange}
        model={currentModel.value}
        models={models.value}
        isShown={isShown}
        result={shown.result}
        onResult={onResult}
        isKept={!isLatest && opened?.isUntouched === true}
        isStale={isStale}
      />
    </section>
  );
}
