// One piece of work at a time, that can be cancelled: a new one ends the one before it.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";

export interface Task {
  isRunning: boolean;
  error: unknown;
  /** Run `work`; what it throws becomes `error`, unless it was cancelled. */
  run: (work: (signal: AbortSignal) => Promise<void>) => void;
  cancel: () => void;
}

export function useTask(): Task {
  const current = useRef<AbortController | null>(null);
  const [isRunning, setRunning] = useState(false);
  const [error, setError] = useState<unknown>(null);
  const cancel = useCallback(() => {
    current.current?.abort();
    current.current = null;
    setRunning(false);
  }, []);
  const run = useCallback((work: (signal: AbortSignal) => Promise<void>) => {
    current.current?.abort();
    const controller = new AbortController();
    current.current = controller;
    setRunning(true);
    setError(null);
    work(controller.signal)
      .catch((reason: unknown) => {
        if (current.current === controller) setError(reason);
      })
      .finally(() => {
        if (current.current !== controller) return;
        current.current = null;
        setRunning(false);
      });
  }, []);
  useEffect(() => cancel, [cancel]);
  return { isRunning, error, run, cancel };
}

/**
 * Run once something is asked that was not asked before, `delay` milliseconds after the last change.
 *
 * `key` says what is asked; null: nothing can be, yet. The first one runs at once.
 */
export function useAutoRun(key: string | null, run: () => void, delay = 300): void {
  const latest = useRef(run);
  latest.current = run;
  const asked = useRef<string | null>(null);
  useEffect(() => {
    if (key === null || key === asked.current) return undefined;
    const wait = asked.current === null ? 0 : delay;
    const timer = setTimeout(() => {
      asked.current = key;
      latest.current();
    }, wait);
    return () => clearTimeout(timer);
  }, [key, delay]);
}

/** Milliseconds after which what has changed has been sent, where it is sent by itself, and answered. */
const LASTING_MS = 900;

/** Whether this stays so for longer than it takes for a change to be sent by itself. */
export function useStaying(isSo: boolean): boolean {
  const [stays, setStays] = useState(false);
  useEffect(() => {
    setStays(false);
    if (!isSo) return undefined;
    const timer = setTimeout(() => setStays(true), LASTING_MS);
    return () => clearTimeout(timer);
  }, [isSo]);
  return isSo && stays;
}

/** What `make` returns, or what it throws. */
export function attempt<T>(make: () => T): { value: T } | { error: unknown } {
  try {
    return { value: make() };
  } catch (error) {
    return { error };
  }
}
