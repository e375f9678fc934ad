// Results that this browser keeps, in its own database: what was asked, and what came back.
import { signal } from "@preact/signals";
import type { Fields } from "./address";

/** What the list shows of a kept result. */
export interface SessionCard {
  id: string;
  /** Milliseconds since 1970. */
  at: number;
  view: string;
  model: string;
  /** What was asked, in a few words. */
  title: string;
  /** A name that somebody gave it; empty: none. */
  name: string;
  isPinned: boolean;
  /** The form that asked. */
  fields: Fields;
}

export interface Session extends SessionCard {
  /** What its view shows: plain data. */
  result: unknown;
}

/** Kept results, the newest first; null until the database has answered. */
export const sessions = signal<SessionCard[] | null>(null);
/** What keeps results from being kept, such as a private window. */
export const sessionsError = signal<unknown>(null);

/** A session that its view is to show; the page takes it from here. */
export const restored = signal<Session | null>(null);

/** Results that are kept beside those with a pin or a name: the oldest one goes first. */
const MAX_KEPT = 300;
const CARDS = "cards";
const RESULTS = "results";

let opened: Promise<IDBDatabase> | null = null;

function open(): Promise<IDBDatabase> {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("logsteer", 1);
    request.onupgradeneeded = () => {
      request.result.createObjectStore(CARDS, { keyPath: "id" });
      request.result.createObjectStore(RESULTS);
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

/** Run `work` on both stores; resolves once all of it is written. */
async function transact<T>(
  mode: IDBTransactionMode,
  work: (cards: IDBObjectStore, results: IDBObjectStore) => IDBRequest<T>,
): Promise<T> {
  const transaction = (await open()).transaction([CARDS, RESULTS], mode);
  const request = work(transaction.objectStore(CARDS), transaction.objectStore(RESULTS));
  return new Promise((resolve, reject) => {
    transaction.oncomplete = () => resolve(request.result);
    transaction.onerror = transaction.onabort = () => reject(transaction.error);
  });
}

function sort(cards: SessionCard[]): SessionCard[] {
  return cards.sort((a, b) => Number(b.isPinned) - Number(a.isPinned) || b.at - a.at);
}

/** Read the list; what cannot be read is told in `sessionsError`. */
export async function loadSessions(): Promise<void> {
  try {
    sessions.value = sort(await transact<SessionCard[]>("readonly", (cards) => cards.getAll()));
  } catch (error) {
    sessionsError.value = error;
    sessions.value = [];
  }
}

function isBound(card: SessionCard): boolean {
  return card.isPinned || card.name !== "";
}

function isSame(a: SessionCard, b: SessionCard): boolean {
  return a.view === b.view && a.model === b.model && JSON.stringify(a.fields) === JSON.stringify(b.fields);
}

/** Keep a result. The same request's last one goes, unless somebody has bound it to its place. */
export async function keepSession(given: Omit<Session, "id" | "at" | "name" | "isPinned">): Promise<void> {
  const session: Session = { ...given, id: crypto.randomUUID?.() ?? `${Date.now()}-${Math.random()}`, at: Date.now(), name: "", isPinned: false };
  if (sessions.value === null) await loadSessions();
  const free = (sessions.value ?? []).filter((card) => !isBound(card));
  const gone = [...free.filter((card) => isSame(card, session)), ...free.slice(MAX_KEPT - 1)];
  await put([session], gone.map((card) => card.id));
}

/** Write sessions, and remove others. */
async function put(added: readonly Session[], removed: readonly string[] = []): Promise<void> {
  try {
    await transact("readwrite", (cards, results) => {
      for (const id of removed) {
        cards.delete(id);
        results.delete(id);
      }
      for (const { result, ...card } of added) {
        cards.put(card);
        results.put(result, card.id);
      }
      return cards.count();
    });
    sessionsError.value = null;
  } catch (error) {
    sessionsError.value = error;
    return;
  }
  await loadSessions();
}

/** Change a card's name or pin. */
export async function changeSession(card: SessionCard, change: Partial<SessionCard>): Promise<void> {
  await transact("readwrite", (cards) => cards.put({ ...card, ...change }));
  await loadSessions();
}

/** Remove a session; return it, for `putBack`. */
export async function removeSession(card: SessionCard): Promise<Session> {
  const session = await readSession(card);
  await put([], [card.id]);
  return session;
}

export async function putBack(session: Session): Promise<void> {
  await put([session]);
}

/** Read a session's result. */
export async function readSession(card: SessionCard): Promise<Session> {
  return { ...card, result: await transact("readonly", (_, results) => results.get(card.id)) };
}

const FORMAT = "logsteer-sessions";

/** One file with these sessions and their results. */
export async function exportSessions(cards: readonly SessionCard[]): Promise<Blob> {
  const whole = await Promise.all(cards.map(readSession));
  return new Blob([JSON.stringify({ format: FORMAT, version: 1, sessions: whole })], { type: "application/json" });
}

/** Keep what such a file has; return how many. Throws Error for another file. */
export async function importSessions(file: Blob): Promise<number> {
  let found: { format?: string; sessions?: Session[] } = {};
  try {
    found = JSON.parse(await file.text()) as typeof found;
  } catch {
    // Said below: it is not such a file.
  }
  const isWhole = (session: Session): boolean =>
    typeof session.id === "string" && typeof session.view === "string" && typeof session.at === "number" &&
    typeof session.fields === "object" && session.result !== undefined;
  if (found.format !== FORMAT || !Array.isArray(found.sessions) || !found.sessions.every(isWhole)) {
    throw new Error("This file has no sessions of this page: export some, and import that file.");
  }
  await put(found.sessions);
  return found.sessions.length;
}
