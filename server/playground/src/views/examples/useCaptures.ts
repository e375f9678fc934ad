// The stored captures: asked for when their view is seen, and those that run again and again.
import { useCallback, useEffect, useState } from "preact/hooks";
import { call, type Schemas } from "../../lib/api";
import { useTask } from "../../lib/task";

export type CaptureCard = Schemas["CaptureCard"];

/** Milliseconds between two looks at captures that run, while somebody looks. */
const LOOK_MS = 2000;

export function useCaptures(isShown: boolean) {
  /** null until the server has said which there are. */
  const [cards, setCards] = useState<CaptureCard[] | null>(null);
  const [lookError, setLookError] = useState<unknown>(null);
  const task = useTask();
  const refresh = useCallback(async (signal?: AbortSignal): Promise<void> => {
    setCards((await call("get", "/captures", undefined, { signal })).captures);
    setLookError(null);
  }, []);
  const change = useCallback((next: CaptureCard): void => {
    setCards((old) => [...(old ?? []).filter(({ name }) => name !== next.name), next]);
  }, []);
  useEffect(() => {
    if (isShown) task.run(refresh);
  }, [isShown]);
  const running = (cards ?? []).filter(({ state }) => state === "running").map(({ name }) => name);
  useEffect(() => {
    if (!isShown || running.length === 0) return undefined;
    const work = new AbortController();
    let timer = 0;
    const look = async (): Promise<void> => {
      try {
        const options = { signal: work.signal };
        if (!document.hidden) {
          const ask = (name: string) => call("get", "/captures/{name}", undefined, { ...options, path: { name } });
          (await Promise.all(running.map(ask))).forEach(change);
          setLookError(null);
        }
      } catch {
        // One of them may be gone; where the server is, the list cannot be had either.
        await refresh(work.signal).catch((error: unknown) => work.signal.aborted || setLookError(error));
      }
      if (!work.signal.aborted) timer = window.setTimeout(() => void look(), LOOK_MS);
    };
    timer = window.setTimeout(() => void look(), LOOK_MS);
    return () => {
      work.abort();
      clearTimeout(timer);
    };
  }, [isShown, running.join()]);
  return { cards, error: task.error ?? lookError, refresh, change, retry: () => task.run(refresh) };
}
